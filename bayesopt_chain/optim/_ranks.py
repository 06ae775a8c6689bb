"""What the optimizers of this package do where several ranks run: they are compared, and join with uneven batches.

Each rank's claims go to :mod:`bayesopt_chain.distributed.witness`. Within ``torch.distributed.algorithms.join.Join``
DistributedDataParallel sends the parameters of the rank that ended last to all others, and leaves their optimizers with the
velocities and the count of draws at which each of them ended; from then on replicas would draw other noise. The hook here sends
the optimizer's state of that rank along.
"""

from __future__ import annotations

from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from bayesopt_chain import kinds
from bayesopt_chain.distributed.witness import Witness


class OnRanks:
    """In front of a ``torch.optim.Optimizer``, for several ranks."""

    param_groups: list[dict[str, Any]]
    _join_config: Any  # set by torch's Join

    @property
    def _name(self) -> str:
        return f"bc.optim.{type(self).__name__}"

    def watch(self, every: int | None = None, *, first: bool = True) -> None:
        """Choose the steps at which parameters, gradients and keys are compared between ranks.

        Without a call of this, ranks compare hashes at the first two steps that draw noise, at steps 4, 16, 64 and so on, and
        likewise after :meth:`fork` and :meth:`load_state_dict`. Where parts of a model would draw the same noise, or replicas
        have drifted apart, every rank raises at its next step. Nobody waits for anybody, and no collective is made.

        Args:
            every: compare at every so many steps as well. Reading all parameters and gradients once costs about as much as
                the optimizer's own step. ``None`` (default): not.
            first: ``False`` leaves out the steps named above, for ranks that share their noise on purpose.

        Raises:
            TypeError: ``every`` is no whole number, or ``first`` neither True nor False.
            ValueError: ``every`` below 1.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> theta = torch.zeros(2, requires_grad=True)
            >>> optimizer = bc.optim.SGHMC([theta], 0.1, temperature=0.1, generator=bc.distributed.generator(0))
            >>> optimizer.watch(every=1000)
        """
        kinds.require(f"{self._name}.watch", every=(every, kinds.WHOLE.or_none()), first=(first, kinds.BOOL))
        self._witness.every, self._witness.first = every, first

    @property
    def _witness(self) -> Witness:
        if "_compared" not in self.__dict__:
            self.__dict__["_compared"] = Witness(self._name)
        return self.__dict__["_compared"]

    def _compare_anew(self) -> None:
        """Key, state or parameters are others now."""
        if "_compared" in self.__dict__:
            self._witness.restart()

    # what torch.distributed.algorithms.join.Join asks of those whom it is given

    @property
    def join_device(self) -> torch.device:
        """Where messages are sent from: the device of the first parameter."""
        return self.param_groups[0]["params"][0].device

    @property
    def join_process_group(self) -> Any:
        """All ranks, as of a DistributedDataParallel without a group of its own."""
        return dist.distributed_c10d._get_default_group()

    def join_hook(self, **kwargs: Any) -> Any:
        """What torch calls on every rank once all of them have come to their end; all take the state of one that ended last."""
        return _Hook(self)


class _Hook:
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def main_hook(self) -> None:
        """Called while other ranks still make steps. Nothing is to be done, since a step sends no message."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take over the optimizer's state of a rank that made all steps."""
        optimizer, device, rank = self.optimizer, self.optimizer.join_device, dist.get_rank()
        last = torch.tensor(rank if is_last_joiner else -1, device=device)
        dist.all_reduce(last, dist.ReduceOp.MAX)
        source = int(last)
        leaves, spec = optree.tree_flatten(optimizer.state_dict(), none_is_leaf=True)
        told: list[Any] = [spec, [_Described.of(x) for x in leaves]]
        dist.broadcast_object_list(told, src=source, device=device)
        spec, described = told
        for i, x in enumerate(described):
            if isinstance(x, _Described):
                mine = leaves[i].detach().to(device, copy=True).contiguous() if rank == source else None
                described[i] = torch.empty(x.shape, dtype=x.dtype, device=device) if mine is None else mine
                dist.broadcast(described[i], src=source)
        if rank == source:
            optimizer._compare_anew()
        else:
            optimizer.load_state_dict(optree.tree_unflatten(spec, described))


class _Described:
    """A tensor's shape and dtype, in the place of the tensor."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype

    @staticmethod
    def of(x: Any) -> Any:
        return _Described(x.shape, x.dtype) if isinstance(x, Tensor) else x
