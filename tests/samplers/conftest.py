"""Draws of every kind through the one door that can be probed."""

import pytest
import torch

from bayesopt_chain import _random


@pytest.fixture
def every_draw_is_normal(monkeypatch):
    """Cheap variables are drawn as normals, which a NormalProbe replaces by the values it is given."""

    def seeded(key, step, salt, size, dtype, kind):
        return torch.empty(size, dtype=dtype).normal_()

    monkeypatch.setattr(_random, "_seeded", seeded)
