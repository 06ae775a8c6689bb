"""Soak: a run that is killed (SIGKILL) at random moments, again and again, must end as the run that nobody killed.

    python -m benchmarks.soak --kills 200

Between two kills every shard is compared with its checksum; in the end steps and draws are compared bit for bit.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks import runs
from tests.runs.test_sample import kill_and_resume


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=10, help="runs to share the kills among")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    begin, each, done, round = time.monotonic(), max(1, arguments.kills // arguments.rounds), 0, 0
    while done < arguments.kills:
        with tempfile.TemporaryDirectory() as folder:
            done += kill_and_resume(Path(folder), each, arguments.seed + round)
        round += 1
        print(f"{done} kills: no draw lost, doubled or torn ({time.monotonic() - begin:.0f} s)", flush=True)
    runs.record("soak", {"kills": done, "runs": round, "seconds": int(time.monotonic() - begin)})


if __name__ == "__main__":
    main()
