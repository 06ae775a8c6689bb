"""Numbers of a run while it runs: in TensorBoard, Weights & Biases and what else takes them by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from bayesopt_chain import checks
from bayesopt_chain.runs.run import Iteration

EACH = 16  # chains that have a curve each; of more there is the mean alone


@checks.takes(
    writer=checks.Kind(
        lambda x: callable(getattr(x, "add_scalar", None)) or callable(getattr(x, "log", None)),
        "an object with add_scalar(name, value, step), as TensorBoard's SummaryWriter, or log(numbers, step=step), as a run "
        "of wandb",
    ),
    every=checks.WHOLE,
    prefix=checks.TEXT,
)
def log_to(writer: Any, *, every: int = 1, prefix: str = "") -> Callable[..., None]:
    """A callback that writes the numbers of a run down while it runs.

    Of :func:`bayesopt_chain.sample` and :func:`bayesopt_chain.iterate` it is called with each :class:`Iteration`, and writes
    what the step reports: ``loss``, and with ``make_step(monitor=True)`` ``gradient_norm`` and ``temperature``; of chains the
    mean, and each chain's own of up to 16; and ``draws``, how many have been kept. In a loop of your own it is called with what
    :func:`bayesopt_chain.collect` returned, or with the number of the step, and any numbers by name.

    Args:
        writer: with a method ``add_scalar(name, value, step)``, as ``torch.utils.tensorboard.SummaryWriter``; or
            ``log({name: value, ...}, step=step)``, as a run of ``wandb``.
        every: write every so many steps.
        prefix: put in front of every name, such as ``"chain/"``.

    Returns:
        ``log(it)``, or ``log(keep, loss=loss, ...)``, or ``log(step, loss=loss, ...)``; it returns ``None``.

    Raises:
        TypeError: a writer with neither method; when called, something that is no step, or a number that is none.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> class Table(list):
        ...     def add_scalar(self, name, value, step):
        ...         self.append((name, value, step))
        >>> table, tx = Table(), bc.sgd(0.5)
        >>> step = bc.make_step(lambda w, batch: w**2 / 2, tx)
        >>> start = torch.tensor(2.0)
        >>> _ = bc.sample(step, start, tx.init(start), None, steps=2, callbacks=[bc.log_to(table)])
        >>> table
        [('loss', 2.0, 1), ('draws', 1.0, 1), ('loss', 0.5, 2), ('draws', 2.0, 2)]
    """
    single, many = getattr(writer, "add_scalar", None), getattr(writer, "log", None)
    kept = 0

    def log(at: Any, /, **more: Any) -> None:
        nonlocal kept
        found: Mapping[str, Any] = more
        if isinstance(at, Iteration):
            kept += at.is_draw
            reported = {name: getattr(at.info, name, ()) for name in ("loss", "gradient_norm", "temperature")}
            found = {**{n: x for n, x in reported.items() if isinstance(x, torch.Tensor)}, "draws": kept, **more}
        elif hasattr(at, "every") and hasattr(at, "after"):  # what bc.collect returned
            found = {"draws": max(0, at.step - at.after) // at.every, **more}
        elif not checks.INDEX.fits(at):
            raise TypeError(
                f"log_to: the callback takes an Iteration, what bc.collect returned, or the number of a step, got {at!r:.100}"
            )
        step = at if isinstance(at, int) else at.step
        if step % every:
            return
        numbers = {prefix + name: x for n, value in found.items() for name, x in _scalars(n, value)}
        if callable(single):
            for name, x in numbers.items():
                single(name, x, step)
        else:
            many(numbers, step=step)  # type: ignore[misc]

    return log


def _scalars(name: str, value: Any) -> list[tuple[str, float]]:
    """A number by its name; of several, such as those of chains, their mean and each of them."""
    try:
        x = torch.as_tensor(value, dtype=torch.float64, device="cpu").detach().reshape(-1)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"log_to: {name} must be a number, or a tensor of them, got {value!r:.100}") from None
    if len(x) == 1:
        return [(name, x.item())]
    each = [(f"{name}/{i}", v) for i, v in enumerate(x.tolist())] if len(x) <= EACH else []
    return [(name, x.mean().item() if len(x) else math.nan), *each]
