"""Tests and doctests begin with one seed; rooms that need a library which is not installed are not collected."""

from importlib.util import find_spec

import pytest
import torch

NEEDS = {"bayesopt_chain/botorch": "botorch", "bayesopt_chain/sklearn.py": "sklearn"}

collect_ignore = [room for room, library in NEEDS.items() if not find_spec(library)]


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)
