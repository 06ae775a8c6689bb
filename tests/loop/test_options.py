"""What a step can be asked for besides its gradient."""

import optree
import pytest
import torch
import torchopt
from torch import nn

import bayesopt_chain as bc
from tests.loop.alone import assert_close, each_alone
from tests.loop.capture.recorded import follow

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
    state = chains.init(tx, many)
    stacked = chains(many, state, batch)[0]
    torch.testing.assert_close(stacked["0.weight"][1], got["0.weight"], rtol=0.02, atol=0.002)  # bfloat16's 8 bits
    fast = bc.capture(step, params, tx.init(params), batch, backend="eager", clone=True)
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
    state = chains.init(made, params)
    info = chains(params, state, (X, Y))[2]
    assert torch.equal(info.temperature, temperatures) and info.gradient_norm.shape == (2,)
    several = bc.capture(
        bc.make_step(loss, made(0.5), monitor=True), PARAMS, made(0.5).init(PARAMS), (X, Y), steps=3, backend="eager"
    )
    info = several(PARAMS, made(0.5).init(PARAMS), (X, Y))[2]
    assert info.gradient_norm.shape == (3,) and info.temperature.tolist() == [0.5] * 3
    assert bc.make_step(loss, tx)(PARAMS, tx.init(PARAMS), (X, Y))[2].gradient_norm == ()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"microbatches": 0}, "microbatches must be a whole number, at least 1"),
        ({"microbatches": True}, "microbatches must be a whole number"),
        ({"autocast": torch.float16}, r"autocast=torch\.float16; pass torch\.bfloat16"),
    ],
)
def test_options_out_of_range_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        bc.make_step(loss, bc.sgd(0.1), **options)
