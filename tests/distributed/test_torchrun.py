"""The commands of the pages on several ranks and in jobs, as they stand there."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import bayesopt_chain as bc
from tests.distributed.ranks import run

ROOT = Path(__file__).parents[2]
HOWTO = {page.stem: page.read_text() for page in sorted((ROOT / "docs" / "howto").glob("*.md"))}
PAGES = "\n".join(HOWTO.values())


def script_of(name):
    (script,) = re.findall(rf"`{name}`:\n\n```python\n(.*?)```", PAGES, re.S)
    return script


def pieces(page):
    """All pieces of Python of a page, as a reader pastes them into a file; doctests are not theirs."""
    blocks = re.findall(r"```python\n(.*?)```", HOWTO[page], re.S)
    return [block for block in blocks if not block.startswith(">>>")]


def python(folder, *arguments, **variables):
    """What Python prints in a folder, from which it can import."""
    path = os.pathsep.join([str(ROOT), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()


def torchrun(size, folder, draws, script):
    (folder / "page.py").write_text(script)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), "page.py"]
    return python(folder, *command, DRAWS=str(draws))


def executed(folder, draws):
    """What a script prints on this rank, whose group has begun already and stays."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        for name in ("init_process_group", "destroy_process_group"):
            patch.setattr(dist, name, lambda *args, **options: None)
        patch.setenv("DRAWS", str(draws))
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        runpy.run_path("page.py", run_name="__main__")
    return out.getvalue()


def launched(size, folder, draws, script):
    """As :func:`torchrun`, in processes that have imported torch already."""
    (folder / "page.py").write_text(script)
    return "".join(run(executed, size, folder, draws)).strip()


def drawn(path):
    return {"w": bc.Draws.open(path).params["w"]}


def of_chains(path):
    parts = [torch.load(file) for file in sorted(path.parent.glob(f"{path.name}-*"))]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


SCRIPTS = {  # ranks, how far they may be off one process, what to compare
    "chains.py": (4, 0.0, drawn),
    "gradients.py": (2, 1e-6, drawn),
    "transformer.py": (2, 1e-6, torch.load),
    "mesh.py": (8, 1e-6, of_chains),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_pages_command_gives_on_several_ranks_what_it_gives_on_one(name, tmp_path):
    size, rounding, tensors = SCRIPTS[name]
    command = rf"\$ DRAWS=draws torchrun --standalone --nproc-per-node {size} {name}\n(.*?)\n```"
    (said,) = re.findall(command, PAGES)
    launch = torchrun if name == "gradients.py" else launched  # its start takes the longest
    assert launch(size, tmp_path, tmp_path / "many", script_of(name)) == said
    launched(1, tmp_path, tmp_path / "one", script_of(name))
    one, many = tensors(tmp_path / "one"), tensors(tmp_path / "many")
    torch.testing.assert_close(many, one, rtol=0, atol=rounding)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["sharded_posteriors", "sharded_curvature", "engines"])
def test_the_pieces_of_a_page_run_pasted_into_one_file_on_two_ranks(page, tmp_path):
    launched(2, tmp_path, tmp_path / "draws", "\n\n".join(pieces(page)))


def test_where_torchrun_started_no_process_group_the_rank_is_what_it_said():
    assert bc.distributed.world() == (0, 1)
    with mock.patch.dict(os.environ, {"TORCHELASTIC_RUN_ID": "x", "RANK": "2", "WORLD_SIZE": "5"}):
        assert bc.distributed.world() == (2, 5)


# the page on jobs: one function for each chain


def called(command, folder, **variables):
    """What a shell command calls as ``python``, with these variables: arguments, folder of the draws, number of threads."""
    (folder / "python").write_text('#!/bin/sh\necho "$@" "$DRAWS" "$OMP_NUM_THREADS"\n')
    (folder / "python").chmod(0o755)
    env = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", **variables}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60).stdout.split()


def test_the_pages_scripts_for_slurm_and_kubernetes_call_the_function_with_the_number_of_their_job(tmp_path):
    yaml = pytest.importorskip("yaml")
    (script,), (text,) = (re.findall(rf"```{kind}\n(.*?)```", HOWTO["schedulers"], re.S) for kind in ("bash", "yaml"))
    assert re.search(r"^#SBATCH --array=0-999$", script, re.M), "a line that Slurm reads begins with #SBATCH"
    assert called(["bash", "-c", script], tmp_path, SLURM_ARRAY_TASK_ID="7", USER="somebody") == [
        "jobs.py",
        "7",
        "/scratch/somebody/draws",
        "2",
    ]
    job = yaml.safe_load(text)["spec"]
    assert job["completionMode"] == "Indexed" and job["template"]["spec"]["restartPolicy"] == "Never"
    (container,), (volume,) = job["template"]["spec"]["containers"], job["template"]["spec"]["volumes"]
    (variable,), (mount,) = container["env"], container["volumeMounts"]
    assert mount["name"] == volume["name"] and variable == {"name": "DRAWS", "value": mount["mountPath"]}
    assert called(container["command"], tmp_path, JOB_COMPLETION_INDEX="7", DRAWS=variable["value"]) == [
        "jobs.py",
        "7",
        "/draws",
    ]


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.parametrize("library, chains", [("joblib", 8), ("ray", 4)])
def test_jobs_are_the_chains_that_one_process_makes_and_open_as_one_run(library, chains, tmp_path):
    pytest.importorskip(library)
    # the page's piece on a machine of two cores, with as many chains and a folder that exists here
    (piece,) = [block for block in pieces("jobs") if f"import {library}" in block or f"from {library}" in block]
    piece = piece.replace("range(1000)", f"range({chains})").replace("/shared/draws", str(tmp_path / "draws"))
    if library == "ray":
        piece = (
            f"import ray\nray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)\n{piece}\nray.shutdown()\n"
        )
    piece += (
        "\nimport os, runpy, sys\nos.environ['DRAWS'], sys.argv = 'alone', ['jobs.py', '3']\n"
        "runpy.run_path('jobs.py', run_name='__main__')\n"  # what the scripts of a scheduler call
    )
    (tmp_path / "jobs.py").write_text(script_of("jobs.py"))
    (tmp_path / "main.py").write_text(piece)
    python(tmp_path, "main.py")
    draws = bc.Draws.open(str(tmp_path / "draws" / "chain-*"))
    assert draws.chains == chains and bc.diagnostics.r_hat(draws)["w"].max() < 1.1
    last, alone = (bc.Draws.open(tmp_path / folder / "chain-3").params["w"] for folder in ("draws", "alone"))
    assert torch.equal(last, alone)
