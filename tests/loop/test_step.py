"""``make_step``: one pure function of parameters, state and batch; what it can be asked for besides, and what it refuses."""

import copy
import pickle

import optree
import pytest
import torch
import torchopt
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain.testing import assert_bitwise_equal
from tests.loop.beside import assert_close, each_alone, follow
from tests.refusals import refused


def least_squares(params, batch):
    x, y = batch
    return ((x @ params["w"] + params["b"] - y) ** 2).mean()


def line():
    g = torch.Generator().manual_seed(0)
    batch = torch.randn(8, 3, generator=g), torch.randn(8, generator=g)
    return {"w": torch.randn(3, generator=g), "b": torch.zeros(())}, batch


def side_by_side(function, tx, params, batch=None, steps=3, **tolerance):
    """Steps in place move as pure ones do; what they return."""
    other = params, tx.init(params)
    mine = copy.deepcopy(other)
    for _ in range(steps):
        *mine, _ = bc.make_step(function, tx, inplace=True)(*mine, batch)
        *other, _ = bc.make_step(function, tx)(*other, batch)
    torch.testing.assert_close(optree.tree_leaves(mine), optree.tree_leaves(other), **tolerance)


def test_a_step_is_gradient_update_and_apply():
    params, batch = line()
    tx = bc.sghmc(0.1, temperature=0.1)
    state = tx.init(params)
    new, _, info = bc.make_step(least_squares, tx)(params, state, batch)
    wanted = {k: p.clone().requires_grad_() for k, p in params.items()}
    value = least_squares(wanted, batch)
    grads = dict(zip(wanted, torch.autograd.grad(value, list(wanted.values()))))
    updates, _ = tx.update(grads, state, params=params, inplace=False)
    assert_bitwise_equal(new, torchopt.apply_updates(params, updates, inplace=False))
    assert info.loss == value.detach() and info.aux == () == info.observed


def test_it_is_pure_detached_and_repeatable():
    params, batch = line()
    params["w"].requires_grad_()
    tx = bc.sghmc(0.1, temperature=0.1)
    step, state = bc.make_step(least_squares, tx), tx.init(params)
    before = copy.deepcopy((params, state))
    first = step(params, state, batch)
    assert_bitwise_equal((params, state), before)
    assert_bitwise_equal(step(params, state, batch), first)
    for leaf in (*first[0].values(), first[2].loss):
        assert not leaf.requires_grad and leaf.grad_fn is None


def test_in_place_writes_into_the_tensors_it_was_given():
    params, batch = line()
    tx = bc.sghmc(0.1, temperature=0.1)
    state = tx.init(params)
    side_by_side(least_squares, tx, params, batch, rtol=1e-6, atol=1e-7)  # the fused pass rounds a product and sum once
    out, out_state, _ = bc.make_step(least_squares, tx, inplace=True)(params, state, batch)
    assert out["w"] is params["w"] and out_state[0].trace[0] is state[0].trace[0]


@pytest.mark.parametrize(
    "tx",
    [
        bc.sgd(0.1, 0.9, weight_decay=0.1),
        bc.sghmc(0.1, temperature=0.1),
        bc.rmsprop(0.1, temperature=0.1),
        bc.chain(bc.links.scale(2.0), bc.sgd(0.1)),
        torchopt.sgd(0.1, 0.9),
    ],
    ids=["sgd", "sghmc", "rmsprop", "scale", "torchopt"],
)
@pytest.mark.parametrize(
    "function",
    [
        lambda p, b: (p[0] + p[1]).square().sum(),
        lambda p, b: p[0].sum() + (p[1] + p[0]).sum(),
        lambda p, b: (torch.cat([p[0][:1], p[1], p[0][1:]]).repeat(2)[:4] + p[1] - 1).square().sum(),
    ],
)
def test_in_place_gradients_that_share_memory_move_as_if_they_did_not(tx, function):
    """Autograd hands out one tensor for both terms of a sum, an expanded scalar for a plain sum, views of a whole."""
    side_by_side(function, tx, [torch.arange(1.0, 5.0), torch.arange(4.0) * 2], rtol=1e-5, atol=1e-6)


def test_parameters_the_loss_ignores_have_gradient_zero_and_diffuse():
    params = {"used": torch.ones(2), "idle": torch.ones(2)}
    tx = bc.sgd(0.1, weight_decay=1.0)
    new, _, _ = bc.make_step(lambda p, b: p["used"].sum(), tx)(params, tx.init(params), None)
    torch.testing.assert_close(new["idle"], torch.full((2,), 0.9))


CHANGES = {
    "eval": lambda module, params, state: module.eval(),
    "another layer": lambda module, params, state: module.__setitem__(3, nn.Linear(4, 1)),
    "no layer": lambda module, params, state: module.__setitem__(1, nn.Identity()),
    "a hook": lambda module, params, state: module[0].register_forward_hook(lambda m, a, out: 2 * out),
    "a leaf": lambda module, params, state: params.update({"0.weight": params["0.weight"] + 1}),
    "its order": lambda module, params, state: params.update({"0.weight": params.pop("0.weight")}),
    "its memory": lambda module, params, state: setattr(params["0.weight"], "data", params["0.weight"] + 1),
    "its gradient": lambda module, params, state: params["0.weight"].requires_grad_(),
    "the state": lambda module, params, state: setattr(state[0].trace[1], "data", state[0].trace[1] + 1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("tx", [bc.sghmc(0.1, temperature=0.1), bc.sgd(0.1, 0.9)], ids=["fused", "torch's kernel"])
def test_what_changes_between_two_steps_counts_from_the_next(tx, change):
    """Against pure steps through torch's own functional_call, which keep nothing between calls."""
    module, x = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 1)), torch.randn(16, 3)
    forward, params, _ = bc.make_functional(module)
    mine = params, tx.init(params)
    other_module, *other = copy.deepcopy((module, *mine))
    fast = bc.make_step(lambda p, x: forward(p, x).square().mean(), tx, inplace=True)
    pure = bc.make_step(lambda p, x: torch.func.functional_call(other_module, p, (x,)).square().mean(), tx)
    for k in range(4):
        if k == 2:
            for arguments in ((module, *mine), (other_module, *other)):
                torch.manual_seed(1)
                change(*arguments)
        torch.manual_seed(k)  # without noise the state has no key for the dropout
        *mine, info = fast(*mine, x)
        torch.manual_seed(k)
        *other, want = pure(*other, x)
        torch.testing.assert_close(info.loss, want.loss)
    assert mine[0].keys() == other[0].keys()
    for name, p in mine[0].items():
        torch.testing.assert_close(p.detach(), other[0][name], rtol=1e-5, atol=1e-6)


def test_parameters_and_state_that_become_double_are_refused_before_anything_moves():
    tx, params = bc.sghmc(0.1, temperature=0.1), {"w": torch.linspace(-1, 1, 5)}
    step, state = bc.make_step(lambda p, b: p["w"].square().sum(), tx, inplace=True), tx.init(params)
    params, state, _ = step(params, state, None)
    for t in optree.tree_leaves((params, state)):
        t.data = t.data.double() if t.is_floating_point() else t.data
    before = params["w"].clone()
    with pytest.raises(ValueError, match=r"float64.*but the state has .*float32.*convert one"):
        step(params, state, None)
    assert torch.equal(params["w"], before)


def test_a_loss_that_is_its_parameter_has_gradient_one_at_every_step():
    """Autograd hands out the tensor it started from."""
    tx, params = bc.chain(bc.links.scale(3.0), bc.sgd(0.5)), torch.tensor(1.0)
    step, state = bc.make_step(lambda p, b: p, tx, inplace=True), tx.init(params)
    for k in range(3):
        params, state, _ = step(params, state, None)
        assert params == 1 - 1.5 * (k + 1)


@pytest.mark.parametrize("options", [{}, {"microbatches": 2}, {"autocast": torch.bfloat16}, {"inplace": True}])
def test_a_step_survives_pickling(options):
    params, batch = line()
    tx = bc.skip_nonfinite(bc.sghmc(0.1, temperature=0.1))
    step = bc.make_step(least_squares, tx, **options)
    again, state = pickle.loads(pickle.dumps(step)), tx.init(params)
    mine, theirs = (f(copy.deepcopy(params), copy.deepcopy(state), batch)[:2] for f in (step, again))
    for a, b in zip(optree.tree_leaves(mine), optree.tree_leaves(theirs)):
        assert_bitwise_equal(a, b)


D = torch.float64
X, Y = torch.randn(10, 3, dtype=D), torch.randn(10, 2, dtype=D)
PARAMS = {"w": torch.randn(3, 2, dtype=D), "b": torch.randn(2, dtype=D)}


def loss(params, batch):
    return ((batch[0] @ params["w"] + params["b"]).tanh() - batch[1]).square().mean()


@pytest.mark.parametrize("parts", [1, 2, 3, 10])
@pytest.mark.parametrize("tx", [bc.sghmc(0.1, temperature=0.01), bc.adam(0.1), bc.vi.ivon(0.1, temperature=0.01)])
def test_microbatches_have_the_gradient_of_the_whole_batch(tx, parts):
    state = tx.init(PARAMS)
    want = bc.make_step(loss, tx)(PARAMS, state, (X, Y))
    got = bc.make_step(loss, tx, microbatches=parts)(PARAMS, state, (X, Y))
    assert_close(got, want, rtol=1e-12, atol=1e-14)


def test_microbatches_keep_their_aux_and_share_what_has_no_data():
    seen = []

    def noted(params, batch):
        x, y, scale, name = batch
        seen.append((len(x), float(scale), name))
        return loss(params, (x, y)) * scale, {"n": torch.tensor(len(x)), "name": name}

    tx = bc.sgd(0.1)
    step = bc.make_step(noted, tx, microbatches=3)
    info = step(PARAMS, tx.init(PARAMS), (X, Y, torch.tensor(2.0), "digits"))[2]
    assert seen == [(4, 2.0, "digits"), (3, 2.0, "digits"), (3, 2.0, "digits")]
    assert info.aux["n"].tolist() == [4, 3, 3] and info.aux["name"] == "digits"
    for bad in ((X, Y[:5]), (X[:2], Y[:2]), ("text",)):
        with pytest.raises(ValueError, match="3 microbatches need a batch whose tensors have one length of at least 3"):
            bc.make_step(loss, tx, microbatches=3)(PARAMS, tx.init(PARAMS), bad)


def test_microbatches_among_many_chains_and_captured():
    tx = bc.sghmc(0.1, temperature=0.01)
    step, params = bc.make_step(loss, tx, microbatches=2), bc.stack([PARAMS, optree.tree_map(torch.neg, PARAMS)])
    chains = bc.parallel(step, 2)
    start = params, chains.init(tx, params)
    each_alone(chains, [step] * 2, *start, [(X, Y)])
    follow(chains, bc.capture(chains, *start, (X, Y), backend="eager"), start, [(X, Y)], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("how", ["alone", "stacked", "loop", "captured", "draws"])
def test_aux_may_be_any_tree(how):
    from dataclasses import dataclass

    @dataclass
    class Note:
        text: str

    def noted(params, batch):
        return loss(params, batch), {"accuracy": torch.tensor(0.5), "n": 3, "none": None, "note": Note("b")}

    tx = bc.vi.ivon(0.1, temperature=0.1, n_samples=2) if how == "draws" else bc.sgd(0.1)
    step, params, state = bc.make_step(noted, tx), PARAMS, tx.init(PARAMS)
    if how in ("stacked", "loop"):
        step, params = bc.parallel(step, 2, loop=how == "loop"), bc.stack([PARAMS] * 2)
        state = step.init(tx, params)
    if how == "captured":
        step = bc.capture(step, params, state, (X, Y), backend="eager")
    aux = step(params, state, (X, Y))[2].aux
    assert aux["n"] == 3 and aux["none"] is None and aux["note"] == Note("b")
    assert aux["accuracy"].shape == ((2,) if how in ("stacked", "loop", "draws") else ())


def test_autocast_runs_the_loss_in_bfloat16_and_nothing_else():
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    forward, params, _ = bc.make_functional(model)
    dtypes = []

    def seen(params, batch):
        out = forward(params, batch)
        dtypes.append(out.dtype)
        return nn.functional.mse_loss(out.float(), batch[1])

    batch, tx = (X.float(), Y.float()), bc.sgd(1.0)
    got, _, info = bc.make_step(seen, tx, autocast=torch.bfloat16)(params, tx.init(params), batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = nn.functional.mse_loss(model(batch[0]).float(), batch[1])
    want.backward()
    assert dtypes == [torch.bfloat16] and got["0.weight"].dtype == torch.float32 and torch.equal(info.loss, want)
    for name, p in model.named_parameters():
        torch.testing.assert_close(got[name], p.detach() - p.grad)
    step = bc.make_step(seen, tx, autocast=torch.bfloat16)
    chains, many = bc.parallel(step, 2), bc.stack([params] * 2)
    stacked = chains(many, chains.init(tx, many), batch)[0]
    torch.testing.assert_close(stacked["0.weight"][1], got["0.weight"], rtol=0.02, atol=0.002)  # bfloat16's 8 bits
    fast = bc.capture(step, params, tx.init(params), batch, backend="eager")
    torch.testing.assert_close(fast(params, tx.init(params), batch)[0], got)


@pytest.mark.parametrize(
    ("tx", "temperature"),
    [
        (bc.sgd(0.1), 0.0),
        (bc.sghmc(0.1, temperature=0.25), 0.25),
        (bc.sghmc(0.1, temperature=lambda count: 0.5 / (1 + count)), 0.25),
        (bc.skip_nonfinite(bc.sgld(0.1, temperature=torch.tensor(0.125))), 0.125),
        (bc.vi.ivon(0.1, temperature=0.5), 0.5),
        (bc.samplers.sgnht(0.1, temperature=0.5), 0.5),
        (torchopt.sgd(0.1), 0.0),
    ],
)
def test_a_monitored_step_reports_the_norm_and_the_temperature_in_force(tx, temperature):
    step = bc.make_step(loss, tx, monitor=True)
    params, state, first = step(PARAMS, tx.init(PARAMS), (X, Y))
    info = step(params, state, (X, Y))[2]
    assert float(info.temperature) == temperature
    if not hasattr(tx, "posterior"):  # which takes its gradient at a draw
        grads = torch.func.grad(loss)(params, (X, Y))
        want = torch.cat([g.flatten() for g in grads.values()]).norm()
        torch.testing.assert_close(info.gradient_norm, want)
    assert info.gradient_norm > 0 and info.gradient_norm.ndim == 0 and first.loss.ndim == 0


def test_groups_report_a_temperature_each_and_chains_their_own():
    groups = {"w": bc.sghmc(0.1, temperature=0.5), "b": bc.sgd(0.1, temperature=0.25)}
    tx = bc.partition(groups, {"w": "w", "b": "b"})
    info = bc.make_step(loss, tx, monitor=True)(PARAMS, tx.init(PARAMS), (X, Y))[2]
    assert sorted(info.temperature.tolist()) == [0.25, 0.5]

    def made(temperature):
        return bc.sghmc(0.1, temperature=temperature)

    temperatures, params = torch.tensor([0.5, 0.25], dtype=D), bc.stack([PARAMS] * 2)
    chains = bc.parallel(
        lambda temperature: bc.make_step(loss, made(temperature), monitor=True), 2, each={"temperature": temperatures}
    )
    info = chains(params, chains.init(made, params), (X, Y))[2]
    assert torch.equal(info.temperature, temperatures) and info.gradient_norm.shape == (2,)
    several = bc.capture(
        bc.make_step(loss, made(0.5), monitor=True), PARAMS, made(0.5).init(PARAMS), (X, Y), steps=3, backend="eager"
    )
    info = several(PARAMS, made(0.5).init(PARAMS), (X, Y))[2]
    assert info.gradient_norm.shape == (3,) and info.temperature.tolist() == [0.5] * 3
    assert bc.make_step(loss, tx)(PARAMS, tx.init(PARAMS), (X, Y))[2].gradient_norm == ()


test_options_out_of_range_are_refused = refused(
    [
        ({"microbatches": 0}, "microbatches must be a whole number, at least 1"),
        ({"microbatches": True}, "microbatches must be a whole number"),
        ({"autocast": torch.float16}, r"autocast must be torch\.bfloat16, got torch\.float16"),
        ({"observe": 3}, "observe must be a function"),
    ],
    error=(TypeError, ValueError),
    of=lambda options: bc.make_step(loss, bc.sgd(0.1), **options),
)


def cubic(params, batch):
    return (params["w"] ** 3).sum() * batch


def virial(params, grads, batch):
    w = params["w"]
    return {"virial": (w * grads["w"]).sum(), "batch": batch * 1.0, "w": w, "part": w[1:], "slope": grads["w"]}


@pytest.mark.parametrize("make", [bc.sghmc, bc.rmsprop, lambda lr, **k: bc.sgd(lr, momentum=0.9, nesterov=True, **k)])
@pytest.mark.parametrize(
    "kind", ["plain", "in place", "parallel", "parallel in place", "by vmap in place", "captured", "buffers"]
)
def test_the_observed_is_of_the_parameters_and_the_gradient_before_the_step(kind, make):
    """Where it is a parameter, a part of one, or the gradient itself too, which a step in place overwrites; as is ``aux``."""
    tx = make(0.01, temperature=0.1)
    buffers = {"seen": torch.zeros(())} if kind == "buffers" else None
    of = (lambda p, batch, b: (cubic(p, batch), b, p["w"])) if buffers else lambda p, batch: (cubic(p, batch), p["w"])
    options = {"inplace": "in place" in kind, "buffers": buffers, "check_finite": "vmap" in kind}
    step = bc.make_step(of, tx, observe=virial, **options)
    params = {"w": torch.linspace(0.5, 1.0, 3, dtype=torch.float64)}
    batch = torch.tensor(2.0, dtype=torch.float64)
    if "parallel" in kind or "vmap" in kind:
        step, params = bc.parallel(step, 2), bc.stack([params, {"w": 2 * params["w"]}])
        state = step.init(tx, params)
    else:
        state = step.init(params)
    if kind == "captured":
        step = bc.capture(step, params, state, batch, backend="eager")
    for _ in range(3):
        w = params["w"].clone()
        params, state, info = step(params, state, batch)
        seen = info.observed
        assert (
            torch.allclose(seen["virial"], 3 * batch * (w**3).sum(-1), rtol=1e-14) and not seen["virial"].requires_grad
        )
        assert torch.equal(seen["w"], w) and torch.equal(seen["part"], w[..., 1:]) and torch.equal(info.aux, w)
        assert torch.allclose(seen["slope"], 3 * batch * w**2, rtol=1e-14) and bool((seen["batch"] == batch).all())


NAN, INF = float("nan"), float("inf")


def regression(params, batch):
    return ((params["w"] - batch["x"]) ** 2).sum() + params["b"] ** 2


def setup():
    tx, params = bc.sghmc(0.1, temperature=0.1), {"w": torch.zeros(3), "b": torch.ones(())}
    return tx, params, tx.init(params), {"x": torch.ones(3)}


@pytest.mark.parametrize("inplace", [False, True])
def test_a_bad_batch_is_named_with_call_and_leaf_and_nothing_is_written(inplace):
    tx, params, state, batch = setup()
    step = bc.make_step(regression, tx, inplace=inplace, check_finite=True)
    params, state, info = step(params, state, batch)
    assert info.finite.dtype == torch.bool and info.finite
    before = copy.deepcopy((params, state))
    with pytest.raises(FloatingPointError) as caught:
        step(params, state, {"x": torch.tensor([1.0, NAN, NAN])})
    words = str(caught.value)
    assert words.startswith("call 2 of this step: the loss is nan, the gradient['w'] has nan in 2 of 3 entries")
    assert "not finite before the step: batch['x'] has nan in 2 of 3 entries" in words and "skip_nonfinite" in words
    assert_bitwise_equal((params, state), before)


def test_what_was_bad_before_the_step_and_a_gradient_that_is_bad_alone_are_named():
    tx, params, state, batch = setup()
    infinite = {**params, "w": torch.tensor([0.0, INF, 0.0])}
    for function, given, words in (
        (regression, infinite, r"before the step: params\['w'\] has inf in 1 of 3 entries\."),
        (
            lambda p, b: p["w"].abs().sqrt().sum() + p["b"],
            params,
            r"step: the gradient\['w'\] has .*; params, state and batch are finite",
        ),
    ):
        with pytest.raises(FloatingPointError, match=words):
            bc.make_step(function, tx, check_finite=True)(given, state, batch)


@pytest.mark.parametrize("steps", [1, 2])
def test_under_capture_it_is_a_flag(steps):
    tx, params, state, batch = setup()
    step = bc.make_step(regression, tx, check_finite=True)
    many = {"x": torch.ones(2, 3)} if steps == 2 else batch
    fast = bc.capture(step, params, state, many, steps=steps, batch_dim=0 if steps == 2 else None, backend="eager")
    assert fast(params, state, many)[2].finite.tolist() == ([True, True] if steps == 2 else True)
    bad = (
        {"x": torch.tensor([[1.0, 1.0, 1.0], [1.0, INF, 1.0]])} if steps == 2 else {"x": torch.tensor([1.0, INF, 1.0])}
    )
    assert fast(params, state, bad)[2].finite.tolist() == ([True, False] if steps == 2 else False)


def test_stacked_chains_have_a_flag_each():
    tx, params, _, _ = setup()
    chains = bc.parallel(bc.make_step(regression, tx, check_finite=True), 2, batch_dim=0)
    params = bc.stack([params, params])
    batch = {"x": torch.tensor([[1.0, 1.0, 1.0], [1.0, NAN, 1.0]])}
    _, _, info = chains(params, chains.init(tx, params), batch)
    assert info.finite.tolist() == [True, False]


def test_a_variational_step_is_checked_too_and_captured():
    tx, params = bc.vi.mean_field(bc.adam(0.05), temperature=0.1, n_samples=2), torch.zeros(3)
    step, state = bc.make_step(lambda p, b: ((p - b) ** 2).sum(), tx, check_finite=True), tx.init(torch.zeros(3))
    assert step(params, state, torch.ones(3))[2].finite
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        step(params, state, torch.full((3,), NAN))
    info = bc.capture(step, params, state, torch.ones(3), steps=2, backend="eager")(params, state, torch.ones(3))[2]
    assert info.finite.tolist() == [True, True] and info.negative_elbo.shape == (2,) and info.draws == ()


MODEL = nn.Linear(2, 1)


@pytest.mark.parametrize(
    "params, words",
    [
        ({"w": torch.ones(2), "lr": 0.1}, r"leaf \['lr'\] is float, 0.1, in which no gradient"),
        ({"w": torch.ones(2), "name": "x"}, r"leaf \['name'\] is str, 'x'"),
        ({"w": torch.ones(2), "n": torch.arange(2)}, r"leaf \['n'\] is torch.int64, in which no gradient"),
        (
            nn.ParameterDict({"w": torch.ones(2)}),
            r"leaf \(the bare tensor\) is ParameterDict, .*dict\(module.named_parameters\(\)\)",
        ),
        (
            {"head": MODEL, "w": torch.ones(2)},
            r"leaf \['head'\] is Linear, .*dict\(module.named_parameters\(\)\)",
        ),
    ],
)
@pytest.mark.parametrize("inplace", [False, True])
def test_leaves_that_no_gradient_can_be_taken_in_are_named(params, words, inplace):
    tx = bc.sgd(0.1)
    with pytest.raises(TypeError, match=f"params: {words}"):
        bc.make_step(lambda p, b: p["w"].sum(), tx, inplace=inplace)(params, tx.init({"w": torch.ones(2)}), ())


def embedding_loss(layer):
    return lambda params, batch: torch.func.functional_call(layer, params, (batch,)).square().sum()


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    "tx", [bc.sgd(0.1), bc.sghmc(0.1, temperature=0.1), bc.adam(0.1)], ids=["sgd", "sghmc", "adam"]
)
def test_sparse_gradients_are_refused_by_name(tx, inplace):
    layer = nn.Embedding(5, 2, sparse=True)
    params = {k: p.detach().clone() for k, p in layer.named_parameters()}
    state = tx.init(params)
    before = copy.deepcopy((params, state))
    with pytest.raises(ValueError, match=r"gradient of leaf \['weight'\] is sparse.*sparse=False"):
        bc.make_step(embedding_loss(layer), tx, inplace=inplace)(params, state, torch.tensor([1, 3]))
    assert_bitwise_equal((params, state), before)
