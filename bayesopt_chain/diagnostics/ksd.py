r"""Kernel Stein discrepancy: how far draws are from a distribution of which only the score is known.

    KSD^2 = 1/S^2 sum_ij k0(x_i, x_j),        s = grad log p
    k0(x, y) = s(x).s(y) k + s(x).grad_y k + s(y).grad_x k + tr grad_x grad_y k

(Liu, Lee and Jordan, 2016; Chwialkowski et al., 2016). With r^2 = |x - y|^2 / h^2 the kernel is

    "imq"        k = (1 + r^2)^(-1/2),     which detects non-convergence (Gorham and Mackey, 2017)
    "gaussian"   k = exp(-r^2 / 2)

Both depend on x - y alone: with f = dk/d(r^2) and f' its derivative, grad_x k = 2 f (x - y) / h^2 = -grad_y k and
tr grad_x grad_y k = -(2 d f + 4 r^2 f') / h^2. Pairs are visited in blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import optree
import torch
from torch import Tensor

from bayesopt_chain import kinds

if TYPE_CHECKING:
    from bayesopt_chain.runs.draws import Draws


@kinds.takes(
    score=kinds.SCORES,
    kernel=kinds.one_of("imq", "gaussian"),
    bandwidth=kinds.POSITIVE,
    unbiased=kinds.BOOL,
    block=kinds.WHOLE,
)
def ksd(
    draws: Draws | Any,
    score: Callable[[Any], Any] | Any,
    *,
    kernel: Literal["imq", "gaussian"] = "imq",
    bandwidth: float | None = None,
    unbiased: bool = False,
    block: int = 512,
) -> float:
    """Kernel Stein discrepancy of draws.

    Args:
        draws: :class:`bayesopt_chain.Draws` (chains are pooled), or a tree with leaves ``[S, ...]``.
        score: gradient of the log density: a function from the parameters of one draw to a tree like them, or a tree of
            scores like the draws. For a mean loss sampled at temperature ``T`` it is minus the gradient of the loss over T.
        kernel: ``"imq"`` or ``"gaussian"``.
        bandwidth: ``h``; by default the median distance of (at most 1,000) draws.
        unbiased: leave out the pairs i = j and return the (possibly negative) estimate of the *squared* discrepancy.
        block: pairs are visited ``block x block`` at a time, which bounds the memory.

    Returns:
        The discrepancy (not squared), or with ``unbiased=True`` the U-statistic.

    Raises:
        ValueError: fewer than two draws, another kernel, a bandwidth that is not positive, scores of another shape.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> x = torch.randn(300, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> right = bc.diagnostics.ksd({"w": x}, lambda p: {"w": -p["w"]})
        >>> shifted = bc.diagnostics.ksd({"w": x + 1}, lambda p: {"w": -p["w"]})
        >>> right < 0.2 < shifted
        True
    """
    tree: Any = draws.params if hasattr(type(draws), "params") else draws
    if getattr(draws, "chains", None) is not None:
        tree = optree.tree_map(lambda x: x.flatten(0, 1), tree)
    size = optree.tree_leaves(tree)[0].shape[0]
    if size < 2:
        raise ValueError(f"ksd: needs at least 2 draws, got {size}")
    scores: Any = score
    if callable(score):
        rows: list[Any] = [score(optree.tree_map(lambda x, i=i: x[i], tree)) for i in range(size)]
        scores = optree.tree_map(lambda *leaves: torch.stack(leaves), *rows)
    x, s = _matrix(tree), _matrix(scores)
    for name, matrix in (("draws", x), ("score", s)):
        if not kinds.is_finite(matrix):
            raise ValueError(f"ksd: {name}: some of its numbers are NaN or infinite")
    if x.shape != s.shape:
        raise ValueError(
            f"ksd: score must be like the draws, which are a matrix {tuple(x.shape)}, got one {tuple(s.shape)}"
        )
    if bandwidth is None:
        bandwidth = torch.pdist(x[:: max(1, size // 1000)]).median().item() or 1.0
    total = x.new_zeros(())
    for i in range(0, size, block):
        for j in range(0, i + 1, block):
            k0 = _stein_kernel(
                x[i : i + block], s[i : i + block], x[j : j + block], s[j : j + block], kernel, bandwidth
            )
            if i == j:
                total += k0.sum() - (k0.diagonal().sum() if unbiased else 0.0)
            else:
                total += 2 * k0.sum()
    if unbiased:
        return (total / (size * (size - 1))).item()
    return (total.clamp_min(0.0).sqrt() / size).item()


def _stein_kernel(x: Tensor, s: Tensor, y: Tensor, t: Tensor, kernel: str, h: float) -> Tensor:
    """``k0`` between rows of ``x`` with scores ``s`` and rows of ``y`` with scores ``t``."""
    d = x.shape[1]
    square = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square() / h**2
    if kernel == "imq":
        base = 1 + square
        k, f, slope = base.rsqrt(), -0.5 * base.pow(-1.5), 0.75 * base.pow(-2.5)
    else:
        k = (-square / 2).exp()
        f, slope = -k / 2, k / 4
    # (s(y) - s(x)) . (x - y), without a tensor of all differences
    along = (x @ t.T - (y * t).sum(1)) - ((x * s).sum(1, keepdim=True) - s @ y.T)
    return (s @ t.T) * k + (2 * f * along - 2 * d * f - 4 * square * slope) / h**2


def _matrix(tree: Any) -> Tensor:
    """Leaves ``[S, ...]`` as the columns of one float64 matrix."""
    leaves = [x.detach().to(torch.float64) for x in optree.tree_leaves(tree)]
    return torch.cat([x.reshape(len(x), x.shape[1:].numel()) for x in leaves], 1)
