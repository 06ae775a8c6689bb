"""Simulation-based calibration: right posteriors pass, and each way of being wrong is named."""

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.testing import Calibration, sbc

L = 99
NOISE = torch.Generator()


def found(wide=1.0, shift=0.0, **options):
    """Of the mean of one datum with unit noise, under N(0, 1): N(y / 2, 1 / 2), perhaps too wide or off."""
    NOISE.manual_seed(7)
    posterior = lambda y: {"m": y / 2 + shift + wide * 0.5**0.5 * torch.randn(L, generator=NOISE)}  # noqa: E731
    prior = lambda g: {"m": torch.randn((), generator=g)}  # noqa: E731
    return sbc(posterior, prior, lambda p, g: p["m"] + torch.randn((), generator=g), simulations=400, **options)


def test_a_right_posterior_passes_and_a_wrong_one_is_called_by_its_fault():
    assert found().p_value > 0.01  # by chance it fails for one seed in a hundred
    assert "too narrow" in str(found(0.6)) and found(0.6).p_value < 1e-6
    assert "too wide" in str(found(1.6)) and found(1.6).p_value < 1e-6
    assert "too low" in str(found(shift=-0.5)) and "too high" in str(found(shift=0.5))


def test_a_quantity_that_reads_the_data_sees_what_no_parameter_shows():
    """The prior in the posterior's place: its parameters are calibrated, and it has not looked at the data."""
    NOISE.manual_seed(3)
    args = (lambda y: torch.randn(L, generator=NOISE), lambda g: torch.randn((), generator=g))
    simulator = lambda m, g: m + torch.randn((), generator=g)  # noqa: E731
    assert sbc(*args, simulator).p_value > 0.01
    assert sbc(*args, simulator, quantities=lambda m, y: (y - m).square()).p_value < 1e-6


def test_ties_of_whole_numbers_are_broken_evenly():
    NOISE.manual_seed(4)
    coin = lambda g: (torch.rand((), generator=g) < 0.3).float()  # noqa: E731
    posterior = lambda y: (torch.rand(L, generator=NOISE) < 0.3).float()  # noqa: E731
    assert sbc(posterior, coin, lambda m, g: torch.zeros(())).p_value > 0.01


def test_ranks_counts_and_statistic_are_those_by_hand():
    c = Calibration(torch.tensor([[0], [1], [2], [2], [2], [1]]).repeat(4, 1), ["w"], 2)
    assert c.counts.tolist() == [[12], [12]] and c.expected.tolist() == [16.0, 8.0]  # ranks 0 and 1, and 2
    assert c.chi_squared.item() == pytest.approx(16 / 16 + 16 / 8)
    assert c.p_value == pytest.approx(0.0832645, abs=1e-6)


def test_all_simulations_together_give_the_ranks_of_one_after_another():
    draws = torch.linspace(-2, 2, 11)
    prior = lambda g: {"a": torch.randn(2, generator=g)}  # noqa: E731
    simulator = lambda p, g: p["a"] + torch.randn(2, generator=g)  # noqa: E731
    one = sbc(lambda y: {"a": y + draws[:, None]}, prior, simulator, simulations=30)
    all_of_them = sbc(lambda y: {"a": y + draws[:, None, None]}, prior, simulator, simulations=30, together=True)
    assert torch.equal(one.ranks, all_of_them.ranks) and one.names == ["a[0]", "a[1]"] and one.draws == 11


@pytest.mark.slow
def test_chains_of_this_library_pass_with_data_of_their_own():
    """Full batches of SGHMC at T = 1/N and prior precision 1/N: a regression line through eight points, 200 chains at once."""
    x = torch.linspace(-1, 1, 8)

    def posterior(y):
        loss = lambda p, y: (y - p[0] - p[1] * x).square().mean() / 2 + p.square().sum() / 16  # noqa: E731
        step = bc.make_step(loss, bc.sghmc(0.1, momentum=0.8, temperature=1 / 8))
        chains, start = bc.parallel(step, len(y), batch_dim=0), torch.zeros(len(y), 2)
        state = chains.init(step.tx, start, seed=1)
        return bc.sample(chains, start, state, y, steps=1600, burn_in=100, thinning=30).params

    prior = lambda g: torch.randn(2, generator=g)  # noqa: E731
    simulator = lambda p, g: p[0] + p[1] * x + torch.randn(8, generator=g)  # noqa: E731
    assert sbc(posterior, prior, simulator, together=True).p_value > 0.01


PAIR = lambda g: torch.randn(2, generator=g)  # noqa: E731


@pytest.mark.parametrize(
    "draws, more, error, words",
    [
        ({"w": torch.zeros(5, 2)}, {}, ValueError, "what make_posterior returns has the tree"),
        (torch.zeros(()), {}, TypeError, "what make_posterior returns must be"),
        (torch.zeros(5, 3), {}, ValueError, r"has shape \(5, 3\), the parameter \(2,\)"),
        (torch.zeros(1, 2), {}, ValueError, r"at least two finite draws, .* got draws \(1, 2\)"),
        (torch.full((5, 2), torch.nan), {}, ValueError, "finite"),
        (torch.zeros(5, 2), {"quantities": lambda p, y: p[:1] / y[1:]}, ValueError, "finite at the truth"),
        (torch.zeros(5, 2), {"simulations": 3}, ValueError, "simulations"),
    ],
)
def test_what_is_no_posterior_is_refused(draws, more, error, words):
    with pytest.raises(error, match=words):
        sbc(lambda y: draws, PAIR, lambda p, g: p * torch.tensor([1.0, 0.0]), **more)


def test_the_chains_of_draws_are_pooled():
    one, four = torch.randn(12, 2), lambda x: bc.Draws.from_trees([*x.reshape(3, 4, 2)], chains=4)
    ranks = [sbc(lambda y, f=f: f(one), PAIR, lambda p, g: p).ranks for f in (torch.Tensor.clone, four)]
    assert torch.equal(*ranks)
