"""What a run is of: what was asked for, what each of its steps gives, its batches, and its identity.

Batches have a place that can be saved. The identity is JSON that compares: enough to refuse another run under the same path.
Known are burn-in and thinning; shapes and dtypes; the chain with every hyperparameter, its stream and its schedules, or an
optimizer with its groups; the data, by their number, shapes and the checksum of all that are tensors in memory; order and
seed of the epochs; the name and the code of the loss, a function or an object that is called, and what it sees; a seed, where
one was given. What cannot be known, such as the data of a stream, is ``None`` or "unknown", and is not compared.

A description is made of structure, never of ``repr``: a class and those of its fields that are not at their defaults. Two
descriptions are compared by :func:`difference`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import math
import sys
import types
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import optree
import torch
from torch import Tensor
from torchopt.base import GradientTransformation

from bayesopt_chain import checks
from bayesopt_chain._torch import is_dtensor, local
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.data.epochs import Epochs
from bayesopt_chain.distributed.ranks import bytes_of, gather_objects, hash_of_bits
from bayesopt_chain.loop.capture.captured import Captured
from bayesopt_chain.loop.parallel import Parallel
from bayesopt_chain.random.stream import keyed, without_wrappers
from bayesopt_chain.runs import files
from bayesopt_chain.trees import are_spread


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
class Stateful(Protocol):
    """A callback that has a state, which goes into every checkpoint: a run that goes on hands it back.

    So it sees every step once: after an interruption the steps behind the checkpoint are made again, and it is called again.
    """

    def __call__(self, it: Iteration, /) -> Any:
        """Look at a step."""

    def state_dict(self) -> Any:
        """Tensors, numbers, strings, and dictionaries, lists and tuples of them.

        Where parameters are DTensors every rank is asked, and all have to give the same: whole tensors, and sums over ranks.
        """

    def load_state_dict(self, state: Any, /) -> Any:
        """Go on from what :meth:`state_dict` gave."""


class Run(NamedTuple):
    """What :func:`sample` was asked for, with its arguments' names."""

    step: Callable
    params: Any
    state: Any
    batches: ResumableBatches
    steps: int
    burn_in: int
    thinning: int
    chains: int | None = None
    callbacks: Sequence[Callable[[Iteration], Any]] = ()
    progress: bool = False
    seed: int | None = None
    keep: bool = True

    @property
    def stateful(self) -> list[Stateful]:
        """Those of the callbacks that have a state."""
        return [x for x in self.callbacks if isinstance(x, Stateful)]

    @property
    def seers(self) -> list[str]:
        """Their classes, by name."""
        return [type(x).__qualname__ for x in self.stateful]

    def is_draw(self, step: int) -> bool:
        """Whether the parameters after this step are kept."""
        return step > self.burn_in and (step - self.burn_in) % self.thinning == 0

    def made(self, n: int, params: Any, state: Any) -> Iteration:
        """Make step number ``n``."""
        params, state, info = self.step(params, state, self.batches.next())
        return Iteration(n, params, state, info, self.is_draw(n))

    def some(self, rows: slice, steps: int) -> Run:
        """The same run for some of its chains, up to a step. Callbacks are left out: they expect all chains."""
        both: Any = (self.params, self.state)
        params, state = optree.tree_map(lambda x: x[rows], both)
        step, chains = uncaptured(self.step).some(rows), rows.stop - rows.start
        return self._replace(step=step, params=params, state=state, steps=steps, chains=chains, callbacks=())


class ResumableBatches:
    """Batches without end, with a place in them that can be saved, returned to, and handed to another number of ranks.

    Ranks that share a chain have each the batches of its own part of the data; ``whole`` is what they have together.
    """

    def __init__(self, batches: Any) -> None:
        self.batches = batches
        self.position = 0
        self.is_one = isinstance(batches, (torch.Tensor, tuple, Mapping)) or not hasattr(batches, "__iter__")
        if isinstance(batches, Iterator) and not self.is_one:
            raise ValueError(
                f"batches: {type(batches).__name__} can be gone through only once; pass bc.epochs(...), a list or a DataLoader"
            )
        if isinstance(batches, list) and not batches:
            raise ValueError("batches: the list is empty")
        self.is_stateful = hasattr(batches, "state_dict") and hasattr(batches, "load_state_dict")
        # a loader reads ahead, so that its epochs stand behind the batches that were used
        sampler = getattr(batches, "batch_sampler", None)
        self.sampler = sampler if isinstance(sampler, Epochs) and not self.is_stateful else None
        self.origin = _seen(self.sampler)
        self.iterator: Iterator[Any] | None = None
        self.whole = _together([self._part()])
        self.start = self.state()

    def share(self, mesh: Any) -> None:
        """Learn what the batches of all ranks of a mesh are together, by one message.

        Raises:
            ValueError: ranks that go through parts of the data in one order, or of which some share batches and some do not.
        """
        self.whole = _together(gather_objects(self._part(hashed=True), mesh))
        self.start = self.state()

    def _part(self, hashed: bool = False) -> dict[str, Any]:
        """What this rank's batches are of; with a hash of the data where these are shuffled tensors, and it is asked for."""
        mine = self.batches
        if not isinstance(mine, Epochs):
            return {}
        shuffled = mine.leaves if hashed and mine.order != "fixed" else None
        return {
            "data": mine.size,
            "batch": mine.batch_size,
            "order": mine.order,
            "shared": mine.ranks > 1,
            "seed": mine.seed,
            "bits": None if shuffled is None else [hash_of_bits(x) for x in shuffled],
        }

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
        loader = self.batches.state_dict() if self.is_stateful else None
        # Parts of the data may have epochs of other lengths: all ranks have seen as many batches since epoch 0.
        seen = _seen(self.batches) if self.origin is None else self.origin + self.position
        return {"position": self.position, "seen": seen, "loader": loader, "whole": self.whole}

    def rewind(self) -> None:
        """Go back to the beginning."""
        if self.position:
            self.seek(self.start)

    def seek(self, state: Mapping[str, Any], own: bool = True) -> None:
        """Go to a place that :meth:`state` gave, on this number of ranks or on another.

        Args:
            state: the place.
            own: whether it is one in these batches; else it is that of another rank, in batches of its own.

        Raises:
            ValueError: a place in other batches.
        """
        position, self.iterator = state["position"], None
        if self.is_stateful:
            self._seek_loader(state, state["whole"], own)
        elif self.sampler is not None and state["seen"] is not None:
            self.sampler.seek(state["seen"])
            self.origin = state["seen"] - position
        elif not self.is_one and not isinstance(self.batches, list):
            if position:
                checks.warn(
                    f"sample: {type(self.batches).__name__} cannot say where it stands: {position} batches are read and "
                    "skipped. If it shuffles, the run goes on with other batches than without the interruption; "
                    "bc.epochs(...) resumes exactly"
                )
            for _ in range(position):
                self.next()
        self.position = position

    def _seek_loader(self, state: Mapping[str, Any], theirs: Mapping[str, Any], own: bool) -> None:
        as_many = theirs["ranks"] == self.whole["ranks"]
        if own and as_many:
            self.batches.load_state_dict(state["loader"])
            return
        if not isinstance(self.batches, Epochs):
            raise ValueError(
                f"sample: {type(self.batches).__name__} stood somewhere in the batches of one of {theirs['ranks']} ranks, and "
                f"{self.whole['ranks']} share the data now: give each rank bc.epochs(...) of its part, which can be sent to "
                "the place of another, and shared out anew"
            )
        if differing := [n for n in self.whole if n != "ranks" and not as_many and theirs.get(n) != self.whole[n]]:
            told = ", ".join(f"{name}={theirs.get(name)!r} (here {self.whole[name]!r})" for name in differing)
            raise ValueError(
                f"sample: the batches of {theirs['ranks']} ranks were together of {told}: share the same data out over "
                f"{self.whole['ranks']}, with batches that are as large together"
            )
        self.batches.seek(state["seen"])


def _seen(batches: Any) -> int | None:
    """How many batches came before the next one, from epoch 0 on, where that is known."""
    return batches.epoch * len(batches) + batches.offset if isinstance(batches, Epochs) else None


def _together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """How many ranks share the data, and of how many data they have batches of which size.

    Raises:
        ValueError: ranks that go through parts of the data by one permutation; or of which some have ``mesh=`` and some not.
    """
    shared = {part.get("shared", False) for part in parts}
    if len(shared) > 1:
        raise ValueError("sample: some ranks gave bc.epochs a mesh=, and some did not: give it on all of them")
    seen: dict[Any, Any] = {}
    for part in parts if shared == {False} else ():
        if part.get("bits") is not None and seen.setdefault(part["seed"], part["bits"]) != part["bits"]:
            raise ValueError(
                f"sample: ranks go through different parts of the data with one seed, {part['seed']}, and so in one order; of "
                "sorted data their batches are alike, and the gradients' noise is up to as many times too large as there are "
                "ranks. Give bc.epochs the whole data on every rank, the batch size of all ranks together, and mesh="
            )
    if not all(parts):
        return {"ranks": len(parts)}
    own = parts[:1] if shared == {True} else parts  # with mesh= each of them knows the whole data
    return {
        "ranks": len(parts),
        "data": sum(part["data"] for part in own),
        "batch": sum(part["batch"] for part in own),
        "order": "/".join(sorted({part["order"] for part in parts})),
    }


STATE = "1/"  # the paths of a state begin with it in a file of ``(params, state)``
INSTEAD = "give this run a directory of its own"
UNKNOWN = "unknown"
CHOSEN = 1 << 32  # a seed below it was chosen, one above it was drawn: by torch, or by a hash of a rank's number
FEW, DEEP = 16, 12  # numbers of a tensor that are written out; levels of nesting
PYTHON = ".".join(map(str, sys.version_info[:2]))  # byte code of one version alone compares
ATTRIBUTES = 3  # levels of what a callable object holds: it may refer to itself


def identity_of(run: Run, total: int | None) -> dict[str, Any]:
    """What is known of a run, as JSON."""
    step, tensors = uncaptured(run.step), files.flat((run.params, run.state))[0].items()
    each = (getattr(step, "each", None) or {}).items()
    if getattr(step, "grows", False):  # its state has no shapes of its own
        tensors = [(n, x) for n, x in tensors if not n.startswith(STATE)]
    return {
        "burn_in": run.burn_in,
        "thinning": run.thinning,
        "keep": run.keep,
        "total": total,
        "sharded": are_spread((run.params, run.state)),
        "tree": {n: f"{x.dtype} {list(x.shape[run.chains is not None :])}" for n, x in tensors},
        # of chains with hyperparameters of their own what makes them, and those of each chain by its global number
        "chain": chain_of(run.step),
        "each": {
            str(n): {k: x[i].tolist() for k, x in sorted(each)}
            for i, n in enumerate(getattr(step, "numbers", ()) if each else ())
        },
        "data": data_of(run),
        "loss": describe(getattr(of_one_chain(run.step), "loss", None)),
        "seed": run.seed,
    }


def of_one_chain(step: Any, around: Any = (Parallel, Captured)) -> Any:
    """The step of one chain as it was made, without what stands ``around`` it."""
    while isinstance(step, around):
        step = step.step
    return step


uncaptured: Callable[[Any], Any] = functools.partial(of_one_chain, around=Captured)  # of one chain, or of several


def chain_of(step: Any) -> Any:
    """The description of what makes the steps of a chain: links with hyperparameters, or an optimizer with its groups."""
    inner = of_one_chain(step)
    told = getattr(inner, "identity", None)
    return describe(getattr(inner, "tx", None)) if told is None else told


def data_of(run: Run) -> dict[str, Any] | None:
    """Number and shapes of the data, and a checksum of all that are tensors in memory; ``None`` where each chain has its own,
    or nothing is known."""
    batches = run.batches.batches
    if batches is None or getattr(uncaptured(run.step), "batch_dim", None) is not None:
        return None
    held: Any = batches
    about: dict[str, Any] = {"kind": type(batches).__name__}
    if isinstance(batches, Epochs):
        held, about = batches.leaves, {"kind": "epochs", **batches._identity()}
    elif isinstance(batches, torch.utils.data.DataLoader):
        dataset: Any = batches.dataset
        about |= {"size": len(dataset) if hasattr(dataset, "__len__") else None, "batch_size": batches.batch_size}
        while isinstance(dataset, torch.utils.data.Subset):  # as of random_split: other rows are other data
            rows: Any = dataset.indices  # numbers, or keys of a mapping
            # str: the repr of a number of NumPy is not that of the same number, nor that of NumPy 1
            told = "\n".join(map(str, rows.tolist() if hasattr(rows, "tolist") else rows))
            about["rows"] = [*about.get("rows", []), zlib.crc32(told.encode())]
            dataset = dataset.dataset
        if run.batches.sampler is not None:
            about |= run.batches.sampler._identity()
        held = getattr(dataset, "tensors", None)
    elif isinstance(batches, list) or run.batches.is_one:
        about = {"kind": "one batch" if run.batches.is_one else f"{len(batches)} batches"}
    about["ranks"] = run.batches.whole["ranks"]
    if isinstance(held, (Tensor, tuple, list, Mapping)):
        leaves = [x for x in optree.tree_leaves(cast(Any, held)) if isinstance(x, Tensor)]
        about["tensors"] = [_tensor(x) for x in leaves]
    return about


def require_same(folder: Any, theirs: Mapping[str, Any], mine: Mapping[str, Any], ranks: str) -> None:
    """Refuse a folder of another run; warn of a loss whose code has changed.

    Args:
        folder: of the other run, for the message.
        theirs: the identity that stands there.
        mine: that of this run.
        ranks: by how many ranks theirs was run, in words.

    Raises:
        ValueError: naming what differs.
    """
    if theirs["sharded"] != mine["sharded"]:
        kinds = [("plain tensors", "DTensors")[bool(x["sharded"])] for x in (theirs, mine)]
        raise ValueError(
            f"sample: {folder} holds a run of {kinds[0]}, and {kinds[1]} are given: go on with {kinds[0]} (DTensors "
            "on a mesh of one rank will do), or give this run a directory of its own"
        )
    if theirs["total"] != mine["total"]:
        raise ValueError(
            f"sample: {folder} holds a run of {theirs['total'] or 'unnumbered'} chains by {ranks}, and "
            f"{mine['total'] or 'unnumbered ones'} are to be run now: resume with as many, or give this run a "
            f"directory of its own"
        )
    for key in ("burn_in", "thinning", "keep", "chain", "tree", "seed", "each", "data"):
        a, b = cast(Any, theirs.get(key)), mine[key]
        # a seed that is given now would be the run's, which began with keys of its own
        if key not in ("burn_in", "thinning", "keep", "tree") and (b is None or (a is None and key != "seed")):
            continue
        if key == "each" and a and b:  # of the chains that both have
            a, b = ({n: x[n] for n in sorted(a.keys() & b.keys())} for x in (a, b))
        if key != "data" or cast(Any, a).get("ranks") == b["ranks"]:
            _refuse(folder, difference(a, b, "" if key == "chain" else key))
    _compare_losses(folder, theirs, mine)


def _refuse(folder: Any, what: str) -> None:
    if what:
        raise ValueError(f"path: {folder} holds another run: {what}; {INSTEAD}")


def _compare_losses(folder: Any, theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Refuse a loss of another name and a lambda of other code; warn of other changes in code and in what it sees."""
    a, b = theirs.get("loss"), mine["loss"]
    if not isinstance(a, dict) or not isinstance(b, dict):
        return
    _refuse(folder, difference(a.get("function"), b["function"], "loss"))
    if str(b["function"]).endswith("<lambda>"):  # a name that says nothing: all that is known of it is its code
        _refuse(folder, difference(a.get("code"), b["code"], "loss.code"))
    if changed := difference(a, b):
        checks.warn(
            f"sample: {folder} was begun with a loss {a['function']} that was another one: {changed}. If they compute "
            f"different things, its draws are of another posterior: {INSTEAD}"
        )


def keys_of(state: Any) -> list[int]:
    """The keys of all random streams of a state."""
    return sorted({int(key) for entry in keyed(state) for key in local(entry.key).reshape(-1).tolist() if key})


def describe(x: Any, depth: int = 0) -> Any:
    """The description of a chain, a schedule, a function, or a tree of plain values.

    Args:
        x: anything.
        depth: how deep in another description it stands; below ``DEEP`` levels everything is unknown.

    Returns:
        Lists, dictionaries with strings as keys, strings, numbers and ``None``.

    Example:
        >>> import bayesopt_chain as bc
        >>> describe(bc.sgd(0.1, 0.9))
        ['Chain', ['Momentum', {}], ['Scale', {'step_size': 0.1, 'sign': -1}]]
    """
    if x is None or isinstance(x, (bool, int, str, float)):
        return str(x) if isinstance(x, float) and not math.isfinite(x) else x
    if depth > DEEP:
        return UNKNOWN
    inner = functools.partial(describe, depth=depth + 1)
    if isinstance(x, Tensor):
        return _tensor(x)
    if isinstance(x, Chain):
        return [type(x).__name__, *map(inner, x.links)]
    if isinstance(x, torch.Generator):
        return ["generator", seed] if (seed := x.initial_seed()) < CHOSEN else UNKNOWN
    if isinstance(x, (torch.dtype, torch.device, type, complex, bytes, types.BuiltinFunctionType)):
        return str(getattr(x, "__qualname__", x))
    if dataclasses.is_dataclass(x) and not (callable(x) and type(x).__module__.partition(".")[0] != "bayesopt_chain"):
        defaults = {f.name: f.default for f in dataclasses.fields(x)}
        return [type(x).__name__, inner(_chosen({n: getattr(x, n) for n in defaults}, defaults))]
    if isinstance(x, Mapping):
        return {str(k): inner(v) for k, v in x.items()}
    if isinstance(x, (set, frozenset)):  # whose order is another one in every process
        return sorted(map(str, x))
    if isinstance(x, GradientTransformation) and not isinstance(getattr(x, "transformation", None), type(None)):
        return [type(x).__name__, inner(getattr(x, "transformation"))]  # noqa: B009
    if isinstance(x, (list, tuple)):
        return [*([type(x).__name__] if hasattr(x, "_fields") else []), *map(inner, x)]
    return describe_callable(x, depth) if callable(x) else UNKNOWN


def describe_callable(f: Any, depth: int = 0) -> Any:
    """The description of a function, a bound method, a ``functools.partial``, or an object with ``__call__``.

    Args:
        f: what can be called.
        depth: as for :func:`describe`.

    Returns:
        A dictionary: ``function``, the name of the function or of the object's class; ``code``, a digest of its byte code, of
        an object of all methods that its class has; ``sees``, what it closes over, what it holds as attributes, and arguments
        that are bound to it. ``UNKNOWN`` where there is no Python code.

    Example:
        >>> class Loss:
        ...     def __init__(self, scale):
        ...         self.scale = scale
        ...     def __call__(self, params, batch):
        ...         return self.scale * params["w"].square().sum()
        >>> difference(describe_callable(Loss(1.0)), describe_callable(Loss(2.0)))
        'sees.self.scale is 1.0, here 2.0'
        >>> difference(describe_callable(Loss(1.0)), describe_callable(Loss(1.0).__call__)) != ""
        True
    """
    inner = functools.partial(describe, depth=depth + 1)
    held = functools.partial(describe, depth=max(depth + 1, DEEP + 1 - ATTRIBUTES))
    if isinstance(f, functools.partial):
        of = inner(f.func)
        of = of if isinstance(of, dict) else {"function": of, "code": {}, "sees": {}}
        return {**of, "sees": {**of["sees"], "bound": [inner(list(f.args)), inner(f.keywords)]}}
    if isinstance(f, types.MethodType):
        of, owner = _function(f, inner), f.__self__
        known = isinstance(of, dict) and not isinstance(owner, type)
        return {**of, "sees": {**of["sees"], "self": _attributes(owner, held)}} if known else of
    if isinstance(f, types.FunctionType) or inspect.isfunction(inspect.unwrap(f)):
        return _function(f, inner)
    kind = type(f)
    if not isinstance(kind.__call__, types.FunctionType):
        return UNKNOWN
    codes = [
        method.__code__
        for base in kind.__mro__
        if base.__module__.partition(".")[0] not in ("builtins", "torch")
        for _, method in sorted(vars(base).items())
        if isinstance(method, types.FunctionType)
    ]
    digest = hashlib.sha256(" ".join(map(code_digest, codes)).encode()).hexdigest()[:16]
    return {
        "function": f"{kind.__module__}.{kind.__qualname__}",
        "code": {PYTHON: digest},
        "sees": {"self": _attributes(f, held)},
    }


def _chosen(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the values that are not their defaults, so that a link, or an optimizer of torch, may learn a new option."""
    same = {
        n for n, d in defaults.items() if type(v := values.get(n)) is type(d) and not isinstance(v, Tensor) and v == d
    }
    return {n: v for n, v in values.items() if n not in same}


def _attributes(x: Any, held: Callable[[Any], Any]) -> dict[str, Any]:
    """What an object holds; of a module its settings, since its parameters and buffers are what a run moves."""
    is_module = isinstance(x, torch.nn.Module)
    return {n: held(v) for n, v in getattr(x, "__dict__", {}).items() if not is_module or n[:1] != "_"}


def _tensor(x: Tensor) -> Any:
    """Dtype and shape, and the numbers of a few, or the CRC-32 of all: one label that was mended is seen."""
    about: list[Any] = ["tensor", str(x.dtype).removeprefix("torch."), list(x.shape)]
    if is_dtensor(x):  # of which every rank, and every number of ranks, has other parts
        return [*about, UNKNOWN]
    x = x.detach()
    try:
        if x.numel() <= FEW and not x.dtype.is_complex:
            return [*about, [describe(v) for v in x.reshape(-1).tolist()]]
        return [*about, zlib.crc32(bytes_of(x))]
    except (RuntimeError, TypeError, ValueError):  # sparse, quantised, on no device
        return [*about, UNKNOWN]


def _function(f: Any, inner: Callable[[Any], Any]) -> Any:
    """The name of a function, its code, its defaults, what it closes over, and what it reads from its module: numbers,
    tensors, dictionaries and tuples of them, and the code of functions that are of the same module."""
    f = inspect.unwrap(f)
    f = getattr(f, "__func__", f)
    if not isinstance(f, types.FunctionType):
        return UNKNOWN
    try:
        closed = inspect.getclosurevars(f)
    except ValueError:  # it refers to something that is not bound yet
        return UNKNOWN
    seen = {  # no lists, in which losses keep a record
        n: inner(v) for n, v in closed.globals.items() if isinstance(v, (bool, int, float, str, Tensor, Mapping, tuple))
    }
    helpers = {n: v for n, v in closed.globals.items() if isinstance(v, types.FunctionType)}
    code = {n: code_digest(v.__code__) for n, v in helpers.items() if v.__module__ == f.__module__}
    return {
        "function": f"{f.__module__}.{f.__qualname__}",
        "code": {PYTHON: code_digest(f.__code__)},
        "sees": {
            **seen,
            **{n: {"code": {PYTHON: digest}} for n, digest in code.items()},
            **{n: inner(v) for n, v in closed.nonlocals.items()},
            "defaults": inner([*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()]),
        },
    }


def code_digest(code: types.CodeType) -> str:
    """16 hexadecimal digits of a hash of byte code, its constants and names; not of line numbers."""
    # The order of a set is another in every process.
    ordered = [sorted(map(repr, c)) if isinstance(c, frozenset) else c for c in code.co_consts]
    constants = [code_digest(c) if isinstance(c, types.CodeType) else repr(c) for c in ordered]
    text = " ".join([code.co_code.hex(), *constants, *code.co_names])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def describe_optimizer(optimizer: torch.optim.Optimizer, without: tuple[str, ...] = ()) -> Any:
    """The class of an optimizer, the hyperparameters of its groups, and its chains.

    Args:
        optimizer: as it stands; ``lr`` is told as it was before a scheduler changed it, where one did.
        without: hyperparameters that are not told.
    """
    hidden = {"params", "noise_key", "noise_count", "chain_state", *without}
    groups = [{**group, "lr": group.get("initial_lr", group.get("lr"))} for group in optimizer.param_groups]
    bases = reversed(type(optimizer).__mro__)
    defaults = {n: x.default for base in bases for n, x in inspect.signature(base).parameters.items()}
    for group in groups:
        if names := group.get("param_names"):
            group["param_names"] = without_wrappers(tuple(names))
    groups = [_chosen({k: v for k, v in group.items() if k not in hidden}, defaults) for group in groups]
    chains = [built.tx for built in getattr(optimizer, "_chains", ())]
    about = {"kind": type(optimizer).__name__, "groups": groups, "chains": chains}
    seed = getattr(optimizer, "_seed", None)  # of the generator that it was given
    if seed is not None:
        about["generator"] = ["generator", seed] if seed < CHOSEN else UNKNOWN
    return describe(about)


def difference(a: Any, b: Any, where: str = "") -> str:
    """What differs between two descriptions, in words; nothing where they may be the same.

    Example:
        >>> difference(["Scale", {"factor": 0.1}], ["Scale", {"factor": 0.2}])
        'Scale.factor is 0.1, here 0.2'
        >>> difference([1, "unknown"], [1, 2])
        ''
    """
    if UNKNOWN in (a if isinstance(a, str) else "", b if isinstance(b, str) else ""):
        return ""
    if isinstance(a, dict) and isinstance(b, dict):
        if where.endswith("code") and not a.keys() & b.keys():  # byte code of two versions of Python
            return ""
        for name in [*a, *[n for n in b if n not in a]]:
            inside = f"{where}.{name}" if where else str(name)
            if name not in a or name not in b:
                return f"{inside} is {a.get(name, 'absent')!s:.120}, here {b.get(name, 'absent')!s:.120}"
            if said := difference(a[name], b[name], inside):
                return said
        return ""
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b) and a[:1] != ["tensor"]:
        named = bool(a) and isinstance(a[0], str)
        for i, (x, y) in enumerate(zip(a, b)):
            # Of a class only the name is told, and a chain is the list of its links.
            inside = (
                where if a[:1] == ["Chain"] else (f"{where}.{a[0]}" if where else a[0]) if named else f"{where}[{i}]"
            )
            if said := difference(x, y, inside):
                return said
        return ""
    numbers = isinstance(a, (int, float)) and isinstance(b, (int, float))
    same = a == b and (numbers or type(a) is type(b))
    return "" if same else f"{where or 'it'} is {a!s:.120}, here {b!s:.120}"
