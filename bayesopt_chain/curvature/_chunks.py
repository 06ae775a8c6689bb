"""Turns a batch into per-datum gradients of the outputs, a chunk at a time, so that no Jacobian is ever held.

For the columns S ``[K, b, *event]`` of the output root of a chunk of b data, one forward pass is pulled back for
several columns at once:

    (x, g) of every tapped parameter       one vjp with respect to the tapped outputs, vmapped over columns
    rows J_b^T s_kb of the other ones      one vjp a datum, vmapped over data and columns

Columns are made when they are pulled back, and not held. Memory is the forward pass of b data, and K' columns with
their output gradients for each of them: b and K' are chosen, from the shapes that one datum's forward pass shows, so
that their sum stays below ``chunk_bytes``; one datum and one column are the least there is.

Nothing is believed unseen. The last datum is run alone first: its outputs must be those it has in the batch, and the
gradients that taps or vmapped pullbacks give for it must be those of a direct backward pass through it. A parameter
for which they are not goes the slow way, datum by datum, which is that direct pass. What was checked once is remembered
(``_checks.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import batches
from bayesopt_chain._torch import gradients_of_columns
from bayesopt_chain.curvature._affine import Affine
from bayesopt_chain.curvature._autodiff import (
    UNSUPPORTED,
    vjp,
    vjp_with_aux,
    without_fused_recurrence,
)
from bayesopt_chain.curvature._checks import Check
from bayesopt_chain.curvature._kinds import Grouped, Kind, Matrix, Vector, joined_inputs, joined_outputs
from bayesopt_chain.curvature._taps import Taps, Use
from bayesopt_chain.likelihoods import OutputRoot
from bayesopt_chain.tracing import is_hidden, is_transformed
from bayesopt_chain.trees import Tree, paths, wide

Forward = Callable[[Tree, Any], Tensor]
RootOf = Callable[[Tensor, Any], OutputRoot]

SMALL_CHUNK_BYTES = 2**22
LARGE_CHUNK_BYTES = 2**28  # the most that a chunk may hold by default, unless one datum and one column need more
FEW_DATA = 32  # a chunk may hold so many pairs of a datum and a column, unless a structure says otherwise


class Gradient(NamedTuple):
    """A leaf's gradients for a chunk of data and columns; ``x()`` and ``g()`` give them in the kind's form, see
    ``_kinds.py``. ``tap`` numbers the layer where ``g()`` is its output gradient as it stands: leaves of one tap have the same.
    """

    leaf: int
    kind: Kind
    x: Callable[[], Tensor]
    g: Callable[[], Tensor]
    tap: int | None = None


class Chunk(NamedTuple):
    """Gradients for the data ``start`` up to ``start + data`` and some columns.

    ``outputs`` are those of the data, ``[data, *event]``. ``first`` marks the first columns of these data, whose layer
    inputs are new. ``summed`` holds, in the first chunk of the data and for a structure that asks for it, the leaves of
    the last layer: there ``g()`` is the diagonal ``sum_k s_k^2`` of all columns, ``[1, b, T, O]``, at every position.
    """

    start: int
    data: int
    outputs: Tensor
    first: bool
    gradients: list[Gradient]
    summed: list[Gradient]


class Plan(NamedTuple):
    """How a forward pass will be pulled back.

    ``uses`` to tap; ``generic`` leaves that have none, each with its reason; ``shapes`` of the tapped outputs, and
    ``probe_outputs``, their values for the last datum alone; ``probe``, its outputs; ``direct``, its pullback, or
    None inside a transform; ``one_by_one``: the generic leaves are not to be vmapped.
    """

    names: list[str]
    uses: list[Use]
    generic: list[int]
    reasons: dict[int, str]
    shapes: list[tuple[torch.Size, torch.dtype]]
    probe_outputs: list[Tensor]
    probe: Tensor
    direct: Callable[[Tensor], list[Tensor]] | None
    one_by_one: bool = False


class Linear(NamedTuple):
    """A chunk of data run through the model: its outputs, what its taps saw, and the pullback of columns to them."""

    outputs: Tensor
    uses: list[Use]
    inputs: list[Tensor]
    pull: Callable[[Tensor], list[Tensor]] | None
    last_tap: int | None


def batch_size(batch: Any) -> int:
    """Return the common length of the first axes of a batch's tensors."""
    lengths = {leaf.shape[0] for leaf in batches.flatten(batch)[0] if isinstance(leaf, Tensor) and leaf.ndim}
    if len(lengths) != 1:
        raise ValueError(
            f"the batch's tensors have first axes of lengths {sorted(lengths)}: every tensor of a batch, a tree such "
            "as (inputs, targets), needs one entry a datum on its first axis"
        )
    return lengths.pop()


def pair_targets(batch: Any) -> Any:
    """Return the targets of ``(inputs, targets)``."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueError(
            f"the batch is a {type(batch).__name__}, not a pair: pass (inputs, targets), or targets=, the key of the "
            "targets in your batch or a function from it to them"
        )
    return batch[1]


def part(batch: Any, start: int, stop: int) -> Any:
    """Cut the data from ``start`` up to ``stop`` out of a batch."""
    return batches.tree_map(lambda leaf: leaf[start:stop] if isinstance(leaf, Tensor) and leaf.ndim else leaf, batch)


def make_plan(forward: Forward, params: Tree, batch: Any) -> Plan:
    """Run the last datum through ``forward`` and see how each parameter is used."""
    n = batch_size(batch)
    if isinstance(forward, Affine):
        return _affine_plan(forward, params, part(batch, n - 1, n))
    leaves, structure, names = _fresh(params)
    is_open = not is_transformed() and not any(map(is_hidden, leaves))
    floating = [leaf for leaf in leaves if leaf.is_floating_point()]
    if is_open:
        floating = [leaf.requires_grad_() for leaf in floating]
    taps = Taps(leaves, data=1)
    with taps, torch.set_grad_enabled(is_open):
        outputs = forward(optree.tree_unflatten(structure, leaves), part(batch, n - 1, n))
    if not isinstance(outputs, Tensor) or outputs.ndim == 0 or outputs.shape[0] != 1:
        what = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(f"forward returned {what} for one datum: return outputs [B, *event], not a loss or an average")
    reasons = dict(taps.untapped)
    seen = {use.leaf for use in taps.uses}
    for index in range(len(leaves)):
        if index not in seen:
            reasons.setdefault(index, UNUSED)

    def direct(s: Tensor) -> list[Tensor]:
        if not outputs.requires_grad:
            return [torch.zeros_like(leaf) for leaf in leaves]
        found = iter(
            torch.autograd.grad(outputs, floating, s, allow_unused=True, materialize_grads=True, retain_graph=True)
        )
        return [next(found) if leaf.is_floating_point() else torch.zeros_like(leaf) for leaf in leaves]

    return Plan(
        names,
        taps.uses,
        sorted(reasons),
        reasons,
        taps.shapes,
        taps.outputs,
        outputs.detach(),
        direct if is_open else None,
    )


def _affine_plan(forward: Affine, params: Any, datum: Any) -> Plan:
    """The plan of a model whose uses are known: there is nothing to watch and nothing to compare."""
    outputs = forward(params, datum)
    uses, _ = forward.uses(params, datum[0])
    return Plan(paths(params), uses, [], {}, [(outputs.shape, outputs.dtype)], [outputs], outputs, None)


def require_separate(forward: Forward, params: Tree, batch: Any, plan: Plan) -> None:
    """Raise where the last datum's outputs are others beside the one before it than alone."""
    n = batch_size(batch)
    _require_separate(forward(params, part(batch, max(0, n - 2), n)), plan)


def untap(plan: Plan, leaves: dict[int, str]) -> Plan:
    """Return a plan in which these leaves, named with their reasons, are not tapped."""
    reasons = {**plan.reasons, **leaves}
    return plan._replace(reasons=reasons, generic=sorted(reasons))


def pull_back(
    forward: Forward,
    params: Tree,
    batch: Any,
    targets: Any,
    root_of: RootOf,
    plan: Plan,
    chunk_bytes: int | None,
    formed: int = 0,
    held: int = 0,
    accepts: Callable[[Plan], None] = lambda plan: None,
    columns_together: bool = False,
    sums_last_layer: bool = False,
    few_data: int = FEW_DATA,
    check: Check | None = None,
) -> Iterator[Chunk]:
    """Yield the gradients of all data and columns, a chunk at a time.

    ``root_of(outputs, targets)`` gives S; ``formed`` is how many numbers the caller forms from the gradient of one
    datum and column, ``held`` how many its result holds; ``accepts`` raises for a plan that the caller cannot use;
    ``columns_together`` keeps all columns of a datum in one chunk; ``sums_last_layer`` asks for ``Chunk.summed``;
    so many pairs of a datum and a column as ``few_data`` may always share a chunk; ``check`` learns what this run checks,
    or says that it need not.
    """
    check = check or Check()
    check.is_done |= isinstance(forward, Affine)
    accepts(plan)
    n = batch_size(batch)
    columns = root_of(plan.probe, part(targets, n - 1, n)).columns
    data, at_once = _sizes(params, plan, n, columns, chunk_bytes, formed, held, few_data)
    if columns_together:
        data, at_once = max(1, data * at_once // columns), columns
    data = -(-n // -(-n // data))  # the same number of chunks, of one length
    # The chunks run backwards so that the datum that was probed comes last in the first of them, where it is compared.
    for stop in range(n, 0, -data):
        start = max(0, stop - data)
        chunk, is_compared = part(batch, start, stop), stop == n and not check.is_done
        linear, plan = _linearise(forward, params, chunk, plan, is_compared, check)
        accepts(plan)
        root = root_of(linear.outputs, part(targets, start, stop))
        summed = _last_layer(linear, plan, root, stop - start) if sums_last_layer else []
        if is_compared and len(summed) == len(plan.names):
            some = _all_columns(root, linear.outputs)
            plan = _without_wrong_taps(some, linear.pull(some) if linear.pull else [], linear, plan, check)
            summed = _kept(summed, plan)
        if len(summed) == len(plan.names):
            yield Chunk(start, stop - start, linear.outputs, True, [], summed)
            continue
        for k in range(0, columns, at_once):
            some = root.part(k, min(k + at_once, columns))
            pulled = linear.pull(some) if linear.pull is not None else []
            compare = is_compared and k == 0
            if compare:
                plan = _without_wrong_taps(some, pulled, linear, plan, check)
                accepts(plan)
                summed = _kept(summed, plan)
            gradients = _tapped_gradients(linear, pulled, plan, stop - start, {gradient.leaf for gradient in summed})
            if plan.generic:
                rows, plan = _generic(forward, params, chunk, some, plan, compare, check)
                gradients += [_generic_gradient(index, row) for index, row in zip(plan.generic, rows)]
            gradients.sort(key=lambda gradient: gradient.leaf)
            yield Chunk(start, stop - start, linear.outputs, k == 0, gradients, summed if k == 0 else [])
            del gradients, some, pulled  # before the next ones are made
        del linear, root
    check.plan = plan


def _fresh(params: Tree) -> tuple[list[Tensor], Any, list[str]]:
    """Return leaves that are objects of their own, so that identity tells them apart."""
    leaves, structure = optree.tree_flatten(params)
    return [leaf.detach() for leaf in leaves], structure, paths(params)


def _sizes(
    params: Tree,
    plan: Plan,
    n: int,
    columns: int,
    chunk_bytes: int | None,
    formed: int,
    held: int,
    few_data: int,
) -> tuple[int, int]:
    """Return how many data, and how many columns, go into a chunk.

    Without ``chunk_bytes`` a chunk may be as large as the result, and no less than what a few pairs of a datum and a
    column need.
    """
    leaves = optree.tree_leaves(params)
    item = plan.probe.element_size()
    activations = sum(shape.numel() for shape, _ in plan.shapes)
    generic = sum(leaves[index].numel() for index in plan.generic)
    unfolded = max((_unfolded(use, plan) for use in plan.uses), default=0)
    once = 4 * activations + unfolded + 3 * plan.probe.numel()
    unfolded = max((use.canonical.unfolds * plan.shapes[use.tap][0].numel() for use in plan.uses), default=0)
    per_column = 2 * activations + generic + formed + plan.probe.numel() + unfolded
    few = min(n, few_data)
    together = min(columns, -(-few_data // few))  # columns that make up for a small batch
    few = min(few * (once + together * per_column), LARGE_CHUNK_BYTES // item)
    numbers = max(SMALL_CHUNK_BYTES // item, held, few) if chunk_bytes is None else chunk_bytes // item
    at_once = max(1, min(columns, (numbers - once) // per_column))
    return max(1, min(n, numbers // (once + at_once * per_column))), at_once


def _unfolded(use: Use, plan: Plan) -> int:
    """Return how many numbers a layer's input has, unfolded, for one datum."""
    if not isinstance(use.kind, (Matrix, Grouped)):
        return 0
    of_input, of_output = use.kind.shape if use.kind.transposed else use.kind.shape[::-1]
    groups = use.kind.groups if isinstance(use.kind, Grouped) else 1
    return plan.shapes[use.tap][0].numel() // of_output * of_input * groups


def _linearise(
    forward: Forward, params: Tree, chunk: Any, plan: Plan, compare: bool, check: Check
) -> tuple[Linear, Plan]:
    """Run a chunk through ``forward``, tapped."""
    if isinstance(forward, Affine):
        known: Any = params
        return Linear(forward(known, chunk), *forward.uses(known, chunk[0]), lambda s: [s], 0), plan
    leaves, structure, _ = _fresh(params)
    b = batch_size(chunk)
    zeros = [
        plan.probe.new_zeros((), dtype=dtype).expand((b * shape[0], *shape[1:]) if shape else shape)
        for shape, dtype in plan.shapes
    ]

    def run(zeros: list[Tensor]) -> tuple[Tensor, Any]:
        taps = Taps(leaves, b, zeros)
        with taps:
            outputs = forward(optree.tree_unflatten(structure, leaves), chunk)
        late.append((taps, taps.tap_of(outputs)))
        return outputs, (taps.inputs, taps.outputs)

    late: list[tuple[Taps, int | None]] = []
    if zeros and len(plan.generic) < len(leaves):
        outputs, pull, (inputs, tapped_outputs) = _pullback(run, zeros)
    else:
        (outputs, (inputs, tapped_outputs)), pull = run(zeros), None
    taps, last_tap = late[-1]
    check.see(b, taps.program)
    if compare:
        _require_separate(outputs, plan)
        plan = untap(plan, {**taps.untapped, **_misplaced(taps, tapped_outputs, plan)})
    keep = [i for i, use in enumerate(taps.uses) if use.leaf not in plan.reasons]
    uses, inputs = [taps.uses[i] for i in keep], [inputs[i] for i in keep]
    return Linear(outputs.detach(), uses, inputs, pull, last_tap), plan


def _require_separate(outputs: Tensor, plan: Plan) -> None:
    """Raise where a datum's outputs are others in a batch than alone."""
    if outputs.shape[1:] != plan.probe.shape[1:]:
        raise ValueError(
            f"forward returned {tuple(outputs.shape)} for a batch but {tuple(plan.probe.shape)} for one datum: "
            "return outputs [B, *event]"
        )
    if is_hidden(outputs):
        return
    scale = outputs.abs().max()
    if bool((outputs[-1] - plan.probe[0]).abs().max() > _tolerance(outputs) * scale):
        raise ValueError(
            "the outputs of one datum depend on the rest of the batch, or are random, so that the loss is no sum over "
            "data: remove cross-sample operations, and call model.eval() for dropout and batch norm"
        )


def _misplaced(taps: Taps, outputs: list[Tensor], plan: Plan) -> dict[int, str]:
    """Find the taps whose outputs do not hold the data in order on the first axis."""
    wrong = set()
    for tap, (got, wanted) in enumerate(zip(outputs, plan.probe_outputs)):
        wanted = wanted.reshape(-1)
        if got.numel() != wanted.numel():
            wrong.add(tap)
        elif not is_hidden(got) and wanted.numel():
            difference, scale = (got - wanted).abs().max(), wanted.abs().max()
            if bool(difference > _tolerance(got) * scale):
                wrong.add(tap)
    return {use.leaf: "its layer does not keep the data on the first axis" for use in taps.uses if use.tap in wrong}


def _tolerance(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps ** 0.5


def _all_columns(root: OutputRoot, outputs: Tensor) -> Tensor:
    """Return one combination of all columns, ``[1, b, *event]``."""
    weights = torch.linspace(0.5, 1.5, root.columns, dtype=outputs.dtype, device=outputs.device)
    return root.combine(weights.expand(outputs.shape[0], root.columns))[None]


def _kept(summed: list[Gradient], plan: Plan) -> list[Gradient]:
    return [gradient for gradient in summed if gradient.leaf not in plan.reasons]


def _without_wrong_taps(some: Tensor, pulled: list[Tensor], linear: Linear, plan: Plan, check: Check) -> Plan:
    """Return the plan without the taps whose gradients for the last datum are not those of a direct backward pass.

    Compared is one combination of the columns at hand. A gradient may differ by eps^(1/3) of its leaf's largest entry,
    and by rounding, 1e3 eps, of the largest of all.
    """
    if plan.direct is None or not linear.uses:
        return plan
    weights, b = _weights(some), some.shape[1]
    wanted = plan.direct(torch.tensordot(weights, some[:, -1:], 1))
    got: dict[int, Tensor] = {}
    for use, x in zip(linear.uses, linear.inputs):
        x, g = _of_last(x, 0, b), torch.tensordot(weights, _of_last(pulled[use.tap], 1, b), 1)[None]
        rows = use.kind.rows(_widened(use.canonical.x(x, 1)), _widened(use.canonical.g(x, g, 1)))
        rows = rows.reshape(wanted[use.leaf].shape)
        got[use.leaf] = got[use.leaf] + rows if use.leaf in got else rows
    return untap(plan, {leaf: _WRONG_TAP for leaf in _unlike(got, wanted, check)})


def _weights(some: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, some.shape[0], dtype=some.dtype, device=some.device)


def _of_last(tensor: Tensor, axis: int, b: int) -> Tensor:
    """Return the part of b data's tensor that belongs to the last datum."""
    length = tensor.shape[axis] // b
    return tensor.narrow(axis, tensor.shape[axis] - length, length)


UNUSED = "forward does not use it"
_WRONG_TAP = "it is also used in a way that no torch function shows"


def _unlike(got: dict[int, Tensor], wanted: list[Tensor], check: Check) -> list[int]:
    """Name the leaves whose gradients are not the wanted ones; the check could not have failed where these are zero."""
    leaves = [leaf for leaf in got if wanted[leaf].numel()]
    if not leaves:
        return []
    eps = max(torch.finfo(wanted[leaf].dtype).eps for leaf in leaves)
    differences = torch.stack([(got[leaf] - wanted[leaf]).abs().max().double() for leaf in leaves])
    scales = torch.stack([wanted[leaf].abs().max().double() for leaf in leaves])
    finite = (
        scales.isfinite()
    )  # where they are not there is nothing to compare, and whoever asks for a precision is told
    check.could_fail &= bool((finite & (scales > 0)).all())
    largest = torch.where(finite, scales, 0).max()
    within = (differences <= eps ** (1 / 3) * scales + 1e3 * eps * largest) | ~finite
    return [leaf for leaf, is_within in zip(leaves, within.tolist()) if not is_within]


def _pullback(run: Callable[[list[Tensor]], tuple[Tensor, Any]], zeros: list[Tensor]) -> tuple[Tensor, Any, Any]:
    """Return outputs, the pullback of several columns at once, and aux; outside of transforms by autograd, which is
    leaner.
    """
    if is_transformed():
        outputs, pull, aux = vjp_with_aux(run, zeros)
        return outputs, _over_columns(lambda s: pull(s)[0]), aux
    zeros = [zero.requires_grad_() for zero in zeros]
    with torch.enable_grad():
        outputs, aux = run(zeros)

    def pull_many(columns: Tensor) -> list[Tensor]:
        # an output that is not used has no gradient; autograd's own zeros would lack the axis of the columns
        return [z.new_zeros((len(columns), *z.shape)) if g is None else g for g, z in zip(found_in(columns), zeros)]

    def found_in(columns: Tensor) -> Any:
        if not outputs.requires_grad:
            return [None] * len(zeros)
        if columns.shape[0] > 1:
            try:
                return gradients_of_columns(outputs, zeros, columns, retain_graph=True)
            except UNSUPPORTED:
                pass
        rows = [torch.autograd.grad(outputs, zeros, s, retain_graph=True, allow_unused=True) for s in columns]
        return [None if leaves[0] is None else torch.stack(leaves) for leaves in zip(*rows)]

    return outputs.detach(), pull_many, optree.tree_map(torch.Tensor.detach, aux)


def _over_columns(pull: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Vmap a pullback over a leading axis of columns; loop where an operation's backward pass cannot be vmapped."""

    def pull_many(columns: Tensor) -> Any:
        if columns.shape[0] > 1:
            try:
                return torch.vmap(pull)(columns)
            except UNSUPPORTED:
                pass
        return optree.tree_map(lambda *leaves: torch.stack(leaves), *map(pull, columns))

    return pull_many


def _generic(
    forward: Forward, params: Tree, chunk: Any, some: Tensor, plan: Plan, compare: bool, check: Check
) -> tuple[list[Tensor], Plan]:
    """Return the rows of the leaves without a tap, one by one where vmap fails or, compared with a direct backward pass,
    is wrong.
    """
    rows = generic_rows(forward, params, chunk, some, plan)
    if rows is not None and compare and plan.direct is not None and not plan.one_by_one:
        weights = _weights(some)
        wanted = plan.direct(torch.tensordot(weights, some[:, -1:], 1))
        got = {i: torch.tensordot(weights.to(row.dtype), row[:, -1], 1) for i, row in zip(plan.generic, rows)}
        rows = None if _unlike(got, wanted, check) else rows
    if rows is None:
        plan = plan._replace(one_by_one=True)
        rows = generic_rows(forward, params, chunk, some, plan)
    return rows or [], plan


def _tapped_gradients(linear: Linear, pulled: list[Tensor], plan: Plan, b: int, done: set[int]) -> list[Gradient]:
    """Return the gradients of the tapped leaves that are not done."""

    def gradient(leaf: int, pairs: list[tuple[Use, Tensor]]) -> Gradient:
        first = pairs[0][0]
        kind, shape = first.kind, pulled[first.tap].shape
        is_plain = len(pairs) == 1 and first.features_last and len(shape) == 3 and shape[1] == b  # one position
        return Gradient(
            leaf,
            kind,
            lambda: joined_inputs(kind, [_widened(use.canonical.x(x, b)) for use, x in pairs]),
            lambda: joined_outputs(kind, [_widened(use.canonical.g(x, pulled[use.tap], b)) for use, x in pairs]),
            first.tap if is_plain else None,
        )

    return [gradient(leaf, pairs) for leaf, pairs in _by_leaf(linear).items() if leaf not in done | plan.reasons.keys()]


def _by_leaf(linear: Linear) -> dict[int, list[tuple[Use, Tensor]]]:
    """Return the uses of every tapped leaf, with what each saw."""
    pairs: dict[int, list[tuple[Use, Tensor]]] = {}
    for use, x in zip(linear.uses, linear.inputs):
        pairs.setdefault(use.leaf, []).append((use, x))
    return pairs


def _widened(tensor: Tensor) -> Tensor:
    """Bring gradients to the precision in which they are summed."""
    return tensor.to(wide(tensor.dtype)) if tensor.is_floating_point() else tensor


def _last_layer(linear: Linear, plan: Plan, root: OutputRoot, b: int) -> list[Gradient]:
    """Return the leaves whose layer's output is the model's, with the diagonal of the output Hessian in the place of g.

    Where every column of the root stays within one position (or there is only one), the sum over columns of squared
    gradients of a weight is ``sum_t (sum_k s_tko^2) x_ti^2``: no column is made.
    """
    found = []
    for pairs in _by_leaf(linear).values():
        use, x = pairs[0]
        if len(pairs) > 1 or use.tap != linear.last_tap or not use.features_last or use.leaf in plan.reasons:
            continue
        if not root.separates_positions and linear.outputs.ndim > 2:
            continue
        found.append(
            Gradient(
                use.leaf,
                use.kind,
                lambda use=use, x=x: _widened(use.canonical.x(x, b)),
                lambda use=use, x=x: _widened(use.canonical.g(x, root.diagonal()[None], b)),
            )
        )
    return found


def _generic_gradient(leaf: int, row: Tensor) -> Gradient:
    k, b = row.shape[:2]
    kind = Vector((row[0, 0].numel(), 1))
    return Gradient(leaf, kind, lambda: _widened(row.new_zeros(b)), lambda: _widened(row.reshape(k, b, -1)))


def generic_rows(forward: Forward, params: Tree, chunk: Any, columns: Tensor, plan: Plan) -> list[Tensor] | None:
    """Return J_b^T s_kb for the generic leaves, each ``[K, b, *leaf.shape]``, by one vjp a datum.

    Data and columns are vmapped unless the plan says otherwise; None where a batching rule returned other shapes.
    """
    leaves, structure, _ = _fresh(params)
    forward, wanted = without_fused_recurrence(forward), plan.generic

    def one(datum: Any, s: Tensor, over_columns: Any) -> list[Tensor]:
        def output(some: list[Tensor]) -> Tensor:
            everything = list(leaves)
            for index, leaf in zip(wanted, some):
                everything[index] = leaf
            return forward(optree.tree_unflatten(structure, everything), datum)[0]

        _, pull = vjp(output, [leaves[index] for index in wanted])
        return over_columns(lambda s: pull(s)[0])(s)

    entries, chunk_structure = optree.tree_flatten(chunk)
    batched = [i for i, entry in enumerate(entries) if isinstance(entry, Tensor) and entry.ndim]

    def vmapped(tensors: list[Tensor], s: Tensor) -> list[Tensor]:
        datum = list(entries)
        for i, tensor in zip(batched, tensors):
            datum[i] = tensor[None]
        return one(optree.tree_unflatten(chunk_structure, datum), s, torch.vmap)

    s = columns.transpose(0, 1)
    rows = None
    if not plan.one_by_one:
        try:
            rows = torch.vmap(vmapped)([entries[i] for i in batched], s)
        except Exception:  # what cannot be vmapped is done datum by datum; if that fails too, the user sees why
            rows = None
        else:
            if any(row.shape != (*s.shape[:2], *leaves[i].shape) for i, row in zip(wanted, rows)):
                return None
    if rows is None:
        alone = [part(chunk, i, i + 1) for i in range(s.shape[0])]
        if is_transformed():
            each = [one(datum, columns, _over_columns) for datum, columns in zip(alone, s)]
        else:
            each = [_one_by_one(forward, params, datum, columns, wanted) for datum, columns in zip(alone, s)]
        rows = [torch.stack(leaf) for leaf in zip(*each)]
    return [row.transpose(0, 1) for row in rows]


def _one_by_one(forward: Forward, params: Tree, datum: Any, columns: Tensor, wanted: list[int]) -> list[Tensor]:
    """Return one datum's rows, ``[K, *leaf.shape]``, by plain backward passes, which every operation has."""
    leaves, structure, _ = _fresh(params)
    some = [leaves[index].requires_grad_() for index in wanted]
    with torch.enable_grad():
        outputs = forward(optree.tree_unflatten(structure, leaves), datum)[0]
    if not outputs.requires_grad:
        return [leaf.new_zeros((columns.shape[0], *leaf.shape)) for leaf in some]

    def pull(s: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(outputs, some, s, retain_graph=True, allow_unused=True, materialize_grads=True)

    return [torch.stack(rows) for rows in zip(*map(pull, columns))]
