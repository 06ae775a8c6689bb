"""``restrict``: a loss as a function of some entries of the parameters, such as one attention head, while the others stay.

The free entries ``x`` are tensors of their own, and ``fill(x)`` puts them among the others. So a chain on ``x`` spends
no gradient, noise or state on an entry that stays, and the number of free entries is the number of dimensions of its
target. Learning coefficients of such a part are the refined ones of Wang et al. (2024, arXiv:2410.02984).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import kinds
from bayesopt_chain.trees import paths


class Restricted(NamedTuple):
    """What :func:`restrict` returns.

    Attributes:
        loss: ``loss(free, batch)``, the given loss at ``fill(free)``.
        free: the free entries by the name of their parameter: the parameter itself where all of it is free, else its free
            entries ``[m]`` in the order of the flattened parameter.
        fill: free entries to parameters, a tree like the given one.
    """

    loss: Callable[..., Any]
    free: dict[str, Tensor]
    fill: Callable[[Any], Any]


_WHERE = kinds.Kind(
    lambda x: (
        isinstance(x, Mapping)
        and len(x) > 0
        and all(m is None or (isinstance(m, Tensor) and m.dtype == torch.bool) for m in x.values())
    ),
    "a dictionary of masks of dtype bool (or None for all of a parameter) by names of parameters",
    (Mapping,),
)


@kinds.takes(where=_WHERE)
def restrict(loss: Callable[..., Any], params: Any, where: Mapping[str, Tensor | None]) -> Restricted:
    """Make the loss a function of some entries of the parameters; the others keep the values that they have here.

    Args:
        loss: ``loss(params, batch)``, as for :func:`bayesopt_chain.make_step`; further arguments are handed on.
        params: a tree of tensors. Copies are made.
        where: the free entries, by the name of a parameter or by the beginning of names: ``{"blocks.0.attn.qkv": mask,
            "blocks.1": None}``. A mask has the parameter's shape and is true where an entry is free; ``None`` frees all.
            Where two names fit a parameter the longer one holds. Keys of nested trees are joined by dots; a tensor that is
            no tree is called ``"parameters"``.

    Returns:
        :class:`Restricted`, ``(loss, free, fill)``.

    Raises:
        ValueError: a name of no parameter; a mask of another shape; no entry is free.
        TypeError: masks that are not of dtype bool.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> params = {"w": torch.zeros(2, 2), "b": torch.ones(2)}
        >>> def loss(p, batch):
        ...     return (p["w"] @ batch + p["b"]).square().sum()
        >>> loss, free, fill = bc.restrict(loss, params, {"w": torch.tensor([[True, False], [False, False]])})
        >>> free, fill({"w": torch.tensor([3.0])})["w"]
        ({'w': tensor([0.])}, tensor([[3., 0.],
                [0., 0.]]))
        >>> step = bc.make_step(loss, bc.sghmc(0.1, temperature=0.1))      # a chain of one dimension
    """
    leaves, spec = optree.tree_flatten(params)
    names = paths(params)
    fixed = [p.detach().clone() for p in leaves]
    unknown = set(where)
    free, places = dict[str, Tensor](), list[tuple[int, str, Tensor | None]]()
    for i, (name, p) in enumerate(zip(names, fixed)):
        keys = [key for key in where if name == key or name.startswith(key + ".")]
        unknown -= set(keys)
        if not keys:
            continue
        mask = where[max(keys, key=len)]
        if mask is not None and mask.shape != p.shape:
            raise ValueError(
                f"restrict: the mask of {name} has the shape {list(mask.shape)}, and the parameter {list(p.shape)}; give one "
                "of the shape of the parameter, or None for all of it"
            )
        index = None  # of all entries
        if mask is not None and not bool(mask.all()):
            index = mask.to(p.device).reshape(-1).nonzero().reshape(-1)
        if index is None or len(index):
            free[name] = p.clone() if index is None else p.reshape(-1)[index]
            places.append((i, name, index))
    if unknown:
        raise ValueError(
            f"restrict: no parameter is called {sorted(unknown)[0]!r}, nor begins with it and a dot; there are "
            + ", ".join(names[:20])
            + (", ..." if len(names) > 20 else "")
        )
    if not free:
        raise ValueError("restrict: the masks leave no entry free; make at least one of their entries true")

    def fill(x: Any) -> Any:
        out = list(fixed)
        for i, name, index in places:
            p = fixed[i]
            out[i] = x[name] if index is None else p.reshape(-1).index_copy(0, index, x[name]).reshape(p.shape)
        return optree.tree_unflatten(spec, out)

    def restricted(free: Any, *args: Any) -> Any:
        return loss(fill(free), *args)

    return Restricted(restricted, free, fill)
