"""Two tiers, and every test begins with one seed.

``pytest`` alone runs the quick tier, in two processes where pytest-xdist is installed; ``pytest PATHS`` runs all of what it is
given, in one. ``-m`` and ``-n`` take the place of either default. Doctests are asked for by ``--doctest-modules``.
"""

import gc
import os
import signal
import tempfile
from importlib.util import find_spec

import pytest
import torch

NEEDS = {"bayesopt_chain/botorch": "botorch", "bayesopt_chain/sklearn.py": "sklearn"}

collect_ignore = [room for room, library in NEEDS.items() if not find_spec(library)]

# One thread in each process, and in those that tests start: two processes share two cores, and tests are small.
torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))

# A shell starts what runs in the background (``&``, ``nohup``) with Ctrl-C ignored.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    config.option.markexpr = config.option.markexpr or "not slow"
    is_worker = hasattr(config, "workerinput")  # pytest-xdist calls this in workers too: they start none of their own
    if not is_worker and getattr(config.option, "numprocesses", 0) is None and not config.option.usepdb:
        config.option.numprocesses = 2
        config.option.dist = "worksteal"


def pytest_configure(config):
    """What tests, doctests and the processes that they start leave in the temporary folder goes when the session ends.

    pytest-xdist's workers find the session's folder in the environment.
    """
    if not hasattr(config, "workerinput"):
        # there pytest keeps ``tmp_path`` of the last three sessions
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        os.environ["TMPDIR"] = tempfile.tempdir = folder.name


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collecting makes objects that stay: the collector of garbage would walk through them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure():
    gc.unfreeze()


# torch.manual_seed writes down the stack for each kind of device that is absent, which takes milliseconds in every test.
seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


@pytest.fixture(autouse=True)
def _fixed_seed():
    """Every test starts from the same place of the global generator, in whatever order tests run."""
    seed(0)
