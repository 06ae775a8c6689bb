"""TorchOpt's optimizers with a temperature; one row of each also carries a strategy for all its settings."""

from __future__ import annotations

import torchopt
from hypothesis import strategies as st

import bayesopt_chain as bc
from bayesopt_chain.testing import strategies as own
from tests.registry.transform import Transform

lr = st.one_of(own.learning_rates, own.schedules)
decay = own.weight_decays
flag = st.booleans()
betas = st.tuples(st.floats(0.0, 0.99), st.floats(0.5, 0.9999))


def _nesterov_fits(settings: dict) -> bool:
    return not settings["nesterov"] or (settings.get("momentum", 0.0) > 0.0 and settings.get("dampening", 0.0) == 0.0)


SETTINGS = {
    "sgd": st.fixed_dictionaries(
        {
            "lr": lr,
            "momentum": st.one_of(st.just(0.0), own.momenta),
            "dampening": st.one_of(st.just(0.0), st.floats(0.0, 0.9)),
            "weight_decay": decay,
            "nesterov": flag,
            "maximize": flag,
        }
    ).filter(_nesterov_fits),
    "adam": st.fixed_dictionaries(
        {
            "lr": lr,
            "betas": betas,
            "eps": st.sampled_from([1e-8, 1e-3]),
            "eps_root": st.sampled_from([0.0, 1e-6]),
            "weight_decay": decay,
            "maximize": flag,
        }
    ),
    "adamw": st.fixed_dictionaries({"lr": lr, "betas": betas, "weight_decay": decay, "maximize": flag}),
    "adamax": st.fixed_dictionaries({"lr": lr, "betas": betas, "weight_decay": decay}),
    "radam": st.fixed_dictionaries({"lr": lr, "betas": betas, "weight_decay": decay}),
    "adagrad": st.fixed_dictionaries(
        {
            "lr": lr,
            "lr_decay": st.sampled_from([0.0, 0.1]),
            "weight_decay": decay,
            "initial_accumulator_value": st.sampled_from([0.0, 0.5]),
            "maximize": flag,
        }
    ),
    "rmsprop": st.fixed_dictionaries(
        {
            "lr": lr,
            # below, TorchOpt's centred form takes the root of rounding errors, which we clamp (links/rms.py)
            "alpha": st.floats(0.01, 0.999),
            "weight_decay": decay,
            "momentum": st.one_of(st.just(0.0), st.floats(0.1, 0.99)),
            "centered": flag,
            "initial_scale": st.sampled_from([0.0, 0.5]),
            "nesterov": flag,
            "maximize": flag,
        }
    ).filter(_nesterov_fits),
    "adadelta": st.fixed_dictionaries({"lr": lr, "rho": st.floats(0.0, 0.99), "weight_decay": decay}),
}


def falling(count):
    return 0.1 / (1 + count)


def sgd(variant: str = "", **settings) -> Transform:
    """A row of plain SGD with these settings, whose limit is TorchOpt's."""
    name = ", ".join(filter(None, ("sgd", variant)))
    return Transform(
        name,
        lambda t: bc.sgd(**settings, temperature=t),
        lambda: torchopt.sgd(**settings),
        settings=None if variant else SETTINGS["sgd"],
    )


def adaptive(function: str, variant: str = "", **settings) -> Transform:
    """A row of an optimizer with a running preconditioner: the laws see it frozen after two updates where T > 0."""
    name = ", ".join(filter(None, (function, variant)))
    ours, theirs = getattr(bc, function), getattr(torchopt, function)
    return Transform(
        name,
        lambda t: ours(**settings, temperature=t, freeze_after=2),
        lambda: theirs(**settings),
        cold=lambda t: ours(**settings, temperature=t),
        settings=None if variant else SETTINGS[function],
    )


OPTIMIZERS = (
    sgd(lr=0.1),
    sgd("momentum", lr=0.1, momentum=0.9),
    sgd("dampening", lr=0.1, momentum=0.8, dampening=0.3),
    sgd("all on", lr=0.01, momentum=0.9, dampening=0.3, weight_decay=0.1, maximize=True),
    sgd("nesterov", lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    sgd("scheduled", lr=falling, momentum=0.9),
    sgd("nesterov, scheduled", lr=falling, momentum=0.9, nesterov=True),
    Transform(
        "sgd, temperature scheduled",
        lambda t: bc.sgd(falling, 0.9, temperature=lambda count: t / (1 + count)),
    ),
    adaptive("adam", lr=0.01, weight_decay=0.1),
    adaptive("adamw", lr=0.01),
    adaptive("adamw", "scheduled", lr=falling),
    adaptive("adamax", lr=0.01),
    adaptive("radam", lr=0.01, betas=(0.9, 0.5)),
    adaptive("adagrad", lr=0.1, lr_decay=0.1),
    adaptive("rmsprop", lr=0.01, momentum=0.9),
    adaptive("rmsprop", "centred", lr=0.01, centered=True),
    Transform("adadelta", lambda t: bc.adadelta(0.1), settings=SETTINGS["adadelta"]),  # refused at T > 0
)
COMPARED = tuple(row for row in OPTIMIZERS if row.settings is not None)  # one row for each function of TorchOpt
