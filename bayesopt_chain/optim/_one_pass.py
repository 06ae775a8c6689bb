"""Make torch's step, its draws and its noise in one pass over memory, by :mod:`bayesopt_chain.engine.optimizer_cpu`.

Otherwise torch's step is one pass over memory, and the noise two or three more: ``D`` is computed again, the last draw is
added, and then the new draw. The kernel does all of this in one pass. If ``D`` is frozen, the same pass leaves the averaged
squared gradient unchanged. The draws are those of :mod:`bayesopt_chain.optim._injection`.
"""

from __future__ import annotations

import torch

from bayesopt_chain._torch import dispatch_modes
from bayesopt_chain.engine.optimizer_cpu import Coefficients, Job, counter, has_kernel
from bayesopt_chain.optim._injection import AGAIN, draw_of
from bayesopt_chain.optim._noise import Normals
from bayesopt_chain.optim._plan import KERNEL_DTYPES, Numbers, Piece, Plan, Rule, Work, are_plain
from bayesopt_chain.random.stream import draw_number

_KEPT = [(-1, -1)] * 2  # key and count of a last draw that is kept, for each branch


def in_one_pass(rule: Rule, normals: Normals, plan: Plan) -> bool:
    """Make the whole step, if the kernel can.

    Returns:
        Whether the step was made. If not, nothing has moved.
    """
    has_numbers, plan.one_pass = plan.one_pass and plan.repeats, False
    if plan.pieces is None:
        plan.pieces = _pieces(rule, normals, plan)
    if not plan.pieces or plan.discarding or dispatch_modes() or not all(map(Piece.has_gradients, plan.pieces)):
        return False
    for piece in plan.pieces:
        group = piece.numbers.group
        if not has_numbers:
            piece.job.set_numbers(_coefficients(rule, piece.numbers))
        if plan.redrawn:
            piece.job.set_last_drawn(*_last_drawn(piece.work[0]))
        # the kernel writes by addresses, and autograd has to know that the tensors changed
        torch.autograd.graph.increment_version(piece.tensors)
        if piece.count is not None:
            piece.count()
        piece.job.run(piece.gradients, group["noise_key"], group["noise_count"])
    plan.one_pass = True
    return True


def _coefficients(rule: Rule, numbers: Numbers) -> Coefficients:
    """Return the kernel's coefficients of a step."""
    group, linear, noise = numbers.group, numbers.linear, numbers.noise
    form = rule._form(group, numbers.learned_until)
    assert form is not None
    learns = not numbers.route.is_frozen
    return Coefficients(
        sign=-1.0 if group["maximize"] else 1.0,
        decay=0.0 if group.get("decoupled_weight_decay") else float(group["weight_decay"]),
        keep=1.0 - linear.shrink,
        momentum=linear.momentum,
        gain=linear.gain,
        # a decay of 1 and a gain of 0 leave a frozen average unchanged
        square_decay=form.square_decay if learns else 1.0,
        square_gain=1.0 - form.square_decay if learns else 0.0,
        correction=form.correction,
        eps=float(group.get("eps", 0.0)),
        step_size=linear.step_size,
        previous=noise.previous,
        current=noise.current,
        direct=linear.direct,
        direct_previous=noise.direct_previous,
        direct_current=noise.direct,
    )


def _pieces(rule: Rule, normals: Normals, plan: Plan) -> list[Piece] | None:
    """Group the leaves into pieces for the kernel, of equal numbers, dtype, and key and count of their last draws.

    The list is empty if the kernel cannot make the step: a group asks for another implementation, a leaf gets no noise, or one
    of the tensors is not contiguous, not on a CPU or neither float32 nor float64. It is ``None`` if a velocity or square is not
    there yet.
    """
    mine = {id(w.param) for w in plan.noisy}
    present = [p for group in rule.param_groups for p in group["params"] if p.grad is not None]
    if not has_kernel() or normals.runs is not None or not all([id(p) in mine for p in present]):
        return []
    together: dict[tuple[object, ...], list[Work]] = {}
    for w in plan.noisy:
        group, route, form = w.group, w.numbers.route, rule._form(w.group, w.numbers.learned_until)
        asked = group.get("foreach") is not None or group.get("fused") is False or group.get("differentiable")
        if asked or form is None or not (route.is_early or route.is_late) or w.param.dtype not in KERNEL_DTYPES:
            return []
        # torch makes its state in the first step, and the plan of that step may hold for the next ones
        if not all([name in w.state for name in (route.velocity, form.square) if name is not None]):
            return None
        together.setdefault((id(w.numbers), w.param.dtype, *_last_drawn(w)), []).append(w)
    pieces = [_piece(rule, work) for work in together.values()]
    return [] if None in pieces else pieces  # pyright: ignore[reportReturnType]


def _last_drawn(w: Work) -> list[tuple[int, int]]:
    """Return, for each branch, key and count of a last draw that is made again; (-1, -1) if there is none or if it is kept."""
    return [(w.state.get(of, -1), w.state.get(at, -1)) for of, at in AGAIN] if w.redraws else _KEPT


def _piece(rule: Rule, work: list[Work]) -> Piece | None:
    """Make a piece of leaves, or return ``None`` if the kernel cannot take one of their tensors."""
    w, params = work[0], [w.param for w in work]
    dtype, shapes, route = w.param.dtype, [p.shape for p in params], w.numbers.route
    form = rule._form(w.group, w.numbers.learned_until)
    assert form is not None
    branches = (0, 1) if route.has_direct else (0,)
    lists = [params, *([w.state[name] for w in work] if name else [] for name in (route.velocity, form.square))]
    lists += [[draw_of(rule, w, c) for w in work] if c in branches and not w.redraws else [] for c in (0, 1)]
    if not all([are_plain(xs, dtype, shapes) for xs in lists if xs]):
        return None
    numbers = [tuple([draw_number(w.number, c) for w in work]) if c in branches else () for c in (0, 1)]
    steps = [] if rule.timeless else [w.state["step"] for w in work]
    tensors = [x for xs in (*lists, steps) for x in xs]
    job = Job(form.kind, dtype, tuple([p.numel() for p in params]), lists, numbers)
    return Piece(work, w.numbers, params, shapes, tensors, job, counter(steps) if steps else None)
