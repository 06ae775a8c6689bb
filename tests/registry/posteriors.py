"""Transforms that carry a Gaussian posterior in their state."""

from __future__ import annotations

import torch
import torchopt

import bayesopt_chain as bc
from tests.registry.dressings import drawing, fed, two_rows, unit_diagonal, unit_rows
from tests.registry.transform import Transform

COUPLED = ("a_missing_gradient_leaves_its_leaf_alone",)
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
