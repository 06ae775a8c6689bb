r"""When a run has diverged: a draw that is not finite, or a loss that has left what the temperature allows.

At stationarity the loss of ``P`` parameters lies about ``T P / 2`` above its minimum. With ``m`` the median of the losses
of the draws so far, ``d`` the median of their distances from ``m``, a draw is out of bounds where

    loss - m  >  100 (T P / 2 + d)

and a run has diverged after three such draws in a row: one may be a minibatch of outliers. Nothing is said at ``T = 0`` or
where the temperature is not known, before five draws have been made, or of a loss that falls, as from a cold start.
"""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain.distributed.shards import everywhere, local
from bayesopt_chain.loop import monitor
from bayesopt_chain.runs.run import Iteration, Run
from bayesopt_chain.trees import all_finite

FACTOR, IN_A_ROW, FEWEST, MOST = 100.0, 3, 5, 64


class Divergence:
    """Looks at every draw of a run.

    Attributes:
        losses: of some draws, spread over the whole run: at most ``MOST``, one row of chains each.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.losses: list[Tensor] = []
        self.stride, self.seen, self.row = 1, 0, 0

    def why(self, it: Iteration) -> str:
        """What is wrong with a draw, on any rank; nothing if it may be kept."""
        loss = getattr(it.info, "loss", None)
        loss = loss if isinstance(loss, Tensor) else None
        leaves = optree.tree_leaves(it.params)
        values = [*map(local, leaves), *([] if loss is None else [local(loss)])]
        if not bool(everywhere(all_finite(values), leaves)):
            if loss is not None and not bool(torch.isfinite(local(loss)).all()):
                return f"the loss of step {it.step} is {_shown(loss)}"
            return f"the parameters after step {it.step} are not finite"
        if loss is None or is_shared(leaves):
            return ""
        return self._exploded(it, loss.detach().double().reshape(-1).cpu())

    def _exploded(self, it: Iteration, loss: Tensor) -> str:
        said = ""
        if len(self.losses) >= FEWEST:
            history = torch.stack(self.losses)
            median = history.median(0).values
            width = (history - median).abs().median(0).values
            out = loss - median > FACTOR * width
            heat = self._heat(it) if bool(out.any()) else None
            out = out & (loss - median > FACTOR * (width + heat)) if heat is not None and heat > 0 else out & False
            self.row = self.row + 1 if bool(out.any()) else 0
            if self.row >= IN_A_ROW:
                i = int((loss - median).argmax())
                chain = f" of chain {i}" if len(loss) > 1 else ""
                said = (
                    f"the loss{chain} of step {it.step} is {loss[i]:.4g}, where the median of this run is "
                    f"{median[i]:.4g} and T P / 2 "
                    f"is {heat:.3g}"
                )
        if self.seen % self.stride == 0 and not self.row:
            self.losses.append(loss)
            if len(self.losses) > MOST:
                self.losses, self.stride = self.losses[::2], 2 * self.stride
        self.seen += 1
        return said

    def _heat(self, it: Iteration) -> float | None:
        """``T P / 2`` of one chain; ``None`` where the temperature is not known."""
        temperature = temperature_of(self.run.step, it.state)
        if temperature is None:
            return None
        elements = sum(x.numel() for x in optree.tree_leaves(it.params)) // (self.run.chains or 1)
        return temperature * elements / 2


def is_shared(leaves: list[Any]) -> bool:
    """Whether ranks share these chains: what one of them says of a loss, another may not."""
    return any(local(x) is not x for x in leaves)


def temperature_of(step: Any, state: Any) -> float | None:
    """The highest temperature that is in force; ``None`` where nobody knows."""
    each = (getattr(step, "each", None) or {}).get("temperature")
    if each is not None:
        return float(each.max())
    inner = getattr(step, "step", step)
    groups = getattr(getattr(inner, "optimizer", None), "param_groups", ())
    told = [g["temperature"] for g in groups if isinstance(g.get("temperature"), (int, float))]
    if told:
        return float(max(told))
    tx = getattr(inner, "tx", None)
    if tx is None:
        return None
    try:
        return float(monitor.temperature(tx, state, torch.zeros((), dtype=torch.float64, device="cpu")).max())
    except (RuntimeError, TypeError, ValueError):  # a schedule of stacked counts
        return None


def _shown(loss: Tensor) -> str:
    loss = local(loss)
    if loss.ndim == 0:
        return str(loss.item())
    bad = [i for i, ok in enumerate(torch.isfinite(loss).tolist()) if not ok]
    return f"not finite in chains {bad[:8]}{'...' if len(bad) > 8 else ''}"
