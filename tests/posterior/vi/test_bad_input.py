"""What cannot work is refused, with one clear error each."""

import math

import pytest
import torch
import torchopt

import bayesopt_chain as bc
from bayesopt_chain.precision import Dense, Diagonal, Kronecker, Root, low_rank_covariance, shape_only

params = {"w": torch.zeros(2, 3), "b": torch.zeros(2)}
T = 0.1
FAMILIES = {
    "mean_field": lambda **k: bc.vi.mean_field(bc.sgd(0.1), **{"temperature": T, **k}),
    "dense": lambda **k: bc.vi.dense(bc.sgd(0.1), **{"temperature": T, **k}),
    "low_rank": lambda **k: bc.vi.low_rank(bc.sgd(0.1), rank=2, **{"temperature": T, **k}),
    "ivon": lambda **k: bc.vi.ivon(0.1, **{"temperature": T, **k}),
    "von": lambda **k: bc.vi.von(0.1, **{"temperature": T, **k}),
}
FILTERS = {
    "dense": bc.ekf.dense,
    "diagonal": bc.ekf.diagonal,
    "low_rank": lambda *a, **k: bc.ekf.low_rank(*a, rank=2, **k),
}


def further(name):
    ones = {k: torch.ones_like(p) for k, p in params.items()}
    if name == "von":
        return {"curvature": Diagonal(ones, torch.tensor(1.0))}
    return {}


@pytest.mark.parametrize("name", FAMILIES)
def test_an_update_without_its_draw(name):
    tx = FAMILIES[name]()
    with pytest.raises(ValueError, match=r"no draw: call draw = tx\.sample"):
        tx.update(params, tx.init(params), params=params, inplace=False, **further(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_draw_that_is_none(name):
    tx = FAMILIES[name]()
    with pytest.raises(ValueError, match="got draw=dict"):
        tx.update(params, tx.init(params), params=params, draw=params, inplace=False, **further(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_draw_from_another_state(name):
    """From another run's state, and from this run's state before the last update."""
    tx = FAMILIES[name]()
    state, other = tx.init(params), tx.init(params)
    draw = tx.sample(state, params)
    with pytest.raises(ValueError, match="comes from another state"):
        tx.update(draw.params, other, params=params, draw=draw, inplace=False, **further(name))
    _, later = tx.update(draw.params, state, params=params, draw=draw, inplace=False, **further(name))
    with pytest.raises(ValueError, match="comes from another state"):
        tx.update(draw.params, later, params=params, draw=draw, inplace=False, **further(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_without_the_samples_axis(name):
    tx = FAMILIES[name](n_samples=3)
    state = tx.init(params)
    draw = tx.sample(state, params)
    with pytest.raises(ValueError, match=r"has shape \(2,\), not \(3, 2\): take one gradient at each of the 3"):
        tx.update(params, state, params=params, draw=draw, inplace=False, **further(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_numbers_out_of_range(name):
    make = FAMILIES[name]
    for wrong in (-0.1, float("nan"), float("inf"), torch.tensor(-1.0)):
        with pytest.raises(ValueError, match="temperature"):
            make(temperature=wrong)
    with pytest.raises(ValueError, match="n_samples must"):
        make(n_samples=0)
    with pytest.raises(ValueError, match="come in pairs"):
        make(n_samples=3, antithetic=True)
    scale = "init_hessian" if name in ("ivon", "von") else "init_scale"
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"{scale} must be a positive"):
            make(**{scale: wrong})


@pytest.mark.parametrize("name", ["mean_field", "dense", "low_rank"])
def test_weight_decay(name):
    with pytest.raises(ValueError, match="weight_decay must be finite"):
        FAMILIES[name](weight_decay=-0.1)
    tx = FAMILIES[name](weight_decay=0.1)
    with pytest.raises(ValueError, match="needs draw="):
        tx.negative_elbo(tx.init(params), torch.tensor(1.0))


@pytest.mark.parametrize("name", ["ivon", "von"])
def test_natural_gradients_numbers(name):
    make = FAMILIES[name]
    for betas in ((1.0, 0.9), (0.9, 1.1), (-0.1, 0.9), (0.9,)):
        with pytest.raises((ValueError, TypeError), match="betas must be two numbers"):
            make(betas=betas)
    with pytest.raises(ValueError, match="weight_decay must be finite"):
        make(weight_decay=-0.1)
    with pytest.raises(ValueError, match="lr must"):
        getattr(bc.vi, name)(-0.1, temperature=T)


def test_an_optimizer_that_is_none():
    with pytest.raises(TypeError, match="must be a gradient transformation"):
        bc.vi.mean_field(torch.optim.SGD, temperature=T)
    with pytest.raises(TypeError, match="scale_optimizer"):
        bc.vi.mean_field(torchopt.sgd(0.1), temperature=T, scale_optimizer=0.1)


@pytest.mark.parametrize("tx", [FAMILIES["mean_field"](), FAMILIES["ivon"](), bc.ekf.dense()])
def test_parameters_that_are_no_real_numbers(tx):
    with pytest.raises(TypeError, match="only real floating-point"):
        tx.init({"n": torch.zeros(2, dtype=torch.int64)})
    with pytest.raises(ValueError, match="no leaves"):
        tx.init({})


@pytest.mark.parametrize(
    "make", [lambda r: bc.vi.low_rank(bc.sgd(0.1), temperature=T, rank=r), lambda r: bc.ekf.low_rank(rank=r)]
)
def test_a_rank_out_of_range(make):
    with pytest.raises(ValueError, match="above the number of parameters, 8"):
        make(9).init(params)
    for wrong in (0, -1, 1.5):
        with pytest.raises((ValueError, TypeError), match="rank must"):
            make(wrong)


@pytest.mark.parametrize("name", ["mean_field", "dense", "low_rank", "ivon", "von"])
def test_a_posterior_at_temperature_zero(name):
    tx = FAMILIES[name](temperature=0.0)
    with pytest.raises(ValueError, match="at temperature=0 there is no posterior"):
        tx.posterior(tx.init(params), params)


def test_a_state_of_something_else():
    with pytest.raises(ValueError, match=r"holds 0 states of vi\.mean_field"):
        FAMILIES["mean_field"]().sample(bc.sgd(0.1).init(params), params)
    with pytest.raises(ValueError, match="holds 2 states"):
        tx = FAMILIES["ivon"]()
        tx.posterior((*tx.init(params), *tx.init(params)), params)
    with pytest.raises(ValueError, match="the state is over parameters of 8"):
        tx = FAMILIES["dense"]()
        tx.posterior(tx.init(params), {"w": params["w"]})


def test_von_without_curvature_or_with_another_structure():
    tx = FAMILIES["von"]()
    state = tx.init(params)
    draw = tx.sample(state, params)
    with pytest.raises(ValueError, match="got curvature=NoneType"):
        tx.update(params, state, params=params, draw=draw, inplace=False)
    _, state = tx.update(params, state, params=params, draw=draw, inplace=False, **further("von"))
    draw = tx.sample(state, params)
    with pytest.raises(TypeError, match="the first increment decides the structure"):
        dense = Dense(torch.eye(8), shape_only(params), torch.tensor(1.0))
        tx.update(params, state, params=params, draw=draw, curvature=dense, inplace=False)


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_without_curvature(name):
    tx = FILTERS[name]()
    with pytest.raises(ValueError, match="update got no curvature"):
        tx.update(params, tx.init(params), params=params, inplace=False)
    with pytest.raises(ValueError, match="needs curvature"):
        bc.make_step(lambda p, batch: p["w"].sum(), tx)


@pytest.mark.parametrize("name", FILTERS)
def test_a_filters_variances(name):
    make = FILTERS[name]
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="prior_precision must be a positive, finite"):
            make(prior_precision=wrong)
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="transition_noise must"):
            make(transition_noise=wrong)
        with pytest.raises(ValueError, match=r"lr.* must"):
            make(wrong)
    with pytest.raises(ValueError, match="prior_precision is not positive at b"):
        make(prior_precision={"w": torch.ones(2, 3), "b": torch.tensor([1.0, -1.0])}).init(params)
    for wrong in (0.0, 1.1, -0.5):
        with pytest.raises(ValueError, match="forgetting must lie in"):
            make(forgetting=wrong)


@pytest.mark.parametrize("entry", [math.nan, -0.1])
@pytest.mark.parametrize("name", FILTERS)
def test_negative_transition_noise(name, entry):
    noise = {"w": torch.ones(2, 3), "b": torch.tensor([1.0, entry])}
    with pytest.raises(ValueError, match="transition_noise is negative or not finite at b"):
        FILTERS[name](transition_noise=noise).init(params)


@pytest.mark.parametrize("name", FILTERS)
def test_curvature_that_a_filter_cannot_take_apart(name):
    tx = FILTERS[name]()
    state = tx.init(params)

    def update(increment):
        return tx.update(params, state, params=params, curvature=increment, inplace=False)

    one = torch.tensor(1.0)
    kronecker = Kronecker(torch.eye(2), torch.eye(1), one, torch.zeros(2), one)
    with pytest.raises(TypeError, match="a precision of class Kronecker is not made of rows"):
        update(kronecker)
    with pytest.raises(ValueError, match="update got curvature of class dict"):
        update(params)
    with pytest.raises(ValueError, match="estimate the curvature of these parameters"):
        update(Root({"w": torch.ones(1, 3, 2), "b": torch.ones(1, 2)}, one))
    with pytest.raises(ValueError, match="the precision is indefinite"):
        update(Dense(torch.diag(torch.tensor([1.0, -1.0, 1, 1, 1, 1, 1, 1])), shape_only(params), one))
    with pytest.raises(ValueError, match="leaf 0 has shape"):
        rows = Root({"w": torch.ones(1, 2, 3), "b": torch.ones(1, 2)}, one)
        tx.update({"w": torch.ones(2, 3), "b": torch.ones(3)}, state, params=params, curvature=rows, inplace=False)


def test_observations_with_bad_variances_or_targets():
    with pytest.raises(ValueError, match=r"likelihood must be one of bc\.likelihoods, called, or a variance"):
        bc.ekf.observe(lambda p, batch: batch[0] @ p["b"], -1.0)
    with pytest.raises(ValueError, match="reshape the targets"):
        bc.ekf.observe(lambda p, batch: batch[0] @ p["b"])(params, (torch.ones(3, 2), torch.ones(3, 1)))


def test_a_covariance_with_a_negative_variance():
    with pytest.raises(ValueError, match=r"singular or indefinite at parameters \(a variance\)"):
        low_rank_covariance(torch.tensor([1.0, -1.0]), torch.ones(1, 2), torch.tensor(1.0))
    with pytest.raises(TypeError, match="cannot take up further precision"):
        low_rank_covariance(torch.ones(2), torch.ones(1, 2), torch.tensor(1.0)).add_diagonal(1.0)


def test_two_draws_in_one_chain():
    tx = bc.chain(FAMILIES["mean_field"](), FAMILIES["ivon"]())
    with pytest.raises(ValueError, match="2 links of this chain draw"):
        bc.make_step(lambda p, batch: p["w"].sum(), tx)


def test_noise_beside_a_posterior_is_refused():
    """A sampler's noise and a variational or filtered posterior in one chain have no common meaning."""
    for tx in (FAMILIES["mean_field"](), FAMILIES["ivon"](), bc.ekf.diagonal()):
        with pytest.raises(Exception, match="give"):
            bc.chain(tx, bc.inject_langevin_noise(0.1)).init(params)
