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

The evidence is maximised over positive hyperparameters h by L-BFGS in log h. They mean what the caller's function makes of
them: prior precisions, one for each layer, or the noise's variance.

The line search along d from log h = x brackets a step t that decreases f = -log Z enough and flattens its slope (the weak
Wolfe conditions; Lewis and Overton, 2013),

    f(x + t d) <= f(x) + 1e-4 t f'(x) d,      f'(x + t d) d >= 0.9 f'(x) d,

and a trial whose precision is not positive definite, or whose evidence is not finite, counts as f = infinity: the bracket then
shrinks towards the start. Minimisers that interpolate values would need a finite one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from functools import singledispatch
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.posterior.model import Model, Pass
from bayesopt_chain.posterior.regression import Regression
from bayesopt_chain.precision import Dense, Diagonal, Eigenbasis, Kronecker, LowRank, Root
from bayesopt_chain.trees import Tree, common_dtype, gram, paths

MEMORY = 20  # pairs of steps and changes of slope that L-BFGS remembers
TRIALS = 40  # evaluations that one line search may take

Evaluate = Callable[[Tensor], tuple[Tensor, Tensor]]


def _is_start(x: Any) -> bool:
    leaves = optree.tree_leaves(x)
    return bool(leaves) and all(checks.NUMBER.fits(y) or checks.PARAMS.fits(y) for y in leaves)


START = checks.Kind(
    _is_start, "a tree of positive numbers, or of real tensors", (dict, list, tuple, float, int, Tensor)
)


@checks.takes(log_evidence=checks.FUNCTION, start=START)
def tune_by_evidence(log_evidence: Callable[[Tree], Tensor], start: Tree, *, steps: int = 100) -> Tree:
    """Maximise a log evidence over positive hyperparameters.

    Args:
        log_evidence: from the hyperparameters, a tree of tensors like ``start``, to a 0-d tensor, in nats. Where it raises a
            ``ValueError`` (a precision that is not positive definite) or is not finite, the search turns back.
        start: a tree of positive tensors (or numbers).
        steps: at most so many iterations of L-BFGS. It stops earlier when the largest slope in log h is below 1e-9, or no
            step improves the evidence further.

    Returns:
        The best hyperparameters, detached: a tree like ``start``.

    Raises:
        ValueError: a start that is not positive and finite; an evidence, or its gradient, that is NaN or infinite there.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> best = bc.posterior.tune_by_evidence(lambda h: h.log() - h / 3, torch.tensor(1.0, dtype=torch.float64))
        >>> round(best.item(), 6)
        3.0
    """
    given, structure = optree.tree_flatten(start)
    values = [
        value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64, device="cpu")
        for value in given
    ]
    if any(not bool((value.isfinite() & (value > 0)).all()) for value in values):
        raise ValueError(
            f"start has values that are not positive and finite (it is {[value.tolist() for value in values]}): "
            "hyperparameters are searched for in log space"
        )

    def tree(x: Tensor) -> Tree:
        pieces = x.split([value.numel() for value in values])
        return optree.tree_unflatten(structure, [p.reshape(v.shape).to(v) for p, v in zip(pieces, values)])

    def evaluate(x: Tensor) -> tuple[Tensor, Tensor]:
        logs = x.clone().requires_grad_()
        with torch.enable_grad():
            value = log_evidence(optree.tree_map(torch.exp, tree(logs)))
            if not isinstance(value, Tensor) or value.ndim or not value.requires_grad:
                raise ValueError(
                    "log_evidence must return a 0-d tensor that depends on the hyperparameters, which are like start; it "
                    f"returned {checks.short(value)}"
                )
            (slope,) = torch.autograd.grad(-value, logs, materialize_grads=True)
        return -value.detach(), slope

    x = torch.cat([value.log().reshape(-1).to(torch.float64) for value in values])
    first, slope = evaluate(x)
    for what, number in (("log_evidence", float(first)), ("the gradient of log_evidence", float(slope.sum()))):
        if not math.isfinite(number):
            kind = "NaN" if math.isnan(number) else "infinite"
            raise ValueError(f"{what} is {kind}, not finite at start: pass a proper prior and another start")
    return optree.tree_map(lambda leaf: leaf.exp(), tree(minimised(evaluate, x, first, slope, steps)))


def minimised(evaluate: Evaluate, x: Tensor, first: Tensor, slope: Tensor, steps: int) -> Tensor:
    """The minimum of a smooth function, which may be infinite or refused, by L-BFGS (Liu and Nocedal, 1989).

    Five changes in a row below the rounding of a value end the search: one happens far from the optimum too.

    Args:
        evaluate: from ``[n]`` to the value, 0-d, and its gradient ``[n]``.
        x: the start, ``[n]``.
        first: the value there.
        slope: the gradient there, ``[n]``.
        steps: at most so many.
    """
    pairs: list[tuple[Tensor, Tensor]] = []
    value, scale, idle = float(first), 1 / slope.abs().max().clamp_min(1), 0
    for _ in range(steps):
        if float(slope.abs().max()) < 1e-9:
            break
        noise = 4 * torch.finfo(first.dtype).eps * max(1.0, abs(value))
        direction = -quasi_newton(slope, pairs[-MEMORY:], scale)
        t, lower, flatter = line_search(evaluate, x, direction, value, slope, noise)
        if t == 0.0:
            break
        move, change = t * direction, flatter - slope
        if float(move @ change) > 0:
            pairs.append((move, change))
            scale = (move @ change) / (change @ change)
        idle = idle + 1 if value - lower <= noise else 0
        x, value, slope = x + move, lower, flatter
        if idle == 5:
            break
    return x


def quasi_newton(slope: Tensor, pairs: list[tuple[Tensor, Tensor]], scale: Tensor) -> Tensor:
    """The inverse Hessian times a gradient, H g, by BFGS's update ``H' = (1 - s y^T / s^T y) H (1 - y s^T / s^T y) +
    s s^T / s^T y`` for each pair of a move s and the change y of the slope along it; ``scale`` before the first."""
    if not pairs:
        return scale * slope
    *older, (move, change) = pairs
    weight = (move @ slope) / (move @ change)
    out = quasi_newton(slope - weight * change, older, scale)
    return out + (weight - (change @ out) / (move @ change)) * move


def line_search(
    evaluate: Evaluate, x: Tensor, direction: Tensor, value: float, slope: Tensor, noise: float
) -> tuple[float, float, Tensor]:
    """A step along ``direction`` that meets the weak Wolfe conditions, by bracketing and halving.

    Args:
        evaluate: from ``[n]`` to the value and its gradient.
        x: where the line starts, ``[n]``.
        direction: of descent, ``[n]``.
        value: at the start.
        slope: the gradient there.
        noise: rounding error of a value. Within it the slope alone decides (Hager and Zhang, 2005), and a bracket that promises
            less than a tenth of it ends the search.

    Returns:
        The step, and the value and gradient there; a step of 0 where none is better than the start.
    """
    low, high, t, start = 0.0, math.inf, 1.0, float(direction @ slope)
    best = (0.0, value, slope)
    for _ in range(TRIALS):
        trial, along, gradient = math.inf, math.inf, slope
        with suppress(ValueError, torch.linalg.LinAlgError):  # pyright: ignore[reportPrivateImportUsage]
            found, gradient = evaluate(x + t * direction)
            trial, along = float(found), float(gradient @ direction)
        is_finite = math.isfinite(trial) and math.isfinite(along)
        if is_finite and trial < best[1]:
            best = (t, trial, gradient)
        falls = trial <= value + 1e-4 * t * start
        is_level = trial <= value + noise and along <= -(1 - 2e-4) * start
        if not (is_finite and (falls or is_level)):
            high = t
        elif along < 0.9 * start:
            low = t
        else:
            return t, trial, gradient
        if (high - low) * abs(start) <= 0.1 * noise:
            break
        t = 4 * t if math.isinf(high) else (low + high) / 2
    return best


def lowest(holds: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, rounds: int) -> Tensor:
    """Where a condition that holds from some point between ``low`` and ``high`` on begins to, by bisection of each entry."""
    for _ in range(rounds):
        middle = (low + high) / 2
        found = holds(middle)
        low, high = torch.where(found, low, middle), torch.where(found, middle, high)
    return high


SCALAR, LAYERWISE = "scalar", "layerwise"  # structures of a prior
OF_PRIOR = checks.one_of(SCALAR, LAYERWISE).or_none()
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
def _(precision: Diagonal | Eigenbasis) -> list[Spectrum]:
    leaves = optree.tree_leaves(precision.values)
    return [Spectrum((i,), leaf.reshape(-1).clamp_min(0)) for i, leaf in enumerate(leaves)]


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
def _(precision: Kronecker, roots: Tree) -> Kronecker:
    def leaf(left: Tensor, r: Tensor) -> Tensor:
        return left * r.reshape(-1).square() if left.ndim == 1 else r.reshape(-1, 1) * left * r.reshape(-1)

    return precision._replace(left=optree.tree_map(leaf, precision.left, roots))


def require_prior_structure(name: str, prior_structure: str | None, structure: str | None) -> str | None:
    """The structure of a prior, "scalar" by default for a posterior whose basis mixes the layers; refuse one that the
    posterior's structure has no evidence for."""
    if structure not in WHOLE:
        return prior_structure
    if prior_structure == LAYERWISE:
        raise ValueError(
            f"{name}: prior_structure='layerwise' with structure={structure!r}, whose basis mixes the layers: it has one "
            "precision for all parameters: pass 'scalar', or structure 'kronecker' or 'diagonal'"
        )
    return SCALAR


class Objective(NamedTuple):
    """A log evidence to maximise.

    Attributes:
        evidence: of the prior precisions ``[G]`` of groups of leaves, and of the likelihood's scale.
        leaves: the numbers of each group's leaves, in optree order.
        units: prior precisions of these groups, ``[G]``, which a search takes for 1.
        least, noise: the least variance of Gaussian noise and what a search takes for 1 above it, in units of the likelihood's;
            ``[0]`` where it is not tuned.
        starts: multiples of the units of priors and noise, of which the best pair begins the search.
    """

    evidence: Callable[[Tensor, Tensor], Tensor]
    leaves: list[tuple[int, ...]]
    units: Tensor
    least: Tensor
    noise: Tensor
    starts: list[tuple[float, float]]


def tuned(
    model: Model,
    seen: Pass,
    *,
    scale: Tensor | None = None,
    start: float = 1.0,
    prior_structure: str | None = None,
) -> tuple[Tree, Tensor]:
    """Maximise the evidence of a pass over the data over the prior precision and the Gaussian noise.

    Args:
        model: with the parameters, its prior mean and the likelihood.
        seen: what the pass found.
        scale: of the likelihood where it is not tuned: its logarithm and the curvature are multiplied by it. Default: the best
            one of a Gaussian likelihood, 1 of another.
        start: the first prior precision; a linear last layer with Gaussian noise starts from the best point of a coarse grid.
        prior_structure: "scalar" has one precision for all leaves; otherwise there is one for each group of ``spectra``.

    Returns:
        A prior precision for each leaf (0-d), and the likelihood's scale (0-d, or ``[E]`` for a linear layer with Gaussian
        noise of several outputs). Both are within 1e-10 to 1e10 of their units: towards infinity the evidence may rise without
        end, for parameters that the data would rather have at zero.

    Raises:
        ValueError: a low-rank structure, which has no common basis; an evidence that is not finite.
    """
    if scale is None and not model.likelihood.has_noise_scale:
        scale = torch.ones_like(seen.entries)
    if seen.regression is None:
        objective = of_spectra(model, seen, scale is None, start)
    else:
        objective = of_layer(model, seen.regression, scale is None)
    units = objective.units[:1] if prior_structure == SCALAR else objective.units

    def hyperparameters(h: Any) -> tuple[Tensor, Tensor]:
        if any(bool(((x < LOWEST) | (x > HIGHEST)).any()) for x in h.values()):
            raise ValueError(f"a hyperparameter is outside {LOWEST:g} ... {HIGHEST:g} of its unit")
        prior = (h["prior"] * units).expand_as(objective.units)
        if scale is not None:
            return prior, scale
        return prior, (1 / (objective.least + h["noise"] * objective.noise)).reshape(seen.squares.shape)

    def evidence(h: Any) -> Tensor:
        return objective.evidence(*hyperparameters(h))

    starts = [
        {"prior": torch.full_like(units, d), "noise": torch.full_like(objective.noise, v)} for d, v in objective.starts
    ]
    start_at = starts[0] if len(starts) == 1 else max(starts, key=lambda h: float(evidence(h)))
    prior, found = hyperparameters(tune_by_evidence(evidence, start_at))
    leaves, structure = optree.tree_flatten(model.params)
    of_leaf = {i: prior[n] for n, group in enumerate(objective.leaves) for i in group}
    return structure.unflatten([of_leaf[i].to(leaf.dtype) for i, leaf in enumerate(leaves)]), found


def of_layer(model: Model, regression: Regression, tunes_noise: bool) -> Objective:
    """The exact evidence of a linear last layer with Gaussian noise."""
    layer: Any = model.forward
    names = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]

    def evidence(delta: Tensor, scale: Tensor) -> Tensor:
        return regression.at(delta[0], delta[-1], scale)[0]

    leaves = [(paths(model.params).index(name),) for name in names]
    units = torch.stack(regression.units()[: len(names)])
    least, noise = regression.noise_bounds() if tunes_noise else (units[:0], units[:0])
    powers = [10.0**k for k in range(-6, 7, 2)]
    starts = [(d, v) for d in powers for v in (powers[:4] if tunes_noise else [1.0])]
    return Objective(evidence, leaves, units, least, noise, starts)


def of_spectra(model: Model, seen: Pass, tunes_noise: bool, start: float) -> Objective:
    """The evidence from the eigenvalues of the data's precision.

    Raises:
        ValueError: a low-rank structure, which has no common basis.
    """
    groups = spectra(seen.decomposed)
    if groups is None:
        raise ValueError(
            f"tune='evidence': a precision of class {type(seen.decomposed).__name__} has no basis in which data and prior are "
            "both diagonal: use structure 'kronecker', 'dense', 'root' or 'diagonal', or tune='validation'"
        )
    leaves = optree.tree_leaves(optree.tree_map(torch.sub, model.params, model.prior_means()))
    values = torch.cat([group.values.to(torch.float64) for group in groups])
    sizes = [group.values.numel() for group in groups]
    entries = values.new_tensor(sizes)
    squares = torch.stack(
        [torch.stack([leaves[i].detach().to(torch.float64).square().sum() for i in g.leaves]).sum() for g in groups]
    )

    def evidence(delta: Tensor, scale: Tensor) -> Tensor:
        total = seen.log_likelihood_at(model, scale) + 0.5 * (entries * delta.log() - delta * squares).sum()
        each = torch.cat([d.expand(n) for d, n in zip(delta, sizes)])  # one vector for all groups
        return total - 0.5 * each.addcmul(values, scale).log().sum()

    by_group, one = [group.leaves for group in groups], torch.ones_like(entries)
    variance = (seen.squares / seen.entries).clamp_min(torch.finfo(torch.float32).eps)
    noise = variance if tunes_noise else one[:0]
    return Objective(evidence, by_group, one, torch.zeros_like(noise), noise, [(start, 1.0)])
