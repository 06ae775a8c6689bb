"""``python -m tests.notebooks [NAME ...]``: execute the notebooks in place, those named or all.

A notebook whose data or packages are absent is named with what it lacks and left as it is. The scale is that of
``BAYESOPT_CHAIN_SCALE``; at ``smoke`` nothing is written back.
"""

from __future__ import annotations

import os
import sys
import time

import nbformat
from nbclient import NotebookClient

from tests.notebooks.needs import FOLDER, lacking


def execute(name: str, keep: bool) -> None:
    """Run a notebook from top to bottom, and keep its outputs."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    NotebookClient(
        notebook, timeout=None, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    ).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when each cell ran: another commit for nothing
    if keep:
        nbformat.write(notebook, FOLDER / f"{name}.ipynb")


def main() -> None:
    """Execute, with a line for each."""
    names = sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    path = [str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    for name in names:
        reason, began = lacking(name), time.perf_counter()
        if reason:
            print(f"{name}: skipped, it {reason}", flush=True)
            continue
        execute(name, keep=os.environ.get("BAYESOPT_CHAIN_SCALE") != "smoke")
        print(f"{name}: executed in {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
