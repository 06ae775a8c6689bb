r"""Run many chains of a step at once (``parallel``), with their parameters and states stacked on axis 0.

Each chain has a noise key of its own. The module also has the functions that stack, unstack and fork states.
"""

from __future__ import annotations

import copy
import itertools
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import optree
import torch
from torch import Tensor

from bayesopt_chain import batches, checks, tracing
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.distributed.ranks import broadcast, chains_of, require_one_axis
from bayesopt_chain.engine.engine import moved
from bayesopt_chain.loop.interrupts import uninterrupted
from bayesopt_chain.loop.loss import Info, LossGradient, detach, gradient, joined, split, unshared, value
from bayesopt_chain.loop.model_draws import seeded
from bayesopt_chain.loop.step import Step
from bayesopt_chain.modules import unshared_statistics
from bayesopt_chain.random import stream as keyed_stream
from bayesopt_chain.random.stream import is_keyed, keyed
from bayesopt_chain.tracing import is_readable
from bayesopt_chain.trees import paths_of

CALL_SCHEDULES = ("bayesopt_chain.schedules", "bayesopt_chain.links.learning_rate")  # files that call a user's schedule


_STACKED = checks.Kind(
    lambda x: checks.TREE.fits(x) and all(leaf.ndim for leaf in optree.tree_leaves(x)),
    "a tree of tensors with the chains on axis 0",
)


class Parallel:
    """``n`` chains of one step, called like the step itself. :meth:`init` makes the states to start from.

    Attributes:
        n: the number of chains on this rank.
        numbers: the numbers of these chains among those of all ranks.
        total: the number of chains on all ranks.
        mesh: the DeviceMesh over whose ranks the chains are distributed; ``None`` for one process.
        rows: the entries of a batch's chain axis that belong to these chains; ``None`` for all of them.
        step: the step of one chain; with ``each``, a function of its keywords that returns the step.
        batch_dim, each, chunk: as in :func:`parallel`.
        run: the function that makes the step of several chains: under vmap, or one chain after the other.
        watched: whether chains are known not to share statistics of BatchNorm, which the first step tests.
        model_draws: whether the loss was seen to draw random numbers.
    """

    def __init__(
        self,
        step: Callable,
        n: int,
        batch_dim: Any,
        each: Mapping[str, Tensor],
        chunk: int | None,
        loop: bool,
        mesh: Any = None,
        numbers: range | None = None,
        total: int | None = None,
        rows: slice | None = None,
    ) -> None:
        self.n = n
        self.mesh = mesh
        self.numbers = range(n) if numbers is None else numbers
        self.total = n if total is None else total
        self.rows = rows
        self.step = step
        self.batch_dim = batch_dim
        self.each = dict(each)
        self.chunk = chunk
        self.run = _loop if loop else _stacked
        self.watched = loop and n == 1
        self.model_draws = False

    @checks.takes(tx=checks.ANY, params=checks.ANY)
    def init(self, tx: Any, params: Any, *, seed: int | None = None) -> Any:
        """Make the states of this rank's chains, each with a key of its own.

        The values of ``each`` are moved to the parameters' device.

        Args:
            tx: the transformation; with ``each``, a function of its keywords that returns the transformation of a chain.
            params: the parameters of this rank's chains, stacked on axis 0.
            seed: makes all draws of ``init`` for a chain a function of the seed and of the chain's number among those of all
                ranks. Default: no seed without a mesh, so that keys are drawn from torch's global generator; on a mesh, a seed
                that the first rank draws.

        Returns:
            The states, stacked on axis 0.

        Raises:
            TypeError: ``tx`` has no ``init``; ``params`` are not stacked tensors.
            ValueError: ``params`` are of another number of chains; ``tx`` has a generator of its own, and there is a seed or a
                mesh.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> tx = bc.sghmc(0.1, temperature=0.5)
            >>> chains = bc.parallel(bc.make_step(lambda params, batch: (params**2).sum(), tx), 3)
            >>> chains.init(tx, torch.ones(3, 2), seed=0)[0].trace[0].shape
            torch.Size([3, 2])
        """
        if not callable(tx if self.each else getattr(tx, "init", None)):
            raise TypeError(
                "parallel: init takes (tx, params), tx being the chain's transformation (with each=, a function of its "
                f"keywords that returns it), got {type(tx).__name__}"
            )
        _STACKED("parallel: init: params", params)
        if wrong := [x.shape for x in optree.tree_leaves(params) if len(x) != self.n]:
            raise ValueError(
                f"parallel: init takes params with the {self.n} chains of this rank on axis 0, got a leaf of {list(wrong[0])}"
            )
        device = optree.tree_leaves(params)[0].device
        self.each = {name: value.to(device) for name, value in self.each.items()}
        states = []
        drawing = _draws(self, seed)
        for i in range(self.n):
            hyper = {k: v[i] for k, v in self.each.items()}
            mine: Any = tx(**hyper) if hyper else tx.tx if isinstance(tx, Step) else tx
            step = self.step(**hyper) if hyper else self.step
            # the step makes the state where it can, since with buffers it adds them and a key of their own
            with drawing(mine, self.numbers[i]):
                start = _take(params, i)
                states.append(step.init(start, tx=mine) if isinstance(step, Step) else mine.init(start))
        return stack(states)

    @checks.takes(tree=_STACKED)
    def mine(self, tree: Any) -> Any:
        """Select this rank's chains from a tree with the chains of all ranks on axis 0.

        With it every rank can draw the starting points of all chains from one seed, and keep its own.

        Args:
            tree: a tree of tensors with one entry for each of the ``total`` chains on axis 0.

        Returns:
            The tree with the entries of this rank's chains.

        Raises:
            TypeError: ``tree`` is no tree of tensors with axes.
            ValueError: a leaf has another number of entries than ``total``.
        """
        if wrong := [x.shape for x in optree.tree_leaves(tree) if len(x) != self.total]:
            raise ValueError(
                f"parallel: mine takes a tree with the {self.total} chains of all ranks on axis 0, got a leaf of "
                f"{list(wrong[0])}"
            )
        return _take(tree, slice(self.numbers.start, self.numbers.stop))

    def some(self, rows: slice) -> Parallel:
        """Select some of the chains by their indices on axis 0. A step of them still takes the batch of all chains."""
        each = {name: value[rows] for name, value in self.each.items()}
        numbers = self.numbers[rows]
        return Parallel(
            self.step,
            len(numbers),
            self.batch_dim,
            each,
            self.chunk,
            self.run is _loop,
            self.mesh,
            numbers,
            self.total,
            rows,
        )

    @property
    def is_stacked(self) -> bool:
        """Whether one call under vmap makes the step of all chains, and the batch has entries for these chains only."""
        return self.run is _stacked and self.rows is None

    def chain_axes(self, batch: Any) -> list[int | None]:
        """Return the chain axis of every leaf of a batch; ``None`` for a leaf that all chains share.

        ``batch_dim`` is an axis for all leaves, or a prefix tree of axes.
        """
        if self.batch_dim is None or isinstance(self.batch_dim, int):
            return [self.batch_dim if isinstance(x, Tensor) else None for x in batches.flatten(batch)[0]]
        return batches.spread(self.batch_dim, batch)

    def mapped(self, change: Callable[[Callable], Callable]) -> Parallel:
        """Return the same chains with ``change(step)`` as the step of one chain."""
        other, make = copy.copy(self), self.step  # a shallow copy keeps n, mesh, numbers and each
        other.step = (lambda **hyper: change(make(**hyper))) if self.each else change(make)
        return other

    def of_any(self, n: int) -> Callable:
        """Return the step of any ``n`` chains as a function.

        Returns:
            A function of params, state and ``(batch, values of each)``, all with the chains on axis 0.
        """

        def step(params: Any, state: Any, batch: Any) -> Any:
            mine, values = batch
            dims = [None if d is None else 0 for d in self.chain_axes(mine)]
            block = Parallel(self.step, n, None, dict(zip(self.each, values)), None, False)
            return _stacked(block, params, state, mine, dims, 0, n)

        return step

    def __call__(self, params: Any, state: Any, batch: Any) -> Any:
        """Make one step of every chain.

        Args:
            params, state: trees with the chains on axis 0.
            batch: the batch of all chains, with the chain axes that ``batch_dim`` gives.

        Returns:
            ``(params, state, Info)``, stacked on axis 0.

        Raises:
            ValueError: a leaf of params or state is not stacked for ``n`` chains, or an axis of the batch does not count them.
            RuntimeError: vmap refuses the step, or the model draws random numbers without a key.
        """
        both: Any = (params, state)
        # vmap takes no None, so that a None is refused here unless the chains run one after the other
        for leaf in optree.tree_leaves(both, none_is_leaf=self.run is _stacked):
            if not isinstance(leaf, Tensor) or leaf.ndim == 0 or leaf.shape[0] != self.n:
                got = f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
                raise ValueError(
                    f"parallel: params and state must be stacked for {self.n} chains on axis 0, got a leaf of {got}; use "
                    "bc.stack([...]) and chains.init(tx, params)"
                )
        dims = self.chain_axes(batch)
        if self.rows is None and any([d is not None for d in dims]):
            self._require_axes(batch, dims)
        if self.rows is not None:
            leaves, spec = batches.flatten(batch)
            pick = (slice(None),)
            mine = [x if d is None else x[pick * (d % x.ndim) + (self.rows,)] for x, d in zip(leaves, dims)]
            batch = spec.unflatten(mine)
        # one block is not concatenated, which would copy every result
        if self.chunk is None or self.chunk >= self.n:
            return self.run(self, params, state, batch, dims, 0, self.n)
        blocks = [
            self.run(self, params, state, batch, dims, i, min(i + self.chunk, self.n))
            for i in range(0, self.n, self.chunk)
        ]
        return optree.tree_map(lambda *leaves: torch.cat(leaves) if torch.is_tensor(leaves[0]) else leaves[0], *blocks)

    def _require_axes(self, batch: Any, dims: Sequence[Any]) -> None:
        """Refuse a batch whose axes ``dims`` do not count these chains: of more entries some would never be used."""
        for x, d in zip(batches.flatten(batch)[0], dims):
            axes = range(-x.ndim, x.ndim) if isinstance(x, Tensor) else ()
            if d is not None and (not checks.INDEX.fits(d) or d not in axes or x.shape[d] != self.n):
                raise ValueError(
                    f"parallel: batch_dim gives axis {d!r} of {checks.short(x)} in the batch, which has to count the {self.n} "
                    "chains of this rank: give each chain an entry, or None for what all of them share"
                )

    def one(self, hyper: dict[str, Tensor], params: Any, state: Any, batch: Any):
        """Make the step of one chain, whose values of ``each`` are ``hyper``."""
        step = self.step(**hyper) if hyper else self.step
        return step(params, state, batch)


def _draws(chains: Parallel, seed: int | None) -> Callable[[Any, int], AbstractContextManager[None]]:
    """Make the context in which ``init`` makes the state of a chain.

    Args:
        chains: the chains.
        seed: the seed; ``None`` draws one on the first rank of a mesh, and leaves the global generator alone without a mesh.

    Returns:
        A function of the chain's transformation and of its number among the chains of all ranks, which returns the context.
    """
    if seed is None and chains.mesh is None:
        return lambda tx, number: nullcontext()
    # a chain may itself be shared by ranks with different data, which have to agree on its key too
    data = getattr(getattr(chains.step, "ranks", None), "mesh", None)
    if seed is None:
        drawn = torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu")
        for mesh in (data, chains.mesh):
            drawn = drawn if mesh is None else broadcast(drawn, mesh)
        seed = int(drawn)

    def drawing(tx: Any, number: int) -> AbstractContextManager[None]:
        if any(getattr(link, "generator", None) is not None for link in getattr(tx, "links", ())):
            raise ValueError(
                "parallel: tx has a generator of its own, from which chains on different ranks would draw the same keys; "
                "build it without generator=, and give the seed to chains.init(tx, params, seed=...)"
            )
        # ``init`` draws keys from torch's global generator, which it takes as no argument
        return seeded(keyed_stream.chain_seed(seed, number))

    return drawing


def _stacked(chains: Parallel, params, state, batch, dims: list, start: int, stop: int):
    """Make the step of the chains from ``start`` to ``stop`` under vmap.

    Args:
        chains: all chains.
        params, state: of all chains, stacked on axis 0.
        batch: the batch of all chains.
        dims: the chain axis of every leaf of the batch, ``None`` for a leaf that all chains share.
        start, stop: the indices of the chains on axis 0.

    Returns:
        ``(params, state, Info)`` of these chains, stacked on axis 0.
    """
    leaves, spec = batches.flatten(batch)
    block = [
        x if d is None or stop - start == chains.n else x.narrow(d, start, stop - start) for x, d in zip(leaves, dims)
    ]
    rows = slice(start, stop)
    hyper = {k: v[rows] for k, v in chains.each.items()}
    rest: list[Any] = []  # vmap returns tensors only; other results of the step are kept here

    def one(hyper, params, state, *leaves):
        tensors, rest[:] = split(chains.one(hyper, params, state, spec.unflatten(leaves)))
        return tensors

    if stop - start < chains.n:
        params, state = _take(params, rows), _take(state, rows)
    try:
        if not hyper and (found := _at_once(chains, params, state, spec, block, dims)) is not None:
            return found
        tensors = torch.vmap(one, in_dims=(0, 0, 0, *dims), randomness="error")(hyper, params, state, *block)
    except RuntimeError as err:
        raise RuntimeError(_vmap_message(err)) from err
    return joined(tensors, rest)


def _at_once(chains: Parallel, params: Any, state: Any, spec: Any, block: list[Any], dims: list) -> Any:
    """Make the step of stacked chains by one backward pass and one pass over memory.

    Returns:
        ``(params, state, Info)``; ``None``, with nothing done, if the step is more than the gradient of a loss and a chain that
        is one engine (:mod:`bayesopt_chain.engine.engine`), if chains have different numbers, or if the model draws.
    """
    step: Any = chains.step
    plain = type(step) is Step and type(step.source) is LossGradient and step.memory is None and step.ranks.mesh is None
    if not plain or step.finite is not None or step.monitor or chains.model_draws:
        return None
    points, structure = optree.tree_flatten(params, none_is_leaf=True)
    if not isinstance(step.tx, Chain) or not tracing.is_plain(*points) or not all([type(p) is Tensor for p in points]):
        return None
    plan = step.tx.plan(state)
    engine = plan.engine and plan.engine.stacked(len(points[0]))
    if engine is None or not points[0].is_cpu or engine.numbers(state, points) is None:
        return None
    if plan.spec != structure:
        plan.require_paths(paths_of(params))
        plan.spec = structure
    rest, seen = [], []  # vmap returns tensors only; other results are kept here
    source: Any = step.source
    observe: Any = step.observe

    def one(params: Any, *leaves: Any) -> tuple[Tensor, list[Tensor]]:
        loss, aux = value(source.loss, params, spec.unflatten(leaves))
        tensors, rest[:] = split(aux)
        return loss, tensors

    def total(params: Any, block: list[Any]) -> tuple[Tensor, Any]:
        losses, tensors = torch.vmap(one, in_dims=(0, *dims), randomness="error")(params, *block)
        return losses.sum(), (losses, tensors)

    def observed(params: Any, grads: Any, *leaves: Any) -> list[Tensor]:
        tensors, seen[:] = split(detach(observe(params, grads, spec.unflatten(leaves))))
        return tensors

    try:
        with nullcontext() if chains.watched else unshared_statistics():
            grads, info = gradient(total, params, block)
        losses, tensors = info.aux
        info = Info(losses, joined(tensors, rest))
        chains.watched = True
        with torch.no_grad():
            if observe is not None:
                given = torch.vmap(observed, in_dims=(0, 0, *dims), randomness="error")(params, grads, *block)
                info = info._replace(observed=joined(given, seen))
            if step.inplace and (observe is not None or tensors):
                aux, given = (unshared(x, params, grads) for x in (info.aux, info.observed))
                info = info._replace(aux=aux, observed=given)
            with uninterrupted() if step.inplace else nullcontext():
                after = moved(plan, params, grads, state, step.inplace, engine)
    except RuntimeError as err:
        chains.model_draws = "randomness error mode" in str(err)  # a chain's key can govern them, one chain at a time
        if chains.model_draws:
            return None
        raise
    return None if after is None else (*after, info)


VMAP_ERRORS = (  # words of torch's message, and what to say of it
    (
        ("randomness error mode",),
        "the model draws random numbers that no chain's key governs, so that a chain's draws would depend on the "
        "others. Of dropout layers, rand_like and randn_like each chain draws its own once its state has a key: "
        "make_step(loss, tx, buffers=buffers) with the buffers of bc.make_functional, and chains.init(tx, params). "
        "Anything else that draws (an LSTM's dropout, alpha dropout) runs with bc.parallel(step, n, loop=True)",
    ),
    (
        ("running_mean should contain",),
        "the model's BatchNorm sees another number of channels than it has ({why}): if an axis of the batch counts "
        "the chains, say which: bc.parallel(step, n, batch_dim=0); the step then gets each chain's own part",
    ),
    (
        ("running_mean", "captured Tensor"),
        "the model writes into a tensor of its own, one for all chains ({why}). For BatchNorm's statistics take "
        "the buffers out with bc.make_functional and make the step with make_step(loss, tx, buffers=buffers); anything "
        "else runs with bc.parallel(step, n, loop=True)",
    ),
    (
        ("",),
        "the step failed under vmap ({why}). If vmap refuses your model, "
        "bc.parallel(step, n, loop=True) runs its chains one after the other",
    ),
)


def _vmap_message(error: RuntimeError) -> str:
    """Return the message for an error under vmap: the cause, and what to do instead."""
    why = str(error).strip().splitlines()[0][:400]
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for caller, called in itertools.pairwise(frames):
        at, of = (frame.f_globals.get("__name__", "") for frame in (caller, called))
        if at in CALL_SCHEDULES and not of.startswith(("bayesopt_chain.", "torch.")):
            code = called.f_code
            return (
                f"parallel: the schedule {code.co_name} ({code.co_filename}:{code.co_firstlineno}) fails on the counts of "
                f"several chains at once ({why}). Compute it by torch (torch.cos in place of math.cos, torch.where in place of "
                "if), or take one of bc.schedules; bc.parallel(step, n, loop=True) runs the chains one after the other"
            )
    said = next(message for words, message in VMAP_ERRORS if any(word in why for word in words))
    return f"parallel: {said.format(why=why)}"


def _loop(chains: Parallel, params, state, batch, dims: list, start: int, stop: int):
    """Make the step of the chains from ``start`` to ``stop``, one after the other; arguments as of :func:`_stacked`."""
    leaves, spec = batches.flatten(batch)
    results = []
    for i in range(start, stop):
        mine = spec.unflatten([x if d is None else x.select(d, i) for x, d in zip(leaves, dims)])
        hyper = {k: v[i] for k, v in chains.each.items()}
        with nullcontext() if chains.watched else unshared_statistics():
            results.append(chains.one(hyper, _take(params, i), _take(state, i), mine))
        made = [{id(x) for x in optree.tree_leaves(new) if torch.is_tensor(x)} for new, *_ in results[-2:]]
        if len(made) > 1 and not made[0].isdisjoint(made[1]):
            raise ValueError(
                "parallel: the step returns the same tensors for two chains, as a captured step does, whose buffers they would "
                "share; make parallel chains of captured.step, and capture these"
            )
        chains.watched = True
    return optree.tree_map(lambda *rows: torch.stack(rows) if torch.is_tensor(rows[0]) else rows[0], *results)


def _take(tree: Any, i: int | slice) -> Any:
    """Index axis 0 of every leaf."""
    return optree.tree_map(lambda t: t[i], tree)


@checks.takes(
    step=checks.Kind(
        # by its name, since the module of that class imports this one
        lambda x: checks.FUNCTION.fits(x) and type(x).__name__ != "Captured",
        "a function of (params, state, batch), and no captured step, whose buffers all chains would share",
        hint="make parallel chains of captured.step, and capture these",
    ),
    n=checks.WHOLE,
    each=checks.MAPPING.or_none(),
    chunk=checks.WHOLE.or_none(),
    loop=checks.BOOL,
    mesh=checks.ANY,
)
def parallel(
    step: Callable,
    n: int,
    *,
    batch_dim: Any = None,
    each: Mapping[str, Tensor] | None = None,
    chunk: int | None = None,
    loop: bool = False,
    mesh: Any = None,
) -> Parallel:
    """Run ``n`` chains of a step at once.

    Args:
        step: from :func:`make_step`, not in place. With ``each``, a function of its keywords that returns a step.
        n: number of chains, at least 1; with a mesh, on all ranks together.
        batch_dim: the axis of the batch's tensors along which the chains are; ``None`` (default) gives every chain the same
            batch. A tree like the batch, or a prefix of it, sets the axis leaf by leaf: with ``batch = (inputs, targets,
            rows)`` and ``batch_dim=(None, None, 0)`` all chains share the data, and each takes its own rows of them.
        each: hyperparameters with one value for each chain, ``{"temperature": tensor of shape [n], ...}``. Learning rates
            and temperatures can differ. Numbers on which a shape or a branch of the program depends must be the same for all.
        chunk: the largest number of chains to run at the same time, to bound the memory. Default: all of them.
        loop: run one chain after the other, for models that vmap refuses (in-place operations, branches on data, the
            dropout of fused attention or of an LSTM). The arguments and results are the same. Default: False.
        mesh: a DeviceMesh of one axis over whose ranks the ``n`` chains are distributed. ``chains.numbers`` are the numbers of
            this rank's chains. Parameters, states, draws and the chain axis of a batch are those of this rank's chains;
            ``each`` is given for all ``n``. Chain ``i`` draws the same noise on any number of ranks. Default: one process.

    If the step was made with ``buffers=``, each chain has its own statistics of BatchNorm; otherwise a module in ``train``
    mode is refused. The random numbers of the model depend on the key of each chain, so that dropout leaves out the same units
    of a chain whether it runs alone or among others.

    Returns:
        A function like the step, of parameters and states stacked on axis 0, with ``init(tx, params)`` for the states. Every
        chain draws the noise that it would draw alone. The noise of all chains is drawn in one call.

    Raises:
        RuntimeError: at a call, vmap refuses the step, or the step draws random numbers without a key.
        ValueError: an argument is out of range; the mesh has more ranks than chains, or several axes; at a call, the chains
            would share statistics of BatchNorm.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> def tx(temperature):
        ...     return bc.sghmc(0.1, temperature=temperature)
        >>> def step(temperature):
        ...     return bc.make_step(lambda params, batch: (params**2).sum(), tx(temperature))
        >>> chains = bc.parallel(step, 3, each={"temperature": torch.tensor([0.0, 0.5, 1.0])})
        >>> params = torch.ones(3, 2)
        >>> params, state, info = chains(params, chains.init(tx, params), ())
        >>> params[0], info.loss.shape
        (tensor([0.8000, 0.8000]), torch.Size([3]))
    """
    if getattr(step, "heat_guard", None) is not None:
        raise ValueError(
            "parallel: a heat guard looks at one chain, and this step has one; make the step of parallel chains without "
            "heat_guard=, and run one chain alone with it"
        )
    if each and isinstance(step, Step):
        raise TypeError(
            f"parallel: with each=, step is a function of {', '.join(each)} that returns the step of a chain, got a step; its "
            "transformation is made there, of these values"
        )
    for name, given in (each or {}).items():
        if not torch.is_tensor(given) or given.shape[:1] != (n,):
            raise ValueError(f"parallel: each[{name!r}] must be a tensor with {n} entries along axis 0, got {given!r}")
    if mesh is None:
        return Parallel(step, n, batch_dim, each or {}, chunk, loop)
    require_one_axis(mesh, "parallel")
    numbers = chains_of(n, mesh)
    mine = {name: value[numbers.start : numbers.stop] for name, value in (each or {}).items()}
    return Parallel(step, len(numbers), batch_dim, mine, chunk, loop, mesh, numbers, n)


_TREES = checks.Kind(
    lambda x: (
        checks.SEQUENCE.fits(x)
        and len(x) > 0
        and all(isinstance(leaf, Tensor) for leaf in optree.tree_leaves(cast(Any, list(x)), none_is_leaf=True))
    ),
    "a list of trees of tensors, and at least one",
)


@checks.takes(trees=_TREES)
def stack(trees: Sequence[Any]) -> Any:
    """Stack trees of the same structure on a new axis 0.

    Args:
        trees: parameters, or states of chains. Each state must have a key of its own: copies of one state would draw the same
            noise.

    Returns:
        The tree whose leaves have a further axis 0.

    Raises:
        TypeError: ``trees`` is no list of trees of tensors.
        ValueError: two states have the same key.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> bc.stack([{"w": torch.zeros(2)}, {"w": torch.ones(2)}])["w"].shape
        torch.Size([2, 2])
    """
    trees = list(trees)
    for place in zip(*(keyed(tree) for tree in trees)):
        keys = [entry.key.item() for entry in place if is_readable(entry.key) and entry.key.ndim == 0]
        if len(set(keys)) < len(keys) and any(keys):  # a link that draws nothing has the key 0
            raise ValueError(
                "stack: two states have one key, so that their chains would draw the same noise; give each a key of its own: "
                "bc.stack(bc.fork(state, n))"
            )
    return optree.tree_map(lambda *leaves: torch.stack(leaves), *trees)


def unstack(tree: Any) -> list[Any]:
    """Split a tree along axis 0 of its leaves into a list of trees, the inverse of :func:`stack`.

    Args:
        tree: parameters, states, buffers or draws, stacked on axis 0.

    Returns:
        A list with one tree for each entry of axis 0; the tensors are views.

    Raises:
        ValueError: a leaf has no axis 0, or leaves have axes 0 of different lengths.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> bc.unstack({"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])})[1]
        {'w': tensor([3., 4.])}
    """
    leaves, structure = optree.tree_flatten(tree)
    lengths = [x.shape[0] if isinstance(x, Tensor) and x.ndim else None for x in leaves]
    if not leaves or None in lengths or len(set(lengths)) > 1:
        named = zip(paths_of(tree)[:4], lengths)
        shown = "; ".join(f"{path or 'the tensor'} has {n or 'none'}" for path, n in named)
        raise ValueError(
            f"unstack: every leaf needs an axis 0 of one length, but {shown or 'the tree is empty'}; pass what bc.stack or "
            "bc.parallel made"
        )
    rows = zip(*[x.unbind() for x in leaves])
    return [structure.unflatten(list(row)) for row in rows]


_FORKABLE = checks.Kind(
    lambda x: (
        (isinstance(x, Tensor) or not optree.tree_is_leaf(x, none_is_leaf=True))
        and not (isinstance(x, Mapping) and ("param_groups" in x or {"optimizer", "step"} <= x.keys()))
    ),
    "the state of a chain, or a tree that holds such (that of bc.optim is loaded into an optimizer for each chain, whose "
    "method fork() renews the key)",
    (Mapping,),
)


@checks.takes(state=_FORKABLE, n=checks.number("[1, 16777216]", integer=True), generator=checks.GENERATOR)
def fork(state: Any, n: int, *, generator: torch.Generator | None = None) -> list[Any]:
    """Copy a state for chains that draw different noise: each copy has the same velocities and averages, and a new key.

    Args:
        state: the state of a chain, or any tree that holds such states, as ``state_dict()`` of ``bc.SGD``. A chain of
            ``bc.optim`` has a method ``fork`` of its own.
        n: number of copies, at least 1.
        generator: source of the keys (default: torch's global generator).

    Returns:
        A list of ``n`` states. Each has a new key, the first too; of stacked chains a new one for each of them.

    Raises:
        TypeError: ``state`` is no tree of tensors.
        ValueError: ``n`` is below 1; the state of an optimizer of ``bc.optim``.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, params = bc.sghmc(0.1, temperature=0.01), torch.zeros(2)
        >>> a, b = bc.fork(tx.init(params), 2)
        >>> bool(a[1].key == b[1].key)
        False
    """

    def renewed(entry: Any) -> Any:
        """Copy a tensor, or an entry of the state with a new key."""
        if is_keyed(entry):
            inner: Any = optree.tree_map(torch.clone, entry._replace(key=()))
            keys = [keyed_stream.new_key(generator, entry.key.device) for _ in range(entry.key.numel())]  # one a chain
            return inner._replace(key=torch.stack(keys).reshape(entry.key.shape))
        return entry.clone() if isinstance(entry, Tensor) else entry

    tree: Any = state
    return [optree.tree_map(renewed, tree, is_leaf=is_keyed) for _ in range(n)]


def seeded_state(state: Any, seed: int, numbers: range | None) -> Any:
    """A state whose random streams have keys that depend on a seed, on the chain, and on the place of the stream.

    Args:
        state: of one chain, or of chains stacked on axis 0.
        seed: a whole number.
        numbers: the global numbers of stacked chains.

    Returns:
        A state with new keys; a key of 0, where nothing is drawn, stays.

    Raises:
        ValueError: a state without a random stream.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> state = bc.sghmc(0.1, temperature=0.1).init(torch.zeros(2))
        >>> bool(seeded_state(state, 1, None)[1].key == seeded_state(state, 1, None)[1].key)
        True
    """
    place = 0

    def renewed(entry: Any) -> Any:
        nonlocal place
        if not is_keyed(entry):
            return entry
        place += 1
        stream = keyed_stream.chain_seed(seed, place)
        rows = list(numbers) if numbers is not None and entry.key.ndim else list(range(entry.key.numel()))
        keys = torch.tensor(
            [keyed_stream.chain_seed(stream, i) for i in rows], dtype=entry.key.dtype, device=entry.key.device
        )
        return entry._replace(key=torch.where(entry.key == 0, entry.key, keys.reshape(entry.key.shape)))

    out = optree.tree_map(renewed, state, is_leaf=is_keyed)
    if not place:
        raise ValueError(
            "sample: seed= sets the keys of the state's random streams, and this state has none: give the optimizer "
            "generator=torch.Generator().manual_seed(seed) instead"
        )
    return out
