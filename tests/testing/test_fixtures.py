"""The fixture of the laws, as a user's own tests take it: one test a law, and a broken one fails by its name."""

import bayesopt_chain as bc
from bayesopt_chain.testing.fixtures import LAWS, law  # noqa: F401

pytest_plugins = ["pytester"]

BROKEN = """
import bayesopt_chain as bc, torchopt
from bayesopt_chain.testing.fixtures import law

def update(grads, state, *, params=None, inplace=True):
    for g in grads.values() if isinstance(grads, dict) else ():
        if g is not None:
            g.mul_(2)
    return grads, state

def test_broken(law):
    law(lambda: torchopt.base.GradientTransformation(lambda params: (), update))
"""


def test_a_link_of_ones_own(law):  # noqa: F811
    law(lambda: bc.chain(bc.add_momentum(0.9), bc.scale_by_neg_lr(0.1)))


def test_a_broken_law_fails_by_its_name(pytester):
    pytester.makepyfile(BROKEN)
    ran = pytester.runpytest("-q", "-p", "no:randomly")
    ran.stdout.fnmatch_lines(["*FAILED*test_broken[[]pure_updates_touch_nothing[]]*"])
    assert sum(ran.parseoutcomes().values()) - ran.parseoutcomes().get("warnings", 0) >= len(LAWS)
