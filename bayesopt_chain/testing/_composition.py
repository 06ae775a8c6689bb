r"""Composition: beside any other link a sampler keeps its law, or refuses to be built.

On a quadratic loss of curvature ``K`` a chain of linear links that is exact has the covariance ``T (K + D)^-1``, ``D`` the
diagonal precision of the prior that weight decay amounts to (zero without decay). The check solves for the covariance of the
composed chain and looks at ``T C^-1 - K``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torchopt
from torch import Tensor

from bayesopt_chain import kinds
from bayesopt_chain.compose import chain
from bayesopt_chain.links.learning_rate import scale
from bayesopt_chain.links.momentum import add_momentum
from bayesopt_chain.links.weight_decay import add_decayed_weights
from bayesopt_chain.testing._lyapunov import Unstable, stationary_covariance

NEIGHBOURS: dict[str, Callable[[], Any]] = {
    "gain": lambda: scale(0.5),
    "momentum": lambda: add_momentum(0.3),
    "decay": lambda: add_decayed_weights(0.1),
    "clip": lambda: torchopt.clip_grad_norm(1e9),
}


@kinds.takes(tolerance=kinds.real("[0, inf)"))
def assert_composes(
    build: Callable[[], Any], temperature: float, *, tolerance: float = 1e-8, burn_in: int = 40
) -> dict[str, str]:
    """Check that a sampler stays right, or refuses, with a gain, a momentum, a decay or a clip in front of it or behind it.

    Args:
        build: makes the sampler, at this temperature.
        temperature: its temperature, in units of the loss.
        tolerance: of ``T C^-1 - K`` relative to ``K``: rounding for exact samplers, the bias for others.
        burn_in: updates on a noisy gradient before the covariance is solved for, in which preconditioners freeze.

    Returns:
        What happened, by ``"<neighbour> before"`` and ``"<neighbour> behind"``: ``"right"``, ``"refused"``, or ``"unstable"``
        where the composed chain has no stationary law at all.

    Raises:
        AssertionError: a chain that samples something else, named.

    Example:
        >>> import bayesopt_chain as bc
        >>> assert_composes(lambda: bc.sghmc(0.05, temperature=0.3), 0.3)["clip behind"]
        'refused'
    """
    curvature = torch.tensor([[1.0, 0.3], [0.3, 0.6]], dtype=torch.float64, device="cpu")
    out: dict[str, str] = {}
    for name, link in NEIGHBOURS.items():
        for where in ("before", "behind"):
            tx = chain(link(), build()) if where == "before" else chain(build(), link())
            out[f"{name} {where}"] = _what_happens(tx, curvature, temperature, tolerance, burn_in, name, where)
    return out


def _what_happens(
    tx: Any, curvature: Tensor, temperature: float, tolerance: float, burn_in: int, name: str, where: str
) -> str:
    theta = torch.tensor([1.0, -2.0], dtype=torch.float64, device="cpu")
    try:
        state = tx.init(theta)
    except ValueError:
        return "refused"
    for k in range(burn_in):
        wobble = torch.sin(torch.arange(2.0, dtype=torch.float64, device="cpu") + k)
        updates, state = tx.update(curvature @ theta + wobble, state, params=theta, inplace=False)
        theta = theta + updates
    try:
        covariance = stationary_covariance(tx, curvature, state=state)
    except Unstable:
        return "unstable"
    extra = temperature * torch.linalg.inv(covariance) - curvature
    if name == "decay":
        extra = extra - torch.diag(extra.diagonal())
    off = (extra.abs().max() / curvature.abs().max()).item()
    assert off <= tolerance, f"with a {name} {where} it the chain samples another covariance, off by {off:.3g}: {tx}"
    return "right"
