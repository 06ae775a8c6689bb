"""Reduce the draws of an optimizer by the noise that its minibatches already bring (``room_for=``).

:mod:`bayesopt_chain.links.room` does the same for chains, and explains the equation. The step of
:class:`bayesopt_chain.optim.SGD` is that of ``bc.sgd`` with the same numbers, so that a report made for that chain, or for
``bc.sghmc`` or ``bc.sgld``, holds for the optimizer. The draws ``xi`` of all parameters are made together and are replaced in
place by ``xi - Q^T (I - E^(1/2)) Q xi``. The rest of the step uses them like any other draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain.distributed.parts import place_of
from bayesopt_chain.distributed.shards import are_spread
from bayesopt_chain.links.room import Room
from bayesopt_chain.matching.response import Noise
from bayesopt_chain.optim._plan import Plan
from bayesopt_chain.optimizers.functional import sgd

_NUMBERS = ("lr", "momentum", "dampening", "weight_decay", "temperature")


def require_room(who: str, room: Room, groups: Sequence[dict[str, Any]]) -> None:
    """Check that a report was made for these parameter groups.

    Args:
        who: the name of the optimizer in messages.
        room: the room of the report.
        groups: all parameter groups.

    Raises:
        ValueError: an option rules out ``room_for=``, or the report was made for another chain or other parameters.
    """
    who = f"{who}: room_for"
    if len(groups) != 1:
        raise ValueError(
            f"{who}: a report is of one group of parameters, and here are {len(groups)}: one learning rate and momentum for "
            "all, or leave room_for out"
        )
    (group,) = groups
    if any(torch.is_tensor(group[name]) for name in _NUMBERS):
        raise ValueError(
            f"{who}: a learning rate, momentum or temperature that is a tensor may change, and with it how much room there is; "
            "give numbers, and make a report for them"
        )
    if group["nesterov"]:
        raise ValueError(
            f"{who}: Nesterov's step has two noises here, and a report is of one: set nesterov=False, or run the chain "
            "bc.chain(bc.add_momentum(..., nesterov=True), bc.inject_langevin_noise(T, room_for=report), ...)"
        )
    if not group["noise_kept"]:
        raise ValueError(
            f"{who}: keep_draws=False makes draws again piece by piece, and these go together; leave it out"
        )
    if group.get("differentiable"):
        raise ValueError(f"{who}: draws are changed where they lie, which differentiable=True forbids; leave it out")
    params: list[Tensor] = group["params"]
    if are_spread(params) or any(place_of(p) is not None for p in params):
        raise ValueError(f"{who}: its directions are of whole parameters, and these are sharded: leave room_for out")
    if len({(p.dtype, p.device) for p in params}) > 1:
        raise ValueError(f"{who}: the parameters must have one dtype and lie on one device")
    if (at := room.directions[0].device) != params[0].device:
        raise ValueError(
            f"{who}: the report was made at parameters on {at}, these are on {params[0].device}; make it where they are"
        )
    places = _places(who, room, group)
    room.require_leaves(who, room.paths, [(params[j].shape, params[j].dtype) for j in places])
    chain = sgd(*[group[name] for name in _NUMBERS[:4]], maximize=group["maximize"], temperature=group["temperature"])
    room.require_of(
        chain.links,
        next(link for link in chain.links if isinstance(link.response, Noise)),
        who.removesuffix(": room_for"),
    )


def _places(who: str, room: Room, group: dict[str, Any]) -> list[int]:
    """Return, for each leaf of the report, the index of its parameter in the group.

    The parameter is found by its name, or by its index if parameters have no names.

    Raises:
        ValueError: the report and the group have different leaves.
    """
    names = group.get("param_names")
    told = {f"[{name!r}]": j for j, name in enumerate(names or range(len(group["params"])))}
    if room.paths == ("",):
        told = {"": 0}
    if len(group["params"]) != len(room.paths) or not all(path in told for path in room.paths):
        given = ", ".join(told) if names else "a list without names"
        raise ValueError(
            f"{who}: the report is of the leaves {', '.join(room.paths)}, the parameters are {given}; make the report at "
            "dict(model.named_parameters()) and give model.named_parameters() here, or the same list to both"
        )
    return [told[path] for path in room.paths]


def require_all_noisy(who: str, plan: Plan, group: dict[str, Any]) -> None:
    """Check that all parameters get noise in this step, with equal numbers.

    Raises:
        ValueError: a parameter has no gradient, or a velocity or a last draw where others have none.
    """
    if len(plan.noisy) != len(group["params"]):
        raise ValueError(
            f"{who}: with room_for= every parameter needs a gradient, since the directions of the batches' noise couple them; "
            f"{len(group['params']) - len(plan.noisy)} have none"
        )
    if len(plan.alike) > 1:
        raise ValueError(
            f"{who}: with room_for= all parameters take the same step, and some of these have a velocity or a last draw that "
            "others have not; optimizer.state.clear() starts all of them anew"
        )


def fill_with_room(
    room: Room, group: dict[str, Any], fill: Callable[[], object], draws: Sequence[Tensor]
) -> Callable[[], None]:
    """Make a ``fill()`` whose draws leave room for the noise of the minibatches.

    Args:
        room: the room of the report.
        group: the only parameter group.
        fill: ``fill()`` overwrites ``draws`` with standard normals.
        draws: the draws of all parameters, in the order of the group.

    Returns:
        A function that calls ``fill()`` and then reduces the draws in place.
    """
    places = _places("", room, group)

    def filled() -> None:
        fill()
        for j, less in zip(places, room.leave([draws[j] for j in places])):
            draws[j].copy_(less)

    return filled


def require_saved(who: str, room: Room | None, groups: Sequence[Any]) -> None:
    """Check that the state of a saved run has the same ``room_for=`` as this optimizer.

    Raises:
        ValueError: the run had a report, and this optimizer has none or another one.
    """
    for group in groups:
        saved = group.get("noise_room")
        if saved is not None and (room is None or room.fingerprint != saved):
            raise ValueError(
                f"{who}.load_state_dict: the run that was saved left room for its batches by "
                f"{'a report' if room is None else 'another report'}; make the optimizer with room_for= of that report "
                "(torch.save keeps it), or go on from the parameters alone"
            )
