"""Logistic regression on the Pima Indians by SGHMC and variational inference (its ``pyro_pima_indians``)."""

# The types of posteriors are narrower than what it takes.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.experiments.pima import read


def data(steps: int = 27_000) -> tuple[Tensor, Tensor, int]:
    """Features ``[768, 8]``, standardised, classes ``[768]``, and the steps of SGHMC; a third of variational inference."""
    x, y = read()
    return x.float(), y.float(), steps


def theirs(problem: tuple[Tensor, Tensor, int]) -> dict[str, Any]:
    """With posteriors."""
    import posteriors
    import torchopt

    (x, y, steps), n = problem, len(problem[0])

    def log_posterior(w, batch):
        nll = torch.nn.functional.binary_cross_entropy_with_logits(batch[0] @ w, batch[1])
        return -nll - (w**2).sum() / (2 * n), torch.tensor([])

    sghmc = posteriors.sgmcmc.sghmc.build(log_posterior, lr=1e-2, temperature=1 / n, alpha=1.0)
    state, draws = sghmc.init(torch.zeros(8), momenta=0.0), []
    for _ in range(steps):
        state, _ = sghmc.update(state, (x, y))
        draws.append(state.params)
    kept = torch.stack(draws)[steps * 2 // 27 :: 5]
    vi = posteriors.vi.diag.build(log_posterior, torchopt.adam(), temperature=1 / n)
    state = vi.init(torch.zeros(8))
    for _ in range(steps // 3):
        state, _ = vi.update(state, (x, y))
    return {"mean": kept.mean(0), "sd": kept.std(0), "VI mean": state.params, "VI sd": state.log_sd_diag.exp()}


def ours(problem: tuple[Tensor, Tensor, int]) -> dict[str, Any]:
    """With this library; lr of SGHMC at four fifths of the stability limit."""
    import bayesopt_chain as bc

    (x, y, steps), n = problem, len(problem[0])

    def loss(w, batch):
        nll = torch.nn.functional.binary_cross_entropy_with_logits(batch[0] @ w, batch[1])
        return nll + (w**2).sum() / (2 * n)

    sghmc, start = bc.sghmc(3.0, momentum=0.9, temperature=1 / n), torch.zeros(8)
    step, state = bc.make_step(loss, sghmc), sghmc.init(start)
    draws = bc.sample(step, start, state, (x, y), steps=steps, burn_in=steps * 2 // 27, thinning=5).params
    vi = bc.vi.mean_field(bc.adam(1e-3), temperature=1 / n, init_scale=1.0)
    step, state, steps = bc.make_step(loss, vi), vi.init(start), steps // 3
    last: Any = bc.sample(step, start, state, (x, y), steps=steps, burn_in=steps - 1).last
    deviation = vi.posterior(last[1], last[0]).marginal_variance.sqrt()
    return {"mean": draws.mean(0), "sd": draws.std(0), "VI mean": last[0], "VI sd": deviation}


def compare(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[float, float, float]]:
    """Their number, ours, and how far apart they may be. Theirs takes steps a thousand times as short, and mixes the less."""
    return {
        "VI: means apart, in deviations": (0.0, ((a["VI mean"] - b["VI mean"]) / a["VI sd"]).abs().max().item(), 0.6),
        "VI: mean deviation": (a["VI sd"].mean().item(), b["VI sd"].mean().item(), 0.02),
        "SGHMC: means apart, in deviations": (0.0, ((a["mean"] - b["mean"]) / b["sd"]).abs().max().item(), 0.6),
        "SGHMC: mean deviation": (a["sd"].mean().item(), b["sd"].mean().item(), 0.02),
    }
