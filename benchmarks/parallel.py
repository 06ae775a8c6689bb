"""``python -m benchmarks.parallel``: what a step of ``bc.parallel`` takes for 4 and 64 chains of 60 weights.

A regression on 64 data by a network of 10 inputs and 5 hidden units (60 weights), one thread. Beside it stand

    one chain           the same step without ``parallel``
    in place            ``parallel`` of a step that overwrites its parameters
    batched by hand     gradients of all chains by one backward pass, momentum, and one draw for each step

Times are milliseconds of this process's own time on the processor, medians and quartiles over paired rounds, so that a machine
that others use too tells much the same. Results go to ``benchmarks/results/parallel.json``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch

import bayesopt_chain as bc
from benchmarks.measure import RESULTS, command, keep, ratio, spread, stepping, take_turns

LR, MOMENTUM, TEMPERATURE = 0.01, 0.9, 1e-3
CHAINS = (4, 64)


def loss(params: dict[str, torch.Tensor], batch: Any) -> torch.Tensor:
    x, y = batch
    return (torch.tanh(x @ params["w"] + params["b"]) @ params["v"] - y).square().mean()


def start(chains: int) -> dict[str, torch.Tensor]:
    """Parameters of all chains, each another draw."""
    g = torch.Generator().manual_seed(0)
    shapes = {"w": (10, 5), "b": (5,), "v": (5,)}
    return {name: 0.3 * torch.randn(chains, *shape, generator=g) for name, shape in shapes.items()}


def by_hand(params: dict[str, torch.Tensor], batch: Any) -> Callable[[], None]:
    x, y = batch
    p = {name: v.clone().requires_grad_() for name, v in params.items()}
    velocity = {name: torch.zeros_like(v) for name, v in params.items()}
    kept = {name: torch.zeros_like(v) for name, v in params.items()}
    level = (TEMPERATURE * (1 - MOMENTUM) / (2 * LR)) ** 0.5

    def call() -> None:
        hidden = torch.tanh(torch.einsum("nd,cdh->cnh", x, p["w"]) + p["b"][:, None])
        total = (torch.einsum("cnh,ch->cn", hidden, p["v"]) - y).square().mean(1).sum()
        grads = torch.autograd.grad(total, list(p.values()))
        with torch.no_grad():
            for (name, v), g in zip(p.items(), grads):
                fresh = torch.randn_like(v).mul_(level)
                velocity[name].mul_(MOMENTUM).add_(g).add_(fresh).add_(kept[name])
                kept[name] = fresh
                v.add_(velocity[name], alpha=-LR)

    return call


def row(chains: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of each contestant, and the ratio to the step by hand."""
    g = torch.Generator().manual_seed(1)
    batch, params = (torch.randn(64, 10, generator=g), torch.randn(64, generator=g)), start(chains)
    tx = bc.sghmc(LR, MOMENTUM, temperature=TEMPERATURE)

    many = bc.parallel(bc.make_step(loss, tx), chains)
    written = bc.parallel(bc.make_step(loss, tx, inplace=True), chains)
    single = {name: v[0].clone() for name, v in params.items()}
    contestants = {
        "parallel": stepping(many, params, many.init(tx, params), batch),
        "in place": stepping(written, bc.stack([single] * chains), written.init(tx, params), batch),
        "one chain": stepping(bc.make_step(loss, tx), single, tx.init(single), batch),
        "batched by hand": by_hand(params, batch),
    }
    times = take_turns(contestants, rounds, clock=time.process_time)
    took = {name: spread([1e3 * x for x in seconds]) for name, seconds in times.items()}
    return {
        "chains": chains,
        "weights": sum(v[0].numel() for v in params.values()),
        "milliseconds": took,
        "parallel over by hand": ratio(times, "parallel", "batched by hand"),
    }


if __name__ == "__main__":
    rounds = command(rounds=15).rounds
    rows = [row(chains, rounds) for chains in CHAINS]
    keep(RESULTS / "parallel.json", {"rows": rows})
    print(json.dumps(rows, indent=1))
