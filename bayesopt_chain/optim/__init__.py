"""Subclasses of ``torch.optim`` optimizers that sample: each takes a temperature, and works in every training loop.

A class here is a subclass of torch's class of the same name. At ``temperature=0`` it makes the same steps as torch's, bit for
bit. At a temperature ``T > 0`` its trajectory samples ``exp(-loss / T)``. :class:`SGHMC` and :class:`SGLD` are SGD with the
defaults of these two samplers. :class:`Optimizer` runs any chain of this library as a ``torch.optim.Optimizer``.
:func:`as_step` turns a model and an optimizer into a step for the loops of this library.
"""

from bayesopt_chain.optim.chain_optimizer import Optimizer
from bayesopt_chain.optim.classes import (
    ASGD,
    LBFGS,
    SGD,
    SGHMC,
    SGLD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)
from bayesopt_chain.optim.ivon import IVON
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
