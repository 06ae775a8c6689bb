"""Arguments of ordinary kinds in the wrong places: refused in words that name the argument, or a result without NaN."""

import traceback
import warnings
from pathlib import Path

import numpy as np
import optree
import pytest
import torch

import bayesopt_chain as bc

HOME = str(Path(bc.__file__).parent)
VALUES = [
    None, True, 0, -1, 3, 2.5, float("nan"), "x", b"x", (), [], {}, [1, 2], {"w": 1.0}, {"w": [1.0, 2.0]}, object(), print,
    torch.tensor(1.0), torch.tensor(float("nan")), torch.ones(3), torch.ones(2, 3), torch.zeros(0), torch.ones(3,
    dtype=torch.int64), torch.ones(3, dtype=torch.float16), torch.ones(3, dtype=torch.complex64), torch.ones(3,
    device="meta"), torch.ones(3).to_sparse(), {"w": torch.ones(2)}, {"w": torch.full((3,), float("nan"))}, [torch.ones(3)],
    np.ones(3), iter([1]), range(3), torch.nn.ReLU(),
]  # fmt: skip
TX = bc.sgld(0.1, temperature=0.1)


def loss(params, batch):
    return (params["w"] ** 2).sum()


STEP = bc.make_step(loss, TX)
DRAWS = bc.Draws.from_trees([{"w": torch.full((3,), float(i))} for i in range(6)])
MODEL = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))


def run():
    params = {"w": torch.zeros(3)}
    return {"step": STEP, "params": params, "state": TX.init(params), "batches": None, "steps": 4}


def optimizer():
    return bc.optim.SGHMC(MODEL.parameters(), lr=0.1, temperature=0.1)


def collector(**more):
    keep = bc.collect(MODEL, optimizer(), every=1)
    keep()
    return keep


CALLS = {
    "sample": (
        bc.sample,
        lambda: {
            **run(), "burn_in": 1, "thinning": 1, "seed": 1, "checkpoint_seconds": 1.0, "chains": None, "callbacks": (),
            "segment": None,
        },
    ),
    "iterate": (lambda **k: list(bc.iterate(**k)), lambda: {**run(), "burn_in": 0, "thinning": 1}),
    "Draws.from_trees": (bc.Draws.from_trees, lambda: {"trees": [{"w": torch.ones(3)}], "chains": None}),
    "Draws.open": (
        bc.Draws.open, lambda: {"path": "/nowhere", "like": None, "segment": None, "damaged": "refuse"}
    ),
    "Draws.thin": (DRAWS.thin, lambda: {"every": 2}),
    "Draws.predict": (
        DRAWS.predict,
        lambda: {"forward": lambda p, x: x @ p["w"], "batches": [torch.ones(2, 3)], "reduce": "mean", "chunk": 4},
    ),
    "Draws.with_buffers": (DRAWS.with_buffers, lambda: {"buffers": {"b": torch.ones(6)}}),
    "collect": (
        lambda **k: bc.collect(**k) and None,
        lambda: {"model": MODEL, "optimizer": optimizer(), "every": 2, "after": 0, "checkpoint_seconds": 1.0},
    ),
    "Collector.predict": (
        lambda **k: collector().predict(**k), lambda: {"batches": [torch.ones(2, 3)], "reduce": "mean", "chunk": 4}
    ),
    "Collector.load_state_dict": (
        lambda **k: collector().load_state_dict(**k), lambda: {"state": {"step": 3}}
    ),
}  # fmt: skip


def complaint(err, argument):
    """What is wrong with an error; nothing where it is ours and names the argument, or what of it is wrong."""
    frames = traceback.extract_tb(err.__traceback__)
    frame = frames[-1]
    if any(x.filename == __file__ for x in frames[1:] if x.name in ("loss", "<lambda>") and x is not frames[1]):
        return ""  # the user's own function was called with what was given
    if any("torch/nn/modules" in x.filename for x in frames):
        return ""  # the user's own model likewise
    if not isinstance(err, (TypeError, ValueError, FileNotFoundError, FloatingPointError)):
        return f"{type(err).__name__} from {frame.filename}:{frame.lineno}: {err}"
    if not frame.filename.startswith(HOME):
        return f"raised in {frame.filename}:{frame.lineno}: {err}"
    words = {argument, "leaf", "leaves", "params", argument.rstrip("s"), "director", "run in"}
    return "" if any(word in str(err) for word in words) else f"does not name {argument}: {err}"


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore")
def test_arguments_of_ordinary_kinds_are_refused_by_name_or_harmless(name, tmp_path):
    call, sound = CALLS[name]
    found, calls = [], 0
    for argument in sound():
        for value in VALUES:
            calls += 1
            if callable(value) and callable(sound()[argument]):
                continue  # somebody's function, which fails in its own words
            torch.manual_seed(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    out = call(**{**sound(), argument: value})
                except Exception as err:
                    wrong = complaint(err, argument)
                else:
                    held = (
                        out.params
                        if isinstance(out, bc.Draws) and len(out)
                        else ()
                        if isinstance(out, bc.Draws)
                        else out
                    )
                    tensors = [x for x in optree.tree_leaves(held) if torch.is_tensor(x)]
                    told = isinstance(value, (torch.Tensor, dict, list, float))  # NaN in, NaN out
                    bad = any(x.is_floating_point() and bool(torch.isnan(x).any()) for x in tensors if not x.is_meta)
                    wrong = "silently NaN" if bad and not told else ""
            if wrong:
                found.append(f"{argument}={value!r:.40}: {wrong}"[:260])
    assert calls >= 50 or len(sound()) == 1
    assert not found, "\n".join(found)
