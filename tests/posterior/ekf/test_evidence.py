"""The log evidence that accumulates batch by batch, against the joint density of all targets."""

import math

import pytest
import torch
from torch.distributions import MultivariateNormal

import bayesopt_chain as bc
from bayesopt_chain.posterior.gaussian import Gaussian
from bayesopt_chain.precision import Cholesky, shape_only

pytestmark = pytest.mark.usefixtures("double_precision")


P, STEPS, DATA, VARIANCE = 3, 5, 2, 0.4


def problem():
    g = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    prior = draw(P, P) + 2 * torch.eye(P)
    return draw(P), prior @ prior.T, torch.tensor([0.5, 0.0, 1.2]), draw(STEPS, DATA, P), draw(STEPS, DATA)


def joint_log_density(mean, covariance, noise, x, y):
    """Of all targets: theta_t = theta_0 + sum_{s <= t} w_s, t = 0 ... STEPS - 1."""
    rows = [x[t] @ torch.cat([torch.eye(P), *[torch.eye(P) * (s <= t) for s in range(STEPS)]], 1) for t in range(STEPS)]
    stacked = torch.cat(rows)
    source = torch.block_diag(covariance, *[torch.diag(noise)] * STEPS)
    spread = stacked @ source @ stacked.T + VARIANCE * torch.eye(STEPS * DATA)
    return MultivariateNormal(stacked[:, :P] @ mean, spread).log_prob(y.flatten())


def forward(params, batch):
    return batch[0] @ params


def run(tx, estimate, start, batches, loss=None):
    step = bc.make_step(loss, tx, curvature=estimate)
    params, state = start, tx.init(start)
    for batch in batches:
        params, state, _ = step(params, state, batch)
    return tx.log_evidence(state)


def test_the_evidence_of_a_linear_gaussian_model_is_that_of_the_joint():
    """A random walk of some parameters and a correlated prior; to 1e-10."""
    mean, covariance, noise, x, y = problem()
    precision = Cholesky(torch.linalg.cholesky(torch.linalg.inv(covariance)), shape_only(mean), torch.tensor(0.0))
    tx = bc.ekf.dense(prior=Gaussian(mean, precision), transition_noise=noise)
    got = run(tx, bc.ekf.observe(forward, VARIANCE), mean, list(zip(x, y)))
    assert abs(got - joint_log_density(mean, covariance, noise, x, y)) < 1e-10


@pytest.mark.parametrize("form", ["observation", "root"])
@pytest.mark.parametrize("name", ["dense", "low_rank"])
def test_the_evidence_does_not_depend_on_the_batches_nor_on_the_form(name, form):
    mean, _, _, x, y = problem()
    options = {"rank": P} if name == "low_rank" else {}
    wanted = joint_log_density(mean, torch.eye(P) / 0.7, torch.zeros(P), x, y)
    likelihood = bc.likelihoods.gaussian(VARIANCE)
    estimate = bc.curvature.ggn(forward, likelihood, "root") if form == "root" else bc.ekf.observe(forward, likelihood)
    loss = (lambda p, b: likelihood.nll(forward(p, b), b[1]).mean()) if form == "root" else None
    flat = x.reshape(-1, P), y.flatten()
    for size in (1, 3, STEPS * DATA):
        tx = getattr(bc.ekf, name)(prior_precision=0.7, **options)
        got = run(tx, estimate, mean, list(zip(*(v.split(size) for v in flat))), loss)
        assert abs(got - wanted) < 1e-10


@pytest.mark.parametrize("form", ["observation", "root"])
def test_the_diagonal_filters_evidence_is_exact_where_data_do_not_mix_parameters(form):
    x = torch.eye(P).repeat(3, 1)
    y = torch.randn(3 * P, generator=torch.Generator().manual_seed(1))
    likelihood = bc.likelihoods.gaussian(VARIANCE)
    estimate = bc.curvature.ggn(forward, likelihood, "root") if form == "root" else bc.ekf.observe(forward, likelihood)
    loss = (lambda p, b: likelihood.nll(forward(p, b), b[1]).mean()) if form == "root" else None
    batches = list(zip(x.split(2), y.split(2)))
    got = [
        run(make(transition_noise=0.2), estimate, torch.zeros(P), batches, loss)
        for make in (bc.ekf.diagonal, bc.ekf.dense)
    ]
    assert abs(got[0] - got[1]) < 1e-10


def test_the_evidence_of_a_tempered_likelihood_is_its_integral():
    """lr = 0.3, one parameter and five data, by quadrature."""
    x, y = torch.linspace(-1, 2, 5)[:, None], torch.tensor([0.3, -1.0, 0.5, 2.0, 1.0])
    got = run(bc.ekf.dense(0.3), bc.ekf.observe(forward, VARIANCE), torch.zeros(1), [(x, y)])
    grid = torch.linspace(-12, 12, 200_001)
    nll = ((x * grid - y[:, None]) ** 2 / (2 * VARIANCE) + math.log(2 * math.pi * VARIANCE) / 2).sum(0)
    wanted = torch.trapezoid(torch.exp(-0.3 * nll - grid**2 / 2), grid).log() - math.log(2 * math.pi) / 2
    assert abs(got - wanted) < 1e-9


@pytest.mark.parametrize("name", ["dense", "diagonal", "low_rank"])
def test_the_evidence_of_a_likelihood_that_is_not_gaussian_completes_the_square_at_the_mean(name):
    """Bernoulli and categorical, through innovations and through forces, against the formula in dense matrices."""
    start, x = torch.tensor([0.3, -0.2]), torch.tensor([[1.0, -0.5]])
    for likelihood, model, target in (
        (bc.likelihoods.bernoulli(), forward, torch.ones(1)),
        (bc.likelihoods.categorical(), lambda p, b: torch.stack([b[0] @ p, -(b[0] @ p)], -1), torch.tensor([1])),
    ):
        tx = getattr(bc.ekf, name)(**({"rank": 2} if name == "low_rank" else {}))
        got = run(tx, bc.ekf.observe(model, likelihood), start, [(x, target)])
        nll = lambda p, model=model, target=target, likelihood=likelihood: likelihood.nll(model(p, (x,)), target).sum()  # noqa: E731
        g, h = torch.func.grad(nll)(start), torch.func.hessian(nll)(start)
        after = torch.eye(2) + h
        wanted = -nll(start) + 0.5 * g @ torch.linalg.solve(after, g) - 0.5 * torch.logdet(after)
        assert abs(got - wanted) < 1e-10


def test_a_batch_that_was_all_but_impossible_is_scored_all_the_same():
    """A logit of -60 that came true: the innovation is 1e13, and the evidence is right to 1e-8."""
    likelihood, start, x = bc.likelihoods.bernoulli(), torch.tensor([-60.0]), torch.ones(1, 1)
    got = run(bc.ekf.dense(prior_precision=1.0), bc.ekf.observe(forward, likelihood), start, [(x, torch.ones(1))])
    assert abs(got - (-60.0 + 0.5)) < 1e-8


def test_an_evidence_that_is_not_known_is_refused():
    tx, params = bc.ekf.dense(), torch.zeros(P)
    increment = bc.curvature.ggn(forward, bc.likelihoods.gaussian(), "root")(params, (torch.eye(P), torch.ones(P)))
    _, state = tx.update(params, tx.init(params), params=params, curvature=increment)
    with pytest.raises(ValueError, match="log-likelihood of 3 of 3 data is unknown: pass loss= to update"):
        tx.log_evidence(state)


def test_filters_side_by_side_have_an_evidence_each():
    """Three batches of data, one a filter: each evidence is that of the filter alone, to 1e-12."""
    tx, x = bc.ekf.dense(), torch.randn(3, 4, P, generator=torch.Generator().manual_seed(0))
    estimate = bc.ekf.observe(forward, VARIANCE)
    chains = bc.parallel(bc.make_step(None, tx, curvature=estimate), 3, batch_dim=0)
    params = torch.zeros(3, P)
    _, state, _ = chains(params, chains.init(tx, params), (x, torch.ones(3, 4)))
    alone = [run(tx, estimate, torch.zeros(P), [(x[i], torch.ones(4))]) for i in range(3)]
    torch.testing.assert_close(tx.log_evidence(state), torch.stack(alone), rtol=1e-12, atol=0)
