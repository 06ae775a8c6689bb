"""What users give to what the library has: refused by name, or harmless.

Arguments of ordinary kinds in the wrong places (:mod:`tests.fuzzing` has the table; here are a few values for each argument,
``python -m benchmarks.fuzz`` takes all of them), gradients and states that do not fit, and gradients that are not numbers.
"""

import math
import traceback
import warnings

import pytest
import torch

import bayesopt_chain as bc
from tests import fuzzing
from tests.fuzzing import FACTORIES, PARAMS

FEW = 2  # values for each argument
ROWS = list(fuzzing.rows())


def test_every_public_callable_has_a_row():
    assert not fuzzing.missing()
    for make in (bc.optim.LBFGS, bc.optim.SparseAdam):  # torch changes a class when its first object is made
        make([torch.nn.Parameter(torch.zeros(2))])
    assert not fuzzing.missing()


def test_the_factories_are_found():
    assert len(FACTORIES) >= 50


@pytest.mark.parametrize("name", [name for name in ROWS if name not in fuzzing.SLOW])
def test_a_call_of_the_table_is_sound(name):
    assert not fuzzing.sound_is_sound(name)


@pytest.mark.parametrize("name", ROWS)
def test_arguments_of_ordinary_kinds_are_refused_by_name_or_harmless(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # and back behind the test
    found, _ = fuzzing.failures(name, FEW)
    assert not found, "\n".join(found)


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
        if type(err) not in (TypeError, ValueError) or not frame.filename.startswith(fuzzing.HOME):
            return f"{type(err).__name__} from {frame.filename}:{frame.lineno}: {err}"[:300]
        if not any(word in str(err) for word in WORDS):
            return f"does not name what is wrong: {err}"[:300]
        return ""
    return None


def made(name):
    function, sound = FACTORIES[name]
    tx = fuzzing.hot(name, function(**sound))
    torch.manual_seed(0)
    state = tx.init(fuzzing.start())
    return tx, state, fuzzing.keywords(name, tx, state, fuzzing.start())


@pytest.mark.parametrize("name", [name for name in FACTORIES if name != "laplace"])  # which passes them on unread
def test_gradients_that_do_not_fit_are_refused_in_our_words(name):
    tx, state, extra = made(name)
    found = {}
    for kind, g in GRADIENTS.items():
        wrong = verdict(name, lambda g=g: tx.update(g, state, params=fuzzing.start(), inplace=False, **extra))
        if wrong or wrong is None:
            found[kind] = wrong or "went through"
    assert not found


@pytest.mark.parametrize("name", FACTORIES)
def test_a_state_that_is_not_this_chains_is_refused_in_our_words(name):
    tx, state, extra = made(name)
    found = {}
    for kind, of in STATES.items():
        wrong = verdict(
            name, lambda of=of: tx.update(tree(), of(state), params=fuzzing.start(), inplace=False, **extra)
        )
        if wrong or wrong is None:
            found[kind] = wrong or "went through"
    assert not found


@pytest.mark.parametrize("name", FACTORIES)
def test_a_gradient_that_is_not_a_number_shows(name):
    """In the parameters, at once or in the next step: no rule makes a finite move of it and goes on."""
    tx, state, _ = made(name)
    bad, params = A.clone(), fuzzing.start()
    bad[0, 0] = math.nan
    try:
        for g in (tree(a=bad), tree()):
            updates, state = tx.update(
                g, state, params=params, inplace=False, **fuzzing.keywords(name, tx, state, params)
            )
            params = {k: x + updates[k] for k, x in params.items()}
    except ValueError as err:
        assert "finite" in str(err) or "nan" in str(err)
    else:
        assert not bool(torch.isfinite(params["a"][0, 0]))
