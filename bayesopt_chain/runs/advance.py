"""Making the steps of a run and handing its draws to a store, so that whatever ends the run, no finished draw is lost."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

import optree
import torch

from bayesopt_chain.checks import installed
from bayesopt_chain.distributed.ranks import name_the_first
from bayesopt_chain.runs.divergence import Divergence
from bayesopt_chain.runs.draws import Draws
from bayesopt_chain.runs.interrupts import Interrupts, interrupts
from bayesopt_chain.runs.run import Iteration, Run
from bayesopt_chain.runs.store import Store

SECONDS = 2.0  # between two looks at how well the chains have mixed, for the progress bar


@runtime_checkable
class Meter(Protocol):
    """A callback that has something to say: what a progress bar shows, and one line when the run ends, or ``None``.

    :class:`bayesopt_chain.diagnostics.HeatGuard` is one.
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


class Progress:
    """The progress bar: loss, number of draws, and the effective sample size and R-hat of the loss so far.

    The last two need the extra ``diagnostics``.
    """

    def __init__(self, run: Run, done: int) -> None:
        self.run, self.losses = run, list[Any]()
        self.looked, self.mixed = 0.0, dict[str, str]()
        self.bar: Any = None
        if run.progress:
            installed("progress=True", "runs", "tqdm")
            from tqdm.auto import tqdm

            self.bar = tqdm(total=run.steps, initial=done, unit="step")

    def update(self, it: Iteration) -> None:
        """Show a step."""
        if self.bar is None:
            return
        if it.is_draw:
            loss = getattr(it.info, "loss", None)
            out = {}
            if torch.is_tensor(loss):
                self.losses.append(loss.detach().double().cpu().reshape(-1))
                out = {"loss": f"{loss.mean().item():.4g}", "draws": str(len(self.losses)), **self._mixing()}
            for callback in self.run.callbacks:
                if isinstance(callback, Meter):
                    out |= callback.postfix()
            self.bar.set_postfix(out, refresh=False)
        self.bar.update()

    def _mixing(self) -> dict[str, str]:
        now = time.monotonic()
        if len(self.losses) < 8 or now - self.looked < SECONDS:
            return self.mixed
        with suppress(ImportError):
            from arviz_stats.base import array

            statistics: Any = array.array_stats

            x = torch.stack(self.losses, 1).numpy()  # [chains, draws]
            self.mixed = {"ess": f"{float(statistics.ess(x, chain_axis=0, draw_axis=1, method='bulk')):.0f}"}
            if len(x) > 1:
                self.mixed["r_hat"] = f"{float(statistics.rhat(x, chain_axis=0, draw_axis=1, method='rank')):.3f}"
        self.looked = time.monotonic()
        return self.mixed

    def close(self) -> None:
        """Leave the bar as it is."""
        if self.bar is not None:
            self.bar.close()


def go(run: Run, store: Store) -> Draws:
    """Make all steps that are still to be made, hand their draws to ``store``, and return all draws.

    Ctrl-C, a draw that is not finite, a loss that has exploded and a callback that returns ``True`` end the run, which says
    why. An exception goes on to the caller with the finished draws in its attribute ``draws``.
    """
    with interrupts() as sigint:
        params, state, done = store.restore(run)
        progress = Progress(run, done)
        said = _Ended((params, state), done)
        watch = Divergence(run, store.losses(done), state)
        try:
            _steps(run, store, said, watch, sigint, progress)
            if said.rescue:
                _rescue(store, said)
            else:
                store.finish(*said.last, said.done, run.batches, said.done >= run.steps, said.why)
        except KeyboardInterrupt:
            said.why = f"interrupted after step {said.done}"
            _rescue(store, said)
        except BaseException as err:
            sigint.raises = False
            said.why = f"{type(err).__name__} in step {said.done + 1}"
            name_the_first(err, "sample")
            failed = store.rescue(said.done, said.why)
            with suppress(OSError, ValueError, TypeError, AttributeError):  # what ended the run says more
                err.draws = draws_of(run, store, said, complete=False)  # type: ignore[attr-defined]
                where = "in the attribute draws of this exception" + (
                    "" if store.place is None or failed else ", and on disk"
                )
                if len(err.draws) and hasattr(err, "add_note"):  # type: ignore[attr-defined]
                    err.add_note(f"sample: {len(err.draws)} finished draws are {where}")  # type: ignore[attr-defined]
            raise
        finally:
            progress.close()
        for text in [x.warning() for x in run.callbacks if isinstance(x, Meter)]:
            if text is not None:
                warnings.warn(f"sample: {text}", stacklevel=3)
        store.together(lambda: None)  # until the first rank has written
        return draws_of(run, store, said, complete=said.done >= run.steps and not said.rescue)


class _Ended:
    """How far a run came: what the last whole step returned, its number, why it ended, and whether its draws alone are kept."""

    def __init__(self, last: tuple[Any, Any], done: int) -> None:
        self.last, self.done = last, done
        self.why, self.rescue = "", False


def _steps(run: Run, store: Store, said: _Ended, watch: Divergence, sigint: Interrupts, progress: Progress) -> None:
    """Make steps until the last one, or until something ends the run."""
    params, state = said.last
    shared = (
        store.place is not None and store.place.sharded
    )  # these ranks end after the same step, or wait for each other
    for n in range(said.done + 1, run.steps + 1):
        if sigint.asked and not shared:
            said.why = f"interrupted after step {said.done}"
            return
        sigint.raises = True
        start = params, state
        params, state, info = run.step(params, state, run.batches.next())
        it = Iteration(n, params, state, info, run.is_draw(n))
        loss, wrong = watch.look(it) if it.is_draw else (None, "")
        sigint.raises = False
        if wrong:
            warnings.warn(f"sample: {wrong}; the run has diverged and ends here. Lower lr", stacklevel=4)
            said.why, said.rescue = wrong, True
            return
        if it.is_draw and run.keep:
            store.add(_beside_its_weight(it, *start), loss)
        said.last, said.done = (params, state), n
        progress.update(it)
        sigint.raises = True
        ended = any([callback(it) is True for callback in run.callbacks])
        sigint.raises = False
        if ended:
            said.why = f"a callback ended it after step {n}"
            return
        if store.maybe_checkpoint(it, run.batches, sigint.asked):
            said.why = f"interrupted after step {n}"
            return


def _beside_its_weight(it: Iteration, params: Any, state: Any) -> Iteration:
    """The draw whose weight the step reported, if it did: the parameters that it started from.

    Raises:
        ValueError: the step has overwritten them.
    """
    if not isinstance(getattr(it.info, "weight", None), torch.Tensor):
        return it
    before, after = (optree.tree_leaves(tree) for tree in (params, it.params))
    if any([x is y for x, y in zip(before, after)]):
        raise ValueError(
            "sample: the draws of this chain have weights, which belong to the parameters that a step starts from, and this "
            "step overwrites them; make it with inplace=False, and not captured"
        )
    return it._replace(params=params, state=state)


def _rescue(store: Store, said: _Ended) -> None:
    """Keep the draws of a run that ended in the middle of a step, or with one that is no draw."""
    said.rescue = True
    if (failed := store.rescue(said.done, said.why)) and store.size:
        warnings.warn(f"sample: the last {store.size} draws are in memory only: {failed}", stacklevel=4)


def draws_of(run: Run, store: Store, said: _Ended, complete: bool) -> Draws:
    """All draws of a run, those on disk and those that are held."""
    return Draws(
        store.pieces(),
        store.spec,
        store.names,
        chains=run.chains,
        complete=complete,
        why=said.why,
        last=said.last,
    )
