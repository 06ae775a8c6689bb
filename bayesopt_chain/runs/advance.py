"""Making the steps of a run and handing its draws to a store, so that whatever ends the run, no finished draw is lost."""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import optree
import torch
from torch import Tensor

from bayesopt_chain.distributed.shards import everywhere, local
from bayesopt_chain.runs.draws import Draws
from bayesopt_chain.runs.run import Iteration, Run, iterated
from bayesopt_chain.runs.store import Store
from bayesopt_chain.trees import all_finite


@runtime_checkable
class Meter(Protocol):
    """A callback that has something to say: what a progress bar shows, and one line when the run ends, or ``None``.

    :class:`bayesopt_chain.diagnostics.Thermometer` is one.
    """

    def __call__(self, it: Iteration, /) -> Any:
        """Look at a step."""
        ...

    def postfix(self) -> Mapping[str, str]:
        """Names and values for the progress bar."""
        ...

    def warning(self) -> str | None:
        """What is wrong with the run."""
        ...


def go(run: Run, store: Store) -> Draws:
    """All steps that are still to be made, their draws handed to ``store``."""
    params, state, done = store.restore(run)
    leaves = optree.tree_leaves(params)
    last, why, finite = (params, state), "", True
    bar = _bar(run.steps, done) if run.progress else None
    try:
        for it in until_interrupted(run, params, state, done):
            if it.is_draw:
                loss = getattr(it.info, "loss", None)
                why = not_finite(it, loss, leaves)
                if why:
                    warnings.warn(f"sample: {why}; the run has diverged and ends here. Lower lr", stacklevel=3)
                    finite = False
                    break
                store.add(it)
                if bar is not None:
                    bar.set_postfix(shown(run, loss), refresh=False)
            last, done = (it.params, it.state), it.step
            if bar is not None:
                bar.update()
            if any([callback(it) is True for callback in run.callbacks]):
                why = f"a callback ended it after step {it.step}"
                break
            store.maybe_checkpoint(it, run.feed)
        else:
            why = "" if done >= run.steps else f"interrupted after step {done}"
        if finite:
            with deaf_to_interrupts():
                store.finish(*last, done, run.feed, done >= run.steps, why)
        else:
            store.rescue(done, why)
    except KeyboardInterrupt:
        why = f"interrupted after step {done}"
        with deaf_to_interrupts():
            store.rescue(done, why)
    except Exception as err:
        with deaf_to_interrupts():
            store.rescue(done, f"{type(err).__name__} in step {done + 1}")
        if store.place is None and store.size:
            shards, spec, names = store.shards()
            err.draws = Draws(shards, spec, names, chains=run.chains, complete=False, why=str(err))  # type: ignore[attr-defined]
        raise
    finally:
        if bar is not None:
            bar.close()
    for text in [x.warning() for x in run.callbacks if isinstance(x, Meter)]:
        if text is not None:
            warnings.warn(f"sample: {text}", stacklevel=3)
    shards, spec, names = store.shards()
    complete = done >= run.steps and finite
    return Draws(shards, spec, names, chains=run.chains, complete=complete, why=why, last=last)


def not_finite(it: Iteration, loss: Any, leaves: list[Any]) -> str:
    """What is not finite of a draw, on any rank; the loss is that of the parameters before its step."""
    values = [local(x) for x in optree.tree_leaves(it.params)]
    if not bool(everywhere(all_finite([*values, *([loss] if torch.is_tensor(loss) else [])]), leaves)):
        if torch.is_tensor(loss) and not bool(torch.isfinite(loss).all()):
            return f"the loss of step {it.step} is {_shown(loss)}"
        return f"the parameters after step {it.step} are not finite"
    return ""


def shown(run: Run, loss: Any) -> dict[str, str]:
    """What stands behind the progress bar."""
    out = {"loss": f"{loss.mean().item():.4g}"} if torch.is_tensor(loss) else {}
    for callback in run.callbacks:
        if isinstance(callback, Meter):
            out |= callback.postfix()
    return out


def until_interrupted(run: Run, params: Any, state: Any, done: int) -> Iterator[Iteration]:
    """The steps; the first Ctrl-C ends them after the step under way, a second one raises at once."""
    asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    mine = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, ask) if mine else None
    try:
        for it in iterated(run.step, params, state, run.feed, done, run.steps, run.burn_in, run.thinning):
            yield it
            if asked:
                return
    finally:
        if mine:
            signal.signal(signal.SIGINT, before)


@contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Draws are being committed: another Ctrl-C comes too late to matter."""
    mine = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if mine else None
    try:
        yield
    finally:
        if mine:
            signal.signal(signal.SIGINT, before)


def _bar(steps: int, done: int) -> Any:
    from tqdm.auto import tqdm

    return tqdm(total=steps, initial=done, unit="step")


def _shown(loss: Tensor) -> str:
    if loss.ndim == 0:
        return str(loss.item())
    bad = [i for i, ok in enumerate(torch.isfinite(loss).tolist()) if not ok]
    return f"not finite in chains {bad[:8]}{'...' if len(bad) > 8 else ''}"
