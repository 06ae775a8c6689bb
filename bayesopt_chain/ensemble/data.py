"""Reads what a user has, tensors, a Dataset, a DataLoader or ``bc.epochs``, into tensors with one datum a row.

Members leave data out and go through the others in orders of their own, so that the data are read once and kept. An
augmentation that draws at random is therefore drawn once. :class:`Scale` standardises what a network sees and predicts.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
)

from bayesopt_chain import batches, checks
from bayesopt_chain.data.epochs import Epochs, columns
from bayesopt_chain.likelihoods import Likelihood, gaussian, weighted
from bayesopt_chain.likelihoods._numbers import LearnedGaussian, StudentT
from bayesopt_chain.modules import LABELS, as_pair, batch_inputs, logits_of

AT_ONCE = 1024  # data of a Dataset that are read together
ROUNDED = 1e-13  # of a mean in double precision: targets that vary less are equal
CRUSHED = 0.01  # of a column's deviation, within which its middle half is hardly seen
LEAST_SCORED = 4  # data of a fold
LEAST = 2 * LEAST_SCORED + 1
DATA = checks.Kind(
    lambda x: (
        x.leaves is not None
        if isinstance(x, Epochs)
        else isinstance(x, Dataset) or (checks.BATCHES.fits(x) and not isinstance(x, Iterator))
    ),
    "tensors (inputs, targets), a Dataset, a DataLoader, a list of batches, or bc.epochs of tensors",
    hint="of a generator that ends pass list(batches), of bc.epochs of a Dataset the Dataset",
)


class Data(NamedTuple):
    """All data: trees of tensors ``[N, *]``, and N."""

    inputs: Any
    targets: Any
    size: int

    def take(self, rows: Tensor) -> tuple[Any, Any]:
        """``(inputs, targets)`` of these rows, int64 ``[n]`` or ``[M, n]``."""
        return batches.tree_map(lambda x: x[rows], self.inputs), batches.tree_map(lambda x: x[rows], self.targets)

    def inputs_of(self, count: int) -> Any:
        """The inputs of the first so many data."""
        return self.take(torch.arange(min(count, self.size), device="cpu"))[0]

    def folds(self, share: float, seed: int) -> list[Tensor]:
        """Two folds of about a share of the data each. Data with equal inputs are in the same fold, or in none.

        Raises:
            ValueError: too few data that differ.
        """
        wanted = max(LEAST_SCORED, int(share * self.size))
        group, found = self.groups(), list[Tensor]()
        generator = torch.Generator("cpu").manual_seed(seed)
        rest = torch.randperm(int(group.max()) + 1, generator=generator, device="cpu")
        sizes = group.bincount()
        for _ in range(2):
            taken = int((sizes[rest].cumsum(0) < wanted).sum()) + 1
            found.append(torch.isin(group, rest[:taken]).nonzero()[:, 0])
            rest = rest[taken:]
        if len(rest) == 0 or len(found[1]) < LEAST_SCORED:
            raise ValueError(
                "posterior_ensemble: nearly all data have the same inputs, so that no folds can be left out: pass data whose "
                "inputs differ"
            )
        return found

    def groups(self) -> Tensor:
        """The number of each datum's group, ``[N]``: data with equal inputs have the same."""
        # flat copies: an axis of length 1, as of numpy, may have any stride
        columns = [
            (x.detach().cpu().flatten() + 0).clone(memory_format=torch.contiguous_format)  # -0 is 0
            for x in batches.flatten(self.inputs)[0]
        ]
        first: dict[bytes, int] = {}
        raw = [x.view(torch.uint8).reshape(self.size, -1).numpy() for x in columns if x.numel()]
        keys = (b"".join([hashlib.blake2b(x[i].data, digest_size=16).digest() for x in raw]) for i in range(self.size))
        return torch.tensor([first.setdefault(key, len(first)) for key in keys], device="cpu")


class Scale(NamedTuple):
    """The affine maps around a network: inputs ``(x - shift) / width`` in, outputs ``shift + width f`` out.

    Attributes:
        inputs: ``(shift, width)`` of each leaf of the inputs, ``None`` for one that is left as it is.
        outputs: of the outputs, ``None`` where they are left as they are.
        log_variance: whether the second half of the outputs are logarithms of variances.
    """

    inputs: Sequence[tuple[Tensor, Tensor] | None] = ()
    outputs: tuple[Tensor, Tensor] | None = None
    log_variance: bool = False

    @classmethod
    def of(cls, data: Data, likelihood: Likelihood, module: nn.Module) -> Scale:
        """The moments of data: of inputs ``[N, D]`` of every column, of inputs with more axes of every entry of the axis that
        a layer of the module has as its features (channels of a convolution, the last axis of linear, recurrent and attention
        layers), else of all numbers together, and of targets on the real line of every output. Whole numbers, and masks of 0
        and 1, are left as they are."""
        inputs = [_moments(module, x) for x in batches.flatten(data.inputs)[0]]
        inner = getattr(likelihood, "inner", likelihood)
        learned = isinstance(inner, LearnedGaussian)
        if not (likelihood.has_noise_scale or learned or isinstance(inner, StudentT)):
            return cls(inputs)
        mean, variance = moments(likelihood, data.targets)
        return cls(inputs, (mean, torch.where(variance > 0, variance, 1.0).sqrt()), learned)

    def into(self, batch: Any) -> Any:
        """What the network is called with: copies, since some networks write into their inputs.

        Raises:
            ValueError: other inputs than those that the moments are of.
        """
        leaves, spec = batches.flatten(batch_inputs(batch))
        if any(self.inputs) and len(leaves) != len(self.inputs):
            raise ValueError(
                f"the networks were trained on inputs of {len(self.inputs)} tensors, which have their moments, got "
                f"{len(leaves)}: pass the same ones"
            )
        return spec.unflatten([_scaled(x, s) for x, s in itertools.zip_longest(leaves, self.inputs[: len(leaves)])])

    def out(self, output: Any) -> Any:
        """What the network's output stands for."""
        outputs = logits_of(output)
        if self.outputs is None:
            return outputs
        shift, width = (x.to(outputs) for x in self.outputs)
        if not self.log_variance:
            return shift + width * outputs
        mean, log_variance = outputs.chunk(2, -1)
        return torch.cat([shift + width * mean, log_variance + 2 * width.log()], -1)

    @property
    def said(self) -> str:
        """Which of them are not the identity."""
        return " and ".join(["inputs"] * any(self.inputs) + ["targets"] * (self.outputs is not None))


def _scaled(x: Tensor, scale: tuple[Tensor, Tensor] | None) -> Tensor:
    if scale is None:
        return x.clone() if isinstance(x, Tensor) else x
    # of whole numbers, where the network was trained on others, moments would be cut to whole ones
    x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
    return (x - scale[0].to(x)) / scale[1].to(x)


def with_noise(likelihood: Likelihood, variance: Any) -> Likelihood:
    """The Gaussian likelihood with noise of this variance, weighted if it was."""
    return weighted(gaussian(variance)) if hasattr(likelihood, "inner") else gaussian(variance)


def moments(likelihood: Likelihood, targets: Any) -> tuple[Tensor, Tensor]:
    """Mean and variance of the targets of each output, by their weights; of equal ones 0, though their mean is rounded. Of
    outputs whose targets never count those of the others, on average."""
    labels, weights = likelihood.labels(targets).double(), likelihood.weights(targets)
    w = torch.ones_like(labels) if weights is None else weights.double()
    seen, total = w.sum(0) > 0, w.sum(0).clamp_min(1e-30)
    mean = (w * labels).sum(0) / total
    variance = (w * (labels - mean).square()).sum(0) / total
    variance = torch.where(variance > (ROUNDED * mean).square(), variance, 0.0)
    return torch.where(seen, mean, mean[seen].mean()), torch.where(seen, variance, variance[seen].mean())


def _moments(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Mean and deviation of inputs ``[N, *]``, of a shape that broadcasts against a datum: of each entry of the axis of
    features, which of tables is the last one, else that of the first layer whose number of features fits the shape."""
    if not x.is_floating_point() or bool(((x == 0) | (x == 1)).all()):
        return None
    last = x.ndim - 1
    named = (("in_channels", 1), ("in_features", last), ("input_size", last), ("embed_dim", last))
    every = ((getattr(layer, name, None), axis) for layer in module.modules() for name, axis in named)
    fitting = [last] if last < 2 else [axis for size, axis in every if size == x.shape[axis]]
    axes = [axis for axis in range(x.ndim) if axis not in fitting[:1] or axis == 0]
    deviation, mean = (a[0] for a in torch.std_mean(x.double(), axes, correction=0, keepdim=True))
    # a column that varies by less is noise of rounding, which is to stay as small as it is
    least = 2 * torch.finfo(x.dtype).eps * mean.abs() + torch.finfo(x.dtype).tiny
    return mean, torch.where(deviation > least, deviation, torch.where(deviation > 0, mean.abs() + least, 1.0))


def far_off(tables: Any, moments: Sequence[tuple[Tensor, Tensor] | None]) -> int:
    """How many columns of tables ``[N, D]`` with these moments have a deviation that is made by a few data far from the others,
    such as codes of missing values."""
    known = [(x.double(), own[1]) for x, own in zip(batches.flatten(tables)[0], moments) if own and x.ndim == 2]
    middles = [(x.sort(0).values[[len(x) // 4, 3 * len(x) // 4]].diff(dim=0), width) for x, width in known]
    return sum(int(((middle > 0) & (middle < CRUSHED * width)).sum()) for middle, width in middles)


@torch.random.fork_rng(devices=[])  # loaders and samplers draw
def read(data: Any, least: int = LEAST, who: str = "posterior_ensemble") -> tuple[Any, int | None]:
    """All data, at least so many, as one batch, and the batch size that the user's loader or epochs have; ``who`` asks for
    them.

    Raises:
        TypeError: no tensors.
        ValueError: no targets, inputs that are not finite, too few data, or batches that do not fit together.
    """
    size = data.batch_size if isinstance(data, (Epochs, DataLoader)) else None
    if isinstance(data, DataLoader):
        data = _in_order(data, who)
    elif isinstance(data, Dataset):
        data = DataLoader(data, AT_ONCE)
    is_one = isinstance(data, (tuple, Mapping)) or (isinstance(data, list) and any(map(torch.is_tensor, data[:1])))
    data = batches.tree_map(
        lambda x: x.detach() if isinstance(x, Tensor) else x, data if is_one else _joined(batches.each_once(data), who)
    )
    inputs, targets = as_pair(data)
    if targets is None:
        raise ValueError(
            f"{who}: data has no targets: pass (inputs, targets), with weights (inputs, (targets, weights)), or a "
            f"mapping with one of the keys {', '.join(LABELS)}"
        )
    _, _, n = columns((inputs, targets), who)
    if n < least:
        raise ValueError(f"{who}: {n} data are too few to leave some out: at least {least}")
    require_inputs(who, inputs)
    return data, size


def require_inputs(who: str, inputs: Any) -> None:
    """Refuse inputs that are sparse, or hold NaN or infinity, which a network would turn into predictions that are nothing.

    Raises:
        ValueError: naming what they hold.
    """
    for x in batches.flatten(inputs)[0]:
        if x.layout != torch.strided:
            raise ValueError(f"{who}: inputs are {x.layout}: pass dense tensors (x.to_dense())")
        checks.finite_data(f"{who}: inputs", x)


def _in_order(loader: DataLoader, who: str) -> Iterable[Any]:
    """All batches of a loader, with what ``drop_last`` would leave out and without what its sampler does, in order."""
    picks: Any = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset) or picks is None:
        return loader
    sampler = picks.sampler if type(picks) is BatchSampler else picks
    rows = sorted(itertools.chain.from_iterable(picks) if sampler is picks else sampler)
    if len(set(rows)) < len(rows):
        raise ValueError(
            f"{who}: the loader's {type(sampler).__name__} gives data more than once: pass the data "
            "without it, and weights by bc.likelihoods.weighted"
        )
    return DataLoader(
        Subset(loader.dataset, rows), AT_ONCE, collate_fn=loader.collate_fn, num_workers=loader.num_workers
    )


def _joined(loader: Iterable[Any], who: str) -> Any:
    try:
        parts = [tuple(part) if isinstance(part, list) else part for part in loader]
        # single data are known by first axes of different lengths; an empty batch adds nothing
        flat = [batches.flatten(part) for part in parts if batches.size(part, 1)]
        whole = [torch.cat(columns) for columns in zip(*(leaves for leaves, _ in flat), strict=True)]
    except (RuntimeError, TypeError, ValueError) as err:
        raise ValueError(
            f"{who}: the batches cannot be put together ({err}): each has to hold tensors, its data on axis 0, "
            "and every datum needs the same shape (pad texts to one length, number names); of single data make a DataLoader"
        ) from err
    if not flat:
        raise ValueError(f"{who}: data has no batches")
    return flat[0][1].unflatten(whole)
