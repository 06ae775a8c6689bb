"""What may stand in front of a link that uses more of the loss than its gradient (its value, its Hessian, or its scale), and
whether it may act on some of the parameters only."""

from __future__ import annotations

from bayesopt_chain.core.link import Link, LinkContext
from bayesopt_chain.links.gaussian_prior import Prior
from bayesopt_chain.matching.response import Decay, Linear, Noise, Nonlinear

PRIORS, CLIPPING, GAINS = "priors", "clipping", "gains"


def require_in_front(context: LinkContext, who: str, allowed: tuple[str, ...], why: str) -> None:
    """Refuse links in front of this one that would change what it samples.

    Args:
        context: of the link's ``init``.
        who: the link's name, for the message.
        allowed: kinds of links that do no harm; what hands the gradient on as it came is always among them.
        why: what the others would do, and what to write instead.

    Raises:
        ValueError: naming the link.
    """
    for link in context.scope.before:
        if (kind := _kind(link)) is not None and kind not in allowed:
            raise ValueError(f"{who}: {link.shown} stands in front of it, and {why}")


def require_all_parameters(link: Link, who: str, why: str) -> None:
    """Refuse a mask or a group around a link that couples all parameters by more than their gradients.

    Args:
        link: the link.
        who: its name, for the message.
        why: what would be wrong.

    Raises:
        ValueError: the link is masked.
    """
    if link.masks:
        raise ValueError(
            f"{who}: a mask or a group leaves parameters out, and {why}; leave parameters that are to stay as they are out of "
            "params"
        )


def _kind(link: Link) -> str | None:
    """What a link does to the gradient, or ``None`` for nothing."""
    response = link.response
    if isinstance(link, Prior) or isinstance(response, Decay):
        return PRIORS
    if isinstance(response, Nonlinear):
        return CLIPPING
    return None if isinstance(response, Noise) or response == Linear() else GAINS
