r"""What keeps a good network good: the dispersion of classes and a budget for what averaging may cost; the noise of a network.

The last layer's curvature says little of how well a network predicts: evidence chooses a posterior far wider than the data ask
for where the network is overtrained or its labels are clean. Two rules keep the default of ``fit_laplace`` from that.

Classes, and every likelihood without a noise of its own. With L the log likelihood at the parameters t, l_i the eigenvalues of
their curvature, phi the dispersion (``dispersion.py``) and gamma the determined parameters,

    phi   = max(1e-3, sum |g_n|^2 / sum tr F_n  D / (D - gamma)),      gamma = sum_i (l_i / phi) / (l_i / phi + delta)
    delta = argmax  L / phi - delta |t|^2 / 2 + sum_i log(delta / (l_i / phi + delta)) / 2

by turns: the dispersion is tuned as the evidence tunes the noise of a Gaussian likelihood, whose phi is 1 / s. The covariance
``(H / phi + delta)^-1`` is then multiplied by the largest tau up to 1 with

    mean_n KL( p(y | f_n)  ||  E p(y | f),  f ~ N(f_n, tau S_n) )  <=  (NLL + 1e-3) / 10

over training inputs, NLL the network's own training loss: averaging may change its probabilities by a tenth of what they cost.

A linear last layer with Gaussian noise. The residuals that the last layer leaves say too little of the noise where the body has
fitted the targets too. With w_i the eigenvalues of ``J J^T`` for the Jacobian of all data in *all* parameters,

    v = |y - f|^2 / (N - gamma),      gamma = sum_i w_i / (w_i + v delta),      delta = gamma / |theta|^2,

a fixed point (MacKay, 1992), of several outputs for each by itself, with the Jacobian of that output. The prior of the layer
is tuned at this noise. Only where the layer was not trained, so that the network explains less than half of the targets'
variance and the layer's mode leaves a quarter of its residual or less, degrees of freedom counted, is the noise left to the
layer's evidence. Of more data than fit, the first stand for all: their eigenvalues are multiplied by the ratio of the numbers.
This is what the default costs more than an evidence whose noise is given: for n data the Jacobian's n rows, half of the
``n^2 P`` products of ``J J^T``, and its eigenvalues, for each output. A network of 3,051 parameters takes .1 s for 500 data and
1 s for the 2,000 that are the most; of half as many the noise of an overtrained network came out a third lower.

Both rules were chosen on 22 networks; ``benchmarks/laplace_default.py`` has them and further ones.
"""

from __future__ import annotations

import math
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain.curvature._plan import batch_size, part
from bayesopt_chain.likelihoods import Likelihood
from bayesopt_chain.posterior._linearized import jacobian
from bayesopt_chain.posterior.dispersion import Scatter
from bayesopt_chain.posterior.evidence import Tuned, spectra, tune_layer, tuned
from bayesopt_chain.posterior.gaussian import Gaussian
from bayesopt_chain.posterior.last_layer import HeadBatch
from bayesopt_chain.posterior.model import Model, Pass, linearized
from bayesopt_chain.trees import size

LEAST_DISPERSION, ROUNDS, SETTLED = 1e-3, 8, 1e-2
SHARE, SPARE, HALVINGS, DRAWS = 0.1, 1e-3, 14, 16  # of the budget
ROWS, NUMBERS, BLOCK = 2000, 2**27, 256  # of the Jacobian of a whole network
OF_BUDGET, FEWEST, ENTRIES = 256, 8, 2**25  # data that the budget is of, entries of their outputs' covariances
LEAST_DATA = 50  # that stand for all
LEAST_FREE = 1e-3  # share of the degrees of freedom that the noise has
UNTRAINED = 4.0  # times the mode's mean square, at which the layer is no mode


def by_dispersion(model: Model, seen: Pass, scatter: Scatter, start: float, prior_structure: str | None) -> Tuned:
    """Prior and dispersion by turns; the likelihood's scale is 1 / phi."""
    groups = spectra(seen.decomposed) or []
    scale, prior = torch.ones_like(seen.log_likelihood), start
    best = None
    for _ in range(ROUNDS):
        best = tuned(model, seen, scale=scale, start=prior, prior_structure=prior_structure)
        each = optree.tree_leaves(best.prior_precision)
        gamma: Any = sum(
            (scale * g.values / (scale * g.values + each[g.leaves[0]].to(torch.float64))).sum() for g in groups
        )
        last, scale = scale, 1 / scatter.dispersion(gamma).clamp_min(LEAST_DISPERSION)
        prior = float(each[0])
        if abs(math.log(scale / last)) < SETTLED:
            break
    assert best is not None
    return best


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

    def cost(tau: float) -> float:
        found = [_divergence(likelihood, own, mean, tau * covariance) for own, (mean, covariance) in zip(owns, parts)]
        return float(torch.cat(found).mean())

    if cost(1.0) <= most:
        return 1.0
    low, high = -HALVINGS * math.log(2), 0.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if cost(math.exp(middle)) <= most else (low, middle)
    return math.exp(low)


def _own(likelihood: Likelihood, mean: Tensor) -> Any:
    """What the network says of targets: probabilities of classes, of other targets draws."""
    if "sobol" in likelihood.methods:
        return likelihood.mean(mean)
    generator = torch.Generator(mean.device).manual_seed(0)
    return [likelihood.draw(mean, generator) for _ in range(DRAWS)]


def _divergence(likelihood: Likelihood, own: Any, mean: Tensor, covariance: Tensor) -> Tensor:
    if isinstance(own, Tensor):
        method = "sobol" if own.shape[-1] <= 32 else "probit"
        tiny = torch.finfo(own.dtype).tiny
        averaged = likelihood.expected_mean(mean, covariance, method)
        return (own * (own.clamp_min(tiny) / averaged.clamp_min(tiny)).log()).sum(-1).flatten()
    predictive = likelihood.predictive(mean, covariance)
    return torch.stack([likelihood.log_prob(mean, y) - predictive.log_prob(y) for y in own]).mean(0).flatten()


def by_network_noise(model: Model, seen: Pass, batches: list[Any], prior_structure: str | None) -> Tuned:
    """Prior and noise of a linear last layer with Gaussian noise: the noise by the whole network where its Jacobian fits."""
    assert seen.regression is not None
    total = (seen.regression.total / seen.regression.data.noise).reshape(-1)
    explains_little, own = (seen.squares > total / 2) | (seen.entries == 0), None
    if bool(explains_little.any()):  # only then the layer's own evidence is asked
        own = tune_layer(model, seen.regression, prior_structure)
        squares, gamma = seen.regression.residual(*_of_layer(model, own.prior_precision), own.likelihood_scale)
        of_layer = squares / (seen.entries - gamma).clamp_min(1)
        explains_little &= (seen.squares / seen.entries > UNTRAINED * of_layer) | (seen.entries == 0)
        if bool(explains_little.all()):
            return own
    noise = _network_noise(model, seen, batches)
    if noise is None:
        return own or tune_layer(model, seen.regression, prior_structure)
    scale = 1 / noise.maximum(seen.regression.least_noise())
    if own is not None:
        scale = torch.where(explains_little, own.likelihood_scale, scale)
    return tune_layer(model, seen.regression, prior_structure, scale=scale.reshape(seen.squares.shape))


def _of_layer(model: Model, prior: Any) -> tuple[Tensor, Tensor | None]:
    layer: Any = model.forward
    return prior[layer.weight], None if layer.bias is None else prior[layer.bias]


def data_for(model: Model) -> int:
    """How many data the rules look at again."""
    body = model.features_of
    return min(ROWS, NUMBERS // size(dict(body.params))) if model.is_linear_gaussian and body else OF_BUDGET


def _whitened(likelihood: Likelihood, forward: Any, params: Any, batch: Any) -> Tensor:
    """Rows of the Jacobian over the noise's root, times that of the targets' weights, ``[B E, P]``, float64."""
    weights, variance = likelihood.weights(batch[1]), likelihood.variance(forward(params, batch))
    factor = (variance.reciprocal() if weights is None else weights / variance).sqrt().reshape(-1)
    rows = torch.cat([x.flatten(1) for x in optree.tree_leaves(jacobian(forward, params, batch))], 1)
    return rows.to(torch.float64) * factor[:, None].to(torch.float64)


def _lower_gram(rows: Tensor) -> Tensor:
    """The lower triangle of ``J J^T``, or of ``J^T J`` where that is smaller, with about half of the products."""
    rows = rows if len(rows) <= rows.shape[1] else rows.mT
    total = rows.new_zeros(len(rows), len(rows))
    for start in range(0, len(rows), BLOCK):
        stop = start + BLOCK
        total[start:stop, :stop] = rows[start:stop] @ rows[:stop].mT
    return total


@torch.no_grad()
def _network_noise(model: Model, seen: Pass, batches: list[Any]) -> Tensor | None:
    """Of each output, in units of the likelihood's variance, ``[E]``; ``None`` where the inputs are not there or too few of
    them fit."""
    body = model.features_of
    raw = [batch for batch in batches if not isinstance(batch, HeadBatch)]
    count = sum(map(batch_size, raw))
    if body is None or count < min(float(seen.precision.count), LEAST_DATA):
        return None
    params, outputs = dict(body.params), seen.squares.numel()
    rows = torch.cat([_whitened(model.likelihood, body.forward, params, batch) for batch in raw])
    spectrum = [torch.linalg.eigvalsh(_lower_gram(rows[o::outputs])) for o in range(outputs)]
    values = torch.stack(spectrum).clamp_min(0) * (seen.precision.count / count)
    norm = sum(p.to(torch.float64).square().sum() for p in params.values())
    squares, entries = seen.squares.reshape(-1), seen.entries.reshape(-1)
    noise, delta = squares / entries, torch.ones_like(squares)
    for _ in range(200):
        gamma = (values / (values + (noise * delta)[:, None])).sum(1).minimum((1 - LEAST_FREE) * entries)
        noise, delta = squares / (entries - gamma), gamma / norm
    return noise
