"""The device of :mod:`tests.pretended` refuses what CUDA refuses, and computes what the CPU computes."""

import pytest
import torch

from tests.pretended import DEVICE, Here


@pytest.fixture(autouse=True)
def _here():
    torch.manual_seed(0)
    with Here():
        yield


@pytest.mark.parametrize(
    "mixed",
    [
        lambda x: x + torch.ones(3),
        lambda x: torch.where(torch.ones(3) > 0, x, x),
        lambda x: torch.stack([x, torch.ones(3)]),
        lambda x: torch.arange(3)[x.long()],
        lambda x: x.new_zeros(3).normal_(generator=torch.Generator()),
        lambda x: torch.randn(3, device=DEVICE, generator=torch.Generator()),
        lambda x: torch.vmap(lambda a, b: a * b)(x, torch.ones(3)),
    ],
)
def test_what_is_refused(mixed):
    with pytest.raises(RuntimeError, match=r"same device|device type for generator"):
        mixed(torch.rand(3, device=DEVICE))
