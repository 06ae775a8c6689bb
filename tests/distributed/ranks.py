"""Several processes with a gloo group among them: they stay, one group for each number of ranks, and run what they are sent."""

import datetime
import functools
import importlib
import inspect
import itertools
import multiprocessing
import os
import pickle
import signal
import time
import traceback
import warnings

import optree
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from bayesopt_chain.distributed import witness

PATIENCE = 500.0  # seconds; a test takes a few of them where the machine is free
GROUPS = {}
CALLS = itertools.count(1)


def server():
    """Starts processes that have imported torch and the package already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.preloaded"])
    return context


def run(function, size, *args, **options):
    """``function(*args, **options)`` on each of ``size`` ranks; the list of what they returned, by rank.

    Without ``size``: the one of this process. Raises what the first of them raised, as text, and ends the group then.
    """
    if not size:
        return [function(*args, **options)]
    group = GROUPS.pop(size, None) or begun(_serve, size)
    call = pickle.dumps((next(CALLS), function, args, options))
    for pipe, _ in group:
        pipe.send_bytes(call)
    results, end = {}, time.monotonic() + PATIENCE
    while len(results) < size and time.monotonic() < end:
        waiting = {pipe: rank for rank, (pipe, _) in enumerate(group) if rank not in results}
        for pipe in multiprocessing.connection.wait([*waiting], 0.2):
            try:
                results[waiting[pipe]] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                results[waiting[pipe]] = ("the process ended", None)
        if any(said for said, _ in results.values()):
            end = min(end, time.monotonic() + 0.5)  # the others wait for it in vain
    said = {rank: results.get(rank, ("no result", None))[0] for rank in range(size)}
    if any(said.values()):
        _ended(group)
        raise AssertionError("\n".join(f"rank {rank}: {text}" for rank, text in said.items() if text))
    GROUPS[size] = group
    return [results[rank][1] for rank in range(size)]


def killed(function, size, victim, *args, now=lambda: False, **options):
    """Launch ranks, and kill the victim when it is time; when the first one is dead, kill the others as ``torchrun`` does.

    Without ``size``: one process that knows of no ranks.

    Whether the victim was killed, by us or by itself.
    """
    group, end = begun(_once, size, function, args, options), time.monotonic() + 120
    processes = [process for _, process in group]
    # a rank that has finished leaves the others to run on
    while time.monotonic() < end and None in (codes := [process.exitcode for process in processes]) and not any(codes):
        if now():
            processes[victim].kill()
        time.sleep(0.002)
    processes[victim].join(5)  # the end of another rank, which lost its connection, may be known first
    died = processes[victim].exitcode == -signal.SIGKILL
    _ended(group)
    return died


def begun(target, size, *args):
    """A pipe and a process for each rank; the store is in this process."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    group = []
    for rank in range(size or 1):
        ours, theirs = multiprocessing.Pipe()
        ours.store = store  # as long as somebody may send
        process = server().Process(target=target, args=(theirs, rank, size, store.port, *args), daemon=True)
        process.start()
        theirs.close()
        group.append((ours, process))
    return group


def _ended(group):
    for _, process in group:
        process.kill()
        process.join()


def _joined(rank, size, port):
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=120)
    store = dist.TCPStore("127.0.0.1", port, None, False, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)


def _once(pipe, rank, size, port, function, args, options):
    if size:
        _joined(rank, size, port)
    function(*args, **options)
    os._exit(0)  # whatever threads of the group are left


def _serve(pipe, rank, size, port):
    _joined(rank, size, port)
    while True:
        try:
            call, function, args, options = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        witness._made = 1000 * call  # as in ranks that have run one program
        dist.distributed_c10d._get_default_store().delete_key("bayesopt_chain/failed")
        torch.manual_seed(0)
        dist.barrier()
        try:
            result = ("", function(*args, **options))
            dist.barrier()
        except BaseException:
            result = (traceback.format_exc(), None)
        pipe.send_bytes(pickle.dumps(result))


def on(*sizes):
    """The body of a test runs on every rank of a group of each size: asserts hold there, and values are picklable.

    What a body asks for beside ``size``: fixtures and parameters, in this process.
    """

    def decorate(body):
        asked = inspect.signature(body).parameters

        def test(size, **given):
            run(_body, size, body.__module__, body.__name__, given | ({"size": size} if "size" in asked else {}))

        functools.update_wrapper(test, body).body = body
        fixtures = {**asked, "size": inspect.Parameter("size", inspect.Parameter.KEYWORD_ONLY)}
        test.__signature__ = inspect.Signature([x.replace(kind=x.KEYWORD_ONLY) for x in fixtures.values()])
        return pytest.mark.parametrize("size", sizes)(test)

    return decorate


def _body(module, name, given):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        getattr(importlib.import_module(module), name).body(**given)


def world():
    """This rank, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def everywhere(value):
    """What every rank has, by rank."""
    dist.all_gather_object(every := [None] * world()[1], value)
    return every


@functools.cache
def mesh_of(*shape):
    """A mesh over all ranks, the same one every time: each new one of several axes makes process groups of its own."""
    names = ("first", "second", "third")[: len(shape)] if len(shape) > 1 else None
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def whole(tree):
    """The tree with its DTensors gathered."""
    return optree.tree_map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, tree)


def message_of(function, *args):
    """What a refusal says, or ``None`` if there was none."""
    try:
        function(*args)
    except (ValueError, TypeError, RuntimeError, OSError) as err:
        return f"{type(err).__name__}: {err}"
    return None
