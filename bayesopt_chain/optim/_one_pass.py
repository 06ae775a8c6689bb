"""Make torch's adaptive step and add its noise in one pass over memory, by :mod:`bayesopt_chain.engine.adaptive_cpu`.

Otherwise torch's step is one pass over memory, and the noise two or three more: ``D`` is computed again, the last draw is
added, and then the new draw. The kernel does all of this in one pass, given the draws. If ``D`` is frozen, the same pass leaves
the averaged squared gradient unchanged. The draws are those of :mod:`bayesopt_chain.optim._injection`, made piece by piece in
scratch memory.
"""

from __future__ import annotations

import ctypes
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain.engine.adaptive_cpu import Coefficients, adaptive_step_, counter, has_kernel
from bayesopt_chain.engine.sweep_cpu import pointers
from bayesopt_chain.optim._injection import AGAIN, draw_of
from bayesopt_chain.optim._noise import Normals
from bayesopt_chain.optim._plan import BLOCK, KERNEL_DTYPES, Form, Numbers, Piece, Plan, Rule, Work, are_plain, edges_of


def in_one_pass(rule: Rule, normals: Normals, plan: Plan) -> bool:
    """Make the whole step, if the kernel can.

    Returns:
        Whether the step was made. If not, nothing has moved.
    """
    plan.one_pass = False
    if plan.pieces is None:
        plan.pieces = _pieces(rule, normals, plan)
    if not plan.pieces or not all([_fits(rule, piece) for piece in plan.pieces]):
        return False
    for piece in plan.pieces:
        assert piece.known is not None
        numbers, (tensors, places, count) = piece.work[0].numbers, piece.known
        form = rule._form(numbers.group, numbers.learned_until)
        assert form is not None
        # the kernel writes by addresses, and autograd has to know that the tensors changed
        torch.autograd.graph.increment_version(tensors)
        count()
        if piece.is_large:
            _in_blocks(form, normals, piece, _coefficients(form, numbers))
            continue
        piece.fill()
        piece.fill_last()
        theta, *kept = places
        grads = pointers([w.param.grad for w in piece.work])  # pyright: ignore[reportArgumentType]
        adaptive_step_(form.kind, piece.sizes, [theta, grads, *kept], piece.fresh, _coefficients(form, numbers))
    plan.one_pass = True
    return True


def _in_blocks(form: Form, normals: Normals, piece: Piece, numbers: Coefficients) -> None:
    """Move one large leaf block by block, so that the draws of a block are still in cache when they are used."""
    (w,) = piece.work
    assert piece.known is not None and w.param.grad is not None
    fill, fill_last = normals.of(w), None
    if piece.last is not None and _last_key_and_count(w)[1] >= 0:
        fill_last = normals.of(w, last=True)
    theta, *kept = [places[0] if places else 0 for places in piece.known[1]]
    starts, item = [theta, w.param.grad.data_ptr(), *kept], piece.fresh.element_size()
    for a, b in pairwise(edges_of(piece.sizes[0], BLOCK)):
        # scratch memory is written from its beginning for each block, and everything else from the block's own address
        fill(piece.fresh[: b - a])
        places = [(ctypes.c_int64 * 1)(start + item * a) if start else None for start in starts]
        if piece.last is not None:
            places[-1] = pointers([piece.last])
            if fill_last is not None:
                fill_last(piece.last[: b - a])
        adaptive_step_(form.kind, (b - a,), places, piece.fresh, numbers)


def _coefficients(form: Form, numbers: Numbers) -> Coefficients:
    """Return the kernel's coefficients of a step."""
    group, linear, noise = numbers.group, numbers.linear, numbers.noise
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
        eps=float(group["eps"]),
        step_size=linear.step_size,
        previous=noise.previous,
        current=noise.current,
    )


def _pieces(rule: Rule, normals: Normals, plan: Plan) -> list[Piece]:
    """Group the leaves into pieces for the kernel.

    The list is empty if the kernel cannot make the step: a group asks for another implementation, a leaf gets no noise or gets
    it elsewhere than after the step, or the leaves are not on a CPU or not all float32 or all float64.
    """
    mine = {id(w.param) for w in plan.noisy}
    present = [p for group in rule.param_groups for p in group["params"] if p.grad is not None]
    if not has_kernel() or normals.runs is not None or not all([id(p) in mine for p in present]):
        return []
    for w in plan.noisy:
        group = w.group
        asked = group.get("foreach") is not None or group.get("differentiable")
        if asked or not w.numbers.route.is_late or rule._form(group, w.numbers.learned_until) is None:
            return []
    dtypes = {w.param.dtype for w in plan.noisy}
    if len(dtypes) != 1 or not dtypes.issubset(KERNEL_DTYPES) or not all([w.param.is_cpu for w in plan.noisy]):
        return []
    # all pieces share one scratch memory; edges_of makes a last block longer than BLOCK by up to 15 elements
    size = min(BLOCK + 16, sum([w.param.numel() for w in plan.noisy]))
    fresh = torch.empty(size, dtype=dtypes.pop(), device="cpu")
    last = torch.zeros_like(fresh) if plan.redrawn else None
    pieces: list[Piece] = []
    small: dict[tuple[object, ...], list[list[Work]]] = {}
    for w in plan.noisy:
        if w.param.numel() > BLOCK:
            mine_last = last if w.redraws else None
            pieces.append(Piece([w], (w.param.numel(),), True, fresh, mine_last, _no_draws, _no_draws))
            continue
        # a piece has equal numbers, one key and count of the last draws, and at most BLOCK elements
        together = small.setdefault((id(w.numbers), *_last_key_and_count(w)), [[]])
        if sum([x.param.numel() for x in together[-1]]) + w.param.numel() > BLOCK:
            together.append([])
        together[-1].append(w)
    pieces += [_together(normals, work, fresh, last) for together in small.values() for work in together]
    return pieces


def _last_key_and_count(w: Work) -> tuple[int, int]:
    """Return the key and the count of a last draw that is made again; (-1, -1) if there is none, or if it is kept."""
    of, at = AGAIN[0]
    return (w.state.get(of, -1), w.state.get(at, -1)) if w.redraws else (-1, -1)


def _together(normals: Normals, work: list[Work], fresh: Tensor, last: Tensor | None) -> Piece:
    """Make a piece of small leaves, whose draws lie one after the other in scratch memory."""
    sizes, redraws = tuple([w.param.numel() for w in work]), work[0].redraws
    fresh, last = fresh[: sum(sizes)], last[: sum(sizes)] if last is not None and redraws else None
    fill = partial(_draw, normals, work, fresh)
    fill_last = _no_draws if last is None else partial(_redraw, normals, work, last)
    return Piece(work, sizes, False, fresh, last, fill, fill_last)


def _draw(normals: Normals, work: list[Work], fresh: Tensor) -> None:
    """Overwrite ``fresh`` with this step's draws of small leaves, by Philox."""
    group = work[0].group
    normals.row(fresh, work, 0, group["noise_key"], group["noise_count"])


def _redraw(normals: Normals, work: list[Work], last: Tensor) -> None:
    """Overwrite ``last`` with the last draws of small leaves; with zeros if there are none yet."""
    key, count = _last_key_and_count(work[0])
    if count >= 0:
        normals.row(last, work, 0, key, count)
    else:
        last.zero_()


def _no_draws() -> None:
    """Do nothing, in place of a function that fills draws."""


def _fits(rule: Rule, piece: Piece) -> bool:
    """Return whether the kernel can take the tensors of a piece, and store their addresses in ``piece.known`` if it can."""
    dtype, shapes = piece.fresh.dtype, [w.param.shape for w in piece.work]
    grads: list[Any] = [w.param.grad for w in piece.work]
    if not are_plain(grads, dtype, shapes):
        return False
    if piece.known is not None:
        return True
    numbers = piece.work[0].numbers
    velocity, form = numbers.linear.velocity, rule._form(numbers.group, numbers.learned_until)
    if form is None or not all([form.square in w.state for w in piece.work]):  # torch makes its state in the first step
        return False
    lists = [
        [w.param for w in piece.work],
        [w.state[velocity] for w in piece.work] if velocity is not None else [],
        [w.state[form.square] for w in piece.work],
        [draw_of(rule, w, 0) for w in piece.work] if piece.last is None else [],
    ]
    if not all([are_plain(xs, dtype, shapes) for xs in lists if xs]):
        return False
    places = [pointers(xs) if xs else None for xs in lists]
    if piece.last is not None:
        places[-1] = pointers([piece.last] if piece.is_large else piece.last.split(piece.sizes))
    steps = [w.state["step"] for w in piece.work]
    piece.known = [x for xs in (*lists, steps) for x in xs], places, counter(steps)
    return True
