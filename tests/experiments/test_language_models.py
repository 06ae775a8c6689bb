"""The experiments on a small Llama: what they measure, and that an interrupted run gives the table of an uninterrupted one."""

import random

import pytest

from benchmarks.experiments import language, llama, lora
from benchmarks.experiments.common import kept, minus, takeaway

SMALLER = {"characters": 1500, "book_characters": 1500, "base_steps": 50}
WORDS = ["the", "river", "of", "a", "stone", "and", "light", "in", "every", "old", "house", "was", "not", "far", "from"]


def synthetic(name):
    g = random.Random(name)
    return " ".join(g.choice(WORDS) for _ in range(600))


@pytest.fixture
def words(monkeypatch):
    """Books and statements of random words, so that no data are needed."""
    for package in ("transformers", "tokenizers", "peft", "sklearn"):
        pytest.importorskip(package)
    some = [" ".join(synthetic(f"statement {i}").split()[: 6 + i % 3]) for i in range(4)]
    monkeypatch.setattr(language, "text_of", synthetic)
    monkeypatch.setattr(llama, "statements", lambda: (some, [text[::-1] for text in some]))


class Killed(Exception):
    """What ends a run in the middle, as the death of its process would."""


def killed_in(call, step, sample):
    """``bc.sample`` with a checkpoint after every step, of which one call dies after so many steps."""
    calls = iter(range(1, 100))

    def killed(*args, **keywords):
        number = next(calls)

        def die(it):
            if number == call and it.step == step:
                raise Killed

        return sample(*args, **keywords, checkpoint_seconds=0.0, callbacks=[die])

    return killed


@pytest.mark.slow
@pytest.mark.parametrize("module, kills", [(lora, [(1, 5), (4, 3)]), (llama, [(1, 5), (3, 2)])])
def test_an_interrupted_and_resumed_run_gives_the_same_table(module, kills, words, tmp_path, monkeypatch):
    """Killed in the training of the base, then in the second method's chain; each time the same command goes on."""
    if module is lora:
        monkeypatch.setattr(lora, "METHODS", {m: lora.METHODS[m] for m in ("AdamW", "Laplace, diagonal")})
    else:
        monkeypatch.setattr(llama, "SHARES", {m: llama.SHARES[m] for m in ("SGD, 10 runs", llama.BAYES)})
    settings, sample = module.EXPERIMENT.settings["smoke"] | SMALLER, module.bc.sample
    monkeypatch.setenv("BAYESOPT_CHAIN_RUNS", str(tmp_path / "whole"))
    whole = module.run(settings, 3)
    monkeypatch.setenv("BAYESOPT_CHAIN_RUNS", str(tmp_path / "parts"))
    for call, step in kills:
        monkeypatch.setattr("bayesopt_chain.sample", killed_in(call, step, sample))
        with pytest.raises(Killed):
            module.run(settings, 3)
    monkeypatch.setattr("bayesopt_chain.sample", sample)
    assert module.run(settings, 3) == whole
    made = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("seed-3/*.json")}
    assert module.run(settings, 3) == whole and len(made) > 6
    assert made == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("seed-3/*.json")}


def test_a_finished_cell_is_read_and_one_that_failed_is_made_again(tmp_path, monkeypatch):
    calls = []

    def make(folder):
        calls.append(folder)
        if len(calls) == 1:
            raise Killed
        return {"nll": 0.1 + 0.2}

    with pytest.raises(Killed):
        kept(tmp_path, "Laplace, s = 100", make)
    assert [kept(tmp_path, "Laplace, s = 100", make) for _ in range(3)] == [{"nll": 0.1 + 0.2}] * 3
    assert calls == [tmp_path / "laplace-s-100"] * 2


@pytest.mark.parametrize(
    "values, verdict",
    [
        ([-0.30, -0.25, -0.20], "confirmed"),
        ([0.30, 0.25, 0.20], "contradicted"),
        ([-0.30, -0.10, -0.05], "undecided"),  # of one sign, but further from one another than from zero
        ([-0.10, 0.30, 0.20], "undecided"),
        ([-0.30], "undecided"),
    ],
)
def test_a_claim_is_decided_by_the_spread_over_seeds(values, verdict):
    value = {"mean": sum(values) / len(values), "low": min(values), "high": max(values)}
    opposite = {"confirmed": "contradicted", "contradicted": "confirmed"}.get(verdict, verdict)
    assert f"a claim: {verdict} (" in takeaway("a claim", value)
    assert f"a claim: {opposite} (" in takeaway("a claim", minus(value))


def test_the_text_is_verified(tmp_path, monkeypatch):
    monkeypatch.setenv("BAYESOPT_CHAIN_DATA", str(tmp_path))
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "peter_pan.txt").write_text("another edition")
    with pytest.raises(ValueError, match="not the file the experiments were made with"):
        language.text_of("peter_pan")
