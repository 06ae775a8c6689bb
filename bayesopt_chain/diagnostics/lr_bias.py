r"""What the learning rate does to a mean: the same chains once more at half of it.

A mean ``S(lr)`` over the stationary chain is ``S(0) + c lr^p + ...``: ``p = 1`` for white noise (``order=1``) and for what
independent minibatches add, ``p = 2`` for matched noise on a loss that is not quadratic, and no term at all on one that is.
From ``S(lr)`` and ``S(lr / 2)`` the error of the first is

    S(lr) - S(0) = (S(lr) - S(lr / 2)) / (1 - 2^-p),      twice the difference for p = 1, 4/3 of it for p = 2.

The run at ``lr / 2`` takes twice the steps, so that both cover the same time. This is Richardson's extrapolation, for
samplers that of Talay and Tubaro (1990).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import kinds
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.loop.parallel import parallel, stack
from bayesopt_chain.loop.step import make_step
from bayesopt_chain.runs.sample import iterate

Z = 3.0  # standard errors that a difference must stand above before it is called one


class LrBias(NamedTuple):
    """What :func:`lr_bias` returns; the tensors have the statistic's shape.

    Attributes:
        at_lr: the mean at ``lr``.
        at_half: the mean at ``lr / 2``.
        difference: ``at_lr - at_half``.
        standard_error: of the difference, from the spread of the chains.
    """

    at_lr: Tensor
    at_half: Tensor
    difference: Tensor
    standard_error: Tensor

    @kinds.takes(order=kinds.WHOLE)
    def bias(self, order: int = 1) -> Tensor:
        """The estimated error of the mean at ``lr``.

        Args:
            order: the power of ``lr`` with which the error falls: 1, the default, for white noise and for what independent
                minibatches add, 2 for matched noise.

        Returns:
            A tensor of the statistic's shape, in its units.

        Example:
            >>> import torch
            >>> from bayesopt_chain.diagnostics import LrBias
            >>> found = LrBias(torch.tensor(1.5), torch.tensor(1.2), torch.tensor(0.3), torch.tensor(0.01))
            >>> found.bias(order=1), found.bias(order=2)
            (tensor(0.6000), tensor(0.4000))
        """
        return self.difference / (1.0 - 2.0**-order)

    @property
    def is_seen(self) -> bool:
        """Whether some element of the difference stands above three standard errors, corrected for the number of elements."""
        level = math.erfc(Z / math.sqrt(2.0)) / max(1, self.difference.numel())
        limit = math.sqrt(2.0) * float(torch.erfinv(torch.tensor(1.0 - level, dtype=torch.float64, device="cpu")))
        return bool((self.difference.abs() > limit * self.standard_error).any())

    def __str__(self) -> str:
        shares = self.difference.abs() / self.standard_error
        worst = int(shares.flatten().argmax())
        d, se = float(self.difference.flatten()[worst]), float(self.standard_error.flatten()[worst])
        verdict = "the learning rate moves the mean" if self.is_seen else "no effect of the learning rate is seen"
        return f"{verdict}: the largest difference from half of it is {d:.3g} +- {2 * se:.2g}"


@kinds.takes(build=kinds.FUNCTION, batches=kinds.BATCH_OR_BATCHES, statistic=kinds.FUNCTION, chains=kinds.whole(4))
def lr_bias(
    build: Callable[[float], Chain],
    loss: Callable[[Any, Any], Any],
    params: Any,
    batches: Any,
    *,
    lr: float,
    statistic: Callable[[Any], Tensor] | None = None,
    steps: int = 2000,
    burn_in: int = 500,
    chains: int = 8,
) -> LrBias:
    """Compare parallel chains at ``lr`` with as many at ``lr / 2``.

    Args:
        build: ``build(lr)`` returns the chain, such as ``lambda lr: bc.sghmc(lr, temperature=1 / n)``.
        loss: ``loss(params, batch)``, a mean over the batch.
        params: where all chains start.
        batches: one batch, or anything that can be gone through again, as for :func:`bayesopt_chain.sample`.
        lr: the learning rate in question.
        statistic: a function of one chain's parameters whose mean is compared, of any shape. Default: the loss of the batch.
        steps: at ``lr``, burn-in included; twice as many are made at ``lr / 2``.
        burn_in: first steps that are left out; twice as many at ``lr / 2``.
        chains: number of independent chains at each learning rate, at least 4: their spread is the standard error.

    Returns:
        :class:`LrBias`; ``print`` it.

    Raises:
        ValueError: too few chains; ``lr`` not positive; a chain that diverged.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> _ = torch.manual_seed(0)
        >>> def found(order):
        ...     return bc.diagnostics.lr_bias(
        ...         lambda lr: bc.sgld(lr, temperature=1.0, order=order), lambda w, batch: (w**2).sum() / 2, torch.zeros(500),
        ...         None, lr=0.5, statistic=lambda w: (w**2).mean(), steps=200, burn_in=50,
        ...     )
        >>> found(2).is_seen, found(1).is_seen      # the variance at order 1 is 1 / (1 - lr / 2)
        (False, True)
    """
    if statistic is not None and not isinstance(out := statistic(params), Tensor):
        raise TypeError(f"lr_bias: statistic must return a tensor, got {type(out).__name__}")
    means = [
        _means(build(lr / part), loss, params, batches, statistic, part * steps, part * burn_in, part, chains)
        for part in (1, 2)
    ]
    at_lr, at_half = (m.mean(0) for m in means)
    error = sum(m.var(0) / chains for m in means)
    assert isinstance(error, Tensor)
    return LrBias(at_lr, at_half, at_lr - at_half, error.sqrt())


def _means(
    tx: Chain,
    loss: Callable[[Any, Any], Any],
    params: Any,
    batches: Any,
    statistic: Callable[[Any], Tensor] | None,
    steps: int,
    burn_in: int,
    thinning: int,
    chains: int,
) -> Tensor:
    """The statistic's mean over a run, for each chain."""
    step = parallel(make_step(loss, tx), chains)
    stacked = stack([optree.tree_map(lambda p: p.detach().clone(), params) for _ in range(chains)])
    of_all = None if statistic is None else torch.vmap(statistic)
    total, count = torch.zeros((), dtype=torch.float64, device="cpu"), 0
    state = step.init(tx, stacked)
    for it in iterate(step, stacked, state, batches, steps=steps, burn_in=burn_in, thinning=thinning):
        if it.is_draw:
            with torch.no_grad():
                total = total + (it.info.loss if of_all is None else of_all(it.params)).double()
            count += 1
    cut = count < (steps - burn_in) // thinning  # iterate has stopped in front of a draw that is not finite
    if cut or not bool(torch.isfinite(total).all()):
        raise ValueError(
            f"lr_bias: a chain diverged in the run of {steps} steps; lower lr, or look at the scale of batches and loss"
        )
    return total / count
