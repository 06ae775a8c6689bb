r"""Stage 4: SGHMC from each mode, at one temperature after the other.

With K batches an epoch and momentum mu, the rate of member m, whose energy per datum has the largest curvature k_m, is

    all data (up to 1,100)    lr = 0.3 * 2 (1 + mu) / k_m,   mu = 0.9          0.3 of heavy ball's stability limit
    minibatches               lr = 1 / (K^2 k_m),            K (1 - mu) = 0.3     momentum longer than an epoch, so that
                                                                                  reshuffled batches cancel in it

halved for a member that diverges, or whose mean loss ends above its mode's by more than ``3 T P / (2 n) + 1``: in equilibrium
the excess is ``T P / (2 n)``, for P parameters and n data. A level with ``T P / (2 N)`` above 30 nats is left out: that far
from the mode no short chain is a posterior's. Each level takes 0.1 of the training's passes, at least 20 steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain.ensemble.cost import FORWARD, passes
from bayesopt_chain.ensemble.curvature import top
from bayesopt_chain.ensemble.problem import FEW, Problem, Tensors, last_of, level_of, outputs_of
from bayesopt_chain.ensemble.ranks import firsts
from bayesopt_chain.likelihoods import Likelihood
from bayesopt_chain.runs.draws import Draws
from bayesopt_chain.samplers.langevin import sghmc

SHARE, LEAST_STEPS, DRAWS = 0.1, 20, 10
LIMIT = 30.0  # nats of T P / 2 a datum
HALVINGS = 8
FIRST_PRODUCTS, MORE_PRODUCTS = 6, 2


def size_of(params: Tensors) -> int:
    """The parameters of one member."""
    return sum(p[0].numel() for p in params.values())


def excess(temperature: float, parameters: int, data: int) -> float:
    """``T P / (2 N)``: how far above the mode's the loss lies in equilibrium, in nats a datum.

    Example:
        >>> from bayesopt_chain.ensemble.ladder import excess
        >>> excess(1.0, 600, 300)
        1.0
    """
    return temperature * parameters / (2 * data)


def ladder(
    problem: Problem,
    params: Tensors,
    buffers: Tensors,
    likelihood: Likelihood,
    temperatures: list[float],
    epochs: float,
    *,
    held_out: bool,
    most: int,
    vectors: Tensors | None,
    stages: Any,
    name: str,
) -> dict[str, Any]:
    """Levels of draws, as saved, with what each took.

    Args:
        problem, params, buffers: the members' modes ``[M, *]``.
        likelihood: with the noise in force.
        temperatures: in units of ``1 / n``, ascending.
        epochs: the passes of training.
        held_out: whether members leave out their folds.
        most: levels at most.
        vectors: along which each member's energy is steep, where that is known ``[M, *]``.
        stages: whose folders the runs have.
        name: of the stage.
    """
    problem.progress.stage(name)
    n, size = problem.data_of(held_out), size_of(params)
    full = n <= FEW
    K = 1 if full else n // problem.batch_size
    mu = 0.9 if full else 1 - 0.3 / K
    at_mode = firsts(_energies(problem, params, buffers, likelihood, held_out), problem.mesh)
    cost = passes(1, n, problem.data.size, FORWARD)
    levels, about = [], []
    halved, sharpest = torch.ones(problem.count, device="cpu"), torch.zeros(problem.count, device="cpu")
    for i, t in enumerate(temperatures[:most]):
        if excess(t, size, problem.data.size) > LIMIT:
            break
        products = MORE_PRODUCTS if vectors else FIRST_PRODUCTS
        k, vectors, spent = top(
            problem, params, buffers, likelihood, vectors, held_out=held_out, products=products, seed=problem.seed
        )
        sharpest = torch.maximum(sharpest, firsts(k.cpu(), problem.mesh))
        steps = max(LEAST_STEPS, int(SHARE * epochs * K))

        def attempt(
            rates: Tensor, number: int, t: float = t, i: int = i, steps: int = steps, start: Any = None
        ) -> Draws:
            return problem.run(
                Sghmc(mu, t / n),
                *start,
                held_out=held_out,
                steps=steps,
                burn_in=steps // 3,
                thinning=max(1, (steps - steps // 3) // DRAWS),
                likelihood=likelihood,
                still=True,
                full=full,
                each={"lr": rates},
                seed=100 + 10 * i + number,
                path=stages.folder(name, f"{i}-{number}"),
            )

        largest = 0.3 * 2 * (1 + mu) / sharpest if full else 1 / (K**2 * sharpest)
        allowed = at_mode + 3 * excess(t, size, n) + 1
        found = guarded(partial(attempt, start=(params, buffers)), largest, halved, allowed, steps)
        halved = found.halved
        cost += spent + passes(found.steps, n if full else problem.batch_size, problem.data.size)
        about.append(
            {
                "temperature": t,
                "steps": steps,
                "halved": halved.tolist(),
                "lr": (largest * halved).tolist(),
                "momentum": mu,
                "excess": float((found.loss - at_mode).mean()),
                "expected": excess(t, size, n),
                "kept": found.kept,
            }
        )
        if not found.kept:
            break
        levels.append(level_of(found.draws, buffers).saved())
        params, buffers = last_of(found.draws, buffers)
    return {"levels": levels, "about": about, "vectors": vectors, "passes": {name: cost}}


class Attempt(NamedTuple):
    """A run at rates that its loss allows, or the last of those that were tried.

    Attributes:
        draws: of the run.
        halved: what each member's rate was multiplied by.
        loss: mean over the draws, ``[M]``.
        steps: of all attempts.
        kept: whether no member diverged or lies too high.
    """

    draws: Draws
    halved: Tensor
    loss: Tensor
    steps: int
    kept: bool


def guarded(
    attempt: Callable[[Tensor, int], Draws], largest: Tensor, halved: Tensor, allowed: Tensor, steps: int
) -> Attempt:
    """Run, and halve the rates of members that lie above what is allowed, until none does.

    Args:
        attempt: from rates ``[M]`` and the attempt's number to draws.
        largest: rates to begin with, ``[M]``.
        halved: by what earlier levels multiplied them.
        allowed: the largest mean loss of each member.
        steps: of an attempt.
    """
    made = 0
    found: Attempt | None = None
    for number in range(HALVINGS):
        drawn = attempt(largest * halved, number)
        made += steps if drawn.complete else (int(drawn.steps[-1]) if len(drawn) else steps // 3)
        loss = drawn.loss[:].mean(0).cpu() if len(drawn) else torch.full_like(allowed, math.inf)
        high = ~(loss <= allowed)
        kept = drawn.complete and not bool(high.any())
        found = Attempt(drawn, halved, loss, made, kept)
        if kept:
            break
        # a run that ended before a draw does not say which member diverged
        halved = torch.where(high if bool(high.any()) else torch.ones_like(high), halved / 2, halved)
    assert found is not None
    return found


class Sghmc:
    """SGHMC at a member's rate; a class, so that a run on disk can say what it is."""

    def __init__(self, momentum: float, temperature: float) -> None:
        self.momentum, self.temperature = momentum, temperature

    def __call__(self, lr: Any) -> Any:
        return sghmc(lr, self.momentum, temperature=self.temperature)


@torch.no_grad()
def _energies(problem: Problem, params: Tensors, buffers: Tensors, likelihood: Likelihood, held_out: bool) -> Tensor:
    """Of each member, over all data that it sees, per datum ``[M]``."""
    n = problem.data_of(held_out)
    rows = problem.rows(held_out)
    found = []
    for i in range(problem.count):
        p = {k: x[i : i + 1] for k, x in params.items()}
        b = {k: x[i : i + 1] for k, x in buffers.items()}
        inputs, targets = problem.data.take(None if rows is None else rows[i])
        outputs = outputs_of(problem.members.still, p, b, inputs, problem.loop)[0]
        fit = likelihood.nll(outputs, targets).mean()
        prior = problem.penalty({k: x[i] for k, x in params.items()})
        found.append(fit + problem.prior_precision / (2 * n) * prior)
    return torch.stack(found).cpu()
