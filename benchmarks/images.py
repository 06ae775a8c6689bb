"""What the uncertainty of an image's pixels costs: time and memory of ``bc.posterior.outputs_by_target`` against the image.

    python -m benchmarks.images        # some minutes on one core; writes results/images.json

A head of two convolutions (1-4-3 channels, 3 x 3) has the logits of three classes at every pixel, ``[B, C, H, W]``; Laplace
keeps its last layer, dense. Each size runs in a process of its own; memory is the peak of its resident set over that before.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

import bayesopt_chain as bc
from benchmarks.measure import keep

SIZES = (32, 64, 128, 256)
RESULTS = Path(__file__).parent / "results" / "images.json"


def peak() -> float:
    """Of the resident set, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measured(size: int) -> dict[str, float]:
    """Seconds and MiB of the covariances of one image's pixels."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 3, padding=1)).eval()
    x, y = torch.randn(4, 1, 16, 16), torch.randint(3, (4, 16, 16))
    fitted = bc.fit_laplace(module, bc.likelihoods.categorical(axis=-3), [(x, y)], structure="dense", tune=None)
    bc.posterior.outputs_by_target(fitted, x[:1])
    image, before, began = torch.randn(1, 1, size, size), peak(), time.perf_counter()
    _, covariance = bc.posterior.outputs_by_target(fitted, image)
    seconds = time.perf_counter() - began
    whole = (3 * size * size) ** 2 * 4 / 2**20
    result = covariance.numel() * 4 / 2**20
    return {"MiB": peak() - before, "MiB of the result": result, "MiB of all covariances": whole, "seconds": seconds}


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(measured(int(sys.argv[1]))))
        return
    rows = {}
    for size in SIZES:
        run = [sys.executable, "-m", "benchmarks.images", str(size)]
        rows[str(size)] = json.loads(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
        print(size, rows[str(size)], flush=True)
        keep(RESULTS, {"pixels a side": rows})


if __name__ == "__main__":
    main()
