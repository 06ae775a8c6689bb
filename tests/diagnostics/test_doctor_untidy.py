"""The doctor on runs that are not tidy: few draws, tokens, frozen leaves, dropout, ragged batches, jumps, chains that stop."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain.diagnostics._agreement import shared_noise

doctor = bc.diagnostics.doctor
N = 100


class Exact:
    """Draws of the posterior of a linear regression with noise and prior of variance 1, independent of each other."""

    def __init__(self, seed, draws, chains, P=4, n=N):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(n, P, generator=g) / (P / 4) ** 0.5
        y = x @ torch.randn(P, generator=g) + torch.randn(n, generator=g)
        precision = (x.T @ x + torch.eye(P)).double()
        mean = torch.linalg.solve(precision, (x.T @ y).double())
        root = torch.linalg.cholesky(torch.linalg.inv(precision))
        self.data, self.n, self.chains = (x, y), n, chains
        self.w = (mean + torch.randn(draws, chains, P, generator=g).double() @ root.T).float()

    @property
    def draws(self):
        return bc.Draws.from_trees([{"w": t} for t in self.w], chains=self.chains)

    def likelihood(self, p, batch):
        return (batch[0] @ p["w"] - batch[1]).square().mean() / 2

    def loss(self, p, batch):
        return self.likelihood(p, batch) + p["w"].square().sum() / (2 * self.n)

    @property
    def tx(self):
        return bc.sghmc(0.1, temperature=1 / self.n)


# what chance explains


@pytest.mark.sweep(1)
@pytest.mark.parametrize("draws, chains", [(16, 2), (20, 20), (40, 4)])
def test_independent_draws_share_no_noise(draws, chains):
    """Level 1e-4 a set; lags that leave less than 12 residuals once read a correlation above 1."""
    g = torch.Generator().manual_seed(0)
    assert not any(shared_noise(torch.randn(draws, chains, 5, generator=g).double()) for _ in range(50))


@pytest.mark.slow
def test_a_few_exact_draws_are_not_called_cold_or_unmixed():
    """40 sets of 12 independent draws of one chain; the level of each test is 0.01, of which six are made."""
    found = [doctor((run := Exact(s, 12, 1)).draws, run.tx, run.loss, run.data).kinds for s in range(40)]
    assert not any(kinds & {"cold", "mixing", "heated"} for kinds in found)
    assert sum(map(bool, found)) <= 4


@pytest.mark.parametrize("draws, chains", [(60, 1), (400, 1), (400, 4)])
def test_a_jump_that_was_made_once_is_not_mixed(draws, chains):
    run = Exact(0, draws, chains)
    run.w[draws // 2 :, : (chains + 1) // 2] += 10.0
    run.w[: draws // 2, (chains + 1) // 2 :] += 10.0
    assert doctor(run.draws).kinds & {"mixing", "short"}


def test_one_chain_of_many_that_is_elsewhere_is_named():
    run = Exact(0, 100, 100)
    assert doctor(run.draws).is_healthy
    run.w[:, 7] += 1.0
    (found,) = doctor(run.draws).findings
    assert found.kind == "modes"


def test_two_chains_far_apart_are_told_from_twelve_draws():
    run = Exact(0, 12, 2)
    run.w[:, 1] += 5.0
    assert doctor(run.draws).kinds & {"modes", "mixing"}


# chains that stand still


@pytest.mark.parametrize("chains", [1, 2, 4])
def test_a_chain_that_stops_is_dead(chains):
    run = Exact(1, 200, chains)
    run.w[150:, 0] = run.w[150, 0]
    found = doctor(run.draws)
    assert "dead" in found.kinds and "Chain 0 stood still for 50 draws" in str(found)


def test_a_chain_that_rejects_most_proposals_is_not_dead():
    run, g = Exact(1, 400, 2), torch.Generator().manual_seed(0)
    for t in range(1, 400):
        rejected = torch.rand(2, generator=g) < 0.6
        run.w[t] = torch.where(rejected[:, None], run.w[t - 1], run.w[t])
    assert "dead" not in doctor(run.draws).kinds


def test_every_leaf_that_stands_still_or_is_not_used_is_named():
    run = Exact(2, 60, 4)
    trees = [{"w": w, "unused": torch.randn(4, 3), "still": torch.ones(4, 2)} for w in run.w]
    draws = bc.Draws.from_trees(trees, chains=4)
    found = doctor(draws, run.tx, run.loss, run.data)
    says = " ".join(f.says for f in found.findings if f.kind == "dead")
    assert "still did not move" in says and "does not depend on unused" in says


def test_leaves_that_are_not_sampled_may_stand_still():
    """The stiffest directions of the loss lie in the frozen leaf, whose virial is zero."""
    run = Exact(3, 100, 4)
    draws = bc.Draws.from_trees([{"w": w, "scale": torch.ones(4, 1)} for w in run.w], chains=4)
    tx = bc.partition({True: run.tx, False: bc.sgd(0.0)}, {"w": True, "scale": False})

    def loss(p, batch):
        return run.loss({"w": p["w"]}, batch) + 50 * (p["scale"] - 1).square().sum()

    assert doctor(draws, tx, loss, run.data).is_healthy
    assert doctor(draws, tx).is_healthy
    assert doctor(draws, run.tx, loss, run.data).kinds == {"dead"}  # a chain that should move it


# the scale of the loss


def tokens(ignored):
    g = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(5, (40, 10), generator=g) for _ in range(2))
    labels[:, 10 - ignored :] = -100
    return {"ids": ids, "labels": labels}


def test_a_mean_over_tokens_is_asked_for_their_number():
    batch = tokens(5)

    def loss(p, b):
        logits = p["E"][b["ids"]].flatten(0, 1)
        return nn.functional.cross_entropy(logits, b["labels"].flatten()) + p["E"].square().sum() / 400

    torch.manual_seed(0)
    draws = bc.Draws.from_trees([{"E": torch.randn(2, 5, 5)} for _ in range(3)], chains=2)

    def look(temperature, **more):
        return doctor(draws, bc.sghmc(0.1, temperature=temperature), loss, batch, **more)

    (scale,) = [f for f in look(1 / 200).findings if f.kind == "scale"]
    assert "pass their number as data_size=" in scale.do
    assert "scale" not in look(1 / 200, data_size=200).kinds
    assert "scale" in look(1 / 40, data_size=200).kinds
    passed = look(1 / 40)
    assert "scale" not in passed.kinds and any("40 data" in note for note in passed.unseen)


def test_data_are_counted_by_what_most_tensors_say():
    run = Exact(0, 60, 4)
    batch = {"class weights": torch.ones(3), "x": run.data[0], "y": run.data[1]}
    found = doctor(run.draws, run.tx, lambda p, b: run.loss(p, (b["x"], b["y"])), batch)
    assert found.is_healthy and found.numbers["data N"] == N


def test_a_loss_of_fixed_size_is_not_given_a_batch_twice():
    run = Exact(0, 60, 4)
    weights = torch.ones(N)
    found = doctor(
        run.draws, run.tx, lambda p, b: (weights * run.loss(p, b)).mean() + 0 * (weights * b[1]).sum(), run.data
    )
    assert found.is_healthy and any(note.startswith("Not seen: whether loss and temperature") for note in found.unseen)


@pytest.mark.parametrize("total", [False, True])
def test_dropout_does_not_make_a_sum_of_a_mean(total):
    """20 places; a comparison of single masks called eight of 200 means sums, and 39 of 200 sums means."""
    run = Exact(0, 20, 1)
    x, y = run.data

    def loss(p, batch):
        squares = (nn.functional.dropout(batch[0], 0.5) @ p["w"] - batch[1]).square()
        return squares.sum() / 2 if total else squares.mean() / 2

    for t in range(20):
        draws = bc.Draws.from_trees([{"w": run.w[t, 0]}])
        found = doctor(draws, bc.sghmc(1e-3, temperature=1.0 if total else 1 / N), loss, (x, y))
        assert "scale" not in found.kinds


@pytest.mark.slow
def test_batches_of_different_sizes_count_by_their_data():
    """Exact draws stay right where the last batch has one datum, which is not a quarter of all."""
    for seed in range(5):
        run = Exact(seed, 100, 4)
        assert doctor(run.draws, run.tx, run.loss, [*zip(*(part.split(33) for part in run.data))]).is_healthy


def test_three_draws_tell_the_scale():
    run = Exact(0, 3, 2)
    found = doctor(run.draws, bc.sghmc(0.1, temperature=1.0), run.loss, run.data)
    assert "scale" in found.kinds and any("takes four" in note for note in found.unseen)


# temperatures


def test_that_the_loss_may_be_a_multiple_of_the_mean_is_among_what_is_not_seen():
    """N times the mean at temperature 1/N is a thousand times too cold, and looks like a sharper likelihood."""
    run = Exact(0, 12, 2)
    found = doctor(run.draws, run.tx, lambda p, batch: run.n * run.loss(p, batch), run.data)
    assert any("the scale of the loss" in text and "N times it" in text for text in found.unseen)


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
    """But for rounding in float32, though the prior, a part of the loss, has a scale of its own."""
    run = Exact(0, 60, 4)

    def loss(p, batch):
        scale = len(batch[1]) if times == "sum" else times
        return scale * run.likelihood(p, batch) + p["w"].square().sum()

    of = OF | {"likelihood": bc.likelihoods.gaussian(variance=variance)}
    found = doctor(run.draws, bc.sghmc(0.1, temperature=temperature), loss, run.data, **of)
    assert found.numbers["loss / - log likelihood"] == pytest.approx(factor, rel=2e-3)
    says = [f.do for f in found.findings if f.kind == "scale"]
    read = [float(do.split("Set temperature=")[1].split(". Where")[0]) for do in says]
    assert read == ([pytest.approx(right, rel=2e-3)] if right else [])
    assert not any("the scale of the loss" in text for text in found.unseen)


OF = {"forward": lambda p, batch: batch[0] @ p["w"], "likelihood": bc.likelihoods.gaussian(variance=1.0)}


@pytest.mark.parametrize(
    "more, message",
    [
        ({"forward": None}, "likelihood= and forward= belong together"),
        ({"forward": lambda p, batch: (batch[0] @ p["w"])[:, None]}, "outputs and targets broadcast"),
        ({"targets": lambda batch: batch["y"]}, r"forward\(params, batch\) and likelihood"),
        ({"likelihood": "gaussian"}, "likelihood must be"),
    ],
)
def test_what_cannot_be_compared_with_a_likelihood_is_refused(more, message):
    run = Exact(0, 12, 2)
    with pytest.raises((ValueError, TypeError), match=message):
        doctor(run.draws, run.tx, run.loss, run.data, **OF | more)


def test_a_loss_of_another_likelihood_is_named_and_dropout_or_single_data_are_none():
    run = Exact(0, 60, 4)
    found = doctor(run.draws, run.tx, lambda p, b: (b[0] @ p["w"] - b[1]).abs().mean(), run.data, **OF)
    assert any(f.kind == "scale" and "no multiple of -likelihood" in f.says for f in found.findings)
    masked = {"forward": lambda p, b: nn.functional.dropout(b[0], 0.5) @ p["w"]}
    for loss, batches, more in (
        (lambda p, b: (masked["forward"](p, b) - b[1]).square().mean() / 2, run.data, masked),
        (run.loss, [*zip(*(part.split(1) for part in run.data))], {}),
    ):
        found = doctor(run.draws, run.tx, loss, batches, **OF | more)
        assert found.numbers["loss / - log likelihood"] == pytest.approx(1.0, rel=1e-4) and "scale" not in found.kinds


def test_data_with_nan_are_no_healthy_run():
    run = Exact(0, 60, 4)
    assert doctor(run.draws, run.tx, run.loss, (run.data[0], run.data[1] * torch.nan)).kinds == {"nonfinite"}


@pytest.mark.slow
def test_a_temperature_that_fell_is_read_at_the_draws():
    run = Exact(0, 1, 4)
    tx = bc.sghmc(0.1, temperature=lambda count: (1 + 99 * torch.exp(-count.double() / 50)) / N)
    w = {"w": run.w[0]}
    chains = bc.parallel(bc.make_step(run.loss, tx), 4)
    torch.manual_seed(0)
    draws = bc.sample(chains, w, chains.init(tx, w), [run.data], steps=1400, burn_in=800, thinning=5)
    assert not doctor(draws, tx, run.loss, run.data).kinds & {"scale", "cold"}


def test_without_a_temperature_it_says_so_and_takes_one():
    run = Exact(0, 60, 4)
    found = doctor(run.draws, bc.sgd(0.1), run.loss, run.data)
    assert found.is_healthy and any("pass temperature=" in note for note in found.unseen)
    told = doctor(run.draws, bc.sgd(0.1), run.loss, run.data, temperature=1 / N)
    assert told.is_healthy and "temperature, all parameters" in told.numbers
    assert (
        "cold" in doctor(run.draws, bc.sgd(0.1), run.loss, run.data, temperature=20 / N, posterior_temperature=20).kinds
    )


@pytest.mark.slow
def test_a_prior_that_must_dominate_is_no_fault():
    """400 parameters and 30 data, which can determine 30 of them."""
    for seed in range(3):
        run = Exact(seed, 60, 4, P=400, n=30)
        tx = bc.sgd(0.1, momentum=0.9, weight_decay=1 / 30, temperature=1 / 30)
        assert doctor(run.draws, tx, run.likelihood, run.data).is_healthy
        strong = bc.sgd(0.1, momentum=0.9, weight_decay=1000 / 30, temperature=1 / 30)
        shrunk = bc.Draws.from_trees([{"w": w / 1000**0.5} for w in torch.randn(60, 4, 400)], chains=4)
        assert "prior" in doctor(shrunk, strong, run.likelihood, run.data).kinds


def test_a_loss_without_a_hessian_is_judged_all_the_same():
    run = Exact(0, 60, 4)

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, g):
            return 2 * ctx.saved_tensors[0] * g

    def loss(p, b):
        return Once.apply(b[0] @ p["w"] - b[1]).mean() / 2 + p["w"].square().sum() / (2 * N)

    found = doctor(run.draws, run.tx, loss, run.data)
    assert found.is_healthy and any("no finite Hessian" in note for note in found.unseen)
    assert "temperature, all parameters" in found.numbers and "temperature, stiffest direction 1" not in found.numbers


# what it leaves behind, and what it refuses


def test_random_numbers_stay_where_they_were():
    run, own = Exact(0, 12, 2), torch.Generator().manual_seed(5)
    tx = bc.sghmc(0.1, temperature=1 / N, generator=own)
    before = torch.get_rng_state(), own.get_state()

    def loss(p, batch):
        return run.loss(p, (nn.functional.dropout(batch[0], 0.1), batch[1]))

    shuffled = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*run.data), 50, shuffle=True)
    doctor(run.draws, tx, loss, shuffled, of=lambda p: nn.functional.dropout(p["w"], 0.1))
    assert torch.equal(torch.get_rng_state(), before[0]) and torch.equal(own.get_state(), before[1])


@pytest.mark.parametrize("batches", [lambda x, y: [x, y], lambda x, y: torch.utils.data.TensorDataset(x, y)])
def test_data_that_the_loss_cannot_take_are_refused_with_what_to_pass(batches):
    run = Exact(0, 12, 2)
    with pytest.raises(
        ValueError, match=r"doctor: the loss cannot take batch \d of .*a tuple, a dictionary or a tensor"
    ):
        doctor(run.draws, run.tx, run.loss, batches(*run.data))


def test_names_with_quotes_are_names():
    run = Exact(0, 12, 2)
    draws = bc.Draws.from_trees([{"it's": w} for w in run.w], chains=2)
    found = doctor(draws, run.tx, lambda p, b: run.loss({"w": p["it's"]}, b), run.data)
    assert found.is_healthy


def test_losses_that_are_not_finite_once_are_no_divergence(monkeypatch):
    run = Exact(0, 60, 1)
    losses = torch.randn(60, generator=torch.Generator().manual_seed(0)).double()
    for change, kind in ((slice(20, 21), "nonfinite"), (slice(59, 60), "nonfinite"), (slice(40, 60), "diverged")):
        bad = losses.clone()
        bad[change] = torch.inf
        monkeypatch.setattr(bc.Draws, "loss", property(lambda _, bad=bad: bad))
        assert doctor(run.draws).kinds == {kind}


def test_leaves_of_different_temperatures_are_each_judged_by_their_own():
    """Exact draws of two models that know nothing of each other, one at a hundred times the temperature."""
    one, two = Exact(0, 100, 4), Exact(1, 100, 4)
    mean = two.w.mean((0, 1))
    draws = bc.Draws.from_trees([{"a": a, "b": mean + 10 * (b - mean)} for a, b in zip(one.w, two.w)], chains=4)
    tx = bc.partition(
        {1: bc.sghmc(0.1, temperature=1 / N), 100: bc.sghmc(0.1, temperature=100 / N)}, {"a": 1, "b": 100}
    )

    def loss(p, batch):
        return one.loss({"w": p["a"]}, batch[:2]) + two.loss({"w": p["b"]}, batch[2:])

    found = doctor(draws, tx, loss, (*one.data, *two.data), posterior_temperature=100.0)
    assert found.is_healthy and abs(found.numbers["temperature, all parameters"] - 1) < 0.2


@pytest.mark.parametrize("times", [1.0, 9.0])
def test_the_noise_of_a_gradient_over_the_curvature_is_shown_and_no_verdict(times):
    """Of a calibrated regression it is 1 at the mode; nine times the loss has nine times the noise."""
    run = Exact(0, 60, 4, n=400)
    found = doctor(run.draws, run.tx, lambda p, b: times * run.likelihood(p, b), run.data)
    assert found.numbers["tr Cov(gradient) / tr H"] == pytest.approx(times, rel=0.4) and "scale" not in found.kinds
