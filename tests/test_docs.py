"""Every page of the site shows something that runs and is read without a warning; its links lead somewhere, and its tables of
names and samplers are those of the code. ``make docs`` writes and measures the pages.

The figures of the README and of the page on speed are those of the files that the benchmarks wrote.
"""

import importlib
import json
import pkgutil
import re

import optree
import pytest
import torch

import bayesopt_chain as bc
from benchmarks import pages
from benchmarks.measure import RESULTS, ROOT, known
from tests.registry import SAMPLERS
from tests.site import build

DOCS = ROOT / "docs"
PAGES = [DOCS / f"{name}.md" for name in ("choosing", "coming_from", "methods", "speed", "temperature")]
PAGES += [page for page in sorted((DOCS / "howto").glob("*.md")) if page.stem != "digits_table"]


def test_a_page_has_an_example_that_runs_and_says_what_can_go_wrong():
    for page in PAGES:
        text = page.read_text()
        # these have whole programs, which run in tests/optim/test_trainers.py and tests/lora
        programs = ("lightning", "hugging_face", "pyro", "adapters")
        assert ">>> " in text or (page.stem in programs and "```python" in text), page.stem
        assert "## What can go wrong" in text, page.stem


def test_every_public_name_of_posteriors_stands_on_the_page():
    posteriors = pytest.importorskip("posteriors")
    theirs = "\n".join(re.findall(r"(?m)^\| (.*?) \| ", (DOCS / "howto" / "from_posteriors.md").read_text()))
    missing = []
    for found in pkgutil.walk_packages(posteriors.__path__, "posteriors."):
        module = importlib.import_module(found.name)
        own = [
            n for n, x in vars(module).items() if getattr(x, "__module__", None) == found.name and not n.startswith("_")
        ]
        if "build" in own:  # a method: by its path, its state by name; init, update and sample are those of all
            own = [found.name.removeprefix("posteriors."), *({*own} - {"build", "init", "update", "sample"})]
        missing += [(found.name, name) for name in own if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", theirs)]
    assert not missing


@pytest.mark.slow
def test_the_site_is_read_and_every_reference_is_resolved_without_a_warning(tmp_path):
    assert build(tmp_path, "dummy") == ""


SAMPLERS_PAGE = DOCS / "samplers.md"


def rows_of_samplers() -> dict[str, list[str]]:
    """Cells of each row by the names in its first column."""
    rows = {}
    for line in SAMPLERS_PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 6 and cells[0].startswith("`"):
            names = re.findall(r"`([^`]+)`", cells[0])
            buffers = [cell.strip() for cell in cells[4].split(",")]
            for n, name in enumerate(names):
                rows[name] = [*cells[:4], buffers[min(n, len(buffers) - 1)], cells[5]]
    return rows


SPELLINGS = {
    "sgld, order 1": "sgld(order=1)",
    "sghmc, order 1": "sghmc(order=1)",
    "sgnht, per parameter": "sgnht(per_parameter=True)",
    "badodab, per parameter": "badodab(per_parameter=True)",
    "cyclical, lr inside": "cyclical(lr_inside=True)",
}


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_its_row_has_the_buffers_of_the_state_the_fitted_order_and_its_optimizer(sampler):
    _, _, optimizer, order, buffers, _ = rows_of_samplers()[str(SPELLINGS.get(sampler.name, sampler.name))]
    # the rows of two chains in the registry are dressed as one chain
    params = torch.zeros(500) if sampler.function in ("svgd", "replica_exchange") else torch.zeros(2, 500)
    held = optree.tree_leaves(sampler.build(0.3).init(params))
    assert sum(t.numel() for t in held if t.is_floating_point()) // 1000 == int(buffers)
    if sampler.order:
        assert order.startswith(str(sampler.order.slope)) and (" in `h`" in order) == sampler.order.in_time
    assert optimizer.startswith("none") == (sampler.limit is None and sampler.name != "svgd")


def test_the_examples_run():
    for code in re.findall(r"```python\n(?!>>>)(.*?)```", SAMPLERS_PAGE.read_text(), re.S):  # ">>>": doctests
        exec(compile(code, str(SAMPLERS_PAGE), "exec"), {})


README = (ROOT / "README.md").read_text()


def test_the_readme_names_two_commands_and_files_that_are_there():
    links = re.findall(r"\]\(([^)]*)\)", README)
    assert len(README.splitlines()) < 90 and 0 < len(links) <= 12 and all((ROOT / link).exists() for link in links)
    assert "make demo" in README and "make test" in README


def test_the_excess_that_the_readme_states_is_that_of_white_noise():
    excess = {}
    for order in (2, 1):
        tx = bc.chain(bc.add_momentum(0.9), bc.inject_langevin_noise(1.0, order=order), bc.scale_by_neg_lr(1.9))
        excess[order] = bc.testing.stationary_covariance(tx, torch.ones(1, 1, dtype=torch.float64)).item() - 1
    assert abs(excess[2]) < 1e-10 and f"{excess[1]:.2f} (white noise" in README


@pytest.mark.slow
def test_the_code_of_the_readme_runs_as_pasted():
    """The chain of draws goes another way on another processor; 150 draws of one chain say the rest within .3."""
    code = "\n".join(block.split("```")[0] for block in README.split("```python")[1:])
    names = {}
    exec(code, names)
    one, posterior = names["one"][:, 0], names["posterior"][:, 0]
    assert one[1] > 0.9 and one[2] < 0.1  # one network is certain far from all data
    assert posterior[0] > 0.9 and 0.05 < posterior[1] < 0.85 and 0.15 < posterior[2] < 0.85
    gradients = names["gradients"]
    cold, theirs, warm = (
        tx.update(gradients, tx.init(gradients), inplace=False)[0]["w"]
        for tx in (names["sampler"](0.0), names["torchopt"].sgd(0.1, momentum=0.9), names["sampler"](1e-3))
    )
    assert torch.equal(cold, theirs) and not torch.equal(cold, warm)


# Numbers in documents are those of the records: behind a number stands, unseen on the page, where it comes from


def test_every_number_and_passage_is_that_of_its_record():
    texts = {page.name: page.read_text() for page in pages.PAGES}
    marks = {name: len(pages.NUMBER.findall(text)) for name, text in texts.items()}
    assert sum(marks.values()) >= 16 and marks == {name: text.count(".json: ") for name, text in texts.items()}
    assert all(f"<!-- end of {name} -->" in texts["speed.md"] for name in pages.PASSAGES)
    old = [name for name, text in texts.items() if pages.filled(text) != text]
    assert not old, "run `python -m benchmarks.pages`"


def test_the_tests_that_a_page_names_are_there():
    named = re.findall(r"`pytest (tests/[\w/.]+)(?: -k (\w+))?`", "".join(page.read_text() for page in pages.PAGES))
    assert len(named) > 6 and all((ROOT / file).exists() for file, _ in named)
    assert all(word in (ROOT / file).read_text() for file, word in named if word), named


def test_the_numbers_of_the_readme_are_marked():
    table = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| ") and "0." in line]
    assert table and all(pages.NUMBER.search(line) or "to 1e-10" in line for line in table), table


def test_a_record_that_changes_is_seen_at_every_number():
    """Each in turn becomes another number in its record."""
    for mark in pages.NUMBER.finditer("".join(page.read_text() for page in pages.PAGES)):
        value = pages.recorded(mark[3], mark[4])
        assert (
            pages.filled(mark[0], lambda text, old=value: text.replace(json.dumps(old), json.dumps(2 * old + 1)))
            != mark[0]
        )


def test_every_benchmark_can_be_imported():
    files = [file.relative_to(ROOT).with_suffix("") for file in (ROOT / "benchmarks").rglob("*.py")]
    for file in files:
        importlib.import_module(".".join(file.parts))
    assert len(files) > 40


def test_every_record_has_a_command_that_is_there_or_stands_among_those_made_once():
    """``demo.json`` is written by ``examples/demo.py``; of what was made once a table names record, question and command."""
    once, gone = (ROOT / "benchmarks" / "measured_choices.md").read_text(), []
    for record in RESULTS.glob("*.json"):
        command = known(record).get("command", f"python -m benchmarks.{record.stem}").split()
        module = ROOT / command[2].replace(".", "/")
        if not (module.is_dir() or module.with_suffix(".py").exists() or f"`{record.name}`" in once):
            gone.append(record.name)
    assert gone == ["demo.json"]
