"""What the optimizers of this package do on several ranks: they name parameters, and compare their noise.

Names: a parameter draws its noise by its name, which is the same on every rank that holds a part of it.

Comparison: :mod:`bayesopt_chain.distributed.witness` compares which leaves get which noise on which rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain._torch import is_dtensor, local
from bayesopt_chain.distributed.parts import elements_of, place_of
from bayesopt_chain.distributed.ranks import require_named_chain
from bayesopt_chain.distributed.shards import agreed_key, cut_like
from bayesopt_chain.distributed.witness import Claim, Witness
from bayesopt_chain.optim import _checks
from bayesopt_chain.random.stream import leaf_numbers, new_key


def claim(name: str, number: int, p: Any, group: dict[str, Any], stream: Any = None) -> Claim:
    """Describe the noise that a leaf gets in this step, so that ranks can compare it.

    Args:
        name, number: of the leaf, in messages and in the random stream.
        p: the parameter.
        group: its group.
        stream: key and count of the draws. Default: those of the group.
    """
    gradient = None if p.grad is None or p.grad.is_sparse else local(p.grad)
    key, count = stream or (group["noise_key"], group["noise_count"])
    return Claim(name, key, number, elements_of(p), count, local(p.detach()), gradient, group)


class OnRanks(torch.optim.Optimizer):
    """An optimizer that names its parameters and compares ranks.

    Attributes:
        numbers: the names in a parameter's state of entries that are numbers; all others have the parameter's shape.
        wide: the names of those that keep their dtype where the parameter has another one.
        own_options: entries of a group that a state dict of torch's class lacks; then they keep their values.
    """

    numbers: ClassVar[Collection[str]] = ("step",)
    wide: ClassVar[Collection[str]] = ()
    own_options: ClassVar[Collection[str]] = ()
    _own_defaults: Mapping[str, Any] | None = None  # options of groups besides those of torch's class

    @cached_property
    def _name(self) -> str:  # in messages
        return f"bc.optim.{type(self).__name__}"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with options of its own.

        Args:
            param_group: as in torch, with any of this class's options.

        Raises:
            TypeError: ``param_group`` is no group, or an option has a wrong type.
            ValueError: an option out of range or for which no noise is known, parameters that are given twice or share memory,
                or a chain with the key of another group. Nothing has changed then.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> a, b = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
            >>> optimizer = bc.optim.SGHMC([a], lr=0.1, temperature=0.5)
            >>> optimizer.add_param_group({"params": [b], "temperature": 0.0})
            >>> [group["temperature"] for group in optimizer.param_groups]
            [0.5, 0.0]
        """
        who = f"{self._name}.add_param_group"
        _checks.require(who, {"param_group": param_group})
        _checks.require(who, {name: value for name, value in param_group.items() if name != "params"})
        # torch fills a group with the defaults, which its constructor made of its own arguments only
        self.defaults = {**(self._own_defaults or {}), **self.defaults}
        with _checks.with_call(who, param_group=...):
            super().add_param_group(param_group)
        self.__dict__.pop("_numbers", None)
        try:
            self._begin(self.param_groups[-1])
        except BaseException:
            self.param_groups.pop()
            raise

    def _begin(self, group: dict[str, Any]) -> None:
        """Make what a new group needs, the last one; an error leaves it out."""
        raise NotImplementedError

    @checks.takes(compares=checks.BOOL)
    def watch(self, compares: bool) -> None:
        """Choose whether parameters, gradients and keys are compared between ranks, as they are by default.

        Ranks compare hashes of these at the first two steps that draw noise and at steps 4, 16, 64 and so on. The
        count begins again after :meth:`fork` and :meth:`load_state_dict`. If parts of a model would draw the same noise, or if
        replicas differ, every rank raises at its next step. No rank waits for another, and no collective is called. Replicas
        are compared more often by ``bc.distributed.require_replicas(list(model.parameters()), mesh)``, a collective.

        Args:
            compares: ``False`` for ranks that share their noise on purpose.

        Raises:
            TypeError: ``compares`` is no bool.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> theta = torch.zeros(2, requires_grad=True)
            >>> optimizer = bc.optim.SGHMC([theta], 0.1, temperature=0.1, generator=bc.distributed.generator(0))
            >>> optimizer.watch(False)
        """
        self._witness.compares = compares

    def fork(self, generator: torch.Generator | None = None) -> None:
        """Draw a new key for the noise, so that this chain is independent of the chain whose state was loaded.

        ``load_state_dict`` continues the noise of the saved run, as a resumed run needs it. A second chain that starts from
        the same checkpoint calls ``fork`` once after loading.

        Args:
            generator: source of the key (default: torch's global generator). On several ranks it has to be given, as to the
                constructor: ``bc.distributed.generator(seed)`` on replicas of one chain, and with ``chain=rank`` for a chain
                on each rank. Ranks that hold parts of the same DTensors use the key of the first rank, and all of them have
                to call this method.

        Raises:
            ValueError: there are several ranks, and no generator is given.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> theta = torch.zeros(2, requires_grad=True)
            >>> optimizer = bc.optim.SGHMC([theta], lr=0.1, temperature=0.5)
            >>> before = optimizer.param_groups[0]["noise_key"]
            >>> optimizer.fork()
            >>> optimizer.param_groups[0]["noise_key"] == before
            False
        """
        _checks.require(f"{self._name}.fork", {"generator": generator})
        require_named_chain(f"{self._name}.fork", generator)
        self._new_keys(generator)
        self._begin_anew()

    def _new_keys(self, generator: torch.Generator | None) -> None:
        """Draw a new key from ``generator``, or from torch's global generator, and give it to all groups.

        Ranks that hold parts of the same DTensors all get the key of the first of them.
        """
        params = self._all_params()
        device = next((p.device for p in params if is_dtensor(p)), torch.device("cpu"))
        key = int(agreed_key(new_key(generator, device), params))
        for group in self.param_groups:
            group["noise_key"] = key

    def _loss_of(self, closure: Callable[[], Any] | None) -> Any:
        """Evaluate the model by a closure, with gradients, and return its loss; ``None`` without a closure."""
        if closure is None:
            return None
        _checks.require(f"{self._name}.step", {"closure": closure})
        with torch.enable_grad():
            return closure()

    @cached_property
    def _numbers(self) -> dict[Any, int]:
        """The numbers of the parameters in the random stream, which are hashes of their names."""
        return dict(zip(self._all_params(), leaf_numbers(self._names())))

    @cached_property
    def _witness(self) -> Witness:
        return Witness(self._name)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, and with it its noise, or a state dict of the class of ``torch.optim``.

        The draws go on as they would have in the saved run. A state dict of ``torch.optim`` sets velocities, moments and
        hyperparameters; temperature and key stay those of this optimizer, so that a model can be trained with ``torch.optim``
        and then sampled. As everywhere in torch, the lr and momentum are the saved ones.

        The state dict is copied: torch keeps the tensors of the given one where nothing has to be converted, and two chains
        that load one live state dict would move one velocity. Hyperparameters that are tensors here are filled, and stay the
        same objects, which the caller may hold.

        Args:
            state_dict: from an optimizer of this class, or of the class of ``torch.optim`` that it extends.

        Raises:
            TypeError: ``state_dict`` is no state dict of an optimizer.
            ValueError: as in torch, groups of other sizes; a state dict of another class, whose groups lack a hyperparameter;
                where noise is drawn, velocities, averages or draws of other shapes than the parameters. Nothing has
                changed then.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> theta = torch.zeros(2, requires_grad=True)
            >>> trained = torch.optim.SGD([theta], lr=0.05, momentum=0.8)
            >>> optimizer = bc.optim.SGHMC([theta], lr=0.1, temperature=0.5)
            >>> optimizer.load_state_dict(trained.state_dict())
            >>> optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["temperature"]
            (0.05, 0.5)
        """
        who = f"{self._name}.load_state_dict"
        _checks.require(who, {"state_dict": state_dict})
        groups = state_dict["param_groups"]
        # torch adds a default to every optimizer that has loaded a state, which is in no group
        known = {name: x for name, x in self.defaults.items() if name in self.param_groups[0]}
        numbers = [name for name, x in known.items() if isinstance(x, (float, int, tuple, Tensor))]
        if lost := [name for name in numbers if name not in self.own_options and any(name not in g for g in groups)]:
            raise ValueError(
                f"{who}: a group of the state dict has no {lost[0]!r}, only {sorted({*groups[0]} - {'params'})}; it is of "
                f"another class, so load it into an optimizer of that class"
            )
        given = [state_dict["state"].get(i, {}) for group in groups for i in group["params"]]
        # of the temperatures that hold behind loading; those of now may be mended by it
        hot = [saved.get("temperature", mine.get("temperature", 1.0)) for saved, mine in zip(groups, self.param_groups)]
        for p, entry in zip(self._all_params(), given if any(x != 0.0 for x in hot) else ()):
            _checks.check_state(who, p, entry, self.numbers)
        before = self.param_groups
        super().load_state_dict(state_dict)
        for group, mine in zip(self.param_groups, before):
            group |= {name: mine[name] for name in self.own_options if name in mine and name not in group}
            for name, x in mine.items():
                if isinstance(x, Tensor) and x.numel() == 1:
                    x.detach().fill_(float(group.get(name, x)))
                    group[name] = x
        for p, saved in zip(self._all_params(), given):
            for name, old in saved.items():
                if isinstance(old, Tensor):
                    x, is_number = self.state[p][name], name in self.numbers
                    # torch casts what it loads to the dtype of the parameter
                    dtype = old.dtype if is_number or name in self.wide else x.dtype
                    x = old.detach().to(x.device, dtype, copy=True)
                    # the tensors of a full state dict are whole on every rank
                    self.state[p][name] = x if is_number else cut_like(x, p)
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Forget what was read of key, state and groups, which have changed, and begin the comparison of ranks again."""
        self.__dict__.pop("_numbers", None)
        if "_witness" in self.__dict__:
            self._witness.restart()

    def _require_added(self) -> None:
        """Raise ValueError if parameters were written into a group, past :meth:`add_param_group`."""
        if new := sum([p not in self._numbers for p in self._all_params()]):
            raise ValueError(
                f"{self._name}: {new} parameters were appended to group['params'], and would move without noise; take them "
                "out again and give them to add_param_group"
            )

    def _all_params(self) -> list[Any]:
        """Return the parameters of all groups."""
        return [*chain.from_iterable([group["params"] for group in self.param_groups])]

    def _names(self) -> tuple[str, ...]:
        """Return the names of all parameters, by which each draws its noise.

        A name is the one that ``bc.distributed.part`` was given for the parameter, else the parameter's own name, else its
        index among all parameters.

        Raises:
            ValueError: two parameters have the same name.
        """
        names: list[str] = []
        for group in self.param_groups:
            own = group.get("param_names") or map(str, range(len(names), len(names) + len(group["params"])))
            places = map(place_of, group["params"])
            names += [name if place is None else place.name for name, place in zip(own, places)]
        if len(set(names)) < len(names):
            raise ValueError(f"{self._name}: two parameters have the same name; give each a name of its own")
        return tuple(names)
