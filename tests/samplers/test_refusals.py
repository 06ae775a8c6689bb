"""Wrong usage: one error each, naming the argument, what came, and what to do."""

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain import samplers
from tests.registry.samplers import TreePrecision

NAN = float("nan")


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (
            lambda: samplers.baoab(-0.1, 1.0, temperature=1.0),
            ValueError,
            "step_size must be a positive, finite number, got -0.1",
        ),
        (
            lambda: samplers.obabo(0.1, 0.0, temperature=1.0),
            ValueError,
            "friction must be a positive, finite number, got 0.0",
        ),
        (lambda: samplers.ubu(0.1, NAN, temperature=1.0), ValueError, "ubu: friction must be "),
        (
            lambda: samplers.ubu(0.1, 1.0, temperature=-1.0),
            ValueError,
            "temperature must be finite and not negative, got -1.0",
        ),
        (
            lambda: samplers.sghmc_euler(0.1, 1.0, temperature=1.0),
            ValueError,
            r"momentum must lie in \[0, 1\), got 1.0",
        ),
        (lambda: samplers.sghmc_euler(0.0, temperature=1.0), ValueError, r"lr \(learning rate\) must be a positive"),
        (lambda: samplers.sgnht(0.1, 1.0, temperature=1.0), ValueError, "sgnht: momentum must lie"),
        (
            lambda: samplers.sgnht(0.1, temperature=1.0, thermostat_mass=0.0),
            ValueError,
            "thermostat_mass must be a positive",
        ),
        (lambda: samplers.badodab(0.1, -1.0, temperature=1.0), ValueError, "badodab: friction must be "),
        (
            lambda: samplers.adaptive_sghmc(0.1, temperature=1.0, burn_in=0),
            ValueError,
            "at least 1, got 0; nothing is learned without a burn-in",
        ),
        (
            lambda: samplers.sgfs(0.1, temperature=0.0, batch_size=1),
            ValueError,
            r"sgfs: temperature must be positive.*use bc\.sgd",
        ),
        (lambda: samplers.sgfs(0.1, temperature=1.0, batch_size=0), ValueError, "batch_size must be "),
        (
            lambda: samplers.sgfs(0.1, temperature=1.0, dense=True, batch_size=1, decay=1.0),
            ValueError,
            r"decay must lie in \[0, 1\)",
        ),
        (
            lambda: samplers.langevin_with_precision(torch.eye(2), 0.1, temperature=1.0),
            TypeError,
            "precision has no sqrt_solve.*got Tensor; pass a precision",
        ),
        (
            lambda: samplers.langevin_with_precision(TreePrecision(), 0.1, temperature=1.0, order=3),
            ValueError,
            "order must be 1 or 2, got 3",
        ),
        (lambda: bc.make_step(None, torch.nn.ReLU()), TypeError, "make_step: tx is ReLU"),
        (lambda: samplers.cyclical(NAN, 10, 5, temperature=1.0), ValueError, "cyclical: lr"),
        (
            lambda: samplers.cyclical(0.1, 10, 5, 1.5, temperature=1.0).init(torch.zeros(2)),
            ValueError,
            "momentum must lie",
        ),
        (lambda: samplers.lattice_walk(-1.0, temperature=1.0), ValueError, "lattice_walk: lr"),
    ],
)
def test_a_wrong_argument_is_named(build, error, words):
    with pytest.raises(error, match=words):
        build()


OWN_NOISE = {
    "ubu": lambda: samplers.ubu(0.1, 1.0, temperature=1.0),
    "lattice_walk": lambda: samplers.lattice_walk(0.1, temperature=1.0),
    "sgfs": lambda: samplers.sgfs(0.1, temperature=1.0, batch_size=1),
    "badodab": lambda: samplers.badodab(0.1, temperature=1.0),
    "langevin_with_precision": lambda: samplers.langevin_with_precision(TreePrecision(), 0.1, temperature=1.0),
}


@pytest.mark.parametrize("name", OWN_NOISE)
def test_integer_parameters_and_empty_trees_are_refused(name):
    with pytest.raises(TypeError, match="only real floating-point tensors can be sampled"):
        OWN_NOISE[name]().init({"w": torch.zeros(2), "n": torch.zeros(2, dtype=torch.int64)})
    with pytest.raises(ValueError, match="the tree has no leaves"):
        OWN_NOISE[name]().init({})


@pytest.mark.parametrize("dense", [False, True])
def test_fisher_scoring_needs_the_gradients_variance(dense):
    tx, p = samplers.sgfs(0.1, temperature=1.0, batch_size=1, dense=dense), torch.zeros(2)
    with pytest.raises(ValueError, match="needs gradient_variance=, the variance of single-datum gradients"):
        tx.update(torch.ones(2), tx.init(p), params=p)


def test_replica_exchange_needs_its_losses():
    tx, p = samplers.replica_exchange(0.1, temperatures=(0.5, 1.0)), torch.zeros(2, 3)
    for loss, came in ((None, "nothing"), (torch.zeros(()), r"shape \(\)")):
        extra = {} if loss is None else {"loss": loss}
        with pytest.raises(ValueError, match=rf"update needs loss=.*\[2\], got {came}"):
            tx.update(torch.ones(2, 3), tx.init(p), params=p, **extra)


def test_a_precision_needs_every_gradient():
    tx, p = (
        samplers.langevin_with_precision(TreePrecision(), 0.1, temperature=1.0),
        {"a": torch.zeros(2), "b": torch.zeros(1)},
    )
    with pytest.raises(ValueError, match="every parameter needs a gradient, since it couples them"):
        tx.update({"a": torch.ones(2), "b": None}, tx.init(p), params=p)
