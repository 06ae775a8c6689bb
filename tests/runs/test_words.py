"""What used to be an error about something else says what is wrong and what to do."""

import pytest
import torch

import bayesopt_chain as bc

TX = bc.sghmc(0.1, temperature=0.1)


def loss(params, batch):
    return (params["w"] ** 2).sum()


def test_inference_mode_is_named():
    params = {"w": torch.zeros(3)}
    state = TX.init(params)
    with torch.inference_mode(), pytest.raises(ValueError, match="inference_mode"):
        bc.make_step(loss, TX)(params, state, None)


def test_a_forgotten_axis_of_chains_is_named_where_batch_norm_notices_it():
    forward, params, buffers = bc.make_functional(torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)))

    def fn(params, batch, buffers):
        out, buffers = forward.with_buffers(params, batch, buffers)
        return out.square().mean(), buffers

    chains = bc.parallel(bc.make_step(fn, TX, buffers=buffers), 2)
    start = bc.stack([params, params])
    state = chains.init(TX, start)
    with pytest.raises(RuntimeError, match=r"bc\.parallel\(step, n, batch_dim=0\)"):
        chains(start, state, torch.randn(2, 8, 4))


def test_tensors_on_the_device_meta_are_refused_before_the_run():
    with torch.device("meta"):
        params = {"w": torch.zeros(3)}
        state = TX.init(params)
    with pytest.raises(ValueError, match=r"w.* on the device meta"):
        bc.sample(bc.make_step(loss, TX), params, state, None, steps=3)


def test_a_default_device_of_meta_leaves_the_draws_where_the_chain_is():
    params = {"w": torch.zeros(3)}
    state = TX.init(params)
    with torch.device("meta"):
        draws = bc.sample(bc.make_step(loss, TX), params, state, None, steps=3)
    assert draws.steps.tolist() == [1, 2, 3] and draws.params["w"].device.type == "cpu"


def test_an_optimizer_where_a_chain_belongs_is_named():
    optimizer = bc.optim.SGHMC([torch.zeros(3, requires_grad=True)], lr=0.1, temperature=0.01)
    noise = bc.diagnostics.gradient_noise(lambda w, b: (w - b).square().mean(), torch.zeros(1), [torch.ones(2, 1)] * 3)
    with pytest.raises(TypeError, match=r"SGHMC is an optimizer.*bc\.sgd\(lr=0\.1"):
        bc.diagnostics.heating(optimizer, noise)


def test_one_batch_and_a_list_of_one_predict_alike():
    module = torch.nn.Linear(3, 2)
    draws = bc.Draws.from_trees([dict(bc.make_functional(module).params)] * 2)
    x, y = torch.randn(5, 3), torch.zeros(5)
    forward = bc.make_functional(module).forward
    want = draws.predict(forward, [x])
    for batches in (x, (x, y), [(x, y)], torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 2)):
        torch.testing.assert_close(draws.predict(forward, batches), want)
    torch.testing.assert_close(draws.predict(module, x), want)


def test_a_log_likelihood_with_folded_chains_is_refused():
    pytest.importorskip("arviz")
    draws = bc.Draws.from_trees([{"w": torch.randn(2, 3)} for _ in range(5)], chains=2)
    with pytest.raises(ValueError, match=r"need \[5, 2, N\]: unfold the chains"):
        draws.to_arviz(log_likelihood=torch.randn(10, 7))
