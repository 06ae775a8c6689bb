"""TorchOpt's differentiable ``Meta`` optimizers with a temperature, and TorchOpt's second spellings of four classes."""

import torchopt

from bayesopt_chain import optimizers
from bayesopt_chain.optimizers import AdaDelta, AdaGrad, AdaMax, RMSProp, optimizer_class

MetaSGD = optimizer_class(torchopt.MetaSGD, optimizers.sgd)
MetaAdam = optimizer_class(torchopt.MetaAdam, optimizers.adam)
MetaAdamW = optimizer_class(torchopt.MetaAdamW, optimizers.adamw)
MetaAdaMax = MetaAdamax = optimizer_class(torchopt.MetaAdaMax, optimizers.adamax)
MetaRAdam = optimizer_class(torchopt.MetaRAdam, optimizers.radam)
MetaAdaGrad = MetaAdagrad = optimizer_class(torchopt.MetaAdaGrad, optimizers.adagrad)
MetaRMSProp = MetaRMSprop = optimizer_class(torchopt.MetaRMSProp, optimizers.rmsprop)
MetaAdaDelta = MetaAdadelta = optimizer_class(torchopt.MetaAdaDelta, optimizers.adadelta)
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
