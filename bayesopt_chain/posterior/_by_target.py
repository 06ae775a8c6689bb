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

from bayesopt_chain import checks
from bayesopt_chain.curvature._kinds import Matrix, Vector
from bayesopt_chain.curvature._plan import Affine, batch_size, fresh_leaves, part
from bayesopt_chain.curvature._taps import Taps
from bayesopt_chain.posterior._linearized import linearized, of_affine
from bayesopt_chain.posterior.fit import FITTED, FittedLaplace
from bayesopt_chain.posterior.gaussian import Gaussian
from bayesopt_chain.posterior.model import asked
from bayesopt_chain.trees import Tree

LAYER = 64  # times as many targets at once where they need no backward pass


@checks.takes(fitted=FITTED, data=checks.DATA, at_once=checks.WHOLE)
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
    model, posterior = fitted.model, fitted.posterior.factorised()
    by_rows = posterior.precision.layer_bases() is None and posterior.precision.lower_factor() is None

    def of_datum(datum: Any) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            whole = model.forward(posterior.mean, datum)
        grouping = model.likelihood.grouping(whole.shape[1:])
        mean, width = grouping.split(whole), grouping.width
        inputs = None if by_rows else _inputs(model.forward, posterior.mean, datum, mean.reshape(-1, width))
        if inputs is not None:
            found = torch.cat([_of_layer(posterior, some) for some in inputs.split(LAYER * at_once)])
            return mean, found.reshape(*mean.shape[:-1], *found.shape[1:])
        order = torch.arange(whole[0].numel(), device="cpu") if grouping.order is None else grouping.order
        blocks = []
        for some in order.to(whole.device).split(at_once * width):
            _, covariance = linearized(_some(model.forward, some), posterior, datum)
            targets = covariance.reshape(-1, width, len(some) // width, width)
            blocks.append(targets.diagonal(dim1=0, dim2=2).movedim(-1, 0))
        return mean, torch.cat(blocks).reshape(*mean.shape, width)

    def of_batch(batch: Any) -> list[Tensor]:
        each = [of_datum(part(batch, n, n + 1)) for n in range(batch_size(batch))]
        return [torch.cat(x).to(model.dtype) for x in zip(*each)]

    means, covariances = zip(*asked(model, "outputs_by_target", data, of_batch))
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
    return of_affine(layer, flat, x, posterior.precision.layer_bases(), posterior.precision)


def _some(forward: Callable[[Tree, Any], Tensor], entries: Tensor) -> Callable[[Tree, Any], Tensor]:
    """The same function with some of its outputs alone, ``[B, entries]``."""
    return lambda params, batch: forward(params, batch).flatten(1)[:, entries]
