"""The experiments on a small Llama: what they measure, and that an interrupted run gives the table of an uninterrupted one."""

import json
import random

import pytest
import torch

from benchmarks.experiments import cells, language, llama, lora
from benchmarks.experiments.cells import kept, last, minus, slug, spent, takeaway

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


def test_other_settings_have_another_folder_and_the_time_is_that_of_the_cells(tmp_path, monkeypatch):
    monkeypatch.setenv("BAYESOPT_CHAIN_RUNS", str(tmp_path))
    folder = cells.folder_of("x", {"lr": 0.1})
    assert folder == cells.folder_of("x", {"lr": 0.1}) != cells.folder_of("x", {"lr": 0.2})
    for seed, seconds in enumerate((1.5, 2.5, 4.0)):
        kept(folder / f"seed-{seed}", "a", lambda _: {})
        (folder / f"seed-{seed}" / "a.json").write_text(json.dumps({"measures": {}, "seconds": seconds}))
    assert spent("x", {"lr": 0.1}, [0, 1]) == 4.0
    assert slug("SGHMC, T = 0.1/N") == "sghmc-t-0.1-n"


def test_an_unfinished_run_is_no_result():
    import bayesopt_chain as bc

    tx, p = bc.sgd(0.1), torch.ones(1)
    step = bc.make_step(lambda p, batch: (p**2).sum(), tx)
    run = bc.sample(step, p, tx.init(p), None, steps=5, callbacks=[lambda it: it.step == 2])
    with pytest.raises(RuntimeError, match="ended it after step 2"):
        last(run)


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


def test_the_held_out_part_is_the_last_and_windows_lose_less_than_one():
    text = synthetic("a book")
    train, held_out = language.parts(text, 1000)
    assert train + held_out == text[:1000] and len(held_out) == 150
    rows = language.windows(list(range(50)), 8)
    assert rows.shape == (6, 8) and rows.flatten().tolist() == list(range(48))
    with pytest.raises(ValueError, match="take more characters"):
        language.windows([1, 2, 3], 8)


def test_shuffling_keeps_the_words_and_a_cut_takes_the_last():
    text, g = "Water boils at 100°C under standard atmospheric pressure.", torch.Generator().manual_seed(0)
    mixed = llama.shuffled(text, g)
    assert mixed != text and sorted(mixed.split(" ")) == sorted(text.split(" "))
    assert llama.without_last_word(text) == "Water boils at 100°C under standard atmospheric"


def test_scores_of_members_that_are_sure_and_disagree_are_epistemic():
    p = torch.tensor([[[0.98, 0.01, 0.01]], [[0.01, 0.98, 0.01]]])
    one, two = llama.scores(p[:1].log(), torch.tensor([0])), llama.scores(p.log(), torch.tensor([2]))
    assert one.epistemic.item() == pytest.approx(0, abs=1e-6) and not one.wrong.item()
    assert two.epistemic.item() > 0.5 and two.wrong.item()
    assert two.nll.item() == pytest.approx(-torch.tensor(0.01).log().item(), rel=1e-5)


def test_an_adapter_sits_on_query_key_and_output_of_the_last_layer_and_what_follows_a_row_does_not_reach_it(
    words, tmp_path, monkeypatch
):
    monkeypatch.setenv("BAYESOPT_CHAIN_RUNS", str(tmp_path))
    settings = llama.EXPERIMENT.settings["smoke"] | lora.EXPERIMENT.settings["smoke"] | SMALLER | {"base_steps": 2}
    made = language.base(settings)
    before = {name: p.clone() for name, p in made.model.state_dict().items()}
    names = [n for n, p in lora.adapted(made, settings).named_parameters() if p.requires_grad]
    last_layer = settings["layers"] - 1
    assert {(n.split("layers.")[1].split(".")[0], n.split(".")[-4]) for n in names} == {
        (str(last_layer), part) for part in ("q_proj", "k_proj", "o_proj")
    }
    assert all(torch.equal(p, before[name]) for name, p in made.model.state_dict().items())
    work = llama.Work.make(made, settings, 0)
    assert {n.split("layers.")[1].split(".")[0] for n in work.start} == {str(last_layer)} and len(work.start) == 4
    members = {n: torch.stack([p, 1.5 * p]) for n, p in work.start.items()}
    rows = [work.train[0].tolist(), work.train[1, :5].tolist(), work.train[2, :9].tolist()]
    for row, p in zip(rows, work.each(members, rows)):
        torch.testing.assert_close(p, work.log_p(members, torch.tensor([row]))[:, 0], rtol=1e-4, atol=1e-5)


def test_the_text_is_verified(tmp_path, monkeypatch):
    monkeypatch.setenv("BAYESOPT_CHAIN_DATA", str(tmp_path))
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "peter_pan.txt").write_text("another edition")
    with pytest.raises(ValueError, match="not the file the experiments were made with"):
        language.text_of("peter_pan")
