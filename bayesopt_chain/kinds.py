"""What an argument may be, in one word each, and the refusal that names the argument.

The arguments of factories of transformations have ranges of their own (:mod:`bayesopt_chain.arguments`). Here are those of all
other functions: a module, batches, a tree of parameters, a whole number. A function says at its top what it takes, so that
what does not fit is refused by its name before anything happens:

    require("capture", steps=(steps, WHOLE), clone=(clone, BOOL))
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from bayesopt_chain.checks import short

MOST = 1 << 53  # what counts as a whole number, and what JSON can hold


class Kind(NamedTuple):
    """What an argument may be: a test, the words of the refusal, and the types of which some values fit."""

    fits: Callable[[Any], bool]
    words: str
    of: tuple[type, ...] = ()

    def or_none(self) -> Kind:
        """The same, or ``None``."""
        return Kind(lambda x: x is None or self.fits(x), f"{self.words}, or None", self.of)


def require(who: str, **given: tuple[Any, Kind]) -> None:
    """Refuse the first of some arguments that is not what it may be.

    Args:
        who: the function whose arguments these are.
        given: by its name each argument and what it may be.

    Raises:
        TypeError: naming the argument, what it may be, and what came.
        ValueError: likewise, of a value of the right type.

    Example:
        >>> require("sample", steps=(3, WHOLE))
        >>> require("sample", steps=("x", WHOLE))
        Traceback (most recent call last):
        TypeError: sample: steps must be a whole number, at least 1, got 'x'
    """
    for name, (value, kind) in given.items():
        if not kind.fits(value):
            wrong = ValueError if isinstance(value, kind.of) else TypeError
            raise wrong(f"{who}: {name} must be {kind.words}, got {short(value)}")


def whole(least: int) -> Kind:
    """Whole numbers from ``least`` on."""
    return Kind(
        lambda x: isinstance(x, int) and not isinstance(x, bool) and least <= x < MOST,
        f"a whole number, at least {least}",
        (int,),
    )


def one_of(*choices: str) -> Kind:
    """One of some words."""
    return Kind(lambda x: isinstance(x, str) and x in choices, " or ".join(map(repr, choices)), (str,))


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and abs(x) < 1e300 and math.isfinite(x)


def _is_iterable(x: Any) -> bool:
    return hasattr(x, "__iter__") and not isinstance(x, (str, bytes, type)) and getattr(x, "ndim", 1) > 0


def _is_tree(x: Any) -> bool:
    leaves = optree.tree_leaves(x)
    return bool(leaves) and all(isinstance(leaf, Tensor) for leaf in leaves)


def _is_real_tree(x: Any) -> bool:
    return _is_tree(x) and all(leaf.is_floating_point() and not leaf.is_meta for leaf in optree.tree_leaves(x))


BOOL = Kind(lambda x: isinstance(x, bool), "True or False")
FUNCTION = Kind(lambda x: callable(x) and not isinstance(x, type), "a function")
GENERATOR = Kind(lambda x: isinstance(x, torch.Generator), "a torch.Generator").or_none()
INPUTS = Kind(lambda x: isinstance(x, str) or FUNCTION.fits(x), "a key of the batch, or a function of it").or_none()
BATCHES = Kind(_is_iterable, "batches, such as a list or a DataLoader")
MAPPING = Kind(lambda x: isinstance(x, Mapping), "a dictionary")
MODULE = Kind(lambda x: isinstance(x, nn.Module), "a torch.nn.Module")
NUMBER = Kind(_is_number, "a finite number", (int, float))
POSITIVE = Kind(lambda x: _is_number(x) and x > 0, "a positive, finite number", (int, float))
PATH = Kind(lambda x: isinstance(x, (str, os.PathLike)) and str(x) not in ("", "."), "the path of a file")
FOLDER = Kind(lambda x: isinstance(x, (str, os.PathLike)), "the path of a directory")
SEED = whole(0)
SEQUENCE = Kind(lambda x: isinstance(x, Sequence) and not isinstance(x, (str, bytes)), "a list")
PARAMS = Kind(_is_real_tree, "a tree of real tensors with values: parameters")
TREE = Kind(_is_tree, "a tree of tensors")
TX = Kind(
    lambda x: callable(getattr(x, "init", None)) and callable(getattr(x, "update", None)), "a gradient transformation"
)
WHOLE = whole(1)
TX_OR_STEP = Kind(lambda x: callable(getattr(x, "init", None)), "a gradient transformation, or a step")
DRAWS = Kind(lambda x: hasattr(x, "chains") or _is_tree(x), "Draws, or a tree of tensors")
SCORES = Kind(lambda x: FUNCTION.fits(x) or _is_tree(x), "a function of a draw, or a tree of tensors")
POSTERIOR = Kind(
    lambda x: hasattr(x, "mean") and hasattr(x, "factorised") and not isinstance(x, type), "a bc.Gaussian posterior"
)
