"""Every tensor that the package makes names its device, so that a default device moves none away from what it meets."""

import ast
from pathlib import Path

import pytest

import bayesopt_chain as bc

NAMES = (
    "arange as_tensor asarray empty empty_permuted empty_strided eye full linspace logspace ones rand randint randn randperm "
    "scalar_tensor sparse_coo_tensor sparse_csr_tensor tensor tril_indices triu_indices zeros"
)
FACTORIES = {*NAMES.split()}


def without_device(source: str) -> list[int]:
    """The lines of calls ``torch.<factory>(...)`` that say nothing of a device."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    made = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in FACTORIES]
    of_torch = [call for call in made if isinstance(call.func.value, ast.Name) and call.func.value.id == "torch"]
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
