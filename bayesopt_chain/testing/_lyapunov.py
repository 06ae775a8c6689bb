r"""What a linear sampler samples, at rest, along a schedule and beside other links, solved exactly.

On a quadratic loss with curvature ``K`` the update of a linear sampler is ``x' = A x + B xi``, ``x`` holding the parameters
and every floating-point tensor of the state (:func:`bayesopt_chain.testing._linear_system.closed_loop` reads ``A`` and
``B``). The stationary covariance solves ``X = A X A^T + B B^T``, and its parameter block is returned. Where rates change with
time the covariance follows ``X_{t+1} = A_t X_t A_t^T + B_t B_t^T``, with maps that are read anew at every step.

Composition: beside any other link a sampler keeps its law, or refuses to be built. A chain of exact linear links has the
covariance ``T (K + D)^-1``, ``D`` the diagonal precision of the prior that weight decay amounts to (zero without decay). The
check solves for the covariance of the composed chain and looks at ``T C^-1 - K``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import optree
import torch
import torchopt
from torch import Tensor

from bayesopt_chain import kinds
from bayesopt_chain.compose import chain
from bayesopt_chain.links.learning_rate import scale
from bayesopt_chain.links.momentum import add_momentum
from bayesopt_chain.links.weight_decay import add_decayed_weights
from bayesopt_chain.testing._linear_system import ClosedLoop, OneUpdate, closed_loop, state_of
from bayesopt_chain.testing._zero_temperature import go_on


class Unstable(ValueError):
    """The sampler has no stationary distribution on this loss."""


@kinds.takes(params=kinds.TREE.or_none(), curvature=kinds.REALS, warmup=kinds.whole(0))
def stationary_covariance(
    tx: Any, curvature: Tensor, params: Any = None, *, state: Any = None, warmup: int = 2, tolerance: float = 1e-9
) -> Tensor:
    """Covariance of the parameters that ``tx`` samples on ``loss = theta^T K theta / 2``.

    Args:
        tx: a sampler whose update is linear in the gradients, the state and the noise (frozen preconditioners included).
        curvature: ``K``, shape ``[d, d]``, symmetric, float64.
        params: tree with ``d`` elements in all, float64 (default: one vector). Only its structure matters.
        state: state to probe at, for instance after a preconditioner was frozen (default: ``init`` and ``warmup`` steps).
        warmup: number of noiseless steps at zero gradient before probing.
        tolerance: how far from linear the update may be, relative to its size.

    Returns:
        Covariance, shape ``[d, d]``, in optree order of the leaves.

    Raises:
        ValueError: the update is not linear.
        Unstable: it has no stationary distribution here.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.sghmc(0.1, momentum=0.9, temperature=0.5)
        >>> round(stationary_covariance(tx, torch.tensor([[2.0]], dtype=torch.float64)).item(), 10)
        0.25
    """
    curvature, params = _of_one_size("stationary_covariance", curvature, params)
    d, system = len(curvature), closed_loop(tx, curvature, params, state, warmup=warmup, tolerance=tolerance)
    return _at_rest(system)[:d, :d]


@kinds.takes(params=kinds.TREE.or_none(), curvature=kinds.REALS, settle=kinds.whole(0))
def variance_along(
    tx: Any,
    curvature: Tensor,
    steps: int,
    params: Any = None,
    *,
    state: Any = None,
    settle: int = 3,
    tolerance: float = 1e-9,
) -> Tensor:
    """Covariance of the parameters after each of the next steps of ``tx`` on ``loss = theta^T K theta / 2``, exactly.

    The twin of :func:`stationary_covariance` for learning rates and temperatures that are schedules. The parameters
    start in the stationary law of the first step: the one that they would have if its rates had held for ever. All integers
    of the state (the counts of updates) stand still until then. By default the first step is the second update of the chain,
    since the first is not dampened.

    Args:
        tx: a sampler whose update is linear in the gradients, the state and the noise (frozen preconditioners included).
        curvature: ``K``, shape ``[d, d]``, symmetric, float64.
        steps: number of steps to follow, 1 or more.
        params: tree with ``d`` elements in all, float64 (default: one vector). Only its structure matters.
        state: state whose counts are those of the first step (default: that of ``init``, its counts one higher).
        settle: number of noiseless updates at zero gradient, with the counts held, before the stationary law is solved for.
        tolerance: how far from linear an update may be, relative to its size.

    Returns:
        Covariances, shape ``[steps, d, d]``, float64: entry ``t`` holds after ``t + 1`` updates; elements in optree order.

    Raises:
        ValueError: an update is not linear, or ``params`` has not ``d`` elements.
        Unstable: the first step's rates, held, have no stationary distribution here.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.sghmc(bc.schedules.piecewise([3], [0.1, 0.01]), momentum=0.9, temperature=0.5)  # falls after 3 updates
        >>> [round(x.item(), 10) for x in variance_along(tx, torch.tensor([[2.0]], dtype=torch.float64), 5).flatten()]
        [0.25, 0.25, 0.25, 0.25, 0.25]
    """
    curvature, params = _of_one_size("variance_along", curvature, params)
    if state is None:
        at_rest = optree.tree_map(lambda p: torch.zeros(p.shape, dtype=torch.float64, device=p.device), params)
        state = state_of(tx, at_rest)
        state = _with_integers(state, OneUpdate(tx, params, state).next_state)
    first = state
    for _ in range(settle):
        state = _with_integers(OneUpdate(tx, params, state).next_state, first)
    system = closed_loop(tx, curvature, params, state, tolerance=tolerance)
    d, X, varied, out = len(curvature), _at_rest(system), system.varies, list[Tensor]()
    for _ in range(steps):
        system = closed_loop(tx, curvature, params, state, varied=varied, tolerance=tolerance)
        X = system.A @ X @ system.A.T + system.B @ system.B.T
        varied, state = system.varies, system.next_state
        out.append(X[:d, :d])
    return torch.stack(out)


def _of_one_size(who: str, curvature: Tensor, params: Any) -> tuple[Tensor, Any]:
    """The curvature in float64, and the parameters, by default a vector of its size."""
    d = len(curvature)
    params = torch.zeros(d, dtype=torch.float64, device=curvature.device) if params is None else params
    size = sum(p.numel() for p in optree.tree_leaves(params))
    if size != d:
        raise ValueError(f"{who}: curvature is for {d} parameters, params has {size}")
    return curvature.to(torch.float64), params


def _at_rest(system: ClosedLoop) -> Tensor:
    """The stationary covariance of all coordinates; those that never vary have none."""
    varies = system.varies.nonzero().squeeze(1)
    A, B = system.A[varies][:, varies], system.B[varies]
    full = torch.zeros_like(system.A)
    full[varies[:, None], varies] = solve_lyapunov(A, B @ B.T)
    return full


def _with_integers(state: Any, first: Any) -> Any:
    """The same state with the integers of another."""
    leaves, spec = optree.tree_flatten(state)
    mine = [
        y if torch.is_tensor(x) and not x.is_floating_point() else x for x, y in zip(leaves, optree.tree_leaves(first))
    ]
    return optree.tree_unflatten(spec, mine)


def solve_lyapunov(A: Tensor, Q: Tensor) -> Tensor:
    """The solution ``[n, n]`` of ``X = A X A^T + Q``, by doubling.

    Raises:
        Unstable: the spectral radius of ``A`` is not below 1.
    """
    if not len(A):
        return Q
    radius = torch.linalg.eigvals(A).abs().max().item()
    if radius >= 1.0:
        raise Unstable(f"no stationary distribution: the spectral radius is {radius:.6g}; lower lr or momentum")
    X = Q
    for _ in range(60):
        X = X + A @ X @ A.T
        A = A @ A
        if A.abs().max() < 1e-200:
            break
    return (X + X.T) / 2


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
    steps, each = itertools.count(), torch.arange(2.0, dtype=torch.float64, device="cpu")
    _, state, _ = go_on(tx, theta, state, burn_in, lambda theta: curvature @ theta + torch.sin(each + next(steps)))
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
