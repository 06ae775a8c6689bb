"""Batches that a captured step takes by itself from ``bc.epochs(...)``: the program gathers the rows, nobody makes the batch.

The step becomes one of row numbers: the data are read where they lie, and ``data[rows]`` is part of the program. Where each
chain has rows of its own, many small chains gather them in lanes (:mod:`bayesopt_chain.loop.capture.lanes`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bayesopt_chain.data.epochs import Epochs
from bayesopt_chain.loop.parallel import Parallel


def by_rows(step: Callable, data: Epochs) -> Callable:
    """The step as a function of (params, state, row numbers).

    Raises:
        TypeError: data that are no tree of tensors.
        ValueError: batches with an axis for chains and a step without, or with another one, or of another number of chains.
    """
    if not isinstance(step, Parallel) and data.chains is not None:
        raise ValueError(
            f"capture: {data!r} gives batches of {data.chains} chains, and the step is one chain's; make it bc.parallel(step, "
            f"{data.chains}, batch_dim=0), or leave chains= out of bc.epochs"
        )
    if isinstance(step, Parallel) and (step.batch_dim, data.chains) not in ((None, None), (0, step.n)):
        raise ValueError(
            f"capture: the step has {step.n} chains with batch_dim={step.batch_dim!r}, and {data!r} gives other batches; take "
            f"bc.parallel(step, {step.n}, batch_dim=0) with bc.epochs(..., chains={step.n}), or neither of the two arguments"
        )

    def of_rows(one: Callable) -> Callable:
        return lambda params, state, rows: one(params, state, data.of_rows(rows))

    return step.mapped(of_rows) if isinstance(step, Parallel) else of_rows(step)


def rows_ahead(data: Epochs, steps: int) -> Tensor:
    """The row numbers of the next batches; with several steps stacked on axis 0."""
    numbers = data.ahead(steps)
    where = data.leaves[0].device if data.leaves else None
    return (numbers[0] if steps == 1 else torch.stack(numbers)).to(where)
