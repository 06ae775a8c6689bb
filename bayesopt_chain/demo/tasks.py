"""The tasks: every data set of prediction with more than 150 rows that scikit-learn has in it, and one with wrong labels.

They were fixed before any method was run on them. Half of the data are for training and half for testing, split anew for every
seed; inputs, and targets that are numbers, are standardised by the training half. Of the digits, 400 of 0 to 7 are for
training; 8 and 9 are never trained on, and a prediction should say so. In the task with wrong labels three in ten of the labels
to train on are drawn at random, and those to test on are right.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from torch import Tensor

SEEN = 8  # digits below are trained on
DIGITS = 400  # so many of them
WRONG = 0.3  # share of labels that are drawn anew


class Task(NamedTuple):
    """One task under one split.

    Attributes:
        name: of the task.
        classes: how many, or 0 where the target is a number.
        train: inputs ``[N, D]`` and targets, class numbers ``[N]`` or numbers ``[N, 1]``.
        test: the same.
        unseen: inputs of classes that were not trained on, ``[M, D]``; none of most tasks.
    """

    name: str
    classes: int
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    unseen: Tensor


LOADED = {
    "wine": load_wine,
    "breast cancer": load_breast_cancer,
    "diabetes": load_diabetes,
    "digits": load_digits,
    "mislabelled digits": load_digits,
}
NAMES = tuple(LOADED)


def load(name: str, seed: int) -> Task:
    """One of ``NAMES`` as seed ``seed`` splits it."""
    arrays: tuple[Any, Any] = LOADED[name](return_X_y=True)  # pyright: ignore[reportAssignmentType]
    x, y = torch.as_tensor(arrays[0], device="cpu").float(), torch.as_tensor(arrays[1], device="cpu")
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=g, device="cpu")
    x, y = x[order], y[order]
    unseen, half = x[:0], len(x) // 2
    if LOADED[name] is load_digits:
        unseen, half = x[y >= SEEN], DIGITS
        x, y = x[y < SEEN], y[y < SEEN]
    center, scale = x[:half].mean(0), x[:half].std(0)
    x, unseen = ((z - center) / torch.where(scale > 0, scale, 1.0) for z in (x, unseen))
    if name == "diabetes":
        y = ((y - y[:half].mean()) / y[:half].std()).float()[:, None]
        return Task(name, 0, (x[:half], y[:half]), (x[half:], y[half:]), unseen)
    classes, given = int(y.max()) + 1, y[:half].clone()
    if name == "mislabelled digits":
        wrong = torch.rand(half, generator=g, device="cpu") < WRONG
        given[wrong] = torch.randint(classes, (int(wrong.sum()),), generator=g, device="cpu")
    return Task(name, classes, (x[:half], given), (x[half:], y[half:]), unseen)
