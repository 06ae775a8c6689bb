"""Measures time and peak memory of the curvature estimators beside laplace-torch, curvlinops and posteriors, in one
run.

    python -m benchmarks.curvature            # everything: about ten minutes on one core
    python -m benchmarks.curvature --quick    # three rounds, no growth curves

All contenders compute the same exact GGN of the same model and batch (checked before anything is timed), on one
thread. They take turns, so that a slow minute of the machine hits all; times are medians over rounds with quartiles,
ratios are medians of the rounds' ratios. Memory is the peak of what the tensor allocator holds above the start, from
torch's profiler, results included. Writes `benchmarks/results/curvature.json` and, for the cost as batch, outputs and
parameters grow, `curvature.png`.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import importlib.metadata
import json
import os
import platform
import resource
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from bayesopt_chain import curvature, likelihoods

RESULTS = Path(__file__).parent / "results"
MEMORY_LIMIT = 12 * 2**30  # a contender that needs more fails with an error instead of taking the machine down
SLOW = 3.0  # seconds: what takes longer is timed once
PATIENCE = 40  # seconds: what takes longer is given up
Contenders = dict[str, Callable[[], Any]]


class Residual(nn.Module):
    def __init__(self, channels: int, out: int, stride: int):
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
            Residual(width, width, 1), Residual(width, 2 * width, 2), Residual(2 * width, 4 * width, 2)
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(F.relu(self.norm(self.stem(x)))).mean((2, 3)))


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def ours(net: nn.Module, batch: tuple[Tensor, Tensor], structure: str) -> Callable[[], Any]:
    params = {name: parameter.detach() for name, parameter in net.named_parameters()}
    forward = lambda p, b: functional_call(net, p, (b[0],))  # noqa: E731
    wanted = {name for name, parameter in net.named_parameters() if parameter.requires_grad}
    if len(wanted) < len(params):
        forward, params = curvature.subset(forward, params, wanted.__contains__)
    estimate = curvature.ggn(forward, likelihoods.categorical(), structure)
    return lambda: estimate(params, batch)


def laplace_torch(net: nn.Module, batch: tuple[Tensor, Tensor], backend: str, method: str) -> Callable[[], Any]:
    import laplace.curvature as backends

    net = copy.deepcopy(net)
    net.output_size = int(batch[1].max()) + 1  # laplace-torch's name for it, which its full GGN reads
    interface = getattr(backends, backend)(net, "classification")
    options = {"N": len(batch[0])} if method == "kron" else {}
    return lambda: getattr(interface, method)(*batch, **options)[1]


def curvlinops_of(net: nn.Module, batch: tuple[Tensor, Tensor], structure: str) -> Callable[[], Any]:
    import curvlinops

    net = copy.deepcopy(net)
    params, loss = [p for p in net.parameters() if p.requires_grad], nn.CrossEntropyLoss(reduction="sum")

    def dense() -> Tensor:
        operator = curvlinops.GGNLinearOperator(net, loss, params, [batch], check_deterministic=False)
        return operator @ torch.eye(operator.shape[1])

    def kronecker() -> Any:
        operator = curvlinops.KFACLinearOperator(
            net, loss, params, [batch], fisher_type=curvlinops.FisherType.TYPE2, check_deterministic=False
        )
        operator.compute_kronecker_factors()
        return operator

    return {"dense": dense, "kronecker": kronecker}[structure]


def posteriors_of(net: nn.Module, batch: tuple[Tensor, Tensor], structure: str) -> Callable[[], Any]:
    import posteriors

    params = {name: parameter.detach() for name, parameter in net.named_parameters()}
    module = {"diagonal": posteriors.laplace.diag_ggn, "dense": posteriors.laplace.dense_ggn}[structure]
    transform = module.build(
        lambda p, b: (functional_call(net, p, (b[0],)), torch.tensor([])),
        lambda z, b: -F.cross_entropy(z, b[1], reduction="sum"),
    )
    state = transform.init(params)
    field = {"diagonal": "prec_diag", "dense": "prec"}[structure]
    return lambda: getattr(transform.update(state, batch)[0], field)


def contenders(net: nn.Module, batch: tuple[Tensor, Tensor], structure: str) -> Contenders:
    """Everything that says it can compute this structure."""
    method = {"diagonal": "diag", "kronecker": "kron", "dense": "full"}[structure]
    made: Contenders = {"bayesopt_chain": lambda: ours(net, batch, structure)}
    for backend in ("BackPackGGN", "CurvlinopsGGN", "AsdlGGN"):
        made[f"laplace-torch {backend}"] = lambda backend=backend: laplace_torch(net, batch, backend, method)
    if structure != "diagonal":
        made["curvlinops"] = lambda: curvlinops_of(net, batch, structure)
    if structure != "kronecker":
        made["posteriors"] = lambda: posteriors_of(net, batch, structure)
    return made


def summary(result: Any) -> float | None:
    """A number by which results can be compared: the trace, where there is one to be had."""
    if isinstance(result, Tensor):
        return float(result.diagonal().sum() if result.ndim == 2 else result.sum())
    if hasattr(result, "to_dense") and hasattr(result, "diag"):
        diagonal = result.diag()
        return float(sum(leaf.sum() for leaf in (diagonal.values() if isinstance(diagonal, dict) else [diagonal])))
    if isinstance(result, dict):
        return float(sum(leaf.sum() for leaf in result.values()))
    if hasattr(result, "kfacs"):
        total = 0.0
        for factors in result.kfacs:
            product = 1.0
            for factor in factors:
                product *= float(factor.diagonal().sum() if factor.ndim == 2 else factor.sum())
            total += product
        return total
    return float(result.trace) if hasattr(result, "trace") else None


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise `TimeoutError` in what takes longer."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"no result after {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most bytes that the allocator held above the start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = run()
    held = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    del result
    return peak


def compare(
    net: nn.Module, batch: tuple[Tensor, Tensor], structure: str, rounds: int, leave_out: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Time every contender in turn, `rounds` times."""
    ready, rows = {}, {}
    times: dict[str, list[float]] = {}
    for name, make in contenders(net, batch, structure).items():
        if name in leave_out:
            continue
        try:
            run = make()
            start = time.perf_counter()
            with at_most(PATIENCE):
                result = run()
            first = time.perf_counter() - start
            rows[name] = {"trace": summary(result)}
            del result
        except Exception as error:
            reason = str(error).splitlines()[0][:160] if str(error) else ""
            rows[name] = {"not possible": f"{type(error).__name__}: {reason}"}
            continue
        ready[name], times[name] = run, [first] * 2 if first > SLOW else []
    for _ in range(rounds):
        for name, run in ready.items():
            if times[name] and times[name][0] > SLOW:
                continue  # its first run says enough
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    for name, run in ready.items():
        lower, median, upper = statistics.quantiles(times[name], n=4)
        rows[name] |= {"ms": median * 1e3, "ms_quartiles": [lower * 1e3, upper * 1e3], "MiB": peak_bytes(run) / 2**20}
        ratios = [other / mine for other, mine in zip(times[name], times["bayesopt_chain"])]
        rows[name]["times_ours"] = statistics.median(ratios)
    return rows


def table(title: str, rows: dict[str, Any]) -> None:
    print(f"\n{title}")
    for name, row in rows.items():
        if "ms" not in row:
            print(f"  {name:30s} {row['not possible']}")
            continue
        low, high = row["ms_quartiles"]
        print(
            f"  {name:30s} {row['ms']:9.2f} ms [{low:.2f}, {high:.2f}]  {row['times_ours']:7.2f} x ours  "
            f"{row['MiB']:9.2f} MiB  trace {row['trace'] if row['trace'] is None else format(row['trace'], '.6g')}"
        )


def cases() -> list[tuple[str, nn.Module, tuple[Tensor, Tensor], str]]:
    torch.manual_seed(0)
    labels = torch.randint(0, 10, (128,))
    vectors, images = torch.randn(128, 784), torch.randn(128, 3, 16, 16)
    large, small = mlp(784, 256, 10), mlp(64, 32, 10)
    resnet, narrow, frozen = ResNet(8).eval(), ResNet(2).eval(), ResNet(8).eval()
    for module in frozen.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    return [
        ("MLP 784-256-10", large, (vectors, labels), "diagonal"),
        ("MLP 784-256-10", large, (vectors, labels), "kronecker"),
        ("MLP 784-256-10", large, (vectors, labels), "dense"),
        ("MLP 64-32-10", small, (vectors[:, :64], labels), "dense"),
        ("ResNet-8, width 8", resnet, (images, labels), "diagonal"),
        ("ResNet-8, width 8", resnet, (images, labels), "kronecker"),
        ("ResNet-8, width 8, norms frozen", frozen, (images, labels), "diagonal"),
        ("ResNet-8, width 8, norms frozen", frozen, (images, labels), "kronecker"),
        ("ResNet-8, width 2", narrow, (images, labels), "dense"),
    ]


def growth(rounds: int) -> dict[str, Any]:
    """Diagonal and Kronecker cost of MLPs as the batch, the outputs and the parameters grow, one at a time."""
    curves: dict[str, Any] = {}
    axes = {
        "batch": [(n, n, 10, 64) for n in (16, 32, 64, 128, 256, 512)],
        "outputs": [(c, 128, c, 64) for c in (2, 5, 10, 20, 50, 100)],
        "parameters": [(h * (196 + 1) + (h + 1) * 10, 128, 10, h) for h in (16, 64, 256, 1024)],
    }
    for axis, points in axes.items():
        for value, data, outputs, hidden in points:
            torch.manual_seed(0)
            net = mlp(196, hidden, outputs)
            batch = (torch.randn(data, 196), torch.randint(0, outputs, (data,)))
            for structure in ("diagonal", "kronecker"):
                leave_out = (
                    ("laplace-torch CurvlinopsGGN", "posteriors") if structure == "diagonal" else ()
                )  # seconds each
                for name, row in compare(net, batch, structure, rounds, leave_out).items():
                    if "ms" in row:
                        curve = curves.setdefault(axis, {}).setdefault(f"{structure}: {name}", [])
                        curve.append(
                            {"at": value, "ms": row["ms"], "ms_quartiles": row["ms_quartiles"], "MiB": row["MiB"]}
                        )
    return curves


def plot(curves: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, len(curves), figsize=(14, 7), sharey="row")
    names = sorted({name for curve in curves.values() for name in curve})
    colours = {name: f"C{i}" for i, name in enumerate(sorted({n.split(": ")[1] for n in names}))}
    for column, (axis, curve) in enumerate(curves.items()):
        for name, points in sorted(curve.items()):
            style = {"color": colours[name.split(": ")[1]], "linestyle": "-" if name.startswith("diagonal") else "--"}
            at = [point["at"] for point in points]
            axes[0, column].plot(at, [p["ms"] for p in points], label=name, marker=".", **style)
            low, high = zip(*(p["ms_quartiles"] for p in points))
            axes[0, column].fill_between(at, low, high, color=style["color"], alpha=0.15)
            axes[1, column].plot(at, [p["MiB"] for p in points], marker=".", **style)
        for row, label in enumerate(("time [ms], median and quartiles", "peak memory [MiB]")):
            axes[row, column].set(xscale="log", yscale="log", xlabel=axis, ylabel=label if column == 0 else "")
            axes[row, column].grid(alpha=0.3)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.suptitle("Exact GGN of an MLP 196-64-10 at B = 128, one thing varied (solid: diagonal, dashed: Kronecker)")
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    figure.savefig(path, dpi=110)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in (
        "torch",
        "bayesopt_chain",
        "laplace-torch",
        "curvlinops-for-pytorch",
        "backpack-for-pytorch",
        "posteriors",
    ):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = getattr(sys.modules.get(package), "__version__", "not installed")
    return found


def machine() -> dict[str, Any]:
    try:
        with open("/proc/cpuinfo") as lines:
            cpu = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor()
    return {"cpu": cpu, "cores": os.cpu_count(), "threads used": torch.get_num_threads(), "system": platform.platform()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three rounds, no growth curves, nothing written")
    quick = parser.parse_args().quick
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    report: dict[str, Any] = {"date": datetime.date.today().isoformat(), "machine": machine(), "versions": versions()}
    print(json.dumps(report, indent=1))
    report["B"], report["cases"] = 128, {}
    for model, net, batch, structure in cases():
        parameters = sum(p.numel() for p in net.parameters() if p.requires_grad)
        rows = compare(net, batch, structure, 3 if quick else 11)
        report["cases"][f"{structure}, {model}"] = {"parameters": parameters, "contenders": rows}
        table(f"{structure} GGN of {model}: {parameters:,} parameters, B = {len(batch[0])}", rows)
    if quick:
        return
    RESULTS.mkdir(exist_ok=True)
    written = RESULTS / "curvature.json"
    written.write_text(json.dumps(report, indent=1) + "\n")
    report["growth"] = growth(5)
    written.write_text(json.dumps(report, indent=1) + "\n")
    plot(report["growth"], RESULTS / "curvature.png")


if __name__ == "__main__":
    main()
