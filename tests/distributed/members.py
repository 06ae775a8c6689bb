"""``bc.posterior_ensemble`` with its members over ranks; run by ``test_members.py``, forked or under ``torchrun``."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import bayesopt_chain as bc
from bayesopt_chain.ensemble import report, stages

SMALL = {"members": 3, "steps": 60, "lr": 0.03, "progress": False, "batch_size": 16}


def data(n=48):
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(0))
    return x, x[:, :1]


class Normed(nn.Sequential):
    """What ``vmap`` takes: BatchNorm and dropout."""

    def __init__(self):
        super().__init__(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Tanh(), nn.Linear(6, 1))


class Recurrent(nn.Module):
    """What ``vmap`` refuses, so that members run one after the other."""

    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(1, 3, batch_first=True), nn.Linear(3, 1)

    def forward(self, x):
        return self.out(self.lstm(x[..., None])[0][:, -1])


def call(module=Normed, mesh=None, **changes):
    return bc.posterior_ensemble(module, data(), bc.likelihoods.gaussian(), mesh=mesh, **{**SMALL, **changes})


def result(e):
    """What a call comes to: predictions, every network, and what the report counts."""
    p = e.predict(data()[0])
    made = {"mean": p.mean, "log_prob": p.log_prob(data()[1]), "params": e.params, "buffers": e.buffers}
    return {**made, "passes": e.report.passes}


def mesh_of_all():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def over_ranks(module=Normed, path=None, **changes):
    return result(call(module, mesh_of_all(), path=path, **changes))


class Killed(Exception):
    pass


def killed(path, stage=None, step=None, every=False):
    """A call that dies on the last rank, or on every rank: behind a stage's run, or at a step of all runs together."""
    whole, seen = stages.Stages.once, []
    last = dist.get_rank() == dist.get_world_size() - 1

    def once(self, name, make):
        if name == stage and (last or every):
            raise Killed(name)
        return whole(self, name, make)

    def dies(self, steps=1):
        seen.append(steps)
        if len(seen) == step and (last or every):
            raise Killed(str(step))

    stages.Stages.once, report.Progress.__call__ = once, dies
    try:
        call(mesh=mesh_of_all(), path=path)
    except Killed:
        return "killed"
    return "done"


def refused(path=None):
    """What is said where ranks are too many, have other data, or another call's directory."""
    mesh = mesh_of_all()
    said = []
    x, y = data()
    for changes in (
        {"members": 1},
        {"data": (x + dist.get_rank(), y)},
        {"seed": dist.get_rank()},
        {"mesh": "cpu"},
        {"path": path, "seed": 5},
    ):
        given = {"data": (x, y), "mesh": mesh, **SMALL, **changes}
        try:
            bc.posterior_ensemble(Normed, given.pop("data"), bc.likelihoods.gaussian(), **given)
        except (TypeError, ValueError, RuntimeError) as err:
            said.append(f"{type(err).__name__}: {err}")
    return said


def diverging():
    """A rate at which the members diverge; all ranks say so."""
    x, y = data()
    try:
        bc.posterior_ensemble(Normed, (x, y), bc.likelihoods.gaussian(), mesh=mesh_of_all(), **{**SMALL, "lr": 1e30})
    except ValueError as err:
        return str(err)
    return ""


def main():
    """Under ``torchrun``: ``members.py FOLDER``; every case's result on this rank is written to the folder."""
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    made = {
        "normed": over_ranks(),
        "recurrent": over_ranks(Recurrent),
        "kept": over_ranks(path=folder / "kept"),
        "again": over_ranks(path=folder / "kept"),
    }
    torch.save(made, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
