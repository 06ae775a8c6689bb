"""MultiSWAG: from every mode, iterates of SGD at a constant rate as a Gaussian, and draws of it (Wilson and Izmailov, 2020).

SGD with momentum 0.9 takes 0.3 of the training's steps, at 0.3 of its stability limit; iterates are collected twenty times in
the last three quarters. It runs on the pilots too, whose draws say how wide predictions are.
"""

from __future__ import annotations

from typing import Any

import torch

from bayesopt_chain.compose import chain
from bayesopt_chain.ensemble.cost import passes
from bayesopt_chain.ensemble.curvature import top
from bayesopt_chain.ensemble.ensemble import Ensemble
from bayesopt_chain.ensemble.problem import Level, draws_of_members, last_of
from bayesopt_chain.ensemble.ranks import firsts
from bayesopt_chain.ensemble.recipe import Plan, finished, held_of, train
from bayesopt_chain.optimizers.functional import sgd
from bayesopt_chain.posterior.swag import swag as collecting

SHARE, ITERATES, DRAWS, MOMENTUM, OF_LIMIT = 0.3, 20, 20, 0.9, 0.3


def swag(plan: Plan) -> Ensemble:
    """Training, Gaussians around every mode, and the scale."""
    plan, found = train(plan)
    walked = [
        plan.stages.once(name, lambda start=start, out=out, name=name: walk(plan, start, found.likelihood, out, name))
        for name, start, out in (("swag of pilots", found.pilots, True), ("swag of modes", found.modes, False))
    ]
    scored, kept = (Level(x["params"], x["buffers"], x["loss"]) for x in walked)
    spent = {**walked[0]["passes"], **walked[1]["passes"]}
    found.said.append(f"swag: {ITERATES} iterates of SGD around every mode, {DRAWS} draws of their Gaussian.")
    return finished(plan, found, [held_of(found, scored)], [kept], [], spent)


def walk(plan: Plan, start: Level, likelihood: Any, held_out: bool, name: str) -> dict[str, Any]:
    """Draws ``[DRAWS, M, *]`` of the Gaussians of all members."""
    problem = plan.problem
    problem.progress.stage(name)
    params, buffers = start.last()
    k, _, cost = top(problem, params, buffers, likelihood, None, held_out=held_out, products=10, seed=problem.seed)
    k = firsts(k.cpu(), problem.mesh)
    rates = OF_LIMIT * 2 * (1 + MOMENTUM) / k / max(1, problem.data_of(held_out) // problem.batch_size) ** 0.5
    steps = max(2 * ITERATES, int(SHARE * plan.steps))
    gap = max(1, 3 * steps // (4 * ITERATES))
    tx = _Walk(steps - gap * ITERATES, gap)
    drawn = problem.run(
        tx,
        params,
        buffers,
        held_out=held_out,
        steps=steps,
        thinning=steps,
        likelihood=likelihood,
        still=True,
        each={"lr": rates},
        seed=5,
        path=plan.stages.folder(name),
    )
    if not drawn.complete:
        raise ValueError(
            f"posterior_ensemble: SWAG's walk diverged ({drawn.why}): use method='sghmc', whose rates are guarded"
        )
    _, buffers = last_of(drawn, buffers)
    _, _, b = problem.batches(held_out, full=False)
    return {
        "params": draws_of_members(drawn, tx.link.posterior, problem, DRAWS),
        "buffers": {n: x.expand(DRAWS, *x.shape).clone() for n, x in buffers.items()},
        "loss": torch.full((DRAWS, problem.count), float("nan"), device="cpu"),
        "passes": {name: cost + passes(steps, b, problem.data.size)},
    }


class _Walk:
    """SGD at a member's rate, its iterates collected."""

    def __init__(self, start: int, every: int) -> None:
        self.link = collecting(rank=ITERATES, start=start, every=every)

    def __call__(self, lr: Any) -> Any:
        return chain(sgd(lr, momentum=MOMENTUM), self.link)
