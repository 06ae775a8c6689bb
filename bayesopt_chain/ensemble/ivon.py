"""Variational networks: every member is the mean and the variances that IVON finds (Shen et al., 2024), and draws of them.

Members train twice, without their folds to be scored and on all data to be kept.
"""

from __future__ import annotations

from typing import Any

import torch

from bayesopt_chain.ensemble.cost import passes
from bayesopt_chain.ensemble.ensemble import Ensemble
from bayesopt_chain.ensemble.held import Held
from bayesopt_chain.ensemble.problem import Level, draws_of_members, last_of
from bayesopt_chain.ensemble.recipe import Plan, Trained, finished, held_of
from bayesopt_chain.ensemble.scale import best
from bayesopt_chain.ensemble.stop import ONE
from bayesopt_chain.posterior import vi
from bayesopt_chain.schedules import cosine

RATE, DRAWS, HESSIAN = 0.1, 20, 0.1


def ivon(plan: Plan) -> Ensemble:
    """Means and variances of every member, draws of them, and the scale."""
    problem = plan.problem
    runs = [
        plan.stages.once(name, lambda name=name, out=out: variational(plan, out, name))
        for name, out in (("ivon of pilots", True), ("ivon of modes", False))
    ]
    scored, kept = (Level(x["params"], x["buffers"], x["loss"]) for x in runs)
    held = Held.of(problem)
    outputs = held.outputs(scored)
    factor = best(held, [outputs], ONE) if problem.likelihood.has_noise_scale else 1.0
    stopped = {"factor": factor, "early": False, "rising": 0.0, "step": plan.steps}
    said = [
        f"ivon: {plan.steps} steps from a rate of {RATE:g}, without the folds and on all data; {DRAWS} draws of every member."
    ]
    spent = {**plan.spent, **runs[0]["passes"], **runs[1]["passes"]}
    found = Trained(scored, kept, held, stopped, problem.likelihood, said, spent, {})
    return finished(plan, found, [held_of(found, scored)], [kept], [], {"scores": held.cost(DRAWS)})


def variational(plan: Plan, held_out: bool, name: str) -> dict[str, Any]:
    """Draws ``[DRAWS, M, *]`` of the Gaussians of all members."""
    problem, n = plan.problem, plan.problem.data_of(held_out)
    problem.progress.stage(name)
    tx = vi.ivon(
        cosine(RATE, plan.steps, final=RATE / 1000),
        temperature=1 / n,
        betas=(0.9, 1 - 5 / plan.steps),
        weight_decay=problem.prior_precision / n,
        init_hessian=HESSIAN,
    )
    members = problem.members
    drawn = problem.run(
        tx,
        members.params,
        members.buffers,
        held_out=held_out,
        steps=plan.steps,
        thinning=plan.steps,
        prior=False,
        seed=6,
        path=plan.stages.folder(name),
    )
    if not drawn.complete:
        raise ValueError(
            f"posterior_ensemble: IVON diverged ({drawn.why}): standardise the data, or use method='sghmc'"
        )
    _, buffers = last_of(drawn, members.buffers)
    _, _, b = problem.batches(held_out, full=False)
    return {
        "params": draws_of_members(drawn, tx.posterior, problem, DRAWS),
        "buffers": {k: x.expand(DRAWS, *x.shape).clone() for k, x in buffers.items()},
        "loss": torch.full((DRAWS, problem.count), float("nan"), device="cpu"),
        "passes": {name: passes(plan.steps, b, problem.data.size)},
    }
