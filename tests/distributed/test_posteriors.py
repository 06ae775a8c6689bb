"""Gaussian posteriors of parameters that are spread over ranks: those of one process, or refused by name."""

import pytest
import torch

from tests.distributed import posteriors
from tests.distributed.ranks import run

pytestmark = pytest.mark.slow


def every():
    """All cases, on this rank."""
    return {
        "families": posteriors.compared(),
        "laplace": posteriors.curved(),
        "refused": posteriors.refused(),
        "line": posteriors.line(sharded=True),
        "last layer": posteriors.last_layer(),
        "filters": posteriors.filtered(),
        "priors": posteriors.priors(),
        "layers": posteriors.layered(),
        "no layers": posteriors.unlayered(),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run(every, 4, tmp_path_factory.mktemp("posteriors"))


def of(case, ranks):
    return [found[case] for found in ranks]


def test_diagonal_families_make_the_steps_of_one_process_in_every_layout(ranks):
    for found in of("families", ranks):
        assert len(found) == 2 * 5 + 3 * 2
        for case, (differ, _, plain) in found.items():
            assert differ <= 1e-12, (case, differ)
            assert not plain, f"{case}: memory of a leaf is spread as the leaf is"


def test_draws_and_updates_of_a_diagonal_family_send_nothing_but_a_norm(ranks):
    for found in of("families", ranks):
        for (family, way), (_, messages, _) in found.items():
            assert (messages == 0) == ("clipped" not in family), (family, way, messages)


def test_diagonal_laplace_of_a_sharded_model_is_that_of_one_process_and_is_added_up_without_messages(ranks):
    for found in of("laplace", ranks):
        for way, (differ, messages, _, _, count) in found.items():
            assert max(differ) <= 1e-10, (way, differ)
            assert messages == 0 and count == (8.0, 8.0)


def test_a_draw_of_a_sharded_posterior_is_one_draw_in_every_layout(ranks):
    every = of("laplace", ranks)
    for name, x in every[0]["fsdp"][2].items():
        assert x.shape[0] == 2 and x.std() > 0.0
        for found in every:
            for way in ("fsdp", "tp"):
                torch.testing.assert_close(found[way][2][name], x, rtol=1e-12, atol=1e-12)


def test_random_signs_estimate_the_diagonal_of_a_sharded_model(ranks):
    """The relative variance of one probe is at most 2, that of 100 at most 0.02: 26 entries stay within 5 deviations but for
    1.5e-5 of all seeds; seeds are fixed. Without the factor for the average over ranks they would be a sixteenth."""
    for found in of("laplace", ranks):
        for way, (_, _, _, most, _) in found.items():
            assert 0.0 < most <= 5 * 0.02**0.5, (way, most)


def test_the_last_layer_of_a_sharded_model_has_the_posterior_of_one_process(ranks):
    for off in of("last layer", ranks):
        assert len(off) == 2 and max(off) <= 1e-12


def test_a_diagonal_filter_of_a_sharded_model_is_that_of_one_process_in_means_variances_and_evidence(ranks):
    for found in of("filters", ranks):
        assert len(found) == 8 and max(off for off, _ in found.values()) <= 1e-12, found


def test_an_update_of_a_diagonal_filter_sends_one_sum_for_each_question_that_couples_leaves(ranks):
    """The products of rows; where the force is no sum of innovations its products with the rows, and that with the move."""
    sums = {("categorical", "tangent"): 3, ("gaussian", "tangent"): 1}
    for found in of("filters", ranks):
        for (*case, way), (_, sent) in found.items():
            assert sent == sums.get(tuple(case), 2), (case, way, sent)


def test_a_filter_starts_from_a_sharded_posterior_and_what_one_rank_refuses_all_refuse(ranks):
    for off, said in of("priors", ranks):
        assert off <= 1e-12
        assert "prior_precision is not positive at 0.weight" in said["negative"]
        assert "is not spread over the ranks as its parameter is" in said["plain prior"]
        assert "bc.ekf.observe_by_backward" in said["plain rows"]
        assert "A filter needs all rows" in said["no rows"] and "these are DTensors" in said["smooth"]


def test_kronecker_factors_by_layers_give_the_posterior_of_one_process(ranks):
    """Increments, variances, solutions, the covariance of draws, evidence, density, the next task's prior, a temperature."""
    for found in of("layers", ranks):
        assert set(found) == {("fsdp", "network"), ("fsdp", "Tower"), ("hsdp", "network")}
        for way, (off, *_) in found.items():
            assert len(off) == 8 and max(off.values()) <= 1e-10, (way, off)


def test_each_layer_of_kronecker_factors_is_on_one_rank_and_takes_the_same_messages_in_every_layout(ranks):
    every = of("layers", ranks)
    for (way, model), (_, asked, _, names, _) in every[0].items():
        owned = [name for found in every for name in found[way, model][2]]
        assert sorted(owned) == names and len(owned) == len(set(owned))
        assert all(len(found[way, model][2]) <= 2 for found in every), "a layer each, a weight and a bias"
        axes = 2 if way == "hsdp" else 1  # of the mesh, with a message each
        factors = {"network": 6, "Tower": 14}[
            model
        ]  # a weight has two, its bias one more; of convolutions and norms four
        assert asked["reduce"] == factors * axes and asked["allgather"] == 3 * axes
        assert asked["update"] == {}
        assert asked["solve"]["broadcast"] == len(names) * axes and asked["solve"]["all_gather_into_tensor"] == len(
            names
        )


def test_a_draw_from_layers_on_ranks_is_one_draw(ranks):
    for found in of("layers", ranks):
        for way, (*_, draw) in found.items():
            for name, x in draw.items():
                assert x.shape[0] == 2 and torch.equal(x, ranks[0]["layers"][way][4][name])


def test_models_that_kronecker_factors_by_layers_do_not_describe_are_refused_on_every_rank(ranks):
    for rank, said in enumerate(of("no layers", ranks)):
        assert ("weights other than 1" if rank == 3 else "rank 3 of the mesh failed") in said["weights"]
        assert ("one entry a datum" if rank == 1 else "rank 1 of the mesh failed") in said["one rank"]
        assert "shape: it is used by linalg_matrix_exp" in said["untapped"]
        assert "not sharded over mesh" in said["plain"]
        assert "0.weight: its layer computes with a DTensor" in said["tensor parallel"]


def test_families_and_increments_that_couple_elements_are_refused_by_name(ranks):
    for said in of("refused", ranks):
        assert len(said) == 10
        for name, text in said.items():
            assert "whole leaves" in text or "DTensors" in text or "is not spread" in text, (name, text)
            assert "vi." not in name or "bc.vi.mean_field" in text
            assert "ekf." not in name or "bc.ekf.diagonal takes them" in text
        assert "bc.curvature.diagonal_by_backward" in said["laplace, rows"]


def test_ivon_on_four_ranks_is_ivon_in_one_process_and_the_exact_posterior(ranks):
    """Of a regression with 64 data: the mean solves the normal equations, a variance is one over the diagonal of the precision.

    A Hessian remembers 100 steps. With several inputs one estimate of it has the relative variance ``1 + (H^2)_ii / H_ii^2``,
    below 3, the mean of 200 steps that of 2; the mean of the Gaussian moves within a deviation, and forgets in 20 steps. Both
    averages are held to 5 standard errors (24 entries: 1.4e-5 of all seeds; the seed is fixed).
    """
    alone, (x, y) = posteriors.line(sharded=False), posteriors.regression()
    precision = x.T @ x + torch.eye(6, dtype=torch.float64)
    mean, variance = torch.linalg.solve(precision, x.T @ y).T, 1 / precision.diagonal()
    for rank, (*last, means, variances) in enumerate(of("line", ranks)):
        for mine, whole in zip(last, alone):
            torch.testing.assert_close(mine, whole[rank : rank + 1], rtol=1e-9, atol=1e-11)
        assert (variances / variance - 1).abs().max() <= 5 * (3 / 200) ** 0.5
        assert ((means - mean[rank]).abs() / variance.sqrt()).max() <= 5 * (20 / 200) ** 0.5
