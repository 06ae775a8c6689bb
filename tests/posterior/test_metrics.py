"""Metrics agree with their definitions."""

import pytest
import torch

import bayesopt_chain as bc


def test_class_metrics_are_their_definitions():
    g = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(200, 4, generator=g), torch.randint(4, (200,), generator=g)
    log_p = logits.log_softmax(-1)
    got = bc.posterior.classification_metrics(log_p, targets, bins=10)
    p, hit = log_p.exp().max(-1).values, log_p.argmax(-1) == targets
    bins = (p * 10).long().clamp(max=9)
    ece = sum(
        (bins == b).double().mean() * (hit[bins == b].double().mean() - p[bins == b].double().mean()).abs()
        for b in range(10)
        if (bins == b).any()
    )
    assert got["accuracy"] == pytest.approx(hit.double().mean().item())
    assert got["nll"] == pytest.approx(-log_p[torch.arange(200), targets].mean().item(), rel=1e-5)
    assert got["ece"] == pytest.approx(float(ece), rel=1e-4)
    assert got["brier"] == pytest.approx(
        sum(((log_p[i].exp() - torch.eye(4)[targets[i]]) ** 2).sum().item() for i in range(200)) / 200, rel=1e-5
    )


def test_wrong_shapes_and_unnormalised_rows_are_refused():
    with pytest.raises(ValueError, match=r"\[N, C\]"):
        bc.posterior.classification_metrics(torch.zeros(3), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="not 1"):
        bc.posterior.classification_metrics(torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64))
