"""Several processes with a gloo group among them: they stay, one group for each number of ranks, and run what they are sent."""

import contextlib
import datetime
import functools
import importlib
import inspect
import itertools
import multiprocessing
import os
import signal
import threading
import warnings
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait

import optree
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from bayesopt_chain.distributed import witness
from bayesopt_chain.distributed import world as world
from bayesopt_chain.runs.store import Store

PATIENCE = 500.0  # seconds; a test takes a few of them where the machine is free
GROUPS = {}
CALLS = itertools.count(1)


def server():
    """Starts processes that have imported torch and every file of the package already."""
    context = multiprocessing.get_context("forkserver")
    lazily = ["functorch.compile", "safetensors.torch", "torch.distributed.checkpoint.state_dict"]
    context.set_forkserver_preload([*lazily, *(f"tests.distributed.test_{x}" for x in ("engines", "runs", "shards"))])
    return context


def run(function, size, *args, **options):
    """``function(*args, **options)`` on each of ``size`` ranks; the list of what they returned, by rank.

    Without ``size``: the one of this process. Raises what ranks raised, and ends the group then.
    """
    if not size:
        return [function(*args, **options)]
    group, call = GROUPS.pop(size, None) or begun(size), next(CALLS)
    results = [pool.submit(_called, call, function, args, options) for pool, _ in group]
    wait(results, PATIENCE, FIRST_EXCEPTION)
    wait(results, 0.5)  # where one raised, the others wait for it in vain
    if any(not x.done() or x.exception() for x in results):
        ended(group)  # as torchrun does, also where one killed itself; behind this they are dead, and hold no lock
        raise BaseExceptionGroup("ranks failed", [err for x in results if (err := x.exception())])
    GROUPS[size] = group
    return [x.result() for x in results]


def begun(size):
    """A pool and the process in it for each rank."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    pools = [ProcessPoolExecutor(1, server(), _joined, (rank, size, store.port)) for rank in range(size)]
    pools[0].store = store  # as long as somebody may send
    return [*zip(pools, [x.result() for x in [pool.submit(os.getpid) for pool in pools]])]


def ended(group):
    for _, process in group:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _joined(rank, size, port):
    torch.set_num_threads(1)
    threading.Thread(target=_follows, daemon=True).start()
    timeout = datetime.timedelta(seconds=120)
    store = dist.TCPStore("127.0.0.1", port, None, False, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)


def _follows():
    """Ends with the process of the tests."""
    multiprocessing.parent_process().join()
    os._exit(0)


def _called(call, function, args, options):
    witness._made = itertools.count(1000 * call)  # as in ranks that have run one program
    Store.runs = itertools.count(1000 * call)
    torch.manual_seed(0)
    dist.barrier()
    result = function(*args, **options)
    dist.barrier()
    return result


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


@functools.cache
def mesh_of(*shape):
    """A mesh over all ranks, the same one every time: each new one of several axes makes process groups of its own."""
    names = ("first", "second", "third")[: len(shape)] if len(shape) > 1 else None
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def whole(tree):
    """The tree with its DTensors gathered."""
    return optree.tree_map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, tree)


def refuses(cases):
    """Each of the cases, words and an act, is refused in these words."""
    for words, act in cases.items():
        said = message_of(act)
        assert said is not None and all(word in said for word in words), (words, said)


def message_of(function, *args, **options):
    """What a refusal says, or ``None`` if there was none."""
    try:
        function(*args, **options)
    except (ValueError, TypeError, RuntimeError, OSError) as err:
        return f"{type(err).__name__}: {err}"
    return None
