"""A step of ``bc.observe`` beside one of devinterp 2.0.1, in processor time.

    python -m benchmarks.learning_coefficient --speed      # without it: the record's table

Gradient, move, what is measured and the loop, as they come and with ``capture=True``; devinterp's are gradient and
``SGMCMC.sgld``, and measure nothing. Our steps are timed by an observable that reads the process's clock at every draw. How
right the coefficients themselves are, is in ``measured_choices.md``.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import bayesopt_chain as bc
from benchmarks.measure import RESULTS, command, keep, known, markdown, ratio

PATH = RESULTS / "learning_coefficient.json"
THINNING = 8  # the default of bc.observe


def networks() -> dict[str, tuple[nn.Module, tuple[Tensor, Tensor], int]]:
    """Networks of 60, 85,000, 50,000 and 800,000 weights; with each a batch, and how many chains run at once."""
    torch.manual_seed(0)
    randn = torch.randn

    def attention(width: int, layers: int) -> nn.Module:
        make = nn.TransformerEncoderLayer
        return nn.Sequential(*[make(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)])

    factors = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 6, bias=False))
    mlp = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10))
    return {
        "reduced rank regression": (factors, (randn(60, 6), randn(60, 6)), 64),
        "MLP": (mlp, (randn(64, 64), randn(64, 10)), 1),
        "attention, small": (attention(64, 1), (randn(8, 16, 64), randn(8, 16, 64)), 1),
        "attention, large": (attention(128, 4), (randn(8, 32, 128), randn(8, 32, 128)), 1),
    }


def clock(params: Any = None) -> Tensor:
    """Seconds of this process."""
    return torch.tensor(time.process_time(), dtype=torch.float64)


def timed(module: nn.Module, batch: tuple[Tensor, Tensor], chains: int, rounds: int = 7) -> dict[str, Any]:
    """Process time of a step of one chain in ms, medians over draws: ours, ours compiled, devinterp's and a gradient alone."""
    from devinterp.optim.sgmcmc import SGMCMC

    forward, params, _ = bc.make_functional(module)
    optimizer, mse = (
        SGMCMC.sgld(module.parameters(), lr=1e-6, nbeta=100.0, localization=1.0),
        nn.functional.mse_loss,
    )
    about = {"temperature": 0.01, "strength": 0.01, "lr": 1e-6, "momentum": 0.9, "chains": chains, "burn_in": 0}

    def ours(capture: bool = False) -> float:
        def loss(p: Any, data: Any) -> Tensor:
            return mse(forward(p, (data[0], None)), data[1])

        run = bc.observe(loss, params, batch, {"clock": clock}, steps=50 * THINNING, capture=capture, **about)
        return float(run.traces["clock"][0].diff().median()) / chains

    def theirs(moves: bool = True) -> float:
        times = [clock()]
        for _ in range(50):
            for _ in range(THINNING):
                optimizer.zero_grad()
                mse(module(batch[0]), batch[1]).backward()
                if moves:
                    optimizer.step()
            times.append(clock())
        return float(torch.stack(times).diff().median())

    contestants = {"ours": ours, "compiled": partial(ours, True), "theirs": theirs, "gradient": partial(theirs, False)}
    times: dict[str, list[float]] = {who: [] for who in contestants}
    for _ in range(rounds):
        for who, run in contestants.items():
            times[who].append(1000 / THINNING * run())
    shortest = {f"{who}_ms": min(x) for who, x in times.items()}
    ratios = {who: ratio(times, who, "theirs") for who in ("ours", "compiled", "gradient")}
    return {"chains": chains, "weights": sum(x.numel() for x in module.parameters()), **shortest, "ratios": ratios}


if __name__ == "__main__":
    if command(speed=False).speed:
        speed = {name: timed(*network) for name, network in networks().items()}
        keep(PATH, known(PATH) | {"speed": speed})
    rows = known(PATH)["speed"].items()
    head = ("network", "chains", "ours / devinterp", "compiled", "the gradient alone")
    print(
        markdown(
            head, [(name, row["chains"], *(f"{r['ratio']:.2f}" for r in row["ratios"].values())) for name, row in rows]
        )
    )
