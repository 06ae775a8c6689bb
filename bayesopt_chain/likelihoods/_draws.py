"""Draws that torch makes with a generator, but does not export."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def standard_gamma(shape: Tensor, generator: torch.Generator | None) -> Tensor:
    """Gamma variables of these shapes, elementwise, and scale 1."""
    draw: Any = torch._standard_gamma  # pyright: ignore[reportPrivateImportUsage]
    return draw(shape, generator=generator)
