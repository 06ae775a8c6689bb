"""Batches in an order that is a function of the seed and the position."""

from bayesopt_chain.data.epochs import Epochs, Indices, epochs

__all__ = ["Epochs", "Indices", "epochs"]
