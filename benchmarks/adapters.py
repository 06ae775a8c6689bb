"""Posteriors over LoRA adapters of a small language model: what each method is worth at equal gradients.

    python -m benchmarks.adapters [SEEDS]    # five seeds; goes on where it was; writes results/adapters.json
    python -m benchmarks.adapters step       # a step of bc.optim.SGHMC over one of torch.optim.SGD, into the same record

The base, a Llama of 31 characters, 48 wide and two layers deep, is trained on five novels of $BAYESOPT_CHAIN_DATA and then
frozen. Adapters of rank 4 are trained on 256 sequences of 32 characters of film reviews (IMDb), or of essays (The Souls of
Black Folk), with GRADIENTS minibatch gradients in all, those that decide on the prior included. Reported for 128 held-out
sequences of the domain: NLL in nats and expected calibration error (15 bins of confidence) a token; AUROC of a sequence's mean
entropy, and of its mean mutual information, against 128 sequences of Samoan; processor seconds; growth of the peak of resident
memory in MiB (of Linux). Each seed draws other sequences and starts; the base is one.
"""

from __future__ import annotations

import copy
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesopt_chain import optim
from bayesopt_chain.lora import bayesian_lora
from benchmarks.measure import keep, ratio, take_turns

RESULTS = Path(__file__).parent / "results" / "adapters.json"
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


def base() -> Any:
    """The base, trained on the novels."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=len(ALPHABET), num_key_value_heads=4, max_position_embeddings=LENGTH, **sizes
    )
    model = transformers.LlamaForCausalLM(config)
    text = torch.cat([sequences((DATA / "books" / f"{n}.txt").read_text(encoding="utf-8")) for n in NOVELS])
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, BASE_STEPS)
    for _ in range(BASE_STEPS):
        ids = text[torch.randint(len(text), (32,))]
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        schedule.step()
    return model


def auroc(high: Tensor, low: Tensor) -> float:
    """The probability that one of the first is larger than one of the second, ties half."""
    gap = high[:, None] - low
    return float(((gap > 0).double() + 0.5 * (gap == 0).double()).mean())


def calibration_error(p: Tensor, y: Tensor) -> float:
    sure, likeliest = p.max(-1)
    bins = (sure * 15).long().clamp_max(14)
    hit = (likeliest == y).double()
    gaps = [(hit[bins == b].mean() - sure[bins == b].double().mean()).abs() * (bins == b).sum() for b in bins.unique()]
    return float(torch.stack(gaps).sum() / len(y))


def resident(field: str) -> float:
    """Of this process, MiB."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition(f"{field}:")[2].split()[0]) / 1024


def measured(
    weights: Any, model: Any, told: dict[str, Any], seed: int, domain: Tensor, samoan: Tensor
) -> dict[str, float]:
    order = torch.randperm(len(domain), generator=torch.Generator().manual_seed(seed))
    train, test = domain[order[:TRAIN]], domain[order[TRAIN : TRAIN + TEST]]
    model.load_state_dict(weights)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak starts anew
    before, began = resident("VmRSS"), time.process_time()
    found = bayesian_lora(model, {"input_ids": train, "labels": train}, seed=seed, **{"steps": GRADIENTS, **told})
    seconds, peak = time.process_time() - began, resident("VmHWM") - before
    inside = found.predict({"input_ids": test, "labels": test})
    outside = found.predict({"input_ids": samoan, "labels": samoan})
    p, y = inside.probabilities[:, :-1].flatten(0, 1), test[:, 1:].flatten()
    scores = {}
    for name in ("entropy", "mutual_information"):
        out, own = (getattr(x, name)[:, :-1].mean(1) for x in (outside, inside))
        scores[f"AUROC of {name.replace('_', ' ')}"] = auroc(out, own)
    nll = float(-p.gather(1, y[:, None]).log().mean())
    return {
        "NLL": nll,
        "ECE": calibration_error(p, y),
        **scores,
        "seconds": seconds,
        "MiB": peak,
        "gradients": found.report["gradients"],
    }


def summary(rows: dict[str, Any]) -> dict[str, Any]:
    """Means over seeds with their standard errors, and NLL less that of one adapter with the same seed."""
    out: dict[str, Any] = {}
    for domain, methods in rows.items():
        out[domain] = {}
        for name, by_seed in methods.items():
            shared = [s for s in by_seed if s in methods["one adapter"]]
            values = {k: [by_seed[s][k] for s in shared] for k in next(iter(by_seed.values()))}
            gap = [by_seed[s]["NLL"] - methods["one adapter"][s]["NLL"] for s in shared]
            values["NLL less one adapter's"] = gap
            out[domain][name] = {
                k: {
                    "mean": float(np.mean(v)),
                    "error": float(np.std(v, ddof=1) / len(v) ** 0.5) if len(v) > 1 else None,
                }
                for k, v in values.items()
            }
    return out


def step_ratio(model: Any, texts: Tensor) -> dict[str, float]:
    """Processor time of a whole training step, forward and backward with 16 sequences, at T > 0 and with torch's SGD."""
    calls = {}
    for name in ("SGHMC", "SGD"):
        own = copy.deepcopy(model)
        chosen = [p for p in own.parameters() if p.requires_grad]
        sgd = torch.optim.SGD(chosen, 1e-3, momentum=0.9)
        opt = optim.SGHMC(chosen, 1e-3, temperature=1e-4) if name == "SGHMC" else sgd

        def step(own: Any = own, opt: Any = opt) -> None:
            opt.zero_grad()
            own(input_ids=texts[:16], labels=texts[:16]).loss.backward()
            opt.step()

        calls[name] = step
    return ratio(take_turns(calls, rounds=30, seconds=0.1, clock=time.process_time), "SGHMC", "SGD")


def main() -> None:
    import peft

    torch.set_num_threads(1)
    times_a_step = sys.argv[1:] == ["step"]
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 and not times_a_step else 5
    record = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    rows = record.get("rows", {})
    texts = domains()
    samoan = texts.pop("Samoan")[:TEST]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(base(), config)
    if times_a_step:
        record["step of SGHMC over SGD"] = step_ratio(model, texts["essays"])
        print(record["step of SGHMC over SGD"])
        keep(RESULTS, record)
        return
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    for seed in map(str, range(seeds)):
        for domain, text in texts.items():
            for name, told in METHODS.items():
                by_seed = rows.setdefault(domain, {}).setdefault(name, {})
                if seed not in by_seed:
                    by_seed[seed] = measured(weights, model, told, int(seed), text, samoan)
                    print(seed, domain, name, by_seed[seed], flush=True)
                    keep(RESULTS, record | {"summary": summary(rows), "rows": rows})


if __name__ == "__main__":
    main()
