"""What fails once."""

import functools
import itertools


def failing(function, at, error):
    """The function, whose call number ``at``, from 1 on, raises an error in its place."""
    calls = itertools.count(1)

    @functools.wraps(function)
    def called(*args, **given):
        if next(calls) == at:
            raise error
        return function(*args, **given)

    return called
