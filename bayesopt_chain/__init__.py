"""Gradient-transformation chains for PyTorch that sample."""
