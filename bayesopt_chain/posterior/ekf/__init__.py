"""Extended Kalman filters as gradient transformations (see `_transform.py`)."""

from bayesopt_chain.posterior.ekf._information import Observation, observe
from bayesopt_chain.posterior.ekf._transform import dense, diagonal, low_rank

__all__ = ["Observation", "dense", "diagonal", "low_rank", "observe"]
