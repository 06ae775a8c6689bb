"""The call as a user makes it: every likelihood, data of every kind, and what is refused."""

import itertools
import pickle
import threading
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from sklearn.model_selection import GridSearchCV
from sklearn.utils.estimator_checks import check_estimator
from torch import nn
from torch.nn.utils.parametrizations import orthogonal
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SubsetRandomSampler, TensorDataset

import bayesopt_chain as bc
from bayesopt_chain.ensemble import call, training
from bayesopt_chain.ensemble.data import read
from bayesopt_chain.ensemble.members import members_of
from bayesopt_chain.runs import files
from bayesopt_chain.sklearn import PosteriorClassifier, PosteriorRegressor
from tests.nets import Net
from tests.runs.test_hostile import every_damage_is_refused

N = 48
SMALL = {"members": 2, "steps": 60, "lr": 0.05, "progress": False}


X = torch.randn(N, 2, generator=torch.Generator().manual_seed(0))
Y = X[:, :1]
GAUSSIAN = bc.likelihoods.gaussian()


def maker(out=1):
    return lambda: nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, out))


MAKE = maker()


def locked():
    module = MAKE()
    module.lock = threading.Lock()
    return module


@pytest.fixture(scope="module")
def fitted():
    """One ensemble of a linear target, for tests that only look at it."""
    return bc.posterior_ensemble(maker(), (X, Y), GAUSSIAN, **SMALL)


CASES = {
    "gaussian": (GAUSSIAN, 1, lambda x: x[:, :1] + 0.1 * x[:, 1:]),
    "learned": (bc.likelihoods.gaussian("learned"), 2, lambda x: x[:, :1]),
    "student": (bc.likelihoods.student_t(), 1, lambda x: x[:, :1]),
    "bernoulli": (bc.likelihoods.bernoulli(), 1, lambda x: (x[:, :1] > 0).float()),
    "categorical": (bc.likelihoods.categorical(), 3, lambda x: (x[:, 0] > 0).long() + (x[:, 1] > 0).long()),
    "ordinal": (bc.likelihoods.ordinal([-1.0, 1.0]), 1, lambda x: (x[:, :1] > 0).long() + (x[:, 1:] > 0).long()),
    "poisson": (bc.likelihoods.poisson(), 1, lambda x: x[:, :1].exp().round()),
    "negative_binomial": (bc.likelihoods.negative_binomial(2.0), 1, lambda x: x[:, :1].exp().round()),
}


QUICK = ("gaussian", "categorical")  # the quick tier has these


def slow_unless(quick, every):
    """Parameters, those that are not quick with the marker."""
    return [x if x in quick else pytest.param(x, marks=pytest.mark.slow) for x in every]


@pytest.mark.parametrize("case", slow_unless(QUICK, CASES))
def test_every_likelihood_goes_from_a_module_to_a_prediction(case):
    likelihood, out, targets = CASES[case]
    y = targets(X)
    ensemble = bc.posterior_ensemble(maker(out), (X, y), likelihood, **SMALL)
    p = ensemble.predict(X)
    assert p.log_prob(y).isfinite().all() and p.log_prob(y).shape == y.shape
    assert bool((p.epistemic >= 0).all()) and p.aleatoric.shape == p.epistemic.shape
    if p.likelihood.has_classes:
        assert bool(((p.probabilities >= 0) & (p.probabilities <= 1)).all())
    else:
        low, high = p.interval(0.9)
        assert bool((low < high).all()) or case in ("poisson", "negative_binomial", "ordinal")
    assert p.sample(3, generator=torch.Generator().manual_seed(0)).shape == (3, *y.shape)


def test_a_single_logit_may_start_at_1():
    def make():
        net = maker()()
        nn.init.zeros_(net[2].weight)
        nn.init.ones_(net[2].bias)
        return net

    bc.posterior_ensemble(make, (X, (X[:, :1] > 0).float()), bc.likelihoods.bernoulli(), **SMALL)


@pytest.mark.parametrize("most", [0, 3_000], ids=["all are added up", "from the second batch on"])
def test_tokens_of_many_draws_are_added_up_one_draw_after_another(most, monkeypatch):
    words = torch.randint(0, 7, (12, 5), generator=torch.Generator().manual_seed(0))
    made = bc.posterior_ensemble(lambda: nn.Embedding(7, 40), (words, words), bc.likelihoods.categorical(), **SMALL)
    made = replace(made, factor=1.5)
    kept, batches = made.predict(words), [words[:5], words[5:]]
    monkeypatch.setattr(call, "MOST_NUMBERS", most)
    pooled = made.predict(batches)
    draws = made.params["weight"].shape[0] * 2
    assert (kept.outputs.shape, pooled.outputs.shape) == ((draws, 12, 5, 40), (1, 12, 5, 40))
    for name in ("probabilities", "entropy", "aleatoric", "epistemic"):
        torch.testing.assert_close(getattr(pooled, name), getattr(kept, name), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pooled.log_prob(words), kept.log_prob(words))


@pytest.mark.slow
def test_targets_of_weight_zero_may_be_missing():
    y = Y.clone()
    w = torch.ones(N, 1)
    y[::5], w[::5] = float("nan"), 0.0
    e = bc.posterior_ensemble(maker(), (X, (y, w)), bc.likelihoods.weighted(GAUSSIAN), **SMALL)
    assert e.predict(X).mean.isfinite().all()


@pytest.mark.slow
def test_data_of_every_kind_are_the_same_data():
    kinds = {
        "tensors": (X, Y),
        "dataset": TensorDataset(X, Y),
        "loader": DataLoader(TensorDataset(X, Y), N, shuffle=True, drop_last=True),
        "batches": [(X[:20], Y[:20]), (X[20:], Y[20:])],
        "epochs": bc.epochs((X, Y), N),
    }
    means = {}
    for name, data in kinds.items():
        e = bc.posterior_ensemble(maker(), data, GAUSSIAN, batch_size=16, **SMALL)
        means[name] = e.predict(X).mean
    for name, mean in means.items():
        torch.testing.assert_close(mean, means["tensors"], msg=name)


@pytest.mark.slow
def test_a_call_is_a_function_of_its_seed_and_leaves_the_global_generator_alone(fitted):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    again = bc.posterior_ensemble(maker(), (X, Y), GAUSSIAN, **SMALL)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(fitted.predict(X).mean, again.predict(X).mean)
    other = bc.posterior_ensemble(maker(), (X, Y), GAUSSIAN, seed=1, **SMALL)
    assert not torch.equal(again.predict(X).mean, other.predict(X).mean)


def test_frozen_weights_are_shared_and_stay():
    module = maker()()
    module[0].requires_grad_(False)
    e = bc.posterior_ensemble(module, (X, Y), GAUSSIAN, **SMALL)
    assert sorted(e.params) == ["2.bias", "2.weight"] and not e.scale.said
    for network in (e.members.still.module, e.members.training.module, *e.modules()):
        assert network[0].weight is module[0].weight


@pytest.mark.peers
@pytest.mark.slow
def test_adapters_are_drawn_anew_as_their_library_draws_them():
    """Of LoRA one factor is random and the other 0, so that every member starts as the pretrained network."""
    peft = pytest.importorskip("peft")

    base = Net(lambda net, x: net.b(net.a(x).tanh()), a=nn.Linear(2, 8), b=nn.Linear(8, 1))
    wanted = base(X).detach()
    module = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["a", "b"]))
    members = members_of(module, 2, 0, "cpu")
    assert len(members.params) == 4 and all("lora" in name for name in members.params)
    for i in range(2):
        params = {k: v[i] for k, v in members.params.items()}
        torch.testing.assert_close(members.still(params, (X, None)), wanted)
    assert bc.posterior_ensemble(module, (X, Y), GAUSSIAN, **SMALL).predict(X).mean.shape == (N, 1)


def weight_normed():
    with pytest.warns(FutureWarning):
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(2, 3)), nn.Linear(3, 1))


def growing():
    """Makes modules, the next of which has a larger buffer."""
    made = []

    def make():
        made.append(nn.Linear(2, 1))
        made[-1].register_buffer("count", torch.zeros(len(made)))
        return made[-1]

    return make


NORMED = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
SAME, BARE = maker()(), Net(lambda net, x: x @ net.w, w=nn.Parameter(torch.zeros(2, 1)))
FEW = (X[:, 0] > 0).long().where(torch.arange(N) < 5, -100)


OF_THE_CALL = [
    ({"members": 0}, "posterior_ensemble: members must be"),
    ({"steps": 3}, "posterior_ensemble: steps must be"),
    ({"held_out": 0.6}, "posterior_ensemble: held_out must be"),
    ({"lr": -1.0}, "lr"),
    ({"minutes": 0}, "minutes"),
    ({"minutes": 1.0}, "two budgets"),
    ({"prior_precision": "evidence"}, "prior_precision"),
    ({"seed": 2**70}, "posterior_ensemble: seed must be"),
    ({"path": 3}, "path must be"),
    ({"progress": "no"}, "progress must be"),
    ({"mesh": "cpu"}, "mesh must be a DeviceMesh"),
    (
        {"make_model": NORMED, "batch_size": 1},
        r"posterior_ensemble: a step of training with batch_size=1: .*more than 1 v",
    ),
]
WRONG = [
    (lambda: SAME, (X, Y), GAUSSIAN, ValueError, "start from the same weights"),
    (BARE, (X, Y), GAUSSIAN, ValueError, "cannot be drawn anew"),
    (
        lambda: nn.Sequential(orthogonal(nn.Linear(2, 3)), nn.Linear(3, 1)),
        (X, Y),
        GAUSSIAN,
        ValueError,
        "0.parametrizations.weight.0 .* rounds .*cayley",
    ),
    (maker(), (X, X[:, 0]), GAUSSIAN, ValueError, "outputs ask for"),
    (
        lambda: Net(lambda net, x: net.net(x) / 0, net=nn.Linear(2, 1)),
        (X, Y),
        GAUSSIAN,
        ValueError,
        "NaN or infinite before anything is trained.* mask classes with -1e4",
    ),
    (maker(), (X / 0, Y), GAUSSIAN, ValueError, "posterior_ensemble: inputs are NaN or infinite for 48 of 48"),
    (maker(), [*zip(X, Y[:, 0])], GAUSSIAN, ValueError, "of single data make a DataLoader"),
    (maker(), [*zip(X, Y)], GAUSSIAN, ValueError, "lengths.* of single data make a DataLoader"),
    (
        lambda: nn.Sequential(nn.Linear(2, 3), nn.Softmax(1)),
        (X, (X[:, 0] > 0).long()),
        bc.likelihoods.categorical(),
        ValueError,
        "probabilities.* leave out the softmax",
    ),
    (maker(), [*zip(X, "abc" * 16)], GAUSSIAN, ValueError, "of single data make a DataLoader"),
    (
        maker(),
        DataLoader([(X[i, : 1 + i % 2], Y[i]) for i in range(N)], 9),
        GAUSSIAN,
        ValueError,
        "needs the same shape",
    ),
    (maker(), [], GAUSSIAN, ValueError, "data has no batches"),
    (maker(), itertools.repeat((X, Y)), GAUSSIAN, TypeError, r"generator that ends pass list\(batches\)"),
    (maker(), 5, GAUSSIAN, TypeError, "data must be tensors"),
    (maker(), bc.epochs(TensorDataset(X, Y), 8), GAUSSIAN, TypeError, "of bc.epochs of a Dataset the Dataset"),
    (maker(), {"x": X, "labels": Y}, GAUSSIAN, TypeError, "with the names of its arguments and no others"),
    (locked(), (X, Y), GAUSSIAN, ValueError, "module cannot be copied .*lock"),
    (nn.Sequential(nn.LazyBatchNorm1d(), nn.Linear(2, 1)), (X, Y), GAUSSIAN, ValueError, "LazyModule"),
    (maker(), [X], GAUSSIAN, ValueError, r"no targets: .* \(inputs, \(targets, weights\)\).* keys labels,"),
    (
        maker(),
        (X.numpy(), Y),
        GAUSSIAN,
        TypeError,
        r"posterior_ensemble: .* holds ndarray .*of pandas of its \.to_numpy",
    ),
    (maker(), (X, Y > 0), GAUSSIAN, TypeError, r"targets\.float\(\)"),
    (
        maker(),
        (X, 1e9 + 10 * Y.double()),
        GAUSSIAN,
        ValueError,
        r"around 1e\+09.*float32 cannot tell apart: subtract",
    ),
    (maker(), (X, 10**9 + (10 * Y).long()), bc.likelihoods.student_t(), ValueError, "cannot tell apart: subtract"),
    (maker(), (X[:8], Y[:8]), GAUSSIAN, ValueError, "8 data are too few to leave some out: at least 9"),
    (maker(), (X.double(), Y), GAUSSIAN, ValueError, r"data: .*got Double and Float.* the model \(module\.double\(\)"),
    (lambda: maker()().double(), (X, Y), GAUSSIAN, ValueError, r"data: .*got Float and Double.* convert the inputs"),
    (maker(), (X.to_sparse(), Y), GAUSSIAN, ValueError, "to_dense"),
    (
        maker(),
        (X.long(), Y),
        GAUSSIAN,
        ValueError,
        r"posterior_ensemble: data: .*got Long and Float.* convert the inputs",
    ),
    (maker(), (X[:, :1], Y), GAUSSIAN, ValueError, "posterior_ensemble: data: the model cannot take it .*shapes"),
    (weight_normed, (X, Y), GAUSSIAN, ValueError, "module cannot be copied.*weight_norm"),
    (maker(), (X, 1e-18 * Y), GAUSSIAN, ValueError, "targets in other units, or in float64"),
    (maker(), (X, 1e30 * Y), GAUSSIAN, ValueError, "targets in other units, or in float64"),
    (
        maker(2),
        (X, 1e30 * Y),
        bc.likelihoods.gaussian("learned"),
        ValueError,
        "targets in other units, or in float64",
    ),
    (maker(), (X, 1e30 * Y), bc.likelihoods.student_t(), ValueError, "targets in other units, or in float64"),
    *(
        (
            maker(2 * p),
            (X, torch.hstack([Y, 0 * Y])),
            bc.likelihoods.gaussian(v),
            ValueError,
            "are all equal, so that there is no",
        )
        for p, v in ((1, 1.0), (2, "learned"))
    ),
    (lambda: nn.DataParallel(maker()()), (X, Y), GAUSSIAN, ValueError, "a DataParallel cannot .* model.module"),
    (maker(), (X, Y), nn.MSELoss(), TypeError, "likelihood"),
    (
        maker(),
        (X, (Y, 0 * Y)),
        bc.likelihoods.weighted(GAUSSIAN),
        ValueError,
        "fewer than 4 data whose targets count",
    ),
    (growing(), (X, Y), GAUSSIAN, ValueError, "returned other parameters or buffers for member 1"),
    (Mock(side_effect=[SAME, RuntimeError("no second")]), (X, Y), GAUSSIAN, RuntimeError, "^no second"),
    (lambda: nn.Linear(2, 1, dtype=torch.complex64), (X, Y), GAUSSIAN, ValueError, "complex parameters"),
    (maker(2), (X, FEW), bc.likelihoods.categorical(), ValueError, "fewer than 4 data whose targets count"),
]


@pytest.mark.parametrize(
    "change, error, words",
    [
        *((change, (TypeError, ValueError), words) for change, words in OF_THE_CALL),
        *(({"make_model": m, "data": d, "likelihood": p}, error, words) for m, d, p, error, words in WRONG),
    ],
)
def test_what_cannot_be_made_right_is_refused_by_name(change, error, words):
    given = {"make_model": maker(), "data": (X, Y), "likelihood": GAUSSIAN, **SMALL}
    with pytest.raises(error, match=words):
        bc.posterior_ensemble(**given | change)


def test_the_call_that_makes_lazy_layers_leaves_no_statistics_in_a_norm():
    def make():
        return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.Linear(3, 1))

    buffers = members_of(make, 2, 0, "cpu", inputs=1e6 * X[:2]).buffers
    assert not bool(buffers["1.running_mean"].any()) and bool((buffers["1.running_var"] == 1).all())


def test_inputs_that_would_give_predictions_that_are_nothing_are_refused(fitted):
    with pytest.raises(ValueError, match="predict: inputs are NaN or infinite for 1 of 4 data, number 3"):
        fitted.predict(torch.cat([X[:3], torch.full((1, 2), float("nan"))]))
    with pytest.raises(TypeError, match=r"^Ensemble.predict: data must be inputs \(of an array torch.as_tensor\)"):
        fitted.predict(X.numpy())
    with pytest.raises(ValueError, match=r"predict: the networks return \(1,\) for 2 data: pass inputs \[N, \*\]"):
        fitted.predict(X[0])


@pytest.mark.slow
def test_the_passes_that_are_counted_are_those_that_were_made_and_a_prior_that_is_given_is_that_of_all():
    """Batches of 16 of 48 data: 60 steps are 20 passes, the 18 with all data are 6."""
    e = bc.posterior_ensemble(maker(), (X, Y), GAUSSIAN, batch_size=16, prior_precision=7.0, **SMALL)
    assert e.report.chosen["prior_precision"] == 7.0 and "prior_precision=7," in str(e.report)
    assert e.report.passes == {"rate": 0.0, "training": pytest.approx(26)}
    assert e.report.cost == pytest.approx(1.3)


def test_the_report_is_printed(fitted):
    assert repr(fitted) == "Ensemble(ensemble of 2 networks)"
    words = ("standardised:", "training:", "prior:", "noise:", "constant", "Cost:", "Ensemble of 2 networks")
    assert [word for word in words if word not in str(fitted.report)] == []


def test_an_ensemble_is_saved_and_opened(tmp_path, fitted):
    (tmp_path / "latest").symlink_to(tmp_path / "ensemble.safetensors")  # a link stays one
    fitted.save(tmp_path / "latest")
    opened = opened_as(tmp_path / "ensemble.safetensors")
    assert torch.equal(opened.predict(X).log_prob(Y), fitted.predict(X).log_prob(Y))
    assert fitted.draws().chains == 2 and str(opened.report) == str(fitted.report)


class Small(nn.Linear):
    """A network that its class makes."""

    def __init__(self):
        super().__init__(2, 1)


@pytest.mark.parametrize("make", [Small, lambda: nn.Sequential(nn.LazyLinear(3), nn.Tanh(), nn.LazyLinear(1))])
def test_a_class_or_lazy_layers_make_the_networks_of_a_call_and_of_a_file(make, tmp_path):
    made = bc.posterior_ensemble(make, (X, Y), GAUSSIAN, **SMALL)
    made.save(tmp_path / "e.safetensors")
    assert torch.equal(opened_as(tmp_path / "e.safetensors", make).predict(X).mean, made.predict(X).mean)


class Even:
    """Every other datum, in an order of its own."""

    def __iter__(self):
        return iter(range(N - 2, -1, -2))

    def __len__(self):
        return N // 2


def test_a_loaders_sampler_says_which_data_there_are():
    pairs = TensorDataset(X, Y)
    held, _ = read(DataLoader(pairs, 16, sampler=SubsetRandomSampler([3, 1, *range(20, 30)]), drop_last=True))
    assert torch.equal(held[0], X[[1, 3, *range(20, 30)]])
    assert torch.equal(read(DataLoader(pairs, 16, sampler=Even()))[0][0], X[::2])
    assert torch.equal(read(DataLoader(pairs, 16, shuffle=True))[0][0], X)
    few = RandomSampler(pairs, num_samples=20)
    assert len(read(DataLoader(pairs, 16, sampler=few))[0][0]) == 20
    with pytest.raises(ValueError, match="RandomSampler gives data more than once"):
        read(DataLoader(pairs, 16, sampler=RandomSampler(pairs, replacement=True, num_samples=200)))
    with pytest.raises(ValueError, match="list gives data more than once"):
        read(DataLoader(pairs, batch_sampler=[list(range(9)), [8, 9]]))
    before = torch.get_rng_state()
    assert len(read(DataLoader(pairs, batch_sampler=BatchSampler(SubsetRandomSampler(range(20)), 9, True)))[0][0]) == 20
    assert torch.equal(before, torch.get_rng_state())


def test_what_epochs_leave_out_is_not_read():
    found, size = read(bc.epochs((X, Y), 8, leave_out=torch.tensor([0, 5])))
    kept = [i for i in range(N) if i not in (0, 5)]
    assert size == 8 and torch.equal(found[0], X[kept]) and torch.equal(found[1], Y[kept])


def opened_as(file, module=MAKE, likelihood=GAUSSIAN):
    return bc.ensemble.Ensemble.open(file, module, likelihood)


@pytest.mark.parametrize(
    "spoiled, given, words",
    [
        (None, {"likelihood": bc.likelihoods.student_t()}, "not what was saved: likelihood"),
        (None, {"module": lambda: nn.Linear(2, 1)}, r"not what was saved: parameters\.0"),
        (
            None,
            {"module": lambda: nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 1))},
            r"not what was saved: network.*Tanh, here ReLU",
        ),
        (
            lambda file: file.write_bytes(file.read_bytes()[:200]),
            {},
            r"e\.safetensors is truncated or damaged.*save it again",
        ),
        (lambda file: torch.save([1], file), {}, r"e\.safetensors is truncated or damaged"),
        (lambda file: bc.save(file, {"w": torch.ones(2)}), {}, "was written by another function"),
        (lambda file: files.write_tree(file, {"params": {}}), {}, r"was not written by Ensemble\.save"),
    ],
)
def test_a_file_is_opened_with_what_it_was_made_with_alone(spoiled, given, words, tmp_path, fitted):
    file = tmp_path / "e.safetensors"
    fitted.save(file)
    if spoiled is not None:
        spoiled(file)
    with pytest.raises(ValueError, match=words):
        opened_as(file, **given)


def test_an_entry_that_is_missing_is_noticed(tmp_path, fitted):
    file = tmp_path / "e.safetensors"
    fitted.save(file)
    state = files.read_tree(file, torch.device("cpu"))
    for key in state:
        files.write_tree(file, {name: x for name, x in state.items() if name != key})
        with pytest.raises(ValueError, match="not written by Ensemble"):
            opened_as(file)


@pytest.mark.slow
def test_five_hundred_damaged_ensembles_are_refused_by_name_in_bounded_memory(tmp_path, fitted):
    fitted.save(tmp_path / "e.safetensors")
    every_damage_is_refused(tmp_path / "e.safetensors", lambda: opened_as(tmp_path / "e.safetensors"), 500)


@pytest.mark.slow
def test_frozen_weights_of_another_network_are_refused(tmp_path):
    def frozen():
        module = maker()()
        module[0].requires_grad_(False)
        return module

    module, file = frozen(), tmp_path / "e.safetensors"
    e = bc.posterior_ensemble(module, (X, Y), GAUSSIAN, **SMALL)
    e.save(file)
    assert torch.equal(opened_as(file, module).predict(X).mean, e.predict(X).mean)
    with pytest.raises(ValueError, match="not what was saved: frozen"):
        opened_as(file, frozen())


# The estimators keep scikit-learn's contract and predict in the targets' own units


TINY = {"members": 1, "steps": 20, "lr": 0.1, "batch_size": 256, "random_state": 0}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [PosteriorRegressor, PosteriorClassifier])
def test_an_estimator_passes_every_check_of_scikit_learn(kind, monkeypatch):
    """A hundred fits of 20 steps, for which tracing the step would take three times as long as making them."""
    monkeypatch.setattr(training, "traced", Mock(side_effect=NotImplementedError))
    check_estimator(kind((10,), **TINY))


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 2))
    return x, 50 + 100 * x[:, 0] + rng.normal(size=80)


@pytest.mark.slow
def test_a_regressor_predicts_in_the_units_of_its_targets():
    x, y = data()
    model = PosteriorRegressor((10,), **{**TINY, "steps": 200}).fit(x, y)
    mean, deviation = model.predict(x, return_std=True)
    assert model.score(x, y) > 0.9 and mean.shape == deviation.shape == (80,)
    low, high = model.predict_interval(x, 0.9)
    np.testing.assert_allclose(model.ensemble_.predict(torch.tensor(x)).quantile(0.95)[:, 0], high)
    assert 0.75 <= np.mean((low <= y) & (y <= high)) <= 1
    np.testing.assert_allclose(high - low, 2 * 1.645 * deviation, rtol=0.02)  # Gaussian noise is nearly all of it


def test_several_outputs_are_predicted_together_of_arrays_in_any_order():
    x, y = data()
    both = PosteriorRegressor((10,), **TINY).fit(x[::-1], np.stack([y, -y], 1)[::-1])
    assert both.predict(x[::-1]).shape == (80, 2)


@pytest.mark.slow
def test_a_constant_is_predicted_where_all_targets_are_one_number_and_one_layer_is_a_number():
    x, _ = data()
    model = PosteriorRegressor(10, **{**TINY, "steps": 200})
    for y in (np.full(80, 300.0), np.full((80, 2), [300.0, -7.0])):
        np.testing.assert_allclose(model.fit(x, y).predict(x), y, atol=0.5)
    for level in (1.0, "wide"):
        with pytest.raises((TypeError, ValueError), match="interval: level must be"):
            model.predict_interval(x, level)


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"hidden": (0,)}, ValueError, "hidden, the units of each layer, must be a whole number, at least 1, got 0"),
        ({"hidden": "wide"}, TypeError, "hidden, the units of each layer, must be a whole number"),
        ({"make_model": nn.Linear(2, 1)}, TypeError, "make_model is a module: pass a function"),
    ],
)
def test_networks_that_cannot_be_made_are_refused(changes, error, words):
    with pytest.raises(error, match=words):
        PosteriorRegressor(**{**TINY, **changes}).fit(*data())


def test_a_classifier_has_probabilities_of_its_labels_and_goes_through_pickle():
    x, y = data()
    model = PosteriorClassifier((10,), **TINY).fit(x, np.where(y > 50, "high", "low"))
    p = model.predict_proba(x)
    np.testing.assert_allclose(p.sum(1), 1)
    assert list(model.classes_) == ["high", "low"]
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict_proba(x), p)


@pytest.mark.slow
def test_a_network_of_ones_own_is_searched_over():
    x, y = data()
    search = GridSearchCV(
        PosteriorRegressor(make_model=lambda d, out: nn.Linear(d, out), **TINY), {"prior_precision": [1.0, 1e4]}, cv=2
    )
    assert search.fit(x, y).best_params_ == {"prior_precision": 1.0}
