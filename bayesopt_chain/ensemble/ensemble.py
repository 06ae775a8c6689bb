"""What the call returns: networks that predict together, stand as modules or draws, and are kept on disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from bayesopt_chain import batches, checks
from bayesopt_chain.ensemble.data import Scale, require_inputs, with_noise
from bayesopt_chain.ensemble.members import MAKER, Members, described, frozen_of, members_of
from bayesopt_chain.ensemble.report import Report
from bayesopt_chain.ensemble.stages import damage_named
from bayesopt_chain.ensemble.training import Tensors, outputs_of
from bayesopt_chain.likelihoods import Likelihood, Predictive
from bayesopt_chain.modules.functional import arguments_of, as_pair, copied, write_back
from bayesopt_chain.posterior.model import batches_of
from bayesopt_chain.runs import files
from bayesopt_chain.runs.draws import Draws
from bayesopt_chain.runs.run import describe, difference

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
        loop: whether ``vmap`` refuses the network.
    """

    params: Tensors
    buffers: Tensors
    likelihood: Likelihood
    factor: float
    report: Report
    members: Members
    scale: Scale
    loop: bool = False

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
        for batch in batches_of(data, partial(as_pair, module=self.members.still.module)):
            inputs = _inputs(batch)
            with checks.blaming("Ensemble.predict", "data"):
                likelihood, outputs = self._outputs(inputs)
            numbers += outputs.numel() if likelihood.has_classes else 0  # which alone can be added up
            parts.append(likelihood.pooled(outputs) if numbers > MOST_NUMBERS else likelihood.mixture(outputs))
        if not parts:
            raise ValueError("predict: data has no batches")
        return _joined(likelihood, parts)

    def _outputs(self, inputs: Any) -> tuple[Likelihood, Tensor]:
        """The likelihood and the outputs ``[S, n, *event]`` of all draws, as wide as held-out data asked for."""
        params, buffers = ({k: x.flatten(0, 1) for k, x in t.items()} for t in (self.params, self.buffers))
        outputs = outputs_of(self.members.still, params, buffers, inputs, self.loop)
        if outputs.shape[1] != (n := len(batches.flatten(inputs)[0][0])):
            raise ValueError(
                f"predict: the networks return {tuple(outputs.shape[1:])} for {n} data: pass inputs [N, *] (of one x[None])"
            )
        return (self.likelihood, outputs) if self.factor == 1 else self.likelihood.widened(outputs, self.factor)

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
        base, made = self.members.still.module, list[nn.Module]()
        shared = {id(p): p for p in base.parameters() if not p.requires_grad}
        for m in range(next(iter(self.params.values())).shape[1]):
            module = copied(base, dict(shared))
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
            "loop": self.loop,
            "about": _about(self.likelihood, self.members),
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
        if what := difference(state["about"], _about(likelihood, members)):
            raise ValueError(f"Ensemble.open: this is not what was saved: {what}; pass what the call had")
        if state["noise"] is not None:
            likelihood = with_noise(likelihood, state["noise"])
        device = next(iter(members.params.values())).device
        params, buffers = ({k: x.to(device) for k, x in t.items()} for t in (params, buffers))
        return cls(
            params, buffers, likelihood, state["factor"], Report(**state["report"]), members, scale, state["loop"]
        )


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


def _about(likelihood: Likelihood, members: Members) -> dict[str, Any]:
    """What a file says of likelihood and network, to be compared when it is opened."""
    described_likelihood = None if likelihood.has_noise_scale else describe(likelihood)
    return {
        "parameters": {name: list(x.shape[1:]) for name, x in members.params.items()},
        "likelihood": [likelihood.name, described_likelihood],
        "network": described(members.still.module),
        "frozen": describe(frozen_of(members.still.module)),
    }


def _joined(likelihood: Likelihood, parts: list[Predictive]) -> Predictive:
    """One mixture of the data of several; if the draws of one were added up, those of all are."""
    if any(part.mean_entropy is not None for part in parts):
        parts = [likelihood.pooled(cast(Tensor, part.outputs)) if part.mean_entropy is None else part for part in parts]
    whole = likelihood.mixture(torch.cat([cast(Tensor, part.outputs) for part in parts], 1))
    entropies = [part.mean_entropy for part in parts if part.mean_entropy is not None]
    return replace(whole, mean_entropy=torch.cat(entropies)) if entropies else whole


def _inputs(batch: Any) -> Any:
    """The inputs of a batch ``(inputs, targets)``: tensors with the data on axis 0."""
    leaves = batches.flatten(batch[0])[0]
    if not leaves or not all(checks.VALUES.fits(x) and x.ndim for x in leaves):
        raise TypeError(f"predict: data must be tensors with the data on axis 0, got {checks.short(batch[0])}")
    require_inputs("predict", batch[0])
    return batch[0]
