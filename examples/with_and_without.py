"""The picture of the README: one loop, with torch's optimizer and with a temperature.

    python examples/with_and_without.py            # writes docs/with_and_without.png

A hundred points of two moons and a network of one hidden layer. All data are in every
step, so that nothing but the chain's own noise moves it. SGD ends at one network, which
is certain of a class nearly everywhere, also far from all data. With a temperature of
1 / 100 the same loop draws networks from the posterior; their mean is certain near the
data, and undecided where the networks disagree.
"""

import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure

import bayesopt_chain as bc

STEPS, BURN_IN, EVERY = 20_000, 4_000, 100


def data():
    angle = torch.rand(100) * torch.pi
    label = torch.arange(100) % 2
    moons = [angle.cos() + label, (1 - 2 * label) * angle.sin() + 0.5 * label]
    return torch.stack(moons, 1) + 0.15 * torch.randn(100, 2), label


def probabilities(x, label, new, temperature, steps=STEPS):
    """The probability of each class at ``new``, after one training loop."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2)
    )
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1 / len(x)}
    keep = None
    if temperature:
        optimizer = bc.optim.SGHMC(
            model.parameters(), temperature=temperature, **settings
        )
        after = BURN_IN * steps // STEPS
        keep = bc.collect(model, optimizer, every=EVERY, after=after)
    else:
        optimizer = torch.optim.SGD(model.parameters(), **settings)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), label).backward()
        optimizer.step()
    if keep is None:
        return model(new).detach().softmax(-1)
    return keep.predict([new], transform=lambda logits: logits.softmax(-1))


def grid(size=120):
    """The places of the picture, ``[size^2, 2]``."""
    axes = torch.linspace(-4, 5, size), torch.linspace(-4, 4, size)
    return torch.stack(torch.meshgrid(*axes, indexing="xy"), -1).reshape(-1, 2)


def picture(x, label, new, panels):
    """One panel for each title: the probability of the second class, and the data."""
    figure = Figure(figsize=(10, 4), layout="constrained", dpi=150)
    size = round(len(new) ** 0.5)
    first, second, shape = new[:, 0], new[:, 1], (size, size)
    shown = None
    for (title, p), ax in zip(panels.items(), figure.subplots(1, 2, sharey=True)):
        shown = ax.contourf(
            first.reshape(shape),
            second.reshape(shape),
            p[:, 1].reshape(shape),
            levels=[k / 10 for k in range(11)],
            cmap="coolwarm",
        )
        for k, colour in enumerate(("tab:blue", "tab:red")):
            mine = x[label == k]
            ax.scatter(mine[:, 0], mine[:, 1], s=14, c=colour, edgecolors="black")
        ax.set_title(title)
    figure.colorbar(shown, ax=figure.axes, label="probability of the red class")
    return figure


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x, label = data()
    new = grid()
    panels = {
        "torch.optim.SGD: one network": probabilities(x, label, new, 0),
        "bc.optim.SGHMC, temperature=1 / 100: the posterior": probabilities(
            x, label, new, 1 / 100
        ),
    }
    where = (
        Path(sys.argv[1])
        if sys.argv[1:]
        else Path(__file__).parents[1] / "docs" / "with_and_without.png"
    )
    picture(x, label, new, panels).savefig(where)
