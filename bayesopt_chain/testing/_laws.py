"""The laws that every link and sampler obeys, as one list: a new sampler is tested by being added to the registry.

A law is a function of ``build``, which takes no argument and returns the transformation.

**Composition**: beside any other link a sampler keeps its law, or refuses to be built. A chain of exact linear links has the
covariance ``T (K + D)^-1``, ``D`` the diagonal precision of the prior that weight decay amounts to (zero without decay). The
check solves for the covariance of the composed chain and looks at ``T C^-1 - K``.

**The zero-temperature limit**: a sampler ``build(T)`` has the limit ``reference`` if

1. ``build(0.0)`` makes the same updates as ``reference``, bit for bit, and draws no random number;
2. ``build(tensor(0.0))`` makes updates of the same value;
3. with common noise, ``|theta_T - theta_0|`` grows as ``T^(1/2)``: the slope of its logarithm, fitted over
   ``T = 1e-12 ... 1e-6``, is 0.5 within 0.05.
"""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable, Iterable
from typing import Any
from unittest import TestCase

import numpy as np
import optree
import torch
import torchopt
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bayesopt_chain import checks
from bayesopt_chain.compose import chain
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import Link
from bayesopt_chain.core.state import State
from bayesopt_chain.links.learning_rate import scale
from bayesopt_chain.links.momentum import add_momentum
from bayesopt_chain.links.weight_decay import add_decayed_weights
from bayesopt_chain.loop.parallel import stack
from bayesopt_chain.matching.response import Decay, Linear, Nonlinear
from bayesopt_chain.random.stream import keyed
from bayesopt_chain.testing._linear_system import Unstable, stationary_covariance
from bayesopt_chain.trees import flatten

Build = Callable[[], Any]


def updates_keep_dtype_and_shape(build: Build) -> None:
    """Updates and state keep the dtype and shape of the parameters, in float32 and float64, over several steps."""
    for dtype in (torch.float32, torch.float64):
        params = example_params(dtype)
        tx = build()
        state = tx.init(params)
        signature = _signature(state)
        for _ in range(3):
            updates, state = tx.update(smooth_gradient(params), state, params=params, inplace=False)
            for u, p in zip(optree.tree_leaves(updates), optree.tree_leaves(params)):
                assert u.dtype == p.dtype and u.shape == p.shape, (
                    f"{u.dtype}{tuple(u.shape)} for {p.dtype}{tuple(p.shape)}"
                )
                assert torch.isfinite(u).all(), "the update is not finite"
            assert _signature(state) == signature, "the state's structure, shapes or dtypes changed"


def states_hold_only_tensors(build: Build) -> None:
    """No ``None`` and no Python number hides in the state, so that it stacks, saves and captures."""
    state = build().init(example_params())
    for leaf in optree.tree_leaves(state, none_is_leaf=True):
        assert torch.is_tensor(leaf), f"the state holds {leaf!r}"


def pure_updates_touch_nothing(build: Build) -> None:
    """``inplace=False`` leaves gradients, parameters and state as they were."""
    tx, params, state = _underway(build)
    grads = smooth_gradient(params)
    before = copy.deepcopy((grads, params, state))
    tx.update(grads, state, params=params, inplace=False)
    assert_bitwise_equal((grads, params, state), before, "arguments of a pure update")


def in_place_equals_pure(build: Build) -> None:
    """Both modes move the parameters alike, bit for bit."""
    params = example_params()
    pure, _ = run(build(), params, smooth_gradient, 6)
    inplace, _ = run(build(), params, smooth_gradient, 6, inplace=True)
    assert_bitwise_equal(inplace, pure, "parameters")


def in_place_keeps_the_state_tensors(build: Build) -> None:
    """``inplace=True`` writes into the tensors of the state and never replaces them, a missing gradient or not."""
    tx, params, state = _underway(build)
    before = [t.data_ptr() for t in optree.tree_leaves(state)]
    filled = [address for address in before if address]
    assert len(set(filled)) == len(filled), "two entries of the state share one tensor"
    for missing in ({}, {"scale": None}):
        _, state = tx.update({**smooth_gradient(params), **missing}, state, params=params, inplace=True)
        for path, t, address in zip(optree.tree_paths(state), optree.tree_leaves(state), before, strict=True):
            assert t.data_ptr() == address, (
                f"an update in place replaced the tensor {path[1:]} of the state of {_link_at(tx, path)}; write into it "
                "instead, old.copy_(new)"
            )
            assert not t._is_view(), f"the state holds a view of shape {tuple(t.shape)}"


def copies_and_pickles_continue_exactly(build: Build) -> None:
    """State and gradients determine all that follows, noise included: the same state, its deepcopy and pickle, and a second
    transformation go on as the original did."""
    tx, params, state = _underway(build)
    want = go_on(tx, params, state)[0]
    for how, (other, twin) in {
        "the same state again": (tx, state),
        "deepcopy": (tx, copy.deepcopy(state)),
        "pickle": (tx, pickle.loads(pickle.dumps(state))),
        "another transformation": (build(), state),
        "copy_ into a fresh state": (tx, optree.tree_map(Tensor.copy_, tx.init(params), state)),
    }.items():
        assert_bitwise_equal(go_on(other, params, twin)[0], want, how)


def init_starts_afresh(build: Build) -> None:
    """A second ``init`` of one transformation starts as the first did, whatever happened in between."""
    tx, params = build(), example_params()
    first, _ = run(tx, params, smooth_gradient, 4)
    second, _ = run(tx, params, smooth_gradient, 4)
    assert_bitwise_equal(second, first, "the run after a second init")


def tree_structure_does_not_matter(build: Build) -> None:
    """A dict, a list, a nested tuple, TorchOpt's flat tuple of the same leaves move alike, a tensor as a tree of one.

    Where nothing is drawn: draws know a leaf by its path.
    """
    params = example_params()
    if keyed(build().init(params)):
        return
    want = optree.tree_leaves(run(build(), params, smooth_gradient, 4)[0])
    a, b, c = optree.tree_leaves(params)
    others: tuple[Any, ...] = ([a, b, c], (a, (b, [c])), {"x": {"y": a}, "z": (b, c)})
    moved = [run(build(), tree, smooth_gradient, 4)[0] for tree in (*others, [c], c)]
    for end in moved[:-2]:
        assert_bitwise_equal(end, want, f"structure {optree.tree_structure(end)}")
    assert_bitwise_equal(moved[-1], moved[-2], "a bare tensor")


def a_missing_gradient_leaves_its_leaf_alone(build: Build) -> None:
    """``None`` gives no update and keeps what the state remembers of that leaf; the others go on as ever."""
    for inplace in (False, True):
        tx, params, state = _underway(build)
        want, _ = tx.update(smooth_gradient(params), state, params=params, inplace=False)
        kept = _of_leaf(state, 1)
        grads = {**smooth_gradient(params), "scale": None}
        updates, skipped = tx.update(grads, copy.deepcopy(state), params=params, inplace=inplace)
        assert updates["scale"] is None, "a leaf without gradient was updated"
        assert_bitwise_equal([updates["bias"], updates["weight"]], [want["bias"], want["weight"]], "the other leaves")
        assert_bitwise_equal(_of_leaf(skipped, 1), kept, "the state of the leaf without gradient")
        again, _ = tx.update(smooth_gradient(params), skipped, params=params, inplace=inplace)
        assert all(torch.isfinite(u).all() for u in optree.tree_leaves(again))


def absent_parameters_are_skipped(build: Build) -> None:
    """``None`` in the parameter tree is no parameter."""
    params = {**example_params(), "absent": None}
    tx = build()
    state = tx.init(params)
    grads = {**smooth_gradient(example_params()), "absent": None}
    updates, _ = tx.update(grads, state, params=params, inplace=False)
    assert updates["absent"] is None and updates["weight"].shape == (2, 3)


def stacked_equals_looped(build: Build) -> None:
    """Chains under ``vmap`` move as each does alone: to one rounding of each operation."""
    singles = [optree.tree_map(lambda p, i=i: p + 0.1 * i, example_params()) for i in range(3)]
    tx = build()
    states = [seeded(tx, p, seed) for seed, p in enumerate(singles)]

    def advance(params, state):
        return go_on(tx, params, state)[:2]

    alone: Any = stack([advance(params, state) for params, state in zip(singles, states)])
    together: Any = torch.vmap(advance)(stack(singles), stack(states))
    torch.testing.assert_close(optree.tree_leaves(together), optree.tree_leaves(alone), rtol=1e-12, atol=1e-12)


def unknown_keywords_are_refused(build: Build) -> None:
    """A keyword that no link takes is a ``TypeError``."""
    tx, params, state = _underway(build)
    with TestCase().assertRaises(TypeError, msg="an unknown keyword was accepted"):
        tx.update(smooth_gradient(params), state, params=params, inplace=False, no_such_keyword=1)


def nothing_shares_memory(build: Build) -> None:
    """A pure update's results share no memory with each other, nor with the state they came from.

    No tensor of a state is a view, so that TorchOpt's ``stop_gradient`` may detach it in place.
    """
    for missing in ({}, {"scale": None}):
        tx, params, state = _underway(build)
        updates, new = tx.update({**smooth_gradient(params), **missing}, state, params=params, inplace=False)
        seen: dict[int, str] = {}
        for name, tree in (("the old state", state), ("the new state", new), ("the update", updates)):
            for t in optree.tree_leaves(tree):
                assert name == "the update" or not t._is_view(), f"{name} holds a view of shape {tuple(t.shape)}"
                if t.numel():
                    other = seen.setdefault(t.untyped_storage().data_ptr(), name)
                    assert other == name, f"{name} shares memory with {other}"


def updates_can_be_differentiated(build: Build) -> None:
    """A pure update keeps the graph from each gradient: autograd through three updates, noise included, agrees with central
    differences, along random directions.
    """
    tx, params, state = _underway(build, 0)  # a link alone may climb, to numbers whose differences are rounding
    leaves, spec = optree.tree_flatten(smooth_gradient(params))

    def moved(*grads: Tensor) -> Tensor:
        now, out = state, list[Tensor]()
        for _ in range(3):
            updates, now = tx.update(spec.unflatten(grads), now, params=params, inplace=False)
            out += [u.flatten() for u in optree.tree_leaves(updates)]
        return torch.cat(out)

    at = [x.clone().requires_grad_() for x in leaves]
    assert torch.autograd.gradcheck(
        moved, at, rtol=1e-4, atol=1e-6, fast_mode=True, check_undefined_grad=False, raise_exception=False
    ), "the derivative of the update is not that of central differences: some of its graph is cut"


def the_stream_reaches_every_draw(build: Build) -> None:
    """No draw comes from a generator: a state's key and count decide all of them."""
    tx, params, state = _underway(build)
    before = torch.random.get_rng_state()
    with _NoGenerator():
        tx.update(smooth_gradient(params), state, params=params, inplace=False)
    assert torch.equal(before, torch.random.get_rng_state()), "an update drew from torch's global generator"


class _NoGenerator(TorchDispatchMode):
    """Refuses every operation that draws from a generator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert torch.Tag.nondeterministic_seeded not in func.tags, f"a draw from a generator: {func}"
        return func(*args, **(kwargs or {}))


def foreign_states_are_refused(build: Build) -> None:
    """The state of other links, or over leaves of other names, is a ``ValueError`` at the first update."""
    tx, params, state = _underway(build)
    if not isinstance(state, State):
        return
    layout = state.layout
    for other in (
        layout._replace(kinds=("Another", *layout.kinds)),
        layout._replace(paths=tuple(f"{path}['x']" for path in layout.paths)),
    ):
        with TestCase().assertRaises(ValueError, msg="a foreign state was taken"):
            tx.update(smooth_gradient(params), State(state, other), params=params, inplace=False)


def a_part_of_a_leaf_moves_as_in_the_whole(build: Build) -> None:
    """Where all links say that they treat each element by itself, a part of a leaf moves as it does in the whole leaf.

    Parameters of which every rank holds a part (DTensors) rest on it. The noise is Philox's, which knows elements by number.
    """
    tx, params = build(), example_params()
    if not isinstance(tx, Chain) or any(link.traits.on_shards != "elementwise" for link in tx.links):
        return
    mine: Any = optree.tree_map(lambda p: _rows(p)[0], params)
    state, part = seeded(tx, params), seeded(tx, mine)
    runs = tuple([_rows(p)[1] for p in optree.tree_leaves(params)])
    part = State(part, part.layout._replace(pieces=runs))
    for _ in range(5):
        g = smooth_gradient(params)
        updates, state = tx.update(g, state, params=params, inplace=False)
        moves, part = tx._step(optree.tree_map(lambda x: _rows(x)[0], g), part, params=mine, inplace=False)
        want = [_rows(x)[0] for x in optree.tree_leaves(updates)]
        torch.testing.assert_close(optree.tree_leaves(moves), want, rtol=1e-12, atol=1e-12)


def _rows(x: Tensor) -> tuple[Tensor, tuple[tuple[int, int], ...]]:
    """All but the first row of a leaf, and the runs of elements that these are; of a single row the row itself."""
    if x.ndim == 0 or len(x) == 1:
        return x, ((0, x.numel()),)
    first = x.numel() // len(x)
    return x[1:].clone(), ((first, x.numel() - first),)


def responses_are_as_declared(build: Build) -> None:
    """A filter answers an impulse by its coefficients, a function of the gradient alone forgets it, a decay adds its share."""
    params = example_params()
    moved = optree.tree_map(lambda p: p + 0.25, params)
    for link in getattr(build(), "links", ()):
        declared = link.response
        if type(declared) not in (Linear, Nonlinear, Decay) or link.traits.extra_kwargs:
            continue
        want = _impulse(declared) if isinstance(declared, Linear) else [1.0, 0.0, 0.0]
        sign = -1.0 if getattr(link.part, "flips", False) else 1.0  # noise is matched to the loss that is descended
        still, struck = (_answers(link, params, params, height) for height in (0.0, 0.5))
        for i, value in enumerate([sign * (y - x) / 0.5 for x, y in zip(still, struck)]):
            untouched = torch.full_like(value, i == 0) if link.masks else value.new_tensor(torch.nan)
            wrong = value[((value - want[i]).abs() > 1e-9) & ~((value - untouched).abs() < 1e-9)]
            assert not len(wrong) or (i == 0 and isinstance(declared, Nonlinear)), (
                f"{link.shown} declares {declared}, which answers a gradient of 1 after {i} steps with {want[i]:g}, but the "
                f"link answers with {wrong[0].item():g}"
            )
        if isinstance(declared, Decay):
            share = (_answers(link, params, moved, 0.0)[0] - still[0]) / 0.25
            wrong = share[((share - declared.weight_decay).abs() > 1e-9) & ~(bool(link.masks) & (share.abs() < 1e-9))]
            assert not len(wrong), (
                f"{link.shown} declares {declared}, but adds {wrong[0].item():g} times the parameters to the gradient"
            )


def _impulse(filter: Linear, steps: int = 3) -> list[float]:
    """What a filter answers to an impulse of 1: ``a_0 h_i = b_i - a_1 h_(i-1) - a_2 h_(i-2) - ...``."""
    h = list[float]()
    for i in range(steps):
        past = sum(a * x for a, x in zip(filter.a[1:], reversed(h)))
        h.append(((filter.b[i] if i < len(filter.b) else 0.0) - past) / filter.a[0])
    return h


def _answers(link: Link, start: Any, params: Any, height: float, steps: int = 3) -> list[Tensor]:
    """The updates of a link alone at fixed parameters, from the second step on, when the gradient is raised once.

    The first step fills a memory, in torch's momentum without the dampening of all others.
    """
    tx, g = Chain([link]), smooth_gradient(start)
    state, out = tx.init(start), list[Tensor]()
    for i in range(steps + 1):
        grads = optree.tree_map(torch.add, g, optree.tree_map(lambda x, h=height * (i == 1): torch.full_like(x, h), g))
        updates, state = tx.update(grads, state, params=params, inplace=False)
        out.append(torch.cat([u.detach().flatten() for u in optree.tree_leaves(updates)]))
    return out[1:]


def _link_at(tx: Any, path: tuple[Any, ...]) -> str:
    """The link whose state lies at this path of the chain's."""
    links: tuple[Any, ...] = tx.links if isinstance(tx, Chain) else ()
    return links[path[0]].shown if path and path[0] in range(len(links)) else "the transformation"


LAWS: tuple[Callable[[Build], None], ...] = (
    updates_keep_dtype_and_shape,
    states_hold_only_tensors,
    pure_updates_touch_nothing,
    in_place_equals_pure,
    in_place_keeps_the_state_tensors,
    copies_and_pickles_continue_exactly,
    init_starts_afresh,
    tree_structure_does_not_matter,
    a_missing_gradient_leaves_its_leaf_alone,
    absent_parameters_are_skipped,
    stacked_equals_looped,
    unknown_keywords_are_refused,
    updates_can_be_differentiated,
    nothing_shares_memory,
    the_stream_reaches_every_draw,
    foreign_states_are_refused,
    a_part_of_a_leaf_moves_as_in_the_whole,
    responses_are_as_declared,
)


def assert_laws(build: Build, *, skip: Iterable[Callable] = ()) -> None:
    """Run every law on what ``build()`` returns.

    Args:
        build: makes the transformation; called several times. It must accept any parameter tree.
        skip: laws that do not apply to it, from ``LAWS``.

    Raises:
        AssertionError: naming the law.

    Example:
        >>> import bayesopt_chain as bc
        >>> assert_laws(lambda: bc.sghmc(0.1, temperature=0.01))
    """
    for law in LAWS:
        if law not in tuple(skip):
            try:
                law(build)
            except AssertionError as err:
                raise AssertionError(f"{law.__name__}: {err}") from None


NEIGHBOURS: dict[str, Callable[[], Any]] = {
    "gain": lambda: scale(0.5),
    "momentum": lambda: add_momentum(0.3),
    "decay": lambda: add_decayed_weights(0.1),
    "clip": lambda: torchopt.clip_grad_norm(1e9),
}


@checks.takes(tolerance=checks.number("[0, inf)"))
def assert_composes(
    build: Callable[[], Any], temperature: float, *, tolerance: float = 1e-8, burn_in: int = 40
) -> dict[str, str]:
    """Check that a sampler stays right, or refuses, with a gain, a momentum, a decay or a clip in front of it or behind it.

    Args:
        build: makes the sampler, at this temperature.
        temperature: its temperature, in units of the loss.
        tolerance: of ``T C^-1 - K`` relative to ``K``: rounding for exact samplers, the bias for others.
        burn_in: updates on a noisy gradient before the covariance is solved for, in which preconditioners freeze.

    Returns:
        What happened, by ``"<neighbour> before"`` and ``"<neighbour> behind"``: ``"right"``, ``"refused"``, or ``"unstable"``
        where the composed chain has no stationary law at all.

    Raises:
        AssertionError: a chain that samples something else, named.

    Example:
        >>> import bayesopt_chain as bc
        >>> assert_composes(lambda: bc.sghmc(0.05, temperature=0.3), 0.3)["clip behind"]
        'refused'
    """
    curvature = torch.tensor([[1.0, 0.3], [0.3, 0.6]], dtype=torch.float64, device="cpu")
    return {
        f"{name} {where}": _what_happens(
            chain(link(), build()) if where == "before" else chain(build(), link()),
            curvature, temperature, tolerance, burn_in, name, where,
        )
        for name, link in NEIGHBOURS.items()
        for where in ("before", "behind")
    }  # fmt: skip


def _what_happens(
    tx: Any, curvature: Tensor, temperature: float, tolerance: float, burn_in: int, name: str, where: str
) -> str:
    theta = torch.tensor([1.0, -2.0], dtype=torch.float64, device="cpu")
    try:
        state = tx.init(theta)
    except ValueError:
        return "refused"
    steps, each = itertools.count(), torch.arange(2.0, dtype=torch.float64, device="cpu")
    _, state, _ = go_on(tx, theta, state, burn_in, lambda theta: curvature @ theta + torch.sin(each + next(steps)))
    try:
        covariance = stationary_covariance(tx, curvature, state=state)
    except Unstable:
        return "unstable"
    extra = temperature * torch.linalg.inv(covariance) - curvature
    if name == "decay":
        extra = extra - torch.diag(extra.diagonal())
    off = (extra.abs().max() / curvature.abs().max()).item()
    assert off <= tolerance, f"with a {name} {where} it the chain samples another covariance, off by {off:.3g}: {tx}"
    return "right"


def _underway(build: Build, steps: int = 2):
    """A transformation, parameters and state after a few steps."""
    tx, params = build(), example_params()
    return tx, *go_on(tx, params, seeded(tx, params), steps)[:2]


def _of_leaf(state, i: int) -> list:
    """What the states with one entry for each of the three example leaves remember of leaf ``i``."""
    entries = [entry for s in state for entry in (s if isinstance(s, State) else (s,))]  # torchopt.chain nests states
    fields = [field for entry in entries if isinstance(entry, tuple) for field in entry]
    per_leaf = [field for field in fields if type(field) is tuple and len(field) == 3]
    return [v[i].clone() for v in per_leaf if torch.is_tensor(v[i])]


def _signature(state) -> list:
    return [optree.tree_structure(state), *((t.dtype, t.shape) for t in optree.tree_leaves(state))]


def bits(x: Tensor) -> Tensor:
    """The tensor's bytes, a vector, so that -0.0 differs from 0.0."""
    # contiguous() keeps any stride of an axis of length 1, which a view as bytes refuses
    return x.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def assert_bitwise_equal(ours: Any, theirs: Any, what: str = "values") -> None:
    """Two trees with the same leaves, bit for bit.

    Args:
        ours, theirs: trees of tensors.
        what: what they are, for the message.

    Raises:
        AssertionError: naming the first leaf that differs in dtype, shape or bits.

    Example:
        >>> import torch
        >>> assert_bitwise_equal([torch.zeros(2), torch.zeros(1)], [torch.zeros(2), torch.zeros(4)[::4]])
    """
    a, b = optree.tree_leaves(ours), optree.tree_leaves(theirs)
    assert len(a) == len(b), f"{what}: {len(a)} leaves against {len(b)}"
    for i, (x, y) in enumerate(zip(a, b)):
        assert x.dtype == y.dtype and x.shape == y.shape, (
            f"{what}, leaf {i}: {x.dtype}{x.shape} against {y.dtype}{y.shape}"
        )
        if not torch.equal(bits(x), bits(y)):
            worst = (x.to(torch.complex128) - y).abs().max().item()
            raise AssertionError(f"{what}, leaf {i}: bits differ, by up to {worst:.3g}")


def smooth_gradient(params: Any) -> Any:
    """Gradient of ``sum(theta^2 / 2 + theta^4 / 10 + 0.3 cos(2 theta + 1))``, a smooth loss that is not quadratic."""
    return optree.tree_map(lambda p: p + 0.4 * p**3 - 0.6 * torch.sin(2 * p + 1), params)


def example_params(dtype: torch.dtype = torch.float64) -> Any:
    """A small tree with a matrix, a vector and a 0-d leaf."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"bias": (3,), "scale": (), "weight": (2, 3)}
    return {
        k: torch.randn(s, generator=generator, dtype=torch.float64, device="cpu").to(dtype) for k, s in shapes.items()
    }


def seeded(tx: Any, params: Any, seed: int = 0) -> Any:
    """The first state, its key drawn after ``torch.manual_seed(seed)``; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return tx.init(params)


def go_on(
    tx: Any, params: Any, state: Any, steps: int = 3, gradient: Callable = smooth_gradient, inplace: bool = False
) -> tuple[Any, Any, list[Any]]:
    """Parameters and state after some steps, and copies of the updates."""
    history = list[Any]()
    for _ in range(steps):
        updates, state = tx.update(gradient(params), state, params=params, inplace=inplace)
        history.append(optree.tree_map(torch.clone, updates))
        params = torchopt.apply_updates(params, updates, inplace=inplace)
    return params, state, history


def run(tx: Any, params: Any, gradient: Callable, steps: int, inplace: bool = False, seed: int = 0) -> tuple[Any, Any]:
    """Final parameters and all updates of ``steps`` steps, the key being drawn after ``torch.manual_seed(seed)``."""
    state, params = seeded(tx, params, seed), optree.tree_map(torch.clone, params)
    params, _, history = go_on(tx, params, state, steps, gradient, inplace)
    return params, history


@checks.takes(params=checks.ANY, gradient=checks.FUNCTION, reference=checks.FUNCTION, power=checks.NUMBER.or_none())
def assert_zero_temperature_limit(
    build: Callable[[Any], Any],
    reference: Callable[[], Any],
    *,
    params: Any = None,
    gradient: Callable[[Any], Any] = smooth_gradient,
    steps: int = 12,
    seed: int = 0,
    power: float | None = 0.5,
) -> None:
    """Check that a sampler is ``reference`` at temperature zero, and how it departs from it.

    Args:
        build: ``temperature -> sampler``; called with the number 0, a 0-d tensor and small positive numbers.
        reference: a function that returns the optimizer, a fresh one each time (TorchOpt's momentum remembers its first call).
        params: tree of parameters (default: a float64 dict with a matrix, a vector and a 0-d leaf).
        gradient: smooth gradient field, ``params -> tree``.
        steps: number of steps compared.
        seed: of the common noise.
        power: of the temperature with which the parameters depart from the reference's, 1/2 for Langevin noise. ``None``:
            faster than any power, as in microcanonical sampling, whose direction is the gradient's up to ``exp(-c / T)``.

    Raises:
        AssertionError: naming the part of the definition that fails.

    Example:
        >>> import bayesopt_chain as bc, torchopt
        >>> assert_zero_temperature_limit(lambda t: bc.sghmc(0.1, temperature=t), lambda: torchopt.sgd(0.1, momentum=0.9))
    """
    params = example_params() if params is None else params

    for inplace in (False, True):
        _, want = run(reference(), params, gradient, steps, inplace)
        before = torch.random.get_rng_state()
        _, got = run(build(0.0), params, gradient, steps, inplace)
        assert torch.equal(before, torch.random.get_rng_state()), "temperature=0.0 drew a random number"
        assert_bitwise_equal(got, want, f"updates at temperature=0.0 (inplace={inplace})")
        _, got = run(build(torch.zeros((), dtype=torch.float64, device="cpu")), params, gradient, steps, inplace)
        for x, y in zip(optree.tree_leaves(got), optree.tree_leaves(want)):
            assert torch.equal(x, y), f"updates at temperature=tensor(0.) differ in value (inplace={inplace})"

    cold, _ = run(reference(), params, gradient, steps)

    def gap(temperature: float) -> float:
        warm, _ = run(build(temperature), params, gradient, steps, seed=seed)
        return (flatten(warm, params) - flatten(cold, params)).double().norm().item()

    if power is None:
        assert gap(1e-9) < 1e-12, f"|theta_T - theta_0| is {gap(1e-9):.3g} at T = 1e-9, not the rounding error"
        assert gap(1.0) > 1e-3, "theta_T is theta_0 at T = 1 too: nothing was drawn"
        return
    exponents = np.arange(-12.0, -5.0)
    slope = np.polyfit(exponents, [math.log10(gap(10.0**exponent)) for exponent in exponents], 1)[0]
    assert abs(slope - power) < 0.05, f"|theta_T - theta_0| grows as T^{slope:.3f}, not T^{power}"
