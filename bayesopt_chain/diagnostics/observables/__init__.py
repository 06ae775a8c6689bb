"""Measuring along chains: means and covariances of functions of the parameters, learning coefficients, influence."""
