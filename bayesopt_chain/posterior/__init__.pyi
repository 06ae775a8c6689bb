from bayesopt_chain.likelihoods._quadrature import probit, softmax_mean
from bayesopt_chain.modules import next_labels
from bayesopt_chain.posterior._acquisition import Acquired, batch_bald, d_optimal, epig
from bayesopt_chain.posterior._influence import influence_of_draws, leave_one_out
from bayesopt_chain.posterior._linearized import functional_samples, linearized
from bayesopt_chain.posterior.evidence import tune_by_evidence
from bayesopt_chain.posterior.fit import (
    EvidenceTraining,
    FittedLaplace,
    fit_laplace,
    outputs_by_target,
    train_by_evidence,
)
from bayesopt_chain.posterior.scores import (
    classification_metrics,
    conformal_level,
    detection_auroc,
    temperature_scaling,
)

__all__ = [
    "Acquired",
    "EvidenceTraining",
    "FittedLaplace",
    "batch_bald",
    "classification_metrics",
    "conformal_level",
    "d_optimal",
    "detection_auroc",
    "epig",
    "fit_laplace",
    "functional_samples",
    "influence_of_draws",
    "leave_one_out",
    "linearized",
    "next_labels",
    "outputs_by_target",
    "probit",
    "softmax_mean",
    "temperature_scaling",
    "train_by_evidence",
    "tune_by_evidence",
]
