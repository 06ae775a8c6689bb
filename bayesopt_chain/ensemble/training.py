r"""Training of all members at once, and what it needs: the energy, the step, the batches.

The parameters of member m are one row ``theta_m`` of a tensor ``[M, P]``. With n data that it sees, a prior of precision
``lambda`` of each parameter, and Gaussian noise of variance ``v`` (of other likelihoods without v), a step follows the gradient
of the energy per datum

    U_m(theta) = 1/b sum_i -log p(y_i | f(theta, x_i), v_m) + 1/2n sum_p lambda_mp theta_p^2

times ``s_m``, the mean of v in units of the targets' variance: Adam's steps then do not depend on v when it changes. Precision,
noise and s are part of each batch, so that one program serves all of the training.

The gradient of all members is one call under ``vmap``, and one update of TorchOpt's Adam moves them: where nothing is sampled
no noise has to be matched. Both are traced once into a program of tensor operations, which saves three quarters of their time
for small networks. Where tracing fails, or the program does not repeat the step, the step itself runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torchopt.transform import scale_by_adam

from bayesopt_chain import batches
from bayesopt_chain._torch import is_wrapped, traced
from bayesopt_chain.data.epochs import epochs
from bayesopt_chain.ensemble.data import Data
from bayesopt_chain.ensemble.members import Members
from bayesopt_chain.likelihoods import Likelihood
from bayesopt_chain.loop.loss import gradient
from bayesopt_chain.modules import Tensors, one_by_one
from bayesopt_chain.random.model_draws import model_draws, seeded
from bayesopt_chain.random.stream import chain_seed, new_key

FLOOR = torch.full((), -50.0, device="cpu")
FORWARDS = 2**24  # numbers of inputs and parameters that one batched forward may hold
CLOSE = 1e-3  # relative difference of a program from the step that it records
ADAM = scale_by_adam()


class State(NamedTuple):
    """What a step of training moves, of the members of this rank.

    Attributes:
        theta: parameters, ``[m, P]``.
        buffers: by name, ``[m, *]``.
        keys: of what the networks draw, such as dropout, ``[m]``.
        adam: the moments, and how many steps were taken.
    """

    theta: Tensor
    buffers: Tensors
    keys: Tensor
    adam: Any


@dataclass(frozen=True)
class Problem:
    """What is trained: networks, data and the likelihood of training.

    Attributes:
        data: all data.
        likelihood: of training; of Gaussian noise its variances are the targets'.
        members: the networks.
        count: how many.
        batch_size: data in a step, at most as many as any member sees.
        folds: the rows that each member leaves out, one tensor a member; the same tensor if they are the same.
        seed: of every order, start and stream.
        mine: the members that this rank trains.
        axes: U of weights W that are trained as ``W U`` (:func:`bayesopt_chain.ensemble.members.principal_axes`).
        floor: the least log score of a held-out target, ``[]`` or one for each target of a datum.
    """

    data: Data
    likelihood: Likelihood
    members: Members
    count: int
    batch_size: int
    folds: list[Tensor]
    seed: int
    mine: range
    axes: Tensors = field(default_factory=dict)
    floor: Tensor = FLOOR

    @property
    def left_out(self) -> list[tuple[Tensor, list[int]]]:
        """The folds, each with the members that left it out."""
        folds = dict.fromkeys(self.folds)  # a tensor is equal to itself alone
        return [(fold, [m for m, own in enumerate(self.folds) if own is fold]) for fold in folds]

    @property
    def theta(self) -> Tensor:
        """The starts of all members, ``[M, P]``."""
        params = {k: x @ self.axes[k] if k in self.axes else x for k, x in self.members.params.items()}
        return torch.cat([x.reshape(len(x), -1) for x in params.values()], 1)

    def tree(self, theta: Tensor) -> Tensors:
        """Parameters by name of rows ``[*lead, P]``."""
        own = self.members.params
        parts = theta.split([x[0].numel() for x in own.values()], -1)
        tree = {k: p.reshape((*theta.shape[:-1], *x.shape[1:])).to(x.dtype) for (k, x), p in zip(own.items(), parts)}
        return {k: p @ self.axes[k].mT if k in self.axes else p for k, p in tree.items()}

    def fan_in(self) -> Tensor:
        """The precision of each parameter under the fan-in prior, ``[P]``: of a factor of matrix products and convolutions the
        numbers of it that an output sums up, as one call of the network shows; 1 of what is added, scales, or is looked up."""
        sizes, found = [], self.members.products(self.data.inputs_of(2))
        for name, x in self.members.first[0].items():
            layer = type(self.members.still.module.get_submodule(name.rpartition(".")[0])).__module__
            opaque = x[0].numel() if x.ndim > 1 and layer.startswith("torch.nn") else 1  # as of fused recurrent layers
            sizes.append(torch.full_like(x, found.sizes.get(name, opaque)).flatten())
        return torch.cat(sizes)

    def seen(self, held_out: bool) -> list[int]:
        """How many data each of this rank's members sees."""
        return [self.data.size - held_out * len(self.folds[m]) for m in self.mine]

    def batches(self, held_out: bool, salt: int, noise: Tensor, decay: Tensor) -> Callable[[int], Any]:
        """What a step takes, by its number: inputs, targets ``[m, b, *]``, noise, decay and scale of this rank's members.

        Each goes through the data that it sees, epoch after epoch, in orders that are functions of seed, member and epoch. A
        rest that fills no batch waits for another epoch.

        Args:
            held_out: whether each member leaves its fold out.
            salt: of the orders.
            noise: v of all members, ``[M, *event]``, in units of the targets' variance.
            decay: lambda / n of this rank's members, ``[m, P]``.
        """
        whole = set(self.seen(held_out)) == {self.batch_size}

        def shuffled(rows: Tensor, seed: int, epoch: int, chain: int) -> Tensor:
            own = torch.Generator("cpu").manual_seed(hash((seed, salt, epoch, self.mine[chain])) % 2**63)
            return rows if whole else rows[torch.randperm(len(rows), generator=own, device="cpu")]

        every = epochs(
            (self.data.inputs, self.data.targets),
            self.batch_size,
            order=shuffled,
            seed=self.seed,
            chains=len(self.mine),
            leave_out=[self.folds[m] if held_out else self.folds[m][:0] for m in self.mine],
        )
        first, theta, noise = every.batch(0, 0), self.theta, self.own(noise)
        size = (
            noise.reshape(len(noise), -1).mean(1) if self.likelihood.has_noise_scale else torch.ones_like(decay[:, 0])
        )
        fixed = [x.to(theta) for x in (noise, decay, size)]

        def batch(step: int) -> Any:
            return *(first if whole else every.batch(*divmod(step, len(every)))), *fixed

        return batch

    def own(self, tree: Any) -> Any:
        """Of a tree of all members ``[M, *]`` those of this rank; what is 0-d they have in common."""
        return optree.tree_map(lambda x: x[self.mine.start : self.mine.stop] if x.ndim else x, tree)

    def start(self) -> State:
        """Where this rank's members start. Their keys depend on their numbers alone, not on the ranks that share them out."""
        theta, keys = self.own(self.theta), []
        for member in self.mine:
            with seeded(chain_seed(7919 * self.seed + 2, member)):
                keys.append(new_key(None, theta.device))
        return State(theta, self.own(self.members.buffers), torch.stack(keys), ADAM.init(theta))

    def energy(self, theta: Tensor, batch: Any, buffers: Tensors, *, still: bool) -> tuple[Tensor, Tensors]:
        """``s U`` of one member, and its next buffers."""
        inputs, targets, noise, decay, size = batch
        forward = self.members.still if still else self.members.training
        outputs, new = forward.with_buffers(self.tree(theta), (inputs, None), buffers)
        if not (still or outputs.requires_grad):
            raise ValueError(
                "posterior_ensemble: the module's outputs have no gradient: leave out detach, no_grad and rounding"
            )
        likelihood = self.likelihood.scaled(1 / noise) if self.likelihood.has_noise_scale else self.likelihood
        return size * (likelihood.nll(outputs, targets).mean() + (decay * theta.square()).sum() / 2), new

    def step(self, state: State, batch: Any, rate: Tensor) -> tuple[State, Tensor]:
        """One step of Adam of this rank's members, at rates ``[m]``, and their energies before it, ``[m]``."""
        leaves, spec = batches.flatten(batch)

        def one(theta: Tensor, buffers: Tensors, key: Tensor, leaves: list[Tensor]) -> Any:
            with model_draws((key, state.adam.count)):
                loss = partial(self.energy, buffers=buffers, still=False)
                grads, info = gradient(loss, theta, spec.unflatten(leaves))
            return grads, info.loss, info.aux

        grads, losses, buffers = mapped(one, self.members.loop, state.theta, state.buffers, state.keys, leaves)
        moves, adam = ADAM.update(grads, state.adam, inplace=False)
        return State(state.theta - rate[:, None] * moves, buffers, state.keys, adam), losses


def mapped(function: Callable, loop: bool, *stacked: Any) -> Any:
    """What a function makes of every member's part of stacked trees: under ``vmap``, or of one member after the other."""
    return one_by_one(function, *stacked) if loop else torch.vmap(function, randomness="error")(*stacked)


def program(step: Callable, *given: Any) -> Callable:
    """The step ``(state, batch, rate) -> (state, losses)``, traced where that repeats it.

    Args:
        step: :meth:`Problem.step`, of members that run under ``vmap``.
        *given: arguments to trace with, and to compare the program with the step at; others are of these shapes.

    Raises:
        RuntimeError: ``vmap`` refuses the network.
    """
    leaves, before = batches.flatten(given)
    after = batches.flatten(given[0])[1]

    def flat(*leaves: Tensor) -> list[Tensor]:
        return batches.flatten(step(*before.unflatten(leaves)))[0]

    *arrived, _ = flat(*leaves)
    try:
        graph = traced(flat, leaves)
        other = [*arrived, *leaves[len(arrived) :]]
        torch.testing.assert_close(graph(*other), flat(*other), rtol=CLOSE, atol=1e-6, equal_nan=True)
    except (RuntimeError, AssertionError, TypeError, ValueError, NotImplementedError):
        return step

    @torch.no_grad()
    def replayed(*given: Any) -> Any:
        *state, losses = graph(*batches.flatten(given)[0])
        return after.unflatten(state), losses

    return replayed


@torch.no_grad()
def outputs_of(members: Members, params: Tensors, buffers: Tensors, inputs: Any) -> Tensor:
    """Outputs ``[S, n, *event]`` for stacked parameters and buffers ``[S, *]``, for as many data at once as fit."""
    leaves, spec = batches.flatten(inputs)
    n, size = len(leaves[0]), next(iter(params.values())).shape[0]
    width = max(sum(x[0].numel() for x in leaves), sum(p.shape[1] if p.ndim > 1 else 1 for p in params.values()))
    at_once = max(1, FORWARDS // max(1, size * width))

    parts = []
    for start in range(0, n, at_once):
        some = spec.unflatten([x[start : start + at_once] for x in leaves])

        def one(p: Any, b: Any, some: Any = some) -> Tensor:
            return members.still.with_buffers(p, (some, None), b)[0]

        parts.append(mapped(one, members.loop, params, buffers))
    forget(members.still.module)
    return torch.cat(parts, 1)


def forget(module: torch.nn.Module) -> None:
    """Drop what a network kept of its calls as attributes: tensors with a graph, or without memory, as under ``vmap``. Neither
    can be copied."""
    for layer in module.modules():
        own = {name: x for name, x in vars(layer).items() if isinstance(x, Tensor)}
        vars(layer).update({name: None for name, x in own.items() if is_wrapped(x) or x.grad_fn is not None})


def held_out_outputs(problem: Problem, theta: Tensor, buffers: Tensors) -> list[Tensor]:
    """Of each member, outputs ``[n_f, *event]`` on the fold that it left out; all members ``[M, *]`` are given."""
    params, found = problem.tree(theta), dict[int, Tensor]()
    for fold, who in problem.left_out:
        own, kept = ({k: x[who] for k, x in t.items()} for t in (params, buffers))
        found |= zip(who, outputs_of(problem.members, own, kept, problem.data.take(fold)[0]))
    return [found[m] for m in range(problem.count)]
