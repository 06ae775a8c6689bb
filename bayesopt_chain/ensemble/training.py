r"""Training of all members at once: the energy, the step and the batches, and the recipe by which they are taken.

The parameters of member m are one row ``theta_m`` of a tensor ``[M, P]``. With n data that it sees, a prior of precision
``lambda`` of each parameter, and Gaussian noise of variance ``v`` (of other likelihoods without v), a step follows the gradient
of the energy per datum

    U_m(theta) = 1/b sum_i -log p(y_i | f(theta, x_i), v_m) + 1/2n sum_p lambda_mp theta_p^2

times ``s_m``, the mean of v in units of the targets' variance: Adam's steps then do not depend on v when it changes. Precision,
noise and s are part of each batch, so that one program serves all of the training.

The gradient of all members is one call under ``vmap``, and one update of TorchOpt's Adam moves them: where nothing is sampled
no noise has to be matched. Both are traced once into a program of tensor operations, which saves three quarters of their time
for small networks. Where tracing fails, or the program does not repeat the step, the step itself runs.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn
from torchopt.transform import scale_by_adam

from bayesopt_chain import batches
from bayesopt_chain._torch import traced
from bayesopt_chain.data.epochs import epochs
from bayesopt_chain.ensemble import held
from bayesopt_chain.ensemble.data import Data
from bayesopt_chain.ensemble.members import Members, mapped
from bayesopt_chain.ensemble.stages import Stages
from bayesopt_chain.likelihoods import Likelihood
from bayesopt_chain.links.gaussian_prior import fan_in
from bayesopt_chain.loop.loss import gradient
from bayesopt_chain.loop.model_draws import model_draws
from bayesopt_chain.modules import Tensors
from bayesopt_chain.random.stream import chain_seed, new_key

CLOSE = 1e-3  # relative difference of a program from the step that it records
ADAM = scale_by_adam()
RATES = (1e-2, 3e-3, 1e-3)
WITHIN, TRIAL = 0.05, 0.05  # of the best descent; of the steps
NOISE, FIRST, SHARE = 0.02, 0.1, 0.3  # usual noise and first noise, of the targets' variance; v0 of the held-out noise
RENEWALS = (0.2, 0.4, 0.6, 0.8)  # of the steps
MORE, RATE = 0.3, 0.3  # steps with all data, and their rate
KEPT = 20  # times that a training under way is written to disk, and that its pace is measured
FEWEST = 20  # steps that a budget comes to
TIMED = 20  # steps that are timed
PRIORS = USUAL, FAN_IN = "usual prior", "fan-in prior"


class State(NamedTuple):
    """What a step of training moves, of the members of this rank.

    Attributes:
        theta: parameters, ``[m, P]``.
        buffers: by name, ``[m, *]``.
        keys: of what the networks draw, such as dropout, ``[m]``.
        adam: the moments, and how many steps were taken.
    """

    theta: Tensor
    buffers: Tensors
    keys: Tensor
    adam: Any


@dataclass(frozen=True)
class Problem:
    """What is trained: networks, data and the likelihood of training.

    Attributes:
        data: all data.
        likelihood: of training; of Gaussian noise its variances are the targets'.
        members: the networks.
        count: how many.
        batch_size: data in a step, at most as many as any member sees.
        folds: the rows that each member leaves out, one tensor a member; the same tensor if they are the same.
        seed: of every order, start and stream.
        mine: the members that this rank trains.
        axes: U of weights W that are trained as ``W U`` (:func:`bayesopt_chain.ensemble.members.principal_axes`).
        floor: the least log score of a held-out target, ``[]`` or one for each target of a datum.
    """

    data: Data
    likelihood: Likelihood
    members: Members
    count: int
    batch_size: int
    folds: list[Tensor]
    seed: int
    mine: range
    axes: Tensors = field(default_factory=dict)
    floor: Tensor = held.FLOOR

    @property
    def left_out(self) -> list[tuple[Tensor, list[int]]]:
        """The folds, each with the members that left it out."""
        folds = dict.fromkeys(self.folds)  # a tensor is equal to itself alone
        return [(fold, [m for m, own in enumerate(self.folds) if own is fold]) for fold in folds]

    @property
    def theta(self) -> Tensor:
        """The starts of all members, ``[M, P]``."""
        params = {k: x @ self.axes[k] if k in self.axes else x for k, x in self.members.params.items()}
        return torch.cat([x.reshape(len(x), -1) for x in params.values()], 1)

    def tree(self, theta: Tensor) -> Tensors:
        """Parameters by name of rows ``[*lead, P]``."""
        own = self.members.params
        parts = theta.split([x[0].numel() for x in own.values()], -1)
        tree = {k: p.reshape((*theta.shape[:-1], *x.shape[1:])).to(x.dtype) for (k, x), p in zip(own.items(), parts)}
        return {k: p @ self.axes[k].mT if k in self.axes else p for k, p in tree.items()}

    def fan_in(self) -> Tensor:
        """The precision of each parameter under the fan-in prior, ``[P]``: of a factor of matrix products and convolutions the
        numbers of it that an output sums up, as one call of the network shows; 1 of what is added, scales, or is looked up."""
        module, bare = self.members.still.module, (nn.ParameterList, nn.ParameterDict)
        of_torch = [
            name
            for name, layer in module.named_modules()
            if type(layer).__module__.startswith("torch.nn") and not isinstance(layer, bare)
        ]
        # products inside of fused operations, as of recurrent layers, are not seen: by their shapes
        sizes = {name: size for name, size in fan_in(module).items() if name.rpartition(".")[0] in of_torch}
        sizes |= self.members.products(self.data.inputs_of(2)).sizes
        return torch.cat([torch.full_like(x, sizes.get(k, 1)).flatten() for k, x in self.members.first[0].items()])

    def folds_of(self, outputs: Sequence[Tensor], who: Sequence[int] | None = None) -> list[held.Fold]:
        """The folds, with the outputs of some members (default: of all)."""
        found = []
        for rows, left in self.left_out:
            if some := [m for m in left if who is None or m in who]:
                own = torch.stack([outputs[m] for m in some]).double()
                targets = held.doubled(self.data.take(rows)[1])
                found.append(held.Fold(rows, targets, some, own, self.floor.to(own)))
        return found

    def held_out(self, theta: Tensor, buffers: Tensors) -> list[Tensor]:
        """Of each member, outputs ``[n_f, *event]`` on the fold that it left out; all members ``[M, *]`` are given."""
        params, found = self.tree(theta), dict[int, Tensor]()
        for rows, who in self.left_out:
            own, kept = ({k: x[who] for k, x in t.items()} for t in (params, buffers))
            found |= zip(who, self.members.predict(own, kept, self.data.take(rows)[0]))
        return [found[m] for m in range(self.count)]

    def seen(self, held_out: bool) -> list[int]:
        """How many data each of this rank's members sees."""
        return [self.data.size - held_out * len(self.folds[m]) for m in self.mine]

    def batches(self, held_out: bool, salt: int, noise: Tensor, decay: Tensor) -> Callable[[int], Any]:
        """What a step takes, by its number: inputs, targets ``[m, b, *]``, noise, decay and scale of this rank's members.

        Each goes through the data that it sees, epoch after epoch, in orders that are functions of seed, member and epoch. A
        rest that fills no batch waits for another epoch.

        Args:
            held_out: whether each member leaves its fold out.
            salt: of the orders.
            noise: v of all members, ``[M, *event]``, in units of the targets' variance.
            decay: lambda / n of this rank's members, ``[m, P]``.
        """
        whole = set(self.seen(held_out)) == {self.batch_size}

        def shuffled(rows: Tensor, seed: int, epoch: int, chain: int) -> Tensor:
            own = torch.Generator("cpu").manual_seed(hash((seed, salt, epoch, self.mine[chain])) % 2**63)
            return rows if whole else rows[torch.randperm(len(rows), generator=own, device="cpu")]

        every = epochs(
            (self.data.inputs, self.data.targets),
            self.batch_size,
            order=shuffled,
            seed=self.seed,
            chains=len(self.mine),
            leave_out=[self.folds[m] if held_out else self.folds[m][:0] for m in self.mine],
        )
        first, theta, noise = batches.flatten(every.batch(0, 0))[0], self.theta, self.own(noise)
        size = (
            noise.reshape(len(noise), -1).mean(1) if self.likelihood.has_noise_scale else torch.ones_like(decay[:, 0])
        )
        fixed = [x.to(theta) for x in (noise, decay, size)]

        def batch(step: int) -> Any:
            return *(first if whole else batches.flatten(every.batch(*divmod(step, len(every))))[0]), *fixed

        return batch

    def own(self, tree: Any) -> Any:
        """Of a tree of all members ``[M, *]`` those of this rank; what is 0-d they have in common."""
        return optree.tree_map(lambda x: x[self.mine.start : self.mine.stop] if x.ndim else x, tree)

    def start(self) -> State:
        """Where this rank's members start. Their keys depend on their numbers alone, not on the ranks that share them out."""
        theta = self.own(self.theta)
        streams = [torch.Generator("cpu").manual_seed(chain_seed(7919 * self.seed + 2, m)) for m in self.mine]
        keys = torch.stack([new_key(stream, theta.device) for stream in streams])
        return State(theta, self.own(self.members.buffers), keys, ADAM.init(theta))

    def energy(self, theta: Tensor, batch: Any, buffers: Tensors, *, still: bool) -> tuple[Tensor, Tensors]:
        """``s U`` of one member, and its next buffers."""
        *pair, noise, decay, size = batch
        inputs, targets = batches.flatten(self.data[:2])[1].unflatten(pair)
        forward = self.members.still if still else self.members.training
        outputs, new = forward.with_buffers(self.tree(theta), (inputs, None), buffers)
        if not (still or outputs.requires_grad):
            raise ValueError(
                "posterior_ensemble: the module's outputs have no gradient: leave out detach, no_grad and rounding"
            )
        likelihood = self.likelihood.scaled(1 / noise) if self.likelihood.has_noise_scale else self.likelihood
        return size * (likelihood.nll(outputs, targets).mean() + (decay * theta.square()).sum() / 2), new

    def step(self, state: State, batch: Any, rate: Tensor) -> tuple[State, Tensor]:
        """One step of Adam of this rank's members, at rates ``[m]``, and their energies before it, ``[m]``."""

        def one(theta: Tensor, buffers: Tensors, key: Tensor, batch: Any) -> Any:
            with model_draws((key, state.adam.count)):
                loss = partial(self.energy, buffers=buffers, still=False)
                grads, info = gradient(loss, theta, batch)
            return grads, info.loss, info.aux

        grads, losses, buffers = mapped(one, self.members.loop, state.theta, state.buffers, state.keys, batch)
        moves, adam = ADAM.update(grads, state.adam, inplace=False)
        return State(state.theta - rate[:, None] * moves, buffers, state.keys, adam), losses


def program(step: Callable, *given: Any) -> Callable:
    """The step ``(state, batch, rate) -> (state, losses)``, traced where that repeats it.

    Args:
        step: :meth:`Problem.step`, of members that run under ``vmap``.
        *given: arguments to trace with, and to compare the program with the step at; others are of these shapes.

    Raises:
        RuntimeError: ``vmap`` refuses the network.
    """
    moved, _ = step(*given)
    try:
        graph = traced(partial(step), given)  # make_fx counts the self of a method as an argument
        other = moved, *given[1:]
        torch.testing.assert_close(graph(*other), step(*other), rtol=CLOSE, atol=1e-6, equal_nan=True)
    except (RuntimeError, AssertionError, TypeError, ValueError, NotImplementedError):
        return step
    return torch.no_grad()(graph.forward)


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
        >>> from bayesopt_chain.ensemble.training import rate_at
        >>> [round(rate_at(t, 1.0, 10, 4), 3) for t in (0, 5, 10, 12)]
        [1.001, 0.501, 0.301, 0.151]
    """
    size, at = (1.0, step / first) if step < first else (again, (step - first) / second)
    return lr * (size * (1 + math.cos(math.pi * min(at, 1.0))) / 2 + 1e-3)


def refitted(t: int, steps: int, fit: float, most: float = math.inf) -> tuple[int, int]:
    """Steps, and those with all data, where before step ``t`` of ``steps`` so many fit into what is left of the seconds.

    Example:
        >>> from bayesopt_chain.ensemble.training import refitted
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
        problem: as given; where ``vmap`` refuses the network, its gradient or its predictions, members run one by one.
        done: what it has come to.
    """

    def __init__(self, problem: Problem, stages: Stages, event: Any, prior: float | None) -> None:
        self.problem, self.stages = problem, stages
        theta, count = problem.theta, problem.count
        priors = [USUAL] * count
        if prior is None and not problem.likelihood.has_classes:
            priors = [FAN_IN] if count == 1 else [PRIORS[m % 2] for m in range(count)]
        usual = torch.full_like(theta[0], 1.0 if prior is None else prior)
        self.precision_of = {USUAL: usual, FAN_IN: problem.fan_in() if prior is None else usual}
        noise = torch.stack(
            [torch.full(event, NOISE if p == USUAL else FIRST, dtype=torch.float64, device="cpu") for p in priors]
        )
        self.done = Trained(theta, problem.members.buffers, [], priors, priors, noise, (0, 0), None, {}, {})
        self.state: Any = problem.start()
        self.prepare()
        try:
            self.run = program(problem.step, self.state, self.batch(0), self.rates(1e-3))
            problem.members.predict(problem.members.params, problem.members.buffers, problem.data.inputs_of(1))
        except RuntimeError:  # of vmap, or of the network, which fails again when a step is timed
            self.problem = replace(problem, members=problem.members._replace(loop=True))
            self.run = self.problem.step

    def prepare(self) -> None:
        """Set what steps take by the priors, the noise and the data of now, and with which part of the rate members go on."""
        problem, done, held_out = self.problem, self.done, not self.done.ends
        decay = [self.precision_of[done.now[m]] / n for m, n in zip(problem.mine, problem.seen(held_out))]
        self.batch = problem.batches(held_out, 1 if held_out else 3, done.noise, torch.stack(decay))
        self.again = torch.tensor(
            [RATE if done.priors[m] == done.now[m] else 1.0 for m in problem.mine], dtype=torch.float64, device="cpu"
        )

    def rates(self, lr: Any) -> Tensor:
        """The rates of this rank's members, ``[m]``, from one for all or one for each."""
        return (
            torch.as_tensor(lr, dtype=torch.float64, device="cpu")
            .to(self.state.theta)
            .expand(len(self.problem.mine))
            .clone()
        )

    def seconds(self) -> tuple[float, float]:
        """Of one step, measured, and of what scoring the members in the end will take, by one score of where they start."""
        problem, likelihood, rates = self.problem, self.problem.likelihood, self.rates(1e-3)
        step = timed(lambda i: self.run(self.state, self.batch(i), rates), TIMED)
        folds = problem.folds_of(problem.held_out(problem.theta, problem.members.buffers))
        grid, factor = (held.SCALES, 2.0) if likelihood.has_width else (held.NOISES, 1.0)
        tables = 1 if likelihood.has_classes else 4  # of the members, of those of each prior, and of a constant
        return step, tables * len(grid) * timed(lambda _: held.score(likelihood, folds, factor), 1)

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
        passes = len(RATES) * tried / self.problem.count * self.problem.batch_size / self.problem.data.size
        return {"lr": next(lr for lr, good in zip(RATES, close.tolist()) if good), "passes": passes}

    def train(self, lr: float, steps: int, until: float | None = None, most: float = math.inf) -> Trained:
        """All of it.

        Args:
            lr: the rate.
            steps: as many, before those with all data.
            until: when it has to end, by the clock of ``time.perf_counter``; as many steps as fit. Default: no end.
            most: the steps that may become of ``steps`` then.
        """
        stages, t = self.stages, 0
        self.done = self.done._replace(steps=(steps, max(1, round(MORE * steps))))
        if half := stages.read("training under way"):
            t, until = half["step"], until and time.perf_counter() + half["left"]
            self.done = Trained(**half["done"])
            self.state = optree.tree_structure(self.state).unflatten(self.problem.own(half["leaves"]))
            self.prepare()
        stages.begin("training", sum(self.done.steps), t)
        looked = t, time.perf_counter()
        renewals, marks = self.marks()
        while t < sum(self.done.steps):
            if t in marks:
                (before, then), looked = looked, (t, time.perf_counter())
                if until is not None and t > before:
                    fit = max(0.0, until - looked[1]) / max(looked[1] - then, 1e-9) * (t - before)
                    self.done = self.done._replace(steps=stages.of_first(refitted, t, self.done.steps[0], fit, most))
                    stages.total, (renewals, marks) = sum(self.done.steps), self.marks()
                if stages.path is not None:
                    reached = {
                        "leaves": stages.gathered(optree.tree_leaves(self.state)),
                        "step": t,
                        "left": (until or 0.0) - looked[1],
                        "done": self.done._asdict(),
                    }
                    stages.write("training under way", reached)
            steps, more = self.done.steps
            if t == steps or t in renewals:
                self.look()
                if t == steps:
                    self.choose()
                else:
                    self.cross(self.done.noise, [m for m, p in enumerate(self.done.now) if p == FAN_IN])
                self.prepare()
            self.state, _ = self.run(
                self.state,
                self.batch(t if t < steps else t - steps),
                self.rates(rate_at(t, lr, steps, more, self.again)),
            )
            stages.advance()
            t += 1
        theta, buffers = stages.gathered((self.state.theta, self.state.buffers))
        _require_finite([theta], "training on all data")
        return self.done._replace(theta=theta, buffers=buffers)

    def marks(self) -> tuple[set[int], set[int]]:
        """The steps before which noise is renewed, and before which training is written and its pace measured."""
        steps, more = self.done.steps
        return {round(share * steps) for share in RENEWALS}, {round(i * (steps + more) / KEPT) for i in range(1, KEPT)}

    def look(self) -> None:
        """Look at the outputs of each member on the fold that it left out."""
        theta, buffers = self.stages.gathered((self.state.theta, self.state.buffers))
        outputs = self.problem.held_out(theta, buffers)
        _require_finite(outputs, "training")
        self.done = self.done._replace(theta=theta, buffers=buffers, pilots=outputs)

    def followed(self) -> dict[str, Any]:
        """What chains start with: the members before they saw their folds, the prior, and v0 without and with all data."""
        noise = torch.full_like(self.done.noise, NOISE)
        self.cross(noise)
        of_all = self.v0(self.problem.folds_of(self.done.pilots)).expand_as(noise)
        return {**self.done.ends, "without": noise, "with": of_all, "precision": self.precision_of[FAN_IN]}

    def v0(self, folds: list[held.Fold]) -> Tensor:
        """The noise to train with, of the members that left these folds out; of targets without noise it is not used."""
        if not self.problem.likelihood.has_noise_scale:
            return torch.full_like(self.done.noise[0], NOISE)
        return SHARE * self.stages.of_first(held.noise_of, self.problem.likelihood, folds).cpu()

    def cross(self, noise: Tensor, who: list[int] | None = None) -> None:
        """Set the noise v0 of members (default: of all) that leave out one fold by the others'."""
        folds = self.problem.folds_of(self.done.pilots, who)
        for fold in folds:
            noise[fold.who] = self.v0([f for f in folds if f is not fold] or [fold])

    def choose(self) -> None:
        """Set the priors to go on with, the z of their comparison, and the noise."""
        problem, done, z, now, means = self.problem, self.done, None, self.done.priors, dict[str, float]()
        usual, fan_in = (
            problem.folds_of(done.pilots, [m for m, own in enumerate(done.priors) if own == prior]) for prior in PRIORS
        )
        if usual and fan_in:
            shared = {f.rows for f in usual} & {f.rows for f in fan_in}
            scores = [
                held.log_scores(problem.likelihood, [f for f in each if f.rows in shared]) for each in (usual, fan_in)
            ]
            means = {f"pilots, {prior}": float(score.mean()) for prior, score in zip(PRIORS, scores)}
            z = self.stages.of_first(held.z_of, scores[1] - scores[0])
            if abs(z) >= 1:
                now = [FAN_IN if z > 0 else USUAL] * problem.count
        if fan_in:
            v0 = self.v0(fan_in)
            done.noise[:] = torch.stack([v0 if prior == FAN_IN else torch.full_like(v0, NOISE) for prior in now])
        self.done = done._replace(now=now, z=z, scores=means, ends={"theta": done.theta, "buffers": done.buffers})


def _require_finite(tensors: list[Tensor], stage: str) -> None:
    if not all(bool(x.isfinite().all()) for x in tensors):
        raise ValueError(
            f"posterior_ensemble: {stage} diverged: pass a smaller lr=, look for outliers in the inputs, or compute in float32 "
            "what is float16"
        )
