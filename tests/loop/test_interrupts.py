"""Ctrl-C leaves a step made or not made: at every operation of every way to run one in place."""

import copy
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import optree
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import bayesopt_chain as bc
from bayesopt_chain.loop.interrupts import uninterrupted
from tests.loop.beside import same

pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals come to the main thread"
)


class InterruptAt(TorchDispatchMode):
    """Ctrl-C during operation ``n``; counts them."""

    def __init__(self, n):
        super().__init__()
        self.n, self.seen = n, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        if self.seen == self.n:
            signal.raise_signal(signal.SIGINT)
        return func(*args, **(kwargs or {}))


def loss(params, batch):
    return ((params["w"] - batch) ** 2).sum() + params["b"] ** 2


CHAINS = {
    "fused": lambda: bc.sghmc(0.1, temperature=0.1),
    "adam": lambda: bc.adam(0.1, temperature=0.1),
    "schedule": lambda: bc.sghmc(lambda count: 0.1 / (1 + count), temperature=0.1),
    "skipping": lambda: bc.skip_nonfinite(bc.adam(0.1)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_an_interrupted_step_is_made_or_not_made(name):
    tx, params, batch = CHAINS[name](), {"w": torch.zeros(3), "b": torch.ones(())}, torch.ones(3)
    step, state = bc.make_step(loss, tx, inplace=True), tx.init(params)
    step(params, state, batch)  # velocities that are not zero
    before = copy.deepcopy((params, state))
    after = copy.deepcopy(before)
    with InterruptAt(0) as mode:
        step(*after, batch)
    outcomes = []
    for n in range(1, mode.seen + 1):
        mine = copy.deepcopy(before)
        with pytest.raises(KeyboardInterrupt), InterruptAt(n):
            step(*mine, batch)
        outcomes.append("after" if same(mine, after) else "before" if same(mine, before) else "torn")
    assert "torn" not in outcomes
    assert outcomes[0] == "before" and outcomes[-1] == "after"  # the gradient is not held back, the writes are
    assert outcomes == sorted(outcomes, reverse=True)


def test_a_captured_step_is_made_or_not_made():
    tx, params, batch = bc.sghmc(0.1, temperature=0.1), {"w": torch.zeros(3), "b": torch.ones(())}, torch.ones(3)
    step, state = bc.make_step(loss, tx), tx.init(params)
    fast = bc.capture(step, params, state, batch, backend="eager")
    before = (params, state)
    after = step(params, state, batch)[:2]
    inside, held, _ = fast(params, state, batch)
    with InterruptAt(0) as mode:
        fast(inside, held, batch)
    for n in range(1, mode.seen + 1):
        inside, held, _ = fast(params, state, batch)
        for x, old in zip(optree.tree_leaves((inside, held)), optree.tree_leaves(before)):
            x.copy_(old)
        with pytest.raises(KeyboardInterrupt), InterruptAt(n):
            fast(inside, held, batch)
        assert same((inside, held), before) or same((inside, held), after)


def test_the_handler_is_back_whatever_happens():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError), uninterrupted():
        assert signal.getsignal(signal.SIGINT) is not before
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is before


def test_the_users_own_handler_gets_the_signal_once_at_the_end():
    got = []
    before = signal.signal(signal.SIGINT, lambda number, frame: got.append(number))
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert got == []
        assert got == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_signal_that_python_does_not_handle_is_left_alone(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        with uninterrupted():
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_does_nothing():
    def held():
        with uninterrupted():
            return signal.getsignal(signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(held).result() is signal.getsignal(signal.SIGINT)
