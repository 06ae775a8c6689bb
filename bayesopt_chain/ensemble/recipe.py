"""The stages one after the other, and the ensemble that they end in: with chains ("sghmc") or without ("ensemble")."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain.ensemble.ensemble import Ensemble
from bayesopt_chain.ensemble.held import Held
from bayesopt_chain.ensemble.ladder import LIMIT, excess, ladder, size_of
from bayesopt_chain.ensemble.modes import modes
from bayesopt_chain.ensemble.pilot import pilot
from bayesopt_chain.ensemble.prior import strengthen
from bayesopt_chain.ensemble.problem import Level, Problem
from bayesopt_chain.ensemble.report import Report
from bayesopt_chain.ensemble.scale import best, settled
from bayesopt_chain.ensemble.stack import stack_weights
from bayesopt_chain.ensemble.stages import Stages
from bayesopt_chain.ensemble.stop import ONE, stop
from bayesopt_chain.likelihoods import Likelihood

ROUNDS = 4  # of weights and noise, one after the other
RISING = 2.0  # standard errors


class Plan(NamedTuple):
    """What a method is given: the problem, the rate, the steps and passes of training, the temperatures, and the stages."""

    problem: Problem
    lr: float
    steps: int
    epochs: float
    temperatures: list[float]
    stages: Stages
    chosen: dict[str, Any]
    spent: dict[str, float]
    searched: bool = False  # whether held-out data choose the prior's precision


class Trained(NamedTuple):
    """Pilots, modes and what held-out data said of them.

    Attributes:
        pilots: the members without their folds, at the checkpoint that was chosen.
        modes: the members on all data, one draw.
        held: the folds.
        stopped: what :func:`bayesopt_chain.ensemble.stop.stop` found.
        likelihood: with the noise that held-out data choose for the pilots.
        said: a sentence for each stage so far.
        passes: what they cost.
        checkpoints: mean held-out score by step.
    """

    pilots: Level
    modes: Level
    held: Held
    stopped: dict[str, Any]
    likelihood: Likelihood
    said: list[str]
    passes: dict[str, float]
    checkpoints: dict[int, float]


def train(plan: Plan) -> tuple[Plan, Trained]:
    """Stages 1 to 4; the plan that is returned has the prior's precision of chains at a temperature."""
    problem, stages = plan.problem, plan.stages
    run = stages.once("pilot", lambda: pilot(problem, plan.lr, plan.steps, stages.folder("pilot")))
    checkpoints = Level(run["params"], run["buffers"], run["loss"])
    held = Held.of(problem)
    found = stages.once("stop", lambda: stop(held, checkpoints, run["steps"]))
    pilots = checkpoints.at(found["checkpoint"])
    passes = {**plan.spent, **run["passes"], **found["passes"]}
    said = _prepared(plan, found, held.size)
    base = problem.prior_precision
    if plan.searched:
        ended = checkpoints.at(len(run["steps"]) - 1)
        prior = stages.once(
            "prior",
            lambda: strengthen(problem, held, ended, pilots, lr=plan.lr, steps=plan.steps, stages=stages),
        )
        passes |= prior["passes"]
        if prior["moved"]:
            problem = replace(problem, prior_precision=prior["precision"])
            moved = {k: {n: x[None] for n, x in prior[k].items()} for k in ("params", "buffers")}
            pilots = Level(moved["params"], moved["buffers"], ended.loss)
            found = {**found, "factor": prior["factor"], "early": False, "step": plan.steps}
        said.append(_strengthened(prior))
    done = stages.once(
        "modes",
        lambda: modes(problem, pilots, found["step"], lr=plan.lr, steps=plan.steps, path=stages.folder("modes")),
    )
    at_modes = Level(
        {k: x[None] for k, x in done["params"].items()},
        {k: x[None] for k, x in done["buffers"].items()},
        torch.full((1, problem.count), float("nan"), device="cpu"),
    )
    likelihood = problem.likelihood
    if likelihood.has_noise_scale:
        likelihood = likelihood.scaled(1 / found["factor"])
    said.append(
        "modes: "
        + (
            "new members trained on all data up to there."
            if done["anew"]
            else "trained on with all data at 0.3 of the rate."
        )
    )
    passes |= done["passes"]
    scores = dict(zip(run["steps"], found["scores"]))
    trained = problem.prior_precision
    if problem.likelihood.has_noise_scale and trained != base:
        problem = replace(problem, prior_precision=max(base, trained / found["factor"]))
    plan = plan._replace(problem=problem, chosen={**plan.chosen, "prior_precision": problem.prior_precision})
    return plan, Trained(pilots, at_modes, held, found, likelihood, said, passes, scores)


def _prepared(plan: Plan, found: dict[str, Any], fold: int) -> list[str]:
    """What the first stages did, a sentence each."""
    size = plan.problem.batch_size
    return [
        f"rate: Adam at {plan.lr:g}"
        + (", the largest that descends as well as the best tried." if plan.spent else "."),
        f"pilot: {plan.steps} steps in batches of {size}, each member without one of two folds of {fold}.",
        f"stop: at step {found['step']}, "
        + (f"better than the end by {found['z']:.1f} standard errors." if found["early"] else "the end of training."),
    ]


def _strengthened(prior: dict[str, Any]) -> str:
    """What held-out data said of the prior, in a sentence."""
    tried = ", ".join(f"{score:.3f} at {precision:g}" for precision, score in prior["tried"])
    kept = "trained on with" if prior["moved"] else "left at"
    return f"prior: {kept} precision {prior['precision']:g}; held-out scores {tried}."


def ensemble(plan: Plan) -> Ensemble:
    """Training and scale: a deep ensemble with held-out stop and scale."""
    plan, found = train(plan)
    return finished(plan, found, [held_of(found, found.pilots)], [found.modes], [], {})


def sghmc(plan: Plan) -> Ensemble:
    """All stages."""
    plan, found = train(plan)
    problem, stages = plan.problem, plan.stages
    arguments = (found.likelihood, plan.temperatures, plan.epochs)

    def climb(name: str, start: Level, held_out: bool, most: int, vectors: Any) -> dict[str, Any]:
        def make() -> dict[str, Any]:
            return ladder(
                problem,
                *start.last(),
                *arguments,
                held_out=held_out,
                most=most,
                vectors=vectors,
                stages=stages,
                name=name,
            )

        return stages.once(name, make)

    scored = climb("ladder of pilots", found.pilots, True, len(plan.temperatures), None)
    kept = climb("ladder of modes", found.modes, False, len(scored["levels"]), scored["vectors"])
    count = len(kept["levels"])
    cold, hot = [Level(**x) for x in scored["levels"][:count]], [Level(**x) for x in kept["levels"]]
    spent = {**scored["passes"], **kept["passes"]}
    found.said.append(_climbed(plan, count, scored["about"], kept["about"]))
    held = [held_of(found, level) for level in (found.pilots, *cold)]
    spent["stacking"] = sum(found.held.cost(len(level.loss)) for level in cold)
    return finished(plan, found, held, [found.modes, *hot], kept["about"][:count], spent)


def held_of(found: Trained, level: Level) -> list[Tensor]:
    """Outputs of a level on the folds."""
    return found.held.outputs(level)


def finished(
    plan: Plan,
    found: Trained,
    scored: list[list[Tensor]],
    levels: list[Level],
    climbed: list[dict[str, Any]],
    spent: dict[str, float],
) -> Ensemble:
    """Stacking, scale, and the report.

    Args:
        plan, found: what was done.
        scored: of every level, outputs on the folds of members that left them out.
        levels: of every level, the draws to keep.
        climbed: of every level above the mode, what its chains did.
        spent: passes behind the training.
    """
    held, problem = found.held, plan.problem
    gaussian = problem.likelihood.has_noise_scale
    factor = found.stopped["factor"] if gaussian else 1.0
    weights = torch.full((len(scored),), 1 / len(scored), dtype=torch.float64, device="cpu")
    if len(scored) > 1:
        counts = held.weights.flatten()
        for _ in range(ROUNDS if gaussian else 1):
            weights = stack_weights(held.levels(scored, factor).flatten(1), counts, weights)
            factor = best(held, scored, weights) if gaussian else 1.0
    factor = settled(held, scored, weights)
    plain = settled(held, scored[:1], ONE)
    scores = {
        "mode alone": float(held.score(scored[:1], ONE, plain).mean()),
        "mixture": float(held.score(scored, weights, factor).mean()),
    }
    said = list(found.said)
    if len(scored) > 1:
        said.append(
            "stack: weights of the levels by held-out scores: " + ", ".join(f"{w:.2f}" for w in weights.tolist()) + "."
        )
    what = "noise variance times" if gaussian else "logits or noise scaled by"
    said.append(
        f"scale: {what} {factor:.3g}" + ("." if factor != 1 else ": nothing else is better by 2 standard errors.")
    )
    table = [{"temperature": 0.0, "weight": float(weights[0]), "excess": 0.0, "expected": 0.0}]
    table += [
        {"temperature": x["temperature"], "weight": float(w), "excess": x["excess"], "expected": x["expected"]}
        for x, w in zip(climbed, weights[1:].tolist())
    ]
    chosen = dict(plan.chosen)
    if gaussian:
        chosen["noise factor"] = found.stopped["factor"]
    if climbed:
        last = climbed[-1]
        chosen |= {"rates": last["lr"], "momentum": last["momentum"]}
    report = Report(
        method=plan.chosen["method"],
        chosen=chosen,
        said=said,
        passes={**found.passes, **spent},
        training=plan.epochs,
        levels=table,
        held_out=scores,
        checkpoints=found.checkpoints,
        scale=factor,
        advice=_advice(plan, found, climbed),
    )
    return Ensemble(levels, weights, factor, problem.likelihood, report, problem)


def _climbed(plan: Plan, count: int, scored: list[dict[str, Any]], kept: list[dict[str, Any]]) -> str:
    """What the chains did, in a sentence."""
    size, n = size_of(plan.problem.members.params), plan.problem.data.size
    if count == len(plan.temperatures):
        halved = max((1 / min(x["halved"]) for x in (*scored, *kept)), default=1.0)
        slower = f", at rates down to 1 / {halved:g} of the first" if halved > 1 else ""
        return f"ladder: {count} levels from every mode, within the loss that their temperature allows{slower}."
    t = plan.temperatures[count]
    if excess(t, size, n) > LIMIT:
        return f"ladder: no level at T = {t:g} / N, where T P / 2 N = {excess(t, size, n):.3g} nats a datum, above {LIMIT:g}."
    return f"ladder: no level at T = {t:g} / N: its chains left the mode at every rate that was tried."


def _advice(plan: Plan, found: Trained, climbed: list[dict[str, Any]]) -> dict[str, str]:
    given = {}
    if found.stopped["rising"] > RISING and not found.stopped["early"]:
        given["train longer"] = (
            f"held-out scores still rose in the last fifth of training: steps={2 * plan.steps} or more will do better"
        )
    if found.stopped["early"]:
        given["stronger prior"] = (
            f"training stopped early at step {found.stopped['step']}: a larger prior_precision may do better"
        )
    if plan.chosen["method"] == "sghmc" and len(climbed) < len(plan.temperatures):
        given["colder"] = "levels were left out; a smaller network, more data, or colder temperatures= keep them"
    labels = plan.problem.likelihood.labels(plan.problem.data.targets)
    if plan.problem.likelihood.has_noise_scale:
        deviation = labels.reshape(len(labels), -1).std(0)
        if float(deviation.max()) > 10 or float(deviation.min()) < 0.1:
            given["standardise"] = (
                f"targets have standard deviations from {float(deviation.min()):.2g} to {float(deviation.max()):.2g}; "
                "weights near their prior want about 1"
            )
    if plan.problem.members.draws and climbed:
        given["dropout"] = "the network has dropout: members train with it, chains and predictions are without"
    return given
