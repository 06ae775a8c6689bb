"""What no likelihood can be, and no target of one: refused by name."""

import pytest
import torch

from bayesopt_chain import likelihoods

CLASSES, LOGITS, Y = likelihoods.categorical(), torch.zeros(2, 3), torch.tensor([0, 1])


def custom(loss, **more):
    return likelihoods.custom(loss, **more)


def gaussian():
    return likelihoods.gaussian().predictive(torch.zeros(2, 1), torch.ones(2, 1, 1))


def squares(f, y):
    return (f - y).square().sum(-1)


def mixing(f, y):
    return squares(f - f.mean(0), y)


def averaged(f, y):
    return (f - y).square().mean()


def classes():
    return CLASSES.predictive(torch.zeros(1, 3), torch.eye(3)[None])


ONE_EACH = "depends on the rest of the batch"


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: likelihoods.gaussian(0.0), "variance must be a positive number"),
        (lambda: likelihoods.gaussian("known"), "'learned'"),
        (lambda: likelihoods.gaussian("learned").factors(LOGITS, torch.zeros(2, 1)), "2 C"),
        (lambda: likelihoods.gaussian().nll(torch.zeros(2, 1), torch.zeros(2)), r"targets \(2,\)"),
        (lambda: custom(squares).draw(torch.zeros(1, 1), None), "draw="),
        (
            lambda: custom(squares, output_hessian=lambda f, y: torch.eye(1)).factors(*torch.zeros(2, 2, 1)),
            "B, E, E",
        ),
        (
            lambda: custom(lambda f, y: -squares(f, y)).factors(*torch.zeros(2, 2, 1)),
            r"not positive semidefinite.*output_hessian",
        ),
        (lambda: custom(mixing).factors(torch.eye(3), torch.zeros(3, 3)), ONE_EACH),
        (lambda: custom(mixing).empirical_factors(torch.eye(3), torch.zeros(3, 3)), ONE_EACH),
        (lambda: custom(averaged).empirical_factors(torch.eye(3), torch.zeros(3, 3)), "one loss a datum"),
        (
            lambda: CLASSES.nll(LOGITS, torch.tensor([0, -1])),
            r"class numbers from 0 .or ignore_index=-100., such as -1",
        ),
        (lambda: CLASSES.nll(LOGITS, torch.tensor([0, 3])), "class numbers from 0 to 2, such as 3"),
        (lambda: CLASSES.nll(LOGITS, torch.tensor([0.0, 1.0])), "class numbers, int64"),
        (lambda: CLASSES.nll(torch.zeros(2, 1), torch.tensor([0, 0])), r"at least two classes.*bernoulli"),
        (lambda: CLASSES.nll(torch.zeros(0, 3), torch.zeros(0).long()), "the batch is empty"),
        (lambda: likelihoods.categorical(weight=[1.0, 2.0]).nll(LOGITS, Y), "weight has 2 entries"),
        (lambda: likelihoods.categorical(label_smoothing=1.0), "label_smoothing must lie in"),
        (
            lambda: likelihoods.weighted(CLASSES).nll(LOGITS, Y),
            r"not a pair: pass batches .inputs, .targets, weights.",
        ),
        (
            lambda: likelihoods.weighted(CLASSES).nll(LOGITS, (Y, torch.tensor([1.0, -1.0]))),
            "finite and not negative",
        ),
        (lambda: classes().quantile(0.5), "have no order"),
        (lambda: classes().crps(torch.tensor([0])), "have no order"),
        (lambda: gaussian().quantile(1.0), r"level must be a number in \(0, 1\)"),
    ],
)
def test_it_is_refused_by_name(ask, words):
    with pytest.raises(ValueError, match=words):
        ask()
