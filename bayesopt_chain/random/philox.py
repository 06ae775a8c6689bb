r"""The counter-based stream: Philox-4x32-10 (Salmon et al., 2011) on the counter (block, draw, step low, step high), and
Box-Muller.

Nothing synchronises, nothing has a state, and every back end (eager, compiled, captured, under ``vmap``, the Triton kernels)
computes the same integers. A draw has a number, and so has each of its elements, in row-major order of the leaf. What is drawn
is always a run of neighbouring elements: a leaf is the run from 0 to its size, and the part that a rank holds of a sharded leaf
is some runs of it. So a shard's noise is cut from the noise of the leaf, and no rank asks another one.

One Philox block is four words, hence four normals:

    normals          element ``e`` is normal ``e >> 6 & 3`` of block ``64 (e >> 8) + (e & 63)``
    uniforms         element ``e`` is word ``e & 3`` of block ``e >> 2``

Runs of 64 neighbouring normals come from 64 neighbouring blocks, which is what vector units and warps want. No element
depends on how many there are. A block's number has 32 bits, so that elements from ``2^34`` on have no number.

Normals are one operation, ``torch.ops.bayesopt_chain.philox_normals``: on a CPU a C++ kernel
(:mod:`bayesopt_chain.random.philox_cpu`), on a CUDA device a Triton kernel (:mod:`bayesopt_chain.random.philox_cuda`) for
float32. Where neither is to be had, tensor operations do the same (:func:`in_tensors`). Uniforms are these tensor
operations everywhere, and one operation for compiled graphs too (``philox_uniforms``), since torch's compiler vectorises their
integers wrongly on some processors.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain.random.philox_cpu import normals_kernel
from bayesopt_chain.tracing import is_traced

RUN = 64  # neighbouring elements that come from neighbouring blocks
LARGEST = 2**34  # elements of a draw: four in each of 2^32 blocks

Runs = tuple[tuple[int, int], ...]  # (first element, length) of runs of a leaf's elements, ascending

_MASK = 0xFFFFFFFF
# elements that tensor operations treat at once: few calls for short runs, and long runs stay in cache
_TOGETHER = 2**15
_functions: Any = torch  # ``broadcast_shapes`` carries no types


class Elements(NamedTuple):
    """Which elements of which draws: run ``i`` is ``lengths[i]`` elements of draw ``draws[i]`` from ``starts[i]`` on.

    ``starts`` is empty where every run starts at 0, as whole leaves do: integers that an operation is given are copied at every
    call, and these would be zeros. ``sizes`` are the numbers of elements of the leaves, all runs of a leaf together.
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    draws: tuple[int, ...]
    sizes: tuple[int, ...]


@lru_cache(maxsize=256)
def parts_of_leaves(runs: tuple[Runs, ...], draws: tuple[int, ...]) -> Elements:
    """These runs of each leaf, whose draws have these numbers (32 bits each); a leaf without runs is empty here.

    A whole leaf is the one run from 0 to its size. Results are cached, since a matrix that is cut by columns has a run for each
    of its rows, and every step asks for the same.

    Raises:
        ValueError: a run that ends past ``2^34``, since the counter has no numbers for its elements.

    Example:
        >>> parts_of_leaves((((0, 3), (10, 2)), ()), (7, 8))
        Elements(starts=(0, 10), lengths=(3, 2), draws=(7, 7), sizes=(5, 0))
    """
    if (size := max([start + length for each in runs for start, length in each], default=0)) > LARGEST:
        raise ValueError(
            f"params: a leaf has {size} elements, and the counter-based stream numbers 2^34: the noise of further ones would "
            "repeat that of the first. Split the leaf"
        )
    flat = [(start, length, draw) for each, draw in zip(runs, draws, strict=True) for start, length in each]
    starts, lengths, numbers = (tuple([run[i] for run in flat]) for i in range(3))
    sizes = tuple([sum(length for _, length in each) for each in runs])
    return Elements(starts if any(starts) else (), lengths, numbers, sizes)


def draw_elements(
    key: Tensor, step: Tensor, elements: Elements, dtype: torch.dtype, kind: str = "gaussian"
) -> list[Tensor]:
    """Draw these elements, one tensor ``[*chains, size]`` for each leaf.

    Args:
        key: the key of the stream, int64, 0-d or with an axis for chains.
        step: the number of the step, likewise.
        elements: what is drawn, from :func:`parts_of_leaves`.
        dtype: the dtype of the result. Normals are computed in float64 for float64, else in float32.
        kind: ``"gaussian"`` or ``"uniform"`` (on [0, 1)).

    Example:
        >>> import torch
        >>> key, step = torch.tensor(3), torch.tensor(0)
        >>> (leaf,) = draw_elements(key, step, parts_of_leaves((((0, 5),),), (1,)), torch.float64)
        >>> (part,) = draw_elements(key, step, parts_of_leaves((((1, 3),),), (1,)), torch.float64)
        >>> torch.equal(part, leaf[1:4])
        True
    """
    real = torch.float64 if dtype == torch.float64 else torch.float32
    ops = torch.ops.bayesopt_chain
    draw = ops.philox_normals.default if kind == "gaussian" else ops.philox_uniforms.default
    flat: Tensor = draw(key, step, *elements[:3], real).to(dtype)
    parts: Sequence[Tensor] = (flat,) if len(elements.sizes) == 1 else flat.split_with_sizes(elements.sizes, -1)
    return [x.clone() for x in parts] if is_traced() else [*parts]  # in a graph a write to one would rewrite them all


@cache
def has_triton() -> bool:
    """Whether Triton's kernels can be compiled."""
    return importlib.util.find_spec("triton") is not None


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> list[Tensor]:
    """Philox-4x32-10 on int64 tensors that hold 32-bit words; returns four words of the broadcast shape.

    The multipliers exceed 2^31, so that a product with a word may overflow int64, which compilers of C++ take as leave to
    do anything. With ``M - 2^32`` in place of ``M`` none does: the low word is the same, the high word lacks ``c``.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * (0xD2511F53 - 2**32), c2 * (0xCD9E8D57 - 2**32)
        c0, c1, c2, c3 = ((p1 >> 32) + c2) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) + c0) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return [c0, c1, c2, c3]


def box_muller(first: Tensor, second: Tensor, real: torch.dtype) -> tuple[Tensor, Tensor]:
    r"""Two normals from two 32-bit words: ``sqrt(-2 log u) (cos, sin)(pi / 2 (q + f))``.

    ``u`` is the midpoint of one of 2^23 cells, exact in float32; ``q`` is the top two bits of the second word and ``f``, in
    (-1/2, 1/2), its next 23. The quarter turns are exact, and cosines see small angles only, so that float32 and
    float64 agree to 1e-6 on every back end.
    """
    u = ((first >> 9).to(real) + 0.5) * 2.0**-23
    angle = (((second & 0x3FFFFFFF) >> 7).to(real) - (2.0**22 - 0.5)) * (math.pi * 2.0**-24)
    radius = (-2.0 * u.log()).sqrt()
    c, s = radius * angle.cos(), radius * angle.sin()
    odd, half = (second >> 30 & 1) == 1, (second >> 31 & 1) == 1
    x, y = torch.where(odd, -s, c), torch.where(odd, c, s)
    return torch.where(half, -x, x), torch.where(half, -y, y)


def in_tensors(key: Tensor, step: Tensor, elements: Elements, real: torch.dtype, kind: str = "gaussian") -> Tensor:
    """The elements by tensor operations, for any device: ``[*chains, elements]``, leaf behind leaf.

    Blocks come in groups whose elements are neighbours: 64 blocks with 256 normals, or one with four uniforms. Every run
    is computed from the group of its first element to that of its last, all runs at once, and its elements are picked out.
    """
    starts, lengths, draws, _ = elements
    if len(lengths) > 1 and sum(lengths) > _TOGETHER:
        ends = (0, len(lengths) // 2), (len(lengths) // 2, len(lengths))
        halves = [Elements(starts[a:b], lengths[a:b], draws[a:b], ()) for a, b in ends]
        return torch.cat([in_tensors(key, step, half, real, kind) for half in halves], dim=-1)
    group, made = RUN if kind == "gaussian" else 1, 0
    blocks, numbers, index = list[Tensor](), list[Tensor](), list[Tensor]()
    for start, length, draw in zip(starts or (0,) * len(lengths), lengths, draws):
        first, end = start // (4 * group) * group, -(-(start + length) // (4 * group)) * group
        blocks.append(torch.arange(first, end, dtype=torch.int64, device=key.device))
        numbers.append(torch.full_like(blocks[-1], draw))
        index.append(torch.arange(length, device=key.device) + (start + 4 * (made - first)))
        made += end - first
    if not made:
        return _room(key, step, (), (), (), real)
    key, step = (x.unsqueeze(-1) if x.ndim else x for x in (key, step))
    counter = (torch.cat(blocks), torch.cat(numbers), step & _MASK, step >> 32 & _MASK)
    words = philox(counter, (key & _MASK, key >> 32 & _MASK))
    if kind == "gaussian":
        words = [*box_muller(words[0], words[1], real), *box_muller(words[2], words[3], real)]
    else:
        words = [(word >> 8).to(real) * 2.0**-24 for word in words]  # uniforms, exact in float32
    every = torch.stack([word.unflatten(-1, (-1, group)) for word in words], dim=-2).flatten(-3)
    if len(lengths) == 1:  # of one chain a view, which a long leaf has for nothing
        return every.narrow(-1, sum(starts) % (4 * group), lengths[0]).contiguous()
    return every.index_select(-1, torch.cat(index))


_library: Any = torch.library  # its functions carry no types
_OPS: Any = _library.Library("bayesopt_chain", "FRAGMENT")


def _room(
    key: Tensor, step: Tensor, starts: Sequence[int], lengths: Sequence[int], draws: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """An empty tensor for the elements; where keys or steps have axes for chains, it has them in front."""
    chains: tuple[int, ...] = _functions.broadcast_shapes(key.shape, step.shape) if key.ndim or step.ndim else ()
    return torch.empty(*chains, sum(lengths), dtype=dtype, device=key.device)


def _normals(
    key: Tensor, step: Tensor, starts: Sequence[int], lengths: Sequence[int], draws: Sequence[int], dtype: torch.dtype
) -> Tensor:
    elements = Elements(tuple(starts), tuple(lengths), tuple(draws), ())
    fill: Callable[..., None] | None = None
    if not key.is_cuda:
        fill = normals_kernel()
    elif dtype == torch.float32 and has_triton():
        from bayesopt_chain.random.philox_cuda import fill
    if fill is None:
        return in_tensors(key, step, elements, dtype)
    out = _room(key, step, starts, lengths, draws, dtype)
    if key.ndim or step.ndim:
        key, step = (x.expand(out.shape[:-1]).reshape(-1) for x in (key, step))
    fill(out, key, step, *elements[:3])
    return out


def _uniforms(
    key: Tensor, step: Tensor, starts: Sequence[int], lengths: Sequence[int], draws: Sequence[int], dtype: torch.dtype
) -> Tensor:
    return in_tensors(key, step, Elements(tuple(starts), tuple(lengths), tuple(draws), ()), dtype, "uniform")


def _register(name: str, function: Callable[..., Tensor]) -> None:
    """Define an operation for every device, for tensors without numbers (fake tensors, ``meta``), and under ``vmap``."""

    def stacked(
        info: Any, in_dims: tuple[int | None, ...], key: Tensor, step: Tensor, *rest: Any
    ) -> tuple[Tensor, int]:
        """One call for all lanes of ``vmap``; the lanes' axis comes last in the keys."""
        key, step = (x.unsqueeze(-1) if d is None else x.movedim(d, -1) for x, d in zip((key, step), in_dims))
        out: Tensor = getattr(torch.ops.bayesopt_chain, name)(key, step, *rest)
        return out, out.ndim - 2

    _OPS.define(
        f"{name}(Tensor key, Tensor step, int[] starts, int[] lengths, int[] draws, ScalarType dtype) -> Tensor"
    )
    _OPS.impl(name, function, "CompositeExplicitAutograd")
    _library.register_fake(f"bayesopt_chain::{name}", _room, lib=_OPS)
    _library.register_vmap(f"bayesopt_chain::{name}", stacked, lib=_OPS)


_register("philox_normals", _normals)
_register("philox_uniforms", _uniforms)
