r"""Watch a loop for the heat of its minibatches, and warn once.

The guard reads windows of consecutive steps, from step 8 and from the steps 128, 256, 512 and so on. A full window has 86
steps, and one in which nothing can be hot ends before, after ``n`` of 6, 20, 40 or 60 of them: if, of the covariance of their
gradients in units of the noise that the chain injects at its largest rate so far, the largest eigenvalue less the smallest
that is not 0 by centring is at most 0.4, 0.7, 0.8 or 0.85 of the excess that the full window would have to show (with 0.6 for a
larger ``above``). One hot direction raises the largest alone, by its heat times ``chi^2_{n-1} / (n-1)``, and the chain's own
motion raises it besides; noise that is alike in ``k`` directions raises all of them by its trace over ``n - 1``, and apart by
the share ``4 sqrt((n - 1) / k)`` of that. A full window reads the last 80 steps, and warns if all of this holds of them:

    excess > above + 3.4 (96 / t)^2     at step t; the noise falls while a run is far from rest, so that early windows have to
                                        show more
    rho > 2 standard errors
    rho > 4 own                         the chain's own motion is not larger than what is left when it is taken out
    drift < 2                           the mean gradients of its halves are not those of a run that is still on its way
    ringing < 0.85                      what is left is noise, and no oscillation near the stability limit
    rho > half of that of the full window before, in the same units

A window reads gradients and parameters in the elements ``A`` in which the first gradient is largest, in at most 12 stretches of
leaves: 4096, or one in 160 where that is more. That is a little more than one gradient in 86 steps, finding ``A`` is one, and
the norms that tell a clip, taken as long as most are alike, are at most six. What it reads is a lower bound of the heat:
``C_AA`` is a principal submatrix of ``C``, whose largest eigenvalue is at most that of ``C`` (Cauchy's interlacing), and at
least the share ``|u_A|^2`` of it for the worst direction ``u``. So models of up to 4096 elements in 32 leaves are read as they
are; larger ones warn later, never more often.

Of a chain the response of the links, ``F = b / a``, gives ``lr_eff = F(1)``, the momentum ``mu = -a_1 / a_0`` and how far a
gradient moves an element in its own step, ``b_0 / a_0``; behind a preconditioner an impulse through ``tx.update`` gives that of
each element.

**The heat of a window.** The gradient of a batch is ``g_t = G(theta_t) + n_t``, where ``G`` is the gradient of all data and
``n_t`` the noise of the batch, of covariance ``C``. With the displacement ``d_t = theta_{t+1} - theta_t`` and the Hessian
``H``,

    D_t = g_{t+1} - g_t = H d_t + n_{t+1} - n_t,        r_t = D_t - H d_t,        C = - <r_t r_{t+1}> = <r_t^2> / 2.

``H`` is estimated on the same steps by instrumental variables, because ``d_t`` contains ``n_t``. The instruments are the
displacement before, and the noise that the chain injected: ``d_t = mu d_{t-1} - lr_eff P (f g_t + (1 - mu - f) g_{t-1}) -
noise`` gives it. ``H`` is used only where it explains differences that it was not fitted to.

``rho = lr_eff C / (2 T)`` is the share of the noise budget ``2 T / lr_eff`` that the batches spend. With ``y = lr k`` for the
curvature ``k`` it raises the variance ``T / k`` by the factor ``1 + excess``,

    excess = rho 2 (1 + mu) / (2 (1 + mu) - y)                                          independent batches,

and by less where epochs are reshuffled, whose noise sums to zero (:func:`excess_variance`).

A step is reduced to ``S g`` and ``S theta``, where ``S`` gives the elements random signs and adds them up in ``B = 256``
buckets, so that inner products are right in expectation (Charikar, Chen and Farach-Colton, 2002). The variance along a
direction of the ``n`` elements contains a share of all others there, which is subtracted:

    E[q' S C S' q] = variance along q + (1 - B / n) tr(C) / B.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import pairwise, repeat
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain import checks, tracing
from bayesopt_chain._torch import flattened, innermost_transformation, is_dtensor, recording_mode
from bayesopt_chain.diagnostics._response import (
    Polynomials,
    clipped,
    clips_of,
    gains,
    inner,
    levels_of,
    links_of,
    polynomials,
)
from bayesopt_chain.diagnostics.findings import Row, judged
from bayesopt_chain.diagnostics.heating import added
from bayesopt_chain.matching.response import Noise, SelfContainedSampler
from bayesopt_chain.trees import leaves_of

SHORT = 6  # first steps of a window, after which it may end; a full one reads those behind them
WINDOW = 80  # steps after these of a full window
SHARE = 160  # one in so many elements is read then
# the shares of the excess that a window must show, and the steps after which it ends where what it shows is at most that
ENDS = {SHORT: 0.4, 20: 0.7, 40: 0.8, 60: 0.85}
STARTS = (8, 128)  # first steps of windows; from the second on they double
ABOVE = 0.6  # excess from which it warns
EARLY = 3.4  # what the excess must show besides at the end of the first window
SURE = 2.0  # standard errors
BENT = 4.0  # times the chain's own motion, of which a Hessian that is known from one window, and changes in it, leaves as much
DRIFT = 2.0  # standard deviations
RINGS = 0.85  # autocorrelation from which what is left is an oscillation of the chain
GIVE_UP = 4  # windows, after which it says that it has seen nothing
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
    Row("do", lambda m: True, ". Multiply every learning rate by {cooler:.1g}" + COOLER),
)  # fmt: skip


class HeatGuard:
    """Watches a loop for the heat of its minibatches, and warns once, with numbers.

    Every optimizer of :mod:`bayesopt_chain.optim` has one at T > 0. It reads the noise of the batches from the gradients of
    consecutive steps, from step 8 to 93 and from the steps 128, 256, 512 and so on: 6, 20, 40 or 60 steps where nothing can be
    hot and 86 elsewhere, of these 80 in a part of large models, so that a window reads at most eight gradients. Nothing is
    said of a run that is still far from rest. Learning rates and temperatures may change at every step; where they do, the heat
    is that of the window's mean rate, and parameter groups are taken to change in proportion.

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

    @checks.takes(
        steps_per_epoch=checks.WHOLE,
        order=checks.one_of("reshuffled", "independent"),
        above=checks.number("[0, inf]"),
        who=checks.TEXT,
    )
    def __init__(
        self,
        steps_per_epoch: int | None = None,
        order: str = "reshuffled",
        *,
        above: float = ABOVE,
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
        """Forget the window that is open, and wait for the next."""
        self._window: Window | None = None
        self._chain: _Chain | None = None
        while self._start <= self._steps:
            self._start = max(STARTS[1], 2 * self._start)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or a guard that comes out of a file, begins anew: its window is that of another loop."""
        return HeatGuard(self.steps_per_epoch, self.order, above=self.above, who=self.who).__dict__

    # of a chain: make_step(heat_guard=guard)

    @checks.takes()
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
        kinds = {type(link.response) for link in links_of(tx)}
        if Noise not in kinds or SelfContainedSampler in kinds:
            raise ValueError(
                f"heat_guard: {checks.short(tx)} has no matched noise that the batches' could be compared with; leave "
                "heat_guard out, or take a chain such as bc.sghmc(...)"
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
        # what tracing.is_plain() asks, in two calls: a step between windows does nothing else
        is_plain = innermost_transformation() is None and recording_mode() is None
        if is_plain and self.sleeps():
            return
        if self._chain is None or self._chain.is_scheduled or not is_plain:
            self._chain = _Chain(tx, params, state, grads)
        self.look(partial(self._chain.leaves, params, grads))

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
                of a window, ``rate``, ``root`` and what follows may be those of an earlier step. Those with a rate of 0 do not
                move, and are passed over.

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
        w = self._window
        here = {x.key: x for x in leaves(w.wanted if w else ()) if x.key not in self._absent and x.rate}
        if w is None and here:
            w = self._window = Window([*here.values()])
        missing = w.leaves.keys() - here.keys() if w else set[int]()
        if w is None or missing:
            # left out from here on, unless that is everything, as in a step without gradients
            self._absent |= missing if here else set()
            return self._fail(
                "the parameters that have a gradient and a temperature changed from one step to the next. Look at it in a run "
                "in which some stay the same"
            )
        w.add(here)
        if len(w.rates) in (*ENDS, SHORT + WINDOW):
            self._read(w, here)
        return None

    def _fail(self, why: str) -> None:
        """Give up a window, and say so once where none was read."""
        self._close()
        self._failed += 1
        if self._failed == GIVE_UP and not self.readings:
            self._warn(
                f"the heat of the gradients' noise was not looked at: {GIVE_UP} windows were begun, and in each {why}"
            )

    def _read(self, w: Window, here: dict[int, Leaf]) -> None:
        """Read a window that is complete, or has its first steps and may end."""
        G, X = w.sketch.read()[:, -WINDOW:]
        centred, leaves = G - G.mean(0), [*w.leaves.values()]
        spread, hotness = float(centred.square().sum()), [rate / temperature for rate, temperature in w.rates[-WINDOW:]]
        if not math.isfinite(spread + sum(w.norms)):
            self._fail("a gradient was NaN or infinite. Look for rows of the data with NaN, and leave them out")
        elif len(w.rates) in ENDS:
            each = torch.linalg.eigvalsh(centred @ centred.T).tolist()
            # the units of the sketch are those of the window's first step
            bound = max(hotness) / hotness[0] * (each[-1] - each[1]) / (len(G) - 1)
            if len(G) == SHORT and w.is_clipped and spread > 1e-6 * float(G.square().sum()):
                self._warn(
                    "most gradients have one and the same norm: a clip acts at nearly every step, and a chain that follows "
                    "clipped gradients samples another distribution. Raise max_norm until it acts rarely, or leave clipping "
                    "out at temperature > 0"
                )
            elif bound > ENDS[len(G)] * least(min(self.above, ABOVE), self._steps + SHORT + WINDOW - len(G)):
                return
            else:
                self.readings.append(Heat(bound, math.inf, 0.0, 0.0, bound, 0.0, 0.0, self._steps))
        else:
            filled = (G != 0).any(0)  # small models fill few buckets
            momentum = max([x.momentum for x in leaves])
            rates, temperatures = torch.tensor(w.rates[-WINDOW:], dtype=torch.float64, device="cpu").T
            heat = read_heat(
                G[:, filled],
                X[:, filled],
                momentum,
                here[leaves[0].key].first,
                rates / leaves[0].rate,
                temperatures / leaves[0].temperature,
                steps_per_epoch=self.steps_per_epoch if self.order == "reshuffled" else None,
                elements=int(w.sketch.newest.chunk(2)[0].count_nonzero()),
            )._replace(end=self._steps)
            self._judge(heat, sum(hotness) / len(hotness), momentum)
        self._close()

    def _judge(self, heat: Heat, rate: float, momentum: float) -> None:
        """Remember a full window, and warn where it is hot."""
        self.readings.append(heat)
        is_falling = self._last is not None and heat.rho / rate < self._last / 2
        self._last = heat.rho / rate
        is_sure = heat.rho > max(SURE * heat.standard_error, BENT * heat.own)
        if (
            heat.excess <= least(self.above, heat.end)
            or not is_sure
            or max(heat.drift / DRIFT, heat.ringing / RINGS) >= 1
            or is_falling
        ):
            return
        m = SimpleNamespace(
            rho=heat.rho, error=heat.standard_error, times=1 + heat.excess, order=self.order, steps=self.steps_per_epoch,
            memory=1.0 / max(1.0 - momentum, 1e-9), cooler=min(1.0, 0.1 / heat.rho),
        )  # fmt: skip
        self._warn("".join(part.says for part in judged(WARNING, m, set())))

    def _warn(self, text: str) -> None:
        if not self.has_warned:
            self.has_warned, self._start = True, sys.maxsize
            checks.warn(f"{self.who}: {text}. heat_guard=None silences this")


def least(above: float, end: int) -> float:
    """The excess that a window has to show which ends at this step."""
    return above + EARLY * (96 / end) ** 2


def _are_clipped(norms: Sequence[float]) -> bool:
    """Whether most norms are their median; torch divides by the norm plus 1e-6."""
    middle = sorted(norms)[(len(norms) - 1) // 2]
    return middle > 4e-4 and sum([abs(x - middle) < max(1e-5 * middle, 1.1e-6) for x in norms]) > len(norms) / 2


Rule = tuple[float, float, float, float, float | Tensor]


class _Chain:
    """What a window needs to know of a chain; found once, since a step of small leaves takes less time than that.

    Args:
        tx: the chain.
        params, state, grads: of a step.

    Attributes:
        rules: by the numbers of the leaves, :func:`_rules`.
        clips: links that change gradients before anything else does.
        is_scheduled: whether the rules are those of one step alone.

    Raises:
        TypeError, ValueError: its gradients cannot be looked at.
    """

    def __init__(self, tx: Any, params: Any, state: Any, grads: Any) -> None:
        tensors = [x for x in leaves_of(grads)[0] if x is not None]
        if not all([isinstance(x, Tensor) for x in tensors]):
            raise TypeError(f"HeatGuard.watch: grads must be a tree of tensors like params, got {checks.short(grads)}")
        if not tracing.is_plain(*tensors) or any(map(is_dtensor, tensors)):
            raise ValueError(
                "heat_guard: the gradients of a step that is captured, runs under vmap or is sharded cannot be looked at one "
                "by one; run one plain chain with the guard first, or ask bc.diagnostics.heating"
            )
        self.rules, self.clips = _rules(tx, params, state), clips_of(tx)
        self.is_scheduled = any(callable(x) for link in links_of(tx) for x in getattr(link, "__dict__", {}).values())

    def leaves(self, params: Any, grads: Any, keys: Collection[int]) -> list[Leaf]:
        """The leaves with these numbers, or all, as far as they have noise and a dense gradient."""
        grads, params = (leaves_of(x)[0] for x in (clipped(self.clips, grads), params))
        return [
            Leaf(j, grads[j], params[j], *self.rules[j])
            for j in keys or self.rules
            if j in self.rules and grads[j] is not None and grads[j].layout is torch.strided
        ]


def _rules(tx: Any, params: Any, state: Any) -> dict[int, Rule]:
    """Of each leaf with noise ``rate``, ``temperature``, ``momentum``, ``first`` and ``root`` of :class:`Leaf`.

    Raises:
        ValueError: the elements act on each other, as behind a dense preconditioner.
    """
    tx, state = inner(tx, state)
    levels, leaves = levels_of(tx, state), leaves_of(params)[0]
    numbers = [j for j, p in enumerate(leaves) if p is not None]
    each, known, out = polynomials(tx, state) if levels else [], dict[Any, Rule | None](), dict[int, Rule | None]()
    for j, gain in zip(numbers, gains(tx, params, state) if levels else ()):
        if j not in levels or not gain.numel():
            continue
        # where one number stands for all elements, leaves with the same links have one rule
        is_number = gain.ndim > 0 and not any(gain.stride())
        key = each[j], levels[j], None if is_number else j
        if key not in known:
            known[key] = _rule(each[j], levels[j], gain[(0,) * gain.ndim] if is_number else gain)
        out[j] = known[key]
    return {j: rule for j, rule in out.items() if rule}


def _rule(x: Polynomials, temperature: float, gain: Tensor) -> Rule | None:
    """The rule of a leaf from its response, and how far a unit gradient moves each element at once; ``None`` if some stay."""
    low, high = map(float, gain.aminmax())
    if not (low > 0.0 or high < 0.0):
        return None
    first, momentum = x.b[0] / (sum(x.b) / sum(x.a)), -x.a[1] if len(x.a) > 1 else 0.0
    mean = float(gain.mean())
    root = 1.0 if high - low <= 1e-6 * max(high, -low) else (gain / mean).sqrt().float()
    return abs(mean) / first, temperature, momentum, first, root if low > 0.0 else -root  # lr_eff P = |gain| / first


BUCKETS = 256
TOGETHER = 2**18  # numbers that a sketch adds up at once
FEW = 4096  # elements which a window may read of any model
LEAVES, STRETCHES = 32, 12  # leaves up to which a full window may read all, and stretches that it reads of more
FOLDS = 4  # parts of a window; directions and H of each come from the others
LAGS = (3, 4, 5)  # at which second differences of white noise are uncorrelated
DIRECTIONS = 2  # of the largest noise, and of the largest differences


class Leaf(NamedTuple):
    """One parameter in one step, as the guard needs it.

    Attributes:
        key: by which the parameter is known in every step.
        gradient: of the loss, before any transformation.
        param: the parameter, before the step.
        rate: ``lr_eff`` without the preconditioner.
        temperature: ``T``.
        momentum: ``mu`` of the chain.
        first: ``f``, the share of ``lr_eff`` that a gradient moves in its own step.
        root: ``sqrt(P)``, a number or a tensor like the gradient, negative where the loss is maximised.
    """

    key: int
    gradient: Tensor
    param: Tensor
    rate: float
    temperature: float
    momentum: float
    first: float
    root: float | Tensor = 1.0


class Heat(NamedTuple):
    """The heat that one window of steps shows.

    Attributes:
        rho: share of the noise budget that the batches spend in the worst direction; of a window that was ended early because
            nothing can be hot, an upper bound.
        standard_error: of ``rho``, from eight parts of the window; infinite for an upper bound.
        own: what the chain's own motion adds to half the variance of ``D_t``, in units of ``rho``.
        curvature: ``y = lr k`` in that direction, as far as the window knows it; 0 where it does not.
        excess: relative increase of the variance in that direction.
        drift: mean gradient of the first half times that of the second, over its standard deviation at rest.
        ringing: autocorrelations of the differences of ``r_t`` at lags 3, 4 and 5, in absolute value, added up. The noise of
            batches has none but for chance, 0.3 +- 0.15; an oscillation that the estimated ``H`` does not explain has.
        end: the step at which the window ended.
    """

    rho: float
    standard_error: float
    own: float
    curvature: float
    excess: float
    drift: float
    ringing: float
    end: int = 0


def excess_variance(rho: float, momentum: float, curvature: float, steps_per_epoch: int | None = None) -> float:
    """Relative increase of the variance by the noise of batches, mean over an epoch.

    A direction ``x = (theta, lr v)`` follows ``x' = M x - (1, -1) lr n``,  ``M = ((1 - y, -mu), (y, mu))``, and the noise
    ``n`` of a reshuffled epoch of ``K`` steps sums to zero (:mod:`bayesopt_chain.diagnostics.heating`); its variance is
    ``lr^2 C = 2 rho (1 - mu) y`` in units of ``T / k``.

    Args:
        rho: as in :class:`Heat`, of draws with replacement.
        momentum: ``mu``, in [0, 1).
        curvature: ``y = lr k``, at least 0.
        steps_per_epoch: ``K`` of reshuffled epochs. Default: independent batches.

    Returns:
        The excess relative to ``T / k``; infinite where the chain is not stable.

    Example:
        >>> round(excess_variance(0.5, 0.9, 0.002), 2), round(excess_variance(0.5, 0.9, 0.002, 50), 2)
        (0.5, 0.09)
    """
    limit = 2.0 * (1.0 + momentum)
    if curvature >= limit:
        return math.inf
    if steps_per_epoch is None or curvature <= 0.0:
        return rho * limit / (limit - curvature) if steps_per_epoch is None else 0.0
    M, gamma, C = torch.tensor(
        [
            [1.0 - curvature, -momentum],
            [curvature, momentum],
            [1.0, -1.0],
            [2.0 * rho * (1.0 - momentum) * curvature, 0.0],
        ],
        dtype=torch.float64,
        device="cpu",
    ).split([2, 1, 1])
    return float(added(M, gamma.T, C[:, :1], 0 * C[:, :1], "reshuffled", steps_per_epoch)[0][0, 0])


def read_heat(
    gradients: Tensor,
    positions: Tensor,
    momentum: float,
    first: float,
    rates: Tensor,
    temperatures: Tensor,
    *,
    steps_per_epoch: int | None = None,
    elements: int = 0,
) -> Heat:
    """Estimate the heat from a window of consecutive steps.

    Args:
        gradients: ``[steps, buckets]``, float64: sketches of ``s g`` with ``s = sqrt(lr_eff P / 2 T)`` of the first step.
        positions: likewise of ``theta / (2 T s)``, before each step.
        momentum, first: as in :class:`Leaf`.
        rates: ``[steps]``, ``lr_eff`` of each step over that of the first.
        temperatures: likewise of ``T``.
        steps_per_epoch: of reshuffled epochs; ``None`` for independent batches.
        elements: how many elements were added up in the buckets.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> noise, still = torch.randn(97, 5, dtype=torch.float64, generator=generator), torch.zeros(97, 5).double()
        >>> ones = torch.ones(97, dtype=torch.float64)
        >>> 0.5 < read_heat(noise, still, 0.9, 0.1, ones, ones).rho < 1.5  # noise alone, of variance 1 in every direction
        True
    """
    G, X, mu, r = gradients, positions, momentum, rates
    heated = float(r.square().mean() / (r * temperatures).mean())
    d, D = X.diff(dim=0), G.diff(dim=0)
    span = torch.linalg.qr(D.T)[0]  # which holds all differences
    moves, D = d @ span, D @ span
    now, before = r[1:-1, None], r[:-2, None]
    injected = torch.zeros_like(moves)
    injected[1:] = (now / before * mu * d[:-1] - d[1:] - now * (first * G[1:-1] + (1 - mu - first) * G[:-2])) @ span
    instruments = torch.cat([moves.roll(1, 0), injected], 1)
    rest, own, curvatures = list[Tensor](), list[Tensor](), list[float]()
    for begin, end in pairwise(round(len(D) * i / FOLDS) for i in range(FOLDS + 1)):
        known = torch.ones(len(D), 1, dtype=torch.float64, device="cpu")
        known[:2] = known[max(begin - 1, 0) : end + 1] = 0.0  # a row beside the fold shares a gradient with it
        basis = torch.cat(
            [_noisiest(D, known, DIRECTIONS), torch.linalg.eigh((D * known).T @ D)[1][:, -DIRECTIONS:]], 1
        )
        basis, sizes, _ = torch.linalg.svd(basis, full_matrices=False)
        Q = basis[:, sizes > 0.1]
        Dq, dq = D @ Q, moves @ Q
        H = _hessian(Dq, dq, torch.cat([part @ Q for part in instruments.chunk(2, 1)], 1), known)
        left = Dq - dq @ H.T
        if left[begin:end].square().sum() >= Dq[begin:end].square().sum():
            H, left = torch.zeros_like(H), Dq
        q = _noisiest(left, known, 1)
        rest.append((left[begin:end] @ q)[:, 0])
        own.append((dq[begin:end] @ H.T @ q)[:, 0])
        curvatures.append(float(q.T @ H @ q) * (1 - mu))
    zero, one = torch.cat([x * x / 2 for x in rest]), torch.cat([-x[1:] * x[:-1] for x in rest])
    # where the rest is the noise of batches and little else, its variance is the sharper estimate
    rho, error = _mean_and_error(zero if float(one.mean()) > 0.7 * float(zero.mean()) else one)
    if elements > BUCKETS:
        totals = -(D[1:] * D[:-1]).sum(1)  # of the noise in all directions
        mean, its_error = (x / elements for x in _mean_and_error(totals))
        rho -= max(float(totals.mean()), 0.0) * (1.0 / BUCKETS - 1.0 / elements)
        if mean > rho:  # the worst direction has at least the mean of all
            rho, error = mean, its_error
    rho, error, moved = (heated * x for x in (rho, error, float(torch.cat(own).square().mean()) / 2))
    limit = 2.0 * (1.0 + mu)
    # near the stability limit the law of independent batches amplifies the error of y; that of epochs does nowhere
    y = min(curvatures) if steps_per_epoch is None else sorted(curvatures)[FOLDS // 2]
    y = min(max(float(r.square().mean() / r.mean()) * y, 0.0), 0.95 * limit)
    least = (
        0.0 if steps_per_epoch is None else 2.0 * max(rho, 0.0) * (1.0 - mu) / steps_per_epoch
    )  # a calibrated loss's
    excess = excess_variance(max(rho, 0.0), mu, max(y, least), steps_per_epoch)
    again = [x.diff() for x in rest]  # in which a slow swing, which hides heat and makes none, is small
    square = max(float(torch.cat(again).square().mean()), 1e-300)
    ringing = sum([abs(float(torch.cat([x[k:] * x[:-k] for x in again]).mean())) for k in LAGS]) / square
    return Heat(rho, error, moved, y, excess, _drift(G, elements), ringing)


def _drift(G: Tensor, elements: int) -> float:
    """``h <g>_1 . <g>_2 / sd`` for the halves of a window, of ``h`` steps each.

    At rest ``sqrt(h) <g>`` has in each half at most the covariance ``V = 1 + C`` in these units: the noise of the batches, and
    that which the parameters followed. The product has the variance ``tr V^2``, and ``tr C^2`` is estimated by the squared
    products of differences that share no gradient, ``<(D_s . D_t)^2> = 4 tr C^2``.
    """
    h, D = len(G) // 2, G.diff(dim=0)
    size = max(elements, 1) / min(max(elements, 1), BUCKETS)  # variance of a bucket
    gram = (D @ D.T).square()
    apart = gram.triu(2).sum() / max((len(D) - 1) * (len(D) - 2) / 2, 1)
    own = size * math.sqrt(min(max(elements, 1), BUCKETS))
    return float(h * (G[:h].mean(0) @ G[h : 2 * h].mean(0)) / (own + apart.sqrt() / 2))


def _mean_and_error(series: Tensor) -> tuple[float, float]:
    """The mean, and its standard error from eight parts."""
    chunks = series[: len(series) // 8 * 8].reshape(8, -1).mean(1)
    return float(series.mean()), float(chunks.std()) / math.sqrt(8)


def _noisiest(r: Tensor, known: Tensor, n: int) -> Tensor:
    """The ``n`` directions with the largest ``- <r_t r_{t+1}>`` over the known rows, ``[columns, n]``."""
    lagged = (r[:-1] * known[:-1] * known[1:]).T @ r[1:]
    return torch.linalg.eigh(lagged + lagged.T)[1][:, :n]


def _hessian(D: Tensor, d: Tensor, instruments: Tensor, known: Tensor) -> Tensor:
    """``H`` of ``D_t = H d_t + ...`` by two-stage least squares; 0 where the F statistic of the first stage is at most 1."""
    D, d, instruments = D * known, d * known, instruments * known
    fitted = instruments @ torch.linalg.lstsq(instruments, d, driver="gelsd").solution
    freedom = max(float(known.sum()) - instruments.shape[1], 1.0) / instruments.shape[1]
    strength = float(fitted.square().sum() / (d - fitted).square().sum().clamp(min=1e-300)) * freedom
    H = torch.linalg.lstsq(fitted, D, driver="gelsd").solution.T
    return H * min(max((strength - 1.0) / 3.0, 0.0), 1.0)


def loudest(seen: Sequence[Leaf]) -> dict[int, Tensor | None]:
    """The elements in which the gradient, in units of the chain's own noise, has the largest mean square.

    Everything, of models of up to ``FEW`` elements in ``LEAVES`` leaves; else at most ``STRETCHES`` of neighbours, which have
    that many elements together, or one in ``SHARE`` where that is more.

    Returns:
        Of each parameter that is read the numbers of these elements, ``None`` for all of them.
    """
    total = sum([x.gradient.numel() for x in seen])
    if len(seen) <= LEAVES and total <= FEW:
        return {x.key: None for x in seen}
    each = max(FEW, total // SHARE) // STRETCHES
    # of each stretch its leaf and first element, its norm, and what that is multiplied by
    found, norms, units = list[tuple[Leaf, int]](), list[Tensor](), list[float]()
    for x in seen:
        n, g = x.gradient.numel(), (x.gradient * x.root if isinstance(x.root, Tensor) else x.gradient).reshape(-1)
        rest, unit = n % each, math.sqrt(x.rate / x.temperature)
        if n >= each:
            norms.append(torch.linalg.vector_norm(g[: n - rest].view(-1, each), dim=1))
            units += [unit / math.sqrt(each)] * (n // each)
        if rest:
            norms.append(torch.linalg.vector_norm(g[n - rest :], keepdim=True))
            units.append(unit / math.sqrt(rest))
        found += zip(repeat(x), range(0, n, each))
    loud = torch.cat([x.to(norms[0].device) for x in norms]).cpu()
    order = (loud * torch.tensor(units, dtype=torch.float64, device="cpu")).argsort(descending=True)
    out = dict[int, list[Tensor]]()
    for x, low in (found[k] for k in sorted(order[:STRETCHES].tolist())):
        out.setdefault(x.key, []).append(
            torch.arange(low, min(low + each, x.gradient.numel()), device=x.gradient.device)
        )
    return {key: torch.cat(parts) for key, parts in out.items()}


class Window:
    """The consecutive steps that are read together, as far as they have been seen.

    Args:
        seen: the parameters of the first step.

    Attributes:
        keys: of all parameters.
        leaves: by their keys the parameters that are read, as they were in the first step, whose rates and preconditioners are
            the units of all; without their tensors.
        elements: what is read of these parameters, as :func:`loudest` says.
        sketch: of their gradients, times ``s = sqrt(lr_eff P / 2 T)``, with which the chain's own noise has variance 1, and of
            the parameters, over ``2 T s``.
        norms: of the gradients of all parameters, in the first steps, as long as most are alike.
        is_clipped: whether they are, of 32 bits or more; half precision has few norms anyway.
        rates: of each step, rate and temperature of the first of the leaves.
    """

    def __init__(self, seen: Sequence[Leaf]) -> None:
        by_key = {x.key: x for x in seen}
        self.keys, self.elements = frozenset(by_key), loudest(seen)
        scales, sizes = list[Tensor](), list[Tensor]()
        for key, elements in self.elements.items():
            x = by_key[key]
            n = x.gradient.numel() if elements is None else len(elements)
            scale = math.sqrt(x.rate / (2.0 * x.temperature)) * x.root
            for factors, factor in ((scales, scale), (sizes, 0.5 / (x.temperature * abs(scale)))):
                factors.append(
                    _some(factor.double(), elements).reshape(-1)
                    if isinstance(factor, Tensor)
                    else torch.full((n,), factor, dtype=torch.float64, device=x.gradient.device)
                )
        self.sketch, nothing = Sketch(scales, sizes), torch.zeros(0, device="cpu")
        self.leaves = {key: by_key[key]._replace(gradient=nothing, param=nothing, root=1.0) for key in self.elements}
        self.norms, self.rates, self.is_clipped = list[float](), list[tuple[float, float]](), True

    @property
    def wanted(self) -> Collection[int]:
        """The keys of the parameters that are needed in the next step."""
        return self.keys if self.is_clipped and len(self.norms) < SHORT else self.leaves.keys()

    def add(self, here: dict[int, Leaf]) -> None:
        """Take a step, in which these are the leaves by their keys."""
        first = here[next(iter(self.leaves))]
        self.rates.append((first.rate, first.temperature))
        each = [(here[key], elements) for key, elements in self.elements.items()]
        self.sketch.add(
            [_some(x.gradient, elements) for x, elements in each], [_some(x.param, elements) for x, elements in each]
        )
        if self.is_clipped and len(self.norms) < SHORT:
            self.norms.append(float(torch.nn.utils.get_total_norm([x.gradient for x in here.values()])))
            self.is_clipped = first.gradient.dtype.itemsize >= 4 and _are_clipped(self.norms)


def _some(x: Tensor, elements: Tensor | None) -> Tensor:
    """The elements with these numbers in a row; ``None``: all as they are."""
    return x if elements is None else x.take(elements)


class Sketch:
    """``S`` times a factor for each element: 256 buckets, of elements whose numbers are alike modulo 256, with random signs.

    Two elements meet only in a bucket, so that one sign serves 256 neighbours: a sketch is a vector of signs times a matrix of
    256 columns.

    Args:
        factors: of the elements, in vectors, for each of several sketches.

    Attributes:
        rows: the elements of the last steps, of one sketch after the other, which wait to be added up together, as the steps of
            a small model take less time than a call.
        newest: those of the last step that was read.
    """

    def __init__(self, *factors: Sequence[Tensor]) -> None:
        self.rows, self.steps, device = list[Tensor](), list[Tensor](), factors[0][0].device
        self.is_spread = len({x.device for x in factors[0]}) > 1
        weights = torch.stack([torch.cat([x.to(device) for x in each]) for each in factors])
        self.tail = torch.zeros(-weights.shape[1] % BUCKETS, device=device)  # fills the last row of buckets
        columns = torch.nn.functional.pad(weights, (0, len(self.tail))).unflatten(1, (-1, BUCKETS))
        # Python's own generator: no operation of torch draws here, which a mode that counts or replaces draws would see
        signs = random.Random(0).choices((-1.0, 1.0), k=columns.shape[1])
        self.weights = columns * torch.tensor(signs, device=device)[:, None]

    def add(self, *tensors: Sequence[Tensor]) -> None:
        """Take a step, in tensors with as many elements as the factors have."""
        row = flattened(
            [x.to(self.tail.device) if self.is_spread else x for each in tensors for x in (*each, self.tail)]
        )
        if len(self.rows) * len(row) >= TOGETHER:
            self._add_up()
        self.rows.append(row)

    def _add_up(self) -> None:
        """Add up the rows that wait."""
        rows, self.newest = torch.stack(self.rows).view(-1, *self.weights.shape), self.rows[-1]
        self.steps.append((rows * self.weights).sum(-2))
        self.rows.clear()

    def read(self) -> Tensor:
        """The buckets of all steps, ``[sketches, steps, 256]``, in float64 on the CPU; once after each step at most."""
        self._add_up()
        return torch.cat(self.steps).transpose(0, 1).cpu()
