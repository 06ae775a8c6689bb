"""Batches in an order that is a function of the seed and the position."""

from bayesopt_chain.data.epochs import Epochs, epochs
from bayesopt_chain.data.index_stream import IndexStream, folds

__all__ = ["Epochs", "IndexStream", "epochs", "folds"]
