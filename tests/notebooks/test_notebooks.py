"""The notebooks are kept executed from top to bottom, and run at their smoke scale."""

import ast
import os
import re
import sys
from pathlib import Path

import pytest

from tests.distributed.ranks import server
from tests.notebooks.needs import DATA, FOLDER, PACKAGES

nbformat = pytest.importorskip("nbformat")

NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
ALLOWED = {
    "json",
    "logging",
    "math",
    "os",
    "warnings",
    "lightning",
    "matplotlib",
    "torch",
    "torchopt",
    "optree",
    "bayesopt_chain",
    "botorch",
    "numpy",
    "pathlib",
    "peft",
    "tempfile",
    "tokenizers",
    "transformers",
    "posteriors",
    "pyro",
    "time",
}


def read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_the_notebooks_are_there():
    expected = {"five_minutes", "why_bayes", "double_well", "pima", "write_your_own_sampler", "imdb"}
    expected |= {"continual_lora", "bayesian_llama", "one_call", "bayesian_optimisation", "minibatch_heat", "lightning"}
    expected |= {"a_network_one_trusts", "learning_coefficients", "adapters"}
    assert expected <= set(NAMES)


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


def test_their_methods_are_in_their_cells():
    """They import the library and packages that a reader has, and no code that lies beside the notebooks."""
    for name in NAMES:
        tree = ast.parse("\n".join(cell.source for cell in code(read(name))))
        imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
        modules = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
        modules |= {node.module for node in imports if isinstance(node, ast.ImportFrom)}
        assert {module for module in modules if module.split(".")[0] not in ALLOWED} == set(), name


def test_the_command_names_a_notebook_whose_data_are_absent_and_leaves_it(monkeypatch, capsys):
    pytest.importorskip("nbclient")
    from tests.notebooks import __main__ as command

    monkeypatch.setenv("BAYESOPT_CHAIN_DATA", "/nowhere")
    monkeypatch.setattr(command, "execute", lambda name, keep: pytest.fail(f"{name} was executed"))
    monkeypatch.setattr(command.sys, "argv", ["notebooks", "imdb"])
    monkeypatch.setattr(command, "PACKAGES", {})
    command.main()
    assert capsys.readouterr().out == f"imdb: skipped, it needs BAYESOPT_CHAIN_DATA, a folder with {DATA['imdb']}\n"
    monkeypatch.setattr(command, "PACKAGES", {"imdb": ["no_such_package"]})
    command.main()
    assert "imdb: skipped, it needs the package no_such_package" in capsys.readouterr().out


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
    for package in PACKAGES.get(name, []):
        pytest.importorskip(package)
    data = os.environ.get("BAYESOPT_CHAIN_DATA", "")
    if name in DATA and not (data and (Path(data) / DATA[name]).exists()):
        pytest.skip(f"set BAYESOPT_CHAIN_DATA to a folder with {DATA[name]}")
    given = {"BAYESOPT_CHAIN_SCALE": "smoke", "BAYESOPT_CHAIN_RUNS": str(tmp_path), "IPYTHONDIR": str(tmp_path)}
    said = tmp_path / "said"
    process = server().Process(target=_execute, args=(name, str(said), given | {"MPLBACKEND": "agg"}))
    process.start()
    process.join(600)
    assert process.exitcode == 0, said.read_text()
