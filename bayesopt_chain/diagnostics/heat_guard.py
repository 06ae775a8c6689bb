r"""Do minibatches heat this chain: an answer from the gradients that pass by anyway.

The gradient of a batch is ``g_t = G(theta_t) + n_t``, ``G`` the gradient of all data and ``n_t`` the noise of the batch, of
covariance ``C``. Along one direction,

    D_t = g_{t+1} - g_t = k (theta_{t+1} - theta_t) + n_{t+1} - n_t,        - <D_t D_{t+1}> = C + (the chain's own move).

The chain's own move, ``- k^2 <d_t d_{t+1}> = T k^2 lr (lr k - 1 - mu) / 2`` for the matched chain, is negative up to half
of the stability limit. So full batches read no heat there, without a curvature, a second gradient or an epoch. Beyond half of
the limit the chain's own swing looks like noise, and is taken out by what is known of it: with ``y = lr k``

    w_t = g_{t+1} - (1 + mu - y) g_t + mu g_{t-1} = - y e_t + n_{t+1} - (1 + mu) n_t + mu n_{t-1},

in which the matched noise ``e`` has the known lag-one covariance ``y^2 / 4`` (in the units below), so that

    C = - (<w_t w_{t+1}> - y^2 / 4) / (1 + mu)^2.

``y`` comes from the same gradients by instrumental variables (``g_{t-2}``, without momentum
``g_{t-1}``, knows nothing of the noise in ``w_t``). This reading
is taken where ``y`` explains, on gradients that it was not fitted to, more than 40 % of the swing.
Below a momentum of 0.7 the swing forgets too fast for that, and what it reads at the limit, ``(1 + mu)^3 / (1 - mu)``, is
added to the excess from which the guard warns.

Heat is ``rho = lr_eff C / (2 T)``, ``lr_eff = F(1)``: the share of the noise budget ``2 T / lr_eff`` that the batches spend.
What it adds to the variance depends on the order of the batches:

* independent batches: ``rho``, relative to ``T / k`` (up to ``1 / (1 - lr k / (2 (1 + mu)))``);
* reshuffled epochs of ``K`` steps, whose noise sums to zero: less, :func:`reshuffled_excess`.

Nothing like a gradient is stored: a window of consecutive steps keeps ``S g``, where ``S`` gives each element a random sign and
adds up elements in 256 buckets, so that inner products come out right in the mean (Charikar, Chen and Farach-Colton, 2002). The
worst direction is looked for in three quarters of the window and judged in the fourth, in turn, so that chance is not taken
for heat.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain._torch import foreach_norm

BUCKETS = 256
CHUNK = 2**16  # elements that are signed at a time: what the signed copy needs stays in cache
FOLDS = 4  # quarters of a window
DIRECTIONS = 3  # that the chain's own swing is looked for in
EXPLAINED = 0.6  # of the swing that may be left where the reading without it is taken
WEAK = 0.7  # momentum below which the own swing forgets too fast to be followed
SURE = 3.0  # standard errors of the mean of two windows
SWINGS = 5.0  # by how much more must be found where the chain's own swing had to be taken out
SUM = 1e4  # rho above which the loss is probably a sum over the data and no mean
SAME_NORM = 1e-5  # relative difference below which two gradient norms are one: clipped


class Leaf(NamedTuple):
    """A leaf as the guard sees it in one step.

    Attributes:
        gradient: of the loss, before anything is done to it.
        scale: ``sqrt(lr_eff P / (2 T))``, a number or a tensor like the gradient.
        momentum: of the chain.
    """

    gradient: Tensor
    scale: float | Tensor
    momentum: float


class Heat(NamedTuple):
    """What one window says.

    Attributes:
        rho: share of the noise budget that the batches spend in the worst direction that was found; 0 for full batches.
        standard_error: of ``rho``, from eight parts of the window.
        swings: whether the chain's own swing, of a rate beyond half of the stability limit, was taken out.
        excess: what this adds to the variance in that direction, relative to ``T / k``.
        order: the law that ``excess`` follows, ``"independent"`` or ``"reshuffled"``.
        same_norm: share of steps whose gradient has the median norm, to a relative 1e-5: a clip that always acts.
    """

    rho: float
    standard_error: float
    swings: bool
    excess: float
    order: str
    same_norm: float


def reshuffled_excess(rho: float, steps_per_epoch: int, momentum: float) -> float:
    """Excess of the variance by reshuffled batches, mean over an epoch, in a well-specified model.

    There the noise of a batch is ``C = K T k``, so that ``rho = K lr_eff k / 2`` and the curvature follows from it. The
    recursion is that of the position and velocity over an epoch whose noises, of covariance ``C (1 - 1/K)`` each, sum to zero.

    Args:
        rho: as in :class:`Heat`; differences of gradients read ``C``, that of draws with replacement, in epochs too.
        steps_per_epoch: ``K``.
        momentum: ``mu``, in [0, 1).

    Returns:
        The excess relative to ``T / k``: 0 for one step an epoch, infinity where the chain is not stable.

    Example:
        >>> round(reshuffled_excess(0.5, 50, 0.9), 2)  # where independent batches add 50 %
        0.09
    """
    K, mu = steps_per_epoch, momentum
    if rho <= 0.0 or K < 2:
        return 0.0
    y = 2.0 * rho * (1.0 - mu) / K
    if y >= 2.0 * (1.0 + mu):
        return math.inf
    push = y * y * K  # lr^2 C in units of T / k
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
    step = torch.tensor([[a, b], [c, d]], dtype=torch.float64)
    epoch = torch.linalg.matrix_power(step, K)
    last = torch.tensor([[added[-1][0], added[-1][1]], [added[-1][1], added[-1][2]]], dtype=torch.float64)
    start = torch.linalg.solve(torch.eye(4, dtype=torch.float64) - torch.kron(epoch, epoch), last.reshape(4))
    held, total = (float(start[0]), float(start[1]), float(start[3])), 0.0
    for more in added:
        held = moved(*held)
        total += held[0] + more[0]
    return total / K


def read_heat(rows: Tensor, momentum: float, *, steps_per_epoch: int | None = None, order: str = "reshuffled") -> Heat:
    """What a window of consecutive gradients says of the batches' heat.

    Args:
        rows: ``[steps, buckets]``, float64: sketches of ``sqrt(lr_eff P / 2 T) g``, or the vectors themselves.
        momentum: of the chain.
        steps_per_epoch: where known, the law of reshuffled epochs is used for ``excess``.
        order: of the batches, ``"reshuffled"`` or ``"independent"``.

    Returns:
        :class:`Heat`, without ``same_norm``.

    Example:
        >>> noise = torch.randn(97, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> 0.5 < read_heat(noise, 0.9).rho < 1.5  # noise alone, of variance 1 in every direction
        True
    """
    rho, error, swings = _worst(rows, momentum)
    shuffled = order != "independent" and steps_per_epoch is not None
    heat = max(rho, 0.0)
    excess = reshuffled_excess(heat, steps_per_epoch or 0, momentum) if shuffled else heat
    return Heat(rho, error, swings, excess, "reshuffled" if shuffled else "independent", 0.0)


def _worst(rows: Tensor, mu: float) -> tuple[float, float, bool]:
    """``rho``, its standard error, and whether the chain's own swing was taken out.

    Directions come from all folds but one, and are judged on that one, in turn.
    """
    cuts = [round(len(rows) * i / FOLDS) for i in range(FOLDS + 1)]
    lag0, lag1, whitened, swing, left = (list[Tensor]() for _ in range(5))
    for begin, end in pairwise(cuts):
        others = [part for part in (rows[: max(begin - 1, 0)], rows[end + 1 :]) if len(part) > 4]
        directions = _noisiest(others)
        Y = _own_dynamics([part @ directions for part in others], mu)
        q = rows[begin:end] @ directions
        d = (q[1:] - q[:-1])[:, 0]
        lag0.append(d * d / 2)
        lag1.append(-d[:-1] * d[1:])
        z = (q[2:] - (1 + mu) * q[1:-1] + mu * q[:-2])[:, 0]
        w = z + (q[1:-1] @ Y.T)[:, 0]
        y = min(max(float(Y[0, 0]), 0.0), 2 * (1 + mu))
        whitened.append(-(w[1:] * w[:-1] - y * y / 4) / (1 + mu) ** 2)
        swing.append(z * z)
        left.append(w * w)
    zero, one = torch.cat(lag0), torch.cat(lag1)
    swings = float(torch.cat(left).mean()) < EXPLAINED * float(torch.cat(swing).mean())
    # where the differences are noise and little else, their variance is the sharper reading
    raw = zero if float(one.mean()) > 0.7 * float(zero.mean()) else one
    series = torch.cat(whitened) if swings else raw
    parts = series[: len(series) // 8 * 8].reshape(8, -1).mean(1)
    return float(series.mean()), float(parts.std()) / math.sqrt(8), swings


def _noisiest(parts: Sequence[Tensor]) -> Tensor:
    """The directions ``[buckets, DIRECTIONS]`` with the largest ``- <D_t D_{t+1}>``."""
    differences = [part[1:] - part[:-1] for part in parts]
    span = torch.linalg.qr(torch.cat(differences).T)[0]
    lagged = sum((x[:-1] @ span).T @ (x[1:] @ span) for x in differences)
    assert isinstance(lagged, Tensor)
    return span @ torch.linalg.eigh(-(lagged + lagged.T))[1][:, -DIRECTIONS:].flip(1)


def _own_dynamics(parts: Sequence[Tensor], mu: float) -> Tensor:
    """``Y`` of ``g_{t+1} - (1 + mu) g_t + mu g_{t-1} = -Y g_t + ...``, by instrumental variables."""
    seen, known = 0.0, 0.0
    for part in parts:
        p = part - part.mean(0)
        z = p[3:] - (1 + mu) * p[2:-1] + mu * p[1:-2]
        instrument = p[:-3] if mu else p[1:-2]
        seen, known = seen + z.T @ instrument, known + p[2:-1].T @ instrument
    assert isinstance(seen, Tensor) and isinstance(known, Tensor)
    return -seen @ torch.linalg.pinv(known, rtol=0.05)


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


class _Sketch:
    """``S``: random signs, one byte an element while a window is open, and 256 buckets."""

    def __init__(self, buckets: int = BUCKETS) -> None:
        self.buckets, self.signs = buckets, dict[int, Tensor]()

    def __call__(self, leaves: Sequence[Leaf]) -> Tensor:
        """``S g`` of all leaves together, each multiplied by its scale: ``[buckets]``."""
        total: Tensor | None = None
        for i, leaf in enumerate(leaves):
            g = leaf.gradient.reshape(-1)
            signs = self.signs.get(i)
            if signs is None:
                signs = self.signs[i] = _signs(g.numel(), i, g.device)
            each = isinstance(leaf.scale, Tensor) and leaf.scale.ndim > 0
            scale = leaf.scale.reshape(-1) if isinstance(leaf.scale, Tensor) and each else None
            mine = torch.zeros(
                self.buckets, dtype=torch.float32 if g.dtype != torch.float64 else g.dtype, device=g.device
            )
            for at in range(0, g.numel(), CHUNK):
                x = g[at : at + CHUNK] * signs[at : at + CHUNK]
                x = x if scale is None else x * scale[at : at + CHUNK]
                full = len(x) // self.buckets * self.buckets
                if full:
                    mine += x[:full].view(-1, self.buckets).sum(0)
                if full < len(x):
                    mine[: len(x) - full] += x[full:]
            mine = mine if each else mine * leaf.scale
            total = mine if total is None else total + mine
        assert total is not None
        return total


class HeatGuard:
    """Watches a loop for the heat of its minibatches, and warns once, by name and with numbers.

    :mod:`bayesopt_chain.optim` has one in every optimizer at T > 0. It looks at windows of 96 consecutive steps: the first
    as soon as it costs less than ``share`` of the time the run has taken, the next ones ever more rarely while all is well.
    It warns when two windows in a row find the same: the first may have been burn-in.

    Args:
        steps_per_epoch: batches in a pass over the data, where they are reshuffled in every epoch; the noise of an epoch then
            sums to zero, and heats less. Without it batches count as independent, the worst case.
        order: ``"reshuffled"`` or ``"independent"``.
        above: excess of the variance, relative to the one asked for, from which it warns.
        share: of the run's wall time that it may take.
        window: steps in a window.
        who: how the warning begins.

    Attributes:
        readings: the :class:`Heat` of every window so far, newest last.

    Example:
        >>> import warnings, torch, bayesopt_chain as bc
        >>> source = torch.Generator().manual_seed(0)
        >>> guard = HeatGuard(share=float("inf"))
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     for _ in range(400):
        ...         guard.look(lambda: [Leaf(torch.randn(10, generator=source), 2.0, 0.9)], lr=0.1)
        >>> len(caught), "times the variance" in str(caught[0].message)
        (1, True)
    """

    def __init__(
        self,
        steps_per_epoch: int | None = None,
        order: str = "reshuffled",
        *,
        above: float = 1.0,
        share: float = 0.015,
        window: int = 96,
        who: str = "bayesopt_chain",
    ) -> None:
        if steps_per_epoch is not None and (isinstance(steps_per_epoch, bool) or int(steps_per_epoch) < 1):
            raise ValueError(f"HeatGuard: steps_per_epoch must be a positive whole number, got {steps_per_epoch!r}")
        if order not in ("reshuffled", "independent"):
            raise ValueError(f"HeatGuard: order must be 'reshuffled' or 'independent', got {order!r}")
        if int(window) < 32:
            raise ValueError(f"HeatGuard: window must be at least 32 steps, got {window!r}")
        self.steps_per_epoch, self.order, self.above, self.share = steps_per_epoch, order, above, share
        self.window, self.who = int(window), who
        self.readings: list[Heat] = []
        self.has_warned = False
        self._lr: float | None = None
        self._restart()
        self._began: float | None = None
        self._spent = 0.0
        self._cost: float | None = None  # of a window, once one has been paid for

    def _restart(self) -> None:
        self._steps, self._next, self._hot = 0, 32, 0
        self._close()

    def _close(self) -> None:
        self._rows: list[Tensor] = []
        self._norms: list[Tensor] = []
        self._sketch: _Sketch | None = None
        self._paid = 0.0

    def look(self, leaves: Callable[[], Iterable[Leaf]], lr: float) -> None:
        """Called at every step, before parameters move.

        Args:
            leaves: gives the gradients of this step; called inside windows only.
            lr: the learning rate, for the advice; where it changes by more than a tenth the guard begins anew.
        """
        now = time.perf_counter()
        if self._began is None:
            self._began = now
        if self._lr is None or abs(lr - self._lr) > 0.1 * abs(self._lr):
            self._lr = lr
            self._restart()
        self._steps += 1
        if self._sketch is None and not self._may_open(leaves, now):
            return
        self._take([*leaves()])
        spent = time.perf_counter() - now
        self._spent += spent
        self._paid += spent

    def _may_open(self, leaves: Callable[[], Iterable[Leaf]], now: float) -> bool:
        """Whether a window can be afforded now; opens it."""
        assert self._began is not None
        if self._steps < self._next:
            return False
        if self._cost is None:  # a first guess: reading twice, and the algebra of one window
            elements = sum(leaf.gradient.numel() for leaf in leaves())
            self._cost = self.window * (3e-5 + 2e-9 * elements) + 1e-2
        if self._spent + self._cost > self.share * (now - self._began):
            return False
        self._sketch = _Sketch()
        return True

    @torch.no_grad()
    def _take(self, leaves: list[Leaf]) -> None:
        assert self._sketch is not None
        if not leaves:
            return self._close()
        self._rows.append(self._sketch(leaves))
        self._norms.append(torch.stack(foreach_norm([leaf.gradient for leaf in leaves])).norm())
        if len(self._rows) <= self.window:
            return None
        rows = torch.stack(self._rows).double().cpu()
        norms = torch.stack(self._norms).double().cpu()
        began = time.perf_counter()
        if bool(torch.isfinite(rows).all()) and bool(rows.any()):
            rows = rows[:, (rows != 0).any(0)]  # small models fill few buckets
            heat = read_heat(rows, leaves[0].momentum, steps_per_epoch=self.steps_per_epoch, order=self.order)
            same = (norms - norms.median()).abs() < SAME_NORM * norms.median()
            self._judge(heat._replace(same_norm=float(same.double().mean())), leaves[0].momentum)
        self._cost = self._paid + time.perf_counter() - began
        self._next = self._steps + 1 if self._hot and not self.has_warned else 4 * self._steps
        return self._close()

    def _judge(self, heat: Heat, momentum: float) -> None:
        self.readings.append(heat)
        above = self.above * (SWINGS if heat.swings else 1.0)
        if momentum < WEAK:
            above += (1 + momentum) ** 3 / (1 - momentum)
        self._hot = self._hot + 1 if heat.excess > above and heat.rho > heat.standard_error else 0
        both = self.readings[-2:]
        together = math.hypot(*(reading.standard_error for reading in both))
        is_sure = self._hot >= 2 and sum(reading.rho for reading in both) > SURE * together
        if self.has_warned:
            return
        if heat.same_norm > 0.5:
            self.has_warned = True
            warnings.warn(
                f"{self.who}: {heat.same_norm:.0%} of the gradients have one and the same norm: a clip acts at nearly every "
                "step, and a chain that follows clipped gradients samples another distribution. Raise max_norm until it "
                "acts rarely, or leave clipping out at temperature > 0",
                stacklevel=2,
            )
        elif is_sure:
            self.has_warned = True
            warnings.warn(self._warning(heat), stacklevel=2)

    def _warning(self, heat: Heat) -> str:
        """The warning for a reading, with numbers and what to do."""
        lr = self._lr or 0.0
        if heat.order == "independent" and self.steps_per_epoch is None:
            law = (
                "; for independent batches. With steps_per_epoch= the reshuffling of a DataLoader is taken into account"
            )
        elif heat.order == "independent":
            law = "; for independent batches"
        else:
            law = f"; for reshuffled epochs of {self.steps_per_epoch} steps"
        cooler = lr * min(1.0, 0.1 / max(heat.rho, 1e-30))
        total = (
            " The noise is so large that the loss may be a sum over the data: temperature 1/N belongs to a mean."
            if heat.rho > SUM
            else ""
        )
        return (
            f"{self.who}: minibatches heat this chain. In the worst direction it samples about {1 + heat.excess:.2g} times the "
            f"variance asked for (the batches spend {heat.rho:.2g} +- {heat.standard_error:.1g} of the noise budget{law}). "
            f"Use lr {cooler:.1g} (now {lr:.3g}), larger batches, or all data; bc.suggest_lr gives a rate that heats little. "
            f"heat_guard=None silences this.{total}"
        )


def leaves_of(items: Iterable[tuple[Any, float, float]]) -> list[Leaf]:
    """Leaves from ``(parameter, scale, momentum)``, those that have a gradient."""
    return [Leaf(p.grad, scale, momentum) for p, scale, momentum in items if p.grad is not None]
