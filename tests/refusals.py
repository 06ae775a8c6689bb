"""Refusals: a table of acts, and the words in which each of them is refused."""

from functools import partial

import pytest


def refuse(cases, error=ValueError):
    """Each case, an act, its error where that is not ``error``, and a pattern, raises this error in words that match."""
    for act, *own, words in cases:
        with pytest.raises(*own or [error], match=words):
            act()


def refused(cases, error=ValueError, of=None):
    """A test of :func:`refuse`, with a row for each of the cases; with ``of``, the act is to call that with the first entry."""

    @pytest.mark.parametrize("case", cases)
    def test(case):
        act, *rest = case
        refuse([(act if of is None else partial(of, act), *rest)], error)

    return test
