"""Turns a batch into per-datum gradients of the outputs, a chunk at a time, so that no Jacobian is ever held.

For the output factors S `[K, b, *event]` of a chunk of b data, one forward pass is pulled back for several factors at
once:

    (x, g) of every tapped parameter       one vjp with respect to the tapped outputs, vmapped over factors
    rows J_b^T s_kb of the other ones      one vjp a datum, vmapped over data and factors

Memory is the forward pass of b data, and K' output gradients for each of them: b and K' are chosen, from the shapes
that one datum's forward pass shows, so that their sum stays below `chunk_bytes`; one datum and one factor are the
least there is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain.curvature._kinds import Kind, Matrix, Vector
from bayesopt_chain.curvature._taps import Taps, Use
from bayesopt_chain.tracing import is_hidden, is_transformed
from bayesopt_chain.trees import Tree, paths

Forward = Callable[[Tree, Any], Tensor]
Factors = Callable[[Tensor, Any], Tensor]

SMALL_CHUNK_BYTES = 2**20
FEW_DATA = 32  # a chunk may be as large as what so many data need for one factor, unless a structure says otherwise


class Gradient(NamedTuple):
    """A leaf's gradients for a chunk of data and factors; `x()` and `g()` give them in the kind's form, see
    `_kinds.py`.
    """

    leaf: int
    kind: Kind
    x: Callable[[], Tensor]
    g: Callable[[], Tensor]


class Chunk(NamedTuple):
    """Gradients for the data `start` up to `start + data` and some factors; `outputs` of the former, `[data, *event]`.

    `first` marks the first factors of these data, whose layer inputs are new.
    """

    start: int
    data: int
    outputs: Tensor
    first: bool
    gradients: list[Gradient]


class Plan(NamedTuple):
    """How a forward pass will be pulled back: the uses to tap, the leaves that have none, and the tapped shapes."""

    names: list[str]
    uses: list[Use]
    generic: list[int]
    reasons: dict[int, str]
    shapes: list[tuple[torch.Size, torch.dtype]]
    probe_outputs: list[Tensor]
    probe: Tensor


def batch_size(batch: Any) -> int:
    """Return the common length of the first axes of a batch's tensors."""
    lengths = {leaf.shape[0] for leaf in _tensors(batch) if leaf.ndim}
    if len(lengths) != 1:
        raise ValueError(
            f"the batch's tensors have first axes of lengths {sorted(lengths)}: every tensor of (inputs, targets) "
            f"needs "
            "one entry a datum on its first axis"
        )
    return lengths.pop()


def unpack(batch: Any) -> tuple[Any, Any]:
    """Return (inputs, targets)."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueError(f"the batch is a {type(batch).__name__}, not a pair: pass (inputs, targets)")
    return tuple(batch)


def part(batch: Any, start: int, stop: int) -> Any:
    """Cut the data from `start` up to `stop` out of a batch."""
    return optree.tree_map(lambda leaf: leaf[start:stop] if isinstance(leaf, Tensor) and leaf.ndim else leaf, batch)


def make_plan(forward: Forward, params: Tree, batch: Any) -> Plan:
    """Run the last datum through `forward` and see how each parameter is used."""
    n = batch_size(batch)
    leaves, structure, names = _fresh(params)
    taps = Taps(leaves, data=1)
    with taps:
        outputs = forward(optree.tree_unflatten(structure, leaves), part(batch, n - 1, n))
    if not isinstance(outputs, Tensor) or outputs.ndim == 0 or outputs.shape[0] != 1:
        what = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(f"forward returned {what} for one datum: return outputs [B, *event], not a loss or an average")
    reasons = dict(taps.untapped)
    seen = {use.leaf for use in taps.uses}
    for index in range(len(leaves)):
        if index not in seen:
            reasons.setdefault(index, "forward does not use it")
    return Plan(names, taps.uses, sorted(reasons), reasons, taps.shapes, taps.outputs, outputs)


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
    factors: Factors,
    plan: Plan,
    chunk_bytes: int | None,
    formed: int = 0,
    held: int = 0,
    accepts: Callable[[Plan], None] = lambda plan: None,
    factors_together: bool = False,
    few_data: int = FEW_DATA,
) -> Iterator[Chunk]:
    """Yield the gradients of all data and factors, a chunk at a time.

    `factors(outputs, targets)` gives S, `[K, b, *event]`; `formed` is how many numbers the caller forms from the
    gradient of one datum and factor, `held` how many its result holds; `accepts` raises for a plan that the caller
    cannot use; `factors_together` keeps all factors of a datum in one chunk; `few_data` may always share a
    chunk.
    """
    accepts(plan)
    n = batch_size(batch)
    factor_count = factors(plan.probe, part(unpack(batch)[1], n - 1, n)).shape[0]
    data, at_once = _sizes(params, plan, n, factor_count, chunk_bytes, formed, held, few_data)
    if factors_together:
        data, at_once = max(1, data * at_once // factor_count), factor_count
    data = -(-n // -(-n // data))  # the same number of chunks, of one length
    # The chunks run backwards so that the datum that was probed comes last in the first of them, where it is compared.
    for stop in range(n, 0, -data):
        start = max(0, stop - data)
        chunk = part(batch, start, stop)
        outputs, uses, inputs, pull, plan = _linearise(forward, params, chunk, plan, compare=stop == n)
        accepts(plan)
        s = factors(outputs, unpack(chunk)[1])
        for k in range(0, s.shape[0], at_once):
            some = s[k : k + at_once]
            gradients = _tapped_gradients(uses, inputs, pull(some), stop - start) if uses else []
            if plan.generic:
                gradients += _generic_gradients(forward, params, chunk, some, plan)
            yield Chunk(start, stop - start, outputs, k == 0, sorted(gradients, key=lambda gradient: gradient.leaf))
            del gradients, some  # before the next ones are made
        del outputs, uses, inputs, pull, s


def _fresh(params: Tree) -> tuple[list[Tensor], Any, list[str]]:
    """Return leaves that are objects of their own, so that identity tells them apart."""
    leaves, structure = optree.tree_flatten(params)
    return [leaf.detach() for leaf in leaves], structure, paths(params)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _sizes(
    params: Tree,
    plan: Plan,
    n: int,
    factor_count: int,
    chunk_bytes: int | None,
    formed: int,
    held: int,
    few_data: int,
) -> tuple[int, int]:
    """Return how many data, and how many factors, go into a chunk.

    Without `chunk_bytes` a chunk may be as large as the result, and no less than what a few data and one factor
    need.
    """
    leaves = optree.tree_leaves(params)
    item = plan.probe.element_size()
    activations = sum(math.prod(shape) for shape, _ in plan.shapes)
    generic = sum(leaves[index].numel() for index in plan.generic)
    unfolded = max((_unfolded(use, plan) for use in plan.uses), default=0)
    once = 4 * activations + unfolded + plan.probe.numel() * factor_count
    per_factor = 2 * activations + generic + formed
    default = max(SMALL_CHUNK_BYTES // item, held, min(n, few_data) * (once + per_factor))
    numbers = default if chunk_bytes is None else chunk_bytes // item
    at_once = max(1, min(factor_count, (numbers - once) // per_factor))
    return max(1, min(n, numbers // (once + at_once * per_factor))), at_once


def _unfolded(use: Use, plan: Plan) -> int:
    """Return how many numbers a layer's input has, unfolded, for one datum."""
    if not isinstance(use.kind, Matrix):
        return 0
    of_input, of_output = use.kind.shape if use.kind.transposed else use.kind.shape[::-1]
    return math.prod(plan.shapes[use.tap][0]) // of_output * of_input


def _linearise(forward: Forward, params: Tree, chunk: Any, plan: Plan, compare: bool) -> Any:
    """Run a chunk through `forward` and return its outputs, uses, layer inputs, and the pullback to the tapped
    outputs.
    """
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
        late.append(taps)
        return outputs, (taps.inputs, taps.outputs)

    late: list[Taps] = []
    if zeros and len(plan.generic) < len(leaves):
        outputs, pull, (inputs, tapped_outputs) = _vjp(run, zeros)
    else:
        (outputs, (inputs, tapped_outputs)), pull = run(zeros), None
    taps = late[-1]
    if compare:
        _require_separate(outputs, plan)
        plan = untap(plan, {**taps.untapped, **_misplaced(taps, tapped_outputs, plan)})
    keep = [i for i, use in enumerate(taps.uses) if use.leaf not in plan.reasons]
    return outputs.detach(), [taps.uses[i] for i in keep], [inputs[i] for i in keep], pull, plan


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


def _vjp(run: Callable[[list[Tensor]], tuple[Tensor, Any]], zeros: list[Tensor]) -> tuple[Tensor, Any, Any]:
    """Return outputs, the pullback of several factors at once, and aux; outside of transforms by autograd, which is
    leaner.
    """
    if is_transformed():
        outputs, vjp, aux = torch.func.vjp(run, zeros, has_aux=True)
        return outputs, _over_factors(lambda s: vjp(s)[0]), aux
    zeros = [zero.requires_grad_() for zero in zeros]
    with torch.enable_grad():
        outputs, aux = run(zeros)

    def pull(factors: Tensor, **options: Any) -> Any:
        return torch.autograd.grad(outputs, zeros, factors, retain_graph=True, materialize_grads=True, **options)

    def pull_many(factors: Tensor) -> Any:
        if factors.shape[0] > 1:
            try:
                return pull(factors, is_grads_batched=True)
            except (RuntimeError, NotImplementedError):
                pass
        return [torch.stack(leaves) for leaves in zip(*map(pull, factors))]

    return outputs.detach(), pull_many, optree.tree_map(torch.Tensor.detach, aux)


def _over_factors(pull: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Vmap a pullback over a leading axis of factors; loop where an operation's backward pass cannot be vmapped."""

    def pull_many(factors: Tensor) -> Any:
        if factors.shape[0] > 1:
            try:
                return torch.vmap(pull)(factors)
            except (RuntimeError, NotImplementedError):
                pass
        return optree.tree_map(lambda *leaves: torch.stack(leaves), *map(pull, factors))

    return pull_many


def _tapped_gradients(uses: list[Use], inputs: list[Tensor], pulled: list[Tensor], b: int) -> list[Gradient]:
    return [
        Gradient(
            use.leaf,
            use.kind,
            lambda use=use, x=x: use.canonical.x(x, b),
            lambda use=use, x=x: use.canonical.g(x, pulled[use.tap], b),
        )
        for use, x in zip(uses, inputs)
    ]


def _generic_gradients(forward: Forward, params: Tree, chunk: Any, factors: Tensor, plan: Plan) -> list[Gradient]:
    rows = generic_rows(forward, params, chunk, factors, plan.generic)
    k, b = factors.shape[:2]
    return [
        Gradient(
            index,
            Vector((row[0, 0].numel(), 1)),
            lambda row=row: row.new_zeros(b),
            lambda row=row: row.reshape(k, b, -1),
        )
        for index, row in zip(plan.generic, rows)
    ]


def generic_rows(forward: Forward, params: Tree, chunk: Any, factors: Tensor, wanted: list[int]) -> list[Tensor]:
    """Return J_b^T s_kb for the wanted leaves, each `[K, b, *leaf.shape]`, by one vjp a datum."""
    leaves, structure, _ = _fresh(params)

    def one(datum: Any, s: Tensor, over_factors: Any) -> list[Tensor]:
        def output(some: list[Tensor]) -> Tensor:
            everything = list(leaves)
            for index, leaf in zip(wanted, some):
                everything[index] = leaf
            return forward(optree.tree_unflatten(structure, everything), datum)[0]

        _, vjp = torch.func.vjp(output, [leaves[index] for index in wanted])
        return over_factors(lambda s: vjp(s)[0])(s)

    entries, chunk_structure = optree.tree_flatten(chunk)
    batched = [i for i, entry in enumerate(entries) if isinstance(entry, Tensor) and entry.ndim]

    def vmapped(tensors: list[Tensor], s: Tensor) -> list[Tensor]:
        datum = list(entries)
        for i, tensor in zip(batched, tensors):
            datum[i] = tensor[None]
        return one(optree.tree_unflatten(chunk_structure, datum), s, torch.vmap)

    s = factors.transpose(0, 1)
    try:
        rows = torch.vmap(vmapped)([entries[i] for i in batched], s)
    except Exception:  # what cannot be vmapped is done datum by datum; if that fails too, the user sees why
        each = [one(part(chunk, i, i + 1), s[i], _over_factors) for i in range(s.shape[0])]
        rows = [torch.stack(leaf) for leaf in zip(*each)]
    return [row.transpose(0, 1) for row in rows]


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Swap fused kernels (attention, recurrent nets) for plain ones, which can be differentiated in every way."""
    with ExitStack() as stack:
        stack.enter_context(torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH))
        stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield
