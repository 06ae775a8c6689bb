r"""Noise that is a function of the state: one key, one step counter, and nothing hidden.

``init`` draws one int64 key; from then on the normals depend on (key, step, leaf, element) alone, so that the same
state gives the same noise, a copied state continues exactly, and stacked chains differ by their keys.

Two streams:

* ``"generator"``, the default on an eager CPU: a fresh generator seeded with ``splitmix64(key + step)`` feeds ``normal_``
  once for all leaves, in optree order. The engine behind it keeps 32 bits of a seed. Under ``vmap`` every chain is
  seeded from its own key, so stacked chains draw what each would draw alone, bit for bit.
* ``"philox"``, the default elsewhere and available everywhere: the counter-based stream of
  :mod:`bayesopt_chain.random.philox`, the same in every back end.

Besides normals there are uniforms, and two simpler variables with the moments of a normal: ``rademacher`` (signs, moments
through the third) and ``three_point`` (0 with probability 2/3, else +-sqrt(3); moments through the fifth).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from bayesopt_chain.random.philox import philox_normals, philox_other, three_point
from bayesopt_chain.tracing import is_plain

Stream = Literal["generator", "philox"]
STREAMS = ("generator", "philox")
KINDS = ("gaussian", "rademacher", "three_point", "uniform")


def new_key(generator: torch.Generator | None, device: torch.device) -> Tensor:
    """One random int64 key, 0-d, from ``generator`` or from torch's global generator."""
    source = generator.device if generator is not None else "cpu"
    return torch.randint(2**63 - 1, (), dtype=torch.int64, generator=generator, device=source).to(device)


def normals(
    key: Tensor,
    step: Tensor,
    templates: Sequence[Tensor],
    draws: Sequence[int],
    kind: str = "gaussian",
    stream: Stream | None = None,
    scale: float = 1.0,
) -> list[list[Tensor]]:
    """Normals of standard deviation ``scale``: ``draws[i]`` tensors for every leaf ``i``, each like one slice
    ``templates[i][0]`` along axis 0.

    ``kind`` gives another variable of ``KINDS`` instead, times ``scale``: independent, of mean 0 and variance 1, or uniform
    on [0, 1).
    ``stream=None`` is the generator on a CPU and Philox elsewhere.
    """
    out: list[list[Tensor]] = [[] for _ in templates]
    for salt, ((device, dtype), members) in enumerate(_groups(templates, draws).items()):
        shapes = [templates[i].shape[1:] for i in members]
        sizes = [shape.numel() for i, shape in zip(members, shapes) for _ in range(draws[i])]
        if stream == "philox" or device.type != "cpu":
            on, at, first = key.to(device), step.to(device), salt << 24
            if kind == "gaussian":
                pieces = iter(philox_normals(on, at, sizes, first, dtype))
            else:
                pieces = iter([philox_other(kind, on, at, n, first | i, dtype) for i, n in enumerate(sizes)])
            if scale != 1.0:
                pieces = (x * scale for x in pieces)
        else:
            flat = _from_generator(key, step, salt, sum(sizes), dtype, kind, scale)
            pieces = iter(flat.split(sizes) if len(sizes) > 1 else (flat,))
        for i, shape in zip(members, shapes):
            mine = [next(pieces) for _ in range(draws[i])]
            out[i] = mine if len(shape) == 1 else [x.view(shape) for x in mine]
    return out


def draw_numbers(templates: Sequence[Tensor], draws: Sequence[int]) -> list[int]:
    """For each leaf the number of its first draw in the counter-based stream."""
    out = [0] * len(templates)
    for salt, members in enumerate(_groups(templates, draws).values()):
        for i, first in zip(members, accumulate((draws[i] for i in members), initial=0)):
            out[i] = salt << 24 | first
    return out


def _groups(templates: Sequence[Tensor], draws: Sequence[int]) -> dict[tuple[torch.device, torch.dtype], list[int]]:
    """The leaves that draw, by device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, (t, n) in enumerate(zip(templates, draws)):
        if n:
            groups.setdefault((t.device, t.dtype), []).append(i)
    return groups


def _from_generator(
    key: Tensor, step: Tensor, salt: int, size: int, dtype: torch.dtype, kind: str, scale: float
) -> Tensor:
    if is_plain(key, step):
        return _seeded(int(key), int(step), salt, size, dtype, kind, scale)
    return _stacked_draw(key, step, salt, size, dtype, kind, scale)


def seeded_generator(key: int, step: int, salt: int = 0) -> torch.Generator:
    """The generator that feeds step ``step``; ``salt`` numbers the (device, dtype) groups of leaves."""
    generator = torch.Generator()
    generator.manual_seed(splitmix64(splitmix64(key + salt) + step))
    return generator


def _seeded(key: int, step: int, salt: int, size: int, dtype: torch.dtype, kind: str, scale: float) -> Tensor:
    generator = seeded_generator(key, step, salt)
    if kind == "gaussian":
        return torch.empty(size, dtype=dtype).normal_(0.0, scale, generator=generator)
    return _from_bits(generator, size, dtype, kind).mul_(scale)


def _from_bits(generator: torch.Generator, size: int, dtype: torch.dtype, kind: str) -> Tensor:
    if kind == "uniform":
        return torch.empty(size, dtype=dtype).uniform_(generator=generator)
    if kind == "three_point":
        return three_point(torch.empty(size, dtype=torch.int32).random_(0, 6, generator=generator)).to(dtype)
    words = torch.empty((size + 7) // 8, dtype=torch.int64).random_(-(2**63), None, generator=generator)
    return (words.view(torch.int8)[:size] & 2).to(dtype).sub_(1.0)


@torch.library.custom_op("bayesopt_chain::seeded_draw", mutates_args=())
def _stacked_draw(
    key: Tensor, step: Tensor, salt: int, size: int, dtype: torch.dtype, kind: str, scale: float
) -> Tensor:
    return _seeded(int(key), int(step), salt, size, dtype, kind, scale)


@_stacked_draw.register_fake
def _(key, step, salt, size, dtype, kind, scale):
    return torch.empty(size, dtype=dtype)


@_stacked_draw.register_vmap
def _(info, in_dims, key, step, salt, size, dtype, kind, scale):
    keys = key.movedim(in_dims[0], 0) if in_dims[0] is not None else key.expand(info.batch_size, *key.shape)
    steps = step.movedim(in_dims[1], 0) if in_dims[1] is not None else step.expand(info.batch_size, *step.shape)
    return torch.stack([_stacked_draw(k, s, salt, size, dtype, kind, scale) for k, s in zip(keys, steps)]), 0


def splitmix64(x: int) -> int:
    """Steele, Lea and Flood's 64-bit mixer."""
    x = (x + 0x9E3779B97F4A7C15) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return x ^ (x >> 31)
