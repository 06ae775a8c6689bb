r"""``part``: which leaf of the whole model a plain tensor is, and which of its elements.

A DTensor says by itself which elements of a parameter a rank holds. Engines that hand plain tensors to the optimizer do not:

    pipeline stages            whole leaves, under names that another stage may use too
    ZeroRedundancyOptimizer    whole leaves, without names
    FSDP1                      consecutive elements of flattened leaves

The noise of an element is a function of (key, leaf, element, step), so that it is right once leaf and element are known. What
is said here is remembered for the tensor itself, so that it reaches an optimizer that somebody else builds from it.
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
    """The name of a leaf in the whole model, and the elements of it that a tensor holds (``None``: all of them)."""

    name: str
    runs: Runs | None


Where = Mapping[str, Any] | Callable[[str, Tensor], Any]  # a name, (name, first element) or (name, runs)
_places: WeakIdKeyDictionary = WeakIdKeyDictionary()


def part(params: Iterable[tuple[str, Tensor]], where: Where | None = None) -> list[tuple[str, Tensor]]:
    """Say which elements of the whole model these tensors hold, so that ranks with different parts draw different noise.

    Call it on every rank before the first step, and after wrappers have put their own tensors in the place of the model's
    (FSDP1). The optimizer may be built from what this returns, or from the tensors alone, as ZeroRedundancyOptimizer does.

    Args:
        params: ``(name, tensor)`` pairs, such as ``model.named_parameters()``.
        where: by name, or as a function of (name, tensor), what each tensor is:

            * a name: the whole leaf of that name in the whole model (a stage of a pipeline);
            * ``(name, start)``: its consecutive elements from number ``start`` of the leaf in row-major order;
            * ``(name, ((start, length), ...))``: these of its elements, ascending.

            What a mapping does not name, and everything by default, is the whole leaf of its own name. Of FSDP1 it is
            :func:`flat_shards`.

    Returns:
        ``(name, tensor)`` pairs with the names of the leaves, for an optimizer's ``params``.

    Raises:
        TypeError: ``params`` without names.
        ValueError: elements that are not as many as the tensor has, of a DTensor (which knows its own), or two tensors that are
            the same elements of one leaf.

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
    """The place that :func:`part` was told for a tensor; ``None`` if it was told nothing."""
    return _places.get(p)


def elements_of(p: Tensor) -> Runs:
    """The elements of its leaf that a tensor holds: those that :func:`part` was told, a DTensor's shard, or all."""
    place = _places.get(p)
    return place.runs if place is not None and place.runs is not None else runs_of(p)


def _said(name: str, p: Tensor, where: Where | None) -> Any:
    """Look a tensor up in ``where``. By default it is the whole leaf of its own name."""
    if where is None:
        return name
    return where(name, p) if callable(where) else where.get(name, name)


def _place(name: str, p: Tensor, said: Any) -> Place:
    """The place that was said, in one form.

    Raises:
        ValueError: no name, elements of a DTensor, or elements that are not as many as the tensor has or do not ascend.
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
    """What FSDP1 (``torch.distributed.fsdp.FullyShardedDataParallel``) left of each parameter on this rank.

    With ``use_orig_params=True`` noise is numbered by the elements of the model's own parameters: it is that of one process
    with ``stream="philox"``, on any number of ranks. Without, a flattened parameter is a leaf of its own, whose noise is the
    same on any number of ranks with the same wrapping.

    Args:
        module: the wrapped module.

    Returns:
        By parameter's name what :func:`part` takes for ``where``.

    Raises:
        ValueError: a module without such a wrapper in it.

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
            if not handle.uses_sharded_strategy:
                out[name] = leaf
            elif info is None:
                out[name] = (leaf, dist.get_rank(handle.process_group) * p.numel())
            else:
                out[name] = (leaf, info.intra_param_start_idx if info.in_shard else ())
    return out
