"""What a captured step refuses rather than replay wrongly: second threads, calls within calls, modules in another mode."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from tests.loop.capture.recorded import BACKENDS, follow, record


def quadratic(params, batch):
    return ((params["w"] - batch) ** 2).sum()


def captured(**options):
    params, batch = {"w": torch.zeros(50)}, torch.ones(50)
    step, fast, start = record(quadratic, bc.sghmc(0.1, temperature=0.1), params, batch, backend="eager", **options)
    return step, fast, *start


def trajectory(step, params, state, batch, n=100):
    for _ in range(n):
        params, state, _ = step(params, state, batch)
    return params["w"].clone()


def test_two_threads_that_clone_take_turns():
    """Each trajectory is the one that the uncaptured step makes alone."""
    step, fast, params, state = captured(clone=True)
    batches = [torch.full((50,), float(i)) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda batch: trajectory(fast, params, state, batch), batches))
    for mine, batch in zip(got, batches):
        torch.testing.assert_close(mine, trajectory(step, params, state, batch), rtol=1e-5, atol=1e-5)


def in_a_thread(function):
    raised = []

    def run():
        try:
            function()
        except bc.CaptureError as err:
            raised.append(err)

    thread = threading.Thread(target=run, name="second")
    thread.start()
    thread.join()
    return raised


def test_a_second_thread_that_would_share_buffers_is_refused():
    _, fast, params, state = captured()
    params, state, _ = fast(params, state, torch.ones(50))
    before = params["w"].clone()
    (err,) = in_a_thread(lambda: fast(params, state, torch.ones(50)))
    assert "'MainThread' holds them" in str(err) and "'second'" in str(err) and "clone=True" in str(err)
    assert torch.equal(params["w"], before)
    fast(params, state, torch.ones(50))


def test_a_step_whose_thread_has_ended_may_go_on_in_another():
    _, fast, params, state = captured()
    assert not in_a_thread(lambda: fast(params, state, torch.ones(50)))
    assert not in_a_thread(lambda: fast(params, state, torch.ones(50)))


@pytest.mark.parametrize("clone", [False, True])
def test_a_call_within_a_call_is_refused(clone):
    _, fast, params, state = captured(clone=clone)
    program = fast._program
    fast._program = program._replace(replay=lambda batch: fast(params, state, batch[0]))
    with pytest.raises(bc.CaptureError, match="within a call of itself"):
        fast(params, state, torch.ones(50))
    fast._program = program
    fast(params, state, torch.ones(50))  # what failed holds no lock


@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_and_names_stay_as_captured_and_tensors_are_read(backend):
    """As the docstring says, in both back ends: a number and a name bound anew are not seen, a tensor written in place is."""
    number, shift = [2.0], {"tensor": torch.ones(3)}

    def loss(params, batch):
        return (number[0] * params * shift["tensor"]).sum()

    _, fast, start = record(loss, bc.sgd(1.0), torch.zeros(3), (), backend=backend, clone=True)
    first = shift["tensor"]
    number[0], shift["tensor"] = 5.0, torch.full((3,), 7.0)
    assert torch.equal(fast(*start, ())[0], torch.full((3,), -2.0))
    first.fill_(3.0)
    assert torch.equal(fast(*start, ())[0], torch.full((3,), -6.0))


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


class Attention(nn.Module):
    """A transformer's block over a sequence, and a mean over it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(
            8, 2, dim_feedforward=16, dropout=0.0, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x).mean(1))


def test_attention_is_captured_with_its_noise_and_a_short_last_batch():
    """Batches of 4, 4 and 2 sequences, the last of which is recorded when it comes; every step is the eager step's."""
    forward, params, _ = bc.make_functional(Attention())
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
