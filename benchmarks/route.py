"""``python -m benchmarks.route``: how much of the package one call runs through.

For nine calls that users make, the table counts what a reader has to open and to follow who wants to know what the call does:

    files       entered by the call
    functions   entered, comprehensions included (Python 3.12 runs those in place), lambdas not

Only files of the package count. ``python -m benchmarks.route --calls update`` lists the functions of one call as well.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

import bayesopt_chain as bc
from benchmarks.measure import command, markdown, stepping

PACKAGE = Path(bc.__file__).parent


class Route(NamedTuple):
    """What a call ran through.

    Attributes:
        files: the files entered, as paths below the package.
        functions: the functions entered, each with its file and its first line.
    """

    files: list[str]
    functions: list[str]


def _file(code: CodeType) -> str:
    return Path(code.co_filename).relative_to(PACKAGE).as_posix()


def route(call: Callable[[], Any]) -> Route:
    """Run ``call`` once under a tracer, and say what of the package it ran through.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.links.scale(2.0)
        >>> state = tx.init(torch.ones(1))
        >>> "core/update.py" in route(lambda: tx.update(torch.ones(1), state)).files
        True
    """
    entered, inside = set[CodeType](), f"{PACKAGE}{os.sep}"

    def trace(frame: FrameType, event: str, arg: Any) -> None:
        """Take note of a call; that it returns nothing spares the tracer the function's lines."""
        if frame.f_code.co_filename.startswith(inside):
            entered.add(frame.f_code)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    named = (code for code in entered if code.co_name != "<lambda>")
    functions = sorted(f"{_file(code)}:{code.co_firstlineno} {code.co_name}" for code in named)
    return Route(sorted({_file(code) for code in entered}), functions)


def loss(params: Any, batch: Any) -> torch.Tensor:
    return sum((x * x).sum() for x in params.values())  # pyright: ignore[reportReturnType]


def tree(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3,), value), "b": torch.full((2,), value)}


def update(make_tx: Callable[..., Any] = bc.sghmc, lr: Any = 0.1) -> Callable[[], Any]:
    """One update of a chain, which leaves what it is given alone; default: of SGHMC at constant rates."""
    tx, params = make_tx(lr, temperature=0.01), tree()
    state = [tx.init(params)]

    def call() -> None:
        _, state[0] = tx.update(tree(1.0), state[0], params=params, inplace=False)

    return call


def make_step() -> Callable[[], Any]:
    """One step of SGHMC by ``make_step``."""
    tx, params = bc.sghmc(0.1, temperature=0.01), tree()
    return stepping(bc.make_step(loss, tx), params, tx.init(params), None)


def optim(kind: str = "SGHMC") -> Callable[[], Any]:
    """One step of an optimizer of ``bc.optim``."""
    model = torch.nn.Linear(3, 2)
    optimizer = getattr(bc.optim, kind)(model.parameters(), lr=0.1, temperature=0.01)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    return optimizer.step


def sample() -> Callable[[], Any]:
    """Twenty steps of SGHMC by ``sample``, with the draws on disk."""
    tx, params = bc.sghmc(0.1, temperature=0.01), tree()
    step = bc.make_step(loss, tx)

    def call() -> None:
        with tempfile.TemporaryDirectory() as folder:
            bc.sample(step, params, tx.init(params), None, steps=20, thinning=5, path=Path(folder) / "run")

    return call


def fit_laplace() -> Callable[[], Any]:
    """A Laplace approximation of the last layer of a trained network."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    data = [(torch.randn(8, 3), torch.arange(8) % 2)]
    return partial(bc.fit_laplace, model, bc.likelihoods.categorical(), data, tune=None)


def posterior_ensemble() -> Callable[[], Any]:
    """The one call, on a small regression."""
    x = torch.linspace(-1, 1, 60)[:, None]

    def network() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))

    how: dict[str, Any] = {"steps": 40, "lr": 0.01, "progress": False}
    return partial(bc.posterior_ensemble, network, (x, x.sin()), bc.likelihoods.gaussian(0.1), **how)


CALLS: dict[str, Callable[[], Callable[[], Any]]] = {
    "update": update,
    "update, cosine": partial(update, lr=bc.schedules.cosine(0.1, 100)),
    "adam_sghmc": partial(update, bc.samplers.adam_sghmc),
    "make_step": make_step,
    "optim, SGHMC": optim,
    "optim, Adam": partial(optim, "Adam"),
    "sample": sample,
    "fit_laplace": fit_laplace,
    "posterior_ensemble": posterior_ensemble,
}


def measured(name: str) -> Route:
    """What one of the calls runs through, after two that are not counted: kernels, plans and buffers are made once."""
    call = CALLS[name]()
    for _ in range(2):
        call()
    return route(call)


if __name__ == "__main__":
    asked = command(calls=[""]).calls
    found = {name: measured(name) for name in CALLS if name in asked or not any(asked)}
    rows = [(name, len(route.files), len(route.functions)) for name, route in found.items()]
    print(markdown(("", "files", "functions"), rows))
    for name in filter(None, asked):
        print(name, *found[name].functions, sep="\n    ")
