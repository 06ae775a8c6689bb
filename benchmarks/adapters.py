"""Posteriors over LoRA adapters of a small language model: what each method is worth at equal gradients.

    python -m benchmarks.adapters --seeds 5        # goes on where it was; writes results/adapters.json
    python -m benchmarks.adapters --what step      # a step of bc.optim.SGHMC over one of torch.optim.SGD
    python -m benchmarks.adapters --what memory    # the largest memory of each method, in a process of its own
    python -m benchmarks.adapters --what books     # four books one after the other, whose texts are in --folder

All go into one record. The base, a Llama of 31 characters, 48 wide and two layers deep, is trained on five novels of
$BAYESOPT_CHAIN_DATA and then frozen. Adapters of rank 4 are trained on 256 sequences of 32 characters of film reviews (IMDb),
or of essays (The Souls of Black Folk), with GRADIENTS minibatch gradients in all, those that decide on the prior included.
Reported for 128 held-out sequences of the domain: NLL in nats and expected calibration error (15 bins of confidence) a token;
AUROC of a sequence's mean entropy, and of its mean mutual information, against 128 sequences of Samoan; processor seconds.
Each seed draws other sequences and starts; the base is one.

``step`` takes turns of a whole step, forward and backward with 16 sequences included, on another part of the essays each seed.

``memory`` takes a Llama of 512 tokens, 256 wide and four layers deep. What is reported is by how many MiB a call raises the
largest resident memory (``ru_maxrss``) of a process that has done nothing but import and make the model.

``books`` has a base of four other novels and GRADIENTS gradients a book, with 1,024 of its sequences; NLL is of 128 others of
it, at the trained adapter (of a Gaussian, its mean). ``posterior`` has the Laplace posterior of the last book as its prior,
``trained on`` begins where the last book ended, with next to no prior, and ``all at once`` has the four books together and as
many gradients as the others in all.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesopt_chain import Gaussian, optim
from bayesopt_chain.lora import Adapters, bayesian_lora
from bayesopt_chain.posterior import classification_metrics, detection_auroc
from bayesopt_chain.precision import Diagonal
from benchmarks.measure import RESULTS, command, fill, keep, known, mean_and_error, ratio, take_turns

PATH = RESULTS / "adapters.json"
DATA = Path(os.environ.get("BAYESOPT_CHAIN_DATA", "data"))
ALPHABET = " abcdefghijklmnopqrstuvwxyz.,'-"
LENGTH, TRAIN, TEST, BASE_STEPS, GRADIENTS, OF_BOOK = 32, 256, 128, 1200, 240, 1024
NOVELS = ("a_room_with_a_view", "anne_of_green_gables", "peter_pan", "the_enchanted_april", "the_great_gatsby")
OTHERS = ("a_room_with_a_view", "anne_of_green_gables", "dubliners", "the_enchanted_april")  # of the base of ``books``
BOOKS = ("the_souls_of_black_folk", "the_great_gatsby", "the_hound_of_the_baskervilles", "peter_pan")
METHODS: dict[str, dict[str, Any]] = {
    "one adapter": {"method": "ensemble", "members": 1},
    "one adapter, a quarter of the gradients": {"method": "ensemble", "members": 1, "steps": GRADIENTS // 4},
    "ensemble of four": {"method": "ensemble", "members": 4},
    "SGHMC, four chains": {"method": "sghmc", "members": 4, "draws": 8},
    "IVON": {"method": "ivon", "draws": 8},
    "Laplace": {"method": "laplace", "draws": 8},
}


ADAM = "torch's Adam"


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


def base(folder: Path, novels: tuple[str, ...]) -> Any:
    """The base, trained on the novels."""
    import transformers

    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=len(ALPHABET), num_key_value_heads=4, max_position_embeddings=LENGTH, **sizes
    )
    model = transformers.LlamaForCausalLM(config)
    text = torch.cat([sequences((folder / f"{n}.txt").read_text(encoding="utf-8")) for n in novels])
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
    metrics = classification_metrics(p.log(), y)
    scores = {"NLL": metrics["nll"], "ECE": metrics["ece"]}
    for name in ("entropy", "mutual_information"):
        own, out = (getattr(x, name)[:, :-1].mean(1) for x in (inside, outside))
        scores[f"AUROC of {name.replace('_', ' ')}"] = detection_auroc(own, out)
    return {**scores, "seconds": seconds, "gradients": found.report["gradients"]}


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


def training(model: Any, make: Callable[[Any], torch.optim.Optimizer], ids: Tensor) -> Callable[[], None]:
    """A whole step, forward and backward included, with 16 sequences and the optimizer of what is trained."""
    optimizer = make([p for p in model.parameters() if p.requires_grad])

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids[:16], labels=ids[:16]).loss.backward()
        optimizer.step()

    return step


def steps(model: Any, texts: Tensor) -> dict[str, Any]:
    """Processor time of a whole training step at T > 0 over that with torch's SGD, on five parts of the texts."""
    optimizers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "SGHMC": lambda params: optim.SGHMC(params, 1e-3, temperature=1e-4),
        "SGD": lambda params: torch.optim.SGD(params, 1e-3, momentum=0.9),
    }
    parts = []
    for k in range(5):
        calls = {who: training(copy.deepcopy(model), make, texts[16 * k :]) for who, make in optimizers.items()}
        parts.append(ratio(take_turns(calls, rounds=15, seconds=0.1, clock=time.process_time), *optimizers))
    ratios = [part["ratio"] for part in parts]
    low, high = min(part["low"] for part in parts), max(part["high"] for part in parts)
    return {"ratio": float(np.median(ratios)), "low": low, "high": high, "by part": ratios}


def memory_of(name: str) -> float:
    """MiB by which a call raises this process's largest resident memory; of "torch's Adam" four steps without the library."""
    import peft
    import transformers

    sizes: Any = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=512, num_key_value_heads=4, max_position_embeddings=64, **sizes)
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), adapter())
    ids = torch.randint(512, (64, 64))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if name == ADAM:
        step = training(model, lambda params: torch.optim.Adam(params, 1e-3), ids)
        for _ in range(4):
            step()
    else:
        told = METHODS[name] | {"steps": 16, "prior_precision": 1.0}
        bayesian_lora(model, {"input_ids": ids, "labels": ids}, **told)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def memory() -> dict[str, Any]:
    """Of each method, in two processes of its own."""
    found = {}
    for name in (ADAM, *METHODS):
        call = [sys.executable, "-m", "benchmarks.adapters", "--of", name]
        values = [float(subprocess.check_output(call, text=True)) for _ in range(2)]
        found[name] = {"MiB": sum(values) / 2, "low": min(values), "high": max(values)}
        print(name, found[name], flush=True)
    return found


def episodes(weights: Any, model: Any, seed: int, texts: list[Tensor]) -> dict[str, list[float]]:
    """NLL of each book's held-out sequences at the end, and right behind the book's own episode."""
    orders = [torch.randperm(len(t), generator=torch.Generator().manual_seed(seed)) for t in texts]
    train = [t[o[:OF_BOOK]] for t, o in zip(texts, orders)]
    tests = [t[o[OF_BOOK : OF_BOOK + TEST]] for t, o in zip(texts, orders)]
    as_data = lambda ids: {"input_ids": ids, "labels": ids}  # noqa: E731
    model.load_state_dict(weights)

    def nll(theta: dict[str, Tensor]) -> list[float]:
        at = Adapters(model, {name: x[None] for name, x in theta.items()})
        return [at.nll(as_data(t)) for t in tests]

    found: dict[str, list[float]] = {
        "base": nll({n: p.detach() for n, p in model.named_parameters() if p.requires_grad})
    }
    for name in ("posterior", "trained on"):
        prior, then = None, []
        for k, ids in enumerate(train):
            how = {"method": "laplace", "draws": 1} if name == "posterior" else {"method": "ensemble", "members": 1}
            made = bayesian_lora(model, as_data(ids), steps=GRADIENTS, seed=4 * seed + k, prior=prior, **how)
            prior = made.posterior
            if prior is None:
                mean = made.draw(0)
                weak = {n: torch.full_like(x, 1e-6) for n, x in mean.items()}
                prior = Gaussian(mean, Diagonal(weak, torch.tensor(1.0)))
            then.append(nll(prior.mean)[k])
        found[name], found[f"{name}, new"] = nll(prior.mean), then  # pyright: ignore[reportOptionalMemberAccess]
    together: dict[str, Any] = {"members": 1, "steps": GRADIENTS * len(train), "seed": seed}
    found["all at once"] = nll(bayesian_lora(model, as_data(torch.cat(train)), **together).draw(0))
    return found


def books(weights: Any, model: Any, folder: Path) -> dict[str, Any]:
    """Means over three seeds, by book."""
    texts = [sequences((folder / f"{name}.txt").read_text(encoding="utf-8")) for name in BOOKS]
    runs = [episodes(weights, model, seed, texts) for seed in range(3)]
    means = {name: np.array([run[name] for run in runs]) for name in runs[0]}
    found: dict[str, Any] = {n: dict(zip([*BOOKS, "mean"], [*x.mean(0), x.mean()])) for n, x in means.items()}
    gap = (means["posterior"] - means["trained on"]).mean(1)
    return found | {"posterior less trained on": mean_and_error(gap.tolist())}


def main() -> None:
    import peft

    given = command(seeds=5, what="league", folder=DATA / "books", of=None)
    if given.of:
        print(memory_of(given.of))
        return
    if given.what == "memory":
        keep(PATH, known(PATH) | {"memory": memory()})
        return
    model = peft.get_peft_model(base(given.folder, OTHERS if given.what == "books" else NOVELS), adapter())
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    if given.what == "books":
        keep(PATH, known(PATH) | {"books": books(weights, model, given.folder)})
        return
    texts = domains()
    if given.what == "step":
        keep(PATH, known(PATH) | {"step of SGHMC over SGD": steps(model, texts["essays"])})
        return
    samoan = texts.pop("Samoan")[:TEST]
    cells = (
        (("rows", where, name, str(seed)), partial(measured, weights, model, told, seed, text, samoan))
        for seed, (where, text), (name, told) in itertools.product(range(given.seeds), texts.items(), METHODS.items())
    )
    fill(PATH, cells, lambda record: {"summary": summary(record["rows"])})


if __name__ == "__main__":
    main()
