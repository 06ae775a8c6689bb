"""Arguments of ordinary kinds in the wrong places, for everything that a user calls: the table, and what counts as wrong.

Each call of :data:`CALLS` is sound as it stands. Every argument in turn is replaced by each of :data:`VALUES`; what comes of it
is right if it is

* an exception of this library that names the argument, or which part of it is wrong: a TypeError, a ValueError, an IndexError
  of a place behind the end, or a FileNotFoundError of a path; or whatever a function of the user's own raises for what it was
  given;
* or a result without NaN, unless NaN was given as data.

Factories of transformations and optimizers find their rows by themselves: what they make has to make some steps
that leave parameters finite. The methods of what the calls return have rows too, ``Class.method``; :func:`missing` tells of
what has none.

``tests/test_fuzz.py`` draws a few values for each argument, and ``python -m benchmarks.fuzz`` takes all of them.
"""

import contextlib
import copy
import dataclasses
import functools
import inspect
import io
import math
import os
import signal
import tempfile
import traceback
import typing
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import optree
import torch
from torchopt.base import GradientTransformation

import bayesopt_chain as bc
from bayesopt_chain import ensemble, fitting
from bayesopt_chain.loop.capture.build import Captured
from bayesopt_chain.optim.step import ModelStep
from bayesopt_chain.runs.collect import Collector

HOME = str(Path(bc.__file__).parent)
NAN = math.nan
SECONDS = 60  # after which a call counts as one without an end
VALUES = [
    None, True, False, 0, -1, 1, 3, 2.5, -0.5, 1e30, NAN, math.inf, 10**400, 1j, "x", "", b"x", (), [], {}, [1, 2], (1, 2),
    {"w": 1.0}, {"w": [1.0, 2.0]}, {"w": None}, [None], set(), range(3), iter([1]), object(), print, int, Path("x"),
    np.ones(3), np.float32(1.0), torch.tensor(1.0), torch.tensor(NAN), torch.tensor(2), torch.tensor(True), torch.ones(3),
    torch.ones(2, 3), torch.zeros(0), torch.full((3,), NAN), torch.ones(3, dtype=torch.int64),
    torch.ones(3, dtype=torch.float16), torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.complex64),
    torch.ones(3, device="meta"), torch.ones(3).to_sparse(), torch.ones(3, requires_grad=True) * 1, {"w": torch.ones(2)},
    {"w": torch.full((3,), NAN)}, {"v": torch.ones(3)}, [torch.ones(3)], torch.float32, torch.nn.ReLU(),
    torch.Generator().manual_seed(0), lambda *_: 0.1,
]  # fmt: skip
PAIRS = [
    (NAN, 0.9),
    (0.9, NAN),
    (-0.1, 0.9),
    (0.9, 1.0),
    (1.0, 0.9),
    (math.inf, 0.9),
    (0.9,),
    (0.9, 0.99, 0.999),
    ("a", "b"),
]
SLOW = ("capture", "Draws.to_arviz", "diagnostics.doctor", "suggest_chain", "posterior_ensemble")  # seconds a value
HOLDERS = {  # of results, which their makers fill: nothing of them is an argument
    "Draws", "Gaussian", "Info", "Steps", "Chain", "CaptureError", "vi.Draw", 
    "predict.RunningMoments", "predict.RunningPredictive", "predict.Uncertainty", "vi.Elbo", "vi.VariationalInfo",
    *[f"diagnostics.{name}" for name in (
        "ChainSuggestion", "Diagnosis", "Estimate", "Finding", "GradientNoise", "Heat", "Heating", "LearningCoefficient",
        "LrBias", "Setting", "Temperatures", "ThermalLeaf", "Extrapolation", "MclmcTuning",
    )],
}  # fmt: skip
RETURNED = {  # what the calls return, whose methods have rows of their own
    "Chain": bc.Chain,
    "Draws": bc.Draws,
    "FittedLaplace": fitting.FittedLaplace,
    "Gaussian": bc.Gaussian,
    "diagnostics.HeatGuard": bc.diagnostics.HeatGuard,
    "diagnostics.Heating": bc.diagnostics.Heating,
    "diagnostics.LrBias": bc.diagnostics.LrBias,
    "diagnostics.Thermometer": bc.diagnostics.Thermometer,
    "Ensemble": ensemble.Ensemble,
    "EnsemblePrediction": ensemble.EnsemblePrediction,
    "KalmanFilter": bc.ekf.KalmanFilter,
    "Laplace": type(bc.laplace()),
    "Prediction": fitting.Prediction,
    "Swag": type(bc.swag()),
    "VariationalTransform": type(bc.vi.mean_field(bc.adam(0.1), temperature=0.1)),
    "Step": type(bc.make_step(lambda p, b: p.sum(), bc.sgd(0.1))),
    "Parallel": type(bc.parallel(bc.make_step(lambda p, b: p.sum(), bc.sgd(0.1)), 2)),
    "Epochs": type(bc.epochs(torch.zeros(2, 1), 1)),
    "Collector": Collector,
    "optim.IVON": bc.optim.IVON,
    "optim.ModelStep": ModelStep,
    "optim.Optimizer": bc.optim.Optimizer,
    "optim.SGHMC": bc.optim.SGHMC,
    "Captured": Captured,
}
INTERNAL = {  # methods that one part of the library, or a trainer, calls on another, with what it made itself
    *[f"{of}.{name}" for of in ("Chain", "KalmanFilter", "Laplace", "Swag", "VariationalTransform")
      for name in ("at", "chain", "lower", "plan")],
    *[f"Collector.on_{name}" for name in ("exception", "fit_end", "save", "train_end")],
    "Parallel.one", "Parallel.some", "Parallel.mapped", "Parallel.of_any", "Parallel.chain_axes",
    "Epochs.of_rows", "Epochs.ahead", "Epochs.skip",
}  # fmt: skip
ALSO = {  # what a message calls an argument, besides its name
    "params": ("leaf", "leaves", "tree", "parameters"),
    "state": ("leaf", "tree", "states"),
    "batches": ("batch", "loader", "data"),
    "batch": ("loss",),
    "loader": ("batch", "data"),
    "data": ("batch", "leaf", "leaves", "tensor"),
    "tree": ("leaf", "leaves"),
    "trees": ("leaf", "leaves", "tree"),
    "tx": ("transformation", "chain", "link"),
    "make_tx": ("transformation", "chain"),
    "build": ("transformation", "chain"),
    "path": ("director", "file", "run in"),
    "likelihood": ("targets", "outputs"),
    "module_or_forward": ("module", "forward", "outputs", "parameters"),
    "make_model": ("module", "model"),
    "betas": ("beta", "b1", "b2"),
    "b1": ("beta", "betas"),
    "b2": ("beta", "betas"),
    "lr": ("learning rate", "step_size"),
    "omega": ("schedule",),
    "step_size_fn": ("step_size", "schedule"),
    "init_scale": ("init scale",),
    "low": ("high",),
    "high": ("low",),
    "alpha": ("decay",),
    "step_size": ("gains", "lr"),
    "params_or_module": ("params",),
    "log_evidence": ("evidence",),
    "value": ("values",),
    "targets": ("values",),
    "shape": ("sample_shape",),
    "inputs": ("batch",),
    "subset": ("keep",),
    "segment": ("there is no run",),
    "like": ("there is no run", "leaf"),
    "tensors": ("is missing",),
}


def loss(params, batch):
    """A loss that looks at its batch only if it is there."""
    return (params["w"] ** 2).sum() if batch is None else ((params["w"] - batch) ** 2).mean()


def params():
    return {"w": torch.full((3,), 0.5)}


TX = bc.sgld(0.1, temperature=0.1)
STEP = bc.make_step(loss, TX)
PARALLEL = bc.parallel(STEP, 2)
CUBE = torch.eye(3).expand(2, 3, 3) + 0.1
VI = bc.vi.mean_field(bc.adam(0.1), temperature=0.1)
EKF = bc.ekf.dense()
DATA = torch.linspace(-1.0, 1.0, 36).reshape(12, 3)
BATCHES = list(DATA.split(3))
DRAWS = bc.Draws.from_trees([{"w": torch.full((3,), float(i)) + torch.sin(torch.arange(3.0) * i)} for i in range(16)])
OTHER = DRAWS.with_columns(
    {n: x + (n[0] != "_") for n, x in DRAWS.columns().items()}, chains=None, complete=True, why=""
)
MODEL = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).eval()
NORMED = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
REFERRING = bc.make_step(bc.gradients.svrg(loss, BATCHES), TX)  # a step with a reference to move
PAIRS = [(DATA[:6], torch.arange(6) % 2), (DATA[6:], torch.arange(6) % 2)]
LIKELIHOOD = bc.likelihoods.categorical()


def run():
    return {"step": STEP, "params": params(), "state": TX.init(params()), "batches": None, "steps": 4}


def optimizer(model=NORMED):
    return bc.optim.SGHMC(model.parameters(), lr=0.1, temperature=0.1)


def of_chains():
    """An optimizer of chains."""
    return bc.optim.Optimizer(NORMED.parameters(), lambda group: bc.sghmc(0.1, temperature=0.1))


def ivon():
    """An optimizer that carries a posterior."""
    return bc.optim.IVON(NORMED.parameters(), lr=0.1, temperature=0.1)


def drawn():
    """The same behind the gradients at a draw."""
    made = ivon()
    with made.sampled():
        NORMED(DATA).square().mean().backward()
    return made


def model_step():
    """A step of a module and its optimizer."""
    model = copy.deepcopy(MODEL)
    return bc.optim.as_step(model, optimizer(model), lambda m, x: m(x).square().mean())


def moved(name, **given):
    """The batch behind a move to another place."""
    data = bc.epochs(DATA, 4)
    getattr(data, name)(**given)
    return next(iter(data))


@functools.cache
def captured():
    """A recorded step, which returns copies."""
    return bc.capture(STEP, params(), TX.init(params()), DATA[0], backend="eager", clone=True)


def watching():
    """A collector in a trainer's loop, which says where it stands."""
    return bc.collect(NORMED, every=1)


def collector():
    keep = bc.collect(NORMED, optimizer(), every=1)
    keep()
    return keep


@functools.cache
def fitted():
    return bc.fit_laplace(MODEL, LIKELIHOOD, PAIRS, tune=None)


def posterior():
    return fitted().posterior


@functools.cache
def regressed():
    """A network's last layer under Gaussian noise."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).eval()
    return bc.fit_laplace(model, bc.likelihoods.gaussian(), [(DATA, DATA[:, :1])], tune=None)


@functools.cache
def several():
    """A small ensemble of a line, with draws above T = 0."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bc.posterior_ensemble(
            torch.nn.Linear(3, 1),
            (DATA, DATA[:, :1]),
            bc.likelihoods.gaussian(),
            members=2,
            steps=20,
            lr=0.01,
            progress=False,
        )


@functools.cache
def foretold():
    return several().predict(DATA)


def _kept():
    path = Path(tempfile.mkdtemp()) / "x"
    several().save(path)
    return path


def accumulated():
    """The state of Laplace's approximation after a batch."""
    forward = lambda p, batch: batch[0] @ p["w"]  # noqa: E731
    estimate = bc.curvature.ggn(forward, bc.likelihoods.gaussian(), "dense")
    tx = bc.laplace()
    return tx.update(params(), tx.init(params()), curvature=estimate(params(), (DATA, DATA[:, 0])))[1]


def averaged():
    """The state of weight averaging after three steps."""
    tx, state, p = bc.swag(2), bc.swag(2).init(params()), params()
    for k in range(3):
        move = {"w": torch.arange(3.0) * (k + 1)}
        _, state = tx.update(move, state, params=p, inplace=False)
    return state


def noise():
    return bc.diagnostics.gradient_noise(lambda p, b: loss(p, b), params(), BATCHES, max_batches=4)


def stepping():
    """What callbacks are given in a step."""
    return next(iter(bc.iterate(STEP, params(), TX.init(params()), None, steps=1)))


@functools.cache
def cooled():
    """A report whose draws can be cooled."""
    product = bc.diagnostics.hessian_product(loss, params(), BATCHES)
    tx = bc.sghmc(0.001, 0.5, temperature=0.1)
    return bc.diagnostics.heating(tx, noise(), order="independent", steps_per_epoch=4, curvature=product, again=noise())


def stepped(make, **options):
    """One step of an optimizer of this kind, and its parameters."""
    weight = torch.nn.Parameter(torch.full((4, 4), 0.5))
    given = options.pop("params", None)
    made = make([weight] if given is None else given, **options)
    if given is not None:
        return None
    for _ in range(2):
        weight.grad = torch.full((4, 4), 0.25)
        if isinstance(made, torch.optim.LBFGS) or "LBFGS" in type(made).__name__:
            made.step(lambda: (weight**2).sum())
        elif "SparseAdam" in type(made).__name__:
            weight.grad = weight.grad.to_sparse()
            made.step()
        elif "IVON" in type(made).__name__:
            with made.sampled():
                weight.grad = weight.detach().clone()
            made.step()
        else:
            made.step()
    return weight.detach()


def functions(module, names):
    """A table of calls."""
    return {f"{module}{name}": call for name, call in names.items()}


CALLS = {
    # runs
    "sample": (
        bc.sample,
        lambda: {
            **run(), "burn_in": 1, "thinning": 1, "seed": 1, "checkpoint_seconds": 1.0, "chains": None, "callbacks": (),
            "segment": None,
        },
    ),
    "iterate": (lambda **k: list(bc.iterate(**k)), lambda: {**run(), "burn_in": 0, "thinning": 1}),
    "collect": (
        lambda **k: bc.collect(**k) and None,
        lambda: {"model": NORMED, "optimizer": optimizer(), "every": 2, "after": 0, "checkpoint_seconds": 1.0},
    ),
    "refresh_batch_norm": (
        bc.refresh_batch_norm,
        lambda: {
            "module": NORMED, "draws": bc.Draws.from_trees([NORMED] * 2), "loader": [torch.randn(4, 3)], "inputs": None,
        },
    ),
    "save": (
        bc.save, lambda: {"path": Path(tempfile.mkdtemp()) / "x", "tree": params(), "tx": TX}
    ),
    "load": (lambda **k: bc.load(**k), lambda: {"path": _saved(), "like": params(), "tx": None}),
    "Draws.from_trees": (bc.Draws.from_trees, lambda: {"trees": [{"w": torch.ones(3)}], "chains": None}),
    "Draws.open": (
        bc.Draws.open, lambda: {"path": "/nowhere", "like": None, "segment": None, "damaged": "refuse"}
    ),
    "Draws.segments": (bc.Draws.segments, lambda: {"path": tempfile.gettempdir()}),
    "Draws.thin": (DRAWS.thin, lambda: {"every": 2}),
    "Draws.merge": (lambda other: DRAWS.merge(other), lambda: {"other": DRAWS}),
    "Draws.stack_chains": (lambda other: DRAWS.stack_chains(other), lambda: {"other": OTHER}),
    "Draws.to": (DRAWS.to, lambda: {"device": "cpu"}),
    "Draws.gather": (DRAWS.gather, lambda: {"mesh": None}),
    "Draws.predict": (
        DRAWS.predict,
        lambda: {
            "forward": lambda p, x: x @ p["w"], "batches": [torch.ones(2, 3)], "reduce": "mean", "chunk": 4, "transform": None,
        },
    ),
    "Draws.with_buffers": (DRAWS.with_buffers, lambda: {"buffers": {"b": torch.ones(16)}}),
    "Draws.with_columns": (
        DRAWS.with_columns, lambda: {"columns": DRAWS.columns(), "chains": None, "complete": True, "why": ""}
    ),
    "Draws.to_arviz": (lambda **k: DRAWS.to_arviz(**k) and None, lambda: {"log_likelihood": torch.ones(16, 2)}),
    "Collector.predict": (
        lambda **k: collector().predict(**k),
        lambda: {"batches": [torch.ones(2, 3)], "reduce": "mean", "chunk": 4, "inputs": None, "transform": None},
    ),
    "Collector.load_state_dict": (lambda **k: collector().load_state_dict(**k), lambda: {"state": {"step": 3}}),
    "Collector.on_step_end": (
        lambda **k: watching().on_step_end(**k),
        lambda: {"args": None, "state": SimpleNamespace(global_step=1), "control": None},
    ),
    "Collector.on_train_begin": (
        lambda **k: watching().on_train_begin(**k),
        lambda: {"args": None, "state": SimpleNamespace(global_step=1), "control": None},
    ),
    "Collector.on_train_start": (
        lambda **k: watching().on_train_start(**k), lambda: {"trainer": SimpleNamespace(global_step=1)}
    ),
    "Collector.on_train_batch_end": (
        lambda **k: watching().on_train_batch_end(**k), lambda: {"trainer": SimpleNamespace(global_step=1)}
    ),
    "Collector.__call__": (lambda **k: collector()(**k), lambda: {"step": 2}),
    # the loop
    "make_step": (
        lambda **k: bc.make_step(**k)(params(), TX.init(params()), None),
        lambda: {"loss": loss, "tx": TX, "microbatches": 1, "autocast": None, "inplace": False, "check_finite": False,
                 "monitor": False, "keywords": None, "curvature": None, "buffers": None},
    ),
    "Step.__call__": (STEP, lambda: {"params": params(), "state": TX.init(params()), "batch": None}),
    "Step.refresh": (REFERRING.refresh, lambda: {"params": params(), "state": REFERRING.init(params())}),
    "Step.init": (STEP.init, lambda: {"params": params(), "like": None, "tx": None, "generator": None}),
    "parallel": (
        lambda **k: bc.parallel(**k) and None,
        lambda: {"step": STEP, "n": 2, "batch_dim": None, "each": None, "chunk": None, "loop": False},
    ),
    "Parallel.init": (
        lambda **k: bc.parallel(STEP, 2).init(**k), lambda: {"tx": TX, "params": bc.stack([params()] * 2), "seed": 1}
    ),
    "Parallel.__call__": (
        PARALLEL,
        lambda: {"params": bc.stack([params()] * 2), "state": PARALLEL.init(TX, bc.stack([params()] * 2)), "batch": None},
    ),
    "Parallel.gather": (lambda **k: PARALLEL.gather(**k), lambda: {"draws": DRAWS}),
    "Parallel.mine": (lambda **k: PARALLEL.mine(**k), lambda: {"tree": bc.stack([params()] * 2)}),
    "Captured.__call__": (
        lambda **k: captured()(**k), lambda: {"params": params(), "state": TX.init(params()), "batch": DATA[0]}
    ),
    "capture": (
        lambda **k: bc.capture(**k) and None,
        lambda: {"step": STEP, "params": params(), "state": TX.init(params()), "batch": None, "steps": 1, "batch_dim": None,
                 "draws": False, "clone": False, "backend": "eager"},
    ),
    "stack": (bc.stack, lambda: {"trees": [params(), params()]}),
    "unstack": (bc.unstack, lambda: {"tree": bc.stack([params()] * 2)}),
    "fork": (bc.fork, lambda: {"state": TX.init(params()), "n": 2, "generator": None}),
    "state_dict": (bc.state_dict, lambda: {"state": TX.init(params())}),
    "load_state_dict": (
        bc.load_state_dict,
        lambda: {"state": TX.init(params()), "tensors": bc.state_dict(TX.init(params())), "strict": True},
    ),
    "epochs": (
        lambda **k: next(iter(bc.epochs(**k))),
        lambda: {"data": DATA, "batch_size": 4, "order": "reshuffled", "seed": 0, "chains": None, "leave_out": None,
                 "with_rows": False},
    ),
    "Epochs.batch": (lambda **k: bc.epochs(DATA, 4).batch(**k), lambda: {"epoch": 1, "offset": 2}),
    "Epochs.batch_at": (lambda **k: bc.epochs(DATA, 4).batch_at(**k), lambda: {"step": torch.tensor(5)}),
    "Epochs.parts": (lambda **k: list(bc.epochs(DATA, 4).parts(**k)), lambda: {"size": 5, "shuffled": False}),
    "Epochs.rows": (lambda **k: bc.epochs(DATA, 4).rows(**k), lambda: {"epoch": 1, "offset": 2}),
    "Epochs.seek": (lambda **k: moved("seek", **k), lambda: {"step": 2}),
    "Epochs.set_epoch": (lambda **k: moved("set_epoch", **k), lambda: {"epoch": 2}),
    "Epochs.load_state_dict": (
        lambda **k: bc.epochs(DATA, 4).load_state_dict(**k), lambda: {"state": bc.epochs(DATA, 4).state_dict()}
    ),
    "make_functional": (
        lambda **k: bc.make_functional(**k) and None, lambda: {"module": MODEL, "inputs": None, "outputs": None}
    ),
    "write_back": (
        lambda **k: bc.write_back(**k),
        lambda: {"module": copy.deepcopy(MODEL), "params": dict(bc.make_functional(MODEL).params), "buffers": None},
    ),
    # chains
    "Chain.init": (TX.init, lambda: {"params": params(), "like": None}),
    "chain": (lambda link: bc.chain(link, bc.scale_by_neg_lr(0.1)) and None, lambda: {"link": bc.add_momentum(0.9)}),
    "masked": (lambda **k: bc.masked(**k).init(params()), lambda: {"link": bc.sgd(0.1), "mask": {"w": True}}),
    "partition": (
        lambda **k: bc.partition(**k).init(params()),
        lambda: {"transformations": {"a": bc.sgd(0.1)}, "labels": {"w": "a"}},
    ),
    "skip_nonfinite": (lambda **k: bc.skip_nonfinite(**k).init(params()), lambda: {"tx": bc.sgd(0.1)}),
    "with_response": (
        lambda **k: bc.with_response(**k) and None,
        lambda: {"link": bc.sgd(0.1), "response": bc.add_momentum(0.9).links[0].response, "name": None, "rescale": None},
    ),
    "with_master_weights": (lambda **k: bc.with_master_weights(**k).init(params()), lambda: {"tx": bc.sgd(0.1)}),
    "MasterWeights.masters": (
        bc.with_master_weights(bc.sgd(0.1)).masters,
        lambda: {"state": bc.with_master_weights(bc.sgd(0.1)).init(params()), "params": params()},
    ),
    # Gaussian posteriors
    "fit_laplace": (
        lambda **k: bc.fit_laplace(**k) and None,
        lambda: {"module_or_forward": MODEL, "likelihood": LIKELIHOOD, "loader": PAIRS, "params": None, "structure": "diagonal",
                 "subset": "last_layer", "tune": None, "tune_noise": True, "prior_precision": 1.0, "prior_structure": None,
                 "validation": None, "inputs": None},
    ),
    "FittedLaplace.predict": (
        lambda **k: fitted().predict(**k), lambda: {"data": DATA, "method": "probit", "samples": 3, "generator": None}
    ),
    "FittedLaplace.predictive": (lambda **k: fitted().predictive(**k), lambda: {"data": DATA}),
    "FittedLaplace.outputs": (
        lambda **k: regressed().outputs(**k),
        lambda: {"data": DATA, "joint": False, "prior_precision": 1.0, "likelihood_scale": 1.0},
    ),
    "FittedLaplace.functional_samples": (
        lambda **k: fitted().functional_samples(**k), lambda: {"data": DATA, "samples": 2, "generator": None}
    ),
    "FittedLaplace.dispersion": (lambda **k: regressed().dispersion(**k), lambda: {"data": [(DATA, DATA[:, :1])]}),
    "FittedLaplace.log_evidence_at": (
        lambda **k: regressed().log_evidence_at(**k), lambda: {"prior_precision": 1.0, "likelihood_scale": 1.0}
    ),
    "FittedLaplace.load_state_dict": (
        lambda **k: fitted().load_state_dict(**k) and None, lambda: {"state": fitted().state_dict()}
    ),
    "FittedLaplace.refit": (
        lambda **k: fitted().refit(**k) and None, lambda: {"loader": PAIRS, "progress": False}
    ),
    **{
        f"{of}.{name}": (lambda make=make, name=name, **k: getattr(make(), name)(**k), sound)
        for of, make in (("Prediction", lambda: regressed().predictive(DATA)), ("EnsemblePrediction", lambda: foretold()))
        for name, sound in (
            ("log_prob", lambda: {"targets": DATA[:, :1]}),
            ("crps", lambda: {"targets": DATA[:, :1]}),
            ("quantile", lambda: {"level": 0.5}),
            ("interval", lambda: {"level": 0.5}),
            ("sample", lambda: {"samples": 2, "generator": None}),
        )
    },
    "Prediction.expected_mean": (lambda **k: regressed().predictive(DATA).expected_mean(**k), lambda: {"method": None}),
    "EnsemblePrediction.average": (lambda **k: foretold().average(**k), lambda: {"values": foretold().outputs}),
    "EnsemblePrediction.cdf": (lambda **k: foretold().cdf(**k), lambda: {"values": DATA[:, :1]}),
    "EnsemblePrediction.of": (
        lambda **k: ensemble.EnsemblePrediction.of(**k).mean,
        lambda: {"likelihood": bc.likelihoods.gaussian(), "outputs": torch.ones(2, 3, 1),
                 "log_weights": torch.full((2,), 0.5).log()},
    ),
    "Ensemble.draws": (lambda **k: several().draws(**k), lambda: {"level": 0}),
    "Ensemble.more": (lambda **k: several().more(**k) and None, lambda: {"steps": 60}),
    "Ensemble.open": (
        lambda **k: ensemble.Ensemble.open(**k) and None,
        lambda: {"path": _kept(), "make_model": torch.nn.Linear(3, 1), "likelihood": bc.likelihoods.gaussian(), "data": None},
    ),
    "Ensemble.predict": (lambda **k: several().predict(**k).mean, lambda: {"data": DATA}),
    "Ensemble.save": (lambda **k: several().save(**k), lambda: {"path": Path(tempfile.mkdtemp()) / "x"}),
    "Ensemble.to_arviz": (lambda **k: several().to_arviz(**k) and None, lambda: {"level": 0}),
    "Gaussian.sample": (lambda **k: posterior().sample(**k), lambda: {"shape": (2,), "generator": None}),
    "Gaussian.log_prob": (lambda **k: posterior().log_prob(**k), lambda: {"tree": posterior().mean}),
    "Gaussian.log_evidence": (lambda **k: posterior().log_evidence(**k), lambda: {"log_joint": 1.0}),
    "Laplace.posterior": (
        lambda **k: bc.laplace().posterior(**k),
        lambda: {"state": accumulated(), "params": params(), "prior_precision": 1.0, "prior": None, "temperature": None,
                 "likelihood_scale": 1.0},
    ),
    "Laplace.log_evidence": (
        lambda **k: bc.laplace().log_evidence(**k),
        lambda: {"state": accumulated(), "params": params(), "log_likelihood": -1.0, "prior_precision": 1.0,
                 "likelihood_scale": 1.0},
    ),
    "Swag.mean": (bc.swag(2).mean, lambda: {"state": averaged(), "params": params()}),
    "Swag.posterior": (bc.swag(2).posterior, lambda: {"state": averaged(), "params": params()}),
    "VariationalTransform.sample": (VI.sample, lambda: {"state": VI.init(params()), "params": params()}),
    "VariationalTransform.posterior": (VI.posterior, lambda: {"state": VI.init(params()), "params": params()}),
    "VariationalTransform.negative_elbo": (
        VI.negative_elbo,
        lambda: {"state": VI.init(params()), "loss": torch.tensor(1.0), "draw": VI.sample(VI.init(params()), params())},
    ),
    "KalmanFilter.posterior": (EKF.posterior, lambda: {"state": EKF.init(params()), "params": params()}),
    "KalmanFilter.predict": (EKF.predict, lambda: {"state": EKF.init(params()), "params": params()}),
    "KalmanFilter.log_evidence": (EKF.log_evidence, lambda: {"state": EKF.init(params())}),
    "KalmanFilter.smooth": (
        EKF.smooth, lambda: {"history": [(params(), EKF.init(params()))], "transition_noise": None}
    ),
    "swag": (
        lambda **k: bc.swag(**k).init(params()), lambda: {"rank": 2, "start": 0, "every": 1, "variance_floor": 1e-30}
    ),
    "posterior_ensemble": (
        lambda **k: bc.posterior_ensemble(**k) and None,
        lambda: {"make_model": lambda: torch.nn.Linear(3, 2), "data": (DATA, torch.arange(12) % 2), "likelihood": LIKELIHOOD,
                 "members": 2, "steps": 20, "batch_size": 4, "lr": 0.01, "prior_precision": 1.0, "held_out": 0.25,
                 "temperatures": (0.5, 1.0), "seed": 0, "progress": False},
    ),
    "tune_by_evidence": (
        bc.fitting.tune_by_evidence,
        lambda: {"log_evidence": lambda h: h.log() - h / 3, "start": torch.tensor(1.0, dtype=torch.float64), "steps": 5},
    ),
    "tune_by_validation": (
        bc.fitting.tune_by_validation, lambda: {"loss": lambda c: torch.tensor(float(c)) ** 2, "candidates": [1.0, 2.0]}
    ),
    "vi.negative_elbo": (
        bc.vi.negative_elbo,
        lambda: {"loss": _smooth, "posterior": _normal(), "batch": None, "temperature": 0.1, "n_samples": 3,
                 "generator": None},
    ),
    # predictions
    "predict.classification_metrics": (
        bc.predict.classification_metrics,
        lambda: {"log_probabilities": torch.randn(6, 2).log_softmax(-1), "targets": torch.arange(6) % 2, "bins": 3},
    ),
    "predict.conformal_level": (
        bc.predict.conformal_level, lambda: {"prediction": foretold(), "targets": DATA[:, :1], "level": 0.5}
    ),
    "predict.detection_auroc": (
        bc.predict.detection_auroc, lambda: {"known": torch.randn(4), "unknown": torch.randn(5)}
    ),
    "predict.functional_samples": (
        bc.predict.functional_samples,
        lambda: {"forward": line, "posterior": _normal(), "batch": DATA, "samples": 2, "generator": None},
    ),
    "predict.linearized": (
        bc.predict.linearized,
        lambda: {"forward": line, "posterior": _normal(), "batch": DATA, "joint": False, "chunk_bytes": None},
    ),
    "predict.monte_carlo": (
        bc.predict.monte_carlo,
        lambda: {"forward": line, "posterior": _normal(), "batch": DATA, "samples": 2, "generator": None},
    ),
    "predict.laplace_bridge": (bc.predict.laplace_bridge, lambda: {"mean": torch.ones(2, 3), "covariance": CUBE}),
    "predict.probit": (bc.predict.probit, lambda: {"mean": torch.ones(2, 3), "covariance": CUBE}),
    "predict.softmax_mean": (bc.predict.softmax_mean, lambda: {"mean": torch.ones(2, 3), "covariance": CUBE, "pairs": 4}),
    "predict.probit_bernoulli": (
        bc.predict.probit_bernoulli, lambda: {"mean": torch.ones(2, 3), "variance": torch.ones(2, 3)}
    ),
    "predict.regression_metrics": (
        bc.predict.regression_metrics,
        lambda: {"mean": torch.ones(3), "variance": torch.ones(3), "targets": torch.zeros(3), "level": 0.5},
    ),
    "predict.temperature_scaling": (
        bc.predict.temperature_scaling, lambda: {"logits": torch.randn(6, 2), "targets": torch.arange(6) % 2}
    ),
    "predict.uncertainty_of_classes": (
        bc.predict.uncertainty_of_classes, lambda: {"probabilities": torch.full((4, 2, 3), 1 / 3)}
    ),
    "predict.uncertainty_of_moments": (
        bc.predict.uncertainty_of_moments, lambda: {"means": torch.ones(4, 2), "variances": 0.5}
    ),
    # diagnostics
    "diagnostics.ess": (bc.diagnostics.ess, lambda: {"draws": DRAWS, "kind": "bulk"}),
    "diagnostics.r_hat": (bc.diagnostics.r_hat, lambda: {"draws": DRAWS.stack_chains(OTHER), "superchains": None}),
    "diagnostics.ksd": (
        bc.diagnostics.ksd,
        lambda: {"draws": DRAWS, "score": lambda p: {"w": -p["w"]}, "kernel": "imq", "bandwidth": None, "unbiased": False,
                 "block": 8},
    ),
    "diagnostics.gradient_noise": (
        bc.diagnostics.gradient_noise,
        lambda: {"loss": loss, "params": params(), "batches": BATCHES, "tx": None, "state": None, "rank": 2, "max_batches": 4},
    ),
    "diagnostics.heating": (
        bc.diagnostics.heating,
        lambda: {"tx": TX, "noise": noise(), "order": "independent", "steps_per_epoch": 4, "curvature": None, "state": None,
                 "again": None},
    ),
    "diagnostics.tune_mclmc": (
        bc.diagnostics.tune_mclmc,
        lambda: {"loss": loss, "params": params(), "batch": BATCHES[0], "temperature": 0.1, "precision": None,
                 "energy_variance": 5e-4, "steps": 20},
    ),
    "diagnostics.hessian_product": (
        lambda **k: bc.diagnostics.hessian_product(**k)({"w": torch.ones(3)}),
        lambda: {"loss": loss, "params": params(), "batches": BATCHES, "max_batches": 2},
    ),
    "diagnostics.temperatures": (
        bc.diagnostics.temperatures,
        lambda: {"draws": DRAWS, "tx": TX, "loss": loss, "batches": BATCHES, "thermometer": None, "temperature": None},
    ),
    "diagnostics.doctor": (
        bc.diagnostics.doctor,
        lambda: {"draws": DRAWS, "tx": TX, "loss": loss, "batches": BATCHES, "thermometer": None, "heating": None, "of": None,
                 "mode": None, "posterior_temperature": 1.0, "prior_sd": None, "level": 0.01, "directions": 2},
    ),
    "diagnostics.local_learning_coefficient": (
        bc.diagnostics.local_learning_coefficient,
        lambda: {"loss": loss, "params": params(), "batches": BATCHES, "temperature": 0.1, "lr": 0.01, "strength": 1.0,
                 "momentum": 0.9, "steps": 6, "burn_in": 2, "chains": 2, "sampler": None},
    ),
    "diagnostics.lr_bias": (
        bc.diagnostics.lr_bias,
        lambda: {"build": lambda lr: bc.sgld(lr, temperature=0.1), "loss": loss, "params": params(), "batches": BATCHES,
                 "lr": 0.05, "statistic": None, "steps": 12, "burn_in": 2, "chains": 4},
    ),
    "diagnostics.Thermometer": (
        lambda **k: bc.diagnostics.Thermometer(**k) and None, lambda: {"tx": TX, "order": "independent", "warn_above": 0.1}
    ),
    "diagnostics.HeatGuard.require": (lambda **k: bc.diagnostics.HeatGuard().require(**k), lambda: {"tx": TX}),
    "diagnostics.HeatGuard.attached": (lambda **k: bc.diagnostics.HeatGuard().attached(**k) and None, lambda: {"step": STEP}),
    "diagnostics.HeatGuard.look": (
        lambda **k: bc.diagnostics.HeatGuard(share=math.inf).look(**k), lambda: {"leaves": list, "lr": 0.1}
    ),
    "diagnostics.HeatGuard.watch": (
        lambda **k: bc.diagnostics.HeatGuard(share=math.inf).watch(**k),
        lambda: {"tx": TX, "params": params(), "state": TX.init(params()), "grads": params()},
    ),
    "diagnostics.HeatGuard.__call__": (lambda **k: bc.diagnostics.HeatGuard()(**k), lambda: {"it": stepping()}),
    "diagnostics.Thermometer.__call__": (lambda **k: bc.diagnostics.Thermometer(TX)(**k), lambda: {"it": stepping()}),
    "diagnostics.Heating.cool": (
        lambda **k: cooled().cool(**k), lambda: {"draws": {"w": torch.randn(8, 3)}}
    ),
    "diagnostics.LrBias.bias": (
        bc.diagnostics.LrBias(*[torch.ones(2)] * 4).bias, lambda: {"order": 2}
    ),
    "diagnostics.HeatGuard": (
        lambda **k: bc.diagnostics.HeatGuard(**k) and None,
        lambda: {"steps_per_epoch": 4, "order": "reshuffled", "above": 1.0, "share": 0.1, "window": 32, "who": "me"},
    ),
    "suggest_chain": (
        lambda **k: bc.suggest_chain(**k) and None,
        lambda: {"make_tx": lambda lr, momentum: bc.sghmc(lr, momentum, temperature=0.1), "loss": loss, "params": params(),
                 "data": DATA, "batch_sizes": (4,), "orders": ("independent",), "momenta": (0.5,), "starts": (params(),),
                 "temperatures": (1.0, 0.1), "spent": 0.0},
    ),
    "suggest_lr": (
        lambda **k: bc.suggest_lr(**k) and None,
        lambda: {"make_tx": lambda lr: bc.sgld(lr, temperature=0.1), "loss": loss, "params": params(), "batches": BATCHES,
                 "tolerance": 0.05, "order": "independent", "steps_per_epoch": None, "state": None, "epochs": None,
                 "margin": 0.1, "rank": 2, "max_batches": 4, "seed": 0},
    ),
    # optimizers
    "optim.as_step": (
        lambda **k: (lambda s: s(s.params, s.state, torch.ones(2, 3)))(bc.optim.as_step(**k)),
        lambda: {"model": NORMED, "optimizer": optimizer(), "loss": lambda m, x: m(x).square().mean(), "scheduler": None},
    ),
    "optim.Optimizer": (
        lambda **k: stepped(bc.optim.Optimizer, **k),
        lambda: {"params": None, "make_chain": lambda group: bc.sghmc(group["lr"], temperature=0.1), "lr": 0.1},
    ),
    "optim.SGHMC.fork": (lambda **k: optimizer().fork(**k), lambda: {"generator": None}),
    "optim.SGHMC.load_state_dict": (
        lambda **k: optimizer().load_state_dict(**k), lambda: {"state_dict": optimizer().state_dict()}
    ),
    "optim.SGHMC.step": (lambda **k: optimizer().step(**k), lambda: {"closure": None}),
    "optim.SGHMC.watch": (lambda **k: optimizer().watch(**k), lambda: {"every": 3, "first": True}),
    "optim.ModelStep.__call__": (
        lambda **k: model_step()(**k),
        lambda: {"params": model_step().params, "state": model_step().state, "batch": torch.ones(2, 3)},
    ),
    "optim.Optimizer.load_state_dict": (
        lambda **k: of_chains().load_state_dict(**k), lambda: {"state_dict": of_chains().state_dict()}
    ),
    "optim.Optimizer.step": (lambda **k: of_chains().step(**k), lambda: {"closure": None}),
    "optim.Optimizer.add_param_group": (
        lambda **k: of_chains().add_param_group(**k),
        lambda: {"param_group": {"params": [torch.nn.Parameter(torch.ones(3))]}},
    ),
    "SGD.add_param_group": (
        lambda **k: bc.SGD(list(NORMED.parameters()), lr=0.1).add_param_group(**k),
        lambda: {"params": [torch.nn.Parameter(torch.ones(3))]},
    ),
    "optim.IVON.step": (lambda **k: drawn().step(**k), lambda: {"closure": None}),
    "optim.IVON.sampled": (lambda **k: ivon().sampled(**k) and None, lambda: {"draw": 0}),
    "optim.IVON.load_state_dict": (
        lambda **k: ivon().load_state_dict(**k), lambda: {"state_dict": ivon().state_dict()}
    ),
    "optim.IVON.add_param_group": (
        lambda **k: ivon().add_param_group(**k),
        lambda: {"param_group": {"params": [torch.nn.Parameter(torch.ones(3))]}},
    ),
    "optim.SGHMC.add_param_group": (
        lambda **k: optimizer().add_param_group(**k),
        lambda: {"param_group": {"params": [torch.nn.Parameter(torch.ones(3))]}},
    ),
}  # fmt: skip


def _saved():
    path = Path(tempfile.mkdtemp()) / "x"
    bc.save(path, params())
    return path


def line(p, x):
    """A line through the origin."""
    return x @ p["w"]


def _smooth(p, batch):
    return sum((x**2).sum() for x in optree.tree_leaves(p))


def _normal():
    return bc.vi.mean_field(bc.adam(0.1), temperature=0.1).posterior(
        bc.vi.mean_field(bc.adam(0.1), temperature=0.1).init(params()), params()
    )


# factories of transformations

SOUND = {  # what arguments without a default are given
    "lr": 0.01,
    "step_size": 0.01,
    "temperature": 0.1,
    "temperatures": (0.1, 0.2),
    "friction": 1.0,
    "low": -1.0,
    "high": 100.0,
    "burn_in": 1,
    "freeze_after": 2,
    "cycle": 3,
    "batch_size": 8,
    "alpha": 0.1,
    "rank": 2,
}


def factories():
    """Public functions that return a transformation, with what they cannot do without."""
    found = {}
    for space in (bc, bc.links, bc.samplers, bc.vi, bc.ekf):
        for name in getattr(space, "__all__", dir(space)):
            function = getattr(space, name)
            if inspect.isfunction(function) and not name.startswith("_"):
                found.setdefault(function, name if space is bc else f"{space.__name__.rpartition('.')[2]}.{name}")
    return {name: function for function, name in found.items()}


def sound_arguments(function):
    """Keywords with which a factory can be called, or ``None`` where it is none."""
    signature = inspect.signature(function)
    if "tx" in signature.parameters or "links" in signature.parameters or "transformations" in signature.parameters:
        return None
    given = {}
    for name, parameter in signature.parameters.items():
        if name == "temperature":
            given[name] = 0.1
        elif name == "optimizer":
            given[name] = bc.adam(0.01)
        elif name == "precision":
            given[name] = CURVATURE.add_diagonal(1.0)
        elif name == "preconditioner":
            given[name] = 0.5
        elif name == "step_size_fn":
            given[name] = lambda count: 0.1 / (1 + count)
        elif parameter.default is parameter.empty or name == "rank":
            if name not in SOUND:
                return None
            given[name] = SOUND[name]
    return given


def start():
    """Two particles, for those that need them; six parameters for all others."""
    return {
        "a": torch.tensor([[0.5, -0.3], [0.2, 0.1]], dtype=torch.float64),
        "b": torch.tensor([0.4, -0.2], dtype=torch.float64),
    }


PARAMS = start()  # of the factories' chains
ESTIMATE = bc.curvature.ggn(
    lambda p, batch: batch[0] @ p["a"].flatten() + p["b"].sum(), bc.likelihoods.gaussian(), "root"
)
SEEN = (torch.linspace(-1, 1, 12).reshape(3, 4).double(), torch.zeros(3).double())
CURVATURE = ESTIMATE(PARAMS, SEEN)
LIKE = {k: torch.ones_like(x) for k, x in PARAMS.items()}
KEYWORDS = {
    "loss": lambda name: torch.ones(2).double() if name.endswith("replica_exchange") else torch.tensor(1.0).double(),
    "per_sample_gradients": lambda name: {k: torch.stack([x, -x, 2 * x]) for k, x in LIKE.items()},
    "gradient_variance": lambda name: LIKE,
    "hessian_diagonal": lambda name: LIKE,
    "gradient_covariance": lambda name: torch.eye(6).double(),
    "curvature": lambda name: CURVATURE if name.startswith(("ekf", "vi", "laplace")) else LIKE,
}
UNFIT = {  # sound, but the keywords above are for the default
    ("samplers.sgfs", "dense"): (True,),
    ("vi.vogn", "n_samples"): (3,),
    # torch asks for an accelerator here, unless the step is compiled
    **{(f"optim.{name}", "capturable"): (True,) for name in ("Rprop", "Adadelta", "ASGD")},
}


def keywords(name, tx, state, params):
    extra = {k: make(name) for k, make in KEYWORDS.items() if k in getattr(tx, "extra_kwargs", ())}
    return extra | ({"draw": tx.sample(state, params)} if hasattr(tx, "sample") else {})


def hot(name, tx):
    """A link that has no temperature of its own, in a chain that samples."""
    name = name.removeprefix("links.")
    if name in bc.links.__all__ or (name.startswith("samplers.scale_by") and "contour" not in name):
        parts = [] if name.startswith("inject") else [bc.inject_langevin_noise(0.1)]
        rate = [] if name in ("scale_by_neg_lr",) else [bc.scale_by_neg_lr(0.01)]
        return bc.chain(tx, *parts, *rate)
    return tx


def steps_of(name, tx, gradient=None, steps=3):
    """Parameters after some steps of a chain down a parabola."""
    params = start()
    state = tx.init(params)
    for _ in range(steps):
        extra = keywords(name, tx, state, params)
        at = extra["draw"].params if "draw" in extra else params
        g = {k: x.clone() for k, x in at.items()} if gradient is None else gradient(at)
        updates, state = tx.update(g, state, params=params, inplace=False, **extra)
        params = {k: x + updates[k] for k, x in params.items()}
    return params


def is_finite(tree):
    return all(bool(torch.isfinite(x).all()) for x in optree.tree_leaves(tree))


NEVER_HOT = {
    "adadelta",
    "links.scale_by_adadelta",
    "links.delay",
    "samplers.scale_by_stein_kernel",
}  # the last: svgd has it
FACTORIES = {
    name: (f, a) for name, f in factories().items() if name not in NEVER_HOT and (a := sound_arguments(f)) is not None
}
FACTORIES = {name: f for name, f in FACTORIES.items() if isinstance(f[0](**f[1]), GradientTransformation)}


def classes():
    """The optimizers: each of their arguments, with the rest at its default."""
    table = {}
    for space, prefix in ((bc.optim, "optim."), (bc, "")):
        for name in space.__all__:
            kind = getattr(space, name)
            if not inspect.isclass(kind) or f"{prefix}{name}" in HOLDERS or f"{prefix}{name}" in CALLS:
                continue
            if not (issubclass(kind, torch.optim.Optimizer) or hasattr(kind, "zero_grad")):
                continue
            given = {"params": None, "temperature": 0.1}
            for word, parameter in inspect.signature(kind).parameters.items():
                if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) and word not in given:
                    given[word] = 0.01 if parameter.default is parameter.empty else parameter.default
            if name in (
                "AdaDelta",
                "LBFGS",
                "SparseAdam",
                "Adadelta",
                "ASGD",
                "Adafactor",
                "Muon",
                "Rprop",
            ):  # optimizers only
                given["temperature"] = 0.0
            table[f"{prefix}{name}"] = (lambda kind=kind, **k: stepped(kind, **k), lambda given=given: dict(given))
    return table


def factory_rows():
    """The factories of transformations: each of their arguments; what comes out makes three steps."""

    def call(name, function, **given):
        return steps_of(name, hot(name, function(**given)))

    rows = {}
    for name, (function, sound) in FACTORIES.items():
        rest = {
            word: parameter.default
            for word, parameter in inspect.signature(function).parameters.items()
            if word not in sound and parameter.default is not parameter.empty
        }
        rows[name] = (
            lambda name=name, function=function, **given: call(name, function, **given),
            lambda given={**sound, **rest}: dict(given),
        )
    return rows


@functools.cache
def rows():
    """Every row by its name: a call, and a function that makes its sound arguments."""
    return {**CALLS, **classes(), **factory_rows()}


def methods(of):
    """Public methods of a class of this library that take arguments, by their names."""
    found = []
    for name in dir(of):
        home = next((base for base in of.__mro__ if name in vars(base)), object)
        if not home.__module__.startswith("bayesopt_chain") or (name.startswith("_") and name != "__call__"):
            continue
        method = inspect.getattr_static(of, name)
        method = getattr(method, "__func__", method)
        if inspect.isfunction(method):
            given = [p for p in list(inspect.signature(method).parameters.values())[1:] if p.kind is not p.VAR_KEYWORD]
            if given:
                found.append(name)
    return found


def missing():
    """Names in the four namespaces that no row calls, and methods of what the rows return."""
    found = []
    spaces = {"": bc, "optim.": bc.optim, "vi.": bc.vi, "diagnostics.": bc.diagnostics, "predict.": bc.predict}
    for prefix, space in spaces.items():
        for name in space.__all__:
            known = f"{prefix}{name}" in {*rows(), *HOLDERS, "adadelta"}  # the last has no temperature above 0
            if callable(getattr(space, name)) and not known:
                found.append(f"{prefix}{name}")
    named = [(f"{name}.{method}", code(of, method)) for name, of in returned().items() for method in methods(of)]
    told = {of for row, of in named if row in {*rows(), *INTERNAL}}  # a method that several classes inherit is one
    return found + [row for row, of in named if of not in told]


def code(of, method):
    """The code of a method, which classes that inherit it share.

    Once an optimizer was made, its class has a wrapper of ``step`` of its own, which torch writes there.
    """
    function = inspect.getattr_static(of, method)
    return inspect.unwrap(getattr(function, "__func__", function)).__code__


def returned():
    """Every class of this library that the functions of the four namespaces say they return, or that stands there itself."""
    found = dict(RETURNED)
    for prefix, space in {"": bc, "optim.": bc.optim, "vi.": bc.vi, "diagnostics.": bc.diagnostics}.items():
        for name in space.__all__:
            kind = getattr(space, name)
            if not inspect.isclass(kind):
                with contextlib.suppress(Exception):  # hints that only a type checker can read
                    kind = inspect.isfunction(kind) and typing.get_type_hints(kind).get("return")
            for of in (kind, *typing.get_args(kind)):
                if inspect.isclass(of) and of.__module__.startswith("bayesopt_chain") and of not in found.values():
                    found[f"{prefix}{of.__name__}"] = of
    return found


def complaint(err, argument):
    """What is wrong with an error; nothing where it is ours and names the argument, or what of it is wrong."""
    if err.__cause__ is not None and str(err.__cause__) in str(err) and not complaint(err.__cause__, argument):
        return ""  # said again, with what to do
    frames = traceback.extract_tb(err.__traceback__)
    frame, ours = frames[-1], [i for i, x in enumerate(frames) if x.filename.startswith(HOME)]
    if ours and any(x.filename == __file__ for x in frames[ours[0] :]):
        return ""  # a function of the user's own was called with what was given
    if any("torch/nn/modules" in x.filename for x in frames):
        return ""  # a model of the user's own likewise
    if not isinstance(err, (TypeError, ValueError, IndexError, FileNotFoundError, FloatingPointError)):
        return f"{type(err).__name__} from {_place(frame)}: {err}"
    if not frame.filename.startswith(HOME):
        return f"raised in {_place(frame)}: {type(err).__name__}: {err}"
    said = str(err).lower().replace(" ", "_").replace("-", "_")
    words = {argument, argument.rstrip("s"), *ALSO.get(argument, ())}
    return "" if any(word.lower().replace(" ", "_") in said for word in words) else f"does not name {argument}: {err}"


def _place(frame):
    return f"{'/'.join(frame.filename.split('/')[-3:])}:{frame.lineno}"


def numbers(out, depth=0):
    """Tensors and numbers in a result."""
    if isinstance(out, bc.Draws):
        yield from optree.tree_leaves(out.params) if len(out) else ()
    elif isinstance(out, (torch.Tensor, float)):
        yield out
    elif isinstance(out, Mapping):
        for x in out.values():
            yield from numbers(x, depth + 1)
    elif isinstance(out, (list, tuple)):
        for x in out:
            yield from numbers(x, depth + 1)
    elif dataclasses.is_dataclass(out) and depth < 4:
        for field in dataclasses.fields(out):
            yield from numbers(getattr(out, field.name), depth + 1)


def is_nan(x):
    if isinstance(x, torch.Tensor):
        x = x.to_dense() if x.layout == torch.sparse_coo else x
        return not x.is_meta and (x.is_floating_point() or x.is_complex()) and bool(torch.isnan(x).any())
    return isinstance(x, float) and math.isnan(x)


def show(value):
    return f"{value!r}".replace("\n", "")[:60]


def is_not_finite(x):
    return is_nan(x) or (not bool(torch.isfinite(x).all()) if isinstance(x, torch.Tensor) else math.isinf(x))


def sound_is_sound(name):
    """What is wrong with the call as the table has it."""
    call, sound = rows()[name]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return [x for x in numbers(call(**sound())) if is_nan(x)]
        except Exception as err:
            return [err] if name not in ("Draws.open", "Draws.gather") else []  # of no folder, and of no ranks


def endless(number, frame):
    raise TimeoutError(f"it did not end within {SECONDS} s")


def values_of(name, argument, now, few):
    """What is put in the place of an argument: all values, or a few of them, which the names of row and argument decide."""
    values = [*VALUES, *PAIRS] if isinstance(now, tuple) and len(now) == 2 and name in FACTORIES else VALUES
    values = [x for x in values if not any(x is y for y in UNFIT.get((name, argument), ()))]
    values = [
        x for x in values if not (callable(x) and callable(now))
    ]  # somebody's function, which fails in its own words
    if few is None:
        return values
    if name in SLOW:
        return [object()]
    first = zlib.crc32(f"{name}.{argument}".encode()) % len(values)
    return [values[(first + k * (len(values) // few)) % len(values)] for k in range(few)]


def failures(name, few=None):
    """Calls of a row that end wrongly, and how many were made; with ``few`` only so many for each argument."""
    call, sound = rows()[name]
    found, calls = [], 0
    wrong_number = is_not_finite if name in FACTORIES else is_nan
    signal.signal(signal.SIGALRM, endless)
    os.chdir(tempfile.mkdtemp())  # in which a file called x may be written
    for argument, now in sound().items():
        for value in values_of(name, argument, now, few):
            given = sound()
            value = iter([1]) if hasattr(value, "__next__") else value
            calls += 1
            torch.manual_seed(0)
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                signal.alarm(SECONDS)
                try:
                    out = call(**{**given, argument: value})
                    signal.alarm(0)
                except Exception as err:
                    signal.alarm(0)
                    wrong = complaint(err, argument)
                else:
                    told = (argument == "batch" or not isinstance(value, float)) and any(map(is_nan, numbers(value)))
                    wrong = "" if told or not any(map(wrong_number, numbers(out))) else "silently not a number"
            if wrong:
                found.append(f"{name}({argument}={show(value)}): {wrong}"[:330])
    return found, calls
