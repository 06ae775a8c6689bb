r"""Describe each leaf of a torch optimizer for the thermometer: its gain ``F_0``, noise spectrum ``w`` and weight decay.

In the symbols of :mod:`bayesopt_chain.optim._rule`, with the denominator ``D``, the response of one leaf is

    F(z) = (h_1 + h b / (1 - mu / z)) / D,        F_0 = (h_1 + h b) / D

and the kinetic temperature of :mod:`bayesopt_chain.diagnostics.temperatures` is ``<d^2> / F_0`` with the displacement ``d``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain.diagnostics.temperatures import ThermalLeaf, squares
from bayesopt_chain.optim._plan import Rule
from bayesopt_chain.optim._refusals import temperature_of


def leaves_of(rule: Rule) -> Iterator[tuple[str, ThermalLeaf]]:
    """Describe the leaves that get noise in the next step. A preconditioner that learns enters with its current value.

    Yields:
        The parameter's name, and the description.

    Raises:
        ValueError: parameters have no names, at temperature > 0.
    """
    for group in rule.param_groups:
        temperature = temperature_of(rule._name, group)
        if temperature == 0.0:
            continue
        if "param_names" not in group:
            raise ValueError(
                f"{rule._name}: its parameters have no names to find them by; build it with model.named_parameters()"
            )
        for name, p in zip(group["param_names"], group["params"]):
            state: dict[str, Any] = rule.state.get(p, {})
            if rule.adaptive and "step" not in state:
                continue  # it has no preconditioner yet
            yield name, _leaf(rule, group, state, temperature)


def _leaf(rule: Rule, group: dict[str, Any], state: dict[str, Any], temperature: float) -> ThermalLeaf:
    """Describe one leaf, given its state entry."""
    clock = rule._clock(state)
    linear = rule._linear(group, clock)
    direct, branch, mu = linear.direct, linear.step_size * linear.gain, linear.momentum
    gain: float | Tensor = direct + branch
    if rule.adaptive:
        # the denominator of the last update, since torch's step has not been made yet
        learned_until = min(clock.updates - 1, group.get("freeze_after") or clock.updates)
        with torch.no_grad():
            gain = gain / rule._denominator(group, learned_until, state.__getitem__).double()
    # a decoupled decay is no part of the gradient, so that the thermometer cannot account for it
    decay = float(group.get("weight_decay") or 0.0)
    return ThermalLeaf(
        temperature=temperature,
        gain=gain,
        white=squares((direct + branch, -direct * mu), (1.0, -mu)),
        decay=None if decay and group.get("decoupled_weight_decay") else decay,
        sign=-1.0 if group.get("maximize") else 1.0,
    )
