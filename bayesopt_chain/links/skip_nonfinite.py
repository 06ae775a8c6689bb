r"""``skip_nonfinite``: skip every step whose gradient has NaN or infinite entries.

Such a gradient would enter velocities and averages and never leave them. With ``ok`` true if every entry of the gradient ``g``
is finite, a step is

    updates, state' = tx.update(g, state)     if ok,
    updates, state' = 0, state                otherwise.

A skipped step leaves the parameters, velocities, averages, step counts and the position of the random stream as they were, and
the next step draws the noise that the skipped step would have drawn. A run in which some batches have bad gradients is
therefore equal, bit for bit, to the run over the other batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torchopt.base import GradientTransformation

from bayesopt_chain import tracing
from bayesopt_chain._torch import local
from bayesopt_chain.distributed.shards import everywhere
from bayesopt_chain.links.wrapper import Wrapper
from bayesopt_chain.trees import all_finite


class SkipState(NamedTuple):
    """The state of a transformation in ``skip_nonfinite``.

    Attributes:
        inner: the state of the transformation itself.
        skipped: how many updates were skipped, 0-d int64.
    """

    inner: Any
    skipped: Tensor


@dataclass(frozen=True)
class _Skip:
    """The methods ``init`` and ``update`` of :class:`SkipNonfinite`, which call those of the transformation ``tx``."""

    tx: Any

    def init(self, params: Any, **options: Any) -> SkipState:
        leaves = [x for x in optree.tree_leaves(params) if isinstance(x, Tensor)]
        device = leaves[0].device if leaves else torch.device("cpu")
        return SkipState(self.tx.init(params, **options), torch.zeros((), dtype=torch.int64, device=device))

    def update(self, updates: Any, state: SkipState, *, params: Any = None, inplace: bool = True, **extra: Any) -> Any:
        both: Any = (updates, extra)
        leaves: list[Any] = optree.tree_leaves(both)
        # Where ranks hold parts of the gradients, all of them have to skip the step if the part of one of them is bad.
        ok = everywhere(all_finite([local(x) for x in leaves]), leaves)
        if not tracing.is_readable(ok):
            return self._choose(ok, updates, state, params, inplace, extra)
        if bool(ok):
            updates, inner = self.tx.update(updates, state.inner, params=params, inplace=inplace, **extra)
            return updates, SkipState(inner, state.skipped if inplace else state.skipped.clone())
        still = optree.tree_map(Tensor.zero_ if inplace else torch.zeros_like, updates)
        if inplace:
            return still, SkipState(state.inner, state.skipped.add_(1))
        return still, SkipState(optree.tree_map(torch.clone, state.inner), state.skipped + 1)

    def _choose(
        self, ok: Tensor, updates: Any, state: SkipState, params: Any, inplace: bool, extra: dict[str, Any]
    ) -> Any:
        """Make the update where ``ok`` cannot be read: compute it in any case, and choose the result by ``torch.where``.

        The transformation is given zeros in the place of a bad gradient, so that autograd meets no entry that is not finite.

        Raises:
            ValueError: the new state has another structure than the old one, so that one of both cannot be chosen.
        """
        given: Any = (updates, extra)

        def kept(x: Any) -> Any:
            return _where(ok, x, 0.0)

        safe: Any = optree.tree_map(kept, given)
        moves, inner = self.tx.update(safe[0], state.inner, params=params, inplace=False, **safe[1])
        moves = optree.tree_map(kept, moves)
        old, structure = optree.tree_flatten(state.inner)
        new, grown = optree.tree_flatten(inner)
        if structure != grown or any(a.shape != b.shape for a, b in zip(old, new)):
            raise ValueError(
                "skip_nonfinite: the state grows with the update, so that it cannot be kept without looking at the gradient; "
                "use a structure of curvature whose size stays, or leave this step uncaptured and unstacked"
            )
        chosen = [_where(ok, b, a) for a, b in zip(old, new)]
        skipped = state.skipped + (~ok).to(torch.int64)
        if inplace:
            moves = optree.tree_map(Tensor.copy_, updates, moves)
            chosen, skipped = [a.copy_(b) for a, b in zip(old, chosen)], state.skipped.copy_(skipped)
        return moves, SkipState(optree.tree_unflatten(structure, chosen), skipped)


class SkipNonfinite(Wrapper):
    """The transformation that :func:`skip_nonfinite` returns.

    Attributes:
        transformation: the transformation whose updates are skipped.
    """

    around = _Skip

    def __repr__(self) -> str:
        return f"skip_nonfinite({self.transformation!r})"


def skip_nonfinite(tx: GradientTransformation) -> SkipNonfinite:
    """Skip every update whose gradient is not finite, and count them.

    Wrap a whole chain or optimizer. Inside a chain only the wrapped links would be skipped, and a chain that samples refuses
    that. The gradients and the tensors among the keywords (``loss=``, gradients of single data) are examined; a gradient may
    be ``None``. Under ``vmap`` each chain skips its own steps.

    On a CPU this costs one pass over the gradients. Where reading a value would wait for the device or is impossible (on a GPU,
    under tracing or ``vmap``), the update is computed in any case and one of both results is chosen; with ``inplace=True`` this
    needs memory for a second state.

    Args:
        tx: any gradient transformation of this library or of TorchOpt, at any temperature.

    Returns:
        A transformation whose state is ``SkipState(inner, skipped)``. Pass ``state.inner`` to functions that take the state of
        ``tx``, for example ``link.posterior(state.inner, params)``. A skipped step returns updates of zero and the state as it
        was.

    Raises:
        TypeError: ``tx`` is no gradient transformation.
        ValueError: at an update where values cannot be read, a state whose size changes with the update
            (``structure="root"``).

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, params = bc.skip_nonfinite(bc.sgd(0.1, 0.9)), torch.ones(2)
        >>> state = tx.init(params)
        >>> updates, state = tx.update(torch.tensor([1.0, torch.nan]), state, params=params)
        >>> updates, state.skipped, state.inner[0].trace
        (tensor([0., 0.]), tensor(1), (tensor([0., 0.]),))
    """
    if not isinstance(tx, GradientTransformation):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"skip_nonfinite: tx is {tx!r}, not a gradient transformation")
    return SkipNonfinite(tx)


def _where(ok: Tensor, x: Any, other: Any) -> Any:
    """Choose ``x`` if ``ok`` and ``other`` if not.

    ``x`` is returned unchanged if it is not a tensor, or if it has integers and ``other`` is a number.
    """
    if not isinstance(x, Tensor) or (not isinstance(other, Tensor) and not (x.is_floating_point() or x.is_complex())):
        return x
    return torch.where(ok.to(x.device), x, other)
