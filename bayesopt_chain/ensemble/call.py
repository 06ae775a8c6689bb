"""``posterior_ensemble``: one call from a module to networks that know what they do not know, and what it returns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from bayesopt_chain import batches, checks
from bayesopt_chain.data.epochs import columns
from bayesopt_chain.ensemble import held
from bayesopt_chain.ensemble.data import (
    CRUSHED,
    DATA,
    LEAST,
    LEAST_SCORED,
    Data,
    Scale,
    far_off,
    moments,
    read,
    require_inputs,
    with_noise,
)
from bayesopt_chain.ensemble.members import MAKER, Members, copy_of, described, frozen_of, members_of, principal_axes
from bayesopt_chain.ensemble.stages import Stages, stored
from bayesopt_chain.ensemble.training import FAN_IN, FEWEST, MORE, RATES, TRIAL, USUAL, Problem, Trained, Training
from bayesopt_chain.likelihoods import Likelihood, Predictive
from bayesopt_chain.likelihoods._likelihood import REAL
from bayesopt_chain.likelihoods._numbers import LearnedGaussian
from bayesopt_chain.modules import Reader, Tensors, arguments_of, as_pair, unshared_statistics, write_back
from bayesopt_chain.posterior.model import batches_of
from bayesopt_chain.runs import files
from bayesopt_chain.runs.draws import Draws
from bayesopt_chain.runs.run import describe, difference

WHO = "posterior_ensemble: "
COARSE = 4.0  # roundings of outputs at the targets' mean, of which a deviation has to be larger
SPARE = 0.04  # of minutes, for what follows training
# standard errors of what the networks gain over a constant: an error below (of 37 such runs none was wrong, and 5 of 65 below
# 0: benchmarks/results/constants.json)
WORSE = -1.0
FORMAT = 6  # of the file
MOST_NUMBERS = 2**26  # of outputs of all draws that are kept, if they are of classes
KEYS = {
    "format",
    "params",
    "buffers",
    "factor",
    "report",
    "noise",
    "seed",
    "scale",
    "loop",
    "about",
    "inputs",
}  # what a file has


@dataclass(frozen=True)
class Report:
    """What :func:`bayesopt_chain.posterior_ensemble` did; ``print`` it.

    Attributes:
        kind: what came out, such as "ensemble of 4 networks".
        chosen: what every argument came to, by name.
        said: one sentence for each stage, in order.
        passes: what each stage cost, in gradients of all data for each member.
        training: the passes of one plain training of the members, to compare with.
        seconds: what the call took.
        held_out: mean held-out log score by what is predicted with, in nats a datum.
        advice: what would help, by name.

    Example:
        >>> from bayesopt_chain.ensemble import Report
        >>> report = Report("ensemble of 4 networks", {"steps": 100}, ["trained"], {"training": 1.3}, 1.0)
        >>> report.cost
        1.3
    """

    kind: str
    chosen: dict[str, Any]
    said: list[str]
    passes: dict[str, float]
    training: float
    seconds: float = 0.0
    held_out: dict[str, float] = field(default_factory=dict)
    advice: dict[str, str] = field(default_factory=dict)

    @property
    def cost(self) -> float:
        """All passes, in units of one plain training of the members."""
        return sum(self.passes.values()) / self.training

    def __str__(self) -> str:
        shares = ", ".join(f"{name} {value / self.training:.2f}" for name, value in self.passes.items())
        return "\n".join(
            [
                f"{self.kind[0].upper()}{self.kind[1:]}.",
                "",
                "Chosen: "
                + ", ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in self.chosen.items()),
                "",
                *(f"* {sentence}" for sentence in self.said),
                "",
                "Held-out log score, nats a datum:",
                *(f"  {name:<28} {value:.4f}" for name, value in self.held_out.items()),
                "",
                f"Cost: {sum(self.passes.values()):.4g} passes over the data for each member, {self.cost:.2f} times one "
                f"training, in {self.seconds:.3g} s ({shares})",
                *(f"Advice ({name}): {text}" for name, text in self.advice.items()),
            ]
        )


@dataclass(frozen=True, repr=False)
class Ensemble:
    """Several networks, or draws of each; made by :func:`bayesopt_chain.posterior_ensemble`.

    Attributes:
        params, buffers: of S draws of M networks, ``[S, M, *]`` by name; one draw each of trained networks, which come
            last behind the draws of chains.
        likelihood: of new targets, with the noise that held-out data chose.
        factor: what logits are divided by, or noise scales are multiplied by.
        report: what was done; ``print(ensemble.report)``.
        members: the networks as functions of their parameters; ``members.still`` takes and gives the data's own units.
        scale: the affine maps around each network.
    """

    params: Tensors
    buffers: Tensors
    likelihood: Likelihood
    factor: float
    report: Report
    members: Members
    scale: Scale

    def __repr__(self) -> str:
        return f"Ensemble({self.report.kind})"

    @checks.takes(data=checks.DATA)
    def predict(self, data: Any) -> Predictive:
        """The predictive distribution of new targets.

        Args:
            data: a tensor of inputs ``[N, *]``; one batch, a tuple ``(inputs, targets)`` or a mapping; or an iterable of
                batches, such as a DataLoader. Targets are not read.

        Returns:
            :class:`bayesopt_chain.likelihoods.Predictive`: mean, variance, quantile, interval, probabilities, log_prob, crps,
            aleatoric, epistemic. Where classes of all draws and data are more than 2^26 numbers, as those of tokens soon are,
            those of a batch are added up (``likelihood.pooled``): one distribution of each of its targets is held.

        Raises:
            ValueError: no batches, or inputs with NaN.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> x = torch.linspace(-1, 1, 20)[:, None]
            >>> cheap = {"members": 2, "steps": 100, "lr": 0.05, "progress": False}
            >>> e = bc.posterior_ensemble(torch.nn.Linear(1, 1), (x, 2 * x), bc.likelihoods.gaussian(), **cheap)
            >>> e.predict(torch.zeros(3, 1)).quantile(0.9).shape
            torch.Size([3, 1])
        """
        parts, numbers, likelihood = list[Predictive](), 0, self.likelihood
        params, buffers = ({k: x.flatten(0, 1) for k, x in t.items()} for t in (self.params, self.buffers))
        for inputs, _ in batches_of(data, partial(as_pair, module=self.members.still.module)):
            *_, n = columns((inputs,), "predict")
            require_inputs("predict", inputs)
            with checks.blaming("Ensemble.predict", "data"):
                outputs = self.members.predict(params, buffers, inputs)
            if outputs.shape[1] != n:
                raise ValueError(
                    f"predict: the networks return {tuple(outputs.shape[1:])} for {n} data: pass inputs [N, *] (of one x[None])"
                )
            if self.factor != 1:
                likelihood, outputs = self.likelihood.widened(outputs, self.factor)
            numbers += outputs.numel() if likelihood.has_classes else 0  # which alone can be added up
            parts.append(likelihood.mixture(outputs))
            if numbers > MOST_NUMBERS:  # the draws of all data until now are added up, and later those of others
                parts = [likelihood.pooled(part.outputs) if part.mean_entropy is None else part for part in parts]
        if not parts:
            raise ValueError("predict: data has no batches")
        outputs = torch.cat([cast(Tensor, part.outputs) for part in parts], 1)
        entropies = [part.mean_entropy for part in parts if part.mean_entropy is not None]
        return replace(likelihood.mixture(outputs), mean_entropy=torch.cat(entropies) if entropies else None)

    @checks.takes()
    def draws(self) -> Draws:
        """The draws, the networks as chains, for diagnostics and ``to_arviz``.

        Returns:
            :class:`bayesopt_chain.Draws` in memory, ``[S, M, *]``.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> x = torch.linspace(-1, 1, 20)[:, None]
            >>> cheap = {"members": 2, "steps": 100, "lr": 0.05, "progress": False}
            >>> e = bc.posterior_ensemble(torch.nn.Linear(1, 1), (x, 2 * x), bc.likelihoods.gaussian(), **cheap)
            >>> e.draws().params["weight"].shape
            torch.Size([1, 2, 1, 1])
        """
        size, count = next(iter(self.params.values())).shape[:2]
        made = Draws.from_trees([{k: x[i] for k, x in self.params.items()} for i in range(size)], chains=count)
        return made.with_buffers(self.buffers)

    @checks.takes()
    def modules(self) -> list[nn.Module]:
        """The networks of the last draw as modules in ``eval`` mode, which take and give the data's own units.

        Returns:
            One module a network. With the affine maps of ``standardize`` it is a :class:`Scaled`, whose ``module`` is the
            network inside; without them it is the network itself.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> x = torch.linspace(-1, 1, 20)[:, None]
            >>> cheap = {"members": 2, "steps": 100, "lr": 0.05, "progress": False}
            >>> e = bc.posterior_ensemble(torch.nn.Linear(1, 1), (x, 2 * x), bc.likelihoods.gaussian(), **cheap)
            >>> outputs = torch.stack([module(x) for module in e.modules()])
            >>> torch.allclose(outputs.mean(0), e.predict(x).mean, atol=1e-5)
            True
        """
        made = list[nn.Module]()
        for m in range(next(iter(self.params.values())).shape[1]):
            module = copy_of(self.members.still.module)
            write_back(module, *({k: x[-1, m] for k, x in t.items()} for t in (self.params, self.buffers)))
            made.append(Scaled(module, self.scale).eval() if self.scale.said else module)
        return made

    @checks.takes(path=checks.PATH)
    def save(self, path: str | Path) -> None:
        """Write the ensemble to one safetensors file with checksums, without module, likelihood and data.

        Args:
            path: of the file; it is replaced in one move.

        Raises:
            OSError: it cannot be written.

        Example:
            >>> import pathlib, tempfile, torch, bayesopt_chain as bc
            >>> x = torch.linspace(-1, 1, 20)[:, None]
            >>> noise = bc.likelihoods.gaussian()
            >>> cheap = {"members": 2, "steps": 100, "lr": 0.05, "progress": False}
            >>> e = bc.posterior_ensemble(torch.nn.Linear(1, 1), (x, 2 * x), noise, **cheap)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     e.save(pathlib.Path(folder) / "e.safetensors")
            ...     again = bc.ensemble.Ensemble.open(pathlib.Path(folder) / "e.safetensors", torch.nn.Linear(1, 1), noise)
            >>> torch.equal(again.predict(x).mean, e.predict(x).mean)
            True
        """
        files.write_tree(
            Path(path),
            {
                "format": FORMAT,
                "params": dict(self.params),
                "buffers": dict(self.buffers),
                "factor": self.factor,
                "report": asdict(self.report),
                "noise": self.likelihood.noise_variance,
                "seed": self.report.chosen["seed"],
                "scale": [list(self.scale.inputs), self.scale.outputs, self.scale.log_variance],
                "loop": self.members.loop,
                "about": described(self.members, self.likelihood),
                "inputs": self.members.inputs,
            },
        )

    @classmethod
    @checks.takes(
        path=checks.PATH,
        make_model=MAKER,
        likelihood=checks.LIKELIHOOD,
    )
    def open(
        cls, path: str | Path, make_model: nn.Module | Callable[[], nn.Module], likelihood: Likelihood
    ) -> Ensemble:
        """The ensemble that :meth:`save` wrote.

        Args:
            path: of the file.
            make_model: as the call had it; the networks are where it makes them.
            likelihood: as the call had it.

        Returns:
            An :class:`Ensemble`.

        Raises:
            ValueError: a damaged file, or one of another format; another module, frozen parameters or likelihood than were
                saved.

        Example:
            >>> import bayesopt_chain as bc
            >>> bc.ensemble.Ensemble.open("nowhere.safetensors", lambda: None, bc.likelihoods.gaussian())  # see save
            Traceback (most recent call last):
            FileNotFoundError: ...
        """
        state = stored(Path(path), torch.device("cpu"), "Ensemble.open", "save it again")
        if not isinstance(state, dict) or state.keys() != KEYS or state["format"] != FORMAT:
            raise ValueError(f"Ensemble.open: {path} was not written by Ensemble.save of this version")
        scale, count = Scale(*state["scale"]), next(iter(state["params"].values())).shape[1]
        members = (
            members_of(make_model, count, state["seed"], None, state["inputs"])
            .within(scale)
            ._replace(loop=state["loop"])
        )
        if what := difference(state["about"], described(members, likelihood)):
            raise ValueError(f"Ensemble.open: this is not what was saved: {what}; pass what the call had")
        if state["noise"] is not None:
            likelihood = with_noise(likelihood, state["noise"])
        device = next(iter(members.params.values())).device
        params, buffers = ({k: x.to(device) for k, x in state[name].items()} for name in ("params", "buffers"))
        return cls(params, buffers, likelihood, state["factor"], Report(**state["report"]), members, scale)


class Scaled(nn.Module):
    """A network between the affine maps of its data's moments; made by :meth:`Ensemble.modules`.

    Attributes:
        module: the network inside.
        scale: the maps.
    """

    def __init__(self, module: nn.Module, scale: Scale) -> None:
        super().__init__()
        self.module, self.scale = module, scale

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """The network's outputs in the targets' own units.

        Args:
            *inputs: what the network is called with, ``[B, *]`` each, in the data's own units.
            **named: the same by name.

        Returns:
            ``[B, *event]``.

        Example:
            >>> import torch
            >>> from bayesopt_chain.ensemble import Scaled
            >>> from bayesopt_chain.ensemble.data import Scale
            >>> moments = torch.tensor(5.0), torch.tensor(2.0)  # shift and width of the targets
            >>> Scaled(torch.nn.Identity(), Scale(outputs=moments))(torch.ones(3, 1)).flatten()
            tensor([7., 7., 7.])
        """
        given: Any = named or (inputs if len(inputs) > 1 else next(iter(inputs), None))
        arguments, keywords = arguments_of(self.module, self.scale.into((given, None)))
        return self.scale.out(self.module(*arguments, **keywords))


class EnsembleError(ValueError):
    """A result that should not be used as it is: a constant predicts better, or a stage failed, which the message names.

    Attributes:
        ensemble: the fitted :class:`Ensemble`; of a stage that failed, what was trained when it was last looked at.
    """

    def __init__(self, message: str, ensemble: Ensemble) -> None:
        super().__init__(message)
        self.ensemble = ensemble


@checks.takes(
    make_model=MAKER,
    data=DATA,
    members=checks.WHOLE,
    steps=checks.whole(FEWEST),
    minutes=checks.POSITIVE,
    batch_size=checks.WHOLE,
    prior_precision=checks.number("(0, 1e12]"),  # weights with a smaller deviation than 1e-6 cannot be trained
    held_out=checks.number("(0, 0.4]"),
    standardize=checks.BOOL,
    path=checks.FOLDER,
    chains=checks.Kind(
        lambda x: checks.POSITIVE.fits(x) or (isinstance(x, str) and x == "auto"),
        "a positive, finite number of seconds, or 'auto'",
        (int, float, str),
    ),
)
def posterior_ensemble(
    make_model: nn.Module | Callable[[], nn.Module],
    data: Any,
    likelihood: Likelihood,
    *,
    members: int = 4,
    steps: int | None = None,
    minutes: float | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    prior_precision: float | None = None,
    held_out: float = 0.15,
    standardize: bool | None = None,
    seed: int = 0,
    path: str | Path | None = None,
    progress: bool = True,
    mesh: Any = None,
    chains: float | Literal["auto"] | None = None,
) -> Ensemble:
    """From a module to networks that know what they do not know, in one call.

    Members train, each without one of two folds; half of them with the usual prior, half with one of precision fan-in and
    noise that held-out data renew. The folds say which prior is better and how large the noise is, and all members train on
    with all data. ``print(ensemble.report)`` says what was chosen and why, and what it cost.

    Args:
        make_model: a function that returns a new module; or one module, whose trained weights are drawn anew for each member
            (frozen ones are shared with it, not copied: leave them as they are while the result is in use). Outputs are
            ``[B, *event]``, or have them as ``logits``. Dropout and BatchNorm work (frozen in ``eval`` mode it keeps its
            statistics), and lazy layers are made.
        data: tensors ``(inputs, targets)`` with one entry a datum on axis 0, a Dataset, a DataLoader, a list of batches (of
            a generator, which may have no end, ``list(batches)``), or ``bc.epochs`` of tensors. They are read once and kept
            in memory. Data with equal inputs are left out together.
        likelihood: of :mod:`bayesopt_chain.likelihoods`. Of ``gaussian`` noise of a known variance the number given is not
            used: the noise of each output is found on held-out data. The scale of ``student_t``, in the targets' units, is that
            of training; predictions have the one that held-out data ask for.
        members: how many networks, at least 1. Default 4.
        steps: of training, before 0.3 of them more with all data. Default: 300 passes over the data, from 4,000 to 20,000
            steps; or as many as fit into ``minutes``.
        minutes: how long the call may take, 20 steps at least. What it will cost is said before anything trains. The pace is
            measured again meanwhile: as many steps follow as then fit. Default: no limit.
        batch_size: of training. Default: that of a loader or ``bc.epochs``; else all data up to 128, and beyond that the power
            of two nearest to N / 16, from 32 to 256.
        lr: of Adam. Default: the largest of 0.01, 0.003 and 0.001 that is within 5 % of the best descent in a trial on one
            network for a twentieth of the steps.
        prior_precision: of each trained weight, of a Gaussian prior about 0, in all (not per datum). Default: half of the
            members with 1, half with the fan-in of the weight, and held-out data choose; of classes 1.
        held_out: share of the data in each of the two folds, above 0 and at most 0.4. Default 0.15.
        standardize: whether networks see inputs with mean 0 and deviation 1, and their outputs are scaled to the targets'
            moments. Predictions and :meth:`Ensemble.modules` are in the data's own units. Default: yes, unless the module
            has frozen weights, which know the units that they were trained in, or all targets are equal (residuals).
        seed: of the starts, orders and streams: a whole number from 0.
        path: a directory. A call that was killed at any point goes on from there with the same results, bit for bit (of
            ``minutes``, with as many steps as still fit); a complete one returns at once. Another call under the same path is
            refused, naming what differs.
        progress: write what the call will cost, and some lines of how far it is, to standard error. Default True.
        mesh: a DeviceMesh of one axis whose ranks share out the members. Every rank makes the same call with all data, and gets
            the whole ensemble. Members are those of one process to the rounding of their matrix products, and bit for bit where
            ``vmap`` refuses the network. With ``path=`` the first rank writes, and any number of ranks goes on. Default: one
            process; under ``torchrun`` each rank then makes a call of its own, with a folder of its own under ``path``.
        chains: seconds in which chains behind the networks (:mod:`bayesopt_chain.ensemble.chains`) may draw from each one's
            posterior at T = 1/N; or ``"auto"``: what ``minutes`` or ``steps`` leave beyond the default steps. Draws stay beside
            the networks where held-out data are then predicted better by two standard errors, else the report says that
            an ensemble was the better buy, and why. ``report.kind`` is what came out. Not with ``mesh``. Default: no chains.

    Returns:
        :class:`Ensemble`, with ``predict``, ``report``, ``modules``, ``draws``, ``save`` and ``open``.

    Raises:
        TypeError: neither a module nor a function; data that hold no tensors.
        ValueError: an argument out of range; layers whose weights cannot be drawn anew; predictions that in ``eval`` mode
            depend on other data or on chance; probabilities in the place of logits; targets that the likelihood cannot have, or
            that are so far from 0 that the networks' dtype cannot tell them apart; training that diverges; ``path`` of another
            call; fewer members than ranks, or ranks with other calls.
        EnsembleError: the networks predict held-out data worse than a constant does, by a standard error; or a stage failed
            after some training. What was fitted is the error's ``ensemble``.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(60, 2)
        >>> y = (x.sum(1, keepdim=True)).sin() + 0.1 * torch.randn(60, 1)
        >>> make = lambda: torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> ensemble = bc.posterior_ensemble(
        ...     make, (x, y), bc.likelihoods.gaussian(), members=2, steps=200, lr=0.01, progress=False
        ... )
        >>> prediction = ensemble.predict(torch.zeros(3, 2))
        >>> prediction.mean.shape, prediction.quantile(0.95).shape, bool((prediction.epistemic >= 0).all())
        (torch.Size([3, 1]), torch.Size([3, 1]), True)
    """
    began = time.perf_counter()
    if steps is not None and minutes is not None:
        raise ValueError(f"{WHO}steps={steps} and minutes={minutes:g} are two budgets: pass one of them")
    if chains is not None and mesh is not None:
        raise ValueError(f"{WHO}chains={chains!r} run in one process: pass chains=None, or mesh=None")
    if minutes is not None and chains not in (None, "auto") and chains >= 60 * minutes:
        raise ValueError(f"{WHO}chains={chains:g} seconds are all of minutes={minutes:g}: pass fewer, or chains='auto'")
    batch, loaders = read(data)
    raw = Data._make((*as_pair(batch), batches.size(batch)))
    device = batches.flatten(raw.inputs)[0][0].device
    networks = members_of(make_model, members, seed, device, raw.inputs_of(2))
    reader = Reader(networks.still.module)  # which knows what the module takes, and whether it moves labels itself
    raw = Data._make((*reader(batch), raw.size))
    event = _require_targets(networks, raw, likelihood)
    pair = raw.folds(held_out, seed)
    counted = [(held.weights_of(likelihood, raw.take(rows)[1]) > 0).any(1).sum() for rows in pair]
    if min(counted) < LEAST_SCORED:
        raise ValueError(
            f"{WHO}a held-out fold has fewer than {LEAST_SCORED} data whose targets count (weights above 0, "
            "classes that are not ignored): leave data without targets out, or pass a larger held_out="
        )
    has_moments = likelihood.support is not None or likelihood.has_classes  # targets of others may be of any kind
    mean, variance = moments(likelihood, raw.targets) if has_moments else (None, None)
    alike = variance is not None and not bool((variance > 0).any())
    if standardize is None:
        standardize = not (alike and likelihood.has_noise_scale) and not frozen_of(networks.still.module)
    scale = Scale.of(raw, likelihood, networks.still.module) if standardize else Scale()
    networks = networks.within(scale)
    unit = _unit(likelihood, raw, mean, variance, networks)
    trained = with_noise(likelihood, unit) if likelihood.has_noise_scale else likelihood
    folds = [pair[m % 2] if prior_precision or likelihood.has_classes else pair[m // 2 % 2] for m in range(members)]
    size = min(raw.size - max(map(len, folds)), batch_size or loaders or batch_size_for(raw.size))
    chosen = {
        "members": members,
        "steps": steps or (None if minutes else steps_for(raw.size, size)),
        **({"minutes": minutes} if minutes else {}),
        **({"chains": chains} if chains is not None else {}),
        "batch_size": size,
        "prior_precision": prior_precision,
        "held_out": held_out,
        "standardize": standardize,
        "seed": seed,
        **({"labels": "those of the next token"} if reader.moves else {}),
    }
    about = {**chosen, "lr": lr}
    if path is not None or mesh is not None:  # what another process or rank is to have too
        about |= {
            "data": describe(batches.flatten((raw.inputs, raw.targets))[0]),
            **described(networks, likelihood),
        }
    stages = Stages(path, about, device, mesh, progress)
    start = stages.once(
        "start",
        lambda: {
            "params": networks.params,
            "buffers": networks.buffers,
            "axes": principal_axes(networks, raw, scale),
        },
    )
    stages.of_first(networks.require_start, start["params"])
    networks = networks._replace(params=start["params"], buffers=start["buffers"])
    floor = held.FLOOR if unit is None else held.FLOOR - unit.log().flatten() / 2
    problem = Problem(raw, trained, networks, members, size, folds, seed, stages.mine, start["axes"], floor)
    own = [
        (x, x.clone())
        for layer in networks.training.module.modules()
        for x in vars(layer).values()
        if isinstance(x, Tensor)
    ]
    with checks.blaming("posterior_ensemble", f"a step of training with batch_size={size}"):
        training = Training(problem, stages, event, prior_precision)
        cost = stages.once("cost", lambda: _cost(training, chosen["steps"], minutes, lr, began, chains))
        if not all(torch.equal(x, before) for x, before in own):
            raise ValueError(
                f"{WHO}the module writes into a tensor of its own that is no buffer, which members would share and predictions "
                "not see: register it (register_buffer)"
            )
    stages.say(cost["said"])
    found = stages.once("rate", lambda: {"lr": lr, "passes": 0.0} if lr else training.rate(cost["steps"]))
    failure, drawn = None, {}
    try:
        until = minutes and began + 60 * minutes * (1 - SPARE) - cost["chains"] - cost["after"]
        length = cost["steps"], until, steps_for(raw.size, size) if chains == "auto" else math.inf
        training.done = Trained(**stages.once("training", lambda: training.train(found["lr"], *length)._asdict()))
        if chains is not None:
            from bayesopt_chain.ensemble.chains import chained  # a call without chains needs none of it

            drawn = stages.once("chains", lambda: chained(training, cost["chains"], cost["each"]))
    except (ValueError, RuntimeError) as err:
        if not training.done.pilots:
            raise
        failure = stages.name, err
    chosen |= {
        "steps": training.done.steps[0],
        "lr": found["lr"],
        **({"axes": "principal ones of collinear inputs"} if start["axes"] else {}),
    }
    return _finished(training, chosen, found["passes"], began, scale, alike, failure, drawn)


def batch_size_for(size: int) -> int:
    """The batch size for so many data.

    Example:
        >>> from bayesopt_chain.ensemble.call import batch_size_for
        >>> [batch_size_for(n) for n in (100, 300, 1000, 50_000)]
        [100, 32, 64, 256]
    """
    return size if size <= 128 else min(256, max(32, 2 ** round(math.log2(size / 16))))


def steps_for(size: int, batch_size: int) -> int:
    """The steps of training for so many data in such batches.

    Example:
        >>> from bayesopt_chain.ensemble.call import steps_for
        >>> [steps_for(n, 32) for n in (100, 300, 1000, 50_000)]
        [4000, 4000, 9300, 20000]
    """
    return min(20_000, max(4000, 300 * (size // batch_size)))


def _cost(
    training: Training, steps: int | None, minutes: float | None, lr: float | None, began: float, chains: Any
) -> dict[str, Any]:
    """Steps, and what they will cost with what was spent until now; seconds of chains."""
    (each, after), problem = training.seconds(), training.problem
    spent = time.perf_counter() - began
    whole = (
        1 + MORE + (0.0 if lr else TRIAL * -(-len(RATES) // len(problem.mine)))
    )  # steps that come with each of training
    own = 0.0 if chains in (None, "auto") else float(chains)
    if steps is None:
        steps = max(FEWEST, int((60 * cast(float, minutes) * (1 - SPARE) - spent - own - after) / each / whole))
    if chains == "auto":
        most = min(steps, steps_for(problem.data.size, problem.batch_size))
        steps, own = most, (steps - most) * whole * each
    seconds = spent + after + own + steps * whole * each
    return {
        "steps": steps,
        "seconds": seconds,
        "said": f"{problem.count} network{'s' * (problem.count > 1)}, {steps} steps of {problem.batch_size} data, "
        f"{steps * whole * problem.batch_size / problem.data.size:.4g} passes, about {seconds:.3g} s"
        + (f", {own:.3g} of them for chains" if own else ""),
        "each": each,
        "after": after,
        "chains": own,
    }


def _finished(
    training: Training,
    chosen: dict[str, Any],
    trial: float,
    began: float,
    scale: Scale,
    alike: bool,
    failed: tuple[str, Exception] | None,
    drawn: dict[str, Any],
) -> Ensemble:
    """The noise or the scale to predict with, what a constant scores, and the report.

    Raises:
        EnsembleError: training failed, or a constant scores better.
    """
    problem, trained = training.problem, training.done
    networks = folds = problem.folds_of(trained.pilots, trained.kept)
    params, buffers = ({k: x[None] for k, x in t.items()} for t in (problem.tree(trained.theta), trained.buffers))
    kind = f"ensemble of {problem.count} networks" if problem.count > 1 else "one network"
    once, whole = (steps * chosen["batch_size"] / problem.data.size for steps in (trained.steps[0], sum(trained.steps)))
    passes = {"rate": trial, "training": whole}
    if "draws" in drawn:
        folds = held.joined(folds, drawn["outputs"])
        # the networks come last, so that modules() are them
        both = zip((problem.tree(drawn["draws"]), drawn["buffers"]), (params, buffers))
        params, buffers = ({k: torch.cat([x, own[k]]) for k, x in t.items()} for t, own in both)
        if drawn["agree"]:
            kind = f"posterior of {problem.count} chain{'s' * (problem.count > 1)}"
        kind += f", {len(drawn['draws'])} draws of each"
    said, advice = _said(problem, trained, chosen, scale), dict[str, str]()
    likelihood, factor, noise, at_end = held.fitted(problem.likelihood, folds)
    scores = held.score(likelihood, folds, factor)
    if noise is not None:
        noise, cut = held.noise_of_all(problem.likelihood, noise, networks, problem.folds_of(trained.pilots))
        likelihood = problem.likelihood.scaled(1 / noise)
        low, high = (f"{v:.3g}" for v in torch.as_tensor(likelihood.noise_variance, device="cpu").aminmax())
        said.append(f"noise: variance {low}{f' to {high}' * (low != high)}, by held-out data.")
        if "draws" in drawn:
            said.append(
                f"temperature: the chains' v0 is tempered, T N = v0 / v = {drawn['v0'] / float(noise.mean()):.2f}."
            )
        said += [
            f"noise: at an end of its grid (between {held.NOISES[0]:g} and {held.NOISES[-1]:g} of the targets' variance) for "
            "an output."
        ] * at_end
        said += ["noise: cut to a quarter of that of the members that left a fold out, which disagree by more."] * cut
    else:
        said.append(f"scale: {factor:.3g}, by held-out data.")
        if at_end and not likelihood.has_classes:
            advice["scale"] = (
                f"held-out errors ask for {factor:.3g} times the variance that the networks were trained with: pass a scale= "
                f"of student_t that is {factor**0.5:.3g} times as large, in the targets' units; where the variance was learnt, "
                "train for fewer steps="
            )
    table = {"ensemble": float(scores.mean())}
    if drawn:
        said.append("chains: " + drawn["said"] + ("." if "draws" in drawn else ": an ensemble was the better buy."))
        passes["chains"] = drawn.get("passes", 0.0)
        table |= drawn.get("alone", {})
    table |= trained.scores
    gain = math.inf
    try:
        constant = None if alike else held.constant_scores(problem.likelihood, problem.data, folds)
        if constant is not None:
            table["constant"], gain = float(constant.mean()), held.z_of(scores - constant)
            said.append(f"constant: the networks predict held-out data better than it by {gain:.1f} standard errors.")
    except (ValueError, RuntimeError) as err:
        said.append(f"constant: none could be scored ({err}).")
    if alike and problem.likelihood.support != REAL:
        advice["one value"] = (
            "all targets are equal, so that nothing was to be learnt and no constant is worse: pass data that have other "
            "targets too, or predict the one value without networks"
        )
    phi, error = held.dispersion(problem.likelihood, folds)
    if phi - 3 * error > 1.1:
        advice["overdispersed"] = (
            f"counts vary {phi:.1f} times as much as the {problem.likelihood.name} likelihood promises, and intervals "
            "are too narrow: pass likelihoods.negative_binomial, whose variance grows as its dispersion= falls"
        )
    for what, x, moments_of in (
        ("inputs", problem.data.inputs, scale.inputs),
        ("targets", problem.likelihood.labels(problem.data.targets), [scale.outputs]),
    ):
        if lost := far_off(x, moments_of):
            advice[f"{what} far off"] = (
                f"of {lost} columns of the {what} the middle half lies within {CRUSHED:g} of a standard deviation, so that the "
                "networks hardly see how they differ: replace codes of missing values (such as -999), take logarithms, or clip"
            )
    problem.members.forget()
    report = Report(
        kind, chosen, said, passes, once, seconds=time.perf_counter() - began, held_out=table, advice=advice
    )
    made = Ensemble(params, buffers, likelihood, factor, report, problem.members, scale)
    if failed is not None:
        why = f"in {failed[0]}: {str(failed[1]).removeprefix(WHO)}"
        raise EnsembleError(f"{WHO}{why}. What was trained before is the error's .ensemble", made) from failed[1]
    if gain < WORSE:
        advised = "".join(f". Its report advises: {text}" for text in advice.values())
        raise EnsembleError(
            f"{WHO}the networks predict held-out data worse than a constant does (log scores {table['ensemble']:.3f} and "
            f"{table['constant']:.3f} nats a datum). If they have not learnt their training data yet, pass more steps=; "
            "if they know them by heart, a larger prior_precision= or a smaller network. The fit is this error's .ensemble"
            f"{advised}",
            made,
        )
    return made


def _said(problem: Problem, trained: Trained, chosen: dict[str, Any], scale: Scale) -> list[str]:
    """A sentence for each choice."""
    said = [
        *[f"standardised: {scale.said} by their moments; predictions are in the data's units."] * bool(scale.said),
        f"training: Adam at {chosen['lr']:g}, {chosen['steps']} steps of {chosen['batch_size']}, each member without one of "
        f"two folds of about {max(map(len, problem.folds))}, and {MORE:g} of them more with all data.",
    ]
    if trained.z is not None:
        better, worse = (FAN_IN, USUAL) if trained.z > 0 else (USUAL, FAN_IN)
        taken = "each member keeps its own" if abs(trained.z) < 1 else f"all take the {better}"
        said.append(
            f"prior: the {better} is better than the {worse} by {abs(trained.z):.1f} standard errors on held-out data: {taken}."
        )
    return said


def _unit(likelihood: Likelihood, data: Data, mean: Any, variance: Any, networks: Members) -> Any:
    """The variance of targets on the real line, ``None`` of others.

    Of residuals, whose targets are all equal, it is the mean square of what untrained networks give.
    """
    if likelihood.support != REAL:
        return None
    own = next(iter(networks.params.values())).dtype
    if bool(((variance > 0) & (variance.sqrt() < COARSE * torch.finfo(own).eps * mean.abs())).any()):
        raise ValueError(
            f"{WHO}targets vary by {float(variance.min().sqrt()):.3g} around {float(mean.abs().max()):.3g}, which outputs in "
            f"{own} cannot tell apart: subtract from the targets what they have in common"
        )
    is_equal, learned = ~(variance > 0), isinstance(getattr(likelihood, "inner", likelihood), LearnedGaussian)
    if (likelihood.has_noise_scale or learned) and bool(is_equal.any()) and not bool(is_equal.all()):
        raise ValueError(
            f"{WHO}an output's targets are all equal, so that there is no noise to find: leave that output out"
        )
    if not likelihood.has_noise_scale:
        variance = torch.where(is_equal, 1.0, variance)
    elif bool(is_equal.all()):
        inputs, targets = data.take(torch.arange(min(256, data.size), device="cpu"))
        errors = (networks.outputs(inputs).detach() - likelihood.labels(targets)).double()
        variance = torch.full_like(variance, errors.square().mean().clamp_min(1e-30))
    dtype = torch.promote_types(batches.flatten(data.targets)[0][0].dtype, torch.get_default_dtype())
    # held-out noise goes down to 1e-6 of it, and squares of what networks err by go up
    if not bool(((variance > 1e6 * torch.finfo(dtype).tiny) & (variance < torch.finfo(dtype).max / 100)).all()):
        raise ValueError(
            f"{WHO}the targets' deviation is {float(variance.max().sqrt()):.3g}, whose square {dtype} cannot hold: pass "
            "targets in other units, or in float64"
        )
    return variance.to(dtype)


@unshared_statistics()
@torch.no_grad()
@torch.random.fork_rng(devices=[])
def _require_targets(networks: Members, data: Data, likelihood: Likelihood) -> torch.Size:
    """The shape of one datum's outputs; raises for outputs and targets that do not belong together, and for data that mix."""
    inputs = data.inputs_of(LEAST)
    with checks.blaming("posterior_ensemble", "data"):
        whole, trained = (networks.outputs(inputs, forward) for forward in (networks.still, networks.training))
    if not (isinstance(whole, Tensor) and whole.shape[:1] == (LEAST,) and getattr(trained, "shape", 0) == whole.shape):
        raise ValueError(
            f"{WHO}in training mode the module returns {checks.short(trained)}, and in eval mode {checks.short(whole)}, for "
            f"{LEAST} data: it must return a tensor [B, *event] of one shape in both, or something with logits that are one"
        )
    if not bool(whole.isfinite().all()):
        raise ValueError(
            f"{WHO}the module's outputs are NaN or infinite before anything is trained: look for logarithms, roots and "
            "divisions in it, mask classes with -1e4 and not with -inf, or compute in float32 what is float16"
        )
    axes = [axis for axis in range(1, whole.ndim) if whole.shape[axis] > 1]  # a single logit may be 1
    adds_up = (bool(((whole.sum(axis) - 1).abs() < 1e-3).all()) for axis in axes)
    if likelihood.has_classes and bool((whole >= 0).all()) and any(adds_up):
        raise ValueError(
            f"{WHO}the module returns probabilities, which add up to 1, where logits are asked for: leave out the softmax at "
            "its end"
        )
    halves = torch.cat([networks.outputs(data.take(rows)[0]) for rows in torch.arange(LEAST, device="cpu").chunk(2)])
    if bool((whole - halves).abs().max() > 0.01 * whole.abs().max()):
        raise ValueError(
            f"{WHO}in eval mode the module's outputs for a datum depend on the other data of its batch, or on chance: give "
            "norms running statistics, have all layers as submodules (in nn.ModuleList, not a list), and draw in training alone"
        )
    likelihood.require(whole[:1].detach().expand(data.size, *whole.shape[1:]), data.targets, wait=True)
    return whole.shape[1:]
