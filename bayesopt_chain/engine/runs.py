"""Which neighbouring links of a chain an engine stands for: [decay] [learning] [momentum] [noise] scale, on the same leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bayesopt_chain.engine.engine import Engine
from bayesopt_chain.engine.parts import Accumulates, Decays, Learns, Scales


def engines(links: Sequence[Any], plan: Any) -> dict[int, Engine]:
    """Find the engines of a chain.

    Args:
        links: the links of the chain.
        plan: its plan, of which layout, order and noise are read.

    Returns:
        The engines, each by the number of its first link.
    """
    found, taken = dict[int, Engine](), set[int]()
    for last in plan.order:
        if not isinstance(links[last].part, Scales) or not plan.where[last] or last in plan.entering:
            continue
        if None in [plan.layout.shapes[j] for j in plan.where[last]]:
            continue
        run, noise = _run(links, plan, last, taken)
        engine = Engine(links, plan, run, noise)
        if len(run) > 1 or engine.is_whole:
            found[run[0]] = engine
            taken |= {*run}
    return found


def _run(links: Sequence[Any], plan: Any, last: int, taken: set[int]) -> tuple[list[int], int | None]:
    """The run that ends with the scale ``last``, and the noise link whose draws the engine makes."""
    where, run, turn, noise = plan.where[last], [last], 3, None
    for i in sorted({*plan.order, *plan.entering}, reverse=True):
        if i >= last or set(plan.where[i]).isdisjoint(where):
            continue
        # noise that enters neither a momentum nor a link that learns is in no chain behind a momentum, and has its turn
        mine = 2 if i in plan.noise else _turn(links[i].part)
        if plan.where[i] != where or i in taken or mine >= turn:
            break
        entering = [n for n, x in plan.noise.items() if any(y.entry_link == i for y in x.noise_inputs)]
        drawn = [n for n in entering if mine in (1, 2) and _is_drawn(plan, n, [i, *run])]
        if (i in plan.noise or (i in plan.learning and entering)) and not drawn:  # its own link adds it
            break
        run.insert(0, i)
        if entering and not drawn:
            break
        turn, noise = mine, drawn[0] if drawn else noise
    return run, noise


def _turn(part: Any) -> int:
    """Where in a run a part may stand; 4, which is nowhere, for a link that plays none."""
    match part:
        case Decays():
            return 0
        case Learns(momentum=None):
            return 1
        case Learns() | Accumulates():
            return 2
        case Scales():
            return 3
        case _:
            return 4


def _is_drawn(plan: Any, n: int, run: Sequence[int]) -> bool:
    """Whether an engine can draw noise ``n``: of this chain's rates it depends on the engine's own alone."""
    if getattr(plan.noise[n], "drawn_by_kernel", None) is None:
        return False
    (x,) = plan.noise[n].noise_inputs
    front, behind = x.rates
    has_pole = x.transfer.pole_link is None or x.transfer.pole_link in run
    is_shaped = all([m in run and m in plan.learning for m, _ in x.powers])
    return x.leaves == plan.where[run[-1]] and not front and {*behind} <= {run[-1]} and is_shaped and has_pole
