"""Gradient-transformation chains for PyTorch that sample.

An optimizer is a chain of gradient transformations; a sampler is the same chain with the right noise in it. Build chains of
links (``bc.chain``), take TorchOpt's optimizers with a temperature (``bc.sgd``, ``bc.Adam``), or a named sampler
(``bc.sghmc``); temperature 0 is the optimizer, to the last bit.
"""

from bayesopt_chain import _response as response
from bayesopt_chain._chain import Chain, chain, declare, masked, partition
from bayesopt_chain._matched_noise import NoiseFilter, NoMatchedNoise, matched_noise
from bayesopt_chain.links.adaptive import (
    scale_by_adadelta,
    scale_by_adam,
    scale_by_adamax,
    scale_by_radam,
    scale_by_rms,
    scale_by_rss,
    scale_by_stddev,
)
from bayesopt_chain.links.langevin_noise import counter_based, inject_langevin_noise
from bayesopt_chain.links.learning_rate import scale, scale_by_neg_lr, scale_by_schedule
from bayesopt_chain.links.momentum import add_momentum
from bayesopt_chain.links.preconditioner import running_rms, scale_by_preconditioner
from bayesopt_chain.links.weight_decay import add_decayed_weights, flip_sign_and_add_weight_decay
from bayesopt_chain.loop.capture import CaptureError, Steps, capture
from bayesopt_chain.loop.parallel import parallel, stack
from bayesopt_chain.loop.step import Info, make_step
from bayesopt_chain.optimizers.classes import (
    SGD,
    AdaDelta,
    Adadelta,
    AdaGrad,
    Adagrad,
    Adam,
    AdaMax,
    Adamax,
    AdamW,
    MetaAdaDelta,
    MetaAdadelta,
    MetaAdaGrad,
    MetaAdagrad,
    MetaAdam,
    MetaAdaMax,
    MetaAdamax,
    MetaAdamW,
    MetaRAdam,
    MetaRMSProp,
    MetaRMSprop,
    MetaSGD,
    RAdam,
    RMSProp,
    RMSprop,
)
from bayesopt_chain.optimizers.functional import adadelta, adagrad, adam, adamax, adamw, radam, rmsprop, sgd
from bayesopt_chain.samplers.langevin import sghmc, sghmc_from_friction, sghmc_to_friction, sgld

__version__ = "0.1.0"
