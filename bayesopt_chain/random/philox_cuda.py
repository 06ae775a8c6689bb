r"""The normals of the Philox stream (:mod:`bayesopt_chain.random.philox`) on a CUDA device, as one Triton kernel.

Written as tensor operations a draw is over 200 small kernels, which a CUDA graph replays one after the other; here one kernel
draws all runs of similar lengths, such as leaves of one shape or the rows of a matrix cut by columns, for all chains. Integers
are the stream's; logarithm, sine and cosine keep the normals within 1e-6 of every back end.

The 64 blocks ``64 g .. 64 g + 63`` hold the normals of the elements ``256 g .. 256 g + 255``: a run is computed from the blocks
of its first element to those of its last, and its own elements are stored.

Triton's functions carry no types. A kernel's arguments are ``Value``: any type to a type checker, and to Triton's compiler,
which reads annotations, a name of its own.
"""

from __future__ import annotations

from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
import triton  # pyright: ignore[reportMissingTypeStubs]
from torch import Tensor
from triton.language import constexpr as constexpr  # pyright: ignore[reportMissingTypeStubs]

from bayesopt_chain.random.compiled import require_memory
from bayesopt_chain.random.philox_cpu import total_of

_triton: Any = triton
tl, jit = _triton.language, _triton.jit

if TYPE_CHECKING:
    Value = Any
else:
    Value = tl.tensor

RUN = 64  # neighbouring elements that come from neighbouring blocks, as in bayesopt_chain.random.philox


@jit
def _box_muller(first: Value, second: Value) -> Value:
    u = ((first >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    angle = (((second & 0x3FFFFFFF) >> 7).to(tl.float32) - 4194303.5) * 1.8725351414619534e-07
    radius = tl.sqrt(-2.0 * tl.log(u))
    square = angle * angle  # below (pi / 4)^2: Cephes' polynomials, exact to a unit in the last place, without a branch
    sine = (-1.9515295891e-4 * square + 8.3321608736e-3) * square - 1.6666654611e-1
    cosine = (2.443315711809948e-5 * square - 1.388731625493765e-3) * square + 4.166664568298827e-2
    s = radius * (angle + angle * square * sine)
    c = radius * (1.0 - 0.5 * square + square * square * cosine)
    odd = ((second >> 30) & 1) == 1
    half = ((second >> 31) & 1) == 1
    x = tl.where(odd, -s, c)
    y = tl.where(odd, c, s)
    return tl.where(half, -x, x), tl.where(half, -y, y)


@jit
def four_normals(block: Value, draw: Value, key: Value, count: Value) -> Value:
    """Four normals of every block, given the addresses of key and step number."""
    seed = tl.load(key).to(tl.uint64)
    step = tl.load(count).to(tl.uint64)
    word = block.to(tl.uint32)
    zero = word & 0
    a, b, c, d = tl.philox_impl(
        word,
        zero + draw.to(tl.uint32),
        zero + (step & 0xFFFFFFFF).to(tl.uint32),
        zero + (step >> 32).to(tl.uint32),
        (seed & 0xFFFFFFFF).to(tl.uint32) + zero,
        (seed >> 32).to(tl.uint32) + zero,
        10,
    )
    z0, z1 = _box_muller(a, b)
    z2, z3 = _box_muller(c, d)
    return z0, z1, z2, z3


@jit
def first_element(block: Value, RUN: constexpr) -> Value:
    """The element that the first normal of every block is."""
    block = block.to(tl.int64)  # an element's number may have two bits more than its block's
    return (block // RUN) * (4 * RUN) + block % RUN


@jit(do_not_specialize=["runs", "programs"])
def _normals(
    out: Value,
    keys: Value,
    counts: Value,
    table: Value,
    key_stride: Value,
    count_stride: Value,
    total: Value,
    runs: Value,
    programs: Value,
    BLOCKS: constexpr,
    RUN: constexpr,
) -> None:
    of_run = tl.program_id(0) // programs
    chain = (of_run // runs).to(tl.int64)
    entry = table + (of_run % runs) * 4
    start = tl.load(entry)
    end = tl.load(entry + 1)
    draw = tl.load(entry + 3).to(tl.uint32)
    first = (start // (4 * RUN)) * RUN + (tl.program_id(0) % programs).to(tl.int64) * BLOCKS
    if first * 4 < end:  # every run of a table has the programs of the longest, some of which have nothing to do
        block = first + tl.arange(0, BLOCKS)
        z0, z1, z2, z3 = four_normals(block, draw, keys + chain * key_stride, counts + chain * count_stride)
        at = first_element(block, RUN)
        place = out + chain * total + tl.load(entry + 2) - start
        tl.store(place + at, z0, mask=(at >= start) & (at < end))
        tl.store(place + at + RUN, z1, mask=(at + RUN >= start) & (at + RUN < end))
        tl.store(place + at + 2 * RUN, z2, mask=(at + 2 * RUN >= start) & (at + 2 * RUN < end))
        tl.store(place + at + 3 * RUN, z3, mask=(at + 3 * RUN >= start) & (at + 3 * RUN < end))


def fill(
    out: Tensor,
    keys: Tensor,
    steps: Tensor,
    starts: tuple[int, ...],
    lengths: tuple[int, ...],
    draws: tuple[int, ...],
) -> None:
    """Fill ``out``, contiguous float32 ``[..., sum(lengths)]``: run ``i`` is elements of the draw numbered ``draws[i]``.

    ``keys`` and ``steps`` are int64, 0-d or one for each row of ``out``. Without ``starts`` every run begins at element 0.
    """
    chains = out.shape[:-1].numel()
    total = total_of(starts, lengths, draws)
    memory, shapes = {"out": (out, torch.float32, chains * total)}, ((), (chains,))
    require_memory("philox", out.device, memory, keys=(keys, shapes), steps=(steps, shapes))
    key_stride, step_stride = (x.stride(0) if x.ndim else 0 for x in (keys, steps))
    with torch.cuda.device_of(out):
        for table, groups in _tables(starts, lengths, draws, out.device):
            blocks = RUN * min(1 << (groups - 1).bit_length(), 8)
            programs = -(-RUN * groups // blocks)
            if chains:
                _normals[(chains * len(table) * programs,)](
                    out,
                    keys,
                    steps,
                    table,
                    key_stride,
                    step_stride,
                    total,
                    len(table),
                    programs,
                    BLOCKS=blocks,
                    RUN=RUN,
                    num_warps=2 if blocks == RUN else 4,
                )


@cache  # never dropped: a recorded CUDA graph reads a table at its address
def _tables(
    starts: tuple[int, ...], lengths: tuple[int, ...], draws: tuple[int, ...], device: torch.device
) -> list[tuple[Tensor, int]]:
    """Tables of neighbouring runs of similar lengths, each with the number of groups of 64 blocks that its longest run takes.

    A row of a table is a run: its first element, its end, its place in the result and the number of its draw.
    """
    rows: list[tuple[int, tuple[int, int, int, int]]] = []
    place = 0
    for start, length, draw in zip(starts or (0,) * len(lengths), lengths, draws, strict=True):
        if length:
            groups = (start + length - 1) // (4 * RUN) - start // (4 * RUN) + 1
            rows.append((groups, (start, start + length, place, draw)))
        place += length
    alike = [[*rows] for _, rows in groupby(rows, key=lambda row: (row[0] - 1).bit_length())]
    return [(torch.tensor([row for _, row in each], device=device), max(each)[0]) for each in alike]
