r"""The cold posterior on IMDB (Figures 4, 8 and 9 of the paper): is the posterior better below ``T = 1``, and for whom?

Reviews of 100 word ids, two classes; embedding, convolution, max-pooling, LSTM and a dense layer of 2.7 million weights
``theta`` with the prior ``N(0, 1 / prior)``. With ``N`` reviews the target of every method at a temperature ``T`` is

    p_T(theta)  propto  exp(-U(theta) N / T),     U(theta) = 1/N sum_n cross_entropy_n(theta) + prior / (2 N) |theta|^2,

the mean negative log posterior per datum at the library's ``temperature = T / N``. ``T = 1``, the first of the temperatures,
is Bayes; likelihood and prior are tempered alike.

    MLE, MAP      Adam, without and with the prior
    Laplace       diagonal, at the MAP: empirical Fisher (EF) or GGN; the network at draws, or linearised
    VI            mean field, Adam; the network at draws, or linearised
    SGHMC         parallel: the last parameters of ``members`` chains; serial: ``members`` draws of the first one, half an
                  epoch apart, from the end of its run on. At ``T = 0`` parallel is a deep ensemble

MLE, MAP and VI take ``optimizer_steps`` batches of one size, MAP and VI the first ``warmup`` of them without the prior, which
otherwise takes Adam to the mode at zero, where the network stays at chance. A chain is ``warmup`` steps of the MLE's optimizer
from weights of its own, the same for every temperature, then ``hot`` steps of SGHMC at ``hot_lr`` and ``steps`` at ``lr``. In
between, what is left of the embedding's first weights, a draw of the prior, is scaled to the prior at ``T``: rare words, of
which the data say little, then have their variance ``T / prior`` from the start, which they would reach at these rates only
after many epochs (``spread`` is the embedding's variance over that). ``data`` is a multiple of the batch, so that a run of
``steps`` equal to ``data / batch`` ends with an epoch.

``rho`` is the share of the noise budget ``2 T / lr_eff`` that the minibatches spend, ``kappa`` the relaxations an epoch (each
the largest of the directions looked at), ``heating`` the variance that they add over the one at ``T`` in the worst
direction, all by :func:`bayesopt_chain.diagnostics.heating` at the last parameters of the first chain, with the Hessian of
``hessian`` reviews. It is the law of a quadratic loss: where it says hundreds the loss is none over such a distance, and what
it says is that the batches and not ``T`` set the width there. Two rows ask what epochs do about it: the draws of the serial
chain at the first temperature in the middles of epochs beside those at their ends, where the noise of an epoch has summed to
zero.

The first and the last draw of the serial chain, as networks of their own, say whether the chains have arrived; while the
last is better, no claim that rests on chains is decided.

A claim is a row with the difference of two mean test NLLs and its standard error over the test reviews, paired; it claims
that the difference is below zero.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, max_pool1d

import bayesopt_chain as bc
from benchmarks.experiments.common import (
    Experiment,
    Table,
    data_folder,
    finished,
    folder_of,
    kept,
    log_mean,
    slug,
    verified,
)

SHA256 = "f95793fc7fed7bada1500cedf4f69344839d3e3d71c95bce833a83cfd17ffbc3"
UNKNOWN = 2  # the id of words outside the vocabulary
CHECKPOINT_SECONDS = 60.0
AT_ONCE = 500  # test reviews in one forward pass
Reviews = tuple[Tensor, Tensor]  # word ids [B, 100] and classes [B]


def read(words: int) -> tuple[Reviews, Reviews]:
    """The official halves for training and test; ids from ``words`` on become the unknown word."""
    path = data_folder() / "imdb" / "imdb_20k_100.npz"
    with numpy.load(verified(path, SHA256)) as file:
        x, y, x_test, y_test = (
            torch.from_numpy(file[f"{kind}_{part}"].astype("int64")) for part in ("train", "test") for kind in "xy"
        )
    x, x_test = (ids.where(ids < words, UNKNOWN) for ids in (x, x_test))
    return (x, y), (x_test, y_test)


class Network(nn.Module):
    """Embedding, convolution over five words, max-pooling by four, LSTM, two logits. With the defaults 2,700,098 weights."""

    def __init__(self, words: int = 20_000, embedding: int = 128, filters: int = 64, cell: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, embedding)
        self.convolution = nn.Conv1d(embedding, filters, 5)
        self.inward = nn.Linear(filters, 4 * cell)
        self.recurrent = nn.Linear(cell, 4 * cell, bias=False)
        self.head = nn.Linear(cell, 2)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits ``[B, 2]`` of word ids ``[B, L]``."""
        features = max_pool1d(self.convolution(self.embedding(ids).mT).relu(), 4)
        gates = self.inward(features.mT)
        h = c = gates.new_zeros(len(ids), self.recurrent.in_features)
        for t in range(gates.shape[1]):
            admit, forget, new, show = (gates[:, t] + self.recurrent(h)).chunk(4, -1)
            c = forget.sigmoid() * c + admit.sigmoid() * new.tanh()
            h = show.sigmoid() * c.tanh()
        return self.head(h)


class Work(NamedTuple):
    """What every cell of a seed is given."""

    s: Mapping[str, Any]
    seed: int
    folder: Path
    forward: Callable[[Any, Any], Tensor]
    train: Reviews
    test: Reviews

    @classmethod
    def make(cls, s: Mapping[str, Any], seed: int, folder: Path) -> Work:
        """The first reviews of a permutation that all seeds share."""
        parts = []
        for (ids, classes), n in zip(read(s["words"]), (s["data"], s["test"])):
            rows = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))[:n]
            parts.append((ids[rows], classes[rows]))
        return cls(s, seed, folder, bc.make_functional(cls.network(s)).forward, *parts)

    @staticmethod
    def network(s: Mapping[str, Any]) -> Network:
        return Network(s["words"], s["embedding"], s["filters"], s["cell"])

    @property
    def n(self) -> int:
        return len(self.train[0])

    @property
    def decay(self) -> float:
        """The prior's precision per datum."""
        return self.s["prior"] / self.n

    @property
    def epoch(self) -> int:
        """Steps in an epoch."""
        return self.n // self.s["batch"]

    def key(self, *names: Any) -> int:
        """A seed for what has this name."""
        text = "/".join(map(str, (self.seed, *names)))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little")

    def loss(self, params: Any, batch: Any) -> Tensor:
        """Mean cross entropy; the chains add the prior."""
        return cross_entropy(self.forward(params, batch), batch[1])

    def start(self, k: int) -> dict[str, Tensor]:
        """First weights of chain ``k``: PyTorch's, the embedding scaled to the prior's standard deviation."""
        torch.manual_seed(self.key("start", k))
        params = {name: p.detach().clone() for name, p in bc.make_functional(self.network(self.s)).params.items()}
        params["embedding.weight"] /= math.sqrt(self.s["prior"])
        return params

    def run(
        self, name: str, tx: Any, start: Any, steps: int, *, at: float | None = None, thinning: int | None = None
    ) -> Any:
        """A run in its folder, where it goes on after an interruption; default: its last parameters alone.

        Its batches and its noise are those of its ``name``, the same at every temperature ``at``.
        """
        torch.manual_seed(self.key("noise", name))
        params, step = {leaf: p.clone() for leaf, p in start.items()}, bc.make_step(self.loss, tx, inplace=True)
        batches = bc.epochs(self.train, self.s["batch"], seed=self.key("batches", name))
        path = self.folder / "runs" / slug(name if at is None else f"{name} {at:g}")
        how = {"burn_in": 0, "thinning": thinning} if thinning else {}
        return finished(
            step, params, tx.init(params), batches, steps, path, checkpoint_seconds=CHECKPOINT_SECONDS, **how
        )

    def optimizer(self, decay: float) -> Any:
        return bc.chain(bc.links.add_decayed_weights(decay), bc.adam(self.s["adam_lr"]))

    def optimum(self, decay: float) -> dict[str, Tensor]:
        """Where Adam ends: without the prior from the start of the first chain, with it from that chain's warm-up."""
        if not decay:
            return self.run("mle", self.optimizer(0.0), self.start(0), self.s["optimizer_steps"])[-1]
        return self.run("map", self.optimizer(decay), self.warm(0, 0.0), self.behind_warmup)[-1]

    @property
    def behind_warmup(self) -> int:
        """Steps that MAP and VI make behind the warm-up, as many as the MLE in all."""
        return self.s["optimizer_steps"] - self.s["warmup"]

    def sampler(self, lr: float, temperature: float) -> Any:
        """SGHMC with the prior."""
        return bc.sgd(lr, self.s["momentum"], weight_decay=self.decay, temperature=temperature / self.n)

    def halves(self, k: int, temperature: float) -> int:
        """How many half epochs the last stage of chain ``k`` has; the first one goes on for the serial rows."""
        more = 0 if k or not temperature else self.s["members"] - 1
        return 2 * self.s["steps"] // self.epoch + more

    def warm(self, k: int, temperature: float) -> dict[str, Tensor]:
        """Chain ``k`` after its warm-up; of the embedding's first weights only the share that the tempered prior has."""
        first = self.start(k)["embedding.weight"]
        params = dict(self.run(f"warmup {k}", self.optimizer(0.0), self.start(k), self.s["warmup"])[-1])
        params["embedding.weight"] = params["embedding.weight"] - (1 - math.sqrt(temperature)) * first
        return params

    def chain(self, k: int, temperature: float) -> bc.Draws:
        """Chain ``k``: its draws at every half epoch of the last stage."""
        warm = self.warm(k, temperature)
        hot, tx = (self.sampler(self.s[lr], temperature) for lr in ("hot_lr", "lr"))
        ready = self.run(f"hot {k}", hot, warm, self.s["hot"], at=temperature)[-1]
        half = self.epoch // 2
        return self.run(f"chain {k}", tx, ready, self.halves(k, temperature) * half, at=temperature, thinning=half)

    def last(self, temperature: float) -> list[dict[str, Tensor]]:
        """The parameters of every chain after ``steps``."""
        return [self.chain(k, temperature)[self.halves(1, temperature) - 1] for k in range(self.s["members"])]

    def serial(self, temperature: float) -> list[dict[str, Tensor]]:
        """Draws of the first chain at every half epoch from the end of ``steps`` on."""
        return list(self.chain(0, temperature))[-self.s["members"] :]

    def phase(self, temperature: float, ends: bool) -> list[dict[str, Tensor]]:
        """Draws of the first chain at the ends of epochs or in their middles, equally many."""
        draws = list(self.chain(0, temperature))
        return draws[int(ends) : len(draws) // 2 * 2 : 2]

    def variational(self, temperature: float) -> bc.Gaussian:
        """Mean field, from standard deviations that grow with the temperature as the posterior's do."""
        tx = bc.vi.mean_field(
            bc.adam(self.s["adam_lr"]),
            temperature=temperature / self.n,
            init_scale=self.s["vi_scale"] * math.sqrt(temperature),
            weight_decay=self.decay,
        )
        params, state = self.run("vi", tx, self.warm(0, 0.0), self.behind_warmup, at=temperature).last
        return tx.posterior(state, params)

    def laplace(self, estimator: Callable[..., Any], temperature: float) -> bc.Gaussian:
        """The Gaussian at the MAP, from one pass over the training set."""
        tx: Any = bc.laplace()
        mode: Any = self.optimum(self.decay)
        state, estimate = tx.init(mode), estimator(self.forward, bc.likelihoods.categorical(), structure="diagonal")
        for batch in zip(*(part.split(self.s["batch"]) for part in self.train)):
            _, state = tx.update(mode, state, params=mode, curvature=estimate(mode, batch))
        return tx.posterior(state, mode, prior_precision=float(self.s["prior"]), temperature=temperature / self.n)

    @torch.no_grad()
    def logits(self, params: Any) -> Tensor:
        """Of the test reviews, ``[T, 2]``."""
        return torch.cat([self.forward(params, (ids, None)) for ids in self.test[0].split(AT_ONCE)])

    def of_members(self, members: list[dict[str, Tensor]]) -> Tensor:
        """Log of the mean probability over networks, ``[T, 2]``."""
        return log_mean(torch.stack([self.logits(p).log_softmax(-1) for p in members]))

    def sampled(self, posterior: bc.Gaussian, name: str) -> Tensor:
        """The networks at draws of a Gaussian."""
        generator = torch.Generator().manual_seed(self.key("draws", name))
        return self.of_members([posterior.sample(generator=generator) for _ in range(self.s["draws"])])

    def linearized(self, posterior: bc.Gaussian, name: str) -> Tensor:
        """Draws of the logits of the network linearised at a Gaussian's mean."""
        out, generator = [], torch.Generator().manual_seed(self.key("logits", name))
        for ids in self.test[0].split(AT_ONCE):
            mean, covariance = bc.posterior.linearized(self.forward, posterior.factorised(), (ids, None))
            values, vectors = torch.linalg.eigh(covariance.double())
            root = vectors * values.clamp(min=0).sqrt()[:, None]
            z = torch.randn(self.s["logit_draws"], len(ids), 2, 1, generator=generator, dtype=torch.float64)
            out.append(log_mean((mean.double() + (root @ z).squeeze(-1)).log_softmax(-1)).float())
        return torch.cat(out)

    def spread(self, members: list[dict[str, Tensor]], temperature: float) -> dict[str, float]:
        """The variance of the embedding's weights over the tempered prior's."""
        variance = torch.stack([p["embedding.weight"].square().mean() for p in members]).mean().item()
        return {"spread": variance * self.s["prior"] / temperature} if temperature else {}

    def heating(self, temperature: float) -> dict[str, float]:
        """What the minibatches do to the last stage of a chain; see the module."""
        params = self.last(temperature)[0]
        batches = bc.epochs(self.train, self.s["batch"], seed=self.key("noise", temperature))
        noise = bc.diagnostics.gradient_noise(self.loss, params, batches, rank=2, max_batches=self.s["noise_batches"])
        whole = bc.epochs(self.train, self.s["hessian"], seed=self.key("hessian", temperature))
        curvature = bc.diagnostics.hessian_product(self.loss, params, whole, max_batches=1)
        report = bc.diagnostics.heating(self.sampler(self.s["lr"], temperature), noise, curvature=curvature)
        return {"rho": report.rho.max().item(), "kappa": report.kappa.max().item(), "heating": report.worst}

    def cell(self, name: str, predict: Callable[[], tuple[Tensor, dict[str, float]]]) -> dict[str, float]:
        """Measures of a method, made once; its log probabilities are kept beside them."""

        def make(_: Path) -> dict[str, float]:
            log_p, more = predict()
            path = self.predictions(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(log_p, path)
            found = bc.posterior.classification_metrics(log_p, self.test[1])
            return {measure: found[measure] for measure in ("nll", "accuracy", "ece")} | more

        return kept(self.folder, name, make)

    def predictions(self, name: str) -> Path:
        return self.folder / "predictions" / f"{slug(name)}.pt"

    def losses(self, name: str) -> Tensor:
        """The negative log-likelihood of every test review under a finished method, float64 ``[T]``."""
        log_p = torch.load(self.predictions(name)).double()
        return -log_p[torch.arange(len(log_p)), self.test[1]]


def at(method: str, temperature: float) -> str:
    """The name of a row."""
    return f"{method}, T = {temperature:g}"


ENSEMBLE = "deep ensemble (SGHMC parallel, T = 0)"
MIDDLES, ENDS = "SGHMC serial, middles of epochs", "SGHMC serial, ends of epochs"
FIRST, LAST = "SGHMC serial, first draw", "SGHMC serial, last draw"
STILL = "the serial chain (T = 1) still improves from its first draw to its last"
ESTIMATORS = {"Laplace EF": bc.curvature.empirical_fisher, "Laplace GGN": bc.curvature.ggn}


Prediction = Callable[[], tuple[Tensor, dict[str, float]]]


def methods(w: Work, t: float) -> dict[str, Prediction]:
    """Predictions of every method with a temperature, and what is measured beside them, by the name of the row."""
    gaussians: dict[str, Callable[[], bc.Gaussian]] = {
        **{method: partial(w.laplace, estimator, t) for method, estimator in ESTIMATORS.items()},
        "VI": partial(w.variational, t),
    }
    found: dict[str, Prediction] = {}
    for method, fit in gaussians.items():
        for name, predict in ((at(method, t), w.sampled), (at(f"{method} linearised", t), w.linearized)):
            found[name] = lambda fit=fit, predict=predict, name=name: (predict(fit(), name), {})
    for method, members in {"SGHMC serial": w.serial, "SGHMC parallel": w.last}.items():
        found[at(method, t)] = lambda members=members: (w.of_members(members(t)), w.spread(members(t), t))
    return found


def run(settings: Mapping[str, Any], seed: int) -> Table:
    """Every method at every temperature, then what the minibatches did, then the claims."""
    w = Work.make(settings, seed, folder_of("imdb", settings) / f"seed-{seed}")
    first = settings["temperatures"][0]
    networks: dict[str, Callable[[], list[dict[str, Tensor]]]] = {
        "MLE": lambda: [w.optimum(0.0)],
        "MAP": lambda: [w.optimum(w.decay)],
        ENSEMBLE: lambda: w.last(0.0),
        at(MIDDLES, first): lambda: w.phase(first, ends=False),
        at(ENDS, first): lambda: w.phase(first, ends=True),
        at(FIRST, first): lambda: w.serial(first)[:1],
        at(LAST, first): lambda: w.serial(first)[-1:],
    }
    cells: dict[str, Prediction] = {
        name: lambda members=members: (w.of_members(members()), {}) for name, members in networks.items()
    }
    for t in settings["temperatures"]:
        cells |= methods(w, t)
    table: Table = {name: w.cell(name, predict) for name, predict in cells.items()}
    for t in settings["temperatures"]:
        table[at("SGHMC parallel", t)] |= kept(w.folder, at("heating", t), lambda _, t=t: w.heating(t))
    return table | claims(w, table)


def claims(w: Work, table: Table) -> Table:
    """The paper's takeaways as differences of NLL that it says are below zero; see the module."""
    bayes, *colder = w.s["temperatures"]

    def best(method: str, among: Sequence[float] = w.s["temperatures"]) -> str:
        return min((at(method, t) for t in among), key=lambda name: table[name]["nll"])

    def minus(left: str, right: str) -> Tensor:
        return w.losses(left) - w.losses(right)

    def effect(method: str) -> Tensor:
        return minus(best(method, colder), at(method, bayes))

    parallel, serial, vi = (at(m, bayes) for m in ("SGHMC parallel", "SGHMC serial", "VI"))
    found = {
        "MAP beats MLE": minus("MAP", "MLE"),
        "SGHMC (T = 1) beats MAP": minus(parallel, "MAP"),
        "SGHMC (best T) beats MAP": minus(best("SGHMC parallel"), "MAP"),
        "VI (T = 1) beats MAP": minus(vi, "MAP"),
        "VI (best T) beats MAP": minus(best("VI"), "MAP"),
        "linearisation rescues Laplace EF": minus(at("Laplace EF linearised", bayes), at("Laplace EF", bayes)),
        "linearisation rescues Laplace GGN": minus(at("Laplace GGN linearised", bayes), at("Laplace GGN", bayes)),
        "linearisation hurts VI (T = 1)": minus(vi, at("VI linearised", bayes)),
        "linearisation hurts VI (best T)": minus(best("VI"), best("VI").replace("VI", "VI linearised")),
        "GGN beats EF, sampled": minus(at("Laplace GGN", bayes), at("Laplace EF", bayes)),
        "GGN beats EF, linearised": minus(at("Laplace GGN linearised", bayes), at("Laplace EF linearised", bayes)),
        "cold beats T = 1 for Laplace GGN": effect("Laplace GGN"),
        "cold beats T = 1 for Laplace GGN linearised": effect("Laplace GGN linearised"),
        "cold beats T = 1 for VI": effect("VI"),
        "cold beats T = 1 for SGHMC": effect("SGHMC parallel"),
        "the cold effect is larger for VI than for SGHMC": effect("VI") - effect("SGHMC parallel"),
        "parallel beats serial SGHMC": minus(parallel, serial),
        "parallel SGHMC (T = 1) beats the deep ensemble": minus(parallel, ENSEMBLE),
        "ends of epochs beat their middles": minus(at(ENDS, bayes), at(MIDDLES, bayes)),
        STILL: minus(at(LAST, bayes), at(FIRST, bayes)),
    }
    return {
        name: {"difference": d.mean().item(), "error": d.std().item() / math.sqrt(len(d))} for name, d in found.items()
    }


def verdicts(table: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, str]:
    """Of every claim: confirmed or contradicted where every seed is on one side of zero by two standard errors or more, else
    undecided. While the chains have not arrived, nothing is decided that rests on them.
    """
    found = {}
    for name, claim in table.items():
        if "difference" in claim:
            difference, margin = claim["difference"], 2 * claim["error"]["mean"]
            against = "contradicted" if difference["low"] > margin else "undecided"
            found[name] = "confirmed" if difference["high"] < -margin else against
    young = found[STILL] == "confirmed"
    return {
        name: "undecided" if young and name != STILL and ("SGHMC" in name or "epochs" in name) else which
        for name, which in found.items()
    }


def says(table: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Each takeaway with its verdict, and what the minibatches did."""
    found = verdicts(table)
    judged = [
        f"{name}: {which} ({table[name]['difference']['mean']:+.3f} +- {table[name]['error']['mean']:.3f})"
        for name, which in found.items()
        if name != STILL
    ]
    arrived = f"From its first draw to its last the serial chain moves by {table[STILL]['difference']['mean']:+.3f}"
    if found[STILL] == "confirmed":
        arrived += ": the chains have not arrived, and what rests on them is left undecided"
    heated = [
        f"{row['heating']['mean']:.3g} at {name.split(', ')[1]} (rho {row['rho']['mean']:.3g}, "
        f"kappa {row['kappa']['mean']:.3g})"
        for name, row in table.items()
        if "heating" in row
    ]
    return (
        f"Takeaways at this scale (difference of NLL; confirmed or contradicted where every seed is two standard errors "
        f"over the test reviews from zero, which with one seed leaves out how seeds differ): {'; '.join(judged)}. "
        f"{arrived}. Minibatch heating, the variance that the batches add over the one at T in the worst direction: "
        f"{', '.join(heated)}."
    )


MODEL = {"words": 20_000, "embedding": 128, "filters": 64, "cell": 128, "prior": 40, "batch": 32}
RATES = {"adam_lr": 1e-3, "momentum": 0.9, "hot_lr": 0.03, "lr": 0.01, "vi_scale": 0.05}
EXPERIMENT = Experiment(
    "imdb",
    "Cold posterior on IMDB",
    "Figures 4, 8 and 9: Bayes (VI, SGHMC) has a lower test loss than MAP; linearisation rescues Laplace and hurts VI, GGN "
    "beats the empirical Fisher; Gaussians are much better cold, SGHMC a little; parallel SGHMC beats serial, both beat the "
    "deep ensemble",
    {
        "smoke": MODEL
        | RATES
        | {"words": 200, "embedding": 8, "filters": 4, "cell": 4, "data": 128, "test": 200, "temperatures": (1.0, 0.03)}
        | {"optimizer_steps": 16, "warmup": 8, "hot": 4, "steps": 4, "members": 2, "draws": 2, "logit_draws": 20}
        | {"noise_batches": 4, "hessian": 32},
        "small": MODEL
        | RATES
        | {"data": 8320, "test": 3000, "temperatures": (1.0, 0.1, 0.01)}
        | {
            "optimizer_steps": 2600,
            "warmup": 520,
            "hot": 520,
            "steps": 1560,
            "members": 5,
            "draws": 5,
            "logit_draws": 1000,
        }
        | {"noise_batches": 16, "hessian": 64},
        "full": MODEL
        | RATES
        | {"data": 24_960, "test": 25_000, "temperatures": (1.0, 0.3, 0.1, 0.03, 0.01, 0.001)}
        | {
            "optimizer_steps": 24_180,
            "warmup": 780,
            "hot": 7800,
            "steps": 15_600,
            "members": 15,
            "draws": 50,
            "logit_draws": 10_000,
        }
        | {"noise_batches": 100, "hessian": 1000},
    },
    {"smoke": 1, "small": 3, "full": 5},
    run,
    says,
)
