"""Ranks that compare what they are about to draw, in one process: each of them has its turn before the store."""

import copy
import itertools
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor

from bayesopt_chain.distributed import witness
from bayesopt_chain.distributed.witness import Claim, Witness
from tests.distributed.ranks import mesh_of, world
from tests.distributed.ranks import run as launched

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "scale.md").read_text()
GROUP = {"lr": 0.1, "temperature": 0.01, "momentum": 0.9, "weight_decay": 0.0, "noise_key": 7, "noise_count": 0}


class Store(dist.HashStore):
    """A rendezvous store, which counts the records of others that are read, and how long those are that are written."""

    def __init__(self):
        super().__init__()
        self.read, self.written = 0, []

    def compare_set(self, name, expected, desired):
        there = super().compare_set(name, expected, desired)
        if there == desired.encode():
            self.written.append(len(name) + len(desired))
        self.read += there != desired.encode()
        return there


@pytest.fixture
def ranks(monkeypatch):
    """Runs steps of so many ranks, one after the other; returns the errors by rank, and the most records that one read."""

    def run(claims, steps=2):
        run.store, errors, most = Store(), {}, 0
        monkeypatch.setattr(witness, "_store", lambda: run.store)
        every = [copy.deepcopy(witness_of_all) for _ in claims]
        for _, (rank, mine) in itertools.product(range(steps), enumerate(claims)):
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            run.store.read = 0
            try:
                every[rank].look(lambda mine=mine: mine, torch.zeros(()))
            except ValueError as err:
                errors[rank] = str(err)
            most = max(most, run.store.read)
        return errors, most

    witness_of_all = Witness("test")
    return run


def leaf(number, value=1.0, runs=None, key=7, **numbers):
    x = torch.full((3,), value)
    return Claim(f"leaf {number}", key, number, runs, 0, x, x + number, {**GROUP, "noise_key": key, **numbers})


def replicas(n):
    return [[leaf(i) for i in range(5)] for _ in range(n)]


def shards(n):
    return [[leaf(i, r, ((3 * r, 3),)) for i in range(5)] for r in range(n)]


def stages(n):
    return [[leaf(5 * r + i) for i in range(5)] for r in range(n)]


def stages_beside(n):
    """Each rank of a pipeline has a replica."""
    return [claims for claims in stages(n // 2) for _ in range(2)]


@pytest.mark.parametrize("made", [replicas, shards, stages, stages_beside])
def test_what_a_rank_reads_does_not_grow_with_the_ranks(ranks, made):
    few, more, many = (ranks(made(n)) for n in (8, 16, 64))
    assert few[0] == more[0] == many[0] == {}
    assert few[1] == more[1] == many[1] <= 10  # five leaves


def drifted(claims, rank):
    """The same, but for one leaf of this rank."""
    claims[rank] = [claims[rank][0]._replace(param=torch.full((3,), 5.0)), *claims[rank][1:]]
    return claims


def grouped(claims, rank, **changed):
    """The same, but for the group of this rank's leaves."""
    claims[rank] = [c._replace(group={**GROUP, **changed}) for c in claims[rank]]
    return claims


def shards_beside(n):
    return [claims for claims in shards(n // 2) for _ in range(2)]


NUMBERS = "ranks 0 and 2 step 'leaf 0' under one key, and so as one chain, with"
CASES = {  # the claims, and what every rank says; nothing where they may be so
    **{
        f"{made.__name__} that drift, {at}": (drifted(made(10), at), "hold other values of")
        for made, at in itertools.product((stages_beside, shards_beside), (1, 4, 9))
    },
    **{
        f"{made.__name__} with another {name}": (grouped(made(4), 2, **{name: 0.25}), f"{NUMBERS} {name} =")
        for made, name in itertools.product((replicas, shards), ("lr", "temperature", "momentum", "weight_decay"))
    },
    "a rank without a part of a shard, with another rate": (
        [*shards(2), [c._replace(param=c.param[:0], gradient=None, group={**GROUP, "lr": 0.2}) for c in shards(3)[2]]],
        f"{NUMBERS} lr =",
    ),
    "chains with rates of their own": (
        [[leaf(0, key=r, lr=0.1 * r)._replace(gradient=torch.ones(3) * r)] for r in range(1, 4)],
        "",
    ),
    "chains with parameters of their own whose gradients are zero": (
        [[leaf(0, float(r), key=r)._replace(gradient=torch.zeros(3))] for r in range(1, 4)],
        "",
    ),
    "stages with rates of their own": ([[leaf(r, lr=0.1 * r)] for r in range(1, 4)], ""),
    "one leaf of each rank with a key of its own": ([[leaf(0), leaf(1, float(r), key=8 + r)] for r in range(3)], ""),
}


@pytest.mark.parametrize("case", CASES)
def test_claims_that_contradict_each_other_are_refused_on_every_rank(ranks, case):
    claims, words = CASES[case]
    errors, _ = ranks(claims, 3)
    assert set(errors) == set(range(len(claims)) if words else ())
    assert all(words in said for said in errors.values()), errors


# the figures of the page's table for 512 ranks, of which two or four can be counted here


def contents(folder, leaves):
    """Bytes of the table of contents of a checkpoint of so many leaves."""
    spread = distribute_tensor(torch.zeros(8, 3), mesh_of(world()[1]), [Shard(0)])
    dcp.save({f"layers.{i}.weight": spread.clone() for i in range(leaves)}, checkpoint_id=str(folder))
    return (folder / ".metadata").stat().st_size


@pytest.mark.slow
def test_the_table_of_contents_takes_as_many_bytes_a_shard_as_the_page_says(tmp_path):
    (said,) = re.findall(r"table of contents takes (\d+) bytes a shard", PAGE)
    two, four = (launched(contents, size, tmp_path / f"{size}", 60)[0] for size in (2, 4))
    assert (four - two) / (2 * 60) == pytest.approx(int(said), rel=0.05)


def test_the_records_of_a_comparison_are_as_long_as_the_page_says(ranks):
    """Of 723 leaves: one of hashes of the leaves and their groups' numbers, one of the gradients."""
    x, names = torch.randn(723, 3), [f"layers.{i // 9}.attention.{i % 9}.weight" for i in range(723)]
    numbered = [Claim(name, 2**62, 2**31 + i, None, 0, x[i], x[i], {}) for i, name in enumerate(names)]
    ranks([numbered], 1)
    ((longest, second),) = re.findall(r"records of some (\d+) kB and (\d+) bytes", PAGE)
    assert ranks.store.written == pytest.approx([1000 * int(longest), int(second)], rel=0.1)
