r"""``capture``: the whole step (gradient, chain, update) as one program over static buffers, replayed without Python.

The step is traced once with fake tensors into a graph of ATen operations. Every tensor it closes over (a temperature, a
learning rate, a model's buffers, data) becomes an input of the graph, so that a change made in place is seen by the next
replay. New parameters and states are copied into the static buffers at the end of the graph. Then

* on a CUDA device the step is recorded as a CUDA graph;
* on a CPU the graph of one step is compiled by inductor, which fuses update and copy into the kernels of the step, draws
  into buffers of its own, and is called once for each of several steps;
* where no C++ compiler is found the same function runs eagerly, said once.
"""

from __future__ import annotations

import gc
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from operator import is_
from pathlib import Path
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from bayesopt_chain import _fused
from bayesopt_chain._chain import Chain
from bayesopt_chain._foreign import Foreign
from bayesopt_chain._masked import MaskedRule
from bayesopt_chain._rule import Rule
from bayesopt_chain.loop.step import Info, Step

Backend = Literal["cuda", "inductor", "eager"]


class CaptureError(RuntimeError):
    """The step cannot be captured; the message names the line and what to change."""


class Steps(NamedTuple):
    """What a captured run of several steps reports, stacked on axis 0; ``draws`` is ``()`` unless asked for."""

    loss: Tensor
    aux: Any
    draws: Any = ()


class Captured:
    """A captured step; made by :func:`capture` and called like the step.

    Attributes:
        backend: ``"cuda"``, ``"inductor"`` or ``"eager"``.
    """

    def __init__(self, body: _Body, replay: Callable, backend: Backend, clone: bool) -> None:
        self.backend = backend
        self._body = body
        self._replay = replay
        self._clone = clone

    def __call__(self, params: Any, state: Any, batch: Any) -> tuple[Any, Any, Info | Steps]:
        """Replay: ``(params, state, Info)``. Parameters and state alias the static buffers unless ``clone`` was asked for;
        the info is the call's own."""
        body = self._body
        body.params.take(params, "params")
        body.state.take(state, "state")
        info = body.info(self._replay(body.batch.take(batch)))
        params, state = body.params.give(), body.state.give()
        if self._clone:
            params, state = optree.tree_map(torch.clone, (params, state))
        return params, state, info


def capture(
    step: Callable,
    params: Any,
    state: Any,
    batch: Any,
    *,
    steps: int = 1,
    batch_dim: int | None = None,
    draws: bool = False,
    clone: bool = False,
    backend: Backend | None = None,
) -> Captured:
    """Capture a step: same arguments, same results, none of Python's time.

    Results agree with the step's to rounding (one unit in the last place for each operation; sums over a batch may be
    ordered differently); the random stream is the step's. On a CPU the noise of a chain made :func:`counter_based` costs
    a third of what torch's generator asks.

    Args:
        step: from :func:`make_step` or :func:`parallel`, or any pure function ``(params, state, batch) -> (params,
            state, Info)``.
        params, state, batch: examples; none of them is changed. The replay continues from whatever it is given: passing
            back what it returned costs nothing, anything else of the same structure and shapes is copied in.
        steps: steps for each call; the loss and aux are then stacked on axis 0 (:class:`Steps`).
        batch_dim: with ``steps``, the axis of the batch's tensors that counts steps; ``None`` (default) gives every step the
            whole batch.
        draws: return the parameters after every step, stacked on axis 0, as ``info.draws``.
        clone: return copies. By default params and state *alias static buffers that the next call overwrites*.
        backend: ``"cuda"``, ``"inductor"`` or ``"eager"`` (default: the first that is possible here).

    Returns:
        A callable with the step's interface. Temperatures and learning rates that are tensors or schedules may change
        between calls without a new capture; the state it returns resumes exactly, here or in the eager step.

    Raises:
        CaptureError: the step reads a number off a tensor, branches on one, or makes shapes that depend on values.
        ValueError: a later call with another structure, shape, dtype or device.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, params = bc.counter_based(bc.sghmc(0.1, temperature=0.01)), {"w": torch.ones(2)}
        >>> step, state = bc.make_step(lambda params, batch: (params["w"] ** 2).sum(), tx), tx.init(params)
        >>> fast = bc.capture(step, params, state, (), steps=4, draws=True, backend="eager")
        >>> params, state, info = fast(params, state, ())
        >>> info.loss.shape, info.draws["w"].shape
        (torch.Size([4]), torch.Size([4, 2]))
    """
    if steps < 1:
        raise ValueError(f"capture: steps must be at least 1, got {steps}")
    if batch_dim is not None and steps == 1:
        raise ValueError("capture: batch_dim counts steps, so it needs steps > 1")
    body = _Body(_pure(step), params, state, batch, steps, batch_dim, draws)
    graph, closed_over = _trace(body)
    chosen = backend or _best(body)
    if chosen == "cuda":
        _check_devices(graph, body)
        replay = _CudaGraph(body, closed_over, _overwritten(graph, closed_over), _in_place(step))
    elif chosen == "inductor":
        replay = _Compiled(body, graph, closed_over)
    else:
        replay = _Eager(body)
    return Captured(body, replay, chosen, clone)


def _pure(step: Callable) -> Callable:
    return replace(step, inplace=False, fused=None) if isinstance(step, Step) and step.inplace else step


def _in_place(step: Callable) -> Callable:
    """The step that moves the static buffers themselves, by the fused kernels where it has them.

    Only where every link is the library's own: another's may keep the parameters it was shown, which then would change.
    """
    mine = isinstance(step, Step) and isinstance(step.tx, Chain)
    if not mine or any(isinstance(_unmasked(rule), Foreign) for rule in step.tx.rules):
        return _pure(step)
    return replace(step, inplace=True, fused=_fused.recognise(step.tx))


def _unmasked(rule: Rule) -> Rule:
    while isinstance(rule, MaskedRule):
        rule = rule.rule
    return rule


class _Slots:
    """Static buffers for the leaves of one tree. Leaves that are one tensor share one buffer."""

    def __init__(self, tree: Any) -> None:
        leaves, self.spec = optree.tree_flatten(tree)
        for leaf in leaves:
            if not torch.is_tensor(leaf):
                raise TypeError(f"capture: params and state must hold tensors only, found {leaf!r}")
        first: dict[int, int] = {}
        self.index = [first.setdefault(id(leaf), len(first)) for leaf in leaves]
        unique = {i: leaf for i, leaf in zip(self.index, leaves)}
        self.buffers = [unique[i].detach().clone() for i in range(len(unique))]
        self.leaves = [self.buffers[i] for i in self.index]
        self.own = self.tree(self.buffers) if _is_immutable(tree) else None

    def tree(self, buffers: Sequence[Tensor]) -> Any:
        return optree.tree_unflatten(self.spec, [buffers[i] for i in self.index])

    def give(self) -> Any:
        """The tree of the buffers. Where nobody can change its containers, it is the same object every time."""
        return self.own if self.own is not None else optree.tree_unflatten(self.spec, self.leaves)

    def take(self, tree: Any, what: str) -> None:
        """Have the buffers hold the values of ``tree``: nothing to do if it is what :meth:`give` gave."""
        if self.own is None or tree is not self.own:
            leaves, spec = optree.tree_flatten(tree)
            if not (len(leaves) == len(self.leaves) and all(map(is_, leaves, self.leaves)) and spec == self.spec):
                self.load(leaves, spec, what)

    def collect(self, tree: Any, what: str) -> list[Tensor]:
        """One tensor for each buffer from a tree that the step made."""
        out: list[Tensor | None] = [None] * len(self.buffers)
        leaves, spec = optree.tree_flatten(tree)
        if spec != self.spec or any(
            not torch.is_tensor(x) or x.shape != mine.shape or x.dtype != mine.dtype
            for x, mine in zip(leaves, self.leaves)
        ):
            raise CaptureError(
                f"capture: the step returns {what} of another structure, shape or dtype than it was given: run a step or two "
                "before capturing, and use no state that grows (curvature with structure='root')"
            )
        for i, leaf in zip(self.index, leaves):
            if out[i] is not None and out[i] is not leaf:
                raise CaptureError(
                    "capture: leaves of the state that were one tensor became two; give the step a state with "
                    "tensors of its own (copy.deepcopy leaf by leaf) and capture again"
                )
            out[i] = leaf
        return out

    def load(self, leaves: list, spec: Any, what: str) -> None:
        """Copy the user's leaves in."""
        if spec != self.spec:
            raise ValueError(f"capture: {what} have the structure {spec}, captured was {self.spec}; capture again")
        written: dict[int, Tensor] = {}
        for n, (i, x) in enumerate(zip(self.index, leaves)):
            mine = self.buffers[i]
            if not torch.is_tensor(x) or x.shape != mine.shape or x.dtype != mine.dtype or x.device != mine.device:
                raise ValueError(
                    f"capture: {what}, leaf {n}: {_describe(x)}, captured was {_describe(mine)}; capture again"
                )
            if i in written and written[i] is not x and not torch.equal(written[i], x):
                raise ValueError(f"capture: {what}, leaf {n}: shared a tensor with another leaf; capture again")
            written[i] = x
        copies = {
            i: x.detach().clone() for i, x in written.items() if x is not self.buffers[i]
        }  # x may be a view of one
        for i, x in copies.items():
            self.buffers[i].copy_(x)


class _Batch:
    """What batches look like, and their tensors with the strides they were captured with, none of them in a static buffer."""

    def __init__(self, batch: Any, steps: int, dim: int | None, static: Sequence[Tensor]) -> None:
        self.leaves, self.spec = optree.tree_flatten(batch)
        self.dim = dim
        self.written = {x.untyped_storage().data_ptr() for x in static}  # memory that the step overwrites
        if dim is not None:
            for n, x in enumerate(self.leaves):
                if torch.is_tensor(x) and x.shape[dim] != steps:
                    raise ValueError(f"capture: batch, leaf {n}: {_describe(x)} has no {steps} steps along axis {dim}")
        self.strides = [x.stride() if torch.is_tensor(x) else None for x in self.leaves]
        self.immutable = _is_immutable(batch)
        self.last: tuple[Any, list, list[Tensor] | None] = (self, [], None)

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in self.leaves if torch.is_tensor(x)]

    def take(self, batch: Any) -> list[Tensor]:
        """The tensors of ``batch``, once it is known to look like the first one."""
        seen, leaves, tensors = self.last
        if not (self.immutable and batch is seen):
            before, (leaves, spec) = leaves, optree.tree_flatten(batch)
            if not (len(leaves) == len(before) and all(map(is_, leaves, before)) and spec == self.spec):
                self.check(leaves, spec)
            mine = [(x, stride) for x, stride in zip(leaves, self.strides) if stride is not None]
            tensors = [x for x, _ in mine] if all(self.fits(x, stride) for x, stride in mine) else None
            self.last = batch, leaves, tensors
        return tensors if tensors is not None else self.laid_out(leaves)

    def fits(self, x: Tensor, stride: tuple[int, ...]) -> bool:
        return x.stride() == stride and x.untyped_storage().data_ptr() not in self.written

    def laid_out(self, leaves: list) -> list[Tensor]:
        """Copies with the first batch's strides of the tensors that have others, or that lie in a static buffer."""
        return [
            x
            if self.fits(x, stride)
            else torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x.detach())
            for x, stride in zip(leaves, self.strides)
            if stride is not None
        ]

    def check(self, leaves: list, spec: Any) -> None:
        if spec != self.spec:
            raise ValueError(f"capture: the batch has the structure {spec}, captured was {self.spec}; capture again")
        for n, (x, mine) in enumerate(zip(leaves, self.leaves)):
            if torch.is_tensor(mine):
                same = torch.is_tensor(x) and (x.shape, x.dtype, x.device) == (mine.shape, mine.dtype, mine.device)
            else:
                same = type(x) is type(mine) and x == mine
            if not same:
                raise ValueError(
                    f"capture: batch, leaf {n}: {_describe(x)}, captured was {_describe(mine)}; keep batches of one shape "
                    "(drop_last=True) and numbers constant, or capture again"
                )

    def of_step(self, tensors: Sequence[Tensor], k: int) -> Sequence[Tensor]:
        """The tensors that step ``k`` sees."""
        return tensors if self.dim is None else [x.select(self.dim, k) for x in tensors]

    def tree(self, tensors: Sequence[Tensor]) -> Any:
        given = iter(tensors)
        return optree.tree_unflatten(self.spec, [next(given) if torch.is_tensor(x) else x for x in self.leaves])


def _is_immutable(tree: Any) -> bool:
    """Whether the containers are tuples all the way down, so that the same object holds the same leaves."""
    if isinstance(tree, tuple):
        return all(map(_is_immutable, tree))
    return tree is None or optree.tree_is_leaf(tree)


class _Body:
    """The step as a function of flat lists of tensors, and what is needed to go between lists and trees."""

    def __init__(self, step, params, state, batch, steps: int, batch_dim: int | None, draws: bool) -> None:
        self.step, self.steps, self.draws = step, steps, draws
        self.params, self.state = _Slots(params), _Slots(state)
        self.batch = _Batch(batch, steps, batch_dim, self.static)

    @property
    def static(self) -> list[Tensor]:
        return [*self.params.buffers, *self.state.buffers]

    def advance(
        self, static: Sequence[Tensor], batch: Sequence[Tensor], step: Callable | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """One step: new values of the static buffers, and its report: the tensors of loss and aux, and of a draw."""
        n = len(self.params.buffers)
        params, state, info = (step or self.step)(
            self.params.tree(static[:n]), self.state.tree(static[n:]), self.batch.tree(batch)
        )
        report = info
        if self.draws:
            report = Steps(*info, params)
        elif self.steps > 1:
            report = Steps(*info)
        leaves, self._info_spec = optree.tree_flatten(report)
        self._constants = {i: x for i, x in enumerate(leaves) if not torch.is_tensor(x)}
        self._single = len([x for x in optree.tree_leaves(info) if torch.is_tensor(x)]) if self.steps == 1 else 0
        new = [*self.params.collect(params, "params"), *self.state.collect(state, "a state")]
        return new, [x for x in leaves if torch.is_tensor(x)]

    def write(self, static: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        """Write new values into the static buffers. What shares memory with one (an old value kept, two that change places)
        is copied before any is written."""
        mine = {buffer.untyped_storage()._cdata for buffer in static}
        values = [x if x is b or x.untyped_storage()._cdata not in mine else _kept(x) for b, x in zip(static, new)]
        for buffer, value in zip(static, values):
            if value is not buffer:
                buffer.copy_(value)

    def together(self, reports: list[Sequence[Tensor]]) -> list[Tensor]:
        """The reports of all steps, stacked on axis 0; of a single step only the draws are."""
        if len(reports[0]) == self._single:
            return reports[0]
        return [xs[0] if i < self._single else torch.stack(xs) for i, xs in enumerate(zip(*reports))]

    def info(self, tensors: Sequence[Tensor]) -> Info | Steps:
        if self._constants:
            tensors = list(tensors)
            for i, constant in self._constants.items():
                tensors.insert(i, constant)
        return optree.tree_unflatten(self._info_spec, tensors)


@torch.library.custom_op("bayesopt_chain::kept", mutates_args=())
def _kept(x: Tensor) -> Tensor:
    """A copy that no compiler takes away: inductor drops a clone of an input even where that is overwritten before."""
    return x.clone()


@_kept.register_fake
def _(x):
    return torch.empty_like(x)


def _trace(body: _Body) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    """One step's graph over (static buffers, batch, closed-over tensors), writing the buffers; and those tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    n = len(body.static)
    batch = [x.detach() for x in body.batch.of_step(body.batch.tensors, 0)]  # a tensor given twice is two inputs
    mutations = _Mutations()
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # without symbols: a value or shape it does not know is an error

    def function(*flat):
        with mutations:
            new, report = body.advance(flat[:n], flat[n:])
            report = [x.clone() for x in report]
        body.write(flat[:n], new)
        return report

    try:
        fakes = [mode.from_tensor(x, static_shapes=True) for x in (*body.static, *batch)]
        with torch.no_grad(), mode:
            graph = make_fx(function)(*fakes)
    except CaptureError:
        raise
    except Exception as err:
        line = _users_line(err)
        if line is None or not _is_about_values(err):
            raise
        raise CaptureError(
            f"capture: {line} needs a value or a shape that is known only when the step runs ({_first_line(err)}). "
            "Write it with tensors (torch.where for a branch, a schedule that is a function of the count), "
            "or leave this step uncaptured"
        ) from err
    finally:
        mutations.undo()
    return graph, _lift_constants(graph)


class _Mutations(TorchDispatchMode):
    """Remembers the closed-over tensors that the traced step writes (BatchNorm's statistics), to put them back."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.is_mutable:
            with _disable_current_modes():
                for x in args:
                    if type(x) in (Tensor, torch.nn.Parameter) and id(x) not in self.before:
                        self.before[id(x)] = x, x.detach().clone()
        return func(*args, **(kwargs or {}))

    def undo(self) -> None:
        with torch.no_grad():
            for x, old in self.before.values():
                x.copy_(old)


def _check_devices(graph: torch.fx.GraphModule, body: _Body) -> None:
    """Refuse tensors on the CPU that a CUDA graph would read once and never again. Literals of the code may be there."""
    device = body.static[0].device
    placeholders = graph.graph.find_nodes(op="placeholder")
    first = len(body.static) + len(body.batch.tensors)
    for n, node in enumerate(placeholders):
        literal = all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)
        if not node.users:  # what the state keeps for absent parameters stays as it is
            continue
        if node.meta["val"].device != device and not (n >= first and literal):
            what = (
                "batch" if len(body.static) <= n < first else "params or state" if n < first else "a closed-over tensor"
            )
            raise CaptureError(
                f"capture: {what}: {_describe(node.meta['val'])} is not on {device}, so that replays would not see it change; "
                f"move it there first (.to({str(device)!r}))"
            )


def _lift_constants(graph: torch.fx.GraphModule) -> list[Tensor]:
    """Turn the tensors that the graph holds into inputs, so that they are read at every replay."""
    lifted: dict[int, tuple[torch.fx.Node, Tensor]] = {}
    for node in list(graph.graph.nodes):
        if node.op == "get_attr" and torch.is_tensor(value := getattr(graph, node.target, None)):
            if id(value) not in lifted:
                lifted[id(value)] = _new_input(graph, f"closed_over_{len(lifted)}", node.meta), value
            node.replace_all_uses_with(lifted[id(value)][0])
            graph.graph.erase_node(node)
    graph.recompile()
    return [value for _, value in lifted.values()]


def _new_input(graph: torch.fx.GraphModule, name: str, meta: dict) -> torch.fx.Node:
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1:]
    with graph.graph.inserting_after(last[0]) if last else graph.graph.inserting_before(None):
        placeholder = graph.graph.placeholder(name)
    placeholder.meta.update(meta)
    return placeholder


def _lift_draws(graph: torch.fx.GraphModule) -> list[Tensor]:
    """Have the graph draw into inputs, so that no call allocates (and page-faults) its noise anew; and those buffers."""
    buffers = []
    ops = torch.ops.bayesopt_chain
    for node in graph.graph.find_nodes(op="call_function", target=ops.philox_normals.default):
        key, step, sizes, first, dtype = node.args
        place = _new_input(graph, f"draw_{len(buffers)}", node.meta)
        with graph.graph.inserting_before(node):
            graph.graph.call_function(ops.philox_normals_.default, (place, key, step, sizes, first))
        node.replace_all_uses_with(place)
        graph.graph.erase_node(node)
        buffers.append(torch.empty(node.meta["val"].shape, dtype=dtype))
    graph.recompile()
    return buffers


class _Compiled:
    """The graph of one step, compiled, and called once for each step.

    What inductor generates takes the graph's inputs in some order and returns its outputs; torch wraps it in functions that
    see to views, aliases and gradients. The first call goes through them and watches: where the generated function
    was handed our tensors themselves and its results came back untouched, later calls go to it directly.
    """

    def __init__(self, body: _Body, graph: torch.fx.GraphModule, closed_over: list[Tensor]) -> None:
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        def remember(*args, **options):
            self.generated.append(compile_fx_inner(*args, **options))
            return self.generated[-1]

        self.body = body
        self.generated: list = []
        example = [  # shares no memory with anything, as the batches to come
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in body.batch.of_step(body.batch.tensors, 0)
        ]
        self.inputs = [*body.static, *example, *closed_over, *_lift_draws(graph)]
        self.batch_at = [(len(body.static) + i,) for i in range(len(example))]  # where each tensor of the batch goes
        with torch.no_grad():
            self.whole = compile_fx(graph, self.inputs, inner_compile=remember)
        self.program = self._first

    def __call__(self, batch: list[Tensor]) -> Sequence[Tensor]:
        graded = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # what torch.no_grad() does, without its 1 us
        try:
            return self.body.together([self._step(self.body.batch.of_step(batch, k)) for k in range(self.body.steps)])
        finally:
            torch._C._set_grad_enabled(graded)

    def _step(self, batch: Sequence[Tensor]) -> Sequence[Tensor]:
        args = self.inputs.copy()
        for places, x in zip(self.batch_at, batch):
            for i in places:
                args[i] = x
        return self.program(args)

    def _first(self, args: list[Tensor]) -> Sequence[Tensor]:
        self.program = lambda args: self.whole(*args)
        made = self.generated[0] if len(self.generated) == 1 else None
        function = getattr(made, "current_callable", None)
        if function is None:
            return self.program(args)
        handed: list = []
        returned: list = []

        def watch(inner_args: list[Tensor]) -> Sequence[Tensor]:
            handed.extend(inner_args)
            returned.extend(function(inner_args))
            return tuple(returned)

        made.current_callable = watch
        try:
            out = self.whole(*args)
        finally:
            made.current_callable = function
        place = {id(x): i for i, x in enumerate(args)}
        order = [place.get(id(x), -1) for x in handed]
        untouched = len(out) == len(returned) and all(map(is_, out, returned))
        if untouched and len(place) == len(args) and set(order) == set(range(len(args))):
            self.program = function
            self.inputs = [self.inputs[i] for i in order]
            self.batch_at = [tuple(k for k, o in enumerate(order) if o == i) for (i,) in self.batch_at]
        return out


class _Eager:
    """The same program without a compiler, all steps in one; ``step`` may move the buffers in place."""

    def __init__(self, body: _Body, step: Callable | None = None) -> None:
        self.body, self.step = body, step

    def __call__(self, batch: list[Tensor]) -> list[Tensor]:
        body, static = self.body, self.body.static
        new, reports = static, []
        with torch.no_grad():
            for k in range(body.steps):
                new, report = body.advance(new, body.batch.of_step(batch, k), self.step)
                reports.append([x.clone() for x in report] if body.steps == 1 or self.step else report)
            info = body.together(reports)
            body.write(static, new)
        return info


class _CudaGraph:
    """One CUDA graph: warmed up on a side stream, with every tensor and generator put back before it is recorded.

    A graph knows addresses, not tensors. So this holds whatever the step may read: its own batch, the program with the
    buffers that it keeps, and the memory of the closed-over tensors, also where their owners let go of them.
    """

    def __init__(
        self, body: _Body, closed_over: list[Tensor], overwritten: list[Tensor], step: Callable, warmups: int = 3
    ) -> None:
        self.batch = [x.detach().clone() for x in body.batch.tensors]
        self.program = _Eager(body, step)
        self.read = [x.detach() for x in closed_over]
        touched = [*body.static, *overwritten]
        before = [t.clone() for t in touched]
        device = body.static[0].device
        rng = torch.cuda.get_rng_state(device)
        with torch.cuda.device(device):
            side = _side_stream(device)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(warmups):
                    self.program(self.batch)
            torch.cuda.current_stream().wait_stream(side)
            with torch.no_grad():
                for t, old in zip(touched, before):
                    t.copy_(old)
            torch.cuda.set_rng_state(rng, device)
            torch.cuda.synchronize()
            gc.collect()  # so that nothing of the device is freed while the graph is being recorded
            self.graph = torch.cuda.CUDAGraph()
            self.info = self.recorded(side)

    def recorded(self, stream: Any) -> list[Tensor]:
        """Record the program on a stream of the tensors' device. Other threads, such as loaders, may go on meanwhile."""
        cause: list[Exception] = []
        try:
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                try:
                    return self.program(self.batch)
                except Exception as err:
                    cause.append(err)  # the end of the recording fails too, with less to say
                    raise
        except Exception as err:
            first = cause[0] if cause else err
            raise CaptureError(
                f"capture: {_users_line(first) or 'the step'} cannot be recorded in a CUDA graph ({_first_line(first)}). It "
                "must not wait for the device (a decomposition that checks its result, .item()) or copy from the host "
                "(torch.tensor(number, device=...); torch.full fills in on the device): rewrite it, or leave this step "
                "uncaptured"
            ) from first

    def __call__(self, batch: list[Tensor]) -> list[Tensor]:
        for mine, x in zip(self.batch, batch):
            mine.copy_(x.detach())
        self.graph.replay()
        return [x.clone() for x in self.info]  # the next replay overwrites them, and losses are there to be collected


@cache
def _side_stream(device: torch.device) -> Any:
    """One stream a device for all warm-ups and recordings: every further one would keep a cuBLAS workspace of its own."""
    return torch.cuda.Stream(device)


def _overwritten(graph: torch.fx.GraphModule, closed_over: list[Tensor]) -> list[Tensor]:
    """The closed-over tensors into whose memory the step writes."""
    written = set()
    for node in graph.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            continue
        for n, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = node.args[n] if n < len(node.args) else node.kwargs.get(argument.name)
                for x in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(x, torch.fx.Node):
                        written.add(x.meta["val"].untyped_storage()._cdata)
    placeholders = graph.graph.find_nodes(op="placeholder")[-len(closed_over) :] if closed_over else []
    return [x for x, node in zip(closed_over, placeholders) if node.meta["val"].untyped_storage()._cdata in written]


def _best(body: _Body) -> Backend:
    if body.static and body.static[0].device.type == "cuda":
        return "cuda"
    if compiler_found():
        return "inductor"
    global _said
    if not _said:
        _said = True
        warnings.warn(
            "capture: no C++ compiler found, so the step stays eager; install g++ or clang, or set CXX", stacklevel=3
        )
    return "eager"


_said = False  # whether the missing compiler was mentioned


def compiler_found() -> bool:
    """Whether inductor can compile for the CPU here."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return bool(get_cpp_compiler())
    except Exception:
        return False


def _describe(x: Any) -> str:
    return f"{tuple(x.shape)}, {x.dtype} on {x.device}" if torch.is_tensor(x) else repr(x)


def _first_line(err: Exception) -> str:
    return str(err).strip().split("\n")[0][:200] or type(err).__name__


_LIBRARIES = tuple(str(Path(module.__file__).parent) for module in (torch, optree))
_HERE = (__file__, str(Path(__file__).with_name("step.py")), str(Path(__file__).with_name("parallel.py")))


def _users_line(err: BaseException) -> str | None:
    """The innermost line of the traceback that is neither torch's nor the loop's."""
    frames = traceback.extract_tb(err.__traceback__)
    for frame in reversed(frames):
        if not frame.filename.startswith(_LIBRARIES) and frame.filename not in _HERE:
            return f"{frame.filename}:{frame.lineno}: `{frame.line}`"
    return None


def _is_about_values(err: BaseException) -> bool:
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    known = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
    words = (
        "tracing tensor",
        "data-dependent",
        "data dependent",
        "fake tensor",
        "FakeTensor",
        "not allowed when tracing",
    )
    return isinstance(err, known) or any(word in str(err) for word in words)
