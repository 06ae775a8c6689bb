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

**Laplace's approximation**: the curvature summed over the data makes a Gaussian posterior around the trained parameters,

    Lambda = sum of the increments + prior,    theta ~ N(params, Lambda^-1).

The transformation passes its updates through and adds up ``curvature=<increment>`` (see :mod:`bayesopt_chain.curvature`).
The increments are sums over data in nats, so that any split of the data into batches gives the same posterior, except in the
low-rank structure (see :func:`laplace`); each datum is to be counted once, at the final parameters: run one pass over the
data after training.

Another temperature than Bayes' 1 / N divides the whole precision by T N: ``exp(-loss / T)`` for the mean loss per datum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain._torch import is_dtensor, like, local, whole
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import Link, LinkContext, Traits
from bayesopt_chain.core.op import Leaves, TensorOps
from bayesopt_chain.core.state import State
from bayesopt_chain.distributed import shards
from bayesopt_chain.links.gaussian_prior import Prior
from bayesopt_chain.matching.response import Linear, Nonlinear
from bayesopt_chain.precision import Diagonal, Eigenbasis, Kronecker, LowRank, Precision, Root, Woodbury, Zero
from bayesopt_chain.random.stream import Variables, leaf_numbers, new_key
from bayesopt_chain.tracing import is_hidden, is_readable
from bayesopt_chain.trees import Tree, copied, paths, paths_of, require_like, size, spread, wide

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
    wanted: Any = shapes if isinstance(shapes, int) else [tuple(s) for s in shapes]
    mine: Any = size(params) if isinstance(shapes, int) else [tuple(p.shape) for p in optree.tree_leaves(params)]
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


def over_prior(prior: Gaussian, leaves: Leaves, context: LinkContext) -> Tree:
    """A link's leaves as a tree for its prior: behind a mask a prior is over the leaves that the mask selects, alone."""
    if paths_of(prior.mean) == context.paths:
        return optree.tree_unflatten(optree.tree_structure(prior.mean), leaves)
    return context.tree(leaves)


def require_finite(tree: Any, what: str) -> None:
    """Refuse a tree that holds NaN or infinities, by the leaf's name; inside a transform nothing can be checked."""
    for name, leaf in zip(paths(tree), optree.tree_leaves(tree)):
        # no sum is finite where an entry is not, and it takes a fraction of the time of a look at every one
        if is_hidden(leaf) or bool(whole(leaf.detach().sum()).isfinite()) or bool(leaf.isfinite().all()):
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

    @checks.takes(
        shape=checks.Kind(
            lambda x: isinstance(x, (tuple, list)) and all(checks.whole(0).fits(n) for n in x),
            "a tuple of whole numbers",
        )
    )
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
    require_finite(entries, "laplace: the accumulated curvature")
    require_like(params, data.like if isinstance(data, Eigenbasis) else entries, "params")
    checks.number("(0, inf)", tensor=True)("laplace: likelihood_scale", likelihood_scale)
    count = data.count
    if not (isinstance(likelihood_scale, (int, float)) and likelihood_scale == 1):
        data = data.scale(likelihood_scale)
    if prior is None:
        require_numbers(
            spread(prior_precision, params, "prior_precision"), params, "laplace: prior_precision", zero=True
        )
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
        leaf = leaf.to(wide(leaf.dtype))  # squares of float16 end at 65,504
        normaliser = whole((precision / (2 * math.pi)).log().expand(leaf.shape).sum())
        total = total + 0.5 * (normaliser - whole((precision * (leaf - mean).square()).sum()))
    return total


class LaplaceState(NamedTuple):
    """What :func:`laplace` remembers.

    Attributes:
        precision: the sum of the increments so far; ``Zero`` before the first.
    """

    precision: Any


def _require_fit_for_shards(increment: Any, context: LinkContext) -> None:
    """Refuse an increment that couples elements, or lies otherwise than the parameters, where ranks hold parts of them."""
    if not isinstance(increment, Diagonal):
        raise ValueError(
            f"laplace: the parameters are DTensors, of which each rank has a part, and curvature is of structure "
            f"{type(increment).__name__}, which couples their elements: take a diagonal one "
            "(bc.curvature.diagonal_by_backward), or the posterior of a part of the model whose leaves are whole"
        )
    context.leaves(increment.values)  # which refuses other layouts


@dataclass(frozen=True)
class Accumulate(Link):
    """The link behind :func:`laplace`."""

    # gradients pass through
    name = "laplace"
    traits = Traits(on_shards="tree", all_leaves=True, response=Linear(), extra_kwargs=frozenset({"curvature"}))
    state = LaplaceState

    def init(self, leaves: Leaves, context: LinkContext) -> LaplaceState:
        checks.with_values("laplace", "params", leaves, context.paths)
        device = leaves[0].device if leaves else None
        return LaplaceState(Zero(torch.zeros((), dtype=torch.float64, device=device)))

    def update(
        self, g: Leaves, state: LaplaceState, op: TensorOps, context: LinkContext
    ) -> tuple[Leaves, LaplaceState]:
        increment = context.extra.get("curvature")
        if increment is None:
            return g, state
        if context.scope.shards is not None:
            _require_fit_for_shards(increment, context)
        if not isinstance(increment, Precision):
            raise TypeError(
                f"curvature is a {type(increment).__name__}: pass what an estimator of bayesopt_chain.curvature returns"
            )
        return g, LaplaceState(state.precision.add(increment))


class Laplace(PosteriorTransformation):
    """What :func:`laplace` returns: a transformation whose state, alone or within a chain's, makes a posterior."""

    @checks.takes(
        params=checks.PARAMS, prior_precision=checks.ANY, prior=checks.POSTERIOR, likelihood_scale=checks.SCALAR
    )
    def posterior(
        self,
        state: Any,
        params: Tree,
        *,
        prior_precision: Any = None,
        prior: Gaussian | None = None,
        temperature: float | None = None,
        likelihood_scale: float | Tensor = 1.0,
    ) -> Gaussian:
        """The Gaussian posterior around ``params``.

        Args:
            state: this link's state, or that of a chain with this link in it.
            params: the mean: the tree whose curvature was accumulated (a subset's, if it was a subset's).
            prior_precision: of a zero-mean Gaussian prior, per parameter, not per datum: a number (0 for none), a 0-d tensor
                or a tree that broadcasts to the params. Kronecker structures take one number for each parameter tensor.
            prior: a Gaussian prior instead, such as the posterior of the last task: of the structure that the state has.
                It counts as that many data more.
            temperature: None, the default, means Bayes; a number is per datum, as everywhere: the covariance times
                ``temperature * N``.
            likelihood_scale: multiplies the data's part: ``1 / variance`` for increments of ``gaussian(variance=1.0)``.
                Default 1.

        Returns:
            A :class:`Gaussian` whose precision is decomposed; differentiable in ``prior_precision`` and
            ``likelihood_scale``.

        Raises:
            ValueError: no curvature has been accumulated; both priors or neither is given; numbers out of range; NaN in the
                curvature or the params; a precision that is singular; a tree that is not the increments'. The last three
                name the parameter.
            TypeError: a prior of another structure than the state's.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> params, batch = torch.zeros(1, 1), (torch.full((4, 1), 2.0), torch.zeros(4, 1))
            >>> estimate = bc.curvature.ggn(lambda params, batch: batch[0] @ params, bc.likelihoods.gaussian(), "dense")
            >>> tx = bc.laplace()
            >>> _, state = tx.update(torch.zeros(1, 1), tx.init(params), curvature=estimate(params, batch))
            >>> posterior = tx.posterior(state, params, prior_precision=4.0)
            >>> posterior.marginal_variance
            tensor([[0.0500]])
            >>> tx.posterior(state, params, prior=posterior).marginal_variance  # the same data once more
            tensor([[0.0278]])
        """
        data = self._state(state).precision
        if isinstance(data, Zero):
            raise ValueError(
                "laplace: no curvature has been accumulated, so that the state knows nothing of the data: call "
                "update(..., curvature=estimate(params, batch)) on it first (make_step does, given curvature=)"
            )
        return posterior_of(
            data,
            params,
            prior_precision=prior_precision,
            prior=prior,
            temperature=temperature,
            likelihood_scale=likelihood_scale,
        )

    @checks.takes(
        params=checks.PARAMS,
        log_likelihood=checks.SCALAR,
        prior_precision=checks.ANY,
        prior=checks.POSTERIOR,
        prior_mean=checks.ANY,
        likelihood_scale=checks.SCALAR,
    )
    def log_evidence(
        self,
        state: Any,
        params: Tree,
        log_likelihood: float | Tensor,
        *,
        prior_precision: Any = None,
        prior: Gaussian | None = None,
        prior_mean: Any = 0.0,
        likelihood_scale: float | Tensor = 1.0,
    ) -> Tensor:
        """Laplace's log marginal likelihood, in nats.

        Args:
            state: as for :meth:`posterior`.
            params: as for :meth:`posterior`.
            log_likelihood: summed, normalised log p(D | params): minus the sum of ``likelihood.nll`` over the data. With
                ``likelihood_scale`` it has to be that of the scaled likelihood.
            prior_precision: as for :meth:`posterior`; the prior has to be proper, hence positive.
            prior: a Gaussian prior instead.
            prior_mean: of the prior with ``prior_precision``: a number or a tree. Default 0.
            likelihood_scale: as for :meth:`posterior`.

        Returns:
            0-d, differentiable in ``prior_precision``, ``likelihood_scale`` and what ``log_likelihood`` depends on.

        Raises:
            ValueError, TypeError: as :meth:`posterior`.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> from bayesopt_chain.precision import Diagonal
            >>> tx, params = bc.laplace(), torch.zeros(2)
            >>> one_datum = Diagonal(torch.tensor([3.0, 0.0]), torch.tensor(1.0))
            >>> _, state = tx.update(params, tx.init(params), curvature=one_datum)
            >>> tx.log_evidence(state, params, -1.0, prior_precision=1.0)  # -1 - log(4) / 2
            tensor(-1.6931)
        """
        posterior = self.posterior(
            state, params, prior_precision=prior_precision, prior=prior, likelihood_scale=likelihood_scale
        )
        if prior is None:
            return posterior.log_evidence(log_likelihood + log_prior(params, prior_precision, prior_mean))
        return posterior.log_evidence(log_likelihood + prior.log_prob(params))


def laplace() -> Laplace:
    """Accumulate curvature into a Gaussian posterior; updates pass through.

    ``update(updates, state, *, params=None, inplace=True, curvature=None)`` adds an increment of
    :mod:`bayesopt_chain.curvature` to the state; without one the state stays. All increments of a state have one structure
    over one tree, which the first decides. In a chain the link may stand anywhere.

    The state is a value: ``update`` returns a new one and leaves the one it was given as it was. ``inplace=True``, TorchOpt's
    default, concerns the gradients' buffers alone.

    Carrying one state on from task to task is online Laplace: the last posterior is the next prior, also for Kronecker
    factors, which add as sums over data (Ritter, Botev and Barber, 2018); ``posterior(prior=)`` does it from a stored
    posterior.

    The low-rank structure alone depends on how the data were split into batches: what exceeds its rank moves to the diagonal
    batch by batch, and the marginal variances of many small batches come out somewhat smaller. Take a rank well above the
    number of directions that the data determine, or another structure.

    Returns:
        A link with the methods ``posterior`` and ``log_evidence``.

    Raises:
        TypeError: at ``update``, an increment of another structure than the state's, or something else.
        ValueError: at ``update``, an increment over another tree (names the leaf).

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> from bayesopt_chain.precision import Diagonal
        >>> tx, params = bc.laplace(), {"w": torch.zeros(2)}
        >>> state = tx.init(params)
        >>> for _ in range(3):
        ...     increment = Diagonal({"w": torch.ones(2)}, torch.tensor(10.0))
        ...     updates, state = tx.update(params, state, curvature=increment)
        >>> tx.posterior(state, params, prior_precision=1.0).marginal_variance
        {'w': tensor([0.2500, 0.2500])}
    """
    return Laplace((Accumulate(),))


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
    return structure.unflatten([like(x, z, len(shape)) for x, z in zip(leaves, drawn)])
