"""The figures of the page's table for 512 ranks, of which two or four can be counted here."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor

from bayesopt_chain.distributed import witness
from bayesopt_chain.distributed.witness import Claim, Witness
from tests.distributed.ranks import mesh_of, run, world
from tests.distributed.test_witness import Store

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "scale.md").read_text()


def contents(folder, leaves):
    """Bytes of the table of contents of a checkpoint of so many leaves."""
    spread = distribute_tensor(torch.zeros(8, 3), mesh_of(world()[1]), [Shard(0)])
    dcp.save({f"layers.{i}.weight": spread.clone() for i in range(leaves)}, checkpoint_id=str(folder))
    return (folder / ".metadata").stat().st_size


@pytest.mark.slow
def test_the_table_of_contents_takes_as_many_bytes_a_shard_as_the_page_says(tmp_path):
    (said,) = re.findall(r"table of contents takes (\d+) bytes a shard", PAGE)
    two, four = (run(contents, size, tmp_path / f"{size}", 60)[0] for size in (2, 4))
    assert (four - two) / (2 * 60) == pytest.approx(int(said), rel=0.05)


def test_the_records_of_a_comparison_are_as_long_as_the_page_says(monkeypatch):
    """Of 723 leaves: one of hashes of the leaves and their groups' numbers, one of the gradients."""
    slot = Store()
    monkeypatch.setattr(witness, "_store", lambda: slot)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    x = torch.randn(723, 3)
    names = [f"layers.{i // 9}.attention.{i % 9}.weight" for i in range(723)]
    claims = [Claim(name, 2**62, 2**31 + i, None, 0, x[i], x[i], {}) for i, name in enumerate(names)]
    watching = Witness("")
    for _ in range(2):
        watching.look(lambda: claims, x)
    sizes = sorted((len(name) + len(value) for name, value in slot.items() if "/1/" in name), reverse=True)
    ((longest, second),) = re.findall(r"records of some (\d+) kB and (\d+) bytes", PAGE)
    assert sizes == pytest.approx([1000 * int(longest), int(second)], rel=0.1)
