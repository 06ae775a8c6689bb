r"""The counter-based stream on some elements of a leaf: what a rank draws that holds a shard of it.

A leaf's elements are numbered in row-major order of the *whole* leaf. A piece is some of them, given as runs
``(start, length)`` of these numbers, and element ``e`` of a draw is

    normals          normal ``e >> 6 & 3`` of block ``64 (e >> 8) + (e & 63)``
    other variables  word ``e & 3`` of block ``e >> 2``

of :mod:`bayesopt_chain.random.philox`, wherever it is held. So the pieces of a draw are cut from the same draw, and no
rank asks another one; the whole leaf is the run ``(0, size)``. A block's number has 32 bits: elements from ``2^34`` on
have none.

torch's generator gives its numbers one after the other and knows no element's number: a piece of its draw is refused.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain.random.philox import box_muller, has_triton, philox, require_in_range, three_point
from bayesopt_chain.random.philox_cpu import pieces_kernel

Runs = tuple[tuple[int, int], ...]  # (start, length) of consecutive elements, ascending

_MASK = 0xFFFFFFFF


def draw_pieces(
    key: Tensor,
    step: Tensor,
    pieces: Sequence[Runs],
    draws: Sequence[int],
    dtype: torch.dtype,
    *,
    kind: str = "gaussian",
    stream: str = "philox",
) -> list[Tensor]:
    """The elements of these pieces of draws, each piece as one tensor ``[*chains, elements]``.

    Args:
        key: of the stream, int64, 0-d or with an axis for chains; likewise ``step``, the number of the step.
        pieces: for each draw the runs of elements that are wanted, none for an empty shard.
        draws: the number of each draw (:func:`bayesopt_chain.random.stream.draw_number`).
        dtype: of the result. Normals are computed in float64 for float64, else in float32.
        kind: ``"gaussian"``, ``"uniform"``, ``"three_point"`` or ``"rademacher"``.
        stream: must be ``"philox"``.

    Raises:
        ValueError: another stream; a run that is empty, negative, not behind the one before, or ends past ``2^34``.
    """
    if stream != "philox":
        raise ValueError(
            f"stream={stream!r}: torch's generator draws the elements of a leaf one after the other, so that ranks "
            'with shards of it would all draw the first ones; take bc.with_stream(tx, "philox")'
        )
    starts, lengths, numbers = flat_runs(tuple(pieces), tuple(draws))
    if kind == "gaussian":
        real = torch.float64 if dtype == torch.float64 else torch.float32
        out: Tensor = torch.ops.bayesopt_chain.philox_pieces(key, step, starts, lengths, numbers, real)
    else:
        out = _others(kind, key, step, starts, lengths, numbers)
    sizes = [sum(length for _, length in runs) for runs in pieces]
    return list(torch.split(out.to(dtype), sizes, dim=-1))


@lru_cache(maxsize=256)
def flat_runs(pieces: tuple[Runs, ...], draws: tuple[int, ...]) -> tuple[list[int], list[int], list[int]]:
    """Start and length of every run, and the number of its draw.

    Raises:
        ValueError: as :func:`draw_pieces`.
    """
    for runs in pieces:
        _require_ascending(runs)
    flat = [(start, length, draw) for runs, draw in zip(pieces, draws, strict=True) for start, length in runs]
    starts, lengths, numbers = ([run[i] for run in flat] for i in range(3))
    return starts, lengths, numbers


def _require_ascending(runs: Runs) -> None:
    end = 0
    for start, length in runs:
        if start < end or length < 1:
            raise ValueError(f"pieces: runs must be ascending (start, length) with length at least 1, got {runs[:4]}")
        end = start + length
    require_in_range(end, "pieces: a leaf")


def in_tensors(
    key: Tensor, step: Tensor, starts: Sequence[int], lengths: Sequence[int], draws: Sequence[int], real: torch.dtype
) -> Tensor:
    """Normals by tensor operations, for any device; one row for each key and step."""
    element = _elements(starts, lengths, key.device)
    words = _words(key, step, (element >> 8 << 6) + (element & 63), _numbers(draws, lengths, key.device))
    lane = (element >> 6 & 3).expand_as(words[0])
    first, second = (torch.where(lane < 2, words[i], words[i + 2]) for i in range(2))
    x, y = box_muller(first, second, real)
    return torch.where(lane & 1 == 1, y, x)


def _others(
    kind: str, key: Tensor, step: Tensor, starts: Sequence[int], lengths: Sequence[int], draws: Sequence[int]
) -> Tensor:
    """Variables of another kind than normal, in float64."""
    element = _elements(starts, lengths, key.device)
    words = _words(key, step, element >> 2, _numbers(draws, lengths, key.device))
    lane = (element & 3).expand_as(words[0])
    word = torch.where(lane < 2, torch.where(lane == 0, words[0], words[1]), torch.where(lane == 2, words[2], words[3]))
    if kind == "uniform":
        return (word >> 8).to(torch.float64) * 2.0**-24
    if kind == "three_point":
        return three_point(word * 6 >> 32)
    return (word & 2).to(torch.float64) - 1.0


def _elements(starts: Sequence[int], lengths: Sequence[int], device: torch.device) -> Tensor:
    """The numbers of all elements of the runs."""
    length = torch.tensor(list(lengths), dtype=torch.int64, device=device)
    start = torch.tensor(list(starts), dtype=torch.int64, device=device)
    before = length.cumsum(0) - length
    return torch.arange(sum(lengths), dtype=torch.int64, device=device) + (start - before).repeat_interleave(length)


def _numbers(draws: Sequence[int], lengths: Sequence[int], device: torch.device) -> Tensor:
    """The number of the draw that each element belongs to."""
    length = torch.tensor(list(lengths), dtype=torch.int64, device=device)
    return torch.tensor(list(draws), dtype=torch.int64, device=device).repeat_interleave(length)


def _words(key: Tensor, step: Tensor, block: Tensor, draw: Tensor) -> list[Tensor]:
    """Four words of each block, one row for each key and step."""
    key, step = key[..., None], step[..., None]
    none = 0 * step
    counter = (block + none, draw + none, (step & _MASK) + 0 * block, (step >> 32 & _MASK) + 0 * block)
    return philox(counter, (key & _MASK, key >> 32 & _MASK))


_library: Any = torch.library  # its functions carry no types
_functions: Any = torch
_OPS: Any = _library.Library("bayesopt_chain", "FRAGMENT")
_OPS.define(
    "philox_pieces(Tensor key, Tensor step, int[] starts, int[] lengths, int[] draws, ScalarType dtype) -> Tensor"
)


def _fresh(
    key: Tensor, step: Tensor, starts: Sequence[int], lengths: Sequence[int], draws: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Room for the elements one behind the other; keys or steps with further axes, one for each chain, give it these axes."""
    chains: tuple[int, ...] = _functions.broadcast_shapes(key.shape, step.shape) if key.ndim or step.ndim else ()
    return torch.empty(*chains, sum(lengths), dtype=dtype, device=key.device)


def _on_cpu(
    key: Tensor, step: Tensor, starts: Sequence[int], lengths: Sequence[int], draws: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """One call of the C++ kernel, or tensor operations where nothing compiles."""
    fill = pieces_kernel()
    if fill is None:
        return in_tensors(key, step, starts, lengths, draws, dtype)
    out = _fresh(key, step, starts, lengths, draws, dtype)
    if key.ndim or step.ndim:
        key, step = (x.expand(out.shape[:-1]).reshape(-1) for x in (key, step))
    integers = ctypes.c_int64 * len(starts)
    fill(out, key, step, integers(*starts), integers(*lengths), integers(*draws), len(starts))
    return out


def _on_cuda(
    key: Tensor, step: Tensor, starts: Sequence[int], lengths: Sequence[int], draws: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """The Triton kernel in float32; tensor operations in float64, or where there is no Triton."""
    if dtype != torch.float32 or not has_triton():
        return in_tensors(key, step, starts, lengths, draws, dtype)
    from bayesopt_chain.random.philox_cuda import fill_pieces

    out = _fresh(key, step, starts, lengths, draws, dtype)
    if key.ndim or step.ndim:
        key, step = (x.expand(out.shape[:-1]).reshape(-1) for x in (key, step))
    fill_pieces(out, key, step, starts, lengths, draws)
    return out


_OPS.impl("philox_pieces", _on_cpu, "CPU")
_OPS.impl("philox_pieces", _on_cuda, "CUDA")
_library.register_fake("bayesopt_chain::philox_pieces", _fresh, lib=_OPS)


def _for_each_lane(
    info: Any,
    in_dims: tuple[int | None, ...],
    key: Tensor,
    step: Tensor,
    starts: Sequence[int],
    lengths: Sequence[int],
    draws: Sequence[int],
    dtype: torch.dtype,
) -> tuple[Tensor, int]:
    """One call for all lanes of ``vmap``; the lanes' axis comes last in the keys."""
    key, step = (x.unsqueeze(-1) if d is None else x.movedim(d, -1) for x, d in zip((key, step), in_dims))
    out: Tensor = torch.ops.bayesopt_chain.philox_pieces(key, step, starts, lengths, draws, dtype)
    return out, out.ndim - 2


_library.register_vmap("bayesopt_chain::philox_pieces", _for_each_lane, lib=_OPS)
