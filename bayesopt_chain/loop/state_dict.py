"""The state of a chain as a flat dictionary of tensors by name, and back."""

from __future__ import annotations

from collections.abc import Mapping

import optree
import torch
from torch import Tensor

from bayesopt_chain.core.state import State, is_by_leaf, paths_of


def state_dict(state: State) -> dict[str, Tensor]:
    """Every tensor of a state by name: the number and kind of its link, the field, and the path of its leaf.

    Args:
        state: of a chain.

    Returns:
        A flat dictionary of the state's own tensors, not copies.

    Raises:
        TypeError: no state of a chain.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> list(bc.state_dict(bc.sgd(0.1, 0.9).init({"w": torch.zeros(2)})))
        ["0.Momentum.trace['w']"]
    """
    if not isinstance(state, State):
        raise TypeError(f"state_dict: state must be what init of a chain returned, got {type(state).__name__}")
    return _named_tensors(state)


def load_state_dict(state: State, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors of a flat dictionary into a state's own, in place.

    Args:
        state: of a chain of the same links over the same leaves, as ``init`` returns it.
        tensors: by name, as :func:`state_dict` gives them.

    Raises:
        ValueError: a name that is missing or unknown, or a tensor of another shape or dtype; nothing is written then.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, params = bc.sgd(0.1, 0.9), torch.zeros(1)
        >>> saved = {name: torch.ones(1) for name in bc.state_dict(tx.init(params))}
        >>> state = tx.init(params)
        >>> bc.load_state_dict(state, saved)
        >>> state[0].trace
        (tensor([1.]),)
    """
    mine = state_dict(state)
    wrong = [f"{name} is missing" for name in mine.keys() - tensors.keys()]
    wrong += [f"{name} is unknown" for name in tensors.keys() - mine.keys()]
    for name in mine.keys() & tensors.keys():
        x, t = mine[name], tensors[name]
        if x.shape != t.shape or x.dtype != t.dtype:
            wrong.append(f"{name} is {tuple(t.shape)}, {t.dtype}, the state has {tuple(x.shape)}, {x.dtype}")
    if wrong:
        raise ValueError(
            f"load_state_dict: {'; '.join(sorted(wrong)[:8])}: load into the state of the same chain over the same parameters"
        )
    with torch.no_grad():
        for name, x in mine.items():
            x.copy_(tensors[name])


def _named_tensors(state: State) -> dict[str, Tensor]:
    """Every tensor of a state under ``number.kind.field.path``: the tensors themselves, not copies."""
    layout, out = state.layout, dict[str, Tensor]()
    for i, (kind, entry, where) in enumerate(zip(layout.kinds, state, layout.where)):
        names = [layout.paths[j] for j in where]
        fields = entry._asdict() if hasattr(entry, "_asdict") else {"state": entry}
        for field, value in fields.items():
            stem = f"{i}.{kind}.{field}"
            if is_by_leaf(value, len(names)) and all(isinstance(t, Tensor) for t in value):
                out.update({stem + name: t for name, t in zip(names, value)})
            else:
                leaves = optree.tree_leaves(value, none_is_leaf=True)
                out.update({stem + path: t for path, t in zip(paths_of(value), leaves)})
    return out
