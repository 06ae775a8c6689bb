"""Adapters on two ranks: the draws, and the noise, of one process."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from bayesopt_chain import lora, optim
from tests.distributed.ranks import run, world
from tests.lora.test_lora import SHORT, model, sequences


def sampled(path, **given):
    """Draws of the call, from all ranks where there are several, and from the folder."""
    mesh = init_device_mesh("cpu", (world()[1],)) if dist.is_initialized() else None
    own = model(lora_dropout=0.1)
    found = lora.bayesian_lora(own, sequences(), path=path, mesh=mesh, **{**SHORT, "members": 3, "draws": 6, **given})
    return found.draws, lora.adapters(path, own).draws, found.report


def trained():
    """An adapter behind three steps of SGHMC, each rank with its half of the batch."""
    own, data = model(), sequences()
    rank, size = world()
    rows = slice(rank * 24 // size, (rank + 1) * 24 // size)
    some = {name: x[rows] for name, x in data.items()}
    chosen = [p for p in own.parameters() if p.requires_grad]
    chain = optim.SGHMC(chosen, 0.05, temperature=1e-3, generator=torch.Generator().manual_seed(3))
    loss = lora.TokenLoss(data["labels"])
    network = DistributedDataParallel(own) if size > 1 else own
    for _ in range(3):
        chain.zero_grad()
        loss(network(**some), some["labels"]).backward()
        chain.step()
    return torch.cat([p.detach().flatten() for p in chosen])


@pytest.mark.slow
def test_on_two_ranks_the_draws_and_the_noise_are_those_of_one(tmp_path):
    """Members that are shared out are so bit for bit; of one chain on halves of a batch sums are rounded otherwise."""
    given = {"method": "sghmc", "prior_precision": "held out", "steps": 40}
    (draws, _, report), ranks = sampled(tmp_path / "one", **given), run(sampled, 2, tmp_path / "two", **given)
    for theirs, in_folder, their_report in ranks:
        assert their_report == report
        assert all(torch.equal(x, theirs[name]) and torch.equal(x, in_folder[name]) for name, x in draws.items())
    one, both = trained(), run(trained, 2)
    assert torch.equal(*both)
    torch.testing.assert_close(both[0], one, rtol=0, atol=1e-6)
    assert (
        one - torch.cat([p.flatten() for p in model().parameters() if p.requires_grad])
    ).norm() > 0.1  # noise moved it
