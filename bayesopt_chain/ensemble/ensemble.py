"""What the call returns: members, draws and weights, which predict, go on, and are kept on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bayesopt_chain import kinds
from bayesopt_chain.batches import flatten
from bayesopt_chain.checks import short
from bayesopt_chain.ensemble.data import Data, read, require_inputs
from bayesopt_chain.ensemble.ladder import Sghmc
from bayesopt_chain.ensemble.members import described, members_of
from bayesopt_chain.ensemble.problem import FEW, Level, Problem, level_of
from bayesopt_chain.ensemble.progress import Progress
from bayesopt_chain.ensemble.report import Report
from bayesopt_chain.ensemble.stages import checksum, read_or_refuse
from bayesopt_chain.likelihoods import Likelihood, Predictive
from bayesopt_chain.posterior.batches import as_pair
from bayesopt_chain.posterior.predictions import batches_of
from bayesopt_chain.runs import files
from bayesopt_chain.runs.describe import describe, difference
from bayesopt_chain.runs.draws import Draws

FORMAT = 2
# what a file has
KEYS = {"levels", "weights", "factor", "report", "noise", "prior_precision", "batch_size", "seed"}
KEYS |= {"format", "likelihood", "network", "frozen"}

WHAT = {"likelihood": "likelihood", "network": "network", "frozen": "network, its frozen parameters differ,"}


@dataclass(frozen=True)
class Ensemble:
    """A posterior as draws of several networks, in levels with weights; made by :func:`bayesopt_chain.posterior_ensemble`.

    Attributes:
        levels: draws ``[S, M, *]`` of each level: the modes first, then one level a temperature.
        weights: of the levels, ``[J]``; draws and members of a level share its weight equally.
        factor: on the noise's variance, or dividing the logits.
        likelihood: of training; :meth:`predict` widens it by ``factor``.
        report: what was done; ``print(ensemble.report)``.
        problem: the network, the data and the energy; without data where it was opened from disk without.
    """

    levels: Sequence[Level]
    weights: Tensor
    factor: float
    likelihood: Likelihood
    report: Report
    problem: Problem

    @kinds.takes(data=kinds.DATA)
    def predict(self, data: Any) -> Predictive:
        """The predictive distribution of new targets.

        Args:
            data: a tensor of inputs ``[N, *]``; one batch, a tuple ``(inputs, targets)`` or a mapping; or an iterable of
                batches, such as a DataLoader. Targets are not read.

        Returns:
            :class:`bayesopt_chain.likelihoods.Predictive`: mean, variance, quantile, interval, probabilities, log_prob, crps,
            aleatoric, epistemic.

        Raises:
            ValueError: no batches.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> x = torch.linspace(-1, 1, 20)[:, None]
            >>> noise = bc.likelihoods.gaussian()
            >>> kept = {"members": 2, "steps": 20, "lr": 0.01, "progress": False}
            >>> e = bc.posterior_ensemble(torch.nn.Linear(1, 1), (x, 2 * x), noise, method="ensemble", **kept)
            >>> e.predict(torch.zeros(3, 1)).quantile(0.9).shape
            torch.Size([3, 1])
        """
        with kinds.blaming("Ensemble.predict", "data"):
            parts = [self._outputs(_inputs(batch)) for batch in batches_of(data)]
        if not parts:
            raise ValueError("predict: data has no batches")
        outputs = torch.cat(parts, 1)
        likelihood = self.likelihood
        if self.factor != 1:
            likelihood, outputs = likelihood.widened(outputs, self.factor)
        return likelihood.mixture(outputs, self.log_weights.to(outputs.device))

    @property
    def log_weights(self) -> Tensor:
        """Of every draw of every member, in the order of :meth:`draws`, ``[S]``; their exponentials sum to 1."""
        sizes = [len(level.loss) * level.loss.shape[1] for level in self.levels]
        return torch.cat([torch.full((n,), float(w) / n, device="cpu").log() for n, w in zip(sizes, self.weights)])

    @kinds.takes(level=kinds.INDEX)
    def draws(self, level: int = -1) -> Draws:
        """The draws of one level, its members as chains, for diagnostics.

        Args:
            level: its number. Default: the hottest.

        Returns:
            :class:`bayesopt_chain.Draws` in memory, ``[S, M, *]``.

        Raises:
            ValueError: there is no such level.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> x = torch.linspace(-1, 1, 20)[:, None]
            >>> noise = bc.likelihoods.gaussian()
            >>> kept = {"members": 2, "steps": 20, "lr": 0.01, "progress": False}
            >>> e = bc.posterior_ensemble(torch.nn.Linear(1, 1), (x, 2 * x), noise, method="ensemble", **kept)
            >>> e.draws(0).params["weight"].shape
            torch.Size([1, 2, 1, 1])
        """
        if not -len(self.levels) <= level < len(self.levels):
            raise ValueError(f"draws: level must be below {len(self.levels)}, the number of levels, got {level}")
        mine = self.levels[level]
        trees = [{k: x[i] for k, x in mine.params.items()} for i in range(len(mine.loss))]
        made = Draws.from_trees(trees, chains=mine.loss.shape[1])
        return made.with_buffers(mine.buffers) if mine.buffers else made

    @kinds.takes()
    def more(self, steps: int) -> Ensemble:
        """More draws of the hottest level, from where its chains stand.

        The chains begin with velocities at rest, and the first ``3 / (1 - momentum)`` of the steps are not kept.

        Args:
            steps: of every member, more than those.

        Returns:
            Another ensemble; this one stays as it is.

        Raises:
            ValueError: there are no draws at T > 0, no data (:meth:`open` with ``data=``), or too few steps.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> x = torch.linspace(-1, 1, 20)[:, None]
            >>> kept = {"members": 2, "steps": 20, "lr": 0.01, "progress": False}
            >>> e = bc.posterior_ensemble(torch.nn.Linear(1, 1), (x, 2 * x), bc.likelihoods.gaussian(), **kept)
            >>> e.more(60).levels[-1].loss.shape > e.levels[-1].loss.shape
            True
        """
        about = self.report.levels[-1]
        if len(self.levels) < 2 or "lr" not in self.report.chosen:
            raise ValueError(
                "more: there are no draws at T > 0, so that nothing can go on: the members are a deep ensemble (see "
                "report.advice), train longer with more steps"
            )
        problem, last = self.problem, self.levels[-1]
        if not problem.data.size:
            raise ValueError("more: this ensemble was opened without its data: Ensemble.open(..., data=data)")
        rates, mu = torch.tensor(self.report.chosen["rates"], device="cpu"), self.report.chosen["momentum"]
        rest = round(3 / (1 - mu))
        if steps <= rest:
            raise ValueError(
                f"more: steps={steps}: pass more than {rest}, which the velocities take to come up to temperature"
            )
        params, buffers = last.last()
        n = problem.data.size
        drawn = problem.run(
            Sghmc(mu, about["temperature"] / n),
            params,
            buffers,
            held_out=False,
            steps=steps,
            burn_in=rest,
            thinning=max(1, (steps - rest) // 10),
            likelihood=self._in_force(),
            still=True,
            full=n <= FEW,
            each={"lr": rates},
            seed=1000 + len(last.loss),
        )
        if not drawn.complete:
            raise ValueError(f"more: the chains diverged ({drawn.why}); the ensemble stays as it is")
        new = level_of(drawn, buffers)
        both = Level(
            {k: torch.cat([x, new.params[k]]) for k, x in last.params.items()},
            {k: torch.cat([x, new.buffers[k]]) for k, x in last.buffers.items()},
            torch.cat([last.loss, new.loss]),
        )
        return replace(self, levels=[*self.levels[:-1], both])

    @kinds.takes(path=kinds.PATH)
    def save(self, path: str | Path) -> None:
        """Write the ensemble to one safetensors file with checksums, without module, likelihood and data.

        Args:
            path: of the file; it is replaced in one move.

        Raises:
            OSError: it cannot be written.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> x = torch.linspace(-1, 1, 20)[:, None]
            >>> noise = bc.likelihoods.gaussian()
            >>> kept = {"members": 2, "steps": 20, "lr": 0.01, "progress": False}
            >>> e = bc.posterior_ensemble(torch.nn.Linear(1, 1), (x, 2 * x), noise, method="ensemble", **kept)
            >>> import tempfile, pathlib
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     e.save(pathlib.Path(folder) / "e.safetensors")
            ...     again = bc.ensemble.Ensemble.open(pathlib.Path(folder) / "e.safetensors", torch.nn.Linear(1, 1), noise)
            >>> torch.equal(again.predict(x).mean, e.predict(x).mean)
            True
        """
        noise = getattr(getattr(self.likelihood, "inner", self.likelihood), "variance_of_noise", None)
        state = {
            "format": FORMAT,
            "levels": [level.saved() for level in self.levels],
            "weights": self.weights,
            "factor": self.factor,
            "report": asdict(self.report),
            "noise": noise,
            "prior_precision": self.problem.prior_precision,
            "batch_size": self.problem.batch_size,
            "seed": self.problem.seed,
            "likelihood": [self.likelihood.name, None if noise is not None else describe(self.likelihood)],
            "network": described(self.problem.members.still.module),
            "frozen": checksum(self.problem.members.frozen()),
        }
        files.write_tree(Path(path), state)

    @classmethod
    @kinds.takes(path=kinds.PATH, make_model=kinds.NETWORKS, likelihood=kinds.LIKELIHOOD, data=kinds.ANY)
    def open(
        cls,
        path: str | Path,
        make_model: nn.Module | Callable[[], nn.Module],
        likelihood: Likelihood,
        *,
        data: Any = None,
    ) -> Ensemble:
        """The ensemble that :meth:`save` wrote.

        Args:
            path: of the file.
            make_model: as the call had it.
            likelihood: as the call had it.
            data: as the call had them, for :meth:`more`, on the device to work on. Default: none, and the networks stay on the
                device that ``make_model`` makes them on.

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
        if not os.path.isfile(path):
            raise FileNotFoundError(f"Ensemble.open: path {str(path)!r} is no file; pass what save wrote")
        state = read_or_refuse(Path(path), lambda file: files.read_tree(file, torch.device("cpu")), "save it again")
        if not isinstance(state, dict) or not state.keys() >= KEYS:
            raise ValueError(f"Ensemble.open: {path} was not written by Ensemble.save")
        if state["format"] != FORMAT:
            raise ValueError(f"Ensemble.open: {path} has format {state.get('format')!r}, this version reads {FORMAT}")
        levels, weights = [Level(**level) for level in state["levels"]], state["weights"]
        if weights.shape != (len(levels),) or not (weights >= 0).all() or not abs(float(weights.sum()) - 1) < 1e-3:
            raise ValueError(f"Ensemble.open: {path} has weights {short(weights.tolist())} for {len(levels)} levels")
        count = levels[0].loss.shape[1]
        held = Data(None, None, 0) if data is None else read(data)[0]
        device = None if data is None else flatten(held.inputs)[0][0].device
        members = members_of(make_model, count, state["seed"], device)
        held, _ = held.of(members.still.module)
        levels = [level.to(next(iter(members.params.values())).device) for level in levels]
        mine = {k: tuple(x.shape[1:]) for k, x in members.params.items()}
        theirs = {k: tuple(x.shape[2:]) for k, x in levels[0].params.items()}
        if mine != theirs:
            wrong = sorted(k for k in {*mine, *theirs} if mine.get(k) != theirs.get(k))
            raise ValueError(
                f"Ensemble.open: make_model makes other parameters than the file's: {', '.join(wrong[:4])}"
            )
        given = {
            "likelihood": [likelihood.name, None if state["noise"] is not None else describe(likelihood)],
            "network": described(members.still.module),
            "frozen": checksum(members.frozen()),
        }
        for name, mine in given.items():
            if what := difference({name: state[name]}, {name: mine}):
                raise ValueError(
                    f"Ensemble.open: this is not the {WHAT[name]} that was saved: {what}; pass what the call had"
                )
        if state["noise"] is not None:
            likelihood = likelihood.scaled(_noise(likelihood) / state["noise"])
        problem = Problem(
            held,
            likelihood,
            members,
            count,
            state["batch_size"],
            state["prior_precision"],
            [],
            state["seed"],
            Progress(0, False),
        )
        problem = problem if data is None else problem.vmappable()
        report = Report(**state["report"])
        return cls(levels, weights, state["factor"], likelihood, report, problem)

    @kinds.takes(level=kinds.INDEX)
    def to_arviz(self, level: int = -1, **names: Any) -> Any:
        """The draws of one level as ArviZ inference data, its members as chains (needs the extra ``diagnostics``).

        Args:
            level: its number. Default: the hottest.
            names: as for :meth:`bayesopt_chain.Draws.to_arviz`, its ``log_likelihood`` included.

        Returns:
            ``arviz.InferenceData``.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> x = torch.linspace(-1, 1, 20)[:, None]
            >>> noise = bc.likelihoods.gaussian()
            >>> kept = {"members": 2, "steps": 20, "lr": 0.01, "progress": False}
            >>> e = bc.posterior_ensemble(torch.nn.Linear(1, 1), (x, 2 * x), noise, method="ensemble", **kept)
            >>> dict(e.to_arviz(0).posterior.sizes)["chain"]
            2
        """
        return self.draws(level).to_arviz(**names)

    def _outputs(self, inputs: Any) -> Tensor:
        problem = self.problem
        return torch.cat([problem.outputs(level, inputs) for level in self.levels])

    def _in_force(self) -> Likelihood:
        """The likelihood that the chains sample under."""
        if not self.likelihood.has_noise_scale:
            return self.likelihood
        return self.likelihood.scaled(1 / self.report.chosen["noise factor"])


def _inputs(batch: Any) -> Any:
    """The inputs of a batch: tensors with the data on axis 0."""
    inputs = as_pair(batch)[0]
    leaves = flatten(inputs)[0]
    if not leaves or not all(kinds.VALUES.fits(x) and x.ndim for x in leaves):
        raise TypeError(f"predict: data must be tensors with the data on axis 0, got {short(inputs)}")
    require_inputs("predict", inputs)
    return inputs


def _noise(likelihood: Likelihood) -> Any:
    inner: Any = getattr(likelihood, "inner", likelihood)
    return inner.variance_of_noise
