"""What a user may type: few names at the root, each with an example that runs, each in the documents."""

import inspect
import re
from pathlib import Path

import pytest

import bayesopt_chain as bc

ROOT = Path(__file__).parents[1]
DOCUMENTS = "\n".join(path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))))
NAMESPACES = [name for name in bc.__all__ if inspect.ismodule(getattr(bc, name))]
OBJECTS = [name for name in bc.__all__ if name not in NAMESPACES]


def test_the_root_has_at_most_85_names():
    assert len(bc.__all__) == len(set(bc.__all__)) <= 85


def test_nothing_else_is_public_at_the_root():
    public = {name for name in vars(bc) if not name.startswith("_") and not inspect.ismodule(getattr(bc, name))}
    assert public == set(OBJECTS)


@pytest.mark.parametrize("name", OBJECTS)
def test_a_public_name_has_a_summary_and_an_example(name):
    doc = getattr(bc, name).__doc__ or ""
    summary = doc.strip().partition("\n\n")[0]
    assert summary and ">>> " in doc, f"bc.{name} wants a one-line summary and an Example:"


@pytest.mark.parametrize("name", bc.__all__)
def test_a_public_name_is_in_the_documents(name):
    assert re.search(rf"\bbc\.{name}\b", DOCUMENTS), f"bc.{name} stands in no document: add it to docs/names.md"


@pytest.mark.parametrize("name", NAMESPACES)
def test_a_namespace_says_what_it_is_and_names_what_it_holds(name):
    module = getattr(bc, name)
    assert module.__doc__ and module.__all__, f"bc.{name} wants a docstring and an __all__"
    assert len(module.__all__) == len(set(module.__all__))
    for member in module.__all__:
        assert not member.startswith("_") and hasattr(module, member), f"bc.{name}.{member}"
        assert inspect.getdoc(getattr(module, member)), f"bc.{name}.{member} wants a docstring"
