"""Pictures of predictions, calibration, draws and minibatch heat, on matplotlib's axes.

Needs the extra ``plot`` (matplotlib; traces also ArviZ). Each function draws onto the axes that it is given, or makes a
figure of its own, and returns the axes, so that titles, scales and files are matplotlib's business.
"""

from bayesopt_chain.plot._calibration import coverage, reliability
from bayesopt_chain.plot._draws import traces
from bayesopt_chain.plot._heat import heat
from bayesopt_chain.plot._predictions import bands

__all__ = ["bands", "coverage", "heat", "reliability", "traces"]
