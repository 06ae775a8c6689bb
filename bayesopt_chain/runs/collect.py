"""Collecting draws in a loop that somebody else owns: a plain one, Lightning's, or that of ``transformers``."""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import closing, nullcontext
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bayesopt_chain import checks
from bayesopt_chain.distributed.ranks import mesh_of, world
from bayesopt_chain.loop.module_state import ModuleState
from bayesopt_chain.modules import in_mode, inner_of, logits_of, make_functional
from bayesopt_chain.runs.draws import Draws, Reduce
from bayesopt_chain.runs.folder import STEP, Folder, drawn
from bayesopt_chain.runs.run import Iteration, ResumableBatches, Run, describe_optimizer, require_same
from bayesopt_chain.runs.store import SHARD_BYTES, Place, Store, gathered, require_given_alike
from bayesopt_chain.trees import are_spread

_COUNTING = checks.Kind(lambda x: hasattr(x, "global_step"), "what a trainer gives its callbacks, with global_step")
AGAIN = 1.0  # seconds after which draws that could not be written are tried again, at least
_models: weakref.WeakKeyDictionary[Any, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()  # by optimizer
_writing: weakref.WeakSet[Any] = weakref.WeakSet()  # collectors of this process that have a folder


class Collector:
    """What :func:`collect` returns.

    Attributes:
        step: the number of optimizer steps that were seen.
        every, after, path: as given.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any, every: int, after: int, path: Path | None, seconds: float
    ) -> None:
        self.model, self.every, self.after, self.path, self.seconds = model, every, after, path, seconds
        self.step: int = 0
        self.collects = world().rank == 0
        self.counts = optimizer is not None  # whether the optimizer tells of its steps
        self.known = path is None or not self.collects  # whether it is known where the loop stands
        self.compared = False  # whether ranks that hold parts of the model were found to keep draws of the same steps
        run = Run(None, self._params(), (), ResumableBatches(None), 0, after, every)  # type: ignore[arg-type]
        place = Place() if path is None or not self.collects else Place(path, path)
        self.store, self.folder = Store(run, place, seconds), None
        mine = weakref.WeakMethod(self.__call__)
        if place.root is not None:
            for other in [x for x in _writing if x.path == path]:  # as where a cell of a notebook is run again
                other.try_to_flush()
            self.folder = self._continue(place.root, optimizer)
            _writing.add(self)
            # At the end of the process too. What atexit got last runs first, and so before optree forgets what a tree is;
            # processes of multiprocessing have a list of their own
            Finalize(None, atexit.register(weakref.finalize(self, _let_go, vars(self))), exitpriority=0)
        if optimizer is not None:
            _models[optimizer] = weakref.ref(model)
            self.hook = optimizer.register_step_post_hook(
                lambda optimizer, *_: (look := mine()) and look(None, optimizer)
            )

    def _continue(self, path: Path, optimizer: Any) -> Folder:
        """Take over the draws that an earlier process left; the lock is given back until the next draws are written."""
        store = self.store
        # A scheduler keeps the rate that it began with; whole tensors are written, whatever the module's are.
        store.identity["chain"] = None if optimizer is None else describe_optimizer(optimizer, ("initial_lr",))
        store.identity["sharded"] = False
        with closing(Folder(path)) as folder:
            if folder.head is None:
                folder.set_head(store.metadata(folder), {})
            assert folder.head is not None
            require_same(path, folder.head.metadata["identity"], store.identity, "one process")
        store.folders = [folder]
        store.blocks.append((path, None))
        self.step = folder.step
        self.known = self.step == 0
        return folder

    def _params(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}

    def __call__(self, step: int | None = None, optimizer: Any = None) -> None:
        """Look at the model after a step of the optimizer, and keep a copy if it is a draw.

        Args:
            step: the number of the step, from 1, where the loop knows it; by default one more than the last. A number that was
                seen before means that the loop goes on from an earlier checkpoint: draws from there on are made again.
            optimizer: that has made the step, where the collector was made without one. Of one whose parameters are the mean of
                a posterior (:class:`bayesopt_chain.optim.IVON`) a draw from it is kept, number ``step`` of its draws.

        Raises:
            ValueError: in a directory that holds draws, a loop that does not say where it goes on, or that left some out;
                ranks with parts of one model that keep draws of other steps; a model with other leaves, shapes or dtypes
                than before.
        """
        checks.WHOLE.or_none()("collect: step", step)
        if step is None and not self.known:
            raise ValueError(
                f"collect: {self.path or 'this collector'} holds draws up to step {self.step}: say where this loop goes on, "
                "with keep.load_state_dict(saved) of what keep.state_dict() gave, or keep.load_state_dict({'step': n}); a "
                "trainer says it to its callbacks: callbacks=[keep]"
            )
        step = self.step + 1 if step is None else step
        if step - 1 != self.step:
            self.load_state_dict({"step": step - 1})
        is_draw = self.store.run.is_draw(step)
        # where a draw cannot be kept, this step was not seen, and the number of the next one is known to the loop alone
        self.step, self.known = step - is_draw, not is_draw
        if not self.compared:  # behind the first step, since the module may have been sharded after the call
            self.compared, asked = True, {"every": self.every, "after": self.after, "steps so far": step}
            require_given_alike("collect", asked, mesh_of(self._params()))
        if not is_draw:
            return
        sampled = getattr(
            getattr(optimizer, "optimizer", optimizer), "sampled", None
        )  # of accelerate's wrapper what it wraps
        with nullcontext() if sampled is None else sampled(draw=step):
            params = self._params()
            if are_spread(params):  # every rank takes part, also of a module that was sharded after the call
                params = gathered(params, self.collects)
            if self.collects:
                buffers = {name: b.detach() for name, b in self.model.named_buffers()}
                self.store.add(Iteration(step, params, ModuleState((), buffers, ()), None, True))  # type: ignore[arg-type]
        self.step, self.known = step, True
        if self.folder is None:
            return
        since = time.monotonic() - self.store.committed
        if since > self.seconds or (self.store.size * self.store.bytes >= SHARD_BYTES and since > AGAIN):
            self.try_to_flush()

    def try_to_flush(self) -> None:
        """Write the draws that are held, or warn why they stay in memory: a full disk ends no training."""
        try:
            self.flush()
        except (OSError, RuntimeError, ValueError) as err:
            self.store.committed = time.monotonic()
            checks.warn(
                f"collect: the last {self.store.size} draws are in memory only, and are written when that is possible: {err}"
            )

    def flush(self) -> None:
        """Write the draws that are held in memory to ``path``; without one, nothing.

        Raises:
            OSError: the directory cannot be written, was removed, or somebody else has written to it.
            RuntimeError: another process is writing to it.
        """
        store, folder = self.store, self.folder
        if folder is None or os.getpid() != folder.pid or (not store.size and folder.step == self.step):
            return  # a forked child has copies of its parent's draws
        with closing(folder.open()):
            store.commit({}, (), self.step, True)

    def state_dict(self) -> dict[str, int]:
        """Where the loop stands, for its checkpoint; the draws so far are written to ``path``.

        Returns:
            ``{"step": number of steps}``.
        """
        self.try_to_flush()
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a checkpoint: draws of later steps are dropped, and made again.

        Args:
            state: from :meth:`state_dict`.

        Raises:
            ValueError: draws before that step that nobody kept.
        """
        if not isinstance(state, dict) or not isinstance(state.get("step"), int) or state["step"] < 0:
            raise ValueError(
                f"collect: state must be what state_dict gave, {{'step': number of steps}}, got {state!r:.100}"
            )
        step, store, folder = state["step"], self.store, self.folder
        self.known = True
        if folder is None:
            kept = [i for i, x in enumerate(store.held.get(STEP, [])) if int(x) <= step]
            store.held = {name: [rows[i] for i in kept] for name, rows in store.held.items()}
            store.size, self.step = len(kept), step
            return
        self.flush()
        assert folder.head is not None
        if drawn(folder.head.metadata, step) > drawn(folder.head.metadata, self.step):
            raise ValueError(
                f"collect: {self.path} holds the draws up to step {self.step}, and the loop goes on after step {step}: those "
                "between are missing. Save keep.state_dict() with the loop's checkpoints, or collect from here on "
                f"(after={step}) into a directory of its own. A trainer that counts several steps at once, as of two "
                "optimizers, needs every= a multiple of them"
            )
        if step < self.step:
            with closing(folder.open()):
                folder.cut(step)
        self.step = step

    @property
    def draws(self) -> Draws:
        """The draws so far, with the module's buffers (BatchNorm's statistics) that belong to each.

        Returns:
            :class:`Draws`; on ranks other than the first, which collects nothing, none.
        """
        return self.store.draws()

    def predict(
        self,
        batches: Iterable[Any],
        *,
        inputs: str | Callable[[Any], Any] | None = None,
        transform: Callable[[Tensor], Tensor] | None = None,
        reduce: Reduce = "mean",
        chunk: int = 32,
    ) -> Tensor:
        """Average what the model says over the draws, in ``eval`` mode, each draw with its own buffers.

        Args:
            batches: as for :meth:`Draws.predict`.
            inputs: what of a batch the model takes, as for :func:`make_functional`. Of outputs that are no tensor their
                ``logits`` are taken.
            transform, reduce, chunk: as for :meth:`Draws.predict`.

        Returns:
            ``[N, *event]``, or ``[S, N, *event]`` with ``reduce="stack"``.

        Raises:
            ValueError: no draws, or no batches.
        """
        with in_mode(self.model, training=False):
            forward = make_functional(self.model, inputs=inputs, outputs=logits_of).forward
            return self.draws.predict(forward, batches, transform=transform, reduce=reduce, chunk=chunk)

    # Lightning, which calls what a callback has of its hooks

    def on_train_batch_end(self, trainer: Any, *rest: Any, **more: Any) -> None:
        """Look at the model after a batch, if the optimizer has stepped.

        Args:
            trainer: Lightning's, whose ``global_step`` counts the steps of the optimizer.
            rest, more: what Lightning gives besides, which is not looked at.

        Raises:
            TypeError: something that counts no steps.
        """
        _COUNTING("collect: trainer", trainer)
        if not self.counts and trainer.global_step != self.step:
            self(trainer.global_step, trainer.optimizers[0] if len(trainer.optimizers) == 1 else None)

    def on_train_start(self, trainer: Any, *rest: Any) -> None:
        """Learn where the training goes on, before the optimizer's first step.

        Args:
            trainer: Lightning's, whose ``global_step`` counts the steps of the optimizer.
            rest: what Lightning gives besides, which is not looked at.

        Raises:
            TypeError: something that counts no steps.
        """
        self.on_train_begin(None, trainer, None)

    # transformers

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Learn where the training goes on, before the optimizer's first step.

        Args:
            args, control: of the trainer, which are not looked at; nor is ``more``.
            state: the trainer's, whose ``global_step`` counts the steps of the optimizer.

        Raises:
            TypeError: something that counts no steps.
        """
        _COUNTING("collect: state", state)
        # a training that starts anew counts from 0 and does not say what becomes of the draws that are there
        if self.counts and (state.global_step > self.step or (state.global_step and not self.known)):
            self.load_state_dict({"step": state.global_step})

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Look at the model after a step.

        Args:
            args, control: of the trainer, which are not looked at.
            state: the trainer's, whose ``global_step`` counts the steps of the optimizer.
            more: the trainer's ``optimizer`` among what else it has.

        Raises:
            TypeError: something that counts no steps.
        """
        _COUNTING("collect: state", state)
        if not self.counts:
            self(state.global_step, more.get("optimizer"))

    def on_train_end(self, *rest: Any, **more: Any) -> None:
        """Write what is held, also before a checkpoint of the trainer counts, and when it fails."""
        self.try_to_flush()

    on_fit_end = on_exception = on_save = on_train_end


def with_names(optimizer: Any) -> Any:
    """An optimizer for reading, whose groups know the names of their parameters.

    An optimizer of ``model.parameters()`` has no names; the draws have those that the model has for the same tensors.

    Args:
        optimizer: any.

    Returns:
        The optimizer itself where it has names, or where no collector was made with it that is of its model; else a view of
        it, which shares its state. The optimizer is not changed, so that its state dict and its noise stay as they are.
    """
    reference = _models.get(optimizer)
    model = None if reference is None else reference()
    if model is None or all("param_names" in group for group in optimizer.param_groups):
        return optimizer
    names = {id(p): name for name, p in model.named_parameters()}
    if any(id(p) not in names for group in optimizer.param_groups for p in group["params"]):
        return optimizer
    view = object.__new__(type(optimizer))
    view.__dict__.update(optimizer.__dict__)
    view.param_groups = [
        {**group, "param_names": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups
    ]
    return view


def callback_kind(of: type[Any]) -> type[Any]:
    """The class as one of callbacks of the trainers that have been imported: they ask for their own classes."""
    names = (("lightning.pytorch", "Callback"), ("pytorch_lightning", "Callback"), ("transformers", "TrainerCallback"))
    found = [getattr(sys.modules[module], name, None) for module, name in names if module in sys.modules]
    bases = tuple(dict.fromkeys(base for base in found if isinstance(base, type)))
    return type(of.__name__, (of, *bases), {"__doc__": of.__doc__}) if bases else of


def _let_go(held: dict[str, Any]) -> None:
    """Write what a collector that nobody holds any more has in memory, and say so if it has never seen a step."""
    last = object.__new__(Collector)
    vars(last).update(held)
    if last.counts and not last.step:
        checks.warn(
            f"collect: nothing was kept in {last.path}, for no step was made while what collect returned was held: "
            "keep = bc.collect(...), for as long as draws are to be kept"
        )
    last.try_to_flush()


@checks.takes(
    model=checks.MODULE,
    optimizer=checks.Kind(
        lambda x: hasattr(getattr(x, "optimizer", x), "register_step_post_hook"), "a torch.optim.Optimizer"
    ),
    every=checks.WHOLE,
    after=checks.SEED,
    path=checks.FOLDER.or_none(),
)
def collect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    every: int,
    after: int = 0,
    path: str | Path | None = None,
    checkpoint_seconds: float = 30.0,
) -> Any:
    """Keep draws of a model that some loop samples: its trained parameters, and its buffers (BatchNorm's statistics).

    Args:
        model: the module; nothing of it is changed. Of DTensors, as of ``fully_shard``, every rank calls this: they are
            gathered for the first rank, which alone keeps draws.
        optimizer: any ``torch.optim.Optimizer``: after each of its steps the model is looked at. Of
            :class:`bayesopt_chain.optim.IVON`, whose parameters are a mean, draws of its posterior are kept. Without one call
            ``keep()`` after every step, or hand ``keep`` to a trainer: it is a callback of ``lightning.Trainer`` and of
            ``transformers.Trainer``, whichever was imported before.
        every: a draw is kept every so many optimizer steps.
        after: first steps of which nothing is kept.
        path: a directory for the draws; by default they stay in memory. Where it cannot be written a warning says so, and the
            draws wait in memory. After a restart the trainers say at which step they go on; a plain loop calls
            ``keep.load_state_dict`` with what ``keep.state_dict()`` gave when it saved its checkpoint.
        checkpoint_seconds: with ``path``, how often draws are written.

    Returns:
        A :class:`Collector`: ``keep.draws`` are :class:`Draws` with buffers, and ``keep.predict(loader)`` averages over them.

    Raises:
        TypeError: a model that is no module, or an optimizer that has no hooks.
        ValueError: counts out of range; a directory with draws of another model or optimizer.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        >>> optimizer = bc.optim.SGHMC(model.parameters(), lr=0.01, temperature=1e-3)
        >>> keep = bc.collect(model, optimizer, every=5, after=10)
        >>> for _ in range(30):
        ...     optimizer.zero_grad()
        ...     model(torch.randn(16, 3)).square().mean().backward()
        ...     _ = optimizer.step()
        >>> keep.draws.steps, keep.draws.buffers["1.running_mean"].shape, keep.predict([torch.ones(2, 3)]).shape
        (tensor([15, 20, 25, 30]), torch.Size([4, 4]), torch.Size([2, 1]))
    """
    model = inner_of(model)
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate hands the loop a wrapper, which has no hooks
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("collect: no parameter of model requires a gradient; nothing would be kept")
    return callback_kind(Collector)(
        model, optimizer, every, after, None if path is None else Path(path).absolute(), checkpoint_seconds
    )
