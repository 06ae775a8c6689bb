r"""Where the noise goes in a chain, and what it is matched to.

For each leaf the links that act on it are split into what comes before the linear part and the linear part itself. Noise enters

* inside the last metric that learns (what it learns from must not see the noise), or behind the last non-linear link;
* before the first link with memory, so that a learning rate in front of momentum scales the gradient, not the noise;
* where there is neither, where it was written.

By linearity any such place is as good as the head of the linear part. With ``F = G f`` (``G`` the gains that change
with time, ``f`` the constant filter) and ``P`` the product of metrics, noise of spectrum ``Psi P^-1`` at the head becomes,
behind the gains ``G_b`` and metrics ``P_b`` met on the way, ``G_b^2 P_b / P_a`` times ``Psi``. Weight decay behind
memory adds a spectrum of its own, which only the metrics met before it colour: a second site.

Matched noise of heavy-ball momentum, ``e_t = c (xi_t + xi_{t-1})``, needs no memory of its own: half of it may wait in the
velocity. With ``q_t = v_t + (c / mu) b xi_t`` in the place of ``v_t = mu v_{t-1} + b (g_t + e_t)``, ``b = 1 - dampening``,

    v_t = mu q_{t-1} + b (g_t + c xi_t),    theta <- theta - lr v_t,    q_t = v_t + carried c xi_t,    carried = b / mu:

white noise of level ``c``, of which the velocity carries a part. ``mu q`` is the Ornstein-Uhlenbeck velocity of BAOAB.
With little momentum that part is many times the velocity and would overflow; there the noise remembers its draw itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any, NamedTuple

from bayesopt_chain.core import law
from bayesopt_chain.core.filters import Conditions, Filtered, Process, Rescaled, Scheduled
from bayesopt_chain.core.link import Link, show
from bayesopt_chain.core.response import Decay, Linear, Metric, Noise, Nonlinear, OwnNoise, Rate, Refused

LEAST_MOMENTUM = 1 / 16  # of less the velocity carries no noise
Responses = Mapping[int, Any]  # by the number of the link


class Whole(NamedTuple):
    """The linear part of a chain as one response ``b / a`` of descent, and what else counts for the noise."""

    b: law.Poly
    a: law.Poly
    head: float = 1.0  # the constant gain in front of the place where the noise enters
    metrics: tuple[int, ...] = ()
    rates: tuple[int, ...] = ()
    decays: Sequence[tuple[int, law.Poly]] = ()  # those behind memory: the link, and ``N`` of ``w / H = N / b``
    owner: int | None = None  # the link with the only pole

    def __str__(self) -> str:
        return f"F = {_format(self.b)}" + (f" / {_format(self.a)}" if len(self.a) > 1 else "")


class Site(NamedTuple):
    """One independent noise of the leaves on which the same links act."""

    whole: Whole  # what it is matched to
    enters: int  # the link before which (a learning metric: inside which) it enters
    leaves: tuple[int, ...]
    process: Process
    colours: tuple[tuple[int, float], ...]  # (metric, power): P^(1/2) if met before the noise enters, P^(-1/2) behind
    rates: tuple[tuple[int, ...], tuple[int, ...]]  # the changing gains before it, and behind it
    carried: float  # what the velocity holds back of this noise for the next step
    constants: list[float] | None  # its coefficients, if nothing changes with time


def match(
    links: Sequence[Link], acting: Sequence[int], leaves: tuple[int, ...], where: Sequence[tuple[int, ...]]
) -> tuple[int | None, list[Site]]:
    """The noise link of the leaves on which the links numbered ``acting`` act, and its sites.

    ``where`` are the leaves that each link acts on.

    Raises:
        ValueError: no noise makes this chain sample; the message says why and what would.
    """
    r: dict[int, Any] = {i: links[i].response for i in acting}
    if own := _of(r, OwnNoise):
        _check_own_noise(links, r, own)
    if len(noises := _of(r, Noise)) > 1:
        raise ValueError(
            f"chain: {len(noises)} noise links act on one leaf ({_names(links, noises)}); keep one of them"
        )
    if not noises:
        return None, []
    at = written = noises[0]
    noise: Noise = r.pop(written)
    rescales = False
    if noise.told is not None:
        if r:
            raise ValueError(
                "inject_langevin_noise: lr= and momentum= are for plain torchopt.chain, whose links cannot see each other; "
                "here the noise is matched to its neighbours: leave them out"
            )
        whole = Whole(noise.told.b, noise.told.a)
    else:
        for i, x in r.items():
            _require_known(links[i], x)
        if not r:
            raise ValueError(
                "inject_langevin_noise: no other link is in sight, so there is nothing to match the noise to. Compose with "
                "bc.chain; inside torchopt.chain give it lr= (and momentum=) and write it before the momentum"
            )
        memory = [i for i in _of(r, Linear) if any((*r[i].a[1:], *r[i].b[1:]))]
        at = _entrance(links, r, written, memory)
        whole = _whole(links, r, at)
        if whole is None:
            return written, []
        rescales = memory == [whole.owner] and links[memory[0]].rescales
    changing = noise.told is None and (bool(whole.rates) or noise.temperature is None)
    try:
        parts = _processes(whole, noise.order, changing, rescales)
    except law.NoMatchedNoise as err:
        hint = ""
        if len(whole.a) == 3 and len(whole.b) == 1:
            hint = (
                ". Two cascaded momenta admit no matched noise once 1 - mu1 - mu2 - 3 mu1 mu2 < 0 "
                f"(here {sum(whole.a) - 4 * whole.a[2]:.3g}); lower one of them"
            )
        raise ValueError(f"chain: no noise can be matched to {whole}: {err}{hint}") from None
    mixing = [m for m in whole.metrics if not r[m].diagonal]
    if changing and (owner := whole.owner) is not None:
        if not (links[owner].velocity or links[owner].whole):
            raise ValueError(
                f"chain: a changing learning rate or temperature has to rescale what {show(links[owner])} remembers, and it "
                "does not say which of its state that is; use constants, or bc.add_momentum"
            )
        mixing += [owner] if links[owner].whole else []
    if mixing and where[mixing[0]] != leaves:
        raise ValueError(f"chain: {show(links[mixing[0]])} mixes its leaves, so the same links must act on all of them")
    carrier = r[at] if whole.owner == at and links[at].carries and len(parts) == 1 else None
    return written, [
        _site(whole, at, leaves, *part, carrier, None if changing else noise.temperature) for part in parts
    ]


def _site(
    whole: Whole,
    at: int,
    leaves: tuple[int, ...],
    met: tuple[int, ...],
    process: Process,
    carrier: Linear | None,
    temperature: float | None,
) -> Site:
    """The place of a noise whose spectrum is divided by the metrics ``met``; ``carrier`` is the velocity that it enters."""
    carried = 0.0
    if carrier is not None and len(carrier.b) == 1 and isinstance(process, Filtered) and process.d == (1.0,):
        mu, c = -carrier.a[1], process.c
        if mu >= LEAST_MOMENTUM and len(c) == 2 and c[0] == c[1]:  # the mean of two draws
            carried, process = carrier.b[0] / mu, Filtered(c[:1], process.d)
    still = None if temperature is None else Conditions(temperature)
    constants = None if still is None else process.coefficients(still, still)[0]
    colours = *((m, 0.5) for m in whole.metrics if m < at), *((m, -0.5) for m in met if m >= at)
    rates = tuple([i for i in whole.rates if i < at]), tuple([i for i in whole.rates if i >= at])
    return Site(whole, at, leaves, process, colours, rates, carried, constants)


def _check_own_noise(links: Sequence[Link], r: Responses, own: Sequence[int]) -> None:
    """In front of a link with noise of its own only what belongs to the loss: non-linear links and decay. Behind it nothing."""
    if len(own) > 1:
        raise ValueError(f"chain: two samplers act on one leaf ({_names(links, own)}); keep one of them")
    place, beside = list(r).index(own[0]), r[own[0]]
    for n, (i, x) in enumerate(r.items()):
        if place - beside.before <= n <= place + beside.behind or x == Linear():
            continue
        _require_known(links[i], x)
        who = f"chain: {show(links[own[0]])} brings noise of its own, matched to nothing else"
        if isinstance(x, Noise):
            raise ValueError(f"{who}; leave inject_langevin_noise out of this chain")
        if n > place or not isinstance(x, (Nonlinear, Decay)):
            raise ValueError(
                f"{who}: {show(links[i])} {'behind' if n > place else 'before'} it would change what it samples. Only clipping "
                "and weight decay may stand before it, and nothing behind; use its own arguments, or bc.sghmc, whose noise is "
                "matched to its neighbours"
            )


def _require_known(link: Link, response: Any) -> None:
    match response:
        case None:
            why = (
                f"nobody declared what {show(link)} does to the gradient, so no noise can be matched to it. "
                "Declare it: bc.with_response(link, bc.response.Linear(b, a)) for a linear filter b(1/z)/a(1/z), "
                "bc.response.Nonlinear() for a memoryless function of the gradient; or set temperature=0"
            )
        case Refused(reason):
            why = f"temperature > 0 is refused with {show(link)}: {reason}"
        case Linear(_, a) if not law.is_stable(a):
            why = f"{show(link)} has the unstable response 1 / {a}: momentum must lie in [0, 1)"
        case Decay(weight_decay) if not isfinite(weight_decay):
            why = f"{show(link)} has a weight decay that is not finite"
        case _:
            return
    raise ValueError(f"chain: {why}")


def _entrance(links: Sequence[Link], r: Responses, written: int, memory: Sequence[int]) -> int:
    """Inside the metric that learns, else before the first link with memory, else where the noise is written."""
    learning = [i for i in _of(r, Metric) if r[i].learns]
    curved = [i for i, x in r.items() if isinstance(x, Nonlinear) or i in learning]
    if not curved:
        return memory[0] if memory else written
    last = curved[-1]
    order = [*curved, *(i for i in memory if i not in curved), written]
    order += [i for i in r if i not in order]
    works = "; this order works: " + ", ".join(show(links[i]).split("(")[0] for i in order)
    if learning and (len(learning) > 1 or last != learning[0]):
        raise ValueError(
            f"chain: noise has to enter the adaptive {show(links[learning[0]])} with its own preconditioner, which "
            f"{show(links[last])} behind it would distort; write the non-linear links first and keep one adaptive link"
        )
    if memory and memory[0] < last:
        raise ValueError(
            f"chain: {show(links[memory[0]])} stands before the non-linear {show(links[last])}, so that no noise behind it "
            f"can be matched{works}"
        )
    if written < last:
        raise ValueError(
            f"chain: the noise is written before the non-linear {show(links[last])}, which would distort it{works}"
        )
    if learning and any(last < i < m for m in memory for i in _of(r, Rate)):
        raise ValueError(
            f"chain: write the changing learning rate behind the momentum that follows {show(links[last])}"
        )
    return learning[0] if learning else memory[0] if memory else written


def _whole(links: Sequence[Link], r: Responses, at: int) -> Whole | None:
    """The product of all responses; ``None`` if it is zero, so that nothing moves."""
    b, a, head, sign = (1.0,), (1.0,), 1.0, 1
    metrics, rates, poles = _of(r, Metric), _of(r, Rate), [i for i in _of(r, Linear) if any(r[i].a[1:])]
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
    if dense := [i for i in metrics if not r[i].diagonal]:
        if len(metrics) > 1:
            raise ValueError(
                f"chain: two preconditioners ({_names(links, metrics)}), one of them not diagonal, need not commute; keep one"
            )
        if dense[0] >= at:
            raise ValueError(f"chain: write {show(links[dense[0]])} before the momentum and the noise")
    descent = [(i, tuple([-sign * v for v in n])) for i, n in decays]
    owner = poles[0] if len(poles) == 1 else None
    return Whole(tuple([-sign * v for v in b]), a, head, tuple(metrics), tuple(rates), descent, owner)


def _processes(whole: Whole, order: int, changing: bool, rescales: bool) -> list[tuple[tuple[int, ...], Process]]:
    """The independent noises, each with the metrics whose product its spectrum is divided by."""
    b, a = whole.b, whole.a

    def filtered(r: law.Poly) -> Filtered:
        c, d = law.noise_filter(r, b, order)
        return Filtered(tuple([whole.head * v for v in c]), d)

    rest: dict[tuple[int, ...], law.Poly] = {}  # what decays behind memory add, by the metrics met before them
    for i, numerator in whole.decays:
        met = tuple([m for m in whole.metrics if m < i])
        rest[met] = law.add(rest.get(met, ()), law.decay_spectrum(b, numerator))
    main, extra = law.spectrum(b, a), rest.get(whole.metrics)
    process: Process | None = Scheduled.of(b, a, whole.head, order) if changing else None
    if process is not None:
        if 0.0 in (process.direct, process.momentum_gain) and extra is not None and len(extra) == 1:
            if not whole.rates and main[0] + extra[0] < 0.0:
                raise law.NoMatchedNoise("the noise spectrum would be negative at w = 0")
            process = replace(process, decay_level=extra[0] / main[0] / (process.direct + process.momentum_gain))
            del rest[whole.metrics]
    elif whole.rates and (rest or not rescales):
        raise law.NoMatchedNoise(
            f"{whole} is neither SGD, momentum nor Nesterov, and only those have a rule for a changing learning rate; "
            "use a constant lr, or bc.with_response(link, response, rescale=) for a link of your own"
        )
    else:
        process = filtered(law.add(main, rest.pop(whole.metrics, ())))
        process = Rescaled(process.c, process.d) if whole.rates else process
    return [(whole.metrics, process), *((met, filtered(r)) for met, r in rest.items())]


def describe(links: Sequence[Link], i: int) -> str:
    """The note that ``repr`` puts behind a noise link: where it acts and what it is matched to."""
    noise = links[i].response
    if not isinstance(noise, Noise):
        return ""
    alike = [k for k, other in enumerate(links) if not other.masks or other.masks == links[i].masks]
    try:
        _, sites = match(links, alike, (0,), [(0,)] * len(links))
    except ValueError as err:
        return f"  # unmatched: {str(err).removeprefix('chain: ')}"
    if not sites:
        return "  # F = 0, so that nothing moves"
    at, whole = sites[0].enters, sites[0].whole
    inside = isinstance(x := links[at].response, Metric) and x.learns
    where = "here" if at == i else f"{'inside' if inside else 'before'} {show(links[at]).split('(')[0]}"
    to = f"{whole} as given" if noise.told else f"{whole} x lr(t)" if whole.rates else f"{whole}"
    return f"  # acts {where}, matched to {to}"


def _of(r: Responses, kind: type) -> list[int]:
    return [i for i, x in r.items() if isinstance(x, kind)]


def _names(links: Sequence[Link], numbers: Sequence[int]) -> str:
    return ", ".join(show(links[i]) for i in numbers)


def _format(p: Sequence[float]) -> str:
    text = f"{p[0]:.6g}"
    for k, v in enumerate(p[1:], 1):
        if v:
            text += f" {'-' if v < 0 else '+'} {abs(v):.6g}/z" + (f"^{k}" if k > 1 else "")
    return f"({text})" if " " in text else text
