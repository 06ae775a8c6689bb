"""What a reader has to go through to know what a call does: budgets of files, functions and statements.

Air, comments and docstrings are free. ``python -m benchmarks.route`` prints the figures, and which functions they are of.
"""

import ast
import json
import math
from pathlib import Path

import pytest

import bayesopt_chain as bc
from benchmarks import size
from benchmarks.route import CALLS, measured

PACKAGE = Path(bc.__file__).parent


@pytest.mark.parametrize("name", size.ROUTES)
def test_a_call_stays_within_its_aim_or_the_table_says_why_not(name):
    found, (files, functions) = measured(name), size.ROUTES[name]
    over = len(found.files) > files or len(found.functions) > (functions or math.inf)
    assert over <= (name in size.MISSED), (found.files, found.functions)


def test_every_room_stays_within_its_aim_or_the_table_says_why_not():
    sources = PACKAGE.rglob("*.py")
    found = size.rooms({f.relative_to(PACKAGE).as_posix(): f.read_text() for f in sources})
    assert size.over(found) <= set(size.MISSED)
    assert set(size.MISSED) <= {*size.ROOMS, *size.ROUTES, "everything", "files"}
    assert found["engine"]["statements"] <= size.ROOMS["engine"][0]  # one that is kept


def test_the_record_of_sizes_has_every_room_and_route():
    record = json.loads(size.PATH.read_text())
    assert list(record["rooms"]) == [*size.ROOMS, "everything"] and list(record["routes"]) == list(size.ROUTES)
    assert set(size.ROUTES) <= set(CALLS)


# Every tensor that the package makes names its device, so that a default device moves none away from what it meets


NAMES = (
    "arange as_tensor asarray empty empty_permuted empty_strided eye full linspace logspace ones rand randint randn randperm "
    "scalar_tensor sparse_coo_tensor sparse_csr_tensor tensor tril_indices triu_indices zeros"
)
FACTORIES = {f"torch.{name}" for name in NAMES.split()}


def without_device(source: str) -> list[int]:
    """The lines of calls ``torch.<factory>(...)`` that say nothing of a device."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    of_torch = [call for call in calls if ast.unparse(call.func) in FACTORIES]
    return [call.lineno for call in of_torch if not {k.arg for k in call.keywords} & {"device", None}]


@pytest.mark.slow
def test_every_tensor_names_its_device():
    room = Path(bc.__file__).parent
    lines = [
        f"{path.relative_to(room)}:{line}" for path in room.rglob("*.py") for line in without_device(path.read_text())
    ]
    assert not lines, f"name a device, device='cpu' for counters and summaries: {lines}"


def test_a_tensor_without_one_is_found():
    assert without_device("x = torch.zeros(3)\ny = torch.zeros(3, device='cpu')\nz = torch.ones(2, **like)\n") == [1]
