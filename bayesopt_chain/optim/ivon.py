r"""IVON as a ``torch.optim.Optimizer``: a diagonal Gaussian posterior at the cost of Adam.

The method is algorithm 1 of Shen et al. (2024), "Variational learning is effective for large deep networks"
(https://arxiv.org/abs/2402.17641), with ``lambda = 1 / T``. The gradient ``g`` of the mean loss per datum is taken at the draw
``theta = m + sigma eps`` with ``sigma^2 = T / (h + delta)`` and ``eps`` standard normal. At the update ``t`` of a parameter,
with the initial Hessian ``h_0``,

    v <- beta1 v + (1 - beta1) g                          v-bar = v / (1 - beta1^t)
    h <- beta2 h + (1 - beta2) h-hat + (1 - beta2)^2 (h - h-hat)^2 / (2 (h + delta)),          h-hat = g eps / sigma
    m <- m - lr (h_0 + delta) (v-bar + delta m) / (h + delta)

A step updates the parameters that have a gradient, and ``t`` counts the updates of each by itself. A parameter that is frozen
(``requires_grad`` is ``False``) before its first update is a constant: its posterior is the point ``m``, with ``sigma = 0``. If
it is frozen later, it keeps the posterior that it has learned, and is drawn from it.

All operations are elementwise, and ``eps`` is a function of (key, leaf, element, step). A rank that holds some elements of a
DTensor (``fully_shard``, tensor parallelism) therefore updates these without messages to other ranks.
:func:`bayesopt_chain.vi.ivon` is the same method for losses that take the parameters as an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain._torch import is_dtensor, local
from bayesopt_chain.distributed.parts import elements_of
from bayesopt_chain.distributed.ranks import require_named_chain
from bayesopt_chain.loop.interrupts import uninterrupted
from bayesopt_chain.optim import _checks
from bayesopt_chain.optim._ranks import OnRanks, claim
from bayesopt_chain.posterior.gaussian import warn_of_rounding
from bayesopt_chain.posterior.vi._natural import averaged, newton
from bayesopt_chain.random.philox import draw_elements, parts_of_leaves
from bayesopt_chain.trees import wide

_POSTERIOR = 2**62  # counts from here on are those of draws for predictions, which no count of steps reaches


class IVON(OnRanks):
    """Improved variational online Newton (Shen et al., 2024): the parameters are the mean of a diagonal Gaussian posterior.

    The loss is evaluated at a draw from the posterior, inside of :meth:`sampled`. :meth:`step` then updates mean and precision.
    The gradients of several microbatches may be accumulated at one draw. Ranks that hold replicas (DistributedDataParallel)
    or parts (``fully_shard``, tensor parallelism) of one model make the same draw, and the wrapper averages or scatters their
    gradients as usual.

    Args:
        params: as in torch: tensors, ``named_parameters()``, or dicts (groups). The draws of a parameter depend on its name, or
            on its index if parameters have no names.
        lr: learning rate, a number or a 0-d tensor.
        temperature: ``1 / N`` for a loss that is a mean over ``N`` data (the paper's ``1 / lambda``); positive.
        betas: ``(beta1, beta2)``, the decays of the averages of gradients and of Hessians. The default ``beta2 = 0.99999`` is
            for training of 100,000 steps and more; in a run of ``t`` steps ``beta2 = 1 - 5 / t`` forgets the initial Hessian.
        weight_decay: ``delta``. It is a Gaussian prior of mean zero and precision ``delta / temperature``, which the loss must
            not contain. Default 0.
        init_hessian: the initial Hessian ``h_0`` per datum, positive. Default 1.
        rescale_lr: multiply lr by ``init_hessian + weight_decay``, so that the first steps are as long as those of SGD with
            this lr. Default True.
        clip_radius: bound on the magnitude of each entry of the preconditioned gradient. Default: no bound.
        generator: source of the key of the draws (default: torch's global generator). On several ranks each needs
            ``bc.distributed.generator(seed)``.

    The state of a parameter is two tensors of its shape and layout, ``momentum`` (``v``) and ``hessian`` (``h``), and ``step``,
    the number of its updates. Inside of :meth:`sampled` a copy of the means is kept too.

    Raises:
        TypeError: an argument of a wrong type.
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

    wide = ("momentum", "hessian")  # averages with a long memory, which 16 bits would round away
    # pairs of a local parameter and its mean while the parameters hold a draw, else None
    _means: list[tuple[Tensor, Tensor]] | None = None
    _has_draw = False  # whether a draw was made since the last step

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
        _checks.require(self._name, {"params": params, "generator": generator, **given})
        require_named_chain(self._name, generator)
        self._seed = None if generator is None else generator.initial_seed()  # a run on disk compares it
        with _checks.with_call(self._name, params=..., **given):
            super().__init__(params, {**given, "noise_key": None, "noise_count": 0})
        self._new_keys(generator)

    def _begin(self, group: dict[str, Any]) -> None:
        drawn = [local(p.detach()) if p.requires_grad else None for _, p, _ in self._leaves()]
        _checks.check_memory(self._name, self._names(), drawn)
        # a group that is added later takes part in the draws of the others
        group |= {name: self.param_groups[0][name] for name in ("noise_key", "noise_count")}
        for p in group["params"]:
            self.state[p] = {
                "momentum": torch.zeros_like(p, dtype=wide(p.dtype), requires_grad=False),
                "hessian": torch.full_like(p, group["init_hessian"], dtype=wide(p.dtype), requires_grad=False),
                "step": torch.tensor(0.0, device="cpu"),
            }

    @contextmanager
    def sampled(self, draw: int | None = None) -> Iterator[None]:
        """Replace the parameters by a draw from the posterior inside of a ``with`` block, and restore the means at its end.

        Parameters that were frozen before their first update are constants, and stay as they are.

        Args:
            draw: the number of a draw for predictions, counted from 0. The same number gives the same ``eps`` at any time.
                ``None`` (default) makes the draw of the next step, whose gradients have to be taken inside of the block.

        Returns:
            A context manager.

        Raises:
            ValueError: the parameters hold a draw already; a hyperparameter has left its range.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> theta = torch.zeros(2, requires_grad=True)
            >>> optimizer = bc.optim.IVON([theta], 0.1, temperature=0.01)
            >>> with optimizer.sampled():
            ...     theta.square().sum().backward()
            >>> bool((theta == 0.0).all())
            True
        """
        for group in self.param_groups:  # whose numbers may have changed
            _checks.require(self._name, group)
        if self._means is not None:
            raise ValueError(f"{self._name}.sampled: a draw is in the parameters already; end its with block first")
        self._means = []
        try:
            with torch.no_grad():
                for group, p, number in self._leaves():
                    if _is_constant(p, self.state[p]):
                        continue
                    x, h = local(p.detach()), local(self.state[p]["hessian"])
                    self._means.append((x, x.clone()))
                    count = group["noise_count"] if draw is None else _POSTERIOR + draw
                    move = _eps(group, p, x, number, count) * _variance(group, h).sqrt()
                    if count == 0:
                        warn_of_rounding(f"{self._name}.sampled", ["a parameter"], [x], [move])
                    x.add_(move)
            self._has_draw = self._has_draw or draw is None
            yield
        finally:  # after an error too
            with torch.no_grad(), uninterrupted():
                for x, mean in self._means:
                    x.copy_(mean)
            self._means = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update mean and precision by the gradients that were taken at the last draw.

        Args:
            closure: evaluates the model and its gradients, and returns the loss. It is called at a new draw.

        Returns:
            The loss that the closure returned; ``None`` without a closure.

        Raises:
            TypeError: ``closure`` is no function.
            ValueError: there was no draw since the last step, or the parameters still hold it; the gradient of a DTensor is a
                plain tensor.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> theta = torch.ones(2, requires_grad=True)
            >>> optimizer = bc.optim.IVON([theta], 0.1, temperature=0.01)
            >>> with optimizer.sampled():
            ...     theta.square().sum().backward()
            >>> optimizer.step()
            >>> bool((theta < 1.0).all())
            True
        """
        # a trainer's callback may have made the draw already, and ends it within the closure
        with nullcontext() if closure is None or self._means is not None else self.sampled():
            loss = self._loss_of(closure)
        if self._means is not None or not self._has_draw:
            raise ValueError(
                f"{self._name}.step: take the gradients inside of `with optimizer.sampled():`, and call step() behind it"
            )
        moving = [(group, p, number) for group, p, number in self._leaves() if p.grad is not None]
        for group, p, _ in moving:
            _checks.check_leaf(self._name, p, group)
            if p.grad.is_sparse:
                raise ValueError(f"{self._name}: a sparse gradient; build the layer with sparse=False")
        compared = self._witness.step(
            lambda: [claim(str(n), n, p, group) for group, p, n in moving], self._all_params()
        )
        # Ctrl-C between two writes would leave means, precisions and counts of different steps
        with compared, uninterrupted():
            for group, p, number in moving:
                self._move(group, p, number)
            for group in self.param_groups:
                group["noise_count"] += 1
            self._has_draw = False
        return loss

    def _move(self, group: dict[str, Any], p: Any, number: int) -> None:
        """Update ``v``, ``h`` and ``m`` of one leaf in place, by the equations of the module."""
        m, g, state = local(p.detach()), p.grad, self.state[p]
        if is_dtensor(p):
            g = local(g.redistribute(p.device_mesh, p.placements))
        v, h = (local(state[name]) for name in ("momentum", "hessian"))
        state["step"] += 1
        (beta1, beta2), delta, lr = group["betas"], group["weight_decay"], float(group["lr"])
        v.mul_(beta1).add_(g, alpha=1.0 - beta1)
        # the same eps as in the draw at which g was taken
        h.copy_(
            averaged(h, g * _eps(group, p, m, number, group["noise_count"]) / _variance(group, h).sqrt(), delta, beta2)
        )
        force = v / (1.0 - beta1 ** int(state["step"])) + delta * m
        scale = group["init_hessian"] + delta if group["rescale_lr"] else 1.0
        m.add_(newton(force, h, delta, lr, scale, group["clip_radius"]))

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self._has_draw = False  # a draw of the old key or state would not be the one that the step computes again

    def callback(self) -> Any:
        """Make a callback of the trainers that own the loop: every step then takes its gradients at a draw.

        Returns:
            For ``callbacks=[...]`` of ``transformers.Trainer`` or ``lightning.Trainer``, whichever was imported before. The
            batches of one step, where a trainer accumulates gradients, have one draw; evaluation and checkpoints have the mean.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> theta = torch.zeros(2, requires_grad=True)
            >>> each = bc.optim.IVON([theta], 0.1, temperature=0.01).callback()
            >>> each.on_step_begin()                    # as a trainer does before the gradients of a step
            >>> bool((theta != 0.0).all())
            True
            >>> each.on_pre_optimizer_step()
            >>> bool((theta == 0.0).all())
            True
        """
        from bayesopt_chain.runs.collect import callback_kind

        return callback_kind(StepsAtDraws)(self)

    def variances(self) -> dict[str, Tensor]:
        """Return the variance of every element of the parameters, ``sigma^2 = T / (h + delta)``; 0 for constants.

        Parameters that were frozen before their first update are constants.

        Returns:
            By name, or by index if parameters have no names, tensors with the shapes and the layout of the parameters.

        Example:
            >>> import torch, bayesopt_chain as bc
            >>> theta = torch.zeros(2, requires_grad=True)
            >>> bc.optim.IVON([theta], 0.1, temperature=0.01, init_hessian=4.0).variances()["0"]
            tensor([0.0025, 0.0025])
        """
        with torch.no_grad():
            values = [
                torch.zeros_like(p) if _is_constant(p, self.state[p]) else _variance(group, self.state[p]["hessian"])
                for group, p, _ in self._leaves()
            ]
        return dict(zip(self._names(), values))

    def _leaves(self) -> list[tuple[dict[str, Any], Any, int]]:
        """List the group, the parameter and the number in the random stream of every leaf."""
        self._require_added()
        return [(group, p, self._numbers[p]) for group in self.param_groups for p in group["params"]]


class StepsAtDraws:
    """What :meth:`IVON.callback` returns: a draw from before the gradients of a step until the optimizer makes it.

    A draw that is left and made again before the optimizer's step is the same one.
    """

    def __init__(self, optimizer: IVON) -> None:
        self.optimizer, self._draw = optimizer, ExitStack()

    def _enter(self, *_: Any, **more: Any) -> None:
        if self.optimizer._means is None:
            self._draw.enter_context(self.optimizer.sampled())

    def _leave(self, *_: Any, **more: Any) -> None:
        self._draw.close()

    on_step_begin = on_train_batch_start = _enter  # of transformers and of Lightning
    on_pre_optimizer_step = on_train_end = on_before_optimizer_step = on_train_batch_end = on_exception = _leave


def _is_constant(p: Tensor, state: dict[str, Any]) -> bool:
    """Return whether a parameter was frozen before its first update, so that nothing is known of its variance."""
    return not p.requires_grad and int(state["step"]) == 0


def _variance(group: dict[str, Any], h: Tensor) -> Tensor:
    """Return the variance ``T / (h + delta)``."""
    return group["temperature"] / (h + group["weight_decay"])


def _eps(group: dict[str, Any], p: Any, x: Tensor, number: int, count: int) -> Tensor:
    """Return the standard normals ``eps`` of the elements of a leaf that this rank holds, at a count of steps."""
    key, at = (torch.tensor(value, device=x.device) for value in (group["noise_key"], count))
    (eps,) = draw_elements(key, at, parts_of_leaves((elements_of(p),), (number,)), wide(x.dtype))
    return eps.view(x.shape)
