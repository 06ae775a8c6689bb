"""The commands of the pages on several ranks, as they stand there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bayesopt_chain as bc
from tests.distributed.ranks import server

ROOT = Path(__file__).parents[2]
PAGES = "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "howto").glob("*.md")))


def script_of(name):
    (script,) = re.findall(rf"`{name}`:\n\n```python\n(.*?)```", PAGES, re.S)
    return script


def pasted(page):
    """All pieces of Python of a page, one behind the other, as a reader pastes them into a file; doctests are not theirs."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "howto" / f"{page}.md").read_text(), re.S)
    return "\n\n".join(block for block in blocks if not block.startswith(">>>"))


def alone(name, draws, spread=False):
    """Run a script of the pages as the only rank, in a process that has imported torch already.

    ``spread``: it has DTensors, whose meshes torch keeps in caches of its own.
    """
    process = server().Process(target=_execute, args=(script_of(name), str(draws), spread))
    process.start()
    process.join(200)
    assert process.exitcode == 0


def _execute(script, draws, spread):
    torch.set_num_threads(1)
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0", DRAWS=draws)
    exec(compile(script, "script", "exec"), {"__name__": "__main__"})
    names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    assert spread or not [name for name in names if "gloo" in name]  # a thread that outlives Python aborts the process


def torchrun(name, size, folder, draws, script=None):
    """Run a script of the pages (default: that of this name) on so many ranks; what it prints."""
    (folder / name).write_text(script or script_of(name))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), name]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "DRAWS": str(draws), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()


def shown(name):
    """Ranks and output of the page's command for a script."""
    ((size, said),) = re.findall(
        rf"\$ DRAWS=draws torchrun --standalone --nproc-per-node (\d) {name}\n(.*?)\n```", PAGES
    )
    return int(size), said


@pytest.mark.slow
def test_the_pages_command_runs_eight_chains_on_four_ranks_as_on_one(tmp_path):
    size, said = shown("chains.py")
    assert size == 4 and torchrun("chains.py", size, tmp_path, tmp_path / "four") == said
    alone("chains.py", tmp_path / "one")
    four, one = (bc.Draws.open(tmp_path / name) for name in ("four", "one"))
    assert four.chains == one.chains == 8 and torch.equal(four.params["w"], one.params["w"])


@pytest.mark.slow
def test_the_pages_command_runs_one_chain_on_two_ranks_as_on_one(tmp_path):
    size, said = shown("gradients.py")
    assert size == 2 and torchrun("gradients.py", size, tmp_path, tmp_path / "two") == said
    alone("gradients.py", tmp_path / "one")
    two, one = (bc.Draws.open(tmp_path / name) for name in ("two", "one"))
    torch.testing.assert_close(two.params["w"], one.params["w"], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_the_pages_command_trains_a_transformer_on_two_ranks_as_on_one(tmp_path):
    size, said = shown("transformer.py")
    assert size == 2 and torchrun("transformer.py", size, tmp_path, tmp_path / "two") == said
    alone("transformer.py", tmp_path / "one", spread=True)
    two, one = (torch.load(tmp_path / name) for name in ("two", "one"))
    for name, leaf in one.items():
        torch.testing.assert_close(two[name], leaf, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_the_pages_command_runs_chains_data_and_shards_on_eight_ranks_as_on_one(tmp_path):
    size, said = shown("mesh.py")
    assert size == 8 and torchrun("mesh.py", size, tmp_path, tmp_path / "eight") == said
    alone("mesh.py", tmp_path / "one", spread=True)
    one, first, second = (torch.load(tmp_path / name) for name in ("one-0", "eight-0", "eight-2"))
    for name, leaf in one.items():
        torch.testing.assert_close(torch.cat([first[name], second[name]]), leaf, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["sharded_posteriors", "sharded_curvature", "engines"])
def test_the_pieces_of_a_page_run_pasted_into_one_file_on_two_ranks(page, tmp_path):
    torchrun("page.py", 2, tmp_path, tmp_path / "draws", pasted(page))


def test_where_torchrun_started_no_process_group_the_rank_is_what_it_said(monkeypatch):
    assert bc.distributed.world() == (0, 1)
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "2", "WORLD_SIZE": "5"}.items():
        monkeypatch.setenv(name, value)
    assert bc.distributed.world() == (2, 5)
