"""Turns a batch into per-datum gradients of the outputs, a chunk at a time, so that no Jacobian is ever held.

For the columns S ``[K, b, *event]`` of the output root of a chunk of b data, one forward pass is pulled back for
several columns at once:

    (x, g) of every tapped parameter       one vjp with respect to the tapped outputs, vmapped over columns
    rows J_b^T s_kb of the other ones      one vjp a datum, vmapped over data and columns where that is right

Columns are made when they are pulled back, and not held. Memory is the forward pass of b data, and K' columns with
their output gradients for each of them: b and K' are chosen, from the shapes that one datum's forward pass shows, so
that their sum stays below ``chunk_bytes``; one datum and one column are the least there is.

Which parameters have taps is settled on the first chunk, before any of it is handed out (``_plan.py`` says how).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, cast

import optree
import torch
from torch import Tensor

from bayesopt_chain._torch import gradients_of_columns
from bayesopt_chain.curvature._autodiff import UNSUPPORTED, vjp, without_fused_recurrence
from bayesopt_chain.curvature._kinds import Grouped, Kind, Matrix, Vector, joined_inputs, joined_outputs
from bayesopt_chain.curvature._plan import (
    WRONG_TAP,
    Affine,
    Forward,
    TapPlan,
    batch_size,
    fresh_leaves,
    misplaced,
    over_data,
    part,
    parts,
    require_same_outputs,
    unlike,
)
from bayesopt_chain.curvature._taps import Check, Taps, Use
from bayesopt_chain.likelihoods import Likelihood, OutputRoot
from bayesopt_chain.tracing import is_hidden, is_transformed
from bayesopt_chain.trees import Tree, wide

RootOf = Callable[[Tensor, Any], OutputRoot]

SMALL_CHUNK_BYTES = 2**22
LARGE_CHUNK_BYTES = 2**28  # the most that a chunk may hold by default, unless one datum and one column need more
FEW_DATA = 32  # a chunk may hold so many pairs of a datum and a column, unless a structure says otherwise


class Gradient(NamedTuple):
    """A leaf's gradients for a chunk of data and columns.

    Attributes:
        leaf: its number.
        kind: in what form they are, see ``_kinds.py``.
        x, g: functions that give the layer's inputs and output gradients in that form.
        tap: the number of the tapped layer, if ``g()`` is that layer's output gradient unchanged; all leaves with one tap then
            have the same ``g()``. Else None.
    """

    leaf: int
    kind: Kind
    x: Callable[[], Tensor]
    g: Callable[[], Tensor]
    tap: int | None = None


class InputWeights(NamedTuple):
    """How much the data, and the positions at which they use a leaf, count in a factor of the inputs alone.

    Attributes:
        of_data: ``[b]``: the mean of the positive weights of a datum's targets; 0 where no weight is positive.
        of_positions: from a leaf to ``[b, T]``, whose sum over T is ``of_data``.
    """

    of_data: Tensor
    of_positions: Callable[[int], Tensor]


class Chunk(NamedTuple):
    """Gradients for some data and some columns.

    Attributes:
        outputs: the outputs of the data, ``[b, *event]``.
        first: whether these are the first columns of the data, so that their layers' inputs have not come before.
        gradients: one for each leaf that is not in ``summed``.
        summed: in the first chunk of the data, and for a structure that asks for it, the leaves of the last layer: there
            ``g()`` is what ``Demand.of_last_layer`` makes of all columns together.
        weights: where targets have weights and the structure asks for them; ``None`` where each counts once.
    """

    outputs: Tensor
    first: bool
    gradients: list[Gradient]
    summed: list[Gradient]
    weights: InputWeights | None = None


@dataclass
class Demand:
    """What is made of the gradients, from which it follows how large chunks may be.

    Attributes:
        formed: how many numbers are formed from the gradient of one datum and column.
        held: how many numbers the result holds.
        few_data: how many pairs of a datum and a column may always share a chunk.
        columns_together: whether all columns of a datum must be in one chunk.
        weighs_inputs: whether ``Chunk.weights`` is wanted.
        few_shared: for models in which a weight is used at several positions of a datum (convolutions), how many data may
            always share a chunk. Memory then goes to data before columns, down to one column at a time: torch's convolutions
            and max pooling loop over the columns that are pulled back together. 0 for columns before data there too.
    """

    formed: int = 0
    held: int = 0
    few_data: int = FEW_DATA
    columns_together: bool = False
    weighs_inputs: bool = False
    few_shared: int = 0

    def accepts(self, plan: TapPlan) -> None:
        """Raise for a model of which nothing can be made."""

    def of_last_layer(self, use: Use, x: Tensor, root: OutputRoot, outputs: Tensor) -> Callable[[], Tensor] | None:
        """What is wanted of all columns of the layer whose output is the model's, without making one.

        Args:
            use: of a leaf in that layer.
            x: what the layer saw.
            root, outputs: the model's.

        Returns:
            A function that gives it; None where there is none.
        """
        return None


class Linearised(NamedTuple):
    """Some data run through the model.

    Attributes:
        data: the batch of them.
        size: how many they are.
        outputs: ``[size, *event]``.
        uses: which leaf is used in which tapped layer; ``inputs`` is what the layer of each saw.
        pull: the pullback of columns to the gradients of the tapped outputs.
        last_tap: the tapped layer whose output is the model's.
        untapped: the leaves that could not be tapped in this pass, with the reasons.
        tapped_outputs: the tapped outputs for the last datum, to be compared with those of the datum alone.
    """

    data: Any
    size: int
    outputs: Tensor
    uses: list[Use]
    inputs: list[Tensor]
    pull: Callable[[Tensor], list[Tensor]]
    last_tap: int | None
    untapped: dict[int, str]
    tapped_outputs: list[Tensor]

    def by_leaf(self, plan: TapPlan) -> dict[int, list[tuple[Use, Tensor]]]:
        """The uses of every leaf that the plan taps, with what each saw."""
        pairs: dict[int, list[tuple[Use, Tensor]]] = {}
        for use, x in zip(self.uses, self.inputs):
            if use.leaf not in plan.reasons:
                pairs.setdefault(use.leaf, []).append((use, x))
        return pairs


# some columns ``[K, b, *event]`` pulled back: to every tapped output, and to rows of every leaf without a tap
Pulled = tuple[list[Tensor], list[Tensor]]


@dataclass(frozen=True)
class BatchPullback:
    """The gradients of a batch's outputs, to be made a chunk at a time.

    Attributes:
        forward: ``forward(params, batch) -> outputs [B, *event]``.
        params: the parameters.
        batch: the data.
        targets: the targets of the data, handed on to ``root_of``.
        root_of: ``root_of(outputs, targets)`` gives the output root, whose columns are pulled back.
        demand: what is made of the gradients.
        chunk_bytes: bound on what is held at once.
        draws: whether ``root_of`` draws random numbers. Then it is called for the last datum alone at every batch, also where
            the plan is remembered, so that the numbers drawn afterwards do not depend on what is remembered.
        likelihood: gives the weights of the targets. Default: every target counts once.
    """

    forward: Forward
    params: Tree
    batch: Any
    targets: Any
    root_of: RootOf
    demand: Demand
    chunk_bytes: int | None = None
    draws: bool = False
    likelihood: Likelihood | None = None

    def chunks(self, plan: TapPlan, check: Check) -> Iterator[Chunk]:
        """Yield the gradients of all data and columns.

        Args:
            plan: from the batch's last datum.
            check: says whether this pass has to compare anything, and takes note of what it shows and of its plan.
        """
        check.is_done |= isinstance(self.forward, Affine)
        self.demand.accepts(plan)
        n = batch_size(self.batch)
        if self.draws or not plan.columns:
            plan = plan._replace(columns=self.root_of(plan.probe, part(self.targets, n - 1, n)).columns)
        columns = plan.columns
        data, at_once = self._sizes(plan, n, 1 if self._makes_no_column(plan) else columns)
        # The chunks run backwards so that the datum that was probed comes last in the first of them, where it is compared.
        for stop in range(n, 0, -data):
            start = max(0, stop - data)
            linear = self._linearise(start, stop, plan, check)
            root = self.root_of(linear.outputs, part(self.targets, start, stop))
            ready = None
            if stop == n and not check.is_done:
                plan, ready = self._settle(linear, root, at_once, plan, check)
            summed = self._last_layer(linear, root, plan)
            weights = self._input_weights(linear, part(self.targets, start, stop), plan)
            if len(summed) == len(plan.names):
                yield Chunk(linear.outputs, True, [], summed, weights)
                continue
            done = {gradient.leaf for gradient in summed}
            inputs_of = partial(_joined_inputs, linear, linear.by_leaf(plan))
            if self.demand.few_shared and at_once < columns:  # unfolded once for all columns
                inputs_of = cache(inputs_of)
            for k in range(0, columns, at_once):
                pulled, ready = ready or self._pull(linear, root.part(k, min(k + at_once, columns)), plan), None
                gradients = _gradients(linear, pulled, plan, done, inputs_of)
                yield Chunk(linear.outputs, k == 0, gradients, summed if k == 0 else [], weights)
                del pulled, gradients  # before the next ones are made
            del linear, root, inputs_of
        check.plan = plan

    def _makes_no_column(self, plan: TapPlan) -> bool:
        """Whether everything is known of all columns together: the model is a layer, and the structure sums it."""
        if not isinstance(self.forward, Affine) or self.draws:
            return False
        n, known = batch_size(self.batch), self.params
        root = self.root_of(plan.probe, part(self.targets, n - 1, n))
        uses = zip(*self.forward.uses(known, part(self.batch, n - 1, n)[0]))
        return all(self.demand.of_last_layer(use, x, root, plan.probe) is not None for use, x in uses)

    def _sizes(self, plan: TapPlan, n: int, columns: int) -> tuple[int, int]:
        """Return how many data, and how many columns, go into a chunk.

        Without ``chunk_bytes`` a chunk may be as large as the result, and no less than what a few pairs of a datum and a
        column need.
        """
        leaves, demand = optree.tree_leaves(self.params), self.demand
        item = plan.probe.element_size()
        activations = sum(shape.numel() for shape, _ in plan.shapes)
        generic = sum(leaves[index].numel() for index in plan.generic)
        is_shared = demand.few_shared and not plan.generic and any(_is_shared(use, plan) for use in plan.uses)
        unfolded = (sum if is_shared else max)([0, *(_unfolded(use, plan) for use in plan.uses)])
        # Numbers for one datum: the forward pass with its graph, and for each column its gradients of the taps.
        once = 4 * activations + unfolded + 3 * plan.probe.numel()
        unfolded = max((use.canonical.unfolds * plan.shapes[use.tap][0].numel() for use in plan.uses), default=0)
        per_column = 2 * activations + generic + demand.formed + plan.probe.numel() + unfolded
        pairs = demand.few_shared if is_shared else demand.few_data
        few = min(n, pairs)
        together = min(columns, -(-pairs // few))  # columns that make up for a small batch
        few = min(few * (once + together * per_column), LARGE_CHUNK_BYTES // item)
        by_default = max(SMALL_CHUNK_BYTES // item, demand.held, few)
        numbers = by_default if self.chunk_bytes is None else self.chunk_bytes // item
        if is_shared:
            data = max(1, min(n, numbers // (once + per_column)))
            at_once = max(1, min(columns, (numbers // data - once) // per_column))
        else:
            at_once = max(1, min(columns, (numbers - once) // per_column))
            data = max(1, min(n, numbers // (once + at_once * per_column)))
        if demand.columns_together:
            data, at_once = max(1, data * at_once // columns), columns
        return -(-n // -(-n // data)), at_once  # the same number of chunks, of one length

    def _linearise(self, start: int, stop: int, plan: TapPlan, check: Check) -> Linearised:
        """Run some data through ``forward``, tapped."""
        data, b = part(self.batch, start, stop), stop - start
        if isinstance(self.forward, Affine):
            known: Any = self.params
            uses, seen = self.forward.uses(known, data[0])
            return Linearised(data, b, self.forward(known, data), uses, seen, lambda s: [s], 0, {}, [])
        leaves, structure, _ = fresh_leaves(self.params)
        # Zeros of one number each, expanded: a tap needs the shape, and nobody reads the values.
        zeros = [
            plan.probe.new_zeros((), dtype=dtype).expand((b * shape[0], *shape[1:]) if shape else shape)
            for shape, dtype in plan.shapes
        ]

        def run(zeros: list[Tensor]) -> tuple[Tensor, Any]:
            taps = Taps(leaves, b, zeros)
            with taps:
                outputs = self.forward(optree.tree_unflatten(structure, leaves), data)
            late.append((taps, taps.tap_of(outputs)))  # under a transform only tensors may be returned
            return outputs, (taps.inputs, taps.outputs)

        late: list[tuple[Taps, int | None]] = []
        if zeros and len(plan.generic) < len(leaves):
            outputs, pull, (inputs, tapped) = pullback(run, zeros)
        else:
            (outputs, (inputs, tapped)), pull = run(zeros), lambda _: []
        taps, last_tap = late[-1]
        check.see(b, taps.program)
        return Linearised(data, b, outputs.detach(), taps.uses, inputs, pull, last_tap, taps.untapped, tapped)

    def _settle(
        self, linear: Linearised, root: OutputRoot, at_once: int, plan: TapPlan, check: Check
    ) -> tuple[TapPlan, Pulled | None]:
        """Compare what the batch gives for its last datum with what that datum gives alone.

        Returns:
            The plan without the taps that are wrong; and the first columns pulled back, for the caller to use, or None where
            the last layer needs no columns and there is no other leaf.
        """
        require_same_outputs(linear.outputs, plan)
        plan = plan.untap({**linear.untapped, **misplaced(linear.uses, linear.tapped_outputs, plan)})
        self.demand.accepts(plan)
        if len(self._last_layer(linear, root, plan)) == len(plan.names):
            some = _all_columns(root, linear.outputs)
            plan = _without_wrong_taps(some, linear.pull(some), linear, plan, check)
            if not plan.generic:
                return plan, None
        some = root.part(0, min(at_once, root.columns))
        taps = linear.pull(some)
        plan = _without_wrong_taps(some, taps, linear, plan, check)
        self.demand.accepts(plan)
        rows, way = self._rows(linear, some, plan, check)
        return plan._replace(rows=way), (taps, rows)

    def _pull(self, linear: Linearised, some: Tensor, plan: TapPlan) -> Pulled:
        """Pull columns back by a plan that is settled."""
        return linear.pull(some), self._rows(linear, some, plan)[0]

    def _rows(
        self, linear: Linearised, some: Tensor, plan: TapPlan, check: Check | None = None
    ) -> tuple[list[Tensor], int]:
        """Return the rows of the leaves without taps, and which of :data:`ROWS` gave them: the first from the plan's on that
        works, and is right where there is a check."""
        rows: list[Tensor] | None = None if plan.generic else []
        way = plan.rows
        while rows is None:
            rows = ROWS[way](self.forward, self.params, linear, some, plan.generic)
            # of a plain backward pass, the last one, nothing simpler is left
            if rows is None or (check and way + 1 < len(ROWS) and not _are_right(rows, some, plan, check)):
                rows, way = None, way + 1
        return rows, way

    def _last_layer(self, linear: Linearised, root: OutputRoot, plan: TapPlan) -> list[Gradient]:
        """Return the leaves whose layer's output is the model's, with what the structure makes of all columns in the place of
        g: no column is made."""
        found = []
        for pairs in linear.by_leaf(plan).values():
            use, x = pairs[0]
            if len(pairs) > 1 or use.tap != linear.last_tap or not use.features_last:
                continue
            together = self.demand.of_last_layer(use, x, root, linear.outputs)
            if together is None:
                continue
            found.append(
                Gradient(
                    use.leaf,
                    use.kind,
                    lambda use=use, x=x: _widened(use.canonical.x(x, linear.size)),
                    lambda together=together: _widened(together()),
                    use.tap,
                )
            )
        return found

    def _input_weights(self, linear: Linearised, targets: Any, plan: TapPlan) -> InputWeights | None:
        """Return the weights of the layers' inputs, where some target does not count once.

        Where a layer has one position for every target, the position has the weight of its target. A position whose target has
        weight 0, but on which other targets depend, such as a prompt's, has the datum's mean weight; a backward pass of
        arbitrary numbers shows on which positions the targets depend. Where a layer has another number of positions, all have
        the datum's mean weight.
        """
        if self.likelihood is None or not self.demand.weighs_inputs:
            return None
        of_targets = None if targets is None else self.likelihood.weights(targets)
        if of_targets is None or (not is_hidden(of_targets) and bool((of_targets == 1).all())):
            return None
        of_targets = of_targets.to(wide(linear.outputs.dtype))
        each = of_targets.reshape(linear.size, -1)
        counts = (each > 0).to(each.dtype)
        of_data = each.sum(1) / counts.sum(1).clamp_min(1)
        outputs, grouping = linear.outputs, self.likelihood.grouping(linear.outputs.shape[1:])
        # no two alike, so that the gradients of several targets do not cancel
        arbitrary = torch.arange(1, outputs.shape[1:].numel() + 1, device=outputs.device, dtype=outputs.dtype).sin()
        seeds = grouping.over_outputs((of_targets > 0).to(outputs.dtype), outputs.shape) * arbitrary.reshape(
            1, *outputs.shape[1:]
        )
        taps = linear.pull(seeds[None])
        pairs = linear.by_leaf(plan)

        def of_use(use: Use, x: Tensor) -> Tensor:
            g = use.canonical.g(x, taps[use.tap], linear.size)[0].flatten(2)
            if g.shape[1] != each.shape[1]:
                return torch.ones_like(g[:, :, 0], dtype=each.dtype)
            reaches = (g != 0).any(-1)
            return torch.where(each > 0, each, reaches * of_data[:, None])

        def of_positions(leaf: int) -> Tensor:
            if leaf not in pairs or isinstance(pairs[leaf][0][0].kind, Vector):  # formed for each datum as a whole
                return of_data[:, None]
            joined = torch.cat([of_use(use, x) for use, x in pairs[leaf]], 1)
            total = joined.sum(1, keepdim=True)
            return joined / torch.where(total > 0, total, 1) * of_data[:, None]

        return InputWeights(of_data, of_positions)


def _is_shared(use: Use, plan: TapPlan) -> bool:
    """Whether a matrix is used at several positions of a datum."""
    return isinstance(use.kind, (Matrix, Grouped)) and plan.shapes[use.tap][0].numel() > use.kind.outputs


def _unfolded(use: Use, plan: TapPlan) -> int:
    """Return how many numbers a layer's input has, unfolded, for one datum."""
    if not isinstance(use.kind, (Matrix, Grouped)):
        return 0
    groups = use.kind.groups if isinstance(use.kind, Grouped) else 1
    return plan.shapes[use.tap][0].numel() // use.kind.outputs * use.kind.inputs * groups


def _all_columns(root: OutputRoot, outputs: Tensor) -> Tensor:
    """Return one combination of all columns, ``[1, b, *event]``."""
    weights = torch.linspace(0.5, 1.5, root.columns, dtype=outputs.dtype, device=outputs.device)
    return root.combine(weights.expand(outputs.shape[0], root.columns))[None]


def _without_wrong_taps(some: Tensor, pulled: list[Tensor], linear: Linearised, plan: TapPlan, check: Check) -> TapPlan:
    """Return the plan without the taps whose gradients for the last datum are not those of a direct backward pass.

    Compared is one combination of the columns at hand. A gradient may differ by eps^(1/3) of its leaf's largest entry,
    and by rounding, 1e3 eps, of the largest of all.
    """
    pairs = linear.by_leaf(plan)
    if plan.direct is None or not pairs:
        return plan
    weights, b = _weights(some), linear.size
    wanted = plan.direct(torch.tensordot(weights, some[:, -1:], 1))
    got: dict[int, Tensor] = {}
    for leaf, uses in pairs.items():
        for use, x in uses:
            g = _of_last(pulled[use.tap], 1, b)  # of its layer's dtype, which need not be that of the outputs
            x, g = _of_last(x, 0, b), torch.tensordot(weights.to(g.dtype), g, 1)[None]
            rows = use.kind.rows(_widened(use.canonical.x(x, 1)), _widened(use.canonical.g(x, g, 1)))
            rows = rows.reshape(wanted[leaf].shape)
            got[leaf] = got[leaf] + rows if leaf in got else rows
    return plan.untap({leaf: WRONG_TAP for leaf in unlike(got, wanted, plan.eps, check)})


def _are_right(rows: list[Tensor], some: Tensor, plan: TapPlan, check: Check) -> bool:
    """Whether the rows of the last datum are those of a direct backward pass; inside a transform there is none to ask."""
    if plan.direct is None:
        return True
    weights = _weights(some)
    wanted = plan.direct(torch.tensordot(weights, some[:, -1:], 1))
    got = {i: torch.tensordot(weights.to(row.dtype), row[:, -1], 1) for i, row in zip(plan.generic, rows)}
    return not unlike(got, wanted, plan.eps, check)


def _weights(some: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, some.shape[0], dtype=some.dtype, device=some.device)


def _of_last(tensor: Tensor, axis: int, b: int) -> Tensor:
    """Return the part of b data's tensor that belongs to the last datum."""
    length = tensor.shape[axis] // b
    return tensor.narrow(axis, tensor.shape[axis] - length, length)


def pullback(
    run: Callable[[list[Tensor]], tuple[Tensor, Any]], inputs: list[Tensor], together: bool = True
) -> tuple[Tensor, Any, Any]:
    """Return outputs, the pullback of several columns at once, and aux; outside of transforms by autograd, which is
    leaner.

    Args:
        run: from the inputs to the outputs, and to a tree of tensors that is handed on, detached.
        inputs: what is differentiated by, tensors without a graph.
        together: whether autograd's backward pass is vmapped over the columns, where all its operations can be.
    """
    if is_transformed():
        outputs, pull, aux = cast(Any, torch.func.vjp(run, inputs, has_aux=True))
        return outputs, _over_columns(lambda s: pull(s)[0], torch.vmap(lambda s: pull(s)[0])), aux
    inputs = [x.requires_grad_() for x in inputs]
    with torch.enable_grad():
        outputs, aux = run(inputs)
    # without a graph every gradient is zero
    tail = outputs if outputs.requires_grad else outputs.detach().requires_grad_()

    def one(s: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(tail, inputs, s, retain_graph=True, materialize_grads=True))

    def many(columns: Tensor) -> list[Tensor]:
        return gradients_of_columns(tail, inputs, columns, retain_graph=True)

    return outputs.detach(), _over_columns(one, many if together else None), optree.tree_map(torch.Tensor.detach, aux)


def _over_columns(
    one: Callable[[Tensor], list[Tensor]], many: Callable[[Tensor], list[Tensor]] | None
) -> Callable[[Tensor], list[Tensor]]:
    """The pullback of columns ``[K, ...]`` together; one by one where there is one of them, or where an operation's backward
    pass cannot be vmapped."""

    def pull(columns: Tensor) -> list[Tensor]:
        if many is not None and columns.shape[0] > 1:
            try:
                return many(columns)
            except UNSUPPORTED:
                pass
        return [rows[0][None] if len(rows) == 1 else torch.stack(rows) for rows in zip(*map(one, columns))]

    return pull


def _joined_inputs(linear: Linearised, uses: dict[int, list[tuple[Use, Tensor]]], leaf: int) -> Tensor:
    """What all uses of a leaf saw, in the form of its kind."""
    pairs = uses[leaf]
    return joined_inputs(pairs[0][0].kind, [_widened(use.canonical.x(x, linear.size)) for use, x in pairs])


def _gradients(
    linear: Linearised, pulled: Pulled, plan: TapPlan, done: set[int], inputs_of: Callable[[int], Tensor]
) -> list[Gradient]:
    """Return the gradients of the leaves that are not in ``done``, in the order of the leaves."""
    taps, rows = pulled

    def gradient(leaf: int, pairs: list[tuple[Use, Tensor]]) -> Gradient:
        first, b = pairs[0][0], linear.size
        kind, shape = first.kind, taps[first.tap].shape
        is_plain = len(pairs) == 1 and first.features_last and len(shape) == 3 and shape[1] == b  # one position
        return Gradient(
            leaf,
            kind,
            partial(inputs_of, leaf),
            lambda: joined_outputs(kind, [_widened(use.canonical.g(x, taps[use.tap], b)) for use, x in pairs]),
            first.tap if is_plain else None,
        )

    tapped = [gradient(leaf, pairs) for leaf, pairs in linear.by_leaf(plan).items() if leaf not in done]
    generic = [_generic_gradient(leaf, row) for leaf, row in zip(plan.generic, rows)]
    return sorted([*tapped, *generic], key=lambda gradient: gradient.leaf)


def _widened(tensor: Tensor) -> Tensor:
    """Bring gradients to the precision in which they are summed."""
    return tensor.to(wide(tensor.dtype)) if tensor.is_floating_point() else tensor


def _generic_gradient(leaf: int, row: Tensor) -> Gradient:
    k, b = row.shape[:2]
    kind = Vector((row[0, 0].numel(), 1))
    return Gradient(leaf, kind, lambda: _widened(row.new_zeros(b)), lambda: _widened(row.reshape(k, b, -1)))


def _vmapped_rows(
    forward: Forward, params: Tree, linear: Linearised, columns: Tensor, wanted: list[int]
) -> list[Tensor] | None:
    """Return J_b^T s_kb for the wanted leaves, each ``[K, b, *leaf.shape]``, by one vjp vmapped over data and columns.

    None where something cannot be vmapped, or a batching rule returned other shapes.
    """
    outputs_of, leaves = _of_leaves(without_fused_recurrence(forward), params, wanted)
    s = columns.transpose(0, 1)

    def rows_of(pair: Any) -> list[Tensor]:
        _, pull = vjp(lambda some: outputs_of(some, pair[0]), leaves)
        return torch.vmap(lambda column: pull(column)[0])(pair[1][0])

    try:
        rows = over_data(rows_of, (linear.data, s))
    except Exception:  # what cannot be vmapped is done datum by datum; if that fails too, the user sees why
        return None
    if any(row.shape != (*s.shape[:2], *leaf.shape) for leaf, row in zip(leaves, rows)):
        return None
    return [row.transpose(0, 1) for row in rows]


def _rows_by_datum(
    forward: Forward, params: Tree, linear: Linearised, columns: Tensor, wanted: list[int], together: bool = True
) -> list[Tensor]:
    """Return the same by a forward pass for each datum, which is not vmapped, so that it may look at values.

    Args:
        forward, params, linear, columns, wanted: as in :func:`_vmapped_rows`.
        together: whether the backward pass is vmapped over columns, where it can be; otherwise there is one for each column.
    """
    # a fused recurrent kernel is faster for one datum, and no transform can go through it
    forward = without_fused_recurrence(forward) if is_transformed() else forward
    outputs_of, leaves = _of_leaves(forward, params, wanted)
    each = []
    for datum, s in zip(parts(linear.data, 1), columns.transpose(0, 1)):
        _, pull, _ = pullback(lambda some, datum=datum: (outputs_of(some, datum), ()), leaves, together)
        each.append(pull(s))
    return [torch.stack(rows).transpose(0, 1) for rows in zip(*each)]


# how the rows of leaves without taps are formed, from the fastest way to the one that works for every operation
ROWS: tuple[Callable[..., list[Tensor] | None], ...] = (
    _vmapped_rows,
    _rows_by_datum,
    partial(_rows_by_datum, together=False),
)


def _of_leaves(
    forward: Forward, params: Tree, wanted: list[int]
) -> tuple[Callable[[list[Tensor], Any], Tensor], list[Tensor]]:
    """Return the outputs of one datum as a function of the wanted leaves, and these leaves."""
    leaves, structure, _ = fresh_leaves(params)

    def outputs(some: list[Tensor], datum: Any) -> Tensor:
        everything = list(leaves)
        for index, leaf in zip(wanted, some):
            everything[index] = leaf
        return forward(optree.tree_unflatten(structure, everything), datum)[0]

    return outputs, [leaves[index] for index in wanted]
