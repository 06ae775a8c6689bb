"""Draws of every kind through the one door that can be probed."""

import pytest

from tests.samplers.transfer import every_draw_as_a_normal


@pytest.fixture
def every_draw_is_normal():
    """See :func:`every_draw_as_a_normal`."""
    with every_draw_as_a_normal():
        yield
