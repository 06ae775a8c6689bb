r"""``part``: the user says which elements of which leaf of the whole model a plain tensor holds.

A DTensor knows which elements of a parameter a rank holds. Plain tensors, which some engines give to the optimizer, do not:

    pipeline stages            whole leaves, under names that another stage may use, too
    ZeroRedundancyOptimizer    whole leaves, without names
    FSDP1                      consecutive elements of flattened leaves

The noise of an element is a function of the key, the leaf, the number of the element in the leaf and the step. Different ranks
therefore draw independent noise once leaf and elements are known. They are remembered by the identity of the tensor, so that
they are known in an optimizer, too, that another library builds from the same tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from bayesopt_chain._torch import is_dtensor
from bayesopt_chain.distributed.layout import runs_of
from bayesopt_chain.random.philox import Runs
from bayesopt_chain.random.stream import without_wrappers


class Place(NamedTuple):
    """The place of a tensor in the whole model.

    Attributes:
        name: the name of the leaf in the whole model.
        runs: the elements of the leaf that the tensor holds, as ``((start, length), ...)``; ``None`` for all of them.
    """

    name: str
    runs: Runs | None


# By name or as a function of name and tensor: a leaf's name, (name, first element) or (name, runs).
Where = Mapping[str, Any] | Callable[[str, Tensor], Any]
# Weak, so that a place is forgotten together with its tensor.
_places: WeakIdKeyDictionary = WeakIdKeyDictionary()


def part(params: Iterable[tuple[str, Tensor]], where: Where | None = None) -> list[tuple[str, Tensor]]:
    """Say which elements of the whole model tensors hold, so that ranks with different parts draw different noise.

    Call it on every rank before the first step. With FSDP1 call it after the model is wrapped, because the wrapper replaces the
    model's tensors by its own. The optimizer may be built from the returned pairs or from the tensors alone.

    Args:
        params: ``(name, tensor)`` pairs, such as ``model.named_parameters()``.
        where: the place of each tensor, as a dictionary by name or as a function of name and tensor. A place is one of

            * a name: the tensor is the whole leaf of that name in the whole model, as in a stage of a pipeline;
            * ``(name, start)``: the tensor holds consecutive elements of that leaf, from number ``start`` in row-major order;
            * ``(name, ((start, length), ...))``: the tensor holds these elements of that leaf, in ascending order.

            By default, and if its name is not in the dictionary, a tensor is the whole leaf of its own name. For FSDP1
            :func:`flat_shards` returns the dictionary.

    Returns:
        ``(name, tensor)`` pairs with the names of the leaves, for the argument ``params`` of an optimizer.

    Raises:
        TypeError: ``params`` are not ``(name, tensor)`` pairs.
        ValueError: the number of elements is not that of the tensor; elements are given for a DTensor, which knows its own; two
            tensors have the same elements of one leaf.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> stage, first = torch.nn.Sequential(torch.nn.Linear(2, 2)), 3      # layers 3 and on of a longer model
        >>> mine = bc.distributed.part(stage.named_parameters(), lambda name, p: f"{first + int(name[0])}{name[1:]}")
        >>> [name for name, _ in mine]
        ['3.weight', '3.bias']
        >>> optimizer = bc.optim.SGHMC(mine, 0.1, temperature=0.1, generator=bc.distributed.generator(0))
    """
    given = list(params)
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in given):
        raise TypeError(
            "part: params must be (name, tensor) pairs, such as model.named_parameters(); the noise is numbered by names"
        )
    places = [_place(name, p, _said(name, p, where)) for name, p in given]
    if len(set(places)) < len(places):
        double = next(place for i, place in enumerate(places) if place in places[:i])
        raise ValueError(
            f"part: two tensors are said to be the same elements of {double.name!r}, and would draw the same noise"
        )
    for (_, p), place in zip(given, places):
        _places[p] = place
    return [(place.name, p) for (_, p), place in zip(given, places)]


def place_of(p: Tensor) -> Place | None:
    """The place of a tensor that was given to :func:`part`; ``None`` for any other tensor."""
    return _places.get(p)


def elements_of(p: Tensor) -> Runs:
    """The elements of its leaf that a tensor holds: those given to :func:`part`, those of a DTensor's shard, or all.

    Args:
        p: a plain tensor or a DTensor.

    Returns:
        ``((start, length), ...)`` in ascending order.
    """
    place = _places.get(p)
    return place.runs if place is not None and place.runs is not None else runs_of(p)


def _said(name: str, p: Tensor, where: Where | None) -> Any:
    """The place of a tensor as the user gave it; without one, its own name."""
    if where is None:
        return name
    return where(name, p) if callable(where) else where.get(name, name)


def _place(name: str, p: Tensor, said: Any) -> Place:
    """Check a place that the user gave, and convert it.

    Raises:
        ValueError: the name is missing; elements are given for a DTensor; the elements are not as many as the tensor has, or
            they are not in ascending order.
    """
    leaf, elements = (said, None) if isinstance(said, str) else said
    if not isinstance(leaf, str):
        raise ValueError(f"part: where must give a leaf's name, or (name, elements), for {name!r}; got {said!r}")
    if elements is not None and is_dtensor(p):
        raise ValueError(
            f"part: {name!r} is a DTensor, which says itself which elements are here; give its leaf's name alone"
        )
    runs: Runs | None = None
    if elements is not None:
        runs = ((elements, p.numel()),) if isinstance(elements, int) else tuple([(int(a), int(n)) for a, n in elements])
        runs = tuple([run for run in runs if run[1]])
        if sum([n for _, n in runs]) != p.numel():
            raise ValueError(
                f"part: {name!r} has {p.numel()} elements, and where names {sum([n for _, n in runs])} of {leaf!r}"
            )
        if any(a < 0 for a, _ in runs) or any(b < a + n for (a, n), (b, _) in pairwise(runs)):
            raise ValueError(f"part: the elements of {name!r} must ascend from 0 in {leaf!r}, got {runs[:4]}")
    return Place(leaf, runs)


def flat_shards(module: nn.Module) -> dict[str, Any]:
    """Find the elements of each parameter that a rank holds under FSDP1 (``FullyShardedDataParallel``).

    With ``use_orig_params=True`` a leaf is a parameter of the model, so that the noise on any number of ranks is that of one
    process. Without it a leaf is a flattened parameter, and the noise is the same on any number of
    ranks if the modules are wrapped in the same way.

    Args:
        module: a module that is wrapped in ``torch.distributed.fsdp.FullyShardedDataParallel`` or has parts that are.

    Returns:
        By the name of each parameter its place, for the argument ``where`` of :func:`part`.

    Raises:
        ValueError: no part of the module is wrapped.

    Example:
        >>> from torch.distributed.fsdp import FullyShardedDataParallel
        >>> model = FullyShardedDataParallel(model, use_orig_params=True)                             # doctest: +SKIP
        >>> mine = bc.distributed.part(model.named_parameters(), bc.distributed.flat_shards(model))   # doctest: +SKIP
        >>> optimizer = bc.optim.SGHMC(mine, 0.1, temperature=0.1, generator=generator)               # doctest: +SKIP
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    handles = [] if fsdp is None else [
        unit._handle for unit in fsdp.FullyShardedDataParallel.fsdp_modules(module) if unit._handle is not None
    ]  # fmt: skip
    if not handles:
        raise ValueError("flat_shards: no part of the module is wrapped in FullyShardedDataParallel")
    names = {id(p): name for name, p in module.named_parameters()}
    out: dict[str, Any] = {}
    for handle in handles:
        flat = handle.flat_param
        parts = [(flat, None)] if not handle._use_orig_params else list(zip(flat._params, flat._shard_param_infos))
        for p, info in parts:
            name = names.get(id(p))
            if name is None:
                continue
            (leaf,) = without_wrappers((name,))
            if not handle.uses_sharded_strategy:  # NO_SHARD: every rank has all elements
                out[name] = leaf
            elif info is None:  # a flattened parameter, of which the ranks have parts of equal length
                out[name] = (leaf, dist.get_rank(handle.process_group) * p.numel())
            else:
                out[name] = (leaf, info.intra_param_start_idx if info.in_shard else ())
    return out
