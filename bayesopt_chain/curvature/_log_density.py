"""Curvature of a log density that is no likelihood of outputs: a sequence's, a preference's, a physical model's.

    fisher     sum_b g_b g_b^T,   g_b = d log p_b / d theta          hessian     -sum_b d^2 log p_b / d theta^2

The log density itself is taken for the model's only output, ``[B, 1]``, and minus it for the loss. How far the empirical Fisher
matrix may be from the Hessian: Kunstner, Balles and Hennig (2019).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain import batches
from bayesopt_chain.curvature._estimators import Estimate, empirical_fisher, hessian
from bayesopt_chain.curvature._plan import batch_size
from bayesopt_chain.likelihoods import Likelihood, OutputRoot
from bayesopt_chain.precision import Eigenbasis, Kronecker
from bayesopt_chain.trees import Tree


class LogDensity(NamedTuple):
    """Estimators of the curvature of a log density; made by :func:`of_log_density`.

    Attributes:
        forward: ``forward(params, batch) -> [B, 1]``, the log densities.
    """

    forward: Callable[[Tree, Any], Tensor]

    def fisher(
        self,
        structure: str = "diagonal",
        *,
        rank: int = 10,
        sharing: str = "expand",
        basis: Kronecker | Eigenbasis | None = None,
        chunk_bytes: int | None = None,
    ) -> Estimate:
        """Estimate the sum of outer products of the gradients, the empirical Fisher matrix.

        Args:
            structure, rank, sharing, basis, chunk_bytes: as for :func:`~bayesopt_chain.curvature.ggn`.

        Returns:
            ``estimate(params, batch)``, a precision summed over the batch; it is never indefinite.

        Raises:
            ValueError, MemoryError: as for :func:`~bayesopt_chain.curvature.ggn`.

        Example:
            >>> import torch
            >>> from bayesopt_chain import curvature
            >>> density = curvature.of_log_density(lambda w, y: -0.5 * (y - w) ** 2)
            >>> density.fisher("diagonal")(torch.tensor(0.0), torch.tensor([1.0, 3.0])).diag()
            tensor(10.)
        """
        return empirical_fisher(
            self.forward,
            _ITSELF,
            structure,
            rank=rank,
            sharing=sharing,
            basis=basis,
            chunk_bytes=chunk_bytes,
            targets=_no_targets,
        )

    def hessian(
        self,
        structure: str = "dense",
        *,
        probes: int | None = None,
        generator: torch.Generator | None = None,
        chunk_bytes: int | None = None,
    ) -> Estimate:
        """Take minus the Hessian of the summed log density, "dense" or "diagonal".

        Args:
            structure, probes, generator, chunk_bytes: as for :func:`~bayesopt_chain.curvature.hessian`.

        Returns:
            ``estimate(params, batch)``, a precision summed over the batch; away from a mode it may be indefinite.

        Raises:
            ValueError, MemoryError: as for :func:`~bayesopt_chain.curvature.hessian`.

        Example:
            >>> import torch
            >>> from bayesopt_chain import curvature
            >>> density = curvature.of_log_density(lambda w, y: -0.5 * (y - w) ** 2)
            >>> density.hessian("diagonal")(torch.tensor(0.0), torch.tensor([1.0, 3.0])).diag()
            tensor(2.)
        """
        return hessian(
            self.forward,
            _ITSELF,
            structure,
            probes=probes,
            generator=generator,
            chunk_bytes=chunk_bytes,
            targets=_no_targets,
        )


def of_log_density(f: Callable[[Tree, Any], Tensor]) -> LogDensity:
    """Give estimators of the curvature of any log density.

    Args:
        f: ``f(params, batch) -> [B]``, one log density (or log-likelihood) a datum, in nats; a datum may be a whole
            sequence. A batch is any tree of tensors with one entry a datum on the first axis. A prior belongs to the
            posterior, not in here.

    Returns:
        A :class:`LogDensity`, with the methods ``fisher`` (every structure) and ``hessian``.

    Raises:
        ValueError: where it is used, when ``f`` returns something else than one number a datum.

    Example:
        >>> import torch
        >>> from bayesopt_chain import curvature
        >>> density = curvature.of_log_density(lambda w, batch: -0.5 * (batch["y"] - w) ** 2)
        >>> density.hessian("diagonal")(torch.tensor(0.0), {"y": torch.tensor([1.0, 3.0])}).diag()
        tensor(2.)
        >>> density.fisher("diagonal")(torch.tensor(0.0), {"y": torch.tensor([1.0, 3.0])}).diag()
        tensor(10.)
    """

    def forward(params: Tree, batch: Any) -> Tensor:
        values = f(params, batch)
        if not isinstance(values, Tensor) or values.shape != (batch_size(batch),):
            what = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(f"the log density returned {what}: return one number a datum, [B]")
        return values[:, None]

    return LogDensity(forward)


def _no_targets(batch: Any) -> Tensor:
    size = batch_size(batch)
    device = next(x.device for x in batches.flatten(batch)[0] if isinstance(x, Tensor) and x.ndim)
    return torch.zeros(size, device=device)


class _Itself(Likelihood):
    """The likelihood whose log density is the model's only output."""

    name = "log density"

    def log_prob(self, outputs: Tensor, targets: Any) -> Tensor:
        return outputs[:, 0]

    def require(self, outputs: Tensor, targets: Any, *, wait: bool = False) -> None:
        pass  # there are no targets

    def exact_root(self, outputs: Tensor, labels: Any) -> OutputRoot:
        raise ValueError("a log density has no outputs to take a Gauss-Newton matrix of: use fisher or hessian")

    def draw(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        raise ValueError("a log density cannot draw labels: use fisher, which is the empirical one, or hessian")


_ITSELF = _Itself()
