"""From an ``nn.Module`` to functions of a dictionary of tensors, and back; and the batches that a module is called with.

A module computes with the tensors that it holds; a sampler needs ``forward(params, batch)``. :func:`make_functional` takes the
parameters that are trained out of a module (one entry for a tensor that several layers share, none for frozen ones),
:func:`write_back` puts a draw, a mode or a mean into it.

Loaders are read once, the first batch ahead of the rest, and their batches need not be pairs.

A causal language model predicts token ``t + 1`` at position ``t``. transformers' convention is that ``labels`` are the tokens
themselves, ``labels[t] = input_ids[t]``, and that the model's own loss moves them, so that the target at position ``t`` is
``labels[t + 1]`` and the last position has none (-100). A likelihood compares position by position: without the move a
model is fitted to copying its inputs. Other models that take ``labels [B, T]`` (token classifiers, masked and
sequence-to-sequence models) compare position by position themselves. Which it is, :class:`Reader` asks the model.

A draw has no statistics of BatchNorm's layers: those of the training run belong to other parameters. One pass over the data in
batches of ``n_k``, with ``N_k = n_1 + ... + n_k`` and the batch's own mean and (unbiased) variance ``s_k``,

    S_k = (1 - n_k / N_k) S_(k-1) + (n_k / N_k) s_k,

is the mean of the batches' statistics (Izmailov, Podoprikhin, Garipov, Vetrov and Wilson, 2018, section 3.2), weighted by
their sizes. Dropout and the like are off meanwhile.
"""

from __future__ import annotations

import copy
import inspect
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import length_hint
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import optree
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from bayesopt_chain import batches, checks
from bayesopt_chain._torch import SHARDED, spread_parts

Tensors = dict[str, Tensor]
BatchNorm = nn.modules.batchnorm._BatchNorm
DECODER_INPUTS = {"decoder_input_ids", "decoder_inputs_embeds"}
LABELS = ("labels", "label", "targets", "target")  # keys of a mapping that no model is called with
# one a module, which holds the tensors of a single call at a time, whichever thread makes it
_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
if hasattr(os, "register_at_fork"):  # a lock that another thread holds would never be free in the child
    os.register_at_fork(after_in_child=_locks.clear)
LEFT_OUT = -100  # transformers' label of a position that does not count
_CHECKPOINTING = (
    "forward: activation checkpointing computes again in the backward pass, and would do so with the module's own parameters "
    "in the place of those it is handed; turn it off (model.gradient_checkpointing_disable()), with all other hooks on saved "
    "tensors (torch.autograd.graph.save_on_cpu), or train by bc.optim, which takes the module as it is"
)


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """The model in training or in eval mode, and each layer in its own mode again behind the block."""
    modes = {layer: layer.training for layer in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for layer, mode in modes.items():
            layer.training = mode


def inner_of(module: nn.Module) -> Any:
    """The module that ``torch.compile`` and ``DistributedDataParallel`` wrapped, by whose names its parameters go."""
    inner = (
        module.module
        if isinstance(module, nn.parallel.DistributedDataParallel)
        else getattr(module, "_orig_mod", module)
    )
    return inner if inner is module else inner_of(inner)


class Functional(NamedTuple):
    """What :func:`make_functional` returns: a function, the parameters it starts from, and the buffers."""

    forward: Forward
    params: Tensors
    buffers: Tensors


class Forward:
    """A module as a function of its trained parameters; made by :func:`make_functional`.

    ``forward(params, batch)`` gives the outputs with the module's own buffers, or those in ``held``, which it leaves as they
    are; :meth:`with_buffers` takes the buffers and returns their next values.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: str | Callable[[Any], Any] | None,
        outputs: str | Callable[[Any], Any] | None = None,
    ) -> None:
        self.called, self.module = module, inner_of(module)
        self.held: Tensors = {}  # buffers to compute with in the place of the module's own
        self.inputs = batches.picked(inputs, partial(batch_inputs, module=self.module))
        self.outputs = batches.picked(outputs, as_it_is)
        self.names = frozenset(name for name, p in self.module.named_parameters() if p.requires_grad)
        self.has_buffers = any(True for _ in self.module.buffers())
        every, once = (
            (*self.module.named_parameters(remove_duplicate=d), *self.module.named_buffers(remove_duplicate=d))
            for d in (False, True)
        )
        self.shares = len(every) > len(once)  # whether a tensor has several names

    def __call__(self, params: Mapping[str, Tensor], batch: Any) -> Any:
        """The module's outputs for a batch."""
        if self.has_buffers and self.module.training:
            return self.with_buffers(params, batch, self.held or dict(self.module.named_buffers()))[0]
        return self._call({**params, **self.held}, batch)

    def with_buffers(
        self, params: Mapping[str, Tensor], batch: Any, buffers: Mapping[str, Tensor]
    ) -> tuple[Any, Tensors]:
        """Outputs and the buffers after this batch; the given ones are not changed."""
        new = {name: b.clone() for name, b in buffers.items()}
        tensors = {**params, **new}
        out = self._call(tensors, batch)
        return out, {name: tensors[name] for name in new}

    def _call(self, tensors: Tensors, batch: Any) -> Any:
        """The module's outputs for these tensors; activation checkpointing is refused."""
        if torch.compiler.is_dynamo_compiling():
            return self._outputs(tensors, batch)
        with (
            _locks.setdefault(self.module, threading.RLock()),
            torch.autograd.graph.disable_saved_tensors_hooks(_CHECKPOINTING),
        ):
            return self._outputs(tensors, batch)

    def _outputs(self, tensors: Tensors, batch: Any) -> Any:
        """The module's outputs for these tensors; a tensor that it puts in the place of one of them (``self.count = self.count
        + 1``) comes back under its name."""
        if missing := self.names - tensors.keys():
            raise ValueError(
                f"forward: params lacks {sorted(missing)[:3]}, which make_functional gave; pass a tree of those names"
            )
        arguments, keywords = arguments_of(self.module, self.inputs(batch))
        places = None if torch.compiler.is_dynamo_compiling() else _places(self.module, tensors)
        own = [held[key] for held, key in places or ()]
        if places is None or self.shares:
            try:
                return self.outputs(
                    torch.func.functional_call(self.module, tensors, arguments, keywords, tie_weights=self.shares)
                )
            finally:  # torch leaves the tensors of the call in a submodule that has two names
                for (held, key), x in zip(places or (), own):
                    held[key] = x
        try:
            for (held, key), x in zip(places, tensors.values()):
                held[key] = x
            return self.outputs(self.called(*arguments, **keywords))
        except TypeError as err:
            if all(isinstance(x, Tensor) for x in (*arguments, *keywords.values())):
                raise
            raise TypeError(
                f"forward: the module was called with {checks.short(keywords or arguments)} ({err}): hand it batches of "
                "tensors (torch.as_tensor), or mappings with the names of its arguments and no others; make_functional has "
                "inputs=, which takes the arguments out of a batch"
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
    except (RuntimeError, TypeError, ValueError) as err:
        raise ValueError(
            f"the module cannot be copied ({err}): keep no results of computations, locks or files in it; in the place of "
            "torch.nn.utils.weight_norm take torch.nn.utils.parametrizations.weight_norm; call a module with lazy norms once"
        ) from err


def reset_adapters(layer: nn.Module) -> bool:
    """Draw the adapters of one layer of PEFT anew, as PEFT starts them; returns whether the layer has any."""
    reset: Any = getattr(layer, "reset_lora_parameters", None)
    for name in layer.lora_A if callable(reset) else ():  # pyright: ignore[reportGeneralTypeIssues]
        reset(name, True)
    return callable(reset)


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
    ``forward`` has no arguments of those names, whole. A list, as a ``DataLoader`` makes of tuples, counts as a tuple where
    ``forward`` needs several arguments."""
    if isinstance(inputs, tuple) or (isinstance(inputs, list) and needs_several(module)):
        return tuple(inputs), {}
    if isinstance(inputs, Mapping) and takes_keywords(module, inputs):
        return (), dict(inputs)
    return (inputs,), {}


def needs_several(module: nn.Module) -> bool:
    """Whether ``forward`` cannot be called with one argument."""
    arguments = inspect.signature(module.forward).parameters.values()
    return sum(a.default is a.empty and a.kind is a.POSITIONAL_OR_KEYWORD for a in arguments) > 1


def takes_keywords(module: nn.Module, names: Mapping[str, Any]) -> bool:
    """Whether ``forward`` has arguments of all these names."""
    arguments = inspect.signature(module.forward).parameters
    return any(a.kind is a.VAR_KEYWORD for a in arguments.values()) or set(names) <= arguments.keys()


def one_by_one(function: Callable[..., Any], *stacked: Any) -> Any:
    """What a function makes of each entry of stacked trees, stacked again: in the place of a ``vmap`` that refuses it."""
    count = len(optree.tree_leaves(cast(Any, stacked))[0])
    rows = [function(*optree.tree_map(lambda x, i=i: x[i], cast(Any, stacked))) for i in range(count)]
    return optree.tree_map(lambda *x: torch.stack(x), *rows)


def batch_inputs(batch: Any, module: Any = None) -> Any:
    """What of a batch a model takes: of ``(inputs, targets)`` the first, of a mapping all but its labels, else all of it.

    An encoder-decoder of transformers makes the decoder's inputs of its labels, which are each token's prediction from those
    before it; they are made here, since without labels such a model takes other ones, or none.
    """
    if isinstance(batch, (tuple, list)):
        return batch[0]
    if not isinstance(batch, Mapping):
        return batch
    inputs = {k: v for k, v in batch.items() if k not in LABELS}
    prepare: Any = getattr(module, "prepare_decoder_input_ids_from_labels", None)
    if prepare is not None and "labels" in batch and not DECODER_INPUTS & inputs.keys():
        inputs["decoder_input_ids"] = prepare(labels=batch["labels"])
    return inputs


@checks.takes(module=checks.MODULE, inputs=checks.INPUTS, outputs=checks.INPUTS)
def make_functional(
    module: nn.Module,
    *,
    inputs: str | Callable[[Any], Any] | None = None,
    outputs: str | Callable[[Any], Any] | None = None,
) -> Functional:
    """Take the trained parameters out of a module.

    Args:
        module: any module, in the mode (``train`` or ``eval``) in which it is to run. It is not changed, and stays the
            place of its frozen parameters. Under ``torch.compile`` or ``DistributedDataParallel`` parameters have the
            names of the module inside, so that draws fit it with and without.
        inputs: from a batch to what the module is called with: one argument, a tuple of them, or a dictionary of
            keywords; or the key (of a dataclass, the field) of the one argument. By default ``batch[0]`` of a tuple or list, a
            mapping without its labels, and any other batch itself. A dictionary whose keys are no arguments of the module's
            ``forward`` is handed over whole.
        outputs: from what the module returns to what ``forward`` is to return, or its key (of anything but a mapping an
            attribute), such as ``"logits"`` of a transformer. Default: what it returns.

    Returns:
        ``(forward, params, buffers)``: ``forward(params, batch) -> outputs``; copies of the parameters with
        ``requires_grad``, by name, a tensor that several modules share under its first name only; copies of the buffers.
        ``forward`` refuses activation checkpointing in the module; ``bc.optim`` trains such a module as it is. Threads that
        share the module take turns in ``forward``.

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
    if isinstance(module, (torch.jit.ScriptModule, nn.DataParallel)):
        raise ValueError(
            f"make_functional: a {type(module).__name__} cannot be called with other parameters than its own: pass the module "
            "that it was made from (of DataParallel model.module)"
        )
    if spread_parts(module, SHARDED):
        raise ValueError(
            "make_functional: the module is under fully_shard and computes with the parameters that it gathers itself, not "
            "with those it is handed. Train it by loss.backward() and an optimizer of bc.optim, such as "
            "bc.optim.SGHMC(model.parameters(), lr, temperature=T, generator=bc.distributed.generator(seed))"
        )
    inner = inner_of(module)
    params = {name: p.detach().clone() for name, p in inner.named_parameters() if p.requires_grad}
    if not params:
        raise ValueError(
            "make_functional: no parameter of the module requires a gradient, so there is nothing to sample"
        )
    buffers = {name: b.detach().clone() for name, b in inner.named_buffers()}
    return Functional(Forward(module, inputs, outputs), params, buffers)


@torch.no_grad()
@checks.takes(module=checks.MODULE, params=checks.BY_NAME, buffers=checks.BY_NAME.or_none())
def write_back(module: nn.Module, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None = None) -> None:
    """Copy parameters (and buffers) by name into a module.

    Args:
        module: the module, or another of the same architecture.
        params: a draw, a mode or a mean, as :func:`make_functional` names them. Parameters that are not named stay.
        buffers: likewise.

    Raises:
        TypeError: no dictionaries of tensors.
        ValueError: a name that the module lacks, or another shape; nothing is changed then.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> module = torch.nn.Linear(2, 1)
        >>> forward, params, _ = bc.make_functional(module)
        >>> bc.write_back(module, {name: torch.zeros_like(p) for name, p in params.items()})
        >>> module(torch.ones(1, 2)).item()
        0.0
    """
    module = inner_of(module)
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


def peeked(
    loader: Iterable, who: str = "fit_laplace", read: Callable[[Any], Any] | None = None
) -> tuple[Any, Iterable, int | None]:
    """Read the first of batches that hold each datum once; ``read`` makes a pair of each, by default :func:`as_pair`.

    Returns:
        The first batch, all of them, and about how many, ``None`` where that is not known.

    Raises:
        ValueError: there is none, or it is no pair (inputs, targets) and no mapping with labels.
    """
    loader = as_batches(loader)
    rest = map(read or as_pair, batches.each_once(loader))
    first = next(rest, None)
    if first is None:
        raise ValueError(f"{who}: the loader has no batches")
    if first[1] is None:
        raise ValueError(
            f"{who}: batches must be (inputs, targets), or mappings with one of the keys {', '.join(LABELS)}, got "
            f"{type(first[0]).__name__}; make pairs of any other, such as ((b['x'], b['y']) for b in loader)"
        )
    return first, chain([first], rest), length_hint(loader) or None


def as_batches(data: Any) -> Iterable:
    """Return ``data``, or, of one batch (a tensor, a mapping, a tuple with a tensor in it, no iterable), the list of it."""
    is_batch = isinstance(data, (Tensor, Mapping)) or (
        isinstance(data, tuple) and any(isinstance(x, Tensor) for x in data)
    )
    return [data] if is_batch or not hasattr(data, "__iter__") else data


def as_pair(batch: Any, module: Any = None) -> Any:
    """A batch as ``(inputs, targets)``: of a mapping what a module is called with (:func:`batch_inputs`), and its labels; where
    there are no targets, ``None``."""
    if isinstance(batch, Mapping):
        labels = [batch[key] for key in LABELS if key in batch]
        return batch_inputs(batch, module), labels[0] if labels else None
    if isinstance(batch, (tuple, list)):
        return batch if len(batch) == 2 else (batch[0] if len(batch) == 1 else tuple(batch), None)
    return batch, None


class Reader:
    """Reads batches of a module as pairs ``(inputs, targets)``, with ``labels`` moved where the module's own loss moves them.

    Args:
        module: what the batches are for; anything but a module never moves labels.
    """

    def __init__(self, module: Any = None) -> None:
        self.module = module
        self.moves: bool | None = None  # whether its own loss moves labels; known from the first labels of tokens on

    def __call__(self, batch: Any) -> Any:
        """The pair of a batch.

        Raises:
            ValueError: labels that are the batch's ``input_ids``, for a module that does not move them.
        """
        inputs, targets = pair = as_pair(batch, self.module)
        if not (isinstance(batch, Mapping) and targets is batch.get("labels") and _are_of_tokens(targets)):
            return pair
        if self.moves is None:
            self.moves = _moves_labels(self.module, batch)
        if self.moves:
            return inputs, next_labels(targets)
        targets = targets.to(torch.int64)  # torch compares unsigned ones with -100 modulo 256
        tokens, counted = batch.get("input_ids"), targets != LEFT_OUT
        if isinstance(tokens, Tensor) and tokens.shape == targets.shape and bool((tokens == targets)[counted].all()):
            raise ValueError(
                "labels equal input_ids at every position that counts, and the model has no loss of its own that moves "
                "them: it would be fitted to copying its inputs. Pass batches (inputs, targets) with the targets of each "
                "position, for the next token bc.posterior.next_labels(labels)"
            )
        return pair


def next_labels(labels: Tensor) -> Tensor:
    """Labels by the position that predicts them: those of the next token, and -100 (left out) at the last position.

    Args:
        labels: whole numbers ``[B, T]``, the tokens themselves; -100 where a token does not count.

    Returns:
        int64 ``[B, T]``, a new tensor.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> bc.posterior.next_labels(torch.tensor([[5, 6, 7]]))
        tensor([[   6,    7, -100]])
    """
    moved = torch.full_like(labels, LEFT_OUT, dtype=torch.int64)
    moved[:, :-1] = labels[:, 1:]
    return moved


def _are_of_tokens(labels: Any) -> bool:
    return isinstance(labels, Tensor) and labels.ndim == 2 and not labels.is_floating_point() and labels.numel() > 0


@torch.no_grad()
def _moves_labels(module: Any, batch: Mapping[str, Any]) -> bool:
    """Whether the module has a loss of its own, which moves labels.

    It does if the label of the first token alone counts for nothing: no position predicts the first token. The module is
    called with one datum, in eval mode; nothing of it changes.
    """
    if not isinstance(module, nn.Module) or not takes_keywords(module, batch):
        return False
    rows = len(batch["labels"])
    one = {k: v[:1] if isinstance(v, Tensor) and v.ndim and len(v) == rows else v for k, v in batch.items()}
    only = torch.full_like(one["labels"], LEFT_OUT, dtype=torch.int64)
    only[:, 0] = 0
    with in_mode(module, training=False):
        output = module(**{**one, "labels": only})
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return isinstance(loss, Tensor) and not bool(loss.isfinite().all() & loss.any())


def logits_of(output: Any) -> Any:
    """The tensor that a module returns, by itself or as the ``logits`` of a mapping or a dataclass (transformers' outputs)."""
    in_mapping = isinstance(output, Mapping) and "logits" in output
    return output["logits"] if in_mapping else getattr(output, "logits", output)


def with_progress(all_batches: Iterable, progress: bool, total: int | None = None, unit: str = "batch") -> Iterable:
    """The same, with a progress bar where it is asked for."""
    if not progress:
        return all_batches
    checks.installed("progress=True", "runs", "tqdm")
    from tqdm.auto import tqdm

    return tqdm(all_batches, unit=unit, total=total)


def require_eval(module: nn.Module, who: str = "fit_laplace") -> None:
    """Raise for layers that mix data or draw, and for parameters without values."""
    checks.with_values(who, "the module", [*module.parameters()], [name for name, _ in module.named_parameters()])
    for name, layer in module.named_modules():
        if isinstance(layer, BatchNorm) and layer.running_mean is None:
            raise ValueError(
                f"{who}: {name} ({type(layer).__name__}) has no running statistics, so that a datum's outputs depend on the "
                "others in eval mode too: train it with track_running_stats=True, or use a norm of single data"
            )
    require_eval_mode(module, who)


def require_eval_mode(module: nn.Module, who: str) -> None:
    """Raise for layers in training mode that mix data or draw there."""
    for name, layer in module.named_modules():
        if layer.training and (
            isinstance(layer, (BatchNorm, nn.modules.dropout._DropoutNd))
            or (isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)) and layer.dropout > 0)
        ):
            raise ValueError(
                f"{who}: {name} ({type(layer).__name__}) is in training mode, where a datum's outputs depend on the "
                "others or on chance: call module.eval() first"
            )


@torch.no_grad()
def statistics(
    module: nn.Module,
    draws: Callable[[], Iterable[Tensors]],
    buffers: list[Tensors],
    loader: Iterable[Any],
    inputs: str | Callable[[Any], Any] | None,
) -> Tensors:
    """Buffers ``[S, ...]`` with fresh statistics for each of ``S`` draws, by one pass over the data.

    Args:
        module, loader, inputs: as in :func:`bayesopt_chain.refresh_batch_norm`.
        draws: gives the parameters of the draws, one after the other.
        buffers: those that each draw has.

    Raises:
        ValueError: no batches, or no draws.
    """
    module = copied(module).eval()
    layers = {name: x for name, x in module.named_modules() if isinstance(x, BatchNorm) and x.track_running_stats}
    for layer in layers.values():
        layer.train()
        layer.reset_running_stats()
    forward, _, own = make_functional(module, inputs=inputs)
    fresh = {name: b for name, b in own.items() if name.rpartition(".")[0] in layers}
    found, seen = [{**own, **mine, **fresh} for mine in buffers], 0
    for batch in loader:
        n = batches.size(batch)
        if not n:  # as a filter of data leaves it
            continue
        seen += n
        for layer in layers.values():
            layer.momentum = n / seen  # torch's is the weight of the new statistics
        with checks.blaming("refresh_batch_norm", f"loader, a batch of {n} (drop_last=True leaves one of 1 out)"):
            found = [forward.with_buffers(params, batch, mine)[1] for params, mine in zip(draws(), found)]
    if not seen or not found:
        raise ValueError(
            "refresh_batch_norm: the loader has no batches (an iterator can be gone through only once), or there are no draws"
        )
    return {name: torch.stack([mine[name] for mine in found]) for name in found[0]}


@contextmanager
def unshared_statistics() -> Iterator[None]:
    """Refuse BatchNorm layers that write statistics into the module itself meanwhile; the statistics are put back then.

    Raises:
        ValueError: naming the fix.
    """
    before: dict[
        nn.Module, tuple[Any, list[tuple[Tensor, Tensor]]]
    ] = {}  # the mean that was used, and copies of buffers

    def look(layer: nn.Module, inputs: Any) -> None:
        moves = isinstance(layer, BatchNorm) and layer.training and isinstance(layer.running_mean, Tensor)
        if moves and layer not in before:
            before[layer] = layer.running_mean, [(b, b.clone()) for b in layer.buffers()]

    hook = register_module_forward_pre_hook(look)
    try:
        yield
    finally:
        hook.remove()
        shared = [layer for layer, (used, _) in before.items() if layer.running_mean is used]
        for layer in shared:
            for b, old in before[layer][1]:
                b.data.copy_(old)
    if shared:
        raise ValueError(
            f"parallel: the chains would share the statistics of {type(shared[0]).__name__}, which the module "
            "keeps: take its buffers out with bc.make_functional and make the step with make_step(loss, tx, "
            "buffers=buffers), or call module.eval(); a layer in a list is no submodule (nn.ModuleList makes it one)"
        )
