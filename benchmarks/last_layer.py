"""How far Laplace's Gaussian of a last layer is from the exact posterior, on scikit-learn's digits.

    python -m benchmarks.last_layer > benchmarks/results/last_layer.md        # a minute or two on one core

A convolutional network (that of `examples/digits.py`) is trained on 1,000 digits; given its features the last layer is a
logistic regression of 650 parameters, whose posterior under the prior N(0, 1) can be sampled exactly: Hamiltonian Monte Carlo
with full gradients, in the coordinates in which Laplace's Gaussian at the mode is white, with accept or reject. Beside it
stand Laplace's Gaussian at the mode (dense), in two predictions, and a mean-field Gaussian that minimises the
Kullback-Leibler divergence. "Training NLL" is the mean over draws of the loss on the data that the posterior has seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bayesopt_chain as bc
from bayesopt_chain.posterior import cache_features

N, PRIOR = 1000, 1.0
Head = dict[str, Tensor]


def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test data."""
    images, labels = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
    images, order = images.double().reshape(-1, 1, 8, 8) / 16, torch.randperm(len(labels))
    train, test = ((images[rows], labels[rows]) for rows in (order[:N], order[N:]))
    return train, test


def trained(train: tuple[Tensor, Tensor], epochs: int = 20) -> nn.Sequential:
    """The network after training with dropout, in eval mode."""
    first = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    net = nn.Sequential(*first, *second, nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 10)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1 / N)
    for _ in range(epochs):
        for rows in torch.randperm(N).split(100):
            x, y = (a[rows] for a in train)
            optimizer.zero_grad()
            cross_entropy(net(x), y).backward()
            optimizer.step()
    return net.eval()


def hmc(
    energy: Callable[[Tensor], Tensor], size: int, draws: int = 600, leaps: int = 10, step: float = 0.25
) -> tuple[Tensor, float]:
    """Draws ``[draws, size]`` of ``exp(-energy(z))`` from a start at 0, and the share that was accepted.

    The step is adapted towards an acceptance of 0.8 over a quarter of the draws, which are thrown away.
    """

    def slope(z: Tensor) -> tuple[float, Tensor]:
        z = z.detach().requires_grad_()
        value = energy(z)
        return float(value.detach()), torch.autograd.grad(value, z)[0]

    z, kept, accepted = torch.zeros(size, dtype=torch.float64), [], 0.0
    value, force = slope(z)
    for i in range(draws + draws // 4):
        p = torch.randn_like(z)
        start, q, v, g = value + 0.5 * float(p @ p), z, value, force
        for _ in range(leaps):
            p = p - 0.5 * step * g
            q = q + step * p
            v, g = slope(q)
            p = p - 0.5 * step * g
        chance = math.exp(min(0.0, start - v - 0.5 * float(p @ p)))
        if float(torch.rand(())) < chance:
            z, value, force = q, v, g
        if i < draws // 4:
            step *= 1.05 if chance > 0.8 else 0.95
        else:
            kept.append(z)
            accepted += chance / draws
    return torch.stack(kept), accepted


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train, test = digits()
    net, classes = trained(train), bc.likelihoods.categorical()
    rows = [("one network", net(test[0]).softmax(-1).detach(), cross_entropy(net(train[0]), train[1]).item())]

    fitted = bc.fit_laplace(net, classes, cache_features(net, [train]), structure="dense", tune=None)
    forward, head = fitted.model.forward, fitted.model.params
    seen, new = (fitted.model.seen_by_head(batch) for batch in (train, test))

    def nll(params: Head) -> Tensor:
        return cross_entropy(forward(params, seen), seen[1])

    mode = {name: p.detach().clone().requires_grad_() for name, p in head.items()}
    optimizer = torch.optim.LBFGS(list(mode.values()), max_iter=500, line_search_fn="strong_wolfe", tolerance_grad=1e-9)

    def joint() -> Tensor:
        optimizer.zero_grad()
        loss = N * nll(mode) + 0.5 * PRIOR * sum(p.square().sum() for p in mode.values())
        loss.backward()
        return loss

    optimizer.step(joint)
    bc.write_back(net, mode)
    rows.append(("mode of the last layer", forward(mode, new).softmax(-1).detach(), nll(mode).item()))

    laplace = bc.fit_laplace(net, classes, cache_features(net, [train]), structure="dense", tune=None)
    lower = torch.linalg.cholesky(laplace.posterior.precision.to_dense())
    names, sizes = sorted(head), [head[name].numel() for name in sorted(head)]
    centre = torch.cat([mode[name].detach().reshape(-1) for name in names])

    def at(z: Tensor) -> Head:
        flat = centre + torch.linalg.solve_triangular(lower.mT, z[:, None], upper=True)[:, 0]
        return {name: x.reshape(head[name].shape) for name, x in zip(names, flat.split(sizes))}

    def energy(z: Tensor) -> Tensor:
        params = at(z)
        return N * nll(params) + 0.5 * PRIOR * torch.stack([p.square().sum() for p in params.values()]).sum()

    def row(name: str, draws: list[Head], probabilities: Tensor | None = None) -> None:
        with torch.no_grad():
            mean = torch.stack([forward(draw, new).softmax(-1) for draw in draws]).mean(0)
            believed = torch.stack([nll(draw) for draw in draws]).mean().item()
        rows.append((name, mean if probabilities is None else probabilities, believed))

    draws, accepted = hmc(energy, len(centre))
    row("exact posterior (HMC)", [at(z) for z in draws[::4]])
    gaussian = bc.unstack(laplace.posterior.sample((150,)))
    row("Laplace, draws", gaussian)
    probit = laplace.predict([test])
    assert isinstance(probit, Tensor)
    row("Laplace, probit", gaussian, probit)

    tx = bc.vi.mean_field(bc.adam(1e-2), temperature=1 / N, weight_decay=PRIOR / N, init_scale=0.1, n_samples=2)
    step = bc.make_step(lambda params, batch: cross_entropy(forward(params, batch), batch[1]), tx)
    params, state = head, step.init(head)
    for _ in range(1500):
        params, state, _ = step(params, state, seen)
    row("VI, mean field", bc.unstack(tx.posterior(state, params).sample((150,))))

    print(f"prior precision {PRIOR}, {len(centre)} parameters, HMC accepted {accepted:.2f}\n")
    print("| | accuracy | NLL | calibration error | training NLL |\n| --- | --- | --- | --- | --- |")
    for name, p, believed in rows:
        m = bc.posterior.classification_metrics(p.log(), test[1])
        print(f"| {name} | {m['accuracy']:.3f} | {m['nll']:.3f} | {m['ece']:.3f} | {believed:.3f} |")


if __name__ == "__main__":
    main()
