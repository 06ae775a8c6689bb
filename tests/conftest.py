"""Marks of the tiers; Hypothesis runs the same examples every time, half of them in the quick tier.

Runs on disk commit thousands of times in these tests, and flushing a file takes a disk milliseconds in which nobody works. So
``tmp_path`` lies in memory where the machine has a file system for that, and room.
"""

import os
import shutil
from collections import defaultdict

import pytest
import torch
from hypothesis import HealthCheck, settings

for name, examples in {"quick": 20, "full": 40}.items():
    settings.register_profile(
        name, deadline=None, derandomize=True, max_examples=examples, suppress_health_check=[HealthCheck.too_slow]
    )

MEMORY = "/dev/shm"
if os.path.isdir(MEMORY) and shutil.disk_usage(MEMORY).free > 4 << 30:
    runs_programs = not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC  # some tests compile into their folder
    if runs_programs:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)


def pytest_configure(config):
    settings.load_profile("quick" if config.option.markexpr == "not slow" else "full")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    swept = defaultdict(list)
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif mark := item.get_closest_marker("sweep"):
            swept[item.nodeid.partition("[")[0], *mark.args].append(item)
    for (_, quick), rows in swept.items():
        rows.sort(key=lambda item: [*item.callspec.indices.values()])  # in whatever order the tests run
        chosen = {i * len(rows) // quick for i in range(quick)}
        for i, item in enumerate(rows):
            if i not in chosen:
                item.add_marker(pytest.mark.slow)


@pytest.fixture
def double_precision():
    """New tensors are float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def any_threads():
    """A test may set the number of threads: those behind it have as many as those before it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
