"""How long a capture takes, in a first process and in a second one, which finds the program of the first.

    python -m benchmarks.captures [--leaves 1 20 60] [--out benchmarks/results/captures.json]

A network of so many matrices of 16 x 16 with tanh between them, SGHMC, one thread. Each row starts two processes on an empty
cache folder; times are of ``bc.capture`` and the first call, without imports: wall time, and CPU time of the process and of
its children. Both processes print a digest of what 20 steps gave, which has to be one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OUT = Path("benchmarks/results/captures.json")


def measured(leaves: int) -> dict:
    """Capture in this process."""
    import torch
    import torch._inductor.compile_fx
    from torch._dynamo.utils import counters

    import bayesopt_chain as bc

    torch.set_num_threads(1)
    torch.manual_seed(0)
    params, x = [torch.randn(16, 16) * 0.1 for _ in range(leaves)], torch.randn(32, 16)

    def loss(params, batch):
        for w in params:
            batch = torch.tanh(batch @ w)
        return batch.square().mean()

    tx = bc.sghmc(0.05, 0.9, temperature=1e-3)
    step, state = bc.make_step(loss, tx), tx.init(params)
    wall, before = time.perf_counter(), os.times()
    fast = bc.capture(step, params, state, x)
    params, state, _ = fast(params, state, x)
    wall, after = time.perf_counter() - wall, os.times()
    for _ in range(19):
        params, state, _ = fast(params, state, x)
    bits = b"".join([p.numpy().tobytes() for p in params])
    return {
        "wall_s": round(wall, 2),
        "cpu_s": round(after.user - before.user + after.system - before.system, 2),
        "children_s": round(
            after.children_user - before.children_user + after.children_system - before.children_system, 2
        ),
        "found": counters["inductor"]["fxgraph_cache_hit"],
        "digest": hashlib.sha256(bits).hexdigest()[:16],
    }


def row(leaves: int) -> dict:
    """Two processes, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.captures", "--alone", str(leaves)]
        said = [subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    first, second = (json.loads(text.splitlines()[-1]) for text in said)
    return {"leaves": leaves, "first": first, "second": second, "same_bits": first["digest"] == second["digest"]}


def sentence(path: Path = OUT) -> str:
    """The wall times of the record in words."""
    rows = json.loads(path.read_text())["rows"]
    first, second = ([f"{row[which]['wall_s']:.1f}" for row in rows] for which in ("first", "second"))
    leaves = ", ".join(str(row["leaves"]) for row in rows)
    in_words = f"{', '.join(first)} s in the first process and {', '.join(second)} s in the second"
    return f"a network of {leaves} matrices takes {in_words}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaves", type=int, nargs="+", default=[1, 20, 60])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--alone", type=int)
    given = parser.parse_args()
    if given.alone is not None:
        print(json.dumps(measured(given.alone)))
        return
    from benchmarks.measure import keep  # which imports torch, as the processes that are timed do not yet

    rows = []
    for leaves in given.leaves:
        rows.append(row(leaves))
        print(json.dumps(rows[-1]), flush=True)
        keep(given.out, {"rows": rows})


if __name__ == "__main__":
    main()
