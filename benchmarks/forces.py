"""Whether predicted uncertainties of forces tell where the forces are wrong: a potential fitted to a made one.

    python -m benchmarks.forces        # two minutes on one core; writes results/forces.json and docs/forces.png

Clusters of five atoms have the energy of a Lennard-Jones potential with a three-body term. A small potential (radial features
of each atom, 24-24 hidden units, energies summed over atoms, forces by ``torch.autograd.grad``) is trained on energies and
forces of 200 clusters, of atoms 1.3 apart or so, and predicts 200 held-out ones, of which half are more compressed than any in
training. Laplace keeps its last layer, in one call; the noise of energies and of forces is what the training residuals are.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bayesopt_chain as bc
from benchmarks.measure import keep

ATOMS, TRAIN, TEST, STEPS = 5, 200, 200, 1500
RESULTS = Path(__file__).parent / "results" / "forces.json"
PICTURE = Path(__file__).parents[1] / "docs" / "forces.png"


def distances(x: Tensor) -> Tensor:
    """Of all pairs, ``[B, A, A]``, 1 on the diagonal."""
    eye = torch.eye(x.shape[1], dtype=x.dtype)
    return ((x[:, :, None] - x[:, None]).square().sum(-1) + eye).sqrt()


def with_forces(energy: Any, x: Tensor) -> Tensor:
    """Energies and forces, ``[B, 1 + 3 A]``."""
    x.requires_grad_()
    e = energy(x)
    (slope,) = torch.autograd.grad(e.sum(), x, create_graph=True)
    return torch.cat([e[:, None], -slope.flatten(1)], 1)


def truth(x: Tensor) -> Tensor:
    r = distances(x)
    off = 1 - torch.eye(x.shape[1], dtype=x.dtype)
    pairs = ((r**-12 - 2 * r**-6) * off).sum((1, 2)) / 2
    crowd = (torch.exp(-2 * (r - 1)) * off).sum(2)
    return pairs + 0.2 * crowd.square().sum(1)


class Potential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh())
        self.head = nn.Linear(24, 1)

    def energy(self, x: Tensor) -> Tensor:
        r = distances(x)[..., None]
        off = (1 - torch.eye(x.shape[1], dtype=x.dtype))[..., None]
        centres = torch.linspace(0.8, 2.6, 8, dtype=x.dtype)
        radial = (torch.exp(-6 * (r - centres).square()) * off).sum(2)
        return self.head(self.body(radial)).sum((1, 2))

    def forward(self, x: Tensor) -> Tensor:
        return with_forces(self.energy, x)


def clusters(count: int, spacing: Tensor, generator: torch.Generator) -> Tensor:
    """Atoms of a bipyramid whose edges are about ``spacing`` long, moved by a twentieth of it."""
    ring = [[0.577, 0.0, 0.0], [-0.289, 0.5, 0.0], [-0.289, -0.5, 0.0], [0.0, 0.0, 0.816], [0.0, 0.0, -0.816]]
    moved = torch.tensor(ring).double() + 0.05 * torch.randn(count, ATOMS, 3, generator=generator).double()
    return moved * spacing.double()[:, None, None]


def ranks(x: Tensor) -> Tensor:
    return x.argsort().argsort().double()


def correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's."""
    return float(torch.corrcoef(torch.stack([ranks(a.flatten()), ranks(b.flatten())]))[0, 1])


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    spacing = 1.15 + 0.3 * torch.rand(TRAIN + TEST, generator=generator)
    spacing[-TEST // 2 :] = 1.0 + 0.15 * torch.rand(TEST // 2, generator=generator)
    x = clusters(TRAIN + TEST, spacing, generator)
    y = with_forces(truth, x.clone()).detach()
    train, test = (x[:TRAIN], y[:TRAIN]), (x[TRAIN:], y[TRAIN:])
    scale = train[1][:, 1:].std()
    module = Potential().double()
    optimizer = torch.optim.Adam(module.parameters(), 5e-3)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        rows = torch.randperm(TRAIN)[:50]
        optimizer.zero_grad()
        ((module(train[0][rows].clone()) - train[1][rows]) / scale).square().mean().backward()
        optimizer.step()
        decay.step()
    module.eval()
    residuals = (module(train[0].clone()) - train[1]).detach().square().mean(0)
    variance = torch.cat([residuals[:1], residuals[1:].mean().expand(3 * ATOMS)])
    fitted = bc.fit_laplace(module, bc.likelihoods.gaussian(variance), [train], tune_noise=False)
    outputs = fitted.outputs(test[0])
    deviation = outputs.covariance.diagonal(dim1=1, dim2=2).sqrt()
    error = (outputs.mean - test[1]).abs()
    of_cluster = [part[:, 1:].square().mean(1).sqrt() for part in (error, deviation)]
    record = {
        "clusters": {"train": TRAIN, "test": TEST},
        "force scale": float(scale),
        "root mean square error of forces": {
            "as in training": float(error[: TEST // 2, 1:].square().mean().sqrt()),
            "compressed": float(error[-TEST // 2 :, 1:].square().mean().sqrt()),
        },
        "rank correlation of error and deviation": {
            "forces, components": correlation(error[:, 1:], deviation[:, 1:]),
            "forces, clusters": correlation(*of_cluster),
            "forces, clusters as in training": correlation(*(part[: TEST // 2] for part in of_cluster)),
            "forces, compressed clusters": correlation(*(part[-TEST // 2 :] for part in of_cluster)),
            "energies": correlation(error[:, 0], deviation[:, 0]),
        },
    }
    print(json.dumps(record, indent=1))
    keep(RESULTS, record)
    picture(*of_cluster).savefig(PICTURE)


def picture(error: Tensor, deviation: Tensor) -> Any:
    """Errors against predicted deviations, of the forces of each held-out cluster."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 4), layout="constrained", dpi=130)
    ax = figure.subplots()
    for name, rows in {"as in training": slice(0, TEST // 2), "compressed": slice(TEST // 2, None)}.items():
        ax.loglog(deviation[rows], error[rows], ".", label=name)
    ax.set_xlabel("predicted deviation of the forces")
    ax.set_ylabel("error of the forces")
    ax.legend()
    return figure


if __name__ == "__main__":
    main()
