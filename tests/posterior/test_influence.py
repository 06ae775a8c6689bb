"""Influence and leave-one-out against fits without the datum, closed forms and retraining."""

import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain.posterior import influence_of_draws, leave_one_out

pytestmark = pytest.mark.usefixtures("double_precision")


def network(outputs):
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, outputs)).eval()


def without(n, *tensors):
    return [torch.cat([x[:n], x[n + 1 :]]) for x in tensors]


def test_ridge_regression_leaves_one_out_as_the_closed_form_does():
    """Mean, variance and density of each datum, and the change at others, to 1e-10 of a fit without the datum."""
    x, y, new = torch.randn(12, 3), torch.randn(12, 2), torch.randn(4, 3)
    module, noise = nn.Linear(3, 2).eval(), bc.likelihoods.gaussian(0.3)
    fitted = bc.fit_laplace(module, noise, [(x, y)], structure="dense", tune=None, prior_precision=0.7)
    alone = leave_one_out(fitted, [(x[:5], y[:5]), (x[5:], y[5:])])
    change = bc.influence(fitted, (x, y), new, of=lambda f, _: f[:, 1])
    phi, ridge = torch.cat([torch.ones(12, 1), x], 1), 0.3 * 0.7 * torch.eye(4)
    hat = phi @ torch.linalg.solve(phi.T @ phi + ridge, phi.T)
    h = hat.diagonal()[:, None]
    torch.testing.assert_close(alone.mean, (hat @ y - h * y) / (1 - h), rtol=0, atol=1e-10)
    torch.testing.assert_close(alone.variance, (0.3 / (1 - h)).expand(12, 2), rtol=0, atol=1e-10)
    for n in range(12):
        less = bc.fit_laplace(module, noise, [without(n, x, y)], structure="dense", tune=None, prior_precision=0.7)
        wanted = (less.outputs(new).mean - fitted.outputs(new).mean)[:, 1]
        torch.testing.assert_close(change[:, n], wanted, rtol=0, atol=1e-10)
        one = less.predictive(x[n : n + 1]).log_prob(y[n : n + 1])
        torch.testing.assert_close(alone.log_prob(y)[n], one[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("leverage", [True, False])
@pytest.mark.parametrize("structure", ["dense", "kronecker", "ekfac", "diagonal"])
def test_a_change_is_the_solve_with_the_precision_less_the_datums_own_part(structure, leverage):
    """Classes with a dispersion, all layers, an ignored label and batches: against matrices, for every structure."""
    x, y, new = torch.randn(9, 2), torch.randint(3, (9,)), torch.randn(4, 2)
    y[4] = -100
    module, likelihood = network(3), bc.likelihoods.categorical()
    told = {"subset": "all", "tune": None, "prior_precision": 2.0, "structure": structure.replace("ekfac", "kronecker")}
    fitted = bc.fit_laplace(module, likelihood, [(x, y)], **told)
    if structure == "ekfac":
        fitted = bc.fit_laplace(module, likelihood, [(x, y)], **told, basis=fitted.seen.precision)
    fitted = fitted.load_state_dict({**fitted.state_dict(), "likelihood_scale": torch.tensor(0.8)})
    forward, params, _ = bc.make_functional(module)

    def outputs(vector, at):
        return forward(bc.precision.unflatten(vector, params), (at, None))

    vector, precision = bc.precision.flatten(params, params), fitted.posterior.precision.to_dense()
    of = torch.autograd.functional.jacobian(lambda v: outputs(v, x), vector)
    f = outputs(vector, x)
    moves = []
    for n in range(9):
        p, kept = f[n].softmax(0), float(y[n] != -100)
        slope = kept * 0.8 * (p - nn.functional.one_hot(y[n].clamp_min(0), 3))
        own = kept * 0.8 * of[n].T @ (p.diag() - torch.outer(p, p)) @ of[n]
        moves.append(torch.linalg.solve(precision - own if leverage else precision, of[n].T @ slope))
    gradient = torch.autograd.functional.jacobian(lambda v: outputs(v, new).logsumexp(1), vector)
    found = bc.influence(
        fitted, [(x[:5], y[:5]), (x[5:], y[5:])], new, of=lambda f, _: f.logsumexp(1), leverage=leverage
    )
    torch.testing.assert_close(found, gradient @ torch.stack(moves, 1))
    assert not found[:, 4].any()


def test_the_default_scalar_is_the_loss_and_a_temperature_changes_nothing_but_the_covariance():
    x, y, module = torch.randn(20, 2), torch.randint(3, (20,)), network(3)
    fits = [
        bc.fit_laplace(module, bc.likelihoods.categorical(), [(x, y)], structure="dense", tune=None, temperature=t)
        for t in (None, 1 / 40)
    ]
    own = [bc.influence(fitted, (x, y), (x, y)) for fitted in fits]
    torch.testing.assert_close(own[0], own[1])
    assert bool((own[0].diagonal() > 0).all())  # a datum's own loss rises without it
    of = bc.influence(fits[0], (x, y), (x, y), of=lambda f, t: nn.functional.cross_entropy(f, t, reduction="none"))
    torch.testing.assert_close(of, own[0])
    alone = [leave_one_out(fitted, (x, y)) for fitted in fits]
    torch.testing.assert_close(alone[0].outputs.mean, alone[1].outputs.mean)
    torch.testing.assert_close(alone[0].outputs.covariance, 2 * alone[1].outputs.covariance)


def test_the_default_scalar_has_the_noise_in_force():
    x, y, module = torch.randn(20, 2), torch.randn(20, 3), network(3)
    fitted = bc.fit_laplace(module, bc.likelihoods.gaussian(1.0), [(x, y)])
    noise = fitted.likelihood.noise_variance.flatten()
    loss = lambda f, t: ((f - t).square() / noise / 2).sum(1)  # noqa: E731
    torch.testing.assert_close(bc.influence(fitted, (x, y), (x, y)), bc.influence(fitted, (x, y), (x, y), of=loss))


def test_draws_have_the_covariance_of_losses_and_values():
    """Of a Gaussian posterior with linear losses the first order is exact: minus covariance times the slopes."""
    draws, log_weights = torch.randn(7, 3), torch.randn(7)
    losses, values = draws @ torch.randn(3, 4), draws @ torch.randn(3, 2)
    w = log_weights.softmax(0)
    both = torch.cov(torch.cat([values, losses], 1).T, aweights=w, correction=0)
    torch.testing.assert_close(influence_of_draws(losses, values, log_weights), both[:2, 2:])


def test_what_cannot_be_answered_is_refused():
    x, y = torch.randn(6, 2), torch.randn(6, 1)
    fitted = bc.fit_laplace(network(1), bc.likelihoods.gaussian(), [(x, y)], structure="dense", tune=None)
    own = bc.fit_laplace(nn.Linear(2, 1).eval(), bc.likelihoods.gaussian(1.0), [(x, y)], structure="dense", tune=None)
    for call, words in (
        (lambda: leave_one_out(own, (1e3 * x, y)), r"leverage of 1 or more, number 0 .*leverage=False"),
        (lambda: bc.influence(own.posterior, (x, y), x), r"what bc\.fit_laplace returned"),
        (lambda: bc.influence(fitted, (x, None), x), "train has no targets|query has no targets"),
        (lambda: bc.influence(fitted, (x, y), x), "query has no targets.* or of="),
        (lambda: bc.influence(fitted, (x, y), (x, y), of=lambda f, _: f), "one number a datum"),
        (lambda: bc.influence(fitted, [], (x, y)), "train has no batches"),
        (lambda: bc.influence(fitted, (x, y), []), "query has no batches"),
        (lambda: bc.influence(fitted, (x, y), x, of=lambda f: f[:, 0]), "of cannot take outputs"),
        (
            lambda: bc.influence(fitted, (x, y), x, of=lambda f, _: f[:, 0].detach()),
            "of must return what has a gradient",
        ),
        (lambda: bc.influence(fitted, (x, y), ((x, x), y)), "influence: query: the model cannot take it"),
        (lambda: bc.influence(fitted, ((x, x), y), (x, y)), "influence: train: the model cannot take it"),
        (lambda: bc.influence(fitted, (x / 0, y), (x, y)), "train: outputs of the model are NaN or infinite"),
        (
            lambda: bc.influence(fitted, (x / 0, y), (x, y), leverage=False),
            "train: outputs of the model are NaN or infinite",
        ),
        (lambda: bc.influence(fitted, (x, y), (x / 0, y)), "query: outputs .* for 6 of 6 data, number 0 first"),
        (lambda: leave_one_out(fitted, (x.to("meta"), y.to("meta"))), "leave_one_out: train: the model cannot take it"),
        (lambda: influence_of_draws(x, y[:3]), "same draws"),
        (lambda: influence_of_draws(x, y, torch.ones(3)), "one for each of 6"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            call()
    assert bc.influence(own, (1e3 * x, y), x, of=lambda f, _: f[:, 0], leverage=False).isfinite().all()
