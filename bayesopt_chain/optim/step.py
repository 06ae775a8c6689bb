"""Turn a model, an optimizer and a loss into the step ``(params, state, batch) -> (params, state, Info)`` of this library.

The step moves the model and the optimizer in place. ``params`` are the model's own tensors. ``state`` holds the optimizer's
tensors, and its numbers (learning rate, count, key, those of the scheduler) as 0-d tensors, so that a checkpoint that holds
tensors only is complete. If the step is called with other parameters or another state than it last returned, it loads them
into the model, the optimizer and the scheduler first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from bayesopt_chain import checks
from bayesopt_chain._torch import FLATTENED, REPLICATED, spread_parts
from bayesopt_chain.distributed.ranks import gather_objects, world
from bayesopt_chain.loop.loss import Info, detach
from bayesopt_chain.modules import inner_of
from bayesopt_chain.optim._ranks import OnRanks
from bayesopt_chain.optim.ivon import IVON
from bayesopt_chain.random.stream import new_key, seed_of
from bayesopt_chain.runs.run import describe, describe_optimizer
from bayesopt_chain.trees import are_spread, named_leaves, require_like

ModelLoss = Callable[[nn.Module, Any], Any]


class ModelStep:
    """The step that :func:`as_step` returns. A loop starts from ``step.params`` and ``step.state``.

    Attributes:
        inplace: True, since a step overwrites the tensors of the model.
        grows: True, since an optimizer makes parts of its state in the first step: a saved state may hold more tensors than
            ``step.state`` does before the first step.
    """

    inplace = True
    grows = True

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: ModelLoss, scheduler: Any) -> None:
        self.model, self.optimizer, self.loss, self.scheduler = model, optimizer, loss, scheduler
        self.identity = _identity(optimizer, scheduler)
        if spread_parts(model, FLATTENED):
            raise ValueError(
                "as_step: the model is under FullyShardedDataParallel (FSDP1), whose parameters change their shapes in every "
                "pass, so that no loop can hold them; shard it with fully_shard (FSDP2), or train it in a loop of your own "
                "with bc.distributed.part (docs: many ranks)"
            )
        replicated = bool(spread_parts(model, REPLICATED))
        self._rank = world().rank if replicated else 0  # added to the seed: replicas draw different dropout masks
        self._module = inner_of(model)
        self._named = dict(self._module.named_parameters())
        self._key, self._count = int(new_key(None, torch.device("cpu"))), 0
        # the ranks of one chain need one key; on replicas _rank is added to it
        if are_spread(self._named) or replicated:
            self._key = gather_objects(self._key, None)[0]
        self.params, self.state = self._pack()

    def __call__(self, params: Any, state: Any, batch: Any) -> tuple[dict[str, Tensor], dict[str, Any], Info]:
        """Make one step of the model, the optimizer and the scheduler.

        Args:
            params: tensors by name, as ``step.params``; other tensors than these are loaded into the model first.
            state: as ``step.state``; another state is loaded first.
            batch: passed on to the loss.

        Returns:
            ``(params, state, Info)``.
        """
        checks.recording("as_step")
        self._load(params, state)
        self.optimizer.zero_grad(set_to_none=True)
        # the random numbers of the model are seeded from the state, and the caller's generators are restored afterwards
        devices = sorted({p.device.index or 0 for p in self._named.values() if p.device.type == "cuda"})
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            torch.manual_seed(seed_of(self._key + self._rank, self._count))
            out = self.loss(self.model, batch)
            loss, aux = out if isinstance(out, tuple) else (out, ())
            # checked before backward(), so that nothing has moved if this raises
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
        self.params, self.state = self._pack()
        return self.params, self.state, Info(loss.detach(), detach(aux))

    def _keep_apart(self, apart: bool) -> None:
        """Store whether ``sample(path=)`` keeps the draws of each rank as a chain of its own.

        If it does, the optimizer refuses ranks that draw the same noise.
        """
        if isinstance(self.optimizer, OnRanks):
            self.optimizer._witness.apart = apart

    def _pack(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the parameters by name, and the state of optimizer, buffers, step and scheduler as dictionaries of tensors.

        Both are read anew after every step: a module may replace a buffer, and ``model.to`` the memory of parameters.
        """
        buffers = {name: b.detach() for name, b in self._module.named_buffers()}
        state = {**_to_tensors(self._described()), "buffers": buffers}
        return {name: p.detach() for name, p in self._named.items()}, state

    def _described(self) -> dict[str, Any]:
        """Return what a step depends on besides parameters, buffers and batch."""
        out = {"optimizer": self.optimizer.state_dict(), "step": {"key": self._key, "count": self._count}}
        return out if self.scheduler is None else {**out, "scheduler": self.scheduler.state_dict()}

    @torch.no_grad()
    def _load(self, params: Any, state: Any) -> None:
        """Load ``params`` and ``state`` into the model, the optimizer and the scheduler, unless the last step returned them."""
        if not isinstance(state, Mapping) or not {"optimizer", "buffers", "step"} <= {*state}:
            raise TypeError(f"as_step: state must be what step.state or a step gave, got {checks.short(state)}")
        if params is not self.params:
            if not isinstance(params, Mapping):
                raise TypeError(f"as_step: params must be tensors by name, as step.params, got {checks.short(params)}")
            require_like(dict(params), self.params, "as_step: params")  # before any parameter is overwritten
            for name, p in self._named.items():
                p.copy_(params[name])
        if state is not self.state:
            buffers = dict(self._module.named_buffers())
            require_like(dict(state["buffers"]), buffers, "as_step: the buffers of state")
            saved = _with_numbers({name: x for name, x in state.items() if name != "buffers"})
            # torch numbers parameters by integers, and paths are text; an optimizer makes its state in its first step
            entries = {int(i): entry for i, entry in saved["optimizer"].pop("state", {}).items()}
            mine = _filled(self._described(), saved)
            self.optimizer.load_state_dict({**mine["optimizer"], "state": entries})
            for name, value in state["buffers"].items():
                buffers[name].copy_(value)
            self._key, self._count = mine["step"]["key"], mine["step"]["count"]
            if self.scheduler is not None:
                self.scheduler.load_state_dict(mine["scheduler"])


@checks.takes(
    model=checks.MODULE,
    optimizer=checks.instance(torch.optim.Optimizer, "an optimizer of torch.optim or bc.optim"),
    loss=checks.FUNCTION,
    scheduler=checks.having(
        "a scheduler of torch.optim.lr_scheduler", "step", "state_dict", "load_state_dict"
    ).or_none(),
)
def as_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: ModelLoss, *, scheduler: Any = None) -> ModelStep:
    """Make a step of a torch model and a torch optimizer, for loops that take ``(params, state, batch)`` steps.

    Args:
        model: the module. A step changes its parameters and buffers in place. Under DistributedDataParallel or ``fully_shard``
            all ranks sample one chain, each on its own data, and leaves have the names of the wrapped module.
        optimizer: any ``torch.optim.Optimizer`` over the parameters of the model, with or without a temperature.
        loss: ``loss(model, batch)`` returns a scalar, the mean negative log posterior per datum, or ``(scalar, aux)``.
        scheduler: a scheduler of ``torch.optim.lr_scheduler``, which is stepped after the optimizer. Default: none.

    Returns:
        ``step(params, state, batch) -> (params, state, Info(loss, aux))``, with ``step.params`` and ``step.state`` to
        start from. ``params`` are the model's own tensors by name, which the next step overwrites: copy what is to be kept.
        ``state`` holds tensors only. While the loss is evaluated torch's global generators are seeded from the state, so that
        dropout masks are repeated when a run is resumed. If the parameters are DTensors, all ranks must call this function;
        they use the seed of the first rank.

    Raises:
        ValueError: a model under FSDP1; IVON, LBFGS or ReduceLROnPlateau, which ask for more than a gradient; at a step, params
            of other names or shapes than the model's; a loss that is no scalar;
            in ``bc.sample(..., path=)`` on several ranks, replicas that cannot be seen from the model (DistributedDataParallel
            is applied inside the loss), since their equal draws would be kept as chains of their own.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = bc.optim.SGHMC(model.named_parameters(), lr=0.1, temperature=1e-3)
        >>> step = bc.optim.as_step(model, optimizer, lambda model, batch: model(batch).square().mean())
        >>> params, state, info = step(step.params, step.state, torch.ones(2, 3))
        >>> sorted(params), info.loss.shape
        (['bias', 'weight'], torch.Size([]))
    """
    for given, kind, why in (
        (
            optimizer,
            IVON,
            "takes gradients at draws and moves their mean, which is no draw: use bc.make_step with bc.vi.ivon",
        ),
        (optimizer, torch.optim.LBFGS, "evaluates the loss several times a step: use bc.optim.SGHMC"),
        (
            scheduler,
            ReduceLROnPlateau,
            "asks for a metric, which a step has not: use one that depends on the count alone",
        ),
    ):
        if isinstance(given, kind):
            raise ValueError(f"as_step: {type(given).__name__} {why}, or a loop of your own")
    return ModelStep(model, optimizer, loss, scheduler)


def _identity(optimizer: torch.optim.Optimizer, scheduler: Any) -> Any:
    """Describe the optimizer before its first step, so that :func:`bayesopt_chain.sample` can compare it with a run on disk."""
    about = {"optimizer": describe_optimizer(optimizer)}
    if scheduler is not None:
        # entries that change during a run are no part of the identity
        position = ("last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial")
        settings = {k: v for k, v in scheduler.state_dict().items() if k not in position}
        about["scheduler"] = [type(scheduler).__name__, settings]
    return describe(about)


def _to_tensors(x: Any) -> Any:
    """Write a tree as nested dictionaries that hold tensors only, with keys as in the paths of its leaves.

    A number becomes ``{"number": 0-d tensor}``, and what is neither, such as a string, ``None``, which dictionaries leave out.
    """
    if isinstance(x, (list, tuple)):
        x = dict(enumerate(x))
    if isinstance(x, dict):
        written = {str(k): _to_tensors(v) for k, v in x.items()}
        return {k: v for k, v in written.items() if v is not None}
    if torch.is_tensor(x):
        return x.detach()
    if isinstance(x, (bool, int, float)):
        return {"number": torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else None, device="cpu")}
    return None


def _with_numbers(saved: Any) -> Any:
    """Return what :func:`_to_tensors` wrote, with numbers again."""
    return optree.tree_map(lambda x: x["number"].item() if _is_number(x) else x, saved, is_leaf=_is_number)


def _is_number(x: Any) -> bool:
    return isinstance(x, dict) and x.keys() == {"number"}


def _filled(like: Any, saved: Any) -> Any:
    """Return a tree with the entries that were saved in the place of its own, by their paths."""
    entries, structure = named_leaves(saved), optree.tree_structure(like, none_is_leaf=True)
    return structure.unflatten([entries.get(name, x) for name, x in named_leaves(like).items()])
