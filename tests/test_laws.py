"""Every link, optimizer and sampler of the core against every law."""

import optree
import pytest
import torch
import torchopt
from torchopt.base import GradientTransformation

import bayesopt_chain as bc
from bayesopt_chain.testing import LAWS, assert_laws


def halving():
    def init(params):
        return ()

    def update(updates, state, *, params=None, inplace=True):
        return optree.tree_map(lambda g: g * 0.5, updates), state

    return bc.with_response(GradientTransformation(init, update), bc.response.Linear((0.5,)))


def by_rank(tree):
    """A proper subset of the leaves in every tree the laws use: the matrices."""
    return optree.tree_map(lambda p: p.ndim > 1, tree)


T = 0.01
BUILDS = {
    "sgd": lambda: bc.sgd(0.1),
    "sgd, all on": lambda: bc.sgd(0.1, 0.9, 0.3, 0.1, maximize=True),
    "nesterov": lambda: bc.sgd(0.1, 0.9, nesterov=True),
    "scheduled sgd": lambda: bc.sgd(lambda c: 0.1 / (1 + c), 0.9),
    "adam": lambda: bc.adam(0.1, weight_decay=0.1),
    "adamw": lambda: bc.adamw(0.1),
    "adamax": lambda: bc.adamax(0.1),
    "radam": lambda: bc.radam(0.1, betas=(0.9, 0.5)),
    "adagrad": lambda: bc.adagrad(0.1, lr_decay=0.1),
    "rmsprop": lambda: bc.rmsprop(0.1, momentum=0.9),
    "centred rmsprop": lambda: bc.rmsprop(0.1, centered=True),
    "adadelta": lambda: bc.adadelta(0.1),
    "hot sgd": lambda: bc.sgd(0.1, temperature=T),
    "hot sgd, all on": lambda: bc.sgd(0.1, 0.9, 0.3, 0.1, temperature=T),
    "hot nesterov": lambda: bc.sgd(0.1, 0.9, nesterov=True, temperature=T),
    "hot scheduled nesterov": lambda: bc.sgd(lambda c: 0.1 / (1 + c), 0.9, nesterov=True, temperature=T),
    "hot scheduled sgd": lambda: bc.sgd(lambda c: 0.1 / (1 + c), 0.9, temperature=lambda c: T / (1 + c)),
    "hot adam": lambda: bc.adam(0.1, temperature=T, freeze_after=2),
    "hot scheduled adamw": lambda: bc.adamw(lambda c: 0.1 / (1 + c), temperature=T),
    "hot adamax": lambda: bc.adamax(0.1, temperature=T, freeze_after=2),
    "hot radam": lambda: bc.radam(0.1, betas=(0.9, 0.5), temperature=T, freeze_after=2),
    "hot adagrad": lambda: bc.adagrad(0.1, lr_decay=0.1, temperature=T, freeze_after=2),
    "hot rmsprop": lambda: bc.rmsprop(0.1, momentum=0.9, temperature=T, freeze_after=2),
    "hot centred rmsprop": lambda: bc.rmsprop(0.1, centered=True, temperature=T, freeze_after=2),
    "sgld": lambda: bc.sgld(0.1, temperature=T, order=1),
    "sghmc": lambda: bc.sghmc(0.1, temperature=T),
    "classical sghmc": lambda: bc.sghmc(0.1, temperature=T, order=1),
    "sghmc, tensors": lambda: bc.sghmc(torch.tensor(0.1), temperature=torch.tensor(T)),
    "two momenta": lambda: bc.chain(bc.add_momentum(0.5), bc.add_momentum(0.1), bc.sgd(0.1, temperature=T)),
    "preconditioned": lambda: bc.chain(bc.scale_by_preconditioner(2.0), bc.sghmc(0.1, temperature=T)),
    "running rms": lambda: bc.chain(bc.scale_by_preconditioner(bc.running_rms(0.9)), bc.sghmc(0.1, temperature=T)),
    "declared": lambda: bc.chain(halving(), bc.sghmc(0.1, temperature=T)),
    "decoupled decay": lambda: bc.chain(
        bc.add_momentum(0.9), bc.add_decayed_weights(0.1), bc.sgd(0.1, temperature=T)
    ),
    "stated noise": lambda: torchopt.chain(
        bc.inject_langevin_noise(T, lr=0.1, momentum=0.9), bc.add_momentum(0.9), bc.scale_by_neg_lr(0.1)
    ),
    "masked": lambda: bc.chain(bc.masked(bc.add_decayed_weights(0.1), by_rank), bc.sghmc(0.1, temperature=T)),
    "partition": lambda: bc.partition(
        {True: bc.sghmc(0.1, temperature=T), False: bc.adam(0.1, temperature=T, freeze_after=2)}, by_rank
    ),
}  # fmt: skip


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("name", BUILDS)
def test_law(name, law):
    law(BUILDS[name])


def test_a_link_that_breaks_a_law_is_found():
    calls = []

    def update(updates, state, *, params=None, inplace=True):
        calls.append(1)
        return optree.tree_map(lambda g: g * len(calls), updates), state

    with pytest.raises(AssertionError, match="the_same_state_gives_the_same_update"):
        assert_laws(lambda: bc.chain(GradientTransformation(lambda params: (), update)))
