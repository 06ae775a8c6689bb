"""Several processes with a gloo group among them, as ``torchrun`` starts them."""

import collections
import datetime
import functools
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

PATIENCE = 500.0  # seconds; a test takes a few of them where the machine is free


def server():
    """Starts processes that have imported torch and the package already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.preloaded"])
    return context


def run(function, size, folder, *args):
    """``function(*args)`` in ``size`` processes at once; the list of what they returned, by rank.

    The processes are forked from a server that has imported torch already. Raises what the first of them raised, as text.
    """
    context = server()
    meeting = folder / f"meeting-{time.monotonic_ns()}"
    files = [folder / f"{meeting.name}-{rank}.pt" for rank in range(size)]
    processes = [
        context.Process(target=_one, args=(function, rank, size, meeting, files[rank], args), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + PATIENCE
    try:
        while any(process.is_alive() for process in processes) and time.monotonic() < end:
            processes[-1].join(0.05)
            if any(_failed(file) for file in files):  # the others wait for it in vain
                break
    finally:
        for process in processes:
            process.kill()
    results = [torch.load(file, weights_only=False) if file.exists() else ("no result", None) for file in files]
    said = [text for text, _ in results if text]
    assert not said, "\n".join(sorted(said, key=lambda text: text == "no result"))
    return [value for _, value in results]


def _failed(file):
    return file.exists() and torch.load(file, weights_only=False)[0] != ""


def _one(function, rank, size, meeting, file, args):
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=120)
        )
        result = ("", function(*args))
        dist.barrier()
    except BaseException:
        result = (f"rank {rank}:\n{traceback.format_exc()}", None)
    torch.save(result, f"{file}.part")
    os.replace(f"{file}.part", file)
    os._exit(0)  # whatever threads of the group are left


@functools.cache
def mesh_of(*shape):
    """A mesh over all ranks, the same one every time: each new one of several axes makes process groups of its own."""
    names = ("replicate", "shard", "third")[: len(shape)] if len(shape) > 1 else None
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


class Messages(TorchDispatchMode):
    """Counts the collectives inside it, by name; torch's own counter cannot follow a module that runs twice."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            self.counts[func.__name__.partition(".")[0].strip("_")] += 1
        return func(*args, **(kwargs or {}))


def message_of(function, *args):
    """What a refusal says, or ``None`` if there was none."""
    try:
        function(*args)
    except (ValueError, TypeError, RuntimeError, FileNotFoundError) as err:
        return f"{type(err).__name__}: {err}"
    return None


def launched(script: Path, folder: Path) -> list[Any]:
    """What a script saved as ``folder / "RANK.pt"`` on each of two ranks under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run([*command, script, folder], env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]
