"""The doctor names the fault of a sick run, finds none in healthy ones, and takes runs that are not tidy: few draws, tokens,
frozen leaves, dropout, ragged batches, jumps, chains that stop. Each test of chance names its odds."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import optree
import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain.diagnostics import doctor
from bayesopt_chain.diagnostics._response import forces_of, gains, names_of
from bayesopt_chain.diagnostics.convergence import drift, shared_noise
from bayesopt_chain.testing import stationary_covariance
from benchmarks import doctor as runs

T, N = runs.T, 100
EACH = {"burn_in": 0, "thinning": 1}


def cosine(count):
    return 0.02 + 0.06 * (1 + torch.cos(count.double() * torch.pi / 500))


def unused(seed):
    problem = runs.regression(seed)
    return problem._replace(loss=lambda p, batch: problem.loss({"w": p["w"], "b": 0.0 * p["b"]}, batch))


def breaking(seed):
    problem, calls = runs.regression(seed), iter(range(10**6))
    return problem._replace(loss=lambda p, b: problem.loss(p, b) * (float("nan") if next(calls) > 300 else 1.0))


def alone(draws):
    """What is found in draws, without their loss."""
    return lambda seed: doctor(runs.of_stacked({"w": draws}))


def sharing(own, common, behind=0):
    """Four chains with some noise in common, of which two have all of it, the second some draws behind the first."""
    g = torch.Generator().manual_seed(2)
    each, all_ = (torch.randn(300, c, 4, generator=g, dtype=torch.float64) for c in (4, 1))
    x = own * each + common * all_
    if behind:
        x[behind:, 1] = x[:-behind, 0].clone()
    return x


def loop(tx, make=runs.regression, **how):
    return runs.loop(make, tx, **how)


RUNS = {  # a run by its seed, what the doctor finds in it, and a part of the report; ``python -m benchmarks.doctor`` has more
    "nesterov, schedule": (loop(bc.sgd(cosine, momentum=0.9, nesterov=True, temperature=T)), set(), "no fault"),
    "weight decay": (loop(bc.sgd(0.1, momentum=0.9, weight_decay=0.1, temperature=T)), set(), "no fault"),
    "adam, frozen": (
        loop(bc.adam(0.02, temperature=T, eps=0.3, freeze_after=300), burn_in=400, steps=1200), set(), "no fault"
    ),
    "diverged, grows": (loop(bc.sgld(2.6, temperature=T), steps=40, **EACH), {"diverged"}, "The run diverged"),
    "diverged, no draws": (
        loop(bc.sghmc(1e9, temperature=T), steps=400, burn_in=50, thinning=10), {"diverged"}, "has no draws"
    ),
    "a leaf that the loss does not use": (
        loop(bc.sgd(0.1, momentum=0.9, weight_decay=0.1, temperature=T), unused), {"dead"}, "does not depend on b"
    ),
    "a prior that dominates": (
        loop(bc.sgd(0.002, momentum=0.9, weight_decay=40.0, temperature=T)), {"prior"}, "The prior dominates"
    ),
    "NaN is told from divergence": (loop(bc.sghmc(0.1, temperature=T), breaking, burn_in=50), {"nonfinite"}, ""),
    "NaN after two draws": (loop(bc.sghmc(0.1, temperature=T), breaking, burn_in=290), {"nonfinite"}, "nothing before it grew"),
    "a far start": (
        loop(bc.sghmc(0.1, temperature=T), params=runs.far, steps=100, **EACH), {"burn-in"},
        "Not told: whether the draws are too hot"
    ),
    **{
        f"a copy {k} behind": (alone(sharing(1.0, 0.0, k)), {"duplicate"}, f"{k} draw") for k in (1, 3, 100)
    },
    "half of the noise in common": (alone(sharing(0.5, 1.0)), {"together"}, "same noise"),
    "a fifth of the noise in common": (alone(sharing(1.0, 0.5)), set(), "no fault"),
    **{
        f"{c} chains that rise by {size}": (
            alone(sharing(1.0, 0.0)[:, :c] + torch.linspace(0, size, 300).double()[:, None, None]), {"mixing"}, "draws drift"
        )
        for c, size in ((1, 1.7), (2, 3.3), (4, 1.7), (4, 16.7))
    },
    **{
        name: (partial(lambda made, seed: made(), runs.runs()[name][1]), runs.runs()[name][0], "")
        for name in (
            "linear, sghmc 1", "linear, hot batches 0", "linear, sum of a batch 0", "linear, eight draws 0",
            "linear, one seed from four starts 0", "linear, twice", "linear, still", "linear, modes",
            "logistic, rate too small 0", "linear, a leaf that stands still",
            "linear, decay a thousand times too strong 0", "exact, 12 draws of 2 chains 1", "exact, 400 parameters, 30 data 0",
            "exact, a short last batch 0", "exact, beside a frozen leaf 0", "exact, one jump 0", "exact, a chain that stops 0",
            "exact, one of 50 chains elsewhere 0", "exact, at half the temperature 0", "few effective draws 1",
        )
    },
}  # fmt: skip


QUICK = ("diverged", "a copy", "half", "a fifth", "4 chains", "few", "exact, one jump", "exact, a chain")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [x if x.startswith(QUICK) else pytest.param(x, marks=pytest.mark.slow) for x in RUNS])
def test_the_fault_of_a_run_is_named_and_none_of_a_healthy_one(name):
    """Fixed seeds. By chance R-hat of 4 x 200 draws exceeds 1.1 and a temperature 1.1 by 3 errors in under one run of 1000."""
    made, kinds, says = RUNS[name]
    found = made(0)
    assert bool(found.kinds & kinds) == bool(kinds) and (kinds or found.is_healthy) and says in str(found)
    assert name != "a far start" or ("heated" not in found.kinds and "Lower lr" not in str(found))


FRONT = Path(__file__).parents[2] / "docs" / "index.md"


@pytest.mark.slow
def test_the_loop_of_the_front_page_can_be_shown_to_the_doctor():
    """Its optimizer has no names: they are those that the collector's model has for the same tensors."""
    lines = FRONT.read_text().split("```python")[1].split("```")[0].splitlines()
    loop = "\n".join(line[4:] for line in lines if line.startswith((">>> ", "... ")))
    names: dict = {}
    exec(loop, names)
    model, optimizer, x, y = (names[name] for name in ("model", "optimizer", "x", "y"))

    def said(p):
        return torch.func.functional_call(model, p, (x,))

    def loss(p, batch):
        return -names["likelihood"].log_prob(torch.func.functional_call(model, p, (batch[0],)), batch[1]).mean()

    before = {key: value for key, value in optimizer.state_dict()["param_groups"][0].items() if key != "params"}
    found = bc.diagnostics.doctor(names["keep"].draws, optimizer, loss, (x, y), of=said)
    assert {"temperature, weight", "temperature, bias"} <= found.numbers.keys()
    assert not found.kinds & {"scale", "dead", "prior", "nonfinite"}
    after = optimizer.state_dict()["param_groups"][0]
    assert "param_names" not in after and all(after[key] == value for key, value in before.items())


def stationary(seed, forgets, draws=300, chains=4, elements=4):
    """Autoregressive chains of variance 1."""
    g = torch.Generator().manual_seed(seed)
    x = [torch.randn(chains, elements, generator=g, dtype=torch.float64)]
    for _ in range(draws):
        e = torch.randn(chains, elements, generator=g, dtype=torch.float64)
        x.append(forgets * x[-1] + (1 - forgets**2) ** 0.5 * e)
    return torch.stack(x[1:])


@pytest.mark.sweep(1)
@pytest.mark.parametrize("forgets", [0.0, 0.9, 0.99])
def test_independent_chains_are_not_called_one_however_slow_they_are(forgets):
    """At the level 0.05, 30 runs: over 6 alarms have probability 4e-4 at most; at the level of the doctor, one has 0.003."""
    runs = [stationary(seed, forgets) for seed in range(30)]
    assert sum(shared_noise(x, level=0.05) is not None for x in runs) <= 6
    assert all(shared_noise(x) is None for x in runs)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("chains", [1, 4])
@pytest.mark.parametrize("forgets", [0.0, 0.9, 0.97])
def test_chains_at_rest_do_not_drift_however_slow_they_are(chains, forgets):
    """At the level 0.05, 30 runs of 1, 4.5 to 300 effective draws a chain: more than 7 alarms have probability 1e-3 at most."""
    found = [drift(stationary(seed, forgets, chains=chains)) for seed in range(30)]
    assert sum(p < 0.05 for _, p in found) <= 7


@pytest.mark.sweep(1)
@pytest.mark.parametrize("draws, chains", [(16, 2), (20, 20), (40, 4)])
def test_independent_draws_share_no_noise(draws, chains):
    """Level 1e-4 a set; lags that leave less than 12 residuals once read a correlation above 1."""
    g = torch.Generator().manual_seed(0)
    assert not any(shared_noise(torch.randn(draws, chains, 5, generator=g).double()) for _ in range(50))


def exact(seed, draws, chains, n=N):
    """Independent draws of the posterior of a linear regression with noise and prior of variance 1, and what they are of."""
    of = runs.Exact.make(seed, draws, chains, n=n)
    likelihood = lambda p, batch: (batch[0] @ p["w"] - batch[1]).square().mean() / 2  # noqa: E731
    return SimpleNamespace(
        w=of.w,
        draws=runs.of_stacked({"w": of.w}),
        data=(of.x, of.y),
        likelihood=likelihood,
        loss=lambda p, batch: likelihood(p, batch) + p["w"].square().sum() / (2 * n),
        tx=bc.sghmc(0.1, temperature=1 / n),
    )


def test_a_chain_that_rejects_most_proposals_is_not_dead():
    run, g = exact(1, 400, 2), torch.Generator().manual_seed(0)
    for t in range(1, 400):
        rejected = torch.rand(2, generator=g) < 0.6
        run.w[t] = torch.where(rejected[:, None], run.w[t - 1], run.w[t])
    assert "dead" not in alone(run.w)(0).kinds


def test_every_leaf_that_stands_still_or_is_not_used_is_named():
    run = exact(2, 60, 4)
    trees = [{"w": w, "unused": torch.randn(4, 3), "still": torch.ones(4, 2)} for w in run.w]
    draws = bc.Draws.from_trees(trees, chains=4)
    found = doctor(draws, run.tx, run.loss, run.data)
    says = " ".join(f.says for f in found.findings if f.kind == "dead")
    assert "still did not move" in says and "does not depend on unused" in says


# the scale of the loss


def test_a_mean_over_tokens_is_asked_for_their_number():
    ids, labels = torch.randint(5, (2, 40, 10), generator=torch.Generator().manual_seed(0))
    labels[:, 5:] = -100

    def loss(p, b):
        logits = p["E"][b[0]].flatten(0, 1)
        return nn.functional.cross_entropy(logits, b[1].flatten()) + p["E"].square().sum() / 400

    draws = bc.Draws.from_trees([{"E": torch.randn(2, 5, 5)} for _ in range(3)], chains=2)

    def look(temperature, **more):
        return doctor(draws, bc.sghmc(0.1, temperature=temperature), loss, (ids, labels), **more)

    (scale,) = [f for f in look(1 / 200).findings if f.kind == "scale"]
    assert "pass their number as data_size=" in scale.do
    assert "scale" not in look(1 / 200, data_size=200).kinds
    assert "scale" in look(1 / 40, data_size=200).kinds
    passed = look(1 / 40)
    assert "scale" not in passed.kinds and any("40 data" in note for note in passed.unseen)


@pytest.mark.parametrize("total", [False, True])
def test_dropout_does_not_make_a_sum_of_a_mean(total):
    """20 places; a comparison of single masks called eight of 200 means sums, and 39 of 200 sums means."""
    run = exact(0, 20, 1)
    x, y = run.data

    def loss(p, batch):
        squares = (nn.functional.dropout(batch[0], 0.5) @ p["w"] - batch[1]).square()
        return squares.sum() / 2 if total else squares.mean() / 2

    for t in range(20):
        draws = bc.Draws.from_trees([{"w": run.w[t, 0]}])
        found = doctor(draws, bc.sghmc(1e-3, temperature=1.0 if total else 1 / N), loss, (x, y))
        assert "scale" not in found.kinds


# temperatures


@pytest.mark.parametrize(
    "times, temperature, variance, factor, right",
    [
        (1.0, 1 / N, 1.0, 1.0, None),
        (N, 1.0, 1.0, N, None),
        (N, 1 / N, 1.0, N, 1.0),
        (2.0, 1 / N, 1.0, 2.0, 2 / N),  # a squared error without its half
        (1.0, 1 / N, 900.0, 900.0, 9.0),  # of a noise thirty times as large
        ("sum", 1.0, 1.0, 1.0, None),
        ("sum", 1 / N, 1.0, 1.0, 1.0),
    ],
)
def test_beside_a_likelihood_the_scale_of_the_loss_is_known(times, temperature, variance, factor, right):
    """But for rounding in float32, though the prior, a part of the loss, has a scale of its own. Of epochs all data count."""
    run = exact(0, 60, 4)

    def loss(p, batch):
        scale = len(batch[1]) if times == "sum" else times
        return scale * run.likelihood(p, batch) + p["w"].square().sum()

    of = OF | {"likelihood": bc.likelihoods.gaussian(variance=variance)}
    found = doctor(
        run.draws,
        bc.sghmc(0.1, temperature=temperature),
        loss,
        bc.epochs(run.data, N // 2 + 1) if times == 1.0 else run.data,
        **of,
    )
    assert found.numbers["loss / - log likelihood"] == pytest.approx(factor, rel=2e-3)
    says = [f.do for f in found.findings if f.kind == "scale"]
    read = [float(do.split("Set temperature=")[1].split(". Where")[0]) for do in says]
    assert read == ([pytest.approx(right, rel=2e-3)] if right else [])
    assert not any("the scale of the loss" in text for text in found.unseen)


OF = {"forward": lambda p, batch: batch[0] @ p["w"], "likelihood": bc.likelihoods.gaussian(variance=1.0)}


def test_targets_that_are_left_out_or_weighted_do_not_hide_the_scale_of_the_loss():
    inputs, weights = torch.randn(2, 40, 5, generator=torch.Generator().manual_seed(0)).abs()
    inputs, labels = inputs[..., None] * torch.tensor([1.0, -1.0]), (inputs > 0.7).long()
    labels[:, 3:] = -100
    kept = labels != -100
    trees = torch.randn(6, 2, 2, 2, generator=torch.Generator().manual_seed(1))
    draws = bc.Draws.from_trees([{"w": w} for w in trees], chains=2)

    def losses(p, batch):
        y = batch[1][0] if isinstance(batch[1], tuple) else batch[1]
        return nn.functional.cross_entropy((batch[0] @ p["w"]).flatten(0, 1), y.flatten(), reduction="none")

    def weighted(p, batch):
        w = (batch[1][1] * (batch[1][0] != -100)).flatten()
        return (losses(p, batch) * w).sum() / w.sum()

    ignored, count = bc.likelihoods.categorical(), int(kept.sum())
    for loss, batch, likelihood in (
        (lambda p, b: losses(p, b).sum() / (b[1] != -100).sum(), (inputs, labels), ignored),
        (weighted, (inputs, (labels, weights)), bc.likelihoods.weighted(ignored)),
    ):
        about = {"forward": OF["forward"], "likelihood": likelihood, "data_size": count}
        found = doctor(
            draws, bc.sghmc(0.1, temperature=1 / count), lambda p, b, loss=loss: 3 * loss(p, b), [batch], **about
        )
        assert found.numbers["loss / - log likelihood"] == pytest.approx(3.0, rel=1e-4)


@pytest.mark.slow
def test_a_loss_of_another_likelihood_is_named_and_dropout_or_single_data_are_none():
    run = exact(0, 60, 4)
    found = doctor(run.draws, run.tx, lambda p, b: (b[0] @ p["w"] - b[1]).abs().mean(), run.data, **OF)
    assert any(f.kind == "scale" and "no multiple of -likelihood" in f.says for f in found.findings)
    masked = {"forward": lambda p, b: nn.functional.dropout(b[0], 0.5) @ p["w"]}
    for loss, batches, more in (
        (lambda p, b: (masked["forward"](p, b) - b[1]).square().mean() / 2, run.data, masked),
        (run.loss, [*zip(*(part.split(1) for part in run.data))], {}),
    ):
        found = doctor(run.draws, run.tx, loss, batches, **OF | more)
        assert found.numbers["loss / - log likelihood"] == pytest.approx(1.0, rel=1e-4) and "scale" not in found.kinds


@pytest.mark.slow
def test_a_temperature_that_fell_is_read_at_the_draws():
    run = exact(0, 1, 4)
    tx = bc.sghmc(0.1, temperature=lambda count: (1 + 99 * torch.exp(-count.double() / 50)) / N)
    w = {"w": run.w[0]}
    chains = bc.parallel(bc.make_step(run.loss, tx), 4)
    torch.manual_seed(0)
    draws = bc.sample(chains, w, chains.init(tx, w), [run.data], steps=1400, burn_in=800, thinning=5)
    assert not doctor(draws, tx, run.loss, run.data).kinds & {"scale", "cold"}


# what it leaves behind, and what it refuses


def test_random_numbers_stay_where_they_were():
    run, own = exact(0, 12, 2), torch.Generator().manual_seed(5)
    tx = bc.sghmc(0.1, temperature=1 / N, generator=own)
    before = torch.get_rng_state(), own.get_state()

    def loss(p, batch):
        return run.loss(p, (nn.functional.dropout(batch[0], 0.1), batch[1]))

    shuffled = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*run.data), 50, shuffle=True)
    doctor(run.draws, tx, loss, shuffled, of=lambda p: nn.functional.dropout(p["w"], 0.1))
    assert torch.equal(torch.get_rng_state(), before[0]) and torch.equal(own.get_state(), before[1])


def test_losses_that_are_not_finite_once_are_no_divergence(monkeypatch):
    run = exact(0, 60, 1)
    losses = torch.randn(60, generator=torch.Generator().manual_seed(0)).double()
    monkeypatch.setattr(bc.Draws, "_has", lambda _, name: name != "_weight")
    for change, kind in ((slice(20, 21), "nonfinite"), (slice(59, 60), "nonfinite"), (slice(40, 60), "diverged")):
        bad = losses.clone()
        bad[change] = torch.inf
        monkeypatch.setattr(bc.Draws, "loss", property(lambda _, bad=bad: bad))
        assert doctor(run.draws).kinds == {kind}


def test_leaves_of_different_temperatures_are_each_judged_by_their_own():
    """Exact draws of two models that know nothing of each other, one at a hundred times the temperature."""
    one, two = exact(0, 100, 4), exact(1, 100, 4)
    mean = two.w.mean((0, 1))
    draws = bc.Draws.from_trees([{"a": a, "b": mean + 10 * (b - mean)} for a, b in zip(one.w, two.w)], chains=4)
    tx = bc.partition(
        {1: bc.sghmc(0.1, temperature=1 / N), 100: bc.sghmc(0.1, temperature=100 / N)}, {"a": 1, "b": 100}
    )

    def loss(p, batch):
        return one.loss({"w": p["a"]}, batch[:2]) + two.loss({"w": p["b"]}, batch[2:])

    found = doctor(draws, tx, loss, (*one.data, *two.data), posterior_temperature=100.0)
    assert found.is_healthy and abs(found.numbers["temperature, all parameters"] - 1) < 0.2


class Once(torch.autograd.Function):
    """A square without a second derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g


def of_fields(p, b):
    return EXACT.loss(p, (b["x"], b["y"]))


def of_fixed_size(p, b):
    return (torch.ones(N) * EXACT.loss(p, b)).mean() + 0 * (torch.ones(N) * b[1]).sum()


def without_hessian(p, b):
    return Once.apply(b[0] @ p["w"] - b[1]).mean() / 2 + p["w"].square().sum() / (2 * N)


EXACT, PLAIN = exact(0, 60, 4), {"tx": bc.sgd(0.1)}
FIELDS = {"class weights": torch.ones(3), "x": EXACT.data[0], "y": EXACT.data[1]}
LOOKS = {  # what is changed in a look at exact draws, what is found, and a part of the report
    "data are counted by what most tensors say": ({"loss": of_fields, "batches": FIELDS}, set(), f"{'data N':<34} 100"),
    "all data may come as a list of one batch": ({"batches": [EXACT.data]}, set(), f"{'data N':<34} 100"),
    "a loss of fixed size takes no batch twice": ({"loss": of_fixed_size}, set(), "Not seen: whether loss and temperature"),
    "three draws tell the scale": (
        {"draws": exact(0, 3, 2).draws, "tx": bc.sghmc(0.1, temperature=1.0)}, {"short", "scale"}, "takes four"
    ),
    # N times the mean at temperature 1/N is a thousand times too cold, and looks like a sharper likelihood
    "N times the mean": ({"loss": lambda p, b: N * EXACT.loss(p, b)}, {"heated"}, "the mean, such as N times it"),
    "data with NaN": ({"batches": (EXACT.data[0], EXACT.data[1] * torch.nan)}, {"nonfinite"}, "NaN in the data"),
    "no temperature": (PLAIN, set(), "pass temperature="),
    "a temperature beside the chain": (PLAIN | {"temperature": 1 / N}, set(), "temperature, all parameters"),
    "too high a temperature": (
        PLAIN | {"temperature": 20 / N, "posterior_temperature": 20}, {"cold"}, "have not spread out"
    ),
    "predictions with NaN": ({"of": lambda p: p["w"].log()}, {"nonfinite"}, "What of= gives is NaN or infinite at"),
    "predictions that never change": ({"of": lambda p: 0 * p["w"]}, set(), "Not seen: whether the chains agree"),
    "a loss without a Hessian": ({"loss": without_hessian}, set(), "no finite Hessian"),
    "names with quotes": (
        {"draws": bc.Draws.from_trees([{"it's": w} for w in EXACT.w], chains=4),
         "loss": lambda p, b: EXACT.loss({"w": p["it's"]}, b)}, set(), "temperature, it's ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOKS)
def test_what_is_found_and_said_of_exact_draws(name):
    change, kinds, says = LOOKS[name]
    found = doctor(**{"draws": EXACT.draws, "tx": EXACT.tx, "loss": EXACT.loss, "batches": EXACT.data, **change})
    assert found.kinds == kinds and says in str(found)
    assert "no finite Hessian" not in str(found) or "temperature, stiffest direction 1" not in found.numbers


@pytest.mark.parametrize("times", [1.0, 9.0])
def test_the_noise_of_a_gradient_over_the_curvature_is_shown_and_no_verdict(times):
    """Of a calibrated regression it is 1 at the mode; nine times the loss has nine times the noise."""
    run = exact(0, 60, 4, n=400)
    found = doctor(run.draws, run.tx, lambda p, b: times * run.likelihood(p, b), run.data)
    assert found.numbers["tr Cov(gradient) / tr H"] == pytest.approx(times, rel=0.4) and "scale" not in found.kinds


@pytest.mark.parametrize(
    "change, message",
    [
        ({"forward": None}, "likelihood= and forward= belong together"),
        ({"forward": lambda p, batch: (batch[0] @ p["w"])[:, None]}, r"the outputs ask for \(\d+, 1\)"),
        ({"likelihood": "gaussian"}, "likelihood must be"),
        ({"batches": [*EXACT.data]}, r"doctor: the loss cannot take batch 2 of 2.*a tuple, a dictionary or a tensor"),
        ({"batches": torch.utils.data.TensorDataset(*EXACT.data)}, r"batch \d of .*a tuple, a dictionary or a tensor"),
        ({"batches": None}, "needs tx= and batches="),
        ({"batches": []}, "batches is empty"),
        ({"of": lambda p: 3.0}, "of must return a tensor, of one shape at every draw, got .*float"),
        ({"of": lambda p: p["w"][p["w"] > 0]}, "of one shape at every draw"),
    ],
)
def test_what_cannot_be_looked_at_is_refused_with_what_to_pass(change, message):
    about = {"tx": EXACT.tx, "loss": EXACT.loss, "batches": EXACT.data}
    with pytest.raises((ValueError, TypeError), match=message):
        doctor(EXACT.draws, **about | OF | change)


# the temperature that is read: exactly the one asked for at every stable learning rate, and on runs

LR, LEVEL, DOUBLE = 0.1, 0.7, torch.float64
P = {"a": torch.tensor([0.3, 2.0], dtype=DOUBLE), "b": torch.tensor([1.5], dtype=DOUBLE)}


def quadratic(w, batch):
    return (w["a"].square() * torch.tensor([0.5, 2.0])[:, None]).sum() / 2 + w["b"].square().sum() / 2


def sampled(tx, chains=None, steps=500, n=400):
    """Draws of 3 n parameters in two leaves."""
    params = {"a": torch.zeros(2, n), "b": torch.zeros(n)}
    step = bc.make_step(quadratic, tx)
    if chains:
        step, params = bc.parallel(step, chains), bc.stack([params] * chains)
    state = step.init(tx, params) if chains else tx.init(params)
    return bc.sample(step, params, state, None, steps=steps, burn_in=150, thinning=4)


LEVELS = {
    "sgld": (bc.sgld(LR, temperature=LEVEL), {}),
    "nesterov": (bc.sgd(LR, momentum=0.9, nesterov=True, temperature=LEVEL), {}),
    "slow schedule": (
        bc.sghmc(lambda n: 0.05 + 0.1 * (1 + torch.cos(n.double() * torch.pi / 250)), 0.8, temperature=LEVEL),
        {},
    ),
    "parallel": (bc.sghmc(LR, temperature=LEVEL), {"chains": 2}),
    "skip_nonfinite": (bc.skip_nonfinite(bc.sghmc(LR, temperature=LEVEL)), {}),
    "adam, frozen": (bc.adam(LR, temperature=LEVEL, freeze_after=100, eps=1.0), {}),
    "decay": (bc.sgd(LR, momentum=0.9, weight_decay=0.5, temperature=LEVEL), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LEVELS)
def test_a_run_has_the_temperature_that_it_was_given(kind):
    """Within 5 standard errors of 1, known to 5 %; two-sided false alarms below 1e-4."""
    tx, how = LEVELS[kind]
    found = doctor(sampled(tx, **how), tx, quadratic, [None]).numbers
    for leaf in "ab":
        error = found[f"  its standard error, {leaf}"]
        assert abs(found[f"temperature, {leaf}"] - 1) < 5 * error and error < 0.05


def test_the_virial_is_the_temperature_of_the_exact_covariance():
    """``<theta dU/dtheta>`` of correlated parameters, by the whole state's Lyapunov equation."""
    K = torch.tensor([[2.0, 0.7, 0.1], [0.7, 1.0, 0.3], [0.1, 0.3, 0.5]], dtype=DOUBLE)
    for tx in (bc.sghmc(LR, 0.9, temperature=LEVEL), bc.sgd(LR, 0.9, nesterov=True, temperature=LEVEL)):
        virial = (K @ stationary_covariance(tx, K)).diagonal()
        torch.testing.assert_close(virial, torch.full_like(virial, LEVEL), rtol=0, atol=1e-10)


def test_gains_are_what_a_unit_gradient_moves_at_once():
    tx = bc.chain(bc.scale_by_preconditioner(P), bc.sgd(LR, 0.9, nesterov=True, temperature=LEVEL))
    params = optree.tree_map(torch.zeros_like, P)
    for gain, p in zip(gains(tx, params, tx.init(params)), optree.tree_leaves(P)):
        torch.testing.assert_close(gain, LR * 1.9 * p, rtol=1e-9, atol=0)


class Mixing:
    """A precision that is not diagonal."""

    def solve(self, tree, /):
        return optree.tree_map(lambda x: x + x.mean(), tree)

    def sqrt_solve(self, tree, /):
        return optree.tree_map(lambda x: x + (2**0.5 - 1) * x.mean(), tree)


def test_what_cannot_be_read_is_refused():
    params = optree.tree_map(torch.zeros_like, P)
    tx = bc.chain(bc.scale_by_preconditioner(Mixing()), bc.sghmc(LR, temperature=LEVEL))
    with pytest.raises(ValueError, match="act on each other"):
        gains(tx, params, tx.init(params))
    late = bc.chain(bc.add_momentum(0.9), bc.links.add_decayed_weights(0.5), bc.sgld(LR, temperature=LEVEL))
    with pytest.raises(ValueError, match="stands behind a momentum"):
        doctor(sampled(late, steps=200), late, quadratic, [None])


def test_levels_follow_a_schedule():
    tx = bc.sghmc(0.1, temperature=lambda n: 2.0 + n)
    assert [forces_of(tx, torch.zeros(2), None, step)[0] for step in (None, 3)] == [
        {"tensor": 2.0},
        {"tensor": 5.0},
    ]


def test_leaves_are_called_as_in_draws():
    params = {"a": {"b": torch.zeros(5)}, "c": torch.zeros(5)}
    assert forces_of(bc.sgld(0.2, temperature=0.5), params)[0] == {"a/b": 0.5, "c": 0.5}
    assert names_of({"layer": {"weight": 0}, "none": None}) == ("layer/weight", "none") and names_of(0) == ("tensor",)
