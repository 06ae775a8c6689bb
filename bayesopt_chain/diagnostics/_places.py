r"""What an adviser measures at one place: curvature and gradient noise along the stiffest and the noisiest directions.

A gradient counts as one pass over its data, a product with the Hessian as two, a forward pass as a third. An allowance of
passes is shared between noise and curvature: from fewer batches the noise is less certain; from fewer data the largest
curvature comes out too large, which errs on the side of smaller rates.

A few data may also show no curvature at all where all of them have some: a feature that is nonzero in few rows, the embedding
of a rare word. The batches of the noise are more data, and see it. Where the curvature comes from a part of the data, a
direction ``v`` along which ``|H v|`` is less than a hundredth of what the noise tells is therefore given the curvature
``C / r``, with ``r`` the trace of the noise over that of the curvature: an assumption, as good as noise and curvature are
proportional.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any, NamedTuple

import optree
import torch

from bayesopt_chain import batches as batch_trees
from bayesopt_chain.data.epochs import Epochs, epochs
from bayesopt_chain.data.index_stream import Order, Rule
from bayesopt_chain.diagnostics._response import Response
from bayesopt_chain.diagnostics.gradient_noise import GradientNoise, gradient_noise, gradients, scalar
from bayesopt_chain.diagnostics.heating import Reduced, Spectrum, reduce
from bayesopt_chain.diagnostics.top_curvature import hessian_product
from bayesopt_chain.trees import Tree

Loss = Callable[[Any, Any], Any]
FEWEST = 8  # data in a product with the Hessian, where there are so many
FEWEST_BATCHES = 4
PROBES = 4  # random vectors for the trace of the Hessian
FORWARD = 1 / 3  # of the passes of a gradient
SUM_WITH_PRIOR = 0.25  # how far a sum over twice the data may be from twice the value
DRAWN = 16  # values of a loss that draws, by which a sum is told from a mean
CHUNK = 1024  # data in one product with the Hessian, at most
UNSEEN = 100.0  # times less curvature than the noise tells: a direction that the data of the products do not see
SOFTEST = 40  # products that may look for the softest direction
FLAT = 1e-6  # of the largest curvature, below which no curvature is told from none


@dataclass(frozen=True)
class Rows:
    """A data set as a tree of tensors, one entry a datum: it can be cut into batches of any size."""

    data: Any
    size: int
    base: int  # the batch size at which noise is measured
    seed: int

    @property
    def least_share(self) -> float:
        """The smallest share of the data that :meth:`share` gives."""
        return min(1.0, FEWEST / self.size)

    def of_noise(self) -> Epochs:
        """Batches for :func:`gradient_noise`."""
        return epochs(self.data, self.base, seed=self.seed)

    def share(self, share: float) -> list[Any]:
        """That share of the data, at least 8 of them, in parts of one size."""
        rows = min(self.size, max(FEWEST, round(share * self.size)))
        if rows == self.size <= CHUNK:
            return [self.data]
        parts = math.ceil(rows / CHUNK)
        each = epochs(self.data, rows // parts, seed=self.seed)
        return [each.batch(0, k) for k in range(parts)]

    def halves(self) -> tuple[Any, list[Any], int] | None:
        """A batch, its two halves, and how many data it has; ``None`` where it has one datum."""
        half = min(self.base, self.size) // 2
        return _cut(epochs(self.data, 2 * half, seed=self.seed).batch(0, 0), half) if half else None

    def batches(self, size: int, order: Order | Rule, seed: int = 0) -> Any:
        """Batches for :func:`bayesopt_chain.sample`."""
        return [self.data] if size == self.size else epochs(self.data, size, order=order, seed=seed)

    def run(self, size: int, order: Order | Rule, seed: int) -> Iterator[Any]:
        """Batches without end."""
        return chain.from_iterable(repeat(self.batches(size, order, seed)))


@dataclass(frozen=True)
class Listed:
    """Batches of one size that somebody else made; ``size / base`` of them are an epoch.

    Measured are ``made``, some of them; what chains run on is ``given``, all of them.
    """

    made: list[Any]
    size: float
    base: int
    given: Iterable[Any]
    whole: bool  # whether all that is given is measured

    @property
    def least_share(self) -> float:
        """The smallest share of the data that :meth:`share` gives: a batch."""
        return min(1.0, self.base / self.size)

    def of_noise(self) -> list[Any]:
        """Batches for :func:`gradient_noise`."""
        return self.made

    def share(self, share: float) -> list[Any]:
        """That share of the batches."""
        return self.made[: max(1, round(share * len(self.made)))]

    def halves(self) -> tuple[Any, list[Any], int] | None:
        """The first batch, its two halves, and how many data they have; ``None`` where no axis 0 can be cut."""
        whole = self.made[0]
        sizes = {len(x) if torch.is_tensor(x) and x.ndim else 0 for x in batch_trees.flatten(whole)[0]}
        if len(sizes) != 1 or not (half := sizes.pop() // 2):
            return None
        return _cut(batch_trees.tree_map(lambda x: x[: 2 * half], whole), half)

    def batches(self, size: int, order: Order | Rule, seed: int = 0) -> Any:
        """Batches for :func:`bayesopt_chain.sample`."""
        del size, order, seed
        return self.given

    def run(self, size: int, order: Order | Rule, seed: int) -> Iterator[Any]:
        """The batches, again and again; those of a list in another order each time, where they are not fixed."""
        if order == "fixed" or not isinstance(self.given, Sequence):
            yield from chain.from_iterable(repeat(self.batches(size, order, seed)))
        generator = torch.Generator().manual_seed(seed)
        while isinstance(self.given, Sequence):
            for k in torch.randperm(len(self.given), generator=generator, device="cpu").tolist():
                yield self.given[k]


Source = Rows | Listed


class Place(NamedTuple):
    """What was measured at some parameters, in coordinates of gain one at the first rate and momentum.

    Attributes:
        system: curvature and noise in the span looked at; the noise is that of one datum's gradient.
        slow: the mean curvature, ``tr(H) / P``, not below 1e-5 of the largest. Where a few stiff directions make up the trace,
            most directions are softer.
        top: the largest curvature.
        spectrum: curvatures that Lanczos' method saw, prior included, and the share of directions of each. The smallest is an
            upper bound of the softest.
        level: the mean loss.
        level_error: its standard error where a part of the batches was measured, and 0 else.
        moving: how many parameters move.
        gradients: of how many batches the noise was measured; 0 with full batches alone.
        draws: whether the loss draws (dropout).
        passes: over the data that this took.
    """

    system: Reduced
    slow: float
    top: float
    spectrum: Spectrum
    level: float
    level_error: float
    moving: int
    gradients: int
    draws: bool
    passes: float

    @property
    def soft(self) -> float:
        """The softest curvature seen that can be told from none."""
        seen = self.spectrum.values
        return float(seen[seen > FLAT * self.top].min()) if bool((seen > FLAT * self.top).any()) else self.top

    def softer(self, curvature: float) -> float:
        """About which share of the directions is softer than that."""
        return float(self.spectrum.shares[self.spectrum.values < curvature].sum())


def measure(
    loss: Loss, params: Tree, source: Source, response: Response, *, rank: int, allowance: float, only_full: bool
) -> Place:
    """Measure curvature and noise at ``params`` within about so many passes over the data.

    Raises:
        ValueError: there is no positive curvature.
    """
    spent = 0.0
    if only_full:
        noise = _without_batches(loss, params, source.share(1.0)[0], rank)
        spent += 2.0
    else:
        count = int(min(60.0, max(float(FEWEST_BATCHES), 0.4 * allowance * source.size / source.base)))
        noise = gradient_noise(loss, params, source.of_noise(), rank=rank, max_batches=count)
        spent += noise.batches * source.base / source.size * (2 if noise.draws is not None else 1)
    krylov = 4 * rank
    products = krylov + 2 * rank + PROBES
    share = min(1.0, 0.6 * allowance / (2.0 * products))
    used = source.share(share)
    of_trees, calls = hessian_product(loss, params, used, max_batches=len(used)), 0

    def product(tree: Tree) -> Tree:
        nonlocal calls
        calls += 1
        return of_trees(tree)

    with torch.random.fork_rng(devices=devices_of(params)):
        system = reduce(
            response,
            noise,
            product,
            source.size / source.base,
            max_products=krylov if math.isfinite(allowance) else 120,
            softest=SOFTEST,
        )
        trace = _trace(product, params, response)
        if share < 1.0 and not only_full:
            system = _with_unseen(system, trace, _trace_of_noise(noise, response))
        with torch.no_grad():
            # of all data: runs that leave the mode are told by it, and a few data may lie far from the mean
            every = source.share(1.0)
            levels = torch.tensor(
                [float(scalar(loss, params, batch)) for batch in every], dtype=torch.float64, device="cpu"
            )
        level, part = float(levels.mean()), isinstance(source, Listed) and not source.whole
        level_error = float(levels.std()) / math.sqrt(len(levels)) if part and len(levels) > 1 else 0.0
    spent += max(share, source.least_share) * 2.0 * max(products, calls) + FORWARD
    top = float(torch.linalg.eigvalsh(system.H)[-1]) if len(system.H) else 0.0
    prior = min(group.prior for group in response.groups)
    if not top + prior > 0:
        raise ValueError("the loss has no positive curvature at params; go to a mode first")
    count = sum(int((gain > 0).sum()) * (leaf.numel() // gain.numel()) for gain, leaf in _gains(response, params))
    system = replace(system, C=system.C * source.base, D=system.D * source.base)
    slow = max(trace / count, 0.0) + prior
    assert system.spectrum is not None
    spectrum = system.spectrum._replace(values=system.spectrum.values + prior)
    gradients_seen = 0 if only_full else noise.batches
    slow = max(slow, 1e-5 * top)
    draws = noise.draws is not None
    return Place(system, slow, top + prior, spectrum, level, level_error, count, gradients_seen, draws, spent)


def least_passes(source: Source, rank: int, only_full: bool) -> float:
    """What :func:`measure` costs at least."""
    return passes_of(source, rank, only_full, 0.0)


def passes_of(source: Source, rank: int, only_full: bool, allowance: float) -> float:
    """What :func:`measure` costs with that allowance, of a loss that does not draw."""
    count = min(60.0, max(float(FEWEST_BATCHES), 0.4 * allowance * source.size / source.base))
    noise = 2.0 if only_full else count * source.base / source.size
    products = 2.0 * (6 * rank + PROBES)
    return noise + max(min(1.0, 0.6 * allowance / products), source.least_share) * products + FORWARD


def _with_unseen(system: Reduced, trace: float, noise: float) -> Reduced:
    """Curvature where the noise tells of it and the data of the products do not."""
    if not (trace > 0 and noise > 0) or system.reach is None:
        return system
    lacks, W = torch.linalg.eigh(system.C * (trace / noise) / UNSEEN - system.reach)
    W = W[:, lacks > FLAT * float(torch.linalg.eigvalsh(system.H)[-1])]
    unseen = W.T @ system.C @ W
    seen = max(noise - float(unseen.trace()), 1e-3 * noise)
    return replace(system, H=system.H + W @ (unseen * (trace / seen)) @ W.T)


def require_mean(name: str, loss: Loss, params: Tree, source: Source, *, sums_only: bool = False) -> None:
    """Refuse a loss whose value on a batch is not the mean of its values on two halves of it, unless it draws.

    Args:
        name: who asks, in messages.
        loss, params: the loss, and where it is called.
        source: of batches; one whose tensors cannot be cut in two halves is not looked at.
        sums_only: refuse a sum alone. With one batch size alone it does not matter whether the data of a batch act on each
            other.

    Raises:
        ValueError: it is a sum, or the data of a batch act on each other.
    """
    halves = source.halves()
    if halves is None:
        return
    whole, parts, count = halves
    with torch.no_grad(), torch.random.fork_rng(devices=devices_of(params)):
        values = [float(scalar(loss, params, batch)) for batch in (whole, whole, *parts)]
        if values[0] != values[1]:  # it draws: no two values can be compared, but a sum is twice as large on the whole
            seen = torch.tensor(
                [[float(scalar(loss, params, batch)) for batch in (whole, *parts)] for _ in range(DRAWN)],
                dtype=torch.float64,
                device="cpu",
            )
            beyond = seen[:, 0] - 0.75 * seen[:, 1:].sum(1)  # half way from the mean to twice the mean
            if bool(beyond.mean() > 2.0 * beyond.std() / DRAWN**0.5) and bool((seen.mean(0) > 0).all()):
                raise ValueError(_of_sum(name, count, seen.mean(0).tolist()))
            return
    mean = (values[2] + values[3]) / 2
    near = 1e-3 * max(abs(values[2]), abs(values[3]), abs(values[0]))
    if abs(values[0] - mean) <= near:
        return
    # a prior beside the sum does not double with the data
    if abs(values[0] - 2 * mean) <= SUM_WITH_PRIOR * abs(values[0]):
        raise ValueError(_of_sum(name, count, [values[0], *values[2:]]))
    if sums_only:
        return
    raise ValueError(
        f"{name}: the loss of a batch ({values[0]:.6g}) is not the mean of those of its halves ({values[2]:.6g}, "
        f"{values[3]:.6g}), "
        "so that its noise at other batch sizes cannot be told: in train mode BatchNorm mixes the data of a batch (put such "
        "layers into eval mode), class weights divide by their own sum and ignore_index by the labels that are left (divide by "
        "the number of data instead)"
    )


def _of_sum(name: str, count: int, values: list[float]) -> str:
    return (
        f"{name}: the loss is a sum over the batch ({values[0]:.4g} on {count} data, {values[1]:.4g} and {values[2]:.4g} "
        "on its halves); divide it by the number of data in the batch, a prior beside it by the number of all data, and "
        "give the chain temperature 1 / N"
    )


def _cut(whole: Any, half: int) -> tuple[Any, list[Any], int]:
    """A batch, its two halves of that many data, and how many data it has."""
    slices = (slice(0, half), slice(half, 2 * half))
    return whole, [batch_trees.tree_map(lambda x, at=at: x[at], whole) for at in slices], 2 * half


def _without_batches(loss: Loss, params: Tree, data: Any, rank: int) -> GradientNoise:
    """No batch noise; where the loss draws, the noise of its draws from one pair of gradients."""
    with torch.random.fork_rng(devices=devices_of(params)):
        pair = [gradients(loss, params, data) for _ in range(2)]
    if not all(bool(x.isfinite().all()) for x in pair[0]):
        raise ValueError("loss has a gradient that is not finite at params; look for NaN in params and data")
    spec = optree.tree_structure(params)
    rows = spec.unflatten([torch.zeros_like(x)[None] for x in pair[0]])
    same = all(torch.equal(x, y) for x, y in zip(*pair))
    draws = None if same else spec.unflatten([(x - y)[None] / math.sqrt(2.0) for x, y in zip(*pair)])
    mean = spec.unflatten([(x + y) / 2 for x, y in zip(*pair)])
    return GradientNoise(
        rows, draws, mean, torch.zeros(rank, dtype=torch.float64, device="cpu"), 0.0, 1, 1.0, "independent"
    )


def _trace(product: Callable[[Tree], Tree], params: Tree, response: Response) -> float:
    """``tr(G^1/2 H G^1/2)`` from random signs (Hutchinson)."""
    generator = torch.Generator().manual_seed(0)
    spec, total = optree.tree_structure(params), 0.0
    for _ in range(PROBES):
        v = [
            torch.randint(0, 2, leaf.shape, generator=generator, device="cpu").to(leaf) * 2.0 - 1.0
            for leaf in optree.tree_leaves(params)
        ]
        v = [x * gain.to(x).sqrt() for x, (gain, _) in zip(v, _gains(response, params))]
        total += sum(float((x * y).sum()) for x, y in zip(v, optree.tree_leaves(product(spec.unflatten(v)))))
    return total / PROBES


def _trace_of_noise(noise: GradientNoise, response: Response) -> float:
    """``tr(G^1/2 (C + D / 2) G^1/2)``; without a model's draws, of the batches alone."""
    return sum(
        float((rows.square() * gain.to(rows)).sum())
        for rows, gain in zip(optree.tree_leaves(noise.rows), response.gains)
    )


def _gains(response: Response, params: Tree) -> list[tuple[Any, Any]]:
    return list(zip(response.gains, optree.tree_leaves(params)))


def initialised_devices() -> list[int]:
    """All CUDA devices, if CUDA is in use."""
    return [*range(torch.cuda.device_count())] if torch.cuda.is_initialized() else []


def seed_all(seed: int, devices: Iterable[int]) -> None:
    """Seed torch's generators of the processor and of these CUDA devices, and no others."""
    torch.default_generator.manual_seed(seed)
    for device in devices:
        torch.cuda.default_generators[device].manual_seed(seed)


def devices_of(params: Tree) -> list[int]:
    """The CUDA devices that the parameters are on."""
    return sorted({leaf.device.index or 0 for leaf in optree.tree_leaves(params) if leaf.is_cuda})
