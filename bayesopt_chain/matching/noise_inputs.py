r"""Where the noise goes in a chain, and what it is matched to.

For each leaf the links that act on it are split into what comes before the linear part and the linear part itself. Noise enters

* inside the last preconditioner that learns (what it learns from must not see the noise), or behind the last non-linear link;
* before the first link with memory, so that a learning rate in front of momentum scales the gradient, not the noise;
* where there is neither, where it was written.

By linearity any such place is as good as the head of the linear part. Write ``F = G f`` with ``G`` the gains that change
with time and ``f`` the constant filter, and let ``P`` be the product of the preconditioners, ``P_b`` of those before the place
where the noise enters and ``P_a`` of those behind it. Noise of spectrum ``Psi P^-1`` at the head is the same as noise of
spectrum ``G_b^2 P_b / P_a`` times ``Psi`` at that place. Weight decay behind a memory adds a spectrum of its own, which is
shaped by the preconditioners in front of that decay only: it is a second noise input, drawn independently.

Matched noise of heavy-ball momentum, ``e_t = c (xi_t + xi_{t-1})``, needs no memory of its own: half of it may wait in the
velocity. With ``q_t = v_t + (c / mu) b xi_t`` in the place of ``v_t = mu v_{t-1} + b (g_t + e_t)``, ``b = 1 - dampening``,

    v_t = mu q_{t-1} + b (g_t + c xi_t),    theta <- theta - lr v_t,    q_t = v_t + d c xi_t,    d = b / mu:

white noise of level ``c``, of which the velocity keeps the part ``d`` for the next step (``deferred_gain``). ``mu q`` is the
Ornstein-Uhlenbeck velocity of BAOAB. With little momentum ``d`` is large, and the velocity would be mostly noise or overflow:
below ``LEAST_MOMENTUM`` the noise remembers its last draw in a buffer of its own instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite, sqrt
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

LEAST_MOMENTUM = 1 / 16  # below it the velocity keeps no noise for the next step
Responses = Mapping[int, Any]  # by the number of the link


class Neighbour(Protocol):
    """What the matching asks of a link: its response, and what can be done with its memory."""

    traits: ClassVar[Any]  # what is known of its memory: ``core.link.Traits``, which this room does not import

    @property
    def response(self) -> Response | None: ...
    @property
    def shown(self) -> str: ...


class TransferFunction(NamedTuple):
    """The linear part of a chain as one response ``b / a`` of descent, and what else counts for the noise."""

    b: law.Poly
    a: law.Poly
    head: float  # the constant gain in front of the place where the noise enters
    preconditioners: tuple[int, ...]
    rates: tuple[int, ...]
    decays: Sequence[tuple[int, law.Poly]]  # those behind memory: the link, and ``N`` of ``w / H = N / b``
    pole_link: int | None  # the link with the only pole

    def __str__(self) -> str:
        return f"F = {_format(self.b)}" + (f" / {_format(self.a)}" if len(self.a) > 1 else "")


class NoiseInput(NamedTuple):
    """One independent noise of the leaves on which the same links act."""

    transfer: TransferFunction  # what it is matched to
    entry_link: int  # the link before which (a preconditioner that learns: inside which) it enters
    leaves: tuple[int, ...]
    process: Process  # at the temperature, where nothing changes with time
    changes: bool
    # (preconditioner, power): P^(1/2) if it stands before the place where the noise enters, P^(-1/2) behind it
    powers: tuple[tuple[int, float], ...]
    rates: tuple[tuple[int, ...], tuple[int, ...]]  # the changing gains before it, and behind it
    deferred_gain: float  # what the velocity holds back of this noise for the next step


def match(links: Sequence[Neighbour], where: Sequence[tuple[int, ...]]) -> dict[int, list[NoiseInput]]:
    """The noise inputs of every noise link; ``where`` are the leaves that each link acts on.

    Raises:
        ValueError: no noise makes this chain sample; the message says why and what would.
    """
    groups: dict[tuple[int, ...], list[int]] = {}  # leaves by the links that act on them
    for j in sorted({j for w in where for j in w}):
        groups.setdefault(tuple([i for i, w in enumerate(where) if j in w]), []).append(j)
    out = {i: list[NoiseInput]() for i, x in enumerate(links) if isinstance(x.response, Noise)}
    for acting, leaves in groups.items():
        n, found = match_group(links, acting, tuple(leaves), where)
        if n is not None:
            out[n].extend(found)
    return out


def match_group(
    links: Sequence[Neighbour], acting: Sequence[int], leaves: tuple[int, ...], where: Sequence[tuple[int, ...]]
) -> tuple[int | None, list[NoiseInput]]:
    """The noise link of the leaves on which the links numbered ``acting`` act, and its noise inputs there.

    Raises:
        ValueError: no noise makes this chain sample; the message says why and what would.
    """
    r: dict[int, Any] = {i: links[i].response for i in acting}
    if own := _of(r, SelfContainedSampler):
        _check_own_noise(links, r, own)
    if not (noises := _of(r, Noise)):
        return None, []
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
            "bc.chain; inside torchopt.chain give it lr= (and momentum=) and write it before the momentum"
        )
    memory = [i for i in _of(r, Linear) if any((*r[i].a[1:], *r[i].b[1:]))]
    at = _entrance(links, r, written, memory)
    transfer = _transfer_function(links, r, at)
    if transfer is None:
        return written, []
    changes = bool(transfer.rates) or noise.temperature is None
    rescales = memory == [transfer.pole_link] and links[memory[0]].traits.rescales
    parts = _processes(transfer, noise, changes, rescales)
    _check_mixing(links, transfer, r, changes, [i for i in acting if where[i] != leaves])
    carrier = r[at] if transfer.pole_link == at and links[at].traits.carries and len(parts) == 1 else None
    noise_inputs = list[NoiseInput]()
    for met, process in parts:
        deferred_gain = 0.0
        if carrier and len(carrier.b) == 1 and isinstance(process, Filtered) and process.d == (1.0,):
            mu, c = -carrier.a[1], process.c
            if mu >= LEAST_MOMENTUM and len(c) == 2 and c[0] == c[1]:  # the mean of two draws
                deferred_gain, process = carrier.b[0] / mu, Filtered(c[:1])
        powers = *((m, 0.5) for m in transfer.preconditioners if m < at), *((m, -0.5) for m in met if m >= at)
        rates = tuple([i for i in transfer.rates if i < at]), tuple([i for i in transfer.rates if i >= at])
        noise_inputs.append(NoiseInput(transfer, at, leaves, process, changes, powers, rates, deferred_gain))
    return written, noise_inputs


def _check_mixing(
    links: Sequence[Neighbour], transfer: TransferFunction, r: Responses, changes: bool, masked: Sequence[int]
) -> None:
    """What mixes its leaves must act on all leaves of the noise input, and a memory that is to be rescaled must be known."""
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
    """Refuse what stands beside a link with noise of its own. In front of it only what belongs to the loss is right (non-linear
    links and weight decay), behind it nothing."""
    if len(own) > 1:
        raise ValueError(f"chain: two samplers act on one leaf ({_names(links, own)}); keep one of them")
    place, beside = list(r).index(own[0]), r[own[0]]
    for n, (i, x) in enumerate(r.items()):
        if place - beside.before <= n <= place + beside.behind or x == Linear():
            continue
        _require_known(links[i], x)
        who = f"chain: {links[own[0]].shown} brings noise of its own, matched to nothing else"
        if isinstance(x, Noise):
            raise ValueError(f"{who}; leave inject_langevin_noise out of this chain")
        if n > place or not isinstance(x, (Nonlinear, Decay)):
            raise ValueError(
                f"{who}: {links[i].shown} {'behind' if n > place else 'before'} it would change what it samples. Only clipping "
                f"and weight decay may stand before it, and nothing behind; {beside.hint}"
            )


def _require_known(link: Neighbour, response: Any) -> None:
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
    """The link before which the noise enters: the preconditioner that learns (inside it), else the first link with memory, else
    the noise link itself."""
    learning = [i for i in _of(r, Preconditioner) if r[i].learns]
    curved = [i for i, x in r.items() if isinstance(x, Nonlinear) or i in learning]
    if not curved:
        return memory[0] if memory else written
    last = curved[-1]
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
    """The product of all responses; ``None`` if it is zero, so that nothing moves."""
    b, a, head, sign = (1.0,), (1.0,), 1.0, 1
    preconditioners, rates, poles = _of(r, Preconditioner), _of(r, Rate), [i for i in _of(r, Linear) if any(r[i].a[1:])]
    decays: list[tuple[int, law.Poly]] = []
    for i, x in r.items():
        if isinstance(x, Linear):
            b, a = law.multiply(b, x.b), law.multiply(a, x.a)
            decays = [(j, law.multiply(n, x.b)) for j, n in decays]
            head *= abs(x.b[0] / x.a[0]) if i < at else 1.0
        elif isinstance(x, Rate):
            sign *= x.sign
        elif isinstance(x, Decay) and x.weight_decay and (len(a) > 1 or len(b) > 1):  # else it is a part of the loss
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


def _processes(
    transfer: TransferFunction, noise: Noise, changes: bool, rescales: bool
) -> list[tuple[tuple[int, ...], Process]]:
    """The independent noises, each with the preconditioners whose product divides its spectrum."""
    b, a = transfer.b, transfer.a
    heat = 1.0 if changes or noise.temperature is None else sqrt(noise.temperature)

    def filtered(r: law.Poly, rescales: bool = False) -> Filtered:
        c, d = law.noise_filter(r, b, noise.order)
        return Filtered(tuple([heat * (transfer.head * v) for v in c]), d, rescales)

    rest: dict[tuple[int, ...], law.Poly] = {}  # what decays behind memory add, by the preconditioners met before them
    for i, numerator in transfer.decays:
        met = tuple([m for m in transfer.preconditioners if m < i])
        rest[met] = law.add(rest.get(met, ()), law.decay_spectrum(b, numerator))
    main = law.spectrum(b, a)
    process: Process | None = Scheduled.of(b, a, transfer.head, noise.order) if changes else None
    try:
        if process is None:
            if transfer.rates and (rest or not rescales):
                raise law.NoMatchedNoise(
                    f"{transfer} is neither SGD, momentum nor Nesterov, and only those have a rule for a changing learning "
                    "rate; use a constant lr, or bc.with_response(link, response, rescale=) for a link of your own"
                )
            process = filtered(law.add(main, rest.pop(transfer.preconditioners, ())), bool(transfer.rates))
        elif len(main) == len(rest.get(transfer.preconditioners, ())) == 1:
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
    """What ``repr`` says of noise link ``i`` beside those ``acting`` on its leaves: where it acts, what it is matched to."""
    try:
        _, noise_inputs = match_group(links, acting, (0,), [(0,)] * len(links))
    except ValueError as err:
        return f"unmatched: {str(err).removeprefix('chain: ')}"
    if not noise_inputs:
        return "F = 0, so that nothing moves"
    at, transfer = noise_inputs[0].entry_link, noise_inputs[0].transfer
    inside = isinstance(x := links[at].response, Preconditioner) and x.learns
    where = "here" if at == i else f"{'inside' if inside else 'before'} {links[at].shown.split('(')[0]}"
    return f"acts {where}, matched to {transfer}{' x lr(t)' if transfer.rates else ''}"


def _of(r: Responses, kind: type) -> list[int]:
    return [i for i, x in r.items() if isinstance(x, kind)]


def _names(links: Sequence[Neighbour], numbers: Sequence[int]) -> str:
    return ", ".join(links[i].shown for i in numbers)


def _format(p: Sequence[float]) -> str:
    terms = [f"{v:.6g}" + "/z" * (k > 0) + f"^{k}" * (k > 1) for k, v in enumerate(p) if v or not k]
    text = " + ".join(terms).replace("+ -", "- ")
    return f"({text})" if len(terms) > 1 else text
