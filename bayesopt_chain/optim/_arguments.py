"""What the arguments of an optimizer may be, by their names: what does not fit is refused before anything is made.

torch's own constructors check the ranges of their numbers, and say "Invalid learning rate" without the class or the name. Here
every argument is looked at first, whichever class takes it, and what torch refuses afterwards is said with the call:

    bc.optim.SGD(lr=-1.0, temperature=0.5): Invalid learning rate: -1.0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain import kinds
from bayesopt_chain.checks import short
from bayesopt_chain.kinds import Kind


def _is_real(x: Any) -> bool:
    """Whether something is a real number, or a real tensor with one element and a value."""
    if isinstance(x, Tensor):
        return x.numel() == 1 and not (x.is_complex() or x.is_meta or x.is_sparse) and bool(torch.isfinite(x))
    if type(x).__module__ == "numpy":
        return getattr(x, "ndim", 1) == 0 and math.isfinite(x)
    return isinstance(x, (int, float)) and abs(x) < 10**300


def _are_real(x: Any) -> bool:
    return isinstance(x, (tuple, list)) and all(a is None or _is_real(a) for a in x)


NUMBER = Kind(_is_real, "a finite real number, or a tensor with one", (int, float, Tensor))
FLAG = kinds.BOOL.or_none()
_PARAMS = Kind(
    lambda x: (
        hasattr(x, "__iter__") and not isinstance(x, (str, bytes, Mapping, Tensor, type)) and getattr(x, "ndim", 1) > 0
    ),
    "parameters, parameters with names, or groups of them, in a list or an iterator",
)
_KINDS = {
    "params": _PARAMS,
    "generator": kinds.GENERATOR,
    "betas": Kind(lambda x: _are_real(x) and len(x) in (2, 3), "a tuple of real numbers"),
    "etas": Kind(_are_real, "a pair of real numbers"),
    "step_sizes": Kind(_are_real, "a pair of real numbers"),
    "eps": Kind(lambda x: _is_real(x) or _are_real(x), "a real number, or a pair of them"),
    "line_search_fn": Kind(lambda x: x is None or isinstance(x, str), "the name of a line search, or None"),
    "adjust_lr_fn": Kind(lambda x: x is None or isinstance(x, str), "the name of a rule, or None"),
    "stream": Kind(lambda x: x is None or isinstance(x, str), "the name of a stream, or None"),
    "heat_guard": Kind(
        lambda x: x is None or not isinstance(x, (Tensor, type)), "'warn', None or a bc.diagnostics.HeatGuard"
    ),
    "freeze_after": kinds.WHOLE.or_none(),
    "steps_per_epoch": kinds.WHOLE.or_none(),
    "max_eval": kinds.WHOLE.or_none(),
    "max_iter": kinds.WHOLE,
    "history_size": kinds.WHOLE,
    "ns_steps": kinds.WHOLE,
    "ns_coefficients": Kind(_are_real, "a tuple of real numbers"),
    "clip_radius": Kind(lambda x: _is_real(x) or (isinstance(x, float) and x > 0), "a real number, or inf"),
    "make_chain": kinds.FUNCTION,
    "beta2_decay": NUMBER,
}
_NUMBERS = (
    "lr", "momentum", "dampening", "weight_decay", "temperature", "alpha", "rho", "lambd", "t0", "lr_decay", "d",
    "initial_accumulator_value", "momentum_decay", "tolerance_grad", "tolerance_change", "init_hessian",
)  # fmt: skip
_FLAGS = (
    "foreach", "fused", "maximize", "capturable", "differentiable", "nesterov", "amsgrad", "keep_draws", "centered",
    "decoupled_weight_decay", "rescale_lr",
)  # fmt: skip
_KINDS |= {**dict.fromkeys(_NUMBERS, NUMBER), **dict.fromkeys(_FLAGS, FLAG)}


def require(who: str, given: Mapping[str, Any]) -> None:
    """Refuse the first argument, or option of a group, that is not what its name says.

    Args:
        who: the class or method in messages.
        given: arguments by their names; one without a kind of its own is left to the class.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    for name, value in given.items():
        if (kind := _KINDS.get(name)) is not None:
            kinds.require(who, **{name: (value, kind)})


def require_group(who: str, group: Any) -> None:
    """Refuse what is no group of parameters, or an option of another kind.

    Raises:
        TypeError, ValueError: naming ``param_group``, or the option.
    """
    if not isinstance(group, Mapping) or not isinstance(group.get("params"), (Tensor, Sequence, Iterator)):
        raise TypeError(
            f"{who}: param_group must be a dictionary with 'params', a parameter or a list of them, got {short(group)}"
        )
    require(who, {name: value for name, value in group.items() if name != "params"})


def require_state_dict(who: str, state_dict: Any) -> None:
    """Refuse what is no state dict of an optimizer.

    Raises:
        TypeError: naming ``state_dict``.
    """
    groups = state_dict.get("param_groups") if isinstance(state_dict, Mapping) else None
    if not isinstance(groups, Sequence) or not all(isinstance(g, Mapping) for g in groups) or "state" not in state_dict:
        raise TypeError(
            f"{who}: state_dict must be what state_dict() of an optimizer returns, with 'state' and 'param_groups', got "
            f"{short(state_dict)}"
        )


@contextmanager
def said_with(call: Callable[[], str]) -> Iterator[None]:
    """What torch refuses, said with the call that it refuses.

    Args:
        call: the call in words.

    Raises:
        TypeError, ValueError: what torch raised, with the call in front.
    """
    try:
        yield
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError, OverflowError) as err:
        if str(err).startswith("bc.optim."):
            raise
        kind = err if isinstance(err, (TypeError, ValueError)) else ValueError()
        raise type(kind)(f"{call()}: {err}") from err


def call_of(who: str, given: Mapping[str, Any]) -> str:
    """A call in words: ``bc.optim.SGD(lr=0.1)``; parameters are only counted."""
    shown = [f"{name}={short(value)}" for name, value in given.items()]
    return f"{who}({', '.join(shown)})"
