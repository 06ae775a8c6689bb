r"""Matched noise that leaves room for the noise that minibatches bring by themselves.

In coordinates in which every element of the parameters has gain one (:mod:`bayesopt_chain.diagnostics.heating`) let ``Q``
``[r, P]`` be orthonormal directions in which the batches' noise and the curvature are known. A draw ``xi`` of the chain becomes

    xi  <-  xi - Q^T (I - E^(1/2)) Q xi,

white noise whose covariance is ``E`` in the span of ``Q`` and the identity outside: ``4 r P`` operations a step. With ``E`` as
:func:`bayesopt_chain.diagnostics.heating` solves it the batches bring what is missing, and the chain's covariance is that
of full gradients.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import optree
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from bayesopt_chain.matching.response import Noise, Preconditioner
from bayesopt_chain.trees import combine, project


@dataclass(frozen=True, eq=False)
class Room:
    """What a report of :func:`bayesopt_chain.diagnostics.heating` leaves to the batches.

    Attributes:
        directions: ``Q``, for each leaf of the parameters the rows ``[r, *leaf.shape]``.
        root: ``E^(1/2)``, float64 ``[r, r]``.
        missing: ``I - E^(1/2)`` where the directions lie: a captured step cannot copy from the host.
        cooling: ``A``, float64 ``[r, r]``: maps draws of the chain without room onto what it would sample on full gradients.
        scales: roots of the gains, like each leaf.
        left: by how much the covariance differs with room from that on full gradients, relative, in the worst direction.
        overlap: share of the noise at a second place that lies in the span; ``None`` where it was not looked at.
        excess: by how much it differs without room, in the worst direction.
        order, steps_per_epoch: of the batches.
        tolerance: how much of ``left`` is accepted.
        links: of the chain that the report was made for.
        paths: of the leaves of the parameters that the report was made at, in their order.
    """

    directions: tuple[Tensor, ...]
    root: Tensor
    missing: Tensor
    cooling: Tensor
    scales: tuple[Tensor, ...]
    left: float
    overlap: float | None
    excess: float
    order: str
    steps_per_epoch: float
    tolerance: float
    links: tuple[Any, ...]
    paths: tuple[str, ...]

    @cached_property
    def fingerprint(self) -> int:
        """Sixty bits of a hash of directions, root, order and steps an epoch: how a saved run knows its room."""
        told = hashlib.sha256(repr((self.order, self.steps_per_epoch, self.paths)).encode())
        for x in chain(self.directions, (self.root,)):
            told.update(x.detach().double().cpu().numpy().tobytes())
        return int.from_bytes(told.digest()[:8], "big") >> 4

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Room):
            return NotImplemented
        mine, theirs = ((*x.directions, x.root) for x in (self, other))
        return len(mine) == len(theirs) and all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(mine, theirs))

    def __hash__(self) -> int:
        return hash((self.order, self.steps_per_epoch, len(self.root)))

    def __repr__(self) -> str:
        return f"room for {self.order} batches in {len(self.root)} directions"

    def leave(self, xi: Sequence[Tensor]) -> list[Tensor]:
        """One draw of all leaves, less what the batches bring."""
        inside: Tensor = project(list(self.directions), list(xi))
        back = combine(inside @ self.missing.to(inside), list(self.directions))
        return [x - y for x, y in zip(xi, back)]

    def require_leaves(self, who: str, paths: Sequence[str], leaves: Sequence[tuple[Any, torch.dtype]]) -> None:
        """Refuse parameters of other names, shapes or dtypes than those that the report was made at.

        Args:
            who: what is refused, in messages.
            paths: of the leaves, in their order.
            leaves: the shape and the dtype of each.
        """
        shapes = [tuple(rows.shape[1:]) for rows in self.directions]
        theirs = [None if shape is None else tuple(shape) for shape, _ in leaves]
        if shapes != theirs:
            raise ValueError(f"{who}: the report is of leaves of the shapes {shapes}, the parameters have {theirs}")
        if tuple(paths) != self.paths:
            raise ValueError(
                f"{who}: the report is of the leaves {', '.join(self.paths)}, the parameters are {', '.join(paths)}, which may "
                "be others in the same shapes; make the report at parameters of the same structure"
            )
        dtypes = [rows.dtype for rows in self.directions]
        if dtypes != [dtype for _, dtype in leaves]:
            raise ValueError(
                f"{who}: the report is of leaves in {_words(dtypes)}, the parameters are in "
                f"{_words([dtype for _, dtype in leaves])}; make the report at parameters of the same dtype"
            )

    def cool(self, draws: Any) -> Any:
        """Draws of all leaves ``[n, *leaf.shape]``, mapped about their mean."""
        leaves, structure = optree.tree_flatten(draws)
        centred = [x - x.mean(0) for x in leaves]
        inside: Tensor = project(list(self.directions), [x / s.to(x) for x, s in zip(centred, self.scales)])
        change = self.cooling - torch.eye(len(self.cooling), dtype=torch.float64)
        moved = combine(inside @ change.to(inside), list(self.directions))
        return structure.unflatten([x + s.to(x) * y.to(x) for x, s, y in zip(leaves, self.scales, moved)])

    def require_steady(self, who: str) -> None:
        """Refuse noise whose directions change from draw to draw, or were looked at in one place only."""
        if self.overlap is None:
            raise ValueError(
                f"{who}: whether the directions of the batches' noise stay where they are was not looked at; take the noise at "
                "another draw too: heating(tx, noise, again=gradient_noise(loss, draw, batches), ...)"
            )
        if self.overlap < 0.8:
            raise ValueError(
                f"{who}: at the second draw {self.overlap:.0%} of the batches' noise lie in the directions of the first, "
                "less than 80 %, so that what is taken away here is noise of another place (on networks it did nothing); take "
                "a smaller learning rate, larger batches or a longer memory of the momentum (bc.suggest_chain chooses)"
            )

    def require_batches(self, batches: Any) -> None:
        """Refuse ``bc.epochs(...)`` and loaders of another order or length; other batches are for their maker to know."""
        if hasattr(batches, "order") and hasattr(batches, "steps_per_epoch"):
            known = (batches.order, batches.steps_per_epoch)
        else:
            known = of_loader(batches)
        if known is None:
            return
        order, steps = known
        if order != self.order or abs(steps - self.steps_per_epoch) > 1e-6 * steps:
            raise ValueError(
                f"inject_langevin_noise: the report of room_for= is of {self.order} batches, {self.steps_per_epoch:.6g} an "
                f"epoch, and these are {order}, {steps:.6g} an epoch; make another report"
            )

    def require_of(self, links: Sequence[Any], noise: Any, who: str = "inject_langevin_noise") -> None:
        """Refuse another chain than that of the report; ``who`` has it, in messages."""
        mine, known = ([x for x in some if not isinstance(x.response, Noise)] for some in (links, self.links))
        told = [x for x in self.links if isinstance(x.response, Noise)]
        if learns := [x for x in links if isinstance(x.response, Preconditioner) and x.response.learns]:
            raise ValueError(
                f"{who}: room_for: {learns[0].shown} learns its preconditioner, and how much room there is was "
                "measured at one; give the diagonal that it has learned as bc.scale_by_preconditioner(tree), and make a report "
                "for that chain"
            )
        words = ("temperature", "order", "noise")
        same = len(told) == 1 and all(getattr(noise, word) == getattr(told[0], word, None) for word in words)
        if mine != known or not same:
            raise ValueError(
                f"{who}: the report of room_for= was made for the chain "
                f"({', '.join(x.shown for x in self.links)}), and this one is ({', '.join(x.shown for x in links)}); learning "
                "rate, momentum, preconditioner, temperature and order must be the same: make another report"
            )


def of_loader(loader: Any) -> tuple[str, float] | None:
    """The order of a DataLoader's batches, and how many are an epoch; ``None`` where that is not known.

    Raises:
        ValueError: the last batch of an epoch is shorter than the others, and brings more noise than they do.
    """
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:  # pyright: ignore
        return None
    sampler: Any = loader.sampler  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    b = loader.batch_sampler.batch_size
    if isinstance(sampler, SequentialSampler):
        order = "fixed"
    elif isinstance(sampler, RandomSampler):
        order = "independent" if sampler.replacement else "reshuffled"
    else:
        return None
    if len(sampler) % b and not loader.drop_last:
        raise ValueError(
            f"inject_langevin_noise: room_for: the last batch of an epoch has {len(sampler) % b} data and the others {b}, so "
            "that it brings more noise than the report knows of; give the loader drop_last=True"
        )
    return order, len(sampler) / b


def _words(dtypes: Sequence[torch.dtype]) -> str:
    """The dtypes, each named once."""
    return ", ".join(dict.fromkeys([str(x).removeprefix("torch.") for x in dtypes]))


def room_in(links: Sequence[Any]) -> Room | None:
    """The room that a noise link among these leaves to the batches; ``None`` where none does."""
    return next((room for link in links if (room := getattr(link, "room", None)) is not None), None)


def room_of(report: Any, who: str = "inject_langevin_noise") -> Room | None:
    """The room in a report; ``who`` asks for it, in messages.

    Raises:
        TypeError: what is no report of :func:`bayesopt_chain.diagnostics.heating`.
        ValueError: a report that does not say how much room to leave, or leaves too much heat.
    """
    if report is None:
        return None
    if not hasattr(report, "room"):
        raise TypeError(f"{who}: room_for must be a report of bc.diagnostics.heating, got {type(report).__name__}")
    room: Room | str = report.room
    if isinstance(room, str):
        raise ValueError(f"{who}: room_for: {room}")
    room.require_steady(f"{who}: room_for")
    if room.left > room.tolerance:
        raise ValueError(
            f"{who}: room_for: the batches alone bring more noise than there is room for: the variance would "
            f"still be {room.left:+.1%} off in some direction (tolerance {room.tolerance:.1%}); take a smaller learning rate, "
            "larger batches or reshuffled ones (bc.suggest_chain chooses among them)"
        )
    return room
