"""What a user may type, and what ``import bayesopt_chain`` costs and leaves for later."""

import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import bayesopt_chain as bc

FILES = "import sys, torch, torchopt; before = set(sys.modules); {}; print(*sorted(set(sys.modules) - before))"


def imported_by(statement: str) -> set[str]:
    out = subprocess.run([sys.executable, "-c", FILES.format(statement)], capture_output=True, text=True, check=True)
    return set(out.stdout.split())


def test_importing_the_package_loads_no_room_of_it():
    assert {name for name in imported_by("import bayesopt_chain") if name.startswith("bayesopt")} == {
        "bayesopt_chain",
        "bayesopt_chain._lazy",
    }


@pytest.mark.slow
def test_a_training_loop_loads_neither_torchs_tensors_over_ranks_nor_a_compiler():
    heavy = ("torch.distributed.tensor", "torch._dynamo", "torch._inductor", "sympy", "arviz", "sklearn", "pandas")
    every = imported_by("import bayesopt_chain as bc; bc.optim.SGHMC; bc.sample; bc.fit_laplace; bc.diagnostics.doctor")
    assert not [name for name in every if name in heavy]


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'sghmcc'"):
        bc.sghmcc  # noqa: B018


def test_all_names_can_be_listed_before_they_are_loaded():
    assert {*bc.__all__, "__version__"} <= {*dir(bc)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        "tx = bc.links.add_momentum(0.9); p = torch.zeros(2); s = tx.init(p); tx.update(p, s, params=p); tx.chain(tx)",
        "bc.posterior.train_by_evidence",
    ],
    ids=["a chain", "the room of fits"],
)
def test_what_is_asked_for_first_is_there(asked):
    imported_by(f"import bayesopt_chain as bc; {asked}")


def test_the_record_of_the_imports_time_is_within_three_tenths_of_a_second():
    """The names of a loop included, once Python has compiled them."""
    rows = json.loads((Path(__file__).parents[1] / "benchmarks" / "results" / "imports.json").read_text())["seconds"]
    assert rows.keys() == {"import bayesopt_chain", "and the names of a loop"}
    assert max(row["warm"]["wall"][1] for row in rows.values()) < 0.3
    assert rows["import bayesopt_chain"]["cold"]["wall"][1] < 0.3


NAMESPACES = [name for name in bc.__all__ if inspect.ismodule(getattr(bc, name))]
OBJECTS = [name for name in bc.__all__ if name not in NAMESPACES]


def test_the_root_has_at_most_78_names():
    assert len(bc.__all__) == len(set(bc.__all__)) <= 78


def test_links_live_in_their_namespace_and_the_root_has_those_of_nearly_every_chain():
    both = {name for name in bc.links.__all__ if name in bc.__all__}
    assert both == {"add_momentum", "inject_langevin_noise", "scale_by_neg_lr", "scale_by_preconditioner"}
    assert all(getattr(bc, name) is getattr(bc.links, name) for name in both)


def test_nothing_else_is_public_at_the_root():
    public = {name for name in vars(bc) if not name.startswith("_") and not inspect.ismodule(getattr(bc, name))}
    assert public == set(OBJECTS)


def test_every_namespace_has_a_page_in_the_reference():
    """The pages are made from each ``__all__``, so that no name can be missing on one."""
    conf = ast.parse((Path(__file__).parents[1] / "docs" / "conf.py").read_text())
    (titles,) = [
        ast.literal_eval(node.value)
        for node in conf.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TITLES"
    ]
    assert set(NAMESPACES) <= set(titles), f"no title in docs/conf.py for {set(NAMESPACES) - set(titles)}"


def test_a_namespace_says_what_it_is_and_names_what_it_holds():
    for name in NAMESPACES:
        module = getattr(bc, name)
        assert module.__doc__ and module.__all__, f"bc.{name} wants a docstring and an __all__"
        assert len(module.__all__) == len(set(module.__all__))
        for member in module.__all__:
            assert not member.startswith("_") and hasattr(module, member), f"bc.{name}.{member}"
            assert inspect.getdoc(getattr(module, member)), f"bc.{name}.{member} wants a docstring"
