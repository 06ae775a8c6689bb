r"""Noise that is a function of the state: of one key and one step counter, which the state holds.

``init`` draws one int64 key; from then on the normals depend on (key, step, leaf, element) alone, so that the same
state gives the same noise, a copied state continues exactly, and stacked chains differ by their keys. They are the stream of
:mod:`bayesopt_chain.random.philox`, the same in every back end. It knows a leaf by a hash of its path, so that the
noise of a leaf does not depend on which other leaves there are.

Besides normals there are uniforms.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain.random.philox import Elements, Runs, draw_elements, parts_of_leaves


def new_key(generator: torch.Generator | None, device: torch.device) -> Tensor:
    """One random int64 key, 0-d, from ``generator`` or from torch's global generator."""
    source = generator.device if generator is not None else "cpu"
    return torch.randint(2**63 - 1, (), dtype=torch.int64, generator=generator, device=source).to(device)


def is_keyed(entry: Any) -> bool:
    """Whether an entry of a state has a random stream, with the fields ``key`` and ``step``."""
    return {"key", "step"} <= set(getattr(entry, "_fields", ())) and isinstance(entry.key, Tensor)


def keyed(tree: Any) -> list[Any]:
    """List the entries of a tree that have a random stream; an entry may hold the streams of several chains, stacked."""
    return [entry for entry in optree.tree_leaves(tree, is_leaf=is_keyed) if is_keyed(entry)]


@dataclass(frozen=True)
class Variables:
    """The random variables of a step: everything that is known of them in advance, so that a draw needs key and step alone.

    Attributes:
        numbers: what names each leaf (:func:`leaf_numbers`); default 0, 1, ...
        each: how many variables each leaf draws; default one.
        kind: ``"gaussian"``, standard normals, or ``"uniform"``, on [0, 1); independent.
        runs: for leaves that are spread over ranks, the elements of each that are here; ``None`` for all of a leaf.

    Example:
        >>> import torch
        >>> ((z,),) = Variables().draw(torch.tensor(3), torch.tensor(0), [torch.empty(1, 2, 4)])
        >>> z.shape
        torch.Size([2, 4])
    """

    numbers: tuple[int, ...] | None = None
    each: tuple[int, ...] | None = None
    kind: str = "gaussian"
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
            ValueError: two leaves that would get the same variable; a leaf of more than ``2^34`` elements.
        """
        each = self.each or (1,) * len(like)
        out: list[list[Tensor]] = [[] for _ in like]
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}  # each is one draw
        for i, (x, n) in enumerate(zip(like, each)):
            if n:
                groups.setdefault((x.device, x.dtype), []).append(i)
        for (device, dtype), members in groups.items():
            is_whole = len(members) == len(each)
            numbers, every, runs = (
                xs if is_whole or xs is None else tuple([xs[i] for i in members])
                for xs in (self.numbers or tuple(range(len(like))), each, self.runs)
            )
            shapes = [like[i].shape[1:] for i in members]
            elements = _elements_of(tuple([x.numel() for x in shapes]), numbers, every, runs)
            drawn = draw_elements(key.to(device), step.to(device), elements, dtype, self.kind)
            parts = iter(drawn)
            for i, shape in zip(members, shapes):
                mine = [next(parts) for _ in range(each[i])]
                out[i] = mine if len(shape) == 1 else [x.view(shape) for x in mine]
        return out


@cache
def _elements_of(
    sizes: tuple[int, ...], numbers: tuple[int, ...], each: tuple[int, ...], runs: tuple[Runs | None, ...] | None
) -> Elements:
    """The elements of every draw, where leaf ``i`` has ``sizes[i]`` elements and draws ``each[i]`` times."""
    here = [((0, n),) if mine is None else mine for mine, n in zip(runs or [None] * len(sizes), sizes)]
    here = tuple([mine for mine, k in zip(here, each) for _ in range(k)])
    return parts_of_leaves(here, draw_numbers(numbers, each))


def _hash(path: str) -> int:
    """32 bits of a hash of a path, the same in every process."""
    return int.from_bytes(hashlib.blake2b(path.encode(), digest_size=4).digest(), "little")


@cache
def leaf_numbers(paths: tuple[str, ...], hashed: Callable[[str], int] = _hash) -> tuple[int, ...]:
    """For each leaf 32 bits of a hash of its path without wrappers, which name it to the counter-based stream.

    Few leaves draw more than twice in a step; those that do are checked again when they draw.

    Raises:
        ValueError: two paths whose first two draws would be the same.
    """
    numbers = tuple([hashed(path) for path in without_wrappers(paths)])
    draw_numbers(numbers, (2,) * len(numbers), paths)
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
def draw_numbers(leaves: tuple[int, ...], draws: tuple[int, ...], paths: tuple[str, ...] = ()) -> tuple[int, ...]:
    """The numbers of all draws of one step: ``draws[i]`` of the leaf that is numbered ``leaves[i]``, one leaf after the other.

    Raises:
        ValueError: two of them are the same; the message names the leaves by their ``paths``, if these are given.
    """
    seen: dict[int, int] = {}
    for i, (leaf, n) in enumerate(zip(leaves, draws)):
        for k in range(n):
            if (other := seen.setdefault(draw_number(leaf, k), i)) != i:
                a, b = (paths[j] if paths else j for j in (other, i))
                raise ValueError(
                    f"params: a draw of leaf {b} would be one of leaf {a}, since the hashes of their paths are equal, or lie a "
                    "few draws apart; rename one of them"
                )
    return tuple(seen)


def seed_of(key: int, count: int) -> int:
    """A seed for a generator of another kind, a function of a key and a count."""
    return splitmix64(splitmix64(key) + count)


def chain_seed(seed: int, chain: int) -> int:
    """The seed of one chain, a hash of 63 bits.

    Args:
        seed: the seed of the run.
        chain: the global number of the chain.
    """
    return splitmix64(splitmix64(seed & (2**64 - 1)) ^ splitmix64(~chain & (2**64 - 1))) >> 1


def splitmix64(x: int) -> int:
    """Steele, Lea and Flood's 64-bit mixer."""
    x = (x + 0x9E3779B97F4A7C15) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return x ^ (x >> 31)
