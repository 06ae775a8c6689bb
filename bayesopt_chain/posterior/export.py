r"""Predictions as ordinary modules: mean and variance of new targets from inputs, for ``torch.export`` and ONNX.

A linear last layer with features phi has outputs ``f ~ N(W phi + b, S)``; with Sigma the covariance of the rows ``(w_e, b_e)``,

    S_kl = phi~^T Sigma_kl phi~,    phi~ = (phi, 1),

and where the precision is diagonal in a basis ``u_i (x) v_j`` of weights, with values lambda_ij, and in one of the bias,

    S = U diag( (V^T phi)^2 / lambda ) U^T + S_b.

Draws are members side by side. Both make a mixture of targets, whose mean and variance come from the likelihood, by the nodes
of :class:`bayesopt_chain.likelihoods.Predictive`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bayesopt_chain.likelihoods import Likelihood, Outputs
from bayesopt_chain.modules.functional import copied, write_back
from bayesopt_chain.posterior._linearized import MOST
from bayesopt_chain.posterior.batches import logits_of
from bayesopt_chain.posterior.gaussian import Gaussian
from bayesopt_chain.posterior.last_layer import Features

Tensors = Mapping[str, Tensor]
LARGEST = 4096  # parameters of a layer whose covariance is held as a matrix


class LinearizedHead(nn.Module):
    """A network with a Gaussian over its linear last layer; made by :meth:`bayesopt_chain.FittedLaplace.module`.

    Called with the network's inputs it returns mean and variance of the targets.
    """

    def __init__(self, features: Features, head: Any, posterior: Gaussian, likelihood: Likelihood, dtype: Any) -> None:
        super().__init__()
        self.likelihood, self.dtype = likelihood, dtype
        original = features.forward.module
        self.layer = next(name for name, layer in original.named_modules() if layer is features.layer)
        self.network = _filled(original, features.params)
        params: Any = posterior.mean
        precision, names = posterior.precision.factorised(), [head.weight, *([] if head.bias is None else [head.bias])]
        weight: Tensor = params[head.weight].clone()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", None if head.bias is None else params[head.bias].clone())
        outputs, width = weight.shape[0], sum(params[name][0].numel() for name in names)
        bases, eye = precision.layer_bases(), torch.eye(outputs, dtype=weight.dtype, device=weight.device)
        if bases:
            of = dict(zip(sorted(params), bases))  # leaves come by name
            left, right, values = of[head.weight]
            self.register_buffer("left", left if left is not None and left.ndim > 1 else None)
            self.register_buffer(
                "right",
                torch.eye(values.shape[-1], dtype=values.dtype, device=values.device) if right is None else right,
            )
            self.register_buffer("variances", values.reciprocal())
            none: Any = (None, None, weight.new_full((outputs,), math.inf))
            left, _, values = none if head.bias is None else of[head.bias]
            variance = values.reciprocal().reshape(-1)
            is_matrix = left is not None and left.ndim > 1
            self.register_buffer("covariance", left * variance @ left.mT if is_matrix else variance)  # pyright: ignore[reportOptionalMemberAccess]
            return
        if outputs * width > LARGEST:
            raise ValueError(
                f"module: the covariance of {outputs * width} parameters is a matrix of {(outputs * width) ** 2} entries: fit "
                "with structure='kronecker' or 'diagonal', or export draws (Draws.module)"
            )
        units = torch.eye(outputs * width, dtype=eye.dtype, device=eye.device).reshape(-1, outputs, width)
        pieces = units.split([1 if params[name].ndim == 1 else width - len(names) + 1 for name in names], 2)
        solved: Any = precision.solve({n: x.reshape(-1, *params[n].shape) for n, x in zip(names, pieces)})
        rows = torch.cat([solved[name].reshape(len(units), outputs, -1) for name in names], 2)
        self.register_buffer("covariance", rows.reshape(outputs, width, outputs, width).transpose(0, 1).contiguous())

    def forward(self, *inputs: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        """Mean and variance of the targets, noise included, ``[N, *positions]`` (of classes ``[N, *positions, C]``)."""
        seen: list[Tensor] = []
        layer = self.network.get_submodule(self.layer)
        handle = layer.register_forward_hook(lambda _, given, output: seen.append(given[0]))
        try:
            self.network(*inputs, **keywords)
        finally:
            handle.remove()
        w: Any = self.weight
        phi = seen[-1].to(w.dtype)
        mean = nn.functional.linear(phi, w, self.bias)  # pyright: ignore[reportArgumentType]
        phi, shape = phi.flatten(0, -2), mean.shape
        found = Outputs(mean.flatten(0, -2).to(self.dtype), self._covariance(phi).to(self.dtype))
        mixture = self.likelihood.mixed(found)
        return tuple(x.reshape(*shape[:-1], *x.shape[1:]) for x in (mixture.mean, mixture.variance))  # pyright: ignore

    def _covariance(self, phi: Tensor) -> Tensor:
        covariance: Any = self.covariance
        if covariance.ndim == 4:
            phi = phi if self.bias is None else torch.cat([phi, torch.ones_like(phi[:, :1])], 1)
            half = (phi @ covariance.flatten(1)).reshape(-1, *covariance.shape[1:])
            return (half * phi[:, None, None]).sum(-1)
        variances = (phi @ self.right).square() @ self.variances.mT  # pyright: ignore[reportOperatorIssue, reportAttributeAccessIssue]
        left: Any = self.left
        if left is not None:
            return left * variances[:, None] @ left.mT + covariance
        variances = variances + covariance
        return variances if variances.shape[1] > MOST else torch.diag_embed(variances)


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
        mixture = self.likelihood.mixed(outputs, self.log_weights)  # pyright: ignore[reportArgumentType]
        return mixture.mean, mixture.variance


def _filled(network: nn.Module, params: Tensors, buffers: Tensors | None = None) -> nn.Module:
    """A copy with these tensors, for predictions alone."""
    network = copied(network)
    write_back(network, params, buffers)
    return network.eval().requires_grad_(False)
