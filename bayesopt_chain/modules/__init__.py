"""Modules as functions: parameters out, draws back in."""

from bayesopt_chain.modules.functional import Forward, Functional, make_functional, write_back

__all__ = ["Forward", "Functional", "make_functional", "write_back"]
