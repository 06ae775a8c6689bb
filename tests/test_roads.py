"""What users do from end to end, with everything on the CPU, on a CUDA device, and on one that refuses what CUDA refuses.

The CPU runs show that the roads are sound; on a device, any tensor that the package leaves behind on the host is an error of
torch. Single methods are tested elsewhere; here short runs need only end, stay on their device and give finite numbers.
"""

from functools import partial

import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain.optim import _checks
from bayesopt_chain.posterior import train_by_evidence
from tests import pretended
from tests.pretended import DEVICE, Here
from tests.walk import descend

N = 64
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["cpu", "pretended", CUDA])
def device(request, monkeypatch):
    torch.manual_seed(0)
    if request.param != "pretended":
        yield torch.device(request.param)
        return
    # else its parameters are of a type that is refused
    monkeypatch.setattr(_checks, "KINDS", {*_checks.KINDS, pretended.Pretended})
    with pretended.Here():
        yield pretended.DEVICE


def regression(device):
    x = torch.linspace(-1, 1, N, device=device)[:, None]
    return x, torch.sin(3 * x) + 0.1 * torch.randn(N, 1, device=device)


def classes(device):
    x = torch.randn(N, 2, device=device)
    return x, (x[:, 0] > 0).long()


def network(device, inputs=1, outputs=1):
    return nn.Sequential(nn.Linear(inputs, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, outputs)).to(
        device
    )


def outputs(params, batch):
    return torch.tanh(batch[0] @ params["a"]) @ params["b"]


def loss(params, batch):
    return (outputs(params, batch) - batch[1]).square().mean() / 0.02 + params["a"].square().sum() / (2 * N)


def start(device):
    return {"a": torch.randn(1, 4, device=device), "b": torch.randn(4, 1, device=device)}


def require_on(device, *trees):
    for tree in trees:
        leaves = [x for x in tree.values() if isinstance(x, torch.Tensor)]
        assert leaves and all(x.device.type == device.type and bool(x.isfinite().all()) for x in leaves)


# loops of torch


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["SGHMC", "Adam"])
def test_a_loop_that_collects_and_predicts(name, device):
    x, y = regression(device)
    model, likelihood = network(device), bc.likelihoods.gaussian(0.01)
    optimizer = getattr(bc.optim, name)(model.parameters(), lr=1e-3, temperature=1 / N, weight_decay=1 / N)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 64)
    keep = bc.collect(model, optimizer, every=8, after=16)
    for _ in range(16):
        for rows in torch.randperm(N, device=device).split(16):
            descend(optimizer, (-likelihood.log_prob(model(x[rows]), y[rows]).mean()))
            schedule.step()
    require_on(device, dict(model.named_parameters()), dict(model.named_buffers()))
    mixture = likelihood.mixture(keep.predict([x], reduce="stack"))
    low, high = mixture.interval(0.9)
    assert bool((low < high).all()) and bool(mixture.crps(y.to(low.device)).isfinite().all())
    optimizer.load_state_dict(optimizer.state_dict())


# functional loops


@pytest.mark.slow
def test_chains_on_disk_go_on_and_are_judged(device, tmp_path):
    pytest.importorskip("arviz_stats")
    x, y = regression(device)
    chain = partial(bc.sghmc, temperature=1 / N)
    chains = bc.parallel(lambda lr: bc.make_step(loss, chain(lr)), 2, each={"lr": torch.tensor([1e-3, 1e-3])})
    params = bc.stack([start(device), start(device)])
    state = chains.init(chain, params, seed=0)
    draw = partial(bc.sample, chains, params, state, bc.epochs((x, y), 16, seed=0), burn_in=40, path=tmp_path / "draws")
    first, whole = draw(steps=60), draw(steps=120)
    assert len(whole) > len(first) and whole.complete
    require_on(device, whole.params, {"loss": whole.loss})
    opened = bc.Draws.open(tmp_path / "draws")
    for name, leaf in whole.params.items():
        torch.testing.assert_close(opened.params[name], leaf.cpu(), rtol=0, atol=0)
    for there in (opened.to(device), bc.Draws.open(tmp_path / "draws", like=params)):
        require_on(device, there.params, {"predicted": there.predict(outputs, [(x, y)])})
    found = bc.diagnostics.doctor(whole, chain(1e-3), loss, [(x, y)], posterior_temperature=1 / N)
    assert isinstance(found.is_healthy, bool)
    assert all(bool(value.isfinite().all()) for value in bc.diagnostics.r_hat(whole).values())


def at_temperature(lr):
    return bc.sghmc(lr, temperature=1 / N)


def heated(params, data, device):
    found = bc.diagnostics.heating(at_temperature(1e-5), bc.diagnostics.gradient_noise(loss, params, data, rank=2))
    assert found.worst > 0
    return found


def with_guard(params, data, device):
    guard = bc.diagnostics.HeatGuard(steps_per_epoch=4)
    step, tx = bc.make_step(loss, at_temperature(1e-5), heat_guard=guard), at_temperature(1e-5)
    bc.sample(step, params, tx.init(params), data, steps=240)
    assert guard.readings
    return guard


def less_noise(params, data, device):
    batches = list(zip(*(x.split(16) for x in data.data)))
    for gradients in (bc.gradients.svrg(loss, batches), bc.gradients.control_variates(loss, batches, params)):
        step = bc.make_step(gradients, bc.sgld(1e-4, temperature=1 / N))
        p, state = params, step.init(params)
        state = step.refresh(p, state) if hasattr(step, "refresh") else state
        for batch in batches:
            p, state, _ = step(p, state, batch)
        require_on(device, p)
    return p


# Of parameters, batches that are reshuffled, and a device.
CALLS = {
    "suggest_lr": lambda p, d, _: bc.suggest_lr(at_temperature, loss, p, d, epochs=50),
    "ksd": lambda p, d, _: bc.diagnostics.ksd(p["b"].expand(8, 4, 1)[..., 0] * 1.0, lambda w: -w),
    "heating": heated,
    "heat guard": with_guard,
    "control variates": less_noise,
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", CALLS)
def test_other_calls_on_parameters_of_a_device(name, device):
    assert CALLS[name](start(device), bc.epochs(regression(device), 16, seed=0), device) is not None


def test_what_is_saved_comes_back_where_it_was(device, tmp_path):
    params = start(device)
    bc.save(tmp_path / "params.safetensors", params)
    again = bc.load(tmp_path / "params.safetensors", like=params)
    require_on(device, again)
    torch.testing.assert_close(again, params)


@pytest.mark.parametrize("name", ["SGD", "SGLD", "AdamW", "RMSprop", "NAdam", "Adagrad"])
def test_optimizer_classes(name, device):
    x, y = regression(device)
    model = network(device)
    optimizer = getattr(bc.optim, name)(model.parameters(), lr=1e-4, temperature=1 / N)
    for _ in range(3):
        descend(optimizer, (model(x) - y).square().mean())
    optimizer.load_state_dict(optimizer.state_dict())
    require_on(device, dict(model.named_parameters()))


# one call


@pytest.mark.slow
def test_the_posterior_in_one_call(device, tmp_path):
    x, y = classes(device)
    ensemble = bc.posterior_ensemble(
        lambda: network(device, 2, 2), (x, y), bc.likelihoods.categorical(), members=2, steps=100, lr=0.05, batch_size=16,
        progress=False, path=tmp_path,
    )  # fmt: skip
    prediction = ensemble.predict(x)
    require_on(device, {"scores": prediction.log_prob(y), "samples": prediction.sample(4), "mean": prediction.mean})
    ensemble.save(tmp_path / "saved.safetensors")
    again = bc.ensemble.Ensemble.open(
        tmp_path / "saved.safetensors", lambda: network(device, 2, 2), bc.likelihoods.categorical()
    )
    torch.testing.assert_close(again.predict(x).mean, prediction.mean)


# Gaussian posteriors


@pytest.mark.sweep(1)
@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "dense"])
def test_laplace_after_training(structure, device):
    x, y = classes(device)
    model, likelihood = network(device, 2, 2).eval(), bc.likelihoods.categorical()
    fitted = bc.fit_laplace(model, likelihood, [(x, y)], structure=structure, subset="all")
    probabilities = fitted.predict(x)
    assert probabilities.device.type == device.type and fitted.likelihood_scale > 0
    fitted.load_state_dict(fitted.state_dict())
    torch.testing.assert_close(fitted.predict(x), probabilities)


def test_training_by_the_evidence(device):
    training = train_by_evidence(network(device), bc.likelihoods.gaussian(), [regression(device)], epochs=4, every=2)
    assert bool(torch.as_tensor(training.log_evidence).isfinite().all())


# The device of :mod:`tests.pretended` refuses what CUDA refuses, and computes what the CPU computes


@pytest.mark.parametrize(
    "mixed",
    [
        lambda x: x + torch.ones(3),
        lambda x: torch.where(torch.ones(3) > 0, x, x),
        lambda x: torch.stack([x, torch.ones(3)]),
        lambda x: torch.arange(3)[x.long()],
        lambda x: x.new_zeros(3).normal_(generator=torch.Generator()),
        lambda x: torch.randn(3, device=DEVICE, generator=torch.Generator()),
        lambda x: torch.vmap(lambda a, b: a * b)(x, torch.ones(3)),
    ],
)
def test_what_is_refused(mixed):
    with Here(), pytest.raises(RuntimeError, match=r"same device|device type for generator"):
        mixed(torch.rand(3, device=DEVICE))
