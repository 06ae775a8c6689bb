"""What all transforms that carry a Gaussian share: one loop, states that are values, a Gaussian that says what is broken."""

import copy
import math

import optree
import pytest
import torch
import torchopt
from torch.distributions import MultivariateNormal

import bayesopt_chain as bc
from bayesopt_chain.posterior.gaussian import Gaussian
from bayesopt_chain.precision import (
    Dense,
    Diagonal,
    Kronecker,
    LowRank,
    Root,
    flatten,
    low_rank_covariance,
    shape_only,
)
from bayesopt_chain.testing import assert_bitwise_equal
from tests.loop.beside import each_alone
from tests.posterior.conftest import moments
from tests.refusals import refuse
from tests.walk import end_of

pytestmark = pytest.mark.usefixtures("double_precision")

ONE = torch.tensor(1.0)
LIKELIHOOD = bc.likelihoods.gaussian(0.5)


def start():
    """A matrix and a vector."""
    generator = torch.Generator().manual_seed(0)
    return {"a": torch.randn(2, 3, generator=generator), "b": torch.randn(2, generator=generator)}


def ones(params):
    return optree.tree_map(torch.ones_like, params)


def rows(params):
    return optree.tree_map(lambda p: torch.stack([torch.ones_like(p), p]), params)


def psd(n):
    root = torch.randn(n, n)
    return root @ root.T + 0.1 * torch.eye(n)


def sides(params):
    return {name: psd(p.shape[0]) for name, p in params.items()}, {"a": psd(3), "b": psd(1)}


PRECISIONS = {
    "dense": lambda p: Dense(psd(8), shape_only(p), ONE),
    "diagonal": lambda p: Diagonal(optree.tree_map(lambda x: x.square() + 0.2, p), ONE),
    "root": lambda p: Root(rows(p), ONE),
    "low_rank": lambda p: LowRank(optree.tree_map(lambda x: x.square() + 0.2, p), rows(p), ONE),
    "kronecker": lambda p: Kronecker(*sides(p), {"a": 0 * ONE, "b": 0 * ONE}, shape_only(p), ONE),
}
METHODS = {  # how a transform is made, its posterior's arguments, and the curvature that it is fed
    **{f"laplace, {name}": (bc.laplace, {"prior_precision": 1.0}, name) for name in PRECISIONS},
    "ekf.dense": (lambda: bc.ekf.dense(transition_noise=0.1), {}, "root"),
    "ekf.diagonal": (lambda: bc.ekf.diagonal(forgetting=0.9), {}, "root"),
    "ekf.low_rank": (lambda: bc.ekf.low_rank(rank=2), {}, "root"),
    "swag": (lambda: bc.swag(rank=3), {}, None),
    "swag, every other": (lambda: bc.swag(rank=2, every=2), {}, None),
    "vi.mean_field": (lambda: bc.vi.mean_field(bc.adam(0.1), temperature=0.1), {}, None),
    "vi.dense": (lambda: bc.vi.dense(bc.adam(0.1), temperature=0.1), {}, None),
    "vi.low_rank": (lambda: bc.vi.low_rank(bc.adam(0.1), temperature=0.1, rank=2), {}, None),
    "vi.ivon": (lambda: bc.vi.ivon(0.1, temperature=0.1), {}, None),
    "vi.von": (lambda: bc.vi.von(0.1, temperature=0.1), {}, "diagonal"),
}
ACCUMULATING = [name for name in METHODS if "vi." not in name]


def parts(name, road="in a chain"):
    """The transform, what it runs in, a step, and the function that gives its posterior."""
    make, options, increment = METHODS[name]
    link = make()
    tx = link if road == "alone" else bc.chain(bc.sgd(0.1, 0.9), link) if name.startswith("swag") else bc.chain(link)
    estimate = None if increment is None else lambda p, b: PRECISIONS[increment](p).scale(b)
    loss = lambda p, b: b * sum(x.square().sum() for x in p.values())  # noqa: E731
    step = bc.make_step(loss, tx, curvature=estimate, inplace=road == "a step in place")
    return tx, step, lambda state, params: link.posterior(state, params, **options)


@pytest.mark.parametrize("name", ACCUMULATING)
@pytest.mark.parametrize("road", ["alone", "in a chain", "a step in place"])
def test_every_state_of_a_run_still_holds_at_its_end_what_it_held_when_it_was_made(name, road):
    """By TorchOpt's default ``update``, and by ``make_step(inplace=True)``, which overwrites the parameters; the posterior of
    the first is what it was too, and another than that of the last."""
    (tx, step, posterior), params, increment = parts(name, road), start(), METHODS[name][2]
    extra = {} if increment is None else {"curvature": PRECISIONS[increment](params)}
    given, state, kept = copy.deepcopy(extra), tx.init(params), []
    for i in range(6):
        if road == "a step in place":
            params, state, _ = step(params, state, ONE)
        else:
            updates, state = tx.update(ones(params), state, params=params, **extra)
            params = optree.tree_map(lambda p, u: p + 0.1 * u, params, updates)
        kept.append((state[-1], copy.deepcopy(state[-1])))
        if i == 2:
            at = optree.tree_map(torch.clone, params)
            early, before = state, posterior(state, at).marginal_variance
    for entry, was in kept:
        assert_bitwise_equal(entry, was, name)
    assert_bitwise_equal(extra, given, "what it was fed")
    assert_bitwise_equal(posterior(early, at).marginal_variance, before, name)
    after = posterior(state, params).marginal_variance
    assert any(not torch.equal(a, b) for a, b in zip(optree.tree_leaves(before), optree.tree_leaves(after)))


@pytest.mark.parametrize("name", [name for name in METHODS if "swag" not in name])
def test_a_posterior_that_was_fed_nan_says_so_by_the_parameters_name(name):
    (tx, step, posterior), params = parts(name), start()
    params, state, _ = step(params, tx.init(params), ONE)
    assert torch.isfinite(posterior(state, params).marginal_variance["a"]).all()
    params, state, _ = step(params, state, math.nan * ONE)
    for at in (params, start()) if name.startswith("ekf") else (params,):
        with pytest.raises(ValueError, match="is NaN at a"):
            posterior(state, at)


BAD = {"NaN": math.nan, "infinite": math.inf}


@pytest.mark.parametrize("kind", BAD)
def test_a_gaussian_that_is_not_finite_says_so_when_it_is_decomposed(kind):
    good, bad = {"w": torch.ones(2)}, {"w": torch.tensor([1.0, BAD[kind]])}
    state = bc.laplace().update(good, bc.laplace().init(good), params=good, curvature=Diagonal(good, ONE))[1]
    refuse(
        (
            (lambda: Gaussian(bad, Diagonal(good, ONE)).factorised(), f"the posterior's mean is {kind} at w"),
            (lambda: Gaussian(good, Diagonal(bad, ONE)).factorised(), f"the posterior's precision is {kind} at w"),
            (lambda: bc.laplace().posterior(state, bad, prior_precision=1.0), f"the posterior's mean is {kind} at w"),
            (
                lambda: Gaussian(good, Diagonal({"w": torch.tensor([1.0, 0.0])}, ONE)).sample((3,)),
                r"singular.*at w.*prior",
            ),
        )
    )


N, EPOCHS, NOISE, PRIOR = 64, 60, 0.5, 2.0
VON = {"temperature": 1 / (N * EPOCHS), "betas": (0.9, 0.99), "weight_decay": PRIOR / (N * EPOCHS)}
ONE_LOOP = {
    "laplace": lambda: (bc.chain(bc.sgd(0.02), laplace := bc.laplace()), laplace, {"prior_precision": PRIOR}),
    "swag": lambda: (bc.chain(bc.sgd(0.02), swag := bc.swag(rank=0, start=200)), swag, {}),
    "vi": lambda: (vi := bc.vi.von(0.05, **VON), vi, {}),
    "ekf": lambda: (ekf := bc.ekf.dense(prior_precision=PRIOR), ekf, {}),
}


def forward(params, batch):
    return (batch[0] @ params["w"])[:, None]


def loss(params, batch):
    return LIKELIHOOD.nll(forward(params, batch), batch[1]).mean()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ONE_LOOP)
def test_one_loop_runs_every_method_by_one_changed_line(name):
    """Of a linear model, whose posterior given all data EPOCHS times is known: filters and Laplace's precision exactly, the
    variances of variational inference, which averages over batches, to 10 %, the mean of SWAG's path to a few hundredths."""
    x = torch.randn(N, 3)
    y = x @ torch.tensor([1.0, -2.0, 0.5]) + NOISE**0.5 * torch.randn(N)
    batches = [(x[i : i + 8], y[i : i + 8, None]) for i in range(0, N, 8)]
    curvature = bc.curvature.ggn(forward, LIKELIHOOD, "dense")

    tx, posterior, options = ONE_LOOP[name]()
    params = {"w": torch.zeros(3)}
    state, step = tx.init(params), bc.make_step(loss, tx, curvature=curvature)
    for batch in batches * EPOCHS:
        params, state, _ = step(params, state, batch)
    found = posterior.posterior(state, params, **options)

    precision = EPOCHS * x.mT @ x / NOISE + PRIOR * torch.eye(3)
    mode, variance = torch.linalg.solve(precision, EPOCHS * x.mT @ y / NOISE), found.marginal_variance["w"]
    if name in ("laplace", "ekf"):
        torch.testing.assert_close(found.precision.to_dense(), precision, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(variance, precision.inverse().diagonal(), rtol=1e-9, atol=0)
    if name == "vi":
        torch.testing.assert_close(variance, precision.inverse().diagonal(), rtol=0.1, atol=0)
    torch.testing.assert_close(found.mean["w"], mode, rtol=0, atol=1e-9 if name == "ekf" else 0.05)
    assert isinstance(found, bc.Gaussian) and bool((variance > 0).all())


def of_low_rank(params):
    """A covariance, as that of SWAG and of the low-rank family."""
    return low_rank_covariance(optree.tree_map(lambda x: x.square() + 0.2, params), rows(params), ONE)


@pytest.mark.parametrize("make", [*(PRECISIONS[n] for n in PRECISIONS if n != "root"), of_low_rank])
def test_a_gaussian_has_the_density_of_the_multivariate_normal_and_draws_from_it(make):
    """With n draws, n C^ is Wishart: each entry of C^ - C has standard deviation sqrt((C_ij^2 + C_ii C_jj) / n). The largest of
    36 + 8 standardised errors exceeds 5.5 with probability below 44 * 3.8e-8 = 1.7e-6."""
    mean, precision, n = start(), make(start()), 40_000
    gaussian = Gaussian(mean, precision)
    reference = MultivariateNormal(flatten(mean, mean), precision_matrix=precision.to_dense())
    points = optree.tree_map(lambda leaf: torch.randn(5, *leaf.shape), mean)
    torch.testing.assert_close(gaussian.log_prob(points), reference.log_prob(flatten(points, mean)), rtol=1e-9, atol=0)
    assert gaussian.log_prob(mean).shape == ()
    # if the joint is c at the mode of c exp(-quadratic), the evidence is c (2 pi)^(P/2) |Lambda|^(-1/2)
    assert abs(gaussian.log_evidence(gaussian.log_prob(mean))) < 1e-10
    torch.testing.assert_close(flatten(gaussian.marginal_variance, mean), reference.variance, rtol=1e-9, atol=0)
    assert torch.equal(gaussian.factorised().log_prob(points), gaussian.log_prob(points))
    draws = gaussian.sample((n,), generator=torch.Generator().manual_seed(1))
    assert draws["a"].shape == (n, 2, 3) and draws["b"].shape == (n, 2)
    centred, c = flatten(draws, mean) - flatten(mean, mean), reference.covariance_matrix
    deviation = ((c.square() + torch.outer(c.diagonal(), c.diagonal())) / n).sqrt()
    assert ((centred.T @ centred / n - c) / deviation).abs().max() < 5.5
    assert (centred.mean(0) / (c.diagonal() / n).sqrt()).abs().max() < 5.5


def test_samples_repeat_with_the_generator_and_keep_dtype():
    gaussian = Gaussian({"w": torch.zeros(3, dtype=torch.float32)}, Diagonal({"w": torch.ones(3)}, ONE))
    first, second = (gaussian.sample((), generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first["w"], second["w"]) and first["w"].shape == (3,) and first["w"].dtype == torch.float32


# SWAG against its definition, its expectation and its own draws


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
    assert ((flatten(variance, variance).double() - exact) / exact).abs().max() < 0.02
    naive = (trajectory.square().mean(0) - trajectory.mean(0).square()).double()
    assert ((naive - exact) / exact).abs().max() > 1


def test_stacked_states_are_multiswag():
    """Three runs by ``bc.parallel``; each member's Gaussian is that of the run alone."""
    link = bc.swag(rank=2)
    tx = bc.chain(bc.sghmc(0.1, temperature=0.1), link)
    step = bc.make_step(lambda p, batch: 0.5 * sum(x.square().sum() for x in p.values()), tx)
    chains, params = bc.parallel(step, 3), bc.stack([tree(torch.full((P,), float(i))) for i in range(3)])
    params, state, _ = each_alone(chains, [step] * 3, params, chains.init(tx, params), [None] * 5)
    members = torch.vmap(lambda s, p: link.posterior(s, p).marginal_variance)(state, params)
    for i, (s, p) in enumerate(zip(bc.unstack(state), bc.unstack(params))):
        torch.testing.assert_close(members["a"][i], link.posterior(s, p).marginal_variance["a"])


def test_a_mask_collects_some_parameters_only():
    link = bc.swag(rank=2)
    tx = bc.chain(bc.sgd(0.1), bc.masked(link, {"a": True, "b": False}))
    params, state = end_of(tx, tree(torch.ones(P)), lambda p: optree.tree_map(torch.clone, p), 3)
    assert set(link.posterior(state, {"a": params["a"]}).mean) == {"a"}
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
        params, state = end_of(tx, torch.ones(4, dtype=torch.float64), torch.sin, 5)
        means.append(torch.stack([average.mean(state, params), average.posterior(state, params).marginal_variance]))
    torch.testing.assert_close(*means, rtol=0, atol=0)
