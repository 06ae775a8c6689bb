"""The filters against textbook Kalman filters, and against each other."""

import optree
import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.precision import Block, Diagonal, Kronecker, LowRank, Root, flatten

pytestmark = pytest.mark.usefixtures("double_precision")


VARIANCE, Q, FORGETTING, LR, PRIOR = 0.5, 0.03, 0.9, 0.7, 2.0
like = {"a": torch.zeros(2, 2, dtype=torch.float64), "b": torch.zeros(1, dtype=torch.float64)}


def forward(params, batch):
    return batch[0][:, :4] @ params["a"].reshape(4) + torch.tanh(batch[0][:, 4] * params["b"])


def loss(params, batch):
    return (forward(params, batch) - batch[1]).square().mean() / (2 * VARIANCE)


def as_tree(flat):
    return {"a": flat[:4].reshape(2, 2), "b": flat[4:]}


def stream(steps=12, data=3):
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(data, 5, generator=generator), torch.randn(data, generator=generator)) for _ in range(steps)]


def textbook(batches, diagonal=False):
    """Mean and covariance by gains: predict P / forgetting + q, then one joint update a batch with noise variance / lr. The
    diagonal filter moves by the gain of its diagonal prior, and its information grows by the diagonal of the batch's."""
    mean, p = torch.zeros(5), torch.eye(5) / PRIOR
    for batch in batches:
        p = p / FORGETTING + Q * torch.eye(5)
        h = torch.func.jacrev(lambda m, batch=batch: forward(as_tree(m), batch))(mean)
        gain = p @ h.T @ torch.linalg.inv(h @ p @ h.T + VARIANCE / LR * torch.eye(len(h)))
        mean = mean + gain @ (batch[1] - forward(as_tree(mean), batch))
        information = torch.linalg.inv(p) + LR / VARIANCE * h.T @ h
        p = torch.diag(1 / information.diagonal()) if diagonal else (torch.eye(5) - gain @ h) @ p
    return mean, p


def filter_of(name, *args, rank=5, **options):
    return getattr(bc.ekf, name)(*args, **options, **({"rank": rank} if name == "low_rank" else {}))


def estimator(form):
    if form == "observation":
        return bc.ekf.observe(forward, VARIANCE)
    return bc.curvature.ggn(forward, bc.likelihoods.gaussian(VARIANCE), form)


def run(tx, form, batches, inplace=False):
    step = bc.make_step(loss, tx, curvature=estimator(form), inplace=inplace)
    params = optree.tree_map(torch.clone, like)
    state = tx.init(params)
    for batch in batches:
        params, state, _ = step(params, state, batch)
    posterior = tx.posterior(state, params)
    return flatten(params, like), torch.linalg.inv(posterior.precision.to_dense())


@pytest.mark.parametrize("form", ["root", "dense", "observation"])
@pytest.mark.parametrize("name", ["dense", "diagonal", "low_rank"])
def test_a_filter_that_can_hold_it_is_the_textbook_filter(name, form):
    """Extended, with transition noise, forgetting and lr, in the Fisher and the observation form: 1e-10."""
    tx = filter_of(name, LR, prior_precision=PRIOR, transition_noise=Q, forgetting=FORGETTING)
    for found, wanted in zip(run(tx, form, stream()), textbook(stream(), name == "diagonal")):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ["dense", "diagonal", "low_rank"])
@pytest.mark.parametrize("data", [5, 30])
def test_correlated_features_leave_every_filter_stable(name, data):
    """100 features of two common causes, 300 data: the error of the fit stays below that of predicting zero (about 12), where
    dividing the gradient by the diagonal made it 1e9 and more. The first batch is the exact posterior of its data under the
    prior, for every filter that can hold it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 2, generator=generator) @ torch.randn(2, 100, generator=generator)
    x = x + 0.3 * torch.randn(300, 100, generator=generator)
    y = x @ torch.randn(100, generator=generator) + torch.randn(300, generator=generator)
    estimate = bc.curvature.ggn(lambda p, batch: batch[0] @ p, bc.likelihoods.gaussian(1.0), "root")
    tx = filter_of(name, rank=20)
    step = bc.make_step(lambda p, batch: (batch[0] @ p - batch[1]).square().mean() / 2, tx, curvature=estimate)
    params = torch.zeros(100)
    state = tx.init(params)
    for i, batch in enumerate(zip(x.split(data), y.split(data))):
        params, state, _ = step(params, state, batch)
        if i == 0:
            exact = torch.linalg.solve(batch[0].T @ batch[0] + torch.eye(100), batch[0].T @ batch[1])
            torch.testing.assert_close(params, exact, rtol=0, atol=1e-9)
    error = (x @ params - y).square().mean().sqrt()
    assert error < 0.3 * y.square().mean().sqrt()


def test_a_strong_batch_is_solved_for_in_float32():
    """Rows that outweigh the prior by 1e6: what the diagonal filter's move says of the data, against float64, to 1e-5 (solved
    for in float32 it is off by 0.1); and across the rows no more than the rounding of the gradient itself."""
    generator = torch.Generator().manual_seed(1)
    rows = 300 * torch.randn(6, 20, generator=generator)
    gradient = rows.T @ torch.randn(6, generator=generator)
    moves = []
    for dtype in (torch.float64, torch.float32):
        tx, params = bc.ekf.diagonal(), torch.zeros(20, dtype=dtype)
        increment = Root(rows.to(dtype), torch.tensor(1.0))
        updates, _ = tx.update(gradient.to(dtype), tx.init(params), params=params, curvature=increment)
        assert updates.dtype == dtype
        moves.append(updates.double())
    off = moves[1] - moves[0]
    assert (rows @ off).norm() < 1e-5 * (rows @ moves[0]).norm()
    assert off.norm() < torch.finfo(torch.float32).eps * gradient.norm()


@pytest.mark.parametrize("name", ["dense", "diagonal", "low_rank"])
def test_a_leaf_without_gradient_is_fixed_and_learns_nothing(name):
    """The others move as they would if it were no parameter."""
    tx = filter_of(name, rank=4)
    (batch,) = stream(1)
    increment = estimator("root")(like, batch)
    gradient = torch.func.grad(loss)(like, batch)
    updates, state = tx.update({**gradient, "b": None}, tx.init(like), params=like, curvature=increment)
    alone = {"a": like["a"]}
    wanted, _ = tx.update(
        {"a": gradient["a"]},
        tx.init(alone),
        params=alone,
        curvature=Root({"a": increment.rows["a"]}, increment.count),
    )
    assert updates["b"] is None
    torch.testing.assert_close(updates["a"], wanted["a"], rtol=1e-10, atol=1e-12)
    variance = tx.posterior(state, like).marginal_variance["b"]
    torch.testing.assert_close(variance, torch.ones(1), rtol=1e-12, atol=0)


def test_the_low_rank_filter_keeps_the_information_of_what_it_cuts_off():
    """The diagonal of the information stays exact whatever the rank, without transition noise."""
    wanted = torch.linalg.inv(run(bc.ekf.dense(prior_precision=PRIOR), "root", stream(1))[1])
    errors = []
    for rank in (1, 2, 3, 5):
        _, covariance = run(bc.ekf.low_rank(rank=rank, prior_precision=PRIOR), "root", stream(1))
        information = torch.linalg.inv(covariance)
        torch.testing.assert_close(information.diagonal(), wanted.diagonal(), rtol=1e-10, atol=0)
        errors.append((information - wanted).norm())
    assert errors[0] > errors[1] > errors[2] and errors[2] < 1e-10 and errors[3] < 1e-10  # three data: rank 3


@pytest.mark.parametrize("name", ["dense", "diagonal", "low_rank"])
def test_in_place_steps_filter_alike(name):
    ends = [run(filter_of(name, rank=2, transition_noise=Q), "root", stream(), inplace) for inplace in (False, True)]
    assert all(map(torch.equal, *ends))


def test_a_tensor_lr_is_read_at_every_update():
    dial = torch.tensor(1.0)
    tx = bc.ekf.dense(dial)
    rows = torch.eye(5)
    increment = Root({"a": rows[:, :4].reshape(5, 2, 2), "b": rows[:, 4:]}, torch.tensor(4.0))
    _, state = tx.update(like, tx.init(like), params=like, curvature=increment)
    dial.fill_(0.5)
    _, state = tx.update(like, state, params=like, curvature=increment)
    torch.testing.assert_close(tx.posterior(state, like).precision.to_dense(), torch.eye(5) * 2.5)


def test_the_filter_never_forms_its_information(monkeypatch):
    """Only rotations and triangular solves; the diagonal of the root is positive throughout."""
    tx = bc.ekf.dense(transition_noise=Q)
    state = tx.init(like)
    for name in ("cholesky", "cholesky_ex", "eigh", "inv", "solve"):

        def refuse(*args, name=name, **kwargs):
            raise AssertionError(f"{name} was called")

        monkeypatch.setattr(torch.linalg, name, refuse)
    for _ in range(50):
        rows = optree.tree_map(lambda p: torch.randn(2, *p.shape), like)
        _, state = tx.update(like, state, params=like, curvature=Root(rows, torch.tensor(2.0)))
        root = state[0].root
        assert (root.diagonal() > 0).all() and torch.equal(root, root.tril())


@pytest.mark.parametrize("structure", ["diagonal", "low_rank", "kronecker", "block"])
@pytest.mark.parametrize("name", ["dense", "diagonal", "low_rank"])
def test_curvature_that_is_not_made_of_rows_is_refused_with_what_to_do(name, structure):
    one = torch.tensor(1.0)
    increment = {
        "diagonal": Diagonal(like, one),
        "low_rank": LowRank(like, optree.tree_map(lambda p: p[None], like), one),
        "kronecker": Kronecker(like, like, like, like, one),
        "block": Block(optree.tree_map(lambda p: Diagonal(p, one), like), one),
    }[structure]
    tx = filter_of(name, rank=2)
    with pytest.raises(TypeError, match=r"is not made of rows.*structure='root'.*bc\.ekf\.observe.*smaller batches"):
        tx.update(like, tx.init(like), params=like, curvature=increment)


def test_many_filters_at_once_are_each_alone():
    """``bc.parallel`` over stacked states, curvature included, to 1e-12."""
    tx = bc.ekf.dense(transition_noise=Q)
    step = bc.make_step(loss, tx, curvature=bc.ekf.observe(forward, VARIANCE))
    starts = [optree.tree_map(lambda p, i=i: p + 0.1 * i, like) for i in range(3)]
    chains = bc.parallel(step, 3)
    params = bc.stack(starts)
    state = chains.init(tx, params)
    for batch in stream(3):
        params, state, _ = chains(params, state, batch)
    for i, p in enumerate(starts):
        s = tx.init(p)
        for batch in stream(3):
            p, s, _ = step(p, s, batch)
        torch.testing.assert_close(params["a"][i], p["a"], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(state[0].root[i], s[0].root, rtol=1e-12, atol=1e-12)


def test_the_empirical_rows_of_gaussian_noise_are_the_gradients_of_its_log_likelihood():
    """``(f - y) x / variance`` for each datum; the outputs alone, without the targets, would be another matrix."""
    x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [1.0]])
    estimate = bc.ekf.observe(lambda w, batch: batch[0] @ w, 0.5, linearisation="empirical")
    found = estimate(torch.ones(1, 1), (x, y))
    assert found.rows.flatten().tolist() == [-4.0, 4.0]
    assert found.force.flatten().tolist() == [0.0]
