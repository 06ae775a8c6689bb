"""``torch.optim`` with a temperature: real ``torch.optim.Optimizer`` classes, for every loop, trainer and scheduler.

A class here is a subclass of torch's of the same name. At ``temperature=0`` it is that optimizer, bit for bit; at a
temperature ``T`` its trajectory samples ``exp(-loss / T)``. :class:`SGHMC` and :class:`SGLD` are the samplers in plain
words; :class:`Optimizer` runs any chain of this library; :func:`as_step` makes a step for this library's loops of a
model and an optimizer.
"""

from bayesopt_chain.optim.adaptive import Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop
from bayesopt_chain.optim.chain_optimizer import Optimizer
from bayesopt_chain.optim.ivon import IVON
from bayesopt_chain.optim.refused import ASGD, LBFGS, Adadelta, Adafactor, Muon, Rprop, SparseAdam
from bayesopt_chain.optim.sgd import SGD, SGHMC, SGLD
from bayesopt_chain.optim.step import as_step

__all__ = [
    "ASGD",
    "IVON",
    "LBFGS",
    "SGD",
    "SGHMC",
    "SGLD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Muon",
    "NAdam",
    "Optimizer",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SparseAdam",
    "as_step",
]
