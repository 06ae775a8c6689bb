r"""The counter-based stream: Philox-4x32-10 (Salmon et al., 2011) on the counter (block, draw, step low, step high), and
Box-Muller.

Nothing synchronises, nothing has a state, and every back end (eager, compiled, captured, under ``vmap``, the Triton kernels)
computes the same integers. A CPU has a C++ kernel for its normals (:mod:`bayesopt_chain.random.philox_cpu`), which is one
operation for all leaves, a CUDA device a Triton kernel (:mod:`bayesopt_chain.random.philox_cuda`); float64 there is tensor
operations.

One Philox block is four words, hence four normals. Element ``256 q + 64 l + r`` of a draw (``0 <= l < 4``, ``0 <= r < 64``)
is normal ``l`` of block ``64 q + r``: runs of 64 neighbours come from 64 neighbouring blocks, which is what vector units
and warps want, and no element depends on how many there are.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain.random.philox_cpu import normals_kernel
from bayesopt_chain.tracing import is_traced

RUN = 64  # neighbouring elements that come from neighbouring blocks

_MASK = 0xFFFFFFFF
_SQRT3 = 3.0**0.5
_functions: Any = torch  # ``broadcast_shapes`` carries no types


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


def _words(key: Tensor, step: Tensor, block: Tensor, draw: int) -> list[Tensor]:
    """Four words of each block; key and step broadcast with the blocks."""
    counter = (block & _MASK, draw + 0 * block, (step & _MASK) + 0 * block, (step >> 32 & _MASK) + 0 * block)
    return philox(counter, (key & _MASK, key >> 32 & _MASK))


def philox_normal(key: Tensor, step: Tensor, size: int, draw: int, dtype: torch.dtype) -> Tensor:
    """``size`` standard normals of the stream (key, step, draw), computed in float32 or float64."""
    return philox_normals(key, step, [size], [draw], dtype)[0]


def philox_normals(
    key: Tensor, step: Tensor, sizes: Sequence[int], draws: Sequence[int], dtype: torch.dtype
) -> Sequence[Tensor]:
    """Normals of the draws of these numbers (32 bits) and sizes.

    On a CPU one call of the C++ kernel, on a CUDA device one launch a draw; a traced draw of a few elements on a CPU goes into
    the kernels that use it.
    """
    real = torch.float64 if dtype == torch.float64 else torch.float32
    if not _has_kernel(key, real) or (key.device.type == "cpu" and is_traced() and sum(sizes) <= RUN):
        return [in_tensors(key, step, n, draw, real).to(dtype) for n, draw in zip(sizes, draws)]
    flat = torch.ops.bayesopt_chain.philox_normals(key, step, sizes, draws, real).to(dtype)
    pieces = torch.split(flat, list(sizes)) if len(sizes) > 1 else (flat,)
    return [x.clone() for x in pieces] if is_traced() else pieces  # in a graph a write to one would rewrite them all


def _has_kernel(key: Tensor, real: torch.dtype) -> bool:
    """Whether the normals are one operation where the key is."""
    return key.device.type == "cpu" or (key.device.type == "cuda" and real == torch.float32 and has_triton())


@cache
def has_triton() -> bool:
    """Whether Triton's kernels can be compiled."""
    return importlib.util.find_spec("triton") is not None


def in_tensors(key: Tensor, step: Tensor, size: int, draw: int, real: torch.dtype) -> Tensor:
    """Normals by tensor operations, for any device; one row for each key and step."""
    key, step = key[..., None, None], step[..., None, None]
    rows, run = (1, size) if size <= RUN else (-(-size // (4 * RUN)), RUN)
    lanes = 1 if size <= RUN else 4
    block = torch.arange(rows * run, dtype=torch.int64, device=key.device).view(rows, run)
    words = _words(key, step, block, draw)
    z = [x for i in range(0, lanes, 2) for x in box_muller(words[i], words[i + 1], real)][:lanes]
    return torch.stack(z, dim=-2).flatten(-3)[..., :size] if lanes > 1 else z[0].flatten(-2)


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


def philox_other(kind: str, key: Tensor, step: Tensor, size: int, draw: int, dtype: torch.dtype) -> Tensor:
    """``size`` variables of another kind than normal, of the stream (key, step, draw)."""
    block = torch.arange((size + 3) // 4, dtype=torch.int64, device=key.device)
    words = torch.stack(_words(key, step, block, draw), dim=-1).flatten()[:size]
    if kind == "uniform":
        return ((words >> 8).to(torch.float64) * 2.0**-24).to(dtype)
    if kind == "three_point":
        return three_point(words * 6 >> 32).to(dtype)
    return (words & 2).to(dtype) - 1.0


def three_point(faces: Tensor) -> Tensor:
    """``-sqrt(3), sqrt(3), 0, 0, 0, 0`` for the six faces of a die."""
    return _SQRT3 * ((faces == 1).to(torch.float64) - (faces == 0).to(torch.float64))


_library: Any = torch.library  # its functions carry no types
_OPS: Any = _library.Library("bayesopt_chain", "FRAGMENT")
_OPS.define("philox_normals(Tensor key, Tensor step, int[] sizes, int[] draws, ScalarType dtype) -> Tensor")
_OPS.define("philox_normals_(Tensor(a!) out, Tensor key, Tensor step, int[] sizes, int[] draws) -> ()")


def _fresh_normals(key: Tensor, step: Tensor, sizes: Sequence[int], draws: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The draws one behind the other; keys or steps with further axes, one for each chain, give the result these axes."""
    chains: tuple[int, ...] = _functions.broadcast_shapes(key.shape, step.shape)
    return torch.empty(*chains, sum(sizes), dtype=dtype, device=key.device)


def _drawn_normals(key: Tensor, step: Tensor, sizes: Sequence[int], draws: Sequence[int], dtype: torch.dtype) -> Tensor:
    out = _fresh_normals(key, step, sizes, draws, dtype)
    _fill_with_normals(out, key, step, sizes, draws)
    return out


def _fill_with_normals(out: Tensor, key: Tensor, step: Tensor, sizes: Sequence[int], draws: Sequence[int]) -> None:
    if key.ndim or step.ndim:
        key, step = (x.expand(out.shape[:-1]).reshape(-1) for x in (key, step))
    fill: Callable[[Tensor, Tensor, Tensor, tuple[int, ...], tuple[int, ...]], None] | None
    if out.is_cuda:
        from bayesopt_chain.random.philox_cuda import fill
    else:
        fill = normals_kernel()
    if fill is not None:
        fill(out, key, step, tuple(sizes), tuple(draws))
    else:
        pieces = [in_tensors(key, step, n, draw, out.dtype) for n, draw in zip(sizes, draws)]
        out.copy_(torch.cat(pieces, dim=-1).view(out.shape))


for _device in ("CPU", "CUDA"):
    _OPS.impl("philox_normals", _drawn_normals, _device)
    _OPS.impl("philox_normals_", _fill_with_normals, _device)


def _nothing(out: Tensor, key: Tensor, step: Tensor, sizes: Sequence[int], draws: Sequence[int]) -> None:
    """What filling does to a tensor without numbers."""


_library.register_fake("bayesopt_chain::philox_normals", _fresh_normals, lib=_OPS)
_library.register_fake("bayesopt_chain::philox_normals_", _nothing, lib=_OPS)


def _stacked_normals(
    info: Any,
    in_dims: tuple[int | None, ...],
    key: Tensor,
    step: Tensor,
    sizes: Sequence[int],
    draws: Sequence[int],
    dtype: torch.dtype,
) -> tuple[Tensor, int]:
    """One call for all lanes of ``vmap``; the lanes' axis comes last in the keys."""
    key, step = (x.unsqueeze(-1) if d is None else x.movedim(d, -1) for x, d in zip((key, step), in_dims))
    out = torch.ops.bayesopt_chain.philox_normals(key, step, sizes, draws, dtype)
    return out, out.ndim - 2


_library.register_vmap("bayesopt_chain::philox_normals", _stacked_normals, lib=_OPS)
