"""What parameters spread over ranks cost: noise on a step of 10^7 parameters, a draw of them, many small leaves.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.ranks
    python -m torch.distributed.run --standalone --nproc-per-node 4 -m benchmarks.ranks --draws-only

Times are a rank's own (CPU time of its process), medians of blocks in turn, the slower rank's; each ratio is the median
over the blocks' paired ratios, with quartiles. Results go to ``benchmarks/results/ranks.json``.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import bayesopt_chain as bc
from bayesopt_chain.distributed.shards import add
from benchmarks.measure import RESULTS, command, keep, known, ratio, take_turns

# On every rank as many calls: one a turn, in processor time, behind one that brings the ranks together.
turns = partial(take_turns, seconds=0.0, clock=time.process_time)


def figures(times: dict[str, list[float]], ours: str, theirs: str) -> dict[str, Any]:
    """Of the rank with the larger ratio."""
    mine = {**ratio(times, ours, theirs), "ms": {name: 1e3 * statistics.median(x) for name, x in times.items()}}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return max(every, key=lambda x: x["ratio"])


def sharded(temperature: float, batch: int) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """Ten layers of 1000 x 1000 under ``fully_shard``, an optimizer, and a whole step, made once."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1000, 1000) for _ in range(10)])
    for layer in [*model, model]:
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    hot: dict[str, Any] = {"temperature": temperature, "generator": bc.distributed.generator(0)}
    optimizer, x = bc.optim.SGD(model.parameters(), 1e-3, momentum=0.9, **hot), torch.randn(batch, 1000)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    step()
    return model, optimizer, step


def large(blocks: int, batch: int) -> dict[str, Any]:
    """A whole step and the optimizer's part of it, at T > 0 and T = 0."""
    made = {name: sharded(temperature, batch) for name, temperature in {"T > 0": 1e-5, "T = 0": 0.0}.items()}
    alone = {name: optimizer.step for name, (_, optimizer, _) in made.items()}
    return {
        "parameters": 10_010_000,
        "batch": batch,
        "whole step": figures(turns({name: step for name, (_, _, step) in made.items()}, blocks), "T > 0", "T = 0"),
        "optimizer alone": figures(turns(alone, blocks), "T > 0", "T = 0"),
    }


def draws(blocks: int, batch: int) -> dict[str, Any]:
    """A draw, gathered leaf by leaf for the first rank, against a step."""
    model, _, step = sharded(1e-5, batch)
    keep = bc.collect(model, every=1)

    def draw() -> None:
        keep()
        keep.load_state_dict({"step": 0})  # forget it

    draw()
    found = figures(turns({"a draw": draw, "a step": step}, blocks), "a draw", "a step")
    return {"parameters": 10_010_000, "batch": batch, "ranks": dist.get_world_size(), **found}


def small(blocks: int, leaves: int = 100) -> dict[str, Any]:
    """A step over many leaves of 32 x 32, spread, against one over local tensors as large as a part, with the same noise."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    out: dict[str, Any] = {"leaves": leaves}
    calls: dict[str, dict[str, Callable[[], Any]]] = {"bc.optim.SGHMC": {}, "update, in place": {}, "update, pure": {}}
    for name in ("spread", "local"):

        def tensor(name: str = name) -> torch.Tensor:
            x = torch.randn(32, 32)
            return distribute_tensor(x, mesh, [Shard(0)]) if name == "spread" else x[: 32 // mesh.size()].clone()

        params = [tensor().requires_grad_() for _ in range(leaves)]
        for p in params:
            p.grad = tensor()
        generator = bc.distributed.generator(0)
        calls["bc.optim.SGHMC"][name] = bc.optim.SGHMC(params, 1e-3, temperature=1e-5, generator=generator).step
        tx = bc.sghmc(1e-3, temperature=1e-5, generator=bc.distributed.generator(0))
        for inplace in (True, False):
            theta = [tensor() for _ in range(leaves)]
            kept = [tx.init(theta)]

            @torch.no_grad()
            def step(
                tx: Any = tx, theta: Any = theta, kept: Any = kept, inplace: bool = inplace, like: Any = params
            ) -> None:
                grads = [p.grad for p in like]
                updates, kept[0] = tx.update(grads, kept[0], params=theta, inplace=inplace)
                add(theta, updates, inplace=True)

            calls["update, in place" if inplace else "update, pure"][name] = step
    return out | {what: figures(turns(both, blocks), "spread", "local") for what, both in calls.items()}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    arguments = command(blocks=15, batch=64, draws_only=False)
    path = RESULTS / "ranks.json"
    found = known(path)
    found.setdefault("draws", {})[str(dist.get_world_size())] = draws(arguments.blocks, arguments.batch)
    if not arguments.draws_only:
        found |= {
            "ranks": dist.get_world_size(),
            "large": large(arguments.blocks, arguments.batch),
            "small": small(arguments.blocks),
        }
    if dist.get_rank() == 0:
        print(json.dumps(found, indent=1))
        keep(path, found)
    dist.destroy_process_group()
