"""Refusals: each names the argument, shows what came, and says what to do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch

from bayesopt_chain.tracing import is_hidden


def temperature(value: Any) -> None:
    """A number, a 0-d tensor or a schedule, not negative, not NaN, not infinite."""
    if callable(value) and not torch.is_tensor(value):
        return
    if torch.is_tensor(value):
        if value.ndim or value.dtype.is_complex:
            raise ValueError(
                f"temperature: a tensor must be 0-d and real, got shape {tuple(value.shape)}, {value.dtype}"
            )
        if is_hidden(value):
            return
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"temperature: expected a number, a 0-d tensor or a schedule, got {value!r}")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(
            f"temperature: must be finite and not negative, got {value}; 1 / N samples a posterior of N data"
        )


def positive_temperature(who: str, value: Any, why: str) -> None:
    """Refuse temperature 0 for a sampler that is no optimizer there."""
    temperature(value)
    number = value.item() if torch.is_tensor(value) and not is_hidden(value) else value
    if isinstance(number, Real) and number == 0:
        raise ValueError(f"{who}: temperature must be positive, got {number}: {why}")


def positive(name: str, value: float) -> None:
    if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a positive, finite number, got {value!r}")


def momentum(name: str, value: float) -> None:
    if not (isinstance(value, (int, float)) and 0 <= value < 1):
        raise ValueError(f"{name} must lie in [0, 1), got {value!r}")


def parameters(leaves: Sequence[Any], paths: Sequence[tuple | str]) -> None:
    """Parameters that can be sampled: at least one, floating point, real."""
    found = False
    for leaf, path in zip(leaves, paths):
        if leaf is None:
            continue
        found = True
        if not torch.is_tensor(leaf) or not leaf.is_floating_point():
            kind = leaf.dtype if torch.is_tensor(leaf) else type(leaf).__name__
            raise TypeError(
                f"params: leaf {name(path)} is {kind}; only real floating-point tensors can be sampled. "
                "Leave it out of the tree (buffers belong into the loss), or set temperature=0"
            )
    if not found:
        raise ValueError("params: the tree has no leaves, so there is nothing to sample; pass the parameters to init")


def updates(g: list, p: list | None, spec, params_spec) -> None:
    """Gradients that match the parameters leaf by leaf."""
    if p is None:
        return
    if spec != params_spec:
        raise ValueError(f"updates: structure {spec} differs from that of params, {params_spec}")
    for i, (x, y) in enumerate(zip(g, p)):
        if x is None:
            continue
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"updates: leaf {i} is {x!r}, not a tensor")
        if y is not None:
            alike("updates", i, x, "params have", y.shape, y.dtype, y.device)


def alike(what: str, i: int, x, whose: str, shape, dtype, device) -> None:
    """Leaf ``i`` of the same shape, dtype and device."""
    if x.shape != shape or x.dtype != dtype or x.device != device:
        raise ValueError(
            f"{what}: leaf {i} has shape {tuple(x.shape)}, {x.dtype} on {x.device}, but {whose} {tuple(shape)}, {dtype} on "
            f"{device}; call init with these parameters, or convert one of them"
        )


def name(path: tuple | str) -> str:
    return (path if isinstance(path, str) else "".join(f"[{part!r}]" for part in path)) or "(the bare tensor)"


def show(value: Any) -> str:
    """A hyperparameter as ``repr`` of a link shows it."""
    if torch.is_tensor(value):
        return f"tensor({value.item():.6g})" if value.ndim == 0 else f"tensor{tuple(value.shape)}"
    if callable(value):
        return getattr(value, "__name__", type(value).__name__)
    return repr(value)
