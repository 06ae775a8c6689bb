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


def test_adams_count_advances_in_place_and_is_a_tensor():
    tx, params = bc.adam(0.1), [torch.ones(1)]
    state = tx.init(params)
    for _ in range(3):
        _, state = tx.update([torch.ones(1)], state, params=params, inplace=True)
    assert state[0].count[0].item() == 3


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


def test_radams_step_count_is_part_of_the_tensors():
    """TorchOpt keeps a Python number in RAdam's and AdaMax's state, which cannot be stacked or captured."""
    params = [torch.ones(1)]
    assert isinstance(torchopt.radam(0.1).init(params)[0].t, int)
    assert all(torch.is_tensor(c) for c in bc.radam(0.1).init(params)[0].count)
