"""Output factors are roots of the expected Hessian, draws follow the likelihood, losses are normalised."""

import math
import warnings

import pytest
import torch

from bayesopt_chain import likelihoods

B = 4


pytestmark = pytest.mark.usefixtures("double_precision")


def hessian(likelihood, outputs, targets):
    """The Hessian of the nll in one datum's outputs, `[B, E, E]`, by differentiation."""

    def one(f, y):
        shape = f.shape
        return torch.func.hessian(lambda v: likelihood.nll(v.reshape(1, *shape), y[None]).sum())(f.reshape(-1))

    return torch.stack([one(f, y) for f, y in zip(outputs, targets)])


def squared(factors):
    rows = factors.flatten(2) if factors.ndim > 2 else factors[..., None]
    return torch.einsum("kbi,kbj->bij", rows, rows)


CANONICAL = {
    "gaussian": (likelihoods.gaussian(0.3), (3,), lambda: torch.randn(B, 3)),
    "gaussian per output": (likelihoods.gaussian(torch.tensor([0.1, 1.0, 2.0])), (3,), lambda: torch.randn(B, 3)),
    "gaussian, no event": (likelihoods.gaussian(0.3), (), lambda: torch.randn(B)),
    "bernoulli": (likelihoods.bernoulli(), (2,), lambda: torch.randint(0, 2, (B, 2)).double()),
    "poisson": (likelihoods.poisson(), (2,), lambda: torch.randint(0, 5, (B, 2)).double()),
    "categorical": (likelihoods.categorical(), (4,), lambda: torch.randint(0, 4, (B,))),
    "categorical, a sequence": (likelihoods.categorical(), (3, 4), lambda: torch.randint(0, 4, (B, 3))),
    "custom": (
        likelihoods.custom(lambda f, y: torch.nn.functional.cross_entropy(f, y, reduction="none")),
        (4,),
        lambda: torch.randint(0, 4, (B,)),
    ),
}


@pytest.mark.parametrize("case", CANONICAL.values(), ids=CANONICAL)
def test_exact_factors_are_a_root_of_the_hessian_and_the_empirical_one_is_the_gradient(case):
    likelihood, event, targets = case
    outputs, targets = torch.randn(B, *event), targets()
    factors = likelihood.factors(outputs, targets)
    assert factors.shape[1:] == outputs.shape
    assert torch.allclose(squared(factors), hessian(likelihood, outputs, targets), atol=1e-12)
    gradient = torch.func.grad(lambda f: likelihood.nll(f, targets).sum())(outputs)
    assert torch.allclose(likelihood.empirical_factors(outputs, targets)[0], gradient, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gaussian", "bernoulli", "poisson", "categorical", "categorical, a sequence", "learned"]
)
def test_monte_carlo_factors_have_the_exact_mean(name):
    """40 batches of 100 draws. An entry's error over its standard error, estimated from the 40, has a t distribution
    with 39 degrees of freedom: it exceeds 7 with probability 2e-8, any of 576 entries below 1.3e-5.
    """
    if name == "learned":
        likelihood, event, targets = likelihoods.gaussian("learned"), (2,), lambda: torch.randn(B, 1)
    else:
        likelihood, event, targets = CANONICAL[name]
    outputs, generator = torch.randn(B, *event), torch.Generator().manual_seed(5)
    n, batches = 100, 40
    targets = targets()
    totals = torch.stack([squared(likelihood.sampled_factors(outputs, targets, n, generator)) for _ in range(batches)])
    error = totals.mean(0) - squared(likelihood.factors(outputs, targets))
    deviation = totals.std(0) / batches**0.5 + 1e-12
    assert (error / deviation).abs().max() < 7


def test_learned_variance_has_the_fisher_of_mean_and_log_variance():
    likelihood = likelihoods.gaussian("learned")
    outputs = torch.tensor([[0.3, math.log(0.5)]])
    assert torch.allclose(
        squared(likelihood.factors(outputs, torch.zeros(1, 1)))[0], torch.diag(torch.tensor([2.0, 0.5]))
    )


def test_draws_repeat_with_the_generator():
    for name, (likelihood, event, _) in CANONICAL.items():
        if name != "custom":
            outputs = torch.randn(B, *event)
            a, b = (likelihood.draw(outputs, torch.Generator().manual_seed(1)) for _ in range(2))
            assert torch.equal(a, b)
            assert likelihood.nll(outputs, a).shape == (B,)


@pytest.mark.parametrize("shape", [(4, 10), (3, 5, 4), (2, 2, 3, 2)], ids=str)
def test_a_softmax_over_c_classes_has_c_minus_1_columns_however_they_are_asked_for(shape):
    """In parts, combined, and on the diagonal; logits of a wide range, where some probabilities vanish."""
    logits = 30 * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    p, root = logits.softmax(-1), likelihoods.categorical().root(logits, torch.zeros(shape[:-1], dtype=torch.int64))
    positions = logits[0, ..., 0].numel()
    assert root.columns == positions * max(1, shape[-1] - 1)
    s = root.part(0, root.columns)
    flat = p.reshape(shape[0], positions, shape[-1])
    exact = torch.stack([torch.block_diag(*(torch.diag(q) - torch.outer(q, q) for q in datum)) for datum in flat])
    torch.testing.assert_close(torch.einsum("kbi,kbj->bij", s.flatten(2), s.flatten(2)), exact)
    torch.testing.assert_close(s.square().sum(0), root.diagonal())
    pieces = [root.part(k, min(k + 2, root.columns)) for k in range(0, root.columns, 2)]
    assert torch.equal(torch.cat(pieces), s)
    weights = torch.randn(shape[0], root.columns, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(root.combine(weights), torch.einsum("bk,kb...->b...", weights, s))


def test_the_columns_of_a_softmax_are_finite_where_float32_has_no_probability_left():
    logits = torch.tensor([[200.0, -50.0, -300.0, 0.0], [-200.0, 0.0, -100.0, -103.0]], dtype=torch.float32)
    root = likelihoods.categorical().root(logits, torch.zeros(2, dtype=torch.int64))
    assert root.part(0, root.columns).isfinite().all() and root.combine(torch.ones(2, root.columns)).isfinite().all()


def test_probabilities_in_the_place_of_logits_are_noticed():
    targets, logits = torch.tensor([0, 1, 2]), torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match="probabilities.*leave the softmax out"):
        likelihoods.categorical().require(logits.softmax(-1), targets, wait=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for outputs in (logits, logits.log_softmax(-1), torch.zeros(3, 4)):
            likelihoods.categorical().require(outputs, targets, wait=True)
