"""What the uncertainty of an image's pixels costs: time and memory of ``bc.posterior.outputs_by_target`` against the image.

    python -m benchmarks.images        # some minutes on one core; writes results/images.json and docs/images.png

A head of two convolutions (1-4-3 channels, 3 x 3) has the logits of three classes at every pixel, ``[B, C, H, W]``; Laplace
keeps its last layer, dense. Each size runs in a process of its own; memory is the peak of its resident set over that before.
The picture (``python -m benchmarks.images picture``) is of a network of four convolutions, trained to tell discs and squares
from the background on images of 32 x 32 whose borders have no labels, with Laplace over its last layer.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import bayesopt_chain as bc
from benchmarks.measure import keep

SIZES = (32, 64, 128, 256)
RESULTS = Path(__file__).parent / "results" / "images.json"
PICTURE = Path(__file__).parents[1] / "docs" / "images.png"


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


def drawn(shapes: list[str], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy images ``[B, 1, 32, 32]`` with one of the shapes each, and their labels: 1 a disc, 2 a square, 0 neither."""
    at = torch.arange(32.0)
    images, labels = [], []
    for shape in shapes:
        middle, size = 10 + 12 * torch.rand(2, generator=generator), 5 + 3 * torch.rand((), generator=generator)
        down, right = at[:, None] - middle[0], at - middle[1]
        inside = {
            "disc": (down.square() + right.square()).sqrt() < size,
            "square": down.abs().maximum(right.abs()) < 0.85 * size,
            "ring": ((down.square() + right.square()).sqrt() - size).abs() < 1.5,
        }[shape]
        images.append(inside + 0.3 * torch.randn(32, 32, generator=generator))
        labels.append(inside * {"disc": 1, "square": 2, "ring": -100}[shape])
    return torch.stack(images)[:, None], torch.stack(labels)


def picture() -> None:
    """A disc, a square and a ring, of which none was trained on: image, likeliest class, entropy and mutual information."""
    from matplotlib.figure import Figure

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    x, y = drawn(["disc", "square"] * 40, generator)
    y[:, :2], y[:, -2:], y[..., :2], y[..., -2:] = -100, -100, -100, -100
    layers = [nn.Conv2d(1, 8, 5, padding=2), nn.Tanh(), nn.Conv2d(8, 16, 5, padding=6, dilation=3), nn.Tanh()]
    layers += [nn.Conv2d(16, 16, 3, padding=4, dilation=4), nn.Tanh()]
    module = nn.Sequential(*layers, nn.Conv2d(16, 3, 1))
    optimizer = torch.optim.Adam(module.parameters(), 1e-2)
    for _ in range(300):
        rows = torch.randint(len(x), (16,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x[rows]), y[rows]).backward()
        optimizer.step()
    likelihood = bc.likelihoods.categorical(axis=-3)
    fitted = bc.fit_laplace(
        module.eval(), likelihood, list(zip(x.split(8), y.split(8))), structure="kronecker", tune=None
    )
    new, _ = drawn(["disc", "square", "ring"], generator)
    mean, covariance = bc.posterior.outputs_by_target(fitted, new)
    predictive = bc.likelihoods.categorical().predictive(mean.flatten(0, 2), covariance.flatten(0, 2))
    maps = {
        "image": new[:, 0],
        "likeliest class": mean.argmax(-1),
        "entropy, nats": predictive.entropy.reshape(3, 32, 32),
        "mutual information, nats": predictive.epistemic.reshape(3, 32, 32),
    }
    figure = Figure(figsize=(8, 5.6), layout="constrained", dpi=130)
    axes = figure.subplots(3, 4)
    for column, (name, values) in enumerate(maps.items()):
        for row in range(3):
            drawing = axes[row, column].imshow(
                values[row], cmap="gray" if not column else "viridis", vmax=float(values.max())
            )
            axes[row, column].set_axis_off()
        axes[0, column].set_title(name, fontsize=9)
        if column > 1:
            figure.colorbar(drawing, ax=axes[:, column], shrink=0.5)
    figure.savefig(PICTURE)


def main() -> None:
    if sys.argv[1:] == ["picture"]:
        picture()
        return
    if len(sys.argv) > 1:
        print(json.dumps(measured(int(sys.argv[1]))))
        return
    rows = {}
    for size in SIZES:
        run = [sys.executable, "-m", "benchmarks.images", str(size)]
        rows[str(size)] = json.loads(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
        print(size, rows[str(size)], flush=True)
        keep(RESULTS, {"pixels a side": rows})
    picture()


if __name__ == "__main__":
    main()
