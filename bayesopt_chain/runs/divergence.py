r"""When a run has diverged: a draw that is not finite, or a loss that has left what the temperature allows.

At stationarity the loss of ``P`` parameters lies about ``T P / 2`` above its minimum. With ``m`` the median of the losses
of the draws so far, ``d`` the median of their distances from ``m``, a draw is out of bounds where

    loss - m  >  100 (T P / 2 + d)

and a chain has diverged after three such draws in a row: one may be a minibatch of outliers. Nothing is said at ``T = 0`` or
where the temperature is not known, before five draws have been made, or of a loss that falls, as from a cold start. The
history is a function of the losses of the draws: a run that goes on reads them, and ends where it would have ended.
"""

from __future__ import annotations

import math
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain._torch import is_dtensor
from bayesopt_chain.distributed.shards import local, mean_everywhere
from bayesopt_chain.loop import monitor
from bayesopt_chain.runs.run import Iteration, Run
from bayesopt_chain.trees import found_finite

FACTOR, IN_A_ROW, FEWEST, MOST = 100.0, 3, 5, 64


class Divergence:
    """Looks at every draw of a run.

    Args:
        run: whose draws these are.
        losses: of the draws that it has made before, ``[S, chains]``.
        state: after the last of them.

    Attributes:
        losses: of some draws, spread over the whole run: at most ``MOST``, one row of chains each.
        row: for each chain, how many draws in a row are out of bounds; ``None`` where no chain's last one is.
    """

    def __init__(self, run: Run, losses: Tensor | None = None, state: Any = None) -> None:
        self.run = run
        self.losses: list[Tensor] = []
        self.bounds: tuple[Tensor, Tensor] | None = None  # their median, and m + 100 d, once they have been asked for
        self.stride, self.seen = 1, 0
        self.row: Tensor | None = None
        before = [] if losses is None else list(losses.double().flatten(1).cpu())
        for i, loss in enumerate(before):  # only the last draws can be in a row that goes on
            if i > len(before) - IN_A_ROW:
                self._exploded(0, loss, state)
            self._keep(loss)

    def look(self, it: Iteration) -> tuple[Tensor | None, str]:
        """The loss of a draw, which is the mean over the ranks that share its chain, and what is wrong with it on any of them.

        Nothing is wrong with a draw that may be kept.
        """
        loss = getattr(it.info, "loss", None)
        loss = loss.detach() if isinstance(loss, Tensor) else torch.zeros(0, device="cpu")
        loss = loss.full_tensor() if is_dtensor(loss) else loss  # type: ignore[attr-defined]
        leaves = optree.tree_leaves(it.params)
        found, finite = loss.reshape(-1).to("cpu", torch.float64), found_finite(map(local, leaves))
        if any(map(is_dtensor, leaves)):
            # One message: a rank whose part is not finite makes the last number NaN on all of them.
            told = torch.cat([found, torch.tensor([0.0 if finite else torch.nan], dtype=found.dtype, device="cpu")])
            told = mean_everywhere(told.to(loss.device), leaves).cpu()
            found, finite = told[:-1], bool(torch.isfinite(told[-1]))
            loss = found.reshape(loss.shape).to(loss)
        mean = loss.clone() if loss.numel() else None  # a captured step overwrites its own
        if not all(map(math.isfinite, found.tolist())):
            return mean, f"the loss of step {it.step} is {_shown(found)}"
        if not finite:
            return mean, f"the parameters after step {it.step} are not finite"
        said = self._exploded(it.step, found, it.state)
        self._keep(found)
        return mean, said

    def _exploded(self, step: int, loss: Tensor, state: Any) -> str:
        """What is wrong with the losses of a draw, one for each chain, as those before it were."""
        if len(self.losses) < FEWEST:
            return ""
        if self.bounds is None:
            history = torch.stack(self.losses)
            median = history.median(0).values
            self.bounds = median, median + FACTOR * (history - median).abs().median(0).values
        if not bool((loss > self.bounds[1]).any()):  # nearly always: the rest is worked out where it is needed
            self.row = None
            return ""
        (median, bound), heat = self.bounds, self._heat(state)
        out = loss > bound + FACTOR * heat if heat else torch.zeros_like(loss, dtype=torch.bool)
        self.row = torch.where(out, (0 if self.row is None else self.row) + 1, 0)
        if int(self.row.max()) < IN_A_ROW:
            return ""
        i = int(torch.where(self.row >= IN_A_ROW, loss - median, -torch.inf).argmax())
        chain = f" of chain {i}" if len(loss) > 1 else ""
        return (
            f"the loss{chain} of step {step} is {loss[i]:.4g}, where the median of this run is {median[i]:.4g} and T P / 2 "
            f"is {heat:.3g}"
        )

    def _keep(self, loss: Tensor) -> None:
        """Keep the losses of every so many draws."""
        if self.seen % self.stride == 0:
            self.losses.append(loss)
            self.bounds = None
            if len(self.losses) > MOST:
                self.losses, self.stride = self.losses[::2], 2 * self.stride
        self.seen += 1

    def _heat(self, state: Any) -> float:
        """``T P / 2`` of one chain; 0 where the temperature is not known."""
        temperature = temperature_of(self.run.step, state) or 0.0
        elements = sum(x.numel() for x in optree.tree_leaves(self.run.params)) // (self.run.chains or 1)
        return temperature * elements / 2


def temperature_of(step: Any, state: Any) -> float | None:
    """The highest temperature that is in force; ``None`` where nobody knows."""
    each, inner = (getattr(step, "each", None) or {}).get("temperature"), getattr(step, "step", step)
    groups = getattr(getattr(inner, "optimizer", None), "param_groups", ())
    told = [g["temperature"] for g in groups if isinstance(g.get("temperature"), (int, float))]
    if each is not None or told:
        return float(max(told) if each is None else each.max())
    tx = getattr(inner, "tx", None)
    if tx is None:
        return None
    try:
        return float(monitor.temperature(tx, state, torch.zeros((), dtype=torch.float64, device="cpu")).max())
    except (RuntimeError, TypeError, ValueError):  # a schedule of stacked counts
        return None


def _shown(loss: Tensor) -> str:
    bad = [i for i, ok in enumerate(torch.isfinite(loss).tolist()) if not ok]
    return str(loss.item()) if loss.numel() == 1 else f"not finite in chains {bad[:8]}{'...' if len(bad) > 8 else ''}"
