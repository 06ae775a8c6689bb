r"""How a batch's forward pass is to be pulled back: a plan made from the last datum alone, and the checks that it is right.

Every assumption is checked on the last datum. It is run alone first: its outputs must be those that it has in the batch, and
the gradients that taps or vmapped pullbacks give for it must be those of a direct backward pass through it. A parameter for
which they are not is left to direct backward passes, datum by datum, which are slow. What was checked once is remembered
(``_taps.py``).

A model whose Jacobian is known: a linear layer on given features, for which nothing has to be differentiated.

    f = W x + b,    d f_o / d W_oi = x_i,    d f_o / d b_o = 1

at every position. The layer's output is the model's, so that a column s of the root of the output Hessian is itself the
gradient of the layer's output, and (x, s) is the pair that a tap on the layer would record (``_taps.py``). No forward pass has
to be watched or checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.nn.functional import linear

from bayesopt_chain import batches
from bayesopt_chain.curvature._kinds import Matrix, Vector
from bayesopt_chain.curvature._taps import Check, Taps, Use, linear_canonical, shift_canonical
from bayesopt_chain.tracing import is_hidden, is_transformed
from bayesopt_chain.trees import Tree, paths


@dataclass(frozen=True)
class Affine:
    """``affine(params, batch) -> batch[0] @ params[weight].T + params[bias]``, its Jacobian known to every estimator here.

    Attributes:
        weight: the name of the weight, ``[O, I]``.
        bias: the name of the bias, ``[O]``; None for a layer without one.
    """

    weight: str
    bias: str | None = None

    def __call__(self, params: Mapping[str, Tensor], batch: Any) -> Tensor:
        return linear(batch[0], params[self.weight], None if self.bias is None else params[self.bias])

    def uses(self, params: Any, x: Tensor) -> tuple[list[Use], list[Tensor]]:
        """The uses of the parameters, all in the model's only layer (tap 0), and for each use the layer's inputs ``[b, *, I]``.

        A bias sees no inputs: it gets zeros ``[b]``, which say how many data there are.
        """
        numbers = {id(leaf): number for number, leaf in enumerate(optree.tree_leaves(params))}
        weight = params[self.weight]
        uses = [Use(numbers[id(weight)], 0, Matrix((weight.shape[0], weight.shape[1])), linear_canonical(), True)]
        seen = [x]
        if self.bias is not None:
            outputs = weight.shape[0]
            canonical = shift_canonical((outputs,))
            uses.append(Use(numbers[id(params[self.bias])], 0, Vector((outputs, 1)), canonical, True))
            seen.append(x.new_zeros(x.shape[0]))
        return uses, seen


Forward = Callable[[Tree, Any], Tensor]

UNUSED = "forward does not use it"
WRONG_TAP = "it is also used in a way that no torch function shows"


class TapPlan(NamedTuple):
    """How a forward pass will be pulled back.

    Attributes:
        names: the paths of the leaves.
        uses: the uses of the leaves that can be tapped.
        generic: the leaves without a tap, whose gradients are formed one vector-Jacobian product a datum.
        reasons: why each generic leaf has no tap.
        shapes: the tapped outputs' shapes and dtypes for one datum.
        probe_outputs: their values for the last datum alone.
        probe: the model's outputs for the last datum alone, ``[1, *event]``.
        direct: the pullback of a direct backward pass through the last datum; None inside a transform, and for a plan
            that needs no check.
        eps: the rounding unit of the coarsest dtype that the forward pass computes with. That of a layer's own dtype is too
            small where a frozen base is in bfloat16 and its adapters are in float32.
        rows: in which way the generic leaves' gradients are formed: the number of one of ``ROWS`` in ``_chunks.py``.
        columns: how many columns the output root of a datum has; 0 where that is not yet known.
    """

    names: list[str]
    uses: list[Use]
    generic: list[int]
    reasons: dict[int, str]
    shapes: list[tuple[torch.Size, torch.dtype]]
    probe_outputs: list[Tensor]
    probe: Tensor
    direct: Callable[[Tensor], list[Tensor]] | None
    eps: float
    rows: int = 0
    columns: int = 0

    def untap(self, leaves: dict[int, str]) -> TapPlan:
        """The plan in which these leaves, given with their reasons, are not tapped."""
        reasons = {**self.reasons, **leaves}
        return self._replace(reasons=reasons, generic=sorted(reasons))


def batch_size(batch: Any) -> int:
    """Return the common length of the first axes of a batch's tensors."""
    size = batches.size(batch)
    if not size:
        raise ValueError("the batch is empty: pass at least one datum")
    return size


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


def parts(batch: Any, at_once: int) -> list[Any]:
    """The batch in pieces of ``at_once`` data, of which the last may have fewer."""
    n = batch_size(batch)
    return [part(batch, start, min(n, start + at_once)) for start in range(0, n, at_once)]


def over_data(function: Callable[[Any], Any], batch: Any) -> Any:
    """Vmap a function of a batch of one over the data of a batch."""
    leaves, structure = batches.flatten(batch)
    batched = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.ndim]

    def one(tensors: list[Tensor]) -> Any:
        datum = list(leaves)
        for i, tensor in zip(batched, tensors):
            datum[i] = tensor[None]
        return function(structure.unflatten(datum))

    return torch.vmap(one)([leaves[i] for i in batched])


def make_plan(forward: Forward, params: Tree, batch: Any) -> TapPlan:
    """Run the last datum through ``forward`` and see how each parameter is used."""
    n = batch_size(batch)
    if isinstance(forward, Affine):
        return _affine_plan(forward, params, part(batch, n - 1, n))
    leaves, structure, names = fresh_leaves(params)
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

    return TapPlan(
        names,
        taps.uses,
        sorted(reasons),
        reasons,
        taps.shapes,
        taps.outputs,
        outputs.detach(),
        direct if is_open else None,
        eps=max([taps.eps, *(torch.finfo(x.dtype).eps for x in (outputs, *floating))]),
    )


def _affine_plan(forward: Affine, params: Any, datum: Any) -> TapPlan:
    """The plan of a model whose uses are known: there is nothing to watch and nothing to compare."""
    outputs = forward(params, datum)
    uses, _ = forward.uses(params, datum[0])
    eps = torch.finfo(outputs.dtype).eps
    return TapPlan(paths(params), uses, [], {}, [(outputs.shape, outputs.dtype)], [outputs], outputs, None, eps=eps)


def require_same_outputs(outputs: Tensor, plan: TapPlan) -> None:
    """Raise where the last datum's outputs in a batch are not those of the datum alone."""
    if outputs.shape[1:] != plan.probe.shape[1:]:
        raise ValueError(
            f"forward returned {tuple(outputs.shape)} for a batch but {tuple(plan.probe.shape)} for one datum: "
            "return outputs [B, *event]"
        )
    if is_hidden(outputs):
        return
    scale = outputs.abs().max()
    if bool((outputs[-1] - plan.probe[0]).abs().max() > plan.eps**0.5 * scale):
        raise ValueError(
            "the outputs of one datum depend on the rest of the batch, or are random, so that the loss is no sum over "
            "data: remove cross-sample operations, and call model.eval() for dropout and batch norm"
        )


def misplaced(uses: list[Use], outputs: list[Tensor], plan: TapPlan) -> dict[int, str]:
    """Find the taps whose outputs do not hold the data in order on the first axis."""
    wrong = set()
    for tap, (got, wanted) in enumerate(zip(outputs, plan.probe_outputs)):
        wanted = wanted.reshape(-1)
        if got.numel() != wanted.numel():
            wrong.add(tap)
        elif not is_hidden(got) and wanted.numel():
            difference, scale = (got - wanted).abs().max(), wanted.abs().max()
            if bool(difference > plan.eps**0.5 * scale):
                wrong.add(tap)
    return {use.leaf: "its layer does not keep the data on the first axis" for use in uses if use.tap in wrong}


def unlike(got: dict[int, Tensor], wanted: list[Tensor], eps: float, check: Check) -> list[int]:
    """Find the leaves whose gradients are not the wanted ones, up to the rounding of a pass whose coarsest unit is ``eps``.

    Where a wanted gradient is zero or not finite the comparison proves nothing, and ``check.could_fail`` becomes False.
    """
    leaves = [leaf for leaf in got if wanted[leaf].numel()]
    if not leaves:
        return []
    differences = torch.stack([(got[leaf] - wanted[leaf]).abs().max().double() for leaf in leaves])
    scales = torch.stack([wanted[leaf].abs().max().double() for leaf in leaves])
    finite = scales.isfinite()  # others cannot be compared; they show in the precision itself
    check.could_fail &= bool((finite & (scales > 0)).all())
    largest, relative = torch.where(finite, scales, 0).max(), eps ** (1 / 3)
    within = (differences <= relative * scales + min(1e3 * eps, relative) * largest) | ~finite
    return [leaf for leaf, is_within in zip(leaves, within.tolist()) if not is_within]


def fresh_leaves(params: Tree) -> tuple[list[Tensor], Any, list[str]]:
    """Return the leaves, their structure and their paths.

    The leaves are new tensor objects, so that identity tells apart even two leaves that are one tensor.
    """
    leaves, structure = optree.tree_flatten(params)
    return [leaf.detach() for leaf in leaves], structure, paths(params)
