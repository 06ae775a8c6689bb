r"""Which inputs to ask targets of next: what they would say, together, about the model or about other targets.

For draws f_s of the outputs with weights w_s, and labels y that are independent given a draw,

    BALD         I(y; theta) = H[sum_s w_s p_s] - sum_s w_s H[p_s]                   ``predictive.epistemic``
    BatchBALD    I(y_1 .. y_b; theta), by the chain rule a sum of gains              greedy, at most 1 - 1/e from the best batch
                 I(y; theta | y_1 .. y_b) = E_{y_1 .. y_b} H[sum_s w_s(y_1 .. y_b) p_s] - sum_s w_s H[p_s]
                 w_s(y_1 .. y_b) ~ w_s p_s(y_1) .. p_s(y_b): the draws reweighted by Bayes' rule
    EPIG         E_{x*} I(y; y*),    p(y, y*) = sum_s w_s p_s(y) p_s(y*)

and for Gaussian outputs with the joint covariance K, and a root S of the likelihood's Hessian in them (1 / sd of Gaussian
noise),

    D-optimal    log |1 + S^T K S| / 2 over the batch: I(y; theta) where noise is Gaussian, greedy by a pivoted Cholesky factor.

(Houlsby et al., 2011; Kirsch, van Amersfoort and Gal, 2019; Bickford Smith et al., 2023; the bound: Nemhauser et al., 1978.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.likelihoods import Outputs, Predictive

AT_ONCE = 2**24  # probabilities of labels held at once

PREDICTIVE = checks.instance(Predictive, "a Predictive, such as draws.predictive or fitted.predictive returns")


class Acquired(NamedTuple):
    """A batch of inputs.

    Attributes:
        indices: of the pool, ``[count]`` int64, in the order in which they were chosen.
        gains: what each adds to those before it, ``[count]``, in nats; their sum is the information of the batch.
    """

    indices: Tensor
    gains: Tensor


@checks.takes(pool=PREDICTIVE, count=checks.WHOLE, configurations=checks.WHOLE)
def batch_bald(
    pool: Predictive, count: int, *, configurations: int = 10_000, generator: torch.Generator | None = None
) -> Acquired:
    """The inputs whose labels together say most about the model, chosen one after the other (BatchBALD).

    Args:
        pool: of N inputs, over draws that belong together across inputs: ``draws.predictive(forward, pool, likelihood)``, or of
            a Laplace fit ``fitted.likelihood.mixture(fitted.functional_samples(pool))``; one label a datum, of classes.
        count: how many to choose, at most N.
        configurations: labels of the chosen inputs are enumerated up to this many combinations, and beyond them drawn.
            Default 10,000.
        generator: of these draws. Default: torch's global generator.

    Returns:
        :class:`Acquired`. Exact for the draws at hand while ``C^count`` is at most ``configurations``, otherwise an estimate.

    Raises:
        ValueError: Gaussian outputs, targets that are no classes, several labels a datum, predictions that are NaN or infinite,
            or ``count`` above N.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> logits = torch.tensor([[5.0, 5.0, 1.0], [-5.0, -5.0, 1.0], [5.0, 5.0, -1.0], [-5.0, -5.0, -1.0]])[..., None]
        >>> pool = bc.likelihoods.bernoulli().mixture(logits)  # the first two are asked the same question
        >>> bc.posterior.batch_bald(pool, 2).indices
        tensor([0, 2])
    """
    p, w = _probabilities(pool, "batch_bald", "pool")
    _require_count("batch_bald", count, p.shape[1])
    noise = _entropy(p).mT @ w  # [N]
    mass, posterior = p.new_ones(1), w[None]  # of the label configurations; of the draws given each
    free, indices, gains = torch.ones(p.shape[1], dtype=torch.bool, device=p.device), [], []
    for _ in range(count):
        some = max(1, AT_ONCE // (len(mass) * p.shape[2]))
        given = [mass @ _entropy(torch.einsum("ms,snc->mnc", posterior, part)) for part in p.split(some, 1)]
        gain = torch.where(free, torch.cat(given) - noise, -torch.inf)
        best = gain.argmax()
        indices.append(best)
        gains.append(gain[best])
        free[best] = False
        label = posterior @ p[:, best]  # [M, C]
        if label.numel() <= configurations:
            mass, posterior = (mass[:, None] * label).flatten(), posterior[:, None] * p[:, best].mT
        else:
            seen = torch.multinomial((mass[:, None] * label).flatten(), configurations, True, generator=generator)
            before, drawn = seen // p.shape[2], seen % p.shape[2]
            mass, posterior = p.new_full((len(seen),), 1 / len(seen)), posterior[before] * p[:, best].mT[drawn]
        posterior = posterior.reshape(-1, len(w))
        posterior = posterior / posterior.sum(1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)
    return Acquired(torch.stack(indices), torch.stack(gains))


@checks.takes(pool=PREDICTIVE, targets=PREDICTIVE)
def epig(pool: Predictive, targets: Predictive) -> Tensor:
    """How much the label of each input would say about labels that shall be predicted (expected predictive information gain).

    Args:
        pool: of N inputs, over draws, as for :func:`batch_bald`.
        targets: of M inputs of the kind that is to be predicted, over the same draws: ``draws.predictive`` of both, or
            ``functional_samples`` of both together (or with generators of one seed).

    Returns:
        ``[N]``, in nats: the mean over the M inputs of the mutual information of both labels.

    Raises:
        ValueError: as :func:`batch_bald`; other numbers of draws.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> logits = torch.tensor([[4.0, 0.0, 4.0], [-4.0, 0.0, -4.0]])[..., None]
        >>> of = bc.likelihoods.bernoulli().mixture
        >>> bc.posterior.epig(of(logits[:, :2]), of(logits[:, 2:]))
        tensor([0.5404, 0.0000])
    """
    p, w = _probabilities(pool, "epig", "pool")
    q, v = _probabilities(targets, "epig", "targets")
    if w.shape != v.shape or not torch.allclose(w, v.to(w)):
        raise ValueError(
            f"epig: pool and targets must be over the same draws, got {len(w)} and {len(v)}: predict both with the same draws"
        )
    some = max(1, AT_ONCE // (q.shape[1] * q.shape[2] * p.shape[2]))
    joint = [
        _entropy(torch.einsum("s,snc,smd->nmcd", w, part, q.to(p)).flatten(2)).mean(1) for part in p.split(some, 1)
    ]
    alone = [_entropy(torch.einsum("s,snc->nc", w, x.to(p))) for x in (p, q)]
    return (alone[0] + alone[1].mean() - torch.cat(joint)).clamp_min(0)


@checks.takes(pool=PREDICTIVE, count=checks.WHOLE)
def d_optimal(pool: Predictive, count: int) -> Acquired:
    """The inputs whose targets together shrink the outputs' covariance most, chosen one after the other.

    With Gaussian noise it is the information of the targets about the model; with another likelihood that of its quadratic
    approximation at the predicted outputs.

    Args:
        pool: ``fitted.predictive(pool, joint=True)``.
        count: how many to choose, at most N.

    Returns:
        :class:`Acquired`.

    Raises:
        ValueError: outputs that are not jointly Gaussian, NaN or infinite ones, or ``count`` above N.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> x = torch.linspace(-1, 1, 5)[:, None]
        >>> fitted = bc.fit_laplace(torch.nn.Linear(1, 1).eval(), bc.likelihoods.gaussian(1.0), [(x, x)], tune=None)
        >>> bc.posterior.d_optimal(fitted.predictive(x, joint=True), 2).indices.sort().values  # the ends of a line
        tensor([0, 4])
    """
    if not isinstance(pool.outputs, Outputs) or not pool.outputs.is_joint:
        raise ValueError(
            "d_optimal: pool must have jointly Gaussian outputs: pass fitted.predictive(inputs, joint=True)"
        )
    mean, covariance = pool.outputs
    _require_count("d_optimal", count, len(mean))
    checks.finite_data(
        "d_optimal: pool: predictions", torch.cat([mean.flatten(1), pool.outputs.variance.flatten(1)], 1)
    )
    root = pool.likelihood.root(mean, None)
    s = root.part(0, root.columns).flatten(2).transpose(0, 1)  # [N, K, E]
    white = torch.einsum("nke,nemf,mlf->nkml", s, covariance.reshape(*s.shape[::2], *s.shape[::2]), s)
    blocks = white.diagonal(dim1=0, dim2=2).permute(2, 0, 1).clone()
    factor, unit = white.new_zeros(*white.shape[:2], 0), torch.eye(s.shape[1], dtype=s.dtype, device=s.device)
    free, indices, gains = torch.ones(len(mean), dtype=torch.bool, device=mean.device), [], []
    for _ in range(count):
        lower = torch.linalg.cholesky(blocks + unit)
        gain = torch.where(free, lower.diagonal(dim1=1, dim2=2).log().sum(1), -torch.inf)
        best = gain.argmax()
        indices.append(best)
        gains.append(gain[best])
        free[best] = False
        column = white[:, :, best] - factor @ factor[best].mT
        new = torch.linalg.solve_triangular(lower[best].mT, column, upper=True, left=False)
        factor, blocks = torch.cat([factor, new], 2), blocks - new @ new.mT
    return Acquired(torch.stack(indices), torch.stack(gains))


def _probabilities(predictive: Predictive, who: str, name: str) -> tuple[Tensor, Tensor]:
    """Of each class under each draw, ``[S, N, C]``, and the draws' weights ``[S]``."""
    if isinstance(predictive.outputs, Outputs):
        raise ValueError(
            f"{who}: {name} has Gaussian outputs, whose labels belong together only in draws: pass "
            "fitted.likelihood.mixture(fitted.functional_samples(inputs))"
        )
    if not predictive.likelihood.has_classes:
        raise ValueError(
            f"{who}: {name} has targets of a {predictive.likelihood.name} likelihood, which are no classes: use d_optimal"
        )
    p = predictive.likelihood.mean(predictive.outputs)
    p = p if predictive.likelihood.support is None else torch.stack([1 - p, p], -1)
    if p.shape[2:-1].numel() != 1:
        raise ValueError(
            f"{who}: {name} has {p.shape[2:-1].numel()} labels a datum: pass predictions of one label each"
        )
    p = p.reshape(*p.shape[:2], -1)
    checks.finite_data(f"{who}: {name}: predictions", p.transpose(0, 1))
    return p, predictive.log_weights.exp().to(p)


def _entropy(p: Tensor) -> Tensor:
    return torch.special.entr(p).sum(-1)


def _require_count(who: str, count: int, data: int) -> None:
    if count > data:
        raise ValueError(f"{who}: count={count} of a pool of {data}: choose at most as many as there are")
