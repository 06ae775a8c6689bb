"""One line checks all arguments of a function, by what their names mean in the whole library."""

import inspect
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain import checks


@checks.takes(chains=checks.whole(2), way=checks.one_of("up", "down"))
def walked(loss, params, *, steps=3, chains=2, way=None, **rest):
    """Walk."""
    return steps


W = {"w": torch.ones(2)}


def test_what_fits_goes_through_with_defaults_and_keywords_that_have_no_kind():
    assert walked(lambda p: 0.0, W, way="up", colour="red") == 3
    assert walked(print, params=W, steps=5) == 5
    # numpy's numbers are Python's
    assert {type(walked(print, W, steps=n, chains=np.int32(2))) for n in (np.int64(5), np.uint8(5))} == {int}
    assert walked(print, W, way=None) == 3  # a default fits even where its kind does not have it


def walk_with(**given):
    return lambda: walked(**{"loss": print, "params": W, **given})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (walk_with(**{"loss": None}), "walked: loss must be a function, got None"),
        (walk_with(**{"params": {"w": 1.0}}), "walked: params must be a tree of dense, real, finite tensors"),
        (walk_with(**{"params": {"w": torch.tensor(float("nan"))}}), "walked: params must be"),
        (walk_with(**{"steps": True}), "walked: steps must be a whole number, at least 1, got True"),
        (walk_with(**{"chains": 1}), "walked: chains must be a whole number, at least 2, got 1"),
        (walk_with(**{"steps": np.float32(3)}), "walked: steps must be a whole number, at least 1, got 3.0"),
        (walk_with(**{"steps": np.int64(0)}), "walked: steps must be a whole number, at least 1, got 0"),
        (walk_with(**{"way": "left"}), "walked: way must be 'up' or 'down', got 'left'"),
        (
            lambda: bc.likelihoods.gaussian([0.0025, 1.0]),
            "gaussian: variance must be a positive number, or a dense tensor",
        ),
        (lambda: bc.likelihoods.gaussian("learnt"), "gaussian: variance must be"),
        (lambda: bc.likelihoods.gaussian(torch.tensor([1.0, 0.0])), "gaussian: variance must be"),
        (lambda: bc.likelihoods.student_t(scale=()), "student_t: scale must be a positive number"),
        (lambda: bc.likelihoods.ordinal(thresholds=[None]), "ordinal: thresholds must be a list of numbers"),
        (lambda: bc.likelihoods.ordinal(thresholds="12"), "ordinal: thresholds must be a list of numbers"),
        (lambda: bc.likelihoods.categorical(weight=[None]), "categorical: weight must be a list of numbers"),
        (lambda: bc.Chain(links=0), "Chain: links must be a list of links"),
        (lambda: bc.samplers.contour_weight(bc.sgd(0.1), "x", torch.tensor(1.0)), "contour_weight: state must be"),
        (lambda: bc.adam(0.1, betas=0.9), "betas must be two numbers"),
        (
            lambda: bc.likelihoods.student_t(Fraction(10**400)),
            "student_t: df must be a number in [1, 1e9], got Fraction(",
        ),
        (lambda: bc.adagrad(0.1, eps="x"), "eps must"),
        (lambda: bc.adadelta(0.1, rho="x"), "rho must"),
    ],
)
def test_ordinary_wrong_arguments_are_refused_by_their_names(call, words):
    with pytest.raises((TypeError, ValueError)) as refusal:
        call()
    assert words in str(refusal.value)
    assert not words.startswith("walked") or str(refusal.value).startswith(words)


def test_lists_and_tensors_of_numbers_are_the_same_thresholds_and_weights():
    for cuts in ([-1.0, 1.0], torch.tensor([-1.0, 1.0]), [torch.tensor(-1.0), 1]):
        assert bc.likelihoods.ordinal(cuts).mean(torch.zeros(1)).shape == (1, 3)
    for weight in ([1.0, 2.0], torch.tensor([1.0, 2.0]), (1.0, 2.0)):
        assert bc.likelihoods.categorical(weight=weight).nll(torch.zeros(1, 2), torch.tensor([1])).ndim == 1


def test_arguments_by_position_are_checked_and_missing_ones_are_pythons_own_errors():
    for given, words in (((3, W), "walked: loss"), ((print,), "missing 1 required positional argument")):
        with pytest.raises(TypeError, match=words):
            walked(*given)


def test_signature_and_docstring_stay():
    assert [*inspect.signature(walked).parameters, walked.__doc__] == [
        *("loss", "params", "steps", "chains", "way", "rest"),
        "Walk.",
    ]


def test_methods_and_constructors_are_named_by_their_class():
    class Box:
        @checks.takes(size=checks.WHOLE)
        def __init__(self, size):
            self.size = size

        @checks.takes(by=checks.POSITIVE)
        def grown(self, by):
            return self.size * by

    assert Box(2).grown(1.5) == 3.0
    with pytest.raises(ValueError, match=r"Box: size must be a whole number, at least 1, got 0"):
        Box(0)
    with pytest.raises(ValueError, match=r"Box.grown: by must be a positive, finite number, got -1"):
        Box(2).grown(-1)


def test_nothing_is_read_of_tensors_that_are_hidden():
    @checks.takes()
    def at(params):
        return params["w"].sum()

    assert torch.vmap(lambda w: at({"w": w}))(torch.ones(3, 2)).tolist() == [2.0, 2.0, 2.0]
    assert torch.func.grad(lambda w: at({"w": w}))(torch.ones(2)).tolist() == [1.0, 1.0]


def test_a_rate_that_is_learnt_is_read_without_a_warning_and_words_are_none(recwarn):
    rate = torch.tensor(0.1, requires_grad=True)
    assert checks.at_this_step("lr", rate) is rate and not recwarn
    with pytest.raises(TypeError):
        checks.at_this_step("lr", "0.1")


def test_what_a_model_cannot_take_is_said_of_its_inputs():
    with pytest.raises(ValueError, match="predict: data: the model cannot take it"), checks.blaming("predict", "data"):
        torch.zeros(2, 3) @ torch.zeros(2)
    with pytest.raises(KeyError), checks.blaming("predict", "data"):
        {}["x"]  # not torch's


# Warnings point at the line of the user's, however many calls of this library and of torch lie between


def rounding(tmp_path):
    p = nn.Parameter(torch.full((4,), 1e3, dtype=torch.bfloat16))
    p.square().sum().backward()
    bc.optim.SGHMC([p], lr=1e-9, temperature=1e-3).step()


def diverged(tmp_path):
    step = bc.make_step(lambda w, b: (w**2).sum(), bc.sgd(1e6))
    bc.sample(step, torch.ones(2), step.init(torch.ones(2)), None, steps=50)


def skipped(tmp_path):
    step = bc.make_step(lambda w, b: ((w - b[0]) ** 2).sum(), bc.sgld(0.1, temperature=0.1))
    w, loader = torch.ones(2), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2)))
    for steps in (2, 4):
        bc.sample(step, w, step.init(w), loader, steps=steps, path=tmp_path)


@pytest.mark.parametrize("call", [rounding, diverged, skipped])
def test_a_warning_points_at_the_line_that_called(call, tmp_path):
    with pytest.warns(UserWarning) as caught:
        call(tmp_path)
    lines, first = inspect.getsourcelines(call)
    assert all(w.filename == __file__ and w.lineno - first in range(len(lines)) for w in caught), [*map(str, caught)]
