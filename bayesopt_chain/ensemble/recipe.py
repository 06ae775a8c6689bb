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

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain.ensemble import held
from bayesopt_chain.ensemble.report import Progress
from bayesopt_chain.ensemble.stages import Stages
from bayesopt_chain.ensemble.training import (
    Order,
    Problem,
    Tensors,
    constants,
    forget,
    held_out_outputs,
    outputs_of,
    program,
    started,
)
from bayesopt_chain.loop.module_state import buffers_of
from bayesopt_chain.optimizers.functional import adam

RATES = (1e-2, 3e-3, 1e-3)
WITHIN, TRIAL = 0.05, 0.05  # of the best descent; of the steps
NOISE, FIRST, SHARE = 0.02, 0.1, 0.3  # usual noise and first noise, of the targets' variance; v0 of the held-out noise
RENEWALS = (0.2, 0.4, 0.6, 0.8)  # of the steps
MORE, RATE = 0.3, 0.3  # steps with all data, and their rate
KEPT = 20  # times that a training under way is written to disk, and that its pace is measured
FEWEST = 20  # steps that a budget comes to
TIMED = 20  # steps that are timed
UNDER_WAY = ("now", "pilots", "kept", "noise", "steps", "z", "ends")  # what is written besides steps and tensors
PRIORS = USUAL, FAN_IN = "usual prior", "fan-in prior"


class Trained(NamedTuple):
    """What training came to.

    Attributes:
        theta, buffers: of all members, ``[M, *]``.
        pilots: outputs of each member on the fold that it left out, before it was trained on all data.
        priors: of each member at first.
        kept: the members whose prior was taken.
        noise: of training at the end, ``[M, *event]``, in units of the targets' variance.
        steps: of training, and with all data.
        z: by how many standard errors the fan-in prior was better; ``None`` where there was nothing to compare.
        ends: theta and buffers before any member saw all data; nothing before.
    """

    theta: Tensor
    buffers: Tensors
    pilots: list[Tensor]
    priors: list[str]
    kept: list[int]
    noise: Tensor
    steps: tuple[int, int]
    z: float | None
    ends: dict[str, Any]


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
    start = 0.0
    for i in range(count + 2):
        if i == 2:
            start = time.perf_counter()
        step(i)
    return (time.perf_counter() - start) / count


class Training:
    """The one training, from its starts to all data; it goes on from where ``stages`` has it.

    Args:
        problem: the networks and the data.
        stages, progress: where it is written, and shown.
        event: the shape of one datum's outputs.
        prior: a precision for all weights, or ``None`` for the recipe.

    Attributes:
        last: what training came to when its outputs were last looked at and finite; ``None`` before.
        now: the priors in force.
        pilots, kept, noise, steps, z, ends: as in :class:`Trained`, so far.

    Raises:
        RuntimeError: ``vmap`` refuses the network, its gradient or its predictions.
    """

    def __init__(self, problem: Problem, stages: Stages, progress: Progress, event: Any, prior: float | None) -> None:
        self.problem, self.stages, self.progress = problem, stages, progress
        theta, count = problem.theta, problem.count
        self.priors = [USUAL] * count
        if prior is None and not problem.likelihood.has_classes:
            self.priors = [FAN_IN] if count == 1 else [PRIORS[m % 2] for m in range(count)]
        usual = torch.full_like(theta[0], 1.0 if prior is None else prior)
        self.precision_of = {USUAL: usual, FAN_IN: problem.fan_in() if prior is None else usual}
        c = torch.tensor([NOISE if p == USUAL else FIRST for p in self.priors], dtype=torch.float64, device="cpu")
        self.noise = c.reshape(count, *[1] * len(event)).expand(count, *event).clone()
        self.now, self.kept, self.steps, self.z = self.priors, list(range(count)), (0, 0), None
        self.pilots, self.ends, self.last = list[Tensor](), dict[str, Any](), None
        buffers = stages.own(problem.members.buffers)
        own = stages.own(theta)
        self.params = {"theta": own}
        self.chains = problem.stepper(adam, buffers, each=self.each(1e-3))
        self.state = started(self.chains, adam, own, buffers, 7919 * problem.seed + 2)
        self.prepare()
        self.run = program(self.chains, self.params, self.state, self.batch(0))
        members = problem.members
        outputs_of(members.still, members.params, members.buffers, problem.data.inputs_of(1), problem.loop)

    def prepare(self) -> None:
        """Set what steps take by the priors, the noise and the data of now, and with which part of the rate members go on."""
        self.order = Order(self.problem, not self.pilots, 3 if self.pilots else 1)
        n = self.problem.data.size - (0 if self.pilots else len(self.problem.folds[0]))
        decay = torch.stack([self.precision_of[p] for p in self.now]) / n
        self.fixed = constants(self.problem, self.noise, decay)
        heights = [RATE if self.priors[m] == self.now[m] else 1.0 for m in self.problem.mine]
        self.again = torch.tensor(heights, dtype=torch.float64, device="cpu")

    def batch(self, step: int) -> Any:
        """What a step takes: data, and noise, decay and scale of this rank's members."""
        return *self.order.batch(step), *self.fixed

    def each(self, lr: Any) -> dict[str, Tensor]:
        """The rate of this rank's members, one for all or one for each."""
        theta: Any = self.params["theta"]
        return {"lr": torch.as_tensor(lr, dtype=theta.dtype, device=theta.device).expand(len(theta)).clone()}

    def seconds(self) -> float:
        """Of one step, measured."""
        each = self.each(1e-3)
        return timed(lambda i: self.run(self.params, self.state, self.batch(i), each), TIMED)

    def rate(self, steps: int) -> dict[str, Any]:
        """The largest of three rates whose descent is within 5 % of the best, each tried on one network."""
        count, tried = len(self.problem.mine), max(10, round(TRIAL * steps))
        traces: list[Tensor] = []
        self.progress.stage("rate", -(-len(RATES) // count) * tried)
        for at in range(0, len(RATES), count):
            rates = torch.tensor(
                [*RATES[at : at + count], *[RATES[-1]] * count][:count], dtype=torch.float64, device="cpu"
            )
            params, state, losses, each = self.of_first(self.params), self.state, [], self.each(rates)
            for i in range(tried):
                params, state, loss = self.run(params, state, self.of_first(self.batch(i)), each)
                losses.append(loss)
                self.progress()
            traces.append(torch.stack(losses)[:, : len(RATES) - at])
        trace = torch.cat(traces, 1).double().cpu()
        first, last = trace[0].mean(), trace[-max(1, tried // 3) :].mean(0).nan_to_num(math.inf, math.inf, math.inf)
        if not bool(last.isfinite().any()):
            raise ValueError(
                f"posterior_ensemble: training diverges at every rate of {RATES}: standardise the data, or pass lr="
            )
        close = last <= last.min() + WITHIN * (first - last.min()).abs()
        found = next(lr for lr, good in zip(RATES, close.tolist()) if good)
        share = len(RATES) / self.problem.count
        return {"lr": found, "passes": share * tried * self.order.size / self.problem.data.size}

    def of_first(self, tree: Any) -> Any:
        """The first member's, for all members."""
        return optree.tree_map(lambda x: x[:1].expand_as(x).contiguous(), tree, namespace="bayesopt_chain.batch")

    def train(self, lr: float, steps: int, until: float | None = None, most: float = math.inf) -> Trained:
        """All of it.

        Args:
            lr: the rate.
            steps: as many, before those with all data.
            until: when it has to end, by the clock of ``time.perf_counter``; as many steps as fit. Default: no end.
            most: the steps that may become of ``steps`` then.
        """
        stages, start = self.stages, 0
        self.steps = steps, max(1, round(MORE * steps))
        both: Any = (self.params, self.state)
        spec = optree.tree_structure(both)
        if half := stages.read("training under way"):
            start, until = half["step"], until and time.perf_counter() + half["left"]
            self.now, self.pilots, self.kept, self.noise, self.steps, self.z, self.ends = (half[k] for k in UNDER_WAY)
            self.params, self.state = spec.unflatten(stages.own(half["leaves"]))
            self.prepare()
        self.progress.stage("training", sum(self.steps))
        self.progress(start)
        t, looked = start, (start, time.perf_counter())
        renewals, marks = self.marks()
        while t < sum(self.steps):
            steps, more = self.steps
            new = not half or t > start
            if new and t in renewals:
                self.cross(self.look(), [m for m, p in enumerate(self.now) if p == FAN_IN])
                self.prepare()
            if t == steps and not self.pilots:
                self.choose(self.look())
                self.prepare()
            if new and t in marks:
                (before, then), looked = looked, (t, time.perf_counter())
                if until is not None:
                    fit = max(0.0, until - looked[1]) / max(looked[1] - then, 1e-9) * (t - before)
                    self.steps = steps, more = stages.firsts(refitted(t, steps, fit, most))
                    self.progress.total, (renewals, marks) = steps + more, self.marks()
                if stages.path is not None:
                    both = (self.params, self.state)
                    at = {
                        "leaves": stages.gathered(optree.tree_leaves(both)),
                        "step": t,
                        "left": (until or 0.0) - looked[1],
                    }
                    stages.write("training under way", at | {k: getattr(self, k) for k in UNDER_WAY})
            each = self.each(rate_at(t, lr, steps, more, self.again))
            batch = self.batch(t if t < steps else t - steps)
            self.params, self.state, _ = self.run(self.params, self.state, batch, each)
            self.progress()
            t += 1
        theta, buffers = self.everyones()
        _require_finite([theta], "training on all data")
        return self.reached(theta, buffers, self.pilots)

    def marks(self) -> tuple[set[int], set[int]]:
        """The steps before which noise is renewed, and before which training is written and its pace measured."""
        return {round(share * self.steps[0]) for share in RENEWALS}, {
            round(i * sum(self.steps) / KEPT) for i in range(1, KEPT)
        }

    def reached(self, theta: Tensor, buffers: Tensors, pilots: list[Tensor]) -> Trained:
        """What training came to."""
        forget(self.problem.members.training.module)
        noise = self.noise.clone()
        return Trained(theta, buffers, pilots, self.priors, self.kept, noise, self.steps, self.z, self.ends)

    def look(self) -> list[Tensor]:
        """Outputs of each member on the fold that it left out; what is trained so far is kept as ``last``."""
        theta, buffers = self.everyones()
        outputs = held_out_outputs(self.problem, theta, buffers)
        _require_finite(outputs, "training")
        self.last = self.reached(theta, buffers, outputs)
        return outputs

    def everyones(self) -> tuple[Tensor, Tensors]:
        """Parameters and buffers of all members, ``[M, *]``."""
        own = buffers_of(self.state) or self.stages.own(self.problem.members.buffers)
        every: Any = self.stages.gathered((self.params["theta"], own))
        return every

    def followed(self, done: Trained) -> dict[str, Any]:
        """What chains start with: the members before they saw their folds, the prior, and v0 without and with all data."""
        self.noise = torch.full_like(done.noise, NOISE)
        self.cross(done.pilots)
        folds = held.folds_of(self.problem, done.pilots)
        whole = (
            SHARE * held.noise_of(self.problem, folds).cpu()
            if self.problem.likelihood.has_noise_scale
            else self.noise[0]
        )
        after = {"without": self.noise, "with": whole.expand_as(self.noise)}
        return {**done.ends, **after, "precision": self.precision_of[FAN_IN]}

    def cross(self, outputs: list[Tensor], who: list[int] | None = None) -> None:
        """Set the noise v0 of members (default: of all) that leave out one fold by the others'."""
        folds = held.folds_of(self.problem, outputs, who) if self.problem.likelihood.has_noise_scale else []
        for fold in folds:
            others = [f for f in folds if f is not fold] or [fold]
            self.noise[fold.who] = SHARE * self.stages.firsts(held.noise_of(self.problem, others)).cpu()

    def choose(self, pilots: list[Tensor]) -> None:
        """Set the priors to go on with, the members that speak for them, the z of the comparison, and the noise."""
        problem, every, last = self.problem, range(self.problem.count), self.last
        assert last is not None
        self.pilots, self.ends = pilots, {"theta": last.theta, "buffers": last.buffers}
        if FAN_IN in self.priors:
            who = {p: [m for m in every if self.priors[m] == p] for p in PRIORS}
            folds = {p: held.folds_of(problem, pilots, who[p]) for p in PRIORS if who[p]}
            if len(folds) == 2:
                shared = {int(f.rows[0]) for f in folds[USUAL]} & {int(f.rows[0]) for f in folds[FAN_IN]}
                scores = [held.scored(problem, [f for f in folds[p] if int(f.rows[0]) in shared]).logs for p in PRIORS]
                z = self.z = self.stages.firsts(held.z_of(scores[1] - scores[0]))
                if abs(z) >= 1:
                    self.now = [FAN_IN if z > 0 else USUAL] * problem.count
            if problem.likelihood.has_noise_scale:
                v0 = SHARE * self.stages.firsts(held.noise_of(problem, folds[FAN_IN])).cpu()
                for m, prior in enumerate(self.now):
                    self.noise[m] = v0 if prior == FAN_IN else NOISE
        self.kept = [m for m in every if self.priors[m] in self.now]
        self.last = self.reached(last.theta, last.buffers, pilots)


def _require_finite(tensors: list[Tensor], stage: str) -> None:
    if not all(bool(x.isfinite().all()) for x in tensors):
        raise ValueError(
            f"posterior_ensemble: {stage} diverged: pass a smaller lr=, look for outliers in the inputs, or compute in float32 "
            "what is float16"
        )
