"""Row numbers of many chains by one kernel are those of each chain alone."""

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.data import IndexStream


@pytest.mark.parametrize("left_out", [None, torch.tensor([1, 3])])
@pytest.mark.parametrize("order", ["independent", "reshuffled", "palindrome"])
@pytest.mark.parametrize("size, batch_size", [(768, 32), (50, 20), (7, 5), (300, 4), (3, 1)])
def test_rows_of_many_chains_at_once_are_those_of_each(order, size, batch_size, left_out):
    if left_out is not None and size - 2 < batch_size:
        return
    alone = [IndexStream(size, batch_size, order, -5, [] if left_out is None else [left_out]) for _ in range(2)]
    for epoch in range(3):
        for offset in range(min(alone[0].steps, 3)):
            together = alone[0].rows_of_chains(epoch, offset, 4)
            assert torch.equal(together.long(), torch.stack([alone[1].rows(epoch, offset, i) for i in range(4)]))


def test_rows_that_were_given_stay_when_the_next_epochs_are_drawn():
    """The memory of an epoch's numbers serves the next epoch; what users have, and several batches ahead, is their own."""
    data = bc.epochs(torch.arange(50.0), 20, chains=6, seed=3)
    wanted = [data.rows(epoch, offset) for epoch in range(3) for offset in range(2)]
    kept = [rows.clone() for rows in wanted]
    data.seek(1)
    ahead = data.ahead(4)
    data.set_epoch(7)
    data.ahead(1)
    assert all(map(torch.equal, wanted, kept))
    assert all(torch.equal(rows.long(), right) for rows, right in zip(ahead, kept[1:5], strict=True))
