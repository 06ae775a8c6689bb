r"""Noise that is a function of the state: of one key and one step counter, which the state holds.

``init`` draws one int64 key; from then on the normals depend on (key, step, leaf, element) alone, so that the same
state gives the same noise, a copied state continues exactly, and stacked chains differ by their keys.

Two streams:

* ``"generator"``, the default on an eager CPU: a fresh generator seeded with ``splitmix64(key + step)`` feeds ``normal_``
  once for all leaves, in optree order. The engine behind it keeps 32 bits of a seed, so that among ``n`` steps about
  ``n^2 / 2^33`` pairs draw the same normals. Under ``vmap`` every chain is seeded from its own key, so that stacked chains draw
  what each would draw alone, bit for bit.
* ``"philox"``, the default elsewhere and available everywhere: the counter-based stream of
  :mod:`bayesopt_chain.random.philox`, the same in every back end. It knows a leaf by a hash of its path, so that the noise of a
  leaf does not depend on which other leaves there are.

Besides normals there are uniforms, and two simpler variables with the moments of a normal: ``rademacher`` (signs, moments
through the third) and ``three_point`` (0 with probability 2/3, else +-sqrt(3); moments through the fifth).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain.random.philox import (
    Elements,
    Runs,
    draw_elements,
    parts_of_leaves,
    three_point,
    whole_leaves,
)
from bayesopt_chain.tracing import is_plain

Stream = Literal["generator", "philox"]
STREAMS = ("generator", "philox")
IN_SPANS = (None, *STREAMS)  # the streams that :meth:`Variables.draw_in_spans` knows
CPU = torch.device("cpu")  # of torch's generators here, whatever the default device is
SPAN = 2**18  # elements drawn at a time where the draw is used at once: in cache, and few enough calls
_VECTOR = 16  # a CPU generator's normals come in groups of 16
KINDS = ("gaussian", "rademacher", "three_point", "uniform")


def new_key(generator: torch.Generator | None, device: torch.device) -> Tensor:
    """One random int64 key, 0-d, from ``generator`` or from torch's global generator."""
    source = generator.device if generator is not None else "cpu"
    return torch.randint(2**63 - 1, (), dtype=torch.int64, generator=generator, device=source).to(device)


@dataclass(frozen=True)
class Variables:
    """The random variables of a step: everything that is known of them in advance, so that a draw needs key and step alone.

    Attributes:
        numbers: what names each leaf to Philox (:func:`leaf_numbers`); default 0, 1, ...
        each: how many variables each leaf draws; default one.
        kind: one of ``KINDS``, independent. All but ``"uniform"``, on [0, 1), have mean 0 and variance 1.
        stream: ``"generator"`` or ``"philox"``; default the generator on a CPU, and Philox elsewhere and for ``runs``.
        scale: what they are multiplied by.
        runs: for leaves that are spread over ranks, the elements of each that are here; ``None`` for all of a leaf.

    Example:
        >>> import torch
        >>> ((z,),) = Variables(scale=0.1).draw(torch.tensor(3), torch.tensor(0), [torch.empty(1, 2, 4)])
        >>> z.shape
        torch.Size([2, 4])
    """

    numbers: tuple[int, ...] | None = None
    each: tuple[int, ...] | None = None
    kind: str = "gaussian"
    stream: Stream | None = None
    scale: float = 1.0
    runs: tuple[Runs | None, ...] | None = None

    def draw(self, key: Tensor, step: Tensor, like: Sequence[Tensor]) -> list[list[Tensor]]:
        """Draw the variables of one step.

        Args:
            key: the key of the stream, int64, 0-d.
            step: the number of the step, int64, 0-d.
            like: a tensor for each leaf, of which one slice ``like[i][0]`` has shape, dtype and device of a variable.

        Returns:
            For every leaf a list of its variables.

        Raises:
            ValueError: two leaves that Philox would give the same variable; a leaf of more than ``2^34`` elements; ``runs``
                of torch's generator.
        """
        each = self.each or (1,) * len(like)
        out: list[list[Tensor]] = [[] for _ in like]
        for salt, ((device, dtype), members) in enumerate(_groups(like, each).items()):
            shapes = [like[i].shape[1:] for i in members]
            if self.is_counter_based or device.type != "cpu":
                elements = self._elements(tuple(members), tuple([x.numel() for x in shapes]), each)
                drawn = draw_elements(key.to(device), step.to(device), elements, dtype, self.kind)
                parts = iter([x * self.scale for x in drawn] if self.scale != 1.0 else drawn)
            else:
                sizes = [shape.numel() for i, shape in zip(members, shapes) for _ in range(each[i])]
                flat = _from_generator(key, step, salt, sum(sizes), dtype, self.kind, self.scale)
                parts = iter(torch.split(flat, sizes) if len(sizes) > 1 else (flat,))
            for i, shape in zip(members, shapes):
                mine = [next(parts) for _ in range(each[i])]
                out[i] = mine if len(shape) == 1 else [x.view(shape) for x in mine]
        return out

    def draw_in_spans(
        self, key: Tensor, step: Tensor, sizes: tuple[int, ...], dtype: torch.dtype, into: Tensor | None = None
    ) -> Iterator[tuple[Span, Tensor]]:
        """Draw one Gaussian variable for each leaf, span by span: the numbers of :meth:`draw`, for untraced leaves on a CPU.

        Args:
            key, step: as for :meth:`draw`.
            sizes: the number of elements of each leaf that are here.
            dtype: float32 or float64.
            into: memory of that dtype for the elements of the longest span (default: new memory).

        Returns:
            Pairs of one of :meth:`spans` and its elements, flat. The caller may overwrite the elements; the next span does.
        """
        if self.is_counter_based:
            ops, numbers = torch.ops.bayesopt_chain, self.numbers or tuple(range(len(sizes)))
            for span, elements in _spans_of_elements(sizes, numbers, self.runs):
                if into is None:
                    e: Tensor = ops.philox_normals(key, step, *elements[:3], dtype)
                else:
                    e = into[: span.total]
                    ops.philox_normals_(e, key, step, *elements[:3])
                yield span, (e.mul_(self.scale) if self.scale != 1.0 else e)
            return
        parts, generator = spans(sizes), seeded_generator(int(key), int(step))
        scratch = torch.empty(max([x.total for x in parts]), dtype=dtype, device=CPU) if into is None else into
        for part in parts:
            e = scratch if len(parts) == 1 else scratch[: part.total]
            yield part, e.normal_(0.0, self.scale, generator=generator)

    def spans(self, sizes: tuple[int, ...]) -> list[Span]:
        """The spans in which leaves of these sizes are drawn."""
        return spans(sizes, all_of_a_leaf=self.is_counter_based)

    @cached_property
    def is_counter_based(self) -> bool:
        """Whether Philox draws on every device, so that each element has a number of its own.

        Raises:
            ValueError: ``runs`` of torch's generator.
        """
        if self.runs is not None and self.stream == "generator":
            raise ValueError(
                "stream='generator': torch's generator draws the elements of a leaf one after the other, so that ranks "
                'with shards of it would all draw the first ones; take bc.with_stream(tx, "philox")'
            )
        return self.stream == "philox" or self.runs is not None

    def _elements(self, leaves: tuple[int, ...], sizes: tuple[int, ...], each: tuple[int, ...]) -> Elements:
        """The elements of the leaves numbered ``leaves``, which have these sizes, as Philox names them."""
        everything = len(leaves) == len(each)
        numbers = leaves if self.numbers is None else self.numbers
        if not everything:
            each = tuple([each[i] for i in leaves])
            numbers = numbers if self.numbers is None else tuple([numbers[i] for i in leaves])
        runs = self.runs if everything or self.runs is None else tuple([self.runs[i] for i in leaves])
        return _elements_of(sizes, numbers, each, runs)


@cache
def _elements_of(
    sizes: tuple[int, ...], numbers: tuple[int, ...], each: tuple[int, ...], runs: tuple[Runs | None, ...] | None
) -> Elements:
    """The elements of every draw, where leaf ``i`` has ``sizes[i]`` elements and draws ``each[i]`` times."""
    names = draw_numbers(numbers, each)
    if runs is None:
        return whole_leaves([n for n, k in zip(sizes, each) for _ in range(k)], names)
    here = [((0, n),) if mine is None and n else mine or () for mine, n in zip(runs, sizes)]
    return parts_of_leaves(tuple([mine for mine, k in zip(here, each) for _ in range(k)]), names)


class Span(NamedTuple):
    """Neighbouring pieces of leaves that are drawn together: leaf, first element and size of each, and their sum."""

    leaves: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    total: int


@cache
def spans(sizes: tuple[int, ...], all_of_a_leaf: bool = False) -> list[Span]:
    """Leaves of these sizes in spans of about ``SPAN`` elements, which stay in cache.

    Args:
        sizes: of the leaves.
        all_of_a_leaf: end spans between leaves only, since a leaf is drawn by itself; spans may be longer then.

    Returns:
        The spans, from the first leaf to the last. Where leaves may be cut, every span but the last has a multiple of 16
        elements and the last at least 16 (if there are so many), so that a CPU generator, whose normals come in groups of
        16, draws for all of them what it would draw at once.
    """
    total = sum(sizes)
    if all_of_a_leaf:
        ends = [0]
        for end in accumulate(sizes):
            if end - ends[-1] >= SPAN:
                ends.append(end)
        edges = [*ends, *([total] if ends[-1] < total or not total else [])]
    else:
        edges = [*range(0, max(total - _VECTOR, 0) + 1, SPAN), total]
    out, first = list[Span](), list(accumulate(sizes, initial=0))
    for low, high in pairwise(edges):
        pieces = [(i, max(low - a, 0), min(high, b) - max(low, a)) for i, (a, b) in enumerate(pairwise(first))]
        leaves, starts, counts = zip(*[piece for piece in pieces if piece[2] > 0] or [(0, 0, 0)])
        out.append(Span(leaves, starts, counts, high - low))
    return out


@cache
def _spans_of_elements(
    sizes: tuple[int, ...], numbers: tuple[int, ...], runs: tuple[Runs | None, ...] | None
) -> list[tuple[Span, Elements]]:
    """The spans of leaves that Philox draws, and the elements of each span."""
    draw_numbers(numbers, (1,) * len(numbers))  # refuses two leaves of one number, in whatever spans they are
    out = list[tuple[Span, Elements]]()
    for span in spans(sizes, all_of_a_leaf=True):
        mine = tuple([numbers[i] for i in span.leaves])
        here = None if runs is None else tuple([runs[i] for i in span.leaves])
        out.append((span, _elements_of(span.sizes, mine, (1,) * len(mine), here)))
    return out


def _hash(path: str) -> int:
    """32 bits of a hash of a path, the same in every process."""
    return int.from_bytes(hashlib.blake2b(path.encode(), digest_size=4).digest(), "little")


@cache
def leaf_numbers(paths: tuple[str, ...], hashed: Callable[[str], int] = _hash) -> tuple[int, ...]:
    """For each leaf 32 bits of a hash of its path without wrappers, which name it to the counter-based stream.

    Few leaves draw more than twice in a step; those that do are checked when they draw (:func:`draw_numbers`).

    Raises:
        ValueError: two paths whose first two draws would be the same.
    """
    numbers = tuple([hashed(path) for path in without_wrappers(paths)])
    seen: dict[int, str] = {}
    for k in range(2):
        for number, path in zip(numbers, paths):
            other = seen.setdefault(draw_number(number, k), path)
            if other != path:
                raise ValueError(
                    f"params: the paths {other} and {path} have one hash, and would get the same noise; rename one"
                )
    return numbers


# what DistributedDataParallel, torch.compile, activation checkpointing and FSDP1 put into the names of what they wrap
_WRAPPERS = re.compile(r"(?:^|(?<=[.'\"]))(?:module|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")


def without_wrappers(paths: tuple[str, ...]) -> tuple[str, ...]:
    """The paths without the names of wrappers, so that wrapping a model leaves its noise alone.

    All paths are left as they are where two of them would become one, as in a model with a child of its own named ``module``.

    Example:
        >>> without_wrappers(("module._orig_mod.0.weight", "['module.head.bias']"))
        ('0.weight', "['head.bias']")
    """
    plain = tuple([_WRAPPERS.sub("", path) for path in paths])
    return plain if len(set(plain)) == len(set(paths)) else paths


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
    """The leaves that draw, by device and dtype: each group is one draw."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, (t, n) in enumerate(zip(templates, draws)):
        if n:
            groups.setdefault((t.device, t.dtype), []).append(i)
    return groups


def _from_generator(
    key: Tensor, step: Tensor, salt: int, size: int, dtype: torch.dtype, kind: str, scale: float
) -> Tensor:
    """One flat draw of torch's generator; where key or step is traced, an operation that reads them when it runs."""
    if is_plain(key, step):
        return _seeded(int(key), int(step), salt, size, dtype, kind, scale)
    return _stacked_draw(key, step, salt, size, dtype, kind, scale)


def seeded_generator(key: int, step: int, salt: int = 0) -> torch.Generator:
    """A generator for one step, seeded by a hash of key and step; ``salt`` numbers the groups of leaves of one dtype."""
    return torch.Generator().manual_seed(splitmix64(splitmix64(key + salt) + step))


def _seeded(key: int, step: int, salt: int, size: int, dtype: torch.dtype, kind: str, scale: float) -> Tensor:
    generator = seeded_generator(key, step, salt)
    if kind == "gaussian":
        return torch.empty(size, dtype=dtype, device=CPU).normal_(0.0, scale, generator=generator)
    return _from_bits(generator, size, dtype, kind).mul_(scale)


def seeded_fill(buffer: Tensor, key: Tensor, step: Tensor, salt: int, scale: float) -> Callable[[], None]:
    """A function that fills ``buffer`` with the normals of torch's generator for the values of ``key`` and ``step`` now.

    Args:
        buffer: a flat tensor on the CPU.
        key, step: int64, 0-d.
        salt: the number of the group of leaves that the buffer is for.
        scale: the standard deviation.
    """
    generator = torch.Generator()

    def fill() -> None:
        generator.manual_seed(splitmix64(splitmix64(int(key) + salt) + int(step)))
        buffer.normal_(0.0, scale, generator=generator)

    return fill


def _from_bits(generator: torch.Generator, size: int, dtype: torch.dtype, kind: str) -> Tensor:
    if kind == "uniform":
        return torch.empty(size, dtype=dtype, device=CPU).uniform_(generator=generator)
    if kind == "three_point":
        return three_point(torch.empty(size, dtype=torch.int32, device=CPU).random_(0, 6, generator=generator)).to(
            dtype
        )
    # a random byte for each sign: its second bit is 0 or 2
    words = torch.empty((size + 7) // 8, dtype=torch.int64, device=CPU).random_(-(2**63), None, generator=generator)
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
    return torch.empty(size, dtype=dtype, device=CPU)


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
