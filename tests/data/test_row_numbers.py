"""Row numbers of many chains by one kernel are those of each chain alone."""

import pytest
import torch

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
