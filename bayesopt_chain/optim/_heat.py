r"""The input of the heat guard from a torch optimizer: each gradient with its ``lr_eff``, ``P`` and ``T``.

The heat guard (:mod:`bayesopt_chain.diagnostics.heat_guard`) estimates by how much the noise of minibatches raises the
temperature of a chain. In the symbols of :mod:`bayesopt_chain.optim._rule`, ``lr_eff = h_1 + h b / (1 - mu)`` is the response
``F(1)`` of a step to a constant gradient, and ``P = 1 / D`` is the current preconditioner of an adaptive rule.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from bayesopt_chain._torch import is_dtensor
from bayesopt_chain.diagnostics.heat import Leaf
from bayesopt_chain.optim._checks import temperature_of


def warn_unwatched(rule: Any) -> None:
    """Warn that the heat guard does not look at parameters that are sharded over ranks; called once for an optimizer."""
    if not any(temperature_of(rule._name, group) for group in rule.param_groups):
        return
    warnings.warn(
        f"{rule._name}: the heat guard does not look at parameters that are spread over ranks (DTensors), since no rank sees "
        "the noise of a whole gradient. Run the loop in one process with it first, or ask bc.diagnostics.heating; "
        "heat_guard=None silences this",
        stacklevel=4,
    )


def warn_sparse(rule: Any) -> None:
    """Warn once that the heat guard does not look at sparse gradients."""
    if rule.heat_guard.has_left_out:
        return
    rule.heat_guard.has_left_out = True
    warnings.warn(
        f"{rule._name}: the heat guard does not look at sparse gradients, as those of Embedding(sparse=True). Run the loop "
        "with sparse=False first, or ask bc.diagnostics.heating; heat_guard=None silences this",
        stacklevel=7,
    )


def leaves_of(rule: Any) -> Iterator[Leaf]:
    """Yield the gradients of this step that get noise.

    An adaptive rule yields its gradients from the second step on, since it has no preconditioner before. Sparse gradients and
    DTensors are left out.
    """
    for group in rule.param_groups:
        temperature = temperature_of(rule._name, group)
        if temperature == 0.0:
            continue
        lr, last, effective, first = float(group["lr"]), None, 0.0, 0.0
        sign = -1.0 if group.get("maximize") else 1.0
        linear: Any = None
        for p in group["params"]:
            g = p.grad
            if g is None or is_dtensor(g):
                continue
            if g.layout is not torch.strided:
                warn_sparse(rule)
                continue
            state: dict[str, Any] = rule.state.get(p, {})
            if rule.adaptive and "step" not in state:
                continue
            counts = rule._counts(state)
            if counts != last:
                linear, last = rule._linear(group, counts), counts
                effective = linear.direct + linear.step_size * linear.gain / (1.0 - linear.momentum)
                # the share of F(1) that acts in the same step
                first = (linear.direct + linear.step_size * linear.gain) / effective if effective > 0.0 else 0.0
            if effective > 0.0:  # not at a learning rate of 0
                root = partial(_root, rule, group, counts[0], state, sign) if rule.adaptive else sign
                yield Leaf(id(p), g, p, effective, temperature, linear.momentum, first, root, lr)


def _root(rule: Any, group: dict[str, Any], updates: float, state: dict[str, Any], sign: float) -> torch.Tensor:
    """Return ``sqrt(P)`` of a leaf by the denominator of the last update, since torch's step has not been made yet."""
    learned = min(updates - 1, group.get("freeze_after") or updates)
    return sign * rule._denominator(group, learned, state.__getitem__).rsqrt()
