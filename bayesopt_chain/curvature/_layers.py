r"""Kronecker factors of a model under ``fully_shard``, one layer after the other.

A layer's factors are sums over data of what the layer saw and of the gradients of its outputs,

    A = sum_b x_b x_b^T,       G = sum_b sum_k g_kb g_kb^T,       g_kb = (d outputs_b / d layer's output)^T s_kb,

with ``s_kb`` the columns of the root of the data's output Hessians. Only the parameters are sharded: while the model runs,
every rank has the whole x and g of its own data. So each rank taps the layers as they compute (``_taps.py``), takes one
backward pass for each column, to the layers' outputs and not to the parameters, and forms the two factors of one layer at a
time. The ranks' factors are added up at the rank that owns the layer, and the others drop theirs. Beside those of the model's
own passes that is one message for each factor: two for a weight, and one more for its bias.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain import kinds
from bayesopt_chain._torch import dtensor_of, is_dtensor, local_of, reshard, spec_of, stacked_spec
from bayesopt_chain.curvature._backward import BackwardPasses
from bayesopt_chain.curvature._chunks import Chunk, Gradient, Linearised, Pulled, _gradients
from bayesopt_chain.curvature._plan import (
    UNUSED,
    TapPlan,
    batch_size,
    misplaced,
    pair_targets,
    part,
    require_same_outputs,
)
from bayesopt_chain.curvature._structures import KroneckerSum
from bayesopt_chain.curvature._taps import Taps
from bayesopt_chain.likelihoods import Likelihood
from bayesopt_chain.precision import Kronecker, LayersOnRanks
from bayesopt_chain.precision._algebra import as_count
from bayesopt_chain.precision._layers_on_ranks import collect, kronecker_of_own, owners_of

WHO = "kronecker_by_backward"


@kinds.takes()
def kronecker_by_backward(
    model: torch.nn.Module, likelihood: Likelihood, *, mesh: Any = None, sharing: str = "expand"
) -> Callable[[Any], LayersOnRanks | Kronecker]:
    """Estimate the Kronecker factors of the Gauss-Newton matrix of a module, also of one under ``fully_shard``.

    For a model in one process :func:`bayesopt_chain.curvature.ggn` gives the same factors, with bounds on memory. This one
    watches the module as it runs, whoever holds its parameters: each rank sees its own data, the sums of a layer go to the rank
    that owns the layer, and no rank keeps another's factors. K-FAC: Martens and Grosse (2015).

    Args:
        model: called as ``model(inputs)``, with outputs ``[B, *event]`` in which no datum depends on another; put it into
            ``eval()`` first. Its parameters that require a gradient are those of the precision: the layers of :func:`ggn`'s
            structure "kronecker" are described.
        likelihood: of :mod:`bayesopt_chain.likelihoods`. Every target counts once.
        mesh: the mesh of ``fully_shard``, over which the data differ: of one axis, or of two (HSDP). ``None``, the default, for
            a model in one process.
        sharing: "expand" (default) or "reduce": how a weight that is used at many positions is treated.

    Returns:
        ``estimate(batch)`` of ``(inputs, targets)``, to be called on all ranks: the sum over the data of all, with ``mesh`` a
        :class:`~bayesopt_chain.precision.LayersOnRanks` over ``dict(model.named_parameters())``, without one a
        :class:`~bayesopt_chain.precision.Kronecker`. It holds the output gradients of all layers for the rank's batch and all
        columns of the output Hessian's root at once; take small batches, and add them up by ``bc.laplace``. The gradients that
        the parameters hold are left as they were.

    Raises:
        ValueError: no parameter that requires a gradient, ``sharing`` misspelt; with ``mesh``, parameters that are not DTensors
            over it. At the estimate, on every rank: parameters that Kronecker factors cannot describe (all are named), layers
            that compute with DTensors (tensor parallelism), outputs that mix data, targets with weights other than 1, ranks
            with other numbers of columns, and a rank without data.
        MemoryError: for a factor that cannot fit.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> model, likelihood = torch.nn.Linear(3, 2), bc.likelihoods.categorical()
        >>> batch = torch.randn(5, 3), torch.randint(2, (5,))
        >>> found = bc.curvature.kronecker_by_backward(model, likelihood)(batch)
        >>> params, forward = dict(model.named_parameters()), lambda p, b: torch.func.functional_call(model, p, (b[0],))
        >>> wanted = bc.curvature.ggn(forward, likelihood, "kronecker")(params, batch)
        >>> torch.allclose(found.left["weight"], wanted.left["weight"], atol=1e-6), found.count.item()
        (True, 5.0)
    """
    if sharing not in ("expand", "reduce"):
        raise ValueError(f"{WHO}: sharing={sharing!r}: pass 'expand' or 'reduce'")
    passes = BackwardPasses(model, mesh, WHO)
    if mesh is not None:
        wrong = [name for name, p in passes.params.items() if not is_dtensor(p) or p.device_mesh != mesh]
        if wrong:
            raise ValueError(
                f"{WHO}: {', '.join(wrong[:4])}{', ...' if len(wrong) > 4 else ''} not sharded over mesh: fully_shard(model, "
                "mesh=mesh) first; for replicas take bc.curvature.ggn on each and add their factors up"
            )

    def estimate(batch: Any) -> LayersOnRanks | Kronecker:
        with passes:
            names = sorted(passes.params)
            like = [_whole_template(passes.params[name]) for name in names]
            failure: Exception | None = None
            n, columns = 0, 0
            plan: Any = None
            root: Any = None
            with torch.no_grad():
                try:
                    n = batch_size(batch)
                    last = part(batch, n - 1, n)
                except Exception as err:
                    failure, last = err, batch
                _agree(passes, failure)
                taps, outputs, foreign = _run(model, last[0], 1, None, passes.params)
                try:
                    plan = _plan(names, taps, outputs, foreign)
                    _require_described(plan)
                    KroneckerSum(like, sharing).accepts(plan)  # refuses factors that do not fit
                    _require_counted_once(likelihood, batch)
                    columns = likelihood.root(outputs, pair_targets(last)).columns
                except Exception as err:
                    failure = err
                sizes = _agree(passes, failure, n, columns)
            if len({each for _, each in sizes}) > 1:
                raise ValueError(
                    f"{WHO}: ranks have {[each for _, each in sizes]} columns of the output Hessian's root"
                )
            zeros = [
                outputs.new_zeros((), dtype=dtype)
                .expand((n * shape[0], *shape[1:]) if shape else shape)
                .requires_grad_()
                for shape, dtype in plan.shapes
            ]
            with torch.enable_grad():
                taps, outputs, _ = _run(model, batch[0], n, zeros, passes.params)
            try:
                require_same_outputs(outputs.detach(), plan)
                plan = plan.untap({**taps.untapped, **misplaced(taps.uses, taps.outputs, plan)})
                _require_described(plan)
                root = likelihood.root(outputs.detach(), pair_targets(batch))
            except Exception as err:
                failure = err
            _agree(passes, failure)
            pulled = _pull(outputs, zeros, root, columns)
            seen = Linearised(batch, n, outputs.detach(), taps.uses, taps.inputs, None, None, {}, taps.outputs)
            del outputs  # and the graph
            count = as_count(float(sum(size for size, _ in sizes)), zeros[0].device)
            return _factors(passes, names, like, sharing, seen, pulled, plan, count)

    return estimate


def _factors(
    passes: BackwardPasses,
    names: list[str],
    like: list[Tensor],
    sharing: str,
    seen: Linearised,
    pulled: Pulled,
    plan: TapPlan,
    count: Tensor,
) -> LayersOnRanks | Kronecker:
    """Form both factors of one layer after the other, each added up over the ranks at the layer's owner."""
    units: dict[int, list[Gradient]] = {}
    first_use = {use.leaf: use.tap for use in reversed(seen.uses)}
    for gradient in _gradients(seen, pulled, plan, set(), None):
        units.setdefault(first_use[gradient.leaf], []).append(gradient)
    layers = list(units.values())
    owners = owners_of([[size for g in layer for size in g.kind.factors()] for layer in layers], passes.ranks)
    mine: list[tuple[list[str], Kronecker]] = []
    of_leaf = {g.leaf: owner for layer, owner in zip(layers, owners) for g in layer}
    for layer, owner in zip(layers, owners):
        leaves = [names[g.leaf] for g in layer]
        total = KroneckerSum({str(i): like[g.leaf] for i, g in enumerate(layer)}, sharing)
        chunk = [g._replace(leaf=i) for i, g in enumerate(layer)]
        total.add(Chunk(seen.size, seen.outputs, True, chunk, []))
        block = total.finish(count)
        if passes.mesh is not None:
            for factor in {id(x): x for x in (*block.left.values(), *block.right.values())}.values():
                collect(factor, passes.mesh, owner)
        if owner == passes.place:
            left, right, diagonal, shapes = (
                {name: field[str(i)] for i, name in enumerate(leaves)}
                for field in (block.left, block.right, block.diagonal, block.like)
            )
            mine.append((leaves, Kronecker(left, right, diagonal, shapes, count)))
    own = kronecker_of_own(mine, count)
    if passes.mesh is None:
        return own
    templates = {name: _template(passes.params[name]) for name in names}
    return LayersOnRanks(own, templates, torch.tensor([of_leaf[i] for i in range(len(names))], device="cpu"), count)


def _run(
    model: torch.nn.Module, inputs: Any, data: int, zeros: list[Tensor] | None, params: dict[str, Any]
) -> tuple[Taps, Tensor, set[str]]:
    """Run a module tapped: what the taps saw, the outputs, and the parameters with which a layer computes as DTensors."""
    taps = Taps([], data, zeros)
    with _watched(model, taps, params) as foreign, taps:
        outputs = model(inputs)
    return taps, outputs, foreign


@contextmanager
def _watched(model: torch.nn.Module, taps: Taps, params: dict[str, Any]) -> Iterator[set[str]]:
    """Tell the taps, while each module computes, which tensors are its parameters now.

    ``fully_shard`` puts other tensors in the parameters' places before a module computes. Before and after that it gathers and
    splits them by torch functions, which must not count as uses: so they are known inside the module only.
    """
    number = {name: i for i, name in enumerate(sorted(params))}
    first = {id(p): name for name, p in params.items()}
    reshard(model)
    known_as = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False) if id(p) in first}
    foreign: set[str] = set()

    outer: list[dict[int, tuple[int, bool]]] = []  # what was known in the modules around the one that computes

    def watch(module: torch.nn.Module, prefix: str) -> list[Any]:
        def enter(module: torch.nn.Module, args: Any) -> None:
            outer.append(dict(taps.known))
            for name, p in module.named_parameters(prefix, remove_duplicate=False):
                if (known := known_as.get(name)) is None:
                    continue
                if not is_dtensor(p):
                    taps.known[id(p)] = (number[known], False)
                elif name.rpartition(".")[0] == prefix:  # those of modules inside this one may still be sharded
                    foreign.add(known)

        def leave(module: torch.nn.Module, args: Any, out: Any) -> None:
            taps.known = outer.pop()

        return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, prepend=True)]

    hooks = [hook for prefix, module in model.named_modules() for hook in watch(module, prefix)]
    try:
        yield foreign
    finally:
        for hook in hooks:
            hook.remove()


def _plan(names: list[str], taps: Taps, outputs: Any, foreign: set[str]) -> TapPlan:
    if not isinstance(outputs, Tensor) or outputs.ndim == 0 or outputs.shape[0] != 1:
        what = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(f"{WHO}: the model returned {what} for one datum: return outputs [B, *event]")
    reasons, used = dict(taps.untapped), {use.leaf for use in taps.uses}
    for i, name in enumerate(names):
        if name in foreign:
            reasons[i] = "its layer computes with a DTensor, as under tensor parallelism"
        elif i not in used:
            reasons.setdefault(i, UNUSED)
    eps = max(taps.eps, torch.finfo(outputs.dtype).eps)
    return TapPlan(names, taps.uses, sorted(reasons), reasons, taps.shapes, taps.outputs, outputs.detach(), None, eps)


def _require_described(plan: TapPlan) -> None:
    if plan.generic:
        which = "; ".join(f"{plan.names[leaf]}: {plan.reasons[leaf]}" for leaf in plan.generic)
        raise ValueError(
            f"{WHO}: Kronecker factors cannot describe {len(plan.generic)} of {len(plan.names)} parameters ({which}): freeze "
            "them with requires_grad_(False), or take bc.curvature.diagonal_by_backward"
        )


def _require_counted_once(likelihood: Likelihood, batch: Any) -> None:
    weights = likelihood.weights(pair_targets(batch))
    if weights is not None and not bool((weights == 1).all()):
        raise ValueError(
            f"{WHO}: targets have weights other than 1 (labels of -100 have 0): leave those data out, or take "
            "bc.curvature.diagonal_by_backward"
        )


def _agree(passes: BackwardPasses, failure: Exception | None, *sizes: int) -> list[tuple[int, ...]]:
    """Gather these numbers from all ranks, or raise on all where one has failed: the others would wait for it forever."""
    every = passes.sizes(int(failure is not None), *sizes)
    if failure is not None:
        raise failure
    if failed := [rank for rank, (flag, *_) in enumerate(every) if flag]:
        raise ValueError(f"{WHO}: rank {failed[0]} of the mesh failed, and says why")
    return [rest for _, *rest in every]  # pyright: ignore[reportReturnType]


def _pull(outputs: Tensor, zeros: list[Tensor], root: Any, columns: int) -> Pulled:
    """Pull all columns back to every tapped output, by one backward pass a column that forms no parameter's gradient."""
    found: list[list[Tensor]] = []
    for k in range(columns):
        s = root.part(k, k + 1)[0]
        grads = torch.autograd.grad(outputs, zeros, s, retain_graph=k + 1 < columns, allow_unused=True)
        found.append([torch.zeros_like(z) if g is None else g for g, z in zip(grads, zeros)])
    return Pulled(outputs.detach()[:0], [torch.stack(each) for each in zip(*found)], [])


def _whole_template(p: Any) -> Tensor:
    """Zeros of the shape of a whole parameter, expanded from one number so that they take no memory."""
    return (local_of(p.detach()) if is_dtensor(p) else p.detach()).new_zeros(()).expand(p.shape)


def _template(p: Any) -> Any:
    """A DTensor of zeros with a parameter's layout, expanded from one number so that it takes no memory."""
    mine = local_of(p.detach())
    mine = mine.new_zeros(()).expand(mine.shape)
    return dtensor_of(mine, stacked_spec(spec_of(p), mine, 0))
