"""Ordinary wrong arguments, gradients and states are refused by name, or harmless; :mod:`tests.fuzz` makes the calls."""

import math

import numpy as np
import pytest
import torch

from tests import fuzz

NOTHING_TO_CALL = {"response", "schedules", "ensemble", "Chain"}
GROUPS = sorted({*(prefix.rstrip(".") for prefix, _ in fuzz.namespaces()), *fuzz.OBJECTS} - NOTHING_TO_CALL)
FACTORIES = (
    *("adam", "rmsprop", "sgd", "sghmc", "swag", "ekf.dense", "vi.dense", "vi.mean_field"),
    *("samplers.adam_sghmc", "samplers.baoab", "samplers.contour_sgld", "samplers.cyclical", "samplers.psgld"),
    *("samplers.sgnht", "samplers.ubu"),
)
GRADIENTS = {
    "a list": [torch.ones(2)],
    "another leaf": {"v": torch.ones(2)},
    "a leaf too many": {"w": torch.ones(2), "v": torch.ones(2)},
    "another shape": {"w": torch.ones(5)},
    "float64": {"w": torch.ones(2).double()},
    "integers": {"w": torch.ones(2).long()},
    "complex": {"w": torch.ones(2) + 1j},
    "a number": {"w": 1.0},
    "sparse": {"w": torch.ones(2).to_sparse()},
    "meta": {"w": torch.ones(2, device="meta")},
    "none": None,
}
STATES = {"none": None, "empty": (), "a dictionary": {}, "a tensor": torch.ones(2)}


@pytest.mark.parametrize("group", GROUPS)
def test_ordinary_wrong_arguments_are_refused_by_name_or_harmless(group, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [name for name in fuzz.rows() if name not in fuzz.SLOW and name.rpartition(".")[0] == group]
    found = [
        line
        for name in names
        for line in fuzz.sweep(name, [0])[0]
        if line.split("=")[0].replace("(", ".") not in fuzz.KNOWN
    ]
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_every_callable_is_sound_as_it_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [name for name in fuzz.rows() if name not in fuzz.SLOW]
    assert len(names) > 290 and {name.rpartition(".")[0] for name in names} == {*GROUPS}
    assert not {name: wrong for name in names if (wrong := fuzz.wrong_of(name, "", None))}


@pytest.mark.slow
def test_numbers_of_numpy_are_taken_as_pythons_own(tmp_path, monkeypatch):
    """Every argument that is a number, by default or in the sound call, as numpy's scalar of the same value."""
    monkeypatch.chdir(tmp_path)
    calls = 0
    for name in [name for name in fuzz.rows() if name not in fuzz.SLOW]:
        for word, parameter in fuzz.parameters(name).items():
            given = fuzz.sound(name)
            own = given.get(word, parameter.default)
            if type(own) in (int, float):
                fuzz.call(name, {**given, word: np.int64(own) if isinstance(own, int) else np.float64(own)})
                calls += 1
    assert calls > 400


@pytest.mark.slow
def test_less_than_one_outcome_in_two_hundred_has_no_name(tmp_path, monkeypatch):
    """Of calls that the test above does not make."""
    monkeypatch.chdir(tmp_path)
    swept = [fuzz.sweep(name, [0] if name in fuzz.SLOW else [1]) for name in fuzz.rows()]
    wrong, calls = (sum(len(found) for found, _ in swept), sum(made for _, made in swept))
    assert wrong < calls / 200


def made(name):
    """A transformation, its state, and what its updates ask for."""
    heat = {"temperature": 0.1} if "temperature" in fuzz.parameters(name) else {}
    tx = fuzz.rows()[name][0](**fuzz.sound(name) | heat)
    torch.manual_seed(0)
    state = tx.init(fuzz.params())
    extra = {k: make() for k, make in fuzz.KEYWORDS.items() if k in getattr(tx, "extra_kwargs", ())}
    return tx, state, extra | ({"draw": tx.sample(state, fuzz.params())} if hasattr(tx, "sample") else {})


@pytest.mark.parametrize("what", ["gradients", "states"])
@pytest.mark.parametrize("name", FACTORIES)
def test_gradients_and_states_that_do_not_fit_are_refused_in_our_words(name, what):
    tx, state, extra = made(name)
    for kind, value in (GRADIENTS if what == "gradients" else STATES).items():
        g, s = (value, state) if what == "gradients" else (fuzz.params(), value)
        with pytest.raises((TypeError, ValueError), match=r"update|gradient|state|params|lea[fv]|tree") as caught:
            tx.update(g, s, params=fuzz.params(), inplace=False, **extra)
        assert str(caught.traceback[-1].path).startswith(fuzz.HOME), kind


@pytest.mark.parametrize("name", FACTORIES)
def test_a_gradient_that_is_not_a_number_shows(name):
    """In the parameters, at once or in the next step: no rule makes a finite move of it and goes on."""
    tx, state, extra = made(name)
    p = fuzz.params()
    try:
        for g in (torch.tensor([math.nan, 1.0]), torch.ones(2)):
            extra |= {"draw": tx.sample(state, p)} if "draw" in extra else {}
            updates, state = tx.update({"w": g}, state, params=p, inplace=False, **extra)
            p = {"w": p["w"] + updates["w"]}
    except ValueError as err:
        assert "finite" in str(err) or "nan" in str(err)
    else:
        assert not bool(torch.isfinite(p["w"]).all())
