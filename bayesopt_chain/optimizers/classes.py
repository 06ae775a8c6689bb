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


def _optimizer(namesake: type, build: Callable) -> type:
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
    doc = f"""``torchopt.{namesake.__name__}`` with a temperature; see :func:`bayesopt_chain.{build.__name__}`.

    Takes the {what} first, then TorchOpt's arguments in TorchOpt's order, then keyword-only ``temperature=0.0``.
    """
    return type(
        namesake.__name__,
        (base,),
        {"__init__": __init__, "__doc__": doc, "__module__": "bayesopt_chain", "__qualname__": namesake.__name__},
    )


SGD = _optimizer(torchopt.SGD, functional.sgd)
Adam = _optimizer(torchopt.Adam, functional.adam)
AdamW = _optimizer(torchopt.AdamW, functional.adamw)
AdaMax = Adamax = _optimizer(torchopt.AdaMax, functional.adamax)
RAdam = _optimizer(torchopt.RAdam, functional.radam)
AdaGrad = Adagrad = _optimizer(torchopt.AdaGrad, functional.adagrad)
RMSProp = RMSprop = _optimizer(torchopt.RMSProp, functional.rmsprop)
AdaDelta = Adadelta = _optimizer(torchopt.AdaDelta, functional.adadelta)

MetaSGD = _optimizer(torchopt.MetaSGD, functional.sgd)
MetaAdam = _optimizer(torchopt.MetaAdam, functional.adam)
MetaAdamW = _optimizer(torchopt.MetaAdamW, functional.adamw)
MetaAdaMax = MetaAdamax = _optimizer(torchopt.MetaAdaMax, functional.adamax)
MetaRAdam = _optimizer(torchopt.MetaRAdam, functional.radam)
MetaAdaGrad = MetaAdagrad = _optimizer(torchopt.MetaAdaGrad, functional.adagrad)
MetaRMSProp = MetaRMSprop = _optimizer(torchopt.MetaRMSProp, functional.rmsprop)
MetaAdaDelta = MetaAdadelta = _optimizer(torchopt.MetaAdaDelta, functional.adadelta)
