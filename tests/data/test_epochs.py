"""Orders of minibatches: what each promises, and that every position resumes."""

import copy
import itertools
import pickle
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bayesopt_chain as bc
from bayesopt_chain.data import IndexStream
from tests.refusals import refused

ORDERS = ("independent", "reshuffled", "palindrome", "fixed")


pytestmark = pytest.mark.filterwarnings("ignore:epochs")  # of a fixed order


def rows_of(data, epochs):
    """Row numbers of so many epochs, a list of lists of batches."""
    return [[batch.tolist() for batch in data] for _ in range(epochs)]


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def test_a_reshuffled_epoch_uses_every_datum_once_and_the_next_in_another_order():
    first, second = rows_of(bc.epochs(torch.arange(60), 6), 2)
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(60))
    assert first != second


def test_a_palindrome_goes_back_the_way_it_came_and_then_takes_another():
    forward, backward, other, _ = rows_of(bc.epochs(torch.arange(60), 6, order="palindrome"), 4)
    assert backward == forward[::-1] and other not in (forward, backward)


def test_a_fixed_order_is_that_of_the_data_and_warns():
    with pytest.warns(UserWarning, match="fixed order biases the mean"):
        data = bc.epochs(torch.arange(6), 2, order="fixed")
    assert rows_of(data, 2) == [[[0, 1], [2, 3], [4, 5]]] * 2


@pytest.mark.parametrize(("size", "batch_size"), [(60, 6), (7, 5), (10_000, 50)])
def test_an_independent_batch_has_no_datum_twice(size, batch_size):
    for batch in bc.epochs(torch.arange(size), batch_size, order="independent"):
        assert len(set(batch.tolist())) == batch_size


def test_the_remainder_sits_out_one_epoch_and_not_every_one():
    left_out = [set(range(11)) - set(flat(epoch)) for epoch in rows_of(bc.epochs(torch.arange(11), 4), 12)]
    assert all(len(left) == 3 for left in left_out) and set.union(*left_out) == set(range(11))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "order", "epochs", "outcomes", "most"),
    [(4, "reshuffled", 2400, 24, 58.6), (12, "independent", 550, 66, 118)],
)
def test_permutations_and_subsets_are_uniform(data, order, epochs, outcomes, most):
    """Chi-square over the permutations of 4 data (23 degrees of freedom) and the pairs of 12 (65): false alarms below 1e-4."""
    batches = bc.epochs(torch.arange(data), 2 if order == "independent" else data, order=order)
    rows = (batches.rows(epoch, k).tolist() for epoch in range(epochs) for k in range(len(batches)))
    counts = Counter(tuple(sorted(x) if order == "independent" else x) for x in rows)
    mean = counts.total() / outcomes
    assert len(counts) == outcomes and sum((n - mean) ** 2 / mean for n in counts.values()) < most


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@given(position=st.integers(0, 40), seed=st.integers(-(2**64), 2**64))
def test_any_position_resumes(order, position, seed):
    whole = bc.epochs(torch.arange(12), 2, order=order, seed=seed)
    reference = flat(rows_of(whole, 8))
    data = bc.epochs(torch.arange(12), 2, order=order, seed=seed)
    stream = itertools.chain.from_iterable(itertools.repeat(data))
    for _ in range(position):
        next(stream)
    resumed = bc.epochs(torch.arange(12), 2, order=order, seed=seed)
    resumed.load_state_dict(pickle.loads(pickle.dumps(data.state_dict())))
    assert (resumed.epoch, resumed.offset, resumed.at_end) == (data.epoch, data.offset, data.at_end)
    assert flat(rows_of(resumed, 8))[: 48 - position] == reference[position:]


def test_a_copy_goes_on_by_itself():
    data = bc.epochs(torch.arange(12), 3)
    next(iter(data))
    other = copy.deepcopy(data)
    assert [b.tolist() for b in other] == [data.rows(0, k).tolist() for k in (1, 2, 3)]
    assert (data.epoch, data.offset) == (0, 1)


@pytest.mark.parametrize("order", ORDERS)
def test_at_end_is_the_end_of_what_sums_to_zero(order):
    data = bc.epochs(torch.arange(6), 2, order=order)
    ends = [data.at_end for _ in range(4) for _ in data]
    period = 6 if order == "palindrome" else 3
    assert ends == [(k + 1) % period == 0 for k in range(12)]


def test_parallel_chains_take_their_own_batches():
    x = torch.arange(12.0)
    step = bc.make_step(lambda w, batch: (w - batch).square().mean() / 2, bc.sgd(1.0))
    chains = bc.parallel(step, 3, batch_dim=0)
    data = bc.epochs(x, 4, chains=3)
    many = torch.zeros(3)
    many, *_ = chains(many, chains.init(bc.sgd(1.0), many), data.batch(0, 0))
    assert torch.allclose(many, x[data.rows(0, 0)].mean(1))


@pytest.mark.parametrize("workers", [0, 2])
def test_row_numbers_of_a_dataset_are_a_batch_sampler(workers):
    x = torch.arange(40.0)
    order = bc.epochs(x, 8, seed=5)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x), batch_sampler=bc.epochs(range(40), 8, seed=5), num_workers=workers
    )
    assert len(loader) == 5
    for _ in range(2):
        for (batch,), wanted in zip(loader, order, strict=True):
            assert torch.equal(batch, wanted)


def test_a_loader_with_workers_resumes_at_the_number_of_batches_used():
    x = torch.arange(40.0)
    order = bc.epochs(range(40), 8)
    order.seek(7)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_sampler=order, num_workers=1)
    wanted = bc.epochs(x, 8)
    assert [b.tolist() for (b,) in loader] == [wanted.batch(1, k).tolist() for k in (2, 3, 4)]


def backward(rows, seed, epoch, chain):
    return rows.flip(0).roll(epoch)


test_what_cannot_be_is_refused_by_name = refused(
    [
        (lambda: bc.epochs(torch.arange(4), 5), ValueError, "between 1 and the 4 data"),
        (lambda: bc.epochs(torch.arange(4), 0), ValueError, "between 1 and the 4 data"),
        (lambda: bc.epochs(torch.arange(4), 2, order="shuffled"), ValueError, "reshuffled"),
        (lambda: bc.epochs(torch.arange(5), 2, order="fixed"), ValueError, "never use the last 1 of 5"),
        (lambda: bc.epochs((torch.arange(5), torch.arange(4)), 2), ValueError, "one entry a datum"),
        (lambda: bc.epochs(torch.tensor(1.0), 1), ValueError, "one entry a datum"),
        (lambda: bc.epochs({"x": [1, 2]}, 1), TypeError, "int"),
        (lambda: bc.epochs(torch.arange(4), 2, chains=0), ValueError, "at least 1"),
        (lambda: bc.epochs(torch.arange(4), 2).rows(0, 2), IndexError, "an epoch has 2"),
        *(
            (lambda settings=settings: bc.epochs(torch.arange(12), 6, **settings), error, words)
            for settings, error, words in (
                ({"mesh": (0, 4)}, ValueError, "shared equally by 4 ranks.*batch_size of 4 or 8"),
                ({"mesh": (2, 2)}, TypeError, "rank, number of ranks"),
                ({"mesh": "data"}, TypeError, "DeviceMesh of one axis"),
                ({"leave_out": torch.arange(8)}, ValueError, "the 4 data that are not left out"),
                ({"leave_out": torch.tensor([12])}, ValueError, "row numbers"),
                ({"leave_out": [torch.tensor([1])] * 2}, ValueError, "2 folds for 1 chains"),
            )
        ),
        (
            lambda: bc.epochs(torch.arange(6), 2).load_state_dict(
                bc.epochs(torch.arange(6), 2, order=backward).state_dict()
            ),
            ValueError,
            "backward",
        ),
        *(
            (
                lambda p=p: (data := bc.epochs(range(6), 2)).load_state_dict({**data.state_dict(), "epoch": p}),
                error,
                "epoch must be a whole number",
            )
            for p, error in ((None, TypeError), ("1", TypeError), (-1, ValueError))
        ),
        (
            lambda: bc.epochs(torch.arange(6), 2, order=lambda rows, seed, epoch, chain: rows[:4]).batch(0, 0),
            ValueError,
            "no permutation of the 6 rows",
        ),
    ]
)


def test_the_position_of_other_batches_is_refused_and_changes_nothing():
    data = bc.epochs(torch.arange(12), 3, seed=1)
    next(iter(data))
    with pytest.raises(ValueError, match="seed=2"):
        data.load_state_dict(bc.epochs(torch.arange(12), 3, seed=2).state_dict())
    assert (data.epoch, data.offset) == (0, 1)


# one stream of rows for ranks, folds, orders of one's own and programs


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_the_ranks_batches_together_are_the_batch_of_one_process(order, ranks):
    one = bc.epochs(torch.arange(24), 6, order=order, seed=3, chains=2)
    parts = [bc.epochs(torch.arange(24), 6, order=order, seed=3, chains=2, mesh=(r, ranks)) for r in range(ranks)]
    for epoch, offset in [(0, 0), (1, 2), (5, 3)]:
        together = torch.cat([part.batch(epoch, offset) for part in parts], dim=1)
        assert torch.equal(together, one.batch(epoch, offset))


def test_a_position_is_the_same_on_any_number_of_ranks():
    two = bc.epochs(torch.arange(24), 6, seed=3, mesh=(1, 2))
    for _ in range(2):
        next(iter(two))
    three = bc.epochs(torch.arange(24), 6, seed=3, mesh=(2, 3))
    three.load_state_dict(two.state_dict())
    assert next(iter(three)).tolist() == bc.epochs(torch.arange(24), 6, seed=3).rows(0, 2)[4:].tolist()


def test_rows_say_which_data_a_batch_holds():
    x = torch.arange(10.0) * 2
    for batch, rows in bc.epochs(x, 5, with_rows=True):
        assert torch.equal(batch, x[rows])


def test_folds_are_a_partition_and_each_chain_leaves_its_own_out():
    held_out = bc.data.folds(11, 3, seed=4)
    assert sorted(torch.cat(held_out).tolist()) == list(range(11)) and [len(rows) for rows in held_out] == [4, 4, 3]
    data = bc.epochs(torch.arange(11), 2, chains=3, leave_out=held_out, order="independent")
    shuffled = bc.epochs(torch.arange(11), 2, chains=3, leave_out=held_out)
    assert len(data) == len(shuffled) == 3
    for chain, rows in enumerate(held_out):
        for batches in (data, shuffled):
            seen = {int(i) for _ in range(20) for batch in batches for i in batch[chain]}
            assert seen == set(range(11)) - set(rows.tolist())


def test_an_order_of_ones_own_is_cut_into_batches():
    data = bc.epochs(torch.arange(6), 2, order=backward)
    assert [b.tolist() for b in data] == [[5, 4], [3, 2], [1, 0]] and next(iter(data)).tolist() == [0, 5]


# Row numbers of many chains by one kernel are those of each chain alone


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
