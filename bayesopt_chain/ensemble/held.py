r"""Scores on the folds that members left out, the noise that they ask for, and what a constant scores there.

Of the m members that left a fold out, a target there has the log score

    l = log 1/m sum_j p(y | f_j),      at least -50 - log s, so that one surprise does not decide everything,

with s the deviation of targets on the real line, and 1 of others; scores of a datum's targets are added up, times their
weights. Noise stands in units c of the targets' variance, one number for each of E outputs, log c shrunk towards its mean over
outputs as if two data more had said it. Of one member the held-out noise is

    c_e = mean_i min(r_ie^2, (4 s_e)^2) / v_e,      s_e = 1.4826 median_i |r_ie|,

so that outliers do not decide.

The noise to predict with is fitted to mixtures of the m members that left a fold out; the mixture of all M needs another. Let
members disagree about a target with variance b around a mean whose squared error is a, noise included. The mean of m has
the squared error ``a + b / m``, and their mixture promises ``c + (1 - 1 / m) b``. The two are equal for

    c_m = a - b + 2 b / m,      so that      c_M = c_m - 2 b (1 / m - 1 / M).

Residuals of members drawn apart have their bias alone in common, so that b is the mean of ``r_i (r_i - r_k)`` over members i
that are mixed and all others k that left out the same fold, those of another prior too, as far as their bias is the same.

Logits are divided, and noise scales other than these multiplied, by the c whose logarithm is the mean of

    p(log c | folds)  ~  exp(sum_i l_i(c) - (log c)^2 / 2),

so that few data, which cannot tell, leave predictions as they are, and some of them do not have to be sure. Where the best c is
an end of a grid from .1 to 31.6, as of a scale in other units than the targets, a wide one without this prior decides.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain import batches
from bayesopt_chain.ensemble.data import Data, moments
from bayesopt_chain.likelihoods import Likelihood
from bayesopt_chain.likelihoods._numbers import LearnedGaussian

FLOOR = torch.full((), -50.0, device="cpu")
PSEUDO = 2.0  # data that say that the noise of all outputs is alike
LEAST = 1e-6  # noise, in units of the targets' variance
# variances in units of the targets', and what logits are divided by
NOISES = torch.logspace(-6, 1, 100, dtype=torch.float64, device="cpu")
SCALES = torch.logspace(-1, 1.5, 60, dtype=torch.float64, device="cpu")
FAR = torch.logspace(-12, 12, 289, dtype=torch.float64, device="cpu")  # where an end of them is the best
NEGLIGIBLE = 0.05  # of log c: a smaller one is no factor at all
MOST_CONSTANTS = 4096  # outputs of a datum beyond which no constant is fitted


class Fold(NamedTuple):
    """Targets that were left out, by whom, the outputs ``[m, n, *event]`` of those members there, and the least log score of
    a target."""

    rows: Tensor
    targets: Any
    who: list[int]
    outputs: Tensor
    floor: Tensor = FLOOR


def joined(folds: Sequence[Fold], drawn: Sequence[Tensor]) -> list[Fold]:
    """The folds with the draws of the members beside them, ``[D, n, *event]`` of each on its fold."""
    return [f._replace(outputs=torch.cat([f.outputs, *(drawn[m].double() for m in f.who)])) for f in folds]


def doubled(targets: Any) -> Any:
    """Floating-point targets in double precision."""
    return batches.tree_map(lambda x: x.double() if x.is_floating_point() else x, targets)


def scored(likelihood: Likelihood, folds: Sequence[Fold], factor: float = 1.0) -> Tensor:
    """Log scores of the targets of all folds times their weights, ``[n, P]``; predictions are widened by a factor."""
    found = []
    for fold in folds:
        lik, outputs = likelihood.widened(fold.outputs, factor) if factor != 1 else (likelihood, fold.outputs)
        logs = lik.log_prob(outputs, likelihood.labels(fold.targets)).reshape(*outputs.shape[:2], -1)
        logs = logs.where(logs.isfinite(), fold.floor).maximum(fold.floor)
        found.append((logs.logsumexp(0) - math.log(len(logs))) * weights_of(likelihood, fold.targets))
    return torch.cat(found)


def score(likelihood: Likelihood, folds: Sequence[Fold], factor: float = 1.0) -> Tensor:
    """Log scores of the data of all folds, ``[n]``, on the CPU."""
    return scored(likelihood, folds, factor).sum(1).cpu()


def weights_of(likelihood: Likelihood, targets: Any) -> Tensor:
    """Of the targets, ``[n, P]``."""
    labels, weights = likelihood.labels(targets), likelihood.weights(targets)
    w = torch.ones_like(labels, dtype=torch.float64) if weights is None else weights.double()
    return w.reshape(len(w), -1)


def z_of(difference: Tensor) -> float:
    """The mean of paired differences ``[n]`` in its standard errors."""
    return float(difference.mean() / (difference.std() / len(difference) ** 0.5 + 1e-12))


def errors(likelihood: Likelihood, fold: Fold) -> tuple[Tensor, Tensor]:
    """Whitened errors ``[m, n, E]`` of a fold's members, and the weights of its targets."""
    whitened = torch.stack([likelihood.whitened(f, fold.targets) for f in fold.outputs])
    weights = weights_of(likelihood, fold.targets)
    return whitened.reshape(*whitened.shape[:2], -1), weights.expand(len(whitened), -1, -1)


def noise_of(likelihood: Likelihood, folds: Sequence[Fold]) -> Tensor:
    """The held-out noise of single members, ``[*event]``, trimmed and shrunk."""
    r, w = (torch.cat([x.flatten(0, 1) for x in parts]) for parts in zip(*(errors(likelihood, f) for f in folds)))
    r = r.square()
    bound = (4 * 1.4826) ** 2 * torch.where(w > 0, r, torch.nan).nanmedian(0).values
    r = torch.where(bound > 0, r.minimum(bound), r)
    return _shrunk(r.sum(0), w.sum(0)).reshape(folds[0].outputs.shape[2:])


def _shrunk(sums: Tensor, counts: Tensor) -> Tensor:
    """Means of each output, their logarithms drawn a little to that of all outputs."""
    logs = (sums / counts.clamp_min(1e-30)).clamp_min(LEAST).log()
    together = logs[counts > 0].mean()
    return ((counts * logs.where(counts > 0, 0.0) + PSEUDO * together) / (counts + PSEUDO)).exp()


def fitted(likelihood: Likelihood, folds: Sequence[Fold]) -> tuple[Likelihood, float, Tensor | None, bool]:
    """How wide predictions are best on some folds: the likelihood, what outputs are widened by, the noise ``[*event]`` if there
    is one, and whether it or the factor is at an end of its grid."""
    return (best_noise if likelihood.has_noise_scale else best_factor)(likelihood, folds)


def log_scores(likelihood: Likelihood, folds: Sequence[Fold]) -> Tensor:
    """Log scores ``[n]`` of the folds, as wide as is best there."""
    widened, factor, *_ = fitted(likelihood, folds)
    return score(widened, folds, factor)


def best_noise(likelihood: Likelihood, folds: Sequence[Fold]) -> tuple[Likelihood, float, Tensor, bool]:
    """:func:`fitted` of Gaussian noise, one for each output."""
    grid = NOISES.flip(0)  # the largest first: it is taken where all score the least
    best = torch.stack([scored(likelihood.scaled(1 / c), folds).sum(0) for c in grid.tolist()]).argmax(0)
    counts = torch.cat([weights_of(likelihood, fold.targets) for fold in folds]).sum(0)
    at_end = bool(((best == 0) | (best == len(grid) - 1))[counts > 0].any())
    noise = _shrunk(grid.to(counts)[best] * counts, counts).reshape(folds[0].outputs.shape[2:])
    return likelihood.scaled(1 / noise), 1.0, noise, at_end


def noise_of_all(
    likelihood: Likelihood, noise: Tensor, folds: Sequence[Fold], every: Sequence[Fold]
) -> tuple[Tensor, bool]:
    """The noise ``[*event]`` of the mixture of all members, and whether it was cut to a quarter of what is mixed.

    Args:
        likelihood: of training.
        noise: that of the mixtures of those members of ``folds`` that left each of them out.
        folds: with the outputs of the members that are mixed.
        every: with those of all members.
    """
    size, count = sum(len(f.rows) for f in folds), sum(len(f.who) for f in every)
    fewer = sum(len(f.rows) * (1 / len(f.who) - 1 / count) for f in folds) / size
    mixed = {m for f in folds for m in f.who}
    all_noise, least = noise - 2 * fewer * disagreement(likelihood, every, mixed).reshape(noise.shape), noise / 4
    return all_noise.maximum(least), bool((all_noise < least).any())


def disagreement(likelihood: Likelihood, folds: Sequence[Fold], mixed: Collection[int]) -> Tensor:
    """``b`` of each output for the members that are mixed, ``[E]``, at least 0; 0 where one member left a fold out."""
    products, counts = [], []
    for fold in folds:
        r, w = errors(likelihood, fold)
        others = (r.sum(0) - r) / (len(r) - 1) if len(r) > 1 else r
        here = [i for i, m in enumerate(fold.who) if m in mixed]
        products.append((r * (r - others))[here].flatten(0, 1))
        counts.append(w[here].flatten(0, 1))
    return (torch.cat(products).sum(0) / torch.cat(counts).sum(0).clamp_min(1e-30)).clamp_min(0)


def best_factor(likelihood: Likelihood, folds: Sequence[Fold]) -> tuple[Likelihood, float, None, bool]:
    """:func:`fitted` of what logits are divided by, or noise scales are widened by; the end says that it is far from 1."""
    mean, far = 0.0, False
    for scales, prior in ((SCALES, 0.5), (FAR, 0.0)) if likelihood.has_width else ():
        logs = scales.log()
        table = (
            torch.stack([score(likelihood, folds, c).sum() for c in scales.tolist()]).to(logs) - prior * logs.square()
        )
        mean, far = float(table.softmax(0) @ logs), int(table.argmax()) in (0, len(scales) - 1) or scales is FAR
        if not far:
            break
    return likelihood, 1.0 if abs(mean) < NEGLIGIBLE else math.exp(mean), None, far


def constant_scores(likelihood: Likelihood, data: Data, folds: Sequence[Fold]) -> Tensor | None:
    """Log scores ``[n]``, on the same folds, of the best constant outputs for the other data: mean of numbers, frequencies of
    classes. Noise is that of the folds, as it is for networks. ``None`` for outputs of too many numbers."""
    if folds[0].outputs[0, 0].numel() > MOST_CONSTANTS:
        return None
    every, found = torch.arange(data.size, device="cpu"), []
    for fold in folds:
        rest, event = every[~torch.isin(every, fold.rows)], fold.outputs.shape[2:]
        c = _constant(likelihood, doubled(data.take(rest)[1]), len(rest), event, fold.outputs)
        found.append(fold._replace(outputs=c.expand(1, len(fold.rows), *event)))
    return log_scores(likelihood, found) if likelihood.has_noise_scale else score(likelihood, found)


def _constant(likelihood: Likelihood, targets: Any, n: int, event: Any, like: Tensor) -> Tensor:
    """The outputs ``[*event]`` with the largest likelihood if they are the same for all data."""
    inner = getattr(likelihood, "inner", likelihood)
    if likelihood.has_noise_scale or isinstance(inner, LearnedGaussian):
        mean, variance = moments(likelihood, targets)
        return torch.cat([mean, variance.clamp_min(1e-30).log()], -1) if isinstance(inner, LearnedGaussian) else mean
    start = like.flatten(0, 1).mean(0).detach()
    with torch.enable_grad():
        c = start.clone().requires_grad_()
        search = torch.optim.LBFGS([c], max_iter=100, tolerance_grad=1e-7, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            search.zero_grad()
            # classes that never occur have no finite optimum
            loss = likelihood.nll(c.expand(n, *event), targets).mean() + 1e-6 * (c - start).square().sum()
            loss.backward()
            return loss

        search.step(closure)
    return c.detach()


def dispersion(likelihood: Likelihood, folds: Sequence[Fold]) -> tuple[float, float]:
    """Of counts, the mean of ``(y - mean)^2 / variance`` on the folds, and the standard error that it has of counts as they are
    promised, by 50 draws of each; that of the targets themselves is as large as what it is to show. 1 and 0 for others."""
    support, parts = likelihood.support, list[Tensor]()
    if support is None or not support.is_discrete or support.high < math.inf:
        return 1.0, 0.0
    for fold in folds:
        p = likelihood.mixture(fold.outputs)
        drawn = p.sample(50, generator=torch.Generator(fold.outputs.device).manual_seed(0))
        both = torch.cat([likelihood.labels(fold.targets)[None].to(drawn), drawn])
        ratio = ((both - p.mean).square() / p.variance.clamp_min(1e-12)).reshape(*both.shape[:2], -1)
        parts.append(ratio[:, weights_of(likelihood, fold.targets) > 0])
    both = torch.cat(parts, 1)
    return float(both[0].mean()), float(both[1:].std() / both.shape[1] ** 0.5)
