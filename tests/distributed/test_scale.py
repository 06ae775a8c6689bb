"""The figures of the page's table for 512 ranks, of which two or four can be counted here, and the commands beside them."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from bayesopt_chain.distributed import witness
from bayesopt_chain.distributed.witness import Claim, Witness
from tests.distributed.ranks import mesh_of, on, run, world
from tests.distributed.test_witness import Store

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "howto" / "scale.md").read_text()
TABLE = re.findall(r"^\| (.*?) \| (.*?) \| (.*?) \|$", PAGE.split("| at that size |")[1].split("\n\n")[0], re.M)


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


@on(2, 4)
def test_fully_shard_gathers_the_parameters_twice_a_step_and_scatters_the_gradients_once(size):
    """Bytes that come to a rank in a step, and those of all parameters."""
    model = nn.Sequential(*[nn.Linear(a, b, bias=False) for a, b in pairwise((8, 16, 8, 4))])
    parameters = 4 * sum(p.numel() for p in model.parameters())
    for layer in [*model, model]:
        fully_shard(layer, mesh=mesh_of(size))
    came, names = [], ("all_gather_single", "reduce_scatter_single", "all_gather_into_tensor", "reduce_scatter_tensor")

    def counted(collective):
        def call(*args, **options):
            whole = max(x.nbytes for x in (*args, *options.values()) if torch.is_tensor(x))
            came.append(whole * (size - 1) // size)
            return collective(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in names:  # torch has renamed them
            if hasattr(dist, name):
                patch.setattr(dist, name, counted(getattr(dist, name)))
        model(torch.ones(2, 8)).sum().backward()
    assert r"$3 (R - 1) / R \cdot P b$" in PAGE and sum(came) == 3 * (size - 1) / size * parameters


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


def test_every_line_of_the_table_has_a_command_and_the_command_has_something_to_run():
    assert len(TABLE) >= 9
    for line, _, check in TABLE:
        commands = re.findall(r"`([^`]+)`", check)
        assert commands, line
        for command in commands:
            if command.startswith("pytest "):
                files, _, word = command.removeprefix("pytest ").partition(" -k ")
                found = [file for path in map(ROOT.joinpath, files.split()) for file in (path, *path.glob("test_*.py"))]
                assert all((ROOT / path).exists() for path in files.split()), command
                names = [name for x in found if x.is_file() for name in re.findall(r"^def (\w+)", x.read_text(), re.M)]
                assert files.endswith(".md") or any(word in name for name in names), command
            else:
                (module,) = re.findall(r"^python -m .* -m (benchmarks\.\w+)$", command)
                assert (ROOT / f"{module.replace('.', '/')}.py").exists(), command
