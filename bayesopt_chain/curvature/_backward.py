r"""The diagonal of the Gauss-Newton matrix of a model whose parameters only ``backward`` can reach.

A model under ``fully_shard`` or tensor parallelism gathers its parameters itself, so that no function of the parameters can be
differentiated: what there is are outputs, and a backward pass that leaves each rank its part of ``sum_b J_b^T v_b``. Squared,
that is all a diagonal needs. With ``s_kb`` the columns of the roots of the data's output Hessians (see
:mod:`bayesopt_chain.likelihoods`) and ``D`` the ranks over which gradients are averaged, each with data of its own,

    exact      diag = sum_b sum_k (J_b^T s_kb)^2                                            a pass for every b and k
    probes     diag = E[(sum_b sum_k e_kb J_b^T s_kb)^2],   e_kb independent random signs     a pass for every probe

where an average over ranks is multiplied by ``D`` before it is squared. Squares are taken of each rank's own elements: the
messages are those of the model's forward and backward passes, and one for the number of data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bayesopt_chain._torch import dtensor_of, is_dtensor, local_of, spec_of, stacked_spec
from bayesopt_chain.likelihoods import Likelihood
from bayesopt_chain.precision import Diagonal
from bayesopt_chain.precision._algebra import as_count
from bayesopt_chain.trees import wide


def diagonal_by_backward(
    model: torch.nn.Module,
    likelihood: Likelihood,
    *,
    probes: int | None = None,
    mesh: Any = None,
    generator: torch.Generator | None = None,
) -> Callable[[Any], Diagonal]:
    """Estimate the diagonal of the Gauss-Newton matrix by backward passes, also of a model that is sharded over ranks.

    For a model in one process :func:`bayesopt_chain.curvature.ggn` gives the same diagonal faster, since it treats many data in
    one pass. This one asks nothing of a model but ``backward``: it is for ``fully_shard`` and tensor parallelism. Gauss-Newton
    matrix: Schraudolph (2002); diagonals from random signs: Hutchinson (1989).

    Args:
        model: called as ``model(inputs)``, with outputs ``[B, *event]`` in which no datum depends on another; put it into
            ``eval()`` first. Its parameters that require a gradient are those of the diagonal.
        likelihood: of :mod:`bayesopt_chain.likelihoods`.
        probes: estimate the diagonal from this many random signs a datum, unbiased, with variance at most ``2 diag^2 / probes``
            for each batch; ``None``, the default, is exact, a forward and backward pass for each datum and output factor.
        mesh: the ranks over which the model averages its gradients, each with data of its own: the mesh of ``fully_shard``,
            or of the replicas. ``None``, the default, where all ranks see the same data (tensor parallelism), or there is one.
        generator: for the signs, on the CPU; ranks that see the same data need one seed, others need several. Default: the
            global one, which is not to be relied on under tensor parallelism.

    Returns:
        ``estimate(batch)`` of ``(inputs, targets)``: the sum over the data of all ranks, a :class:`Diagonal` over
        ``dict(model.named_parameters())``, whose values lie as the parameters do. Gradients that the parameters hold stay.

    Raises:
        ValueError: ``probes`` below 1; a model without parameters that require a gradient; at the estimate, as
            :meth:`bayesopt_chain.likelihoods.Likelihood.root`.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> model, likelihood = torch.nn.Linear(3, 2), bc.likelihoods.categorical()
        >>> batch = torch.randn(5, 3), torch.randint(2, (5,))
        >>> found = bc.curvature.diagonal_by_backward(model, likelihood)(batch)
        >>> params, forward = dict(model.named_parameters()), lambda p, b: torch.func.functional_call(model, p, (b[0],))
        >>> wanted = bc.curvature.ggn(forward, likelihood, "diagonal")(params, batch)
        >>> torch.allclose(found.values["weight"], wanted.values["weight"], atol=1e-6), found.count.item()
        (True, 5.0)
    """
    if probes is not None and (isinstance(probes, bool) or not isinstance(probes, int) or probes < 1):
        raise ValueError(f"diagonal_by_backward: probes must be a whole number of at least 1, or None, got {probes!r}")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("diagonal_by_backward: no parameter of the model requires a gradient")
    ranks = 1 if mesh is None else mesh.size()

    def estimate(batch: Any) -> Diagonal:
        params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        held = {name: p.grad for name, p in params.items()}
        total = {name: torch.zeros_like(_local(p), dtype=wide(p.dtype)) for name, p in params.items()}

        def square(weights_of: Callable[[int, int], Tensor | None], share: float) -> None:
            """Add the square of one backward pass; this rank's part of it weighs the columns of the roots, ``[B, K]``."""
            for p in params.values():
                p.grad = None
            outputs = model(batch[0])
            root = likelihood.root(outputs.detach(), batch[1])
            weights = weights_of(len(outputs), root.columns)
            outputs.backward(torch.zeros_like(outputs) if weights is None else root.combine(weights.to(outputs)))
            for name, p in params.items():
                if p.grad is not None:
                    total[name] += (_local(p.grad).to(total[name].dtype) * ranks).square() * share

        try:
            n, columns = _shape(model, likelihood, batch)
            sizes = _of_every_rank((n, columns), mesh)
            if probes is not None:
                for _ in range(probes):
                    square(lambda n, k: torch.randint(2, (n, k), generator=generator) * 2.0 - 1.0, 1.0 / probes)
            else:
                own = 0 if mesh is None else mesh.get_local_rank()
                for rank, (data, each) in enumerate(sizes):  # one rank after the other, the others with zeros
                    for b in range(data):
                        for k in range(each):
                            square(lambda n, m, b=b, k=k, mine=rank == own: _one(n, m, b, k) if mine else None, 1.0)
        finally:
            for name, p in params.items():
                p.grad = held[name]
        values = {name: _like(p, total[name]) for name, p in params.items()}
        device = next(iter(total.values())).device
        return Diagonal(values, as_count(float(sum([data for data, _ in sizes])), device))

    return estimate


def _one(n: int, columns: int, b: int, k: int) -> Tensor:
    weights = torch.zeros(n, columns)
    weights[b, k] = 1.0
    return weights


def _shape(model: torch.nn.Module, likelihood: Likelihood, batch: Any) -> tuple[int, int]:
    """Data, and output factors of each."""
    with torch.no_grad():
        outputs = model(batch[0])
    return len(outputs), likelihood.root(outputs, batch[1]).columns


def _of_every_rank(sizes: tuple[int, int], mesh: Any) -> list[tuple[int, int]]:
    if mesh is None:
        return [sizes]
    group = mesh.get_group()
    device = torch.device("cpu" if dist.get_backend(group) == "gloo" else mesh.device_type)
    mine = torch.tensor(sizes, device=device)
    every = [torch.empty_like(mine) for _ in range(mesh.size())]
    dist.all_gather(every, mine, group=group)
    return [(int(n), int(k)) for n, k in every]


def _local(x: Any) -> Tensor:
    return local_of(x.detach()) if is_dtensor(x) else x.detach()


def _like(p: Any, x: Tensor) -> Tensor:
    return dtensor_of(x, stacked_spec(spec_of(p), x, 0)) if is_dtensor(p) else x
