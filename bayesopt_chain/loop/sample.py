r"""Running a sampler: burn-in, thinning, draws in memory or on disk, and going on after an interruption.

A run of ``steps`` steps draws after steps ``burn_in + thinning``, ``burn_in + 2 thinning``, ... . On disk a run is a directory:

    draws-000000.safetensors ...     shards: some consecutive draws each
    checkpoint-000000001000.safetensors     parameters, state, torch's generator and the place in the batches after a step
    index.json                       names the shards and the checkpoint that belong together; replaced last, in one step
    lock                             held while a process writes

Whenever the process dies, the index names whole files, and steps after the checkpoint are run again. The state of a chain
determines its noise, so they give the same draws, bit for bit, on the same machine with the same versions and threads.
"""

from __future__ import annotations

import fcntl
import json
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import optree
import torch
from torch import Tensor

from bayesopt_chain.data.epochs import Epochs
from bayesopt_chain.loop import checkpoint
from bayesopt_chain.loop.draws import BUFFER, INDEX, LEAF, LOSS, STEP, Draws, Shard, read_index
from bayesopt_chain.loop.module_state import buffers_of
from bayesopt_chain.loop.parallel import Parallel
from bayesopt_chain.loop.parts import Follower, Leader, copied, keys_of, place_of

SHARD_BYTES = 1 << 26  # a shard on disk is written when it has grown to this size, or after the interval


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
        path: a directory for the draws; under ``torchrun`` each rank that runs chains of its own has a folder in it, and
            of ranks that share a chain the first one writes. Called again with the same arguments it goes on from its last
            checkpoint, and returns at once when the run is complete; with more ``steps`` it makes the run longer.
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
        RuntimeError: another process writes to ``path``.
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
    feed = Feed(batches)
    run = _Run(step, params, state, feed, steps, burn_in, thinning, chains, callbacks, progress)
    if path is None:
        return run.go(Memory(params))
    place = place_of(Path(path), step)
    disk = Disk(place.folder, params, state, burn_in, thinning, chains, checkpoint_seconds)
    if place.shared is None:
        with disk:
            return run.go(disk)
    with (Follower if place.shared.get_local_rank() else Leader)(disk, place.shared) as shared:
        return run.go(shared)


def _check(steps: int, burn_in: int, thinning: int) -> None:
    for name, value, least in (("steps", steps, 1), ("burn_in", burn_in, 0), ("thinning", thinning, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"sample: {name} must be a whole number, at least {least}, got {value!r}")
    if steps < burn_in + thinning:
        raise ValueError(
            f"sample: steps={steps} ends before the first draw, which comes after burn_in + thinning = {burn_in + thinning} "
            "steps (steps counts all of them, burn-in included)"
        )


class Feed:
    """Batches without end, with a place in them that can be saved and returned to."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches
        self.position = 0
        self.is_one = batches is None or torch.is_tensor(batches) or isinstance(batches, (tuple, Mapping))
        self.is_one = self.is_one or not hasattr(batches, "__iter__")
        if not self.is_one and isinstance(batches, Iterator):
            raise ValueError(
                f"batches: {type(batches).__name__} can be gone through only once; pass bc.epochs(...), a list or a DataLoader"
            )
        if isinstance(batches, list) and not batches:
            raise ValueError("batches: the list is empty")
        self.is_stateful = hasattr(batches, "state_dict") and hasattr(batches, "load_state_dict")
        self.iterator: Iterator[Any] | None = None

    def next(self) -> Any:
        """The next batch."""
        self.position += 1
        if self.is_one:
            return self.batches
        if isinstance(self.batches, list):
            return self.batches[(self.position - 1) % len(self.batches)]
        for _ in range(2):
            if self.iterator is None:
                self.iterator = iter(self.batches)
            try:
                return next(self.iterator)
            except StopIteration:
                self.iterator = None
        raise ValueError(f"batches: {type(self.batches).__name__} gave no batch in a whole pass")

    def state(self) -> dict[str, Any]:
        """The place, as numbers and strings."""
        return {"position": self.position, "loader": self.batches.state_dict() if self.is_stateful else None}

    def seek(self, state: Mapping[str, Any]) -> None:
        """Go to a place that :meth:`state` gave."""
        position = state["position"]
        if self.is_stateful:
            self.batches.load_state_dict(state["loader"])
        elif not self.is_one and not isinstance(self.batches, list):
            warnings.warn(
                f"sample: {type(self.batches).__name__} cannot say where it stands: {position} batches are read and skipped. "
                "If it shuffles, the run goes on with other batches than without the interruption; bc.epochs(...) "
                "resumes exactly",
                stacklevel=4,
            )
            for _ in range(position):
                self.next()
        self.position = position

    def follow(self, state: Mapping[str, Any]) -> None:
        """Go to the place at which another rank stands, in batches of this rank's own.

        Raises:
            ValueError: batches that can be sent to no place but their own.
        """
        if not self.is_stateful:
            self.seek(state)
        elif isinstance(self.batches, Epochs):
            place = {name: state["loader"][name] for name in ("epoch", "offset")}
            self.seek({**state, "loader": {**self.batches.state_dict(), **place}})
        else:
            raise ValueError(
                f"sample: {type(self.batches).__name__} on several ranks cannot be sent to the place where the first rank "
                "resumes; bc.epochs(...) can"
            )


class _Run(NamedTuple):
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

    def go(self, store: Memory | Disk | Leader) -> Draws:
        """All steps that are still to be made, their draws handed to ``store``."""
        params, state, done = store.resume(self)
        last, why, finite = (params, state), "", True
        bar = _bar(self.steps, done) if self.progress else None
        whole = True  # whether the last step was made to its end
        try:
            for it in self.until_interrupted(params, state, done):
                last, done = (it.params, it.state), it.step
                if it.is_draw:
                    loss = getattr(it.info, "loss", None)
                    finite = not torch.is_tensor(loss) or bool(torch.isfinite(loss).all())
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


class Memory:
    """Draws kept in memory, copied as they come."""

    def __init__(self, params: Any) -> None:
        self.names = list(checkpoint.flat(params)[0])
        self.spec = optree.tree_structure(params, none_is_leaf=True)
        self.held: dict[str, list[Tensor]] = {}
        self.size = 0

    def resume(self, run: _Run) -> tuple[Any, Any, int]:
        return run.params, run.state, 0

    def add(self, it: Iteration) -> None:
        """Copy a draw."""
        row = {LEAF + name: x.clone() for name, x in checkpoint.flat(it.params)[0].items()}
        row |= {BUFFER + name: x.detach().clone() for name, x in buffers_of(it.state).items()}
        row[STEP] = torch.tensor(it.step)
        if torch.is_tensor(getattr(it.info, "loss", None)):
            row[LOSS] = it.info.loss.detach().clone()
        for name, x in row.items():
            self.held.setdefault(name, []).append(x)
        self.size += 1

    def pause(self, it: Iteration, feed: Feed) -> None:
        """Between two steps."""

    def finish(self, params: Any, state: Any, step: int, feed: Feed, complete: bool, why: str) -> None:
        """After the last step."""

    def take(self) -> dict[str, Tensor]:
        """What is held, stacked; nothing is held any more."""
        out = {name: torch.stack(rows) for name, rows in self.held.items()}
        self.held, self.size = {}, 0
        return out

    def shards(self) -> tuple[list[Shard], Any, list[str]]:
        size = self.size
        return ([Shard(size, self.take(), None)] if size else []), self.spec, self.names


class Disk(Memory):
    """Draws in a directory; see the module's docstring for its files and what happens when the process dies."""

    def __init__(
        self, path: Path, params: Any, state: Any, burn_in: int, thinning: int, chains: int | None, interval: float
    ) -> None:
        super().__init__(params)
        self.path, self.interval = path, interval
        shapes = {n: [str(x.dtype), list(x.shape)] for n, x in checkpoint.flat((params, state))[0].items()}
        self.identity = {"burn_in": burn_in, "thinning": thinning, "chains": chains, "tree": shapes}
        self.index: dict[str, Any] = {
            "format": checkpoint.FORMAT, **self.identity, "leaves": self.names, "shards": [], "checkpoint": None,
            "step": 0, "complete": False, "why": "", "keys": keys_of(state),
        }  # fmt: skip
        self.committed = time.monotonic()
        self.last: tuple[Any, Any, int] | None = None
        self.bytes = sum(x.nbytes for x in checkpoint.flat(params)[0].values())

    def __enter__(self) -> Disk:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = open(self.path / "lock", "a")
        except OSError as err:
            raise OSError(err.errno, f"sample: cannot write to {self.path}: {err.strerror}") from None
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.lock.close()
            raise RuntimeError(
                f"sample: another process is writing to {self.path}; wait for it, or give this run a directory of its own"
            ) from None
        return self

    def __exit__(self, *error: object) -> None:
        self.lock.close()

    def resume(self, run: _Run) -> tuple[Any, Any, int]:
        """Parameters, state and number of the last step that was committed."""
        self._clear()
        if not (self.path / INDEX).exists():
            return run.params, run.state, 0
        index = read_index(self.path)
        for key, mine in self.identity.items():
            if index.get(key) != mine:
                raise ValueError(f"sample: {self.path} holds another run: {key} {_difference(index.get(key), mine)}")
        for shard in index["shards"]:
            if not (self.path / shard["file"]).exists():
                raise FileNotFoundError(
                    f"sample: the shard {self.path / shard['file']} is missing; restore it from a copy"
                )
        if index["step"] > run.steps:
            raise ValueError(f"sample: {self.path} has made {index['step']} steps already, more than steps={run.steps}")
        self.index = index
        tensors, header = checkpoint.read(self.path / index["checkpoint"])
        scalars = header["scalars"]
        generator = {k: tensors.pop(k) for k in [k for k in tensors if k.startswith("_generator/")]}
        params, state = checkpoint.filled((run.params, run.state), tensors, scalars, index["checkpoint"])
        if index["step"] < run.steps:
            run.feed.seek(header["batches"])
            _set_generators(generator)
            if getattr(run.step, "inplace", False):
                (params, state) = copied((run.params, run.state), (params, state))
        return params, state, index["step"]

    def pause(self, it: Iteration, feed: Feed) -> None:
        """Commit when it is time."""
        if time.monotonic() - self.committed > self.interval or self.size * self.bytes > SHARD_BYTES:
            self._commit(it.params, it.state, it.step, feed, False, "")

    def finish(self, params: Any, state: Any, step: int, feed: Feed, complete: bool, why: str) -> None:
        if step > self.index["step"] or complete != self.index["complete"]:
            self._commit(params, state, step, feed, complete, why)

    def shards(self) -> tuple[list[Shard], Any, list[str]]:
        shards = [Shard(s["draws"], None, self.path / s["file"], s["checksum"]) for s in self.index["shards"]]
        return shards, self.spec, self.names

    def _commit(self, params: Any, state: Any, step: int, feed: Feed, complete: bool, why: str) -> None:
        """Shard, checkpoint, then the index that makes them count; what it no longer names is deleted."""
        index = {**self.index, "shards": list(self.index["shards"]), "step": step, "complete": complete, "why": why}
        if self.size:
            file, size = f"draws-{len(index['shards']):06d}.safetensors", self.size
            crc = checkpoint.write(self.path / file, {n: torch.stack(x) for n, x in self.held.items()}, {"step": step})
            index["shards"].append({"file": file, "draws": size, "checksum": crc})
        index["checkpoint"] = f"checkpoint-{step:012d}.safetensors"
        tensors, scalars = checkpoint.flat((params, state))
        header = {"scalars": scalars, "batches": feed.state()}
        checkpoint.write(self.path / index["checkpoint"], {**tensors, **_generators()}, header)
        checkpoint.write_text(self.path / INDEX, json.dumps(index, indent=1))
        self.index, self.committed = index, time.monotonic()
        self.held, self.size = {}, 0
        self._clear()

    def _clear(self) -> None:
        """Delete what a dead process left, and checkpoints that the index has replaced."""
        index = read_index(self.path) if (self.path / INDEX).exists() else None
        for file in self.path.glob(".*.tmp"):
            file.unlink(missing_ok=True)
        written = [*self.path.glob("draws-*.safetensors"), *self.path.glob("checkpoint-*.safetensors")]
        if index is None and len(written) > 2:  # a first commit leaves two at most
            raise ValueError(
                f"sample: {self.path} holds {len(written)} files of a run but no {INDEX}; use an empty directory"
            )
        keep = set() if index is None else {index["checkpoint"], *(s["file"] for s in index["shards"])}
        for file in written:
            if file.name not in keep:
                file.unlink(missing_ok=True)


def _difference(theirs: Any, mine: Any) -> str:
    if isinstance(theirs, dict) and isinstance(mine, dict):
        for name in sorted({*theirs, *mine}):
            if theirs.get(name) != mine.get(name):
                return f"{name} is {theirs.get(name, 'absent')}, here {mine.get(name, 'absent')}"
    return f"is {theirs!r}, here {mine!r}"


def _generators() -> dict[str, Tensor]:
    """torch's global generators, which dropout and other draws of a model use."""
    out = {"_generator/cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        out |= {f"_generator/cuda{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return out


def _set_generators(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["_generator/cpu"])
    rest = [states[k] for k in sorted(states) if "cuda" in k]
    if rest and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(rest)
