"""From an ``nn.Module`` to functions of a dictionary of tensors, and back.

A module computes with the tensors that it holds; a sampler needs ``forward(params, batch)``. :func:`make_functional` takes the
parameters that are trained out of a module (one entry for a tensor that several layers share, none for frozen ones),
:func:`write_back` puts a draw, a mode or a mean into it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bayesopt_chain import batches, checks, kinds
from bayesopt_chain._torch import is_fully_sharded

Tensors = dict[str, Tensor]
LABELS = ("labels", "label", "targets", "target")  # keys of a mapping that no model is called with


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, and each layer in its own mode again behind the block."""
    modes = {layer: layer.training for layer in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for layer, mode in modes.items():
            layer.training = mode


class Functional(NamedTuple):
    """What :func:`make_functional` returns: a function, the parameters it starts from, and the buffers."""

    forward: Forward
    params: Tensors
    buffers: Tensors


class Forward:
    """A module as a function of its trained parameters; made by :func:`make_functional`.

    ``forward(params, batch)`` gives the outputs with the module's own buffers, which it leaves as they are;
    :meth:`with_buffers` takes the buffers and returns their next values.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: str | Callable[[Any], Any] | None,
        outputs: str | Callable[[Any], Any] | None = None,
    ) -> None:
        self.module = module
        self.inputs = batches.picked(inputs, batch_inputs)
        self.outputs = batches.picked(outputs, as_it_is)
        self.names = frozenset(name for name, p in module.named_parameters() if p.requires_grad)
        self.has_buffers = any(True for _ in module.buffers())
        every, once = (
            (*module.named_parameters(remove_duplicate=d), *module.named_buffers(remove_duplicate=d))
            for d in (False, True)
        )
        self.shares = len(every) > len(once)  # whether a tensor has several names

    def __call__(self, params: Mapping[str, Tensor], batch: Any) -> Any:
        """The module's outputs for a batch."""
        moving: Tensors = {}
        if self.has_buffers and self.module.training:
            moving = {name: b.clone() for name, b in self.module.named_buffers()}
        return self._call({**params, **moving}, batch)

    def with_buffers(
        self, params: Mapping[str, Tensor], batch: Any, buffers: Mapping[str, Tensor]
    ) -> tuple[Any, Tensors]:
        """Outputs and the buffers after this batch; the given ones are not changed."""
        new = {name: b.clone() for name, b in buffers.items()}
        tensors = {**params, **new}
        out = self._call(tensors, batch)
        return out, {name: tensors[name] for name in new}

    def _call(self, tensors: Tensors, batch: Any) -> Any:
        """The module's outputs for these tensors; a tensor that it puts in the place of one of them (``self.count = self.count
        + 1``) comes back under its name."""
        if missing := self.names - tensors.keys():
            raise ValueError(
                f"forward: params lacks {sorted(missing)[:3]}, which make_functional gave; pass a tree of those names"
            )
        arguments, keywords = arguments_of(self.module, self.inputs(batch))
        places = None if self.shares or torch.compiler.is_dynamo_compiling() else _places(self.module, tensors)
        if places is None:
            return self.outputs(functional_call(self.module, tensors, arguments, keywords, tie_weights=self.shares))
        own = [held[key] for held, key in places]
        try:
            for (held, key), x in zip(places, tensors.values()):
                held[key] = x
            return self.outputs(self.module(*arguments, **keywords))
        except TypeError as err:
            if all(isinstance(x, Tensor) for x in (*arguments, *keywords.values())):
                raise
            raise TypeError(
                f"forward: the module was called with {checks.short(keywords or arguments)} ({err}): hand it batches of "
                "tensors (torch.as_tensor), or make_functional inputs=, which takes the module's arguments out of a batch"
            ) from err
        finally:
            for (held, key), name, x in zip(places, tensors, own):
                tensors[name] = held[key]
                held[key] = x


def copied(module: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy.

    Raises:
        ValueError: a module that cannot be copied.
    """
    try:
        return copy.deepcopy(module, memo)
    except (RuntimeError, TypeError) as err:
        raise ValueError(
            f"the module cannot be copied ({err}): keep no results of computations in it; in the place of "
            "torch.nn.utils.weight_norm take torch.nn.utils.parametrizations.weight_norm"
        ) from err


def _places(module: nn.Module, tensors: Tensors) -> list[tuple[dict[str, Any], str]] | None:
    """Where a module holds the parameters and buffers of these names: by a name's last part, in one of the dictionaries of a
    submodule. ``None`` where anything else is meant, such as an attribute, or what is no tensor.

    They are looked up at every call, so that submodules may be replaced in between.
    """
    found = []
    for name, x in tensors.items():
        *path, key = name.split(".")
        owner: Any = module
        for part in path:
            if part not in owner._modules:
                return None
            owner = owner._modules[part]
        held = owner._parameters if key in owner._parameters else owner._buffers
        if key not in held or not isinstance(x, Tensor):
            return None
        found.append((held, key))
    return found


def as_it_is(output: Any) -> Any:
    """What a module returned."""
    return output


def arguments_of(module: nn.Module, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a module is called with its inputs: a tuple as its arguments, a mapping as its keywords, or, by a module whose
    ``forward`` has no arguments of those names, whole."""
    if isinstance(inputs, tuple):
        return inputs, {}
    if isinstance(inputs, Mapping) and takes_keywords(module, inputs):
        return (), dict(inputs)
    return (inputs,), {}


def takes_keywords(module: nn.Module, names: Mapping[str, Any]) -> bool:
    """Whether ``forward`` has arguments of all these names."""
    try:
        arguments = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # a scripted or foreign module, which does not say
        return True
    return any(a.kind is a.VAR_KEYWORD for a in arguments.values()) or set(names) <= arguments.keys()


def batch_inputs(batch: Any) -> Any:
    """What of a batch a model takes: of ``(inputs, targets)`` the first, of a mapping all but its labels, else all of it."""
    if isinstance(batch, (tuple, list)):
        return batch[0]
    if isinstance(batch, Mapping):
        return {k: v for k, v in batch.items() if k not in LABELS}
    return batch


def make_functional(
    module: nn.Module,
    *,
    inputs: str | Callable[[Any], Any] | None = None,
    outputs: str | Callable[[Any], Any] | None = None,
) -> Functional:
    """Take the trained parameters out of a module.

    Args:
        module: any module, in the mode (``train`` or ``eval``) in which it is to run. It is not changed, and stays the
            place of its frozen parameters.
        inputs: from a batch to what the module is called with: one argument, a tuple of them, or a dictionary of
            keywords; or the key (of a dataclass, the field) of the one argument. By default ``batch[0]`` of a tuple or list, a
            mapping without its labels, and any other batch itself. A dictionary whose keys are no arguments of the module's
            ``forward`` is handed over whole.
        outputs: from what the module returns to what ``forward`` is to return, or its key (of anything but a mapping an
            attribute), such as ``"logits"`` of a transformer. Default: what it returns.

    Returns:
        ``(forward, params, buffers)``: ``forward(params, batch) -> outputs``; copies of the parameters with
        ``requires_grad``, by name, a tensor that several modules share under its first name only; copies of the buffers.

    Raises:
        TypeError: not a module.
        ValueError: no parameter requires a gradient; a module under ``fully_shard``.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        >>> forward, params, buffers = bc.make_functional(module)
        >>> sorted(params)
        ['0.bias', '0.weight', '2.bias', '2.weight']
        >>> forward(params, (torch.ones(5, 2), None)).shape
        torch.Size([5, 1])
    """
    kinds.require("make_functional", module=(module, kinds.MODULE))
    if isinstance(module, (torch.jit.ScriptModule, nn.DataParallel)):
        raise ValueError(
            f"make_functional: a {type(module).__name__} cannot be called with other parameters than its own: pass the module "
            "that it was made from (of DataParallel model.module)"
        )
    if is_fully_sharded(module):
        raise ValueError(
            "make_functional: the module is under fully_shard and computes with the parameters that it gathers itself, not "
            "with those it is handed. Train it by loss.backward() and an optimizer of bc.optim, such as "
            "bc.optim.SGHMC(model.parameters(), lr, temperature=T, generator=bc.distributed.generator(seed))"
        )
    params = {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}
    if not params:
        raise ValueError(
            "make_functional: no parameter of the module requires a gradient, so there is nothing to sample"
        )
    buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
    return Functional(Forward(module, inputs, outputs), params, buffers)


@torch.no_grad()
def write_back(module: nn.Module, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None = None) -> None:
    """Copy parameters (and buffers) by name into a module.

    Args:
        module: the module, or another of the same architecture.
        params: a draw, a mode or a mean, as :func:`make_functional` names them. Parameters that are not named stay.
        buffers: likewise.

    Raises:
        ValueError: a name that the module lacks, or another shape; nothing is changed then.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> module = torch.nn.Linear(2, 1)
        >>> forward, params, _ = bc.make_functional(module)
        >>> bc.write_back(module, {name: torch.zeros_like(p) for name, p in params.items()})
        >>> module(torch.ones(1, 2)).item()
        0.0
    """
    kinds.require(
        "write_back",
        module=(module, kinds.MODULE),
        params=(params, kinds.MAPPING),
        buffers=(buffers, kinds.MAPPING.or_none()),
    )
    places: list[tuple[Tensor, Tensor]] = []
    for what, values, own in (
        ("params", params, dict(module.named_parameters(remove_duplicate=False))),
        ("buffers", buffers or {}, dict(module.named_buffers(remove_duplicate=False))),
    ):
        for name, value in values.items():
            if name not in own:
                raise ValueError(f"write_back: {what} has {name!r}, which the module lacks; it has {sorted(own)[:8]}")
            if own[name].shape != value.shape:
                raise ValueError(
                    f"write_back: {what}[{name!r}] has shape {tuple(value.shape)}, the module's {tuple(own[name].shape)}; of "
                    "stacked chains or draws write one, draws[i]"
                )
            places.append((own[name], value))
    for place, value in places:
        place.copy_(value)
