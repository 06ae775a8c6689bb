r"""The step of a torch optimizer whose denominator ``D`` no longer learns: momentum with a fixed preconditioner ``P = 1/D``.

In the symbols of :mod:`bayesopt_chain.optim._rule`,

    V' = mu V + b g,        theta' = (1 - s) theta - (h V' + h_1 g) / D

or, if the velocity averages ``g / D`` (RMSprop), ``V' = mu V + g / D`` and ``theta' = theta - h V'``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from bayesopt_chain.optim._plan import Leaves


def move_frozen(rule: Any, work: list[Leaves]) -> None:
    """Make the step of leaves whose denominator no longer learns, in place of torch's step."""
    for x in work:
        group, linear = x.group, x.linear
        for p, state in zip(x.params, x.states):
            # as in torch: the sign of maximize first, then the coupled weight decay
            g = -p.grad if group["maximize"] else p.grad
            if group["weight_decay"] and not group.get("decoupled_weight_decay", False):
                g = g.add(p, alpha=group["weight_decay"])
            denominator = rule._denominator(group, x.learned_until, state.__getitem__)
            p.mul_(1.0 - linear.shrink)
            if linear.direct:
                p.addcdiv_(g, denominator, value=-linear.direct)
            if linear.velocity is None:
                p.addcdiv_(g, denominator, value=-linear.step_size)
            elif rule.averages_scaled:
                velocity = state[linear.velocity].mul_(linear.momentum).addcdiv_(g, denominator)
                p.add_(velocity, alpha=-linear.step_size)
            else:
                velocity = state[linear.velocity].mul_(linear.momentum).add_(g, alpha=linear.gain)
                p.addcdiv_(velocity, denominator, value=-linear.step_size)
            rule._count_update(state, group)


@contextmanager
def without_gradients(params: list[Tensor]) -> Iterator[None]:
    """Set the gradients of some parameters to ``None`` for a while, so that torch's step leaves these parameters out."""
    grads = [p.grad for p in params]
    for p in params:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in zip(params, grads):
            p.grad = grad
