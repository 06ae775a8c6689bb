r"""Noise and curvature of a loss at some parameters: the covariance of minibatch gradients, and the largest eigenvalues of the
Hessian, with nothing of size P x P.

``g_1 .. g_m`` are the gradients of ``m`` batches at the same parameters, ``N`` data making ``K = N / b`` batches of
``b``; ``s^2`` is the covariance of one datum's gradient. Two covariances are in use,

    C = s^2 / b            of a batch drawn with replacement,
    B = C (1 - 1 / K)      of a batch of different data, which is what an epoch and :func:`bayesopt_chain.epochs` give.

The gradients of batches that share no datum have ``sum (g - mean)(g - mean)^T / (m - 1)`` equal to ``C`` in the
mean (those of several epochs are centred epoch by epoch).
``C`` has rank ``m - 1`` at most, and its eigenvectors are combinations of the rows ``R = (g - mean) / sqrt(m - 1)``,

    G^(1/2) C G^(1/2) v = lambda v,     v = G^(1/2) R^T a / sqrt(lambda),     (R G R^T) a = lambda a,

with the gain ``G`` of a chain with a preconditioner. The matrix ``R G R^T`` is ``m x m``.

A model that draws (dropout) adds noise that does not sum to zero over an epoch. Its batches are gone through twice,
``g`` and ``g'``: the rows ``(g - g') / sqrt(2 m)`` have its covariance ``D``, and those of the means of the two have
``C + D / 2``. Gradient noise as a covariance: Mandt, Hoffman and Blei (2017); its eigenvectors from the rows alone: Sirovich
(1987).

**Curvature.** The largest eigenvalues of a symmetric matrix that exists only as a product are found by Lanczos' method,

    beta_{n+1} q_{n+1} = A q_n - alpha_n q_n - beta_n q_{n-1},      alpha_n = q_n^T A q_n,

made orthogonal to all earlier ``q``; the eigenpairs ``(theta, y)`` of the tridiagonal matrix give those of ``A``, with
the residual ``beta |y_last|``. Where ``beta`` vanishes (``A`` has fewer different eigenvalues than steps) the iteration goes on
from a new random vector, so that multiple eigenvalues are found too. Lanczos (1950); products with the Hessian: Pearlmutter
(1994).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import batches as batch_trees
from bayesopt_chain import checks, curvature
from bayesopt_chain.data.epochs import Epochs
from bayesopt_chain.diagnostics._response import read
from bayesopt_chain.loop.loss import gradient, value
from bayesopt_chain.modules import as_batches
from bayesopt_chain.trees import flatten, gram, require_like, unflatten

SEEDS = 16  # of a loss that draws random numbers


class GradientNoise(NamedTuple):
    """What :func:`gradient_noise` found.

    Attributes:
        rows: centred gradients, a tree of leaves ``[m, *leaf.shape]`` with ``rows^T rows = C`` (``C + D / 2`` beside
            ``draws``).
        draws: the same of the model's own draws, ``draws^T draws = D``; ``None`` for a loss that draws nothing.
        mean: the mean gradient, like the parameters.
        eigenvalues: the largest of ``G^(1/2) (C + D) G^(1/2)``, descending, float64 ``[rank]``.
        trace: the sum of all of them.
        batches: how many there were, ``m``.
        steps_per_epoch: ``K``, where the batches said it.
        order: their order, where they said it.
    """

    rows: Any
    draws: Any
    mean: Any
    eigenvalues: Tensor
    trace: float
    batches: int
    steps_per_epoch: float | None
    order: str | None


@checks.takes(max_batches=checks.whole(2))
def gradient_noise(
    loss: Callable[[Any, Any], Any],
    params: Any,
    batches: Iterable[Any],
    *,
    tx: Any = None,
    state: Any = None,
    rank: int = 8,
    max_batches: int = 100,
) -> GradientNoise:
    """Audit the noise of minibatch gradients at ``params``.

    Its eigenvalues stand against ``2 T / lr_eff``, the noise that the chain injects: :func:`heating` says what comes of
    it.

    Args:
        loss: as for :func:`bayesopt_chain.make_step`. Draws of the model (dropout) are counted, and kept apart.
        params: where to look; after burn-in.
        batches: ``bc.epochs(...)`` (whose position stays) or any iterable of batches of one size; a smaller one at the end is
            left out.
            Batches of an iterable must share no datum, as those of a shuffled ``DataLoader`` do not.
        tx: a chain whose preconditioner and learning rates weigh the parameters; default: none, ``G = 1``.
        state: its state (default: that of ``init``).
        rank: how many directions to keep.
        max_batches: use at most so many. All ``m`` gradients are held: ``m`` times the parameters' memory.

    Returns:
        :class:`GradientNoise`. From few batches the largest eigenvalues come out too large, and those after them too
        small.

    Raises:
        ValueError: fewer than two batches; ``rank`` below 1; a ``tx`` that is not linear.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> def loss(w, batch):
        ...     return (w - batch).square().mean() / 2
        >>> batches = [torch.tensor([0.0, 1.0]), torch.tensor([2.0, 3.0])]
        >>> noise = bc.diagnostics.gradient_noise(loss, torch.tensor(0.0), batches)
        >>> noise.eigenvalues, noise.mean
        (tensor([2.], dtype=torch.float64), tensor(-1.5000))
    """
    blocks, steps_per_epoch, order = take(batches, max_batches)
    used = [batch for block in blocks for batch in block]
    freedom = len(used) - len(blocks)
    if freedom < 1:
        raise ValueError(
            f"gradient_noise: batches must be at least two an epoch, got {max(map(len, blocks), default=0)}; a tensor, a "
            "dictionary or a tuple of tensors is one"
        )
    with torch.random.fork_rng(devices=initialised_devices()):
        found = [gradient(loss, params, batch) for batch in used]
        first = [optree.tree_leaves(grads) for grads, _ in found]
        again = gradients(loss, params, used[0])
        # sums on a device may differ in their last places from one call to the next, which are no draws
        pairs = [(x, (x - y).norm()) for x, y in zip(first[0], again)]
        drawing = any(bool(off > torch.finfo(x.dtype).eps ** 0.5 * x.norm()) for x, off in pairs)
        m, spec = len(used), optree.tree_structure(params)
        stacked, draws = [torch.stack(leaf) for leaf in zip(*first)], None
        if drawing:
            others = (gradients(loss, params, batch) for batch in used[1:])
            second = [torch.stack(leaf) for leaf in zip(again, *others)]
            draws = [(x - y) / math.sqrt(2 * m) for x, y in zip(stacked, second)]
            stacked = [(x + y) / 2 for x, y in zip(stacked, second)]
    finite = [leaf.reshape(m, -1).isfinite().all(1).cpu() for leaf in stacked]
    # a mean over no label at all is NaN, and its gradient zero
    finite.append(torch.stack([info.loss for _, info in found]).isfinite().cpu())
    bad = (~torch.stack(finite).all(0)).nonzero().flatten()
    if len(bad):
        raise ValueError(
            f"gradient_noise: the loss or its gradient is not finite at params, on {len(bad)} of {m} batches, the first of "
            f"them number {int(bad[0]) + 1}; look for rows with NaN in them, and for batches without a label that counts"
        )
    means = [leaf.mean(0) for leaf in stacked]
    # batches of an epoch share no datum; independent ones do, and have B instead of C
    share = 1.0 - 1.0 / steps_per_epoch if order == "independent" and steps_per_epoch else 1.0
    rows = [
        torch.cat([part - part.mean(0) for part in leaf.split([*map(len, blocks)])]) / math.sqrt(freedom * share)
        for leaf in stacked
    ]
    gains = [torch.ones((), device=leaf.device) for leaf in means] if tx is None else read(tx, params, state).gains
    total = rows if draws is None else [torch.cat([x, y / math.sqrt(2)]) for x, y in zip(rows, draws)]
    weighted = [gram(row.double() * gain.to(row.device).sqrt()).cpu() for row, gain in zip(total, gains)]
    values = torch.linalg.eigvalsh(torch.stack(weighted).sum(0)).flip(0).clamp(min=0.0)
    return GradientNoise(
        optree.tree_unflatten(spec, rows),
        None if draws is None else optree.tree_unflatten(spec, draws),
        optree.tree_unflatten(spec, means),
        values[: min(rank, freedom + (0 if draws is None else m))],
        float(values.sum()),
        m,
        steps_per_epoch,
        order,
    )


def take(batches: Iterable[Any], most: int) -> tuple[list[list[Any]], float | None, str | None]:
    """At most so many batches, in blocks that share no datum; the steps of an epoch and the order, where they say them.

    A tensor, a mapping and a tuple with tensors are one batch. ``epochs`` give their current epoch and, where that is shorter,
    following ones, and stay where they are.
    """
    if not isinstance(batches, Epochs):
        found = list(islice(as_batches(batches), most))
        sizes = [size_of(batch) or 0 for batch in found]
        # a loader that drops nothing ends with a batch that is smaller, and noisier
        return [found[:-1] if len(set(sizes[:-1])) == 1 and sizes[-1] < sizes[0] else found], None, None
    length = min(most, len(batches))
    stride = 2 if batches.order == "palindrome" else 1
    numbers = range(
        batches.epoch, batches.epoch + (1 if batches.order == "fixed" else stride * (most // length)), stride
    )
    blocks = [[batches.batch(epoch, k) for k in range(length)] for epoch in numbers]
    if batches.order == "independent":
        blocks = [[batch for block in blocks for batch in block]]
    return blocks, batches.steps_per_epoch, batches.order


def gradients(loss: Callable[[Any, Any], Any], params: Any, batch: Any) -> list[Tensor]:
    """The gradient of each leaf; zeros where the loss does not use it."""
    return optree.tree_leaves(gradient(loss, params, batch)[0])


@torch.no_grad()
def loss_at(loss: Callable[[Any, Any], Any], params: Any, batch: Any) -> Tensor:
    """The loss of a batch on the processor, 0-d, without a graph."""
    return value(loss, params, batch)[0].cpu()


def size_of(batch: Any) -> int | None:
    """The data in a batch: the length that most of its tensors have along axis 0; ``None`` without one."""
    lengths = Counter(len(x) for x in batch_trees.flatten(batch)[0] if torch.is_tensor(x) and x.ndim)
    return lengths.most_common(1)[0][0] if lengths else None


def rows_of(batch: Any, rows: Any) -> Any:
    """A batch of these rows, in each tensor that is as long as the batch; anything else stays as it is."""
    size = size_of(batch)
    return batch_trees.tree_map(lambda x: x[rows] if torch.is_tensor(x) and x.ndim and len(x) == size else x, batch)


def twice_over_once(loss: Callable[[Any, Any], Any], params: Any, batch: Any) -> tuple[float, float] | None:
    """The loss of a batch twice over that of the batch, 1 of a mean and 2 of a sum, and its error.

    Both are means over 16 seeds, which differ for a loss that draws random numbers, as with dropout; else the error is 0, or
    that of rounding in half precision. ``None`` for a loss that takes no batch twice. Torch's generators are left seeded.
    """
    found, twice = list[Tensor](), rows_of(batch, torch.arange(size_of(batch) or 0, device="cpu").repeat(2))
    try:
        for seed in range(2 * SEEDS):
            seed_all(seed)
            found.append(loss_at(loss, params, twice if seed < SEEDS else batch))
    except Exception:  # a loss may know the size of its batch
        return None
    doubled, once = torch.stack(found).double().split(SEEDS)
    one, error = float(once.mean()), 5 * float(((once.var() + doubled.var()) / SEEDS).sqrt())
    coarsest = max(torch.finfo(x.dtype).eps for x in [found[0], *optree.tree_leaves(params)] if x.is_floating_point())
    rounding = 4 * coarsest if coarsest > 1e-4 else 0.0
    return (float(doubled.mean()) / one, max(error / abs(one), rounding)) if one else (1.0, math.inf)


def require_mean(who: str, loss: Callable[[Any, Any], Any], params: Any, batch: Any) -> tuple[float, float]:
    """Refuse a loss that is a sum over the batch.

    Returns:
        What :func:`twice_over_once` does, ``(1, 0)`` where that is not known.

    Raises:
        ValueError: it is twice as large on a batch that is given twice.
    """
    doubled, error = twice_over_once(loss, params, batch) or (1.0, 0.0)
    if doubled > max(1.5, 1 + error):
        raise ValueError(
            f"{who}: the loss is a sum over the batch: it is {doubled:.3g} times as large on a batch that is given twice; "
            "divide it by the number of data in the batch, a prior beside it by the number of all data, and give the chain "
            "temperature 1 / N"
        )
    return doubled, error


def initialised_devices() -> list[int]:
    """All CUDA devices, if CUDA is in use."""
    return [*range(torch.cuda.device_count())] if torch.cuda.is_initialized() else []


def random_states() -> list[Tensor]:
    """The states of torch's generators of the processor and of the CUDA devices in use."""
    return [torch.get_rng_state(), *[torch.cuda.get_rng_state(device) for device in initialised_devices()]]


def seed_all(seed: int) -> None:
    """Seed torch's generators of the processor and of the CUDA devices in use, and no others."""
    torch.default_generator.manual_seed(seed)
    for device in initialised_devices():
        torch.cuda.default_generators[device].manual_seed(seed)


@checks.takes()
def hessian_product(
    loss: Callable[[Any, Any], Any], params: Any, batches: Iterable[Any], *, max_batches: int = 100
) -> Callable[[Any], Any]:
    """The Hessian of the mean loss over batches as a product ``v -> H v`` on trees like ``params``.

    Args:
        loss, params: as for :func:`gradient_noise`.
        batches: of one size; ``bc.epochs(...)`` gives those of its current epoch. They are kept; a smaller one at the end is
            left out.
        max_batches: use at most so many.

    Returns:
        The product, a function of a tree that returns a tree.

    Raises:
        ValueError: no batch.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> def loss(w, batch):
        ...     return (batch @ w).square().mean() / 2
        >>> batches = [torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 4.0]])]
        >>> product = bc.diagnostics.hessian_product(loss, torch.zeros(2), batches)
        >>> product(torch.ones(2))
        tensor([2., 8.])
    """
    used = take(batches, max_batches)[0][0]
    if not used:
        raise ValueError("hessian_product: batches is empty; pass at least one")
    return product_of(loss, params, used)


def product_of(loss: Callable[[Any, Any], Any], params: Any, used: Sequence[Any]) -> Callable[[Any], Any]:
    """What :func:`hessian_product` returns, of parameters that may be NaN too: its product is NaN then."""
    leaves, spec = optree.tree_flatten(params)
    here = [leaf.detach() for leaf in leaves]

    def product(tree: Any) -> Any:
        require_like(tree, params, "hessian_product: v")
        along, total = optree.tree_leaves(tree), [torch.zeros_like(x) for x in here]
        for batch in used:
            # torch.func refuses what backward() would take for constant: a once_differentiable autograd.Function
            _, curved = curvature.hvp(lambda x, b=batch: value(loss, spec.unflatten(x), b)[0], (here,), (along,))
            total = [x + y for x, y in zip(total, curved)]
        return spec.unflatten([x.detach() / len(used) for x in total])

    return product


def trace(product: Callable[[Any], Any], params: Any, roots: Sequence[Tensor] | None = None, probes: int = 4) -> float:
    """``tr(R H R)`` by random signs (Hutchinson, 1990), ``R`` a diagonal that broadcasts to each leaf (default: ones)."""
    generator, (leaves, spec) = torch.Generator().manual_seed(0), optree.tree_flatten(params)
    total = 0.0
    for _ in range(probes):
        signs = [torch.randint(0, 2, x.shape, generator=generator, device="cpu").to(x) * 2 - 1 for x in leaves]
        v = signs if roots is None else [sign * root for sign, root in zip(signs, roots)]
        total += sum(float((x * y).sum()) for x, y in zip(v, optree.tree_leaves(product(spec.unflatten(v)))))
    return total / probes


def lanczos(
    product: Callable[[Any], Any], like: Any, rank: int, *, tolerance: float = 1e-3, max_products: int = 120
) -> tuple[Tensor, Tensor]:
    """The ``rank`` largest eigenvalues, descending, and their eigenvectors as rows ``[rank, P]``.

    Args:
        product: ``v -> A v`` on trees like ``like``.
        like: a vector, or a tree of ``P`` numbers, of the dtype and device wanted.
        rank: how many; fewer come back where the matrix has fewer.
        tolerance: stop once every residual is below this, relative to the largest eigenvalue.
        max_products: stop after so many products at the latest.

    Raises:
        ValueError: a product that is NaN or infinite.
    """
    generator = torch.Generator().manual_seed(0)
    zero = flatten(like, like).detach()
    n, most = len(zero), min(len(zero), max_products)
    basis = zero.new_zeros(most, n)
    T = torch.zeros(most + 1, most + 1, dtype=torch.float64, device="cpu")

    def fresh(k: int) -> Tensor:
        start = torch.randn(n, generator=generator, dtype=torch.float64, device="cpu").to(zero)
        start = _orthogonal(start, basis[:k])
        return start / start.norm()

    q, values, vectors = fresh(0), T[0, :0], T[:0, :0]
    for k in range(most):
        basis[k] = q
        image = flatten(product(unflatten(q, like)), like)
        T[k, k] = float(q @ image)
        if not bool(T[k, k].isfinite()):
            raise ValueError("a product with the curvature is NaN or infinite; look for NaN in parameters and data")
        rest = _orthogonal(image, basis[: k + 1])
        beta = float(rest.norm())
        values, vectors = torch.linalg.eigh(T[: k + 1, : k + 1])
        scale = max(float(values.abs().amax()), 1e-30)
        found = vectors[:, -rank:]
        restart = beta <= 1e-6 * scale
        if k + 1 >= min(rank, most) and not restart and bool((beta * found[-1].abs() <= tolerance * scale).all()):
            break
        if k + 1 < most:
            q = fresh(k + 1) if restart else rest / beta
            T[k, k + 1] = T[k + 1, k] = 0.0 if restart else beta
    chosen = vectors[:, -rank:].flip(1)
    return values[-rank:].flip(0), chosen.T.to(zero) @ basis[: len(vectors)]


def _orthogonal(v: Tensor, basis: Tensor) -> Tensor:
    for _ in range(2):
        v = v - basis.T @ (basis @ v)
    return v
