r"""Running a sampler: burn-in, thinning, draws in memory or on disk, and going on after an interruption.

A run of ``steps`` steps draws after steps ``burn_in + thinning``, ``burn_in + 2 thinning``, ... . On disk a run is a directory:

    draws-000000.safetensors ...     shards: some consecutive draws each
    checkpoint-000000001000.safetensors     parameters, state, torch's generator and the place in the batches after a step
    index.json                       names the shards and the checkpoint that belong together; replaced last, in one step
    lock                             held while a process writes

(:mod:`bayesopt_chain.loop.layouts` has the folders of several ranks.) Whenever the process dies, the index names whole files,
and steps after the checkpoint are run again. The state of a chain determines its noise, so they give the same draws, bit for
bit, on the same machine with the same versions and threads.
"""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import optree
import torch
from torch import Tensor

from bayesopt_chain.distributed.shards import are_spread, everywhere
from bayesopt_chain.loop.draws import Draws
from bayesopt_chain.loop.feed import Feed
from bayesopt_chain.loop.parallel import Parallel
from bayesopt_chain.loop.parts import Follower, Leader, Place, place_of
from bayesopt_chain.loop.spread import SpreadDisk
from bayesopt_chain.loop.store import Disk, Memory


class Iteration(NamedTuple):
    """One step of a run: its number (from 1), what it returned, and whether it is a draw.

    The tensors are the step's own: one that works in place overwrites them in the next step.
    """

    step: int
    params: Any
    state: Any
    info: Any
    is_draw: bool


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


def iterate(
    step: Callable,
    params: Any,
    state: Any,
    batches: Any,
    *,
    steps: int,
    burn_in: int = 0,
    thinning: int = 1,
) -> Iterator[Iteration]:
    """The steps of a run, one after the other; :func:`sample` is this with the draws kept.

    Args:
        step, params, state, batches, steps, burn_in, thinning: as in :func:`sample`.

    Returns:
        An iterator over :class:`Iteration`, one for each step.

    Raises:
        ValueError: arguments that make no run.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, params = bc.sgd(0.5), {"w": torch.ones(1)}
        >>> step = bc.make_step(lambda p, batch: (p["w"] ** 2).sum() / 2, tx)
        >>> for it in bc.iterate(step, params, tx.init(params), None, steps=3, burn_in=1):
        ...     print(it.step, it.is_draw, it.params["w"].item())
        1 False 0.5
        2 True 0.25
        3 True 0.125
    """
    _check(steps, burn_in, thinning)
    yield from _iterate(step, params, state, Feed(batches), 0, steps, burn_in, thinning)


def _iterate(
    step, params, state, feed: Feed, done: int, steps: int, burn_in: int, thinning: int
) -> Iterator[Iteration]:
    for n in range(done + 1, steps + 1):
        params, state, info = step(params, state, feed.next())
        yield Iteration(n, params, state, info, n > burn_in and (n - burn_in) % thinning == 0)


def sample(
    step: Callable,
    params: Any,
    state: Any,
    batches: Any,
    *,
    steps: int,
    burn_in: int = 0,
    thinning: int = 1,
    path: str | Path | None = None,
    checkpoint_seconds: float = 30.0,
    chains: int | None = None,
    callbacks: Sequence[Callable[[Iteration], Any]] = (),
    progress: bool = False,
) -> Draws:
    """Run a sampler and keep its draws; with ``path``, on disk, going on where an earlier call stopped.

    Args:
        step: ``step(params, state, batch) -> (params, state, Info)`` from ``make_step`` (pure or in place), ``parallel``,
            ``capture`` or ``bc.optim.as_step``.
        params: where to start. An in-place step overwrites them.
        state: from ``tx.init(params)``; of a step with ``buffers=``, from ``step.init(params)``, and the draws then hold the
            buffers too.
        batches: one batch (a tensor, tuple, dictionary or ``None``), used in every step; or anything that can be gone
            through again and again: ``bc.epochs(...)``, a list of batches, a DataLoader.
        steps: number of all steps, burn-in included.
        burn_in: first steps whose parameters are not kept.
        thinning: a draw is kept every so many steps.
        path: a directory for the draws; under ``torchrun`` each rank that runs chains of its own has a folder in it, of ranks
            that share a chain the first one writes, and of DTensors every rank what it alone holds. Called again with the
            same arguments it goes on from its last checkpoint, and returns at once when the run is complete; with more
            ``steps`` it makes the run longer. Another number of ranks goes on with chains of
            ``bc.parallel(step, n, mesh=mesh)``, with one chain that ranks share, and with DTensors, in any layout.
        checkpoint_seconds: on disk, how often draws and a checkpoint are committed. What is not is run again.
        chains: number of chains on axis 0 of every leaf; known from the step where ``parallel`` made it.
        callbacks: called with every :class:`Iteration`; one that returns ``True`` ends the run. A
            :class:`bayesopt_chain.diagnostics.Thermometer` among them shows its temperature in the progress bar, and a warning
            is given when the run ends if it says that the data heat the chain.
        progress: show a progress bar with loss, temperature and steps per second (needs tqdm).

    Returns:
        :class:`Draws`. ``KeyboardInterrupt`` ends the run and returns what there is, with ``complete=False``; so does a loss
        that is not finite, with a warning.

    Raises:
        ValueError: arguments that make no run; a directory with another run, naming what differs.
        RuntimeError: another process writes to ``path``, or to the folder of a chain that goes on here.
        OSError: the disk is full or read-only; what was committed stays whole.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, params = bc.sghmc(0.1, temperature=0.01), {"w": torch.zeros(2)}
        >>> step = bc.make_step(lambda p, batch: (p["w"] ** 2).mean(), tx)
        >>> draws = bc.sample(step, params, tx.init(params), None, steps=100, burn_in=50, thinning=10)
        >>> len(draws), draws.params["w"].shape
        (5, torch.Size([5, 2]))
    """
    _check(steps, burn_in, thinning)
    chains = step.n if chains is None and isinstance(step, Parallel) else chains
    run = Run(step, params, state, Feed(batches), steps, burn_in, thinning, chains, callbacks, progress)
    if path is None:
        return run.go(Memory(params))
    if are_spread((params, state)):
        run.feed.share(None)
        with SpreadDisk(Path(path), run, checkpoint_seconds) as spread:
            return run.go(spread)
    place = place_of(Path(path), step)
    if place.shared is not None:
        run.feed.share(place.shared)
    return _on_disk(run, place, checkpoint_seconds)


def _on_disk(run: Run, place: Place, interval: float) -> Draws:
    """A run in its folder; first, chains that are behind the others catch up, each group in a folder of its own."""
    disk = Disk(place, run, interval)
    store = disk
    if place.shared is not None:
        store = (Follower if place.shared.get_local_rank() else Leader)(disk, place.shared)
    with store:
        front, behind = store.behind()
        for chains in behind:
            caught_up = _on_disk(run.some(chains, place, front), place.catching_up(chains), interval)
            if not caught_up.complete:
                shards, spec, names = store.shards()
                return Draws(shards, spec, names, chains=run.chains, complete=False, why=caught_up.why)
        return run.go(store)


def _check(steps: int, burn_in: int, thinning: int) -> None:
    for name, value, least in (("steps", steps, 1), ("burn_in", burn_in, 0), ("thinning", thinning, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"sample: {name} must be a whole number, at least {least}, got {value!r}")
    if steps < burn_in + thinning:
        raise ValueError(
            f"sample: steps={steps} ends before the first draw, which comes after burn_in + thinning = {burn_in + thinning} "
            "steps (steps counts all of them, burn-in included)"
        )


class Run(NamedTuple):
    """What :func:`sample` was asked for."""

    step: Callable
    params: Any
    state: Any
    feed: Feed
    steps: int
    burn_in: int
    thinning: int
    chains: int | None
    callbacks: Sequence[Callable[[Iteration], Any]]
    progress: bool

    def some(self, chains: range, place: Place, steps: int) -> Run:
        """Some of the chains of a part alone, up to a step; callbacks see all chains, and none of this."""
        assert place.chains is not None
        rows = slice(chains.start - place.chains.start, chains.stop - place.chains.start)
        both: Any = (self.params, self.state)
        params, state = optree.tree_map(lambda x: x[rows], both)
        step = self.step.some(rows)  # type: ignore[attr-defined]
        return self._replace(step=step, params=params, state=state, steps=steps, chains=len(chains), callbacks=())

    def go(self, store: Memory | Disk | Leader | SpreadDisk) -> Draws:
        """All steps that are still to be made, their draws handed to ``store``."""
        params, state, done = store.resume(self)
        leaves = optree.tree_leaves(params)
        last, why, finite = (params, state), "", True
        bar = _bar(self.steps, done) if self.progress else None
        whole = True  # whether the last step was made to its end
        try:
            for it in self.until_interrupted(params, state, done):
                last, done = (it.params, it.state), it.step
                if it.is_draw:
                    loss = getattr(it.info, "loss", None)
                    finite = not torch.is_tensor(loss) or bool(everywhere(torch.isfinite(loss).all(), leaves))
                    if torch.is_tensor(loss) and not finite:
                        why = f"the loss of step {it.step} is {_shown(loss)}"
                        warnings.warn(f"sample: {why}; the run has diverged and ends here. Lower lr", stacklevel=3)
                        break
                    store.add(it)
                    if bar is not None:
                        bar.set_postfix(self.shown(loss), refresh=False)
                if bar is not None:
                    bar.update()
                if any([callback(it) is True for callback in self.callbacks]):
                    why = f"a callback ended it after step {it.step}"
                    break
                store.pause(it, self.feed)
            else:
                why = "" if done >= self.steps else f"interrupted after step {done}"
        except KeyboardInterrupt:
            why, whole = f"interrupted after step {done}", False
        finally:
            if bar is not None:
                bar.close()
        for text in [x.warning() for x in self.callbacks if isinstance(x, Meter)]:
            if text is not None:
                warnings.warn(f"sample: {text}", stacklevel=3)
        complete = done >= self.steps and finite
        if finite and whole:
            store.finish(*last, done, self.feed, complete, why)
        shards, spec, names = store.shards()
        return Draws(shards, spec, names, chains=self.chains, complete=complete, why=why, last=last)

    def shown(self, loss: Any) -> dict[str, str]:
        """What stands behind the progress bar."""
        out = {"loss": f"{loss.mean().item():.4g}"} if torch.is_tensor(loss) else {}
        for callback in self.callbacks:
            if isinstance(callback, Meter):
                out |= callback.postfix()
        return out

    def until_interrupted(self, params: Any, state: Any, done: int) -> Iterator[Iteration]:
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
            for it in _iterate(self.step, params, state, self.feed, done, self.steps, self.burn_in, self.thinning):
                yield it
                if asked:
                    return
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
