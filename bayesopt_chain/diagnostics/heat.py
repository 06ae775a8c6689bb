r"""The heat of minibatches, from the gradients and parameters of consecutive steps.

The gradient of a batch is ``g_t = G(theta_t) + n_t``, where ``G`` is the gradient of all data and ``n_t`` the noise of the
batch, of covariance ``C``. With the displacement ``d_t = theta_{t+1} - theta_t`` and the Hessian ``H``,

    D_t = g_{t+1} - g_t = H d_t + n_{t+1} - n_t,        r_t = D_t - H d_t,        C = - <r_t r_{t+1}> = <r_t^2> / 2.

``H`` is estimated on the same steps by instrumental variables, because ``d_t`` contains ``n_t``. The instruments are the
displacement before, and the noise that the chain injected: ``d_t = mu d_{t-1} - lr_eff P (f g_t + (1 - mu - f) g_{t-1}) -
noise`` gives it. ``H`` is used only where it explains differences that it was not fitted to.

``rho = lr_eff C / (2 T)`` is the share of the noise budget ``2 T / lr_eff`` that the batches spend. With ``y = lr k`` for the
curvature ``k`` it raises the variance ``T / k`` by the factor ``1 + excess``,

    excess = rho 2 (1 + mu) / (2 (1 + mu) - y)                                          independent batches,

and by less where epochs are reshuffled, whose noise sums to zero (:func:`excess_variance`).

A step is reduced to ``S g`` and ``S theta``, where ``S`` gives the elements random signs and adds them up in ``B = 256``
buckets, so that inner products are right in expectation (Charikar, Chen and Farach-Colton, 2002). The variance along a
direction of the ``n`` elements contains a share of all others there, which is subtracted:

    E[q' S C S' q] = variance along q + (1 - B / n) tr(C) / B.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesopt_chain._torch import flattened
from bayesopt_chain.diagnostics.heating import added

BUCKETS = 256
CHUNK = 2**18  # elements, a multiple of 256, that are laid end to end or weighted at a time
FEW = 4096  # elements up to which a step is copied, and which a full window may read of any model
LEAVES, STRETCHES = 32, 12  # leaves up to which a full window may read all, and stretches that it reads of more
FOLDS = 4  # parts of a window; directions and H of each come from the others
LAGS = (3, 4, 5)  # at which second differences of white noise are uncorrelated
DIRECTIONS = 2  # of the largest noise, and of the largest differences


class Leaf(NamedTuple):
    """One parameter in one step, as the guard needs it.

    Attributes:
        key: by which the parameter is known in every step.
        gradient: of the loss, before any transformation.
        param: the parameter, before the step.
        rate: ``lr_eff`` without the preconditioner.
        temperature: ``T``.
        momentum: ``mu`` of the chain.
        first: ``f``, the share of ``lr_eff`` that a gradient moves in its own step.
        root: ``sqrt(P)``, a number or a tensor like the gradient, negative where the loss is maximised.
        lr: the learning rate, for the advice; ``None`` where it is not known.
    """

    key: int
    gradient: Tensor
    param: Tensor
    rate: float
    temperature: float
    momentum: float
    first: float
    root: float | Tensor = 1.0
    lr: float | None = None


class Heat(NamedTuple):
    """The heat that one window of steps shows.

    Attributes:
        rho: share of the noise budget that the batches spend in the worst direction; of a window that was ended early because
            nothing can be hot, an upper bound.
        standard_error: of ``rho``, from eight parts of the window; infinite for an upper bound.
        own: what the chain's own motion adds to half the variance of ``D_t``, in units of ``rho``.
        curvature: ``y = lr k`` in that direction, as far as the window knows it; 0 where it does not.
        excess: relative increase of the variance in that direction.
        drift: mean gradient of the first half times that of the second, over its standard deviation at rest.
        ringing: autocorrelations of the differences of ``r_t`` at lags 3, 4 and 5, in absolute value, added up. The noise of
            batches has none but for chance, 0.3 +- 0.15; an oscillation that the estimated ``H`` does not explain has.
        end: the step at which the window ended.
    """

    rho: float
    standard_error: float
    own: float
    curvature: float
    excess: float
    drift: float
    ringing: float
    end: int = 0


def excess_variance(rho: float, momentum: float, curvature: float, steps_per_epoch: int | None = None) -> float:
    """Relative increase of the variance by the noise of batches, mean over an epoch.

    A direction ``x = (theta, lr v)`` follows ``x' = M x - (1, -1) lr n``,  ``M = ((1 - y, -mu), (y, mu))``, and the noise
    ``n`` of a reshuffled epoch of ``K`` steps sums to zero (:mod:`bayesopt_chain.diagnostics.heating`); its variance is
    ``lr^2 C = 2 rho (1 - mu) y`` in units of ``T / k``.

    Args:
        rho: as in :class:`Heat`, of draws with replacement.
        momentum: ``mu``, in [0, 1).
        curvature: ``y = lr k``, at least 0.
        steps_per_epoch: ``K`` of reshuffled epochs. Default: independent batches.

    Returns:
        The excess relative to ``T / k``; infinite where the chain is not stable.

    Example:
        >>> round(excess_variance(0.5, 0.9, 0.002), 2), round(excess_variance(0.5, 0.9, 0.002, 50), 2)
        (0.5, 0.09)
    """
    limit = 2.0 * (1.0 + momentum)
    if curvature >= limit:
        return math.inf
    if steps_per_epoch is None or curvature <= 0.0:
        return rho * limit / (limit - curvature) if steps_per_epoch is None else 0.0
    M, gamma, C = torch.tensor(
        [
            [1.0 - curvature, -momentum],
            [curvature, momentum],
            [1.0, -1.0],
            [2.0 * rho * (1.0 - momentum) * curvature, 0.0],
        ],
        dtype=torch.float64,
        device="cpu",
    ).split([2, 1, 1])
    return float(added(M, gamma.T, C[:, :1], 0 * C[:, :1], "reshuffled", steps_per_epoch)[0][0, 0])


def read_heat(
    gradients: Tensor,
    positions: Tensor,
    momentum: float,
    first: float,
    *,
    steps_per_epoch: int | None = None,
    rates: Tensor | None = None,
    temperatures: Tensor | None = None,
    elements: int = 0,
) -> Heat:
    """Estimate the heat from a window of consecutive steps.

    Args:
        gradients: ``[steps, buckets]``, float64: sketches of ``s g`` with ``s = sqrt(lr_eff P / 2 T)`` of the first step.
        positions: likewise of ``theta / (2 T s)``, before each step.
        momentum, first: as in :class:`Leaf`.
        steps_per_epoch: of reshuffled epochs; ``None`` for independent batches.
        rates: ``[steps]``, ``lr_eff`` of each step over that of the first. Default: constant.
        temperatures: likewise of ``T``.
        elements: how many elements were added up in the buckets.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> noise, still = torch.randn(97, 5, dtype=torch.float64, generator=generator), torch.zeros(97, 5).double()
        >>> 0.5 < read_heat(noise, still, 0.9, 0.1).rho < 1.5  # noise alone, of variance 1 in every direction
        True
    """
    G, X, mu = gradients, positions, momentum
    r = torch.ones(len(G), dtype=torch.float64, device="cpu") if rates is None else rates
    budget = r if temperatures is None else r * temperatures
    heated = float(r.square().mean() / budget.mean())
    d, D = X.diff(dim=0), G.diff(dim=0)
    span = torch.linalg.qr(D.T)[0]  # which holds all differences
    moves, D = d @ span, D @ span
    now, before = r[1:-1, None], r[:-2, None]
    injected = torch.zeros_like(moves)
    injected[1:] = (now / before * mu * d[:-1] - d[1:] - now * (first * G[1:-1] + (1 - mu - first) * G[:-2])) @ span
    instruments = torch.cat([moves.roll(1, 0), injected], 1)
    rest, own, curvatures = list[Tensor](), list[Tensor](), list[float]()
    for begin, end in pairwise(round(len(D) * i / FOLDS) for i in range(FOLDS + 1)):
        known = torch.ones(len(D), 1, dtype=torch.float64, device="cpu")
        known[:2] = known[max(begin - 1, 0) : end + 1] = 0.0  # a row beside the fold shares a gradient with it
        basis = torch.cat(
            [_noisiest(D, known, DIRECTIONS), torch.linalg.eigh((D * known).T @ D)[1][:, -DIRECTIONS:]], 1
        )
        basis, sizes, _ = torch.linalg.svd(basis, full_matrices=False)
        Q = basis[:, sizes > 0.1]
        Dq, dq = D @ Q, moves @ Q
        H = _hessian(Dq, dq, torch.cat([part @ Q for part in instruments.chunk(2, 1)], 1), known)
        left = Dq - dq @ H.T
        if left[begin:end].square().sum() >= Dq[begin:end].square().sum():
            H, left = torch.zeros_like(H), Dq
        q = _noisiest(left, known, 1)
        rest.append((left[begin:end] @ q)[:, 0])
        own.append((dq[begin:end] @ H.T @ q)[:, 0])
        curvatures.append(float(q.T @ H @ q) * (1 - mu))
    zero, one = torch.cat([x * x / 2 for x in rest]), torch.cat([-x[1:] * x[:-1] for x in rest])
    # where the rest is the noise of batches and little else, its variance is the sharper estimate
    rho, error = _mean_and_error(zero if float(one.mean()) > 0.7 * float(zero.mean()) else one)
    if elements > BUCKETS:
        totals = -(D[1:] * D[:-1]).sum(1)  # of the noise in all directions
        mean, its_error = (x / elements for x in _mean_and_error(totals))
        rho -= max(float(totals.mean()), 0.0) * (1.0 / BUCKETS - 1.0 / elements)
        if mean > rho:  # the worst direction has at least the mean of all
            rho, error = mean, its_error
    rho, error, moved = (heated * x for x in (rho, error, float(torch.cat(own).square().mean()) / 2))
    limit = 2.0 * (1.0 + mu)
    # near the stability limit the law of independent batches amplifies the error of y; that of epochs does nowhere
    y = min(curvatures) if steps_per_epoch is None else sorted(curvatures)[FOLDS // 2]
    y = min(max(float(r.square().mean() / r.mean()) * y, 0.0), 0.95 * limit)
    least = (
        0.0 if steps_per_epoch is None else 2.0 * max(rho, 0.0) * (1.0 - mu) / steps_per_epoch
    )  # a calibrated loss's
    excess = excess_variance(max(rho, 0.0), mu, max(y, least), steps_per_epoch)
    again = [x.diff() for x in rest]  # in which a slow swing, which hides heat and makes none, is small
    square = max(float(torch.cat(again).square().mean()), 1e-300)
    ringing = sum([abs(float(torch.cat([x[k:] * x[:-k] for x in again]).mean())) for k in LAGS]) / square
    return Heat(rho, error, moved, y, excess, _drift(G, elements), ringing)


def _drift(G: Tensor, elements: int) -> float:
    """``h <g>_1 . <g>_2 / sd`` for the halves of a window, of ``h`` steps each.

    At rest ``sqrt(h) <g>`` has in each half at most the covariance ``V = 1 + C`` in these units: the noise of the batches, and
    that which the parameters followed. The product has the variance ``tr V^2``, and ``tr C^2`` is estimated by the squared
    products of differences that share no gradient, ``<(D_s . D_t)^2> = 4 tr C^2``.
    """
    h, D = len(G) // 2, G.diff(dim=0)
    size = max(elements, 1) / min(max(elements, 1), BUCKETS)  # variance of a bucket
    gram = (D @ D.T).square()
    apart = gram.triu(2).sum() / max((len(D) - 1) * (len(D) - 2) / 2, 1)
    own = size * math.sqrt(min(max(elements, 1), BUCKETS))
    return float(h * (G[:h].mean(0) @ G[h : 2 * h].mean(0)) / (own + apart.sqrt() / 2))


def _mean_and_error(series: Tensor) -> tuple[float, float]:
    """The mean, and its standard error from eight parts."""
    chunks = series[: len(series) // 8 * 8].reshape(8, -1).mean(1)
    return float(series.mean()), float(chunks.std()) / math.sqrt(8)


def _noisiest(r: Tensor, known: Tensor, n: int) -> Tensor:
    """The ``n`` directions with the largest ``- <r_t r_{t+1}>`` over the known rows, ``[columns, n]``."""
    lagged = (r[:-1] * known[:-1] * known[1:]).T @ r[1:]
    return torch.linalg.eigh(lagged + lagged.T)[1][:, :n]


def _hessian(D: Tensor, d: Tensor, instruments: Tensor, known: Tensor) -> Tensor:
    """``H`` of ``D_t = H d_t + ...`` by two-stage least squares; 0 where the F statistic of the first stage is at most 1."""
    D, d, instruments = D * known, d * known, instruments * known
    fitted = instruments @ torch.linalg.lstsq(instruments, d, driver="gelsd").solution
    freedom = max(float(known.sum()) - instruments.shape[1], 1.0) / instruments.shape[1]
    strength = float(fitted.square().sum() / (d - fitted).square().sum().clamp(min=1e-300)) * freedom
    H = torch.linalg.lstsq(fitted, D, driver="gelsd").solution.T
    return H * min(max((strength - 1.0) / 3.0, 0.0), 1.0)


class Stretch(NamedTuple):
    """Neighbouring elements of one leaf: a slice of one of its dimensions, or all of it where ``length`` is ``None``."""

    leaf: int
    dim: int = 0
    begin: int = 0
    length: int | None = None

    def of(self, x: Tensor) -> Tensor:
        """The elements in ``x``, without a copy."""
        return x if self.length is None else x.narrow(self.dim, self.begin, self.length)


def loudest(tensors: Sequence[Tensor], factors: Sequence[float | Tensor], elements: int) -> list[Stretch]:
    """The stretches with the largest mean square of ``factor * tensor``: at most ``STRETCHES``, of ``elements`` together.

    Everything, where it is not more than that. One stretch is taken however large it is.
    """
    if len(tensors) <= LEAVES and sum([x.numel() for x in tensors]) <= elements:
        return [Stretch(i) for i in range(len(tensors))]
    found = list[Stretch]()
    for i, x in enumerate(tensors):
        dim = max(range(x.dim()), key=x.shape.__getitem__, default=0)
        parts = min(-(-x.numel() * STRETCHES // elements), x.shape[dim]) if x.dim() else 1
        ends = [x.shape[dim] * k // parts for k in range(parts + 1)] if parts > 1 else []
        found += [Stretch(i, dim, begin, end - begin) for begin, end in pairwise(ends)] or [Stretch(i)]
    scaled = [part.of(tensors[part.leaf]) for part in found]
    if any([isinstance(x, Tensor) for x in factors]):
        each = [torch.as_tensor(factors[part.leaf], device=x.device) for part, x in zip(found, scaled)]
        scaled = [x * (part.of(f) if f.dim() else f) for part, x, f in zip(found, scaled, each)]
        sizes = torch.ones(len(found), device="cpu")
    else:
        sizes = torch.tensor([abs(float(factors[part.leaf])) for part in found], device="cpu")
    norms = sizes * torch.stack([torch.linalg.vector_norm(x.float()).to(scaled[0].device) for x in scaled]).cpu()
    counts = torch.tensor([x.numel() for x in scaled], device="cpu")
    order = (norms / counts.clamp(min=1).sqrt()).argsort(descending=True).tolist()[:STRETCHES]
    room, chosen = elements, list[int]()
    for k in order:
        if not chosen or counts[k] <= room:
            chosen.append(k)
            room -= int(counts[k])
    return [found[k] for k in sorted(chosen)]


class Sketch:
    """``S`` times a factor for each element: 256 buckets, of elements whose numbers are alike modulo 256, with random signs.

    Two elements meet only in a bucket, so that one sign serves 256 neighbours: a sketch is a vector of signs times a matrix of
    256 columns. The signs are bits of a hash of the row's number (with the primes of xxHash32), so that no generator is
    advanced. Small leaves are laid end to end, so that a step takes few operations; of at most ``FEW`` elements a step is
    copied as it is, and all steps of a window are sketched at once.

    Args:
        tensors: of the leaves.
        factors: of each leaf, a number or a tensor like it.
        common: a factor of all.
    """

    def __init__(self, tensors: Sequence[Tensor], factors: Sequence[float | Tensor], common: float = 1.0) -> None:
        self.packs: list[list[int]] = []
        size = 0
        for i, x in enumerate(tensors):
            if not self.packs or size + x.numel() > CHUNK or x.device != tensors[i - 1].device:
                self.packs.append([])
                size = 0
            self.packs[-1].append(i)
            size += x.numel()
        self.is_copied = len(self.packs) == 1 and size <= FEW
        is_common = not any([isinstance(x, Tensor) or x != factors[0] for x in factors])
        self.common = common * factors[0] if is_common else common
        self.signs, self.weights, begin = list[Tensor](), list[Tensor | None](), 0
        for pack in self.packs:
            counts, device = [tensors[i].numel() for i in pack], tensors[pack[0]].device
            end = begin + -(-sum(counts) // BUCKETS)
            self.signs.append(_signs(begin, end, device))
            begin = end
            self.weights.append(None)
            if not is_common:
                given = [torch.as_tensor(factors[i], device=device) for i in pack]
                each = [x.reshape(-1) if x.dim() else x.expand(n) for x, n in zip(given, counts)]
                self.weights[-1] = torch.cat(each)

    def row(self, tensors: Sequence[Tensor]) -> Tensor:
        """What :meth:`read` needs of one step, in new memory."""
        if self.is_copied:
            return torch.cat([x.reshape(-1) for x in tensors])
        dtype = torch.promote_types(tensors[0].dtype, torch.float32)
        total, norms = tensors[0].new_zeros(BUCKETS + 1, dtype=dtype), list[Tensor]()
        for pack, signs, weights in zip(self.packs, self.signs, self.weights):
            x = flattened([tensors[i] for i in pack]).to(dtype)
            norms.append(torch.linalg.vector_norm(x).to(total.device))
            for begin in range(0, len(x), CHUNK):
                part, some = x[begin : begin + CHUNK], signs[begin // BUCKETS : (begin + CHUNK) // BUCKETS].to(dtype)
                part = part if weights is None else part * weights[begin : begin + CHUNK]
                whole = len(part) // BUCKETS
                total[:BUCKETS] += torch.mv(part[: whole * BUCKETS].view(whole, BUCKETS).T, some[:whole]).to(
                    total.device
                )
                if len(some) > whole:
                    total[: len(part) - whole * BUCKETS] += (part[whole * BUCKETS :] * some[-1]).to(total.device)
        total[:BUCKETS] *= self.common
        total[BUCKETS] = norms[0] if len(norms) == 1 else torch.stack(norms).norm()
        return total

    def read(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The buckets ``[steps, 256 or fewer]`` and the norms ``[steps]`` of all tensors, in float64 on the CPU."""
        x = torch.stack([*rows]).double().cpu()
        if not self.is_copied:
            return x[:, :BUCKETS], x[:, BUCKETS]
        norms, weights = torch.linalg.vector_norm(x, dim=1), self.weights[0]
        x = self.common * (x if weights is None else x * weights.cpu())
        if x.shape[1] > BUCKETS:  # fewer elements have a bucket of their own
            x = F.pad(x, (0, -x.shape[1] % BUCKETS)).unflatten(1, (-1, BUCKETS)) * self.signs[0].cpu()[:, None]
            x = x.sum(1)
        return x, norms


def _signs(begin: int, end: int, device: torch.device) -> Tensor:
    """Signs of the rows from ``begin`` to ``end``, float32: a bit of a hash in int32, which wraps around."""
    x = torch.arange(begin, end, device=device).to(torch.int32).mul_(-1640531535)
    x = x.bitwise_xor_(x >> 15).mul_(-2048144777)
    x = x.bitwise_xor_(x >> 13).mul_(-1028477379)
    return (((x >> 16) & 1) * 2 - 1).float()
