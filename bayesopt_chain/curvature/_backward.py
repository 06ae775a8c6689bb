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

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain._torch import like, local, reshard
from bayesopt_chain.likelihoods import Likelihood
from bayesopt_chain.precision import Diagonal
from bayesopt_chain.trees import as_tensor, wide


@checks.takes()
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
    if probes is not None and (isinstance(probes, bool) or not isinstance(probes, int) or probes < 1):
        raise ValueError(f"diagonal_by_backward: probes must be a whole number of at least 1, or None, got {probes!r}")
    passes = BackwardPasses(model, mesh, "diagonal_by_backward")
    drawn_on = torch.device("cpu") if generator is None else generator.device

    def estimate(batch: Any) -> Diagonal:
        with passes:
            with torch.no_grad():
                outputs = model(batch[0])
            n, columns = len(outputs), likelihood.root(outputs, batch[1]).columns
            sizes = passes.sizes(n, columns)
            total = [torch.zeros_like(local(p.detach()), dtype=wide(p.dtype)) for p in passes.params.values()]

            def square(weights_of: Callable[[int, int], Tensor | None], share: float) -> None:
                """Add ``share`` times the squared gradients of one backward pass.

                ``weights_of(B, K)`` gives the weights ``[B, K]`` of the columns of this rank's roots; ``None`` for zeros.
                """

                def columns_of(outputs: Tensor) -> Tensor:
                    root = likelihood.root(outputs, batch[1])
                    weights = weights_of(len(outputs), root.columns)
                    return torch.zeros_like(outputs) if weights is None else root.combine(weights.to(outputs))

                for x, g in zip(total, passes.gradients(batch[0], columns_of)):
                    x += g.to(x.dtype).square() * share

            if probes is not None:
                for _ in range(probes):
                    square(
                        lambda n, k: torch.randint(2, (n, k), generator=generator, device=drawn_on) * 2.0 - 1.0,
                        1.0 / probes,
                    )
            else:
                # All ranks take part in every pass: while the datum is one rank's, the others pull zeros back.
                for rank, (data, each) in enumerate(sizes):
                    for b in range(data):
                        for k in range(each):
                            mine = rank == passes.place
                            square(lambda n, m, b=b, k=k, mine=mine: _one(n, m, b, k) if mine else None, 1.0)
        count = as_tensor(float(sum([data for data, _ in sizes])), torch.float64, total[0].device)
        return Diagonal(passes.tree(total), count)

    return estimate


class BackwardPasses:
    """Backward passes through a model whose parameters no function can reach; every rank gets its own part of the gradients.

    To be used as a context, at whose end the parameters hold the gradients that they held before.

    Args:
        model: called as ``model(inputs)``.
        mesh: the ranks over which the model averages its gradients, each with data of its own; ``None`` where none does.
        who: the name of the calling function, with which refusals begin.

    Attributes:
        params: the parameters that require a gradient, by name.
        ranks: the number of ranks of the mesh.
        place: this rank's number among them.

    Raises:
        ValueError: no parameter requires a gradient.
    """

    def __init__(self, model: torch.nn.Module, mesh: Any, who: str) -> None:
        self.model, self.mesh, self.who = model, mesh, who
        self.ranks = 1 if mesh is None else mesh.size()
        self.place = 0
        if mesh is not None:
            for i, n in zip(mesh.get_coordinate(), mesh.shape):
                self.place = self.place * n + i
        self.params: dict[str, Any] = {}
        self._find()

    def _find(self) -> None:
        """Look the parameters up, which may have been moved or frozen since the last time."""
        reshard(self.model)  # after a forward pass alone the outermost module still holds whole parameters
        self.params = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if not self.params:
            raise ValueError(f"{self.who}: no parameter of the model requires a gradient")

    def __enter__(self) -> BackwardPasses:
        self._find()
        self._held = [p.grad for p in self.params.values()]
        return self

    def __exit__(self, *error: Any) -> None:
        reshard(self.model)
        for p, grad in zip(self.params.values(), self._held):
            p.grad = grad

    def gradients(self, inputs: Any, weights_of: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """This rank's part of ``sum_b J_b^T v_b`` over the data of all ranks, by parameter.

        Args:
            inputs: this rank's, handed to the model.
            weights_of: a function from this rank's outputs ``[B, *event]`` to its ``v`` of the same shape.
        """
        for p in self.params.values():
            p.grad = None
        with torch.enable_grad():
            outputs = self.model(inputs)
        outputs.backward(weights_of(outputs.detach()))
        return [
            torch.zeros_like(local(p.detach())) if p.grad is None else local(p.grad.detach()) * self.ranks
            for p in self.params.values()
        ]

    def sizes(self, *sizes: int) -> list[tuple[int, ...]]:
        """Gather these numbers from all ranks: one tuple a rank, in the order of their places."""
        mine = torch.tensor([sizes], device=self._device())
        return [tuple(row) for row in self._every(mine).tolist()]

    def _every(self, x: Tensor) -> Tensor:
        """Concatenate the tensors of all ranks, in the order of their places."""
        if self.mesh is None:
            return x
        for axis in reversed(range(self.mesh.ndim)):
            blocks = [torch.empty_like(x) for _ in range(self.mesh.shape[axis])]
            dist.all_gather(blocks, x.contiguous(), group=self.mesh.get_group(axis))
            x = torch.cat(blocks)
        return x

    def _device(self) -> torch.device:
        if self.mesh is None or dist.get_backend(self.mesh.get_group(0)) == "gloo":
            return torch.device("cpu")
        return torch.device(self.mesh.device_type)

    def tree(self, values: list[Tensor]) -> dict[str, Tensor]:
        """Put local tensors, one for each parameter, into a dictionary by the parameters' names.

        Where a parameter is a DTensor so is the result. A tensor has its parameter's local shape, or further axes in front.
        """
        return {name: like(p, x, x.ndim - p.ndim) for (name, p), x in zip(self.params.items(), values, strict=True)}


def _one(n: int, columns: int, b: int, k: int) -> Tensor:
    weights = torch.zeros(n, columns, device="cpu")
    weights[b, k] = 1.0
    return weights
