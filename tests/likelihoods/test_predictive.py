"""New targets at Gaussian outputs: density, moments, quantiles and scores against fine quadrature and closed forms."""

import math
import pickle
import weakref

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain import likelihoods
from bayesopt_chain.likelihoods import _quadrature
from bayesopt_chain.likelihoods._quadrature import incomplete_beta

MEAN = torch.tensor([[0.3], [-1.0]], dtype=torch.float64)
COVARIANCE = torch.tensor([[[0.4]], [[1.5]]], dtype=torch.float64)
ONE_OUTPUT = {
    "gaussian": likelihoods.gaussian(0.3),
    "student_t": likelihoods.student_t(3.0, 0.5),
    "bernoulli": likelihoods.bernoulli(),
    "poisson": likelihoods.poisson(),
    "negative_binomial": likelihoods.negative_binomial(2.0),
    "beta": likelihoods.beta(7.0),
    "ordinal": likelihoods.ordinal([-1.0, 0.5, 1.0]),
    "gamma": likelihoods.custom(distribution=lambda f: torch.distributions.Gamma(torch.full_like(f, 2.0), (-f).exp())),
}
one_output = pytest.mark.parametrize("name", ONE_OUTPUT)


pytestmark = pytest.mark.usefixtures("double_precision")


def fine():
    """Outputs ``[2, Z]`` on 20,001 points within ten deviations, and their weights."""
    z = torch.linspace(-10, 10, 20_001)
    w = torch.exp(-z.square() / 2)
    return MEAN + COVARIANCE[:, 0].sqrt() * z, w / w.sum()


@one_output
def test_density_and_moments_are_integrals_over_the_outputs(name):
    """To 1e-7, for targets drawn from the likelihood."""
    likelihood, (f, w) = ONE_OUTPUT[name], fine()
    predictive = likelihood.predictive(MEAN, COVARIANCE)
    means, spreads = (x.movedim(1, -1) @ w for x in (likelihood.mean(f), likelihood.variance(f)))
    around = (likelihood.mean(f).movedim(1, -1) - means[..., None]).square() @ w
    torch.testing.assert_close(predictive.mean.reshape(means.shape), means, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(predictive.variance.reshape(means.shape), spreads + around, rtol=1e-7, atol=1e-9)
    entropies = -(f.sigmoid() * f.sigmoid().log() + (-f).sigmoid() * (-f).sigmoid().log())[:, None] @ w
    wanted = entropies.reshape(means.shape) if likelihood.has_classes else spreads
    torch.testing.assert_close(predictive.aleatoric.reshape(means.shape), wanted, rtol=1e-7, atol=1e-9)
    y = likelihood.draw(MEAN, torch.Generator().manual_seed(3))
    wanted = (likelihood.log_prob(f, y.expand_as(f)) + w.log()).logsumexp(-1)
    torch.testing.assert_close(predictive.log_prob(y)[:, 0], wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("variance", [1e-6, 9.0, 25.0])
@pytest.mark.parametrize(
    ("likelihood", "excess"), [(likelihoods.poisson(), 0.0), (likelihoods.negative_binomial(2.0), 0.5)]
)
def test_moments_of_counts_are_those_of_log_normal_rates_however_uncertain_they_are(likelihood, excess, variance):
    predictive = likelihood.predictive(torch.full((1, 1), 0.3), torch.full((1, 1, 1), variance))
    mu, square = math.exp(0.3 + variance / 2), math.exp(0.6 + 2 * variance)
    within, between = mu + excess * square, math.exp(0.6 + variance) * math.expm1(variance)
    found = [x.item() for x in (predictive.mean, predictive.aleatoric, predictive.variance)]
    assert found == pytest.approx([mu, within, within + between], rel=1e-13)


@pytest.mark.sweep(1)
@one_output
def test_quantiles_invert_the_distribution_function(name):
    likelihood, (f, w) = ONE_OUTPUT[name], fine()
    predictive = likelihood.predictive(MEAN, COVARIANCE)
    for level in (0.05, 0.4, 0.95):  # not 0.5, which a symmetric distribution function meets to the last bit
        y = predictive.quantile(level)
        known = likelihood.support_at(f) if name == "gamma" else likelihood.support
        below = (likelihood.cdf(f[:, ::50], y.expand_as(f[:, ::50])) @ w[::50])[:, None] * 50
        if known.is_discrete:
            less = (likelihood.cdf(f[:, ::50], (y - 1).expand_as(f[:, ::50])) @ w[::50])[:, None] * 50
            assert (below >= level).all() and (less < level).all()
        else:
            torch.testing.assert_close(below, torch.full_like(below, level), rtol=1e-7, atol=1e-8)
    low, high = predictive.interval(0.9)
    torch.testing.assert_close((low, high), (predictive.quantile(0.05), predictive.quantile(0.95)))


@pytest.mark.sweep(4)
@one_output
def test_scores_are_integrals_of_the_squared_distance_of_distribution_functions(name):
    """Against the trapezoidal rule on 401 points, which errs at the target by its spacing (a sum for counts, to 1e-6)."""
    likelihood = ONE_OUTPUT[name]
    predictive = likelihood.predictive(MEAN[:1], COVARIANCE[:1])
    y = likelihood.draw(MEAN[:1], torch.Generator().manual_seed(4)).double()
    is_discrete = name in ("bernoulli", "poisson", "negative_binomial", "ordinal")
    ends = {"beta": (0, 1), "gamma": (0, 60), "gaussian": (-8, 8), "student_t": (-40, 40)}.get(name)
    grid = torch.arange(0.0, 90) if is_discrete else torch.linspace(*ends, 401)
    squares = torch.stack([(predictive.cdf(x.reshape(1, 1)) - (x >= y).double()).square().squeeze() for x in grid])
    wanted = squares.sum() if is_discrete else torch.trapezoid(squares, grid)
    assert abs(predictive.crps(y).item() - wanted.item()) < (1e-5 if is_discrete else grid[1] - grid[0])


def test_distribution_functions_have_the_parameters_to_the_last_digit():
    scipy_stats = pytest.importorskip("scipy.stats")
    f, mu = torch.tensor([[0.3]]), math.exp(0.3)
    for likelihood, y, known in (
        (likelihoods.student_t(2.3, 0.7), 1.1, scipy_stats.t(2.3, loc=0.3, scale=0.7)),
        (likelihoods.negative_binomial(0.37), 2.0, scipy_stats.nbinom(0.37, 0.37 / (0.37 + mu))),
    ):
        assert likelihood.cdf(f, torch.tensor([[y]])).item() == pytest.approx(known.cdf(y), rel=1e-13)


def test_the_score_of_a_gaussian_is_its_closed_form():
    """Gneiting and Raftery (2007), equation 21; standard deviation 2, standardised targets 0 and 1.5."""
    predictive = likelihoods.gaussian(1.0).predictive(torch.zeros(2, 1), torch.full((2, 1, 1), 3.0))
    z = torch.tensor([0.0, 1.5])
    phi, cdf = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi), torch.special.ndtr(z)
    wanted = 2 * (z * (2 * cdf - 1) + 2 * phi - 1 / math.sqrt(math.pi))
    torch.testing.assert_close(predictive.crps(2 * z[:, None])[:, 0], wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("apart", "tolerance"), [(1.0, 1e-12), (10.0, 1e-8), (100.0, 1e-4)])
def test_the_integrated_score_of_components_far_apart_is_the_closed_form(apart, tolerance):
    """Gaussian noise as a custom likelihood, which is integrated, against ``E|X - y| - E|X - X'| / 2``."""
    outputs = apart * torch.randn(5, 3, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.tensor([[0.0], [apart], [3 * apart]], dtype=torch.float64)
    noise = bc.likelihoods.custom(distribution=lambda f: torch.distributions.Normal(f, torch.ones_like(f)))
    wanted = bc.likelihoods.gaussian(1.0).mixture(outputs).crps(y)
    torch.testing.assert_close(noise.mixture(outputs).crps(y), wanted, rtol=tolerance, atol=0.0)


def test_a_learned_variance_is_integrated_with_its_mean():
    """Density and variance against a product rule over both outputs, which are correlated."""
    mean, root = torch.randn(3, 4), torch.randn(3, 4, 4)
    covariance = root @ root.mT / 4
    likelihood, y = likelihoods.gaussian("learned"), torch.randn(3, 2)
    predictive = likelihood.predictive(mean, covariance)
    z = torch.linspace(-8.5, 8.5, 301)
    w = torch.exp(-z.square() / 2)
    pairs, weights = torch.cartesian_prod(z, z), (w[:, None] * w).reshape(-1) / w.sum() ** 2
    for n in range(3):
        for c in range(2):
            own = torch.tensor([c, c + 2])
            lower = torch.linalg.cholesky(covariance[n][own][:, own])
            f = mean[n][own] + pairs @ lower.T
            density = weights @ (-(y[n, c] - f[:, 0]).square() / (2 * f[:, 1].exp())).exp().div(
                (2 * math.pi * f[:, 1].exp()).sqrt()
            )
            assert math.isclose(predictive.log_prob(y)[n, c].item(), density.log().item(), rel_tol=1e-8, abs_tol=1e-8)
            variance = covariance[n, c, c] + (mean[n, c + 2] + covariance[n, c + 2, c + 2] / 2).exp()
            assert math.isclose(predictive.variance[n, c].item(), variance.item(), rel_tol=1e-8)
            assert math.isclose(
                predictive.aleatoric[n, c].item(), (variance - covariance[n, c, c]).item(), rel_tol=1e-8
            )


@pytest.mark.sweep(1)
@pytest.mark.parametrize("classes, deviation", [(3, 3.0), (10, 1.0), (100, 3.0)])
def test_sobol_points_are_closer_to_the_mean_of_a_softmax_than_probit(classes, deviation):
    """Four random Gaussians; 80,000 draws have a standard error below 0.0018, the bound is 0.01 and six of those."""
    for _ in range(4):
        root = torch.randn(classes, classes) / classes**0.5 * deviation
        mean, covariance = 1.5 * torch.randn(classes), root @ root.T
        noise = torch.randn(40_000, classes) @ root.T
        exact = torch.cat([mean + noise, mean - noise]).softmax(-1).mean(0)
        error = (bc.posterior.softmax_mean(mean, covariance) - exact).abs().max()
        assert error < 0.01 + 0.011 and error < (bc.posterior.probit(mean, covariance) - exact).abs().max()


def test_sobol_means_have_the_derivatives_of_their_values():
    """All of them, against central differences, where eigenvalues of the covariance are equal too."""
    for root in (torch.randn(4, 4), torch.eye(4)):
        mean, root = torch.randn(4, requires_grad=True), root.requires_grad_()
        function = lambda m, r: bc.posterior.softmax_mean(m, r @ r.T)  # noqa: E731
        assert torch.autograd.gradcheck(function, (mean, root), eps=1e-5, atol=1e-9, rtol=0)


def test_the_incomplete_beta_function_is_scipys():
    special = pytest.importorskip("scipy.special")
    a, b, x = (10 ** (6 * torch.rand(500) - 2)), (10 ** (6 * torch.rand(500) - 2)), torch.rand(500)
    wanted = torch.from_numpy(special.betainc(a.numpy(), b.numpy(), x.numpy()))
    torch.testing.assert_close(incomplete_beta(a, b, x), wanted, rtol=0, atol=1e-10)


def test_a_custom_loss_has_a_predictive_density():
    """Of a Gaussian loss: the closed form, from 256 Sobol points over two outputs."""
    loss = likelihoods.custom(lambda f, y: ((f - y).square() / 2 + math.log(2 * math.pi) / 2).sum(-1))
    root = torch.randn(5, 2, 2)
    mean, covariance, y = torch.randn(5, 2), root @ root.mT / 4, torch.randn(5, 2)
    wanted = torch.distributions.MultivariateNormal(mean, covariance + torch.eye(2)).log_prob(y)
    torch.testing.assert_close(loss.predictive(mean, covariance).log_prob(y), wanted, rtol=0, atol=0.02)
    with pytest.raises(ValueError, match="no known mean"):
        _ = loss.predictive(mean, covariance).mean


def test_likelihoods_are_pickled():
    for likelihood in (
        likelihoods.gaussian(torch.tensor([0.3])),
        likelihoods.categorical(weight=[1.0, 2.0]),
        likelihoods.weighted(likelihoods.poisson()),
        likelihoods.gaussian("learned"),
    ):
        twin = pickle.loads(pickle.dumps(likelihood))
        assert type(twin) is type(likelihood) and twin.name == likelihood.name


def test_quadrature_over_an_interval_is_exact_for_polynomials():
    nodes, weights = _quadrature.gauss_legendre(5)
    powers = torch.arange(10.0)[:, None]
    torch.testing.assert_close((weights * nodes**powers).sum(1), 1 / (powers[:, 0] + 1), rtol=1e-13, atol=0)


@pytest.mark.parametrize(("df", "wanted"), [(2.5, 5.0), (4.0, 2.0), (2.0, math.inf), (1.0, math.inf)])
def test_the_variance_of_student_t_is_finite_above_two_degrees_of_freedom(df, wanted):
    assert float(likelihoods.student_t(df, 0.5).variance(torch.zeros(1))) == pytest.approx(0.25 * wanted)


TABLES = {"fine_grid": (129,), "gauss_legendre": (6,), "sobol_normals": (4, 8)}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("inside", ["inference mode", "a derivative", "a mapped derivative", "another device"])
def test_tables_that_are_first_asked_for_inside_something_serve_outside(name, inside):
    table = getattr(_quadrature, name)

    def values():
        found = table(*TABLES[name])
        return found if isinstance(found, torch.Tensor) else found[0]

    def total(x):
        return (values() * x).sum()

    wanted, one = values().clone(), torch.ones((), dtype=torch.float64)
    table.cache_clear()
    if inside == "inference mode":
        with torch.inference_mode():
            values()
    elif inside == "a derivative":
        torch.testing.assert_close(torch.func.grad(total)(one), wanted.sum())
    elif inside == "a mapped derivative":
        torch.testing.assert_close(torch.vmap(torch.func.grad(total))(one[None])[0], wanted.sum())
    else:
        with torch.device("meta"):
            values()
    factor = one.clone().requires_grad_()
    (values() * factor).square().sum().backward()  # what autograd saves may be no inference tensor
    torch.testing.assert_close(factor.grad, 2 * wanted.square().sum())
    assert torch.equal(values(), wanted)


CUSTOM = {
    "classes": likelihoods.categorical(weight=(1, 2, 1)),
    "distribution": likelihoods.custom(
        distribution=lambda f: torch.distributions.Gamma(torch.full_like(f, 2.0), (-f).exp())
    ),
    "loss": likelihoods.custom(lambda f, y: (f - y).square().sum(-1), mean=lambda f: f),
    "weighted": likelihoods.weighted(likelihoods.gaussian(torch.tensor([0.5, 1.0, 2.0]))),
}


@pytest.mark.parametrize("name", [*ONE_OUTPUT, *CUSTOM])
def test_draws_of_gaussian_outputs_answer_as_their_gaussian_does(name):
    """Of nodes with weights, which are what the likelihood integrates over: mean, density and distribution function agree.

    A closed form (Gaussian noise) is that of infinitely many nodes; its nodes here are of 1,025 points.
    """
    likelihood = (ONE_OUTPUT | CUSTOM)[name]
    mean, covariance = torch.tensor([[0.3, -1.0, 0.5]]), torch.diag_embed(torch.tensor([[0.4, 0.2, 0.1]]))
    own = likelihood.predictive(mean, covariance)
    nodes, log_weights = likelihood.nodes(mean, covariance)
    drawn = likelihood.mixture(nodes, log_weights)
    draw = likelihood.draw if name != "loss" else lambda f, g: f + 1
    y = draw(mean, torch.Generator().manual_seed(3))
    targets = (y, torch.full_like(y, 0.5)) if name == "weighted" else y
    torch.testing.assert_close(drawn.log_prob(targets), own.log_prob(targets), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(drawn.mean, own.mean, rtol=1e-7, atol=1e-9)
    assert own.likelihood.has_classes == (name in ("bernoulli", "classes"))
    if name in ("classes", "loss"):
        with pytest.raises(ValueError, match="have no order"):
            drawn.quantile(0.5)
        return
    torch.testing.assert_close(drawn.cdf(y), own.cdf(y), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(drawn.quantile(0.7), own.quantile(0.7), rtol=1e-6, atol=1e-6)


def test_parts_of_the_data_have_the_answers_of_the_whole(monkeypatch):
    likelihood, mean = likelihoods.categorical(), torch.randn(7, 3)
    root = torch.randn(7, 3, 3)
    predictive, y = likelihood.predictive(mean, root @ root.mT), torch.arange(7) % 3
    whole = predictive.mean, predictive.log_prob(y), predictive.epistemic
    monkeypatch.setattr("bayesopt_chain.likelihoods._predictive.NUMBERS_AT_ONCE", 3000)
    for got, wanted in zip((predictive.mean, predictive.log_prob(y), predictive.epistemic), whole):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)


def test_covariances_are_of_draws_and_of_joint_gaussians():
    """Of draws the law of total covariance; of a joint Gaussian its own with the noise; a sample has it (10 deviations)."""
    noise, outputs, log_weights = torch.tensor([0.5, 2.0]), torch.randn(5, 3, 2), torch.randn(5).log_softmax(-1)
    drawn = likelihoods.gaussian(noise).mixture(outputs, log_weights + 3.0)  # of which only differences matter
    wanted = torch.cov(outputs.reshape(5, 6).T, correction=0, aweights=log_weights.exp()) + torch.diag(noise.repeat(3))
    torch.testing.assert_close(drawn.covariance(joint=True), wanted)
    torch.testing.assert_close(drawn.covariance()[1], wanted[2:4, 2:4])
    torch.testing.assert_close(drawn.covariance().diagonal(dim1=-2, dim2=-1), drawn.variance)
    root = torch.randn(6, 6)
    joint = likelihoods.gaussian(noise).predictive(torch.randn(3, 2), root @ root.T)
    wanted = root @ root.T + torch.diag(noise.repeat(3))
    torch.testing.assert_close(joint.covariance(joint=True), wanted)
    torch.testing.assert_close(joint.covariance()[2], wanted[4:, 4:])
    torch.testing.assert_close(joint.variance.reshape(-1), wanted.diagonal())
    sample = joint.sample(40_000, generator=torch.Generator().manual_seed(0)).reshape(-1, 6)
    scale = wanted.diagonal().sqrt()
    assert ((torch.cov(sample.T) - wanted) / (scale * scale[:, None])).abs().max() < 10 * (2 / 40_000) ** 0.5
    for predictive, words in (
        (likelihoods.gaussian().predictive(MEAN, COVARIANCE), "joint=True"),
        (likelihoods.poisson().predictive(MEAN, COVARIANCE), "likelihood.mixture"),
    ):
        with pytest.raises(ValueError, match=words):
            predictive.covariance(joint=True)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("wrapped", [False, True])
def test_draws_of_classes_that_are_added_up_give_the_mixture_and_none_is_kept(axis, wrapped):
    """In float32 too, of tokens that every draw calls all but impossible, and of logits that are -inf."""
    plain = likelihoods.categorical(axis=axis)
    likelihood = likelihoods.weighted(plain) if wrapped else plain
    outputs = (5 * torch.randn(7, 4, 3, 6)).float()
    outputs[:, 0, 0, 2], outputs[:, 1, 1, 0] = -300.0, -torch.inf
    outputs = outputs.movedim(-1, axis)
    targets = torch.randint(1, 6, (4, 3))
    targets[0, 0] = 2
    labels = (targets, torch.rand(4, 3)) if wrapped else targets
    kept = []

    def stream():
        for draw in outputs:
            assert sum(ref() is not None for ref in kept) <= 1
            copy = draw.clone()
            kept.append(weakref.ref(copy))
            yield copy

    pooled, stacked = likelihood.pooled(stream()), likelihood.mixture(outputs)
    assert pooled.outputs.shape == (1, *outputs.shape[1:]) and len(kept) == 7
    found, wanted = (
        (p.probabilities, p.entropy, p.aleatoric, p.epistemic, p.variance, p.log_prob(labels))
        for p in (pooled, stacked)
    )
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)
    with pytest.raises(ValueError, match="added up"):
        pooled.covariance()


def test_outputs_that_are_no_classes_are_stacked():
    pooled = likelihoods.gaussian().pooled(iter(torch.randn(5, 3, 1)))
    assert pooled.outputs.shape == (5, 3, 1) and pooled.mean_entropy is None
    for likelihood in (likelihoods.gaussian(), likelihoods.categorical()):
        with pytest.raises(ValueError, match="at least one draw"):
            likelihood.pooled([])


D = torch.distributions


@pytest.mark.parametrize(
    "make",
    [
        lambda f: D.Uniform(f, f + 2.0),
        lambda f: D.Pareto(f.exp(), 3.0),
        lambda f: D.Binomial(5, logits=f),
    ],
)
def test_a_distribution_whose_support_ends_at_tensors_has_the_moments_and_the_shares_of_its_draws(make):
    outputs = torch.tensor([[[0.0], [1.0]], [[0.5], [1.5]]], dtype=torch.float64)
    mixed, each = likelihoods.custom(distribution=make).mixture(outputs), make(outputs)
    torch.testing.assert_close(mixed.mean, each.mean.mean(0))
    torch.testing.assert_close(
        mixed.variance, (each.variance + each.mean.square()).mean(0) - each.mean.mean(0).square()
    )
    if isinstance(each, D.Binomial):
        with pytest.raises(ValueError, match="Binomial has no cdf"):
            mixed.quantile(0.5)
        return
    at = mixed.quantile(0.3)
    share = torch.where(at < each.support.lower_bound, 0.0, each.cdf(torch.maximum(at, each.support.lower_bound)))
    torch.testing.assert_close(share.mean(0), torch.full((2, 1), 0.3, dtype=torch.float64), rtol=1e-6, atol=1e-6)


def test_a_distribution_of_several_outputs_for_one_target_has_their_curvature():
    lik, f = likelihoods.custom(distribution=lambda f: D.Categorical(logits=f)), torch.randn(4, 3)
    labels = torch.tensor([0, 1, 2, 0])
    own, wanted = (x.factors(f, labels) for x in (lik, likelihoods.categorical()))
    gram = lambda r: torch.einsum("kbi,kbj->bij", r, r)  # noqa: E731
    torch.testing.assert_close(gram(own), gram(wanted), rtol=1e-4, atol=1e-6)
