r"""One Gaussian over a parameter tree, so that Laplace, variational and Kalman posteriors are used alike.

theta ~ N(mean, Lambda^-1),     log N = -1/2 (theta - mean)^T Lambda (theta - mean) + 1/2 log |Lambda| - P/2 log 2 pi

log Z = log p(D, mean) + P/2 log 2 pi - 1/2 log |Lambda|        (Laplace's approximation of the evidence; MacKay, 1992)

With another Gaussian as the prior, such as the posterior of the last task, its precision is one more increment,

    Lambda = sum of the increments + Lambda_prior,    log p(params) = log N(params; prior mean, Lambda_prior^-1).

Kronecker factors add as sums over data, ``(L + L') (x) (R + R') / (n + n')`` (Ritter, Botev and Barber, 2018); the Gaussian
therefore keeps the factors beside their decomposition. A root takes up the rows of a low-rank prior exactly.

What the transformations that carry a posterior share: they find their state in that of a chain, and refuse bad values.

Their states are NamedTuples of tensors, with one tensor for each parameter that is present, in optree order.

The states in which a posterior accumulates (Laplace, SWAG, the filters) are values: ``update`` makes a new one and never
writes into the one it was given: ``inplace`` concerns the buffers of the gradients alone. A state that the user kept stays what
it was. The states of variational inference are an optimizer's, and ``inplace=True`` overwrites them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain._torch import is_dtensor, like, local, whole
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import Link
from bayesopt_chain.core.op import Leaves
from bayesopt_chain.core.state import State
from bayesopt_chain.distributed import shards
from bayesopt_chain.links.gaussian_prior import Prior
from bayesopt_chain.matching.response import Linear, Nonlinear
from bayesopt_chain.precision import Eigenbasis, Kronecker, LowRank, Precision, Root, Woodbury
from bayesopt_chain.random.stream import Variables, leaf_numbers, new_key
from bayesopt_chain.tracing import is_hidden, is_readable
from bayesopt_chain.trees import Tree, copied, paths, require_like, size, spread

Kind = TypeVar("Kind", bound=tuple[Any, ...])


class PosteriorTransformation(Chain):
    """A chain of one link. Its methods take the state of that link, or of a chain that the link is a part of."""

    @property
    def _link(self) -> Any:
        return self.links[0]

    def _state(self, state: Any) -> Any:
        return find(state, self._link.state, str(self._link))


def find(state: Any, kind: type[Kind], maker: str) -> Kind:
    """The one state of class ``kind`` in a state: of a chain, of TorchOpt's too, or of a wrapper around one."""
    leaves: list[Any] = optree.tree_leaves(state, is_leaf=lambda x: isinstance(x, kind))
    found = [x for x in leaves if isinstance(x, kind)]
    if len(found) != 1:
        raise ValueError(
            f"state holds {len(found)} states of {maker}, not one: pass what init of this transformation, or of a chain "
            "with it, returned"
        )
    return found[0]


def names_in(state: Any, entry: Any) -> list[str]:
    """The paths of the leaves that the link with this entry acts on; empty for an entry that stands alone."""
    if not isinstance(state, State):
        return []
    where = next((where for mine, where in zip(state, state.layout.where) if mine is entry), ())
    return [state.layout.paths[j] for j in where]


def require_these(shapes: list | int, params: Any, who: str) -> None:
    """Refuse parameters of other shapes, or of another total size, than a state was made for."""
    leaves = optree.tree_leaves(params)
    mine: Any = [tuple(p.shape) for p in leaves]
    wanted: Any = shapes
    if isinstance(shapes, int):
        mine = sum(p.numel() for p in leaves)
    else:
        wanted = [tuple(s) for s in shapes]
    if mine != wanted:
        raise ValueError(
            f"{who}: the state is over parameters of {wanted}, params has {mine}: pass the tree that init was given "
            "(behind a mask, the leaves it selects)"
        )


class Alone:
    """A link that moves a Gaussian: links beside it would change its mean, and its covariance would not follow.

    Links that pass gradients on stay, and so does clipping in front, which a sampler may have there too.
    """

    name: str
    instead: ClassVar[str]  # what to use in the place of links beside it

    def require_around(self, before: Sequence[Link], behind: Sequence[Link]) -> None:
        for where, links in (("before", before), ("behind", behind)):
            for link in links:
                is_prior, may_stand = (
                    isinstance(link, Prior),
                    where == "before" and isinstance(link.response, Nonlinear),
                )
                if is_prior or not (link.response == Linear() or may_stand):
                    raise ValueError(
                        f"{self.name}: {link.shown} {where} it would change the mean, and the covariance would not follow; "
                        f"{self.instead}"
                    )


def require_values(tree: Any, wanted: Any, what: str, where: str) -> None:
    """Refuse a tree that does not hold the values of another, by the leaf's name; inside a transform nothing is compared."""
    require_like(tree, wanted, what)
    for name, leaf, other in zip(paths(wanted), optree.tree_leaves(tree), optree.tree_leaves(wanted)):
        if not (is_hidden(leaf) or is_hidden(other) or torch.equal(leaf.detach(), other.detach().to(leaf))):
            raise ValueError(
                f"{what} at {name} differ from {where} (by up to {(leaf - other).abs().max().item():.3g}): start there"
            )


def require_finite(tree: Any, what: str) -> None:
    """Refuse a tree that holds NaN or infinities, by the leaf's name; inside a transform nothing can be checked."""
    for name, leaf in zip(paths(tree), optree.tree_leaves(tree)):
        # zero times NaN or infinity is NaN, so that this sum shows it, several times faster than a mask
        if is_hidden(leaf) or not bool(whole((leaf.detach() * 0).sum()).isnan()):
            continue
        kind = "NaN" if bool(leaf.isnan().any()) else "infinite"
        raise ValueError(
            f"{what} is {kind} at {name} ({int((~leaf.isfinite()).sum())} of {leaf.numel()} entries): a batch, a gradient, a "
            "curvature or a hyperparameter that is not finite went into it; go back to a state from before that"
        )


def require_numbers(values: Sequence[Tensor], params: Any, what: str, *, zero: bool = False) -> None:
    """Refuse a leaf's numbers unless all are finite and positive, or ``zero``, by its name; hidden ones pass."""
    for path, v in zip(paths(params), values):
        if not is_hidden(v) and not bool((v.isfinite() & ((v >= 0) if zero else (v > 0))).all()):
            wrong, wanted = ("negative or not finite", "of at least 0") if zero else ("not positive", "above 0")
            raise ValueError(
                f"{what} is {wrong} at {path} (smallest entry {v.min().item():.3g}): pass finite numbers {wanted}"
            )


def warn_of_rounding(what: str, names: Sequence[str], means: Leaves, moves: Leaves) -> None:
    """Warn of a 16-bit leaf most of whose entries stay at their mean, although ``what`` is to move them by ``moves``."""
    for name, mean, move in zip(names, means, moves):
        if mean.dtype not in (torch.bfloat16, torch.float16) or not is_readable(mean):
            continue
        if 2 * int((((mean + move).to(mean.dtype) == mean) & (move != 0)).sum()) > move.numel():
            checks.warn(
                f"{what}: most entries of {name} in {mean.dtype} round to their mean and stay there, so that the posterior is "
                "not that of the data; keep float32 parameters and use autocast"
            )


def times(x: Tensor, factor: float | Tensor) -> Tensor:
    """``x`` times a number or a 0-d tensor, in the dtype of ``x`` also where that is 0-d too."""
    return x * (factor.to(x.dtype) if torch.is_tensor(factor) else factor)


def device_of(leaves: Sequence[Tensor]) -> torch.device:
    """Where the first leaf is."""
    return leaves[0].device if leaves else torch.device("cpu")


_SHAPE = checks.Kind(
    lambda x: isinstance(x, (tuple, list)) and all(checks.whole(0).fits(n) for n in x), "a tuple of whole numbers"
)


class Gaussian(NamedTuple):
    """A Gaussian posterior over a tree of P parameters.

    Attributes:
        mean: a tree like the parameters.
        precision: any structure of :mod:`bayesopt_chain.precision` over that tree. :meth:`factorised` decomposes it once;
            do so when asking more than one question.
        undecomposed: the precision as it was summed, where its decomposition can take up no further data (Kronecker
            factors); ``()`` otherwise. ``bc.laplace().posterior(prior=)`` reads it.

    Example:
        >>> import torch
        >>> from bayesopt_chain.posterior.gaussian import Gaussian
        >>> from bayesopt_chain.precision import Diagonal
        >>> posterior = Gaussian({"w": torch.zeros(2)}, Diagonal({"w": torch.tensor([1.0, 4.0])}, torch.tensor(1.0)))
        >>> posterior.marginal_variance
        {'w': tensor([1.0000, 0.2500])}
        >>> posterior.sample((100,), generator=torch.Generator().manual_seed(0))["w"].shape
        torch.Size([100, 2])
    """

    mean: Tree
    precision: Precision
    undecomposed: Precision | tuple[()] = ()

    def factorised(self) -> Gaussian:
        """Decompose the precision, so that several questions pay for it once.

        Returns:
            The same Gaussian.

        Raises:
            ValueError: a mean or precision with NaN or infinities, a precision that is not positive definite; each names
                the parameter.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> from bayesopt_chain.precision import Dense
            >>> matrix = torch.tensor([[4.0, 0.0], [0.0, 9.0]])
            >>> q = bc.Gaussian(torch.zeros(2), Dense(matrix, torch.zeros(2), torch.tensor(1.0)))
            >>> type(q.factorised().precision).__name__
            'Cholesky'
        """
        require_finite(self.mean, "the posterior's mean")
        require_finite(self.precision.entries(), "the posterior's precision")
        return self._replace(precision=self.precision.factorised())

    @checks.takes(shape=_SHAPE)
    def sample(self, shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None) -> Tree:
        """Independent draws.

        Args:
            shape: of the draws. Default: one.
            generator: source of randomness. Default: torch's global generator.

        Returns:
            A tree of leaves ``[*shape, *leaf.shape]``, with the dtype and device of the mean's. Of a mean of DTensors each rank
            draws its own elements, from the first rank's key: the draw does not depend on how the leaves are laid out.

        Raises:
            ValueError: a precision that is not positive definite.
        """
        precision = self.precision.factorised()
        noise = white(self.mean, shape, generator)
        return optree.tree_map(torch.add, precision.sqrt_solve(noise), self.mean)

    @checks.takes(tree=checks.TREE)
    def log_prob(self, tree: Tree) -> Tensor:
        """The normalised log density, in nats.

        Args:
            tree: like the mean, or a batch of such trees, leaves ``[*lead, *leaf.shape]``.

        Returns:
            ``[*lead]``.

        Raises:
            ValueError: a tree unlike the mean, or a precision that is not positive definite.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> from bayesopt_chain.precision import Diagonal
            >>> q = bc.Gaussian(torch.zeros(1), Diagonal(torch.tensor([4.0]), torch.tensor(1.0)))
            >>> q.log_prob(torch.tensor([0.5])), torch.distributions.Normal(0.0, 0.5).log_prob(torch.tensor(0.5))
            (tensor(-0.7258), tensor(-0.7258))
        """
        require_like(tree, self.mean, "the tree", batched=True)
        precision = self.precision.factorised()
        centred = optree.tree_map(torch.sub, tree, self.mean)
        normaliser = whole(precision.logdet()) - size(self.mean) * math.log(2 * math.pi)
        return 0.5 * (normaliser - whole(precision.quad(centred)))

    @property
    def marginal_variance(self) -> Tree:
        """The diagonal of the covariance, a tree like the mean."""
        return self.precision.factorised().inverse_diag()

    @checks.takes(log_joint=checks.SCALAR)
    def log_evidence(self, log_joint: float | Tensor) -> Tensor:
        """Laplace's approximation of the log evidence, in nats, for a Bayesian posterior (``temperature=None``).

        Args:
            log_joint: the *normalised* log p(data, mean), a number or a 0-d tensor.

        Returns:
            0-d, differentiable in whatever the precision and ``log_joint`` depend on.

        Raises:
            ValueError: a precision that is not positive definite.

        Example:
            >>> import math, torch, bayesopt_chain as bc
            >>> from bayesopt_chain.precision import Diagonal
            >>> q = bc.Gaussian(torch.zeros(1), Diagonal(torch.tensor([2 * math.pi]), torch.tensor(1.0)))
            >>> q.log_evidence(-1.0)  # the volume under exp(-1 - pi x^2)
            tensor(-1.)
        """
        return log_joint + 0.5 * (size(self.mean) * math.log(2 * math.pi) - whole(self.precision.logdet()))


def posterior_of(
    data: Any,
    params: Tree,
    *,
    prior_precision: Any = None,
    prior: Gaussian | None = None,
    temperature: float | None = None,
    likelihood_scale: float | Tensor = 1.0,
) -> Gaussian:
    """The Gaussian posterior around ``params`` from the precision ``data`` of the data alone.

    Arguments and errors are those of ``posterior`` of what :func:`bayesopt_chain.laplace` returns.
    """
    if (prior is None) == (prior_precision is None):
        raise ValueError("pass one of prior_precision= (0.0 for none) and prior= (a Gaussian)")
    entries = data.entries()
    shapes = data.like if isinstance(data, Eigenbasis) else entries
    require_finite(entries, "laplace: the accumulated curvature")
    require_like(params, shapes, "params")
    checks.number("(0, inf)", tensor=True)("laplace: likelihood_scale", likelihood_scale)
    count = data.count
    if not (isinstance(likelihood_scale, (int, float)) and likelihood_scale == 1):
        data = data.scale(likelihood_scale)
    if prior is None:
        numbers = spread(prior_precision, params, "prior_precision")
        require_numbers(numbers, params, "laplace: prior_precision", zero=True)
        precision = data.add_diagonal(prior_precision)
    else:
        precision = with_prior(data, prior)
    if temperature is not None:
        checks.POSITIVE("laplace: temperature", temperature)
        precision = precision.scale(1 / (temperature * count))
    # Kronecker factors can no longer be added to once they are decomposed, so that they are kept beside.
    undecomposed = precision if isinstance(precision, Kronecker) else ()
    return Gaussian(copied(params), precision, undecomposed).factorised()


def with_prior(data: Any, prior: Gaussian) -> Any:
    """The sum of the data's precision and a Gaussian prior's, in the data's structure.

    Rows of a root are kept, all of them: a root and a low-rank prior make a low-rank precision of both their rows. Kronecker
    factors need the prior's, from before it was decomposed.
    """
    other: Any = prior.undecomposed if isinstance(prior.undecomposed, Precision) else prior.precision
    other = other.unfactorised() if isinstance(other, Woodbury) else other
    if isinstance(data, Root) and isinstance(other, LowRank):
        return data.add(Root(other.rows, other.count)).add_diagonal(other.diagonal)
    if isinstance(data, Kronecker) and not isinstance(other, Kronecker):
        raise TypeError(
            f"laplace: prior has the structure {type(other).__name__}, the state Kronecker: pass a posterior that laplace made "
            "from increments of structure='kronecker' (it keeps the factors as undecomposed), or prior_precision="
        )
    total: Any = data
    return total.add(other)  # which refuses another structure


def log_prior(params: Tree, prior_precision: Any, prior_mean: Any = 0.0) -> Tensor:
    """The normalised log density of params under independent Gaussians, 0-d, in nats.

    Args:
        params: a tree.
        prior_precision: a number, a 0-d tensor or a tree that broadcasts to the params. One that is not positive gives -inf
            or nan.
        prior_mean: likewise. Default 0.

    Returns:
        0-d, differentiable in all three.

    Raises:
        ValueError: a tree that does not broadcast to the params.

    Example:
        >>> import torch
        >>> from bayesopt_chain.posterior.gaussian import log_prior
        >>> log_prior(torch.ones(2), 1.0)
        tensor(-2.8379)
    """
    total: Any = 0
    precisions, means = spread(prior_precision, params, "prior_precision"), spread(prior_mean, params, "prior_mean")
    for leaf, precision, mean in zip(optree.tree_leaves(params), precisions, means):
        normaliser = whole((precision / (2 * math.pi)).log().expand(leaf.shape).sum())
        total = total + 0.5 * (normaliser - whole((precision * (leaf - mean).square()).sum()))
    return total


def standard_normals(
    key: Tensor,
    count: Tensor,
    templates: Sequence[Tensor],
    names: Sequence[str],
    samples: int,
    antithetic: bool = False,
    whole: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """``[samples, *template.shape]`` for each template; antithetic draws come as ``(z, -z)``.

    ``names`` tell the templates from each other: the paths of leaves, or other words.
    ``whole`` are the leaves that the templates are of, where some are DTensors, of which ranks hold parts.
    """
    drawn = samples // 2 if antithetic else samples
    shapes = [t.new_empty(()).expand(1, drawn, *t.shape) for t in templates]
    runs = None if whole is None else tuple([shards.repeated(x, drawn) if is_dtensor(x) else None for x in whole])
    variables = Variables(leaf_numbers(tuple(names)), runs=runs)
    noise = [z for (z,) in variables.draw(key, count, shapes)]
    return tuple(torch.cat([z, -z]) for z in noise) if antithetic else tuple(noise)


def spread_like(leaves: Sequence[Tensor], drawn: Sequence[Tensor], axes: int) -> list[Tensor]:
    """Draws with ``axes`` further axes in front, as DTensors where the leaves are."""
    return [like(x, z, axes) for x, z in zip(leaves, drawn)]


def white(mean: Tree, shape: tuple[int, ...], generator: torch.Generator | None) -> Tree:
    """Standard normals ``[*shape, *leaf.shape]`` for every leaf."""
    leaves, structure = optree.tree_flatten(mean)
    if not any(map(is_dtensor, leaves)):
        noise = [torch.randn((*shape, *x.shape), dtype=x.dtype, device=x.device, generator=generator) for x in leaves]
        return structure.unflatten(noise)
    here = [local(x) for x in leaves]
    key = shards.agreed_key(new_key(generator, here[0].device), leaves)
    noise = standard_normals(key, torch.zeros_like(key), here, paths(mean), math.prod(shape), whole=leaves)
    drawn = [z.reshape(*shape, *x.shape) for z, x in zip(noise, here)]
    return structure.unflatten(spread_like(leaves, drawn, len(shape)))
