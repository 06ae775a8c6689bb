r"""Do minibatches heat this chain: an answer from the gradients and parameters that pass by anyway.

The gradient of a batch is ``g_t = G(theta_t) + n_t``, ``G`` the gradient of all data and ``n_t`` the noise of the batch, of
covariance ``C``. With the displacement ``d_t = theta_{t+1} - theta_t`` and the Hessian ``H``,

    D_t = g_{t+1} - g_t = H d_t + n_{t+1} - n_t.

What the chain's own move adds, ``H d_t``, is taken out by what is known of it. ``H`` comes from the same window by
instrumental variables, for ``d_t`` holds ``n_t``, and a plain regression would take noise for curvature: the noise that the
chain injected into ``d_t`` knows nothing of ``n_t`` and ``n_{t+1}``, nor does the last displacement ``d_{t-1}``. For a step
``d_t = mu d_{t-1} - lr_eff P (f g_t + (1 - mu - f) g_{t-1}) - noise`` the noise is what the other terms leave. Of the rest

    r_t = D_t - H d_t,        C = - <r_t r_{t+1}> = <r_t^2> / 2,

so that a full batch reads no heat at any stable learning rate, without a second gradient or an epoch. Where noise in many
directions drowns the chain's own move, the window's ``H`` is made of that noise: if ``H d_t`` leaves no less of the differences
of rows that it was not learned from, it is not taken out.

Heat is ``rho = lr_eff C / (2 T)``, ``lr_eff = F(1)``: the share of the noise budget ``2 T / lr_eff`` that the batches spend.
With ``y = lr k`` for the curvature ``k``, what it adds to the variance depends on the order of the batches:

* independent batches: ``rho / (1 - y / (2 (1 + mu)))``, relative to ``T / k``;
* reshuffled epochs of ``K`` steps, whose noise sums to zero: less, :func:`reshuffled_excess`.

Where the rate changes from step to step, all gradients of a window keep the scale of its first step, and ``C`` is assumed to
be the same throughout. ``rho`` is linear in the rate. A direction of curvature ``k`` obeys, at the rate ``r(t) = lr_eff``,
``Var' = -2 r k Var + 2 r T + r^2 C``. If it forgets slowly against a window, the excess is that of the mean of the rates
weighted by the rates, ``rho = <r^2> C / (2 <r T>)``: steps at a small rate hardly move the chain. Where a schedule is slow
against the chain, each window reads the heat of its own time.

Nothing like a gradient is stored: a window of consecutive steps keeps ``S g`` and ``S theta``, where ``S`` gives each element
a random sign and adds up elements in ``B = 256`` buckets, so that inner products come out right in the mean (Charikar, Chen and
Farach-Colton, 2002). The variance along a direction of buckets has a share of all others: of ``n`` elements

    E[q' S C S' q] = variance along q + (1 - B / n) tr(C) / B,

and ``tr(C)`` is minus the sum over all buckets of ``<D_t D_{t+1}>``. Where ``tr(C) / n``, the mean over all directions, is more
than what is left, it is the reading. Directions and ``H`` come from three quarters of the window and are judged in the fourth,
in turn, so that chance is not taken for heat.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from bayesopt_chain._torch import foreach_norm

BUCKETS = 256
CHUNK = 2**16  # elements that are signed at a time: what the signed copy needs stays in cache
DEFERRED = 2**11  # elements of a model up to which a step stores them all
FOLDS = 4  # quarters of a window
LAGS = (3, 4, 5)  # at which second differences of white noise are uncorrelated
DIRECTIONS = 2  # of the noisiest, and of those in which the gradient changes most


class Leaf(NamedTuple):
    """A leaf as the guard sees it in one step.

    Attributes:
        gradient: of the loss, before anything is done to it.
        param: the parameter that it belongs to, before the step.
        scale: ``sqrt(lr_eff P / (2 T))``, a number or a tensor like the gradient; negative where the loss is climbed.
        temperature: ``T``.
        momentum: ``mu`` of the chain.
        first: ``f``, the share of ``lr_eff`` that a gradient moves in its own step; ``None``: ``1 - mu``.
        number: by which the leaf is known in the next step; ``None``: its parameter is the same object then.
        rate: ``lr_eff`` without ``P``, in any unit that stays the same from step to step.
        lr: the learning rate, for the advice; ``None`` where it is not known.
        group: the parameter group that the leaf belongs to.
    """

    gradient: Tensor
    param: Tensor
    scale: float | Tensor
    temperature: float
    momentum: float
    first: float | None = None
    number: int | None = None
    rate: float = 1.0
    lr: float | None = None
    group: int = 0

    @property
    def known_by(self) -> int:
        """The same in every step."""
        return id(self.param) if self.number is None else self.number


class Heat(NamedTuple):
    """What one window says.

    Attributes:
        rho: share of the noise budget that the batches spend in the worst direction that was found; 0 for full batches.
        standard_error: of ``rho``, from eight parts of the window.
        own: what the chain's own move adds to half the variance of ``D_t``, in the units of ``rho``.
        curvature: ``y = lr k`` in that direction, as far as the window knows it; 0 where it does not.
        excess: what the batches add to the variance in that direction, relative to ``T / k``.
        order: the law that ``excess`` follows, ``"independent"`` or ``"reshuffled"``.
        same_norm: share of steps whose gradient has the median norm, as by a clip that always acts: of all parameters, of one
            group or of one parameter, whichever is the largest.
        ringing: autocorrelations of the differences of what is left at lags 3, 4 and 5, in absolute value, added up. The noise
            of batches has none but for chance; an oscillation of the chain that the Hessian of the window does not explain has.
    """

    rho: float
    standard_error: float
    own: float
    curvature: float
    excess: float
    order: str
    same_norm: float
    ringing: float = 0.0


def reshuffled_excess(rho: float, steps_per_epoch: int, momentum: float, curvature: float | None = None) -> float:
    """Excess of the variance by reshuffled batches, mean over an epoch.

    The recursion is that of the position and velocity over an epoch whose noises, of covariance ``C (1 - 1/K)`` each, sum to
    zero.

    Args:
        rho: as in :class:`Heat`; differences of gradients read ``C``, that of draws with replacement, in epochs too.
        steps_per_epoch: ``K``.
        momentum: ``mu``, in [0, 1).
        curvature: ``y = lr k``; ``None`` takes that of a well-specified model, ``C = K T k`` and so ``rho = K lr_eff k / 2``.

    Returns:
        The excess relative to ``T / k``: 0 for one step an epoch, infinity where the chain is not stable.

    Example:
        >>> round(reshuffled_excess(0.5, 50, 0.9), 2)  # where independent batches add 50 %
        0.09
    """
    K, mu = steps_per_epoch, momentum
    if rho <= 0.0 or K < 2:
        return 0.0
    y = 2.0 * rho * (1.0 - mu) / K if curvature is None else curvature
    if y >= 2.0 * (1.0 + mu):
        return math.inf
    push = 2.0 * rho * (1.0 - mu) * y  # lr^2 C in units of T / k
    a, b, c, d = 1.0 - y, -mu, y, mu  # (theta, lr mu v) after a step

    def moved(sxx: float, sxv: float, svv: float) -> tuple[float, float, float]:
        return (
            a * a * sxx + 2 * a * b * sxv + b * b * svv,
            a * c * sxx + (a * d + b * c) * sxv + b * d * svv,
            c * c * sxx + 2 * c * d * sxv + d * d * svv,
        )

    own, (x, v), added = (0.0, 0.0, 0.0), (0.0, 0.0), list[tuple[float, float, float]]()
    for _ in range(K):  # the covariance of noises that sum to zero is that of free ones less their mean's
        own = tuple(s + push * e for s, e in zip(moved(*own), (1.0, -1.0, 1.0)))
        x, v = a * x + b * v - 1.0, c * x + d * v + 1.0
        added.append((own[0] - push * x * x / K, own[1] - push * x * v / K, own[2] - push * v * v / K))
    step = torch.tensor([[a, b], [c, d]], dtype=torch.float64, device="cpu")
    epoch = torch.linalg.matrix_power(step, K)
    last = torch.tensor([[added[-1][0], added[-1][1]], [added[-1][1], added[-1][2]]], dtype=torch.float64, device="cpu")
    start = torch.linalg.solve(
        torch.eye(4, dtype=torch.float64, device="cpu") - torch.kron(epoch, epoch), last.reshape(4)
    )
    held, total = (float(start[0]), float(start[1]), float(start[3])), 0.0
    for more in added:
        held = moved(*held)
        total += held[0] + more[0]
    return total / K


def read_heat(
    gradients: Tensor,
    positions: Tensor,
    momentum: float,
    *,
    first: float | None = None,
    steps_per_epoch: int | None = None,
    order: str = "reshuffled",
    rates: Tensor | None = None,
    temperatures: Tensor | None = None,
    elements: int | None = None,
) -> Heat:
    """What a window of consecutive gradients says of the batches' heat.

    Args:
        gradients: ``[steps, buckets]``, float64: sketches of ``s g`` with ``s = sqrt(lr_eff P / 2 T)``, or the vectors
            themselves.
        positions: likewise of ``theta / (2 T s)``, before each step.
        momentum: of the chain.
        first: share of ``lr_eff`` that a gradient moves in its own step (default: ``1 - momentum``); NaN where the leaves
            differ, so that the chain's noise cannot be told from its displacements.
        steps_per_epoch: where known, the law of reshuffled epochs is used for ``excess``.
        order: of the batches, ``"reshuffled"`` or ``"independent"``.
        rates: ``[steps]``: ``lr_eff`` of each step over that in ``s``; ``None``: constant.
        temperatures: likewise of ``T``.
        elements: how many elements that are not zero were added up in 256 buckets; ``None``: at most one in each.

    Returns:
        :class:`Heat`, without ``same_norm``.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> noise, still = torch.randn(97, 5, dtype=torch.float64, generator=generator), torch.zeros(97, 5).double()
        >>> 0.5 < read_heat(noise, still, 0.9).rho < 1.5  # noise alone, of variance 1 in every direction
        True
    """
    first = 1.0 - momentum if first is None else first
    gradients, positions = gradients.cpu(), positions.cpu()
    rates, temperatures = (None if x is None else x.cpu() for x in (rates, temperatures))
    rho, error, own, curvatures, ringing = _worst(gradients, positions, momentum, first, rates)
    if elements is not None and elements > BUCKETS:
        D = gradients.diff(dim=0)
        totals = -(D[1:] * D[:-1]).sum(1)  # of the noise in all directions
        mean, its_error = (x / elements for x in _mean_and_error(totals))
        rho -= max(float(totals.mean()), 0.0) * (1.0 / BUCKETS - 1.0 / elements)
        if mean > rho:  # the worst direction has at least the mean of all
            rho, error = mean, its_error
    if rates is not None:
        budget = rates if temperatures is None else rates * temperatures
        mean, weighted = float(rates.mean()), float(rates.square().mean())
        rho, error, own = (x * weighted / float(budget.mean()) for x in (rho, error, own))
        curvatures = [y * weighted / mean for y in curvatures]
    heat, limit = max(rho, 0.0), 2.0 * (1.0 + momentum)
    least, middle = (min(max(y, 0.0), 0.95 * limit) for y in (min(curvatures), statistics.median(curvatures)))
    # near the stability limit the law of independent batches amplifies what a fold errs by, that of epochs does nowhere
    y = least if order == "independent" or steps_per_epoch is None else middle
    if order == "independent" or steps_per_epoch is None:
        return Heat(rho, error, own, y, heat / (1.0 - y / limit), "independent", 0.0, ringing)
    specified = 2.0 * heat * (1.0 - momentum) / max(steps_per_epoch, 1)
    excess = reshuffled_excess(heat, steps_per_epoch, momentum, max(y, specified))
    return Heat(rho, error, own, y, excess, "reshuffled", 0.0, ringing)


def _worst(
    G: Tensor, X: Tensor, mu: float, first: float, rates: Tensor | None = None
) -> tuple[float, float, float, list[float], float]:
    """``rho``, its standard error, the chain's own move, ``y`` of every fold, and the ringing.

    Directions and Hessian come from all folds but one, and are judged on that one, in turn. All folds are worked out in one
    batch, in which a fold knows its rows by weights of 0 and 1: ``[folds, rows]``.
    """
    d, D = X.diff(dim=0), G.diff(dim=0)
    noise = torch.zeros_like(d)
    if rates is None:
        noise[1:] = mu * d[:-1] - d[1:] - first * G[1:-1] - (1 - mu - first) * G[:-2]
    else:
        now, before = rates[1:-1, None], rates[:-2, None]
        noise[1:] = now / before * mu * d[:-1] - d[1:] - now * (first * G[1:-1] + (1 - mu - first) * G[:-2])
    # the instruments, which n_t and n_{t+1} do not touch
    last, injected = d.roll(1, 0), d.roll(2, 0) if math.isnan(first) else noise
    cuts = [round(len(D) * i / FOLDS) for i in range(FOLDS + 1)]
    weights, beside = _others(cuts)
    Q, has = _directions(D, weights, beside)
    Dq, dq = D @ Q, d @ Q  # [folds, rows, directions]
    H = _hessians(Dq, dq, torch.cat([last @ Q, injected @ Q], 2), weights, has)
    judged = [slice(begin, end) for begin, end in pairwise(cuts)]
    left = Dq - dq @ H.mT
    sizes = torch.tensor(
        [[float(x[i, fold].square().sum()) for x in (left, Dq)] for i, fold in enumerate(judged)], device="cpu"
    )
    H = H * (sizes[:, 0] < sizes[:, 1])[:, None, None]
    left = Dq - dq @ H.mT
    q = _noisiest(left, beside, 1, has)
    move, rest = (dq @ H.mT @ q)[..., 0], (left @ q)[..., 0]
    parts = [rest[i, fold] for i, fold in enumerate(judged)]
    own = torch.cat([move[i, fold] for i, fold in enumerate(judged)]).square().mean() / 2
    curvatures = ((q.mT @ H @ q).flatten() * (1 - mu)).tolist()
    zero, one = torch.cat([r * r / 2 for r in parts]), torch.cat([-r[1:] * r[:-1] for r in parts])
    # where the rest is the noise of batches and little else, its variance is the sharper reading
    series = zero if float(one.mean()) > 0.7 * float(zero.mean()) else one
    again = [r.diff() for r in parts]  # in which a slow swing, which hides heat and makes none, is small
    square = max(float(torch.cat(again).square().mean()), 1e-300)
    ringing = sum(abs(float(torch.cat([r[k:] * r[:-k] for r in again]).mean())) for k in LAGS) / square
    return *_mean_and_error(series), float(own), curvatures, ringing


def _mean_and_error(series: Tensor) -> tuple[float, float]:
    """The mean, and its standard error from eight parts."""
    chunks = series[: len(series) // 8 * 8].reshape(8, -1).mean(1)
    return float(series.mean()), float(chunks.std()) / math.sqrt(8)


def _others(cuts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The rows outside of each fold, and the pairs of consecutive ones: weights of 0 and 1, ``[folds, rows]``, one row less.

    The first two rows have no instruments, and a row beside the fold shares a gradient with it.
    """
    weights = torch.zeros(len(cuts) - 1, cuts[-1], dtype=torch.float64, device="cpu")
    for fold, (begin, end) in enumerate(pairwise(cuts)):
        for part in (slice(2, max(begin - 1, 2)), slice(end + 1, cuts[-1])):
            if part.stop - part.start > 6:
                weights[fold, part] = 1.0
    return weights, weights[:, 1:] * weights[:, :-1]


def _directions(D: Tensor, weights: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
    """A basis of the directions with the largest ``- <D_t D_{t+1}>`` and the largest ``<D_t^2>``, by the rows of each fold.

    Returns:
        ``[folds, buckets, m]``, and ``[folds, m]``: whether a direction is one; those that are none are zero.
    """
    span = torch.linalg.qr(D.T)[0] if D.shape[1] > D.shape[0] else None  # which holds all differences
    rows = (D if span is None else D @ span) * weights[..., None]
    noisiest = _noisiest(rows, beside, DIRECTIONS)
    largest = torch.linalg.eigh(rows.mT @ rows)[1][..., -DIRECTIONS:].flip(-1)
    basis, sizes, _ = torch.linalg.svd(torch.cat([noisiest, largest], 2), full_matrices=False)
    has = sizes > 0.1
    basis = basis * has[:, None]
    return basis if span is None else span @ basis, has


def _noisiest(r: Tensor, beside: Tensor, n: int, has: Tensor | None = None) -> Tensor:
    """The ``n`` directions with the largest ``- <r_t r_{t+1}>``, the largest first: ``[folds, m, n]``.

    Args:
        r: ``[folds, rows, m]``.
        beside: which pairs of consecutive rows count.
        n: how many.
        has: ``[folds, m]``: the coordinates that may be looked at; ``None``: all.
    """
    lagged = (r[:, :-1] * beside[..., None]).mT @ r[:, 1:]
    lagged = lagged + lagged.mT
    if has is not None:
        lagged = lagged + torch.diag_embed((~has).double() * (1.0 + lagged.abs().sum((1, 2), keepdim=True)[..., 0]))
    return torch.linalg.eigh(lagged)[1][..., :n]


def _hessians(D: Tensor, d: Tensor, known: Tensor, weights: Tensor, has: Tensor) -> Tensor:
    """``H`` of ``D_t = H d_t + ...``, by two-stage least squares with instruments that know nothing of the batches' noise.

    Where the instruments say little of ``d_t``, it is made of the batches' noise, which the second stage would take for
    curvature: ``H`` is shrunk by the F statistic of the first.
    """
    D, d, known = (x * weights[..., None] for x in (D, d, known))
    fitted = known @ torch.linalg.lstsq(known, d, driver="gelsd").solution
    explained, left = fitted.square().sum((1, 2)), (d - fitted).square().sum((1, 2))
    instruments = 2.0 * has.sum(1)
    freedom = (weights.sum(1) - instruments).clamp(min=1.0)
    strength = explained * freedom / (left * instruments).clamp(min=1e-300)
    H = torch.linalg.lstsq(fitted, D, driver="gelsd").solution.mT
    return H * ((strength - 1.0) / 3.0).clamp(0.0, 1.0)[:, None, None]


def _signs(n: int, leaf: int, device: torch.device) -> Tensor:
    """``n`` signs, int8: a bit of a hash of the element's number and the leaf's (the finaliser of MurmurHash3).

    No generator is asked, so that a guarded step draws what an unguarded one draws.
    """
    out = torch.empty(n, dtype=torch.int8, device=device)
    for at in range(0, n, CHUNK):
        x = torch.arange(at, min(at + CHUNK, n), device=device) + (leaf + 1) * 0x9E3779B1
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
        out[at : at + CHUNK] = ((x ^ (x >> 16)) & 1) * 2 - 1
    return out


class Row(NamedTuple):
    """What a window keeps of one step.

    Attributes:
        gradient: ``S s g``, ``[buckets]``; of a small model all elements of ``g``.
        param: ``S theta / (2 T s)``; of a small model all elements of ``theta``.
        norms: of the gradient of each leaf; ``None`` where all elements are kept.
        scales: of each leaf ``s``, where all elements are kept.
        sizes: of each leaf ``1 / (2 T s)``, likewise.
    """

    gradient: Tensor
    param: Tensor
    norms: Tensor | None
    scales: list[float | Tensor] = []  # noqa: RUF012
    sizes: list[float | Tensor] = []  # noqa: RUF012


class Sketch:
    """``S``: random signs, one byte an element while a window is open, and 256 buckets.

    Of a small model a step stores all elements, which are scaled, signed and added up when the window closes: that asks for
    far fewer operations a step, whose overhead is what a small model costs.
    """

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.signs = [_signs(leaf.gradient.numel(), i, leaf.gradient.device) for i, leaf in enumerate(leaves)]
        # leaves are laid end to end, so that a step asks for few operations
        small = [i for i, signs in enumerate(self.signs) if len(signs) < CHUNK // 2]
        self.packs = [[i] for i in range(len(leaves)) if i not in {*small}]
        for i in small:
            last = self.packs[-1] if self.packs and self.packs[-1][0] in small else None
            if last is None or sum(len(self.signs[j]) for j in last) + len(self.signs[i]) > CHUNK:
                self.packs.append([i])
            else:
                last.append(i)
        self.packed = [torch.cat([self.signs[i] for i in pack]) if len(pack) > 1 else None for pack in self.packs]
        devices = {signs.device for signs in self.signs}
        self.is_deferred = len(devices) == 1 and sum(map(len, self.signs)) <= DEFERRED

    def __call__(self, leaves: Sequence[Leaf]) -> Row:
        """What a window keeps of one step.

        Args:
            leaves: those that the sketch was made for, in this order.
        """
        gradients, params = [leaf.gradient for leaf in leaves], [leaf.param for leaf in leaves]
        scales = [leaf.scale for leaf in leaves]
        sizes = [0.5 / (leaf.temperature * abs(leaf.scale)) for leaf in leaves]
        if self.is_deferred:
            return Row(_laid(gradients), _laid(params), None, scales, sizes)
        g, x = list[Tensor](), list[Tensor]()
        for pack, signs in zip(self.packs, self.packed):
            first = self.signs[pack[0]]
            g.append(_added([gradients[i] for i in pack], [scales[i] for i in pack], signs, first))
            x.append(_added([params[i] for i in pack], [sizes[i] for i in pack], signs, first))
        return Row(sum(g[1:], g[0]), sum(x[1:], x[0]), torch.stack(foreach_norm(gradients)))

    def finished(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor]:
        """What the rows of a window say, in float64 on the CPU.

        Returns:
            ``S s g`` and ``S theta / (2 T s)``, ``[steps, buckets]``; the norm of each leaf's gradient, ``[steps, leaves]``.
        """
        g, x = (torch.stack(tensors).double().cpu() for tensors in zip(*[(row.gradient, row.param) for row in rows]))
        if not self.is_deferred:
            return g, x, torch.stack([row.norms for row in rows if row.norms is not None]).double().cpu()
        signs = torch.cat(self.signs).cpu()
        norms = torch.stack([part.norm(dim=1) for part in g.split([*map(len, self.signs)], 1)], 1)
        return (
            _folded(g * self._spread([row.scales for row in rows]) * signs),
            _folded(x * self._spread([row.sizes for row in rows]) * signs),
            norms,
        )

    def _spread(self, scales: Sequence[list[float | Tensor]]) -> Tensor:
        """The factors of each step's leaves, laid out as the elements are: ``[steps, elements]``, or one row for all steps."""
        counts = [*map(len, self.signs)]
        if any(isinstance(scale, Tensor) for step in scales for scale in step):
            return torch.stack(
                [torch.cat([_of_elements(*leaf) for leaf in zip(step, counts)]) for step in scales]
            ).double()
        distinct = scales if any(step != scales[0] for step in scales) else scales[:1]
        return torch.tensor(distinct, dtype=torch.float64, device="cpu").repeat_interleave(
            torch.tensor(counts, device="cpu"), dim=1
        )


def _of_elements(scale: float | Tensor, n: int) -> Tensor:
    """A factor for each of ``n`` elements."""
    return torch.as_tensor(scale, device="cpu").detach().flatten().expand(n)


def _laid(tensors: list[Tensor]) -> Tensor:
    """A copy of all elements, laid end to end."""
    return torch.cat([x.detach().flatten() for x in tensors])


def _added(tensors: list[Tensor], scales: list[float | Tensor], packed: Tensor | None, signs: Tensor) -> Tensor:
    """Scale, sign, and add up by buckets."""
    if packed is not None:
        flat = [x.detach().flatten() for x in tensors]
        equal = all(not isinstance(s, Tensor) and s == scales[0] for s in scales)
        flat = flat if equal else [x * (s.flatten() if isinstance(s, Tensor) else s) for x, s in zip(flat, scales)]
        total = _folded(torch.cat(flat) * packed)
        return total * scales[0] if equal else total
    x, scale = tensors[0].detach().reshape(-1), scales[0]
    each = scale.reshape(-1) if isinstance(scale, Tensor) and scale.ndim > 0 else None
    total = torch.zeros(BUCKETS, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32, device=x.device)
    for at in range(0, len(x), CHUNK):
        part = x[at : at + CHUNK] * signs[at : at + CHUNK]
        total += _folded(part if each is None else part * each[at : at + CHUNK])
    return total * scale if each is None else total


def _folded(x: Tensor) -> Tensor:
    """``[..., n]`` added up by ``n mod 256``."""
    x = x if x.dtype == torch.float64 else x.float()
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % BUCKETS)).unflatten(-1, (-1, BUCKETS)).sum(-2)
