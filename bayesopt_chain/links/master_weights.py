r"""``with_master_weights``: parameters of 16 bits that are updated with the accuracy of float32.

A bfloat16 number has 8 significant bits. Adding less than about 1/512 of it rounds to no change, and most steps of a sampler
are smaller than that. Let ``p`` be a narrow leaf (bfloat16 or float16), and

    m = p + r                                    the master weight, float32; ``r`` is in the state, 0 at first
    u, inner' = tx.update(g, inner, params=m)    with the gradient in float32
    v = narrow(narrow(m + u) - p)                what this update returns
    r' = m + u - p',    p' = narrow(p + v)       what ``apply_updates`` makes of it

so that ``m' = p' + r' = m + u``. If a step is smaller than half of the parameter, ``p' = narrow(m')``, and the difference of
``m'`` and ``p'`` is exact in float32 (Sterbenz 1974). The master weights are then equal, bit for bit, to the parameters of the
same chain in float32 whose gradients are taken at ``p``. After a larger step, for example across zero, ``p'`` differs from
``m'`` by the rounding of ``v``, and the master weight has the error of rounding ``p'`` to float32. The state has the difference
and not the master weight itself, so that the chain goes on from a parameter that was changed from outside.

``tx`` updates leaves of other dtypes as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torchopt.base import GradientTransformation

from bayesopt_chain import checks
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.links.wrapper import Wrapper

NARROW = (torch.bfloat16, torch.float16)


class MasterState(NamedTuple):
    """The state of a chain with master weights.

    Attributes:
        inner: the state of the chain inside.
        residue: for each narrow leaf, in the order of the tree, the master weight minus the parameter, float32, of the shape
            of the leaf.
    """

    inner: Any
    residue: tuple[Tensor, ...]


@dataclass(frozen=True)
class _Around:
    """The methods ``init`` and ``update`` of :class:`MasterWeights`, which call those of the transformation ``tx``."""

    tx: Any

    def init(self, params: Any, *, like: Any = None) -> MasterState:
        leaves, spec = optree.tree_flatten(params, none_is_leaf=True)
        given = {} if like is None else {"like": like}
        residue = [torch.zeros_like(p, dtype=torch.float32) for p in leaves if _is_narrow(p)]
        return MasterState(self.tx.init(spec.unflatten(map(_wide, leaves)), **given), tuple(residue))

    def update(
        self, updates: Any, state: MasterState, *, params: Any = None, inplace: bool = True, **extra: Any
    ) -> Any:
        if params is None:
            raise ValueError("with_master_weights needs the parameters: call update(updates, state, params=params)")
        g, spec = optree.tree_flatten(updates, none_is_leaf=True)
        p = optree.tree_leaves(params, none_is_leaf=True)
        m = _masters(p, state.residue)
        trees = [spec.unflatten(leaves) for leaves in (map(_wide, g), m)]
        moves, inner = self.tx.update(trees[0], state.inner, params=trees[1], inplace=inplace, **extra)
        u = optree.tree_leaves(moves, none_is_leaf=True)
        residue = list(state.residue)
        for k, j in enumerate([j for j, x in enumerate(p) if _is_narrow(x)]):
            if u[j] is None:
                continue
            new = m[j] + u[j]
            v = (new.to(p[j].dtype).float() - p[j].float()).to(p[j].dtype)
            r = new - (p[j] + v).float()
            u[j], residue[k] = (g[j].copy_(v), residue[k].copy_(r)) if inplace else (v, r)
        return spec.unflatten(u), MasterState(inner, tuple(residue))


class MasterWeights(Wrapper):
    """The transformation that :func:`with_master_weights` returns.

    Attributes:
        transformation: the transformation inside.
    """

    around = _Around

    @checks.takes(params=checks.PARAMS, state=checks.instance(MasterState, "a state of this transformation"))
    def masters(self, state: MasterState, params: Any) -> Any:
        """The master weights.

        Args:
            state: the state of this transformation.
            params: the parameters.

        Returns:
            A tree like ``params`` with float32 leaves in the place of the narrow ones.

        Raises:
            TypeError: ``state`` is not a ``MasterState``, or ``params`` are not tensors.
            ValueError: the state belongs to other parameters.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> tx, params = bc.with_master_weights(bc.sgd(0.001)), torch.ones(1, dtype=torch.bfloat16)
            >>> updates, state = tx.update(torch.ones_like(params), tx.init(params), params=params)
            >>> params + updates, tx.masters(state, params + updates)
            (tensor([1.], dtype=torch.bfloat16), tensor([0.9990]))
        """
        leaves, spec = optree.tree_flatten(params, none_is_leaf=True)
        narrow = [p.shape for p in leaves if _is_narrow(p)]
        if narrow != (of := [r.shape for r in state.residue]):
            raise ValueError(f"masters: params have narrow leaves of the shapes {narrow}, the state is for {of}")
        return spec.unflatten(_masters(leaves, state.residue))

    def __repr__(self) -> str:
        return f"with_master_weights({self.transformation!r})"


def with_master_weights(tx: GradientTransformation) -> MasterWeights:
    """Update bfloat16 and float16 parameters by float32 master weights, so that small steps and small noise are not lost.

    Wrap a whole chain. Gradients are taken at the narrow parameters. The state takes four bytes for each narrow parameter, in
    addition to the state of the chain, whose velocities and averages are float32.

    Args:
        tx: a chain of this library or a transformation of TorchOpt, at any temperature, that follows the gradient at the
            parameters.

    Returns:
        A transformation of state ``MasterState(inner, residue)``, with a method ``masters(state, params)`` that gives the
        float32 weights. Its updates have the dtypes of the parameters.

    Raises:
        TypeError: ``tx`` is no gradient transformation.
        ValueError: ``tx`` carries a posterior of its own, needs curvature or is a wrapper itself; at an update, ``params`` are
            missing.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> params = torch.ones(3, dtype=torch.bfloat16)
        >>> step = bc.make_step(lambda p, batch: p.float().sum(), bc.with_master_weights(bc.sgd(0.001)))
        >>> state = step.init(params)
        >>> for _ in range(4):
        ...     params, state, info = step(params, state, None)
        >>> params
        tensor([0.9961, 0.9961, 0.9961], dtype=torch.bfloat16)
    """
    if not isinstance(tx, GradientTransformation):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"with_master_weights: tx is {tx!r}, not a gradient transformation")
    if isinstance(tx, Wrapper):
        raise ValueError(
            f"with_master_weights: tx is {type(tx).__name__}; wrap the chain first: skip_nonfinite(with_master_weights(tx))"
        )
    for link in tx.links if isinstance(tx, Chain) else ():
        if link.traits.samples or link.required_kwargs:
            raise ValueError(
                f"with_master_weights: {link.shown} takes its gradient at a draw, or needs "
                f"{', '.join(sorted(link.required_kwargs)) or 'draws'}, which would be rounded; keep float32 parameters, and "
                "let the model compute in make_step(..., autocast=torch.bfloat16)"
            )
    return MasterWeights(tx)


def _is_narrow(x: Any) -> bool:
    """Whether a leaf is a tensor of 16 bits, which gets a master weight."""
    return isinstance(x, Tensor) and x.dtype in NARROW


def _wide(x: Any) -> Any:
    """A narrow gradient or parameter in float32."""
    return x.float() if _is_narrow(x) else x


def _masters(leaves: list[Any], residue: tuple[Tensor, ...]) -> list[Any]:
    """The parameters, with master weights in the place of the narrow ones."""
    beyond = iter(residue)
    return [p.detach().float() + next(beyond) if _is_narrow(p) else p for p in leaves]
