"""Chains over a LoRA adapter: the frozen base stays what it is, to the bit, and each chain is its single self."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import bayesopt_chain as bc


def adapted(dropout=0.2):
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["0", "3"], r=2, lora_dropout=dropout, init_lora_weights=False)
    return peft.get_peft_model(base, config)


DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(24, 4, dtype=torch.float64, generator=DATA), torch.randint(3, (24,), generator=DATA)


def made(model, tx):
    forward, params, buffers = bc.make_functional(model, inputs=lambda batch: (batch["x"],))

    def loss(params, batch, buffers):
        logits, buffers = forward.with_buffers(params, batch, buffers)
        return cross_entropy(logits, batch["labels"]), buffers

    return bc.make_step(loss, tx, buffers=buffers), params, forward


def test_chains_over_an_adapter_leave_the_base_to_the_bit_and_are_their_single_selves():
    model = adapted()
    frozen = copy.deepcopy(model.state_dict())
    tx = bc.sghmc(0.02, temperature=1 / 24)
    step, params, forward = made(model, tx)
    assert params.keys() == {n for n, p in model.named_parameters() if p.requires_grad} and all(
        "lora_" in n for n in params
    )
    batch, start = {"x": X, "labels": Y}, bc.stack([params] * 3)
    chains = bc.parallel(step, 3)
    state = chains.init(tx, start)
    singles = bc.unstack(state)
    draws = bc.sample(chains, start, state, batch, steps=4)
    assert all(torch.equal(frozen[name], x) for name, x in model.state_dict().items())
    for i, s in enumerate(singles):
        p = params
        for _ in range(4):
            p, s, _ = step(p, s, batch)
        for name in p:
            torch.testing.assert_close(draws[3][name][i], p[name], rtol=1e-10, atol=1e-12)
    model.eval()
    assert draws.predict(forward, [batch], transform=lambda f: f.softmax(-1)).shape == (24, 3)
    draw = bc.unstack(draws[3])[0]
    bc.write_back(model, draw, bc.unstack(draws.last[1].buffers)[0])
    with torch.no_grad():
        want = forward(draw, batch)
        torch.testing.assert_close(model(X), want)
        torch.testing.assert_close(model.merge_and_unload()(X), want)


def test_an_adapters_laplace_posterior_is_the_prior_of_its_next_task():
    model = adapted(dropout=0.0).eval()
    frozen = copy.deepcopy(model.state_dict())
    forward, params, _ = bc.make_functional(model)
    likelihood, laplace = bc.likelihoods.categorical(), bc.laplace()
    estimate = bc.curvature.ggn(forward, likelihood, "kronecker")

    def learn(batch, prior):
        given = {"prior": prior} if isinstance(prior, bc.Gaussian) else {"prior_precision": prior}
        tx = bc.chain(bc.links.add_gaussian_prior(prior, n=len(batch[0])), bc.sgd(0.01, 0.9))
        step = bc.make_step(lambda p, b: cross_entropy(forward(p, b), b[1]), tx)
        p, state = params, tx.init(params)
        for _ in range(40):
            p, state, _ = step(p, state, batch)
        _, state = laplace.update(p, laplace.init(p), curvature=estimate(p, batch))
        return laplace.posterior(state, p, **given)

    one, two = ((X[rows], (X[rows, i] > 0).long()) for i, rows in enumerate((slice(0, 12), slice(12, 24))))
    first, alone = learn(one, 1.0), learn(two, 1.0)
    second = learn(two, first)

    def away(posterior):
        """How far a mean is from the first one, in the first posterior's standard deviations."""
        return float(first.precision.quad({name: m - first.mean[name] for name, m in posterior.mean.items()})) ** 0.5

    assert 0 < away(second) < away(alone)
    assert all(torch.equal(frozen[name], x) for name, x in model.state_dict().items())
