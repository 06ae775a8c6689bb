r"""Chooses the hyperparameters of a Laplace posterior: by the evidence, which is differentiable, or by held-out loss.

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
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks, kinds
from bayesopt_chain.trees import Tree

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
    return bool(leaves) and all(kinds.NUMBER.fits(y) or kinds.PARAMS.fits(y) for y in leaves)


START = kinds.Kind(_is_start, "a tree of positive numbers, or of real tensors", (dict, list, tuple, float, int, Tensor))


@kinds.takes(log_evidence=kinds.FUNCTION, start=START)
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
    kinds.require("tune_by_validation", loss=(loss, kinds.FUNCTION), candidates=(candidates, kinds.SEQUENCE))
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
