"""Triton, whose functions carry no types, for the modules with kernels.

A kernel's arguments are ``Value``: any type to a type checker, and to Triton's compiler, which reads annotations, a name
of its own.
"""

from typing import TYPE_CHECKING, Any

import triton  # pyright: ignore[reportMissingTypeStubs]
from triton.language import constexpr as constexpr  # pyright: ignore[reportMissingTypeStubs]

_triton: Any = triton
tl, jit = _triton.language, _triton.jit

if TYPE_CHECKING:
    Value = Any
else:
    Value = tl.tensor
