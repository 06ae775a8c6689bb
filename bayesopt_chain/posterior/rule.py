r"""What keeps a good network good: the dispersion of classes and a budget for what averaging may cost; the noise of a network.

The last layer's curvature says little of how well a network predicts: evidence chooses a posterior far wider than the data ask
for where the network is overtrained or its labels are clean. Two rules keep the default of ``fit_laplace`` from that.

Classes, and every likelihood without a noise of its own. With L the log likelihood at the parameters t, l_i the eigenvalues of
their curvature, phi the dispersion (see below) and gamma the determined parameters,

    phi   = max(1e-3, sum |g_n|^2 / sum tr F_n  D / (D - gamma)),      gamma = sum_i (l_i / phi) / (l_i / phi + delta)
    delta = argmax  L / phi - delta |t|^2 / 2 + sum_i log(delta / (l_i / phi + delta)) / 2

by turns: the dispersion is tuned as the evidence tunes the noise of a Gaussian likelihood, whose phi is 1 / s. The covariance
``(H / phi + delta)^-1`` is then multiplied by the largest tau up to 1 with

    mean_n KL( p(y | f_n)  ||  E p(y | f),  f ~ N(f_n, tau S_n) )  <=  (NLL + 1e-3) / 10

over training inputs, NLL the network's own training loss: averaging may change its probabilities by a tenth of what they cost.

A linear last layer with Gaussian noise. The residuals that the last layer leaves say too little of the noise where the body has
fitted the targets too. With w_i the eigenvalues of ``J J^T`` for the Jacobian of all data in *all* parameters,

    v = |y - f|^2 / (N - gamma),      gamma = sum_i w_i / (w_i + v delta),      delta = gamma / |theta|^2

(MacKay, 1992), of several outputs for each by itself, with the Jacobian of that output. The prior of the layer is tuned at
this noise. Only where the layer was not trained, so that the network explains less than half of the targets' variance and the
layer's mode leaves a quarter of its residual or less, degrees of freedom counted, is the noise left to the layer's evidence.

Of n data of N the eigenvalues u_i say what gamma is for all. Let C be the mean of ``J_n^T J_n``. A ridge r on n data leaves
the same degrees of freedom as the ridge kappa on C itself, which is larger by those that the data have left
(Marchenko and Pastur, 1967; Bach, "High-dimensional analysis of double descent", 2024),

    gamma_n(r) = tr C (C + kappa)^-1,      r = kappa (n - gamma_n(r)),      that is  1 / kappa = sum_i 1 / (u_i + r),

so that every r is a point (kappa, gamma) that belongs to any number of data: of N the ridge is ``kappa (N - gamma)``. Setting
it to v delta leaves one equation, whose left side grows and whose right side falls along r,

    kappa (N - gamma)^2 |theta|^2 = |y - f|^2 gamma.

The n data alone determine n parameters at most. Where gamma comes out above 0.9 n of a network with more parameters, it
goes on as the power of kappa that it is there, up to what there are parameters. On networks that had fitted 2,500 data well
beyond their noise, 1,000 of them gave .94 to 1.4 times the noise by all, 500 gave .97 to 1.7 times; scaling the eigenvalues
by N / n, by which gamma stays below n, gave .03 to .92 of it. Costs, for n data up to 1,000: the Jacobian's n rows, half of the
``n^2 P`` products of ``J J^T``, and its eigenvalues, for each output.

Both rules were chosen on 22 networks (``benchmarks/results/laplace_default.md``).

How noisy the targets are, against what the likelihood says: the dispersion of a fit.

For the loss ``l_n = -log p(y_n | f_n)`` of datum n with outputs f_n, its gradient g_n in the outputs has the covariance F_n,
the Fisher information of the outputs, if the targets are distributed as the likelihood says. The dispersion is the factor by
which the squares of the gradients differ from that,

    phi = sum_n |g_n|^2 / sum_n tr F_n  *  D / (D - gamma),      gamma = tr (Lambda^-1 J^T F J) = sum_i (1 - delta_i Sigma_ii),

with D the number of independent entries of all targets (one a regression's output, C - 1 a label of C classes), Lambda the
posterior's precision, Sigma its inverse, delta the prior precision and J the Jacobian of all outputs. The second factor is
that of an unbiased variance: a fit of gamma well determined parameters takes gamma of D residuals. Of a regression phi is the
residual sum of squares over ``variance (D - gamma)``, of classes the sum of ``|y - p|^2`` over that of ``1 - |p|^2``,
corrected so. phi below 1 says that labels are cleaner than the model's probabilities or its noise variance, as in data sets
from which doubtful cases were taken out; phi above 1 that they are noisier (McCullagh and Nelder, "Generalized Linear
Models", 1989, chapter 9; for |g|^2 against F: White, "Maximum likelihood estimation of misspecified models", 1982).

What it says of draws. Since ``(d^2 p / df^2) / p = g g^T - d^2 l / df^2``, outputs ``f_n + e`` with ``e ~ N(0, t S_n)`` have

    log E_e p(y_n | f_n + e) - log p(y_n | f_n) = t / 2 tr S_n (g_n g_n^T - d^2 l_n / df^2) + O(t^2).

Where the outputs' covariance S is that of the posterior at temperature 1 / N and t is N T, ``sum_n tr S_n F_n = gamma``:
averaging over draws at temperature T changes the log score of N new data by ``N T gamma (phi_new - 1) / 2`` to first order,
with phi_new their dispersion around the mode's outputs. Averages over warm draws gain where targets are noisier than the mode
says, and lose where they are cleaner.
"""

from __future__ import annotations

import math
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain.curvature._kinds import plus_gram
from bayesopt_chain.curvature._plan import batch_size, part
from bayesopt_chain.likelihoods import Likelihood
from bayesopt_chain.likelihoods._classes import OneOfSeveral
from bayesopt_chain.posterior._linearized import jacobian
from bayesopt_chain.posterior.evidence import lowest, spectra, tuned
from bayesopt_chain.posterior.gaussian import Gaussian
from bayesopt_chain.posterior.model import Model, Pass, linearized
from bayesopt_chain.posterior.regression import TINY
from bayesopt_chain.trees import Tree, size

ROUNDING = 1e-6  # of the degrees of freedom that are left, as a share


def scatter_of(likelihood: Likelihood, outputs: Tensor, targets: Any) -> Tensor:
    """Sums over the targets of a batch, ``[3]`` in float64: squares of the gradients in the outputs, Fisher information,
    independent entries D."""
    outputs = outputs.detach()
    root, grouping = likelihood.root(outputs, targets), likelihood.grouping(outputs.shape[1:])
    weights, count = likelihood.weights(targets), math.prod(grouping.positions)
    if weights is None:
        weights = outputs.new_ones((outputs.shape[0], *grouping.positions))
    # a target of weight w counts w times: its gradient is w times that of one, its information too
    own = grouping.over_outputs(weights.to(outputs.dtype), outputs.shape)
    slopes = likelihood.gradient(outputs, targets).detach() / own.clamp_min(torch.finfo(own.dtype).tiny).sqrt()
    squares, information = slopes.to(torch.float64).square().sum(), root.diagonal().detach().to(torch.float64).sum()
    return torch.stack([squares, information, weights.to(torch.float64).sum() * root.columns / count])


def dispersion(scatter: Tensor, gamma: Tensor) -> Tensor:
    """phi where the data determine ``gamma`` parameters, 0-d."""
    squares, information, independent = scatter
    return squares / information * independent / (independent - gamma).clamp_min(ROUNDING * independent)


class Kept:
    """What the default's rules ask of a pass: its first ``most`` data by batches, and the scatter of targets where the
    likelihood has no noise scale."""

    def __init__(self, most: int) -> None:
        self.most, self.batches, self.scatter = most, [], torch.zeros(3, dtype=torch.float64, device="cpu")

    def take(self, model: Model, batch: Any, outputs: Tensor) -> None:
        """Keep what of a batch is still wanted."""
        wanted = self.most - sum(map(batch_size, self.batches))
        if wanted > 0:
            self.batches.append(part(batch, 0, wanted))
        if not model.likelihood.has_noise_scale:
            self.scatter = self.scatter.to(outputs.device) + scatter_of(model.likelihood, outputs, batch[1])


LEAST_DISPERSION, ROUNDS, SETTLED = 1e-3, 8, 1e-2
SHARE, SPARE, HALVINGS, DRAWS = 0.1, 1e-3, 14, 16  # of the budget
ROWS, NUMBERS = 1000, 2**27  # of the Jacobian of a whole network
OF_BUDGET, FEWEST, ENTRIES = 256, 8, 2**25  # data that the budget is of, entries of their outputs' covariances
LEAST_DATA = 50  # that stand for all
LEAST_FREE = 1e-3  # share of the degrees of freedom that the noise has
RESOLVED = 0.9  # of as many parameters as data, which they can determine
BISECTIONS, SPAN = 80, 60.0  # the latter of the ridge, in its logarithm, on both sides of the largest eigenvalue
UNTRAINED = 4.0  # times the mode's mean square, at which the layer is no mode


def by_dispersion(
    model: Model, seen: Pass, scatter: Tensor, start: float, prior_structure: str | None
) -> tuple[Tree, Tensor]:
    """Prior and dispersion by turns; the likelihood's scale is 1 / phi."""
    groups = spectra(seen.decomposed) or []
    found = tuned(model, seen, start=start, prior_structure=prior_structure)
    for _ in range(ROUNDS - 1):
        each, last = optree.tree_leaves(found[0]), found[1]
        gamma: Any = sum(
            (last * g.values / (last * g.values + each[g.leaves[0]].to(torch.float64))).sum() for g in groups
        )
        scale = 1 / dispersion(scatter, gamma).clamp_min(LEAST_DISPERSION)
        if abs(math.log(scale / last)) < SETTLED:
            break
        found = tuned(model, seen, scale=scale, start=float(each[0]), prior_structure=prior_structure)
    return found


@torch.no_grad()
def within_budget(model: Model, posterior: Gaussian, batches: list[Any], seen: Pass) -> float:
    """The largest tau up to 1 at which the KL divergence of the averages from the network's own distribution is affordable.

    1 for outputs of which few covariances can be held, and for a likelihood that cannot draw.
    """
    likelihood: Any = getattr(model.likelihood, "inner", model.likelihood)  # what is drawn has no weights
    most = SHARE * (float(-seen.log_likelihood / seen.entries) + SPARE)
    outputs = model.forward(posterior.mean, part(batches[0], 0, 1)).numel()
    each = min(OF_BUDGET, ENTRIES // outputs**2)
    if each < FEWEST:
        return 1.0
    parts = [linearized(model, posterior, part(batch, 0, each)) for batch in batches[:each]]
    try:
        owns = [_own(likelihood, mean) for mean, _ in parts]
    except ValueError:
        return 1.0

    def is_affordable(x: Tensor) -> Tensor:
        pairs = zip(owns, parts)
        found = [_divergence(likelihood, own, mean, (-x).exp() * covariance) for own, (mean, covariance) in pairs]
        return torch.cat(found).mean() <= most

    one = torch.zeros_like(seen.log_likelihood)  # the logarithm of tau = 1
    if bool(is_affordable(one)):
        return 1.0
    return float((-lowest(is_affordable, one, one + HALVINGS * math.log(2), HALVINGS)).exp())


def _own(likelihood: Likelihood, mean: Tensor) -> Any:
    """What the network says of targets: probabilities of classes, in order or not, of other targets draws."""
    if likelihood.has_classes or isinstance(likelihood, OneOfSeveral):
        return _of_labels(likelihood, likelihood.mean(mean))
    generator = torch.Generator(mean.device).manual_seed(0)
    return [likelihood.draw(mean, generator) for _ in range(DRAWS)]


def _of_labels(likelihood: Likelihood, p: Tensor) -> Tensor:
    """Probabilities of all labels, ``[*, C]``, where those of yes are given for targets that are yes or no."""
    return torch.stack([1 - p, p], -1) if likelihood.has_classes and likelihood.support is not None else p


def _divergence(likelihood: Likelihood, own: Any, mean: Tensor, covariance: Tensor) -> Tensor:
    if isinstance(own, Tensor):
        method = "probit" if own.shape[-1] > 32 and "probit" in likelihood.methods else None
        tiny = torch.finfo(own.dtype).tiny
        averaged = _of_labels(likelihood, likelihood.expected_mean(mean, covariance, method))
        return (own * (own.clamp_min(tiny) / averaged.clamp_min(tiny)).log()).sum(-1).flatten()
    predictive = likelihood.predictive(mean, covariance)
    return torch.stack([likelihood.log_prob(mean, y) - predictive.log_prob(y) for y in own]).mean(0).flatten()


def by_network_noise(model: Model, seen: Pass, batches: list[Any], prior_structure: str | None) -> tuple[Tree, Tensor]:
    """Prior and noise of a linear last layer with Gaussian noise: the noise by the whole network where its Jacobian fits."""
    assert seen.regression is not None
    total = (seen.regression.total / seen.regression.data.noise).reshape(-1)
    explains_little, own = (seen.squares > total / 2) | (seen.entries == 0), None
    if bool(explains_little.any()):  # only then the layer's own evidence is asked
        own = tuned(model, seen, prior_structure=prior_structure)
        squares, gamma = seen.regression.residual(*model.prior_of_layer(own[0]), own[1])
        of_layer = squares / (seen.entries - gamma).clamp_min(1)
        explains_little &= (seen.squares / seen.entries > UNTRAINED * of_layer) | (seen.entries == 0)
        if bool(explains_little.all()):
            return own
    noise = _network_noise(model, seen, batches)
    if noise is None:
        return own or tuned(model, seen, prior_structure=prior_structure)
    scale = 1 / noise.maximum(seen.regression.least_noise())
    if own is not None:
        scale = torch.where(explains_little, own[1], scale)
    return tuned(model, seen, scale=scale.reshape(seen.squares.shape), prior_structure=prior_structure)


def data_for(model: Model) -> int:
    """How many data the rules look at again."""
    body = model.features_of
    return min(ROWS, NUMBERS // size(dict(body.params))) if model.is_linear_gaussian and body else OF_BUDGET


def _whitened(likelihood: Likelihood, forward: Any, params: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Jacobian rows over the noise's root, times that of the weights, ``[B E, P]``, and the targets' weights; float64."""
    weights, variance = likelihood.weights(batch[1]), likelihood.variance(forward(params, batch))
    weights = (torch.ones_like(variance) if weights is None else weights.to(variance)).to(torch.float64).reshape(-1)
    rows = torch.cat([x.flatten(1) for x in optree.tree_leaves(jacobian(forward, params, batch))], 1)
    return rows.to(torch.float64) * (weights / variance.reshape(-1)).sqrt()[:, None], weights


def _spectrum(rows: Tensor) -> Tensor:
    """The eigenvalues of ``J J^T``, or of ``J^T J`` where that is smaller."""
    narrow = rows if len(rows) > rows.shape[1] else rows.mT
    return torch.linalg.eigvalsh(plus_gram(None, narrow), UPLO="U")


@torch.no_grad()
def _network_noise(model: Model, seen: Pass, batches: list[Any]) -> Tensor | None:
    """Of each output, in units of the likelihood's variance, ``[E]``; ``None`` where too few data fit."""
    body = model.features_of
    count = sum(map(batch_size, batches))
    if body is None or count < min(float(seen.precision.count), LEAST_DATA):
        return None
    params, outputs = dict(body.params), seen.squares.numel()
    rows, weights = map(
        torch.cat, zip(*(_whitened(model.likelihood, body.forward, params, batch) for batch in batches))
    )
    spectrum = [_spectrum(rows[o::outputs]) for o in range(outputs)]
    squares = seen.squares.reshape(-1)
    entries = seen.entries.reshape(-1)
    norm = sum(p.to(torch.float64).square().sum() for p in params.values())
    some = weights.reshape(-1, outputs).sum(0)
    some = torch.where(some > 0, some, entries)
    gamma = _determined(torch.stack(spectrum).clamp_min(0), some, entries, squares / norm, rows.shape[1])
    return squares / (entries - gamma)


def _determined(values: Tensor, some: Tensor, count: Tensor, squares: Tensor, parameters: int) -> Tensor:
    """gamma of ``count`` data ``[E]`` from the eigenvalues ``[E, k]`` of ``some`` of them, ``[E]``.

    ``squares``: the residual's over ``|theta|^2``, ``[E]``.
    """
    scale = values.amax(1).clamp_min(torch.finfo(values.dtype).tiny)
    most = ((1 - LEAST_FREE) * count).clamp_max(parameters)

    def at(log_ridge: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """kappa, gamma, and the power of kappa as which gamma changes."""
        ridge = (scale * log_ridge.exp())[:, None]
        share = values / (values + ridge)
        gamma = share.sum(1).minimum((1 - LEAST_FREE) * some)
        kappa = ridge[:, 0] / (some - gamma)
        free = some - (share * (2 - share)).sum(1)  # of 1 - share squared, those of no eigenvalue included
        return kappa, gamma, (share * (1 - share)).sum(1) * (some - gamma) / (gamma * free).clamp_min(TINY)

    def is_above(kappa: Tensor, gamma: Tensor) -> Tensor:
        return kappa * (count - gamma).square() > squares * gamma

    zero = torch.zeros_like(count)
    gamma = at(lowest(lambda x: is_above(*at(x)[:2]), zero - SPAN, zero + SPAN, BISECTIONS))[1].minimum(most)
    beyond = (gamma > RESOLVED * some) & (some < count) & (parameters > some)
    if not bool(beyond.any()):
        return gamma
    kappa, start, power = at(lowest(lambda x: at(x)[1] <= RESOLVED * some, zero - SPAN, zero + SPAN, BISECTIONS))

    def further(log_ratio: Tensor) -> Tensor:
        return (start * (-power * log_ratio).exp()).minimum(most)

    ends = lowest(lambda x: is_above(kappa * x.exp(), further(x)), zero - 4 * SPAN, zero, BISECTIONS)
    return torch.where(beyond, further(ends).maximum(gamma), gamma)
