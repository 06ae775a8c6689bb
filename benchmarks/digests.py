"""``python -m benchmarks.digests OTHER_CHECKOUT``: do two commits make the same steps, bit for bit, on this machine?

For every chain, learning rate, temperature and form (``update`` and ``make_step``, pure and in place) each commit hashes the
parameters and the state after five steps; a refusal is hashed as its type. Leaves, missing gradients and dtypes take turns.
``results/digests.json`` keeps how many of the digests agree and which do not, and by how much the parameters then differ.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optree
import torch

from benchmarks.against import Worker
from benchmarks.measure import RESULTS, ROOT, command, commit, keep

STEPS = 5


def chains(bc: Any) -> dict[str, Callable[[Any, Any], Any]]:
    """What is compared: functions of learning rate and temperature."""
    decay, momentum = bc.links.add_decayed_weights(0.1), bc.add_momentum(0.9)
    noise, rate = bc.inject_langevin_noise, bc.scale_by_neg_lr
    flipped = bc.links.flip_sign_and_add_weight_decay(0.1, maximize=True)
    return {
        "sgd": lambda lr, t: bc.sgd(lr),
        "sgd momentum": lambda lr, t: bc.sgd(lr, 0.9),
        "sgd dampened": lambda lr, t: bc.sgd(lr, 0.9, dampening=0.3, temperature=t),
        "sgd decayed, nesterov": lambda lr, t: bc.sgd(lr, 0.9, weight_decay=0.1, nesterov=True),
        "sgd maximised": lambda lr, t: bc.sgd(lr, 0.9, weight_decay=0.1, maximize=True),
        "sgld": lambda lr, t: bc.sgld(lr, temperature=t),
        "sghmc": lambda lr, t: bc.sghmc(lr, temperature=t),
        "little momentum": lambda lr, t: bc.sghmc(lr, 0.03, temperature=t),
        "nesterov": lambda lr, t: bc.sgd(lr, 0.9, nesterov=True, temperature=t),
        "white": lambda lr, t: bc.chain(momentum, noise(t, order=1), rate(lr)),
        "decay, sgld": lambda lr, t: bc.chain(decay, noise(t), rate(lr)),
        "decay, sghmc": lambda lr, t: bc.chain(decay, momentum, noise(t), rate(lr)),
        "maximised, sghmc": lambda lr, t: bc.chain(flipped, noise(t), momentum, rate(lr)),
        "decay behind momentum": lambda lr, t: bc.chain(momentum, noise(t), decay, rate(lr)),
        "localised, sghmc": lambda lr, t: bc.chain(bc.links.add_localization(0.5, 0.2), momentum, noise(t), rate(lr)),
        "adam": lambda lr, t: bc.adam(lr, weight_decay=0.1, temperature=t),
        "frozen adam": lambda lr, t: bc.samplers.adam_sghmc(lr, temperature=t, freeze_after=3),
        "rmsprop with momentum": lambda lr, t: bc.rmsprop(lr, momentum=0.9, weight_decay=0.1, temperature=t),
        "rate in front": lambda lr, t: bc.chain(noise(t), rate(lr), momentum),
    }


def rates(bc: Any) -> dict[str, Any]:
    """Kinds of learning rate."""
    s = bc.schedules
    return {
        "number": 0.05,
        "tensor": torch.tensor(0.05),
        "float64 tensor": torch.tensor(0.05, dtype=torch.float64),
        "cosine": s.cosine(0.05, 8),
        "with a stop": s.piecewise((2, 3), (0.05, 0.0, 0.025)),
        "rising function": lambda k: 0.01 * (1.0 + k),
    }


def temperatures(bc: Any) -> dict[str, Any]:
    """Kinds of temperature."""
    return {
        "0": 0.0,
        "number": 0.3,
        "tensor": torch.tensor(0.3),
        "cosine": bc.schedules.cosine(0.3, 8),
        "tensor of 0": torch.tensor(0.0),
    }


FORMS = ("update", "update in place", "step", "step in place")


def cases(bc: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names, and functions that return parameters and state."""
    product = itertools.product(chains(bc).items(), rates(bc).items(), temperatures(bc).items(), FORMS)
    for n, ((chain, make), (rate, lr), (heat, t), form) in enumerate(product):
        dtype, kind = (torch.float32, torch.float64)[(n // 2 + n // 4) % 2], n // 4 % 3
        name = f"{chain}; {rate}; {heat}; {form}; {dtype}; {('leaves', 'a missing gradient', '0-d')[kind]}"
        yield (
            name,
            lambda make=make, lr=lr, t=t, form=form, dtype=dtype, kind=kind: walk(bc, make(lr, t), form, dtype, kind),
        )


def walk(bc: Any, tx: Any, form: str, dtype: torch.dtype, kind: int) -> Any:
    """Parameters and state after some steps from one seed."""
    import torchopt

    torch.manual_seed(0)
    shapes = [(), (3,), ()] if kind == 2 else [(300,), (2, 3), (7,)]
    params = [torch.randn(shape, dtype=dtype) for shape in shapes]
    grads: list[list[Any]] = [[torch.randn(p.shape, dtype=dtype) for p in params] for _ in range(STEPS)]
    if kind == 1:
        grads[1][0] = grads[2][0] = grads[3][2] = None
    inplace, state = form.endswith("in place"), tx.init(params)
    for g in grads:
        if form.startswith("update"):
            u, state = tx.update(g, state, params=params, inplace=inplace)
            params = torchopt.apply_updates(params, u, inplace=inplace)
        else:
            step = bc.make_step(
                lambda p, batch: sum((x * y).sum() for x, y in zip(p, batch) if y is not None), tx, inplace=inplace
            )
            params, state, _ = step(params, state, g)
    return params, state


def answer(bc: Any, name: str | None = None) -> Any:
    """The names of all cases; or of one the digest of what its steps leave behind, and the parameters."""
    every = dict(cases(bc))
    if name is None:
        return list(every)
    try:
        done = every[name]()
    except Exception as err:
        return type(err).__name__, []
    digest = hashlib.sha256()
    for x in optree.tree_leaves(done):
        digest.update(f"{x.dtype} {tuple(x.shape)}".encode() + x.detach().contiguous().numpy().tobytes())
    return digest.hexdigest(), torch.cat([p.flatten().double() for p in done[0]]).tolist()


if __name__ == "__main__":
    checkouts = {"this": ROOT, "other": command(other=Path).other.resolve()}
    this, other = (Worker(checkout, "digests") for checkout in checkouts.values())
    names, differ, refused = this.ask(), {}, 0
    for name in names:
        (mine, params), (theirs, there) = this.ask(name), other.ask(name)
        refused += not params
        if mine != theirs:
            alike = len(params) == len(there) > 0
            differ[name] = max(abs(a - b) for a, b in zip(params, there)) if alike else f"{mine} / {theirs}"
            print(f"  {name}: {differ[name]}")
    print(f"{len(names) - len(differ)} of {len(names)} digests agree")
    keep(
        RESULTS / "digests.json",
        {
            "commits": {who: commit(path) for who, path in checkouts.items()},
            "cases": len(names),
            "refused": refused,
            "differ": differ,
        },
    )
