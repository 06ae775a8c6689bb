"""Run any chain of gradient transformations as a ``torch.optim.Optimizer``.

Each parameter group has a chain of its own. A step calls ``updates, state = tx.update(grads, state, params=params,
inplace=False)`` for each group and adds the updates to the parameters, so that its results are equal, bit for bit, to those of
the functional form. Gradients are read and never changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor
from torchopt.base import GradientTransformation

from bayesopt_chain.core.chain import numbers_of
from bayesopt_chain.distributed.ranks import require_named_chain
from bayesopt_chain.distributed.shards import add, cut_like
from bayesopt_chain.distributed.witness import Claim
from bayesopt_chain.links.keyed import Keyed
from bayesopt_chain.links.wrapper import Weighted
from bayesopt_chain.loop.interrupts import uninterrupted
from bayesopt_chain.loop.parallel import fork
from bayesopt_chain.optim import _checks
from bayesopt_chain.optim._ranks import OnRanks, claim
from bayesopt_chain.random.stream import keyed

MakeChain = Callable[[dict[str, Any]], GradientTransformation]


class Optimizer(OnRanks):
    """A ``torch.optim.Optimizer`` that runs a chain, one for each parameter group.

    Args:
        params: tensors, ``named_parameters()``, or dicts (groups), as in torch.
        make_chain: ``make_chain(group)`` returns the chain of a group. It is called once for each group, with the
            hyperparameters of the group and without its parameters. A number among them becomes a constant of the chain, and
            a step raises if the group's number has changed since. A 0-d tensor is read at every step instead, and
            torch's schedulers write into such a tensor: ``lr=torch.tensor(0.1)``.
        defaults: hyperparameters for groups that do not give a value of their own.

    ``state_dict()`` holds the tensors of the chain's state in each group, as a list in the order of ``optree.tree_leaves``,
    and loads with ``weights_only=True``. The chain gets ``None`` as the gradient of a parameter that has none.

    Raises:
        TypeError: ``make_chain`` returns no gradient transformation.
        ValueError: at a step, a hyperparameter that was built into the chain has changed; on loading, the state of another
            chain.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> theta = torch.ones(2, requires_grad=True)
        >>> optimizer = bc.optim.Optimizer([theta], lambda group: bc.samplers.ubu(0.1, 1.0, temperature=group["t"]), t=0.1)
        >>> (0.5 * theta.square().sum()).backward()
        >>> optimizer.step()
    """

    def __init__(self, params: Any, make_chain: MakeChain, **defaults: Any) -> None:
        _checks.require(self._name, {"params": params, "make_chain": make_chain, **defaults})
        self._make_chain = make_chain
        self._chains: list[_Built] = []
        with _checks.with_call(self._name, params=..., **defaults):
            super().__init__(params, defaults)

    def _begin(self, group: dict[str, Any]) -> None:
        built = _Built(self._make_chain, group)
        if any(built.keys() & other.keys() for other in self._chains):
            raise ValueError(
                f"{self._name}: make_chain gave two groups one key, so that they would get the same noise; make the "
                "generator once, outside of make_chain, so that each group draws a key of its own from it"
            )
        self._chains.append(built)
        self._show_a_state()

    def _show_a_state(self) -> None:
        """Make an empty state entry for each parameter, and an entry ``chain_state`` in each group.

        ``torch.distributed.checkpoint`` needs both. It would make a step for a parameter without a state entry, and from a
        flattened state dict it loads only what the groups have entries for.
        """
        for group in self.param_groups:
            group["chain_state"] = ()
            for p in group["params"]:
                self.state[p]

    def _new_keys(self, generator: torch.Generator | None) -> None:
        for built in self._chains:
            (built.state,) = fork(built.state, 1, generator=generator)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Make one update of every group.

        Args:
            closure: evaluates the model again and returns the loss, as in torch.

        Returns:
            The loss that the closure returned; ``None`` without a closure.

        Raises:
            TypeError: a closure that is no function.
            ValueError: a hyperparameter that was built into the chain as a number has changed, or a tensor that the chain reads
                was replaced by another object. Nothing has moved then.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> theta = torch.ones(2, requires_grad=True)
            >>> optimizer = bc.optim.Optimizer([theta], lambda group: bc.sgd(group["lr"]), lr=0.1)
            >>> theta.sum().backward()
            >>> optimizer.step()
            >>> theta.detach()
            tensor([0.9000, 0.9000])
        """
        loss = self._loss_of(closure)
        for group, built in zip(self.param_groups, self._chains):  # all groups, before any of them moves
            built.check(group)
        compared = self._witness.step(self._claims, self._all_params())
        # Ctrl-C between two writes would leave parameters and state of different steps
        with compared, torch.no_grad(), uninterrupted():
            for group, built in zip(self.param_groups, self._chains):
                built.step(group["params"])
        return loss

    def _claims(self) -> list[Claim]:
        """List the parameters that are about to get noise, so that ranks can compare their lists.

        A claim names a parameter by the number of its group and its index in the group.
        """
        count = self._witness.steps
        groups = [group | numbers_of(built.tx, count) for group, built in zip(self.param_groups, self._chains)]
        return [
            claim(f"{i}.{j}", j, p, group, (int(entry.key), int(getattr(entry, "step", 0))))
            for i, (group, built) in enumerate(zip(groups, self._chains))
            for entry in keyed(built.state)
            if int(entry.key)  # a link that draws nothing has the key 0
            for j, p in enumerate(group["params"])
            if p.grad is not None
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer, for :meth:`load_state_dict`.

        Returns:
            A dictionary in torch's format. In each group, ``chain_state`` lists the tensors of the chain's state.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> theta = torch.zeros(2, requires_grad=True)
            >>> optimizer = bc.optim.Optimizer([theta], lambda group: bc.sgd(group["lr"], 0.9), lr=0.1)
            >>> [x.shape for x in optimizer.state_dict()["param_groups"][0]["chain_state"]]
            [torch.Size([2])]
        """
        out = super().state_dict()
        for group, built in zip(out["param_groups"], self._chains):
            group["chain_state"] = optree.tree_leaves(built.state)
        return out

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of the same chains on the same parameters.

        Args:
            state_dict: a result of :meth:`state_dict`.

        Raises:
            TypeError: ``state_dict`` is no state dict of an optimizer.
            ValueError: its chain states have other shapes than these, as those of another chain or of other parameters have.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> theta = torch.zeros(2, requires_grad=True)
            >>> make = lambda: bc.optim.Optimizer([theta], lambda group: bc.sgd(group["lr"], 0.9), lr=0.1)
            >>> make().load_state_dict(make().state_dict())
        """
        # torch.distributed.checkpoint leaves an empty "state" out of a full state dict
        state_dict = {"state": {}, **state_dict} if isinstance(state_dict, dict) else state_dict
        _checks.require(f"{self._name}.load_state_dict", {"state_dict": state_dict})
        saved = [dict(group) for group in state_dict["param_groups"]]
        states = [group.pop("chain_state", None) for group in saved]
        laid = [built.loaded(state) for built, state in zip(self._chains, states)]
        super().load_state_dict({**state_dict, "param_groups": saved})
        self._show_a_state()
        for built, state in zip(self._chains, laid):
            built.state = state

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_make_chain": self._make_chain, "_chains": self._chains}


class _Built:
    """The chain of one group and its state.

    Attributes:
        tx: the chain.
        state: the chain's state.
        held: by name, the hyperparameters that the chain holds: numbers as constants, and tensors that it reads at every step.
    """

    def __init__(self, make_chain: MakeChain, group: dict[str, Any]) -> None:
        options = {k: v for k, v in group.items() if k not in ("params", "param_names", "chain_state")}
        self.tx = make_chain({**options})
        if not isinstance(self.tx, GradientTransformation):
            raise TypeError(
                f"bc.optim.Optimizer: make_chain(group) must return a gradient transformation, got {self.tx!r}"
            )
        for link in getattr(self.tx, "links", ()):  # a transformation of TorchOpt has no links
            if isinstance(link, Weighted):
                raise ValueError(
                    f"bc.optim.Optimizer: the draws of {link} have weights, which an optimizer has no way to hand on; take "
                    "bc.make_step, whose info.weight they are"
                )
            if isinstance(link, Keyed):
                require_named_chain(f"bc.optim.Optimizer: {link}", link.generator)
        self.held = {
            name: x
            for name, x in options.items()
            if isinstance(x, (int, float, tuple)) or (isinstance(x, Tensor) and x.numel() == 1)
        }
        self.state = self.tx.init(group["params"])

    def keys(self) -> set[int]:
        """The keys of the random streams in the state; a link that draws nothing has the key 0."""
        return {int(entry.key) for entry in keyed(self.state)} - {0}

    def check(self, group: dict[str, Any]) -> None:
        """Raise ValueError if the group has another number or tensor than the chain holds, which would go unnoticed."""
        for name, value in self.held.items():
            if isinstance(value, Tensor):
                if group[name] is not value:
                    raise ValueError(
                        f"bc.optim.Optimizer: {name} is another object than the tensor that the chain reads; fill that one: "
                        f"group[{name!r}].fill_(...)"
                    )
            elif group[name] != value:
                raise ValueError(
                    f"bc.optim.Optimizer: {name} changed from {value} to {group[name]}, but was built into the chain as a "
                    f"number; give {name}=torch.tensor({value}), which is read at every step and filled in place by schedulers"
                )

    def step(self, params: list[Tensor]) -> None:
        """Add one update to the parameters. If none of them has a gradient, nothing is done."""
        grads = [p.grad for p in params]
        if all(g is None for g in grads):
            return
        updates, self.state = self.tx.update(grads, self.state, params=params, inplace=False)
        add(params, updates, inplace=True)

    def loaded(self, saved: list[Tensor] | None) -> Any:
        """Return a state of the chain that has copies of saved tensors.

        Where the state holds a DTensor and the saved tensor is plain, this rank takes its part of the saved tensor.

        Raises:
            ValueError: saved tensors have other shapes than the state of this chain.
        """
        leaves, spec = optree.tree_flatten(self.state)
        shapes, mine = ([tuple(x.shape) for x in xs] for xs in (saved or (), leaves))
        if saved is None or shapes != mine:
            raise ValueError(
                f"bc.optim.Optimizer: the state dict holds a chain of shapes {saved and shapes}, this chain's has {mine}; "
                "load a state of the same chain and parameters"
            )
        for i, (old, new) in enumerate(zip(leaves, saved)):
            leaves[i] = cut_like(new, old).detach().to(old.device, old.dtype, copy=True)
        return optree.tree_unflatten(spec, leaves)
