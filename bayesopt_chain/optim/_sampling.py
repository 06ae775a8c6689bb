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
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import chain
from operator import itemgetter
from types import MappingProxyType, NoneType
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
from bayesopt_chain.optim._leaves import NUMBERS, REMEMBERED, Leaves, gradient, remembered, step_by_operations
from bayesopt_chain.optim._ranks import OnRanks, claim, shared_key
from bayesopt_chain.optim._rule import Linear
from bayesopt_chain.random.stream import leaf_numbers
from bayesopt_chain.trees import are_same

_params: Callable[[dict[str, Any]], list[Any]] = itemgetter("params")


class Sampling(OnRanks, torch.optim.Optimizer):
    """A mixin that adds noise to a class of torch.optim: ``class SGD(Sampling, torch.optim.SGD)``.

    Subclasses give the numbers of torch's step in ``_linear`` and ``_denominator``.

    Attributes:
        refusal: the reason why no noise is known for this class; ``None`` if noise is known.
        adaptive: whether the step divides by a denominator that it computes from the gradients.
        averages_scaled: whether the velocity averages ``g / D`` rather than ``g``.
        counters: the names in a leaf's state of numbers that change with every update, and what they are before the first.
        torch_class: the class of ``torch.optim``.
        heat_guard: compares the variance of the gradients with that of the noise, and warns of heating; ``None`` without a
            guard.
    """

    refusal: ClassVar[str | None] = None
    adaptive: ClassVar[bool] = False
    averages_scaled: ClassVar[bool] = False
    own_options = ("temperature", "noise_key", "noise_count", "noise_kept", "freeze_after")
    counters: ClassVar[Mapping[str, float]] = MappingProxyType({"step": 0.0})
    torch_class: ClassVar[type[torch.optim.Optimizer]]
    _torch_step: Callable[..., Any]  # torch's own step

    # defaults on the class: torch's constructor calls add_param_group, and torch's __getstate__ drops all of these
    _noise_defaults: Mapping[str, Any] = MappingProxyType({})
    heat_guard: HeatGuard | None = None

    # discarded where the groups change: the leaves that needed more than torch's step in the last one, None after a step that
    # raised; the objects and kinds of which they were listed; and of each group the parameters' numbers in the random stream
    _work: list[Leaves] | None = None
    _objects: list[Any]
    _kinds: list[Any]
    _numbers: list[list[int]] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Find torch's class, and give the new class a signature: torch's arguments, then those of this library."""
        super().__init_subclass__(**kwargs)
        bases = [base for base in cls.__mro__ if f"{base.__module__}.".startswith("torch.optim.")]
        cls.torch_class, cls.numbers = bases[0], frozenset((*cls.counters, *NUMBERS))
        # without the hooks that torch runs around the step of this class already
        cls._torch_step = inspect.unwrap(bases[0].step, stop=lambda step: not getattr(step, "hooked", False))
        if "__init__" in vars(cls):
            own = inspect.signature(cls.__init__)
            cls.__signature__ = own.replace(parameters=list(own.parameters.values())[1:], return_annotation=own.empty)
            return
        theirs, mine = (inspect.signature(of).parameters.values() for of in (bases[0], Sampling.__init__))
        ours = [p for p in mine if p.kind is p.KEYWORD_ONLY and (cls.adaptive or p.name != "freeze_after")]
        cls.__signature__ = inspect.Signature([*theirs, *ours])

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
        self._noise_defaults = {
            "temperature": temperature,
            "noise_kept": keep_draws,
            "noise_key": None,
            "noise_count": 0,
        }
        if self.adaptive:
            self._noise_defaults["freeze_after"] = freeze_after
        self._seed = None if generator is None else generator.initial_seed()  # a run on disk compares it
        with _checks.with_call(self._name, **{**given, "params": ...}):
            super().__init__(params, *args, **kwargs)
        # where gradients are infinite, torch's fused kernel would leave out its own step, but not the noise: GradScaler is to
        # look at them, and to unscale them, which gives the same bits
        self._step_supports_amp_scaling = False
        if self._has_noise() or generator is not None:  # the generator is not kept until the temperature is raised
            self._draw_key(generator, "give it")
        for index, (group, temperature) in enumerate(zip(self.param_groups, self._temperatures())):
            # Adagrad's state begins here, and torch.distributed.checkpoint, which asks no step for it then, loads what is in it
            begun = [p for p in group["params"] if p in self.state]
            if begun and temperature > 0.0:
                x = Leaves(group, index, self._counts(self.state[begun[0]]))
                x.params, x.states = begun, [self.state[p] for p in begun]
                x.read(self, temperature)
                x.remember()

    # groups and state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, which may have a temperature of its own.

        Args:
            param_group: as in torch; besides torch's options it may hold ``temperature``.

        Raises:
            TypeError: ``param_group`` is no group, or an option has a wrong type.
            ValueError: at T > 0, options for which no noise is known, or a parameter that is given twice.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> a, b = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
            >>> optimizer = bc.optim.SGHMC([a], lr=0.1, temperature=0.5)
            >>> optimizer.add_param_group({"params": [b], "temperature": 0.0})
            >>> [group["temperature"] for group in optimizer.param_groups]
            [0.5, 0.0]
        """
        _checks.require_group(f"{self._name}.add_param_group", param_group)
        # torch fills a group with the defaults, which its constructor made of its own arguments only
        for name, value in self._noise_defaults.items():
            self.defaults.setdefault(name, value)
        _checks.temperature_of(self._name, {**self.defaults, **param_group}, self.refusal)
        with _checks.with_call(f"{self._name}.add_param_group", param_group=...):
            super().add_param_group(param_group)
        self._work = self._numbers = None

    def _draw_key(
        self,
        generator: torch.Generator | None = None,
        where: str = "its temperature was raised later, so call its fork() once with",
    ) -> None:
        """Give every group without a key the key of another group, or a new key if no group has one.

        Args:
            generator: source of the key, ``None`` for torch's global generator.
            where: how to give another one, for the message on several ranks.
        """
        key = next((g["noise_key"] for g in self.param_groups if g["noise_key"] is not None), None)
        if key is None:
            require_named_chain(self._name, generator, where)
            key = shared_key(generator, self.param_groups)
        for group in self.param_groups:
            if group["noise_key"] is None:
                group["noise_key"] = key

    def __getstate__(self) -> dict[str, Any]:
        guard = {} if self.heat_guard is None else {"heat_guard": self.heat_guard}
        return {**super().__getstate__(), **guard}

    def __setstate__(self, state: dict[str, Any]) -> None:
        before = self.__dict__.get("param_groups", [])
        super().__setstate__(state)
        self._work = self._numbers = None
        for group, mine in zip(self.param_groups, before):  # a state dict of torch's class lacks some entries
            group.update({name: mine[name] for name in self.own_options if name in mine} | group)

    def _temperatures(self) -> list[float]:
        """Return the temperature of each group, and check the options of those where it is above 0."""
        return [_checks.temperature_of(self._name, group, self.refusal) for group in self.param_groups]

    def _has_noise(self) -> bool:
        return any(self._temperatures())

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
        for group, temperature in zip(self.param_groups, self._temperatures()):
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
            if closure is not None:
                _checks.require(f"{self._name}.step", {"closure": closure})
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
        if self.heat_guard is not None and not self.heat_guard.sleeps():
            self.heat_guard.look(partial(heat_leaves, self))
        temperatures, params = self._temperatures(), [*chain.from_iterable(map(_params, self.param_groups))]
        objects = self._held(params)
        kinds = [*map(type, map(gradient, params)), *[temperature > 0.0 for temperature in temperatures]]
        work, self._work = self._work, None  # a step that raises leaves none
        holds = work is not None and kinds == self._kinds and are_same(objects, self._objects)
        if work is None or not (holds and all([x.holds(self, temperatures[x.index]) for x in work])):
            holds, work = False, self._planned(temperatures)
        noisy = [x for x in work if x.temperature > 0.0]
        witness = self._witness if noisy and dist.is_available() and dist.is_initialized() else None
        if witness is not None:
            witness.look(lambda: self._claims(noisy), local(noisy[0].params[0]))
        by_kernel = [x for x in work if x.has_job()]
        moved = [p for x in by_kernel for p in x.params]
        if len(moved) < len(params) - kinds.count(NoneType):  # others have a gradient, too
            with torch.no_grad():
                step_by_operations(self, [x for x in work if x not in by_kernel], moved)
        for x in by_kernel:
            x.move()
        for index in {x.index for x in noisy}:
            self.param_groups[index]["noise_count"] += 1
        for x in work:
            x.remember()
        if witness is not None:
            witness.stepped(local(noisy[0].params[0]))
        if not holds:  # the step may have made entries of the state
            self._objects, self._kinds = self._held(params), kinds
        self._work = work

    def _held(self, params: list[Any]) -> list[Any]:
        """List the objects that the leaves of a step were made of: groups, parameters and all entries of the state."""
        return [*self.param_groups, *params, *chain.from_iterable(map(dict.values, self.state.values()))]

    def _planned(self, temperatures: list[float]) -> list[Leaves]:
        """List the leaves that have a gradient and need more than torch's step, those with equal numbers together.

        Args:
            temperatures: of the groups.

        Raises:
            ValueError: options or parameters for which no noise is known. Nothing has moved then.
        """
        alike: dict[tuple[object, ...], Leaves] = {}
        for index, (group, numbers) in enumerate(zip(self.param_groups, self._leaf_numbers())):
            is_noisy = temperatures[index] > 0.0
            if len(group["params"]) > len(numbers):  # a list that was appended to; its last parameters have no numbers
                raise ValueError(
                    f"{self._name}: {len(group['params']) - len(numbers)} parameters were appended to group['params'], and "
                    "would move without noise; take them out again and give them to add_param_group"
                )
            if is_noisy and group["noise_key"] is None:
                self._draw_key()
            for p, number in zip(group["params"], numbers):
                if not is_noisy and group["noise_count"]:
                    # after steps at temperature 0 an old draw must not count as the last step's
                    for name in REMEMBERED:
                        self.state.get(p, {}).pop(name, None)
                if p.grad is None or not (is_noisy or group.get("freeze_after") is not None):
                    continue
                state = self.state[p]
                _checks.check_state(self._name, p, state, self.numbers)
                if is_noisy:
                    _checks.check_leaf(self._name, p, group)
                numbered = index, self._counts(state), *remembered(group, state)
                x = alike.setdefault((*numbered, p.dtype, p.device), Leaves(group, *numbered))
                x.params.append(p)
                x.states.append(state)
                x.numbers.append(number)
        for x in alike.values():
            x.layout = x.read(self, temperatures[x.index])
        if any([x.temperature > 0.0 for x in alike.values()]):
            params = [local(p) if p.grad is not None else None for p in self._all_params()]
            _checks.check_memory(self._name, self._names(), params)
        return [*alike.values()]

    def _leaf_numbers(self) -> list[list[int]]:
        """Return, for each group, the numbers of its parameters in the random stream, which are hashes of their names."""
        if self._numbers is None:
            numbers = iter(leaf_numbers(self._names()))
            self._numbers = [[next(numbers) for _ in group["params"]] for group in self.param_groups]
        return self._numbers

    def _claims(self, noisy: list[Leaves]) -> list[Claim]:
        """List the leaves that are about to get noise on this rank, so that ranks can compare their lists."""
        names = dict(zip(chain.from_iterable(self._leaf_numbers()), self._names()))
        return [claim(names[n], n, p, x.group) for x in noisy for p, n in zip(x.params, x.numbers)]

    # what a subclass says of torch's step

    def _counts(self, state: dict[str, Any]) -> tuple[float, ...]:
        """Return the counters of a leaf: the number of this update, counted from 1, and those of later names as they are."""
        step, *others = [float(state.get(name, start)) for name, start in self.counters.items()] or (None,)
        return () if step is None else (step + 1.0, *others)

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


_ASK = "or ask bc.diagnostics.heating; heat_guard=None silences this"
_SPREAD = (
    "parameters that are spread over ranks (DTensors), since no rank sees the noise of a whole gradient. Run the loop in one "
    f"process with it first, {_ASK}"
)
_SPARSE = f"sparse gradients, as those of Embedding(sparse=True). Run the loop with sparse=False first, {_ASK}"


def heat_leaves(rule: Any, keys: Collection[int] = ()) -> Iterator[Leaf]:
    """Yield the gradients of this step that get noise, for the heat guard: each with its ``lr_eff``, ``P`` and ``T``.

    ``lr_eff = h_1 + h b / (1 - mu)`` is the response ``F(1)`` of a step to a constant gradient, and ``P = 1 / D`` is the
    current preconditioner of an adaptive rule.

    An adaptive rule yields its gradients from the second step on, since it has no preconditioner before. Sparse gradients and
    DTensors are left out.

    Args:
        rule: the optimizer.
        keys: ``id`` of the parameters that are wanted, of which only the first of a group needs numbers of this step; empty for
            all of them.
    """
    wanted = frozenset(keys)
    for group, temperature in zip(rule.param_groups, rule._temperatures()):
        lr, linear, effective, first = float(group["lr"]), None, 0.0, 0.0
        sign = -1.0 if group.get("maximize") else 1.0
        for p in group["params"] if temperature > 0.0 else ():
            g, state, root = p.grad, rule.state.get(p, {}), sign
            if g is None or (wanted and id(p) not in wanted):
                continue
            if is_dtensor(g) or g.layout is not torch.strided:
                if not rule.heat_guard.has_left_out:
                    checks.warn(
                        f"{rule._name}: the heat guard does not look at {_SPREAD if is_dtensor(g) else _SPARSE}"
                    )
                rule.heat_guard.has_left_out = True
                continue
            if rule.adaptive and "step" not in state:  # it makes its preconditioner in the first step
                continue
            if linear is None or not wanted:
                counts = rule._counts(state)
                linear = rule._linear(group, counts)
                effective = linear.direct + linear.step_size * linear.gain / (1.0 - linear.momentum)
                # the share of F(1) that acts in the same step
                first = (linear.direct + linear.step_size * linear.gain) / effective if effective > 0.0 else 0.0
                if rule.adaptive and not wanted:  # by the denominator of the last update; torch's step comes later
                    learned = min(counts[0] - 1, group.get("freeze_after") or counts[0])
                    root = sign * rule._denominator(group, learned, state.__getitem__).rsqrt()
            if effective > 0.0:  # not at a learning rate of 0
                yield Leaf(id(p), g, p, effective, temperature, linear.momentum, first, root, lr)
