"""Layers without forward-mode derivatives: every product in the package falls back to two backward passes, and is right."""

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import attention
from torch.nn.utils import parametrizations

import bayesopt_chain as bc
from bayesopt_chain import curvature, likelihoods
from bayesopt_chain.precision import flatten, unflatten


class Attention(nn.Module):
    """One head of attention over the positions, then a linear layer."""

    def __init__(self):
        super().__init__()
        self.qkv, self.head = nn.Linear(3, 9), nn.Linear(3, 1)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])
        return self.head(mixed[:, 0].mean(1))


class Inner(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(4, 1)

    def forward(self, x):
        out = self.layer(x if isinstance(self.layer, nn.LSTM) else x.mean(1))
        return self.head(torch.tanh(out[0][:, -1] if isinstance(out, tuple) else out))


MODELS = {
    "attention": Attention,
    "weight_norm": lambda: Inner(parametrizations.weight_norm(nn.Linear(3, 4))),
    "LSTM": lambda: Inner(nn.LSTM(3, 4, batch_first=True)),
}


class Case:
    def __init__(self, name):
        torch.manual_seed(0)
        self.model = MODELS[name]().eval()
        self.params = {k: p.detach() for k, p in self.model.named_parameters()}
        self.data = torch.randn(6, 4, 3), torch.randn(6, 1)

    def forward(self, params, batch):
        return functional_call(self.model, params, (batch[0],))

    def loss(self, params, batch):
        return (self.forward(params, batch) - batch[1]).square().mean()

    def hessian(self):
        """Dense, by two backward passes through plain kernels."""
        with attention.sdpa_kernel(attention.SDPBackend.MATH):
            loss = lambda v: self.loss(unflatten(v, self.params), self.data)  # noqa: E731
            return torch.func.jacrev(torch.func.jacrev(loss))(flatten(self.params, self.params))


@pytest.fixture(params=MODELS)
def case(request):
    return Case(request.param)


@pytest.fixture
def fit(case):
    return bc.fit_laplace(
        case.model, likelihoods.gaussian(0.3), [case.data], subset="all", structure="dense", tune=None
    )


def test_drawn_functions_are_the_jacobian_times_drawn_parameters(case, fit):
    drawn = fit.functional_samples(case.data[0], samples=3, generator=torch.Generator().manual_seed(1))[..., 0]
    draws = fit.posterior.sample((3,), generator=torch.Generator().manual_seed(1))
    want = case.forward(case.params, case.data)[:, 0].expand(3, -1).clone()
    for n in range(6):  # a gradient for each output
        leaves = {k: p.clone().requires_grad_() for k, p in case.params.items()}
        value = functional_call(case.model, leaves, (case.data[0][n : n + 1],)).sum()
        rows = dict(zip(leaves, torch.autograd.grad(value, list(leaves.values()))))
        for k, row in rows.items():
            want[:, n] += ((draws[k] - case.params[k]) * row).flatten(1).sum(1)
    torch.testing.assert_close(drawn, want)


def test_the_variance_of_outputs_has_gradients_in_the_inputs(case, fit):
    x = case.data[0][:2].clone().requires_grad_()
    (slope,) = torch.autograd.grad(fit.predictive(x).variance.sum(), x)
    along = torch.randn_like(x)
    with torch.no_grad():
        up, down = (fit.predictive(x + s * 1e-5 * along).variance.sum() for s in (1, -1))
    assert (slope * along).sum().item() == pytest.approx((up - down).item() / 2e-5, rel=1e-5, abs=1e-8)


def test_the_growth_of_a_step_is_that_of_the_dense_hessian(case):
    lr, tx = 0.1, bc.sgd(0.1)
    want = (1 - lr * torch.linalg.eigvalsh(case.hessian())).abs().amax().item()
    found = bc.samplers.step_growth(case.loss, tx, case.params, tx.init(case.params), case.data, steps=60)
    assert found == pytest.approx(want, abs=0.05)


def test_an_operation_without_second_derivatives_is_named():
    bag = nn.EmbeddingBag(5, 2)
    loss = lambda p: functional_call(bag, p, (torch.tensor([[0, 1], [3, 3]]),)).square().sum()  # noqa: E731
    params = {"weight": bag.weight.detach()}
    with pytest.raises(RuntimeError, match=r"no second derivative in torch .*nn\.Embedding and a mean"):
        curvature.hvp(loss, (params,), (params,))


def test_a_density_of_ones_own_needs_no_forward_mode():
    class Square(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x**2

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(inputs[0])

        @staticmethod
        def backward(ctx, g):
            return 2 * ctx.saved_tensors[0] * g

    outputs, targets = torch.randn(4, 2), torch.randn(4, 2)
    S = likelihoods.custom(lambda f, y: Square.apply(f - y).sum(-1)).factors(outputs, targets)
    torch.testing.assert_close(torch.einsum("kbi,kbj->bij", S, S), 2 * torch.eye(2).expand(4, 2, 2))
