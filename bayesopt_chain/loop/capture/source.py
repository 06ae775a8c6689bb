"""Let a captured step take its batches from ``bc.epochs(...)``: the program reads the rows of the data itself.

The batch of such a step is a tensor of row numbers, and ``data[rows]`` is an operation of the program, so that no batch is made
outside of it. Many small chains, each with rows of its own, gather these in lanes
(:mod:`bayesopt_chain.loop.capture.lanes`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bayesopt_chain.data.epochs import Epochs
from bayesopt_chain.loop.parallel import Parallel


def by_rows(step: Callable, data: Epochs) -> Callable:
    """Return the step as a function of (params, state, row numbers).

    Args:
        step: the step of one chain, or a :class:`bayesopt_chain.loop.parallel.Parallel`.
        data: the epochs.

    Raises:
        TypeError: the data are no tree of tensors.
        ValueError: the batches have an axis of chains and the step has none, or the other way round, or the numbers of chains
            differ.
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
    """Return the row numbers of the next batch; with ``steps > 1``, of the next batches, stacked on axis 0."""
    numbers = data.ahead(steps)
    where = data.leaves[0].device if data.leaves else None
    return (numbers[0] if steps == 1 else torch.stack(numbers)).to(where)
