"""Fit, tune and predict with a Laplace posterior: time beside laplace-torch with each of its back ends, and asdfghjkl.

    python -m benchmarks.curvature_fit            # a few minutes on one core
    python -m benchmarks.curvature_fit --rounds 1 --only MLP

Five classifiers (an MLP, a CNN, a ResNet-8 whose norms are frozen, a small transformer, a small GPT-2), each with its last
layer in Kronecker structure, in dense structure where it has at most 1,000 parameters, and all weights in diagonal and in
Kronecker structure. Fit is one pass over 512 data and the
posterior, tune the prior by the evidence (laplace-torch: its default, 100 steps of Adam), predict probabilities of 16
new inputs.

laplace-torch runs with each of its back ends. asdfghjkl's own Kronecker Fisher ends with the factors, which it does not
decompose: beside it are our factors alone, in a phase of that name. Its diagonal takes part in the fit.

"passes alone" is no peer: it is the time of the passes through the network that nobody can do without, a floor.

They take turns. Times are those of this process on its one thread, so that a busy machine does not count; medians over
rounds, ratios (ours over theirs) medians of the rounds' ratios. Writes `benchmarks/results/curvature_fit.json` and says which
phases are above 0.9 of the best peer's time; ``--only`` measures the cases whose name begins so again.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import bayesopt_chain as bc
from bayesopt_chain.posterior.evidence import tuned
from bayesopt_chain.posterior.fit import FittedLaplace, at
from bayesopt_chain.precision import Zero
from benchmarks.measure import RESULTS, command, keep, known, markdown, ratio, take_turns

PATH = RESULTS / "curvature_fit.json"
OURS = "bayesopt_chain"
SLOW = 1.5  # seconds: what takes longer is timed once
PHASES = ("factors", "fit", "tune", "predict")
TARGET = 0.9  # of the best peer's time
CONFIGURATIONS = (("last_layer", "kronecker"), ("last_layer", "dense"), ("all", "diagonal"), ("all", "kronecker"))
SMALL_LAYER = 1000  # parameters of a last layer, of more the dense structure is left out: it is one eigendecomposition
Phases = dict[str, Callable[[], Any]]


class Residual(nn.Module):
    """Two convolutions with batch norm and a skip connection."""

    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.one, self.norm_one = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.two, self.norm_two = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.skip = nn.Conv2d(channels, out, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_one(self.one(x)))
        return F.relu(self.norm_two(self.two(y)) + self.skip(x))


class ResNet(nn.Module):
    """ResNet-8: a stem and three residual blocks of 1, 2 and 4 times the width."""

    def __init__(self, width: int, classes: int = 10):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(
            Residual(width, width), Residual(width, 2 * width, 2), Residual(2 * width, 4 * width, 2)
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(F.relu(self.norm(self.stem(x)))).mean((2, 3)))


class Transformer(nn.Module):
    """Two layers of attention over 16 tokens, mean and head."""

    def __init__(self, width: int = 32, words: int = 100, classes: int = 10):
        super().__init__()
        self.table, self.position = nn.Embedding(words, width), nn.Embedding(16, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.table(x) + self.position(torch.arange(x.shape[1])[None])).mean(1))


class GPT2(nn.Module):
    """Two layers of transformers' GPT-2 over 16 tokens, the last token's features, and a head."""

    def __init__(self, width: int = 32, words: int = 100, classes: int = 10):
        super().__init__()
        from transformers import GPT2Config, GPT2Model

        sizes: dict[str, Any] = {"n_layer": 2, "n_head": 4, "n_embd": width, "n_positions": 16, "vocab_size": words}
        without = dict.fromkeys(("bos_token_id", "eos_token_id"))
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        self.body = GPT2Model(GPT2Config(**sizes, **without, **dropout, use_cache=False))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).last_hidden_state[:, -1])


def cnn(width: int = 16, classes: int = 10) -> nn.Module:
    """Two convolutions with pooling, and a head."""
    first = nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*first, *second, nn.Linear(16 * width, classes))


def cases() -> dict[str, tuple[nn.Module, DataLoader, Tensor]]:
    torch.manual_seed(0)
    resnet = ResNet(8).eval()
    for module in resnet.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    made = {
        "MLP 784-256-10": (
            nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)),
            lambda n: torch.randn(n, 784),
        ),
        "CNN, width 16": (cnn(), lambda n: torch.randn(n, 3, 16, 16)),
        "ResNet-8, width 8, norms frozen": (resnet, lambda n: torch.randn(n, 3, 16, 16)),
        "transformer, width 32": (Transformer().eval(), lambda n: torch.randint(0, 100, (n, 16))),
        "GPT-2, width 32": (GPT2().eval(), lambda n: torch.randint(0, 100, (n, 16))),
    }
    out = {}
    for name, (net, inputs) in made.items():
        data = TensorDataset(inputs(512), torch.randint(0, 10, (512,)))
        out[name] = (net.eval(), DataLoader(data, 128), inputs(16))
    return out


def ours(net: nn.Module, loader: DataLoader, new: Tensor, subset: str, structure: str) -> Phases:
    kept: list[FittedLaplace] = []

    def fit() -> None:
        likelihood = bc.likelihoods.categorical()
        kept[:] = [bc.fit_laplace(net, likelihood, loader, subset=subset, structure=structure, tune=None)]

    def tune() -> None:
        fitted = kept[0]
        best = tuned(fitted.model, fitted.seen)
        kept[:] = [at(fitted.model, fitted.seen, best.prior_precision, best.likelihood_scale)]

    def factors() -> None:
        forward, params, _ = bc.make_functional(net)
        estimate = bc.curvature.ggn(forward, bc.likelihoods.categorical(), structure)
        functools.reduce(lambda total, batch: total.add(estimate(params, batch)), loader, Zero(torch.zeros(())))

    phases = {"fit": fit, "tune": tune, "predict": lambda: kept[0].predict(new)}
    return {"factors": factors, **phases} if (subset, structure) == ("all", "kronecker") else phases


def laplace_torch(backend: str) -> Callable[..., Phases]:
    def make(net: nn.Module, loader: DataLoader, new: Tensor, subset: str, structure: str) -> Phases:
        if (backend, structure) == ("CurvlinopsGGN", "diagonal"):
            raise NotImplementedError("one matrix product a parameter: more than two minutes on each of these")
        import laplace
        import laplace.curvature as backends

        net, kept = copy.deepcopy(net), []
        form = {"diagonal": "diag", "kronecker": "kron", "dense": "full"}[structure]

        def fit() -> None:
            la = laplace.Laplace(net, "classification", subset, form, backend=getattr(backends, backend))
            la.fit(loader)
            kept[:] = [la]

        return {
            "fit": fit,
            "tune": lambda: kept[0].optimize_prior_precision(method="marglik"),
            "predict": lambda: kept[0](new, link_approx="probit"),
        }

    return make


def asdfghjkl(net: nn.Module, loader: DataLoader, new: Tensor, subset: str, structure: str) -> Phases:
    import asdl

    if subset != "all":
        raise NotImplementedError("all layers alone")
    shape = {"diagonal": asdl.SHAPE_DIAG, "kronecker": asdl.SHAPE_KRON}[structure]
    config = asdl.FisherConfig(
        fisher_type=asdl.FISHER_EXACT, loss_type=asdl.LOSS_CROSS_ENTROPY, fisher_shapes=[shape], data_size=512
    )
    maker = asdl.get_fisher_maker(copy.deepcopy(net), config)

    def fit() -> None:
        for x, y in loader:
            dummy = maker.setup_model_call(maker.model, x)
            maker.setup_loss_call(nn.functional.cross_entropy, dummy, y)
            maker.forward_and_backward()

    return {"factors" if structure == "kronecker" else "fit": fit}


def passes(net: nn.Module, loader: DataLoader, new: Tensor, subset: str, structure: str) -> Phases:
    """What nobody can do without: the network's forward pass, of all data and of the new inputs. For exact factors of all
    layers one backward pass more for each of the C - 1 columns, back to the first layer's output: no gradient of a
    parameter is made, and nothing is summed.
    """
    net = copy.deepcopy(net).requires_grad_(False)

    def forward() -> None:
        for x, _ in loader:
            net(x)

    phases: Phases = {"fit": forward, "predict": lambda: net(new)}
    if (subset, structure) != ("all", "kronecker"):
        return phases
    watched = copy.deepcopy(net)
    first = next(layer for layer in watched.modules() if not list(layer.children()) and list(layer.parameters()))
    seen: list[Tensor] = []
    first.register_forward_hook(lambda layer, inputs, output: seen.append(output.requires_grad_()))

    def factors() -> None:
        for x, y in loader:
            seen.clear()
            outputs = watched(x)
            root = bc.likelihoods.categorical().root(outputs.detach(), y)
            for k in range(root.columns):
                torch.autograd.grad(outputs, seen, root.part(k, k + 1)[0], retain_graph=True)

    return {"factors": factors, **phases}


FLOOR = "passes alone"
CONTENDERS: dict[str, Callable[..., Phases]] = {
    OURS: ours,
    "laplace-torch BackPackGGN": laplace_torch("BackPackGGN"),
    "laplace-torch CurvlinopsGGN": laplace_torch("CurvlinopsGGN"),
    "laplace-torch AsdlGGN": laplace_torch("AsdlGGN"),
    "asdfghjkl": asdfghjkl,
    FLOOR: passes,
}


def compare(
    net: nn.Module, loader: DataLoader, new: Tensor, subset: str, structure: str, rounds: int
) -> dict[str, Any]:
    """Every phase of every contender, in turn; what fails says so."""
    rows: dict[str, Any] = {name: {} for name in CONTENDERS}
    ready: dict[str, Phases] = {phase: {} for phase in PHASES}
    slow: dict[str, dict[str, list[float]]] = {phase: {} for phase in PHASES}
    for name, make in CONTENDERS.items():
        phase = "start"
        try:
            for phase, run in make(net, loader, new, subset, structure).items():
                start = time.process_time()
                run()
                once = time.process_time() - start
                if once > SLOW and name != OURS:
                    slow[phase][name] = [once] * rounds
                else:
                    ready[phase][name] = run
        except Exception as error:
            rows[name][phase] = {"not possible": f"{type(error).__name__}: {str(error)[:120]}"}
    for phase in PHASES:
        times = take_turns(ready[phase], rounds, clock=time.process_time) | slow[phase]
        for name, seconds in times.items():
            rows[name][phase] = {"ms": 1e3 * statistics.median(seconds), "ratio": ratio(times, OURS, name)["ratio"]}
    return rows


def summary() -> str:
    """How many phases of the record are at most at the target beside the fastest peer, and a table of the others, with the
    time of the passes alone over the peer's.
    """
    found = []
    for (case, rows), phase in itertools.product(known(PATH)["cases"].items(), PHASES):
        timed = {who: row[phase] for who, row in rows.items() if "ratio" in row.get(phase, ())}
        floor = timed.get(FLOOR, {}).get("ms", math.nan)
        peers = {who: row["ratio"] for who, row in timed.items() if who not in (OURS, FLOOR)}
        if peers:
            who = max(peers, key=lambda name: peers[name])
            found.append((case, phase, who, peers[who], floor / timed[who]["ms"]))
    above = [(*where, f"{ratio:.2f}", f"{floor:.2f}") for *where, ratio, floor in found if ratio > TARGET]
    head = ("network, weights, structure", "phase", "fastest peer", "ours", "passes alone")
    most = f"{len(found) - len(above)} of {len(found)} rows are at most {TARGET}; the others are"
    return f"{most}\n\n{markdown(head, above)}"


def main() -> None:
    given = command(rounds=3, only="")
    warnings.simplefilter("ignore")
    report = {"rounds": given.rounds, "cases": known(PATH).get("cases", {}) if given.only else {}}
    for name, (net, loader, new) in cases().items():
        *_, head = (layer for layer in net.modules() if isinstance(layer, nn.Linear))
        is_small = sum(p.numel() for p in head.parameters()) <= SMALL_LAYER
        for subset, structure in CONFIGURATIONS:
            if name.startswith(given.only) and (is_small or structure != "dense"):
                rows = compare(net, loader, new, subset, structure, given.rounds)
                report["cases"][f"{name}, {subset}, {structure}"] = rows
                print(f"\n{name}, {subset}, {structure}")
                for who, phases in rows.items():
                    print(
                        who,
                        {p: x.get("not possible") or f"{x['ms']:.1f} ms, {x['ratio']:.2f}" for p, x in phases.items()},
                    )
                keep(PATH, report)
    print(f"\n{summary()}")


if __name__ == "__main__":
    main()
