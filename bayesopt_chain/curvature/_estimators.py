"""Estimators of curvature: what the batch says about the parameters' precision, for any likelihood in any structure.

    ggn               sum_b J_b^T H_b J_b,  H_b the expected Hessian of the loss in the outputs (its exact root)
    fisher            the same from labels drawn from the model (Monte Carlo), unbiased
    empirical_fisher  sum_b g_b g_b^T,      g_b the gradient of the loss at the observed target
    hessian           sum_b d^2 loss_b / d theta^2, which may be indefinite

All are *summed* over the batch, in units of the likelihood (nats), so that adding the increments of any split of the
data gives the increment of the whole. J_b is the Jacobian of one datum's outputs in the parameters.

Gauss-Newton and Fisher: Schraudolph (2002), Martens (2020). Kronecker factors: Martens and Grosse (2015). Products with the
Hessian: Pearlmutter (1994).

A model can be restricted to some of its parameters, so that the rest costs nothing: the last layer, or a LoRA adapter,

    forward(theta_kept) = forward(theta_kept, theta_frozen),   theta_frozen constant.

Uncertainty in the last layer alone: Snoek et al. (2015); in any part of a network: Daxberger et al. (2021).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.batches import picked
from bayesopt_chain.curvature._autodiff import UNSUPPORTED, double_backward, vjp
from bayesopt_chain.curvature._chunks import BatchPullback, RootOf
from bayesopt_chain.curvature._plan import (
    Forward,
    TapPlan,
    batch_size,
    make_plan,
    pair_targets,
    part,
    parts,
    require_same_outputs,
)
from bayesopt_chain.curvature._structures import STRUCTURES as MAKERS
from bayesopt_chain.curvature._structures import Options, require_dense_fits, structure_sum
from bayesopt_chain.curvature._taps import Check, Checks
from bayesopt_chain.likelihoods import Likelihood, OutputRoot
from bayesopt_chain.likelihoods._likelihood import Explicit
from bayesopt_chain.precision import Dense, Diagonal, Eigenbasis, Kronecker, Precision, shape_only, unflatten
from bayesopt_chain.trees import Tree, as_tensor, common_dtype, flatten, paths, size, widened

Estimate = Callable[[Tree, Any], Precision]
TargetsOf = str | Callable[[Any], Any]

PRODUCT_BYTES = 2**25  # the default bound on what Hessian products hold at once

STRUCTURES = tuple(MAKERS)

STRUCTURE = checks.one_of(*STRUCTURES)
SHARING = checks.one_of("expand", "reduce")


@checks.takes(structure=STRUCTURE, sharing=SHARING, targets=checks.INPUTS)
def ggn(
    forward: Forward,
    likelihood: Likelihood,
    structure: str = "diagonal",
    *,
    rank: int = 10,
    sharing: str = "expand",
    diagonal_above: int | None = None,
    basis: Kronecker | Eigenbasis | None = None,
    chunk_bytes: int | None = None,
    targets: TargetsOf = pair_targets,
) -> Estimate:
    """Estimate the generalised Gauss-Newton matrix, exactly.

    It costs one backward pass for every output of a datum, T (C - 1) for T tokens and C classes; the last layer's
    diagonal costs none. Where outputs are many, :func:`fisher` costs one pass a sample.

    Args:
        forward: ``forward(params, batch) -> outputs [B, *event]``. A datum's outputs may depend on that datum only.
        likelihood: from ``bayesopt_chain.likelihoods``; gives the expected Hessian in the outputs.
        structure: "dense", "root", "diagonal", "kronecker" or "low_rank".
            "kronecker" describes linear layers, attention, convolutions (grouped and transposed ones too), embeddings, a
            weight that several layers use in one way, and any vector; recurrent weights, and a weight that is embedding and
            head at once, are refused.
        rank: how many directions "low_rank" keeps.
        sharing: "expand" or "reduce": how Kronecker factors treat a weight used at many positions.
        diagonal_above: the Kronecker factor of the outputs of a layer that has more of them than this is its diagonal, for
            layers of many classes, whose matrix would cost their third power. Default: none is.
        basis: a Kronecker precision in whose eigenbasis the curvature is measured (EKFAC); with "kronecker" only.
        chunk_bytes: bound on the activations, output gradients and rows held at once, besides the result (and one
            convolution's per-datum weight gradients, 2 MB). One datum and one column are the least possible. Default:
            as much as the result, at least 4 MiB, and up to 256 MiB what 32 pairs of a datum and an output need.
        targets: from a batch to its targets, or their key in it. Default: the second entry of ``batch = (inputs,
            targets)``. A batch is any tree of tensors with one entry a datum on the first axis.

    Returns:
        ``estimate(params, batch)``, a precision summed over the batch, with ``count`` = B, held in float32 at least. Targets of
        weight 0, such as the label -100, are left out, and so are the positions on which no other target depends; their data
        are among the B, as they are in the mean of a loss over the batch.

    Raises:
        ValueError: for an unknown structure; parameters that the structure cannot describe (all are named); batch norm
            in train mode; outputs that mix data; a likelihood whose output Hessian is not positive semidefinite.
        MemoryError: for a dense structure or a Kronecker factor that cannot fit, before it is allocated.

    Example:
        >>> import torch
        >>> from bayesopt_chain import curvature, likelihoods
        >>> forward = lambda params, batch: batch[0] @ params["w"]
        >>> estimate = curvature.ggn(forward, likelihoods.gaussian(), structure="dense")
        >>> estimate({"w": torch.zeros(2, 1)}, (torch.tensor([[1.0, 2.0]]), torch.zeros(1, 1))).to_dense()
        tensor([[1., 2.],
                [2., 4.]])
    """
    return Estimator(
        forward,
        likelihood.root,
        structure,
        chunk_bytes,
        Options(rank, sharing, basis, diagonal_above),
        targets,
        likelihood,
    )


@checks.takes(structure=STRUCTURE, sharing=SHARING, targets=checks.INPUTS, samples=checks.WHOLE)
def fisher(
    forward: Forward,
    likelihood: Likelihood,
    structure: str = "diagonal",
    *,
    samples: int = 1,
    rank: int = 10,
    sharing: str = "expand",
    diagonal_above: int | None = None,
    basis: Kronecker | Eigenbasis | None = None,
    generator: torch.Generator | None = None,
    chunk_bytes: int | None = None,
    targets: TargetsOf = pair_targets,
) -> Estimate:
    """Estimate the Fisher information matrix from labels drawn from the model; unbiased.

    Its cost does not grow with the number of outputs. The exact Fisher information is :func:`ggn`.

    Args:
        forward, likelihood, structure, rank, sharing, diagonal_above, basis, chunk_bytes, targets: as for :func:`ggn`.
        samples: labels drawn for each datum, at least 1; each costs a backward pass.
        generator: for the labels; None is the global one.

    Returns:
        ``estimate(params, batch)``, as for :func:`ggn`.

    Raises:
        ValueError, MemoryError: as for :func:`ggn`.

    Example:
        >>> import torch
        >>> from bayesopt_chain import curvature, likelihoods
        >>> forward = lambda params, batch: batch[0] @ params
        >>> estimate = curvature.fisher(forward, likelihoods.bernoulli(), generator=torch.Generator().manual_seed(0))
        >>> estimate(torch.zeros(2, 1), (torch.ones(3, 2), torch.ones(3, 1))).count
        tensor(3., dtype=torch.float64)
    """

    def root_of(outputs: Tensor, labels: Any) -> OutputRoot:
        return Explicit(likelihood.sampled_factors(outputs, labels, samples, generator))

    options = Options(rank, sharing, basis, diagonal_above)
    return Estimator(forward, root_of, structure, chunk_bytes, options, targets, likelihood, draws=True)


@checks.takes(structure=STRUCTURE, sharing=SHARING, targets=checks.INPUTS)
def empirical_fisher(
    forward: Forward,
    likelihood: Likelihood,
    structure: str = "diagonal",
    *,
    rank: int = 10,
    sharing: str = "expand",
    diagonal_above: int | None = None,
    basis: Kronecker | Eigenbasis | None = None,
    chunk_bytes: int | None = None,
    targets: TargetsOf = pair_targets,
) -> Estimate:
    """Estimate the sum of squared gradients at the observed targets.

    It is not the Fisher information unless the model is right and trained; Kunstner et al. 2019 say what goes wrong.

    Args:
        forward, likelihood, structure, rank, sharing, diagonal_above, basis, chunk_bytes, targets: as for :func:`ggn`.

    Returns:
        ``estimate(params, batch)``, as for :func:`ggn`.

    Raises:
        ValueError, MemoryError: as for :func:`ggn`.

    Example:
        >>> import torch
        >>> from bayesopt_chain import curvature, likelihoods
        >>> forward = lambda params, batch: batch[0] @ params
        >>> estimate = curvature.empirical_fisher(forward, likelihoods.gaussian())
        >>> estimate(torch.zeros(1, 1), (torch.ones(1, 1), torch.full((1, 1), 3.0))).diag()
        tensor([[9.]])
    """

    def root_of(outputs: Tensor, labels: Any) -> OutputRoot:
        return Explicit(likelihood.gradient(outputs, labels)[None])

    return Estimator(
        forward, root_of, structure, chunk_bytes, Options(rank, sharing, basis, diagonal_above), targets, likelihood
    )


@checks.takes(
    structure=checks.one_of("dense", "diagonal")._replace(hint="a Hessian has no root; others are curvature.ggn's"),
    targets=checks.INPUTS,
)
def hessian(
    forward: Forward,
    likelihood: Likelihood,
    structure: str = "dense",
    *,
    chunk_bytes: int | None = None,
    targets: TargetsOf = pair_targets,
) -> Estimate:
    """Take the Hessian of the batch's summed loss by Hessian-vector products.

    It may be indefinite, so that it has no root: structures that need one are refused, and ``solve`` raises where the
    precision is not positive definite.

    Args:
        forward, likelihood, targets: as for :func:`ggn`.
        structure: "dense", the default, or "diagonal"; both are exact by P products.
        chunk_bytes: bound on the products held at once; default 32 MiB.

    Returns:
        ``estimate(params, batch)``, a :class:`~bayesopt_chain.precision.Dense` or
        :class:`~bayesopt_chain.precision.Diagonal` precision summed over the batch, with ``count`` = B.

    Raises:
        ValueError: for another structure, or outputs that mix data.
        MemoryError: for a dense structure that cannot fit.

    Example:
        >>> import torch
        >>> from bayesopt_chain import curvature, likelihoods
        >>> estimate = curvature.hessian(lambda params, batch: batch[0] * params, likelihoods.poisson())
        >>> estimate(torch.tensor(0.0), (torch.full((1, 1), 2.0), torch.ones(1, 1))).to_dense()
        tensor([[4.]])
    """
    labels_of = picked(targets, pair_targets)

    @torch.no_grad()
    def estimate(params: Tree, batch: Any) -> Precision:
        labels = labels_of(batch)
        like, n = shape_only(params), batch_size(batch)
        plan = make_plan(forward, params, batch)
        require_same_outputs(forward(params, part(batch, max(0, n - 2), n)), plan)
        if structure == "dense":
            require_dense_fits(size(params), common_dtype(params), plan.probe.device)
        activations = sum(leaf.numel() for leaf in plan.probe_outputs) + plan.probe.numel()
        data = max(1, min(n, (chunk_bytes or PRODUCT_BYTES) // (16 * activations * plan.probe.element_size())))
        total: Any = 0
        for some, of_some in parts((batch, labels), data):
            products = _hessian_products(forward, likelihood, params, some, of_some, like)
            total = total + _columns(products, params, chunk_bytes, structure == "diagonal")
        count = as_tensor(n, torch.float64, plan.probe.device)
        return Dense(total, like, count) if structure == "dense" else Diagonal(unflatten(total, widened(params)), count)

    return estimate


class Estimator:
    """``estimate(params, batch)``: a precision made of a root of the output Hessian. It remembers what has been checked."""

    def __init__(
        self,
        forward: Forward,
        root_of: RootOf,
        structure: str,
        chunk_bytes: int | None,
        options: Options,
        targets: TargetsOf,
        likelihood: Likelihood,
        draws: bool = False,
    ) -> None:
        self.forward, self.root_of, self.structure = forward, root_of, structure
        self.chunk_bytes, self.options, self.draws = chunk_bytes, options, draws
        self.checks, self.labels_of, self.likelihood = Checks(), picked(targets, pair_targets), likelihood

    def __call__(self, params: Tree, batch: Any) -> Precision:
        return self._run(params, batch, None)

    def with_outputs(self, params: Tree, batch: Any) -> tuple[Precision, Tensor]:
        """Return the precision and the outputs of the batch, ``[B, *event]``, of one and the same forward pass."""
        seen: list[Tensor] = []
        precision = self._run(params, batch, seen)
        return precision, torch.cat(seen[::-1])  # chunks come last data first

    @torch.no_grad()
    def _run(self, params: Tree, batch: Any, seen: list[Tensor] | None) -> Precision:
        labels = self.labels_of(batch)

        def work(plan: TapPlan, check: Check) -> Precision:
            if seen:
                seen.clear()  # outputs of a pass that was given up because the program had changed
            total = structure_sum(self.structure, params, self.options)
            pullback = BatchPullback(
                self.forward,
                params,
                batch,
                labels,
                self.root_of,
                total,
                self.chunk_bytes,
                self.draws,
                self.likelihood,
            )
            for chunk in pullback.chunks(plan, check):
                total.add(chunk)
                if seen is not None and chunk.first:
                    seen.append(chunk.outputs)
                del chunk  # before the next one is made
            return total.finish(as_tensor(batch_size(batch), torch.float64, plan.probe.device))

        return self.checks.run(params, batch, lambda: make_plan(self.forward, params, batch), work)


def _hessian_products(
    forward: Forward, likelihood: Likelihood, params: Tree, chunk: Any, labels: Any, like: Tree
) -> Callable[[Tensor], Tensor]:
    """Return ``products(V [M, P]) -> H V [M, P]``: the gradient's pullback, which for a symmetric matrix is the
    product.
    """

    def loss(vector: Tensor) -> Tensor:
        return likelihood.nll(forward(unflatten(vector, like), chunk), labels).sum()

    def linearise() -> Callable[[Tensor], Tensor]:
        _, pull = vjp(torch.func.grad(loss), flatten(params, like))
        return lambda vectors: torch.vmap(lambda v: pull(v)[0])(vectors)

    zero = torch.zeros(1, size(like), dtype=common_dtype(params), device=_device(params))
    products = linearise()
    try:
        products(zero)
    except UNSUPPORTED:
        with double_backward():
            products = linearise()
            products(zero)
    return products


def _device(params: Tree) -> torch.device:
    """Return the device of the first leaf."""
    return optree.tree_leaves(params)[0].device


def _columns(products: Any, params: Tree, chunk_bytes: int | None, diagonal: bool) -> Tensor:
    """Return the Hessian ``[P, P]``, or its diagonal ``[P]``, from products with unit vectors, a chunk of them at a
    time.
    """
    parameters, dtype, device = size(params), common_dtype(params), _device(params)
    at_once = max(1, (chunk_bytes or PRODUCT_BYTES) // (3 * parameters * dtype.itemsize))
    pieces = []
    for start in range(0, parameters, at_once):
        stop = min(parameters, start + at_once)
        units = torch.zeros(stop - start, parameters, dtype=dtype, device=device)
        units[:, start:stop].fill_diagonal_(1)
        rows = products(units)
        pieces.append(rows[:, start:stop].diagonal() if diagonal else rows)
    return torch.cat(pieces)


def subset(
    forward: Callable[[Tree, Any], Tensor], params: Tree, keep: Sequence[str] | str | Callable[[str], bool] | Tree
) -> tuple[Callable[[dict[str, Tensor], Any], Tensor], dict[str, Tensor]]:
    """Keep some parameters and freeze the others at their values.

    Args:
        forward: ``forward(params, batch) -> outputs``.
        params: the whole tree.
        keep: a name or names (``"head"`` keeps ``head`` and everything under it; ``*`` matches anything), a function
            from a name to whether it is kept, or a tree of booleans that is a prefix of params. A leaf's name is its
            path joined by dots.

    Returns:
        ``(forward, kept)``: a forward function of the kept parameters, and the kept parameters, ``{name: leaf}``. In layers
        before the first kept parameter nothing is differentiated, and no activation is stored.

    Raises:
        ValueError: when a name matches nothing, nothing is kept, or the mask is no prefix of params.

    Example:
        >>> import torch
        >>> from bayesopt_chain import curvature
        >>> params = {"body": torch.ones(2, 2), "head": {"w": torch.ones(2, 1)}}
        >>> forward, kept = curvature.subset(lambda p, batch: batch[0] @ p["body"] @ p["head"]["w"], params, "head")
        >>> list(kept), forward(kept, (torch.ones(1, 2), None))
        (['head.w'], tensor([[4.]]))
    """
    leaves, structure = optree.tree_flatten(params)
    names = paths(params)
    chosen = _chosen(keep, names, params)
    if not any(chosen):
        raise ValueError(f"keep={keep!r} keeps none of the parameters {', '.join(names)}")
    kept = {name: leaf for name, leaf, is_kept in zip(names, leaves, chosen) if is_kept}
    frozen = optree.tree_unflatten(structure, [leaf.detach() for leaf in leaves])
    return partial(_with_kept, forward, frozen, names), kept


def _with_kept(
    forward: Callable[[Tree, Any], Tensor], frozen: Tree, names: list[str], some: dict[str, Tensor], batch: Any
) -> Tensor:
    """The outputs for some of the parameters, by their names, the others at their frozen values."""
    leaves, structure = optree.tree_flatten(frozen)
    chosen = [some.get(name, leaf) for name, leaf in zip(names, leaves)]
    return forward(optree.tree_unflatten(structure, chosen), batch)


def _chosen(keep: Any, names: list[str], params: Tree) -> list[bool]:
    if isinstance(keep, str):
        keep = [keep]
    if callable(keep):
        return [bool(keep(name)) for name in names]
    if isinstance(keep, (list, tuple)) and keep and all(isinstance(pattern, str) for pattern in keep):
        for pattern in keep:
            if not any(_matches(name, pattern) for name in names):
                raise ValueError(f"keep={pattern!r} matches none of the parameters {', '.join(names)}")
        return [any(_matches(name, pattern) for pattern in keep) for name in names]
    mask: Tree = keep
    try:
        bits: list[Any] = optree.broadcast_prefix(mask, params)
    except ValueError:
        bits = [None]
    if not all(isinstance(bit, bool) for bit in bits):
        raise ValueError(
            f"keep={checks.short(keep)} is no prefix of params: pass names, a function of a name, or a tree of booleans"
        )
    return bits


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, pattern + ".*")
