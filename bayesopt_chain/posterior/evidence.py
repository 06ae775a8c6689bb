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

Chooses the hyperparameters of a Laplace posterior: by the evidence, which is differentiable, or by held-out loss.

    evidence      maximise  log Z(h)  over positive h, by L-BFGS in log h
    validation    minimise  loss(h)   over given candidates

The hyperparameters ``h`` mean what the caller's function makes of them: prior precisions, one for each layer, or the noise's
variance.

The line search along d from log h = x brackets a step t that decreases f = -log Z enough and flattens its slope (the weak
Wolfe conditions; Lewis and Overton, 2013),

    f(x + t d) <= f(x) + 1e-4 t f'(x) d,      f'(x + t d) d >= 0.9 f'(x) d,

and a trial whose precision is not positive definite, or whose evidence is not finite, counts as f = infinity: the bracket then
shrinks towards the start. Minimisers that interpolate values would need a finite one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import singledispatch
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.posterior.model import Model, Pass
from bayesopt_chain.posterior.regression import Regression
from bayesopt_chain.precision import Dense, Diagonal, Eigenbasis, Kronecker, LowRank, Root
from bayesopt_chain.trees import Tree, common_dtype, gram

MEMORY = 20  # pairs of steps and changes of slope that L-BFGS remembers
TRIALS = 40  # evaluations that one line search may take

Value = tuple[float, Tensor]
Evaluate = Callable[[Tensor], Value]


class Trial(NamedTuple):
    """A step along the line, and the value and slope there."""

    t: float
    value: float
    slope: float


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

    def evaluate(x: Tensor) -> Value:
        logs = x.clone().requires_grad_()
        with torch.enable_grad():
            value = log_evidence(optree.tree_map(torch.exp, tree(logs)))
            if not isinstance(value, Tensor) or value.ndim or not value.requires_grad:
                raise ValueError(
                    "log_evidence must return a 0-d tensor that depends on the hyperparameters, which are like start; it "
                    f"returned {checks.short(value)}"
                )
            value = -value
            (slope,) = torch.autograd.grad(value, logs, materialize_grads=True)
        resolution[0] = torch.finfo(value.dtype).eps
        return float(value.detach()), slope

    resolution = [0.0]
    x = torch.cat([value.log().reshape(-1).to(torch.float64) for value in values])
    first, slope = evaluate(x)
    for what, number in (("log_evidence", first), ("the gradient of log_evidence", float(slope.sum()))):
        if not math.isfinite(number):
            kind = "NaN" if math.isnan(number) else "infinite"
            raise ValueError(f"{what} is {kind}, not finite at start: pass a proper prior and another start")
    x = minimised(_never_raising(evaluate), x, first, slope, steps, resolution[0])
    return optree.tree_map(lambda leaf: leaf.exp(), tree(x))


def _never_raising(evaluate: Evaluate) -> Evaluate:
    """The same function with the value infinity wherever it raises or has no finite value and gradient."""

    def tried(x: Tensor) -> Value:
        try:
            value, slope = evaluate(x)
        except (ValueError, torch.linalg.LinAlgError):  # pyright: ignore[reportPrivateImportUsage]
            return math.inf, torch.zeros_like(x)
        if not (math.isfinite(value) and bool(slope.isfinite().all())):
            return math.inf, torch.zeros_like(x)
        return value, slope

    return tried


def minimised(evaluate: Evaluate, x: Tensor, value: float, slope: Tensor, steps: int, resolution: float) -> Tensor:
    """The minimum of a smooth function that may be infinite, from ``x`` on, by L-BFGS (Liu and Nocedal, 1989).

    Args:
        evaluate: from ``[n]`` to the value and its gradient ``[n]``.
        x: the start, ``[n]``.
        value: there.
        slope: the gradient there, ``[n]``.
        steps: at most so many.
        resolution: relative rounding error of a value; five changes below it in a row end the search.
    """
    memory: deque[tuple[Tensor, Tensor]] = deque(maxlen=MEMORY)
    idle = 0
    for _ in range(steps):
        if float(slope.abs().max()) < 1e-9:
            break
        direction = -quasi_newton(slope, memory)
        if float(direction @ slope) >= 0:
            memory.clear()
            direction = -slope
        length = 1.0 if memory else min(1.0, 1.0 / float(slope.abs().max()))
        noise = 4 * resolution * max(1.0, abs(value))
        t, lower, flatter = line_search(
            evaluate, x, direction, Trial(0.0, value, float(direction @ slope)), length, noise
        )
        if t == 0.0:
            break
        move, change = t * direction, flatter - slope
        if float(move @ change) > 0:
            memory.append((move, change))
        x, gained, value, slope = x + move, value - lower, lower, flatter
        # One gain below rounding happens far from the optimum too; five in a row do not.
        idle = idle + 1 if gained <= noise else 0
        if idle == 5:
            break
    return x


def quasi_newton(slope: Tensor, memory: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The inverse of L-BFGS's Hessian times a gradient, by two loops over the remembered moves and changes of slope."""
    out, weights = slope.clone(), []
    for move, change in reversed(memory):
        weight = (move @ out) / (move @ change)
        out -= weight * change
        weights.append(weight)
    if memory:
        move, change = memory[-1]
        out *= (move @ change) / (change @ change)
    for (move, change), weight in zip(memory, reversed(weights)):
        out += (weight - (change @ out) / (move @ change)) * move
    return out


def line_search(
    evaluate: Evaluate, x: Tensor, direction: Tensor, start: Trial, t: float, noise: float = 0.0
) -> tuple[float, float, Tensor]:
    """A step along ``direction`` that meets the weak Wolfe conditions, by bracketing.

    Between two finite trials the next one is the minimum of their cubic, kept off the ends; beside an infinite one, the middle.

    Args:
        evaluate: from ``[n]`` to the value and its gradient.
        x: where the line starts, ``[n]``.
        direction: of descent, ``[n]``.
        start: step 0, the value and the slope along ``direction`` there.
        t: the first step to try.
        noise: rounding error of a value. Within it the slope alone decides (Hager and Zhang, 2005), and a bracket that promises
            less ends the search.

    Returns:
        The step, and the value and gradient there; a step of 0 where none is better than the start.
    """
    low, high = start, None
    best: tuple[float, float, Tensor] = (0.0, start.value, torch.zeros_like(x))
    for _ in range(TRIALS):
        value, gradient = evaluate(x + t * direction)
        trial = Trial(t, value, float(gradient @ direction))
        if value < best[1]:
            best = t, value, gradient
        enough = value <= start.value + 1e-4 * t * start.slope
        level = value <= start.value + noise and trial.slope <= -(1 - 2e-4) * start.slope
        if not (enough or level):
            high = trial
        elif trial.slope < 0.9 * start.slope:
            low = trial
        else:
            return t, value, gradient
        if high is None:
            t = 4 * t
            continue
        width = high.t - low.t
        if width * abs(low.slope) <= noise or low.t + 0.5 * width in (low.t, high.t):
            break
        t = min(max(_cubic_minimum(low, high), low.t + 0.1 * width), high.t - 0.1 * width)
    return best


def _cubic_minimum(low: Trial, high: Trial) -> float:
    """Of the cubic through two trials' values and slopes; the middle where one is infinite."""
    if math.isinf(high.value):
        return 0.5 * (low.t + high.t)
    mean = low.slope + high.slope - 3 * (low.value - high.value) / (low.t - high.t)
    root = math.sqrt(max(0.0, mean**2 - low.slope * high.slope))
    span = high.slope - low.slope + 2 * root
    return high.t - (high.t - low.t) * (high.slope + root - mean) / span if span else 0.5 * (low.t + high.t)


@checks.takes(loss=checks.FUNCTION, candidates=checks.SEQUENCE)
def tune_by_validation(loss: Callable[[Any], Any], candidates: Sequence[Any]) -> tuple[Any, list[float]]:
    """The candidate with the smallest held-out loss.

    A candidate whose loss is not finite, or whose posterior is refused with a ``ValueError``, counts as infinitely bad.

    Args:
        loss: from a candidate to a number or a 0-d tensor.
        candidates: what to try; anything.

    Returns:
        The best candidate, and every candidate's loss.

    Raises:
        ValueError: when there is no candidate with a finite loss; it says which were NaN and repeats the first refusal.

    Example:
        >>> import bayesopt_chain as bc
        >>> bc.posterior.tune_by_validation(lambda h: (h - 2) ** 2, [1, 2, 4])
        (2, [1.0, 0.0, 4.0])
    """
    losses: list[float] = []
    refusals: list[str] = []
    for candidate in candidates:
        try:
            number = float(loss(candidate))
        except ValueError as error:
            refusals.append(str(error))
            number = math.inf
        if math.isnan(number):
            refusals.append("its loss is NaN")
        losses.append(number if math.isfinite(number) else math.inf)
    if not losses or min(losses) == math.inf:
        why = f" (the first: {refusals[0]})" if refusals else ""
        raise ValueError(f"none of {len(losses)} candidates has a finite loss{why}: pass others, or check loss itself")
    return candidates[losses.index(min(losses))], losses


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


@spectra.register
def _(precision: Kronecker) -> list[Spectrum] | None:
    return spectra(precision.eigenbasis())


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


class Tuned(NamedTuple):
    """What was chosen: a prior precision for each leaf (0-d), the likelihood's scale (0-d, or ``[E]`` for a linear layer with
    Gaussian noise of several outputs), the log evidence there (0-d)."""

    prior_precision: Tree
    likelihood_scale: Tensor
    log_evidence: Tensor


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
            "both diagonal: use structure 'kronecker', 'dense', 'root' or 'diagonal', or tune='validation'"
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
    centred = optree.tree_map(torch.sub, model.params, model.prior_means())
    leaves, device = optree.tree_leaves(centred), groups[0].values.device
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
