"""Many chains at once are the chains one by one."""

import math
from functools import partial

import optree
import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from tests.loop.beside import each_alone
from tests.refusals import refuse


def loss(params, batch):
    return ((batch @ params["w"] + params["b"]) ** 2).mean() + torch.sin(params["w"]).sum()


def stacked(n):
    g = torch.Generator().manual_seed(0)
    return {
        "w": torch.randn(n, 3, generator=g, dtype=torch.float64),
        "b": torch.randn(n, generator=g, dtype=torch.float64),
    }


@pytest.mark.parametrize(
    "tx",
    [
        bc.sgd(0.1, 0.9),
        bc.sghmc(0.1, temperature=0.1),
        bc.sghmc(lambda c: 0.1 / (1 + c), temperature=0.1),
        bc.sghmc(lambda c: 0.1 * (1 + math.cos(float(c) / 9)), temperature=lambda c: 0.1 / (1 + c)),
        bc.sgld(bc.schedules.cosine(0.1, 20), temperature=0.1),
        bc.adam(0.1, temperature=0.1),
    ],
)
@pytest.mark.parametrize("per_chain", [False, True])
def test_chains_move_as_each_does_alone(tx, per_chain):
    params, step = stacked(4), bc.make_step(loss, tx)
    data = torch.randn(4, 5, 3, dtype=torch.float64)
    chains = bc.parallel(step, 4, batch_dim=0 if per_chain else None)
    batches = [data if per_chain else data[0]] * 4
    each_alone(chains, [step] * 4, params, chains.init(tx, params), batches, lambda b, i: b[i] if per_chain else b)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    "case", ["localised", "nesterov", "decay", "cosine", "adam", "rmsprop", "float32", "in blocks", "other counts"]
)
def test_chains_at_once_have_the_noise_and_the_numbers_of_each_alone(case, inplace):
    """On a gradient that is exact in every order of summation, bit for bit, wherever the chains take one pass over memory."""
    dtype = torch.float32 if case == "float32" else torch.float64
    g = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(4, 300, generator=g, dtype=dtype), "b": torch.ones(4, 2, 3, dtype=dtype)}
    centre, datum = optree.tree_map(lambda t: t[1], params), torch.tensor(1.0, dtype=dtype)
    adaptive = {"adam": bc.links.scale_by_adam(freeze_after=2), "rmsprop": bc.links.scale_by_rms(freeze_after=2)}
    momentum = adaptive.get(case, bc.links.add_momentum(0.9, nesterov=case == "nesterov"))
    noise = bc.inject_langevin_noise(0.1)
    front = {
        "localised": [bc.links.add_localization(centre, 2.0)],
        "decay": [bc.links.add_decayed_weights(0.5)],
    }.get(case, [])
    rate = bc.schedules.cosine(0.1, 20) if case in ("cosine", "other counts") else 0.01
    tx = bc.chain(*front, momentum, noise, bc.scale_by_neg_lr(rate))
    step = bc.make_step(lambda p, b: b * ((p["w"] ** 2).sum() + p["b"].sum()), tx)
    many = bc.make_step(step.source.loss, tx, inplace=inplace)
    chains = bc.parallel(many, 4, chunk=3 if case == "in blocks" else None)
    state = chains.init(tx, params, seed=0)
    if case == "other counts":  # chains of other ages have other numbers
        _, old = step(*[optree.tree_map(lambda t: t[0], tree) for tree in (params, state)], datum)[:2]
        state = bc.stack([old, *bc.unstack(state)[1:]])
    tolerance = {"rtol": 1e-12 if case == "other counts" else 0.0, "atol": 0.0}
    after, _, _ = each_alone(chains, [step] * 4, params, state, [datum] * 3, **tolerance)
    assert (after["w"] is params["w"]) is (inplace and case != "in blocks")
    assert chains.model_draws is False


def test_a_model_that_draws_is_seen_and_each_chain_draws_its_own():
    module = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    forward, start, _ = bc.make_functional(module)
    tx = bc.sghmc(0.1, temperature=0.1)
    chains = bc.parallel(bc.make_step(lambda p, b: forward(p, b).square().mean(), tx), 2)
    params = bc.stack([start, start])
    losses = chains(params, chains.init(tx, params, seed=0), torch.ones(50, 3))[2].loss
    assert chains.model_draws and losses[0] != losses[1]


def several(tx):
    return bc.stack([tx.init(torch.zeros(4)) for _ in range(3)])


def test_wrong_stacks_values_and_blocks_are_refused():
    tx = bc.sgd(0.1)
    step = bc.make_step(lambda p, b: p.sum(), tx)
    warm = bc.sghmc(0.1, temperature=1.0)
    refuse(
        (
            (
                lambda: bc.make_step(lambda p, b: p.sum(), warm)(torch.zeros(4), several(warm), ()),
                "it is of 3 stacked chains",
            ),
            (lambda: bc.parallel(step, 0), "n must be"),
            (lambda: bc.parallel(step, 3)(torch.zeros(2, 4), (), ()), "stacked for 3 chains"),
            (lambda: bc.parallel(tempered_step, 3, each={"lr": torch.zeros(2)}), "each"),
            (lambda: bc.parallel(step, 3, each={"lr": torch.zeros(3)}), TypeError, "step is a function of lr"),
            (
                lambda: bc.parallel(tempered_step, 3, each={"lr": torch.zeros(3)}).init(tx, torch.zeros(3, 4)),
                TypeError,
                "a function of its keywords",
            ),
            (lambda: bc.parallel(tempered_step, 3, chunk=0), "chunk"),
        )
    )


def tempered(lr, temperature):
    return bc.sghmc(lr, temperature=temperature)


def tempered_step(lr, temperature):
    return bc.make_step(loss, tempered(lr, temperature))


@pytest.mark.parametrize("how", [{}, {"chunk": 2}, {"chunk": 3}, {"loop": True}, {"loop": True, "chunk": 3}])
def test_temperature_lr_and_data_order_of_each_chain(how):
    n, params = 4, stacked(4)
    data, rows = torch.randn(20, 3, dtype=torch.float64), torch.randint(20, (n, 5))
    each = {"lr": torch.tensor([0.1, 0.05, 0.1, 0.02]), "temperature": torch.tensor([0.0, 0.1, 1.0, 0.1])}

    def chosen(lr, temperature):
        return bc.make_step(lambda p, b: loss(p, b[0][b[1]]), tempered(lr, temperature))

    chains = bc.parallel(chosen, n, batch_dim=(None, 0), each=each, **how)
    alone = [chosen(**{k: v[i] for k, v in each.items()}) for i in range(n)]
    batches, own = [(data, rows)] * 3, lambda batch, i: (batch[0], batch[1][i])
    each_alone(chains, alone, params, chains.init(tempered, params), batches, own, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("make", [bc.samplers.adam_sghmc, partial(bc.samplers.contour_sgld, low=0.0, high=5.0)])
def test_a_temperature_of_each_chain_reaches_a_noise_that_names_its_neighbours(make):
    def tx(temperature):
        return make(lr=0.01, temperature=temperature)

    each, params, ends = {"temperature": torch.tensor([0.01, 0.1, 1.0])}, stacked(3), []
    for loop in (False, True):
        chains = bc.parallel(lambda temperature: bc.make_step(loss, tx(temperature)), 3, each=each, loop=loop)
        ends.append(chains(params, chains.init(tx, params, seed=0), torch.zeros(1, 3, dtype=torch.float64))[0])
    torch.testing.assert_close(*ends)


def test_values_of_each_are_moved_to_the_parameters():
    each = {"lr": torch.tensor([0.1, 0.2]), "temperature": torch.tensor([0.0, 1.0])}
    chains = bc.parallel(tempered_step, 2, each=each)
    chains.init(tempered, {k: p.to("meta") for k, p in stacked(2).items()})
    assert all(value.is_meta for value in chains.each.values())


@pytest.mark.parametrize("kind", ["branch", "in place"])
def test_what_vmap_refuses_runs_in_a_loop(kind):
    weight = nn.Linear(3, 4).weight

    def refused(params, batch):
        w = params["0.weight"]
        if kind == "branch":
            return (w**2).sum() if w.sum() > 0 else (w**4).sum()
        out = torch.zeros(4)
        out += (batch @ w.t()).mean(0)
        return out.square().sum()

    params = {"0.weight": torch.stack([weight.detach(), -weight.detach(), 2 * weight.detach()])}
    tx = bc.sghmc(0.01, temperature=0.1)
    step, x = bc.make_step(refused, tx), torch.randn(8, 3)
    with pytest.raises(RuntimeError, match="loop=True"):
        chains = bc.parallel(step, 3)
        chains(params, chains.init(tx, params), x)
    chains = bc.parallel(step, 3, loop=True)
    each_alone(chains, [step] * 3, params, chains.init(tx, params), [x], rtol=0.0, atol=0.0)


@pytest.mark.parametrize("loop", [False, True])
def test_batch_norm_whose_statistics_the_chains_would_share_is_refused(loop):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    before = {name: b.clone() for name, b in model.named_buffers()}

    def shared(params, batch):
        return torch.func.functional_call(model, params, (batch,)).square().mean()

    params, tx = {k: torch.stack([p.detach()] * 2) for k, p in model.named_parameters()}, bc.sgd(0.1)
    chains = bc.parallel(bc.make_step(shared, tx), 2, loop=loop)
    with pytest.raises((RuntimeError, ValueError), match=r"statistics.*buffers=buffers"):
        chains(params, chains.init(tx, params), torch.randn(8, 3))
    assert all(torch.equal(before[name], b) for name, b in model.named_buffers())
    model.eval()
    assert chains(params, chains.init(tx, params), torch.randn(8, 3))[2].loss.shape == (2,)


def test_unstack_undoes_stack_and_names_leaves_that_do_not_fit():
    trees = [{"w": torch.full((2,), float(i)), "b": torch.tensor(float(-i))} for i in range(3)]
    for tree, again in zip(trees, bc.unstack(bc.stack(trees))):
        assert all(torch.equal(tree[k], again[k]) for k in tree)
    uneven = r"unstack: every leaf needs an axis 0 of one length, but .*'a'.* has 2.*'b'.* has 3"
    for tree, words in (
        ({"a": torch.zeros(2), "b": torch.zeros(3)}, uneven),
        ([torch.tensor(1.0)], "has none"),
        ({}, "empty"),
    ):
        with pytest.raises(ValueError, match=words):
            bc.unstack(tree)


@pytest.mark.parametrize(
    "tx", [bc.sgd(0.1, 0.9), bc.sghmc(0.1, temperature=0.1), bc.chain(bc.links.scale(2.0), bc.sgd(0.1))]
)
@pytest.mark.parametrize("function", [lambda p, b: (p[0] + p[1]).square().sum(), lambda p, b: p[0].sum() + p[1].sum()])
def test_chains_in_place_may_have_one_gradient_for_two_leaves(tx, function):
    params = [torch.arange(6.0).view(2, 3), torch.ones(2, 3)]
    moved = []
    for inplace in (False, True):
        chains = bc.parallel(bc.make_step(function, tx, inplace=inplace), 2)
        torch.manual_seed(0)
        mine = [p.clone() for p in params]
        state = chains.init(tx, mine)
        for _ in range(2):
            mine, state, _ = chains(mine, state, None)
        moved.append(mine)
    torch.testing.assert_close(*moved, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("of", ["temperature", "lr"])
def test_a_schedule_in_python_math_is_named(of):
    """vmap hides the counts of several chains behind one tensor, from which no Python number can be read."""

    def warm(count):
        return 0.1 * (1 + math.cos(float(count))) / 2

    tx = bc.sghmc(warm if of == "lr" else 0.1, temperature=warm if of == "temperature" else 0.01)
    params, data, step = stacked(2), torch.randn(5, 3, dtype=torch.float64), bc.make_step(loss, tx, monitor=True)
    chains = bc.parallel(step, 2)
    state = chains.init(tx, params)
    with pytest.raises(RuntimeError, match=r"the schedule warm \(.*test_parallel.*torch\.cos in place of math\.cos"):
        chains(params, state, data)
    # of a user's class too, whatever its attributes are called
    own = type("Own", (), {"backend": "mine", "__call__": lambda self, *given: step(*given)})()
    assert bc.parallel(own, 2, loop=True)(params, state, data)[2].loss.shape == (2,)


@pytest.mark.parametrize("size, batch_dim", [(5, 0), (3, 0), (4, 7), (4, "a")])
@pytest.mark.parametrize("how", [{}, {"loop": True}, {"chunk": 2}], ids=str)
def test_an_axis_of_the_batch_that_does_not_count_the_chains_is_refused(size, batch_dim, how):
    """Of more entries than chains the last would never be used where the chains run one after the other, or in blocks."""
    tx, params = bc.sgd(0.1), stacked(4)
    chains = bc.parallel(bc.make_step(loss, tx), 4, batch_dim=batch_dim, **how)
    with pytest.raises(ValueError, match=rf"gives axis {batch_dim!r} .* count the 4 chains"):
        chains(params, chains.init(tx, params), torch.zeros(size, 6, 3, dtype=torch.float64))
