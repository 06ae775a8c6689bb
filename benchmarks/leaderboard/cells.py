"""One cell: all contestants on one split, written when they are done."""

from __future__ import annotations

import json
import os
import time
import traceback
from pathlib import Path
from typing import Any


def cell(name: str, seed: int, steps: int, file: Path, peers: bool) -> dict[str, Any]:
    """The networks of a split, or what has no networks; written to the cell's file beside what it has."""
    import torch

    torch.set_num_threads(1)
    from benchmarks.leaderboard import contestants as c
    from benchmarks.leaderboard.scores import scored
    from benchmarks.leaderboard.tasks import split

    task = split(name, seed)
    done = json.loads(file.read_text()) if file.exists() else {}
    todo = c.networks_contest(task, seed, steps)
    if peers:
        both = (c.gaussian_process, c.gradient_boosting)
        todo = {f.__name__: (lambda f=f: f(task, seed)) for f in both}
    for who, run in todo.items():
        torch.manual_seed(seed)
        start = time.process_time()
        try:
            result = run()
            if result is None:
                continue
            seconds = time.process_time() - start
            done[who] = {**scored(task, result.predict), "seconds": seconds, "said": result.said}
            done[who] |= {} if result.passes is None else {"passes": result.passes}
        except Exception as err:
            done[who] = {"failed": f"{type(err).__name__}: {err}"[:500], "where": traceback.format_exc()[-800:]}
    done["about"] = {"source": task.source, "split": task.hash, "train": len(task.x), "test": len(task.x_test)}
    temporary = Path(f"{file}.{os.getpid()}")
    temporary.write_text(json.dumps(done, indent=1))
    os.replace(temporary, file)
    return done
