r"""Watch a loop for the heat of its minibatches, and warn once.

The guard reads windows of consecutive steps, from step 8 and from the steps 128, 256, 512 and so on. A window begins with the
gradients of 6 steps. It ends there if, of the covariance of these in the units of :mod:`bayesopt_chain.diagnostics.heat`, the
largest eigenvalue less the smallest of the five is small. One hot direction raises the largest alone, by its heat; noise that
is alike in ``n`` directions raises all of them by its trace over 5, and apart by the share ``4 sqrt(5 / n)`` of that. A full
one goes on with gradients and parameters of 80 steps, and warns if all of this holds:

    excess > above + 3.4 (96 / t)^2     at step t; the noise falls while a run is far from rest, so that early windows have to
                                        show more
    rho > 2 standard errors
    rho > 1.5 own                       the chain's own motion is not larger than what is left when it is taken out
    drift < 2                           the mean gradients of its halves are not those of a run that is still on its way
    ringing < 0.85                      what is left is noise, and no oscillation near the stability limit
    rho > half of that of the full window before, in the same units

A full window reads the elements ``A`` in which the gradient is largest, in at most 12 stretches of leaves: 4096, or one in 160
where that is more. Two sketches of 80 steps are then one gradient, finding ``A`` is one, and a window reads at most eight. What
it reads is a lower bound of the heat: ``C_AA`` is a principal submatrix of ``C``, whose largest eigenvalue is at most that of
``C`` (Cauchy's interlacing), and at least the share ``|u_A|^2`` of it for the worst direction ``u``. So models of up to 4096
elements in 32 leaves are read as they are, larger ones warn later and never more often.

Of a chain ``F_0``, how far a gradient moves each element in its own step, comes from an impulse through ``tx.update``; the
response of the links, ``F = b / a``, gives ``lr_eff = F(1)`` and the momentum ``mu = -a_1 / a_0``.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain import kinds, tracing
from bayesopt_chain._torch import is_dtensor
from bayesopt_chain.checks import short
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.diagnostics._response import EQUAL, gains, polynomials
from bayesopt_chain.diagnostics.findings import Row, judged
from bayesopt_chain.diagnostics.forces import inner, levels_of
from bayesopt_chain.diagnostics.heat import FEW, Heat, Leaf, Sketch, Stretch, loudest, read_heat
from bayesopt_chain.loop.step import Step
from bayesopt_chain.matching.response import Noise, SelfContainedSampler

SHORT = 6  # steps after which a window ends where nothing can be hot
WINDOW = 80  # steps after these of a full window
SHARE = 160  # one in so many elements is read then
BOUND = 0.25  # the upper bound of the heat below which it ends then
STARTS = (8, 128)  # first steps of windows; from the second on they double
EARLY = 3.4  # what the excess must show besides at the end of the first window
SURE = 2.0  # standard errors
BENT = 1.5  # times the chain's own motion: a Hessian known from one window may leave that much of it
DRIFT = 2.0  # standard deviations
RINGS = 0.85  # autocorrelation from which what is left is an oscillation of the chain
GIVE_UP = 4  # windows, after which it says that it has seen nothing
SKIPPED = 0.1  # share of a window's steps that may be passed over
LONG = 30.0  # steps that the momentum remembers, from which reshuffled epochs may cancel most of the noise
TOTAL = 20.0  # rho from which the loss may be a sum over the batch


COOLER = ", larger batches, or all data; bc.suggest_lr chooses a rate at which they heat little"
WARNING = (  # of each kind the first that holds, one after the other
    Row("sum", lambda m: m.rho > TOTAL,
        "check first that the loss is a mean over the batch: a sum over B data reads B * B times as hot at the same rate, and "
        "temperature 1/N belongs to a mean. If it is one, "),
    Row("what", lambda m: m.steps, "minibatches heat this chain"),
    Row("what", lambda m: True, "the noise of the gradients heats this chain"),
    Row("number", lambda m: True,
        ". In the worst direction it samples about {times:.2g} times the variance asked for (that noise is {rho:.2g} +- "
        "{error:.1g} times what the sampler itself injects; by the law of "),
    Row("law", lambda m: m.order == "independent", "independent batches)"),
    Row("law", lambda m: m.steps, "reshuffled epochs of {steps} steps)"),
    Row("law", lambda m: True,
        "independent batches, the worst case: steps_per_epoch= counts that reshuffled epochs heat less)"),
    Row("do", lambda m: m.order == "reshuffled" and not m.steps and m.memory > LONG,
        ". Pass steps_per_epoch=, the optimizer steps in a pass over the data: a momentum that remembers {memory:.3g} steps "
        "may cancel nearly all of that noise"),
    Row("do", lambda m: m.lr is None, ". Multiply every learning rate by {cooler:.1g}" + COOLER),
    Row("do", lambda m: True, ". Use lr {lower:.1g} (now {lr:.2g})" + COOLER),
)  # fmt: skip


class HeatGuard:
    """Watches a loop for the heat of its minibatches, and warns once, with numbers.

    Every optimizer of :mod:`bayesopt_chain.optim` has one at T > 0. It reads the noise of the batches from the gradients of
    consecutive steps, from step 8 to 93 and from the steps 128, 256, 512 and so on: 6 steps where nothing can be hot and 86
    elsewhere, of these 80 in a part of large models, so that a window reads at most eight gradients. Nothing is said of a run
    that is still far from rest. Learning rates and temperatures may change at every step; where they do, the heat is that of
    the window's mean rate, and parameter groups are taken to change in proportion.

    Args:
        steps_per_epoch: optimizer steps in a pass over the data, where they are reshuffled in every epoch: the number of
            batches, divided by that of the accumulated ones. The noise of an epoch then sums to zero, and heats less. Without
            it batches count as independent, the worst case. Leave it out where no epoch sums the noise to zero: dropout,
            random augmentation, samplers with replacement.
        order: ``"reshuffled"`` or ``"independent"``.
        above: excess of the variance, relative to the one asked for, from which it warns.
        who: how the warning begins.

    Attributes:
        readings: the :class:`Heat` of every window so far, newest last.
        has_warned: whether it has warned, after which it looks no more.

    Example:
        >>> import warnings, torch
        >>> source, guard, w = torch.Generator().manual_seed(0), HeatGuard(), torch.zeros(10)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     for _ in range(100):
        ...         guard.look(lambda keys: [Leaf(0, 5 * torch.randn(10, generator=source), w, 1.0, 1.0, 0.9, 0.1)])
        >>> len(caught), "times the variance" in str(caught[0].message)
        (1, True)
    """

    @kinds.takes(
        steps_per_epoch=kinds.WHOLE,
        order=kinds.one_of("reshuffled", "independent"),
        above=kinds.real("[0, inf]"),
        who=kinds.TEXT,
    )
    def __init__(
        self,
        steps_per_epoch: int | None = None,
        order: str = "reshuffled",
        *,
        above: float = 0.6,
        who: str = "bayesopt_chain",
    ) -> None:
        self.steps_per_epoch, self.order, self.above, self.who = steps_per_epoch, order, above, who
        self.readings: list[Heat] = []
        self.has_warned = self.has_left_out = False
        self._steps, self._start, self._failed = 0, STARTS[0], 0
        self._absent = set[int]()  # parameters that are left out
        self._last: float | None = None  # rho of the last full window, over its rate
        self._close()

    def _close(self) -> None:
        self._keys = list[int]()  # of the leaves of an open window
        self._missed = set[int]()
        self._scales = list[Any]()
        self._gradients: Any = None  # the sketch of them
        self._positions: Sketch | None = None  # of a full one
        self._stretches = list[Stretch]()
        self._rules: list[Any] | None = None  # of a chain
        self._skipped = 0
        self._empty()

    def _empty(self) -> None:
        self._rows: list[Tensor] = []  # of the gradients, for Sketch.read
        self._places: list[Tensor] = []  # of the parameters
        self._rates: list[tuple[float, float]] = []  # rate and temperature of the first leaf

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or a guard that comes out of a file, begins anew: its window is that of another loop."""
        return HeatGuard(self.steps_per_epoch, self.order, above=self.above, who=self.who).__dict__

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
        links = _links(tx)
        own = [x for x in links if isinstance(x.response, SelfContainedSampler)]
        if own or not any(isinstance(x.response, Noise) for x in links):
            what = own[0] if own else f"this {type(inner(tx, None)[0]).__name__}"
            raise ValueError(
                f"heat_guard: {what} has no matched noise that the batches' could be compared with; leave heat_guard out, or "
                "take a chain such as bc.sghmc(...)"
            )

    def watch(self, tx: Any, params: Any, state: Any, grads: Any) -> None:
        """Look at a step of a chain, before parameters move; :func:`bayesopt_chain.make_step` calls it.

        Args:
            tx: the chain.
            params, state: of the chain, before the step.
            grads: a tree like the parameters.

        Raises:
            ValueError: gradients whose numbers nobody may look at (captured, under ``vmap``), or sharded ones.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> tx, w = bc.sghmc(0.1, temperature=0.01), torch.zeros(3)
            >>> guard, state = bc.diagnostics.HeatGuard(), tx.init(w)
            >>> for _ in range(100):
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
        if self._rules is None or any(
            callable(x) for link in _links(tx) for x in getattr(link, "__dict__", {}).values()
        ):
            self._rules = _rules(tx, params, state)
        trees: list[list[Any]] = [optree.tree_leaves(tree, none_is_leaf=True) for tree in (grads, params)]
        usable = [g is not None and g.layout is torch.strided for g in trees[0]]
        each = [*enumerate(zip(self._rules, *trees, usable))]
        self.look(lambda keys: [Leaf(j, g, p, *rule) for j, (rule, g, p, is_usable) in each if rule and is_usable])

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
            has_own = isinstance(step, Step) or hasattr(step, "optimizer")
            raise ValueError(
                "sample: a HeatGuard among callbacks looks at the gradients of a step of make_step; this "
                f"{type(step).__name__} "
                + (
                    "has a heat guard of its own: leave this one out"
                    if has_own
                    else "shows none: run one plain chain first"
                )
            )
        self.require(step.tx)
        if self.steps_per_epoch is None and getattr(batches, "order", None) == self.order == "reshuffled":
            self.steps_per_epoch = round(batches.steps_per_epoch)
        return replace(step, heat_guard=self)

    def __call__(self, it: Any) -> None:
        """Do nothing: the step that the guard is attached to shows it the gradients."""

    # of every loop

    def sleeps(self) -> bool:
        """Count a step in which nothing is looked at; a loop that asks this first saves the call of :meth:`look`.

        Returns:
            Whether the step was counted; if not, :meth:`look` has to be called.

        Example:
            >>> HeatGuard().sleeps()  # until step 8
            True
        """
        if self._steps + 1 >= self._start:
            return False
        self._steps += 1
        return True

    @torch.no_grad()
    def look(self, leaves: Callable[[Collection[int]], Iterable[Leaf]]) -> None:
        """Look at a step, before parameters move.

        Args:
            leaves: gives the parameters with gradient and noise of this step; called inside windows only, with the keys of
                those that are needed, or with none for all. It may give more. But for the first of them, and in the last step
                of a window, ``rate``, ``root`` and what follows may be those of an earlier step.

        Example:
            >>> import torch
            >>> guard = HeatGuard()
            >>> guard.look(lambda keys: [Leaf(0, torch.ones(3), torch.zeros(3), 1.0, 0.1, 0.9, 0.1)])
            >>> guard.readings
            []
        """
        if self.sleeps():
            return
        self._steps += 1
        seen = [x for x in leaves(self._keys) if x.key not in self._absent]
        keys = [x.key for x in seen]
        if not self._keys and seen:
            self._keys, self._units = keys, [(x.rate, x.temperature) for x in seen]
            self._lrs, self._momentum = {x.lr for x in seen}, max([x.momentum for x in seen])
            gradients, numbers = [x.gradient for x in seen], [math.sqrt(x.rate / (2.0 * x.temperature)) for x in seen]
            is_one = min(numbers) == max(numbers)  # of Adam's kin the factors are tensors already
            self._common = numbers[0] if is_one else 1.0
            self._scales = [x.root if is_one else number * x.root for x, number in zip(seen, numbers)]
            self._gradients = Sketch(gradients, self._scales, self._common)
        if keys != self._keys or not seen:
            here = dict(zip(keys, seen))
            if (missing := set(self._keys) - here.keys()) or not seen:
                return self._skip(missing)
            seen = [here[key] for key in self._keys]
        self._rates.append((seen[0].rate, seen[0].temperature))
        if self._positions is None:
            self._rows.append(self._gradients.row([x.gradient for x in seen]))
        else:
            self._rows.append(self._gradients.row([x.of(seen[x.leaf].gradient) for x in self._stretches]))
            self._places.append(self._positions.row([x.of(seen[x.leaf].param) for x in self._stretches]))
        if len(self._rows) == (SHORT if self._positions is None else WINDOW):
            self._read(seen)
        return None

    def _go_on(self, seen: list[Leaf]) -> None:
        """Choose what a full window reads of the leaves."""
        gradients = [x.gradient for x in seen]
        size = sum([x.numel() for x in gradients])
        chosen = loudest(gradients, self._scales, max(FEW, size // SHARE))
        scales = [
            x.of(s) if isinstance(s, Tensor) and s.dim() else s for x, s in ((x, self._scales[x.leaf]) for x in chosen)
        ]
        sizes = [0.5 / (self._units[x.leaf][1] * self._common * abs(scale)) for x, scale in zip(chosen, scales)]
        self._gradients = Sketch([x.of(gradients[x.leaf]) for x in chosen], scales, self._common)
        self._positions = Sketch([x.of(seen[x.leaf].param) for x in chosen], sizes)
        leaves = sorted({x.leaf for x in chosen})
        self._stretches = [x._replace(leaf=leaves.index(x.leaf)) for x in chosen]
        self._keys = [self._keys[i] for i in leaves]
        self._units = [self._units[i] for i in leaves]
        self._empty()

    def _skip(self, missing: set[int]) -> None:
        """Pass over a step; a window with too many of them is given up, and the next one leaves out what was missing."""
        self._skipped += 1
        self._missed |= missing
        if self._skipped <= SKIPPED * WINDOW:
            return
        if len(self._missed) < len(self._keys):
            self._absent |= self._missed
        self._close()
        self._failed += 1
        if self._failed == GIVE_UP and not self.readings:
            self._warn(
                f"the heat of the gradients' noise was not looked at: {GIVE_UP} windows of {WINDOW} steps were begun, and in "
                "each the parameters that have a gradient and a temperature changed too often. Look at it in a run in which "
                "they stay the same"
            )

    def _read(self, seen: list[Leaf]) -> None:
        """Read a window that is complete or may end."""
        G, norms = self._gradients.read(self._rows)
        centred = G - G.mean(0)
        total, bound = float(centred.square().sum()), math.nan
        if self._positions is None and math.isfinite(total):
            each = torch.linalg.eigvalsh(centred @ centred.T)
            bound = float(each[-1] - each[1]) / (SHORT - 1)
        if self._positions is None and _is_clipped(norms, seen) and total > 1e-6 * float(G.square().sum()):
            self._warn(
                "most gradients have one and the same norm: a clip acts at nearly every step, and a chain that follows clipped "
                "gradients samples another distribution. Raise max_norm until it acts rarely, or leave clipping out at "
                "temperature > 0"
            )
        elif self._positions is None and bound > BOUND:  # go on
            return self._go_on(seen)
        elif self._positions is None and bound <= BOUND:
            self.readings.append(Heat(bound, math.inf, 0.0, 0.0, bound, 0.0, 0.0, self._steps))
        elif self._positions is not None and math.isfinite(total):
            rates, temperatures = torch.tensor(self._rates, dtype=torch.float64, device="cpu").T
            X = self._positions.read(self._places)[0]
            filled = (G != 0).any(0)  # small models fill few buckets
            read = [x.of(seen[x.leaf].gradient) for x in self._stretches]
            self._judge(
                read_heat(
                    G[:, filled],
                    X[:, filled],
                    self._momentum,
                    seen[0].first,
                    steps_per_epoch=self.steps_per_epoch if self.order == "reshuffled" else None,
                    rates=rates / self._units[0][0],
                    temperatures=temperatures / self._units[0][1],
                    elements=sum([int(x.count_nonzero()) for x in read]),
                )._replace(end=self._steps),
                float((rates / temperatures).mean()),
                self._momentum,
                self._lrs if bool((rates == rates[0]).all()) else set(),
            )
        self._close()
        while self._start <= self._steps:
            self._start = max(STARTS[1], 2 * self._start)
        return None

    def _judge(self, heat: Heat, rate: float, momentum: float, lrs: set[float | None]) -> None:
        """Warn of a full window that is hot, and remember it."""
        self.readings.append(heat)
        is_falling = self._last is not None and heat.rho / rate < self._last / 2
        self._last = heat.rho / rate
        least = self.above + EARLY * (96 / heat.end) ** 2
        is_sure = heat.rho > max(SURE * heat.standard_error, BENT * heat.own)
        if heat.excess > least and is_sure and max(heat.drift / DRIFT, heat.ringing / RINGS) < 1 and not is_falling:
            self._warn(self._text(heat, momentum, lrs))

    def _warn(self, text: str) -> None:
        if not self.has_warned:
            self.has_warned, self._start = True, sys.maxsize
            warnings.warn(f"{self.who}: {text}. heat_guard=None silences this", stacklevel=5)

    def _text(self, heat: Heat, momentum: float, lrs: set[float | None]) -> str:
        """The warning for a reading: its number and error, and what to do."""
        m = SimpleNamespace(
            rho=heat.rho, error=heat.standard_error, times=1 + heat.excess, order=self.order, steps=self.steps_per_epoch,
            memory=1.0 / max(1.0 - momentum, 1e-9), cooler=min(1.0, 0.1 / heat.rho), lr=None,
        )  # fmt: skip
        if len(lrs) == 1 and None not in lrs:
            (m.lr,) = lrs
            m.lower = m.cooler * m.lr
        return "".join(part.says for part in judged(WARNING, m, set()))

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


def _is_clipped(norms: Tensor, seen: list[Leaf]) -> bool:
    """Whether most norms are their median. torch divides by the norm plus 1e-6; half precision has few norms anyway."""
    middle = float(norms.median())
    alike = (norms - middle).abs() < max(1e-5 * middle, 1.1e-6)
    return middle > 4e-4 and float(alike.double().mean()) > 0.5 and seen[0].gradient.dtype.itemsize >= 4


def _links(tx: Any) -> Iterable[Any]:
    tx, _ = inner(tx, None)
    return tx.links if isinstance(tx, Chain) else ()


def _rules(tx: Any, params: Any, state: Any) -> list[tuple[float, float, float, float, float | Tensor] | None]:
    """Of each leaf ``rate``, ``temperature``, ``momentum``, ``first`` and ``root`` of :class:`Leaf`; ``None`` without noise.

    Raises:
        ValueError: the elements act on each other, as behind a dense preconditioner.
    """
    tx, state = inner(tx, state)
    levels, leaves = levels_of(tx, state), optree.tree_leaves(params, none_is_leaf=True)
    out: list[tuple[float, float, float, float, float | Tensor] | None] = [None] * len(leaves)
    numbers = [j for j, p in enumerate(leaves) if p is not None]
    for j, gain in zip(numbers, gains(tx, params, state) if levels else ()):
        if j not in levels or not bool((gain > 0).all()):
            continue
        x = polynomials(tx, state, j)
        first, momentum = x.b[0] / (sum(x.b) / sum(x.a)), -x.a[1] if len(x.a) > 1 else 0.0
        each = gain / first  # lr_eff P
        rate = float(each.mean())
        is_one = float(each.max() - each.min()) <= EQUAL * float(each.max())
        out[j] = rate, levels[j], momentum, first, 1.0 if is_one else (each / rate).sqrt().float()
    return out
