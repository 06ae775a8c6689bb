r"""The stationary law of a sampler's own code in one dimension, by transfer-operator quadrature.

A sampler's state in one dimension is ``x = (theta, velocity, ...)``; one step maps ``x`` and a standard normal ``xi`` to
``x'``. With polynomials ``phi_i`` orthonormal for a product reference measure close to the stationary law (the target times
Gaussians), and ``rho = sum_i c_i phi_i`` its density ratio, stationarity is

    c_j = sum_i c_i A_ij,      A_ij = E_reference E_xi [phi_i(x) phi_j(x'(x, xi))],      c_0 = 1,

with both expectations by Gauss quadrature. The code is run once on all quadrature points, as the elements of one tensor.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import optree
import torch

from bayesopt_chain.random import stream as keyed_stream
from bayesopt_chain.testing import NormalProbe


@contextlib.contextmanager
def every_draw_as_a_normal():
    """Cheap variables are drawn as normals, which a :class:`NormalProbe` replaces by the values it is given."""
    original = keyed_stream.draw_elements

    def drawn(key, step, elements, dtype, kind="gaussian"):
        return original(key, step, elements, dtype)

    keyed_stream.draw_elements = drawn
    try:
        yield
    finally:
        keyed_stream.draw_elements = original


class Potential(NamedTuple):
    """A one-dimensional loss: its value and gradient, elementwise on tensors."""

    value: Callable
    gradient: Callable


QUARTIC = Potential(lambda x: x**2 / 2 + x**4 / 4, lambda x: x + x**3)


class Basis:
    """Orthonormal polynomials and Gauss nodes of a measure given on a fine grid (Stieltjes' procedure)."""

    def __init__(self, grid: np.ndarray, weights: np.ndarray, size: int) -> None:
        weights = weights / weights.sum()
        self.alpha, self.beta = np.zeros(size), np.ones(size)
        before, p = np.zeros_like(grid), np.ones_like(grid)
        for k in range(size):
            self.alpha[k] = (weights * grid * p * p).sum()
            after = (grid - self.alpha[k]) * p - (self.beta[k - 1] if k else 0.0) * before
            self.beta[k] = np.sqrt((weights * after * after).sum())
            before, p = p, after / self.beta[k]
        jacobi = np.diag(self.alpha) + np.diag(self.beta[:-1], 1) + np.diag(self.beta[:-1], -1)
        self.nodes, vectors = np.linalg.eigh(jacobi)
        self.weights = vectors[0] ** 2

    def __call__(self, x: np.ndarray, degree: int) -> np.ndarray:
        """Values ``[degree + 1, *x.shape]``."""
        out = [np.ones_like(x)]
        before = np.zeros_like(x)
        for k in range(degree):
            after = (x - self.alpha[k]) * out[-1] - (self.beta[k - 1] if k else 0.0) * before
            before = out[-1]
            out.append(after / self.beta[k])
        return np.stack(out)


def gibbs_grid(potential: Potential, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """A fine grid and the target's weights on it."""
    grid = np.linspace(-12.0, 12.0, 24001)
    energy = potential.value(grid) / temperature
    return grid, np.exp(-(energy - energy.min()))


def target_moment(potential: Potential, temperature: float, f: Callable = lambda x: x**2) -> float:
    """``E f`` under ``exp(-U / T)``."""
    grid, weights = gibbs_grid(potential, temperature)
    return float((weights * f(grid)).sum() / weights.sum())


class Probe:
    """One step of a sampler's code as a map of reduced coordinates.

    ``reduce`` takes the floating-point leaves of the state (each ``[m]``) to the coordinates beside ``theta``; a state with
    those coordinates is a fresh one, passed through ``prepare``, its leaves numbered ``keep`` (default: the first ones)
    set to them (a tuple of numbers: all of these to one coordinate), or to what ``lift`` makes of them. ``extra`` are
    keywords of ``update`` as functions of theta.
    """

    def __init__(
        self, tx, potential: Potential = QUARTIC, reduce=None, keep=None, prepare=None, lift=None, **extra
    ) -> None:
        self.tx, self.potential, self.extra, self.keep = tx, potential, extra, keep
        self.reduce = reduce or (lambda *leaves: leaves)
        self.prepare = prepare or (lambda state: state)
        self.lift = lift or (lambda *coordinates: coordinates)

    def start(self, theta: torch.Tensor):
        """A fresh state's leaves, structure, and the positions of its coordinates."""
        torch.manual_seed(0)
        leaves, spec = optree.tree_flatten(self.prepare(self.tx.init(theta)))
        moving = [i for i, t in enumerate(leaves) if t.is_floating_point() and t.numel() == theta.numel()]
        return leaves, spec, moving

    def step(self, x: torch.Tensor, xi: torch.Tensor | None) -> tuple[torch.Tensor, int]:
        """``x'`` of shape ``[m, 1 + k]``, and how many draws were made; ``xi`` has shape ``[m, draws]``."""
        theta = x[:, 0].clone()
        leaves, spec, moving = self.start(theta)
        keep = self.keep if self.keep is not None else range(x.shape[1] - 1)
        for value, places in zip(self.lift(*x[:, 1:].unbind(1)), keep):
            for k in places if isinstance(places, tuple) else (places,):
                leaves[moving[k]] = value.clone().reshape(leaves[moving[k]].shape)
        with NormalProbe(None if xi is None else xi.T.reshape(-1)) as probe:
            updates, state = self.tx.update(
                self.potential.gradient(theta),
                optree.tree_unflatten(spec, leaves),
                params=theta,
                inplace=False,
                **{k: v(theta) for k, v in self.extra.items()},
            )
        after = optree.tree_leaves(state)
        coordinates = self.reduce(*(after[i].reshape(-1) for i in moving))
        return torch.stack([theta + updates, *coordinates], dim=1), probe.drawn // len(theta)


def stationary_moment(
    probe: Probe,
    temperature: float,
    *,
    degree: int = 16,
    f: Callable = lambda x: x**2,
    spread: float = 1.0,
) -> float:
    """``E f(theta)`` under the stationary law of the code, whose normal draws are Gauss-Hermite's."""
    atoms, weights = np.polynomial.hermite_e.hermegauss(9)
    weights = weights / weights.sum()
    means, stds = _calibrate(probe, temperature)
    bases = [Basis(*gibbs_grid(probe.potential, temperature), degree + 4)]
    normal = np.linspace(-12.0, 12.0, 6001)
    for mean, std in zip(means, stds):
        bases.append(Basis(mean + spread * std * normal, np.exp(-(normal**2) / 2), degree + 4))
    every = itertools.product(range(degree + 1), repeat=len(bases))
    first, *others = np.array([index for index in every if sum(index) <= degree]).T
    x = np.stack([m.ravel() for m in np.meshgrid(*(b.nodes for b in bases), indexing="ij")], axis=1)
    w = np.prod([m.ravel() for m in np.meshgrid(*(b.weights for b in bases), indexing="ij")], axis=0)

    def phi(points: np.ndarray) -> np.ndarray:
        out, *tables = (b(points[:, k], degree) for k, b in enumerate(bases))
        out = out[first]
        for table, index in zip(tables, others):
            out *= table[index]
        return out

    here = phi(x) * w
    _, draws = probe.step(torch.as_tensor(x), None)
    mean = np.zeros_like(here)
    for combination in itertools.product(range(len(atoms)), repeat=draws):
        xi = torch.tensor([atoms[k] for k in combination], dtype=torch.float64).expand(len(x), draws)
        after, _ = probe.step(torch.as_tensor(x), xi)
        mean += np.prod([weights[k] for k in combination]) * phi(after.numpy())
    a = here @ mean.T
    c = np.linalg.solve((a[1:, 1:] - np.eye(len(a) - 1)).T, -a[0, 1:])
    c = np.concatenate([[1.0], c])
    return float(c @ (here @ f(x[:, 0])))


def _calibrate(probe: Probe, temperature: float, particles: int = 4000, steps: int = 100):
    """Mean and standard deviation of the coordinates beside theta, roughly, from a short seeded run."""
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(particles, generator=generator, dtype=torch.float64) * temperature**0.5 * 0.5
    leaves, _, moving = probe.start(theta)
    coordinates = probe.reduce(*(leaves[i].reshape(-1) for i in moving)) if moving else ()
    x = torch.stack([theta, *coordinates], dim=1)
    if not coordinates:
        return [], []
    _, draws = probe.step(x, None)
    for _ in range(steps):
        x, _ = probe.step(x, torch.randn(particles, draws, generator=generator, dtype=torch.float64))
    x = x[torch.isfinite(x).all(1), 1:]  # explicit schemes lose a rare particle to the quartic's flanks
    low, middle, high = x.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=x.dtype), dim=0)
    return middle.tolist(), (0.7413 * (high - low)).tolist()


def fitted_slope(build: Callable, steps, potential: Potential = QUARTIC, temperature: float = 1.0, **kwargs):
    """Slope of log |bias of E theta^2| against log step, and the biases; ``build(step)`` makes the probe."""
    want = target_moment(potential, temperature)
    biases = [stationary_moment(build(h), temperature, **kwargs) - want for h in steps]
    slope = np.polyfit(np.log(steps), np.log(np.abs(biases)), 1)[0]
    return float(slope), biases
