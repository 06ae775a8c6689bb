r"""How the leaves of a chain answer gradients, parameters and draws, from the responses that its links declare.

With ``1/z`` the delay by a step, the displacement ``d`` of an element, ``theta' = theta - d``, is

    a(1/z) d = G b(1/z) g + n(1/z) theta + sqrt(G) q(1/z) xi,        b(1) = a(1),  a_0 = 1.

``b / a`` is the product of the filters, scaled so that ``G`` is the total displacement which a unit gradient causes
(``lr / (1 - mu)`` for momentum, times the preconditioner). ``n`` are the weight decays, each times the filters in front of it
in ``a`` and those behind it in ``b``. ``q = sqrt(T) b_0 c`` is the matched noise, whose filter is ``c / (b / b_0)``
(:mod:`bayesopt_chain.matching.law`). In the coordinates ``phi = theta / sqrt(G)``, in which the gradient is ``sqrt(G) g``, the
gain is one for every element. In transposed direct form, with the state ``s``,

    d = s_0 + b_0 g + n_0 phi + q_0 xi,        s_i' = s_{i+1} + b_{i+1} g + n_{i+1} phi + q_{i+1} xi - a_{i+1} d.

Leaves with the same polynomials are a *group*. The gain of each element comes from an impulse through ``tx.update``, so that a
preconditioner counts as it stands in the state.

:func:`forces_of` gives what a check of draws against their loss needs, of a chain or of an optimizer of
:mod:`bayesopt_chain.optim`: the temperature of each leaf, and the force on it, of the loss and of the prior together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import Link
from bayesopt_chain.core.op import PURE
from bayesopt_chain.core.state import State
from bayesopt_chain.links.langevin_noise import LangevinNoise
from bayesopt_chain.links.wrapper import MasterWeights, unwrapped
from bayesopt_chain.matching import law
from bayesopt_chain.matching.response import Decay, Linear, Noise, Nonlinear, Preconditioner, Rate, SelfContainedSampler
from bayesopt_chain.random.stream import without_wrappers
from bayesopt_chain.schedules import now
from bayesopt_chain.testing._linear_system import IMPULSE, OneUpdate, state_of
from bayesopt_chain.trees import named_leaves

DRIFT = 0.01  # by which a gain may change from one step to the next


class Polynomials(NamedTuple):
    """The response of the links that act on a leaf, in powers of ``1/z``, without preconditioners.

    Attributes:
        b, a: of the filters, rates included; ``b`` is positive where the chain descends.
        n: of the weight decays.
        order: of the noise; 0 without.
        behind: whether a preconditioner stands behind a weight decay.
    """

    b: law.Poly
    a: law.Poly
    n: law.Poly
    order: int
    behind: bool


class Group(NamedTuple):
    """The system of one element of ``leaves``, in coordinates in which its gain is one.

    Attributes:
        leaves: the numbers of the leaves.
        A: ``[k, k]``, the state's own motion; ``d = s_0 + D u`` for the inputs ``u = (g, phi, xi)``.
        B: ``[k, 3]``, how the inputs enter the state.
        D: ``[3]``.
        prior: the curvature that weight decay adds.
        temperature: of the noise; 0 without.
    """

    leaves: tuple[int, ...]
    A: Tensor
    B: Tensor
    D: Tensor
    prior: float
    temperature: float


class Response(NamedTuple):
    """What a chain does to all leaves.

    Attributes:
        gains: ``G``, float64, like each leaf; zero where the chain never moves it.
        groups: the systems of the leaves that move.
    """

    gains: tuple[Tensor, ...]
    groups: tuple[Group, ...]


def read(tx: Any, params: Any, state: Any = None) -> Response:
    """The response of ``tx`` as it stands in ``state`` (default: two steps after ``init``).

    Raises:
        TypeError: an optimizer of :mod:`bayesopt_chain.optim`.
        ValueError: ``tx`` is not linear at that state, or its elements act on each other in ways that no gain
            describes.
    """
    tx, state = chain_in(tx, state)
    if not isinstance(state, (State, type(None))):
        raise TypeError(f"state must be that of tx, as tx.init and its updates return it, got {state!r:.80}")
    state = OneUpdate(tx, params, warmup=1).next_state if state is None else state
    numbers = [i for i, p in enumerate(optree.tree_leaves(params, none_is_leaf=True)) if p is not None]
    levels, each = levels_of(tx, state), polynomials(tx, state)
    first, later = gains(tx, params, state), gains(tx, params, OneUpdate(tx, params, state).next_state)
    if any(not torch.allclose(x, y, rtol=DRIFT, atol=0.0) for x, y in zip(first, later)):
        raise ValueError(
            "the chain answers a gradient otherwise from one step to the next at this state; pass the state of "
            "a run, after its burn-in, as state="
        )
    found, groups = list[Tensor](), dict[Any, list[int]]()
    for j, (i, gain) in enumerate(zip(numbers, first)):
        b, a, n, order, behind = each[i]
        found.append(torch.zeros_like(gain))
        if not gain.any():
            continue
        if not bool((gain > 0).all()):
            raise ValueError(
                "the chain climbs the loss, or leaves single elements of a leaf where they are; pass the loss that it "
                "descends, and mask whole leaves"
            )
        found[j] = gain / b[0] * sum(b) / sum(a)  # b and a as they come, a_0 = 1
        if behind:
            raise ValueError(
                "weight decay in front of a preconditioner makes elements of one leaf differ by more than a gain; "
                "put that prior into the loss, so that its curvature is measured with the rest"
            )
        level = levels.get(i, 0.0)
        groups.setdefault((b, a, tuple([round(x, 15) for x in n]), order if level else 0, level), []).append(j)
    return Response(tuple(found), tuple([_group(tuple(leaves), *key) for key, leaves in groups.items()]))


def _group(leaves: tuple[int, ...], b: law.Poly, a: law.Poly, n: law.Poly, order: int, level: float) -> Group:
    """The system of these polynomials in coordinates of gain one."""
    b = tuple([x * sum(a) / sum(b) for x in b])
    q: law.Poly = (0.0,)
    if level:
        c, d = law.noise_filter(law.add(law.spectrum(b, a), law.decay_spectrum(b, n)), b, order)
        q = tuple([math.sqrt(level) * x for x in law.multiply(c, b if d == (1.0,) else (b[0],))])
    k = max(map(len, (b, a, n, q)))
    rows = torch.tensor([[*x, *[0.0] * (k - len(x))] for x in (a, b, n, q)], dtype=torch.float64, device="cpu")
    A = torch.diag(torch.ones(max(k - 2, 0), dtype=torch.float64, device="cpu"), 1)[: k - 1, : k - 1]
    A[:, :1] -= rows[0, 1:, None]
    D = rows[1:, 0]
    return Group(leaves, A, rows[1:, 1:].T - torch.outer(rows[0, 1:], D), D, sum(n) / sum(b), level)


def polynomials(tx: Chain, state: State) -> list[Polynomials]:
    """The response of the links that act on each leaf, ``a_0 = 1``, by the leaf's number.

    Raises:
        ValueError: a link brings noise of its own, and has no linear response.
    """
    acting: list[list[tuple[int, float]]] = [[] for _ in state.layout.paths]
    for i, (link, where) in enumerate(zip(tx.links, state.layout.where)):
        # a rate may change, and is taken as it is in this state
        rates = link.rate(state[i], len(where)) if isinstance(link.response, Rate) else [1.0] * len(where)
        for j, rate in zip(where, rates):
            acting[j].append((i, float(rate)))
    keys = [tuple(each) for each in acting]  # many leaves have the same links
    known = {key: _polynomials([(tx.links[i], rate) for i, rate in key]) for key in {*keys}}
    return [known[key] for key in keys]


def _polynomials(acting: Sequence[tuple[Link, float]]) -> Polynomials:
    """The response of links one after the other, each with its rate (1 where it has none)."""
    b, a, n, order, behind = (1.0,), (1.0,), (0.0,), 0, False
    for link, rate in acting:
        x: Any = link.response
        if getattr(link.part, "flips", False):  # its response is that to the loss which is descended then
            b, n = law.multiply(b, (-1.0,)), law.multiply(n, (-1.0,))
        if isinstance(x, SelfContainedSampler):
            raise ValueError(
                f"{link.shown} has noise of its own, as a thermostat or a splitting has; its heating by minibatches is that of "
                "no linear chain: compare bc.sghmc at the same lr and momentum"
            )
        if isinstance(x, Noise):
            order = x.order
        elif isinstance(x, Decay):
            n = law.add(n, [x.weight_decay * v for v in a])
        elif isinstance(x, (Linear, Rate)):
            behind = behind or (isinstance(x, Preconditioner) and any(n))
            up, down = (x.b, x.a) if isinstance(x, Linear) else ((x.sign * rate,), (1.0,))
            b, a, n = law.multiply(b, up), law.multiply(a, down), law.multiply(n, up)
    b, n = (tuple([-v / a[0] for v in law.trim(p)]) for p in (b, n))
    a = tuple([v / a[0] for v in law.trim(a)])
    return Polynomials(b, a, n, order, behind)


def gains(tx: Chain, params: Any, state: Any) -> list[Tensor]:
    """How far a unit gradient moves each element in the step in which it arrives, ``P b_0``, float64.

    The polynomials say it of a chain whose elements are alike. Behind a preconditioner it comes from an impulse.

    Raises:
        ValueError: the elements act on each other, as a dense preconditioner makes them.
    """
    if not any(isinstance(link.response, Preconditioner) for link in tx.links):
        # one number for all elements; negative, as in an impulse of the chain, where it climbs
        return [
            torch.full((), x.b[0], dtype=torch.float64, device=p.device).expand(p.shape)
            for x, p in zip(polynomials(tx, state), optree.tree_leaves(params, none_is_leaf=True))
            if p is not None
        ]
    entries = [_at_rest(link, entry) for link, entry in zip(tx.links, state)]
    one = OneUpdate(tx, params, State(entries, state.layout))
    generator = torch.Generator().manual_seed(0)
    uneven = [
        IMPULSE * (1 + torch.rand(x.shape, generator=generator, dtype=torch.float64, device="cpu").to(x.device))
        for x in one.params
    ]
    even = [torch.full_like(x, IMPULSE) for x in one.params]
    found: list[Tensor] = []
    for move, other, height in zip(one(gradient=even)[0], one(gradient=uneven)[0], uneven):
        gain = -move / IMPULSE
        # An element whose gain depends on how high its neighbours' impulses are has no gain of its own.
        if gain.numel() and bool(((gain + other / height).abs() > 1e-5 * gain.abs().amax()).any()):
            raise ValueError(
                "the chain's response is not linear, or its elements act on each other, as behind a dense preconditioner; "
                "freeze an adaptive preconditioner (freeze_after) and pass the state of a run, after its burn-in, as state="
            )
        found.append(gain)
    return found


def clips_of(tx: Any) -> list[Link]:
    """The links that :func:`read` takes for the identity: functions of the gradients alone, such as a clip."""
    return [link for link in links_of(tx) if isinstance(link.response, Nonlinear) and not link.traits.extra_kwargs]


def clipped(clips: Sequence[Link], grads: Any) -> Any:
    """Gradients, a tree, as these links hand them on."""
    for link in clips:
        alone = Chain([link])
        grads, _ = alone.update(grads, alone.init(grads), params=grads, inplace=False)
    return grads


def require_unclipped(tx: Any, gradients: Iterable[Any]) -> None:
    """Refuse a chain that clips the gradients which are looked at.

    Args:
        tx: the chain.
        gradients: trees like the parameters, of batches where it is used; computed for chains with a clip alone.

    Raises:
        ValueError: some of them are changed.
    """
    clips = clips_of(tx)
    for tree in gradients if clips else ():
        if not all(map(torch.equal, optree.tree_leaves(tree), optree.tree_leaves(clipped(clips, tree)))):
            raise ValueError(
                f"{clips[0].shown} changes the gradient of a batch that was looked at, and a chain that follows clipped "
                "gradients samples another distribution, whose heat is not known: raise its limit until it does not act, or "
                "leave it out at a temperature above 0"
            )


def _at_rest(link: Link, entry: Any) -> Any:
    """A link's state without velocity and remembered draws, beside which the response to an impulse would round."""
    field = "memory" if isinstance(link, LangevinNoise) else link.traits.velocity
    if not hasattr(entry, field):
        return entry
    return entry._replace(**{field: tuple(torch.zeros_like(t) for t in getattr(entry, field))})


class ThermalLeaf(NamedTuple):
    """What the next step of a torch optimizer does to one parameter.

    Attributes:
        temperature: that of its group.
        decay: the weight decay that is a part of the loss; ``None`` where there is one that is not.
        sign: -1 where the optimizer climbs the loss.
    """

    temperature: float
    decay: float | None
    sign: float = 1.0


def levels_of(tx: Chain, state: Any, temperature: float | None = None, step: int | None = None) -> dict[int, float]:
    """The temperature of each leaf that noise enters, by its number, at a step or at that of the state."""
    plan, out = tx.plan(state), dict[int, float]()
    for i, noise in plan.noise.items():
        link: Any = tx.links[i]
        at = state[i].step if step is None else torch.full_like(state[i].step, step)
        level = float(now(link.temperature, at)) if temperature is None else temperature
        out |= dict.fromkeys(noise.leaves, level) if level > 0 else {}
    if not out and temperature is not None:
        out = dict.fromkeys(range(len(state.layout.paths)), temperature)
    return out


Force = Callable[[Any, Sequence[Any]], list[Any]]


def forces_of(
    tx: Any, params: Any, temperature: float | None = None, step: int | None = None
) -> tuple[dict[str, float], Force]:
    """Temperatures and forces of a chain, or of an optimizer by its groups as they are now.

    Args:
        tx: a chain, perhaps inside :func:`bayesopt_chain.skip_nonfinite`, or an optimizer of :mod:`bayesopt_chain.optim`. One
            without names has those of the model that :func:`bayesopt_chain.collect` was given with it.
        params: parameters as it has them.
        temperature: in the place of its own.
        step: the number of steps at which a chain's schedule of temperatures is read. Default: its first step.

    Returns:
        By the name of each leaf that gets noise, its temperature; and ``force(params, grads)``, which gives for each leaf the
        gradient of loss and prior together, from that of the loss.

    Raises:
        ValueError: parameters of other names than the optimizer's; when forces are asked for, a prior that is no part of the
            loss.
    """
    if not hasattr(tx, "thermal_leaves"):
        chain, _ = chain_in(tx, None)
        state = state_of(chain, params)
        names = names_of(params)
        levels = {names[j]: level for j, level in levels_of(chain, state, temperature, step).items()}
        return levels, partial(with_decay, chain, state)
    from bayesopt_chain.runs.collect import with_names

    leaves, names = with_names(tx).thermal_leaves(), names_of(params)
    leaves = dict(zip(without_wrappers(tuple(leaves)), leaves.values()))
    if not any(path in leaves for path in names):
        raise ValueError(
            f"doctor: the draws have the leaves {', '.join(names[:3])}, the optimizer gives noise to "
            f"{', '.join(list(leaves)[:3]) or 'none'}; build it with model.named_parameters()"
        )
    levels = {name: temperature or leaves[name].temperature for name in names if name in leaves}
    return levels, partial(_with_decay_of, leaves)


def _with_decay_of(leaves: Mapping[str, ThermalLeaf], params: Any, grads: Sequence[Any]) -> list[Any]:
    """The gradient that an optimizer follows: of the loss, with the weight decay of each leaf's group."""
    out = list(grads)
    for j, (name, p) in enumerate(zip(names_of(params), optree.tree_leaves(params, none_is_leaf=True))):
        leaf = leaves.get(name)
        if leaf is None or out[j] is None:
            continue
        if leaf.decay is None:
            raise ValueError(
                "doctor: a decoupled weight decay is no part of the loss; put the prior into the loss, or use an "
                "optimizer whose weight decay is in the gradient"
            )
        out[j] = leaf.sign * out[j] + leaf.decay * p
    return out


def with_decay(tx: Chain, state: Any, params: Any, grads: Sequence[Any]) -> list[Any]:
    """The gradient of the loss with the weight decay and localisation that stand at the head of a chain.

    Raises:
        ValueError: one stands further behind, where it is no part of the loss.
    """
    g, head = list(grads), True
    for i, link in enumerate(tx.links):
        if isinstance(link.response, Noise) or not state.layout.where[i]:
            continue
        if isinstance(link.response, Decay):
            if not head:
                raise ValueError(
                    f"doctor: {link} stands behind a momentum or a preconditioner, where it is no part of the loss; "
                    "write it first, or put the prior into the loss"
                )
            at, _ = tx.at(state, i, params)
            new, _ = link.update([g[j] for j in at.present], state[i], PURE, at)
            for j, y in zip(at.present, new):
                g[j] = y
        elif link.response != Linear():
            head = False
    return g


def names_of(params: Any) -> tuple[str, ...]:
    """What a report calls the leaves of a tree, ``None`` among them: ``layer/weight``, ``tensor`` for a bare tensor."""
    return without_wrappers(tuple(named_leaves(params)))


def inner(tx: Any, state: Any) -> tuple[Any, Any]:
    """The chain inside wrappers, such as that of :func:`bayesopt_chain.skip_nonfinite`, and its state."""
    if isinstance(tx, MasterWeights):
        raise TypeError(
            "tx is with_master_weights(...), whose parameters move by their rounding as well; read the temperature of the same "
            "chain with float32 parameters"
        )
    while hasattr(state, "inner") and not isinstance(state, State):
        state = state.inner
    return unwrapped(tx), state


def links_of(tx: Any) -> Sequence[Link]:
    """The links of the chain inside wrappers; none of anything else."""
    return getattr(inner(tx, None)[0], "links", ())


def chain_in(tx: Any, state: Any) -> tuple[Chain, Any]:
    """What :func:`inner` gives, of a chain of this library.

    Raises:
        TypeError: anything else.
    """
    tx, state = inner(tx, state)
    if not isinstance(tx, Chain):
        raise TypeError(
            f"a chain of bayesopt_chain is asked for, whose links say what they do, got {tx!r:.80}; of an optimizer pass "
            "the chain of the same hyperparameters, such as bc.sgd(...)"
        )
    return tx, state
