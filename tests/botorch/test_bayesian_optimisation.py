"""The benchmark of Bayesian optimisation at its smallest: every model proposes a point, and the record goes on."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("botorch")
pytestmark = [pytest.mark.peers, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def study(monkeypatch):
    from benchmarks import bayesian_optimisation as study

    monkeypatch.setattr(study, "ProcessPoolExecutor", lambda workers, mp_context: ThreadPoolExecutor(1))
    yield study
    torch.set_default_dtype(torch.float32)


def test_every_model_proposes_a_point_and_finished_cells_are_not_made_again(study, tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    cells = [("Branin", model, 0) for model in study.MODELS]
    first = study.fill(path, cells[:2], steps=1, epochs=16, workers=1)
    assert [cell["model"] for cell in first["cells"]] == ["Laplace", "process"]
    made = []
    run = study.run_cell
    monkeypatch.setattr(study, "run_cell", lambda *cell, **how: made.append(cell) or run(*cell, **how))
    record = study.fill(path, cells, steps=1, epochs=16, workers=1)
    assert made == cells[2:]
    regrets = torch.tensor([cell["regret"] for cell in record["cells"]])
    assert regrets.shape == (len(cells), 2)
    assert (regrets[:, 0] == regrets[0, 0]).all()  # the same first points
    assert (regrets >= 0).all() and (regrets[:, 1] <= regrets[:, 0]).all()
    assert study.table(record).count("| Branin |") == len(cells)
    with pytest.raises(ValueError, match="steps"):
        study.fill(path, cells, steps=2, epochs=16, workers=1)
