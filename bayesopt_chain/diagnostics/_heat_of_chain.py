r"""What the heat guard sees of a chain: each gradient times ``sqrt(lr_eff P / (2 T))``, read off the chain itself.

``F_0``, how far a gradient moves each element in its own step, comes from an impulse through ``tx.update``
(:func:`bayesopt_chain.diagnostics.temperatures.gains`); the response of the links, ``F = b / a``, gives
``lr_eff = F(1)`` and the momentum ``mu = -a_1 / a_0``.
"""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain._torch import is_dtensor
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.diagnostics.heat import Leaf
from bayesopt_chain.diagnostics.temperatures import _levels, _unwrapped, gains, names_of
from bayesopt_chain.matching import law
from bayesopt_chain.matching.response import Linear, Noise, Preconditioner, SelfContainedSampler

EQUAL = 1e-6  # relative difference of two elements' gains below which they are one number


def require_matched_noise(tx: Any) -> None:
    """Refuse what has no noise that batches could exceed.

    Raises:
        ValueError: no chain of this library, or a chain without matched noise.
    """
    tx, _ = _unwrapped(tx, None)
    links = tx.links if isinstance(tx, Chain) else ()
    own = [x for x in links if isinstance(x.response, SelfContainedSampler)]
    if own or not any(isinstance(x.response, Noise) for x in links):
        what = own[0] if own else f"this {type(tx).__name__}"
        raise ValueError(
            f"heat_guard: {what} has no matched noise that the batches' could be compared with; leave heat_guard out, or "
            "take a chain such as bc.sghmc(...)"
        )


def has_schedule(tx: Any) -> bool:
    """Return whether a number of this chain is a function of the step."""
    tx, _ = _unwrapped(tx, None)
    links = tx.links if isinstance(tx, Chain) else ()
    return any(callable(value) for link in links for value in getattr(link, "__dict__", {}).values())


def rules_of(tx: Any, params: Any, state: Any) -> list[tuple[float | Tensor, float, float, float] | None]:
    """For each leaf ``sqrt(lr_eff P / 2 T)``, ``T``, the momentum and the share of the first step; ``None`` without noise.

    Raises:
        ValueError: the elements act on each other, as behind a dense preconditioner.
    """
    tx, state = _unwrapped(tx, state)
    levels, names = _levels(tx, state, None), names_of(state.layout.paths)
    out: list[tuple[float | Tensor, float, float, float] | None] = []
    if not levels:
        return [None] * len(names)
    for j, (name, gain) in enumerate(zip(names, gains(tx, params, state))):
        if gain is None or name not in levels or not bool((gain > 0).all()):
            out.append(None)
            continue
        b, a = (1.0,), (1.0,)
        for link, where in zip(tx.links, state.layout.where):
            if j in where and isinstance(x := link.response, (Linear, Preconditioner)):
                b, a = law.multiply(b, x.b), law.multiply(a, x.a)
        first, momentum = b[0] / a[0] / (sum(b) / sum(a)), -a[1] / a[0] if len(a) > 1 else 0.0
        scale: float | Tensor = (gain / (first * 2.0 * levels[name])).sqrt()
        low, high = scale.aminmax()
        out.append((float(high) if high - low <= EQUAL * high else scale.float(), levels[name], momentum, first))
    return out


def leaves_of(rules: list[Any], params: Any, grads: Any, *, changing: bool = False) -> list[Leaf]:
    """The gradients that noise goes with, of leaves that are plain tensors; ``changing``: rates change at every step."""
    trees: list[list[Any]] = [optree.tree_leaves(tree, none_is_leaf=True) for tree in (params, grads)]
    return [
        Leaf(g, p, *rule, number=j, rate=_square(rule[0]) * 2.0 * rule[1] if changing else 1.0)
        for j, (rule, p, g) in enumerate(zip(rules, *trees))
        if rule is not None and g is not None and g.layout is torch.strided and not is_dtensor(g)
    ]


def _square(scale: float | Tensor) -> float:
    """Return the mean square."""
    return float(scale.square().mean()) if isinstance(scale, Tensor) else scale * scale
