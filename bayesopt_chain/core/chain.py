"""What a link is, and how links compose: one flat sequence of rules, run once over the leaves of the gradient tree.

A *rule* is one idea (momentum, a learning rate, the noise): how its state starts and how it turns a list of gradient
leaves into a list of updates. A :class:`Chain` is a ``torchopt.base.GradientTransformation``, the pair
``(init, update)``, made of rules; a link such as ``add_momentum(0.9)`` is a chain of one rule, so chains nest and
associate by concatenation. The chain flattens the trees once, routes keywords, and injects the noise where
:mod:`bayesopt_chain.core.matching` says it belongs, whatever position it was written in.

The state is a tuple with one entry for each rule, in the order written.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor
from torchopt.base import ChainedGradientTransformation, GradientTransformation

from bayesopt_chain import checks
from bayesopt_chain.core import matching
from bayesopt_chain.core.foreign import ANY, Foreign, adopt, keywords_of, recognises
from bayesopt_chain.core.leaves import owned, repeats
from bayesopt_chain.core.link import AdaptiveNoise, Context, Injection, Leaves, Rule
from bayesopt_chain.core.response import Adaptive, Decay, Linear, Noise, Nonlinear, Response
from bayesopt_chain.core.warm_start import warm_start


class Chain(GradientTransformation):
    """A gradient transformation made of rules; what every function of this library returns.

    Attributes:
        rules: the rules, in the order written.

    Example:
        >>> import bayesopt_chain as bc
        >>> isinstance(bc.sgd(0.1), bc.Chain)
        True
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
        lines = [f"    {rule},{matching.describe(self.rules, i)}" for i, rule in enumerate(self.rules)]
        return "\n".join(["chain(", *lines, ")"])


class _Turn(NamedTuple):
    """A rule's turn in an update."""

    i: int
    rule: Rule
    idx: list[int] | None  # the leaves it acts on, None for all
    noise: Literal["", "before", "inside"]  # where noise acts
    follower: int | None  # the rule whose factors it may apply, nothing coming between the two


class _Layout(NamedTuple):
    """What a chain works out once for a number of leaves and what its masks select."""

    where: list[list[int] | None]
    plan: matching.Plan | None
    turns: tuple[_Turn, ...]
    merges: bool  # whether any turn has a follower


class _Program:
    """The two functions of a chain. Holds no state but a cache of where the noise goes."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self.rules = rules
        self.accepts = frozenset().union(*(rule.accepts for rule in rules)) if rules else frozenset()
        self.has_noise = any(isinstance(rule.response, Noise) for rule in rules)
        self.needy = next((rule for rule in rules if rule.needs_params), None)
        self.is_masked = any(rule.masks for rule in rules)
        self.cache: dict[Any, _Layout] = {}

    def init(self, params: Any, *, like: Any = None) -> tuple:
        """State for ``params``; ``like`` is the state of an optimizer to take over what both remember.

        The velocity of a sampler holds half of its last draw, with which an optimizer that takes it over starts.
        """
        leaves, spec = optree.tree_flatten(params, none_is_leaf=True)
        where, plan, *_ = self.layout(params, len(leaves))
        if plan is not None:
            paths = optree.tree_paths(params, none_is_leaf=True)
            placed = plan.leaves()
            checks.parameters([leaves[j] for j in placed], [paths[j] for j in placed])
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
        if extra and (unknown := extra.keys() - self.accepts) and ANY not in self.accepts:
            raise TypeError(
                f"update() got {', '.join(sorted(unknown))}=, which no link of this chain takes; "
                f"its links take: {', '.join(sorted(self.accepts)) or 'no further keywords'}"
            )
        if len(state) != len(self.rules):
            raise ValueError(
                f"state: expected one entry for each of {len(self.rules)} links, got {len(state)}; call init first"
            )
        if params is None and self.needy is not None:
            raise ValueError(f"{self.needy} needs the parameters: call update(updates, state, params=params)")
        g, spec = optree.tree_flatten(updates, none_is_leaf=True)
        p, params_spec = (None, None) if params is None else optree.tree_flatten(params, none_is_leaf=True)
        if inplace and len(g) > 1 and repeats(g):
            g = owned(g)
        layout = self.layout(updates if params is None else params, len(g))
        state, given = list(state), g
        injections: list[Injection] = []
        scales = None
        if layout.plan is not None:
            checks.updates(g, p, spec, params_spec)
            injections, scales = self.draw(layout, state, g, inplace)
        merging = layout.merges and inplace and _nobody_differentiates(g)
        common = Context(inplace, {})
        factors = None
        for i, rule, idx, noise, follower in layout.turns:
            done = factors is not None
            factors = self.rules[follower].factors(state[follower], len(g)) if merging and follower else None
            if noise == "before":
                g = _inject(injections, i, g, inplace)
            ctx = common
            if done or noise or factors is not None or scales is not None or extra or rule.on_trees:
                ctx = Context(
                    inplace,
                    {k: v for k, v in extra.items() if k in rule.accepts or ANY in rule.accepts} if extra else extra,
                    AdaptiveNoise(injections, i, idx) if noise == "inside" else None,
                    None if scales is None else _pick(scales, idx),
                    partial(_tree, spec, idx=idx) if rule.on_trees else None,
                    partial(_leaves, spec, idx=idx) if rule.on_trees else None,
                    factors,
                    done,
                    _echoes(injections, i, idx, len(g)) if noise and rule.keeps_echo else None,
                )
            if idx is None:
                g, state[i] = rule.update(g, state[i], p, ctx)
                continue
            mine, state[i] = rule.update(_pick(g, idx), state[i], None if p is None else _pick(p, idx), ctx)
            g = list(g)
            for j, leaf in zip(idx, mine):
                g[j] = leaf
        if injections:
            g = _inject(injections, len(self.rules), g, inplace)
            # coefficients of another precision promote 0-d leaves
            g = [x if x is None or x.dtype == y.dtype else x.to(y.dtype) for x, y in zip(g, given)]
        return spec.unflatten(g), tuple(state)

    def draw(self, layout: _Layout, state: list, g: Leaves, inplace: bool) -> tuple[list[Injection], list | None]:
        """This step's noise, and by leaf what it wants the velocity scaled by. The noise's entries of ``state`` move on."""
        where, plan = layout.where, layout.plan
        for i in plan.noise:
            self.rules[i].check(plan.placements[i], state[i], g)
        rates = self.rates(state, where, plan, len(g)) if plan.rates else {}
        gains = self.gains(state, where, plan) if plan.gains else {}
        injections, scales = [], {}
        for i in plan.noise:
            injection, state[i] = self.rules[i].draw(plan.placements[i], state[i], g, rates, gains, inplace)
            injections.append(injection)
            if injection.velocity_scale:
                scales.update(injection.velocity_scale)
        return injections, [scales.get(j) for j in range(len(g))] if scales else None

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

    def layout(self, tree: Any, n: int) -> _Layout:
        """The layout for the ``n`` leaves of ``tree``."""
        where = self.positions(tree) if self.is_masked else None
        key = n if where is None else (n, tuple(None if w is None else tuple(w) for w in where))
        if key not in self.cache:
            self.cache[key] = self.lay_out(where or [None] * len(self.rules), n)
        return self.cache[key]

    def lay_out(self, where: list[list[int] | None], n: int) -> _Layout:
        plan = matching.plan(self.rules, where, n) if self.has_noise else None
        acting = {p.at for by_leaf in plan.placements.values() for p in by_leaf.values()} if plan is not None else set()
        order = [i for i, rule in enumerate(self.rules) if i in acting or not isinstance(rule.response, Noise)]
        turns = []
        for i, following in zip(order, [*order[1:], None]):
            rule = self.rules[i]
            noise = "" if i not in acting else "inside" if isinstance(rule.response, Adaptive) else "before"
            alone = following is None or following in acting or where[i] is not None or where[following] is not None
            turns.append(_Turn(i, rule, where[i], noise, None if alone or not rule.takes_factors else following))
        return _Layout(where, plan, tuple(turns), any(turn.follower for turn in turns))

    def rates(self, state, where, plan, n: int) -> dict[int, dict[int, Tensor]]:
        """By rule and leaf, the magnitude of every gain that changes with time."""
        return {
            i: _by_leaf(where[i], self.rules[i].rate(state[i], n if where[i] is None else len(where[i])))
            for i in plan.rates
        }

    def gains(self, state, where, plan) -> dict[int, dict[int, Tensor]]:
        """By rule and leaf, the diagonal of every frozen preconditioner."""
        return {i: _by_leaf(where[i], self.rules[i].preconditioner(state[i])) for i in plan.gains}


def _nobody_differentiates(g: Leaves) -> bool:
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return not any([x is not None and x.requires_grad for x in g])


def _by_leaf(idx: list[int] | None, values) -> dict[int, Tensor]:
    return dict(enumerate(values) if idx is None else zip(idx, values))


def _pick(leaves: Leaves, idx: list[int] | None) -> Leaves:
    return leaves if idx is None else [leaves[j] for j in idx]


def _inject(injections: list[Injection], at: int, g: Leaves, inplace: bool) -> Leaves:
    """``g`` with every noise that acts before rule ``at``."""
    for injection in injections:
        g = list(g)
        for j in injection.noise:
            if injection.at[j] == at:
                g[j] = injection.add(j, g[j], inplace)
    return g


def _echoes(injections: list[Injection], i: int, idx: list[int] | None, n: int) -> list | None:
    """By leaf of rule ``i``, the noise that its velocity keeps and how much of it."""
    kept = {j: (e, x.echo[j]) for x in injections for j, e in x.noise.items() if j in x.echo and x.at[j] == i}
    return [kept.get(j) for j in (range(n) if idx is None else idx)] if kept else None


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


def with_response(link: GradientTransformation, response: Response, *, name: str | None = None) -> Chain:
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
        >>> halve = bc.with_response(torchopt.transform.scale(0.5), bc.response.Linear((0.5,)), name="halve")
        >>> bc.chain(halve, bc.sgd(0.1))
        chain(
            halve,
            scale_by_neg_lr(0.1),
        )
    """
    if not isinstance(link, GradientTransformation):
        raise TypeError(f"with_response: link is {link!r}, not a gradient transformation")
    if not isinstance(response, (Linear, Nonlinear, Decay)):
        raise TypeError(f"with_response: response is {response!r}; use one of bc.response.Linear, Nonlinear, Decay")
    numbers = (
        (*response.b, *response.a)
        if isinstance(response, Linear)
        else (response.weight_decay,)
        if isinstance(response, Decay)
        else ()
    )
    empty = isinstance(response, Linear) and not (response.b and response.a and response.a[0])
    if empty or not all(map(math.isfinite, numbers)):
        raise ValueError(
            f"with_response: {response} needs finite coefficients, at least one each in b and a, and a[0] != 0"
        )
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
