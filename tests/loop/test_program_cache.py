"""Captured programs are kept on disk, by everything that they depend on."""

import uuid

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.loop.capture import cache
from bayesopt_chain.loop.capture.replays import compiler_found

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler"),
]


def captured():
    """What five steps of a captured sampler give, and whether its program was compiled or found."""
    from torch._dynamo.utils import counters

    before = counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]
    tx, params = bc.sghmc(0.1, temperature=0.1), {"w": torch.ones(33)}
    torch.manual_seed(0)
    step, state = bc.make_step(lambda p, batch: (p["w"] * batch).tanh().square().sum(), tx), tx.init(params)
    fast = bc.capture(step, params, state, torch.linspace(-1, 1, 33), backend="inductor")
    for _ in range(5):
        params, state, _ = fast(params, state, torch.linspace(-1, 1, 33))
    hits, misses = (counters["inductor"][f"fxgraph_cache_{kind}"] - n for kind, n in zip(("hit", "miss"), before))
    return params["w"].clone(), hits, misses


def test_a_program_is_found_again_with_the_same_bits_and_not_for_another_processor_thread_count_or_version(monkeypatch):
    mine = cache.tag()
    for change in (
        lambda patch: patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another"),
        lambda patch: patch.setattr(torch, "get_num_threads", lambda: 1000),
        lambda patch: patch.setattr(cache, "__version__", "another"),
    ):
        with monkeypatch.context() as patch:
            change(patch)
            assert cache.tag() != mine
    new, newer = uuid.uuid4(), uuid.uuid4()  # whatever the folder holds already
    monkeypatch.setattr(cache, "tag", lambda on_cpu: f"{mine} {new}")
    (first, *compiled), (again, *found) = captured(), captured()
    assert compiled == [0, 1] and found == [1, 0] and torch.equal(first, again)
    monkeypatch.setattr(cache, "tag", lambda on_cpu: f"{mine} {newer}")
    other, *compiled = captured()
    assert compiled == [0, 1] and torch.equal(first, other)


def test_a_program_on_a_device_does_not_ask_for_the_instructions_of_the_processor(monkeypatch):
    """torch finds them by compiling programs, which takes 17 s on two cores where none of them is on disk."""
    asked = []
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.pick_vec_isa", lambda: asked.append(1))
    assert cache.tag(on_cpu=False) == cache.tag(on_cpu=False) and not asked
    cache.tag()
    assert asked
