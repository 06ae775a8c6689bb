"""laplace-torch's further cases: gradients of the evidence, functional, prior mean, joint predictions, online."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesopt_chain as bc
from bayesopt_chain.trees import flatten

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def double_precision():
    pytest.importorskip("laplace")
    torch.manual_seed(711)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def case(kind="regression"):
    x = torch.randn(30, 3)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).eval()
    return model, x, torch.sin(x[:, :2]) if kind == "regression" else (x[:, 0] > 0).long()


def loader(x, y):
    return DataLoader(TensorDataset(x, y), 10)


def theirs(model, x, y, kind, subset="all", structure="full", **options):
    import laplace
    from laplace.curvature import BackPackGGN

    la = laplace.Laplace(copy.deepcopy(model), kind, subset, structure, backend=BackPackGGN, **options)
    la.fit(loader(x, y))
    return la


def in_their_order(fitted):
    """Entries of our flattened parameters in the order of the module's."""
    sizes = {name: leaf.numel() for name, leaf in fitted.model.params.items()}
    offsets, total = {}, 0
    for name in sorted(sizes):
        offsets[name], total = total, total + sizes[name]
    return torch.cat([torch.arange(sizes[n]) + offsets[n] for n in ("0.weight", "0.bias", "2.weight", "2.bias")])


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_the_evidence_has_their_gradient_in_prior_and_noise(kind):
    """By our differentiable evidence and by autograd through theirs."""
    model, x, y = case(kind)
    la = theirs(model, x, y, kind, prior_precision=0.7)
    likelihood = bc.likelihoods.gaussian() if kind == "regression" else bc.likelihoods.categorical()
    options = {"structure": "dense", "subset": "all", "tune": None, "prior_precision": 0.7}
    fitted = bc.fit_laplace(model, likelihood, loader(x, y), **options)
    prior, sigma = torch.tensor(0.7, requires_grad=True), torch.tensor(0.8, requires_grad=True)
    if kind == "regression":
        wanted = torch.autograd.grad(la.log_marginal_likelihood(prior, sigma), (prior, sigma))
        got = torch.autograd.grad(fitted.log_evidence_at(prior, sigma**-2), (prior, sigma))
    else:
        wanted = torch.autograd.grad(la.log_marginal_likelihood(prior), prior)
        got = torch.autograd.grad(fitted.log_evidence_at(prior), prior)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-10)


def test_a_joint_prediction_and_the_prior_mean_are_theirs():
    model, x, y = case()
    la = theirs(model, x, y, "regression", prior_precision=0.7, prior_mean=0.3, sigma_noise=0.5)
    options = {"structure": "dense", "subset": "all", "tune": None, "prior_precision": 0.7, "prior_mean": 0.3}
    fitted = bc.fit_laplace(model, bc.likelihoods.gaussian(0.25), loader(x, y), **options)
    torch.testing.assert_close(fitted.log_evidence, la.log_marginal_likelihood().detach())
    new = torch.randn(4, 3)
    mean, covariance = la(new, joint=True)
    got = fitted.outputs(new, joint=True)
    torch.testing.assert_close(got.mean.flatten(), mean.flatten().detach())
    torch.testing.assert_close(got.covariance, covariance.detach(), rtol=1e-8, atol=1e-10)


def test_the_functional_laplace_of_all_data_is_a_root():
    """A Gaussian process with the network's tangent kernel: the predictive variance."""
    import laplace

    model, x, y = case()
    la = laplace.FunctionalLaplace(
        copy.deepcopy(model), "regression", n_subset=30, prior_precision=0.7, sigma_noise=0.5, independent_outputs=False
    )
    la.fit(loader(x, y))
    options = {"structure": "root", "subset": "all", "tune": None, "prior_precision": 0.7}
    fitted = bc.fit_laplace(model, bc.likelihoods.gaussian(0.25), loader(x, y), **options)
    new = torch.randn(4, 3)
    _, covariance = la(new)
    torch.testing.assert_close(fitted.outputs(new).covariance, covariance.detach(), rtol=1e-6, atol=1e-8)


def test_online_updates_are_theirs():
    model, x, y = case("classification")
    la = theirs(model, x[:20], y[:20], "classification", prior_precision=0.7)
    la.fit(loader(x[20:], y[20:]), override=False)
    options = {"structure": "dense", "subset": "all", "tune": None, "prior_precision": 0.7}
    fitted = bc.fit_laplace(model, bc.likelihoods.categorical(), loader(x[:20], y[:20]), **options)
    fitted = fitted.refit(loader(x[20:], y[20:]))
    order = in_their_order(fitted)
    ours = fitted.posterior.precision.to_dense()[order][:, order]
    torch.testing.assert_close(ours, la.posterior_precision.detach(), rtol=1e-8, atol=1e-9)
    assert flatten(fitted.posterior.mean, fitted.posterior.mean).numel() == len(order)


class Reward(nn.Module):
    """A reward of an input, and of a pair of inputs both, ``[B, 2]``, as laplace-torch asks for."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x):
        return torch.cat([self.net(x[:, 0]), self.net(x[:, 1])], 1) if x.ndim == 3 else self.net(x)


def test_a_reward_model_has_their_curvature_and_predictions():
    """Fitted to choices between pairs, as a yes-or-no of the difference of rewards; it predicts the reward of one input."""
    import laplace
    from laplace.curvature import CurvlinopsGGN

    module, x, y = Reward().eval(), torch.randn(20, 2, 3), torch.randint(0, 2, (20,))
    la = laplace.Laplace(
        copy.deepcopy(module), "reward_modeling", "all", "full", backend=CurvlinopsGGN, prior_precision=2.0
    )
    la.fit(DataLoader(TensorDataset(x, y), 10))
    reward, params, _ = bc.make_functional(module)

    def chosen(p, batch):
        pair = reward(p, batch)
        return pair[:, 1:] - pair[:, :1]

    data = [(x[:10], y[:10, None]), (x[10:], y[10:, None])]
    options = {"subset": "all", "structure": "dense", "tune": None, "prior_precision": 2.0}
    fitted = bc.fit_laplace(chosen, bc.likelihoods.bernoulli(), data, params=params, **options)
    torch.testing.assert_close(fitted.log_evidence, la.log_marginal_likelihood().detach(), rtol=1e-10, atol=1e-10)
    new = torch.randn(4, 3)
    mean, covariance = bc.posterior.linearized(reward, fitted.posterior, (new, None))
    their_mean, their_covariance = la(new)
    torch.testing.assert_close(mean, their_mean.detach())
    torch.testing.assert_close(covariance, their_covariance.detach(), rtol=1e-8, atol=1e-10)
