"""What a model draws is a function of key and count, and the same alone, stacked and traced."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import bayesopt_chain as bc
from bayesopt_chain._torch import mark_generator
from bayesopt_chain.loop.model_draws import Keyed, model_draws

KEYS, COUNTS = torch.tensor([5, 7, 9]), torch.tensor([0, 1, 2])

MODELS = {
    "dropout": lambda x: F.dropout(F.dropout(x, 0.3), 0.5),
    "dropout in place": lambda x: F.dropout(x * 1, 0.4, True, True),
    "dropout1d": lambda x: F.dropout1d(x[..., None] * torch.ones(4), 0.4).sum(-1),
    "dropout1d of one datum": lambda x: F.dropout1d(x, 0.4),
    "dropout2d": lambda x: F.dropout2d(x[..., None, None] * torch.ones(2, 2), 0.4).sum((-1, -2)),
    "dropout3d": lambda x: F.dropout3d(x[..., None, None, None] * torch.ones(2, 2, 2), 0.4).sum((-1, -2, -3)),
    "dropout3d of one datum": lambda x: F.dropout3d(x[..., None, None] * torch.ones(2, 2), 0.4).sum((-1, -2)),
    "randn_like": lambda x: x * torch.randn_like(x) + torch.rand_like(x),
    "factories": lambda x: x * torch.rand(5, 6) + torch.randn((5, 6), dtype=x.dtype),
    "a mixture": lambda x: F.dropout(x, 0.2) * torch.randn_like(x) + F.dropout(x, 0.1),
}


def alone(model, x, key, count):
    with model_draws((key, count)):
        return model(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MODELS)
def test_a_lane_of_vmap_draws_what_it_draws_alone_bit_for_bit(name, dtype):
    model, xs = MODELS[name], torch.randn(3, 5, 6, dtype=dtype)
    want = torch.stack([alone(model, *row) for row in zip(xs, KEYS, COUNTS)])
    got = torch.vmap(lambda *row: alone(model, *row), randomness="error")(xs, KEYS, COUNTS)
    assert torch.equal(got, want)
    assert not torch.equal(got[0] / xs[0], got[1] / xs[1])


def test_nobody_elses_draws_are_touched_and_count_and_key_decide():
    x, state = torch.ones(1000), torch.get_rng_state()
    masks = [alone(F.dropout, x, torch.tensor(k), torch.tensor(c)) for k, c in ((1, 0), (1, 0), (1, 1), (2, 0))]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(masks[0], masks[1])
    for other in masks[2:]:
        assert 400 < int((masks[0] == other).sum()) < 600  # independent halves: false alarm 1e-9
    with pytest.raises(ZeroDivisionError), model_draws((torch.tensor(1), torch.tensor(0))):
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), state)


def test_where_calls_are_intercepted_others_draw_from_torchs_generator_as_without():
    def others(context):
        torch.manual_seed(5)
        with context:
            made = [torch.normal(0.0, 1.0, (3,)), F.dropout(torch.ones(9)), torch.randint(99, (3,)), torch.rand(3)]
        return [made[0], made[2], torch.normal(0.0, 1.0, (3,))], torch.initial_seed()

    plain, seed = others(nullcontext())
    torch.manual_seed(5)
    want = [torch.normal(0.0, 1.0, (3,)), torch.randint(99, (3,)), torch.normal(0.0, 1.0, (3,))]
    got, after = others(Keyed(torch.tensor(1), torch.tensor(0)))
    assert all(map(torch.equal, got, want)) and after == seed == 5 and torch.equal(plain[0], want[0])


def test_dropout_that_is_off_draws_nothing():
    x, key, count = torch.randn(5, 6), torch.tensor(3), torch.tensor(0)
    with Keyed(key, count) as keyed:
        assert F.dropout(x, 0.5, training=False) is x and F.dropout(x, 0.0) is x
        assert torch.equal(F.dropout(x, 1.0), torch.zeros_like(x)) and nn.Dropout(0.5).eval()(x) is x
        assert [*keyed.states] == [0] and not torch.default_generator.initial_seed()
        with pytest.raises(ValueError, match="probability"):
            F.dropout(x, 1.5)


def test_on_a_device_philox_gives_masks_by_key_count_and_call():
    """The path of devices, on the ``meta`` device for its shapes and by its draws on a CPU."""
    key, count, n = torch.tensor(3), torch.tensor(0), 20000
    keyed = Keyed(key, count)
    keyed.key, keyed.count = key.to("meta"), count.to("meta")
    assert keyed.draw("bernoulli", (4, 5), 0.7, torch.float32, torch.device("meta")).shape == (4, 5)

    def drawn(count, kind="bernoulli", dtype=torch.float32):
        keyed = Keyed(key, count)
        mark_generator(0)  # as the context does
        keyed.key = mock.MagicMock(device=torch.device("cuda"), __xor__=lambda self, salt: key ^ salt)
        return [keyed.draw(kind, (n,), 0.7, dtype, torch.device("cpu")) for _ in range(2)]

    first, second = drawn(count)
    again, other = drawn(count)[0], drawn(count + 1)[0]
    assert torch.equal(first, again) and not torch.equal(first, second) and not torch.equal(first, other)
    for mask in (first, second, other):  # five standard deviations of the mean: false alarm 6e-7 each
        assert set(mask.tolist()) == {0.0, 1.0} and abs(float(mask.mean()) - 0.7) < 5 * (0.21 / n) ** 0.5
    normal, _ = drawn(count, "normal", torch.float64)
    assert abs(float(normal.mean())) < 5 / n**0.5 and abs(float(normal.var()) - 1) < 5 * (2 / n) ** 0.5


def under_vmap(model, x):
    return torch.vmap(lambda x, k, c: alone(model, x, k, c), randomness="error")(x, KEYS, COUNTS)


def test_draws_inside_fused_operations_are_refused():
    x = torch.randn(3, 5, 2, 6)
    attention, lstm = nn.MultiheadAttention(6, 2, dropout=0.1), nn.LSTM(6, 4, 2, dropout=0.3)
    for model, words in (
        (lambda x: attention(x, x, x)[0], "randomness error mode"),
        (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.2), "randomness error mode"),
        (lambda x: F.alpha_dropout(x, 0.2, training=True), "randomness error mode"),
        (lambda x: lstm(x)[0], r"lstm with dropout 0\.3 draws inside.*loop=True"),
    ):
        with pytest.raises(RuntimeError, match=words):
            under_vmap(model, x)
    attention.eval()
    want = torch.stack([attention(y, y, y)[0] for y in x])
    torch.testing.assert_close(under_vmap(lambda x: attention(x, x, x)[0], x), want)


@pytest.mark.parametrize("draws", [False, True])
def test_on_a_device_draws_that_nobody_intercepts_are_refused(draws, monkeypatch):
    """Shown on a CPU, with a number in the place of the position of a device's generator."""
    generator = mock.Mock(**{"get_offset.side_effect": [0, 4 if draws else 0]})
    monkeypatch.setattr(torch.cuda, "default_generators", [generator], raising=False)
    key = torch.tensor(3)
    on_device = mock.MagicMock(wraps=key, device=torch.device("cuda"), is_meta=False, get_device=lambda: 0)
    monkeypatch.setattr("bayesopt_chain.tracing.is_hidden", lambda x: False)
    with pytest.raises(RuntimeError, match="takes no key") if draws else nullcontext(), Keyed(on_device, key):
        pass


@pytest.mark.parametrize("captured", [False, True])
def test_what_activation_checkpointing_computes_again_draws_the_same(captured, monkeypatch):
    if not captured:  # as on a device, where calls are intercepted in plain code too
        monkeypatch.setattr("bayesopt_chain.loop.model_draws.tracing.is_plain", lambda *tensors: False)

    def layer(w, x):
        return F.dropout(torch.tanh(x @ w), 0.5) * torch.rand_like(x)

    def loss(checkpointed):
        def of(w, x):
            x = checkpoint(layer, w, x, use_reentrant=False) if checkpointed else layer(w, x)
            return F.dropout(layer(w, x), 0.5).square().sum()

        return of

    w, x, tx = (
        torch.randn(6, 6, dtype=torch.float64),
        torch.randn(4, 6, dtype=torch.float64),
        bc.sgld(0.01, temperature=0.1),
    )
    state, found = tx.init(w), []
    for checkpointed in (False, True):
        step = bc.make_step(loss(checkpointed), tx)
        step = bc.capture(step, w, state, x, backend="eager") if captured else step
        found.append(step(w, state, x)[0])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_numbers_have_the_shape_dtype_and_device_that_are_asked_for():
    x, given = torch.ones(2, 3), {"dtype": torch.float64, "device": "meta"}
    with Keyed(torch.tensor(1), torch.tensor(0)):
        made = [torch.randn_like(x, **given), torch.rand_like(input=x, **given), torch.rand(2, 3, **given)]
        made += [
            torch.randn((2, 3), **given),
            torch.randn(size=(2, 3), **given),
            torch.rand(torch.Size((2, 3)), **given),
        ]
        assert torch.rand(()).shape == torch.randn([]).shape == ()
    assert {(tuple(y.shape), y.dtype, y.device.type) for y in made} == {((2, 3), torch.float64, "meta")}


def test_data_by_data_gradients_of_a_model_that_drops_are_refused():
    key, count = torch.tensor(1), torch.tensor(0)
    with pytest.raises(RuntimeError, match=r"dropout: the model draws once for many data"), Keyed(key, count):
        torch.vmap(lambda x: F.dropout(x, 0.5))(torch.ones(3, 4))


def test_a_seeded_generator_and_a_carried_one_agree_in_a_trace():
    from torch.fx.experimental.proxy_tensor import make_fx

    def program(x, key, count):
        return alone(MODELS["a mixture"], x, key, count)

    x, key, count = torch.randn(5, 6), torch.tensor(4), torch.tensor(7)
    graph = make_fx(program)(x, torch.tensor(1), torch.tensor(0))
    assert torch.equal(graph(x, key, count), program(x, key, count))


@pytest.mark.parametrize("name", ["att", "lstm"])
def test_alone_even_fused_operations_follow_the_key(name):
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.2) if name == "att" else nn.LSTM(6, 4, 2, dropout=0.3)
    x, key = torch.randn(5, 2, 6), torch.tensor(3)

    def out(count):
        with model_draws((key, torch.tensor(count))):
            y = layer(x)
        return y[0] if name == "lstm" else y

    assert torch.equal(out(0), out(0)) and not torch.equal(out(0), out(1))


def test_a_step_at_a_temperature_replays_its_dropout_and_an_optimizer_does_not():
    def loss(w, x):
        return F.dropout(x * w, 0.5).square().mean()

    w, x = torch.ones(8), torch.randn(16, 8)
    for tx, replays in ((bc.sghmc(0.1, temperature=0.01), True), (bc.sgd(0.1), False)):
        step, state = bc.make_step(loss, tx), tx.init(w)
        torch.manual_seed(0)
        before = torch.get_rng_state()
        a, b = step(w, state, x), step(w, state, x)
        assert torch.equal(a[0], b[0]) is replays
        assert torch.equal(torch.get_rng_state(), before) is replays
        assert not torch.equal(step(w, a[1], x)[2].loss, a[2].loss)  # the next count draws anew
