r"""The evidence of a Laplace approximation as a function of prior and noise, with the data part decomposed once.

Where the data part of the precision is diagonal in a basis, F = sum_i lambda_i v_i v_i^T group by group, and the prior of each
group is isotropic, then for a likelihood scaled by s (for Gaussian noise ``variance / s``) and prior precisions delta

    log Z(delta, s) = log p_s(D | t) + sum_g [ p_g log delta_g - delta_g |t_g|^2 ] / 2 - sum_gi log(s lambda_gi + delta_g) / 2,

with t the parameters, taken for the maximum of the joint (MacKay, 1992). A linear last layer with Gaussian noise need not be
there: ``regression.py`` has its evidence.

For Gaussian noise ``log p_s = -s R / 2 + m log(s) / 2 + const`` with the whitened residual sum of squares R and m target
entries. A trial costs one pass over the eigenvalues of all groups.

A scalar prior has one delta for all groups, and the derivative by it is the sum of the groups' derivatives,

    2 d log Z / d delta = sum_g [ p_g / delta - |t_g|^2 - sum_i 1 / (s lambda_gi + delta) ],

with i over all p_g eigenvalues, zeros included. It vanishes where ``delta = sum_g gamma_g / sum_g |t_g|^2``, for
``gamma_g = sum_i s lambda_gi / (s lambda_gi + delta)`` the number of well determined parameters of a group (MacKay, 1992):
numerator and denominator are summed over the groups, where a prior of one delta for each tensor has the ratio of each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain.posterior.model import Model, Pass
from bayesopt_chain.posterior.regression import Regression
from bayesopt_chain.posterior.tuning import tune_by_evidence
from bayesopt_chain.precision import Block, Dense, Diagonal, Eigenbasis, Kronecker, LowRank, Precision, Root
from bayesopt_chain.trees import Tree, common_dtype, gram

SCALAR, LAYERWISE = "scalar", "layerwise"  # structures of a prior
WHOLE = ("dense", "root")  # structures of a posterior with one basis for all leaves

LOWEST, HIGHEST = 1e-10, 1e10  # of hyperparameters: an evidence may rise towards 0 or infinity without end


class Spectrum(NamedTuple):
    """One group of leaves with a prior precision in common.

    Attributes:
        leaves: their numbers, in optree order.
        values: the eigenvalues of the data part that are not known to be zero, ``[k]``.
    """

    leaves: tuple[int, ...]
    values: Tensor


@singledispatch
def spectra(precision: Any) -> list[Spectrum] | None:
    """The groups of a precision summed over data, or ``None`` for a structure without a common basis (low rank)."""
    return None


@spectra.register
def _(precision: Dense) -> list[Spectrum]:
    like = optree.tree_leaves(precision.like)
    values = torch.linalg.eigvalsh(precision.matrix)
    return [Spectrum(tuple(range(len(like))), values.clamp_min(0))]


@spectra.register
def _(precision: Root) -> list[Spectrum]:
    rows = optree.tree_leaves(precision.rows)
    values = torch.linalg.eigvalsh(gram([row.to(common_dtype(rows)) for row in rows]))
    entries = sum(row[0].numel() for row in rows)
    return [Spectrum(tuple(range(len(rows))), values[-entries:].clamp_min(0))]


@spectra.register
def _(precision: Diagonal) -> list[Spectrum]:
    return _by_leaf(precision.values)


@spectra.register
def _(precision: Kronecker) -> list[Spectrum]:
    return _by_leaf(precision.eigenbasis().values)


@spectra.register
def _(precision: Eigenbasis) -> list[Spectrum]:
    return _by_leaf(precision.values)


def _by_leaf(values: Tree) -> list[Spectrum]:
    leaves = optree.tree_leaves(values)
    return [Spectrum((i,), leaf.reshape(-1).clamp_min(0)) for i, leaf in enumerate(leaves)]


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


@singledispatch
def by_output(precision: Any, roots: Tree) -> Any:
    """``S Lambda S`` for the diagonal matrix S of ``roots``, one number for each row of a leaf: the data part of a linear layer
    in which the noise of each output has a scale of its own, of which S has the root."""
    raise TypeError(f"a precision of class {type(precision).__name__} cannot be scaled output by output")


@by_output.register
def _(precision: Dense, roots: Tree) -> Dense:
    flat = torch.cat([r.expand_as(x).reshape(-1) for r, x in zip(*map(optree.tree_leaves, (roots, precision.like)))])
    return precision._replace(matrix=flat[:, None] * precision.matrix * flat)


@by_output.register
def _(precision: Root, roots: Tree) -> Root:
    return precision._replace(rows=optree.tree_map(torch.mul, precision.rows, roots))


@by_output.register
def _(precision: LowRank, roots: Tree) -> LowRank:
    diagonal = optree.tree_map(lambda x, r: x * r.square(), precision.diagonal, roots)
    return precision._replace(diagonal=diagonal, rows=optree.tree_map(torch.mul, precision.rows, roots))


@by_output.register
def _(precision: Diagonal, roots: Tree) -> Diagonal:
    return precision._replace(values=optree.tree_map(lambda x, r: x * r.square(), precision.values, roots))


@by_output.register
def _(precision: Block, roots: Tree) -> Block:
    return precision._replace(blocks=optree.tree_map(lambda r, b: by_output(b, r), roots, precision.blocks))


@by_output.register
def _(precision: Kronecker, roots: Tree) -> Kronecker:
    def leaf(left: Tensor, r: Tensor) -> Tensor:
        return left * r.reshape(-1).square() if left.ndim == 1 else r.reshape(-1, 1) * left * r.reshape(-1)

    return precision._replace(left=optree.tree_map(leaf, precision.left, roots))


class Tuned(NamedTuple):
    """What was chosen: a prior precision for each leaf (0-d), the likelihood's scale (0-d, or ``[E]`` for a linear layer with
    Gaussian noise of several outputs), the log evidence there (0-d)."""

    prior_precision: Tree
    likelihood_scale: Tensor
    log_evidence: Tensor


def require_prior_structure(name: str, prior_structure: str | None, structure: str | None) -> str | None:
    """The structure of a prior, "scalar" by default for a posterior whose basis mixes the layers; refuse an unknown one, or one
    that the posterior's structure has no evidence for."""
    if prior_structure not in (SCALAR, LAYERWISE, None):
        raise ValueError(f"{name}: prior_structure={prior_structure!r}: pass 'scalar', 'layerwise' or None")
    if structure not in WHOLE:
        return prior_structure
    if prior_structure == LAYERWISE:
        raise ValueError(
            f"{name}: prior_structure='layerwise' with structure={structure!r}, whose basis mixes the layers: it has one "
            "precision for all parameters: pass 'scalar', or structure 'kronecker', 'diagonal' or 'block'"
        )
    return SCALAR


def tuned(
    model: Model,
    seen: Pass,
    *,
    scale: Tensor | None = None,
    start: float = 1.0,
    prior_structure: str | None = None,
) -> Tuned:
    """Maximise the evidence of a pass over the data over the prior precision and the Gaussian noise.

    Args:
        model: with the parameters, its prior mean and the likelihood.
        seen: what the pass found.
        scale: of the likelihood where it is not tuned: its logarithm and the curvature are multiplied by it. Default: the best
            one of a Gaussian likelihood, 1 of another.
        start: the first prior precision.
        prior_structure: "scalar" has one precision for all leaves; otherwise there is one for each group of ``spectra``.

    Returns:
        The hyperparameters, between 1e-10 and 1e10, and the log evidence. Towards infinity the evidence may rise without end,
        for parameters that the data would rather have at zero.

    Raises:
        ValueError: a low-rank structure, which has no common basis; an evidence that is not finite.
    """
    if seen.regression is not None:
        return tune_layer(model, seen.regression, prior_structure, scale)
    groups = spectra(seen.decomposed)
    if groups is None:
        raise ValueError(
            f"tune='evidence': a precision of class {type(seen.decomposed).__name__} has no basis in which data and prior are "
            "both diagonal: use structure 'kronecker', 'dense', 'root', 'diagonal' or 'block', or tune='validation'"
        )
    evidence, device = _evidence(groups, model, seen, scale), groups[0].values.device
    count = 1 if prior_structure == SCALAR else len(groups)
    first: dict[str, Tensor] = {"prior": torch.full((count,), float(start), dtype=torch.float64, device=device)}
    if model.likelihood.has_noise_scale and scale is None:
        variance = (seen.squares / seen.entries).to(torch.float64)
        first["scale"] = 1 / variance.clamp(torch.finfo(torch.float32).eps, 0.1 * HIGHEST)
    best = tune_by_evidence(evidence, first)
    leaves, structure = optree.tree_flatten(model.params)
    each = best["prior"].expand(len(groups))
    by_leaf = {i: each[n].to(leaves[i].dtype) for n, group in enumerate(groups) for i in group.leaves}
    prior = optree.tree_unflatten(structure, [by_leaf[i] for i in range(len(leaves))])
    one = torch.ones((), dtype=torch.float64, device=device)
    return Tuned(prior, best.get("scale", one if scale is None else scale), evidence(best))


def tune_layer(model: Model, regression: Regression, prior_structure: str | None, scale: Tensor | None = None) -> Tuned:
    """By the exact evidence of a linear last layer with Gaussian noise, from the best point of a coarse grid on."""
    of_weights, of_biases = regression.units()
    one = torch.ones_like(regression.data.noise).reshape(-1)
    least, noise = regression.noise_bounds() if scale is None else (one, one)
    several = one.shape if len(one) > 1 else ()
    together = prior_structure == SCALAR or not regression.has_bias
    units = of_weights[None] if together else torch.stack([of_weights, of_biases])

    def scale_at(h: Any) -> Tensor:
        return (1 / (least + h["noise"] * noise)).reshape(several) if scale is None else scale

    def evidence(h: Any) -> Tensor:
        if bool(((h["prior"] < LOWEST) | (h["prior"] > HIGHEST)).any()):
            raise ValueError(f"a prior precision is outside {LOWEST:g} ... {HIGHEST:g} of its unit")
        prior = h["prior"] * units
        return regression.at(prior[0], prior[-1], scale_at(h))[0]

    powers = [10.0**k for k in range(-6, 7, 2)]
    starts = [
        {"prior": torch.full_like(units, d), **({"noise": one * v} if scale is None else {})}
        for d in powers
        for v in (powers[:4] if scale is None else powers[:1])
    ]
    best = tune_by_evidence(evidence, max(starts, key=lambda h: float(evidence(h))))
    prior = best["prior"] * units
    layer: Any = model.forward
    names = {layer.weight: prior[0]} if layer.bias is None else {layer.weight: prior[0], layer.bias: prior[-1]}
    return Tuned(names, scale_at(best), evidence(best))


def _evidence(groups: list[Spectrum], model: Model, seen: Pass, fixed: Tensor | None) -> Callable[[Any], Tensor]:
    leaves, device = optree.tree_leaves(model.from_prior_mean()), groups[0].values.device
    values = torch.cat([group.values.to(torch.float64) for group in groups])
    sizes = [group.values.numel() for group in groups]
    entries = torch.tensor(sizes, dtype=torch.float64, device=device)
    squares = torch.stack(
        [torch.stack([leaves[i].detach().to(torch.float64).square().sum() for i in g.leaves]).sum() for g in groups]
    )
    default = torch.ones((), dtype=torch.float64, device=device) if fixed is None else fixed

    def evidence(h: Any) -> Tensor:
        if any(bool(((x < LOWEST) | (x > HIGHEST)).any()) for x in h.values()):
            raise ValueError(f"a hyperparameter is outside {LOWEST:g} ... {HIGHEST:g}")
        delta, scale = h["prior"].expand(len(groups)), h.get("scale", default)
        total = seen.log_likelihood_at(model, scale) + 0.5 * (entries * delta.log() - delta * squares).sum()
        each = torch.cat([d.expand(n) for d, n in zip(delta, sizes)])  # one vector for all groups
        return total - 0.5 * each.addcmul(values, scale).log().sum()

    return evidence
