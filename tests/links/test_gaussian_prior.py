"""A Gaussian prior or a spring as a link: exact at a temperature, and the posterior of one task as the prior of the next."""

import pickle

import optree
import pytest
import torch
import torchopt

import bayesopt_chain as bc
from bayesopt_chain.precision import Dense, Diagonal
from bayesopt_chain.testing import stationary_covariance
from tests.loop.beside import each_alone
from tests.refusals import refused
from tests.walk import end_of

D = torch.float64
K = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=D)
L = torch.tensor([[30.0, 12.0], [12.0, 8.0]], dtype=D)
MEAN = torch.tensor([3.0, -1.0], dtype=D)


def coupled(mean=MEAN):
    return bc.Gaussian(mean, Dense(L, torch.zeros(2, dtype=D), torch.tensor(1.0, dtype=D)))


@pytest.mark.parametrize("sampler", [bc.sgld(0.2, temperature=0.5), bc.sghmc(0.1, temperature=0.5)])
@pytest.mark.parametrize(
    ("prior", "precision"),
    [
        (7.0, 7.0 * torch.eye(2, dtype=D)),
        (torch.tensor([4.0, 9.0], dtype=D), torch.diag(torch.tensor([4.0, 9.0], dtype=D))),
        (bc.Gaussian(MEAN, Diagonal(torch.tensor([4.0, 9.0], dtype=D), torch.tensor(1.0))),
        torch.diag(torch.tensor([4.0, 9.0], dtype=D))), (coupled(), L),
        (coupled().factorised(), L),
        (bc.links.add_localization(MEAN, 0.7), 14.0 * torch.eye(2, dtype=D)),
    ],
    ids=["number", "tree", "diagonal", "dense", "decomposed", "a spring"],
)  # fmt: skip
def test_the_prior_adds_its_precision_to_the_curvature_exactly(prior, precision, sampler):
    link = prior if isinstance(prior, bc.Chain) else bc.links.add_gaussian_prior(prior, n=20)
    tx = bc.chain(link, sampler)
    torch.testing.assert_close(
        stationary_covariance(tx, K), 0.5 * torch.linalg.inv(K + precision / 20), rtol=0, atol=1e-10
    )


@pytest.mark.parametrize(
    ("link", "pull"),
    [
        (bc.links.add_gaussian_prior(coupled(), n=20), L / 20),
        (bc.links.add_localization(MEAN, 0.7), 0.7 * torch.eye(2, dtype=D)),
    ],
    ids=["prior", "spring"],
)
def test_without_noise_it_ends_where_prior_and_loss_agree(link, pull):
    params, _ = end_of(bc.chain(link, bc.sgd(0.3, 0.5)), torch.zeros(2, dtype=D), lambda p: K @ p, 600)
    torch.testing.assert_close(params, torch.linalg.solve(K + pull, pull @ MEAN), rtol=0, atol=1e-12)


def test_behind_momentum_a_spring_is_weaker_by_what_the_momentum_keeps():
    links = bc.add_momentum(0.9), bc.links.add_localization(1.0, 0.7), bc.inject_langevin_noise(0.5)
    found = stationary_covariance(bc.chain(*links, bc.scale_by_neg_lr(0.1)), K[:1, :1])
    torch.testing.assert_close(found, 0.5 / (K[:1, :1] + 0.07), rtol=0, atol=1e-10)


def test_chains_of_one_prior_are_each_alone():
    tx = bc.chain(bc.links.add_gaussian_prior(coupled(), n=20), bc.sghmc(0.1, temperature=0.01))
    params, loss = torch.randn(3, 2, dtype=D), lambda p, batch: p @ K @ p / 2
    step = bc.make_step(loss, tx)
    chains = bc.parallel(step, 3)
    each_alone(chains, [step] * 3, params, chains.init(tx, params), [None])


# Learning task after task.

X = torch.randn(24, 3, dtype=D, generator=torch.Generator().manual_seed(0))
Y = torch.randn(24, 2, dtype=D, generator=torch.Generator().manual_seed(1))
ONE_HOT = torch.eye(3, dtype=D).repeat(8, 1) * torch.rand(24, 1, dtype=D, generator=torch.Generator().manual_seed(2))


def together(p, batch):
    return batch[0] @ p["w"] + p["b"]


def linear(p, batch):
    return torch.nn.functional.linear(batch[0], p["w"])


TOGETHER = {"w": torch.zeros(3, 2, dtype=D), "b": torch.zeros(2, dtype=D)}
LINEAR = {"w": torch.zeros(2, 3, dtype=D)}
CASES = {  # structures, and models whose curvature they hold exactly
    "dense": (together, TOGETHER, X, {}),
    "root": (together, TOGETHER, X, {}),
    "low_rank": (together, TOGETHER, X, {"rank": 8}),
    "diagonal": (linear, LINEAR, ONE_HOT, {}),
    "kronecker": (linear, LINEAR, X, {}),
}
VARIANCE = 0.3


def learn(structure, batch, prior):
    """The Laplace posterior of a task under a prior, a number or a Gaussian; its mean by a chain."""
    forward, params, _, options = CASES[structure]
    n, likelihood, link = len(batch[0]), bc.likelihoods.gaussian(VARIANCE), bc.laplace()
    estimate = bc.curvature.ggn(forward, likelihood, structure, **options)
    _, state = link.update(params, link.init(params), curvature=estimate(params, batch))
    given = {"prior": prior} if isinstance(prior, bc.Gaussian) else {"prior_precision": prior}
    newton = [
        bc.scale_by_preconditioner(link.posterior(state, params, **given).precision),
        bc.scale_by_neg_lr(float(n)),
    ]
    tx = bc.chain(bc.links.add_gaussian_prior(prior, n=n), *newton)

    def loss(params, batch):
        return likelihood.nll(forward(params, batch), batch[1]).mean()

    params, _, _ = bc.make_step(loss, tx)(params, tx.init(params), batch)
    return link.posterior(state, params, **given)


@pytest.mark.parametrize("structure", CASES)
def test_the_posterior_of_one_task_as_the_prior_of_the_next_is_the_joint_fit(structure):
    x = CASES[structure][2]
    joint = learn(structure, (x, Y), 2.0)
    posterior: object = 2.0
    for task in (slice(0, 7), slice(7, 12), slice(12, 24)):
        posterior = learn(structure, (x[task], Y[task]), posterior)
    torch.testing.assert_close(*map(optree.tree_leaves, (posterior.mean, joint.mean)), rtol=0, atol=1e-10)
    torch.testing.assert_close(posterior.precision.to_dense(), joint.precision.to_dense(), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(learn(structure, (x[12:], Y[12:]), 2.0).mean["w"], joint.mean["w"], atol=1e-3)


def test_a_prior_over_some_of_the_parameters_goes_behind_a_mask():
    params = {"body": torch.ones(3, dtype=D), "head": torch.ones(2, dtype=D)}
    prior = bc.Gaussian({"head": MEAN}, coupled().precision._replace(like={"head": torch.zeros(2, dtype=D)}))
    zero = optree.tree_map(torch.zeros_like, params)
    tx = bc.masked(bc.links.add_gaussian_prior(prior, n=2), {"body": False, "head": True})
    got, _ = tx.update(zero, tx.init(params), params=params, inplace=False)
    torch.testing.assert_close(got, {"body": zero["body"], "head": L @ (1 - MEAN) / 2})
    with pytest.raises(ValueError, match=r"over 1 leaves \(\['head'\]\), the chain acts on 2.*bc\.masked"):
        bc.links.add_gaussian_prior(prior, n=2).init(params)
    partial = bc.chain(
        bc.masked(bc.links.add_gaussian_prior({"body": 4.0, "head": 0.0}, n=2), {"body": True, "head": False})
    )
    got, _ = partial.update(zero, partial.init(params), params=params, inplace=False)
    torch.testing.assert_close(got, {"body": 2.0 * params["body"], "head": zero["head"]})


def test_a_missing_gradient_is_no_matter_without_correlations_and_refused_with_them():
    params = {"a": torch.ones(1, dtype=D), "b": torch.ones(1, dtype=D)}
    tx = bc.links.add_gaussian_prior({"a": 2.0, "b": 3.0}, n=1)
    got, _ = tx.update({"a": None, "b": torch.zeros(1, dtype=D)}, tx.init(params), params=params, inplace=False)
    assert got["a"] is None and got["b"] == 3.0
    tx = bc.links.add_gaussian_prior(bc.Gaussian(params, Dense(L, params, torch.tensor(1.0))), n=1)
    with pytest.raises(ValueError, match="every parameter needs a gradient"):
        tx.update({"a": None, "b": torch.zeros(1, dtype=D)}, tx.init(params), params=params, inplace=False)


def test_links_compare_hash_pickle_and_say_what_they_are():
    a, b = bc.links.add_gaussian_prior(coupled(), n=3), bc.links.add_gaussian_prior(coupled(), n=3)
    others = [
        bc.links.add_gaussian_prior(coupled(), n=4),
        bc.links.add_gaussian_prior(coupled(MEAN + 1), n=3),
        bc.sgd(0.1),
    ]
    assert a == b and hash(a) == hash(b) and pickle.loads(pickle.dumps(a)) == a and all(a != x for x in others)
    assert repr(a) == "add_gaussian_prior(n=3.0, mean=tensor(2,), precision=Dense)"
    a, b, c = (bc.links.add_localization([torch.tensor([x])], 0.5) for x in (1.0, 1.0, 2.0))
    assert a == b != c and pickle.loads(pickle.dumps(a)) == a and hash(a) == hash(b)
    assert bc.links.add_localization(0.0, 0.0) == bc.chain()
    assert (
        bc.links.add_gaussian_prior([1.0], n=2)
        == bc.links.add_gaussian_prior([1.0], n=2)
        != bc.links.add_gaussian_prior([2.0], n=2)
    )
    assert (
        bc.links.add_gaussian_prior(3.0, n=6) == bc.links.add_decayed_weights(0.5)
        and bc.links.add_gaussian_prior(0.0, n=6) == bc.chain()
    )


PRIORS = {"a number": 2.0, "a tree": torch.full((2,), 2.0, dtype=D), "a Gaussian": coupled()}


@pytest.mark.parametrize("form", PRIORS)
def test_clipping_may_stand_before_it_and_nothing_that_changes_gradients(form):
    p, prior = torch.ones(2, dtype=D), bc.links.add_gaussian_prior(PRIORS[form], n=2)
    bc.chain(torchopt.clip_grad_norm(1.0), prior, bc.sghmc(0.1, temperature=0.1)).init(p)
    bc.chain(bc.links.add_decayed_weights(0.1), prior, bc.sgd(0.1)).init(p)
    for link in (
        bc.add_momentum(0.9),
        bc.scale_by_preconditioner(2.0),
        bc.scale_by_neg_lr(lambda c: 0.1),
        bc.links.scale_by_rms(),
        torchopt.transform.scale_by_adam(),
    ):
        for behind in (bc.chain(prior), bc.masked(prior, True)):
            with pytest.raises(ValueError, match=r"stands before it.*write add_gaussian_prior first"):
                bc.chain(link, behind, bc.scale_by_neg_lr(0.1)).init(p)
    with pytest.raises(ValueError, match=r"behind it would change what it samples|stands before it"):
        bc.chain(bc.samplers.sgnht(0.1, temperature=0.1), prior).init(p)


def prior(precision, n=2, params=None):
    tx = bc.links.add_gaussian_prior(precision, n=n)
    return tx if params is None else tx.init(params)


def spring(centre, strength=1.0):
    return bc.links.add_localization(centre, strength).init(PAIR)


PAIR, THREE = {"w": torch.ones(2)}, {"w": torch.ones(3)}
WIDER = bc.Gaussian(THREE, Dense(torch.eye(3), THREE, torch.tensor(1.0)))
LOST = bc.Gaussian(torch.tensor([torch.nan]), Diagonal(torch.ones(1), torch.tensor(1.0)))


test_what_does_not_fit_is_refused = refused(
    [
        (lambda: prior(-1.0), ValueError, "prior must"),
        (lambda: prior(1.0, n=0), ValueError, "n must"),
        (lambda: prior("strong"), TypeError, "a precision .* or a Gaussian"),
        (lambda: prior({"w": True}), TypeError, "a precision .* or a Gaussian"),
        (lambda: prior(LOST), ValueError, "NaN"),
        (lambda: spring(0.0, -1.0), ValueError, "strength must be a non-negative, finite"),
        (lambda: bc.links.fan_in(torch.ones(2)), TypeError, "module must be"),
        (lambda: prior({"v": 1.0}, params=PAIR), ValueError, "the precision is no tree like the parameters"),
        (lambda: prior(THREE, params=PAIR), ValueError, r"precision at \['w'\] has shape \(3,\)"),
        (lambda: prior({"w": -1.0}, params=PAIR), ValueError, r"precision of \['w'\] must be finite and not negative"),
        (lambda: prior(WIDER, params=PAIR), ValueError, "differs"),
        (
            lambda: spring(THREE),
            ValueError,
            r"center at \['w'\] has shape \(3,\), .* broadcast to the parameter's \(2,\)",
        ),
        (lambda: spring({"v": torch.zeros(2)}), ValueError, "no tree like the parameters"),
        (
            lambda: bc.links.add_localization(PAIR, 1.0).update(PAIR, spring(PAIR)),
            ValueError,
            "needs the parameters",
        ),
    ]
)


def test_fan_in_counts_the_inputs_of_a_unit():
    """Of one layer of each kind whose inputs are counted in a way of its own."""
    linear = torch.nn.Linear(7, 3)
    layers = torch.nn.ModuleDict({
        "linear": linear, "grouped": torch.nn.Conv2d(4, 6, 3, groups=2), "up": torch.nn.ConvTranspose1d(4, 2, 6, stride=3),
        "words": torch.nn.Embedding(11, 5), "lstm": torch.nn.LSTM(5, 8), "norm": torch.nn.LayerNorm((2, 8)), "tied": linear,
    })  # fmt: skip
    fans = bc.links.fan_in(layers)
    assert list(fans) == [name for name, _ in layers.named_parameters()]
    weights = {
        "linear.weight": 7, "grouped.weight": 2 * 9, "up.weight": 4 * 6 / 3, "words.weight": 1, "lstm.weight_ih_l0": 5,
        "lstm.weight_hh_l0": 8,
    }  # fmt: skip
    assert fans == {**dict.fromkeys(fans, 1.0), **weights}
