r"""Division by the root of a mean square of the gradients ``g`` over a window that adapts (Springenberg et al. 2016).

The window ``tau``, in steps, gets longer where the gradients' mean ``m`` is small beside their root mean square ``V^(1/2)``:

    m <- m + (g - m) / (tau + 1),   V <- V + (g^2 - V) / (tau + 1),   tau <- 1 + tau (1 - m^2 / V),   P = 1 / (sqrt(V) + eps).

``P`` is learned during the first updates and then frozen. The noise, of covariance ``Psi P^-1``, is added after the averages
are updated, so that they contain clean gradients only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from bayesopt_chain.arguments import AT_LEAST_ONE, POSITIVE, checked_as
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import LinkContext
from bayesopt_chain.core.op import Leaves, TensorOps
from bayesopt_chain.links.leaves import new_counts, zeros
from bayesopt_chain.links.rms import Learned, root


class AdaptiveWindowState(NamedTuple):
    """The state of the scaling.

    Attributes:
        tau: the window in steps, of the shape of each parameter.
        mean: the mean ``m`` of the gradients over the window, of the shape of each parameter.
        square: the mean square ``V`` of the gradients over the window, of the shape of each parameter.
        count: how many updates each leaf has had, 0-d int64.
    """

    tau: tuple[Tensor, ...]
    mean: tuple[Tensor, ...]
    square: tuple[Tensor, ...]
    count: tuple[Tensor, ...]  # pyright: ignore[reportIncompatibleMethodOverride]


@dataclass(frozen=True)
class AdaptiveWindow(Learned):
    """The link that :func:`scale_by_adaptive_window` returns, with the same arguments."""

    freeze_after: int
    eps: float = 1e-8

    def init(self, leaves: Leaves, context: LinkContext) -> AdaptiveWindowState:
        return AdaptiveWindowState(zeros(leaves), zeros(leaves), zeros(leaves), new_counts(leaves))

    def learned(self, g: Leaves, state: AdaptiveWindowState, op: TensorOps) -> AdaptiveWindowState:
        tau, mean, square = list[Tensor](), list[Tensor](), list[Tensor]()
        for x, t, m, v, c in zip(g, *state):
            learns = c < self.freeze_after
            new_mean = m + (x - m) / (t + 1.0)
            new_square = v + (x * x - v) / (t + 1.0)
            positive = new_square > 0  # false where every gradient was 0 or its square underflows: no 0/0 there
            signal = torch.where(positive, new_mean * new_mean / torch.where(positive, new_square, 1.0), 0.0)
            tau.append(torch.where(learns, 1.0 + t * (1.0 - signal.clamp(max=1.0)), t))
            mean.append(torch.where(learns, new_mean, m))
            square.append(torch.where(learns, new_square, v))
        window, average, held = (tuple(op.put(old, new)) for old, new in zip(state, (tau, mean, square)))
        return AdaptiveWindowState(window, average, held, op.count(state.count))

    def denominators(self, state: AdaptiveWindowState) -> list[Tensor]:
        return [root(v).add(self.eps) for v in state.square]

    def __str__(self) -> str:
        return f"scale_by_adaptive_window(freeze_after={self.freeze_after}, eps={self.eps})"


@checked_as(freeze_after=replace(AT_LEAST_ONE, hint="nothing is learned without a burn-in"), eps=POSITIVE)
def scale_by_adaptive_window(freeze_after: int, eps: float = 1e-8) -> Chain:
    """Divide by the root of the gradients' mean square over a window that adapts (Springenberg et al. 2016).

    Args:
        freeze_after: the number of updates, at least 1, after which the scale does not change any more. They are burn-in.
        eps: a positive number that is added to the root. If the gradient of a parameter is always 0, its scale is ``1 / eps``,
            and the variance of its noise is multiplied by ``1 / eps``.

    Returns:
        A link; its state has three tensors of the shape of each parameter.

    Raises:
        ValueError: ``freeze_after`` is below 1, or ``eps`` is not positive.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.samplers.scale_by_adaptive_window(10)
        >>> tx.update([torch.tensor([2.0])], tx.init([torch.zeros(1)]), inplace=False)[0]
        [tensor([1.])]
    """
    return Chain((AdaptiveWindow(freeze_after, float(eps)),))
