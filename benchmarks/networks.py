"""Small networks of the kinds that people train, data sets of scikit-learn's, and a loop that trains them, for the commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Pair = tuple[Tensor, Tensor]  # inputs and targets


def mlp(*sizes: int, act: Callable[[], nn.Module] = nn.ReLU, norm: bool = False) -> nn.Sequential:
    """A perceptron of these widths, with layer norm before each activation if ``norm``."""
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes[:-1]):
        layers += [nn.Linear(a, b), *([nn.LayerNorm(b)] if norm else []), act()]
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


class Residual(nn.Module):
    """Two convolutions with batch norm and a skip connection; more channels come with half as many pixels."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        stride = 1 if out == channels else 2
        self.one, self.norm_one = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.two, self.norm_two = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.skip = nn.Conv2d(channels, out, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_one(self.one(x)))
        return F.relu(self.norm_two(self.two(y)) + self.skip(x))


def resnet(channels: int, widths: Sequence[int], pooled: int = 1) -> nn.Sequential:
    """A stem, a residual block of each width, the mean over ``pooled`` x ``pooled`` parts of the image, and a head."""
    stem = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()
    blocks = [Residual(a, b) for a, b in pairwise((widths[0], *widths))]
    ends = nn.AdaptiveAvgPool2d(pooled), nn.Flatten(), nn.Linear(widths[-1] * pooled**2, 10)
    return nn.Sequential(*stem, *blocks, *ends)


class Attention(nn.Module):
    """Tokens embedded by a module, layers of attention, their mean, and a head for ten classes."""

    def __init__(self, embed: nn.Module, width: int, heads: int, hidden: int, layers: int = 1, **how: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, hidden, 0.0, batch_first=True, **how)
        self.embed, self.layers = embed, nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x)).mean(1))


def descend(optimizer: torch.optim.Optimizer, loss: Callable[[], Any], steps: int = 1) -> None:
    """Steps of an optimizer, each on a loss that is computed anew."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def split(x: Tensor, y: Tensor, n: int, seed: int) -> tuple[Pair, Pair]:
    """``n`` data for training and the others for tests, with standardised inputs and real targets."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    x, y = x[order], y[order]
    x = (x - x[:n].mean(0)) / x[:n].std(0).clamp_min(0.3 * float(x[:n].std(0).mean()))  # some pixels hardly vary
    if y.is_floating_point():
        y = (y - y[:n].mean(0)) / y[:n].std(0)
    return (x[:n], y[:n]), (x[n:], y[n:])


def sklearn(name: str, n: int, seed: int, **options: Any) -> tuple[Pair, Pair]:
    """A split of one of scikit-learn's data sets, by the name of the function that loads it, or makes 400 tests besides."""
    import sklearn.datasets

    how = {"return_X_y": True} if name.startswith("load") else {"n_samples": n + 400, "random_state": seed, **options}
    x, y = map(torch.tensor, getattr(sklearn.datasets, name)(**how))
    return split(x.float(), y.float()[:, None] if y.is_floating_point() else y.long(), n, seed)
