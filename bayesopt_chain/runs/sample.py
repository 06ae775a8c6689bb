"""Running a sampler: burn-in, thinning, draws in memory or on disk, and going on after an interruption.

A run of ``steps`` steps draws after steps ``burn_in + thinning``, ``burn_in + 2 thinning``, ... . On disk a run is a directory,
:mod:`bayesopt_chain.runs.folder`. Whenever the process dies, its files are whole, and steps after the checkpoint are run
again. The state of a chain determines its noise, so they give the same draws, bit for bit, on the same machine with the
same versions and threads.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import optree
from torch import Tensor

from bayesopt_chain import kinds
from bayesopt_chain.data.epochs import Epochs
from bayesopt_chain.loop.capture.captured import Captured
from bayesopt_chain.loop.parallel import Parallel
from bayesopt_chain.runs.advance import go
from bayesopt_chain.runs.arguments import require_callable, require_iterable, require_whole
from bayesopt_chain.runs.divergence import Divergence
from bayesopt_chain.runs.draws import Draws
from bayesopt_chain.runs.place import mesh_in_memory, place_of
from bayesopt_chain.runs.resumable_batches import ResumableBatches
from bayesopt_chain.runs.run import Iteration, Run
from bayesopt_chain.runs.seeds import seeded
from bayesopt_chain.runs.store import Store


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
    _check(step, steps, burn_in, thinning)
    run = Run(step, params, state, ResumableBatches(batches), steps, burn_in, thinning, None, (), False)
    watch = Divergence(run)
    for n in range(1, steps + 1):
        params, state, info = step(params, state, run.batches.next())
        it = Iteration(n, params, state, info, run.is_draw(n))
        if it.is_draw and (wrong := watch.look(it)[1]):
            warnings.warn(f"iterate: {wrong}; the run has diverged and ends here. Lower lr", stacklevel=2)
            return
        yield it


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
        params: where to start. An in-place step overwrites them.
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
        callbacks: called with every :class:`Iteration`; one that returns ``True`` ends the run. What one with ``state_dict``
            and ``load_state_dict`` has seen goes into every checkpoint, and is handed back to it when the run goes on. A
            :class:`bayesopt_chain.diagnostics.HeatGuard` looks at the gradients of one plain chain, and warns on the way.
        keep: ``False`` keeps no draw, in memory or on disk: what the callbacks made of them is all there is. ``Draws.last`` and
            checkpoints are the same. Default: True.
        progress: show a progress bar with steps per second, loss, temperature, the number of draws, and the effective sample
            size and R-hat of the loss so far (needs tqdm; the last two the extra ``diagnostics``).

    Returns:
        :class:`Draws`. Ctrl-C ends the run after the step under way, a second one at once, and both return what there is, with
        ``complete=False``. So do, with a warning, a loss or parameters that are not finite, and a loss that explodes: three
        draws in a row that lie further above the median of the run than 100 times ``T P / 2`` and its spread.

    Raises:
        ValueError: arguments that make no run; a directory with another run, naming what differs; callbacks with a state
            that have not seen its steps; a damaged file.
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
    _check(step, steps, burn_in, thinning)
    if isinstance(step, Parallel) and isinstance(batches, Epochs):
        _require_axis_of_chains(step, batches)
    both: Any = (params, state)
    if wrong := [n for n, x in zip(optree.tree_paths(both), optree.tree_leaves(both)) if _is_meta(x)]:
        where = "/".join(map(str, wrong[0]))
        raise ValueError(
            f"sample: leaf {where} of (params, state) is on the device meta, and has no values: call init under "
            "torch.device('cpu'), or another default device than meta"
        )
    kinds.require("sample", path=(path, kinds.FOLDER.or_none()), keep=(keep, kinds.BOOL))
    for callback in require_iterable("sample", "callbacks", callbacks, "a sequence of functions of an Iteration"):
        require_callable("sample", "callbacks", callback, "a sequence of functions of an Iteration")
    for callback in callbacks:
        if (attached := getattr(callback, "attached", None)) is not None:
            step = attached(step, batches)
    if chains is not None:
        require_whole("sample", "chains", chains, 1)
    seconds: Any = checkpoint_seconds
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not abs(seconds) <= 1e300:
        raise TypeError(f"sample: checkpoint_seconds must be a number of seconds, got {checkpoint_seconds!r:.100}")
    chains = step.n if chains is None and isinstance(step, Parallel) else chains
    if seed is not None:
        state = seeded(state, seed, getattr(step, "numbers", None))
    alone = _innermost(step)
    for owner in (*getattr(getattr(alone, "tx", None), "links", ()), getattr(alone, "optimizer", None)):
        wanted = getattr(owner, "batch_order", None)
        if wanted is not None and getattr(batches, "order", wanted) != wanted:
            raise ValueError(
                f"sample: this sampler is meant for {wanted} batches, and these are {batches.order}: take "
                f"bc.epochs(..., order={wanted!r}), or bc.samplers.ubu, which takes any"
            )
    run = Run(
        step,
        params,
        state,
        ResumableBatches(batches),
        steps,
        burn_in,
        thinning,
        chains,
        callbacks,
        progress,
        seed,
        keep,
    )
    if path is None:
        if (mesh := mesh_in_memory(step, (params, state))) is not None:
            run.batches.share(mesh)
        return _in_store(Store(run))
    place = place_of(Path(path), step, (params, state))
    getattr(step, "_keep_apart", bool)(place.alone and place.rank.size > 1)
    if not place.alone:
        run.batches.share(place.mesh)
    return _in_store(Store(run, place, checkpoint_seconds))


def _in_store(store: Store) -> Draws:
    """A run in its store; first, blocks of chains that are behind the others catch up."""
    with store:
        front, behind = store.behind()
        for blocks in behind:
            caught_up = _in_store(store.some(blocks, front))
            if not caught_up.complete:
                chains, why = store.run.chains, caught_up.why
                return Draws(store.pieces(), store.spec, store.names, chains=chains, complete=False, why=why)
        return go(store.run, store)


def _innermost(step: Any) -> Any:
    """The step of one chain inside ``parallel`` and ``capture``."""
    while isinstance(step, (Parallel, Captured)):
        step = step.step
    return step


def _is_meta(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_meta


def _require_axis_of_chains(step: Parallel, batches: Epochs) -> None:
    """Refuse batches of :func:`bayesopt_chain.epochs` with an axis of chains that the step does not know, or the reverse.

    A loss that is given the batches of all chains at once would often run, on a batch as many times larger.
    """
    if (step.batch_dim is None) != (batches.chains is None):
        raise ValueError(
            f"sample: the step has batch_dim={step.batch_dim!r}, and {batches!r} gives other batches; take "
            f"bc.parallel(step, {step.n}, batch_dim=0) with bc.epochs(..., chains={step.n}), or neither of the two arguments"
        )


def _check(step: Any, steps: int, burn_in: int, thinning: int) -> None:
    require_callable(
        "sample", "step", step, "a step (params, state, batch) -> (params, state, info), as of bc.make_step"
    )
    for name, value, least in (("steps", steps, 1), ("burn_in", burn_in, 0), ("thinning", thinning, 1)):
        require_whole("sample", name, value, least)
    if steps < burn_in + thinning:
        raise ValueError(
            f"sample: steps={steps} ends before the first draw, which comes after burn_in + thinning = {burn_in + thinning} "
            "steps (steps counts all of them, burn-in included)"
        )
