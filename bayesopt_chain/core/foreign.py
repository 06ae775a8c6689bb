"""Transformations written elsewhere, in our chains: TorchOpt's own links are recognised, the rest run as they are.

TorchOpt's transformations are closures. Each is known by the qualified name of its ``update`` and read through its cells; the
module of the link that stands for it registers the translation with :func:`recognises`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchopt.base import GradientTransformation, IdentityGradientTransformation

from bayesopt_chain.core.link import Rule
from bayesopt_chain.core.response import Linear, Nonlinear, Response

Translation = Callable[[GradientTransformation, Mapping[str, Any]], tuple[Rule, ...]]
_KNOWN: dict[str, Translation] = {}
ANY = "**"  # among the keywords of a link that takes every keyword


@dataclass(frozen=True)
class Foreign(Rule):
    """A transformation written elsewhere, run on trees as its author expects."""

    transformation: GradientTransformation
    response: Response | None = None  # None: nobody declared it
    name: str = "foreign link"
    accepts: frozenset[str] = frozenset()
    on_trees = True

    def init_tree(self, params: Any) -> Any:
        return self.transformation.init(params)

    def update(self, g, state, params, ctx):
        tree, state = self.transformation.update(
            ctx.to_tree(g),
            state,
            params=None if params is None else ctx.to_tree(params),
            inplace=ctx.inplace,
            **ctx.extra,
        )
        return ctx.from_tree(tree), state

    def __str__(self) -> str:
        return self.name


def recognises(qualified_name: str) -> Callable[[Translation], Translation]:
    """Register the rules that stand for TorchOpt's closure of that name, as a function of (transformation, its cells)."""

    def register(translation: Translation) -> Translation:
        _KNOWN[qualified_name] = translation
        return translation

    return register


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


def keywords_of(link: GradientTransformation) -> frozenset[str]:
    """Named keywords of a foreign ``update`` beyond the protocol's own."""
    if hasattr(link, "accepts"):
        return link.accepts
    parameters = list(inspect.signature(link.update).parameters.values())[2:]
    names = {ANY if p.kind is p.VAR_KEYWORD else p.name for p in parameters}
    return frozenset(names) - {"params", "inplace"}


@recognises("clip_grad_norm.<locals>.update_fn")
def _clipping(link, cells):
    return (Foreign(link, Nonlinear(), "clip_grad_norm"),)


@recognises("nan_to_num.<locals>.update_fn")
def _nan_to_num(link, cells):
    return (Foreign(link, Nonlinear(), "nan_to_num"),)


@recognises("register_hook.<locals>.update_fn")
def _hook(link, cells):
    return (Foreign(link, Linear(), "register_hook"),)
