"""Check the arguments of optimizers by their names, before anything is made.

torch's own constructors check the ranges of their numbers, but their messages ("Invalid learning rate") name neither the class
nor the argument. Here the type of every argument is checked first, by its name, for all classes. Errors that torch raises
afterwards get the call in front:

    bc.optim.SGD(lr=-1.0, temperature=0.5): Invalid learning rate: -1.0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain import kinds
from bayesopt_chain.checks import short
from bayesopt_chain.diagnostics.heat_guard import HeatGuard
from bayesopt_chain.kinds import Kind

# bound on hyperparameters: with larger ones squares overflow in float32, and torch's own steps end in NaN
LARGEST = 1e15


def _is_scalar(x: Any) -> bool:
    """Whether ``x`` is a real number (NaN and infinities included) or a real, dense tensor with one element."""
    if isinstance(x, Tensor):
        return x.numel() == 1 and not (x.is_complex() or x.is_meta or x.is_sparse or x.dtype == torch.bool)
    if type(x).__module__ == "numpy":
        return getattr(x, "ndim", 1) == 0 and x.dtype.kind in "iuf"
    return isinstance(x, float) or (isinstance(x, int) and not isinstance(x, bool) and abs(x) < 10**300)


def _is_real(x: Any) -> bool:
    return _is_scalar(x) and abs(_value(x)) <= LARGEST


def _value(x: Any) -> float:
    return float(x.detach() if isinstance(x, Tensor) else x)


def _are_real(x: Any) -> bool:
    return isinstance(x, (tuple, list)) and all(a is None or _is_real(a) for a in x)


NUMBER = Kind(_is_real, "a real number of at most 1e15, or a tensor with one", (int, float, Tensor))
PAIR = Kind(lambda x: _are_real(x) and len(x) == 2, "a pair of real numbers, or of None", (tuple, list))
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
    "etas": PAIR,
    "step_sizes": PAIR,
    "eps": NUMBER,
    "Adafactor.eps": PAIR,
    "line_search_fn": kinds.one_of("strong_wolfe").or_none(),
    "adjust_lr_fn": Kind(lambda x: x is None or isinstance(x, str), "the name of a rule, or None"),
    "heat_guard": Kind(
        lambda x: x is None or isinstance(x, (str, HeatGuard)), "'warn', None or a bc.diagnostics.HeatGuard"
    ),
    "IVON.temperature": Kind(lambda x: _is_real(x) or (isinstance(x, float) and not x > 0), "a number of at most 1e15"),
    "temperature": Kind(_is_scalar, "a number, or a tensor with one"),
    "alpha": Kind(
        lambda x: _is_real(x) and abs(_value(x)) <= 100.0, "a real number of at most 100", (int, float, Tensor)
    ),
    # with weights outside [0, 1] the average of squares may be negative, and has no root
    "RMSprop.alpha": Kind(
        lambda x: _is_real(x) and 0.0 <= _value(x) <= 1.0, "a number from 0 to 1", (int, float, Tensor)
    ),
    "freeze_after": kinds.WHOLE.or_none(),
    "steps_per_epoch": kinds.WHOLE.or_none(),
    "max_eval": kinds.WHOLE.or_none(),
    "max_iter": kinds.WHOLE,
    "history_size": kinds.WHOLE,
    "ns_steps": kinds.WHOLE,
    "ns_coefficients": Kind(lambda x: _are_real(x) and len(x) == 3, "three real numbers", (tuple, list)),
    "clip_radius": Kind(lambda x: _is_real(x) or (isinstance(x, float) and x > 0), "a real number, or inf"),
    "make_chain": kinds.FUNCTION,
    "beta2_decay": NUMBER,
}
_NUMBERS = (
    "lr", "momentum", "dampening", "weight_decay", "rho", "lambd", "t0", "lr_decay", "d",
    "initial_accumulator_value", "momentum_decay", "tolerance_grad", "tolerance_change", "init_hessian",
)  # fmt: skip
_FLAGS = (
    "maximize", "capturable", "differentiable", "nesterov", "amsgrad", "keep_draws", "centered",
    "decoupled_weight_decay", "rescale_lr",
)  # fmt: skip
_KINDS |= {**dict.fromkeys(_NUMBERS, NUMBER), **dict.fromkeys(_FLAGS, kinds.BOOL)}
_KINDS |= dict.fromkeys(("foreach", "fused"), kinds.BOOL.or_none())


def require(who: str, given: Mapping[str, Any]) -> None:
    """Raise for the first argument, or option of a group, whose value does not fit its name.

    Args:
        who: the class or method in messages.
        given: arguments by their names. Names that are not listed in this module are not checked.

    Raises:
        TypeError, ValueError: the message names the argument.
    """
    for name, value in given.items():
        own = f"{who.removeprefix('bc.optim.').partition('.')[0]}.{name}"  # an entry as "RMSprop.alpha" goes first
        if (kind := _KINDS.get(own, _KINDS.get(name))) is not None:
            kinds.require(who, **{name: (value, kind)})


def require_group(who: str, group: Any) -> None:
    """Check that ``group`` is a group of parameters, and check its options.

    Raises:
        TypeError, ValueError: the message names ``param_group``, or the option.
    """
    if not isinstance(group, Mapping) or not isinstance(group.get("params"), (Tensor, Sequence, Iterator)):
        raise TypeError(
            f"{who}: param_group must be a dictionary with 'params', a parameter or a list of them, got {short(group)}"
        )
    require(who, {name: value for name, value in group.items() if name != "params"})


def require_moves(who: str, options: Mapping[str, Any]) -> None:
    """Check that autograd allows a step with ``differentiable=True`` to change the parameters in place.

    Raises:
        ValueError: a parameter is a leaf that requires grad.
    """
    params = options["params"]
    given = [params] if isinstance(params, Tensor) else params if isinstance(params, Sequence) else []
    tensors = [x[1] if isinstance(x, tuple) and len(x) == 2 else x for x in given]
    if options.get("differentiable") and any(isinstance(p, Tensor) and p.is_leaf and p.requires_grad for p in tensors):
        raise ValueError(
            f"{who}: differentiable=True with parameters that are leaves which require grad, and which autograd lets nobody "
            "change in place: give it tensors that were computed, such as [p.clone() for p in params]"
        )


def require_state_dict(who: str, state_dict: Any) -> None:
    """Check that ``state_dict`` is a state dict of an optimizer.

    Raises:
        TypeError: it is not.
    """
    groups = state_dict.get("param_groups") if isinstance(state_dict, Mapping) else None
    if not isinstance(groups, Sequence) or not all(isinstance(g, Mapping) for g in groups) or "state" not in state_dict:
        raise TypeError(
            f"{who}: state_dict must be what state_dict() of an optimizer returns, with 'state' and 'param_groups', got "
            f"{short(state_dict)}"
        )


@contextmanager
def with_call(call: Callable[[], str]) -> Iterator[None]:
    """Put the call in front of the message of an error that torch raises inside.

    Errors other than TypeError and ValueError become ValueError.

    Args:
        call: returns the call as text.

    Raises:
        TypeError, ValueError: the error that torch raised, with the call in front.
    """
    try:
        yield
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError, OverflowError) as err:
        if str(err).startswith("bc.optim."):
            raise
        kind = err if isinstance(err, (TypeError, ValueError)) else ValueError()
        raise type(kind)(f"{call()}: {err}") from err


def call_of(who: str, given: Mapping[str, Any]) -> str:
    """Return a call as text, ``bc.optim.SGD(lr=0.1)``, with long values shortened."""
    shown = [f"{name}={short(value)}" for name, value in given.items()]
    return f"{who}({', '.join(shown)})"


def require_closure(who: str, closure: Any) -> None:
    """Check that a closure can be called; raise TypeError if not."""
    kinds.require(f"{who}.step", closure=(closure, kinds.FUNCTION.or_none()))
