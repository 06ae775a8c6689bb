"""The step of training is timed twice and not twenty times: nearly all of these calls are shorter than that."""

import pytest

from bayesopt_chain.ensemble import training


@pytest.fixture(autouse=True)
def timed_briefly(monkeypatch):
    monkeypatch.setattr(training, "TIMED", 2)
