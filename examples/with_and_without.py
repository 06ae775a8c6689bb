"""The picture of the README: one loop, with torch's optimizer and with a temperature.

    python examples/with_and_without.py            # writes docs/with_and_without.png

Sixty points of a sine with noise of standard deviation 0.1 and a gap in the middle, and
a network of one hidden layer. All data are in every step, so that nothing but the
chain's own noise moves it. SGD ends at one network, whose interval is that of the noise
alone, in the gap and beyond the data as well. With a temperature of 1 / 60 the same loop
draws networks from the posterior, and the interval is as wide as they disagree.
"""

import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure

import bayesopt_chain as bc

STEPS, BURN_IN, EVERY = 20_000, 5_000, 75


def data():
    x = torch.cat([torch.linspace(-1.0, -0.35, 30), torch.linspace(0.45, 1.0, 30)])[
        :, None
    ]
    return x, torch.sin(4 * x) + 0.1 * torch.randn(60, 1)


def predictions(x, y, new, temperature, steps=STEPS):
    """The predictive distribution at ``new``, after one training loop."""
    likelihood = bc.likelihoods.gaussian(0.1**2)
    model = torch.nn.Sequential(
        torch.nn.Linear(1, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1)
    )
    settings = {"lr": 0.001, "momentum": 0.9, "weight_decay": 0.3 / len(x)}
    if temperature:
        optimizer = bc.optim.SGHMC(
            model.parameters(), temperature=temperature, **settings
        )
    else:
        optimizer = torch.optim.SGD(model.parameters(), **settings)
    keep = bc.collect(
        model,
        optimizer,
        every=EVERY,
        after=BURN_IN * steps // STEPS if temperature else steps - EVERY,
    )
    for _ in range(steps):
        optimizer.zero_grad()
        loss = -likelihood.log_prob(model(x), y).mean()
        loss.backward()
        optimizer.step()
    return likelihood.mixture(keep.predict([new], reduce="stack"))


def picture(x, y, new, panels):
    figure = Figure(figsize=(10, 3.6), layout="constrained", dpi=150)
    for (title, prediction), ax in zip(
        panels.items(), figure.subplots(1, 2, sharey=True)
    ):
        bc.plot.bands(new, prediction, data=(x, y), ax=ax)
        ax.set(title=title, ylim=(-3.5, 3.5))
    return figure


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x, y = data()
    new = torch.linspace(-1.6, 1.6, 200)[:, None]
    panels = {
        "torch.optim.SGD": predictions(x, y, new, 0),
        "bc.optim.SGHMC, temperature=1 / 60": predictions(x, y, new, 1 / 60),
    }
    where = (
        Path(sys.argv[1])
        if sys.argv[1:]
        else Path(__file__).parents[1] / "docs" / "with_and_without.png"
    )
    picture(x, y, new, panels).savefig(where)
