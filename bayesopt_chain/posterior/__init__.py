"""Transforms that carry a Gaussian posterior in their state: Laplace, SWAG, variational inference, Kalman filters."""
