r"""Make steps with noise: in one pass over memory, or by torch's step to which noise is added.

With ``e`` and ``e_1`` of :mod:`bayesopt_chain.optim._rule` and the denominator ``D`` of an adaptive rule (``D = 1`` for SGD),
the noise that follows torch's step is

    V += D^(1/2) e,          theta -= D^(-1/2) (h e + h_1 e_1)

If the velocity averages ``g / D`` (RMSprop), its part is ``V += D^(-1/2) e``. ``e`` is ``current xi_t + previous xi_{t-1}``,
with the standard normals ``xi_t`` of step ``t``. The last draw ``xi_{t-1}`` is kept in ``optimizer.state[p]["noise"]``. Its
term is added first, and then the new draw overwrites it. If the group has ``noise_kept=False``, the last draw is not kept:
Philox makes it again, bit for bit, from its key ``state[p]["noise_of"]`` and its count ``state[p]["noise_at"]``.

On a CPU :mod:`bayesopt_chain.engine.optimizer_cpu` makes torch's step, draws and noise in one pass, with the same draws. A draw
is a function of key, leaf number, element and count, so that it does not depend on how leaves are cut into blocks.

A denominator ``D`` that no longer learns makes the step momentum with a fixed preconditioner, which torch does not have:

    V' = mu V + b g,        theta' = (1 - s) theta - (h V' + h_1 g) / D

or, if the velocity averages ``g / D`` (RMSprop), ``V' = mu V + g / D`` and ``theta' = theta - h V'``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain._torch import (
    dispatch_modes,
    foreach_add_,
    foreach_addcdiv_,
    foreach_addcmul_,
    foreach_copy_,
    foreach_mul_,
)
from bayesopt_chain.engine import optimizer_cpu
from bayesopt_chain.engine.optimizer_cpu import Coefficients, Job, counter
from bayesopt_chain.optim._checks import warn_of_rounding
from bayesopt_chain.optim._plan import KINDS, NEVER, Leaves, Plan
from bayesopt_chain.random.philox import Runs, parts_of_leaves
from bayesopt_chain.random.stream import draw_number

BLOCK = 2**18  # elements of a block of a large leaf, few enough for a block and its draws to stay in a CPU's cache
_SHAPE, _LAYOUT = attrgetter("shape"), attrgetter("dtype", "is_cpu", "layout")
_gradient: Callable[[Tensor], Tensor | None] = attrgetter("grad")
_DTYPES = (torch.float32, torch.float64)


def in_one_pass(plan: Plan) -> bool:
    """Make the whole step of all leaves by the kernel, if it can.

    It cannot if a group asks for another implementation, if a tensor is not contiguous, not on a CPU or neither float32 nor
    float64, or if torch has not yet made the state, as it does in the first step.

    Returns:
        Whether the step was made. If not, nothing has moved.
    """
    has_numbers, plan.in_one_pass = plan.in_one_pass and plan.repeats, False
    if not plan.is_whole or dispatch_modes():
        return False
    gradients: list[list[Any]] = []
    for x in plan.work:
        gradients.append([*map(_gradient, x.params)])
        if not x.fits or (x.job is None and not _has_job(x)) or not _are_alike(x.params[:1], x.shapes, gradients[-1]):
            return False
    rescale(plan)
    for x, here in zip(plan.work, gradients):
        if not has_numbers:
            x.job.set_numbers(_coefficients(x))
        if x.last is not NEVER:
            x.job.set_last_drawn(*x.last)
        # the kernel writes by addresses, and autograd has to know that the tensors changed
        torch.autograd.graph.increment_version(x.tensors)
        if x.count is not None:
            x.count()
        x.job.run(here, x.group["noise_key"], x.group["noise_count"])
    plan.in_one_pass = True
    return True


def _has_job(x: Leaves) -> bool:
    """Make the call of the kernel for these leaves; return whether the kernel can take their tensors."""
    params, direct, dtype = x.params, x.branches[1] is not None, x.params[0].dtype
    form: Any = x.form
    lists = [params, *([s.get(n) for s in x.states] if n else [] for n in (x.linear.velocity, form.square))]
    shapes = [*map(_SHAPE, params)]
    if dtype not in _DTYPES or not optimizer_cpu.has_kernel() or not _are_alike(params[:1], shapes, *lists):
        return False
    # no entry of the state is made before torch has made its own
    lists += [x.draws(0), x.draws(1) if direct else []]
    if not _are_alike(params[:1], shapes, *lists):
        return False
    draws = tuple(x.numbers), tuple([draw_number(n, 1) for n in x.numbers]) if direct else ()
    steps = [state["step"] for state in x.states] if form.square else []
    x.shapes, x.tensors, x.count = shapes, [y for ys in (*lists, steps) for y in ys], counter(steps) if steps else None
    x.job = Job(form.kind, dtype, tuple([p.numel() for p in params]), lists, draws)
    return True


def _are_alike(like: Sequence[Tensor], shapes: list[torch.Size], *lists: Sequence[Any]) -> bool:
    """Whether the kernel, which checks nothing, may read these tensors: contiguous ones of a dtype and of these shapes."""
    layout = {(like[0].dtype, True, torch.strided)}
    for xs in lists:
        if xs and not (KINDS.issuperset(map(type, xs)) and {*map(_LAYOUT, xs)} == layout):
            return False
        if xs and not (all(map(Tensor.is_contiguous, xs)) and [*map(_SHAPE, xs)] == shapes):
            return False
    return True


def _coefficients(x: Leaves) -> Coefficients:
    """Return the kernel's coefficients of a step."""
    group, linear, noise, form = x.group, x.linear, x.noise, x.form
    assert noise is not None and form is not None
    return Coefficients(
        sign=-1.0 if group["maximize"] else 1.0,
        decay=0.0 if group.get("decoupled_weight_decay") else float(group["weight_decay"]),
        keep=1.0 - linear.shrink,
        momentum=linear.momentum,
        gain=linear.gain,
        # a decay of 1 and a gain of 0 leave a frozen average unchanged
        square_decay=1.0 if x.is_frozen else form.square_decay,
        square_gain=0.0 if x.is_frozen else 1.0 - form.square_decay,
        correction=form.correction,
        eps=float(group.get("eps", 0.0)),
        step_size=linear.step_size,
        previous=noise.previous,
        current=noise.current,
        direct=linear.direct,
        direct_previous=noise.direct_previous,
        direct_current=noise.direct,
    )


def rescale(plan: Plan) -> None:
    """Before torch's step, multiply velocities by their scales, since momentum and noise are of the rescaled velocity."""
    for x in plan.work:
        if x.noise is not None and x.noise.velocity_scale != 1.0 and x.linear.velocity:
            velocities = [state.get(x.linear.velocity) for state in x.states]
            foreach_mul_([v for v in velocities if v is not None], x.noise.velocity_scale)


def add_noise(rule: Any, work: Sequence[Leaves], runs: Mapping[Tensor, Runs] | None, *, before_step: bool) -> None:
    """Add the noise to parameters and velocities.

    Noise of SGD's velocity is added before torch's step, as ``V += e / mu``: torch's step multiplies the velocity by ``mu`` and
    moves the parameter by ``-h V``, which adds ``e`` to both. All other noise is added after the step.

    Args:
        rule: the optimizer.
        work: all leaves that get noise.
        runs: by parameter, the elements of the whole leaf that it holds, as ranges; ``None`` if all are whole leaves.
        before_step: whether torch's step is yet to be made.
    """
    for x in work:
        assert x.noise is not None
        if x.noise.discarded and not before_step:
            # a step of momentum 0 discarded the velocity, and its weight decay saw the parameter before this move
            for p, state in zip(x.params, x.states):
                if state.get("momentum_buffer") is not None:
                    p.add_(state["momentum_buffer"], alpha=-x.noise.discarded)
        for branch, numbers in enumerate(x.branches):
            is_early = branch == 0 and x.is_early
            if numbers is None or is_early != before_step:
                continue
            if x.before is None and x.params[0].dtype in (torch.bfloat16, torch.float16):
                size = x.linear.step_size * max(x.noise.current, x.noise.direct)
                for p, state in zip(x.params, x.states):
                    d = rule._denominator(x.group, x.learned_until, state.__getitem__) if rule.adaptive else None
                    warn_of_rounding(rule._name, p, size, d)
            if branch not in x.chunks:
                x.chunks[branch] = _chunks(x, branch, runs)
            for chunk in x.chunks[branch]:
                _add(rule, x, branch, numbers, chunk)


def _add(rule: Any, x: Leaves, branch: int, numbers: tuple[float, float, float], chunk: _Chunk) -> None:
    """Add ``previous xi_{t-1} + current xi_t`` of one branch to a chunk of leaves."""
    step_size, previous, current = numbers
    params, velocities, roots = chunk.params, chunk.velocities, list[Tensor]()
    if rule.adaptive:
        row = rule._denominator(x.group, x.learned_until, chunk.row_of)
        roots = [r.view(p.shape) for r, p in zip(row.sqrt_().split([p.numel() for p in params]), params)]

    def add(size: float, draws: list[Tensor]) -> None:
        if branch == 0 and x.is_early:
            foreach_add_(velocities, draws, alpha=size / x.linear.momentum)
        elif not roots:
            foreach_add_(params, draws, alpha=-step_size * size)
            if velocities:
                foreach_add_(velocities, draws, alpha=size)
        else:
            foreach_addcdiv_(params, draws, roots, value=-step_size * size)
            if velocities:
                (foreach_addcdiv_ if rule.averages_scaled else foreach_addcmul_)(velocities, draws, roots, value=size)

    if previous:
        add(previous, chunk.kept or chunk.draw(*x.last[branch]))
    fresh = chunk.draw(x.group["noise_key"], x.group["noise_count"])
    if current:
        add(current, fresh)


class _Chunk:
    """Small leaves, or a block of a large one, whose tensors stay in cache and need little scratch memory.

    Attributes:
        params, velocities, kept: of its leaves: parameters, velocities and last draws; empty if there are none.
    """

    def __init__(self, x: Leaves, branch: int, parts: Sequence[tuple[int, Callable[[Tensor], Tensor], Runs]]) -> None:
        name, draws = x.linear.velocity if branch == 0 else None, x.draws(branch)
        self.params = [cut(x.params[k]) for k, cut, _ in parts]
        self.velocities = [cut(x.states[k][name]) for k, cut, _ in parts] if name else []
        self.kept = [cut(draws[k]) for k, cut, _ in parts] if draws else []
        self._parts = [(x.states[k], cut) for k, cut, _ in parts]
        self._elements = parts_of_leaves(
            tuple([runs for *_, runs in parts]), tuple([draw_number(x.numbers[k], branch) for k, *_ in parts])
        )
        self._scratch = self._room() if len(parts) > 1 else None
        if len(parts) == 1 and self.kept and self.kept[0].dtype in _DTYPES and self.kept[0].is_contiguous():
            self._scratch = self.kept[0].view(-1), self.kept  # the draw is made where it is kept

    def row_of(self, name: str) -> Tensor:
        """The elements of all leaves of a tensor of the state, as one vector."""
        return torch.cat([cut(state[name]).reshape(-1) for state, cut in self._parts])

    def draw(self, key: int, count: int) -> list[Tensor]:
        """Make the draws of a key and a count, over the last ones if these are kept."""
        row, views = self._scratch or self._room()
        at = [torch.full((), n, dtype=torch.int64, device=row.device) for n in (key, count)]
        torch.ops.bayesopt_chain.philox_normals_(row, *at, *self._elements[:3])
        if self.kept and views is not self.kept:
            foreach_copy_(self.kept, views)
        dtype = self.params[0].dtype
        return self.kept or ([view.to(dtype) for view in views] if dtype != row.dtype else views)

    def _room(self) -> tuple[Tensor, list[Tensor]]:
        """Memory for a draw, and the part of it for each leaf."""
        p = self.params[0]
        wide = torch.float64 if p.dtype == torch.float64 else torch.float32
        sizes = [p.numel() for p in self.params]
        row = torch.empty(sum(sizes), dtype=wide, device=p.device)
        return row, [x.view(p.shape) for x, p in zip(row.split(sizes), self.params)]


def _chunks(x: Leaves, branch: int, runs: Mapping[Tensor, Runs] | None) -> list[_Chunk]:
    """Put small leaves together, and cut large ones."""
    # on a GPU blocks need not fit a cache, and larger ones mean fewer kernel launches
    limit, room = BLOCK if x.params[0].is_cpu else 64 * BLOCK, 0
    chunks = list[list[Any]]()
    for k, (p, state) in enumerate(zip(x.params, x.states)):
        n, here = p.numel(), ((0, p.numel()),) if runs is None else runs[p]
        alike = [p, *(y for y in state.values() if torch.is_tensor(y) and y.shape == p.shape)]
        whole = n <= limit or torch.is_grad_enabled() or not all([y.is_contiguous() for y in alike])
        for b, elements in enumerate([here if n else ()] if whole else _cut(here, limit)):
            cut = _as_it_is if whole else partial(_block, start=b * limit, end=(b + 1) * limit)
            if not chunks or room < min(
                n, limit
            ):  # a chunk of several leaves keeps memory for its draws, which is to be small
                chunks.append([])
                room = BLOCK
            chunks[-1].append((k, cut, elements))
            room -= min(n, limit)
    return [_Chunk(x, branch, parts) for parts in chunks]


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _block(x: Tensor, start: int, end: int) -> Tensor:
    return x.view(-1)[start:end]


@lru_cache(maxsize=64)
def _cut(runs: Runs, n: int) -> list[Runs]:
    """Cut ranges of elements, tuples (start, length), into pieces of ``n`` elements; the last piece may be smaller."""
    pieces: list[list[tuple[int, int]]] = [[]]
    room = n
    for start, length in runs:
        while length:
            if not room:
                pieces.append([])
                room = n
            taken = min(room, length)
            pieces[-1].append((start, taken))
            start, length, room = start + taken, length - taken, room - taken
    return [tuple(piece) for piece in pieces]


def move_frozen(rule: Any, work: list[Leaves]) -> None:
    """Make the step of leaves whose denominator no longer learns, in place of torch's step."""
    for x in work:
        group, linear = x.group, x.linear
        for p, state in zip(x.params, x.states):
            # as in torch: the sign of maximize first, then the coupled weight decay
            g = -p.grad if group["maximize"] else p.grad
            if group["weight_decay"] and not group.get("decoupled_weight_decay", False):
                g = g.add(p, alpha=group["weight_decay"])
            denominator = rule._denominator(group, x.learned_until, state.__getitem__)
            p.mul_(1.0 - linear.shrink)
            if linear.direct:
                p.addcdiv_(g, denominator, value=-linear.direct)
            if linear.velocity is None:
                p.addcdiv_(g, denominator, value=-linear.step_size)
            elif rule.averages_scaled:
                velocity = state[linear.velocity].mul_(linear.momentum).addcdiv_(g, denominator)
                p.add_(velocity, alpha=-linear.step_size)
            else:
                velocity = state[linear.velocity].mul_(linear.momentum).add_(g, alpha=linear.gain)
                p.addcdiv_(velocity, denominator, value=-linear.step_size)
            rule._count_update(state, group)


@contextmanager
def without_gradients(params: list[Tensor]) -> Iterator[None]:
    """Set the gradients of some parameters to ``None`` for a while, so that torch's step leaves these parameters out."""
    grads = [p.grad for p in params]
    for p in params:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in zip(params, grads):
            p.grad = grad
