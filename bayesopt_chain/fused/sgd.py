r"""Steps that move the parameters themselves: what ``make_step(..., inplace=True)`` runs for the common chains.

SGD with everything that torch's fused kernel knows, and matched noise in front of it:

    g <- +-g + wd theta + e,    v <- mu v + g,    theta <- theta - lr (v, or g + mu v with Nesterov).

:func:`recognise` reads a chain's links and says whether it is of this form. It is not, and takes the links one by one
as ``update`` does, if it holds any other link (adaptive, clipping, masked, declared), a dampening, a second momentum or
scale, a learning rate or temperature that is a tensor or a schedule, or noise together with ``maximize``.
:meth:`FusedSGD.move` declines tensors that the kernels cannot take. The arithmetic is that of the links, with a
multiplication and the addition behind it rounded once: equal to one unit in the last place for each operation.

Matched noise is a fresh draw ``c xi`` and what a tensor ``s`` holds of the last one, which is the velocity or, without
momentum, the remembered draw (:mod:`bayesopt_chain.matching.noise_inputs`):

    v = keep s + g + c xi,    theta <- theta - lr v,    s <- momentum v + deferred c xi,

``(keep, momentum, deferred) = (mu, 1, 1 / mu)`` or ``(1, 0, 1)``; white noise has ``deferred = 0``. The first call with
some tensors picks the fastest of these, all of one stream, and keeps it for as long as the same tensors come:

* :class:`_Lowered`: the run of links that ``update`` sweeps (:mod:`bayesopt_chain.fused.lower`), with the parameters as the
  place where its results are added. On a CPU, for chains that are such a run and nothing else;
* :class:`_InSpans`: on a CPU otherwise, a draw and torch's fused kernel, span after span while all of it is in cache;
* :class:`_OnDevice`: on a CUDA device :mod:`bayesopt_chain.fused.langevin_cuda`, which draws in the kernel and moves 20 bytes
  a float32 parameter;
* :class:`_ByItsLink`: any other noise is drawn by its link, and torch's fused kernel does the rest;
* :class:`_WithoutNoise`: torch's fused kernel alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain import tracing
from bayesopt_chain._torch import foreach_add_, foreach_copy_, fused_sgd_
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.op import IN_PLACE, owned
from bayesopt_chain.core.state import State
from bayesopt_chain.fused.lower import Noisy, level_of
from bayesopt_chain.fused.sweep_cpu import pointers, sweep_kernel
from bayesopt_chain.links.langevin_noise import LangevinNoise
from bayesopt_chain.links.learning_rate import Scale
from bayesopt_chain.links.momentum import Momentum
from bayesopt_chain.links.weight_decay import AddDecayedWeights, FlipSign
from bayesopt_chain.random import philox
from bayesopt_chain.random.stream import Span, Variables

_KINDS = (Tensor, torch.nn.Parameter)  # subclasses may keep their numbers elsewhere
_DTYPES = (torch.float32, torch.float64)  # in bfloat16 torch 2.13's CPU kernel moves by the gradient, not the velocity
Way = Callable[[list[Any], State], State]  # moves the parameters by their gradients, of which some may be missing


@dataclass(frozen=True)
class FusedSGD:
    """A chain of the form above.

    Attributes:
        chain: the chain.
        lr, momentum, nesterov, weight_decay, maximize: as for ``torch.optim.SGD``.
        velocity: the number of the momentum's link, ``None`` without momentum.
        noise: the number of the noise link, ``None`` without noise.
        last: the tensors of the last call, if there was one.
    """

    chain: Chain
    lr: float
    velocity: int | None = None
    noise: int | None = None
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    maximize: bool = False
    last: list[_Tensors] = field(default_factory=list, repr=False, compare=False)

    def __reduce__(self) -> Any:
        return recognise, (self.chain,)  # a pickle does not carry the tensors of the last call

    def move(self, params: Any, grads: Any, state: State) -> State | None:
        """Move ``params`` and ``state`` in place.

        Args:
            params, grads: trees of one structure; gradients may be missing, and may be overwritten.
            state: a state of the chain.

        Returns:
            The state; or ``None``, with nothing changed, where the kernels, which check nothing, cannot take these tensors:
            they must be dense and contiguous, of one device and dtype, the state's shaped like the parameters, and not traced.
        """
        p, g, spec = self._leaves(params, grads)
        live = [x for x in g if x is not None]
        if not live or not tracing.is_plain(live[0]):
            return None
        way = self._tensors(p, g, state, spec).way
        return None if way is None else way(g, state)

    def _leaves(self, params: Any, grads: Any) -> tuple[list[Any], list[Any], Any]:
        """The leaves of both trees and their structure, for which that of the last call is tried first: this is faster."""
        if self.last:
            spec = self.last[0].spec
            try:
                return spec.flatten_up_to(params), spec.flatten_up_to(grads), spec
            except ValueError:
                pass
        p, spec = optree.tree_flatten(params, none_is_leaf=True)
        return p, spec.flatten_up_to(grads), spec

    def _tensors(self, params: list[Any], g: list[Any], state: State, spec: Any) -> _Tensors:
        """These tensors and the way to move them, as the last call found it where its tensors come again.

        They come again if they are the same objects, the same gradients are missing, and nobody has replaced a ``.data``.
        """
        trace = state[self.velocity].trace if self.velocity is not None else ()
        memory = state[self.noise].memory if self.noise is not None else ()
        key = (*params, *trace, *memory)
        last = self.last[0] if self.last else None
        if (
            last is None
            or len(key) != len(last.key)
            or not all(map(is_, key, last.key))
            or last.absent != [x is None for x in g]
            or not all(map(Tensor.is_set_to, last.viewed, last.views))
        ):
            last = _Tensors(spec, key, params, g, trace, memory)
            last.way = _way(self, last, state) if last.are_usable(self, g) else None
            last.view([last.params[j] for j in last.live] if last.way else [])
            self.last[:] = [last]
        return last

    def sweep(self, p: list[Tensor], g: list[Tensor], v: list[Tensor]) -> None:
        """Run torch's fused kernel in place."""
        fused_sgd_(
            p,
            g,
            v if self.momentum else [],
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.nesterov,
            maximize=self.maximize,
        )


class _Tensors:
    """Parameters, velocities and remembered draws as a call gave them, and the way to move them."""

    way: Way | None

    def __init__(
        self, spec: Any, key: tuple[Any, ...], params: list[Any], g: list[Any], trace: Any, memory: Any
    ) -> None:
        self.spec, self.key, self.params = spec, key, params
        self.absent = [x is None for x in g]
        self.live = [j for j, x in enumerate(g) if x is not None]
        self.here = [j for j, p in enumerate(params) if p is not None]
        place = {j: k for k, j in enumerate(self.here)}
        self.trace, self.memory = trace, memory
        mine = [place[j] for j in self.live if j in place]
        self.velocity: list[Tensor] = [trace[k] for k in mine] if len(trace) == len(self.here) else []
        self.drawn: list[Tensor] = [memory[k] for k in mine] if len(memory) == len(self.here) else []
        self.viewed: list[Tensor] = []
        self.views: list[Tensor] = []

    def are_usable(self, form: FusedSGD, g: list[Any]) -> bool:
        """Whether the kernels can take these tensors with gradients ``g``."""
        first, kept = g[self.live[0]], [t for t in (*self.trace, *self.memory) if t.numel()]
        return (
            first.dtype in _DTYPES
            and all(x is None or (_like(x, first) and _like(p, first)) for x, p in zip(g, self.params))
            and all(self.params[j].is_contiguous() for j in self.live)
            and all(_like(t, first) and t.is_contiguous() and not t.requires_grad for t in kept)
            and (form.velocity is None or [t.shape for t in self.trace] == [self.params[j].shape for j in self.here])
            and (form.noise is None or [t.shape[1:] for t in self.memory] == [self.params[j].shape for j in self.here])
        )

    @property
    def theta(self) -> list[Tensor]:
        """The parameters that have a gradient."""
        return [self.params[j].detach() for j in self.live]

    def view(self, tensors: list[Tensor]) -> None:
        """Remember tensors whose addresses a way keeps, so that the next call notices if their ``.data`` was replaced."""
        self.viewed += tensors
        self.views += [t.detach() for t in tensors]

    def kept(self) -> list[Tensor]:
        """What holds the last step's noise: the velocities, or without momentum the remembered draws."""
        if self.velocity:
            return self.velocity
        self.view(self.drawn)
        return [t[0] for t in self.drawn]


def _way(form: FusedSGD, tensors: _Tensors, state: State) -> Way | None:
    """The fastest way to move these tensors; ``None`` at a learning rate of 0, where no noise input exists."""
    if (noise := form.noise) is None:
        return _WithoutNoise(form, tensors)
    plan = form.chain.plan(state)
    injection: Any = plan.noise[noise]
    if not injection.noise_inputs:
        return None
    (noise_input,) = injection.noise_inputs
    theta, remembers = tensors.theta, not form.momentum
    level = level_of(injection.link, noise_input, remembers) if injection.link.noise == "gaussian" else None
    deferred = 1.0 if remembers else noise_input.deferred_gain
    if level is None:
        return _ByItsLink(form, noise, tensors, injection, noise_input.deferred_gain)
    if has_kernel(theta[0]):
        return _OnDevice(form, noise, tensors, [plan.numbers[j] for j in tensors.live], level, deferred)
    if theta[0].device.type != "cpu":
        return _ByItsLink(form, noise, tensors, injection, noise_input.deferred_gain)
    variables = replace(injection.variables, scale=level)
    sizes = tuple([tensors.params[j].numel() for j in tensors.here])
    (_, run), *more = plan.stages
    if isinstance(run, Noisy) and not more and len(tensors.live) == len(tensors.here) and sweep_kernel() is not None:
        return _Lowered(noise, tensors, run, variables, sizes)
    return _InSpans(form, noise, tensors, variables, sizes, deferred)


class _WithoutNoise:
    def __init__(self, form: FusedSGD, tensors: _Tensors) -> None:
        self.form, self.theta, self.velocity = form, tensors.theta, tensors.velocity

    @torch.no_grad()
    def __call__(self, g: list[Any], state: State) -> State:
        self.form.sweep(self.theta, _dense(owned(g)), self.velocity)
        return state


class _Lowered:
    def __init__(self, noise: int, tensors: _Tensors, run: Noisy, variables: Variables, sizes: tuple[int, ...]) -> None:
        self.noise, self.run, self.variables, self.sizes = noise, run, variables, sizes
        self.theta, self.kept = tensors.theta, tensors.kept()
        tensors.view(tensors.velocity)
        lists = (self.kept, self.theta, self.kept, self.theta)
        self.known = [[pointers(xs, span) for xs in lists] for span in variables.spans(sizes)]

    def __call__(self, g: list[Any], state: State) -> State:
        noise, g = state[self.noise], _dense(g)
        drawn = self.variables.draw_in_spans(noise.key, noise.step, self.sizes, g[0].dtype)
        self.run.sweep(drawn, g, self.kept, self.theta, self.kept, self.theta, known=self.known)
        # the kernel wrote to addresses, which autograd cannot see
        torch.autograd.graph.increment_version([*self.theta, *self.kept])
        noise.step.add_(1)
        return state


class _InSpans:
    def __init__(
        self,
        form: FusedSGD,
        noise: int,
        tensors: _Tensors,
        variables: Variables,
        sizes: tuple[int, ...],
        deferred: float,
    ) -> None:
        self.noise, self.form, self.variables, self.sizes, self.deferred = noise, form, variables, sizes, deferred
        theta, kept = tensors.theta, tensors.kept()
        spans = variables.spans(sizes)
        self.scratch = torch.empty(max(span.total for span in spans), dtype=theta[0].dtype, device=theta[0].device)
        number = {tensors.here.index(j): k for k, j in enumerate(tensors.live)}
        pieces = [[*_pieces(span, number, theta, kept, self.scratch)] for span in spans]
        self.spans = [[[*column] for column in zip(*each)] for each in pieces]
        self.all = [(k, None) for k in range(len(theta))]
        if any(cut is not None for each in pieces for *_, (_, cut) in each):
            tensors.view(tensors.velocity)

    @torch.no_grad()
    def __call__(self, g: list[Any], state: State) -> State:
        noise, g = state[self.noise], _dense(owned(g))
        drawn = self.variables.draw_in_spans(noise.key, noise.step, self.sizes, g[0].dtype, self.scratch)
        for _, columns in zip(drawn, self.spans):
            if columns:
                theta, kept, fresh, where = columns
                here = g if where == self.all else [g[k] if cut is None else g[k].view(-1)[cut] for k, cut in where]
                self._move(theta, here, kept, fresh)
        noise.step.add_(1)
        return state

    def _move(self, p: list[Tensor], g: list[Tensor], s: list[Tensor], fresh: list[Tensor]) -> None:
        """``v = keep s + g + fresh; theta <- theta - lr v; s <- momentum v + deferred fresh`` (see the module's note)."""
        if not self.form.momentum:
            foreach_add_(g, s)
        foreach_add_(g, fresh)
        if not self.form.momentum:
            foreach_copy_(s, fresh)
        self.form.sweep(p, g, s)
        if self.form.momentum and self.deferred:
            foreach_add_(s, fresh, alpha=self.deferred)


class _OnDevice:
    def __init__(
        self, form: FusedSGD, noise: int, tensors: _Tensors, draws: list[int], level: float, deferred: float
    ) -> None:
        self.noise, self.theta, self.kept = noise, tensors.theta, tensors.kept()
        # Triton takes the 32 bits as a signed number
        self.draws = [draw - (draw >> 31 << 32) for draw in draws]
        keep, momentum = (form.momentum, 1.0) if form.momentum else (1.0, 0.0)
        self.numbers: dict[str, Any] = {
            "lr": form.lr,
            "weight_decay": form.weight_decay,
            "keep": keep,
            "momentum": momentum,
        }
        self.numbers |= {"level": level, "deferred": deferred}

    @torch.no_grad()
    def __call__(self, g: list[Any], state: State) -> State:
        from bayesopt_chain.fused.langevin_cuda import langevin_step_  # here, since it needs Triton

        noise = state[self.noise]
        with torch.cuda.device_of(noise.key):
            for p, x, s, draw in zip(self.theta, _dense(g), self.kept, self.draws):
                langevin_step_(p, x, s, noise.key, noise.step, draw=draw, **self.numbers)
        noise.step.add_(1)
        return state


class _ByItsLink:
    def __init__(self, form: FusedSGD, noise: int, tensors: _Tensors, injection: Any, deferred: float) -> None:
        self.noise = noise
        self.form, self.injection, self.deferred = form, injection, deferred
        self.theta, self.velocity = tensors.theta, tensors.velocity

    @torch.no_grad()
    def __call__(self, g: list[Any], state: State) -> State:
        noise, g = state[self.noise], owned(g)
        (x,), after = self.injection.draw(noise, self.injection.strength(noise), g, IN_PLACE)
        self.form.sweep(self.theta, IN_PLACE.add(_dense(g), x.noise), self.velocity)
        if self.deferred:
            IN_PLACE.add(self.velocity, x.noise, self.deferred)
        return state.replace(self.noise, after)


def _pieces(
    span: Span, number: dict[int, int], theta: list[Tensor], kept: list[Tensor], scratch: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor, tuple[int, slice | None]]]:
    """The pieces of a span that have a gradient: parameter, what is kept for the next step, noise; and (gradient, part of it).

    A leaf that lies wholly in the span keeps its shape, and its part is ``None``: its gradient is taken as it is.
    """
    offset = 0
    for leaf, start, size in zip(span.leaves, span.starts, span.sizes):
        fresh = scratch[offset : offset + size]
        offset += size
        if (k := number.get(leaf)) is None:
            continue
        if size == theta[k].numel():
            yield theta[k], kept[k], fresh.view_as(theta[k]), (k, None)
        else:
            part = slice(start, start + size)
            yield theta[k].view(-1)[part], kept[k].view(-1)[part], fresh, (k, part)


def _dense(g: list[Any]) -> list[Tensor]:
    """The gradients that are not missing, made contiguous."""
    return [x if x.is_contiguous() else x.contiguous() for x in g if x is not None]


def _like(x: Tensor | None, first: Tensor) -> bool:
    return x is not None and type(x) in _KINDS and x.dtype == first.dtype and x.device == first.device


def has_kernel(g: Tensor) -> bool:
    """Whether :mod:`bayesopt_chain.fused.langevin_cuda` takes tensors like ``g``."""
    return g.device.type == "cuda" and g.dtype == torch.float32 and philox.has_triton()


def recognise(tx) -> FusedSGD | None:
    """Read a chain's links: its fused form, or ``None`` if it has none."""
    if not isinstance(tx, Chain) or not tx.links or any(link.masks for link in tx.links):
        return None
    *links, last = tx.links
    if type(last) is not Scale or last.sign > 0 or not isinstance(last.step_size, (int, float)):
        return None
    found: dict = {"lr": float(last.step_size)}
    for i, link in enumerate(links):
        if isinstance(link, LangevinNoise):
            if not link.is_static or link.temperature == 0 or "noise" in found or link.room is not None:
                return None
            found["noise"] = i
        elif type(link) is FlipSign and not found.keys() & {"maximize", "weight_decay", "momentum"}:
            found["maximize"] = True
        elif type(link) is AddDecayedWeights and not found.keys() & {"weight_decay", "momentum"}:
            if link.flip and "maximize" in found:
                return None
            found["weight_decay"] = link.weight_decay
            found["maximize"] = link.flip or found.get("maximize", False)
        elif type(link) is Momentum and "momentum" not in found:
            if link.dampening or link.moment_requires_grad:
                return None
            found.update(momentum=link.momentum, nesterov=link.nesterov, velocity=i)
        else:
            return None
    if "noise" in found and found.get("maximize"):
        return None
    return FusedSGD(tx, **found)
