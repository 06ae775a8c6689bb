"""Record a whole step as one program (``capture``), and replay it without running the Python code of the step."""

from bayesopt_chain.loop.capture.build import capture
from bayesopt_chain.loop.capture.errors import CaptureError

__all__ = ["CaptureError", "capture"]
