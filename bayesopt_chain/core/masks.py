"""Links that act on some leaves only, and chains for groups of leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import optree
from torchopt.base import EmptyState, GradientTransformation

from bayesopt_chain.core.chain import Chain, chain, leaves_of_prefix
from bayesopt_chain.core.foreign import recognises
from bayesopt_chain.core.link import Rule
from bayesopt_chain.core.response import Linear


@dataclass(frozen=True)
class MaskedRule(Rule):
    """A rule that acts only on the leaves that every one of its masks selects."""

    rule: Rule
    masks: tuple[Any, ...] = field(hash=False)

    def __getattr__(self, name):
        if name.startswith("__") or name == "rule":
            raise AttributeError(name)
        return getattr(self.rule, name)

    @property
    def response(self):
        return self.rule.response

    @property
    def accepts(self):
        return self.rule.accepts

    @property
    def on_trees(self):
        return self.rule.on_trees

    @property
    def needs_params(self):
        return self.rule.needs_params

    @property
    def keeps_echo(self):
        return self.rule.keeps_echo

    @property
    def needs(self):
        return self.rule.needs

    def init(self, params):
        return self.rule.init(params)

    def update(self, g, state, params, ctx):
        return self.rule.update(g, state, params, ctx)

    def __str__(self) -> str:
        return f"masked({self.rule}, {', '.join(str(getattr(mask, 'label', '...')) for mask in self.masks)})"


def masked(link: GradientTransformation, mask: Any) -> Chain:
    """Apply ``link`` only to the leaves selected by ``mask``; the others pass through untouched.

    Args:
        link: a link or a whole chain.
        mask: tree of booleans that is a prefix of the parameter tree, or a function from the parameters (from the
            gradients, where ``update`` is not given parameters) to one.

    Returns:
        A chain. Noise is matched for each leaf to the links that act on that leaf.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.chain(bc.masked(bc.add_decayed_weights(0.1), {"w": True, "b": False}), bc.sgd(1.0))
        >>> params = {"w": torch.ones(1), "b": torch.ones(1)}
        >>> grads = {"w": torch.zeros(1), "b": torch.zeros(1)}
        >>> tx.update(grads, tx.init(params), params=params, inplace=False)[0]["w"]
        tensor([-0.1000])
    """
    rules = chain(link).rules
    return Chain(tuple(_with_mask(rule, mask) for rule in rules))


def _with_mask(rule: Rule, mask: Any) -> MaskedRule:
    if isinstance(rule, MaskedRule):
        return MaskedRule(rule.rule, (*rule.masks, mask))
    return MaskedRule(rule, (mask,))


@dataclass(frozen=True)
class _Labelled:
    """The mask of one group of a partition."""

    labels: Any = field(hash=False)
    label: Any

    def __call__(self, tree: Any) -> Any:
        labels = self.labels(tree) if callable(self.labels) else self.labels
        return optree.tree_map(lambda label: label == self.label, labels)


def partition(transformations: Mapping[str, GradientTransformation], labels: Any) -> Chain:
    """Give each group of leaves its own chain: its own learning rate, momentum and temperature.

    Args:
        transformations: chain for each label.
        labels: tree of labels that is a prefix of the parameter tree, or a function from the parameters to one. Every
            leaf needs a label that ``transformations`` knows.

    Returns:
        A chain; noise is matched within each group.

    Raises:
        ValueError: at ``init``, a label that no chain is given for.

    Example:
        Last-layer Bayes: SGD below, SGHMC for the head.

        >>> import bayesopt_chain as bc
        >>> tx = bc.partition({"body": bc.sgd(0.1), "head": bc.sghmc(0.1, temperature=1e-3)}, {"conv": "body", "fc": "head"})
    """
    return chain(
        Chain((_CheckLabels(labels, tuple(transformations)),)),
        *(masked(tx, _Labelled(labels, name)) for name, tx in transformations.items()),
    )


@dataclass(frozen=True)
class _CheckLabels(Rule):
    """Refuses, at ``init``, leaves that no group of a partition takes."""

    labels: Any = field(hash=False)
    known: tuple[Any, ...]
    response = Linear()
    on_trees = True

    def init_tree(self, params):
        labels = self.labels(params) if callable(self.labels) else self.labels
        unknown = {
            label
            for label, p in zip(leaves_of_prefix(labels, params), optree.tree_leaves(params, none_is_leaf=True))
            if p is not None and label not in self.known
        }
        if unknown:
            raise ValueError(
                f"partition: labels {sorted(map(str, unknown))} have no chain; transformations has {list(self.known)}"
            )
        return EmptyState()

    def update(self, g, state, params, ctx):
        return g, state

    def __str__(self) -> str:
        return f"partition into {', '.join(map(str, self.known))}"


@recognises("_masked.<locals>.update_fn")
def _torchopts_masked(link, cells):
    return masked(chain(cells["inner"]), cells["mask"]).rules
