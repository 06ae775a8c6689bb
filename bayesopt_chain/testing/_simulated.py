r"""Simulation-based calibration: whether a sampler draws from the posterior, asked of data whose parameters are known.

With ``theta ~ p(theta)`` and ``y ~ p(y | theta)``, ``theta`` is itself a draw of ``p(theta | y)``. So among ``L`` independent
draws of a right posterior the rank of any function ``f``,

    r = #{l : f(theta_l, y) < f(theta, y)},

is uniform on ``0, ..., L``, over simulations. A posterior that is too narrow puts the truth at the ends, one that is too wide
in the middle, one that is off to one side. Ties, of parameters that are whole numbers, are broken at random. Draws that depend
on one another give ranks too far at the ends as well: thin them until they do not (an effective sample size near their number).

The ranks of each quantity are counted in ``B`` bins; with ``e_b`` the expected counts

    X^2 = sum_b (n_b - e_b)^2 / e_b    has about chi-squared law with B - 1 degrees of freedom where the posterior is right.

The p-value of all ``K`` quantities together is Bonferroni's, ``min(1, K min_k p_k)``: below ``a`` it calls a right posterior
wrong in at most a fraction ``a`` of cases.

Talts, Betancourt, Simpson, Vehtari and Gelman (2018), arXiv:1804.06788; quantities that read the data: Modrak et al. (2023),
arXiv:2211.02383.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.trees import paths, require_like

MOST_BINS, A_BIN = 20, 10  # bins, and simulations that each of them expects at least


@dataclass(frozen=True)
class Calibration:
    """What :func:`sbc` found.

    Attributes:
        ranks: ``[simulations, K]``, of the truth among the draws, from 0 to ``draws``.
        names: of the K quantities.
        draws: L, how many draws each posterior had.
        counts: ``[B, K]``, of simulations by the bin of their rank.
        expected: ``[B]``, what uniform ranks would give.
    """

    ranks: Tensor
    names: list[str]
    draws: int

    @property
    def counts(self) -> Tensor:
        """How many ranks lie in each bin, ``[B, K]``."""
        return torch.nn.functional.one_hot(self._bins(self.ranks), len(self.expected)).sum(0).T

    @property
    def expected(self) -> Tensor:
        """How many ranks of a right posterior lie in each bin, ``[B]``."""
        of_a_bin = torch.bincount(self._bins(torch.arange(self.draws + 1, device="cpu")))
        return of_a_bin.double() * len(self.ranks) / (self.draws + 1)

    def _bins(self, ranks: Tensor) -> Tensor:
        bins = min(MOST_BINS, self.draws + 1, max(2, len(self.ranks) // A_BIN))
        return ranks * bins // (self.draws + 1)

    @property
    def chi_squared(self) -> Tensor:
        """The statistic of each quantity, ``[K]``."""
        e = self.expected[:, None]
        return ((self.counts - e).square() / e).sum(0)

    @property
    def p_values(self) -> Tensor:
        """How likely a right posterior has a statistic as large, ``[K]``."""
        half = torch.tensor((len(self.expected) - 1) / 2, dtype=torch.float64, device="cpu")
        return torch.special.gammaincc(half, self.chi_squared / 2)

    @property
    def p_value(self) -> float:
        """That of all quantities together."""
        return min(1.0, len(self.names) * self.p_values.min().item())

    def __str__(self) -> str:
        n, worst = len(self.ranks), int(self.p_values.argmin())
        u = (self.ranks[:, worst].double() + 0.5) / (self.draws + 1) - 0.5
        # of uniform numbers: mean 0, mean square 1/12, with standard errors sqrt(1/12n) and sqrt(1/180n)
        shift, spread = u.mean() * (12 * n) ** 0.5, (u.square().mean() - 1 / 12) * (180 * n) ** 0.5
        if shift.abs() > spread.abs():
            how = f"the posterior lies too {'low' if shift > 0 else 'high'}"
        else:
            how = f"the posterior is too {'narrow (or its draws depend on one another)' if spread > 0 else 'wide'}"
        said = (
            f"ranks of {n} simulations among {self.draws} draws, {len(self.names)} quantities: p = {self.p_value:.3g}"
        )
        return said if self.p_value > 0.05 else f"{said}; {self.names[worst]}: {how}"


@checks.takes(
    make_posterior=checks.FUNCTION,
    prior=checks.FUNCTION,
    simulator=checks.FUNCTION,
    quantities=checks.FUNCTION,
    together=checks.BOOL,
    simulations=checks.whole(20),
)
def sbc(
    make_posterior: Callable[[Any], Any],
    prior: Callable[[torch.Generator], Any],
    simulator: Callable[[Any, torch.Generator], Any],
    *,
    simulations: int = 200,
    quantities: Callable[[Any, Any], Any] | None = None,
    together: bool = False,
    seed: int = 0,
) -> Calibration:
    """Simulation-based calibration: ranks of true parameters among the draws that a method makes of simulated data.

    Args:
        make_posterior: ``make_posterior(data) -> draws``, the method under test: a tree like the parameters with nearly
            independent draws on axis 0, or :class:`bayesopt_chain.Draws`, whose chains are pooled.
        prior: ``prior(generator) -> params``, a draw of the prior, the one that the method assumes: a tree of tensors.
        simulator: ``simulator(params, generator) -> data``, a draw of data given parameters.
        simulations: how many parameters and data are drawn; each bin of ranks gets 10 of them or more, up to 20 bins.
        quantities: ``quantities(params, data) -> tree``, functions of parameters and data whose ranks are taken, such as the
            log likelihood, which sees faults that no parameter alone shows. Default: every element of the parameters.
        together: hand all simulated data at once to ``make_posterior``, stacked on axis 0, which returns draws
            ``[L, simulations, ...]``: chains of :func:`bayesopt_chain.parallel` with data of their own, say.
        seed: of prior and simulator, and of the ties.

    Returns:
        A :class:`Calibration`: its ``p_value`` is small where the method is wrong, ``str`` of it says how, and ``counts``
        beside ``expected`` are the histogram of ranks.

    Raises:
        TypeError: draws that are no tree of tensors, or have weights.
        ValueError: draws that are no tree like the parameters; another number of draws in another simulation, fewer than
            two, or numbers that are not finite.

    Source:
        Talts et al. (2018), arXiv:1804.06788.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> normal = lambda *shape, generator: torch.randn(*shape, generator=generator)
        >>> def posterior(y):  # of the mean of one datum, with N(0, 1) as prior and as noise
        ...     return y / 2 + torch.randn(99) * 0.5**0.5
        >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
        <torch._C.Generator ...>
        >>> found = bc.testing.sbc(
        ...     posterior,
        ...     prior=lambda g: torch.randn((), generator=g),
        ...     simulator=lambda mean, g: mean + torch.randn((), generator=g),
        ... )
        >>> found.p_value > 0.001
        True
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    truths = [prior(generator) for _ in range(simulations)]
    data = [simulator(params, generator) for params in truths]
    if together:
        every: Any = optree.tree_map(lambda *x: torch.stack(x), data[0], *data[1:])
        drawn = _tree(make_posterior(every), truths[0], together)
        made = [optree.tree_map(lambda x, i=i: x[:, i], drawn) for i in range(simulations)]
    else:
        made = [_tree(make_posterior(y), truths[0], together) for y in data]
    ask = quantities or (lambda params, _: params)
    ranks, names, lengths = list[Tensor](), list[str](), set[int]()
    for params, y, draws in zip(truths, data, made):
        truth, found = ask(params, y), torch.func.vmap(lambda p, y=y: ask(p, y))(draws)
        names = _elements(truth)
        a = torch.cat([x.double().reshape(-1) for x in optree.tree_leaves(truth)])  # [K]
        b = torch.cat(
            [x.double().flatten(1) if x.ndim > 1 else x.double()[:, None] for x in optree.tree_leaves(found)], 1
        )
        lengths.add(len(b))
        is_finite = bool(torch.isfinite(a).all() & torch.isfinite(b).all())
        if len(lengths) > 1 or len(b) < 2 or b.shape[1:] != a.shape or not is_finite:
            raise ValueError(
                f"sbc: make_posterior must give at least two finite draws, as many in every simulation, of {len(a)} "
                f"quantities that are finite at the truth; got draws {tuple(b.shape)}, lengths {sorted(lengths)}"
            )
        ties = (b == a).sum(0)
        u = torch.rand(len(a), generator=generator, device="cpu").to(ties.device)
        ranks.append((b < a).sum(0) + (u * (ties + 1)).long())
    return Calibration(torch.stack(ranks).cpu(), names, lengths.pop())


def _tree(draws: Any, like: Any, together: bool) -> Any:
    """Draws as a tree like the parameters; those of chains are pooled, unless each chain has data of its own."""
    checks.DRAWS("sbc: what make_posterior returns", draws)
    pooled = draws.unchained()[0] if hasattr(draws, "unchained") and not together else draws
    tree = getattr(pooled, "params", pooled)
    require_like(tree, like, "sbc: what make_posterior returns", batched=True)
    return tree


def _elements(tree: Any) -> list[str]:
    """A name for each number of a tree: ``layer.weight[0, 1]``, or the path alone of one that has no axes."""
    out = list[str]()
    for path, x in zip(paths(tree), optree.tree_leaves(tree)):
        at = itertools.product(*map(range, x.shape))
        out += [f"{path}{list(i)}" if i else path for i in at]
    return out
