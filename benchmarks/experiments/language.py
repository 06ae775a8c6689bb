r"""A small Llama, trained from scratch on four novels: the base of the experiments on continual learning and uncertainty.

    tokens      byte-level BPE, its merges learned on the novels
    model       Llama's architecture (rotary positions, RMS norms, gated MLP, tied embeddings) at random initial weights
    base        AdamW on the first 85 % of the four novels, windows of ``length`` tokens, cosine learning rate

Four other books are the episodes of the one experiment and the fine-tuning text of the other. Of every book the last 15 % is
held out. Tokenizer and weights are kept in the folder of the run, which both experiments share: one base for all seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bayesopt_chain as bc
from benchmarks.experiments.common import (
    data_folder,
    finished,
    folder_of,
    verified,
)

NOVELS = ("a_room_with_a_view", "anne_of_green_gables", "dubliners", "the_enchanted_april")
EPISODES = ("the_souls_of_black_folk", "the_great_gatsby", "the_hound_of_the_baskervilles", "peter_pan")
SHORT = ("Souls", "Gatsby", "Hound", "Peter Pan")  # the episodes' names in tables
HELD_OUT = 0.15
SHA256 = {
    "a_room_with_a_view": "1bca8db40f188738b11620748afd7fac2e3803afd5e757f270b8ca79d4674f9f",
    "anne_of_green_gables": "bd14660006ea9d0394bb29548740dac66f9987d68876163f509deacfb5d1e9b0",
    "dubliners": "945936d50b8490117dffa03b735b53d4562825ab9aecf42eea780744a346c75e",
    "peter_pan": "f093a7678a91786d3d4b22cbf82f16f9ddb917939db0c4b102a4c90fcf855240",
    "the_enchanted_april": "ea400bea0cd81f55b2e1d8d25a6f82d12b3d652f858647b96875e180fa5ad488",
    "the_great_gatsby": "b85487b89c4b5f13efc6a59bc97b5c81ec4371768e6c1106b388153fb764f36b",
    "the_hound_of_the_baskervilles": "4bf27abb837abd43bd787dcfd9aa58d6c9578381836de74a4f7300233fccf2e7",
    "the_souls_of_black_folk": "41936d9530381ad80aeb3b14b0e6a4f5312632bf4c3592053c5f5589dd7ced3a",
}
# characters: of each novel, from its beginning; None for all of it. An experiment has book_characters for its own books.
SCALES: dict[str, dict[str, Any]] = {
    "smoke": {"characters": 3000, "vocabulary": 300, "width": 16, "layers": 2, "heads": 2, "length": 24}
    | {"base_batch": 8, "base_steps": 60, "base_lr": 2e-2},
    "small": {"characters": None, "vocabulary": 1024, "width": 128, "layers": 3, "heads": 4, "length": 128}
    | {"base_batch": 8, "base_steps": 4000, "base_lr": 2e-3},
    "full": {"characters": None, "vocabulary": 4096, "width": 512, "layers": 8, "heads": 8, "length": 512}
    | {"base_batch": 16, "base_steps": 40_000, "base_lr": 6e-4},
}


class Book(NamedTuple):
    """Token numbers of a book, in windows ``[B, length]``."""

    train: Tensor
    held_out: Tensor


class Base(NamedTuple):
    """The tokenizer (of the package tokenizers) and the trained model, a ``transformers.LlamaForCausalLM`` in eval mode."""

    tokenizer: Any
    model: nn.Module

    def tokens(self, text: str) -> list[int]:
        """Token numbers of a text; of any text, for the smallest tokens are bytes."""
        return self.tokenizer.encode(text).ids

    def book(self, name: str, s: Mapping[str, Any]) -> Book:
        """A book, or its first ``book_characters``, in windows."""
        return Book(*(windows(self.tokens(part), s["length"]) for part in parts(text_of(name), s["book_characters"])))


def text_of(name: str) -> str:
    """The text of a book, verified."""
    return verified(data_folder() / "books" / f"{name}.txt", SHA256[name]).read_text(encoding="utf-8")


def parts(text: str, characters: int | None) -> tuple[str, str]:
    """The first 85 % and the held-out rest of a text, or of its first so many characters."""
    text = text[:characters]
    cut = round(len(text) * (1 - HELD_OUT))
    return text[:cut], text[cut:]


def windows(tokens: Sequence[int], length: int) -> Tensor:
    """Consecutive windows ``[B, length]`` without overlap; the rest that fills none is left out."""
    whole = len(tokens) // length
    if not whole:
        raise ValueError(f"windows: {len(tokens)} tokens fill no window of {length}; take more characters")
    return torch.tensor(tokens[: whole * length]).reshape(whole, length)


def log_likelihood(logits: Tensor, tokens: Tensor) -> Tensor:
    """Of every token but the first, given those before it, ``[B, length - 1]`` in nats."""
    return -cross_entropy(logits[..., :-1, :].mT, tokens[..., 1:], reduction="none")


@torch.no_grad()
def nll(forward: Any, params: Any, tokens: Tensor, batch: int = 32) -> float:
    """Mean negative log-likelihood of windows, nats a token."""
    return (
        -torch.cat([log_likelihood(forward(params, rows).logits, rows) for rows in tokens.split(batch)]).mean().item()
    )


def untrained(s: Mapping[str, Any]) -> Any:
    """A Llama at random initial weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=s["vocabulary"],
        hidden_size=s["width"],
        intermediate_size=8 * s["width"] // 3,
        num_hidden_layers=s["layers"],
        num_attention_heads=s["heads"],
        num_key_value_heads=s["heads"],
        max_position_embeddings=s["length"],
        tie_word_embeddings=True,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def tokenizer_of(texts: Sequence[str], s: Mapping[str, Any], path: Path) -> Any:
    """Byte-level BPE learned on the texts, kept at ``path``."""
    from tokenizers import ByteLevelBPETokenizer, Tokenizer

    if not path.exists():
        learned = ByteLevelBPETokenizer()
        learned.train_from_iterator(texts, vocab_size=s["vocabulary"], min_frequency=2, show_progress=False)
        learned.save(str(path))
    return Tokenizer.from_file(str(path))


def base(settings: Mapping[str, Any]) -> Base:
    """The base model of these settings, trained or read from the folder of the run; an interrupted training goes on."""
    s = {name: settings[name] for name in SCALES["small"]}
    folder = folder_of("language", s)
    folder.mkdir(parents=True, exist_ok=True)
    texts = [parts(text_of(name), s["characters"])[0] for name in NOVELS]
    tokenizer = tokenizer_of(texts, s, folder / "tokenizer.json")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = untrained(s)
    forward, params, _ = bc.make_functional(model)
    found = Base(tokenizer, model)
    data = torch.cat([windows(found.tokens(text), s["length"]) for text in texts])

    def loss(params: Any, tokens: Tensor) -> Tensor:
        return -log_likelihood(forward(params, tokens).logits, tokens).mean()

    steps = s["base_steps"]

    def lr(count: Tensor) -> Tensor:
        """Up over a twentieth of the steps, then half a cosine."""
        done = torch.as_tensor(count) / steps
        return s["base_lr"] * torch.minimum(done * 20 + 1e-3, (1 + torch.cos(math.pi * done)) / 2)

    tx = bc.adamw(lr, weight_decay=0.1)
    batches = bc.epochs(data, s["base_batch"], seed=0)
    step = bc.make_step(loss, tx, inplace=True)
    bc.write_back(model, finished(step, params, tx.init(params), batches, steps, folder / "weights")[-1])
    model.set_attn_implementation("eager")  # torch.vmap has no rule for the fused kernel, and would loop
    return found
