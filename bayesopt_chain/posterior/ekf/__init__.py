"""Extended Kalman filters as gradient transformations."""

from bayesopt_chain.posterior.ekf._structures import Observation, observe
from bayesopt_chain.posterior.ekf._transform import KalmanFilter, dense, diagonal, low_rank

__all__ = [
    "KalmanFilter",
    "Observation",
    "dense",
    "diagonal",
    "low_rank",
    "observe",
]
