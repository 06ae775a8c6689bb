"""The optimizer classes of TorchOpt with a temperature: ``SGD(params, lr, ...)``, ``MetaAdam(module, ...)`` and their kin.

TorchOpt's classes differ from its functions in argument order and defaults (``SGD`` takes weight decay before dampening,
``AdaMax`` has lr 0.002). Each class here has the signature of its namesake, read from it, and then keyword-only
``temperature`` (and ``freeze_after`` where a preconditioner is learned).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import optree
import torch
import torchopt

from bayesopt_chain import checks
from bayesopt_chain.distributed.ranks import require_named_chain
from bayesopt_chain.links.keyed import Keyed
from bayesopt_chain.optimizers import functional

DOC = """``torchopt.{name}`` with a temperature (torch's is :class:`bayesopt_chain.optim.{torchs}`).

    The chain is :func:`bayesopt_chain.{function}`.

    Args:
        params: an iterable of tensors.
        lr and the others: TorchOpt's, in TorchOpt's order, with the meaning of :func:`bayesopt_chain.{function}`.
        temperature: keyword only; number, 0-d tensor or schedule. Default 0, at which this is TorchOpt's class bit for bit.

    Raises:
        ValueError: as :func:`bayesopt_chain.{function}`.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> w = torch.zeros(2, requires_grad=True)
        >>> optimizer = bc.{name}([w], lr=0.1)
        >>> (w - 1).square().sum().backward()
        >>> optimizer.step()
        >>> bool((w > 0).all())
        True
    """
TORCHS = {"RMSProp": "RMSprop", "AdaGrad": "Adagrad", "AdaMax": "Adamax", "AdaDelta": "Adadelta"}  # spelled otherwise
META = """``torchopt.{name}`` with a temperature; see :func:`bayesopt_chain.{function}`.

    Args:
        module: whose parameters are replaced by their update in each ``step(loss)``, which keeps the graph.
        lr and the others: TorchOpt's, in TorchOpt's order, with the meaning of :func:`bayesopt_chain.{function}`.
        temperature: keyword only; number, 0-d tensor or schedule. Default 0, at which this is TorchOpt's class bit for bit.

    Raises:
        ValueError: as :func:`bayesopt_chain.{function}`.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> network = torch.nn.Linear(2, 1)
        >>> optimizer = bc.meta.{name}(network, lr=0.1)
        >>> optimizer.step(network(torch.ones(2)).square().sum())
    """


class _Optimizer(torchopt.Optimizer):
    """TorchOpt's, with its state from the start."""

    def add_param_group(self, params: Any) -> None:
        super().add_param_group(params)
        _require_one_rank(self)
        self.state_groups[-1] = self.impl.init(self.param_groups[-1])


class _MetaOptimizer(torchopt.MetaOptimizer):
    """TorchOpt's, with its state from the start, so that extracting and recovering it replays the noise."""

    def add_param_group(self, module: torch.nn.Module) -> None:
        super().add_param_group(module)
        _require_one_rank(self)
        self.state_groups[-1] = self.impl.init(tuple(optree.tree_leaves(self.param_containers_groups[-1])))  # pyright: ignore[reportArgumentType]


def _require_one_rank(optimizer: torchopt.Optimizer | torchopt.MetaOptimizer) -> None:
    """Refuse noise on several ranks: these classes, like TorchOpt's, have no argument that says what a rank is.

    Raises:
        ValueError: a temperature, and more than one rank.
    """
    name = type(optimizer).__name__
    torchs = f"bc.optim.{TORCHS.get(name, name)}"
    for link in getattr(optimizer.impl, "links", ()):
        if isinstance(link, Keyed):
            require_named_chain(f"bc.{name}", link.generator, f"take {torchs} with")


LARGEST = 1e15  # of a hyperparameter: beyond it the squares of float32 are infinite
_PARAMS = checks.Kind(
    lambda x: isinstance(x, (list, tuple)) and checks.TREE.fits(x), "tensors, one at least, in a list or an iterator"
)


def optimizer_class(namesake: type, build: Callable) -> type:
    """A class like ``namesake`` whose transformation is made by ``build``."""
    is_meta, name = issubclass(namesake, torchopt.MetaOptimizer), namesake.__name__
    base = _MetaOptimizer if is_meta else _Optimizer
    theirs = inspect.signature(namesake.__init__)
    ours = [p for name, p in inspect.signature(build).parameters.items() if name in ("temperature", "freeze_after")]
    signature = theirs.replace(parameters=[*theirs.parameters.values(), *ours], return_annotation=None)

    def __init__(self, *args, **kwargs) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = list(bound.arguments.values())
        target: Any = given[1]
        if is_meta:
            checks.require(name, module=(target, checks.MODULE))
        else:
            target = target if isinstance(target, (list, tuple)) or not checks.BATCHES.fits(target) else tuple(target)
            checks.require(name, params=(target, _PARAMS))
        settings = dict(list(bound.arguments.items())[2:])
        for word, value in settings.items():
            if isinstance(value, (int, float)) and abs(value) > LARGEST:
                raise ValueError(f"{name}: {word} must be at most {LARGEST:g}, got {checks.short(value)}")
        base.__init__(self, target, build(**settings))

    __init__.__signature__ = signature
    template = META if is_meta else DOC
    doc = template.format(name=name, function=build.__name__, torchs=TORCHS.get(name, name))
    return type(
        namesake.__name__,
        (base,),
        {
            "__init__": __init__,
            "__doc__": doc,
            "__module__": "bayesopt_chain.meta" if is_meta else "bayesopt_chain",
            "__qualname__": namesake.__name__,
        },
    )


SGD = optimizer_class(torchopt.SGD, functional.sgd)
Adam = optimizer_class(torchopt.Adam, functional.adam)
AdamW = optimizer_class(torchopt.AdamW, functional.adamw)
AdaMax = optimizer_class(torchopt.AdaMax, functional.adamax)
RAdam = optimizer_class(torchopt.RAdam, functional.radam)
AdaGrad = optimizer_class(torchopt.AdaGrad, functional.adagrad)
RMSProp = optimizer_class(torchopt.RMSProp, functional.rmsprop)
AdaDelta = optimizer_class(torchopt.AdaDelta, functional.adadelta)
