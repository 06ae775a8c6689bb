"""A run to disk holds no more than a shard, however long it is."""

import json
import subprocess
import sys

import pytest

MEASURED = "import json; from benchmarks.runs import growth; print(json.dumps(growth(1500, 5, warm_up=1 / 3)))"


@pytest.mark.slow
def test_memory_is_flat_over_a_long_run_to_disk():
    """Short form of ``python -m benchmarks.runs``: 1,500 steps and 300 draws, under 3 % growth behind the first third.

    In a process of its own: what other tests have left is freed, or is not, while this one measures.
    """
    figures = json.loads(subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, check=True).stdout)
    assert figures["draws"] == 300 and figures["growth"] < 0.03, figures
