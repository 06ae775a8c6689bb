"""The filters against one textbook filter, against joint densities of all data, and against what others compute."""

import optree
import pytest
import torch
from torch.distributions import MultivariateNormal

import bayesopt_chain as bc
from bayesopt_chain import likelihoods
from bayesopt_chain.posterior.gaussian import Gaussian
from bayesopt_chain.precision import (
    Cholesky,
    Dense,
    Diagonal,
    Kronecker,
    LowRank,
    Root,
    flatten,
    shape_only,
    unflatten,
)
from tests.loop.beside import each_alone
from tests.posterior.conftest import FILTERS, filter_of

pytestmark = pytest.mark.usefixtures("double_precision")

P, VARIANCE, Q = 5, 0.5, 0.03
F64 = {"dtype": torch.float64}
START = {"a": torch.tensor([[0.3, -0.5], [0.1, 0.7]], **F64), "b": torch.ones(1, **F64)}


def scalar(params, batch):
    return batch[0][:, :4] @ params["a"].reshape(4) + torch.tanh(batch[0][:, 4] * params["b"])


def contrast(params, batch):
    """Three classes, of which the Hessian in the outputs is singular."""
    f = scalar(params, batch)
    return torch.stack([f, -f, f.square()], -1)


MODELS = {
    "gaussian": (scalar, likelihoods.gaussian(VARIANCE)),
    "bernoulli": (scalar, likelihoods.bernoulli()),
    "categorical": (contrast, likelihoods.categorical()),
}


def stream(kind="gaussian", steps=6, data=3):
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(steps, data, P, generator=generator), torch.randn(steps, data, generator=generator)
    y = {"gaussian": y, "bernoulli": (y > 0).double(), "categorical": (y > 0).long()}[kind]
    return list(zip(x, y))


def textbook(batches, kind, diagonal=False, noise=lambda t: 0.0, lr=lambda t: 1.0, forgetting=1.0, prior=1.0):
    """Mean, covariance and log evidence: predict ``P / forgetting + q``, linearise at the mean, complete the square. The
    diagonal filter moves by its diagonal prior and all of the batch, of whose information it keeps the diagonal."""
    (model, likelihood), mean, p, evidence = MODELS[kind], flatten(START, START), torch.eye(P) / prior, 0.0
    for t, batch in enumerate(batches):
        before = torch.linalg.inv(p / forgetting + torch.eye(P) * noise(t))
        outputs = lambda m, batch=batch: model(unflatten(m, START), batch)  # noqa: E731
        nll = lambda f, batch=batch: lr(t) * likelihood.nll(f, batch[1]).sum()  # noqa: B023, E731
        f, h = outputs(mean), torch.func.jacrev(outputs)(mean).reshape(-1, P)
        force = -h.T @ torch.func.grad(nll)(f).flatten()
        after = before + h.T @ torch.func.hessian(nll)(f).reshape(len(h), len(h)) @ h
        move = torch.linalg.solve(after, force)
        evidence = evidence - nll(f) + 0.5 * (force @ move + before.logdet() - after.logdet())
        mean, p = mean + move, torch.diag(1 / after.diagonal()) if diagonal else torch.linalg.inv(after)
    return mean, p, evidence


def stepping(tx, kind="gaussian", form="root", **options):
    model, likelihood = MODELS[kind]
    observed = form == "observation"
    estimate = bc.ekf.observe(model, likelihood) if observed else bc.curvature.ggn(model, likelihood, form)
    loss = None if observed else lambda p, batch: likelihood.nll(model(p, batch), batch[1]).mean()
    return bc.make_step(loss, tx, curvature=lambda params, batch: estimate(params, batch[:2]), **options)


def moments(tx, state, params):
    posterior = tx.posterior(state, params)
    return flatten(params, params), torch.linalg.inv(posterior.precision.to_dense()), tx.log_evidence(state)


def run(tx, batches, *args, params=START, dials=(), **options):
    step, state = stepping(tx, *args, **options), tx.init(params)
    for t, batch in enumerate(batches):
        for dial, value in dials:
            dial.fill_(value(t))
        params, state, _ = step(params, state, batch)
    return params, state


def agree(got, wanted, tolerance=1e-10):
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, torch.as_tensor(b), rtol=tolerance, atol=tolerance)


DIALS = torch.tensor(1.0, **F64), torch.tensor(0.0, **F64)
RATES, NOISES = [1.0, 0.5, 0.0, 2.0, 1.0, 0.1], [0.1, 0.0, 0.3, 0.2, 0.0, 0.4]
CASES = {  # how the filter is built, what the textbook is told, what make_step and the loop are given
    "numbers": (
        {"lr": 0.7, "prior_precision": 2.0, "transition_noise": Q, "forgetting": 0.9},
        {"lr": lambda t: 0.7, "prior": 2.0, "noise": lambda t: Q, "forgetting": 0.9},
        {},
    ),
    "noise of one": (
        {"transition_noise": {"a": torch.tensor([[0.0, 0.25], [0.0, 0.0]], **F64), "b": 0.0}},
        {"noise": lambda t: torch.tensor([0.0, 0.25, 0.0, 0.0, 0.0])},
        {},
    ),
    "schedules": (
        {"lr": lambda count: 1 / (1 + count), "transition_noise": lambda count: 0.1 * (count + 1)},
        {"lr": lambda t: 1 / (1 + t), "noise": lambda t: 0.1 * (t + 1)},
        {},
    ),
    "a schedule of trees": (
        {"transition_noise": lambda count: {"a": 0.1 * count, "b": 0.2}},
        {"noise": lambda t: torch.tensor([0.1 * t] * 4 + [0.2])},
        {},
    ),
    "tensors": (
        {"lr": DIALS[0], "transition_noise": DIALS[1]},
        {"lr": lambda t: 1 / (1 + t), "noise": lambda t: 0.1 * t},
        {"dials": ((DIALS[0], lambda t: 1 / (1 + t)), (DIALS[1], lambda t: 0.1 * t))},
    ),
    "keywords of update": (
        {"lr": 3.0, "transition_noise": 5.0},
        {"lr": lambda t: RATES[t], "noise": lambda t: NOISES[t]},
        {"keywords": {"lr": lambda params, batch: batch[2], "transition_noise": lambda params, batch: batch[3]}},
    ),
}


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("gaussian", "root"),
        ("gaussian", "dense"),
        *((kind, form) for kind in MODELS for form in ("observation", "root") if (kind, form) != ("gaussian", "root")),
    ],
)
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("case", CASES)
def test_every_filter_is_the_textbooks(case, name, kind, form):
    """Mean, covariance and evidence to 1e-9 of six batches of a model that is not linear."""
    options, told, loop = CASES[case]
    batches = [(*batch, torch.tensor(r), torch.tensor(q)) for batch, r, q in zip(stream(kind), RATES, NOISES)]
    tx = filter_of(name, **options)
    params, state = run(tx, batches, kind, form, **loop)
    agree(moments(tx, state, params), textbook(batches, kind, name == "diagonal", **told), 1e-9)


@pytest.mark.parametrize("name", FILTERS)
def test_a_posterior_as_prior_goes_on_where_the_filter_stopped(name):
    batches, first = stream(), filter_of(name)
    params, state = run(first, batches[:3])
    second = filter_of(name, prior=first.posterior(state, params))
    params, other = run(second, batches[3:], params=params)
    mean, p, evidence = textbook(batches, "gaussian", name == "diagonal")
    agree(moments(second, other, params), (mean, p, evidence - first.log_evidence(state)))


def linear(params, batch):
    return batch[0] @ params


def of_linear(tx, start, batches, likelihood, form="observation"):
    estimate = bc.ekf.observe(linear, likelihood)
    if form == "root":
        estimate = bc.curvature.ggn(linear, likelihood, form)
    step = bc.make_step(lambda p, b: likelihood.nll(linear(p, b), b[1]).mean(), tx, curvature=estimate)
    params, state = start, tx.init(start)
    for batch in batches:
        params, state, _ = step(params, state, batch)
    return moments(tx, state, params)


@pytest.mark.parametrize("form", ["observation", "root"])
@pytest.mark.parametrize("name", ["dense", "low_rank"])
def test_the_evidence_of_a_linear_gaussian_model_is_that_of_the_joint(name, form):
    """Of all targets, with theta_t = theta_0 + sum_{s <= t} w_s; a correlated prior and a random walk of some parameters of the
    dense filter. Without the walk evidence and posterior are those of all data however they are cut; to 1e-10."""
    g, p, steps = torch.Generator().manual_seed(3), 3, 5
    mean, x, y = (torch.randn(*shape, generator=g) for shape in ((p,), (steps, 2, p), (steps, 2)))
    root, likelihood = torch.randn(p, p, generator=g) + 2 * torch.eye(p), likelihoods.gaussian(VARIANCE)
    whole, noise = root @ root.T, torch.tensor([0.5, 0.0, 1.2])

    def joint(covariance, noise):
        rows = [x[t] @ torch.cat([torch.eye(p), *[torch.eye(p) * (s <= t) for s in range(steps)]], 1) for t in range(5)]
        stacked, source = torch.cat(rows), torch.block_diag(covariance, *[torch.diag(noise)] * steps)
        spread = stacked @ source @ stacked.T + VARIANCE * torch.eye(2 * steps)
        return MultivariateNormal(stacked[:, :p] @ mean, spread).log_prob(y.flatten())

    if name == "dense":
        precision = Cholesky(torch.linalg.cholesky(torch.linalg.inv(whole)), shape_only(mean), torch.tensor(0.0))
        tx = bc.ekf.dense(prior=Gaussian(mean, precision), transition_noise=noise)
        assert abs(of_linear(tx, mean, list(zip(x, y)), likelihood, form)[2] - joint(whole, noise)) < 1e-10
    flat = x.reshape(-1, p), y.flatten()
    wanted = flat[0].T @ flat[0] / VARIANCE + 0.7 * torch.eye(p)
    mode = torch.linalg.solve(wanted, flat[0].T @ flat[1] / VARIANCE + 0.7 * mean)
    for size in (1, 3, 2 * steps):
        tx = filter_of(name, prior_precision=0.7, rank=p)
        got = of_linear(tx, mean, list(zip(*(v.split(size) for v in flat))), likelihood, form)
        agree(got, (mode, torch.linalg.inv(wanted), joint(torch.eye(p) / 0.7, torch.zeros(p))))


def test_a_batch_that_was_all_but_impossible_is_scored_all_the_same():
    """A logit of -60 that came true: the innovation is 1e13, and the evidence is right to 1e-8."""
    batches = [(torch.ones(1, 1), torch.ones(1))]
    assert abs(of_linear(bc.ekf.dense(), torch.tensor([-60.0]), batches, likelihoods.bernoulli())[2] + 59.5) < 1e-8


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("data", [5, 30])
def test_correlated_features_leave_every_filter_stable(name, data):
    """100 features of two common causes, 300 data: the error of the fit stays below that of predicting zero (about 12), where
    dividing the gradient by the diagonal made it 1e9 and more. The first batch is the exact posterior of its data under the
    prior, for every filter that can hold it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 2, generator=generator) @ torch.randn(2, 100, generator=generator)
    x = x + 0.3 * torch.randn(300, 100, generator=generator)
    y = x @ torch.randn(100, generator=generator) + torch.randn(300, generator=generator)
    batches, likelihood = list(zip(x.split(data), y.split(data))), likelihoods.gaussian()
    first, params = (
        of_linear(filter_of(name, rank=20), torch.zeros(100), b, likelihood, "root")[0] for b in (batches[:1], batches)
    )
    a, b = batches[0]
    torch.testing.assert_close(first, torch.linalg.solve(a.T @ a + torch.eye(100), a.T @ b), rtol=0, atol=1e-9)
    assert (x @ params - y).square().mean().sqrt() < 0.3 * y.square().mean().sqrt()


def test_a_strong_batch_is_solved_for_in_float32():
    """Rows that outweigh the prior by 1e6: what the diagonal filter's move says of the data, against float64, to 1e-5 (solved
    for in float32 it is off by 0.1); and across the rows no more than the rounding of the gradient itself."""
    generator = torch.Generator().manual_seed(1)
    rows = 300 * torch.randn(6, 20, generator=generator)
    gradient = rows.T @ torch.randn(6, generator=generator)
    moves = []
    for dtype in (torch.float64, torch.float32):
        tx, params = bc.ekf.diagonal(), torch.zeros(20, dtype=dtype)
        increment = Root(rows.to(dtype), torch.tensor(1.0))
        updates, _ = tx.update(gradient.to(dtype), tx.init(params), params=params, curvature=increment)
        assert updates.dtype == dtype
        moves.append(updates.double())
    off = moves[1] - moves[0]
    assert (rows @ off).norm() < 1e-5 * (rows @ moves[0]).norm()
    assert off.norm() < torch.finfo(torch.float32).eps * gradient.norm()


@pytest.mark.parametrize("name", FILTERS)
def test_a_leaf_without_gradient_is_fixed_and_learns_nothing(name):
    """The others move as they would if it were no parameter."""
    tx, (batch,) = filter_of(name, rank=4), stream(steps=1)
    increment = bc.curvature.ggn(*MODELS["gaussian"], "root")(START, batch)
    gradient, alone = optree.tree_map(torch.ones_like, START), {"a": START["a"]}
    updates, state = tx.update({**gradient, "b": None}, tx.init(START), params=START, curvature=increment)
    only = Root({"a": increment.rows["a"]}, increment.count)
    wanted, _ = tx.update({"a": gradient["a"]}, tx.init(alone), params=alone, curvature=only)
    assert updates["b"] is None
    torch.testing.assert_close(updates["a"], wanted["a"], rtol=1e-10, atol=1e-12)
    variance = tx.posterior(state, START).marginal_variance["b"]
    torch.testing.assert_close(variance, torch.ones(1), rtol=1e-12, atol=0)


def test_the_low_rank_filter_keeps_the_information_of_what_it_cuts_off():
    """The diagonal of the information stays exact whatever the rank, without transition noise."""
    wanted, errors = torch.linalg.inv(textbook(stream(steps=1), "gaussian")[1]), []
    for rank in (1, 2, 3, 5):
        tx = bc.ekf.low_rank(rank=rank)
        params, state = run(tx, stream(steps=1))
        information = tx.posterior(state, params).precision.to_dense()
        torch.testing.assert_close(information.diagonal(), wanted.diagonal(), rtol=1e-10, atol=0)
        errors.append((information - wanted).norm())
    assert errors[0] > errors[1] > errors[2] and errors[2] < 1e-10 and errors[3] < 1e-10  # three data: rank 3


def test_the_filter_never_forms_its_information(monkeypatch):
    """Only rotations and triangular solves; the diagonal of the root is positive throughout."""
    tx = bc.ekf.dense(transition_noise=Q)
    state = tx.init(START)
    for name in ("cholesky", "cholesky_ex", "eigh", "inv", "solve"):
        monkeypatch.delattr(torch.linalg, name)
    for _ in range(50):
        rows = optree.tree_map(lambda p: torch.randn(2, *p.shape), START)
        _, state = tx.update(START, state, params=START, curvature=Root(rows, torch.tensor(2.0)))
        root = state[0].precision.factor
        assert (root.diagonal() > 0).all() and torch.equal(root, root.tril())


def test_many_filters_at_once_are_each_alone():
    """``bc.parallel`` over stacked states and batches of their own, curvature and evidence included, to 1e-12."""
    tx, batches = bc.ekf.dense(transition_noise=Q), stream(steps=9)
    step = stepping(tx, form="observation")
    chains = bc.parallel(step, 3, batch_dim=0)
    params = bc.stack([optree.tree_map(lambda p, i=i: p + 0.1 * i, START) for i in range(3)])
    several = [tuple(map(torch.stack, zip(*batches[t : t + 3]))) for t in (0, 3, 6)]
    own = lambda batch, i: (batch[0][i], batch[1][i])  # noqa: E731
    _, state, _ = each_alone(chains, [step] * 3, params, chains.init(tx, params), several, own, rtol=1e-12, atol=1e-12)
    agree(tx.log_evidence(state), [tx.log_evidence(s) for s in bc.unstack(state)], 1e-12)


def test_the_empirical_rows_of_gaussian_noise_are_the_gradients_of_its_log_likelihood():
    """``(f - y) x / variance`` for each datum; the outputs alone, without the targets, would be another matrix."""
    x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [1.0]])
    found = bc.ekf.observe(linear, 0.5, linearisation="empirical")(torch.ones(1, 1), (x, y))
    assert found.rows.flatten().tolist() == [-4.0, 4.0]
    assert found.force.flatten().tolist() == [0.0]


def gaussian(mean=START):
    return Gaussian(mean, Cholesky(torch.eye(P, **F64), shape_only(START), torch.tensor(0.0)))


def without_loss(tx):
    increment = bc.curvature.ggn(*MODELS["gaussian"], "root")(START, stream(steps=1)[0])
    return tx.log_evidence(tx.update(START, tx.init(START), params=START, curvature=increment)[1])


ELSEWHERE = {name: p + 1 for name, p in START.items()}
REFUSED = {
    "negative noise": (
        lambda: bc.ekf.dense(transition_noise=-0.1),
        "transition_noise must be a non-negative, finite number",
    ),
    "other shape": (lambda: bc.ekf.dense(transition_noise=torch.eye(4)), "transition_noise has the tree"),
    "prior of a number": (lambda: bc.ekf.dense(prior=1.0), r"prior must be a bc\.Gaussian posterior"),
    "two priors": (lambda: bc.ekf.dense(prior=gaussian(), prior_precision=2.0), "leave prior_precision out"),
    "dense prior of a diagonal": (lambda: bc.ekf.diagonal(prior=gaussian()), "the prior is Cholesky.*ekf.dense"),
    "dense prior of low rank": (lambda: bc.ekf.low_rank(rank=1, prior=gaussian()), "the prior is Cholesky"),
    "prior elsewhere": (
        lambda: bc.ekf.dense(prior=gaussian(ELSEWHERE)),
        r"params at a differ from prior.mean \(by up to 1\): start there",
    ),
    "no loss": (lambda: bc.make_step(None, bc.sgd(0.1)), "pass a loss"),
    "no observation": (
        lambda: bc.make_step(None, bc.ekf.dense(), curvature=bc.curvature.ggn(*MODELS["gaussian"], "root"))(
            START, bc.ekf.dense().init(START), stream()[0]
        ),
        r"curvature must be of bc\.ekf\.observe, not Root",
    ),
    "temperature": (
        lambda: stepping(bc.ekf.dense(), form="observation", keywords={"temperature": lambda params, batch: 1.0}),
        "takes no temperature=",
    ),
    "lr 0": (lambda: bc.ekf.dense(0.0), r"lr must"),
    "unknown evidence": (lambda: without_loss(bc.ekf.dense()), "log-likelihood of 3 of 3 data is unknown: pass loss="),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_filter_cannot_hold_is_refused_at_the_start(name):
    make, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=message):
        make().init(START)


ONE = torch.tensor(1.0, **F64)
NO_ROWS = r"is not made of rows.*structure='root'.*bc\.ekf\.observe.*smaller batches"
ROWS = optree.tree_map(lambda p: p[None], START)
WRONG = {
    "none": (None, "update got no curvature"),
    "a tree": (START, "update got curvature of class dict"),
    "diagonal": (Diagonal(START, ONE), NO_ROWS),
    "low_rank": (LowRank(START, ROWS, ONE), NO_ROWS),
    "kronecker": (Kronecker(START, START, START, START, ONE), NO_ROWS),
    "indefinite": (
        Dense(torch.diag(torch.tensor([1.0, -1, 1, 1, 1], **F64)), shape_only(START), ONE),
        "precision is indefinite",
    ),
    "of others": (Root({**ROWS, "a": torch.ones(1, 1, 4)}, ONE), "estimate the curvature of these parameters"),
}


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("kind", WRONG)
def test_curvature_that_a_filter_cannot_take_apart_is_refused_with_what_to_do(name, kind):
    (increment, words), tx = WRONG[kind], filter_of(name, rank=2)
    options = {} if increment is None else {"curvature": increment}
    with pytest.raises((ValueError, TypeError), match=words):
        tx.update(START, tx.init(START), params=START, **options)


def times(params, batch):
    return batch[0] * params


def log_likelihood(params, batch):
    return -likelihoods.bernoulli().nll(times(params, batch), batch[1]), torch.tensor([])


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_with_one_parameter_and_single_data_the_filter_of_posteriors_is_ours():
    """Means and variances to 1e-6 over 20 drifting steps of posteriors 0.1.3. With more parameters theirs divides the gradient
    by each one's own precision, ours solves for them together."""
    posteriors, g = pytest.importorskip("posteriors"), torch.Generator().manual_seed(0)
    data = [(torch.randn(1, generator=g), torch.randint(0, 2, (1,), generator=g).double()) for _ in range(20)]
    theirs = posteriors.ekf.diag_fisher.build(log_likelihood, lr=1.0, transition_sd=0.2, per_sample=True)
    other = theirs.init(torch.zeros(1))
    tx, mean = bc.ekf.diagonal(transition_noise=0.04), torch.zeros(1)
    estimate = bc.ekf.observe(times, likelihoods.bernoulli(), linearisation="empirical")
    step, state = bc.make_step(None, tx, curvature=estimate), tx.init(mean)
    for batch in data:
        other, _ = theirs.update(other, batch)
        mean, state, info = step(mean, state, batch)
        torch.testing.assert_close(mean, other.params, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(tx.posterior(state, mean).marginal_variance, other.sd_diag**2, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(info.loss, -other.log_likelihood)
