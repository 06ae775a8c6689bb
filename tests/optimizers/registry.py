"""TorchOpt's optimizers beside ours: one row each, with a strategy for its settings."""

from typing import NamedTuple

import torchopt
from hypothesis import strategies as st

import bayesopt_chain as bc
from bayesopt_chain.testing import strategies as own


class Row(NamedTuple):
    name: str
    cls: str
    settings: st.SearchStrategy


lr = st.one_of(own.learning_rates, own.schedules)
decay = own.weight_decays
flag = st.booleans()
betas = st.tuples(st.floats(0.0, 0.99), st.floats(0.5, 0.9999))


def _nesterov_fits(s):
    return not s["nesterov"] or (s.get("momentum", 0.0) > 0.0 and s.get("dampening", 0.0) == 0.0)


ROWS = [
    Row(
        "sgd",
        "SGD",
        st.fixed_dictionaries(
            {
                "lr": lr,
                "momentum": st.one_of(st.just(0.0), own.momenta),
                "dampening": st.one_of(st.just(0.0), st.floats(0.0, 0.9)),
                "weight_decay": decay,
                "nesterov": flag,
                "maximize": flag,
            }
        ).filter(_nesterov_fits),
    ),
    Row(
        "adam",
        "Adam",
        st.fixed_dictionaries(
            {
                "lr": lr,
                "betas": betas,
                "eps": st.sampled_from([1e-8, 1e-3]),
                "eps_root": st.sampled_from([0.0, 1e-6]),
                "weight_decay": decay,
                "maximize": flag,
            }
        ),
    ),
    Row("adamw", "AdamW", st.fixed_dictionaries({"lr": lr, "betas": betas, "weight_decay": decay, "maximize": flag})),
    Row("adamax", "AdaMax", st.fixed_dictionaries({"lr": lr, "betas": betas, "weight_decay": decay})),
    Row("radam", "RAdam", st.fixed_dictionaries({"lr": lr, "betas": betas, "weight_decay": decay})),
    Row(
        "adagrad",
        "AdaGrad",
        st.fixed_dictionaries(
            {
                "lr": lr,
                "lr_decay": st.sampled_from([0.0, 0.1]),
                "weight_decay": decay,
                "initial_accumulator_value": st.sampled_from([0.0, 0.5]),
                "maximize": flag,
            }
        ),
    ),
    Row(
        "rmsprop",
        "RMSProp",
        st.fixed_dictionaries(
            {
                "lr": lr,
                "alpha": st.floats(0.0, 0.999),
                "weight_decay": decay,
                "momentum": st.one_of(st.just(0.0), st.floats(0.1, 0.99)),
                "centered": flag,
                "initial_scale": st.sampled_from([0.0, 0.5]),
                "nesterov": flag,
                "maximize": flag,
            }
        ).filter(_nesterov_fits),
    ),
    Row(
        "adadelta",
        "AdaDelta",
        st.fixed_dictionaries({"lr": lr, "rho": st.floats(0.0, 0.99), "weight_decay": decay}),
    ),
]
NAMES = [row.name for row in ROWS]


def ours(name):
    return getattr(bc, name)


def theirs(name):
    return getattr(torchopt, name)
