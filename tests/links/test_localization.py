"""A spring to a point of the parameter space."""

import pickle

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.testing import stationary_covariance


@pytest.mark.parametrize("sampler", [bc.sgld(0.2, temperature=0.5), bc.sghmc(0.2, temperature=0.5)])
def test_it_adds_its_strength_to_the_curvature_exactly(sampler):
    K = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    tx = bc.chain(bc.links.add_localization(torch.tensor([3.0, -1.0], dtype=torch.float64), 0.7), sampler)
    wanted = 0.5 * torch.linalg.inv(K + 0.7 * torch.eye(2, dtype=torch.float64))
    torch.testing.assert_close(stationary_covariance(tx, K), wanted, rtol=0, atol=1e-10)


def test_behind_momentum_the_spring_is_weaker_by_what_the_momentum_keeps():
    K = torch.tensor([[2.0]], dtype=torch.float64)
    tx = bc.chain(
        bc.add_momentum(0.9),
        bc.links.add_localization(1.0, 0.7),
        bc.inject_langevin_noise(0.5),
        bc.scale_by_neg_lr(0.1),
    )
    torch.testing.assert_close(stationary_covariance(tx, K), 0.5 / (K + 0.07), rtol=0, atol=1e-10)


def test_without_noise_it_ends_where_spring_and_loss_agree():
    tx = bc.chain(bc.links.add_localization({"w": torch.tensor([4.0])}, 1.0), bc.sgd(0.1))
    params = {"w": torch.zeros(1)}
    state, step = tx.init(params), bc.make_step(lambda p, batch: (p["w"] ** 2).sum() / 2, tx)
    for _ in range(300):
        params, state, _ = step(params, state, None)
    torch.testing.assert_close(params["w"], torch.tensor([2.0]))


def test_links_with_the_same_centre_are_equal_and_pickle():
    a, b, c = (bc.links.add_localization([torch.tensor([x])], 0.5) for x in (1.0, 1.0, 2.0))
    assert a == b != c and pickle.loads(pickle.dumps(a)) == a and hash(a) == hash(b)
    assert bc.links.add_localization(0.0, 0.0) == bc.chain()


def test_a_centre_of_another_model_is_refused():
    params = {"w": torch.zeros(2)}
    tx = bc.links.add_localization(params, 1.0)
    for ask, words in (
        (
            lambda: bc.links.add_localization({"w": torch.zeros(3)}, 1.0).init(params),
            r"center at \['w'\] has shape \(3,\), which does not broadcast to the parameter's \(2,\)",
        ),
        (lambda: bc.links.add_localization({"v": torch.zeros(2)}, 1.0).init(params), "no tree like the parameters"),
        (lambda: bc.links.add_localization(params, -1.0), "strength must be finite"),
        (lambda: tx.update(params, tx.init(params)), "needs the parameters"),
    ):
        with pytest.raises(ValueError, match=words):
            ask()
