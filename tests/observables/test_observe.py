"""Learning coefficients, influence and susceptibilities along chains, against closed forms and quadrature."""

import copy
import math

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import bayesopt_chain as bc
from bayesopt_chain.diagnostics import susceptibility
from bayesopt_chain.diagnostics.observables import observe as module
from bayesopt_chain.diagnostics.observables.sums import Record, merged
from bayesopt_chain.diagnostics.observables.target import relaxation, spreading
from bayesopt_chain.loop.capture.replays import compiler_found
from tests.failing import failing

N, D = 60, 6
G = torch.Generator().manual_seed(0)
X = torch.randn(N, D, generator=G, dtype=torch.float64)
Y = X @ torch.randn(D, generator=G, dtype=torch.float64) + torch.randn(N, generator=G, dtype=torch.float64)
PROBE = torch.randn(25, D, generator=G, dtype=torch.float64), torch.randn(25, generator=G, dtype=torch.float64)
BEST = torch.linalg.lstsq(X, Y).solution


def losses(w, data):
    return (data[0] @ w["w"] - data[1]).square() / 2


def loss(w, data):
    return losses(w, data).mean()


OF = {"probe": lambda w: losses(w, PROBE), "train": lambda w: losses(w, (X, Y))}


def read(w):
    """What ``vmap`` refuses: a tensor's number."""
    return torch.tensor(w["w"].sum().item())


def total(w):
    return w["w"].sum()


def measured(batches=(X, Y), of=OF, **more):
    about = {"temperature": 1 / N, "strength": 1 / N, "steps": 2400, "burn_in": 200, "lr": 0.3, "thinning": 1} | more
    pairs = about.pop("covariances", [("probe", "train")] if of else [])
    return bc.observe(loss, {"w": BEST}, batches, of, covariances=pairs, **about)


def closed_form(strength, free):
    """Covariance of squared residuals ``r^2 / 2`` and of the loss under the Gaussian posterior with a spring: for residuals
    ``r = a + u, u ~ N(0, S)``, ``Cov(r_i^2 / 2, r_j^2 / 2) = S_ij^2 / 2 + a_i a_j S_ij``."""
    free = list(free)
    H = (X.T @ X / N)[free][:, free]
    cov = torch.linalg.inv(H + strength * torch.eye(len(H), dtype=torch.float64)) / N
    S = PROBE[0][:, free] @ cov @ X[:, free].T
    a, b = PROBE[0] @ BEST - PROBE[1], X @ BEST - Y
    return S**2 / 2 + a[:, None] * b * S, float((H * cov).sum() / 2 * N)


@pytest.mark.slow
@pytest.mark.parametrize(("gamma", "free"), [(0.0, range(6)), (30.0, range(6)), (1.0, (1, 4))])
def test_influence_and_learning_coefficient_of_linear_regression_have_their_closed_forms(gamma, free):
    """With a spring, and with some weights alone: 1,500 entries with errors that are right within 20 % of themselves over four
    seeds (few directions are behind all of them, so that their z are dependent: 0.6 to 1.5 at one seed), and the coefficient
    within 4 errors (1 in 16,000)."""
    mask = torch.zeros(D, dtype=torch.bool)
    mask[list(free)] = True
    where = None if len(free) == D else {"w": mask}
    runs = [measured(strength=gamma / N, where=where, lr=0.3 / (1 + gamma / N), seed=seed) for seed in range(4)]
    wanted, llc = closed_form(gamma / N, free)
    each = [run.bif("probe", "train") for run in runs]
    z, bif, run = torch.stack([(x.value + wanted) / x.error for x in each]), each[0], runs[0]
    assert z.square().mean().sqrt() == pytest.approx(1.0, abs=0.2)
    assert torch.corrcoef(torch.stack([bif.value.flatten(), -wanted.flatten()]))[0, 1] > 0.995
    found = run.llc()
    assert abs(float(found.value) - llc) < 4 * float(found.error) and float(found.error) < 0.05 * llc
    assert run.free == len(free) and run.n == N and run.verdict == "no objection"
    virial = run.mean("virial")
    assert abs(float(virial.value) - len(free)) < 4 * float(virial.error)


@pytest.mark.slow
def test_influence_predicts_what_leaving_a_datum_out_does_to_ridge_regression():
    """Exact retraining without each datum: the change of the mean probe loss is minus the influence, to first order."""
    run = measured(strength=0.3, lr=0.2)
    change = []
    for j in range(N):
        keep = torch.arange(N) != j
        H, g = X[keep].T @ X[keep] / N, X[keep].T @ Y[keep] / N
        w = BEST + torch.linalg.solve(H + 0.3 * torch.eye(D, dtype=torch.float64), g - H @ BEST)
        change.append(losses({"w": w}, PROBE).mean())
    influence = run.bif("probe", "train").value.mean(0)
    assert torch.corrcoef(torch.stack([torch.stack(change), -influence]))[0, 1] > 0.95


def singular(p, batch):
    return (p["a"] ** 2 * p["b"] ** 2 + 0.3 * (p["a"] - p["b"]) ** 2) / 2


def expectation(f, temperature, strength, weight=0.0, extra=None, only_a=False):
    """``E f`` by quadrature on a grid of both parameters, or of ``a`` alone."""
    grid = torch.linspace(-6, 6, 1201, dtype=torch.float64)
    a, b = torch.meshgrid(grid, torch.zeros(1, dtype=torch.float64) if only_a else grid, indexing="ij")
    p = {"a": a, "b": b}
    energy = singular(p, None) + strength * (a**2 + b**2) / 2 + (0 if extra is None else weight * extra(p))
    density = (-(energy - energy.min()) / temperature).exp()
    return float((f(p) * density).sum() / density.sum())


@pytest.mark.slow
def test_susceptibilities_are_the_derivatives_of_a_reweighted_loss():
    """By quadrature: the whole expression, and its first term as a finite difference of the loss reweighted towards a probe."""
    T, s, zero = 0.5, 0.2, torch.zeros((), dtype=torch.float64)
    probes = [lambda p: p["a"] ** 2, lambda p: (p["a"] - p["b"] - 1.0) ** 2]
    of = {"L": lambda p: singular(p, None), "probe": lambda p: torch.stack([f(p) for f in probes])}
    about = {"temperature": T, "strength": s, "steps": 1900, "burn_in": 500, "chains": 64}
    start = {"a": zero, "b": zero}
    part, full = (bc.observe(singular, start, None, of, where=w, **about) for w in ({"a": None}, None))
    found = susceptibility(part, full, "L", "probe")
    for x, probe in enumerate(probes):
        gap = [expectation(lambda p, f=probe: singular(p, None) - f(p), T, s, only_a=alone) for alone in (True, False)]
        phi = expectation(lambda p: singular(p, None), T, s, only_a=True)
        ends = [
            expectation(lambda p: singular(p, None), T, s, h, lambda p, f=probe: singular(p, None) - f(p), only_a=True)
            for h in (-1e-4, 1e-4)
        ]
        wanted = -T * (ends[1] - ends[0]) / 2e-4 + phi * (gap[0] - gap[1])
        assert abs(float(found.value[x]) - wanted) < 4 * float(found.error[x])
        assert float(found.error[x]) < 0.1 * abs(wanted)


@pytest.mark.slow
def test_what_is_measured_of_minibatches_is_that_of_all_data_at_the_same_draws():
    """At one relaxation an epoch."""
    run = measured(
        bc.epochs((X, Y), 10), {"all": lambda w: loss(w, (X, Y))[None]}, covariances=[],
        temperature=1.0, strength=0.0, lr=0.15, momentum=0.0, steps=900, chains=64,
    )  # fmt: skip
    seen, whole = run.mean("loss"), run.mean("all")
    assert abs(float(seen.value - whole.value)) < 4 * float(seen.error.square().add(whole.error.square()).sqrt())
    assert float(seen.error) < 0.05 * float(seen.value - run.reference)
    assert run.reference == pytest.approx(float(loss({"w": BEST}, (X, Y))), rel=1e-14)


def test_chains_draw_their_batches_independently_whatever_their_order():
    """The heat of independent batches is taken off, and reshuffled ones have less: they would come out 8 % too low."""
    runs = [
        measured(bc.epochs((X, Y), 10, order=order), steps=60, burn_in=10) for order in ("independent", "reshuffled")
    ]
    assert torch.equal(runs[0].mean("loss").value, runs[1].mean("loss").value) and float(runs[0].heat.value) > 0


@pytest.mark.slow
def test_the_chosen_rate_keeps_the_heat_of_batches_small_and_a_large_one_is_known_and_refused():
    """The loss without the heat is the closed form, within 4 errors, where the heat is 30 of them."""
    many = {"steps": 1700, "chains": 64}
    cool = measured(bc.epochs((X, Y), 10, order="independent"), None, lr=None, **many)
    assert abs(float(cool.mean("virial").value) - D) < 0.04 * D + 4 * float(cool.mean("virial").error)
    assert float(cool.llc().error) < 0.06 * float(cool.llc().value)
    assert abs(float(cool.llc().value) - closed_form(1 / N, range(D))[1]) < 4 * float(cool.llc().error)
    hot = measured(bc.epochs((X, Y), 10, order="independent"), None, lr=0.02, **many)
    raw, error = N * float(hot.mean("loss").value - hot.reference), N * float(hot.mean("loss").error)
    assert abs(raw - float(hot.heat.value) - closed_form(1 / N, range(D))[1]) < 4 * error < 0.2 * float(hot.heat.value)
    with pytest.raises(ValueError, match=r"refused: too hot, virial .* of 6; take half the lr, or larger batches"):
        hot.llc()


@pytest.mark.slow
def test_heat_that_missing_spread_hides_is_seen_in_the_stiff_directions():
    """A chain that noise of the loss heats along one direction, while another is far from spread: the sum says nothing."""
    data = torch.randn(400, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = data - data.mean(0)
    k = torch.tensor([1.0] + [0.0] * 12, dtype=torch.float64)

    def rough(w, batch):
        return (k * w.square()).sum() / 2 + (batch.mean() * w[0])

    run = bc.observe(
        rough, torch.zeros(13, dtype=torch.float64), bc.epochs(data, 1, order="independent"), temperature=0.05,
        strength=0.001, lr=0.3, momentum=0.0, steps=1200, burn_in=100, chains=16,
    )  # fmt: skip
    assert float(run.mean("virial").value) < 13 and "stiffest directions are" in run.verdict


def quartic(w, batch):
    return (w**4).sum() / 4


@pytest.mark.slow
def test_the_rate_comes_from_where_the_chains_go_and_the_value_by_quadrature():
    """A quartic has no curvature at its minimum: 1/4 a dimension without a spring, within 4 errors."""
    run = bc.observe(
        quartic, torch.zeros(40, dtype=torch.float64), None, temperature=1.0, strength=0.0, steps=1500, burn_in=300
    )
    assert abs(run.llc().value - 10.0) < 4 * run.llc().error < 0.4 and run.verdict == "no objection"
    assert 0.02 < run.limit < 0.4


@pytest.mark.slow
def test_what_has_not_spread_is_said_beside_an_answer_and_what_starts_beside_a_minimum_is_refused():
    k = torch.cat([torch.ones(10), torch.zeros(20)])

    def flat(w, batch):
        return (k * w.square()).sum() / 2

    about = {"temperature": 0.01, "strength": 1e-4, "steps": 800, "burn_in": 200}
    run = bc.observe(flat, torch.zeros(30), None, **about)
    assert "flat directions have not spread: virial" in run.verdict and "steps: run" in run.verdict
    assert abs(run.llc().value - 5.0) < 4 * run.llc().error
    with pytest.raises(ValueError, match="the start is no minimum: a step down its gradient lowers the loss by"):
        bc.observe(flat, torch.ones(30), None, **about).llc()


@pytest.mark.parametrize("momentum", [0.9, 0.97, 0.99])
def test_the_relaxation_is_that_of_the_slower_root_and_the_momentum_shortens_it(momentum):
    """Roots of the recursion ``v <- mu v + s x, x <- x - lr v`` of a direction that only the spring holds."""
    lr, s = 0.004, 0.007
    slower = max(abs(z) for z in np.roots([1.0, -(1 + momentum - lr * s), momentum]))
    assert relaxation(lr, momentum, s) == pytest.approx(-1 / math.log(slower), rel=0.02)
    chosen = spreading(lr, s, 3000, math.inf)
    assert 0.97 < chosen < 0.99 and relaxation(lr, chosen, s) < 1.05 * 3000 / 4 < relaxation(lr, 0.9, s)
    assert spreading(lr, s, 3000, lr / 0.1) == spreading(lr, 0.0, 3000, math.inf) == 0.9


@pytest.mark.slow
def test_what_is_missing_of_a_run_that_is_too_short_is_in_its_error():
    """Twenty directions as weak as the spring relax in half of a run: 4 to 5 of 15 of their share is missing at the start."""
    s = 0.002
    k = torch.cat([torch.ones(10), torch.full((20,), s)]).double()

    def weak(w, batch):
        return (k * w.square()).sum() / 2

    about = {"temperature": 0.01, "strength": s, "lr": 0.05, "momentum": 0.9, "steps": 1200, "burn_in": 0}
    run = bc.observe(weak, torch.zeros(30).double(), None, **about)
    right, statistical, found = float((k / (k + s)).sum()) / 2, float(run.mean("loss").error) / 0.01, run.llc()
    assert found.value < right - 3 * statistical and found.error > 2 * statistical
    assert abs(found.value - right) < 2 * found.error


@pytest.mark.slow
def test_what_vmap_refuses_is_measured_one_chain_after_the_other():
    both = [measured(of={"a": f}, covariances=[], chains=2, steps=300, at_once=1) for f in (read, total)]
    assert torch.equal(both[0].traces["a"], both[1].traces["a"].float())

    def attends(w, x):
        h = torch.nn.functional.embedding(x, w["in_proj_weight"])
        return bc.make_functional(layer).forward(w, ((h, h, h), None))[0].square().mean()

    layer = torch.nn.MultiheadAttention(4, 2, batch_first=True).eval()  # its fast road knows no gradient
    params = {name: p.detach() for name, p in layer.named_parameters()}
    words = torch.randint(12, (8, 3))
    about = {"temperature": 0.1, "chains": 2, "steps": 40, "burn_in": 8}
    assert bc.observe(attends, params, words, at_once=1, **about).record.count == 4
    with pytest.raises(ValueError, match=r"vmap refuses loss or an observable .*pass at_once=1"):
        bc.observe(attends, params, words, **about)


@pytest.mark.slow
def test_one_chain_after_the_other_and_all_at_once_measure_the_same():
    """Other noise, the same law: means within 4 errors of their difference, and the same numbers of everything."""
    apart, once = measured(at_once=1, chains=4, steps=800), measured(at_once=4, chains=4, steps=800)
    for a, b in ((apart.mean("probe"), once.mean("probe")), (apart.llc(), once.llc())):
        z = (a.value - b.value) / (a.error**2 + b.error**2).sqrt()
        assert z.abs().max() < 4.5
    assert apart.traces["loss"].shape == once.traces["loss"].shape == (4, 600, 1)
    assert apart.chains == 4 and apart.to_arviz()["posterior"]["loss"].shape == (4, 600, 1)


@pytest.mark.slow
@pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")
@pytest.mark.parametrize("at_once", [1, 2])
def test_compiled_steps_between_draws_measure_the_same(at_once):
    """Of 60 data in batches of 25 the last is short; chains go one after the other through one program."""
    batches = bc.epochs((X, Y), 25)
    about = {"batches": batches, "chains": 2, "at_once": at_once, "steps": 90, "burn_in": 20, "thinning": 3}
    plain, fast = (measured(**about, capture=capture) for capture in (False, True))
    for name in ("loss", "virial by leaf", "noise"):
        torch.testing.assert_close(fast.traces[name], plain.traces[name], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        fast.bif("probe", "train").value, plain.bif("probe", "train").value, rtol=1e-8, atol=1e-9
    )


def test_what_is_per_token_keeps_its_shape():
    def tokens(w):
        return losses(w, PROBE).reshape(5, 5)

    run = measured(of={"t": tokens, "n": lambda w: w["w"].sum()}, covariances=[("t", "n"), ("t", "t")], steps=400)
    assert run.covariance("t", "n").value.shape == (5, 5) and run.covariance("t", "t").value.shape == (5, 5, 5, 5)
    assert run.mean("n").value.shape == () and run.traces["n"].shape == (8, 200)


class Stop(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("batches, at_once", [((X, Y), 1), (bc.epochs((X, Y), 10), 2), (bc.epochs((X, Y), 10), 1)])
def test_a_kill_loses_nothing_and_changes_no_bit(tmp_path, monkeypatch, batches, at_once):
    """Killed in the middle, and gone on with from the files; then made longer: every sum is that of an unbroken run."""

    def run(path, steps=90):
        about = {"chains": 2, "at_once": at_once, "steps": steps, "burn_in": 20, "thinning": 3, "lr": None}
        return measured(batches, path=path, checkpoint_seconds=0.0, **about)

    whole = run(None)

    monkeypatch.setattr(module.Watch, "__call__", failing(module.Watch.__call__, 57, Stop))
    with pytest.raises(Stop):
        run(tmp_path)
    monkeypatch.undo()
    for got, want in ((run(tmp_path), whole), (run(tmp_path, 120), run(None, 120))):
        torch.testing.assert_close(got.bif("probe", "train"), want.bif("probe", "train"), rtol=0, atol=0)
        assert torch.equal(got.traces["loss"], want.traces["loss"])
        assert (got.lr, got.gradients, got.limit) == (want.lr, want.gradients, want.limit)


def test_another_run_under_the_same_path_is_refused_by_what_differs(tmp_path):
    about = {"steps": 40, "burn_in": 5, "path": tmp_path}
    measured(**about)

    def other(w, data):
        return losses(w, data).square().mean()

    for change, said in (
        ({"batches": (X, Y + 1)}, "data.tensors"),
        ({"temperature": 0.5}, "another run"),
        ({"strength": 0.5}, "another run"),
        ({"seed": 3}, "generator is 0, here 3"),
        ({"of": OF | {"probe": lambda w: losses(w, PROBE) * 2}}, "another observable.probe.of.function"),
        ({"covariances": [("probe", "probe")]}, "another observable.train.kept is True, here False"),
    ):
        with pytest.raises(ValueError, match=said):
            measured(**(about | change))
    with pytest.raises(ValueError, match="another run: loss"):
        bc.observe(other, {"w": BEST}, (X, Y), OF, covariances=[("probe", "train")], temperature=1 / N, strength=1 / N,
                   lr=0.3, **about)  # fmt: skip


def test_neither_parameters_nor_batches_nor_random_states_are_changed():
    params, batches = {"w": BEST.clone().requires_grad_()}, bc.epochs((X, Y), 10)
    before = copy.deepcopy(params), batches.state_dict(), torch.get_rng_state()

    bc.observe(
        loss, params, batches, {"r": lambda w: w["w"].sum() + torch.rand(())}, temperature=0.1, steps=30, burn_in=2
    )
    assert torch.equal(params["w"], before[0]["w"]) and params["w"].grad is None
    assert batches.state_dict() == before[1] and torch.equal(torch.get_rng_state(), before[2])


def test_a_function_that_can_be_differentiated_once_is_refused():
    """Its gradient counts as constant in a second reverse pass, and the curvature would be that of the rest."""
    from tests.diagnostics.test_doctor import EXACT, without_hessian

    with pytest.raises(RuntimeError, match="setup_context"):
        bc.observe(without_hessian, {"w": EXACT.w[0, 0]}, EXACT.data, steps=40, burn_in=2, at_once=1)


@pytest.mark.parametrize("chains", [1, 8])
def test_a_leaf_without_numbers_is_passed_over_and_one_of_a_number_alone_is_not(chains):
    params = {"w": BEST, "none": torch.zeros(0), "one": torch.tensor(0.0)}
    of = {"none": lambda w: w["none"], "one": lambda w: w["one"]}
    run = bc.observe(loss, params, (X, Y), of, chains=chains, steps=60, burn_in=20)
    assert run.free == D + 1 and run.traces["none"].shape == (chains, 5, 0) and run.traces["one"].shape == (chains, 5)


def test_the_loss_at_the_start_is_that_of_the_rows_that_are_left():
    def weighted(w, batch):
        return (losses(w, batch[0]) * batch[1]).mean()

    data, left = bc.epochs((X, Y), 10, leave_out=torch.arange(0, N, 3), with_rows=True), torch.arange(N) % 3 > 0
    run = bc.observe(weighted, {"w": BEST}, data, temperature=1 / N, steps=20, burn_in=2, chains=2)
    assert run.reference == pytest.approx(
        float((losses({"w": BEST}, (X, Y)) * torch.arange(N))[left].mean()), rel=1e-12
    )


def test_the_number_of_data_sets_the_temperature_and_the_reference_is_of_all_of_them():
    run = bc.observe(loss, {"w": BEST}, bc.epochs((X, Y), 16), steps=40, burn_in=8)  # the last batch is of what remains
    assert run.temperature == math.log(N) / N == run.strength
    assert run.reference == pytest.approx(float(loss({"w": BEST}, (X, Y))), rel=1e-14)


# Means and covariances from block sums: the numbers of all draws at once, and errors that are as large as they say


def autoregressive(chains, draws, m, phi, seed):
    """Stationary series of variance 1, ``[C, draws, m]``."""
    g = torch.Generator().manual_seed(seed)
    noise = torch.randn(chains, draws, m, generator=g, dtype=torch.float64)
    out = [noise[:, 0]]
    for t in range(1, draws):
        out.append(phi * out[-1] + (1 - phi**2) ** 0.5 * noise[:, t])
    return torch.stack(out, 1)


def recorded(y, x, kept=("y", "x"), chains=slice(None)):
    m, n = y.shape[2], x.shape[2]
    shift = {"y": torch.full((m,), 0.3, dtype=torch.float64), "x": torch.zeros(n, dtype=torch.float64)}
    record = Record(len(y[chains]), shift, kept)
    for t in range(y.shape[1]):
        record.add({"y": y[chains, t], "x": x[chains, t]})
    return record


@pytest.mark.parametrize("draws", [3, 8, 21, 700, 1029])
def test_every_draw_counts_and_chains_that_ran_apart_are_merged(draws):
    """Also draws that fill no unit of 8."""
    y, x = autoregressive(4, draws, 20, 0.5, 0) + 2.0, autoregressive(4, draws, 30, 0.5, 1)
    flat = [z.reshape(-1, z.shape[2]) for z in (y, x)]
    off = [z - z.mean(0) for z in flat]
    want = off[0].T @ off[1] / (4 * draws - 1)
    apart = merged([recorded(y, x, chains=slice(i, i + 1)) for i in range(4)])
    for record in (recorded(y, x), apart):
        found, mean = record.covariance("y", "x"), record.mean("y")
        assert torch.allclose(found.value, want, rtol=0, atol=1e-13)
        assert torch.allclose(mean.value, flat[0].mean(0), rtol=0, atol=1e-13)
        assert torch.allclose(record.covariance("x", "y").error, found.error.T, equal_nan=True)
        if draws > 100:
            assert torch.allclose(found.error, recorded(y, x).covariance("y", "x").error, rtol=1e-9)
            assert torch.allclose(mean.error, recorded(y, x).mean("y").error, rtol=1e-9)
    assert torch.allclose(recorded(y, x).trace("y"), y, rtol=0, atol=1e-15)


@pytest.mark.parametrize("chains", [4, 8])
@pytest.mark.parametrize(("phi", "draws"), [(0.0, 500), (0.9, 200), (0.9, 1000), (0.97, 2000)])
def test_errors_are_calibrated(phi, draws, chains):
    """z of rms 1 within .1 over 400 series and 8,000 products, of 10 relaxations a chain or more: sampling error about .035."""
    y, x = autoregressive(chains, draws, 400, phi, 2), autoregressive(chains, draws, 20, phi, 3)
    record = recorded(y, x)
    for found in (record.mean("y"), record.covariance("y", "x")):
        z = found.value / found.error
        assert z.square().mean().sqrt() == pytest.approx(1.0, abs=0.1)
        assert found.agree.double().mean() > 0.9


def test_chains_that_stay_apart_are_told_and_their_spread_is_the_error():
    y = autoregressive(8, 400, 5, 0.5, 4) + torch.randn(8, 1, 5, generator=torch.Generator().manual_seed(1))
    for x in (y, y[:, :1].expand(-1, 400, -1)):  # and chains that stand still
        found = recorded(x, x).mean("x")
        assert not found.agree.any()
        assert torch.allclose(found.error, (x.mean(1).var(0) / 8).sqrt())


@pytest.mark.parametrize(("chains", "draws", "phi"), [(8, 50, 0.0), (8, 50, 0.8), (32, 50, 0.0), (2, 200, 0.8)])
def test_covariances_of_few_draws_seldom_disagree_where_chains_agree_and_do_where_they_do_not(chains, draws, phi):
    """A nominal 1 % of 400 products: over 100 seeds .9 to 1.4 %, above 4 % in none; by chi-squared it was 2 to 27 %."""
    y, x = (autoregressive(chains, draws, 20, phi, seed) for seed in (2, 3))
    assert recorded(y, x).covariance("y", "x").agree.double().mean() > 0.96
    y = autoregressive(chains, 400, 20, 0.0, 4) * torch.where(torch.arange(chains) % 2 == 0, 1.0, 3.0)[:, None, None]
    assert not recorded(y, y).covariance("y", "y").agree.diagonal().any()


def test_a_record_goes_on_from_its_state_and_says_what_it_does_not_hold():
    y, x = autoregressive(2, 203, 20, 0.5, 0), autoregressive(2, 203, 3, 0.5, 1)
    whole, half = recorded(y, x), recorded(y[:, :101], x[:, :101])
    again = recorded(y[:, :0], x[:, :0])
    again.load_state_dict(half.state_dict())
    for t in range(101, 203):
        again.add({"y": y[:, t], "x": x[:, t]})
    torch.testing.assert_close(whole.covariance("y", "x"), again.covariance("y", "x"), rtol=0, atol=0)
    assert torch.equal(whole.trace("x"), again.trace("x"))
    with pytest.raises(ValueError, match="no 'y' of which draws are kept; there are 'x'"):
        recorded(y, x, ()).trace("y")
    with pytest.raises(ValueError, match="ended before its first draw"):
        recorded(y[:, :0], x[:, :0]).mean("y")


# A some_entries of some entries alone: its chain is that of the free entries, and no other entry has gradient, noise or state


A = torch.linspace(0.5, 2.0, 6, dtype=torch.float64)


def some_entries(params, batch):
    return (A * (params["w"].reshape(-1) - 1.0) ** 2).sum() / 2 + params["block.b"].square().sum()


PARAMS = {"w": torch.zeros(2, 3, dtype=torch.float64), "block.b": torch.ones(4, dtype=torch.float64)}
MASK = torch.tensor([[True, False, False], [False, True, True]])


def test_loss_and_gradient_are_those_of_the_free_entries():
    part, free, fill = bc.restrict(some_entries, PARAMS, {"w": MASK, "block": None})
    assert {name: tuple(x.shape) for name, x in free.items()} == {"w": (3,), "block.b": (4,)}
    moved = {"w": torch.tensor([5.0, 6.0, 7.0], dtype=torch.float64), "block.b": 2 * free["block.b"]}
    want = {"w": torch.tensor([[5.0, 0, 0], [0, 6.0, 7.0]], dtype=torch.float64), "block.b": 2 * PARAMS["block.b"]}
    assert all(torch.equal(fill(moved)[name], want[name]) for name in want) and part(moved, None) == some_entries(
        want, None
    )
    gradient = torch.func.grad(some_entries)(want, None)
    found = torch.func.grad(part)(moved, None)
    assert torch.equal(found["w"], gradient["w"][MASK]) and torch.equal(found["block.b"], gradient["block.b"])


@pytest.mark.parametrize("run", ["plain", "parallel", "captured"])
def test_a_chain_of_free_entries_is_the_chain_of_a_smaller_model(run):
    """Bit for bit, alone, of several at once and captured: neither noise nor state knows of the entries that stay."""
    part, free, fill = bc.restrict(some_entries, PARAMS, {"w": MASK})

    curvature, stays = A[MASK.reshape(-1)], A[~MASK.reshape(-1)].sum() / 2 + 4.0

    def small(params, batch):
        return (curvature * (params["w"] - 1.0) ** 2).sum() / 2 + stays

    def end(of):
        tx = bc.sghmc(0.1, temperature=0.1, generator=torch.Generator().manual_seed(3))
        step, params = bc.make_step(of, tx), free
        if run == "parallel":
            step, params = bc.parallel(step, 2), bc.stack([free, free])
            state = step.init(bc.sghmc(0.1, temperature=0.1), params, seed=1)
        else:
            state = tx.init(params)
        assert max(x.numel() for x in torch.utils._pytree.tree_leaves(state)) == 3 * (1 + (run == "parallel"))
        if run == "captured":
            step = bc.capture(step, params, state, None, backend="eager")
        for _ in range(20):
            params, state, _ = step(params, state, None)
        return params["w"].clone()

    assert torch.allclose(end(part), end(small), rtol=0, atol=1e-15)
    if run == "plain":
        assert torch.equal(fill({"w": end(part)})["w"][~MASK], torch.zeros(3, dtype=torch.float64))


def masked(share):
    return lambda w, batch: torch.nn.functional.dropout(w, share).square().sum()


def beyond(lr, momentum):
    """At the centre of a quartic with a weak spring there is nearly no curvature; where the chains go 3 x^2 exceeds 2 / lr."""
    about = {"temperature": 1.0, "strength": 0.1, "lr": lr, "momentum": momentum, "steps": 500, "burn_in": 100}
    return bc.observe(quartic, torch.zeros(40, dtype=torch.float64), None, **about).llc()


CHANGES = [
    (
        {"batches": DataLoader(TensorDataset(X, Y), 10)},
        TypeError,
        "DataLoader come in one order.*tuple\\(map\\(torch.cat, zip\\(\\*batches\\)\\)\\)",
    ),
    ({"batches": [X, Y]}, TypeError, "batches of list .*in one batch as a tuple"),
    ({"covariances": [("probe", "trains")]}, ValueError, "'trains' is no name"),
    ({"of": {"loss": loss}, "covariances": []}, ValueError, "'loss' is no name"),
    ({"steps": 200}, ValueError, "ends before the first draw"),
    ({"at_once": 3}, ValueError, "at_once=3 does not divide chains=8"),
    ({"temperature": 0.0}, ValueError, "temperature must be"),
    ({"capture": "yes"}, TypeError, "capture must be"),
    ({"where": {"v": None}}, ValueError, "no parameter is called 'v'"),
    ({"batches": (X * torch.nan, Y)}, ValueError, "loss at params is nan: look for NaN"),
    ({"of": {"a": lambda w: 3.0}, "covariances": []}, TypeError, r"of\['a'\], at params, must be a tensor"),
    ({"of": {"a": lambda w: w["w"] / 0}, "covariances": []}, ValueError, "of finite numbers"),
    ({"of": {"a": read}, "covariances": []}, ValueError, "vmap refuses .*pass at_once=1"),
    ({"steps": 10**7}, ValueError, "85 entries .* more than 256 MiB a chain; take thinning=26 or more"),
]
WHERE = [
    ({"v": None}, ValueError, "no parameter is called 'v'.*there are block.b, w"),
    ({"blo": None}, ValueError, "nor begins with it and a dot"),
    ({"w": MASK[0]}, ValueError, r"mask of w has the shape \[3\], and the parameter \[2, 3\]"),
    ({"w": torch.zeros(2, 3, dtype=torch.bool)}, ValueError, "no entry free"),
    ({"w": MASK.float()}, ValueError, "masks of dtype bool"),
    (MASK, TypeError, "where must be a dictionary"),
]


@pytest.mark.filterwarnings("ignore:sample")
@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        *((lambda change=change: measured(**change), error, said) for change, error, said in CHANGES),
        *((lambda at=at: bc.restrict(some_entries, PARAMS, at), error, said) for at, error, said in WHERE),
        (lambda: beyond(0.2, 0.0), ValueError, "limit where|ended|too hot"),
        (lambda: beyond(1e3, 0.9), ValueError, "at the start"),
        (  # 25 draws, of which no four blocks can be made
            lambda: measured(of=None, chains=1, steps=225).llc(),
            ValueError,
            "refused: 25 draws of one chain are too few to tell an error; run longer",
        ),
        (  # a virial of 2.2 +- 1.2 of 1
            lambda: bc.observe(
                lambda w, b: (w - b).square().mean() / 2,
                torch.randn(120, generator=torch.Generator().manual_seed(0)).mean(),
                bc.epochs(torch.randn(120, generator=torch.Generator().manual_seed(0)), 20),
                temperature=1 / 120,
                steps=1000,
                burn_in=300,
                chains=2,
            ).llc(),
            ValueError,
            "refused: too hot, or too short to tell it from chance",
        ),
        *(  # though most masks are alike
            (
                lambda share=share: bc.observe(masked(share), torch.ones(9), None, temperature=0.1),
                ValueError,
                "draws random numbers .it is .* and .* at the same parameters and batch.; put dropout",
            )
            for share in (0.5, 0.01)
        ),
        (
            lambda: bc.observe(lambda w, b: w.square().sum(), torch.zeros(2), None),
            ValueError,
            "number of data is not known from the batches; give temperature=",
        ),
        (
            lambda: bc.observe(
                quartic, torch.zeros(2), None, {"w": torch.Tensor.clone}, temperature=0.1, steps=40, burn_in=2
            ).bif("w", "w"),
            ValueError,
            "bif: the number of training data is not known",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(call, error, said):
    with pytest.raises(error, match=said):
        call()


def test_the_longer_of_two_names_holds_and_a_tensor_is_called_parameters():
    tree = {"a": {"w": torch.zeros(2), "v": torch.zeros(3)}}
    _, free, _ = bc.restrict(lambda p, b: 0.0, tree, {"a": None, "a.v": torch.tensor([True, False, False])})
    assert {name: len(x) for name, x in free.items()} == {"a.v": 1, "a.w": 2}
    part, free, fill = bc.restrict(lambda p, b: p.sum(), torch.ones(2), {"parameters": torch.tensor([True, False])})
    assert part({"parameters": torch.tensor([4.0])}, None) == 5.0 and fill(free).tolist() == [1.0, 1.0]
