"""Products, per-sample gradients and conjugate gradients against dense algebra, with and without forward mode."""

import optree
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import attention
from torch.nn.utils import parametrizations

import bayesopt_chain as bc
from bayesopt_chain import curvature, likelihoods
from bayesopt_chain.precision import flatten, unflatten
from tests.curvature.conftest import naive
from tests.nets import Net

PARAMS = lambda: {"w": torch.randn(3, 4), "v": torch.randn(4, 2), "s": torch.tensor(0.7)}  # noqa: E731


def forward(p, batch):
    return p["s"] * (torch.tanh(batch[0] @ p["w"]) @ p["v"])


def case():
    batch = (torch.randn(5, 3), torch.randn(5, 2))
    return PARAMS(), batch, likelihoods.gaussian(0.5)


def losses(batch, likelihood):
    return lambda p: likelihood.nll(forward(p, batch), batch[1])


def like(params):
    return optree.tree_map(torch.randn_like, params)


def test_hvp_is_the_hessian_times_the_vector_and_returns_gradient_and_aux():
    params, batch, likelihood = case()
    loss = lambda p: losses(batch, likelihood)(p).sum()  # noqa: E731
    v = like(params)
    matrix = torch.func.hessian(lambda x: loss(unflatten(x, params)))(flatten(params, params))
    gradient, product = curvature.hvp(loss, (params,), (v,))
    assert torch.allclose(flatten(product, params), matrix @ flatten(v, params), atol=1e-12)
    assert torch.allclose(gradient["w"], torch.func.grad(loss)(params)["w"])
    *_, aux = curvature.hvp(lambda p: (loss(p), p["s"]), (params,), (v,), has_aux=True)
    assert aux == params["s"]


def test_products_with_several_arguments_are_tuples():
    x, y = torch.randn(3), torch.randn(3)
    _, (a, b) = curvature.hvp(lambda x, y: (x * y).sum(), (x, y), (x, torch.zeros(3)))
    assert torch.allclose(a, torch.zeros(3)) and torch.allclose(b, x)


def test_fvp_is_the_gradients_outer_products():
    params, batch, likelihood = case()
    expected = naive(forward, params, batch, lambda f, y: likelihood.gradient(f, y)[None])
    f = losses(batch, likelihood)
    v = like(params)
    values, product = curvature.fvp(f, (params,), (v,))
    assert torch.equal(values, f(params))
    assert torch.allclose(flatten(product, params), expected @ flatten(v, params), atol=1e-12)
    assert torch.allclose(
        flatten(curvature.fvp(f, (params,), (v,), normalise=True)[1], params) * 5, flatten(product, params)
    )
    with pytest.raises(ValueError, match=r"one loss a datum"):
        curvature.fvp(lambda p: f(p).sum(), (params,), (v,))


def test_ggnvp_is_the_naive_construction():
    params, batch, likelihood = case()
    expected = naive(forward, params, batch, likelihood.factors)
    model, loss = lambda p: forward(p, batch), lambda f: likelihood.nll(f, batch[1]).sum()
    v = like(params)
    outputs, product = curvature.ggnvp(model, loss, (params,), (v,))
    assert torch.equal(outputs, model(params))
    assert torch.allclose(flatten(product, params), expected @ flatten(v, params), atol=1e-12)


class NoForwardMode(torch.autograd.Function):
    """x^3 with a backward pass only, as some kernels have."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0] ** 2 * g


def test_where_an_operation_has_no_forward_mode_the_products_are_still_right():
    x, v = torch.randn(4), torch.randn(4)
    with pytest.raises(RuntimeError):
        torch.func.jvp(NoForwardMode.apply, (x,), (v,))
    value, along = curvature.jvp(NoForwardMode.apply, (x,), (v,))
    assert torch.allclose(value, x**3) and torch.allclose(along, 3 * x**2 * v)
    _, product = curvature.hvp(lambda x: NoForwardMode.apply(x).sum(), (x,), (v,))
    assert torch.allclose(product, 6 * x * v)
    _, product = curvature.ggnvp(NoForwardMode.apply, lambda f: f.square().sum() / 2, (x,), (v,))
    assert torch.allclose(product, 9 * x**4 * v)


def test_per_sample_gradients_are_those_of_each_datum():
    params, batch, likelihood = case()

    def loss(p, batch):
        return likelihood.nll(forward(p, batch), batch[1]).mean()

    gradients = curvature.per_sample(torch.func.grad(loss))(params, batch)
    for i in range(5):
        alone = torch.func.grad(loss)(params, (batch[0][i : i + 1], batch[1][i : i + 1]))
        assert torch.allclose(gradients["w"][i], alone["w"], atol=1e-13)

    def with_a_branch(p, batch):
        return loss(p, batch) * max(2, -batch[0].square().sum().item())

    assert torch.allclose(curvature.per_sample(torch.func.grad(with_a_branch))(params, batch)["w"], 2 * gradients["w"])


NET = {"body": [torch.ones(3, 4), torch.ones(4)], "head": {"w": torch.ones(4, 2), "b": torch.zeros(2)}}


def net(p, batch):
    return torch.tanh(batch[0] @ p["body"][0] + p["body"][1]) @ p["head"]["w"] + p["head"]["b"]


KEEPS = {
    "name": "head",
    "glob": ["head.*"],
    "names": ["head.w", "head.b"],
    "function": lambda name: name.startswith("head"),
    "mask": {"body": False, "head": True},
}


@pytest.mark.parametrize("keep", KEEPS.values(), ids=KEEPS)
def test_a_subset_has_the_block_of_the_whole(keep):
    params = optree.tree_map(lambda leaf: torch.randn(leaf.shape), NET)
    batch, likelihood = (torch.randn(5, 3), torch.randn(5, 2)), likelihoods.gaussian()
    whole = curvature.ggn(net, likelihood, "dense")(params, batch).to_dense()
    forward_head, head = curvature.subset(net, params, keep)
    assert list(head) == ["head.b", "head.w"]
    part = curvature.ggn(forward_head, likelihood, "dense")(head, batch).to_dense()
    assert torch.allclose(part, whole[-10:, -10:], atol=1e-13)


def test_a_subset_that_keeps_nothing_is_refused():
    empty = ("tail", ["head.w", "tail"], {"body": False, "head": False}, lambda name: False)
    for keep, words in (*((keep, r"body\.0.*head\.w") for keep in empty), ({"tail": True}, "no prefix")):
        with pytest.raises(ValueError, match=words):
            curvature.subset(net, NET, keep)


def test_what_is_frozen_below_the_first_kept_parameter_costs_no_backward_pass():
    """Counts the matrix products: one forward pass of the body, none backwards through it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        products = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.products += (
                func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
                and max(max(a.shape) for a in args if isinstance(a, torch.Tensor)) >= 500
            )
            return func(*args, **(kwargs or {}))

    params = {"body": torch.randn(500, 500), "head": torch.randn(500, 2)}
    wide = lambda p, batch: torch.mm(torch.mm(batch[0], p["body"]).tanh(), p["head"])  # noqa: E731
    forward_head, head = curvature.subset(wide, params, "head")
    with Count() as count:
        curvature.ggn(forward_head, likelihoods.gaussian(), "kronecker")(head, (torch.randn(2, 500), torch.randn(2, 2)))
    # two layers for the probe, two for the batch, one Kronecker factor of the head
    assert count.products <= 6


def attends(net, x):
    """One head of attention over the positions, then a linear layer."""
    q, k, v = net.qkv(x).chunk(3, -1)
    mixed = nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])
    return net.head(mixed[:, 0].mean(1))


def inner(net, x):
    out = net.layer(x if isinstance(net.layer, nn.LSTM) else x.mean(1))
    return net.head(torch.tanh(out[0][:, -1] if isinstance(out, tuple) else out))


MODELS = {
    "attention": lambda: Net(attends, qkv=nn.Linear(3, 9), head=nn.Linear(3, 1)),
    "weight_norm": lambda: Net(inner, layer=parametrizations.weight_norm(nn.Linear(3, 4)), head=nn.Linear(4, 1)),
    "LSTM": lambda: Net(inner, layer=nn.LSTM(3, 4, batch_first=True), head=nn.Linear(4, 1)),
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
def model(request):
    return Case(request.param)


@pytest.fixture
def fit(model):
    return bc.fit_laplace(
        model.model, likelihoods.gaussian(0.3), [model.data], subset="all", structure="dense", tune=None
    )


def test_drawn_functions_are_the_jacobian_times_drawn_parameters(model, fit):
    drawn = fit.functional_samples(model.data[0], samples=3, generator=torch.Generator().manual_seed(1))[..., 0]
    draws = fit.posterior.sample((3,), generator=torch.Generator().manual_seed(1))
    want = model.forward(model.params, model.data)[:, 0].expand(3, -1).clone()
    for n in range(6):  # a gradient for each output
        leaves = {k: p.clone().requires_grad_() for k, p in model.params.items()}
        value = functional_call(model.model, leaves, (model.data[0][n : n + 1],)).sum()
        rows = dict(zip(leaves, torch.autograd.grad(value, list(leaves.values()))))
        for k, row in rows.items():
            want[:, n] += ((draws[k] - model.params[k]) * row).flatten(1).sum(1)
    torch.testing.assert_close(drawn, want)


def test_the_variance_of_outputs_has_gradients_in_the_inputs(model, fit):
    x = model.data[0][:2].clone().requires_grad_()
    (slope,) = torch.autograd.grad(fit.predictive(x).variance.sum(), x)
    along = torch.randn_like(x)
    with torch.no_grad():
        up, down = (fit.predictive(x + s * 1e-5 * along).variance.sum() for s in (1, -1))
    assert (slope * along).sum().item() == pytest.approx((up - down).item() / 2e-5, rel=1e-5, abs=1e-8)


def test_the_growth_of_a_step_is_that_of_the_dense_hessian(model):
    lr, tx = 0.1, bc.sgd(0.1)
    want = (1 - lr * torch.linalg.eigvalsh(model.hessian())).abs().amax().item()
    found = bc.samplers.step_growth(model.loss, tx, model.params, tx.init(model.params), model.data, steps=60)
    assert found == pytest.approx(want, abs=0.05)


def test_an_operation_without_second_derivatives_is_named():
    bag = nn.EmbeddingBag(5, 2)
    loss = lambda p: functional_call(bag, p, (torch.tensor([[0, 1], [3, 3]]),)).square().sum()  # noqa: E731
    params = {"weight": bag.weight.detach()}
    with pytest.raises(RuntimeError, match=r"no second derivative in torch .*nn\.Embedding and a mean"):
        curvature.hvp(loss, (params,), (params,))


def test_a_density_of_ones_own_needs_no_forward_mode():
    targets = torch.randn(4, 2)
    outputs = targets + torch.rand(4, 2)  # where the cube is convex
    S = likelihoods.custom(lambda f, y: NoForwardMode.apply(f - y).sum(-1)).factors(outputs, targets)
    torch.testing.assert_close(torch.einsum("kbi,kbj->bij", S, S), torch.diag_embed(6 * (outputs - targets)))


def test_cg_solves_damped_trees_with_and_without_a_preconditioner_and_a_start():
    params, root = PARAMS(), torch.randn(21, 21)
    A = torch.diag(torch.logspace(0, 4, 21)) + 0.1 * root @ root.T
    product = lambda x: unflatten(flatten(x, params) @ A, params)  # noqa: E731
    rescaled = lambda x: unflatten(flatten(x, params) / (A.diag() + 0.7), params)  # noqa: E731
    expected = torch.linalg.solve(A + 0.7 * torch.eye(21), flatten(params, params))
    ended = []
    for options in ({}, {"preconditioner": rescaled}, {"x0": like(params), "preconditioner": rescaled}):
        x, info = curvature.cg(product, params, damping=torch.tensor(0.7), rtol=1e-12, **options)
        assert info.converged and torch.allclose(flatten(x, params), expected, rtol=1e-8)
        ended.append(info.iterations)
    assert ended[1] < ended[0] / 2
    assert curvature.cg(product, params, damping=0.7, x0=x, rtol=1e-9)[1].iterations == 0
    assert curvature.cg(product, params, maxiter=2)[1][::2] == (2, False)


@pytest.mark.parametrize(
    "scale, options, words",
    [(-1, {}, "not positive definite"), (1, {"x0": torch.ones(3)}, "x0"), (1, {"damping": -1.0}, "=-1")],
)
def test_cg_refuses_an_indefinite_matrix_a_wrong_start_and_negative_damping(scale, options, words):
    with pytest.raises(ValueError, match=words):
        curvature.cg(lambda x: scale * x, torch.ones(2), **options)
