"""A lowered run gives the bits of its links one by one: pure and in place, with its kernel and without."""

import copy

import optree
import pytest
import torch
import torchopt
from hypothesis import given
from hypothesis import strategies as st

import bayesopt_chain as bc
from bayesopt_chain.fused import lower
from bayesopt_chain.fused.sweep_cpu import pointers, sweep_kernel
from bayesopt_chain.random import stream as stream_module

SHAPES = [(), (0,), (3,), (2, 3), (16,), (4, 8), (33,), (5, 64)]
CHAINS = {
    "sgd": lambda t: bc.sgd(0.1, 0.9),
    "sghmc": lambda t: bc.sghmc(0.1, 0.9, temperature=t),
    "little momentum": lambda t: bc.sghmc(0.1, 0.03, temperature=t),
    "white noise": lambda t: bc.chain(
        bc.add_momentum(0.8), bc.inject_langevin_noise(t, order=1), bc.scale_by_neg_lr(0.1)
    ),
    "sgld": lambda t: bc.sgld(0.1, temperature=t),
    "signs": lambda t: bc.chain(
        bc.add_momentum(0.8), bc.inject_langevin_noise(t, noise="rademacher"), bc.scale_by_neg_lr(0.1)
    ),
    "clipped, with decay": lambda t: bc.chain(
        bc.links.add_decayed_weights(0.01),
        torchopt.clip.clip_grad_norm(0.7),
        bc.inject_langevin_noise(t),
        bc.add_momentum(0.5),
        bc.scale_by_neg_lr(0.1),
    ),
}


class Plain(bc.Chain):
    """A chain whose links run one by one."""

    _lower = staticmethod(lambda links, plan: {})


def runs_of(tx, state):
    return [run for run, _ in tx.plan(state).stages if len(run) > 1]


def forget_spans():
    stream_module.spans.cache_clear()
    stream_module._spans_of_elements.cache_clear()


def walk(tx, params, gradients, inplace):
    """Updates and states of a few steps."""
    params, gradients = copy.deepcopy((params, gradients))
    state = tx.init(params)
    out = []
    for g in gradients:
        u, state = tx.update(g, state, params=params, inplace=inplace)
        out.append(copy.deepcopy((u, state)))
    return out


@pytest.mark.slow
@given(
    name=st.sampled_from(sorted(CHAINS)),
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=5),
    dtypes=st.sampled_from([(torch.float32,), (torch.float64,), (torch.float32, torch.float64), (torch.bfloat16,)]),
    stream=st.sampled_from(["generator", "philox"]),
    missing=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=3),
    inplace=st.booleans(),
    compiler=st.booleans(),
    chunk=st.sampled_from([16, 48, 2**18]),
    seed=st.integers(0, 2**31),
)
def test_a_lowered_run_has_the_bits_of_its_links(name, shapes, dtypes, stream, missing, inplace, compiler, chunk, seed):
    torch.manual_seed(seed)
    tx = CHAINS[name](0.3)
    if name != "sgd":
        tx = bc.with_stream(tx, stream)
    plain = Plain(tx.links)
    params = [torch.randn(shape).to(dtypes[i % len(dtypes)]) for i, shape in enumerate(shapes)]
    gradients = [[torch.randn(p.shape).to(p.dtype) for p in params] for _ in range(4)]
    if name != "clipped, with decay":
        for step, leaf in missing:
            if leaf < len(params):
                gradients[step][leaf] = None
    assert runs_of(tx, tx.init(params)) and not runs_of(plain, plain.init(params))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_module, "SPAN", chunk)
        forget_spans()
        if not compiler:
            patch.setattr(lower, "sweep_kernel", lambda: None)
        torch.manual_seed(seed)
        mine = walk(tx, params, gradients, inplace)
    forget_spans()
    torch.manual_seed(seed)
    want = walk(plain, params, gradients, False)
    assert optree.tree_structure(mine) == optree.tree_structure(want)
    for x, y in zip(optree.tree_leaves(mine), optree.tree_leaves(want), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y)


def test_every_group_of_a_partition_is_lowered_by_itself():
    torch.manual_seed(0)
    params, gradients = [torch.randn(5), torch.randn(2, 3)], [[torch.randn(5), torch.randn(2, 3)] for _ in range(3)]
    tx = bc.partition({"a": bc.sghmc(0.1, temperature=0.3), "b": bc.sgld(0.2, temperature=0.3)}, ["a", "b"])
    plain = Plain(tx.links)
    assert len(runs_of(tx, tx.init(params))) == 2
    walks = []
    for each, inplace in ((tx, True), (tx, False), (plain, False)):
        torch.manual_seed(1)
        walks.append(optree.tree_leaves(walk(each, params, gradients, inplace)))
    for xs in zip(*walks, strict=True):
        assert torch.equal(xs[0], xs[2]) and torch.equal(xs[1], xs[2])


@pytest.mark.parametrize(
    "name, tx",
    {
        "a schedule of lr": bc.sghmc(bc.schedules.cosine(0.1, 100), temperature=0.3),
        "a temperature that may change": bc.sghmc(0.1, temperature=torch.tensor(0.3)),
        "nesterov": bc.sgd(0.1, 0.9, nesterov=True, temperature=0.3),
        "a preconditioner behind the momentum": bc.chain(
            bc.add_momentum(0.9),
            bc.inject_langevin_noise(0.3),
            bc.scale_by_preconditioner([torch.full((3,), 2.0)]),
            bc.scale_by_neg_lr(0.1),
        ),
        "lr in front of the momentum": bc.chain(
            bc.inject_langevin_noise(0.3), bc.scale_by_neg_lr(0.1), bc.add_momentum(0.9)
        ),
    }.items(),
)
def test_noise_that_is_none_of_the_runs_is_left_to_the_chain(name, tx):
    state = tx.init([torch.zeros(3)])
    plan = tx.plan(state)
    assert plan.drawn == list(plan.noise) != []


@pytest.mark.skipif(sweep_kernel() is None, reason="needs a C++ compiler")
def test_the_kernel_leaves_tensors_that_it_cannot_take_to_tensor_operations(monkeypatch):
    """Gradients of other strides, a subclass of Tensor, and what is differentiated."""
    calls = []
    kernel = sweep_kernel()
    monkeypatch.setattr(lower, "sweep_kernel", lambda: lambda *args: (calls.append(1), kernel(*args)))
    tx = bc.sghmc(0.1, temperature=0.3)
    params = [torch.zeros(4, 3), torch.zeros(2)]

    def update(g):
        torch.manual_seed(0)
        return tx.update([g, torch.ones(2)], tx.init(params), inplace=False)[0][0]

    want = update(torch.arange(12.0).view(3, 4).T.contiguous())
    assert len(calls) == 1
    other = update(torch.arange(12.0).view(3, 4).T)
    traced = update(torch.arange(12.0).view(3, 4).T.contiguous().requires_grad_())
    wrapped = update(torch.arange(12.0).view(3, 4).T.contiguous().as_subclass(type("Mine", (torch.Tensor,), {})))
    assert len(calls) == 1 and traced.requires_grad
    assert torch.equal(other, want) and torch.equal(traced, want) and torch.equal(wrapped, want)


@pytest.mark.skipif(sweep_kernel() is None, reason="needs a C++ compiler")
def test_autograd_is_told_of_what_the_kernel_writes():
    """A gradient that a graph has saved, overwritten in place, is an error in backward and not a wrong derivative."""
    g = [torch.ones(3), torch.ones(2)]
    w = torch.ones(3, requires_grad=True)
    saved = (w * g[0]).sum()
    tx = bc.sghmc(0.1, temperature=0.3)
    tx.update(g, tx.init(g), inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


@pytest.mark.skipif(sweep_kernel() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("threads", [1, 2])
def test_the_kernel_has_the_bits_of_tensor_operations_at_every_length(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for dtype in (torch.float32, torch.float64):
            torch.manual_seed(0)
            sizes = (0, 1, 7, 15, 16, 17, 63, 1000, 16385, 200_000)
            g, s = ([torch.randn(n, dtype=dtype) for n in sizes] for _ in range(2))
            e = torch.randn(sum(sizes), dtype=dtype)
            for mu, noise in ((0.9, e), (0.9, None), (None, e)):
                u, t, theta = ([torch.ones_like(x) for x in xs] for xs in (g, s, g))
                for out, onto in ((u, None), (theta, pointers(theta))):
                    places = map(pointers, (g, s, out, t))
                    sweep_kernel()(dtype, sizes, *places, -0.3, mu, noise, 1.1, onto)
                for x, v, y, got, moved, kept in zip(g, s, e.split(sizes), u, theta, t):
                    if mu is None:
                        want, keeps = (x + (y + v)) * -0.3, y
                    else:
                        new = v * mu + (x if noise is None else x + y)
                        want, keeps = new * -0.3, new if noise is None else new + y * 1.1
                    assert torch.equal(got, want) and torch.equal(kept, keeps) and torch.equal(moved, 1.0 + want)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(sweep_kernel() is None, reason="needs a C++ compiler")
@given(
    name=st.sampled_from(["sgd", "sghmc", "white noise", "sgld"]),
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    stream=st.sampled_from(["generator", "philox"]),
    strided=st.booleans(),
    chunk=st.sampled_from([16, 48, 2**18]),
    seed=st.integers(0, 2**31),
)
def test_a_pure_step_in_one_pass_has_the_bits_of_update_and_apply(name, shapes, dtype, stream, strided, chunk, seed):
    torch.manual_seed(seed)
    tx = CHAINS[name](0.3)
    tx = bc.with_stream(tx, stream) if name != "sgd" else tx
    params = {str(i): torch.randn(shape, dtype=dtype) for i, shape in enumerate(shapes)}
    gradients = [{k: torch.randn(p.shape, dtype=dtype) for k, p in params.items()} for _ in range(3)]
    if strided:
        gradients = [{k: g.T.contiguous().T if g.ndim == 2 else g for k, g in each.items()} for each in gradients]
    start = tx.init(params)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_module, "SPAN", chunk)
        forget_spans()
        mine, theirs = (params, start), (params, start)
        for g in gradients:
            before = copy.deepcopy((mine, g))
            after = lower.moved(tx, mine[0], g, mine[1])
            assert after is not None
            assert all(map(torch.equal, optree.tree_leaves((mine, g)), optree.tree_leaves(before)))
            kept, new = ({x.data_ptr() for x in optree.tree_leaves(each) if x.numel()} for each in (mine, after))
            assert not kept & new
            mine = after
    forget_spans()
    for g in gradients:
        updates, state = tx.update(g, theirs[1], params=theirs[0], inplace=False)
        theirs = optree.tree_map(torch.add, theirs[0], updates), state
    assert optree.tree_structure(mine) == optree.tree_structure(theirs) and mine[1].layout == theirs[1].layout
    for x, y in zip(optree.tree_leaves(mine), optree.tree_leaves(theirs), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and x.is_contiguous() and torch.equal(x, y)


@pytest.mark.skipif(sweep_kernel() is None, reason="needs a C++ compiler")
def test_a_pure_step_of_anything_else_is_left_to_update():
    p, g = {"w": torch.zeros(3), "b": torch.zeros(2)}, {"w": torch.ones(3), "b": torch.ones(2)}
    tx = bc.sghmc(0.1, temperature=0.3)
    state = tx.init(p)
    assert lower.moved(tx, p, g, state) is not None
    for grads in ({"w": g["w"]}, {**g, "b": None}, {**g, "b": torch.ones(1)}, {**g, "b": torch.ones(2).double()}):
        assert lower.moved(tx, p, grads, state) is None
    mine = torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {}))
    assert lower.moved(tx, {**p, "b": mine}, g, state) is None
    absent = {**p, "b": None}
    assert lower.moved(tx, absent, {**g, "b": None}, tx.init(absent)) is None
    assert lower.moved(bc.adam(0.1, temperature=0.3), p, g, bc.adam(0.1, temperature=0.3).init(p)) is None
    little = CHAINS["little momentum"](0.3)  # whose noise is drawn by its link, in front of the run
    assert lower.moved(little, p, g, little.init(p)) is None
    signs = CHAINS["signs"](0.3)
    assert lower.moved(signs, p, g, signs.init(p)) is None
    half = {k: x.bfloat16() for k, x in p.items()}
    assert lower.moved(tx, half, {k: x.bfloat16() for k, x in g.items()}, tx.init(half)) is None
    one = bc.masked(tx, {"w": True, "b": False})
    assert lower.moved(one, p, g, one.init(p)) is None
