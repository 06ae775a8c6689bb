"""``bc.optim.Optimizer``: any chain, bit for bit what ``update`` and ``apply_updates`` give."""

import pytest
import torch
import torchopt

import bayesopt_chain as bc
from tests.optim.probe import walk
from tests.refusals import refuse
from tests.walk import end_of

CHAINS = {
    "sghmc": lambda g: bc.sghmc(0.1, temperature=0.2),
    "sgd": lambda g: bc.sgd(0.1, momentum=0.9),
    "adam": lambda g: bc.adam(0.1, temperature=0.2),
    "ubu": lambda g: bc.samplers.ubu(0.1, 1.0, temperature=0.2),
    "torchopt": lambda g: torchopt.adam(0.1),
}


def gradients(params):
    return [0.5 * p.detach() + 0.1 for p in params]


@pytest.mark.parametrize("name", CHAINS)
def test_it_is_update_and_apply_updates_bitwise_and_leaves_gradients_alone(name):
    start = [torch.linspace(-1, 1, 7), torch.ones(2, 2)]
    torch.manual_seed(4)
    theirs, _ = end_of(CHAINS[name]({}), start, gradients, 6)
    leaves = [p.clone().requires_grad_() for p in start]
    torch.manual_seed(4)
    optimizer = bc.optim.Optimizer(leaves, CHAINS[name])
    for _ in range(6):
        for p, g in zip(leaves, gradients(leaves)):
            p.grad = g
        given = [p.grad.clone() for p in leaves]
        optimizer.step()
        assert all(map(torch.equal, given, [p.grad for p in leaves]))
    assert all(map(torch.equal, [p.detach() for p in leaves], theirs))


def test_each_group_has_its_own_chain_and_tensors_follow_torchs_schedulers():
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    optimizer = bc.optim.Optimizer(
        [{"params": [a], "lr": torch.tensor(0.5)}, {"params": [b], "lr": torch.tensor(0.1)}], lambda g: bc.sgd(g["lr"])
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    for _ in range(2):
        walk(optimizer, gradient=torch.ones_like)
        scheduler.step()
    torch.testing.assert_close(a.detach(), torch.full((2,), 1.0 - 0.5 - 0.05))
    torch.testing.assert_close(b.detach(), torch.full((2,), 1.0 - 0.1 - 0.01))


def test_a_number_built_into_the_chain_that_changes_is_refused_before_anything_moves():
    theta = torch.ones(2, requires_grad=True)
    optimizer = bc.optim.Optimizer([theta], lambda g: bc.sgd(g["lr"]), lr=0.1)
    optimizer.param_groups[0]["lr"] = 0.05
    with pytest.raises(ValueError, match=r"lr changed from 0.1 to 0.05.*torch.tensor\(0.1\)"):
        walk(optimizer)
    assert torch.equal(theta.detach(), torch.ones(2))


def test_a_tensor_that_the_chain_reads_is_filled_and_another_in_its_place_refused_before_anything_moves():
    theta = torch.ones(2, requires_grad=True)
    optimizer = bc.optim.Optimizer([theta], lambda g: bc.sgd(g["lr"]), lr=torch.tensor(0.1))
    group = optimizer.param_groups[0]
    group["lr"] *= 0.5
    theta.grad = torch.ones(2)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    torch.testing.assert_close(theta.detach(), torch.full((2,), 0.9))
    for other in (group["lr"] * 0.5, 0.05):
        optimizer.param_groups[0]["lr"] = other
        with pytest.raises(ValueError, match=r"lr is another object than the tensor.*group\['lr'\]\.fill_"):
            optimizer.step()
    torch.testing.assert_close(theta.detach(), torch.full((2,), 0.9))


def test_what_is_no_chain_or_another_or_shares_its_noise_is_refused():
    theta, nothing = torch.ones(2, requires_grad=True), lambda g: None
    one, other = (bc.optim.Optimizer([theta], CHAINS[name]) for name in ("sgd", "sghmc"))
    groups = [{"params": [torch.ones(2, requires_grad=True)]} for _ in range(2)]
    refuse(
        (
            (lambda: other.load_state_dict(one.state_dict()), "load a state of the same chain"),
            (lambda: bc.optim.Optimizer(torch.ones(()).numpy(), CHAINS["sgd"]), "params must be parameters"),
            (lambda: bc.optim.Optimizer([theta], nothing), "must return a gradient transformation"),  # pyright: ignore
            (
                lambda: bc.optim.Optimizer(
                    groups, lambda g: bc.sgld(0.1, temperature=1.0, generator=bc.distributed.generator(0))
                ),
                "gave two groups one key.*outside of make_chain",
            ),
        ),
        error=(TypeError, ValueError),
    )


def test_ranks_compare_noise_inside_of_other_links_too():
    theta = torch.zeros(2, requires_grad=True)
    theta.grad = torch.ones(2)
    noise = bc.sgld(0.1, temperature=0.1)
    counts = {
        tx: len(bc.optim.Optimizer([theta], lambda group, tx=tx: tx)._claims())
        for tx in (noise, bc.chain(bc.skip_nonfinite(noise)), bc.sgd(0.1), bc.sghmc(0.1, temperature=0.0))
    }
    assert [*counts.values()] == [1, 1, 0, 0]
