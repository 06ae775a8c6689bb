"""Static buffers: the tensors that a captured step reads and writes at every replay.

A recorded program works on flat lists of tensors at fixed addresses, and its caller has trees. Here one becomes the other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import _torch, batches
from bayesopt_chain.loop.capture.errors import CaptureError, describe
from bayesopt_chain.loop.interrupts import uninterrupted
from bayesopt_chain.loop.loss import Info


class Steps(NamedTuple):
    """What a captured run of several steps reports, stacked on axis 0.

    ``draws`` is ``()`` unless asked for; ``finite`` is, unless the step checks (``make_step(..., check_finite=True)``);
    ``negative_elbo`` is, unless the step is variational; ``gradient_norm`` and ``temperature`` are, unless it monitors them;
    ``weight`` is, unless the draws of the chain have weights: each is that of the parameters its step started from.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> bc.Steps(loss=torch.tensor([2.0, 1.0]), aux=()).loss.mean()
        tensor(1.5000)
    """

    loss: Tensor
    aux: Any
    draws: Any = ()
    finite: Any = ()
    negative_elbo: Any = ()
    gradient_norm: Any = ()
    temperature: Any = ()
    weight: Any = ()


class Slots:
    """Static buffers for the leaves of one tree. Leaves that are the same tensor share one buffer."""

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
        first: dict[int, int] = {}
        self.index = [first.setdefault(id(leaf), len(first)) for leaf in leaves]
        unique = {i: leaf for i, leaf in zip(self.index, leaves)}
        self.buffers = [unique[i].detach().clone() for i in range(len(unique))]
        self.leaves = [self.buffers[i] for i in self.index]
        # a tree of tuples cannot change under its holder, so that one tree of the buffers serves every call
        self.own = self.tree(self.buffers) if _is_immutable(tree) else None

    def tree(self, buffers: Sequence[Tensor]) -> Any:
        """The tree with these tensors, one for each buffer, as its leaves."""
        return optree.tree_unflatten(self.spec, [buffers[i] for i in self.index])

    def as_tree(self) -> Any:
        """The buffers as a tree. If the tree consists of tuples only, the same object is returned at every call."""
        return self.own if self.own is not None else optree.tree_unflatten(self.spec, self.leaves)

    def copy_in(self, tree: Any, what: str) -> None:
        """Copy the values of ``tree`` into the buffers; what :meth:`as_tree` returned has them already.

        Raises:
            ValueError: another structure, shape, dtype or device, where ``what`` names the tree.
        """
        if self.own is None or tree is not self.own:
            leaves, spec = optree.tree_flatten(tree)
            if not (len(leaves) == len(self.leaves) and all(map(is_, leaves, self.leaves)) and spec == self.spec):
                self.load(leaves, spec, what)

    def new_values(self, tree: Any, what: str) -> list[Tensor]:
        """The next value of each buffer, from a tree that the step returned.

        Raises:
            CaptureError: another structure, shape or dtype than the step was given, where ``what`` names the tree.
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

    def load(self, leaves: list, spec: Any, what: str) -> None:
        """Copy the user's leaves into the buffers.

        Raises:
            ValueError: another structure, shape, dtype or device than was captured; nothing is written then.
        """
        if spec != self.spec:
            raise ValueError(f"capture: {what} have the structure {spec}, captured was {self.spec}; capture again")
        written: dict[int, Tensor] = {}
        for n, (i, x) in enumerate(zip(self.index, leaves)):
            mine = self.buffers[i]
            if not torch.is_tensor(x) or x.shape != mine.shape or x.dtype != mine.dtype or x.device != mine.device:
                raise ValueError(
                    f"capture: {what}, leaf {n}: {describe(x)}, captured was {describe(mine)}; capture again"
                )
            if i in written and written[i] is not x and not torch.equal(written[i], x):
                raise ValueError(f"capture: {what}, leaf {n}: shared a tensor with another leaf; capture again")
            written[i] = x
        copies = {
            i: x.detach().clone() for i, x in written.items() if x is not self.buffers[i]
        }  # a clone of each first: x may be a view of another buffer, which would change under it
        with uninterrupted():
            for i, x in copies.items():
                self.buffers[i].copy_(x)


class Batch:
    """What a batch must look like, and the tensors of a batch in the form that the recorded program reads.

    The program relies on the strides of the first batch, and on batches that share no memory with what it overwrites.
    """

    def __init__(self, batch: Any, steps: int, dim: int | None, static: Sequence[Tensor]) -> None:
        self.leaves, self.spec = batches.flatten(batch)
        self.dim = dim
        self.written = {x.untyped_storage().data_ptr() for x in static}  # memory that the step overwrites
        if dim is not None:
            for n, x in enumerate(self.leaves):
                if torch.is_tensor(x) and x.shape[dim] != steps:
                    raise ValueError(f"capture: batch, leaf {n}: {describe(x)} has no {steps} steps along axis {dim}")
        self.strides = [x.stride() if torch.is_tensor(x) else None for x in self.leaves]
        self.immutable = _is_immutable(batch)
        self.last: tuple[Any, list, list[Tensor] | None] = (self, [], None)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the example batch; a batch may hold numbers and other constants besides."""
        return [x for x in self.leaves if torch.is_tensor(x)]

    def tensors_of(self, batch: Any) -> list[Tensor]:
        """The tensors of ``batch``, checked to look like the first one; the last batch, given again, is not checked again.

        Raises:
            ValueError: another structure, shape, dtype, device or constant.
        """
        seen, leaves, tensors = self.last
        if not (self.immutable and batch is seen):
            before, (leaves, spec) = leaves, batches.flatten(batch)
            if not (len(leaves) == len(before) and all(map(is_, leaves, before)) and spec == self.spec):
                self.check(leaves, spec)
            mine = [(x, stride) for x, stride in zip(leaves, self.strides) if stride is not None]
            tensors = [x for x, _ in mine] if all(self.fits(x, stride) for x, stride in mine) else None
            self.last = batch, leaves, tensors
        return tensors if tensors is not None else self.with_strides(leaves)

    def fits(self, x: Tensor, stride: tuple[int, ...]) -> bool:
        """Whether the program may read this tensor where it lies."""
        return x.stride() == stride and x.untyped_storage().data_ptr() not in self.written

    def with_strides(self, leaves: list) -> list[Tensor]:
        """The tensors of a batch, copied with the strides of the first batch if they have others or lie in a static buffer."""
        return [
            x
            if self.fits(x, stride)
            else torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x.detach())
            for x, stride in zip(leaves, self.strides)
            if stride is not None
        ]

    def check(self, leaves: list, spec: Any) -> None:
        """Refuse a batch that does not look like the first one.

        Raises:
            ValueError: naming the first leaf that differs.
        """
        if spec != self.spec:
            raise ValueError(f"capture: the batch has the structure {spec}, captured was {self.spec}; capture again")
        for n, (x, mine) in enumerate(zip(leaves, self.leaves)):
            if torch.is_tensor(mine):
                same = torch.is_tensor(x) and _looks(x) == _looks(mine)
            else:
                same = type(x) is type(mine) and x == mine
            if not same:
                raise ValueError(
                    f"capture: batch, leaf {n}: {describe(x)}, captured was {describe(mine)}; keep batches of one shape "
                    "(drop_last=True) and numbers constant, give capture signatures=2 for a short last batch, or capture again"
                )

    def has_shapes_of(self, batch: Any) -> bool:
        """Whether a batch looks like the first one."""
        leaves, spec = batches.flatten(batch)
        try:
            self.check(leaves, spec)
        except ValueError:
            return False
        return True

    def differs_in_lengths(self, batch: Any) -> bool:
        """Whether a batch looks like the first one but for the lengths of its tensors."""
        leaves, spec = batches.flatten(batch)
        return spec == self.spec and all(
            [
                torch.is_tensor(x) and (x.ndim, x.dtype, x.device) == (mine.ndim, mine.dtype, mine.device)
                if torch.is_tensor(mine)
                else type(x) is type(mine) and x == mine
                for x, mine in zip(leaves, self.leaves)
            ]
        )

    def of_step(self, tensors: Sequence[Tensor], k: int) -> Sequence[Tensor]:
        """The tensors that step ``k`` of a call sees: slice ``k`` along the axis of steps, or the whole batch."""
        return tensors if self.dim is None else [x.select(self.dim, k) for x in tensors]

    def tree(self, tensors: Sequence[Tensor]) -> Any:
        """The batch with these tensors in the place of its own."""
        given = iter(tensors)
        return self.spec.unflatten([next(given) if torch.is_tensor(x) else x for x in self.leaves])


def _looks(x: Tensor) -> tuple[Any, ...]:
    """What of a tensor a program is recorded for."""
    return x.shape, x.dtype, x.device, x.layout


def _is_immutable(tree: Any) -> bool:
    """Whether a tree consists of tuples only, so that the same object always holds the same leaves."""
    if isinstance(tree, tuple):
        return all(map(_is_immutable, tree))
    return tree is None or optree.tree_is_leaf(tree)


class Body:
    """The step as a function of flat lists of tensors, with the slots and the batch that translate lists and trees."""

    def __init__(self, step, params, state, batch, steps: int, batch_dim: int | None, draws: bool) -> None:
        self.step, self.steps, self.draws = step, steps, draws
        self.params, self.state = Slots(params), Slots(state)
        self.batch = Batch(batch, steps, batch_dim, self.static)

    def with_batch(self, batch: Any) -> Body:
        """The same step on the same static buffers, for batches like this one."""
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
        """Run one step: new values of the static buffers, and the tensors of its report (loss, aux, perhaps a draw)."""
        n = len(self.params.buffers)
        params, state, info = (step or self.step)(
            self.params.tree(static[:n]), self.state.tree(static[n:]), self.batch.tree(batch)
        )
        report: Any = info
        if self.draws or self.steps > 1:
            known = info._asdict()
            report = Steps(**{k: v for k, v in known.items() if k in Steps._fields}, draws=params if self.draws else ())
        leaves, self._info_spec = optree.tree_flatten(report)
        self._constants = {i: x for i, x in enumerate(leaves) if not torch.is_tensor(x)}
        self._single = len([x for x in optree.tree_leaves(info) if torch.is_tensor(x)]) if self.steps == 1 else 0
        new = [*self.params.new_values(params, "params"), *self.state.new_values(state, "a state")]
        return new, [x for x in leaves if torch.is_tensor(x)]

    def write(self, static: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        """Write new values into the static buffers.

        A new value may share memory with a buffer: the step kept an old value, or exchanged two. Those are copied before
        anything is written.
        """
        mine = {_torch.storage_of(buffer) for buffer in static}
        values = [x if x is b or _torch.storage_of(x) not in mine else kept(x) for b, x in zip(static, new)]
        for buffer, value in zip(static, values):
            if value is not buffer:
                buffer.copy_(value)

    def together(self, reports: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
        """The reports of all steps, stacked on axis 0; of a single step only its draws are stacked."""
        if len(reports[0]) == self._single:
            return reports[0]
        return [xs[0] if i < self._single else torch.stack(xs) for i, xs in enumerate(zip(*reports))]

    def info(self, tensors: Sequence[Tensor]) -> Info | Steps:
        """The report as its caller knows it: these tensors, and the constants that the step reported beside them."""
        leaves: list[Any] = list(tensors)
        for i, constant in self._constants.items():
            leaves.insert(i, constant)
        report: Any = optree.tree_unflatten(self._info_spec, leaves)
        return report


@torch.library.custom_op("bayesopt_chain::kept", mutates_args=())
def kept(x: Tensor) -> Tensor:
    """Copy a tensor by an operation of our own: inductor drops the clone of an input even if the input is overwritten later."""
    return x.clone()


@kept.register_fake
def _(x):
    return torch.empty_like(x)
