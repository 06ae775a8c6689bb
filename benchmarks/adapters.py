"""Posteriors over LoRA adapters of a small language model: what each method is worth at equal gradients.

    python -m benchmarks.adapters --seeds 5        # goes on where it was; writes results/adapters.json
The base, a Llama of 31 characters, 48 wide and two layers deep, is trained on five novels of
$BAYESOPT_CHAIN_DATA and then frozen. Adapters of rank 4 are trained on 256 sequences of 32 characters of film reviews (IMDb),
or of essays (The Souls of Black Folk), with GRADIENTS minibatch gradients in all, those that decide on the prior included.
Reported for 128 held-out sequences of the domain: NLL in nats and expected calibration error (15 bins of confidence) a token;
AUROC of a sequence's mean entropy, and of its mean mutual information, against 128 sequences of Samoan; processor seconds.
Each seed draws other sequences and starts; the base is one.

Its record also holds the time of a step, the largest memory of each method and four books one after the other, which were
measured once (``git show bfdd0dd:benchmarks/adapters.py``).
"""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesopt_chain.lora import bayesian_lora
from bayesopt_chain.posterior import detection_auroc
from benchmarks.leaderboard.scores import calibration_error
from benchmarks.measure import RESULTS, command, keep, known

PATH = RESULTS / "adapters.json"
DATA = Path(os.environ.get("BAYESOPT_CHAIN_DATA", "data"))
ALPHABET = " abcdefghijklmnopqrstuvwxyz.,'-"
LENGTH, TRAIN, TEST, BASE_STEPS, GRADIENTS = 32, 256, 128, 1200, 240
NOVELS = ("a_room_with_a_view", "anne_of_green_gables", "peter_pan", "the_enchanted_april", "the_great_gatsby")
METHODS: dict[str, dict[str, Any]] = {
    "one adapter": {"method": "ensemble", "members": 1},
    "one adapter, a quarter of the gradients": {"method": "ensemble", "members": 1, "steps": GRADIENTS // 4},
    "ensemble of four": {"method": "ensemble", "members": 4},
    "SGHMC, four chains": {"method": "sghmc", "members": 4, "draws": 8},
    "IVON": {"method": "ivon", "draws": 8},
    "Laplace": {"method": "laplace", "draws": 8},
}


def adapter() -> Any:
    """Of rank 4."""
    import peft

    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")


def sequences(text: str) -> Tensor:
    """Characters ``[S, LENGTH]`` of a text, all others left out."""
    kept = re.sub(r"\s+", " ", re.sub(f"[^{re.escape(ALPHABET)}]", " ", text.lower()))
    codes = torch.tensor([ALPHABET.index(c) for c in kept])
    return codes[: len(codes) // LENGTH * LENGTH].reshape(-1, LENGTH)


def domains() -> dict[str, Tensor]:
    words = (DATA / "imdb" / "vocab_20k.txt").read_text(encoding="utf-8").split("\n")
    with np.load(DATA / "imdb" / "imdb_20k_100.npz") as table:
        tokens = table["x_train"][:600]
    reviews = " ".join(words[t] for row in tokens for t in row if 3 <= t < len(words))
    samoan = json.loads((DATA / "statements" / "statements.json").read_text(encoding="utf-8"))
    essays = (DATA / "books" / "the_souls_of_black_folk.txt").read_text(encoding="utf-8")
    last = samoan[-1] if isinstance(samoan, list) else list(samoan.values())[-1]
    return {"film reviews": sequences(reviews), "essays": sequences(essays), "Samoan": sequences(" ".join(last))}


def base(folder: Path) -> Any:
    """The base, trained on the novels."""
    import transformers

    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=len(ALPHABET), num_key_value_heads=4, max_position_embeddings=LENGTH, **sizes
    )
    model = transformers.LlamaForCausalLM(config)
    text = torch.cat([sequences((folder / f"{n}.txt").read_text(encoding="utf-8")) for n in NOVELS])
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, BASE_STEPS)
    for _ in range(BASE_STEPS):
        ids = text[torch.randint(len(text), (32,))]
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        schedule.step()
    return model


def measured(
    weights: Any, model: Any, told: dict[str, Any], seed: int, domain: Tensor, samoan: Tensor
) -> dict[str, float]:
    order = torch.randperm(len(domain), generator=torch.Generator().manual_seed(seed))
    train, test = domain[order[:TRAIN]], domain[order[TRAIN : TRAIN + TEST]]
    model.load_state_dict(weights)
    began = time.process_time()
    found = bayesian_lora(model, {"input_ids": train, "labels": train}, seed=seed, **{"steps": GRADIENTS, **told})
    seconds = time.process_time() - began
    inside = found.predict({"input_ids": test, "labels": test})
    outside = found.predict({"input_ids": samoan, "labels": samoan})
    p, y = inside.probabilities[:, :-1].flatten(0, 1), test[:, 1:].flatten()
    scores = {"NLL": float(-p.gather(1, y[:, None]).log().mean()), "ECE": calibration_error(p, y)}
    for name in ("entropy", "mutual_information"):
        own, out = (getattr(x, name)[:, :-1].mean(1) for x in (inside, outside))
        scores[f"AUROC of {name.replace('_', ' ')}"] = detection_auroc(own, out)
    return {**scores, "seconds": seconds, "gradients": found.report["gradients"]}


def mean_and_error(values: Sequence[float]) -> dict[str, float | None]:
    error = float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else None
    return {"mean": float(np.mean(values)), "error": error}


def summary(rows: dict[str, Any]) -> dict[str, Any]:
    """Means over seeds with their standard errors, and NLL less that of one adapter with the same seed."""
    out: dict[str, Any] = {}
    for domain, methods in rows.items():
        out[domain] = {}
        for name, by_seed in methods.items():
            shared = [s for s in by_seed if s in methods["one adapter"]]
            values = {k: [by_seed[s][k] for s in shared] for k in next(iter(by_seed.values()))}
            values["NLL less one adapter's"] = [by_seed[s]["NLL"] - methods["one adapter"][s]["NLL"] for s in shared]
            out[domain][name] = {k: mean_and_error(v) for k, v in values.items()}
    return out


def league(weights: Any, model: Any, seeds: int, record: dict[str, Any], domain: dict[str, Tensor]) -> None:
    """Fill in what the record lacks."""
    samoan, rows = domain.pop("Samoan")[:TEST], record.setdefault("rows", {})
    for seed, (where, text), (name, told) in itertools.product(map(str, range(seeds)), domain.items(), METHODS.items()):
        by_seed = rows.setdefault(where, {}).setdefault(name, {})
        if seed not in by_seed:
            by_seed[seed] = measured(weights, model, told, int(seed), text, samoan)
            print(seed, where, name, by_seed[seed], flush=True)
            keep(PATH, record | {"summary": summary(rows)})


def main() -> None:
    import peft

    given = command(seeds=5, folder=DATA / "books")
    model = peft.get_peft_model(base(given.folder), adapter())
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    league(weights, model, given.seeds, known(PATH), domains())


if __name__ == "__main__":
    main()
