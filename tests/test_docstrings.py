"""Every public name says what it takes, returns and raises, in which shapes and units, and shows itself at work."""

import ast
import inspect
import re
import textwrap
import types
from collections.abc import Iterator

from torchopt.base import GradientTransformation

import bayesopt_chain as bc

SHAPE = re.compile(r"\[[^\]\n]*\]|\bshapes?\b|\b0-d\b|\bscalars?\b|\btrees?\b|\blike\b|\belementwise\b|\bnumber\b")
# What an argument of that name is measured in, in the words of its own description or of the module's.
UNITS = {
    "temperature": r"per datum|1 / N|1 / n|1/N|the loss|0-d|of its|of the chain|as in|see",
    "burn_in": r"steps?|updates?|draws?|batches|epochs?",
    "steps": r"steps?|updates?",
    "thinning": r"steps?|updates?|draws?",
    "freeze_after": r"steps?|updates?",
    "prior_precision": r"per datum|in all|summed|sum|units?|number|tree",
    "period": r"steps?|updates?|epochs?",
    "every": r"steps?|updates?|draws?|seconds|epochs?",
}
# Rooms whose functions implement papers.
PUBLISHED = tuple(f"bayesopt_chain.{room}." for room in ("samplers", "posterior", "curvature", "diagnostics"))
SOURCE = re.compile(r"\(\d{4}[a-z]?\)|\b(19|20)\d\d\b|arXiv")


def public(module: types.ModuleType, prefix: str = "bc") -> Iterator[tuple[str, object]]:
    """Names and objects of ``__all__``, namespaces included."""
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, types.ModuleType):
            yield from public(value, f"{prefix}.{name}")
        elif callable(value):
            yield f"{prefix}.{name}", value


NAMES = dict(public(bc))
CLASSES = {value: name for name, value in NAMES.items() if inspect.isclass(value)}  # each once, by its longest name


def documented() -> Iterator[tuple[str, types.FunctionType, str, str]]:
    """Every public function, and every public method that a class of this library defines: name, code, docstring, examples.

    A promise of a base class is kept by all that inherit it, and a class's page may show its methods at work.
    """
    for name, value in NAMES.items():
        if inspect.isfunction(value):
            doc = inspect.getdoc(value) or ""
            yield name, value, doc, doc
    for owner, prefix in CLASSES.items():
        pages = "\n\n".join(inspect.getdoc(base) or "" for base in owner.__mro__ if base is not object)
        for name, value in vars(owner).items():
            function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            ours = inspect.isfunction(function) and function.__module__.startswith("bayesopt_chain")
            if ours and not name.startswith("_") and function.__name__ == name:
                bases = [getattr(vars(base).get(name), "__doc__", None) or "" for base in owner.__mro__]
                doc = "\n\n".join(map(inspect.cleandoc, bases))
                yield f"{prefix}.{name}", function, doc, doc + pages.replace(f".{name}(", "Example:")


def refuses(function) -> bool:
    """Whether a ``raise`` stands in the body itself; what a class leaves to those that inherit from it is no refusal."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc is not None]
    return any(not (isinstance(what, ast.Name) and what.id == "NotImplementedError") for what in raised)


def takes(function) -> dict[str, str]:
    """The arguments, without ``self``, and their annotations."""
    found = inspect.signature(function).parameters.items()
    return {name: str(p.annotation) for name, p in found if name not in ("self", "cls")}


def missing_in(function, doc: str, shown: str) -> list[str]:
    """What a docstring leaves out: arguments, result, errors, shapes, units, an example, a source."""
    arguments, result = takes(function), inspect.signature(function).return_annotation
    args = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)*)", doc, re.MULTILINE)
    words, tensors = args[1] if args else "", "Tensor" in f"{arguments} {result}"
    lines = {name: re.search(rf"\b{name}\b[^\n]*(?:\n\s+(?!\w+:)[^\n]*)*", words) for name in arguments}
    unit = {k: " ".join(lines[k][0].split()) for k in arguments.keys() & UNITS.keys() if lines[k]}
    sources = doc + (getattr(inspect.getmodule(function), "__doc__", "") or "")
    is_published = function.__module__.startswith(PUBLISHED)
    lacks = {
        **{f"Args: {name}": not line for name, line in lines.items()},
        "Returns": result not in (None, "None", inspect.Signature.empty) and "Returns:" not in doc,
        "Raises": "Raises:" not in doc and refuses(function),
        "shapes": tensors and not SHAPE.search(doc),
        **{f"units of {name}": not re.search(UNITS[name], line) for name, line in unit.items()},
        "Example": "Example:" not in shown,
        "source": is_published and not SOURCE.search(sources) and "." not in function.__qualname__,
    }
    return [what for what, is_missing in lacks.items() if is_missing]


def stated(owner: type) -> list[str]:
    """The fields of a record, or the arguments with which a class is made."""
    if hasattr(owner, "_fields") and not issubclass(owner, GradientTransformation):
        return [name for name in owner._fields if not name.startswith("_")]
    if hasattr(owner, "__dataclass_fields__"):
        return [name for name in owner.__dataclass_fields__ if not name.startswith("_")]
    made = vars(owner).get("__init__")
    return list(takes(made)) if inspect.isfunction(made) and not issubclass(owner, Exception) else []


def test_no_docstring_of_a_function_or_method_leaves_anything_out():
    found = {name: missing_in(function, doc, shown) for name, function, doc, shown in documented()}
    assert len(found) > 350 and {name: lacks for name, lacks in found.items() if lacks} == {}


def missing_in_class(owner: type) -> list[str]:
    """What the docstring of a class leaves out, with those of the functions and classes to which it refers."""
    own = doc = inspect.getdoc(owner) or ""
    for target in re.findall(r":(?:func|class):`~?(?:bayesopt_chain\.)?([\w.]+)`", own):
        found = NAMES.get(f"bc.{target}") or getattr(inspect.getmodule(owner), target, None)
        doc += "\n\n" + (inspect.getdoc(found) or "")
    is_result, is_word = hasattr(owner, "_fields"), owner.__module__ == bc.response.__name__  # of a page that shows it
    shows = is_result or is_word or issubclass(owner, Exception) or "Example:" in own or "Attributes:" in own
    silent = [key for key, x in vars(owner).items() if isinstance(x, property) and key[0] != "_" and not x.__doc__]
    lacks = {
        **{f"Attributes: {word}": not re.search(rf"\b{word}\b", doc) for word in stated(owner)},
        "Example": not shows,
        "a docstring of its own": is_result and own.startswith(f"{owner.__name__}("),
        f"docstrings of {silent}": silent,
    }
    return [what for what, is_missing in lacks.items() if is_missing]


def test_no_docstring_of_a_class_leaves_anything_out():
    assert {name: lacks for owner, name in CLASSES.items() if (lacks := missing_in_class(owner))} == {}
