"""One call from a trained model to its posterior and predictions; features kept; training by the evidence."""

from bayesopt_chain.fitting.batches import next_labels, pairs
from bayesopt_chain.fitting.cache import CachedFeatures, cache_features
from bayesopt_chain.fitting.laplace import FittedLaplace, fit_laplace
from bayesopt_chain.fitting.subnetwork import subnetwork
from bayesopt_chain.fitting.training import EvidenceTraining, train_by_evidence
from bayesopt_chain.posterior.tuning import tune_by_evidence, tune_by_validation

__all__ = [
    "CachedFeatures",
    "EvidenceTraining",
    "FittedLaplace",
    "cache_features",
    "fit_laplace",
    "next_labels",
    "pairs",
    "subnetwork",
    "train_by_evidence",
    "tune_by_evidence",
    "tune_by_validation",
]
