"""One training loop for every method: only the transformation changes."""

import optree
import pytest
import torch
import torchopt

import bayesopt_chain as bc
from bayesopt_chain.posterior.gaussian import Gaussian
from tests.loop.beside import follow

pytestmark = pytest.mark.usefixtures("double_precision")
N = 60
likelihood = bc.likelihoods.bernoulli()


def forward(params, batch):
    hidden = torch.tanh(batch[0] @ params["body"])
    return (hidden @ params["head"]).squeeze(-1)


def loss(params, batch):
    return likelihood.nll(forward(params, batch), batch[1]).mean()


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 2, generator=generator)
    return x, (x[:, 0] * 2 + x[:, 1] + 0.5 * torch.randn(N, generator=generator) > 0).double()


def start():
    generator = torch.Generator().manual_seed(2)
    return {
        "body": 0.5 * torch.randn(2, 4, generator=generator),
        "head": 0.5 * torch.randn(4, 1, generator=generator),
    }


root = bc.curvature.ggn(forward, likelihood, "root")
METHODS = {
    "sgd": lambda: bc.sgd(0.5),
    "torchopt's adam": lambda: torchopt.adam(0.02),
    "sghmc": lambda: bc.sghmc(0.1, temperature=1 / N),
    "mean field": lambda: bc.vi.mean_field(bc.adam(0.05), temperature=1 / N, weight_decay=1 / N, init_scale=0.1),
    "dense": lambda: bc.vi.dense(
        bc.adam(0.05), temperature=1 / N, weight_decay=1 / N, init_scale=0.1, scale_optimizer=bc.adam(0.005)
    ),
    "low rank": lambda: bc.vi.low_rank(
        bc.adam(0.05), temperature=1 / N, weight_decay=1 / N, init_scale=0.1, rank=3, scale_optimizer=bc.adam(0.005)
    ),
    "ivon": lambda: bc.vi.ivon(0.1, temperature=1 / N, weight_decay=1 / N, betas=(0.9, 0.999)),
    "von": lambda: bc.vi.von(0.1, temperature=1 / N, weight_decay=1 / N, n_samples=2),
    "dense filter": lambda: bc.ekf.dense(),
    "diagonal filter": lambda: bc.ekf.diagonal(),
    "low-rank filter": lambda: bc.ekf.low_rank(rank=4),
    "laplace": lambda: bc.laplace(),
    "swag": lambda: bc.swag(rank=3),
}


def build(name):
    """The transformation to run and the link to ask."""
    link = METHODS[name]()
    if name == "swag":
        return bc.chain(bc.sgd(0.5), link), link
    return (bc.chain(link, bc.sgd(0.5)), link) if name == "laplace" else (link, link)


def posterior_of(name, link, state, params):
    return link.posterior(state, params, **({"prior_precision": 1.0} if name == "laplace" else {}))


def run(tx, epochs=4, inplace=False, curvature=root):
    step = bc.make_step(loss, tx, curvature=curvature, inplace=inplace)
    params = optree.tree_map(torch.clone, start())
    torch.manual_seed(3)
    state = tx.init(params)
    losses = []
    for _ in range(epochs):
        for batch in zip(*(x.split(10) for x in data())):
            params, state, info = step(params, state, batch)
            losses.append(info.loss.item())
    return params, state, losses


@pytest.mark.parametrize("name", [name for name in METHODS if hasattr(METHODS[name](), "posterior")])
def test_prediction_never_asks_which_method_it_was(name):
    """Linearised moments against the dense covariance, for every posterior."""
    tx, link = build(name)
    params, state, _ = run(tx)
    posterior = posterior_of(name, link, state, params)
    assert isinstance(posterior, Gaussian)
    inputs = data()[0][:5]
    mean, covariance = bc.posterior.linearized(forward, posterior, (inputs, None))
    jacobian = torch.func.jacrev(lambda p: forward(p, (inputs, None)))(posterior.mean)
    jacobian = torch.cat([jacobian[k].reshape(5, -1) for k in sorted(jacobian)], 1)
    dense = torch.linalg.inv(posterior.precision.to_dense())
    torch.testing.assert_close(mean, forward(posterior.mean, (inputs, None)))
    torch.testing.assert_close(covariance.reshape(5), ((jacobian @ dense) * jacobian).sum(1), rtol=1e-8, atol=1e-10)


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", METHODS)
def test_in_place_the_loop_is_the_same(name):
    """Parameters and losses bit for bit, of a method that learns."""
    params, _, losses = run(build(name)[0])
    assert loss(params, data()) < 0.9 * loss(start(), data()) and not any(p.requires_grad for p in params.values())
    inplace, _, again = run(build(name)[0], inplace=True)
    assert losses == again
    assert all(torch.equal(params[k], inplace[k]) for k in params)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_captured(name):
    """Where a value is traced nobody looks at it. Only states that grow are refused, by name."""
    curvature = bc.curvature.ggn(forward, likelihood, "dense") if name in ("laplace", "von") else root
    tx, _ = build(name)
    step, params = bc.make_step(loss, tx, curvature=curvature), start()
    *begun, _ = step(params, tx.init(params), data())  # the first increment decides the structure
    fast = bc.capture(step, *begun, data(), backend="eager")
    follow(step, fast, begun, [data()] * 2, rtol=1e-10, atol=1e-10)


class NothingFromTheHost(torch.overrides.TorchFunctionMode):
    """Refuses numbers made into tensors by a copy, which a CUDA graph cannot record, and numbers read off tensors."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.tensor, torch.as_tensor, torch.asarray) or torch.is_tensor(args[0]), (func, args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", METHODS)
def test_no_step_makes_tensors_of_numbers_by_a_copy(name):
    tx, _ = build(name)
    step, params = bc.make_step(loss, tx, curvature=root), start()
    params, state, _ = step(params, tx.init(params), data())
    batch = data()
    with NothingFromTheHost():
        step(params, state, batch)


def test_a_state_that_grows_is_not_captured():
    tx, _ = build("laplace")
    step = bc.make_step(loss, tx, curvature=root)
    params, state, _ = step(start(), tx.init(start()), data())
    with pytest.raises(bc.CaptureError, match=r"a state of another structure, shape.*root"):
        bc.capture(step, params, state, data(), backend="eager")


@pytest.mark.parametrize("samples", [1, 3])
def test_the_head_alone_may_be_bayesian(samples):
    """A partition with variational inference for the head: the body sees the mean gradient over the draws and moves as
    plain SGD does on it; the head's posterior is its own."""
    vi = bc.vi.mean_field(bc.sgd(0.1), temperature=1 / N, n_samples=samples)
    tx = bc.partition({"body": bc.sgd(0.5), "head": vi}, {"body": "body", "head": "head"})
    params, state, _ = run(tx, epochs=1)
    assert set(vi.posterior(state, {"head": params["head"]}).mean) == {"head"}
    state = tx.init(start())
    drawing = [i for i, link in enumerate(tx.links) if link.traits.samples]
    head = vi.sample((state[drawing[0]],), {"head": start()["head"]}).params["head"]
    points = [{**start(), "head": head if samples == 1 else head[s]} for s in range(samples)]
    moved, _, _ = bc.make_step(loss, tx)(start(), state, data())
    gradient = sum(torch.func.grad(loss)(p, data())["body"] for p in points) / samples
    torch.testing.assert_close(moved["body"], start()["body"] - 0.5 * gradient, rtol=1e-12, atol=1e-12)


def test_a_variational_family_may_stand_in_a_chain():
    """Behind clipping; drawn from through the chain's state, and by make_step alike."""
    vi = bc.vi.mean_field(bc.sgd(0.1), temperature=1 / N)
    tx = bc.chain(torchopt.clip.clip_grad_norm(0.1), vi)
    state = tx.init(start())
    draw = vi.sample(state, start())
    grads = torch.func.grad(loss)(draw.params, data())
    updates, _ = tx.update(grads, state, params=start(), draw=draw, inplace=False)
    params, _, _ = bc.make_step(loss, tx)(start(), state, data())
    for k, p in params.items():
        torch.testing.assert_close(p, start()[k] + updates[k], rtol=0, atol=0)


def test_curvature_is_not_asked_for_where_nothing_takes_it():
    def refuse(params, batch):
        raise AssertionError("called")

    for tx in (bc.sgd(0.1), torchopt.sgd(0.1), bc.vi.mean_field(bc.sgd(0.1), temperature=1 / N)):
        bc.make_step(loss, tx, curvature=refuse)(start(), tx.init(start()), data())


def test_curvature_over_several_draws_still_counts_each_datum_once():
    """The increment is the mean over the draws: a Laplace link beside variational inference counts the batch's data."""
    tx = bc.chain(bc.laplace(), bc.vi.mean_field(bc.sgd(0.1), temperature=1 / N, n_samples=3))
    state = tx.init(start())
    estimate = bc.curvature.ggn(forward, likelihood, "dense")
    _, state, _ = bc.make_step(loss, tx, curvature=estimate)(start(), state, data())
    assert float(state[0].precision.count) == pytest.approx(N, rel=1e-12)
