"""What a link is, and how links compose: one flat sequence of rules, run once over the leaves of the gradient tree.

A *rule* is one idea (momentum, a learning rate, the noise): how its state starts and how it turns a list of gradient
leaves into a list of updates. A :class:`Chain` is a ``torchopt.base.GradientTransformation``, the pair
``(init, update)``, made of rules; a link such as ``add_momentum(0.9)`` is a chain of one rule, so chains nest and
associate by concatenation. The chain flattens the trees once, routes keywords, and injects the noise where
:mod:`bayesopt_chain._placement` says it belongs, whatever position it was written in.

The state is a tuple with one entry for each rule, in the order written.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torchopt.base import ChainedGradientTransformation, EmptyState, GradientTransformation

from bayesopt_chain import _checks, _placement
from bayesopt_chain._response import Adaptive, Linear, Noise, Response

Leaves = list  # of Tensor | None, in optree order


class Context(NamedTuple):
    """What a rule may look at besides its own state while it updates."""

    inplace: bool
    extra: Mapping[str, Any]
    injection: Any = None  # the noise, for a rule with an adaptive response
    velocity_scale: Any = None  # for each leaf, the factor the velocity is scaled by before this step
    to_tree: Callable[[Leaves], Any] | None = None  # the rule's leaves as the user's tree
    from_tree: Callable[[Any], Leaves] | None = None
    factors: list | None = None  # for a rule that takes them: what the next rule would multiply each leaf by
    done: bool = False  # the rule before has multiplied by this rule's factors already

    def scaled(self, velocity: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """A velocity as this step begins with it (see ``_matched_noise.scheduled_momentum_noise``)."""
        if self.velocity_scale is None:
            return velocity
        multiply = Tensor.mul_ if self.inplace else Tensor.mul
        return tuple(v if s is None else multiply(v, s.to(v.dtype)) for v, s in zip(velocity, self.velocity_scale))


class Rule:
    """One idea of a chain. Subclasses are frozen dataclasses, so that chains compare, hash, print and pickle."""

    response: Response | None = None
    accepts: frozenset[str] = frozenset()
    on_trees = False  # whether init_tree and update want the user's tree, as a foreign link does
    masks: tuple[Any, ...] = ()
    takes_factors = False  # whether update multiplies by ``ctx.factors`` while its leaves are in cache

    def factors(self, state: Any, n: int) -> list | None:
        """What this rule multiplies each of ``n`` leaves by, if that is all it does."""
        return None

    def init(self, params: Leaves) -> Any:
        """State for parameters given as leaves; ``None`` stands for an absent parameter."""
        return EmptyState()

    def update(self, g: Leaves, state: Any, params: Leaves | None, ctx: Context) -> tuple[Leaves, Any]:
        """New leaves and state. A ``None`` gradient stays ``None`` and leaves its part of the state alone."""
        return g, state

    def __str__(self) -> str:
        return repr(self)


class Chain(GradientTransformation):
    """A gradient transformation made of rules; what every function of this library returns.

    Attributes:
        rules: the rules, in the order written.
    """

    rules: tuple[Rule, ...]

    def __new__(cls, rules: tuple[Rule, ...]) -> Chain:
        program = _Program(tuple(rules))
        self = super().__new__(cls, init=program.init, update=program.update)
        self.rules = program.rules
        self._program = program
        return self

    @property
    def response(self):
        """The response of the only link, or the tuple of all links' responses."""
        responses = tuple(rule.response for rule in self.rules)
        return responses[0] if len(responses) == 1 else responses

    def chain(self, next: GradientTransformation) -> Chain:
        """This chain followed by ``next``."""
        return chain(self, next)

    def _replace(self, **kwargs) -> GradientTransformation:
        return GradientTransformation(self.init, self.update)._replace(**kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chain) and self.rules == other.rules

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.rules)

    def __reduce__(self):
        return Chain, (self.rules,)

    def __repr__(self) -> str:
        if len(self.rules) == 1 and not isinstance(self.rules[0].response, Noise):
            return str(self.rules[0])
        lines = [f"    {rule},{_placement.describe(self.rules, i)}" for i, rule in enumerate(self.rules)]
        return "\n".join(["chain(", *lines, ")"])


class _Program:
    """The two functions of a chain. Holds no state but a cache of where the noise goes."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self.rules = rules
        self.accepts = frozenset().union(*(rule.accepts for rule in rules)) if rules else frozenset()
        self.has_noise = any(isinstance(rule.response, Noise) for rule in rules)
        self.adaptive = [isinstance(rule.response, Adaptive) for rule in rules]
        self.cache: dict[Any, _placement.Plan] = {}

    def init(self, params: Any, *, like: Any = None) -> tuple:
        """State for ``params``; ``like`` is the state of an optimizer to take over what both remember."""
        leaves, spec = optree.tree_flatten(params, none_is_leaf=True)
        where = self.positions(spec, params)
        plan = self.plan(where, len(leaves))
        if plan is not None:
            _checks.parameters(leaves, optree.tree_paths(params, none_is_leaf=True))
        state = []
        for rule, idx in zip(self.rules, where):
            if rule.on_trees:
                state.append(rule.init_tree(_tree(spec, _pick(leaves, idx), idx)))
            else:
                state.append(rule.init(_pick(leaves, idx)))
        if plan is not None:
            rates = self.rates(state, where, plan, len(leaves))
            for i in plan.noise:
                state[i] = self.rules[i].start(plan.placements[i], leaves, rates)
        return tuple(state) if like is None else _warm_start(tuple(state), like)

    def update(self, updates: Any, state: tuple, *, params: Any = None, inplace: bool = True, **extra: Any):
        """Transformed updates and the next state. See ``torchopt.base.GradientTransformation``."""
        if unknown := extra.keys() - self.accepts:
            raise TypeError(
                f"update() got {', '.join(sorted(unknown))}=, which no link of this chain takes; "
                f"its links take: {', '.join(sorted(self.accepts)) or 'no further keywords'}"
            )
        if len(state) != len(self.rules):
            raise ValueError(
                f"state: expected one entry for each of {len(self.rules)} links, got {len(state)}; call init first"
            )
        g, spec = optree.tree_flatten(updates, none_is_leaf=True)
        p = optree.tree_leaves(params, none_is_leaf=True) if params is not None else None
        where = self.positions(spec, params if params is not None else updates)
        plan = self.plan(where, len(g))
        new_state = list(state)
        injections: list[Injection] = []
        scales: list | None = None
        if plan is not None:
            _checks.updates(g, p, spec, None if p is None else optree.tree_structure(params, none_is_leaf=True))
            rates, gains = self.rates(state, where, plan, len(g)), self.gains(state, where, plan)
            for i in plan.noise:
                injection, new_state[i] = self.rules[i].draw(plan.placements[i], state[i], g, rates, gains, inplace)
                injections.append(injection)
                if injection.velocity_scale:
                    scales = scales or [None] * len(g)
                    for j, scale in injection.velocity_scale.items():
                        scales[j] = scale
        factors = None
        acting = {at for injection in injections for at in injection.at.values()}
        for i, rule in enumerate(self.rules):
            adaptive = self.adaptive[i]
            done = factors is not None
            factors = self.next_factors(i, where, state, injections, g) if inplace and rule.takes_factors else None
            if i in acting and not adaptive:
                g = _inject(injections, i, g, inplace)
            idx = where[i]
            ctx = Context(
                inplace,
                {k: v for k, v in extra.items() if k in rule.accepts} if extra else extra,
                AdaptiveNoise(injections, i, idx) if adaptive and injections else None,
                None if scales is None else _pick(scales, idx),
                partial(_tree, spec, idx=idx) if rule.on_trees else None,
                partial(_leaves, spec, idx=idx) if rule.on_trees else None,
                factors,
                done,
            )
            mine, new_state[i] = rule.update(_pick(g, idx), new_state[i], None if p is None else _pick(p, idx), ctx)
            if idx is None:
                g = mine
            else:
                g = list(g)
                for j, leaf in zip(idx, mine):
                    g[j] = leaf
        if len(self.rules) in acting:
            g = _inject(injections, len(self.rules), g, inplace)
        return optree.tree_unflatten(spec, g), tuple(new_state)

    def next_factors(self, i: int, where, state, injections: list[Injection], g: Leaves) -> list | None:
        """The factors of the rule behind rule ``i``, where nothing comes between the two and nobody differentiates."""
        if (
            i + 1 == len(self.rules)
            or where[i] is not None
            or where[i + 1] is not None
            or any(i + 1 in injection.at.values() for injection in injections)
            or torch._C._functorch.peek_interpreter_stack() is not None
            or any(x is not None and x.requires_grad for x in g)
        ):
            return None
        return self.rules[i + 1].factors(state[i + 1], len(g))

    def positions(self, spec, tree) -> list[list[int] | None]:
        """For each rule the leaves it acts on; ``None`` for all."""
        seen: dict[int, set[int]] = {}
        out: list[list[int] | None] = []
        for rule in self.rules:
            for mask in rule.masks:
                if id(mask) not in seen:
                    seen[id(mask)] = _selected(mask, tree)
            chosen = [seen[id(mask)] for mask in rule.masks]
            out.append(sorted(set.intersection(*chosen)) if chosen else None)
        return out

    def plan(self, where: list[list[int] | None], n: int) -> _placement.Plan | None:
        """Where the noise goes for each of ``n`` leaves; ``None`` without noise."""
        if not self.has_noise:
            return None
        key = (n, tuple(None if w is None else tuple(w) for w in where))
        if key not in self.cache:
            self.cache[key] = _placement.plan(self.rules, where, n)
        return self.cache[key]

    def rates(self, state, where, plan, n: int) -> dict[int, dict[int, Tensor]]:
        """By rule and leaf, the magnitude of every gain that changes with time."""
        return {
            i: _by_leaf(where[i], self.rules[i].rate(state[i], n if where[i] is None else len(where[i])))
            for i in plan.rates
        }

    def gains(self, state, where, plan) -> dict[int, dict[int, Tensor]]:
        """By rule and leaf, the diagonal of every frozen preconditioner."""
        return {i: _by_leaf(where[i], self.rules[i].preconditioner(state[i])) for i in plan.gains}


def _by_leaf(idx: list[int] | None, values) -> dict[int, Tensor]:
    return dict(enumerate(values) if idx is None else zip(idx, values))


def _pick(leaves: Leaves, idx: list[int] | None) -> Leaves:
    return leaves if idx is None else [leaves[j] for j in idx]


@dataclass
class Injection:
    """This step's noise: what is added to each leaf, and before which rule.

    ``hot`` is a boolean 0-d tensor where the temperature can change: where it is false the gradient stays as it is,
    to the last bit.
    """

    noise: dict[int, Tensor]
    at: dict[int, int]
    hot: Tensor | None = None
    velocity_scale: dict[int, Tensor] | None = None

    def add(self, j: int, g: Tensor, inplace: bool, gain: Tensor | None = None) -> Tensor:
        e = self.noise[j] if gain is None else self.noise[j] * gain
        if self.hot is None:
            return g.add_(e) if inplace else g + e
        out = torch.where(self.hot, g + e, g)
        return g.copy_(out) if inplace else out


def _inject(injections: list[Injection], at: int, g: Leaves, inplace: bool) -> Leaves:
    """``g`` with every noise that acts before rule ``at``."""
    for injection in injections:
        g = [
            injection.add(j, x, inplace) if x is not None and injection.at.get(j) == at else x for j, x in enumerate(g)
        ]
    return g


class AdaptiveNoise:
    """The noise as a rule with an adaptive response adds it itself, indexed by that rule's own leaves."""

    def __init__(self, injections: list[Injection], at: int, idx: list[int] | None) -> None:
        self.injections, self.at, self.idx = injections, at, idx

    def add(self, i: int, g: Tensor, gain: Tensor, inplace: bool) -> Tensor:
        """``g`` plus ``gain`` times the noise of leaf ``i``."""
        j = i if self.idx is None else self.idx[i]
        for injection in self.injections:
            if injection.at.get(j) == self.at:
                g = injection.add(j, g, inplace, gain)
        return g


def chain(*links: GradientTransformation) -> Chain:
    """Compose links into one transformation: the first sees the gradient, the last returns the update.

    Takes links of this library and TorchOpt's, nested at will: ``chain(chain(a, b), c)``, ``chain(a, chain(b, c))`` and
    ``chain(a, b, c)`` are the same chain with the same state. If a link injects noise, the noise is matched to the
    whole chain when ``init`` is called, and injected where it belongs.

    Args:
        links: transformations, in the order in which they see the gradient.

    Returns:
        A :class:`Chain`. ``update`` passes keywords on to the links that declare them.

    Raises:
        TypeError: a link is not a gradient transformation.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.chain(bc.add_momentum(0.9), bc.inject_langevin_noise(0.01), bc.scale_by_neg_lr(0.1))
        >>> params = {"w": torch.zeros(3)}
        >>> state = tx.init(params)
        >>> updates, state = tx.update({"w": torch.ones(3)}, state, params=params, inplace=False)
        >>> updates["w"].shape
        torch.Size([3])
    """
    rules: list[Rule] = []
    for n, link in enumerate(links):
        if isinstance(link, Chain):
            rules += link.rules
        elif isinstance(link, ChainedGradientTransformation):
            rules += chain(*link.transformations).rules
        elif isinstance(link, GradientTransformation):
            from bayesopt_chain._foreign import adopt

            rules += adopt(link)
        else:
            raise TypeError(f"chain: link {n} is {link!r} ({type(link).__name__}), not a gradient transformation")
    return Chain(tuple(rules))


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


def declare(link: GradientTransformation, response: Response, *, name: str | None = None) -> Chain:
    """Tell the noise what your own link does, so that it may stand in a chain that samples.

    Args:
        link: any gradient transformation, yours or another library's.
        response: ``bc.response.Linear(b, a)`` for a time-invariant filter ``b(1/z) / a(1/z)`` of the gradient (lowest
            power first; ``Linear((0.5,))`` halves it), ``bc.response.Nonlinear()`` for a memoryless function of it,
            ``bc.response.Decay(weight_decay)`` for ``u + weight_decay * params``.
        name: shown by ``repr``.

    Returns:
        A chain of that one link.

    Example:
        >>> import bayesopt_chain as bc, torchopt
        >>> halve = bc.declare(torchopt.transform.scale(0.5), bc.response.Linear((0.5,)), name="halve")
        >>> bc.chain(halve, bc.sgd(0.1))
        chain(
            halve,
            scale_by_neg_lr(0.1),
        )
    """
    if not isinstance(link, GradientTransformation):
        raise TypeError(f"declare: link is {link!r}, not a gradient transformation")
    if not isinstance(response, Response):
        raise TypeError(f"declare: response is {response!r}; use one of bc.response.Linear, Nonlinear, Decay")
    return Chain((Foreign(link, response, name or "declared link", keywords_of(link)),))


def keywords_of(link: GradientTransformation) -> frozenset[str]:
    """Named keywords of a foreign ``update`` beyond the protocol's own."""
    names = inspect.signature(link.update).parameters
    return frozenset(list(names)[2:]) - {"params", "inplace"}


@dataclass(frozen=True)
class MaskedRule(Rule):
    """A rule that acts only on the leaves that every one of its masks selects."""

    rule: Rule
    masks: tuple[Any, ...] = field(hash=False, compare=False)

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

    def init(self, params):
        return self.rule.init(params)

    def update(self, g, state, params, ctx):
        return self.rule.update(g, state, params, ctx)

    def __str__(self) -> str:
        return f"masked({self.rule}, {', '.join(getattr(mask, 'label', '...') for mask in self.masks)})"


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

    labels: Any = field(hash=False, compare=False)
    label: str

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
    known = set(transformations)
    return chain(
        Chain((_CheckLabels(labels, tuple(sorted(known))),)),
        *(masked(tx, _Labelled(labels, name)) for name, tx in transformations.items()),
    )


@dataclass(frozen=True)
class _CheckLabels(Rule):
    """Refuses, at ``init``, leaves that no group of a partition takes."""

    labels: Any = field(hash=False, compare=False)
    known: tuple[str, ...]
    response = Linear()
    on_trees = True

    def init_tree(self, params):
        labels = self.labels(params) if callable(self.labels) else self.labels
        unknown = {label for label in optree.tree_leaves(labels) if label not in self.known}
        if unknown:
            raise ValueError(
                f"partition: labels {sorted(map(str, unknown))} have no chain; transformations has {sorted(self.known)}"
            )
        return EmptyState()

    def update(self, g, state, params, ctx):
        return g, state

    def __str__(self) -> str:
        return f"partition into {', '.join(self.known)}"


def _selected(mask: Any, tree: Any) -> set[int]:
    """Numbers of the leaves a mask selects."""
    value = mask(tree) if callable(mask) else mask
    try:
        bits = optree.tree_leaves(optree.tree_broadcast_prefix(value, tree, none_is_leaf=True), none_is_leaf=True)
    except ValueError as err:
        raise ValueError(f"mask: its structure is no prefix of the parameters': {err}") from None
    return {i for i, bit in enumerate(bits) if bit}


def _tree(spec, leaves: Leaves, idx: list[int] | None):
    """The user's tree, with an empty node wherever a mask leaves a leaf out."""
    if idx is None:
        return optree.tree_unflatten(spec, leaves)
    kept = dict(zip(idx, leaves))
    return optree.tree_unflatten(spec, [kept.get(i, ()) for i in range(spec.num_leaves)])


def _leaves(spec, tree, idx: list[int] | None) -> Leaves:
    return _pick(spec.flatten_up_to(tree), idx)


def _warm_start(fresh: tuple, like: Any) -> tuple:
    """``fresh`` with every entry that an optimizer's state has too taken over from there."""
    donors = [s for s in (like if isinstance(like, (tuple, list)) and not hasattr(like, "_fields") else [like])]
    donors = [s for s in donors if optree.tree_leaves(s)]
    out = list(fresh)
    for donor in donors:
        for i, mine in enumerate(fresh):
            if out[i] is mine and _alike(mine, donor):
                leaves = [t.detach().clone() for t in optree.tree_leaves(donor)]
                out[i] = optree.tree_unflatten(optree.tree_structure(mine), leaves)
                break
        else:
            if getattr(donor, "_fields", ())[:1] == ("key",):
                continue  # another sampler's noise: this one starts its own
            raise ValueError(
                f"init: like= holds {type(donor).__name__}, which no link of this chain remembers in that shape; "
                "build the chain from the same links as the optimizer"
            )
    return tuple(out)


def _alike(mine: Any, donor: Any) -> bool:
    """Whether two states remember the same things; fields without tensors do not count."""
    names = [[f for f in getattr(s, "_fields", ()) if optree.tree_leaves(getattr(s, f))] for s in (mine, donor)]
    if names[0] != names[1] or "key" in names[0]:
        return False
    a, b = optree.tree_leaves(mine), optree.tree_leaves(donor)
    return len(a) == len(b) and all(
        torch.is_tensor(y) and x.shape == y.shape and x.dtype == y.dtype for x, y in zip(a, b)
    )
