"""Influence and leave-one-out against fits without the datum, closed forms and retraining."""

import itertools

import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain.likelihoods import bernoulli, categorical, custom, gaussian
from bayesopt_chain.posterior import batch_bald, d_optimal, epig, influence_of_draws, leave_one_out
from tests.refusals import refuse

pytestmark = pytest.mark.usefixtures("double_precision")


def network(outputs):
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, outputs)).eval()


def without(n, *tensors):
    return [torch.cat([x[:n], x[n + 1 :]]) for x in tensors]


def test_ridge_regression_leaves_one_out_as_the_closed_form_does():
    """Mean, variance and density of each datum, and the change at others, to 1e-10 of a fit without the datum."""
    x, y, new = torch.randn(12, 3), torch.randn(12, 2), torch.randn(4, 3)
    module, noise = nn.Linear(3, 2).eval(), bc.likelihoods.gaussian(0.3)
    fitted = bc.fit_laplace(module, noise, [(x, y)], structure="dense", tune=None, prior_precision=0.7)
    alone = leave_one_out(fitted, [(x[:5], y[:5]), (x[5:], y[5:])])
    change = bc.influence(fitted, (x, y), new, of=lambda f, _: f[:, 1])
    phi, ridge = torch.cat([torch.ones(12, 1), x], 1), 0.3 * 0.7 * torch.eye(4)
    hat = phi @ torch.linalg.solve(phi.T @ phi + ridge, phi.T)
    h = hat.diagonal()[:, None]
    torch.testing.assert_close(alone.mean, (hat @ y - h * y) / (1 - h), rtol=0, atol=1e-10)
    torch.testing.assert_close(alone.variance, (0.3 / (1 - h)).expand(12, 2), rtol=0, atol=1e-10)
    for n in range(12):
        less = bc.fit_laplace(module, noise, [without(n, x, y)], structure="dense", tune=None, prior_precision=0.7)
        wanted = (less.outputs(new).mean - fitted.outputs(new).mean)[:, 1]
        torch.testing.assert_close(change[:, n], wanted, rtol=0, atol=1e-10)
        one = less.predictive(x[n : n + 1]).log_prob(y[n : n + 1])
        torch.testing.assert_close(alone.log_prob(y)[n], one[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("leverage", [True, False])
@pytest.mark.parametrize("structure", ["dense", "kronecker", "ekfac", "diagonal"])
def test_a_change_is_the_solve_with_the_precision_less_the_datums_own_part(structure, leverage):
    """Classes with a dispersion, all layers, an ignored label and batches: against matrices, for every structure."""
    x, y, new = torch.randn(9, 2), torch.randint(3, (9,)), torch.randn(4, 2)
    y[4] = -100
    module, likelihood = network(3), bc.likelihoods.categorical()
    told = {"subset": "all", "tune": None, "prior_precision": 2.0, "structure": structure.replace("ekfac", "kronecker")}
    fitted = bc.fit_laplace(module, likelihood, [(x, y)], **told)
    if structure == "ekfac":
        fitted = bc.fit_laplace(module, likelihood, [(x, y)], **told, basis=fitted.seen.precision)
    fitted = fitted.load_state_dict({**fitted.state_dict(), "likelihood_scale": torch.tensor(0.8)})
    forward, params, _ = bc.make_functional(module)

    def outputs(vector, at):
        return forward(bc.precision.unflatten(vector, params), (at, None))

    vector, precision = bc.precision.flatten(params, params), fitted.posterior.precision.to_dense()
    of = torch.autograd.functional.jacobian(lambda v: outputs(v, x), vector)
    f = outputs(vector, x)
    moves = []
    for n in range(9):
        p, kept = f[n].softmax(0), float(y[n] != -100)
        slope = kept * 0.8 * (p - nn.functional.one_hot(y[n].clamp_min(0), 3))
        own = kept * 0.8 * of[n].T @ (p.diag() - torch.outer(p, p)) @ of[n]
        moves.append(torch.linalg.solve(precision - own if leverage else precision, of[n].T @ slope))
    gradient = torch.autograd.functional.jacobian(lambda v: outputs(v, new).logsumexp(1), vector)
    found = bc.influence(
        fitted, [(x[:5], y[:5]), (x[5:], y[5:])], new, of=lambda f, _: f.logsumexp(1), leverage=leverage
    )
    torch.testing.assert_close(found, gradient @ torch.stack(moves, 1))
    assert not found[:, 4].any()


def test_the_default_scalar_is_the_loss_and_a_temperature_changes_nothing_but_the_covariance():
    x, y, module = torch.randn(20, 2), torch.randint(3, (20,)), network(3)
    fits = [
        bc.fit_laplace(module, bc.likelihoods.categorical(), [(x, y)], structure="dense", tune=None, temperature=t)
        for t in (None, 1 / 40)
    ]
    own = [bc.influence(fitted, (x, y), (x, y)) for fitted in fits]
    torch.testing.assert_close(own[0], own[1])
    assert bool((own[0].diagonal() > 0).all())  # a datum's own loss rises without it
    of = bc.influence(fits[0], (x, y), (x, y), of=lambda f, t: nn.functional.cross_entropy(f, t, reduction="none"))
    torch.testing.assert_close(of, own[0])
    alone = [leave_one_out(fitted, (x, y)) for fitted in fits]
    torch.testing.assert_close(alone[0].outputs.mean, alone[1].outputs.mean)
    torch.testing.assert_close(alone[0].outputs.covariance, 2 * alone[1].outputs.covariance)


def test_the_default_scalar_has_the_noise_in_force():
    x, y, module = torch.randn(20, 2), torch.randn(20, 3), network(3)
    fitted = bc.fit_laplace(module, bc.likelihoods.gaussian(1.0), [(x, y)])
    noise = fitted.likelihood.noise_variance.flatten()
    loss = lambda f, t: ((f - t).square() / noise / 2).sum(1)  # noqa: E731
    torch.testing.assert_close(bc.influence(fitted, (x, y), (x, y)), bc.influence(fitted, (x, y), (x, y), of=loss))


def test_draws_have_the_covariance_of_losses_and_values():
    """Of a Gaussian posterior with linear losses the first order is exact: minus covariance times the slopes."""
    draws, log_weights = torch.randn(7, 3), torch.randn(7)
    losses, values = draws @ torch.randn(3, 4), draws @ torch.randn(3, 2)
    w = log_weights.softmax(0)
    both = torch.cov(torch.cat([values, losses], 1).T, aweights=w, correction=0)
    torch.testing.assert_close(influence_of_draws(losses, values, log_weights), both[:2, 2:])


def test_what_cannot_be_answered_is_refused():
    x, y = torch.randn(6, 2), torch.randn(6, 1)
    fitted = bc.fit_laplace(network(1), bc.likelihoods.gaussian(), [(x, y)], structure="dense", tune=None)
    own = bc.fit_laplace(nn.Linear(2, 1).eval(), bc.likelihoods.gaussian(1.0), [(x, y)], structure="dense", tune=None)
    refuse(
        (
            (lambda: leave_one_out(own, (1e3 * x, y)), r"leverage of 1 or more, number 0 .*leverage=False"),
            (lambda: bc.influence(own.posterior, (x, y), x), r"what bc\.fit_laplace returned"),
            (lambda: bc.influence(fitted, (x, None), x), "train has no targets|query has no targets"),
            (lambda: bc.influence(fitted, (x, y), x), "query has no targets.* or of="),
            (lambda: bc.influence(fitted, (x, y), (x, y), of=lambda f, _: f), "one number a datum"),
            (lambda: bc.influence(fitted, [], (x, y)), "train has no batches"),
            (
                lambda: leave_one_out(own, torch.utils.data.DataLoader([*zip(x, y)], 2, shuffle=True)),
                *(TypeError, "train must be .*a DataLoader with shuffle=False"),
            ),
            (
                lambda: leave_one_out(
                    own,
                    torch.utils.data.DataLoader(
                        [*zip(x, y)], 2, sampler=torch.utils.data.SubsetRandomSampler(range(6))
                    ),
                ),
                *(TypeError, "train must be .*of a Subset"),
            ),
            (lambda: fitted.predict(x.numpy()), TypeError, r"of an array torch\.as_tensor"),
            (
                lambda: bc.fit_laplace(
                    nn.Sequential(nn.EmbeddingBag(2, 1, sparse=True), nn.Linear(1, 1)).eval(),
                    bc.likelihoods.gaussian(),
                    [((x > 0).long(), y)],
                    subset="all",
                    structure="dense",
                ),
                "fit_laplace: loader: .*build its embeddings with sparse=False",
            ),
            (lambda: bc.influence(fitted, (x, y), []), "query has no batches"),
            (lambda: bc.influence(fitted, (x, y), x, of=lambda f: f[:, 0]), "influence: of cannot take outputs"),
            (
                lambda: bc.influence(fitted, (x, y), x, of=lambda f, _: f[:, 0].detach()),
                "of must return what has a gradient",
            ),
            (lambda: bc.influence(fitted, (x, y), ((x, x), y)), "influence: query: the model cannot take it"),
            (lambda: bc.influence(fitted, ((x, x), y), (x, y)), "influence: train: the model cannot take it"),
            (lambda: bc.influence(fitted, (x / 0, y), (x, y)), "train: outputs of the model are NaN or infinite"),
            (
                lambda: bc.influence(fitted, (x / 0, y), (x, y), leverage=False),
                "train: outputs of the model are NaN or infinite",
            ),
            (lambda: bc.influence(fitted, (x, y), (x / 0, y)), "query: outputs .* for 6 of 6 data, number 0 first"),
            (
                lambda: leave_one_out(fitted, (x.to("meta"), y.to("meta"))),
                "leave_one_out: train: the model cannot take it",
            ),
            (lambda: influence_of_draws(x, y[:3]), "same draws"),
            (lambda: influence_of_draws(x, y, torch.ones(3)), "one for each of 6"),
        ),
        error=(ValueError, TypeError),
    )
    assert bc.influence(own, (1e3 * x, y), x, of=lambda f, _: f[:, 0], leverage=False).isfinite().all()


# Acquisition against enumeration of every label and every batch


DRAWS, DATA, CLASSES = 4, 6, 3


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
    assert abs(rough.gains.sum() - information(w, p, list(range(DATA)))) < 0.06


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
    refuse(
        (
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
        )
    )
