"""Fits and draws as ordinary modules: what they return, exported by torch.export and by ONNX, is their predictive."""

import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain import likelihoods

X, NEW = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)), torch.linspace(-3, 3, 21).reshape(7, 3)
REAL, COUNTS = X[:, :2].sin(), (X[:, :2].abs() * 3).round()
CASES = {
    "gaussian": (likelihoods.gaussian(), 2, REAL),
    "learned": (likelihoods.gaussian("learned"), 2, REAL[:, :1]),
    "categorical": (likelihoods.categorical(), 3, COUNTS[:, 0].long().clamp_max(2)),
    "bernoulli": (likelihoods.bernoulli(), 1, (REAL[:, :1] > 0).float()),
    "poisson": (likelihoods.poisson(), 2, COUNTS),
    "hardly known": (likelihoods.bernoulli(), 1, (REAL[:, :1] > 0).float()),
}


def network(outputs):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, outputs)).eval()


def exported(module, x):
    rows = ({0: torch.export.Dim("n", min=2, max=64)},)
    return torch.export.export(module, (x,), dynamic_shapes={"inputs": rows})


def close(got, predictive):
    torch.testing.assert_close(got, (predictive.mean, predictive.variance), rtol=1e-5, atol=1e-6)


def of_fit(name, structure):
    likelihood, outputs, y = CASES[name]
    options = {"tune": None, "temperature": 10.0} if name == "hardly known" else {}
    fitted = bc.fit_laplace(network(outputs), likelihood, [(X, y)], structure=structure, **options)
    return fitted.module(), fitted.predictive(NEW)


def of_draws(name):
    likelihood, outputs, _ = CASES[name]
    members = [network(outputs) for _ in range(3)]
    for m in members:
        m[1].running_mean += torch.randn(6)
        m[3].weight.data += torch.randn_like(m[3].weight)
    draws = bc.Draws.from_trees(members)
    return draws.module(network(outputs), likelihood), draws.predictive(network(outputs), NEW, likelihood)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("structure", ["dense", "kronecker", "diagonal", "root"])
def test_a_fits_module_has_its_predictive_and_its_export_runs_for_any_number_of_data(name, structure):
    module, wanted = of_fit(name, structure)
    close(module(NEW), wanted)
    if structure in ("dense", "kronecker"):
        close(exported(module, X).module()(NEW), wanted)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", CASES)
def test_a_draws_module_has_their_predictive_with_buffers_and_so_has_its_export(name):
    module, wanted = of_draws(name)
    close(module(NEW), wanted)
    close(exported(module, X).module()(NEW), wanted)


def test_weighted_draws_of_chains_and_tokens():
    tx, x = bc.samplers.samadams(0.1, 1.0, temperature=0.5, gradient_scale=1.0), torch.randn(5, 4, 3)
    net = nn.Linear(3, 2)
    forward, params, _ = bc.make_functional(net)
    step = bc.make_step(lambda p, batch: forward(p, batch).square().mean(), tx)
    draws = bc.sample(step, params, tx.init(params), [(x, None)], steps=6)
    mean, variance = draws.module(net, likelihoods.gaussian(0.5))(x)
    outputs = torch.stack([forward(p, (x, None)) for p in draws])
    w = (draws.weights / draws.weights.sum()).reshape(-1, 1, 1, 1)
    torch.testing.assert_close(mean, (w * outputs).sum(0))
    torch.testing.assert_close(variance, 0.5 + (w * (outputs - mean).square()).sum(0), rtol=1e-5, atol=1e-6)
    fitted = bc.fit_laplace(net.eval(), likelihoods.categorical(), [(x, torch.randint(0, 2, (5, 4)))])
    close(fitted.module()(x), fitted.predictive(x))


def test_what_has_no_module_is_refused_by_name():
    fitted = bc.fit_laplace(network(2), likelihoods.gaussian(), [(X, REAL)], subset="all")
    with pytest.raises(ValueError, match=r"other parameters than a linear last layer.*subset='last_layer'"):
        fitted.module()
    wide = nn.Sequential(nn.Linear(3, 500), nn.Linear(500, 10)).eval()
    labels = torch.arange(40) % 10
    fitted = bc.fit_laplace(wide, likelihoods.categorical(), [(X, labels)], structure="root", tune=None)
    with pytest.raises(ValueError, match="covariance of 5010 parameters"):
        fitted.module()


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_onnx_programs_agree(name, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    for module, wanted in (of_fit(name, "kronecker"), of_fit(name, "dense"), of_draws(name)):
        rows = ({0: torch.export.Dim("n", min=2, max=64)},)
        program = torch.onnx.export(module, (X,), dynamic_shapes={"inputs": rows}, dynamo=True, verbose=False)
        program.save(tmp_path / "module.onnx")
        session = runtime.InferenceSession(tmp_path / "module.onnx")
        got = session.run(None, {session.get_inputs()[0].name: NEW.numpy()})
        close(map(torch.from_numpy, got), wanted)
