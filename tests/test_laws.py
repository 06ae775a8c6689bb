"""Every transform of the registry against every law."""

import inspect
import typing
from dataclasses import dataclass

import optree
import pytest
import torch
from torchopt.base import GradientTransformation

import bayesopt_chain as bc
from bayesopt_chain.core.link import Link, Traits
from bayesopt_chain.testing import LAWS, assert_laws, assert_zero_temperature_limit
from tests import pretended
from tests.registry import TRANSFORMS

T = 0.01
LIMITED = [row for row in TRANSFORMS if row.limit is not None]


def holds(row, law, build):
    if law.__name__ not in row.skip:
        law(build)
        return
    with pytest.raises(Exception):  # noqa: B017
        law(build)
        pytest.fail(f"{row} obeys {law.__name__}: take it off its skip list")


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("row", TRANSFORMS, ids=str)
def test_it_obeys_the_law(row, law):
    holds(row, law, lambda: row.build(T))


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("row", LIMITED, ids=str)
def test_it_obeys_the_law_at_temperature_zero(row, law):
    holds(row, law, lambda: (row.cold or row.build)(0.0))


@pytest.mark.parametrize("row", TRANSFORMS, ids=str)
def test_it_leaves_nothing_on_the_host(row):
    """Parameters on a device that refuses what CUDA refuses, three updates; they stay there."""
    torch.manual_seed(0)
    with pretended.Here():
        tx, params = row.build(T), {name: torch.rand(n, device=pretended.DEVICE) for name, n in (("a", 3), ("b", 4))}
        state = tx.init(params)
        for _ in range(3):
            updates, state = tx.update(optree.tree_map(lambda p: p / 2, params), state, params=params, inplace=False)
            params = optree.tree_map(torch.add, params, updates)
    assert all(p.device == pretended.DEVICE and bool(p.isfinite().all()) for p in params.values())


@pytest.mark.slow
@pytest.mark.parametrize("row", LIMITED, ids=str)
def test_at_temperature_zero_it_is_its_optimizer(row):
    assert_zero_temperature_limit(row.cold or row.build, row.limit, power=row.power)


def namespace_of(name):
    return getattr(bc, name) if name else bc


def test_every_public_transform_has_a_row():
    listed = {getattr(namespace_of(row.namespace), row.function) for row in TRANSFORMS}
    for namespace in ("", "links", "samplers", "vi", "ekf"):
        for name in namespace_of(namespace).__all__:
            made = getattr(namespace_of(namespace), name)
            makes = inspect.isfunction(made) and typing.get_type_hints(made, None, {"Unpack": typing.Unpack})["return"]
            if inspect.isclass(makes) and issubclass(makes, GradientTransformation):
                assert made in listed, f"no row for {name} of {namespace or 'the root'}"


def test_every_row_makes_what_its_name_says():
    for row in TRANSFORMS:
        assert hasattr(getattr(bc, row.namespace) if row.namespace else bc, row.function), str(row)


def test_names_are_unique_and_skips_give_reasons():
    names = [str(row) for row in TRANSFORMS]
    assert len(set(names)) == len(names)
    known = {law.__name__ for law in LAWS}
    for row in TRANSFORMS:
        assert set(row.skip) <= known and bool(row.skip) == bool(row.why), str(row)


@dataclass(frozen=True)
class ByTheNorm(Link):
    """Multiplies by the norm of the leaf, and says all the same that it treats each element by itself."""

    traits = Traits(on_shards="elementwise")

    def update(self, g, state, op, context):
        return [x * x.norm() for x in g], state


def test_a_link_that_couples_elements_is_not_elementwise():
    with pytest.raises(AssertionError, match="a_part_of_a_leaf_moves_as_in_the_whole"):
        assert_laws(lambda: bc.Chain((ByTheNorm(),)))


def test_a_link_that_does_not_say_what_it_does_with_shards_refuses_them():
    assert Link().traits.on_shards == "refused"


def test_a_link_that_breaks_a_law_is_found():
    calls = []

    def update(updates, state, *, params=None, inplace=True):
        calls.append(1)
        return optree.tree_map(lambda g: g * len(calls), updates), state

    with pytest.raises(AssertionError, match="the_same_state_gives_the_same_update"):
        assert_laws(lambda: bc.chain(GradientTransformation(lambda params: (), update)))
