"""Rows against JAX: one program of all steps and all chains, ``lax.scan`` of ``vmap``, and ours, in turns.

JAX runs BlackJAX's SGHMC with our learning rate ``lr`` and momentum ``mu``. Its step of size ``h`` moves ``theta`` by ``h r``
and sets ``r`` to ``(1 - alpha h) r - h g`` plus noise, so that ``h = sqrt(lr)`` and ``alpha = (1 - mu) / h``. As ``g`` is taken
where ``theta`` was before the move, its variance at curvature ``k`` is about ``1 / (1 - lr k / (1 - mu))`` times ours.

Rows of the minibatches are drawn on both sides: by JAX inside the program, with replacement; by us outside with replacement
(``torch.randint``), and inside by ``bc.epochs``, as fresh subsets and in reshuffled epochs.
"""

# JAX may be absent.
# pyright: reportMissingImports=false

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import bayesopt_chain as bc
from benchmarks.cpu import D, N, Row, captured_chains, jax_logistic, logistic, logistic_step, regression_data
from benchmarks.measure import from_start, stepping, take_turns, threads

SIZE = 32  # of a minibatch
LR, MOMENTUM = 0.05, 0.9
JAX = "JAX, scan of vmap"
CLOCKS = {"wall time": time.perf_counter, "process time": time.process_time}


def jax_chains(data: tuple[torch.Tensor, torch.Tensor], chains: int, steps: int, whole: bool = False) -> Callable:
    """A function that runs ``steps`` steps of ``chains`` chains in JAX, and returns their parameters.

    With ``whole`` every batch is all data.
    """
    import jax
    import jax.numpy as jnp
    from blackjax.sgmcmc import diffusions

    log_density, step_size = jax_logistic(*data), LR**0.5
    integrate = diffusions.sghmc((1 - MOMENTUM) / step_size, 0.0)

    def one(key, p, m):
        for_rows, for_noise = jax.random.split(key)
        rows = slice(None) if whole else jax.random.randint(for_rows, (SIZE,), 0, N)
        return integrate(for_noise, p, m, jax.grad(log_density)(p, rows), step_size, 1 / N)

    def advance(carry, _):
        key, p, m = carry
        key, now = jax.random.split(key)
        p, m = jax.vmap(one)(jax.random.split(now, chains), p, m)
        return (key, p, m), None

    scan = jax.jit(lambda carry: jax.lax.scan(advance, carry, None, length=steps)[0])
    now: list[Any] = [(jax.random.key(0), jnp.zeros((chains, D)), jnp.zeros((chains, D)))]

    def run():
        now[0] = scan(now[0])
        return jax.block_until_ready(now[0][1])

    return run


def five_thousand_chains(clock: str, chains: int = 5000, steps: int = 500, rounds: int = 7) -> Row:
    """All chains. In wall time both libraries have all cores, in process time ours has one thread and JAX what it takes."""
    with threads(torch.get_num_threads() if clock == "process time" else os.cpu_count() or 1):
        data, tx, params = regression_data(), bc.sghmc(LR, MOMENTUM, temperature=1 / N), torch.zeros(chains, D)
        contestants = {"torch.randint": captured_chains(data, chains, steps, SIZE)}
        inside = bc.parallel(bc.make_step(logistic, tx), chains, batch_dim=0)
        state = inside.init(tx, params)
        for order in ("independent", "reshuffled"):
            source: Any = bc.epochs(data, SIZE, order=order, chains=chains)
            whole = bc.capture(inside, params, state, source)
            again = partial(lambda source: source, source)
            contestants[f"bc.epochs, {order}"] = from_start(whole, params, state, again, steps)
        targets = {(name, JAX): 0.6 for name in contestants}
        contestants[JAX] = jax_chains(data, chains, steps)
        times = take_turns(contestants, rounds, seconds=0.0, clock=CLOCKS[clock])
    where = "wall time on all cores" if clock == "wall time" else clock
    return Row(f"{chains} chains x {steps} steps, minibatches of {SIZE} of their own, {where}", times, targets)


def one_chain(steps: int = 500) -> Row:
    """The shape of Pima: 768 data of 8 numbers, every step all of them."""
    step, *given = logistic_step()
    ours = stepping(bc.capture(step, *given, steps=steps), *given)
    contestants = {"captured": ours, JAX: jax_chains(given[-1], 1, steps, whole=True)}
    return Row(
        f"logistic regression {N} x {D}, one chain x {steps} steps, process time",
        take_turns(contestants, 15, clock=time.process_time),
        {("captured", JAX): 1.0},
    )


def rows(quick: bool) -> dict[str, Callable[[], Row]]:
    """The rows by name, each measured when called."""
    chains = partial(five_thousand_chains, steps=20, rounds=5) if quick else five_thousand_chains
    each = {f"five_thousand_chains_in_{clock.replace(' ', '_')}": partial(chains, clock) for clock in CLOCKS}
    return {**each, "one_chain": one_chain}
