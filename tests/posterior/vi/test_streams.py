"""Every draw of variational inference comes from the counter-based stream."""

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.random.stream import Variables, leaf_numbers

T = 0.1
params = {"b": torch.zeros(3, dtype=torch.float64), "w": torch.zeros(2, 3, dtype=torch.float64)}
MAKERS = {
    "mean_field": lambda **k: bc.vi.mean_field(bc.sgd(0.1), temperature=T, **k),
    "dense": lambda **k: bc.vi.dense(bc.sgd(0.1), temperature=T, **k),
    "low_rank": lambda **k: bc.vi.low_rank(bc.sgd(0.1), rank=2, temperature=T, **k),
    "ivon": lambda **k: bc.vi.ivon(0.1, temperature=T, **k),
    "von": lambda **k: bc.vi.von(0.1, temperature=T, **k),
}
by_leaf = pytest.mark.parametrize("name", [name for name in MAKERS if name != "dense"])


def philox(state, path, shape, draws=1):
    like = torch.empty(1, draws, *shape, dtype=torch.float64)
    ((z,),) = Variables(leaf_numbers((path,))).draw(state.key, state.step, [like])
    return z


@by_leaf
def test_the_counter_based_noise_of_a_leaf_is_a_function_of_its_path(name):
    tx = MAKERS[name]()
    state = tx.init(params)
    noise = tx.sample(state, params).noise
    for z, (key, p) in zip(noise, params.items()):
        assert torch.equal(z, philox(state[0], f"['{key}']", p.shape))


@by_leaf
def test_behind_a_mask_the_path_counts_from_the_root(name):
    link = MAKERS[name]()
    tx = bc.chain(bc.masked(link, {"b": False, "w": True}))
    state = tx.init(params)
    (z, *_) = link.sample(state, {"w": params["w"]}).noise
    assert torch.equal(z, philox(state[0], "['w']", (2, 3)))


@pytest.mark.parametrize("name", ["mean_field", "low_rank", "ivon"])
def test_behind_a_mask_a_step_takes_its_gradient_at_the_draw_of_sample(name):
    link = MAKERS[name]()
    tx, seen = bc.chain(bc.masked(link, {"b": False, "w": True})), []

    def loss(p, batch):
        seen.append(p["w"].detach().clone())
        return p["w"].square().sum()

    state = tx.init(params)
    draw = link.sample(state, {"w": params["w"]})
    bc.make_step(loss, tx)(params, state, torch.zeros(1))
    assert torch.equal(seen[0], draw.params["w"])


def test_the_first_directions_follow_the_stream():
    """Those of the low-rank family are the draws of count 0."""
    state = MAKERS["low_rank"]().init(params)[0]
    zero = state._replace(step=torch.zeros((), dtype=torch.int64))
    ratio = state.scale[1] / philox(zero, "['w']", (2, 3), 2)
    torch.testing.assert_close(ratio, ratio.flatten()[0].expand_as(ratio))


def test_one_key_for_all_lanes_of_vmap_is_refused():
    tx = MAKERS["mean_field"]()
    state = tx.init(params)
    with pytest.raises(ValueError, match="every lane would get the same noise"):
        torch.vmap(lambda p: tx.sample(state, p).params)({k: torch.stack([p, p]) for k, p in params.items()})
