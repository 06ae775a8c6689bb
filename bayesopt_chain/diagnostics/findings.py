"""A table of findings: each a kind, a condition on measurements, and sentences with these measurements in braces.

The first row of a kind whose condition holds is the finding of that kind, so that of two explanations the one above is given.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, NamedTuple


class Finding(NamedTuple):
    """One fault of a run.

    Attributes:
        kind: diverged, nonfinite, scale, duplicate, dead, heated, together, prior, burn-in, cold, modes, mixing or short.
        says: what was seen, a sentence with its number.
        do: what to do about it, a sentence.
    """

    kind: str
    says: str
    do: str


class Row(NamedTuple):
    """A finding before it is made: its kind, when the measurements say so, and its two sentences."""

    kind: str
    when: Callable[[Any], Any]
    says: str
    do: str = ""


def judged(rows: Sequence[Row], m: Any, kinds: set[str], several: Container[str] = ()) -> Iterator[Finding]:
    """The findings that follow from measurements.

    Args:
        rows: the table.
        m: the measurements, attributes of a namespace.
        kinds: those found already, to which new ones are added.
        several: kinds of which all findings are given.

    Example:
        >>> from types import SimpleNamespace
        >>> rows = [Row("hot", lambda m: m.t > 2, "{t} is far too hot."), Row("hot", lambda m: m.t > 1, "{t:.1f} is too hot.")]
        >>> [found.says for found in judged(rows, SimpleNamespace(t=1.5), set())]
        ['1.5 is too hot.']
    """
    for row in rows:
        if (row.kind in several or row.kind not in kinds) and row.when(m):
            kinds.add(row.kind)
            yield Finding(row.kind, row.says.format(**vars(m)), row.do.format(**vars(m)))
