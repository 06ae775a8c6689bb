"""One loop carries every Gaussian posterior: the line that makes the transformation is all that changes."""

import pytest
import torch

import bayesopt_chain as bc

N, EPOCHS, NOISE, PRIOR = 64, 60, 0.5, 2.0
LIKELIHOOD = bc.likelihoods.gaussian(NOISE)


def forward(params, batch):
    return (batch[0] @ params["w"])[:, None]


def loss(params, batch):
    return LIKELIHOOD.nll(forward(params, batch), batch[1]).mean()


VON = {"temperature": 1 / (N * EPOCHS), "betas": (0.9, 0.99), "weight_decay": PRIOR / (N * EPOCHS)}
METHODS = {
    "laplace": lambda: (bc.chain(bc.sgd(0.02), laplace := bc.laplace()), laplace, {"prior_precision": PRIOR}),
    "swag": lambda: (bc.chain(bc.sgd(0.02), swag := bc.swag(rank=0, start=200)), swag, {}),
    "vi": lambda: (vi := bc.vi.von(0.05, **VON), vi, {}),
    "ekf": lambda: (ekf := bc.ekf.dense(prior_precision=PRIOR), ekf, {}),
}


@pytest.mark.parametrize("name", METHODS)
def test_one_loop_runs_every_method(name):
    """Of a linear model, whose posterior given all data EPOCHS times is known: filters and Laplace's precision exactly, the
    variances of variational inference, which averages over batches, to 10 %, the mean of SWAG's path to a few hundredths."""
    x = torch.randn(N, 3, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + NOISE**0.5 * torch.randn(N, dtype=torch.float64)
    batches = [(x[i : i + 8], y[i : i + 8, None]) for i in range(0, N, 8)]
    curvature = bc.curvature.ggn(forward, LIKELIHOOD, "dense")

    tx, posterior, options = METHODS[name]()
    params = {"w": torch.zeros(3, dtype=torch.float64)}
    state, step = tx.init(params), bc.make_step(loss, tx, curvature=curvature)
    for batch in batches * EPOCHS:
        params, state, _ = step(params, state, batch)
    found = posterior.posterior(state, params, **options)

    precision = EPOCHS * x.mT @ x / NOISE + PRIOR * torch.eye(3, dtype=torch.float64)
    mode = torch.linalg.solve(precision, EPOCHS * x.mT @ y / NOISE)
    variance = found.marginal_variance["w"]
    if name in ("laplace", "ekf"):
        torch.testing.assert_close(found.precision.to_dense(), precision, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(variance, precision.inverse().diagonal(), rtol=1e-9, atol=0)
    if name == "vi":
        torch.testing.assert_close(variance, precision.inverse().diagonal(), rtol=0.1, atol=0)
    torch.testing.assert_close(found.mean["w"], mode, rtol=0, atol=1e-9 if name == "ekf" else 0.05)
    assert isinstance(found, bc.Gaussian) and bool((variance > 0).all())
