"""What used to be an error about something else says what is wrong and what to do."""

import optree
import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.random import compiled

TX = bc.sghmc(0.1, temperature=0.1)


def loss(params, batch):
    return (params["w"] ** 2).sum()


def test_inference_mode_is_named():
    params = {"w": torch.zeros(3)}
    state = TX.init(params)
    model = torch.nn.Linear(3, 1)
    step = bc.optim.as_step(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).mean())
    with torch.inference_mode():
        for call in (
            lambda: bc.make_step(loss, TX)(params, state, None),
            lambda: step(step.params, step.state, torch.ones(2, 3)),
            lambda: bc.sample(bc.make_step(loss, TX), params, state, None, steps=2),
        ):
            with pytest.raises(ValueError, match="inference_mode"):
                call()


def test_chains_start_from_a_transformation_or_from_a_step_and_from_nothing_else():
    params = {"w": torch.zeros(2, 3)}
    step = bc.make_step(loss, TX)
    chains = bc.parallel(step, 2)
    of_tx, of_step = chains.init(TX, params, seed=1), chains.init(step, params, seed=1)
    assert all(map(torch.equal, optree.tree_leaves(of_tx), optree.tree_leaves(of_step)))
    with pytest.raises(TypeError, match=r"parallel: init takes \(tx, params\).*got dict"):
        chains.init(params, TX)


def test_a_user_without_a_home_is_told_where_kernels_can_be_kept(monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(compiled.Path, "home", nowhere)
    with pytest.raises(PermissionError, match="no home directory; set XDG_CACHE_HOME"):
        compiled.cache_folder()


@pytest.mark.slow  # of the import of torch's compiler
@pytest.mark.filterwarnings("ignore:Dynamo does not know", "ignore:make_step. torch.compile leaves")
def test_what_torch_compile_cannot_follow_runs_as_it_is():
    """Dynamo knows neither functorch's levels nor optree's trees: it leaves steps and updates to Python, which are right."""
    params, gradient = {"w": torch.ones(3)}, {"w": torch.full((3,), 2.0)}
    state, step = TX.init(params), bc.make_step(loss, TX)
    for call in (
        lambda: step(params, state, None)[:2],
        lambda: TX.update(gradient, state, params=params, inplace=False),
    ):
        compiled = torch.compile(call, backend="eager")()
        assert all(map(torch.equal, optree.tree_leaves(compiled), optree.tree_leaves(call())))
    with pytest.warns(UserWarning, match=r"torch\.compile leaves this step as it is.*bc\.capture\(step"):
        torch.compile(step, backend="eager")(params, state, None)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="_compiled_by_bc_capture_only"):
        torch.compile(step, backend="eager", fullgraph=True)(params, state, None)


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


ALWAYS = {
    "constant": lambda: TX,
    "schedule": lambda: bc.sghmc(bc.schedules.cosine(0.1, 10), temperature=0.1),
    "cyclical": lambda: bc.samplers.cyclical(0.1, temperature=0.1, cycle=3, burn_in=1),
}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", ALWAYS)
def test_the_default_device_changes_no_draw(name, inplace):
    """On ``meta`` a tensor without a device would have no numbers: nothing of a step is made there."""

    def drawn():
        tx, params = ALWAYS[name](), {"w": torch.full((3,), 0.3, device="cpu")}
        batches = bc.epochs(torch.arange(12.0, device="cpu"), 4, seed=1)
        step = bc.make_step(lambda p, batch: ((p["w"] - batch.mean()) ** 2).sum(), tx, inplace=inplace)
        return bc.sample(step, params, tx.init(params), batches, steps=5, seed=1)

    want = drawn()
    with torch.device("meta"):
        draws = drawn()
    assert draws.steps.tolist() == [1, 2, 3, 4, 5] and torch.equal(draws.params["w"], want.params["w"])


def test_one_batch_and_a_list_of_one_predict_alike():
    module = torch.nn.Linear(3, 2)
    draws = bc.Draws.from_trees([dict(bc.make_functional(module).params)] * 2)
    x, y = torch.randn(5, 3), torch.zeros(5)
    forward = bc.make_functional(module).forward
    want = draws.predict(forward, [x])
    for batches in (x, (x, y), [(x, y)], torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 2)):
        torch.testing.assert_close(draws.predict(forward, batches), want)
    torch.testing.assert_close(draws.predict(module, x), want)


def on_meta():
    params = {"w": torch.zeros(3, device="meta")}
    bc.sample(bc.make_step(loss, TX), params, TX.init(params), None, steps=3)


def heat_of_an_optimizer():
    optimizer = bc.optim.SGHMC([torch.zeros(3, requires_grad=True)], lr=0.1, temperature=0.01)
    noise = bc.diagnostics.gradient_noise(lambda w, b: (w - b).square().mean(), torch.zeros(1), [torch.ones(2, 1)] * 3)
    bc.diagnostics.heating(optimizer, noise)


def folded_chains():
    pytest.importorskip("arviz")
    draws = bc.Draws.from_trees([{"w": torch.randn(2, 3)} for _ in range(5)], chains=2)
    draws.to_arviz(log_likelihood=torch.randn(10, 7))


def batches_of_chains(batch_dim, count):
    """All chains would take the batches of all, 6 data in the place of 2, and nothing would look wrong."""
    chains = bc.parallel(bc.make_step(lambda w, x: (w - x).square().mean(), TX), 3, batch_dim=batch_dim)
    data, start = bc.epochs(torch.randn(6), 2, chains=count), torch.zeros(3)
    bc.sample(chains, start, chains.init(TX, start), data, steps=3)


EACH = r"bc\.parallel\(step, 3, batch_dim=0\) with bc\.epochs\(\.\.\., chains=3\)"


@pytest.mark.parametrize(
    "act, error, says",
    [
        (on_meta, ValueError, r"w.* on the device meta"),
        (heat_of_an_optimizer, TypeError, r"SGHMC is an optimizer.*bc\.sgd\(lr=0\.1"),
        (folded_chains, ValueError, r"need \[5, 2, N\]: unfold the chains"),
        (lambda: batches_of_chains(None, 3), ValueError, EACH),
        (lambda: batches_of_chains(0, None), ValueError, EACH),
    ],
)
def test_what_is_refused_is_named(act, error, says):
    with pytest.raises(error, match=says):
        act()
