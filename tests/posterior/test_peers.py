"""The numbers of laplace-torch, where both compute the same thing, in float64."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesopt_chain as bc
from bayesopt_chain.posterior import train_by_evidence

pytest.importorskip("laplace")
pytestmark = [pytest.mark.usefixtures("double_precision"), pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
STRUCTURES = {"dense": "full", "diagonal": "diag"}
N = 30


def case(kind):
    x = torch.randn(N, 3)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).eval()
    y = torch.sin(x) if kind == "regression" else x.argmax(1)
    likelihood = bc.likelihoods.gaussian() if kind == "regression" else bc.likelihoods.categorical()
    return model, x, y, likelihood


def loader(x, y):
    return DataLoader(TensorDataset(x, y), 10)


def theirs(model, kind, structure, subset, *data):
    import laplace
    from laplace.curvature import BackPackGGN

    la = laplace.Laplace(
        copy.deepcopy(model), kind, subset, STRUCTURES[structure], prior_precision=0.7, backend=BackPackGGN
    )
    for i, (x, y) in enumerate(data):
        la.fit(loader(x, y), override=i == 0)
    return la


@pytest.mark.parametrize("kind", ["regression", "classification"])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["dense", "diagonal"])
def test_evidence_and_predictions_are_those_of_laplace_torch(structure, subset, kind):
    model, x, y, likelihood = case(kind)
    la = theirs(model, kind, structure, subset, (x, y))
    options = {"structure": structure, "subset": subset, "tune": None, "prior_precision": 0.7}
    fitted = bc.fit_laplace(model, likelihood, loader(x, y), **options)
    new = torch.randn(7, 3)
    got = fitted.predict(new, method="linearized")
    mean, covariance = la._glm_predictive_distribution(new)
    torch.testing.assert_close(got.outputs.covariance, covariance, rtol=1e-8, atol=1e-10)
    evidence = torch.as_tensor(la.log_marginal_likelihood()).detach().reshape(())
    if kind == "regression" and subset == "last_layer":  # the mode is solved for again, which can only add
        assert fitted.log_evidence > evidence
        return
    torch.testing.assert_close(got.outputs.mean, mean)
    torch.testing.assert_close(fitted.log_evidence, evidence)


@pytest.mark.parametrize("structure", ["dense", "diagonal"])
def test_data_in_two_pieces_are_those_of_laplace_torchs_online_fit(structure):
    """(Not Kronecker: theirs adds the products of the pieces in the basis of the last one.)"""
    model, x, y, likelihood = case("classification")
    halves = [(x[:10], y[:10]), (x[10:], y[10:])]
    la = theirs(model, "classification", structure, "all", *halves)
    options = {"structure": structure, "subset": "all", "tune": None, "prior_precision": 0.7}
    fitted = bc.fit_laplace(model, likelihood, loader(*halves[0]), **options).refit(loader(*halves[1]))
    precision = la.posterior_precision
    wanted = precision if structure == "dense" else torch.diag(precision)
    torch.testing.assert_close(dense(fitted), wanted.detach())


def dense(fitted):
    """The precision in the order of the module's parameters."""
    names = list(fitted.model.params)
    order, start = {}, 0
    for name in sorted(names):  # as trees order them
        order[name] = torch.arange(start, start := start + fitted.model.params[name].numel())
    index = torch.cat([order[name] for name in names])
    return fitted.posterior.precision.to_dense()[index][:, index]


@pytest.mark.slow
def test_training_by_the_evidence_ends_where_laplace_torchs_does():
    """A sine with noise 0.3: the same noise within a tenth, the evidence within a nat, error bars within a tenth."""
    from laplace import marglik_training
    from laplace.curvature import BackPackGGN

    torch.set_default_dtype(torch.float32)
    x = 8 * torch.rand(150, 1)
    y = torch.sin(x) + 0.3 * torch.randn_like(x)
    model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    la, _, margliks, _ = marglik_training(
        copy.deepcopy(model),
        DataLoader(TensorDataset(x, y), 150),
        "regression",
        "full",
        BackPackGGN,
        n_epochs=600,
        optimizer_kwargs={"lr": 1e-2},
        prior_structure="scalar",
        marglik_frequency=10,
        n_epochs_burnin=50,
    )
    training = train_by_evidence(
        model,
        bc.likelihoods.gaussian(),
        [(x, y)],
        structure="dense",
        epochs=600,
        every=10,
        burn_in=50,
        optimizer=lambda p: torch.optim.Adam(p, lr=1e-2),
    )
    noise = training.fitted.likelihood_scale**-0.5
    torch.testing.assert_close(noise, la.sigma_noise.double().reshape(()), rtol=0.1, atol=0)
    assert training.fitted.log_evidence > -min(margliks) - 1
    new = torch.linspace(0, 8, 30)[:, None]
    torch.testing.assert_close(training.fitted.predict(new).mean, la(new)[0].detach(), rtol=0, atol=0.1)
