"""Have the chains mixed: R-hat and effective sample size, computed by ArviZ for every element of every leaf.

Needs the extra ``diagnostics`` (arviz-stats).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import optree
import torch
from torch import Tensor

from bayesopt_chain import kinds
from bayesopt_chain.checks import installed

if TYPE_CHECKING:
    from bayesopt_chain.runs.draws import Draws

R_HAT = 1.01  # above which draws have not mixed
AT_ONCE = 1 << 28  # bytes of draws on disk that are looked at together


@kinds.takes()
def r_hat(draws: Draws | Any) -> Any:
    """Rank-normalised split R-hat of every element (Vehtari, Gelman, Simpson, Carpenter and Bürkner, 2021).

    Args:
        draws: :class:`bayesopt_chain.Draws`, or a tree with leaves ``[draws, chains, ...]``. A single chain is
            cut in two chains first (of which it then splits each, as it does any chain).

    Returns:
        A tree with a tensor like each parameter; 1 at stationarity, above 1.01 not mixed. NaN where draws are constant.

    Raises:
        ValueError: fewer than four draws.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> x = torch.randn(500, 4, 2, generator=torch.Generator().manual_seed(0))
        >>> bc.diagnostics.r_hat({"w": x})["w"].round(decimals=2)
        tensor([1., 1.], dtype=torch.float64)
    """
    installed("r_hat", "diagnostics", "arviz_stats")
    from arviz_stats.base.array import array_stats

    return _each(
        draws, "r_hat", lambda x: array_stats.rhat(_at_least_two(x), chain_axis=-2, draw_axis=-1, method="rank")
    )


@kinds.takes(kind=kinds.one_of("bulk", "tail"))
def ess(draws: Draws | Any, *, kind: Literal["bulk", "tail"] = "bulk") -> Any:
    """Effective sample size of every element, over all chains (Vehtari et al., 2021).

    Args:
        draws: as in :func:`r_hat`.
        kind: ``"bulk"`` for means and medians, ``"tail"`` for 5 % and 95 % quantiles.

    Returns:
        A tree with a tensor like each parameter.

    Raises:
        ValueError: fewer than four draws, or another kind.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> x = torch.randn(500, 4, 1, generator=torch.Generator().manual_seed(0))
        >>> bool(bc.diagnostics.ess({"w": x})["w"] > 1000)
        True
    """
    installed("ess", "diagnostics", "arviz_stats")
    from arviz_stats.base.array import array_stats

    prob = (0.05, 0.95) if kind == "tail" else None
    return _each(draws, "ess", lambda x: array_stats.ess(x, chain_axis=-2, draw_axis=-1, method=kind, prob=prob))


def _at_least_two(x: Any) -> Any:
    """``[elements, chains, draws]`` with a single chain cut in two: ArviZ has no R-hat of one."""
    half = x.shape[-1] // 2
    return x if x.shape[1] > 1 else x[..., -2 * half :].reshape(len(x), 2, half)


def _each(draws: Any, who: str, statistic: Callable[[Any], Any]) -> Any:
    """A statistic of arrays ``[elements, chains, draws]`` for every leaf; of draws on disk some elements are read at a time."""

    def found(shape: Sequence[int], chained: bool, read: Callable[[int, int], Tensor]) -> Tensor:
        size, n = shape[0], (shape[1] if len(shape) > 1 else 0) if chained else 1
        if not n or size < 4:
            raise ValueError(
                f"{who}: needs leaves [draws, chains, ...] with at least 4 draws, got shape {tuple(shape)}; run longer"
            )
        event = torch.Size(shape[2 if chained else 1 :])
        width, parts = event.numel(), list[Tensor]()
        some = max(1, AT_ONCE // (8 * size * n))
        for low in range(0, width, some):
            high = min(low + some, width)
            x = torch.stack([read(c * width + low, c * width + high) for c in range(n)], 1)  # [draws, chains, elements]
            rows = x.detach().to(torch.float64).permute(2, 1, 0).contiguous()
            parts.append(torch.as_tensor(statistic(rows.cpu().numpy()), device="cpu"))
        return torch.cat(parts).reshape(event) if parts else torch.zeros(event, dtype=torch.float64, device="cpu")

    if not hasattr(draws, "shapes"):
        return optree.tree_map(lambda x: found(x.shape, True, lambda a, b: x.reshape(len(x), -1)[:, a:b]), draws)
    if not len(draws):
        raise ValueError(f"{who}: needs at least 4 draws, got none; run longer")

    def column(name: str) -> Callable[[int, int], Tensor]:
        return lambda low, high: draws.column(f"params/{name}", elements=slice(low, high))

    chained = draws.chains is not None
    return draws._tree([found((len(draws), *shape), chained, column(n)) for n, shape in draws.shapes.items()])
