"""Impulses read off one update the linear system that it is, and leave everything that they read as it was."""

import copy

import optree
import pytest
import torch
from torchopt.base import GradientTransformation

import bayesopt_chain as bc
from bayesopt_chain.testing import LAWS, NormalProbe, Unstable, _laws, assert_bitwise_equal
from bayesopt_chain.testing._linear_system import OneUpdate, closed_loop
from bayesopt_chain.testing.fixtures import law  # noqa: F401

K = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
EYE = torch.eye(2, dtype=torch.float64)
ZEROS = torch.zeros(2, dtype=torch.float64)


def test_heavy_ball_is_read_as_its_textbook_matrix_and_columns_that_nothing_reaches_are_not_probed():
    tx = bc.chain(bc.add_momentum(0.9), bc.scale_by_neg_lr(0.1))
    loop = closed_loop(tx, K, ZEROS, varied=torch.ones(4, dtype=torch.bool))
    want = torch.cat([torch.cat([EYE - 0.1 * K, -0.09 * EYE], 1), torch.cat([K, 0.9 * EYE], 1)])
    torch.testing.assert_close(loop.A, want, rtol=0, atol=1e-14)
    assert loop.B.shape == (4, 0) and not closed_loop(tx, K, ZEROS).A.any()


def test_read_update_by_update_a_falling_rate_gives_the_covariance_that_the_recursion_gives():
    tx = bc.chain(bc.inject_langevin_noise(0.5, order=1), bc.scale_by_neg_lr(lambda n: 0.125 * 0.5 ** (n >= 3)))
    state, varied, X, want = tx.init(ZEROS), None, 0.0, torch.zeros(2, 2, dtype=torch.float64)
    for t in range(6):
        loop = closed_loop(tx, K, ZEROS, state, varied=varied)
        X = loop.A @ X @ loop.A.T + loop.B @ loop.B.T if t else loop.B @ loop.B.T
        state, varied = loop.next_state, loop.varies
        lr = 0.125 if t < 3 else 0.0625  # exact in float32, in which schedules are
        want = (EYE - lr * K) @ want @ (EYE - lr * K) + 2 * lr * 0.5 * EYE
        torch.testing.assert_close(X[:2, :2], want, rtol=1e-12, atol=0)


def test_a_float32_state_is_read_in_float64_and_stays_as_it_is():
    generator = torch.Generator().manual_seed(0)
    tx = bc.skip_nonfinite(bc.sghmc(0.1, 0.9, temperature=0.5, generator=generator))
    params = torch.zeros(3)
    state = tx.init(params)
    _, state = tx.update(torch.ones(3), state, params=params, inplace=False)
    before, drawn = copy.deepcopy(state), generator.get_state()
    one = OneUpdate(tx, params, state)
    assert all(t.dtype == torch.float64 for t in [*one.params, *one.numbers])
    assert_bitwise_equal(state, before)
    assert torch.equal(generator.get_state(), drawn)


@pytest.mark.parametrize(
    ("tx", "curvature", "options", "error", "words"),
    [
        (bc.rmsprop(0.1, temperature=1.0), EYE, {"warmup": 0}, ValueError, "not linear"),
        (bc.sgd(2.5, temperature=1.0), EYE, {}, Unstable, "spectral radius"),
        (bc.sgd(0.1, temperature=1.0), EYE, {"params": torch.zeros(3)}, ValueError, r"\[3, 3\] matrix"),
        (bc.sghmc(0.1, temperature=1.0), torch.ones(2, 3), {}, ValueError, r"\[2, 2\] matrix, got .*\(2, 3\)"),
        (bc.sghmc(0.1, temperature=1.0), torch.ones(2, 2).triu(), {}, ValueError, r"a symmetric \[2, 2\] matrix"),
    ],
    ids=["not linear", "unstable", "other parameters", "no square", "not symmetric"],
)
def test_what_is_not_linear_not_stable_or_no_matrix_is_refused(tx, curvature, options, error, words):
    with pytest.raises(error, match=words):
        bc.testing.stationary_covariance(tx, curvature, **options)


def test_a_chain_without_noise_samples_a_point():
    assert not bc.testing.stationary_covariance(bc.sgd(0.1, momentum=0.9), K).any()


def test_reading_a_chain_leaves_the_generator_of_its_noise_as_it_was():
    generator = torch.Generator().manual_seed(3)
    before, tx = generator.get_state(), bc.sghmc(0.1, temperature=0.5, generator=generator)
    bc.testing.stationary_covariance(tx, torch.eye(1, dtype=torch.float64))
    bc.testing.variance_along(tx, torch.eye(1, dtype=torch.float64), 1)
    assert torch.equal(generator.get_state(), before)


# The probe reads a user's own draws, whatever function makes them


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.empty(3).normal_(2.0, 0.5),
        lambda: torch.empty(3).normal_(mean=2.0, std=0.5),
        lambda: torch.normal(2.0, 0.5, (3,)),
        lambda: torch.normal(torch.full((3,), 2.0), 0.5),
        lambda: torch.normal(2.0, torch.full((3,), 0.5)),
        lambda: torch.normal(torch.full((3,), 2.0), torch.full((3,), 0.5)),
        lambda: 2.0 + 0.5 * torch.randn(3),
    ],
)
def test_mean_and_deviation_of_a_draw_are_the_callers(draw):
    with NormalProbe(torch.tensor([1.0, -1.0, 2.0])) as probe:
        x = draw()
    assert probe.drawn == 3
    torch.testing.assert_close(x, torch.tensor([2.5, 1.5, 3.0]))


def test_too_few_numbers_and_a_matrix_of_them_are_refused():
    with NormalProbe(torch.ones(2)), pytest.raises(RuntimeError, match=r"shape '\[3\]' is invalid for input of size 2"):
        torch.randn(3)
    with pytest.raises(TypeError, match=r"values must be numbers, a tensor \[n\]"):
        NormalProbe(torch.ones(2, 2))


@pytest.mark.parametrize(
    "draw", [torch.Tensor.uniform_, torch.Tensor.exponential_, torch.poisson, torch.bernoulli, torch.dropout]
)
def test_draws_that_are_not_normal_are_refused(draw):
    """Any operation that torch knows to draw, not those of a list: an exponential draw at its own value is no zero."""
    more = (0.5, True) if draw is torch.dropout else ()
    with NormalProbe(), pytest.raises(TypeError, match="not a normal; only Gaussian noise"):
        draw(torch.full((3,), 0.5), *more)


def test_a_link_that_cuts_half_of_the_graph_breaks_the_law_of_derivatives():
    def update(grads, state, *, params=None, inplace=True):
        return optree.tree_map(lambda g: g + g.detach(), grads), state

    with pytest.raises(AssertionError, match="some of its graph is cut"):
        _laws.updates_can_be_differentiated(lambda: GradientTransformation(lambda params: (), update))


# The fixture of the laws, as a user's own tests take it: one test a law, and a broken one fails by its name


pytest_plugins = ["pytester"]

BROKEN = """
import bayesopt_chain as bc, torchopt
from bayesopt_chain.testing.fixtures import law

def update(grads, state, *, params=None, inplace=True):
    for g in grads.values() if isinstance(grads, dict) else ():
        if g is not None:
            g.mul_(2)
    return grads, state

def test_broken(law):
    law(lambda: torchopt.base.GradientTransformation(lambda params: (), update))
"""


def test_a_link_of_ones_own(law):  # noqa: F811
    law(lambda: bc.chain(bc.add_momentum(0.9), bc.scale_by_neg_lr(0.1)))


def test_a_broken_law_fails_by_its_name(pytester):
    pytester.makepyfile(BROKEN)
    ran = pytester.runpytest("-q", "-p", "no:randomly")
    ran.stdout.fnmatch_lines(["*FAILED*test_broken[[]pure_updates_touch_nothing[]]*"])
    assert sum(ran.parseoutcomes().values()) - ran.parseoutcomes().get("warnings", 0) >= len(LAWS)
