"""The body of a linear last layer runs once for each batch, and the head alone has the fit of the whole on its features."""

import pytest
import torch
from torch import nn

import bayesopt_chain as bc

N = 40


pytestmark = pytest.mark.usefixtures("double_precision")


def module():
    return nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).eval()


def batches(n=N, size=15):
    x, y = torch.randn(n, 2), torch.randint(0, 3, (n,))
    return list(zip(x.split(size), y.split(size)))


def features(model, data):
    return [(model[:-1](x).detach(), y) for x, y in data]


CLASSES = bc.likelihoods.categorical()


@pytest.mark.parametrize("structure", ["kronecker", "dense", "low_rank"])
def test_a_head_on_its_features_is_fitted_as_the_last_layer_of_the_whole(structure):
    model, train, held_out, new = module(), batches(), batches(20), batches(25)
    options = {"structure": structure, "tune": "validation"}
    if structure == "low_rank":
        options["rank"] = 5
    plain = bc.fit_laplace(model, CLASSES, train, validation=held_out, **options)
    train, held_out, seen = (features(model, data) for data in (train, held_out, new))
    fitted = bc.fit_laplace(model[-1], CLASSES, train, validation=held_out, **options)
    assert fitted.prior_precision == plain.prior_precision
    torch.testing.assert_close(fitted.log_evidence, plain.log_evidence)
    torch.testing.assert_close(fitted.predict(seen), plain.predict(new))
    again = fitted.refit(seen)
    torch.testing.assert_close(again.posterior.precision.to_dense(), plain.refit(new).posterior.precision.to_dense())


def test_validation_and_predictions_run_the_body_once_for_each_batch():
    """Nine candidates look at the same features."""
    model, train, held_out, calls = module(), batches(), batches(20, 10), []
    model[0].register_forward_hook(lambda _, inputs, out: calls.append(1) if len(out) > 2 else None)
    fitted = bc.fit_laplace(model, CLASSES, train, tune="validation", validation=held_out)
    assert len(calls) == len(train) + len(held_out) and not model[3]._forward_hooks
    fitted.predict(train[0][0])
    assert len(calls) == len(train) + len(held_out) + 1


def test_a_loader_is_read_once():
    model, train, reads = module(), batches(), []

    class Loader:
        def __iter__(self):
            reads.append(1)
            return iter(train)

        def __len__(self):
            return len(train)

    bc.fit_laplace(model, CLASSES, Loader())
    assert reads == [1]
