r"""The evidence of a Laplace approximation as a function of prior and noise, with the data part decomposed once.

Where the data part of the precision is diagonal in a basis, F = sum_i lambda_i v_i v_i^T group by group, and the prior of each
group is isotropic, then for a likelihood scaled by s (for Gaussian noise ``variance / s``) and prior precisions delta

    log Z(delta, s) = log p_s(D | t) + sum_g [ p_g log delta_g - delta_g |t_g|^2 ] / 2 - sum_gi log(s lambda_gi + delta_g) / 2
                      + sum_gi (s g_gi + delta_g t_gi)^2 / (s lambda_gi + delta_g) / 2,

with t the parameters and g the gradient of the summed negative log-likelihood there, both in that basis. The last sum is the
gain from t to the maximum of the joint's quadratic expansion: with it the evidence of a linear Gaussian model is exact wherever
the expansion is made, and the hyperparameters are tuned with the maximum a posteriori solved for again at every trial. Without
it the parameters are taken for that maximum (MacKay, 1992).

For Gaussian noise ``log p_s = -s R / 2 + m log(s) / 2 + const`` with the whitened residual sum of squares R and m target
entries. A trial costs one pass over the eigenvalues of all groups.

A scalar prior has one delta for all groups, and the derivative by it is the sum of the groups' derivatives,

    2 d log Z / d delta = sum_g [ p_g / delta - |m_g|^2 - sum_i 1 / (s lambda_gi + delta) ],
    m_gi = t_gi - (s g_gi + delta t_gi) / (s lambda_gi + delta),

with i over all p_g eigenvalues, zeros included, and m the maximum of the expansion (t itself without the last sum of log Z). It
vanishes where ``delta = sum_g gamma_g / sum_g |m_g|^2``, for ``gamma_g = sum_i s lambda_gi / (s lambda_gi + delta)`` the number
of well determined parameters of a group (MacKay, 1992): numerator and denominator are summed over the groups, where a prior of
one delta for each tensor has the ratio of each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain.posterior.tuning import tune_by_evidence
from bayesopt_chain.precision import Block, Dense, Diagonal, Eigenbasis, Kronecker, Precision, Root
from bayesopt_chain.trees import Tree, common_dtype, flatten, gram, project, size

SCALAR, LAYERWISE = "scalar", "layerwise"  # structures of a prior
WHOLE = ("dense", "root")  # structures of a posterior with one basis for all leaves

LOWEST, HIGHEST = 1e-10, 1e10  # of hyperparameters: an evidence may rise towards 0 or infinity without end


class Spectrum(NamedTuple):
    """One group of leaves with a prior precision in common.

    Attributes:
        leaves: their numbers, in optree order.
        values: the eigenvalues of the data part that are not known to be zero, ``[k]``.
        coordinates: from the group's leaves to their coordinates along those eigenvectors, ``[k]``.
        entries: the number of parameters; the other ``entries - k`` eigenvalues are zero.
    """

    leaves: tuple[int, ...]
    values: Tensor
    coordinates: Callable[[list[Tensor]], Tensor]
    entries: int


@singledispatch
def spectra(precision: Any) -> list[Spectrum] | None:
    """The groups of a precision summed over data, or ``None`` for a structure without a common basis (low rank)."""
    return None


@spectra.register
def _(precision: Dense) -> list[Spectrum]:
    values, vectors = torch.linalg.eigh(precision.matrix)
    like = optree.tree_leaves(precision.like)

    def coordinates(leaves: list[Tensor]) -> Tensor:
        return vectors.mT @ flatten(leaves, like).to(vectors.dtype)

    return [Spectrum(tuple(range(len(like))), values.clamp_min(0), coordinates, size(precision.like))]


@spectra.register
def _(precision: Root) -> list[Spectrum]:
    rows = optree.tree_leaves(precision.rows)
    dtype = common_dtype(rows)
    rows = [row.to(dtype) for row in rows]
    values, vectors = torch.linalg.eigh(gram(rows))
    kept = values > torch.finfo(dtype).eps * values.shape[0] * values.max()
    values, vectors = values[kept], vectors[:, kept]

    def coordinates(leaves: list[Tensor]) -> Tensor:
        return vectors.mT @ project(rows, [leaf.to(dtype) for leaf in leaves]) / values.sqrt()

    return [Spectrum(tuple(range(len(rows))), values, coordinates, sum(row[0].numel() for row in rows))]


@spectra.register
def _(precision: Diagonal) -> list[Spectrum]:
    return [
        Spectrum((i,), leaf.reshape(-1).clamp_min(0), lambda leaves: leaves[0].reshape(-1), leaf.numel())
        for i, leaf in enumerate(optree.tree_leaves(precision.values))
    ]


@spectra.register
def _(precision: Kronecker) -> list[Spectrum] | None:
    return spectra(precision.eigenbasis())


@spectra.register
def _(precision: Eigenbasis) -> list[Spectrum]:
    out = []
    for i, (u, v, values) in enumerate(zip(*(optree.tree_leaves(tree) for tree in precision[:3]))):

        def coordinates(leaves: list[Tensor], u: Tensor = u, v: Tensor = v) -> Tensor:
            matrix = leaves[0].to(u.dtype).reshape(u.shape[0], v.shape[0])
            matrix = matrix if u.ndim == 1 else u.mT @ matrix
            return (matrix if v.ndim == 1 else matrix @ v).reshape(-1)

        out.append(Spectrum((i,), values.reshape(-1).clamp_min(0), coordinates, values.numel()))
    return out


@spectra.register
def _(precision: Block) -> list[Spectrum] | None:
    out = []
    blocks = optree.tree_leaves(precision.blocks, is_leaf=lambda node: isinstance(node, Precision))
    for i, block in enumerate(blocks):
        mine = spectra(block)
        if mine is None or len(mine) != 1:
            return None
        out.append(mine[0]._replace(leaves=(i,)))
    return out


class Residual(NamedTuple):
    """Gaussian noise: the whitened residual sum of squares R and the number m of targets (the sum of their weights), 0-d."""

    squares: Tensor
    entries: Tensor

    def gain(self, scale: Tensor) -> Tensor:
        """What the log likelihood gains, in nats, by a noise of ``variance / scale`` in place of ``variance``, 0-d."""
        return 0.5 * (self.squares.to(torch.float64) * (1 - scale) + self.entries * scale.log())


class Tuned(NamedTuple):
    """What was chosen: a prior precision for each leaf (0-d), the likelihood's scale (0-d), the log evidence there (0-d)."""

    prior_precision: Tree
    likelihood_scale: Tensor
    log_evidence: Tensor


def require_prior_structure(name: str, prior_structure: str | None, structure: str) -> None:
    """Refuse an unknown structure of a prior, or one that the posterior's structure has no evidence for."""
    if prior_structure not in (SCALAR, LAYERWISE, None):
        raise ValueError(f"{name}: prior_structure={prior_structure!r}: pass 'scalar', 'layerwise' or None")
    if prior_structure == LAYERWISE and structure in WHOLE:
        raise ValueError(
            f"{name}: prior_structure='layerwise' with structure={structure!r}, whose basis mixes the layers: it has one "
            "precision for all parameters: pass 'scalar', or structure 'kronecker', 'diagonal' or 'block'"
        )


def tune_prior_and_noise(
    precision: Precision,
    params: Tree,
    log_likelihood: Tensor,
    *,
    residual: Residual | None = None,
    gradient: Tree | None = None,
    start: float = 1.0,
    prior_structure: str | None = None,
) -> Tuned:
    """Maximise the evidence over the prior precision and the Gaussian noise.

    Args:
        precision: the data part: the sum of the increments, without a prior.
        params: where the curvature was taken.
        log_likelihood: summed and normalised, there, 0-d.
        residual: of a Gaussian likelihood, whose scale is then tuned too; ``None`` keeps it at 1.
        gradient: of the summed negative log-likelihood at ``params``: the maximum a posteriori is then solved for again at
            every trial. ``None`` takes ``params`` for it.
        start: the first prior precision.
        prior_structure: "scalar" has one precision for all leaves; otherwise there is one for each group of ``spectra``.

    Returns:
        The hyperparameters, between 1e-10 and 1e10, and the log evidence. Towards infinity the evidence may rise without end,
        for parameters that the data would rather have at zero.

    Raises:
        ValueError: a low-rank structure, which has no common basis; an evidence that is not finite.
    """
    groups = spectra(precision)
    if groups is None:
        raise ValueError(
            f"tune='evidence': a precision of class {type(precision).__name__} has no basis in which data and prior are both "
            "diagonal: use structure 'kronecker', 'dense', 'root', 'diagonal' or 'block', or tune='validation'"
        )
    of_groups = _evidence(groups, params, log_likelihood, residual, gradient)
    device = groups[0].values.device
    count = 1 if prior_structure == SCALAR else len(groups)

    def evidence(h: Any) -> Tensor:
        return of_groups({**h, "prior": h["prior"].expand(len(groups))})

    first: dict[str, Tensor] = {"prior": torch.full((count,), float(start), dtype=torch.float64, device=device)}
    if residual is not None:
        variance = (residual.squares / residual.entries).to(torch.float64)
        first["scale"] = 1 / variance.clamp(torch.finfo(torch.float32).eps, 0.1 * HIGHEST)
    best = tune_by_evidence(evidence, first)
    leaves, structure = optree.tree_flatten(params)
    each = best["prior"].expand(len(groups))
    by_leaf = {i: each[n].to(leaves[i].dtype) for n, group in enumerate(groups) for i in group.leaves}
    prior = optree.tree_unflatten(structure, [by_leaf[i] for i in range(len(leaves))])
    scale = best.get("scale", torch.ones((), dtype=torch.float64, device=device))
    return Tuned(prior, scale, evidence(best))


def _evidence(
    groups: list[Spectrum], params: Tree, log_likelihood: Tensor, residual: Residual | None, gradient: Tree | None
) -> Callable[[Any], Tensor]:
    leaves = optree.tree_leaves(params)
    slopes = None if gradient is None else optree.tree_leaves(gradient)
    device = groups[0].values.device
    eigenvalues = _Eigenvalues([group.values.to(torch.float64) for group in groups])
    entries = torch.tensor([group.entries for group in groups], dtype=torch.float64, device=device)
    zeros = entries - torch.tensor(eigenvalues.sizes, dtype=torch.float64, device=device)
    norms, pulls = [], []
    for group in groups:
        mine = [leaves[i].detach().to(torch.float64) for i in group.leaves]
        norms.append(torch.stack([x.square().sum() for x in mine]).sum())
        if slopes is not None:
            along = group.coordinates(mine).to(torch.float64)
            down = [slopes[i].detach().to(torch.float64) for i in group.leaves]
            pulls.append(_pull(group.coordinates(down).to(torch.float64), down, along, mine))
    squares, log_likelihood = torch.stack(norms), log_likelihood.to(torch.float64)

    def evidence(h: Any) -> Tensor:
        if any(bool(((x < LOWEST) | (x > HIGHEST)).any()) for x in h.values()):
            raise ValueError(f"a hyperparameter is outside {LOWEST:g} ... {HIGHEST:g}")
        delta, scale = h["prior"], h.get("scale", torch.ones((), dtype=torch.float64, device=device))
        total = log_likelihood + 0.5 * ((entries - zeros) * delta.log() - delta * squares).sum()
        total = total - 0.5 * eigenvalues.log_sum(scale, delta)
        if residual is not None:
            total = total + residual.gain(scale)
        for d, values, pull in zip(delta if pulls else (), eigenvalues.values.split(eigenvalues.sizes), pulls):
            total = total + 0.5 * pull.gain(d, scale, values)
        return total

    return evidence


class _Eigenvalues:
    """The eigenvalues of all groups in one vector, so that a trial costs the same few operations for any number of them."""

    def __init__(self, groups: list[Tensor]) -> None:
        self.sizes = [group.numel() for group in groups]
        self.values = torch.cat(groups)

    def log_sum(self, scale: Tensor, delta: Tensor) -> Tensor:
        """``sum_gi log(scale values_gi + delta_g)``, 0-d, for ``delta`` ``[groups]``; differentiable in both."""
        result: Any = _LogSum.apply(scale, delta, self.values, self.sizes)
        return result


class _LogSum(torch.autograd.Function):
    """See :meth:`_Eigenvalues.log_sum`; a group's derivative is one sum, where indexing would add up entry by entry."""

    @staticmethod
    def forward(ctx: Any, scale: Tensor, delta: Tensor, values: Tensor, sizes: list[int]) -> Tensor:
        each = torch.cat([d.expand(n) for d, n in zip(delta, sizes)])
        stiff = each.addcmul_(values, scale)
        ctx.save_for_backward(stiff, values)
        ctx.sizes = sizes
        return stiff.log().sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        stiff, values = ctx.saved_tensors
        inverse = stiff.reciprocal()
        of_scale = grads[0] * (values @ inverse) if ctx.needs_input_grad[0] else None
        return of_scale, grads[0] * torch.stack([part.sum() for part in inverse.split(ctx.sizes)]), None, None


class _Pull(NamedTuple):
    """What the maximum gains over the parameters in one group.

    ``gradient`` and ``params``: along the eigenvectors; ``gradients``, ``products``, ``squares``: across them, the gradient's
    square, its product with the parameters, and the parameters' square.
    """

    gradient: Tensor
    params: Tensor
    gradients: Tensor
    products: Tensor
    squares: Tensor

    def gain(self, delta: Tensor, scale: Tensor, values: Tensor) -> Tensor:
        """``b^T Lambda^-1 b`` for the gradient b of the log joint."""
        along = ((scale * self.gradient + delta * self.params).square() / (scale * values + delta)).sum()
        return along + scale**2 * self.gradients / delta + 2 * scale * self.products + delta * self.squares


def _pull(down: Tensor, gradient: list[Tensor], along: Tensor, params: list[Tensor]) -> _Pull:
    across = down.numel() < sum(x.numel() for x in params)  # without, what is left is rounding
    squares = torch.stack([x.square().sum() for x in gradient]).sum() - down.square().sum()
    product = torch.stack([(x * y).sum() for x, y in zip(gradient, params)]).sum() - down @ along
    rest = torch.stack([x.square().sum() for x in params]).sum() - along.square().sum()
    zero = torch.zeros_like(squares)
    return _Pull(down, along, *((squares.clamp_min(0), product, rest) if across else (zero, zero, zero)))
