"""The call as a user makes it: every likelihood, data of every kind, and what is refused."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, TensorDataset

import bayesopt_chain as bc
from bayesopt_chain.ensemble import ensemble
from bayesopt_chain.ensemble.data import read
from bayesopt_chain.ensemble.members import members_of
from bayesopt_chain.runs import files
from tests.runs.test_hostile import every_damage_is_refused

N = 48
SMALL = {"members": 2, "steps": 60, "lr": 0.05, "progress": False}


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
    ensemble = bc.posterior_ensemble(maker(out), (x, y), likelihood, **SMALL)
    p = ensemble.predict(x)
    assert p.log_prob(y).isfinite().all() and p.log_prob(y).shape == y.shape
    assert bool((p.epistemic >= 0).all()) and p.aleatoric.shape == p.epistemic.shape
    if p.likelihood.has_classes:
        assert bool(((p.probabilities >= 0) & (p.probabilities <= 1)).all())
    else:
        low, high = p.interval(0.9)
        assert bool((low < high).all()) or case in ("poisson", "negative_binomial", "ordinal")
    assert p.sample(3, generator=torch.Generator().manual_seed(0)).shape == (3, *y.shape)


@pytest.mark.parametrize("most", [0, 3_000], ids=["all are added up", "from the second batch on"])
def test_tokens_of_many_draws_are_added_up_one_draw_after_another(most, monkeypatch):
    words = torch.randint(0, 7, (12, 5), generator=torch.Generator().manual_seed(0))
    made = bc.posterior_ensemble(lambda: nn.Embedding(7, 40), (words, words), bc.likelihoods.categorical(), **SMALL)
    made = replace(made, factor=1.5)
    kept, batches = made.predict(words), [words[:5], words[5:]]
    monkeypatch.setattr(ensemble, "MOST_NUMBERS", most)
    pooled = made.predict(batches)
    draws = made.params["weight"].shape[0] * 2
    assert (kept.outputs.shape, pooled.outputs.shape) == ((draws, 12, 5, 40), (1, 12, 5, 40))
    for name in ("probabilities", "entropy", "aleatoric", "epistemic"):
        torch.testing.assert_close(getattr(pooled, name), getattr(kept, name), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pooled.log_prob(words), kept.log_prob(words))


@pytest.mark.slow
def test_targets_of_weight_zero_may_be_missing():
    x = inputs()
    y = x[:, :1].clone()
    w = torch.ones(N, 1)
    y[::5], w[::5] = float("nan"), 0.0
    e = bc.posterior_ensemble(maker(), (x, (y, w)), bc.likelihoods.weighted(bc.likelihoods.gaussian()), **SMALL)
    assert e.predict(x).mean.isfinite().all()


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
        e = bc.posterior_ensemble(make, data, bc.likelihoods.gaussian(), batch_size=16, **SMALL)
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
    other = bc.posterior_ensemble(maker(), (x, x[:, :1]), bc.likelihoods.gaussian(), seed=1, **SMALL)
    assert not torch.equal(again.predict(x).mean, other.predict(x).mean)


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
    e = bc.posterior_ensemble(module(), (x, y), bc.likelihoods.gaussian(), batch_size=16, **SMALL)
    p = e.predict(x)
    assert p.mean.isfinite().all()
    alone = torch.cat([e.predict(row[None]).mean for row in x[:3]])
    # in eval mode a datum's prediction is its own
    torch.testing.assert_close(alone, p.mean[:3], rtol=1e-4, atol=1e-5)
    first = next(iter(e.params.values()))[0]
    assert not torch.equal(first[0], first[1])


def test_frozen_weights_are_shared_and_stay():
    module = maker()()
    module[0].requires_grad_(False)
    x = inputs()
    e = bc.posterior_ensemble(module, (x, x[:, :1]), bc.likelihoods.gaussian(), **SMALL)
    assert sorted(e.params) == ["2.bias", "2.weight"] and not e.scale.said
    for network in (e.members.still.module, e.members.training.module, *e.modules()):
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
    e = bc.posterior_ensemble(module, (x, x[:, :1]), bc.likelihoods.gaussian(), **SMALL)
    assert e.predict(x).mean.shape == (N, 1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"members": 0}, "members=0"),
        ({"steps": 3}, "steps=3"),
        ({"held_out": 0.6}, "held_out=0.6"),
        ({"lr": -1.0}, "lr"),
        ({"minutes": 0}, "minutes"),
        ({"minutes": 1.0}, "two budgets"),
        ({"prior_precision": "evidence"}, "prior_precision"),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(change, says):
    x = inputs()
    with pytest.raises((TypeError, ValueError), match=says):
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
    """Batches of 16 of 48 data: 60 steps are 20 passes, the 18 with all data are 6."""
    x = inputs()
    e = bc.posterior_ensemble(maker(), (x, x[:, :1]), bc.likelihoods.gaussian(), batch_size=16, **SMALL)
    assert e.report.passes == {"rate": 0.0, "training": pytest.approx(26)}
    assert e.report.cost == pytest.approx(1.3)


def test_the_report_is_printed(fitted):
    said = str(fitted.report)
    for word in ("standardised:", "training:", "prior:", "noise:", "constant", "Cost:", "Ensemble of 2 networks"):
        assert word in said


def test_an_ensemble_is_saved_and_opened(tmp_path, fitted):
    x = inputs()
    y = x[:, :1]
    make, likelihood, e = maker(), bc.likelihoods.gaussian(), fitted
    e.save(tmp_path / "ensemble.safetensors")
    opened = bc.ensemble.Ensemble.open(tmp_path / "ensemble.safetensors", make, likelihood)
    assert torch.equal(opened.predict(x).log_prob(y), e.predict(x).log_prob(y))
    with pytest.raises(ValueError, match="other parameters"):
        bc.ensemble.Ensemble.open(tmp_path / "ensemble.safetensors", lambda: nn.Linear(2, 1), likelihood)
    assert e.draws().chains == 2 and str(opened.report) == str(e.report)


def test_a_prior_that_is_given_is_the_one_of_all_members():
    x = inputs()
    e = bc.posterior_ensemble(maker(), (x, x[:, :1]), bc.likelihoods.gaussian(), prior_precision=7.0, **SMALL)
    assert e.report.chosen["prior_precision"] == 7.0 and "prior: precision 7, as given." in e.report.said


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
    files.write_tree(file, {"params": {}})
    with pytest.raises(ValueError, match=r"was not written by Ensemble\.save"):
        opening(file, maker(), gaussian)


def test_a_bit_that_flips_in_a_file_is_noticed(tmp_path, fitted):
    file, gaussian = tmp_path / "e.safetensors", bc.likelihoods.gaussian()
    fitted.save(file)
    raw = file.read_bytes()
    for at in range(5, len(raw), len(raw) // 60):
        file.write_bytes(raw[:at] + bytes([raw[at] ^ 64]) + raw[at + 1 :])
        with pytest.raises(ValueError, match=r"e\.safetensors.* damaged.*save it again"):
            bc.ensemble.Ensemble.open(file, maker(), gaussian)
    file.write_bytes(raw)
    state = files.read_tree(file, torch.device("cpu"))
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
    e = bc.posterior_ensemble(module, (x, x[:, :1]), gaussian, **SMALL)
    e.save(tmp_path / "e.safetensors")
    again = bc.ensemble.Ensemble.open(tmp_path / "e.safetensors", module, gaussian)
    assert torch.equal(again.predict(x).mean, e.predict(x).mean)
    with pytest.raises(ValueError, match="frozen parameters differ"):
        bc.ensemble.Ensemble.open(tmp_path / "e.safetensors", frozen(), gaussian)
