"""One Gaussian over a parameter tree, so that Laplace, variational and Kalman posteriors are used alike.

theta ~ N(mean, Lambda^-1),     log N = -1/2 (theta - mean)^T Lambda (theta - mean) + 1/2 log |Lambda| - P/2 log 2 pi

log Z = log p(D, mean) + P/2 log 2 pi - 1/2 log |Lambda|        (Laplace's approximation of the evidence; MacKay 1992)
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain.precision import Precision
from bayesopt_chain.trees import Tree, require_like, size


class Gaussian(NamedTuple):
    """A Gaussian posterior: `mean`, a tree; `precision`, any structure of `bayesopt_chain.precision` over that tree.

    `gaussian.factorised()` decomposes the precision once; do so when asking more than one question.

    >>> import torch
    >>> from bayesopt_chain.posterior.gaussian import Gaussian
    >>> from bayesopt_chain.precision import Diagonal
    >>> posterior = Gaussian({"w": torch.zeros(2)}, Diagonal({"w": torch.tensor([1.0, 4.0])}, torch.tensor(1.0)))
    >>> posterior.marginal_variance
    {'w': tensor([1.0000, 0.2500])}
    >>> posterior.sample((100,), generator=torch.Generator().manual_seed(0))["w"].shape
    torch.Size([100, 2])
    """

    mean: Tree
    precision: Precision

    def factorised(self) -> Gaussian:
        """Return the same Gaussian with a decomposed precision; `ValueError` where it is not positive definite."""
        return Gaussian(self.mean, self.precision.factorised())

    def sample(self, shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None) -> Tree:
        """Draw `shape` independent trees: leaves `[*shape, *leaf.shape]`, dtype and device of the mean."""
        precision = self.precision.factorised()
        noise = optree.tree_map(lambda leaf: _white(leaf, shape, generator), self.mean)
        return optree.tree_map(torch.add, precision.sqrt_solve(noise), self.mean)

    def log_prob(self, tree: Tree) -> Tensor:
        """Return the normalised log density, shape `[*lead]` for leaves `[*lead, *leaf.shape]`."""
        require_like(tree, self.mean, "the tree", batched=True)
        precision = self.precision.factorised()
        centred = optree.tree_map(torch.sub, tree, self.mean)
        normaliser = precision.logdet() - size(self.mean) * math.log(2 * math.pi)
        return 0.5 * (normaliser - precision.quad(centred))

    @property
    def marginal_variance(self) -> Tree:
        """The diagonal of the covariance, a tree like the mean."""
        return self.precision.factorised().inverse_diag()

    def log_evidence(self, log_joint: Any) -> Tensor:
        """Return Laplace's log evidence from `log_joint`, the *normalised* log p(data, mean), in nats.

        Differentiable in whatever the precision and `log_joint` depend on. It means something for a Bayesian
        posterior only (`temperature=None`).
        """
        return log_joint + 0.5 * (size(self.mean) * math.log(2 * math.pi) - self.precision.logdet())


def _white(leaf: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    return torch.randn((*shape, *leaf.shape), dtype=leaf.dtype, device=leaf.device, generator=generator)
