r"""Contour SGLD (Deng, Lin and Liang, 2020): a self-adapting flat histogram of the loss, so that the chain crosses barriers.

The range of the loss is cut into ``m`` bins of width ``w`` with lower edges ``l_i``; ``theta(i)`` estimates the target's mass
in bin ``i``, and the gradient is multiplied so that the chain samples ``exp(-L / T) / Psi(L)^zeta``. With ``J`` the bin of the
current loss and ``omega`` a decreasing step,

    log Psi(L) = log theta(J - 1) + (L - l_J) / w (log theta(J) - log theta(J - 1)),
    g <- (1 + zeta T (log theta(J) - log theta(J - 1)) / w) g,
    theta(i) <- theta(i) + omega theta(J)^zeta (1_{i = J} - theta(i)).

``Psi`` is continuous, and a sample counts with the weight ``Psi(L)^zeta`` (:func:`contour_weight`), the inverse of what the
chain was flattened by; the paper's ``theta(J)^zeta`` is not (the variance of a Gaussian comes out as 0.447 instead of 0.5).
Up to the lowest bin that was ever visited ``Psi`` is constant, the bins below being empty: where the range begins below the
smallest loss, which nobody knows, the mass of an empty bin, which tends to 0, would otherwise hold the chain at the bottom.
The multiplier jumps from bin to bin, so that steps have to be small against bins: where the noise of one step,
``sqrt(2 T lr)``, is as wide as a bin, the weighted variance is too small.
Where a bin is over-visited the multiplier turns negative and the chain climbs out. At T = 0 it is 1 and this is the chain
around it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bayesopt_chain import checks, schedules
from bayesopt_chain.compose import chain
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import Link, LinkContext, Traits
from bayesopt_chain.core.op import Leaves, TensorOps
from bayesopt_chain.links.langevin_noise import inject_langevin_noise
from bayesopt_chain.links.learning_rate import scale_by_neg_lr
from bayesopt_chain.matching.response import Nonlinear
from bayesopt_chain.samplers._in_front import CLIPPING, GAINS, require_all_parameters, require_in_front
from bayesopt_chain.schedules import ScalarOrSchedule, is_zero, now


class ContourState(NamedTuple):
    """Updates seen (0-d, int64); the estimated mass of each bin of the loss, float64 ``[bins]``, summing to 1; and the lowest
    bin that a loss was in (0-d, int64; ``bins`` before the first)."""

    step: Tensor
    mass: Tensor
    lowest: Tensor


@dataclass(frozen=True)
class Contour(Link):
    """The link behind :func:`scale_by_contour`."""

    temperature: ScalarOrSchedule
    low: float
    high: float
    bins: int
    zeta: float
    omega: schedules.Schedule
    name = "scale_by_contour"
    traits = Traits(
        response=Nonlinear(),
        extra_kwargs=frozenset({"loss"}),
        required_kwargs=frozenset({"loss"}),
        on_shards="elementwise",
        checks_gradients=True,
    )

    @property
    def width(self) -> float:
        return (self.high - self.low) / self.bins

    def init(self, leaves: Leaves, context: LinkContext) -> ContourState:
        if not is_zero(self.temperature):
            require_all_parameters(self, "scale_by_contour", "these would move by another loss than the flattened one")
            why = "its bins count the loss alone, so that another prior would act; write it behind, or into the loss"
            require_in_front(context, "scale_by_contour", (CLIPPING, GAINS), why)
        device = leaves[0].device if leaves else torch.device("cpu")
        lowest = torch.full((), self.bins, dtype=torch.int64, device=device)
        mass = torch.full((self.bins,), 1.0 / self.bins, dtype=torch.float64, device=device)
        return ContourState(torch.zeros((), dtype=torch.int64, device=device), mass, lowest)

    def bin(self, loss: Tensor) -> Tensor:
        """Number of the bin of a loss; what lies outside the range counts to its ends."""
        place = (loss.detach().to(torch.float64) - self.low) / self.width
        return place.floor().clamp(0, self.bins - 1).to(torch.int64)

    def log_psi(self, loss: Tensor, state: ContourState) -> Tensor:
        """The logarithm of ``Psi`` at a loss, 0-d, float64."""
        place, here = (loss.to(torch.float64) - self.low) / self.width, self.bin(loss)
        bottom = torch.where(state.lowest < self.bins, torch.maximum(here, state.lowest), here)
        log_mass = state.mass.log()
        top, below = log_mass[bottom], log_mass[(bottom - 1).clamp(min=0)]
        return torch.where(here > state.lowest, below + (place - here) * (top - below), top)

    def update(
        self, g: Leaves, state: ContourState, op: TensorOps, context: LinkContext
    ) -> tuple[Leaves, ContourState]:
        loss = context.extra.get("loss")
        if loss is None or loss.ndim != 0:
            came = "nothing" if loss is None else f"shape {tuple(loss.shape)}"
            raise ValueError(
                f"contour: update needs loss=, the loss at the current parameters as a 0-d tensor, got {came}; "
                "bc.make_step passes it"
            )
        temperature = checks.at_this_step("temperature", now(self.temperature, state.step))
        here = self.bin(loss)
        member = (torch.arange(self.bins, device=here.device) == here).to(torch.float64)
        below = (torch.arange(self.bins, device=here.device) == (here - 1).clamp(min=0)).to(torch.float64)
        log_mass = state.mass.log()
        lowest = torch.minimum(state.lowest, here)
        slope = torch.where(here > lowest, ((member - below) * log_mass).sum() / self.width, 0.0)
        factor = 1.0 + self.zeta * temperature * slope
        gain = now(self.omega, state.step) * (member * state.mass).sum() ** self.zeta
        mass = state.mass + gain * (member - state.mass)
        moves = [x * factor.to(x.dtype) for x in g]
        kept = op.put([state.mass, state.lowest], [mass, lowest])
        return op.put(g, moves), ContourState(op.next_count(state.step), *kept)


@checks.factory_takes(
    low=checks.NUMBER,
    high=checks.NUMBER,
    bins=checks.number("[2, 16777216]", integer=True),
    zeta=checks.number("(0, 1]"),
)
def scale_by_contour(
    temperature: ScalarOrSchedule,
    low: float,
    high: float,
    *,
    bins: int = 50,
    zeta: float = 0.75,
    omega: schedules.Schedule | None = None,
) -> Chain:
    """Multiply gradients so that what follows samples a flattened histogram of the loss.

    Args:
        temperature: of the chain: number, 0-d tensor or schedule. The flattened histogram belongs to a temperature, so that
            along a schedule it is learned anew, as fast as ``omega`` lets it.
        low: lower end of the range of the loss to flatten.
        high: its upper end.
        bins: number of bins, at least 2.
        zeta: how flat, in (0, 1].
        omega: steps of the mass estimate (default ``robbins_monro(1, b=1000, gamma=0.8)``).

    Returns:
        A link whose ``update`` takes ``loss=``.

    Raises:
        ValueError: an argument out of range; at ``init``, a mask or a group; weight decay or a prior in front, which the bins
            would not count (behind it they are right); at ``update``, a missing loss.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.samplers.scale_by_contour(1.0, 0.0, 10.0)
        >>> tx.update(torch.ones(1), tx.init(torch.zeros(1)), loss=torch.tensor(3.0), inplace=False)[0]
        tensor([1.])
    """
    if not low < high:
        raise ValueError(f"scale_by_contour: low must lie below high, got {low!r} and {high!r}")
    omega = schedules.robbins_monro(1.0, b=1000.0, gamma=0.8) if omega is None else omega
    if isinstance(temperature, int):
        temperature = float(temperature)
    return Chain((Contour(temperature, low, high, bins, zeta, omega),))


@checks.factory_takes()
def contour_sgld(
    lr: ScalarOrSchedule,
    low: float,
    high: float,
    *,
    temperature: ScalarOrSchedule,
    bins: int = 50,
    zeta: float = 0.75,
    omega: schedules.Schedule | None = None,
    generator: torch.Generator | None = None,
) -> Chain:
    """Contour SGLD (Deng, Lin and Liang, 2020). At ``temperature=0`` it is SGD.

    Args:
        lr: learning rate: number, 0-d tensor or schedule.
        low: lower end of the range of the loss to flatten.
        high: its upper end.
        temperature: ``1 / N`` for a loss that is a mean over ``N`` data; along a schedule as in :func:`scale_by_contour`.
        bins: number of bins, at least 2.
        zeta: how flat, in (0, 1].
        omega: steps of the mass estimate (default ``robbins_monro(1, b=1000, gamma=0.8)``).
        generator: source of the random key (default: torch's global generator).

    Returns:
        A chain whose ``update`` takes ``loss=`` (:func:`bayesopt_chain.make_step` passes it). Weigh samples by
        :func:`contour_weight`.

    Raises:
        ValueError: an argument out of range; at ``update``, a missing loss.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.samplers.contour_sgld(0.01, 0.0, 10.0, temperature=1.0)
        >>> step, params = bc.make_step(lambda p, batch: (p**2).sum(), tx), torch.ones(2)
        >>> params, state, info = step(params, tx.init(params), ())
        >>> weight = bc.samplers.contour_weight(tx, state, info.loss)
    """
    return chain(
        scale_by_contour(temperature, low, high, bins=bins, zeta=zeta, omega=omega),
        inject_langevin_noise(temperature, order=1, generator=generator),
        scale_by_neg_lr(lr),
    )


@checks.takes(loss=checks.VALUES, state=checks.instance(tuple, "the state of tx"))
def contour_weight(tx: Chain, state: tuple, loss: Tensor) -> Tensor:
    """Importance weight ``Psi(loss)^zeta`` of a sample with this loss, 0-d; only ratios of weights mean anything.

    Args:
        tx: a chain with a contour link.
        state: its state.
        loss: 0-d loss of the sample.

    Returns:
        A 0-d tensor, float64.

    Raises:
        ValueError: a chain without a contour link.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.samplers.contour_sgld(0.01, 0.0, 10.0, temperature=1.0, bins=4, zeta=1.0)
        >>> bc.samplers.contour_weight(tx, tx.init(torch.ones(2)), torch.tensor(3.0))
        tensor(0.2500, dtype=torch.float64)
    """
    for link, entry in zip(tx.links, state):
        if isinstance(link, Contour):
            return (link.zeta * link.log_psi(loss, entry)).exp()
    raise ValueError(f"contour_weight: no link of {tx} is scale_by_contour; every sample of this chain weighs the same")
