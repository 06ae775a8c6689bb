"""A posterior with four modes by variational inference and SGHMC (its ``double_well.py``)."""

# The types of posteriors are narrower than what it takes.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch

from benchmarks.experiments.double_well import potential


def data(steps: int = 10_000) -> int:
    """Steps of SGHMC; a fifth of variational inference."""
    return steps


def theirs(steps: int) -> dict[str, Any]:
    """With posteriors."""
    import posteriors
    import torchopt

    def log_posterior(x, batch):
        return -potential(x, batch), torch.tensor([])

    vi = posteriors.vi.diag.build(log_posterior, optimizer=torchopt.adam(lr=1e-2), init_log_sds=-2.0)
    state, bounds = vi.init(torch.zeros(2)), []
    for _ in range(steps // 5):
        state, _ = vi.update(state, None)
        bounds.append(state.nelbo)
    sghmc = posteriors.sgmcmc.sghmc.build(log_posterior, lr=5e-2, alpha=1.0)
    chain, draws = sghmc.init(torch.zeros(2)), []
    for _ in range(steps):
        chain, _ = sghmc.update(chain, None)
        draws.append(chain.params)
    return {
        "mean": state.params,
        "log sd": state.log_sd_diag,
        "bounds": torch.stack(bounds),
        "draws": torch.stack(draws),
    }


def ours(steps: int) -> dict[str, Any]:
    """With this library: lr is the square of theirs, momentum ``1 - lr alpha``."""
    import bayesopt_chain as bc

    vi = bc.vi.mean_field(bc.adam(1e-2), temperature=1.0, init_scale=0.1353)
    step, mean, bounds = bc.make_step(potential, vi), torch.zeros(2), []
    state = vi.init(mean)
    for _ in range(steps // 5):
        mean, state, info = step(mean, state, None)
        bounds.append(info.negative_elbo)
    sghmc, start = bc.sghmc(5e-2**2, momentum=0.95, temperature=1.0), torch.zeros(2)
    draws = bc.sample(bc.make_step(potential, sghmc), start, sghmc.init(start), None, steps=steps).params
    deviation = vi.posterior(state, mean).marginal_variance.sqrt()
    return {"mean": mean, "log sd": deviation.log(), "bounds": torch.stack(bounds), "draws": draws}


def compare(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[float, float, float]]:
    """Their number, ours, and how far apart they may be: by chance, since each draws its own noise."""
    half = len(a["bounds"]) // 2
    return {
        "distance of the mean from 0": (a["mean"].abs().mean().item(), b["mean"].abs().mean().item(), 0.15),
        "log deviation": (a["log sd"].mean().item(), b["log sd"].mean().item(), 0.15),
        "negative ELBO": (a["bounds"][half:].mean().item(), b["bounds"][half:].mean().item(), 0.15),
        "SGHMC's mean of x^2 (exactly 4.36)": (
            a["draws"].square().mean().item(),
            b["draws"].square().mean().item(),
            0.6,
        ),
    }
