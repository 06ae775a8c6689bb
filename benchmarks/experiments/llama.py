r"""A Bayesian Llama (Figure 7 and Table 1 of the paper): what an ensemble of the last attention layer knows of what it reads.

The base is the small Llama of :mod:`benchmarks.experiments.language`. The four attention weights of its last layer are
fine-tuned on the training parts of four books that the base has not seen; everything else is frozen. With ``N`` tokens to be
predicted and the prior around the base's weights ``theta_0`` of deviation ``prior_sd``, loss and target are

    U(theta) = - 1/N sum_t log p(y_t | y_<t, theta) + |theta - theta_0|^2 / (2 N prior_sd^2),     exp(-U / T),  T = 1/N is Bayes

Ten chains of SGHMC run side by side from ``theta_0``, each over batches of its own; their last positions are the ensemble.
``SGD`` is one run of the same chain at T = 0, and ``SGD, 10 runs`` ten of them, which differ by their batches alone.

The texts are 100 English statements on science, their Samoan translations, and the English ones with their words shuffled.
``TU`` is the entropy of the averaged prediction of a token, ``EU`` its share that the members disagree on (the mutual
information of token and member). ``Samoan`` and ``shuffled`` are AUROC of telling these texts from the English ones by the mean
over the tokens of a text while reading it; with ``next`` by the mean over ``continued`` tokens that the ensemble itself
continues a text with whose last word was removed, close to the paper's measure, which takes every such token by itself.
``errors`` is the AUROC of telling, token by token of the English statements, wrong guesses from right ones. Losses are in nats
a token: ``books`` of held-out parts.

A model that has seen nothing but English tells Samoan trivially by its loss once the text is read (``surprise``, an AUROC too);
TU and EU are said before each token is seen. Shuffled English and errors within English are the harder questions.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import bayesopt_chain as bc
from bayesopt_chain.precision import Diagonal
from benchmarks.experiments.common import (
    RULE,
    Experiment,
    Table,
    data_folder,
    finished,
    folder_of,
    kept,
    log_mean,
    minus,
    slug,
    takeaway,
    verified,
)
from benchmarks.experiments.language import EPISODES, SCALES, Base, base, log_likelihood

SHA256 = "0eb9b1faba0f59a9aa53ccca7100372e3c65e1b163be02e5a942b4f20d95c480"
SHARES = {"SGD, 10 runs": 0.0, "SGHMC, T = 1/N": 1.0, "SGHMC, T = 0.1/N": 0.1}  # of the Bayesian temperature
BAYES = "SGHMC, T = 1/N"
BEFORE = 2  # line ends in front of every statement, the end of a paragraph; they are read and not scored
Members = dict[str, Tensor]  # attention weights of all members, stacked on axis 0


def statements() -> tuple[list[str], list[str]]:
    """The English statements and the Samoan ones."""
    read = json.loads(verified(data_folder() / "statements" / "statements.json", SHA256).read_text(encoding="utf-8"))
    return read["scientific_statements"], read["scientific_statements_samoan"]


def shuffled(text: str, generator: torch.Generator) -> str:
    """The text with its words in a random order."""
    words = text.split(" ")
    return " ".join(words[i] for i in torch.randperm(len(words), generator=generator).tolist())


class Scores(NamedTuple):
    """Of the tokens of one text, or of all texts one after the other: uncertainties and losses in nats, and wrong guesses."""

    total: Tensor
    epistemic: Tensor
    nll: Tensor
    wrong: Tensor


def scores(log_p: Tensor, targets: Tensor) -> Scores:
    """Of log probabilities ``[S, L, C]`` of tokens ``[L]``."""
    u = bc.likelihoods.categorical().mixture(log_p)
    mean = log_mean(log_p)
    chosen = mean.gather(-1, targets[..., None]).squeeze(-1)
    return Scores(u.entropy, u.epistemic, -chosen, mean.argmax(-1) != targets)


class Work(NamedTuple):
    """What every method of a seed is given."""

    llama: Base
    forward: Any  # (weights, tokens) -> the model's output
    start: dict[str, Tensor]
    train: Tensor
    held_out: Tensor
    s: Mapping[str, Any]
    seed: int

    @classmethod
    def make(cls, llama: Base, s: Mapping[str, Any], seed: int) -> Work:
        """The base with its last attention layer to be trained, and the text."""
        model = copy.deepcopy(llama.model)
        for name, p in model.named_parameters():
            p.requires_grad_(f"layers.{s['layers'] - 1}.self_attn" in name)
        forward, start, _ = bc.make_functional(model)
        books = [llama.book(name, s) for name in EPISODES]
        train, held_out = (torch.cat(part) for part in zip(*books))
        some = torch.linspace(0, len(held_out) - 1, min(s["held_out"], len(held_out))).long()
        return cls(llama, forward, start, train, held_out[some], s, seed)

    @property
    def n(self) -> int:
        """Number of tokens that are predicted."""
        return self.train[:, 1:].numel()

    def loss(self, params: Any, tokens: Tensor) -> Tensor:
        """Mean negative log-likelihood of a token; the prior is a link."""
        return -log_likelihood(self.forward(params, tokens).logits, tokens).mean()

    def chain(self, share: float) -> bc.Chain:
        """SGHMC at a share of the temperature 1/N; SGD at 0."""
        precision = {name: torch.full_like(p, self.s["prior_sd"] ** -2) for name, p in self.start.items()}
        prior = bc.links.add_gaussian_prior(bc.Gaussian(self.start, Diagonal(precision, torch.tensor(0.0))), n=self.n)
        return bc.chain(prior, bc.sghmc(self.s["lr"], self.s["momentum"], temperature=share / self.n))

    def members(self, share: float, folder: Path) -> Members:
        """The last positions of all chains."""
        torch.manual_seed(self.seed)
        count, tx = self.s["members"], self.chain(share)
        chains = bc.parallel(bc.make_step(self.loss, tx), count, batch_dim=0)
        start = bc.stack([self.start] * count)
        batches = bc.epochs(self.train, self.s["batch"], seed=self.seed, chains=count)
        return finished(chains, start, chains.init(tx, start), batches, self.s["steps"], folder)[-1]

    @torch.no_grad()
    def log_p(self, members: Members, tokens: Tensor) -> Tensor:
        """Log probabilities of the token that follows each, ``[S, B, L, C]``."""
        return torch.vmap(lambda p: self.forward(p, tokens).logits)(members).log_softmax(-1)

    def each(self, members: Members, rows: Sequence[list[int]]) -> list[Tensor]:
        """The same for rows of tokens of any length: of each ``[S, L, C]``. What stands behind a row does not reach it."""
        out = []
        for i in range(0, len(rows), self.s["texts"]):
            some = [torch.tensor(row) for row in rows[i : i + self.s["texts"]]]
            log_p = self.log_p(members, torch.nn.utils.rnn.pad_sequence(some, batch_first=True))
            out += [log_p[:, j, : len(row)] for j, row in enumerate(some)]
        return out

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Of statements, each at the start of a paragraph; no more of each than the model has positions."""
        before = self.llama.tokens("\n") * BEFORE
        return [[*before, *self.llama.tokens(text)][: self.s["length"]] for text in texts]

    def read(self, members: Members, texts: Sequence[str]) -> list[Scores]:
        """Of every text, while reading it; what stands before it, the same for all, is not scored."""
        rows = self.tokens(texts)
        found = zip(self.each(members, rows), rows)
        return [scores(p[:, BEFORE - 1 : -1], torch.tensor(row[BEFORE:])) for p, row in found]

    def continued(self, members: Members, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Mean total and epistemic uncertainty over the tokens that the ensemble goes on with, one after the other."""
        rows = [row[: self.s["length"] - self.s["continued"]] for row in self.tokens(texts)]
        total, epistemic = [], []
        for _ in range(self.s["continued"]):
            last = torch.stack([p[:, -1] for p in self.each(members, rows)], 1)
            u = bc.likelihoods.categorical().mixture(last)
            total.append(u.entropy)
            epistemic.append(u.epistemic)
            rows = [[*row, guess] for row, guess in zip(rows, last.logsumexp(0).argmax(-1).tolist())]
        return torch.stack(total).mean(0), torch.stack(epistemic).mean(0)

    def texts(self) -> dict[str, list[str]]:
        """The three sets of statements."""
        english, samoan = (texts[: self.s["statements"]] for texts in statements())
        g = torch.Generator().manual_seed(self.seed)
        return {"English": english, "Samoan": samoan, "shuffled": [shuffled(text, g) for text in english]}

    def measures(self, members: Members) -> dict[str, float]:
        """Of one ensemble; of a single member there is no epistemic uncertainty."""
        texts, rows, g = self.texts(), self.held_out.tolist(), torch.Generator().manual_seed(self.seed)
        read = {name: self.read(members, these) for name, these in texts.items()}
        # without the last word, as the paper has its statements continued
        cut = {name: [text.rsplit(" ", 1)[0] for text in these] for name, these in texts.items()}
        cut["shuffled"] = [shuffled(text, g) for text in cut["English"]]
        went_on = {name: self.continued(members, these) for name, these in cut.items()}
        books = [scores(p[:, :-1], torch.tensor(row[1:])).nll for p, row in zip(self.each(members, rows), rows)]
        out = {"books": torch.cat(books).mean().item()}
        out |= {name: torch.cat([x.nll for x in these]).mean().item() for name, these in read.items()}
        for name in ("Samoan", "shuffled"):
            surprise = [torch.stack([x.nll.mean() for x in read[which]]) for which in ("English", name)]
            out[f"{name} surprise"] = bc.posterior.detection_auroc(*surprise)
        kinds: dict[str, Callable[[Scores], Tensor]] = {"TU": lambda x: x.total, "EU": lambda x: x.epistemic}
        several = len(next(iter(members.values()))) > 1
        for k, (kind, of) in enumerate(list(kinds.items())[: 1 + several]):
            by_text = {name: torch.stack([of(x).mean() for x in these]) for name, these in read.items()}
            for name in ("Samoan", "shuffled"):
                out[f"{name} {kind}"] = bc.posterior.detection_auroc(by_text["English"], by_text[name])
                out[f"{name} {kind}, next"] = bc.posterior.detection_auroc(went_on["English"][k], went_on[name][k])
            values, wrong = (torch.cat([part(x) for x in read["English"]]) for part in (of, lambda x: x.wrong))
            out[f"errors {kind}"] = bc.posterior.detection_auroc(values[~wrong], values[wrong])
        return out

    def heating(self, share: float, members: Members) -> dict[str, float]:
        """What minibatches do at a share of the temperature 1/N.

        ``rho`` is their share of the noise, ``lr_eff trace(C) / (2 T d)``, the mean over all directions; ``heating`` the excess
        of the variance in the worst direction, predicted at T = 1/N alone, where the noise tells the curvature of a
        well-specified model.
        """
        at, batches = {n: p[0] for n, p in members.items()}, bc.epochs(self.train, self.s["batch"], seed=self.seed)
        noise = bc.diagnostics.gradient_noise(self.loss, at, batches, max_batches=self.s["noise_batches"])
        lr, directions = self.s["lr"] / (1 - self.s["momentum"]), sum(p.numel() for p in at.values())
        worst = {"heating": bc.diagnostics.heating(self.chain(share), noise).worst} if share == 1 else {}
        return {"rho": lr * noise.trace / (2 * share / self.n * directions)} | worst


def run(settings: Mapping[str, Any], seed: int) -> Table:
    """The base, one run of SGD, and the three ensembles; differences are of the same seed."""
    llama, folder = base(settings), folder_of("llama", settings) / f"seed-{seed}"
    work = Work.make(llama, settings, seed)

    def ensemble(share: float) -> Callable[[Path], dict[str, float]]:
        def make(chains: Path) -> dict[str, float]:
            members = work.members(share, chains)
            return work.measures(members) | (work.heating(share, members) if share else {})

        return make

    first = next(iter(SHARES))

    def single(_: Path) -> dict[str, float]:
        return work.measures({name: p[:1] for name, p in work.members(0.0, folder / slug(first)).items()})

    table: Table = {"base": kept(folder, "base", lambda _: work.measures(bc.stack([work.start])))}
    rows = {name: kept(folder, name, ensemble(share)) for name, share in SHARES.items()}
    table |= {"SGD": kept(folder, "SGD", single), **rows}
    sgd = table["SGD"]
    for row in rows.values():
        row |= {f"books - {name}": row["books"] - table[name]["books"] for name in ("SGD", first)}
        row |= {"SGD TU - TU": sgd["Samoan TU"] - row["Samoan TU"]}
        for name in ("Samoan", "shuffled", "errors"):
            beside = {"TU": row[f"{name} TU"], "0.5": 0.5, "EU, 10 runs": rows[first][f"{name} EU"]}
            row |= {f"{name} {what} - EU": value - row[f"{name} EU"] for what, value in beside.items()}
    return table


def says(table: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """What came out of the paper's claims, and of the harder questions."""
    bayes, sgd = table[BAYES], table["SGD"]
    claims = [
        takeaway("the ensemble tells Samoan by TU better than one run of SGD", bayes["SGD TU - TU"]),
        takeaway("its EU tells Samoan better than its TU", bayes["Samoan TU - EU"]),
        takeaway("its EU tells shuffled English better than chance", bayes["shuffled 0.5 - EU"]),
        takeaway("and better than its TU", bayes["shuffled TU - EU"]),
        takeaway("TU tells errors better than EU", minus(bayes["errors TU - EU"])),
        takeaway("at T = 1/N EU tells Samoan better than ten runs of SGD do", bayes["Samoan EU, 10 runs - EU"]),
        takeaway("the same for shuffled English", bayes["shuffled EU, 10 runs - EU"]),
        takeaway("the ensemble predicts held-out text better than one run of SGD", bayes["books - SGD"]),
        takeaway("and than ten of them", bayes["books - SGD, 10 runs"]),
    ]
    harder = ", ".join(
        f"{what} {bayes[f'{name} TU']['mean']:.3f} by TU and {bayes[f'{name} EU']['mean']:.3f} by EU"
        for name, what in (("Samoan", "Samoan"), ("shuffled", "shuffled English"), ("errors", "errors within English"))
    )
    return (
        f"AUROC of ten chains at T = 1/N: {harder}; one run of SGD tells Samoan at {sgd['Samoan TU']['mean']:.3f}, shuffled "
        f"English at {sgd['shuffled TU']['mean']:.3f}, errors at {sgd['errors TU']['mean']:.3f} (TU). Takeaways: "
        f"{'; '.join(claims)}. {RULE}. Minibatches add {bayes['rho']['mean']:.2g} of the noise of T = 1/N on average over "
        f"directions; in the worst one the variance is predicted to be {1 + bayes['heating']['mean']:.3g} times as large."
    )


SHOWN = (
    *("books", "English", "Samoan", "Samoan surprise", "Samoan TU", "Samoan EU", "Samoan TU, next", "Samoan EU, next"),
    *("shuffled surprise", "shuffled TU", "shuffled EU", "errors TU", "errors EU", "rho", "heating"),
)
ENSEMBLE = {"members": 10, "momentum": 0.9, "prior_sd": 0.03}
EXPERIMENT = Experiment(
    "llama",
    "A Bayesian Llama",
    "Figure 7 and Table 1: total and epistemic uncertainty of Llama 3 with an ensemble of ten last attention layers, beside "
    "one run of SGD, on English statements and their Samoan translations, and how well they tell the two apart",
    {
        "smoke": SCALES["smoke"]
        | ENSEMBLE
        | {"book_characters": 3000, "members": 3, "steps": 6, "batch": 2, "lr": 0.02, "noise_batches": 4}
        | {"held_out": 4, "statements": 6, "continued": 2, "texts": 6},
        "small": SCALES["small"]
        | ENSEMBLE
        | {"book_characters": 150_000, "steps": 200, "batch": 4, "lr": 0.1, "noise_batches": 40}
        | {"held_out": 64, "statements": 100, "continued": 3, "texts": 20},
        "full": SCALES["full"]
        | ENSEMBLE
        | {"book_characters": None, "steps": 20_000, "batch": 10, "lr": 0.1, "noise_batches": 100}
        | {"held_out": 500, "statements": 100, "continued": 5, "texts": 20},
    },
    {"smoke": 1, "small": 3, "full": 10},
    run,
    says,
    shown=SHOWN,
)
