r"""A temperature for torch's own optimizers: their step, then the noise that is matched to it.

:class:`Sampling` stands in front of a class of ``torch.optim``. With ``D = 1/P`` the denominator that an adaptive rule
made of the clean gradient (``D = 1`` for SGD), torch's step and what follows it are

    V' = mu V + b g,          theta' = (1 - s) theta - (h V' + h_1 g) / D                       (torch)
    V' += D^(1/2) e,          theta' -= D^(-1/2) (h e + h_1 e_1)                                (noise)

What ``e`` and ``e_1`` are is in :mod:`bayesopt_chain.optim._rule`, how they are added in
:mod:`bayesopt_chain.optim._injection`. Noise enters the velocity and the parameter, never what ``D`` is made of.

What the noise needs to know lies where torch keeps such things:

* in the parameter group ``temperature``, ``noise_key`` (drawn once), ``noise_count`` (steps that drew) and
  ``noise_stream``. A group goes through ``load_state_dict`` as it is, while tensors in ``state[p]`` are cast to the
  parameter's dtype, which a 64-bit key does not survive;
* in ``state[p]`` the last draw, ``noise``, of unit variance, or with ``keep_draws=False`` the count and the key that make it
  again, and what the last step was: a Python float for each number.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from bayesopt_chain._torch import uncompiled
from bayesopt_chain.diagnostics.heat_guard import HeatGuard
from bayesopt_chain.diagnostics.temperatures import ThermalLeaf
from bayesopt_chain.distributed.parts import elements_of, place_of
from bayesopt_chain.distributed.ranks import require_named_chain
from bayesopt_chain.distributed.shards import are_spread
from bayesopt_chain.distributed.witness import Claim
from bayesopt_chain.links.room import Room, room_of
from bayesopt_chain.optim import _arguments, _heat, _noise, _refusals, _shards
from bayesopt_chain.optim._frozen import move_frozen, without_gradients
from bayesopt_chain.optim._injection import add_behind, add_in_front, remember
from bayesopt_chain.optim._one_pass import in_one_pass
from bayesopt_chain.optim._plan import REMEMBERED, Clock, Form, Numbers, Plan, Work, has_drawn, last_step
from bayesopt_chain.optim._ranks import OnRanks
from bayesopt_chain.optim._room import require_room, require_saved, require_together
from bayesopt_chain.optim._rule import Before, Linear, Noise, noise_of
from bayesopt_chain.optim._thermal import leaves_of

_OURS = ("temperature", "noise_key", "noise_count", "noise_stream", "noise_kept", "noise_room", "freeze_after")
_HAS_RANKS = dist.is_available()


class Cache:
    """What was worked out from the parameters of an optimizer. It is never saved, and made anew where they change.

    Attributes:
        names: of all parameters.
        numbers: by group, the number of each parameter, by which its draws are told from those of others.
        plan: of the last step, where the next one's is the same.
        shards: this rank's parts of the parameters, where these are DTensors.
        normals: source of the draws.
    """

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.numbers: list[list[int]] | None = None
        self.plan: Plan | None = None
        self.shards: _shards.Shards | None = None
        self.normals = _noise.Normals()


class Sampling(OnRanks, torch.optim.Optimizer):
    """In front of a class of torch.optim: ``class SGD(Sampling, torch.optim.SGD)``. Subclasses say what their step is.

    Attributes:
        refusal: why there is no noise for this class, where there is none.
        adaptive: whether the step divides by a denominator that it makes of the gradients.
        averages_scaled: whether the velocity averages ``g / D`` rather than ``g``.
        timeless: whether the numbers of a step are those of its group, whatever the count of steps.
        takes_room: whether its noise can leave room for that of the batches.
        torch_class: the class of ``torch.optim``.
        room: what the noise leaves to the batches; ``None`` where nothing.
        heat_guard: watches the gradients for the heat of minibatches; ``None`` does not.
    """

    refusal: ClassVar[str | None] = None
    adaptive: ClassVar[bool] = False
    averages_scaled: ClassVar[bool] = False
    timeless: ClassVar[bool] = False
    takes_room: ClassVar[bool] = False
    torch_class: ClassVar[type[torch.optim.Optimizer]]

    # torch's constructor calls add_param_group before ours could set anything, and torch's __getstate__ drops all of these
    _noise_defaults: Mapping[str, Any] = MappingProxyType({})
    _is_constructing: bool = False
    _generator: torch.Generator | None = None
    _scales_in_kernel: bool = False
    heat_guard: HeatGuard | None = None
    room: Room | None = None
    _cache: Cache

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        bases = [base for base in cls.__mro__ if f"{base.__module__}.".startswith("torch.optim.")]
        cls.torch_class = bases[0]
        if "__init__" in vars(cls):
            own = inspect.signature(cls.__init__)
            cls.__signature__ = own.replace(parameters=list(own.parameters.values())[1:], return_annotation=own.empty)
            return
        theirs = list(inspect.signature(bases[0]).parameters.values())
        names = ["temperature", "generator", "stream", "keep_draws", *(["freeze_after"] if cls.adaptive else [])]
        names += ["heat_guard", "steps_per_epoch", *(["room_for"] if cls.takes_room else [])]
        mine = inspect.signature(Sampling.__init__).parameters
        cls.__signature__ = inspect.Signature([*theirs, *(mine[name] for name in names)])

    def __init__(
        self,
        params: Any,
        *args: Any,
        temperature: float | Tensor = 0.0,
        generator: torch.Generator | None = None,
        stream: _noise.Stream | None = None,
        keep_draws: bool = True,
        freeze_after: int | None = None,
        heat_guard: Literal["warn"] | HeatGuard | None = "warn",
        steps_per_epoch: int | None = None,
        room_for: Any = None,
        **kwargs: Any,
    ) -> None:
        ours: dict[str, Any] = {
            "temperature": temperature,
            "generator": generator,
            "stream": stream,
            "keep_draws": keep_draws,
        }
        ours |= {"freeze_after": freeze_after, "heat_guard": heat_guard, "steps_per_epoch": steps_per_epoch}
        with _arguments.said_with(lambda: f"{self._name}()"):
            given = inspect.signature(super().__init__).bind(params, *args, **kwargs).arguments
        _arguments.require(self._name, {**given, **ours})
        if stream is not None and stream not in _noise.STREAMS:
            raise ValueError(f"{self._name}: stream must be one of {_noise.STREAMS} or None, got {stream!r}")
        if freeze_after is not None and not self.adaptive:
            raise TypeError(f"{self._name}: nothing here learns a preconditioner, so freeze_after= has no meaning")
        if freeze_after is not None and (isinstance(freeze_after, bool) or int(freeze_after) < 1):
            raise ValueError(f"{self._name}: freeze_after must be a positive number of updates, got {freeze_after!r}")
        if room_for is not None and not self.takes_room:
            raise TypeError(
                f"{self._name}: its preconditioner learns, and how much room there is was measured at one, so room_for= has "
                "no meaning; bc.optim.SGD, SGHMC and SGLD take it"
            )
        if (room := room_of(room_for, self._name)) is not None:
            self.room = room
            if isinstance(heat_guard, HeatGuard):
                raise ValueError(
                    f"{self._name}: heat_guard would take the noise that room_for= leaves room for as heat; leave it out"
                )
            if steps_per_epoch is not None and abs(steps_per_epoch - room.steps_per_epoch) >= 1.0:
                raise ValueError(
                    f"{self._name}: steps_per_epoch={steps_per_epoch}, and the report of room_for= is of "
                    f"{room.steps_per_epoch:.6g} an epoch; make another report"
                )
            heat_guard = steps_per_epoch = None
        if heat_guard == "warn":
            heat_guard = HeatGuard(steps_per_epoch, who=self._name)
        elif heat_guard is not None and not isinstance(heat_guard, HeatGuard):
            raise ValueError(
                f"{self._name}: heat_guard must be 'warn', None or a bc.diagnostics.HeatGuard, got {heat_guard!r}"
            )
        elif steps_per_epoch is not None:
            raise ValueError(f"{self._name}: steps_per_epoch= is for heat_guard='warn'; a HeatGuard takes its own")
        self.heat_guard = heat_guard
        if not keep_draws and stream == "generator":
            raise ValueError(
                f'{self._name}: keep_draws=False asks for stream="philox", whose draws can be made again in pieces'
            )
        learns = {"freeze_after": freeze_after} if self.adaptive else {}
        rooms = {} if self.room is None else {"noise_room": self.room.fingerprint}
        self._noise_defaults = {
            "temperature": temperature,
            "noise_stream": stream,
            "noise_kept": keep_draws,
            **learns,
            **rooms,
        }
        self._is_constructing, self._generator = True, generator
        self._seed = None if generator is None else generator.initial_seed()  # by which a run on disk knows it
        shown = {k: v for k, v in given.items() if k != "params"}
        with _arguments.said_with(lambda: _arguments.call_of(self._name, {"params": "...", **shown})):
            super().__init__(params, *args, **kwargs)
        if generator is not None:  # drawn at temperature 0 too, so that it is there when the temperature is raised
            self._draw_key()
        self._is_constructing, self._generator = False, None
        if self.room is not None:
            for group in self.param_groups:
                self._temperature(group)

    # groups and state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with a temperature of their own if the group names one.

        Args:
            param_group: as in torch; besides torch's options it may hold ``temperature``.

        Raises:
            TypeError: what is no group, or an option of another kind.
            ValueError: at T > 0, options that no noise is matched to, or a parameter twice.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> a, b = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
            >>> optimizer = bc.optim.SGHMC([a], lr=0.1, temperature=0.5)
            >>> optimizer.add_param_group({"params": [b], "temperature": 0.0})
            >>> [group["temperature"] for group in optimizer.param_groups]
            [0.5, 0.0]
        """
        _arguments.require_group(f"{self._name}.add_param_group", param_group)
        if self.room is not None and not self._is_constructing:
            raise ValueError(
                f"{self._name}.add_param_group: room_for= is of the parameters that are there; make another report"
            )
        for name, value in self._noise_defaults.items():
            self.defaults.setdefault(name, value)
        options = {**self.defaults, **param_group}
        is_noisy = _refusals.temperature_of(self._name, options) > 0.0
        if is_noisy:
            self._check_group(options)
        _arguments.require_moves(self._name, options)
        with _arguments.said_with(lambda: f"{self._name}.add_param_group(param_group)"):
            super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.setdefault("noise_key", next((g["noise_key"] for g in self.param_groups[:-1]), None))
        group.setdefault("noise_count", 0)
        self._cache = Cache()
        if is_noisy and len(set(group["params"])) < len(group["params"]):
            self.param_groups.pop()
            raise ValueError(
                f"{self._name}: a parameter appears twice in a group, and would move twice; give each parameter once"
            )
        if is_noisy:
            self._draw_key()

    def _draw_key(self) -> None:
        """Give all groups the key that one of them has, or a new one."""
        key = next((g["noise_key"] for g in self.param_groups if g["noise_key"] is not None), None)
        if key is None:
            where = (
                "give it" if self._is_constructing else "its temperature was raised later, so call its fork() once with"
            )
            require_named_chain(self._name, self._generator, where)
            key = _noise.shared_key(self._generator, self.param_groups)
        for group in self.param_groups:
            if group["noise_key"] is None:
                group["noise_key"] = key

    def fork(self, generator: torch.Generator | None = None) -> None:
        """Give the noise a new key, so that this chain is independent of the one its state was copied from.

        ``load_state_dict`` goes on with the noise of the run that was saved, which is what resuming wants; a second
        chain that starts from the same checkpoint calls ``fork`` once after loading.

        Args:
            generator: source of the key (default: torch's global generator). Of several ranks each needs one, as where
                the optimizer was made: ``bc.distributed.generator(seed)`` on replicas, with ``chain=rank`` for a chain on
                each. Ranks that hold parts of the same DTensors take the first one's key; all of them call this.

        Raises:
            ValueError: several ranks and no generator.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> theta = torch.zeros(2, requires_grad=True)
            >>> optimizer = bc.optim.SGHMC([theta], lr=0.1, temperature=0.5)
            >>> before = optimizer.param_groups[0]["noise_key"]
            >>> optimizer.fork()
            >>> optimizer.param_groups[0]["noise_key"] == before
            False
        """
        _arguments.require(f"{self._name}.fork", {"generator": generator})
        require_named_chain(f"{self._name}.fork", generator)
        key = _noise.shared_key(generator, self.param_groups)
        for group in self.param_groups:
            group["noise_key"] = key
        self._compare_anew()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **({} if self.room is None else {"room": self.room})}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._cache = Cache()
        for group in self.param_groups:
            for name in ("temperature", "noise_stream", "noise_kept", "freeze_after"):
                if name in self.defaults:
                    group.setdefault(name, self.defaults[name])
            group.setdefault("noise_key", None)
            group.setdefault("noise_count", 0)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state dict of this class, noise included, or take over one of torch's own class.

        A state dict of ``torch.optim`` brings its velocities, moments and hyperparameters; temperature, stream and key
        stay those of this optimizer: train with ``torch.optim``, then sample. As everywhere in torch, lr and momentum
        are those that were saved. A temperature given as a tensor stays the same tensor and takes the saved value.

        Args:
            state_dict: of this class, or of the class of ``torch.optim`` that it extends.

        Raises:
            TypeError: what is no state dict of an optimizer.
            ValueError: as in torch, groups of other sizes.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> theta = torch.zeros(2, requires_grad=True)
            >>> trained = torch.optim.SGD([theta], lr=0.05, momentum=0.8)
            >>> optimizer = bc.optim.SGHMC([theta], lr=0.1, temperature=0.5)
            >>> optimizer.load_state_dict(trained.state_dict())
            >>> optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["temperature"]
            (0.05, 0.5)
        """
        _arguments.require_state_dict(f"{self._name}.load_state_dict", state_dict)
        saved = [dict(group) for group in state_dict["param_groups"]]
        require_saved(self._name, self.room, saved)
        dials = [g["temperature"] if torch.is_tensor(g["temperature"]) else None for g in self.param_groups]
        for mine, theirs in zip(self.param_groups, saved):
            for name in _OURS:
                if name in mine:
                    theirs.setdefault(name, mine[name])
        super().load_state_dict({**state_dict, "param_groups": saved})
        for group, dial in zip(self.param_groups, dials):
            if dial is not None:
                dial.fill_(float(group["temperature"]))
                group["temperature"] = dial
        self._compare_anew()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether ``GradScaler`` may leave unscaling to the fused kernel: not with noise, which a skipped step must skip."""
        return self._scales_in_kernel and not any(
            _refusals.temperature_of(self._name, group) > 0.0 for group in self.param_groups
        )

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        self._scales_in_kernel = value

    def thermal_leaves(self) -> dict[str, ThermalLeaf]:
        """Describe, by name, the leaves that the next step gives noise to, for :class:`bayesopt_chain.diagnostics.Thermometer`.

        Raises:
            ValueError: parameters without names: build the optimizer with ``model.named_parameters()``.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = bc.optim.SGLD(model.named_parameters(), lr=0.1, temperature=0.5)
            >>> optimizer.thermal_leaves()["bias"].gain
            0.1
        """
        return dict(leaves_of(self))

    # the step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Make torch's own step, then add the noise. At temperature 0 nothing else than torch's step.

        Args:
            closure: as in torch.

        Returns:
            What the closure returned.

        Raises:
            TypeError: a closure that is no function.
            ValueError: at T > 0, options or parameters that no noise is matched to; nothing has moved then.

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
                _arguments.require_closure(self._name, closure)
            return self._torch_step(closure)
        loss = None
        if closure is not None:
            _arguments.require_closure(self._name, closure)
            with torch.enable_grad():
                loss = closure()
        with torch.set_grad_enabled(bool(self.defaults.get("differentiable", False))):
            self._noisy_step()  # pyright: ignore[reportAttributeAccessIssue]
        return loss

    @uncompiled
    def _noisy_step(self) -> None:
        if self.heat_guard is not None:
            self.heat_guard.look(partial(_heat.leaves_of, self), float(self.param_groups[0]["lr"]))
        cache = self._cache
        if cache.plan is None:
            self._leaf_numbers()  # of the parameters themselves, not of their local parts
            if cache.shards is None and are_spread([group["params"] for group in self.param_groups]):
                cache.shards = _shards.Shards()
                if self.heat_guard is not None:
                    _heat.say_unwatched(self)
        if cache.shards is None:
            return self._run()
        with torch.no_grad(), cache.shards.entered(self):
            cache.normals.runs = cache.shards.runs
            return self._run()

    def _run(self) -> None:
        """Make a step: by the plan of the last one with the numbers of this one, or by another, where it goes another way."""
        cache, plan = self._cache, self._cache.plan
        cache.plan = None  # a step that raises leaves none
        if plan is None or not plan.holds(self) or not plan.renew(self):
            plan = self._planned()
        witness = self._witness if plan.noisy and _HAS_RANKS and dist.is_initialized() else None
        if witness is not None:
            witness.look(lambda: self._claims(plan.noisy), plan.noisy[0].param)
        add_in_front(self, cache.normals, plan)
        if not (self.adaptive and in_one_pass(self, cache.normals, plan)):
            if plan.frozen:
                with without_gradients([w.param for w in plan.frozen]):
                    self._torch_step(None)
                move_frozen(self, plan.frozen)
            else:
                self._move(plan)
            add_behind(self, cache.normals, plan)
        if plan.redrawn or not plan.repeats:
            remember(self, plan)
        if witness is not None:
            witness.stepped(plan.noisy[0].param)
        for group in plan.groups:
            group["noise_count"] += 1
        if not plan.repeats:
            plan.keep(self)
        cache.plan = plan

    def _torch_step(self, closure: Callable[[], Any] | None) -> Any:
        """Make torch's own step without its hooks, which run around ours."""
        step: Any = self.torch_class.step
        while getattr(step, "hooked", False):
            step = step.__wrapped__
        return step(self, closure)

    def _move(self, plan: Plan) -> None:
        """Make torch's step for every parameter."""
        self._torch_step(None)

    # the plan of a step

    def _planned(self) -> Plan:
        """Work out what this step does to each leaf that has a gradient. Raises before anything moved."""
        work: list[Work] = []
        for group, numbers in zip(self.param_groups, self._leaf_numbers()):
            temperature = self._temperature(group)
            if temperature > 0.0:
                if group["noise_key"] is None:
                    self._draw_key()
            elif group["noise_count"]:  # a draw of long ago would be taken for that of the last step
                for p in group["params"]:
                    for name in REMEMBERED:
                        self.state.get(p, {}).pop(name, None)
            if temperature > 0.0 or group.get("freeze_after") is not None:
                work += self._work(group, numbers, temperature)
        plan = Plan(work, together=self.room is not None)
        if self.room is not None and plan.noisy:
            require_together(self._name, plan, self.param_groups[0])
        return plan

    def _work(self, group: dict[str, Any], numbers: list[int], temperature: float) -> list[Work]:
        """Work out the same for one group. Leaves that are alike share their numbers."""
        out: list[Work] = []
        alike: dict[tuple[Any, ...], Numbers] = {}
        for p, number in zip(group["params"], numbers):
            if p.grad is None:
                continue
            state, before = self.state[p], None
            if temperature > 0.0:
                if not has_drawn(state):
                    _refusals.check_leaf(self._name, p, group)
                before = last_step(self._name, state)
                if not group["noise_kept"] and not self._draws_by_element(p, group):
                    raise ValueError(
                        f'{self._name}: keep_draws=False on a CPU asks for stream="philox", whose draws can be made '
                        "again in pieces"
                    )
            clock, has_velocity = self._clock(state), "momentum_buffer" in state
            shared = alike.get((clock, before, has_velocity))
            if shared is None:
                shared = alike[clock, before, has_velocity] = Numbers(group, clock, before, has_velocity)
                shared.work_out(self, temperature)
            out.append(Work(shared, p, state, number))
        return out

    def _draws_by_element(self, p: Tensor, group: dict[str, Any]) -> bool:
        return self._cache.normals.runs is not None or p.device.type != "cpu" or group["noise_stream"] == "philox"

    def _noise(self, linear: Linear, temperature: float, before: Before | None) -> Noise:
        _refusals.check_lr(self._name, linear)
        noise = noise_of(linear, temperature, before)
        if noise.coasts and self.adaptive:
            raise ValueError(
                f"{self._name}: a momentum that falls to 0 cannot be followed at temperature > 0; keep it above 0"
            )
        return noise

    def _temperature(self, group: dict[str, Any]) -> float:
        temperature = _refusals.temperature_of(self._name, group)
        if temperature > 0.0:
            self._check_group(group)
        return temperature

    def _leaf_numbers(self) -> list[list[int]]:
        """The numbers of each group's parameters: of their names, or their indices where there are no names."""
        cache = self._cache
        if cache.numbers is None:
            params = [p for group in self.param_groups for p in group["params"]]
            cache.names = self._names()
            if any(place is not None and place.runs is not None for place in map(place_of, params)):
                cache.normals.runs = {p: elements_of(p) for p in params}
            numbers = iter(_noise.leaf_numbers(cache.names))
            cache.numbers = [[next(numbers) for _ in group["params"]] for group in self.param_groups]
        return cache.numbers

    def _names(self) -> tuple[str, ...]:
        """The names of all parameters: those that ``bc.distributed.part`` was told, else their own, or their indices."""
        names: list[str] = []
        for group in self.param_groups:
            own = group.get("param_names") or map(str, range(len(names), len(names) + len(group["params"])))
            places = map(place_of, group["params"])
            names += [name if place is None else place.name for name, place in zip(own, places)]
        if len(set(names)) < len(names):
            raise ValueError(f"{self._name}: two parameters have the same name; give each a name of its own")
        return tuple(names)

    def _claims(self, noisy: list[Work]) -> list[Claim]:
        """Say what this rank is about to give noise to, so that ranks can compare it."""
        names = dict(zip([number for group in self._leaf_numbers() for number in group], self._cache.names))
        runs = self._cache.normals.runs
        out: list[Claim] = []
        for w in noisy:
            gradient = None if w.param.grad is None or w.param.grad.is_sparse else w.param.grad
            here = None if runs is None else runs[w.param]
            key, count = w.group["noise_key"], w.group["noise_count"]
            out.append(Claim(names[w.number], key, w.number, here, count, w.param, gradient))
        return out

    def _check_group(self, group: dict[str, Any]) -> None:
        spread = "_cache" in self.__dict__ and self._cache.normals.runs is not None
        _refusals.check_group(self._name, group, self.adaptive, self.refusal, spread)
        if self.room is not None and not self._is_constructing:
            require_room(self._name, self.room, self.param_groups)

    # what a subclass says of its step: the methods of bayesopt_chain.optim._plan.Rule

    def _clock(self, state: dict[str, Any]) -> Clock:
        return Clock(int(state["step"]) + 1 if "step" in state else 1)

    def _linear(self, group: dict[str, Any], clock: Clock) -> Linear:
        raise NotImplementedError

    def _denominator(self, group: dict[str, Any], updates: int, get: Callable[[str], Tensor]) -> Tensor:
        raise NotImplementedError

    def _form(self, group: dict[str, Any], updates: int) -> Form | None:
        return None

    def _count_update(self, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] += 1


def _asks_for_more(group: dict[str, Any]) -> bool:
    """Whether a group asks for more than torch's step: noise, a frozen preconditioner, or noise to be forgotten."""
    return (
        bool(group["noise_count"])
        or group.get("freeze_after") is not None
        or torch.is_tensor(group["temperature"])
        or group["temperature"] != 0.0
    )
