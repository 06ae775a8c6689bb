"""A small network on data of the yacht set's shape, 308 x 6, with the Gauss-Newton Laplace posterior of all its weights.

The data are drawn here, a smooth function with noise of variance 0.01: the set itself is not part of the repository.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.networks import descend

VARIANCE, PRIOR = 0.01, 1.0


def data(epochs: int = 300) -> tuple[torch.nn.Module, Tensor, Tensor, Tensor]:
    """A trained network, its inputs and targets, and test inputs."""
    g = torch.Generator().manual_seed(0)
    x, new = torch.randn(308, 6, generator=g), 1.5 * torch.randn(50, 6, generator=g)
    y = torch.sin(x[:, :1]) * x[:, 1:2] + 0.5 * x[:, 5:] ** 2 + VARIANCE**0.5 * torch.randn(308, 1, generator=g)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))

    def loss() -> Tensor:
        squares = (net(x) - y).square().sum() / VARIANCE + PRIOR * sum(p.square().sum() for p in net.parameters())
        return squares / 616

    descend(torch.optim.Adam(net.parameters(), lr=1e-2), loss, epochs)
    return net, x, y, new


def theirs(problem: tuple) -> dict[str, Any]:
    """With posteriors."""
    import optree
    import posteriors

    net, x, y, new = problem
    function, params = posteriors.model_to_function(net), {k: p.detach() for k, p in net.named_parameters()}

    def forward(p, batch):
        return function(p, batch[0]), torch.tensor([])

    def log_likelihood(outputs, batch):
        return torch.distributions.Normal(outputs, VARIANCE**0.5, validate_args=False).log_prob(batch[1]).sum()

    laplace = posteriors.laplace.dense_ggn.build(forward, log_likelihood, init_prec=PRIOR)
    state = laplace.init(params)
    for batch in zip(x.split(77), y.split(77)):
        state, _ = laplace.update(state, batch)
    jacobian = torch.func.jacrev(lambda p: function(p, new)[:, 0])(params)
    rows = torch.cat([leaf.flatten(1) for leaf in optree.tree_leaves(jacobian)], 1)
    variance = (rows * torch.linalg.solve(state.prec, rows.T).T).sum(1)
    return {"mean": function(params, new)[:, 0].detach(), "sd": variance.sqrt()}


def ours(problem: tuple) -> dict[str, Any]:
    """With this library."""
    import bayesopt_chain as bc

    net, x, y, new = problem
    likelihood, loader = bc.likelihoods.gaussian(VARIANCE), list(zip(x.split(77), y.split(77)))
    fitted = bc.fit_laplace(net, likelihood, loader, structure="dense", subset="all", tune=None, prior_precision=PRIOR)
    predicted = fitted.predict(new, method="linearized")
    return {"mean": predicted.mean[:, 0].detach(), "sd": predicted.outputs.covariance[:, 0, 0].sqrt()}


def compare(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[float, float, float]]:
    """Their number, ours, and how far apart they may be: rounding, in float32."""
    return {
        "means apart": (0.0, (a["mean"] - b["mean"]).abs().max().item(), 1e-5),
        "deviations apart, relatively": (0.0, (a["sd"] / b["sd"] - 1).abs().max().item(), 5e-3),
        "mean deviation": (a["sd"].mean().item(), b["sd"].mean().item(), 1e-4),
    }
