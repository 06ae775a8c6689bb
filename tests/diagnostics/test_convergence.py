"""R-hat and effective sample size against formulas written here, and what they say of good and bad chains."""

import math

import pytest
import torch

import bayesopt_chain as bc

pytest.importorskip("arviz_stats")


def chains(n=400, m=4, seed=0):
    return torch.randn(n, m, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def split_r_hat(x):
    """R-hat of values ``[draws, chains]``: between and within variance of half chains (Gelman et al., BDA 3)."""
    half = len(x) // 2
    x = torch.cat([x[:half], x[-half:]], 1)
    within, between = x.var(0).mean(), half * x.mean(0).var()
    return (((half - 1) / half * within + between / half) / within).sqrt()


def rank_normal(x):
    rank = x.reshape(-1).argsort().argsort().double() + 1
    return torch.special.ndtri((rank - 0.375) / (x.numel() + 0.25)).reshape(x.shape)


def test_r_hat_is_the_larger_of_the_bulk_and_folded_rank_normalised_ones():
    x = chains()
    x[:, 0, 0] += 0.6  # one chain elsewhere
    x[:, 1, 1] *= 2.0  # one chain wider
    got = bc.diagnostics.r_hat({"w": x})["w"]
    for i in range(2):
        bulk = split_r_hat(rank_normal(x[..., i]))
        folded = split_r_hat(rank_normal((x[..., i] - x[..., i].quantile(0.5)).abs()))
        assert got[i].item() == pytest.approx(max(bulk.item(), folded.item()), abs=1e-6)
    assert (got > 1.01).all()


def test_mixed_chains_read_one_and_separate_modes_do_not():
    assert (bc.diagnostics.r_hat({"w": chains(2000)})["w"] < 1.01).all()
    apart = chains()
    apart[:, 2:] += 5.0
    assert (bc.diagnostics.r_hat({"w": apart})["w"] > 1.5).all()
    assert (bc.diagnostics.ess({"w": apart})["w"] < 10).all()


def test_the_effective_size_of_an_autoregression_is_its_closed_form():
    rho, n = 0.9, 20000
    g = torch.Generator().manual_seed(2)
    noise, x = torch.randn(n, 4, generator=g, dtype=torch.float64), torch.zeros(n, 4, dtype=torch.float64)
    for t in range(1, n):
        x[t] = rho * x[t - 1] + math.sqrt(1 - rho**2) * noise[t]
    got = bc.diagnostics.ess({"w": x})["w"].item()
    assert got == pytest.approx(4 * n * (1 - rho) / (1 + rho), rel=0.12)  # about 5 % of standard error


def test_draws_of_one_chain_are_split():
    draws = bc.Draws.from_trees([{"w": w} for w in chains(200, 1)[:, 0]])
    assert bc.diagnostics.r_hat(draws)["w"].shape == (2,)
    assert bc.diagnostics.ess(draws, kind="tail")["w"].shape == (2,)


def test_short_runs_and_other_kinds_are_refused():
    with pytest.raises(ValueError, match="at least 4 draws"):
        bc.diagnostics.r_hat({"w": chains(3)})
    with pytest.raises(ValueError, match="'bulk' or 'tail'"):
        bc.diagnostics.ess({"w": chains()}, kind="all")


def test_a_single_chain_that_drifts_has_not_converged_and_a_stationary_one_has():
    x = torch.randn(400, 1, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert float(bc.diagnostics.r_hat(x)) < 1.02
    assert float(bc.diagnostics.r_hat(x + torch.linspace(0, 3, 400)[:, None, None])) > 1.2
