"""Every public factory and every ``update``, fed numbers, types and trees that make no sense: right, or refused by name.

Each argument of each factory is replaced by each of ``VALUES``, everything else being sound and the temperature positive (at
temperature 0 the oracle is TorchOpt). What comes out either is a ``TypeError`` or ``ValueError`` raised in this library whose
message names the argument, or a transformation whose steps are finite. The same values are fed to ``update``.
"""

import inspect
import math
import traceback
import warnings
from pathlib import Path

import optree
import pytest
import torch
from torchopt.base import GradientTransformation

import bayesopt_chain as bc
from tests import fuzzing

HOME = str(Path(bc.__file__).parent)
NAN, INF = math.nan, math.inf

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
VALUES = [
    NAN,
    INF,
    -INF,
    -1.0,
    0.0,
    1.0,
    2.0,
    1e30,
    1e-30,
    3,
    -2,
    0,
    10**400,
    True,
    None,
    "x",
    (),
    [],
    {},
    1j,
    object(),
]
VALUES += [torch.tensor(x) for x in (NAN, INF, -1.0, 0.5, 1j)] + [torch.ones(2), torch.tensor(True), lambda count: 0.1]
PAIRS = [
    (NAN, 0.9),
    (0.9, NAN),
    (-0.1, 0.9),
    (0.9, 1.0),
    (1.0, 0.9),
    (INF, 0.9),
    (0.9,),
    (0.9, 0.99, 0.999),
    ("a", "b"),
]
ALSO_CALLED = {  # what messages call an argument, besides its name
    "lr": ("learning rate", "step_size"),
    "b1": ("beta", "betas"),
    "b2": ("beta", "betas"),
    "step_size_fn": ("step_size", "schedule"),
    "init_scale": ("init scale",),
    "low": ("high",),
    "high": ("low",),
    "alpha": ("decay",),
    "step_size": ("gains", "lr"),
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


PARAMS = start()
ESTIMATE = bc.curvature.ggn(
    lambda p, batch: batch[0] @ p["a"].flatten() + p["b"].sum(), bc.likelihoods.gaussian(), "root"
)
INPUTS = (torch.linspace(-1, 1, 12).reshape(3, 4).double(), torch.zeros(3).double())
CURVATURE = ESTIMATE(PARAMS, INPUTS)
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


def run(name, tx, gradient=None, steps=3):
    """Parameters after some steps down a parabola."""
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


def complaint(err, argument, value):
    """What is wrong with an error; nothing if it is a TypeError or ValueError of ours that names the argument."""
    frame = traceback.extract_tb(err.__traceback__)[-1]
    said = str(err).lower().replace(" ", "_").replace("-", "_")
    names = [argument, *ALSO_CALLED.get(argument, ())]
    if type(err) not in (TypeError, ValueError):
        return f"{type(err).__name__} from {frame.filename}:{frame.lineno}: {err}"
    if not frame.filename.startswith(HOME):
        return f"not raised in the library but in {frame.filename}:{frame.lineno}: {err}"
    if not any(word.lower().replace(" ", "_") in said for word in names):
        return f"does not name the argument: {err}"
    return ""


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


def show(value):
    return f"{value!r}"[:40]


def failures_of(name):
    function, sound = FACTORIES[name]
    found = []
    for argument, parameter in inspect.signature(function).parameters.items():
        values = PAIRS if isinstance(parameter.default, tuple) else VALUES
        for value in values:
            if any(value is x for x in UNFIT.get((name, argument), ())):
                continue
            torch.manual_seed(0)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    params = run(name, hot(name, function(**{**sound, argument: value})))
            except Exception as err:
                wrong = complaint(err, argument, value)
            else:
                wrong = "" if is_finite(params) else "silently not finite"
            if wrong:
                found.append(f"{name}({argument}={show(value)}): {wrong}"[:300])
    return found


def test_the_list_of_factories_is_whole():
    """The sound arguments are sound, and whatever is public and returns a transformation is among them."""
    assert len(FACTORIES) >= 50
    for name, (function, sound) in FACTORIES.items():
        assert is_finite(run(name, hot(name, function(**sound)))), name


@pytest.mark.slow
@pytest.mark.parametrize("name", FACTORIES)
def test_a_senseless_argument_is_refused_by_name_or_harmless(name):
    assert not failures_of(name)


def tree(a=PARAMS["a"], b=PARAMS["b"]):
    return {"a": a, "b": b}


A, B = PARAMS["a"], PARAMS["b"]
GRADIENTS = {
    "a list": [A, B],
    "a leaf short": {"a": A},
    "a leaf too many": {"a": A, "b": B, "c": B},
    "another shape": tree(b=torch.ones(3, dtype=torch.float64)),
    "a row too many": tree(a=torch.ones(3, 2, dtype=torch.float64)),
    "float32": tree(b=B.float()),
    "integers": tree(b=torch.ones(2, dtype=torch.int64)),
    "complex": tree(b=B + 1j),
    "a number": tree(b=1.0),
    "a word": tree(b="x"),
    "an array": tree(b=B.numpy()),
    "sparse": tree(b=B.to_sparse()),
    "elsewhere": tree(b=B.to("meta")),
    "none": None,
    "one tensor": A,
}
STATES = {
    "none": lambda state: None,
    "empty": lambda state: (),
    "a dict": lambda state: {},
    "a tensor": lambda state: A,
}
WORDS = ("update", "gradient", "state", "params", "leaf", "leaves", "tree")


def verdict(name, call):
    """What is wrong with how a call ended: nothing if it is refused in our words; ``None`` if it went through."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except Exception as err:
        frame = traceback.extract_tb(err.__traceback__)[-1]
        if type(err) not in (TypeError, ValueError) or not frame.filename.startswith(HOME):
            return f"{type(err).__name__} from {frame.filename}:{frame.lineno}: {err}"[:300]
        if not any(word in str(err) for word in WORDS):
            return f"does not name what is wrong: {err}"[:300]
        return ""
    return None


def made(name):
    function, sound = FACTORIES[name]
    tx = hot(name, function(**sound))
    torch.manual_seed(0)
    state = tx.init(start())
    return tx, state, keywords(name, tx, state, start())


@pytest.mark.parametrize("name", [name for name in FACTORIES if name != "laplace"])  # which passes them on unread
def test_gradients_that_do_not_fit_are_refused_in_our_words(name):
    tx, state, extra = made(name)
    found = {}
    for kind, g in GRADIENTS.items():
        wrong = verdict(name, lambda g=g: tx.update(g, state, params=start(), inplace=False, **extra))
        if wrong or wrong is None:
            found[kind] = wrong or "went through"
    assert not found


@pytest.mark.parametrize("name", FACTORIES)
def test_a_state_that_is_not_this_chains_is_refused_in_our_words(name):
    tx, state, extra = made(name)
    found = {}
    for kind, of in STATES.items():
        wrong = verdict(name, lambda of=of: tx.update(tree(), of(state), params=start(), inplace=False, **extra))
        if wrong or wrong is None:
            found[kind] = wrong or "went through"
    assert not found


@pytest.mark.parametrize("name", FACTORIES)
def test_a_gradient_that_is_not_a_number_shows(name):
    """In the parameters, at once or in the next step: no rule makes a finite move of it and goes on."""
    tx, state, _ = made(name)
    bad, params = A.clone(), start()
    bad[0, 0] = NAN
    try:
        for g in (tree(a=bad), tree()):
            updates, state = tx.update(g, state, params=params, inplace=False, **keywords(name, tx, state, params))
            params = {k: x + updates[k] for k, x in params.items()}
    except ValueError as err:
        assert "finite" in str(err) or "nan" in str(err)
    else:
        assert not bool(torch.isfinite(params["a"][0, 0]))


# everything else that a user calls: the table of tests/fuzzing.py, of which ``python -m benchmarks.fuzz`` tries every value

FEW = fuzzing.VALUES[::6]
OPEN = {  # rows of which some wrong value is not refused by name yet, or that take too long here: the command shows which
    "iterate",
    "Step.__call__",
    "Step.init",
    "Parallel.init",
    "fork",
    "epochs",
    "Chain.init",
    "masked",
    "partition",
    "with_stream",
    "fit_laplace",
    "FittedLaplace.predict",
    "tune_by_evidence",
    "diagnostics.r_hat",
    "diagnostics.ksd",
    "diagnostics.gradient_noise",
    "diagnostics.heating",
    "diagnostics.hessian_product",
    "diagnostics.temperatures",
    "diagnostics.local_learning_coefficient",
    "diagnostics.lr_bias",
    "diagnostics.HeatGuard",
    "suggest_lr",
    "optim.as_step",
    "optim.Optimizer",
    "optim.SGHMC.fork",
    "optim.SGHMC.load_state_dict",
    "optim.SGHMC.add_param_group",
    "vi.negative_elbo",
    "diagnostics.ess",
}
ROWS = [name for name in fuzzing.CALLS if name not in fuzzing.SLOW and name not in OPEN]


def test_every_public_callable_has_a_row():
    assert not fuzzing.missing()


@pytest.mark.parametrize("name", ROWS)
def test_a_call_of_the_table_is_sound(name):
    assert not fuzzing.sound_is_sound(name)


@pytest.mark.parametrize("name", ROWS)
def test_arguments_of_ordinary_kinds_are_refused_by_name_or_harmless(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # and back behind the test
    found, calls = fuzzing.failures(name, FEW)
    assert calls and not found, "\n".join(found)
