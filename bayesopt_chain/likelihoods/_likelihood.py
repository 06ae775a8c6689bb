"""What a loss must tell curvature about itself, so that any likelihood meets any structure.

For the outputs f of one datum with target y and ``loss = -log p(y | f)``, the output factors S, with a leading axis K,
satisfy

    exact         sum_k s_k s_k^T = E_{y ~ p(. | f)} [ d^2 loss / df^2 ]     the Fisher information; the Hessian itself
                                                                             for canonical links
    Monte Carlo   s_k = K^-1/2 d loss(f, y_k) / df,  y_k ~ p(. | f)          the same in expectation
    empirical     s_1 = d loss(f, y) / df at the observed target             K = 1

Outputs have the shape ``[B, *event]``; what the event axes hold is stated by each likelihood. Events are independent.
The exact factors are made on demand (``_roots.py``): a datum of T tokens and C classes has T C of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bayesopt_chain.likelihoods._roots import Explicit, OutputRoot
from bayesopt_chain.tracing import is_hidden, unwrapped

Sampler = Callable[[Tensor, "torch.Generator | None"], Tensor]


class Likelihood(NamedTuple):
    """A likelihood of targets given a model's outputs, ``[B, *event]``.

    Attributes:
        name: for error messages.
        nll: ``nll(outputs, targets) -> [B]``, the negative log-likelihood of each datum, in nats, normalised.
        root: ``root(outputs, targets)``, a root of the expected Hessian of ``nll`` in the outputs.
        draw: ``draw(outputs, generator)``, labels shaped like the targets, drawn from the model.

    Example:
        >>> import torch
        >>> from bayesopt_chain import likelihoods
        >>> likelihoods.bernoulli().nll(torch.zeros(2), torch.tensor([0.0, 1.0]))
        tensor([0.6931, 0.6931])
    """

    name: str
    nll: Callable[[Tensor, Tensor], Tensor]
    root: Callable[[Tensor, Tensor], OutputRoot]
    draw: Sampler

    def factors(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return all exact output factors at once.

        Args:
            outputs: ``[B, *event]``.
            targets: as for ``nll``.

        Returns:
            S, ``[K, B, *event]``, with ``sum_k s_k s_k^T`` the expected Hessian of one datum's ``nll``.

        Raises:
            ValueError: for a custom likelihood whose Hessian is not positive semidefinite.
        """
        root = self.root(outputs, targets)
        return root.part(0, root.columns)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return ``d nll / d outputs``, ``[B, *event]``."""
        return torch.func.grad(lambda f: self.nll(f, targets).sum())(outputs)

    def empirical_factors(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the empirical Fisher's single factor, ``[1, B, *event]``."""
        return self.gradient(outputs, targets)[None]

    def sampled_factors(self, outputs: Tensor, samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Return Monte Carlo Fisher factors, ``[samples, B, *event]``."""
        draws = [self.gradient(outputs, self.draw(outputs, generator)) for _ in range(samples)]
        return torch.stack(draws) / samples**0.5


def custom(
    nll: Callable[[Tensor, Tensor], Tensor],
    *,
    output_hessian: Callable[[Tensor, Tensor], Tensor] | None = None,
    draw: Sampler | None = None,
) -> Likelihood:
    """Make a likelihood from a loss.

    Args:
        nll: ``nll(outputs [B, *event], targets) -> [B]``, the negative log-likelihood per datum, in nats.
        output_hessian: ``output_hessian(outputs, targets) -> [B, E, E]``, E the number of entries of an event: the
            positive semidefinite expected Hessian of ``nll`` in one datum's outputs. Default: the Hessian itself, by
            differentiation at the observed targets, which gives the generalised Gauss-Newton matrix of that loss.
        draw: ``draw(outputs, generator) -> targets``; needed for a Monte Carlo Fisher only.

    Returns:
        A :class:`Likelihood`.

    Raises:
        ValueError: when a Hessian is asked for that is not positive semidefinite or has another shape, a loss that
            is averaged over the batch or mixes data, or a draw without ``draw=``.

    Example:
        >>> import torch
        >>> from bayesopt_chain import likelihoods
        >>> cauchy = likelihoods.custom(
        ...     lambda f, y: torch.log1p((f - y) ** 2).sum(-1),
        ...     output_hessian=lambda f, y: torch.full((len(f), 1, 1), 0.5),
        ... )
        >>> cauchy.factors(torch.zeros(3, 1), torch.ones(3, 1)).shape
        torch.Size([1, 3, 1])
    """

    def checked_nll(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = nll(outputs, targets)
        _require_separate(losses, nll, outputs, targets)
        return losses

    def root(outputs: Tensor, targets: Tensor) -> OutputRoot:
        checked_nll(outputs, targets)
        hessian = (output_hessian or _hessian_of(nll))(outputs, targets)
        entries = outputs.shape[1:].numel()
        wanted = (outputs.shape[0], entries, entries)
        if hessian.shape != wanted:
            raise ValueError(
                f"output_hessian has shape {tuple(hessian.shape)}, not (B, E, E) = {wanted}: "
                "return one matrix over the entries of an event for each datum"
            )
        wide = hessian.to(torch.promote_types(hessian.dtype, torch.float32))  # eigh knows no lower precision
        values, vectors = torch.linalg.eigh(wide)
        tolerance = 1e3 * torch.finfo(hessian.dtype).eps * values.abs().amax(-1, keepdim=True)
        if not is_hidden(values) and bool((values < -tolerance).any()):
            raise ValueError(
                "the output Hessian of the custom likelihood is not positive semidefinite "
                f"(eigenvalue {values.min().item():.3g}): pass output_hessian= with its positive part or "
                "expectation, or use curvature.hessian or empirical_fisher"
            )
        roots = (vectors * values.clamp_min(0).sqrt()[:, None, :]).to(outputs.dtype)
        return Explicit(roots.permute(2, 0, 1).reshape((entries, *outputs.shape)))

    def no_draw(outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        raise ValueError("this custom likelihood cannot draw labels: pass draw= to likelihoods.custom")

    return Likelihood("custom", checked_nll, root, draw or no_draw)


def _hessian_of(nll: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def hessian(outputs: Tensor, targets: Tensor) -> Tensor:
        def one(output: Tensor, target: Tensor) -> Tensor:
            def loss(entries: Tensor) -> Tensor:
                return nll(entries.reshape((1, *output.shape)), target[None]).sum()

            return torch.func.hessian(loss)(output.reshape(-1))

        return torch.vmap(one)(outputs, targets)

    return hessian


def _require_separate(
    losses: Tensor, nll: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, targets: Tensor
) -> None:
    """Raise unless a custom loss gives one loss a datum, and the last datum's alone is what it is in the batch."""
    if losses.shape != outputs.shape[:1]:
        raise ValueError(
            f"the custom nll returned {tuple(losses.shape)} for {outputs.shape[0]} data: return one loss a datum, [B], "
            "without averaging over the batch"
        )
    values, labels = unwrapped(outputs), unwrapped(targets)
    if (values.shape, labels.shape) != (outputs.shape, targets.shape):
        return  # inside vmap, where one datum cannot be told from another
    alone, together = nll(values[-1:], labels[-1:])[0], nll(values, labels)[-1]
    if bool((alone - together).abs() > torch.finfo(values.dtype).eps ** 0.5 * (1 + together.abs())):
        raise ValueError(
            "the custom nll of one datum depends on the rest of the batch: curvature is a sum over data; "
            "write a loss of one datum's outputs and target"
        )
