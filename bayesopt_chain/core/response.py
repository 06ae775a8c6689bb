r"""What a link does to the gradients that pass through it, in the few words the noise needs to know.

A link's response decides where noise may go and how strong it must be (see :mod:`bayesopt_chain.core.law`).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Adaptive", "Decay", "Elementwise", "Linear", "Noise", "Nonlinear", "Rate", "Refused"]


@dataclass(frozen=True)
class Linear:
    """A time-invariant filter ``b(1/z) / a(1/z)`` of the gradients, the same for every element; lowest power first."""

    b: tuple[float, ...] = (1.0,)
    a: tuple[float, ...] = (1.0,)


@dataclass(frozen=True)
class Rate:
    """A scalar gain that may change at every step: the rule's ``rate(state)`` gives its magnitude for each leaf."""

    sign: int = 1


@dataclass(frozen=True)
class Elementwise:
    """A frozen positive gain for each element: the rule's ``preconditioner(state)`` gives it for each leaf."""


@dataclass(frozen=True)
class Adaptive:
    """A positive gain for each element that saw this step's gradient, followed by the filter ``b / a``.

    The rule takes ``noise`` (unit preconditioner) through its context and applies ``P^(-1/2)`` itself, so that the
    noise never reaches the statistics that make ``P``.
    """

    b: tuple[float, ...] = (1.0,)
    a: tuple[float, ...] = (1.0,)


@dataclass(frozen=True)
class Decay:
    """``u + weight_decay * theta``."""

    weight_decay: float


@dataclass(frozen=True)
class Nonlinear:
    """Any function of this step's gradient without memory (clipping): noise goes after it."""


@dataclass(frozen=True)
class Noise:
    """The link that injects the noise."""


@dataclass(frozen=True)
class Refused:
    """No noise is right in a chain with this link, for the reason given."""

    reason: str


Response = Linear | Rate | Elementwise | Adaptive | Decay | Nonlinear | Noise | Refused
