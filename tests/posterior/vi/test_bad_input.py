"""What cannot work is refused, with one clear error each."""

import math

import pytest
import torch
import torchopt

import bayesopt_chain as bc
from bayesopt_chain.precision import Dense, Diagonal, Root, low_rank_covariance, shape_only

params = {"w": torch.zeros(2, 3), "b": torch.zeros(2)}
ONE, T, NAN, INF = torch.tensor(1.0), 0.1, math.nan, math.inf
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
    "low_rank": lambda **k: bc.ekf.low_rank(rank=2, **k),
}
ONES = Diagonal({name: torch.ones_like(p) for name, p in params.items()}, ONE)
LAST_NEGATIVE = {"w": torch.ones(2, 3), "b": torch.tensor([1.0, -0.1])}
LAST_NAN = {"w": torch.ones(2, 3), "b": torch.tensor([1.0, NAN])}
REFUSED = (ValueError, TypeError)


def further(name):
    return {"curvature": ONES} if name == "von" else {}


@pytest.mark.parametrize("name", FAMILIES)
def test_an_update_takes_the_draw_of_its_own_state_and_a_gradient_for_each_sample(name):
    """A draw that is missing, that is none, from another run's state, and from this run's before the last update."""
    tx = FAMILIES[name]()
    state, other = tx.init(params), tx.init(params)
    draw = tx.sample(state, params)
    update = lambda at, **k: tx.update(params, at, params=params, inplace=False, **k, **further(name))[1]  # noqa: E731
    for at, options, words in (
        (state, {}, r"no draw: call draw = tx\.sample"),
        (state, {"draw": params}, "got draw=dict"),
        (other, {"draw": draw}, "comes from another state"),
        (update(state, draw=draw), {"draw": draw}, "comes from another state"),
    ):
        with pytest.raises(ValueError, match=words):
            update(at, **options)
    tx = FAMILIES[name](n_samples=3)
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"has shape \(2,\), not \(3, 2\): take one gradient at each of the 3"):
        update(state, draw=tx.sample(state, params))


def scale_of(name):
    return "init_hessian" if name in ("ivon", "von") else "init_scale"


@pytest.mark.parametrize(
    ("names", "options", "words"),
    [
        *((FAMILIES, {"temperature": x}, "temperature") for x in (-0.1, NAN, INF, torch.tensor(-1.0))),
        (FAMILIES, {"n_samples": 0}, "n_samples must"),
        (FAMILIES, {"n_samples": 3, "antithetic": True}, "come in pairs"),
        *((FAMILIES, x, "init_(scale|hessian) must be a positive") for x in (0.0, -1.0, NAN)),
        (FAMILIES, {"weight_decay": -0.1}, "weight_decay must be finite"),
        *(
            (("ivon", "von"), {"betas": x}, "betas must be two numbers")
            for x in ((1.0, 0.9), (0.9, 1.1), (-0.1, 0.9), (0.9,))
        ),
        (("ivon", "von"), {"trust_radius": 0.0}, r"trust_radius must lie in \(0, inf\]"),
        *((FILTERS, {"prior_precision": x}, "prior_precision must be a positive, fin") for x in (0.0, -1.0, NAN, INF)),
        *((FILTERS, {"transition_noise": x}, "transition_noise must") for x in (-1.0, NAN, INF)),
        *((FILTERS, {"lr": x}, r"lr.* must") for x in (-1.0, NAN, INF)),
        *((FILTERS, {"forgetting": x}, "forgetting must lie in") for x in (0.0, 1.1, -0.5)),
    ],
)
def test_numbers_out_of_range(names, options, words):
    makers = FILTERS if names is FILTERS else FAMILIES
    for name in names:
        given = options if isinstance(options, dict) else {scale_of(name): options}
        with pytest.raises(REFUSED, match=words):
            makers[name](**given)


OTHERS, ROWS = {**params, "b": torch.ones(3)}, Root({k: p[None] for k, p in params.items()}, ONE)
NO_REALS = {"n": torch.zeros(2, dtype=torch.int64)}


def posterior(tx, state=None, at=params):
    return tx.posterior(tx.init(params) if state is None else state, at)


def elbo_without_draw(name):
    tx = FAMILIES[name](weight_decay=0.1)
    return tx.negative_elbo(tx.init(params), ONE)


def observe(*given):
    return bc.ekf.observe(lambda p, batch: batch[0] @ p["b"], *given)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bc.vi.ivon(-0.1, temperature=T), "lr must"),
        (lambda: bc.vi.von(-0.1, temperature=T), "lr must"),
        (lambda: bc.vi.mean_field(torch.optim.SGD, temperature=T), "must be a gradient transformation"),
        (lambda: bc.vi.mean_field(torchopt.sgd(0.1), temperature=T, scale_optimizer=0.1), "scale_optimizer"),
        (lambda: bc.vi.low_rank(bc.sgd(0.1), temperature=T, rank=9).init(params), "above the number of parameters, 8"),
        (lambda: bc.ekf.low_rank(rank=9).init(params), "above the number of parameters, 8"),
        *((lambda r=r: bc.vi.low_rank(bc.sgd(0.1), temperature=T, rank=r), "rank must") for r in (0, -1, 1.5)),
        *((lambda r=r: bc.ekf.low_rank(rank=r), "rank must") for r in (0, -1, 1.5)),
        *((lambda f=f: posterior(FAMILIES[f](temperature=0.0)), "at temperature=0 there is no post") for f in FAMILIES),
        *((lambda f=f: elbo_without_draw(f), "needs draw=") for f in ("mean_field", "dense", "low_rank")),
        *((lambda tx=tx: tx.init(NO_REALS), "only real floating-point") for tx in (FAMILIES["ivon"](), bc.ekf.dense())),
        *((lambda tx=tx: tx.init({}), "no leaves") for tx in (FAMILIES["mean_field"](), bc.ekf.dense())),
        (
            lambda: FAMILIES["mean_field"]().sample(bc.sgd(0.1).init(params), params),
            r"holds 0 states of vi\.mean_field",
        ),
        (lambda: posterior(FAMILIES["ivon"](), 2 * FAMILIES["ivon"]().init(params)), "holds 2 states"),
        (lambda: posterior(FAMILIES["dense"](), at={"w": params["w"]}), "the state is over parameters of 8"),
        *((lambda f=f: bc.make_step(lambda p, b: p["w"].sum(), FILTERS[f]()), "needs curvature") for f in FILTERS),
        *((lambda f=f: FILTERS[f](prior_precision=LAST_NEGATIVE).init(params), "not positive at b") for f in FILTERS),
        *(
            (
                lambda f=f, q=q: FILTERS[f](transition_noise=q).init(params),
                "transition_noise is negative or not fin.* at b",
            )
            for f in FILTERS
            for q in (LAST_NEGATIVE, LAST_NAN)
        ),
        *(
            (
                lambda f=f: FILTERS[f]().update(OTHERS, FILTERS[f]().init(params), params=params, curvature=ROWS),
                "leaf 0",
            )
            for f in FILTERS
        ),
        (lambda: observe(-1.0), r"likelihood must be one of bc\.likelihoods, called, or a variance"),
        (lambda: observe(bc.likelihoods.gaussian), r"likelihood must be one of bc\.likelihoods, called, or a variance"),
        (lambda: observe()(params, (torch.ones(3, 2), torch.ones(3, 1))), "reshape the targets"),
        (lambda: low_rank_covariance(torch.tensor([1.0, -1]), torch.ones(1, 2), ONE), r"singular.*\(a variance\)"),
        (lambda: low_rank_covariance(torch.ones(2), torch.ones(1, 2), ONE).add_diagonal(1.0), "cannot take up further"),
        (
            lambda: bc.make_step(lambda p, b: p["w"].sum(), bc.chain(FAMILIES["mean_field"](), FAMILIES["ivon"]())),
            "2 links of this chain draw",
        ),
        *(  # a sampler's noise and a posterior in one chain have no common meaning
            (lambda tx=tx: bc.chain(tx, bc.inject_langevin_noise(0.1)).init(params), "give")
            for tx in (FAMILIES["mean_field"](), FAMILIES["ivon"](), bc.ekf.diagonal())
        ),
    ],
)
def test_calls_that_make_no_sense(call, words):
    with pytest.raises(REFUSED, match=words):
        call()


def test_von_without_curvature_or_with_another_structure():
    tx = FAMILIES["von"]()
    state = tx.init(params)
    update = lambda s, **k: tx.update(params, s, params=params, draw=tx.sample(s, params), inplace=False, **k)[1]  # noqa: E731
    with pytest.raises(ValueError, match="got curvature=NoneType"):
        update(state)
    state = update(state, curvature=ONES)
    with pytest.raises(TypeError, match="the first increment decides the structure"):
        update(state, curvature=Dense(torch.eye(8), shape_only(params), ONE))
