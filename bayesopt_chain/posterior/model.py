r"""What a fit looks at: a model of its uncertain parameters, and one pass of it over the data.

Predictions of a fitted model: Gaussian outputs, and new targets at them.

linearized       outputs N(f, J Lambda^-1 J^T), and every question about a target that they answer: a
                 :class:`bayesopt_chain.likelihoods.Predictive`
sobol, probit, quadrature   means of targets at these outputs, by rules that the likelihood has
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import optree
import torch
from torch import Tensor, nn

from bayesopt_chain import checks
from bayesopt_chain.batches import each_once
from bayesopt_chain.batches import size as number_of_data
from bayesopt_chain.curvature import empirical_fisher, fisher, ggn, subset
from bayesopt_chain.curvature._estimators import Estimator
from bayesopt_chain.curvature._plan import UNUSED, Affine, batch_size, make_plan, part
from bayesopt_chain.curvature._taps import Checks
from bayesopt_chain.likelihoods import Likelihood, Outputs
from bayesopt_chain.modules import (
    Forward,
    as_pair,
    logits_of,
    make_functional,
    require_eval,
    require_eval_mode,
    with_progress,
)
from bayesopt_chain.posterior._linearized import linearized_by
from bayesopt_chain.posterior.gaussian import Gaussian, require_finite
from bayesopt_chain.posterior.last_layer import (
    Features,
    HeadBatch,
    LastLayer,
    Responses,
    find_last_layer,
    head,
    respond,
    unwrapped,
)
from bayesopt_chain.posterior.regression import Regression, Rows, rows_of
from bayesopt_chain.precision import Kronecker
from bayesopt_chain.trees import Tree, common_dtype, paths, size, spread, wide

DENSE = (
    2048  # parameters up to which a posterior is dense by default, where Kronecker factors leave out what can be had
)
MANY = 1000  # outputs of a datum up to which the default curvature is exact, which costs a backward pass for each; classes up
# to which the Kronecker factor of a layer's outputs is a matrix
SAMPLED = 4  # rows that are sampled for every parameter of a matrix, whose inverse is then 4/3 of what it should be
ESTIMATORS: dict[str, Any] = {"ggn": ggn, "fisher": fisher, "empirical_fisher": empirical_fisher}


class How(NamedTuple):
    """What a fit was told: likelihood, parameters to keep, structure with its options, how to call the module, the prior."""

    likelihood: Likelihood
    keep: Any
    structure: str | None
    options: dict[str, Any]
    inputs: Any = None
    outputs: Any = None
    curvature: str = "ggn"  # or "default" until the model is known
    prior_mean: Any = 0.0
    temperature: float | None = None
    read: Callable[[Any], Any] = as_pair  # a batch as a pair (inputs, targets)


@dataclass(frozen=True)
class Pass:
    """What one pass over the data says at the parameters.

    ``precision``: the sum of the increments; ``rows``: of a model that is linear with Gaussian noise, else None;
    ``log_likelihood``: summed, 0-d; ``squares``: for Gaussian noise of known variance the whitened residual sum of squares;
    ``entries``: the sum of the targets' weights; both 0-d, of a linear model of several outputs ``[E]``, one for each.
    """

    precision: Any
    rows: Rows | None
    log_likelihood: Tensor
    squares: Tensor
    entries: Tensor

    @cached_property
    def decomposed(self) -> Any:
        """The precision, Kronecker factors in their eigenbasis: decomposed once for every prior and noise."""
        return self.precision.eigenbasis() if isinstance(self.precision, Kronecker) else self.precision

    def log_likelihood_at(self, model: Model, scale: Tensor) -> Tensor:
        """The log likelihood, 0-d, with Gaussian noise of ``variance / scale``; of another likelihood its power ``scale``."""
        if not model.likelihood.has_noise_scale:
            return self.log_likelihood * scale
        return self.log_likelihood + 0.5 * (self.squares * (1 - scale) + self.entries * scale.log()).sum()

    @cached_property
    def regression(self) -> Regression | None:
        """The rows, decomposed once too."""
        return None if self.rows is None else Regression(self.rows)


@dataclass(frozen=True)
class Model:
    """The pieces of a fit: how outputs follow from the kept parameters, and how curvature is estimated."""

    forward: Callable[[Tree, Any], Tensor]
    params: Tree
    how: How
    features_of: Features | Responses | None = None
    fixed: tuple[str, ...] = ()  # parameters behind the last layer
    checks: Checks = field(default_factory=Checks, compare=False, repr=False)  # of predictions

    @property
    def likelihood(self) -> Likelihood:
        return self.how.likelihood

    @property
    def dtype(self) -> torch.dtype:
        """Of predictions: a last layer with Gaussian noise is solved in float64, whatever the module computes in."""
        held = self.params if self.features_of is None else self.features_of.params
        return wide(common_dtype(held))

    @property
    def is_linear_gaussian(self) -> bool:
        """Whether the joint is quadratic in the kept parameters, and its curvature exact."""
        exact = self.how.curvature in ("ggn", "default")
        return exact and isinstance(self.forward, Affine) and self.likelihood.has_noise_scale

    def prior_means(self) -> Tree:
        """The prior's mean, a tree of tensors that broadcast with the parameters."""
        means = spread(self.how.prior_mean, self.params, "prior_mean")
        leaves, structure = optree.tree_flatten(self.params)
        return optree.tree_unflatten(structure, [m.to(p.dtype) for p, m in zip(leaves, means)])

    def prior_of_layer(self, prior_precision: Any) -> tuple[Tensor, Tensor | None]:
        """Prior precisions of a linear last layer's weights and biases, as tensors that broadcast with them."""
        layer: Any = self.forward
        each = zip(spread(prior_precision, self.params, "prior_precision"), optree.tree_leaves(self.params))
        of = dict(zip(paths(self.params), [d.to(p) for d, p in each]))
        return of[layer.weight], None if layer.bias is None else of[layer.bias]

    def seen_by_head(self, batch: Any) -> Any:
        """The batch as ``forward`` takes it: ``(features, targets)`` for a linear last layer.

        Raises:
            ValueError: the module is in training mode by now.
        """
        source = getattr(self.how.read, "module", None)
        module = source.module if isinstance(source, Forward) else source
        if isinstance(module, nn.Module):
            require_eval_mode(module, "fit_laplace")
        if self.features_of is not None:
            features, targets = batch if isinstance(batch, HeadBatch) else self.features_of(batch)
            return HeadBatch(features.to(optree.tree_leaves(self.params)[0].dtype), targets)
        return batch

    def run_over(
        self,
        batches: Iterable,
        progress: bool = False,
        total_batches: int | None = None,
        look: Callable[[Model, Any, Tensor], None] | None = None,
    ) -> Pass:
        """One pass over the data."""
        estimate = ESTIMATORS[self.how.curvature](self.forward, self.likelihood, self.how.structure, **self.how.options)
        total: Pass | None = None
        for batch in with_progress(batches, progress, total_batches):
            seen = self.seen_by_head(batch)
            with checks.blaming("fit_laplace", "loader"):
                one, outputs = self._looked_at(seen, estimate)
            if look is not None:
                look(self, batch if self.is_linear_gaussian else seen, outputs)
            total = one if total is None else both(total, one)
        if total is None:
            raise ValueError("fit_laplace: the loader has no batches")
        require_finite(total.precision.entries(), "fit_laplace: the curvature")
        return total

    def _looked_at(self, batch: Any, estimate: Estimator) -> tuple[Pass, Tensor]:
        is_dense = self.is_linear_gaussian and self.how.structure == "dense"
        if is_dense:  # then the regression's rows say it
            precision, outputs = None, self.forward(self.params, batch).detach()
        else:
            precision, outputs = estimate.with_outputs(self.params, batch)
        checks.finite_data("fit_laplace: outputs of the model", outputs)
        with torch.no_grad():
            self.likelihood.require(outputs, batch[1], wait=True)
            outputs = outputs.to(wide(outputs.dtype))  # sums of float16 end at 65,504
            loss = self.likelihood.nll(outputs, batch[1]).sum().to(torch.float64)
            squares, weights = loss.new_zeros(()), self.likelihood.weights(batch[1])
            entries = loss.new_full((), len(outputs) * math.prod(self.likelihood.grouping(outputs.shape[1:]).positions))
            entries = entries if weights is None else weights.to(torch.float64).sum()
            if self.likelihood.has_noise_scale:
                squares = self.likelihood.whitened(outputs, batch[1]).to(torch.float64).square()
                squares = squares.flatten(0, -2).sum(0) if self.is_linear_gaussian else squares.sum()
            rows = None
            if self.is_linear_gaussian:
                means = optree.tree_map(lambda m, p: m.to(torch.float64).expand_as(p), self.prior_means(), self.params)
                rows = rows_of(self.likelihood, cast(Any, self.forward), means, *batch)
                if is_dense:
                    precision = rows.precision(cast(Any, self.forward), self.params, batch_size(batch))
                shape = squares.shape if len(squares) > 1 else ()
                squares, entries = squares.reshape(shape), rows.entries.reshape(shape)
        return Pass(precision, rows, -loss, squares, entries), outputs


def both(a: Pass, b: Pass) -> Pass:
    """Two passes over different data as one."""
    return Pass(
        a.precision.add(b.precision),
        None if a.rows is None or b.rows is None else a.rows.add(b.rows),
        a.log_likelihood + b.log_likelihood,
        a.squares + b.squares,
        a.entries + b.entries,
    )


def make_model(source: Any, params: Tree | None, first: Any, how: How) -> Model:
    """The model of the kept parameters of a module or a forward function; the first batch shows which layer is the last."""
    if isinstance(source, nn.Module):
        return _of_module(source, params, first, how)
    if not callable(source):
        raise TypeError(f"fit_laplace: {type(source).__name__} is neither an nn.Module nor a function")
    if params is None:
        raise ValueError("fit_laplace: a forward function needs params=, the trained parameters")
    if how.keep == "last_layer":
        raise ValueError(
            "fit_laplace: of a forward function the last layer is not known: pass subset= its parameters' names, or 'all'"
        )
    return _of_function(cast(Any, source), params, how, first)


def with_estimator(model: Model, first: Any, data: int) -> Model:
    """The model with the default curvature decided, and with as many sampled labels as the structure asks for.

    The curvature is exact for up to :data:`MANY` outputs a datum; layers of as wide targets have the diagonal of their outputs'
    Kronecker factor. A sum of ``data`` times ``samples`` outer products has no larger rank, so that a matrix of ``P``
    parameters takes ``SAMPLED P / data`` of them for a datum, and at most as many as it has outputs.
    """
    how, options, whole = model.how, dict(model.how.options), matrix_size(model)
    is_layer = isinstance(model.forward, Affine) and model.likelihood.has_classes
    one = model.seen_by_head(part(first, 0, 1))
    outputs = model.forward(model.params, one)  # which may ask its inputs for gradients
    if how.structure == "kronecker" and {"basis", "diagonal_above"}.isdisjoint(options):
        width = model.likelihood.grouping(outputs.shape[1:]).width
        if width > MANY:
            options["diagonal_above"] = width - 1
    curvature = how.curvature
    if curvature == "default":
        makes_columns = not is_layer or how.structure not in ("kronecker", "diagonal")
        many = outputs.numel() > MANY and makes_columns
        curvature = "fisher" if (many or "samples" in options) and not model.is_linear_gaussian else "ggn"
    if curvature == "fisher":
        options.setdefault("samples", min(outputs.numel(), -(-SAMPLED * whole // data)) if whole else 1)
    return replace(model, how=how._replace(curvature=curvature, options=options))


def matrix_size(model: Model) -> int:
    """The number of parameters of the matrix that is a sum over data; 0 for a structure that is not one matrix."""
    return size(model.params) if model.how.structure in ("dense", "root") else 0


def _of_module(module: nn.Module, params: Any, first: Any, how: How) -> Model:
    module = unwrapped(module)
    require_eval(module)
    forward, own, buffers = make_functional(module, inputs=how.inputs, outputs=how.outputs or logits_of)
    # the statistics that belong to these parameters, whatever the module is trained to afterwards
    forward.held = buffers
    chosen = own if params is None else params
    for name, p in own.items():
        if name in chosen and chosen[name].shape != p.shape:
            raise ValueError(
                f"fit_laplace: params has {name} of shape {tuple(chosen[name].shape)}, the module has it of "
                f"{tuple(p.shape)}: pass parameters of this very module, such as dict(module.named_parameters())"
            )
    if how.keep != "last_layer":
        return _of_function(forward, chosen, how, first)
    last = find_last_layer(forward, chosen, first)
    if isinstance(last.features, Features):
        return _of_head(chosen, last, how)
    if isinstance(last.features, Responses):
        model = Model(respond, {name: chosen[name] for name in last.names}, how, last.features, last.behind)
        return require_responses(model, first)
    return replace(_of_function(forward, chosen, how._replace(keep=list(last.names)), first), fixed=last.behind)


def require_responses(model: Model, first: Any) -> Model:
    """The model of outputs that are derivatives, dense by default, once it is known to be linear in the last layer.

    Raises:
        ValueError: it is not linear there; Kronecker factors, or more parameters than a dense matrix is made of.
    """
    assert isinstance(model.features_of, Responses)
    names, structure = ", ".join(model.params), model.how.structure
    if structure == "kronecker" or size(model.params) > DENSE:
        raise ValueError(
            f"fit_laplace: the outputs are derivatives of the last layer's ({names}, {size(model.params)} parameters), "
            f"whose Jacobian is no product of inputs and output gradients: pass structure='dense', for at most {DENSE}"
        )
    if not model.features_of.are_linear(part(first, 0, 2)):
        raise ValueError(
            f"fit_laplace: the outputs are derivatives and not linear in {names}: pass subset='all' or names, "
            "with structure='dense'"
        )
    return replace(model, how=model.how._replace(structure=structure or "dense"))


def _of_head(params: Any, last: LastLayer, how: How) -> Model:
    kept, wanted = {name: params[name] for name in last.names}, how.structure
    model = Model(head(last.names), kept, how._replace(structure=wanted or "kronecker"), last.features)
    if not model.is_linear_gaussian:
        return model
    kept = {name: x.to(torch.float64) for name, x in kept.items()}  # in which the mode is solved for
    is_dense = wanted is None and size(kept) <= DENSE
    return replace(model, params=kept, how=model.how._replace(structure="dense" if is_dense else model.how.structure))


def _of_function(forward: Callable[[Tree, Any], Tensor], params: Tree, how: How, first: Any) -> Model:
    if how.keep != "all":
        try:
            forward, params = subset(forward, params, how.keep)
        except ValueError as err:
            raise ValueError(f"fit_laplace: {err}".replace("keep=", "subset=", 1)) from err
    structure = how.structure or _structure(forward, params, first)
    return Model(forward, params, how._replace(structure=structure))


def _structure(forward: Callable[[Tree, Any], Tensor], params: Tree, first: Any) -> str:
    """Kronecker factors where every matrix has them."""
    plan, leaves = make_plan(forward, params, first), optree.tree_leaves(params)
    if all(leaves[i].ndim < 2 or plan.reasons[i] == UNUSED for i in plan.generic):
        return "kronecker"
    return "dense" if size(params) <= DENSE else "diagonal"


def linearized(model: Model, posterior: Gaussian, batch: Any, joint: bool = False) -> Outputs:
    """One batch's outputs, in the module's precision."""
    found = linearized_by(model.checks, model.forward, posterior, batch, joint)
    return Outputs(*(x.to(model.dtype) for x in found))


def asked(
    model: Model, who: str, data: Any, answer: Callable[[Any], Any], name: str = "data", *, is_one: bool = False
) -> list[Any]:
    """What ``answer`` says of every batch as the last layer sees it.

    Raises:
        ValueError: no batches, several where they have to be one, or a batch that the model cannot take; ``who`` and ``name``
            say where.
    """
    with checks.blaming(who, name):
        found = [answer(model.seen_by_head(batch)) for batch in batches_of(data, model.how.read)]
    if not found:
        raise ValueError(f"{who}: {name} has no batches: pass at least one")
    if is_one and len(found) > 1:
        raise ValueError(f"{who}: {name} has {len(found)} batches: pass one")
    return found


def batches_of(data: Any, read: Callable[[Any], Any] = as_pair) -> Iterator[Any]:
    """Batches ``(inputs, targets)`` of a tensor of inputs, of one batch (a tuple or a mapping), or of an iterable of them;
    ``read`` makes a pair of each.

    Raises:
        ValueError: a batch without data, or whose tensors disagree about their number.
    """
    for batch in [data] if isinstance(data, (Tensor, tuple, Mapping)) else each_once(data):
        pair = read(batch)
        if not number_of_data(pair, otherwise=1):  # what holds no tensors is refused by who takes it, by its type
            raise ValueError("predict: the batch is empty: pass at least one datum")
        yield pair
