r"""IVON as a ``torch.optim.Optimizer``: a diagonal Gaussian posterior at the cost of Adam, of whole and of sharded parameters.

With ``theta = m + sigma eps``, ``sigma^2 = T / (h + delta)`` the parameters at which the gradient ``g`` of the mean loss per
datum was taken, ``t`` the number of the step and ``h_0`` the first Hessian (Shen et al., 2024, algorithm 1; ``lambda = 1 / T``)

    v <- beta1 v + (1 - beta1) g                          v-bar = v / (1 - beta1^t)
    h <- beta2 h + (1 - beta2) h-hat + (1 - beta2)^2 (h - h-hat)^2 / (2 (h + delta)),          h-hat = g eps / sigma
    m <- m - lr (h_0 + delta) (v-bar + delta m) / (h + delta)

All of it is elementwise, and ``eps`` is a function of (key, leaf, element, step), so that a rank which holds some elements of a
DTensor (``fully_shard``, tensor parallelism) computes them alone and sends nothing. :func:`bayesopt_chain.vi.ivon` is the same
for parameters that are handed to a loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain._torch import is_dtensor, local_of
from bayesopt_chain.distributed.parts import elements_of, place_of
from bayesopt_chain.distributed.ranks import require_named_chain
from bayesopt_chain.distributed.witness import Claim
from bayesopt_chain.optim import _arguments, _noise
from bayesopt_chain.optim._ranks import OnRanks
from bayesopt_chain.random.philox import draw_elements, parts_of_leaves

_POSTERIOR = 2**62  # counts from here on number the draws that are asked for by number


class IVON(OnRanks, torch.optim.Optimizer):
    """Improved variational online Newton (Shen et al., 2024): the parameters are the mean of a diagonal Gaussian posterior.

    The loss is evaluated at a draw, inside of :meth:`sampled`; :meth:`step` then moves mean and precision. Gradients of
    several microbatches may be accumulated at one draw. Ranks that hold replicas (DistributedDataParallel) or parts
    (``fully_shard``, tensor parallelism) of one model draw the same point, and average or scatter gradients as they do.

    Args:
        params: as in torch: tensors, ``named_parameters()``, or dicts (groups). Draws are numbered by names.
        lr: learning rate.
        temperature: ``1 / N`` for a loss that is a mean over ``N`` data (the paper's ``1 / lambda``); positive.
        betas: weights of the past in the averages of gradients and Hessians. The default 0.99999 of the second is for training
            of 100,000 steps and more; for ``t`` steps ``1 - 5 / t`` forgets the first Hessian.
        weight_decay: ``delta``, the prior of precision ``delta / temperature`` about zero, which the loss then leaves out.
        init_hessian: first Hessian per datum, positive.
        rescale_lr: multiply lr by ``init_hessian + weight_decay``, so that at first it is SGD's.
        clip_radius: bound on each entry of the preconditioned gradient.
        generator: source of the draws' key (default: torch's global generator). Of several ranks each needs
            ``bc.distributed.generator(seed)``.

    State: two tensors a parameter, ``momentum`` and ``hessian``, laid out as the parameter. While a draw is in the parameters
    the means are kept beside them.

    Raises:
        ValueError: numbers out of range; several ranks and no generator; at a step, no draw since the last one.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = bc.optim.IVON(model.named_parameters(), lr=0.1, temperature=1 / 100, betas=(0.9, 0.99))
        >>> x, y = torch.ones(100, 3), torch.zeros(100, 1)
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     with optimizer.sampled():
        ...         (model(x) - y).square().mean().backward()
        ...     optimizer.step()
        >>> optimizer.variances()["weight"].shape
        torch.Size([1, 3])
        >>> with torch.no_grad(), optimizer.sampled(draw=0):           # predictions at draws 0, 1, ... of the posterior
        ...     prediction = model(x)
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor,
        *,
        temperature: float,
        betas: tuple[float, float] = (0.9, 0.99999),
        weight_decay: float = 0.0,
        init_hessian: float = 1.0,
        rescale_lr: bool = True,
        clip_radius: float = math.inf,
        generator: torch.Generator | None = None,
    ) -> None:
        given: dict[str, Any] = {"lr": lr, "temperature": temperature, "betas": betas, "weight_decay": weight_decay}
        given |= {"init_hessian": init_hessian, "rescale_lr": rescale_lr, "clip_radius": clip_radius}
        _arguments.require(self._name, {"params": params, "generator": generator, **given})
        for name, value in (("temperature", temperature), ("init_hessian", init_hessian), ("clip_radius", clip_radius)):
            if not value > 0.0:
                raise ValueError(f"{self._name}: {name} must be positive, got {value}")
        if not 0.0 <= betas[0] < 1.0 or not 0.0 <= betas[1] <= 1.0:
            raise ValueError(f"{self._name}: betas must lie in [0, 1) and [0, 1], got {betas}")
        if not (float(lr) >= 0.0 and weight_decay >= 0.0):
            raise ValueError(f"{self._name}: lr and weight_decay must not be negative, got {lr} and {weight_decay}")
        require_named_chain(self._name, generator)
        self._seed = None if generator is None else generator.initial_seed()  # by which a run on disk knows it
        given["betas"] = tuple(betas)
        self._means: list[tuple[Tensor, Tensor]] | None = (
            None  # local parameters and their means, while a draw is in them
        )
        self._has_draw = False  # whether one was made since the last step
        with _arguments.said_with(lambda: _arguments.call_of(self._name, {"params": "...", **given})):
            super().__init__(params, {**given, "noise_count": 0})
        key = _noise.shared_key(generator, self.param_groups)
        for group in self.param_groups:
            group["noise_key"] = key

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, whose state is made at once.

        Args:
            param_group: as in torch, with any of this class's options.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> a, b = torch.zeros(2, requires_grad=True), torch.zeros(3, requires_grad=True)
            >>> optimizer = bc.optim.IVON([a], 0.1, temperature=0.01)
            >>> optimizer.add_param_group({"params": [b], "lr": 0.01})
            >>> optimizer.state[b]["hessian"].shape
            torch.Size([3])
        """
        _arguments.require_group(f"{self._name}.add_param_group", param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if len(self.param_groups) > 1 and "noise_key" in self.param_groups[0]:
            group["noise_key"], group["noise_count"] = (
                self.param_groups[0][name] for name in ("noise_key", "noise_count")
            )
        for p in group["params"]:
            self.state[p] = {
                "momentum": torch.zeros_like(p, requires_grad=False),
                "hessian": torch.full_like(p, group["init_hessian"], requires_grad=False),
            }

    @contextmanager
    def sampled(self, draw: int | None = None) -> Iterator[None]:
        """Put a draw from the posterior into the parameters; the means return at the end.

        Args:
            draw: the number of a draw, from 0, for predictions: the same number gives the same ``eps`` at any time. ``None``
                (default): the draw of the step that follows, whose gradients are to be taken inside.

        Returns:
            A context manager.

        Raises:
            ValueError: inside of another draw.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> theta = torch.zeros(2, requires_grad=True)
            >>> optimizer = bc.optim.IVON([theta], 0.1, temperature=0.01)
            >>> with optimizer.sampled():
            ...     theta.square().sum().backward()
            >>> bool((theta == 0.0).all())
            True
        """
        if self._means is not None:
            raise ValueError(f"{self._name}.sampled: a draw is in the parameters already; end its with block first")
        self._means = []
        try:
            with torch.no_grad():
                for group, p, number in self._leaves():
                    x, h = _local(p.detach()), _local(self.state[p]["hessian"])
                    self._means.append((x, x.clone()))
                    count = group["noise_count"] if draw is None else _POSTERIOR + draw
                    x.add_(_eps(group, p, x, number, count) * _sigma(group, h))
            self._has_draw = self._has_draw or draw is None
            yield
        finally:
            with torch.no_grad():
                for x, mean in self._means:
                    x.copy_(mean)
            self._means = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Move mean and precision by the gradients that were taken at the last draw.

        Args:
            closure: evaluates the model and its gradients, and returns the loss; called at a new draw.

        Returns:
            What the closure returned.

        Raises:
            TypeError: a closure that is no function.
            ValueError: no draw since the last step, or inside of one; a plain gradient of a DTensor.
        """
        if closure is not None:
            _arguments.require_closure(self._name, closure)
        loss = None
        if closure is not None:
            with self.sampled(), torch.enable_grad():
                loss = closure()
        if self._means is not None or not self._has_draw:
            raise ValueError(
                f"{self._name}.step: take the gradients inside of `with optimizer.sampled():`, and call step() behind it"
            )
        moving = [(group, p, number) for group, p, number in self._leaves() if p.grad is not None]
        if moving:
            self._witness.look(lambda: [_claim(*leaf) for leaf in moving], _local(moving[0][1].detach()))
        for group, p, number in moving:
            self._move(group, p, number)
        if moving:
            self._witness.stepped(_local(moving[0][1].detach()))
        for group in self.param_groups:
            group["noise_count"] += 1
        self._has_draw = False
        return loss

    def _move(self, group: dict[str, Any], p: Any, number: int) -> None:
        m, g = _local(p.detach()), _gradient(p)
        v, h = (_local(self.state[p][name]) for name in ("momentum", "hessian"))
        (beta1, beta2), delta, lr = group["betas"], group["weight_decay"], float(group["lr"])
        v.mul_(beta1).add_(g, alpha=1.0 - beta1)
        gap = h - g * _eps(group, p, m, number, group["noise_count"]) / _sigma(group, h)
        rho = 1.0 - beta2
        h.add_(0.5 * rho**2 * gap.square() / (h + delta) - rho * gap)
        force = v / (1.0 - beta1 ** (group["noise_count"] + 1)) + delta * m
        scale = group["init_hessian"] + delta if group["rescale_lr"] else 1.0
        m.add_((force / (h + delta)).clamp_(-group["clip_radius"], group["clip_radius"]), alpha=-lr * scale)

    def variances(self) -> dict[str, Tensor]:
        """The variance of every parameter, ``T / (h + delta)``.

        Returns:
            By name, or by index where there are no names, tensors as the parameters are laid out.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> theta = torch.zeros(2, requires_grad=True)
            >>> bc.optim.IVON([theta], 0.1, temperature=0.01, init_hessian=4.0).variances()["0"]
            tensor([0.0025, 0.0025])
        """
        params = [(group, p) for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            values = [g["temperature"] / (self.state[p]["hessian"] + g["weight_decay"]) for g, p in params]
        return dict(zip(self._names(), values))

    def _names(self) -> tuple[str, ...]:
        names: list[str] = []
        for group in self.param_groups:
            own = group.get("param_names") or map(str, range(len(names), len(names) + len(group["params"])))
            places = map(place_of, group["params"])
            names += [name if place is None else place.name for name, place in zip(own, places)]
        return tuple(names)

    def _leaves(self) -> Iterator[tuple[dict[str, Any], Any, int]]:
        """Group, parameter and number of every leaf."""
        params = [(group, p) for group in self.param_groups for p in group["params"]]
        for (group, p), number in zip(params, _noise.leaf_numbers(self._names())):
            yield group, p, number

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._means, self._has_draw = None, False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state dict of this class, with its draws.

        Args:
            state_dict: from ``state_dict()``.

        Raises:
            TypeError: what is no state dict of an optimizer.
        """
        _arguments.require_state_dict(f"{self._name}.load_state_dict", state_dict)
        super().load_state_dict(state_dict)
        self._has_draw = False
        self._compare_anew()


def _local(x: Any) -> Tensor:
    return local_of(x) if is_dtensor(x) else x


def _gradient(p: Any) -> Tensor:
    """This rank's part of the gradient, brought to the parameter's placements."""
    g = p.grad
    if not is_dtensor(p):
        return g
    if not is_dtensor(g):
        raise ValueError(
            "bc.optim.IVON: a parameter is a DTensor, its gradient a plain tensor; make it by loss.backward()"
        )
    return local_of(g if g.placements == p.placements else g.redistribute(p.device_mesh, p.placements))


def _sigma(group: dict[str, Any], h: Tensor) -> Tensor:
    return (group["temperature"] / (h + group["weight_decay"])).sqrt()


def _eps(group: dict[str, Any], p: Any, x: Tensor, number: int, count: int) -> Tensor:
    """The standard normals of a leaf's elements that are here, at a count of steps."""
    key, at = (torch.tensor(value, device=x.device) for value in (group["noise_key"], count))
    (eps,) = draw_elements(key, at, parts_of_leaves((elements_of(p),), (number,)), x.dtype)
    return eps.view(x.shape)


def _claim(group: dict[str, Any], p: Any, number: int) -> Claim:
    gradient = None if p.grad is None or p.grad.is_sparse else _gradient(p)
    return Claim(
        str(number), group["noise_key"], number, elements_of(p), group["noise_count"], _local(p.detach()), gradient
    )
