"""Means and covariances from block sums: the numbers of all draws at once, and errors that are as large as they say."""

import pytest
import torch

from bayesopt_chain.diagnostics.observables.sums import Record, merged


def autoregressive(chains, draws, m, phi, seed):
    """Stationary series of variance 1, ``[C, draws, m]``."""
    g = torch.Generator().manual_seed(seed)
    noise = torch.randn(chains, draws, m, generator=g, dtype=torch.float64)
    out = [noise[:, 0]]
    for t in range(1, draws):
        out.append(phi * out[-1] + (1 - phi**2) ** 0.5 * noise[:, t])
    return torch.stack(out, 1)


def recorded(y, x, kept=(), chains=slice(None)):
    m, n = y.shape[2], x.shape[2]
    shift = {"y": torch.full((m,), 0.3, dtype=torch.float64), "x": torch.zeros(n, dtype=torch.float64)}
    record = Record(len(y[chains]), {"y": (m,), "x": (n,)}, [("y", "x")], kept, shift)
    for t in range(y.shape[1]):
        record.add({"y": y[chains, t], "x": x[chains, t]})
    return record


@pytest.mark.parametrize("draws", [3, 8, 21, 700, 1029])
def test_every_draw_counts_and_all_ways_to_sum_agree(draws):
    """Also draws that fill no unit of 8; along the way, from kept draws, and merged from chains that ran apart."""
    y, x = autoregressive(4, draws, 20, 0.5, 0) + 2.0, autoregressive(4, draws, 30, 0.5, 1)
    flat = [z.reshape(-1, z.shape[2]) for z in (y, x)]
    off = [z - z.mean(0) for z in flat]
    want = off[0].T @ off[1] / (4 * draws - 1)
    apart = merged([recorded(y, x, chains=slice(i, i + 1)) for i in range(4)])
    for record in (recorded(y, x), recorded(y, x, ("y", "x")), apart):
        found, mean = record.covariance("y", "x"), record.mean("y")
        assert torch.allclose(found.value, want, rtol=0, atol=1e-13)
        assert torch.allclose(mean.value, flat[0].mean(0), rtol=0, atol=1e-13)
        assert torch.allclose(record.covariance("x", "y").error, found.error.T, equal_nan=True)
        if draws > 100:
            assert torch.allclose(found.error, recorded(y, x).covariance("y", "x").error, rtol=1e-9)
            assert torch.allclose(mean.error, recorded(y, x).mean("y").error, rtol=1e-9)
    assert torch.allclose(recorded(y, x, ("y", "x")).trace("y"), y, rtol=0, atol=1e-15)


@pytest.mark.parametrize("chains", [4, 8])
@pytest.mark.parametrize(("phi", "draws"), [(0.0, 500), (0.9, 1000), (0.97, 2000)])
def test_errors_are_calibrated(phi, draws, chains):
    """z of rms 1 within .1 over 400 series and 8,000 products, of 30 relaxations a chain or more: sampling error about .035."""
    y, x = autoregressive(chains, draws, 400, phi, 2), autoregressive(chains, draws, 20, phi, 3)
    record = recorded(y, x)
    for found in (record.mean("y"), record.covariance("y", "x")):
        z = found.value / found.error
        assert z.square().mean().sqrt() == pytest.approx(1.0, abs=0.1)
        assert found.agree.double().mean() > 0.9


def test_chains_that_stay_apart_are_told_and_their_spread_is_the_error():
    y = autoregressive(8, 400, 5, 0.5, 4) + torch.randn(8, 1, 5, generator=torch.Generator().manual_seed(1))
    found = recorded(y, y).mean("y")
    assert not found.agree.any()
    assert torch.allclose(found.error, (y.mean(1).var(0) / 8).sqrt())


def test_a_record_goes_on_from_its_state_and_refuses_that_of_other_observables():
    y, x = autoregressive(2, 203, 20, 0.5, 0), autoregressive(2, 203, 3, 0.5, 1)
    whole, half = recorded(y, x), recorded(y[:, :101], x[:, :101])
    again = recorded(y[:, :0], x[:, :0])
    again.load_state_dict(half.state_dict())
    for t in range(101, 203):
        again.add({"y": y[:, t], "x": x[:, t]})
    for a, b in zip(whole.covariance("y", "x"), again.covariance("y", "x")):
        assert torch.equal(a, b)
    assert torch.equal(whole.trace("x"), again.trace("x"))
    with pytest.raises(ValueError, match="whose shapes of observables are"):
        recorded(y[:, :0, :9], x[:, :0]).load_state_dict(half.state_dict())
    with pytest.raises(ValueError, match="no 'y' of which all draws are kept; there are 'x'"):
        whole.trace("y")
    with pytest.raises(ValueError, match="ended before its first draw"):
        recorded(y[:, :0], x[:, :0]).mean("y")
