r"""A posterior over the adapters of a language model, in one call.

The loss is the mean over the ``N`` tokens that count (:mod:`bayesopt_chain.lora.loss`), the temperature ``T = 1 / N``, and the
prior of an adapter's tensor normal of mean 0 and precision ``lambda``, that is weight decay ``lambda / N``:

    exp(-N L(theta) - sum_j lambda_j |theta_j|^2 / 2)

An adapter computes ``(alpha / r) B A x``. PEFT starts ``A`` uniform of variance ``1 / (3 fan_in)`` and ``B`` at 0, so that a
precision of 1 on both is 3 fan_in times wider than where ``A`` begins. Which prior holds is decided by held-out data: every
candidate of :data:`PRIORS` trains one adapter, half as long as a member, on four fifths of the sequences; the smallest loss on
the rest wins.

A task that comes behind another one has the posterior ``N(m, Lambda^-1)`` of that one as its prior: ``prior=`` puts
``(theta - m)^T Lambda (theta - m) / 2`` in the place of ``sum_j lambda_j |theta_j|^2 / 2``, and every member begins at ``m``.

Each method takes the same number of minibatch gradients in all, those of the candidates among them:

    ensemble   members adapters, each from a start of its own, trained by Adam
    sghmc      members chains: half of a member's gradients by Adam, half by SGHMC at T, whose draws are kept
    ivon       one diagonal Gaussian (Shen et al., 2024), and draws from it
    laplace    one adapter by Adam, and draws of its Kronecker-factored Laplace posterior, linearised
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesopt_chain import checks, likelihoods, optim
from bayesopt_chain.ensemble.data import Data, read
from bayesopt_chain.ensemble.stages import CALL, Stages
from bayesopt_chain.lora.adapters import (
    ABOUT,
    MEAN,
    Adapters,
    AnswerReader,
    adapters,
    holding,
    logits_over,
    read_adapter,
    read_posterior,
    write_adapter,
    write_posterior,
)
from bayesopt_chain.lora.loss import largest_label, require_known, summed_loss
from bayesopt_chain.modules import LEFT_OUT, arguments_of, in_mode, inner_of, logits_of, reset_adapters, write_back
from bayesopt_chain.posterior.fit import fit_laplace
from bayesopt_chain.posterior.gaussian import Gaussian, posterior_of
from bayesopt_chain.precision import Kronecker
from bayesopt_chain.runs import files
from bayesopt_chain.runs.run import describe
from bayesopt_chain.trees import require_like

EPOCHS = 4  # of each member, where the gradients are not given
HELD_OUT = 5  # a fifth of the sequences decides on the prior
LEARNING_RATES = {"ensemble": 3e-3, "sghmc": 0.05, "ivon": 0.3, "laplace": 3e-3}


class Prior(NamedTuple):
    """Precisions of the factors of an adapter: ``a`` in units of one over the variance that ``A`` starts with, or absolute."""

    a: float
    b: float
    of_start: bool = True

    def precision(self, name: str, p: Tensor) -> float:
        """Of a parameter; one that belongs to no adapter has ``b``."""
        if "lora_A" not in name and "lora_embedding_A" not in name:
            return self.b
        return self.a * 3 * p.shape[-1] if self.of_start else self.a


PRIORS = {
    "1 on both": Prior(1.0, 1.0, of_start=False),
    "A as it starts, 1 on B": Prior(1.0, 1.0),
    "A as it starts, 100 on B": Prior(1.0, 100.0),
}


@checks.takes(
    method=checks.one_of(*LEARNING_RATES),
    members=checks.WHOLE,
    draws=checks.WHOLE,
    batch_size=checks.WHOLE,
    prior_precision=checks.Kind(
        lambda x: x == "held out" or checks.POSITIVE.fits(x), "a positive number, or 'held out'", (Real, str)
    ),
    prior=checks.instance(Gaussian, "a Gaussian, such as adapters.posterior"),
    answers=checks.Kind(
        lambda x: isinstance(x, (list, tuple)) and len(set(x)) == len(x) >= 2 and all(map(checks.SEED.fits, x)),
        "a list of at least two different tokens",
        (list, tuple),
    ),
    mesh=checks.ANY,
)
def bayesian_lora(
    model: nn.Module,
    data: Any,
    *,
    method: str = "ensemble",
    members: int = 4,
    draws: int = 8,
    steps: int | None = None,
    batch_size: int = 16,
    lr: float | None = None,
    prior_precision: float | str = "held out",
    prior: Gaussian | None = None,
    answers: list[int] | None = None,
    path: str | Path | None = None,
    seed: int = 0,
    mesh: Any = None,
) -> Adapters:
    """Sample the adapters of a model; the base is neither copied nor cast, and the model ends as it was.

    Args:
        model: of PEFT, with a causal language model as its base. Everything that asks for gradients is sampled.
        data: a mapping of tensors ``[S, T]`` with ``labels`` (unshifted, -100 where a token does not count), a Dataset, a
            DataLoader or a list of such batches, padded to one length.
        method: "ensemble" (default), "sghmc", "ivon" or "laplace".
        members: adapters of the ensemble, or chains. Default 4.
        draws: of all chains together, or of the Gaussian of "ivon" and "laplace". Default 8. An ensemble has one a member.
        steps: minibatch gradients in all, those that decide on the prior included. Default: four epochs for each member.
        batch_size: sequences in a minibatch. Default 16.
        lr: of Adam ("ensemble", "laplace"; default 0.003), of SGHMC (0.05; its first half is Adam's) or of IVON (0.3).
        prior_precision: of all sampled parameters, a number; by default decided by held-out sequences (see the module).
        prior: a Gaussian over the sampled parameters in the place of ``prior_precision``: ``posterior`` of the last task's
            :class:`Adapters`, made by "laplace", which asks it of that structure itself. Default: none.
        answers: the tokens that are possible answers, at least two. Then only targets among them count, and predictions are
            over them alone: multiple choice. Default: every token.
        path: a folder in which finished draws are kept as adapters of PEFT; the same call goes on there after a kill, and one
            with other arguments or data is refused.
        seed: of starts, batches, dropout and noise. Default 0.
        mesh: a DeviceMesh of one axis whose ranks share out the members of "ensemble" or "sghmc". Every rank makes the same
            call with all data, and gets all draws, bit for bit those of one process where the ranks compute alike. Default:
            one process; under ``torchrun`` each rank then makes a call of its own, with a folder of its own under ``path``.

    Returns:
        :class:`Adapters`: ``predict``, ``nll``, ``save_adapters``, ``report`` with what was chosen and what it cost, and
        ``posterior``.

    Raises:
        TypeError: no module; a prior that is no Gaussian, or of another structure than "laplace" asks for.
        ValueError: arguments out of range; no trained parameters; labels that are no tokens of the model; fewer than ten
            sequences for a prior that held-out ones decide on; a prior over other parameters; a folder of another call; a mesh
            for one Gaussian, or of more ranks than members.

    Example:
        >>> import torch; from bayesopt_chain import lora
        >>> model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5))  # in the place of a PEFT model
        >>> tokens = torch.arange(60).reshape(12, 5) % 5
        >>> data = {"input": tokens, "labels": (tokens + 1) % 5}   # targets by position: this model moves no labels
        >>> lora.bayesian_lora(model, data, method="sghmc", members=2, draws=6, steps=40)
        Adapters(6 draws of 3 tensors; method=sghmc, prior=..., gradients=..., tokens=60, T=1/60)
    """
    problem = _problem(model, data, answers, batch_size, seed, prior)
    count = members if method in ("ensemble", "sghmc") else 1
    steps = EPOCHS * count * -(-problem.data.size // problem.batch_size) if steps is None else steps
    if prior is not None and prior_precision != "held out":
        raise ValueError(
            "bayesian_lora: pass one of prior and prior_precision: a Gaussian prior has precisions of its own"
        )
    if prior is not None and method == "laplace" and not isinstance(prior.undecomposed, Kronecker):
        raise TypeError(
            "bayesian_lora: method='laplace' adds its Kronecker factors to those of prior, which has none: pass the posterior "
            "of another 'laplace' call"
        )
    if mesh is not None and method not in ("ensemble", "sghmc"):
        raise ValueError(
            f"bayesian_lora: mesh shares out members, and method={method!r} has one Gaussian: leave mesh out"
        )
    decides = prior_precision == "held out" and prior is None
    if decides and problem.data.size < 2 * HELD_OUT:
        raise ValueError(
            f"bayesian_lora: {problem.data.size} sequences are too few to decide on the prior: pass prior_precision=, a number"
        )
    given: dict[str, Any] = {
        "method": method,
        "members": count,
        "draws": draws,
        "steps": steps,
        "seed": seed,
        "lr": lr,
        "batch_size": problem.batch_size,
        "prior_precision": prior_precision,
        "data": describe([problem.data.inputs, problem.data.targets]),
        "answers": problem.answers,
        **({} if prior is None else {"prior": describe(prior)}),
    }
    kept = _Kept(problem, path, given, mesh)
    if kept.is_done:
        return kept.result()
    # a candidate takes half as many gradients as a member
    each = max(2, int(steps / (count + len(PRIORS) / 2))) if decides else max(2, steps // count)
    losses = kept.once("losses", lambda: kept.of_first(problem.held_out_losses, each // 2)) if decides else {}
    name = min(losses, key=losses.get) if losses else f"{prior_precision} on both"  # pyright: ignore[reportCallIssue, reportArgumentType]
    if prior is not None:
        name, precisions = "given", Prior(0.0, 0.0, of_start=False)
    else:
        precisions = PRIORS[name] if losses else Prior(float(prior_precision), float(prior_precision), of_start=False)
    lr = LEARNING_RATES[method] if lr is None else lr
    with holding(model, {}):
        if method in ("ensemble", "sghmc"):
            per = 1 if method == "ensemble" else -(-draws // members)
            for k in kept.mine:
                kept.member(k, per, lambda k=k: problem.member(method, k, each, per, lr, precisions))
        else:
            kept.member(0, draws, lambda: problem.gaussian(method, each, draws, lr, precisions))
    return kept.finish(
        {
            "method": method,
            "prior": name,
            "held-out losses": losses,
            "gradients": each * count + (each // 2) * len(losses),
            "tokens": problem.tokens,
            "T": f"1/{problem.tokens}",
        }
    )


def _problem(
    model: Any, data: Any, answers: list[int] | None, batch_size: int, seed: int, prior: Gaussian | None
) -> _Problem:
    model = inner_of(model)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            "bayesian_lora: no parameter of the model asks for a gradient: pass a PEFT model with its adapter on"
        )
    batch, _ = read(data, least=1, who="bayesian_lora")
    if not isinstance(batch, Mapping):
        raise ValueError("bayesian_lora: data has no labels: pass mappings with input_ids and labels")
    possible = None if answers is None else [*map(int, answers)]
    inputs, targets = AnswerReader(model, possible)(batch)
    if targets.is_floating_point():
        raise TypeError(f"bayesian_lora: labels are {targets.dtype}: pass numbers of tokens, int64")
    if targets.ndim != 2:
        raise ValueError(
            f"bayesian_lora: labels are {tuple(targets.shape)}: pass one a token, [S, T], such as a DataLoader makes of single "
            "sequences; for one label a sequence take posterior_ensemble"
        )
    targets = targets.long()
    if not bool((targets != LEFT_OUT).any()):
        raise ValueError("bayesian_lora: no label of data counts: all are -100, the first of a sequence, or no answer")
    if prior is not None:
        own = {name: p for name, p in model.named_parameters() if p.requires_grad}
        require_like(prior.mean, own, "bayesian_lora: prior")
        prior = prior.factorised()
    size = len(targets)
    return _Problem(model, Data(inputs, targets, size), possible, min(batch_size, size), seed, prior)


@dataclass(frozen=True)
class _Problem:
    """Model and data, and how an adapter is trained or sampled; :meth:`member` and :meth:`gaussian` give draws ``[k, *]``."""

    model: nn.Module
    data: Data
    answers: list[int] | None
    batch_size: int
    seed: int
    prior: Gaussian | None

    @cached_property
    def tokens(self) -> int:
        return int((self.data.targets != LEFT_OUT).sum())

    @cached_property
    def largest(self) -> int:
        return max(self.answers) if self.answers else largest_label("bayesian_lora", self.data.targets)

    @cached_property
    def named(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def params(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.named.items()}

    @contextmanager
    def started(self, k: int) -> Iterator[None]:
        """The model at the start of member ``k``, and all that draws inside from a stream of its own, dropout too.

        It starts where PEFT does, parameters outside of adapters where the model has them; or at the mean of the prior.
        """
        with torch.random.fork_rng(devices={p.get_device() for p in self.named.values() if p.is_cuda}):
            torch.manual_seed(1000 * self.seed + k)
            for layer in self.model.modules():
                reset_adapters(layer)
            write_back(self.model, {} if self.prior is None else self.prior.mean)
            yield

    def groups(self, precisions: Prior) -> list[dict[str, Any]]:
        """Parameter groups with the prior as weight decay."""
        return [
            {"params": [(name, p)], "weight_decay": precisions.precision(name, p) / self.tokens}
            for name, p in self.named.items()
        ]

    def batches(self, rows: Tensor, k: int) -> Iterator[Tensor]:
        """Rows of minibatches, in reshuffled epochs without end."""
        generator, b = torch.Generator().manual_seed(1000 * self.seed + k), min(self.batch_size, len(rows))
        while True:
            order = rows[torch.randperm(len(rows), generator=generator, device="cpu")]
            yield from order[: len(order) // b * b].split(b)

    def loss(self, rows: Tensor, mean_tokens: float) -> Tensor:
        """Of a minibatch, as :mod:`bayesopt_chain.lora.loss` defines it, and of a Gaussian prior."""
        inputs, targets = self.data.take(rows)
        arguments, keywords = arguments_of(self.model, inputs)
        logits = logits_of(self.model(*arguments, **keywords))
        require_known("bayesian_lora", self.largest, logits)
        value = summed_loss(logits if self.answers is None else logits[..., self.answers], targets) / (
            len(rows) * mean_tokens
        )
        if self.prior is None:
            return value
        moved = {name: p - self.prior.mean[name] for name, p in self.named.items()}
        return value + self.prior.precision.quad(moved) / (2 * self.tokens)

    def run(
        self,
        optimizer: Any,
        batches: Iterator[Tensor],
        steps: int,
        mean_tokens: float,
        *,
        cycle: bool = True,
        then: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Take steps; ``cycle``: along a one-cycle rate; ``then(step)`` is called behind each, counted from 1."""
        schedule = None
        if cycle:
            schedule = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, [group["lr"] for group in optimizer.param_groups], max(2, steps), cycle_momentum=False
            )
        sampled: Any = getattr(optimizer, "sampled", nullcontext)
        try:
            with in_mode(self.model, training=True):
                for step in range(1, steps + 1):
                    optimizer.zero_grad()
                    with sampled(), torch.enable_grad():
                        self.loss(next(batches), mean_tokens).backward()
                    optimizer.step()
                    if schedule is not None and step < steps:
                        schedule.step()
                    then(step)
        finally:
            optimizer.zero_grad()
        if not all(bool(p.isfinite().all()) for p in self.named.values()):
            raise ValueError(
                "bayesian_lora: training diverged: pass a smaller lr=, or have adapters in float32 where they are float16"
            )

    def train(self, k: int, steps: int, lr: float, precisions: Prior, rows: Tensor) -> Iterator[Tensor]:
        """Train the member that was started by Adam on these rows, in the model; returns the batches that come next."""
        batches = self.batches(rows, k)
        self.run(optim.Adam(self.groups(precisions), lr, temperature=0.0), batches, steps, self.tokens / self.data.size)
        return batches

    def held_out_losses(self, steps: int) -> dict[str, float]:
        """By candidate prior: the loss of held-out sequences, nats a token, of an adapter trained without them."""
        order = torch.randperm(self.data.size, generator=torch.Generator().manual_seed(self.seed), device="cpu")
        held, rest = order[: self.data.size // HELD_OUT], order[self.data.size // HELD_OUT :]
        if not bool((self.data.targets[held] != LEFT_OUT).any()):
            raise ValueError(
                f"bayesian_lora: of the {len(held)} sequences that decide on the prior no label counts: leave sequences "
                "without labels out, or pass prior_precision=, a number"
            )
        losses = {}
        with holding(self.model, {}):
            for name, precisions in PRIORS.items():
                with self.started(0):
                    self.train(0, steps, LEARNING_RATES["ensemble"], precisions, rest)
                one = Adapters(self.model, {n: x[None] for n, x in self.params().items()}, answers=self.answers)
                losses[name] = one.nll_of([self.data.take(held)])
        return losses

    def member(self, method: str, k: int, steps: int, count: int, lr: float, precisions: Prior) -> dict[str, Tensor]:
        """The draws of one member: its trained adapter, or what its chain leaves."""
        every = torch.arange(self.data.size, device="cpu")
        with self.started(k):
            if method == "ensemble":
                self.train(k, steps, lr, precisions, every)
                return {name: x[None] for name, x in self.params().items()}
            batches = self.train(k, steps - steps // 2, LEARNING_RATES["ensemble"], precisions, every)
            generator = torch.Generator().manual_seed(1000 * self.seed + k)
            chain = optim.SGHMC(self.groups(precisions), lr, temperature=1 / self.tokens, generator=generator)
            apart, found = max(1, steps // 2 // count), []
            keep = lambda step: found.append(self.params()) if step % apart == 0 else None  # noqa: E731
            self.run(chain, batches, apart * count, self.tokens / self.data.size, cycle=False, then=keep)
        return {name: torch.stack([one[name] for one in found]) for name in found[0]}

    def gaussian(self, method: str, steps: int, count: int, lr: float, precisions: Prior) -> dict[str, Any]:
        """Draws of one Gaussian: of IVON, or of the Laplace ``posterior`` around a trained adapter."""
        every, generator = torch.arange(self.data.size, device="cpu"), torch.Generator().manual_seed(self.seed)
        with self.started(0):
            if method == "ivon":
                settings = {"betas": (0.9, 1 - min(0.5, 5 / steps)), "init_hessian": 0.1, "clip_radius": 0.01}
                ivon = optim.IVON(
                    self.groups(precisions), lr, temperature=1 / self.tokens, generator=generator, **settings
                )
                self.run(ivon, self.batches(every, 0), steps, self.tokens / self.data.size)
                found = []
                for k in range(count):
                    with ivon.sampled(draw=k):
                        found.append(self.params())
                return {name: torch.stack([one[name] for one in found]) for name in found[0]}
            self.train(0, steps, lr, precisions, every)
            posterior = self.laplace(precisions)
        return {"posterior": posterior, **posterior.sample((count,), generator=generator)}

    def laplace(self, precisions: Prior) -> Gaussian:
        """The Laplace posterior, of Kronecker factors, around the model's parameters."""
        mean, every = self.params(), torch.arange(self.data.size, device="cpu")
        with in_mode(self.model, training=False):
            fitted = fit_laplace(
                self.model,
                likelihoods.categorical(),
                [self.data.take(rows) for rows in every.split(self.batch_size)],
                subset="all",
                structure="kronecker",
                curvature="ggn" if self.answers else "fisher",
                tune=None,
                prior_precision={n: p.new_tensor(precisions.precision(n, p) or 1.0) for n, p in mean.items()},
                outputs=logits_over(self.answers),
            )
        if self.prior is None:
            return fitted.posterior
        return posterior_of(fitted.seen.precision, mean, prior=self.prior)


class _Kept(Stages):
    """Draws as they are made, in memory or in a folder in which the same call goes on.

    The folder has ``call.safetensors`` (the arguments and a description of the data), ``losses.safetensors`` once the prior is
    decided, an adapter of PEFT for each draw, and at the end what :func:`bayesopt_chain.lora.adapters` reads. Of several ranks
    each writes the draws of its own members, and the first one all else.
    """

    who = "bayesian_lora"

    def __init__(self, problem: _Problem, path: str | Path | None, given: Mapping[str, Any], mesh: Any) -> None:
        self.problem, self.draws = problem, list[dict[str, Tensor]]()
        self.posterior: Gaussian | None = None
        super().__init__(path, given, next(iter(problem.named.values())).device, mesh)

    def _claim(self, about: Mapping[str, Any]) -> None:
        if self.read(CALL) is None:
            self.of_first(self._require_own_folder)
        super()._claim(about)

    def _require_own_folder(self) -> None:
        if (path := self.path) is not None and path.is_dir() and any(path.iterdir()):
            raise ValueError(f"bayesian_lora: path {str(path)!r} holds other files: pass a folder of its own")

    @property
    def is_done(self) -> bool:
        return self.of_first(lambda: self.path is not None and (self.path / ABOUT).exists())

    def result(self) -> Adapters:
        """What a finished call left."""
        assert self.path is not None
        return adapters(self.path, self.problem.model)

    def member(self, k: int, count: int, make: Callable[[], dict[str, Any]]) -> None:
        """The draws of member ``k``, made unless all of them are there."""
        path, model = self.path, self.problem.model
        folders = [] if path is None else [path / f"draw-{k * count + i:03d}" for i in range(count)]
        if path is not None and all(folder.is_dir() for folder in folders):
            self.draws += [read_adapter(model, folder) for folder in folders]
            self.posterior = read_posterior(model, path) if (path / MEAN).is_dir() else None
            return
        made = make()
        self.posterior = made.pop("posterior", None)
        self.draws += [{name: x[i] for name, x in made.items()} for i in range(count)]
        if path is not None:
            for folder in (path / MEAN, *folders):
                shutil.rmtree(folder, ignore_errors=True)
            if self.posterior is not None:
                write_posterior(model, self.posterior, path)
        for folder, draw in zip(folders, self.draws[-count:]):
            write_adapter(model, draw, folder)

    def finish(self, report: Mapping[str, Any]) -> Adapters:
        """All draws together, of all ranks."""
        stacked = self.gathered({name: torch.stack([draw[name] for draw in self.draws]) for name in self.draws[0]})
        found = Adapters(
            self.problem.model, stacked, posterior=self.posterior, report=report, answers=self.problem.answers
        )
        if (path := self.path) is not None:
            self.of_first(lambda: files.replace(path / ABOUT, [f"{json.dumps(found.about(), indent=1)}\n".encode()]))
        return found
