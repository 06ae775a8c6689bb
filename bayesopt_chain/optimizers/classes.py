"""The optimizer classes of TorchOpt with a temperature: ``SGD(params, lr, ...)``, ``MetaAdam(module, ...)`` and their kin.

TorchOpt's classes differ from its functions in argument order and defaults (``SGD`` takes weight decay before dampening,
``AdaMax`` has lr 0.002). Each class here has the signature of its namesake, read from it, and then keyword-only
``temperature`` (and ``freeze_after`` where a preconditioner is learned).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torchopt

from bayesopt_chain.optimizers import functional


def optimizer_class(namesake: type, build: Callable) -> type:
    """A class like ``namesake`` whose transformation is made by ``build``."""
    base = torchopt.MetaOptimizer if issubclass(namesake, torchopt.MetaOptimizer) else torchopt.Optimizer
    theirs = inspect.signature(namesake.__init__)
    ours = [p for name, p in inspect.signature(build).parameters.items() if name in ("temperature", "freeze_after")]
    signature = theirs.replace(parameters=[*theirs.parameters.values(), *ours], return_annotation=None)

    def __init__(self, *args, **kwargs) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        _, target, *_ = bound.arguments.values()
        settings = dict(list(bound.arguments.items())[2:])
        base.__init__(self, target, build(**settings))

    __init__.__signature__ = signature
    what = "module" if base is torchopt.MetaOptimizer else "parameters"
    twin = {"RMSProp": "RMSprop", "AdaGrad": "Adagrad", "AdaMax": "Adamax", "AdaDelta": "Adadelta"}.get(
        namesake.__name__, namesake.__name__
    )
    other = f" (torch's is :class:`bayesopt_chain.optim.{twin}`)" if base is torchopt.Optimizer else ""
    doc = f"""``torchopt.{namesake.__name__}`` with a temperature{other}; see :func:`bayesopt_chain.{build.__name__}`.

    Takes the {what} first, then TorchOpt's arguments in TorchOpt's order, then keyword-only ``temperature=0.0``.
    """
    return type(
        namesake.__name__,
        (base,),
        {
            "__init__": __init__,
            "__doc__": doc,
            "__module__": "bayesopt_chain.meta" if base is torchopt.MetaOptimizer else "bayesopt_chain",
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
