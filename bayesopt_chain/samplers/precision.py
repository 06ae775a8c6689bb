r"""Langevin sampling preconditioned by the inverse of any Gaussian precision: ``P = Lambda^-1`` (Fisher, K-FAC, low rank).

With ``R R^T = Lambda^-1`` and ``e`` the noise that SGD of the same lr and momentum would be given,

    u = Lambda^-1 g + R e,      v <- mu v + u,      theta <- theta - lr v,

which samples ``exp(-loss / T)`` with the preconditioner frozen, exactly for quadratic losses at order 2, whether or not
``Lambda`` and the curvature commute. With ``Lambda`` the Hessian every direction is sampled at one speed.

A precision is whatever answers ``solve(tree)`` with ``Lambda^-1 x`` and ``sqrt_solve(tree)`` with ``R x``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.core.chain import Chain, Rule, chain
from bayesopt_chain.core.leaves import zeros_like
from bayesopt_chain.links import own_noise
from bayesopt_chain.links.langevin_noise import Temperature
from bayesopt_chain.links.learning_rate import scale_by_neg_lr
from bayesopt_chain.links.momentum import add_momentum


class SupportsSolve(Protocol):
    """What a preconditioner needs of a precision; arguments and results are trees like the parameters."""

    def solve(self, tree: Any, /) -> Any: ...

    def sqrt_solve(self, tree: Any, /) -> Any: ...


class PrecisionNoiseState(NamedTuple):
    """Stream; last step's draw for each leaf (empty for white noise)."""

    key: Tensor
    count: Tensor
    memory: tuple[Tensor, ...]


@dataclass(frozen=True)
class SolveAndNoise(Rule):
    """``Lambda^-1 g + R e``."""

    precision: SupportsSolve = field(hash=False, compare=False)
    temperature: Temperature
    level: float  # variance of e at zero frequency, at T = 1
    order: int
    generator: torch.Generator | None = field(default=None, hash=False, compare=False)
    response = own_noise.ITS_OWN_NOISE
    on_trees = True

    def init_tree(self, params):
        if own_noise.is_zero(self.temperature):
            return PrecisionNoiseState((), (), ())
        leaves = optree.tree_leaves(params)
        key, count = own_noise.start(leaves, self.generator)
        return PrecisionNoiseState(key, count, zeros_like(leaves) if self.order == 2 else ())

    def update(self, g, state, params, ctx):
        if any(x is None for x in g):
            raise ValueError(
                "langevin_with_precision: every parameter needs a gradient, since the precision couples them"
            )
        out = ctx.from_tree(self.precision.solve(ctx.to_tree(list(g))))
        if own_noise.is_zero(self.temperature):
            return own_noise.emit(g, out, ctx.inplace), state
        temperature = own_noise.now(self.temperature, state.count)
        root = own_noise.root(self.level * temperature)
        xi = [z for (z,) in own_noise.draw(state, g, 1)]
        mean = [(z + m) / 2.0 for z, m in zip(xi, state.memory)] if self.order == 2 else xi
        e = ctx.from_tree(self.precision.sqrt_solve(ctx.to_tree([(root * m).to(x.dtype) for m, x in zip(mean, g)])))
        noisy = [u + w for u, w in zip(out, e)]
        if torch.is_tensor(temperature):
            noisy = [torch.where(temperature > 0, w, u) for w, u in zip(noisy, out)]
        memory = own_noise.write(state.memory, xi, ctx.inplace) if self.order == 2 else ()
        state = PrecisionNoiseState(state.key, own_noise.tick(state.count, ctx.inplace), memory)
        return own_noise.emit(g, noisy, ctx.inplace), state

    def __str__(self) -> str:
        return f"precondition_by({type(self.precision).__name__}, temperature={checks.show(self.temperature)})"


def langevin_with_precision(
    precision: SupportsSolve,
    lr: float,
    momentum: float = 0.0,
    *,
    temperature: Temperature,
    order: int = 2,
    generator: torch.Generator | None = None,
) -> Chain:
    """SGLD or SGHMC preconditioned by ``Lambda^-1``. At ``temperature=0`` it is (natural-)gradient descent with momentum.

    Args:
        precision: answers ``solve(tree)`` and ``sqrt_solve(tree)``, such as any precision of this library; it is frozen.
            Decompose it first (``precision.factorised()``) so that steps only solve.
        lr: learning rate, positive.
        momentum: in [0, 1).
        temperature: ``1 / N`` for a loss that is a mean over ``N`` data.
        order: 2 (matched noise) or 1 (white).
        generator: source of the random key (default: torch's global generator).

    Returns:
        A chain; its state holds up to two tensors for each parameter.

    Raises:
        TypeError: a precision without ``solve`` or ``sqrt_solve``.
        ValueError: an argument out of range.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> class Diagonal:
        ...     def solve(self, x): return x / torch.tensor([1.0, 4.0])
        ...     def sqrt_solve(self, x): return x / torch.tensor([1.0, 2.0])
        >>> tx, params = bc.samplers.langevin_with_precision(Diagonal(), 1.0, temperature=0.0), torch.zeros(2)
        >>> tx.update(torch.ones(2), tx.init(params), params=params, inplace=False)[0]
        tensor([-1.0000, -0.2500])
    """
    for method in ("solve", "sqrt_solve"):
        if not callable(getattr(precision, method, None)):
            raise TypeError(
                f"langevin_with_precision: precision has no {method}(tree), got {type(precision).__name__}; "
                "pass a precision of bc.precision, or an object with solve and sqrt_solve"
            )
    checks.positive("langevin_with_precision: lr", lr)
    checks.momentum("langevin_with_precision: momentum", momentum)
    checks.temperature(temperature)
    if order not in (1, 2):
        raise ValueError(f"langevin_with_precision: order must be 1 or 2, got {order!r}")
    if isinstance(temperature, int):
        temperature = float(temperature)
    level = 2.0 * (1.0 - momentum) / lr
    return chain(
        Chain((SolveAndNoise(precision, temperature, level, order, generator),)),
        add_momentum(momentum),
        scale_by_neg_lr(lr),
    )
