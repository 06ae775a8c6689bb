r"""Scalings that learn a diagonal ``P`` from the gradients they see: RMSprop, centred RMSprop, AdaGrad, Adam, AdaMax, RAdam.

Each is ``P`` times a first moment, ``F = lr P (1 - b1) / (1 - b1 / z)`` (``b1 = 0`` where there is none). With ``g``
the gradient, ``t`` the number of updates and ``<x>_b`` the average ``b <x>_b + (1 - b) x``, ``1 / P`` is

    RMSprop    sqrt(<g^2>) + eps                        AdaGrad   sqrt(sum g^2) + eps
    centred    sqrt(<g^2> - <g>^2) + eps                Adam      sqrt(<g^2>_b2 / (1 - b2^t) + eps_root) + eps
    AdaMax     n <- max(b2 n, |g| + eps)                RAdam     (sqrt(<g^2>_b2) + eps) / (r_t sqrt(1 - b2^t)), or 1: see RAdam

``P`` is made of the clean gradient. The noise, of covariance ``Psi P^-1``, is added to what the first moment averages
and to nothing else: noise that reached the second moment would heat itself.

For a frozen ``P`` this samples ``exp(-loss / T)`` exactly. While ``P`` follows the recent gradients the target is roughly
``P^-1 exp(-loss / T)``, and worse as lr falls; ``freeze_after`` stops ``P`` after so many updates, which is the only exact
cure. Once frozen, ``P`` no longer shrinks where the loss is steep: beyond ``lr P curvature = 2 (1 + b1) / (1 - b1)`` the chain
diverges. No update knows the curvature; :func:`bayesopt_chain.samplers.step_growth` measures it. A parameter whose
gradient has always been exactly zero (a dead unit, an unused embedding) has ``P = 1 / eps`` and the noise that goes
with it: raise ``eps`` at T > 0, or leave such parameters out with ``masked``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain.core import counters
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.leaves import each, keep, moment, zeros_like
from bayesopt_chain.core.link import Rule
from bayesopt_chain.core.response import Adaptive, Refused, Response


class RunningScaleState(NamedTuple):
    """Averages that make ``P``, like each parameter; ``count`` is empty where ``P`` is never frozen."""

    mu: tuple[Tensor, ...]
    nu: tuple[Tensor, ...]
    count: tuple[Tensor, ...]


class ScaleByRssState(NamedTuple):
    """Sum of squares of each leaf; ``count`` is empty where it is never frozen."""

    sum_of_squares: tuple[Tensor, ...]
    count: tuple[Tensor, ...]


class ScaleByAdadeltaState(NamedTuple):
    """Mean squares of each leaf's gradients and updates."""

    mu: tuple[Tensor, ...]
    nu: tuple[Tensor, ...]


class ScaleByAdamState(NamedTuple):
    """First and second moment of each leaf, and the updates it has seen."""

    mu: tuple[Tensor, ...]
    nu: tuple[Tensor, ...]
    count: tuple[Tensor, ...]


class ScaleByAdamaxState(NamedTuple):
    """First moment and running maximum of each leaf, and the updates made."""

    mu: tuple[Tensor, ...]
    nu: tuple[Tensor, ...]
    count: tuple[Tensor, ...]


class ScaleByRAdamState(NamedTuple):
    """First and second moment of each leaf, and the updates made."""

    mu: tuple[Tensor, ...]
    nu: tuple[Tensor, ...]
    count: tuple[Tensor, ...]


def _freeze(
    old: tuple, new_of: Callable[[bool], tuple], count: tuple, freeze_after: int | None, inplace: bool
) -> tuple:
    """The next averages, held from update ``freeze_after`` on."""
    if freeze_after is None:
        return new_of(inplace)
    out = [o if n is o else torch.where(c < freeze_after, n, o) for o, n, c in zip(old, new_of(False), count)]
    return tuple(o.copy_(n) if inplace and n is not o else n for o, n in zip(old, out))


def _noisy(g: list, denominators: list, ctx) -> list:
    """What the first moment averages: the gradient, and noise of covariance ``Psi P^-1`` where noise is injected."""
    if ctx.injection is None:
        return g
    return [
        None if x is None else ctx.injection.add(i, x, d.detach().sqrt(), ctx.inplace)
        for i, (x, d) in enumerate(zip(g, denominators))
    ]


def _frozen_note(rule) -> str:
    """What ``repr`` adds where ``P`` is frozen: from then on sampling is exact."""
    return f", freeze_after={rule.freeze_after}" if rule.freeze_after is not None else ""


def _rms(nu: Tensor, mu: None, eps: float) -> Tensor:
    return nu.sqrt().add(eps)


def _stddev(nu: Tensor, mu: Tensor, eps: float) -> Tensor:
    return nu.addcmul(mu, mu, value=-1.0).sqrt_().add(eps)


@dataclass(frozen=True)
class RunningScale(Rule):
    """Divide by a running estimate of the gradient's size: RMSprop's, or its centred form."""

    denominator: Callable = _rms
    decay: float = 0.9
    eps: float = 1e-8
    initial_scale: float = 0.0
    freeze_after: int | None = None

    @property
    def response(self) -> Response:
        return Adaptive()

    @property
    def centred(self) -> bool:
        return self.denominator is _stddev

    def init(self, params):
        return RunningScaleState(
            zeros_like(params) if self.centred else (),
            zeros_like(params, self.initial_scale),
            counters.zeros(params) if self.freeze_after is not None else (),
        )

    def update(self, g, state, params, ctx):
        def average(old, order):
            return _freeze(
                old,
                lambda inplace: moment(g, old, self.decay, order, inplace),
                state.count,
                self.freeze_after,
                ctx.inplace,
            )

        mu = average(state.mu, 1) if self.centred else ()
        nu = average(state.nu, 2)
        denominators = each(lambda x, n, m: self.denominator(n, m, self.eps), g, nu, mu or nu)
        count = counters.increment(state.count, g, ctx.inplace)
        out = each(Tensor.div_ if ctx.inplace else Tensor.div, _noisy(g, denominators, ctx), denominators)
        return out, RunningScaleState(mu, nu, count)

    def __str__(self) -> str:
        return f"scale_by_{'stddev' if self.centred else 'rms'}(decay={self.decay}, eps={self.eps}{_frozen_note(self)})"


@dataclass(frozen=True)
class RootSumOfSquares(Rule):
    """AdaGrad's scaling: divide by the root of the summed squares; zero where no gradient has come yet."""

    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    freeze_after: int | None = None

    @property
    def response(self) -> Response:
        return Adaptive()

    def init(self, params):
        count = counters.zeros(params) if self.freeze_after is not None else ()
        return ScaleByRssState(zeros_like(params, self.initial_accumulator_value), count)

    def update(self, g, state, params, ctx):
        nu = _freeze(
            state.sum_of_squares,
            lambda inplace: moment(g, state.sum_of_squares, 1.0, 2, inplace),
            state.count,
            self.freeze_after,
            ctx.inplace,
        )
        denominators = each(lambda x, n: n.sqrt().add(self.eps), g, nu)
        count = counters.increment(state.count, g, ctx.inplace)

        def divide(x: Tensor, n: Tensor, d: Tensor) -> Tensor:
            return torch.where(n > 0.0, x.div_(d) if ctx.inplace else x.div(d), 0.0)

        return each(divide, _noisy(g, denominators, ctx), nu, denominators), ScaleByRssState(nu, count)

    def __str__(self) -> str:
        return f"scale_by_rss(eps={self.eps}{_frozen_note(self)})"


@dataclass(frozen=True)
class _TwoMoments(Rule):
    """What Adam and its kin share: a first moment that the noise enters, over a second made of the clean gradient."""

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-6
    moment_requires_grad: bool = False
    freeze_after: int | None = None

    name: ClassVar[str]
    state: ClassVar[type]

    @property
    def response(self) -> Response:
        return Adaptive((1.0 - self.b1,), (1.0, -self.b1) if self.b1 else (1.0,))

    def init(self, params):
        zeros = [zeros_like(params, requires_grad=self.moment_requires_grad) for _ in range(2)]
        return self.state(*zeros, counters.zeros(params))

    def second(self, g, state, ctx) -> tuple:
        """The next second moments."""
        return _freeze(
            state.nu,
            lambda inplace: moment(g, state.nu, self.b2, 2, inplace),
            state.count,
            self.freeze_after,
            ctx.inplace,
        )

    def first(self, g, state, ctx, denominators: list) -> tuple:
        """The next first moments, noise included."""
        return moment(_noisy(g, denominators, ctx), ctx.scaled(state.mu), self.b1, 1, ctx.inplace)

    def steady(self, count: Tensor) -> Tensor:
        """The count as the second moment sees it."""
        return count if self.freeze_after is None else count.clamp(max=self.freeze_after)

    def __str__(self) -> str:
        return f"{self.name}(b1={self.b1}, b2={self.b2}, eps={self.eps}{_frozen_note(self)})"


@dataclass(frozen=True)
class Adam(_TwoMoments):
    """Adam's scaling: a first moment over the root of a second, both corrected for their start at zero."""

    eps: float = 1e-8
    eps_root: float = 0.0

    name = "scale_by_adam"
    state = ScaleByAdamState

    def update(self, g, state, params, ctx):
        nu = self.second(g, state, ctx)
        count = counters.increment(state.count, g, ctx.inplace)
        correct_mu = counters.each(lambda c: 1 - pow(self.b1, c), count, g)
        correct_nu = counters.each(lambda c: 1 - pow(self.b2, self.steady(c)), count, g)
        denominators = each(lambda x, n, c: n.div(c).add_(self.eps_root).sqrt_().add(self.eps), g, nu, correct_nu)
        mu = self.first(g, state, ctx, denominators)
        return each(lambda x, m, c, d: m.div(c).div(d), g, mu, correct_mu, denominators), self.state(mu, nu, count)


@dataclass(frozen=True)
class AdaMax(_TwoMoments):
    """AdaMax: Adam with a running maximum in place of the second moment."""

    name = "scale_by_adamax"
    state = ScaleByAdamaxState

    def second(self, g, state, ctx):
        def peak(inplace):
            new = keep(lambda n, x: torch.max(n.mul(self.b2), x.abs().add_(self.eps)), g, state.nu)
            return tuple(n.copy_(m) if m is not n else n for n, m in zip(state.nu, new)) if inplace else new

        return _freeze(state.nu, peak, state.count, self.freeze_after, ctx.inplace)

    def update(self, g, state, params, ctx):
        nu = self.second(g, state, ctx)
        count = counters.increment(state.count, g, ctx.inplace)
        correct = counters.each(lambda c: 1 - _power(self.b1, c), count, g)
        mu = self.first(g, state, ctx, nu)
        return each(lambda x, m, n, c: m.div(n).div_(c), g, mu, nu, correct), self.state(mu, nu, count)


@dataclass(frozen=True)
class RAdam(_TwoMoments):
    r"""RAdam: Adam whose second moment counts only once its variance is finite (``rho_t > 5``).

    With ``rho = 2 / (1 - b2) - 1`` and ``rho_t = rho - 2 t b2^t / (1 - b2^t)``, which grows with ``t``: while ``rho_t
    <= 5`` the update is the corrected first moment, ``P = 1``; from then on ``P = r_t sqrt(1 - b2^t) / (sqrt(nu) +
    eps)``. Noise matched to ``P = 1`` would kick the parameters by ``sqrt(2 T lr)``, which on a curvature ``k`` with
    ``lr k > 1`` is more than the ``sqrt(T / k)`` of the target and in an unstable step: it is held back until the
    rectified updates begin, and the start is the optimizer's. Where they never begin (``rho <= 5``, or a
    ``freeze_after`` before them) ``P`` is 1 for ever and the noise is that of momentum, from the first update on.
    """

    name = "scale_by_radam"
    state = ScaleByRAdamState

    def update(self, g, state, params, ctx):
        nu = self.second(g, state, ctx)
        count = counters.increment(state.count, g, ctx.inplace)
        factors = counters.each(self._factors, count, g)
        start = 0.0 if self.rectifies else 1.0  # of the noise's scale
        scales = each(
            lambda x, n, f: self._choose(f, n.sqrt().add(self.eps).div(f.rectify), torch.full_like(n, start)),
            g,
            nu,
            factors,
        )
        mu = self.first(g, state, ctx, scales)

        def ratio(x: Tensor, m: Tensor, n: Tensor, f: _Factors) -> Tensor:
            return self._choose(f, m.mul(f.gain).div(n.sqrt().add(self.eps)), m.div(f.correct)).to(m.dtype)

        return each(ratio, g, mu, nu, factors), self.state(mu, nu, count)

    @property
    def rectifies(self) -> bool:
        """Whether rectified updates begin at some count."""
        limit, t = 2 / (1 - self.b2) - 1, self.freeze_after
        if t is None:
            return limit > 5
        power = self.b2**t
        return limit - 2 * t * power / (1 - power) > 5

    def _factors(self, count: Tensor) -> _Factors:
        correct = 1 - _power(self.b1, count)
        if not self.rectifies:
            return _Factors(False, 1.0, 1.0 / correct, correct)
        limit = 2 / (1 - self.b2) - 1
        steady = self.steady(count)
        t, power = _number(steady), _power(self.b2, steady)
        rho = limit - 2 * t * power / (1 - power)
        squared = (1 - power) * (rho - 4) * (rho - 2) * limit / ((limit - 4) * (limit - 2) * rho)
        rectified = rho > 5
        if torch.is_tensor(rho):
            root = torch.where(rectified, squared, torch.ones_like(rho)).sqrt()
        else:
            root = math.sqrt(squared) if rectified else 1.0
        return _Factors(rectified, root, root / correct, correct)

    @staticmethod
    def _choose(f: _Factors, yes: Tensor, no: Tensor) -> Tensor:
        return torch.where(f.rectified, yes, no) if torch.is_tensor(f.rectified) else (yes if f.rectified else no)


class _Factors(NamedTuple):
    """RAdam's scalars at one count: whether it rectifies, by what, with the first moment's correction, that alone."""

    rectified: bool | Tensor
    rectify: float | Tensor
    gain: float | Tensor
    correct: float | Tensor


@dataclass(frozen=True)
class AdaDelta(Rule):
    """AdaDelta: gradients scaled by the ratio of running root-mean-squares of updates and gradients."""

    rho: float = 0.9
    eps: float = 1e-6
    moment_requires_grad: bool = False

    @property
    def response(self) -> Response:
        return Refused("its scale is fed by its own updates, so the noise would set it; use bc.rmsprop or bc.adam")

    def init(self, params):
        zeros = [zeros_like(params, requires_grad=self.moment_requires_grad) for _ in range(2)]
        return ScaleByAdadeltaState(*zeros)

    def update(self, g, state, params, ctx):
        mu = moment(g, state.mu, self.rho, 2, ctx.inplace)

        def scale(x: Tensor, m: Tensor, v: Tensor) -> Tensor:
            ratio = v.add(self.eps).div_(m.add(self.eps)).sqrt_()
            return x.mul_(ratio) if ctx.inplace else x.mul(ratio)

        g = each(scale, g, mu, state.nu)
        return g, ScaleByAdadeltaState(mu, moment(g, state.nu, self.rho, 2, ctx.inplace))

    def __str__(self) -> str:
        return f"scale_by_adadelta(rho={self.rho}, eps={self.eps})"


def _number(count: Tensor) -> int | Tensor:
    """A counter as a Python number where reading it costs nothing (CPU, untransformed), else in float64."""
    return int(count) if counters.readable(count) else count.to(torch.float64)


def _power(decay: float, count: Tensor) -> float | Tensor:
    return decay ** _number(count)


def _decay(name: str, value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise ValueError(f"Invalid {name} parameter: {value}; it must lie in [0, 1)")


def _settings(eps: float, freeze_after: int | None) -> None:
    if not eps >= 0.0:
        raise ValueError(f"Invalid epsilon value: {eps}; it must not be negative")
    if freeze_after is not None and not freeze_after >= 1:
        raise ValueError(f"Invalid freeze_after value: {freeze_after}; it must be None or at least 1")


def scale_by_rms(
    alpha: float = 0.9, eps: float = 1e-8, initial_scale: float = 0.0, *, freeze_after: int | None = None
) -> Chain:
    """Divide by the root of a running mean of squares (RMSprop; Tieleman and Hinton, 2012).

    Args:
        alpha: weight of the past.
        eps: added to the root, not negative.
        initial_scale: first mean of squares.
        freeze_after: number of updates, at least 1, after which the scale stays as it is (default: never). Sampling is exact
            from there on, if the chain is stable with that scale: :func:`bayesopt_chain.samplers.step_growth` tells.
    Returns:
        A link; its state holds one tensor for each parameter.

    Raises:
        ValueError: negative ``eps``; ``freeze_after`` below 1.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.scale_by_rms(alpha=0.0)
        >>> tx.update([torch.tensor([2.0])], tx.init([torch.zeros(1)]), inplace=False)[0]
        [tensor([1.])]
    """
    _settings(eps, freeze_after)
    return Chain((RunningScale(_rms, alpha, eps, initial_scale, freeze_after),))


def scale_by_stddev(
    alpha: float = 0.9, eps: float = 1e-8, initial_scale: float = 0.0, *, freeze_after: int | None = None
) -> Chain:
    """Divide by a running standard deviation (centred RMSprop; Graves, 2013).

    Args:
        alpha: weight of the past in both means.
        eps: added to the deviation, not negative.
        initial_scale: first mean of squares.
        freeze_after: number of updates, at least 1, after which the scale stays as it is (default: never). Sampling is exact
            from there on, if the chain is stable with that scale: :func:`bayesopt_chain.samplers.step_growth` tells.
    Returns:
        A link; its state holds two tensors for each parameter.

    Raises:
        ValueError: negative ``eps``; ``freeze_after`` below 1.

    Example:
        >>> import bayesopt_chain as bc
        >>> bc.scale_by_stddev(0.5)
        scale_by_stddev(decay=0.5, eps=1e-08)
    """
    _settings(eps, freeze_after)
    return Chain((RunningScale(_stddev, alpha, eps, initial_scale, freeze_after),))


def scale_by_rss(
    initial_accumulator_value: float = 0.0, eps: float = 1e-10, *, freeze_after: int | None = None
) -> Chain:
    """Divide by the root of the sum of squares so far (AdaGrad; Duchi, Hazan and Singer, 2011).

    Args:
        initial_accumulator_value: first sum of squares.
        eps: added to the root, not negative.
        freeze_after: number of updates, at least 1, after which the scale stays as it is (default: never). Sampling is exact
            from there on, if the chain is stable with that scale: :func:`bayesopt_chain.samplers.step_growth` tells.
    Returns:
        A link; its state holds one tensor for each parameter. A parameter that never had a gradient does not move.

    Raises:
        ValueError: negative ``eps``; ``freeze_after`` below 1.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.scale_by_rss()
        >>> tx.update([torch.tensor([2.0])], tx.init([torch.zeros(1)]), inplace=False)[0]
        [tensor([1.])]
    """
    _settings(eps, freeze_after)
    return Chain((RootSumOfSquares(initial_accumulator_value, eps, freeze_after),))


def scale_by_adam(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    moment_requires_grad: bool = False,
    *,
    freeze_after: int | None = None,
) -> Chain:
    """First moment over the root of the second (Adam; Kingma and Ba, 2014).

    Args:
        b1: weight of the past in the first moment, in [0, 1).
        b2: weight of the past in the second moment, in [0, 1).
        eps: added to the root, not negative.
        eps_root: added inside the root.
        moment_requires_grad: create the moments with ``requires_grad=True``.
        freeze_after: number of updates, at least 1, after which the scale stays as it is (default: never). Sampling is exact
            from there on, if the chain is stable with that scale: :func:`bayesopt_chain.samplers.step_growth` tells.
    Returns:
        A link; its state holds two tensors for each parameter.

    Raises:
        ValueError: ``b1`` or ``b2`` outside [0, 1); negative ``eps``; ``freeze_after`` below 1.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.scale_by_adam()
        >>> tx.update([torch.tensor([2.0])], tx.init([torch.zeros(1)]), inplace=False)[0]
        [tensor([1.])]
    """
    _decay("b1", b1)
    _decay("b2", b2)
    _settings(eps, freeze_after)
    return Chain((Adam(b1, b2, eps, moment_requires_grad, freeze_after, eps_root),))


def scale_by_adamax(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    moment_requires_grad: bool = False,
    *,
    freeze_after: int | None = None,
) -> Chain:
    """First moment over a running maximum of the gradient's size (AdaMax; Kingma and Ba, 2014).

    Args:
        b1: weight of the past in the first moment, in [0, 1).
        b2: what the maximum is multiplied by in each update, in [0, 1).
        eps: added to the gradient's size, not negative.
        moment_requires_grad: create the moments with ``requires_grad=True``.
        freeze_after: number of updates, at least 1, after which the scale stays as it is (default: never). Sampling is exact
            from there on, if the chain is stable with that scale: :func:`bayesopt_chain.samplers.step_growth` tells.
    Returns:
        A link; its state holds two tensors for each parameter.

    Raises:
        ValueError: ``b1`` or ``b2`` outside [0, 1); negative ``eps``; ``freeze_after`` below 1.

    Example:
        >>> import bayesopt_chain as bc
        >>> bc.scale_by_adamax()
        scale_by_adamax(b1=0.9, b2=0.999, eps=1e-06)
    """
    _decay("b1", b1)
    _decay("b2", b2)
    _settings(eps, freeze_after)
    return Chain((AdaMax(b1, b2, eps, moment_requires_grad, freeze_after),))


def scale_by_radam(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    moment_requires_grad: bool = False,
    *,
    freeze_after: int | None = None,
) -> Chain:
    """Adam whose second moment counts only once its variance is finite (RAdam; Liu et al., 2019).

    The first updates (five at the default ``b2``) are the bare first moment: where ``lr * curvature`` exceeds about 2
    they diverge, at any temperature, until the second moment counts. Noise starts with the rectified updates.

    Args:
        b1: weight of the past in the first moment, in [0, 1).
        b2: weight of the past in the second moment, in [0, 1); up to 2/3 the second moment never counts.
        eps: added to the root, not negative.
        moment_requires_grad: create the moments with ``requires_grad=True``.
        freeze_after: number of updates, at least 1, after which the scale stays as it is (default: never). Sampling is exact
            from there on, if the chain is stable with that scale: :func:`bayesopt_chain.samplers.step_growth` tells.
    Returns:
        A link; its state holds two tensors for each parameter.

    Raises:
        ValueError: ``b1`` or ``b2`` outside [0, 1); negative ``eps``; ``freeze_after`` below 1.

    Example:
        >>> import bayesopt_chain as bc
        >>> bc.scale_by_radam()
        scale_by_radam(b1=0.9, b2=0.999, eps=1e-06)
    """
    _decay("b1", b1)
    _decay("b2", b2)
    _settings(eps, freeze_after)
    return Chain((RAdam(b1, b2, eps, moment_requires_grad, freeze_after),))


def scale_by_adadelta(rho: float = 0.9, eps: float = 1e-6, moment_requires_grad: bool = False) -> Chain:
    """Multiply by the ratio of running root mean squares of updates and gradients (AdaDelta; Zeiler, 2012).

    Refused at T > 0: its scale is fed by its own updates, so that the noise would set it.

    Args:
        rho: weight of the past in both means, in [0, 1).
        eps: added to both means, not negative.
        moment_requires_grad: create the means with ``requires_grad=True``.

    Returns:
        A link; its state holds two tensors for each parameter.

    Raises:
        ValueError: ``rho`` outside [0, 1); negative ``eps``; at ``init`` of a chain with a noise link, this link beside it.

    Example:
        >>> import bayesopt_chain as bc
        >>> bc.scale_by_adadelta()
        scale_by_adadelta(rho=0.9, eps=1e-06)
    """
    _decay("rho", rho)
    _settings(eps, None)
    return Chain((AdaDelta(rho, eps, moment_requires_grad),))
