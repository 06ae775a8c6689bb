"""Fit, tune and predict with a Laplace posterior: time beside laplace-torch with each of its back ends, and asdfghjkl.

    python -m benchmarks.curvature_fit            # a few minutes on one core; goes on where it stopped
    python -m benchmarks.curvature_fit --rounds 1 --only MLP --out /tmp/fit.json    # the cases whose name begins so, anew

Five classifiers (an MLP, a CNN, a ResNet-8 whose norms are frozen, a small transformer, a small GPT-2), each with its last
layer in Kronecker structure, in dense structure where it has at most 1,000 parameters, and all weights in diagonal and in
Kronecker structure. Fit is one pass over 512 data and the posterior, tune the prior by the evidence (laplace-torch: its
default, 100 steps of Adam), predict probabilities of 16 new inputs.

laplace-torch runs with each of its back ends. asdfghjkl's own Kronecker Fisher ends with the factors, which it does not
decompose: beside it are our factors alone, in a phase of that name. Its diagonal takes part in the fit.

"passes alone" is no peer: it is the time of the passes through the network that nobody can do without, a floor.

They take turns. Times are those of this process on its one thread, so that a busy machine does not count; medians over
rounds, ratios (ours over theirs) medians of the rounds' ratios. Writes ``benchmarks/results/curvature_fit.json``; of that
record ``python -m benchmarks.table`` says which phases are above 0.9 of the best peer's time.
"""

from __future__ import annotations

import copy
import functools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesopt_chain as bc
from bayesopt_chain.posterior.evidence import tuned
from bayesopt_chain.posterior.fit import FittedLaplace, at
from bayesopt_chain.precision import Zero
from benchmarks.measure import RESULTS, command, fill, ratio, take_turns
from benchmarks.networks import cnn, mlp
from benchmarks.table import FLOOR, OURS, PHASES

CONFIGURATIONS = (("last_layer", "kronecker"), ("last_layer", "dense"), ("all", "diagonal"), ("all", "kronecker"))
SMALL_LAYER = 1000  # parameters of a last layer, of more the dense structure is left out: it is one eigendecomposition
DATA, TOKENS, WORDS = 512, 16, 100
Phases = dict[str, Callable[[], Any]]


class Case(NamedTuple):
    """A classifier, its data, new inputs, and which weights have a posterior of which structure."""

    net: nn.Module
    loader: DataLoader
    new: Tensor
    subset: str
    structure: str


class Residual(nn.Module):
    """Two convolutions with batch norm and a skip connection; more channels come with half as many pixels."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        stride = 1 if out == channels else 2
        self.one, self.norm_one = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.two, self.norm_two = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.skip = nn.Conv2d(channels, out, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_one(self.one(x)).relu()
        return (self.norm_two(self.two(y)) + self.skip(x)).relu()


def resnet(channels: int, widths: Sequence[int]) -> nn.Sequential:
    """A stem, a residual block of each width, the mean over the image, and a head; batch norms are not trained."""
    stem = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()
    blocks = [Residual(a, b) for a, b in pairwise((widths[0], *widths))]
    net = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    return net


class Transformer(nn.Module):
    """Embedded tokens and their positions, two layers of attention, their mean, and a head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.table, self.position = nn.Embedding(WORDS, width), nn.Embedding(TOKENS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.table(x) + self.position(torch.arange(TOKENS)[None])).mean(1))


class GPT2(nn.Module):
    """Two layers of transformers' GPT-2, the last token's features, and a head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2Model

        config = GPT2Config(
            n_layer=2, n_head=4, n_embd=width, n_positions=TOKENS, vocab_size=WORDS, bos_token_id=None, eos_token_id=None,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )  # fmt: skip
        self.body = GPT2Model(config)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).last_hidden_state[:, -1])


# inputs of all data, and 16 new ones
numbers, words = partial(torch.randn, DATA + 16), partial(torch.randint, 0, WORDS, (DATA + 16, TOKENS))
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "MLP 784-256-10": (partial(mlp, 784, 256, 10), partial(numbers, 784)),
    "CNN, width 16": (partial(cnn, 16, [3, 16, 16]), partial(numbers, 3, 16, 16)),
    "ResNet-8, width 8, norms frozen": (partial(resnet, 3, [8, 16, 32]), partial(numbers, 3, 16, 16)),
    "transformer, width 32": (Transformer, words),
    "GPT-2, width 32": (GPT2, words),
}


def cases(begins: str) -> Iterator[tuple[str, Case]]:
    """The cases whose name begins so."""
    for name, (make, inputs) in NETWORKS.items():
        if name.startswith(begins):
            torch.manual_seed(0)
            net, x = make().eval(), inputs()
            loader = DataLoader(TensorDataset(x[:DATA], torch.randint(0, 10, (DATA,))), 128)
            *_, head = (layer for layer in net.modules() if isinstance(layer, nn.Linear))
            is_small = sum(p.numel() for p in head.parameters()) <= SMALL_LAYER
            for subset, structure in CONFIGURATIONS:
                if is_small or structure != "dense":
                    yield f"{name}, {subset}, {structure}", Case(net, loader, x[DATA:], subset, structure)


def ours(case: Case) -> Phases:
    likelihood, kept = bc.likelihoods.categorical(), list[FittedLaplace]()

    def fit() -> None:
        how: dict[str, Any] = {"subset": case.subset, "structure": case.structure, "tune": None}
        kept[:] = [bc.fit_laplace(case.net, likelihood, case.loader, **how)]

    def tune() -> None:
        fitted = kept[0]
        kept[:] = [at(fitted.model, fitted.seen, *tuned(fitted.model, fitted.seen))]

    def factors() -> None:
        forward, params, _ = bc.make_functional(case.net)
        estimate = bc.curvature.ggn(forward, likelihood, case.structure)
        functools.reduce(lambda total, batch: total.add(estimate(params, batch)), case.loader, Zero(torch.zeros(())))

    return {"factors": factors, "fit": fit, "tune": tune, "predict": lambda: kept[0].predict(case.new)}


def laplace_torch(backend: str, case: Case) -> Phases:
    if (backend, case.structure) == ("CurvlinopsGGN", "diagonal"):
        raise NotImplementedError("one matrix product a parameter: more than two minutes on each of these")
    import laplace  # pyright: ignore[reportMissingImports]
    import laplace.curvature as backends  # pyright: ignore[reportMissingImports]

    kept: list[Any] = []
    form = {"diagonal": "diag", "kronecker": "kron", "dense": "full"}[case.structure]

    def fit() -> None:
        la = laplace.Laplace(case.net, "classification", case.subset, form, backend=getattr(backends, backend))
        la.fit(case.loader)
        kept[:] = [la]

    return {
        "fit": fit,
        "tune": lambda: kept[0].optimize_prior_precision(method="marglik"),
        "predict": lambda: kept[0](case.new, link_approx="probit"),
    }


def asdfghjkl(case: Case) -> Phases:
    import asdl  # pyright: ignore[reportMissingImports]

    if case.subset != "all":
        raise NotImplementedError("all layers alone")
    shape = {"diagonal": asdl.SHAPE_DIAG, "kronecker": asdl.SHAPE_KRON}[case.structure]
    config = asdl.FisherConfig(
        fisher_type=asdl.FISHER_EXACT, loss_type=asdl.LOSS_CROSS_ENTROPY, fisher_shapes=[shape], data_size=DATA
    )
    maker = asdl.get_fisher_maker(case.net, config)

    def fit() -> None:
        for x, y in case.loader:
            maker.setup_loss_call(nn.functional.cross_entropy, maker.setup_model_call(maker.model, x), y)
            maker.forward_and_backward()

    return {"factors" if case.structure == "kronecker" else "fit": fit}


def passes(case: Case) -> Phases:
    """What nobody can do without: the network's forward pass, of all data and of the new inputs. For exact factors of all
    layers one backward pass more for each of the C - 1 columns, back to the first layer's output: no gradient of a
    parameter is made, and nothing is summed.
    """
    net = case.net.requires_grad_(False)
    watched, seen = copy.deepcopy(net), list[Tensor]()
    first = next(layer for layer in watched.modules() if not list(layer.children()) and list(layer.parameters()))
    first.register_forward_hook(lambda layer, inputs, output: seen.append(output.requires_grad_()))

    def forward() -> None:
        for x, _ in case.loader:
            net(x)

    def factors() -> None:
        for x, y in case.loader:
            seen.clear()
            outputs = watched(x)
            root = bc.likelihoods.categorical().root(outputs.detach(), y)
            for k in range(root.columns):
                torch.autograd.grad(outputs, seen, root.part(k, k + 1)[0], retain_graph=True)

    return {"factors": factors, "fit": forward, "predict": lambda: net(case.new)}


CONTENDERS: dict[str, Callable[[Case], Phases]] = {
    OURS: ours,
    **{f"laplace-torch {name}": partial(laplace_torch, name) for name in ("BackPackGGN", "CurvlinopsGGN", "AsdlGGN")},
    "asdfghjkl": asdfghjkl,
    FLOOR: passes,
}


def compare(case: Case, rounds: int) -> dict[str, Any]:
    """Every phase of every contender, in turn; what fails says so. Kronecker factors of all layers are a phase of their own."""
    phases = PHASES if (case.subset, case.structure) == ("all", "kronecker") else PHASES[1:]
    rows: dict[str, Any] = {name: {} for name in CONTENDERS}
    ready: dict[str, Phases] = {phase: {} for phase in phases}
    for name, make in CONTENDERS.items():
        phase = "start"
        try:
            made = make(case._replace(net=copy.deepcopy(case.net)))
            for phase in (phase for phase in phases if phase in made):
                made[phase]()
                ready[phase][name] = made[phase]
        except Exception as error:
            rows[name][phase] = {"not possible": f"{type(error).__name__}: {str(error)[:120]}"}
    for phase in phases:
        times = take_turns(ready[phase], rounds, clock=time.process_time)
        for name, seconds in times.items():
            rows[name][phase] = {"ms": 1e3 * statistics.median(seconds), "ratio": ratio(times, OURS, name)["ratio"]}
    return rows


if __name__ == "__main__":
    given = command(rounds=3, only="", out=RESULTS / "curvature_fit.json")
    warnings.simplefilter("ignore")
    cells = ((("cases", name), partial(compare, case, given.rounds)) for name, case in cases(given.only))
    fill(given.out, cells, rounds=given.rounds)
