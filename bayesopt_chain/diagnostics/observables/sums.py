r"""Means and covariances of observables along chains, with their Monte Carlo errors.

Means come from sums that do not grow with the run, covariances from the draws of the two observables.

Let ``y_ct``, ``x_ct`` be two observables (vectors) at draw ``t`` of chain ``c``, minus their values at the centre of the
run, a shift that keeps the sums accurate. Draws are summed over ``B`` successive blocks of ``L`` draws; ``B`` is between
16 and 32, and ``L`` doubles when there would be more.

    mean             sum_ct y_ct / N
    its error        s^2 = g_0 tau / (B C),  tau = 1 + 2 sum_k g_k / g_0,  g_k the autocovariance of block means at a lag of k
                     blocks, by Geyer's positive, decreasing pairs
    covariance       sum_ct (y_ct - ybar) (x_ct - xbar)^T / (N - 1),  around the mean of all chains
    its error        the same s^2 of the block means of (y - ybar)(x - xbar)^T
    between chains   s^2 = sum_c (ybar_c - ybar)^2 / (C (C - 1)); where it exceeds the one of blocks about each chain's own
                     mean by more than chance (F test, 1 %), the chains disagree, and it is reported; else both estimate one
                     variance, and their mean is, each with its number of degrees of freedom as weight

``g_k`` is taken about the mean of all chains, whose variance ``g_0 tau / (B C)`` it lacks and is given back. By simulation of
1,000 pairs of chains of 200 draws, 6 % of means lie beyond two errors where successive draws have the autocorrelation 0.8 or
0.9, and 12 % at 0.95, where a chain has five independent draws (of Gaussian errors 4.6 % would). Of chains with ten independent
draws or more that agree, 1 to 4 in 100 are said to disagree of a mean, and 1 to 2 of a covariance. Its block means are over all
chains, six of 50 draws: where half of eight chains have four times the variance, one entry in three shows it then, and nearly
all do from 200 draws on.

Chains are independent: they share neither noise nor batches. (Flegal and Jones, 2010, on batch means; Geyer, 1992.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain.diagnostics.convergence import geyer

SHORTEST = 8  # draws of a block
BLOCKS = 16  # at least, and fewer than twice as many, once there are so many
AT_ONCE = 2**12  # entries of a covariance whose errors are computed together
SMALL = 16  # entries of an observable up to which all of its draws are kept


class Estimate(NamedTuple):
    """A value with its Monte Carlo error.

    Attributes:
        value: the estimate, of any shape.
        error: its standard error, of the same shape; NaN where there are too few draws to tell.
        agree: whether the chains agree within the errors of each, of the same shape.

    Example:
        >>> import torch
        >>> print(Estimate(torch.tensor(3.0), torch.tensor(0.125), torch.tensor(True)))
        3 +- 0.25
    """

    value: Tensor
    error: Tensor
    agree: Tensor

    def __str__(self) -> str:
        if self.value.numel() > 1:
            return (
                f"{list(self.value.shape)} values of rms {float(self.value.square().mean().sqrt()):.4g}, median error "
                f"{float(self.error.nanmedian()):.2g}"
            )
        return f"{float(self.value):.4g} +- {2 * float(self.error):.2g}"

    def scaled(self, factor: float, shift: float = 0.0) -> Estimate:
        """``factor * value + shift``, with its error."""
        return Estimate(factor * self.value + shift, abs(factor) * self.error, self.agree)


class Record:
    """Sums of observables of ``chains`` chains over blocks of draws, and all draws of some of them.

    Args:
        chains: their number.
        shift: the value of each observable at the centre, by name.
        kept: the names of those of which draws are kept for their covariances, besides those of at most 16 entries.

    Attributes:
        count, length: draws of each chain, and of a block.
        shapes: of each observable, by name.
        sums: by name over each block ``[C, m]``, minus the shift; the last block is being filled.
        traces: for each name of which draws are kept, these ``[C, m]``, minus the shift.
    """

    def __init__(self, chains: int, shift: Mapping[str, Tensor], kept: Sequence[str]) -> None:
        self.chains, self.count, self.length = chains, 0, SHORTEST
        self.shift = {name: x.double() for name, x in shift.items()}
        self.shapes = {name: tuple(x.shape) for name, x in shift.items()}
        self.sums = {name: [x.new_zeros(chains, x.numel())] for name, x in self.shift.items()}
        self.traces: dict[str, list[Tensor]] = {
            name: [] for name, x in shift.items() if name in kept or x.numel() <= SMALL
        }

    def add(self, draw: Mapping[str, Tensor]) -> None:
        """Take a draw of all chains: ``[C, m]`` by name."""
        for name, x in draw.items():
            shift = self.shift[name].reshape(-1)
            if x.shape[1] != len(shift):
                raise ValueError(
                    f"observe: {name!r} has {x.shape[1]} entries at a draw, and {len(shift)} at the start: return "
                    "tensors of one shape"
                )
            off = x.double() - shift
            self.sums[name][-1] = self.sums[name][-1] + off
            if name in self.traces:
                self.traces[name].append(off)
        self.count += 1
        if self.count % self.length == 0:
            self.sums = {name: [*x, torch.zeros_like(x[-1])] for name, x in self.sums.items()}
        if self.count == 2 * BLOCKS * self.length:
            self.length *= 2
            self.sums = {name: [*map(torch.add, x[:-1:2], x[1:-1:2]), x[-1]] for name, x in self.sums.items()}

    def trace(self, name: str) -> Tensor:
        """The draws of an observable that are kept, ``[C, draws, m]``.

        Raises:
            ValueError: sums of it are kept alone.
        """
        self._require(name, list(self.traces), "draws are kept")
        return torch.stack(self.traces[name], 1) + self.shift[name].reshape(-1)

    def _require(self, name: str, known: Sequence[str], what: str) -> None:
        if name not in known:
            raise ValueError(f"observe: there is no {name!r} of which {what}; there are {', '.join(map(repr, known))}")
        if not self.count:
            raise ValueError("observe: the run ended before its first draw; make it longer, or burn_in shorter")

    def mean(self, name: str) -> Estimate:
        """The mean of an observable, in its shape."""
        self._require(name, list(self.shapes), "the mean is known")
        by_chain = torch.stack(self.sums[name]).sum(0) / self.count  # [C, m]
        error, agree = _error(self.blocks(name), by_chain)
        shape = self.shapes[name]
        return Estimate(by_chain.mean(0).reshape(shape) + self.shift[name], error.reshape(shape), agree.reshape(shape))

    def covariance(self, a: str, b: str) -> Estimate:
        """The covariance of each entry of one with each entry of another, ``[*shape of a, *shape of b]``."""
        y, x = (draws - draws.mean((0, 1)) for draws in map(self.trace, (a, b)))
        by_chain = y.mT @ x / self.count  # [C, m, n]
        parts = (z[:, : self.count - self.count % self.length].split(self.length, 1) for z in (y, x))
        blocks = torch.stack([(u.mT @ v).mean(0) / self.length for u, v in zip(*parts)])
        error, agree = _error(blocks[:, None], by_chain)
        shape, n = (*self.shapes[a], *self.shapes[b]), self.count * self.chains
        value = by_chain.mean(0) * (n / max(n - 1, 1))
        return Estimate(value.reshape(shape), error.reshape(shape), agree.reshape(shape))

    def blocks(self, name: str) -> Tensor:
        """Means over blocks of successive draws, minus the shift, ``[B, C, m]``; empty where there are too few draws."""
        return torch.stack(self.sums[name])[:-1] / self.length

    def drift(self, name: str) -> float:
        """The last third of the draws of a number against the first, in standard errors of the difference."""
        x = self.blocks(name)[..., 0].mean(1)
        k = len(x) // 3
        if k < 3:
            return math.nan
        return float((x[-k:].mean() - x[:k].mean()) / ((x[-k:].var() + x[:k].var()) / k).sqrt())

    def state_dict(self) -> dict[str, Any]:
        """All sums and draws, as tensors, which have the chains on axis 0, numbers and lists."""
        return {
            "count": self.count,
            "length": self.length,
            "sums": {name: torch.stack(x, 1) for name, x in self.sums.items()},
            "traces": {name: torch.stack(x, 1) for name, x in self.traces.items() if x},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict` of a record of the same observables."""
        self.count, self.length = state["count"], state["length"]
        self.sums = {name: [*x.unbind(1)] for name, x in state["sums"].items()}
        self.traces = {name: [] for name in self.traces} | {name: [*x.unbind(1)] for name, x in state["traces"].items()}


def merged(records: Sequence[Record]) -> Record:
    """The record of all chains, from those of some chains each, of equally many draws."""
    out = Record(sum([r.chains for r in records]), records[0].shift, list(records[0].traces))
    states: list[Any] = [r.state_dict() for r in records]
    both: Any = optree.tree_map(lambda x, *more: torch.cat([x, *more]) if isinstance(x, Tensor) else x, *states)
    out.load_state_dict(both)
    return out


def _error(blocks: Tensor, by_chain: Tensor) -> tuple[Tensor, Tensor]:
    """The error of a mean over blocks and chains, and whether the chains agree.

    Args:
        blocks: block means ``[B, C, ...]``, or ``[B, 1, ...]`` of means over chains.
        by_chain: means of each chain, ``[C, ...]``.

    Returns:
        The error, and agreement, of the shape that is left.
    """
    c, k = len(by_chain), len(by_chain) - 1
    error = within = torch.full_like(by_chain[0], math.nan)
    if len(blocks) >= 4:
        about = ((0, 1), (0,))[: blocks.shape[1]]  # of one chain both means are one
        found = [
            torch.cat([_error_of_mean(x, axes) for x in blocks.flatten(2).split(AT_ONCE, 2)]).reshape(error.shape)
            for axes in about
        ]
        error, within = found[0], found[-1]
    agree = torch.ones_like(error, dtype=torch.bool)
    if k:
        between = (by_chain.var(0) / c).sqrt()
        free = max(len(blocks) - 1, 1) * blocks.shape[1]  # few where the blocks are over all chains
        u, v = 2 / (9 * k), 2 / (9 * free)
        # a ratio of variances, whose cube root is nearly normal (Paulson, 1942): 1 % of F(k, free) are above. Its inverse is
        # a number also of chains that stand still, at different places
        root = (within / between).pow(2 / 3)
        agree = ~((1 - v) - (1 - u) * root > 2.326 * (u * root.square() + v).sqrt())
        both = ((k * between.square() + free * error.square()) / (k + free)).sqrt()
        error = torch.where(agree & ~error.isnan(), both, between)
    return error, agree


def _error_of_mean(blocks: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The error of the mean of ``[B, C, m]`` from autocovariances about means over these axes, ``[m]``."""
    mean = blocks.mean(axes, keepdim=True)
    off, b, n = blocks - mean, len(blocks), blocks.shape[0] * blocks.shape[1]
    seen = torch.stack([(off[k:] * off[: b - k]).sum((0, 1)) for k in range(b)]) / n
    fades = torch.linspace(1, 1 / b, b, dtype=seen.dtype, device=seen.device)[:, None]
    g, tau = seen, torch.ones_like(seen[0])
    for _ in range(3):  # what the means take out depends on tau, which depends on it
        g = seen + fades * seen[0] * tau * mean.numel() / blocks.numel()
        tau = geyer(g / g[:1].clamp(min=1e-300)).clamp(2 / 3, b)
    return (g[0] * tau / n).sqrt()
