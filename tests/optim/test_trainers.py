"""The examples of the pages on training loops, each as it stands, at temperature 0, and with torch's class in one line."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bayesopt_chain as bc

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / f"{name}.md" for name in ("trainers", "howto/lightning", "howto/hugging_face", "howto/pyro")]
EXAMPLES = {
    title.strip(): code
    for page in PAGES
    for title, code in re.findall(r"^##? ([^\n]+)\n(?:(?!^##? ).)*?```python\n(.*?)```", page.read_text(), re.M | re.S)
}
NEEDS = {
    "A plain loop": [],
    "Lightning": ["lightning"],
    "transformers.Trainer": ["transformers", "accelerate"],
    "accelerate": ["accelerate"],
    "PEFT: sampling a LoRA adapter": ["peft"],
    "A Pyro model": ["pyro"],
}


def run(code, folder, monkeypatch):
    monkeypatch.chdir(folder)
    space: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, "docs", "exec"), space)
    params = space["params"].values() if "params" in space else space["model"].parameters()
    return torch.cat([p.detach().flatten() for p in params]), space


def test_every_example_is_listed_and_at_most_40_lines_long():
    assert set(EXAMPLES) == set(NEEDS)
    assert all(len(code.strip().splitlines()) <= 40 for code in EXAMPLES.values())


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("title", NEEDS)
def test_one_line_changes_and_at_temperature_0_nothing_else(title, tmp_path, monkeypatch):
    for package in NEEDS[title]:
        pytest.importorskip(package)
    code = EXAMPLES[title]
    cold, cooled = re.subn(r"^T = .*$", "T = 0.0", code, flags=re.M)
    ours = r"bc\.optim\.SGHMC\((.*), temperature=T(?:, steps_per_epoch=len\(loader\))?\)"
    torchs, replaced = re.subn(ours, r"torch.optim.SGD(\1, momentum=0.9)", code)
    assert cooled == replaced == 1
    hot, space = run(code, tmp_path, monkeypatch)
    zero, _ = run(cold, tmp_path, monkeypatch)
    expected, _ = run(torchs, tmp_path, monkeypatch)
    assert torch.equal(zero, expected)
    assert hot.isfinite().all() and not torch.equal(hot, expected)
    if "draws" in space:
        assert len(space["draws"]) >= 4


class PureBatches(torch.utils.data.Sampler):
    """Batches of indices as a pure function of (seed, epoch, offset)."""

    def __init__(self, n: int, size: int, seed: int = 0) -> None:
        self.n, self.size, self.seed, self.epoch = n, size, seed, 0
        self.sampler = self  # Lightning sets the epoch of a batch sampler's sampler, after a resume too

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.n // self.size

    def __iter__(self):
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(1000 * self.seed + self.epoch))
        yield from order.view(
            -1, self.size
        ).tolist()  # lazily: after a resume the iterator exists before the epoch is set


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stop", [1, 2])
def test_lightning_resumed_equals_uninterrupted_bit_for_bit(stop, tmp_path):
    lightning = pytest.importorskip("lightning")
    torch.manual_seed(5)
    x, y = torch.randn(64, 3), torch.randn(64, 1)

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 1)

        def training_step(self, batch, index):
            return 0.5 * nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            optimizer = bc.optim.SGHMC(self.named_parameters(), lr=0.05, temperature=1 / 64)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def fit(epochs, seed, **kwargs):
        torch.manual_seed(seed)
        model = Regression()
        data = torch.utils.data.TensorDataset(x, y)
        loader = torch.utils.data.DataLoader(data, batch_sampler=PureBatches(64, 16))
        quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", **quiet)
        trainer.fit(model, loader, **kwargs)
        return trainer, torch.cat([p.detach().flatten() for p in model.parameters()])

    _, expected = fit(4, seed=0)
    trainer, _ = fit(stop, seed=0)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    _, resumed = fit(4, seed=99, ckpt_path=tmp_path / "run.ckpt", weights_only=True)
    assert torch.equal(resumed, expected)


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_transformers_resumes_from_its_checkpoint_bit_for_bit(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    code = EXAMPLES["transformers.Trainer"]
    expected, _ = run(code, tmp_path, monkeypatch)
    again = code.replace("trainer.train()", "trainer.train(resume_from_checkpoint='run/checkpoint-6')")
    again = again.replace("torch.manual_seed(0)", "torch.manual_seed(0); junk = torch.randn(3)", 1)
    assert again.count("junk") == 1
    data = code[code.index("data = ") : code.index("tokens = ")]
    again = again.replace(
        data, "torch.manual_seed(0); GPT2LMHeadModel(config)\n" + data
    )  # the same data, another start
    resumed, space = run(again, tmp_path, monkeypatch)
    assert torch.equal(resumed, expected)
    assert space["optimizer"].param_groups[0]["noise_count"] == 12


class Fit(nn.Module):
    """A linear model and its loss, called as transformers' models are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 1)

    def forward(self, x, y):
        return {"loss": 0.5 * nn.functional.mse_loss(self.net(x), y)}


def ivon(model):
    g = torch.Generator().manual_seed(1)
    return bc.optim.IVON(model.named_parameters(), 0.1, temperature=0.01, betas=(0.9, 0.9), generator=g)


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trainer", ["transformers", "lightning", "lightning without the callback"])
def test_a_trainer_takes_the_gradients_of_every_step_at_its_draw(trainer, tmp_path):
    """Two equal batches a step. Lightning calls a closure, and so has a draw for one batch a step without the callback too."""
    library = pytest.importorskip(trainer.split()[0])
    data = [{"x": torch.tensor([1.0, 2.0, -1.0]), "y": torch.tensor([3.0])}] * 16
    batch, several = torch.utils.data.default_collate(data[:4]), 1 if "without" in trainer else 2
    plain = Fit()
    optimizer = ivon(plain)
    for _ in range(16 // 4 // several * 3):
        optimizer.zero_grad()
        with optimizer.sampled():
            plain(**batch)["loss"].backward()
        optimizer.step()

    model = Fit()
    own = ivon(model)
    if trainer == "transformers":
        arguments = library.TrainingArguments(
            str(tmp_path), num_train_epochs=3, per_device_train_batch_size=4, gradient_accumulation_steps=2,
            max_grad_norm=0.0, lr_scheduler_type="constant", use_cpu=True, report_to="none", disable_tqdm=True,
            save_strategy="no",
        )  # fmt: skip
        callbacks = [own.callback()]
        library.Trainer(model, arguments, train_dataset=data, optimizers=(own, None), callbacks=callbacks).train()
    else:

        class Module(library.LightningModule):
            def __init__(self):
                super().__init__()
                self.inner = model

            def training_step(self, batch, index):
                return self.inner(**batch)["loss"]

            def configure_optimizers(self):
                return own

        quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        callbacks = [own.callback()] if several == 2 else []
        fit = library.Trainer(
            max_epochs=3, accelerator="cpu", accumulate_grad_batches=several, callbacks=callbacks, **quiet
        )
        fit.fit(Module(), torch.utils.data.DataLoader(data, 4))
    assert own.param_groups[0]["noise_count"] == optimizer.param_groups[0]["noise_count"]
    torch.testing.assert_close([*model.parameters()], [*plain.parameters()])
