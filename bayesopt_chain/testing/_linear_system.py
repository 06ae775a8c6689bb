r"""The linear system that one update of a transformation is, read off the transformation itself by impulses.

An update is a function of the gradient ``g``, the parameters ``theta``, the floating-point numbers ``s`` that the state
holds and the standard normal numbers ``xi`` that it draws. :class:`OneUpdate` calls it with any of the four moved away from
a point of rest and returns by how much the parameters and the state move in response. On a quadratic loss, where ``g = K
theta``, the parameters and the state together follow ``x' = A x + B xi``: :func:`closed_loop` reads ``A`` and ``B``.

The stationary covariance solves ``X = A X A^T + B B^T``, and its parameter block is what a linear sampler samples. Where rates
change with time the covariance follows ``X_{t+1} = A_t X_t A_t^T + B_t B_t^T``, with maps that are read anew at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bayesopt_chain import checks
from bayesopt_chain.core.state import State

# The height of an impulse where a link may answer larger ones otherwise: clipping does not act on gradients of this size.
# A power of two, so that multiplying and dividing by it does not round.
IMPULSE = 2.0**-26

NORMALS = ("normal_", "normal", "randn", "randn_like", "normal_functional", "philox_normals")


class NormalProbe(TorchDispatchMode):
    """Replaces every normal draw made under it by the next entries of ``values``, or by zeros.

    Args:
        values: standard normal numbers to hand out, shape ``[n]``, in the order of the draws; the mean and the deviation
            that a draw asks for are applied to them. ``None``: zeros, as many as are asked for.

    Attributes:
        drawn: how many numbers have been handed out, so that a first run tells how many an update draws.

    Raises:
        TypeError: under it something draws numbers that are not normal.

    Example:
        >>> import torch
        >>> with NormalProbe(torch.tensor([3.0, 4.0])) as probe:
        ...     x = torch.randn(2)
        >>> x, probe.drawn
        (tensor([3., 4.]), 2)
    """

    @checks.takes(
        values=checks.Kind(lambda x: x is None or (checks.REALS.fits(x) and x.ndim == 1), "numbers, a tensor [n]")
    )
    def __init__(self, values: Tensor | None = None) -> None:
        super().__init__()
        self.values = values
        self.drawn = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in NORMALS:
            n = out.numel()
            fresh = out.new_zeros(n) if self.values is None else self.values[self.drawn : self.drawn + n].to(out.device)
            self.drawn += n
            given = dict(zip([argument.name for argument in func._schema.arguments], args)) | (kwargs or {})
            out.copy_(given.get("mean", 0.0) + given.get("std", 1.0) * fresh.reshape(out.shape))
        elif name == "philox_uniforms" or torch.Tag.nondeterministic_seeded in func.tags:
            raise TypeError(
                f"NormalProbe: the update draws {name}, which is not a normal; only Gaussian noise can be probed"
            )
        return out


def state_of(tx: Any, params: Any) -> Any:
    """The state of ``init``; torch's generator and those of the links, which keys are drawn from, are left as they were."""
    own = [x for link in getattr(tx, "links", ()) if isinstance(x := getattr(link, "generator", None), torch.Generator)]
    before = [generator.get_state() for generator in own]
    with torch.random.fork_rng(devices=[]):
        state = tx.init(params)
    for generator, was in zip(own, before):
        generator.set_state(was)
    return state


class OneUpdate:
    """One update of a transformation, as a function of gradient, parameters, state and normal draws, in float64.

    The point of rest has zero parameters, zero gradient, zero draws and the numbers of ``state``.

    Args:
        tx: the transformation.
        params: its parameters; only their structure, shapes and devices matter.
        state: where to read it (default: after ``init`` and ``warmup`` updates at rest). Its tensors are read in float64.
        warmup: how many updates at rest follow ``init``.

    Attributes:
        params: the leaves of the parameters at rest, zeros.
        numbers: the floating-point tensors of the state at rest, in the order of its leaves.
        draws: how many normal numbers an update draws.
        next_state: the state after an update at rest.
    """

    def __init__(self, tx: Any, params: Any, state: Any = None, warmup: int = 2) -> None:
        self.tx = tx
        leaves, self._spec = optree.tree_flatten(params)
        self.params = [torch.zeros(p.shape, dtype=torch.float64, device=p.device) for p in leaves]
        if state is None:
            at_rest = optree.tree_unflatten(self._spec, self.params)
            state = state_of(tx, at_rest)
            with NormalProbe():
                for _ in range(warmup):
                    _, state = tx.update(at_rest, state, params=at_rest, inplace=False)
        self._entries, self._state_spec = optree.tree_flatten(_in_double(state))
        self._moving = [i for i, t in enumerate(self._entries) if torch.is_tensor(t) and t.is_floating_point()]
        self.numbers = [self._entries[i] for i in self._moving]
        self._rest, self.next_state, self.draws = self._update(None, None, None, None)

    def __call__(
        self,
        *,
        gradient: Sequence[Tensor] | None = None,
        theta: Sequence[Tensor] | None = None,
        numbers: Sequence[Tensor] | None = None,
        normals: Tensor | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """How an update away from rest differs from the one at rest.

        Args:
            gradient: like :attr:`params`.
            theta: the parameters, like :attr:`params`.
            numbers: added to the :attr:`numbers` of the state.
            normals: the draws, shape ``[draws]``.

        Returns:
            The differences of what is added to each parameter, and of each of the state's numbers afterwards.
        """
        out = [x - y for x, y in zip(self._update(gradient, theta, numbers, normals)[0], self._rest)]
        return out[: len(self.params)], out[len(self.params) :]

    def _update(
        self,
        gradient: Sequence[Tensor] | None,
        theta: Sequence[Tensor] | None,
        numbers: Sequence[Tensor] | None,
        normals: Tensor | None,
    ) -> tuple[list[Tensor], Any, int]:
        """The moves and the state's numbers afterwards, that state, and how many normal numbers were drawn."""
        entries = list(self._entries)
        for i, x in zip(self._moving, numbers or ()):
            entries[i] = entries[i] + x
        with NormalProbe(normals) as probe, torch.no_grad():
            updates, new = self.tx.update(
                optree.tree_unflatten(self._spec, gradient or self.params),
                optree.tree_unflatten(self._state_spec, entries),
                params=optree.tree_unflatten(self._spec, theta or self.params),
                inplace=False,
            )
        moves, after = optree.tree_leaves(updates), optree.tree_leaves(new)
        return [*moves, *(after[i] for i in self._moving)], new, probe.drawn


class ClosedLoop(NamedTuple):
    """``x' = A x + B xi``: parameters and state numbers of a transformation on a quadratic loss, after one update.

    Attributes:
        A: shape ``[n, n]``, float64; the first ``d`` rows and columns are the parameters. Columns of coordinates that
            never vary are zero.
        B: shape ``[n, draws]``.
        varies: shape ``[n]``, bool: the coordinates that noise reaches, in this update or a later one like it, and those
            that varied before. A constant such as a frozen preconditioner is none of them.
        next_state: the state after an update at rest, at which the next update may be read.
    """

    A: Tensor
    B: Tensor
    varies: Tensor
    next_state: Any


def closed_loop(
    tx: Any,
    curvature: Tensor,
    params: Any,
    state: Any = None,
    *,
    varied: Tensor | None = None,
    warmup: int = 2,
    tolerance: float = 1e-9,
) -> ClosedLoop:
    """Read one update of ``tx`` on ``loss = theta^T K theta / 2``.

    Args:
        tx: a transformation whose update is linear in the gradients, the state and the noise.
        curvature: ``K``, shape ``[d, d]``, float64.
        params: tree with ``d`` elements in all.
        state: where to read it (default: after ``init`` and ``warmup`` noiseless updates at zero gradient).
        varied: the ``varies`` of the update before, whose coordinates are probed too (default: none).
        warmup: see ``state``.
        tolerance: how far from linear the update may be, relative to its size.

    Returns:
        :class:`ClosedLoop`.

    Raises:
        ValueError: the update is not linear.
    """
    one = OneUpdate(tx, params, state, warmup)
    parts = [*one.params, *one.numbers]
    sizes, d = [t.numel() for t in parts], len(curvature)

    def respond(x: Tensor, xi: Tensor) -> Tensor:
        """The difference that ``x`` and ``xi`` away from rest make to the next ``x``."""
        at = [part.reshape(t.shape) for part, t in zip(x.split(sizes), parts)]
        force = (curvature @ x[:d]).split(sizes[: len(one.params)])
        moves, change = one(
            gradient=[f.reshape(p.shape) for f, p in zip(force, one.params)],
            theta=at[: len(one.params)],
            numbers=at[len(one.params) :],
            normals=xi,
        )
        new = torch.cat([t.reshape(-1) for t in (*moves, *change)])
        new[:d] += x[:d]
        return new

    n, double = sum(sizes), {"dtype": torch.float64, "device": curvature.device}
    impulses = torch.eye(n + one.draws, **double).split([n, one.draws], 1)
    A, B = torch.stack([respond(x, xi) for x, xi in zip(*impulses)], 1).split([n, one.draws], 1)
    varies = (B != 0).any(1) if varied is None else (B != 0).any(1) | varied
    while bool(((A[:, varies] != 0).any(1) & ~varies).any()):
        varies = varies | (A[:, varies] != 0).any(1)
    A = torch.where(varies, A, 0.0)

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, generator=generator, dtype=torch.float64, device="cpu").to(curvature.device) * varies
    xi = torch.randn(one.draws, generator=generator, dtype=torch.float64, device="cpu").to(curvature.device)
    linear = (A @ x + B @ xi)[varies]
    # At noise of size one everywhere the sum of the impulses' responses must be the response to all of them.
    if not (respond(x, xi)[varies] - linear).norm() <= tolerance * linear.norm():  # NaN counts as far
        raise ValueError("tx: its update is not linear; freeze its preconditioner, or use a long run")
    return ClosedLoop(A, B, varies, one.next_state)


def _in_double(tree: Any) -> Any:
    """The same state for parameters in float64, whose dtypes the states of chains know."""

    def doubled(x: Any) -> Any:
        if isinstance(x, State):
            dtypes = tuple([None if dtype is None else torch.float64 for dtype in x.layout.dtypes])
            return State([_in_double(entry) for entry in x], x.layout._replace(dtypes=dtypes))
        return x.detach().to(torch.float64) if torch.is_tensor(x) and x.is_floating_point() else x

    return optree.tree_map(doubled, tree, is_leaf=lambda x: isinstance(x, State))


class Unstable(ValueError):
    """The sampler has no stationary distribution on this loss."""


@checks.takes(params=checks.TREE.or_none(), curvature=checks.REALS, warmup=checks.whole(0))
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


@checks.takes(params=checks.TREE.or_none(), curvature=checks.REALS, settle=checks.whole(0))
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
    if params is None:
        params = torch.zeros(curvature.shape[:1], dtype=torch.float64, device=curvature.device)
    size = sum(p.numel() for p in optree.tree_leaves(params))
    if tuple(curvature.shape) != (size, size) or not torch.allclose(curvature, curvature.mT):
        raise ValueError(f"{who}: curvature must be a symmetric [{size}, {size}] matrix, got {checks.short(curvature)}")
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
    return optree.tree_map(lambda x, y: y if torch.is_tensor(x) and not x.is_floating_point() else x, state, first)


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
    return (X + X.T) / 2
