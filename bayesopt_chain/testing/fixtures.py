"""Fixtures of pytest for links and samplers of your own.

In ``conftest.py``, or in the file of tests that sits at the root:

    pytest_plugins = ["bayesopt_chain.testing.fixtures"]

and then every law is a test of its own, by its name, which passes or fails alone:

    def test_my_link(law):
        law(lambda: bc.chain(my_link(0.9), bc.scale_by_neg_lr(0.1)))
"""

from __future__ import annotations

from typing import Any

from bayesopt_chain.checks import installed

installed("bayesopt_chain.testing.fixtures", "testing", "pytest")

import pytest

from bayesopt_chain.testing._laws import LAWS


@pytest.fixture(params=LAWS, ids=lambda law: law.__name__)
def law(request: Any) -> Any:
    """Each of the laws that every link obeys, a function of ``build``: it raises ``AssertionError`` where one is broken."""
    return request.param
