"""Parameters that move: every form of noise and learning rate, against the textbook's gains."""

import optree
import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.posterior.gaussian import Gaussian
from bayesopt_chain.precision import Cholesky, Diagonal, flatten, shape_only, unflatten

pytestmark = pytest.mark.usefixtures("double_precision")


P, VARIANCE = 3, 0.5
start = {"a": torch.tensor([0.3, -0.5], dtype=torch.float64), "b": torch.tensor(1.0, dtype=torch.float64)}
MATRIX = torch.tensor([[0.9, 0.2, 0.0], [-0.3, 0.8, 0.1], [0.0, 0.1, 1.1]], dtype=torch.float64)


def forward(params, batch):
    return torch.tanh(batch[0][:, :2] @ params["a"]) + batch[0][:, 2] * params["b"]


estimate = bc.ekf.observe(forward, VARIANCE)


def tree(flat):
    return unflatten(flat, start)


def batches(n=6):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(2, P, generator=generator), torch.randn(2, generator=generator)) for _ in range(n)]


def textbook(noise=lambda t: torch.zeros(P, P), lr=lambda t: 1.0, prior=None, data=None):
    """Means and covariances after every update, by gains; the prediction comes first."""
    mean, p = flatten(start, start), torch.eye(P) if prior is None else prior
    out = []
    for t, batch in enumerate(batches() if data is None else data):
        p = p + noise(t)
        h = torch.func.jacrev(lambda m, batch=batch: forward(tree(m), batch))(mean)
        gain = p @ h.T @ torch.linalg.inv(h @ p @ h.T + VARIANCE / lr(t) * torch.eye(2))
        mean, p = mean + gain @ (batch[1] - forward(tree(mean), batch)), (torch.eye(P) - gain @ h) @ p
        out.append((mean, p))
    return out


def run(tx, data=None, keywords=None, params=start):
    step = bc.make_step(None, tx, curvature=estimate, keywords=keywords)
    state, out = tx.init(params), []
    for batch in batches() if data is None else data:
        params, state, _ = step(params, state, batch)
        out.append((flatten(params, params), torch.linalg.inv(tx.posterior(state, params).precision.to_dense())))
    return out


def agree(got, wanted, tolerance=1e-10):
    for (a, b), (c, d) in zip(got, wanted):
        assert (a - c).abs().max() < tolerance and (b - d).abs().max() < tolerance


NOISES = {
    "zeros in places": (
        {"a": torch.tensor([0.0, 0.25]), "b": 0.0},
        lambda t: torch.diag(torch.tensor([0.0, 0.25, 0.0])),
    ),
    "a schedule": (lambda count: 0.1 * (count + 1), lambda t: 0.1 * (t + 1) * torch.eye(P)),
    "a schedule of trees": (
        lambda count: {"a": 0.1 * count, "b": 0.2},
        lambda t: torch.diag(torch.tensor([0.1 * t, 0.1 * t, 0.2])),
    ),
}


@pytest.mark.parametrize("name", NOISES)
def test_transition_noise_in_every_form_is_the_textbooks(name):
    noise, wanted = NOISES[name]
    for tx in (bc.ekf.dense(transition_noise=noise), bc.ekf.low_rank(rank=3, transition_noise=noise)):
        agree(run(tx), textbook(noise=wanted))


def test_what_update_is_given_goes_before_what_was_built_in():
    """Noise and lr as functions of the batch, through ``make_step``."""
    rates, noises = [1.0, 0.5, 0.0, 2.0, 1.0, 0.1], [0.1, 0.0, 0.3, 0.2, 0.0, 0.4]
    data = [(*batch, torch.tensor(r), torch.tensor(q)) for batch, r, q in zip(batches(), rates, noises)]
    keywords = {"lr": lambda params, batch: batch[2], "transition_noise": lambda params, batch: batch[3]}
    got = run(bc.ekf.dense(3.0, transition_noise=5.0), data, keywords)
    agree(got, textbook(noise=lambda t: noises[t] * torch.eye(P), lr=lambda t: max(rates[t], 1e-12), data=data), 1e-9)


def test_lr_by_schedule_is_the_textbooks():
    agree(run(bc.ekf.dense(lambda count: 1 / (1 + count))), textbook(lr=lambda t: 1 / (1 + t)))


def test_a_noise_tensor_is_read_at_every_update():
    noise = torch.tensor(0.0)
    tx = bc.ekf.dense(transition_noise=noise)
    step, state, params = bc.make_step(None, tx, curvature=estimate), tx.init(start), start
    for i, batch in enumerate(batches()):
        noise.fill_(0.1 * i)
        params, state, _ = step(params, state, batch)
    wanted = textbook(noise=lambda t: 0.1 * t * torch.eye(P))[-1]
    assert (flatten(params, params) - wanted[0]).abs().max() < 1e-10


PRIORS = {
    "dense": lambda c: Cholesky(torch.linalg.cholesky(torch.linalg.inv(c)), shape_only(start), torch.tensor(0.0)),
    "low_rank": lambda c: Diagonal(tree(1 / c.diagonal()), torch.tensor(0.0)),
    "diagonal": lambda c: Diagonal(tree(1 / c.diagonal()), torch.tensor(0.0)),
}


@pytest.mark.parametrize("name", PRIORS)
def test_a_filter_starts_from_a_given_gaussian(name):
    covariance = MATRIX @ MATRIX.T if name == "dense" else torch.diag(torch.tensor([0.5, 2.0, 1.0]))
    prior = Gaussian(start, PRIORS[name](covariance))
    tx = getattr(bc.ekf, name)(prior=prior, **({"rank": 3} if name == "low_rank" else {}))
    (got,), (wanted,) = run(tx, batches(1)), textbook(prior=covariance, data=batches(1))
    assert (got[0] - wanted[0]).abs().max() < 1e-10
    if name != "diagonal":
        assert (got[1] - wanted[1]).abs().max() < 1e-10


@pytest.mark.parametrize("name", PRIORS)
def test_a_posterior_as_prior_goes_on_where_the_filter_stopped(name):
    make = lambda **kw: getattr(bc.ekf, name)(**kw, **({"rank": 3} if name == "low_rank" else {}))  # noqa: E731
    first = make()
    step, params, state = bc.make_step(None, first, curvature=estimate), start, first.init(start)
    for batch in batches(4):
        params, state, _ = step(params, state, batch)
    second = make(prior=first.posterior(state, params))
    other = second.init(params)
    on, again = (
        step(params, state, batches(5)[4]),
        bc.make_step(None, second, curvature=estimate)(params, other, batches(5)[4]),
    )
    for a, b in zip(optree.tree_leaves(on[0]), optree.tree_leaves(again[0])):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def gaussian(mean=start):
    return Gaussian(mean, Cholesky(torch.eye(P), shape_only(start), torch.tensor(0.0)))


def step_by_rows():
    root = bc.curvature.ggn(forward, bc.likelihoods.gaussian(), "root")
    return bc.make_step(None, bc.ekf.dense(), curvature=root)(start, bc.ekf.dense().init(start), batches(1)[0])


def step_with_a_temperature():
    keywords = {"temperature": lambda params, batch: 1.0}
    return bc.make_step(None, bc.ekf.dense(), curvature=estimate, keywords=keywords)


ELSEWHERE = {name: p + 1 for name, p in start.items()}


REFUSED = {
    "negative noise": (lambda: bc.ekf.dense(transition_noise=-0.1), "transition_noise must be finite and not negative"),
    "other shape": (lambda: bc.ekf.dense(transition_noise=torch.eye(4)), "transition_noise has the tree"),
    "a matrix": (lambda: bc.ekf.dense(transition_noise=torch.eye(3)), "transition_noise has the tree"),
    "prior of a number": (lambda: bc.ekf.dense(prior=1.0), "prior must be a Gaussian"),
    "two priors": (lambda: bc.ekf.dense(prior=gaussian(), prior_precision=2.0), "leave prior_precision out"),
    "dense prior of a diagonal": (lambda: bc.ekf.diagonal(prior=gaussian()), "the prior is Cholesky.*ekf.dense"),
    "dense prior of low rank": (lambda: bc.ekf.low_rank(rank=1, prior=gaussian()), "the prior is Cholesky"),
    "prior elsewhere": (
        lambda: bc.ekf.dense(prior=gaussian(ELSEWHERE)),
        r"params at a differ from prior.mean \(by up to 1\): start there",
    ),
    "no loss": (lambda: bc.make_step(None, bc.sgd(0.1)), "pass a loss"),
    "no observation": (step_by_rows, r"curvature must be of bc\.ekf\.observe, not Root"),
    "temperature": (step_with_a_temperature, "takes no temperature="),
    "lr 0": (lambda: bc.ekf.dense(0.0), "lr \\(learning rate\\) must"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_filter_cannot_hold_is_refused_at_the_start(name):
    make, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=message):
        make().init(start)
