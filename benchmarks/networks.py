"""Small networks of the kinds that people train, and a loop that trains them, for the commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn


def mlp(*sizes: int) -> nn.Sequential:
    """A perceptron of these widths."""
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes[:-1]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))


def cnn(
    pixels: int, channels: Sequence[int], classes: int = 10, *, padding: int = 1, pools: Sequence[int] = (2, 2)
) -> nn.Sequential:
    """Convolutions of 3 x 3 on images ``[channels[0], pixels, pixels]``, each followed by its pooling (1: none), and a head."""
    layers: list[nn.Module] = []
    for (a, b), pool in zip(pairwise(channels), pools):
        layers += [nn.Conv2d(a, b, 3, padding=padding), nn.ReLU(), *([nn.MaxPool2d(pool)] if pool > 1 else [])]
        pixels = (pixels + 2 * padding - 2) // pool
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels[-1] * pixels**2, classes))


def descend(optimizer: torch.optim.Optimizer, loss: Callable[[], Any], steps: int = 1) -> None:
    """Steps of an optimizer, each on a loss that is computed anew."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
