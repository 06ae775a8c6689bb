r"""A Gaussian prior as a link: ``u <- u + Lambda (theta - m) / N``, with mean ``m``, precision ``Lambda`` and ``N`` data.

This adds the gradient of ``-log N(theta; m, Lambda^-1) / N``. If the loss is a mean over ``N`` data, ``loss - log prior / N``
is the negative log posterior per datum, up to a constant, and a chain of temperature ``1 / N`` samples the posterior under
this prior. If ``m = 0`` and ``Lambda`` is a number ``lambda``, the prior is weight decay of ``lambda / N``.

The posterior of one task can be the prior of the next. In a linear model with Gaussian noise of variance ``sigma^2`` and
inputs ``X_k`` in task ``k``, ``Lambda_k = Lambda_(k-1) + X_k^T X_k / sigma^2`` is then the precision for the data of all tasks
together.

A weight may have the precision ``lambda f``, where ``f`` is the number of inputs of its unit (Neal 1996), which :func:`fan_in`
counts. The weighted sum of inputs of size one then has the prior variance ``1 / lambda`` for every ``f``. If each weight had
the precision ``lambda``, that variance would be ``f / lambda``.

The prior is a part of the loss, so that it must stand in front of every link that scales or accumulates gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from bayesopt_chain import checks
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import HoldsTree, Link, LinkContext, Traits
from bayesopt_chain.core.op import Leaves, TensorOps
from bayesopt_chain.links.weight_decay import AddDecayedWeights, params_of, require_first
from bayesopt_chain.matching.response import Linear
from bayesopt_chain.modules import inner_of
from bayesopt_chain.precision import Diagonal, Precision, Woodbury
from bayesopt_chain.trees import copied, paths_of

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class PriorState(NamedTuple):
    """The state of a prior without correlations.

    Attributes:
        mean: the mean of each leaf; it broadcasts to the leaf.
        precision: the precision of each element of each leaf; it broadcasts to the leaf.
    """

    mean: tuple[Tensor, ...]
    precision: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Prior(HoldsTree):
    """What all links of a Gaussian prior share.

    Attributes:
        n: the number of data that the loss is a mean over.
        mean: the mean of the prior.
        precision: the precision of the prior.
    """

    n: float
    mean: Any = field(hash=False)
    precision: Any = field(hash=False)
    name = "add_gaussian_prior"
    traits = Traits(on_shards="elementwise", needs_params=True, response=Linear())  # the prior is a part of the loss

    def require_around(self, before: Sequence[Link], behind: Sequence[Link]) -> None:
        require_first(before)


@dataclass(frozen=True, eq=False)
class AddDiagonalPrior(Prior):
    """The link that :func:`add_gaussian_prior` returns for a prior without correlations."""

    def init(self, leaves: Leaves, context: LinkContext) -> PriorState:
        mean, precision = (
            tuple([x.clone() for x in context.broadcast(tree, f"add_gaussian_prior: the {what}")])
            for tree, what in ((self.mean, "mean"), (self.precision, "precision"))
        )
        for value, path in zip(precision, context.paths):
            if not bool((torch.isfinite(value) & (value >= 0)).all()):
                raise ValueError(
                    f"add_gaussian_prior: the precision of {path or 'the parameter'} must be finite and not "
                    f"negative, its smallest entry is {value.min().item():.3g}"
                )
        return PriorState(mean, precision)

    def update(self, g: Leaves, state: PriorState, op: TensorOps, context: LinkContext) -> tuple[Leaves, PriorState]:
        pull = [(p - m) * d for p, m, d in zip(params_of(context, op), *state)]
        return op.add(g, pull, alpha=1 / self.n), state


@dataclass(frozen=True, eq=False)
class AddGaussianPrior(Prior):
    """The link that :func:`add_gaussian_prior` returns for a Gaussian that may couple all parameters."""

    traits = Traits(
        needs_params=True,
        checks_gradients=True,
        needs_all_gradients=True,
        refusal_hint="; a prior without correlations takes it",
        response=Linear(),
    )

    def init(self, leaves: Leaves, context: LinkContext) -> Any:
        names, mine = context.paths, paths_of(self.mean)
        shapes, known = ([tuple(x.shape) for x in xs] for xs in (leaves, optree.tree_leaves(self.mean)))
        if mine != names or shapes != known:
            wrong = next(
                (f"{a or 'tensor'} {s}" for a, s, b, t in zip(names, shapes, mine, known) if (a, s) != (b, t)), ""
            )
            raise ValueError(
                f"add_gaussian_prior: the prior is over {len(mine)} leaves ({', '.join(mine[:4])}), the chain acts on "
                f"{len(names)}{': ' + wrong + ' differs' if wrong else ''}; pass a Gaussian over these parameters, and for one "
                "over some of them bc.masked(bc.links.add_gaussian_prior(...), mask)"
            )
        return super().init(leaves, context)

    def update(self, g: Leaves, state: Any, op: TensorOps, context: LinkContext) -> tuple[Leaves, Any]:
        mean, structure = optree.tree_flatten(self.mean)
        moved = structure.unflatten([p - m for p, m in zip(params_of(context, op), mean)])
        pull = [y.to(x.dtype) for x, y in zip(g, optree.tree_leaves(self.precision.times(moved)))]
        return op.add(g, pull, alpha=1 / self.n), state


def fan_in(module: nn.Module) -> dict[str, float]:
    """Count, for each parameter of a module, the inputs of a unit, by which the precision of a prior can be scaled.

    ``add_gaussian_prior({name: precision * f for name, f in fan_in(module).items()}, n=N)`` is the scaled prior for the
    parameters of ``bc.make_functional(module)``. In ``bc.optim`` the prior of a parameter group is
    ``weight_decay = precision / N``, so that there every parameter needs a group of its own.

    Args:
        module: any module.

    Returns:
        A number for each name of ``named_parameters()``, without what ``torch.compile`` puts in front.

        * For linear layers, convolutions, recurrent layers and attention: the product of all axes but the first. This is the
          number of input channels of a group, times the size of the kernel.
        * For transposed convolutions: the number of inputs that reach one output on average, which is the number of input
          channels of a group, times the size of the kernel over the product of the strides.
        * For embeddings: 1, because an output is one row.
        * For the weights of normalisation layers, and for parameters with at most one axis, such as biases: 1.

    Raises:
        TypeError: ``module`` is not a module.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> layers = [torch.nn.Conv2d(3, 8, 5), torch.nn.ConvTranspose2d(8, 4, 4, stride=2), torch.nn.Embedding(9, 6)]
        >>> module = torch.nn.ModuleList(layers)
        >>> bc.links.fan_in(module)
        {'0.weight': 75.0, '0.bias': 1.0, '1.weight': 32.0, '1.bias': 1.0, '2.weight': 1.0}
        >>> fans = bc.links.fan_in(module)
        >>> groups = [{"params": [p], "weight_decay": fans[name] / 1000} for name, p in module.named_parameters()]
        >>> optimizer = bc.optim.SGHMC(groups, lr=0.01, temperature=1 / 1000)
    """
    if not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"fan_in: module must be a torch.nn.Module, got {checks.short(module)}")
    module, found = inner_of(module), dict[str, float]()
    for path, p in module.named_parameters():
        layer, _, name = path.rpartition(".")
        found[path] = _fan_in(module.get_submodule(layer), name, p)
    return found


def _fan_in(layer: nn.Module, name: str, p: Tensor) -> float:
    """The number of inputs of a unit of one layer, for its parameter ``p`` of this name."""
    # of an embedding a row is looked up, of a norm each number is multiplied by an entry
    if p.ndim < 2 or not p.numel() or isinstance(layer, (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm)):
        return 1.0
    if isinstance(layer, TRANSPOSED) and name == "weight":
        reached = math.prod(k / s for k, s in zip(layer.kernel_size, layer.stride))
        return max(1.0, layer.in_channels / layer.groups * reached)
    return float(p.numel() // p.shape[0])


def add_gaussian_prior(prior: Any, *, n: float) -> Chain:
    """Add the gradient of a Gaussian prior, ``Lambda (params - mean) / n``.

    Write it first in a chain, in front of clipping or behind it. At the temperature ``1 / n`` the chain then samples
    ``likelihood x prior``. Unlike :func:`bayesopt_chain.links.add_decayed_weights`, which is the prior of mean 0 and precision
    ``n * weight_decay``, it takes any mean and any precision. If the loss has a prior already, the densities of both are
    multiplied.

    To learn one task after another, give the Laplace posterior of the last task here as ``prior=``, so that the mean is right,
    and to ``laplace().posterior(state, params, prior=...)``, so that the precision is right. In linear models with Gaussian
    noise mean and precision are then those for the data of all tasks together, up to rounding. In other models they are as
    accurate as the Gaussian approximation.

    Args:
        prior: a precision or a Gaussian. The precision of a prior of mean 0 is a number, or a tree of numbers and of tensors
            that broadcast to the parameters, or a prefix of such a tree. A Gaussian is a :class:`bayesopt_chain.Gaussian` with
            a precision of any structure, for example the posterior of :func:`bayesopt_chain.laplace`, ``swag``, ``vi`` or
            ``ekf``.
        n: the number of data that the loss is a mean over; 1 for a loss that is a sum.

    Returns:
        A link. If the prior has no correlations, the state has its mean and precision; otherwise the link has them.

    Raises:
        TypeError: ``prior`` is neither a precision nor a Gaussian.
        ValueError: a precision that is negative or not finite, or ``n`` is not positive; at ``init``, a tree that does not fit
            the parameters, or a link in front that would change the prior; at ``update``, missing parameters, or a missing
            gradient if the prior has correlations.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> from bayesopt_chain.precision import Diagonal
        >>> prior = bc.Gaussian(torch.tensor([1.0]), Diagonal(torch.tensor([50.0]), torch.tensor(1.0)))
        >>> tx, p = bc.links.add_gaussian_prior(prior, n=100), torch.tensor([3.0])
        >>> tx.update(torch.zeros(1), tx.init(p), params=p, inplace=False)[0]
        tensor([1.])
        >>> bc.links.add_gaussian_prior(50.0, n=100) == bc.links.add_decayed_weights(0.5)
        True
    """
    checks.POSITIVE("add_gaussian_prior: n", n)
    n = float(n)
    if hasattr(prior, "mean") and hasattr(prior, "precision"):
        return Chain((_of_gaussian(prior, n),))
    # The link of weight decay, so that both chains compare equal and are fused alike.
    if isinstance(prior, (int, float)):
        checks.NOT_NEGATIVE("add_gaussian_prior: prior", prior)
        return Chain((AddDecayedWeights(float(prior) / n, is_prior=True),)) if prior else Chain(())
    wanted = checks.NUMBERS._replace(words="a precision (a number, or a tree of numbers and tensors) or a Gaussian")
    wanted("add_gaussian_prior: prior", prior)
    return Chain((AddDiagonalPrior(n, 0.0, prior),))


def _of_gaussian(prior: Any, n: float) -> Prior:
    """Make the link for a Gaussian prior, the elementwise one if its precision is diagonal."""
    precision: Any = prior.precision
    if not isinstance(precision, Precision):
        raise TypeError(
            f"add_gaussian_prior: the prior's precision is {type(precision).__name__}, not one of bayesopt_chain.precision"
        )
    known: list[Tensor] = [*optree.tree_leaves(prior.mean), *optree.tree_leaves(precision.diag())]
    if not all(bool(x.isfinite().all()) for x in known):
        raise ValueError("add_gaussian_prior: the prior's mean or precision has NaN or infinite entries")
    # The update multiplies by the precision and never solves with it, so that it needs no factorised form.
    precision = precision.unfactorised() if isinstance(precision, Woodbury) else precision
    if isinstance(precision, Diagonal):
        return AddDiagonalPrior(n, prior.mean, precision.values)
    return AddGaussianPrior(n, copied(prior.mean), precision)
