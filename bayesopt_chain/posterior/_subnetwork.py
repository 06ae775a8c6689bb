"""Which entries of the parameters a subnetwork has: those of the largest posterior variance or magnitude, or random ones.

A diagonal posterior of all parameters, ``1 / (diag Lambda + prior)``, ranks the variances (Daxberger et al., 2021, "Bayesian
deep learning via subnetwork inference").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import optree
import torch
from torch import Tensor

from bayesopt_chain.trees import Tree

RULES = ("largest_variance", "largest_magnitude", "random")


@dataclass(frozen=True)
class Subnetwork:
    """See :func:`subnetwork`."""

    rule: str
    size: int
    generator: torch.Generator | None = None

    def mask(self, params: Tree, variance: Tree | None = None) -> Any:
        """A tree of booleans like the parameters, ``size`` of them True; ``variance`` for the rule that asks for it."""
        leaves, structure = optree.tree_flatten(params)
        total = sum(leaf.numel() for leaf in leaves)
        if self.size > total:
            raise ValueError(f"subnetwork: size={self.size}, but the model has {total} trained parameters")
        scores = torch.cat([score.reshape(-1).to(torch.float64) for score in self._scores(leaves, variance)])
        chosen = torch.zeros(total, dtype=torch.bool, device=scores.device)
        chosen[scores.topk(self.size).indices] = True
        parts = chosen.split([leaf.numel() for leaf in leaves])
        return optree.tree_unflatten(structure, [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves)])

    def _scores(self, leaves: list[Tensor], variance: Tree | None) -> list[Tensor]:
        if self.rule == "largest_variance":
            assert variance is not None
            return optree.tree_leaves(variance)
        if self.rule == "largest_magnitude":
            return [leaf.detach().abs() for leaf in leaves]
        return [torch.rand(leaf.shape, generator=self.generator, device=leaf.device) for leaf in leaves]


def subnetwork(
    rule: Literal["largest_variance", "largest_magnitude", "random"],
    size: int,
    *,
    generator: torch.Generator | None = None,
) -> Subnetwork:
    """Choose single entries of the parameters to be uncertain; the rest stays as trained.

    Pass it as ``subset=`` of :func:`bayesopt_chain.fit_laplace`, with ``structure="dense"``, "diagonal", "root" or "low_rank".

    Args:
        rule: "largest_variance" under a diagonal posterior of all parameters (the loader is then read twice),
            "largest_magnitude" or "random".
        size: how many entries.
        generator: for "random". Default: torch's global generator.

    Returns:
        A choice, made when the model is known.

    Raises:
        ValueError: another rule, a size below 1; in the fit, a size above the number of trained parameters.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> _ = torch.manual_seed(0)
        >>> module = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).eval()
        >>> data = [(torch.randn(60, 2), torch.randint(0, 3, (60,)))]
        >>> some = bc.posterior.subnetwork("largest_variance", 10)
        >>> fitted = bc.fit_laplace(module, bc.likelihoods.categorical(), data, subset=some, structure="dense")
        >>> fitted.posterior.mean["entries"].shape
        torch.Size([10])
    """
    if rule not in RULES:
        raise ValueError(f"subnetwork: rule={rule!r}: pass one of {', '.join(map(repr, RULES))}")
    if size < 1:
        raise ValueError(f"subnetwork: size={size}: pass at least 1")
    return Subnetwork(rule, size, generator)
