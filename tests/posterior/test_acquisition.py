"""Acquisition against enumeration of every label and every batch."""

import itertools

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.likelihoods import bernoulli, categorical, custom, gaussian
from bayesopt_chain.posterior import batch_bald, d_optimal, epig

DRAWS, DATA, CLASSES = 4, 6, 3


pytestmark = pytest.mark.usefixtures("double_precision")


def entropy(p):
    return torch.special.entr(p).sum()


def pools():
    log_weights = torch.randn(DRAWS).log_softmax(0)
    logits = 2 * torch.randn(DRAWS, DATA, CLASSES)
    yes = bernoulli().mixture(logits[..., :1], log_weights)
    p = logits[..., :1].sigmoid()
    return log_weights.exp(), [
        (categorical().mixture(logits, log_weights), logits.softmax(-1)),
        (yes, torch.cat([1 - p, p], -1)),
    ]


def information(w, p, batch):
    """I(y_1 .. y_b; theta) by adding up every combination of labels."""
    joint = []
    for labels in itertools.product(range(p.shape[2]), repeat=len(batch)):
        joint.append(torch.stack([p[:, n, y] for n, y in zip(batch, labels)]).prod(0) @ w)
    given = sum(w[s] * entropy(p[s, n]) for s in range(len(w)) for n in batch)
    return entropy(torch.stack(joint)) - given


@pytest.mark.parametrize("kind", [0, 1])
def test_batch_bald_is_the_greedy_choice_by_the_information_of_all_labels(kind):
    w, both = pools()
    pool, p = both[kind]
    found = batch_bald(pool, 4)
    chosen, before = [], 0.0
    for n, gain in zip(found.indices.tolist(), found.gains):
        each = {m: information(w, p, [*chosen, m]) for m in range(DATA) if m not in chosen}
        assert max(each, key=each.get) == n
        torch.testing.assert_close(gain, each[n] - before)
        chosen, before = [*chosen, n], each[n]
    torch.testing.assert_close(found.gains[0], pool.epistemic.max())


def test_batch_bald_beyond_the_combinations_is_an_estimate():
    """Of 4,000 drawn combinations, each gain has a standard error below .01; the bound is six of them: p < 1e-8."""
    w, ((pool, p), _) = pools()
    found = batch_bald(pool, 4, configurations=4000, generator=torch.Generator().manual_seed(0))
    few = batch_bald(pool, 4, configurations=9, generator=torch.Generator().manual_seed(0))
    rough = batch_bald(pool, DATA, configurations=2000, generator=torch.Generator().manual_seed(1))
    assert sorted(rough.indices.tolist()) == list(range(DATA)) and torch.equal(few.gains[:2], found.gains[:2])
    exact = information(w, p, list(range(DATA)))
    assert abs(rough.gains.sum() - exact) < 0.06


def test_epig_is_the_information_between_labels():
    w, both = pools()
    for pool, p in both:
        q = torch.rand(DRAWS, 5, 4).softmax(-1)
        targets = categorical().mixture(q.log(), pool.log_weights)
        wanted = []
        for n in range(DATA):
            joint = torch.einsum("s,sc,smd->mcd", w, p[:, n], q)
            alone = entropy(torch.einsum("s,sc->c", w, p[:, n]))
            each = [alone + entropy(torch.einsum("s,sd->d", w, q[:, m])) - entropy(joint[m]) for m in range(5)]
            wanted.append(torch.stack(each).mean())
        torch.testing.assert_close(epig(pool, targets), torch.stack(wanted))


@pytest.mark.parametrize("likelihood", [gaussian(0.5), gaussian(torch.tensor([0.5, 2.0, 1.0])), categorical()])
def test_d_optimal_is_the_greedy_choice_by_log_determinants_and_near_the_best_batch(likelihood):
    root = torch.randn(DATA * CLASSES, 5)
    mean, joint = torch.randn(DATA, CLASSES), root @ root.T
    hessian = likelihood.factors(mean, None) if likelihood.name == "categorical" else None
    if hessian is None:
        hessian = likelihood.factors(mean, torch.zeros_like(mean))
    outer = torch.einsum("kne,knf->nef", hessian, hessian)

    def gain(batch):
        rows = [n * CLASSES + e for n in batch for e in range(CLASSES)]
        curvature = torch.block_diag(*outer[list(batch)])
        return torch.linalg.slogdet(torch.eye(len(rows)) + curvature @ joint[rows][:, rows])[1] / 2

    found = d_optimal(likelihood.predictive(mean, joint), 3)
    chosen = []
    for n in found.indices.tolist():
        each = {m: gain([*chosen, m]) for m in range(DATA) if m not in chosen}
        assert max(each, key=each.get) == n
        chosen.append(n)
        torch.testing.assert_close(found.gains[: len(chosen)].sum(), each[n])
    best = max(gain(batch) for batch in itertools.combinations(range(DATA), 3))
    assert (1 - torch.e**-1) * best <= found.gains.sum() <= best + 1e-12


def test_a_fit_chooses_by_draws_of_functions_and_by_its_joint_covariance():
    x, y = torch.randn(30, 2), torch.randint(3, (30,))
    module = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).eval()
    fitted, new = bc.fit_laplace(module, categorical(), [(x, y)]), torch.randn(7, 2)
    both = fitted.functional_samples(torch.cat([new, x]), samples=20)
    of = fitted.likelihood.mixture
    assert batch_bald(of(both[:, :7]), 3).indices.unique().numel() == 3
    assert epig(of(both[:, :7]), of(both[:, 7:])).shape == (7,)
    assert d_optimal(fitted.predictive(new, joint=True), 3).indices.unique().numel() == 3


def test_what_has_no_answer_is_refused():
    apart = categorical().predictive(torch.zeros(3, 2), torch.eye(2).expand(3, 2, 2))
    numbers, tokens = gaussian(1.0).mixture(torch.zeros(2, 3, 1)), categorical().mixture(torch.zeros(2, 3, 4, 2))
    pool, other = categorical().mixture(torch.zeros(2, 3, 2)), categorical().mixture(torch.zeros(5, 3, 2))
    broken = categorical().mixture(torch.zeros(2, 3, 2).index_fill(1, torch.tensor(1), torch.nan))
    without_number = gaussian(1.0).predictive(torch.tensor([[0.0], [torch.nan]]), torch.eye(2))
    at_targets = custom(distribution=lambda f: torch.distributions.Exponential((-f).exp()))
    of_loss = custom(lambda f, y: (f - y).square().sum(-1) / 2)
    for call, words in (
        (lambda: batch_bald(apart, 1), r"pool has Gaussian outputs.*functional_samples"),
        (lambda: batch_bald(numbers, 1), "no classes: use d_optimal"),
        (lambda: epig(pool, tokens), "targets has 4 labels a datum"),
        (lambda: epig(pool, other), "same draws, got 2 and 5"),
        (lambda: batch_bald(pool, 4), "count=4 of a pool of 3"),
        (lambda: batch_bald(broken, 1), "pool: predictions are NaN or infinite for 1 of 3 data, number 1 first"),
        (lambda: epig(pool, broken), "targets: predictions .* number 1 first"),
        (lambda: d_optimal(without_number, 1), "d_optimal: pool: .* for 1 of 2 data"),
        (lambda: d_optimal(apart, 1), "joint=True"),
        (lambda: d_optimal(pool, 1), "joint=True"),
        (
            lambda: d_optimal(at_targets.predictive(torch.zeros(2, 1), torch.eye(2)), 1),
            "here are none: pass output_hessian=",
        ),
        (
            lambda: d_optimal(of_loss.predictive(torch.zeros(2, 1), torch.eye(2)), 1),
            "here are none: pass output_hessian=",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            call()
