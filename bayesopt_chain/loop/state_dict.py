"""Write the state of a chain as a flat dictionary of tensors by name, and load such a dictionary into a state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.core.state import State, is_by_leaf
from bayesopt_chain.trees import paths_of


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
    if not isinstance(state, State):
        raise TypeError(f"state_dict: state must be what init of a chain returned, got {type(state).__name__}")
    return _named_tensors(state)


class Difference(NamedTuple):
    """The names that :func:`load_state_dict` left out.

    Attributes:
        missing: names in the state for which the dictionary had no tensor.
        unknown: names in the dictionary for which the state had no tensor.
    """

    missing: list[str]
    unknown: list[str]


@checks.takes(tensors=checks.MAPPING, strict=checks.BOOL)
def load_state_dict(state: State, tensors: Mapping[str, Tensor], *, strict: bool = True) -> Difference:
    """Copy the tensors of a flat dictionary into those of a state, in place.

    Args:
        state: the state of a chain over the same leaves, as ``init`` returns it.
        tensors: tensors by name, as :func:`state_dict` returns them.
        strict: require that both have the same names. ``False`` copies the tensors that both have. Names are then matched
            without the number of the link if they are unique without it, so that a sampler can start from the velocities of an
            optimizer; keys of another chain are not copied. Default: True.

    Returns:
        The names that were left out, ``(missing, unknown)``; both are empty if ``strict``.

    Raises:
        ValueError: if ``strict``, a name is missing or unknown; a tensor has another shape or dtype. Nothing is written then.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> optimizer, params = bc.sgd(0.1, 0.9), torch.zeros(1)
        >>> saved = {name: torch.ones(1) for name in bc.state_dict(optimizer.init(params))}
        >>> state = bc.sghmc(0.1, 0.9, temperature=0.01).init(params)
        >>> bc.load_state_dict(state, saved, strict=False).missing
        ['1.LangevinNoise.key', '1.LangevinNoise.memory', '1.LangevinNoise.step']
        >>> state[0].trace
        (tensor([1.]),)
    """
    mine = state_dict(state)
    source = {name: name for name in mine.keys() & tensors.keys()}
    if not strict and mine.keys() != tensors.keys():
        source = _paired(mine, tensors)
    missing, unknown = sorted(mine.keys() - source.keys()), sorted(tensors.keys() - set(source.values()))
    wrong = [f"{name} is missing" for name in missing] + [f"{name} is unknown" for name in unknown] if strict else []
    for name, other in source.items():
        x, t = mine[name], tensors[other]
        if x.shape != t.shape or x.dtype != t.dtype:
            wrong.append(f"{name} is {tuple(t.shape)}, {t.dtype}, the state has {tuple(x.shape)}, {x.dtype}")
    if wrong:  # before the first tensor is written
        raise ValueError(
            f"load_state_dict: {'; '.join(sorted(wrong)[:8])}: load into the state of the same chain over the same parameters"
            + (", or with strict=False what both have" if strict and (missing or unknown) else "")
        )
    with torch.no_grad():
        for name, other in source.items():
            mine[name].copy_(tensors[other])
    return Difference(missing, unknown)


def _paired(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> dict[str, str]:
    """Match the names of two states. Link numbers are ignored where a name is unique without them; keys are never matched."""

    def bare(names: Mapping[str, Tensor]) -> dict[str, list[str]]:
        """Group names by what follows the number of the link."""
        out: dict[str, list[str]] = {}
        for name in names:
            if not name.endswith(".key"):
                out.setdefault(name.partition(".")[2], []).append(name)
        return out

    # a copied key would make two chains draw the same noise
    a, b = bare(mine), bare(theirs)
    return {a[name][0]: b[name][0] for name in a.keys() & b.keys() if len(a[name]) == len(b[name]) == 1}


def _named_tensors(state: State) -> dict[str, Tensor]:
    """Return every tensor of a state, not copies, by the name ``number.kind.field.path``."""
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
