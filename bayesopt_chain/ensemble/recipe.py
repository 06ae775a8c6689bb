r"""The recipe: one training of all members, two priors that held-out data compare, and the noise to predict with.

Each member leaves out one of two folds for ``steps`` steps, and goes on with all data for 0.3 of them at 0.3 of the rate:

    Adam at  lr (1 + cos(pi t / steps)) / 2 + lr / 1000

Members whose prior changes in between go on at the full rate, since they have further to go.
Half of the members have the usual prior, precision 1 and, of Gaussian targets, training noise of 0.02 of their variance. The
other half have a prior whose precision is the fan-in of each weight, and training noise v0 = 0.3 of the held-out noise, which
is renewed four times. Members that leave out one fold take it from those that leave out the other, so that no fold chooses the
noise that it scores. Held-out noise itself contains what the network does not know yet, and would smooth too much: 0.3 is the
share that is noise for N of some hundreds. At the end the halves are compared on the same folds, by the paired difference of
their log scores in standard errors: the better prior is taken by all members, or, within one standard error, each keeps its
own. Classes have the usual prior alone.

Where ``steps`` come from a budget of seconds, the pace is measured anew at every twentieth of them, and as many steps follow as
then fit: the cosine ends where the seconds do, also on a machine that becomes slower or faster meanwhile.
"""

from __future__ import annotations

import itertools
import math
import time
import timeit
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import batches
from bayesopt_chain.ensemble import held
from bayesopt_chain.ensemble.stages import Stages
from bayesopt_chain.ensemble.training import (
    Problem,
    Tensors,
    held_out_outputs,
    outputs_of,
    program,
)

RATES = (1e-2, 3e-3, 1e-3)
WITHIN, TRIAL = 0.05, 0.05  # of the best descent; of the steps
NOISE, FIRST, SHARE = 0.02, 0.1, 0.3  # usual noise and first noise, of the targets' variance; v0 of the held-out noise
RENEWALS = (0.2, 0.4, 0.6, 0.8)  # of the steps
MORE, RATE = 0.3, 0.3  # steps with all data, and their rate
KEPT = 20  # times that a training under way is written to disk, and that its pace is measured
FEWEST = 20  # steps that a budget comes to
TIMED = 20  # steps that are timed
PRIORS = USUAL, FAN_IN = "usual prior", "fan-in prior"


class Trained(NamedTuple):
    """What training came to, or has come to when its outputs were last looked at and finite.

    Attributes:
        theta, buffers: of all members, ``[M, *]``.
        pilots: outputs of each member on the fold that it left out, before it was trained on all data; none before the first
            look.
        priors: of each member at first.
        now: those in force.
        noise: of training, ``[M, *event]``, in units of the targets' variance.
        steps: of training, and with all data.
        z: by how many standard errors the fan-in prior was better; ``None`` where there was nothing to compare.
        scores: mean held-out log score of the pilots of each prior, on the folds that both left out.
        ends: theta and buffers before any member saw all data; nothing before.
    """

    theta: Tensor
    buffers: Tensors
    pilots: list[Tensor]
    priors: list[str]
    now: list[str]
    noise: Tensor
    steps: tuple[int, int]
    z: float | None
    scores: dict[str, float]
    ends: dict[str, Any]

    @property
    def kept(self) -> list[int]:
        """The members whose prior was taken."""
        return [m for m, prior in enumerate(self.priors) if prior in self.now]


def rate_at(step: int, lr: float, first: int, second: int, again: Any = RATE) -> Any:
    """The rate of a step: a cosine over ``first`` steps from lr, then one over ``second`` more from ``again`` of it.

    Example:
        >>> from bayesopt_chain.ensemble.recipe import rate_at
        >>> [round(rate_at(t, 1.0, 10, 4), 3) for t in (0, 5, 10, 12)]
        [1.001, 0.501, 0.301, 0.151]
    """
    size, at = (1.0, step / first) if step < first else (again, (step - first) / second)
    return lr * (size * (1 + math.cos(math.pi * min(at, 1.0))) / 2 + 1e-3)


def refitted(t: int, steps: int, fit: float, most: float = math.inf) -> tuple[int, int]:
    """Steps, and those with all data, where before step ``t`` of ``steps`` so many fit into what is left of the seconds.

    Example:
        >>> from bayesopt_chain.ensemble.recipe import refitted
        >>> [refitted(50, 100, fit) for fit in (80, 210, 20, 0)], refitted(110, 100, 5)
        ([(100, 30), (200, 60), (54, 16), (51, 1)], (100, 15))
    """
    if t < steps:
        steps = int(min(most, max(FEWEST, t + 1, round((t + fit) / (1 + MORE)))))
    return steps, min(max(1, round(MORE * steps)), max(steps + 1, t + 1, round(t + fit)) - steps)


def timed(step: Callable[[int], Any], count: int) -> float:
    """Seconds of one of so many steps, measured behind two others."""
    steps = map(step, itertools.count())
    timer = timeit.Timer(lambda: next(steps), timer=time.perf_counter)
    timer.timeit(2)
    return timer.timeit(count) / count


def alike(tree: Any) -> Any:
    """The first member's part of a tree ``[m, *]``, for all members."""
    return optree.tree_map(lambda x: x[:1].expand_as(x).contiguous(), tree, namespace=batches.NAMESPACE)


class Training:
    """The one training, from its starts to all data; it goes on from where ``stages`` has it.

    Args:
        problem: the networks and the data.
        stages: where it is written and shown.
        event: the shape of one datum's outputs.
        prior: a precision for all weights, or ``None`` for the recipe.

    Attributes:
        done: what it has come to.

    Raises:
        RuntimeError: ``vmap`` refuses the network, its gradient or its predictions.
    """

    def __init__(self, problem: Problem, stages: Stages, event: Any, prior: float | None) -> None:
        self.problem, self.stages = problem, stages
        theta, count = problem.theta, problem.count
        priors = [USUAL] * count
        if prior is None and not problem.likelihood.has_classes:
            priors = [FAN_IN] if count == 1 else [PRIORS[m % 2] for m in range(count)]
        usual = torch.full_like(theta[0], 1.0 if prior is None else prior)
        self.precision_of = {USUAL: usual, FAN_IN: problem.fan_in() if prior is None else usual}
        c = torch.tensor([NOISE if p == USUAL else FIRST for p in priors], dtype=torch.float64, device="cpu")
        noise = c.reshape(count, *[1] * len(event)).expand(count, *event).clone()
        self.done = Trained(theta, problem.members.buffers, [], priors, priors, noise, (0, 0), None, {}, {})
        self.state: Any = problem.start()
        self.prepare()
        self.run = problem.step
        if not problem.members.loop:
            self.run = program(problem.step, self.state, self.batch(0), self.rates(1e-3))
        members = problem.members
        outputs_of(members, members.params, members.buffers, problem.data.inputs_of(1))

    def prepare(self) -> None:
        """Set what steps take by the priors, the noise and the data of now, and with which part of the rate members go on."""
        problem, done, held_out = self.problem, self.done, not self.done.ends
        decay = [self.precision_of[done.now[m]] / n for m, n in zip(problem.mine, problem.seen(held_out))]
        self.batch = problem.batches(held_out, 1 if held_out else 3, done.noise, torch.stack(decay))
        heights = [RATE if done.priors[m] == done.now[m] else 1.0 for m in problem.mine]
        self.again = torch.tensor(heights, dtype=torch.float64, device="cpu")

    def rates(self, lr: Any) -> Tensor:
        """The rates of this rank's members, ``[m]``, from one for all or one for each."""
        theta = self.state.theta
        return torch.as_tensor(lr, dtype=theta.dtype, device=theta.device).expand(len(theta)).clone()

    def seconds(self) -> float:
        """Of one step, measured."""
        rates = self.rates(1e-3)
        return timed(lambda i: self.run(self.state, self.batch(i), rates), TIMED)

    def seconds_of_scores(self) -> float:
        """What scoring the members in the end will take, by one score of where they start."""
        problem, likelihood = self.problem, self.problem.likelihood
        folds = held.folds_of(problem, held_out_outputs(problem, problem.theta, problem.members.buffers))
        grid, factor = (held.SCALES, 2.0) if likelihood.has_width else (held.NOISES, 1.0)
        tables = 1 if likelihood.has_classes else 4  # of the members, of those of each prior, and of a constant
        return tables * len(grid) * timed(lambda _: held.score(likelihood, folds, factor), 1)

    def rate(self, steps: int) -> dict[str, Any]:
        """The largest of three rates whose descent is within 5 % of the best, each tried on one network."""
        count, tried = len(self.problem.mine), max(10, round(TRIAL * steps))
        # as many at a time as this rank has members, so that one program serves
        padded = torch.tensor([*RATES, *RATES[-1:] * (-len(RATES) % count)], dtype=torch.float64, device="cpu")
        traces: list[Tensor] = []
        self.stages.begin("rate", len(padded) // count * tried)
        for rates in padded.split(count):
            state, losses = self.state._replace(theta=alike(self.state.theta)), []
            for i in range(tried):
                state, loss = self.run(state, alike(self.batch(i)), self.rates(rates))
                losses.append(loss)
                self.stages.advance()
            traces.append(torch.stack(losses))
        trace = torch.cat(traces, 1)[:, : len(RATES)].double().cpu()
        first, last = trace[0].mean(), trace[-max(1, tried // 3) :].mean(0).nan_to_num(math.inf, math.inf, math.inf)
        if not bool(last.isfinite().any()):
            raise ValueError(
                f"posterior_ensemble: training diverges at every rate of {RATES}: standardise the data, or pass lr="
            )
        close = last <= last.min() + WITHIN * (first - last.min()).abs()
        found = next(lr for lr, good in zip(RATES, close.tolist()) if good)
        gradients = len(RATES) * tried / self.problem.count
        return {"lr": found, "passes": gradients * self.problem.batch_size / self.problem.data.size}

    def train(self, lr: float, steps: int, until: float | None = None, most: float = math.inf) -> Trained:
        """All of it.

        Args:
            lr: the rate.
            steps: as many, before those with all data.
            until: when it has to end, by the clock of ``time.perf_counter``; as many steps as fit. Default: no end.
            most: the steps that may become of ``steps`` then.
        """
        stages, start = self.stages, 0
        self.done = self.done._replace(steps=(steps, max(1, round(MORE * steps))))
        if half := stages.read("training under way"):
            start, until = half["step"], until and time.perf_counter() + half["left"]
            self.done = Trained(**half["done"])
            self.state = optree.tree_structure(self.state).unflatten(self.problem.own(half["leaves"]))
            self.prepare()
        stages.begin("training", sum(self.done.steps), start)
        t, looked = start, (start, time.perf_counter())
        renewals, marks = self.marks()
        while t < sum(self.done.steps):
            if t in marks:
                (before, then), looked = looked, (t, time.perf_counter())
                if until is not None and t > before:
                    fit = max(0.0, until - looked[1]) / max(looked[1] - then, 1e-9) * (t - before)
                    self.done = self.done._replace(steps=stages.of_first(refitted, t, self.done.steps[0], fit, most))
                    stages.total, (renewals, marks) = sum(self.done.steps), self.marks()
                if stages.path is not None:
                    at = {
                        "leaves": stages.gathered(optree.tree_leaves(self.state)),
                        "step": t,
                        "left": (until or 0.0) - looked[1],
                        "done": self.done._asdict(),
                    }
                    stages.write("training under way", at)
            steps, more = self.done.steps
            if t in renewals:
                self.look()
                self.cross(self.done.noise, [m for m, p in enumerate(self.done.now) if p == FAN_IN])
                self.prepare()
            if t == steps and not self.done.ends:
                self.look()
                self.choose()
                self.prepare()
            rates = self.rates(rate_at(t, lr, steps, more, self.again))
            self.state, _ = self.run(self.state, self.batch(t if t < steps else t - steps), rates)
            stages.advance()
            t += 1
        theta, buffers = self.everyones()
        _require_finite([theta], "training on all data")
        return self.done._replace(theta=theta, buffers=buffers)

    def marks(self) -> tuple[set[int], set[int]]:
        """The steps before which noise is renewed, and before which training is written and its pace measured."""
        steps, more = self.done.steps
        return {round(share * steps) for share in RENEWALS}, {round(i * (steps + more) / KEPT) for i in range(1, KEPT)}

    def look(self) -> None:
        """Look at the outputs of each member on the fold that it left out."""
        theta, buffers = self.everyones()
        outputs = held_out_outputs(self.problem, theta, buffers)
        _require_finite(outputs, "training")
        self.done = self.done._replace(theta=theta, buffers=buffers, pilots=outputs)

    def everyones(self) -> tuple[Tensor, Tensors]:
        """Parameters and buffers of all members, ``[M, *]``."""
        return self.stages.gathered((self.state.theta, self.state.buffers))

    def followed(self) -> dict[str, Any]:
        """What chains start with: the members before they saw their folds, the prior, and v0 without and with all data."""
        noise = torch.full_like(self.done.noise, NOISE)
        self.cross(noise)
        whole = self.v0(held.folds_of(self.problem, self.done.pilots)).expand_as(noise)
        return {**self.done.ends, "without": noise, "with": whole, "precision": self.precision_of[FAN_IN]}

    def v0(self, folds: list[held.Fold]) -> Tensor:
        """The noise to train with, of the members that left these folds out; of targets without noise it is not used."""
        if not self.problem.likelihood.has_noise_scale:
            return torch.full_like(self.done.noise[0], NOISE)
        return SHARE * self.stages.of_first(held.noise_of, self.problem, folds).cpu()

    def cross(self, noise: Tensor, who: list[int] | None = None) -> None:
        """Set the noise v0 of members (default: of all) that leave out one fold by the others'."""
        folds = held.folds_of(self.problem, self.done.pilots, who)
        for fold in folds:
            noise[fold.who] = self.v0([f for f in folds if f is not fold] or [fold])

    def choose(self) -> None:
        """Set the priors to go on with, the z of their comparison, and the noise."""
        problem, done, z, now, means = self.problem, self.done, None, self.done.priors, dict[str, float]()
        usual, fan_in = (
            held.folds_of(problem, done.pilots, [m for m, own in enumerate(done.priors) if own == prior])
            for prior in PRIORS
        )
        if usual and fan_in:
            shared = {f.rows for f in usual} & {f.rows for f in fan_in}
            scores = [held.log_scores(problem, [f for f in each if f.rows in shared]) for each in (usual, fan_in)]
            means = {f"pilots, {prior}": float(score.mean()) for prior, score in zip(PRIORS, scores)}
            z = self.stages.of_first(held.z_of, scores[1] - scores[0])
            if abs(z) >= 1:
                now = [FAN_IN if z > 0 else USUAL] * problem.count
        if fan_in:
            v0 = self.v0(fan_in)
            for m, prior in enumerate(now):
                done.noise[m] = v0 if prior == FAN_IN else NOISE
        ends = {"theta": done.theta, "buffers": done.buffers}
        self.done = done._replace(now=now, z=z, scores=means, ends=ends)


def _require_finite(tensors: list[Tensor], stage: str) -> None:
    if not all(bool(x.isfinite().all()) for x in tensors):
        raise ValueError(
            f"posterior_ensemble: {stage} diverged: pass a smaller lr=, look for outliers in the inputs, or compute in float32 "
            "what is float16"
        )
