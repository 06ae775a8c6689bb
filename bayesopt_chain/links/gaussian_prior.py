r"""A Gaussian prior as a link: ``u + Lambda (theta - m) / N``, the gradient of ``-log N(theta; m, Lambda^-1) / N``.

With the loss a mean over N data, ``loss - log prior / N`` is the negative log posterior per datum, and what is sampled at
temperature ``1 / N`` is the posterior under this prior, exactly for quadratic losses. A number ``lambda`` is weight decay of
``lambda / N``. With the posterior of the last task for a prior, learning task after task is a chain: for models that are
linear with Gaussian noise, ``Lambda_k = Lambda_(k-1) + X_k^T X_k / sigma^2`` and its mean are those of all data together.

With ``scale="fan_in"`` the precision of a weight is ``lambda f``, ``f`` the number of inputs that a unit adds up:
then a unit whose
inputs are of size one has a sum of variance ``1 / lambda`` whatever its width, where ``N(0, 1 / lambda)`` on each
weight gives it
``f / lambda`` (Neal, 1996). A leaf of shape ``[out, ...]`` has ``f = numel / out``.

The prior belongs to the loss, so it stands in front of everything that changes what gradients mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import optree
import torch
from torch import Tensor, nn

from bayesopt_chain import checks
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import Link, LinkContext, Traits
from bayesopt_chain.core.op import Leaves, TensorOps
from bayesopt_chain.links.weight_decay import add_decayed_weights
from bayesopt_chain.matching.response import Linear, Preconditioner, Rate, Refused, Response, SelfContainedSampler
from bayesopt_chain.precision import Diagonal, Precision, Woodbury
from bayesopt_chain.trees import flattened, paths_of

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@runtime_checkable
class HasPrecision(Protocol):
    """A Gaussian: what every posterior of this library is."""

    @property
    def mean(self) -> Any:
        """A tree like the parameters."""
        ...

    @property
    def precision(self) -> Precision:
        """Over that tree."""
        ...


class PriorState(NamedTuple):
    """Of a prior without correlations: mean and precision of each leaf."""

    mean: tuple[Tensor, ...]
    precision: tuple[Tensor, ...]


@dataclass(frozen=True)
class Prior(Link):
    """What both links share: the data count, and where they may stand."""

    n: float
    mean: Any = field(hash=False)
    precision: Any = field(hash=False)
    traits = Traits(on_shards="elementwise", needs_params=True)

    @property
    def response(self) -> Response:
        return Linear()  # the prior is a part of the loss

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Prior):
            return NotImplemented
        same = type(self) is type(other) and type(self.precision) is type(other.precision)
        same = same and self.n == other.n and self.masks == other.masks
        return same and _alike(self.mean, other.mean) and _alike(self.precision, other.precision)

    __hash__ = Link.__hash__

    def require_first(self, context: LinkContext) -> None:
        """Refuse a place behind anything that changes what a gradient is.

        Raises:
            ValueError: naming the link in front.
        """
        for link in context.scope.before:
            response = link.response
            changes = isinstance(response, (Preconditioner, Rate, SelfContainedSampler, Refused))
            if changes or (isinstance(response, Linear) and response != Linear()):
                raise ValueError(
                    f"add_gaussian_prior: {link.shown} stands before it, so that another prior than this would act; write "
                    "add_gaussian_prior first"
                )


@dataclass(frozen=True)
class AddDiagonalPrior(Prior):
    """The link behind :func:`add_gaussian_prior` for a prior without correlations."""

    __eq__ = Prior.__eq__
    __hash__ = Link.__hash__

    def init(self, leaves: Leaves, context: LinkContext) -> PriorState:
        self.require_first(context)
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
        pull = [(p - m) * d for p, m, d in zip(_params(context, op), *state)]
        return op.add(g, pull, alpha=1 / self.n), state

    def __str__(self) -> str:
        return f"add_gaussian_prior(..., n={self.n:g})"


@dataclass(frozen=True)
class AddFanInPrior(Prior):
    """The link behind :func:`add_gaussian_prior` with ``scale="fan_in"``: one precision for each leaf."""

    traits = Traits(
        needs_params=True,
        refusal_hint="; the number of inputs of a unit is not that of its part: give the precisions as a tree",
    )
    __eq__ = Prior.__eq__
    __hash__ = Link.__hash__

    def init(self, leaves: Leaves, context: LinkContext) -> PriorState:
        self.require_first(context)
        fans = [float(leaf.numel() // leaf.shape[0]) if leaf.ndim > 1 and leaf.numel() else 1.0 for leaf in leaves]
        mean = tuple([leaf.new_zeros(()) for leaf in leaves])
        return PriorState(mean, tuple([leaf.new_full((), self.precision * fan) for leaf, fan in zip(leaves, fans)]))

    def update(self, g: Leaves, state: PriorState, op: TensorOps, context: LinkContext) -> tuple[Leaves, PriorState]:
        pull = [p * d for p, d in zip(_params(context, op), state.precision)]
        return op.add(g, pull, alpha=1 / self.n), state

    def __str__(self) -> str:
        return f"add_gaussian_prior({self.precision:g}, n={self.n:g}, scale='fan_in')"


@dataclass(frozen=True)
class AddGaussianPrior(Prior):
    """The link behind :func:`add_gaussian_prior` for a Gaussian, which may couple all parameters."""

    traits = Traits(
        needs_params=True,
        checks_gradients=True,
        needs_all_gradients=True,
        refusal_hint="; a prior without correlations takes it",
    )
    __eq__ = Prior.__eq__
    __hash__ = Link.__hash__

    def init(self, leaves: Leaves, context: LinkContext) -> Any:
        self.require_first(context)
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
        moved = structure.unflatten([p - m for p, m in zip(_params(context, op), mean)])
        pull = [y.to(x.dtype) for x, y in zip(g, optree.tree_leaves(self.precision.times(moved)))]
        return op.add(g, pull, alpha=1 / self.n), state

    def __str__(self) -> str:
        return f"add_gaussian_prior({type(self.precision).__name__}, n={self.n:g})"


def _alike(mine: Any, theirs: Any) -> bool:
    (a, spec_a), (b, spec_b) = flattened(mine), flattened(theirs)
    return spec_a == spec_b and all(torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for x, y in zip(a, b))


def _params(context: LinkContext, op: TensorOps) -> list[Tensor]:
    return [p.detach() if op.inplace and p.requires_grad else p for p in context.params]


def fan_in(module: nn.Module) -> dict[str, float]:
    """Count, for each parameter of a module, the inputs that a unit adds up: what a prior's precision is scaled by.

    ``add_gaussian_prior({name: precision * f for name, f in fan_in(module).items()}, n=N)`` is a prior by name for
    the parameters
    of ``bc.make_functional(module)``; and for ``bc.optim``, whose prior is ``weight_decay = precision / N`` of a group, one
    group for each parameter.

    Args:
        module: any module.

    Returns:
        A number for each name of ``named_parameters()``. Linear layers, convolutions, recurrent layers and
        attention: the product
        of all axes but the first, which is the number of inputs (of a group, times the kernel). Transposed
        convolutions: the inputs
        that reach one output on average, channels of a group times kernel over stride. Embeddings: 1, for one row is
        taken at a time.
        Biases, norms and everything else of one axis or none: 1.

    Raises:
        TypeError: no module.

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
    found: dict[str, float] = {}
    for path, p in module.named_parameters():
        layer, _, name = path.rpartition(".")
        found[path] = _fan_in(module.get_submodule(layer), name, p)
    return found


def _fan_in(layer: nn.Module, name: str, p: Tensor) -> float:
    if p.ndim < 2 or not p.numel() or isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
        return 1.0
    if isinstance(layer, TRANSPOSED) and name == "weight":
        reached = math.prod(k / s for k, s in zip(layer.kernel_size, layer.stride))
        return max(1.0, layer.in_channels / layer.groups * reached)
    return float(p.numel() // p.shape[0])


def add_gaussian_prior(prior: Any, *, n: float, scale: Literal["fan_in"] | None = None) -> Chain:
    """Add the gradient of a Gaussian prior, ``Lambda (params - mean) / n``: the loss then is a posterior's.

    Write it first in a chain, before clipping or behind it. What is sampled at temperature ``1 / n`` is ``likelihood x prior``.
    It is the prior of :func:`bayesopt_chain.links.add_decayed_weights` (``weight_decay = precision / n``) with any mean and any
    precision; where the loss itself has a prior already, both count.

    Learning task after task: take the Laplace posterior of the last task as ``prior=`` here, for the mean, and in
    ``laplace().posterior(state, params, prior=...)``, for the precision. For linear models with Gaussian noise both
    then are those of all data together, up to rounding; elsewhere as good as the Gaussian is.

    Args:
        prior: the precision of a prior around zero, as a number or as a tree of numbers and tensors that broadcast to
            the parameters (or a prefix of their tree); or a Gaussian: the posterior of :func:`bayesopt_chain.laplace`,
            ``swag``, ``vi`` or ``ekf``, or :class:`bayesopt_chain.Gaussian`, with a precision of any structure.
        n: number of data that the loss is a mean over; 1 for a loss that is a sum.
        scale: ``"fan_in"`` multiplies the precision, then a number, by the number of inputs of a unit: by the
            product of all axes but
            the first of each leaf with two axes or more, right for linear layers, convolutions, recurrent layers and
            attention. Leaves
            of one axis or none (biases, norms) keep it. A tree does not say which leaf is an embedding or a
            transposed convolution:
            for those give a tree made with :func:`fan_in`. Default: every element alike.

    Returns:
        A link. Its state holds mean and precision of a prior without correlations; a coupled Gaussian stays in the link.

    Raises:
        TypeError: neither a precision nor a Gaussian.
        ValueError: a precision that is negative or not finite; ``n`` not positive; at ``init``, a tree that does not fit the
            parameters, or a link in front that would change the prior; at ``update``, missing parameters, or a missing gradient
            beside a coupled Gaussian.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> from bayesopt_chain.precision import Diagonal
        >>> prior = bc.Gaussian(torch.tensor([1.0]), Diagonal(torch.tensor([50.0]), torch.tensor(1.0)))
        >>> tx, p = bc.links.add_gaussian_prior(prior, n=100), torch.tensor([3.0])
        >>> tx.update(torch.zeros(1), tx.init(p), params=p, inplace=False)[0]
        tensor([1.])
        >>> bc.links.add_gaussian_prior(50.0, n=100) == bc.links.add_decayed_weights(0.5)
        True
        >>> tx, p = bc.links.add_gaussian_prior(1.0, n=100, scale="fan_in"), torch.ones(2, 50)
        >>> tx.update(torch.zeros(2, 50), tx.init(p), params=p, inplace=False)[0][0, 0]     # 50 / 100
        tensor(0.5000)
    """
    checks.positive("add_gaussian_prior: n", n)
    n = float(n)
    if scale is not None:
        if scale != "fan_in":
            raise ValueError(f"add_gaussian_prior: scale must be 'fan_in' or None, got {scale!r}")
        if isinstance(prior, bool) or not isinstance(prior, Real):
            raise TypeError(
                "add_gaussian_prior: scale='fan_in' takes one precision for all leaves, a number; scale a tree by "
                f"bc.links.fan_in(module) instead, got {checks.short(prior)}"
            )
        checks.number("add_gaussian_prior: prior", prior, "[0, inf)")
        return Chain((AddFanInPrior(n, 0.0, float(prior)),))
    if isinstance(prior, HasPrecision):
        return Chain((_of_gaussian(prior, n),))
    if isinstance(prior, (int, float)):
        checks.number("add_gaussian_prior: prior", prior, "[0, inf)")
        return add_decayed_weights(float(prior) / n)
    for leaf in optree.tree_leaves(prior, none_is_leaf=True):
        real = isinstance(leaf, Tensor) and leaf.is_floating_point()
        if not real and (isinstance(leaf, bool) or not isinstance(leaf, Real)):
            raise TypeError(
                "add_gaussian_prior: prior must be a precision (a number, or a tree of numbers and tensors) or a "
                f"Gaussian, got {checks.short(leaf)}"
            )
    return Chain((AddDiagonalPrior(n, 0.0, prior),))


def _of_gaussian(prior: HasPrecision, n: float) -> Prior:
    precision: Any = prior.precision
    if not isinstance(precision, Precision):
        raise TypeError(
            f"add_gaussian_prior: the prior's precision is {type(precision).__name__}, not one of bayesopt_chain.precision"
        )
    known: list[Tensor] = [*optree.tree_leaves(prior.mean), *optree.tree_leaves(precision.diag())]
    if not all(bool(x.isfinite().all()) for x in known):
        raise ValueError("add_gaussian_prior: the prior's mean or precision has NaN or infinite entries")
    precision = precision.unfactorised() if isinstance(precision, Woodbury) else precision
    if isinstance(precision, Diagonal):
        return AddDiagonalPrior(n, prior.mean, precision.values)
    return AddGaussianPrior(n, prior.mean, precision)
