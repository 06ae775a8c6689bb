"""A captured step is the step: results, stream, resumption, whatever changes between replays; what cannot be is refused."""

import contextlib
import copy
import pickle
import uuid
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import optree
import pytest
import torch
import torchopt
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain import _torch
from bayesopt_chain.loop.capture import build as capture_module
from bayesopt_chain.loop.capture import replays
from bayesopt_chain.random.stream import new_key
from tests.loop.beside import BACKENDS, COMPILED, CUDA, assert_close, follow, record
from tests.nets import Net
from tests.random.draws import leaf
from tests.refusals import refuse


def compiled(test):
    """Of a test that compiles: slow, and skipped where there is no compiler."""
    for mark in COMPILED:
        test = mark(test)
    return test


CLOSE = {"rtol": 2e-5, "atol": 2e-5}  # of float32


def loss(params, batch):
    x, y = batch
    return ((x @ params["w"] + params["b"] - y) ** 2).mean(), {"norm": params["w"].norm(), "name": "regression"}


def setup(dtype=torch.float32, backend="eager"):
    g = torch.Generator().manual_seed(0)
    batch = torch.randn(8, 20, generator=g, dtype=dtype), torch.randn(8, generator=g, dtype=dtype)
    params = {"w": torch.randn(20, generator=g, dtype=dtype), "b": torch.zeros((), dtype=dtype)}
    return optree.tree_map(lambda x: x.to(device_of(backend)), (params, batch))


def device_of(backend):
    return "cuda" if backend == "cuda" else "cpu"


def is_called_directly(fast):
    """Nothing of torch's stands between the call and the function that its compiler generated."""
    return fast._program.replay.program == fast._program.replay.generated[0].current_callable


TEMPERATURE = torch.tensor(0.05)
CHAINS = {
    "sgd": lambda: bc.sgd(0.05, 0.9, weight_decay=0.1),
    "sghmc": lambda: bc.sghmc(0.05, temperature=0.05),
    "nesterov": lambda: bc.sgd(0.05, 0.9, nesterov=True, temperature=0.05),
    "adam": lambda: bc.adam(0.01, temperature=0.01),
    "schedules": lambda: bc.sghmc(lambda c: 0.05 / (1 + 0.1 * c), temperature=TEMPERATURE),
}
ON_DEVICE = [name for name in CHAINS if name != "schedules"]  # whose temperature is a tensor on the host


@pytest.mark.parametrize(
    "name, backend, steps",
    [
        *((name, "eager", 1) for name in CHAINS),
        pytest.param("adam", "inductor", 1, marks=COMPILED),
        *(pytest.param(name, "cuda", steps, marks=pytest.mark.gpu) for name in ON_DEVICE for steps in (1, 4)),
    ],
)
def test_captured_equals_eager(name, backend, steps):
    params, batch = setup(backend=backend)
    step, fast, start = record(loss, CHAINS[name](), params, batch, backend=backend, steps=steps)
    before = copy.deepcopy(start)
    follow(step, fast, start, [(batch[0] + k, batch[1]) for k in range(4)], steps)
    assert_close(start, before, 0.0, 0.0)  # the arguments of capture stay as they were
    assert fast.backend == backend and (backend != "inductor" or is_called_directly(fast))


@compiled
def test_multiples_that_are_added_to_a_matrix_product_stay_multiples():
    """The gradient of a linear layer is a product, to which decay and a spring add multiples of parameters; a loss may too."""

    def loss(p, batch):
        out = torch.add(batch @ p["a"], p["b"], alpha=0.3).tanh() @ p["c"]
        return out.add_(batch @ p["d"], alpha=-2.0).square().mean()

    g = torch.Generator().manual_seed(0)
    shapes = {"a": (6, 4), "b": (9, 4), "c": (4, 2), "d": (6, 2)}
    params = {name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()}
    batch = torch.randn(9, 6, generator=g, dtype=torch.float64)
    tx = bc.chain(bc.links.add_localization(params, 0.2), bc.sgd(0.05, 0.9, weight_decay=0.4, nesterov=True))
    step, fast, start = record(loss, tx, params, batch, backend="inductor")
    follow(step, fast, start, [batch] * 5, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", [*BACKENDS, CUDA])
def test_leaves_of_many_sizes_and_two_dtypes_under_schedules(backend):
    """More than a run of normals a leaf, two groups of leaves, and a temperature that changes between the calls."""
    device = device_of(backend)
    temperature, g = torch.tensor(0.05, device=device), torch.Generator().manual_seed(1)
    tx = bc.sghmc(lambda c: 0.05 / (1 + 0.1 * c), temperature=lambda c: temperature * (1 + c))
    sizes = {"a": (3, 100), "b": (7,), "c": (257,), "d": ()}
    params = {k: torch.randn(s, generator=g, dtype=torch.float64 if k > "b" else None) for k, s in sizes.items()}

    def quadratic(params, batch):
        return sum((x.double() ** 2).sum() for x in params.values()) * batch

    def batches():
        for t in (0.05, 0.0, 2.0):
            temperature.fill_(t)
            yield batch

    params, batch = optree.tree_map(lambda x: x.to(device), (params, torch.tensor(0.5)))
    step, fast, start = record(quadratic, tx, params, batch, steps=2, draws=True, backend=backend)
    follow(step, fast, start, batches(), steps=2)


def test_several_steps_a_call_with_every_draw():
    params, batch = setup()
    tx = bc.sghmc(0.05, temperature=0.05)
    many = tuple(torch.stack([x, x + 1, x - 1]) for x in batch)
    step, fast, start = record(loss, tx, params, many, steps=3, batch_dim=0, draws=True, backend="eager")
    _, info = follow(step, fast, start, [many] * 2, steps=3, split=True)
    assert info.aux["name"] == "regression" and info.aux["norm"].shape == (3,)
    follow(*record(loss, tx, params, batch, draws=True, backend="eager"), [batch] * 2)


@pytest.mark.parametrize("backend", [*BACKENDS, CUDA])
def test_temperature_and_learning_rate_change_between_replays(backend):
    params, batch = setup(backend=backend)
    temperature, lr = (torch.tensor(0.05, device=device_of(backend)) for _ in range(2))
    step, fast, start = record(loss, bc.sghmc(lr, temperature=temperature), params, batch, backend=backend)

    def batches():
        for t, rate in ((0.05, 0.05), (0.0, 0.05), (1.0, 0.01), (0.2, 0.1)):
            temperature.fill_(t)
            lr.fill_(rate)
            yield batch

    follow(step, fast, start, batches())
    assert backend != "inductor" or is_called_directly(fast)  # though it is handed such a tensor twice


def normalised():
    """A network with statistics, its loss and its parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def module_loss(params, batch):
        return torch.func.functional_call(model, params, (batch,)).square().mean()

    return model, module_loss, {k: p.detach() for k, p in model.named_parameters()}


def test_buffers_of_the_model_are_read_and_written():
    model, module_loss, params = normalised()
    fresh, x = copy.deepcopy(model.state_dict()), torch.randn(8, 3)
    step, fast, start = record(module_loss, bc.sgd(0.05), params, x, backend="eager")
    want, *_ = step(*start, x)
    statistics = copy.deepcopy(dict(model.named_buffers()))
    model.load_state_dict(fresh)
    assert_close(fast(*start, x)[0], want, **CLOSE)
    assert_close(dict(model.named_buffers()), statistics, **CLOSE)


def test_a_module_in_another_mode_is_refused():
    model, module_loss, params = normalised()
    x = torch.randn(8, 3)
    _, fast, start = record(module_loss, bc.sgd(0.05), params, x, backend="eager")
    model.eval()
    with pytest.raises(
        bc.CaptureError, match=r"Sequential in train mode, and it is in eval mode now; call \.train\(\)"
    ):
        fast(*start, x)
    model.train()
    fast(*start, x)
    model.eval()
    step, evaluating, start = record(module_loss, bc.sgd(0.05), params, x, backend="eager")
    follow(step, evaluating, start, [x], rtol=1e-5, atol=1e-6)
    model[1].train()
    with pytest.raises(bc.CaptureError, match="BatchNorm1d in eval mode"):
        evaluating(*start, x)


@pytest.mark.parametrize(
    "backend, loop",
    [
        ("eager", False),
        ("eager", True),
        pytest.param("cuda", False, marks=pytest.mark.gpu),
    ],
)
def test_many_chains_are_captured_with_their_own_temperatures(backend, loop):
    def tx(temperature):
        return bc.sghmc(0.05, temperature=temperature)

    def step(temperature):
        return bc.make_step(lambda params, batch: loss(params, batch)[0], tx(temperature))

    chains = bc.parallel(step, 3, each={"temperature": torch.tensor([0.0, 0.1, 0.3])}, loop=loop)
    params, batch = setup(backend=backend)
    params = bc.stack([params] * 3)
    start = params, chains.init(tx, params)
    follow(chains, bc.capture(chains, *start, batch, backend=backend), start, [batch] * 3)


@pytest.mark.parametrize(
    "backend, dtype",
    [
        ("eager", torch.float32),
        ("eager", torch.float64),
        pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
    ],
)
def test_it_resumes_exactly_here_and_in_the_eager_step(backend, dtype):
    params, batch = setup(dtype, backend)
    step, fast, now = record(loss, bc.sghmc(0.05, temperature=0.05), params, batch, backend=backend)
    for _ in range(3):
        *now, _ = fast(*now, batch)
    saved = pickle.loads(pickle.dumps(now))
    went_on = optree.tree_map(torch.clone, fast(*fast(*now, batch)[:2], batch)[0])
    resumed, *_ = fast(*fast(*saved, batch)[:2], batch)
    assert all(torch.equal(went_on[k], resumed[k]) for k in went_on)
    eager, *_ = step(*step(*saved, batch)[:2], batch)
    assert_close(eager, went_on, **CLOSE)


def test_outputs_alias_static_buffers():
    params, batch = setup()
    _, fast, start = record(loss, bc.sghmc(0.05, temperature=0.05), params, batch, backend="eager")
    first, state, _ = fast(*start, batch)
    value = first["w"].clone()
    second, state, _ = fast(first, state, batch)
    assert second["w"].data_ptr() == first["w"].data_ptr() and not torch.equal(first["w"], value)
    assert torch.equal(fast(*start, batch)[0]["w"], value)  # the same state gives the same step
    with pytest.raises(ValueError, match="was moved"):  # the same storage, at another address
        fast({**second, "w": second["w"].share_memory_()}, state, batch)


def test_what_the_user_changes_between_calls_is_seen():
    """In the containers that were handed back, in the tensors, and in a batch that is given again."""
    params, batch = setup()
    step, fast, start = record(loss, bc.sgd(0.05, 0.9), params, list(batch), backend="eager")
    mine, data, eager = fast(*start, list(batch))[:2], list(batch), step(*start, batch)[:2]

    def both():
        nonlocal mine, eager
        eager = step(*eager, tuple(data))[:2]
        mine = fast(*mine, data)[:2]
        assert_close(mine, eager, **CLOSE)

    both()
    mine[0]["w"], eager[0]["w"] = torch.ones(20), torch.ones(20)
    both()
    mine[0]["w"].data, eager[0]["w"] = torch.full((20,), 0.5), torch.full((20,), 0.5)  # the memory of a buffer
    data[0] = data[0] + 1
    both()
    data[0].mul_(2)
    mine[0]["w"].add_(1)
    eager[0]["w"] = eager[0]["w"] + 1
    mine[1][0].trace[0].zero_()
    eager[1][0].trace[0].zero_()
    both()
    mine[0].pop("b")
    for other in (mine[0], None):
        with pytest.raises(ValueError, match="structure"):
            fast(other, mine[1], data)
    data[1].data = torch.ones(3)  # the program would read behind its end
    with pytest.raises(ValueError, match="batch, leaf 1"):
        fast(*start, data)


def test_a_dictionary_of_another_class_is_taken_by_its_keys():
    """Whether it holds the static buffers, the tensors of the last batch, or others."""
    params, (x, y) = setup()
    given, batch = OrderedDict(reversed(params.items())), {"x": x, "y": y}
    step = bc.make_step(lambda p, batch: loss(p, (batch["x"], batch["y"])), bc.sgd(0.05, 0.9))
    fast = bc.capture(step, params, state := step.tx.init(params), batch, backend="eager", signatures=2)
    eager, mine, batch = (params, state), (given, state), OrderedDict(y=y, x=x)
    for n in (8, 8, 5):
        mine = fast(*mine, OrderedDict((k, v[:n]) for k, v in batch.items()))[:2]
        mine = fast(OrderedDict(reversed(mine[0].items())), mine[1], batch)[:2]
        eager = step(*step(*eager, {"x": x[:n], "y": y[:n]})[:2], batch)[:2]
        assert_close(mine, eager, **CLOSE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_that_share_memory(backend):
    """One tensor twice in the batch, once; and buffers, written by the step, that are views of one tensor, or ``out=``."""
    both, x, y, one, out = torch.zeros(2, 3), torch.randn(3), torch.randn(3), torch.ones(2), torch.zeros(2)

    def writing(params, batch):
        torch.add(one, 1.0, out=out)
        both[0].add_(batch[0].detach())
        both[1].add_(both[0])
        return ((params - batch[0] * batch[1]) ** 2).sum()

    step, fast, start = record(writing, bc.sgd(0.05), torch.zeros(3), (x, x), backend=backend)
    assert torch.equal(both, torch.zeros(2, 3)) and torch.equal(out, torch.zeros(2))
    for batch in ((x, x), (x, y), (y, y), (x, y)):
        before = both.clone()
        want = step(*start, batch)[0], both.clone()
        both.copy_(before)
        assert_close((fast(*start, batch)[0], both), want, **CLOSE)
    assert torch.equal(out, 2 * one)


@pytest.mark.parametrize("steps, backend", [(1, "eager"), (2, "eager"), pytest.param(2, "inductor", marks=COMPILED)])
def test_old_values_that_the_state_keeps(steps, backend):
    """The parameters before the step, a view of them, and two tensors that change places: none is read once overwritten."""

    def step(params, state, batch):
        now = {"before": params, "reversed": params.view(1, 2), "a": state["b"], "b": state["a"]}
        return params * batch + state["reversed"][0], now, bc.Info(params.sum(), params)

    params, batch = torch.tensor([1.0, 2.0]), torch.tensor(1.5)
    state = {"before": params - 1, "reversed": params.view(1, 2), "a": torch.zeros(3), "b": torch.ones(3)}
    fast = bc.capture(step, params, state, batch, steps=steps, backend=backend)
    follow(step, fast, (params, state), [batch] * 3, steps, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_that_is_the_returned_parameters(backend):
    """A static buffer may be read as a batch (an anchor, a teacher): it has its value from before the step."""

    def pulled(params, batch):
        return ((params["w"] - 2 * batch.roll(1)) ** 2).sum() + (batch.cumsum(0) * params["w"].flip(0)).sum()

    params = {"w": torch.randn(40)}
    step, fast, start = record(pulled, bc.sgd(0.1, 0.9), params, params["w"] + 1, backend=backend)
    eager = mine = start
    for _ in range(3):
        eager = step(*eager, eager[0]["w"])[:2]
        mine = fast(*mine, mine[0]["w"])[:2]
        assert_close(mine, eager, **CLOSE)


def test_another_shape_structure_or_number_is_refused_by_name():
    params, batch = setup()
    step, fast, (_, state) = record(loss, bc.sgd(0.05, 0.9), params, batch, backend="eager")
    refuse(
        (
            (lambda: fast(params, state, (batch[0][:5], batch[1][:5])), r"batch, leaf 0: \(5, 20\).*drop_last"),
            (lambda: fast({**params, "w": params["w"].double()}, state, batch), r"params, leaf 1: .*float64"),
            (lambda: fast({"w": params["w"]}, state, batch), "structure"),
            (lambda: fast(params, state, [*batch]), r"batch: the structure is \[\*, \*\], captured was \(\*, \*\)"),
            (lambda: bc.capture(fast, params, state, batch), r"captured\.step"),
            (lambda: bc.capture(lambda *given: fast(*given), params, state, batch), bc.CaptureError, "another capture"),
            (
                lambda: record(loss, bc.chain(torchopt.clip_grad_norm(1.0), step.tx), params, batch, backend="eager"),
                *(bc.CaptureError, r"torchopt.clip\.py:\d+: `clip_coef.*float"),
            ),
            (lambda: bc.capture(step, params, state, bc.epochs(range(8), 2)), "gives lists of row numbers"),
            (lambda: bc.parallel(fast, 3, loop=True), r"parallel chains of captured\.step"),
            (
                lambda: bc.parallel(lambda *given: fast(*given), 2, loop=True)(
                    *map(bc.stack, zip(*[(params, state)] * 2)), batch
                ),
                "the same tensors for two chains",
            ),
            *(
                (lambda options=options: bc.capture(step, params, state, batch, **options), words)
                for options, words in (
                    ({"steps": 0}, "steps"),
                    ({"batch_dim": 0}, "batch_dim"),
                    *(({"steps": 3, "batch_dim": at}, "no 3 steps") for at in (0, 2)),
                    *(({"signatures": n}, "signatures must be") for n in (0, True, 1.5)),
                )
            ),
            (lambda: bc.capture(step, params, [1.0], batch), "tensors only"),
        ),
        error=(TypeError, ValueError),
    )


def branching(params, batch):
    w = params["w"]
    return (w**2).sum() if w.sum() > 0 else (w**4).sum()


def reading(params, batch):
    return (params["w"] * params["w"].norm().item()).sum()


def selecting(params, batch):
    w = params["w"]
    return w[w > 0].sum()


@pytest.mark.parametrize("temperature", [0.0, 0.1])  # above 0 the draws of the model are intercepted
@pytest.mark.parametrize("bad, line", [(branching, "if w.sum"), (reading, "item"), (selecting, "w > 0")])
def test_what_cannot_be_captured_is_named_with_its_line(bad, line, temperature):
    with pytest.raises(bc.CaptureError, match=rf"test_capture.py:\d+: `.*{line}"):
        record(bad, bc.sgd(0.1, temperature=temperature), setup()[0], (), backend="eager")


def test_without_a_compiler_it_stays_eager_and_says_so(monkeypatch):
    monkeypatch.setattr(capture_module, "compiler_found", lambda: False)
    params, batch = setup()
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler"):
        _, fast, _ = record(loss, bc.sgd(0.05), params, batch)
    assert fast.backend == "eager"


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


@pytest.mark.parametrize("name, steps", [("adam", 1), *((name, 3) for name in CHAINS)])
def test_what_a_cuda_graph_records_is_the_step(rehearsed, name, steps):
    """The recorded program moves the static buffers in place, fused where it can; warm-up and recording leave them alone."""
    params, batch = setup(torch.float64)
    step, fast, start = record(loss, CHAINS[name](), params, batch, steps=steps, draws=True, backend="cuda")
    follow(step, fast, start, [(batch[0] + k, batch[1]) for k in range(3)], steps, rtol=1e-10, atol=1e-10)


def test_warming_up_puts_back_what_the_step_overwrites_and_nothing_else(rehearsed):
    """Statistics of the model come back; what is only read need not be writable, and outlives its owner."""
    model, module_loss, params = normalised()
    weights, x = [torch.full((1, 1), 0.5).expand(8, 1)], torch.randn(8, 3)

    def weighted(params, batch):
        return (weights[0] * module_loss(params, batch)).mean()

    before = model[1].num_batches_tracked.clone()
    _, fast, start = record(weighted, bc.sgd(0.05), params, x.requires_grad_(), backend="cuda")
    # the rehearsal's recording counts as a step of the model, a real one does not run
    assert model[1].num_batches_tracked == before + 1
    place = weights[0].data_ptr()
    weights[0] = torch.ones(8, 1)
    assert place in [t.data_ptr() for t in fast._program.replay.read]
    assert not any(t.requires_grad for t in fast._program.replay.batch)
    fast(*start, x)
    assert not any(t.requires_grad for t in fast._program.replay.batch)


@pytest.mark.slow
def test_another_librarys_link_may_keep_the_parameters(rehearsed):
    """A graph would move them in place under it, so that such a chain is recorded as it is written."""

    def update(updates, state, *, params=None, inplace=True):
        pull = optree.tree_map(lambda g, p, old: g + 0.1 * (p - old), updates, params, state)
        return pull, params

    anchored = torchopt.base.GradientTransformation(lambda params: optree.tree_map(torch.clone, params), update)
    params, batch = setup(torch.float64)
    for front in (anchored, bc.masked(anchored, {"w": True, "b": False})):
        run = record(loss, bc.chain(front, bc.sgd(0.05)), params, batch, steps=2, backend="cuda")
        follow(*run, [batch] * 3, steps=2, rtol=1e-12, atol=1e-12)


def test_what_cannot_be_recorded_is_named_with_its_line(rehearsed):
    runs = []

    def waiting(params, batch):
        runs.append(1)
        if len(runs) > 4:  # after the trace and three rounds of warming up
            raise RuntimeError("operation not permitted when stream is capturing")
        return (params["w"] ** 2).sum()

    with pytest.raises(
        bc.CaptureError, match=r"test_capture.py:\d+: `raise RuntimeError.*cannot be recorded.*not permitted"
    ):
        record(waiting, bc.sgd(0.05), setup()[0], (), backend="cuda")


@pytest.fixture
def stand_in(monkeypatch):
    """Traces of which the chosen inputs stand for tensors on another device than the parameters."""
    graph_of = capture_module.trace

    def choose(chosen):
        def traced(body):
            graph, closed_over = graph_of(body)
            for node in filter(chosen, graph.graph.find_nodes(op="placeholder")):
                node.meta["val"] = torch.empty_like(node.meta["val"], device="meta")
            return graph, closed_over

        monkeypatch.setattr(capture_module, "trace", traced)

    return choose


def test_a_cuda_graph_refuses_what_it_would_read_once(rehearsed, stand_in):
    params, batch = setup()
    stand_in(lambda node: node.meta["val"].ndim == 0 and node.name.startswith("closed_over"))
    with pytest.raises(bc.CaptureError, match=r"a closed-over tensor: \(\), torch.float32 on meta is not on cpu"):
        record(loss, bc.sgd(torch.tensor(0.05)), params, batch, backend="cuda")


@pytest.mark.slow
def test_absent_parameters_keep_their_places_on_the_host(rehearsed, stand_in):
    """Their states are tensors that no step touches."""
    stand_in(lambda node: not node.users)
    tx, params = bc.sghmc(lambda c: 0.05 / (1 + c), temperature=0.1), {"w": torch.ones(3), "none": None}
    follow(*record(lambda p, batch: (p["w"] ** 2).sum(), tx, params, (), backend="cuda"), [()])


def many_chains(n=300, width=7, device="cpu"):
    """Regressions on rows of their own, and batches of rows for three calls of two steps."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(50, width, generator=g).to(device) / width**0.5, torch.randn(50, generator=g).to(device)
    tx = bc.sghmc(0.05, temperature=0.01)
    step = bc.make_step(lambda p, rows: ((x[rows] @ p["w"] - y[rows]) ** 2).mean(), tx)
    chains, params = bc.parallel(step, n, batch_dim=0), {"w": torch.randn(n, width, generator=g).to(device)}
    rows = torch.randint(50, (3, 2, n, 5), generator=g).to(device)
    return chains, (params, chains.init(tx, params, seed=1)), rows


def follow_in_a_graph(step, start, batches):
    """A compiled program inside a CUDA graph, each call of which takes all steps of a batch."""
    steps = len(batches[0])
    fast = bc.capture(step, *start, batches[0], steps=steps, batch_dim=0, backend="inductor")
    assert isinstance(fast._program.replay, replays.CudaGraph)
    follow(step, fast, start, batches, steps, split=True)


@compiled
def test_a_cuda_graph_of_compiled_chains_is_their_steps(rehearsed, monkeypatch):
    """On a device small products are fused with what surrounds them; large ones, and those of few chains, stay products."""
    monkeypatch.setattr(capture_module, "_is_on_cuda", lambda body: True)
    monkeypatch.setattr(capture_module.lanes, "suits", lambda body, graph: False)
    fused = []
    products = capture_module.lane_graph.products
    monkeypatch.setattr(capture_module.lane_graph, "products", lambda graph: fused.append(products(graph)))
    for n, width, times in ((300, 7, 1), (200, 7, 0), (300, 300, 0)):
        fused.clear()
        follow_in_a_graph(*many_chains(n, width))
        assert len(fused) == times


@pytest.mark.gpu
def test_many_small_chains_compiled_inside_a_cuda_graph():
    follow_in_a_graph(*many_chains(device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sgd", "sghmc", "schedules"])
def test_a_cuda_graph_of_a_compiled_step_equals_eager(name):
    """Slices of a batch for several steps start anywhere in memory: here 60 bytes behind one another, no multiple of 16."""
    params, _ = setup(backend="cuda")
    tx = CHAINS[name]() if name != "schedules" else bc.sghmc(lambda c: 0.05 / (1 + 0.1 * c), temperature=0.05)
    step = bc.make_step(lambda p, batch: ((batch @ p["w"][:3] + p["b"]) ** 2).mean(), tx)
    follow_in_a_graph(step, (params, tx.init(params)), [torch.randn(3, 5, 3, device="cuda") + k for k in range(3)])


@pytest.mark.gpu
def test_memory_does_not_grow_over_ten_thousand_replays():
    params, batch = setup(backend="cuda")
    _, fast, now = record(loss, bc.sghmc(0.05, temperature=0.05), params, batch)
    found = []
    for calls in (10, 10_000):
        for _ in range(calls):
            *now, _ = fast(*now, batch)
        torch.cuda.synchronize()
        found.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert found[0] == found[1]


@compiled
def test_compiled_philox_is_eager_philox_for_every_key():
    """Small leaves once lost a mask to signed overflow, for half of the keys; the integers decide the cell and quadrant,
    so that one wrong bit moves a normal by far more than 1e-6. Other variables were vectorised wrongly where the compiler
    saw their integers."""
    kinds = (3, "gaussian"), (300, "gaussian"), (20, "uniform"), (301, "uniform")

    def drawn(key, count):
        return [leaf(key, count, n, 1, torch.float32, kind) for n, kind in kinds]

    compiled = torch.compile(drawn, fullgraph=True, dynamic=False)
    for i in range(20):
        key, count = new_key(None, torch.device("cpu")), torch.tensor(i + (i << 33))
        torch.testing.assert_close(compiled(key, count), drawn(key, count), rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_short_last_batch_is_recorded_when_it_comes_first(backend):
    """Every step is the step's own, in three epochs of batches of 4, 4 and 2 data; both programs move one state."""
    x = torch.randn(10, 3)
    tx, params = bc.sghmc(0.1, temperature=0.01), {"w": torch.zeros(3)}

    def linear(p, batch):
        return (batch @ p["w"] - 1.0).square().mean()

    step, fast, start = record(linear, tx, params, x[:4], backend=backend, signatures=2)
    mine, _ = follow(step, fast, start, 3 * x.split(4), rtol=1e-5, atol=1e-7)
    held = mine[0]["w"].clone()
    for wrong, words in ((x[:3], "signatures=2"), (x[:4].double(), "float64"), ((x[:4],), "structure")):
        with pytest.raises(ValueError, match=words):
            fast(*mine, wrong)
    assert torch.equal(mine[0]["w"], held), "a refusal moves nothing"


@compiled
def test_normals_are_drawn_before_the_program_where_key_and_count_stay_where_they_are():
    """The noise of a step, and of chains side by side. What is drawn by a count that the step makes stays in the graph."""
    tx = bc.sghmc(0.1, temperature=1.0)
    step = bc.make_step(lambda w, batch: 0.0 * w.sum(), tx)
    chains = bc.parallel(step, 3)
    alone, many = torch.zeros(37), torch.zeros(3, 37)

    def twice(w, state, batch):
        return step(*step(w, state, batch)[:2], batch)

    for run, w, state, before in (
        (step, alone, tx.init(alone), 1),
        (chains, many, chains.init(tx, many), 1),
        (twice, alone, tx.init(alone), 1),
    ):
        fast = bc.capture(run, w, state, (), backend="inductor")
        assert len(fast._program.replay.fills) == before
        follow(run, fast, (w, state), [()] * 4, rtol=2e-6, atol=2e-6)


def quadratic(params, batch):
    return ((params["w"] - batch) ** 2).sum()


def captured():
    params, batch = {"w": torch.zeros(50)}, torch.ones(50)
    step, fast, start = record(quadratic, bc.sghmc(0.1, temperature=0.1), params, batch, backend="eager")
    return step, fast, *start


def in_a_thread(function):
    """What it raises there."""
    with ThreadPoolExecutor(1, "second") as pool:
        return pool.submit(function).exception()


def test_a_second_thread_that_would_share_buffers_is_refused():
    _, fast, params, state = captured()
    params, state, _ = fast(params, state, torch.ones(50))
    before = params["w"].clone()
    err = in_a_thread(lambda: fast(params, state, torch.ones(50)))
    assert "'MainThread' holds them" in str(err) and "'second_0'" in str(err)
    assert torch.equal(params["w"], before)
    fast(params, state, torch.ones(50))


def test_a_captured_step_is_not_copied():
    w, tx = torch.ones(2), bc.sgld(0.1, temperature=0.1)
    captured = bc.capture(bc.make_step(lambda w, batch: (w**2).sum(), tx), w, tx.init(w), None, backend="eager")
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="can be neither copied nor pickled: copy the step"):
            copied(captured)


def test_a_step_whose_thread_has_ended_may_go_on_in_another():
    _, fast, params, state = captured()
    assert not in_a_thread(lambda: fast(params, state, torch.ones(50)))
    assert not in_a_thread(lambda: fast(params, state, torch.ones(50)))


def test_threads_that_capture_at_the_same_time_wait_for_each_other():
    with ThreadPoolExecutor(4) as pool:
        assert [fast.backend for _, fast, *_ in pool.map(lambda _: captured(), range(4))] == ["eager"] * 4


def test_a_call_within_a_call_is_refused():
    _, fast, params, state = captured()
    program = fast._program
    fast._program = program._replace(replay=lambda batch: fast(params, state, batch[0]))
    with pytest.raises(bc.CaptureError, match="during another call of it"):
        fast(params, state, torch.ones(50))
    fast._program = program
    fast(params, state, torch.ones(50))  # what failed holds no lock


@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_and_names_stay_as_captured_and_tensors_are_read(backend):
    """As the docstring says, in both back ends: a number and a name bound anew are not seen, a tensor written in place is."""
    number, shift = [2.0], {"tensor": torch.ones(3)}

    def loss(params, batch):
        return (number[0] * params * shift["tensor"]).sum()

    _, fast, start = record(loss, bc.sgd(1.0), torch.zeros(3), (), backend=backend)
    first = shift["tensor"]
    number[0], shift["tensor"] = 5.0, torch.full((3,), 7.0)
    assert torch.equal(fast(*start, ())[0], torch.full((3,), -2.0))
    first.fill_(3.0)
    assert torch.equal(fast(*start, ())[0], torch.full((3,), -6.0))
    first.data = torch.ones(2)  # a compiled program would read behind its end
    with pytest.raises(RuntimeError, match=r"size of tensor a|that the step closes over"):
        fast(*start, ())


@pytest.mark.parametrize(
    "layer",
    [nn.LSTM, nn.GRU, nn.RNN],
)
def test_recurrent_layers_are_captured(layer):
    """mkldnn's fused LSTM, which eager code runs, is not in the graph; it is on again afterwards."""
    model, x = layer(3, 4, batch_first=True), torch.randn(5, 2, 3)
    params = {k: p.detach() for k, p in model.named_parameters()}

    def loss(params, batch):
        return torch.func.functional_call(model, params, (batch,))[0].square().mean()

    enabled = torch.backends.mkldnn.enabled
    run = record(loss, bc.sgd(0.1), params, x, backend="eager")
    assert torch.backends.mkldnn.enabled == enabled
    follow(*run, [x] * 3, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_attention_is_captured_with_its_noise_and_a_short_last_batch():
    """Batches of 4, 4 and 2 sequences, the last of which is recorded when it comes; every step is the eager step's."""
    block = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dropout=0.0, batch_first=True, norm_first=True)
    model = Net(lambda net, x: net.head(net.block(x).mean(1)), block=block, head=nn.Linear(8, 3))
    forward, params, _ = bc.make_functional(model)
    x, y = torch.randn(10, 5, 8), torch.arange(10) % 3

    def loss(params, batch):
        return nn.functional.cross_entropy(forward(params, batch), batch[1])

    tx, batches = bc.sghmc(0.1, temperature=1e-3), [*zip(x.split(4), y.split(4))]
    run = record(loss, tx, params, batches[0], backend="eager", signatures=2)
    follow(*run, 2 * batches, rtol=1e-5, atol=1e-6)


def test_attention_that_drops_inside_its_operation_is_refused():
    q = torch.randn(2, 1, 4, 3)

    def loss(params, batch):
        drop = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return drop(q * params, q, q, batch)[0].square().mean()

    tx, params = bc.sghmc(0.1, temperature=0.1), torch.ones(())
    record(loss, tx, params, 0.0, backend="eager")
    with pytest.raises(bc.CaptureError, match="flash_attention"):
        record(loss, tx, params, 0.1, backend="eager")


def test_chains_whose_model_draws_without_a_key_are_refused_captured_as_uncaptured():
    tx, params = bc.sghmc(0.1, temperature=0.1), torch.ones(2, 3)
    step = bc.make_step(lambda p, batch: nn.functional.alpha_dropout(p, 0.5, True).square().sum(), tx)
    chains = bc.parallel(step, 2)
    state = chains.init(tx, params)
    for call in (chains, lambda *given: bc.capture(chains, *given, backend="eager")):
        with pytest.raises(RuntimeError, match="parallel: the model draws random numbers that no chain's key governs"):
            call(params, state, ())


def five_steps():
    """What five steps of a captured sampler give, and whether its program was compiled or found."""
    from torch._dynamo.utils import counters

    before = counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]
    tx, params = bc.sghmc(0.1, temperature=0.1), {"w": torch.ones(33)}
    torch.manual_seed(0)
    step, state = bc.make_step(lambda p, batch: (p["w"] * batch).tanh().square().sum(), tx), tx.init(params)
    fast = bc.capture(step, params, state, torch.linspace(-1, 1, 33), backend="inductor")
    for _ in range(5):
        params, state, _ = fast(params, state, torch.linspace(-1, 1, 33))
    hits, misses = (counters["inductor"][f"fxgraph_cache_{kind}"] - n for kind, n in zip(("hit", "miss"), before))
    return params["w"].clone(), hits, misses


@compiled
def test_a_program_is_found_again_with_the_same_bits_and_not_for_another_processor_thread_count_or_version(monkeypatch):
    mine = replays.tag()
    for change in (
        lambda patch: patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another"),
        lambda patch: patch.setattr(torch, "get_num_threads", lambda: 1000),
        lambda patch: patch.setattr(replays, "__version__", "another"),
    ):
        with monkeypatch.context() as patch:
            change(patch)
            assert replays.tag() != mine
    new, newer = uuid.uuid4(), uuid.uuid4()  # whatever the folder holds already
    monkeypatch.setattr(replays, "tag", lambda on_cpu: f"{mine} {new}")
    (first, *compiled), (again, *found) = five_steps(), five_steps()
    assert compiled == [0, 1] and found == [1, 0] and torch.equal(first, again)
    monkeypatch.setattr(replays, "tag", lambda on_cpu: f"{mine} {newer}")
    other, *compiled = five_steps()
    assert compiled == [0, 1] and torch.equal(first, other)


def of_elements(params, batch):
    return (batch * params["w"][0]).square().mean() + (params["b"] - 1.0).square().sum()


def of_products(params, batch):
    """Products of a batch, of results and of many matrices, with a bias and without, which torch makes and not inductor."""
    hidden = nn.functional.linear(batch, params["w"], params["b"]).tanh()
    return ((hidden @ params["w"]).view(4, 10, 6) @ params["many"]).square().mean()


@compiled
@pytest.mark.parametrize("value", [of_elements, of_products])
@pytest.mark.parametrize("steps", [1, 5])
def test_recorded_kernels_make_the_bits_of_the_generated_function(steps, value, monkeypatch):
    data, scale = torch.randn(9, 40, 6, generator=torch.Generator().manual_seed(1)), torch.tensor(2.0)
    params = {"w": torch.eye(6), "b": torch.zeros(6), "many": torch.ones(4, 6, 2)}
    tx = bc.sghmc(torch.tensor(0.01), temperature=0.1)
    state = tx.init(params)
    several = {"steps": steps, "batch_dim": 0, "draws": True} if steps > 1 else {}

    def loss(params, batch):
        return scale * value(params, batch), batch[0].exp()

    def run():
        fast = bc.capture(bc.make_step(loss, tx), params, state, data[:steps] if several else data[0], **several)
        made, infos = (params, state), []
        for k in range(4):
            scale.set_(torch.tensor(2.0 + k))  # read where it is now, as batches are
            *made, info = fast(*made, data[k : k + steps] if several else data[k])
            infos.append(info)
        return fast._program.replay, optree.tree_leaves(([x.clone() for x in optree.tree_leaves(made)], infos))

    replay, found = run()
    assert replay.kernels is not None
    monkeypatch.setattr(replays, "LARGE", -1)
    replay, wanted = run()
    assert replay.kernels is None
    assert all([torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(found, wanted, strict=True)])


def test_a_handle_keeps_its_tensor_until_it_is_deleted():
    x = torch.ones(2)
    alone, handles = x._use_count(), _torch.handles([x, x])
    assert x._use_count() == alone + 2
    _torch.delete_handles(handles)
    assert x._use_count() == alone


@compiled
def test_a_row_out_of_range_is_an_error_of_python_and_the_next_batch_is_taken():
    params, tx = {"w": torch.arange(6.0)}, bc.sgd(0.1)
    step = bc.make_step(lambda p, rows: nn.functional.embedding(rows, p["w"].unsqueeze(-1)).square().sum(), tx)
    rows = torch.tensor([0, 5])
    fast = bc.capture(step, params, tx.init(params), rows)
    for _ in range(2):
        follow(step, fast, (params, tx.init(params)), [rows])
        with pytest.raises(RuntimeError, match="out of bounds"):
            fast(params, tx.init(params), torch.tensor([0, 6]))
    assert fast._program.replay.kernels is not None
