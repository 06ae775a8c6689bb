"""Named samplers: every one a chain."""

from bayesopt_chain.samplers.contour import contour_sgld, contour_weight, scale_by_contour
from bayesopt_chain.samplers.cyclical import cyclical
from bayesopt_chain.samplers.fisher_scoring import sgfs
from bayesopt_chain.samplers.langevin import (
    baoab,
    obabo,
    palindromic_ubu,
    sghmc,
    sghmc_euler,
    sghmc_from_friction,
    sghmc_to_friction,
    sgld,
    splitting_parameters,
    ubu,
)
from bayesopt_chain.samplers.lattice import lattice_walk
from bayesopt_chain.samplers.microcanonical import mclmc
from bayesopt_chain.samplers.preconditioned import (
    adam_sghmc,
    adaptive_sghmc,
    langevin_with_precision,
    psgld,
    scale_by_adaptive_window,
    step_growth,
)
from bayesopt_chain.samplers.replica_exchange import replica_exchange
from bayesopt_chain.samplers.samadams import samadams
from bayesopt_chain.samplers.svgd import scale_by_stein_kernel, svgd
from bayesopt_chain.samplers.thermostats import badodab, sgnht

__all__ = [
    "adam_sghmc",
    "adaptive_sghmc",
    "badodab",
    "baoab",
    "contour_sgld",
    "contour_weight",
    "cyclical",
    "langevin_with_precision",
    "lattice_walk",
    "mclmc",
    "obabo",
    "palindromic_ubu",
    "psgld",
    "replica_exchange",
    "samadams",
    "scale_by_adaptive_window",
    "scale_by_contour",
    "scale_by_stein_kernel",
    "sgfs",
    "sghmc",
    "sghmc_euler",
    "sghmc_from_friction",
    "sghmc_to_friction",
    "sgld",
    "sgnht",
    "splitting_parameters",
    "step_growth",
    "svgd",
    "ubu",
]
