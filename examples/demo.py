"""What this library is for, in two minutes: exact noise, and what a posterior is worth.

    python examples/demo.py                    # prints two tables, writes demo.png
    python examples/demo.py --json found.json  # and every number

Exactness: one chain at eight learning rates on a quadratic loss, whose posterior is known.
Beside it runs the same chain with white noise of the same level, as is usual.

Worth: a network, an ensemble of ten and the draws of ten chains, the ensemble and the
chains with as many gradients. They differ in one number, the temperature: at 0 the chain
is SGD and its ends are the ensemble, at 1 / N its draws are the posterior. The network is
the first of the ensemble, at a tenth of the cost. Data: a regression with a gap, and
scikit-learn's digits, of which 8 and 9 are kept from training.
"""

import argparse
import json
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
import torchopt
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch.nn import functional as F

import bayesopt_chain as bc

NETWORK, ENSEMBLE, POSTERIOR = "one network", "ensemble", "posterior"
COLORS = dict(zip((NETWORK, ENSEMBLE, POSTERIOR), ("#6B6B6B", "#D55E00", "#0072B2")))
LIMIT = 3.8  # of lr * curvature for momentum 0.9: 2 (1 + momentum)
SHARES = (0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)  # of that limit
NOISE, PRECISION = 0.1, 1.0  # of the regression's targets; of every weight's prior
RANDOM, ROUNDS, LABELS = (
    "at random",
    8,
    10,
)  # of active learning; labels asked for in each
ASKED = [20 + LABELS * k for k in range(ROUNDS)]


def excess(lr, matched, chains=20_000, steps=300, looks=20):
    """How much too large the variance is, for T = 1 and curvature 1."""
    theta = torch.randn(chains, dtype=torch.float64)  # one coordinate is one chain
    tx, velocity = bc.sghmc(lr, 0.9, temperature=1.0), torch.zeros_like(theta)
    state, found = tx.init(theta), []
    for step in range(steps + 20 * looks):
        if matched:
            update, state = tx.update(theta.clone(), state, params=theta)
        else:
            white = (2 * (1 - 0.9) / lr) ** 0.5 * torch.randn_like(theta)
            velocity = 0.9 * velocity + theta + white
            update = -lr * velocity
        theta = theta + update
        if step >= steps and step % 20 == 0:
            found.append(theta.square().mean().item())
    return sum(found) / len(found) - 1


def differing(steps=100):
    """In how many numbers the chain at temperature 0 differs from torchopt's SGD."""
    start = {"w": torch.randn(64, 32), "b": torch.randn(32)}
    ends = []
    for tx in (bc.sghmc(0.1, 0.9, temperature=0.0), torchopt.sgd(0.1, momentum=0.9)):
        params, state = {k: v.clone() for k, v in start.items()}, tx.init(start)
        for _ in range(steps):
            gradients = {k: v.sin() for k, v in params.items()}
            updates, state = tx.update(gradients, state, inplace=False)
            params = torchopt.apply_updates(params, updates, inplace=False)
        ends.append(params)
    return sum(int((ends[0][k] != ends[1][k]).sum()) for k in start)


class Task(NamedTuple):
    """A network's shape, how its outputs are read, and the rate at which it learns."""

    widths: tuple
    log_prob: object  # of outputs [n, k] and targets [n], [n]
    lr: float

    def network(self):
        inner = torch.nn.Linear(self.widths[0], self.widths[1])
        outer = torch.nn.Linear(self.widths[1], self.widths[2])
        return torch.nn.Sequential(inner, torch.nn.Tanh(), outer)

    def draws(self, x, y, temperature, steps, new, chains=10):
        """Outputs at ``new`` of the ends of SGD, or of draws: ``[draws, n, k]``."""
        forward = bc.make_functional(self.network()).forward

        def loss(params, batch):
            return -self.log_prob(forward(params, batch[0]), batch[1]).mean()

        starts = [bc.make_functional(self.network()).params for _ in range(chains)]
        settings = {"weight_decay": PRECISION / len(x), "temperature": temperature}
        tx = bc.sgd(self.lr, 0.9, **settings)
        step, params = bc.parallel(bc.make_step(loss, tx), chains), bc.stack(starts)
        kept = {"burn_in": steps - 1} if temperature == 0 else {"burn_in": steps // 2}
        thinning = 1 if temperature == 0 else max(1, steps // 40)
        state = step.init(tx, params)
        run = bc.sample(
            step, params, state, (x, y), steps=steps, thinning=thinning, **kept
        )
        flat = {name: p.flatten(0, 1) for name, p in run.params.items()}
        return torch.func.vmap(forward, in_dims=(0, None))(flat, new).detach()

    def methods(self, x, y, steps, new):
        """Of every method the outputs at ``new``."""
        torch.manual_seed(0)
        ensemble = self.draws(x, y, 0.0, steps, new)
        torch.manual_seed(0)
        posterior = self.draws(x, y, 1 / len(x), steps, new)
        return {NETWORK: ensemble[:1], ENSEMBLE: ensemble, POSTERIOR: posterior}


def gaussian(outputs, y):
    return -(outputs[:, 0] - y).square() / (2 * NOISE**2)


def categorical(outputs, y):
    return -F.cross_entropy(outputs, y, reduction="none")


REGRESSION = Task((1, 50, 1), gaussian, 1e-3)
DIGITS = Task((64, 32, 10), categorical, 0.1)


def curve(x):
    return (4 * x).sin() + x


def gap(steps):
    """The bands of every method over a gap of the data, and its scores in and outside."""
    g = torch.Generator().manual_seed(0)
    x = torch.cat(
        [torch.rand(30, generator=g) - 1.5, torch.rand(30, generator=g) + 0.5]
    )
    y = curve(x) + NOISE * torch.randn(60, generator=g)
    grid = torch.linspace(-2, 2, 201)
    bands, scores = {}, {}
    for name, f in REGRESSION.methods(x[:, None], y, steps, grid[:, None]).items():
        f = f[..., 0]
        mean, variance = f.mean(0), f.var(0, correction=0) + NOISE**2
        bands[name] = mean, variance.sqrt()
        z = (curve(grid) - mean).square() + NOISE**2  # mean over new targets
        nll = 0.5 * (
            z / variance + variance.log() + torch.log(torch.tensor(2 * torch.pi))
        )
        within, data = grid.abs() < 0.5, (grid.abs() >= 0.5) & (grid.abs() <= 1.5)
        at = {"where data are": data, "in the gap": within}
        scores[name] = {where: nll[rows].mean().item() for where, rows in at.items()}
    return (x, y, grid, bands), scores


def images(seed):
    """All digits in random order: pixels between 0 and 1, and classes."""
    x, y = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    return x[order].float() / 16, y[order]


def probabilities(outputs):
    return outputs.softmax(-1).mean(0)


def entropy(p):
    return -(p * p.clamp_min(1e-12).log()).sum(-1)


def auroc(low, high):
    """How often an unseen digit is less sure than a seen one."""
    pairs = high[:, None] - low
    return ((pairs > 0).double().mean() + 0.5 * (pairs == 0).double().mean()).item()


def unseen(steps, seed):
    """Of every method scores on seen digits, and whether unseen ones are noticed."""
    x, y = images(seed)
    known, found = y < 8, {}
    train, test = (x[known][:400], y[known][:400]), (x[known][400:], y[known][400:])
    new, n = torch.cat([test[0], x[~known]]), len(test[1])
    for name, outputs in DIGITS.methods(*train, steps, new).items():
        p = probabilities(outputs)
        row = {"accuracy": (p[:n].argmax(-1) == test[1]).double().mean().item()}
        row["nll"] = F.nll_loss(p[:n].log(), test[1]).item()
        row["noticed"] = auroc(entropy(p[:n]), entropy(p[n:]))
        found[name] = row
    return found


def learned(steps, rule, seed):
    """Accuracies as labels are asked for: at random, or where a method is least sure."""
    x, y = images(seed)
    pool, test, have, found = slice(0, 1000), slice(1000, None), list(range(20)), []
    for _ in range(ROUNDS):
        temperature = 1 / len(have) if rule == POSTERIOR else 0.0
        chains = 1 if rule == NETWORK else 10
        torch.manual_seed(seed)
        f = DIGITS.draws(x[have], y[have], temperature, steps, x, chains)
        p = probabilities(f)
        found.append((p[test].argmax(-1) == y[test]).double().mean().item())
        unsure = entropy(p) - entropy(f.softmax(-1)).mean(0)  # between the draws
        unsure = entropy(p) if rule == NETWORK else unsure
        unsure = torch.rand(len(x)) if rule == RANDOM else unsure
        unsure[have] = -1
        have += unsure[pool].topk(LABELS).indices.tolist()
    return found


def averaged(rows):
    """Means of dictionaries with the same keys, or of lists of the same length."""
    if isinstance(rows[0], dict):
        return {key: sum(row[key] for row in rows) / len(rows) for key in rows[0]}
    return [sum(column) / len(rows) for column in zip(*rows)]


def draw(exact, bands, digits, curves):
    """Four panels: exact noise, a gap, unseen digits, labels asked for."""
    figure = Figure(figsize=(15, 3.9), layout="constrained", dpi=130)
    a, b, c, d = figure.subplots(1, 4, width_ratios=[1, 1.3, 0.9, 1])
    for name, color in (("white noise", "#D55E00"), ("matched noise", "#0072B2")):
        a.plot(SHARES, [100 * e for e in exact[name]], "o", color=color, label=name)
    share = torch.linspace(SHARES[0], SHARES[-1], 200)
    a.plot(share, 100 * share / (1 - share), ":", color="black", label="theory, white")
    a.set_yscale("symlog", linthresh=10)
    a.set(xscale="log", ylim=(-10, 2000), xlabel="learning rate / its stability limit")
    a.set(ylabel="excess variance, %", title="The noise is exact at every rate")
    x, y, grid, found = bands
    for name, (centre, deviation) in found.items():
        low, high = centre - 2 * deviation, centre + 2 * deviation
        if name == POSTERIOR:
            b.fill_between(grid, low, high, color=COLORS[name], alpha=0.3, label=name)
        else:
            b.plot(grid, low, color=COLORS[name], lw=1, label=name)
            b.plot(grid, high, color=COLORS[name], lw=1)
    b.plot(grid, curve(grid), ":", color="black", label="truth")
    b.scatter(x, y, s=8, color="black", zorder=3)
    b.set(ylim=(-4, 4), xlabel="x", title="It widens where there are no data")
    for k, (name, rows) in enumerate(digits.items()):
        c.scatter([k] * len(rows), [100 * r["noticed"] for r in rows], c=COLORS[name])
        c.text(k, 100, f"NLL\n{averaged(rows)['nll']:.3f}", ha="center", va="top")
    c.set_xticks(range(3), list(digits), fontsize=9)
    c.set(xlim=(-0.5, 2.5), ylim=(93, 100.3))
    c.set(ylabel="unseen digit is less sure, % of pairs", title="Digits it never saw")
    for rule, right in curves.items():
        color = COLORS.get(rule, "#009E73")
        d.plot(ASKED, [100 * r for r in right], label=rule, color=color)
    d.set(xlabel="labels", ylabel="accuracy on new digits, %")
    d.set_title("It asks for the labels it lacks")
    for axes in (a, b, d):
        axes.legend(frameon=False, fontsize=8)
    for axes in (a, b, c, d):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--figure", type=Path, default=Path("demo.png"))
    parser.add_argument("--json", type=Path, help="a file for every number")
    parser.add_argument("--steps", type=int, default=2000, help="of every chain")
    parser.add_argument("--seeds", type=int, default=3, help="of the digits")
    chosen = parser.parse_args(arguments)
    if chosen.steps < 40:
        parser.error(f"--steps must be at least 40, got {chosen.steps}")
    torch.manual_seed(0)
    began, steps = time.perf_counter(), chosen.steps
    seeds = range(chosen.seeds)

    print("Excess variance on a quadratic loss, eight learning rates (solved: 0 %)")
    exact = {"white noise": [], "matched noise": []}
    for share in SHARES:
        for name, rows in exact.items():
            matched, chains = name == "matched noise", 10 * steps
            rows.append(excess(share * LIMIT, matched, chains))
        line = "  ".join(
            f"{name} {100 * rows[-1]:+8.1f} %" for name, rows in exact.items()
        )
        print(f"  {share:4.2f} of the stability limit   {line}", flush=True)
    bits = differing()
    print(f"At temperature 0: {bits} of 2,080 numbers differ from torchopt.sgd's\n")

    with ProcessPoolExecutor(
        2, get_context("spawn"), torch.set_num_threads, (1,)
    ) as pool:
        asked = {
            rule: [(steps // 4, rule, s) for s in seeds] for rule in (RANDOM, *COLORS)
        }
        jobs = {
            rule: [pool.submit(learned, *job) for job in of]
            for rule, of in asked.items()
        }
        runs = [pool.submit(unseen, steps, seed) for seed in seeds]
        bands, regression = pool.submit(gap, 2 * steps).result()
        found = [run.result() for run in runs]
        digits = {name: [run[name] for run in found] for name in COLORS}
        curves = {
            rule: averaged([job.result() for job in of]) for rule, of in jobs.items()
        }
    head = (
        "gap NLL",
        "data NLL",
        "digits NLL",
        "accuracy",
        "8, 9 noticed",
        "last labels",
    )
    print(" " * 14 + "".join(f"{name:>14}" for name in head) + "    cost")
    for name in COLORS:
        row = [regression[name]["in the gap"], regression[name]["where data are"]]
        scores = averaged(digits[name])
        row += [scores[key] for key in ("nll", "accuracy", "noticed")]
        cost = "   1/10" if name == NETWORK else "      1"
        print(
            f"{name:14}"
            + "".join(f"{v:14.3f}" for v in [*row, curves[name][-1]])
            + cost
        )
    print(f"{'random labels':14}{'':70}{curves[RANDOM][-1]:14.3f}")
    draw(exact, bands, digits, curves).savefig(chosen.figure)
    seconds = time.perf_counter() - began
    print(f"\n{seconds:.0f} seconds; the picture is {chosen.figure}")
    if chosen.json:
        found = {"exact": exact, "differing": bits, "gap": regression, "digits": digits}
        found |= {"labels": curves, "seconds": seconds}
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
