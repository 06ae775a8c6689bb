"""Herded order: a permutation in which the table's neighbouring entries cancel, so that batches heat a chain less."""

import itertools

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.data.index_stream import herded
from tests.diagnostics.oracle import DOUBLE, affine, lyapunov


def heat(tx, H, noises, orders):
    """Second moment about the mode that batches in these equally likely orders add, exactly, over the variance.

    ``x_L = M^L x_0 + s`` with ``s`` of the epoch's order, independent of ``x_0``; its mean need not vanish.
    """
    M, gamma, F = affine(tx, H, torch.zeros(len(H), dtype=DOUBLE))
    L, n = len(noises), len(M)
    paths = torch.zeros(len(orders), L, n, dtype=DOUBLE)
    for path, order in zip(paths, orders):
        x = torch.zeros(n, dtype=DOUBLE)
        for t, j in enumerate(order):
            x = path[t] = M @ x - gamma @ noises[j]
    powers = [torch.linalg.matrix_power(M, t + 1) for t in range(L)]
    means = paths.mean(0)
    start = torch.linalg.solve(torch.eye(n, dtype=DOUBLE) - powers[-1], means[-1])
    cross = powers[-1] @ torch.outer(start, means[-1])
    S = lyapunov(powers[-1], paths[:, -1].T @ paths[:, -1] / len(orders) + cross + cross.T)
    total, variance = torch.zeros(len(H), dtype=DOUBLE), lyapunov(M, F @ F.T).diagonal()[: len(H)]
    for t, B in enumerate(powers):
        cross = B @ torch.outer(start, means[t])
        second = B @ S @ B.T + cross + cross.T + paths[:, t].T @ paths[:, t] / len(orders)
        total += second.diagonal()[: len(H)] / L
    return total / variance


@pytest.mark.parametrize("K", [4, 5])
def test_over_all_orders_herded_batches_heat_less_than_reshuffled_ones(K):
    """Every permutation of ``K`` batches is herded; the map of the chain is composed along each. In sum over directions: what
    herding keeps small is the length of sums."""
    noises = torch.randn(K, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(K)) * 0.1
    noises -= noises.mean(0)
    H, tx = torch.diag(torch.tensor([1.0, 0.3], dtype=DOUBLE)), bc.sghmc(0.1, momentum=0.5, temperature=0.01)
    plain = [torch.tensor(p) for p in itertools.permutations(range(K))]
    ordered = [herded(p, noises) for p in plain]
    assert all(torch.equal(p.sort().values, torch.arange(K)) for p in ordered)
    before, after = heat(tx, H, noises, plain), heat(tx, H, noises, ordered)
    known = bc.diagnostics.heating(
        tx,
        bc.diagnostics.gradient_noise(
            lambda w, n: (n @ w).mean(), torch.zeros(2, dtype=DOUBLE), [x[None] for x in noises]
        ),
        order="reshuffled",
        steps_per_epoch=K,
        curvature=H,
    )
    torch.testing.assert_close(before, known.excess, rtol=1e-9, atol=0)
    assert after.sum() < 0.7 * before.sum(), (before, after)


def test_a_table_of_the_noise_takes_the_heat_of_a_thousand_data_away():
    """Sums over any part of an epoch, in units of the sums that random orders have: 1 for those."""
    z = torch.randn(1000, 3, dtype=DOUBLE)
    z -= z.mean(0)
    ordered = [z[herded(torch.randperm(1000), z)].cumsum(0) for _ in range(3)]
    plain = [z[torch.randperm(1000)].cumsum(0) for _ in range(3)]
    assert sum(x.norm(dim=1).mean() for x in ordered) < 0.15 * sum(x.norm(dim=1).mean() for x in plain)


def test_it_is_a_function_of_the_position_and_resumes_anywhere():
    table = torch.randn(20, 2)
    data = bc.epochs(torch.arange(20), 4, order="herded", table=table, seed=3)
    assert torch.equal(data.rows(5, 2), bc.epochs(torch.arange(20), 4, order="herded", table=table, seed=3).rows(5, 2))
    for _ in range(2):
        assert sorted(torch.cat(list(data)).tolist()) == list(range(20))
    assert not torch.equal(data.rows(0, 0), data.rows(1, 0))
    again = bc.epochs(torch.arange(20), 4, order="herded", table=table, seed=3)
    again.load_state_dict(data.state_dict())
    assert torch.equal(next(iter(again)), next(iter(data)))
    other = bc.epochs(torch.arange(20), 4, order="herded", table=2 * table, seed=3)
    with pytest.raises(ValueError, match="state is that of other batches: table="):
        other.load_state_dict(data.state_dict())
    chains = bc.epochs(torch.arange(20), 4, order="herded", table=table, seed=3, chains=2, leave_out=torch.tensor([7]))
    assert chains.rows(0, 0).shape == (2, 4) and not (torch.stack([chains.rows(0, k) for k in range(4)]) == 7).any()


def test_the_table_of_the_gradients_is_taken_as_it_is():
    x = torch.randn(40, 2)
    loss = lambda w, x: ((w - x) ** 2).sum(-1).mean() / 2  # noqa: E731
    table = bc.gradients.gradient_table(loss, bc.epochs(x, 4), x.mean(0), rank=2)
    data = bc.epochs(x, 4, order="herded", table=table)
    assert torch.equal(data.rows(0, 0), bc.epochs(x, 4, order="herded", table=table.numbers).rows(0, 0))


def test_what_cannot_be_herded_is_refused():
    x = torch.arange(20.0)
    for order, table, message in (
        ("herded", None, "order='herded' needs table="),
        ("reshuffled", torch.ones(20, 1), "order='reshuffled' takes no table="),
        ("herded", torch.ones(19, 1), r"numbers \[20, r\] for each of the data, got \[19, 1\]"),
        ("herded", 3, r"numbers \[20, r\] for each of the data, got int"),
        ("herded", torch.full((20, 1), torch.nan), "not finite"),
    ):
        with pytest.raises(ValueError, match=message):
            bc.epochs(x, 4, order=order, table=table)
    data = bc.epochs(x, 4, order="herded", table=x[:, None])
    with pytest.raises(ValueError, match="a herded order, or one of one's own, is made outside of the program"):
        data.batch_at(torch.tensor(0))
    loss = lambda w, x: (w - x).square().mean() / 2  # noqa: E731
    noise = bc.diagnostics.gradient_noise(loss, torch.tensor(0.0), data)
    with pytest.raises(ValueError, match="order='reshuffled' is an upper bound"):
        bc.diagnostics.heating(bc.sghmc(0.01, temperature=0.05), noise)
