r"""Where the noise goes in a chain, and what it is matched to.

For each leaf the links that act on it are split into what comes before the linear part and the linear part itself:

* after the last non-linear link, inside the adaptive one if there is one (its ``P`` must not see the noise);
* before the first link with memory, so that a learning rate in front of momentum scales the gradient, not the noise;
* where there is neither, where it was written.

By linearity any such place is as good as the head of the linear part. With ``F = G f`` (``G`` the gains that change
with time, ``f`` the constant filter) and ``P`` the product of frozen diagonals, noise of spectrum ``Psi P^-1`` at the head
becomes, behind the gains ``G_b`` and diagonals ``P_b`` met on the way, ``G_b^2 P_b / P_a`` times ``Psi``.

Matched noise of heavy-ball momentum, ``e_t = c (xi_t + xi_{t-1})``, needs no memory of its own: half of it may wait in the
velocity. With ``q_t = v_t + (c / mu) b xi_t`` in the place of ``v_t = mu v_{t-1} + b (g_t + e_t)``, ``b = 1 - dampening``,

    v_t = mu q_{t-1} + b (g_t + c xi_t),    theta <- theta - lr v_t,    q_t = v_t + echo c xi_t,    echo = b / mu:

white noise of level ``c``, of which the velocity keeps an echo. ``mu q`` is the Ornstein-Uhlenbeck velocity of BAOAB.
With little momentum the echo is many times the velocity and would overflow; there the noise remembers its draw itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from bayesopt_chain.core import law
from bayesopt_chain.core.filters import Conditions, Filtered, Process, Scheduled
from bayesopt_chain.core.response import Adaptive, Decay, Elementwise, Linear, Noise, Nonlinear, Rate, Refused

ONE = (1.0,)
LEAST_MOMENTUM = 1 / 16  # in front of less the noise leaves no echo


@dataclass(frozen=True)
class Source:
    """One independent noise: its process, and the diagonals that enter as ``sqrt(before / after)``."""

    process: Process
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Placement:
    """The noise of one leaf: the rule before (or inside) which it acts, its sources, the gains ``G_b`` and ``G_a``."""

    at: int
    sources: tuple[Source, ...]
    rates_before: tuple[int, ...] = ()
    rates_after: tuple[int, ...] = ()
    matched_to: str = ""
    gain_after: float = 1.0  # what a unit of this noise moves the parameter by in one step, G_a apart
    echo: float = 0.0  # what the velocity of the rule ``at`` keeps of each noise for the next step
    temperature: float | None = None  # where neither it nor a gain changes with time

    @cached_property
    def is_plain(self) -> bool:
        """One source at a constant temperature, the same for all elements."""
        return self.temperature is not None and len(self.sources) == 1 and not self.gains

    @property
    def gains(self) -> tuple[int, ...]:
        """The rules whose diagonals the noise must know."""
        return tuple(i for s in self.sources for i in s.before + s.after)

    @cached_property
    def constants(self) -> list:
        """The coefficients of every source at that temperature."""
        return [s.process.coefficients(Conditions(self.temperature), None)[0] for s in self.sources]

    @cached_property
    def draws(self) -> int:
        return sum(s.process.draws for s in self.sources)

    @cached_property
    def memory(self) -> int:
        return sum(s.process.memory for s in self.sources)


class Placements(dict[int, Placement]):
    """The placement of each leaf that one noise rule acts on."""

    @cached_property
    def draws(self) -> list[int]:
        return [p.draws for p in self.values()]

    @cached_property
    def level(self) -> float | None:
        """The standard deviation where all leaves have the same constant white noise."""
        first = next(iter(self.values()), None)
        if first is None or not first.is_plain or not isinstance(first.sources[0].process, Filtered):
            return None
        ((level, *more),) = first.constants
        alike = not more and first.sources[0].process.d == ONE and all(p is first for p in self.values())
        return level if alike else None

    @cached_property
    def at(self) -> dict[int, int]:
        return {j: p.at for j, p in self.items()}

    @cached_property
    def echo(self) -> dict[int, float]:
        return {j: p.echo for j, p in self.items() if p.echo}


@dataclass(frozen=True)
class Plan:
    """For each noise rule its placements; which rules have gains that the noise must know."""

    placements: dict[int, Placements]
    rates: tuple[int, ...]
    gains: tuple[int, ...]

    @cached_property
    def noise(self) -> tuple[int, ...]:
        return tuple(self.placements)

    def leaves(self) -> list[int]:
        """The leaves that noise acts on."""
        return sorted({j for by_leaf in self.placements.values() for j in by_leaf})


def plan(rules, where, n: int) -> Plan:
    """The plan for ``n`` leaves, ``where`` giving the leaves each rule acts on (``None`` for all)."""
    acting: list[list[int]] = [[] for _ in range(n)]
    for i, idx in enumerate(where):
        for j in range(n) if idx is None else idx:
            acting[j].append(i)
    placements = {i: Placements() for i, rule in enumerate(rules) if isinstance(rule.response, Noise)}
    seen: dict[tuple[int, ...], tuple[int, Placement] | None] = {}
    for j, indices in enumerate(map(tuple, acting)):
        if indices not in seen:
            seen[indices] = place(rules, indices)
        if seen[indices] is not None:
            i, placement = seen[indices]
            placements[i][j] = placement
    used = [p for by_leaf in placements.values() for p in by_leaf.values()]
    return Plan(
        placements,
        tuple(sorted({i for p in used for i in p.rates_before + p.rates_after})),
        tuple(sorted({i for p in used for i in p.gains})),
    )


def place(rules, indices: tuple[int, ...]) -> tuple[int, Placement] | None:
    """The noise rule and its placement for a leaf on which the rules ``indices`` act; ``None`` without noise.

    Raises:
        ValueError: the noise cannot be matched to these rules.
    """
    noise = [i for i in indices if isinstance(rules[i].response, Noise)]
    if not noise:
        return None
    if len(noise) > 1:
        raise ValueError(f"chain: {len(noise)} noise links act on one leaf ({_names(rules, noise)}); keep one of them")
    written = noise[0]
    links = [i for i in indices if i != written]
    if rules[written].lr is not None:
        if links:
            raise ValueError(
                "inject_langevin_noise: lr= and momentum= are for plain torchopt.chain, whose links cannot see each other; "
                "here the noise is matched to its neighbours: leave them out"
            )
        return written, _stated(rules[written], written)
    for i in links:
        _check_known(rules[i])
    at = _insertion(rules, links, written)
    return written, _match(rules, links, at, rules[written])


def _check_known(rule) -> None:
    if rule.response is None:
        raise ValueError(
            f"chain: nobody declared what {rule} does to the gradient, so no noise can be matched to it. "
            "Declare it: bc.with_response(link, bc.response.Linear(b, a)) for a linear filter b(1/z)/a(1/z), "
            "bc.response.Nonlinear() for a memoryless function of the gradient; or set temperature=0"
        )
    if isinstance(rule.response, Refused):
        raise ValueError(f"chain: temperature > 0 is refused with {rule}: {rule.response.reason}")


def _has_memory(response) -> bool:
    return isinstance(response, (Linear, Adaptive)) and any((*response.a[1:], *response.b[1:]))


def _insertion(rules, links: list[int], written: int) -> int:
    """The index of the rule before which (adaptive: in which) the noise acts."""
    curved = [i for i in links if isinstance(rules[i].response, (Nonlinear, Adaptive))]
    memory = [i for i in links if _has_memory(rules[i].response)]
    adaptive = [i for i in curved if isinstance(rules[i].response, Adaptive)]
    if curved:
        last = curved[-1]
        rest = [i for i in links if i not in curved and not _has_memory(rules[i].response)]
        order = ", ".join(
            str(rules[i]).split("(")[0] for i in [*curved, *(m for m in memory if m not in curved), written, *rest]
        )
        if adaptive and (len(adaptive) > 1 or last != adaptive[0]):
            raise ValueError(
                f"chain: noise has to enter {rules[adaptive[0]]} with its own preconditioner, which "
                f"{rules[last]} behind it would distort; write the non-linear links first and keep one adaptive link"
            )
        if early := [i for i in memory if i < last]:
            raise ValueError(
                f"chain: {rules[early[0]]} stands before the non-linear {rules[last]}, so that no noise behind it can be "
                f"matched; this order works: {order}"
            )
        if written < last:
            raise ValueError(
                f"chain: the noise is written before the non-linear {rules[last]}, which would distort it; "
                f"this order works: {order}"
            )
    if adaptive:
        at = adaptive[-1]
        if any(at < i < m and isinstance(rules[i].response, Rate) for m in memory for i in links):
            raise ValueError(f"chain: write the changing learning rate behind the momentum that follows {rules[at]}")
        return at
    return memory[0] if memory else written


def _match(rules, links: list[int], at: int, noise) -> Placement:
    """Sources of the noise that is matched to ``links`` and acts at ``at``."""
    b = a = (1.0,)
    sign = 1
    elementwise: list[int] = []
    rates: list[int] = []
    decays: list[tuple[float, law.Poly, law.Poly, tuple[int, ...], bool]] = []
    head = 1.0  # constant gain between the head and the place of the noise
    for i in links:
        response = rules[i].response
        if isinstance(response, (Linear, Adaptive)):
            if not law.is_stable(response.a):
                raise ValueError(
                    f"chain: {rules[i]} has the unstable response 1 / {response.a}: momentum must lie in [0, 1)"
                )
            if i < at:
                head *= response.b[0] / response.a[0]
            b, a = law.multiply(b, response.b), law.multiply(a, response.a)
        elif isinstance(response, Elementwise):
            elementwise.append(i)
        elif isinstance(response, Rate):
            rates.append(i)
            sign *= response.sign
        elif isinstance(response, Decay) and response.weight_decay:
            if not _finite(response.weight_decay):
                raise ValueError(f"chain: {rules[i]} has a weight decay that is not finite")
            decays.append((response.weight_decay, b, a, tuple(elementwise), bool(rates)))
    scheduled = bool(rates) or not noise.is_static
    temperature = None if scheduled else float(noise.temperature)
    total = sum(b)
    if total == 0.0:
        return Placement(at, (), matched_to="F = 0", temperature=temperature)  # lr = 0: nothing moves
    if not links:
        raise ValueError(
            "inject_langevin_noise: no other link is in sight, so there is nothing to match the noise to. Compose with "
            "bc.chain; inside torchopt.chain give it lr= (and momentum=) and write it before the momentum"
        )
    if total * sign > 0:
        raise ValueError(
            "chain: its updates would climb the loss, so nothing can be sampled: the product of its gains is positive "
            "(gains that change with time are taken to be positive). End it with scale_by_neg_lr(lr)"
        )
    if not all(map(_finite, (*b, *a))):
        raise ValueError(f"chain: the response F = {b} / {a} is not finite; check lr and momentum")
    b = tuple(-sign * v for v in b)
    head = abs(head)
    whole = tuple(elementwise)
    before = tuple(i for i in elementwise if i < at)

    def source(process, prefix) -> Source:
        return Source(process, before, tuple(i for i in prefix if i not in before))

    remainders: dict[tuple[int, ...], law.Poly] = {}
    for weight_decay, prefix_b, prefix_a, prefix, rated in decays:
        if len(prefix_a) == len(prefix_b) == 1:
            continue  # in the gradient: a part of the loss
        r = law.excess(b, law.decay_numerator(prefix_a, _divide(b, prefix_b), weight_decay))
        if rated:
            raise ValueError(
                "chain: weight decay behind both momentum and a changing learning rate cannot be matched; write it first"
            )
        remainders[prefix] = _add(remainders.get(prefix, ()), r)
    note = f"F = {_format(b)} / {_format(a)}" if len(a) > 1 else f"F = {_format(b)}"
    try:
        sources = []
        if scheduled and (branches := _branches(b, a)) is not None:
            extra = 0.0
            if branches.single and len(remainders.get(whole, ())) == 1:
                (r,) = remainders.pop(whole)
                main = law.excess(b, law.main_numerator(b, a))[0]
                if not rates and main + r < 0.0:
                    raise law.NoMatchedNoise("the noise spectrum would be negative at w = 0")
                extra = r / main / branches.total
            sources.append(
                source(
                    Scheduled(branches.direct, branches.momentum_gain, branches.momentum, extra, head, noise.order),
                    whole,
                )
            )
        elif rates:
            raise law.NoMatchedNoise(
                f"{note} is neither SGD, momentum nor Nesterov, and only those have a rule for a changing learning rate; "
                "use a constant lr"
            )
        else:
            r = _add(law.excess(b, law.main_numerator(b, a)), remainders.pop(whole, ()))
            sources.append(source(_filtered(r, b, head, noise.order), whole))
        for prefix, r in remainders.items():
            sources.append(source(_filtered(r, b, head, noise.order), prefix))
    except law.NoMatchedNoise as err:
        raise ValueError(f"chain: no noise can be matched to {note}: {err}{_two_momenta(rules, links)}") from None
    echo = _echo(rules[at], sources) if at in links else 0.0
    if echo:
        sources = [replace(s, process=Filtered(s.process.c[:1], s.process.d)) for s in sources]
    return Placement(
        at,
        tuple(sources),
        tuple(i for i in rates if i < at),
        tuple(i for i in rates if i >= at),
        note + (" x lr(t)" if rates else ""),
        b[0] / a[0] / head,
        echo,
        temperature,
    )


def _echo(rule, sources: list[Source]) -> float:
    """``b / mu`` if the noise is the mean of two draws right in front of heavy-ball momentum, else 0."""
    if not rule.keeps_echo or len(sources) != 1:
        return 0.0
    process = sources[0].process
    if not isinstance(process, Filtered) or len(process.c) != 2 or process.c[0] != process.c[1] or process.d != ONE:
        return 0.0
    momentum = -rule.response.a[1]
    return rule.response.b[0] / momentum if momentum >= LEAST_MOMENTUM else 0.0


@dataclass(frozen=True)
class Branches:
    """``b / a = direct + momentum_gain / (1 - momentum / z)`` with both gains non-negative."""

    direct: float
    momentum_gain: float
    momentum: float

    @property
    def single(self) -> bool:
        return self.direct == 0.0 or self.momentum_gain == 0.0

    @property
    def total(self) -> float:
        return self.direct + self.momentum_gain


def _branches(b, a) -> Branches | None:
    b, a = _trim(b), _trim(a)
    if len(a) == 1 and len(b) == 1:
        return Branches(b[0] / a[0], 0.0, 0.0)
    if len(a) != 2 or len(b) > 2:
        return None
    mu = -a[1] / a[0]
    b = (*(v / a[0] for v in b), 0.0)
    direct = -b[1] / mu
    branches = Branches(direct, b[0] - direct, mu)
    return branches if mu > 0 and branches.direct >= 0 and branches.momentum_gain >= 0 else None


def _filtered(r, b, head: float, order: int) -> Filtered:
    c, d = law.noise_filter(r, b, order)
    return Filtered(tuple(head * v for v in c), d)


def _stated(noise, at: int) -> Placement:
    """A noise link that was told its lr and momentum acts where it is written."""
    c, d = law.matched_noise(ONE, (1.0, -noise.momentum) if noise.momentum else ONE, noise.lr, order=noise.order)
    told = f"lr={noise.lr}, momentum={noise.momentum} as given"
    temperature = float(noise.temperature) if noise.is_static else None
    return Placement(at, (Source(Filtered(c, d)),), matched_to=told, temperature=temperature)


def describe(rules, i: int) -> str:
    """The note that ``repr`` puts behind rule ``i``: for noise, where it acts and what it is matched to."""
    rule = rules[i]
    if not isinstance(rule.response, Noise):
        return ""
    alike = tuple(k for k, other in enumerate(rules) if not other.masks or other.masks == rule.masks)
    try:
        _, placement = place(rules, alike)
    except ValueError as err:
        return f"  # unmatched: {str(err).removeprefix('chain: ')}"
    if placement.at == i or placement.at >= len(rules):
        where = "acts here"
    else:
        inside = isinstance(rules[placement.at].response, Adaptive)
        where = f"acts {'inside' if inside else 'before'} {str(rules[placement.at]).split('(')[0]}"
    return f"  # {where}, matched to {placement.matched_to}"


def _two_momenta(rules, links) -> str:
    poles = [-r.a[1] for i in links if isinstance(r := rules[i].response, (Linear, Adaptive)) and len(r.a) == 2]
    if len(poles) != 2:
        return ""
    m1, m2 = poles
    return (
        f". Two cascaded momenta admit no matched noise once 1 - mu1 - mu2 - 3 mu1 mu2 < 0 "
        f"(here {1 - m1 - m2 - 3 * m1 * m2:.3g}); lower one of them"
    )


def _names(rules, indices) -> str:
    return ", ".join(str(rules[i]) for i in indices)


def _finite(x: float) -> bool:
    return x - x == 0.0


def _trim(p) -> law.Poly:
    p = list(p)
    while len(p) > 1 and p[-1] == 0.0:
        p.pop()
    return tuple(p)


def _add(p, q) -> law.Poly:
    n = max(len(p), len(q))
    return tuple((p[k] if k < len(p) else 0.0) + (q[k] if k < len(q) else 0.0) for k in range(n))


def _divide(p, q) -> law.Poly:
    """Exact quotient of polynomials, ``p`` being a multiple of ``q``."""
    p, out = list(p), []
    for k in range(len(p) - len(q) + 1):
        out.append(p[k] / q[0])
        for j, v in enumerate(q):
            p[k + j] -= out[-1] * v
    return tuple(out)


def _format(p) -> str:
    text = f"{p[0]:.6g}"
    for k, v in enumerate(p[1:], 1):
        if v:
            text += f" {'-' if v < 0 else '+'} {abs(v):.6g}/z" + (f"^{k}" if k > 1 else "")
    return f"({text})" if " " in text else text
