"""The call as a user makes it: every likelihood, every method, data of every kind, and what is refused."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, TensorDataset

import bayesopt_chain as bc
from bayesopt_chain.ensemble import recipe
from bayesopt_chain.ensemble.data import read
from bayesopt_chain.ensemble.members import members_of
from bayesopt_chain.runs import files
from tests.runs.test_hostile import every_damage_is_refused

N = 48
SMALL = {"members": 2, "steps": 20, "lr": 0.01, "progress": False}


def inputs():
    return torch.randn(N, 2, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def fitted():
    """One ensemble of a linear target, for tests that only look at it."""
    x = inputs()
    return bc.posterior_ensemble(maker(), (x, x[:, :1]), bc.likelihoods.gaussian(), **SMALL)


def maker(out=1):
    return lambda: nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, out))


CASES = {
    "gaussian": (bc.likelihoods.gaussian(), 1, lambda x: x[:, :1] + 0.1 * x[:, 1:]),
    "learned": (bc.likelihoods.gaussian("learned"), 2, lambda x: x[:, :1]),
    "student": (bc.likelihoods.student_t(), 1, lambda x: x[:, :1]),
    "bernoulli": (bc.likelihoods.bernoulli(), 1, lambda x: (x[:, :1] > 0).float()),
    "categorical": (bc.likelihoods.categorical(), 3, lambda x: (x[:, 0] > 0).long() + (x[:, 1] > 0).long()),
    "ordinal": (bc.likelihoods.ordinal([-1.0, 1.0]), 1, lambda x: (x[:, :1] > 0).long() + (x[:, 1:] > 0).long()),
    "poisson": (bc.likelihoods.poisson(), 1, lambda x: x[:, :1].exp().round()),
    "negative_binomial": (bc.likelihoods.negative_binomial(2.0), 1, lambda x: x[:, :1].exp().round()),
    "beta": (bc.likelihoods.beta(5.0), 1, lambda x: x[:, :1].sigmoid()),
}


QUICK = ("gaussian", "categorical")  # the quick tier has these


def slow_unless(quick, every):
    """Parameters, those that are not quick with the marker."""
    return [x if x in quick else pytest.param(x, marks=pytest.mark.slow) for x in every]


@pytest.mark.parametrize("case", slow_unless(QUICK, CASES))
def test_every_likelihood_goes_from_a_module_to_a_prediction(case):
    likelihood, out, targets = CASES[case]
    x = inputs()
    y = targets(x)
    ensemble = bc.posterior_ensemble(maker(out), (x, y), likelihood, temperatures=(1.0,), **SMALL)
    p = ensemble.predict(x)
    assert p.log_prob(y).isfinite().all() and p.log_prob(y).shape == y.shape
    assert bool((p.epistemic >= 0).all()) and p.aleatoric.shape == p.epistemic.shape
    assert len(ensemble.levels) == 2 and float(ensemble.log_weights.exp().sum()) == pytest.approx(1, abs=1e-5)
    if p.likelihood.has_classes:
        assert bool(((p.probabilities >= 0) & (p.probabilities <= 1)).all())
    else:
        low, high = p.interval(0.9)
        assert bool((low < high).all()) or case in ("poisson", "negative_binomial", "ordinal")
    assert p.sample(3, generator=torch.Generator().manual_seed(0)).shape == (3, *y.shape)


@pytest.mark.slow
def test_targets_of_weight_zero_may_be_missing():
    x = inputs()
    y = x[:, :1].clone()
    w = torch.ones(N, 1)
    y[::5], w[::5] = float("nan"), 0.0
    e = bc.posterior_ensemble(maker(), (x, (y, w)), bc.likelihoods.weighted(bc.likelihoods.gaussian()), **SMALL)
    assert e.predict(x).mean.isfinite().all()


@pytest.mark.parametrize("method", slow_unless(("laplace",), ["sghmc", "ensemble", "swag", "laplace", "ivon"]))
def test_methods_are_one_word_apart(method):
    x = inputs()
    y = x[:, :1]
    ensemble = bc.posterior_ensemble(maker(), (x, y), bc.likelihoods.gaussian(), method=method, **SMALL)
    p = ensemble.predict(x)
    assert p.mean.shape == y.shape and p.crps(y).isfinite().all()
    assert ensemble.report.method == method and method in str(ensemble.report)
    assert ensemble.report.cost > 1


@pytest.mark.slow
def test_data_of_every_kind_are_the_same_data():
    x = inputs()
    y = x[:, :1]
    kinds = {
        "tensors": (x, y),
        "dataset": TensorDataset(x, y),
        "loader": DataLoader(TensorDataset(x, y), N, shuffle=True, drop_last=True),
        "batches": [(x[:20], y[:20]), (x[20:], y[20:])],
        "mapping": {"x": x, "labels": y},
        "epochs": bc.epochs((x, y), N),
    }
    means = {}
    for name, data in kinds.items():
        make = maker()
        if name == "mapping":

            class Named(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.net = maker()()

                def forward(self, x):
                    return self.net(x)

            make = Named
        e = bc.posterior_ensemble(make, data, bc.likelihoods.gaussian(), method="ensemble", batch_size=16, **SMALL)
        means[name] = e.predict({"x": x} if name == "mapping" else x).mean
    for name, mean in means.items():
        torch.testing.assert_close(mean, means["tensors"], msg=name)


@pytest.mark.slow
def test_a_call_is_a_function_of_its_seed_and_leaves_the_global_generator_alone(fitted):
    x = inputs()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    again = bc.posterior_ensemble(maker(), (x, x[:, :1]), bc.likelihoods.gaussian(), **SMALL)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(fitted.predict(x).mean, again.predict(x).mean)
    cold = {"method": "ensemble", **SMALL}
    means = [
        bc.posterior_ensemble(maker(), (x, x[:, :1]), bc.likelihoods.gaussian(), seed=seed, **cold).predict(x).mean
        for seed in (0, 1)
    ]
    assert not torch.equal(*means)


class Normed(nn.Module):
    """BatchNorm and dropout."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, x):
        return self.net(x)


class Pictures(nn.Module):
    """Convolutions over two inputs laid out as a picture."""

    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(36, 1)

    def forward(self, x):
        return self.out(self.conv(x[:, :1].reshape(-1, 1, 1, 1).expand(-1, 1, 3, 3)).relu().flatten(1))


class Words(nn.Module):
    """An embedding and an LSTM over two tokens."""

    def __init__(self):
        super().__init__()
        self.embedding, self.lstm, self.out = nn.Embedding(5, 4), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x):
        tokens = (x * 2).long().clamp(-2, 2) + 2
        return self.out(self.lstm(self.embedding(tokens))[0][:, -1])


@pytest.mark.slow
@pytest.mark.parametrize("module", slow_unless((Normed,), [Normed, Pictures, Words]))
def test_modules_of_every_kind_work_by_a_maker_and_as_one_module(module):
    x = inputs()
    y = x[:, :1]
    e = bc.posterior_ensemble(module(), (x, y), bc.likelihoods.gaussian(), temperatures=(1.0,), batch_size=16, **SMALL)
    p = e.predict(x)
    assert p.mean.isfinite().all() and len(e.levels) == 2
    alone = torch.cat([e.predict(row[None]).mean for row in x[:3]])
    # in eval mode a datum's prediction is its own
    torch.testing.assert_close(alone, p.mean[:3], rtol=1e-4, atol=1e-5)
    first = next(iter(e.levels[0].params.values()))[0]
    assert not torch.equal(first[0], first[1])


def test_frozen_weights_are_shared_and_stay():
    module = maker()()
    module[0].requires_grad_(False)
    x = inputs()
    cold = {"method": "ensemble", **SMALL}
    e = bc.posterior_ensemble(module, (x, x[:, :1]), bc.likelihoods.gaussian(), **cold)
    assert sorted(e.levels[0].params) == ["2.bias", "2.weight"]
    for network in (e.problem.members.still.module, e.problem.members.training.module):
        assert network[0].weight is module[0].weight


@pytest.mark.peers
@pytest.mark.slow
def test_adapters_are_drawn_anew_as_their_library_draws_them():
    """Of LoRA one factor is random and the other 0, so that every member starts as the pretrained network."""
    peft = pytest.importorskip("peft")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 8), nn.Linear(8, 1)

        def forward(self, x):
            return self.b(self.a(x).tanh())

    base, x = Net(), inputs()
    wanted = base(x).detach()
    module = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["a", "b"]))
    members = members_of(module, 2, 0, "cpu")
    assert len(members.params) == 4 and all("lora" in name for name in members.params)
    for i in range(2):
        params = {k: v[i] for k, v in members.params.items()}
        torch.testing.assert_close(members.still(params, (x, None)), wanted)
    e = bc.posterior_ensemble(module, (x, x[:, :1]), bc.likelihoods.gaussian(), method="ensemble", **SMALL)
    assert e.predict(x).mean.shape == (N, 1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"members": 0}, "members=0"),
        ({"steps": 3}, "steps=3"),
        ({"held_out": 0.6}, "held_out=0.6"),
        ({"temperatures": (1.0, 0.3)}, "ascending"),
        ({"temperatures": 0.5}, "temperatures=0.5"),
        ({"method": "magic"}, "method='magic'"),
        ({"lr": -1.0}, "lr"),
        ({"prior_precision": "evidence"}, "'held out'"),
        ({"prior_precision": "held out", "method": "ivon"}, "pass a number"),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(change, says):
    x = inputs()
    with pytest.raises(ValueError, match=says):
        bc.posterior_ensemble(maker(), (x, x[:, :1]), bc.likelihoods.gaussian(), **{**SMALL, **change})


def test_what_cannot_be_made_right_is_refused():
    x = inputs()
    y = x[:, :1]
    same = maker()()
    gaussian = bc.likelihoods.gaussian()
    with pytest.raises(ValueError, match="start from the same weights"):
        bc.posterior_ensemble(lambda: same, (x, y), gaussian, **SMALL)

    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2, 1))

        def forward(self, x):
            return x @ self.w

    with pytest.raises(ValueError, match="cannot be drawn anew"):
        bc.posterior_ensemble(Bare(), (x, y), gaussian, **SMALL)
    with pytest.raises(ValueError, match="outputs ask for"):
        bc.posterior_ensemble(maker(), (x, y[:, 0]), gaussian, **SMALL)
    with pytest.raises(ValueError, match="NaN or infinity"):
        bc.posterior_ensemble(maker(), (x / 0, y), gaussian, **SMALL)
    with pytest.raises(ValueError, match="no targets"):
        bc.posterior_ensemble(maker(), [x], gaussian, **SMALL)
    with pytest.raises(TypeError, match=r"module.double\(\)"):
        bc.posterior_ensemble(maker(), (x.double(), y), gaussian, **SMALL)
    with pytest.raises(TypeError, match="likelihood"):
        bc.posterior_ensemble(maker(), (x, y), nn.MSELoss(), **SMALL)


def test_the_passes_that_are_counted_are_those_that_were_made():
    """Batches of 16 of 48 data: 20 steps are 20 / 3 passes, the modes' 6 are 2."""
    x = inputs()
    e = bc.posterior_ensemble(
        maker(), (x, x[:, :1]), bc.likelihoods.gaussian(), batch_size=16, method="ensemble", **SMALL
    )
    assert e.report.passes["pilot"] == pytest.approx(20 / 3)
    assert e.report.passes["modes"] == pytest.approx(2)
    # ten checkpoints, two folds of 7, each scored by half of the members, a third of a gradient each
    assert e.report.passes["scores"] == pytest.approx(10 * 7 / 48 / 3)
    assert e.report.cost == pytest.approx((20 / 3 + 2 + 10 * 7 / 48 / 3) / (20 / 3))


def test_the_report_is_printed_and_drawn(fitted):
    said = str(fitted.report)
    for word in ("pilot:", "stop:", "prior:", "modes:", "ladder:", "stack:", "scale:", "Cost:", "doctor"):
        assert word in said
    assert len(fitted.report.plot().axes) == 3


def test_targets_far_from_unit_scale_are_advised_about_by_name():
    x = inputs()
    cold = {"method": "ensemble", **SMALL}
    e = bc.posterior_ensemble(maker(), (x, 100 * x[:, :1]), bc.likelihoods.gaussian(), **cold)
    assert "standardise" in e.report.advice


@pytest.mark.slow
def test_an_ensemble_goes_on_is_saved_and_opened(tmp_path, fitted):
    x = inputs()
    y = x[:, :1]
    make, likelihood, e = maker(), bc.likelihoods.gaussian(), fitted
    longer = e.more(60)
    assert len(longer.levels[-1].loss) > len(e.levels[-1].loss)
    e.save(tmp_path / "ensemble.safetensors")
    opened = bc.ensemble.Ensemble.open(tmp_path / "ensemble.safetensors", make, likelihood, data=(x, y))
    assert torch.equal(opened.predict(x).log_prob(y), e.predict(x).log_prob(y))
    assert torch.equal(opened.more(60).predict(x).mean, longer.predict(x).mean)
    with pytest.raises(ValueError, match="without its data"):
        bc.ensemble.Ensemble.open(tmp_path / "ensemble.safetensors", make, likelihood).more(60)
    with pytest.raises(ValueError, match="other parameters"):
        bc.ensemble.Ensemble.open(tmp_path / "ensemble.safetensors", lambda: nn.Linear(2, 1), likelihood)
    assert e.to_arviz().posterior.sizes["chain"] == 2


def test_a_deep_ensemble_has_nothing_to_go_on_with():
    x = inputs()
    e = bc.posterior_ensemble(maker(), (x, x[:, :1]), bc.likelihoods.gaussian(), method="ensemble", **SMALL)
    with pytest.raises(ValueError, match="deep ensemble"):
        e.more(100)


def test_the_hottest_level_can_be_shown_to_the_doctor(fitted):
    draws = fitted.draws()
    assert draws.chains == 2
    assert bc.diagnostics.doctor(draws, of=lambda p: p["2.bias"]).numbers["chains"] == 2


def test_a_prior_that_is_given_is_the_one_that_chains_sample_under():
    x = inputs()
    kept = {**SMALL, "temperatures": (1.0,)}
    e = bc.posterior_ensemble(maker(), (x, x[:, :1]), bc.likelihoods.gaussian(), prior_precision=7.0, **kept)
    assert e.report.chosen["prior_precision"] == e.problem.prior_precision == 7.0
    assert "prior" not in e.report.passes


@pytest.mark.parametrize(("factor", "wanted"), [(5.0, 20.0), (200.0, 1.0)])
def test_chains_have_the_prior_of_training_in_units_of_their_noise(monkeypatch, factor, wanted):
    """100 at the noise of training is 20 at five times that noise, and no less than at first."""

    def found(problem, held, ended, stopped, **_):
        params, buffers = ended.last()
        moved = {"precision": 100.0, "moved": True, "params": params, "buffers": buffers, "factor": factor}
        return {**moved, "tried": [(1.0, -2.0), (100.0, -1.0)], "passes": {"prior": 0.5}}

    monkeypatch.setattr(recipe, "strengthen", found)
    x, noise = inputs(), bc.likelihoods.gaussian()
    kept = {**SMALL, "prior_precision": "held out", "method": "ensemble"}
    e = bc.posterior_ensemble(maker(), (x, x[:, :1]), noise, **kept)
    assert e.report.chosen["prior_precision"] == e.problem.prior_precision == wanted
    assert e.report.chosen["noise factor"] == factor and e.report.passes["prior"] == 0.5
    assert any("precision 100; held-out scores -2.000 at 1, -1.000 at 100" in s for s in e.report.said)


class Even:
    """Every other datum, in an order of its own."""

    def __iter__(self):
        return iter(range(N - 2, -1, -2))

    def __len__(self):
        return N // 2


def test_a_loaders_sampler_says_which_data_there_are():
    x = inputs()
    pairs = TensorDataset(x, x[:, :1])
    held, _ = read(DataLoader(pairs, 16, sampler=SubsetRandomSampler([3, 1, *range(20, 30)]), drop_last=True))
    assert torch.equal(held.inputs, x[[1, 3, *range(20, 30)]])
    assert torch.equal(read(DataLoader(pairs, 16, sampler=Even()))[0].inputs, x[::2])
    assert torch.equal(read(DataLoader(pairs, 16, shuffle=True))[0].inputs, x)
    with pytest.raises(ValueError, match="RandomSampler gives data more than once"):
        read(DataLoader(pairs, 16, sampler=RandomSampler(pairs, replacement=True, num_samples=200)))


def test_inputs_that_would_give_predictions_that_are_nothing_are_refused(fitted):
    x = inputs()
    with pytest.raises(ValueError, match="predict: the inputs of data hold NaN"):
        fitted.predict(torch.cat([x[:3], torch.full((1, 2), float("nan"))]))
    with pytest.raises(ValueError, match="to_dense"):
        bc.posterior_ensemble(maker(), (x.to_sparse(), x[:, :1]), bc.likelihoods.gaussian(), **SMALL)


def test_folds_on_which_nothing_can_be_scored_are_refused():
    x = inputs()
    y = (x[:, 0] > 0).long()
    y[5:] = -100
    with pytest.raises(ValueError, match="fewer than 4 data whose targets count"):
        bc.posterior_ensemble(maker(2), (x, y), bc.likelihoods.categorical(), **SMALL)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 2**70}, "seed="),
        ({"method": ["swag"]}, "method="),
        ({"temperatures": "1"}, "temperatures='1'"),
        ({"path": 3}, "path must be"),
        ({"progress": "no"}, "progress must be"),
        ({"mesh": "cpu"}, "mesh must be a DeviceMesh"),
    ],
)
def test_arguments_of_another_kind_are_refused_by_name(change, says):
    x = inputs()
    with pytest.raises((TypeError, ValueError), match=says):
        bc.posterior_ensemble(maker(), (x, x[:, :1]), bc.likelihoods.gaussian(), **{**SMALL, **change})


def test_a_file_is_opened_with_what_it_was_made_with_alone(tmp_path, fitted):
    file, gaussian, opening = tmp_path / "e.safetensors", bc.likelihoods.gaussian(), bc.ensemble.Ensemble.open
    fitted.save(file)
    with pytest.raises(ValueError, match="not the likelihood that was saved"):
        opening(file, maker(), bc.likelihoods.student_t())
    with pytest.raises(ValueError, match=r"not the network that was saved: .*Tanh, here ReLU"):
        opening(file, lambda: nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 1)), gaussian)
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"e\.safetensors is truncated or damaged.*save it again"):
        opening(file, maker(), gaussian)
    torch.save([1], file)
    with pytest.raises(ValueError, match=r"e\.safetensors is truncated or damaged"):
        opening(file, maker(), gaussian)
    bc.save(file, {"w": torch.ones(2)})
    with pytest.raises(ValueError, match="was written by another function"):
        opening(file, maker(), gaussian)
    files.write_tree(file, {"levels": []})
    with pytest.raises(ValueError, match=r"was not written by Ensemble\.save"):
        opening(file, maker(), gaussian)


def test_a_bit_that_flips_in_a_file_is_noticed_and_so_are_weights_that_are_none(tmp_path, fitted):
    file, gaussian = tmp_path / "e.safetensors", bc.likelihoods.gaussian()
    fitted.save(file)
    raw = file.read_bytes()
    for at in range(5, len(raw), len(raw) // 60):
        file.write_bytes(raw[:at] + bytes([raw[at] ^ 64]) + raw[at + 1 :])
        with pytest.raises(ValueError, match=r"e\.safetensors.* damaged.*save it again"):
            bc.ensemble.Ensemble.open(file, maker(), gaussian)
    file.write_bytes(raw)
    state, n = files.read_tree(file, torch.device("cpu")), len(fitted.levels)
    for wrong in ([float("nan")] * n, [2.0, *[-1.0 / max(1, n - 1)] * (n - 1)], [1.0 / (n + 1)] * (n + 1)):
        files.write_tree(file, {**state, "weights": torch.tensor(wrong)})
        with pytest.raises(ValueError, match="has weights"):
            bc.ensemble.Ensemble.open(file, maker(), gaussian)
    for key in state:
        files.write_tree(file, {name: x for name, x in state.items() if name != key})
        with pytest.raises(ValueError, match="not written by Ensemble"):
            bc.ensemble.Ensemble.open(file, maker(), gaussian)


@pytest.mark.slow
def test_five_hundred_damaged_ensembles_are_refused_by_name_in_bounded_memory(tmp_path, fitted):
    file = tmp_path / "e.safetensors"
    fitted.save(file)
    every_damage_is_refused(file, lambda: bc.ensemble.Ensemble.open(file, maker(), bc.likelihoods.gaussian()), 500)


def test_frozen_weights_of_another_network_are_refused(tmp_path):
    x, gaussian = inputs(), bc.likelihoods.gaussian()

    def frozen():
        module = maker()()
        module[0].requires_grad_(False)
        return module

    module = frozen()
    e = bc.posterior_ensemble(module, (x, x[:, :1]), gaussian, method="ensemble", **SMALL)
    e.save(tmp_path / "e.safetensors")
    again = bc.ensemble.Ensemble.open(tmp_path / "e.safetensors", module, gaussian)
    assert torch.equal(again.predict(x).mean, e.predict(x).mean)
    with pytest.raises(ValueError, match="frozen parameters differ"):
        bc.ensemble.Ensemble.open(tmp_path / "e.safetensors", frozen(), gaussian)
