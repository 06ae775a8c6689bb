r"""SGD with momentum and matched noise as one Triton kernel: 20 bytes of traffic a float32 parameter, no buffer but ``s``.

    v = keep s + g + weight_decay theta + c xi,    theta <- theta - lr v,    s <- momentum v + deferred c xi,

for heavy ball ``(keep, momentum, deferred) = (mu, 1, 1 / mu)``, the velocity with the half of the noise that acts in the next
step (:mod:`bayesopt_chain.matching.noise_inputs`); for SGD ``(1, 0, 1)``, the draw itself; white noise has ``deferred = 0``.
It reads theta, g and s, writes theta and s, and draws one normal for each element, which nobody has to remember.

With ``c = s' / (1 + mu)``, ``s'^2 = T (1 - mu^2) / lr'``, ``lr' = 2 lr / (1 + mu)`` this is the Ornstein-Uhlenbeck form
``p = u - g; w = mu p - s' xi; theta <- theta + lr'/2 (p + w); u <- w`` in ``u = -mu s``: a kick, half a drift, an exact
velocity step and half a drift.

The normals are the library's Philox stream (:mod:`bayesopt_chain.random.philox`): a program takes ``BLOCKS`` consecutive
blocks, four words of each, and writes four runs of 64 neighbours for every 64 blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bayesopt_chain.random.compiled import require_memory
from bayesopt_chain.random.philox_cuda import RUN, Value, constexpr, first_element, four_normals, jit, tl


@jit
def _move(
    theta: Value,
    g: Value,
    s: Value,
    xi: Value,
    at: Value,
    live: Value,
    lr: Value,
    weight_decay: Value,
    keep: Value,
    momentum: Value,
    level: Value,
    deferred: Value,
) -> None:
    position = tl.load(theta + at, mask=live, other=0.0)
    noise = level * xi
    v = keep * tl.load(s + at, mask=live, other=0.0) + tl.load(g + at, mask=live, other=0.0)
    v += weight_decay * position + noise
    tl.store(theta + at, position - lr * v, mask=live)
    tl.store(s + at, momentum * v + deferred * noise, mask=live)


@jit(do_not_specialize=["draw"])
def _kernel(
    theta: Value,
    g: Value,
    s: Value,
    key: Value,
    count: Value,
    size: Value,
    draw: Value,
    lr: Value,
    weight_decay: Value,
    keep: Value,
    momentum: Value,
    level: Value,
    deferred: Value,
    BLOCKS: constexpr,
    RUN: constexpr,
) -> None:
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    z0, z1, z2, z3 = four_normals(block, draw, key, count)
    at = first_element(block, RUN)
    _move(theta, g, s, z0, at, at < size, lr, weight_decay, keep, momentum, level, deferred)
    _move(theta, g, s, z1, at + RUN, at + RUN < size, lr, weight_decay, keep, momentum, level, deferred)
    _move(theta, g, s, z2, at + 2 * RUN, at + 2 * RUN < size, lr, weight_decay, keep, momentum, level, deferred)
    _move(theta, g, s, z3, at + 3 * RUN, at + 3 * RUN < size, lr, weight_decay, keep, momentum, level, deferred)


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
    deferred: float,
    draw: int = 0,
    blocks: int = 512,
) -> None:
    """Make one step on one leaf, in place.

    Args:
        theta, g, s: parameters, gradient and what is kept from step to step (zeros at the start), contiguous float32.
        key, count: 0-d int64 on the same device: the stream's key and the step number, to which the caller adds 1.
        lr, weight_decay, keep, momentum, level, deferred: the coefficients of the equations above, ``level`` being ``c``.
        draw: the number of the leaf's draw, 32 bits.
        blocks: Philox blocks for each program, a multiple of 64; a block moves four parameters, and with 512 blocks each of
            128 threads moves four neighbours at a time.

    Raises:
        ValueError: tensors of another dtype or device, not contiguous, of several sizes, or that share memory; ``blocks`` that
            is no multiple of 64.
    """
    tensors, n = {"theta": theta, "g": g, "s": s}, theta.numel()
    memory = {name: (x, torch.float32, n) for name, x in tensors.items()}
    require_memory("langevin_step_", theta.device, memory, key=(key, ((),)), count=(count, ((),)))
    if blocks % RUN:
        raise ValueError(f"langevin_step_: blocks must be a multiple of {RUN}, got {blocks}")
    needed = RUN * -(-n // (4 * RUN))
    if n:
        _kernel[(-(-needed // blocks),)](
            theta,
            g,
            s,
            key,
            count,
            n,
            draw,
            lr,
            weight_decay,
            keep,
            momentum,
            level,
            deferred,
            BLOCKS=blocks,
            RUN=RUN,
        )
