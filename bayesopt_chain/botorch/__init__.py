"""Posteriors of this library as models of BoTorch, so that its acquisition functions optimise through them.

Needs the extra ``botorch``. BoTorch's torchvision tutorials are not needed, and torchvision is not installed.
"""

from bayesopt_chain.checks import installed

installed("bayesopt_chain.botorch", "botorch", "botorch", "gpytorch")

from bayesopt_chain.botorch._models import DrawsModel, LinearizedModel

__all__ = ["DrawsModel", "LinearizedModel"]
