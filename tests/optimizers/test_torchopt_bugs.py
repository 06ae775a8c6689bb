"""Where TorchOpt 0.7.3 is wrong and we are right; each test shows both."""

import pytest
import torch
import torchopt

import bayesopt_chain as bc


def second_update(tx, state, g=1.0):
    updates, state = tx.update([torch.tensor([g])], state, inplace=False)
    return updates[0].item(), state


def test_the_first_call_is_a_matter_of_the_state_not_of_a_closure():
    """With dampening the first gradient enters undamped; TorchOpt forgets that a second init begins a new run."""
    outcomes = {}
    for library in (torchopt, bc):
        tx = library.sgd(1.0, momentum=0.5, dampening=0.5)
        first, _ = second_update(tx, tx.init([torch.zeros(1)]))
        again, _ = second_update(tx, tx.init([torch.zeros(1)]))
        outcomes[library.__name__] = (first, again)
    assert outcomes["bayesopt_chain"] == (-1.0, -1.0)
    assert outcomes["torchopt"] == (-1.0, -0.5)


def test_a_resumed_run_goes_on_with_momentum():
    """A fresh transformation given an old state: TorchOpt takes its next step for the first and drops the decay of v."""
    outcomes = {}
    for library in (torchopt, bc):
        tx = library.sgd(1.0, momentum=0.5)
        _, state = second_update(tx, tx.init([torch.zeros(1)]))
        fresh = library.sgd(1.0, momentum=0.5)
        outcomes[library.__name__] = second_update(fresh, state)[0]
    assert outcomes["bayesopt_chain"] == -1.5
    assert outcomes["torchopt"] == -2.0


def test_a_second_parameter_group_is_dampened_like_the_first():
    outcomes = {}
    for library in (torchopt, bc):
        a, b = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
        optimizer = library.SGD([a], lr=1.0, momentum=0.5, dampening=0.5)
        optimizer.add_param_group([b])
        a.grad, b.grad = torch.ones(1), torch.ones(1)
        optimizer.step()
        outcomes[library.__name__] = (a.item(), b.item())
    assert outcomes["bayesopt_chain"] == (-1.0, -1.0)
    assert outcomes["torchopt"] == (-1.0, -0.5)


def test_a_missing_gradient_keeps_the_momentum():
    """TorchOpt's trace becomes None where a gradient is missing once, and the next gradient crashes or starts anew."""
    tx = bc.sgd(1.0, momentum=0.5)
    _, state = second_update(tx, tx.init([torch.zeros(1)]))
    updates, state = tx.update([None], state, inplace=False)
    assert updates == [None]
    assert second_update(tx, state)[0] == -1.5

    theirs = torchopt.sgd(1.0, momentum=0.5)
    _, state = second_update(theirs, theirs.init([torch.zeros(1)]))
    _, state = theirs.update([None], state, inplace=False)
    broken = theirs.update([torch.ones(1)], state, inplace=False)[0]
    assert broken[0] is None, "TorchOpt 0.7.3 never updates this parameter again"


def test_adamws_mask_is_honoured():
    params = {"w": torch.ones(1), "b": torch.ones(1)}
    grads = {"w": torch.zeros(1), "b": torch.zeros(1)}
    outcomes = {}
    for library in (torchopt, bc):
        tx = library.adamw(0.1, weight_decay=0.5, mask={"w": True, "b": False})
        updates, _ = tx.update(grads, tx.init(params), params=params, inplace=False)
        outcomes[library.__name__] = (updates["w"].item(), updates["b"].item())
    assert outcomes["bayesopt_chain"] == pytest.approx((-0.05, 0.0))
    assert outcomes["torchopt"] == pytest.approx((-0.05, -0.05))


def test_a_tensor_lr_is_read_at_every_update():
    outcomes = {}
    for library in (torchopt, bc):
        lr = torch.tensor(1.0)
        tx = library.sgd(lr)
        state = tx.init([torch.zeros(1)])
        lr.fill_(0.5)
        outcomes[library.__name__] = second_update(tx, state)[0]
    assert outcomes["bayesopt_chain"] == -0.5
    assert outcomes["torchopt"] == -1.0
