"""What learning task after task with a Laplace prior loses against all data at once, where the model is not linear.

    python -m benchmarks.continual > benchmarks/results/continual.md

A network reads digits; a LoRA adapter of rank 2 then learns two further tasks, the same digits negated and upside down, of 200
images each. Printed is the mean negative log-likelihood of 500 test images of each task: all data at once, task after task
with the posterior of the first (dense and Kronecker) as the prior of the second, and with the first prior again.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import bayesopt_chain as bc


def trained(loss, tx, params, batch, steps):
    """Parameters after so many full-batch steps."""
    step, state = bc.make_step(loss, tx), tx.init(params)
    for _ in range(steps):
        params, state, _ = step(params, state, batch)
    return params


def main(steps: int = 300) -> list[str]:
    """The rows of the table."""
    import peft

    torch.manual_seed(0)
    images, labels = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
    images, order = images.double() / 16, torch.randperm(len(labels))
    images, labels = images[order], labels[order]
    base = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()
    forward, params, _ = bc.make_functional(base)
    tx = bc.sgd(0.5, 0.9, weight_decay=1e-3)
    params = trained(lambda p, b: cross_entropy(forward(p, b), b[1]), tx, params, (images[:400], labels[:400]), steps)
    bc.write_back(base, params)

    changes = (lambda x: 1 - x, lambda x: x.flip(-1))
    rows = (slice(400, 600), slice(600, 800))
    tasks = [(change(images[r]), labels[r]) for change, r in zip(changes, rows)]
    tests = [(change(images[1297:]), labels[1297:]) for change in changes]
    config = peft.LoraConfig(target_modules=["0", "2"], r=2, lora_alpha=2)
    forward, start, _ = bc.make_functional(peft.get_peft_model(base, config).eval())
    laplace, likelihood = bc.laplace(), bc.likelihoods.categorical()

    def learned(batch, prior, structure="dense"):
        n = len(batch[0])
        tx = bc.chain(bc.links.add_gaussian_prior(prior, n=n), bc.sgd(0.05, 0.9))
        params = trained(lambda p, b: cross_entropy(forward(p, b), b[1]), tx, start, batch, 2 * steps)
        increment = bc.curvature.ggn(forward, likelihood, structure)(params, batch)
        _, state = laplace.update(params, laplace.init(params), curvature=increment)
        given = {"prior": prior} if isinstance(prior, bc.Gaussian) else {"prior_precision": prior}
        return laplace.posterior(state, params, **given)

    both = tuple(torch.cat(xs) for xs in zip(*tasks))
    found = {"all data at once": learned(both, 1.0)}
    for structure in ("dense", "kronecker"):
        found[f"task after task, {structure}"] = learned(tasks[1], learned(tasks[0], 1.0, structure), structure)
    found["the second task alone"] = learned(tasks[1], 1.0)
    lines = ["| LoRA adapter | NLL, first task | NLL, second task |", "| --- | --- | --- |"]
    for name, posterior in found.items():
        nll = [float(cross_entropy(forward(posterior.mean, test), test[1])) for test in tests]
        lines.append(f"| {name} | {nll[0]:.3f} | {nll[1]:.3f} |")
    return lines


if __name__ == "__main__":
    print("\n".join(main()))
