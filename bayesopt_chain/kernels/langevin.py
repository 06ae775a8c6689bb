r"""SGD with momentum and matched noise as one Triton kernel: 20 bytes a float32 parameter, nothing besides the velocity.

    v = keep s + g + weight_decay theta + c xi,    theta <- theta - lr v,    s <- momentum v + echo c xi,

for heavy ball ``(keep, momentum, echo) = (mu, 1, 1 / mu)``, the velocity with the half of the noise that acts in the next
step (:mod:`bayesopt_chain._placement`); for SGD ``(1, 0, 1)``, the draw itself; white noise has ``echo = 0``. Read theta,
g and s, write theta and s, draw one normal that nobody has to remember.

With ``c = s' / (1 + mu)``, ``s'^2 = T (1 - mu^2) / lr'``, ``lr' = 2 lr / (1 + mu)`` this is the Ornstein-Uhlenbeck form
``p = u - g; w = mu p - s' xi; theta <- theta + lr'/2 (p + w); u <- w`` in ``u = -mu s``: a kick, half a drift, an exact
velocity step and half a drift.

The normals are the library's Philox stream (:mod:`bayesopt_chain._random`): a program takes ``BLOCKS`` consecutive
blocks, four words of each, and writes four runs of 64 neighbours for every 64 blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bayesopt_chain._random import RUN


@triton.jit
def _box_muller(first, second):
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


@triton.jit
def _first(block, size, RUN: tl.constexpr):
    small = size <= RUN  # a leaf of one run takes the first normal of as many blocks
    block = block.to(tl.int64)  # elements are four times as many as blocks
    return tl.where(small, block, (block // RUN) * (4 * RUN) + block % RUN)


@triton.jit
def _move(theta, g, s, xi, at, live, lr, weight_decay, keep, momentum, level, echo):
    position = tl.load(theta + at, mask=live, other=0.0)
    noise = level * xi
    v = keep * tl.load(s + at, mask=live, other=0.0) + tl.load(g + at, mask=live, other=0.0)
    v += weight_decay * position + noise
    tl.store(theta + at, position - lr * v, mask=live)
    tl.store(s + at, momentum * v + echo * noise, mask=live)


@triton.jit(do_not_specialize=["draw"])
def _kernel(
    theta,
    g,
    s,
    key,
    count,
    size,
    draw,
    lr,
    weight_decay,
    keep,
    momentum,
    level,
    echo,
    BLOCKS: tl.constexpr,
    RUN: tl.constexpr,
):
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
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
    at = _first(block, size, RUN)
    _move(theta, g, s, z0, at, at < size, lr, weight_decay, keep, momentum, level, echo)
    _move(theta, g, s, z1, at + RUN, at + RUN < size, lr, weight_decay, keep, momentum, level, echo)
    _move(theta, g, s, z2, at + 2 * RUN, at + 2 * RUN < size, lr, weight_decay, keep, momentum, level, echo)
    _move(theta, g, s, z3, at + 3 * RUN, at + 3 * RUN < size, lr, weight_decay, keep, momentum, level, echo)


def langevin_step_(
    theta: Tensor,
    g: Tensor,
    s: Tensor,
    key: Tensor,
    count: Tensor,
    *,
    lr: float,
    weight_decay: float = 0.0,
    keep: float,
    momentum: float,
    level: float,
    echo: float,
    draw: int = 0,
    blocks: int = 512,
) -> None:
    """One step on one leaf, in place.

    Args:
        theta, g, s: parameters, gradient and what is carried from step to step (zeros at the start), contiguous float32.
        key, count: 0-d int64 on the same device: the stream's key and the step number. The caller counts.
        lr, weight_decay, keep, momentum, level, echo: the coefficients of the equations above, ``level`` being ``c``.
        draw: number of the leaf's draw.
        blocks: Philox blocks for each program, a multiple of 64; four parameters a block, and with 512 of them each of
            128 threads moves four neighbours at a time.
    """
    for name, x in (("theta", theta), ("g", g), ("s", s)):
        if x.dtype != torch.float32 or not x.is_contiguous() or x.numel() != theta.numel():
            raise ValueError(f"langevin_step_: {name} must be contiguous float32 with {theta.numel()} entries")
    if blocks % RUN:
        raise ValueError(f"langevin_step_: blocks must be a multiple of {RUN}, got {blocks}")
    n = theta.numel()
    needed = n if n <= RUN else RUN * -(-n // (4 * RUN))
    if n:
        _kernel[(triton.cdiv(needed, blocks),)](
            theta, g, s, key, count, n, draw, lr, weight_decay, keep, momentum, level, echo, BLOCKS=blocks, RUN=RUN
        )
