"""What the doctor tells from draws alone: chains that share noise, and drifts that all share. Each test names its odds."""

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.diagnostics._agreement import drift, shared_noise

DRAWS = 300


def slow(noise, start, forgets):
    """Autoregressive chains with variance 1 from these starts, driven by noise of the shape ``[draws, chains, elements]``."""
    x = [start]
    for e in noise:
        x.append(forgets * x[-1] + (1 - forgets**2) ** 0.5 * e)
    return torch.stack(x[1:])


def stationary(seed, forgets, draws=DRAWS, chains=4, elements=4):
    g = torch.Generator().manual_seed(seed)
    start = torch.randn(chains, elements, generator=g, dtype=torch.float64)
    return slow(torch.randn(draws, chains, elements, generator=g, dtype=torch.float64), start, forgets)


def one_seed(forgets=0.7, chains=4):
    """All chains have the same noise, and starts of their own."""
    g = torch.Generator().manual_seed(0)
    noise = torch.randn(DRAWS, 1, 4, generator=g, dtype=torch.float64).expand(-1, chains, -1)
    return slow(noise, torch.arange(chains).double()[:, None].expand(-1, 4), forgets)


def diagnosed(x):
    return bc.diagnostics.doctor(bc.Draws.from_trees([{"w": t} for t in x], chains=x.shape[1]))


def test_one_seed_from_different_starts_is_one_chain():
    found = diagnosed(one_seed())
    assert found.findings[0].kind == "duplicate" and "same noise" in str(found)


@pytest.mark.parametrize("behind", [1, 3, 100])
def test_a_copy_that_lags_behind_is_one_chain(behind):
    x = stationary(1, 0.8)
    x[behind:, 1] = x[:-behind, 0].clone()
    found = diagnosed(x)
    assert found.findings[0].kind == "duplicate" and f"{behind} draw" in found.findings[0].says


def test_a_copy_up_to_rounding_is_one_chain():
    x = stationary(1, 0.0)
    x[:, 1] = x[:, 0] * (1 + 1e-7)
    assert diagnosed(x).findings[0].kind == "duplicate"


def test_chains_that_share_much_of_their_noise_are_told_from_one_chain():
    g = torch.Generator().manual_seed(2)
    own, common = (torch.randn(DRAWS, c, 4, generator=g, dtype=torch.float64) for c in (4, 1))
    assert diagnosed(0.5 * own + common).kinds == {"together"}
    assert diagnosed(own + 0.5 * common).is_healthy  # a fifth of the noise


@pytest.mark.sweep(1)
@pytest.mark.parametrize("forgets", [0.0, 0.9, 0.99])
def test_independent_chains_are_not_called_one_however_slow_they_are(forgets):
    """At the level 0.05, 30 runs: over 6 alarms have probability 4e-4 at most; at the level of the doctor, one has 0.003."""
    runs = [stationary(seed, forgets) for seed in range(30)]
    assert sum(shared_noise(x, level=0.05) is not None for x in runs) <= 6
    assert all(shared_noise(x) is None for x in runs)


@pytest.mark.parametrize("chains", [1, 2, 4])
@pytest.mark.parametrize("size", [1.7, 3.3, 6.7])
def test_a_line_in_all_chains_is_a_drift(chains, size):
    found = diagnosed(stationary(3, 0.0, chains=chains) + torch.linspace(0, size, DRAWS).double()[:, None, None])
    assert "mixing" in found.kinds and "draws drift" in str(found)


def test_a_line_much_steeper_than_the_noise_is_a_drift():
    found = diagnosed(stationary(3, 0.0) + torch.linspace(0, 16.7, DRAWS).double()[:, None, None])
    assert found.findings[0].kind == "mixing" and found.numbers["drift, probability"] < 1e-3


@pytest.mark.sweep(3)
@pytest.mark.parametrize("chains", [1, 4])
@pytest.mark.parametrize("forgets", [0.0, 0.9, 0.97])
def test_chains_at_rest_do_not_drift_however_slow_they_are(chains, forgets):
    """At the level 0.05, 30 runs of 1, 4.5 to 300 effective draws a chain: more than 7 alarms have probability 1e-3 at most."""
    found = [drift(stationary(seed, forgets, chains=chains)) for seed in range(30)]
    assert sum(p < 0.05 for _, p in found) <= 7


def test_chains_of_one_seed_are_not_called_drifting():
    """Chains that are one have one difference of thirds, which is no proof that it is not zero."""
    assert diagnosed(one_seed()).kinds == {"duplicate"}


def test_slow_chains_with_enough_draws_are_healthy():
    """About 15 effective draws a chain; the levels of the doctor's tests, 0.01 each, allow about 1 in 20 runs of 40."""
    found = [diagnosed(stationary(seed, 0.9)) for seed in range(20)]
    assert sum(not d.is_healthy for d in found) <= 2
