r"""Draws of a model's adapters: predictions over them, and files that PEFT reads.

With ``K`` draws ``theta_k`` and ``p_k = softmax f(x, theta_k)`` at every position,

    p = (1/K) sum_k p_k,    H = -sum_v p_v log p_v  (entropy),    I = H - (1/K) sum_k H_k  (mutual information of token, draw).

Draws are gone through one after the other and added up, so that a prediction holds ``p`` and two numbers a position, whatever
``K`` is. Draws of a linearised posterior (Laplace) predict by ``f(x, m) + J(x) (theta_k - m)``, ``m`` the mean: the outputs of
the network itself at such draws are another, worse, model.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from bayesopt_chain import checks
from bayesopt_chain.curvature._products import jvp
from bayesopt_chain.likelihoods import categorical
from bayesopt_chain.lora.loss import largest_label, require_known
from bayesopt_chain.modules import (
    LEFT_OUT,
    Reader,
    in_mode,
    inner_of,
    logits_of,
    make_functional,
    write_back,
)
from bayesopt_chain.posterior.gaussian import Gaussian
from bayesopt_chain.posterior.model import batches_of
from bayesopt_chain.precision import Kronecker
from bayesopt_chain.runs import files

ABOUT, MEAN, FACTORS = "posterior.json", "mean", "factors.safetensors"
ROWS = 16  # sequences that run through the model together


class TokenPrediction(NamedTuple):
    """A prediction of every token, from the position that predicts it.

    Attributes:
        probabilities: of the mixture of all draws, ``[B, T, V]``; ``None`` where they were not asked for.
        entropy: its entropy in nats, ``[B, T]``.
        mutual_information: what of it the draws disagree on, in nats, ``[B, T]``.
        attended: which positions hold a token, bool ``[B, T]``.
    """

    probabilities: Tensor | None
    entropy: Tensor
    mutual_information: Tensor
    attended: Tensor

    def by_sequence(self) -> tuple[Tensor, Tensor]:
        """Entropy and mutual information, means over the tokens of each sequence, ``[B]`` each."""
        counts = self.attended.sum(1).clamp_min(1)
        entropy, information = ((x * self.attended).sum(1) / counts for x in (self.entropy, self.mutual_information))
        return entropy, information


class Adapters:
    """Draws of the trained parameters of a model; made by :func:`bayesian_lora` and :func:`adapters`.

    Attributes:
        model: with the base's parameters; its own adapter is none of the draws, and stays as it is.
        draws: by parameter name, stacked ``[K, *]``.
        posterior: the Gaussian that a Laplace approximation is, around whose mean it predicts linearised; else ``None``. It is
            what ``bayesian_lora(prior=)`` takes for the next task.
        report: how they were made: method, prior precisions, gradients, held-out losses.
        answers: the tokens that are possible answers, or ``None``.
    """

    def __init__(
        self,
        model: nn.Module,
        draws: Mapping[str, Tensor],
        *,
        posterior: Gaussian | None = None,
        report: Mapping[str, Any] | None = None,
        answers: list[int] | None = None,
    ) -> None:
        model = inner_of(model)
        self.model, self.draws, self.posterior = model, dict(draws), posterior
        self.report, self.answers = dict(report or {}), answers
        self.read = AnswerReader(model, answers)
        self._forward = make_functional(model, outputs=logits_over(answers)).forward

    def __len__(self) -> int:
        return len(next(iter(self.draws.values())))

    def __repr__(self) -> str:
        made = ", ".join(f"{k}={v}" for k, v in self.report.items() if isinstance(v, (str, int)))
        return f"Adapters({len(self)} draws of {len(self.draws)} tensors; {made})"

    def draw(self, k: int) -> dict[str, Tensor]:
        """The parameters of draw ``k``, by name."""
        return {name: x[k] for name, x in self.draws.items()}

    @torch.no_grad()
    def predict(self, data: Any, *, probabilities: bool = True) -> TokenPrediction:
        """Predict the next token at every position (of answers, the answer).

        Args:
            data: a mapping of tensors as the model takes them, ``[B, T]`` each, or batches of them, such as a list or a
                DataLoader; labels are not needed.
            probabilities: whether to return them; without, memory does not grow with ``B T V``. Default True.

        Returns:
            A :class:`TokenPrediction`.

        Example:
            >>> import torch; from bayesopt_chain import lora
            >>> model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5))
            >>> three = {name: torch.stack([p.detach()] * 3) for name, p in model.named_parameters()}
            >>> prediction = lora.Adapters(model, three).predict({"input": torch.tensor([[1, 2, 3]])})
            >>> prediction.probabilities.shape, bool((prediction.mutual_information < 1e-6).all())  # draws that agree
            (torch.Size([1, 3, 5]), True)
        """
        parts = []
        for some in (rows for inputs, _ in batches_of(data, self.read) for rows, _ in _rows(inputs, None)):
            pooled = categorical().pooled(self._logits(some))
            mask = some.get("attention_mask") if isinstance(some, Mapping) else None
            mask = torch.ones_like(pooled.entropy, dtype=torch.bool) if mask is None else mask.bool()
            parts.append((pooled.probabilities if probabilities else None, pooled.entropy, pooled.epistemic, mask))
        if not parts:
            raise ValueError("Adapters.predict: data has no batches")
        p, entropy, information, attended = zip(*parts)
        return TokenPrediction(
            torch.cat(p) if probabilities else None, torch.cat(entropy), torch.cat(information), torch.cat(attended)
        )

    @torch.no_grad()
    def nll(self, data: Any) -> float:
        """The negative log-likelihood of the mixture, a mean over the tokens that count, in nats.

        Args:
            data: a mapping with ``labels`` (unshifted), or a pair of inputs and tokens by the position that predicts them; or
                batches of them, such as a list or a DataLoader.

        Raises:
            ValueError: no labels, none that count, or labels that are no tokens of the model.
        """
        pairs = list(batches_of(data, self.read))
        if any(targets is None for _, targets in pairs):
            raise ValueError("Adapters.nll: data has no labels")
        return self.nll_of(pairs)

    @torch.no_grad()
    def nll_of(self, pairs: list[Any]) -> float:
        """The same of pairs of inputs and targets by the position that predicts them (of answers, their numbers)."""
        total, counted = 0.0, 0
        for inputs, targets in (rows for pair in pairs for rows in _rows(*pair)):
            keep, largest, own = targets != LEFT_OUT, largest_label("Adapters.nll", targets), list[Tensor]()
            for logits in self._logits(inputs):
                require_known("Adapters.nll", largest, logits)
                own.append(logits.log_softmax(-1).gather(-1, targets.clamp_min(0)[..., None])[..., 0][keep])
            total -= float((torch.stack(own).logsumexp(0) - math.log(len(self))).double().sum())
            counted += int(keep.sum())
        if not counted:
            raise ValueError("Adapters.nll: no label of data counts")
        return total / counted

    def _logits(self, inputs: Any) -> Iterator[Tensor]:
        """The logits of each draw, ``[B, T, V]``, in float32 at least."""
        with in_mode(self.model, training=False):
            for k in range(len(self)):
                theta = self.draw(k)
                if self.posterior is None:
                    logits = self._forward(theta, (inputs, None))
                else:
                    mean = self.posterior.mean
                    step = {name: x - mean[name] for name, x in theta.items()}
                    at, slope = jvp(lambda p: self._forward(p, (inputs, None)), (mean,), (step,))
                    logits = at + slope
                yield logits.to(torch.promote_types(logits.dtype, torch.float32))

    def save_adapters(self, path: str | Path) -> None:
        """Write each draw as an adapter of PEFT: ``path/draw-000``, ..., which ``PeftModel.from_pretrained`` reads.

        Args:
            path: a folder; it is made if absent. One that holds other draws is refused.

        Raises:
            FileExistsError: ``path`` holds draws already.

        Draws of a linearised posterior are linearised again by :func:`adapters`; PEFT alone runs the network at the draw.
        """
        path = Path(path)
        if (path / ABOUT).exists() or any(path.glob("draw-*")):
            raise FileExistsError(f"save_adapters: path {str(path)!r} holds draws already: pass another folder")
        path.mkdir(parents=True, exist_ok=True)
        for k in range(len(self)):
            write_adapter(self.model, self.draw(k), path / f"draw-{k:03d}")
        if self.posterior is not None:
            write_posterior(self.model, self.posterior, path)
        (path / ABOUT).write_text(json.dumps(self.about(), indent=1) + "\n", encoding="utf-8")

    def about(self) -> dict[str, Any]:
        """What a folder of the draws says beside them, as JSON."""
        return {
            "draws": len(self),
            "answers": self.answers,
            "linearised": self.posterior is not None,
            "report": self.report,
        }


def _rows(inputs: Any, targets: Tensor | None) -> Iterator[tuple[Any, Any]]:
    """Some sequences at a time."""
    for start in range(0, len(optree.tree_leaves(inputs)[0]), ROWS):
        rows = slice(start, start + ROWS)
        yield optree.tree_map(lambda x, rows=rows: x[rows], inputs), None if targets is None else targets[rows]


def adapters(path: str | Path, model: nn.Module) -> Adapters:
    """Read what :meth:`Adapters.save_adapters` wrote, or draws of :func:`bayesian_lora` with ``path=``.

    Args:
        path: the folder.
        model: a PEFT model of the same base and configuration; its own adapter stays as it is.

    Raises:
        FileNotFoundError: no draws there.
        ValueError: parameters of another model.

    Example:
        >>> import torch; from bayesopt_chain import lora
        >>> lora.adapters("nowhere", torch.nn.Linear(1, 1))
        Traceback (most recent call last):
        FileNotFoundError: adapters: path 'nowhere' holds no draws ...
    """
    path = Path(path)
    if not (path / ABOUT).is_file():
        raise FileNotFoundError(
            f"adapters: path {str(path)!r} holds no draws (no {ABOUT}): pass what save_adapters wrote"
        )
    model, about = inner_of(model), json.loads((path / ABOUT).read_text(encoding="utf-8"))
    draws = [read_adapter(model, path / f"draw-{k:03d}") for k in range(about["draws"])]
    stacked = {name: torch.stack([draw[name] for draw in draws]) for name in draws[0]}
    return Adapters(
        model,
        stacked,
        posterior=read_posterior(model, path) if about["linearised"] else None,
        report=about["report"],
        answers=about["answers"],
    )


def write_adapter(model: Any, params: Mapping[str, Tensor], folder: Path) -> None:
    """Write parameters as a folder of PEFT, whole or not at all; the model's own stay as they are."""
    checks.having("a model of PEFT", "save_pretrained")("save_adapters: model", model)
    partial = folder.with_name(folder.name + ".part")
    shutil.rmtree(partial, ignore_errors=True)
    with holding(model, params):
        model.save_pretrained(partial)
    partial.rename(folder)


def read_adapter(model: Any, folder: Path) -> dict[str, Tensor]:
    """The trained parameters of an adapter's folder, by the model's names; its own stay as they are."""
    checks.having("one of PEFT, peft.get_peft_model(base, config)", "peft_config")("adapters: model", model)
    import peft

    own = make_functional(model).params
    with holding(model, {}):
        weights = peft.load_peft_weights(str(folder), device=str(next(iter(own.values())).device))
        answer = peft.set_peft_model_state_dict(model, weights)
        found = make_functional(model).params
    if wrong := list(answer.unexpected_keys) or sorted(set(own) ^ set(found)):
        raise ValueError(f"adapters: {folder} is of another model: {', '.join(wrong[:3])}")
    return {name: x.detach() for name, x in found.items()}


def write_posterior(model: Any, posterior: Gaussian, path: Path) -> None:
    """Write a Laplace posterior beside its draws: the mean as an adapter of PEFT, and the Kronecker factors."""
    summed: Any = posterior.undecomposed
    files.write_tree(path / FACTORS, summed._asdict())
    write_adapter(model, posterior.mean, path / MEAN)


def read_posterior(model: Any, path: Path) -> Gaussian:
    """What :func:`write_posterior` wrote."""
    mean = read_adapter(model, path / MEAN)
    summed = Kronecker(**files.read_tree(path / FACTORS, next(iter(mean.values())).device))
    return Gaussian(mean, summed, summed).factorised()


@contextmanager
def holding(model: nn.Module, params: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with these parameters inside of the block, and with its own again behind it, gradients too."""
    model = inner_of(model)
    grads = [(p, p.grad) for p in model.parameters()]
    own = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    try:
        write_back(model, params)
        yield
    finally:
        write_back(model, own)
        for p, grad in grads:
            p.grad = grad


def logits_over(answers: list[int] | None) -> Callable[[Any], Tensor]:
    """From a model's output to its logits, of the answers alone where they are given."""
    return logits_of if answers is None else lambda output: logits_of(output)[..., answers]


class AnswerReader(Reader):
    """Reads batches as pairs; where only some tokens are answers, targets are their numbers and no other token counts."""

    def __init__(self, model: nn.Module, answers: list[int] | None) -> None:
        super().__init__(model)
        self.answers = answers

    def __call__(self, batch: Any) -> Any:
        """The pair of a batch."""
        inputs, targets = super().__call__(batch)
        if self.answers is None or targets is None:
            return inputs, targets
        numbers = torch.full_like(targets, LEFT_OUT, dtype=torch.int64)
        for number, token in enumerate(self.answers):
            numbers[targets == token] = number
        return inputs, numbers
