"""Untidy data and modules of any kind: units, noise of each output, constants that do better, residuals, lazy layers."""

import copy
import re
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain._torch import traced
from bayesopt_chain.ensemble import call, held, training
from bayesopt_chain.ensemble import stages as on_disk
from bayesopt_chain.ensemble.data import Data, Scale, moments
from bayesopt_chain.ensemble.members import members_of
from bayesopt_chain.ensemble.training import Problem, Training, program
from tests.failing import failing
from tests.nets import Net

GAUSSIAN = bc.likelihoods.gaussian()


def ensemble(x, y, outputs=1, likelihood=GAUSSIAN, make=None, **changes):
    torch.manual_seed(0)

    def plain():
        return nn.Sequential(nn.Linear(x.shape[1], 8), nn.Tanh(), nn.Linear(8, outputs))

    kept = {"members": 2, "steps": 300, "lr": 0.01, "progress": False, **changes}
    return bc.posterior_ensemble(make or plain, (x, y), likelihood, **kept)


@pytest.fixture
def x():
    return torch.randn(60, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
def test_each_output_has_a_noise_of_its_own():
    """One of variance .0025 and one of 1: intervals of .9 cover .8 to .97 of 300 targets of either."""
    x = torch.rand(300, 1) * 2 - 1
    y = torch.cat([x + 0.05 * torch.randn(300, 1), -x + torch.randn(300, 1)], 1)
    low, high = ensemble(x, y, 2).predict(x).interval(0.9)
    cover = ((low < y) & (y < high)).double().mean(0)
    assert bool(((cover > 0.8) & (cover < 0.97)).all()), cover


@pytest.mark.slow
@pytest.mark.parametrize("likelihood, outputs", [(GAUSSIAN, 1), (bc.likelihoods.gaussian("learned"), 2)])
def test_units_of_inputs_and_targets_do_not_matter(likelihood, outputs):
    """Scores of targets times 1e6 plus 1e6, at inputs times 1e3 plus 1e4, differ by log 1e6 alone, to rounding."""
    x = torch.randn(200, 3)
    y = x[:, :1].sin() + 0.1 * torch.randn(200, 1)
    scores = []
    for inputs, targets in ((x, y), (1e3 * x + 1e4, 1e6 * y + 1e6)):
        found = ensemble(inputs.double(), targets.double(), make=lambda: maker(outputs), likelihood=likelihood)
        scores.append(found.predict(inputs.double()).log_prob(targets.double()).mean())
    assert float(scores[0] - scores[1]) == pytest.approx(6 * 2.302585, abs=0.02)
    assert float(found.predict(inputs.double()).mean.sub(targets).square().mean() / targets.var()) < 0.1


@pytest.mark.slow
def test_outputs_without_an_axis_of_their_own_are_as_good_as_one_output():
    x = torch.randn(60, 3)
    column = ensemble(x, x[:, :1].sin(), make=lambda: maker(1).float(), steps=20).predict(x)
    plain = ensemble(x, x[:, 0].sin(), make=lambda: nn.Sequential(*maker(1).float(), nn.Flatten(0)), steps=20).predict(
        x
    )
    torch.testing.assert_close(plain.mean, column.mean[:, 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(plain.variance, column.variance[:, 0], rtol=1e-4, atol=1e-5)


def maker(outputs, inputs=3, width=8):
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs)).double()


def wide():
    return nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 1))


@pytest.mark.slow
def test_networks_that_a_constant_beats_are_an_error_that_carries_them():
    """Counts that do not depend on the inputs, and a network that learns them by heart."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(150, 5, generator=generator), torch.poisson(torch.full((150, 1), 3.0), generator)
    with pytest.raises(bc.ensemble.EnsembleError, match=r"worse than a constant.*advises: counts vary") as caught:
        ensemble(x, y, likelihood=bc.likelihoods.poisson(), make=wide, steps=1500, lr=0.03, prior_precision=1e-6)
    found = caught.value.ensemble
    assert found.report.held_out["ensemble"] < found.report.held_out["constant"]
    assert any("better than it by -" in sentence for sentence in found.report.said)
    assert found.predict(x).mean.shape == (150, 1)


def counts(seed, spread):
    """Of mean 5 and variance 5 + 25 / spread: with 1 six times Poisson's, with 1e6 Poisson's."""
    generator = torch.Generator().manual_seed(seed)
    x, torch_state = torch.randn(300, 1, generator=generator), torch.random.get_rng_state()
    torch.manual_seed(seed)
    rate = torch.distributions.Gamma(torch.tensor(spread), torch.tensor(spread / 5)).sample((300, 1))
    torch.random.set_rng_state(torch_state)
    return x, torch.poisson(rate, generator)


@pytest.mark.parametrize("seed", [1, *(pytest.param(s, marks=pytest.mark.slow) for s in range(2, 7))])
@pytest.mark.parametrize("spread, said", [(1.0, True), (1e6, False)])
def test_counts_that_vary_more_than_promised_are_said(spread, said, seed):
    found = fitted(*counts(seed, spread), likelihood=bc.likelihoods.poisson(), prior_precision=10.0, steps=200)
    assert ("overdispersed" in found.report.advice) is said and "one value" not in found.report.advice


@pytest.mark.parametrize("what", ["inputs", "targets"])
@pytest.mark.parametrize(
    "spoil, lost",
    [
        (lambda x: x.where(torch.arange(60)[:, None] > 0, -99999.0), 3),  # a code of missing values
        (lambda x: x.where(torch.arange(60)[:, None] > 1, 1e6), 3),  # two of them
        (lambda x: torch.cat([(4 * x[:, :1]).exp(), x], 1), 1),  # logarithms are normal, of deviation 4
        (lambda x: x, 0),
        (lambda x: x.clamp_min(1.5), 0),  # most of them equal, as counts are
        (lambda x: torch.distributions.Cauchy(0.0, 1.0).icdf(0.5 + x.erf() / 2.01), 0),  # wide tails
    ],
)
def test_columns_of_which_a_few_data_make_the_deviation_are_said(spoil, lost, what, x):
    given = (spoil(x), x) if what == "inputs" else (x, spoil(x))
    found = fitted(*given, given[1].shape[1], steps=20)
    assert found.report.advice.get(f"{what} far off", "of 0 columns").startswith(f"of {lost} columns")


def fitted(*data, **changes):
    """The ensemble, also of one that a constant beats."""
    try:
        return ensemble(*data, **changes)
    except bc.ensemble.EnsembleError as err:
        return err.ensemble


@pytest.mark.slow
def test_noise_at_an_end_of_its_grid_is_said():
    x = torch.linspace(-1, 1, 60).double()[:, None]
    found = ensemble(x, 2 * x, make=lambda: nn.Linear(1, 1).double(), prior_precision=1e-6, lr=0.05)
    assert any("end of its grid" in sentence for sentence in found.report.said)


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (2, 4, 6, 8, 10))])
@pytest.mark.parametrize("unit, far", [(1e-4, True), (1.0, False), (1e4, True)])
def test_a_scale_of_students_t_in_other_units_than_the_targets_is_made_good_and_said(unit, far, seed):
    """Intervals of .9 cover .75 to 1 of 100 targets; before, none of them where the scale was 1e-4 of what it should be."""
    x = torch.randn(100, 3, generator=torch.Generator().manual_seed(seed))
    y = unit * (x[:, :1] + torch.randn(100, 1, generator=torch.Generator().manual_seed(seed + 1)))
    found = fitted(x, y, likelihood=bc.likelihoods.student_t(), steps=100)
    low, high = found.predict(x).interval(0.9)
    assert 0.75 < float(((low < y) & (y < high)).double().mean()) < 1
    assert ("scale" in found.report.advice) is far


@pytest.mark.parametrize(
    "likelihood, outputs, y",
    [
        (bc.likelihoods.categorical(), 3, torch.ones(60, dtype=torch.long)),
        (bc.likelihoods.bernoulli(), 1, torch.zeros(60, 1)),
        (bc.likelihoods.poisson(), 1, torch.full((60, 1), 2.0)),
        (bc.likelihoods.categorical(), 2, torch.zeros(60, dtype=torch.long)),
        (bc.likelihoods.bernoulli(), 1, torch.ones(60, 1)),
        (bc.likelihoods.poisson(), 1, torch.zeros(60, 1)),
    ],
)
def test_targets_of_one_value_are_no_reason_to_train_longer_and_are_said(likelihood, outputs, y, x):
    found = ensemble(x, y, outputs, likelihood, steps=20)
    assert "all targets are equal" in found.report.advice["one value"] and "constant" not in found.report.held_out


def test_outputs_whose_targets_never_count_take_the_noise_of_the_others():
    """A map with a row of pixels that nobody observes; noise is that of the map without it, within a fifth."""
    x = torch.randn(60, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    y = x + 0.5 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    weights = torch.ones_like(y)
    weights[:, :, 0], y[:, :, 0] = 0.0, float("nan")
    found = ensemble(x, (y, weights), make=nn.Conv2d(1, 1, 1), likelihood=bc.likelihoods.weighted(GAUSSIAN), steps=200)
    assert "end of its grid" not in str(found.report)
    noise = found.likelihood.noise_variance
    assert bool((noise[:, 0] / noise[:, 1:].mean() - 1).abs().max() < 0.2) and found.predict(x).mean.isfinite().all()


def test_equal_targets_are_equal_also_where_their_mean_is_rounded():
    y = torch.full((60, 1), 0.1)
    mean, variance = moments(GAUSSIAN, y)
    assert float(mean) == pytest.approx(float(y[0])) and float(variance) == 0
    assert float(moments(GAUSSIAN, y.double() + 1e-9 * torch.arange(60)[:, None])[1]) > 0


def tokens(net, x):
    x = x[:, :, None].expand(-1, -1, 2)
    return net.out(net.mix(x, x, x, need_weights=False)[0].mean(1))


def attention():
    return Net(tokens, mix=nn.MultiheadAttention(2, 1, batch_first=True), out=nn.Linear(2, 1))


def two_heads(net, x):
    return torch.cat([x @ net.weight + net.bias, net.head(x)], 1).sum(1, keepdim=True)


def root():
    """Parameters of its own, one of them 0-d and one without numbers, and two heads."""
    own = {"weight": nn.Parameter(torch.randn(3, 1)), "bias": nn.Parameter(torch.randn(()))}
    return Net(two_heads, head=nn.Linear(3, 1), **own, nothing=nn.Parameter(torch.zeros(0)))


def weight_normed():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 1))


def lazy():
    return nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(1))


def pack(net, x):
    packed = nn.utils.rnn.pack_padded_sequence(x[..., None], torch.full((len(x),), 2), batch_first=True)
    return net.out(net.gru(packed)[1][0])


def packed():
    return Net(pack, gru=nn.GRU(1, 3, batch_first=True), out=nn.Linear(3, 1))


def picture(net, x):
    return net.out(net.conv(x[:, :1].reshape(-1, 1, 1, 1).expand(-1, 1, 3, 3)).relu().flatten(1))


def words(net, x):
    return net.out(net.lstm(net.embedding((x * 2).long().clamp(-2, 2) + 2))[0][:, -1])


def keeping(net, x):
    """What it computes stays as an attribute, under ``vmap`` a tensor without memory."""
    net.features = net.net(input=x).tanh()
    return net.out(input=net.features)


def keeps():
    return Net(keeping, net=nn.Linear(3, 4), out=nn.Linear(4, 1), features=None)


NORMED = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
PICTURES = Net(picture, conv=nn.Conv2d(1, 4, 3, padding=1), out=nn.Linear(36, 1))
RUNNING, WIDE = nn.BatchNorm1d(4), nn.Linear(4, 1)
MIXING = {
    "a norm without statistics": lambda: nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), WIDE
    ),
    "a norm in a list": lambda: Net(
        lambda net, x: net.out(net.norms[0](net.net(x))), net=nn.Linear(3, 4), norms=[RUNNING], out=WIDE
    ),
    "dropout at all times": lambda: Net(lambda net, x: net.net(nn.functional.dropout(x)), net=nn.Linear(3, 1)),
}

WORDS = Net(words, embedding=nn.Embedding(5, 4), lstm=nn.LSTM(4, 4, batch_first=True), out=nn.Linear(4, 1))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("make", [NORMED, attention, root, weight_normed, lazy, lazy(), packed, PICTURES, WORDS, keeps])
def test_modules_of_any_kind_are_trained_by_a_maker_and_as_one_module(make, x):
    found = ensemble(x, x.sum(1, keepdim=True), make=make, steps=40, lr=0.05)
    mean = found.predict(x).mean
    torch.testing.assert_close(torch.stack([m(x) for m in found.modules()]).mean(0), mean, rtol=1e-3, atol=1e-4)
    # in eval mode a datum's prediction is its own
    torch.testing.assert_close(
        torch.cat([found.predict(row[None]).mean for row in x[:3]]), mean[:3], rtol=1e-4, atol=1e-5
    )
    first = next(iter(found.params.values()))[0]
    assert not torch.equal(first[0], first[1])
    assert torch.equal(copy.deepcopy(found).predict(x).mean, mean)


@pytest.mark.parametrize("vmaps", [True, False])
def test_networks_that_write_into_their_inputs_leave_data_alone(vmaps):
    """Masks, which are not standardised, in full batches: each step would add to them what the steps before it added."""

    def written(net, x):
        return net.net(x.add_(1) if vmaps or bool(x.sum() > -1) else x)

    masks, found = (torch.randn(60, 3, generator=torch.Generator().manual_seed(0)) > 0).float(), []
    for of in (written, lambda net, x: net.net(x + 1)):
        given = masks.clone()
        fitted = ensemble(given, masks[:, :1] - masks[:, 1:2], make=Net(of, net=nn.Linear(3, 1)), steps=20)
        found.append(fitted.predict(given).mean)
        assert torch.equal(given, masks)
    torch.testing.assert_close(*found)


def test_whole_numbers_are_predicted_as_the_same_floating_point_ones_and_other_inputs_refused():
    x = 10 * torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    found = ensemble(x, x[:, :1], steps=20)
    assert torch.equal(found.predict(x.long()).mean, found.predict(x.long().float()).mean)

    def either(net, x, more=0.0):
        return net.net(x) + more

    data = {"x": x, "labels": x[:, :1]}
    found = bc.posterior_ensemble(
        lambda: Net(either, net=nn.Linear(3, 1)), data, GAUSSIAN, members=2, steps=20, progress=False
    )
    with pytest.raises(ValueError, match="trained on inputs of 1 tensors, which have their moments, got 2"):
        found.predict({"x": x, "more": x[:, :1]})


def test_batches_may_be_dictionaries(x):
    def named():
        return Net(lambda net, left, right: net.net(torch.cat([left, right], 1)), net=nn.Linear(3, 1))

    data = {"left": 5 * x[:, :1], "right": x[:, 1:], "labels": x[:, :1]}
    found = bc.posterior_ensemble(named, data, GAUSSIAN, members=2, steps=100, lr=0.05, progress=False)
    only = {k: data[k] for k in ("left", "right")}
    assert found.predict(only).mean.shape == (60, 1)
    torch.testing.assert_close(torch.stack([m(**only) for m in found.modules()]).mean(0), found.predict(only).mean)


def solution(net, x):
    return 1 + x * net.net(x)


def residual(net, x):
    """``u' + u`` of a network ``u`` with ``u(0) = 1``: zero for ``exp(-x)``."""
    value, slope = torch.func.jvp(lambda x: solution(net, x), (x,), (torch.ones_like(x),))
    return value + slope


@pytest.mark.slow
def test_residuals_of_an_equation_are_trained_to_zero_in_their_own_units():
    x = torch.linspace(0, 2, 80)[:, None]
    found = ensemble(x, torch.zeros(80, 1), make=lambda: Net(residual, net=maker(1, 1, 16).float()), steps=1000)
    assert not found.scale.said and "constant" not in found.report.held_out
    for module in found.modules():
        torch.testing.assert_close(solution(module, x), (-x).exp(), rtol=0, atol=0.05)


class Clock:
    """A clock by which a step takes 10 ms, from another time on as many times as long, and tracing 2 s."""

    now, slower, behind = 0.0, 1.0, 0.0

    def perf_counter(self):
        return self.now

    def program(self, *given):
        self.now += 2.0
        run = program(*given)

        def timed(*given):
            self.now += 0.01 * (self.slower if self.now > self.behind else 1.0)
            return run(*given)

        return timed


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    for module in (training, call):
        monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(training, "program", made.program)
    return made


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "budget, batch_size, lr",  # every two of them together
    [
        ({"minutes": 0.25}, 16, None),
        ({"minutes": 0.25}, 100, 0.01),
        ({"steps": 700}, 16, 0.01),
        ({"steps": 700}, 100, None),
    ],
)
def test_what_a_budget_costs_is_said_before_and_kept_within_a_tenth(clock, capsys, budget, batch_size, lr, x):
    changes = {"steps": None, "batch_size": batch_size, "lr": lr, "progress": True, **budget}
    found = ensemble(x, x[:, :1], **changes)
    lines = capsys.readouterr().err.splitlines()
    assert 5 < len(lines) < 25  # lines, not a bar, where errors are redirected
    said = re.search(r"([0-9.]+) passes, about ([0-9.]+) s", lines[0]).groups()
    assert sum(found.report.passes.values()) == pytest.approx(float(said[0]), rel=0.1)
    assert clock.now == pytest.approx(float(said[1]), rel=0.1)
    assert "minutes" not in budget or clock.now == pytest.approx(60 * budget["minutes"], rel=0.1)


def test_minutes_hold_what_scores_take_too(clock, monkeypatch, x):
    """Thirty milliseconds each, as of tokens; 60 of them choose the scale."""
    whole = held.score

    def score(*given):
        clock.now += 0.03
        return whole(*given)

    monkeypatch.setattr(held, "score", score)
    likelihood = bc.likelihoods.categorical()
    found = ensemble(x, (x[:, 0] > 0).long(), 2, likelihood, steps=None, minutes=0.25)
    assert clock.now == pytest.approx(15, rel=0.1) and found.report.seconds == pytest.approx(clock.now)


def test_a_program_has_no_views_that_change_nothing():
    graph = traced(lambda x: (x.view(2, 3).expand(2, 3) + 1).T.detach(), [torch.ones(2, 3)]).graph
    assert [node.target.name() for node in graph.nodes if node.op == "call_function"] == [
        "aten::add.Tensor",
        "aten::permute",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("slower, behind", [(3.0, 3.0), (3.0, 7.0), (3.0, 11.0), (0.4, 7.0)])
def test_minutes_are_kept_within_a_tenth_where_the_machine_becomes_slower_or_faster(clock, slower, behind, x):
    """Tracing ends at 2 s, and the rate is then tried for .5 s."""
    clock.slower, clock.behind = slower, behind
    found = ensemble(x, x[:, :1], steps=None, minutes=0.25, lr=None)
    assert clock.now == pytest.approx(15, rel=0.1)
    steps, passes = found.report.chosen["steps"], found.report.passes["training"]
    assert 1 < passes * 60 / found.report.chosen["batch_size"] / steps < 1.4


@pytest.mark.parametrize("stage, at, held_back", [("training", 1, False), ("training", 3, True), ("all data", 6, True)])
def test_a_stage_that_fails_hands_back_what_was_trained(monkeypatch, stage, at, held_back, x):
    """Outputs are looked at four times, before the pilots end, and then; the sixth look is at weights."""
    looks, whole = [], training._require_finite

    def look(tensors, name):
        looks.append(name)
        whole([torch.tensor(float("nan"))] if len(looks) == at else tensors, name)

    monkeypatch.setattr(training, "_require_finite", look)
    with pytest.raises(ValueError, match=f"{stage} diverged") as caught:
        ensemble(x, x[:, :1])
    assert isinstance(caught.value, bc.ensemble.EnsembleError) is held_back
    if held_back:
        assert caught.value.ensemble.predict(x).mean.isfinite().all()


def products(net, x):
    """``x @ w`` and its relatives, an embedding that is also the head, and what is added or scales, summed up or not."""
    h = net.norm(((x @ net.right) * net.gain[0] + net.added.sum(0))[:, None])[:, 0] * net.scales[0]
    a = h @ net.turned.T + h @ net.copied.double().to(h.dtype)
    b = net.table(torch.zeros(len(x), dtype=torch.long)) @ net.table.weight.T
    c = net.conv(net.up(b[:, :, None].expand(-1, -1, 3))).mean((1, 2)) + net.bag(x[:, :1].long() * 0).sum(1)
    d = (h[..., None] * net.weighed).sum(-2) + (a[:, :, None] * net.repeated).sum(1)
    return (h @ net.vector + d.mean(1) + a.sum(1) + c + net.lstm(a[:, None])[0].sum((1, 2)))[:, None]


def of_products():
    sizes = {"right": (3, 5), "vector": (5,), "turned": (7, 5), "copied": (5, 7), "added": (2, 5), "gain": (1, 5)}
    sizes |= {"weighed": (5, 4), "repeated": (4,)}
    layers = {
        "table": nn.Embedding(4, 7),
        "norm": nn.LayerNorm((1, 5)),
        "scales": nn.ParameterList([torch.ones(1, 5)]),
        "up": nn.ConvTranspose1d(4, 6, 2, 2),
    }
    layers |= {
        "conv": nn.Conv1d(6, 3, 5, padding=2),
        "lstm": nn.LSTM(7, 2, batch_first=True),
        "bag": nn.EmbeddingBag(9, 4),
    }
    return Net(products, **layers, **{name: nn.Parameter(torch.randn(size)) for name, size in sizes.items()})


def test_the_precision_of_a_weight_is_what_an_output_sums_up_wherever_it_stands(x):
    made = members_of(of_products, 1, 0, "cpu")
    problem = Problem(Data(x, x[:, :1], 60), GAUSSIAN, made, 1, 8, [torch.arange(6)], 0, range(1))
    found = {k: p.unique().tolist() for k, p in problem.tree(problem.fan_in()).items()}
    wanted = {
        "right": 3,
        "vector": 5,
        "turned": 5,
        "copied": 5,
        "weighed": 1,
        "repeated": 1,
        "added": 1,
        "gain": 1,
        "scales.0": 1,
        "table.weight": 7,
        "bag.weight": 1,
    }
    wanted |= {"norm.weight": 1, "norm.bias": 1, "up.weight": 4, "up.bias": 1, "conv.weight": 30, "conv.bias": 1}
    wanted |= {"lstm.weight_ih_l0": 7, "lstm.weight_hh_l0": 2, "lstm.bias_ih_l0": 1, "lstm.bias_hh_l0": 1}
    assert found == {k: [v] for k, v in wanted.items()}


def after_a_copy(net, x):
    h = net.b(net.a(x @ net.w.clone()))
    return net.o(net.b(net.a(h)))


def test_what_takes_the_memory_of_a_weights_copy_is_not_taken_for_the_weight():
    """Of 24 sizes, two were, so that the prior's precision was that of another layer."""
    for width in (4, 8, 16, 32, 64, 100):
        for n in (1, 2, 3, 9):
            layers = {"a": nn.Linear(width, width), "b": nn.Linear(width, width), "o": nn.Linear(width, 1)}
            net = Net(after_a_copy, w=nn.Parameter(torch.randn(n, width)), **layers)
            found = members_of(lambda net=net: net, 1, 0, "cpu")
            assert found.products(torch.randn(n, n)).sizes["w"] == n


@pytest.mark.parametrize(
    "layer, shape, axes",
    [
        (nn.GRU(3, 2), (9, 7, 3), (0, 1)),
        (nn.Conv1d(3, 2, 1), (9, 3, 7), (0, 2)),
        (nn.Conv2d(3, 2, 1), (9, 3, 4, 4), (0, 2, 3)),
        (nn.MultiheadAttention(3, 1), (9, 7, 3), (0, 1)),
        (nn.Identity(), (9, 7, 3), (0, 1, 2)),
        (nn.Identity(), (9, 3), (0,)),
        (nn.Identity(), (9,), (0,)),
    ],
)
def test_features_are_standardised_where_the_network_has_them(layer, shape, axes):
    x = 5 + 3 * torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = Data(x, torch.randn(9, 1, dtype=torch.float64), 9)
    scaled = Scale.of(data, GAUSSIAN, nn.Sequential(layer)).into((x, None))
    deviation, mean = torch.std_mean(scaled, axes, correction=0)
    torch.testing.assert_close(mean, torch.zeros_like(mean), rtol=0, atol=1e-12)
    torch.testing.assert_close(deviation, torch.ones_like(mean), rtol=1e-12, atol=0)


@pytest.mark.parametrize("case", MIXING)
def test_predictions_that_other_data_or_chance_would_change_are_refused(case):
    x, before = torch.randn(60, 3, generator=torch.Generator().manual_seed(0)), RUNNING.running_mean.clone()
    with pytest.raises(ValueError, match="depend on the other data of its batch, or on chance"):
        ensemble(x, x[:, :1], make=MIXING[case])
    assert torch.equal(RUNNING.running_mean, before)


@pytest.mark.parametrize(
    "of, words",
    [
        (lambda net, x: net.net(x).detach(), "outputs have no gradient"),
        (lambda net, x: (net.net(x), x) if net.training else net.net(x), "in training mode the module returns"),
        (lambda net, x: net.net(x)[:, 0] if net.training else net.net(x), r"shape \(9,\).* in eval mode .*\(9, 1\)"),
    ],
)
def test_outputs_that_cannot_be_trained_or_differ_in_training_are_refused(of, words, x):
    """Of what has no gradient the prior alone was followed, and untrained networks came out."""
    with pytest.raises(ValueError, match=words):
        ensemble(x, x[:, :1], make=Net(of, net=nn.Linear(3, 1)))


def test_statistics_that_members_would_share_are_refused(x):
    def normed(net, x):
        return net.out(nn.functional.batch_norm(net.net(x), net.mean, net.variance, training=net.training))

    def make():
        return Net(normed, net=nn.Linear(3, 4), out=nn.Linear(4, 1), mean=torch.zeros(4), variance=torch.ones(4))

    with pytest.raises(ValueError, match=r"a tensor of its own .* .register_buffer"):
        ensemble(x, x[:, :1], make=make, steps=20)


def test_a_frozen_norm_in_eval_mode_keeps_its_statistics(x):
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    module[1].requires_grad_(False).eval()
    found = ensemble(x, x[:, :1], make=module, steps=20)
    assert torch.equal(found.buffers["1.running_var"][0], torch.ones(2, 4))


def test_what_functions_draw_is_a_function_of_the_seed(x):
    def dropped(net, x):
        return net.net(nn.functional.dropout(x, 0.3, net.training))

    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        kept = {"members": 2, "steps": 20, "lr": 0.01, "progress": False}
        made = bc.posterior_ensemble(lambda: Net(dropped, net=nn.Linear(3, 1)), (x, x[:, :1]), GAUSSIAN, **kept)
        assert torch.equal(torch.get_rng_state(), before)
        found.append(made.params["net.weight"])
    assert torch.equal(*found)


@pytest.mark.slow
@pytest.mark.parametrize("unit", [1e30, 1e-30])
def test_noise_is_found_in_any_unit_of_the_targets(unit):
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = x[:, :1] + torch.randn(60, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    one, other = (ensemble(x, k * y, make=lambda: maker(1), steps=40) for k in (1.0, unit))
    torch.testing.assert_close(
        other.likelihood.noise_variance / unit**2, one.likelihood.noise_variance, rtol=1e-6, atol=0
    )


def test_batches_are_as_large_as_every_fold_allows(monkeypatch):
    """One of two folds may be larger, as of data with equal inputs; the passes are those that were made."""
    monkeypatch.setattr(Data, "folds", lambda *_: [torch.arange(6), torch.arange(6, 18)])
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    found = ensemble(x, x[:, :1], members=4, steps=20)
    assert found.report.chosen["batch_size"] == 28
    assert found.report.passes["training"] == pytest.approx(26 * 28 / 40)


# A call that is killed at any stage goes on from there, with the same results bit for bit


SMALL = {"members": 2, "steps": 60, "progress": False, "batch_size": 16}


class Killed(Exception):
    pass


def data():
    """Of nearly equal columns, whose principal axes are a stage too."""
    x = torch.randn(48, 2, generator=torch.Generator().manual_seed(0))
    x[:, 1] = x[:, 0] + 1e-3 * x[:, 1]
    return x, x[:, :1]


def make(dropout=0.1):
    return nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Dropout(dropout), nn.Tanh(), nn.Linear(6, 1))


def called(path=None, **changes):
    given = {"make_model": make, "data": data(), "likelihood": bc.likelihoods.gaussian(), "path": path}
    return bc.posterior_ensemble(**given | SMALL | changes)


@pytest.fixture(scope="module")
def wanted():
    """Scores of the call that nobody kills."""
    return called().predict(data()[0]).log_prob(data()[1])


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["start", "cost", "rate", "training"])
def test_a_call_killed_before_a_stage_goes_on_bit_for_bit(tmp_path, monkeypatch, wanted, stage):
    whole = on_disk.Stages.once

    def kill(self, name, made):
        if name == stage:
            raise Killed
        return whole(self, name, made)

    with monkeypatch.context() as killing:
        killing.setattr(on_disk.Stages, "once", kill)
        with pytest.raises(Killed):
            called(tmp_path)
    assert torch.equal(called(tmp_path).predict(data()[0]).log_prob(data()[1]), wanted)


@pytest.mark.parametrize("at", [30, *(pytest.param(at, marks=pytest.mark.slow) for at in (38, 61, 78, 93))])
def test_a_call_killed_within_a_stage_goes_on_bit_for_bit(tmp_path, monkeypatch, wanted, at):
    """18 steps try rates, 60 train, in which noise is renewed before steps 12, 24, 36 and 48, and 18 are with all data."""
    monkeypatch.setattr(on_disk.Stages, "advance", failing(on_disk.Stages.advance, at, Killed))
    with pytest.raises(Killed):
        called(tmp_path)
    monkeypatch.undo()
    assert torch.equal(called(tmp_path).predict(data()[0]).log_prob(data()[1]), wanted)


def test_a_call_that_goes_on_hands_back_what_was_trained_before_it_was_killed(tmp_path, monkeypatch):
    """Of 78 steps 76 were taken, the last 16 with all data; outputs were looked at by the first process alone."""
    left = iter([None] * 76)
    with monkeypatch.context() as killing:
        killing.setattr(on_disk.Stages, "advance", lambda self: next(left))
        with pytest.raises(StopIteration):
            called(tmp_path, lr=0.01)
    monkeypatch.setattr(training, "_require_finite", Mock(side_effect=ValueError("training on all data diverged")))
    with pytest.raises(bc.ensemble.EnsembleError, match="training on all data diverged") as caught:
        called(tmp_path, lr=0.01)
    assert caught.value.ensemble.predict(data()[0]).mean.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "change, words",
    [
        ({"seed": 1}, "seed"),
        ({"make_model": lambda: make(0.2)}, r"p=0\.1"),
        ({"likelihood": bc.likelihoods.student_t(8.0)}, r"likelihood.* is 4\.0, here 8\.0"),
        ({"make_model": lambda: times(1.01)}, "its networks start from other weights"),
    ],
)
def test_another_call_under_the_same_path_is_refused(tmp_path, change, words):
    own = {"likelihood": bc.likelihoods.student_t(4.0)}
    called(tmp_path, **own)
    with pytest.raises(ValueError, match=words):
        called(tmp_path, **own | change)


def times(factor):
    made = make()
    with torch.no_grad():
        made[0].weight.mul_(factor)
    return made


def test_starts_that_another_processor_rounds_otherwise_are_those_that_were_written(tmp_path, monkeypatch):
    """As orthogonal and normal ones are on other threads, or with other instructions."""
    with monkeypatch.context() as killing:
        killing.setattr(Training, "train", Mock(side_effect=Killed))
        with pytest.raises(Killed):
            called(tmp_path, lr=0.01)
    again = called(tmp_path, lr=0.01, make_model=lambda: times(1 + 1e-6))
    assert torch.equal(again.predict(data()[0]).mean, called(lr=0.01).predict(data()[0]).mean)


@pytest.mark.slow
def test_damage_is_named_and_a_stage_that_is_deleted_is_made_anew(tmp_path):
    """Without checksums most flips of a bit gave other weights in silence."""
    x = data()[0]
    before = called(tmp_path).predict(x).mean
    file = tmp_path / "training.safetensors"
    raw = file.read_bytes()
    flips = [raw[:at] + bytes([raw[at] ^ 16]) + raw[at + 1 :] for at in range(3, len(raw), len(raw) // 4)]
    for spoiled in (raw[:100], *flips):
        file.write_bytes(spoiled)
        with pytest.raises(ValueError, match=r"training\.safetensors.* damaged.*delete it"):
            called(tmp_path)
    file.unlink()
    assert torch.equal(called(tmp_path).predict(x).mean, before)
    (tmp_path / "call.safetensors").write_text("{")
    with pytest.raises(ValueError, match=r"call\.safetensors is truncated or damaged"):
        called(tmp_path)


@pytest.mark.slow
def test_a_complete_call_returns_at_once(tmp_path, monkeypatch):
    first = called(tmp_path)
    monkeypatch.setattr(Training, "train", None)
    assert torch.equal(first.predict(data()[0]).mean, called(tmp_path).predict(data()[0]).mean)
