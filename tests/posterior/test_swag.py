"""SWAG against its definition, its expectation and its own draws."""

import math

import optree
import pytest
import torch
import torchopt

import bayesopt_chain as bc
from bayesopt_chain.precision import flatten
from tests.posterior.conftest import moments

pytestmark = pytest.mark.usefixtures("double_precision")


P = 6


def tree(flat):
    """``[..., 6]`` as a matrix and a vector."""
    return {"a": flat[..., :4].reshape(*flat.shape[:-1], 2, 2), "b": flat[..., 4:]}


def collect(link, trajectory, inplace=False, dtype=None):
    """Feed iterates to the link: it sees the parameters before a step and the update that leads to each."""
    params = tree(torch.zeros(P, dtype=dtype))
    state = link.init(params)
    for point in trajectory:
        updates = optree.tree_map(torch.sub, tree(point), params)
        _, state = link.update(updates, state, params=params, inplace=inplace)
        params = tree(point)
    return params, state


def fitted(link, trajectory, inplace=False, dtype=None):
    """The posterior of the iterates."""
    params, state = collect(link, trajectory, inplace, dtype)
    return link.posterior(state, params)


def by_definition(trajectory, rank):
    """Mean and covariance of the paper, from the whole trajectory."""
    means = trajectory.cumsum(0) / torch.arange(1, len(trajectory) + 1)[:, None]
    variance = trajectory.square().mean(0) - means[-1].square()
    if rank == 0:
        return means[-1], torch.diag(variance)
    deviations = (trajectory - means)[-rank:]
    return means[-1], 0.5 * torch.diag(variance) + deviations.T @ deviations / (2 * (len(deviations) - 1))


def iterates(n):
    """With correlations across the two parameters."""
    generator = torch.Generator().manual_seed(12)
    root = torch.randn(P, P, generator=generator)
    return torch.randn(n, P, generator=generator) @ root.T + 1.0


WHOLE = [({}, n, slice(n)) for n in (2, 3, 4, 9, 40)]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(("schedule", "n", "taken"), [*WHOLE, ({"start": 3, "every": 2}, 10, slice(3, None, 2))])
@pytest.mark.parametrize("rank", [0, 2, 4, 6])
def test_the_posterior_is_the_papers(rank, schedule, n, taken, inplace):
    """Ring part-filled, just full and wrapped around, and of the iterates after updates 4, 6, 8 and 10 of ten: mean and
    covariance across parameters to 1e-10."""
    link = bc.swag(rank=rank, **schedule)
    params, state = collect(link, iterates(n), inplace)
    assert (int(state[0].collected), int(state[0].step)) == (len(range(n)[taken]), n)
    got, wanted = moments(link.posterior(state, params)), by_definition(iterates(n)[taken], rank)
    torch.testing.assert_close(got[0], wanted[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(got[1], wanted[1], rtol=1e-10, atol=1e-10)


def test_rank_zero_is_stochastic_weight_averaging():
    """In a chain, of the iterates that the optimizer makes; before the first the mean is the parameters."""
    link = bc.swag(rank=0)
    tx = bc.chain(bc.sgd(0.1, 0.9), link)
    params = tree(torch.ones(P))
    state = tx.init(params)
    assert torch.equal(link.mean(state, params)["b"], params["b"])
    seen = []
    step = bc.make_step(lambda p, batch: sum(x.square().sum() for x in p.values()), tx)
    for _ in range(7):
        params, state, _ = step(params, state, None)
        seen.append(flatten(params, params))
    torch.testing.assert_close(flatten(link.mean(state, params), params), torch.stack(seen).mean(0))


@pytest.mark.parametrize("rank", [0, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_averages_of_16_bit_parameters_are_summed_in_32(dtype, rank):
    """In bfloat16 a mean takes up nothing further after some hundred iterates, and its variance was too large by two fifths."""
    drift = torch.linspace(1, 1.5, 1000)[:, None] + 0.1 * torch.randn(
        1000, P, generator=torch.Generator().manual_seed(4)
    )
    trajectory = drift.to(dtype)
    params, state = collect(bc.swag(rank=rank), trajectory, dtype=dtype)
    link = bc.swag(rank=rank)
    posterior, average = link.posterior(state, params), link.mean(state, params)
    assert average["b"].dtype == dtype and posterior.mean["b"].dtype == torch.float32
    mean, covariance = by_definition(trajectory.double(), rank)
    torch.testing.assert_close(flatten(posterior.mean, posterior.mean).double(), mean, rtol=0, atol=5e-3)
    variance = flatten(posterior.marginal_variance, posterior.mean).double()
    torch.testing.assert_close(variance, covariance.diagonal(), rtol=0.05, atol=0)


def test_small_moves_far_from_zero_do_not_cancel():
    """float32 at 1,000 with deviations of 0.01: the variance to 2 %, where mean square minus square mean is lost."""
    trajectory = (1000 + 0.01 * torch.randn(50, P, generator=torch.Generator().manual_seed(3))).to(torch.float32)
    exact = trajectory.double().var(0, unbiased=False)
    variance = fitted(bc.swag(rank=0), trajectory, dtype=torch.float32).marginal_variance
    got = flatten(variance, variance).double()
    assert ((got - exact) / exact).abs().max() < 0.02
    naive = (trajectory.square().mean(0) - trajectory.mean(0).square()).double()
    assert ((naive - exact) / exact).abs().max() > 1


def test_stacked_states_are_multiswag():
    """Three runs by ``bc.parallel``; each member's Gaussian is that of the run alone."""
    link = bc.swag(rank=2)
    tx = bc.chain(bc.sghmc(0.1, temperature=0.1), link)
    step = bc.make_step(lambda p, batch: 0.5 * sum(x.square().sum() for x in p.values()), tx)
    starts = [tree(torch.full((P,), float(i))) for i in range(3)]
    chains = bc.parallel(step, 3)
    params = bc.stack(starts)
    state = chains.init(tx, params)
    singles = [optree.tree_map(lambda x, i=i: x[i], (params, state)) for i in range(3)]
    for _ in range(5):
        params, state, _ = chains(params, state, None)
    members = torch.vmap(lambda s, p: link.posterior(s, p).marginal_variance)(state, params)
    for i, (p, s) in enumerate(singles):
        for _ in range(5):
            p, s, _ = step(p, s, None)
        torch.testing.assert_close(members["a"][i], link.posterior(s, p).marginal_variance["a"])


def test_a_mask_collects_some_parameters_only():
    link = bc.swag(rank=2)
    tx = bc.chain(bc.sgd(0.1), bc.masked(link, {"a": True, "b": False}))
    params = tree(torch.ones(P))
    state = tx.init(params)
    for _ in range(3):
        updates, state = tx.update(optree.tree_map(torch.clone, params), state, params=params, inplace=False)
        params = optree.tree_map(torch.add, params, updates)
    posterior = link.posterior(state, {"a": params["a"]})
    assert set(posterior.mean) == {"a"}
    with pytest.raises(ValueError, match="the state is over parameters of"):
        link.posterior(state, params)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        *((lambda link, s, p, r=r: bc.swag(rank=r), "swag: rank must") for r in (-1, 1, 2.5)),
        (lambda link, s, p: bc.swag(rank=7).init(p), "above the number of parameters, 6"),
        (lambda link, s, p: bc.swag(start=-1), "swag: start must"),
        (lambda link, s, p: bc.swag(every=0), "swag: every must"),
        (lambda link, s, p: link.posterior(s, p), "1 iterates collected, at least 2"),
        *(
            (lambda link, s, p, f=f: bc.swag(variance_floor=f), "variance_floor must be a positive")
            for f in (0.0, -1.0, math.nan)
        ),
        (
            lambda link, s, p: fitted(link, iterates(4).index_fill(1, torch.tensor(5), math.nan)),
            "the mean of the iterates is NaN at b",
        ),
        (lambda link, s, p: link.posterior(bc.sgd(0.1).init(p), p), "holds 0 states of swag"),
        (lambda link, s, p: link.update(p, s, inplace=False), "needs the parameters"),
        (lambda link, s, p: bc.chain(link, bc.sgd(0.1)).init(p), "stands behind it.*write swag last"),
        (
            lambda link, s, p: bc.chain(bc.skip_nonfinite(link), bc.sgd(0.1)).init(p),
            "stands behind it.*write swag last",
        ),
        (
            lambda link, s, p: bc.chain(
                bc.skip_nonfinite(bc.chain(bc.skip_nonfinite(bc.chain(bc.sgd(0.1), link)), bc.laplace())), bc.sgd(0.1)
            ).init(p),
            "stands behind it.*write swag last",
        ),
    ],
)
def test_bad_input_is_refused(call, words):
    link = bc.swag(rank=2)
    params, state = collect(link, iterates(1))
    with pytest.raises((ValueError, TypeError), match=words):
        call(link, state, params)


@pytest.mark.parametrize("rank", [0, 3])
def test_entries_that_never_moved_have_the_floors_variance(rank):
    """The rest of the covariance is the definition's, to 1e-12; a wider floor is a wider draw."""
    stuck = iterates(6)
    stuck[:, 4:] = 0.5
    wanted = by_definition(stuck, rank)[1]
    for floor in (1e-30, 1e-4):
        posterior = fitted(bc.swag(rank=rank, variance_floor=floor), stuck)
        covariance = flatten(posterior.precision.solve(tree(torch.eye(P))), posterior.mean)
        torch.testing.assert_close(covariance[:4, :4], wanted[:4, :4], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(covariance[4:, 4:], floor * torch.eye(2), rtol=1e-6, atol=0)
        draws = posterior.sample((200,), generator=torch.Generator().manual_seed(0))["b"]
        assert (draws - 0.5).abs().max() < 6 * math.sqrt(floor) + 1e-15
        assert torch.isfinite(posterior.log_prob(posterior.mean))


@pytest.mark.parametrize(
    "around",
    [lambda *x: bc.skip_nonfinite(bc.chain(*x)), torchopt.chain, lambda *x: torchopt.chain(torchopt.chain(*x))],
)
def test_the_average_is_found_in_wrappers_and_in_chains_of_torchopt(around):
    average, means = bc.swag(rank=2), []
    for tx in (bc.chain(bc.sgd(0.1), average), around(torchopt.sgd(0.1), average)):
        params = torch.ones(4, dtype=torch.float64)
        state = tx.init(params)
        for _ in range(5):
            updates, state = tx.update(params.sin(), state, params=params, inplace=False)
            params = params + updates
        means.append(torch.stack([average.mean(state, params), average.posterior(state, params).marginal_variance]))
    torch.testing.assert_close(*means, rtol=0, atol=0)
