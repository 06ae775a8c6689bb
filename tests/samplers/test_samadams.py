"""SamAdams: the paper's steps, what its weighted draws sample, its limits, and where its weights go."""

import itertools
import math

import numpy as np
import pytest
import torch
import torchopt

import bayesopt_chain as bc
from bayesopt_chain.links.keyed import Keyed
from bayesopt_chain.testing import assert_bitwise_equal
from tests.refusals import refuse, refused
from tests.samplers.transfer import QUARTIC, Basis, gibbs_grid, target_moment
from tests.walk import walk

DOUBLE = torch.float64


def given_draws(monkeypatch, draws):
    """The link's normals are what the list gives, one entry a step."""
    waiting = list(draws)
    monkeypatch.setattr(Keyed, "normals", lambda self, state, g, context: [[x] for x in waiting.pop(0)])


def test_the_steps_are_the_papers(monkeypatch):
    """ZBAOABZ with a second gradient where the step ends, as it is published, against one gradient a step."""
    h, gamma, scale, m, M, alpha, T = 0.2, 0.7, 3.0, 0.2, 2.0, 1.5, 0.4
    xi = torch.randn(12, 5, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    given_draws(monkeypatch, [(x[:3], x[3:].reshape(2, 1)) for x in xi])
    tx = bc.samplers.samadams(h, gamma, temperature=T, gradient_scale=scale, slowest=m, fastest=M, alpha=alpha)
    x = torch.linspace(-1.0, 2.0, 5, dtype=DOUBLE)
    params = [x[:3], x[3:].reshape(2, 1)]
    state = tx.init(params)

    force = lambda x: -QUARTIC.gradient(x)  # noqa: E731
    psi = lambda zeta: (m * zeta * m + m * M) / (zeta * m + m)  # noqa: E731  of the paper, at its zeta' = m zeta
    Z = lambda zeta, x: r * zeta + (1 - r) * force(x).norm() / scale  # noqa: E731
    r, zeta = math.exp(-alpha * h / 2), force(x).norm() / scale
    p = h / 2 * psi(zeta) * force(x)  # the first kick is a whole one
    for n in range(12):
        weight = psi(zeta)
        zeta = Z(zeta, x)
        dt = h * psi(zeta)
        p = p + dt / 2 * force(x)
        x = x + dt / 2 * p
        p = math.exp(-gamma * dt) * p + torch.sqrt(T * (1 - torch.exp(-2 * gamma * dt))) * xi[n]
        x = x + dt / 2 * p
        p = p + dt / 2 * force(x)
        zeta = Z(zeta, x)
        grads = [QUARTIC.gradient(leaf) for leaf in params]
        updates, state = tx.update(grads, state, params=params, inplace=False)
        params = torchopt.apply_updates(params, updates, inplace=False)
        assert state[0].weight.item() == pytest.approx(weight.item(), rel=1e-12)
        torch.testing.assert_close(torch.cat([leaf.flatten() for leaf in params]), x, rtol=1e-12, atol=1e-12)


def stationary(h, f, monkeypatch, degree=14):
    """``E f`` of the link's own steps on the quartic, exactly: with weights, and without.

    With an infinite ``alpha`` position and velocity behind a whole step are a Markov chain. Galerkin's method in products of
    polynomials that are orthonormal for the target (:mod:`tests.samplers.transfer`); the noise by Gauss-Hermite quadrature.
    """
    tx = bc.samplers.samadams(h, 1.0, temperature=1.0, gradient_scale=1.0, slowest=0.5, fastest=1.5, alpha=math.inf)
    normal = np.linspace(-12.0, 12.0, 6001)
    of_x, of_p = Basis(*gibbs_grid(QUARTIC, 1.0), degree + 4), Basis(normal, np.exp(-(normal**2) / 2), degree + 4)
    both = [i for i in itertools.product(range(degree + 1), repeat=2) if sum(i) <= degree]
    x, p = (a.ravel() for a in np.meshgrid(of_x.nodes, of_p.nodes, indexing="ij"))
    w = np.outer(of_x.weights, of_p.weights).ravel()

    def phi(x, p):
        a, b = of_x(x, degree), of_p(p, degree)
        return np.stack([a[i] * b[j] for i, j in both])

    fresh, drawn = tx.init(torch.zeros((), dtype=DOUBLE)), {}
    monkeypatch.setattr(Keyed, "normals", lambda self, state, g, context: [[drawn["xi"]]])

    def step(x, p, xi):
        drawn["xi"] = xi
        whole = fresh[0]._replace(velocity=(p,), step=torch.tensor(1), elapsed=torch.zeros((), dtype=DOUBLE))
        updates, state = tx.update(QUARTIC.gradient(x), fresh.replace(0, whole), params=x, inplace=False)
        x = x + updates
        return x, state[0].velocity[0] - state[0].elapsed / 2 * QUARTIC.gradient(x), state[0].weight

    here, a = phi(x, p) * w, np.zeros((len(both), len(both)))
    for node, share in zip(*np.polynomial.hermite_e.hermegauss(9)):
        start = torch.as_tensor(x)
        after, velocity, weight = torch.vmap(step)(start, torch.as_tensor(p), torch.full_like(start, float(node)))
        a += share / math.sqrt(2 * math.pi) * here @ phi(after.numpy(), velocity.numpy()).T
    c = np.linalg.solve((a[1:, 1:] - np.eye(len(a) - 1)).T, -a[0, 1:])
    density, weight = np.concatenate([[1.0], c]) @ here, weight.numpy()
    return density @ (weight * f(x)) / (density @ weight), density @ f(x)


def test_weighted_draws_converge_to_the_target_with_second_order_and_draws_without_weights_do_not(monkeypatch):
    want, steps = target_moment(QUARTIC, 1.0), (0.1, 0.2, 0.3)
    found = [stationary(h, lambda x: x**2, monkeypatch) for h in steps]
    biases = [abs(weighted / want - 1) for weighted, _ in found]
    assert 1.9 < np.polyfit(np.log(steps), np.log(biases), 1)[0] < 2.1
    assert biases[0] < 0.003
    assert all(plain / want - 1 > 0.2 for _, plain in found)


def trajectory(tx, steps=30):
    params = [torch.linspace(-1.0, 2.0, 4, dtype=DOUBLE), torch.tensor(0.5, dtype=DOUBLE)]
    return [now for now, _ in walk(tx, params, lambda params: [QUARTIC.gradient(x) for x in params], steps)]


def test_at_temperature_zero_with_a_constant_clock_it_is_sgd_with_momentum():
    lr, momentum = bc.samplers.splitting_parameters(0.1, friction=1.0)
    still = bc.samplers.samadams(0.2, 1.0, temperature=0.0, gradient_scale=1.0, slowest=0.5, fastest=0.5)
    torch.testing.assert_close(trajectory(still), trajectory(torchopt.sgd(lr, momentum)), rtol=1e-12, atol=1e-12)


def loss(params, batch):
    return sum(QUARTIC.value(x).sum() for x in params.values())


def problem(temperature=0.5, **settings):
    settings = {"gradient_scale": 1.0, "slowest": 0.2, **settings}
    tx = bc.samplers.samadams(0.2, 1.0, temperature=temperature, **settings)
    return tx, {"a": torch.ones(2, dtype=DOUBLE), "b": torch.zeros((), dtype=DOUBLE)}


def test_make_step_parallel_and_capture_report_the_weight_of_where_the_step_started():
    tx, params = problem()
    for inplace in (False, True):
        step = bc.make_step(loss, tx, inplace=inplace)
        _, state, info = step({k: v.clone() for k, v in params.items()}, tx.init(params), ())
        assert info.weight.item() == pytest.approx(0.2 + 0.8 / (1 + 8**0.5))
        assert info.weight.item() == state[0].weight.item()
    step = bc.make_step(loss, tx)
    first, state = params, tx.init(params)
    captured = bc.capture(step, params, state, (), backend="eager", steps=3)
    *_, told = captured(params, state, ())
    for n in range(3):
        first, state, info = step(first, state, ())
        assert told.weight[n].item() == pytest.approx(info.weight.item())
    chains = bc.parallel(step, 2)
    two = bc.stack([params, {k: v + 0.1 for k, v in params.items()}])
    _, _, info = chains(two, chains.init(tx, two, seed=0), ())
    assert info.weight.shape == (2,) and info.weight[0] > info.weight[1]
    plain = bc.make_step(loss, bc.sghmc(0.1, temperature=0.5))
    assert plain(params, plain.init(params), ())[2].weight == ()


def test_a_step_that_is_left_out_counts_nothing():
    tx, params = problem()
    step = bc.make_step(lambda p, scale: scale * loss(p, ()), bc.skip_nonfinite(tx))
    state, weights = step.init(params), list[bool]()
    for scale in (1.0, math.nan, 1.0):
        params, state, info = step(params, state, torch.tensor(scale))
        weights.append(info.weight > 0)
    assert weights == [True, False, True]


def sampled(tmp_path=None, steps=40, n=None, **more):
    tx, params = problem()
    torch.manual_seed(0)
    step, state = bc.make_step(loss, tx), tx.init(params)
    if n is not None:
        step, params = bc.parallel(step, n), bc.stack([params] * n)
        state = step.init(tx, params, seed=0)
    return bc.sample(step, params, state, None, steps=steps, path=tmp_path, **more)


def test_draws_are_the_parameters_that_their_weights_and_losses_belong_to(tmp_path):
    tx, params = problem()
    torch.manual_seed(0)
    step, state, rows = bc.make_step(loss, tx), tx.init(params), []
    for _ in range(40):
        before = params
        params, state, info = step(params, state, ())
        rows.append((before["a"], info.weight, info.loss))
    a, weights, losses = (torch.stack(x) for x in zip(*rows))
    sampled(tmp_path / "run", steps=13)  # killed after 13 steps, and taken up again
    for draws in (sampled(), sampled(tmp_path / "run"), bc.Draws.open(tmp_path / "run")):
        assert draws.is_weighted
        assert_bitwise_equal((draws.params["a"], draws.weights, draws.loss), (a, weights, losses))
        assert_bitwise_equal(draws.thin(2).weights, weights[::2])
    assert_bitwise_equal(sampled(burn_in=10, thinning=3).weights, weights[12::3])


def test_equally_weighted_draws_count_every_draw_by_its_weight():
    draws = sampled(n=3, steps=150)
    same = draws.equally_weighted()
    assert len(same) == 150 and not same.is_weighted and same.equally_weighted() is same
    for chain in range(3):
        weights, a = draws.weights[:, chain], draws.params["a"][:, chain]
        counts = (same.params["a"][:, chain, None] == a[None]).all(-1).sum(0)  # no two draws are the same
        assert (counts - 150 * weights / weights.sum()).abs().max() < 1 + 1e-9
        assert ((same.loss[:, chain].diff() != 0).sum() + 1) == (counts > 0).sum()  # in their order
    forward = lambda p, batch: p["a"].square().sum().expand(len(batch))  # noqa: E731
    exact = (draws.weights * draws.params["a"].square().sum(-1)).sum() / draws.weights.sum()
    got = draws.predict(forward, [torch.zeros(2)])
    assert got[0].item() == pytest.approx(exact.item(), rel=0.05)
    assert bc.diagnostics.r_hat(same)["b"] > 0
    assert draws.stack_chains(sampled(steps=150)).weights.shape == (150, 4)


def test_what_counts_all_draws_the_same_refuses_weights():
    draws, (tx, params) = sampled(), problem()
    no_copies = bc.make_step(loss, tx, inplace=True)
    draws_wanted = r"draws must be Draws \(of a chain whose draws have weights draws\.equally_weighted"
    refuse(
        (
            (lambda: bc.diagnostics.r_hat(draws), TypeError, draws_wanted),
            (lambda: bc.diagnostics.ess(draws), TypeError, draws_wanted),
            (lambda: bc.diagnostics.ksd(draws, lambda p: p), TypeError, "equally_weighted"),
            (lambda: bc.diagnostics.doctor(draws), ValueError, r"doctor: these draws have weights.*equally_weighted"),
            (lambda: draws.to_arviz(), ValueError, r"to_arviz: these draws have weights"),
            (
                lambda: bc.sample(no_copies, params, tx.init(params), None, steps=3),
                ValueError,
                r"have weights.*make it with inplace=False",
            ),
        )
    )


def made(**more):
    return bc.samplers.samadams(0.1, 1.0, **{"temperature": 1.0, "gradient_scale": 1.0, **more})


TREE = {"a": torch.zeros(2), "b": torch.zeros(1)}
LEFT_OUT = r"samadams: a mask or a group leaves parameters out"
NEIGHBOURS = bc.links.scale(0.5), bc.add_momentum(0.5), bc.inject_langevin_noise(1.0)


test_what_cannot_share_one_clock_is_refused = refused(
    [
        (lambda: bc.partition({"x": made(), "y": bc.sgd(0.0)}, {"a": "x", "b": "y"}).init(TREE), LEFT_OUT),
        (
            lambda: bc.partition({"x": made(), "y": bc.sghmc(0.1, temperature=1.0)}, {"a": "x", "b": "y"}).init(TREE),
            LEFT_OUT,
        ),
        *((lambda link=link: bc.chain(link, made()).init(TREE), "samadams") for link in NEIGHBOURS),
        *((lambda link=link: bc.chain(made(), link).init(TREE), "samadams") for link in NEIGHBOURS),
        (
            lambda: bc.chain(made(temperature=0.0), bc.sghmc(0.1, temperature=1.0)).init(TREE),
            "samadams at temperature 0 is an optimizer",
        ),
        (lambda: made().update({"a": torch.ones(2), "b": None}, made().init(TREE), params=TREE), "gradient"),
        *(
            (
                lambda wrapped=wrapped: bc.optim.Optimizer(
                    [torch.zeros(2, requires_grad=True)], lambda group: wrapped(made())
                ),
                r"bc\.optim\.Optimizer: the draws of samadams.* have weights",
            )
            for wrapped in (bc.chain, bc.skip_nonfinite)
        ),
        (lambda: made(slowest=2.0), "slowest must not exceed fastest"),
    ]
)


def test_an_infinite_gradient_makes_the_shortest_step():
    """The monitor is infinite and the factor the least one; where the gradient is 0 it is the largest."""
    for size, factor in ((1e30, 0.1), (0.0, 1.0)):
        tx = bc.samplers.samadams(0.1, 1.0, temperature=1.0, gradient_scale=1.0)
        x = torch.zeros(2, dtype=torch.float32)
        _, state = tx.update(torch.full((2,), size), tx.init(x), params=x, inplace=False)
        assert state[0].elapsed.item() == pytest.approx(0.1 * factor)
