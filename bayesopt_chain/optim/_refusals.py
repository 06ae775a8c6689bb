"""The checks of an optimizer at temperature > 0, made when it is constructed or before a step moves anything."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain.checks import sharing
from bayesopt_chain.optim._rule import Linear


def temperature_of(who: str, group: dict[str, Any]) -> float:
    """Read a group's temperature: a number, or a tensor of one element.

    Raises:
        TypeError: the temperature is a function, as schedules of this library are; torch's optimizers have no count to call
            it with.
        ValueError: it is negative, infinite or NaN, or a tensor that requires grad.
    """
    temperature = group["temperature"]
    if callable(temperature):
        raise TypeError(
            f"{who}: temperature is a function; set group['temperature'] in the loop, or give a 0-d tensor and fill it"
        )
    if torch.is_tensor(temperature) and temperature.requires_grad:
        raise ValueError(f"{who}: temperature requires grad, which a step does not carry; detach it")
    value = float(temperature)
    if not 0.0 <= value < float("inf"):
        raise ValueError(f"{who}: temperature must be non-negative and finite, got {temperature!r}")
    return value


def momentum_of(who: str, value: Any, what: str) -> float:
    """Read a momentum, or the decay of an average.

    Raises:
        ValueError: it lies outside [0, 1).
    """
    momentum = float(value)
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"{who}: {what} must lie in [0, 1) at temperature > 0, got {momentum}")
    return momentum


def check_group(who: str, group: dict[str, Any], adaptive: bool, refusal: str | None, spread: bool) -> None:
    """Check that noise is known for the options of a group.

    Args:
        who: the name of the optimizer in messages.
        group: the group.
        adaptive: whether the step divides by a denominator that it computes from the gradients.
        refusal: the reason why no noise is known for the class; ``None`` if noise is known.
        spread: whether the parameters are DTensors or parts of leaves.

    Raises:
        ValueError: no noise is known; the message names the option.
    """
    if refusal is not None:
        raise ValueError(f"{who}: no temperature above 0: {refusal}")
    if group.get("capturable"):
        raise ValueError(
            f"{who}: capturable=True at temperature > 0: the noise counts steps on the host. "
            "Set capturable=False, or use bc.make_step with bc.capture"
        )
    if spread and group.get("differentiable"):
        raise ValueError(
            f"{who}: differentiable=True with parameters that are DTensors or parts of leaves at temperature > 0: their noise "
            "is numbered by the elements of the whole parameter and drawn on this rank's part; leave it out"
        )
    if group.get("differentiable"):
        moving = [name for name in ("lr", "weight_decay") if getattr(group.get(name), "requires_grad", False)]
        if adaptive or moving:
            what = "an adaptive scaling" if adaptive else f"{moving[0]} that requires grad"
            raise ValueError(
                f"{who}: differentiable=True with {what} at temperature > 0 would lose the noise's derivative; "
                "set temperature=0, or use bc.meta"
            )


def check_leaf(who: str, p: Tensor, group: dict[str, Any]) -> None:
    """Check that a parameter can be sampled.

    Raises:
        ValueError: it cannot; the message says what to do instead.
    """
    if p.grad is not None and p.grad.is_sparse and group.get("momentum", 0):
        raise ValueError(f"{who}: sparse gradients and momentum at temperature > 0: set momentum=0, or sparse=False")
    if p.is_complex():
        raise ValueError(f"{who}: complex parameters at temperature > 0: sample torch.view_as_real of them")
    if type(p) not in (Tensor, torch.nn.Parameter):
        raise ValueError(
            f"{who}: a parameter of type {type(p).__name__} at temperature > 0: noise on the pieces of a wrapped "
            "tensor would not be independent; sample plain tensors, or DTensors"
        )


def check_state(who: str, p: Tensor, state: Mapping[str, Any], counters: Collection[str]) -> None:
    """Check that velocities, averages and draws have the shape of their parameter.

    Torch's kernels do not check it: they would write past the end of a tensor that is too small.

    Args:
        who: the name of the optimizer in messages.
        p: the parameter.
        state: its entry of the optimizer's state.
        counters: the names of entries that are numbers.

    Raises:
        ValueError: one of them has another shape, as in the checkpoint of a layer of another width.
    """
    for name, x in state.items():
        if isinstance(x, Tensor) and name not in counters and x.shape != p.shape:
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
    if (pair := sharing(params)) is not None:
        first, second = (names[i] for i in sorted(pair))
        raise ValueError(
            f"{who}: parameters {first} and {second} share memory, so that at temperature > 0 it would get the noise of both; "
            "tie weights by one Parameter (b.weight = a.weight), which is given to the optimizer once"
        )


def check_lr(who: str, linear: Linear) -> None:
    """Check the step sizes of a step.

    Raises:
        ValueError: one of them is negative, infinite or NaN.
    """
    if not (0.0 <= linear.step_size < float("inf") and 0.0 <= linear.direct < float("inf")):
        raise ValueError(
            f"{who}: lr must be non-negative and finite at temperature > 0, got a step size of {linear.step_size}"
        )


def warn_of_rounding(who: str, p: Tensor, step: float, denominator: Tensor | None) -> None:
    """Warn if the noise of a step is smaller than half of a unit in the last place of the parameters, and so rounds away.

    Args:
        who: the name of the optimizer in messages.
        p: the parameter.
        step: the standard deviation of the displacement by this draw, where ``D = 1``.
        denominator: ``D`` of an adaptive rule.
    """
    size = p.detach().abs().float().mean()
    if denominator is not None:  # the noise of the parameter is divided by D^(1/2)
        step /= float(denominator.float().mean().sqrt())
    if step < torch.finfo(p.dtype).eps * float(size) / 2:
        warnings.warn(
            f"{who}: parameters in {p.dtype} with entries near {float(size):.2g}, and a step's noise of about "
            f"{step:.2g} rounds away; keep float32 parameters and use autocast",
            stacklevel=6,
        )
