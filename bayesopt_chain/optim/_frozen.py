"""torch's adaptive step with its denominator left as it is: momentum behind a fixed preconditioner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from bayesopt_chain.optim._plan import Rule, Work


def move_frozen(rule: Rule, work: list[Work]) -> None:
    """Move leaves whose denominator no longer learns, and their velocities, in torch's place."""
    for w in work:
        p, group, linear, state = w.param, w.group, w.numbers.linear, w.state
        assert p.grad is not None
        g = -p.grad if group["maximize"] else p.grad
        if group["weight_decay"] and not group.get("decoupled_weight_decay", False):
            g = g.add(p, alpha=group["weight_decay"])
        denominator = w.denominator(rule)
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
    """Hide the gradients of some parameters, so that torch's step leaves these alone."""
    grads = [p.grad for p in params]
    for p in params:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in zip(params, grads):
            p.grad = grad
