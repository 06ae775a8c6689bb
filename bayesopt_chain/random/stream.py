r"""Noise that is a function of the state: one key, one step counter, and nothing hidden.

``init`` draws one int64 key; from then on the normals depend on (key, step, leaf, element) alone, so that the same
state gives the same noise, a copied state continues exactly, and stacked chains differ by their keys.

Two streams:

* ``"generator"``, the default on an eager CPU: a fresh generator seeded with ``splitmix64(key + step)`` feeds ``normal_``
  once for all leaves, in optree order. The engine behind it keeps 32 bits of a seed, so that among ``n`` steps about
  ``n^2 / 2^33`` pairs draw the same normals. Under ``vmap`` every chain is
  seeded from its own key, so stacked chains draw what each would draw alone, bit for bit.
* ``"philox"``, the default elsewhere and available everywhere: the counter-based stream of
  :mod:`bayesopt_chain.random.philox`, the same in every back end. It knows a leaf by a hash of its path, so that the noise of a
  leaf does not depend on which other leaves there are.

Besides normals there are uniforms, and two simpler variables with the moments of a normal: ``rademacher`` (signs, moments
through the third) and ``three_point`` (0 with probability 2/3, else +-sqrt(3); moments through the fifth).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain.random.philox import philox_normals, philox_other, three_point
from bayesopt_chain.random.pieces import Runs, draw_pieces, flat_runs
from bayesopt_chain.tracing import is_plain

Stream = Literal["generator", "philox"]
STREAMS = ("generator", "philox")
CHUNK = 2**18  # elements drawn at a time where the draw is used at once: in cache, and few enough calls
_VECTOR = 16  # a CPU generator's normals come in groups of 16
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
    numbers: Sequence[int] | None = None,
    pieces: Sequence[Runs | None] | None = None,
) -> list[list[Tensor]]:
    """Normals of standard deviation ``scale``: ``draws[i]`` tensors for every leaf ``i``, each like one slice
    ``templates[i][0]`` along axis 0.

    ``kind`` gives another variable of ``KINDS`` instead, times ``scale``: independent, of mean 0 and variance 1, or uniform
    on [0, 1).
    ``stream=None`` is the generator on a CPU and Philox elsewhere. ``numbers`` name the leaves to Philox (default: 0, 1, ...).
    ``pieces`` say which elements of leaves that are spread over ranks are wanted (``None``: all of a leaf); then it is Philox.
    """
    out: list[list[Tensor]] = [[] for _ in templates]
    for salt, ((device, dtype), members) in enumerate(_groups(templates, draws).items()):
        shapes = [templates[i].shape[1:] for i in members]
        sizes = [shape.numel() for i, shape in zip(members, shapes) for _ in range(draws[i])]
        if pieces is not None or stream == "philox" or device.type != "cpu":
            on, at = key.to(device), step.to(device)
            leaves = tuple(members) if numbers is None else tuple([numbers[i] for i in members])
            names = draw_numbers(leaves, tuple([draws[i] for i in members]))
            if pieces is not None:
                runs = [r for i in members for r in [_runs(pieces[i], templates[i])] * draws[i]]
                parts = iter(draw_pieces(on, at, runs, names, dtype, kind=kind, stream=stream or "philox"))
            elif kind == "gaussian":
                parts = iter(philox_normals(on, at, sizes, names, dtype))
            else:
                parts = iter([philox_other(kind, on, at, n, name, dtype) for n, name in zip(sizes, names)])
            if scale != 1.0:
                parts = (x * scale for x in parts)
        else:
            flat = _from_generator(key, step, salt, sum(sizes), dtype, kind, scale)
            parts = iter(torch.split(flat, sizes) if len(sizes) > 1 else (flat,))
        for i, shape in zip(members, shapes):
            mine = [next(parts) for _ in range(draws[i])]
            out[i] = mine if len(shape) == 1 else [x.view(shape) for x in mine]
    return out


def _runs(runs: Runs | None, template: Tensor) -> Runs:
    """These elements, or all of a leaf."""
    size = template.shape[1:].numel()
    return runs if runs is not None else ((0, size),) if size else ()


class Chunk(NamedTuple):
    """Neighbouring pieces of leaves whose normals are drawn together: leaf, first element and size of each, and their sum."""

    leaves: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    total: int


@cache
def chunks(sizes: tuple[int, ...], whole: bool) -> list[Chunk]:
    """Leaves of these sizes, in chunks of about ``CHUNK`` elements, which stay in cache; leaves are kept ``whole`` or are not.

    A CPU generator's normals come in groups of 16, so that pieces of such sizes draw what one piece would, if the last is no
    shorter than 16.
    """
    total = sum(sizes)
    if whole:
        ends = [0]
        for end in accumulate(sizes):
            if end - ends[-1] >= CHUNK:
                ends.append(end)
        edges = [*ends, *([total] if ends[-1] < total or not total else [])]
    else:
        edges = [*range(0, max(total - _VECTOR, 0) + 1, CHUNK), total]
    out, first = list[Chunk](), list(accumulate(sizes, initial=0))
    for low, high in pairwise(edges):
        pieces = [(i, max(low - a, 0), min(high, b) - max(low, a)) for i, (a, b) in enumerate(pairwise(first))]
        leaves, starts, counts = zip(*[piece for piece in pieces if piece[2] > 0] or [(0, 0, 0)])
        out.append(Chunk(leaves, starts, counts, high - low))
    return out


IN_CHUNKS = (None, "generator", "philox")  # the streams that :func:`drawn` knows


def drawn(
    key: Tensor,
    step: Tensor,
    sizes: tuple[int, ...],
    numbers: tuple[int, ...],
    dtype: torch.dtype,
    stream: Stream | None = None,
    scale: float = 1.0,
    pieces: tuple[Runs | None, ...] | None = None,
) -> Iterator[tuple[Chunk, Tensor]]:
    """What :func:`normals` gives on a CPU that nothing traces: a Gaussian draw of each leaf, chunk by chunk, flat.

    ``dtype`` is float32 or float64, ``sizes`` are the leaves' numbers of elements. A chunk's tensor may be overwritten,
    and is by the next.
    """
    parts = chunks(sizes, stream == "philox" or pieces is not None)
    if pieces is not None:
        runs = tuple([((0, n),) if mine is None and n else mine or () for mine, n in zip(pieces, sizes)])
        names = draw_numbers(numbers, (1,) * len(numbers))
        for part in parts:
            flat = flat_runs(tuple([runs[i] for i in part.leaves]), tuple([names[i] for i in part.leaves]))
            e: Tensor = torch.ops.bayesopt_chain.philox_pieces(key, step, *flat, dtype)
            yield part, (e.mul_(scale) if scale != 1.0 else e)
        return
    if stream == "philox":
        names = draw_numbers(numbers, (1,) * len(numbers))
        for part in parts:
            mine = [names[i] for i in part.leaves]
            e = torch.ops.bayesopt_chain.philox_normals(key, step, part.sizes, mine, dtype)
            yield part, (e.mul_(scale) if scale != 1.0 else e)
        return
    generator = seeded_generator(int(key), int(step))
    scratch = torch.empty(max([part.total for part in parts]), dtype=dtype)
    for part in parts:
        e = scratch if len(parts) == 1 else scratch[: part.total]
        yield part, e.normal_(0.0, scale, generator=generator)


def _hash(path: str) -> int:
    return int.from_bytes(hashlib.blake2b(path.encode(), digest_size=4).digest(), "little")


@cache
def leaf_numbers(paths: tuple[str, ...], hashed: Callable[[str], int] = _hash) -> tuple[int, ...]:
    """For each leaf 32 bits of a hash of its path, which name it to the counter-based stream.

    Few leaves draw more than twice in a step; those that do are looked at when they draw (:func:`draw_numbers`).

    Raises:
        ValueError: two paths whose first two draws would be the same.
    """
    numbers = tuple([hashed(path) for path in paths])
    seen: dict[int, str] = {}
    for k in range(2):
        for number, path in zip(numbers, paths):
            other = seen.setdefault(draw_number(number, k), path)
            if other != path:
                raise ValueError(
                    f"params: the paths {other} and {path} have one hash, and would get the same noise; rename one"
                )
    return numbers


def draw_number(leaf: int, k: int) -> int:
    """The number of the ``k``-th draw of a leaf."""
    return (leaf + 0x9E3779B9 * k) & 0xFFFFFFFF


@cache
def draw_numbers(leaves: tuple[int, ...], draws: tuple[int, ...]) -> tuple[int, ...]:
    """The numbers of all draws of one step: ``draws[i]`` of the leaf that is numbered ``leaves[i]``, one leaf after the other.

    Raises:
        ValueError: two of them are the same.
    """
    numbers = tuple([draw_number(leaf, k) for leaf, n in zip(leaves, draws) for k in range(n)])
    if len(set(numbers)) < len(numbers):
        seen: dict[int, int] = {}
        for i, k in [(i, k) for i, n in enumerate(draws) for k in range(n)]:
            other = seen.setdefault(draw_number(leaves[i], k), i)
            if other != i:
                raise ValueError(
                    f"params: a draw of leaf {i} would be one of leaf {other}, since the hashes of their paths lie a few draws "
                    'apart; rename one of them, or take stream="generator"'
                )
    return numbers


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


_library: Any = torch.library  # its functions carry no types


@_library.custom_op("bayesopt_chain::seeded_draw", mutates_args=())
def _stacked_draw(
    key: Tensor, step: Tensor, salt: int, size: int, dtype: torch.dtype, kind: str, scale: float
) -> Tensor:
    return _seeded(int(key), int(step), salt, size, dtype, kind, scale)


@_stacked_draw.register_fake
def _without_numbers(
    key: Tensor, step: Tensor, salt: int, size: int, dtype: torch.dtype, kind: str, scale: float
) -> Tensor:
    return torch.empty(size, dtype=dtype)


@_stacked_draw.register_vmap
def _for_each_lane(
    info: Any,
    in_dims: tuple[int | None, ...],
    key: Tensor,
    step: Tensor,
    salt: int,
    size: int,
    dtype: torch.dtype,
    kind: str,
    scale: float,
) -> tuple[Tensor, int]:
    keys = key.movedim(in_dims[0], 0) if in_dims[0] is not None else key.expand(info.batch_size, *key.shape)
    steps = step.movedim(in_dims[1], 0) if in_dims[1] is not None else step.expand(info.batch_size, *step.shape)
    return torch.stack([_stacked_draw(k, s, salt, size, dtype, kind, scale) for k, s in zip(keys, steps)]), 0


def splitmix64(x: int) -> int:
    """Steele, Lea and Flood's 64-bit mixer."""
    x = (x + 0x9E3779B97F4A7C15) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return x ^ (x >> 31)
