"""What a fit is handed by mistake is refused by name, and half precision, empty batches and NaN inputs do what they should."""

import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain import likelihoods

X, Y = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3


def network(outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs)).eval()


def on_meta():
    with torch.device("meta"):
        return network()


def without_statistics():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3)).eval()


@pytest.mark.parametrize(
    ("says", "what"),
    [
        ("every target is left out", {"loader": [(X, torch.full_like(Y, -100))]}),
        ("targets of the type list", {"loader": [(X, ["a"] * 40)]}),
        ("2.weight is on the meta device|0.weight is on the meta device", {"module": on_meta}),
        ("no running statistics", {"module": without_statistics}),
        ("at least one, each with targets", {"tune": "validation", "validation": []}),
        ("at least one, each with targets", {"tune": "validation", "validation": [X]}),
        ("the batch is empty", {"loader": [(X, Y), (X[:0], Y[:0])]}),
        ("the batch is empty", {"loader": [(X[:0], Y[:0])]}),
        (
            "a parameter is NaN",
            {"module": lambda: network().apply(lambda m: [p.data.fill_(torch.nan) for p in m.parameters()])},
        ),
    ],
)
def test_a_mistake_is_refused_by_name(says, what):
    what = {"module": network, "loader": [(X, Y)], **what}
    with pytest.raises(ValueError, match=says):
        bc.fit_laplace(what.pop("module")(), likelihoods.categorical(), what.pop("loader"), **what)


def test_a_fit_inside_inference_mode_is_refused_and_a_prediction_is_not():
    with torch.inference_mode(), pytest.raises(ValueError, match="call it outside of it"):
        bc.fit_laplace(network(), likelihoods.categorical(), [(X, Y)])
    fitted = bc.fit_laplace(network(), likelihoods.categorical(), [(X, Y)])
    wanted = fitted.predict(X[:3])
    with torch.inference_mode():
        torch.testing.assert_close(fitted.predict(X[:3]), wanted)


def test_inputs_without_data_are_refused_and_inputs_of_nan_stay_nan():
    fitted = bc.fit_laplace(network(), likelihoods.categorical(), [(X, Y)])
    with pytest.raises(ValueError, match="the batch is empty"):
        fitted.predict(X[:0])
    wanted = fitted.predict(X[:1])
    for method in ("sobol", "probit"):
        found = fitted.predict(torch.stack([X[0], X[1] * torch.nan]), method=method)
        assert found[0].isfinite().all() and found[1].isnan().all(), method
    torch.testing.assert_close(fitted.predict(torch.stack([X[0], X[1] * torch.nan]))[:1], wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_a_network_in_half_precision_predicts_what_it_does_in_float32(dtype, subset):
    """To the rounding of its own outputs: logits of up to 1 in 8 or 11 bits."""
    half, x = network().to(dtype), X.to(dtype)
    single = network()
    single.load_state_dict(half.state_dict())
    fits = [
        bc.fit_laplace(module, likelihoods.categorical(), [(inputs, Y)], subset=subset, structure="diagonal")
        for module, inputs in ((half, x), (single, x.float()))
    ]
    for method in ("sobol", "probit"):
        found, wanted = (
            fitted.predict(inputs[:4], method=method).float() for fitted, inputs in zip(fits, (x, x.float()))
        )
        assert (found - wanted).abs().max() < 8 * torch.finfo(dtype).eps
    prediction = fits[0].predictive(x[:4])
    assert prediction.mean.dtype == torch.float32 and prediction.log_prob(Y[:4]).isfinite().all()


def test_yes_or_no_targets_may_be_booleans():
    yes = Y == 1
    fits = [bc.fit_laplace(network(1), likelihoods.bernoulli(), [(X, y[:, None])]) for y in (yes, yes.float())]
    assert fits[0].log_evidence == fits[1].log_evidence


@pytest.mark.parametrize(
    "make",
    [
        bc.laplace,
        lambda: bc.swag(rank=2),
        lambda: bc.chain(bc.sgd(0.1), bc.swag(rank=2)),
        lambda: bc.vi.mean_field(bc.sgd(0.1), temperature=0.1),
        lambda: bc.ekf.diagonal(lr=1.0, prior_precision=1.0),
    ],
)
def test_parameters_without_values_are_refused_where_a_posterior_begins(make):
    params = {"b": torch.zeros(()), "w": torch.zeros(3, device="meta")}
    with pytest.raises(ValueError, match=r"leaf \['w'\] of params is on the device meta"):
        make().init(params)
