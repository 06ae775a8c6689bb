"""Every transform of the registry against every law."""

import inspect
import typing
from dataclasses import dataclass

import optree
import pytest
import torch
import torchopt
from torchopt.base import GradientTransformation

import bayesopt_chain as bc
from bayesopt_chain.core.link import Link, Traits
from bayesopt_chain.testing import LAWS, assert_laws, assert_zero_temperature_limit
from bayesopt_chain.testing import _laws as testing
from tests import pretended
from tests.registry import TRANSFORMS

T = 0.01
AT_ZERO = (  # what the comparison with the optimizer cannot see: it follows values alone
    testing.pure_updates_touch_nothing,
    testing.in_place_keeps_the_state_tensors,
    testing.a_missing_gradient_leaves_its_leaf_alone,
    testing.updates_can_be_differentiated,
)


def tiered(rows):
    """The first row of each public name; its variants are slow."""
    first = {(row.namespace, row.function): row for row in reversed(rows)}
    return [
        pytest.param(row, id=str(row), marks=() if first[row.namespace, row.function] is row else pytest.mark.slow)
        for row in rows
    ]


def obeys(row, build, laws):
    """Every law is tried; those that the row skips must fail, and all others that fail are raised together."""
    broken = {}
    for law in laws:
        torch.manual_seed(0)
        try:
            law(build)
        except Exception as error:
            error.add_note(f"{row} breaks {law.__name__}")
            broken[law.__name__] = error
    obeyed = {law.__name__ for law in laws} & set(row.skip) - set(broken)
    assert not obeyed, f"{row} obeys {sorted(obeyed)}: take them off its skip list"
    if errors := [error for name, error in broken.items() if name not in row.skip]:
        raise ExceptionGroup(f"{row} breaks laws", errors)


@pytest.mark.parametrize("row", tiered(TRANSFORMS))
def test_it_obeys_every_law(row):
    obeys(row, lambda: row.build(T), LAWS)


@pytest.mark.parametrize("row", tiered([row for row in TRANSFORMS if row.limit is not None]))
def test_it_obeys_the_laws_of_memory_at_temperature_zero(row):
    obeys(row, lambda: (row.cold or row.build)(0.0), AT_ZERO)


@pytest.mark.parametrize("row", tiered(TRANSFORMS))
def test_it_leaves_nothing_on_the_host(row):
    """Parameters on a device that refuses what CUDA refuses, three updates; they stay there."""
    with pretended.Here():
        tx, params = row.build(T), {name: torch.rand(n, device=pretended.DEVICE) for name, n in (("a", 3), ("b", 4))}
        state = tx.init(params)
        for _ in range(3):
            updates, state = tx.update(optree.tree_map(lambda p: p / 2, params), state, params=params, inplace=False)
            params = optree.tree_map(torch.add, params, updates)
    assert all(p.device == pretended.DEVICE and bool(p.isfinite().all()) for p in params.values())


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in TRANSFORMS if row.limit is not None], ids=str)
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


FALSE = [
    (torchopt.transform.scale(0.5), bc.response.Linear((2.0,))),
    (torchopt.transform.trace(0.9), bc.response.Linear((1.0,), (1.0, -0.8))),
    (torchopt.transform.trace(0.9), bc.response.Nonlinear()),
    (torchopt.transform.add_decayed_weights(0.1), bc.response.Decay(0.2)),
]
TRUE = [
    (torchopt.transform.scale(0.5), bc.response.Linear((0.5,))),
    (torchopt.transform.trace(0.9), bc.response.Linear((1.0,), (1.0, -0.9))),
    (torchopt.clip_grad_norm(0.1), bc.response.Nonlinear()),
    (torchopt.transform.add_decayed_weights(0.1), bc.response.Decay(0.1)),
]


def declaring(made, declared):
    link = bc.with_response(made, declared, name="mine")
    return bc.chain(link, bc.inject_langevin_noise(1e-3), bc.scale_by_neg_lr(0.2))


@pytest.mark.parametrize(("made", "declared"), FALSE)
def test_a_false_response_breaks_a_law(made, declared):
    assert testing.responses_are_as_declared in LAWS
    with pytest.raises(AssertionError, match="mine declares"):
        testing.responses_are_as_declared(lambda: declaring(made, declared))


@pytest.mark.parametrize(("made", "declared"), TRUE)
def test_a_true_response_breaks_no_law_and_the_state_stays_in_its_tensors(made, declared):
    testing.responses_are_as_declared(lambda: declaring(made, declared))
    testing.in_place_equals_pure(lambda: declaring(made, declared))
    tx, params, state = testing._underway(lambda: declaring(made, declared))
    before = [t.data_ptr() for t in optree.tree_leaves(state)]
    _, state = tx.update(testing.smooth_gradient(params), state, params=params, inplace=True)
    assert before == [t.data_ptr() for t in optree.tree_leaves(state)]


def test_the_law_of_states_names_the_link_that_replaces_a_tensor():
    class Replaces(Link):
        def init(self, leaves, context):
            return tuple(map(torch.clone, leaves))

        def update(self, g, state, op, context):
            return g, tuple(x + 1 for x in state)

    with pytest.raises(AssertionError, match=r"replaced the tensor \(0,\) of the state of .*Replaces.*copy_"):
        testing.in_place_keeps_the_state_tensors(lambda: bc.Chain((Replaces(),)))


def test_a_link_that_breaks_a_law_is_found():
    calls = []

    def update(updates, state, *, params=None, inplace=True):
        calls.append(1)
        return optree.tree_map(lambda g: g * len(calls), updates), state

    with pytest.raises(AssertionError, match="in_place_equals_pure"):
        assert_laws(lambda: bc.chain(GradientTransformation(lambda params: (), update)))
