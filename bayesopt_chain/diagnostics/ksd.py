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

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import optree
import torch
from torch import Tensor

from bayesopt_chain import kinds

if TYPE_CHECKING:
    from bayesopt_chain.runs.draws import Draws

KEPT = 1 << 30  # bytes of blocks of draws and their scores that are kept


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
        draws: :class:`bayesopt_chain.Draws` (chains are pooled; those on disk are read by blocks), or a tree with leaves
            ``[S, ...]``.
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
    stored: Draws | None = draws if hasattr(type(draws), "params") else None
    chains = getattr(draws, "chains", None) or 1
    given: Any = draws
    size = len(optree.tree_leaves(given)[0]) if stored is None else chains * len(stored)
    if size < 2:
        raise ValueError(f"ksd: needs at least 2 draws, got {size}")
    block = max(chains, block // chains * chains)

    def part(tree: Any, low: int) -> Any:
        return optree.tree_map(lambda x: x[low : low + block], tree)

    def rows(low: int) -> tuple[Tensor, Tensor]:
        """A block of draws and their scores."""
        tree = part(given, low) if stored is None else stored[low // chains : (low + block) // chains].unchained()[0]
        count, scores = len(optree.tree_leaves(tree)[0]), score
        if callable(score):
            each: list[Any] = [score(optree.tree_map(lambda x, i=i: x[i], tree)) for i in range(count)]
            scores = optree.tree_map(lambda *leaves: torch.stack(leaves), *each)
        x, s = _matrix(tree), _matrix(scores if callable(score) else part(scores, low))
        for name, matrix in (("draws", x), ("score", s)):
            if not kinds.is_finite(matrix):
                raise ValueError(f"ksd: {name}: some of its numbers are NaN or infinite")
        if x.shape != s.shape:
            raise ValueError(
                f"ksd: score must be like the draws, which are a matrix {(size, x.shape[1])}, got one {(len(s), s.shape[1])}"
            )
        return x, s

    first = rows(0)
    # Blocks that are many times smaller than the memory are kept; of a longer run they are read again for every pair.
    blocks = functools.lru_cache(max(2, KEPT // (2 * first[0].nbytes + 1)))(rows)
    if bandwidth is None:
        each = max(1, size // 1000)
        some = torch.cat([blocks(low)[0][-low % each :: each] for low in range(0, size, block)])
        bandwidth = torch.pdist(some).median().item() or 1.0
    total = first[0].new_zeros(())
    for i in range(0, size, block):
        for j in range(0, i + 1, block):
            k0 = _stein_kernel(*blocks(i), *blocks(j), kernel, bandwidth)
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
