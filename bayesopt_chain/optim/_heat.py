r"""The input of the heat guard from a torch optimizer: each gradient with its ``lr_eff``, ``P`` and ``T``.

The heat guard (:mod:`bayesopt_chain.diagnostics.heat_guard`) estimates by how much the noise of minibatches raises the
temperature of a chain. In the symbols of :mod:`bayesopt_chain.optim._rule`, ``lr_eff = h_1 + h b / (1 - mu)`` is the response
``F(1)`` of a step to a constant gradient, and ``P = 1 / D`` is the current preconditioner of an adaptive rule.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from typing import Any

import torch

from bayesopt_chain._torch import is_dtensor
from bayesopt_chain.diagnostics.heat import Leaf
from bayesopt_chain.optim._checks import temperature_of


def warn_left_out(rule: Any, what: str, stacklevel: int) -> None:
    """Warn that the heat guard does not look at some gradients; called once for an optimizer.

    Args:
        rule: the optimizer.
        what: these gradients, the reason, and what to do instead.
        stacklevel: of the warning, such that it points at the call of ``step``.
    """
    if any([temperature_of(rule._name, group) for group in rule.param_groups]):
        warnings.warn(
            f"{rule._name}: the heat guard does not look at {what}, or ask bc.diagnostics.heating; heat_guard=None silences "
            "this",
            stacklevel=stacklevel,
        )


def leaves_of(rule: Any, keys: Collection[int] = ()) -> Iterator[Leaf]:
    """Yield the gradients of this step that get noise.

    An adaptive rule yields its gradients from the second step on, since it has no preconditioner before. Sparse gradients and
    DTensors are left out.

    Args:
        rule: the optimizer.
        keys: ``id`` of the parameters that are wanted, of which only the first of a group needs numbers of this step; empty for
            all of them.
    """
    wanted = frozenset(keys)
    for group in rule.param_groups:
        temperature = temperature_of(rule._name, group)
        if temperature == 0.0:
            continue
        lr, linear, effective, first = float(group["lr"]), None, 0.0, 0.0
        sign = -1.0 if group.get("maximize") else 1.0
        for p in group["params"]:
            g, state, root = p.grad, rule.state.get(p, {}), sign
            # of a DTensor no rank has the whole gradient, and an adaptive rule makes its preconditioner in the first step
            is_read = not is_dtensor(g) and (not rule.adaptive or "step" in state)
            if g is None or not (id(p) in wanted if wanted else is_read):
                continue
            if g.layout is not torch.strided:
                if not rule.heat_guard.has_left_out:
                    rule.heat_guard.has_left_out = True
                    warn_left_out(
                        rule,
                        "sparse gradients, as those of Embedding(sparse=True). Run the loop with sparse=False first",
                        7,
                    )
                continue
            if linear is None or not wanted:
                counts = rule._counts(state)
                linear = rule._linear(group, counts)
                effective = linear.direct + linear.step_size * linear.gain / (1.0 - linear.momentum)
                # the share of F(1) that acts in the same step
                first = (linear.direct + linear.step_size * linear.gain) / effective if effective > 0.0 else 0.0
                if rule.adaptive and not wanted:  # by the denominator of the last update; torch's step comes later
                    learned = min(counts[0] - 1, group.get("freeze_after") or counts[0])
                    root = sign * rule._denominator(group, learned, state.__getitem__).rsqrt()
            if effective > 0.0:  # not at a learning rate of 0
                yield Leaf(id(p), g, p, effective, temperature, linear.momentum, first, root, lr)
