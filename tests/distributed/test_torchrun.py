"""The commands of the pages on several ranks and in jobs, as they stand there."""

import contextlib
import copy
import io
import itertools
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
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor

import bayesopt_chain as bc
from bayesopt_chain.distributed import witness
from tests.distributed.ranks import mesh_of, run, world

ROOT = Path(__file__).parents[2]
HOWTO = {page.stem: page.read_text() for page in sorted((ROOT / "docs" / "howto").glob("*.md"))}
PAGES = "\n".join(HOWTO.values())


def script_of(name):
    (script,) = re.findall(rf"`{name}`:\n\n```python\n(.*?)```", PAGES, re.S)
    return script


def pieces(page):
    """All pieces of Python of a page, as a reader pastes them into a file; doctests are not theirs."""
    return [x for x in re.findall(r"```python\n(.*?)```", HOWTO[page], re.S) if not x.startswith(">>>")]


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


RAY = "import ray\nray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)"


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.parametrize("library, chains, begins, ends", [("joblib", 8, "", ""), ("ray", 4, RAY, "ray.shutdown()")])
def test_jobs_are_the_chains_that_one_process_makes_and_open_as_one_run(library, chains, begins, ends, tmp_path):
    pytest.importorskip(library)
    # the page's piece on a machine of two cores, with as many chains and a folder that exists here
    (piece,) = [block for block in pieces("jobs") if f"import {library}" in block or f"from {library}" in block]
    piece = piece.replace("range(1000)", f"range({chains})").replace("/shared/draws", str(tmp_path / "draws"))
    piece = (
        f"{begins}\n{piece.replace('n_jobs=4', 'n_jobs=2')}\n{ends}\n"
        "import os, runpy, sys\nos.environ['DRAWS'], sys.argv = 'alone', ['jobs.py', '3']\n"
        "runpy.run_path('jobs.py', run_name='__main__')\n"  # what the scripts of a scheduler call
    )
    (tmp_path / "jobs.py").write_text(script_of("jobs.py"))
    (tmp_path / "main.py").write_text(piece)
    python(tmp_path, "main.py")
    draws = bc.Draws.open(str(tmp_path / "draws" / "chain-*"))
    assert draws.chains == chains and bc.diagnostics.r_hat(draws)["w"].max() < 1.1
    last, alone = (bc.Draws.open(tmp_path / folder / "chain-3").params["w"] for folder in ("draws", "alone"))
    assert torch.equal(last, alone)


# Ranks that compare what they are about to draw, in one process: each of them has its turn before the store


GROUP = {"lr": 0.1, "temperature": 0.01, "momentum": 0.9, "weight_decay": 0.0, "noise_key": 7, "noise_count": 0}


class Store(dist.HashStore):
    """A rendezvous store, which counts the records of others that are read, and how long those are that are written."""

    read, written = 0, ()

    def compare_set(self, name, expected, desired):
        there = super().compare_set(name, expected, desired)
        if there == desired.encode():
            self.written += (len(name) + len(desired),)
        self.read += there != desired.encode()
        return there


@pytest.fixture
def ranks(monkeypatch):
    """Runs steps of so many ranks, one after the other; returns the errors by rank, and the most records that one read."""

    def run(claims, steps=2):
        run.store, errors, most = Store(), {}, 0
        monkeypatch.setattr(witness, "rendezvous_store", lambda: run.store)
        every = [copy.deepcopy(witness_of_all) for _ in claims]
        for _, (rank, mine) in itertools.product(range(steps), enumerate(claims)):
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            run.store.read = 0
            try:
                with every[rank].step(mine if callable(mine) else lambda mine=mine: mine, ()):
                    pass
            except ValueError as err:
                errors[rank] = str(err)
            most = max(most, run.store.read)
        return errors, most

    witness_of_all = witness.Witness("test")
    return run


def test_ranks_are_compared_anew_behind_a_write_into_any_of_the_parameters():
    """As of weights that were loaded, the frozen ones among them left out."""
    frozen, moved, begun = torch.zeros(2), torch.zeros(2), witness.Witness("test")
    for events in (0, 1):
        with begun.step(list, [frozen, moved]):
            moved.add_(1.0)
        assert begun.events == events
        moved.zero_()


def leaf(number, value=1.0, runs=None, key=7, **numbers):
    x = torch.full((3,), value)
    return witness.Claim(f"leaf {number}", key, number, runs, 0, x, x + number, {**GROUP, "noise_key": key, **numbers})


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


def but_for(claims, rank, **changed):
    """The same, but for the first leaf of this rank."""
    claims[rank] = [claims[rank][0]._replace(**changed), *claims[rank][1:]]
    return claims


def shards_beside(n):
    return [claims for claims in shards(n // 2) for _ in range(2)]


NUMBERS = "ranks 0 and 2 step 'leaf 0' under one key, and so as one chain, with"
CASES = {  # the claims, and what every rank says; nothing where they may be so
    **{
        f"{made.__name__} that drift, {at}": (
            but_for(made(10), at, param=torch.full((3,), 5.0)),
            "hold other values of",
        )
        for made, at in itertools.product((stages_beside, shards_beside), (1, 4, 9))
    },
    **{
        f"{made.__name__} with another {name}": (
            but_for(made(4), 2, group={**GROUP, name: 0.25}),
            f"{NUMBERS} {name} =",
        )
        for made, name in itertools.product((replicas, shards), ("lr", "temperature", "momentum", "weight_decay"))
    },
    "a rank without a part of a shard, with another rate": (
        [*shards(2), [c._replace(param=c.param[:0], gradient=None, group={**GROUP, "lr": 0.2}) for c in shards(3)[2]]],
        f"{NUMBERS} lr =",
    ),
    "replicas with other betas": (
        [[leaf(0, betas=(0.9, 0.99 - r / 8))] for r in range(2)],
        "with betas[1] = 0.99 and 0.865",
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


@pytest.mark.parametrize("steps, refused", [(2, set()), (3, {0, 1, 2, 3})])
def test_all_ranks_raise_what_a_comparison_has_found_at_the_step_behind_it(ranks, steps, refused):
    """One that raised before would leave the others alone in the average of their gradients."""
    times = [itertools.count() for _ in range(4)]  # nothing differs at the first comparison
    parting = [lambda r=r: [leaf(0, lr=0.1 + r * next(times[r]))] for r in range(4)]
    assert set(ranks(parting, steps)[0]) == refused


# the figures of the page's table for 512 ranks, of which two or four can be counted here


def contents(folder, leaves):
    """Bytes of the table of contents of a checkpoint of so many leaves."""
    spread = distribute_tensor(torch.zeros(8, 3), mesh_of(world()[1]), [Shard(0)])
    dcp.save({f"layers.{i}.weight": spread.clone() for i in range(leaves)}, checkpoint_id=str(folder))
    return (folder / ".metadata").stat().st_size


@pytest.mark.slow
def test_the_table_of_contents_takes_as_many_bytes_a_shard_as_the_page_says(tmp_path):
    (said,) = re.findall(r"table of contents takes (\d+) bytes a shard", HOWTO["scale"])
    two, four = (run(contents, size, tmp_path / f"{size}", 60)[0] for size in (2, 4))
    assert (four - two) / (2 * 60) == pytest.approx(int(said), rel=0.05)


def test_the_records_of_a_comparison_are_as_long_as_the_page_says(ranks):
    """Of 723 leaves: one of hashes of the leaves and their groups' numbers, one of the gradients."""
    x, names = torch.randn(723, 3), [f"layers.{i // 9}.attention.{i % 9}.weight" for i in range(723)]
    numbered = [witness.Claim(name, 2**62, 2**31 + i, None, 0, x[i], x[i], {}) for i, name in enumerate(names)]
    ranks([numbered], 1)
    ((longest, second),) = re.findall(r"records of some (\d+) kB and (\d+) bytes", HOWTO["scale"])
    assert ranks.store.written == pytest.approx((1000 * int(longest), int(second)), rel=0.1)
