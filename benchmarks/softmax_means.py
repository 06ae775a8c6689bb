"""How far the rules for the mean of a softmax over Gaussian logits are from it, and what they cost.

``python -m benchmarks.softmax_means`` prints, for C classes and logits of a standard deviation, the mean over random
Gaussians of the largest error of a probability against 80,000 draws, and the time for 100 data.
"""

from __future__ import annotations

import math
import time

import torch

import bayesopt_chain as bc

CASES = 12


def scaled_logits(mean: torch.Tensor, covariance: torch.Tensor) -> torch.Tensor:
    """Every logit over ``sqrt(1 + pi v / 8)`` of its own variance: the approximation of laplace-torch."""
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    return (mean / (1 + math.pi / 8 * variance).sqrt()).softmax(-1)


RULES = {"sobol": bc.posterior.softmax_mean, "probit": bc.posterior.probit, "scaled logits": scaled_logits}


def main() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    for classes in (3, 10, 30, 100):
        for deviation in (0.3, 1.0, 3.0):
            errors = {name: 0.0 for name in RULES}
            for _ in range(CASES):
                root = torch.randn(classes, classes) / classes**0.5 * deviation
                mean, covariance = 1.5 * torch.randn(classes), root @ root.T
                noise = torch.randn(40_000, classes) @ root.T
                exact = ((mean + noise).softmax(-1).mean(0) + (mean - noise).softmax(-1).mean(0)) / 2
                for name, rule in RULES.items():
                    errors[name] += (rule(mean, covariance) - exact).abs().max().item() / CASES
            times = {}
            means, covariances = mean.expand(100, -1).contiguous(), covariance.expand(100, -1, -1).contiguous()
            for name, rule in RULES.items():
                begin = time.perf_counter()
                rule(means, covariances)
                times[name] = 1e3 * (time.perf_counter() - begin)
            row = "  ".join(f"{name} {errors[name]:.4f} {times[name]:.1f} ms" for name in RULES)
            print(f"C {classes:4d}  deviation {deviation:.1f}  {row}")


if __name__ == "__main__":
    main()
