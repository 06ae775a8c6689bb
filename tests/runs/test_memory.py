"""A run to disk holds no more than a shard, however long it is."""

import pytest

pytest.importorskip("safetensors")
from benchmarks.runs import growth


@pytest.mark.slow
def test_memory_is_flat_over_a_long_run_to_disk():
    """Short form of ``python -m benchmarks.runs``: 1,500 steps and 300 draws, under 3 % growth behind the first third."""
    figures = growth(1500, 5, warm_up=1 / 3)
    assert figures["draws"] == 300 and figures["growth"] < 0.03, figures
