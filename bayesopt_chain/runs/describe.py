"""What an object is, as JSON that compares: links and their hyperparameters, schedules, functions and what they close over.

A description is made of structure, never of ``repr``: a class and those of its fields that are not at their defaults. Two
descriptions are compared by :func:`difference`; what neither can know is ``UNKNOWN`` and equals everything. ``VERSION`` counts
changes of the rules here: descriptions of two versions are not compared.
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
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torchopt.base import GradientTransformation

from bayesopt_chain.core.chain import Chain
from bayesopt_chain.distributed.shards import local

VERSION = 3
UNKNOWN = "unknown"
CHOSEN = 1 << 32  # a seed below it was chosen, one above it was drawn: by torch, or by a hash of a rank's number
FEW, DEEP = 16, 12  # numbers of a tensor that are written out; levels of nesting
ATTRIBUTES = 3  # levels of what a callable object holds: it may refer to itself


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
    if x is None or isinstance(x, (bool, int, str)):
        return x
    if isinstance(x, float):
        return x if math.isfinite(x) else str(x)
    if depth > DEEP:
        return UNKNOWN

    def inner(y: Any) -> Any:
        return describe(y, depth + 1)

    if isinstance(x, Tensor):
        return _tensor(x)
    if isinstance(x, Chain):
        return [type(x).__name__, *map(inner, x.links)]
    if isinstance(x, (types.FunctionType, types.MethodType, functools.partial)):
        return _function(x, inner) if isinstance(x, types.FunctionType) else describe_callable(x, depth)
    if isinstance(x, torch.Generator):
        return _seed(x.initial_seed())
    if isinstance(x, (torch.dtype, torch.device, type, complex, bytes, types.BuiltinFunctionType)):
        return str(getattr(x, "__qualname__", x))
    if dataclasses.is_dataclass(x) and not (callable(x) and type(x).__module__.partition(".")[0] != "bayesopt_chain"):
        return [type(x).__name__, {f.name: inner(getattr(x, f.name)) for f in dataclasses.fields(x) if _is_told(x, f)}]
    if isinstance(x, Mapping):
        return {str(k): inner(v) for k, v in x.items()}
    if isinstance(x, (set, frozenset)):
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
    if depth > DEEP:
        return UNKNOWN

    def inner(y: Any) -> Any:
        return describe(y, depth + 1)

    def held(y: Any) -> Any:
        return describe(y, max(depth + 1, DEEP + 1 - ATTRIBUTES))

    if isinstance(f, functools.partial):
        of = describe_callable(f.func, depth + 1)
        of = of if isinstance(of, dict) else {"function": of, "code": {}, "sees": {}}
        return {**of, "sees": {**of["sees"], "bound": [inner(list(f.args)), inner(f.keywords)]}}
    if isinstance(f, types.BuiltinFunctionType):
        return {"function": f.__qualname__, "code": {}, "sees": {}}
    if isinstance(f, types.MethodType):
        of, owner = _function(f, inner), f.__self__
        known = isinstance(of, dict) and not isinstance(owner, type)
        return {**of, "sees": {**of["sees"], "self": _attributes(owner, held)}} if known else of
    if inspect.isfunction(inspect.unwrap(f)):
        return _function(f, inner)
    kind = type(f)
    if not isinstance(kind.__call__, types.FunctionType):
        return UNKNOWN
    homes = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("builtins", "torch")]
    codes = [m.__code__ for base in homes for _, m in sorted(vars(base).items()) if isinstance(m, types.FunctionType)]
    digest = hashlib.sha256(" ".join(map(code_digest, codes)).encode()).hexdigest()[:16]
    return {
        "function": f"{kind.__module__}.{kind.__qualname__}",
        "code": {_python(): digest},
        "sees": {"self": _attributes(f, held)},
    }


def _attributes(x: Any, held: Callable[[Any], Any]) -> dict[str, Any]:
    """What an object holds; of a module its settings, since its parameters and buffers are what a run moves."""
    names = {
        n: v for n, v in getattr(x, "__dict__", {}).items() if not (isinstance(x, torch.nn.Module) and n[:1] == "_")
    }
    return {n: held(v) for n, v in names.items()}


def _seed(x: int) -> Any:
    return ["generator", x] if x < CHOSEN else UNKNOWN


def _is_told(x: Any, field: dataclasses.Field) -> bool:
    """Whether a field has another value than its default: only those are told, so that a link may learn a new option."""
    value = getattr(x, field.name)
    default = field.default
    return (
        default is dataclasses.MISSING
        or isinstance(value, Tensor)
        or type(value) is not type(default)
        or value != default
    )


def _tensor(x: Tensor) -> Any:
    x = local(x.detach())
    about: list[Any] = ["tensor", str(x.dtype).removeprefix("torch."), list(x.shape)]
    if x.numel() <= FEW and not x.dtype.is_complex:
        return [*about, [describe(v) for v in x.reshape(-1).tolist()]]
    some = x.reshape(-1)[:: max(1, x.numel() >> 16)].cpu().contiguous()
    return [*about, zlib.crc32(some.view(torch.uint8).numpy().tobytes())]


def _function(f: Any, inner: Callable[[Any], Any]) -> Any:
    """The name of a function, its code, its defaults, what it closes over, and what it reads from its module: numbers,
    tensors, and the code of functions that are of the same module."""
    f = inspect.unwrap(f)
    f = getattr(f, "__func__", f)
    if not isinstance(f, types.FunctionType):
        return UNKNOWN
    closed = inspect.getclosurevars(f)
    seen = {n: inner(v) for n, v in closed.globals.items() if isinstance(v, (bool, int, float, str, Tensor))}
    helpers = {n: v for n, v in closed.globals.items() if getattr(v, "__module__", None) == f.__module__}
    code = {n: code_digest(v.__code__) for n, v in helpers.items() if isinstance(v, types.FunctionType)}
    cells = {} if f.__closure__ is None else dict(zip(f.__code__.co_freevars, f.__closure__))
    return {
        "function": f"{f.__module__}.{f.__qualname__}",
        "code": {_python(): code_digest(f.__code__)},
        "sees": {
            **seen,
            **{n: {"code": {_python(): digest}} for n, digest in code.items()},
            **{n: _cell(c, inner) for n, c in cells.items()},
            "defaults": inner([*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()]),
        },
    }


def _python() -> str:
    """The version of Python, whose byte code alone compares."""
    return ".".join(map(str, sys.version_info[:2]))


def _cell(cell: Any, inner: Callable[[Any], Any]) -> Any:
    try:
        return inner(cell.cell_contents)
    except ValueError:  # empty: the function refers to itself before it is bound
        return UNKNOWN


def code_digest(code: types.CodeType) -> str:
    """16 hexadecimal digits of a hash of byte code, its constants and names; not of line numbers."""
    constants = [_constant(c) for c in code.co_consts]
    text = " ".join([code.co_code.hex(), *constants, *code.co_names])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _constant(c: Any) -> str:
    """A constant of byte code; the order of a set is another in every process."""
    if isinstance(c, types.CodeType):
        return code_digest(c)
    return repr(sorted(map(repr, c)) if isinstance(c, frozenset) else c)


def describe_optimizer(optimizer: torch.optim.Optimizer, without: tuple[str, ...] = ()) -> Any:
    """The class of an optimizer, the hyperparameters of its groups, and its chains.

    Args:
        optimizer: as it stands; ``lr`` is told as it was before a scheduler changed it, where one did.
        without: hyperparameters that are not told.
    """
    groups = [
        {k: v for k, v in group.items() if k not in ("params", "noise_key", "noise_count", "chain_state")}
        for group in optimizer.param_groups
    ]
    groups = [{**g, "lr": g.get("initial_lr", g.get("lr"))} for g in groups]
    groups = [{k: v for k, v in g.items() if k not in without} for g in groups]
    chains = [built.tx for built in getattr(optimizer, "_chains", ())]
    about = {"kind": type(optimizer).__name__, "groups": groups, "chains": chains}
    seed = getattr(optimizer, "_seed", None)  # of the generator that it was given
    return describe(about if seed is None else {**about, "generator": _seed(seed)})


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
                return f"{inside} is {_short(a.get(name, 'absent'))}, here {_short(b.get(name, 'absent'))}"
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
    return (
        ""
        if (a == b and type(a) is type(b)) or _same_number(a, b)
        else f"{where or 'it'} is {_short(a)}, here {_short(b)}"
    )


def _same_number(a: Any, b: Any) -> bool:
    return isinstance(a, (int, float)) and isinstance(b, (int, float)) and a == b


def _short(x: Any) -> str:
    text = str(x)
    return text if len(text) <= 120 else f"{text[:110]}..."
