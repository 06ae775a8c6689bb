r"""The noise of one step, added to parameters and velocities: in front of torch's step, and behind it.

With ``e`` and ``e_1`` of :mod:`bayesopt_chain.optim._rule` and the denominator ``D`` of an adaptive rule (``D = 1`` for SGD)

    V += D^(1/2) e,          theta -= D^(-1/2) (h e + h_1 e_1)          behind torch's step

or, where the velocity averages ``g / D`` (RMSprop), ``V += D^(-1/2) e``. For SGD with a velocity the same is cheaper in front
of torch's step, as ``V += e / mu``: torch's momentum and torch's move then bring ``e`` to velocity and parameter.

``e`` is ``current xi_t + previous xi_{t-1}``. The last draw ``xi_{t-1}`` lies in ``optimizer.state[p]["noise"]``; its part is
added first, then the new draw is written over it, so that no third buffer is needed. Where the group says ``noise_kept=False``
not even the last draw is kept: Philox makes it again from the key and the count that drew it, ``state[p]["noise_of"]`` and
``state[p]["noise_at"]``, which is the same draw to the last bit. Small leaves with the same numbers are
treated in one call for all; large ones block by block, while a block is in cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from bayesopt_chain._torch import foreach_add_, foreach_mul_
from bayesopt_chain.optim._noise import Normals
from bayesopt_chain.optim._plan import BLOCK, UNKNOWN, Batch, Noisy, Plan, Rule, Work, blocks_of, has_drawn, remember
from bayesopt_chain.optim._refusals import warn_of_rounding


def add_in_front(rule: Rule, normals: Normals, plan: Plan) -> None:
    """Rescale velocities, and add the noise that momentum carries, ``e / mu``."""
    for leaves in _alike(plan.rescaled) if plan.rescaled else ():
        states = [(w.state, w.linear.velocity or "") for w, _ in leaves]
        if velocities := [state[name] for state, name in states if state.get(name) is not None]:
            foreach_mul_(velocities, leaves[0].noise.velocity_scale)
    for leaf in plan.early_large:
        _sweep(rule, normals, leaf, leaf.work.linear.momentum)
    if plan.early is None:
        plan.early = [_batch(rule, normals, leaves) for leaves in _alike(plan.early_small)]
    for batch in plan.early:
        _add_batch(normals, batch)


def add_behind(rule: Rule, normals: Normals, plan: Plan) -> None:
    """Add the noise that goes to parameters and velocities, and remember what the step was."""
    for w, noise in plan.coasting:  # behind torch's step, whose weight decay is that of the parameter before
        if (velocity := w.state.get("momentum_buffer")) is not None:
            w.param.add_(velocity, alpha=-noise.coasts)
    # leaves of an adaptive rule have a denominator each, so that no two of them share a call
    for leaf in [*plan.late_large, *plan.late_small] if rule.adaptive else plan.late_large:
        _sweep(rule, normals, leaf)
    for leaf in plan.direct:
        _sweep_direct(rule, normals, leaf)
    if not rule.adaptive:
        if plan.late is None:
            plan.late = [_batch(rule, normals, leaves) for leaves in _alike(plan.late_small)]
        for batch in plan.late:
            _add_batch(normals, batch)
    for w, noise in plan.redrawn:
        now = w.group["noise_count"], w.group["noise_key"]
        if w.early or noise.current or noise.previous:
            w.state["noise_at"], w.state["noise_of"] = now
        if w.linear.direct > 0.0:
            w.state["noise_direct_at"], w.state["noise_direct_of"] = now
    if plan.kept:  # every number is what it was, or has been followed
        return
    remember(plan.noisy)
    for leaf in plan.noisy:
        if not has_drawn(leaf.work.state):
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
    if first.redraws:
        for leaf in leaves:
            _warn_once(rule, leaf)
        return Batch(group, noise, targets, [], lambda count: None, work)
    draws = [_draw_of(rule, leaf, "noise") for leaf in leaves]
    return Batch(group, noise, targets, draws, normals.filler(draws, work), work)


def _add_batch(normals: Normals, batch: Batch) -> None:
    """Add ``e`` of many small leaves at once."""
    group, noise, targets, draws, fill, _ = batch
    if not draws:
        return _add_redrawn(normals, batch)
    if noise.previous:
        for tensors, factor in targets:
            foreach_add_(tensors, draws, alpha=factor * noise.previous)
    fill(group["noise_count"])
    for tensors, factor in targets:
        foreach_add_(tensors, draws, alpha=factor * noise.current)


def _add_redrawn(normals: Normals, batch: Batch) -> None:
    """Add ``e`` of small leaves whose last draw is made again, in scratch memory, instead of kept."""
    group, noise, targets, _, _, work = batch
    draws = [torch.empty_like(w.param, requires_grad=False) for w in work]
    now = group["noise_key"], group["noise_count"]
    last = work[0].state.get("noise_of", 0), work[0].state.get("noise_at", 0)  # unused before the first draw
    for size, (key, count) in ((noise.previous, last), (noise.current, now)):
        if size:
            normals.again(draws, work, key, count)
            for tensors, factor in targets:
                foreach_add_(tensors, draws, alpha=factor * size)


def _sweep(rule: Rule, normals: Normals, leaf: Noisy, momentum: float | None = None) -> None:
    """Add ``e`` of one leaf, block by block.

    Args:
        rule: the optimizer.
        normals: source of the draws.
        leaf: the leaf.
        momentum: of the velocity, through which alone the noise goes where it is given, divided by it.
    """
    w, noise = leaf
    draw, fill, fill_last = _draws(rule, normals, leaf, 0)
    state, linear = w.state, w.linear
    for block in _blocks(normals, w):
        theta = block(w.param)
        xi = block(draw) if draw is not None else torch.empty_like(theta, requires_grad=False)
        velocity = block(state[linear.velocity]) if linear.velocity is not None else None
        root = w.denominator(rule, block).sqrt_() if rule.adaptive else None
        for is_new, size in ((False, noise.previous), (True, noise.current)):
            if is_new:
                fill(xi)
            if not size:
                continue
            if fill_last is not None and not is_new:
                fill_last(xi)
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
    draw, fill, fill_last = _draws(rule, normals, leaf, 1)
    for block in _blocks(normals, w):
        theta = block(w.param)
        xi = block(draw) if draw is not None else torch.zeros_like(theta, requires_grad=False)
        root = w.denominator(rule, block).sqrt_() if rule.adaptive else None
        for is_new, weight in ((False, noise.direct_previous), (True, noise.direct)):
            size = -w.linear.direct * weight
            if is_new:
                fill(xi)
            elif fill_last is not None:
                fill_last(xi)
            theta.add_(xi, alpha=size) if root is None else theta.addcdiv_(xi, root, value=size)


Fill = Callable[[Tensor], object]


def _draws(rule: Rule, normals: Normals, leaf: Noisy, branch: int) -> tuple[Tensor | None, Fill, Fill | None]:
    """Where a leaf's last draw lies, what makes the new one, and what makes the last one again where it is not kept."""
    w = leaf.work
    if not w.redraws:
        return _draw_of(rule, leaf, ("noise", "noise_direct")[branch]), normals.of(w, branch), None
    _warn_once(rule, leaf)
    has_last = w.state.get(("noise_at", "noise_direct_at")[branch], -1) >= 0
    return None, normals.of(w, branch), normals.of(w, branch, last=True) if has_last else None


def _blocks(normals: Normals, w: Work) -> Iterable[Callable[[Tensor], Tensor]]:
    """The blocks of a leaf; outside of a CPU's cache larger ones, where only their number counts."""
    return blocks_of(w.param, w.state, normals.splits(w), BLOCK if w.param.device.type == "cpu" else 64 * BLOCK)


def _draw_of(rule: Rule, leaf: Noisy, name: str) -> Tensor:
    """The last draw of a leaf; zeros before the first."""
    w = leaf.work
    if name not in w.state:
        _warn_once(rule, leaf)
        w.state[name] = torch.zeros_like(w.param, memory_format=torch.preserve_format, requires_grad=False)
    return w.state[name]


def _warn_once(rule: Rule, leaf: Noisy) -> None:
    """Before a leaf's first draw, say where noise rounds away."""
    if leaf.work.param.dtype in (torch.bfloat16, torch.float16) and not has_drawn(leaf.work.state):
        warn_of_rounding(rule, leaf)


def _make_room(rule: Rule, leaf: Noisy) -> None:
    """Make the entries of a leaf that has drawn nothing yet, since lr is 0.

    ``torch.distributed.checkpoint`` makes such a step to learn what a state holds, and loads no more than that.
    """
    w = leaf.work
    w.state.update(UNKNOWN)
    if w.redraws:
        w.state.update(noise_at=-1, noise_of=w.group["noise_key"])
    else:
        _draw_of(rule, leaf, "noise")
    if rule._linear({**w.group, "lr": 1.0}, rule._clock(w.state)).direct > 0.0:
        if w.redraws:
            w.state.update(noise_direct_at=-1, noise_direct_of=w.group["noise_key"])
        else:
            _draw_of(rule, leaf, "noise_direct")


def _alike(leaves: list[Noisy]) -> Iterable[list[Noisy]]:
    """Group leaves whose noise has the same numbers, of one dtype and device.

    Leaves whose last draw is made again are grouped by its key and count too, about ``BLOCK`` elements at a time, which bounds
    what a step needs beside the state.
    """
    out: dict[tuple[object, ...], list[Noisy]] = {}
    size = 0
    for leaf in leaves:
        w, p = leaf.work, leaf.work.param
        size += p.numel()
        last = (w.state.get("noise_of"), w.state.get("noise_at"), size // BLOCK) if w.redraws else ()
        out.setdefault((id(leaf.noise), w.early, p.dtype, p.device, last), []).append(leaf)
    return out.values()
