r"""Prior and noise of a Laplace approximation: by its evidence, and by rules that keep a good network good.

The evidence is a function of prior and noise, with the data part decomposed once.

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

**What keeps a good network good.** The last layer's curvature says little of how well a network predicts: evidence chooses a
posterior far wider than the data ask for where the network is overtrained or its labels are clean. Two rules keep the default
of ``fit_laplace`` from that.

Classes, and every likelihood without a noise of its own. With L the log likelihood at the parameters t, l_i the eigenvalues of
their curvature, phi the dispersion (see below) and gamma the determined parameters,

    phi   = max(1e-3, sum |g_n|^2 / sum tr F_n  D / (D - gamma)),      gamma = sum_i (l_i / phi) / (l_i / phi + delta)
    delta = argmax  L / phi - delta |t|^2 / 2 + sum_i log(delta / (l_i / phi + delta)) / 2

by turns: the dispersion is tuned as the evidence tunes the noise of a Gaussian likelihood, whose phi is 1 / s. The covariance
``(H / phi + delta)^-1`` is then multiplied by the largest tau up to 1 with

    mean_n KL( p(y | f_n)  ||  E p(y | f),  f ~ N(f_n, tau S_n) )  <=  (NLL + 1e-3) / 10

over training inputs, NLL the network's own training loss: averaging may change its probabilities by a tenth of what they cost.

A linear last layer with Gaussian noise. The residuals that the last layer leaves say too little of the noise where the body has
fitted the targets too. With w_i the eigenvalues of ``J J^T`` for the Jacobian of all data in *all* parameters,

    v = |y - f|^2 / (N - gamma),      gamma = sum_i w_i / (w_i + v delta),      delta = gamma / |theta|^2

(MacKay, 1992), of several outputs for each by itself, with the Jacobian of that output. The prior of the layer is tuned at
this noise. Only where the layer was not trained, so that the network explains less than half of the targets' variance and the
layer's mode leaves a quarter of its residual or less, degrees of freedom counted, is the noise left to the layer's evidence.

Of n data of N the eigenvalues u_i say what gamma is for all. Let C be the mean of ``J_n^T J_n``. A ridge r on n data leaves
the same degrees of freedom as the ridge kappa on C itself, which is larger by those that the data have left
(Marchenko and Pastur, 1967; Bach, "High-dimensional analysis of double descent", 2024),

    gamma_n(r) = tr C (C + kappa)^-1,      r = kappa (n - gamma_n(r)),      that is  1 / kappa = sum_i 1 / (u_i + r),

so that every r is a point (kappa, gamma) that belongs to any number of data: of N the ridge is ``kappa (N - gamma)``. Setting
it to v delta leaves one equation, whose left side grows and whose right side falls along r,

    kappa (N - gamma)^2 |theta|^2 = |y - f|^2 gamma.

The n data alone determine n parameters at most. Where gamma comes out above 0.9 n of a network with more parameters, it
goes on as the power of kappa that it is there, up to what there are parameters. On networks that had fitted 2,500 data well
beyond their noise, 1,000 of them gave .94 to 1.4 times the noise by all, 500 gave .97 to 1.7 times; scaling the eigenvalues
by N / n, by which gamma stays below n, gave .03 to .92 of it. Costs, for n data up to 1,000: the Jacobian's n rows, half of the
``n^2 P`` products of ``J J^T``, and its eigenvalues, for each output.

Both rules were chosen on 22 networks (``benchmarks/results/laplace_default.md``).

**The dispersion of a fit**: how noisy the targets are, against what the likelihood says. For the loss ``l_n = -log p(y_n |
f_n)`` of datum n with outputs f_n, its gradient g_n in the outputs has the covariance F_n, the Fisher information of the
outputs, if the targets are distributed as the likelihood says. The dispersion is the factor by which the squares of the
gradients differ from that,

    phi = sum_n |g_n|^2 / sum_n tr F_n  *  D / (D - gamma),      gamma = tr (Lambda^-1 J^T F J) = sum_i (1 - delta_i Sigma_ii),

with D the number of independent entries of all targets (one a regression's output, C - 1 a label of C classes), Lambda the
posterior's precision, Sigma its inverse, delta the prior precision and J the Jacobian of all outputs. The second factor is
that of an unbiased variance: a fit of gamma well determined parameters takes gamma of D residuals. Of a regression phi is the
residual sum of squares over ``variance (D - gamma)``, of classes the sum of ``|y - p|^2`` over that of ``1 - |p|^2``,
corrected so. phi below 1 says that labels are cleaner than the model's probabilities or its noise variance, as in data sets
from which doubtful cases were taken out; phi above 1 that they are noisier (McCullagh and Nelder, "Generalized Linear
Models", 1989, chapter 9; for |g|^2 against F: White, "Maximum likelihood estimation of misspecified models", 1982).

What it says of draws. Since ``(d^2 p / df^2) / p = g g^T - d^2 l / df^2``, outputs ``f_n + e`` with ``e ~ N(0, t S_n)`` have

    log E_e p(y_n | f_n + e) - log p(y_n | f_n) = t / 2 tr S_n (g_n g_n^T - d^2 l_n / df^2) + O(t^2).

Where the outputs' covariance S is that of the posterior at temperature 1 / N and t is N T, ``sum_n tr S_n F_n = gamma``:
averaging over draws at temperature T changes the log score of N new data by ``N T gamma (phi_new - 1) / 2`` to first order,
with phi_new their dispersion around the mode's outputs. Averages over warm draws gain where targets are noisier than the mode
says, and lose where they are cleaner.
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
from bayesopt_chain.curvature._kinds import plus_gram
from bayesopt_chain.curvature._plan import batch_size, part
from bayesopt_chain.likelihoods import Likelihood
from bayesopt_chain.likelihoods._classes import OneOfSeveral
from bayesopt_chain.posterior._linearized import jacobian
from bayesopt_chain.posterior.gaussian import Gaussian
from bayesopt_chain.posterior.last_layer import with_gradients
from bayesopt_chain.posterior.model import Model, Pass, linearized
from bayesopt_chain.posterior.regression import TINY, Regression
from bayesopt_chain.precision import Dense, Diagonal, Kronecker, LowRank, Root
from bayesopt_chain.trees import Tree, common_dtype, gram, paths, size, spectral, unflatten, wide

MEMORY = 20  # pairs of steps and changes of slope that L-BFGS remembers
TRIALS = 40  # evaluations that one line search may take

Evaluate = Callable[[Tensor], tuple[Tensor, Tensor]]


def _is_start(x: Any) -> bool:
    leaves = optree.tree_leaves(x)
    return bool(leaves) and all(
        checks.POSITIVE.fits(y) or (checks.REALS.fits(y) and bool((y.isfinite() & (y > 0)).all())) for y in leaves
    )


@checks.takes(
    log_evidence=checks.FUNCTION,
    start=checks.Kind(
        _is_start,
        "a tree of numbers or real tensors, all positive and finite, for hyperparameters are searched for in log space",
        (dict, list, tuple, float, int, Tensor),
    ),
)
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
    like = optree.tree_map(
        lambda x: x.detach() if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64, device="cpu"), start
    )

    def evaluate(x: Tensor) -> tuple[Tensor, Tensor]:
        logs = x.clone().requires_grad_()
        with torch.enable_grad():
            value = log_evidence(optree.tree_map(torch.exp, unflatten(logs, like)))
            if not isinstance(value, Tensor) or value.ndim or not value.requires_grad:
                raise ValueError(
                    "log_evidence must return a 0-d tensor that depends on the hyperparameters, which are like start; it "
                    f"returned {checks.short(value)}"
                )
            (slope,) = torch.autograd.grad(-value, logs, materialize_grads=True)
        return -value.detach(), slope

    x = torch.cat([leaf.log().reshape(-1).to(torch.float64) for leaf in optree.tree_leaves(like)])
    first, slope = evaluate(x)
    for what, number in (("log_evidence", float(first)), ("the gradient of log_evidence", float(slope.sum()))):
        if not math.isfinite(number):
            raise ValueError(f"{what} is {number} at start, not finite: pass a proper prior and another start")
    return optree.tree_map(lambda leaf: leaf.exp(), unflatten(minimised(evaluate, x, first, slope, steps), like))


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


def spectra(precision: Any) -> list[Spectrum] | None:
    """The groups of a precision summed over data, or ``None`` for a structure without a common basis (low rank)."""
    if bases := precision.layer_bases():
        return [Spectrum((i,), basis.values.reshape(-1).clamp_min(0)) for i, basis in enumerate(bases)]
    if isinstance(precision, Dense):
        leaves, values = optree.tree_leaves(precision.like), spectral(torch.linalg.eigvalsh, precision.matrix)
    elif isinstance(precision, Root):
        leaves = optree.tree_leaves(precision.rows)
        values = spectral(torch.linalg.eigvalsh, gram([row.to(common_dtype(leaves)) for row in leaves]))
        values = values[-sum(row[0].numel() for row in leaves) :]
    else:
        return None
    return [Spectrum(tuple(range(len(leaves))), values.clamp_min(0))]


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
    return structure.unflatten([of_leaf[i].to(wide(leaf.dtype)) for i, leaf in enumerate(leaves)]), found


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


ROUNDING = 1e-6  # of the degrees of freedom that are left, as a share


def scatter_of(likelihood: Likelihood, outputs: Tensor, targets: Any) -> Tensor:
    """Sums over the targets of a batch, ``[3]`` in float64: squares of the gradients in the outputs, Fisher information,
    independent entries D."""
    outputs = outputs.detach()
    root, grouping = likelihood.root(outputs, targets), likelihood.grouping(outputs.shape[1:])
    weights, count = likelihood.weights(targets), math.prod(grouping.positions)
    if weights is None:
        weights = outputs.new_ones((outputs.shape[0], *grouping.positions))
    # a target of weight w counts w times: its gradient is w times that of one, its information too
    own = grouping.over_outputs(weights.to(outputs.dtype), outputs.shape)
    slopes = likelihood.gradient(outputs, targets).detach() / own.clamp_min(torch.finfo(own.dtype).tiny).sqrt()
    squares, information = slopes.to(torch.float64).square().sum(), root.diagonal().detach().to(torch.float64).sum()
    return torch.stack([squares, information, weights.to(torch.float64).sum() * root.columns / count])


def dispersion(scatter: Tensor, gamma: Tensor) -> Tensor:
    """phi where the data determine ``gamma`` parameters, 0-d."""
    squares, information, independent = scatter
    return squares / information * independent / (independent - gamma).clamp_min(ROUNDING * independent)


class Kept:
    """What the default's rules ask of a pass: its first ``most`` data by batches, and the scatter of targets where the
    likelihood has no noise scale."""

    def __init__(self, most: int) -> None:
        self.most, self.batches, self.scatter = most, [], torch.zeros(3, dtype=torch.float64, device="cpu")

    def take(self, model: Model, batch: Any, outputs: Tensor) -> None:
        """Keep what of a batch is still wanted."""
        wanted = self.most - sum(map(batch_size, self.batches))
        if wanted > 0:
            self.batches.append(part(batch, 0, wanted))
        if not model.likelihood.has_noise_scale:
            self.scatter = self.scatter.to(outputs.device) + scatter_of(model.likelihood, outputs, batch[1])


LEAST_DISPERSION, ROUNDS, SETTLED = 1e-3, 8, 1e-2
SHARE, SPARE, HALVINGS, DRAWS = 0.1, 1e-3, 14, 16  # of the budget
ROWS, NUMBERS = 1000, 2**27  # of the Jacobian of a whole network
OF_BUDGET, FEWEST, ENTRIES = 256, 8, 2**25  # data that the budget is of, entries of their outputs' covariances
LEAST_DATA = 50  # that stand for all
LEAST_FREE = 1e-3  # share of the degrees of freedom that the noise has
RESOLVED = 0.9  # of as many parameters as data, which they can determine
BISECTIONS, SPAN = 80, 60.0  # the latter of the ridge, in its logarithm, on both sides of the largest eigenvalue
UNTRAINED = 4.0  # times the mode's mean square, at which the layer is no mode


def by_dispersion(
    model: Model, seen: Pass, scatter: Tensor, start: float, prior_structure: str | None
) -> tuple[Tree, Tensor]:
    """Prior and dispersion by turns; the likelihood's scale is 1 / phi."""
    groups = spectra(seen.decomposed) or []
    found = tuned(model, seen, start=start, prior_structure=prior_structure)
    for _ in range(ROUNDS - 1):
        each, last = optree.tree_leaves(found[0]), found[1]
        gamma: Any = sum(
            (last * g.values / (last * g.values + each[g.leaves[0]].to(torch.float64))).sum() for g in groups
        )
        scale = 1 / dispersion(scatter, gamma).clamp_min(LEAST_DISPERSION)
        if abs(math.log(scale / last)) < SETTLED:
            break
        found = tuned(model, seen, scale=scale, start=float(each[0]), prior_structure=prior_structure)
    return found


@torch.no_grad()
def within_budget(model: Model, posterior: Gaussian, batches: list[Any], seen: Pass) -> float:
    """The largest tau up to 1 at which the KL divergence of the averages from the network's own distribution is affordable.

    1 for outputs of which few covariances can be held, and for a likelihood that cannot draw.
    """
    likelihood: Any = getattr(model.likelihood, "inner", model.likelihood)  # what is drawn has no weights
    most = SHARE * (float(-seen.log_likelihood / seen.entries) + SPARE)
    outputs = with_gradients(model.forward)(posterior.mean, part(batches[0], 0, 1)).numel()
    each = min(OF_BUDGET, ENTRIES // outputs**2)
    if each < FEWEST:
        return 1.0
    parts = [linearized(model, posterior, part(batch, 0, each)) for batch in batches[:each]]
    try:
        owns = [_own(likelihood, mean) for mean, _ in parts]
    except ValueError:
        return 1.0

    def is_affordable(x: Tensor) -> Tensor:
        pairs = zip(owns, parts)
        found = [_divergence(likelihood, own, mean, (-x).exp() * covariance) for own, (mean, covariance) in pairs]
        return torch.cat(found).mean() <= most

    one = torch.zeros_like(seen.log_likelihood)  # the logarithm of tau = 1
    if bool(is_affordable(one)):
        return 1.0
    return float((-lowest(is_affordable, one, one + HALVINGS * math.log(2), HALVINGS)).exp())


def _own(likelihood: Likelihood, mean: Tensor) -> Any:
    """What the network says of targets: probabilities of classes, in order or not, of other targets draws."""
    if likelihood.has_classes or isinstance(likelihood, OneOfSeveral):
        return _of_labels(likelihood, likelihood.mean(mean))
    generator = torch.Generator(mean.device).manual_seed(0)
    return [likelihood.draw(mean, generator) for _ in range(DRAWS)]


def _of_labels(likelihood: Likelihood, p: Tensor) -> Tensor:
    """Probabilities of all labels, ``[*, C]``, where those of yes are given for targets that are yes or no."""
    return torch.stack([1 - p, p], -1) if likelihood.has_classes and likelihood.support is not None else p


def _divergence(likelihood: Likelihood, own: Any, mean: Tensor, covariance: Tensor) -> Tensor:
    if isinstance(own, Tensor):
        method = "probit" if own.shape[-1] > 32 and "probit" in likelihood.methods else None
        tiny = torch.finfo(own.dtype).tiny
        averaged = _of_labels(likelihood, likelihood.expected_mean(mean, covariance, method))
        return (own * (own.clamp_min(tiny) / averaged.clamp_min(tiny)).log()).sum(-1).flatten()
    predictive = likelihood.predictive(mean, covariance)
    return torch.stack([likelihood.log_prob(mean, y) - predictive.log_prob(y) for y in own]).mean(0).flatten()


def by_network_noise(model: Model, seen: Pass, batches: list[Any], prior_structure: str | None) -> tuple[Tree, Tensor]:
    """Prior and noise of a linear last layer with Gaussian noise: the noise by the whole network where its Jacobian fits."""
    assert seen.regression is not None
    total = (seen.regression.total / seen.regression.data.noise).reshape(-1)
    explains_little, own = (seen.squares > total / 2) | (seen.entries == 0), None
    if bool(explains_little.any()):  # only then the layer's own evidence is asked
        own = tuned(model, seen, prior_structure=prior_structure)
        squares, gamma = seen.regression.residual(*model.prior_of_layer(own[0]), own[1])
        of_layer = squares / (seen.entries - gamma).clamp_min(1)
        explains_little &= (seen.squares / seen.entries > UNTRAINED * of_layer) | (seen.entries == 0)
        if bool(explains_little.all()):
            return own
    noise = _network_noise(model, seen, batches)
    if noise is None:
        return own or tuned(model, seen, prior_structure=prior_structure)
    scale = 1 / noise.maximum(seen.regression.least_noise())
    if own is not None:
        scale = torch.where(explains_little, own[1], scale)
    return tuned(model, seen, scale=scale.reshape(seen.squares.shape), prior_structure=prior_structure)


def data_for(model: Model) -> int:
    """How many data the rules look at again."""
    body = model.features_of
    return min(ROWS, NUMBERS // size(dict(body.params))) if model.is_linear_gaussian and body else OF_BUDGET


def _whitened(likelihood: Likelihood, forward: Any, params: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Jacobian rows over the noise's root, times that of the weights, ``[B E, P]``, and the targets' weights; float64."""
    weights, variance = likelihood.weights(batch[1]), likelihood.variance(forward(params, batch))
    weights = (torch.ones_like(variance) if weights is None else weights.to(variance)).to(torch.float64).reshape(-1)
    rows = torch.cat([x.flatten(1) for x in optree.tree_leaves(jacobian(forward, params, batch))], 1)
    return rows.to(torch.float64) * (weights / variance.reshape(-1)).sqrt()[:, None], weights


def _spectrum(rows: Tensor) -> Tensor:
    """The eigenvalues of ``J J^T``, or of ``J^T J`` where that is smaller."""
    narrow = rows if len(rows) > rows.shape[1] else rows.mT
    return torch.linalg.eigvalsh(plus_gram(None, narrow), UPLO="U")


@torch.no_grad()
def _network_noise(model: Model, seen: Pass, batches: list[Any]) -> Tensor | None:
    """Of each output, in units of the likelihood's variance, ``[E]``; ``None`` where too few data fit."""
    body = model.features_of
    count = sum(map(batch_size, batches))
    if body is None or count < min(float(seen.precision.count), LEAST_DATA):
        return None
    params, outputs = dict(body.params), seen.squares.numel()
    rows, weights = map(
        torch.cat, zip(*(_whitened(model.likelihood, body.forward, params, batch) for batch in batches))
    )
    spectrum = [_spectrum(rows[o::outputs]) for o in range(outputs)]
    squares = seen.squares.reshape(-1)
    entries = seen.entries.reshape(-1)
    norm = sum(p.to(torch.float64).square().sum() for p in params.values())
    some = weights.reshape(-1, outputs).sum(0)
    some = torch.where(some > 0, some, entries)
    gamma = _determined(torch.stack(spectrum).clamp_min(0), some, entries, squares / norm, rows.shape[1])
    return squares / (entries - gamma)


def _determined(values: Tensor, some: Tensor, count: Tensor, squares: Tensor, parameters: int) -> Tensor:
    """gamma of ``count`` data ``[E]`` from the eigenvalues ``[E, k]`` of ``some`` of them, ``[E]``.

    ``squares``: the residual's over ``|theta|^2``, ``[E]``.
    """
    scale = values.amax(1).clamp_min(torch.finfo(values.dtype).tiny)
    most = ((1 - LEAST_FREE) * count).clamp_max(parameters)

    def at(log_ridge: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """kappa, gamma, and the power of kappa as which gamma changes."""
        ridge = (scale * log_ridge.exp())[:, None]
        share = values / (values + ridge)
        gamma = share.sum(1).minimum((1 - LEAST_FREE) * some)
        kappa = ridge[:, 0] / (some - gamma)
        free = some - (share * (2 - share)).sum(1)  # of 1 - share squared, those of no eigenvalue included
        return kappa, gamma, (share * (1 - share)).sum(1) * (some - gamma) / (gamma * free).clamp_min(TINY)

    def is_above(kappa: Tensor, gamma: Tensor) -> Tensor:
        return kappa * (count - gamma).square() > squares * gamma

    zero = torch.zeros_like(count)
    gamma = at(lowest(lambda x: is_above(*at(x)[:2]), zero - SPAN, zero + SPAN, BISECTIONS))[1].minimum(most)
    beyond = (gamma > RESOLVED * some) & (some < count) & (parameters > some)
    if not bool(beyond.any()):
        return gamma
    kappa, start, power = at(lowest(lambda x: at(x)[1] <= RESOLVED * some, zero - SPAN, zero + SPAN, BISECTIONS))

    def further(log_ratio: Tensor) -> Tensor:
        return (start * (-power * log_ratio).exp()).minimum(most)

    ends = lowest(lambda x: is_above(kappa * x.exp(), further(x)), zero - 4 * SPAN, zero, BISECTIONS)
    return torch.where(beyond, further(ends).maximum(gamma), gamma)
