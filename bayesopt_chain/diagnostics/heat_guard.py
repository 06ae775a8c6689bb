"""Watches a loop for the heat of its minibatches: when it looks, what it costs, and when it warns.

What a window says is in :mod:`bayesopt_chain.diagnostics.heat`; what a gradient is compared with, for chains, in
:mod:`bayesopt_chain.diagnostics._heat_of_chain`, for optimizers in :mod:`bayesopt_chain.optim`.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain import kinds, tracing
from bayesopt_chain._torch import foreach_norm, is_dtensor
from bayesopt_chain.checks import short
from bayesopt_chain.diagnostics import _heat_of_chain as of_chain
from bayesopt_chain.diagnostics.heat import Heat, Leaf, Sketch, read_heat
from bayesopt_chain.loop.sources import Watched
from bayesopt_chain.loop.step import Step

SURE = 3.0  # standard errors of two windows together
BENT = 1.5  # times the chain's own move: a Hessian known from one window may leave that much of it
SUM = 1e4  # rho above which the loss is probably a sum over the data and no mean
SAME_NORM = 1e-5  # relative difference below which two gradient norms are one: clipped


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

    Args:
        steps_per_epoch: batches in a pass over the data, where they are reshuffled in every epoch; the noise of an epoch then
            sums to zero, and heats less. Without it batches count as independent, the worst case. Leave it out where the
            loss itself draws (dropout): no epoch sums that noise to zero, and its heat would be understated.
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
        share: float = 0.015,
        window: int = 96,
        who: str = "bayesopt_chain",
    ) -> None:
        self.steps_per_epoch, self.order, self.above, self.share = steps_per_epoch, order, above, share
        self.window, self.who = window, who
        self.readings: list[Heat] = []
        self.has_warned = False
        self._lr: float | None = None
        self._last: Heat | None = None  # the last window, if it may have been hot
        self._momentum: float | None = None
        self._restart()

    def _restart(self) -> None:
        self._steps, self._next, self._last = 0, 32, None
        self._began: float | None = None
        self._spent = 0.0
        self._cost: float | None = None  # of a window, once one has been paid for
        self._absent = set[int]()  # parameters that had no gradient in some step of a window
        self._close()

    def _close(self) -> None:
        self._rows: list[tuple[Tensor, Tensor, Tensor]] = []
        self._sketch: Sketch | None = None
        self._rules: list[Any] | None = None  # how a chain's gradients are scaled, in a window
        self._seen: tuple[int, ...] = ()
        self._paid = 0.0

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or a guard that comes out of a file, begins anew: its window and its clock are those of another loop."""
        copy = object.__new__(HeatGuard)
        copy.__dict__.update(self.__dict__, readings=[*self.readings])
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
        tensors: list[Any] = optree.tree_leaves(grads)
        if not all([isinstance(x, Tensor) for x in tensors]):
            raise TypeError(f"HeatGuard.watch: grads must be a tree of tensors like params, got {short(grads)}")
        if not tracing.is_plain(*tensors) or any(map(is_dtensor, tensors)):
            raise ValueError(
                "heat_guard: the gradients of a step that is captured, runs under vmap or is sharded cannot be looked at one "
                "by one; run one plain chain with the guard first, or ask bc.diagnostics.heating or a Thermometer"
            )

        def leaves() -> list[Leaf]:
            if self._rules is None:
                self._rules = of_chain.rules_of(tx, params, state)
            return of_chain.leaves_of(self._rules, params, grads)

        self.look(leaves, None)
        if self._sketch is None:
            self._rules = None

    def attached(self, step: Any) -> Step:
        """The step that shows its gradients to this guard; :func:`bayesopt_chain.sample` calls it for its callbacks.

        Args:
            step: of :func:`bayesopt_chain.make_step`.

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
        return replace(step, source=Watched(step.source, self, step.tx))

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

    def look(self, leaves: Callable[[], Iterable[Leaf]], lr: float | None) -> None:
        """Called at every step, before parameters move.

        Args:
            leaves: gives the gradients of this step; called inside windows only.
            lr: the learning rate, for the advice; where it changes by more than a tenth the guard begins anew. ``None``
                where it is not known.
        """
        if (
            isinstance(lr, (int, float))
            and lr != self._lr
            and (self._lr is None or abs(lr - self._lr) > 0.1 * abs(self._lr))
        ):
            self._lr = lr
            self._steps, self._next, self._last = 0, 32, None
            self._close()
        self._steps += 1
        if self._sketch is None and self._steps < self._next and self._began is not None:
            return
        now = time.thread_time()
        if self._began is None:
            self._began = now
            return
        if self._sketch is None and not self._may_open(leaves, now):
            return
        self._take([*leaves()])
        spent = time.thread_time() - now
        self._spent += spent
        self._paid += spent

    def _may_open(self, leaves: Callable[[], Iterable[Leaf]], now: float) -> bool:
        """Whether a window can be afforded now; opens it."""
        assert self._began is not None
        if self._cost is None:  # a first guess: reading gradient and parameter, and the algebra of one window
            elements = sum(leaf.gradient.numel() for leaf in leaves())
            self._cost = self.window * (1e-4 + 4e-9 * elements) + 2e-2
        if self._spent + self._cost > self.share * (now - self._began):
            self._next = self._steps + 1 + self._steps // 32  # looking at the clock costs too
            return False
        found = [leaf for leaf in leaves() if leaf.known_by not in self._absent]
        self._sketch, self._seen = Sketch(found), tuple([leaf.known_by for leaf in found])
        return True

    @torch.no_grad()
    def _take(self, leaves: list[Leaf]) -> None:
        assert self._sketch is not None
        here = {leaf.known_by: leaf for leaf in leaves}
        absent = [i for i in self._seen if i not in here]
        if absent or not self._seen:  # a head that this batch does not use: look at the others
            self._absent.update(absent)
            return self._close()
        seen = [here[i] for i in self._seen]
        norm = torch.stack(foreach_norm([leaf.gradient for leaf in seen])).norm()
        self._rows.append((*self._sketch(seen), norm))
        if len(self._rows) <= self.window:
            return None
        gradients, positions, norms = (torch.stack(x).double().cpu() for x in zip(*self._rows))
        began = time.thread_time()
        if bool(torch.isfinite(gradients).all() and torch.isfinite(positions).all() and gradients.any()):
            filled = (gradients != 0).any(0)  # small models fill few buckets
            rules = {(leaf.momentum, 1.0 - leaf.momentum if leaf.first is None else leaf.first) for leaf in seen}
            momentum, first = min(rules)
            self._momentum = momentum
            heat = read_heat(
                gradients[:, filled],
                positions[:, filled],
                momentum,
                first=first if len(rules) == 1 else math.nan,
                steps_per_epoch=self.steps_per_epoch,
                order=self.order,
            )
            same = (norms - norms.median()).abs() < SAME_NORM * norms.median()
            self._judge(heat._replace(same_norm=float(same.double().mean())))
        self._cost = self._paid + time.thread_time() - began
        self._next = self._steps + 1 if self._last is not None and not self.has_warned else 4 * self._steps
        return self._close()

    def _judge(self, heat: Heat) -> None:
        self.readings.append(heat)
        last, self._last = self._last, heat if heat.rho + 2.0 * heat.standard_error > self.above else None
        both = None if last is None or self._last is None else together(last, heat)
        is_sure = (
            both is not None
            and both.excess > self.above
            and both.rho > max(SURE * both.standard_error, BENT * both.own)
        )
        if self.has_warned:
            return
        if heat.same_norm > 0.5:
            self.has_warned = True
            warnings.warn(
                f"{self.who}: {heat.same_norm:.0%} of the gradients have one and the same norm: a clip acts at nearly every "
                "step, and a chain that follows clipped gradients samples another distribution. Raise max_norm until it "
                "acts rarely, or leave clipping out at temperature > 0",
                stacklevel=2,
            )
        elif both is not None and is_sure:
            self.has_warned = True
            warnings.warn(self._warning(both), stacklevel=2)

    def _warning(self, heat: Heat) -> str:
        """The warning for a reading, with numbers and what to do."""
        if heat.order == "independent" and self.steps_per_epoch is None:
            memory = 1.0 / max(1.0 - (self._momentum or 0.0), 1e-9)
            law = (
                "; as for independent batches, the worst case. Epochs reshuffled as by a DataLoader heat less, and "
                f"far less where the momentum, here of {memory:.3g} steps, remembers an epoch: steps_per_epoch= counts that"
            )
        elif heat.order == "independent":
            law = "; for independent batches"
        else:
            law = f"; for reshuffled epochs of {self.steps_per_epoch} steps"
        cooler = min(1.0, 0.1 / max(heat.rho, 1e-30))
        rate = "a learning rate {:.1g} times this one" if self._lr is None else "lr {1:.1g} (now {2:.3g})"
        rate = rate.format(cooler, cooler * (self._lr or 0.0), self._lr or 0.0)
        total = (
            " The noise is so large that the loss may be a sum over the data: temperature 1/N belongs to a mean."
            if heat.rho > SUM
            else ""
        )
        return (
            f"{self.who}: minibatches heat this chain. In the worst direction it samples about {1 + heat.excess:.2g} times the "
            f"variance asked for (the batches spend {heat.rho:.2g} +- {heat.standard_error:.1g} of the noise budget{law}). "
            f"Use {rate}, larger batches, or all data; bc.suggest_chain chooses rate, momentum, batch size and order so that "
            f"they heat little. heat_guard=None silences this.{total}"
        )
