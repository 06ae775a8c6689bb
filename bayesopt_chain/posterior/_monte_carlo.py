"""Predicts by running the model at draws of its parameters: from a Gaussian posterior, or a sampler's chain.

p(y | x, D) ~ 1/S sum_s p(y | f(theta_s, x)),   theta_s ~ posterior          (Neal, 1996)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain import kinds
from bayesopt_chain.posterior._joint import needs_graph
from bayesopt_chain.posterior.gaussian import Gaussian
from bayesopt_chain.trees import Tree


@kinds.takes(
    forward=kinds.FUNCTION,
    batch=kinds.BATCH,
    posterior=kinds.Kind(lambda x: kinds.POSTERIOR.fits(x) or kinds.TREE.fits(x), "a bc.Gaussian, or a tree of draws"),
)
def monte_carlo(
    forward: Callable[[Tree, Any], Tensor],
    posterior: Gaussian | Tree,
    batch: Any,
    *,
    samples: int = 100,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Run the model at draws of its parameters; average likelihoods, not outputs, over them.

    Args:
        forward: ``forward(params, batch) -> outputs [B, *event]``.
        posterior: a ``Gaussian``, from which ``samples`` draws are made one at a time; or draws, a tree with leaves
            ``[S, *leaf.shape]`` (``samples`` and ``generator`` are then not used).
        samples: number of draws from a ``Gaussian``.
        generator: source of their noise (default: torch's global generator).
        batch: ``(inputs, targets)``, handed on to ``forward``.

    Returns:
        Outputs ``[S, B, *event]``, with gradients where the batch asks for them.

    Raises:
        ValueError: for draws whose leaves disagree on S, or fewer than one sample.

    Example:
        >>> import torch
        >>> import bayesopt_chain as bc
        >>> bc.posterior.monte_carlo(lambda w, batch: batch[0] * w, torch.tensor([1.0, 3.0]), (torch.ones(2), None))
        tensor([[1., 1.],
                [3., 3.]])
    """
    with torch.set_grad_enabled(needs_graph(batch)):
        return _run_at(forward, posterior, batch, samples, generator)


def _run_at(
    forward: Callable[[Tree, Any], Tensor],
    posterior: Gaussian | Tree,
    batch: Any,
    samples: int,
    generator: torch.Generator | None,
) -> Tensor:
    if isinstance(posterior, Gaussian):
        posterior = posterior.factorised()
        return torch.stack([forward(posterior.sample(generator=generator), batch) for _ in range(samples)])
    lengths = {leaf.shape[0] if leaf.ndim else 0 for leaf in optree.tree_leaves(posterior)}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            f"monte_carlo: posterior: the draws' first axes have lengths {sorted(lengths)}: pass leaves [S, *leaf.shape] "
            "with one S"
        )
    draws = [optree.tree_map(lambda leaf, s=s: leaf[s], posterior) for s in range(lengths.pop())]
    return torch.stack([forward(draw, batch) for draw in draws])
