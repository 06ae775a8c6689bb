"""Gaussian posteriors of parameters that are spread over four ranks: those of one process, or refused by name."""

import functools

import optree
import pytest
import torch
import torchopt
from torch.distributed.tensor.debug import CommDebugMode

import bayesopt_chain as bc
from tests.distributed.layouts import is_spread_as_its_leaf, layouts, leaves, local, parts, spread
from tests.distributed.ranks import mesh_of, message_of, on, whole, world
from tests.distributed.toys import network, under

pytestmark = pytest.mark.slow
close = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-12)
CATEGORICAL, LAPLACE = bc.likelihoods.categorical(), bc.laplace()


ADAM, DECAY, FAST = torchopt.adam(1e-2), {"weight_decay": 0.1}, {"temperature": 0.1, "betas": (0.9, 0.9)}
FAMILIES = {
    "mean field": bc.vi.mean_field(ADAM, temperature=0.1),
    "mean field, clipped": bc.vi.mean_field(bc.chain(torchopt.clip_grad_norm(0.3), bc.adam(1e-2)), temperature=0.1),
    "mean field, four draws": bc.vi.mean_field(ADAM, temperature=0.1, n_samples=4, antithetic=True, **DECAY),
    "ivon": bc.vi.ivon(0.1, **FAST, **DECAY),
    "ivon, two draws": bc.vi.ivon(0.1, n_samples=2, **FAST, **DECAY),
}


def inferred(tx, params, seed=3):
    """Parameters, state and last draw after some steps on a loss whose gradient is elementwise."""
    torch.manual_seed(seed)
    state, draw = tx.init(params), None
    for _ in range(4):
        draw = tx.sample(state, params)
        grads = {name: x.sin() + 0.3 * x for name, x in draw.params.items()}
        updates, state = tx.update(grads, state, params=params, draw=draw, inplace=False)
        params = {name: p + updates[name] for name, p in params.items()}
    return params, state, draw


@on(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_diagonal_families_make_the_steps_of_one_process_and_send_nothing_but_a_norm(family):
    tx = FAMILIES[family]
    params, state, draw = inferred(tx, leaves(0))
    variance = tx.posterior(state, params).marginal_variance
    for way, layout in layouts().items():
        if way not in ("Shard(0), uneven and empty", "FSDP x TP") and family not in ("mean field", "ivon"):
            continue
        mine, here, drawn = inferred(tx, spread(leaves(0), layout), 3 + world()[0])
        close(local(mine), parts(params, layout))
        close(local(tx.posterior(here, mine).marginal_variance), parts(variance, layout))
        if draw.params["weight"].ndim == 2:
            close(local(drawn.params), parts(draw.params, layout))
        with CommDebugMode() as messages:
            again = tx.sample(here, mine)
            grads = {leaf: x.sin() for leaf, x in again.params.items()}
            tx.update(grads, here, params=mine, draw=again, inplace=False)
        assert (messages.get_total_counts() == 0) == ("clipped" not in family) and is_spread_as_its_leaf(here)


def data(n=8):
    g = torch.Generator().manual_seed(5)
    return torch.randn(n, 3, generator=g).double(), torch.randint(2, (n,), generator=g)


def partly_frozen():
    """As of a model with adapters: a leaf is not trained, and has no variance."""
    model = network(3, 4, 2)
    model[0].bias.requires_grad_(False)
    return model


def params_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def forward_of(model):
    return lambda p, batch: torch.func.functional_call(model, p, (batch[0],))


@on(4)
def test_diagonal_laplace_of_a_sharded_model_is_that_of_one_process_and_is_added_up_without_messages():
    """A draw is one draw in every layout; random signs estimate the diagonal.

    The relative variance of one probe is at most 2, that of 100 at most 0.02: 22 entries stay within 5 deviations but for
    1.3e-5 of all seeds; seeds are fixed. Without the factor for the average over ranks they would be a sixteenth.
    """
    (x, y), one, drawn, rank = data(), partly_frozen(), {}, world()[0]
    params = params_of(one)
    increment = bc.curvature.ggn(forward_of(one), CATEGORICAL, "diagonal")(params, (x, y))
    _, there = LAPLACE.update(params, LAPLACE.init(params), curvature=increment, inplace=False)
    want = LAPLACE.posterior(there, params, prior_precision=2.0)
    evidence = LAPLACE.log_evidence(there, params, -3.0, prior_precision=2.0)
    for way in ("fsdp", "tp"):
        # under FSDP ranks have data of their own
        mesh, mine = (None, slice(None)) if way == "tp" else (mesh_of(4), slice(2 * rank, 2 * rank + 2))
        under(way, model := partly_frozen())
        model(x[mine]).sum().backward()  # a gradient that stays
        before = [p.grad for p in model.parameters()]
        increment = bc.curvature.diagonal_by_backward(model, CATEGORICAL, mesh=mesh)((x[mine], y[mine]))
        assert all(p.grad is g for p, g in zip(model.parameters(), before))
        here = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        with CommDebugMode() as messages:
            _, state = LAPLACE.update(here, LAPLACE.init(here), curvature=increment, inplace=False)
        q = LAPLACE.posterior(state, here, prior_precision=2.0)
        close(whole(q.marginal_variance), want.marginal_variance, atol=1e-10)
        close(LAPLACE.log_evidence(state, here, -3.0, prior_precision=2.0), evidence, atol=1e-10)
        close(q.log_prob(here), want.log_prob(params), atol=1e-10)
        torch.manual_seed(7 + world()[0])  # the first rank's key is all ranks'
        draws = whole(q.sample((2,)))
        close(draws, drawn.setdefault("draws", draws), rtol=1e-12)
        assert all(len(x) == 2 and x.std() > 0.0 for x in draws.values())
        generator = torch.Generator().manual_seed(world()[0] if mesh else 0)
        estimate = bc.curvature.diagonal_by_backward(model, CATEGORICAL, probes=100, mesh=mesh, generator=generator)
        probed = estimate((x[mine], y[mine]))
        ratios = optree.tree_map(lambda a, b: (a / b - 1).abs().max(), whole(probed.values), whole(increment.values))
        assert 0.0 < max(optree.tree_leaves(ratios)) <= 5 * 0.02**0.5
        assert messages.get_total_counts() == 0 and increment.count == probed.count == 8


@on(4)
def test_families_and_increments_that_couple_elements_are_refused_by_name():
    params, one = spread(leaves(0), layouts()["HSDP"]), torch.tensor(1.0, dtype=torch.float64)
    for tx in (bc.vi.low_rank(bc.sgd(0.1), temperature=0.1, rank=2), bc.ekf.dense(lr=1.0, prior_precision=1.0)):
        said = message_of(tx.init, params)
        assert "whole leaves" in said and "bc.vi.mean_field" in said, said
    fed = lambda increment: LAPLACE.update(params, LAPLACE.init(params), curvature=increment, inplace=False)  # noqa: E731
    assert "bc.curvature.diagonal_by_backward" in message_of(fed, bc.precision.Root(leaves(0), one))
    assert "is not spread" in message_of(fed, bc.precision.Diagonal(leaves(0), one))
