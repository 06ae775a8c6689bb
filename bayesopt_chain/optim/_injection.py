r"""Add the noise of one step to parameters and velocities, before torch's step or after it.

With ``e`` and ``e_1`` of :mod:`bayesopt_chain.optim._rule` and the denominator ``D`` of an adaptive rule (``D = 1`` for SGD),
the noise is added after torch's step as

    V += D^(1/2) e,          theta -= D^(-1/2) (h e + h_1 e_1)

If the velocity averages ``g / D`` (RMSprop), its part is ``V += D^(-1/2) e``. For SGD with a velocity it is cheaper to add
``V += e / mu`` before torch's step: torch's step multiplies the velocity by ``mu`` and moves the parameter by ``-h V``, which
adds ``e`` to both as above.

``e`` is ``current xi_t + previous xi_{t-1}``, with the standard normals ``xi_t`` of step ``t``. The last draw ``xi_{t-1}`` is
kept in ``optimizer.state[p]["noise"]``. Its term is added first, and then the new draw overwrites it, so that no further buffer
is needed. If the group has ``noise_kept=False``, the last draw is not kept: Philox makes it again, bit for bit, from its key
``state[p]["noise_of"]`` and its count ``state[p]["noise_at"]``. Small leaves with the same numbers are treated in one call.
Large leaves are treated block by block, so that a block stays in cache.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bayesopt_chain._torch import foreach_add_, foreach_addcdiv_, foreach_addcmul_, foreach_mul_
from bayesopt_chain.optim._noise import Normals
from bayesopt_chain.optim._plan import (
    BEFORE,
    BLOCK,
    UNKNOWN,
    Batch,
    Numbers,
    Place,
    Plan,
    Rule,
    Tensors,
    Work,
    blocks_of,
    has_drawn,
)
from bayesopt_chain.optim._refusals import warn_of_rounding

# names in ``optimizer.state[p]``, by branch (0 momentum, 1 direct): of the last draw, and of its key and count
_DRAW = ("noise", "noise_direct")
AGAIN = (("noise_of", "noise_at"), ("noise_direct_of", "noise_direct_at"))


def rescale(plan: Plan) -> None:
    """Multiply velocities by their scales; this comes first, since momentum and noise are of the rescaled velocity."""
    for leaves in plan.rescaled:
        scale, name = leaves[0].numbers.noise.velocity_scale, leaves[0].numbers.linear.velocity or ""
        lists: dict[tuple[object, ...], list[Tensor]] = {}
        for velocity in [w.state[name] for w in leaves if w.state.get(name) is not None]:
            lists.setdefault((velocity.dtype, velocity.device), []).append(velocity)
        for velocities in lists.values():
            foreach_mul_(velocities, scale)


def add_before_step(rule: Rule, normals: Normals, plan: Plan) -> None:
    """Before torch's step, add ``e / mu`` to the velocities whose noise goes through the velocity."""
    _add_all(rule, normals, plan.before_step)


def add_after_step(rule: Rule, normals: Normals, plan: Plan) -> None:
    """After torch's step, move parameters by velocities that the step discarded, and add noise to parameters and velocities."""
    for leaves in plan.discarding:
        _move_by_discarded(leaves, leaves[0].numbers.noise.discarded)
    _add_all(rule, normals, plan.after_step)


def remember(rule: Rule, plan: Plan) -> None:
    """Store the numbers of the step in the state, and the key and count of draws that are not kept."""
    for w in plan.redrawn:
        route = w.numbers.route
        for names, drew in zip(AGAIN, (route.is_early or route.is_late, route.has_direct)):
            if drew:
                w.state.update(zip(names, (w.group["noise_key"], w.group["noise_count"])))
    if not plan.repeats:
        _write_down(rule, plan)


def _add_all(rule: Rule, normals: Normals, place: Place) -> None:
    """Add the noise of all leaves that get it at this place in the step."""
    if place.batches is None:
        place.batches = [x for branch, leaves in place.small for x in _batches(rule, normals, leaves, branch)]
    for batch in place.batches:
        _add_batch(rule, normals, batch)
    for branch, w in place.large:
        _add_blocks(rule, normals, w, branch)


def _move_by_discarded(leaves: list[Work], discarded: float) -> None:
    """Subtract ``discarded`` times the old velocity from parameters whose step had momentum 0 and so discarded the velocity.

    This is done after torch's step, whose weight decay has to see the parameter before the move.
    """
    for w in leaves:
        if (velocity := w.state.get("momentum_buffer")) is not None:
            w.param.add_(velocity, alpha=-discarded)


def _write_down(rule: Rule, plan: Plan) -> None:
    """Store each number of the step in the state as a float.

    Each has a name of its own, since ``torch.distributed.checkpoint`` can flatten floats, but not tuples.
    """
    for leaves in plan.alike:
        before = leaves[0].numbers.noise.before
        if before is not None:
            entry = dict(zip(BEFORE, before))
            for w in leaves:
                w.state.update(entry)
        elif leaves[0].numbers.route.is_noisy:  # at lr = 0 before the first draw
            for w in leaves:
                if not has_drawn(w.state):
                    _make_entries(rule, w)


def _batches(rule: Rule, normals: Normals, leaves: list[Work], branch: int) -> list[Batch]:
    """Group small leaves with the same numbers, dtype and device into batches.

    If last draws are made again, or a denominator is needed, a batch has about ``BLOCK`` elements, which bounds the scratch
    memory of a step. Leaves whose last draws are made again are also grouped by the key and the count of these draws.
    """
    groups: dict[tuple[object, ...], list[Work]] = {}
    size = 0
    for w in leaves:
        size += w.param.numel()
        last = tuple([w.state.get(name) for name in AGAIN[branch]]) if w.redraws else ()
        part = size // BLOCK if w.redraws or rule.adaptive else 0
        groups.setdefault((id(w.numbers), w.param.dtype, w.param.device, last, part), []).append(w)
    return [_batch(rule, normals, work, branch) for work in groups.values()]


def _batch(rule: Rule, normals: Normals, work: list[Work], branch: int) -> Batch:
    """Make a batch of small leaves, and the function that fills their draws."""
    velocity = work[0].numbers.linear.velocity
    velocities = [w.state[velocity] for w in work] if velocity is not None and branch == 0 else []
    draws = [draw_of(rule, w, branch) for w in work if not w.redraws]
    for w in work if not draws else ():
        _warn_once(rule, w)
    tensors = Tensors([w.param for w in work], velocities, [], draws)
    fill: Callable[[], None] = normals.filler(draws, work, branch)
    return Batch(work, work[0].numbers, branch, tensors, fill)


def _add_batch(rule: Rule, normals: Normals, batch: Batch) -> None:
    """Add the noise of one branch to many small leaves at once."""
    work, numbers, branch, tensors, fill = batch
    if rule.adaptive:
        row = rule._denominator(
            numbers.group, numbers.learned_until, lambda name: _in_a_row([w.state[name] for w in work])
        )
        pieces = row.sqrt_().split([w.param.numel() for w in work])
        tensors = tensors._replace(roots=[x.view(w.param.shape) for x, w in zip(pieces, work)])
    if tensors.draws:
        return _add(rule, numbers, branch, tensors, fill)
    # the draws are not kept: scratch memory takes the last draws first, and then those of this step
    group = numbers.group
    draws = [torch.empty_like(w.param, requires_grad=False) for w in work]
    key, count = [work[0].state.get(name, -1) for name in AGAIN[branch]]
    _add(
        rule,
        numbers,
        branch,
        tensors._replace(draws=draws),
        lambda: normals.again(draws, work, branch, group["noise_key"], group["noise_count"]),
        lambda: normals.again(draws, work, branch, key, count),
    )


def _add_blocks(rule: Rule, normals: Normals, w: Work, branch: int) -> None:
    """Add the noise of one branch to a large leaf, block by block."""
    fill, fill_last = normals.of(w, branch), None
    draw = None if w.redraws else draw_of(rule, w, branch)
    if draw is None:
        _warn_once(rule, w)
        if w.state.get(AGAIN[branch][1], -1) >= 0:
            fill_last = normals.of(w, branch, last=True)
    velocity = w.numbers.linear.velocity
    # on a GPU blocks need not fit a cache, and larger ones mean fewer kernel launches
    size = BLOCK if w.param.device.type == "cpu" else 64 * BLOCK
    for block in blocks_of(w.param, w.state, normals.splits(w), size):
        theta = block(w.param)
        xi = torch.empty_like(theta, requires_grad=False) if draw is None else block(draw)
        velocities = [block(w.state[velocity])] if velocity is not None and branch == 0 else []
        roots = [w.denominator(rule, block).sqrt_()] if rule.adaptive else []
        _add(
            rule,
            w.numbers,
            branch,
            Tensors([theta], velocities, roots, [xi]),
            lambda xi=xi: fill(xi),
            None if fill_last is None else lambda xi=xi: fill_last(xi),
        )


def _add(
    rule: Rule,
    numbers: Numbers,
    branch: int,
    tensors: Tensors,
    fill: Callable[[], object],
    fill_last: Callable[[], object] | None = None,
) -> None:
    """Add ``previous xi_{t-1} + current xi_t``.

    Args:
        rule: the optimizer.
        numbers: the numbers of the step.
        branch: 0 for the noise of the momentum branch, 1 for that of the direct branch, which is not added to the velocity.
        tensors: the tensors of the leaves, or of a block of one leaf.
        fill: ``fill()`` overwrites the draws with those of this step.
        fill_last: ``fill_last()`` overwrites the draws with the last ones; ``None`` if the tensors hold these already.
    """
    params, velocities, roots, draws = tensors
    step_size, previous, current = numbers.branches[branch]
    for size, make in ((previous, fill_last), (current, fill)):
        # the draw of this step is made even if its coefficient is 0, so that the state always holds the last draw
        if make is not None and (size or make is fill):
            make()
        if not size:
            continue
        if branch == 0 and numbers.route.is_early:  # torch's step multiplies by the momentum, and moves the parameters
            foreach_add_(velocities, draws, alpha=1.0 / numbers.linear.momentum * size)
        elif not roots:
            foreach_add_(params, draws, alpha=-step_size * size)
            if velocities:
                foreach_add_(velocities, draws, alpha=size)
        else:
            foreach_addcdiv_(params, draws, roots, value=-step_size * size)
            if velocities:
                (foreach_addcdiv_ if rule.averages_scaled else foreach_addcmul_)(velocities, draws, roots, value=size)


def _in_a_row(tensors: list[Tensor]) -> Tensor:
    """Concatenate the elements of all tensors to one vector."""
    return torch.cat([x.reshape(-1) for x in tensors])


def draw_of(rule: Rule, w: Work, branch: int) -> Tensor:
    """Return the last draw of a leaf from its state; zeros, which are stored there, before the first draw."""
    name = _DRAW[branch]
    if name not in w.state:
        _warn_once(rule, w)
        w.state[name] = torch.zeros_like(w.param, memory_format=torch.preserve_format, requires_grad=False)
    return w.state[name]


def _warn_once(rule: Rule, w: Work) -> None:
    """Before the first draw of a leaf in half precision, warn if its noise would be lost in rounding."""
    if w.param.dtype in (torch.bfloat16, torch.float16) and not has_drawn(w.state):
        warn_of_rounding(rule, w)


def _make_entries(rule: Rule, w: Work) -> None:
    """Make the state entries of a leaf that has drawn nothing yet, since lr is 0.

    ``torch.distributed.checkpoint`` makes a step at lr = 0 to find out which entries a state has, and loads only these.
    """
    w.state.update(UNKNOWN)
    # at lr = 0 the direct branch has a step size of 0 too, so that it is looked for at another lr
    has_direct = rule._linear({**w.group, "lr": 1.0}, rule._clock(w.state)).direct > 0.0
    for branch in (0, 1) if has_direct else (0,):
        if w.redraws:
            w.state.update(zip(AGAIN[branch], (w.group["noise_key"], -1)))
        else:
            draw_of(rule, w, branch)
