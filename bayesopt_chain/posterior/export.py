r"""Predictions as ordinary modules: mean and variance of new targets from inputs, for ``torch.export`` and ONNX.

A linear last layer with features phi has outputs ``f ~ N(W phi + b, S)``; with Sigma the covariance of the rows ``(w_e, b_e)``,

    S_kl = phi~^T Sigma_kl phi~,    phi~ = (phi, 1),

and where the precision is diagonal in a basis of the layer, S is what predictions compute (``_linearized.of_affine``).

Draws are members side by side. Both make a mixture of targets, whose mean and variance come from the likelihood, by the nodes
of :class:`bayesopt_chain.likelihoods.Predictive`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor, nn

from bayesopt_chain.curvature._plan import Affine
from bayesopt_chain.likelihoods import Likelihood, Outputs, Predictive
from bayesopt_chain.modules import logits_of, write_back
from bayesopt_chain.posterior._linearized import of_affine
from bayesopt_chain.posterior.gaussian import Gaussian
from bayesopt_chain.posterior.last_layer import Features, seen_by
from bayesopt_chain.precision import Precision
from bayesopt_chain.tracing import is_hidden

Tensors = Mapping[str, Tensor]
LARGEST = 4096  # parameters of a layer whose covariance is held as a matrix
IN_GRAPH = 1025  # nodes of a rule over one output


class LinearizedHead(nn.Module):
    """A network with a Gaussian over its linear last layer; made by :meth:`bayesopt_chain.posterior.FittedLaplace.module`.

    Called with the network's inputs it returns mean and variance of the targets.
    """

    def __init__(
        self, features: Features, head: Affine, posterior: Gaussian, likelihood: Likelihood, dtype: Any
    ) -> None:
        super().__init__()
        self.likelihood, self.dtype = likelihood, dtype
        original = features.forward.module
        self.layer = next(name for name, layer in original.named_modules() if layer is features.layer)
        self.network = _filled(original, features.params, features.forward.held)
        self.head, precision = head, posterior.precision.factorised()
        bases = precision.layer_bases()
        covariance = None if bases else _covariance_of(precision, posterior.mean, head)
        held: Any = (posterior.mean, bases, covariance)
        leaves, self.structure = optree.tree_flatten(held)
        for i, leaf in enumerate(leaves):
            self.register_buffer(f"held{i}", leaf.clone())

    def forward(self, *inputs: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        """Mean and variance of the targets, noise included, ``[N, *positions]`` (of classes ``[N, *positions, C]``)."""
        layer = self.network.get_submodule(self.layer)
        phi = seen_by(layer, lambda: self.network(*inputs, **keywords))
        held: Any = [getattr(self, f"held{i}") for i in range(self.structure.num_leaves)]
        known: Any = self.structure.unflatten(held)
        params, bases, covariance = known
        phi = phi.to(params[self.head.weight].dtype)
        mean, flat = self.head(params, (phi, None)), phi.flatten(0, -2)
        spread = of_affine(self.head, params, flat, bases, None) if bases else self._between_rows(flat, covariance)
        outputs = Outputs(mean.flatten(0, -2).to(self.dtype), spread.to(self.dtype))
        # a graph has as many nodes whatever it is given, so that they are enough for deviations of sixty widths
        predictive = (
            self.likelihood.mixed(outputs, points=IN_GRAPH) if is_hidden(mean) else Predictive(self.likelihood, outputs)
        )
        return tuple(x.reshape(*mean.shape[:-1], *x.shape[1:]) for x in (predictive.mean, predictive.variance))  # pyright: ignore

    def _between_rows(self, phi: Tensor, covariance: Tensor) -> Tensor:
        phi = phi if self.head.bias is None else torch.cat([phi, torch.ones_like(phi[:, :1])], 1)
        half = (phi @ covariance.flatten(1)).reshape(-1, *covariance.shape[1:])
        return (half * phi[:, None, None]).sum(-1)


def _covariance_of(precision: Precision, params: Any, head: Affine) -> Tensor:
    """That of the rows ``(w_e, b_e)`` of a layer, ``[W, E, E, W]``."""
    names = [head.weight, *([] if head.bias is None else [head.bias])]
    outputs, width = len(params[head.weight]), sum(params[name][0].numel() for name in names)
    if outputs * width > LARGEST:
        raise ValueError(
            f"module: the covariance of {outputs * width} parameters is a matrix of {(outputs * width) ** 2} entries: fit "
            "with structure='kronecker' or 'diagonal', or export draws (Draws.module)"
        )
    units = torch.eye(outputs * width, dtype=params[head.weight].dtype, device=params[head.weight].device)
    pieces = units.reshape(-1, outputs, width).split([params[name][0].numel() for name in names], 2)
    solved: Any = precision.solve({n: x.reshape(-1, *params[n].shape) for n, x in zip(names, pieces)})
    rows = torch.cat([solved[name].reshape(len(units), outputs, -1) for name in names], 2)
    return rows.reshape(outputs, width, outputs, width).transpose(0, 1).contiguous()


class Members(nn.Module):
    """Networks at draws of their parameters; made by :meth:`bayesopt_chain.Draws.module`.

    Called with a network's inputs it returns mean and variance of the targets.
    """

    def __init__(
        self,
        network: nn.Module,
        draws: Sequence[tuple[Tensors, Tensors]],
        likelihood: Likelihood,
        log_weights: Tensor | None,
    ) -> None:
        super().__init__()
        self.likelihood = likelihood
        self.members = nn.ModuleList([_filled(network, *draw) for draw in draws])
        self.register_buffer("log_weights", log_weights)

    def forward(self, *inputs: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        """Mean and variance of the targets, noise included, ``[N, *positions]`` (of classes ``[N, *positions, C]``)."""
        outputs = torch.stack([logits_of(member(*inputs, **keywords)) for member in self.members])
        mixture = self.likelihood.mixture(outputs, self.log_weights)  # pyright: ignore[reportArgumentType]
        return mixture.mean, mixture.variance


def _filled(network: nn.Module, params: Tensors, buffers: Tensors | None = None) -> nn.Module:
    """A copy with these tensors, for predictions alone."""
    network = copy.deepcopy(network)
    write_back(network, params, buffers)
    return network.eval().requires_grad_(False)
