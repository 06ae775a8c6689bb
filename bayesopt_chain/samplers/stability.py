r"""How a small displacement grows under one update: whether a chain with its preconditioner as it is now is stable.

An update maps ``x = (theta, state)`` to ``x'``. With ``J = dx' / dx`` at the given parameters and state (the noise,
which is the same for both, drops out) a small displacement becomes ``J^n dx`` after ``n`` updates and grows as
``rho(J)^n``: the chain diverges where the spectral radius exceeds 1. ``rho`` is found by power iteration, ``dx <- J dx
/ |J dx|``, as the geometric mean of ``|J dx|`` over the second half, so that pairs of complex eigenvalues count too.

For a chain of learning rate ``lr``, heavy-ball momentum ``mu`` and a frozen preconditioner ``P`` on curvature ``H`` this is the
condition ``lr lambda_max(P^(1/2) H P^(1/2)) < 2 (1 + mu)``; for Adam's first moment, ``< 2 (1 + b1) / (1 - b1)``
(Cohen et al., 2022).

A preconditioner that learns steps back where the loss is steep; one that ``freeze_after`` stopped cannot. No chain
knows its loss's curvature, so that no update can tell: :func:`step_growth` is what to call once the scale is frozen, or
before the first update of RAdam, whose first updates are not scaled at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor
from torchopt.base import GradientTransformation

from bayesopt_chain import checks
from bayesopt_chain.curvature import jvp


@checks.takes()
def step_growth(
    loss: Callable[[Any, Any], Any],
    tx: GradientTransformation,
    params: Any,
    state: Any,
    batch: Any,
    *,
    steps: int = 100,
    generator: torch.Generator | None = None,
) -> float:
    """The factor by which one update multiplies small displacements in the long run; above 1 the chain diverges.

    Call it behind ``freeze_after`` with a batch as large as fits. While a preconditioner still learns, the answer is that
    of its derivative at this one point and says little.

    Args:
        loss: ``loss(params, batch)``, a scalar or ``(scalar, aux)``, twice differentiable by ``torch.func``.
        tx: any gradient transformation whose ``update`` takes no further keywords.
        params: the parameters, where the curvature is taken.
        state: the state of ``tx`` there; it is left as it is.
        batch: what the loss is evaluated on.
        steps: iterations, each the cost of about three gradients; the answer is right to about ``3 / steps``.
        generator: of the first displacement (default: a fixed seed).

    Returns:
        The spectral radius of one update.

    Raises:
        ValueError: ``steps`` below 2; parameters without a floating-point leaf.

    Warns:
        RuntimeWarning: the answer exceeds 1 by more than ``3 / steps``.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> def loss(p, batch):
        ...     return 50.0 * (p**2).sum()  # curvature 100
        >>> tx, p = bc.sgd(0.015), torch.ones(2)
        >>> round(bc.samplers.step_growth(loss, tx, p, tx.init(p), ()), 3)
        0.5
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 2:
        raise ValueError(f"step_growth: steps must be a whole number, at least 2, got {steps!r}")
    both: Any = (params, state)
    leaves, spec = optree.tree_flatten(both)
    moving = [i for i, x in enumerate(leaves) if torch.is_tensor(x) and x.is_floating_point() and x.numel()]
    if not moving:
        raise ValueError("step_growth: neither params nor state has a floating-point tensor, so that nothing can grow")

    def value(p: Any) -> Tensor:
        out = loss(p, batch)
        return out[0] if isinstance(out, tuple) else out

    def step(chosen: list[Tensor]) -> list[Tensor]:
        full = list(leaves)
        for i, x in zip(moving, chosen):
            full[i] = x
        p, s = optree.tree_unflatten(spec, full)
        updates, s = tx.update(torch.func.grad(value)(p), s, params=p, inplace=False)
        p = optree.tree_map(lambda x, u: x + u, p, updates)
        moved: Any = (p, s)
        after = optree.tree_leaves(moved)
        return [after[i] for i in moving]

    here = [leaves[i].detach() for i in moving]
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    dx = [torch.randn(x.shape, generator=generator, dtype=x.dtype, device=generator.device).to(x.device) for x in here]
    logs = []
    for _ in range(steps):
        dx = jvp(step, (here,), (dx,))[1]
        size = math.sqrt(sum(float(x.double().square().sum()) for x in dx))
        if not 0.0 < size < math.inf:
            return 0.0 if size == 0.0 else math.inf
        logs.append(math.log(size))
        dx = [x / size for x in dx]
    late = logs[steps // 2 :]
    growth = math.exp(sum(late) / len(late))
    if growth > 1.0 + 3.0 / steps:
        checks.warn(
            f"step_growth: an update multiplies small displacements by {growth:.3g}, so that the chain diverges; lower lr"
            " (by a schedule from the update on at which freeze_after stops the preconditioner), or freeze later",
            RuntimeWarning,
        )
    return growth
