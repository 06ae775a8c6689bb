"""The dispersion against closed forms, against the noise that data were made with, and against what heat costs draws."""

import math

import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain.likelihoods._quadrature import fine_grid
from bayesopt_chain.posterior.rule import effective_parameters


def network(inputs, outputs):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, outputs)).double().eval()


def jacobian(module, x):
    """Of all outputs in all parameters, ``[N C, P]``."""
    params = {name: p.detach() for name, p in module.named_parameters()}
    rows = torch.func.jacrev(lambda p: torch.func.functional_call(module, p, (x,)))(params)
    return torch.cat([r.reshape(x.shape[0] * r.shape[1], -1) for r in rows.values()], 1)


@pytest.mark.parametrize("structure", ["dense", "root", "kronecker", "diagonal", "low_rank"])
def test_a_regression_has_its_residual_sum_of_squares_over_the_degrees_of_freedom(structure):
    x, y = torch.randn(30, 2).double(), torch.randn(30, 3).double()
    module, variance, prior = network(2, 3), 0.7, 1.3
    options = {"rank": 40} if structure == "low_rank" else {}
    fitted = bc.fit_laplace(
        module,
        bc.likelihoods.gaussian(variance),
        [(x[:20], y[:20]), (x[20:], y[20:])],
        structure=structure,
        subset="all",
        tune=None,
        prior_precision=prior,
        **options,
    )
    covariance = fitted.posterior.marginal_variance
    gamma = float(effective_parameters(fitted.posterior, fitted.prior_precision))
    count = sum(p.numel() for p in module.parameters())
    assert gamma == pytest.approx(count - prior * sum(float(v.sum()) for v in covariance.values()))
    if structure in ("dense", "root"):  # the others leave something out of the curvature
        values = torch.linalg.svdvals(jacobian(module, x)) ** 2 / variance
        assert gamma == pytest.approx(float((values / (values + prior)).sum()), rel=1e-8)
    squares = float((module(x) - y).square().sum())
    phi = fitted.dispersion([(x, y)])
    assert phi == pytest.approx(squares / variance / (90 - gamma), rel=1e-10)
    assert fitted.dispersion([(x[:7], y[:7]), (x[7:], y[7:])]) == pytest.approx(phi, rel=1e-12)


def test_the_temperature_of_the_posterior_changes_no_dispersion():
    """Its covariance is that many times larger, and the data determine as many parameters as before."""
    x, y = torch.randn(30, 2).double(), torch.randn(30, 1).double()
    phi = []
    for temperature in (None, 1 / 30, 0.25 / 30, 2.0 / 30):  # 1 / N is the posterior itself
        fitted = bc.fit_laplace(
            network(2, 1),
            bc.likelihoods.gaussian(0.7),
            [(x, y)],
            structure="dense",
            subset="all",
            tune=None,
            prior_precision=1.3,
            temperature=temperature,
        )
        phi.append(fitted.dispersion([(x, y)]))
    assert phi[1:] == pytest.approx(phi[:1] * 3, rel=1e-9)


def test_of_classes_it_is_the_distance_from_the_probabilities():
    x, y = torch.randn(40, 2).double(), torch.randint(3, (40,))
    module = network(2, 3)
    fitted = bc.fit_laplace(
        module, bc.likelihoods.categorical(), [(x, y)], structure="dense", subset="all", tune=None, prior_precision=2.0
    )
    p = module(x).softmax(1).detach()
    ratio = float((p - nn.functional.one_hot(y, 3)).square().sum() / (1 - p.square().sum(1)).sum())
    gamma = float(effective_parameters(fitted.posterior, fitted.prior_precision))
    assert fitted.dispersion([(x, y)]) == pytest.approx(ratio * 80 / (80 - gamma), rel=1e-10)


def test_a_target_that_is_left_out_counts_for_nothing_and_a_weight_of_two_as_two():
    x, y = torch.randn(12, 2).double(), torch.randint(3, (12,))
    module, told = network(2, 3), {"structure": "dense", "subset": "all", "tune": None, "prior_precision": 2.0}
    left_out = torch.cat([y, torch.full((5,), -100)])
    more = torch.cat([x, torch.randn(5, 2).double()])
    classes = bc.likelihoods.categorical()
    plain = bc.fit_laplace(module, classes, [(x, y)], **told).dispersion([(x, y)])
    data = [(more, left_out)]
    assert bc.fit_laplace(module, classes, data, **told).dispersion(data) == pytest.approx(plain, rel=1e-10)

    module, target = network(2, 1), torch.randn(12, 1).double()
    weighted = bc.likelihoods.weighted(bc.likelihoods.gaussian(0.5))
    weights = torch.ones(12, 1).double()
    weights[:4] = 2
    data = [(x, (target, weights))]
    twice = [(torch.cat([x, x[:4]]), torch.cat([target, target[:4]]))]
    expected = bc.fit_laplace(module, bc.likelihoods.gaussian(0.5), twice, **told).dispersion(twice)
    assert bc.fit_laplace(module, weighted, data, **told).dispersion(data) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("cleaner", [1.0, 0.25])
def test_it_is_the_noise_that_the_data_were_made_with(cleaner):
    """Labels drawn from the model, and labels of which three of four are the likeliest class: over 20 seeds the mean of phi is
    within 4 of its standard errors of the truth (false alarms: 1 in 1,300)."""
    found, truth = [], []
    for seed in range(20):
        torch.manual_seed(seed)
        x, module = torch.randn(400, 2).double(), nn.Linear(2, 2).double().eval()
        p = module(x).softmax(1).detach()
        y = torch.multinomial(p, 1)[:, 0]
        y = torch.where(torch.rand(400) < cleaner, y, p.argmax(1))
        q = cleaner * p + (1 - cleaner) * nn.functional.one_hot(p.argmax(1), 2)
        truth.append(
            float((q * (1 - p).square()).sum() + ((1 - q) * p.square()).sum()) / float((1 - p.square().sum(1)).sum())
        )
        fitted = bc.fit_laplace(
            module, bc.likelihoods.categorical(), [(x, y)], structure="dense", tune=None, prior_precision=1e6
        )
        found.append(fitted.dispersion([(x, y)]))
    difference = torch.tensor(found) - torch.tensor(truth)
    assert abs(difference.mean()) < 4 * difference.std() / math.sqrt(20)
    assert cleaner == 1.0 or sum(found) / 20 < 0.7


@pytest.mark.parametrize("likelihood", ["gaussian", "categorical", "poisson"])
def test_heat_changes_the_log_score_by_the_first_order_that_the_module_says(likelihood):
    """The derivative by the temperature of the log of the averaged density, from a quadrature, in float64."""
    made = {
        "gaussian": bc.likelihoods.gaussian(0.5),
        "categorical": bc.likelihoods.categorical(),
        "poisson": bc.likelihoods.poisson(),
    }
    it, width = made[likelihood], 2 if likelihood == "categorical" else 1
    f = torch.randn(6, width).double()
    y = torch.randint(2, (6,)) if width == 2 else torch.randint(3, (6, 1)).double()
    along = torch.randn(6, width).double()  # S = along along^T: draws lie on a line
    z, w = (v.double() for v in fine_grid())

    def gain(t):
        lines = f + t**0.5 * z[:, None, None] * along
        each = torch.stack([-it.nll(line, y) for line in lines])
        return (each + w.log()[:, None]).logsumexp(0) + it.nll(f, y)

    slope = gain(1e-4) / 1e-4
    g = it.gradient(f, y)
    hessian = torch.stack([torch.func.hessian(lambda o, i=i: it.nll(o[None], y[i : i + 1])[0])(f[i]) for i in range(6)])
    expected = ((g * along).sum(1).square() - torch.einsum("ni,nij,nj->n", along, hessian, along)) / 2
    torch.testing.assert_close(slope, expected, rtol=5e-3, atol=5e-4)


def test_what_it_cannot_tell_is_refused():
    x = torch.randn(5, 2).double()
    module = network(2, 1)
    data = [(x, torch.randn(5, 1).double())]
    fitted = bc.fit_laplace(
        module, bc.likelihoods.gaussian(0.5), data, structure="dense", subset="all", tune=None, prior_precision=1e-9
    )
    with pytest.raises(ValueError, match=r"dispersion: the fit determines 5 parameters by 5 entries"):
        fitted.dispersion(data)
    with pytest.raises(ValueError, match="no batches"):
        fitted.dispersion([])
    with pytest.raises((ValueError, TypeError), match="targets"):
        fitted.dispersion(x)
    labels = torch.zeros(5, dtype=torch.long)
    fitted = bc.fit_laplace(network(2, 2), bc.likelihoods.categorical(), [(x, labels)], structure="dense", tune=None)
    fitted.posterior.mean["2.bias"].copy_(torch.tensor([1e4, -1e4]))
    with pytest.raises(ValueError, match="certain of every one"):
        fitted.dispersion([(x, labels)])
