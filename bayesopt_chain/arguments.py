"""What the arguments of every factory may be, by their names: a word has one meaning and one range in the whole library.

The ranges apply where a temperature is positive. At temperature 0 we accept what TorchOpt accepts; links do not know the
temperature, so they look at types when they are made, and a chain that samples looks at its links' ranges in ``init``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import optree
from torchopt.base import GradientTransformation

from bayesopt_chain import kinds
from bayesopt_chain.checks import LARGEST, TEMPERATURE_HINT, number, short
from bayesopt_chain.kinds import Kind, looking


@dataclass(frozen=True)
class Range:
    """An argument that is a number of the interval ``within``, or one of the other things that are allowed."""

    within: str
    integer: bool = False
    tensor: bool = False
    schedule: bool = False
    none: bool = False
    hint: str = ""  # what to do instead

    def __call__(self, name: str, value: Any, ranges: bool) -> None:
        """Refuse a value that it may not have; with ``ranges=False`` only the type is looked at."""
        if not (self.none and value is None):
            within = self.within if ranges else None
            number(name, value, within, self.integer, self.tensor, self.schedule, self.hint)


def _betas(name: str, value: Any, ranges: bool) -> None:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{name} must be two numbers, got {short(value)}")
    for i, beta in enumerate(value):
        number(f"{name}[{i}]", beta, "[0, 1)" if ranges else None)


def _temperatures(name: str, value: Any, ranges: bool) -> None:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(f"{name} must be a sequence of numbers, got {short(value)}")
    for i, entry in enumerate(value):
        number(f"{name}[{i}]", entry, "(0, inf)" if ranges else None)


def _transition(name: str, value: Any, ranges: bool) -> None:
    if isinstance(value, type):
        raise TypeError(f"{name} must be numbers, a matrix or a function of the parameters, got {short(value)}")
    NumberOrTree(FINITE)(name, value, ranges)


def _is_mask(x: Any) -> bool:
    return kinds.FUNCTION.fits(x) or all(isinstance(bit, bool) for bit in optree.tree_leaves(x))


@dataclass(frozen=True)
class NumberOrTree:
    """A number of a range, or a tree, which is looked at where the parameters are known."""

    range: Range

    def __call__(self, name: str, value: Any, ranges: bool) -> None:
        if isinstance(value, (bool, int, float, complex)):
            self.range(name, value, ranges)


Rule = Callable[
    [str, Any, bool], None
]  # (name, value, whether ranges are checked beside types); refuses what may not be
COUNT, _MEMORY = Range(f"[0, {LARGEST}]", integer=True), Range("[0, 1]")
POSITIVE, NOT_NEGATIVE, FINITE = Range("(0, inf)"), Range("[0, inf)"), Range("(-inf, inf)")
FROM_ZERO = Range("[0, inf]")  # of links without noise, which accept what TorchOpt's accept
MOMENTUM = Range("[0, 1)")
ORDER = Kind(lambda x: type(x) is int and x in (1, 2), "1 or 2", (int,))
AT_LEAST_ONE = Range(f"[1, {LARGEST}]", integer=True)
ARGUMENTS: dict[str, Rule] = {
    "temperature": Range("[0, inf)", tensor=True, schedule=True, hint=TEMPERATURE_HINT),
    "lr": Range("[0, inf)", tensor=True, schedule=True),
    "step_size": Range("(-inf, inf)", tensor=True, schedule=True),
    "generator": kinds.GENERATOR,
    "order": ORDER,
    "betas": _betas,
    **dict.fromkeys(("momentum", "b1", "b2"), MOMENTUM),
    **dict.fromkeys(("alpha", "rho", "decay"), _MEMORY),
    **dict.fromkeys(("weight_decay", "low", "high"), FINITE),
    **dict.fromkeys(("eps", "eps_root", "lr_decay", "initial_scale", "initial_accumulator_value"), NOT_NEGATIVE),
    **dict.fromkeys(("friction", "loss_variance", "correction_factor", "strength"), NOT_NEGATIVE),
    **dict.fromkeys(("init_hessian", "variance_floor"), POSITIVE),
    "dampening": Range("(-inf, 1)"),
    "thermostat_mass": Range("(0, inf)", none=True),
    "temperatures": _temperatures,
    "mask": Kind(_is_mask, "a tree of True and False, or a function of the parameters"),
    **dict.fromkeys(("omega", "step_size_fn"), Kind(callable, "a function of the step count")),
    **dict.fromkeys(
        ("optimizer", "scale_optimizer"),
        kinds.instance(GradientTransformation, "a gradient transformation").or_none(),
    ),
    **dict.fromkeys(("init_scale", "prior_precision"), NumberOrTree(POSITIVE)),
    "transition": _transition,
    "transition_noise": NumberOrTree(NOT_NEGATIVE),
    "clip_radius": Range("(0, inf]"),
    "zeta": Range("(0, 1]"),
    "forgetting": Range("(0, 1]", tensor=True),
    "freeze_after": Range(f"[0, {LARGEST}]", integer=True, none=True),
    **dict.fromkeys(("burn_in", "start", "rank"), COUNT),
    **dict.fromkeys(("cycle", "batch_size", "swap_every", "every"), AT_LEAST_ONE),
    **dict.fromkeys(("n_samples", "bins"), Range("[1, 16777216]", integer=True)),
    **dict.fromkeys(("nesterov", "maximize", "moment_requires_grad", "centered", "use_accelerated_op"), kinds.BOOL),
    **dict.fromkeys(("antithetic", "stick_the_landing", "rescale_lr", "per_parameter", "lr_inside"), kinds.BOOL),
}
_SHOWN = {"lr": "lr (learning rate)", "weight_decay": "weight_decay (weight decay)"}
Factory = TypeVar("Factory", bound=Callable[..., Any])


def checked(factory: Factory) -> Factory:
    """Check the arguments of a factory, types and ranges, before it runs; at temperature 0 the temperature's alone."""
    return _checking(factory, True, {})


def checked_as(**rules: Rule) -> Callable[[Factory], Factory]:
    """Check the arguments of a factory as :func:`checked` does, some of them by rules of its own, at any temperature.

    For what a sampler computes with when it is made: a learning rate that it divides by is a positive number, no schedule.
    """
    return lambda factory: _checking(factory, True, rules)


def checked_types(factory: Factory) -> Factory:
    """Check the types of a link's arguments before it is made."""
    return _checking(factory, False, {})


def checked_within(**rules: Rule) -> Callable[[Factory], Factory]:
    """Check the types of a link's arguments, and the ranges of some, before it is made at any temperature."""
    return lambda factory: _checking(factory, False, rules)


def check_link(link: Any) -> None:
    """Check the fields of a link in a chain that samples, types and ranges."""
    for part in dataclasses.fields(link):
        if part.name in ARGUMENTS and getattr(link, part.name) is not part.default:
            ARGUMENTS[part.name](_shown(type(link).__name__, part.name), getattr(link, part.name), True)


def _shown(owner: str, name: str) -> str:
    return f"{owner}: {_SHOWN.get(name, name)}"


def _checking(factory: Factory, ranges: bool, own: Mapping[str, Rule]) -> Factory:
    rules = {**ARGUMENTS, **own}

    def look(given: dict[str, Any], defaults: dict[str, Any]) -> None:
        heat = given.get("temperature", defaults.get("temperature"))
        is_zero_temperature = isinstance(heat, (int, float)) and heat == 0
        for name in [name for name in defaults if name in rules and name in given]:
            always = name in own or name == "temperature" or not is_zero_temperature
            if always and given[name] is not defaults[name]:
                rules[name](_shown(factory.__name__, name), given[name], ranges or name in own)

    return looking(factory, look)
