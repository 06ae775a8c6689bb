"""Links, the gradient transformations of which :func:`bayesopt_chain.chain` makes a chain. Each does one thing.

Four links that nearly every chain has can be imported from the package itself as well: ``add_momentum``,
``scale_by_preconditioner``, ``inject_langevin_noise`` and ``scale_by_neg_lr``.
"""

from bayesopt_chain.links.adam import scale_by_adam, scale_by_adamax, scale_by_radam
from bayesopt_chain.links.gaussian_prior import add_gaussian_prior, fan_in
from bayesopt_chain.links.langevin_noise import inject_langevin_noise
from bayesopt_chain.links.learning_rate import scale, scale_by_neg_lr, scale_by_schedule
from bayesopt_chain.links.momentum import add_momentum, delay
from bayesopt_chain.links.preconditioner import running_rms, scale_by_preconditioner
from bayesopt_chain.links.rms import scale_by_adadelta, scale_by_rms, scale_by_rss, scale_by_stddev
from bayesopt_chain.links.weight_decay import add_decayed_weights, add_localization, flip_sign_and_add_weight_decay

__all__ = [
    "add_decayed_weights",
    "add_gaussian_prior",
    "add_localization",
    "add_momentum",
    "delay",
    "fan_in",
    "flip_sign_and_add_weight_decay",
    "inject_langevin_noise",
    "running_rms",
    "scale",
    "scale_by_adadelta",
    "scale_by_adam",
    "scale_by_adamax",
    "scale_by_neg_lr",
    "scale_by_preconditioner",
    "scale_by_radam",
    "scale_by_rms",
    "scale_by_rss",
    "scale_by_schedule",
    "scale_by_stddev",
]
