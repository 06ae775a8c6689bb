"""The sources of a step's gradient: one small class for each kind, combined by :func:`source_of`.

A transformation asks for more than the gradient by the keywords that its ``update`` accepts. A source computes the gradient
and these keywords. The first four classes evaluate a loss, an estimator or a filter's observation; each class that is indented
further wraps a source of the lines above it:

    LossGradient            the gradient of the mean loss of the batch
    Microbatches            the same, for a batch that is cut into parts
    Observation             no gradient, for filters, which read curvature only
    EstimatedGradient       the gradient of an estimator (:mod:`bayesopt_chain.loop.gradients`)
      MeanOverRanks         the mean over ranks that hold different data
        WithKeywords        further keywords, such as ``loss=`` and ``curvature=``, at the same parameters
          AtDraws           the gradient at draws that a link asks for (variational inference)
          AtParticles       the gradient at each of the particles that a link moves together
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import optree
import torch
from torch import Tensor
from torchopt.base import GradientTransformation

from bayesopt_chain import batches, tracing
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import ANY
from bayesopt_chain.distributed.ranks import Ranks
from bayesopt_chain.links.wrapper import keywords_of
from bayesopt_chain.loop.gradients import GradientEstimator
from bayesopt_chain.loop.loss import (
    Evaluation,
    GradientSource,
    Info,
    Loss,
    LossGradient,
)
from bayesopt_chain.trees import entries_of

# a function of (params, batch) whose result is passed to ``tx.update`` by a keyword
Keyword = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Microbatches:
    """The gradient of a batch that is cut into parts, which are evaluated one after the other.

    With ``n_i`` data and the gradient ``g_i`` in part ``i`` it is ``sum_i n_i g_i / sum_i n_i``. It takes the memory of one
    part.

    Attributes:
        source: the source that evaluates a part.
        parts: the number of parts.
    """

    source: GradientSource
    parts: int

    def __call__(self, params: Any, state: Any, batch: Any, carried: Any) -> Evaluation:
        """Return the mean of the gradients of the parts, weighted by their numbers of data."""
        total: Any = None
        loss: Any = 0.0
        aux: list[Any] = []
        for part, share in _parts(batch, self.parts):
            grads, info, _, carried = self.source(params, state, part, carried)
            loss = loss + share * info.loss
            aux.append(info.aux)
            with torch.no_grad():  # summed in place, so that the gradients of two parts are in memory, and not of all
                if total is None:
                    total = optree.tree_map(lambda g, share=share: g * share, grads)
                else:
                    total = optree.tree_map(lambda t, g, share=share: t.add_(g, alpha=share), total, grads)
        return Evaluation(total, Info(loss, _stacked(aux)), {}, carried)


@dataclass(frozen=True)
class Observation:
    """The source of a filter: ``curvature(params, batch)`` is an observation with a log likelihood; no gradient is taken."""

    curvature: Keyword

    def __call__(self, params: Any, state: Any, batch: Any, carried: Any) -> Evaluation:
        """Return zeros as the gradient, the observation as the keyword ``curvature``, and the mean negative log likelihood.

        Raises:
            ValueError: the function returned no observation of ``bc.ekf.observe``.
        """
        observed = self.curvature(params, batch)
        if not hasattr(observed, "log_likelihood"):
            raise ValueError(
                f"make_step: without a loss, curvature must be of bc.ekf.observe, not {type(observed).__name__}: pass a loss"
            )
        info = Info(-observed.log_likelihood / observed.seen, ())
        return Evaluation(optree.tree_map(torch.zeros_like, params), info, {"curvature": observed}, carried)


@dataclass(frozen=True)
class EstimatedGradient:
    """The gradient of an estimator. ``carried`` is its memory."""

    estimator: GradientEstimator

    def __call__(self, params: Any, state: Any, batch: Any, carried: Any) -> Evaluation:
        """Return the estimate."""
        grads, info, *_ = self.estimator.estimate(params, carried, batch)
        return Evaluation(grads, info, {}, carried)


@dataclass(frozen=True)
class MeanOverRanks:
    """The gradient and the loss of the data of all ranks, by one message per step."""

    source: GradientSource
    ranks: Ranks

    def __call__(self, params: Any, state: Any, batch: Any, carried: Any) -> Evaluation:
        """Evaluate the source on this rank's data, and average over ranks."""
        found = self.source(params, state, batch, carried)
        grads, loss = self.ranks.gradient(found.grads, found.info.loss, batch)
        return found._replace(grads=grads, info=found.info._replace(loss=loss))


@dataclass(frozen=True)
class WithKeywords:
    """A source with further keywords of ``tx.update``, which are evaluated at the same parameters.

    Attributes:
        source: the source of the gradient.
        functions: by keyword, a function of the parameters and the batch.
        loss: whether ``update`` takes the keyword ``loss`` too.
    """

    source: GradientSource
    functions: Mapping[str, Keyword]
    loss: bool

    def __call__(self, params: Any, state: Any, batch: Any, carried: Any) -> Evaluation:
        """Evaluate the source, then the functions."""
        found = self.source(params, state, batch, carried)
        extra = {**found.extra, **{name: function(params, batch) for name, function in self.functions.items()}}
        if self.loss:  # the value that the gradient's evaluation found: the loss is not evaluated again
            extra["loss"] = found.info.loss
        return found._replace(extra=extra)


@dataclass(frozen=True)
class AtParticles:
    """The gradients and losses of particles that are stacked on axis 0 of the parameters."""

    source: GradientSource

    def __call__(self, params: Any, state: Any, batch: Any, carried: Any) -> Evaluation:
        """Evaluate the source at all particles, under vmap."""
        grads, info, extra = torch.vmap(lambda p: tuple(self.source(p, state, batch, carried))[:3])(params)
        return Evaluation(grads, info, extra, carried)


@dataclass(frozen=True)
class AtDraws:
    """The gradient at points that a link draws from its distribution, with the draw as the keyword ``draw=``.

    Attributes:
        source: the source of the gradient at one point.
        tx: the chain.
        index: the number of the link that draws.
    """

    source: GradientSource
    tx: Any
    index: int

    def __call__(self, params: Any, state: Any, batch: Any, carried: Any) -> Evaluation:
        """Draw, evaluate the source at each point, and collect the gradients, keywords and reports."""
        i, state = self.index, entries_of(state)  # of the chain inside of wrappers
        with torch.no_grad():
            draw, points = drawn(self.tx, i, state, params)
        found: list[Evaluation] = []
        for point in points:  # one after the other, since each evaluation gets the buffers of the one before
            found.append(self.source(point, state, batch, carried))
            carried = found[-1].carried
        with torch.no_grad():
            where, extra = state.layout.where[i], {"draw": draw}
            for name in found[0].extra:
                values = [each.extra[name] for each in found]
                extra[name] = _mean_precision(values) if name == "curvature" else gathered(values, where)
            mean = torch.stack([each.info.loss for each in found]).mean()
            aux = found[0].info.aux if len(found) == 1 else _stacked([each.info.aux for each in found])
            report = self.tx.links[i].report(state[i], draw, mean)
            grads = gathered([each.grads for each in found], where)
            return Evaluation(grads, Info(mean, aux, **report), extra, carried)


@dataclass(frozen=True)
class Autocast:
    """A loss that is evaluated under ``torch.autocast`` on the device of the parameters."""

    loss: Loss
    dtype: torch.dtype

    def __call__(self, params: Any, *rest: Any) -> Any:
        """Evaluate the loss, with matrix products in the lower precision."""
        leaf = optree.tree_leaves(params)[0]
        # a trace must record every cast of a weight, and with the cache only the first use of a weight casts it
        with torch.autocast(leaf.device.type, dtype=self.dtype, cache_enabled=tracing.is_plain(leaf)):
            return self.loss(params, *rest)


class HeatWatch(Protocol):
    """The methods of :class:`bayesopt_chain.diagnostics.HeatGuard` that a step calls."""

    def require(self, tx: Any) -> None:
        """Raise an error for a transformation that the guard cannot read."""

    def watch(self, tx: Any, params: Any, state: Any, grads: Any) -> None:
        """Read the gradients of a step, before anything moves."""


def source_of(
    loss: Loss | GradientEstimator | None,
    tx: GradientTransformation,
    *,
    functions: Mapping[str, Keyword],
    buffers: Mapping[str, Tensor] | None,
    microbatches: int,
    autocast: torch.dtype | None,
    ranks: Ranks,
) -> GradientSource:
    """Combine the classes of this module to the source that a transformation asks for.

    Args:
        loss: as :func:`bayesopt_chain.make_step` takes it.
        tx: the transformation inside of all wrappers.
        functions: by keyword, the functions that are evaluated for ``tx.update``.
        buffers: the buffers of the module, or ``None``.
        microbatches: the number of parts of a batch.
        autocast: the precision of the loss, or ``None``.
        ranks: the ranks over which gradients are averaged, if they have a mesh.

    Returns:
        The source.

    Raises:
        ValueError: the arguments contradict each other.
    """
    accepts = keywords_of(tx)
    links = tx.links if isinstance(tx, Chain) else ()
    draws = [i for i, link in enumerate(links) if link.traits.samples]
    particles = any(link.traits.acts_on_particles for link in links)
    if len(draws) > 1:
        raise ValueError(f"make_step: {len(draws)} links of this chain draw; one step takes gradients at one draw")
    if particles and (draws or functions):
        raise ValueError(
            "make_step: a chain over particles takes their gradients and losses, and can ask for nothing else"
        )
    if particles and buffers:
        raise ValueError(
            "make_step: this chain takes gradients of particles, for which a module's buffers would be one for all; call "
            "module.eval() and leave buffers= out"
        )
    if not callable(loss):
        if loss is None and "curvature" not in functions:
            raise ValueError(f"make_step: {tx!r} follows a gradient: pass a loss")
        if buffers is not None or microbatches > 1 or autocast is not None:
            what = "and there is none" if loss is None else "and an estimator was given, which evaluates its own"
            raise ValueError(f"make_step: buffers=, microbatches= and autocast= are of a loss, {what}: leave them out")
        if particles and loss is not None:
            raise ValueError(
                "make_step: this chain takes gradients of particles, and an estimator makes one of the batch: pass a loss"
            )
    if ranks.mesh is not None and (particles or functions or buffers or not callable(loss)):
        asks = [*["particles"] * particles, *functions, *["buffers"] * bool(buffers), "an estimated gradient"]
        raise ValueError(
            f"make_step: with mesh= the ranks exchange gradients and losses, and {tx!r} asks for {asks[0]}, which would be "
            "of one rank's data alone; run it without mesh="
        )

    source = _innermost(loss, functions, microbatches, autocast)
    # ranks average innermost, so that the keyword ``loss=`` is the mean loss, and each draw has the mean gradient
    if ranks.mesh is not None:
        source = MeanOverRanks(source, ranks)
    # without a loss the curvature is the observation, which the innermost source evaluates
    rest = {name: function for name, function in functions.items() if loss is not None or name != "curvature"}
    if rest or "loss" in accepts:
        source = WithKeywords(source, rest, loss is not None and "loss" in accepts)
    if draws:
        return AtDraws(source, tx, draws[0])
    return AtParticles(source) if particles else source


def functions_of(
    tx: GradientTransformation, curvature: Keyword | None, keywords: Mapping[str, Keyword] | None
) -> dict[str, Keyword]:
    """Collect the functions for further keywords of ``tx.update``.

    ``curvature`` is left out for a transformation that takes none, so that a user can change the transformation only.

    Args:
        tx: the transformation.
        curvature: as in :func:`bayesopt_chain.make_step`, or ``None``.
        keywords: as in :func:`bayesopt_chain.make_step`, or ``None``.

    Returns:
        By keyword, the functions.

    Raises:
        ValueError: there is no curvature, and the transformation needs it.
        TypeError: the transformation does not take one of the keywords.
    """
    accepts = keywords_of(tx)
    if curvature is None and "curvature" in getattr(tx, "required_kwargs", ()):
        raise ValueError(
            f"make_step: {tx!r} needs curvature: pass curvature=bc.curvature.ggn(forward, likelihood, structure)"
        )
    if keywords and (unknown := keywords.keys() - accepts) and ANY not in accepts:
        raise TypeError(
            f"make_step: {tx!r} takes no {', '.join(sorted(unknown))}=; it takes {', '.join(sorted(accepts))}"
        )
    found = {} if curvature is None or not accepts & {"curvature", ANY} else {"curvature": curvature}
    return {**found, **(keywords or {})}


def _innermost(
    loss: Loss | GradientEstimator | None,
    functions: Mapping[str, Keyword],
    microbatches: int,
    autocast: torch.dtype | None,
) -> GradientSource:
    """Make the innermost source, which evaluates the loss."""
    if isinstance(loss, GradientEstimator):
        return EstimatedGradient(loss)
    if loss is None:
        return Observation(functions["curvature"])
    loss = loss if autocast is None else Autocast(loss, autocast)
    return LossGradient(loss) if microbatches == 1 else Microbatches(LossGradient(loss), microbatches)


def _parts(batch: Any, n: int) -> Iterator[tuple[Any, float]]:
    """Cut a batch into ``n`` parts along axis 0. Leaves that are 0-d or no tensors go to every part.

    Yields:
        Each part, and its share of the data.

    Raises:
        ValueError: the tensors have different lengths, or there are fewer data than parts.
    """
    leaves, structure = batches.flatten(batch)
    cut = [isinstance(x, Tensor) and x.ndim > 0 for x in leaves]
    lengths = {x.shape[0] for x, is_cut in zip(leaves, cut) if is_cut}
    if len(lengths) != 1 or min(lengths) < n:
        raise ValueError(
            f"make_step: {n} microbatches need a batch whose tensors have one length of at least {n} along axis 0, got "
            f"{sorted(lengths)}"
        )
    (size,) = lengths
    # tensor_split gives the first ``size % n`` parts one datum more than the others, as the shares below
    pieces = [x.tensor_split(n) if is_cut else [x] * n for x, is_cut in zip(leaves, cut)]
    for i in range(n):
        yield structure.unflatten([p[i] for p in pieces]), len(range(size)[i::n]) / size


def _mean_precision(precisions: list[Any]) -> Any:
    """Return the mean of the curvature at several draws, with the number of data of one draw."""
    total = precisions[0]
    for precision in precisions[1:]:
        total = total.add(precision)
    return total if len(precisions) == 1 else total.scale(1 / len(precisions))


def _stacked(trees: list[Any]) -> Any:
    """Stack the tensors of trees on a new axis 0; other leaves are those of the first tree."""
    return optree.tree_map(lambda *xs: torch.stack(xs) if torch.is_tensor(xs[0]) else xs[0], *trees)


def drawn(tx: Any, i: int, state: Any, params: Any) -> tuple[Any, list]:
    """The draw that link ``i`` of a chain asks for, and the trees of parameters to take gradients at.

    Leaves that a mask keeps from the link stay at the parameters in each of these trees.
    """
    link = tx.links[i]
    at, mine = tx.at(state, i, params)
    leaves, spec = optree.tree_flatten(params, none_is_leaf=True)
    draw = link.draw(state[i], mine, at.paths)
    points = []
    for s in range(link.traits.samples):
        point = list(leaves)
        for j, leaf in zip(at.scope.index, draw.params):
            point[j] = leaf if link.traits.samples == 1 else leaf[s]
        points.append(optree.tree_unflatten(spec, point))
    return draw, points


def gathered(trees: list, where: Sequence[int]) -> Any:
    """Gradients at the trees of :func:`drawn`: stacked at the leaves ``where`` they were drawn, averaged elsewhere."""
    if len(trees) == 1:
        return trees[0]
    leaves = [optree.tree_leaves(tree, none_is_leaf=True) for tree in trees]
    out = [
        None if xs[0] is None else torch.stack(xs) if j in where else torch.stack(xs).mean(0)
        for j, xs in enumerate(zip(*leaves))
    ]
    return optree.tree_unflatten(optree.tree_structure(trees[0], none_is_leaf=True), out)
