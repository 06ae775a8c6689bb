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

VERSION = 1
UNKNOWN = "unknown"
CHOSEN = 1 << 32  # a seed below it was chosen, one above it was drawn: by torch, or by a hash of a rank's number
FEW, DEEP = 16, 12  # numbers of a tensor that are written out; levels of nesting


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
    if isinstance(x, functools.partial):
        return ["partial", inner(x.func), inner(list(x.args)), inner(x.keywords)]
    if isinstance(x, (types.FunctionType, types.MethodType)):
        return _function(x, inner)
    if isinstance(x, torch.Generator):
        return _seed(x.initial_seed())
    if isinstance(x, (torch.dtype, torch.device, type, complex, bytes, types.BuiltinFunctionType)):
        return str(getattr(x, "__qualname__", x))
    if dataclasses.is_dataclass(x):
        return [type(x).__name__, {f.name: inner(getattr(x, f.name)) for f in dataclasses.fields(x) if _is_told(x, f)}]
    if isinstance(x, Mapping):
        return {str(k): inner(v) for k, v in x.items()}
    if isinstance(x, (set, frozenset)):
        return sorted(map(str, x))
    if isinstance(x, GradientTransformation) and not isinstance(getattr(x, "transformation", None), type(None)):
        return [type(x).__name__, inner(getattr(x, "transformation"))]  # noqa: B009
    if isinstance(x, (list, tuple)):
        return [*([type(x).__name__] if hasattr(x, "_fields") else []), *map(inner, x)]
    return UNKNOWN


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
    """The name of a function, its code, its defaults, what it closes over, and the numbers among its globals."""
    f = inspect.unwrap(f)
    f = getattr(f, "__func__", f)
    if not isinstance(f, types.FunctionType):
        return UNKNOWN
    closed = inspect.getclosurevars(f)
    numbers = {n: v for n, v in closed.globals.items() if isinstance(v, (bool, int, float, str))}
    cells = {} if f.__closure__ is None else dict(zip(f.__code__.co_freevars, f.__closure__))
    return {
        "function": f"{f.__module__}.{f.__qualname__}",
        "code": {".".join(map(str, sys.version_info[:2])): code_digest(f.__code__)},
        "sees": {
            **{n: inner(v) for n, v in numbers.items()},
            **{n: _cell(c, inner) for n, c in cells.items()},
            "defaults": inner([*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()]),
        },
    }


def _cell(cell: Any, inner: Callable[[Any], Any]) -> Any:
    try:
        return inner(cell.cell_contents)
    except ValueError:  # empty: the function refers to itself before it is bound
        return UNKNOWN


def code_digest(code: types.CodeType) -> str:
    """16 hexadecimal digits of a hash of byte code, its constants and names; not of line numbers."""
    constants = [code_digest(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    text = " ".join([code.co_code.hex(), *constants, *code.co_names])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def describe_optimizer(optimizer: torch.optim.Optimizer, without: tuple[str, ...] = ()) -> Any:
    """The class of an optimizer, the hyperparameters of its groups, and its chains.

    Args:
        optimizer: as it stands; ``lr`` is told as it was before a scheduler changed it, where one did.
        without: hyperparameters that are not told.
    """
    groups = [
        {k: v for k, v in group.items() if k not in ("params", "noise_key", "noise_count")}
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
