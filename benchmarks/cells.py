"""A table whose cells are worked out in any order by several processes, and whose record grows cell by cell.

A command that is stopped goes on where it stopped: cells that the record holds are not worked out again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.measure import keep


def work_out(
    run: Callable[[Any], dict[str, Any]],
    cells: Sequence[Any],
    path: Path,
    *,
    workers: int = 1,
    summary: Callable[[list[dict[str, Any]]], Any],
) -> list[dict[str, Any]]:
    """Work out all cells that are not in the record yet, and write the record after each.

    Args:
        run: makes the row of a cell, a function that a process can be told by its name. What it raises becomes the row.
        cells: each with a ``str`` of its own, which names it in the record.
        path: of the record.
        workers: processes, each on one thread.
        summary: of all rows; it stands in the record as ``table``.

    Returns:
        All rows, in the order of the cells; those of other cells that the record holds come after them.
    """
    known: dict[str, dict[str, Any]] = {}
    seconds = 0.0
    if path.exists():
        record = json.loads(path.read_text())
        known = {row["cell"]: row for row in record["rows"] if "failed" not in row}
        seconds = record["seconds"]
    began, todo = time.perf_counter(), [cell for cell in cells if str(cell) not in known]

    def rows() -> list[dict[str, Any]]:
        asked = {str(cell): None for cell in cells}
        return [known[name] for name in [*asked, *(name for name in known if name not in asked)] if name in known]

    def write() -> None:
        spent = seconds + time.perf_counter() - began
        keep(path, {"seconds": spent, "table": summary(rows()), "rows": rows()})

    def add(cell: Any, row: dict[str, Any]) -> None:
        known[str(cell)] = row
        print(f"{len(known)}/{len(cells)} {row['cell']}: {row.get('says', row.get('failed', ''))}", flush=True)
        write()

    if workers == 1:  # in this process
        _one_thread()
        for cell in todo:
            add(cell, _row(run, cell))
    else:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_one_thread) as pool:
            asked = {pool.submit(_row, run, cell): cell for cell in todo}
            for done in as_completed(asked):
                add(asked[done], done.result())
    write()
    return rows()


def command(
    name: str,
    doc: str | None,
    run: Callable[[Any], dict[str, Any]],
    cells: Sequence[Any],
    *,
    summary: Callable[[list[dict[str, Any]]], Any],
    table: Callable[[Any], str],
) -> None:
    """``python -m benchmarks.<name> [--workers N] [--out PATH]``: work out all cells, write and print the table in Markdown."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=(doc or "").split("\n")[0])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / f"{name}.json")
    args = parser.parse_args()
    written = table(summary(work_out(run, cells, args.out, workers=args.workers, summary=summary)))
    args.out.with_suffix(".md").write_text(written)
    print(written)


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _row(run: Callable[[Any], dict[str, Any]], cell: Any) -> dict[str, Any]:
    began = time.perf_counter()
    try:
        row = run(cell)
    except Exception as error:
        row = {"failed": f"{type(error).__name__}: {error}"}
    return {"cell": str(cell), **row, "seconds": round(time.perf_counter() - began, 2)}
