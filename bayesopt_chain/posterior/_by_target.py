"""Outputs of data with many targets, such as the pixels of an image, target by target and in blocks.

A datum of T targets with C outputs each has a covariance of ``(T C)^2`` numbers, of an image of 256 x 256 pixels and three
classes 4e10. What a target's own distribution needs is ``C x C``, and the Jacobian of a few targets at a time:

    f_t ~ N(f_t(mean), J_t Lambda^-1 J_t^T),        J_t [C, P],  for a block of targets t after another

Where the kept parameters are one linear layer or convolution whose output is the model's, J_t is the patch x_t that the layer
sees there: ``f_t = W x_t + b`` needs no backward pass. The linearised model is that of Immer et al. (2021).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain import kinds
from bayesopt_chain.curvature._kinds import Matrix, Vector
from bayesopt_chain.curvature._plan import Affine, batch_size, fresh_leaves, part
from bayesopt_chain.curvature._taps import Taps
from bayesopt_chain.posterior._linearized import _of_affine, linearized
from bayesopt_chain.posterior.fit import FittedLaplace
from bayesopt_chain.posterior.gaussian import Gaussian
from bayesopt_chain.posterior.model import batches_of
from bayesopt_chain.trees import Tree

LAYER = 64  # times as many targets at once where they need no backward pass

FITTED = kinds.instance(FittedLaplace, "what bc.fit_laplace returned")


@kinds.takes(fitted=FITTED, data=kinds.DATA, at_once=kinds.WHOLE)
def outputs_by_target(fitted: FittedLaplace, data: Any, *, at_once: int = 16) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the outputs of each target alone, in memory that does not grow with the square of the targets.

    Args:
        fitted: of ``bc.fit_laplace``, in any structure.
        data: inputs, as for ``fitted.predict``; a datum is taken at a time.
        at_once: targets in a block. Held at once are, beside the result, the gradients of ``at_once C`` outputs in the
            activations of one datum; of a last layer alone what it sees (of a convolution its unfolded input) and the
            Jacobian of ``64 at_once`` targets. Default 16.

    Returns:
        ``(mean [N, *positions, C], covariance [N, *positions, C, C])``, classes last wherever the model has them (variances
        ``[N, *positions, C]`` where :func:`linearized` gives no more); what
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
    by_rows = posterior.precision.layer_bases() is None and posterior.precision.lower_factor() is None
    with kinds.blaming("outputs_by_target", "data"):
        for batch in batches_of(data, model.how.read):
            seen = model.seen_by_head(batch)
            for n in range(batch_size(seen)):
                datum = part(seen, n, n + 1)
                with torch.no_grad():
                    whole = model.forward(posterior.mean, datum)
                grouping = model.likelihood.grouping(whole.shape[1:])
                means.append(grouping.split(whole).to(model.dtype))
                shape = (1, *grouping.positions, grouping.width, grouping.width)
                inputs = (
                    None
                    if by_rows
                    else _inputs(
                        model.forward, posterior.mean, datum, grouping.split(whole).reshape(-1, grouping.width)
                    )
                )
                if inputs is not None:
                    found = [_of_layer(posterior, some) for some in inputs.split(LAYER * at_once)]
                    shape = (*shape[:-2], *found[0].shape[1:])
                    covariances.append(torch.cat(found).reshape(shape).to(model.dtype))
                    continue
                order = torch.arange(whole[0].numel(), device="cpu") if grouping.order is None else grouping.order
                blocks = []
                for some in order.to(whole.device).split(at_once * grouping.width):
                    _, covariance = linearized(_some(model.forward, some), posterior, datum)
                    targets = covariance.reshape(-1, grouping.width, len(some) // grouping.width, grouping.width)
                    blocks.append(targets.diagonal(dim1=0, dim2=2).movedim(-1, 0))
                covariances.append(torch.cat(blocks).reshape(shape).to(model.dtype))
    if not means:
        raise ValueError("outputs_by_target: data has no batches: pass at least one datum")
    return torch.cat(means), torch.cat(covariances)


def _inputs(forward: Callable[[Tree, Any], Tensor], params: Tree, datum: Any, wanted: Tensor) -> Tensor | None:
    """What the kept layer sees at each target, ``[T, I]``; None where the outputs ``[T, C]`` are not that layer's there."""
    leaves, structure, _ = fresh_leaves(params)
    taps = Taps(leaves, 1)
    with torch.no_grad(), taps:
        forward(structure.unflatten(leaves), datum)
    uses = {use.leaf: (use, x) for use, x in zip(taps.uses, taps.inputs)}
    matrices = [(use, x) for use, x in uses.values() if isinstance(use.kind, Matrix) and not use.kind.transposed]
    biases = [leaf for leaf, (use, _) in uses.items() if isinstance(use.kind, Vector)]
    if len(taps.uses) != len(leaves) or len(matrices) != 1 or len(biases) != len(leaves) - 1 or len(biases) > 1:
        return None
    use, x = matrices[0]
    seen = use.canonical.x(x, 1)[0]
    found = seen @ leaves[use.leaf].reshape(use.kind.shape).mT + sum(leaves[leaf] for leaf in biases)
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return None
    close = (found - wanted).abs().amax() <= torch.finfo(found.dtype).eps ** 0.5 * wanted.abs().amax()
    return seen if bool(close) else None


def _of_layer(posterior: Gaussian, x: Tensor) -> Tensor:
    """The covariance ``[T, C, C]`` of ``W x + b``: each target as a datum of a linear layer."""
    leaves = optree.tree_leaves(posterior.mean)  # named by their numbers, so that their order stays
    flat = {str(i): leaf.flatten(1) if leaf.ndim > 1 else leaf for i, leaf in enumerate(leaves)}
    weight = next(name for name, leaf in flat.items() if leaf.ndim > 1)
    layer = Affine(weight, next((name for name in flat if name != weight), None))
    return _of_affine(layer, flat, x, posterior.precision.layer_bases(), posterior.precision)


def _some(forward: Callable[[Tree, Any], Tensor], entries: Tensor) -> Callable[[Tree, Any], Tensor]:
    """The same function with some of its outputs alone, ``[B, entries]``."""
    return lambda params, batch: forward(params, batch).flatten(1)[:, entries]
