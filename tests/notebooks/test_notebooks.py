"""The notebooks are kept executed from top to bottom, and run at their smoke scale."""

import os
import re
import sys

import pytest

from tests.distributed.ranks import server
from tests.notebooks.needs import FOLDER, lacking

nbformat = pytest.importorskip("nbformat")

NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_they_were_executed_once_from_top_to_bottom_and_have_a_title_and_figures():
    for name in NAMES:
        notebook = read(name)
        cells = code(notebook)
        assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), name
        outputs = [o for cell in cells for o in cell.outputs]
        assert not [o for o in outputs if o.output_type == "error"], name
        assert len([o for o in outputs if "image/png" in o.get("data", {})]) >= 2, name
        assert notebook.cells[0].cell_type == "markdown" and notebook.cells[0].source.startswith("# "), name
        # no folder of the machine that ran it
        assert not re.search(r"/(home|root|usr|opt|tmp)/|site-packages", " ".join(map(str, outputs))), name


def _execute(name, said, environment):
    os.environ.update(environment)
    os.chdir(FOLDER)
    sys.path.insert(0, str(FOLDER.parent))
    for number in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    for cell in code(read(name)):
        shell.run_cell(cell.source).raise_error()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_runs_at_smoke_scale(name, tmp_path):
    """In IPython's shell, in a process that has imported torch already; ``make notebooks`` starts a kernel for each."""
    pytest.importorskip("IPython")
    if reason := lacking(name):
        pytest.skip(f"it {reason}")
    given = {"BAYESOPT_CHAIN_SCALE": "smoke", "BAYESOPT_CHAIN_RUNS": str(tmp_path), "IPYTHONDIR": str(tmp_path)}
    said = tmp_path / "said"
    process = server().Process(target=_execute, args=(name, str(said), given | {"MPLBACKEND": "agg"}))
    process.start()
    process.join(600)
    assert process.exitcode == 0, said.read_text()
