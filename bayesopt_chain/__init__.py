"""Gradient-transformation chains for PyTorch that sample.

An optimizer is a chain of gradient transformations; a sampler is the same chain with the right noise in it. Build chains of
links (``bc.chain``, ``bc.links``), take TorchOpt's optimizers with a temperature (``bc.sgd``, ``bc.Adam``), or a named sampler
(``bc.sghmc``, ``bc.samplers``); temperature 0 is the optimizer, to the last bit.
"""

from bayesopt_chain import _lazy

__getattr__, __dir__, __all__ = _lazy.attach(globals())  # the names are listed in __init__.pyi
