r"""The one format of files: plain safetensors with checksums, written whole or not at all.

    8 bytes     n, the length of the header
    n bytes     JSON: ``{"__metadata__": {"bayesopt_chain": about, "crc": c}, name: {"dtype", "shape", "data_offsets"}, ...}``
    the rest    the bytes of the tensors, one after the other without gaps

``about`` is a JSON text, ``{"format", "sums", "metadata"}``: what the writer says of the tensors, and for each of them the
CRC-32 of every block of 64 KiB. ``c`` is the CRC-32 of all entries and of ``about``. So a header is checked when a file is
opened, and a block when it is read. Any reader of safetensors opens these files.

Writing goes to a temporary file, which is flushed to the disk, renamed, and made to stay by flushing the folder. Reading
believes nothing: only regular files are opened, and never waited for; sizes are compared before anything is allocated; nothing
is unpickled.

A tree of tensors is written by its leaves' paths: a file holds ``{path: tensor}`` and says the numbers and strings among the
leaves and the chain. :func:`load` compares all of it with the tree it is to fill and names what differs. Of several ranks each
writes a file of its own, without a message:

    run.rank-00000-of-00004.safetensors ...     what each rank saved

and as many ranks load what each of them saved. What one process saved is loaded by any number of them, each the whole. Shards
of DTensors, and another number of ranks: :func:`bayesopt_chain.distributed.save`.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain._torch import is_dtensor
from bayesopt_chain.distributed.ranks import bytes_of, require_fit, world
from bayesopt_chain.trees import named_leaves

FORMAT = "bayesopt_chain/3"
BLOCK = 1 << 16  # bytes under one checksum: what has to be read for a few wanted rows stays small
AT_ONCE = 256 * BLOCK  # bytes that are read and checked at once
MOST_HEADER, MOST_AXES, MOST = 1 << 25, 64, 1 << 53
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_WRONG = (
    ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OverflowError, MemoryError, OSError,
)  # fmt: skip


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write tensors, and what is to be said of them, atomically. The folder has to exist.

    Args:
        path: of the file, which is replaced.
        tensors: dense tensors by name, on any device.
        metadata: JSON.

    Raises:
        TypeError: a tensor that is sparse, has no values, or is of a dtype that the format does not know.
        OSError: the file cannot be written; what stood there is untouched.
    """
    entries, sums, data, at = dict[str, Any](), dict[str, str](), list[memoryview](), 0
    if "__metadata__" in tensors:
        raise ValueError("save: a leaf is named __metadata__, as the header of every file of safetensors; rename it")
    for name, x in tensors.items():
        if x.dtype not in NAMES or x.layout != torch.strided or x.is_meta or x.is_nested:
            raise TypeError(
                f"save: leaf {name} is {x.dtype}, {x.layout}, on {x.device.type}, and cannot be written; make it dense and "
                "real (to_dense, torch.view_as_real), or of another precision"
            )
        raw = bytes_of(x)
        entries[name] = {"dtype": NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [at, at + len(raw)]}
        sums[name] = _sums(raw)
        data.append(raw)
        at += len(raw)
    about = json.dumps({"format": FORMAT, "sums": sums, "metadata": metadata})
    header = json.dumps({"__metadata__": {"bayesopt_chain": about, "crc": _seal(entries, about)}, **entries}).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > MOST_HEADER:
        raise ValueError(
            f"save: {path} would have a header of {len(header)} bytes; save fewer or smaller tensors in a file"
        )
    replace(path, [len(header).to_bytes(8, "little"), header, *data])


def _sums(raw: Any) -> str:
    """The checksums of all blocks, 8 hexadecimal digits each."""
    return "".join([f"{zlib.crc32(raw[i : i + BLOCK]):08x}" for i in range(0, len(raw), BLOCK)])


def _seal(entries: Mapping[str, Any], about: str) -> str:
    return f"{zlib.crc32((json.dumps(entries) + about).encode()):08x}"


def replace(path: Path, parts: list[Any]) -> None:
    """Write a temporary neighbour, flush it to the disk, and put it in the place of ``path``, or of what a link there names."""
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fd = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(fd)  # the name stays, too
        finally:
            os.close(fd)
    except BaseException as err:
        temporary.unlink(missing_ok=True)
        if isinstance(err, OSError):
            raise OSError(
                err.errno, f"save: cannot write {path}: {err.strerror or err}; what stood there is untouched"
            ) from err
        raise


def write_tree(path: Path, tree: Any) -> None:
    """Write tensors, numbers, strings, and dicts, lists and tuples of them, in a file of this format.

    Raises:
        TypeError: something else in the tree. OSError: the file cannot be written.
    """
    tree = packed(tree, tensors := dict[str, Tensor]())
    write(path, tensors, {"tree": tree})


def read_tree(path: Path, device: torch.device) -> Any:
    """What :func:`write_tree` wrote. Tensors that were not on a CPU come to ``device``.

    Raises:
        FileNotFoundError: there is no file. ValueError: it is damaged, or holds no such tree.
    """
    file = File(path)
    return unpacked(file.metadata.get("tree", {}), file, device)


def packed(x: Any, tensors: dict[str, Tensor], prefix: str = "") -> Any:
    """A tree as JSON: lists and plain values as they are, the rest as a pair of its kind and what it holds.

    Args:
        x: the tree.
        tensors: to which its tensors are added by name.
        prefix: with which their names begin.

    Raises:
        TypeError: something that a file cannot hold.
    """
    if isinstance(x, Tensor) and not is_dtensor(x):
        tensors[name := f"{prefix}{len(tensors)}"] = x
        return {"tensor" if x.is_cpu else "elsewhere": name}
    if isinstance(x, dict):
        return {"dict": [[packed(k, tensors, prefix), packed(v, tensors, prefix)] for k, v in x.items()]}
    if isinstance(x, (list, tuple)):
        items = [packed(v, tensors, prefix) for v in x]
        return {"tuple": items} if isinstance(x, tuple) else items
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    raise TypeError(
        f"save: {type(x).__name__} cannot be saved; tensors (of a DTensor x.full_tensor()), numbers, strings and containers of "
        "them can"
    )


def unpacked(x: Any, file: File, device: torch.device, prefix: str = "") -> Any:
    """What :func:`packed` was given, with the tensors of a file; those that were not on a CPU come to ``device``.

    Raises:
        ValueError: this is no such tree, or a tensor of it is damaged or absent.
    """
    tensors = {name: file.read(name) for name in file.entries if name.startswith(prefix)}

    def inner(x: Any) -> Any:
        if isinstance(x, list):
            return [inner(v) for v in x]
        if not isinstance(x, dict):
            return x
        ((kind, held),) = x.items()
        if kind in ("tensor", "elsewhere"):
            return tensors[held] if kind == "tensor" else tensors[held].to(device)
        return {"dict": dict, "tuple": tuple}[kind](inner(held))

    try:
        return inner(x)
    except (KeyError, TypeError, IndexError, ValueError, RecursionError):
        raise ValueError(f"load: {file.path} was written by another function") from None


@contextmanager
def open_regular(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """A descriptor of a regular file, and its status; a pipe or a device is refused instead of waited for.

    Raises:
        OSError: there is no file, or it is of another kind.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is no regular file")
        yield fd, status
    finally:
        os.close(fd)


class Entry(NamedTuple):
    """A tensor of a file: its kind, where its bytes begin and end in the file, and the checksums of its blocks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int
    sums: str


class File:
    """A file that :func:`write` wrote. Its header is checked here, its blocks when they are read.

    Attributes:
        path: where it is.
        metadata: what was said of the tensors.
        entries: its tensors by name.
        inode, bytes: as the file was opened. A file that has been replaced since is not read: its rows may be others.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is truncated or damaged, or another program's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_regular(path) as (fd, status):
                self.inode, self.bytes = status.st_ino, status.st_size
                n = int.from_bytes(os.pread(fd, 8, 0), "little")
                if not 2 <= n <= min(status.st_size - 8, MOST_HEADER):
                    raise ValueError(f"{status.st_size} bytes cannot hold a header of {n}")
                entries = json.loads(os.pread(fd, n, 8))
            self.metadata, self.entries = _checked(entries, 8 + n, status.st_size)
        except FileNotFoundError:
            raise FileNotFoundError(f"load: there is no file {path}") from None
        except _WRONG as err:
            raise ValueError(f"load: {path} is truncated or damaged: {str(err)[:200]}") from None

    def read(self, name: str, low: int = 0, high: int | None = None) -> Tensor:
        """A tensor, or its rows ``low`` to ``high``, on the CPU.

        Raises:
            ValueError: a block does not match its checksum, or the file has been replaced.
        """
        n, *shape = self.entries[name].shape or (1,)
        high = n if high is None else high
        rows = self.elements(name, range(low, high), 0, math.prod(shape))
        return rows.reshape((high - low, *shape) if self.entries[name].shape else ())

    def elements(self, name: str, rows: range, low: int, high: int) -> Tensor:
        """Elements ``low`` to ``high`` of consecutive rows, each taken as flat; only the blocks that hold them are read."""
        x, shape = self.entries[name], (len(rows), high - low)
        width, size = math.prod(x.shape[1:]), x.dtype.itemsize
        # whole rows follow one another, and are read at once
        starts, length = (rows[:1], len(rows) * width) if high - low == width else (rows, high - low)
        spans = [((i * width + low) * size, (i * width + low + length) * size) for i in starts if length]
        # in memory of torch's own alignment, by which matrix products round: a run that is read goes on bit for bit
        parts = [torch.frombuffer(raw, dtype=torch.uint8) for span in spans if (raw := self._bytes(name, *span))]
        return torch.cat([torch.empty(0, dtype=torch.uint8, device="cpu"), *parts]).view(x.dtype).reshape(shape)

    def verify(self) -> None:
        """Read every block.

        Raises:
            ValueError: one does not match its checksum.
        """
        for name, x in self.entries.items():
            for at in range(0, x.stop - x.start, AT_ONCE):  # a tensor may be large
                self._bytes(name, at, min(at + AT_ONCE, x.stop - x.start))

    def _bytes(self, name: str, start: int, stop: int) -> bytearray:
        """Bytes of a tensor, out of whole blocks that are compared with their checksums."""
        x, out = self.entries[name], bytearray(stop - start)
        try:
            with open_regular(self.path) as (fd, status):
                if (status.st_ino, status.st_size) != (self.inode, self.bytes):
                    raise OSError("it has been written anew since")
                for low in range(start // BLOCK * BLOCK, stop, AT_ONCE):
                    high = min(low + AT_ONCE, -(-stop // BLOCK) * BLOCK, x.stop - x.start)
                    data = memoryview(os.pread(fd, high - low, x.start + low))
                    sums = x.sums[low // BLOCK * 8 : -(-high // BLOCK) * 8]
                    if len(data) != high - low or _sums(data) != sums:
                        raise ValueError(
                            f"load: {name} in {self.path} does not match its checksum: the file is damaged"
                        )
                    a, b = max(low, start), min(high, stop)
                    out[a - start : b - start] = data[a - low : b - low]
        except OSError as err:
            raise ValueError(
                f"load: {self.path} cannot be read: {err.strerror or err}; open the run again where files were merged"
            ) from None
        return out


def _checked(header: Any, start: int, size: int) -> tuple[dict[str, Any], dict[str, Entry]]:
    """What a header says of the file and of its tensors, which have to fill the file from ``start`` to ``size``."""
    sealed = header.pop("__metadata__", None)
    if not isinstance(sealed, dict) or not isinstance(sealed.get("bayesopt_chain"), str):
        raise ValueError("it was not written by bayesopt_chain")
    if sealed["crc"] != _seal(header, sealed["bayesopt_chain"]):
        raise ValueError("its header does not match its checksum")
    about = json.loads(sealed["bayesopt_chain"])
    if about["format"] != FORMAT:
        raise ValueError(f"its format is {str(about['format'])[:40]!r}, and this version reads {FORMAT!r}")
    if not isinstance(about["metadata"], dict):
        raise ValueError("its metadata are no dictionary")
    entries, at = dict[str, Entry](), start
    for name, x in header.items():
        entries[name] = _entry(name, x, about["sums"][name], start)
        if entries[name].start != at:
            raise ValueError(f"{name[:40]} does not begin where the tensor before it ends")
        at = entries[name].stop
    if at != size:
        raise ValueError(f"it has {size} bytes, not {at}")
    return about["metadata"], entries


def _entry(name: str, about: Any, sums: Any, start: int) -> Entry:
    """What a header says of one tensor."""
    shape, (low, high), dtype = about["shape"], about["data_offsets"], DTYPES[about["dtype"]]
    if len(shape) > MOST_AXES or not all(is_count(n) for n in (*shape, low, high)):
        raise ValueError(f"{name[:40]} has a shape or a place that cannot be")
    if math.prod(shape) * dtype.itemsize != high - low:
        raise ValueError(f"{name[:40]} has a shape that is not its size")
    if not isinstance(sums, str) or len(sums) != 8 * -(-(high - low) // BLOCK):
        raise ValueError(f"{name[:40]} lacks checksums")
    return Entry(dtype, tuple(shape), start + low, start + high, sums)


def is_count(x: Any) -> bool:
    """Whether this is an integer from 0 to 2^53."""
    return type(x) is int and 0 <= x < MOST


# trees by the paths of their leaves

Scalar = bool | int | float | str | None


def flat(tree: Any, who: str = "save:") -> tuple[dict[str, Tensor], dict[str, Scalar]]:
    """The tensors of a tree by path (``state/0/trace/1``), and its numbers, strings and ``None``.

    Args:
        tree: any.
        who: the first words of the message.

    Raises:
        TypeError: a leaf that is neither. ValueError: two leaves have the same path.
    """
    named = named_leaves(tree)
    tensors = {name: x.detach() for name, x in named.items() if torch.is_tensor(x)}
    scalars = {name: checks.plain(x) for name, x in named.items() if name not in tensors}
    if wrong := [n for n, x in scalars.items() if x is not None and not isinstance(x, (bool, int, float, str))]:
        raise TypeError(
            f"{who} leaf {wrong[0]} is {type(named[wrong[0]]).__name__}; only tensors, numbers and strings can be saved"
        )
    return tensors, scalars


@checks.takes(path=checks.PATH, tx=checks.ANY)
def save(path: str | os.PathLike, tree: Any, *, tx: Any = None) -> None:
    """Write a tree to one safetensors file: atomically, and without pickle.

    Args:
        path: the file. It is replaced in one step; a crash leaves the old file or the new one. Under ``torchrun`` call
            it on every rank: each writes a file of its own, ``run.rank-00001-of-00004.safetensors`` for
            ``run.safetensors``.
        tree: any tree of tensors, numbers and strings, such as ``(params, state)``.
        tx: the chain whose state is in the tree. Its text is kept, and :func:`load` compares it.

    Raises:
        TypeError: a leaf of another type, or a DTensor.
        OSError: the file cannot be written; what stood there before is untouched.

    Example:
        >>> import tempfile, torch, bayesopt_chain as bc
        >>> tx, params = bc.sghmc(0.1, temperature=0.01), {"w": torch.ones(2)}
        >>> state = tx.init(params)
        >>> file = tempfile.mkdtemp() + "/run.safetensors"
        >>> bc.save(file, (params, state), tx=tx)
        >>> params, state = bc.load(file, like=(params, state), tx=tx)
        >>> params["w"]
        tensor([1., 1.])
    """
    tensors, scalars = flat(tree)
    if wrong := [name for name, x in tensors.items() if is_dtensor(x)]:
        raise TypeError(
            f"save: leaf {wrong[0]} is a DTensor, of which a rank holds a shard: bc.distributed.save(folder, tree) writes "
            "shards that any number of ranks reads, and x.full_tensor() is the whole"
        )
    header = {"scalars": scalars, "chain": None if tx is None else repr(tx)}
    write(_mine(Path(path), *world()), tensors, header)


@checks.takes(path=checks.PATH, tx=checks.ANY)
def load(path: str | os.PathLike, *, like: Any, tx: Any = None) -> Any:
    """Read a tree that :func:`save` wrote.

    Args:
        path: the file that was given to :func:`save`. What several ranks saved is loaded by as many, each its own.
        like: a tree of the structure, shapes and dtypes to expect; its values do not matter and it is not changed. The
            tensors come back on the devices of this tree.
        tx: the chain, if :func:`save` was given one: a file of another chain is refused.

    Returns:
        A tree like ``like``.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a truncated or damaged file, one that something else wrote, or one of another tree or chain; the
            message names what differs. Files of another number of ranks, or of several.

    Example:
        >>> import tempfile, torch, bayesopt_chain as bc
        >>> file = tempfile.mkdtemp() + "/params.safetensors"
        >>> bc.save(file, {"w": torch.ones(2)})
        >>> bc.load(file, like={"w": torch.zeros(2)})
        {'w': tensor([1., 1.])}
    """
    flat(like, "load: in like=")
    file = File(_saved(Path(path), *world()))
    tensors, header = {name: file.read(name) for name in file.entries}, file.metadata
    if tx is not None and header.get("chain") not in (None, repr(tx)):
        raise ValueError(f"load: {path} holds the state of another chain:\n{header['chain']}\nnot of\n{tx!r}")
    return filled(like, tensors, header.get("scalars", {}), str(path))


def _mine(path: Path, rank: int, size: int) -> Path:
    """The file that a rank writes where a user asked for ``path``."""
    return path if size == 1 else path.with_name(f"{path.stem}.rank-{rank:05d}-of-{size:05d}{path.suffix}")


def _saved(path: Path, rank: int, size: int) -> Path:
    """The file that this rank is to load: what one process saved, or its own of as many ranks as load.

    Raises:
        ValueError: another number of ranks has saved, alone or besides.
    """
    ranked = re.compile(re.escape(path.stem) + r"\.rank-\d{5}-of-\d{5}" + re.escape(path.suffix))
    found = {file.name for file in path.parent.glob("*") if ranked.fullmatch(file.name)}
    if not found:
        return path
    found |= {path.name} if path.exists() else set()
    if others := sorted(found - {_mine(path, i, size).name for i in range(size)}):
        raise ValueError(
            f"load: {path} was saved by another number of ranks than the {size} that load it, as {others[0]}: remove what is "
            "older, load one rank's file by its name, or save by bc.distributed.save(folder, tree), which any number of ranks "
            "reads"
        )
    return _mine(path, rank, size)


def filled(like: Any, tensors: Mapping[str, Tensor], scalars: Mapping[str, Scalar], where: str) -> Any:
    """``like`` with the values that were read, after comparing every leaf."""
    wanted, numbers = flat(like)
    here, there = (
        {n: f"{x.dtype} {tuple(x.shape)}" if torch.is_tensor(x) else "a number" for n, x in both.items()}
        for both in ({**wanted, **numbers}, {**tensors, **scalars})
    )
    require_fit(f"load: {where} does not fit the tree of like=", here, there)
    values = {**scalars, **{name: tensors[name].to(leaf.device) for name, leaf in wanted.items()}}
    return optree.tree_structure(like, none_is_leaf=True).unflatten([values[name] for name in named_leaves(like)])


def nested(flat: Mapping[str, Any]) -> Any:
    """A nested dictionary from one with paths as keys; where one path begins another, as ``a`` and ``a/b``, that one itself."""
    if any(b.startswith(a) for a, b in itertools.pairwise(sorted(name + "/" for name in flat))):
        return dict(flat)
    return flat["tensor"] if list(flat) == ["tensor"] else merged({}, flat)


def merged(tree: Any, flat: Mapping[str, Any]) -> Any:
    """Nested dictionaries with these values in them too, by their paths."""
    out: Any = optree.tree_map(lambda x: x, tree)
    for name, value in flat.items():
        *folders, last = name.split("/")
        inner = out
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[last] = value
    return out
