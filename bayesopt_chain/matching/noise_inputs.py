r"""Where in a chain the noise enters, and to which response it is matched.

Leaves on which the same links act are treated together. For them the noise enters

* inside the preconditioner that learns, or else directly behind the last non-linear link: what a link learns from and what a
  non-linear link distorts must not contain noise;
* before the first link with memory behind that place, so that a learning rate in front of the momentum scales the gradient and
  not the noise;
* at the place where ``inject_langevin_noise`` stands in the chain, if there is neither.

By linearity, noise at the head (the input) of the linear part can be replaced by noise at any later place. Write ``F = G f``,
where ``G`` is the product of the gains that change with time and ``f`` a constant filter. Let ``P_b`` be the product of the
preconditioners before the place of entry, ``P_a`` that of the preconditioners behind it, ``P = P_b P_a``, and ``G_b`` the
product of the changing gains before it. Noise of the spectrum ``Psi P^-1`` at the head (``Psi`` as in
:mod:`bayesopt_chain.matching.law`) has the same effect as noise of the spectrum ``G_b^2 Psi P_b / P_a`` at the place of entry.
A weight decay behind a link with memory adds a spectrum of its own, to which only the preconditioners in front of that decay
apply. It becomes a second noise input, whose draws are independent.

Matched noise of heavy-ball momentum, ``e_t = c (xi_t + xi_{t-1})``, needs no tensor for the last draw, because the velocity
can keep it. Let ``v_t = mu v_{t-1} + b (g_t + e_t)`` with ``b = 1 - dampening``. In terms of ``q_t = v_t + (c / mu) b xi_t``
this is

    v_t = mu q_{t-1} + b (g_t + c xi_t),    theta <- theta - lr v_t,    q_t = v_t + d c xi_t,    d = b / mu.

The noise that enters is then white with the factor ``c``, and after the step the velocity receives ``d`` times that noise for
the next step; ``d`` is called ``deferred_gain``. ``mu q`` is the velocity of BAOAB after its Ornstein-Uhlenbeck step
(Leimkuhler and Matthews 2013). With little momentum ``d`` is large, so that the velocity would be mostly noise or overflow.
Below ``LEAST_MOMENTUM`` the noise therefore remembers its last draw in a tensor of its own.

Under a schedule (:func:`bayesopt_chain.matching.law.scheduled_noise`) the noise is ``a_t w_t + k_t b_t w_{t-1}``, and the
velocity is multiplied by ``k_t mu``: the factor ``k_t`` is the same, and ``b_t = s a_{t-1}`` with the share
``s = alpha_{t-1}^2 / (alpha_{t-1}^2 + c_{t-1})``, which the last step knew. So the velocity keeps ``d s`` times the noise of a
step, and no draw is remembered here either. With a changing rate in front of the noise, how much of the last draw enters
depends on the next rate, and the draw is remembered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import isfinite, prod, sqrt
from typing import Any, ClassVar, NamedTuple, Protocol

from bayesopt_chain.matching import law
from bayesopt_chain.matching.filters import Filtered, Process, Scheduled
from bayesopt_chain.matching.response import (
    Decay,
    Linear,
    Noise,
    Nonlinear,
    Preconditioner,
    Rate,
    Refused,
    Response,
    SelfContainedSampler,
)

LEAST_MOMENTUM = 1 / 16  # below this momentum the velocity keeps no noise for the next step
Responses = Mapping[int, Any]  # the response of each link, by the number of the link in the chain


class Neighbour(Protocol):
    """What the matching needs to know of a link.

    Attributes:
        traits: the link's ``core.link.Traits``, which this room does not import. Used here: ``carries``, ``velocity`` and
            ``all_leaves``.
    """

    traits: ClassVar[Any]

    @property
    def response(self) -> Response | None:
        """What the link does to the gradient; ``None`` if the link does not declare it."""

    @property
    def shown(self) -> str:
        """The link in error messages."""
        ...


class TransferFunction(NamedTuple):
    """The linear part of a chain as one transfer function ``b / a``, with the links that shape its noise.

    Attributes:
        b, a: the coefficients of numerator and denominator, lowest power of ``1/z`` first; the sign is that of a descent.
        head: the constant gain in front of the place where the noise enters.
        preconditioners: the numbers of the preconditioners.
        rates: the numbers of the links whose gain changes with time.
        decays: for each weight decay behind a link with memory, the number of the link and the numerator ``N`` of
            ``w / H = N / b``.
        pole_link: the number of the link with a pole; ``None`` if there is no such link or more than one.
    """

    b: law.Poly
    a: law.Poly
    head: float
    preconditioners: tuple[int, ...]
    rates: tuple[int, ...]
    decays: Sequence[tuple[int, law.Poly]]
    pole_link: int | None

    def __str__(self) -> str:
        return f"F = {_format(self.b)}" + (f" / {_format(self.a)}" if len(self.a) > 1 else "")


class NoiseInput(NamedTuple):
    """One independent noise of leaves on which the same links act.

    Attributes:
        transfer: the transfer function to which the noise is matched.
        entry_link: the number of the link before which the noise enters, or inside which if it is a preconditioner that learns.
        leaves: the numbers of the leaves.
        process: how draws become this noise: at the constant temperature of the chain, or at the temperature 1 where
            ``changes``.
        changes: whether a learning rate or the temperature may change with time.
        powers: ``(number, power)`` of each preconditioner by which the noise is shaped. The noise is multiplied by ``P^(1/2)``
            if ``P`` stands before the place where the noise enters, and by ``P^(-1/2)`` if it stands behind.
        rates: the numbers of the links whose gain changes with time, those before the noise and those behind it.
        deferred_gain: the part of this step's noise that the velocity keeps for the next step, under a schedule times the
            ``share`` of that step (:class:`bayesopt_chain.matching.filters.Weights`); 0 where it keeps none.
    """

    transfer: TransferFunction
    entry_link: int
    leaves: tuple[int, ...]
    process: Process
    changes: bool
    powers: tuple[tuple[int, float], ...]
    rates: tuple[tuple[int, ...], tuple[int, ...]]
    deferred_gain: float


def match(
    links: Sequence[Neighbour], where: Sequence[tuple[int, ...]], all_leaves: Iterable[int]
) -> dict[int, list[NoiseInput]]:
    """Find the noise inputs of a chain.

    Args:
        links: the links, in the order of the chain.
        where: for each link, the numbers of the leaves on which it acts.
        all_leaves: the numbers of all leaves, those on which no link acts among them.

    Returns:
        The noise inputs of each noise link, by the number of the link.

    Raises:
        ValueError: no noise makes this chain sample; the message says why and what to do instead.

    Example:
        >>> import bayesopt_chain as bc
        >>> tx = bc.chain(bc.add_momentum(0.9), bc.inject_langevin_noise(0.5), bc.scale_by_neg_lr(0.1))
        >>> (noise_input,) = match(tx.links, [(0,), (0,), (0,)], [0])[1]
        >>> noise_input.entry_link, str(noise_input.transfer)  # it enters before the momentum
        (0, 'F = 0.1 / (1 - 0.9/z)')
    """
    # The leaves on which the same links act, by the numbers of these links.
    groups: dict[tuple[int, ...], list[int]] = {}
    for j in all_leaves:
        groups.setdefault(tuple([i for i, w in enumerate(where) if j in w]), []).append(j)
    out = {i: list[NoiseInput]() for i, x in enumerate(links) if isinstance(x.response, Noise)}
    for acting, leaves in groups.items():
        for n, found in match_group(links, acting, tuple(leaves), where).items():
            out[n].extend(found)
    return out


def match_group(
    links: Sequence[Neighbour], acting: Sequence[int], leaves: tuple[int, ...], where: Sequence[tuple[int, ...]]
) -> dict[int, list[NoiseInput]]:
    """Find the noise inputs of leaves on which the same links act.

    Args:
        links: the links, in the order of the chain.
        acting: the numbers of the links that act on these leaves, in the order of the chain.
        leaves: the numbers of the leaves.
        where: for each link, the numbers of all leaves on which it acts.

    Returns:
        The noise inputs of the noise link for these leaves, by its number; empty without one.

    Raises:
        ValueError: no noise makes this chain sample; the message says why and what to do instead.
    """
    r: dict[int, Any] = {i: links[i].response for i in acting}
    if own := _of(r, SelfContainedSampler):
        _check_own_noise(links, r, own)
    if not (noises := _of(r, Noise)):
        if not own and any([isinstance(x.response, (Noise, SelfContainedSampler)) for x in links]) and _climbs(r):
            raise ValueError(
                f"chain: {len(leaves)} leaves that it does not sample would climb the loss, since bc.masked hands on the "
                "gradients of what it leaves out as they are. Leave these parameters out of params, or freeze them: "
                'bc.partition({"sampled": tx, "frozen": bc.sgd(0.0)}, labels)'
            )
        return {}
    if len(noises) > 1:
        raise ValueError(
            f"chain: {len(noises)} noise links act on one leaf ({_names(links, noises)}); keep one of them"
        )
    written = noises[0]
    noise: Noise = r.pop(written)
    for i, x in r.items():
        _require_known(links[i], x)
    if not r:
        raise ValueError(
            "inject_langevin_noise: no other link is in sight, so there is nothing to match the noise to. Compose with "
            "bc.chain; inside torchopt.chain give it lr= and momentum= and write it before the momentum"
        )
    memory = [i for i in _of(r, Linear) if any((*r[i].a[1:], *r[i].b[1:]))]
    at = _entrance(links, r, written, memory)
    transfer = _transfer_function(links, r, at)
    if transfer is None:
        return {written: []}
    changes = bool(transfer.rates) or noise.temperature is None
    parts = _processes(transfer, noise, changes)
    _check_mixing(links, transfer, r, changes, [i for i in acting if where[i] != leaves])
    carrier = r[at] if transfer.pole_link == at and links[at].traits.carries and len(parts) == 1 else None
    noise_inputs = list[NoiseInput]()
    for met, process in parts:
        deferred_gain = 0.0
        rates = tuple([i for i in transfer.rates if i < at]), tuple([i for i in transfer.rates if i >= at])
        keeps = carrier and len(carrier.b) == 1 and -carrier.a[1] >= LEAST_MOMENTUM and not rates[0]
        if carrier and keeps and (deferring := process.deferring()):
            deferred_gain, process = carrier.b[0] / -carrier.a[1], deferring
        powers = *((m, 0.5) for m in transfer.preconditioners if m < at), *((m, -0.5) for m in met if m >= at)
        noise_inputs.append(NoiseInput(transfer, at, leaves, process, changes, powers, rates, deferred_gain))
    return {written: noise_inputs}


def _climbs(r: Responses) -> bool:
    """Whether updates go up the loss: no link with noise of its own, or unknown, and the product of the gains is positive."""
    gains = (sum(x.b) if isinstance(x, Linear) else getattr(x, "sign", 1) for x in r.values())
    return (
        all([isinstance(x, (Linear, Rate, Decay, Nonlinear, Preconditioner)) for x in r.values()]) and prod(gains) > 0
    )


def _check_mixing(
    links: Sequence[Neighbour], transfer: TransferFunction, r: Responses, changes: bool, masked: Sequence[int]
) -> None:
    """Refuse a chain that mixes leaves with different noise, or whose memory would have to be rescaled and cannot be.

    Args:
        links: the links, in the order of the chain.
        transfer: the transfer function to which the noise is matched.
        r: the responses of the links that act on these leaves.
        changes: whether a learning rate or the temperature may change with time.
        masked: the numbers of the links that act on other leaves, too.

    Raises:
        ValueError: it is such a chain.
    """
    mixing = [m for m in transfer.preconditioners if not r[m].diagonal]
    if changes and (pole_link := transfer.pole_link) is not None:
        if not (links[pole_link].traits.velocity or links[pole_link].traits.all_leaves):
            raise ValueError(
                f"chain: a changing learning rate or temperature has to rescale what {links[pole_link].shown} remembers, and "
                "it does not say which of its state that is; use constants, or bc.add_momentum"
            )
        mixing += [pole_link] if links[pole_link].traits.all_leaves else []
    if mixing and mixing[0] in masked:
        raise ValueError(f"chain: {links[mixing[0]].shown} mixes its leaves, so the same links must act on all of them")


def _check_own_noise(links: Sequence[Neighbour], r: Responses, own: Sequence[int]) -> None:
    """Refuse links that would change what a link with noise of its own samples.

    Non-linear links and weight decay in front of it are allowed, because they only change the loss. Links that do nothing and
    the links that its response counts as its own are allowed, too.

    Args:
        links: the links, in the order of the chain.
        r: the responses of the links that act on the same leaves.
        own: the numbers of those links that bring noise of their own.

    Raises:
        ValueError: another link stands beside it, or there are two such links.
    """
    if len(own) > 1:
        raise ValueError(f"chain: two samplers act on one leaf ({_names(links, own)}); keep one of them")
    place, beside = list(r).index(own[0]), r[own[0]]
    for n, (i, x) in enumerate(r.items()):
        if place - beside.before <= n <= place + beside.behind or x == Linear():
            continue
        _require_known(links[i], x)
        who = f"chain: {links[own[0]].shown} brings noise of its own, matched to nothing else"
        if n > place or not isinstance(x, (Nonlinear, Decay)):
            raise ValueError(
                f"{who}: {links[i].shown} {'behind' if n > place else 'before'} it would change what it samples. Only clipping "
                f"and weight decay may stand before it, and nothing behind; {beside.hint}"
            )


def _require_known(link: Neighbour, response: Any) -> None:
    """Refuse a response that is not declared, or to which no noise can be matched whatever the other links do."""
    match response:
        case None:
            why = (
                f"nobody declared what {link.shown} does to the gradient, so no noise can be matched to it. "
                "Declare it: bc.with_response(link, bc.response.Linear(b, a)) for a linear filter b(1/z)/a(1/z), "
                "bc.response.Nonlinear() for a memoryless function of the gradient; or set temperature=0"
            )
        case Refused(reason):
            why = f"temperature > 0 is refused with {link.shown}: {reason}"
        case Linear(_, a) if not law.is_stable(a):
            why = f"{link.shown} has the unstable response 1 / {a}: momentum must lie in [0, 1)"
        case Decay(weight_decay) if not isfinite(weight_decay):
            why = f"{link.shown} has a weight decay that is not finite"
        case _:
            return
    raise ValueError(f"chain: {why}")


def _entrance(links: Sequence[Neighbour], r: Responses, written: int, memory: Sequence[int]) -> int:
    """Find the link before which the noise enters.

    Args:
        links: the links, in the order of the chain.
        r: the responses of the links that act on the same leaves, without that of the noise.
        written: the number of the noise link.
        memory: the numbers of the linear links with memory.

    Returns:
        The number of the preconditioner that learns, inside which the noise then enters; without one that of the first link
        with memory; without memory that of the noise link.

    Raises:
        ValueError: a non-linear link or a preconditioner that learns stands where it would distort the noise.
    """
    learning = [i for i in _of(r, Preconditioner) if r[i].learns]
    curved = [i for i, x in r.items() if isinstance(x, Nonlinear) or i in learning]
    if not curved:
        return memory[0] if memory else written
    last = curved[-1]
    # The refusal shows an order that works: the non-linear links, those with memory, the noise, and then all others.
    order = [*curved, *(i for i in memory if i not in curved), written]
    order += [i for i in r if i not in order]
    works = "; this order works: " + ", ".join(links[i].shown.split("(")[0] for i in order)
    if learning and (len(learning) > 1 or last != learning[0]):
        raise ValueError(
            f"chain: noise has to enter the adaptive {links[learning[0]].shown} with its own preconditioner, which "
            f"{links[last].shown} behind it would distort; write the non-linear links first and keep one adaptive link"
        )
    if (early := min([*memory, written])) < last:
        raise ValueError(
            f"chain: {links[early].shown} stands before the non-linear {links[last].shown}, behind which noise enters{works}"
        )
    if learning and any(last < i < m for m in memory for i in _of(r, Rate)):
        raise ValueError(
            f"chain: write the changing learning rate behind the momentum that follows {links[last].shown}"
        )
    return learning[0] if learning else memory[0] if memory else written


def _transfer_function(links: Sequence[Neighbour], r: Responses, at: int) -> TransferFunction | None:
    """Multiply the responses of all links.

    Args:
        links: the links, in the order of the chain.
        r: the responses of the links that act on the same leaves, without that of the noise.
        at: the number of the link before which the noise enters.

    Returns:
        The transfer function, or ``None`` if the product is zero, so that the parameters never move.

    Raises:
        ValueError: the chain climbs the loss, a coefficient is not finite, or the order of the links admits no noise.
    """
    b, a, head, sign = (1.0,), (1.0,), 1.0, 1
    preconditioners, rates, poles = _of(r, Preconditioner), _of(r, Rate), [i for i in _of(r, Linear) if any(r[i].a[1:])]
    decays: list[tuple[int, law.Poly]] = []
    for i, x in r.items():
        if isinstance(x, Linear):
            b, a = law.multiply(b, x.b), law.multiply(a, x.a)
            # The denominator of w / H is to be the whole product of the b, of which the links behind the decay are a part.
            decays = [(j, law.multiply(n, x.b)) for j, n in decays]
            head *= abs(x.b[0] / x.a[0]) if i < at else 1.0
        elif isinstance(x, Rate):
            sign *= x.sign
        elif isinstance(x, Decay) and x.weight_decay and (len(a) > 1 or len(b) > 1):
            # A decay in front of every link with memory is a part of the gradient of the loss and needs no noise.
            decays.append((i, tuple([x.weight_decay * v for v in a])))
    if sum(b) == 0.0:
        return None
    if sum(b) * sign > 0:
        raise ValueError(
            "chain: its updates would climb the loss, so nothing can be sampled: the product of its gains is positive "
            "(gains that change with time are taken to be positive). End it with scale_by_neg_lr(lr)"
        )
    if not all(map(isfinite, (*b, *a))):
        raise ValueError(f"chain: the response F = {b} / {a} is not finite; check lr and momentum")
    if decays and rates and rates[0] < decays[-1][0]:
        raise ValueError(
            "chain: weight decay behind both momentum and a changing learning rate cannot be matched; write it first"
        )
    if dense := [i for i in preconditioners if not r[i].diagonal]:
        if len(preconditioners) > 1:
            raise ValueError(
                f"chain: two preconditioners ({_names(links, preconditioners)}), one of them not diagonal, need not commute; "
                "keep one"
            )
        if dense[0] >= at:
            raise ValueError(f"chain: write {links[dense[0]].shown} before the momentum and the noise")
    descent = [(i, tuple([-sign * v for v in n])) for i, n in decays]
    pole_link = poles[0] if len(poles) == 1 else None
    b = tuple([-sign * v for v in law.trim(b)])
    return TransferFunction(b, tuple(law.trim(a)), head, tuple(preconditioners), tuple(rates), descent, pole_link)


def _processes(transfer: TransferFunction, noise: Noise, changes: bool) -> list[tuple[tuple[int, ...], Process]]:
    """Find the independent noises of a transfer function.

    Args:
        transfer: the transfer function.
        noise: the order of the noise, and its temperature if that is constant.
        changes: whether a learning rate or the temperature may change with time.

    Returns:
        For each noise, the numbers of the preconditioners whose product divides its spectrum, and the process of its draws.

    Raises:
        ValueError: a spectrum would be negative, or the response has no rule for a changing learning rate.
    """
    b, a = transfer.b, transfer.a
    scale = 1.0 if changes or noise.temperature is None else sqrt(noise.temperature)

    def filtered(r: law.Poly) -> Filtered:
        c, d = law.noise_filter(r, b, noise.order)
        return Filtered(tuple([scale * (transfer.head * v) for v in c]), d)

    # What the weight decays behind memory add to the spectrum, by the preconditioners in front of the decay.
    rest: dict[tuple[int, ...], law.Poly] = {}
    for i, numerator in transfer.decays:
        met = tuple([m for m in transfer.preconditioners if m < i])
        rest[met] = law.add(rest.get(met, ()), law.decay_spectrum(b, numerator))
    main = law.spectrum(b, a)
    process: Process | None = Scheduled.of(b, a, transfer.head, noise.order) if changes else None
    try:
        if process is None:
            if transfer.rates:
                raise law.NoMatchedNoise(
                    f"{transfer} is neither SGD, momentum nor Nesterov, and only those have a rule for a changing learning "
                    "rate; use a constant lr"
                )
            process = filtered(law.add(main, rest.pop(transfer.preconditioners, ())))
        elif len(main) == len(rest.get(transfer.preconditioners, ())) == 1:
            # Both spectra are constants, so the rule for schedules takes the decay in; otherwise it has noise of its own.
            (extra,) = rest.pop(transfer.preconditioners)
            if not transfer.rates and main[0] + extra < 0.0:
                raise law.NoMatchedNoise("the noise spectrum would be negative at w = 0")
            process = replace(process, decay=(1.0 - process.branches[0][1]) * extra / main[0] / process.branches[0][0])
        return [(transfer.preconditioners, process), *((met, filtered(r)) for met, r in rest.items())]
    except law.NoMatchedNoise as err:
        hint = ""
        if len(a) == 3 and len(b) == 1 and (margin := sum(a) - 4 * a[2]) < 0:
            hint = (
                ". Two cascaded momenta admit no matched noise once 1 - mu1 - mu2 - 3 mu1 mu2 < 0 "
                f"(here {margin:.3g}); lower one of them"
            )
        raise ValueError(f"chain: no noise can be matched to {transfer}: {err}{hint}") from None


def note(links: Sequence[Neighbour], acting: Sequence[int], i: int) -> str:
    """Describe, for the ``repr`` of a chain, where a noise link acts and to what its noise is matched.

    Args:
        links: the links, in the order of the chain.
        acting: the numbers of the links that act on the same leaves as the noise link.
        i: the number of the noise link.

    Returns:
        The description, or the reason for which the chain is refused; nothing is raised.

    Example:
        >>> import bayesopt_chain as bc
        >>> note(bc.sgld(0.1, temperature=0.5).links, (0, 1), 0)
        'acts here, matched to F = 0.1'
    """
    try:
        noise_inputs = match_group(links, acting, (0,), [(0,)] * len(links))[i]
    except ValueError as err:
        return f"unmatched: {str(err).removeprefix('chain: ')}"
    if not noise_inputs:
        return "F = 0, so that nothing moves"
    at, transfer = noise_inputs[0].entry_link, noise_inputs[0].transfer
    inside = isinstance(x := links[at].response, Preconditioner) and x.learns
    where = "here" if at == i else f"{'inside' if inside else 'before'} {links[at].shown.split('(')[0]}"
    return f"acts {where}, matched to {transfer}{' x lr(t)' if transfer.rates else ''}"


def _of(r: Responses, kind: type) -> list[int]:
    """The numbers of the links with a response of this kind."""
    return [i for i, x in r.items() if isinstance(x, kind)]


def _names(links: Sequence[Neighbour], numbers: Sequence[int]) -> str:
    """The links with these numbers, as text for a message."""
    return ", ".join(links[i].shown for i in numbers)


def _format(p: Sequence[float]) -> str:
    """A polynomial in ``1/z`` as text, ``(1 - 0.9/z)``."""
    terms = [f"{v:.6g}" + "/z" * (k > 0) + f"^{k}" * (k > 1) for k, v in enumerate(p) if v or not k]
    text = " + ".join(terms).replace("+ -", "- ")
    return f"({text})" if len(terms) > 1 else text
