r"""What a link does to the gradients that pass through it, in the few words the noise needs to know.

A link's response decides where noise may go and how strong it must be (see :mod:`bayesopt_chain.matching.law`).

Example:
    >>> import bayesopt_chain as bc
    >>> bc.add_momentum(0.9).response, bc.scale_by_neg_lr(lambda count: 0.1).response
    (Linear(b=(1.0,), a=(1.0, -0.9)), Rate(sign=-1))
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Decay", "Linear", "Noise", "Nonlinear", "Preconditioner", "Rate", "Refused"]


@dataclass(frozen=True)
class Linear:
    """A time-invariant filter ``b(1/z) / a(1/z)`` of the gradients, the same for every element; lowest power first."""

    b: tuple[float, ...] = (1.0,)
    a: tuple[float, ...] = (1.0,)


@dataclass(frozen=True)
class Preconditioner(Linear):
    """A positive definite gain ``P``, followed by the filter ``b / a``.

    Where it ``learns`` from the gradient, noise enters inside it, behind what it learns from. One that is not
    ``diagonal`` couples leaves or elements; it composes with no other.
    """

    learns: bool = False
    diagonal: bool = True


@dataclass(frozen=True)
class Rate:
    """A scalar gain of this sign that may change at every step: the link's ``rate`` gives its magnitude."""

    sign: int = 1


@dataclass(frozen=True)
class Decay:
    """``u + weight_decay * theta``."""

    weight_decay: float


@dataclass(frozen=True)
class Nonlinear:
    """Any function of this step's gradient without memory (clipping): noise goes behind it."""


@dataclass(frozen=True)
class Noise:
    """The noise that is matched to the other links, of order 1 (white) or 2.

    ``temperature`` if it is a number, which never changes.
    """

    order: int = 2
    temperature: float | None = None


@dataclass(frozen=True)
class SelfContainedSampler:
    """A sampler in one link, or noise whose constants hold for the ``before`` and ``behind`` links next to it only."""

    before: int = 0
    behind: int = 0
    hint: str = "use its own arguments, or bc.sghmc, whose noise is matched to its neighbours"  # what to do instead


@dataclass(frozen=True)
class Refused:
    """No noise is right in a chain with this link, for the reason given."""

    reason: str


Response = Linear | Rate | Decay | Nonlinear | Noise | SelfContainedSampler | Refused
