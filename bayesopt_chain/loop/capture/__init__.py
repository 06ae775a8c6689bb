"""A whole step as one program: ``capture`` it once, replay it without Python."""

from bayesopt_chain.loop.capture.buffers import Steps
from bayesopt_chain.loop.capture.build import capture
from bayesopt_chain.loop.capture.errors import CaptureError

__all__ = ["CaptureError", "Steps", "capture"]
