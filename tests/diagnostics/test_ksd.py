"""The kernel Stein discrepancy against its definition by automatic differentiation, and what it tells apart."""

import math

import pytest
import torch

import bayesopt_chain as bc

K = torch.tensor([[2.0, 0.3], [0.3, 1.0]], dtype=torch.float64)


def score(params):
    return {"w": -K @ params["w"]}


def by_definition(x, kernel, h, diagonal=True):
    """Mean of k0 over pairs, every derivative by autograd."""

    def k(a, b):
        r2 = ((a - b) ** 2).sum() / h**2
        return (1 + r2) ** -0.5 if kernel == "imq" else torch.exp(-r2 / 2)

    total = 0.0
    for i, a in enumerate(x):
        for j, b in enumerate(x):
            if i == j and not diagonal:
                continue
            s, t = -K @ a, -K @ b
            da, db = torch.func.grad(k, 0)(a, b), torch.func.grad(k, 1)(a, b)
            mixed = torch.func.jacfwd(torch.func.grad(k, 0), 1)(a, b).trace()
            total += (s @ t * k(a, b) + s @ db + t @ da + mixed).item()
    return total / (len(x) ** 2 if diagonal else len(x) * (len(x) - 1))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("kernel", ["imq", "gaussian"])
@pytest.mark.parametrize("block", [3, 100])
def test_it_is_its_definition(kernel, block):
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    got = bc.diagnostics.ksd({"w": x}, score, kernel=kernel, bandwidth=0.7, block=block)
    assert got == pytest.approx(math.sqrt(by_definition(x, kernel, 0.7)), rel=1e-10)
    got = bc.diagnostics.ksd({"w": x}, score, kernel=kernel, bandwidth=0.7, block=block, unbiased=True)
    assert got == pytest.approx(by_definition(x, kernel, 0.7, diagonal=False), rel=1e-10, abs=1e-12)


def test_the_u_statistic_of_exact_draws_is_zero_within_its_error():
    g = torch.Generator().manual_seed(3)
    x = torch.randn(100, 200, 2, generator=g, dtype=torch.float64) @ torch.linalg.cholesky(torch.linalg.inv(K)).T
    values = torch.tensor([bc.diagnostics.ksd({"w": rows}, {"w": -rows @ K}, unbiased=True) for rows in x])
    assert abs(values.mean()) < 4 * values.std() / 10  # false alarm 6e-5


def test_it_falls_with_the_draws_and_sees_a_wrong_temperature():
    g = torch.Generator().manual_seed(4)
    root = torch.linalg.cholesky(torch.linalg.inv(K))
    x = torch.randn(2000, 2, generator=g, dtype=torch.float64) @ root.T
    few, many = (bc.diagnostics.ksd({"w": x[:n]}, {"w": -x[:n] @ K}, bandwidth=1.0) for n in (100, 2000))
    hot = 1.5 * x
    assert many < few / 2 and bc.diagnostics.ksd({"w": hot}, {"w": -hot @ K}, bandwidth=1.0) > 3 * many


def test_chains_are_pooled_and_shapes_are_checked():
    x = torch.randn(6, 2, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    draws = bc.Draws.from_trees([{"w": w} for w in x], chains=2)
    want = bc.diagnostics.ksd({"w": x.reshape(12, 2)}, score)
    assert bc.diagnostics.ksd(draws, score) == pytest.approx(want)
    with pytest.raises(ValueError, match="score must be like the draws"):
        bc.diagnostics.ksd({"w": x[:, 0]}, {"w": x[:, 0, :1]})
    with pytest.raises(ValueError, match="at least 2"):
        bc.diagnostics.ksd({"w": x[:1, 0]}, score)
    with pytest.raises(ValueError, match="kernel must be"):
        bc.diagnostics.ksd({"w": x[:, 0]}, score, kernel="rbf")
