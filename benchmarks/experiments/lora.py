r"""Continual learning with LoRA (Figures 5 and 6 of the paper): four books one after the other, and what is left of the first.

The base is the small Llama of :mod:`benchmarks.experiments.language`. An adapter of rank 8 and alpha 32 on the query, key and
output projections of its last layer (PEFT) learns book after book. A datum is a window of ``length`` tokens ``y_b``, and the
loss of episode ``k`` with ``n`` windows is the mean negative log posterior

    - 1/n sum_b log p(y_b | theta) + 1/(2 n) (theta - m_{k-1})^T Lambda_{k-1} (theta - m_{k-1})

    m_k = where the optimizer ends,     Lambda_k = Lambda_{k-1} + s F_k,     F_k = sum_b g_b g_b^T

with ``g_b`` the gradient of ``log p(y_b | theta)`` at ``m_k``, so that ``F_k`` is the empirical Fisher matrix of whole windows:
its diagonal, its Kronecker factors or all of it. ``s = 1`` is Bayes; the paper's example runs with ``s = 100`` (diagonal).
Everybody runs the same AdamW over the same batches from the same adapter; plain AdamW has the first prior in every episode.
``offline`` has the four books at once, in the same number of epochs.

Measured is the negative log-likelihood (nats a token) of the held-out part of every book after every episode: ``Souls`` to
``Peter Pan`` at the end, ``all`` their mean, ``new`` the mean over books right after their own episodes, ``forgotten`` how far
the first three rose from there to the end. ``k|j`` is book ``k`` after episode ``j``.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import bayesopt_chain as bc
from benchmarks.experiments.common import (
    RULE,
    Experiment,
    Table,
    finished,
    folder_of,
    kept,
    minus,
    takeaway,
)
from benchmarks.experiments.language import EPISODES, SCALES, SHORT, Base, Book, base, log_likelihood, nll

# structure of the Laplace posterior ("" for none), and whether the setting "fisher_scale" multiplies the Fisher matrix
METHODS = {
    "AdamW": ("", False),
    "Laplace, diagonal": ("diagonal", False),
    "Laplace, diagonal, s = 100": ("diagonal", True),
    "Laplace, Kronecker": ("kronecker", False),
    "Laplace, dense": ("dense", False),
}


class Work(NamedTuple):
    """What every method of a seed is given."""

    forward: Any  # (adapter, tokens) -> the model's output
    start: dict[str, Tensor]
    books: list[Book]
    s: Mapping[str, Any]
    seed: int

    @classmethod
    def make(cls, llama: Base, s: Mapping[str, Any], seed: int) -> Work:
        """The adapter of this seed around the base, and the books."""
        torch.manual_seed(seed)
        forward, start, _ = bc.make_functional(adapted(llama, s))
        return cls(forward, start, [llama.book(name, s) for name in EPISODES], s, seed)

    def density(self, params: Any, tokens: Tensor) -> Tensor:
        """Log-likelihood of whole windows, ``[B]``."""
        return log_likelihood(self.forward(params, tokens).logits, tokens).sum(1)

    def learned(self, params: Any, tokens: Tensor, prior: Any, episode: int, folder: Path) -> dict[str, Tensor]:
        """Where AdamW ends under a prior."""
        batch, n = self.s["batch"], len(tokens)
        tx = bc.chain(bc.links.add_gaussian_prior(prior, n=n), bc.adamw(self.s["lr"]))
        step = bc.make_step(lambda p, rows: -self.density(p, rows).mean(), tx)
        batches = bc.epochs(tokens, batch, seed=100 * self.seed + episode)
        steps = self.s["epochs"] * len(batches)
        return finished(step, params, tx.init(params), batches, steps, folder)[-1]

    def posterior(self, params: Any, tokens: Tensor, prior: Any, structure: str, scaled: bool) -> bc.Gaussian:
        """The Laplace posterior around ``params``."""
        laplace: Any = bc.laplace()
        itself = bc.likelihoods.custom(lambda outputs, _: -outputs[:, 0])  # the density is the model's only output
        estimate = bc.curvature.empirical_fisher(
            lambda p, rows: self.density(p, rows)[:, None],
            itself,
            structure,
            targets=lambda rows: rows,
        )
        state = laplace.init(params)
        for rows in tokens.split(self.s["fisher_batch"]):
            _, state = laplace.update(params, state, curvature=estimate(params, rows))
        given = {"prior": prior} if isinstance(prior, bc.Gaussian) else {"prior_precision": prior}
        scale = self.s["fisher_scale"] if scaled else 1.0
        return laplace.posterior(state, params, likelihood_scale=scale, **given)

    def losses(self, params: Any) -> list[float]:
        """Of the held-out part of every book."""
        return [nll(self.forward, params, book.held_out) for book in self.books]

    def continual(self, structure: str, scaled: bool, folder: Path) -> dict[str, float]:
        """Book after book."""
        params, prior, after = self.start, self.s["prior_precision"], []
        for k, book in enumerate(self.books):
            params = self.learned(params, book.train, prior, k, folder / f"episode-{k + 1}")
            after.append(self.losses(params))
            if structure and k + 1 < len(self.books):
                prior = self.posterior(params, book.train, prior, structure, scaled)
        curves = {f"{i + 1}|{k + 1}": loss for k, losses in enumerate(after) for i, loss in enumerate(losses)}
        own = [losses[k] for k, losses in enumerate(after)]
        rises = [after[-1][k] - own[k] for k in range(len(own) - 1)]
        return at_the_end(after[-1]) | {"new": statistics.fmean(own), "forgotten": statistics.fmean(rises)} | curves

    def offline(self, folder: Path) -> dict[str, float]:
        """All books at once."""
        tokens = torch.cat([book.train for book in self.books])
        return at_the_end(
            self.losses(self.learned(self.start, tokens, self.s["prior_precision"], len(self.books), folder))
        )


def adapted(llama: Base, s: Mapping[str, Any]) -> Any:
    """The base with an adapter on the query, key and output projections of its last layer; the base itself stays."""
    import peft

    config = peft.LoraConfig(
        r=s["rank"],
        lora_alpha=s["alpha"],
        target_modules=["q_proj", "k_proj", "o_proj"],
        layers_to_transform=[s["layers"] - 1],
    )
    return peft.get_peft_model(copy.deepcopy(llama.model), config).eval()


def at_the_end(losses: list[float]) -> dict[str, float]:
    """The losses by the names of the books, and their mean."""
    return dict(zip(SHORT, losses)) | {"all": statistics.fmean(losses)}


def run(settings: Mapping[str, Any], seed: int) -> Table:
    """Every method, and the base before it learned anything; differences from AdamW are of the same seed."""
    llama, folder = base(settings), folder_of("lora", settings) / f"seed-{seed}"
    work = Work.make(llama, settings, seed)
    table: Table = {"base": kept(folder, "base", lambda _: at_the_end(work.losses(work.start)))}
    for name, method in METHODS.items():
        table[name] = kept(folder, name, partial(work.continual, *method))
    table["offline"] = kept(folder, "offline", work.offline)
    plain = table["AdamW"]
    for row in table.values():
        row |= {f"{m} - AdamW": row[m] - plain[m] for m in ("all", "new", "forgotten") if m in row and row is not plain}
        row |= {"all - offline": row["all"] - table["offline"]["all"]}
        if "forgotten" in row:
            row |= {"forgotten - diagonal": row["forgotten"] - table["Laplace, diagonal"]["forgotten"]}
    return table


def says(table: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """What came out of the paper's claims."""
    best = min((m for m in METHODS if m != "AdamW"), key=lambda m: table[m]["all"]["mean"])
    diagonal, paper = table["Laplace, diagonal"], table["Laplace, diagonal, s = 100"]
    claims = [
        takeaway("plain AdamW forgets", minus(table["AdamW"]["forgotten"])),
        takeaway("the Laplace prior forgets less (diagonal)", diagonal["forgotten - AdamW"]),
        takeaway("and is better on all books at the end", diagonal["all - AdamW"]),
        takeaway("the same at the paper's s = 100", paper["all - AdamW"]),
        takeaway("where it learns less of what is new", minus(paper["new - AdamW"])),
        takeaway(
            "Kronecker factors forget less than the diagonal", table["Laplace, Kronecker"]["forgotten - diagonal"]
        ),
        takeaway("the whole matrix forgets less than its diagonal", table["Laplace, dense"]["forgotten - diagonal"]),
        takeaway(f"all books at once are better than the best prior ({best})", minus(table[best]["all - offline"])),
    ]
    plain, laplace, offline = (table[m]["all"]["mean"] for m in ("AdamW", best, "offline"))
    return (
        f"After four books plain AdamW is at {plain:.3f} nats a token, the best Laplace prior ({best}) at {laplace:.3f}, all "
        f"books at once at {offline:.3f}. Takeaways: {'; '.join(claims)}. {RULE}."
    )


ADAPTER = {"rank": 8, "alpha": 32, "prior_precision": 1.0, "fisher_scale": 100.0}
EXPERIMENT = Experiment(
    "lora",
    "Continual learning with LoRA",
    "Figures 5 and 6: on Llama 2 the Laplace prior keeps the loss of earlier books low where plain AdamW forgets them, and "
    "learns the next one somewhat less; the offline baseline is the adapter's capacity",
    {
        "smoke": SCALES["smoke"]
        | ADAPTER
        | {"book_characters": 3000, "lr": 1e-2, "epochs": 1, "batch": 4, "fisher_batch": 8},
        "small": SCALES["small"]
        | ADAPTER
        | {"book_characters": 150_000, "lr": 2e-3, "epochs": 3, "batch": 8, "fisher_batch": 32},
        "full": SCALES["full"]
        | ADAPTER
        | {"book_characters": None, "lr": 1e-3, "epochs": 20, "batch": 8, "fisher_batch": 32},
    },
    {"smoke": 1, "small": 3, "full": 10},
    run,
    says,
    shown=(*SHORT, "all", "new", "forgotten"),
)
