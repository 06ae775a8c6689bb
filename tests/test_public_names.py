"""What a user may type: few names at the root, each with an example that runs, each in the reference."""

import ast
import inspect
from pathlib import Path

import bayesopt_chain as bc

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
