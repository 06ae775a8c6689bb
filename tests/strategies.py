"""Hypothesis strategies for parameter trees, gradients and hyperparameters."""

from __future__ import annotations

from typing import Any

import optree
import torch
from hypothesis import strategies as st

shapes = st.sampled_from([(), (1,), (3,), (2, 3), (2, 1, 2)])
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
learning_rates = st.floats(1e-4, 1.0)
momenta = st.floats(0.0, 0.99)
temperatures = st.floats(1e-6, 10.0)
weight_decays = st.one_of(st.just(0.0), st.floats(1e-4, 0.5))


def linear_decay(init: float, steps: int):
    """A schedule that TorchOpt accepts: linear from ``init`` to a tenth of it."""
    return lambda count: init * (1 - 0.9 * torch.clamp(count / steps, max=1.0))


def restarts(peak: float, period: int):
    """A schedule with rises, and zeros at the end of each cycle: cosine with warm restarts."""
    return lambda count: peak * 0.5 * (1 + torch.cos(torch.pi * (count % period) / max(period - 1, 1)))


schedules = st.one_of(
    st.builds(linear_decay, learning_rates, st.integers(1, 10)), st.builds(restarts, learning_rates, st.integers(1, 4))
)


def tensors(dtype: torch.dtype, seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A normal tensor; every seventh entry is a zero of either sign."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    mask = torch.randint(14, shape, generator=generator, device="cpu")
    x = torch.where(mask == 0, torch.zeros_like(x), torch.where(mask == 1, -torch.zeros_like(x), x))
    return x.to(dtype)


@st.composite
def trees(draw: Any, dtype: torch.dtype = torch.float64, none: bool = True) -> Any:
    """Trees of tensors: a bare tensor, lists, tuples, dicts, nested; some with ``None`` for an absent parameter."""
    n = draw(st.integers(1, 4))
    leaves = [tensors(dtype, draw(st.integers(0, 2**31)), draw(shapes)) for _ in range(n)]
    kinds = {
        "bare": leaves[0],
        "list": leaves,
        "tuple": tuple(leaves),
        "dict": {f"p{i}": x for i, x in enumerate(leaves)},
        "nested": {"a": leaves[0], "b": [leaves[1:], (leaves[0].clone(),)]},
        **({"none": {"p": leaves[0], "q": None}} if none else {}),
    }
    return kinds[draw(st.sampled_from(sorted(kinds)))]


@st.composite
def gradients(draw: Any, params: Any) -> Any:
    """A gradient tree for ``params``."""
    seed = draw(st.integers(0, 2**31))
    count = iter(range(10**6))
    return optree.tree_map(lambda p: tensors(p.dtype, seed + next(count), tuple(p.shape)), params)
