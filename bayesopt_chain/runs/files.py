r"""A file of tensors that checks itself, written whole or not at all.

It is a safetensors file, which other programs read too:

    8 bytes            n, the length of the header
    n bytes            JSON: ``{name: {"dtype", "shape", "data_offsets": [start, stop]}, ..., "__metadata__": {...}}``
    the rest           the bytes of the tensors

The metadata hold a JSON text ``about`` and its CRC-32. The text says what its writer said of the tensors, and the checksums
of every tensor: the CRC-32 of its name, dtype and shape, then one CRC-32 for each block of ``BLOCK`` bytes, which starts from
the first one plus the number of the block, so that no block passes for another. A reader asks for some rows of a tensor;
the blocks that hold them are read, and compared with their checksums. Nothing is unpickled.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain.version import __version__

FORMAT = "bayesopt_chain/2"
BLOCK = 1 << 16  # bytes under one checksum: what is read beside a few wanted rows stays small
AT_ONCE = 1 << 24  # bytes that are read and checked at once
LARGEST_HEADER = 1 << 27

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


def crc_of(text: str) -> int:
    """The CRC-32 of a text."""
    return zlib.crc32(text.encode())


def _label(name: str, dtype: torch.dtype, shape: Iterable[int]) -> int:
    return crc_of(f"{name} {dtype} {list(shape)}")


def checksums(name: str, x: Tensor) -> str:
    """The checksums of a tensor, 8 hexadecimal digits each: that of its name and kind, then those of its blocks."""
    label = _label(name, x.dtype, x.shape)
    data = _bytes(x)
    blocks = [
        zlib.crc32(data[i : i + BLOCK], (label + n) & 0xFFFFFFFF) for n, i in enumerate(range(0, len(data), BLOCK))
    ]
    return "".join([f"{crc:08x}" for crc in (label, *blocks)])


def _bytes(x: Tensor) -> memoryview:
    x = x.detach().contiguous().reshape(-1).cpu()
    return x.view(torch.uint8).numpy().data if x.numel() else memoryview(b"")


def write(path: Path, tensors: Mapping[str, Tensor], said: Mapping[str, Any]) -> int:
    """Write tensors, and what is to be said of them, atomically.

    Returns:
        The checksum of ``about``, which holds those of all tensors: it names the content of the file.

    Raises:
        OSError: the file cannot be written; what stood there is untouched.
    """
    from safetensors.torch import save_file

    held, seen = dict[str, Tensor](), set[int]()
    for name, x in tensors.items():
        x = x.detach().contiguous()
        # the format has no views
        if x.untyped_storage().data_ptr() in seen or x.untyped_storage().nbytes() != x.nbytes:
            x = x.clone()
        seen.add(x.untyped_storage().data_ptr())
        held[name] = x.cpu()
    sums = {name: checksums(name, x) for name, x in held.items()}
    about = json.dumps({"format": FORMAT, "version": __version__, "sums": sums, "said": dict(said)})
    crc = crc_of(about)
    _replace(path, lambda to: save_file(held, to, metadata={"bayesopt_chain": about, "crc": str(crc)}))
    return crc


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    _replace(path, lambda temporary: temporary.write_text(text))


def _replace(path: Path, to: Callable[[Path], Any]) -> None:
    """Let ``to`` write a temporary neighbour, push it to the disk, and put it in the place of ``path``."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        to(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as err:
        temporary.unlink(missing_ok=True)
        if type(err).__name__ == "SafetensorError":
            raise OSError(f"save: cannot write {path}: {err}") from err
        if isinstance(err, OSError):
            why = f"save: cannot write {path}: {err.strerror or err}; what stood there is untouched"
            raise OSError(err.errno, why) from err
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


class Entry(NamedTuple):
    """A tensor of a file: its kind, where its bytes begin, and the checksums of its blocks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    label: int
    sums: str

    @property
    def bytes(self) -> int:
        """The number of its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class File:
    """A file that :func:`write` wrote. Its header is checked when it is opened, its blocks when they are read.

    Attributes:
        path: where it is.
        said: what was said of the tensors.
        crc: what :func:`write` returned.
        entries: its tensors by name.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is truncated or damaged, or something else wrote it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            raise FileNotFoundError(f"load: there is no file {path}")
        try:
            with open(path, "rb") as file:
                header, data = _header(file)
            metadata = header.pop("__metadata__", None)
            text = metadata.get("bayesopt_chain") if isinstance(metadata, dict) else None
            if not isinstance(text, str):
                raise _Foreign
            self.crc = crc_of(text)
            if metadata["crc"] != str(self.crc):
                raise ValueError("what it says of itself does not match its checksum")
            about = json.loads(text)
            if about["format"] != FORMAT:
                raise _Foreign
            self.said: dict[str, Any] = about["said"]
            self.entries = {name: _entry(name, x, about["sums"][name], data) for name, x in header.items()}
            if about["sums"].keys() != self.entries.keys():
                raise ValueError("tensors are missing")
        except _Foreign:
            raise ValueError(f"load: {path} was not written by bayesopt_chain ({FORMAT})") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as err:
            raise ValueError(f"load: {path} is truncated or damaged: {str(err)[:200]}") from None

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """A tensor, or consecutive rows of it.

        Raises:
            ValueError: a block that does not match its checksum.
        """
        x = self.entries[name]
        low, high, _ = (rows or slice(None)).indices(x.shape[0]) if x.shape else (0, 1, 1)
        row = x.bytes // max(1, x.shape[0]) if x.shape else x.bytes
        shape = (max(0, high - low), *x.shape[1:]) if x.shape else ()
        raw = self._read(name, x, low * row, max(low, high) * row)
        return (
            torch.frombuffer(raw, dtype=x.dtype).reshape(shape)
            if raw
            else torch.empty(shape, dtype=x.dtype, device="cpu")
        )

    def read_columns(self, name: str, rows: slice, low: int, high: int) -> Tensor:
        """Elements ``low`` to ``high`` of consecutive rows, of which each is taken as flat: ``[rows, high - low]``."""
        x = self.entries[name]
        width, size = math.prod(x.shape[1:]), x.dtype.itemsize
        if (high - low) * size >= BLOCK // 4 or high - low < width:
            parts = [
                self._read(name, x, (i * width + low) * size, (i * width + high) * size)
                for i in range(*rows.indices(x.shape[0]))
            ]
            raw = bytearray().join(parts)
            return (
                torch.frombuffer(raw, dtype=x.dtype).reshape(len(parts), -1)
                if raw
                else torch.empty(0, high - low, dtype=x.dtype, device="cpu")
            )
        return self.read(name, rows).reshape(-1, width)[:, low:high]

    def verify(self) -> None:
        """Read every block.

        Raises:
            ValueError: one does not match its checksum.
        """
        for name, x in self.entries.items():
            for start in range(0, x.bytes, AT_ONCE):
                self._read(name, x, start, min(start + AT_ONCE, x.bytes))

    def _read(self, name: str, x: Entry, start: int, stop: int) -> bytearray:
        """Bytes ``start`` to ``stop`` of a tensor, out of whole blocks that are checked."""
        out = bytearray(stop - start)
        try:
            with open(self.path, "rb", buffering=0) as file:
                for at in range(start // BLOCK * BLOCK, stop, AT_ONCE):
                    end = min(at + AT_ONCE, -(-stop // BLOCK) * BLOCK, x.bytes)
                    data = memoryview(_exactly(file, x.start + at, end - at))
                    for i in range(at, end, BLOCK):
                        n = i // BLOCK
                        crc = zlib.crc32(data[i - at : i - at + BLOCK], (x.label + n) & 0xFFFFFFFF)
                        if f"{crc:08x}" != x.sums[8 * n + 8 : 8 * n + 16]:
                            raise ValueError(
                                f"load: {name} in {self.path} does not match its checksum: the file is damaged"
                            )
                    low, high = max(at, start), min(end, stop)
                    out[low - start : high - start] = data[low - at : high - at]
        except OSError as err:
            raise ValueError(f"load: {self.path} cannot be read: {err}") from None
        return out


class _Foreign(Exception):
    """Another program wrote the file."""


def _exactly(file: BinaryIO, at: int, size: int) -> bytearray:
    out = bytearray(size)
    view, got = memoryview(out), 0
    file.seek(at)
    while got < size:
        n = file.readinto(view[got:])  # type: ignore[attr-defined]
        if not n:
            raise OSError("it ends too early: truncated or damaged")
        got += n
    return out


def _header(file: BinaryIO) -> tuple[dict[str, Any], tuple[int, int]]:
    """The header of a file, and where its data begin and end."""
    size = os.fstat(file.fileno()).st_size
    n = int.from_bytes(file.read(8), "little")
    if size < 8 or n > min(size - 8, LARGEST_HEADER):
        raise ValueError(f"{size} bytes cannot hold a header of {n}")
    header = json.loads(file.read(n))
    if not isinstance(header, dict):
        raise ValueError("its header is no dictionary")
    return header, (8 + n, size)


def _entry(name: str, about: Any, sums: str, data: tuple[int, int]) -> Entry:
    """What a header says of a tensor, which has to fit into the data."""
    dtype, shape, (start, stop) = DTYPES[about["dtype"]], tuple(about["shape"]), about["data_offsets"]
    if any(type(n) is not int or n < 0 for n in (*shape, start, stop)) or data[0] + stop > data[1]:
        raise ValueError(f"{name} lies outside the data")
    label = _label(name, dtype, shape)
    out = Entry(dtype, shape, data[0] + start, label, sums)
    if out.bytes != stop - start or sums[:8] != f"{label:08x}" or len(sums) != 8 + 8 * -(-out.bytes // BLOCK):
        raise ValueError(f"{name} is not what was written")
    return out
