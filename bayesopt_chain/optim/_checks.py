"""Check the arguments of optimizers by their names, and before a step at temperature > 0 all that it needs.

torch's own constructors check the ranges of their numbers, but their messages ("Invalid learning rate") name neither the class
nor the argument. Here the type of every argument is checked first, by its name, for all classes. Errors that torch raises
afterwards get the call in front:

    bc.optim.SGD(lr=-1.0, temperature=0.5): Invalid learning rate: -1.0
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain._torch import is_dtensor
from bayesopt_chain.diagnostics.heat_guard import HeatGuard

# bound on hyperparameters: with larger ones squares overflow in float32, and torch's own steps end in NaN
LARGEST = 1e15
_HALF = (torch.float16, torch.bfloat16)
KINDS = frozenset((Tensor, torch.nn.Parameter))  # the types of parameters that can be sampled


def _is_real(x: Any) -> bool:
    """Whether ``x`` is a real number of at most 1e15, or a real, dense tensor with one such element."""
    if isinstance(x, Tensor):
        if x.numel() != 1 or x.is_complex() or x.is_meta or x.is_sparse or x.dtype == torch.bool:
            return False
        x = x.item()
    return isinstance(x, Real) and not isinstance(x, bool) and abs(cast(float, x)) <= LARGEST


def _are_real(x: Any) -> bool:
    return isinstance(x, (tuple, list)) and all(a is None or _is_real(a) for a in x)


NUMBER = checks.Kind(_is_real, "a real number of at most 1e15, or a tensor with one", (int, float, Tensor))
PAIR = checks.Kind(lambda x: _are_real(x) and len(x) == 2, "a pair of real numbers, or of None", (tuple, list))
_PARAMS = checks.Kind(
    lambda x: hasattr(x, "__iter__") and not hasattr(x, "ndim") and not isinstance(x, (str, bytes, Mapping, type)),
    "parameters, parameters with names, or groups of them, in a list or an iterator",
)
_KINDS = {
    "params": _PARAMS,
    "param_group": checks.Kind(
        lambda x: isinstance(x, Mapping) and isinstance(x.get("params"), (Tensor, Sequence, Iterator)),
        "a dictionary with 'params', a parameter or a list of them",
    ),
    "state_dict": checks.Kind(
        lambda x: (
            isinstance(x, Mapping)
            and "state" in x
            and isinstance(x.get("param_groups"), Sequence)
            and all(isinstance(group, Mapping) for group in x["param_groups"])
        ),
        "what state_dict() of an optimizer returns, with 'state' and 'param_groups'",
    ),
    "generator": checks.GENERATOR,
    "betas": checks.Kind(lambda x: _are_real(x) and len(x) in (2, 3), "a tuple of real numbers"),
    "etas": PAIR,
    "step_sizes": PAIR,
    "eps": NUMBER,
    "Adafactor.eps": PAIR,
    "line_search_fn": checks.one_of("strong_wolfe").or_none(),
    "adjust_lr_fn": checks.Kind(lambda x: x is None or isinstance(x, str), "the name of a rule, or None"),
    "heat_guard": checks.Kind(
        lambda x: x is None or isinstance(x, HeatGuard) or (isinstance(x, str) and x == "warn"),
        "'warn', None or a bc.diagnostics.HeatGuard",
        (str,),
    ),
    "IVON.lr": checks.number("[0, 1e15]", tensor=True),
    "IVON.temperature": checks.number("(0, 1e15]", tensor=True),
    "IVON.init_hessian": checks.number("(0, 1e15]", tensor=True),
    "IVON.weight_decay": checks.number("[0, 1e15]", tensor=True),
    "IVON.betas": checks.Kind(
        lambda x: _are_real(x) and len(x) == 2 and None not in x and 0 <= x[0] < 1 and 0 <= x[1] <= 1,
        "two numbers, the first in [0, 1), the second in [0, 1]",
        (tuple, list),
    ),
    "clip_radius": checks.number("(0, inf]"),
    "alpha": checks.Kind(
        lambda x: _is_real(x) and abs(x) <= 100.0, "a real number of at most 100", (int, float, Tensor)
    ),
    # with weights outside [0, 1] the average of squares may be negative, and has no root
    "RMSprop.alpha": checks.Kind(
        lambda x: _is_real(x) and 0.0 <= x <= 1.0, "a number from 0 to 1", (int, float, Tensor)
    ),
    "freeze_after": checks.WHOLE.or_none(),
    "steps_per_epoch": checks.WHOLE.or_none(),
    "max_eval": checks.WHOLE.or_none(),
    "max_iter": checks.WHOLE,
    "history_size": checks.WHOLE,
    "ns_steps": checks.WHOLE,
    "ns_coefficients": checks.Kind(lambda x: _are_real(x) and len(x) == 3, "three real numbers", (tuple, list)),
    "make_chain": checks.FUNCTION,
    "closure": checks.FUNCTION,
    **dict.fromkeys(
        (
            "temperature",
            "lr",
            "momentum",
            "dampening",
            "weight_decay",
            "rho",
            "lambd",
            "t0",
            "lr_decay",
            "d",
            "beta2_decay",
        ),
        NUMBER,
    ),
    **dict.fromkeys(("initial_accumulator_value", "momentum_decay", "tolerance_grad", "tolerance_change"), NUMBER),
    **dict.fromkeys(("maximize", "capturable", "differentiable", "nesterov", "amsgrad", "keep_draws"), checks.BOOL),
    **dict.fromkeys(("centered", "decoupled_weight_decay", "rescale_lr"), checks.BOOL),
    **dict.fromkeys(("foreach", "fused"), checks.BOOL.or_none()),
}


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
            kind(f"{who}: {name}", value)


@contextmanager
def with_call(who: str, /, **given: Any) -> Iterator[None]:
    """Put the call, ``bc.optim.SGD(lr=0.1)``, in front of the message of an error that torch raises inside.

    Errors other than TypeError and ValueError become ValueError.

    Args:
        who: the function that is called.
        given: its arguments.

    Raises:
        TypeError, ValueError: the error that torch raised, with the call in front.
    """
    try:
        yield
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError, OverflowError) as err:
        if str(err).startswith("bc.optim."):
            raise
        kind = err if isinstance(err, (TypeError, ValueError)) else ValueError()
        shown = [name if value is ... else f"{name}={checks.short(value)}" for name, value in given.items()]
        raise type(kind)(f"{who}({', '.join(shown)}): {err}") from err


def check_leaf(who: str, p: Tensor, group: dict[str, Any]) -> None:
    """Check that a parameter can be sampled.

    Raises:
        ValueError: it cannot; the message says what to do instead.
    """
    if p.grad is not None and p.grad.is_sparse and group.get("momentum", 0):
        raise ValueError(f"{who}: sparse gradients and momentum at temperature > 0: set momentum=0, or sparse=False")
    if group.get("fused") and "dampening" in group and p.is_cpu and p.dtype in _HALF:
        raise ValueError(
            f"{who}: fused=True with {p.dtype} on a CPU: the fused SGD of torch 2.13 leaves such parameters where they are, "
            "and only their noise would move them; leave fused out"
        )
    if p.is_complex():
        raise ValueError(f"{who}: complex parameters at temperature > 0: sample torch.view_as_real of them")
    if p.grad is not None and is_dtensor(p) != is_dtensor(p.grad):
        raise ValueError(
            f"{who}: a parameter is a DTensor and its gradient a plain tensor of shape {tuple(p.grad.shape)}, or the other way "
            "round; make it by loss.backward()"
        )
    if type(p) not in KINDS and not is_dtensor(p):
        raise ValueError(
            f"{who}: a parameter of type {type(p).__name__} at temperature > 0: noise on the pieces of a wrapped "
            "tensor would not be independent; sample plain tensors, or DTensors"
        )


def check_state(who: str, p: Tensor, state: Mapping[str, Any], numbers: Collection[str]) -> None:
    """Check that velocities, averages and draws have the shape of their parameter.

    Torch's kernels do not check it: they would write past the end of a tensor that is too small.

    Args:
        who: the name of the optimizer in messages.
        p: the parameter.
        state: its entry of the optimizer's state.
        numbers: the names of entries that are numbers.

    Raises:
        ValueError: one of them has another shape, as in the checkpoint of a layer of another width.
    """
    for name, x in state.items():
        if isinstance(x, Tensor) and name not in numbers and x.shape != p.shape:
            raise ValueError(
                f"{who}: {name} has the shape {tuple(x.shape)} and its parameter {tuple(p.shape)}. Was the state saved for "
                "a layer of another width, or the parameter resized by .data? Remove the entry (del optimizer.state[p]), or "
                "make a new optimizer"
            )


def check_memory(who: str, names: Sequence[str], params: Sequence[Tensor | None]) -> None:
    """Check that no two parameters share memory: each would get a noise of its own, and their sum is too hot.

    Raises:
        ValueError: two do; the message names them.
    """
    if (pair := checks.sharing(params)) is not None:
        first, second = (names[i] for i in sorted(pair))
        raise ValueError(
            f"{who}: parameters {first} and {second} share memory, so that at temperature > 0 it would get the noise of both; "
            "tie weights by one Parameter (b.weight = a.weight), which is given to the optimizer once; of columns of one "
            "tensor, which lie between each other, make parameters of copies"
        )
