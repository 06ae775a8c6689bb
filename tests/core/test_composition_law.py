"""Composition is a law: beside every neighbour, in groups, steps and parallel chains a sampler keeps its law, or refuses."""

import optree
import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.testing import assert_bitwise_equal, assert_composes
from tests.registry import SAMPLERS
from tests.walk import end_of

T = 0.3
EXACT = {
    "sgld": lambda: bc.sgld(0.05, temperature=T),
    "sghmc": lambda: bc.sghmc(0.05, 0.6, temperature=T),
    "nesterov": lambda: bc.sgd(0.05, 0.6, nesterov=True, temperature=T),
    "dampened": lambda: bc.sgd(0.05, 0.6, 0.4, temperature=T),
    "scheduled": lambda: bc.sghmc(lambda c: 0.05, 0.6, temperature=T),
    "baoab": lambda: bc.samplers.baoab(0.2, 1.0, temperature=T),
    "preconditioned": lambda: bc.chain(bc.scale_by_preconditioner(torch.tensor(2.0)), bc.sghmc(0.05, temperature=T)),
    "rmsprop": lambda: bc.rmsprop(0.05, momentum=0.5, temperature=T, freeze_after=20),
    "adaptive_sghmc": lambda: bc.samplers.adaptive_sghmc(0.05, 0.5, temperature=T, burn_in=20),
}
APPROXIMATE = {  # how far each is from exact alone; a neighbour must not take it further
    "sgld, order 1": (lambda: bc.sgld(0.02, temperature=T, order=1), 0.02),
    "sghmc, order 1": (lambda: bc.sghmc(0.02, 0.5, temperature=T, order=1), 0.03),
    "psgld": (lambda: bc.samplers.psgld(0.02, 0.9, temperature=T, freeze_after=20), 0.02),
    "ubu": (lambda: bc.samplers.ubu(0.1, 1.0, temperature=T), 0.05),
    "sghmc_euler": (lambda: bc.samplers.sghmc_euler(0.01, 0.5, temperature=T), 0.1),
    "adadelta": (lambda: bc.adadelta(0.1, temperature=T), 0.0),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", EXACT)
def test_an_exact_sampler_stays_exact_or_refuses(name):
    what = assert_composes(EXACT[name], T)
    assert what["gain behind"] == what["gain before"] == "right", what


@pytest.mark.parametrize("name", APPROXIMATE)
def test_another_sampler_is_taken_no_further_from_its_law_or_refuses(name):
    build, bias = APPROXIMATE[name]
    what = assert_composes(build, T, tolerance=bias)
    if name in ("ubu", "sghmc_euler"):  # of those with noise of their own that are linear
        assert {v for k, v in what.items() if k not in ("decay before", "clip before")} == {"refused"}, what


PARAMS = {"body": torch.ones(3, dtype=torch.float64), "head": torch.ones(2, 2, dtype=torch.float64)}


@pytest.mark.parametrize("name", ["sgnht", "lattice_walk", "sgfs"])
def test_a_group_of_parameters_can_be_sampled_while_the_rest_is_optimised(name):
    build = {
        "sgnht": lambda: bc.samplers.sgnht(0.01, temperature=1.0),
        "lattice_walk": lambda: bc.samplers.lattice_walk(0.01, temperature=1.0),
        "sgfs": lambda: bc.samplers.sgfs(0.01, temperature=1.0, batch_size=1),
    }[name]
    tx = bc.partition({"cold": bc.sgd(0.1), "hot": build()}, {"body": "cold", "head": "hot"})
    extra = {"gradient_variance": {k: torch.ones_like(v) for k, v in PARAMS.items()}} if name == "sgfs" else {}
    grads = {k: v.clone() for k, v in PARAMS.items()}
    updates, _ = tx.update(grads, tx.init(PARAMS), params=PARAMS, inplace=False, **extra)
    assert_bitwise_equal(updates["body"], -0.1 * grads["body"])
    assert (updates["head"] != 0).all() and not torch.equal(updates["head"], -0.01 * grads["head"])


def test_two_thermostats_of_two_groups_are_two():
    tx = bc.partition(
        {"a": bc.samplers.sgnht(0.1, temperature=1.0), "b": bc.samplers.sgnht(0.1, temperature=2.0)},
        {"body": "a", "head": "b"},
    )
    _, state = end_of(tx, PARAMS, lambda p: p, 3)
    first, second = (s.friction[0] for s in state if hasattr(s, "friction"))
    assert first.ndim == second.ndim == 0 and first != second


def test_samplers_that_need_every_gradient_keep_their_state_tensors_in_place():
    (sampler,) = [s for s in SAMPLERS if s.name == "langevin_with_precision"]
    tx = sampler.build(0.3)
    state = tx.init(PARAMS)
    before = [t.data_ptr() for t in optree.tree_leaves(state)]
    for _ in range(2):
        _, state = tx.update({k: v.clone() for k, v in PARAMS.items()}, state, params=PARAMS, inplace=True)
    assert before == [t.data_ptr() for t in optree.tree_leaves(state)]


def test_make_step_feeds_the_gradient_variance_to_fisher_scoring():
    tx = bc.samplers.sgfs(0.1, temperature=1.0, batch_size=2)
    step = bc.make_step(
        lambda p, batch: (p**2).sum(), tx, keywords={"gradient_variance": lambda p, batch: torch.full_like(p, 3.0)}
    )
    p = torch.ones(2)
    _, state, _ = step(p, tx.init(p), ())
    torch.testing.assert_close(state[0].variance[0], torch.full((2,), 0.05 * 3.0))
