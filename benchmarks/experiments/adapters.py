r"""A posterior over LoRA adapters, by every method of ``bayesian_lora``, beside one: likelihood, calibration, doubt.

The base is the small Llama of :mod:`benchmarks.experiments.language`, trained on novels. Adapters of rank 8 on the query, value
and down projections learn one of two domains: film reviews (IMDB, sequences of unequal length) or a detective story. Every row
takes ``steps`` minibatch gradients in all, those that decide on the prior among them, but for ``one adapter, a quarter``, which
trains one adapter as long as a member of an ensemble of four.

``NLL`` in nats a token and ``ECE`` (of the most probable token, 15 bins) are of held-out text of the same domain, ``entropy``
and ``information`` the AUROC of telling Samoan statements from English ones by the mean over a statement's tokens, before each
token is seen. ``seconds`` are of one core, ``MiB`` how far the process's memory rose in the call. A number behind ``- one`` is
a difference from one adapter, of the same seed and domain.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import re
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bayesopt_chain as bc
from bayesopt_chain.lora import Adapters, bayesian_lora
from benchmarks.experiments.cells import RULE, folder_of, kept, minus, spent, takeaway
from benchmarks.experiments.common import Experiment, Table
from benchmarks.experiments.imdb import read as reviews
from benchmarks.experiments.imdb import spelled
from benchmarks.experiments.language import SCALES, Base, base
from benchmarks.experiments.llama import statements

ONE = "one adapter"
METHODS: dict[str, dict[str, Any]] = {
    ONE: {"method": "ensemble", "members": 1},
    "one adapter, a quarter": {"method": "ensemble", "members": 1, "quarter": True},
    "ensemble": {"method": "ensemble"},
    "sghmc": {"method": "sghmc"},
    "ivon": {"method": "ivon"},
    "laplace": {"method": "laplace"},
}
DOMAINS = ("reviews", "Hound")
BINS = 15


def padded(rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Sequences of unequal length as a tokenizer gives them; labels of padding are -100."""
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask.bool(), -100)}


def domain(llama: Base, name: str, s: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Training and held-out sequences."""
    if name == "Hound":
        book = llama.book("the_hound_of_the_baskervilles", dict(s) | {"book_characters": None})
        parts: list[Any] = [book.train.tolist()[: s["sequences"]], book.held_out.tolist()[: s["held_out"]]]
    else:
        (train, _), (test, _) = reviews(20_000)
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
        parts = [
            [llama.tokens(spelled(x[i]))[: s["length"]] for i in order[:count].tolist()]
            for x, count in ((train, s["sequences"]), (test, s["held_out"]))
        ]
    return padded(parts[0]), padded(parts[1])


def adapted(llama: Base, s: Mapping[str, Any]) -> Any:
    """The base with a fresh adapter."""
    import peft

    config = peft.LoraConfig(
        r=s["rank"], lora_alpha=s["alpha"], target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(copy.deepcopy(llama.model), config).eval()


def measured(found: Adapters, held_out: Mapping[str, Tensor], llama: Base, s: Mapping[str, Any]) -> dict[str, float]:
    """The measures of draws; ``ECE`` over all held-out tokens, some sequences at a time."""
    confidence, right = [], []
    for rows in torch.arange(len(held_out["labels"])).split(16):
        some = {k: v[rows] for k, v in held_out.items()}
        p, guess = found.predict(some).probabilities[:, :-1].max(-1)  # pyright: ignore[reportOptionalSubscript]
        counts = some["labels"][:, 1:] != -100
        confidence.append(p[counts])
        right.append((guess == some["labels"][:, 1:])[counts].double())
    sure, hit = torch.cat(confidence).double(), torch.cat(right)
    bins = (sure * BINS).long().clamp_max(BINS - 1)
    gaps = [(sure[bins == b].sum() - hit[bins == b].sum()).abs() for b in range(BINS)]
    known, foreign = (
        found.predict(padded([llama.tokens(text)[: s["length"]] for text in texts]), probabilities=False).by_sequence()
        for texts in statements()
    )
    out = {"NLL": found.nll(held_out), "ECE": float(torch.stack(gaps).sum() / len(sure))}
    out["entropy"] = bc.posterior.detection_auroc(known[0], foreign[0])
    if len(found) > 1:
        out["information"] = bc.posterior.detection_auroc(known[1], foreign[1])
    return out


def memory(reset: bool = False) -> float:
    """The largest memory that this process has held since the last reset, in MiB (Linux; elsewhere 0)."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0.0
    if reset:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what earlier cells have freed is not memory that this one found
        Path("/proc/self/clear_refs").write_text("5")
    return int(re.findall(r"VmHWM:\s+(\d+)", status.read_text())[0]) / 1024


def cell(llama: Base, name: str, where: str, s: Mapping[str, Any], seed: int, folder: Path) -> dict[str, float]:
    """One method on one domain."""
    train, held_out = domain(llama, where, s)
    how = dict(METHODS[name])
    share = 4 if how.pop("quarter", False) else 1
    before, start = memory(reset=True), time.process_time()
    found = bayesian_lora(
        adapted(llama, s),
        train,
        steps=s["steps"] // share,
        batch_size=s["batch"],
        seed=seed,
        path=folder / "draws",
        **how,
    )
    seconds = time.process_time() - start
    peak = memory() - before
    return measured(found, held_out, llama, s) | {"seconds": seconds, "MiB": peak}


def run(settings: Mapping[str, Any], seed: int) -> Table:
    """Every method on both domains."""
    llama, folder, table = base(settings), folder_of("adapters", settings) / f"seed-{seed}", {}
    for where in DOMAINS:
        for name in METHODS:
            make = partial(cell, llama, name, where, settings, seed)
            row = kept(folder, f"{where}, {name}", make)
            table[f"{where}: {name}"] = dict(row)
        one = table[f"{where}: {ONE}"]
        for name in METHODS:
            row = table[f"{where}: {name}"]
            row |= {f"{m} - one": row[m] - one[m] for m in ("NLL", "ECE")}
    return table


def says(table: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """What came out, claim by claim."""
    claims = []
    for where in DOMAINS:
        for name in list(METHODS)[1:]:
            claims.append(
                takeaway(
                    f"{where}: {name} has a lower NLL than one adapter", minus(table[f"{where}: {name}"]["NLL - one"])
                )
            )
    return f"{'; '.join(claims)}. {RULE}."


ADAPTER = {"rank": 8, "alpha": 16}
EXPERIMENT = Experiment(
    "adapters",
    "A posterior over LoRA adapters",
    "the paper's examples continue Llama 2 and 3 with LoRA and report likelihoods and a language that is told by its doubt",
    {
        "smoke": SCALES["smoke"] | ADAPTER | {"sequences": 24, "held_out": 8, "steps": 24, "batch": 8},
        "small": SCALES["small"]
        | ADAPTER
        | {"vocabulary": 512, "width": 64, "layers": 2, "length": 48}
        | {"base_batch": 16, "base_steps": 2500, "base_lr": 4e-3}
        | {"sequences": 64, "held_out": 128, "steps": 400, "batch": 8},
        "full": SCALES["full"] | ADAPTER | {"sequences": 4096, "held_out": 1024, "steps": 8000, "batch": 16},
    },
    {"smoke": 1, "small": 5, "full": 5},
    run,
    says,
    shown=("NLL", "NLL - one", "ECE", "ECE - one", "entropy", "information", "seconds", "MiB"),
    seconds=partial(spent, "adapters"),
)
