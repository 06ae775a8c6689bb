r"""The noise of one step, added to parameters and velocities: in front of torch's step, and behind it.

With ``e`` and ``e_1`` of :mod:`bayesopt_chain.optim._rule` and the denominator ``D`` of an adaptive rule (``D = 1`` for SGD)

    V += D^(1/2) e,          theta -= D^(-1/2) (h e + h_1 e_1)          behind torch's step

or, where the velocity averages ``g / D`` (RMSprop), ``V += D^(-1/2) e``. For SGD with a velocity the same is cheaper in front
of torch's step, as ``V += e / mu``: torch's momentum and torch's move then bring ``e`` to velocity and parameter.

``e`` is ``current xi_t + previous xi_{t-1}``. The last draw ``xi_{t-1}`` lies in ``optimizer.state[p]["noise"]``; its part is
added first, then the new draw is written over it, so that no third buffer is needed. Small leaves with the same numbers are
treated in one call for all; large ones block by block, while a block is in cache.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from bayesopt_chain._torch import foreach_add_
from bayesopt_chain.optim._noise import Normals
from bayesopt_chain.optim._plan import Batch, Noisy, Plan, Rule, blocks_of, remember
from bayesopt_chain.optim._refusals import warn_of_rounding


def add_in_front(rule: Rule, normals: Normals, plan: Plan) -> None:
    """Rescale velocities, spend those that momentum 0 forgets, and add the noise that momentum carries, ``e / mu``."""
    for w, noise in plan.rescaled:
        if (velocity := w.state.get(w.linear.velocity or "")) is not None:
            velocity.mul_(noise.velocity_scale)
    for w, noise in plan.coasting:
        if (velocity := w.state.get("momentum_buffer")) is not None:
            w.param.add_(velocity, alpha=-noise.coasts)
    for leaf in plan.early_large:
        _sweep(rule, normals, leaf, leaf.work.linear.momentum)
    if plan.early is None:
        plan.early = [_batch(rule, normals, leaves) for leaves in _alike(plan.early_small)]
    for batch in plan.early:
        _add_batch(batch)


def add_behind(rule: Rule, normals: Normals, plan: Plan) -> None:
    """Add the noise that goes to parameters and velocities, and remember what the step was."""
    # leaves of an adaptive rule have a denominator each, so that no two of them share a call
    for leaf in [*plan.late_large, *plan.late_small] if rule.adaptive else plan.late_large:
        _sweep(rule, normals, leaf)
    for leaf in plan.direct:
        _sweep_direct(rule, normals, leaf)
    if not rule.adaptive:
        if plan.late is None:
            plan.late = [_batch(rule, normals, leaves) for leaves in _alike(plan.late_small)]
        for batch in plan.late:
            _add_batch(batch)
    if plan.kept:  # every number is what it was, or has been followed
        return
    for leaf in plan.noisy:
        if leaf.noise.before is not None:
            remember(leaf.work.state, leaf.noise.before)
        elif "noise" not in leaf.work.state:
            _make_room(rule, leaf)


def _batch(rule: Rule, normals: Normals, leaves: list[Noisy]) -> Batch:
    """Put together leaves whose noise has the same numbers."""
    work = [leaf.work for leaf in leaves]
    first, noise = leaves[0]
    linear, group = first.linear, first.group
    velocities = [w.state[linear.velocity] for w in work] if linear.velocity is not None else []
    if first.early:
        targets = [(velocities, 1.0 / linear.momentum)]
    else:
        targets = [([w.param for w in work], -linear.step_size), *([(velocities, 1.0)] if velocities else [])]
    draws = [_draw_of(rule, leaf, "noise") for leaf in leaves]
    return Batch(group, noise, targets, draws, normals.filler(draws, work))


def _add_batch(batch: Batch) -> None:
    """Add ``e`` of many small leaves at once."""
    group, noise, targets, draws, fill = batch
    if noise.previous:
        for tensors, factor in targets:
            foreach_add_(tensors, draws, alpha=factor * noise.previous)
    fill(group["noise_count"])
    for tensors, factor in targets:
        foreach_add_(tensors, draws, alpha=factor * noise.current)


def _sweep(rule: Rule, normals: Normals, leaf: Noisy, momentum: float | None = None) -> None:
    """Add ``e`` of one leaf, block by block.

    Args:
        rule: the optimizer.
        normals: source of the draws.
        leaf: the leaf.
        momentum: of the velocity, through which alone the noise goes where it is given, divided by it.
    """
    w, noise = leaf
    draw, fill = _draw_of(rule, leaf, "noise"), normals.of(w)
    state, linear = w.state, w.linear
    for block in blocks_of(w.param, state, normals.splits(w)):
        theta, xi = block(w.param), block(draw)
        velocity = block(state[linear.velocity]) if linear.velocity is not None else None
        root = w.denominator(rule, block).sqrt_() if rule.adaptive else None
        for is_new, size in ((False, noise.previous), (True, noise.current)):
            if is_new:
                fill(xi)
            if not size:
                continue
            if momentum and velocity is not None:
                velocity.add_(xi, alpha=1.0 / momentum * size)
            elif root is None:
                theta.add_(xi, alpha=-linear.step_size * size)
                if velocity is not None:
                    velocity.add_(xi, alpha=size)
            else:
                theta.addcdiv_(xi, root, value=-linear.step_size * size)
                if velocity is not None:
                    (velocity.addcdiv_ if rule.averages_scaled else velocity.addcmul_)(xi, root, value=size)


def _sweep_direct(rule: Rule, normals: Normals, leaf: Noisy) -> None:
    """Add the noise of the gradient's direct way to the parameter, with draws of its own, past the velocity."""
    w, noise = leaf
    draw, fill = _draw_of(rule, leaf, "noise_direct"), normals.of(w, branch=1)
    for block in blocks_of(w.param, w.state, normals.splits(w)):
        theta, xi = block(w.param), block(draw)
        root = w.denominator(rule, block).sqrt_() if rule.adaptive else None
        for is_new, weight in ((False, noise.direct_previous), (True, noise.direct)):
            size = -w.linear.direct * weight
            if is_new:
                fill(xi)
            theta.add_(xi, alpha=size) if root is None else theta.addcdiv_(xi, root, value=size)


def _draw_of(rule: Rule, leaf: Noisy, name: str) -> Tensor:
    """The last draw of a leaf; zeros before the first."""
    w = leaf.work
    if name not in w.state:
        w.state[name] = torch.zeros_like(w.param, memory_format=torch.preserve_format, requires_grad=False)
        if w.param.dtype in (torch.bfloat16, torch.float16):
            warn_of_rounding(rule, leaf)
    return w.state[name]


def _make_room(rule: Rule, leaf: Noisy) -> None:
    """Make the entries of a leaf that has drawn nothing yet, since lr is 0.

    ``torch.distributed.checkpoint`` makes such a step to learn what a state holds, and loads no more than that.
    """
    w = leaf.work
    _draw_of(rule, leaf, "noise")
    remember(w.state, None)
    if rule._linear({**w.group, "lr": 1.0}, rule._clock(w.state)).direct > 0.0:
        _draw_of(rule, leaf, "noise_direct")


def _alike(leaves: list[Noisy]) -> Iterable[list[Noisy]]:
    """Group leaves whose noise has the same numbers, of one dtype and device."""
    out: dict[tuple[object, ...], list[Noisy]] = {}
    for leaf in leaves:
        p = leaf.work.param
        out.setdefault((id(leaf.noise), leaf.work.early, p.dtype, p.device), []).append(leaf)
    return out.values()
