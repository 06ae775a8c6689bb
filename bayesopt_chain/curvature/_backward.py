r"""The diagonal of the Gauss-Newton matrix of a model whose parameters only ``backward`` can reach.

A model under ``fully_shard`` or tensor parallelism gathers its parameters itself, so that no function of the parameters can be
differentiated. It can only be run forward, and backward for a ``v`` in the outputs, which leaves each rank its own part of the
gradient ``sum_b J_b^T v_b``. A diagonal needs no more than the squares of such gradients. With ``s_kb`` the columns of the
roots of the data's output Hessians (see :mod:`bayesopt_chain.likelihoods`) and ``D`` the ranks over which gradients are
averaged, each with data of its own,

    exact      diag = sum_b sum_k (J_b^T s_kb)^2                                            a pass for every b and k
    probes     diag = E[(sum_b sum_k e_kb J_b^T s_kb)^2],   e_kb independent random signs     a pass for every probe

where the gradients, which the model averages over the ranks, are multiplied by ``D`` to make them sums before they are squared.
Each rank squares its own elements: the only messages are those of the model's forward and backward passes, and one for the
number of data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain._torch import like, local, reshard
from bayesopt_chain.likelihoods import Likelihood
from bayesopt_chain.precision import Diagonal
from bayesopt_chain.trees import as_tensor, wide


@checks.takes(probes=checks.WHOLE.or_none())
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
            or of the replicas. ``None``, the default, where all ranks see the same data (tensor parallelism), or where there is
            one process.
        generator: a CPU generator for the signs. Ranks that see the same data must seed theirs alike, ranks with data of their
            own must seed theirs differently. Default: torch's global one; under tensor parallelism pass one, since the global
            generators of the ranks may differ.

    Returns:
        ``estimate(batch)`` of ``(inputs, targets)``: the sum over the data of all ranks, a :class:`Diagonal` over
        ``dict(model.named_parameters())``, whose values are sharded as the parameters are. The gradients that the parameters
        hold are left as they were.

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
    _trainable(model)
    drawn_on = torch.device("cpu") if generator is None else generator.device

    def weights_of(mine: Size, sizes: list[Size]) -> Iterator[Tensor]:
        """The weights ``[B, K]`` of this rank's columns in each pass: all ranks take part in every pass, and while the datum is
        one rank's, the others pull zeros back."""
        shape = mine.data, mine.columns
        for _ in range(probes or 0):
            yield torch.randint(2, shape, generator=generator, device=drawn_on) * 2.0 - 1.0
        for size in sizes if probes is None else []:
            for pair in range(size.data * size.columns):
                one = torch.zeros(shape, device="cpu")
                if size == mine:
                    one.view(-1)[pair] = 1.0
                yield one

    def estimate(batch: Any) -> Diagonal:
        params = _trainable(model)
        held = [p.grad for p in params.values()]
        total = [torch.zeros_like(local(p.detach()), dtype=wide(p.dtype)) for p in params.values()]
        try:
            with torch.no_grad():
                outputs = model(batch[0])
            mine = Size(
                0 if mesh is None else dist.get_rank(), len(outputs), likelihood.root(outputs, batch[1]).columns
            )
            sizes = _of_all_ranks(mine, mesh)
            for weights in weights_of(mine, sizes):
                for p in params.values():
                    p.grad = None
                with torch.enable_grad():
                    outputs = model(batch[0])
                root = likelihood.root(outputs.detach(), batch[1])
                outputs.backward(root.combine(weights.to(outputs)))
                for x, p in zip(total, params.values()):
                    if p.grad is not None:
                        gradient = local(p.grad.detach()).to(x.dtype) * len(sizes)
                        x += gradient.square() / (probes or 1)
        finally:
            reshard(model)
            for p, grad in zip(params.values(), held):
                p.grad = grad
        count = as_tensor(float(sum([size.data for size in sizes])), torch.float64, total[0].device)
        return Diagonal({name: like(p, x, 0) for (name, p), x in zip(params.items(), total)}, count)

    return estimate


class Size(NamedTuple):
    """How many data a rank has, and how many columns the root of each."""

    rank: int
    data: int
    columns: int


def _trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that require a gradient, which may have been moved or frozen since the last time."""
    reshard(model)  # after a forward pass alone the outermost module still holds whole parameters
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not params:
        raise ValueError("diagonal_by_backward: no parameter of the model requires a gradient")
    return params


def _of_all_ranks(mine: Size, mesh: Any) -> list[Size]:
    """The sizes of all ranks of a mesh, in the order of their places."""
    every: list[Any] = [mine]
    if mesh is None:
        return every
    for axis in reversed(range(mesh.ndim)):
        parts: list[Any] = [None] * mesh.shape[axis]
        dist.all_gather_object(parts, every, group=mesh.get_group(axis))
        every = [size for part in parts for size in part]
    return every
