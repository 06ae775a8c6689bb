"""Links: each alone, and in the chains that show what noise makes of it."""

from __future__ import annotations

import optree
import torch
import torchopt
from hypothesis import strategies as st
from torchopt.base import GradientTransformation

import bayesopt_chain as bc
from tests import strategies as own
from tests.registry.dressings import fed, half_square, two_chains
from tests.registry.transform import Transform


def halving():
    """A transformation of one's own, with its response declared."""

    def update(updates, state, *, params=None, inplace=True):
        return optree.tree_map(lambda g: g * 0.5, updates), state

    return bc.with_response(GradientTransformation(lambda params: (), update), bc.response.Linear((0.5,)))


def matrices(tree):
    """A proper subset of the leaves in every tree the laws use."""
    return optree.tree_map(lambda p: p.ndim > 1, tree)


def falling(count):
    return 0.1 / (1 + count)


def alone(name: str, build) -> Transform:
    """A link that makes no noise of its own."""
    return Transform(name, lambda t: build(), namespace="links")


LINKS = (
    alone("add_momentum", lambda: bc.add_momentum(0.9, dampening=0.3)),
    alone("add_momentum, nesterov", lambda: bc.add_momentum(0.9, nesterov=True)),
    alone("scale", lambda: bc.links.scale(0.5)),
    alone("scale_by_neg_lr", lambda: bc.scale_by_neg_lr(falling)),
    alone("scale_by_schedule", lambda: bc.links.scale_by_schedule(falling)),
    alone("add_decayed_weights", lambda: bc.links.add_decayed_weights(0.1)),
    alone("add_decayed_weights, mask", lambda: bc.links.add_decayed_weights(0.1, mask=matrices)),
    alone("add_gaussian_prior", lambda: bc.links.add_gaussian_prior(torch.tensor(0.1), n=1)),
    alone("add_localization", lambda: bc.links.add_localization(0.5, 0.1)),
    alone("add_localization, sgd", lambda: bc.chain(bc.links.add_localization(0.5, 0.1), bc.sgd(0.1, 0.9))),
    alone("flip_sign_and_add_weight_decay", lambda: bc.links.flip_sign_and_add_weight_decay(0.1, maximize=True)),
    alone("scale_by_rms", lambda: bc.links.scale_by_rms(0.9)),
    alone("scale_by_stddev", lambda: bc.links.scale_by_stddev(0.9)),
    alone("scale_by_rss", lambda: bc.links.scale_by_rss()),
    alone("scale_by_adam", lambda: bc.links.scale_by_adam()),
    alone("scale_by_adamax", lambda: bc.links.scale_by_adamax()),
    alone("scale_by_radam", lambda: bc.links.scale_by_radam(b2=0.5)),
    alone("scale_by_adadelta", lambda: bc.links.scale_by_adadelta()),
    alone("scale_by_preconditioner", lambda: bc.scale_by_preconditioner(2.0)),
    alone("scale_by_preconditioner, running_rms", lambda: bc.scale_by_preconditioner(bc.links.running_rms(0.9))),
    Transform("scale_by_adaptive_window", lambda t: bc.samplers.scale_by_adaptive_window(4), namespace="samplers"),
    Transform(
        "scale_by_contour",
        lambda t: fed(
            bc.chain(bc.samplers.scale_by_contour(t, 0.0, 20.0, bins=10), bc.sgld(0.1, temperature=t)), loss=half_square
        ),
        namespace="samplers",
    ),
    Transform(
        "scale_by_stein_kernel",
        lambda t: two_chains(bc.chain(bc.samplers.scale_by_stein_kernel(t), bc.adam(0.1))),
        skip=("a_missing_gradient_leaves_its_leaf_alone",),
        why="all parameters of a particle share its kernel",
        namespace="samplers",
    ),
    Transform(
        "skip_nonfinite",
        lambda t: bc.skip_nonfinite(bc.sghmc(0.1, temperature=t)),
        lambda: torchopt.sgd(0.1, momentum=0.9),
    ),
    Transform(
        "with_master_weights",
        lambda t: bc.with_master_weights(bc.sghmc(0.1, temperature=t)),
        lambda: torchopt.sgd(0.1, momentum=0.9),
    ),
    Transform(
        "delay",
        lambda t: bc.links.delay(),
        namespace="links",
    ),
    Transform(
        "inject_langevin_noise",
        lambda t: bc.chain(bc.inject_langevin_noise(t), bc.scale_by_neg_lr(0.1)),
        lambda: torchopt.sgd(0.1),
        namespace="links",
    ),
    Transform(
        "inject_langevin_noise, in torchopt.chain",
        lambda t: torchopt.chain(
            bc.inject_langevin_noise(t, lr=0.1, momentum=0.9), bc.add_momentum(0.9), bc.scale_by_neg_lr(0.1)
        ),
        lambda: torchopt.sgd(0.1, momentum=0.9),
    ),
    Transform(
        "chain, two momenta",
        lambda t: bc.chain(bc.add_momentum(0.5), bc.add_momentum(0.1), bc.sgd(0.1, temperature=t)),
        lambda: bc.chain(bc.add_momentum(0.5), bc.add_momentum(0.1), bc.scale_by_neg_lr(0.1)),
    ),
    Transform(
        "chain, preconditioned",
        lambda t: bc.chain(bc.scale_by_preconditioner(2.0), bc.sghmc(0.1, temperature=t)),
        lambda: torchopt.chain(bc.links.scale(2.0), torchopt.sgd(0.1, momentum=0.9)),
    ),
    Transform(
        "chain, running rms",
        lambda t: bc.chain(bc.scale_by_preconditioner(bc.links.running_rms(0.9)), bc.sghmc(0.1, temperature=t)),
    ),
    Transform(
        "chain, decoupled decay",
        lambda t: bc.chain(bc.add_momentum(0.9), bc.links.add_decayed_weights(0.1), bc.sgd(0.1, temperature=t)),
        lambda: torchopt.chain(bc.add_momentum(0.9), bc.links.add_decayed_weights(0.1), bc.scale_by_neg_lr(0.1)),
    ),
    Transform(
        "with_response",
        lambda t: bc.chain(halving(), bc.sghmc(0.1, temperature=t)),
        lambda: bc.chain(bc.links.scale(0.5), torchopt.sgd(0.1, momentum=0.9)),
    ),
    Transform(
        "masked",
        lambda t: bc.chain(bc.masked(bc.links.add_decayed_weights(0.1), matrices), bc.sghmc(0.1, temperature=t)),
        lambda: torchopt.chain(bc.links.add_decayed_weights(0.1, mask=matrices), torchopt.sgd(0.1, momentum=0.9)),
    ),
    Transform(
        "partition",
        lambda t: bc.partition(
            {True: bc.sghmc(0.1, temperature=t), False: bc.adam(0.1, temperature=t, freeze_after=2)}, matrices
        ),
        lambda: bc.partition({True: torchopt.sgd(0.1, momentum=0.9), False: torchopt.adam(0.1)}, matrices),
        cold=lambda t: bc.partition({True: bc.sghmc(0.1, temperature=t), False: bc.adam(0.1, temperature=t)}, matrices),
    ),
)


# TorchOpt's optimizers with a temperature; one row of each also carries a strategy for all its settings


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
