"""Kinetic and configurational temperature: exactly the one asked for at every stable learning rate, and what heats them."""

import warnings

import optree
import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.diagnostics.temperatures import _levels, _white, gains, names_of
from bayesopt_chain.testing import NormalProbe
from tests.diagnostics.oracle import lyapunov

LR, T = 0.1, 0.7
P = {"a": torch.tensor([0.3, 2.0], dtype=torch.float64), "b": torch.tensor([1.5], dtype=torch.float64)}
DIAL = torch.tensor(T, dtype=torch.float64)
CHAINS = {
    "sgld": lambda t: bc.sgld(LR, temperature=t),
    "momentum": lambda t: bc.sghmc(LR, 0.9, temperature=t),
    "little momentum": lambda t: bc.sghmc(LR, 0.01, temperature=t),
    "dampened": lambda t: bc.sgd(LR, momentum=0.9, dampening=0.3, temperature=t),
    "nesterov": lambda t: bc.sgd(LR, momentum=0.9, nesterov=True, temperature=t),
    "two momenta": lambda t: bc.chain(bc.add_momentum(0.5), bc.add_momentum(0.1), bc.sgd(LR, temperature=t)),
    "schedule": lambda t: bc.sghmc(lambda count: LR + 0.0 * count, 0.8, temperature=t),
    "nesterov, schedule": lambda t: bc.sgd(lambda n: LR + 0.0 * n, momentum=0.9, nesterov=True, temperature=t),
    "lr before momentum": lambda t: bc.chain(bc.scale_by_neg_lr(LR), bc.add_momentum(0.9), bc.inject_langevin_noise(t)),
    "preconditioned": lambda t: bc.chain(bc.scale_by_preconditioner(P), bc.sghmc(LR, 0.9, temperature=t)),
    "adam, frozen": lambda t: bc.adam(LR, temperature=t, freeze_after=2, eps=1.0),
    "rms, frozen": lambda t: bc.rmsprop(LR, temperature=t, freeze_after=2, eps=1.0, momentum=0.9),
    "decoupled decay": lambda t: bc.chain(
        bc.add_momentum(0.9), bc.links.add_decayed_weights(0.5), bc.inject_langevin_noise(t), bc.scale_by_neg_lr(LR)
    ),
}
CURVATURES = {
    "flat": torch.tensor([[0.02, 0.01, 0.0], [0.01, 0.05, 0.0], [0.0, 0.0, 0.01]], dtype=torch.float64),
    "medium": torch.tensor([[2.0, 0.7, 0.1], [0.7, 1.0, 0.3], [0.1, 0.3, 0.5]], dtype=torch.float64),
    "steep": torch.tensor([[6.0, 1.0, 0.5], [1.0, 4.0, 0.2], [0.5, 0.2, 9.0]], dtype=torch.float64),
}


def tree(theta):
    return {"a": theta[:2], "b": theta[2:]}


def flat(x):
    return torch.cat([x["a"], x["b"]])


def settled(tx):
    """A state behind the first steps, in which preconditioners are frozen and the biases of averages gone."""
    params = tree(torch.zeros(3, dtype=torch.float64))
    state = tx.init(params)
    g = tree(torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64))
    with NormalProbe():
        for _ in range(3):
            _, state = tx.update(g, state, params=params, inplace=False)
    return optree.tree_map(lambda t: t if t.is_floating_point() else t + 100_000, state)


def moments(tx, state, K, *, batch_noise=0.0):
    """Stationary covariance of the parameters, the moves and the moving tensors of the next state, on curvature ``K``."""
    entries, spec = optree.tree_flatten(state)
    moving = [i for i, t in enumerate(entries) if t.is_floating_point() and t.numel()]
    sizes = [3, *(entries[i].numel() for i in moving)]

    def advance(x, xi, noise):
        now, parts = list(entries), x.split(sizes)
        for i, part in zip(moving, parts[1:]):
            now[i] = part.reshape(entries[i].shape)
        theta = parts[0]
        with NormalProbe(xi) as probe:
            g = tree(K @ theta + noise)
            u, new = tx.update(g, optree.tree_unflatten(spec, now), params=tree(theta), inplace=False)
        after = [optree.tree_leaves(new)[i].reshape(-1) for i in moving]
        return torch.cat([theta + flat(u), *after]), torch.cat([flat(u), *after]), probe.drawn

    n, still = sum(sizes), torch.zeros(3, dtype=torch.float64)
    base = torch.cat([torch.zeros(3, dtype=torch.float64), *(entries[i].reshape(-1) for i in moving)])
    x0, y0, drawn = advance(base, None, still)
    eye = torch.eye(n, dtype=torch.float64)
    columns = [advance(base + e, None, still) for e in eye]
    draws = [advance(base, e, still) for e in torch.eye(drawn, dtype=torch.float64)]
    draws += [advance(base, None, batch_noise**0.5 * e) for e in torch.eye(3, dtype=torch.float64) if batch_noise]
    A, R = (torch.stack([c[k] - (x0, y0)[k] for c in columns], 1) for k in (0, 1))
    B, S = (torch.stack([c[k] - (x0, y0)[k] for c in draws], 1) for k in (0, 1))
    reached = (B != 0).any(1)
    for _ in range(n):
        reached |= (A[:, reached] != 0).any(1)
    keep = reached.nonzero().squeeze(1)
    X = lyapunov(A[keep][:, keep], B[keep] @ B[keep].T)
    place = {int(i): k for k, i in enumerate(keep)}
    theta = X[[place[i] for i in range(3)]][:, [place[i] for i in range(3)]]
    return theta, R[:, keep] @ X @ R[:, keep].T + S @ S.T


def readings(tx, K, **noise):
    """Kinetic (uncorrected) and configurational temperature over ``T`` of each element."""
    state = settled(tx)
    theta, after = moments(tx, state, K, **noise)
    scale = flat(optree.tree_unflatten(optree.tree_structure(P), gains(tx, tree(torch.zeros(3)), state)))
    return after.diagonal()[:3] / scale / T, (K @ theta).diagonal() / T


@pytest.mark.sweep(9)
@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("dial", [T, DIAL], ids=["number", "tensor"])
@pytest.mark.parametrize("chain", CHAINS)
def test_both_temperatures_are_exactly_the_one_asked_for(chain, dial, curvature):
    K = CURVATURES[curvature]
    kinetic, configurational = readings(CHAINS[chain](dial), K)
    ones = torch.ones(3, dtype=torch.float64)
    torch.testing.assert_close(kinetic, ones, rtol=0, atol=1e-10)
    if chain != "decoupled decay":  # its prior is no part of K
        torch.testing.assert_close(configurational, ones, rtol=0, atol=1e-10)


@pytest.mark.parametrize("curvature", CURVATURES)
def test_the_buffers_read_the_same(curvature):
    """The formulas in the velocity: ``q`` that carries half the noise, a plain ``v``, Adam's ``m P m``."""
    K, mu = CURVATURES[curvature], 0.9
    _, carried = moments(tx := bc.sghmc(LR, mu, temperature=T), settled(tx), K)
    _, plain = moments(tx := bc.sghmc(LR, mu, temperature=DIAL), settled(tx), K)
    tx = CHAINS["adam, frozen"](T)
    state = settled(tx)
    _, adam = moments(tx, state, K)
    (index,) = [i for i, kind in enumerate(state.layout.kinds) if kind == "ScaleByAdam"]
    P = 1 / torch.cat([(n / (1 - pow(0.999, torch.tensor(2)))).sqrt() + 1.0 for n in state[index].nu])
    ones = torch.ones(3, dtype=torch.float64)
    torch.testing.assert_close(2 * LR * mu**2 * carried.diagonal()[3:6] / (1 + mu) / T, ones, rtol=0, atol=1e-10)
    torch.testing.assert_close(LR * plain.diagonal()[3:6] / T, ones, rtol=0, atol=1e-10)
    torch.testing.assert_close(LR * adam.diagonal()[3:6] * P / (1 - 0.9) / T, ones, rtol=0, atol=1e-10)


def test_nesterovs_velocity_alone_does_not_read_it():
    """Why Nesterov is read by its displacement: ``lr <v^2> / T`` runs from 1.3 to 0.4 with the curvature."""
    tx = CHAINS["nesterov"](T)
    read = [
        float(LR * moments(tx, settled(tx), k * torch.eye(3, dtype=torch.float64))[1].diagonal()[3] / T)
        for k in (0.1, 8)
    ]
    assert read[0] > 1.3 and read[1] < 0.5


@pytest.mark.parametrize("mu, nesterov", [(0.0, False), (0.5, False), (0.9, False), (0.5, True), (0.9, True)])
def test_first_order_noise_reads_the_white_share_as_the_curvature_vanishes(mu, nesterov):
    build = bc.chain(
        bc.add_momentum(mu, nesterov=nesterov), bc.inject_langevin_noise(T, order=1), bc.scale_by_neg_lr(LR)
    )
    state = settled(build)
    share = -_white(build, state)[0]
    assert nesterov or share == pytest.approx(2 / (1 + mu))
    errors = [float(readings(build, k * torch.eye(3, dtype=torch.float64))[0][0]) / share - 1 for k in (1e-3, 1e-4)]
    assert abs(errors[1]) < 1e-3 and errors[1] == pytest.approx(errors[0] / 10, rel=0.1, abs=1e-9)


@pytest.mark.parametrize("chain", ["sgld", "momentum", "dampened", "nesterov", "adam, frozen"])
def test_batch_noise_reads_the_share_of_the_budget_that_it_spends(chain):
    """``(ratio - 1) / w`` is ``rho = B F(1) / 2T``, but for terms of order ``lr * curvature``."""
    tx, B = CHAINS[chain](T), 0.2
    state = settled(tx)
    kinetic, _ = readings(tx, 1e-5 * torch.eye(3, dtype=torch.float64), batch_noise=B)
    whole = {"sgld": 1, "momentum": 10, "dampened": 7, "nesterov": 10, "adam, frozen": None}[chain]
    first = flat(optree.tree_unflatten(optree.tree_structure(P), gains(tx, tree(torch.zeros(3)), state)))
    total = LR * whole * torch.ones(3, dtype=torch.float64) if whole else first / (1 - 0.9)
    torch.testing.assert_close((kinetic - 1) / _white(tx, state)[0], B * total / 2 / T, rtol=1e-3, atol=0)


def quadratic(w, batch):
    return (w["a"].square() * torch.tensor([0.5, 2.0])[:, None]).sum() / 2 + w["b"].square().sum() / 2


def run(tx, *, loss=quadratic, inplace=False, chains=None, steps=500, batches=None, n=400, meter=None, **how):
    """A run of 3 n parameters in two leaves, its draws and thermometer."""
    params = {"a": torch.zeros(2, n), "b": torch.zeros(n)}
    step = bc.make_step(loss, tx, inplace=inplace)
    meter = meter or bc.diagnostics.Thermometer(tx)
    if chains:
        step = bc.parallel(step, chains)
        params = bc.stack([params] * chains)
        state = step.init(tx, params)
    else:
        state = tx.init(params)
    draws = bc.sample(step, params, state, batches, steps=steps, burn_in=150, thinning=4, callbacks=[meter], **how)
    return draws, meter


def cycles(count):
    return 0.05 + 0.1 * (1 + torch.cos(count.double() * torch.pi / 250))


RUNS = {
    "sgld": (lambda: bc.sgld(LR, temperature=T), {}),
    "momentum, in place": (lambda: bc.sghmc(LR, temperature=T), {"inplace": True}),
    "nesterov": (lambda: bc.sgd(LR, momentum=0.9, nesterov=True, temperature=T), {}),
    "slow schedule": (lambda: bc.sghmc(cycles, 0.8, temperature=T), {}),
    "parallel": (lambda: bc.sghmc(LR, temperature=T), {"chains": 2}),
    "skip_nonfinite": (lambda: bc.skip_nonfinite(bc.sghmc(LR, temperature=T)), {}),
    "adam, frozen": (lambda: bc.adam(LR, temperature=T, freeze_after=100, eps=1.0), {}),
    "decay": (lambda: bc.sgd(LR, momentum=0.9, weight_decay=0.5, temperature=T), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_a_thermometer_reads_one_on_a_run(kind):
    """Both temperatures within 5 standard errors of 1, the kinetic ones known to 2 %; two-sided false alarms below 1e-4."""
    torch.manual_seed(0)
    build, how = RUNS[kind]
    tx = build()
    draws, meter = run(tx, **how)
    report = bc.diagnostics.temperatures(draws, tx, quadratic, [None], thermometer=meter)
    assert set(report.kinetic) == set(report.configurational) == {"a", "b"} and "a" in str(report)
    for e in report.kinetic.values():
        assert abs(e.value - 1) < 5 * e.standard_error + 0.005 and e.standard_error < 0.02
    for e in report.configurational.values():
        assert abs(e.value - 1) < 5 * e.standard_error and e.standard_error < 0.05


def test_leaves_without_noise_have_no_temperature():
    torch.manual_seed(0)
    tx = bc.partition({True: bc.sghmc(LR, temperature=T), False: bc.sgd(LR)}, {"a": True, "b": False})
    _, meter = run(tx, steps=200)
    assert set(meter.estimates) == {"a"}


def noisy(w, batch):
    """Batch noise of variance 25 in every gradient."""
    return quadratic(w, None) + 5.0 * ((w["b"] * torch.randn(400)).sum() + (w["a"] * torch.randn(2, 400)).sum())


@pytest.mark.slow
def test_a_run_that_the_data_heat_warns_once_and_says_where():
    """``rho = 25 * 0.02 / (2 * 0.7 * 0.1)`` = 3.57 with lr 0.002 and momentum 0.9."""
    torch.manual_seed(0)
    tx = bc.sghmc(0.002, temperature=T)
    with pytest.warns(UserWarning, match="the data heat the chain: the kinetic temperature of") as caught:
        _, meter = run(tx, loss=noisy, steps=400)
    assert len(caught) == 1
    assert meter.estimates["b"].value == pytest.approx(1 + 25 * 0.02 / (2 * T), abs=0.05)
    assert meter.postfix()["T"].startswith("1.3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(tx, steps=400)
        run(tx, loss=noisy, steps=400, meter=bc.diagnostics.Thermometer(tx, order="palindrome"))


@pytest.mark.slow
def test_what_the_loss_contributes_is_told_from_the_prior():
    torch.manual_seed(0)
    tx = bc.sgd(LR, momentum=0.9, weight_decay=0.5, temperature=T)
    draws, _ = run(tx, steps=1500)
    data = bc.diagnostics.temperatures(draws, tx, quadratic, [None]).data["b"]
    assert data.value == pytest.approx(1 / 1.5, abs=5 * data.standard_error)


class Mixing:
    """A precision that is not diagonal."""

    def solve(self, tree, /):
        return optree.tree_map(lambda x: x + x.mean(), tree)

    def sqrt_solve(self, tree, /):
        return optree.tree_map(lambda x: x + (2**0.5 - 1) * x.mean(), tree)


def test_what_has_no_kinetic_temperature_is_refused():
    with pytest.raises(TypeError, match="not a chain"):
        bc.diagnostics.Thermometer("sghmc")
    with pytest.raises(ValueError, match="no matched noise"):
        bc.diagnostics.Thermometer(bc.sgd(0.1))
    with pytest.raises(ValueError, match="no matched noise"):
        bc.diagnostics.Thermometer(bc.samplers.sgnht(0.1, temperature=1.0))
    with pytest.raises(ValueError, match="act on each other"):
        run(bc.chain(bc.scale_by_preconditioner(Mixing()), bc.sghmc(LR, temperature=T)), steps=200)
    with pytest.raises(ValueError, match="or thermometer="):
        bc.diagnostics.temperatures()
    tx = CHAINS["decoupled decay"](T)
    draws, _ = run(tx, steps=200)
    with pytest.raises(ValueError, match="stands behind a momentum"):
        bc.diagnostics.temperatures(draws, tx, quadratic, [None])


def test_levels_follow_a_schedule():
    tx = bc.sghmc(0.1, temperature=lambda n: 2.0 + 0 * n)
    w = torch.zeros(2)
    assert _levels(tx, tx.init(w), None) == {"tensor": 2.0}


def test_leaves_whose_names_would_be_one_are_called_by_their_paths():
    params = {"a": {"b": torch.zeros(5)}, "a/b": torch.zeros(5), "c": torch.zeros(5)}
    tx = bc.sgld(0.2, temperature=0.5)
    assert _levels(tx, tx.init(params), None) == {"['a']['b']": 0.5, "['a/b']": 0.5, "c": 0.5}
    assert names_of(("['layer']['weight']", "[0]", "")) == ("layer/weight", "0", "tensor")
