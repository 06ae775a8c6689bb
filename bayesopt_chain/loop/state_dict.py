"""Write the state of a chain as a flat dictionary of tensors by name, and load such a dictionary into a state."""

from __future__ import annotations

from collections.abc import Mapping

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.core.state import State, is_by_leaf
from bayesopt_chain.distributed.ranks import require_fit
from bayesopt_chain.trees import paths_of


@checks.takes(state=checks.instance(State, "what init of a chain returned"))
def state_dict(state: State) -> dict[str, Tensor]:
    """Return every tensor of a state by name.

    A name consists of the number and class of the link, the field of its state, and the path of the leaf.

    Args:
        state: the state of a chain.

    Returns:
        A flat dictionary of the state's own tensors, not copies.

    Raises:
        TypeError: ``state`` is not the state of a chain.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> list(bc.state_dict(bc.sgd(0.1, 0.9).init({"w": torch.zeros(2)})))
        ["0.Momentum.trace['w']"]
    """
    layout, out = state.layout, dict[str, Tensor]()
    for i, (kind, entry, where) in enumerate(zip(layout.kinds, state, layout.where)):
        names = [layout.paths[j] for j in where]
        fields = entry._asdict() if hasattr(entry, "_asdict") else {"state": entry}
        for field, value in fields.items():
            stem = f"{i}.{kind}.{field}"
            # a field with one tensor per leaf takes the paths of the parameters, any other field its own paths
            if is_by_leaf(value, len(names)) and all(isinstance(t, Tensor) for t in value):
                out.update({stem + name: t for name, t in zip(names, value)})
            else:
                leaves = optree.tree_leaves(value, none_is_leaf=True)
                out.update({stem + path: t for path, t in zip(paths_of(value), leaves)})
    return out


@checks.takes(tensors=checks.BY_NAME)
def load_state_dict(state: State, tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors of a flat dictionary into those of a state, in place.

    A sampler takes over the velocities of another chain by ``init(params, like=state)``.

    Args:
        state: the state of the same chain over the same leaves, as ``init`` returns it.
        tensors: tensors by name, as :func:`state_dict` returns them.

    Raises:
        TypeError: no dictionary of tensors.
        ValueError: a name is missing or unknown; a tensor has another shape or dtype. Nothing is written then.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, params = bc.sgd(0.1, 0.9), torch.zeros(1)
        >>> state = tx.init(params)
        >>> bc.load_state_dict(state, {name: torch.ones(1) for name in bc.state_dict(state)})
        >>> state[0].trace
        (tensor([1.]),)
    """
    mine = state_dict(state)
    here, there = ({n: f"{x.dtype} {tuple(x.shape)}" for n, x in both.items()} for both in (mine, tensors))
    # before the first tensor is written
    require_fit(
        "load_state_dict: load into the state of the same chain over the same parameters (what two chains share, "
        "tx.init(params, like=state) takes over)",
        here,
        there,
    )
    with torch.no_grad():
        for name, x in mine.items():
            x.copy_(tensors[name])
