"""Outputs of data with many targets, such as the pixels of an image, target by target and in blocks.

A datum of T targets with C outputs each has a covariance of ``(T C)^2`` numbers, of an image of 256 x 256 pixels and three
classes 4e10. What a target's own distribution needs is ``C x C``, and the Jacobian of a few targets at a time:

    f_t ~ N(f_t(mean), J_t Lambda^-1 J_t^T),        J_t [C, P],  for a block of targets t after another
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain import kinds
from bayesopt_chain.curvature._plan import batch_size, part
from bayesopt_chain.posterior._linearized import linearized
from bayesopt_chain.posterior.fit import FittedLaplace
from bayesopt_chain.posterior.predictions import batches_of
from bayesopt_chain.trees import Tree

FITTED = kinds.instance(FittedLaplace, "what bc.fit_laplace returned")


@kinds.takes(fitted=FITTED, data=kinds.DATA, at_once=kinds.WHOLE)
def outputs_by_target(fitted: FittedLaplace, data: Any, *, at_once: int = 16) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the outputs of each target alone, in memory that does not grow with the square of the targets.

    Args:
        fitted: of ``bc.fit_laplace``, in any structure.
        data: inputs, as for ``fitted.predict``; a datum is taken at a time.
        at_once: targets in a block. Held at once are, beside the result, the gradients of ``at_once C`` outputs in the
            activations of one datum. Default 16.

    Returns:
        ``(mean [N, *positions, C], covariance [N, *positions, C, C])``, classes last wherever the model has them; what
        :func:`softmax_mean` and ``fitted.likelihood.predictive`` of flattened targets take.

    Raises:
        ValueError: no data.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> _ = torch.manual_seed(0)
        >>> module = torch.nn.Conv2d(1, 3, 3, padding=1).eval()
        >>> x, y = torch.randn(6, 1, 4, 4), torch.randint(3, (6, 4, 4))
        >>> fitted = bc.fit_laplace(module, bc.likelihoods.categorical(axis=-3), [(x, y)], tune=None)
        >>> mean, covariance = bc.posterior.outputs_by_target(fitted, x[:2])
        >>> mean.shape, covariance.shape
        (torch.Size([2, 4, 4, 3]), torch.Size([2, 4, 4, 3, 3]))
        >>> bc.posterior.softmax_mean(mean, covariance).shape
        torch.Size([2, 4, 4, 3])
    """
    model, means, covariances = fitted.model, [], []
    model.require_seen(data)
    posterior = fitted.posterior.factorised()
    with kinds.blaming("outputs_by_target", "data"):
        for batch in batches_of(data, model.how.read):
            seen = model.seen_by_head(batch)
            for n in range(batch_size(seen)):
                datum = part(seen, n, n + 1)
                with torch.no_grad():
                    whole = model.forward(posterior.mean, datum)
                grouping = model.likelihood.grouping(whole.shape[1:])
                order = torch.arange(whole[0].numel()) if grouping.order is None else grouping.order
                blocks = []
                for some in order.to(whole.device).split(at_once * grouping.width):
                    _, covariance = linearized(_some(model.forward, some), posterior, datum)
                    targets = covariance.reshape(-1, grouping.width, len(some) // grouping.width, grouping.width)
                    blocks.append(targets.diagonal(dim1=0, dim2=2).movedim(-1, 0))
                means.append(grouping.split(whole).to(model.dtype))
                shape = (1, *grouping.positions, grouping.width, grouping.width)
                covariances.append(torch.cat(blocks).reshape(shape).to(model.dtype))
    if not means:
        raise ValueError("outputs_by_target: data has no batches: pass at least one datum")
    return torch.cat(means), torch.cat(covariances)


def _some(forward: Callable[[Tree, Any], Tensor], entries: Tensor) -> Callable[[Tree, Any], Tensor]:
    """The same function with some of its outputs alone, ``[B, entries]``."""
    return lambda params, batch: forward(params, batch).flatten(1)[:, entries]
