"""Gradient-transformation chains for PyTorch that sample.

An optimizer is a chain of gradient transformations; a sampler is the same chain with the right noise in it. Build chains of
links (``bc.chain``), take TorchOpt's optimizers with a temperature (``bc.sgd``, ``bc.Adam``), or a named sampler
(``bc.sghmc``); temperature 0 is the optimizer, to the last bit.
"""

from bayesopt_chain import _response as response
from bayesopt_chain import curvature, likelihoods, precision, predict
from bayesopt_chain._chain import Chain, chain, declare
from bayesopt_chain._gaussian import Gaussian
from bayesopt_chain._laplace import Laplace, laplace
from bayesopt_chain._masked import masked, partition
from bayesopt_chain._matched_noise import NoiseFilter, NoMatchedNoise, matched_noise
from bayesopt_chain._tuning import tune_by_evidence, tune_by_validation
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

# isort: split
# The SGMCMC family.
from bayesopt_chain import schedules
from bayesopt_chain.links.delay import delay
from bayesopt_chain.loop.particles import make_loss_step, make_particle_step
from bayesopt_chain.samplers.contour import contour_sgld, contour_weight, scale_by_contour
from bayesopt_chain.samplers.cyclical import cyclical, cyclical_paper
from bayesopt_chain.samplers.euler import sghmc_stale_gradient
from bayesopt_chain.samplers.fisher_scoring import sgfs, sgfs_dense
from bayesopt_chain.samplers.lattice import lattice_walk
from bayesopt_chain.samplers.precision import langevin_with_precision
from bayesopt_chain.samplers.preconditioned import (
    adam_sghmc,
    adaptive_sghmc,
    psgld,
    psgld_corrected,
    scale_by_adaptive_window,
)
from bayesopt_chain.samplers.replica_exchange import replica_exchange
from bayesopt_chain.samplers.splittings import baoab, obabo, splitting_parameters, ubu
from bayesopt_chain.samplers.svgd import stein_force, svgd
from bayesopt_chain.samplers.thermostats import badodab, badodab_per_parameter, sgnht, sgnht_per_parameter
from bayesopt_chain.samplers.variance_reduction import (
    control_variates,
    make_estimated_step,
    mean_gradient,
    svrg,
)

# isort: split
from bayesopt_chain import testing

# isort: split
# Posteriors carried in the state.
from bayesopt_chain import ekf, vi
from bayesopt_chain._swag import swag

__version__ = "0.1.0"
