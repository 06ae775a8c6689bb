"""A run knows what it is of: another one under its path is refused by name, and may stand beside it under a name of its own."""

import dataclasses
import functools

import optree
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

import bayesopt_chain as bc
from bayesopt_chain.random import compiled
from bayesopt_chain.runs.run import code_digest, describe, describe_optimizer, difference
from tests.refusals import refused
from tests.runs.toys import loss as quadratic


def loss(params, batch):
    return ((batch[0] @ params["w"] - batch[1]) ** 2).mean()


def other_loss(params, batch):
    return ((batch[0] @ params["w"] - batch[1]) ** 2).mean()


def data(seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(12, 3, generator=g), torch.randn(12, generator=g)


def run(
    path, lr=0.1, momentum=0.9, temperature=0.01, fn=loss, batches=None, generator=None, torchs=0, dtype=None, **more
):
    torch.manual_seed(torchs)
    tx = bc.sghmc(lr, momentum, temperature=temperature, generator=generator)
    params = {"w": torch.zeros(3, dtype=dtype)}
    batches = data() if batches is None else batches
    return bc.sample(bc.make_step(fn, tx), params, tx.init(params), batches, **{"steps": 6, "path": path, **more})


def mended(epochs, label=0.0):
    """All data in memory are compared, not some rows of them."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(1000, 3, generator=g), torch.randn(1000, generator=g) + label * (torch.arange(1000) == 1)
    return {"batches": bc.epochs((x, y), 100, seed=0) if epochs else (x, y)}


def epochs(seed=3, order="reshuffled", batch=4):
    return {"batches": bc.epochs(data(), batch, seed=seed, order=order)}


def loader(rows=range(12), seed=3):
    chosen = Subset(TensorDataset(*data()), rows)
    return {"batches": DataLoader(chosen, batch_sampler=bc.epochs(chosen, 4, seed=seed))}


def keyed(keys):
    return {"batches": DataLoader(Subset({key: (torch.ones(3), torch.ones(())) for key in "abc"}, list(keys)))}


def closing_over(rate):
    return {"lr": lambda count: rate / (1 + count)}


def optimizer_run(path, lr=0.01, temperature=1e-3, gamma=0.5, steps=6, generator=None, torchs=0):
    torch.manual_seed(torchs)
    model = torch.nn.Linear(3, 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    optimizer = bc.optim.SGHMC(model.parameters(), lr=lr, temperature=temperature, generator=generator)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma)
    step = bc.optim.as_step(
        model, optimizer, lambda m, batch: (m(batch[0])[:, 0] - batch[1]).square().mean(), scheduler=scheduler
    )
    return bc.sample(step, step.params, step.state, data(), steps=steps, path=path)


def run_of_chains(path, last=0.02, steps=6):
    def tempered(temperature):
        return bc.sghmc(0.1, temperature=temperature)

    torch.manual_seed(0)
    each = {"temperature": torch.tensor([0.01, last])}
    chains = bc.parallel(lambda temperature: bc.make_step(loss, tempered(temperature)), 2, each=each)
    params = {"w": torch.zeros(2, 3)}
    return bc.sample(chains, params, chains.init(tempered, params), data(), steps=steps, path=path)


OTHERS = {  # a run, what is given to it first and then, and what is said
    "temperature": (run, {}, {"temperature": 0.02}, r"LangevinNoise\.temperature is 0\.01, here 0\.02"),
    "lr": (run, {}, {"lr": 0.05}, r"step_size is 0\.1, here 0\.05"),
    "momentum": (run, {}, {"momentum": 0.8}, r"Momentum.* (is|absent)"),
    "schedule": (run, {}, {"lr": bc.schedules.cosine(0.1, 100)}, r"step_size is 0\.1, here \['cosine'"),
    "what a schedule sees": (run, closing_over(0.1), closing_over(0.2), r"sees\.rate is 0\.1, here 0\.2"),
    "loss": (run, {}, {"fn": other_loss}, r"loss is .*\.loss, here .*\.other_loss"),
    "data": (run, {}, {"batches": data(1)}, r"data.tensors.0. is"),
    "a label": (run, mended(False), mended(False, 3.0), "data"),
    "a label in epochs": (run, mended(True), mended(True, 3.0), "data"),
    "shape of the data": (run, {}, {"batches": tuple(x[:9] for x in data())}, r"data.tensors"),
    "batches": (run, {}, {"batches": [data()]}, r"data.kind is one batch, here 1 batches"),
    "epochs": (run, {}, epochs(), r"data.kind is one batch, here epochs"),
    "seed of epochs": (run, epochs(), epochs(seed=4), r"data\.seed is"),
    "order of epochs": (run, epochs(), epochs(order="independent"), r"data\.(seed|order|batch_size) is"),
    "size of batches": (run, epochs(), epochs(batch=3), r"data\.batch_size is"),
    "rows of a data set": (run, loader(range(8)), loader(range(4, 12)), r"data\.rows\[0\] is"),
    "keys of a data set": (run, keyed("ab"), keyed("ac"), r"data\.rows\[0\] is"),
    "seed of a loader's epochs": (run, loader(), loader(seed=4), r"data\.seed is"),
    "parameters": (run, {}, {"dtype": torch.float64}, r"tree.0/w is torch.float32 \[3\], here torch.float64"),
    "seed": (run, {"seed": 2}, {"seed": 3}, "seed is 2, here 3"),
    "seed of a run that began without one": (run, {}, {"seed": 3}, "seed is None, here 3"),
    "thinning": (run, {}, {"thinning": 2}, "thinning is 1, here 2"),
    "burn-in": (run, {}, {"burn_in": 2}, "burn_in is 0, here 2"),
    "longer": (run, {}, {"lr": 0.05, "steps": 12}, r"step_size is 0\.1, here 0\.05"),
    "lr of an optimizer": (optimizer_run, {}, {"lr": 0.02}, "lr is"),
    "temperature of an optimizer": (optimizer_run, {}, {"temperature": 1e-2}, "temperature is"),
    "scheduler of an optimizer": (optimizer_run, {}, {"gamma": 0.1}, "gamma is"),
    "what each chain has": (run_of_chains, {}, {"last": 0.03}, r"each\S*1\S*temperature is 0\.0199.*, here 0\.0299"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_run_under_the_same_path_is_refused_by_name_and_the_same_goes_on(name, tmp_path):
    go, first, then, says = OTHERS[name]
    go(tmp_path, **first)
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=rf"holds another run: .*{says}.*directory of its own"):
        go(tmp_path, **then)
    assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == before
    assert len(go(tmp_path, **first, steps=9)) == 9


def test_rows_of_a_data_set_are_known_whatever_holds_their_numbers(tmp_path):
    rows = torch.tensor([3, 1, 2, 0])
    for steps, held in enumerate((rows, rows.numpy(), [*rows.numpy()], rows.tolist()), 1):
        assert len(run(tmp_path, **loader(held), steps=steps)) == steps


@pytest.mark.filterwarnings("error")
def test_a_loss_of_the_same_name_and_other_code_warns(tmp_path):
    def made(power):
        def fn(params, batch):
            return (params["w"] ** 2).sum() + (batch[0].mean() if power else 0.0)

        return fn

    for _ in range(2):
        run(tmp_path, fn=made(False))
    for steps in (8, 9):
        with pytest.warns(UserWarning, match=r"sees.power is False, here True"):
            run(tmp_path, fn=made(True), steps=steps)
    run(tmp_path, fn=made(False), steps=9)


def test_a_lambda_of_other_code_is_refused_since_its_name_says_nothing(tmp_path):
    def made(scale):
        return lambda p, batch: scale * (p["w"] ** 2).sum()

    def bound(scale):
        return functools.partial(lambda scale, p, batch: scale * (p["w"] ** 4).sum(), scale)

    run(tmp_path, fn=lambda p, batch: (p["w"] ** 2).sum())
    run(tmp_path, fn=lambda p, batch: (p["w"] ** 2).sum())  # elsewhere in the source: the same
    for other in (lambda p, batch: (p["w"] ** 4).sum(), lambda p, batch: p["w"].abs().sum()):
        with pytest.raises(ValueError, match=r"another run: loss\.code.* is .*directory of its own"):
            run(tmp_path, fn=other, steps=8)
    for which in (made, bound):
        run(tmp_path / which.__name__, fn=which(1.0))
        with pytest.warns(UserWarning, match=r"is 1\.0, here 2\.0"):  # the same code, that sees something else
            run(tmp_path / which.__name__, fn=which(2.0), steps=8)


def test_the_code_of_a_set_does_not_depend_on_the_order_of_its_elements():
    """Strings hash to other numbers in every process, so that a set among the constants has another order in each."""
    code = (lambda x: x in {0, 8}).__code__
    one, other = (code.replace(co_consts=(None, frozenset(x))) for x in ([0, 8], [8, 0]))
    assert repr(one.co_consts) != repr(other.co_consts)
    assert code_digest(one) == code_digest(other) != code_digest(code.replace(co_consts=(None, frozenset([0, 9]))))


class Scaled:
    """A loss that is an object, as are those of many libraries."""

    def __init__(self, scale=1.0):
        self.scale = scale
        self.again = self.part  # an object may refer to itself

    def part(self, params, batch):
        return self.scale * loss(params, batch)

    def __call__(self, params, batch):
        return self.part(params, batch)


class Other(Scaled):
    """The same code under another name."""


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float = 1.0

    def __call__(self, params, batch):
        return self.scale * loss(params, batch)


def scaled(params, batch, scale):
    return scale * loss(params, batch)


LOSSES = {  # a loss, the same one of another number, and one of another name
    "object": (Scaled, Other, "self.scale"),
    "dataclass": (Frozen, Scaled, "self.scale"),
    "bound method": (lambda scale: Scaled(scale).part, lambda scale: Scaled(scale).__call__, "self.scale"),
    "partial": (
        lambda scale: functools.partial(scaled, scale=scale),
        lambda scale: functools.partial(loss),
        "bound.*scale",
    ),
    "partial of an object": (
        lambda scale: functools.partial(Scaled(scale)),
        lambda scale: functools.partial(Other(scale)),
        "self.scale",
    ),
}


FACTOR = torch.ones(3)


TABLE = {"scale": (2.0, "w")}


def with_a_function(params, batch):
    return scaled(params, batch, 2.0)


def scaled_otherwise(params, batch, scale):
    return scale * loss(params, batch) + 1.0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "fn, name, value",
    [
        (lambda params, batch: (FACTOR * params["w"] ** 2).sum(), "FACTOR", 5 * torch.ones(3)),
        (with_a_function, "scaled", scaled_otherwise),
        (lambda params, batch: TABLE["scale"][0] * loss(params, batch), "TABLE", {"scale": (3.0, "w")}),
    ],
)
def test_what_a_loss_reads_from_its_module_is_compared(fn, name, value, tmp_path, monkeypatch):
    run(tmp_path, fn=fn)
    run(tmp_path, fn=fn, steps=7)
    monkeypatch.setitem(globals(), name, value)
    with pytest.raises((ValueError, UserWarning), match=name):
        run(tmp_path, fn=fn, steps=12)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_that_is_an_object_is_known_by_its_name_its_code_and_what_it_holds(kind, tmp_path):
    made, another, what = LOSSES[kind]
    for steps in (6, 7):
        run(tmp_path, fn=made(1.0), steps=steps)
    with pytest.raises(ValueError, match="holds another run: loss is"):
        run(tmp_path, fn=another(1.0), steps=8)
    with pytest.warns(UserWarning, match=rf"sees\.{what}"):
        run(tmp_path, fn=made(2.0), steps=8)


def test_a_method_that_an_object_uses_is_part_of_its_code(tmp_path, monkeypatch):
    run(tmp_path, fn=Scaled())
    monkeypatch.setattr(Scaled, "part", lambda self, params, batch: self.scale * loss(params, batch) + 0.0)
    with pytest.warns(UserWarning, match="code"):
        run(tmp_path, fn=Scaled(), steps=7)


def test_the_weights_of_a_module_that_is_a_loss_are_no_part_of_its_name():
    a, b = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    assert not difference(describe(a), describe(b)) and difference(describe(a), describe(torch.nn.Linear(3, 1)))
    assert "reduction" in difference(describe(torch.nn.MSELoss()), describe(torch.nn.MSELoss(reduction="sum")))


@pytest.mark.parametrize("go", [run, optimizer_run])
def test_a_generator_with_another_seed_is_another_run_and_one_that_was_not_given_is_not(go, tmp_path):
    def rows(path, steps, seed=None, torchs=0):
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return next(iter(go(path, steps=steps, generator=generator, torchs=torchs).params.values()))

    for name, seed in (("given", 1), ("not", None)):
        rows(tmp_path / name, 4, seed)
        assert torch.equal(rows(tmp_path / name, 8, seed, torchs=5), rows(None, 8, seed))
    with pytest.raises(ValueError, match=r"generator is 1, here 2"):
        rows(tmp_path / "given", 4, seed=2)


def test_a_seed_makes_the_keys():
    one, again, other = (run(None, seed=seed, torchs=torchs).params["w"] for seed, torchs in ((1, 0), (1, 99), (2, 0)))
    assert torch.equal(again, one) and not torch.equal(other, one)


def test_chains_have_keys_of_their_global_numbers():
    tx, params = bc.sgld(0.1, temperature=0.1), {"w": torch.zeros(4, 2)}

    def chains(n):
        made = bc.parallel(bc.make_step(lambda p, b: (p["w"] ** 2).sum(), tx), n)
        start = {"w": params["w"][:n]}
        return bc.sample(made, start, made.init(tx, start), None, steps=3, seed=5).params["w"]

    assert torch.equal(chains(4)[:, :2], chains(2))


def test_one_chain_twice_is_not_two(tmp_path):
    draws = run(tmp_path / "a")
    run(tmp_path / "b")
    with pytest.raises(ValueError, match="drew the same noise"):
        bc.Draws.open([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(ValueError, match="one chain"):
        draws.stack_chains(draws)


def test_descriptions_of_the_named_samplers_are_those_that_stand_in_runs_on_disk():
    """A class or a field that is renamed makes other runs of them: raise ``files.FORMAT`` and write the new text here."""
    assert describe(bc.sgld(0.1, temperature=1.0)) == [
        "Chain",
        ["LangevinNoise", {"temperature": 1.0}],
        ["Scale", {"step_size": 0.1, "sign": -1}],
    ]
    for a, b in ((1, 2), ({1, 2}, {1, 3})):
        assert difference(describe(functools.partial(max, a)), describe(functools.partial(max, b)))
    assert not difference({"function": "f", "code": {"3.9": "a"}}, {"function": "f", "code": {"3.10": "b"}})


def test_an_optimizer_that_learns_an_option_is_the_one_it_was(monkeypatch):
    """As torch's learn them from one version to the next."""

    class Newer(torch.optim.SGD):
        def __init__(self, params, lr, momentum=0, decoupled=False):
            super().__init__(params, lr, momentum)
            self.param_groups[0]["decoupled"] = decoupled

    told = [describe_optimizer(torch.optim.SGD([torch.zeros(1)], 0.1))]
    told += [{**describe_optimizer(Newer([torch.zeros(1)], 0.1, decoupled=x)), "kind": "SGD"} for x in (False, True)]
    assert not difference(told[0], told[1])
    assert "decoupled is absent, here True" in difference(told[0], told[2])


def test_chains_that_were_captured_are_the_chains_that_they_are(tmp_path):
    def go(temperature, path, steps=4):
        tx, params = bc.sghmc(0.1, temperature=temperature), torch.ones(3, 2)
        chains = bc.parallel(bc.make_step(lambda p, batch: (p**2).sum(), tx), 3)
        state = chains.init(tx, params, seed=1)
        step = bc.capture(chains, params, state, None, backend="eager")
        return bc.sample(step, params, state, None, steps=steps, path=path, seed=1)

    assert go(0.1, tmp_path).chains == bc.Draws.open(tmp_path).chains == 3
    with pytest.raises(ValueError, match=r"LangevinNoise.temperature is 0.1, here 0.2"):
        go(0.2, tmp_path, 8)
    assert torch.equal(go(0.1, tmp_path, 8).params, go(0.1, None, 8).params)


# What used to be an error about something else says what is wrong and what to do


TX = bc.sghmc(0.1, temperature=0.1)


def test_inference_mode_is_named():
    params = {"w": torch.zeros(3)}
    state = TX.init(params)
    model = torch.nn.Linear(3, 1)
    step = bc.optim.as_step(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).mean())
    with torch.inference_mode():
        for call in (
            lambda: bc.make_step(quadratic, TX)(params, state, None),
            lambda: step(step.params, step.state, torch.ones(2, 3)),
            lambda: bc.sample(bc.make_step(quadratic, TX), params, state, None, steps=2),
        ):
            with pytest.raises(ValueError, match="inference_mode"):
                call()


def test_chains_start_from_a_transformation_or_from_a_step():
    params = {"w": torch.zeros(2, 3)}
    step = bc.make_step(quadratic, TX)
    chains = bc.parallel(step, 2)
    of_tx, of_step = chains.init(TX, params, seed=1), chains.init(step, params, seed=1)
    assert all(map(torch.equal, optree.tree_leaves(of_tx), optree.tree_leaves(of_step)))


def test_a_user_without_a_home_is_told_where_kernels_can_be_kept(monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(compiled.Path, "home", nowhere)
    with pytest.warns(UserWarning, match="home directory.*XDG_CACHE_HOME"):
        compiled.private_folder()


@pytest.mark.slow  # of the import of torch's compiler
@pytest.mark.filterwarnings("ignore:Dynamo does not know", "ignore:make_step. torch.compile leaves")
def test_what_torch_compile_cannot_follow_runs_as_it_is():
    """Dynamo knows neither functorch's levels nor optree's trees: it leaves steps and updates to Python, which are right."""
    params, gradient = {"w": torch.ones(3)}, {"w": torch.full((3,), 2.0)}
    state, step = TX.init(params), bc.make_step(quadratic, TX)
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
    for batches in (x, (x, y), [(x, y)], DataLoader(TensorDataset(x, y), 2)):
        torch.testing.assert_close(draws.predict(forward, batches), want)
    torch.testing.assert_close(draws.predict(module, x), want)


def on_meta():
    params = {"w": torch.zeros(3, device="meta")}
    bc.sample(bc.make_step(quadratic, TX), params, TX.init(params), None, steps=3)


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


test_what_is_refused_is_named = refused(
    [
        (lambda: run(None, seed=0.5), TypeError, "seed must be a whole number"),
        (
            lambda: bc.parallel(bc.make_step(quadratic, TX), 2).init({}, TX),
            TypeError,
            r"parallel: init takes \(tx, params\).*got dict",
        ),
        (on_meta, ValueError, r"w.* on the device meta"),
        (heat_of_an_optimizer, TypeError, "of an optimizer pass the chain of the same hyperparameters"),
        (folded_chains, ValueError, r"need \[5, 2, N\]: unfold the chains"),
        (lambda: batches_of_chains(None, 3), ValueError, EACH),
        (lambda: batches_of_chains(0, None), ValueError, EACH),
    ]
)
