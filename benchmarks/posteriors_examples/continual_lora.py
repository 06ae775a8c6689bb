"""A LoRA adapter that learns one text after another without forgetting: each posterior is the next prior (its
``continual_lora``).

A small language model of bytes stands for Llama; its three texts are books where the data are there, and else drawn here.
"""

# The types of posteriors are narrower than what it takes.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

TASKS, LENGTH, LAM = 3, 32, 1.0


class Model(nn.Module):
    """One layer of causal attention over bytes, ``[B, L]`` to logits ``[B, L, 256]``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.query, self.value = nn.Embedding(256, 24), nn.Linear(24, 24), nn.Linear(24, 24)
        self.head = nn.Linear(24, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        e = self.embed(tokens)
        ahead = torch.ones(tokens.shape[1], tokens.shape[1]).triu(1) * -1e9
        weights = (self.query(e) @ e.mT / 24**0.5 + ahead).softmax(-1)
        return self.head(e + weights @ self.value(e))


def adapted() -> nn.Module:
    """The model with an adapter, as peft makes it; the same at every call."""
    import peft

    torch.manual_seed(0)
    return peft.get_peft_model(Model(), peft.LoraConfig(r=2, target_modules=["value", "head"]))


def data(epochs: int = 20) -> tuple[list[Tensor], int]:
    """Sequences of bytes ``[40, LENGTH]`` of every task, and the epochs over each."""
    folder = Path(os.environ.get("BAYESOPT_CHAIN_DATA") or "nowhere") / "books"
    raw = [
        torch.tensor(list(book.read_bytes()[5000 : 5000 + 40 * LENGTH]))
        for book in sorted(folder.glob("*.txt"))[:TASKS]
    ]
    if len(raw) < TASKS:
        g = torch.Generator().manual_seed(0)
        raw = [torch.randint(97 + 8 * t, 105 + 8 * t, (40 * LENGTH,), generator=g) for t in range(TASKS)]
    return [x.reshape(40, LENGTH) for x in raw], epochs


def log_likelihood(logits: Tensor, tokens: Tensor) -> Tensor:
    """Of every sequence, ``[B]``."""
    return -nn.functional.cross_entropy(logits[:, :-1].mT, tokens[:, 1:], reduction="none").sum(1)


def theirs(problem: tuple[list[Tensor], int]) -> dict[str, Any]:
    """With posteriors."""
    import optree
    import posteriors

    (tasks, epochs), model, losses = problem, adapted(), []
    function = posteriors.model_to_function(model)

    def all_log_likelihood(params, tokens):
        return log_likelihood(function(params, tokens), tokens), torch.tensor([])

    params, density = posteriors.extract_requires_grad_and_func(dict(model.named_parameters()), all_log_likelihood)
    mean = optree.tree_map(torch.zeros_like, params)
    sd = optree.tree_map(torch.ones_like, params)

    def log_prior(params):
        terms = optree.tree_map(lambda p, m, s: (-0.5 * ((p - m) / s) ** 2).sum(), params, mean, sd)
        return optree.tree_reduce(torch.add, terms)

    for tokens in tasks:
        optimizer = torch.optim.AdamW(params.values(), lr=1e-2, maximize=True)
        for _ in range(epochs):
            for batch in tokens.split(8):
                optimizer.zero_grad()
                (density(params, batch)[0].mean() + log_prior(params) / len(tokens)).backward()
                optimizer.step()
        laplace = posteriors.laplace.diag_fisher.build(density, per_sample=True)
        state = laplace.init(optree.tree_map(lambda p: p.detach().clone(), params))
        for batch in tokens.split(8):
            state, _ = laplace.update(state, batch)
        mean = state.params
        sd = optree.tree_map(lambda s, f: (s**-2 + LAM * f) ** -0.5, sd, state.prec_diag)
        losses.append([-density(mean, seen)[0].mean().item() for seen in tasks])
    return {"losses": torch.tensor(losses), "sd": torch.cat([s.flatten() for s in optree.tree_leaves(sd)])}


def ours(problem: tuple[list[Tensor], int]) -> dict[str, Any]:
    """With this library."""
    import optree

    import bayesopt_chain as bc

    (tasks, epochs), losses = problem, []
    forward, params, _ = bc.make_functional(adapted())
    density = lambda p, tokens: log_likelihood(forward(p, tokens), tokens)  # noqa: E731
    itself = bc.likelihoods.custom(lambda outputs, _: -outputs[:, 0])  # the density is the model's only output
    fisher = bc.curvature.empirical_fisher(lambda p, tokens: density(p, tokens)[:, None], itself, targets=lambda x: x)
    prior, given = 1.0, {"prior_precision": 1.0}
    laplace: Any = bc.laplace()
    for tokens in tasks:
        tx = bc.chain(bc.links.add_gaussian_prior(prior, n=len(tokens)), bc.adamw(1e-2))
        step, batches = bc.make_step(lambda p, batch: -density(p, batch).mean(), tx), list(tokens.split(8))
        steps = epochs * len(batches)
        params = bc.sample(step, params, tx.init(params), batches, steps=steps, burn_in=steps - 1)[-1]
        state = laplace.init(params)
        for batch in batches:
            _, state = laplace.update(params, state, curvature=fisher(params, batch))
        prior = laplace.posterior(state, params, **given)
        given = {"prior": prior}
        losses.append([-density(params, seen).mean().item() for seen in tasks])
    deviations = optree.tree_leaves(prior.marginal_variance)
    return {"losses": torch.tensor(losses), "sd": torch.cat([v.sqrt().flatten() for v in deviations])}


def compare(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[float, float, float]]:
    """Their number, ours, and how far apart they may be: rounding, over hundreds of float32 steps."""
    names = [f"nats of text {t + 1} after text {len(a['losses'])}" for t in range(len(a["losses"]))]
    out = {name: (x.item(), y.item(), 0.02) for name, x, y in zip(names, a["losses"][-1], b["losses"][-1])}
    return out | {"mean deviation of the prior": (a["sd"].mean().item(), b["sd"].mean().item(), 1e-3)}
