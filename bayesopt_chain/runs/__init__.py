"""Runs of a sampler: the loop, the store of its draws and checkpoints, and the draws themselves."""
