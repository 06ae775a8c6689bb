r"""A deep ensemble in plain torch, apart from the library: the reference that the one call is measured with.

M networks are batched by ``vmap`` and their step is traced once. With n data that a member sees it follows Adam on

    s (1/b sum_i -log p(y_i | f(theta, x_i), v) + 1/2n sum_p lambda_p theta_p^2),      s = v for numbers, 1 for classes,

first without a fold, then with all data for 0.3 of the steps. Of numbers the noise of a prediction is the one of 100 under
which the members of each fold, mixed, give it the largest likelihood.
"""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.fx.experimental.proxy_tensor import make_fx

MORE, RATE = 0.3, 0.3  # steps with all data, and their rate


class Plain(NamedTuple):
    """Networks, the variance of the noise (of numbers), and the processor time of building and of one step."""

    base: nn.Module
    params: dict[str, Tensor]
    variance: float
    build: float
    step: float

    @torch.no_grad()
    def outputs(self, x: Tensor, who: slice = slice(None)) -> Tensor:
        """Of some members, ``[m, n, *]``."""
        params = {k: p[who] for k, p in self.params.items()}
        return vmap(lambda p: functional_call(self.base, p, (x,)))(params)


def plain(
    networks: list[nn.Module],
    x: Tensor,
    y: Tensor,
    folds: list[Tensor],
    steps: int,
    size: int,
    lr: float,
    seed: int,
    precision: Any = 1.0,
    noise: Any = 0.02,
) -> Plain:
    """Train them.

    Args:
        networks: M of them, newly drawn.
        x, y: data; ``y`` class numbers ``[N]`` or numbers ``[N, 1]``.
        folds: of each member, the rows that it leaves out at first.
        steps: in all.
        size, lr, seed: of batches, of Adam at its start, of the orders.
        precision, noise: of the prior ``[M, P]``, and of training ``[M]``; or numbers.
    """
    began = time.process_time()
    count, n, classes = len(networks), len(x), not y.is_floating_point()
    params, _ = stack_module_state(networks)  # pyright: ignore[reportArgumentType]
    theta = {k: p.detach().clone() for k, p in params.items()}
    base = networks[0]
    flat = torch.as_tensor(precision, dtype=x.dtype).expand(count, sum(p[0].numel() for p in theta.values()))
    parts = flat.split([p[0].numel() for p in theta.values()], 1)
    decay = {k: d.reshape(p.shape).clone() for (k, p), d in zip(theta.items(), parts)}
    v = torch.as_tensor(noise, dtype=x.dtype).expand(count).clone()

    def energy(p: Any, xb: Tensor, yb: Tensor, d: Any, v: Tensor, seen: Tensor) -> Tensor:
        f = functional_call(base, p, (xb,))
        prior = sum((d[k] * p[k].square()).sum() for k in p) / (2 * seen)
        return nn.functional.cross_entropy(f, yb) + prior if classes else (f - yb).square().mean() / 2 + v * prior

    def step(p: Any, m1: Any, m2: Any, t: Tensor, rate: Tensor, xb: Tensor, yb: Tensor, seen: Tensor) -> Any:
        g = vmap(grad(energy), in_dims=(0, 0, 0, 0, 0, None))(p, xb, yb, decay, v, seen)
        m1 = {k: 0.9 * m1[k] + 0.1 * g[k] for k in p}
        m2 = {k: 0.999 * m2[k] + 0.001 * g[k].square() for k in p}
        one, two = 1 - 0.9**t, 1 - 0.999**t
        return {k: p[k] - rate * (m1[k] / one) / ((m2[k] / two).sqrt() + 1e-8) for k in p}, m1, m2

    every = torch.arange(n)
    seen = [every[~torch.isin(every, fold)] for fold in folds]
    size = min(size, *map(len, seen))
    m1, m2 = ({k: torch.zeros_like(p) for k, p in theta.items()} for _ in range(2))
    generator = torch.Generator().manual_seed(1 + seed)
    first = round(steps / (1 + MORE))
    traced, held, began_steps, variance = None, Plain(base, theta, 0.0, 0.0, 0.0), 0.0, 0.0
    at, order = size * n, torch.empty(0)
    for t in range(steps):
        if t == first:
            held = Plain(base, theta, 0.0, 0.0, 0.0)
            variance = 0.0 if classes else best_noise(held, x, y, folds)
            seen, at = [every] * count, size * n
        if at + size > min(map(len, seen)):
            order = torch.stack([r[torch.randperm(len(r), generator=generator)[: min(map(len, seen))]] for r in seen])
            at = 0
        rows, at = order[:, at : at + size], at + size
        height, share = (1.0, t / first) if t < first else (RATE, (t - first) / (steps - first))
        rate = lr * (height * (1 + math.cos(math.pi * share)) / 2 + 1e-3)
        count_of, rate_of, seen_of = torch.tensor([t + 1, rate, len(seen[0])], dtype=x.dtype).unbind()
        numbers = count_of, rate_of, x[rows], y[rows], seen_of
        if traced is None:
            traced = make_fx(step)(theta, m1, m2, *numbers)
            began_steps = time.process_time()
        with torch.no_grad():
            theta, m1, m2 = traced(theta, m1, m2, *numbers)
    ended = time.process_time()
    return Plain(base, theta, variance, began_steps - began, (ended - began_steps) / steps)


def best_noise(held: Plain, x: Tensor, y: Tensor, folds: list[Tensor]) -> float:
    """The variance under which members, mixed, predict best what they left out."""
    squares = []
    for fold in {int(f[0]): f for f in folds}.values():
        who = [m for m, f in enumerate(folds) if int(f[0]) == int(fold[0])]
        squares.append((held.outputs(x[fold])[who] - y[fold]).double().square().flatten(1))
    grid = torch.logspace(-5, 1, 100, dtype=torch.float64)
    scores = []
    for v in grid:
        logs = [torch.logsumexp(-s / (2 * v) - v.log() / 2, 0) - math.log(len(s)) for s in squares]
        scores.append(torch.cat(logs).mean())
    return float(grid[int(torch.stack(scores).argmax())])
