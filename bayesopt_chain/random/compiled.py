"""C++ kernels: the ones that came with the wheel, or compiled once by the machine's own compiler, kept, and loaded.

A wheel that was built where there is a compiler holds each kernel once for every level in :data:`LEVELS`, beside its source.
The highest level that this processor has is loaded. Where there is none, as in a checkout, the kernel is compiled for it and
kept. The flags keep every rounding of the source, so that all levels and all compilers give the same bits.

A loaded library runs with the user's rights, so that whoever can put a file where one is looked for runs code as this
user. Hence the folder is ``$XDG_CACHE_HOME/bayesopt_chain`` or ``~/.cache/bayesopt_chain``, made with mode 0700 and used only
if it is a folder of this user's that nobody else can read or write, and no folder above it can be changed by another user than
root (a folder in which everybody may only touch files of their own, like ``/tmp``, passes). Nobody else can put a file there,
nor change one, so that files are not looked at one by one. A folder that fails is to be removed, not closed: what somebody put
there before would stay. Until then a fresh private one is made for each process and removed at its end, with a warning.

The name of a library holds its own SHA-256: the dynamic loader maps a file that was cut short without a look, and the process
dies at the first page that is missing. Such a library is compiled again and replaced. Libraries are compiled in a folder of
their own and renamed, so that a reader sees a whole one or none. Paths are arguments of the compiler, never words of a shell.
The libraries of a wheel have no digest of ours: installers compare every file of a wheel with the list in it.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
from array import array
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

_FLAGS = (
    *("-O3", "-std=c++17", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
    "-fno-unswitch-loops",  # a loop that chooses between values becomes vectors; GCC leaves its copies for each choice scalar
)

# The processors that kernels are made for, the least able first, by torch's names, so that ATEN_CPU_CAPABILITY holds here too.
LEVELS: dict[str, tuple[str, ...]] = {
    "default": (),
    "avx2": ("-mavx2", "-mfma"),
    "avx512": ("-mfma", "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mprefer-vector-width=512"),
}


class CompileError(RuntimeError):
    """There is no compiler, or it refused; the message says which and why."""


def load(source: Path) -> ctypes.CDLL:
    """The shared library of a C++ source.

    Args:
        source: a C++ file with ``extern "C"`` functions, and headers beside it. A library that is compiled here is named after
            it, with a digest of source, compiler and level.

    Raises:
        CompileError: no library came with the wheel, and there is no compiler (``$CXX``, ``g++``, ``clang++`` or ``c++``), or
            one that fails.
        OSError: the source cannot be read, or the library cannot be written or loaded.
    """
    for library in [library_of(source, level) for level in levels()]:
        try:
            return ctypes.CDLL(str(library))
        except OSError:  # missing, or made for another system: try the next level, and the compiler when none is left
            continue
    return _load_compiled(source)


def text_of(source: Path) -> str:
    """The text of a source, with that of the headers beside it in the place of their ``#include``.

    Raises:
        OSError: one of them cannot be read.
    """
    return re.sub(r'^#include "(.+)"$', lambda m: text_of(source.parent / m[1]), source.read_text(), flags=re.M)


def levels() -> list[str]:
    """The levels of :data:`LEVELS` that this processor has, best first."""
    import torch  # here, since building a wheel needs this file and has no torch

    best, known = torch.backends.cpu.get_cpu_capability().lower(), [*LEVELS]
    return known[known.index(best) :: -1] if best in known else known[:1]


def library_of(source: Path, level: str) -> Path:
    """Where a wheel has the library of a source for a level."""
    return source.with_suffix(f".{level}.so")


def prebuild(source: Path, level: str, library: Path) -> None:
    """Compile ``source`` for every processor of a level of :data:`LEVELS`, as wheels carry it.

    Raises:
        CompileError: no compiler, or one that does not take the level's flags.
    """
    build(text_of(source), find_compiler(), library, [("-fopenmp", *LEVELS[level])])


def _load_compiled(source: Path) -> ctypes.CDLL:
    compiler, text, folder = find_compiler(), text_of(source), private_folder()
    # a compiler without OpenMP, as clang often is, still knows the instructions of a level
    flags = [(*openmp, *LEVELS[level]) for openmp in (("-fopenmp",), ()) for level in levels()]
    name = f"{source.stem}-{_digest(text, compiler, flags)}"
    for library in folder.glob(f"{name}-*.so"):
        if library.is_file() and library.stem == f"{name}-{_content(library)}":
            return ctypes.CDLL(str(library))
    with tempfile.TemporaryDirectory(prefix="made-", dir=folder) as scratch:
        made = Path(scratch) / "library.so"
        build(text, compiler, made, flags)
        library = folder / f"{name}-{_content(made)}.so"
        os.replace(made, library)  # a process that has loaded the old one keeps what it has mapped
    return ctypes.CDLL(str(library))


def _content(library: Path) -> str:
    """A hash of the bytes of a library."""
    return hashlib.sha256(library.read_bytes()).hexdigest()[:32]


def private_folder() -> Path:
    """The folder for compiled programs: :func:`cache_folder`, or, with a warning, one of this process alone."""
    try:
        return cache_folder()
    except (OSError, RuntimeError) as err:  # RuntimeError: no HOME, and no entry in the table of users
        from bayesopt_chain import checks  # here, since building a wheel needs this file and has no torch

        checks.warn(
            f"{err}; compiling into a private temporary folder, in every process anew (XDG_CACHE_HOME may name another one)"
        )
        return temporary_folder()


@cache
def temporary_folder() -> Path:
    """A fresh folder that nobody else can read or write, removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="bayesopt_chain-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def find_compiler() -> list[str]:
    """The compiler's command: ``$CXX`` with its arguments, or the first of g++, clang++, c++ on the path."""
    words = shlex.split(os.environ.get("CXX", ""))
    for command in [words] if words else [["g++"], ["clang++"], ["c++"]]:
        if found := shutil.which(command[0]):
            return [found, *command[1:]]
    raise CompileError(f"no C++ compiler found ({words[0] if words else 'g++, clang++, c++'})")


def cache_folder() -> Path:
    """The folder for libraries, made if it is missing.

    Raises:
        PermissionError: another user can write to it, or to a folder above it. OSError: it cannot be made.
        RuntimeError: this user has no home directory.
    """
    if not hasattr(os, "getuid"):
        raise PermissionError("this system has no owners of files that could be checked")
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))  # where it is relative, the XDG specification says to ignore it
    root = given if given.is_absolute() else Path.home() / ".cache"
    folder = root.resolve() / "bayesopt_chain"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    mine = folder.lstat()
    if not stat.S_ISDIR(mine.st_mode) or mine.st_uid != os.getuid() or mine.st_mode & 0o077:
        raise PermissionError(
            f"{folder} is not a folder of this user's alone; remove it, with what others may have put there"
        )
    for above in folder.parents:
        status = above.stat()
        everybodys = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
        if status.st_uid not in (os.getuid(), 0) or everybodys:
            raise PermissionError(f"{above}, above {folder}, can be changed by other users (or set XDG_CACHE_HOME)")
    return folder


def build(source: str, compiler: Sequence[str], library: Path, flags: Sequence[Sequence[str]] = ((),)) -> None:
    """Compile ``source`` into ``library``, with the first of some lists of flags that the compiler takes.

    Raises:
        CompileError: with the first line of what the compiler says.
    """
    said = ""
    for extra in flags:
        command = [*compiler, *_FLAGS, *extra, "-o", str(library), "-x", "c++", "-"]
        try:
            done = subprocess.run(command, input=source, capture_output=True, text=True, errors="replace", timeout=300)
        except (OSError, subprocess.TimeoutExpired) as err:
            raise CompileError(f"{compiler[0]}: {err}") from err
        if done.returncode == 0:
            return
        lines = done.stderr.strip().splitlines()
        said = next((line for line in lines if "error" in line), lines[0] if lines else "it failed without a word")
    raise CompileError(f"{compiler[0]}: {said[:300]}")


@cache
def integers(values: tuple[int, ...]) -> array[int]:
    """The numbers as kernels take them, int64, made once: a step has the same ones as the step before."""
    return array("q", values)


def require_memory(
    who: str, device: Any, dense: Mapping[str, tuple[Any, Any, int]], **numbers: tuple[Any, tuple[tuple[int, ...], ...]]
) -> None:
    """Refuse tensors whose memory is not what a kernel, which checks nothing, reads and writes through their addresses.

    Args:
        who: the kernel, for the message.
        device: where it runs.
        dense: by name a tensor, its dtype, and the number of its elements. They have to be contiguous and to share no memory.
        numbers: by name an int64 tensor of any strides, and the shapes that it may have.

    Raises:
        ValueError: naming the first that does not fit.
    """
    for name, (x, dtype, size) in dense.items():
        if x.dtype != dtype or x.numel() != size or x.device != device or not x.is_contiguous():
            raise ValueError(
                f"{who}: {name} must be contiguous {dtype} with {size} entries on {device}, got {_told(x)}"
            )
    for name, (x, shapes) in numbers.items():
        if x.element_size() != 8 or x.is_floating_point() or x.device != device or x.shape not in shapes:
            either = " or ".join(map(str, shapes))
            raise ValueError(f"{who}: {name} must be int64 of shape {either} on {device}, got {_told(x)}")
    spans = sorted([(x.data_ptr(), x.data_ptr() + x.nbytes, name) for name, (x, *_) in dense.items()])
    for (_, end, a), (start, _, b) in pairwise(spans):
        if start < end:
            raise ValueError(f"{who}: {a} and {b} share memory; clone one of them")


def _told(x: Any) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)} and strides {x.stride()} on {x.device}"


def _digest(source: str, compiler: Sequence[str], flags: Sequence[Sequence[str]]) -> str:
    """A hash of all that a library depends on: source, compiler (path, size, time of change), and flags.

    A home folder may be shared by machines of several kinds, whose levels have other flags.
    """
    status = os.stat(compiler[0])
    parts = (source, *compiler, str(status.st_size), str(status.st_mtime_ns), platform.machine(), str((_FLAGS, *flags)))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
