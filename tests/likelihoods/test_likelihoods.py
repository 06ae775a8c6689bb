"""Roots of expected Hessians, draws, losses and weights of every likelihood; what none can be is refused."""

import math
import warnings

import pytest
import torch
from scipy import stats
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain import likelihoods

pytestmark = pytest.mark.usefixtures("double_precision")


B = 4


def hessian(likelihood, outputs, targets):
    """The Hessian of the nll in one datum's outputs, `[B, E, E]`, by differentiation."""

    def one(f, y):
        shape = f.shape
        return torch.func.hessian(lambda v: likelihood.nll(v.reshape(1, *shape), y[None]).sum())(f.reshape(-1))

    return torch.stack([one(f, y) for f, y in zip(outputs, targets)])


def squared(factors):
    rows = factors.flatten(2) if factors.ndim > 2 else factors[..., None]
    return torch.einsum("kbi,kbj->bij", rows, rows)


CANONICAL = {
    "gaussian": (likelihoods.gaussian(0.3), (3,), lambda: torch.randn(B, 3)),
    "gaussian per output": (likelihoods.gaussian(torch.tensor([0.1, 1.0, 2.0])), (3,), lambda: torch.randn(B, 3)),
    "gaussian, no event": (likelihoods.gaussian(0.3), (), lambda: torch.randn(B)),
    "bernoulli": (likelihoods.bernoulli(), (2,), lambda: torch.randint(0, 2, (B, 2)).double()),
    "poisson": (likelihoods.poisson(), (2,), lambda: torch.randint(0, 5, (B, 2)).double()),
    "categorical": (likelihoods.categorical(), (4,), lambda: torch.randint(0, 4, (B,))),
    "categorical, a sequence": (likelihoods.categorical(), (3, 4), lambda: torch.randint(0, 4, (B, 3))),
    "custom": (
        likelihoods.custom(lambda f, y: torch.nn.functional.cross_entropy(f, y, reduction="none")),
        (4,),
        lambda: torch.randint(0, 4, (B,)),
    ),
}


@pytest.mark.parametrize("case", CANONICAL.values(), ids=CANONICAL)
def test_exact_factors_are_a_root_of_the_hessian_and_the_empirical_one_is_the_gradient(case):
    likelihood, event, targets = case
    outputs, targets = torch.randn(B, *event), targets()
    factors = likelihood.factors(outputs, targets)
    assert factors.shape[1:] == outputs.shape
    assert torch.allclose(squared(factors), hessian(likelihood, outputs, targets), atol=1e-12)
    gradient = torch.func.grad(lambda f: likelihood.nll(f, targets).sum())(outputs)
    assert torch.allclose(likelihood.empirical_factors(outputs, targets)[0], gradient, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gaussian", "bernoulli", "poisson", "categorical", "categorical, a sequence", "learned"]
)
def test_monte_carlo_factors_have_the_exact_mean(name):
    """40 batches of 100 draws. An entry's error over its standard error, estimated from the 40, has a t distribution
    with 39 degrees of freedom: it exceeds 7 with probability 2e-8, any of 576 entries below 1.3e-5.
    """
    if name == "learned":
        likelihood, event, targets = likelihoods.gaussian("learned"), (2,), lambda: torch.randn(B, 1)
    else:
        likelihood, event, targets = CANONICAL[name]
    outputs, generator = torch.randn(B, *event), torch.Generator().manual_seed(5)
    n, batches = 100, 40
    targets = targets()
    totals = torch.stack([squared(likelihood.sampled_factors(outputs, targets, n, generator)) for _ in range(batches)])
    error = totals.mean(0) - squared(likelihood.factors(outputs, targets))
    deviation = totals.std(0) / batches**0.5 + 1e-12
    assert (error / deviation).abs().max() < 7


def test_learned_variance_has_the_fisher_of_mean_and_log_variance():
    likelihood = likelihoods.gaussian("learned")
    outputs = torch.tensor([[0.3, math.log(0.5)]])
    assert torch.allclose(
        squared(likelihood.factors(outputs, torch.zeros(1, 1)))[0], torch.diag(torch.tensor([2.0, 0.5]))
    )


def test_draws_repeat_with_the_generator():
    for name, (likelihood, event, _) in CANONICAL.items():
        if name != "custom":
            outputs = torch.randn(B, *event)
            a, b = (likelihood.draw(outputs, torch.Generator().manual_seed(1)) for _ in range(2))
            assert torch.equal(a, b)
            assert likelihood.nll(outputs, a).shape == (B,)


@pytest.mark.parametrize("shape", [(4, 10), (3, 5, 4), (2, 2, 3, 2)], ids=str)
def test_a_softmax_over_c_classes_has_c_minus_1_columns_however_they_are_asked_for(shape):
    """In parts, combined, and on the diagonal; logits of a wide range, where some probabilities vanish."""
    logits = 30 * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    p, root = logits.softmax(-1), likelihoods.categorical().root(logits, torch.zeros(shape[:-1], dtype=torch.int64))
    positions = logits[0, ..., 0].numel()
    assert root.columns == positions * max(1, shape[-1] - 1)
    s = root.part(0, root.columns)
    flat = p.reshape(shape[0], positions, shape[-1])
    exact = torch.stack([torch.block_diag(*(torch.diag(q) - torch.outer(q, q) for q in datum)) for datum in flat])
    torch.testing.assert_close(torch.einsum("kbi,kbj->bij", s.flatten(2), s.flatten(2)), exact)
    torch.testing.assert_close(s.square().sum(0), root.diagonal())
    pieces = [root.part(k, min(k + 2, root.columns)) for k in range(0, root.columns, 2)]
    assert torch.equal(torch.cat(pieces), s)
    weights = torch.randn(shape[0], root.columns, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(root.combine(weights), torch.einsum("bk,kb...->b...", weights, s))


def test_the_columns_of_a_softmax_are_finite_where_float32_has_no_probability_left():
    logits = torch.tensor([[200.0, -50.0, -300.0, 0.0], [-200.0, 0.0, -100.0, -103.0]], dtype=torch.float32)
    root = likelihoods.categorical().root(logits, torch.zeros(2, dtype=torch.int64))
    assert root.part(0, root.columns).isfinite().all() and root.combine(torch.ones(2, root.columns)).isfinite().all()


def test_probabilities_in_the_place_of_logits_are_noticed():
    targets, logits = torch.tensor([0, 1, 2]), torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match="probabilities.*leave the softmax out"):
        likelihoods.categorical().require(logits.softmax(-1), targets, wait=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for outputs in (logits, logits.log_softmax(-1), torch.zeros(3, 4)):
            likelihoods.categorical().require(outputs, targets, wait=True)


F = torch.tensor([-1.5, 0.3, 1.2], dtype=torch.float64)
MU, P = F.exp().numpy(), F.sigmoid().numpy()
COUNTS = torch.tensor([-1.0, 0.0, 0.5, 1.0, 4.0, 9.0], dtype=torch.float64)
REALS = torch.tensor([-3.0, -0.2, 0.0, 1.7], dtype=torch.float64)
SHARES = torch.tensor([0.01, 0.4, 0.99], dtype=torch.float64)
CASES = {
    "poisson": (likelihoods.poisson(), stats.poisson(MU), COUNTS),
    "negative_binomial": (likelihoods.negative_binomial(2.5), stats.nbinom(2.5, 2.5 / (2.5 + MU)), COUNTS),
    "geometric": (likelihoods.negative_binomial(1.0), stats.nbinom(1.0, 1 / (1 + MU)), COUNTS),
    "bernoulli": (likelihoods.bernoulli(), stats.bernoulli(P), COUNTS[:4]),
    "gaussian": (likelihoods.gaussian(0.7), stats.norm(F.numpy(), 0.7**0.5), REALS),
    "student_t": (likelihoods.student_t(4.5, 0.6), stats.t(4.5, F.numpy(), 0.6), REALS),
    "beta": (likelihoods.beta(3.0), stats.beta(3.0 * P, 3.0 * (1 - P)), SHARES),
    "gumbel": (
        likelihoods.custom(distribution=lambda f: torch.distributions.Gumbel(f, torch.ones_like(f))),
        stats.gumbel_r(F.numpy()),
        REALS,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_likelihood_is_scipys_distribution(name):
    likelihood, wanted, values = CASES[name]
    outputs = F[:, None]  # [B, 1]

    def close(found, want):
        torch.testing.assert_close(found.reshape(-1), torch.as_tensor(want).reshape(-1), rtol=1e-9, atol=1e-12)

    close(likelihood.mean(outputs), wanted.mean())
    close(likelihood.variance(outputs), wanted.var())
    for value in values:
        y = torch.full_like(outputs, value)
        close(likelihood.cdf(outputs, y), wanted.cdf(float(value)))
        if name in ("gaussian", "student_t", "beta", "gumbel"):
            close(likelihood.nll(outputs, y), -wanted.logpdf(float(value)))
        elif value >= 0 and value == value.floor() and not (name == "bernoulli" and value > 1):
            close(likelihood.nll(outputs, y), -wanted.logpmf(float(value)))


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_distribution_function(name):
    """By Kolmogorov and Smirnov's test of 4,000 draws at their places in it, at random between the two ends of a step of
    counts; false alarm 1e-4 a likelihood."""
    likelihood, generator = CASES[name][0], torch.Generator().manual_seed(5)
    outputs = F[:1].expand(4000)[:, None]
    y = likelihood.draw(outputs, generator)
    is_count = name in ("poisson", "negative_binomial", "geometric", "bernoulli")
    low = likelihood.cdf(outputs, y - 1) if is_count else 0.0
    places = likelihood.cdf(outputs, y) - (
        torch.rand(y.shape, generator=generator) * (likelihood.cdf(outputs, y) - low) * is_count
    )
    assert stats.kstest(places.flatten().numpy(), "uniform").pvalue > 1e-4


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("level", [1e-6, 0.3, 0.999])
def test_quantiles_are_scipys_out_to_the_tails(name, level):
    likelihood, wanted, _ = CASES[name]
    found = likelihood.mixture(F[None, :, None]).quantile(level)
    torch.testing.assert_close(found.flatten(), torch.as_tensor(wanted.ppf(level)), rtol=1e-8, atol=1e-14)


@pytest.mark.parametrize("name", ["poisson", "negative_binomial", "gumbel"])
def test_scores_in_single_precision_are_those_in_double(name):
    likelihood, y = CASES[name][0], torch.tensor([[0.0], [2.0], [7.0]], dtype=torch.float32)
    single, double = (likelihood.mixture(F[None, :, None].to(y).to(t)).crps(y.to(t)) for t in (y.dtype, torch.float64))
    torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=1e-4)


def language_model():
    module = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11)).eval()
    ids = torch.randint(0, 11, (4, 7))
    labels = ids.clone()
    labels[:, 4:] = -100
    return module, ids, labels


@pytest.mark.parametrize("structure", ["dense", "diagonal", "root"])
def test_ignored_labels_are_left_out_of_the_curvature(structure):
    """It is that of the sequences without them, which is exact here, since a position sees itself alone."""
    module, ids, labels = language_model()
    forward, params, _ = bc.make_functional(module)
    estimate = bc.curvature.ggn(forward, likelihoods.categorical(), structure)
    got, wanted = estimate(params, (ids, labels)), estimate(params, (ids[:, :4], labels[:, :4]))
    torch.testing.assert_close(got.to_dense(), wanted.to_dense(), rtol=1e-9, atol=1e-11)


def test_ignored_labels_are_left_out_of_fishers_gradients_and_filters():
    """The empirical Fisher and the loss; the sampled Fisher of a batch of padding is zero; a filter learns nothing from it."""
    module, ids, labels = language_model()
    forward, params, _ = bc.make_functional(module)
    likelihood, outputs = likelihoods.categorical(), forward(params, (ids, None))
    torch.testing.assert_close(likelihood.nll(outputs, labels), likelihood.nll(outputs[:, :4], labels[:, :4]))
    factor = likelihood.empirical_factors(outputs, labels)
    assert not factor[:, :, 4:].any()
    torch.testing.assert_close(factor[:, :, :4], likelihood.empirical_factors(outputs[:, :4], labels[:, :4]))
    nothing = torch.full_like(labels, -100)
    fisher = bc.curvature.fisher(forward, likelihood, "diagonal", generator=torch.Generator().manual_seed(0))
    assert all(not leaf.any() for leaf in fisher(params, (ids, nothing)).diag().values())
    small = nn.Linear(2, 3)
    forward, params, _ = bc.make_functional(small)
    x, y = torch.randn(4, 2), torch.tensor([0, 2, -100, -100])
    for how in ("tangent", "empirical"):
        tx = bc.ekf.dense(prior_precision=1.0)
        ends = []
        for batch in ((x, y), (x[:2], y[:2])):
            observe = bc.ekf.observe(forward, likelihood, linearisation=how)
            updates, state = tx.update(params, tx.init(params), params=params, curvature=observe(params, batch))
            ends.append((updates, tx.posterior(state, params).precision.to_dense()))
        torch.testing.assert_close(ends[0], ends[1], rtol=1e-8, atol=1e-10)


def test_class_weights_and_smoothing_are_those_of_torch():
    """Losses of ``cross_entropy``, and the Hessian of that loss by differentiation."""
    weight = torch.tensor([0.5, 2.0, 1.0])
    outputs, y = torch.randn(6, 3), torch.tensor([0, 1, 2, 1, -100, 0])
    for options in ({"weight": weight}, {"label_smoothing": 0.2}, {"weight": weight, "label_smoothing": 0.2}):
        likelihood = likelihoods.categorical(**options)
        loss = lambda f: nn.functional.cross_entropy(f, y, reduction="none", **options)  # noqa: B023, E731
        torch.testing.assert_close(likelihood.nll(outputs, y), loss(outputs))
        hessian = torch.func.hessian(lambda f: loss(f).sum())(outputs)  # noqa: B023
        s = likelihood.factors(outputs, y)
        torch.testing.assert_close(
            torch.einsum("kbi,kbj->bij", s, s), torch.stack([hessian[b, :, b] for b in range(6)])
        )


@pytest.mark.parametrize("name", ["gaussian", "poisson", "bernoulli", "categorical"])
def test_a_weight_of_two_is_the_datum_twice_and_of_zero_not_there(name):
    """Loss, curvature, evidence, tuned prior and noise of a fit."""
    x = torch.randn(40, 2)
    y = {
        "gaussian": torch.sin(x[:, :1]),
        "poisson": torch.randint(0, 4, (40, 1)).double(),
        "bernoulli": torch.randint(0, 2, (40, 1)).double(),
        "categorical": torch.randint(0, 3, (40,)),
    }[name]
    module = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3 if name == "categorical" else 1)).eval()
    weights = torch.tensor([2.0] * 10 + [1.0] * 20 + [0.0] * 10)
    plain = getattr(likelihoods, name)()
    missing = y.clone()
    if missing.is_floating_point():
        missing[30:] = math.nan
    twice = torch.cat([x[:30], x[:10]]), torch.cat([y[:30], y[:10]])
    got = bc.fit_laplace(module, likelihoods.weighted(plain), [(x, (missing, weights))], structure="dense")
    wanted = bc.fit_laplace(module, plain, [twice], structure="dense")
    torch.testing.assert_close(got.log_evidence, wanted.log_evidence, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(got.likelihood_scale, wanted.likelihood_scale, rtol=1e-5, atol=0)
    torch.testing.assert_close(got.prior_precision, wanted.prior_precision, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    "likelihood, targets, words",
    [
        (likelihoods.bernoulli(), [[1.0], [-1.0]], r"targets that are not whole numbers from 0 to 1, such as -1"),
        (likelihoods.poisson(), [[1.0], [-3.5]], "not counts from 0, such as -3.5"),
        (likelihoods.negative_binomial(), [[0.5], [1.0]], "not counts from 0, such as 0.5"),
        (likelihoods.gaussian(), [[math.nan], [0.0]], "not finite numbers, such as nan"),
        (likelihoods.student_t(), [[math.inf], [0.0]], "not finite numbers, such as inf"),
        (likelihoods.beta(), [[0.0], [0.5]], "strictly between 0 and 1, such as 0"),
        (likelihoods.ordinal([0.0]), [[2.0], [1.0]], "whole numbers from 0 to 1, such as 2"),
        (
            likelihoods.custom(distribution=lambda f: torch.distributions.Exponential(f.exp())),
            [[-1.0], [1.0]],
            "not in the support",
        ),
    ],
)
def test_targets_that_cannot_be_are_refused(likelihood, targets, words):
    """By the loss, a fit that tunes nothing, and a filter, whose parameters stay what they are."""
    y, module = torch.tensor(targets), nn.Linear(1, 1).eval()
    with pytest.raises(ValueError, match=words):
        likelihood.nll(torch.zeros(2, 1), y)
    with pytest.raises(ValueError, match=words):
        bc.fit_laplace(module, likelihood, [(torch.ones(2, 1), y)], tune=None)
    forward, params, _ = bc.make_functional(module)
    with pytest.raises(ValueError, match=words):
        bc.ekf.observe(forward, likelihood)(params, (torch.ones(2, 1), y))


CLASSES, LOGITS, Y = likelihoods.categorical(), torch.zeros(2, 3), torch.tensor([0, 1])


def custom(loss, **more):
    return likelihoods.custom(loss, **more)


def of_gaussian():
    return likelihoods.gaussian().predictive(torch.zeros(2, 1), torch.ones(2, 1, 1))


def squares(f, y):
    return (f - y).square().sum(-1)


def mixing(f, y):
    return squares(f - f.mean(0), y)


def averaged(f, y):
    return (f - y).square().mean()


def of_classes():
    return CLASSES.predictive(torch.zeros(1, 3), torch.eye(3)[None])


ONE_EACH = "depends on the rest of the batch"


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: likelihoods.gaussian(0.0), "variance must be a positive number"),
        (lambda: likelihoods.gaussian("known"), "'learned'"),
        (lambda: likelihoods.gaussian("learned").factors(LOGITS, torch.zeros(2, 1)), "2 C"),
        (lambda: likelihoods.gaussian().nll(torch.zeros(2, 1), torch.zeros(2)), r"targets \(2,\)"),
        (lambda: custom(squares).draw(torch.zeros(1, 1), None), "draw="),
        (
            lambda: custom(squares, output_hessian=lambda f, y: torch.eye(1)).factors(*torch.zeros(2, 2, 1)),
            "B, E, E",
        ),
        (
            lambda: custom(lambda f, y: -squares(f, y)).factors(*torch.zeros(2, 2, 1)),
            r"not positive semidefinite.*output_hessian",
        ),
        (lambda: custom(mixing).factors(torch.eye(3), torch.zeros(3, 3)), ONE_EACH),
        (lambda: custom(mixing).empirical_factors(torch.eye(3), torch.zeros(3, 3)), ONE_EACH),
        (lambda: custom(averaged).empirical_factors(torch.eye(3), torch.zeros(3, 3)), "one loss a datum"),
        (
            lambda: CLASSES.nll(LOGITS, torch.tensor([0, -1])),
            r"class numbers from 0 .or ignore_index=-100., such as -1",
        ),
        (lambda: CLASSES.nll(LOGITS, torch.tensor([0, 3])), "class numbers from 0 to 2, such as 3"),
        (lambda: CLASSES.nll(LOGITS, torch.tensor([0.0, 1.0])), "class numbers, int64"),
        (lambda: CLASSES.nll(torch.zeros(2, 1), torch.tensor([0, 0])), r"at least two classes.*bernoulli"),
        (lambda: CLASSES.nll(torch.zeros(0, 3), torch.zeros(0).long()), "the batch is empty"),
        (lambda: likelihoods.categorical(weight=[1.0, 2.0]).nll(LOGITS, Y), "weight has 2 entries"),
        (lambda: likelihoods.categorical(label_smoothing=1.0), "label_smoothing must lie in"),
        (
            lambda: likelihoods.weighted(CLASSES).nll(LOGITS, Y),
            r"not a pair: pass batches .inputs, .targets, weights.",
        ),
        (
            lambda: likelihoods.weighted(CLASSES).nll(LOGITS, (Y, torch.tensor([1.0, -1.0]))),
            "finite and not negative",
        ),
        (lambda: of_classes().quantile(0.5), "have no order"),
        (lambda: of_classes().crps(torch.tensor([0])), "have no order"),
        (lambda: of_gaussian().quantile(1.0), r"level must be a number in \(0, 1\)"),
    ],
)
def test_it_is_refused_by_name(ask, words):
    with pytest.raises(ValueError, match=words):
        ask()


@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "poisson", "student_t", "negative_binomial"])
@pytest.mark.parametrize("outputs, targets", [((5, 1), (5,)), ((5,), (5, 1)), ((3, 5, 1), (5,))])
def test_a_density_of_targets_is_never_that_of_other_data(name, outputs, targets):
    likelihood = getattr(bc.likelihoods, name)()
    with pytest.raises(ValueError, match=r"log_prob: targets .* would be compared with outputs .* reshape the targets"):
        likelihood.log_prob(torch.zeros(outputs), torch.ones(targets))
    assert likelihood.log_prob(torch.zeros(3, *targets), torch.ones(targets)).shape == (3, *targets)
