"""Posteriors over the adapters of a language model (PEFT): one call, and draws that are ordinary adapters."""

from bayesopt_chain.lora.adapters import Adapters, TokenPrediction, adapters
from bayesopt_chain.lora.fit import bayesian_lora
from bayesopt_chain.lora.loss import TokenLoss

__all__ = ["Adapters", "TokenLoss", "TokenPrediction", "adapters", "bayesian_lora"]
