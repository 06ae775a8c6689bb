"""A captured step is the step: same results, same stream, same resumption, whatever changes between replays."""

import contextlib
import copy
import pickle
import warnings

import optree
import pytest
import torch
import torchopt
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain.loop.capture import build as capture_module
from bayesopt_chain.loop.capture import replays
from bayesopt_chain.testing._laws import (
    copies_and_pickles_continue_exactly,
    the_same_state_gives_the_same_update,
    updates_keep_dtype_and_shape,
)

EAGER = "eager"
INDUCTOR = pytest.param(
    "inductor",
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(not replays.compiler_found(), reason="needs a C++ compiler"),
    ],
)
BACKENDS = [EAGER, INDUCTOR]


def loss(params, batch):
    x, y = batch
    return ((x @ params["w"] + params["b"] - y) ** 2).mean(), {"norm": params["w"].norm(), "name": "regression"}


def setup(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    batch = torch.randn(8, 20, generator=g, dtype=dtype), torch.randn(8, generator=g, dtype=dtype)
    return {"w": torch.randn(20, generator=g, dtype=dtype), "b": torch.zeros((), dtype=dtype)}, batch


def assert_close(mine, other, tolerance=2e-5):
    for x, y in zip(optree.tree_leaves(mine), optree.tree_leaves(other), strict=True):
        if torch.is_tensor(x):
            assert x.dtype == y.dtype
            torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)
        else:
            assert x == y


TEMPERATURE = torch.tensor(0.05)
CHAINS = {
    "sgd": lambda: bc.sgd(0.05, 0.9, weight_decay=0.1),
    "sghmc": lambda: bc.sghmc(0.05, temperature=0.05),
    "nesterov": lambda: bc.sgd(0.05, 0.9, nesterov=True, temperature=0.05),
    "schedules": lambda: bc.sghmc(lambda c: 0.05 / (1 + 0.1 * c), temperature=TEMPERATURE),
    "adam": lambda: bc.adam(0.01, temperature=0.01),
}


@pytest.mark.parametrize(
    "name, backend",
    [(name, EAGER) for name in CHAINS]
    + [pytest.param(name, *INDUCTOR.values, marks=INDUCTOR.marks) for name in ("sghmc", "adam")],
)
def test_captured_equals_eager(name, backend):
    params, batch = setup()
    tx = CHAINS[name]()
    step, state = bc.make_step(loss, tx), tx.init(params)
    fast = bc.capture(step, params, state, batch, backend=backend)
    assert fast.backend == backend
    eager = mine = (params, state)
    before = copy.deepcopy((params, state))
    for k in range(4):
        data = batch[0] + k, batch[1]
        *eager, want = step(*eager, data)
        *mine, info = fast(*mine, data)
        assert_close(mine, eager)
        assert_close(info, want)
    assert_close((params, state), before, 0.0)  # the arguments of capture stay as they were
    if backend == "inductor":  # nothing of torch's stands between the call and the generated function
        assert fast._program.replay.program == fast._program.replay.generated[0].current_callable


@pytest.mark.parametrize("backend", BACKENDS)
def test_leaves_of_many_sizes_and_two_dtypes_under_schedules(backend):
    """More than a run of normals a leaf, two groups of leaves, and a temperature that changes between the calls."""
    temperature, g = torch.tensor(0.05), torch.Generator().manual_seed(1)
    tx = bc.sghmc(lambda c: 0.05 / (1 + 0.1 * c), temperature=lambda c: temperature * (1 + c))
    sizes = {"a": (3, 100), "b": (7,), "c": (257,), "d": ()}
    params = {k: torch.randn(s, generator=g, dtype=torch.float64 if k > "b" else None) for k, s in sizes.items()}

    def quadratic(params, batch):
        return sum((x.double() ** 2).sum() for x in params.values()) * batch

    step, state, batch = bc.make_step(quadratic, tx), tx.init(params), torch.tensor(0.5)
    fast = bc.capture(step, params, state, batch, steps=2, draws=True, backend=backend)
    eager = mine = (params, state)
    for t in (0.05, 0.0, 2.0):
        temperature.fill_(t)
        *mine, info = fast(*mine, batch)
        for k in range(2):
            *eager, _ = step(*eager, batch)
            assert_close({name: x[k] for name, x in info.draws.items()}, eager[0])
        assert_close(mine, eager)


def test_several_steps_a_call_with_every_draw():
    params, batch = setup()
    tx = bc.sghmc(0.05, temperature=0.05)
    step, state = bc.make_step(loss, tx), tx.init(params)
    many = tuple(torch.stack([x, x + 1, x - 1]) for x in batch)
    fast = bc.capture(step, params, state, many, steps=3, batch_dim=0, draws=True, backend=EAGER)
    eager, draws, losses = (params, state), [], []
    for k in range(3):
        *eager, info = step(*eager, tuple(x[k] for x in many))
        draws.append(eager[0])
        losses.append(info.loss)
    *mine, info = fast(params, state, many)
    assert_close(mine, eager)
    assert_close(info.draws, bc.stack(draws))
    assert_close(info.loss, torch.stack(losses))
    assert info.aux["name"] == "regression" and info.aux["norm"].shape == (3,)
    one = bc.capture(step, params, state, batch, draws=True, backend=EAGER)
    mine, _, info = one(params, state, batch)
    assert_close(info.draws, bc.stack([mine]))
    assert info.loss.shape == () and info.aux["name"] == "regression"
    assert_close(one(params, state, batch)[2], info, 0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_temperature_and_learning_rate_change_between_replays(backend):
    params, batch = setup()
    temperature, lr = torch.tensor(0.05), torch.tensor(0.05)
    tx = bc.sghmc(lr, temperature=temperature)
    step, state = bc.make_step(loss, tx), tx.init(params)
    fast = bc.capture(step, params, state, batch, backend=backend)
    eager = mine = (params, state)
    for t, rate in ((0.05, 0.05), (0.0, 0.05), (1.0, 0.01), (0.2, 0.1)):
        temperature.fill_(t)
        lr.fill_(rate)
        *eager, _ = step(*eager, batch)
        *mine, _ = fast(*mine, batch)
        assert_close(mine, eager)
    if backend == "inductor":  # which is handed such a tensor twice, and called directly all the same
        assert fast._program.replay.program == fast._program.replay.generated[0].current_callable


def test_buffers_of_the_model_are_read_and_written():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    params, x = {k: p.detach() for k, p in model.named_parameters()}, torch.randn(8, 3)

    def module_loss(params, batch):
        return torch.func.functional_call(model, params, (batch,)).square().mean()

    tx = bc.sgd(0.05)
    step, state = bc.make_step(module_loss, tx), tx.init(params)
    fresh = copy.deepcopy(model.state_dict())
    want, *_ = step(params, state, x)
    statistics = copy.deepcopy(dict(model.named_buffers()))
    model.load_state_dict(fresh)
    fast = bc.capture(step, params, state, x, backend=EAGER)
    mine, *_ = fast(params, state, x)
    assert_close(mine, want)
    assert_close(dict(model.named_buffers()), statistics)


@pytest.mark.parametrize(
    "backend, loop", [(EAGER, False), (EAGER, True), pytest.param(*INDUCTOR.values, False, marks=INDUCTOR.marks)]
)
def test_many_chains_are_captured_with_their_own_temperatures(backend, loop):
    each = {"temperature": torch.tensor([0.0, 0.1, 0.3])}

    def tx(temperature):
        return bc.sghmc(0.05, temperature=temperature)

    def numeric(params, batch):
        return loss(params, batch)[0]

    chains = bc.parallel(lambda temperature: bc.make_step(numeric, tx(temperature)), 3, each=each, loop=loop)
    params, batch = setup()
    params = bc.stack([params] * 3)
    state = chains.init(tx, params)
    fast = bc.capture(chains, params, state, batch, backend=backend)
    eager = mine = (params, state)
    for _ in range(3):
        *eager, _ = chains(*eager, batch)
        *mine, info = fast(*mine, batch)
    assert_close(mine, eager)
    assert info.loss.shape == (3,)


@pytest.mark.parametrize(
    "backend, dtype",
    [
        (EAGER, torch.float32),
        (EAGER, torch.float64),
        pytest.param(*INDUCTOR.values, torch.float64, marks=INDUCTOR.marks),
    ],
)
def test_it_resumes_exactly_here_and_in_the_eager_step(backend, dtype):
    params, batch = setup(dtype)
    tx = bc.sghmc(0.05, temperature=0.05)
    step, state = bc.make_step(loss, tx), tx.init(params)
    fast = bc.capture(step, params, state, batch, backend=backend, clone=True)
    for _ in range(3):
        params, state, _ = fast(params, state, batch)
    saved = pickle.loads(pickle.dumps((params, state)))
    went_on, *_ = fast(*fast(params, state, batch)[:2], batch)
    resumed, *_ = fast(*fast(*saved, batch)[:2], batch)
    assert all(torch.equal(went_on[k], resumed[k]) for k in went_on)
    eager, *_ = step(*step(*saved, batch)[:2], batch)
    assert_close(eager, went_on)


@pytest.mark.parametrize("backend", [EAGER])
def test_outputs_alias_static_buffers_unless_cloned(backend):
    params, batch = setup()
    tx = bc.sgd(0.05)
    step, state = bc.make_step(loss, tx), tx.init(params)
    fast = bc.capture(step, params, state, batch, backend=backend)
    first, state, info = fast(params, state, batch)
    value, kept = first["w"].clone(), info.loss.clone()
    second, state, _ = fast(first, state, batch)
    assert second["w"].data_ptr() == first["w"].data_ptr() and not torch.equal(first["w"], value)
    assert torch.equal(info.loss, kept)
    cloned = bc.capture(step, params, state, batch, backend=backend, clone=True)
    first, state, _ = cloned(params, state, batch)
    value = first["w"].clone()
    cloned(first, state, batch)
    assert torch.equal(first["w"], value)


def test_what_the_user_changes_between_calls_is_seen():
    """In the containers that were handed back, in the tensors, and in a batch that is given again."""
    params, batch = setup()
    tx = bc.sgd(0.05, 0.9)
    step, state = bc.make_step(loss, tx), tx.init(params)
    fast = bc.capture(step, params, state, list(batch), backend=EAGER)
    mine, data, eager = fast(params, state, list(batch))[:2], list(batch), step(params, state, batch)[:2]

    def both():
        nonlocal mine, eager
        eager = step(*eager, tuple(data))[:2]
        mine = fast(*mine, data)[:2]
        assert_close(mine, eager)

    both()
    mine[0]["w"], eager[0]["w"] = torch.ones(20), torch.ones(20)
    both()
    data[0] = data[0] + 1
    both()
    data[0].mul_(2)
    mine[0]["w"].add_(1)
    eager[0]["w"] = eager[0]["w"] + 1
    mine[1][0].trace[0].zero_()
    eager[1][0].trace[0].zero_()
    both()
    mine[0].pop("b")
    with pytest.raises(ValueError, match="structure"):
        fast(*mine, data)


def test_trees_of_tuples_are_handed_back_as_they_are():
    batch = torch.randn(5, 3), [torch.randn(5)]
    tx, params = bc.sgd(0.05, 0.9), (torch.zeros(3), (torch.zeros(()),))

    def linear(params, batch):
        return ((batch[0] @ params[0] + params[1][0] - batch[1][0]) ** 2).mean()

    step, state = bc.make_step(linear, tx), tx.init(params)
    fast = bc.capture(step, params, state, batch, backend=EAGER)
    first, kept, _ = fast(params, state, batch)
    batch[1][0] = batch[1][0] + 1  # a list inside a tuple
    second, again, _ = fast(first, kept, batch)
    assert first is second and kept is again
    eager = step(*step(params, state, (batch[0], [batch[1][0] - 1]))[:2], batch)
    assert_close(second, eager[0])
    assert_close(fast(params, state, batch)[0], step(params, state, batch)[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_that_share_memory(backend):
    """One tensor twice in the batch, once; and buffers, written by the step, that are views of one tensor."""
    both, x, y = torch.zeros(2, 3), torch.randn(3), torch.randn(3)
    tx, params = bc.sgd(0.05), torch.zeros(3)

    def loss(params, batch):
        both[0].add_(batch[0].detach())
        both[1].add_(both[0])
        return ((params - batch[0] * batch[1]) ** 2).sum()

    step, state = bc.make_step(loss, tx), tx.init(params)
    fast = bc.capture(step, params, state, (x, x), backend=backend)
    assert torch.equal(both, torch.zeros(2, 3))
    for batch in ((x, x), (x, y), (y, y), (x, y)):
        before = both.clone()
        want = step(params, state, batch)[0]
        wrote = both.clone()
        both.copy_(before)
        assert_close(fast(params, state, batch)[0], want)
        assert_close(both, wrote)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_old_values_that_the_state_keeps(backend, steps):
    """The parameters before the step, a view of them, and two tensors that change places: none is read once overwritten."""

    def step(params, state, batch):
        now = {"before": params, "reversed": params.view(1, 2), "a": state["b"], "b": state["a"]}
        return params * batch + state["reversed"][0], now, bc.Info(params.sum(), params)

    params, batch = torch.tensor([1.0, 2.0]), torch.tensor(1.5)
    state = {"before": params - 1, "reversed": params.view(1, 2), "a": torch.zeros(3), "b": torch.ones(3)}
    fast = bc.capture(step, params, state, batch, steps=steps, backend=backend)
    eager = mine = (params, state)
    for _ in range(3):
        for _ in range(steps):
            *eager, _ = step(*eager, batch)
        *mine, _ = fast(*mine, batch)
        assert_close(mine, eager, 0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_that_is_the_returned_parameters(backend):
    """A static buffer may be read as a batch (an anchor, a teacher): it has its value from before the step."""

    def pulled(params, batch):
        return ((params["w"] - 2 * batch.roll(1)) ** 2).sum() + (batch.cumsum(0) * params["w"].flip(0)).sum()

    tx, params = bc.sgd(0.1, 0.9), {"w": torch.randn(40)}
    step, state = bc.make_step(pulled, tx), tx.init(params)
    fast = bc.capture(step, params, state, params["w"] + 1, backend=backend)
    eager = mine = (params, state)
    for _ in range(3):
        eager = step(*eager, eager[0]["w"])[:2]
        mine = fast(*mine, mine[0]["w"])[:2]
        assert_close(mine, eager)


def test_an_update_with_gradients_as_its_batch_is_captured_too():
    tx = bc.sghmc(0.05, temperature=0.05)

    def update(params, state, grads):
        updates, state = tx.update(grads, state, params=params, inplace=False)
        return optree.tree_map(torch.add, params, updates), state, bc.Info(torch.zeros(()), ())

    params = {"w": torch.randn(70)}
    grads, state = {"w": torch.randn(70)}, tx.init(params)
    mine, _, _ = bc.capture(update, params, state, grads, backend=EAGER)(params, state, grads)
    want, _, _ = update(params, state, grads)
    assert_close(mine, want, 0.0)


def test_another_shape_structure_or_number_is_refused_by_name():
    params, batch = setup()
    tx = bc.sgd(0.05, 0.9)
    step, state = bc.make_step(loss, tx), tx.init(params)
    fast = bc.capture(step, params, state, batch, backend=EAGER)
    with pytest.raises(ValueError, match=r"batch, leaf 0: \(5, 20\).*drop_last"):
        fast(params, state, (batch[0][:5], batch[1][:5]))
    with pytest.raises(ValueError, match=r"params, leaf 1: .*float64"):
        fast({**params, "w": params["w"].double()}, state, batch)
    with pytest.raises(ValueError, match="structure"):
        fast({"w": params["w"]}, state, batch)
    with pytest.raises(ValueError, match="structure"):
        fast(params, state, [*batch])
    with pytest.raises(ValueError, match="steps"):
        bc.capture(step, params, state, batch, steps=0)
    with pytest.raises(ValueError, match="batch_dim"):
        bc.capture(step, params, state, batch, batch_dim=0)
    with pytest.raises(ValueError, match="no 3 steps"):
        bc.capture(step, params, state, batch, steps=3, batch_dim=0)
    with pytest.raises(TypeError, match="tensors only"):
        bc.capture(step, params, [1.0], batch)


def branching(params, batch):
    w = params["w"]
    return (w**2).sum() if w.sum() > 0 else (w**4).sum()


def reading(params, batch):
    return (params["w"] * params["w"].norm().item()).sum()


def selecting(params, batch):
    w = params["w"]
    return w[w > 0].sum()


@pytest.mark.parametrize(
    "bad, line",
    [(branching, "if w.sum"), (reading, "item"), (selecting, "w > 0")],
    ids=["branch", "item", "shape"],
)
def test_what_cannot_be_captured_is_named_with_its_line(bad, line):
    params, _ = setup()
    tx = bc.sgd(0.1)
    with pytest.raises(bc.CaptureError, match=rf"test_capture.py:\d+: `.*{line}"):
        bc.capture(bc.make_step(bad, tx), params, tx.init(params), (), backend=EAGER)


def test_without_a_compiler_it_stays_eager_and_says_so(monkeypatch):
    monkeypatch.setattr(capture_module, "compiler_found", lambda: False)
    monkeypatch.setattr(capture_module, "_said", False)
    params, batch = setup()
    tx = bc.sgd(0.05)
    step, state = bc.make_step(loss, tx), tx.init(params)
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler"):
        fast = bc.capture(step, params, state, batch)
    assert fast.backend == "eager"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bc.capture(step, params, state, batch)


class AsTransformation:
    """A chain whose every update is a captured call, so that the library's laws can be run on it."""

    def __init__(self, tx):
        self.tx = tx
        self.init = tx.init

    def update(self, grads, state, *, params, inplace):
        def step(params, state, grads):
            updates, state = self.tx.update(grads, state, params=params, inplace=False)
            return updates, state, bc.Info(torch.zeros(()), ())

        fast = bc.capture(step, params, state, grads, backend=EAGER, clone=True)
        updates, state, _ = fast(params, state, grads)
        return updates, state


@pytest.mark.slow
@pytest.mark.parametrize(
    "law",
    [copies_and_pickles_continue_exactly, the_same_state_gives_the_same_update, updates_keep_dtype_and_shape],
    ids=lambda law: law.__name__,
)
@pytest.mark.parametrize("name", ["sghmc", "schedules"])
def test_the_laws_hold_for_captured_updates(law, name):
    law(lambda: AsTransformation(CHAINS[name]()))


@pytest.fixture
def rehearsed(monkeypatch):
    """CUDA graphs rehearsed on the CPU: what is recorded runs again at every replay, and recording leaves no trace."""
    last: list = []
    programs = replays.Eager, replays.Compiled
    runs = {kind: kind.__call__ for kind in programs}

    def remembered(self, batch):
        last[:] = [self, batch]
        return runs[type(self)](self, batch)

    class Graph:
        def replay(self):
            program, batch, info = self.recorded
            for mine, x in zip(info, runs[type(program)](program, batch), strict=True):
                mine.copy_(x)

    @contextlib.contextmanager
    def record(graph, stream, capture_error_mode):
        program, batch = last
        before = [t.clone() for t in program.body.static]
        info: list = []
        for kind, run in runs.items():
            monkeypatch.setattr(kind, "__call__", lambda self, batch, run=run: info.extend(run(self, batch)) or info)
        yield
        graph.recorded = program, batch, info
        for t, old in zip(program.body.static, before):
            t.copy_(old)
        for kind in programs:
            monkeypatch.setattr(kind, "__call__", remembered)

    class Stream:
        def __init__(self, device=None):
            pass

        def wait_stream(self, other):
            pass

    for kind in programs:
        monkeypatch.setattr(kind, "__call__", remembered)
    for name, fake in {
        "CUDAGraph": Graph,
        "graph": record,
        "Stream": Stream,
        "current_stream": Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "device": lambda device: contextlib.nullcontext(),
        "get_rng_state": lambda device: torch.get_rng_state(),
        "set_rng_state": lambda state, device: torch.set_rng_state(state),
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", CHAINS)
def test_what_a_cuda_graph_records_is_the_step(rehearsed, name, steps):
    """The recorded program moves the static buffers in place, fused where it can; warm-up and recording leave them alone."""
    params, batch = setup(torch.float64)
    tx = CHAINS[name]()
    step, state = bc.make_step(loss, tx), tx.init(params)
    fast = bc.capture(step, params, state, batch, steps=steps, draws=True, backend="cuda")
    eager = mine = (params, state)
    for k in range(3):
        data = batch[0] + k, batch[1]
        draws, losses = [], []
        for _ in range(steps):
            *eager, info = step(*eager, data)
            draws.append(eager[0])
            losses.append(info.loss)
        *mine, info = fast(*mine, data)
        assert_close(mine, eager, 1e-10)
        assert_close(info.loss, torch.stack(losses) if steps > 1 else losses[0], 1e-10)
        assert_close(info.draws, optree.tree_map(lambda *xs: torch.stack(xs), *draws), 1e-10)


def test_what_a_replay_reports_is_its_own(rehearsed):
    """Losses and draws are collected in lists, so that the next replay must not overwrite them."""
    params, batch = setup()
    tx = bc.sgd(0.05, 0.9)
    step, state = bc.make_step(loss, tx), tx.init(params)
    fast = bc.capture(step, params, state, batch, draws=True, backend="cuda")
    eager, infos, wanted = (params, state), [], []
    for _ in range(3):
        params, state, info = fast(params, state, batch)
        *eager, want = step(*eager, batch)
        infos.append((info.loss, info.aux["norm"], info.draws["w"][0]))
        wanted.append((want.loss, want.aux["norm"], eager[0]["w"]))
    assert_close(infos, wanted)


def test_warming_up_puts_back_what_the_step_overwrites_and_nothing_else(rehearsed):
    """Statistics of the model come back; what is only read need not be writable, and outlives its owner."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    weights = [torch.full((1, 1), 0.5).expand(8, 1)]
    params, x = {k: p.detach() for k, p in model.named_parameters()}, torch.randn(8, 3)

    def module_loss(params, batch):
        return (weights[0] * torch.func.functional_call(model, params, (batch,))).square().mean()

    tx = bc.sgd(0.05)
    step, state = bc.make_step(module_loss, tx), tx.init(params)
    before = copy.deepcopy(dict(model.named_buffers()))
    fast = bc.capture(step, params, state, x.requires_grad_(), backend="cuda")
    # the rehearsal's recording counts as a step of the model, a real one does not run
    assert model[1].num_batches_tracked == before["1.num_batches_tracked"] + 1
    place = weights[0].data_ptr()
    weights[0] = torch.ones(8, 1)
    assert place in [t.data_ptr() for t in fast._program.replay.read]
    assert not any(t.requires_grad for t in fast._program.replay.batch)
    fast(params, state, x)
    assert not any(t.requires_grad for t in fast._program.replay.batch)


@pytest.mark.slow
def test_another_librarys_link_may_keep_the_parameters(rehearsed):
    """A graph would move them in place under it, so that such a chain is recorded as it is written."""

    def update(updates, state, *, params=None, inplace=True):
        pull = optree.tree_map(lambda g, p, old: g + 0.1 * (p - old), updates, params, state)
        return pull, params

    anchored = torchopt.base.GradientTransformation(lambda params: optree.tree_map(torch.clone, params), update)
    params, batch = setup(torch.float64)
    for tx in (bc.chain(anchored, bc.sgd(0.05)), bc.chain(bc.masked(anchored, {"w": True, "b": False}), bc.sgd(0.05))):
        step, state = bc.make_step(loss, tx), tx.init(params)
        fast = bc.capture(step, params, state, batch, steps=2, backend="cuda")
        eager = mine = (params, state)
        for _ in range(3):
            for _ in range(2):
                *eager, _ = step(*eager, batch)
            *mine, _ = fast(*mine, batch)
            assert_close(mine, eager, 1e-12)


def test_what_cannot_be_recorded_is_named_with_its_line(rehearsed):
    runs = []

    def waiting(params, batch):
        runs.append(1)
        if len(runs) > 4:  # after the trace and three rounds of warming up
            raise RuntimeError("operation not permitted when stream is capturing")
        return (params["w"] ** 2).sum()

    params, _ = setup()
    tx = bc.sgd(0.05)
    with pytest.raises(
        bc.CaptureError, match=r"test_capture.py:\d+: `raise RuntimeError.*cannot be recorded.*not permitted"
    ):
        bc.capture(bc.make_step(waiting, tx), params, tx.init(params), (), backend="cuda")


def test_a_cuda_graph_refuses_what_it_would_read_once(rehearsed, monkeypatch):
    params, batch = setup()
    rate = torch.tensor(0.05, device="meta")  # stands for a tensor on another device than the parameters
    graph_of = capture_module.trace

    def traced(body):
        graph, closed_over = graph_of(body)
        for node in graph.graph.find_nodes(op="placeholder"):
            if node.meta["val"].ndim == 0 and node.name.startswith("closed_over"):
                node.meta["val"] = rate
        return graph, closed_over

    monkeypatch.setattr(capture_module, "trace", traced)
    tx = bc.sgd(torch.tensor(0.05))
    step, state = bc.make_step(loss, tx), tx.init(params)
    with pytest.raises(bc.CaptureError, match=r"a closed-over tensor: \(\), torch.float32 on meta is not on cpu"):
        bc.capture(step, params, state, batch, backend="cuda")


@pytest.mark.slow
def test_absent_parameters_keep_their_places_on_the_host(rehearsed, monkeypatch):
    """Their states are tensors that no step touches."""
    graph_of = capture_module.trace

    def traced(body):
        graph, closed_over = graph_of(body)
        for node in graph.graph.find_nodes(op="placeholder"):
            if not node.users:
                node.meta["val"] = torch.empty(0, device="meta")  # stands for another device than the parameters'
        return graph, closed_over

    monkeypatch.setattr(capture_module, "trace", traced)
    tx, params = bc.sghmc(lambda c: 0.05 / (1 + c), temperature=0.1), {"w": torch.ones(3), "none": None}
    step, state = bc.make_step(lambda p, batch: (p["w"] ** 2).sum(), tx), tx.init(params)
    fast = bc.capture(step, params, state, (), backend="cuda")
    assert_close(fast(params, state, ())[0]["w"], step(params, state, ())[0]["w"])


def many_chains(n=300, width=7, device="cpu"):
    """Regressions on rows of their own, and batches of rows for three calls of two steps."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(50, width, generator=g).to(device) / width**0.5, torch.randn(50, generator=g).to(device)
    tx = bc.sghmc(0.05, temperature=0.01)
    step = bc.make_step(lambda p, rows: ((x[rows] @ p["w"] - y[rows]) ** 2).mean(), tx)
    chains, params = bc.parallel(step, n, batch_dim=0), {"w": torch.randn(n, width, generator=g).to(device)}
    return chains, params, chains.init(tx, params, seed=1), torch.randint(50, (3, 2, n, 5), generator=g).to(device)


def follow(chains, params, state, rows, fast):
    """The calls of a captured step are two steps each."""
    eager = mine = (params, state)
    for two in rows:
        losses = []
        for one in two:
            *eager, info = chains(*eager, one)
            losses.append(info.loss)
        *mine, info = fast(*mine, two)
        assert_close(mine, eager)
        assert_close(info.loss, torch.stack(losses))


@pytest.mark.slow
@pytest.mark.skipif(not replays.compiler_found(), reason="needs a C++ compiler")
def test_a_cuda_graph_of_compiled_chains_is_their_steps(rehearsed, monkeypatch):
    """On a device small products are fused with what surrounds them; large ones, and those of few chains, stay products."""
    monkeypatch.setattr(capture_module, "_is_on_cuda", lambda body: True)
    monkeypatch.setattr(capture_module.lanes, "suits", lambda body, graph: False)
    fused = []
    products = capture_module.lane_graph.products
    monkeypatch.setattr(capture_module.lane_graph, "products", lambda graph: fused.append(products(graph)))
    for n, width, times in ((300, 7, 1), (200, 7, 0), (300, 300, 0)):
        fused.clear()
        chains, params, state, rows = many_chains(n, width)
        fast = bc.capture(chains, params, state, rows[0], steps=2, batch_dim=0, backend="inductor")
        assert isinstance(fast._program.replay, replays.CudaGraph) and len(fused) == times
        follow(chains, params, state, rows, fast)


def gpu(tree):
    return optree.tree_map(lambda x: x.cuda() if torch.is_tensor(x) else x, tree)


@pytest.mark.gpu
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("name", [n for n in CHAINS if n != "schedules"])
def test_a_cuda_graph_equals_eager(name, steps):
    params, batch = gpu(setup())
    tx = CHAINS[name]()
    step, state = bc.make_step(loss, tx), tx.init(params)
    fast = bc.capture(step, params, state, batch, steps=steps)
    assert fast.backend == "cuda"
    eager = mine = (params, state)
    for k in range(3):
        data = batch[0] + k, batch[1]
        for _ in range(steps):
            *eager, _ = step(*eager, data)
        *mine, _ = fast(*mine, data)
        assert_close(mine, eager)


@pytest.mark.gpu
def test_replays_draw_fresh_noise_and_resume_exactly():
    params, batch = gpu(setup())
    tx = bc.sghmc(0.05, temperature=0.05)
    step, state = bc.make_step(loss, tx), tx.init(params)
    fast = bc.capture(step, params, state, batch, clone=True)
    one = fast(params, state, batch)
    two = fast(*one[:2], batch)
    assert not torch.equal(two[0]["w"] - one[0]["w"], one[0]["w"] - params["w"])
    again = fast(*copy.deepcopy(one[:2]), batch)
    assert torch.equal(again[0]["w"], two[0]["w"])


@pytest.mark.gpu
def test_schedules_and_temperature_change_between_replays_of_a_cuda_graph():
    params, batch = gpu(setup())
    temperature = torch.tensor(0.05, device="cuda")
    tx = bc.sghmc(lambda c: 0.05 / (1 + 0.1 * c), temperature=temperature)
    step, state = bc.make_step(loss, tx), tx.init(params)
    fast = bc.capture(step, params, state, batch)
    eager = mine = (params, state)
    for t in (0.05, 0.0, 1.0):
        temperature.fill_(t)
        *eager, _ = step(*eager, batch)
        *mine, _ = fast(*mine, batch)
        assert_close(mine, eager)


@pytest.mark.gpu
def test_chains_under_vmap_inside_a_cuda_graph():
    tx = bc.sghmc(0.05, temperature=0.05)
    chains = bc.parallel(bc.make_step(lambda p, b: loss(p, b)[0], tx), 5)
    params, batch = gpu(setup())
    params = bc.stack([params] * 5)
    state = chains.init(tx, params)
    fast = bc.capture(chains, params, state, batch)
    eager = mine = (params, state)
    for _ in range(3):
        *eager, _ = chains(*eager, batch)
        *mine, _ = fast(*mine, batch)
    assert_close(mine, eager)


@pytest.mark.gpu
def test_many_small_chains_compiled_inside_a_cuda_graph():
    chains, params, state, rows = many_chains(device="cuda")
    fast = bc.capture(chains, params, state, rows[0], steps=2, batch_dim=0, backend="inductor")
    assert isinstance(fast._program.replay, replays.CudaGraph)
    follow(chains, params, state, rows, fast)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sgd", "sghmc", "schedules"])
def test_a_cuda_graph_of_a_compiled_step_equals_eager(name):
    """Slices of a batch for several steps start anywhere in memory: here 60 bytes behind one another, no multiple of 16."""
    params, _ = gpu(setup())
    tx = CHAINS[name]() if name != "schedules" else bc.sghmc(lambda c: 0.05 / (1 + 0.1 * c), temperature=0.05)
    step = bc.make_step(lambda p, batch: ((batch @ p["w"][:3] + p["b"]) ** 2).mean(), tx)
    state = tx.init(params)
    batch = torch.randn(3, 5, 3, device="cuda")
    fast = bc.capture(step, params, state, batch, steps=3, batch_dim=0, backend="inductor")
    assert isinstance(fast._program.replay, replays.CudaGraph)
    eager = mine = (params, state)
    for k in range(3):
        for one in batch + k:
            *eager, _ = step(*eager, one)
        *mine, _ = fast(*mine, batch + k)
        assert_close(mine, eager)


@pytest.mark.gpu
def test_memory_does_not_grow_over_ten_thousand_replays():
    params, batch = gpu(setup())
    tx = bc.sghmc(0.05, temperature=0.05)
    step, state = bc.make_step(loss, tx), tx.init(params)
    fast = bc.capture(step, params, state, batch)
    for _ in range(10):
        params, state, _ = fast(params, state, batch)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(10_000):
        params, state, _ = fast(params, state, batch)
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


@pytest.mark.slow
@pytest.mark.skipif(not replays.compiler_found(), reason="needs a C++ compiler")
def test_compiled_philox_is_eager_philox_for_every_key():
    """Small leaves once lost a mask to signed overflow, for half of the keys; the integers decide the cell and quadrant,
    so that one wrong bit moves a normal by far more than 1e-6. Other variables were vectorised wrongly where the compiler
    saw their integers."""
    from bayesopt_chain.random.stream import new_key
    from tests.random.draws import leaf

    for n, kind in ((3, "gaussian"), (300, "gaussian"), (20, "uniform"), (300, "three_point"), (21, "rademacher")):
        compiled = torch.compile(
            lambda k, s, n=n, kind=kind: leaf(k, s, n, 1, torch.float32, kind), fullgraph=True, dynamic=False
        )
        for i in range(20):
            key, count = new_key(None, torch.device("cpu")), torch.tensor(i + (i << 33))
            want = leaf(key, count, n, 1, torch.float32, kind)
            torch.testing.assert_close(compiled(key, count), want, rtol=0, atol=1e-6)


@pytest.mark.gpu
def test_philox_on_the_device_is_philox_on_the_host():
    """The kernel and the tensor operations, which take its place where there is no Triton."""
    from tests.random.draws import leaf, leaf_in_tensors

    key, count = torch.tensor(7692698082559361259), torch.tensor(3)
    for n in (5, 300, 100_000):
        host = leaf(key, count, n, 1, torch.float32)
        for draw in (leaf, leaf_in_tensors):
            device = draw(key.cuda(), count.cuda(), n, 1, torch.float32)
            torch.testing.assert_close(device.cpu(), host, rtol=2e-7, atol=1e-6)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_short_last_batch_is_recorded_when_it_comes_first(backend):
    """Every step is the step's own, in three epochs of batches of 4, 4 and 2 data; both programs move one state."""
    torch.manual_seed(0)
    x = torch.randn(10, 3)
    tx, params = bc.sghmc(0.1, temperature=0.01), {"w": torch.zeros(3)}
    step = bc.make_step(lambda p, batch: (batch @ p["w"] - 1.0).square().mean(), tx)
    state = tx.init(params)
    fast = bc.capture(step, params, state, x[:4], backend=backend, signatures=2)
    mine, here = params, state
    for batch in 3 * x.split(4):
        params, state, info = step(params, state, batch)
        mine, here, said = fast(mine, here, batch)
        torch.testing.assert_close(mine["w"], params["w"], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(said.loss, info.loss, rtol=1e-5, atol=1e-7)
    held = mine["w"].clone()
    for wrong, words in ((x[:3], "signatures=2"), (x[:4].double(), "float64"), ((x[:4],), "structure")):
        with pytest.raises(ValueError, match=words):
            fast(mine, here, wrong)
    assert torch.equal(mine["w"], held), "a refusal moves nothing"


@pytest.mark.parametrize("signatures", [0, True, 1.5])
def test_the_number_of_signatures_is_a_whole_one(signatures):
    with pytest.raises(ValueError, match="signatures must be a whole number"):
        bc.capture(lambda p, s, b: (p, s, b), torch.zeros(1), (), (), signatures=signatures)


@pytest.mark.slow
@pytest.mark.skipif(not replays.compiler_found(), reason="needs a C++ compiler")
def test_normals_are_drawn_before_the_program_where_key_and_count_stay_where_they_are():
    """The noise of the step itself. What chains side by side draw, and by a count that the step makes, stays in the graph."""
    tx = bc.sghmc(0.1, temperature=1.0)
    step = bc.make_step(lambda w, batch: 0.0 * w.sum(), tx)
    torch.manual_seed(0)
    alone = torch.zeros(37)
    chains = bc.parallel(step, 3)
    many = torch.zeros(3, 37)

    def twice(w, state, batch):
        return step(*step(w, state, batch)[:2], batch)

    for run, w, state, before in (
        (step, alone, tx.init(alone), 1),
        (chains, many, chains.init(tx, many), 0),
        (twice, alone, tx.init(alone), 1),
    ):
        fast = bc.capture(run, w, state, (), backend="inductor")
        assert len(fast._program.replay.fills) == before
        mine, here = w, state
        for _ in range(4):
            w, state, _ = run(w, state, ())
            mine, here, _ = fast(mine, here, ())
        torch.testing.assert_close(mine, w, rtol=2e-6, atol=2e-6)
