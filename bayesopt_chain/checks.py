"""Refusals: each names the argument, shows what came, and says what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import import_module
from numbers import Integral, Real
from typing import Any, NoReturn

import optree
import torch
from torch import Tensor

from bayesopt_chain._torch import is_dtensor
from bayesopt_chain.tracing import batch_levels, is_hidden, is_plain, is_readable, is_transformed


def finite_data(what: str, numbers: Tensor) -> None:
    """Refuse ``[N, ...]`` numbers of N data some of which are NaN or infinite.

    Args:
        what: whose numbers, with which the message begins.
        numbers: of each datum.

    Raises:
        ValueError: naming how many data, and the first.

    Example:
        >>> finite_data("query: outputs", torch.tensor([1.0, torch.nan]))
        Traceback (most recent call last):
        ValueError: query: outputs are NaN or infinite for 1 of 2 data, number 1 first: leave these data out
    """
    wrong = ~numbers.flatten(1).isfinite().all(1) if numbers.ndim > 1 else ~numbers.isfinite()
    if bool(wrong.any()):
        raise ValueError(
            f"{what} are NaN or infinite for {int(wrong.sum())} of {len(wrong)} data, number {int(wrong.nonzero()[0])} first: "
            "leave these data out"
        )


def number(
    name: str,
    value: Any,
    within: str | None = "(-inf, inf)",
    integer: bool = False,
    tensor: bool = False,
    schedule: bool = False,
    hint: str = "",
) -> None:
    """Refuse what is no number, or lies outside an interval. NaN lies in none, infinity in those that are closed there.

    Args:
        name: the argument's, with which the message begins.
        value: what came. ``True`` and ``False`` are no numbers.
        within: the interval as it is written, ``"[0, 1)"``: brackets include an end, parentheses do not; ``None`` for any.
        integer: whether it must be an integer.
        tensor: whether a real 0-d tensor will do. One that is hidden (see :mod:`bayesopt_chain.tracing`) passes unread.
        schedule: whether a callable will do; it passes uncalled.
        hint: what to do instead, put at the end of the message.

    Raises:
        TypeError: not a number (an integer, a tensor, a schedule).
        ValueError: outside the interval; a tensor that is not 0-d and real.

    Example:
        >>> number("momentum", 0.9, "[0, 1)")
        >>> number("momentum", 1.0, "[0, 1)")
        Traceback (most recent call last):
        ValueError: momentum must lie in [0, 1), got 1.0
        >>> number("eps", "small", "(0, inf)")
        Traceback (most recent call last):
        TypeError: eps must be a number, got 'small'
    """
    if schedule and callable(value) and not isinstance(value, Tensor):
        return
    shown: Any = value
    if isinstance(value, Tensor) and tensor:
        if value.ndim or value.dtype.is_complex or value.dtype == torch.bool:
            raise ValueError(f"{name}: a tensor must be 0-d and real, got shape {tuple(value.shape)}, {value.dtype}")
        if is_hidden(value):
            return
        shown = value = value.item()
    tail = f"; {hint}" if hint else ""
    if isinstance(value, bool) or not isinstance(value, Integral if integer else Real):
        kinds = ["an integer" if integer else "a number", *["a 0-d tensor"] * tensor, *["a schedule"] * schedule]
        wanted = " or ".join([", ".join(kinds[:-1]), kinds[-1]] if len(kinds) > 1 else kinds)
        raise TypeError(f"{name} must be {wanted}, got {short(shown)}{tail}")
    try:
        x = float(value)
    except OverflowError:
        raise ValueError(f"{name} must be a number that fits into a float, got {short(shown)}{tail}") from None
    if within is None:
        return
    low, high, has_low, has_high = interval(within)
    if not (low < x < high or (has_low and x == low) or (has_high and x == high)):
        wanted = _WORDS.get(within, f"lie in {within}")
        if integer and high >= LARGEST:
            wanted = f"be a whole number, at least {int(low)}"
        raise ValueError(f"{name} must {wanted}, got {short(shown)}{tail}")


LARGEST = 2**62  # of what is counted
TEMPERATURE_HINT = "1 / N samples a posterior of N data"

_WORDS = {
    "(-inf, inf)": "be finite",
    "(0, inf)": "be a positive, finite number",
    "[0, inf)": "be finite and not negative",
    "[1, inf)": "be at least 1 and finite",
}


@cache
def interval(within: str) -> tuple[float, float, bool, bool]:
    """Both ends, and whether each is included."""
    low, high = within[1:-1].split(",")
    return float(low), float(high), within[0] == "[", within[-1] == "]"


def installed(who: str, extra: str, *packages: str) -> None:
    """Refuse a call that needs packages which are not installed, before it does anything else.

    Args:
        who: the call, with which the message begins.
        extra: the extra of this library that brings the packages.
        packages: names as they are imported.

    Raises:
        ModuleNotFoundError: a package is missing; the message has the line that installs it.

    Example:
        >>> installed("r_hat", "diagnostics", "torch")
        >>> installed("r_hat", "diagnostics", "torch", "no_such_package")
        Traceback (most recent call last):
        ModuleNotFoundError: r_hat needs no_such_package: pip install 'bayesopt_chain[diagnostics]'
    """
    for package in packages:
        try:
            import_module(package)
        except ModuleNotFoundError:
            line = f"{who} needs {package}: pip install 'bayesopt_chain[{extra}]'"
            raise ModuleNotFoundError(line, name=package) from None


def short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def recording(who: str) -> None:
    """Refuse to take gradients where torch records none.

    Raises:
        ValueError: ``torch.inference_mode()`` is on.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError(
            f"{who}: this takes gradients, and torch.inference_mode() is on, which records none; call it outside of it"
        )


def temperature(value: Any) -> None:
    """A number, a 0-d tensor or a schedule, not negative, not NaN, not infinite."""
    number("temperature", value, "[0, inf)", tensor=True, schedule=True, hint=TEMPERATURE_HINT)


def at_this_step(name: str, value: float | Tensor) -> None:
    """Refuse what cannot be a rate or a temperature, where reading it costs nothing; elsewhere it turns to NaN.

    Raises:
        ValueError: negative, NaN or infinite, not a scalar, or complex.
    """
    if isinstance(value, Tensor):
        if value.ndim or value.is_complex():
            raise ValueError(f"{name}: must be a real scalar, got shape {tuple(value.shape)}, {value.dtype}")
        if not is_readable(value):
            return
        value = value.item()
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(
            f"{name}: its value at this step is {value}, but it must be finite and not negative (the sign of the descent is "
            "scale_by_neg_lr's); nothing was changed"
        )


def positive_temperature(who: str, value: Any, why: str) -> None:
    """Refuse temperature 0 for a sampler that is no optimizer there; that it is a temperature was checked before."""
    number = value.item() if isinstance(value, Tensor) and not is_hidden(value) else value
    if isinstance(number, Real) and number == 0:
        raise ValueError(f"{who}: temperature must be positive, got {number}: {why}")


def positive(name: str, value: Any) -> None:
    """A positive, finite number."""
    number(name, value, "(0, inf)")


def momentum(name: str, value: Any) -> None:
    """A number in [0, 1)."""
    number(name, value, "[0, 1)")


def parameters(leaves: Sequence[Any], paths: Sequence[Any]) -> None:
    """Parameters that can be sampled: at least one, floating point, real, whole."""
    found = False
    for leaf, path in zip(leaves, paths):
        if leaf is None:
            continue
        found = True
        if is_dtensor(leaf):
            raise ValueError(
                f"params: leaf {name(path)} is a DTensor (FSDP2, tensor parallelism), of which each rank has a part, where "
                "whole parameters are needed. Keep whole parameters on every rank and spread the data "
                "(bc.make_step(loss, tx, mesh=mesh)) or the chains (bc.parallel(step, n, mesh=mesh)); leaf.full_tensor() "
                "gathers one"
            )
        if not torch.is_tensor(leaf) or not leaf.is_floating_point() or leaf.layout is not torch.strided:
            kind = f"{leaf.dtype}, {leaf.layout}" if torch.is_tensor(leaf) else type(leaf).__name__
            raise TypeError(
                f"params: leaf {name(path)} is {kind}; only real floating-point tensors in the dense layout can be sampled. "
                "Leave it out of the tree (buffers belong into the loss), or set temperature=0"
            )
    if not found:
        raise ValueError("params: the tree has no leaves, so there is nothing to sample; pass the parameters to init")


def with_values(who: str, tree: str, leaves: Sequence[Any], paths: Sequence[Any]) -> None:
    """Refuse tensors on the meta device, which have shapes alone; ``tree`` is what the leaves are of, for the message.

    Raises:
        ValueError: naming the first of them.
    """
    for leaf, path in zip(leaves, paths):
        if torch.is_tensor(leaf) and leaf.is_meta:
            raise ValueError(
                f"{who}: leaf {name(path)} of {tree} is on the device meta, and has no values: call init under "
                "torch.device('cpu'), or another default device than meta, behind loading them"
            )


def samplable(leaves: Sequence[Any], paths: Sequence[str], which: Iterable[int] | None = None) -> None:
    """Refuse parameters that cannot be sampled: none at all, no real floating-point tensors, or one tensor twice.

    Args:
        leaves, paths: of all parameters.
        which: the numbers of those that are sampled. Default: all.

    Raises:
        TypeError, ValueError: naming the leaves.
    """
    chosen = sorted(range(len(leaves)) if which is None else which)
    leaves, paths = [leaves[j] for j in chosen], [paths[j] for j in chosen]
    parameters(leaves, paths)
    if (pair := sharing(leaves)) is not None:
        first, second = (paths[i] for i in sorted(pair))
        raise ValueError(
            f"params: {first} and {second} share memory; each would get noise of its own, and together they would sample at "
            "a higher temperature. Pass the tensor once, and let the loss use it twice"
        )


def sharing(tensors: Sequence[Any]) -> tuple[int, int] | None:
    """Find two tensors that have an element of memory in common.

    Args:
        tensors: of any shapes and strides. Entries whose memory cannot be read (traced, sparse, empty or no tensors) are
            left out.

    Returns:
        Their indices; ``None`` if there are no two.

    Example:
        >>> import torch
        >>> x = torch.zeros(4, 4)
        >>> sharing([x[:, :2], x[:, 2:]]), sharing([x[0], x[:, 0]])
        (None, (0, 1))
    """
    ranges = sorted(
        [
            (x.data_ptr(), x.data_ptr() + x.element_size() * (1 + _last_offset(x)), i)
            for i, x in enumerate(tensors)
            if isinstance(x, Tensor) and is_plain(x) and x.layout is torch.strided and x.numel() and x.data_ptr()
        ]
    )
    for k, (_, end, i) in enumerate(ranges):
        for start, _, j in ranges[k + 1 :]:
            if start >= end:
                break
            x, y = tensors[i], tensors[j]
            if (x.is_contiguous() and y.is_contiguous()) or torch.isin(_addresses(x), _addresses(y)).any():
                return i, j
    return None


def _last_offset(x: Tensor) -> int:
    """The offset of the last element of a tensor from its first, in elements."""
    return sum([(n - 1) * stride for n, stride in zip(x.shape, x.stride())])


def _addresses(x: Tensor) -> Tensor:
    """The address of every element of a tensor."""
    offsets = torch.arange(_last_offset(x) + 1, device="cpu").as_strided(x.shape, x.stride())
    return x.data_ptr() + x.element_size() * offsets.flatten()


def own_key(key: Tensor, g: Sequence[Tensor]) -> None:
    """Refuse a key of several chains, and gradients with a ``vmap`` axis that the key lacks: all lanes would get one noise.

    Raises:
        ValueError: with what to do instead.
    """
    if key.ndim:
        raise ValueError(
            f"state: it is of {len(key)} stacked chains, and this step is of one: make it by bc.parallel(step, {len(key)}), or "
            "take one of them, bc.unstack(state)[0]"
        )
    if is_transformed() and any(batch_levels(x) - batch_levels(key) for x in g):
        raise ValueError(
            "state: its key is one for all lanes of vmap, while the gradients differ, so that every lane would get the same "
            "noise: give each lane a state of its own, as bc.parallel does, or bc.stack(bc.fork(state, n))"
        )


def differentiable(leaves: Sequence[Any], params: Any) -> None:
    """Parameters that a gradient can be taken in: real floating-point tensors."""
    for i, leaf in enumerate(leaves):
        if type(leaf) in (Tensor, torch.nn.Parameter) and leaf.is_floating_point():
            continue
        if is_dtensor(leaf) and is_transformed():
            raise ValueError(
                f"params: leaf {name(optree.tree_paths(params)[i])} is a DTensor, which vmap and torch.func "
                "cannot transform; run several chains with bc.parallel(step, n, loop=True)"
            )
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            continue
        path = name(optree.tree_paths(params)[i])
        if isinstance(leaf, torch.nn.Module):
            raise TypeError(
                f"params: leaf {path} is a module, {type(leaf).__name__}; pass its parameters in a dict: "
                + (
                    "dict(params.items())"
                    if isinstance(leaf, torch.nn.ParameterDict)
                    else "dict(module.named_parameters())"
                )
            )
        if isinstance(leaf, Tensor):
            raise TypeError(
                f"params: leaf {path} is {leaf.dtype}, in which no gradient can be taken; keep it in the batch"
            )
        raise TypeError(
            f"params: leaf {path} is {short(leaf)} ({type(leaf).__name__}), not a tensor; make it one (torch.tensor(...)), or "
            "keep it in the batch"
        )


def dense(grads: Sequence[Any], params: Any) -> None:
    """Gradients as dense tensors: noise, momentum and curvature are."""
    for i, g in enumerate(grads):
        if g.layout is not torch.strided:
            path = name(optree.tree_paths(params)[i])
            raise ValueError(
                f"loss: the gradient of leaf {path} is sparse ({g.layout}); noise and momentum are dense: build the layer with "
                "sparse=False (torch.nn.Embedding)"
            )


def not_dense(i: int, x: Any) -> NoReturn:
    """Refuse a gradient that is no dense tensor: noise and velocities are.

    Raises:
        TypeError: no tensor.
        ValueError: a sparse one.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"updates: leaf {i} is {short(x)}, not a tensor")
    raise ValueError(
        f"updates: leaf {i} is sparse ({x.layout}), and noise is dense: build the layer with sparse=False "
        "(torch.nn.Embedding), or pass .to_dense()"
    )


def unlike(what: str, i: int, x: Tensor, whose: str, shape: Any, dtype: Any, device: Any) -> NoReturn:
    """Refuse a leaf of another shape or dtype than the state's, or on another device than the parameter.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        f"{what}: leaf {i} has shape {tuple(x.shape)}, {x.dtype} on {x.device}, but {whose} {tuple(shape)}, {dtype} on "
        f"{device}; call init with these parameters, or convert one of them"
    )


def name(path: tuple | str) -> str:
    return (path if isinstance(path, str) else "".join(f"[{part!r}]" for part in path)) or "(the bare tensor)"


def show(value: Any) -> str:
    """A hyperparameter as ``repr`` of a link shows it."""
    if torch.is_tensor(value):
        return (
            f"tensor({value.item():.6g})" if value.ndim == 0 and not is_hidden(value) else f"tensor{tuple(value.shape)}"
        )
    if callable(value):
        return getattr(value, "__name__", type(value).__name__)
    return repr(value)
