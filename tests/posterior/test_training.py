"""Training by the marginal likelihood against closed forms, its own stationary point, and training without it."""

import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain.posterior import train_by_evidence
from bayesopt_chain.posterior.fit import moved
from tests.nets import Net

N, HALF = 60, torch.ones(4, 2).half()


pytestmark = pytest.mark.usefixtures("double_precision")


def adam(lr):
    return lambda parameters: torch.optim.Adam(parameters, lr=lr)


def module(outputs=1, *between):
    return nn.Sequential(nn.Linear(2, 6), *between, nn.Tanh(), nn.Linear(6, outputs))


def regression(noise=0.1):
    x = torch.randn(N, 2)
    return x, torch.sin(2 * x[:, :1]) + noise * torch.randn(N, 1)


def test_a_prior_around_the_initial_weights_stays_there_and_pulls_the_mode_to_them():
    """Of a linear model with Gaussian noise the mode is (X^T X / v + delta I)^-1 (X^T y / v + delta mu)."""
    model, (x, y), variance = nn.Linear(2, 1, bias=False), regression(), 0.5
    initial = model.weight.detach().clone()
    options = {"prior_mean": dict(model.named_parameters()), "structure": "dense", "tune_noise": False}
    training = train_by_evidence(
        model, bc.likelihoods.gaussian(variance), [(x, y)], optimizer=adam(0.02), epochs=300, every=30, **options
    )
    delta = training.fitted.prior_precision["weight"]
    wanted = torch.linalg.solve(x.mT @ x / variance + delta * torch.eye(2), x.mT @ y / variance + delta * initial.mT)
    torch.testing.assert_close(model.weight.detach().mT, wanted, rtol=1e-4, atol=1e-5)
    marginal = torch.distributions.MultivariateNormal(
        (x @ initial.mT)[:, 0], x @ x.mT / delta + variance * torch.eye(N)
    )
    torch.testing.assert_close(training.fitted.log_evidence, marginal.log_prob(y[:, 0]), rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="prior_mean"):
        train_by_evidence(model, bc.likelihoods.gaussian(), [(x, y)], prior_mean={"w": initial})


def test_the_layers_keep_their_modes_in_training_and_end_in_eval():
    """Batch norm trains in train mode: the buffers move, and the best ones come back with the parameters."""
    model, data = module(1, nn.BatchNorm1d(6), nn.Dropout(0.1)).train(), [regression()]
    model[2].eval()
    modes = []
    model[1].register_forward_hook(lambda layer, *_: modes.append((layer.training, model[2].training)))
    training = train_by_evidence(
        model, bc.likelihoods.gaussian(), data, structure="diagonal", tune_noise=False, epochs=3, every=1
    )
    assert modes.count((True, False)) == 3 and (False, False) in modes and (True, True) not in modes
    assert not model.training and not model[1].training
    assert model[1].running_mean.abs().max() > 0
    again = bc.fit_laplace(model, bc.likelihoods.gaussian(), data, structure="diagonal", subset="all", tune=None)
    torch.testing.assert_close(again.seen.log_likelihood, training.fitted.seen.log_likelihood)


def test_parameters_that_ask_for_no_gradients_stay():
    model, x = module(3), torch.randn(N, 2)
    model[2].requires_grad_(False)
    before, data = {name: p.detach().clone() for name, p in model.named_parameters()}, [(x, (x[:, 0] > 0).long())]
    train_by_evidence(model, bc.likelihoods.categorical(), data, structure="diagonal", epochs=2, burn_in=1)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == name.startswith("2")
        assert parameter.grad is None


@pytest.mark.parametrize("kind", ["keywords", "arguments", "mapping"])
def test_inputs_may_be_keywords_or_several_arguments(kind):
    """The same numbers as for one input, the sum; a batch may be a mapping with labels."""
    x, y = regression()
    inputs = (x / 2, x / 2) if kind == "arguments" else {"a": x / 2, "b": x / 2}
    batch = {**inputs, "labels": y} if kind == "mapping" else (inputs, y)
    torch.manual_seed(0)
    several, one = Net(lambda net, a, b: net.layer(a + b), layer=nn.Linear(2, 1)), nn.Linear(2, 1)
    one.load_state_dict(several.layer.state_dict())
    options = {"structure": "dense", "epochs": 20, "every": 5, "optimizer": adam(0.02)}
    got = train_by_evidence(several, bc.likelihoods.gaussian(), [batch], **options)
    want = train_by_evidence(one, bc.likelihoods.gaussian(), [(x, y)], **options)
    assert got.log_evidence == pytest.approx(want.log_evidence)


def test_hyperparameters_move_by_a_factor_of_e_at_most():
    now = torch.tensor([1.0, 1.0, 1.0])
    wanted = torch.tensor([torch.e, 1.5, 1 / torch.e])
    torch.testing.assert_close(moved(now, torch.tensor([100.0, 1.5, 1e-9])), wanted)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"module": lambda p, b: b[0]}, r"must be a torch.nn.Module \(with a forward function"),
        ({"likelihood": bc.likelihoods.gaussian}, "likelihood must be one of bc.likelihoods, called"),
        ({"loader": iter([])}, "loader must be batches that can be read again"),
        ({"epochs": 0}, "epochs must be a whole number, at least 1, got 0"),
        ({"every": 0}, "every must be a whole number, at least 1, got 0"),
        ({"burn_in": -1}, "burn_in must be a whole number, at least 0, got -1"),
        ({"structure": "low_rank"}, "structure must be 'dense' or"),
        ({"subset": "last_layer"}, r"train_by_evidence: subset is no argument of it.*requires_grad_.False."),
        ({"prior_precision": 0.0}, "prior_precision must be a positive, finite number"),
        ({"prior_structure": "one"}, "prior_structure must be 'scalar' or 'layerwise', or None, got"),
        ({"prior_structure": "layerwise", "structure": "root"}, "'layerwise' with structure='root'.*pass 'scalar'"),
        ({"optimizer": torch.optim.Adam(nn.Linear(1, 1).parameters())}, "optimizer must be a function"),
        ({"optimizer": lambda p: None}, "optimizer returned NoneType"),
        ({"module": module().half(), "loader": [(HALF, HALF[:, :1])]}, "parameters are float16"),
        ({"optimizer": lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1)}, "the optimizer has weight decay"),
        ({"optimizer": lambda p: torch.optim.SGD(p, 1e9), "epochs": 50}, "lower the learning rate"),
    ],
)
def test_bad_arguments_are_refused_by_name(options, words):
    given = {"module": module(), "likelihood": bc.likelihoods.gaussian(), "loader": [regression()]} | options
    with pytest.raises((ValueError, TypeError), match=words):
        train_by_evidence(**given)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("structure", ["kronecker", "diagonal"])
def test_a_scalar_prior_of_training_is_that_of_the_fit_where_it_ends(structure):
    """Where the evidence has settled: the same precision of all tensors, which ``fit_laplace`` finds at once."""
    model, data = module(), [regression()]
    options = {"structure": structure, "prior_structure": "scalar"}
    training = train_by_evidence(model, bc.likelihoods.gaussian(), data, epochs=15, every=1, **options)
    fitted = bc.fit_laplace(model, bc.likelihoods.gaussian(), data, subset="all", tune_noise="evidence", **options)
    found = [float(p) for fit in (training.fitted, fitted) for p in fit.prior_precision.values()]
    assert len(found) == 8 and len(set(found[:4])) == len(set(found[4:])) == 1
    assert found[0] == pytest.approx(found[4], rel=1e-3)
