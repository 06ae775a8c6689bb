r"""What a linear sampler samples, solved exactly.

On a quadratic loss with curvature ``K`` the update of a linear sampler is ``x' = A x + B xi``, ``x`` holding the parameters
and every floating-point tensor of the state. Unit impulses in ``x`` and in the intercepted normal draws read off ``A`` and
``B``; the stationary covariance solves ``X = A X A^T + B B^T`` and its parameter block is returned.
"""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Unstable(ValueError):
    """The sampler has no stationary distribution on this loss."""


class NormalProbe(TorchDispatchMode):
    """Replaces every normal draw made under it by the next entries of ``values`` (zeros where that is ``None``).

    ``drawn`` counts the entries, so that a first run tells how many a step draws.

    Example:
        >>> import torch
        >>> with NormalProbe(torch.tensor([3.0, 4.0])) as probe:
        ...     x = torch.randn(2)
        >>> x, probe.drawn
        (tensor([3., 4.]), 2)
    """

    def __init__(self, values: Tensor | None = None) -> None:
        super().__init__()
        self.values = values
        self.drawn = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("normal_", "normal", "randn", "randn_like", "normal_functional", "philox_normals"):
            n = out.numel()
            fresh = torch.zeros(n) if self.values is None else self.values[self.drawn : self.drawn + n]
            self.drawn += n
            mean, std = (_argument(func, args, kwargs or {}, *default) for default in (("mean", 0.0), ("std", 1.0)))
            out.copy_(mean + std * fresh.reshape(out.shape))
        elif name in ("rand", "rand_like", "uniform_", "bernoulli", "bernoulli_", "randint", "random_"):
            raise TypeError(
                f"NormalProbe: the update draws {name}, which is not a normal; only Gaussian noise can be probed"
            )
        return out


def _argument(func, args: tuple, kwargs: dict, name: str, default: float) -> Any:
    """The argument of that name in a call of an operator."""
    names = [argument.name for argument in func._schema.arguments]
    if name in names and names.index(name) < len(args):
        return args[names.index(name)]
    return kwargs.get(name, default)


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
    curvature = curvature.to(torch.float64)
    d = curvature.shape[0]
    params = torch.zeros(d, dtype=torch.float64) if params is None else params
    leaves, spec = optree.tree_flatten(params)
    sizes = [p.numel() for p in leaves]
    if sum(sizes) != d:
        raise ValueError(f"stationary_covariance: curvature is for {d} parameters, params has {sum(sizes)}")

    def as_tree(theta: Tensor) -> Any:
        parts = [t.reshape(p.shape) for t, p in zip(theta.split(sizes), leaves)]
        return optree.tree_unflatten(spec, parts)

    zero = torch.zeros(d, dtype=torch.float64)
    if state is None:
        state = tx.init(as_tree(zero))
        with NormalProbe():
            for _ in range(warmup):
                _, state = tx.update(as_tree(zero), state, params=as_tree(zero), inplace=False)
    entries, state_spec = optree.tree_flatten(state)
    moving = [i for i, t in enumerate(entries) if torch.is_tensor(t) and t.is_floating_point()]
    base = torch.cat([zero, *(entries[i].detach().reshape(-1).to(torch.float64) for i in moving)])

    def advance(x: Tensor, xi: Tensor | None) -> tuple[Tensor, int]:
        now = list(entries)
        theta, *parts = x.split([d, *(entries[i].numel() for i in moving)])
        for i, part in zip(moving, parts):
            now[i] = part.reshape(entries[i].shape).to(entries[i].dtype)
        with NormalProbe(xi) as probe:
            updates, new = tx.update(
                as_tree(curvature @ theta), optree.tree_unflatten(state_spec, now), params=as_tree(theta), inplace=False
            )
        new = optree.tree_leaves(new)
        move = torch.cat([u.detach().reshape(-1) for u in optree.tree_leaves(updates)])
        return torch.cat([theta + move, *(new[i].detach().reshape(-1).to(torch.float64) for i in moving)]), probe.drawn

    origin, drawn = advance(base, None)
    eye = torch.eye(len(base), dtype=torch.float64)
    a = torch.stack([advance(base + e, None)[0] - origin for e in eye], dim=1)
    b = torch.stack([advance(base, e)[0] - origin for e in torch.eye(drawn, dtype=torch.float64)], dim=1)

    generator = torch.Generator().manual_seed(0)
    dx = torch.randn(len(base), generator=generator, dtype=torch.float64)
    dxi = torch.randn(drawn, generator=generator, dtype=torch.float64)
    reachable = _reachable(a, b)
    linear = a[:, reachable] @ dx[reachable] + b @ dxi
    off = advance(base + dx * reachable, dxi)[0] - origin - linear
    if not off[reachable].norm() <= tolerance * linear[reachable].norm():  # NaN counts as far
        raise ValueError(
            "stationary_covariance: the update is not linear; freeze its preconditioner, or use a long run"
        )
    keep = reachable.nonzero().squeeze(1)
    x = _solve_lyapunov(a[keep][:, keep], b[keep] @ b[keep].T)
    full = torch.zeros(len(base), len(base), dtype=torch.float64)
    full[keep[:, None], keep] = x
    return full[:d, :d]


def _reachable(a: Tensor, b: Tensor) -> Tensor:
    """Coordinates that noise ever reaches; a constant such as a frozen preconditioner is none."""
    reached = (b != 0).any(dim=1)
    while True:
        wider = reached | (a[:, reached] != 0).any(dim=1)
        if bool((wider == reached).all()):
            return reached
        reached = wider


def _solve_lyapunov(a: Tensor, q: Tensor) -> Tensor:
    """``X = A X A^T + Q`` by doubling."""
    radius = torch.linalg.eigvals(a).abs().max().item() if len(a) else 0.0
    if radius >= 1.0:
        raise Unstable(f"stationary_covariance: spectral radius {radius:.6g} >= 1; lower lr or momentum")
    x = q
    for _ in range(60):
        x = x + a @ x @ a.T
        a = a @ a
        if a.abs().max() < 1e-200:
            break
    return (x + x.T) / 2
