"""FSDP1, ZeroRedundancyOptimizer, pipeline stages, DistributedDataParallel and chains under torchrun: right, or refused."""

from pathlib import Path

import pytest
import torch

import bayesopt_chain as bc
from tests.distributed.engines import LINKS, data, ivon, network, noise_under, sghmc, train, weights, with_a_link
from tests.distributed.ranks import launched

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """What every case of ``engines.py`` gave on both ranks, of one launch."""
    ranks = launched(Path(__file__).with_name("engines.py"), tmp_path_factory.mktemp("engines"))
    return {name: [mine[name] for mine in ranks] for name in ranks[0]}


def alone(steps=6):
    """One process with the data of both ranks."""
    model = network()
    optimizer = sghmc(model.named_parameters())
    train(model, optimizer, torch.cat([data(0), data(1)]), steps)
    return weights(model)


@pytest.mark.parametrize("case", ["fsdp1_flat", "fsdp1_original", "zero", "pipeline"])
def test_parts_that_would_share_their_noise_are_refused_on_every_rank_after_one_step(case, cases):
    for steps, said in cases[case]:
        assert steps == 1 and "under one key" in said and "bc.distributed.part(" in said


def test_replicas_with_keys_of_their_own_are_refused_on_every_rank_after_two_steps(cases):
    for steps, said in cases["ddp_with_two_keys"]:
        assert steps == 2 and "noise of two keys" in said and "generator=bc.distributed.generator(seed)" in said


@pytest.mark.parametrize(("case", "steps"), [("forgotten_chain_keys", 2), ("chains_optimizer", 1)])
def test_chains_that_were_given_one_key_are_refused_on_the_rank_that_comes_last(case, steps, cases):
    said = [words for made, words in cases[case] if made == steps]
    assert said and all("generator(seed, chain=rank)" in words for words in said)


def test_a_comparison_now_and_then_finds_keys_that_part_later(cases):
    for before, (_, said) in cases["forked_on_one_rank"]:
        assert before == (3, "") and "noise of two keys" in said


def test_a_fork_asks_for_a_generator_where_several_ranks_run(cases):
    assert all("fork: 2 ranks run" in said for said in cases["forked_without_a_generator"])


def test_replicas_that_made_unequal_numbers_of_steps_are_refused(cases):
    (few, (_, said)), (many, (_, same)) = cases["uneven_batches_without_the_optimizer"]
    assert (few, many) == (2, 5) and "have drawn 2 and 5 times" in said and "Join([model, optimizer])" in said
    assert cases["uneven_batches_without_the_optimizer"][0][1] == (1, said) and said == same


@pytest.mark.parametrize(
    ("case", "steps"),
    [
        ("fsdp2", 9),
        ("chains", 9),
        ("chains_with_dead_leaves", 9),
        ("ddp_with_dead_leaves", 9),
        ("chains_of_an_optimizer_of_chains", 5),
        ("on_purpose", 6),
        ("pipeline_with_parts", 4),
    ],
)
def test_what_is_right_is_not_refused(case, steps, cases):
    assert cases[case] == [(steps, "")] * 2


@pytest.mark.parametrize(("case", "steps"), [("ddp", 9), ("hsdp", 4), ("hsdp_forked", 5)])
def test_replicas_stay_bit_identical(case, steps, cases):
    (said, mine), (same, theirs) = cases[case]
    assert said == same == (steps, "") and torch.equal(mine, theirs)


def test_joined_replicas_go_on_from_one_state(cases):
    (few, said, mine), (many, same, theirs) = cases["uneven_batches"]
    assert few == many == 5 and said == same == (9, "") and torch.equal(mine, theirs)


def test_parts_of_fsdp1_draw_the_noise_of_one_process(cases):
    for said, mine in cases["fsdp1_original_with_parts"]:
        assert said == (6, "")
        torch.testing.assert_close(mine, alone(), rtol=0, atol=1e-6)


def test_partitions_of_zero_draw_the_noise_of_one_process(cases):
    for said, mine in cases["zero_with_parts"]:
        assert said == (6, "")
        torch.testing.assert_close(mine, alone(), rtol=0, atol=1e-6)


def test_flattened_parts_draw_neighbouring_numbers_of_one_leaf(cases):
    from bayesopt_chain.random.philox import draw_elements, whole_leaves
    from bayesopt_chain.random.stream import leaf_numbers

    (first, (a,)), (second, (b,)) = cases["fsdp1_flat_with_parts"]
    assert first == second == (3, "")
    key = torch.randint(2**63 - 1, (), dtype=torch.int64, generator=bc.distributed.generator(0))
    whole = whole_leaves([a.numel() + b.numel()], leaf_numbers(("_flat_param",)))
    (wanted,) = draw_elements(key, torch.tensor(2), whole, torch.float32)
    assert torch.equal(torch.cat([a, b]), wanted)


@pytest.mark.parametrize("case", ["ivon_fsdp2", "ivon_tensor_parallel", "ivon_ddp"])
def test_a_gaussian_posterior_on_shards_is_that_of_one_process_and_sends_no_message_of_its_own(case, cases):
    wanted, _ = ivon(network(), torch.cat([data(0), data(1)]))
    for mine, sent in cases[case]:
        assert sent == 0
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)


def test_one_chain_under_ddp_is_sampled_to_disk_and_goes_on_where_it_stopped(cases):
    """With dropout, buffers and the batches of both ranks: the replicas and the draws have the bits of a run in one piece."""
    (whole, first, parts, again), (same, second, others, later) = cases["ddp_as_step"]
    assert len(whole) == 7 and torch.equal(first, second) and torch.equal(again, later) and torch.equal(first, again)
    for draws in (parts, same, others):
        assert torch.equal(draws, whole)


def test_fsdp1_is_no_step_and_says_so(cases):
    assert all("under FullyShardedDataParallel (FSDP1)" in said for said in cases["fsdp1_as_step"])


@pytest.mark.parametrize("case", ["ddp inside the loss", "hooks"])
def test_replicas_that_a_run_would_keep_as_chains_are_refused_on_every_rank_at_their_second_step(case, cases):
    for found in cases["one_chain_kept_as_two"]:
        steps, said = found[case]
        assert steps == 2 and "they run one chain, and this run would keep it as two" in said


def test_chains_of_one_generator_are_refused_on_the_rank_that_comes_last(cases):
    said = [found["one generator"] for found in cases["one_chain_kept_as_two"]]
    assert any(steps == 2 and "generator=bc.distributed.generator(seed, chain=rank)" in words for steps, words in said)


def test_chains_with_keys_of_their_own_are_kept_as_chains(cases):
    assert cases["chains_kept_as_chains"] == [((6, ""), 2)] * 2


def test_batches_of_ranks_are_together_the_batches_of_one_process_and_parts_in_one_order_are_refused(cases):
    (mine, said), (theirs, same) = cases["epochs"]
    whole = bc.epochs(torch.arange(24.0), 8, seed=3)
    for a, b, both in zip(mine, theirs, [*whole, *whole], strict=True):
        assert torch.equal(torch.cat([a, b]), both)
    assert all("with one seed, 3" in words and "mesh=" in words for words in (said, same))


def test_lightnings_strategy_for_fsdp2_samples_as_one_process_does(cases):
    for mine in cases["lightning_model_parallel"]:
        if mine is None:
            pytest.skip("needs Lightning")
        torch.testing.assert_close(mine, alone(steps=4), rtol=0, atol=1e-6)


def test_laplace_of_adapters_of_a_sharded_model_is_that_of_one_process(cases):
    for case in cases["lora"]:
        if case is None:
            pytest.skip("needs peft")
        off, names = case
        assert max(off.values()) <= 1e-10 and len(names) == 4 and all("lora_" in name for name in names)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", ["SGHMC", "SGD", "Adam", "Optimizer"])
@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_flattened_and_full_state_dicts_go_on_bit_for_bit(engine, name, flat, full, cases):
    for case in cases["optimizer_state_dicts"]:
        said, then, straight, resumed = case[engine, name, flat, full]
        assert said == then == (3, "") and torch.equal(straight, resumed)


def test_a_link_of_a_users_own_is_refused_on_shards_unless_it_says_what_it_does_with_them(cases):
    for said, _ in cases["links_on_shards"]:
        assert "unit() needs whole leaves, and [0] is a DTensor" in said["nothing said"]


@pytest.mark.parametrize("name", ["tree", "elementwise"])
def test_a_link_that_says_truly_what_it_does_with_shards_makes_the_steps_of_one_process(name, cases):
    model = network()
    train(model, with_a_link(LINKS[name], model), torch.cat([data(0), data(1)]))
    for found, _ in cases["links_on_shards"]:
        said, mine = found[name]
        assert said == (6, "")
        torch.testing.assert_close(mine, weights(model), rtol=0, atol=1e-6)


def test_a_gradient_over_its_norm_is_that_of_the_whole_leaf(cases):
    for _, move in cases["links_on_shards"]:
        torch.testing.assert_close(move, torch.tensor([-0.6, 0.0, 0.0, -0.8]))


def test_names_of_wrappers_leave_the_noise_alone(cases):
    for found in cases["wrappers"]:
        names = [name for _, _, (name, *_) in found.values()]
        assert len(found) == 7 and {"module.0.weight", "_orig_mod.module.0._checkpoint_wrapped_module.weight"} <= {
            *names
        }
        for how, (said, drawn, _) in found.items():
            _, plain, _ = noise_under(())
            assert said == (3, ""), how
            assert len(drawn) == len(plain) == 6 and all(map(torch.equal, drawn, plain)), how


def test_comparing_costs_less_than_a_hundredth_of_the_steps(cases):
    for share in cases["cost"]:
        assert share < 0.01
