"""Composition is a law: every sampler beside every neighbour keeps its stationary covariance, or refuses."""

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.testing import assert_composes

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
