"""The rows of the comparison that need a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch

import bayesopt_chain as bc
from bayesopt_chain.loop.capture.captured import Backend
from benchmarks import contestants as c
from benchmarks.against import leaves
from benchmarks.cpu import D, N, Row, chains_by_hand, logistic, logistic_step, posteriors_step, regression_data
from benchmarks.measure import from_start, one_by_one, stepping, take_turns
from benchmarks.networks import descend, mlp


def _timed(run: Callable) -> Callable:
    return one_by_one(run, torch.cuda.synchronize)


def bandwidth(n: int = 2**28) -> Row:
    """The fused step against a copy of as many bytes: 20 a parameter, a copy of ``x`` bytes moving ``2 x``."""
    params, grads = leaves([n], "cuda"), leaves([n], "cuda")
    source = torch.randint(0, 256, (10 * n,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    step = c.fused(bc.sghmc(c.LR, c.MOMENTUM, temperature=c.TEMPERATURE), params, grads)
    return Row(
        f"SGHMC step, {n} parameters",
        take_turns({"fused": _timed(step), "copy of 20 bytes a parameter": _timed(lambda: target.copy_(source))}),
        {("fused", "copy of 20 bytes a parameter"): 1.2},
    )


def small_model() -> Row:
    with torch.device("cuda"):
        step, *given = logistic_step()
        captured = stepping(bc.capture(step, *given), *given)
        times = take_turns({"captured": _timed(captured), "posteriors": _timed(posteriors_step(given[-1]))})
    return Row("captured step of a small model", times, {("captured", "posteriors"): 0.1})


def five_thousand_chains(chains: int = 5000, steps: int = 2000, size: int = 32) -> Row:
    x, y = (t.cuda() for t in regression_data())
    tx = bc.sghmc(0.05, 0.9, temperature=1 / N)

    def loss(params, rows):
        return logistic(params, (x[rows], y[rows]))

    many = bc.parallel(bc.make_step(loss, tx), chains, batch_dim=0)
    params = torch.zeros(chains, D, device="cuda")
    state = many.init(tx, params)

    def rows():
        return torch.randint(N, (10, chains, size), device="cuda")

    captures: dict[str, list[float]] = {}

    def ours(name: str, backend: Backend | None) -> Callable:
        begin = perf_counter()
        fast: Any = bc.capture(many, params, state, rows(), steps=10, batch_dim=0, backend=backend)
        torch.cuda.synchronize()
        captures[f"{name}: the capture"] = [perf_counter() - begin]
        return _timed(from_start(fast, params, state, rows, steps // 10))

    step = chains_by_hand((x, y), chains, size)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            step()
    programs: dict[str, Backend | None] = {"captured parallel": None, "captured parallel, inductor": "inductor"}
    runs = {name: ours(name, backend) for name, backend in programs.items()}
    times = take_turns({**runs, "captured by hand": _timed(one_by_one(*[graph.replay] * (steps // 10)))}, rounds=5)
    return Row(
        f"{chains} chains x {steps} steps",
        times | captures,
        {(name, "captured by hand"): 1.1 for name in programs},
    )


def guarded_loop(width: int = 64, steps: int = 1000) -> Row:
    """The default heat guard in a user's loop of 1,000 steps: a network of three layers, batches of 64."""
    x, y = torch.randn(N, 32, device="cuda"), torch.randn(N, 1, device="cuda")

    def loop(guard: str | None) -> Callable:
        model = mlp(32, width, width, 1).cuda()

        def loss():
            rows = torch.randint(N, (64,), device="cuda")
            return (model(x[rows]) - y[rows]).square().mean()

        def run():
            optimizer = bc.optim.SGHMC(model.parameters(), lr=1e-5, temperature=1 / N, heat_guard=guard)
            descend(optimizer, loss, steps)

        return _timed(run)

    return Row(
        f"{steps} steps of a loop, network of width {width}",
        take_turns({"guarded": loop("warn"), "unguarded": loop(None)}, rounds=7),
        {("guarded", "unguarded"): 1.02},
    )


def rows(quick: bool) -> dict[str, Callable[[], Row]]:
    """The rows by name, each measured when called."""
    if not torch.cuda.is_available():
        raise SystemExit("--gpu: no CUDA device here")
    return {
        "small_model": small_model,
        "five_thousand_chains": partial(five_thousand_chains, steps=100 if quick else 2000),
        "guarded_loop": guarded_loop,
        "bandwidth": partial(bandwidth, 2**26 if quick else 2**28),
    }
