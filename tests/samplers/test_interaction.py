"""Replica exchange, contour SGLD and SVGD: their exchanges, weights and forces, and what they sample."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bayesopt_chain as bc
from bayesopt_chain.core.op import PURE
from bayesopt_chain.random import stream as keyed_stream
from tests.samplers.transfer import Potential, target_moment
from tests.walk import end_of

WELLS = Potential(lambda x: (x**2 - 1) ** 2 + 0.25 * x, lambda x: 4 * x * (x**2 - 1) + 0.25)


TEMPERATURES = torch.tensor([0.3, 1.0, 2.5], dtype=torch.float64)


def replica_rule(**kwargs):
    return bc.samplers.replica_exchange(0.01, temperatures=TEMPERATURES.tolist(), **kwargs).links[0]


def test_swaps_keep_the_joint_law_of_true_losses():
    """Detailed balance, exactly: ``pi(l_i, l_j) min(1, S) = pi(l_j, l_i) min(1, 1 / S)`` on a grid of losses."""
    rule = replica_rule()
    for a in (0.1, 0.7, 2.0):
        for b in (0.2, 1.5):
            there = rule.log_acceptance(torch.tensor([a, b, b], dtype=torch.float64), TEMPERATURES)[0].exp()
            back = rule.log_acceptance(torch.tensor([b, a, a], dtype=torch.float64), TEMPERATURES)[0].exp()
            weight = math.exp((b - a) / 0.3 + (a - b) / 1.0)
            assert weight * there.clamp(max=1).item() == pytest.approx(back.clamp(max=1).item(), rel=1e-12)


def test_the_correction_makes_noisy_losses_unbiased():
    """Gauss-Hermite over both losses' errors: the expected exponential is the true one, with the correction only."""
    s = 0.2
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = weights / weights.sum()
    true = replica_rule().log_acceptance(torch.tensor([0.5, 0.8, 0.1]).double(), TEMPERATURES)[0].exp().item()
    for variance, unbiased in ((s * s, True), (0.0, False)):
        rule = replica_rule(loss_variance=variance)
        noisy = sum(
            w1
            * w2
            * rule.log_acceptance(torch.tensor([0.5 + s * z1, 0.8 + s * z2, 0.1]).double(), TEMPERATURES)[0]
            .exp()
            .item()
            for z1, w1 in zip(nodes, weights)
            for z2, w2 in zip(nodes, weights)
            if w1 * w2 > 1e-14
        )
        assert (noisy == pytest.approx(true, rel=1e-6)) == unbiased


def test_pairs_take_turns_and_only_swap_when_due():
    tx = bc.samplers.replica_exchange(1e-8, temperatures=(0.3, 1.0, 2.5), swap_every=2)
    p = torch.tensor([0.0, 1.0, 2.0]).double()
    state = tx.init(p)
    losses = torch.tensor([1e6, 1e3, 0.0]).double()  # the hotter chain is always better: every proposal is accepted
    seen = []
    for _ in range(9):
        updates, state = tx.update(torch.zeros(3).double(), state, params=p, loss=losses, inplace=False)
        seen.append((updates.abs() > 0.5).tolist())
    no, odd, even = [False] * 3, [False, True, True], [True, True, False]
    assert seen == [no, no, odd, no, even, no, odd, no, even]
    assert state[0].accepted.tolist() == state[0].proposed.tolist() == [2, 2]


@pytest.mark.parametrize("uniform", [0.599, 0.601])
def test_a_swap_exchanges_positions_with_its_probability_and_brings_velocities_to_temperature(uniform):
    """The probability is ``exp((1 - 1 / 4) (l_0 - l_1)) = 0.6``."""
    tx = bc.samplers.replica_exchange(0.1, 0.5, temperatures=(1.0, 4.0))
    p = torch.tensor([[0.0, 0.0], [1.0, 3.0]]).double()
    state = tx.init(p)
    losses = torch.tensor([math.log(0.6) / 0.75, 0.0]).double()
    v = torch.tensor([[1.0, 2.0], [5.0, 7.0]]).double()
    state = state.replace(0, state[0]._replace(velocity=(v,), step=torch.tensor(2)))

    def drawn(key, step, elements, dtype, kind):
        return [torch.full((n,), uniform if kind == "uniform" else 0.0, dtype=dtype) for n in elements.sizes]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keyed_stream, "draw_elements", drawn)
        updates, after = tx.update(torch.zeros(2, 2).double(), state, params=p, loss=losses, inplace=False)
    swapped = uniform < 0.6
    want = 0.5 * (torch.stack([v[1] / 2, v[0] * 2]) if swapped else v)
    torch.testing.assert_close(after[0].velocity[0], want)
    torch.testing.assert_close(p + updates, (p.flip(0) if swapped else p) - 0.1 * want)
    assert after[0].accepted.item() == swapped and after[0].proposed.item() == 1


def test_contour_weights_and_multiplier_are_the_papers():
    tx = bc.samplers.scale_by_contour(0.5, 0.0, 4.0, bins=4, zeta=0.8, omega=bc.schedules.constant(0.1))
    state = tx.init(torch.zeros(1).double())
    mass = torch.tensor([0.4, 0.3, 0.2, 0.1]).double()
    state = state.replace(0, state[0]._replace(mass=mass, lowest=torch.tensor(0)))
    updates, after = tx.update(torch.ones(1).double(), state, loss=torch.tensor(2.5).double(), inplace=False)
    assert updates.item() == pytest.approx(1 + 0.8 * 0.5 * math.log(0.2 / 0.3) / 1.0)
    hit = torch.tensor([0.0, 0.0, 1.0, 0.0]).double()
    torch.testing.assert_close(after[0].mass, mass + 0.1 * 0.2**0.8 * (hit - mass))
    lowest, _ = tx.update(torch.ones(1).double(), state, loss=torch.tensor(-3.0).double(), inplace=False)
    assert lowest.item() == 1.0


@given(place=st.floats(0.0, 7.0), lowest=st.sampled_from([0, 2, 5]), temperature=st.floats(0.1, 2.0))
def test_the_contour_weight_is_the_inverse_of_what_the_force_flattens_by(place, lowest, temperature):
    """The force is the gradient of ``L + T log weight``, so that flattened density times weight is ``exp(-L / T)``."""
    tx = bc.samplers.scale_by_contour(temperature, -0.5, 4.5, bins=10, zeta=0.8)
    place += lowest * 0.5 - 0.5
    x = torch.tensor(place + 1e-3, dtype=torch.float64)
    mass = torch.tensor([1, 2, 9, 3, 5, 4, 8, 1, 2, 6], dtype=torch.float64).softmax(0)
    state = tx.init(x)
    state = state.replace(0, state[0]._replace(mass=mass, lowest=torch.tensor(lowest)))
    force, _ = tx.update(torch.ones_like(x), state, params=x, loss=x, inplace=False)  # L(x) = x
    energy = lambda x: x + temperature * bc.samplers.contour_weight(tx, state, x).log()  # noqa: E731
    assert force.item() == pytest.approx(torch.func.grad(energy)(x).item(), rel=1e-9)


def test_the_contour_weight_is_continuous_across_the_bins_and_beyond_the_range():
    tx = bc.samplers.scale_by_contour(1.0, 0.0, 4.0, bins=4)
    state = tx.init(torch.zeros(1))
    mass = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64)
    state = state.replace(0, state[0]._replace(mass=mass, lowest=torch.tensor(1)))
    losses = torch.linspace(0.0, 6.0, 60001, dtype=torch.float64)
    weights = torch.vmap(lambda loss: bc.samplers.contour_weight(tx, state, loss))(losses)
    assert weights.diff().abs().max() < 1e-4
    assert weights[0] == weights[10000]  # up to the lowest bin that was visited


HARMONIC = Potential(lambda x: x**2 / 2, lambda x: x)


def learned(tx, potential, rounds=400):
    """The grid, the contour link's state after it learned from the law that it flattens to, and that law on the grid.

    Where the masses change slowly the chain has the law ``exp(-U / T) / weight``; the link's own update is averaged over it.
    """
    link = tx.links[0]
    ends = 4.0 if potential is HARMONIC else 2.4  # where exp(-U / T) is below 1e-6
    grid = torch.linspace(-ends, ends, 801, dtype=torch.float64)
    losses = potential.value(grid)
    state = tx.init(grid[0])[0]

    def law(state):
        weights = torch.vmap(lambda loss: link.log_psi(loss, state))(losses) * link.zeta
        return (-losses / link.temperature - weights).softmax(0)

    def visit(state, loss):
        context = SimpleNamespace(extra={"loss": loss})
        return link.update([torch.zeros((), dtype=torch.float64)], state, PURE, context)[1]

    for _ in range(rounds):
        seen = torch.vmap(visit, in_dims=(None, 0))(state, losses)
        lowest = seen.lowest[law(state) > 1e-6].min()
        state = state._replace(mass=(law(state)[:, None] * seen.mass).sum(0), lowest=lowest)
    return grid, state, law(state)


CONTOURS = {  # potential, temperature, low, high, bins; the range of the second begins below the smallest loss
    "wells": (WELLS, 0.2, 0.0, 3.0, 30),
    "a range that begins below the smallest loss": (HARMONIC, 0.5, -0.2, 4.8, 25),
}


@pytest.mark.parametrize("name", CONTOURS)
def test_contour_learns_a_flat_histogram_of_the_loss_whose_weights_give_the_target_back(name):
    """By quadrature: occupation of the bins, barrier, and weighted moments under the law that the link learned."""
    potential, temperature, low, high, bins = CONTOURS[name]
    omega = bc.schedules.constant(0.2)
    tx = bc.samplers.scale_by_contour(temperature, low, high, bins=bins, zeta=0.75, omega=omega)
    grid, state, law = learned(tx, potential)
    weight = torch.vmap(lambda loss: bc.samplers.contour_weight(tx, (state,), loss))(potential.value(grid))
    second = (law * weight * grid**2).sum() / (law * weight).sum()
    assert second.item() == pytest.approx(target_moment(potential, temperature), rel=1e-3)
    plain = (-potential.value(grid) / temperature).softmax(0)
    bin_of = torch.vmap(tx.links[0].bin)(potential.value(grid))
    occupied = torch.zeros(2, bins, dtype=torch.float64).index_add_(1, bin_of, torch.stack([law, plain]))
    seen = occupied[1] > 1e-3  # those whose mass is learned
    flat, peaked = (rows[seen].max() / rows[seen].min() for rows in occupied)
    assert flat < 0.2 * peaked
    energies = [(x * potential.value(grid)).sum() / x.sum() for x in (law, law * weight)]
    assert energies[0] - energies[1] > temperature  # without weights it is another law


def test_svgd_behind_weight_decay_settles_at_the_posterior_with_that_prior():
    """On a Gaussian of precision 1 with decay 1 the particles have the variance that they have for precision 2."""
    start = torch.linspace(-2.0, 2.0, 30, dtype=torch.float64).unsqueeze(1)

    def settled(tx, precision):
        return end_of(tx, start, lambda x: precision * x, 400)[0].var().item()

    decayed = settled(bc.chain(bc.links.add_decayed_weights(1.0), bc.samplers.svgd(0.3, temperature=1.0)), 1.0)
    assert decayed == pytest.approx(settled(bc.samplers.svgd(0.3, temperature=1.0), 2.0), rel=1e-9)


def stein_direction(x, g, temperature: float, h: float):
    """The Stein force from the kernel's own gradient by autograd, particle by particle."""
    n = len(x)

    def kernel(a, b):
        return torch.exp(-((a - b) ** 2).sum() / (2 * h * h))

    out = torch.zeros_like(x)
    for i in range(n):
        for j in range(n):
            out[i] += kernel(x[j], x[i]) * g[j] - temperature * torch.func.grad(kernel)(x[j], x[i])
    return out / n


def test_the_stein_force_is_its_definition():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    g = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    params, grads = {"a": x[:, :1], "b": x[:, 1:].reshape(6, 2, 2)}, {"a": g[:, :1], "b": g[:, 1:].reshape(6, 2, 2)}
    for temperature in (0.0, 0.7):
        tx = bc.samplers.scale_by_stein_kernel(temperature, bandwidth=1.3)
        got, _ = tx.update(grads, tx.init(params), params=params, inplace=False)
        flat = torch.cat([got["a"], got["b"].reshape(6, 4)], dim=1)
        torch.testing.assert_close(flat, stein_direction(x, g, temperature, 1.3))


def test_the_median_rule_is_the_median_over_pairs():
    x = torch.tensor([[0.0], [1.0], [3.0]]).double()  # squared distances 1, 4, 9
    tx = bc.samplers.scale_by_stein_kernel(0.7)
    got, _ = tx.update(x.clone(), tx.init(x), params=x, inplace=False)
    torch.testing.assert_close(got, stein_direction(x, x, 0.7, (4 / (2 * math.log(4))) ** 0.5))
