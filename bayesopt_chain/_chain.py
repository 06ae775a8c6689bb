"""What a link is, and how links compose: one flat sequence of rules, run once over the leaves of the gradient tree.

A *rule* is one idea (momentum, a learning rate, the noise): how its state starts and how it turns a list of gradient
leaves into a list of updates. A :class:`Chain` is a ``torchopt.base.GradientTransformation``, the pair
``(init, update)``, made of rules; a link such as ``add_momentum(0.9)`` is a chain of one rule, so chains nest and
associate by concatenation. The chain flattens the trees once, routes keywords, and injects the noise where
:mod:`bayesopt_chain._placement` says it belongs, whatever position it was written in.

The state is a tuple with one entry for each rule, in the order written.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor
from torchopt.base import ChainedGradientTransformation, GradientTransformation

from bayesopt_chain import _checks, _placement
from bayesopt_chain._foreign import ANY, Foreign, adopt, keywords_of, recognises
from bayesopt_chain._response import Adaptive, Decay, Linear, Noise, Nonlinear, Response
from bayesopt_chain._rule import AdaptiveNoise, Context, Injection, Leaves, Rule
from bayesopt_chain._warm_start import warm_start


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
    def accepts(self) -> frozenset[str]:
        """The keywords that ``update`` passes on to a link."""
        return self._program.accepts

    @property
    def response(self):
        """The response of the only link, or the tuple of all links' responses."""
        responses = tuple(rule.response for rule in self.rules)
        return responses[0] if len(responses) == 1 else responses

    @property
    def needs(self) -> frozenset[str]:
        """Those keywords without which ``update`` refuses."""
        return frozenset().union(*(rule.needs for rule in self.rules))

    def positions(self, params: Any) -> list[list[int] | None]:
        """For each rule the numbers of the leaves it acts on, in optree order; ``None`` for all."""
        return self._program.positions(params)

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
        where = self.positions(params)
        plan = self.plan(where, len(leaves))
        if plan is not None:
            paths = optree.tree_paths(params, none_is_leaf=True)
            placed = plan.leaves()
            _checks.parameters([leaves[j] for j in placed], [paths[j] for j in placed])
        state = []
        for rule, idx in zip(self.rules, where):
            if rule.on_trees:
                state.append(rule.init_tree(_tree(spec, _pick(leaves, idx), idx)))
            else:
                state.append(rule.init(_pick(leaves, idx)))
        if plan is not None:
            rates, gains = self.rates(state, where, plan, len(leaves)), self.gains(state, where, plan)
            for i in plan.noise:
                state[i] = self.rules[i].start(plan.placements[i], leaves, rates, gains)
        return tuple(state) if like is None else warm_start(tuple(state), like)

    def update(self, updates: Any, state: tuple, *, params: Any = None, inplace: bool = True, **extra: Any):
        """Transformed updates and the next state. See ``torchopt.base.GradientTransformation``."""
        if (unknown := extra.keys() - self.accepts) and ANY not in self.accepts:
            raise TypeError(
                f"update() got {', '.join(sorted(unknown))}=, which no link of this chain takes; "
                f"its links take: {', '.join(sorted(self.accepts)) or 'no further keywords'}"
            )
        if len(state) != len(self.rules):
            raise ValueError(
                f"state: expected one entry for each of {len(self.rules)} links, got {len(state)}; call init first"
            )
        if params is None and (needy := [rule for rule in self.rules if rule.needs_params]):
            raise ValueError(f"{needy[0]} needs the parameters: call update(updates, state, params=params)")
        g, spec = optree.tree_flatten(updates, none_is_leaf=True)
        p = optree.tree_leaves(params, none_is_leaf=True) if params is not None else None
        where = self.positions(params if params is not None else updates)
        plan = self.plan(where, len(g))
        new_state, given = list(state), g
        injections: list[Injection] = []
        scales: list | None = None
        if plan is not None:
            _checks.updates(g, p, spec, None if p is None else optree.tree_structure(params, none_is_leaf=True))
            for i in plan.noise:
                self.rules[i].check(plan.placements[i], state[i], g)
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
            factors = self.next_factors(i, where, state, acting, g) if inplace and rule.takes_factors else None
            if i in acting and not adaptive:
                g = _inject(injections, i, g, inplace)
            idx = where[i]
            ctx = Context(
                inplace,
                {k: v for k, v in extra.items() if k in rule.accepts or ANY in rule.accepts} if extra else extra,
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
        if plan is not None:  # coefficients of another precision promote 0-d leaves
            g = [x if x is None or x.dtype == y.dtype else x.to(y.dtype) for x, y in zip(g, given)]
        return optree.tree_unflatten(spec, g), tuple(new_state)

    def next_factors(self, i: int, where, state, acting: set[int], g: Leaves) -> list | None:
        """The factors of the rule behind rule ``i``, where nothing comes between the two and nobody differentiates."""
        if (
            i + 1 == len(self.rules)
            or i + 1 in acting
            or where[i] is not None
            or where[i + 1] is not None
            or torch._C._functorch.peek_interpreter_stack() is not None
            or any(x is not None and x.requires_grad for x in g)
        ):
            return None
        return self.rules[i + 1].factors(state[i + 1], len(g))

    def positions(self, tree) -> list[list[int] | None]:
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


def _inject(injections: list[Injection], at: int, g: Leaves, inplace: bool) -> Leaves:
    """``g`` with every noise that acts before rule ``at``."""
    for injection in injections:
        g = [
            injection.add(j, x, inplace) if x is not None and injection.at.get(j) == at else x for j, x in enumerate(g)
        ]
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
            rules += adopt(link)
        else:
            raise TypeError(f"chain: link {n} is {link!r} ({type(link).__name__}), not a gradient transformation")
    return Chain(tuple(rules))


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
    if not isinstance(response, (Linear, Nonlinear, Decay)):
        raise TypeError(f"declare: response is {response!r}; use one of bc.response.Linear, Nonlinear, Decay")
    numbers = (
        (*response.b, *response.a)
        if isinstance(response, Linear)
        else (response.weight_decay,)
        if isinstance(response, Decay)
        else ()
    )
    empty = isinstance(response, Linear) and not (response.b and response.a and response.a[0])
    if empty or not all(map(math.isfinite, numbers)):
        raise ValueError(f"declare: {response} needs finite coefficients, at least one each in b and a, and a[0] != 0")
    return Chain((Foreign(link, response, name or "declared link", keywords_of(link)),))


@recognises("chain_flat.<locals>.update_fn")
def _torchopts_flat_chain(link, cells):
    inner = cells["inner"]
    rules = chain(*inner.transformations if isinstance(inner, ChainedGradientTransformation) else (inner,)).rules
    if any(isinstance(rule, Foreign) for rule in rules):  # its links expect the flat lists that only it makes
        return (Foreign(link, None, "torchopt's optimizer (bc has the same with a temperature)"),)
    return rules


def _selected(mask: Any, tree: Any) -> set[int]:
    """Numbers of the leaves a mask selects."""
    return {i for i, bit in enumerate(leaves_of_prefix(mask(tree) if callable(mask) else mask, tree)) if bit}


def leaves_of_prefix(prefix: Any, tree: Any) -> list:
    """The leaf of ``prefix`` that stands above each leaf of ``tree``."""
    try:
        return optree.tree_leaves(optree.tree_broadcast_prefix(prefix, tree, none_is_leaf=True), none_is_leaf=True)
    except ValueError as err:
        raise ValueError(f"mask (or labels): its structure is no prefix of the parameter tree: {err}") from None


def _tree(spec, leaves: Leaves, idx: list[int] | None):
    """The user's tree, with an empty node wherever a mask leaves a leaf out."""
    if idx is None:
        return optree.tree_unflatten(spec, leaves)
    kept = dict(zip(idx, leaves))
    return optree.tree_unflatten(spec, [kept.get(i, ()) for i in range(spec.num_leaves)])


def _leaves(spec, tree, idx: list[int] | None) -> Leaves:
    return _pick(spec.flatten_up_to(tree), idx)
