"""The same work in every library: parameters, gradients and one function that does a step."""

# JAX may be absent.
# pyright: reportMissingImports=false

from __future__ import annotations

import importlib
import itertools
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import optree
import torch
import torchopt

import bayesopt_chain as bc
from bayesopt_chain.engine.engine import moved
from benchmarks.measure import one_by_one, stepping
from benchmarks.networks import cnn, descend, mlp

LR, MOMENTUM, TEMPERATURE = 1e-6, 0.9, 1e-6


def update_and_apply(tx, params, grads) -> Callable:
    """``update`` in place and ``torchopt.apply_updates``: the path that is TorchOpt bit for bit at T = 0."""
    state = tx.init(params)

    def run():
        updates, _ = tx.update(grads, state, params=params, inplace=True)
        torchopt.apply_updates(params, updates, inplace=True)

    run()  # TorchOpt's first call is another
    return run


def torch_optim(params, grads, **how) -> Callable:
    modules = [torch.nn.Parameter(p) for p in params]
    for m, g in zip(modules, grads):
        m.grad = g
    return torch.optim.SGD(modules, LR, MOMENTUM, **how).step


def fused(tx, params, grads) -> Callable:
    """What ``make_step(..., inplace=True)`` does once it has its gradients."""
    state = tx.init(params)
    with torch.no_grad():
        assert moved(tx.plan(state), params, grads, state, True) is not None
        return lambda: moved(tx.plan(state), params, grads, state, True)


def captured(tx, params, grads) -> Callable:
    """``capture`` of a step whose batch is its gradient."""

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params=params, inplace=False)
        return optree.tree_map(torch.add, params, updates), state, bc.Info(torch.zeros(()), ())

    state = tx.init(params)
    run = stepping(bc.capture(step, params, state, grads), params, state, grads)
    run()
    return run


def normal_and_fused(params, grads) -> Callable:
    """The floor of eager code: one flat draw and torch's fused SGD."""
    flat = torch.empty(sum(p.numel() for p in params))
    return one_by_one(flat.normal_, torch_optim(params, grads, fused=True))


def adaptive(
    make: Callable, shapes: Sequence[Any], draws: bool = False, schedule: Callable | None = None
) -> Callable[[], Any]:
    """A step of the optimizer that ``make(params)`` gives on gradients that are at hand, with a draw for each leaf or a step of
    the scheduler that ``schedule(optimizer)`` gives.
    """
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = make(params)
    calls = [partial(torch.randn_like, p) for p in params] if draws else []
    if schedule is not None:
        calls.append(schedule(optimizer).step)
    return one_by_one(optimizer.step, *calls)


def posteriors() -> Any:
    """The library, without what it warns of when it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("posteriors")


def posteriors_sghmc(params, grads) -> Callable:
    """posteriors' SGHMC in place, net of the gradient: its ``grad_and_value`` hands back the gradients given here."""
    sghmc, value = posteriors().sgmcmc.sghmc, (torch.zeros(()), torch.zeros(()))
    tree = {str(i): p for i, p in enumerate(params)}
    given = {str(i): g for i, g in enumerate(grads)}
    state = sghmc.init(tree, momenta=0.0)

    def run():
        theirs, sghmc.grad_and_value = sghmc.grad_and_value, lambda f, has_aux: lambda p, b: (given, value)
        try:
            sghmc.update(state, None, None, lr=1e-3, alpha=100.0, temperature=TEMPERATURE, inplace=True)
        finally:
            sghmc.grad_and_value = theirs

    return run


def blackjax_sghmc(
    log_density: Callable, start: torch.Tensor, step_size: float, friction: float, temperature: float, steps: int
) -> tuple[Any, Callable, Callable]:
    """BlackJAX's SGHMC integrator, key and momentum carried along: the first carry, and by ``jax.jit`` functions of it that
    return the next one and draws, of one step and of a scan of ``steps``.
    """
    import jax
    import jax.numpy as jnp
    from blackjax.sgmcmc import diffusions

    integrate, theta = diffusions.sghmc(friction, 0.0), jnp.asarray(start.numpy())

    def advance(carry, _=None):
        key, p, m = carry
        key, now = jax.random.split(key)
        p, m = integrate(now, p, m, jax.grad(log_density)(p), step_size, temperature)
        return (key, p, m), p

    scan = jax.jit(lambda carry: jax.lax.scan(advance, carry, None, length=steps))
    return (jax.random.PRNGKey(0), theta, jnp.zeros_like(theta)), jax.jit(advance), scan


class Reader(torch.nn.Module):
    """Words embedded, convolved, read by an LSTM whose last output is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(10_000, 256)
        self.convolution = torch.nn.Conv1d(256, 64, 5, padding=2)
        self.lstm = torch.nn.LSTM(64, 96, batch_first=True)
        self.head = torch.nn.Linear(96, 8)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.convolution(self.embedding(words).mT))
        return self.head(self.lstm(x.mT)[0][:, -1])


# what it is, how it is made, and its inputs
NETWORKS: dict[str, tuple[str, Callable[[], torch.nn.Module], Callable[[], torch.Tensor]]] = {
    "cnn": (
        "CNN of 2 convolutions, batch 32",
        partial(cnn, 28, [1, 16, 32], classes=8),
        partial(torch.randn, 32, 1, 28, 28),
    ),
    "small_cnn": (
        "CNN of 2 convolutions on 16 x 16 pixels, batch 32",
        partial(cnn, 16, [1, 16, 32], padding=0, pools=(2, 1)),
        partial(torch.randn, 32, 1, 16, 16),
    ),
    "mlp": ("MLP 64-32-8, batch 64", partial(mlp, 64, 32, 8), partial(torch.randn, 64, 64)),
    "cnn_lstm": (
        "CNN-LSTM of 2.7e6 parameters, 2.56e6 of them an embedding, batch 32",
        Reader,
        partial(torch.randint, 10_000, (32, 40)),
    ),
}


def network(kind: str) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """A small network, inputs and labels."""
    torch.manual_seed(0)
    _, make, inputs = NETWORKS[kind]
    model, x = make(), inputs()
    return model, x, torch.randint(0, 8, (len(x),))


def training_step(kind: str, make: Callable) -> Callable[[], None]:
    """One step of an ordinary loop with the optimizer that ``make(params)`` gives."""
    model, x, y = network(kind)
    return partial(descend, make(model.parameters()), lambda: torch.nn.functional.cross_entropy(model(x), y))


def functional_step(kind: str, tx, inplace: bool) -> tuple[Any, Any, Any, Any]:
    """The same step by ``make_step``, the module taken as a function of its parameters; with them, a state and a batch."""
    model, x, y = network(kind)
    forward, params, _ = bc.make_functional(model)

    def loss(params, batch):
        return torch.nn.functional.cross_entropy(forward(params, batch), batch[1])

    return bc.make_step(loss, tx, inplace=inplace), params, tx.init(params), (x, y)


def draw_alone(kind: str) -> Callable[[], None]:
    """A step's normals, one generator and one draw for all leaves."""
    flat = torch.empty(sum(p.numel() for p in network(kind)[0].parameters()))
    seeds = itertools.count(1)

    def draw() -> None:
        flat.normal_(generator=torch.Generator().manual_seed(next(seeds)))

    return draw
