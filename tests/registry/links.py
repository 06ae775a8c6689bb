"""Links: each alone, and in the chains that show what noise makes of it."""

from __future__ import annotations

import optree
import torch
import torchopt
from torchopt.base import GradientTransformation

import bayesopt_chain as bc
from tests.registry.dressings import fed, half_square, two_chains
from tests.registry.transform import Transform

NO_GRADIENT = ("updates_can_be_differentiated",)


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
        skip=NO_GRADIENT,
        why="it passes on the gradient of the step before",
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
