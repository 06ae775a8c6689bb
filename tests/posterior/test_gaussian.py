"""The Gaussian posterior: its draws, its density, its evidence."""

import optree
import pytest
import torch

from bayesopt_chain.posterior.gaussian import Gaussian
from bayesopt_chain.precision import Dense, Diagonal, Kronecker, LowRank, flatten, shape_only

COUNT = torch.tensor(3.0)


pytestmark = pytest.mark.usefixtures("double_precision")


def parameters():
    return {"w": torch.randn(2, 3), "s": torch.randn(())}


def psd(n):
    root = torch.randn(n, n)
    return root @ root.T + 0.1 * torch.eye(n)


def precisions():
    tree = parameters()
    like = shape_only(tree)
    yield Dense(psd(7), like, COUNT)
    yield Diagonal(optree.tree_map(lambda leaf: leaf.square() + 0.2, tree), COUNT)
    yield Kronecker(
        {"w": psd(2), "s": psd(1)},
        {"w": psd(3), "s": psd(1)},
        {"w": torch.tensor(0.0), "s": torch.tensor(0.0)},
        like,
        COUNT,
    )
    yield LowRank(
        optree.tree_map(lambda leaf: leaf.square() + 0.2, tree),
        optree.tree_map(lambda leaf: torch.randn(2, *leaf.shape), tree),
        COUNT,
    )


CASES = pytest.mark.parametrize("index", range(4), ids=["dense", "diagonal", "kronecker", "low_rank"])


@CASES
def test_draws_have_the_mean_and_the_covariance_solve_of_the_identity(index):
    """With n draws, n C^ is Wishart: each entry of C^ - C has standard deviation sqrt((C_ij^2 + C_ii C_jj) / n).

    The largest of 28 + 7 standardised errors exceeds 5.5 with probability below 35 * 3.8e-8 = 1.4e-6.
    """
    n = 40_000
    precision = list(precisions())[index].add_diagonal(1.7)
    mean = parameters()
    draws = Gaussian(mean, precision).sample((n,), generator=torch.Generator().manual_seed(1))
    assert draws["w"].shape == (n, 2, 3) and draws["s"].shape == (n,)
    centred = flatten(draws, mean) - flatten(mean, mean)
    covariance = torch.linalg.inv(precision.to_dense())
    empirical = centred.T @ centred / n
    deviation = ((covariance.square() + torch.outer(covariance.diagonal(), covariance.diagonal())) / n).sqrt()
    assert ((empirical - covariance) / deviation).abs().max() < 5.5
    assert (centred.mean(0) / (covariance.diagonal() / n).sqrt()).abs().max() < 5.5


@CASES
def test_log_prob_variance_and_evidence_are_those_of_the_multivariate_normal(index):
    precision, mean = list(precisions())[index], parameters()
    gaussian = Gaussian(mean, precision)
    reference = torch.distributions.MultivariateNormal(flatten(mean, mean), precision_matrix=precision.to_dense())
    points = optree.tree_map(lambda leaf: torch.randn(5, *leaf.shape), mean)
    assert torch.allclose(gaussian.log_prob(points), reference.log_prob(flatten(points, mean)), rtol=1e-10)
    assert gaussian.log_prob(mean).shape == ()
    # if the joint is c at the mode of c exp(-quadratic), the evidence is c (2 pi)^(P/2) |Lambda|^(-1/2)
    assert torch.allclose(gaussian.log_evidence(gaussian.log_prob(mean)), torch.tensor(0.0), atol=1e-10)
    assert torch.allclose(flatten(gaussian.marginal_variance, mean), reference.variance, rtol=1e-9)
    assert torch.equal(gaussian.factorised().log_prob(points), gaussian.log_prob(points))


def test_samples_repeat_with_the_generator_and_keep_dtype():
    gaussian = Gaussian({"w": torch.zeros(3, dtype=torch.float32)}, Diagonal({"w": torch.ones(3)}, COUNT))
    first, second = (gaussian.sample((), generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first["w"], second["w"]) and first["w"].shape == (3,)


def test_sampling_from_a_singular_precision_is_one_clear_error():
    gaussian = Gaussian({"w": torch.zeros(2)}, Diagonal({"w": torch.tensor([1.0, 0.0])}, COUNT))
    with pytest.raises(ValueError, match=r"singular.*at w.*prior_precision"):
        gaussian.sample((3,))
