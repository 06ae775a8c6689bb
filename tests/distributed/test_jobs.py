"""The page on jobs: one function for each chain, run by joblib and by hand, opened as one run."""

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bayesopt_chain as bc

ROOT = Path(__file__).parents[2]
PAGE, SCHEDULERS = ((ROOT / f"docs/howto/{name}.md").read_text() for name in ("jobs", "schedulers"))
(SCRIPT,) = re.findall(r"`jobs.py`:\n\n```python\n(.*?)```", PAGE, re.S)


def pasted(word):
    """The page's piece of Python that has this word."""
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", PAGE, re.S) if word in b and b != SCRIPT]
    return block


def loss(params, batch):
    return (params["w"] - batch).square().mean() / 2


def test_a_step_that_was_pickled_makes_the_same_step():
    tx, params = bc.sghmc(0.1, temperature=0.1), {"w": torch.zeros(3)}
    step, state = bc.make_step(loss, tx), tx.init(params)
    for made in (step, bc.parallel(step, 2, loop=True).step):
        other = pickle.loads(pickle.dumps(made))
        assert torch.equal(other(params, state, torch.ones(3))[0]["w"], step(params, state, torch.ones(3))[0]["w"])


def python(folder):
    """Run ``main.py`` in a folder, which can import what is there."""
    path = os.pathsep.join([str(ROOT), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.run([sys.executable, "main.py"], cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def called(command, folder, **variables):
    """What a shell command calls as ``python``, with these variables: arguments, folder of the draws, number of threads."""
    (folder / "python").write_text('#!/bin/sh\necho "$@" "$DRAWS" "$OMP_NUM_THREADS"\n')
    (folder / "python").chmod(0o755)
    env = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", **variables}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60).stdout.split()


def test_the_pages_script_for_slurm_calls_the_function_with_the_number_of_its_job(tmp_path):
    (script,) = re.findall(r"```bash\n(.*?)```", SCHEDULERS, re.S)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=60)
    assert re.search(r"^#SBATCH --array=0-999$", script, re.M), "a line that Slurm reads begins with #SBATCH"
    said = called(["bash", "-c", script], tmp_path, SLURM_ARRAY_TASK_ID="7", USER="somebody")
    assert said == ["jobs.py", "7", "/scratch/somebody/draws", "2"]


def test_the_pages_job_for_kubernetes_calls_the_function_with_the_number_of_its_pod(tmp_path):
    yaml = pytest.importorskip("yaml")
    (text,) = re.findall(r"```yaml\n(.*?)```", SCHEDULERS, re.S)
    job = yaml.safe_load(text)["spec"]
    assert job["completionMode"] == "Indexed" and job["template"]["spec"]["restartPolicy"] == "Never"
    (container,), (volume,) = job["template"]["spec"]["containers"], job["template"]["spec"]["volumes"]
    (variable,), (mount,) = container["env"], container["volumeMounts"]
    assert mount["name"] == volume["name"] and variable == {"name": "DRAWS", "value": mount["mountPath"]}
    said = called(container["command"], tmp_path, JOB_COMPLETION_INDEX="7", DRAWS=variable["value"])
    assert said == ["jobs.py", "7", "/draws"]


@pytest.mark.slow
def test_jobs_of_joblib_are_the_chains_that_one_process_makes_and_open_as_one_run(tmp_path):
    pytest.importorskip("joblib")
    (tmp_path / "jobs.py").write_text(SCRIPT)
    main = pasted("joblib") + pasted("Draws.open")
    main += "import os, runpy, sys\nos.environ['DRAWS'], sys.argv = 'alone', ['jobs.py', '3']\n"
    main += "runpy.run_path('jobs.py', run_name='__main__')\n"  # what the scripts of a scheduler call
    (tmp_path / "main.py").write_text(main)
    done = python(tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith("8 tensor")  # what the page prints: chains and R-hat
    draws = bc.Draws.open(str(tmp_path / "draws" / "chain-*"))
    assert draws.chains == 8 and bc.diagnostics.r_hat(draws)["w"].max() < 1.1
    last = bc.Draws.open(tmp_path / "draws" / "chain-3").params["w"]
    assert torch.equal(last, bc.Draws.open(tmp_path / "alone" / "chain-3").params["w"])


@pytest.mark.slow
@pytest.mark.peers
def test_jobs_of_ray_are_the_chains_that_one_process_makes_and_open_as_one_run(tmp_path):
    pytest.importorskip("ray")
    (tmp_path / "jobs.py").write_text(SCRIPT)
    # the page's piece on a machine of two cores, with four chains and a folder that exists here
    piece = pasted("ray.remote").replace("range(1000)", "range(4)").replace("/shared/draws", str(tmp_path / "draws"))
    (tmp_path / "main.py").write_text(
        "import ray\nray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)\n"
        + piece + "ray.shutdown()\nrun(3, 'alone')\n"
    )  # fmt: skip
    done = python(tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    draws = bc.Draws.open(str(tmp_path / "draws" / "chain-*"))
    assert draws.chains == 4 and bc.diagnostics.r_hat(draws)["w"].max() < 1.1
    last = bc.Draws.open(tmp_path / "draws" / "chain-3").params["w"]
    assert torch.equal(last, bc.Draws.open(tmp_path / "alone" / "chain-3").params["w"])
