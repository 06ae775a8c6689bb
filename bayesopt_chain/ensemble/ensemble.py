"""What the call returns: networks that predict together, stand as modules or draws, and are kept on disk, with a report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from bayesopt_chain import checks
from bayesopt_chain.data.epochs import columns
from bayesopt_chain.ensemble.data import Scale, require_inputs, with_noise
from bayesopt_chain.ensemble.members import MAKER, Members, copy_of, described, members_of
from bayesopt_chain.ensemble.stages import damage_named
from bayesopt_chain.ensemble.training import Tensors, outputs_of
from bayesopt_chain.likelihoods import Likelihood, Predictive
from bayesopt_chain.modules import arguments_of, as_pair, write_back
from bayesopt_chain.posterior.model import batches_of
from bayesopt_chain.runs import files
from bayesopt_chain.runs.draws import Draws
from bayesopt_chain.runs.run import difference

FORMAT = 6
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
        lines = [
            f"{self.kind[0].upper()}{self.kind[1:]}.",
            "",
            "Chosen: " + ", ".join(f"{k}={_short(v)}" for k, v in self.chosen.items()),
            "",
            *(f"* {sentence}" for sentence in self.said),
            "",
            "Held-out log score, nats a datum:",
            *(f"  {name:<28} {value:.4f}" for name, value in self.held_out.items()),
            "",
            f"Cost: {sum(self.passes.values()):.4g} passes over the data for each member, {self.cost:.2f} times one training, "
            f"in {self.seconds:.3g} s ({shares})",
            *(f"Advice ({name}): {text}" for name, text in self.advice.items()),
        ]
        return "\n".join(lines)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


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
                outputs = outputs_of(self.members, params, buffers, inputs)
            if outputs.shape[1] != n:
                raise ValueError(
                    f"predict: the networks return {tuple(outputs.shape[1:])} for {n} data: pass inputs [N, *] (of one x[None])"
                )
            if self.factor != 1:
                likelihood, outputs = self.likelihood.widened(outputs, self.factor)
            numbers += outputs.numel() if likelihood.has_classes else 0  # which alone can be added up
            parts.append(likelihood.pooled(outputs) if numbers > MOST_NUMBERS else likelihood.mixture(outputs))
        if not parts:
            raise ValueError("predict: data has no batches")
        return _joined(likelihood, parts)

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
        return made.with_buffers(self.buffers) if self.buffers else made

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
            last = ({k: x[-1, m] for k, x in t.items()} for t in (self.params, self.buffers))
            write_back(module, *last)
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
        state = {
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
        }
        files.write_tree(Path(path), state)

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
        with damage_named("Ensemble.open", "save it again"):
            state = files.read_tree(Path(path), torch.device("cpu"))
        if not isinstance(state, dict) or state.keys() != KEYS or state["format"] != FORMAT:
            raise ValueError(f"Ensemble.open: {path} was not written by Ensemble.save of this version")
        params, buffers = state["params"], state["buffers"]
        scale = Scale(*state["scale"])
        count = next(iter(params.values())).shape[1]
        members = members_of(make_model, count, state["seed"], None, state["inputs"]).within(scale)
        if what := difference(state["about"], described(members, likelihood)):
            raise ValueError(f"Ensemble.open: this is not what was saved: {what}; pass what the call had")
        if state["noise"] is not None:
            likelihood = with_noise(likelihood, state["noise"])
        device = next(iter(members.params.values())).device
        params, buffers = ({k: x.to(device) for k, x in t.items()} for t in (params, buffers))
        members = members._replace(loop=state["loop"])
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


def _joined(likelihood: Likelihood, parts: list[Predictive]) -> Predictive:
    """One mixture of the data of several; if the draws of one were added up, those of all are."""
    if any(part.mean_entropy is not None for part in parts):
        parts = [likelihood.pooled(cast(Tensor, part.outputs)) if part.mean_entropy is None else part for part in parts]
    whole = likelihood.mixture(torch.cat([cast(Tensor, part.outputs) for part in parts], 1))
    entropies = [part.mean_entropy for part in parts if part.mean_entropy is not None]
    return replace(whole, mean_entropy=torch.cat(entropies)) if entropies else whole
