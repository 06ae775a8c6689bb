r"""The zero-temperature limit, as a definition and a check.

A sampler ``build(T)`` has the limit ``reference`` if

1. ``build(0.0)`` makes the same updates as ``reference``, bit for bit, and draws no random number;
2. ``build(tensor(0.0))`` makes updates of the same value;
3. with common noise, ``|theta_T - theta_0|`` grows as ``T^(1/2)``: the slope of its logarithm, fitted over
   ``T = 1e-12 ... 1e-6``, is 0.5 within 0.05.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import optree
import torch
import torchopt
from torch import Tensor

from bayesopt_chain import checks


def bits(x: Tensor) -> Tensor:
    """The tensor's bytes, a vector, so that -0.0 differs from 0.0."""
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_bitwise_equal(ours: Any, theirs: Any, what: str = "values") -> None:
    """Two trees with the same leaves, bit for bit.

    Args:
        ours, theirs: trees of tensors.
        what: what they are, for the message.

    Raises:
        AssertionError: naming the first leaf that differs in dtype, shape or bits.

    Example:
        >>> import torch
        >>> assert_bitwise_equal([torch.zeros(2)], [torch.zeros(2)])
    """
    a, b = optree.tree_leaves(ours), optree.tree_leaves(theirs)
    assert len(a) == len(b), f"{what}: {len(a)} leaves against {len(b)}"
    for i, (x, y) in enumerate(zip(a, b)):
        assert x.dtype == y.dtype and x.shape == y.shape, (
            f"{what}, leaf {i}: {x.dtype}{x.shape} against {y.dtype}{y.shape}"
        )
        if not torch.equal(bits(x), bits(y)):
            worst = (x.to(torch.complex128) - y).abs().max().item()
            raise AssertionError(f"{what}, leaf {i}: bits differ, by up to {worst:.3g}")


def smooth_gradient(params: Any) -> Any:
    """Gradient of ``sum(theta^2 / 2 + theta^4 / 10 + 0.3 cos(2 theta + 1))``, a smooth loss that is not quadratic."""
    return optree.tree_map(lambda p: p + 0.4 * p**3 - 0.6 * torch.sin(2 * p + 1), params)


def example_params(dtype: torch.dtype = torch.float64) -> Any:
    """A small tree with a matrix, a vector and a 0-d leaf."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"bias": (3,), "scale": (), "weight": (2, 3)}
    return {
        k: torch.randn(s, generator=generator, dtype=torch.float64, device="cpu").to(dtype) for k, s in shapes.items()
    }


def seeded(tx: Any, params: Any, seed: int = 0) -> Any:
    """The first state, its key drawn after ``torch.manual_seed(seed)``; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return tx.init(params)


def go_on(
    tx: Any, params: Any, state: Any, steps: int = 3, gradient: Callable = smooth_gradient, inplace: bool = False
) -> tuple[Any, Any, list[Any]]:
    """Parameters and state after some steps, and copies of the updates."""
    history = list[Any]()
    for _ in range(steps):
        updates, state = tx.update(gradient(params), state, params=params, inplace=inplace)
        history.append(optree.tree_map(torch.clone, updates))
        params = torchopt.apply_updates(params, updates, inplace=inplace)
    return params, state, history


def run(tx: Any, params: Any, gradient: Callable, steps: int, inplace: bool = False, seed: int = 0) -> tuple[Any, Any]:
    """Final parameters and all updates of ``steps`` steps, the key being drawn after ``torch.manual_seed(seed)``."""
    state, params = seeded(tx, params, seed), optree.tree_map(torch.clone, params)
    params, _, history = go_on(tx, params, state, steps, gradient, inplace)
    return params, history


REFERENCE = checks.Kind(
    lambda x: callable(x) or callable(getattr(x, "init", None)),
    "an optimizer of TorchOpt, or a function that returns one",
)


@checks.takes(params=checks.ANY, gradient=checks.FUNCTION, reference=REFERENCE, power=checks.NUMBER.or_none())
def assert_zero_temperature_limit(
    build: Callable[[Any], Any],
    reference: Any,
    *,
    params: Any = None,
    gradient: Callable[[Any], Any] = smooth_gradient,
    steps: int = 12,
    seed: int = 0,
    power: float | None = 0.5,
) -> None:
    """Check that a sampler is ``reference`` at temperature zero, and how it departs from it.

    Args:
        build: ``temperature -> sampler``; called with the number 0, a 0-d tensor and small positive numbers.
        reference: the optimizer, or a function that returns a fresh one (TorchOpt's momentum remembers its first call).
        params: tree of parameters (default: a float64 dict with a matrix, a vector and a 0-d leaf).
        gradient: smooth gradient field, ``params -> tree``.
        steps: number of steps compared.
        seed: of the common noise.
        power: of the temperature with which the parameters depart from the reference's, 1/2 for Langevin noise. ``None``:
            faster than any power, as in microcanonical sampling, whose direction is the gradient's up to ``exp(-c / T)``.

    Raises:
        AssertionError: naming the part of the definition that fails.

    Example:
        >>> import bayesopt_chain as bc, torchopt
        >>> assert_zero_temperature_limit(lambda t: bc.sghmc(0.1, temperature=t), lambda: torchopt.sgd(0.1, momentum=0.9))
    """
    params = example_params() if params is None else params

    def fresh():
        return reference() if callable(reference) and not hasattr(reference, "update") else reference

    for inplace in (False, True):
        _, want = run(fresh(), params, gradient, steps, inplace)
        before = torch.random.get_rng_state()
        _, got = run(build(0.0), params, gradient, steps, inplace)
        assert torch.equal(before, torch.random.get_rng_state()), "temperature=0.0 drew a random number"
        assert_bitwise_equal(got, want, f"updates at temperature=0.0 (inplace={inplace})")
        _, got = run(build(torch.zeros((), dtype=torch.float64, device="cpu")), params, gradient, steps, inplace)
        for x, y in zip(optree.tree_leaves(got), optree.tree_leaves(want)):
            assert torch.equal(x, y), f"updates at temperature=tensor(0.) differ in value (inplace={inplace})"

    cold, _ = run(fresh(), params, gradient, steps)

    def gap(temperature: float) -> float:
        warm, _ = run(build(temperature), params, gradient, steps, seed=seed)
        pairs = zip(optree.tree_leaves(warm), optree.tree_leaves(cold))
        return math.sqrt(sum(((x - y).double() ** 2).sum().item() for x, y in pairs))

    if power is None:
        assert gap(1e-9) < 1e-12, f"|theta_T - theta_0| is {gap(1e-9):.3g} at T = 1e-9, not the rounding error"
        assert gap(1.0) > 1e-3, "theta_T is theta_0 at T = 1 too: nothing was drawn"
        return
    exponents = np.arange(-12.0, -5.0)
    slope = np.polyfit(exponents, [math.log10(gap(10.0**exponent)) for exponent in exponents], 1)[0]
    assert abs(slope - power) < 0.05, f"|theta_T - theta_0| grows as T^{slope:.3f}, not T^{power}"
