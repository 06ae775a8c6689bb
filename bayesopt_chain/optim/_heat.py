r"""The input of the heat guard from a torch optimizer: each gradient with its ``lr_eff``, ``P`` and ``T``.

The heat guard (:mod:`bayesopt_chain.diagnostics.heat_guard`) estimates by how much the noise of minibatches raises the
temperature of a chain. In the symbols of :mod:`bayesopt_chain.optim._rule`, ``lr_eff = h_1 + h b / (1 - mu)`` is the response
``F(1)`` of a step to a constant gradient, and ``P = 1 / D`` is the current preconditioner of an adaptive rule.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator
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


def leaves_of(rule: Any, keys: Collection[int] = ()) -> Iterator[Leaf]:
    """Yield the gradients of this step that get noise.

    An adaptive rule yields its gradients from the second step on, since it has no preconditioner before. Sparse gradients and
    DTensors are left out.

    Args:
        rule: the optimizer.
        keys: ``id`` of the parameters that are wanted, of which only the first of a group needs numbers of this step; empty for
            all of them.
    """
    wanted, roots = frozenset(keys), dict[int, torch.Tensor]()
    for group in rule.param_groups:
        temperature = temperature_of(rule._name, group)
        if temperature == 0.0:
            continue
        lr, counts, linear, effective, first = float(group["lr"]), None, None, 0.0, 0.0
        sign = -1.0 if group.get("maximize") else 1.0
        params = [p for p in group["params"] if id(p) in wanted] if wanted else group["params"]
        if rule.adaptive and not wanted:
            roots = _roots(rule, group, sign)
        for p in params:
            g = p.grad
            if g is None or not (wanted or _is_read(rule, p)):
                continue
            if g.layout is not torch.strided:
                warn_sparse(rule)
                continue
            if linear is None or not wanted:
                last, counts = counts, rule._counts(rule.state.get(p, {}))
                if linear is None or counts != last:
                    linear = rule._linear(group, counts)
                    effective = linear.direct + linear.step_size * linear.gain / (1.0 - linear.momentum)
                    # the share of F(1) that acts in the same step
                    first = (linear.direct + linear.step_size * linear.gain) / effective if effective > 0.0 else 0.0
            if effective > 0.0:  # not at a learning rate of 0
                yield Leaf(id(p), g, p, effective, temperature, linear.momentum, first, roots.get(id(p), sign), lr)


def _is_read(rule: Any, p: torch.Tensor) -> bool:
    """Whether this rank has the whole gradient, and an adaptive rule a preconditioner, which it makes in the first step."""
    return not is_dtensor(p.grad) and (not rule.adaptive or "step" in rule.state.get(p, {}))


def _roots(rule: Any, group: dict[str, Any], sign: float) -> dict[int, torch.Tensor]:
    """Return ``sqrt(P)`` of each leaf by the denominator of its last update, since torch's step has not been made yet.

    Denominators act on each element by itself, so that leaves of one count are laid end to end.
    """
    alike = defaultdict[Any, list[Any]](list)
    for p in group["params"]:
        if p.grad is not None and _is_read(rule, p):
            state = rule.state[p]
            alike[rule._counts(state)[0], p.dtype, p.device].append((p, state))
    out = dict[int, torch.Tensor]()
    for (updates, _, _), found in alike.items():
        learned = min(updates - 1, group.get("freeze_after") or updates)
        values = rule._denominator(
            group, learned, lambda name, of=found: torch.cat([x[name].reshape(-1) for _, x in of])
        )
        each = (sign * values.rsqrt()).split([p.numel() for p, _ in found])
        out |= {id(p): root.view(p.shape) for (p, _), root in zip(found, each)}
    return out
