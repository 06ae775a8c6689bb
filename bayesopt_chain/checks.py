"""What arguments may be, and refusals: each names the argument, shows what came, and says what to do.

What an argument may be is a :class:`Kind`. A word means the same everywhere: ``loss``, ``params`` and ``steps`` are one kind
each, listed in :data:`WORDS`. So a function needs one line for all of its arguments, and says only where one of them is
something else:

    @takes(chains=whole(4))
    def observe(loss, params, data, *, lr=None, chains=8): ...

What does not fit is refused by its name before anything happens. A default always fits, and an argument without a kind is
not checked here: the function itself does.

Arguments of factories of transformations, such as ``lr``, are listed in :data:`ARGUMENTS`. Their ranges apply where a
temperature is positive: at temperature 0 we accept what TorchOpt accepts. Links do not know the temperature, so they look at
types when they are made (:func:`link_takes`), and a chain that samples looks at its links' ranges in ``init``
(:func:`check_link`).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from numbers import Integral, Real
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import optree
import torch
from torch import Tensor, nn
from torchopt.base import GradientTransformation

from bayesopt_chain._torch import is_dtensor
from bayesopt_chain.tracing import batch_levels, is_hidden, is_plain, is_readable, is_transformed

LARGEST = 1 << 53  # of what is counted: a double and JSON hold it exactly
# packages that no warning points into
_INSIDE = {"bayesopt_chain", "torch", "optree", "contextlib", "functools", "weakref"}


class Kind(NamedTuple):
    """What an argument may be.

    Called with a name and a value it refuses what does not fit: by a ``ValueError`` a value of a type of which others fit, else
    by a ``TypeError``.

    Attributes:
        fits: whether a value does.
        words: what a value must be, for the message.
        of: the types of which some values fit. With ``ranges=False`` all values of them pass.
        hint: what to do instead, put at the end of the message.

    Example:
        >>> number("[0, 1)")("momentum", 1.0)
        Traceback (most recent call last):
        ValueError: momentum must be a number in [0, 1), got 1.0
        >>> number("[0, 1)")("momentum", 1.0, ranges=False)
        >>> number("(0, inf)")("eps", "small")
        Traceback (most recent call last):
        TypeError: eps must be a positive, finite number, got 'small'
    """

    fits: Callable[[Any], bool]
    words: str
    of: tuple[type, ...] = ()
    hint: str = ""

    def __call__(self, name: str, value: Any, ranges: bool = True) -> None:
        is_of = isinstance(value, self.of) and not isinstance(value, bool)
        if not (is_of and not ranges) and not self.fits(value):
            wrong = ValueError if is_of else TypeError
            raise wrong(f"{name} must be {self.words}, got {short(value)}{'; ' * bool(self.hint)}{self.hint}")

    def or_none(self) -> Kind:
        """The same, or ``None``."""
        return self._replace(fits=lambda x: x is None or self.fits(x), words=f"{self.words}, or None")

    def or_tree(self) -> Kind:
        """The same, or a tree or a function, which is looked at where the parameters are known."""
        others = (bool, int, float, complex, type)
        return self._replace(
            fits=lambda x: not isinstance(x, others) or self.fits(x),
            words=f"{self.words}, or a tree like the parameters",
        )


_RANGES = {
    "(-inf, inf)": "a finite number",
    "(0, inf)": "a positive, finite number",
    "[0, inf)": "a non-negative, finite number",
    "[0, inf]": "a non-negative number",
    "[1, inf)": "a finite number from 1 on",
}


def number(
    within: str = "(-inf, inf)",
    *,
    integer: bool = False,
    tensor: bool = False,
    schedule: bool = False,
    hint: str = "",
) -> Kind:
    """Numbers of an interval. NaN lies in none, infinity in those that are closed there.

    Args:
        within: the interval as it is written, ``"[0, 1)"``: brackets include an end, parentheses do not.
        integer: whether it must be an integer.
        tensor: whether a real 0-d tensor will do. One that is hidden (see :mod:`bayesopt_chain.tracing`) passes unread.
        schedule: whether a callable will do; it passes uncalled.
        hint: what to do instead, put at the end of the message.
    """
    low, high = map(float, within[1:-1].split(","))
    of: Any = Integral if integer else Real

    def fits(x: Any) -> Any:
        if schedule and callable(x) and not isinstance(x, Tensor):
            return True
        if tensor and isinstance(x, Tensor) and not (x.ndim or x.is_complex() or x.dtype == torch.bool):
            if is_hidden(x):
                return True
            x = x.item()
        elif isinstance(x, bool) or not isinstance(x, of):
            return False
        is_inside = low < x < high or (x == low and within[0] == "[") or (x == high and within[-1] == "]")
        return is_inside and not 1e300 < abs(x) < math.inf  # larger integers do not fit into a float

    words = _RANGES.get(within, f"a number in {within}")
    if integer:
        words = f"a whole number, at least {int(low)}" if high >= LARGEST else f"a whole number in {within}"
    words = " or ".join([words, *["a 0-d tensor"] * tensor, *["a schedule"] * schedule])
    return Kind(fits, words, (of, *[Tensor] * tensor), hint)


def whole(least: int) -> Kind:
    """Whole numbers from ``least`` on."""
    return number(f"[{least}, {LARGEST}]", integer=True)


def instance(of: type, words: str) -> Kind:
    """Objects of a class, which the words say how to make."""
    return Kind(lambda x: isinstance(x, of), words)


def having(words: str, *names: str) -> Kind:
    """Objects, and no classes, that have attributes of these names."""
    return Kind(lambda x: not isinstance(x, type) and all(hasattr(x, name) for name in names), words)


def one_of(*choices: str) -> Kind:
    """One of some words."""
    return Kind(lambda x: isinstance(x, str) and x in choices, " or ".join(map(repr, choices)), (str,))


def is_spread(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether tensors of one shape are broadcast to another without changing it."""
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(shape[::-1], to[::-1]))


def plain(value: Any) -> Any:
    """Real numbers of other libraries, such as numpy's scalars and fractions, as Python's own; everything else as it is."""
    if type(value) in (int, float, bool) or not isinstance(value, Real):
        return value
    try:
        return int(value) if isinstance(value, Integral) else float(value)
    except OverflowError:  # a fraction beyond every float, which kinds refuse as they refuse infinity
        return value


Function = TypeVar("Function", bound=Callable[..., Any])


def _checking(function: Function, kinds: Mapping[str, Kind], own: Mapping[str, Kind], ranges: bool = True) -> Function:
    """A function that looks at its arguments before it runs; numbers of other libraries have become Python's own.

    Args:
        function: any function or method.
        kinds: of arguments by their names. Where a temperature is given, or is by default, the Python number 0, only the
            temperature is looked at, and ``own``.
        own: kinds that go before these; ranges apply to them in any case.
        ranges: whether they apply to the others, or types alone.
    """
    who = function.__qualname__.removesuffix(".__init__")
    parameters = inspect.signature(function).parameters.values()
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    positional = [p.name for p in parameters if p.kind not in (*several, inspect.Parameter.KEYWORD_ONLY)]
    defaults = {p.name: p.default for p in parameters if p.kind not in several}
    known = {name: kind for name, kind in {**kinds, **own}.items() if name in defaults}

    @functools.wraps(function)
    def checking(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tuple(map(plain, args)), {name: plain(value) for name, value in kwargs.items()}
        given = {**dict(zip(positional, args)), **kwargs}
        heat = given.get("temperature", defaults.get("temperature"))
        is_cold = isinstance(heat, (int, float)) and heat == 0
        for name, value in given.items():
            always = name in own or name == "temperature" or not is_cold
            if name in known and always and value is not defaults[name]:
                known[name](f"{who}: {name}", value, ranges or name in own)
        return function(*args, **kwargs)

    return cast(Function, checking)


def takes(**own: Kind) -> Callable[[Function], Function]:
    """Check what a function or method is called with, each argument by its kind in :data:`WORDS`, before it runs.

    Args:
        own: kinds of arguments that are something else here, or that no other function has.

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
    return lambda function: _checking(function, WORDS, own)


def factory_takes(**own: Kind) -> Callable[[Function], Function]:
    """Check the arguments of a factory by :data:`ARGUMENTS` before it runs; at temperature 0 the temperature's alone.

    Args:
        own: kinds of arguments that are something else here, at any temperature: a learning rate by which a sampler divides
            when it is made is a positive number, no schedule.
    """
    return lambda factory: _checking(factory, ARGUMENTS, own)


def link_takes(**own: Kind) -> Callable[[Function], Function]:
    """Check the types of a link's arguments before it is made.

    Args:
        own: kinds of arguments whose ranges are checked too, at any temperature.
    """
    return lambda factory: _checking(factory, ARGUMENTS, own, ranges=False)


def check_link(link: Any) -> None:
    """Check the fields of a link in a chain that samples, types and ranges."""
    for part in dataclasses.fields(link):
        value = getattr(link, part.name)
        if part.name in ARGUMENTS and value is not part.default:
            ARGUMENTS[part.name](f"{type(link).__name__}: {part.name}", value)


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
        cures = {
            "type": "; convert the inputs (x.to(dtype)) or the model (module.double(), module.float())",
            "sparse": "; build its embeddings with sparse=False",
        }
        cure = "".join(cures[word] for word in cures if isinstance(err, RuntimeError) and word in str(err))
        raise wrong(f"{who}: {name}: the model cannot take it ({err}){cure}") from err


def installed(who: str, extra: str, *packages: str) -> None:
    """Refuse a call that needs packages which are not installed, before it does anything else.

    Args:
        who: the call, with which the message begins.
        extra: the extra of this library that brings the packages.
        packages: names as they are imported.

    Raises:
        ModuleNotFoundError: a package is missing; the message has the line that installs it.

    Example:
        >>> installed("r_hat", "diagnostics", "torch")
        >>> installed("r_hat", "diagnostics", "torch", "no_such_package")
        Traceback (most recent call last):
        ModuleNotFoundError: r_hat needs no_such_package: pip install 'bayesopt_chain[diagnostics]'
    """
    for package in packages:
        try:
            import_module(package)
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                f"{who} needs {package}: pip install 'bayesopt_chain[{extra}]'", name=package
            ) from None


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn, and point at the line outside of this library, and of what runs inside its calls, from which it was called."""
    level, frame = 1, sys._getframe()
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _INSIDE:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


def rounds_away(what: str, leaf: Tensor, step: float, cure: str) -> bool:
    """Whether noise is smaller than half of a unit in the last place of the parameters it is added to; if so, warn.

    Args:
        what: whose leaf it is, the first words of the warning.
        leaf: the parameters.
        step: by how much the noise of one step moves a parameter.
        cure: what to do instead, the last words of the warning.

    Example:
        >>> rounds_away("sgld: leaf 0", torch.ones(2), 1e-3, "keep float32")
        False
    """
    size = float(leaf.detach().abs().float().mean())
    is_lost = 0 < step < torch.finfo(leaf.dtype).eps * size / 2
    if is_lost:
        warn(
            f"{what} is {leaf.dtype} with entries near {size:.2g}, and a step's noise of about {step:.2g} would round away; "
            f"{cure}"
        )
    return is_lost


def short(value: Any) -> str:
    """A value in a message."""
    if isinstance(value, Tensor) and (value.ndim or is_hidden(value)):
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def name(path: tuple | str) -> str:
    return (path if isinstance(path, str) else "".join(f"[{part!r}]" for part in path)) or "(the bare tensor)"


def show(value: Any) -> str:
    """A hyperparameter as ``repr`` of a link shows it."""
    if torch.is_tensor(value):
        return (
            f"tensor({value.item():.6g})" if value.ndim == 0 and not is_hidden(value) else f"tensor{tuple(value.shape)}"
        )
    is_named = callable(value) or any(map(torch.is_tensor, optree.tree_leaves(value)))
    return getattr(value, "__name__", type(value).__name__) if is_named else short(value)


def as_call(link: Any) -> str:
    """A link as its ``name``, by default that of its class, and its fields, without the options that are off as by default."""
    shown = []
    for part in sorted(dataclasses.fields(link), key=lambda part: bool(part.kw_only)):
        value = getattr(link, part.name)
        is_off = type(value) is type(part.default) and not part.default and not value
        if part.repr and not is_off:
            shown.append(f"{part.name}={show(value)}")
    return f"{getattr(link, 'name', type(link).__name__)}({', '.join(shown)})"


def recording(who: str) -> None:
    """Refuse to take gradients where torch records none.

    Raises:
        ValueError: ``torch.inference_mode()`` is on.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError(
            f"{who}: this takes gradients, and torch.inference_mode() is on, which records none; call it outside of it"
        )


def finite_data(what: str, numbers: Tensor) -> None:
    """Refuse ``[N, ...]`` numbers of N data some of which are NaN or infinite.

    Args:
        what: whose numbers, with which the message begins.
        numbers: of each datum.

    Raises:
        ValueError: naming how many data, and the first.

    Example:
        >>> finite_data("query: outputs", torch.tensor([1.0, torch.nan]))
        Traceback (most recent call last):
        ValueError: query: outputs are NaN or infinite for 1 of 2 data, number 1 first: leave these data out
    """
    if bool(numbers.sum().isfinite()):  # no sum is where an entry is not, and it takes an eighth of the time
        return
    wrong = ~numbers.flatten(1).isfinite().all(1) if numbers.ndim > 1 else ~numbers.isfinite()
    if bool(wrong.any()):
        raise ValueError(
            f"{what} are NaN or infinite for {int(wrong.sum())} of {len(wrong)} data, number {int(wrong.nonzero()[0])} first: "
            "leave these data out"
        )


def at_this_step(name: str, value: float | Tensor) -> float | Tensor:
    """Refuse what cannot be a rate or a temperature, where reading it costs nothing; elsewhere it turns to NaN.

    Returns:
        The value.

    Raises:
        ValueError: negative, NaN or infinite, not a scalar, or complex.
    """
    if isinstance(value, Tensor) and (value.ndim or value.is_complex()):
        raise ValueError(f"{name}: must be a real scalar, got shape {tuple(value.shape)}, {value.dtype}")
    if isinstance(value, Tensor) and not is_readable(value):
        return value
    number = value.item() if isinstance(value, Tensor) else value  # float() warns of a rate that is learnt
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(
            f"{name}: its value at this step is {number}, but it must be finite and not negative (the sign of the descent "
            "is scale_by_neg_lr's); nothing was changed"
        )
    return value


def with_values(who: str, tree: str, leaves: Sequence[Any], paths: Sequence[Any]) -> None:
    """Refuse tensors on the meta device, which have shapes alone; ``tree`` is what the leaves are of, for the message.

    Raises:
        ValueError: naming the first of them.
    """
    for leaf, path in zip(leaves, paths):
        if torch.is_tensor(leaf) and leaf.is_meta:
            raise ValueError(
                f"{who}: leaf {name(path)} of {tree} is on the device meta, and has no values: load them first, or call init "
                "under torch.device('cpu') or another default device"
            )


def samplable(leaves: Sequence[Any], paths: Sequence[Any], which: Iterable[int] | None = None) -> None:
    """Refuse parameters that cannot be sampled: none at all, no real floating-point tensors, or one tensor twice.

    Args:
        leaves, paths: of all parameters; ``None`` is no parameter.
        which: the numbers of those that are sampled. Default: all.

    Raises:
        TypeError, ValueError: naming the leaves.
    """
    chosen = [j for j in sorted(range(len(leaves)) if which is None else which) if leaves[j] is not None]
    if not chosen:
        raise ValueError("params: the tree has no leaves, so there is nothing to sample; pass the parameters to init")
    for j in chosen:
        leaf, path = leaves[j], name(paths[j])
        if is_dtensor(leaf):
            raise ValueError(
                f"params: leaf {path} is a DTensor (FSDP2, tensor parallelism), of which each rank has a part, where "
                "whole parameters are needed. Keep whole parameters on every rank and spread the data "
                "(bc.make_step(loss, tx, mesh=mesh)) or the chains (bc.parallel(step, n, mesh=mesh)); leaf.full_tensor() "
                "gathers one"
            )
        # of 8 bits torch has no sums and products
        computes = torch.is_tensor(leaf) and leaf.is_floating_point() and leaf.dtype.itemsize > 1
        if not computes or leaf.layout is not torch.strided:
            kind = f"{leaf.dtype}, {leaf.layout}" if torch.is_tensor(leaf) else type(leaf).__name__
            raise TypeError(
                f"params: leaf {path} is {kind}; only real floating-point tensors of 16 bits or more in the dense layout can "
                "be sampled. Leave it out of the tree (buffers belong into the loss), or set temperature=0"
            )
    if (pair := sharing([leaves[j] for j in chosen])) is not None:
        first, second = (name(paths[chosen[i]]) for i in sorted(pair))
        raise ValueError(
            f"params: {first} and {second} share memory, so that each would move, and get noise, for itself, and together they "
            "would sample at a higher temperature. Pass the tensor once, and let the loss use it twice; of columns of one "
            "tensor, which lie between each other, pass copies"
        )


def sharing(tensors: Sequence[Any]) -> tuple[int, int] | None:
    """Find two tensors of which one begins between the first and the last element of the other.

    Args:
        tensors: of any shapes and strides. Entries whose memory cannot be read (traced, sparse, empty or no tensors) are
            left out.

    Returns:
        Their indices; ``None`` if there are no two.

    Example:
        >>> import torch
        >>> x = torch.zeros(4, 4)
        >>> sharing([x[:2], x[2:]]), sharing([x[0], x[:, 0]])
        (None, (0, 1))
    """
    ranges = sorted(
        [
            (x.data_ptr(), x.data_ptr() + x.element_size() * (1 + _last_offset(x)), i)
            for i, x in enumerate(tensors)
            if isinstance(x, Tensor) and is_plain(x) and x.layout is torch.strided and x.numel() and x.data_ptr()
        ]
    )
    neighbours = itertools.pairwise(ranges)
    return next(((i, j) for (_, end, i), (start, _, j) in neighbours if start < end), None)


def _last_offset(x: Tensor) -> int:
    """The offset of the last element of a tensor from its first, in elements."""
    return sum([(n - 1) * stride for n, stride in zip(x.shape, x.stride())])


def own_key(key: Tensor, g: Sequence[Tensor]) -> None:
    """Refuse a key of several chains, and gradients with a ``vmap`` axis that the key lacks: all lanes would get one noise.

    Raises:
        ValueError: with what to do instead.
    """
    if key.ndim:
        raise ValueError(
            f"state: it is of {len(key)} stacked chains, and this step is of one: make it by bc.parallel(step, {len(key)}), or "
            "take one of them, bc.unstack(state)[0]"
        )
    if is_transformed() and any(batch_levels(x) - batch_levels(key) for x in g):
        raise ValueError(
            "state: its key is one for all lanes of vmap, while the gradients differ, so that every lane would get the same "
            "noise: give each lane a state of its own, as bc.parallel does, or bc.stack(bc.fork(state, n))"
        )


def differentiable(leaves: Sequence[Any], params: Any) -> None:
    """Refuse parameters in which no gradient can be taken: they are real floating-point tensors.

    Raises:
        TypeError, ValueError: naming the first of them.
    """
    for leaf, path in zip(leaves, optree.tree_paths(params)):
        if is_dtensor(leaf) and is_transformed():
            raise ValueError(
                f"params: leaf {name(path)} is a DTensor, which vmap and torch.func cannot transform; run several chains with "
                "bc.parallel(step, n, loop=True)"
            )
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            what = leaf.dtype if isinstance(leaf, Tensor) else f"{type(leaf).__name__}, {short(leaf)}"
            raise TypeError(
                f"params: leaf {name(path)} is {what}, in which no gradient can be taken: make it a tensor of floating-point "
                "numbers, or keep it in the batch; of a module pass dict(module.named_parameters())"
            )


def dense(what: str, x: Any) -> None:
    """Refuse a gradient that is no dense tensor: noise, velocities and curvature are.

    Raises:
        TypeError: no tensor.
        ValueError: a sparse one.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{what} is {short(x)}, not a tensor")
    if x.layout is not torch.strided:
        raise ValueError(
            f"{what} is sparse ({x.layout}), and noise and momentum are dense: build the layer with sparse=False "
            "(torch.nn.Embedding), or pass .to_dense()"
        )


def unlike(what: str, i: int, x: Tensor, whose: str, shape: Any, dtype: Any, device: Any) -> NoReturn:
    """Refuse a leaf of another shape or dtype than the state's, or on another device than the parameter.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        f"{what}: leaf {i} has shape {tuple(x.shape)}, {x.dtype} on {x.device}, but {whose} {tuple(shape)}, {dtype} on "
        f"{device}; call init with these parameters, or convert one of them"
    )


def is_finite(x: Tensor) -> bool:
    """Whether a tensor is dense, and no entry is NaN or infinite; reads it."""
    return x.layout is torch.strided and bool(torch.isfinite(x).all())


def _is_iterable(x: Any) -> bool:
    return hasattr(x, "__iter__") and not isinstance(x, (str, bytes, type)) and getattr(x, "ndim", 1) > 0


def _is_dense(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.is_meta and not x.is_complex() and x.layout is torch.strided


def _is_real(x: Any) -> bool:
    if isinstance(x, Tensor):
        return not x.is_complex() and x.dtype != torch.bool
    return isinstance(x, Real) and not isinstance(x, bool)


def _is_tree(x: Any, fits: Callable[[Any], bool] = lambda leaf: isinstance(leaf, Tensor)) -> bool:
    """Whether a tree has leaves, and all of them fit."""
    leaves = optree.tree_leaves(x)
    return bool(leaves) and all(map(fits, leaves))


def _is_place(x: Any) -> bool:
    leaves = optree.tree_leaves(x)
    return (
        _is_tree(x, REALS.fits) and all(is_hidden(y) or is_finite(y) for y in leaves) and any(y.numel() for y in leaves)
    )


def _is_vector(x: Any) -> bool:
    entries = x.tolist() if getattr(x, "ndim", 0) == 1 and (not isinstance(x, Tensor) or _is_dense(x)) else x
    return isinstance(entries, Sequence) and not isinstance(entries, (str, bytes)) and all(map(SCALAR.fits, entries))


def _is_stack(x: Any) -> bool:
    return SAMPLED.fits(x) or _is_tree(x, lambda leaf: _is_dense(leaf) and leaf.ndim > 0)


ANY = Kind(lambda x: True, "anything")  # the function itself looks at it
BOOL = Kind(lambda x: isinstance(x, bool), "True or False")
TEXT = Kind(lambda x: isinstance(x, str), "a text")
FUNCTION = Kind(lambda x: callable(x) and not isinstance(x, type), "a function")
SEQUENCE = Kind(lambda x: isinstance(x, Sequence) and not isinstance(x, (str, bytes)), "a list")
MAPPING = instance(Mapping, "a dictionary")
FOLDER = Kind(
    lambda x: isinstance(x, (str, os.PathLike)) and str(x) != "" and str(x)[0] != "~",
    "the path of a directory, with ~ written out by os.path.expanduser",
)
PATH = Kind(lambda x: FOLDER.fits(x) and str(x) != ".", "the path of a file, with ~ written out by os.path.expanduser")
GENERATOR = instance(torch.Generator, "a torch.Generator").or_none()

WHOLE, SEED = whole(1), whole(0)
INDEX = Kind(lambda x: isinstance(x, int) and not isinstance(x, bool), "a whole number")
NUMBER, POSITIVE, NOT_NEGATIVE = number(), number("(0, inf)"), number("[0, inf)")
FROM_ZERO = number("[0, inf]")  # of links without noise, which accept what TorchOpt's accept
MOMENTUM = number("[0, 1)")
TEMPERATURE = number("[0, inf)", tensor=True, schedule=True, hint="1 / N samples a posterior of N data")
SCALAR = Kind(
    lambda x: NUMBER.fits(x) or (isinstance(x, Tensor) and not x.ndim and x.is_floating_point() and not x.is_meta),
    "a finite number or a real 0-d tensor",
    (Real, Tensor),
)
POSITIVES = Kind(
    lambda x: POSITIVE.fits(x) or (_is_dense(x) and (is_hidden(x) or bool((x > 0).all()))),
    "a positive number, or a dense tensor of positive numbers",
    (Real, Tensor),
)
VECTOR = Kind(_is_vector, "a list of numbers, or a tensor of one axis", (list, tuple, Tensor))

VALUES = Kind(_is_dense, "a dense, real tensor")
REALS = Kind(lambda x: _is_dense(x) and x.is_floating_point(), "a dense tensor of floating-point numbers")
NUMBERS_OF_CLASSES = Kind(
    lambda x: _is_dense(x) and x.dtype == torch.int64, "class numbers, a tensor of int64", (Tensor,)
)
TREE = Kind(_is_tree, "a tree of tensors")
NUMBERS = Kind(
    lambda x: all(map(_is_real, optree.tree_leaves(x, none_is_leaf=True))), "a tree of numbers and real tensors"
)
BY_NAME = Kind(
    lambda x: isinstance(x, Mapping) and all(isinstance(y, Tensor) for y in x.values()),
    "a dictionary of tensors by name",
)
PARAMS = Kind(lambda x: _is_tree(x, REALS.fits), "a tree of real tensors with values: parameters")
PLACE = Kind(_is_place, "a tree of dense, real, finite tensors: the parameters of a place", (dict, list, tuple, Tensor))
PREFIX = Kind(lambda x: not isinstance(x, type), "a tree like the parameters, a prefix of one, or a function to one")

INPUTS = Kind(lambda x: TEXT.fits(x) or FUNCTION.fits(x), "a key of the batch, or a function of it").or_none()
BATCH = Kind(
    lambda x: all(
        not isinstance(y, Tensor) or (y.layout is torch.strided and not y.is_meta) for y in optree.tree_leaves(x)
    ),
    "a batch of dense tensors with values",
)
BATCHES = Kind(_is_iterable, "batches, such as a list or a DataLoader")
BATCH_OR_BATCHES = Kind(
    lambda x: not isinstance(x, (str, bytes, bool, type)), "one batch, or batches such as a list or a DataLoader"
)
DATA = Kind(
    lambda x: (
        hasattr(x, "batches")
        or (_is_iterable(x) and (_is_dense(x) if isinstance(x, Tensor) else not hasattr(x, "__array__")))
    ),
    "inputs (of an array torch.as_tensor), a batch, or batches such as a list or a DataLoader",
)

MODULE = Kind(
    lambda x: isinstance(x, nn.Module) and not any(map(nn.parameter.is_lazy, x.parameters())),
    "a torch.nn.Module (with lazy layers: once it was called on a batch, which makes their weights)",
    (nn.Module,),
)
TX = having("a gradient transformation", "init", "update")
LIKELIHOOD = having("one of bc.likelihoods, called, such as bc.likelihoods.categorical()", "nll", "log_prob")
POSTERIOR = having("a bc.Gaussian posterior", "mean", "factorised")
WITH_CDF = having("a prediction with cdf, such as of likelihood.mixture or of an ensemble", "cdf")
SAMPLED = Kind(
    lambda x: hasattr(x, "chains") and hasattr(type(x), "params"),  # x.params reads draws
    "bc.Draws, such as bc.sample returns, or bc.Draws.from_trees of a list of parameters",
)
DRAWS = Kind(
    lambda x: _is_stack(x) and not getattr(x, "is_weighted", False),
    "Draws (of a chain whose draws have weights draws.equally_weighted()), or a tree of real tensors with one entry a draw on "
    "the first axis",
)

WORDS: dict[str, Kind] = {  # what an argument of this name is in every function that is checked by `takes`
    "batches": BATCHES,
    "build": FUNCTION,
    "burn_in": SEED,
    "chains": WHOLE,
    "checkpoint_seconds": NOT_NEGATIVE,
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
    "mesh": having("a DeviceMesh of torch.distributed", "get_coordinate").or_none(),
    "model": MODULE,
    "module": MODULE,
    "momentum": MOMENTUM,
    "outputs": REALS,
    "params": PLACE,
    "posterior": POSTERIOR,
    "progress": BOOL,
    "rank": WHOLE,
    "samples": WHOLE,
    "seed": SEED,
    "state": ANY,  # a chain looks at its own
    "steps": WHOLE,
    **dict.fromkeys(
        ("primals", "tangents"),
        Kind(lambda x: isinstance(x, (tuple, list)) and _is_tree(x), "a tuple of tensors, or of trees of them"),
    ),
    "temperature": POSITIVE,
    "thinning": WHOLE,
    "tolerance": POSITIVE,
    "tx": TX,
    "values": Kind(lambda x: NUMBER.fits(x) or _is_dense(x), "a number, or a dense, real tensor"),
}
ARGUMENTS: dict[str, Kind] = {  # likewise of factories of transformations
    "temperature": TEMPERATURE,
    "lr": number("[0, inf)", tensor=True, schedule=True),
    "step_size": number(tensor=True, schedule=True),
    "generator": GENERATOR,
    "betas": Kind(
        lambda x: isinstance(x, (tuple, list)) and len(x) == 2 and all(map(MOMENTUM.fits, x)),
        "two numbers in [0, 1)",
        (tuple, list),
    ),
    "temperatures": Kind(
        lambda x: SEQUENCE.fits(x) and all(map(POSITIVE.fits, x)), "a list of positive, finite numbers", (tuple, list)
    ),
    "mask": Kind(
        lambda x: FUNCTION.fits(x) or all(isinstance(bit, bool) for bit in optree.tree_leaves(x)),
        "a tree of True and False, or a function of the parameters",
    ),
    **dict.fromkeys(("momentum", "b1", "b2"), MOMENTUM),
    **dict.fromkeys(("alpha", "rho", "decay"), number("[0, 1]")),
    **dict.fromkeys(("weight_decay", "low", "high"), NUMBER),
    **dict.fromkeys(("eps", "eps_root", "lr_decay", "initial_scale", "initial_accumulator_value"), NOT_NEGATIVE),
    **dict.fromkeys(("friction", "loss_variance", "correction_factor", "strength"), NOT_NEGATIVE),
    **dict.fromkeys(("init_hessian", "variance_floor"), POSITIVE),
    "dampening": number("(-inf, 1)"),
    "thermostat_mass": POSITIVE.or_none(),
    "clip_radius": number("(0, inf]"),
    "zeta": number("(0, 1]"),
    "forgetting": number("(0, 1]", tensor=True),
    **dict.fromkeys(("init_scale", "prior_precision"), POSITIVE.or_tree()),
    "transition": NUMBER.or_tree(),
    "transition_noise": NOT_NEGATIVE.or_tree(),
    **dict.fromkeys(("omega", "step_size_fn"), Kind(callable, "a function of the step count")),
    **dict.fromkeys(
        ("optimizer", "scale_optimizer"), instance(GradientTransformation, "a gradient transformation").or_none()
    ),
    "freeze_after": SEED.or_none(),
    **dict.fromkeys(("burn_in", "start", "rank"), SEED),
    **dict.fromkeys(("cycle", "batch_size", "swap_every", "every"), WHOLE),
    **dict.fromkeys(("n_samples", "bins"), number("[1, 16777216]", integer=True)),
    **dict.fromkeys(("nesterov", "maximize", "moment_requires_grad", "centered", "use_accelerated_op"), BOOL),
    **dict.fromkeys(("antithetic", "stick_the_landing", "rescale_lr", "per_parameter", "lr_inside"), BOOL),
}
