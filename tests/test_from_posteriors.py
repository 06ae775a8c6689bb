"""The page for users of posteriors: it names all that is public there, and nothing that is not here."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import bayesopt_chain as bc

PAGE = Path(__file__).parents[1] / "docs" / "howto" / "from_posteriors.md"


def test_every_public_name_of_posteriors_stands_on_the_page():
    posteriors = pytest.importorskip("posteriors")
    theirs = "\n".join(row.split(" | ")[0] for row in PAGE.read_text().splitlines() if row.startswith("| "))
    missing = []
    for found in pkgutil.walk_packages(posteriors.__path__, "posteriors."):
        module = importlib.import_module(found.name)
        own = [
            n for n, x in vars(module).items() if getattr(x, "__module__", None) == found.name and not n.startswith("_")
        ]
        if "build" in own:  # a method: by its path, its state by name; init, update and sample are those of all
            own = [found.name.removeprefix("posteriors."), *({*own} - {"build", "init", "update", "sample"})]
        missing += [(found.name, name) for name in own if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", theirs)]
    assert not missing


def test_every_name_of_ours_on_the_page_is_public():
    for path in sorted(set(re.findall(r"(?<!\w)bc((?:\.\w+)+)", PAGE.read_text()))):
        at, public = bc, True
        for name in path.strip(".").split("."):
            public = public and (not inspect.ismodule(at) or name in at.__all__)
            at = getattr(at, name)
        assert public, path
