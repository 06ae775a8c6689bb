"""Real architectures, tiny and random: the numbers are those of the naive Jacobian, and Kronecker describes every
layer.
"""

import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bayesopt_chain as bc
from bayesopt_chain import curvature, likelihoods
from bayesopt_chain.posterior.laplace import laplace
from bayesopt_chain.precision import flatten
from tests.curvature.conftest import naive, of_module

os.environ.setdefault("HF_HUB_OFFLINE", "1")


class Residual(nn.Module):
    def __init__(self, channels, out, stride):
        super().__init__()
        self.one, self.norm_one = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.two, self.norm_two = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.skip = nn.Conv2d(channels, out, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x):
        y = F.relu(self.norm_one(self.one(x)), inplace=True)
        return F.relu(self.norm_two(self.two(y)) + self.skip(x))


class ResNet(nn.Module):
    def __init__(self, width=3, classes=3):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(Residual(width, width, 1), Residual(width, 2 * width, 2))
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x):
        return self.head(self.blocks(F.relu(self.norm(self.stem(x)))).mean((2, 3)))


class Attention(nn.Module):
    """Token and position embeddings, one block of fused attention, a norm and a head."""

    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(7, 4), nn.Embedding(5, 4)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)
        self.fused = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, tokens):
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1])[None])
        h = self.norm(x)
        return self.head((x + self.fused(h, h, h, need_weights=False)[0]).mean(1))


def resnet():
    net = ResNet()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 1.5)
    return net.eval(), torch.randn(4, 2, 5, 5)


MODELS = {
    "resnet": resnet,
    "attention": lambda: (Attention(), torch.randint(0, 7, (4, 5))),
}
LIKELIHOOD = likelihoods.categorical()
TARGETS = torch.tensor([0, 1, 2, 1])


def posterior_of(params, dense):
    tx = laplace()
    _, state = tx.update(params, tx.init(params), curvature=dense)
    return tx.posterior(state, params, prior_precision=1.0)


@pytest.fixture(params=MODELS)
def case(request):
    net, inputs = MODELS[request.param]()
    return *of_module(net), (inputs, TARGETS)


def test_dense_diagonal_and_prediction_are_the_naive_construction(case):
    forward, params, batch = case
    expected = naive(forward, params, batch, LIKELIHOOD.factors)
    dense = curvature.ggn(forward, LIKELIHOOD, "dense")(params, batch)
    diagonal = curvature.ggn(forward, LIKELIHOOD, "diagonal")(params, batch)
    scale = expected.abs().max()
    assert (dense.to_dense() - expected).abs().max() < 1e-12 * scale
    assert (flatten(diagonal.diag(), params) - expected.diagonal()).abs().max() < 1e-12 * scale
    _, covariance = bc.posterior.linearized(forward, posterior_of(params, dense), batch)
    rows = naive(forward, params, batch, lambda f, y: torch.eye(3)[:, None, :].expand(3, 4, 3))
    trace = (torch.linalg.inv(expected + torch.eye(len(expected))) * rows).sum()
    assert torch.allclose(covariance.diagonal(dim1=1, dim2=2).sum(), trace, rtol=1e-9)


def test_kronecker_and_ekfac_describe_every_parameter(case):
    forward, params, batch = case
    exact = curvature.ggn(forward, LIKELIHOOD, "block")(params, batch).to_dense()
    kfac = curvature.ggn(forward, LIKELIHOOD, "kronecker")(params, batch)
    ekfac = curvature.ggn(forward, LIKELIHOOD, "kronecker", basis=kfac)(params, batch)
    assert (ekfac.to_dense() - exact).norm() < (kfac.to_dense() - exact).norm() < exact.norm()
    for name in (name for name, leaf in params.items() if leaf.ndim == 1):  # these have their exact blocks
        one, forward_one = {name: params[name]}, lambda p, b: forward({**params, **p}, b)
        block = curvature.ggn(forward_one, LIKELIHOOD, "dense")(one, batch).to_dense()
        assert torch.allclose(kfac.left[name] * kfac.right[name] / kfac.count, block, atol=1e-12)
