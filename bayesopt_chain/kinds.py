"""What an argument may be, in one word each, and the refusal that names the argument.

The arguments of factories of transformations have ranges of their own (:mod:`bayesopt_chain.arguments`). Here are those of all
other functions: a module, batches, a tree of parameters, a whole number. A word means the same everywhere: ``loss``, ``params``
and ``steps`` are one :class:`Kind` each, listed in :data:`WORDS`. So a function needs one line for all of its arguments,
and says only where one of them is something else:

    @takes(chains=whole(4))
    def observe(loss, params, data, *, lr=None, chains=8): ...

What does not fit is refused by its name before anything happens. A default always fits, and an argument without a
kind is not checked here: the function itself does.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeVar, cast

import optree
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bayesopt_chain.checks import interval, short
from bayesopt_chain.tracing import is_hidden

MOST = 1 << 53  # what counts as a whole number, and what JSON can hold


class Kind(NamedTuple):
    """What an argument may be: a test, the words of the refusal, and the types of which some values fit.

    Called with a name and a value it refuses what does not fit. It has no range that another rule could leave out
    (see :mod:`bayesopt_chain.arguments`).
    """

    fits: Callable[[Any], bool]
    words: str
    of: tuple[type, ...] = ()

    def __call__(self, name: str, value: Any, ranges: bool = True) -> None:
        if not self.fits(value):
            wrong = ValueError if isinstance(value, self.of) else TypeError
            raise wrong(f"{name} must be {self.words}, got {short(value)}")

    def or_none(self) -> Kind:
        """The same, or ``None``."""
        return Kind(lambda x: x is None or self.fits(x), f"{self.words}, or None", self.of)


def require(who: str, **given: tuple[Any, Kind]) -> None:
    """Refuse the first of some arguments that is not what it may be.

    Args:
        who: the function whose arguments these are.
        given: by its name each argument and what it may be.

    Raises:
        TypeError: naming the argument, what it may be, and what came.
        ValueError: likewise, of a value of the right type.

    Example:
        >>> require("sample", steps=(3, WHOLE))
        >>> require("sample", steps=("x", WHOLE))
        Traceback (most recent call last):
        TypeError: sample: steps must be a whole number, at least 1, got 'x'
    """
    for name, (value, kind) in given.items():
        kind(f"{who}: {name}", value)


def plain(value: Any) -> Any:
    """Real numbers of other libraries, such as numpy's scalars and fractions, as Python's own; everything else as it is."""
    if type(value) in (int, float, bool) or not isinstance(value, Real):
        return value
    try:
        return int(value) if isinstance(value, Integral) else float(value)
    except OverflowError:  # a fraction that is larger than every float
        return value


Function = TypeVar("Function", bound=Callable[..., Any])


def takes(**own: Kind) -> Callable[[Function], Function]:
    """Check what a function or method is called with, each argument by its kind in :data:`WORDS`, before it runs.

    Args:
        own: kinds of arguments that are something else here, or that no other function has.

    Raises:
        TypeError: when the function is defined: a kind of no argument.

    Example:
        >>> @takes(shape=SEQUENCE)
        ... def filled(steps, shape=()):
        ...     return steps
        >>> filled(3)
        3
        >>> filled(-1)
        Traceback (most recent call last):
        ValueError: filled: steps must be a whole number, at least 1, got -1
        >>> filled(3, shape=4)
        Traceback (most recent call last):
        TypeError: filled: shape must be a list, got 4
    """

    def decorate(function: Function) -> Function:
        who = function.__qualname__.removesuffix(".__init__")
        names = inspect.signature(function).parameters.keys()
        if own.keys() - names:
            raise TypeError(f"takes: {who} has no argument {', '.join(own.keys() - names)}")

        def look(given: dict[str, Any], defaults: dict[str, Any]) -> None:
            for name, value in given.items():
                if name in kinds and value is not defaults[name]:
                    kinds[name](f"{who}: {name}", value)

        kinds = {name: kind for name, kind in (WORDS | own).items() if name in names}
        return looking(function, look)

    return decorate


def looking(function: Function, look: Callable[[dict[str, Any], dict[str, Any]], None]) -> Function:
    """A function that looks at its arguments before it runs: numbers of other libraries have become Python's own.

    Args:
        function: any function or method.
        look: of the arguments that were given, by name, and of all defaults; refuses by raising. What Python itself will
            refuse, such as an argument too many, is left out.
    """
    parameters = inspect.signature(function).parameters.values()
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    positional = [p.name for p in parameters if p.kind not in (*several, inspect.Parameter.KEYWORD_ONLY)]
    defaults = {p.name: p.default for p in parameters if p.kind not in several}

    @functools.wraps(function)
    def checking(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tuple(map(plain, args)), {name: plain(value) for name, value in kwargs.items()}
        look({**dict(zip(positional, args)), **kwargs}, defaults)
        return function(*args, **kwargs)

    return cast(Function, checking)


def with_plain_numbers(function: Function) -> Function:
    """A function whose arguments become Python's own numbers where they are those of other libraries.

    Example:
        >>> from fractions import Fraction
        >>> with_plain_numbers(lambda x: x)(Fraction(1, 2))
        0.5
    """
    return looking(function, lambda given, defaults: None)


@contextmanager
def blaming(who: str, name: str) -> Iterator[None]:
    """Say of what torch refuses inside which argument it came with: a model that cannot take these inputs.

    Example:
        >>> with blaming("predict", "data"):
        ...     torch.zeros(2, 3) @ torch.zeros(2)
        Traceback (most recent call last):
        ValueError: predict: data: the model cannot take it (size mismatch, got input (2), mat (2x3), vec (2))
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError, AttributeError, TypeError, ValueError) as err:
        *_, (frame, _) = traceback.walk_tb(err.__traceback__)
        of_torch = str(frame.f_globals.get("__name__")).startswith("torch.")  # as BatchNorm's ValueErrors are
        if f"{who}: " in str(err) or (isinstance(err, ValueError) and not of_torch):
            raise
        wrong = TypeError if isinstance(err, TypeError) else ValueError
        raise wrong(f"{who}: {name}: the model cannot take it ({err})") from err


def whole(least: int) -> Kind:
    """Whole numbers from ``least`` on."""
    return Kind(
        lambda x: isinstance(x, int) and not isinstance(x, bool) and least <= x < MOST,
        f"a whole number, at least {least}",
        (int,),
    )


def real(within: str) -> Kind:
    """Numbers of an interval, written as :func:`bayesopt_chain.checks.number` takes it: ``"[0, 1)"``."""
    low, high, has_low, has_high = interval(within)

    def fits(x: Any) -> bool:
        if not isinstance(x, (int, float)) or isinstance(x, bool) or 1e300 < abs(x) != math.inf:
            return False
        return low < x < high or (has_low and x == low) or (has_high and x == high)

    return Kind(fits, f"a number in {within}", (int, float))


def instance(of: type, words: str) -> Kind:
    """Objects of a class, which the words say how to make."""
    return Kind(lambda x: isinstance(x, of), words)


def one_of(*choices: str) -> Kind:
    """One of some words."""
    return Kind(lambda x: isinstance(x, str) and x in choices, " or ".join(map(repr, choices)), (str,))


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and abs(x) < 1e300 and math.isfinite(x)


def _is_iterable(x: Any) -> bool:
    return hasattr(x, "__iter__") and not isinstance(x, (str, bytes, type)) and getattr(x, "ndim", 1) > 0


def _is_tree(x: Any) -> bool:
    leaves = optree.tree_leaves(x)
    return bool(leaves) and all(isinstance(leaf, Tensor) for leaf in leaves)


def _is_real_tree(x: Any) -> bool:
    return _is_tree(x) and all(
        leaf.is_floating_point() and not leaf.is_meta and leaf.layout is torch.strided for leaf in optree.tree_leaves(x)
    )


def _is_dense(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.is_meta and not x.is_complex() and x.layout is torch.strided


def _is_device(x: Any) -> bool:
    try:
        return isinstance(x, str) and isinstance(torch.device(x), torch.device)
    except RuntimeError:
        return False


def _is_place(x: Any) -> bool:
    leaves = optree.tree_leaves(x)
    return _is_real_tree(x) and all(is_hidden(y) or is_finite(y) for y in leaves) and any(y.numel() for y in leaves)


def is_finite(x: Tensor) -> bool:
    """Whether a tensor is dense, and no entry is NaN or infinite; reads it."""
    return x.layout is torch.strided and bool(torch.isfinite(x).all())


def _is_vector(x: Any) -> bool:
    entries = x.tolist() if getattr(x, "ndim", 0) == 1 and (not isinstance(x, Tensor) or _is_dense(x)) else x
    return isinstance(entries, Sequence) and not isinstance(entries, (str, bytes)) and all(map(SCALAR.fits, entries))


def _is_stack(x: Any) -> bool:
    if hasattr(x, "chains") and hasattr(type(x), "params"):
        return True
    return _is_tree(x) and all(
        leaf.ndim and not leaf.is_complex() and not leaf.is_meta and leaf.layout is torch.strided
        for leaf in optree.tree_leaves(x)
    )


ANY = Kind(lambda x: True, "anything")  # which is looked at where it is used
BOOL = Kind(lambda x: isinstance(x, bool), "True or False")
FUNCTION = Kind(lambda x: callable(x) and not isinstance(x, type), "a function")
GENERATOR = Kind(lambda x: isinstance(x, torch.Generator), "a torch.Generator").or_none()
INPUTS = Kind(lambda x: isinstance(x, str) or FUNCTION.fits(x), "a key of the batch, or a function of it").or_none()
DEVICE = Kind(lambda x: isinstance(x, torch.device) or _is_device(x), "a device of torch, such as 'cpu'")
PREFIX = Kind(lambda x: not isinstance(x, type), "a tree like the parameters, a prefix of one, or a function to one")
BATCHES = Kind(_is_iterable, "batches, such as a list or a DataLoader")
BATCH = Kind(
    lambda x: all(
        not isinstance(y, Tensor) or (y.layout is torch.strided and not y.is_meta) for y in optree.tree_leaves(x)
    ),
    "a batch of dense tensors with values",
)
BATCH_OR_BATCHES = Kind(
    lambda x: not isinstance(x, (str, bytes, bool, type)), "one batch, or batches such as a list or a DataLoader"
)
MAPPING = Kind(lambda x: isinstance(x, Mapping), "a dictionary")
MODULE = Kind(
    lambda x: isinstance(x, nn.Module) and not any(map(is_lazy, x.parameters())),
    "a torch.nn.Module (with lazy layers: once it was called on a batch, which makes their weights)",
    (nn.Module,),
)
OPTIMIZER = Kind(lambda x: isinstance(x, torch.optim.Optimizer), "an optimizer of torch.optim or bc.optim")
SCHEDULER = Kind(
    lambda x: all(callable(getattr(x, name, None)) for name in ("step", "state_dict", "load_state_dict")),
    "a scheduler of torch.optim.lr_scheduler",
)
NUMBERS_OF_CLASSES = Kind(
    lambda x: _is_dense(x) and x.dtype == torch.int64, "class numbers, a tensor of int64", (Tensor,)
)
NETWORKS = Kind(
    lambda x: isinstance(x, nn.Module) or FUNCTION.fits(x),
    "a torch.nn.Module, or a function without arguments that makes one",
)
NUMBER = Kind(_is_number, "a finite number", (int, float))
POSITIVE = Kind(lambda x: _is_number(x) and x > 0, "a positive, finite number", (int, float))
POSITIVES = Kind(
    lambda x: POSITIVE.fits(x) or (_is_dense(x) and (is_hidden(x) or bool((x > 0).all()))),
    "a positive number, or a dense tensor of positive numbers",
    (int, float, Tensor),
)
VECTOR = Kind(_is_vector, "a list of numbers, or a tensor of one axis", (list, tuple, Tensor))
PATH = Kind(lambda x: isinstance(x, (str, os.PathLike)) and str(x) not in ("", "."), "the path of a file")
FOLDER = Kind(lambda x: isinstance(x, (str, os.PathLike)) and str(x) != "", "the path of a directory")
SEED = whole(0)
SEQUENCE = Kind(lambda x: isinstance(x, Sequence) and not isinstance(x, (str, bytes)), "a list")
PARAMS = Kind(_is_real_tree, "a tree of real tensors with values: parameters")
PLACE = Kind(_is_place, "a tree of dense, real, finite tensors: the parameters of a place", (dict, list, tuple, Tensor))
TENSOR = Kind(lambda x: isinstance(x, Tensor) and not x.is_meta, "a tensor with values")
TENSORS = Kind(lambda x: isinstance(x, (tuple, list)) and _is_tree(x), "a tuple of tensors, or of trees of them")
TREE = Kind(_is_tree, "a tree of tensors")
TX = Kind(
    lambda x: not isinstance(x, type) and callable(getattr(x, "init", None)) and callable(getattr(x, "update", None)),
    "a gradient transformation",
)
WITH_CDF = Kind(
    lambda x: callable(getattr(x, "cdf", None)) and not isinstance(x, type),
    "a prediction with cdf, such as of likelihood.mixture or of an ensemble",
)
REALS = Kind(lambda x: _is_dense(x) and x.is_floating_point(), "a dense tensor of floating-point numbers")
VALUES = Kind(_is_dense, "a dense, real tensor")
NUMBERS = Kind(lambda x: _is_number(x) or _is_dense(x), "a number, or a dense, real tensor")
WHOLE = whole(1)
TX_OR_OPTIMIZER = Kind(
    lambda x: TX.fits(x) or (hasattr(x, "thermal_leaves") and not isinstance(x, type)),
    "a gradient transformation, or an optimizer of bc.optim",
)
TX_OR_STEP = Kind(lambda x: callable(getattr(x, "init", None)), "a gradient transformation, or a step")
DRAWS = Kind(
    lambda x: _is_stack(x) and not getattr(x, "is_weighted", False),
    "Draws (of a chain whose draws have weights draws.equally_weighted()), or a tree of real tensors with one entry a draw on "
    "the first axis",
)
SCORES = Kind(lambda x: FUNCTION.fits(x) or _is_stack(x), "a function of a draw, or a tree of tensors like the draws")
DATA = Kind(
    lambda x: (
        isinstance(x, Mapping)
        or hasattr(x, "batches")
        or (_is_iterable(x) and (not isinstance(x, Tensor) or _is_dense(x)))
    ),
    "inputs, a batch, or batches such as a list or a DataLoader",
)
LIKELIHOOD = Kind(
    lambda x: not isinstance(x, type) and hasattr(x, "nll") and hasattr(x, "log_prob"),
    "one of bc.likelihoods, called, such as bc.likelihoods.categorical()",
)
SAMPLED = Kind(
    lambda x: hasattr(x, "chains") and hasattr(type(x), "params") and not isinstance(x, type),  # x.params reads draws
    "bc.Draws, such as bc.sample returns, or bc.Draws.from_trees of a list of parameters",
)
SCALAR = Kind(
    lambda x: _is_number(x) or (isinstance(x, Tensor) and not x.ndim and x.is_floating_point() and not x.is_meta),
    "a finite number or a real 0-d tensor",
    (int, float, Tensor),
)
PRECISION = Kind(
    lambda x: not isinstance(x, type) and hasattr(x, "quad") and hasattr(x, "solve"), "one of bayesopt_chain.precision"
)
INDEX = Kind(lambda x: isinstance(x, int) and not isinstance(x, bool), "a whole number")
TEXT = Kind(lambda x: isinstance(x, str), "a text")
POSTERIOR = Kind(
    lambda x: hasattr(x, "mean") and hasattr(x, "factorised") and not isinstance(x, type), "a bc.Gaussian posterior"
)

WORDS: dict[str, Kind] = {  # what an argument of this name is in every function that is checked by `takes`
    "batches": BATCHES,
    "build": FUNCTION,
    "burn_in": whole(0),
    "chains": WHOLE,
    "checkpoint_seconds": real("[0, inf)"),
    "covariance": REALS,
    "draws": DRAWS,
    "f": FUNCTION,
    "forward": FUNCTION,
    "generator": GENERATOR,
    "likelihood": LIKELIHOOD,
    "log_weights": REALS.or_none(),
    "loss": FUNCTION,
    "lr": POSITIVE,
    "make_tx": Kind(callable, "a function of the learning rate that returns a chain"),
    "max_batches": WHOLE,
    "mean": REALS,
    "mesh": Kind(lambda x: callable(getattr(x, "get_coordinate", None)), "a DeviceMesh of torch.distributed").or_none(),
    "model": MODULE,
    "module": MODULE,
    "momentum": real("[0, 1)"),
    "outputs": REALS,
    "params": PLACE,
    "posterior": POSTERIOR,
    "primals": TENSORS,
    "progress": BOOL,
    "rank": WHOLE,
    "samples": WHOLE,
    "seed": SEED,
    "state": ANY,  # a chain looks at its own
    "steps": WHOLE,
    "tangents": TENSORS,
    "temperature": POSITIVE,
    "thinning": WHOLE,
    "tolerance": POSITIVE,
    "tx": TX,
    "values": NUMBERS,
}
