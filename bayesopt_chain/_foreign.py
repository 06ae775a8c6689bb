"""TorchOpt's own links in our chains: those whose effect on the gradient is known are recognised, the rest run as
they are.

TorchOpt's transformations are closures, recognised by the name of their ``update`` and read through its cells.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torchopt.base import ChainedGradientTransformation, GradientTransformation, IdentityGradientTransformation

from bayesopt_chain._chain import Foreign, Rule, chain, keywords_of, masked
from bayesopt_chain._response import Linear, Nonlinear


def adopt(link: GradientTransformation) -> tuple[Rule, ...]:
    """The rules that stand for a foreign transformation."""
    if isinstance(link, IdentityGradientTransformation):
        return ()
    module = getattr(link.update, "__module__", "") or ""
    name = getattr(link.update, "__qualname__", type(link.update).__name__)
    if module.startswith("torchopt") and name in _KNOWN:
        return _KNOWN[name](link, inspect.getclosurevars(link.update).nonlocals)
    maker = name.split(".<locals>")[-2].rpartition(".")[2] if "<locals>" in name else name
    return (Foreign(link, None, f"{module}.{maker}", keywords_of(link)),)


def _nonlinear(name: str) -> Callable:
    return lambda link, cells: (Foreign(link, Nonlinear(), name),)


def _trace(link, cells: dict[str, Any]):
    from bayesopt_chain.links.momentum import add_momentum

    return add_momentum(cells["momentum"], cells.get("dampening", 0.0), cells["nesterov"]).rules


def _scale(link, cells):
    from bayesopt_chain.links.learning_rate import Scale

    return (Scale(cells["step_size"]),)


def _schedule(link, cells):
    from bayesopt_chain.links.learning_rate import Scale

    fn = cells["step_size_fn"]
    inner = inspect.getclosurevars(fn).nonlocals
    if fn.__qualname__ == "_scale_by_neg_lr.<locals>.schedule_wrapper" and "lr" in inner:
        return (Scale(inner["lr"], -1),)
    return (Scale(fn),)


def _decay(link, cells):
    from bayesopt_chain.links.weight_decay import AddDecayedWeights

    return (AddDecayedWeights(cells["weight_decay"]),)


def _flip(link, cells):
    from bayesopt_chain.links.weight_decay import flip_sign_and_add_weight_decay

    flips = "neg" in link.update.__code__.co_names or any(
        "neg" in getattr(c, "co_names", ()) for c in link.update.__code__.co_consts
    )
    return flip_sign_and_add_weight_decay(cells.get("weight_decay", 0.0), flips).rules


def _masked(link, cells):
    return masked(chain(cells["inner"]), cells["mask"]).rules


def _flat(link, cells):
    inner = cells["inner"]
    links = inner.transformations if isinstance(inner, ChainedGradientTransformation) else (inner,)
    rules = chain(*links).rules
    if any(isinstance(rule, Foreign) for rule in rules):  # its links expect the flat lists that only it makes
        return (Foreign(link, None, "torchopt's optimizer (bc has the same with a temperature)"),)
    return rules


_KNOWN: dict[str, Callable] = {
    "clip_grad_norm.<locals>.update_fn": _nonlinear("clip_grad_norm"),
    "nan_to_num.<locals>.update_fn": _nonlinear("nan_to_num"),
    "register_hook.<locals>.update_fn": lambda link, cells: (Foreign(link, Linear(), "register_hook"),),
    "_trace.<locals>.update_fn": _trace,
    "_scale.<locals>.update_fn": _scale,
    "_scale_by_schedule.<locals>.update_fn": _schedule,
    "_add_decayed_weights.<locals>.update_fn": _decay,
    "_flip_sign_and_add_weight_decay.<locals>.update_fn": _flip,
    "_masked.<locals>.update_fn": _masked,
    "chain_flat.<locals>.update_fn": _flat,
}
