"""Named samplers, with what each promises: its optimizer at T = 0, the order of its bias."""

from __future__ import annotations

import math

import optree
import torch
import torchopt

import bayesopt_chain as bc
from tests.registry.dressings import (
    drawing,
    fed,
    half_square,
    like_params,
    stacked_losses,
    two_chains,
    two_rows,
    unit_diagonal,
    unit_rows,
)
from tests.registry.transform import Order, Transform
from tests.samplers.transfer import Probe

COUPLED = ("a_missing_gradient_leaves_its_leaf_alone",)
ON_PARTS = ("a_part_of_a_leaf_moves_as_in_the_whole",)
NEEDS_EVERY_GRADIENT = (  # these leave a gradient out
    *COUPLED,
    "in_place_keeps_the_state_tensors",
    "nothing_shares_memory",
)


class TreePrecision:
    """A precision of 4 for every parameter, on trees."""

    def solve(self, tree):
        return optree.tree_map(lambda x: x / 4.0, tree)

    def sqrt_solve(self, tree):
        return optree.tree_map(lambda x: x / 2.0, tree)


def sampler(name, build, limit=None, order=None, **rest):
    """A row of ``bc.samplers``."""
    return Transform(name, build, limit, order, namespace="samplers", **rest)


def frozen_rms(state):
    """A pSGLD state frozen at ``P = 2``."""
    rms = state[0]
    return state.replace(0, rms._replace(nu=(torch.full_like(rms.nu[0], 0.25),), count=(torch.tensor(10**6),)))


def frozen_adam(state):
    """An Adam-SGHMC state long after it froze at ``P = 2`` (second moment 1/4 after its correction at one update)."""
    adam = state[0]
    return state.replace(0, adam._replace(nu=(torch.full_like(adam.nu[0], 0.125),), count=(torch.tensor(10**6),)))


def frozen_window(state):
    """An adaptive-SGHMC state frozen at ``P = 2``."""
    window = state[0]
    return state.replace(
        0, window._replace(square=(torch.full_like(window.square[0], 0.25),), count=(torch.tensor(10**6),))
    )


def thermostat_probe(tx, **kwargs) -> Probe:
    """A thermostat with one friction for each parameter, the square root of the friction as a coordinate.

    Its law has a Gaussian tail, where the friction's, a Gamma law, has too heavy a one for polynomials.
    """
    return Probe(tx, reduce=lambda v, xi: (v, xi.sqrt()), lift=lambda v, root: (v, root.square()), **kwargs)


def by_length():
    """Gradients over their common length."""

    def update(g, state, *, params=None, inplace=True):
        length = sum((x * x).sum() for x in optree.tree_leaves(g)).sqrt()
        return optree.tree_map(lambda x: x / length, g), state

    return torchopt.base.GradientTransformation(lambda params: torchopt.base.EmptyState(), update)


def window_then_momentum():
    return torchopt.chain(bc.samplers.scale_by_adaptive_window(4), bc.add_momentum(0.9), bc.scale_by_neg_lr(0.05))


SAMPLERS = (
    sampler(
        "sgld, order 1",
        lambda t: bc.sgld(0.1, temperature=t, order=1),
        lambda: torchopt.sgd(0.1),
        Order(1, lambda lr: Probe(bc.sgld(lr, temperature=1.0, order=1)), (0.0025, 0.005, 0.01)),
    ),
    sampler(
        "sgld",
        lambda t: bc.sgld(0.1, temperature=t),
        lambda: torchopt.sgd(0.1),
        Order(2, lambda lr: Probe(bc.sgld(lr, temperature=1.0)), (0.01, 0.02, 0.04)),
    ),
    sampler(
        "sghmc, order 1",
        lambda t: bc.sghmc(0.1, 0.8, temperature=t, order=1),
        lambda: torchopt.sgd(0.1, momentum=0.8),
        Order(1, lambda lr: Probe(bc.sghmc(lr, 0.5, temperature=1.0, order=1)), (0.0025, 0.005, 0.01)),
    ),
    sampler(
        "sghmc",
        lambda t: bc.sghmc(0.1, 0.8, temperature=t),
        lambda: torchopt.sgd(0.1, momentum=0.8),
        Order(2, lambda lr: Probe(bc.sghmc(lr, 0.5, temperature=1.0)), (0.0025, 0.005, 0.01)),
    ),
    sampler(
        "sghmc_euler",
        lambda t: bc.samplers.sghmc_euler(0.05, 0.8, temperature=t),
        lambda: torchopt.chain(bc.add_momentum(0.8), bc.links.delay(), bc.scale_by_neg_lr(0.05)),
        Order(
            1,
            lambda lr: Probe(  # what the delay holds is the velocity
                bc.samplers.sghmc_euler(lr, 0.5, temperature=1.0), reduce=lambda v, held: (v,), keep=((0, 1),)
            ),
            (0.0025, 0.005, 0.01),
        ),
    ),
    sampler(
        "baoab",
        lambda t: bc.samplers.baoab(0.3, 1.0, temperature=t),
        lambda: torchopt.sgd(0.3**2 * (1 + math.exp(-0.3)) / 2, momentum=math.exp(-0.3)),
        Order(
            2,
            lambda h: Probe(bc.samplers.baoab(h, 1.0, temperature=1.0)),
            (0.05, 0.1, 0.2),
            in_time=True,
        ),
    ),
    sampler(
        "obabo",
        lambda t: bc.samplers.obabo(0.3, 1.0, temperature=t),
        lambda: torchopt.sgd(0.3**2 * (1 + math.exp(-0.3)) / 2, momentum=math.exp(-0.3)),
        Order(2, lambda h: Probe(bc.samplers.obabo(h, 1.0, temperature=1.0)), (0.05, 0.1, 0.2), in_time=True),
    ),
    sampler(
        "ubu",
        lambda t: bc.samplers.ubu(0.3, 1.0, temperature=t),
        lambda: torchopt.sgd(0.3 * -math.expm1(-0.3), momentum=math.exp(-0.3)),
        Order(
            2,
            lambda h: Probe(
                bc.samplers.ubu(h, 1.0, temperature=1.0), reduce=lambda m, v: (v + m / math.exp(-h),), keep=(1,)
            ),
            (0.05, 0.1, 0.2),
            14,
            in_time=True,
        ),
    ),
    sampler(
        "palindromic_ubu",
        lambda t: bc.samplers.palindromic_ubu(0.3, 1.0, temperature=t),
        lambda: torchopt.sgd(0.3 * -math.expm1(-0.3), momentum=math.exp(-0.3)),
    ),
    sampler(
        "sgnht",
        lambda t: bc.samplers.sgnht(0.05, 0.8, temperature=t or 1.0),
        skip=ON_PARTS,
        why="all parameters share one friction, which on shards is agreed on by messages",
    ),
    sampler(  # up to lr 0.025, where the default mass begins to grow with lr
        "sgnht, per parameter",
        lambda t: bc.samplers.sgnht(0.05, 0.8, temperature=t or 1.0, per_parameter=True),
        order=Order(
            1,
            lambda lr: thermostat_probe(bc.samplers.sgnht(lr, 0.5, temperature=1.0, per_parameter=True)),
            (0.005, 0.01, 0.02),
            9,
        ),
    ),
    sampler(
        "badodab",
        lambda t: bc.samplers.badodab(0.2, temperature=t or 1.0),
        skip=(*COUPLED, *ON_PARTS),
        why="all parameters share one friction, felt within the step, which on shards is agreed on by messages",
    ),
    sampler(
        "badodab, per parameter",
        lambda t: bc.samplers.badodab(0.2, temperature=t or 1.0, per_parameter=True),
        order=Order(
            2,
            lambda h: thermostat_probe(bc.samplers.badodab(h, 1.0, temperature=1.0, per_parameter=True)),
            (0.03, 0.045, 0.06),
            11,
            in_time=True,
        ),
    ),
    sampler(
        "psgld",
        lambda t: bc.samplers.psgld(0.01, 0.9, temperature=t, freeze_after=4),
        lambda: torchopt.rmsprop(0.01, 0.9),
        cold=lambda t: bc.samplers.psgld(0.01, 0.9, temperature=t),
        order=Order(
            2,
            lambda lr: Probe(
                bc.samplers.psgld(lr / 2, temperature=1.0, freeze_after=1),
                reduce=lambda nu, m: (m,),
                keep=(1,),
                prepare=frozen_rms,
            ),
            (0.01, 0.02, 0.04),
        ),
    ),
    sampler(
        "adam_sghmc",
        lambda t: bc.samplers.adam_sghmc(0.01, (0.8, 0.99), temperature=t, freeze_after=4),
        lambda: torchopt.adam(0.01, (0.8, 0.99)),
        cold=lambda t: bc.samplers.adam_sghmc(0.01, (0.8, 0.99), temperature=t),
        order=Order(
            2,
            lambda lr: Probe(
                bc.samplers.adam_sghmc(lr, (0.5, 0.5), 0.0, temperature=1.0, freeze_after=1),
                reduce=lambda mu, nu, m: (mu + m * math.sqrt(0.5),),
                keep=(0,),
                prepare=frozen_adam,
            ),
            (0.0025, 0.005, 0.01),
        ),
    ),
    sampler(
        "adaptive_sghmc",
        lambda t: bc.samplers.adaptive_sghmc(0.05, 0.9, temperature=t, burn_in=4),
        window_then_momentum,
        Order(
            2,
            lambda lr: Probe(
                bc.samplers.adaptive_sghmc(lr / 2, 0.5, temperature=1.0, burn_in=1),
                reduce=lambda tau, mean, square, v, m: (v + m * math.sqrt(2.0) / 0.5,),
                keep=(3,),
                prepare=frozen_window,
            ),
            (0.0025, 0.005, 0.01),
        ),
    ),
    sampler(
        "langevin_with_precision",
        lambda t: bc.samplers.langevin_with_precision(TreePrecision(), 0.4, 0.8, temperature=t),
        lambda: torchopt.chain(bc.links.scale(0.25), torchopt.sgd(0.4, momentum=0.8)),
        Order(
            2,
            lambda lr: Probe(bc.samplers.langevin_with_precision(TreePrecision(), 4 * lr, 0.5, temperature=1.0)),
            (0.0025, 0.005, 0.01),
        ),
        skip=NEEDS_EVERY_GRADIENT,
        why="a precision may couple all parameters, so that none may lack a gradient",
    ),
    sampler(
        "sgfs",
        lambda t: fed(bc.samplers.sgfs(0.05, temperature=t or 1.0, batch_size=10), gradient_variance=like_params(0.5)),
        order=Order(
            1,
            lambda lr: Probe(
                bc.samplers.sgfs(lr, temperature=1.0, batch_size=1),
                reduce=lambda v: (),
                gradient_variance=torch.zeros_like,
            ),
            (0.0025, 0.005, 0.01),
        ),
    ),
    sampler(
        "cyclical",
        lambda t: bc.samplers.cyclical(0.1, cycle=6, burn_in=2, momentum=0.8, temperature=t),
        lambda: bc.sgd(bc.schedules.cosine_restarts(0.1, 24), momentum=0.8),
        cold=lambda t: bc.samplers.cyclical(
            0.1, cycle=24, burn_in=4, momentum=0.8, temperature=t
        ),  # no restart in its 12 steps
    ),
    sampler(
        "cyclical, lr inside",
        lambda t: bc.samplers.cyclical(0.1, cycle=6, burn_in=2, momentum=0.8, temperature=t, lr_inside=True),
        lambda: torchopt.chain(bc.scale_by_neg_lr(bc.schedules.cosine_restarts(0.1, 6)), bc.add_momentum(0.8)),
    ),
    sampler(
        "contour_sgld",
        lambda t: fed(bc.samplers.contour_sgld(0.1, 0.0, 20.0, temperature=t, bins=10), loss=half_square),
        lambda: torchopt.sgd(0.1),
    ),
    sampler(
        "svgd",
        lambda t: two_chains(bc.samplers.svgd(0.1, temperature=t)),
        skip=COUPLED,
        why="all parameters of a particle share its kernel",
    ),
    sampler(
        "replica_exchange",
        lambda t: two_chains(
            fed(bc.samplers.replica_exchange(0.05, 0.5, temperatures=(0.5, 1.0)), loss=stacked_losses)
        ),
        skip=NEEDS_EVERY_GRADIENT,
        why="swaps are accepted by the loss of all parameters",
    ),
    sampler(
        "lattice_walk",
        lambda t: bc.samplers.lattice_walk(0.05, temperature=t or 1.0),
    ),
    sampler(
        "mclmc",
        lambda t: bc.samplers.mclmc(0.05, 1.0, temperature=t),
        lambda: torchopt.chain(bc.with_response(by_length(), bc.response.Nonlinear()), torchopt.sgd(0.05)),
        power=None,
        skip=NEEDS_EVERY_GRADIENT,
        why="one direction for all parameters, so that none may lack a gradient",
    ),
    sampler(
        "samadams",
        lambda t: bc.samplers.samadams(0.2, 1.0, temperature=t, gradient_scale=1.0),
        lambda: bc.samplers.samadams(0.2, 1.0, temperature=0.0, gradient_scale=1.0),
        skip=(*NEEDS_EVERY_GRADIENT, *ON_PARTS),
        why="one clock for all parameters, which on shards is agreed on by messages",
    ),
)


# Transforms that carry a Gaussian posterior in their state


VALUE = ("in_place_keeps_the_state_tensors",)  # a state in which a posterior accumulates is a value, see test_values.py
IS_VALUE = "its state is a value, which no update overwrites"
JOINT = "its information ties every parameter to every other; a missing gradient is felt by all"
ITERATES = "it counts iterates, whether their parameters moved or not"


def variational(name: str, build, **dressing) -> Transform:
    """A transform whose gradient is to be taken at its draw; ``build(temperature)`` makes it undressed."""
    return Transform(name, lambda t: drawing(build(t), **dressing), namespace="vi")


def filter_(name: str, build, increment, joint: bool = True) -> Transform:
    """A Kalman filter, fed an increment over the parameters."""
    skip, why = ((*COUPLED, *VALUE), f"{JOINT}; {IS_VALUE}") if joint else (VALUE, IS_VALUE)
    return Transform(name, lambda t: fed(build(), curvature=increment), skip=skip, why=why, namespace="ekf")


FAMILIES = {
    "mean_field": lambda t: bc.vi.mean_field(bc.adam(0.01), temperature=t, init_scale=0.1),
    "mean_field, torchopt": lambda t: bc.vi.mean_field(torchopt.adam(0.01), temperature=t, init_scale=0.1),
    "mean_field, not landing": lambda t: bc.vi.mean_field(
        bc.sgd(0.01, 0.9), temperature=t, init_scale=0.1, stick_the_landing=False
    ),
    "mean_field, tensor": lambda t: bc.vi.mean_field(bc.sgd(0.1), temperature=torch.tensor(t)),
    "mean_field, schedule": lambda t: bc.vi.mean_field(bc.sgd(0.1), temperature=lambda count: t / (1 + count)),
    "dense": lambda t: bc.vi.dense(bc.sgd(0.01), temperature=t, init_scale=0.1),
    "dense, not landing": lambda t: bc.vi.dense(bc.adam(0.01), temperature=t, init_scale=0.1, stick_the_landing=False),
    "low_rank": lambda t: bc.vi.low_rank(bc.sgd(0.01), temperature=t, init_scale=0.1, rank=2),
    "low_rank, not landing": lambda t: bc.vi.low_rank(
        bc.sgd(0.01), temperature=t, init_scale=0.1, rank=2, stick_the_landing=False
    ),
    "ivon": lambda t: bc.vi.ivon(0.1, temperature=t, betas=(0.9, 0.99), weight_decay=0.1),
}

POSTERIORS = (
    *(variational(name, build) for name, build in FAMILIES.items()),
    variational("von", lambda t: bc.vi.von(0.1, temperature=t, weight_decay=0.1), curvature=unit_diagonal),
    filter_("dense", lambda: bc.ekf.dense(0.5), two_rows),
    filter_("dense, forgetting", lambda: bc.ekf.dense(0.1, transition_noise=0.01, forgetting=0.9), two_rows),
    filter_("dense, moving", lambda: bc.ekf.dense(lambda count: 0.5, transition_noise=lambda count: 0.01), two_rows),
    filter_("diagonal", lambda: bc.ekf.diagonal(0.5, transition_noise=0.1), unit_rows, joint=False),
    filter_("diagonal, mixed rows", lambda: bc.ekf.diagonal(0.5, transition_noise=0.1), two_rows),
    filter_("low_rank", lambda: bc.ekf.low_rank(0.5, rank=3, transition_noise=0.1), two_rows),
    Transform(
        "laplace",  # without a curvature it passes updates through
        lambda t: bc.chain(bc.laplace(), bc.sghmc(0.1, temperature=t)),
        lambda: torchopt.sgd(0.1, momentum=0.9),
    ),
    Transform(
        "swag",
        lambda t: bc.chain(bc.sgd(0.1, temperature=t), bc.swag(rank=3)),
        lambda: torchopt.sgd(0.1),
        skip=(*COUPLED, *VALUE),
        why=f"{ITERATES}; {IS_VALUE}",
    ),
    Transform(
        "swag, scheduled",
        lambda t: bc.chain(bc.adam(0.1), bc.swag(rank=2, start=1, every=2)),
        skip=VALUE,
        why=IS_VALUE,
    ),
    Transform(
        "swag, running mean",
        lambda t: bc.chain(bc.sgd(0.1, temperature=t), bc.swag(rank=0)),
        skip=(*COUPLED, *VALUE),
        why=f"{ITERATES}; {IS_VALUE}",
    ),
)
