r"""Watches a forward pass and taps the layers that use each parameter, so that curvature sees their inputs and output
gradients.

A tap adds a zero e to a layer's output, ``y = layer(x) + e``; the derivative with respect to e is the gradient g of the
output, and (x, g) give the parameter's gradient for every datum (see ``_kinds.py``). The parameters are recognised by
identity in the arguments of torch functions, whether ``forward`` calls a module through ``torch.func.functional_call``
or multiplies matrices by hand. A parameter that several layers use in one way has several uses. A parameter that is used in a
way that has no tap, or in two ways (as the embedding and the head of a language model), gets none: ``untapped`` says why, and
the caller forms its gradients outright.

Remembers what has been checked, so that an estimator pays for it once and not at every batch.

A check holds for another batch if trees, shapes and dtypes are those of the batch that was checked, and if the forward pass is
the same program: it calls the same torch functions in the same order, with the same arguments apart from the tensors. A check
that could not have failed, because a gradient was zero or not finite, is not remembered.
"""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import optree
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from bayesopt_chain._torch import innermost_transformation
from bayesopt_chain.curvature._autodiff import call
from bayesopt_chain.curvature._kinds import Embedding, Grouped, Kind, Matrix, Vector
from bayesopt_chain.tracing import is_transformed
from bayesopt_chain.trees import Tree

REMEMBERED = 8  # for how many shapes of batches a check is remembered
LARGEST = 2**18  # a plan holds the outputs of one datum: it is remembered if there are no more numbers than this

Program = list[Any]
Result = TypeVar("Result")


class ProgramChangedError(Exception):
    """The forward pass calls other functions than when it was checked."""


class Check:
    """What one pass over a batch has shown.

    Attributes:
        is_done: whether everything was checked before, so that this pass need not compare.
        could_fail: whether every comparison so far could have failed; one of zeros with zeros could not.
        plan: the plan with which the pass ended.
        programs: the functions that the forward pass called, by the number of data in the chunk.
    """

    def __init__(self) -> None:
        self.is_done = False
        self.could_fail = True
        self.plan: Any = None
        self.programs: dict[int, Program] = {}

    def see(self, data: int, program: Program) -> None:
        """Record a program, or compare it with the one that was checked.

        Raises:
            ProgramChangedError: the program is another than the one that was checked.
        """
        if self.programs.setdefault(data, program) != program:
            if self.is_done:
                raise ProgramChangedError
            self.could_fail = False  # chunks of one length ran two programs, of which only one was compared


class Checks:
    """The plans of batches that have been checked, by their shapes."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Any, Check]] = {}

    def __reduce__(self) -> Any:
        return Checks, ()  # what has been checked is not handed on with a pickle

    def run(
        self, params: Tree, batch: Any, make_plan: Callable[[], Any], work: Callable[[Any, Check], Result]
    ) -> Result:
        """Call ``work(plan, check)`` and return its result.

        For a batch like an earlier one the plan and the check are those of the earlier one; else they are new, and remembered.
        """
        key = shapes_of(params, batch)
        if key in self._known and not is_transformed():
            try:
                return work(*self._known[key])
            except ProgramChangedError:
                del self._known[key]
        check = Check()
        result = work(make_plan(), check)
        plan, is_known = (
            check.plan,
            check.is_done and not is_transformed(),
        )  # of an affine model nothing is to be checked
        if (is_known or (plan.direct is not None and check.could_fail)) and plan.probe.numel() <= LARGEST:
            check.is_done = True
            if len(self._known) == REMEMBERED:
                del self._known[next(iter(self._known))]
            # Without the graph of the direct backward pass, which would keep the batch's activations alive.
            self._known[key] = plan._replace(direct=None, probe_outputs=[]), check
        return result


def shapes_of(params: Tree, batch: Any) -> Hashable:
    """The structures, shapes, dtypes and devices of parameters and batch: what a check depends on beside the program."""
    parts = [optree.tree_flatten(tree) for tree in (params, batch)]
    return tuple((structure, tuple(map(_shape, leaves))) for leaves, structure in parts)


def _shape(leaf: Any) -> Hashable:
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else repr(leaf)


def constants(value: Any) -> Any:
    """An argument of a torch function in which each tensor is replaced by the class ``Tensor``, so that programs compare."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(map(constants, value))
    if isinstance(value, Tensor):
        return Tensor
    if isinstance(value, dict):
        return tuple((name, constants(entry)) for name, entry in value.items())
    return repr(value)


class Canonical(NamedTuple):
    """Brings a layer's inputs and output gradients for b data into the form that their kind takes.

    Attributes:
        x: ``x(x, b)``, of the inputs.
        g: ``g(x, g, b)``, of the output gradients.
        unfolds: how many numbers ``g`` makes of one number of the output gradient, for the bound on memory.
    """

    x: Callable[[Tensor, int], Tensor]
    g: Callable[[Tensor, Tensor, int], Tensor]
    unfolds: int = 0


class Use(NamedTuple):
    """One parameter's use by one layer.

    Attributes:
        leaf: the parameter's number.
        tap: the number of the tapped output.
        kind: what the gradient is made of.
        canonical: brings (x, g) into the kind's form.
        features_last: whether the output's last axis is the layer's, and all others number data and positions.
    """

    leaf: int
    tap: int
    kind: Kind
    canonical: Canonical
    features_last: bool


class Candidate(NamedTuple):
    """A parameter that a layer was given; it is tapped if it is one of the leaves. Fields as in :class:`Use`."""

    parameter: Tensor
    x: Tensor | None
    kind: Kind
    canonical: Canonical
    features_last: bool = False


def _level() -> int:
    """How many ``torch.func`` transformations are running."""
    innermost = innermost_transformation()
    return 0 if innermost is None else innermost.level()


class Taps(TorchFunctionMode):
    """Records how a forward pass uses the parameters.

    Args:
        leaves: the parameters, objects of their own.
        data: how many data the pass is over.
        zeros: one tensor for each tapped output, added to it. Default: none, for a first pass, which learns their shapes.

    Attributes:
        uses: one for each layer and parameter.
        inputs: for each use the inputs of its layer.
        outputs: each tap's output for the last datum, to be compared with that of the datum alone.
        shapes: the shapes and dtypes of the tapped outputs.
        untapped: a reason for every leaf used in a way that has no tap.
        program: the functions that were called, with their arguments apart from the tensors.
        eps: the largest rounding unit of the tensors that the functions were called with.
    """

    def __init__(self, leaves: list[Tensor], data: int, zeros: list[Tensor] | None = None):
        super().__init__()
        self.leaves, self.data, self.zeros = leaves, data, zeros
        self.known = {id(leaf): (index, False) for index, leaf in enumerate(leaves)}
        self.uses: list[Use] = []
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.shapes: list[tuple[torch.Size, torch.dtype]] = []
        self.untapped: dict[int, str] = {}
        self.program: Program = []
        self.eps = 0.0
        self.level = _level()
        self._alive: list[Tensor] = []
        self._results: list[weakref.ref[Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        self.program.append((func, constants(args), constants(kwargs)))
        for x in args:
            if isinstance(x, Tensor) and x.is_floating_point():
                self.eps = max(self.eps, torch.finfo(x.dtype).eps)
        if func is F.batch_norm and _bound(F.batch_norm, args, kwargs)["training"]:
            raise ValueError(
                "batch norm in train mode makes every output depend on the whole batch: call model.eval() before "
                "curvature"
            )
        if func is torch.autograd.grad and not (kwargs["create_graph"] and torch.is_grad_enabled()):
            raise ValueError(
                "forward takes derivatives, but with gradients off or without create_graph=True, so that its outputs have lost "
                "their dependence on the parameters: write `with torch.enable_grad():` and create_graph=True there, or keep a "
                "linear last layer of a module (subset='last_layer')"
            )
        found = self._find(args) + self._find(kwargs.values())
        if not found or func in _DETACHED:
            return call(func, args, kwargs)
        if _level() != self.level:
            self.untapped |= {index: "it is used inside a torch.func transformation" for _, index, _ in found}
            return call(func, args, kwargs)
        # A transposed weight is the same parameter under another identity.
        if func in _TRANSPOSES and found[0][0].ndim == 2:
            return self._alias(func(*args, **kwargs), *found[0])
        layer = _LAYERS.get(func)
        result = layer(self, func, *args, **kwargs) if layer else NotImplemented
        if result is not NotImplemented:
            return result
        result = call(func, args, kwargs)
        if _has_tensor(result) and not any(result is tensor for tensor, *_ in found):
            for _, index, _ in found:
                self.untapped[index] = f"it is used by {getattr(func, '__name__', func)}, which curvature cannot tap"
        return result

    def tap(self, y: Tensor, *candidates: Candidate | None) -> Tensor:
        """Tap the output of a layer with these parameters, of which some may be None.

        Returns the output with which the forward pass is to continue: the layer's, plus the tap's zeros if there are any.
        """
        given = [candidate for candidate in candidates if candidate is not None and self.knows(candidate.parameter)]
        b = self.data
        # Computed once for all data, like a positional embedding: each datum gets a gradient of its own.
        once_for_all = b > 1 and y.ndim > 1 and y.shape[0] == 1
        if once_for_all:
            y = y.expand(b, *y.shape[1:])
        index = len(self.shapes)
        self.shapes.append((y.shape, y.dtype))
        if y.ndim == 0 or y.shape[0] % b or (self.zeros and self.zeros[index].shape != y.shape):
            leaves = [self.known[id(candidate.parameter)][0] for candidate in given]
            self.untapped |= dict.fromkeys(leaves, "its layer does not keep the data on the first axis")
            self.outputs.append(y.new_zeros(0))  # the number of a tap is its place in these lists
            self._results.append(weakref.ref(y))
            return y
        self.outputs.append(y.detach().reshape(b, -1)[-1].clone())
        for parameter, x, kind, canonical, features_last in given:
            leaf = self.known[id(parameter)][0]
            other = next((use.kind for use in self.uses if use.leaf == leaf), kind)
            if other != kind:
                self.untapped[leaf] = "its weights are tied: it is used in two ways, whose sum is no Kronecker product"
                continue
            x = y.new_zeros(b) if x is None else x.detach()
            self.uses.append(Use(leaf, index, kind, canonical, features_last))
            self.inputs.append(x.expand(b, *x.shape[1:]) if once_for_all and x.shape[0] == 1 else x)
        result = y + self.zeros[index] if self.zeros else y
        self._results.append(weakref.ref(result))
        return result

    def tap_of(self, outputs: Any) -> int | None:
        """Return the tap whose output is the model's, if one is."""
        return next((i for i, result in enumerate(self._results) if result() is outputs), None)

    def is_transposed(self, tensor: Tensor) -> bool:
        return self.known[id(tensor)][1]

    def knows(self, tensor: Any) -> bool:
        return id(tensor) in self.known

    def _find(self, arguments: Any) -> list[tuple[Tensor, int, bool]]:
        found = []
        for argument in arguments:
            if isinstance(argument, Tensor):
                if id(argument) in self.known:
                    found.append((argument, *self.known[id(argument)]))
            elif isinstance(argument, (tuple, list)):
                found += self._find(argument)
        return found

    def _alias(self, view: Tensor, tensor: Tensor, index: int, transposed: bool) -> Tensor:
        self.known[id(view)] = (index, not transposed)
        self._alive.append(view)
        return view


def _bound(function: Any, args: tuple, kwargs: dict) -> dict[str, Any]:
    arguments = _signature(function).bind(*args, **kwargs)
    arguments.apply_defaults()
    return arguments.arguments


_signature = functools.cache(inspect.signature)


def _has_tensor(result: Any) -> bool:
    return isinstance(result, Tensor) or (isinstance(result, (tuple, list)) and any(map(_has_tensor, result)))


def _linear(taps: Taps, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if taps.knows(input):
        return NotImplemented
    weight_use = _matrix_use(taps, input, weight, transposed=False)
    y = F.linear(input, weight, bias)
    return taps.tap(y, weight_use, _shift_use(bias, (y.shape[-1],), features_last=True))


def _matmul(taps: Taps, func: Any, input: Tensor, other: Tensor) -> Any:
    if taps.knows(input) or other.ndim != 2 or input.ndim < 2:
        return NotImplemented
    return taps.tap(func(input, other), _matrix_use(taps, input, other, transposed=True))


def _addmm(
    taps: Taps, func: Any, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Any:
    if taps.knows(mat1) or (beta, alpha) != (1, 1) or input.ndim != 1:
        return NotImplemented
    y = func(input, mat1, mat2)
    bias_use = _shift_use(input, (y.shape[-1],), features_last=True)
    return taps.tap(y, _matrix_use(taps, mat1, mat2, transposed=True), bias_use)


def _matrix_use(taps: Taps, x: Tensor, weight: Tensor, transposed: bool) -> Candidate | None:
    if not taps.knows(weight):
        return None
    transposed ^= taps.is_transposed(weight)
    rows, columns = weight.mT.shape if taps.is_transposed(weight) else weight.shape
    return Candidate(weight, x, Matrix((rows, columns), transposed), linear_canonical(), features_last=True)


def linear_canonical() -> Canonical:
    """The form of a linear layer's (x, g): positions on one axis."""
    return Canonical(
        lambda x, b: x.reshape(b, -1, x.shape[-1]), lambda x, g, b: g.reshape(g.shape[0], b, -1, g.shape[-1])
    )


def _convolution(
    taps: Taps,
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    y = func(input, weight, bias, stride, padding, dilation, groups)
    spatial, width = weight.ndim - 2, groups * weight.shape[1:].numel()
    kernel, stride, dilation = weight.shape[2:], _each(stride, spatial), _each(dilation, spatial)
    pads = _pads(padding, kernel, dilation)

    def of_input(x: Tensor, b: int) -> Tensor:
        return _columns(x, kernel, stride, pads, dilation).reshape(b, -1, width)

    def of_output(x: Tensor, g: Tensor, b: int) -> Tensor:
        return g.flatten(3).mT.reshape(g.shape[0], b, -1, g.shape[2])

    return _convolved(taps, y, input, weight, bias, groups, False, Canonical(of_input, of_output))


def _convolved(
    taps: Taps,
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    groups: int,
    transposed: bool,
    canonical: Canonical,
) -> Any:
    """Tap the output of a convolution, whose canonical (x, g) have the channels of all groups on the last axis."""
    if taps.knows(x) or y.ndim != weight.ndim:
        return NotImplemented
    shape = weight.shape[0], weight.shape[1:].numel()
    kind: Kind = Matrix(shape, transposed)
    if groups > 1:
        whole, kind = canonical, Grouped(shape, transposed, groups)
        canonical = canonical._replace(
            x=lambda x, b: whole.x(x, b).unflatten(-1, (groups, -1)),
            g=lambda x, g, b: whole.g(x, g, b).unflatten(-1, (groups, -1)),
        )
    bias_use = _shift_use(bias, (y.shape[1],) + (1,) * (y.ndim - 2))
    return taps.tap(y, Candidate(weight, x, kind, canonical), bias_use)


def _transposed_convolution(
    taps: Taps,
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    """``y = fold(W^T x)``: at every position of the input a linear layer, whose outputs are added up where they overlap."""
    y = func(input, weight, bias, stride, padding, output_padding, groups, dilation)
    spatial, width, inputs = weight.ndim - 2, groups * weight.shape[1:].numel(), weight.shape[0]
    kernel, stride, dilation = weight.shape[2:], _each(stride, spatial), _each(dilation, spatial)
    pads = [(p, p - q) for p, q in zip(_each(padding, spatial), _each(output_padding, spatial))]

    def of_input(x: Tensor, b: int) -> Tensor:
        return x.flatten(2).mT.reshape(b, -1, inputs)

    def of_output(x: Tensor, g: Tensor, b: int) -> Tensor:
        columns = _columns(g.flatten(0, 1), kernel, stride, pads, dilation)
        return columns.reshape(g.shape[0], b, -1, width)

    canonical = Canonical(of_input, of_output, math.prod(kernel))
    return _convolved(taps, y, input, weight, bias, groups, True, canonical)


def _attention(taps: Taps, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Multi-head attention rebuilt out of linear layers, each of which can be tapped.

    In the first pass, which has no zeros, torch's own function gives the outputs, so that those of the rebuilt attention are
    compared with them.
    """
    given = _bound(F.multi_head_attention_forward, args, kwargs)
    query, key, value = given["query"], given["key"], given["value"]
    unknown = ("bias_k", "bias_v", "static_k", "static_v")
    if (
        any(map(taps.knows, (query, key, value)))
        or query.ndim != 3
        or any(given[name] is not None for name in unknown)
        or given["add_zero_attn"]
        or (given["training"] and given["dropout_p"] > 0)
    ):
        return NotImplemented
    result = _attend(taps, given, _projected(taps, given))
    return call(func, args, kwargs) if taps.zeros is None else result


def _projected(taps: Taps, given: dict[str, Any]) -> list[Tensor]:
    """Queries, keys and values, ``[B, T, E]``: of what all three weights, or biases, make of an input a third is used."""
    inputs = [given[name].transpose(0, 1) for name in ("query", "key", "value")]
    bias = given["in_proj_bias"]
    if given["use_separate_proj_weight"]:
        projected = [_linear(taps, F.linear, x, given[f"{name}_proj_weight"]) for name, x in zip("qkv", inputs)]
        if bias is None:
            return projected
        biases = [bias.expand(*y.shape[:-1], len(bias)) for y in projected]
        shifts = [taps.tap(b, _shift_use(bias, (len(bias),))).chunk(3, -1)[i] for i, b in enumerate(biases)]
        return [y + shift for y, shift in zip(projected, shifts)]
    if given["query"] is given["key"] is given["value"]:
        return list(_linear(taps, F.linear, inputs[0], given["in_proj_weight"], bias).chunk(3, -1))
    whole = [_linear(taps, F.linear, x, given["in_proj_weight"], bias) for x in inputs]
    return [y.chunk(3, -1)[i] for i, y in enumerate(whole)]


def _attend(taps: Taps, given: dict[str, Any], projected: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    heads = given["num_heads"]
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in projected)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    for name in ("attn_mask", "key_padding_mask"):
        mask = given[name]
        if mask is None:
            continue
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill(mask, -math.inf)
        if name == "key_padding_mask":
            mask = mask[:, None, None, :]
        elif mask.ndim == 3:
            mask = mask.unflatten(0, (-1, heads))
        scores = scores + mask
    weights = scores.softmax(-1)
    mixed = (weights @ v).transpose(1, 2).flatten(2)
    outputs = _linear(taps, F.linear, mixed, given["out_proj_weight"], given["out_proj_bias"]).transpose(0, 1)
    if not given["need_weights"]:
        return outputs, None
    return outputs, weights.mean(1) if given["average_attn_weights"] else weights


def _each(value: Any, spatial: int) -> tuple[int, ...]:
    return (value,) * spatial if isinstance(value, int) else tuple(value) * (spatial // len(value))


def _pads(padding: Any, kernel: torch.Size, dilation: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the padding (before, after) of every spatial axis."""
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernel)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(p, p) for p in _each(padding, len(kernel))]


def _columns(x: Tensor, kernel: torch.Size, stride: tuple, pads: list[tuple[int, int]], dilation: tuple) -> Tensor:
    """Unfold the patches under a kernel: ``[N, I, *spatial]`` to ``[N, positions, I k...]``.

    In memory the positions come last, as in the image: they are then copied a row of it at a time, and products that sum over
    positions read them in order.
    """
    x = F.pad(x, [p for pair in reversed(pads) for p in pair]) if any(map(any, pads)) else x
    for axis, (k, s, d) in enumerate(zip(kernel, stride, dilation)):
        x = x.unfold(2 + axis, d * (k - 1) + 1, s)[..., ::d]
    spatial = len(kernel)
    patches = x.permute(1, *range(2 + spatial, 2 + 2 * spatial), 0, *range(2, 2 + spatial))
    data, positions = x.shape[0], math.prod(x.shape[2 : 2 + spatial])
    return patches.reshape(x.shape[1] * math.prod(kernel), data * positions).mT.unflatten(0, (data, positions))


def _embedding(
    taps: Taps,
    func: Any,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if max_norm is not None or scale_grad_by_freq:
        return NotImplemented
    y = F.embedding(input, weight, padding_idx)

    rows, width = weight.shape

    def of_output(x: Tensor, g: Tensor, b: int) -> Tensor:
        g = g if padding_idx is None else g * (x != padding_idx % rows)[..., None]
        return g.reshape(g.shape[0], b, -1, g.shape[-1])

    canonical = Canonical(lambda x, b: x.reshape(b, -1), of_output)
    return taps.tap(y, Candidate(weight, input, Embedding((rows, width)), canonical))


def _norm(taps: Taps, func: Any, *args: Any, **kwargs: Any) -> Any:
    """A norm over the last axes, or over others with weights for the channels, on axis 1."""
    given = _bound(func, args, kwargs)
    x = given["input"]
    if taps.knows(x):
        return NotImplemented
    y, weight, bias = func(**given), given["weight"], given.get("bias")
    aligned = tuple(given.get("normalized_shape", (*x.shape[1:2], *[1] * (x.ndim - 2))))
    scale = None
    if taps.knows(weight):
        normalised = func(**{**given, "weight": None, **({"bias": None} if "bias" in given else {})})
        scale = _scale_use(weight, normalised, aligned)
    return taps.tap(y, scale, _shift_use(bias, aligned))


def _add(taps: Taps, func: Any, input: Any, other: Any, **kwargs: Any) -> Any:
    return _elementwise(taps, func, input, other, _shift_use) if not kwargs else NotImplemented


def _mul(taps: Taps, func: Any, input: Any, other: Any, **kwargs: Any) -> Any:
    def use(parameter: Tensor, aligned: tuple[int, ...]) -> Candidate | None:
        x = other if parameter is input else input
        return _scale_use(parameter, x, aligned) if isinstance(x, Tensor) and x.shape == shape else None

    shape = torch.broadcast_shapes(*(t.shape for t in (input, other) if isinstance(t, Tensor)))
    other_is_full = all(isinstance(t, Tensor) and (taps.knows(t) or t.shape == shape) for t in (input, other))
    return _elementwise(taps, func, input, other, use) if other_is_full and not kwargs else NotImplemented


def _elementwise(taps: Taps, func: Any, input: Any, other: Any, use: Any) -> Any:
    if taps.knows(input) == taps.knows(other):
        return NotImplemented
    parameter = input if taps.knows(input) else other
    if taps.is_transposed(parameter):
        return NotImplemented
    y = func(input, other)
    aligned = tuple(parameter.shape)
    while len(aligned) >= y.ndim and aligned and aligned[0] == 1:
        aligned = aligned[1:]
    return taps.tap(y, use(parameter, aligned)) if len(aligned) < y.ndim else NotImplemented


def _shift_use(parameter: Tensor | None, aligned: tuple[int, ...], features_last: bool = False) -> Candidate | None:
    """Use of a parameter that is added; ``aligned`` is its shape as it broadcasts against the output, from the right."""
    if parameter is None:
        return None
    return Candidate(parameter, None, Vector((parameter.numel(), 1)), shift_canonical(aligned), features_last)


def shift_canonical(aligned: tuple[int, ...]) -> Canonical:
    """The form of (x, g) for a parameter that is added; ``aligned`` as in :func:`_shift_use`."""
    return Canonical(lambda x, b: x, lambda x, g, b: _sum_to(g, aligned, b))


def _scale_use(parameter: Tensor, x: Tensor, aligned: tuple[int, ...]) -> Candidate:
    """Use of a parameter that multiplies ``x`` elementwise."""
    canonical = Canonical(lambda x, b: x.new_zeros(b), lambda x, g, b: _sum_to(g * x, aligned, b))
    return Candidate(parameter, x, Vector((parameter.numel(), 1)), canonical)


def _sum_to(g: Tensor, aligned: tuple[int, ...], b: int) -> Tensor:
    """Sum ``[K, N, *]`` over all that a parameter of shape ``aligned`` was broadcast over: ``[K, b, n]``."""
    g = g.reshape(g.shape[0], b, -1, *g.shape[2:])
    first = g.ndim - len(aligned)
    axes = [*range(2, first), *(first + i for i, length in enumerate(aligned) if length == 1)]
    summed = g.sum(axes) if any(g.shape[axis] > 1 for axis in axes) else g
    return summed.reshape(g.shape[0], b, -1)


_getters: Any = Tensor  # its properties are descriptors, which its stubs do not say
_DETACHED = {Tensor.detach, torch.detach, _getters.data.__get__}  # through these no gradient flows
_TRANSPOSES = {Tensor.t, torch.t, _getters.T.__get__, _getters.mT.__get__}
_LAYERS: dict[Any, Any] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.mm: _matmul,
    Tensor.mm: _matmul,
    torch.addmm: _addmm,
    F.embedding: _embedding,
    **{function: _norm for function in (F.batch_norm, F.group_norm, F.layer_norm, F.rms_norm)},
    F.multi_head_attention_forward: _attention,
    **{function: _convolution for function in (F.conv1d, F.conv2d, F.conv3d)},
    **{f: _transposed_convolution for f in (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)},
    **{function: _add for function in (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)},
    **{function: _mul for function in (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)},
}
