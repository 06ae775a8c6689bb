"""``refresh_batch_norm``: statistics of its own for every draw."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from bayesopt_chain import kinds
from bayesopt_chain.kinds import Kind
from bayesopt_chain.modules.batch_norm import statistics
from bayesopt_chain.runs.draws import Draws

_DRAWS = Kind(
    lambda x: kinds.MAPPING.fits(x) and kinds.TREE.fits(dict(x)) and all(isinstance(p, Tensor) for p in x.values()),
    "Draws, or a dictionary of parameters by name",
)


def refresh_batch_norm(
    module: nn.Module,
    draws: Draws | Mapping[str, Tensor],
    loader: Iterable[Any],
    *,
    inputs: str | Callable[[Any], Any] | None = None,
) -> Any:
    """Compute BatchNorm's statistics anew for every draw, by one pass over the data.

    Draws from a posterior (SWAG's, Laplace's, variational ones) come without statistics, and those in the module belong
    to other parameters. Chains that were made with ``make_step(..., buffers=buffers)`` keep statistics of their own;
    these are running means over the chain's last steps, while the fresh ones are of the draw itself.

    Args:
        module: the module; it is not changed. BatchNorm alone runs in ``train`` mode, dropout is off.
        draws: :class:`Draws`, or one tree of parameters as :func:`make_functional` names them.
        loader: the training inputs, in batches as large as those of training; gone through once. The statistics are the
            means of the batches', weighted by their sizes.
        inputs: as for :func:`make_functional`.

    Returns:
        The draws with buffers, which :meth:`Draws.predict` uses; of one tree, the buffers, for :func:`write_back` or
        ``forward.with_buffers``.

    Raises:
        ValueError: a module whose layers keep no statistics; no batches.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> module = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1)).eval()
        >>> forward, params, _ = bc.make_functional(module)
        >>> draws = bc.Draws.from_trees([params, {name: 2 * p for name, p in params.items()}])
        >>> fresh = bc.refresh_batch_norm(module, draws, [torch.randn(100, 1)])
        >>> mean = fresh.buffers["1.running_mean"]
        >>> torch.allclose(mean[1], 2 * mean[0]), fresh.predict(forward, [torch.zeros(5, 1)]).shape
        (True, torch.Size([5, 1]))
    """
    kinds.require(
        "refresh_batch_norm",
        module=(module, kinds.MODULE),
        loader=(loader, kinds.BATCHES),
        inputs=(inputs, kinds.INPUTS),
    )
    if not isinstance(draws, Draws):
        kinds.require("refresh_batch_norm", draws=(draws, _DRAWS))
        if sorted(draws) != (names := sorted(name for name, _ in module.named_parameters())):
            raise ValueError(f"refresh_batch_norm: draws has the parameters {sorted(draws)}, and the module {names}")
        single = {name: p[None] for name, p in draws.items()}
        found = statistics(module, 1, lambda low, high: single, {}, loader, inputs, 1)
        return {name: b[0] for name, b in found.items()}
    chains = draws.chains or 1
    read = lambda low, high: draws[low // chains : high // chains].unchained()[0]  # noqa: E731
    own = {name: x if draws.chains is None else x.flatten(0, 1) for name, x in draws.buffers.items()}
    found = statistics(module, len(draws) * chains, read, own, loader, inputs, draws.at_once() * chains)
    if draws.chains is not None:
        found = {name: x.unflatten(0, (len(draws), chains)) for name, x in found.items()}
    return draws.with_buffers(found)
