"""Watches a loop for the heat of its minibatches: when it looks, what it costs, and when it warns.

What a window says is in :mod:`bayesopt_chain.diagnostics.heat`; what a gradient is compared with, for chains, in
:mod:`bayesopt_chain.diagnostics._heat_of_chain`, for optimizers in :mod:`bayesopt_chain.optim`.
"""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain import kinds, tracing
from bayesopt_chain._torch import is_dtensor
from bayesopt_chain.checks import short
from bayesopt_chain.diagnostics import _heat_of_chain as of_chain
from bayesopt_chain.diagnostics.heat import BUCKETS, DEFERRED, Heat, Leaf, Row, Sketch, read_heat
from bayesopt_chain.loop.step import Step

SURE = 3.0  # standard errors of two windows together
BENT = 1.5  # times the chain's own move: a Hessian known from one window may leave that much of it
RINGS = 0.75  # ringing of two windows from which what is left is an oscillation; by chance it is 0.3 +- 0.15
TOTAL = 20.0  # rho from which the loss may be a sum over the batch, as far as nothing else is known
UNSPECIFIED = 5.0  # times the heat that a well-specified model has at its curvature: from there on too
LONG = 30.0  # steps that the momentum remembers, from which reshuffled epochs may cancel most of the noise
SAME_NORM = 1e-5  # relative difference below which two gradient norms are one: clipped
CLIP_SLACK = 1.1e-6  # the same as a difference: torch divides by the norm plus 1e-6
CLIP_LEAST = 4e-4  # the norm below which that is too coarse: noise in many directions has nearly one norm
MISSED = 0.1  # share of a window's steps in which a parameter may be without gradient
GIVE_UP = 4 / 3  # times the share of the time at which a window is given up
FUTILE = 16  # windows in a row that came to nothing, after which it says so
CORNER = 16  # elements of each gradient that tell whether it changes at all
STORED = 5e-5  # seconds that a look takes which stores all elements,
SKETCHED = 2.5e-4  # or one that adds them up in buckets, and besides
PLAIN = 1.5e-5  # for each leaf,
LEARNED = 8e-5  # for each leaf with a learned preconditioner, and
ELEMENT = 4e-9  # for each element
JUMP = 3.0  # two windows whose rates differ by more are not read together


class _Purse(threading.local):
    """What all guards of a thread have spent, and what they hold back for windows that are open, in seconds."""

    spent: float = 0.0


_PURSE = _Purse()


def together(first: Heat, second: Heat) -> Heat:
    """Two windows as one: means with weights of one over the squared standard error.

    Args:
        first, second: windows of one run.

    Returns:
        Their mean, with its standard error; what is no number is that of the second.

    Example:
        >>> one = Heat(2.0, 0.3, 0.0, 0.0, 2.0, "independent", 0.0)
        >>> round(together(one, one._replace(rho=0.5, excess=0.5, standard_error=0.9)).rho, 2)
        1.85
    """
    a, b = (1.0 / max(heat.standard_error, 1e-12) ** 2 for heat in (first, second))
    mean = {name: (a * getattr(first, name) + b * getattr(second, name)) / (a + b) for name in ("rho", "own", "excess")}
    return second._replace(**mean, standard_error=(a + b) ** -0.5)


class HeatGuard:
    """Watches a loop for the heat of its minibatches, and warns once, by name and with numbers.

    :mod:`bayesopt_chain.optim` has one in every optimizer at T > 0. It looks at windows of 96 consecutive steps: the first
    as soon as it costs less than ``share`` of the time the run has taken, the next ones ever more rarely while all is well.
    It warns where two windows in a row say so together and the second does not contradict: the first may have been burn-in.
    A window that turns out dearer than foreseen is given up at 4/3 of the share; all guards of a thread have one share.

    Learning rates and temperatures may change at every step: gradients keep the scale of the first step of a window, and the
    heat is that of the window's mean rate, under the assumption that the gradients' noise does not change with the rate
    (:mod:`bayesopt_chain.diagnostics.heat`). Where groups change in different proportions the largest counts. A step in which
    nothing has a gradient or a temperature is passed over, and a parameter that is missing in more than a tenth of a window's
    steps is left out of the next one.

    Args:
        steps_per_epoch: optimizer steps in a pass over the data, where they are reshuffled in every epoch: the number of
            batches, divided by that of the accumulated ones. The noise of an epoch then sums to zero, and heats less. Without
            it batches count as independent, the worst case. Leave it out where no epoch sums the noise to zero, whose heat
            would be understated: dropout, random augmentation, samplers with replacement.
        order: ``"reshuffled"`` or ``"independent"``.
        above: excess of the variance, relative to the one asked for, from which it warns: 0.7, so that twice the variance is
            not missed.
        share: of the time that the loop's thread computes, which it may take.
        window: steps in a window.
        who: how the warning begins.

    Attributes:
        readings: the :class:`Heat` of every window so far, newest last.

    Example:
        >>> import warnings, torch, bayesopt_chain as bc
        >>> source = torch.Generator().manual_seed(0)
        >>> guard = HeatGuard(share=float("inf"))
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     for _ in range(400):
        ...         guard.look(lambda: [Leaf(torch.randn(10, generator=source), torch.zeros(10), 2.0, 1.0, 0.9)], lr=0.1)
        >>> len(caught), "times the variance" in str(caught[0].message)
        (1, True)
    """

    @kinds.takes(
        steps_per_epoch=kinds.WHOLE,
        order=kinds.one_of("reshuffled", "independent"),
        above=kinds.real("[0, inf]"),
        share=kinds.real("[0, inf]"),
        window=kinds.whole(32),
        who=kinds.TEXT,
    )
    def __init__(
        self,
        steps_per_epoch: int | None = None,
        order: str = "reshuffled",
        *,
        above: float = 0.7,
        share: float = 0.0125,
        window: int = 96,
        who: str = "bayesopt_chain",
    ) -> None:
        self.steps_per_epoch, self.order, self.above, self.share = steps_per_epoch, order, above, share
        self.window, self.who = window, who
        self.readings: list[Heat] = []
        self.has_warned = False
        self.has_left_out = False  # whether it was said that some gradients are not looked at
        self._last: Heat | None = None  # the last window, if it may have been hot
        self._last_rate = math.nan  # the mean rate of the last window
        self._most = math.inf  # the largest mean lr of a window
        self._momentum: float | None = None
        self._advice: tuple[float, ...] = ()  # the learning rates of the last window
        self._clipped = ""
        self._held = 0.0  # of the thread's purse, for the window that is open
        self._restart()

    def _restart(self) -> None:
        self._steps, self._next, self._last = 0, 32, None
        self._awake = 0  # the step from which on sleeps() says no
        self._began: float | None = None
        self._spent = self._before = 0.0
        self._thread = 0  # that the clock belongs to
        self._elapsed = self._taken = 0.0  # on this clock and of this thread's purse, when it was last looked at
        self._cost: float | None = None  # of a window, once one has been paid for
        self._absent = set[int]()  # parameters that are left out of the next window
        self._futile = 0  # windows in a row that came to nothing
        self._close()

    def _close(self) -> None:
        self._rows: list[Row] = []
        self._rates: list[tuple[float, float, float]] = []  # of each row: rate and temperature over the first, lr
        self._sketch: Sketch | None = None
        self._rules: list[Any] | None = None  # how a chain's gradients are scaled, in a window
        self._seen: dict[int, Leaf] = {}  # the leaves of the first step, without their tensors
        self._corners: list[Tensor] = []  # a few elements of each gradient of the first step
        self._missed: dict[int, int] = {}
        self._skipped = 0
        self._is_mixed = False  # whether groups change their rates in different proportions
        self._paid = self._first = 0.0  # of all steps, of the first
        _PURSE.spent -= self._held
        self._held = 0.0

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or a guard that comes out of a file, begins anew: its window and its clock are those of another loop."""
        copy = object.__new__(HeatGuard)
        copy.__dict__.update(
            self.__dict__, readings=[], has_warned=False, has_left_out=False, _most=math.inf, _held=0.0
        )
        copy._restart()
        return copy.__dict__

    # of a chain: make_step(heat_guard=guard), bc.sample(callbacks=[guard])

    @kinds.takes()
    def require(self, tx: Any) -> None:
        """Refuse a chain that this guard cannot read.

        Args:
            tx: the transformation of a step.

        Raises:
            ValueError: no matched noise.

        Example:
            >>> import bayesopt_chain as bc
            >>> bc.diagnostics.HeatGuard().require(bc.sghmc(0.1, temperature=0.01))
        """
        of_chain.require_matched_noise(tx)

    def watch(self, tx: Any, params: Any, state: Any, grads: Any) -> None:
        """Look at a step of a chain, before parameters move; :func:`bayesopt_chain.make_step` calls it.

        Args:
            tx: the chain.
            params, state: of the chain, before the step.
            grads: a tree like the parameters.

        Raises:
            ValueError: gradients whose numbers nobody may look at (captured, under ``vmap``), or sharded ones.

        Example:
            >>> import math, torch, bayesopt_chain as bc
            >>> tx, w = bc.sghmc(0.1, temperature=0.01), torch.zeros(3)
            >>> guard, state = bc.diagnostics.HeatGuard(share=math.inf), tx.init(w)
            >>> for _ in range(150):
            ...     guard.watch(tx, w, state, torch.randn(3))
            >>> len(guard.readings)
            1
        """
        if tracing.is_plain() and self.sleeps():
            return
        tensors: list[Any] = optree.tree_leaves(grads)
        if not all([isinstance(x, Tensor) for x in tensors]):
            raise TypeError(f"HeatGuard.watch: grads must be a tree of tensors like params, got {short(grads)}")
        if not tracing.is_plain(*tensors) or any(map(is_dtensor, tensors)):
            raise ValueError(
                "heat_guard: the gradients of a step that is captured, runs under vmap or is sharded cannot be looked at one "
                "by one; run one plain chain with the guard first, or ask bc.diagnostics.heating"
            )

        def leaves() -> list[Leaf]:
            changing = of_chain.has_schedule(tx)
            if self._rules is None or changing:
                self._rules = of_chain.rules_of(tx, params, state)
            return of_chain.leaves_of(self._rules, params, grads, changing=changing)

        self.look(leaves, None)
        if self._sketch is None:
            self._rules = None

    def attached(self, step: Any, batches: Any = None) -> Step:
        """The step that shows its gradients to this guard; :func:`bayesopt_chain.sample` calls it for its callbacks.

        Args:
            step: of :func:`bayesopt_chain.make_step`.
            batches: of the run; of reshuffled :func:`bayesopt_chain.epochs` a guard without ``steps_per_epoch`` takes theirs.

        Returns:
            The same step, whose gradients this guard sees.

        Raises:
            ValueError: a step that cannot show them: captured, parallel, of an optimizer, or with a guard of its own.

        Example:
            >>> import bayesopt_chain as bc
            >>> step = bc.make_step(lambda w, batch: w.square().sum(), bc.sghmc(0.1, temperature=0.01))
            >>> guard = bc.diagnostics.HeatGuard()
            >>> guard.attached(step).heat_guard is guard
            True
        """
        if not isinstance(step, Step) or step.heat_guard is not None:
            own = isinstance(step, Step) or hasattr(step, "optimizer")
            why = (
                "has a heat guard of its own: leave this one out"
                if own
                else "shows none: run one plain chain with it first"
            )
            raise ValueError(
                "sample: a HeatGuard among callbacks looks at the gradients of a step of make_step; this "
                f"{type(step).__name__} {why}"
            )
        self.require(step.tx)
        if self.steps_per_epoch is None and getattr(batches, "order", None) == self.order == "reshuffled":
            self.steps_per_epoch = round(batches.steps_per_epoch)
        return replace(step, heat_guard=self)

    def __call__(self, it: Any) -> None:
        """Nothing: the step that it is attached to shows it what it looks at."""

    def postfix(self) -> dict[str, str]:
        """What a progress bar shows.

        Returns:
            ``{"heat": text}``, the excess of the last reading over the variance asked for; empty before the first.

        Example:
            >>> import bayesopt_chain as bc
            >>> bc.diagnostics.HeatGuard().postfix()
            {}
        """
        return {"heat": f"{self.readings[-1].excess:+.0%}"} if self.readings else {}

    def warning(self) -> None:
        """Nothing: the guard warns as soon as it is sure.

        Returns:
            ``None``, so that :func:`bayesopt_chain.sample` says nothing more when the run ends.

        Example:
            >>> import bayesopt_chain as bc
            >>> bc.diagnostics.HeatGuard().warning()
        """

    # of every loop

    def sleeps(self) -> bool:
        """Count a step in which nothing is to be looked at; a loop that asks this first saves the call of :meth:`look`.

        Returns:
            Whether the step was counted; if not, :meth:`look` has to be called. After the first window that is in every 16th
            step at least, so that the guard sees the learning rate.

        Example:
            >>> guard = HeatGuard()
            >>> guard.sleeps()  # the first step starts its clock
            False
        """
        step = self._steps + 1
        if step >= self._awake:
            return False
        self._steps = step
        return True

    def look(self, leaves: Callable[[], Iterable[Leaf]], lr: float | None) -> None:
        """Called at every step, before parameters move.

        Args:
            leaves: gives the gradients of this step; called inside windows only.
            lr: the largest learning rate: where it rises to twice that of all windows so far, the guard looks again soon.
                ``None`` where it is not known.

        Example:
            >>> import torch
            >>> guard = HeatGuard()
            >>> guard.look(lambda: [Leaf(torch.ones(3), torch.zeros(3), 1.0, 0.1, 0.9)], lr=0.1)
            >>> guard.readings
            []
        """
        self._steps += 1
        if self._is_idle and lr is not None and lr > 2.0 * self._most:
            self._most, self._next = lr, min(self._next, self._steps + 32)
        if not self._is_idle or self._steps >= self._next:
            self._spend(leaves, lr)
        if not self._is_idle:
            self._awake = 0
        else:  # a rate is compared with those of windows
            is_compared = lr is not None and not math.isinf(self._most)
            self._awake = min(self._next, self._steps + 16) if is_compared else self._next

    @property
    def _is_idle(self) -> bool:
        """Whether its clock runs and no window is open."""
        return self._sketch is None and self._began is not None

    def _spend(self, leaves: Callable[[], Iterable[Leaf]], lr: float | None) -> None:
        """Start the clock, or look at this step."""
        now, thread = time.thread_time(), threading.get_ident()
        if self._began is None:
            self._began, self._before, self._thread = now, _PURSE.spent, thread
            return
        if thread != self._thread or now - self._began < self._elapsed:
            # another thread, whose clock and purse are others
            self._began, self._before, self._thread = now - self._elapsed, _PURSE.spent - self._taken, thread
            self._held = 0.0
        self._look(leaves, lr, now)
        self._elapsed, self._taken = now - self._began, _PURSE.spent - self._before

    def _look(self, leaves: Callable[[], Iterable[Leaf]], lr: float | None, now: float) -> None:
        """Open a window if it can be afforded, or take a step of the window that is open."""
        here: list[Leaf] | None = None
        if self._sketch is None and (here := self._opened(leaves, now)) is None:
            return
        self._take([*leaves()] if here is None else here, lr)
        self._pay(time.thread_time() - now)
        if self._sketch is not None and self._overruns(now):
            self._cost = max(self._price(), 1.5 * (self._cost or 0.0))
            self._close()

    def _pay(self, seconds: float) -> None:
        """Book the time that was spent, first from what is held back for this window."""
        self._spent += seconds
        self._paid += seconds
        held = max(self._held - seconds, 0.0)
        _PURSE.spent += seconds + held - self._held
        self._held = held
        if len(self._rows) == 1:
            self._first = self._paid

    def _overruns(self, now: float) -> bool:
        """Whether the guards of this thread have spent so much more than their share that the window is given up."""
        assert self._began is not None
        return _PURSE.spent - self._held - self._before > GIVE_UP * self.share * (now - self._began)

    def _price(self) -> float:
        """The cost of a window, from what its steps so far have cost; the first one, which makes the signs, is no measure."""
        assert self._sketch is not None
        further = len(self._rows) - 1
        each = (self._paid - self._first) / further if further >= 3 else 0.0
        return self._first + self.window * each + _algebra(sum(map(len, self._sketch.signs)), len(self._seen))

    def _opened(self, leaves: Callable[[], Iterable[Leaf]], now: float) -> list[Leaf] | None:
        """The gradients of this step if a window can be afforded now, which it opens; otherwise ``None``."""
        assert self._began is not None
        left = self.share * (now - self._began) - (_PURSE.spent - self._before)
        self._next = self._steps + 1 + self._steps // 16  # looking at the clock costs too
        found: list[Leaf] | None = None
        if self._cost is None:
            if left < _guess([], self.window):  # nor is it asked what there is to see, which costs too
                return None
            found = [*leaves()]
            self._cost = _guess(found, self.window)
        if self._cost > left:
            if found is not None:
                self._pay(time.thread_time() - now)
            return None
        found = [*leaves()] if found is None else found
        watched = [leaf for leaf in found if leaf.known_by not in self._absent] or found
        if not watched:
            return None
        self._sketch = Sketch(watched)
        self._paid, self._held = 0.0, self._cost if math.isfinite(self.share) else 0.0
        _PURSE.spent += self._held
        nothing = watched[0].gradient.new_empty(0)
        self._seen = {leaf.known_by: leaf._replace(gradient=nothing, param=nothing, scale=1.0) for leaf in watched}
        self._corners = [leaf.gradient.detach().flatten()[:CORNER].clone() for leaf in watched]
        return found

    @torch.no_grad()
    def _take(self, leaves: list[Leaf], lr: float | None) -> None:
        assert self._sketch is not None
        here = {leaf.known_by: leaf for leaf in leaves}
        absent = [i for i in self._seen if i not in here]
        if absent:
            return self._miss(absent)
        seen = self._at_first_scale([here[i] for i in self._seen], lr)
        self._rows.append(self._sketch(seen))
        if len(self._rows) <= self.window:
            return None
        began = time.thread_time()
        gradients, positions, norms = self._sketch.finished(self._rows)
        self._absent, self._futile = set[int](), 0
        is_sound = bool(torch.isfinite(gradients).all() and torch.isfinite(positions).all() and gradients.any())
        if is_sound:
            self._read(gradients, positions, norms, seen)
        self._cost = self._paid + time.thread_time() - began
        is_open = self._last is not None and not self.has_warned
        self._next = self._steps + 1 if is_open or not is_sound else 4 * self._steps
        return self._close()

    def _miss(self, absent: list[int]) -> None:
        """Pass over a step; a window with too many of them is closed, and the next one leaves out what was missing."""
        self._skipped += 1
        for i in absent:
            self._missed[i] = self._missed.get(i, 0) + 1
        allowed = MISSED * self.window
        if self._skipped <= allowed:
            return
        often = {i for i, times in self._missed.items() if times > allowed / 2}
        if len(often) < len(self._seen):
            self._absent |= often
        self._futile += 1
        self._next = self._steps + 1
        if self._futile >= FUTILE and not self.readings and not self.has_warned:
            self.has_warned = True
            warnings.warn(
                f"{self.who}: the heat of the gradients' noise was not looked at: {self._futile} windows of {self.window} "
                "steps were begun, and in each too many steps had no gradient or no temperature. Look at it in a run in which "
                "every step has both; heat_guard=None silences this",
                stacklevel=4,
            )
        return self._close()

    def _at_first_scale(self, leaves: list[Leaf], lr: float | None) -> list[Leaf]:
        """The leaves scaled as in the first step of the window; how the rate and the temperature changed is kept."""
        out, rates, temperatures = list[Leaf](), list[float](), list[float]()
        for leaf, first in zip(leaves, self._seen.values()):
            if leaf.rate == first.rate and leaf.temperature == first.temperature:
                rates.append(1.0)
                temperatures.append(1.0)
                out.append(leaf)
                continue
            rate, temperature = leaf.rate / first.rate, leaf.temperature / first.temperature
            rates.append(rate)
            temperatures.append(temperature)
            scale = leaf.scale / math.sqrt(rate / temperature)
            out.append(leaf._replace(scale=scale, temperature=first.temperature))
        most = max(rates)
        self._is_mixed |= most - min(rates) > 1e-3 * most
        self._rates.append((most, min(temperatures), math.nan if lr is None else lr))
        return out

    def _read(self, gradients: Tensor, positions: Tensor, norms: Tensor, seen: list[Leaf]) -> None:
        """Read a window that is complete."""
        filled = (gradients != 0).any(0)  # small models fill few buckets
        rules = {(leaf.momentum, 1.0 - leaf.momentum if leaf.first is None else leaf.first) for leaf in seen}
        momentum, first = min(rules)
        self._momentum = momentum
        rates, temperatures, lrs = (torch.tensor(x, dtype=torch.float64, device="cpu") for x in zip(*self._rates))
        changed = bool((rates != 1.0).any() or (temperatures != 1.0).any())
        heat = read_heat(
            gradients[:, filled],
            positions[:, filled],
            momentum,
            first=first if len(rules) == 1 and not self._is_mixed else math.nan,
            steps_per_epoch=self.steps_per_epoch,
            order=self.order,
            rates=rates if changed else None,
            temperatures=temperatures if changed else None,
            elements=sum(int(leaf.gradient.count_nonzero()) for leaf in seen),
        )
        self._most = max(float(lrs.mean()), 0.0 if math.isinf(self._most) else self._most)
        self._advice = () if changed else tuple({leaf.lr for leaf in seen if leaf.lr is not None})
        if self._is_mixed or len(self._advice) > 1 or (changed and not math.isnan(float(lrs[-1]))):
            self._advice = (math.nan, math.nan)
        rate = next(iter(self._seen.values())).rate * float(rates.square().mean() / rates.mean())
        if self._last is not None and rate != self._last_rate:  # the last window at the rate of this one
            by = rate / self._last_rate
            scaled = {name: by * getattr(self._last, name) for name in ("rho", "standard_error", "own", "excess")}
            self._last = self._last._replace(**scaled) if 1 / JUMP < by < JUMP else None
        self._last_rate = rate
        same, self._clipped = self._same_norm(norms, gradients, seen)
        self._judge(heat._replace(same_norm=same))

    def _same_norm(self, norms: Tensor, gradients: Tensor, seen: list[Leaf]) -> tuple[float, str]:
        """The largest share of steps with one norm: of all parameters, a group, a part or a parameter; and of which."""
        moved = [
            float((leaf.gradient.detach().flatten()[:CORNER] - corner).norm() / corner.norm().clamp(min=1e-30))
            for leaf, corner in zip(seen, self._corners)
        ]
        groups = {
            number: [i for i, leaf in enumerate(seen) if leaf.group == number] for number in {x.group for x in seen}
        }
        parts = {"": [*range(len(seen))], **{f" of parameter group {number}": x for number, x in groups.items()}}
        candidates = [*parts.items()]
        candidates += [(" of one parameter", [i]) for i, leaf in enumerate(seen) if leaf.gradient.numel() > 1]
        if run := _clipped_run(norms.square()):
            candidates.append((f" of a part of the parameters ({len(run)} of {len(seen)})", [*run]))
        still = (gradients.diff(dim=0).norm(dim=1) <= SAME_NORM * gradients.norm(dim=1)[1:]).double().mean()
        best, which = 0.0, ""
        for name, part in candidates:
            norm = norms[:, part].norm(dim=1)
            share, middle = float(_share_of_one(norm)), float(norm.median())
            # a gradient that hardly changes has one norm without a clip
            room = max(SAME_NORM, CLIP_SLACK / max(middle, CLIP_LEAST))
            turns = max(moved[i] for i in part) > 10 * room and float(still) < 0.5
            if share > best and turns:
                best, which = share, name
        return best, which

    def _judge(self, heat: Heat) -> None:
        self.readings.append(heat)
        last, self._last = self._last, heat if heat.rho + 2.0 * heat.standard_error > self.above else None
        both = None if last is None or self._last is None else together(last, heat)
        is_sure = (
            both is not None
            and last is not None
            and both.excess > self.above
            and both.rho > max(SURE * both.standard_error, BENT * both.own)
            and (last.ringing + heat.ringing) / 2 < RINGS
        )
        if self.has_warned:
            return
        if heat.same_norm > 0.5:
            self.has_warned = True
            warnings.warn(
                f"{self.who}: {heat.same_norm:.0%} of the gradients{self._clipped} have one and the same norm: a clip acts at "
                "nearly every step, and a chain that follows clipped gradients samples another distribution. Raise max_norm "
                "until it acts rarely, or leave clipping out at temperature > 0",
                stacklevel=2,
            )
        elif both is not None and is_sure:
            self.has_warned = True
            warnings.warn(self._warning(both), stacklevel=2)

    def _warning(self, heat: Heat) -> str:
        """The warning for a reading, with numbers and what to do."""
        is_told = self.steps_per_epoch is not None
        memory = 1.0 / max(1.0 - (self._momentum or 0.0), 1e-9)
        size = f"{heat.rho:.2g} +- {heat.standard_error:.1g} times what the sampler itself injects"
        if not is_told and self.order == "reshuffled" and memory > LONG:
            return (
                f"{self.who}: pass steps_per_epoch=, the optimizer steps in a pass over the data. The noise of the gradients "
                f"is {size}. If batches are independent it heats this chain: about {1 + heat.excess:.2g} times the variance "
                f"asked for. If they are reshuffled in every epoch, as by a DataLoader, a momentum that remembers {memory:.3g} "
                "steps may cancel nearly all of it, and whether to change anything can be said only with steps_per_epoch=. "
                f"heat_guard=None silences this.{_mean_first(self._is_total(heat))}"
            )
        if heat.order == "independent" and not is_told:
            law = (
                "; as for independent batches, the worst case. Epochs reshuffled as by a DataLoader heat less, and "
                f"far less where the momentum, here of {memory:.3g} steps, remembers an epoch: steps_per_epoch= counts that"
            )
            if self.order == "reshuffled":
                law += (
                    ". Full batches without dropout have no such noise; there the chain jumps where the curvature is too large "
                    "for its rate"
                )
        elif heat.order == "independent":
            law = "; for independent batches"
        else:
            law = f"; for reshuffled epochs of {self.steps_per_epoch} steps"
        cooler = min(1.0, 0.1 / max(heat.rho, 1e-30))
        if len(self._advice) == 1:
            rate = f"Use lr {cooler * self._advice[0]:.1g} (now {self._advice[0]:.2g})"
        elif self._advice:
            rate = f"Multiply every learning rate by {cooler:.1g}"
        else:
            rate = f"Use a learning rate {cooler:.1g} times this one"
        what = "minibatches heat this chain" if is_told else "the noise of the gradients heats this chain"
        return (
            f"{self.who}:{_mean_first(self._is_total(heat))} {what}. In the worst direction it samples about "
            f"{1 + heat.excess:.2g} times the variance asked for (that noise is {size}{law}). "
            f"{rate}, larger batches, or all data; bc.suggest_lr chooses rate, momentum and batch size so that they "
            "heat little. heat_guard=None silences this."
        )

    def _is_total(self, heat: Heat) -> bool:
        """Whether the loss may be a sum over the batch: in a well-specified model a mean has ``rho = K lr_eff k / 2``."""
        if self.steps_per_epoch is not None and heat.curvature > 0.01:
            specified = self.steps_per_epoch * heat.curvature / (2.0 * (1.0 - (self._momentum or 0.0)))
            return heat.rho > UNSPECIFIED * specified
        return heat.rho > TOTAL


def _mean_first(is_total: bool) -> str:
    """What to look at before the rate."""
    return (
        " check first that the loss is a mean over the batch: a sum over B data reads B * B times as hot at the same rate, and "
        "temperature 1/N belongs to a mean. If it is one,"
        if is_total
        else ""
    )


def _share_of_one(norms: Tensor) -> Tensor:
    """The share of the steps in which a norm is its median, as far as a clip makes them one.

    Args:
        norms: ``[steps]`` or ``[steps, parts]``.

    Returns:
        ``[]`` or ``[parts]``; 0 where the median is so small that it cannot be said.
    """
    middle = norms.median(0).values
    tolerance = (SAME_NORM * middle).clamp(min=CLIP_SLACK)
    return ((norms - middle).abs() < tolerance).double().mean(0) * (middle > CLIP_LEAST)


def _clipped_run(squares: Tensor) -> range:
    """The neighbouring leaves, such as those of one layer, whose common norm is one number in most steps; often none.

    Args:
        squares: squared norms ``[steps, leaves]``.
    """
    leaves = squares.shape[1]
    up_to = torch.nn.functional.pad(squares.cumsum(1), (1, 0))
    most, run = 0.5, range(0)
    for first in range(leaves - 1):
        shares = _share_of_one((up_to[:, first + 2 :] - up_to[:, first, None]).clamp(min=0.0).sqrt())
        if (share := float(shares.max())) > most:
            most, run = share, range(first, first + 2 + int(shares.argmax()))
    return run


def _guess(leaves: list[Leaf], window: int) -> float:
    """Seconds that a window may cost, before one has been paid for."""
    elements = sum([leaf.gradient.numel() for leaf in leaves])
    each = sum([LEARNED if isinstance(leaf.scale, Tensor) else PLAIN for leaf in leaves])
    look = STORED if elements <= DEFERRED else SKETCHED
    return (window + 1) * (look + each + ELEMENT * elements) + _algebra(elements, len(leaves))


def _algebra(elements: int, leaves: int) -> float:
    """Seconds of the algebra of one window."""
    return 2.5e-3 + 5e-5 * min(elements, BUCKETS) + 1e-6 * leaves**2
