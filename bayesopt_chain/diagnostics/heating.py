r"""How far minibatches heat a chain: its stationary covariance under their noise, against the one without.

In the coordinates of :mod:`._response` (gain one, ``phi = theta / sqrt(G)``) let ``H`` be the curvature, ``C`` the
noise of a batch drawn with replacement, ``K = N / b`` the steps of an epoch and ``L`` its whole part. Parameters and
state ``x = (phi, s)`` follow

    x_{t+1} = M x_t - Gamma n_t + F xi_t,            n_t the noise of the batch gradient,

with ``M, Gamma, F`` from the chain's own response to gradients, parameters and draws. Let ``S_t = sum_{i<t} M^i Gamma C
Gamma^T M^iT`` and ``R_t = sum_{i<t} M^i Gamma``. What the batches add to the covariance of ``x`` is, for each order,

    independent    X = M X M^T + (1 - 1/K) Gamma C Gamma^T
    reshuffled     X_0 = M^L X_0 M^LT + Q_L,   X_t = M^t X_0 M^tT + Q_t,      Q_t = S_t - R_t C R_t^T / K
    palindrome     the same over 2 L steps, where step L + i uses the batch of step L + 1 - i again:
                   Q_{L+t} = M^t S_L M^tT + S_t + Z_t + Z_t^T - R_{L+t} C R_{L+t}^T / K,
                   Z_t = sum_{i<=t} M^{t+i-1} Gamma C Gamma^T M^{t-i}T
                   (the last term with R of the L different batches, each used twice)
    fixed          (square of a bias)  X = W (S_L - R_L C R_L^T / K) W^T,     W = (1 - M^L)^-1,
                   averaged over what the order may be

The mean over an epoch of reshuffled batches is

    X_inf + (1/L) sum_{t=1..L} [M^t (X_0 - X_inf) M^tT - R_t C R_t^T / K],      X_inf = M X_inf M^T + Gamma C Gamma^T,

by repeated squaring, so that an epoch of any length costs its binary digits; for palindromes with

    sum_{i=1..L} M^{L+i-1} G M^{L-i}T = M^L T,         T the upper right block of ((M, G), (0, M^T))^L,
    sum_{t=1..L} Z_t = M (1 - M^2)^-1 (1 - M^{2L}) X_inf - (that sum for G = M X_inf M^T).

All of this holds since the ``L`` batches of an epoch are exchangeable with covariance ``C (delta_ij - 1/K)``: with replacement
``C`` alone, without ``B = C (1 - 1/K)`` for one and ``-C / K`` between two, and nothing in their sum when ``b`` divides ``N``.
In the book-keeping of one batch's own covariance ``B`` that is ``B K/(K-1) (delta_ij - 1/K)``. The model's own draws (dropout)
are independent in every order.

**Cooling.** :meth:`Heating.cool` maps draws of the chain, in coordinates of gain one, by the optimal transport from their
covariance ``X + S^2`` to that of full gradients, ``A = S (S (X + S^2) S)^(-1/2) S``. In the eigenvectors of ``H`` the chain of
one group moves each direction alone, so that ``S^2`` is diagonal: its entries are the variances under full gradients.

One group of parameters without preconditioner needs no more than each curvature alone. Several groups are coupled by
``H``: the equations are then solved in the span of the largest eigenvectors of ``H`` and ``C``, split into the groups,
times the state; exact where ``H`` keeps that span, and a Galerkin projection else. Directions without curvature have no
stationary variance and are left out.

That gradient noise widens the stationary law, and by how much with independent batches, is due to Mandt, Hoffman and Blei
(2017); the other orders follow from the recursion above.

For momentum and independent batches the answer is ``rho 2(1+mu) / (2(1+mu) - y)``, ``rho = lr_eff B / (2T)``, ``y = lr
k``; for reshuffled ones about ``(kappa/2) (1 - 2 (kappa - 1 + exp(-kappa)) / kappa^2)`` where ``B = K T H`` and ``mu =
0``, ``kappa = K lr_eff k``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, get_args

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.data.index_stream import Order
from bayesopt_chain.diagnostics._response import Group, Response, read, require_unclipped
from bayesopt_chain.diagnostics.findings import Row, judged
from bayesopt_chain.diagnostics.gradient_noise import GradientNoise, lanczos
from bayesopt_chain.testing._linear_system import Unstable, solve_lyapunov
from bayesopt_chain.trees import Tree, combine, common_dtype, flatten, project, require_like, unflatten

SMALL = 1e-7  # relative size below which eigenvalues count as zero


@dataclass(frozen=True)
class Heating:
    """What :func:`heating` predicts, for directions in descending order of curvature.

    Attributes:
        excess: the variance that minibatches add, over the variance without them; mean over the steps of an epoch,
            ``[r]``.
        at_end: the same at the ends of epochs alone, ``[r]``.
        worst: the largest ``excess`` of all directions in the span looked at.
        rho: share of the noise budget that the batches spend, ``lr_eff B / (2 T)``, ``[r]``.
        kappa: relaxations an epoch, ``K lr_eff k``, ``[r]``.
        directions: unit vectors, a tree of leaves ``[r, *leaf.shape]``: the ratio of variances is that of ``<direction,
            theta>``.
        order, steps_per_epoch: as given.
        assumed: whether the curvature was not given but taken from the noise, ``C = K T H``, as a well-specified model
            has it.
        overlap: share of the noise at the second draw (``again=``) in the directions of the first; NaN where it is not known.
        cooling: the map of :meth:`cool`, a function of draws, where there is one.
        refusal: why there is none, a sentence.
    """

    excess: Tensor
    at_end: Tensor
    worst: float
    rho: Tensor
    kappa: Tensor
    directions: Any
    order: str
    steps_per_epoch: float
    assumed: bool
    overlap: float = math.nan
    cooling: Callable[[Any], Any] | None = field(default=None, repr=False)
    refusal: str = field(default="this report was not made by bc.diagnostics.heating", repr=False)

    @checks.takes(draws=checks.PARAMS)
    def cool(self, draws: Any) -> Any:
        """Correct the covariance of draws for the heat of the batches, by an affine map about their mean.

        It is exact where the posterior is Gaussian and the batches' noise the same everywhere.

        Args:
            draws: of the chain, a tree like the parameters of leaves ``[n, *leaf.shape]``, such as
                ``draws.params`` of one chain.

        Returns:
            Such a tree, whose covariance in the span looked at is that of full gradients.

        Raises:
            ValueError: a report whose ``refusal`` says why there is no map; no second draw, or less than 80 % of its noise
                in the directions of the first; a variance more than five times too large (an excess above 4); draws of other
                shapes.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> loss = lambda w, batch: (w - batch).square().mean() / 2
            >>> data = bc.epochs(torch.linspace(-3**0.5, 3**0.5, 1000), 20)
            >>> noise = bc.diagnostics.gradient_noise(loss, torch.tensor(0.0), data)
            >>> curved = lambda w: w
            >>> tx = bc.sghmc(0.01, temperature=1 / 1000)
            >>> report = bc.diagnostics.heating(tx, noise, curvature=curved, again=noise)
            >>> draws = torch.randn(100)
            >>> ratio = report.cool(draws).var() / draws.var()
            >>> torch.allclose(ratio, 1 / (1 + report.excess[0].float()))
            True
        """
        if self.cooling is None:
            raise ValueError(f"cool: {self.refusal}")
        shapes = [tuple(x.shape[1:]) if x.ndim else None for x in optree.tree_leaves(draws)]
        if shapes != [tuple(rows.shape[1:]) for rows in optree.tree_leaves(self.directions)]:
            raise ValueError(
                f"cool: draws must be leaves [n, *leaf.shape], got {shapes} behind the first axis; of several chains pass one"
            )
        return self.cooling(draws)

    def __str__(self) -> str:
        source = "assumed: C = K T H, a well-specified model" if self.assumed else "given"
        rows = zip(self.kappa.tolist(), self.rho.tolist(), self.excess.tolist(), self.at_end.tolist())
        lines = [
            f"minibatch heating, {self.order} batches, {self.steps_per_epoch:.6g} steps an epoch; curvature {source}",
            f"worst direction: variance +{self.worst:.1%} on average over an epoch",
            "  kappa     rho       mean      at end",
            *["  {:<9.3g} {:<9.3g} {:<+9.1%} {:<+9.1%}".format(*row) for row in rows],
        ]
        return "\n".join(lines)


@checks.takes(
    tx=checks.ANY,
    noise=checks.instance(GradientNoise, "a report of bc.diagnostics.gradient_noise"),
    again=checks.instance(GradientNoise, "a report of bc.diagnostics.gradient_noise, or None"),
    order=checks.one_of(*get_args(Order)),
    steps_per_epoch=checks.number("[1, inf]"),
    curvature=checks.Kind(
        checks.FUNCTION.fits,
        "a product v -> H v on trees, such as bc.diagnostics.hessian_product gives; of a matrix H, where params is a vector, "
        "H.mv",
    ),
)
def heating(
    tx: Any,
    noise: GradientNoise,
    *,
    order: Order | None = None,
    steps_per_epoch: float | None = None,
    curvature: Any = None,
    state: Any = None,
    again: GradientNoise | None = None,
) -> Heating:
    """Predict how far minibatches heat the chain ``tx``.

    Args:
        tx: any linear chain at a temperature above 0: momentum, Nesterov, dampening, decay, schedules and
            preconditioners as they stand, groups.
        noise: from :func:`gradient_noise`, at the parameters of interest.
        order: of the batches; default: that of the ``bc.epochs`` which ``noise`` came from.
        steps_per_epoch: ``K = N / b``, at least 1; default likewise. Infinite for independent batches drawn with
            replacement.
        curvature: of the mean loss per datum, a product ``v -> H v`` on trees, such as :func:`hessian_product`, ``times`` of a
            :mod:`bayesopt_chain.precision` over its ``count``, or ``H.mv`` of a matrix where the parameters are one vector.
            Negative curvature is left out. Default: assume ``C = K T H``, and say so.
        state: the state of ``tx``, where a preconditioner learns (default: that of ``init``).
        again: the noise at another draw, which :meth:`Heating.cool` needs: ``overlap`` says how much of it lies in the
            directions of the first.

    Returns:
        :class:`Heating`; ``print`` it.

    Raises:
        ValueError: a chain without noise, one that is not linear, that clips these gradients, or that diverges; an
            unknown order; ``K`` missing.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> def loss(w, batch):
        ...     return (w - batch).square().mean() / 2
        >>> data = bc.epochs(torch.linspace(-3**0.5, 3**0.5, 1000), 20)
        >>> noise = bc.diagnostics.gradient_noise(loss, torch.tensor(0.0), data)
        >>> report = bc.diagnostics.heating(bc.sghmc(0.002, temperature=1 / 1000), noise)   # kappa = 50 * 0.02 * curvature
        >>> report.assumed, bool(0.05 < report.worst < 0.12)
        (True, True)
    """
    response = read(tx, noise.mean, state)
    require_unclipped(tx, _gradients(noise))
    order, steps = order or noise.order, steps_per_epoch or noise.steps_per_epoch  # pyright: ignore[reportAssignmentType]
    if order is None or steps is None or (math.isinf(steps) and order != "independent"):
        raise ValueError(
            f"heating: of order={order!r} and steps_per_epoch={steps} one is missing, or an order has epochs of no end; give "
            "steps_per_epoch, N / batch size, or order='independent'"
        )
    if not any(group.temperature > 0 for group in response.groups):
        raise ValueError(
            "heating: the chain draws no noise, so there is no variance to compare with; give it a temperature above 0"
        )
    if curvature is None and (math.isinf(steps) or not noise.trace > 0):
        raise ValueError(
            "heating: with steps_per_epoch=inf, or batches of one gradient, the curvature cannot be assumed from the noise; "
            "pass curvature=bc.diagnostics.hessian_product(loss, params, batches)"
        )
    system = reduce(response, noise, curvature, steps)
    report, closed, full, mean = predict(system, order, steps)
    m = SimpleNamespace(
        assumed=report.assumed, order=order, worst=report.worst, times=1 + report.worst, groups=len(response.groups),
        overlap=math.nan if again is None else _overlap(system, again),
    )  # fmt: skip
    refusal = next((found.says for found in judged(NO_MAP, m, set())), "")
    cooling = None if refusal else _cooling(system, closed, full, mean)
    return replace(report, overlap=m.overlap, cooling=cooling, refusal=refusal)


def _gradients(noise: GradientNoise) -> Iterator[Any]:
    """The gradients of the batches that noise was measured on, to a share of ``1 / m`` where they are of several epochs."""
    return (
        optree.tree_map(lambda mean, rows, i=i: mean + rows[i] * math.sqrt(noise.batches - 1), noise.mean, noise.rows)
        for i in range(noise.batches)
    )


NO_MAP = (  # why draws cannot be cooled: the first that holds
    Row("cool", lambda m: m.assumed,
        "the curvature was assumed; pass curvature=bc.diagnostics.hessian_product(loss, params, batches) to heating"),
    Row("cool", lambda m: m.order == "fixed",
        "batches of a fixed order shift the mean, which no map of the draws can undo; reshuffle them"),
    Row("cool", lambda m: m.groups != 1,
        "the report is of {groups} groups of parameters with momenta or decays of their own, and the map is known for one"),
    Row("cool", lambda m: math.isnan(m.overlap),
        "whether the directions of the batches' noise change between draws is not known; measure the noise at a second draw: "
        "heating(tx, noise, again=gradient_noise(loss, draw, batches), ...)"),
    Row("cool", lambda m: m.overlap < 0.8,
        "at the second draw {overlap:.0%} of the batches' noise lie in the directions of the first, less than 80 %, so that "
        "the map would correct directions that are not heated; take a smaller learning rate or larger batches"),
    Row("cool", lambda m: m.worst > 4.0,
        "the variance is {times:.3g} times too large in some direction, and a chain so hot has been where the loss is no "
        "quadratic; run it at a smaller learning rate (bc.suggest_lr)"),
)  # fmt: skip


def _cooling(system: Reduced, closed: Loop, full: Tensor, mean: Tensor) -> Callable[[Any], Any]:
    """The map of :meth:`Heating.cool`, of a tree of leaves ``[n, *leaf.shape]``: by ``A`` about their mean."""
    half = full.diagonal().sqrt()
    m, P = torch.linalg.eigh(half[:, None] * (mean + torch.diag(full.diagonal())) * half)
    transport = half[:, None] * ((P / m.sqrt()) @ P.T) * half
    directions = optree.tree_leaves(unflatten(closed.V.T.to(system.bases[0]) @ torch.cat(system.bases), system.like))
    change = (transport - torch.eye(len(half), dtype=torch.float64, device="cpu")).to(directions[0].device)
    scales = [gain.sqrt().to(leaf.device) for gain, leaf in zip(system.response.gains, directions)]

    def cooled(draws: Any) -> Any:
        leaves, structure = optree.tree_flatten(draws)
        centred = [(x - x.mean(0)) / s.to(x) for x, s in zip(leaves, scales)]
        inside: Tensor = project(directions, centred)
        moved = combine(inside @ change.to(inside), directions)
        return structure.unflatten([x + s.to(x) * y.to(x) for x, s, y in zip(leaves, scales, moved)])

    return cooled


def _overlap(system: Reduced, again: GradientNoise) -> float:
    """The share of the largest directions of the noise at another draw that lies in the span."""
    require_like(again.mean, system.like, "heating: what again is of")
    Q = torch.cat(system.bases)
    rows = flatten(again.rows, system.like).to(Q) * system.roots
    top = principal(rows, len(again.eigenvalues))
    return float((top @ Q.T).square().sum() / top.square().sum())


@dataclass(frozen=True)
class Reduced:
    """Curvature and noise in the span that is looked at, in coordinates of gain one, group by group."""

    response: Response
    groups: tuple[Group, ...]  # those with a share in the span
    bases: tuple[Tensor, ...]  # rows [q, P], orthonormal, zero outside their group
    roots: Tensor  # of the gains, [P]
    H: Tensor
    C: Tensor
    D: Tensor
    like: Any
    assumed: bool


def reduce(
    response: Response,
    noise: GradientNoise,
    curve: Callable[[Tree], Tree] | None,
    steps: float,
    max_products: int = 120,
) -> Reduced:
    """Project curvature and noise onto the span of their largest directions, the curvature's found in so many products."""
    like, rank = noise.mean, len(noise.eigenvalues)
    dtype = torch.float64 if sum(x.numel() for x in optree.tree_leaves(like)) < 4096 else common_dtype(like)
    gains = optree.tree_unflatten(optree.tree_structure(like), response.gains)
    roots = flatten(gains, like).sqrt().to(dtype)
    rows = flatten(noise.rows, like).to(dtype) * roots
    draws = rows[:0] if noise.draws is None else flatten(noise.draws, like).to(dtype) * roots
    total = torch.cat([rows, draws / 2**0.5])
    span = principal(total, rank)

    def curved(v: Tensor) -> Tensor:
        assert curve is not None
        image = curve(unflatten(roots * v, like))
        require_like(image, like, "heating: what curvature returns")
        return roots * flatten(image, like).to(dtype)

    if curve is not None:
        span = torch.cat([span, lanczos(curved, roots, rank, max_products=max_products)[1]])
    parts = span.split([leaf.numel() for leaf in optree.tree_leaves(like)], 1)
    own = [torch.cat([x * (j in g.leaves) for j, x in enumerate(parts)], 1) for g in response.groups]
    found = [(group, basis) for group, part in zip(response.groups, own) if len(basis := _orthonormal(part))]
    groups, bases = zip(*found)
    Q = torch.cat(bases)
    inside, within = ((Q @ x.T).double().cpu() for x in (rows, draws))
    D = within @ within.T
    C = _positive(inside @ inside.T - D / 2)
    if curve is not None:
        H = _positive((Q @ torch.stack([curved(q) for q in Q]).T).double().cpu())
    else:
        temperatures = {round(g.temperature, 12) for g in groups}
        if max(temperatures) - min(temperatures) > 1e-6 * max(temperatures):
            raise ValueError(
                f"heating: the groups have the temperatures {sorted(temperatures)}, so that the curvature cannot be taken "
                "from the noise; pass curvature=bc.diagnostics.hessian_product(loss, params, batches)"
            )
        H = C / (steps * groups[0].temperature)
    return Reduced(response, groups, bases, roots, H, C, D, like, curve is None)


def rescaled(system: Reduced, response: Response, ratio: float) -> Reduced:
    """The same for a chain whose links answer as ``response``, at a learning rate so many times as large."""
    first = [group.leaves[0] for group in system.groups]
    gains = [float((response.gains[j] / system.response.gains[j]).reshape(-1)[0]) * ratio for j in first]
    s = torch.cat(
        [torch.full((len(x),), r**0.5, dtype=torch.float64, device="cpu") for x, r in zip(system.bases, gains)]
    )
    # weight decay is a curvature, and grows with the rate as every other one does
    by = torch.tensor([1.0, ratio, 1.0], dtype=torch.float64, device="cpu")
    found = [next(g for g in response.groups if j in g.leaves) for j in first]
    groups = tuple([g._replace(B=g.B * by, D=g.D * by, prior=g.prior * ratio) for g in found])
    outer = s[:, None] * s
    return replace(system, groups=groups, H=system.H * outer, C=system.C * outer, D=system.D * outer)


@dataclass(frozen=True)
class Loop:
    """``x' = M x - Gamma n + F xi``, ``x`` holding the curved directions first, the rows of ``V``."""

    M: Tensor
    Gamma: Tensor
    F: Tensor
    V: Tensor
    prior: Tensor

    @property
    def radius(self) -> float:
        """Spectral radius; the chain is stable below 1."""
        return float(torch.linalg.eigvals(self.M).abs().amax())


def loop(system: Reduced) -> Loop:
    """The closed loop of chain and curvature."""
    sizes = [len(basis) for basis in system.bases]
    q = sum(sizes)

    def spread(of: Callable[[Group], Tensor]) -> Tensor:
        """Block-diagonal, a block ``of(group) x 1`` for each group."""
        return torch.block_diag(
            *(
                torch.kron(
                    of(g).clone(memory_format=torch.contiguous_format), torch.eye(n, dtype=torch.float64, device="cpu")
                )
                for g, n in zip(system.groups, sizes)
            )
        )

    A = spread(lambda g: g.A)
    b, u, E = (spread(lambda g, i=i: g.B[:, i : i + 1]) for i in range(3))
    d, w, f = (spread(lambda g, i=i: g.D[None, i : i + 1]) for i in range(3))
    c = spread(lambda g: torch.eye(1, len(g.A), dtype=torch.float64, device="cpu"))
    prior = spread(lambda g: torch.tensor([[g.prior]], dtype=torch.float64, device="cpu"))
    values, V = torch.linalg.eigh(system.H + prior)
    V = V[:, values > SMALL * values.amax().clamp(min=1e-300)].flip(1)
    M = torch.cat(
        [
            torch.cat(
                [V.T @ (torch.eye(q, dtype=torch.float64, device="cpu") - d @ system.H - w) @ V, -V.T @ c], dim=1
            ),
            torch.cat([(b @ system.H + u) @ V, A], dim=1),
        ]
    )
    return Loop(M, torch.cat([V.T @ d, -b]), torch.cat([-V.T @ f, E]), V, prior)


def predict(system: Reduced, order: Order, steps: float) -> tuple[Heating, Loop, Tensor, Tensor]:
    """What the equations of the module say of this order of the batches.

    Returns:
        The report; the closed loop; the covariance without batches, and what they add to it on average.
    """
    closed = loop(system)
    r = closed.V.shape[1]
    if not r:
        raise ValueError(
            "heating: no direction that was looked at has a positive curvature, so that there is no variance to compare with; "
            "take params near a mode, or put a prior into the loss or the chain"
        )
    try:
        full = solve_lyapunov(closed.M, closed.F @ closed.F.T)[:r, :r]
    except Unstable:
        raise ValueError(
            f"heating: the chain diverges at this curvature (spectral radius {closed.radius:.6g})"
            + (f", which was assumed from the noise and steps_per_epoch={steps:.6g}: pass curvature=" * system.assumed)
            + "; lower the learning rate"
        ) from None
    mean, end = (x[:r, :r] for x in added(closed.M, closed.Gamma, system.C, system.D, order, steps))
    values, vectors = torch.linalg.eigh(full)
    keep = values > SMALL * values.amax()
    whitening = vectors[:, keep] / values[keep].sqrt()
    curvature = (closed.V.T @ (system.H + closed.prior) @ closed.V).diagonal()
    noise = (closed.V.T @ (system.C * (1.0 - 1.0 / steps) + system.D) @ closed.V).diagonal()
    variance = full.diagonal()
    rows = closed.V.T.to(system.roots) @ torch.cat(system.bases) / torch.where(system.roots > 0, system.roots, 1.0)
    report = Heating(
        excess=mean.diagonal() / variance,
        at_end=end.diagonal() / variance,
        worst=float(torch.linalg.eigvalsh(whitening.T @ mean @ whitening).amax()),
        rho=noise / (2.0 * variance * curvature),
        kappa=steps * curvature,
        directions=unflatten(rows / rows.norm(dim=1, keepdim=True), system.like),
        order=order,
        steps_per_epoch=steps,
        assumed=system.assumed,
    )
    return report, closed, full, mean


def added(M: Tensor, gamma: Tensor, C: Tensor, D: Tensor, order: Order, steps: float) -> tuple[Tensor, Tensor]:
    """What batches add to the covariance of ``x``: the mean over the phases of a period, and at its end."""
    own = solve_lyapunov(M, gamma @ D @ gamma.T)
    if order == "independent":
        X = solve_lyapunov(M, gamma @ (C * (1.0 - 1.0 / steps)) @ gamma.T) + own
        return X, X
    L, G, n = int(steps + 1e-9), gamma @ C @ gamma.T, len(M)
    S, power = _series(M, G, L)
    # a constant gradient beside x: the second moments of its effect after t steps are R_t C R_t^T
    constant = torch.eye(n + len(C), dtype=M.dtype, device=M.device)
    constant[:n, :n], constant[:n, n:] = M, gamma
    start = torch.block_diag(torch.zeros_like(M), C)
    squares, push = _series(constant, start, L)
    R = push[:n, n:]
    Q = S - R @ C @ R.T / steps
    if order == "fixed":
        W = torch.linalg.inv(torch.eye(n, dtype=M.dtype, device=M.device) - power)
        X = W @ Q @ W.T + own
        return X, X
    independent = solve_lyapunov(M, G)
    if order == "reshuffled":
        X = solve_lyapunov(power, Q)
        fades = M @ _series(M, X - independent, L)[0] @ M.T
    else:

        def crossed(G: Tensor) -> Tensor:
            """``sum_{i=1..L} M^{L+i-1} G M^{L-i}T``."""
            both = torch.cat([torch.cat([M, G], 1), torch.cat([torch.zeros_like(M), M.T], 1)])
            return power @ torch.linalg.matrix_power(both, L)[:n, n:]

        one, twice, Z = torch.eye(n, dtype=M.dtype, device=M.device), power @ R + R, crossed(G)
        X = solve_lyapunov(power @ power, power @ S @ power.T + S + Z + Z.T - twice @ C @ twice.T / steps)
        Z = M @ torch.linalg.solve(one - M @ M, one - power @ power) @ independent - crossed(M @ independent @ M.T)
        fades = M @ (_series(M, X, 2 * L)[0] + _series(M, S - 2 * independent, L)[0]) @ M.T + Z + Z.T
        push = push[:, n:]  # of a constant gradient, at the end of an epoch
        squares, L = squares + _series(constant, push @ C @ push.T, L)[0], 2 * L
    mean = independent + (fades - (constant @ squares @ constant.T)[:n, :n] / steps) / L
    return mean + own, X + own


def _series(B: Tensor, P: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """``sum_{t < count} B^t P B^tT`` and ``B^count``, in as many products as ``count`` has binary digits."""
    total, power = torch.zeros_like(B), torch.eye(len(B), dtype=B.dtype, device=B.device)
    for digit in f"{count:b}":
        total, power = total + power @ total @ power.T, power @ power
        if digit == "1":
            total, power = P + B @ total @ B.T, B @ power
    return total, power


def principal(rows: Tensor, rank: int) -> Tensor:
    """The largest principal directions of some rows, ``rank`` at most, each times its singular value."""
    values, vectors = torch.linalg.eigh((rows @ rows.T).double())
    return vectors[:, values >= 1e-10 * values[-1]][:, -rank:].T.to(rows) @ rows


def _orthonormal(rows: Tensor) -> Tensor:
    """An orthonormal basis of the span of some rows, as rows."""
    _, sizes, basis = torch.linalg.svd(rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-30), full_matrices=False)
    return basis[sizes > 1e-5 * sizes.amax().clamp(min=1e-30)]


def _positive(matrix: Tensor) -> Tensor:
    """Without its negative eigenvalues."""
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    return (vectors * values.clamp(min=0.0)) @ vectors.T
