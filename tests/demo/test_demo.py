"""The demo: its tasks, its tables by hand, its errors, and the whole command at reduced size."""

import json
import math
import subprocess
import sys

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

import bayesopt_chain as bc
from bayesopt_chain.demo import command, table, tasks
from bayesopt_chain.demo.contestants import ENSEMBLE, METHODS, NETWORK, POSTERIOR
from bayesopt_chain.demo.scores import calibration_error, scores


@pytest.mark.parametrize("name", ["digits", "mislabelled digits"])
def test_no_unseen_digit_is_trained_or_scored_on(name):
    task = tasks.load(name, seed=3)
    assert task.train[1].max() < tasks.SEEN and task.test[1].max() < tasks.SEEN
    assert len(task.train[0]) == 400 and len(task.train[0]) + len(task.test[0]) + len(task.unseen) == 1797


@pytest.mark.parametrize("name", tasks.NAMES)
def test_training_and_test_halves_are_disjoint_standardised_and_another_split_for_another_seed(name):
    task, other = tasks.load(name, seed=0), tasks.load(name, seed=1)
    train, test = ({tuple(row.tolist()) for row in half[0]} for half in (task.train, task.test))
    assert not train & test
    torch.testing.assert_close(task.train[0].mean(0), torch.zeros(task.train[0].shape[1]), atol=1e-5, rtol=0)
    assert not torch.equal(task.train[0], other.train[0])


def test_a_share_of_the_training_labels_is_random_and_no_test_label_is():
    clean, noisy = tasks.load("digits", seed=3), tasks.load("mislabelled digits", seed=3)
    assert torch.equal(clean.test[1], noisy.test[1]) and torch.equal(clean.train[0], noisy.train[0])
    changed = (clean.train[1] != noisy.train[1]).double().mean().item()
    expected = tasks.WRONG * 7 / 8  # one in eight is replaced by itself
    assert (
        abs(changed - expected) < 4 * (expected * (1 - expected) / 400) ** 0.5
    )  # false alarms 6e-5; the seed is fixed


def test_scores_of_known_probabilities_are_those_worked_out_by_hand():
    x, y = torch.zeros(2, 1), torch.tensor([0, 1])
    task = tasks.Task("two", 2, (x, y), (x, y), torch.zeros(1, 1))
    p = torch.tensor([[0.8, 0.2], [0.6, 0.4]])  # the second is wrong

    def of(p):
        return bc.likelihoods.categorical().mixture(p.log()[None])

    found = scores(task, of(p), of(torch.tensor([[0.5, 0.5]])))
    assert found["nll"] == pytest.approx(-(math.log(0.8) + math.log(0.4)) / 2)
    assert found["error"] == 0.5 and found["unseen"] == 1.0
    assert found["miscovered"] == pytest.approx((0.2 + 0.6) / 2) == pytest.approx(calibration_error(p, y))


def test_an_interval_of_numbers_that_hold_nine_tenths_misses_nothing():
    y = torch.linspace(-0.9, 0.9, 10)[:, None]
    task = tasks.Task("line", 0, (y, y), (y, y), y[:0])
    wide = bc.likelihoods.gaussian(100.0).mixture(torch.zeros(1, 10, 1))
    assert scores(task, wide, None)["miscovered"] == pytest.approx(0.1)  # all inside, where nine tenths should be


def made(differences, other=1.0):
    """Cells of one task in which the posterior's score is the others' plus these differences."""
    rows = {
        name: [{"nll": other, "error": 0.1, "miscovered": 0.1, "cost": 1.0} for _ in differences] for name in METHODS
    }
    rows[POSTERIOR] = [{**row, "nll": other + d} for row, d in zip(rows[POSTERIOR], differences)]
    return {"task": rows}


def test_a_difference_has_the_interval_of_student_and_its_words():
    cells = made([-0.1, -0.2, -0.3])
    mean, half = table.difference(cells, "task", POSTERIOR, ENSEMBLE)
    assert mean == pytest.approx(-0.2) and half == pytest.approx(4.302653 * 0.1 / 3**0.5, rel=1e-6)
    assert table.verdict(mean, half) == "undecided"
    for differences, word in (([-0.1, -0.1, -0.11], "won"), ([0.1, 0.1, 0.11], "lost")):
        words = " ".join(table.text(made(differences)).split())
        for other in ("one network", "the last-layer Laplace", "the deep ensemble"):
            won, lost = ("likelihood on task", "nothing") if word == "won" else ("nothing", "likelihood on task")
            assert f"against {other}: won {won}. Lost {lost}." in words


def test_one_split_decides_nothing():
    assert "one split has no interval" in table.text(made([-5.0]))
    assert "against one network: won nothing. Lost nothing." in " ".join(table.text(made([-5.0])).split())


def test_more_of_what_tells_unseen_digits_is_better():
    cells = made([0.0, 0.0, 0.0])
    for name, rows in cells["task"].items():
        for k, row in enumerate(rows):
            row["unseen"] = 0.9 + 0.001 * k if name == POSTERIOR else 0.8
    assert "against the deep ensemble: won telling unseen digits on task. Lost nothing." in " ".join(
        table.text(cells).split()
    )


@pytest.mark.parametrize(("option", "least"), [("--seeds", 1), ("--steps", 20), ("--workers", 1)])
def test_an_option_that_is_too_small_is_refused_by_name(option, least, capsys):
    with pytest.raises(SystemExit):
        command.main([option, "0"])
    assert f"{option} must be at least {least}, got 0" in capsys.readouterr().err


def test_a_task_that_is_not_there_is_refused_with_those_that_are(capsys):
    with pytest.raises(SystemExit):
        command.main(["--tasks", "wine,iris"])
    assert "--tasks has 'iris'; choose from wine, breast cancer" in capsys.readouterr().err


@pytest.mark.slow
def test_a_missing_package_names_the_extra_to_install():
    code = (
        "import sys, runpy; sys.modules['sklearn'] = None; runpy.run_module('bayesopt_chain.demo', run_name='__main__')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert 'pip install "bayesopt_chain[demo]"' in result.stderr


@pytest.mark.slow
def test_what_is_installed_is_printed_with_its_size():
    result = subprocess.run(
        [sys.executable, "-m", "bayesopt_chain.demo.installed"], capture_output=True, text=True, check=True
    )
    *packages, total = result.stdout.splitlines()
    assert any(" torch " in line for line in packages) and total.endswith(f"{len(packages)} packages")


@pytest.mark.slow
def test_the_command_prints_a_line_a_task_the_tables_and_the_words_and_writes_figure_and_scores(tmp_path):
    figure, found = tmp_path / "demo.png", tmp_path / "demo.json"
    size = ["--steps", "30", "--seeds", "2", "--workers", "1", "--tasks", "wine,mislabelled digits"]
    code = [sys.executable, "-m", "bayesopt_chain.demo", *size, "--figure", str(figure), "--json", str(found)]
    result = subprocess.run(code, capture_output=True, text=True, check=True)  # not a terminal

    assert figure.read_bytes().startswith(b"\x89PNG") and figure.stat().st_size > 20_000
    for k, (name, seed) in enumerate(((n, s) for s in range(2) for n in ("wine", "mislabelled digits")), 1):
        assert f"[ {k}/4] {name}, seed {seed}: one network" in result.stdout
    assert "The posterior against the deep ensemble: won" in result.stdout
    assert "seconds of processor time" in result.stdout
    cells = json.loads(found.read_text())["cells"]
    for by in cells.values():
        assert list(by) == list(METHODS)
        assert all(math.isfinite(value) for rows in by.values() for row in rows for value in row.values())
        assert all(row["cost"] < other["cost"] for row, other in zip(by[NETWORK], by[POSTERIOR]))
    assert "unseen" in cells["mislabelled digits"][POSTERIOR][0] and "unseen" not in cells["wine"][POSTERIOR][0]
