r"""What a link does to the gradients that pass through it, in the words that matched noise needs.

The responses of all links decide where in a chain the noise enters (:mod:`bayesopt_chain.matching.noise_inputs`) and how strong
it must be (:mod:`bayesopt_chain.matching.law`). Filters are written in the delay ``1/z`` by one step, lowest power first:
``Linear(b, a)`` is ``a[0] u_t + a[1] u_(t-1) + ... = b[0] g_t + b[1] g_(t-1) + ...`` for gradients ``g`` and outputs ``u``.

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
    """A constant filter ``b(1/z) / a(1/z)`` of the gradients, the same for every element.

    Attributes:
        b: the coefficients of the numerator, lowest power of ``1/z`` first.
        a: the coefficients of the denominator, lowest power of ``1/z`` first; ``a[0]`` is not 0.
    """

    b: tuple[float, ...] = (1.0,)
    a: tuple[float, ...] = (1.0,)


@dataclass(frozen=True)
class Preconditioner(Linear):
    """A positive definite gain ``P``, followed by the filter ``b / a``.

    Attributes:
        b, a: the filter, as in :class:`Linear`.
        learns: whether ``P`` is estimated from the gradients. Then the noise enters inside the link, after the estimate is
            updated, so that ``P`` does not depend on the noise.
        diagonal: whether every element has a gain of its own. A ``P`` that mixes elements or leaves does not commute with other
            preconditioners, so that a chain may have no second one.
    """

    learns: bool = False
    diagonal: bool = True


@dataclass(frozen=True)
class Rate:
    """A scalar gain that may change at every step.

    Attributes:
        sign: the sign of the gain, 1 or -1. Its magnitude at a step is what the link's method ``rate`` returns.
    """

    sign: int = 1


@dataclass(frozen=True)
class Decay:
    """Weight decay: ``weight_decay * theta`` is added to what comes in, with the parameters ``theta``.

    Attributes:
        weight_decay: the factor. In front of every link with memory it is the precision of a Gaussian prior, in units of the
            loss.
    """

    weight_decay: float


@dataclass(frozen=True)
class Nonlinear:
    """Any function of the present gradient alone, such as clipping. The noise enters behind it."""


@dataclass(frozen=True)
class Noise:
    """The noise itself, which is matched to the other links.

    Attributes:
        order: 2 for matched noise, 1 for white noise.
        temperature: the temperature in units of the loss if it is a constant, ``None`` if it may change.
    """

    order: int = 2
    temperature: float | None = None


@dataclass(frozen=True)
class SelfContainedSampler:
    """A link that brings noise of its own, which is right beside certain links only.

    Attributes:
        before: how many links directly in front of it belong to the same sampler.
        behind: how many links directly behind it belong to the same sampler.
        hint: what to do instead; it is appended to the refusal of any other chain.
    """

    before: int = 0
    behind: int = 0
    hint: str = "use its own arguments, or bc.sghmc, whose noise is matched to its neighbours"


@dataclass(frozen=True)
class Refused:
    """A link beside which no noise is right.

    Attributes:
        reason: why, in words that can follow a colon in the refusal.
    """

    reason: str


Response = Linear | Rate | Decay | Nonlinear | Noise | SelfContainedSampler | Refused
