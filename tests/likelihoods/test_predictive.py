"""New targets at Gaussian outputs: density, moments, quantiles and scores against fine quadrature and closed forms."""

import math
import pickle
import weakref
from dataclasses import replace

import pytest
import torch
from scipy import special, stats
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain import likelihoods
from bayesopt_chain.likelihoods import _quadrature
from tests.refusals import refused

D = torch.distributions
MEAN = torch.tensor([[0.3], [-1.0]], dtype=torch.float64)
COVARIANCE = torch.tensor([[[0.4]], [[1.5]]], dtype=torch.float64)
ONE_OUTPUT = {
    "gaussian": likelihoods.gaussian(0.3),
    "student_t": likelihoods.student_t(3.0, 0.5),
    "bernoulli": likelihoods.bernoulli(),
    "poisson": likelihoods.poisson(),
    "negative_binomial": likelihoods.negative_binomial(2.0),
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
    ("likelihood", "excess"),
    [
        (likelihoods.poisson(), 0.0),
        (likelihoods.negative_binomial(2.0), 0.5),
        (likelihoods.custom(distribution=lambda f: torch.distributions.Poisson(f.exp())), 0.0),
    ],
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
    at, many = grid[:, None], [x[:1].expand(len(grid), *x.shape[1:]) for x in (MEAN, COVARIANCE)]
    squares = (likelihood.predictive(*many).cdf(at) - (at >= y).double()).square().squeeze(1)
    wanted = squares.sum() if is_discrete else torch.trapezoid(squares, grid)
    assert abs(predictive.crps(y).item() - wanted.item()) < (1e-5 if is_discrete else grid[1] - grid[0])


def test_as_many_counts_as_the_limit_are_not_added_up(monkeypatch):
    monkeypatch.setattr("bayesopt_chain.likelihoods._predictive.MOST_COUNTS", 900)
    with pytest.raises(ValueError, match="crps: counts up to 900 would have to be added up"):
        likelihoods.poisson().predictive(MEAN[:1], COVARIANCE[:1]).crps(torch.full((1, 1), 900.0))


def test_the_score_of_a_gaussian_is_its_closed_form():
    """Gneiting and Raftery (2007), equation 21; standard deviation 2, standardised targets 0 and 1.5."""
    predictive = likelihoods.gaussian(1.0).predictive(torch.zeros(2, 1), torch.full((2, 1, 1), 3.0))
    z = torch.tensor([0.0, 1.5])
    phi, cdf = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi), torch.special.ndtr(z)
    wanted = 2 * (z * (2 * cdf - 1) + 2 * phi - 1 / math.sqrt(math.pi))
    torch.testing.assert_close(predictive.crps(2 * z[:, None])[:, 0], wanted, rtol=1e-12, atol=1e-12)


def test_far_tails_keep_their_digits():
    known = likelihoods.gaussian(1.0).predictive(torch.zeros(1, 1).double(), torch.zeros(1, 1, 1).double())
    assert known.quantile(1e-300).item() == pytest.approx(stats.norm.ppf(1e-300), rel=1e-12)
    f, y = torch.zeros(2).float(), torch.tensor([-6.0, -10.0]).float()
    for likelihood, wanted in ((likelihoods.gaussian(1.0), stats.norm), (likelihoods.student_t(1e4), stats.t(1e4))):
        torch.testing.assert_close(likelihood.cdf(f, y), torch.tensor(wanted.cdf(y)).float(), rtol=1e-5, atol=0.0)
    narrow = likelihoods.gaussian("learned").log_prob(torch.tensor([[0.0, -1000.0]]), torch.zeros(1, 1))
    assert narrow.item() == pytest.approx(500 - math.log(2 * math.pi) / 2)


@pytest.mark.parametrize("df", [1.2, 4.0, 1e9])
def test_the_score_of_student_t_is_its_closed_form(df):
    """That at known outputs (Jordan, Krueger and Lerch, 2019); its slope is ``2 F(y) - 1``; and at last it is a Gaussian's."""
    likelihood, y, t = likelihoods.student_t(df), torch.tensor([[0.0], [1.3], [-20.0]], requires_grad=True), stats.t(df)
    z, ratio = y.detach().numpy(), special.beta(0.5, df - 0.5) / special.beta(0.5, df / 2) ** 2
    wanted = z * (2 * t.cdf(z) - 1) + 2 * (t.pdf(z) * (df + z**2) - df**0.5 * ratio) / (df - 1)
    known, uncertain = (likelihood.predictive(torch.zeros(3, 1), torch.full((3, 1, 1), v)) for v in (0.0, 7.0))
    torch.testing.assert_close(known.crps(y).detach(), torch.as_tensor(wanted), rtol=1e-8, atol=0)
    slope = torch.autograd.grad(uncertain.crps(y).sum(), y)[0]
    torch.testing.assert_close(slope, 2 * uncertain.cdf(y.detach()) - 1, rtol=1e-8, atol=1e-10)
    if df == 1e9:
        limit = replace(uncertain, likelihood=likelihoods.gaussian(1.0))
        torch.testing.assert_close(uncertain.crps(y), limit.crps(y), rtol=1e-8, atol=0)


@pytest.mark.parametrize("likelihood", [likelihoods.student_t(1.0), likelihoods.gaussian("learned")])
def test_scores_are_numbers_where_the_variances_of_far_nodes_are_none(likelihood):
    """Those of a log variance with a deviation of 8, and of heavy tails, overflow in float32, and have no part in slopes."""
    mean = torch.zeros(1, 2, dtype=torch.float32, requires_grad=True)
    predictive, y = likelihood.predictive(mean, 64 * torch.eye(2, dtype=torch.float32)[None]), likelihood.mean(mean) + 1
    by_target, by_mean = torch.autograd.grad(predictive.crps(y).sum(), (y, mean))
    torch.testing.assert_close(by_target, 2 * predictive.cdf(y.detach()) - 1, rtol=1e-5, atol=0)
    assert by_mean.isfinite().all()


def test_scores_of_log_variances_far_apart_are_not_lost_in_the_largest():
    """Against a sum over 4,001 nodes in extended precision; of two draws it is a quarter of the larger one's score."""
    assert of_log_variance(20.0).crps(torch.ones(1, 1)).item() == pytest.approx(2686013325.408629, rel=1e-9)
    draws = likelihoods.gaussian("learned").mixture(
        torch.tensor([[[0.0, -800.0]], [[0.0, 800.0]]], dtype=torch.float64)
    )
    of_larger = math.exp(400) * (2**0.5 - 1) / math.pi**0.5
    assert draws.crps(torch.zeros(1, 1)).item() == pytest.approx(of_larger / 4, rel=1e-13)


def test_quantiles_need_no_mean_and_values_are_looked_for_in_the_supports_of_all_draws():
    """A mixture of two Cauchys, symmetric about its median; one of uniforms on (2, 4) and (-1, 1)."""
    cauchy = likelihoods.custom(distribution=lambda f: D.Cauchy(f, torch.ones_like(f)))
    found = cauchy.mixture(torch.tensor([[[0.0]], [[3.0]]], dtype=torch.float64)).quantile(0.5)
    torch.testing.assert_close(found, torch.tensor([[1.5]], dtype=torch.float64), rtol=1e-12, atol=0)
    mixed = likelihoods.custom(distribution=lambda f: D.Uniform(f, f + 2)).mixture(
        torch.tensor([2.0, -1.0])[:, None, None]
    )
    assert mixed.quantile(0.3).item() == pytest.approx(0.2, abs=1e-6)
    assert mixed.crps(torch.full((1, 1), 3.0)).item() == pytest.approx(5 / 6, abs=1e-5)
    at = torch.tensor([0.0, 3.0, 5.0])[:, None, None]
    assert mixed.log_prob(at[0]).exp().item() == mixed.log_prob(at[1]).exp().item() == pytest.approx(0.25)
    with pytest.raises(ValueError, match="1 of 1 targets that are not in the support"):
        mixed.log_prob(at[2])
    tails = likelihoods.custom(distribution=lambda f: D.Pareto(f, torch.ones_like(f))).mixture(at[1:])
    assert tails.log_prob(torch.full((1, 1), 4.0)).exp().item() == pytest.approx(3 / 32)


def test_a_transformed_distribution_says_its_support_itself():
    """Of a bare one torch takes all that its last transform reaches for it."""

    class Odds(D.TransformedDistribution):
        support = D.constraints.positive

    parts, at = lambda f: (D.Normal(f, torch.ones_like(f)), D.ExpTransform()), torch.full((1, 1), 2.0)
    odds, named = (
        likelihoods.custom(distribution=of) for of in (lambda f: Odds(*parts(f)), lambda f: D.LogNormal(f, 1))
    )
    for ask in (lambda p: p.log_prob(at), lambda p: p.cdf(at), lambda p: p.quantile(0.3)):
        torch.testing.assert_close(ask(odds.mixture(at[None])), ask(named.mixture(at[None])), rtol=0.0, atol=0.0)
    with pytest.raises(ValueError, match=r"torch's Odds has no mean: .*sample"):
        odds.mean(at)
    bare = likelihoods.custom(distribution=lambda f: D.TransformedDistribution(*parts(f)))
    for ask in (bare.nll, bare.log_prob, bare.cdf):
        with pytest.raises(ValueError, match="return a subclass that has a property support"):
            ask(at, at)


@pytest.mark.parametrize(("apart", "tolerance"), [(1.0, 1e-12), (10.0, 1e-12), (100.0, 1e-8), (1000.0, 1e-3)])
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


@pytest.mark.parametrize(
    ("size", "student", "counts"),  # by mpmath, with 40 digits
    [
        (3.0, -3.77347757186329095, -2.71934420772096895),
        (199.0, -5.34352030700717981, -2.78928029242587234),
        (201.0, -5.34424719766605525, -2.78930463469753229),
        (1e9, -5.41893851770467284, -2.79175946872805500),
    ],
)
def test_densities_have_all_their_digits_however_large_degrees_of_freedom_and_dispersion_are(size, student, counts):
    """Terms as large as ``size log(size)`` would cancel to 1e-6 at 1e9."""
    for likelihood, wanted in ((likelihoods.student_t(size), student), (likelihoods.negative_binomial(size), counts)):
        found = likelihood.log_prob(torch.zeros(1), torch.tensor([3.0])).item()
        assert found == pytest.approx(wanted, rel=0, abs=3e-14)


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


@pytest.mark.parametrize(("df", "wanted"), [(2.5, 5.0), (4.0, 2.0), (2.0, math.inf), (1.0, math.inf)])
def test_the_variance_of_student_t_is_finite_above_two_degrees_of_freedom(df, wanted):
    assert float(likelihoods.student_t(df, 0.5).variance(torch.zeros(1))) == pytest.approx(0.25 * wanted)


TABLES = {"fine_grid": (129,), "log_gamma": (2.0, 129), "sobol_normals": (4, 8)}


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
    "loss": likelihoods.custom(lambda f, y: (f - y).square().sum(-1)),
    "weighted": likelihoods.weighted(likelihoods.gaussian(torch.tensor([0.5, 1.0, 2.0]))),
}


@pytest.mark.parametrize("name", [*ONE_OUTPUT, *CUSTOM])
def test_draws_of_gaussian_outputs_answer_as_their_gaussian_does(name):
    """Of nodes with weights, which are what the likelihood integrates over: mean, density and distribution function agree.

    A closed form (Gaussian noise) is that of infinitely many nodes; its nodes here are 129 points.
    """
    likelihood = (ONE_OUTPUT | CUSTOM)[name]
    mean, covariance = torch.tensor([[0.3, -1.0, 0.5]]), torch.diag_embed(torch.tensor([[0.4, 0.2, 0.1]]))
    own = likelihood.predictive(mean, covariance)
    nodes = likelihoods.Likelihood.mixed(likelihood, likelihoods.Outputs(mean, covariance))
    drawn = likelihood.mixture(nodes.outputs, nodes.log_weights)
    draw = likelihood.draw if name != "loss" else lambda f, g: f + 1
    y = draw(mean, torch.Generator().manual_seed(3))
    targets = (y, torch.full_like(y, 0.5)) if name == "weighted" else y
    torch.testing.assert_close(drawn.log_prob(targets), own.log_prob(targets), rtol=1e-7, atol=1e-9)
    if name != "loss":
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
    got = predictive.mean, predictive.log_prob(y), predictive.epistemic
    torch.testing.assert_close(got, whole, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(whole[2], predictive.entropy - predictive.aleatoric, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "likelihood",
    [likelihoods.student_t(1.5), likelihoods.gaussian(1e6), likelihoods.negative_binomial(1e-3)],
)
def test_what_more_data_could_remove_is_the_variance_of_the_means_beside_any_noise(likelihood):
    """Noise may be infinite, or so large that the sum of both says nothing of the smaller one."""
    outputs = 1e-4 * torch.randn(5, 2, 1, dtype=torch.float32)
    wanted = likelihood.mean(outputs.double()).var(0, correction=0)
    drawn = likelihood.mixture(outputs)
    torch.testing.assert_close(drawn.epistemic.double(), wanted, rtol=1e-2, atol=0)
    variance = torch.full((2, 1), 1e-8, dtype=torch.float32)
    known = likelihood.predictive(torch.zeros(2, 1, dtype=torch.float32), variance)
    torch.testing.assert_close(known.variance, known.aleatoric + known.epistemic)
    slope = torch.func.jacfwd(lambda f: likelihood.mean(f)[0])(torch.zeros(1, 1))[..., 0, 0]
    torch.testing.assert_close(known.epistemic[0].double(), 1e-8 * slope.square(), rtol=1e-2, atol=0)


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
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-6)
    with pytest.raises(ValueError, match="added up"):
        pooled.covariance()


def test_outputs_that_are_no_classes_are_stacked():
    pooled = likelihoods.gaussian().pooled(iter(torch.randn(5, 3, 1)))
    assert pooled.outputs.shape == (5, 3, 1) and pooled.mean_entropy is None
    for likelihood in (likelihoods.gaussian(), likelihoods.categorical()):
        with pytest.raises(ValueError, match="at least one draw"):
            likelihood.pooled([])


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


# Roots of expected Hessians, draws, losses and weights of every likelihood; what none can be is refused


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
    root, rows = likelihood.root(outputs, targets), factors.reshape(-1, outputs.shape[-1])
    assert not event or torch.allclose(root.gram(), rows.mT @ rows)
    gradient = torch.func.grad(lambda f: likelihood.nll(f, targets).sum())(outputs)
    assert torch.allclose(likelihood.gradient(outputs, targets), gradient, atol=1e-14)


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


@pytest.mark.filterwarnings("error")
def test_probabilities_in_the_place_of_logits_are_noticed():
    targets, logits = torch.tensor([0, 1, 2]), torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match="probabilities.*leave the softmax out"):
        likelihoods.categorical().require(logits.softmax(-1), targets, wait=True)
    for outputs in (logits, logits.log_softmax(-1), torch.zeros(3, 4)):
        likelihoods.categorical().require(outputs, targets, wait=True)


F = torch.tensor([-1.5, 0.3, 1.2], dtype=torch.float64)
MU, P = F.exp().numpy(), F.sigmoid().numpy()
COUNTS = torch.tensor([-1.0, 0.0, 0.5, 1.0, 4.0, 9.0], dtype=torch.float64)
REALS = torch.tensor([-3.0, -0.2, 0.0, 1.7], dtype=torch.float64)
CASES = {
    "poisson": (likelihoods.poisson(), stats.poisson(MU), COUNTS),
    "negative_binomial": (likelihoods.negative_binomial(0.37), stats.nbinom(0.37, 0.37 / (0.37 + MU)), COUNTS),
    "geometric": (likelihoods.negative_binomial(1.0), stats.nbinom(1.0, 1 / (1 + MU)), COUNTS),
    "bernoulli": (likelihoods.bernoulli(), stats.bernoulli(P), COUNTS[:4]),
    "gaussian": (likelihoods.gaussian(0.7), stats.norm(F.numpy(), 0.7**0.5), REALS),
    "student_t": (likelihoods.student_t(2.3, 0.7), stats.t(2.3, F.numpy(), 0.7), REALS),  # no numbers of float32
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
        if name in ("gaussian", "student_t", "gumbel"):
            close(likelihood.nll(outputs, y), -wanted.logpdf(float(value)))
        elif value >= 0 and value == value.floor() and not (name == "bernoulli" and value > 1):
            close(likelihood.nll(outputs, y), -wanted.logpmf(float(value)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_a_sure_prediction_leaves_has_all_its_digits(dtype):
    """Yes-or-no targets, and the same as two classes in order, at outputs of 30 and -30 where they are right."""
    f, yes, ordered = torch.tensor([[30.0], [-30.0]], dtype=dtype), likelihoods.bernoulli(), likelihoods.ordinal([0.0])
    right = (f > 0).to(dtype)
    for found in (
        yes.nll(f, right)[:, None],
        yes.gradient(f, right).abs(),
        ordered.information(f),
        ordered.mean(f).amin(-1),
    ):
        torch.testing.assert_close(found, torch.full_like(f, math.exp(-30.0)))


@pytest.mark.parametrize("name", [*ONE_OUTPUT, "learned"])
def test_variances_of_independent_outputs_are_a_diagonal_covariance(name):
    likelihood, mean, variance = (
        ONE_OUTPUT.get(name, likelihoods.gaussian("learned")),
        torch.randn(3, 4),
        torch.rand(3, 4),
    )
    found, wanted = (likelihood.predictive(mean, c).variance for c in (variance, torch.diag_embed(variance)))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(("spread", "dtype", "tolerance"), [(1e-4, torch.float64, 1e-9), (0.0, torch.float32, 1e-5)])
def test_a_log_variance_that_is_hardly_known_is_integrated_over(spread, dtype, tolerance):
    """With a deviation of 20, against 10^5 points; in float32 e^r overflows at the last nodes and vanishes at the first."""
    z, m, y = torch.linspace(-10, 10, 100_001), torch.zeros((), requires_grad=True), torch.tensor([[0.5]], dtype=dtype)
    each = torch.distributions.Normal(m, (spread + (20 * z - 2).exp()).sqrt()).log_prob(torch.tensor(0.5))
    wanted = (each - z.square() / 2).logsumexp(0) - (-z.square() / 2).logsumexp(0)
    mean = torch.tensor([[0.0, -2.0]], dtype=dtype, requires_grad=True)
    covariance = torch.tensor([[spread, 400.0]], dtype=dtype)
    found = likelihoods.gaussian("learned").predictive(mean, covariance).log_prob(y).squeeze()
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=0.0)
    slope, of_mean = (torch.autograd.grad(x, start)[0].flatten() for x, start in ((found, mean), (wanted, m)))
    torch.testing.assert_close(slope[:1].double(), of_mean, rtol=tolerance, atol=0.0)
    assert slope.isfinite().all()


@pytest.mark.parametrize(
    ("likelihood", "mean", "deviation", "y", "wanted"),
    [
        (likelihoods.student_t(30.0, 0.01), 0.0, 10.0, 7.0, stats.norm.logpdf(7.0, 0.0, (100 + 1e-4 * 30 / 28) ** 0.5)),
        (likelihoods.student_t(4.0), 0.0, 1e4, 1e3, stats.norm.logpdf(1e3, 0.0, 1e4)),
        (likelihoods.student_t(4.0), 0.0, 1e10, 1e25, -285.338229975),  # by mpmath, of the noise's tail alone
        (
            likelihoods.custom(distribution=lambda f: torch.distributions.Normal(f, torch.full_like(f, 1e-3))),
            *(0.0, 1.0, 0.503, stats.norm.logpdf(0.503, 0.0, (1 + 1e-6) ** 0.5)),
        ),
        (likelihoods.bernoulli(), 300.0, 1e3, 0.0, stats.norm.logcdf(-0.3)),
        (likelihoods.ordinal([-1.0, 1.0]), 3e3, 1e4, 1.0, stats.norm.logpdf(0.0, 3e3, 1e4) + math.log(2)),
        (likelihoods.poisson(), math.log(1e8), 1.0, 1e8, stats.lognorm.logpdf(1e8, 1.0, scale=1e8)),
        (likelihoods.poisson(), 0.0, 0.5, 1000.0, -102.17207347338),  # on 400,001 points about the logarithm of 1,000
    ],
)
def test_noise_far_narrower_than_the_outputs_and_targets_far_from_all_of_them_are_not_missed(
    likelihood, mean, deviation, y, wanted
):
    """In a batch with outputs that are hardly spread too: limits of wide outputs, in which noise adds its variance at most."""
    variances = torch.tensor([[[1e-6]], [[deviation**2]]])
    found = likelihood.predictive(torch.full((2, 1), mean), variances).log_prob(torch.full((2, 1), y))
    assert found[1].item() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("df", "variance", "y", "wanted"),
    [
        (1.0, 10.0, 33.166247903553995, -8.120570451425504),
        (4.0, 0.1, 1.0488088481701516, -1.5694930893318038),
        (20.0, 1e8, 10000000.05, -307.9560222379939),
        (50.0, 1e4, 3000.1499962501875, -307.92605460024413),
        (1e9, 1.0, 5.656854249492381, -9.265512105797146),
    ],
)
def test_densities_of_student_t_are_right_to_the_last_digits_however_far_targets_are(df, variance, y, wanted):
    """In extended precision on 60,001 points: where the Gaussian of the outputs makes the density, and where heavy tails do."""
    predictive = likelihoods.student_t(df).predictive(torch.zeros(1, 1), torch.tensor([[variance]]))
    assert predictive.log_prob(torch.tensor([[y]])).item() == pytest.approx(wanted, rel=1e-14)


@pytest.mark.parametrize("mean", [2.7, 1e4, 1e6, 1e8])
def test_log_densities_of_large_counts_in_single_precision_are_scipys(mean):
    """They are differences of terms as large as y log y, of a dispersion of 10^6 also where counts are small."""
    f, y = torch.tensor([[mean]]).log().float(), torch.tensor([[float(round(mean + mean**0.5))]])
    mu, count = f.double().exp().item(), y.item()
    poisson, binomial = (
        x.nll(f, y.float()).item() for x in (likelihoods.poisson(), likelihoods.negative_binomial(1e6))
    )
    assert poisson == pytest.approx(-stats.poisson(mu).logpmf(count), abs=1e-5)
    assert binomial == pytest.approx(-stats.nbinom(1e6, 1 / (1 + mu / 1e6)).logpmf(count), abs=1e-5)


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


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("level", [1e-9, 1e-4, 1 - 1e-9])
def test_quantiles_in_single_precision_are_those_in_double_out_to_the_tails(name, level):
    outputs = torch.tensor([[[-1.5], [0.25], [1.25]]])
    single, double = (CASES[name][0].mixture(outputs.to(t)).quantile(level) for t in (torch.float32, torch.float64))
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=1e-5)


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
    factor = likelihood.gradient(outputs, labels)
    assert not factor[:, 4:].any()
    torch.testing.assert_close(factor[:, :4], likelihood.gradient(outputs[:, :4], labels[:, :4]))
    nothing = torch.full_like(labels, -100)
    fisher = bc.curvature.fisher(forward, likelihood, "diagonal", generator=torch.Generator().manual_seed(0))
    assert all(not leaf.any() for leaf in fisher(params, (ids, nothing)).diag().values())
    forward, params, _ = bc.make_functional(nn.Linear(2, 3))
    x, y = torch.randn(4, 2), torch.tensor([0, 2, -100, -100])
    for how in ("tangent", "empirical"):
        tx = bc.ekf.dense(prior_precision=1.0)
        ends = []
        for batch in ((x, y), (x[:2], y[:2])):
            observe = bc.ekf.observe(forward, likelihood, linearisation=how)
            updates, state = tx.update(params, tx.init(params), params=params, curvature=observe(params, batch))
            ends.append((updates, tx.posterior(state, params).precision.to_dense()))
        torch.testing.assert_close(ends[0], ends[1], rtol=1e-8, atol=1e-10)


def test_class_weights_are_those_of_torch():
    """Losses of ``cross_entropy``, and the Hessian of that loss by differentiation."""
    weight = torch.tensor([0.5, 2.0, 1.0])
    outputs, y = torch.randn(6, 3), torch.tensor([0, 1, 2, 1, -100, 0])
    for options in ({}, {"weight": weight}):
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


def of_log_variance(deviation):
    covariance = torch.tensor([[[1.0, 0.3 * deviation], [0.3 * deviation, deviation**2]]], dtype=torch.float64)
    return likelihoods.gaussian("learned").predictive(torch.zeros(1, 2, dtype=torch.float64), covariance)


NARROW = likelihoods.custom(distribution=lambda f: D.Laplace(f, torch.ones_like(f)))
ONE_EACH = "depends on the rest of the batch"


test_it_is_refused_by_name = refused(
    [
        (lambda: likelihoods.gaussian(0.0), "variance must be a positive number"),
        (lambda: likelihoods.gaussian("known"), "'learned'"),
        (lambda: likelihoods.gaussian("learned").factors(LOGITS, torch.zeros(2, 1)), "2 C"),
        (lambda: likelihoods.gaussian().nll(torch.zeros(2, 1), torch.zeros(2)), r"targets \(2,\)"),
        (lambda: custom(squares).draw(torch.zeros(1, 1), None), r"no draws of labels.*custom\(distribution"),
        (
            lambda: custom(squares, output_hessian=lambda f, y: torch.eye(1)).factors(*torch.zeros(2, 2, 1)),
            "B, E, E",
        ),
        (
            lambda: custom(lambda f, y: -squares(f, y)).factors(*torch.zeros(2, 2, 1)),
            r"not positive semidefinite.*output_hessian",
        ),
        (lambda: custom(mixing).factors(torch.eye(3), torch.zeros(3, 3)), ONE_EACH),
        (lambda: custom(mixing).gradient(torch.eye(3), torch.zeros(3, 3)), ONE_EACH),
        (lambda: custom(averaged).gradient(torch.eye(3), torch.zeros(3, 3)), "one loss a datum"),
        (
            lambda: CLASSES.nll(LOGITS, torch.tensor([0, -1])),
            r"class numbers from 0 to 2 .or ignore_index=-100., such as -1",
        ),
        (
            lambda: CLASSES.nll(LOGITS, torch.tensor([0, 3])),
            r"from 0 to 2 .or ignore_index=-100., such as 3",
        ),
        (lambda: CLASSES.nll(LOGITS, torch.tensor([0.0, 1.0])), "class numbers, a tensor of int64"),
        (
            lambda: CLASSES.require(LOGITS, torch.eye(3).long()[:2]),
            r"reshape the targets .*argmax\(-1\) of one-hot rows",
        ),
        (
            lambda: CLASSES.nll(LOGITS, torch.tensor([0, 3], dtype=torch.uint16)),
            r"from 0 to 2 .or ignore_index=-100., such as 3",
        ),
        (lambda: CLASSES.nll(torch.zeros(2, 1), torch.tensor([0, 0])), r"at least two classes.*bernoulli"),
        (lambda: CLASSES.nll(torch.zeros(0, 3), torch.zeros(0).long()), "the batch is empty"),
        (lambda: likelihoods.categorical(weight=[1.0, 2.0]).nll(LOGITS, Y), "weight has 2 entries"),
        (
            lambda: likelihoods.weighted(CLASSES).nll(LOGITS, Y),
            r"not a pair: pass batches .inputs, .targets, weights.",
        ),
        (
            lambda: likelihoods.weighted(CLASSES).nll(LOGITS, (Y, torch.tensor([1.0, -1.0]))),
            "finite and not negative",
        ),
        (lambda: of_classes().quantile(0.5), "have no order"),
        (
            lambda: CLASSES.predictive(torch.zeros(2, 3), torch.ones(2, 2, 2)),
            r"shape \(2, 2, 2\), for a mean \(2, 3\) pass one of \(2, 3, 3\), \(6, 6\) or \(2, 3\)",
        ),
        (lambda: likelihoods.gaussian().predictive(*torch.tensor([[[1.0]], [[-2.0]]])), r"variance is negative \(-2\)"),
        (lambda: of_classes().crps(torch.tensor([0])), "have no order"),
        (lambda: of_gaussian().quantile(1.0), r"level must be a number in \(0, 1\)"),
        (
            lambda: likelihoods.gaussian(torch.ones(2)).nll(*torch.zeros(2, 2)),
            r"variance of shape \(2,\) is not one number",
        ),
        (
            lambda: likelihoods.gaussian(torch.ones(2, 1)).nll(*torch.zeros(2, 2, 3)),
            r"for each output of a datum.*\(3,\)",
        ),
        (
            lambda: likelihoods.student_t(4.0, torch.ones(2)).root(*torch.zeros(2, 2)),
            r"scale of shape \(2,\) is not one",
        ),
        (lambda: CLASSES.mixture(torch.zeros(2, 1, 3), torch.tensor([math.nan, 0.0])), "log_weights are NaN"),
        (lambda: likelihoods.weighted(CLASSES).nll(LOGITS, ([0, 1], [1.0, 1.0])), "not a pair"),
        (lambda: CLASSES.mixture(torch.zeros(3, 4)), r"outputs \[B, \]: return the logits of at least two classes"),
        (lambda: CLASSES.mixture(torch.zeros(3, 4, 1)), "at least two classes.*bernoulli"),
        (lambda: CLASSES.pooled([torch.zeros(4)]), "at least two classes"),
        (lambda: CLASSES.pooled([LOGITS, LOGITS[:1]]), r"outputs of one shape, got .*\(1, 3\)"),
        (lambda: likelihoods.gaussian().pooled([torch.zeros(2), torch.zeros(3)]), "outputs of one shape"),
        (lambda: likelihoods.gaussian("learned").mixture(torch.zeros(2, 4, 3)), "2 C"),
        (lambda: CLASSES.predictive(torch.zeros(4), torch.ones(4, 1)), "at least two classes"),
        (lambda: likelihoods.negative_binomial(1e12), r"dispersion must be a number in \(0, 1e9\].*poisson"),
        (
            lambda: NARROW.predictive(*torch.tensor([[[0.0]], [[1e12]]])).log_prob(torch.zeros(1, 1)),
            r"custom likelihood is too narrow for these outputs, of standard deviations of up to 1e\+06",
        ),
        (lambda: of_log_variance(60.0).crps(torch.ones(1, 1)), "crps: 4097 points do not integrate.*log_prob"),
        (lambda: likelihoods.student_t(1e12), r"df must be a number in \[1, 1e9\].*gaussian"),
        (lambda: likelihoods.student_t(0.9), r"df must be a number in \[1, 1e9\].*below 1"),
    ]
)


@pytest.mark.parametrize(
    ("likelihood", "sure"),
    [
        (likelihoods.bernoulli(), 40.0),
        (likelihoods.ordinal([-1.0, 2.0, 30.0]), -41.4),
        (likelihoods.custom(distribution=lambda f: D.Bernoulli(logits=f)), 41.0),
    ],
)
def test_probabilities_of_nearly_1_are_no_rule_of_too_few_points(likelihood, sure):
    predictive = likelihood.predictive(torch.full((1, 1), sure).double(), torch.full((1, 1, 1), 0.13).double())
    assert max(float(x.abs().max()) for x in (predictive.aleatoric, predictive.epistemic)) < 1e-13


@pytest.mark.parametrize(
    "likelihood", [likelihoods.gaussian(), likelihoods.student_t(), likelihoods.gaussian("learned")]
)
def test_yes_and_no_are_no_numbers_of_a_real_line(likelihood):
    outputs, y = torch.zeros(2, 2 if "learned" in likelihood.name else 1), torch.tensor([[True], [False]])
    for ask in (likelihood.nll, likelihood.root, lambda f, y: likelihood.mixture(f[None]).log_prob(y)):
        with pytest.raises(TypeError, match=r"torch\.bool: .*bernoulli"):
            ask(outputs, y)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int16, torch.int32])
def test_classes_may_be_whole_numbers_of_any_kind(dtype):
    """Unsigned ones are compared with -100 modulo 256, as which class 156 was left out."""
    outputs, y = torch.randn(3, 200), torch.tensor([156, 3, 199])
    given = y.to(dtype)
    torch.testing.assert_close(CLASSES.nll(outputs, given), CLASSES.nll(outputs, y))
    pair = [(x, torch.tensor([1.0, 0.0, 2.0])) for x in (given, y)]
    torch.testing.assert_close(*(likelihoods.weighted(CLASSES).nll(outputs, x) for x in pair))
    torch.testing.assert_close(*(CLASSES.mixture(outputs[None]).log_prob(x) for x in (given, y)))


@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "poisson", "student_t", "negative_binomial"])
@pytest.mark.parametrize("outputs, targets", [((5, 1), (5,)), ((5,), (5, 1)), ((3, 5, 1), (5,))])
def test_a_density_of_targets_is_never_that_of_other_data(name, outputs, targets):
    likelihood = getattr(bc.likelihoods, name)()
    with pytest.raises(ValueError, match=r"log_prob: targets .* would be compared with outputs .* reshape the targets"):
        likelihood.log_prob(torch.zeros(outputs), torch.ones(targets))
    assert likelihood.log_prob(torch.zeros(3, *targets), torch.ones(targets)).shape == (3, *targets)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@one_output
def test_outputs_in_half_precision_are_drawn_from_and_predicted_from(name, dtype):
    """The predictive is that of the same outputs in single precision; torch has neither gamma variables nor roots in half."""
    likelihood, f, s = ONE_OUTPUT[name], MEAN.to(dtype), COVARIANCE.to(dtype)
    if name != "gamma":
        assert likelihood.draw(f, torch.Generator().manual_seed(0)).isfinite().all()
    half, single = (likelihood.predictive(*x) for x in ((f, s), (f.float(), s.float())))
    y = likelihood.draw(f.float(), torch.Generator().manual_seed(0))
    for ask in ("mean", "variance", lambda p: p.quantile(0.4), lambda p: p.crps(y), lambda p: p.log_prob(y)):
        of = [getattr(p, ask) if isinstance(ask, str) else ask(p) for p in (half, single)]
        torch.testing.assert_close(*of, rtol=0, atol=0)
    assert half.outputs.draw(3).dtype == torch.float32


@one_output
def test_outputs_without_further_axes_have_every_answer_and_no_data_are_predicted(name):
    likelihood, y = ONE_OUTPUT[name], ONE_OUTPUT[name].draw(MEAN, torch.Generator().manual_seed(3))
    columns = likelihood.predictive(MEAN, COVARIANCE)
    for n in (2, 0):
        flat = likelihood.predictive(MEAN[:n, 0], COVARIANCE[:n])
        scored = (lambda p, y: p.crps(y), lambda p, y: p.log_prob(y)) if n else ()
        for ask in (lambda p, y: p.mean, lambda p, y: p.quantile(0.4), lambda p, y: p.cdf(y), *scored):
            found = ask(flat, y[:n, 0])
            torch.testing.assert_close(found, ask(columns, y)[:n].reshape(found.shape))


def test_rates_whose_squares_overflow_have_a_variance_and_yes_or_no_a_slope_as_counts():
    poisson, large = likelihoods.poisson(), torch.full((1, 1), 60.0, dtype=torch.float32)
    assert poisson.variance(large).item() == poisson.mean(large).item() < math.inf
    predictive = poisson.predictive(large, torch.full((1, 1, 1), 9.0, dtype=torch.float32))
    assert predictive.aleatoric.item() == predictive.mean.item() < math.inf
    f, y = torch.zeros(2), torch.tensor([True, False])
    torch.testing.assert_close(poisson.gradient(f, y), poisson.gradient(f, y.double()))


def test_weights_may_be_a_list():
    f, y = torch.zeros(3, 1), torch.ones(3, 1)
    likelihood = likelihoods.weighted(likelihoods.gaussian())
    torch.testing.assert_close(likelihood.nll(f, (y, [1, 2, 0])), likelihood.nll(f, (y, torch.tensor([1.0, 2.0, 0.0]))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [10.0, 1e5, 1e9])
def test_distribution_functions_are_scipys_however_large_dispersion_and_degrees_of_freedom_are(size, dtype):
    """Of rates in single precision one that is small beside the dispersion was lost: 0.6 off at 1e9; far tails were NaN."""
    tolerance = 2e-6 if dtype == torch.float32 else 1e-7 if size > 1e6 else 1e-9  # scipy's own error at 1e9
    for mu in (1.0, 1e3, 1e5):
        f, counts = (
            torch.full((6,), mu).log().to(dtype),
            (mu * torch.tensor([0.0, 0.1, 0.9, 1.0, 1.1, 2.0])).floor().to(dtype),
        )
        known = stats.nbinom.cdf(counts.numpy(), size, size / (size + f.double().exp().numpy()))
        found = likelihoods.negative_binomial(size).cdf(f, counts)
        torch.testing.assert_close(found, torch.as_tensor(known, dtype=dtype), rtol=0, atol=tolerance)
    t = torch.tensor([-8.0, -1.0, 0.01, 1.0, 3.0], dtype=dtype)
    known = torch.as_tensor(stats.t.cdf(t.numpy(), size), dtype=dtype)
    torch.testing.assert_close(likelihoods.student_t(size).cdf(torch.zeros_like(t), t), known, rtol=0, atol=tolerance)


def test_quantiles_beyond_every_number_are_infinite_and_those_of_nan_are_nan():
    wide, f = likelihoods.student_t(1.0, 1e38), torch.zeros(2, 3, dtype=torch.float32)
    for level, wanted in ((0.01, -math.inf), (0.5, 0.0), (0.99, math.inf)):
        found = wide.mixture(f).quantile(level) / 1e38
        torch.testing.assert_close(found, torch.full((3,), wanted, dtype=torch.float32), rtol=0, atol=1e-7)
    poisson = likelihoods.poisson()
    assert (
        poisson.mixture(f + math.nan).quantile(0.5).isnan().all()
        and poisson.mixture(f + 1000).quantile(0.5).isinf().all()
    )


def test_intervals_of_draws_in_single_precision_are_symmetric_far_out():
    low, high = likelihoods.gaussian().mixture(torch.zeros(3, 2, dtype=torch.float32)).interval(1 - 1e-7)
    torch.testing.assert_close(high, torch.full_like(high, stats.norm.isf(5e-8)), rtol=1e-5, atol=0)
    torch.testing.assert_close(low, -high, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "make", [torch.distributions.LogNormal, torch.distributions.Gamma], ids=["log-normal", "gamma"]
)
def test_targets_that_are_missing_need_not_be_zeros_of_the_support(make):
    """Zero has no density of the one, and an infinite loss of the other, which made NaN of the weight 0."""
    likelihood = likelihoods.custom(distribution=lambda f: make(f.exp(), torch.ones_like(f)))
    weighted, f = likelihoods.weighted(likelihood), torch.tensor([[0.1], [0.2], [0.3]])
    y, weights = torch.tensor([[math.nan], [0.5], [0.25]]), torch.tensor([0.0, 1.0, 2.0])
    for ask in (likelihood.nll, likelihood.gradient):
        wanted = ask(f[1:], y[1:])
        found = getattr(weighted, ask.__name__)(f, (y, weights))
        of_two = weights[1:].reshape(-1, *[1] * (wanted.ndim - 1))
        torch.testing.assert_close(found, torch.cat([torch.zeros_like(found[:1]), wanted * of_two]))
    each = torch.vmap(lambda *x: weighted.nll(x[0], x[1:]))(f[1:, None], y[1:, None], weights[1:, None])
    torch.testing.assert_close(each[:, 0], weighted.nll(f, (y, weights))[1:])
    p, pair = weighted.predictive(f, torch.ones(3, 1)), (y, weights)
    torch.testing.assert_close(p.log_prob(pair)[0], torch.zeros(1))
    assert p.log_prob(pair).isfinite().all() and p.crps(pair).isfinite().all()
