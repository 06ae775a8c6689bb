"""Every public name says what it takes, returns and raises, and shows itself at work."""

import inspect
import types
from collections.abc import Iterator

import pytest

import bayesopt_chain as bc

SILENT = {"categorical", "bernoulli", "poisson", "fisher_matrix", "fisher_diagonal"}  # functions that refuse nothing


def public(module: types.ModuleType, prefix: str = "bc") -> Iterator[tuple[str, object]]:
    """Names and objects of ``__all__``, namespaces included."""
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, types.ModuleType):
            yield from public(value, f"{prefix}.{name}")
        elif callable(value):
            yield f"{prefix}.{name}", value


NAMES = dict(public(bc))
FUNCTIONS = [name for name, value in NAMES.items() if inspect.isfunction(value)]
CLASSES = [name for name, value in NAMES.items() if inspect.isclass(value) and not hasattr(value, "_fields")]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_says_what_it_takes_returns_and_raises(name):
    function = NAMES[name]
    doc, signature = inspect.getdoc(function) or "", inspect.signature(function)
    missing = [part for part in ("Args:", "Returns:", "Raises:", "Example:") if part not in doc]
    if not signature.parameters and "Args:" in missing:
        missing.remove("Args:")
    if signature.return_annotation in (None, "None") and "Returns:" in missing:
        missing.remove("Returns:")
    if name.split(".")[-1] in SILENT and "Raises:" in missing:
        missing.remove("Raises:")
    assert not missing, f"{name} lacks {', '.join(missing)}"
    for argument in signature.parameters:
        words = doc.split("Args:")[-1].split("Returns:")[0]
        assert "Args:" not in doc or argument in words, f"{name} does not say what {argument} is"


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_shows_itself_at_work_or_is_only_returned(name):
    value = NAMES[name]
    doc = inspect.getdoc(value) or ""
    if value.__module__ == bc.response.__name__:  # the vocabulary of one page, which shows it
        doc += bc.response.__doc__ or ""
    assert "Example:" in doc or "Attributes:" in doc or issubclass(value, Exception), name


def test_result_types_have_a_docstring_of_their_own():
    for name, value in NAMES.items():
        if hasattr(value, "_fields"):
            assert not (inspect.getdoc(value) or "").startswith(f"{value.__name__}("), name
