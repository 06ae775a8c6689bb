"""Static buffers: the tensors that a captured step reads and writes at every replay.

A recorded program works on flat lists of tensors at fixed addresses, while its caller uses trees. The classes of this module
convert between the two.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain import _torch, batches
from bayesopt_chain.loop.capture.errors import CaptureError, describe
from bayesopt_chain.loop.interrupts import uninterrupted
from bayesopt_chain.loop.loss import Info
from bayesopt_chain.trees import has_leaves, outline


class Slots:
    """Static buffers for the leaves of one tree. Leaves that are the same tensor share one buffer.

    Attributes:
        spec: the structure of the tree.
        index: for each leaf, the index of its buffer.
        buffers: the buffers.
        leaves: for each leaf, its buffer.
        views, addresses: of the same memory, which the recorded program writes. A user, who is handed the buffers, may replace
            the ``.data`` of one.
        own: the buffers as a tree, if the tree consists of tuples only; else ``None``.
    """

    def __init__(self, tree: Any) -> None:
        leaves, self.spec = optree.tree_flatten(tree)
        for leaf in leaves:
            if not torch.is_tensor(leaf):
                raise TypeError(f"capture: params and state must hold tensors only, found {leaf!r}")
            if _torch.is_dtensor(leaf):
                raise CaptureError(
                    "capture: params or state hold a DTensor, spread over ranks, whose messages a captured step cannot hold; "
                    "run the step as it is, or keep whole parameters on every rank"
                )
        # leaves that were one tensor must stay one, or a write to one of them would not be seen in the other
        first: dict[int, int] = {}
        self.index = [first.setdefault(id(leaf), len(first)) for leaf in leaves]
        unique = {i: leaf for i, leaf in zip(self.index, leaves)}
        self.buffers = [unique[i].detach().clone() for i in range(len(unique))]
        self.leaves = [self.buffers[i] for i in self.index]
        self.views, self.addresses = [x.detach() for x in self.buffers], [*map(Tensor.data_ptr, self.buffers)]
        # a tree of tuples cannot be changed by its user, so that every call can return the same tree
        self.own = self.tree(self.buffers) if _is_immutable(tree) else None

    def tree(self, buffers: Sequence[Tensor]) -> Any:
        """Return the tree with these tensors, one for each buffer, as its leaves."""
        return optree.tree_unflatten(self.spec, [buffers[i] for i in self.index])

    def as_tree(self) -> Any:
        """Return the buffers as a tree. If the tree consists of tuples only, it is the same object at every call."""
        return self.own if self.own is not None else optree.tree_unflatten(self.spec, self.leaves)

    def copy_in(self, tree: Any, what: str) -> None:
        """Copy the values of a tree into the buffers, unless its leaves are the buffers.

        Args:
            tree: the tree.
            what: its name in messages.

        Raises:
            ValueError: the tree has another structure, or a leaf another shape, dtype or device; or a buffer's own memory has
                moved, away from the addresses that the program has. Nothing is written then.
        """
        # a tree of tuples, handed back, has the leaves that it had
        is_last = (self.own is not None and tree is self.own) or has_leaves(tree, self.spec, self.leaves)
        if is_last and [*map(Tensor.data_ptr, self.buffers)] == self.addresses:
            return
        if [*map(Tensor.data_ptr, self.views)] != self.addresses:
            raise ValueError(
                f"capture: {what}: the memory of what a call returned was moved (share_memory_(), a queue to another process, "
                "resize_()), and the step would write to where it was: send copies (x.clone()), and capture again"
            )
        leaves, written = leaves_like(tree, self.spec, what), dict[int, Tensor]()
        for n, (i, x) in enumerate(zip(self.index, leaves)):
            mine = self.views[i]
            if not torch.is_tensor(x) or x.shape != mine.shape or x.dtype != mine.dtype or x.device != mine.device:
                raise ValueError(
                    f"capture: {what}, leaf {n}: {describe(x)}, captured was {describe(mine)}; capture again"
                )
            # leaves that shared a tensor at capture may now be two tensors, as after loading, if their values are equal
            if i in written and written[i] is not x and not torch.equal(written[i], x):
                raise ValueError(f"capture: {what}, leaf {n}: shared a tensor with another leaf; capture again")
            written[i] = x
        # clones first, since a leaf may be a view of another buffer, which the copies overwrite
        copies = {i: x.detach().clone() for i, x in written.items() if not x.is_set_to(self.views[i])}
        with uninterrupted():
            for x, view in zip(self.buffers, self.views):
                if not x.is_set_to(view):
                    x.data = view
            for i, x in copies.items():
                self.buffers[i].copy_(x)

    def new_values(self, tree: Any, what: str) -> list[Tensor]:
        """Return the next value of each buffer, from a tree that the step returned.

        Args:
            tree: the tree.
            what: its name in messages.

        Returns:
            One tensor for each buffer.

        Raises:
            CaptureError: the tree has another structure, or a leaf another shape or dtype, than the step was given; leaves that
                share a buffer became different tensors.
        """
        out: list[Tensor | None] = [None] * len(self.buffers)
        leaves, spec = optree.tree_flatten(tree)
        if spec != self.spec or any(
            not torch.is_tensor(x) or x.shape != mine.shape or x.dtype != mine.dtype
            for x, mine in zip(leaves, self.leaves)
        ):
            raise CaptureError(
                f"capture: the step returns {what} of another structure, shape or dtype than it was given: run a step or two "
                "before capturing, and use no state that grows (curvature with structure='root')"
            )
        for i, leaf in zip(self.index, leaves):
            if out[i] is not None and out[i] is not leaf:
                raise CaptureError(
                    "capture: leaves of the state that were one tensor became two; give the step a state with "
                    "tensors of its own (copy.deepcopy leaf by leaf) and capture again"
                )
            out[i] = leaf
        return [x for x in out if x is not None]


class Batch:
    """Checks batches against the first one, and returns their tensors in the form that the recorded program reads.

    The program reads tensors with the strides of the first batch, which must not share memory with the static buffers.

    Attributes:
        leaves, spec: the leaves and the structure of the first batch.
        first: these leaves as they were.
        dim: the axis of its tensors that counts steps, or ``None``.
        written: the addresses of the memory of the static buffers.
        strides: the strides of the tensors of the first batch; ``None`` for other leaves.
        last: the leaves of the last batch, its tensors if the program can read them without copies, and views of these if it
            came twice.
    """

    def __init__(self, batch: Any, steps: int, dim: int | None, static: Sequence[Tensor]) -> None:
        self.leaves, self.spec = batches.flatten(batch)
        # a user who replaces their ``.data`` does not change these
        self.first = [x.detach() if torch.is_tensor(x) else x for x in self.leaves]
        self.dim = dim
        self.written = {x.untyped_storage().data_ptr() for x in static}
        if dim is not None:
            for n, x in enumerate(self.leaves):
                if torch.is_tensor(x) and (dim not in range(-x.ndim, x.ndim) or x.shape[dim] != steps):
                    raise ValueError(f"capture: batch, leaf {n}: {describe(x)} has no {steps} steps along axis {dim}")
        self.strides = [x.stride() if torch.is_tensor(x) else None for x in self.leaves]
        self.last: tuple[list, list[Tensor] | None, list[Tensor]] = ([], None, [])

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the first batch, without numbers and other constants."""
        return [x for x in self.leaves if torch.is_tensor(x)]

    def tensors_of(self, batch: Any) -> list[Tensor]:
        """Check a batch against the first one, and return its tensors. One that came twice is not checked again.

        Raises:
            ValueError: the batch has another structure, or a leaf another shape, dtype, device or value of a constant.
        """
        leaves, tensors, views = self.last
        is_last = has_leaves(batch, self.spec, leaves)
        if not (is_last and views and all(map(Tensor.is_set_to, tensors or (), views))):
            leaves = self.checked(batch)
            mine = [(x, stride) for x, stride in zip(leaves, self.strides) if stride is not None]
            tensors = [x for x, _ in mine] if all(self.fits(x, stride) for x, stride in mine) else None
            # of a batch that came twice views, which show whether a ``.data`` was replaced
            views = [x.detach() for x in tensors or ()] if is_last else []
            self.last = leaves, tensors, views
        return tensors if tensors is not None else self.with_strides(leaves)

    def fits(self, x: Tensor, stride: tuple[int, ...]) -> bool:
        """Whether the program can read a tensor without a copy: it has these strides, and is in no static buffer."""
        return x.stride() == stride and x.untyped_storage().data_ptr() not in self.written

    def with_strides(self, leaves: list) -> list[Tensor]:
        """Return the tensors of a batch, with copies of those that the program cannot read."""
        return [
            x
            if self.fits(x, stride)
            else torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x.detach())
            for x, stride in zip(leaves, self.strides)
            if stride is not None
        ]

    def checked(self, batch: Any, lengths: bool = True) -> list:
        """Compare a batch with the first one, and return its leaves.

        Args:
            batch: the batch.
            lengths: whether the axes of tensors have to be of the same lengths, too.

        Raises:
            ValueError: they differ in structure, shape, dtype, device, layout or a constant; the message names the first leaf
                that differs.
        """
        leaves = leaves_like(batch, self.spec, "batch")
        for n, (x, mine) in enumerate(zip(leaves, self.first)):
            if torch.is_tensor(mine):
                same = torch.is_tensor(x) and signature(x)[1:] == signature(mine)[1:]
                same = same and (x.shape == mine.shape if lengths else x.ndim == mine.ndim)
            else:
                same = type(x) is type(mine) and x == mine
            if not same:
                raise ValueError(
                    f"capture: batch, leaf {n}: {describe(x)}, captured was {describe(mine)}; keep batches of one shape "
                    "(drop_last=True) and numbers constant, give capture signatures=2 for a short last batch, or capture again"
                )
        return leaves

    def of_step(self, tensors: Sequence[Tensor], k: int) -> Sequence[Tensor]:
        """Return the tensors of step ``k`` of a call: slice ``k`` along the axis of steps, or the whole batch."""
        return tensors if self.dim is None else [x.select(self.dim, k) for x in tensors]

    def tree(self, tensors: Sequence[Tensor]) -> Any:
        """Return the first batch with these tensors in place of its own."""
        given = iter(tensors)
        return self.spec.unflatten([next(given) if torch.is_tensor(x) else x for x in self.leaves])


def leaves_like(tree: Any, spec: optree.PyTreeSpec, what: str) -> list[Any]:
    """Return the leaves of a tree of the structure that was captured. A dictionary of another class is taken by its keys.

    Raises:
        ValueError: the tree has another structure.
    """
    leaves: list[Any] = [None]  # which is no leaf
    with suppress(ValueError):
        leaves = spec.flatten_up_to(tree)
    if not optree.all_leaves(leaves, namespace=spec.namespace):
        given, captured = map(outline, (optree.tree_structure(tree, namespace=spec.namespace), spec))
        raise ValueError(
            f"capture: {what}: the structure is {given}, captured was {captured}; give {what} in the same containers (a list "
            "is no tuple), or capture again"
        )
    return leaves


def signature(x: Tensor) -> tuple[Any, ...]:
    """Return the properties of a tensor that a recorded program depends on."""
    return x.shape, x.dtype, x.device, x.layout


def require_as_captured(closed_over: Sequence[Tensor], first: Sequence[Tensor]) -> None:
    """Refuse tensors that the step closes over, if a ``.data`` of another form was put into one since it was captured.

    Args:
        closed_over: the tensors.
        first: their views of that time.

    Raises:
        CaptureError: the program would read behind the end of one.
    """
    for x, was in zip(closed_over, first):
        if signature(x) != signature(was):
            raise CaptureError(
                f"capture: a tensor that the step closes over is {describe(x)}, captured was {describe(was)}; make it a part "
                "of the batch, or capture again"
            )


def _is_immutable(tree: Any) -> bool:
    """Whether a tree consists of tuples only, so that the same object always holds the same leaves."""
    return all(map(_is_immutable, tree)) if isinstance(tree, tuple) else optree.tree_is_leaf(tree, none_is_leaf=True)


class Body:
    """The step as a function of flat lists of tensors.

    Attributes:
        step: the step, a function of trees.
        steps: the number of steps in a call.
        draws: whether the report holds the parameters after every step.
        params, state: the static buffers.
        batch: the first batch.
        single: how many tensors of the report are not stacked, which is known once a step was made.
    """

    def __init__(self, step, params, state, batch, steps: int, batch_dim: int | None, draws: bool) -> None:
        self.step, self.steps, self.draws = step, steps, draws
        self.params, self.state = Slots(params), Slots(state)
        self.batch = Batch(batch, steps, batch_dim, self.static)

    def with_batch(self, batch: Any) -> Body:
        """Return the same step on the same static buffers for batches like this one."""
        other = copy.copy(self)
        other.batch = Batch(batch, self.steps, self.batch.dim, self.static)
        return other

    @property
    def static(self) -> list[Tensor]:
        """All static buffers: those of the parameters, then those of the state."""
        return [*self.params.buffers, *self.state.buffers]

    def advance(
        self, static: Sequence[Tensor], batch: Sequence[Tensor], step: Callable | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Run one step.

        Args:
            static: the values of the static buffers before the step.
            batch: the tensors of the step's batch.
            step: a step to run in place of the body's.

        Returns:
            The new values of the static buffers, and the tensors of the report (loss, aux, and the like).
        """
        n = len(self.params.buffers)
        params, state, info = (step or self.step)(
            self.params.tree(static[:n]), self.state.tree(static[n:]), self.batch.tree(batch)
        )
        leaves, self._info_spec = optree.tree_flatten(info._replace(draws=params) if self.draws else info)
        # the program returns tensors only; constants are put back by ``info``
        self._constants = {i: x for i, x in enumerate(leaves) if not torch.is_tensor(x)}
        self.single = len([x for x in optree.tree_leaves(info) if torch.is_tensor(x)]) if self.steps == 1 else 0
        new = [*self.params.new_values(params, "params"), *self.state.new_values(state, "a state")]
        return new, [x for x in leaves if torch.is_tensor(x)]

    def write(self, static: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        """Write new values into the static buffers.

        A new value may share memory with a buffer, if the step kept an old value or exchanged two of them. Such values are
        copied before anything is written.
        """
        mine = {_torch.storage_of(buffer) for buffer in static}
        # a buffer that the step returns as it is needs no write
        values = [x if x is b or _torch.storage_of(x) not in mine else kept(x) for b, x in zip(static, new)]
        for buffer, value in zip(static, values):
            if value is not buffer:
                buffer.copy_(value)

    def together(self, reports: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
        """Stack the reports of all steps on axis 0. The report of a single step is not stacked, except for its draws."""
        if len(reports[0]) == self.single:
            return reports[0]
        return [xs[0] if i < self.single else torch.stack(xs) for i, xs in enumerate(zip(*reports))]

    def info(self, tensors: Sequence[Tensor]) -> Info:
        """Return the report as a tree of these tensors and of the constants that the step reported."""
        leaves: list[Any] = list(tensors)
        for i, constant in self._constants.items():
            leaves.insert(i, constant)
        report: Any = optree.tree_unflatten(self._info_spec, leaves)
        return report


@torch.library.custom_op("bayesopt_chain::kept", mutates_args=())
def kept(x: Tensor) -> Tensor:
    """Copy a tensor by a custom operation.

    Inductor removes ``clone`` of an input, also if the input is overwritten later; it does not remove this operation.
    """
    return x.clone()


@kept.register_fake
def _(x):
    """Return an empty result of the right shape, for tracing."""
    return torch.empty_like(x)
