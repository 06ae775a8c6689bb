"""Every public name says what it takes, returns and raises, in which shapes and units, and shows itself at work."""

import ast
import inspect
import re
import textwrap
import types
from collections.abc import Iterator
from typing import NamedTuple

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
READERS = "bayesopt_chain.posterior.batches"  # what reads loaders implements no paper
PUBLISHED = ("samplers", "posterior", "curvature", "diagnostics")  # rooms whose functions implement papers
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
FUNCTIONS = {name: value for name, value in NAMES.items() if inspect.isfunction(value)}
CLASSES = {value: name for name, value in NAMES.items() if inspect.isclass(value)}  # each once, by its longest name


class Method(NamedTuple):
    """A public method, with the class in whose own body it stands."""

    owner: type
    function: types.FunctionType


def methods() -> Iterator[tuple[str, Method]]:
    """The public methods that this library defines in its public classes."""
    for owner, prefix in CLASSES.items():
        for name, value in vars(owner).items():
            function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            ours = inspect.isfunction(function) and function.__module__.startswith("bayesopt_chain")
            if ours and not name.startswith("_") and function.__name__ == name:
                yield f"{prefix}.{name}", Method(owner, function)


METHODS = dict(methods())


def room(value) -> str:
    """The folder, or the file at the root, in which something is defined; TorchOpt's classes are made at the root."""
    return [*value.__module__.split("."), "optimizers"][1]


def described(method: Method) -> str:
    """The docstrings of a method and of what it overrides: a promise of a base class is kept by all that inherit it."""
    owner, function = method
    bases = [vars(base).get(function.__name__) for base in owner.__mro__]
    return "\n\n".join(inspect.cleandoc(base.__doc__) for base in bases if base is not None and base.__doc__)


def refuses(function) -> bool:
    """Whether a ``raise`` stands in the body itself; what a class leaves to those that inherit from it is no refusal."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc is not None]
    return any(not (isinstance(what, ast.Name) and what.id == "NotImplementedError") for what in raised)


def takes(function) -> dict[str, str]:
    """The arguments, without ``self``, and their annotations."""
    found = inspect.signature(function).parameters.items()
    return {name: str(p.annotation) for name, p in found if name not in ("self", "cls")}


def returns(function) -> str:
    annotation = inspect.signature(function).return_annotation
    return "" if annotation in (None, "None", inspect.Signature.empty) else str(annotation)


def section(doc: str, title: str) -> str:
    """The lines of one section of a docstring."""
    found = re.search(rf"^{title}:\n((?:[ \t]+.*\n?|\n)*)", doc, re.MULTILINE)
    return found.group(1) if found else ""


def missing_in(function, doc: str) -> list[str]:
    """Which of the arguments, the result, the errors, shapes and units a docstring leaves out."""
    out = []
    arguments, result = takes(function), returns(function)
    words = section(doc, "Args")
    out += [f"Args: {name}" for name in arguments if not re.search(rf"\b{name}\b", words)]
    if result and "Returns:" not in doc:
        out.append("Returns")
    if refuses(function) and "Raises:" not in doc:
        out.append("Raises")
    if "Tensor" in " ".join([*arguments.values(), result]) and not SHAPE.search(doc):
        out.append("shapes")
    for name in arguments.keys() & UNITS.keys():
        line = re.search(rf"\b{name}\b[^\n]*(?:\n\s+(?!\w+:)[^\n]*)*", words)
        if line and not re.search(UNITS[name], " ".join(line.group().split())):
            out.append(f"units of {name}")
    return out


def missing_source(value, doc: str) -> list[str]:
    """Whether a function of a room that implements papers names one, in its own docstring or in that of its module."""
    if room(value) not in PUBLISHED or value.__module__ == READERS:
        return []
    module = inspect.getmodule(value)
    return [] if SOURCE.search(doc) or SOURCE.search((module and module.__doc__) or "") else ["source"]


def with_references(doc: str, owner: type) -> str:
    """A class's docstring with those of the functions and classes to which it refers for the meaning of its arguments."""
    out = [doc]
    for target in re.findall(r":(?:func|class):`~?(?:bayesopt_chain\.)?([\w.]+)`", doc):
        found = NAMES.get(f"bc.{target}") or getattr(inspect.getmodule(owner), target, None)
        out.append(inspect.getdoc(found) or "")
    return "\n\n".join(out)


def missing() -> dict[str, list[str]]:
    """By name, what is missing."""
    found: dict[str, list[str]] = {}

    for name, function in FUNCTIONS.items():
        doc = inspect.getdoc(function) or ""
        example = [] if "Example:" in doc else ["Example"]
        found[name] = missing_in(function, doc) + example + missing_source(function, doc)
    for name, method in METHODS.items():
        doc = described(method)
        pages = [doc, *(inspect.getdoc(base) or "" for base in method.owner.__mro__ if base is not object)]
        shown = "Example:" in doc or any(f".{method.function.__name__}(" in page for page in pages)
        found[name] = missing_in(method.function, doc) + ([] if shown else ["Example"])
    for owner, name in CLASSES.items():
        doc = with_references(inspect.getdoc(owner) or "", owner)
        found[name] = [f"Attributes: {word}" for word in stated(owner) if not re.search(rf"\b{word}\b", doc)]
    return {name: lacks for name, lacks in found.items() if lacks}


def stated(owner: type) -> list[str]:
    """The fields of a record, or the arguments with which a class is made."""
    if hasattr(owner, "_fields") and not issubclass(owner, GradientTransformation):
        return [name for name in owner._fields if not name.startswith("_")]
    if hasattr(owner, "__dataclass_fields__"):
        return [name for name in owner.__dataclass_fields__ if not name.startswith("_")]
    made = vars(owner).get("__init__")
    return list(takes(made)) if inspect.isfunction(made) and not issubclass(owner, Exception) else []


def test_no_docstring_leaves_anything_out():
    assert missing() == {}


def test_a_class_shows_itself_at_work_or_is_only_returned():
    silent = []
    for name, value in NAMES.items():
        if inspect.isclass(value) and not hasattr(value, "_fields") and not issubclass(value, Exception):
            doc = inspect.getdoc(value) or ""
            if value.__module__ == bc.response.__name__:  # the vocabulary of one page, which shows it
                doc += bc.response.__doc__ or ""
            silent += [] if "Example:" in doc or "Attributes:" in doc else [name]
    assert not silent, silent


def test_result_types_have_a_docstring_of_their_own():
    for name, value in NAMES.items():
        if hasattr(value, "_fields"):
            assert not (inspect.getdoc(value) or "").startswith(f"{value.__name__}("), name


def test_every_property_says_what_it_is():
    silent = [
        f"{name}.{key}"
        for value, name in CLASSES.items()
        for key, member in vars(value).items()
        if isinstance(member, property) and not key.startswith("_") and not member.__doc__
    ]
    assert not silent, silent
