"""What a user may type, and what ``import bayesopt_chain`` costs and leaves for later."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bayesopt_chain as bc
from benchmarks.measure import RESULTS, known

FILES = "import sys, torch, torchopt; before = set(sys.modules); {}; print(*sorted(set(sys.modules) - before))"


def imported_by(statement: str) -> set[str]:
    out = subprocess.run([sys.executable, "-c", FILES.format(statement)], capture_output=True, text=True, check=True)
    return set(out.stdout.split())


def test_importing_the_package_loads_no_room_of_it_and_all_names_can_be_listed():
    ours = {name for name in imported_by("import bayesopt_chain") if name.startswith("bayesopt")}
    assert ours == {"bayesopt_chain", "bayesopt_chain._lazy"}
    assert {*bc.__all__, "__version__"} <= {*dir(bc)}
    with pytest.raises(AttributeError, match="no attribute 'sghmcc'"):
        bc.sghmcc  # noqa: B018


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        "bc.optim.SGHMC; bc.sample; bc.fit_laplace; bc.diagnostics.doctor",
        "tx = bc.links.add_momentum(0.9); p = torch.zeros(2); s = tx.init(p); tx.update(p, s, params=p); tx.chain(tx)",
        "bc.posterior.train_by_evidence",
        "tx = bc.sghmc(0.1, temperature=0.1); p = torch.ones(2, 3)\n"
        "chains = bc.parallel(bc.make_step(lambda p, b: (p**2).sum(), tx), 2); chains(p, chains.init(tx, p), ())",
    ],
)
def test_what_is_asked_for_first_is_there_and_loads_neither_tensors_over_ranks_nor_a_compiler(asked):
    heavy = {"torch.distributed.tensor", "torch._dynamo", "torch._inductor", "sympy", "arviz", "sklearn", "pandas"}
    assert not heavy & imported_by(f"import bayesopt_chain as bc; {asked}")


def test_the_record_of_the_imports_time_is_within_three_tenths_of_a_second():
    """The names of a loop included, once Python has compiled them."""
    rows = known(RESULTS / "imports.json")["seconds"]
    assert rows.keys() == {"import bayesopt_chain", "and the names of a loop"}
    times = [row["warm"]["wall"][1] for row in rows.values()] + [rows["import bayesopt_chain"]["cold"]["wall"][1]]
    assert max(times) < 0.3


NAMESPACES = [name for name in bc.__all__ if inspect.ismodule(getattr(bc, name))]
OBJECTS = [name for name in bc.__all__ if name not in NAMESPACES]


def test_the_root_has_at_most_78_names_four_of_them_links_and_nothing_else():
    assert len(bc.__all__) == len(set(bc.__all__)) <= 78
    public = {name for name in vars(bc) if not name.startswith("_") and not inspect.ismodule(getattr(bc, name))}
    assert public == set(OBJECTS)
    both = {name for name in bc.links.__all__ if name in bc.__all__}
    assert both == {"add_momentum", "inject_langevin_noise", "scale_by_neg_lr", "scale_by_preconditioner"}
    assert all(getattr(bc, name) is getattr(bc.links, name) for name in both)


def test_every_namespace_has_a_page_in_the_reference():
    """The pages are made from each ``__all__``, so that no name can be missing on one."""
    conf = (Path(__file__).parents[1] / "docs" / "conf.py").read_text()
    (titles,) = re.findall(r"^TITLES = (\{.*?^\})", conf, re.M | re.S)
    assert set(NAMESPACES) <= set(ast.literal_eval(titles))


def test_a_namespace_says_what_it_is_and_names_what_it_holds():
    for name in NAMESPACES:
        module = getattr(bc, name)
        assert module.__doc__ and module.__all__, f"bc.{name} wants a docstring and an __all__"
        assert len(module.__all__) == len(set(module.__all__))
        for member in module.__all__:
            assert not member.startswith("_") and hasattr(module, member), f"bc.{name}.{member}"
            assert inspect.getdoc(getattr(module, member)), f"bc.{name}.{member} wants a docstring"
