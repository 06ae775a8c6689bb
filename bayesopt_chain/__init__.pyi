from bayesopt_chain import (
    curvature,
    diagnostics,
    ensemble,
    likelihoods,
    links,
    meta,
    optim,
    plot,
    posterior,
    precision,
    samplers,
    schedules,
    testing,
)
from bayesopt_chain import (
    distributed as distributed,
)
from bayesopt_chain.compose import chain, masked, partition, with_response
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.data.epochs import epochs
from bayesopt_chain.diagnostics.observables.observe import observe
from bayesopt_chain.diagnostics.observables.target import restrict
from bayesopt_chain.diagnostics.suggest_lr import suggest_lr
from bayesopt_chain.ensemble.call import posterior_ensemble
from bayesopt_chain.links.langevin_noise import inject_langevin_noise
from bayesopt_chain.links.learning_rate import scale_by_neg_lr
from bayesopt_chain.links.momentum import add_momentum
from bayesopt_chain.links.preconditioner import scale_by_preconditioner
from bayesopt_chain.links.wrapper import skip_nonfinite, with_master_weights
from bayesopt_chain.loop import gradients
from bayesopt_chain.loop.capture import CaptureError, capture
from bayesopt_chain.loop.loss import Info
from bayesopt_chain.loop.parallel import fork, parallel, stack, unstack
from bayesopt_chain.loop.state_dict import load_state_dict, state_dict
from bayesopt_chain.loop.step import make_step
from bayesopt_chain.matching import response
from bayesopt_chain.modules import make_functional, write_back
from bayesopt_chain.optimizers import (
    SGD,
    AdaDelta,
    AdaGrad,
    Adam,
    AdaMax,
    AdamW,
    RAdam,
    RMSProp,
    adadelta,
    adagrad,
    adam,
    adamax,
    adamw,
    radam,
    rmsprop,
    sgd,
)
from bayesopt_chain.posterior import ekf, vi
from bayesopt_chain.posterior._influence import influence
from bayesopt_chain.posterior.fit import fit_laplace
from bayesopt_chain.posterior.gaussian import Gaussian, laplace
from bayesopt_chain.posterior.swag import swag
from bayesopt_chain.runs.collect import collect
from bayesopt_chain.runs.draws import Draws, refresh_batch_norm
from bayesopt_chain.runs.files import load, save
from bayesopt_chain.runs.sample import iterate, log_to, sample
from bayesopt_chain.samplers.langevin import sghmc, sgld
from bayesopt_chain.version import __version__

__all__ = [
    "SGD",
    "AdaDelta",
    "AdaGrad",
    "AdaMax",
    "Adam",
    "AdamW",
    "CaptureError",
    "Chain",
    "Draws",
    "Gaussian",
    "Info",
    "RAdam",
    "RMSProp",
    "adadelta",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "add_momentum",
    "capture",
    "chain",
    "collect",
    "curvature",
    "diagnostics",
    "ekf",
    "ensemble",
    "epochs",
    "fit_laplace",
    "fork",
    "gradients",
    "influence",
    "inject_langevin_noise",
    "iterate",
    "laplace",
    "likelihoods",
    "links",
    "load",
    "load_state_dict",
    "log_to",
    "make_functional",
    "make_step",
    "masked",
    "meta",
    "observe",
    "optim",
    "parallel",
    "partition",
    "plot",
    "posterior",
    "posterior_ensemble",
    "precision",
    "radam",
    "refresh_batch_norm",
    "response",
    "restrict",
    "rmsprop",
    "sample",
    "samplers",
    "save",
    "scale_by_neg_lr",
    "scale_by_preconditioner",
    "schedules",
    "sgd",
    "sghmc",
    "sgld",
    "skip_nonfinite",
    "stack",
    "state_dict",
    "suggest_lr",
    "swag",
    "testing",
    "unstack",
    "vi",
    "with_master_weights",
    "with_response",
    "write_back",
]
