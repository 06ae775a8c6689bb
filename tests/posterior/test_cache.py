"""Cached features give what the loader gives, and are refused for another body."""

import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain.posterior import cache_features

N = 40


pytestmark = pytest.mark.usefixtures("double_precision")


def module():
    return nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).eval()


def batches(n=N, size=15):
    x, y = torch.randn(n, 2), torch.randint(0, 3, (n,))
    return list(zip(x.split(size), y.split(size)))


def counted(model):
    calls = []
    model[0].register_forward_hook(lambda _, inputs, out: calls.append(1) if len(out) > 2 else None)
    return calls


CLASSES = bc.likelihoods.categorical()


def cached(train):
    """A module, its likelihood and its features of the data."""
    model = module()
    return model, CLASSES, cache_features(model, train)


@pytest.mark.parametrize("structure", ["kronecker", "dense", "low_rank"])
def test_fits_predictions_refits_and_validation_of_a_cache_are_those_of_the_loader(structure):
    model, train, held_out, new = module(), batches(), batches(20), batches(25)
    options = {"structure": structure, "tune": "validation"}
    if structure == "low_rank":
        options["rank"] = 5
    plain = bc.fit_laplace(model, CLASSES, train, validation=held_out, **options)
    caches = [cache_features(model, data) for data in (train, held_out, new)]
    fitted = bc.fit_laplace(model, CLASSES, caches[0], validation=caches[1], **options)
    assert fitted.prior_precision == plain.prior_precision
    torch.testing.assert_close(fitted.log_evidence, plain.log_evidence)
    torch.testing.assert_close(fitted.predict(caches[2]), plain.predict(new))
    torch.testing.assert_close(fitted.predict(new), plain.predict(caches[2]))
    again = fitted.refit(caches[2])
    torch.testing.assert_close(again.posterior.precision.to_dense(), plain.refit(new).posterior.precision.to_dense())


def test_the_body_runs_once_for_each_batch_however_many_fits_there_are():
    model, train = module(), batches()
    calls = counted(model)
    cache = cache_features(model, train)
    assert len(calls) == len(train) == len(cache) == 3
    for structure in ("dense", "diagonal", "kronecker"):
        fitted = bc.fit_laplace(model, CLASSES, cache, structure=structure)
        fitted.predict(cache, method="mc", samples=20)
        fitted.refit(cache)
    assert len(calls) == 3


def test_validation_and_predictions_run_the_body_once_for_each_batch():
    """Nine candidates look at the same features, and so do fifty draws."""
    model, train, held_out = module(), batches(), batches(20, 10)
    calls = counted(model)
    fitted = bc.fit_laplace(model, CLASSES, train, tune="validation", validation=held_out)
    assert len(calls) == len(train) + len(held_out) and not model[3]._forward_hooks
    fitted.predict(train[0][0], method="mc", samples=50)
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


@torch.no_grad()
def change_a_weight(model):
    model[0].weight.mul_(1.1)


@torch.no_grad()
def change_a_buffer(model):
    model[1].running_mean.add_(0.1)


def replace_a_weight(model):
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


@pytest.mark.parametrize(
    "change, name",
    [(change_a_weight, r"0\.weight"), (change_a_buffer, r"1\.running_mean"), (replace_a_weight, r"0\.weight")],
)
def test_a_cache_of_a_body_that_changed_is_refused(change, name):
    model, train = module(), batches()
    cache = cache_features(model, train)
    fitted = bc.fit_laplace(model, CLASSES, cache)
    change(model)
    fitted.predict(cache)  # of the fit's own body still
    with pytest.raises(ValueError, match=f"not those of this module now: {name}"):
        bc.fit_laplace(model, CLASSES, cache)
    later = bc.fit_laplace(model, CLASSES, train)
    for use in (later.predict, later.refit):
        with pytest.raises(ValueError, match=f"not those of this module now: {name}"):
            use(cache)
    with pytest.raises(ValueError, match="not those of this module now"):
        bc.fit_laplace(model, CLASSES, train, tune="validation", validation=cache)


def test_a_changed_head_leaves_the_cache_good():
    train = batches()
    model, _, cache = cached(train)
    with torch.no_grad():
        model[3].weight.mul_(2)
    fitted, plain = bc.fit_laplace(model, CLASSES, cache), bc.fit_laplace(model, CLASSES, train)
    torch.testing.assert_close(fitted.log_evidence, plain.log_evidence)


def test_a_cache_with_given_params_is_theirs():
    model, train = module(), batches()
    _, params, _ = bc.make_functional(model)
    params["0.weight"] = torch.randn(6, 2)
    cache = cache_features(model, train, params=params)
    fitted = bc.fit_laplace(model, CLASSES, cache, params=params)
    torch.testing.assert_close(fitted.log_evidence, bc.fit_laplace(model, CLASSES, train, params=params).log_evidence)
    with pytest.raises(ValueError, match="not those of this module now"):
        bc.fit_laplace(model, CLASSES, cache)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda train: bc.fit_laplace(*cached(train), subset="all"),
            "cached features go with subset='last_layer'",
        ),
        (
            lambda train: bc.fit_laplace(module(), CLASSES, train, subset="all", structure="diagonal").predict(
                cache_features(module(), train)
            ),
            "cached features are those of a linear last layer",
        ),
        (
            lambda train: cache_features(nn.Sequential(nn.Linear(2, 3), nn.LogSoftmax(-1)).eval(), train),
            r"no nn\.Linear that runs once",
        ),
        (
            lambda train: cache_features(module().train(), train),
            r"cache_features: 1 \(BatchNorm1d\) is in training mode",
        ),
        (lambda train: cache_features(module(), []), "cache_features: the loader has no batches"),
    ],
)
def test_what_a_cache_cannot_serve_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call(batches())
