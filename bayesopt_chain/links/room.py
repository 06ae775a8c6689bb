r"""Matched noise that is reduced by the noise of the minibatch gradients, so that both together have the right variance.

The equation holds in coordinates in which every element of the parameters has the gain one
(:mod:`bayesopt_chain.diagnostics.heating`). Let the rows of ``Q`` ``[r, P]`` be orthonormal directions in which the covariance
of the minibatch gradients and the curvature were measured. A draw ``xi`` of the chain becomes

    xi  <-  xi - Q^T (I - E^(1/2)) Q xi.

This is white noise whose covariance is ``E`` in the span of ``Q`` and the identity outside. It takes ``4 r P`` operations a
step. The report of :func:`bayesopt_chain.diagnostics.heating` has the ``E`` for which the chain samples, with minibatches, the
covariance that it would sample with full gradients.
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
    """The part of a chain's noise that is left to the minibatches, as :func:`bayesopt_chain.diagnostics.heating` computed it.

    Attributes:
        directions: ``Q``, for each leaf of the parameters the rows ``[r, *leaf.shape]``.
        root: ``E^(1/2)``, float64 ``[r, r]``.
        missing: ``I - E^(1/2)`` ``[r, r]``, on the device of the directions, since a captured step cannot copy from the host.
        cooling: ``A``, float64 ``[r, r]``. It maps the draws of a chain whose noise is not reduced to draws of the covariance
            that the chain would sample with full gradients.
        scales: the root of the gain of each element, of the shape of each leaf.
        left: the relative error of the covariance with reduced noise, in the worst direction.
        overlap: the share of the minibatch noise at a second draw that lies in the span of ``Q``; ``None`` if it was not
            measured.
        excess: the relative error of the covariance without reduced noise, in the worst direction.
        order: the order of the batches, ``"fixed"``, ``"reshuffled"`` or ``"independent"``, for example.
        steps_per_epoch: the number of batches in an epoch.
        tolerance: the largest ``left`` that is accepted.
        links: the links of the chain for which the report was made.
        paths: the paths of the leaves at which the report was made, in their order.
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
        """A hash of 60 bits of directions, root, order and steps per epoch, by which a saved run recognises its report."""
        digest = hashlib.sha256(repr((self.order, self.steps_per_epoch, self.paths)).encode())
        for x in chain(self.directions, (self.root,)):
            digest.update(x.detach().double().cpu().numpy().tobytes())
        return int.from_bytes(digest.digest()[:8], "big") >> 4

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
        """Reduce one draw by the noise of the minibatches.

        Args:
            xi: one draw of the noise, of the shape of each leaf.

        Returns:
            ``xi - Q^T (I - E^(1/2)) Q xi``.
        """
        inside: Tensor = project(list(self.directions), list(xi))
        back = combine(inside @ self.missing.to(inside), list(self.directions))
        return [x - y for x, y in zip(xi, back)]

    def require_leaves(self, who: str, paths: Sequence[str], leaves: Sequence[tuple[Any, torch.dtype]]) -> None:
        """Refuse parameters of other names, shapes or dtypes than those at which the report was made.

        Args:
            who: the caller, for the message.
            paths: the paths of the leaves, in their order.
            leaves: the shape and the dtype of each leaf.

        Raises:
            ValueError: the parameters are others.
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
        """Correct the covariance of draws of a chain whose noise was not reduced, by ``A`` about their mean.

        Args:
            draws: a tree like the parameters, with ``n`` draws ``[n, *leaf.shape]`` in each leaf.

        Returns:
            The corrected draws, a tree of the same shapes.
        """
        leaves, structure = optree.tree_flatten(draws)
        centred = [x - x.mean(0) for x in leaves]
        inside: Tensor = project(list(self.directions), [x / s.to(x) for x, s in zip(centred, self.scales)])
        # Outside of the span nothing changes: the map is I + Q^T (A - I) Q.
        change = self.cooling - torch.eye(len(self.cooling), dtype=torch.float64, device=self.cooling.device)
        moved = combine(inside @ change.to(inside), list(self.directions))
        return structure.unflatten([x + s.to(x) * y.to(x) for x, s, y in zip(leaves, self.scales, moved)])

    def require_steady(self, who: str) -> None:
        """Refuse a report if the directions of the minibatch noise change between draws, or were measured at one draw only.

        Args:
            who: the caller, for the message.

        Raises:
            ValueError: less than 80 % of the noise at a second draw lies in the directions, or it was not measured.
        """
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
        """Refuse batches of another order or number per epoch than those of the report.

        Args:
            batches: the result of ``bc.epochs(...)`` or a ``DataLoader``. Other iterables are not checked, because they do not
                tell their order.

        Raises:
            ValueError: the order or the number of batches is another.
        """
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
        """Refuse another chain than that of the report.

        Args:
            links: the links of the chain.
            noise: the noise link, or an object with its attributes ``temperature``, ``order`` and ``noise``.
            who: the caller, for the message.

        Raises:
            ValueError: the chain is another, or it has a preconditioner that learns.
        """
        # Noise links are compared by some of their fields only, since the report was made for a chain without ``room_for``.
        mine, known = ([x for x in some if not isinstance(x.response, Noise)] for some in (links, self.links))
        known_noises = [x for x in self.links if isinstance(x.response, Noise)]
        if learns := [x for x in links if isinstance(x.response, Preconditioner) and x.response.learns]:
            raise ValueError(
                f"{who}: room_for: {learns[0].shown} learns its preconditioner, and how much room there is was "
                "measured at one; give the diagonal that it has learned as bc.scale_by_preconditioner(tree), and make a report "
                "for that chain"
            )
        words = ("temperature", "order", "noise")
        same = len(known_noises) == 1 and all(
            getattr(noise, word) == getattr(known_noises[0], word, None) for word in words
        )
        if mine != known or not same:
            raise ValueError(
                f"{who}: the report of room_for= was made for the chain "
                f"({', '.join(x.shown for x in self.links)}), and this one is ({', '.join(x.shown for x in links)}); learning "
                "rate, momentum, preconditioner, temperature and order must be the same: make another report"
            )


def of_loader(loader: Any) -> tuple[str, float] | None:
    """The order of a DataLoader's batches and their number in an epoch.

    Args:
        loader: any object.

    Returns:
        The order (``"fixed"``, ``"independent"`` or ``"reshuffled"``) and the number of batches; ``None`` if ``loader`` is not
        a ``DataLoader``, or has a sampler whose order is not known.

    Raises:
        ValueError: the last batch of an epoch is shorter than the others, so that its gradient has more noise.

    Example:
        >>> of_loader(DataLoader(list(range(6)), batch_size=2, shuffle=True))
        ('reshuffled', 3.0)
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
    """The names of the dtypes, each once, as text for a message."""
    return ", ".join(dict.fromkeys([str(x).removeprefix("torch.") for x in dtypes]))


def room_in(links: Sequence[Any]) -> Room | None:
    """The room of the first of these links that has one.

    Args:
        links: the links of a chain.

    Returns:
        The room, or ``None`` if no link leaves noise to the minibatches.
    """
    return next((room for link in links if (room := getattr(link, "room", None)) is not None), None)


def room_of(report: Any, who: str = "inject_langevin_noise") -> Room | None:
    """The room in a report.

    Args:
        report: a report of :func:`bayesopt_chain.diagnostics.heating`, or ``None``.
        who: the caller, for the message.

    Returns:
        The room, or ``None`` without a report.

    Raises:
        TypeError: ``report`` is not such a report.
        ValueError: the report has no room, the directions of the minibatch noise change between draws, or the variance would
            still be wrong by more than the tolerance.
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
