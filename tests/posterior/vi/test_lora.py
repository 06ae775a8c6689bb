"""The recipe of ``docs/howto/ivon.md`` for IVON on a LoRA adapter, run as it stands."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

CODE = re.search(
    r"## On a LoRA adapter.*?```python\n(.*?)```",
    (Path(__file__).parents[3] / "docs/howto/ivon.md").read_text(),
    re.S,
)


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_ivon_on_an_adapter_learns_its_posterior():
    """The loss falls, the base network is left alone, and the Hessian has let go of its first value in every tensor."""
    pytest.importorskip("peft")
    assert CODE is not None
    space: dict[str, Any] = {}
    exec(compile(CODE[1], "docs/howto/ivon.md", "exec"), space)
    params, state, draws = space["params"], space["state"], space["draws"]
    assert all("lora_" in name for name in params) and len(params) == 4
    loss = lambda p: (space["forward"](p, (space["x"], None)) - space["y"]).square().mean() / 2  # noqa: E731
    zero = {name: p if "lora_A" in name else torch.zeros_like(p) for name, p in params.items()}
    assert loss(params) < loss(zero)
    assert all((h > 0).all() and (h - 0.1).abs().mean() > 0.01 for h in state[0].hessian)
    assert all(p.isfinite().all() and p.shape[0] == 20 for p in draws.values())
