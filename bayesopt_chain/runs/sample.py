"""Running a sampler: burn-in, thinning, draws in memory or on disk, and going on after an interruption.

A run of ``steps`` steps draws after steps ``burn_in + thinning``, ``burn_in + 2 thinning``, ... . On disk a run is a directory,
:mod:`bayesopt_chain.runs.folder`. Whenever the process dies, its files are whole, and steps after the checkpoint are run
again. The state of a chain determines its noise, so they give the same draws, bit for bit, on the same machine with the
same versions and threads.

Whatever ends a run, no finished draw is lost. The first Ctrl-C ends it after the step under way, a second one ends that step,
and none ends a commit.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain._torch import REPLICATED, is_dtensor, local, spread_parts, whole
from bayesopt_chain.data.epochs import Epochs
from bayesopt_chain.distributed.ranks import FailedElsewhere, answers, gather_objects, world
from bayesopt_chain.distributed.shards import mean_everywhere
from bayesopt_chain.loop.loss import temperature
from bayesopt_chain.loop.parallel import Parallel, seeded_state
from bayesopt_chain.modules import with_progress
from bayesopt_chain.runs.draws import Draws
from bayesopt_chain.runs.run import Iteration, ResumableBatches, Run, chain_of, of_one_chain, uncaptured
from bayesopt_chain.runs.store import Store, place_of
from bayesopt_chain.trees import found_finite

EACH = 16  # chains of which log_to writes a curve each; of more the mean alone
_STEP = checks.Kind(callable, "a step (params, state, batch) -> (params, state, info), as of bc.make_step")


@checks.takes(step=_STEP, params=checks.ANY, batches=checks.ANY)
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

    As there, a draw that is not finite ends the run, and so does a loss that explodes: the iterator stops in front of that
    draw, with a warning.

    Args:
        step, params, state, batches: as in :func:`sample`.
        steps, burn_in, thinning: numbers of steps, as in :func:`sample`.

    Returns:
        An iterator over :class:`Iteration`, one for each step.

    Raises:
        TypeError: a step that cannot be called.
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
    _require_draws("iterate", steps, burn_in, thinning)
    return _iterated(Run(step, params, state, ResumableBatches(batches), steps, burn_in, thinning))


def _iterated(run: Run) -> Iterator[Iteration]:
    params, state, watch = run.params, run.state, Divergence(run)
    for n in range(1, run.steps + 1):
        it = run.made(n, params, state)
        if it.is_draw and (wrong := watch.look(it)[1]):
            checks.warn(f"iterate: {wrong}; the run has diverged and ends here. Lower lr")
            return
        yield it
        params, state = it.params, it.state


@checks.takes(
    step=_STEP,
    params=checks.ANY,
    batches=checks.ANY,
    path=checks.FOLDER,
    seed=checks.INDEX,
    callbacks=checks.Kind(
        lambda x: checks.SEQUENCE.fits(x) and all(map(callable, x)), "functions of an Iteration, in a list"
    ),
    keep=checks.BOOL,
)
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
    seed: int | None = None,
    chains: int | None = None,
    callbacks: Sequence[Callable[[Iteration], Any]] = (),
    keep: bool = True,
    progress: bool = False,
) -> Draws:
    """Run a sampler and keep its draws; with ``path``, on disk, going on where an earlier call stopped.

    Args:
        step: ``step(params, state, batch) -> (params, state, Info)`` from ``make_step`` (pure or in place), ``parallel``,
            ``capture`` or ``bc.optim.as_step``.
        params: where to start; a run that goes on in ``path`` starts where it was, whatever is given. An in-place step
            overwrites them.
        state: from ``tx.init(params)``; of a step with ``buffers=``, from ``step.init(params)``, and the draws then hold the
            buffers too.
        batches: one batch (a tensor, tuple, dictionary or ``None``), used in every step; or anything that can be gone
            through again and again: ``bc.epochs(...)``, a list of batches, a DataLoader.
        steps: number of all steps, burn-in included.
        burn_in: first steps whose parameters are not kept.
        thinning: a draw is kept every so many steps.
        path: a directory for the draws; under ``torchrun`` each rank that runs chains of its own has folders in it, of ranks
            that share a chain the first one writes, for which DTensors are gathered leaf by leaf. Called again with the
            same arguments it goes on from its last checkpoint, and returns at once when the run is complete; with more
            ``steps`` it makes the run longer. Another number of ranks goes on with chains of
            ``bc.parallel(step, n, mesh=mesh)``, with one chain that ranks share, and with DTensors, in any layout.
            Another temperature, rate, stream, schedule, optimizer, data, order of epochs, loss or seed under the same path is
            refused, naming it; of what cannot be known nothing is compared.
        checkpoint_seconds: on disk, how often draws and a checkpoint are committed. What is not is run again.
        seed: a whole number: the keys of all random streams in ``state`` become functions of it and of each chain's global
            number, so that the run is the same whenever it is started; by default they are those of ``state``.
        chains: number of chains on axis 0 of every leaf; known from the step where ``parallel`` made it.
        callbacks: called with every :class:`Iteration`; one that returns ``True`` ends the run. Of ranks that share a chain
            one is enough to end it on all of them, which costs a message a step. What a callback with ``state_dict`` and
            ``load_state_dict`` has seen goes into every checkpoint, and is handed back to it when the run goes on.
        keep: ``False`` keeps no draw, in memory or on disk: what the callbacks made of them is all there is. ``Draws.last`` and
            checkpoints are the same. Default: True.
        progress: show a progress bar with steps per second and the loss of the last draw (needs tqdm).

    Of a chain that moves the mean of a Gaussian (``bc.vi``) the draws are its means, which a warning says. The Gaussian's own
    are ``tx.posterior(state, params).sample((n,))`` with ``params, state = draws.last``.

    Returns:
        :class:`Draws`. Ctrl-C ends the run after the step under way, a second one at once, and both return what there is, with
        ``complete=False``. So do, with a warning, a loss or parameters that are not finite, and a loss that explodes: three
        draws in a row that lie further above the median of the run than 100 times ``T P / 2`` and its spread. Within a step of
        ranks that share a chain a second Ctrl-C is raised as an error is, since the others wait for this rank there.

    Raises:
        ValueError: arguments that make no run; other ones on ranks that share a chain; a directory with another run, naming
            what differs; callbacks with a state that have not seen its steps; a damaged file.
        RuntimeError: another process writes to ``path``, or to the folder of a chain that goes on here.
        OSError: the disk is full or read-only; what was committed stays whole. This and any other exception in the middle of
            a run carries all finished draws in its attribute ``draws``.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, params = bc.sghmc(0.1, temperature=0.01), {"w": torch.zeros(2)}
        >>> step = bc.make_step(lambda p, batch: (p["w"] ** 2).mean(), tx)
        >>> draws = bc.sample(step, params, tx.init(params), None, steps=100, burn_in=50, thinning=10)
        >>> len(draws), draws.params["w"].shape
        (5, torch.Size([5, 2]))
    """
    _require_draws("sample", steps, burn_in, thinning)
    both: Any = (params, state)
    checks.with_values("sample", "(params, state)", optree.tree_leaves(both), optree.tree_paths(both))
    made, inner = uncaptured(step), of_one_chain(step)
    _require_batches_for(made, inner, batches)
    if keep and steps - burn_in >= 2 * thinning and any(link.traits.samples for link in _links_of(inner)):
        checks.warn(
            "sample: this chain moves the mean of a Gaussian, and means along the way are no draws of it: draw from "
            "tx.posterior(state, params) with params, state = run.last; burn_in=steps - 1 keeps the last mean alone"
        )
    shapes = [tuple(x.shape) for x in optree.tree_leaves(params) if isinstance(x, torch.Tensor)]
    if chains is not None and (wrong := [shape for shape in shapes if shape[:1] != (chains,)]):
        raise ValueError(
            f"sample: chains={chains} counts axis 0 of every leaf of params, of which one has the shape {wrong[0]}: chains are "
            f"made by bc.parallel(step, {chains}), and start at bc.stack([params] * {chains})"
        )
    chains = made.n if chains is None and isinstance(made, Parallel) else chains
    if seed is not None:
        state = seeded_state(state, seed, getattr(made, "numbers", None))
    about = (steps, burn_in, thinning, chains, callbacks, progress, seed, keep)
    run = Run(step, params, state, ResumableBatches(batches), *about)
    alike = {"steps": steps, "burn_in": burn_in, "thinning": thinning, "seed": seed, "keep": keep}
    alike["chains, rates, temperatures or generators"] = str(chain_of(step))
    alike["callbacks with a state"] = str(run.seers) if run.seers and path is not None else ""
    place = place_of(None if path is None else Path(path).absolute(), step, (params, state), alike)
    if path is not None:
        getattr(step, "_keep_apart", bool)(place.alone and place.rank.size > 1)
    if place.shares:
        run.batches.share(place.mesh)
    store = Store(run, place, checkpoint_seconds)  # describes the run, its batches among it
    store.heeds = place.shares and any(gather_objects(bool(callbacks), place.mesh))
    return _in_store(store)


def _require_draws(who: str, steps: int, burn_in: int, thinning: int) -> None:
    if steps < burn_in + thinning:
        raise ValueError(
            f"{who}: steps={steps} ends before the first draw, which comes after burn_in + thinning = {burn_in + thinning} "
            "steps (steps counts all of them, burn-in included)"
        )


def _require_batches_for(step: Any, inner: Any, batches: Any) -> None:
    """Refuse batches in another order than a sampler is meant for; and :func:`bayesopt_chain.epochs` with an axis of chains
    that the step does not know, or the reverse.

    A loss that is given the batches of all chains at once would often run, on a batch as many times larger.
    """
    if (
        isinstance(step, Parallel)
        and isinstance(batches, Epochs)
        and (step.batch_dim is None) != (batches.chains is None)
    ):
        raise ValueError(
            f"sample: the step has batch_dim={step.batch_dim!r}, and {batches!r} gives other batches; take "
            f"bc.parallel(step, {step.n}, batch_dim=0) with bc.epochs(..., chains={step.n}), or neither of the two arguments"
        )
    for owner in (*_links_of(inner), getattr(inner, "optimizer", None)):
        wanted = getattr(owner, "batch_order", None)
        if wanted is not None and getattr(batches, "order", wanted) != wanted:
            raise ValueError(
                f"sample: this sampler is meant for {wanted} batches, and these are {batches.order}: take "
                f"bc.epochs(..., order={wanted!r}), or bc.samplers.ubu, which takes any"
            )


def _links_of(step: Any) -> Sequence[Any]:
    """The links of the chain of a step, of which an optimizer has none."""
    return getattr(getattr(step, "tx", None), "links", ())


def _in_store(store: Store) -> Draws:
    """A run in its store; first, blocks of chains that are behind the others catch up."""
    with store:
        front, behind = store.behind()
        for blocks in behind:
            caught_up = _in_store(store.some(blocks, front))
            if not caught_up.complete:
                return store.draws(False, caught_up.why)
        return _go(store.run, store)


def _go(run: Run, store: Store) -> Draws:
    """Make all steps that are still to be made, hand their draws to ``store``, and return all draws.

    Ctrl-C, a draw that is not finite, a loss that has exploded and a callback that returns ``True`` end the run, which says
    why. An exception goes on to the caller with the finished draws in its attribute ``draws``.
    """
    with interrupts() as sigint:
        sigint.raises = True  # to go through batches that were seen may take long
        *last, done = store.restore()
        sigint.raises = False
        ended = _Ended((last[0], last[1]), done)
        watch = Divergence(run, store.losses(done), last[1])
        try:
            ended.why = _steps(run, store, ended, watch, sigint)
            if not ended.rescue:
                store.finish(*ended.last, ended.done, ended.done >= run.steps, ended.why)
        except BaseException as err:
            sigint.raises, interrupted = False, isinstance(err, KeyboardInterrupt)
            what = "interrupted" if interrupted else err if isinstance(err, FailedElsewhere) else type(err).__name__
            ended.why = (
                f"{what} after step {ended.done}"
                if interrupted or ended.done == run.steps  # as where the last commit fails
                else f"{what} in step {ended.done + 1}"
            )
            # Ranks that share the chain wait in the middle of the step, and learn of it when this one ends.
            if not interrupted or store.place.shares:
                failed = store.rescue(ended.done, ended.why)
                with suppress(Exception):  # what ended the run says more
                    err.draws = finished = store.draws(False, ended.why, ended.last)  # type: ignore[attr-defined]
                    if len(finished):
                        on_disk = ", and on disk" * (store.place.root is not None and not failed)
                        note = f"{len(finished)} finished draws are in the attribute draws of this exception{on_disk}"
                        err.add_note(f"sample: {note}")
                raise
            ended.rescue = True
        if ended.rescue and (failed := store.rescue(ended.done, ended.why)) and store.size:
            checks.warn(f"sample: the last {store.size} draws are in memory only: {failed}")
        store.together(lambda: None)  # until the first rank has written
        return store.draws(ended.done >= run.steps and not ended.rescue, ended.why, ended.last)


class _Ended:
    """How far a run came: what the last whole step returned, its number, why it ended, and whether its draws alone are kept."""

    def __init__(self, last: tuple[Any, Any], done: int) -> None:
        self.last, self.done = last, done
        self.why, self.rescue = "", False


def _steps(run: Run, store: Store, ended: _Ended, watch: Divergence, sigint: Interrupts) -> str:
    """Make steps until the last one, or until something ends the run; returns what did."""
    steps: Any = range(ended.done + 1, run.steps + 1)
    if run.progress:
        steps = with_progress(steps, True, unit="step")
    for n in steps:
        if sigint.asked and not store.place.shares:  # ranks that share a chain end after the same step
            return f"interrupted after step {ended.done}"
        sigint.raises = True
        it = run.made(n, *ended.last)
        loss, wrong = watch.look(it) if it.is_draw else (None, "")
        sigint.raises = False
        if wrong:
            checks.warn(f"sample: {wrong}; the run has diverged and ends here. Lower lr")
            ended.rescue = True
            return wrong
        if it.is_draw and run.keep:
            store.add(_beside_its_weight(it, *ended.last), loss)
        ended.last, ended.done = (it.params, it.state), n
        if run.progress and loss is not None:
            steps.set_postfix(loss=f"{loss.mean().item():.4g}", refresh=False)
        if (run.callbacks or store.heeds) and (why := _ended_by_callback(run, store, it, sigint)):
            ended.rescue = why == "interrupted"  # a callback may not have seen this step, which is made again
            return f"{why} after step {n}"
        if store.maybe_checkpoint(it, sigint.asked):
            return f"interrupted after step {n}"
    return ""


def _ended_by_callback(run: Run, store: Store, it: Iteration, sigint: Interrupts) -> str:
    """Why the run ends after this step, because of a callback on any of the ranks that share the chain; else empty.

    What one raises there ends it on all of them; Ctrl-C is no error.
    """

    def called() -> str:
        sigint.raises = True
        try:
            return "a callback ended it" if any([callback(it) is True for callback in run.callbacks]) else ""
        except KeyboardInterrupt:
            return "interrupted"
        finally:
            sigint.raises = False

    every = answers(store.place.mesh, called) if store.heeds else [called()]
    return next(why for why in ("interrupted", "a callback ended it", "") if why in every)


def _beside_its_weight(it: Iteration, params: Any, state: Any) -> Iteration:
    """The draw whose weight the step reported, if it did: the parameters that it started from.

    Raises:
        ValueError: the step has overwritten them.
    """
    if not isinstance(getattr(it.info, "weight", None), torch.Tensor):
        return it
    if any([x is y for x, y in zip(optree.tree_leaves(params), optree.tree_leaves(it.params))]):
        raise ValueError(
            "sample: the draws of this chain have weights, which belong to the parameters that a step starts from, and this "
            "step overwrites them; make it with inplace=False, and not captured"
        )
    return it._replace(params=params, state=state)


class Interrupts:
    """The handler of ``SIGINT`` while a run makes its steps and commits its draws.

    Attributes:
        asked: whether Ctrl-C came.
        raises: whether a second one raises ``KeyboardInterrupt``: while code runs that may take long and that commits nothing.
    """

    asked = raises = False

    def handle(self, number: int, frame: Any) -> None:
        """Take note; raise if asked before, once."""
        if self.asked and self.raises:
            self.raises = False  # what is rescued now is not to be interrupted
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Handle ``SIGINT`` until the block ends, if Python does; only the main thread gets signals."""
    out, is_main = Interrupts(), threading.current_thread() is threading.main_thread()
    # None: a handler in C, as where Python runs inside of another program, which could not be put back
    is_ours = is_main and signal.getsignal(signal.SIGINT) is not None
    before = signal.signal(signal.SIGINT, out.handle) if is_ours else None
    try:
        yield out
    finally:
        out.raises = False
        if is_ours:
            signal.signal(signal.SIGINT, before)


FACTOR, IN_A_ROW, FEWEST, MOST, REFRESH = 100.0, 3, 5, 64, 4


class Divergence:
    r"""Looks at every draw of a run: one that is not finite, or a loss that has left what the temperature allows, ends it.

    At stationarity the loss of ``P`` parameters lies about ``T P / 2`` above its minimum. With ``m`` the median of the losses
    of the draws so far, ``d`` the median of their distances from ``m``, a draw is out of bounds where

        loss - m  >  100 (T P / 2 + d)

    and a chain has diverged after three such draws in a row: one may be a minibatch of outliers. Nothing is said at ``T = 0``
    or where the temperature is not known, before five draws have been made, or of a loss that falls, as from a cold start. The
    medians are found anew at every fourth loss that joins the history, which is a function of the losses of the draws: a run
    that goes on reads them, and ends where it would have ended.

    Args:
        run: whose draws these are.
        losses: of the draws that it has made before, ``[S, chains]``.
        state: after the last of them.

    Attributes:
        losses: of some draws, spread over the whole run: at most ``MOST``, one row of chains each.
        row: for each chain, how many draws in a row are out of bounds; ``None`` where no chain's last one is.
        replicated: whether every rank has a replica under DistributedDataParallel, and the loss of its own data.
    """

    def __init__(self, run: Run, losses: Tensor | None = None, state: Any = None) -> None:
        self.run = run
        self.replicated = world().size > 1 and bool(spread_parts(getattr(run.step, "model", None), REPLICATED))
        self.losses: list[Tensor] = []
        self.bounds: tuple[Tensor, Tensor] | None = None  # of some of them: their median m, and m + 100 d
        self.stride, self.seen = 1, 0
        self.row: Tensor | None = None
        before = [] if losses is None else list(losses.double().flatten(1).cpu())
        for i, loss in enumerate(before):  # only the last draws can be in a row that goes on
            if i > len(before) - IN_A_ROW:
                self._exploded(0, loss, state)
            self._keep(loss)

    def look(self, it: Iteration) -> tuple[Tensor | None, str]:
        """The loss of a draw, which is the mean over the ranks that share its chain, and what is wrong with it on any of them.

        Nothing is wrong with a draw that may be kept.
        """
        loss = getattr(it.info, "loss", None)
        loss = whole(loss.detach()) if isinstance(loss, Tensor) else torch.zeros(0, device="cpu")
        leaves = optree.tree_leaves(it.params)
        found, finite = loss.reshape(-1).to("cpu", torch.float64), found_finite(map(local, leaves))
        if self.replicated or any(map(is_dtensor, leaves)):
            # One message: a rank whose part is not finite makes the last number NaN on all of them.
            told = torch.cat([found, torch.tensor([0.0 if finite else torch.nan], dtype=found.dtype, device="cpu")])
            told = mean_everywhere(told.to(loss.device), leaves).cpu()
            found, finite = told[:-1], bool(torch.isfinite(told[-1]))
            loss = found.reshape(loss.shape).to(loss)
        mean = loss.clone() if loss.numel() else None  # a captured step overwrites its own
        if not all(map(math.isfinite, found.tolist())):
            return mean, f"the loss of step {it.step} is {_shown(found)}"
        if not finite:
            return mean, f"the parameters after step {it.step} are not finite"
        said = self._exploded(it.step, found, it.state)
        self._keep(found)
        return mean, said

    def _exploded(self, step: int, loss: Tensor, state: Any) -> str:
        """What is wrong with the losses of a draw, one for each chain, as those before it were."""
        # nearly always: the rest is worked out where it is needed
        if self.bounds is None or not bool((loss > self.bounds[1]).any()):
            self.row = None
            return ""
        elements = sum(x.numel() for x in optree.tree_leaves(self.run.params)) // (self.run.chains or 1)
        (median, bound), heat = self.bounds, temperature_of(self.run.step, state) * elements / 2
        out = loss > bound + FACTOR * heat if heat else torch.zeros_like(loss, dtype=torch.bool)
        self.row = torch.where(out, (0 if self.row is None else self.row) + 1, 0)
        if int(self.row.max()) < IN_A_ROW:
            return ""
        i = int(torch.where(self.row >= IN_A_ROW, loss - median, -torch.inf).argmax())
        chain = f" of chain {i}" if len(loss) > 1 else ""
        return (
            f"the loss{chain} of step {step} is {loss[i]:.4g}, where the median of this run is {median[i]:.4g} and T P / 2 "
            f"is {heat:.3g}"
        )

    def _keep(self, loss: Tensor) -> None:
        """Keep the losses of every so many draws."""
        if self.seen % self.stride == 0:
            self.losses.append(loss)
            if len(self.losses) >= FEWEST and len(self.losses) % REFRESH == FEWEST % REFRESH:
                history = torch.stack(self.losses)
                median = history.median(0).values
                self.bounds = median, median + FACTOR * (history - median).abs().median(0).values
            if len(self.losses) > MOST:
                self.losses, self.stride = self.losses[::2], 2 * self.stride
        self.seen += 1


def temperature_of(step: Any, state: Any) -> float:
    """The highest temperature that is in force; 0 where nobody knows."""
    each, inner = (getattr(uncaptured(step), "each", None) or {}).get("temperature"), of_one_chain(step)
    groups = getattr(getattr(inner, "optimizer", None), "param_groups", ())
    told = [g["temperature"] for g in groups if isinstance(g.get("temperature"), (int, float))]
    if each is not None or told:
        return float(max(told) if each is None else each.max())
    try:
        zero = torch.zeros((), dtype=torch.float64, device="cpu")
        return float(temperature(getattr(inner, "tx", None), state, zero).max())
    except (RuntimeError, TypeError, ValueError):  # a schedule of stacked counts, or no chain
        return 0.0


def _shown(loss: Tensor) -> str:
    bad = [i for i, ok in enumerate(torch.isfinite(loss).tolist()) if not ok]
    return str(loss.item()) if loss.numel() == 1 else f"not finite in chains {bad[:8]}{'...' if len(bad) > 8 else ''}"


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
