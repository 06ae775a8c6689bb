r"""A temperature for torch's own optimizers: their step, then the noise that is matched to it.

:class:`Sampling` stands in front of a class of ``torch.optim``. With ``D = 1/P`` the denominator that an adaptive rule
made of the clean gradient (``D = 1`` for SGD), torch's step and what follows it are

    V' = mu V + b g,          theta' = (1 - s) theta - (h V' + h_1 g) / D                       (torch)
    V' += D^(1/2) e,          theta' -= D^(-1/2) (h e + h_1 e_1)                                (noise)

or, where the rule's velocity averages ``g / D`` (RMSprop), ``V' += D^(-1/2) e``. For SGD with a velocity the same comes
cheaper in front of torch's step, as ``V += e / mu``: its momentum and its own move then bring ``e`` to velocity and
parameter. What ``e`` and ``e_1`` are is in :mod:`bayesopt_chain.optim._rule`. Noise enters the velocity and the
parameter, never what ``D`` is made of.

What the noise needs to know lies where torch keeps such things:

* in the parameter group ``temperature``, ``noise_key`` (drawn once), ``noise_count`` (steps that drew),
  ``noise_stream``. A group goes through ``load_state_dict`` as it is, while tensors in ``state[p]`` are cast to the
  parameter's dtype, which a 64-bit key does not survive;
* in ``state[p]`` the last draw, ``noise``, of unit variance, and ``noise_before``, three Python floats.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from bayesopt_chain._torch import foreach_add_, uncompiled
from bayesopt_chain.diagnostics.temperatures import ThermalLeaf
from bayesopt_chain.distributed.parts import elements_of, place_of
from bayesopt_chain.distributed.ranks import require_named_chain
from bayesopt_chain.distributed.witness import Claim
from bayesopt_chain.optim import _noise, _shards
from bayesopt_chain.optim._plan import Batch, Plan, Work, blocks_of
from bayesopt_chain.optim._ranks import OnRanks
from bayesopt_chain.optim._rule import Linear, Noise, noise_of
from bayesopt_chain.optim._thermal import leaves_of
from bayesopt_chain.random.philox import Runs

_OURS = ("temperature", "noise_key", "noise_count", "noise_stream", "freeze_after")
_LEAST_MOMENTUM = 1 / 16  # below it noise is not sent through the velocity, which would divide by the momentum
_REMEMBERED = ("noise", "noise_before", "noise_direct")


class Sampling(OnRanks, torch.optim.Optimizer):
    """In front of a class of torch.optim: ``class SGD(Sampling, torch.optim.SGD)``. Subclasses say what their step is."""

    refusal: ClassVar[str | None] = None  # why there is no noise for this class, where there is none
    adaptive: ClassVar[bool] = False
    averages_scaled: ClassVar[bool] = False  # whether the velocity averages g / D rather than g
    timeless: ClassVar[bool] = False  # whether the numbers of a step are those of its group, whatever its count
    torch_class: ClassVar[type[torch.optim.Optimizer]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        bases = [base for base in cls.__mro__ if f"{base.__module__}.".startswith("torch.optim.")]
        cls.torch_class = bases[0]
        if "__init__" in vars(cls):
            own = inspect.signature(cls.__init__)
            cls.__signature__ = own.replace(parameters=list(own.parameters.values())[1:], return_annotation=own.empty)
            return
        theirs = list(inspect.signature(bases[0]).parameters.values())
        names = ["temperature", "generator", "stream", *(["freeze_after"] if cls.adaptive else [])]
        mine = inspect.signature(Sampling.__init__).parameters
        cls.__signature__ = inspect.Signature([*theirs, *(mine[name] for name in names)])

    def __init__(
        self,
        params: Any,
        *args: Any,
        temperature: float | Tensor = 0.0,
        generator: torch.Generator | None = None,
        stream: _noise.Stream | None = None,
        freeze_after: int | None = None,
        **kwargs: Any,
    ) -> None:
        if stream is not None and stream not in _noise.STREAMS:
            raise ValueError(f"{self._name}: stream must be one of {_noise.STREAMS} or None, got {stream!r}")
        if freeze_after is not None and not self.adaptive:
            raise TypeError(f"{self._name}: nothing here learns a preconditioner, so freeze_after= has no meaning")
        if freeze_after is not None and (isinstance(freeze_after, bool) or int(freeze_after) < 1):
            raise ValueError(f"{self._name}: freeze_after must be a positive number of updates, got {freeze_after!r}")
        self._given = {"temperature": temperature, "noise_stream": stream}
        if self.adaptive:
            self._given["freeze_after"] = freeze_after
        self._key_source = generator
        try:
            super().__init__(params, *args, **kwargs)
        finally:
            del self._given, self._key_source

    # groups and state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with a temperature of their own if the group names one."""
        given = self.__dict__.get("_given", {})
        for name, value in given.items():
            self.defaults.setdefault(name, value)
        group = {name: param_group.get(name, self.defaults[name]) for name in ("temperature", "noise_stream")}
        temperature = self._temperature(group)
        if temperature > 0.0:
            self._check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.setdefault("noise_key", next((g["noise_key"] for g in self.param_groups[:-1]), None))
        group.setdefault("noise_count", 0)
        self._forget()
        if temperature > 0.0:
            self._draw_key()
            if len(set(group["params"])) < len(group["params"]):
                self.param_groups.pop()
                raise ValueError(
                    f"{self._name}: a parameter appears twice in a group, and would move twice; give each parameter once"
                )

    def _draw_key(self) -> int:
        """The key of all groups, drawn when the first of them gets a temperature."""
        key = next((g["noise_key"] for g in self.param_groups if g["noise_key"] is not None), None)
        if key is None:
            require_named_chain(self._name, self.__dict__.get("_key_source"))
            key = _shards.agreed_key(_noise.fresh_key(self.__dict__.get("_key_source")), self.param_groups)
        for group in self.param_groups:
            if group["noise_key"] is None:
                group["noise_key"] = key
        return key

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
        """
        require_named_chain(f"{self._name}.fork", generator)
        key = _shards.agreed_key(_noise.fresh_key(generator), self.param_groups)
        for group in self.param_groups:
            group["noise_key"] = key
        self._compare_anew()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()
        for group in self.param_groups:
            for name in ("temperature", "noise_stream", "freeze_after"):
                if name in self.defaults:
                    group.setdefault(name, self.defaults[name])
            group.setdefault("noise_key", None)
            group.setdefault("noise_count", 0)

    def _forget(self) -> None:
        """Nothing that was worked out for the parameters holds any more."""
        for name in ("_numbers", "_named", "_parts", "_kept", "_spread"):
            self.__dict__.pop(name, None)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state dict of this class, noise included, or take over one of torch's own class.

        A state dict of ``torch.optim`` brings its velocities, moments and hyperparameters; temperature, stream and key
        stay those of this optimizer: train with ``torch.optim``, then sample. As everywhere in torch, lr and momentum
        are those that were saved. A temperature given as a tensor stays the same tensor and takes the saved value.
        """
        saved = [dict(group) for group in state_dict["param_groups"]]
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
        asked = self.__dict__.get("_fused_scaling", False)
        return asked and not any(self._temperature(group) > 0.0 for group in self.param_groups)

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        self.__dict__["_fused_scaling"] = value

    def thermal_leaves(self) -> dict[str, ThermalLeaf]:
        """What :class:`bayesopt_chain.diagnostics.Thermometer` reads: by name, the leaves that the next step gives noise to."""
        return dict(leaves_of(self))

    # several ranks

    def _claims(self, noisy: list[Work]) -> list[Claim]:
        """What this rank is about to give noise to."""
        names = dict(zip([number for group in self._leaf_numbers() for number in group], self.__dict__["_named"]))
        out: list[Claim] = []
        for w in noisy:
            g, gradient = w.group, w.param.grad
            gradient = None if gradient is None or gradient.is_sparse else gradient
            mine = (names[w.number], g["noise_key"], w.number, self._runs(w.param), g["noise_count"])
            out.append(Claim(*mine, w.param, gradient))
        return out

    # the step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """torch's own step, then the noise. At temperature 0 nothing else than torch's step.

        Args:
            closure: as in torch.

        Returns:
            What the closure returned.
        """
        if not any(map(self._is_ours, self.param_groups)):
            return self._torch_step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._leaf_numbers()  # of the parameters themselves, not of their local parts
        if _shards.are_spread(self.param_groups):
            spread = self.__dict__.setdefault("_spread", _shards.Shards())
            with torch.no_grad(), spread.entered(self):
                self._noisy_step()  # pyright: ignore[reportAttributeAccessIssue]
            return loss
        with torch.set_grad_enabled(bool(self.defaults.get("differentiable", False))):
            self._noisy_step()  # pyright: ignore[reportAttributeAccessIssue]
        return loss

    @uncompiled
    def _noisy_step(self) -> None:
        plan: Plan | None = self.__dict__.get("_kept")
        if plan is None or not plan.holds(self):
            plan = Plan([item for i in range(len(self.param_groups)) for item in self._plan(i)])
        self.__dict__["_kept"] = None  # until the step is done
        if plan.noisy:
            self._witness.look(lambda: self._claims(plan.noisy), plan.noisy[0].param)
        self._prepare_velocities(plan)
        if plan.frozen:
            with _without_gradients([w.param for w in plan.frozen]):
                self._torch_step(None)
            self._move_frozen(plan.frozen)
        else:
            self._move(plan)
        self._add_noise(plan)
        if plan.noisy:
            self._witness.stepped(plan.noisy[0].param)
        for group in plan.groups:
            group["noise_count"] += 1
        if plan.kept or (self.timeless and plan.keep(self)):
            self.__dict__["_kept"] = plan

    def _is_ours(self, group: dict[str, Any]) -> bool:
        """Whether a group asks for more than torch's step: noise, a frozen preconditioner, or noise to be forgotten."""
        return (
            bool(group["noise_count"])
            or group.get("freeze_after") is not None
            or torch.is_tensor(group["temperature"])
            or group["temperature"] != 0.0
        )

    def _torch_step(self, closure: Callable[[], Any] | None) -> Any:
        """torch's own step without its hooks, which run around ours."""
        step = self.torch_class.step
        while getattr(step, "hooked", False):
            step = step.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
        return step(self, closure)  # pyright: ignore[reportArgumentType]

    def _move(self, plan: Plan) -> None:
        """torch's step for every parameter."""
        self._torch_step(None)

    def _plan(self, index: int) -> list[Work]:
        """What this step does to each leaf of the group that has a gradient. Raises before anything moved."""
        group = self.param_groups[index]
        temperature, freeze_after = self._temperature(group), group.get("freeze_after")
        if temperature > 0.0:
            self._check_group(group)
            if group["noise_key"] is None:
                self._draw_key()
        elif group["noise_count"]:  # noise that came before is no longer remembered
            for p in group["params"]:
                for name in _REMEMBERED:
                    self.state.get(p, {}).pop(name, None)
        if temperature == 0.0 and freeze_after is None:
            return []
        out: list[Work] = []
        linears: dict[tuple, Linear] = {}
        rules: dict[tuple, Noise] = {}
        for p, number in zip(group["params"], self._leaf_numbers()[index]):
            if p.grad is None:
                continue
            state = self.state[p]
            clock = self._clock(state)
            linear = linears.get(clock)
            if linear is None:
                linear = linears[clock] = self._linear(group, *clock)
            noise, early = None, False
            if temperature > 0.0:
                before = state.get("noise_before")
                if "noise" not in state:
                    self._check_leaf(p, group)
                    before = None
                noise = rules.get((clock, before))
                if noise is None:
                    self._check_lr(linear)
                    noise = rules[clock, before] = noise_of(linear, temperature, before)
                early = (
                    not self.adaptive
                    and linear.momentum >= _LEAST_MOMENTUM
                    and linear.step_size > 0.0
                    and state.get(linear.velocity or "") is not None
                )
            frozen = freeze_after is not None and clock[0] > freeze_after
            out.append(Work(group, p, state, number, linear, noise, clock[0], frozen, early))
        return out

    # what a subclass says of its step

    def _clock(self, state: dict[str, Any]) -> tuple:
        """The number of this update, first one 1, and whatever else the numbers of a step depend on."""
        return (int(state["step"]) + 1 if "step" in state else 1,)

    def _linear(self, group: dict[str, Any], updates: int) -> Linear:
        """The linear part of torch's step in this group at that update."""
        raise NotImplementedError

    def _denominator(self, group: dict[str, Any], updates: int, get: Callable[[str], Tensor]) -> Tensor:
        """``D`` of an adaptive rule behind torch's step, newly made; ``get(name)`` gives a tensor of the leaf's state."""
        raise NotImplementedError

    # noise

    def _prepare_velocities(self, plan: Plan) -> None:
        """In front of torch's step: velocities rescaled at a rise of lr, and noise that momentum brings in, ``e / mu``."""
        for w in plan.rescaled:
            if (velocity := w.state.get(w.linear.velocity or "")) is not None:
                velocity.mul_(w.noise.velocity_scale)  # pyright: ignore[reportOptionalMemberAccess]
        for w in plan.early_large:
            self._sweep(w, 1.0 / w.linear.momentum)
        if plan.early is None:
            plan.early = [self._batch(leaves) for leaves in _alike(plan.early_small)]
        for batch in plan.early:
            self._add_small(batch)

    def _add_noise(self, plan: Plan) -> None:
        """Behind torch's step."""
        for w in plan.late_large if not self.adaptive else [*plan.late_large, *plan.late_small]:
            self._sweep(w)
        for w in plan.direct:
            self._sweep_direct(w)
        if not self.adaptive:
            if plan.late is None:
                plan.late = [self._batch(leaves) for leaves in _alike(plan.late_small)]
            for batch in plan.late:
                self._add_small(batch)
        if not plan.kept:
            for w in plan.noisy:
                if w.noise.before is not None:  # pyright: ignore[reportOptionalMemberAccess]
                    w.state["noise_before"] = w.noise.before  # pyright: ignore[reportOptionalMemberAccess]
                elif "noise" not in w.state:
                    self._make_room(w)

    def _batch(self, leaves: list[Work]) -> Batch:
        """Small leaves whose noise has the same numbers, and the tensors it goes to."""
        first = leaves[0]
        linear, noise, group = first.linear, first.noise, first.group
        assert noise is not None
        velocities = [w.state[linear.velocity] for w in leaves] if linear.velocity is not None else []
        if first.early:
            targets = [(velocities, 1.0 / linear.momentum)]
        else:
            targets = [([w.param for w in leaves], -linear.step_size), *([(velocities, 1.0)] if velocities else [])]
        draws = [self._draw_of(w, "noise") for w in leaves]
        key, numbers = group["noise_key"], [w.number for w in leaves]
        runs = [r for w in leaves if (r := self._runs(w.param)) is not None] or None
        fill = self._normals().filler(draws, key, numbers, group["noise_stream"], runs)
        return Batch(group, noise, targets, draws, fill)

    def _add_small(self, batch: Batch) -> None:
        """``e`` of many small leaves at once, times a factor for each list of tensors it goes to."""
        group, noise, targets, draws, fill = batch
        if noise.previous:
            for tensors, factor in targets:
                foreach_add_(tensors, draws, alpha=factor * noise.previous)
        fill(group["noise_count"])
        for tensors, factor in targets:
            foreach_add_(tensors, draws, alpha=factor * noise.current)

    def _sweep(self, w: Work, early: float = 0.0) -> None:
        """The noise of one leaf, all of it for one block after the other; ``early``: into the velocity only, times that."""
        draw, fill = self._draw_of(w, "noise"), self._filler(w, 0)
        state, linear, noise = w.state, w.linear, w.noise
        assert noise is not None
        blocks = blocks_of(w.param, state, self._splits(w))
        for block in blocks:
            theta, xi = block(w.param), block(draw)
            velocity = block(state[linear.velocity]) if linear.velocity is not None else None
            root = None
            if self.adaptive:
                root = self._denominator(w.group, self._held(w), lambda name, at=block: at(state[name])).sqrt_()
            for fresh, size in ((False, noise.previous), (True, noise.current)):
                if fresh:
                    fill(xi)
                if not size:
                    continue
                if early and velocity is not None:
                    velocity.add_(xi, alpha=early * size)
                elif root is None:
                    theta.add_(xi, alpha=-linear.step_size * size)
                    if velocity is not None:
                        velocity.add_(xi, alpha=size)
                else:
                    theta.addcdiv_(xi, root, value=-linear.step_size * size)
                    if velocity is not None:
                        (velocity.addcdiv_ if self.averages_scaled else velocity.addcmul_)(xi, root, value=size)

    def _sweep_direct(self, w: Work) -> None:
        """The noise of the gradient's direct way to the parameter: ``xi_t + xi_{t-1}``, no velocity."""
        assert w.noise is not None
        draw, fill = self._draw_of(w, "noise_direct"), self._filler(w, 1)
        state, size = w.state, -w.linear.direct * w.noise.direct
        for block in blocks_of(w.param, state, self._splits(w)):
            theta, xi = block(w.param), block(draw)
            root = None
            if self.adaptive:
                root = self._denominator(w.group, self._held(w), lambda name, at=block: at(state[name])).sqrt_()
            for fresh in (False, True):
                if fresh:
                    fill(xi)
                theta.add_(xi, alpha=size) if root is None else theta.addcdiv_(xi, root, value=size)

    def _draw_of(self, w: Work, name: str) -> Tensor:
        """The last draw of a leaf; zeros before the first."""
        state = w.state
        if name not in state:
            state[name] = torch.zeros_like(w.param, memory_format=torch.preserve_format, requires_grad=False)
            if w.param.dtype in (torch.bfloat16, torch.float16):
                self._warn_of_rounding(w)
        return state[name]

    def _make_room(self, w: Work) -> None:
        """Entries of a leaf that has drawn nothing yet, since lr is 0: ``torch.distributed.checkpoint`` makes such a step to
        learn what a state holds, and loads no more than that."""
        self._draw_of(w, "noise")
        w.state["noise_before"] = None
        if self._linear({**w.group, "lr": 1.0}, *self._clock(w.state)).direct > 0.0:
            self._draw_of(w, "noise_direct")

    def _normals(self) -> _noise.Normals:
        normals = self.__dict__.get("_source")
        if normals is None:
            normals = self.__dict__["_source"] = _noise.Normals()
        return normals

    def _filler(self, w: Work, branch: int) -> Callable:
        g = w.group
        key, number, stream = g["noise_key"], _noise.draw_number(w.number, branch), g["noise_stream"]
        return self._normals().of(key, number, g["noise_count"], stream, w.param.device, self._runs(w.param))

    def _runs(self, p: Tensor) -> Runs | None:
        """Where parameters are spread over ranks, the elements of the whole one that are here."""
        spread = self.__dict__.get("_spread")
        if spread is not None:
            return spread.runs_of(p)
        parts = self.__dict__.get("_parts")
        return None if parts is None else parts[p]

    def _splits(self, w: Work) -> bool:
        """Whether a leaf's draw may be made piece after piece."""
        return self._runs(w.param) is not None or _noise.splits(w.group["noise_stream"], w.param.device)

    def _leaf_numbers(self) -> list[list[int]]:
        """The numbers of each group's parameters: of their names, or their indices where there are no names."""
        if "_numbers" not in self.__dict__:
            params = [p for group in self.param_groups for p in group["params"]]
            self.__dict__["_named"] = names = self._names()
            if any(place is not None and place.runs is not None for place in map(place_of, params)):
                self.__dict__["_parts"] = {p: elements_of(p) for p in params}
            numbers = iter(_noise.leaf_numbers(names))
            self.__dict__["_numbers"] = [[next(numbers) for _ in group["params"]] for group in self.param_groups]
        return self.__dict__["_numbers"]

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

    # a frozen preconditioner

    def _held(self, w: Work) -> int:
        """The update whose ``D`` counts: the last one before freezing."""
        return min(w.updates, w.group["freeze_after"]) if w.frozen else w.updates

    def _move_frozen(self, work: list[Work]) -> None:
        """torch's step with ``D`` left as it is: momentum behind a fixed preconditioner."""
        for w in work:
            p, group, linear, state = w.param, w.group, w.linear, w.state
            assert p.grad is not None
            g = -p.grad if group["maximize"] else p.grad
            if group["weight_decay"] and not group.get("decoupled_weight_decay", False):
                g = g.add(p, alpha=group["weight_decay"])
            denominator = self._denominator(group, self._held(w), state.__getitem__)
            p.mul_(1.0 - linear.shrink)
            if linear.direct:
                p.addcdiv_(g, denominator, value=-linear.direct)
            if linear.velocity is None:
                p.addcdiv_(g, denominator, value=-linear.step_size)
            elif self.averages_scaled:
                velocity = state[linear.velocity].mul_(linear.momentum).addcdiv_(g, denominator)
                p.add_(velocity, alpha=-linear.step_size)
            else:
                velocity = state[linear.velocity].mul_(linear.momentum).add_(g, alpha=linear.gain)
                p.addcdiv_(velocity, denominator, value=-linear.step_size)
            self._tick(state, group)

    def _tick(self, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] += 1

    # refusals

    def _temperature(self, group: dict[str, Any]) -> float:
        """The group's temperature now: a number or a tensor of one element."""
        temperature = group["temperature"]
        if callable(temperature):
            raise TypeError(
                f"{self._name}: temperature is a function; set group['temperature'] in the loop, or give a 0-d tensor and "
                "fill it"
            )
        if torch.is_tensor(temperature) and temperature.requires_grad:
            raise ValueError(f"{self._name}: temperature requires grad, which a step does not carry; detach it")
        value = float(temperature)
        if not 0.0 <= value < float("inf"):
            raise ValueError(f"{self._name}: temperature must be non-negative and finite, got {temperature!r}")
        return value

    def _check_group(self, group: dict[str, Any]) -> None:
        """Refuse what no noise is matched to."""
        if self.refusal is not None:
            raise ValueError(f"{self._name}: no temperature above 0: {self.refusal}")
        if group.get("capturable"):
            raise ValueError(
                f"{self._name}: capturable=True at temperature > 0: the noise counts steps on the host. "
                "Set capturable=False, or use bc.make_step with bc.capture"
            )
        if ("_spread" in self.__dict__ or "_parts" in self.__dict__) and (
            group.get("noise_stream") == "generator" or group.get("differentiable")
        ):
            what = "differentiable=True" if group.get("differentiable") else 'stream="generator"'
            raise ValueError(
                f"{self._name}: {what} with parameters that are DTensors or parts of leaves at temperature > 0: their noise "
                "is numbered by the elements of the whole parameter and drawn on this rank's part; leave it out"
            )
        if group.get("differentiable"):
            moving = [name for name in ("lr", "weight_decay") if getattr(group.get(name), "requires_grad", False)]
            if self.adaptive or moving:
                what = "an adaptive scaling" if self.adaptive else f"{moving[0]} that requires grad"
                raise ValueError(
                    f"{self._name}: differentiable=True with {what} at temperature > 0 would lose the noise's derivative; "
                    "set temperature=0, or use bc.meta"
                )

    def _check_leaf(self, p: Tensor, group: dict[str, Any]) -> None:
        if p.grad is not None and p.grad.is_sparse and group.get("momentum", 0):
            raise ValueError(
                f"{self._name}: sparse gradients and momentum at temperature > 0: set momentum=0, or sparse=False"
            )
        if p.is_complex():
            raise ValueError(f"{self._name}: complex parameters at temperature > 0: sample torch.view_as_real of them")
        if type(p) not in (Tensor, torch.nn.Parameter):
            raise ValueError(
                f"{self._name}: a parameter of type {type(p).__name__} at temperature > 0: noise on the pieces of a wrapped "
                "tensor would not be independent; sample plain tensors, or DTensors"
            )

    def _check_lr(self, linear: Linear) -> None:
        if not (0.0 <= linear.step_size < float("inf") and 0.0 <= linear.direct < float("inf")):
            raise ValueError(
                f"{self._name}: lr must be non-negative and finite at temperature > 0, got a step size of {linear.step_size}"
            )

    def _check_momentum(self, momentum: float, what: str) -> float:
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"{self._name}: {what} must lie in [0, 1) at temperature > 0, got {momentum}")
        return momentum

    def _warn_of_rounding(self, w: Work) -> None:
        assert w.noise is not None
        size = w.param.detach().abs().float().mean()
        step = w.linear.step_size * max(w.noise.current, w.noise.direct)
        if self.adaptive:
            step /= float(self._denominator(w.group, self._held(w), w.state.__getitem__).float().mean().sqrt())
        if step < torch.finfo(w.param.dtype).eps * float(size) / 2:
            warnings.warn(
                f"{self._name}: parameters in {w.param.dtype} with entries near {float(size):.2g}, and a step's noise of about "
                f"{step:.2g} rounds away; keep float32 parameters and use autocast",
                stacklevel=6,
            )


def _alike(work: list[Work]) -> Iterable[list[Work]]:
    """Leaves whose noise has the same numbers, of one dtype and device."""
    out: dict[tuple, list[Work]] = {}
    for w in work:
        out.setdefault((id(w.noise), w.early, w.param.dtype, w.param.device), []).append(w)
    return out.values()


@contextmanager
def _without_gradients(params: list[Tensor]):
    """Hide the gradients of some parameters, so that torch's step leaves these alone."""
    grads = [p.grad for p in params]
    for p in params:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in zip(params, grads):
            p.grad = grad
