"""Seeds of torch's generators, for checks that leave them as they were."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def initialised_devices() -> list[int]:
    """All CUDA devices, if CUDA is in use."""
    return [*range(torch.cuda.device_count())] if torch.cuda.is_initialized() else []


def seed_all(seed: int, devices: Iterable[int]) -> None:
    """Seed torch's generators of the processor and of these CUDA devices, and no others."""
    torch.default_generator.manual_seed(seed)
    for device in devices:
        torch.cuda.default_generators[device].manual_seed(seed)
