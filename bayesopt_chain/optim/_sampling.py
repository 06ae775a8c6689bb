r"""The base class of the optimizers with a temperature: it makes torch's own step and adds the noise that matches the step.

A class inherits from :class:`Sampling` first and from a class of ``torch.optim`` second. Let ``D = 1/P`` be the denominator
that an adaptive rule computes from the gradient without noise (``D = 1`` for SGD). With the symbols of
:mod:`bayesopt_chain.optim._rule`, torch's step and the noise that follows it are

    V' = mu V + b g,          theta' = (1 - s) theta - (h V' + h_1 g) / D                       (torch)
    V' += D^(1/2) e,          theta' -= D^(-1/2) (h e + h_1 e_1)                                (noise)

:mod:`bayesopt_chain.optim._rule` computes ``e`` and ``e_1``, and :mod:`bayesopt_chain.optim._leaves` adds them. Noise is
added to the velocity and the parameter, and never to the averages from which ``D`` is computed.

The optimizer keeps what the noise depends on in two places:

* The parameter group holds ``temperature``, ``noise_key`` (drawn once), ``noise_count`` (the number of steps that drew) and
  ``noise_kept``. ``load_state_dict`` leaves the entries of a group as they are, while it casts tensors in ``state[p]`` to the
  dtype of the parameter, which would change a 64-bit key.
* ``state[p]`` holds the last draw, ``noise``, of unit variance, or with ``keep_draws=False`` the count and the key from which
  the draw is made again. It also holds the numbers of the last step as 0-d tensors, in float64 and int64 on the CPU, which all
  leaves of a kind share and which the kernel writes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import chain, product
from operator import is_
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain._torch import is_dtensor, local, uncompiled
from bayesopt_chain.diagnostics._response import ThermalLeaf
from bayesopt_chain.diagnostics.heat_guard import HeatGuard, Leaf
from bayesopt_chain.distributed.ranks import require_named_chain
from bayesopt_chain.distributed.witness import Claim
from bayesopt_chain.loop.interrupts import uninterrupted
from bayesopt_chain.optim import _checks
from bayesopt_chain.optim._leaves import (
    NOTHING,
    NUMBERS,
    REMEMBERED,
    Leaves,
    gradient,
    remembered,
    step_by_operations,
)
from bayesopt_chain.optim._ranks import OnRanks, claim
from bayesopt_chain.optim._rule import Linear

_HAS_RANKS = dist.is_available()  # asked once, since asking takes as long as counting a step
_ALONE = nullcontext()  # in the place of a comparison of ranks
_REFUSED = {  # options that a temperature above 0 refuses, and why
    "capturable": "the noise counts steps on the host. Set capturable=False, or use bc.make_step with bc.capture",
    "differentiable": "autograd follows the steps of chains, bc.sghmc with bc.make_step (and bc.meta); leave it out, or set "
    "temperature=0",
}


class Sampling(OnRanks):
    """A mixin that adds noise to a class of torch.optim: ``class SGD(Sampling, torch.optim.SGD)``.

    Subclasses give the numbers of torch's step in ``_linear`` and ``_denominator``.

    Attributes:
        refusal: the reason why no noise is known for this class; ``None`` if noise is known.
        adaptive: whether the step divides by a denominator that it computes from the gradients, by ``_denominator``.
        averages_scaled: whether the velocity averages ``g / D`` rather than ``g``.
        counters: the names in a leaf's state of an adaptive rule of numbers that change with every update, and what they are
            before the first.
        heat_guard: compares the variance of the gradients with that of the noise, and warns of heating; ``None`` without a
            guard.
    """

    refusal: ClassVar[str | None] = None
    adaptive: ClassVar[bool] = False
    averages_scaled: ClassVar[bool] = False
    own_options = ("temperature", "noise_key", "noise_count", "noise_kept", "freeze_after")
    counters: ClassVar[Mapping[str, float]] = MappingProxyType({"step": 0.0})
    _torch_step: Callable[..., Any]  # torch's own step

    # defaults on the class: torch's constructor calls add_param_group, and torch's __getstate__ drops all of these
    heat_guard: HeatGuard | None = None

    # the leaves that needed more than torch's step in the last one, None after a step that raised or where the groups changed
    _work: list[Leaves] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Find torch's class, and give the new class a signature: torch's arguments, then those of this library."""
        super().__init_subclass__(**kwargs)
        base = next(base for base in cls.__mro__ if f"{base.__module__}.".startswith("torch.optim."))
        cls.adaptive, cls.numbers = cls._denominator is not Sampling._denominator, frozenset((*cls.counters, *NUMBERS))
        # without the hooks that torch runs around the step of this class already
        cls._torch_step = inspect.unwrap(base.step, stop=lambda step: not getattr(step, "hooked", False))
        theirs, mine = (inspect.signature(of).parameters.values() for of in (base, cls.__init__))
        if "__init__" in vars(cls):
            _, *parameters = mine  # without self
        else:
            ours = [p for p in mine if p.kind is p.KEYWORD_ONLY and (cls.adaptive or p.name != "freeze_after")]
            parameters = [*theirs, *ours]
        cls.__signature__ = inspect.Signature(parameters)

    @checks.takes(params=checks.ANY, temperature=checks.ANY, generator=checks.ANY)
    def __init__(
        self,
        params: Any,
        *args: Any,
        temperature: float | Tensor = 0.0,
        generator: torch.Generator | None = None,
        keep_draws: bool = True,
        freeze_after: int | None = None,
        heat_guard: Literal["warn"] | HeatGuard | None = "warn",
        steps_per_epoch: int | None = None,
        **kwargs: Any,
    ) -> None:
        ours: dict[str, Any] = {
            "temperature": temperature,
            "generator": generator,
            "keep_draws": keep_draws,
            "freeze_after": freeze_after,
            "heat_guard": heat_guard,
            "steps_per_epoch": steps_per_epoch,
        }
        with _checks.with_call(self._name):
            given = inspect.signature(super().__init__).bind(params, *args, **kwargs).arguments
        _checks.require(self._name, {**given, **ours})
        if freeze_after is not None and not self.adaptive:
            raise TypeError(f"{self._name}: nothing here learns a preconditioner, so freeze_after= has no meaning")
        if heat_guard == "warn":
            heat_guard = HeatGuard(steps_per_epoch, who=self._name)
        elif steps_per_epoch is not None:
            raise ValueError(f"{self._name}: steps_per_epoch= is for heat_guard='warn'; a HeatGuard takes its own")
        self.heat_guard = heat_guard
        self._own_defaults = {
            "temperature": temperature,
            "noise_kept": keep_draws,
            "noise_key": None,
            "noise_count": 0,
            **({"freeze_after": freeze_after} if self.adaptive else {}),
        }
        self._seed = None if generator is None else generator.initial_seed()  # a run on disk compares it
        with _checks.with_call(self._name, **{**given, "params": ...}):
            super().__init__(params, *args, **kwargs)
        # where gradients are infinite, torch's fused kernel would leave out its own step, but not the noise: GradScaler is to
        # look at them, and to unscale them, which gives the same bits
        self._step_supports_amp_scaling = False
        if (
            any(map(self._temperature, self.param_groups)) or generator is not None
        ):  # the generator is not kept until the temperature is raised
            require_named_chain(self._name, generator)
            self._new_keys(generator)
        for group in self.param_groups:
            # Adagrad's state begins here, and torch.distributed.checkpoint, which asks no step for it then, loads what is in it
            begun = [p for p in group["params"] if p in self.state]
            if begun and self._temperature(group) > 0.0:
                x = Leaves(group, self._counts(self.state[begun[0]]), *NOTHING)
                x.params, x.states = begun, [self.state[p] for p in begun]
                x.read(self)
                x.remember()

    # groups and state

    def _begin(self, group: dict[str, Any]) -> None:
        self._temperature(group)
        group["noise_key"] = self.param_groups[0]["noise_key"]
        self._begin_anew()

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self._work = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "heat_guard": self.heat_guard}

    def _temperature(self, group: dict[str, Any]) -> float:
        """Read a group's temperature, a number or a tensor of one element; where it is above 0, check the options of the group.

        Raises:
            ValueError: the temperature is negative, infinite or NaN, or a tensor that requires grad; it is above 0, and no
                noise is known for the class or for an option, which the message names.
        """
        temperature = group["temperature"]
        if isinstance(temperature, Tensor) and temperature.requires_grad:
            raise ValueError(f"{self._name}: temperature requires grad, which a step does not carry; detach it")
        if not isinstance(temperature, (int, float, Tensor)):  # a function, say
            _checks.require(self._name, {"temperature": temperature})
        value = float(temperature)
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{self._name}: temperature must be non-negative and finite, got {temperature!r}")
        if value and self.refusal is not None:
            raise ValueError(f"{self._name}: no temperature above 0: {self.refusal}")
        for name in _REFUSED if value else ():
            if group.get(name):
                raise ValueError(f"{self._name}: {name}=True at temperature > 0: {_REFUSED[name]}")
        return value

    def thermal_leaves(self) -> dict[str, ThermalLeaf]:
        """Describe the leaves that get noise in the next step, for :func:`bayesopt_chain.diagnostics.doctor`.

        Returns:
            By parameter name, the temperature, decay and sign of each leaf.

        Raises:
            ValueError: the parameters have no names; make the optimizer with ``model.named_parameters()``.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = bc.optim.SGLD(model.named_parameters(), lr=0.1, temperature=0.5)
            >>> optimizer.thermal_leaves()["bias"].temperature
            0.5
        """
        out: dict[str, ThermalLeaf] = {}
        for group in self.param_groups:
            temperature = self._temperature(group)
            if temperature == 0.0:
                continue
            if "param_names" not in group:
                raise ValueError(
                    f"{self._name}: its parameters have no names to find them by; build it with model.named_parameters()"
                )
            decay = float(group.get("weight_decay") or 0.0)
            # a decoupled decay is no part of the gradient
            leaf = ThermalLeaf(
                temperature,
                None if decay and group.get("decoupled_weight_decay") else decay,
                -1.0 if group.get("maximize") else 1.0,
            )
            out |= dict.fromkeys(group["param_names"], leaf)
        return out

    # the step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Make torch's own step, then add the noise. At temperature 0 only torch's step is made.

        Args:
            closure: evaluates the model again and returns the loss, as in torch. At T > 0 it is called once, before the step.

        Returns:
            The loss that the closure returned; ``None`` without a closure.

        Raises:
            TypeError: ``closure`` is no function; at T > 0, an option of a group has a wrong type. Nothing has moved then.
            ValueError: at T > 0, options or parameters for which no noise is known. Nothing has moved then.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> theta = torch.zeros(2, requires_grad=True)
            >>> optimizer = bc.optim.SGHMC([theta], lr=0.1, temperature=0.5)
            >>> theta.square().sum().backward()
            >>> optimizer.step()
            >>> bool(theta.all())
            True
        """
        if not any(map(_asks_for_more, self.param_groups)):
            return self._torch_step(closure)
        loss = None if closure is None else self._loss_of(closure)
        # Ctrl-C between two writes would leave parameters, velocities and the count of draws of different steps
        try:
            with uninterrupted():
                self._noisy_step()  # pyright: ignore[reportAttributeAccessIssue]
        except (TypeError, ValueError, OverflowError) as err:
            # numbers in a group may have become anything since the last step, and what float() says of it names none of them
            for group in () if str(err).startswith("bc.optim.") else self.param_groups:
                _checks.require(self._name, group)
            raise
        return loss

    @uncompiled
    def _noisy_step(self) -> None:
        """Make torch's step and add the noise."""
        params = [p for group in self.param_groups for p in group["params"]]
        kinds = [*map(type, map(gradient, params))]
        work, self._work = self._work, None  # a step that raises leaves none
        are_noisy = [self._temperature(group) > 0.0 for group in self.param_groups]
        held = self._held(params, kinds, are_noisy)
        holds = work is not None and len(held) == len(self._objects) and all(map(is_, held, self._objects))
        if work is None or not (holds and all([x.holds(self) for x in work])):
            holds, work = False, self._planned()
        if self.heat_guard is not None and not self.heat_guard.sleeps():
            self.heat_guard.look(partial(heat_leaves, self, work))
        is_compared = self._hot and _HAS_RANKS and dist.is_initialized()
        with self._witness.step(partial(self._claims, work), params) if is_compared else _ALONE:
            by_kernel = [*filter(Leaves.has_job, work)]
            if len(by_kernel) < len(work) or not all(are_noisy):  # others may have a gradient, too
                moved = [p for x in by_kernel for p in x.params]
                with torch.no_grad():
                    step_by_operations(self, [x for x in work if x not in by_kernel], moved)
            for x in by_kernel:
                x.move()
            for group in self._hot:
                group["noise_count"] += 1
            if not holds:  # the step may have made entries of the state
                for x in work:
                    x.remember()
                self._objects = self._held(params, kinds, are_noisy)
        self._work = work

    def _held(self, params: list[Any], kinds: list[type], are_noisy: list[bool]) -> list[Any]:
        """List the objects that the leaves of a step are made of.

        They are the groups and whether they get noise, the parameters, the types of their gradients, and all entries of the
        state.
        """
        entries = chain.from_iterable(map(dict.values, self.state.values()))
        return [*self.param_groups, *are_noisy, *params, *kinds, *entries]

    def _planned(self) -> list[Leaves]:
        """List the leaves that have a gradient and need more than torch's step, those with equal numbers together.

        Raises:
            ValueError: options or parameters for which no noise is known. Nothing has moved then.
        """
        self._require_added()
        alike: dict[tuple[object, ...], Leaves] = {}
        for group in self.param_groups:
            is_noisy = self._temperature(group) > 0.0
            if is_noisy and group["noise_key"] is None:
                require_named_chain(self._name, None, "its temperature was raised later, so call its fork() once with")
                self._new_keys(None)
            for p in group["params"]:
                if p.grad is None or (not is_noisy and group.get("freeze_after") is None):
                    continue
                state = self.state[p]
                _checks.check_state(self._name, p, state, self.numbers)
                if is_noisy:
                    _checks.check_leaf(self._name, p, group)
                counts, last = self._counts(state), remembered(group, state) if is_noisy else NOTHING
                x = alike.setdefault((id(group), counts, *last, p.dtype, p.device), Leaves(group, counts, *last))
                x.params.append(p)
                x.states.append(state)
                x.numbers.append(self._numbers[p])
        for x in alike.values():
            x.layout = x.read(self)
        # the groups of those that get noise
        self._hot = [*{id(x.group): x.group for x in alike.values() if x.temperature > 0.0}.values()]
        if self._hot:
            params = [local(p) if p.grad is not None else None for p in self._all_params()]
            _checks.check_memory(self._name, self._names(), params)
        for group in self.param_groups:
            if group["noise_count"] and not self._temperature(group):
                # after steps at temperature 0 an old draw must not count as the last step's
                for p, name in product(group["params"], REMEMBERED):
                    self.state.get(p, {}).pop(name, None)
        return [*alike.values()]

    def _claims(self, work: list[Leaves]) -> list[Claim]:
        """List the leaves that are about to get noise on this rank, so that ranks can compare their lists."""
        names = dict(zip(self._all_params(), self._names()))
        noisy = [(x.group, p, n) for x in work if x.temperature > 0.0 for p, n in zip(x.params, x.numbers)]
        return [claim(names[p], n, p, group) for group, p, n in noisy]

    # what a subclass says of torch's step

    def _counts(self, state: dict[str, Any]) -> tuple[float, ...]:
        """Return the number of this update of a leaf, counted from 1, and further counters as they are; nothing for SGD."""
        step, *others = [float(state.get(name, start)) for name, start in self.counters.items()]
        return (step + 1.0, *others) if self.adaptive else ()

    def _learned(self, group: dict[str, Any], counts: tuple[float, ...]) -> float:
        """Return the number of the last update in which the denominator learned, counted from 1; 0 without a denominator."""
        return min(counts[0], group.get("freeze_after") or counts[0]) if counts else 0.0

    def _linear(self, group: dict[str, Any], counts: tuple[float, ...]) -> Linear:
        """Return the numbers of torch's step for the leaves of a group at an update."""
        raise NotImplementedError

    def _denominator(self, group: dict[str, Any], updates: float, get: Callable[[str], Tensor]) -> Tensor:
        """Return ``D`` as torch's step left it, in a new tensor.

        Args:
            group: the leaf's parameter group.
            updates: the number of the last update in which ``D`` learned, counted from 1.
            get: ``get(name)`` returns a tensor of the leaf's state.
        """
        raise NotImplementedError

    def _count_update(self, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Advance a leaf's own count of updates, after an update that torch's step did not make."""
        state["step"] += 1


def _asks_for_more(group: dict[str, Any]) -> bool:
    """Whether a group needs more than torch's step.

    It does if it has a temperature, or a preconditioner that freezes, or if it has drawn noise before and now is at temperature
    0, so that the last draw has to be removed from the state.
    """
    return (
        bool(group["noise_count"])
        or group.get("freeze_after") is not None
        or torch.is_tensor(group["temperature"])
        or group["temperature"] != 0.0
    )


_LEFT_OUT = (
    "parameters that are spread over ranks (DTensors), since no rank sees the noise of a whole gradient, and sparse gradients, "
    "as those of Embedding(sparse=True). Run the loop in one process with sparse=False first, or ask bc.diagnostics.heating; "
    "heat_guard=None silences this"
)


def heat_leaves(rule: Any, work: list[Leaves], keys: Collection[int] = ()) -> Iterator[Leaf]:
    """Yield the gradients of this step that get noise, for the heat guard: each with its ``lr_eff``, ``P`` and ``T``.

    ``lr_eff = h_1 + h b / (1 - mu)`` is the response ``F(1)`` of a step to a constant gradient, and ``P = 1 / D`` is the
    current preconditioner of an adaptive rule.

    An adaptive rule yields its gradients from the second step on, since it has no preconditioner before. Sparse gradients and
    DTensors are left out.

    Args:
        rule: the optimizer.
        work: the leaves of this step.
        keys: ``id`` of the parameters that are wanted, whose ``P`` is not; empty for all of them.
    """
    wanted = frozenset(keys)
    for x in [x for x in work if x.temperature > 0.0]:
        direct, now = x.linear.direct, x.linear.step_size * x.linear.gain
        effective = direct + now / (1.0 - x.linear.momentum)
        for p, state in zip(x.params, x.states):
            g, root = p.grad, -1.0 if x.group.get("maximize") else 1.0
            if wanted and id(p) not in wanted:
                continue
            if is_dtensor(g) or g.layout is not torch.strided:
                if not rule.heat_guard.has_left_out:
                    checks.warn(f"{rule._name}: the heat guard does not look at {_LEFT_OUT}")
                rule.heat_guard.has_left_out = True
                continue
            # an adaptive rule makes its preconditioner in the first step, and at a learning rate of 0 nothing moves
            if (rule.adaptive and "step" not in state) or not effective:
                continue
            if rule.adaptive and not wanted:  # by the denominator of the last update; torch's step comes later
                learned = min(x.counts[0] - 1, x.group.get("freeze_after") or x.counts[0])
                root *= rule._denominator(x.group, learned, state.__getitem__).rsqrt()
            first = (direct + now) / effective  # the share of F(1) that acts in the same step
            yield Leaf(id(p), g, p, effective, x.temperature, x.linear.momentum, first, root)
