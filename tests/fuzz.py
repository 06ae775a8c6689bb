"""Calls of everything public with ordinary wrong arguments: each is accepted, or refused by the name of the argument.

The calls are made from the signatures of what the namespaces export. Every argument that has no default is given what
:data:`SOUND` holds for its name; then each argument in turn takes each of :data:`VALUES`. Methods are called on the objects of
:data:`OBJECTS`. An outcome is *named* if the call returns, without NaN where none was given, or raises an error
that names the argument, one of its :data:`SYNONYMS`, or the user's function that was passed. An error that starts in a function
or a module of the user's own is theirs.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import itertools
import math
import re
import signal
import tempfile
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import optree
import torch
from torch import nn
from torchopt.base import GradientTransformation

import bayesopt_chain as bc
from bayesopt_chain.likelihoods import gaussian

HOME = str(Path(bc.__file__).parent)
SECONDS = 60  # after which a call counts as one without an end
VALUES: list[Any] = [
    None, True, False, 0, -1, 3, 2.5, -0.5, 1e30, 10**400, math.nan, math.inf, 1j, "x", "", (), [], {}, [1.0, 2.0], (0.9, 2.0),
    ("a", "b"), [None], {"w": 1.0}, {"w": None}, set(), object(), Path("x"), np.ones(3), np.float32(1.0), torch.float32,
    torch.tensor(1.0), torch.tensor(math.nan), torch.tensor(2), torch.tensor(True), torch.ones(3), torch.ones(2, 3),
    torch.zeros(0), torch.full((3,), math.nan), torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.float16),
    torch.ones(3, dtype=torch.complex64), torch.ones(3, device="meta"), torch.ones(3).to_sparse(),
    torch.ones(3, requires_grad=True), {"w": torch.ones(5)}, {"w": torch.full((2,), math.nan)}, {"v": torch.ones(2)},
    [torch.ones(2)], nn.ReLU(), torch.Generator(), int, len, lambda: None, lambda *_: "x", lambda *_: math.nan,
]  # fmt: skip
SYNONYMS = {  # what a message may call an argument, or the part of it that is at fault
    "params": ("leaf", "leaves", "tree"),
    "state": ("leaf", "leaves", "tree"),
    "updates": ("leaf", "gradient"),
    "batches": ("batch", "loader", "data"),
    "loader": ("batch", "batches", "data"),
    "data": ("batch", "batches", "leaf"),
    "train": ("batch", "batches", "leaf"),
    "query": ("batch", "batches", "leaf"),
    "inputs": ("batch",),
    "trees": ("leaf", "leaves", "tree"),
    "tree": ("leaf", "leaves"),
    "tx": ("transformation", "chain", "link"),
    "link": ("transformation",),
    "links": ("transformation", "link"),
    "make_tx": ("transformation", "chain"),
    "build": ("transformation", "chain"),
    "make_model": ("module", "model"),
    "betas": ("b1", "b2"),
    "lr": ("learning rate",),
    "eps": ("epsilon",),
    "targets": ("values",),
    "like": ("tree", "params"),
    "names": ("leaf",),
    "grads": ("gradients",),
    "module_or_forward": ("module", "forward"),
}


def loss(params, batch):
    return (params["w"] ** 2).sum() if batch is None else ((params["w"] - batch) ** 2).mean()


def params():
    return {"w": torch.tensor([0.5, -0.2])}


def forward(params, batch):
    return batch[0] @ params["w"][:, None] if isinstance(batch, tuple) else batch @ params["w"][:, None]


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).eval()


def optimizer(kind=bc.optim.SGHMC):
    return kind(MODEL.parameters(), lr=0.1, temperature=0.1)


torch.manual_seed(0)
DATA = torch.linspace(-1.0, 1.0, 24).reshape(12, 2)
PAIRS = [(DATA[:6], DATA[:6, :1]), (DATA[6:], DATA[6:, :1])]
MODEL, TX = model(), bc.sghmc(0.1, 0.5, temperature=0.1)
STEP = bc.make_step(loss, TX)
NORMED = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
MASTERS = bc.with_master_weights(bc.sgd(0.1))
CONTOUR = bc.samplers.contour_sgld(0.1, temperature=0.1, low=-1.0, high=100.0)
REFERRING = bc.make_step(bc.gradients.svrg(loss, list(DATA.split(3))), TX)
PARALLEL = bc.parallel(STEP, 2)
DRAWS = bc.Draws.from_trees([{"w": torch.sin(torch.arange(2.0) * i + i)} for i in range(16)])
VI, EKF = bc.vi.mean_field(bc.adam(0.1), temperature=0.1), bc.ekf.dense()
ESTIMATE = bc.curvature.ggn(forward, gaussian(), "dense")
INCREMENT = ESTIMATE(params(), PAIRS[0])


def after(tx, steps=3, **extra):
    """The state of a transformation some steps on."""
    state = tx.init(params())
    for k in range(steps):
        given = {"draw": tx.sample(state, params())} if hasattr(tx, "sample") else {}
        move = {"w": torch.arange(2.0) * (k + 1)}
        state = tx.update(move, state, params=params(), inplace=False, **given, **extra)[1]
    return state


@functools.cache
def fitted():
    return bc.fit_laplace(MODEL, gaussian(), PAIRS, tune=None)


@functools.cache
def several():
    """A small ensemble with draws."""
    data = (DATA, DATA[:, :1])
    return bc.posterior_ensemble(model(), data, gaussian(), members=2, steps=100, lr=0.05, progress=False)


@functools.cache
def noise():
    return bc.diagnostics.gradient_noise(loss, params(), list(DATA.split(3)), max_batches=4)


@functools.cache
def captured():
    return bc.capture(STEP, params(), TX.init(params()), DATA[0], backend="eager")


def heating():
    product = bc.diagnostics.hessian_product(loss, params(), list(DATA.split(3)))
    given = {"order": "independent", "steps_per_epoch": 4, "curvature": product, "again": noise()}
    return bc.diagnostics.heating(bc.sghmc(0.001, 0.5, temperature=0.1), noise(), **given)


def written(save):
    """The path to what a function saves there."""
    save(path := Path(tempfile.mkdtemp()) / "x")
    return path


def model_step():
    net = model()
    made = bc.optim.SGHMC(net.parameters(), lr=0.1, temperature=0.1)
    return bc.optim.as_step(net, made, lambda m, x: m(x).square().mean())


def BUILD(temperature=0.1):
    return bc.sgld(0.1, temperature=temperature)


VECTOR, PRODUCTS = (torch.ones(3),), ("fvp", "ggnvp", "hvp", "jvp")
SOUND: dict[str, Callable[[], Any]] = {  # by the name of an argument, or of a callable and its argument
    "params": params,
    "compares": lambda: False,
    "loss": lambda: loss,
    "batches": lambda: list(DATA.split(3)),
    "batch": lambda: DATA[0],
    "step": lambda: STEP,
    "tx": lambda: TX,
    "state": lambda: TX.init(params()),
    "module": model,
    "model": model,
    "optimizer": optimizer,
    "likelihood": gaussian,
    "loader": lambda: PAIRS,
    "forward": lambda: forward,
    "module_or_forward": model,
    "make_model": model,
    "draws": lambda: DRAWS,
    "data": lambda: DATA,
    "lr": lambda: 0.01,
    "momentum": lambda: 0.5,
    "temperature": lambda: 0.1,
    "step_size": lambda: 0.01,
    "friction": lambda: 1.0,
    "alpha": lambda: 0.1,
    "low": lambda: -1.0,
    "high": lambda: 100.0,
    "burn_in": lambda: 1,
    "freeze_after": lambda: 2,
    "cycle": lambda: 3,
    "batch_size": lambda: 4,
    "steps": lambda: 4,
    "n": lambda: 2,
    "rank": lambda: 2,
    "size": lambda: 3,
    "seed": lambda: 0,
    "level": lambda: 0.5,
    "samples": lambda: 2,
    "temperatures": lambda: (0.1, 0.2),
    "preconditioner": lambda: 0.5,
    "precision": lambda: INCREMENT.add_diagonal(1.0),
    "step_size_fn": lambda: lambda count: 0.1 / (1 + count),
    "length": lambda: 1.0,
    "strength": lambda: 1.0,
    "gradient_scale": lambda: 1.0,
    "center": params,
    "value": lambda: 0.1,
    "init": lambda: 0.1,
    "gamma": lambda: 0.5,
    "mask": lambda: {"w": True},
    "link": lambda: bc.sgd(0.1),
    "response": lambda: bc.add_momentum(0.9).links[0].response,
    "stream": lambda: "philox",
    "path": lambda: written(lambda path: bc.save(path, params())),
    "like": params,
    "tree": params,
    "trees": lambda: [params(), params()],
    "tensors": lambda: bc.state_dict(TX.init(params())),
    "every": lambda: 2,
    "make_chain": lambda: lambda group: bc.sgd(0.1),
    "make_tx": lambda: lambda lr, momentum=0.5: bc.sghmc(lr, momentum, temperature=0.1),
    "posterior": lambda: fitted().posterior,
    "build": lambda: lambda lr: bc.sgld(lr, temperature=0.1),
    "noise": noise,
    "targets": lambda: DATA[:, :1],
    "prediction": lambda: several().predict(DATA),
    "mean": lambda: torch.ones(2, 3),
    "covariance": lambda: torch.eye(3).expand(2, 3, 3) + 0.1,
    "variance": lambda: torch.ones(2, 3),
    "score": lambda: lambda p: {"w": -p["w"]},
    "other": lambda: DRAWS,
    "it": lambda: next(iter(bc.iterate(STEP, params(), TX.init(params()), None, steps=1))),
    "shape": lambda: (2,),
    "grads": params,
    "updates": params,
    "closure": lambda: None,
    "state_dict": lambda: optimizer().state_dict(),
    "param_group": lambda: {"params": [nn.Parameter(torch.ones(3))]},
    "epoch": lambda: 1,
    "offset": lambda: 2,
    "known": lambda: torch.randn(4),
    "unknown": lambda: torch.randn(5),
    "logits": lambda: torch.randn(6, 2),
    "log_probabilities": lambda: torch.randn(6, 2).log_softmax(-1),
    "probabilities": lambda: torch.full((4, 2, 3), 1 / 3),
    "means": lambda: torch.ones(4, 2),
    "variances": lambda: torch.tensor(0.5),
    "outputs": lambda: torch.zeros(12, 1),
    "values": lambda: DATA[:, :1],
    "log_evidence": lambda: lambda h: h.log() - h / 3,
    "start": lambda: torch.tensor(1.0, dtype=torch.float64),
    "thresholds": lambda: (0.0, 1.0),
    "report": heating,
    "log_likelihood": lambda: torch.tensor(-1.0),
    "log_joint": lambda: 1.0,
    "device": lambda: "cpu",
    "f": lambda: lambda p: p["w"].square().sum(),
    "primals": params,
    "tangents": params,
    "product": lambda: lambda v: {"w": 2 * v["w"]},
    "b": params,
    "keep": lambda: {"w": True},
    "method": lambda: None,
    "mode": params,
    "prior": lambda: 1.0,
    "rule": lambda: "largest_norm",
    "x": lambda: DATA[:, 0],
    "vector": lambda: DATA[0],
    "estimator": lambda: bc.gradients.svrg(loss, list(DATA.split(3))),
    "reference": params,
    "buffers": lambda: {"b": torch.ones(16)},
    "log_weights": lambda: torch.full((2,), 0.5).log(),
    "curvature": lambda: torch.eye(2).double(),
    "history": lambda: [(params(), EKF.init(params()))],
    "diagonal": lambda: torch.ones(4),
    "rows": lambda: torch.ones(2, 4),
    "count": lambda: 3,
    "prior_precision": lambda: 1.0,
    "leaves": lambda: list,
    "ours": params,
    "theirs": params,
    "transformations": lambda: {"a": bc.sgd(0.1)},
    "labels": lambda: {"w": "a"},
    "seconds": lambda: 1.0,
    "schedules": lambda: [lambda t: 0.1, lambda t: 0.2],
    "boundaries": lambda: [3],
    "args": lambda: None,
    "fitted": fitted,
    "train": lambda: PAIRS,
    "query": lambda: PAIRS,
    "train_losses": lambda: torch.randn(12, 3),
    "control": lambda: None,
    "trainer": lambda: None,
    "testing.assert_zero_temperature_limit.build": lambda: (
        lambda temperature: bc.sghmc(0.1, 0.0, temperature=temperature)
    ),
    "swag.rank": lambda: 2,
    "refresh_batch_norm.module": lambda: NORMED,
    "write_back.module": lambda: nn.ParameterDict(params()),
    "refresh_batch_norm.draws": lambda: bc.Draws.from_trees([NORMED] * 2),
    "refresh_batch_norm.loader": lambda: [torch.randn(4, 2)],
    **{f"curvature.{name}.{word}": lambda: VECTOR for name in PRODUCTS for word in ("primals", "tangents")},
    "curvature.fvp.f": lambda: torch.square,
    "curvature.jvp.f": lambda: torch.square,
    "curvature.hvp.f": lambda: lambda x: x.square().sum(),
    "curvature.ggnvp.forward": lambda: torch.square,
    "curvature.ggnvp.loss": lambda: torch.sum,
    "diagnostics.heating.order": lambda: "independent",
    "diagnostics.heating.steps_per_epoch": lambda: 4,
    "ekf.low_rank.rank": lambda: 2,
    "posterior.influence_of_draws.values": lambda: torch.randn(12, 2),
    "posterior.influence_of_draws.log_weights": lambda: None,
    "posterior.batch_bald.pool": lambda: bc.likelihoods.bernoulli().mixture(torch.randn(4, 5, 1)),
    "posterior.epig.pool": lambda: bc.likelihoods.bernoulli().mixture(torch.randn(4, 5, 1)),
    "posterior.epig.targets": lambda: bc.likelihoods.bernoulli().mixture(torch.randn(4, 5, 1)),
    "posterior.d_optimal.pool": lambda: gaussian().predictive(torch.zeros(5, 1), torch.eye(5)),
    "posterior.next_labels.labels": lambda: torch.zeros(2, 3).long(),
    "likelihoods.custom.nll": lambda: lambda outputs, targets: (outputs - targets).square().sum(-1),
    "plot.reliability.probabilities": lambda: torch.full((6, 2), 0.5),
    "plot.reliability.targets": lambda: torch.arange(6) % 2,
    "posterior.classification_metrics.targets": lambda: torch.arange(6) % 2,
    "posterior.temperature_scaling.targets": lambda: torch.arange(6) % 2,
    **{
        f"posterior.{name}.posterior": lambda: VI.posterior(VI.init(params()), params())
        for name in ("functional_samples", "linearized")
    },
    **{f"posterior.{name}.batch": lambda: DATA for name in ("functional_samples", "linearized")},
    "samplers.contour_weight.tx": lambda: CONTOUR,
    "vi.low_rank.rank": lambda: 2,
    "Laplace.posterior.prior_precision": lambda: 1.0,
    "Laplace.log_evidence.prior_precision": lambda: 1.0,
    "samplers.contour_weight.loss": lambda: torch.tensor(1.0),
    "samplers.contour_weight.state": lambda: after(CONTOUR, loss=torch.tensor(1.0)),
    "schedules.piecewise.values": lambda: [0.1, 0.2],
    "testing.assert_composes.build": lambda: BUILD,
    "testing.assert_laws.build": lambda: BUILD,
    **{f"vi.{name}.optimizer": lambda: bc.adam(0.01) for name in ("dense", "low_rank", "mean_field")},
    "Step.refresh.state": lambda: REFERRING.init(params()),
    "Parallel.__call__.params": lambda: bc.stack([params()] * 2),
    "Parallel.__call__.state": lambda: PARALLEL.init(TX, bc.stack([params()] * 2)),
    "Parallel.init.params": lambda: bc.stack([params()] * 2),
    "Draws.column.name": lambda: next(iter(DRAWS._columns())),
    "Draws.gather.mesh": lambda: None,
    "restrict.where": lambda: {"w": torch.tensor([True, False])},
    "Draws.log_likelihood.batches": lambda: PAIRS,
    "writer": lambda: SimpleNamespace(add_scalar=lambda name, value, step: None),
    "testing.sbc.make_posterior": lambda: lambda data: data / 2 + torch.linspace(-1.0, 1.0, 19),
    "testing.sbc.prior": lambda: lambda generator: torch.randn((), generator=generator),
    "testing.sbc.simulator": lambda: lambda mean, generator: mean + torch.randn((), generator=generator),
    "testing.sbc.simulations": lambda: 20,
    "Epochs.load_state_dict.state": lambda: bc.epochs(DATA, 4).state_dict(),
    "Epochs.seek.step": lambda: 2,
    "Collector.load_state_dict.state": lambda: {"step": 3},
    "FittedLaplace.load_state_dict.state": lambda: fitted().state_dict(),
    "Gaussian.log_prob.tree": lambda: fitted().posterior.mean,
    "Ensemble.open.path": lambda: written(several().save),
    **{
        f"Laplace.{name}.state": lambda: after(bc.laplace(), 1, curvature=INCREMENT)
        for name in ("log_evidence", "posterior")
    },
    **{f"Swag.{name}.state": lambda: after(bc.swag(2)) for name in ("mean", "posterior")},
    **{f"DrawingTransformation.{name}.state": lambda: VI.init(params()) for name in ("posterior", "sample")},
    **{f"KalmanFilter.{name}.state": lambda: EKF.init(params()) for name in ("log_evidence", "posterior", "predict")},
    "optim.ModelStep.__call__.state": lambda: model_step().state,
    "optim.ModelStep.__call__.params": lambda: model_step().params,
    "Heating.cool.draws": lambda: {"w": torch.randn(8, 2)},
    "MasterWeights.masters.state": lambda: MASTERS.init(params()),
    "optim.Optimizer.load_state_dict.state_dict": lambda: OBJECTS["optim.Optimizer"]().state_dict(),
    "optim.IVON.load_state_dict.state_dict": lambda: OBJECTS["optim.IVON"]().state_dict(),
    "Gaussian likelihood.scaled.scale": lambda: 1.0,
    **{
        f"Gaussian likelihood.{name}.outputs": lambda: DATA[:, :1]
        for name in ("cdf", "draw", "log_prob", "mixture", "nll", "mean")
    },
    "Gaussian likelihood.pooled.draws": lambda: [DATA[:, :1], DATA[:, :1]],
    **{f"testing.{name}.reference": lambda: lambda: bc.sgd(0.1) for name in ("assert_zero_temperature_limit",)},
    "capture.backend": lambda: "eager",
    "posterior_ensemble.steps": lambda: 100,
    "posterior_ensemble.members": lambda: 2,
    "posterior_ensemble.lr": lambda: 0.05,
    "posterior_ensemble.data": lambda: (DATA, DATA[:, :1]),
}
OBJECTS: dict[str, Callable[[], Any]] = {  # whose methods are called
    "Chain": lambda: TX,
    "Step": lambda: STEP,
    "Parallel": lambda: PARALLEL,
    "Captured": captured,
    "Draws": lambda: DRAWS,
    "Epochs": lambda: bc.epochs(DATA, 4),
    "Collector": lambda: bc.collect(MODEL, optimizer(), every=1),
    "FittedLaplace": fitted,
    "Predictive": lambda: fitted().predictive(DATA),
    "Gaussian": lambda: fitted().posterior,
    "Ensemble": several,
    "Predictive of draws": lambda: several().predict(DATA),
    "Laplace": bc.laplace,
    "Swag": lambda: bc.swag(2),
    "DrawingTransformation": lambda: VI,
    "KalmanFilter": lambda: EKF,
    "optim.SGHMC": optimizer,
    "optim.IVON": lambda: optimizer(bc.optim.IVON),
    "optim.ModelStep": model_step,
    "optim.Optimizer": lambda: bc.optim.Optimizer(MODEL.parameters(), lambda group: bc.sgd(0.1)),
    "Heating": heating,
    "Gaussian likelihood": gaussian,
    "HeatGuard": lambda: bc.diagnostics.HeatGuard(),
    "MasterWeights": lambda: MASTERS,
}


# Methods that one part of the library, or torch, calls on another.
INNER = {
    *(
        "at",
        "chain",
        "lower",
        "plan",
        "one",
        "some",
        "mapped",
        "of_any",
        "chain_axes",
        "ahead",
        "of_rows",
        "skip",
        "join_hook",
    ),
    *(
        "grouping",
        "labels",
        "require",
        "require_values",
        "mixed",
        "nodes",
        "widened",
        "smoothed",
        "root",
        "exact_root",
    ),
    *(
        "on_exception",
        "on_fit_end",
        "on_save",
        "on_step_end",
        "on_train_batch_end",
        "on_train_end",
        "on_train_begin",
        "on_train_start",
        "grown",
        "thermal_leaves",
        "scaled",
    ),
    *(
        "mixture_crps",
        "pair",
        "information",
        "whitened",
        "losses",
        "factors",
        "sampled_factors",
        "gradient",
        "weights",
        "counted",
    ),
}
NOT_CALLED = {
    "curvature.linear_operator",  # of an extra
    "diagnostics.susceptibility",  # of two runs that observed the same
    *("Draws.module", "FittedLaplace.module"),  # of a network with its own outputs; of nothing
    *("samplers.replica_exchange", "vi.Draw"),
    *(
        "Step.refresh",
        "Draws.gather",
        "Draws.open",
        "Collector.predict",
        "optim.IVON.step",
        "optim.IVON",
        "testing.assert_bitwise_equal",
    ),
    "likelihoods.Likelihood",  # abstract
    "optim.SparseAdam",  # of sparse gradients
    "schedules.robbins_monro",  # a class
    "links.inject_langevin_noise",
}
KNOWN = {"Gaussian likelihood.log_prob.targets"}  # arguments of which some values have no name yet
# A call takes seconds.
SLOW = (
    "posterior_ensemble",
    "capture",
    "diagnostics.doctor",
    "Draws.to_arviz",
    "suggest_lr",
    "posterior.train_by_evidence",
    "fit_laplace",
    "observe",
    "plot.bands",
    "testing.assert_laws",
    "testing.assert_composes",
)
# What a function of the user's own looks at first.
THEIRS = {"batch", "batches", "data", "loader", "inputs", "params", "starts", "start", "b", "candidates"}


def namespaces() -> Iterator[tuple[str, Any]]:
    """The package and its public namespaces, behind the prefix of their names."""
    yield "", bc
    yield from ((f"{name}.", space) for name in bc.__all__ if inspect.ismodule(space := getattr(bc, name)))


@functools.cache
def rows() -> dict[str, tuple[Callable[[], Any], dict[str, Callable[[], Any]]]]:
    """By the name of each callable a function that returns it, bound to a new object, and its arguments by their names."""
    found: dict[str, Any] = {}
    for prefix, space in namespaces():
        for name in space.__all__:
            thing = getattr(space, name)
            known = {f"{prefix}{name}"} if any(thing is function for function, _ in found.values()) else set()
            is_result = inspect.isclass(thing) and not (hasattr(thing, "step") or name == "HeatGuard")
            if (
                callable(thing)
                and not is_result
                and hasattr(thing, "__name__")
                and f"{prefix}{name}" not in NOT_CALLED | known
            ):
                found[f"{prefix}{name}"] = thing, None
    for of, make in OBJECTS.items():
        for name, method in inspect.getmembers(type(make()), inspect.isroutine):
            public = name == "__call__" or not name.startswith("_")
            if (
                public
                and name not in INNER
                and f"{of}.{name}" not in NOT_CALLED
                and "bayesopt_chain" in (getattr(method, "__module__", None) or "")
            ):
                found[f"{of}.{name}"] = method, make
    return found


def parameters(name: str) -> dict[str, inspect.Parameter]:
    """The parameters of a callable, without ``self``, ``*`` and ``**``."""
    given = inspect.signature(rows()[name][0]).parameters
    return {
        k: p for k, p in given.items() if k not in ("self", "cls") and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }


def sound(name: str) -> dict[str, Any]:
    """New arguments with which a callable can be called."""
    given, is_class = {}, inspect.isclass(rows()[name][0])  # an optimizer
    for word, parameter in parameters(name).items():
        make = SOUND.get(f"{name}.{word}") or (SOUND.get(word) if parameter.default is parameter.empty else None)
        if make is not None:
            given[word] = [nn.Parameter(torch.full((4, 4), 0.5))] if word == "params" and is_class else make()
    return given


def call(name: str, given: dict[str, Any]) -> Any:
    """Call it; make three steps of a transformation, one of an optimizer, ten items of an iterator, and one of a step."""
    thing, make = rows()[name]
    thing = thing if make is None else getattr(make(), name.rpartition(".")[2])
    out = thing(**given)
    if name == "inject_langevin_noise":
        out = bc.chain(out, bc.scale_by_neg_lr(0.1))
    if isinstance(out, GradientTransformation):
        return steps(out)
    if isinstance(out, torch.optim.Optimizer) or hasattr(out, "zero_grad"):
        return moved(out)
    return list(itertools.islice(out, 3)) if isinstance(out, Iterator) else out


KEYWORDS: dict[str, Callable[[], Any]] = {  # of updates, for chains that ask for them
    "loss": lambda: torch.tensor(1.0),
    "curvature": lambda: INCREMENT,
    "gradient_variance": lambda: {"w": torch.ones(2)},
    "gradient_covariance": lambda: torch.eye(2),
}


def steps(tx: GradientTransformation) -> Any:
    """Parameters behind three steps down a parabola, of two chains where the transformation is of several."""
    p = params()
    state = tx.init(p)
    for _ in range(3):
        extra = {k: make() for k, make in KEYWORDS.items() if k in getattr(tx, "extra_kwargs", ())}
        extra |= {"draw": tx.sample(state, p)} if hasattr(tx, "sample") else {}
        updates, state = tx.update({"w": p["w"].clone()}, state, params=p, inplace=False, **extra)
        p = {"w": p["w"] + updates["w"]}
    return p


def moved(made: Any) -> None:
    """Make one step of an optimizer."""
    groups = [group["params"] if isinstance(group, dict) else group for group in made.param_groups]
    weights = [p for p in optree.tree_leaves(groups) if isinstance(p, torch.Tensor)]
    for p in weights:
        p.grad = torch.full_like(p, 0.25)
    made.step(*([lambda: weights[0].square().sum()] * ("LBFGS" in type(made).__name__)))


def complaint(err: BaseException, argument: str, value: Any) -> str:
    """What is wrong with an error; nothing if it says what is at fault."""
    if not argument:
        return f"the sound call ends with {err!r}"
    words = [
        argument,
        argument.rstrip("s"),
        *SYNONYMS.get(argument, ()),
        getattr(value, "__name__", type(value).__name__),
    ]
    if isinstance(err, (TypeError, ValueError, RuntimeError, LookupError, OSError)) and any(
        re.search(rf"(?<![a-z]){re.escape(word.lower())}(?![a-z])", str(err).lower()) for word in words
    ):
        return ""
    frames = traceback.extract_tb(err.__traceback__)
    if err.__cause__ is not None and str(err.__cause__) in str(err) and not complaint(err.__cause__, argument, value):
        return ""  # said again, with what to do
    inside = next((i for i, x in enumerate(frames) if x.filename.startswith(HOME)), len(frames))
    if argument in THEIRS and any(x.filename == __file__ or "torch/nn/modules" in x.filename for x in frames[inside:]):
        return ""
    where = "/".join(frames[-1].filename.split("/")[-3:])
    return f"{type(err).__name__} from {where}:{frames[-1].lineno}: {err}"


def has_nan(out: Any, also_large: bool = False) -> bool:
    """Whether a result holds NaN; with ``also_large`` also infinite or huge numbers, or functions, from which NaN may come."""
    leaves = [torch.as_tensor(x) for x in optree.tree_leaves(out) if isinstance(x, (float, torch.Tensor))]
    real = [x for x in leaves if x.is_floating_point() and not x.is_meta and not x.is_sparse]
    return (also_large and callable(out)) or any(
        bool((x.isnan() | ((x.abs() >= 1e30) & also_large)).any()) for x in real
    )


def wrong_of(name: str, argument: str, value: Any) -> str:
    """What is wrong with the outcome of one call; nothing if it is sound, or says what is at fault."""
    given = sound(name)
    if argument:  # a copy of a value that the call might change
        given[argument] = copy.deepcopy(value) if isinstance(value, (list, dict, set, torch.Tensor)) else value
    torch.manual_seed(0)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.alarm(SECONDS)
        try:
            out = call(name, given)
        except AssertionError as err:  # is what functions of bc.testing answer with
            return "" if name.startswith("testing.") else complaint(err, argument, value)
        except Exception as err:
            return complaint(err, argument, value)
        except KeyboardInterrupt:
            return f"no end within {SECONDS} s"
        finally:
            signal.alarm(0)
    return "NaN without a word" if has_nan(out) and not has_nan(value, True) and not name.startswith("links.") else ""


def sweep(name: str, chosen: Sequence[int] | None = None) -> tuple[list[str], int]:
    """Outcomes without a name, and the number of calls; ``chosen``: those of the values for each argument, always the same."""
    found, calls = [], 0
    for argument in parameters(name):
        first = zlib.crc32(f"{name}.{argument}".encode())
        values = VALUES if chosen is None else [VALUES[(first + 17 * k) % len(VALUES)] for k in chosen]
        for value in values:
            calls += 1
            if wrong := wrong_of(name, argument, value):
                found.append(f"{name}({argument}={value!r:.60}): {wrong}"[:300].replace("\n", " "))
    return found, calls
