"""Symmetric minibatch splitting: UBU on palindromic epochs, and on no others."""

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.testing import assert_bitwise_equal
from tests.diagnostics.oracle import DOUBLE, affine, enumerated
from tests.walk import end_of

T, K = 0.01, 4


def test_with_a_memory_of_an_epoch_palindromes_leave_less_heat_than_the_other_orders():
    """Every order of four batches, exactly, with the map of the library's chain: the mean excess over an epoch."""
    H = torch.diag(torch.tensor([1.0, 0.3], dtype=DOUBLE))
    n = 0.02 * torch.randn(K, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    n = n - n.mean(0)
    tx = bc.samplers.palindromic_ubu(0.3, 0.5, temperature=T)
    M, gamma, _ = affine(tx, H, torch.zeros(2, dtype=DOUBLE))
    heat = {order: (enumerated(M, gamma, n, order)[0][:2, :2] @ H).trace() for order in ORDERS}
    assert 0 < heat["palindrome"] < heat["reshuffled"] < 0.5 * heat["independent"]


ORDERS = ("independent", "reshuffled", "palindrome")


def loss(w, batch):
    return (batch[0] - w).square().mean() / 2


@pytest.mark.parametrize("chains", [None, 2])
def test_sample_takes_palindromic_epochs_and_refuses_others(chains):
    data, w = (torch.linspace(-1.0, 1.0, 12, dtype=DOUBLE)[:, None],), torch.zeros(1, dtype=DOUBLE)
    tx = bc.samplers.palindromic_ubu(0.1, 1.0, temperature=T)
    step = bc.make_step(loss, tx)
    params, state = w, tx.init(w)
    if chains is not None:
        step, params = bc.parallel(step, chains), bc.stack([w] * chains)
        state = step.init(tx, params, seed=0)
    for order in ("independent", "reshuffled", "fixed"):
        with pytest.raises(ValueError, match=f"meant for palindrome batches, and these are {order}"):
            bc.sample(step, params, state, bc.epochs(data, 3, order=order, seed=0), steps=4)
    assert len(bc.sample(step, params, state, bc.epochs(data, 3, order="palindrome", seed=0), steps=8)) == 8


def test_it_is_ubu_to_the_last_bit():
    found = []
    for make in (bc.samplers.ubu, bc.samplers.palindromic_ubu):
        torch.manual_seed(0)
        found.append(end_of(make(0.3, 1.0, temperature=T), torch.ones(3, dtype=DOUBLE), torch.sin, 5)[0])
    assert_bitwise_equal(*found)
