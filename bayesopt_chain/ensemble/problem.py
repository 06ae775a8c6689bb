r"""What every stage works on: the network, the data and the energy, and runs of all members at once.

    L(theta) = 1/n sum_i -log p(y_i | f(theta, x_i)) + prior_precision / (2 n) |theta|^2

over the n data that a member sees; ``n L`` is the posterior's energy. A run at temperature 0 trains the network as it is, a run
at ``T / n`` has it in ``eval`` mode: its dropout off, and its BatchNorm with the statistics that the mode ended with, so that
what is sampled is one fixed function of the parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import batches
from bayesopt_chain.data.epochs import epochs
from bayesopt_chain.ensemble.data import Data
from bayesopt_chain.ensemble.members import Members
from bayesopt_chain.ensemble.progress import Progress
from bayesopt_chain.ensemble.ranks import of_all_members, rows_of
from bayesopt_chain.likelihoods import Likelihood
from bayesopt_chain.loop.capture import capture
from bayesopt_chain.loop.module_state import ModuleState, buffers_of
from bayesopt_chain.loop.parallel import Parallel, parallel
from bayesopt_chain.loop.step import make_step
from bayesopt_chain.optimizers.functional import sgd
from bayesopt_chain.runs.draws import Draws
from bayesopt_chain.runs.sample import sample

Tensors = dict[str, Tensor]
FEW = 1100  # data of which chains at a temperature take all in every step
CAPTURED = 5000  # steps of a run from which its capture has paid for itself
FORWARDS = 2**24  # numbers of inputs and parameters that one batched forward may hold


class Level(NamedTuple):
    """Draws of all members: parameters and buffers ``[S, M, *]`` by name, and the batch's loss ``[S, M]`` on the CPU."""

    params: Tensors
    buffers: Tensors
    loss: Tensor

    def of(self, members: Sequence[int]) -> Level:
        """Those of some members."""
        index = torch.tensor(list(members), device="cpu")
        params, buffers = ({k: x[:, index.to(x.device)] for k, x in t.items()} for t in (self.params, self.buffers))
        return Level(params, buffers, self.loss[:, index])

    def last(self) -> tuple[Tensors, Tensors]:
        """Parameters and buffers ``[M, *]`` of the last draw."""
        return {k: x[-1] for k, x in self.params.items()}, {k: x[-1] for k, x in self.buffers.items()}

    def at(self, i: int) -> Level:
        """Draw ``i`` alone."""
        params, buffers = ({k: x[i : i + 1] for k, x in t.items()} for t in (self.params, self.buffers))
        return Level(params, buffers, self.loss[i : i + 1])

    def to(self, device: torch.device) -> Level:
        """With parameters and buffers on a device."""
        params, buffers = ({k: x.to(device) for k, x in t.items()} for t in (self.params, self.buffers))
        return Level(params, buffers, self.loss)

    def saved(self) -> dict[str, Any]:
        """As plain containers."""
        return {"params": dict(self.params), "buffers": dict(self.buffers), "loss": self.loss}


@dataclass(frozen=True)
class Problem:
    """The network, the data and how they are gone through.

    Attributes:
        data, likelihood, members, count: all data, the likelihood of training, the networks, and how many there are.
        batch_size: of training.
        prior_precision: of each trained weight, about 0.
        folds: rows that each member leaves out where it is to be scored, one tensor a member.
        seed: of every order, start and stream.
        progress: the bar.
        loop: whether ``vmap`` refuses the network, so that members run one after the other.
        mesh: the ranks that share out the members; ``None`` for one process.
        captured: whether long runs in one process are captured.
    """

    data: Data
    likelihood: Likelihood
    members: Members
    count: int
    batch_size: int
    prior_precision: float
    folds: list[Tensor]
    seed: int
    progress: Progress
    loop: bool = False
    mesh: Any = None
    captured: bool = False

    def data_of(self, held_out: bool) -> int:
        """How many data a member sees."""
        return self.data.size - (len(self.folds[0]) if held_out else 0)

    def rows(self, held_out: bool) -> list[Tensor] | None:
        """The rows that each member sees, ``None`` for all of them."""
        if not held_out:
            return None
        every = torch.arange(self.data.size, device="cpu")
        return [every[~torch.isin(every, fold)] for fold in self.folds]

    @staticmethod
    def penalty(params: Tensors) -> Any:
        """The squares of one member's parameters, summed: minus twice the prior's log density at precision 1."""
        return sum(p.square().sum() for p in params.values())

    def loss(self, n: int, likelihood: Likelihood | None = None, *, still: bool, prior: bool = True) -> Callable:
        """The energy per datum, of ``(params, batch)`` or ``(params, batch, buffers)``, with the prior or without."""
        likelihood = self.likelihood if likelihood is None else likelihood
        forward = self.members.still if still else self.members.training
        precision = self.prior_precision / (2 * n) if prior else 0.0

        def energy(params: Any, batch: Any, outputs: Tensor) -> Tensor:
            fit = likelihood.nll(outputs, batch[1]).mean()
            return fit + precision * self.penalty(params) if precision else fit

        def plain(params: Any, batch: Any) -> Tensor:
            return energy(params, batch, forward(params, batch))

        def buffered(params: Any, batch: Any, buffers: Any) -> tuple[Tensor, Any]:
            outputs, buffers = forward.with_buffers(params, batch, buffers)
            return energy(params, batch, outputs), buffers

        return buffered if self.carries(still) else plain

    def carries(self, still: bool) -> bool:
        """Whether a step carries buffers, or a key for what the network draws."""
        return bool(self.members.buffers) or (self.members.draws and not still)

    def batches(self, held_out: bool, *, full: bool) -> tuple[Any, int | None, int]:
        """Batches for all members, their axis of members, and the data in one batch."""
        rows, n = self.rows(held_out), self.data_of(held_out)
        whole = full or self.batch_size >= n
        if whole:
            return self.data.take(None if rows is None else torch.stack(rows)), None if rows is None else 0, n
        both = (self.data.inputs, self.data.targets)
        if rows is None:
            return epochs(both, self.batch_size, seed=self.seed), None, self.batch_size
        each = epochs(both, self.batch_size, seed=self.seed, chains=self.count, leave_out=self.folds)
        return each, 0, self.batch_size

    def run(
        self,
        tx: Any,
        params: Tensors,
        buffers: Tensors,
        *,
        held_out: bool,
        steps: int,
        likelihood: Likelihood | None = None,
        still: bool = False,
        full: bool = False,
        prior: bool = True,
        burn_in: int = 0,
        thinning: int = 1,
        each: Mapping[str, Tensor] | None = None,
        seed: int = 0,
        path: Path | None = None,
    ) -> Draws:
        """Run all members at once, on a mesh each rank its share; the draws of all of them."""
        own = {k: x[0] for k, x in buffers.items()} if self.carries(still) else None
        loss = self.loss(self.data_of(held_out), likelihood, still=still, prior=prior)
        make = (lambda **k: make_step(loss, tx(**k), buffers=own)) if each else make_step(loss, tx, buffers=own)
        data, axis, _ = self.batches(held_out, full=full)
        count = next(iter(params.values())).shape[0]
        mesh = self.mesh if count == self.count else None  # rates that are tried on one member are not shared out
        chains = parallel(make, count, batch_dim=axis, each=each, loop=self.loop, mesh=mesh)
        if mesh is not None:
            mine = slice(chains.numbers.start, chains.numbers.stop)
            params, buffers = rows_of(params, mine), rows_of(buffers, mine)
            chains.rows = None if axis is None else mine  # the batches are those of all members
        state = started(chains, tx, params, buffers, 7919 * self.seed + seed)
        step: Any = chains
        if self.captured and steps >= CAPTURED and not self.loop and mesh is None:
            step = capture(chains, params, state, data if isinstance(data, tuple) else data.batch(0, 0))
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
        drawn = self._sampled(step, params, state, data, steps, burn_in, thinning, path, count)
        drawn = drawn if mesh is None else of_all_members(drawn, mesh)
        if "interrupted" in drawn.why:
            raise KeyboardInterrupt(f"posterior_ensemble: {drawn.why}; call again with the same path= to go on")
        return drawn

    def _sampled(
        self,
        step: Any,
        params: Any,
        state: Any,
        data: Any,
        steps: int,
        burn_in: int,
        thinning: int,
        path: Any,
        count: int,
    ) -> Draws:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*diverged")  # the stage looks and says so itself
            drawn = sample(
                step,
                params,
                state,
                data,
                steps=steps,
                burn_in=burn_in,
                thinning=thinning,
                path=path,
                callbacks=(self.progress,),
                chains=None if isinstance(step, Parallel) else count,
            )
        return drawn

    def vmappable(self) -> Problem:
        """This problem, run member after member if ``vmap`` refuses the network."""
        data, axis, _ = self.batches(False, full=False)
        batch = data if isinstance(data, tuple) else data.batch(0, 0)
        pick = batches.tree_map(lambda x: x[:2], batch) if axis is None else batch
        loss = self.loss(self.data.size, still=False)
        own = {k: x[0] for k, x in self.members.buffers.items()} if self.carries(False) else None
        tx = sgd(0.0)
        chains = parallel(make_step(loss, tx, buffers=own), self.count)
        state = started(chains, tx, self.members.params, self.members.buffers, 0)
        try:
            chains(self.members.params, state, pick)
            # what draws gradients by a fallback may refuse to predict
            one = self.data.take(torch.arange(1, device="cpu"))[0]
            outputs_of(self.members.still, self.members.params, self.members.buffers, one, False)
        except RuntimeError:
            return replace(self, loop=True)
        return self

    @torch.no_grad()
    def outputs(self, level: Level, inputs: Any) -> Tensor:
        """Outputs of all draws of all members in ``eval`` mode, ``[S M, n, *event]``."""
        params = {k: x.flatten(0, 1) for k, x in level.params.items()}
        buffers = {k: x.flatten(0, 1) for k, x in level.buffers.items()}
        return outputs_of(self.members.still, params, buffers, inputs, self.loop)


def started(chains: Parallel, tx: Any, params: Any, buffers: Tensors, seed: int) -> Any:
    """States of all members, each with its own buffers and with keys that are functions of the seed."""
    state = chains.init(tx, params, seed=seed)
    return state._replace(buffers=dict(buffers)) if isinstance(state, ModuleState) else state


def level_of(draws: Draws, buffers: Tensors) -> Level:
    """The draws of a run as tensors; of a run that carries no buffers each draw has those it began with."""
    params = {k: x[:] for k, x in draws.params.items()}
    own = {k: x[:] for k, x in draws.buffers.items()}
    size = len(draws)
    own = own or {k: x.expand(size, *x.shape).clone() for k, x in buffers.items()}
    return Level(params, own, draws.loss[:].cpu())


def last_of(draws: Draws, buffers: Tensors) -> tuple[Tensors, Tensors]:
    """Parameters and buffers after the last step."""
    assert draws.last is not None
    params, state = draws.last
    return params, buffers_of(state) or buffers


@torch.no_grad()
def outputs_of(forward: Any, params: Tensors, buffers: Tensors, inputs: Any, loop: bool) -> Tensor:
    """Outputs ``[S, n, *event]`` for stacked parameters and buffers ``[S, *]``, for as many data at once as fit."""
    leaves, spec = batches.flatten(inputs)
    n, size = len(leaves[0]), next(iter(params.values())).shape[0]
    width = max(sum(x[0].numel() for x in leaves), sum(p.shape[1] if p.ndim > 1 else 1 for p in params.values()))
    at_once = max(1, FORWARDS // max(1, size * width))

    def one(p: Any, b: Any, some: Any) -> Tensor:
        return forward.with_buffers(p, (some, None), b)[0]

    parts = []
    for start in range(0, n, at_once):
        some = spec.unflatten([x[start : start + at_once] for x in leaves])
        if not loop:
            parts.append(torch.vmap(lambda p, b, some=some: one(p, b, some))(params, buffers))
            continue
        rows = [
            one({k: x[i] for k, x in params.items()}, {k: x[i] for k, x in buffers.items()}, some) for i in range(size)
        ]
        parts.append(torch.stack(rows))
    return torch.cat(parts, 1)


def draws_of_members(drawn: Draws, posterior: Callable[[Any, Tensors], Any], problem: Problem, count: int) -> Tensors:
    """Draws of the Gaussian that each member's state carries where a run ended, ``[count, M, *]``; made on the CPU."""
    assert drawn.last is not None
    ended, state = drawn.last
    state = state.inner if isinstance(state, ModuleState) else state
    generator = torch.Generator().manual_seed(problem.seed)
    each = []
    for m in range(problem.count):
        mine: Any = optree.tree_map(lambda x, m=m: x[m].cpu(), state)
        mean = {name: x[m].cpu() for name, x in ended.items()}
        each.append(posterior(mine, mean).sample((count,), generator=generator))
    return {name: torch.stack([draw[name] for draw in each], 1).to(x.device) for name, x in ended.items()}
