"""Every example whose loop has minibatches samples within 1.5 times the variance asked for, or says in its lines what it is.

The law is that of :func:`bayesopt_chain.diagnostics.heating`: lr, momentum, temperature, batch size and data come out of the
example as it stands, noise and curvature are measured where its run ended.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import functional_call

import bayesopt_chain as bc

ROOT = Path(__file__).parents[2]
WITHIN = 0.5
SAMPLER = re.compile(
    r"\b(?:bc|optim|self)\.(?:optim\.)?(?:sghmc|sgld|sgd|adam|adamw|rmsprop|SGHMC|SGLD|SGD|Adam|AdamW|RMSprop)\([^\n]*temperature"
)
BATCHES = re.compile(
    r"epochs\(\(|epochs\([a-z_]+,|DataLoader\(|DataLoader\b.*batch_size|rows = torch\.randint|per_device_train_batch_size"
)
SAYS = re.compile(
    r"#[^\n]*\b(hot|heated|heat|heats)\b"  # a comment
    r"|diagnostics\.heating\(|minibatches heat"  # the heat is what is shown
    r"|suggest_(?:lr|chain)\(|make_step\(estimator"  # chosen by the law; batches' noise removed
)
COMPUTED = {
    "docs/trainers.md: A plain loop",
    "docs/howto/lightning.md: Lightning",
    "docs/howto/hugging_face.md: transformers.Trainer",
    "docs/howto/hugging_face.md: accelerate",
    "docs/howto/data_parallel.md: One chain on data-parallel gradients",
}


def blocks():
    """``(name, code)`` of every block of code in README, documents, notebooks and examples."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "howto").glob("*.md"))]
    for page in pages:
        title = page.stem.capitalize()
        for line, code in re.findall(r"^#+ ([^\n]+)$|^```python\n(.*?)^```", page.read_text(), re.M | re.S):
            title = line or title
            if code:
                yield f"{page.relative_to(ROOT)}: {title}", code
    for path in (ROOT / "examples").glob("*.py"):
        yield str(path.relative_to(ROOT)), path.read_text()
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for i, cell in enumerate(json.loads(path.read_text())["cells"]):
            if cell["cell_type"] == "code":
                yield f"{path.relative_to(ROOT)}: cell {i}", "".join(cell["source"])


def docstrings():
    """The examples of the package's docstrings."""
    for path in sorted((ROOT / "bayesopt_chain").rglob("*.py")):
        for i, text in enumerate(re.findall(r'"""(.*?)"""', path.read_text(), re.S)):
            if ">>> " in text:
                yield f"{path.relative_to(ROOT)}: docstring {i}", text


def excess(loss, params, data, batch, tx):
    """Of the worst direction, under reshuffled epochs; noise from as many epochs as make about a hundred batches."""
    batches = bc.epochs(data, batch, seed=0)
    noise = bc.diagnostics.gradient_noise(loss, params, batches)
    curvature = bc.diagnostics.hessian_product(loss, params, [data])
    return float(bc.diagnostics.heating(tx, noise, curvature=curvature).worst)


def test_every_example_with_minibatches_is_computed_or_says_what_it_is():
    found = [(name, code) for name, code in [*blocks(), *docstrings()] if SAMPLER.search(code) and BATCHES.search(code)]
    assert len(found) >= 8  # the search finds something
    assert {name for name, _ in found} >= COMPUTED
    silent = [name for name, code in found if name not in COMPUTED and not SAYS.search(code)]
    assert silent == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("title", ["A plain loop", "Lightning", "transformers.Trainer", "accelerate"])
def test_the_loops_of_trainers_are_cool(title, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for package in {"Lightning": ["lightning"], "transformers.Trainer": ["transformers"]}.get(
        title, [title.lower()][: title == "accelerate"]
    ):
        pytest.importorskip(package)
    code = next(code for name, code in blocks() if name in COMPUTED and name.endswith(f": {title}"))
    space: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, "docs", "exec"), space)
    model, T = space["model"], space["T"]
    optimizer = space["trainer"].optimizers[0] if title == "Lightning" else space.get("optimizer")
    group = getattr(optimizer, "optimizer", optimizer).param_groups[0]
    tx = bc.sghmc(group.get("initial_lr", group["lr"]), group["momentum"], temperature=T)
    names = {name: p.detach().cpu() for name, p in model.named_parameters()}
    if title == "transformers.Trainer":
        words = torch.stack([row["input_ids"] for row in space["data"]])
        data, batch = (words,), space["arguments"].per_device_train_batch_size
        model.config._attn_implementation = "eager"

        def loss(params, batch):
            return functional_call(model.eval(), params, (), {"input_ids": batch[0], "labels": batch[0]}).loss

    else:
        data, accumulated = (space["x"], space["y"]), 2 if title == "accelerate" else 1
        loader = space["loader"]
        batch = accumulated * (getattr(loader, "batch_size", None) or loader.batch_sampler.batch_size)
        net = getattr(model, "net", None)
        if net is not None:
            names = {name.removeprefix("net."): p for name, p in names.items()}

        def loss(params, batch):
            return 0.5 * (functional_call(net or model, params, (batch[0],)) - batch[1]).square().mean()

    assert excess(loss, names, data, batch, tx) < WITHIN


def test_the_chain_whose_data_lie_on_all_ranks_is_cool():
    code = next(code for name, code in blocks() if name in COMPUTED and "data_parallel" in name)
    lr = float(re.search(r"bc\.sghmc\(([\d.]+), temperature=1 / len\(x\)\)", code)[1])
    batch = int(re.search(r"bc\.epochs\(\(x, y\), (\d+), seed=0, mesh=mesh\)", code)[1])
    N, width = map(int, re.search(r"torch\.randn\((\d+), (\d+), generator", code).groups())
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(N, width, generator=generator), torch.randn(N, generator=generator)

    def loss(w, batch):
        return ((batch[0] @ w - batch[1]) ** 2).mean() / 2

    mode = torch.linalg.lstsq(x, y).solution
    tx = bc.sghmc(lr, temperature=1 / N)
    assert excess(loss, mode, (x, y), batch, tx) < WITHIN
    assert excess(loss, mode, (x, y), batch, bc.sghmc(3 * lr, temperature=1 / N)) > WITHIN  # the law can fail
