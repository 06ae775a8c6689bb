r"""What the thermometer needs to know of torch's step: ``F_0``, ``w`` and the decay, leaf by leaf.

In the symbols of :mod:`bayesopt_chain.optim._rule`, behind a denominator ``D``, the response of one leaf is

    F(z) = (h_1 + h b / (1 - mu / z)) / D,        F_0 = (h_1 + h b) / D

and the kinetic temperature of :mod:`bayesopt_chain.diagnostics.temperatures` is ``<d^2> / F_0``, ``d`` the displacement.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesopt_chain.diagnostics.temperatures import ThermalLeaf, squares

if TYPE_CHECKING:
    from bayesopt_chain.optim._sampling import Sampling


def leaves_of(optimizer: Sampling) -> Iterator[tuple[str, ThermalLeaf]]:
    """The leaves that the next step gives noise to; of a preconditioner that learns, as it stands now."""
    for group in optimizer.param_groups:
        temperature = optimizer._temperature(group)
        if temperature == 0.0:
            continue
        if "param_names" not in group:
            raise ValueError(
                f"{optimizer._name}: its parameters have no names to find them by; build it with model.named_parameters()"
            )
        for name, p in zip(group["param_names"], group["params"]):
            state: dict[str, Any] = optimizer.state.get(p, {})
            if optimizer.adaptive and "step" not in state:
                continue  # it has no preconditioner yet
            yield name, _leaf(optimizer, group, p, state, temperature)


def _leaf(
    optimizer: Sampling, group: dict[str, Any], p: Tensor, state: dict[str, Any], temperature: float
) -> ThermalLeaf:
    clock = optimizer._clock(state)
    linear = optimizer._linear(group, *clock)
    direct, branch, mu = linear.direct, linear.step_size * linear.gain, linear.momentum
    gain: float | Tensor = direct + branch
    if optimizer.adaptive:
        held = min(clock[0] - 1, group.get("freeze_after") or clock[0])
        with torch.no_grad():
            gain = gain / optimizer._denominator(group, held, state.__getitem__).double()
    decay = float(group.get("weight_decay") or 0.0)
    return ThermalLeaf(
        temperature=temperature,
        gain=gain,
        white=squares((direct + branch, -direct * mu), (1.0, -mu)),
        decay=None if decay and group.get("decoupled_weight_decay") else decay,
        sign=-1.0 if group.get("maximize") else 1.0,
    )
