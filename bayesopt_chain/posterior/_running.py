r"""Averages over draws that are not kept: moments of the parameters, or of predictions, updated draw by draw.

    mean_s = mean_{s-1} + (theta_s - mean_{s-1}) / s,      M_s = M_{s-1} + (theta_s - mean_{s-1}) (theta_s - mean_s)

and the variance is ``M_s / (s - 1)`` (Welford, 1962).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor


class RunningMoments:
    """Mean and variance over the draws of a run, in float64, without keeping a draw.

    Pass it to ``bc.sample(callbacks=[...])``, or call :meth:`add` with a tree.

    Args:
        of: a function from the parameters of a draw to a tensor or a tree of them, whose moments are taken: probabilities at
            fixed inputs have the predictive probabilities for their mean. Default: the parameters themselves.

    Attributes:
        count: number of draws so far.
        mean: tree of means; ``None`` before the first draw.

    Example:
        >>> import torch
        >>> from bayesopt_chain.posterior import RunningMoments
        >>> moments = RunningMoments()
        >>> for value in (1.0, 2.0, 6.0):
        ...     moments.add({"w": torch.tensor([value])})
        >>> moments.mean["w"].item(), moments.variance["w"].item()
        (3.0, 7.0)

        The predictive probabilities at some inputs:

        >>> x = torch.ones(1)
        >>> predictive = RunningMoments(lambda w: torch.stack([x * w, -x * w], -1).softmax(-1))
        >>> for w in (2.0, -2.0):
        ...     predictive.add(torch.tensor(w))
        >>> predictive.mean
        tensor([[0.5000, 0.5000]], dtype=torch.float64)
    """

    def __init__(self, of: Callable[[Any], Any] = lambda params: params) -> None:
        self.of, self.count = of, 0
        self.mean: Any = None
        self._squares: Any = None

    def __call__(self, iteration: Any) -> None:
        if iteration.is_draw:
            _require_equal_weights(type(self).__name__, iteration.info)
            self.add(iteration.params)

    @torch.no_grad()
    def add(self, params: Any) -> None:
        """Add one draw.

        Args:
            params: its parameters, a tree of leaves ``[*leaf.shape]``, the same for every draw.
        """
        self.count += 1
        params = optree.tree_map(lambda p: p.detach().to(torch.float64), self.of(params))
        if self.mean is None:
            self.mean = optree.tree_map(torch.clone, params)
            self._squares = optree.tree_map(torch.zeros_like, params)
            return
        for p, mean, squares in zip(*(optree.tree_leaves(t) for t in (params, self.mean, self._squares))):
            delta = p - mean
            mean.add_(delta, alpha=1 / self.count)
            squares.addcmul_(delta, p - mean)

    @property
    def variance(self) -> Any:
        """Tree of unbiased variances; at least two draws are needed."""
        if self.count < 2:
            raise ValueError(f"RunningMoments: a variance needs at least 2 draws, there are {self.count}")
        return optree.tree_map(lambda squares: squares / (self.count - 1), self._squares)


def _require_equal_weights(who: str, info: Any) -> None:
    """Refuse the steps of a chain whose draws have weights."""
    if isinstance(getattr(info, "weight", None), Tensor):
        raise ValueError(
            f"{who}: the draws of this chain have weights, and it counts all draws the same; keep them, and take means over "
            "draws.equally_weighted()"
        )
