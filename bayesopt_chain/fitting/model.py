"""What a fit looks at: a model of its uncertain parameters, and one pass of it over the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import optree
import torch
from torch import Tensor, nn

from bayesopt_chain.curvature import ggn, subset
from bayesopt_chain.fitting.last_layer import Features, find_last_layer, head
from bayesopt_chain.likelihoods import Likelihood
from bayesopt_chain.modules.functional import make_functional
from bayesopt_chain.precision import Precision
from bayesopt_chain.trees import Tree


class Pass(NamedTuple):
    """What one pass over the data says at the parameters.

    ``precision``: the sum of the increments; ``gradient``: of the summed negative log-likelihood; ``log_likelihood``: summed,
    0-d; ``squares``: twice its excess over a perfect fit, 0-d (for Gaussian noise the whitened residual sum of squares);
    ``entries``: of all targets' outputs.
    """

    precision: Any
    gradient: Any
    log_likelihood: Tensor
    squares: Tensor
    entries: int


@dataclass(frozen=True)
class Model:
    """The pieces of a fit: how outputs follow from the kept parameters, and how curvature is estimated."""

    forward: Callable[[Tree, Any], Tensor]
    params: Tree
    likelihood: Likelihood
    structure: str
    options: dict[str, Any]
    features_of: Features | None = None

    @property
    def is_linear_gaussian(self) -> bool:
        return self.features_of is not None and self.likelihood.name == "gaussian"

    def seen_by_head(self, batch: Any) -> Any:
        """The batch as ``forward`` takes it: ``(features, targets)`` for a linear last layer."""
        if self.features_of is None:
            return batch
        return self.features_of(batch), batch[1]

    def run_over(self, loader: Iterable, progress: bool) -> Pass:
        """One pass over the data."""
        estimate = ggn(self.forward, self.likelihood, self.structure, **self.options)
        total: Pass | None = None
        for batch in with_progress(loader, progress):
            batch = self.seen_by_head(batch)
            one = self._looked_at(batch, estimate)
            total = one if total is None else both(total, one)
        if total is None:
            raise ValueError("fit_laplace: the loader has no batches")
        return total

    def _looked_at(self, batch: Any, estimate: Callable[[Any, Any], Precision]) -> Pass:
        leaves, structure = optree.tree_flatten(self.params)
        with torch.enable_grad():
            chosen = [leaf.detach().requires_grad_() for leaf in leaves]
            outputs = self.forward(optree.tree_unflatten(structure, chosen), batch)
            loss = self.likelihood.nll(outputs, batch[1]).sum()
            slopes = torch.autograd.grad(loss, chosen, materialize_grads=True)
        outputs, loss = outputs.detach(), loss.detach().to(torch.float64)
        squares, entries = torch.zeros((), dtype=torch.float64, device=loss.device), 0
        if self.likelihood.name == "gaussian":
            squares = 2 * (loss - self.likelihood.nll(outputs, outputs).sum().to(torch.float64))
            entries = outputs.numel()
        gradient = optree.tree_unflatten(structure, [x.to(torch.float64) for x in slopes])
        return Pass(estimate(self.params, batch), gradient, -loss, squares, entries)


def both(a: Pass, b: Pass) -> Pass:
    """Two passes over different data as one."""
    return Pass(
        a.precision.add(b.precision),
        optree.tree_map(torch.add, a.gradient, b.gradient),
        a.log_likelihood + b.log_likelihood,
        a.squares + b.squares,
        a.entries + b.entries,
    )


def make_model(
    source: Any, params: Tree | None, likelihood: Likelihood, batch: Any, keep: Any, structure: str, options: dict
) -> Model:
    """The model of the kept parameters of a module or a forward function; ``batch`` shows which layer is the last."""
    if isinstance(source, nn.Module):
        return _of_module(source, params, likelihood, batch, keep, structure, options)
    if not callable(source):
        raise TypeError(f"fit_laplace: {type(source).__name__} is neither an nn.Module nor a function")
    if params is None:
        raise ValueError("fit_laplace: a forward function needs params=, the trained parameters")
    if isinstance(keep, str) and keep == "last_layer":
        raise ValueError(
            "fit_laplace: of a forward function the last layer is not known: pass subset= its parameters' names, or 'all'"
        )
    return _of_function(cast(Any, source), params, likelihood, keep, structure, options)


def _of_module(
    module: nn.Module, params: Any, likelihood: Likelihood, batch: Any, keep: Any, structure: str, options: dict
) -> Model:
    _require_eval(module)
    forward, own, _ = make_functional(module)
    params = own if params is None else params
    if not (isinstance(keep, str) and keep == "last_layer"):
        return _of_function(forward, params, likelihood, keep, structure, options)
    last = find_last_layer(forward, params, batch)
    if not last.is_head:
        return _of_function(forward, params, likelihood, list(last.names), structure, options)
    kept = {name: params[name] for name in last.names}
    return Model(head(last.names), kept, likelihood, structure, options, Features(forward, params, last.module))


def _of_function(
    forward: Callable[[Tree, Any], Tensor],
    params: Tree,
    likelihood: Likelihood,
    keep: Any,
    structure: str,
    options: dict,
) -> Model:
    if isinstance(keep, str) and keep == "all":
        return Model(forward, params, likelihood, structure, options)
    return Model(*subset(forward, params, keep), likelihood, structure, options)


def peeked(loader: Iterable) -> tuple[Iterable, Any]:
    """An iterable with the same batches, and the first of them."""
    batches = list(loader) if not hasattr(loader, "__len__") else loader
    first = next(iter(batches), None)
    if first is None:
        raise ValueError("fit_laplace: the loader has no batches")
    if not (isinstance(first, (tuple, list)) and len(first) == 2):
        raise ValueError(f"fit_laplace: batches must be (inputs, targets), got {type(first).__name__}")
    return batches, first


def with_progress(loader: Iterable, progress: bool) -> Iterable:
    if not progress:
        return loader
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise ImportError("fit_laplace: progress=True needs tqdm: pip install tqdm, or leave it out") from None
    return tqdm(loader, unit="batch")


def _require_eval(module: nn.Module) -> None:
    changed = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    for name, layer in module.named_modules():
        if isinstance(layer, changed) and layer.training:
            raise ValueError(
                f"fit_laplace: {name} ({type(layer).__name__}) is in training mode, where a datum's outputs depend on the "
                "others or on chance: call module.eval() first"
            )
