"""A check is paid once for batches of one shape, and again as soon as the forward pass is another one."""

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import bayesopt_chain as bc
from bayesopt_chain import curvature, likelihoods
from tests.curvature.conftest import convolutional, of_module

CLASSES = likelihoods.categorical()
B = 6


def case():
    forward, params = of_module(convolutional())
    return forward, params, [(torch.randn(B, 2, 6, 6), torch.randint(0, 3, (B,))) for _ in range(3)]


def counted(forward):
    calls = []

    def counting(params, batch):
        calls.append(len(batch[0]))
        return forward(params, batch)

    return counting, calls


@pytest.mark.parametrize("structure", curvature.STRUCTURES)
def test_the_second_batch_of_a_shape_runs_the_model_once_and_gives_the_same_bits(structure):
    forward, params, batches = case()
    counting, calls = counted(forward)
    estimate = curvature.ggn(counting, CLASSES, structure, chunk_bytes=2**30)
    for i, batch in enumerate(batches):
        calls.clear()
        got = estimate(params, batch).to_dense()
        assert torch.equal(got, curvature.ggn(forward, CLASSES, structure, chunk_bytes=2**30)(params, batch).to_dense())
        assert calls == ([1, B] if i == 0 else [B])
    calls.clear()
    estimate(params, (batches[1][0][:4], batches[1][1][:4]))
    assert calls == [1, 4]  # another shape is checked anew


@pytest.mark.parametrize("way", ["mixing", "dropout", "another number", "another use"])
def test_a_forward_pass_that_became_another_is_checked_again(way):
    mode = {"on": False}

    def forward(params, batch):
        x = batch[0] @ (params["w"].exp() if mode["on"] and way == "another use" else params["w"])
        if mode["on"] and way == "mixing":
            x = x - x.mean(0)
        x = F.dropout(x, 0.5, training=mode["on"] and way == "dropout")
        return x.pow(3 if mode["on"] and way == "another number" else 2)

    params, batch = {"w": torch.randn(4, 3)}, (torch.randn(B, 4), torch.randn(B, 3))
    estimate = curvature.ggn(forward, likelihoods.gaussian())
    estimate(params, batch)
    mode["on"] = True
    if way in ("another number", "another use"):
        fresh = curvature.ggn(forward, likelihoods.gaussian())
        assert torch.equal(estimate(params, batch).diag()["w"], fresh(params, batch).diag()["w"])
    else:
        with pytest.raises(ValueError, match="depend on the rest of the batch, or are random"):
            estimate(params, batch)


def test_a_check_that_could_not_have_failed_is_not_remembered():
    """A head of zeros hides what is below it: the second batch, with another head, is checked."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    counting, calls = counted(lambda p, batch: functional_call(model, p, (batch[0],)))
    estimate = curvature.ggn(counting, likelihoods.gaussian())
    batch = (torch.randn(B, 3), torch.randn(B, 2))
    zeros = {**params, "2.weight": torch.zeros(2, 4)}
    for tree, wanted in ((zeros, [1, B]), (params, [1, B]), (params, [B])):
        calls.clear()
        estimate(tree, batch)
        assert calls == wanted


def test_predictions_of_a_fit_check_their_first_batch_alone():
    """Twins of a fit predict the same bits; the model runs once for a later batch of the same shape."""
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).eval()
    data = [(torch.randn(B, 2), torch.randint(0, 3, (B,)))]
    fits = [bc.fit_laplace(model, CLASSES, data, subset="all") for _ in range(2)]
    fits[0].predict(torch.randn(5, 2))
    calls, new = [], torch.randn(5, 2)
    model[0].register_forward_hook(lambda *_: calls.append(1))
    got = fits[0].predict(new)
    assert len(calls) == 1
    assert torch.equal(got, fits[1].predict(new)) and len(calls) == 3
