"""R-hat, effective sample size and kernel Stein discrepancy against formulas written here, and what they say of draws."""

import math

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.diagnostics import convergence
from tests.refusals import refused

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


def test_mixed_chains_read_one_and_separate_modes_and_a_single_chain_that_drifts_do_not():
    assert (bc.diagnostics.r_hat({"w": chains(2000)})["w"] < 1.01).all()
    apart = chains() + torch.tensor([0.0, 0.0, 5.0, 5.0])[:, None]
    assert (bc.diagnostics.r_hat({"w": apart})["w"] > 1.5).all()
    assert (bc.diagnostics.ess({"w": apart})["w"] < 10).all()
    one = torch.randn(400, 1, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rising = one + torch.linspace(0, 3, 400)[:, None, None]
    assert float(bc.diagnostics.r_hat(one)) < 1.02 and float(bc.diagnostics.r_hat(rising)) > 1.2


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


def test_equal_values_have_equal_ranks_so_that_draws_of_yes_and_no_do_not_seem_to_drift():
    """``Phi^-1`` of the mean ranks of zeros and ones, times the difference of their shares in the last and the first third."""
    x = (torch.rand(900, 4, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64) < 0.3).double()
    n, ones = x.numel(), x.sum().item()
    ranks = torch.tensor([(n - ones + 1) / 2, n - (ones - 1) / 2], dtype=torch.float64)
    low, high = torch.special.ndtri((ranks - 0.375) / (n + 0.25)).tolist()
    size, p_value = convergence.drift(x)
    assert size == pytest.approx((x[-300:].mean() - x[:300].mean()).item() * (high - low), abs=1e-12)
    assert p_value > 0.01


K = torch.tensor([[2.0, 0.3], [0.3, 1.0]], dtype=torch.float64)


def score(params):
    return {"w": -K @ params["w"]}


def by_definition(x, h):
    """Mean of k0 over pairs, every derivative by autograd."""

    def k(a, b):
        return (1 + ((a - b) ** 2).sum() / h**2) ** -0.5

    total = 0.0
    for a in x:
        for b in x:
            s, t = -K @ a, -K @ b
            da, db = torch.func.grad(k, 0)(a, b), torch.func.grad(k, 1)(a, b)
            mixed = torch.func.jacfwd(torch.func.grad(k, 0), 1)(a, b).trace()
            total += (s @ t * k(a, b) + s @ db + t @ da + mixed).item()
    return total / len(x) ** 2


@pytest.mark.sweep(1)
@pytest.mark.parametrize("block", [3, 100])
def test_it_is_its_definition(block, monkeypatch):
    monkeypatch.setattr(convergence, "BLOCK", block)
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    got = bc.diagnostics.ksd({"w": x}, score, bandwidth=0.7)
    assert got == pytest.approx(math.sqrt(by_definition(x, 0.7)), rel=1e-10)


def test_between_exact_draws_it_is_zero_within_its_error():
    """Less ``k0(x, x) = |s|^2 + d / h^2``, which is what a draw has with itself."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(100, 200, 2, generator=g, dtype=torch.float64) @ torch.linalg.cholesky(torch.linalg.inv(K)).T
    values = torch.tensor([bc.diagnostics.ksd({"w": rows}, score, bandwidth=1.0) for rows in x])
    values = values.square() - ((x @ K).square().sum((1, 2)) / 200 + 2) / 200
    assert abs(values.mean()) < 4 * values.std() / 10  # false alarm 6e-5


def test_it_falls_with_the_draws_and_sees_a_wrong_temperature():
    g = torch.Generator().manual_seed(4)
    x = torch.randn(2000, 2, generator=g, dtype=torch.float64) @ torch.linalg.cholesky(torch.linalg.inv(K)).T
    few, many, hot = (bc.diagnostics.ksd({"w": w}, score, bandwidth=1.0) for w in (x[:100], x, 1.5 * x))
    assert many < few / 2 and hot > 3 * many


def test_draws_that_are_not_finite_have_no_r_hat_though_they_have_ranks():
    x = chains(100, 4)
    x[3] = math.inf
    assert bc.diagnostics.r_hat({"w": x})["w"].isnan().all() and bc.diagnostics.ess({"w": x})["w"].isnan().all()


def test_chains_are_pooled():
    x = torch.randn(6, 2, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    draws = bc.Draws.from_trees([{"w": w} for w in x], chains=2)
    assert bc.diagnostics.ksd(draws, score) == pytest.approx(bc.diagnostics.ksd({"w": x.reshape(12, 2)}, score))


test_short_runs_and_what_is_unknown_are_refused = refused(
    [
        (
            lambda x: bc.diagnostics.ksd({"w": x[:, 0]}, lambda p: {"w": p["w"][:1]}),
            r"ksd: score at .* has shape \(6, 1\)",
        ),
        (lambda x: bc.diagnostics.ksd({"v": x[:, 0], "w": x[:5, 0]}, score), r"as many in every leaf, got \[5, 6\]"),
        (lambda x: bc.diagnostics.ksd({"w": x[:, 0]}, lambda p: {"v": p["w"]}), "ksd: score has the tree"),
        (
            lambda x: bc.diagnostics.ksd({"a": x[:, 0], "b": x[:, 0, 0]}, lambda p: {"a": p["b"], "b": p["a"]}),
            "score at",
        ),
        (lambda x: bc.diagnostics.ksd({"w": x[:1, 0]}, score), "at least 2"),
        (lambda x: bc.diagnostics.r_hat({"w": x[:3]}), "at least 4 draws.*; run longer"),
        (lambda x: bc.diagnostics.r_hat(x[:, 0, 0]), r"give draws of one chain as x\[:, None\]"),
        (lambda x: bc.diagnostics.r_hat({"w": x[:, :1]}), "at least 8 draws"),  # of which each half is split again
        (lambda x: bc.diagnostics.ess({"w": x}, kind="all"), "'bulk' or 'tail'"),
    ],
    of=lambda call: call(chains(6, 2)),
)
