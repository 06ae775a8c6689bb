r"""SGD with momentum and matched noise as one Triton kernel: 20 bytes a float32 parameter, nothing besides the velocity.

With ``lr' = 2 lr / (1 + mu)`` and ``s^2 = T (1 - mu^2) / lr'`` one step of matched noise is a kick, half a drift, an
Ornstein-Uhlenbeck step and half a drift:

    p = u - g;    w = mu p - s xi;    theta <- theta + lr'/2 (p + w);    u <- w.

It reads theta, g and u, writes theta and u, and draws one normal that nobody has to remember; mu = 0 is Leimkuhler-
Matthews with the draw in ``u``. Started from rest, it is the chain ``add_momentum(mu), inject_langevin_noise(T),
scale_by_neg_lr(lr)`` draw by draw (``v = -(p - s xi / (1 + mu))``, see ``_matched_noise.scheduled_momentum_noise``).

The normals are the library's Philox stream (:mod:`bayesopt_chain._random`): a program takes ``BLOCKS`` consecutive
blocks, four words of each, and writes four runs of 64 neighbours for every 64 blocks.
"""

from __future__ import annotations

import math

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
    c = radius * tl.cos(angle)
    s = radius * tl.sin(angle)
    odd = ((second >> 30) & 1) == 1
    half = ((second >> 31) & 1) == 1
    x = tl.where(odd, -s, c)
    y = tl.where(odd, c, s)
    return tl.where(half, -x, x), tl.where(half, -y, y)


@triton.jit
def _move(theta, g, u, xi, at, live, half_lr, momentum, scale):
    p = tl.load(u + at, mask=live, other=0.0) - tl.load(g + at, mask=live, other=0.0)
    w = momentum * p - scale * xi
    tl.store(theta + at, tl.load(theta + at, mask=live, other=0.0) + half_lr * (p + w), mask=live)
    tl.store(u + at, w, mask=live)


@triton.jit
def _kernel(theta, g, u, key, count, size, draw, half_lr, momentum, scale, BLOCKS: tl.constexpr, RUN: tl.constexpr):
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
    small = size <= RUN  # a leaf of one run takes the first normal of as many blocks
    at = tl.where(small, block, (block // RUN) * (4 * RUN) + block % RUN).to(tl.int64)
    _move(theta, g, u, z0, at, at < size, half_lr, momentum, scale)
    _move(theta, g, u, z1, at + RUN, at + RUN < size, half_lr, momentum, scale)
    _move(theta, g, u, z2, at + 2 * RUN, at + 2 * RUN < size, half_lr, momentum, scale)
    _move(theta, g, u, z3, at + 3 * RUN, at + 3 * RUN < size, half_lr, momentum, scale)


def langevin_step_(
    theta: Tensor,
    g: Tensor,
    u: Tensor,
    key: Tensor,
    count: Tensor,
    *,
    lr: float,
    momentum: float = 0.9,
    temperature: float,
    draw: int = 0,
    blocks: int = 256,
) -> None:
    """One step on one leaf, in place.

    Args:
        theta, g, u: parameters, gradient and velocity (zeros at the start, then left alone), contiguous float32.
        key, count: 0-d int64 on the same device: the stream's key and the step number. The caller counts.
        lr, momentum, temperature: as in :func:`bayesopt_chain.sghmc`.
        draw: number of the leaf.
        blocks: Philox blocks for each program, a multiple of 64; four parameters a block.
    """
    for name, x in (("theta", theta), ("g", g), ("u", u)):
        if x.dtype != torch.float32 or not x.is_contiguous() or x.numel() != theta.numel():
            raise ValueError(f"langevin_step_: {name} must be contiguous float32 with {theta.numel()} entries")
    if blocks % RUN:
        raise ValueError(f"langevin_step_: blocks must be a multiple of {RUN}, got {blocks}")
    half_lr = lr / (1.0 + momentum)
    scale = math.sqrt(temperature * (1.0 - momentum**2) / (2.0 * half_lr)) if temperature else 0.0
    n = theta.numel()
    needed = n if n <= RUN else RUN * -(-n // (4 * RUN))
    _kernel[(triton.cdiv(needed, blocks),)](
        theta, g, u, key, count, n, draw, half_lr, momentum, scale, BLOCKS=blocks, RUN=RUN
    )
