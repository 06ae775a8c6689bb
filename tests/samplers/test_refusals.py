"""Wrong usage: one error each, naming the argument, what came, and what to do."""

import pytest
import torch
import torchopt

import bayesopt_chain as bc
from bayesopt_chain import samplers
from bayesopt_chain import schedules as s
from bayesopt_chain.precision import Dense
from bayesopt_chain.testing import stationary_covariance
from tests.registry.samplers import TreePrecision

NAN = float("nan")
ONE, TWO = torch.zeros(1), torch.zeros(2)
PAIR = {"a": torch.zeros(2), "b": torch.zeros(1)}


def updated(tx, params=TWO, grads=None, **keywords):
    """One update, at a gradient of ones unless another is given."""
    grads = torch.ones_like(params) if grads is None else grads
    return tx.update(grads, tx.init(params), params=params, **keywords)


def behind(link, tx, params=TWO):
    """The chain of both, for these parameters."""
    return bc.chain(link, tx).init(params)


def fisher(**more):
    return samplers.sgfs(0.1, **{"temperature": 1.0, "batch_size": 1, **more})


def replicas(temperatures=(1.0, 2.0), **more):
    return samplers.replica_exchange(0.1, temperatures=temperatures, **more)


def particles(**more):
    return samplers.svgd(0.1, temperature=1.0, **more)


def contour(low=0.0, high=1.0, **more):
    return samplers.scale_by_contour(1.0, low, high, **more)


def microcanonical(length=1.0, **more):
    return samplers.mclmc(0.1, length, temperature=1.0, **more)


def cycles(*args, **more):
    return samplers.cyclical(0.1, *args, temperature=1.0, **more)


PRECISION = lambda: samplers.langevin_with_precision(TreePrecision(), 0.1, temperature=1.0)  # noqa: E731
PRECISE = bc.scale_by_preconditioner(Dense(torch.eye(2), {"a": TWO}, torch.tensor(1.0)))
NO_LIMIT = r"temperature must be positive.*no limit as T -> 0; use bc\.sghmc"
SHORTER = r"burn_in must be shorter than the cycle \(100 updates\), got"
FLATTENED = r"scale_by_contour: .* stands in front of it"
LOSSES = r"update needs loss=.*\[2\], got"

VALUES = [
    (lambda: samplers.baoab(-0.1, 1.0, temperature=1.0), "step_size must be a positive, finite number, got -0.1"),
    (lambda: samplers.obabo(0.1, 0.0, temperature=1.0), "friction must be a positive, finite number, got 0.0"),
    (lambda: samplers.ubu(0.1, NAN, temperature=1.0), "ubu: friction must be "),
    (lambda: samplers.ubu(0.1, 1.0, temperature=-1.0), "temperature must be finite and not negative, got -1.0"),
    (lambda: samplers.sghmc_euler(0.1, 1.0, temperature=1.0), r"momentum must lie in \[0, 1\), got 1.0"),
    (lambda: samplers.sghmc_euler(0.0, temperature=1.0), r"lr \(learning rate\) must be a positive"),
    (lambda: samplers.sghmc_from_friction(0.1, 1.0, beta=100.0), "beta"),
    (lambda: samplers.sgnht(0.1, 1.0, temperature=1.0), "sgnht: momentum must lie"),
    (lambda: samplers.sgnht(0.1, 0.0, temperature=1.0), r"sgnht: momentum must lie in \(0, 1\), got 0.0.*use bc\.sgld"),
    (lambda: samplers.sgnht(0.1, temperature=1.0, thermostat_mass=0.0), "thermostat_mass must be a positive"),
    *((lambda zero=zero: samplers.sgnht(0.1, temperature=zero), NO_LIMIT) for zero in (0, 0.0, torch.zeros(()))),
    *((lambda zero=zero: samplers.badodab(0.1, temperature=zero), NO_LIMIT) for zero in (0, 0.0, torch.zeros(()))),
    (lambda: samplers.badodab(0.1, -1.0, temperature=1.0), "badodab: friction must be "),
    (lambda: samplers.adaptive_sghmc(0.1, temperature=1.0, burn_in=0), "got 0; nothing is learned without a burn-in"),
    (lambda: fisher(temperature=0.0), r"sgfs: temperature must be positive.*use bc\.sgd"),
    (lambda: fisher(batch_size=0), "batch_size must be "),
    (lambda: fisher(decay=1.0), r"decay must lie in \[0, 1\)"),
    (lambda: updated(fisher()), "needs gradient_variance=, the variance of single-datum gradients"),
    (
        lambda: samplers.langevin_with_precision(TreePrecision(), 0.1, temperature=1.0, order=3),
        "order must be 1 or 2, got 3",
    ),
    (
        lambda: updated(PRECISION(), PAIR, {"a": torch.ones(2), "b": None}),
        "every parameter needs a gradient, since it couples them",
    ),
    (
        lambda: bc.partition({"a": PRECISE, "b": bc.sgd(0.1)}, {"a": "a", "b": "b"}).init(PAIR),
        r"its precision is of other parameters .*with \(\) in the place of every leaf that is left out",
    ),
    (lambda: samplers.cyclical(NAN, 10, 5, temperature=1.0), "cyclical: lr"),
    (lambda: cycles(10, 5, 1.5).init(TWO), "momentum must lie"),
    *((lambda inside=inside: cycles(100, 100, lr_inside=inside), f"{SHORTER} 100") for inside in (False, True)),
    (lambda: cycles(100, 120), f"{SHORTER} 120"),
    (lambda: cycles(100, -1), "burn_in must be a whole number"),
    (lambda: cycles(0, 0), "cycle must be a whole number"),
    (lambda: samplers.lattice_walk(-1.0, temperature=1.0), "lattice_walk: lr"),
    (
        lambda: samplers.lattice_walk(0.1, temperature=0.0),
        r"lattice_walk: temperature must be positive.*use bc\.sgd to optimise",
    ),
    (lambda: replicas((1.0,)), "temperatures must hold at least two chains, got 1"),
    (lambda: replicas((1.0, 1.0)), "temperatures must increase"),
    (lambda: replicas((0.0, 1.0)), r"temperatures\[0\] must be a positive"),
    (lambda: replicas(loss_variance=-1.0), "loss_variance"),
    (lambda: replicas(correction_factor=0.5), "correction_factor"),
    (lambda: replicas().init(torch.zeros(3)), r"stacked for 2 chains.*\(3,\)"),
    (lambda: updated(replicas(), torch.zeros(2, 3)), f"{LOSSES} nothing"),
    (lambda: updated(replicas(), torch.zeros(2, 3), loss=torch.zeros(())), rf"{LOSSES} shape \(\)"),
    # swaps are accepted by the loss alone, and of all parameters
    *(
        (lambda front=front: behind(front, replicas(), torch.zeros(2, 3)), r"replica_exchange: .* into the loss")
        for front in (bc.links.add_decayed_weights(0.1), bc.links.add_gaussian_prior(1.0, n=10))
    ),
    *(
        (
            lambda tx=tx: bc.partition({"x": tx(), "y": tx()}, {"a": "x", "b": "y"}).init(PAIR),
            "a mask or a group leaves",
        )
        for tx in (replicas, contour)
    ),
    (
        lambda: replicas().update({"w": None}, replicas().init({"w": TWO}), params={"w": TWO}, loss=TWO),
        "every parameter needs a gradient",
    ),
    (lambda: particles().init([torch.zeros(2, 1), torch.zeros(3)]), "same number in every leaf"),
    (lambda: particles(bandwidth=0.0), "bandwidth"),
    (
        lambda: behind(samplers.scale_by_stein_kernel(1.0), bc.sgld(0.1, temperature=1.0), torch.zeros(3, 2)),
        "its particles share gradients",
    ),
    # a gain of 1/2 in front of it samples twice the temperature: the repulsion is not scaled
    *(
        (
            lambda front=front: behind(front, particles(), torch.zeros(5, 2)),
            r"scale_by_stein_kernel: .* another temperature",
        )
        for front in (bc.links.scale(0.5), bc.links.scale_by_rms(), bc.add_momentum(0.5))
    ),
    (lambda: contour(2.0, 1.0), "low must lie below high"),
    (lambda: contour(bins=1), "bins"),
    (
        lambda: updated(samplers.contour_sgld(0.1, 0.0, 1.0, temperature=1.0)),
        r"contour: update needs loss=.*bc\.make_step passes it",
    ),
    (lambda: samplers.contour_weight(bc.sgd(0.1), (), torch.zeros(())), "no link of .* is scale_by_contour"),
    (lambda: behind(bc.links.add_decayed_weights(0.1), contour()), FLATTENED),
    (lambda: behind(bc.links.add_gaussian_prior(1.0, n=10), contour()), FLATTENED),
    (lambda: microcanonical().init(ONE), "mclmc: needs at least 2 parameters"),
    *((lambda bad=bad: microcanonical(bad), "length") for bad in (0.0, -1.0, NAN)),
    (lambda: behind(bc.add_momentum(0.9), microcanonical(), torch.zeros(3)), "noise of its own"),
    (
        lambda: samplers.step_growth(lambda p, batch: p.sum(), bc.sgd(0.1), TWO, bc.sgd(0.1).init(TWO), (), steps=1),
        "step_growth: steps must be a whole number, at least 2, got 1",
    ),
    (lambda: s.cosine(1.0, 0), "cosine: steps"),
    (lambda: s.cosine(NAN, 5), "cosine: init"),
    (lambda: s.cosine_restarts(1.0, 5, decay=0.0), "decay"),
    (lambda: s.polynomial(1.0, 5, power=-1.0), "power"),
    (lambda: s.robbins_monro(1.0, gamma=0.5), r"gamma must lie in \(0.5, 1\]"),
    (lambda: s.robbins_monro(0.0), "a must be a positive"),
    (lambda: s.piecewise((5,), (1.0,)), "one count fewer"),
    (lambda: s.piecewise((5, 5), (1.0, 0.5, 0.1)), "increasing"),
    (lambda: s.join((s.constant(1.0), s.constant(0.5)), (0,)), "positive and increasing"),
]
TYPES = [
    (
        lambda: samplers.langevin_with_precision(torch.eye(2), 0.1, temperature=1.0),
        "precision has no sqrt_solve.*got Tensor; pass a precision",
    ),
    (lambda: microcanonical(precision=3.0), "mclmc: precision has no solve"),
    (lambda: bc.make_step(None, torch.nn.ReLU()), "make_step: tx is ReLU"),
    (
        lambda: stationary_covariance(samplers.lattice_walk(0.1, temperature=1.0), torch.eye(1, dtype=torch.float64)),
        "draws philox_others, which is not a normal",
    ),
]


@pytest.mark.parametrize(
    ("ask", "words", "error"), [(*row, ValueError) for row in VALUES] + [(*row, TypeError) for row in TYPES]
)
def test_a_wrong_argument_is_named(ask, words, error):
    with pytest.raises(error, match=words):
        ask()


def test_what_stands_rightly_in_front_or_behind_is_taken():
    bc.chain(contour(), bc.links.add_decayed_weights(0.1), bc.sgld(0.1, temperature=1.0)).init(TWO)
    behind(bc.links.add_gaussian_prior(1.0, n=10), samplers.psgld(0.1, temperature=1.0))
    behind(bc.links.scale(0.5), samplers.svgd(0.1, temperature=0.0), torch.zeros(5, 2))
    behind(torchopt.clip_grad_norm(1.0), particles(), torch.zeros(5, 2))
