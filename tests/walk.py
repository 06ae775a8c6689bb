"""A chain's own updates, one after another."""

import torchopt


def walk(tx, params, gradient, steps, state=None, inplace=False, **extra):
    """After each update of ``tx`` the parameters and the state; ``gradient`` is a function of the parameters."""
    state = tx.init(params) if state is None else state
    for _ in range(steps):
        updates, state = tx.update(gradient(params), state, params=params, inplace=inplace, **extra)
        params = torchopt.apply_updates(params, updates, inplace=inplace)
        yield params, state


def end_of(*args, **kwargs):
    """Parameters and state at the end of :func:`walk`."""
    *_, last = walk(*args, **kwargs)
    return last
