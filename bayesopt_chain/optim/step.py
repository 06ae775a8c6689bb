"""A model, an optimizer and a loss as the step ``(params, state, batch) -> (params, state, Info)`` of this library.

The model and the optimizer stay what they are and move in place: ``params`` are the model's own tensors and ``state``
lists the optimizer's, with numbers (lr, count, key, the scheduler's) as 0-d tensors, so that a checkpoint of tensors
holds everything. Handing the step anything but what it last returned loads that into model, optimizer and scheduler
first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bayesopt_chain import checks, kinds
from bayesopt_chain._torch import is_flattened
from bayesopt_chain.distributed.ranks import gather_objects, world
from bayesopt_chain.distributed.replicated import is_replicated
from bayesopt_chain.distributed.shards import are_spread
from bayesopt_chain.loop.loss import Info, detach
from bayesopt_chain.optim import _noise
from bayesopt_chain.optim._ranks import OnRanks
from bayesopt_chain.runs.describe import describe, describe_optimizer

ModelLoss = Callable[[nn.Module, Any], Any]


class ModelStep:
    """What :func:`as_step` returns. ``step.params`` and ``step.state`` are where it starts.

    Optimizers make parts of their state in the first step: a saved state may hold more than ``step.state`` does.
    """

    inplace = True
    grows = True

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: ModelLoss, scheduler: Any) -> None:
        self.model, self.optimizer, self.loss, self.scheduler = model, optimizer, loss, scheduler
        self.identity = _identity(optimizer, scheduler)
        if is_flattened(model):
            raise ValueError(
                "as_step: the model is under FullyShardedDataParallel (FSDP1), whose parameters change their shapes in every "
                "pass, so that no loop can hold them; shard it with fully_shard (FSDP2), or train it in a loop of your own "
                "with bc.distributed.part (docs: many ranks)"
            )
        replicated = is_replicated(model)
        self._rank = world().rank if replicated else 0  # replicas have dropout masks of their own
        named: Any = model.module if isinstance(model, DistributedDataParallel) else model
        self._named, self._buffers = dict(named.named_parameters()), dict(named.named_buffers())
        self.params: dict[str, Tensor] = {name: p.detach() for name, p in self._named.items()}
        self._key, self._count = _noise.fresh_key(), 0
        if are_spread(self.params) or replicated:
            self._key = gather_objects(self._key, None)[0]
        self._sources = list(self._named.values())
        self.state = self._pack()

    def __call__(self, params: Any, state: Any, batch: Any) -> tuple[dict[str, Tensor], dict[str, Any], Info]:
        checks.recording("as_step")
        self._load(params, state)
        self.optimizer.zero_grad(set_to_none=True)
        devices = sorted({p.device.index or 0 for p in self._sources if p.device.type == "cuda"})
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            torch.manual_seed(_noise.step_seed(self._key + self._rank, self._count))
            out = self.loss(self.model, batch)
            loss, aux = out if isinstance(out, tuple) else (out, ())
            if not torch.is_tensor(loss) or loss.ndim != 0 or not loss.requires_grad:
                raise ValueError(
                    f"as_step: loss(model, batch) must return a scalar that depends on the model's parameters, or "
                    f"(scalar, aux), got {out!r}"
                )
            loss.backward()
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self._count += 1
        self.state = self._pack()
        return self.params, self.state, Info(loss.detach(), detach(aux))

    def _keep_apart(self, apart: bool) -> None:
        """Learn from ``sample(path=)`` whether it keeps each rank's draws as another chain; equal ones are refused then."""
        if isinstance(self.optimizer, OnRanks):
            self.optimizer._witness.apart = apart

    def grown(self) -> dict[str, Any]:
        """The state with every tensor that the optimizer will make in its first step; nothing moves."""
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        get_optimizer_state_dict(self.model, self.optimizer)  # of an optimizer without a state it makes one
        self.state = self._pack()
        return self.state

    def _pack(self) -> dict[str, Any]:
        out = {
            "optimizer": _tensors(self.optimizer.state_dict()),
            "buffers": {name: b.detach() for name, b in self._buffers.items()},
            "step": _tensors({"key": self._key, "count": self._count}),
        }
        if self.scheduler is not None:
            out["scheduler"] = _tensors(self.scheduler.state_dict())
        return out

    @torch.no_grad()
    def _load(self, params: Any, state: Any) -> None:
        """Make model, optimizer and scheduler what ``params`` and ``state`` say, unless they are."""
        if not isinstance(state, Mapping) or not {"optimizer", "buffers", "step"} <= {*state}:
            raise TypeError(f"as_step: state must be what step.state or a step gave, got {checks.short(state)}")
        if params is not self.params:
            if not isinstance(params, Mapping):
                raise TypeError(f"as_step: params must be tensors by name, as step.params, got {checks.short(params)}")
            if set(params) != set(self._named):
                raise ValueError(
                    f"as_step: params are {sorted(params)}, the model's parameters are {sorted(self._named)}"
                )
            for name, p in self._named.items():
                if params[name].shape != p.shape:
                    raise ValueError(
                        f"as_step: {name} has shape {tuple(params[name].shape)}, the model's {tuple(p.shape)}"
                    )
            for name, p in self._named.items():
                p.copy_(params[name])
        if state is not self.state:
            saved = _restored(state["optimizer"], self.optimizer.state_dict())
            saved["state"] = {int(k): v for k, v in saved["state"].items()}
            self.optimizer.load_state_dict(saved)
            for name, value in state["buffers"].items():
                self._buffers[name].copy_(value)
            position = _restored(state["step"])
            self._key, self._count = position["key"], position["count"]
            if self.scheduler is not None:
                self.scheduler.load_state_dict(_restored(state["scheduler"], self.scheduler.state_dict()))


def as_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: ModelLoss, *, scheduler: Any = None) -> ModelStep:
    """One step of a torch model and a torch optimizer, for loops that take ``(params, state, batch)`` steps.

    Args:
        model: the module; its parameters and buffers move in place. Under DistributedDataParallel or ``fully_shard`` all ranks
            sample one chain, each on its own data; leaves have the names of the module inside.
        optimizer: any ``torch.optim.Optimizer`` over its parameters, with or without a temperature.
        loss: ``loss(model, batch)`` returns a scalar, the mean negative log posterior per datum, or ``(scalar, aux)``.
        scheduler: a scheduler of ``torch.optim.lr_scheduler``, stepped behind the optimizer.

    Returns:
        ``step(params, state, batch) -> (params, state, Info(loss, aux))``, with ``step.params`` and ``step.state`` to
        start from. ``params`` are the model's own tensors by name and move with it: copy what is to be kept. ``state``
        holds tensors only. Around the model torch's global generators are seeded from the state, so that dropout
        replays too; of DTensors all ranks call this, and take the first one's seed.

    Raises:
        ValueError: a model under FSDP1; at a step, params of other names or shapes than the model's; a loss that is no scalar;
            in ``bc.sample(..., path=)`` on several ranks, replicas that the model does not show (DistributedDataParallel inside
            the loss), which would be kept as chains of their own.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = bc.optim.SGHMC(model.named_parameters(), lr=0.1, temperature=1e-3)
        >>> step = bc.optim.as_step(model, optimizer, lambda model, batch: model(batch).square().mean())
        >>> params, state, info = step(step.params, step.state, torch.ones(2, 3))
        >>> sorted(params), info.loss.shape
        (['bias', 'weight'], torch.Size([]))
    """
    kinds.require(
        "as_step",
        model=(model, kinds.MODULE),
        optimizer=(optimizer, kinds.OPTIMIZER),
        loss=(loss, kinds.FUNCTION),
        scheduler=(scheduler, kinds.SCHEDULER.or_none()),
    )
    return ModelStep(model, optimizer, loss, scheduler)


def _identity(optimizer: torch.optim.Optimizer, scheduler: Any) -> Any:
    """Describe the optimizer before its first step, so that :func:`bayesopt_chain.sample` can compare it with a run on disk."""
    about = {"optimizer": describe_optimizer(optimizer)}
    if scheduler is not None:
        position = ("last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial")
        settings = {k: v for k, v in scheduler.state_dict().items() if k not in position}
        about["scheduler"] = [type(scheduler).__name__, settings]
    return describe(about)


def _tensors(x: Any) -> Any:
    """Dictionaries of tensors alone: a number becomes ``{"number": 0-d tensor}``, a list ``{"[0]": ..., "[1]": ...}``; what
    is none of these stays out of dicts."""
    if isinstance(x, dict):
        return {str(k): _tensors(v) for k, v in x.items() if _holds(v)}
    if isinstance(x, (list, tuple)):
        return {f"[{i}]": _tensors(v) for i, v in enumerate(x)}
    if torch.is_tensor(x):
        return x.detach()
    return {"number": torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else None, device="cpu")}


def _holds(x: Any) -> bool:
    """Whether a value can be written as tensors alone."""
    if isinstance(x, dict):
        return True
    if isinstance(x, (list, tuple)):
        return all(map(_holds, x))
    return torch.is_tensor(x) or isinstance(x, (bool, int, float))


def _restored(saved: Any, like: Any = None) -> Any:
    """What :func:`_tensors` was given; ``like``, where there is one, says the kinds and fills in what was left out."""
    if isinstance(saved, dict) and saved.keys() == {"number"}:
        return saved["number"].item()
    if isinstance(saved, dict) and (isinstance(like, (list, tuple)) or (saved and all(k[:1] == "[" for k in saved))):
        saved = [saved[f"[{i}]"] for i in range(len(saved))]
        mine = list(like) if isinstance(like, (list, tuple)) and len(like) == len(saved) else [None] * len(saved)
        out = [_restored(v, m) for v, m in zip(saved, mine)]
        return out if isinstance(like, list) else tuple(out)
    if isinstance(saved, dict):
        mine = like if isinstance(like, dict) else {}
        out = {k: _restored(saved[str(k)], v) if str(k) in saved else v for k, v in mine.items()}
        known = {str(k) for k in mine}
        return {**out, **{k: _restored(v) for k, v in saved.items() if k not in known}}
    return saved
