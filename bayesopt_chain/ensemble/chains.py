r"""Chains behind the members, where they pay: draws of each network's posterior, if held-out data say that they are worth it.

The chain of member m starts where the member ended without its fold, and follows on all n data that it sees the energy

    U(theta) = 1/n sum_i -log p(y_i | f(theta, x_i), v0) + 1/2n sum_p lambda_p theta_p^2,        T = 1/n,

with lambda the fan-in prior and v0 the training noise of the recipe, by BAOAB with h = .9 / sqrt(k) and momentum .95. T rises
over the first 5 % of the steps; k, the largest curvature of any member, is taken at the starts and at untrained weights (an
interpolating start has none), and anew at 6 and 20 % of the steps. Of its last half 16 draws are kept. The draws of these
chains and the member are one mixture; if that scores better on the folds by two standard errors, chains go on from there with
all data, for as many steps or those that fit what is left of the seconds, and their draws stand beside the members. Else the
other half of the seconds is not spent.

Since v0 is .3 of the held-out noise v, the chain is that of a likelihood with v tempered to T N = v0 / v.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain.diagnostics.convergence import split_r_hat
from bayesopt_chain.diagnostics.gradient_noise import lanczos
from bayesopt_chain.ensemble import held
from bayesopt_chain.ensemble.training import TIMED, Problem, Training, timed
from bayesopt_chain.loop.parallel import parallel
from bayesopt_chain.loop.step import make_step
from bayesopt_chain.optimizers import sgd
from bayesopt_chain.samplers.langevin import baoab
from bayesopt_chain.schedules import polynomial

STEP, MOMENTUM = 0.9, 0.95  # h sqrt(k), and exp(-friction h)
RAMP, RENEWALS = 0.05, (0.06, 0.2)  # of the steps: in which T rises; at which k is taken anew
LEAST, DRAWS = 200, 16  # steps behind the rise; draws of each chain
DEAREST = 10  # steps of training that a pass may cost
# standard errors; the two networks of a fold gain more by draws than the four that predict in the end
SURE = 2.0
AGREE = 1.1  # R-hat of predictions up to which chains are said to have one posterior
MOST = 2**26  # numbers of outputs of all draws on the folds
PRODUCTS = 12  # with the Hessian, at most, for k
FAR = 1e4  # a rate beside which the rounding of the parameters is nothing


class Chains:
    """BAOAB for all members at once, on all data that each of them sees.

    Args:
        problem: the networks and the data.
        followed: of :meth:`bayesopt_chain.ensemble.training.Training.followed`: the networks' ``buffers``, which stay as they
            are, and the ``precision`` of the prior ``[P]`` and v0 ``[M, *event]`` ``without`` and ``with`` the folds.
        held_out: whether each member leaves its fold out.
    """

    def __init__(self, problem: Problem, followed: dict[str, Any], held_out: bool) -> None:
        least = min(problem.seen(held_out))
        self.problem, self.buffers = replace(problem, batch_size=least), followed["buffers"]
        self.decay, self.temperature = (followed["precision"] / least).expand_as(problem.theta), 1 / least
        self.batch = self.problem.batches(held_out, 5, followed["without" if held_out else "with"], self.decay)

    def stepper(self, tx: Any, theta: Tensor, seed: int) -> Any:
        """The step of all chains, ``(params, state, t) -> (params, state)``, and its first params and state."""

        def loss(params: Any, batch: Any) -> Tensor:
            (*batch, size), buffers = batch
            return self.problem.energy(params["theta"], (*batch, torch.ones_like(size)), buffers, still=True)[0]

        chains = parallel(make_step(loss, tx), self.problem.count, batch_dim=0, loop=self.problem.members.loop)

        def step(params: Any, state: Any, t: int) -> Any:
            return chains(params, state, (self.batch(t), self.buffers))[:2]

        return step, {"theta": theta}, chains.init(tx, {"theta": theta}, seed=seed)

    def curvature(self, theta: Tensor) -> float:
        """The largest eigenvalue of any member's Hessian, by Lanczos' method on differences of gradients."""
        step, _, state = self.stepper(sgd(FAR), theta, 0)

        def gradient(at: Tensor) -> Tensor:
            return (at - step({"theta": at}, state, 0)[0]["theta"]) / FAR

        here, by = gradient(theta), 1e-3 * float(theta.norm()) + 1e-6

        def product(v: Tensor) -> Tensor:
            return ((gradient(theta + by * v.reshape(theta.shape)) - here) / by).flatten()

        found = lanczos(product, theta.flatten(), 1, tolerance=0.02, max_products=PRODUCTS)[0]
        return max(float(found[0]), float(self.decay.min()), 1e-12)

    def run(self, theta: Tensor, steps: int, seed: int, advance: Any = lambda: None) -> Tensor:
        """Draws ``[D, M, P]`` of the last half of so many steps from theta ``[M, P]``, the last where they end."""
        every = max(1, steps // (2 * DRAWS))
        kept, draws = {steps - every * i for i in range(DRAWS)}, []
        cuts = [0, *(round(share * steps) for share in RENEWALS), steps]
        for i, (start, stop) in enumerate(itertools.pairwise(cuts)):
            if not bool(theta.isfinite().all()):
                return theta[None]
            k, temperature = self.curvature(theta), self.temperature
            if i == 0:
                k = max(k, self.curvature(self.problem.theta))
                temperature = polynomial(0.0, max(1, round(RAMP * steps)), temperature)
            h = STEP / k**0.5
            tx = baoab(h, -math.log(MOMENTUM) / h, temperature=temperature)
            step, params, state = self.stepper(tx, theta, 3 * seed + i)
            for t in range(start, stop):
                params, state = step(params, state, t)
                advance()
                if t + 1 in kept:
                    draws.append(params["theta"])
            theta = params["theta"]
        return torch.stack(draws)


def chained(training: Training, seconds: float, each: float) -> dict[str, Any]:
    """Run chains for so many seconds, and say whether they paid.

    Args:
        training: of the members, which is done.
        seconds: the budget.
        each: seconds of one step of training.

    Returns:
        ``said``; where there were chains ``passes``; where they paid ``draws`` ``[D, M, P]``, ``buffers``, ``outputs``, of each
        member on its fold ``[D, n, *event]``, ``v0``, whether the chains ``agree``, and what members score ``alone``.
    """
    began, problem, stages = time.perf_counter(), training.problem, training.stages
    stages.begin("chains", 1)
    done, ends = training.done, training.followed()
    folds = problem.folds_of(done.pilots, done.kept)
    numbers = DRAWS * sum(x.numel() for x in done.pilots)
    if numbers > MOST:
        return {"said": f"{DRAWS} draws of the outputs on the folds are {numbers} numbers, and at most {MOST} are held"}
    chains = Chains(problem, ends, True)
    plan = stages.once("chains planned", lambda: _planned(chains, ends["theta"], seconds, each, began))
    if "said" in plan:
        return plan
    steps = plan["steps"]
    stages.begin("chains", 2 * steps)
    draws = chains.run(ends["theta"], steps, 2 * problem.seed + 1, stages.advance)
    outputs = [torch.stack(x) for x in zip(*(problem.held_out(theta, ends["buffers"]) for theta in draws))]
    found: dict[str, Any] = {"passes": float(steps), "said": f"they diverged within {steps} steps"}
    if not all(bool(x.isfinite().all()) for x in outputs):
        return found
    alone, score = (held.log_scores(problem.likelihood, given) for given in (folds, held.joined(folds, outputs)))
    z, agreed = held.z_of(score - alone), r_hat(folds, outputs)
    found["said"] = (
        f"{steps} steps, held-out log score {score.mean():.3f} with draws beside {alone.mean():.3f} without ({z:.1f} standard "
        f"errors), R-hat of predictions {agreed:.2f}"
    )
    if z > SURE:
        after, spent = Chains(problem, ends, False), time.perf_counter() - began
        left = max(round(LEAST / (1 - RAMP)), min(steps, int((seconds - spent) / spent * steps)))
        more = stages.once("chains with all data", lambda: {"steps": left})["steps"]
        draws = after.run(draws[-1], more, 2 * problem.seed + 2, stages.advance)
        found["passes"] += more
        if not bool(draws.isfinite().all()):
            return {**found, "said": found["said"] + ", but they diverged with all data"}
        found |= {
            "draws": draws,
            "buffers": {k: x.expand(len(draws), *x.shape) for k, x in ends["buffers"].items()},
            "outputs": outputs,
            "v0": float(ends["with"].mean()),
            "agree": agreed <= AGREE,
            "alone": {"networks alone": float(alone.mean())},
        }
    return found


def _planned(chains: Chains, theta: Tensor, seconds: float, each: float, began: float) -> dict[str, Any]:
    """The steps that fit into half of the seconds, or why there are none."""
    step, params, state = chains.stepper(baoab(1e-6, 1.0, temperature=1e-6), theta, 0)
    one = timed(lambda i: step(params, state, i), 1)
    if one <= DEAREST * each and seconds > LEAST * one:  # else there are no chains in any case
        one = timed(lambda i: step(params, state, i), TIMED)
    if one > DEAREST * each:
        return {"said": f"a pass over the data costs {one / each:.0f} steps of training, and at most {DEAREST} pay"}
    curvatures = (2 + len(RENEWALS)) * (PRODUCTS + 1)
    steps = int((seconds - (time.perf_counter() - began)) / one / 2) - curvatures
    if (1 - RAMP) * steps < LEAST:
        needed = 2 * one * (curvatures + LEAST / (1 - RAMP))
        return {"said": f"{seconds:.3g} s hold fewer than {LEAST} steps, which take about {needed:.2g} s"}
    return {"steps": steps}


def r_hat(folds: list[held.Fold], outputs: list[Tensor]) -> float:
    """The median over held-out predictions of the rank-normalised split R-hat, largest of the folds."""
    return max(
        float(split_r_hat(torch.stack([outputs[m].double() for m in fold.who], 1).flatten(2))[0].median())
        for fold in folds
    )
