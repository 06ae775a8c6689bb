r"""``suggest_lr``: the learning rate that neither diverges nor lets minibatches heat the chain.

Two limits, both asked of the chain itself (:mod:`bayesopt_chain.diagnostics.heating` has the equations):

    stability    the largest lr at which the closed loop of chain and curvature has spectral radius below 1, the curvature
                 being that of the largest eigenvectors of the Hessian (``lr k = 2 (1 + mu)`` for momentum,
                 ``2 (1 + mu) / (1 + 2 mu)`` for Nesterov)
    heating      the largest lr at which the noise of the batches adds no more than ``tolerance`` to the variance in any
                 direction

Half the stability limit is left as a margin for the curvature of other places and other batches. How gradient noise sets the
variance of a run is due to Mandt, Hoffman and Blei (2017).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from bayesopt_chain import checks
from bayesopt_chain.data.epochs import Epochs
from bayesopt_chain.data.index_stream import Order
from bayesopt_chain.diagnostics._response import read, reread
from bayesopt_chain.diagnostics.gradient_noise import gradient_noise, take
from bayesopt_chain.diagnostics.heating import Heating, loop, predict, reduce, rescaled
from bayesopt_chain.diagnostics.top_curvature import hessian_product

MARGIN = 0.5  # of the stability limit


class LearningRate(NamedTuple):
    """What :func:`suggest_lr` suggests.

    Attributes:
        lr: the smaller of ``heating`` and half of ``stability``.
        stability: the learning rate from which on the chain diverges.
        heating: the largest one that heats by no more than the tolerance; infinite where every stable one does.
        report: what :func:`bayesopt_chain.diagnostics.heating` says at ``lr``.
    """

    lr: float
    stability: float
    heating: float
    report: Heating

    def __str__(self) -> str:
        which = "heating" if self.heating <= MARGIN * self.stability else "half the stability limit"
        return (
            f"lr = {self.lr:.4g} ({which}); the chain diverges from {self.stability:.4g} on, minibatches heat it too "
            f"much from {self.heating:.4g} on\n{self.report}"
        )


def suggest_lr(
    make_tx: Callable[[float], Any],
    loss: Callable[[Any, Any], Any],
    params: Any,
    batches: Iterable[Any],
    *,
    tolerance: float = 0.05,
    order: Order | None = None,
    steps_per_epoch: float | None = None,
    state: Any = None,
    rank: int = 8,
    max_batches: int = 100,
) -> LearningRate:
    """Suggest a learning rate for a chain at a temperature.

    Args:
        make_tx: ``make_tx(lr)`` builds the chain, such as ``lambda lr: bc.sghmc(lr, temperature=1 / N)``.
        loss: as for :func:`bayesopt_chain.make_step`.
        params: where the chain will sample: near a mode, not the initial values.
        batches: ``bc.epochs(...)``, or an iterable of batches of one size that share no datum.
        tolerance: how much the variance of any direction may grow, on average over the steps of an epoch; 0.05 is 5 %.
        order: of the batches; default: that of the ``epochs``, and ``"reshuffled"`` for another iterable.
        steps_per_epoch: ``K = N / b``; default: that of the ``epochs``, and the number of batches for another iterable.
        state: the state of the chain, where a preconditioner learns.
        rank: number of directions looked at, of the noise and of the curvature each.
        max_batches: use at most so many batches. The heating limit is as certain as a variance from so many gradients:
            a standard error of ``sqrt(2 / max_batches)`` in each direction. Curvature takes some dozens of passes over
            them.

    Returns:
        :class:`LearningRate` with both limits; ``print`` it.

    Raises:
        ValueError: a chain without noise, or one that is not linear; a loss without positive curvature here; a
            tolerance that is not positive.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> def loss(w, batch):
        ...     return (w - batch).square().mean() / 2
        >>> data = bc.epochs(torch.linspace(-3**0.5, 3**0.5, 1000), 20)
        >>> found = bc.suggest_lr(lambda lr: bc.sghmc(lr, temperature=1 / 1000), loss, torch.tensor(0.0), data)
        >>> round(found.stability, 2), bool(0.0005 < found.lr < 0.003)                   # 2 (1 + 0.9) / curvature
        (3.8, True)
    """
    checks.positive("suggest_lr: tolerance", tolerance)
    used = batches if isinstance(batches, Epochs) else take(batches, max_batches)[0][0]
    noise = gradient_noise(loss, params, used, rank=rank, max_batches=max_batches)
    known: Order = batches.order if isinstance(batches, Epochs) else "reshuffled"
    order = order or known
    steps = steps_per_epoch or noise.steps_per_epoch or float(_count(batches, used))
    first = 1e-3
    response = read(make_tx(first), params, state)
    if not any(group.temperature > 0 for group in response.groups):
        raise ValueError(
            "suggest_lr: the chain draws no noise to compare that of the batches with; give it a temperature above 0"
        )
    system = reduce(response, noise, hessian_product(loss, params, used, max_batches=max_batches), steps)
    top = float(system.H.diagonal().amax())
    if not top > 0:
        raise ValueError("suggest_lr: the loss has no positive curvature at params; go to a mode first")

    def at(lr: float) -> Any:
        return rescaled(system, reread(response, make_tx(lr), params, state))

    def is_stable(lr: float) -> bool:
        return loop(at(lr)).radius < 1.0 + 1e-6

    def is_cool(lr: float) -> bool:
        try:
            return predict(at(lr), order, steps).worst <= tolerance
        except ValueError:  # it diverges
            return False

    stability = _largest(is_stable, first / top, math.inf)
    heating = _largest(is_cool, min(first / top, 0.5 * stability), 0.999 * stability)
    lr = min(heating, MARGIN * stability)
    return LearningRate(lr, stability, heating, predict(at(lr), order, steps))


def _count(batches: Any, used: Any) -> int:
    return len(batches) if hasattr(batches, "__len__") else len(used)


def _largest(allowed: Callable[[float], bool], start: float, most: float) -> float:
    """The largest number that is allowed, to 1e-4 of it; infinite where ``most`` is."""
    low, high = start, None
    while not allowed(low):
        low, high = low / 4.0, low
        if low < 1e-30:
            raise ValueError("suggest_lr: no learning rate is small enough; look at the noise of the gradients first")
    while high is None:
        if low >= most:
            return math.inf
        if low > 1e30:
            raise ValueError("suggest_lr: no learning rate is too large; the chain does not move, or the loss is flat")
        wider = min(2.0 * low, most)
        if allowed(wider):
            low = wider
        else:
            high = wider
    while high > low * (1.0 + 1e-4):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if allowed(middle) else (low, middle)
    return low
