"""TorchOpt's differentiable ``Meta`` optimizers with a temperature, and TorchOpt's second spellings of four classes."""

import torchopt

from bayesopt_chain.optimizers import functional
from bayesopt_chain.optimizers.classes import AdaDelta, AdaGrad, AdaMax, RMSProp, optimizer_class

MetaSGD = optimizer_class(torchopt.MetaSGD, functional.sgd)
MetaAdam = optimizer_class(torchopt.MetaAdam, functional.adam)
MetaAdamW = optimizer_class(torchopt.MetaAdamW, functional.adamw)
MetaAdaMax = MetaAdamax = optimizer_class(torchopt.MetaAdaMax, functional.adamax)
MetaRAdam = optimizer_class(torchopt.MetaRAdam, functional.radam)
MetaAdaGrad = MetaAdagrad = optimizer_class(torchopt.MetaAdaGrad, functional.adagrad)
MetaRMSProp = MetaRMSprop = optimizer_class(torchopt.MetaRMSProp, functional.rmsprop)
MetaAdaDelta = MetaAdadelta = optimizer_class(torchopt.MetaAdaDelta, functional.adadelta)
Adadelta, Adagrad, Adamax, RMSprop = AdaDelta, AdaGrad, AdaMax, RMSProp

__all__ = [
    "Adadelta",
    "Adagrad",
    "Adamax",
    "MetaAdaDelta",
    "MetaAdaGrad",
    "MetaAdaMax",
    "MetaAdadelta",
    "MetaAdagrad",
    "MetaAdam",
    "MetaAdamW",
    "MetaAdamax",
    "MetaRAdam",
    "MetaRMSProp",
    "MetaRMSprop",
    "MetaSGD",
    "RMSprop",
]
