"""C++ kernels: compiled once by the machine's own compiler, kept in a folder that nobody else can write to, and loaded.

A loaded library runs with the user's rights, so that whoever can put a file where one is looked for runs code as this
user. Hence the folder is ``$XDG_CACHE_HOME/bayesopt_chain`` or ``~/.cache/bayesopt_chain``, of mode 0700, used only if

* it is a folder of this user's that nobody else can read or write, and no folder above it can be changed by another user
  than root (a folder in which everybody may only touch files of their own, like ``/tmp``, passes);
* the library in it is a regular file of this user's that nobody else can write to.

A library that fails the second check is compiled again and replaced. Where the folder fails the first, a fresh private one is
made, used once and removed, with a warning. Files are written under another name and renamed, so that a reader sees a whole
library or none. Paths are arguments of the compiler, never words of a shell.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
_OPTIONAL = (("-march=native", "-fopenmp"), ("-fopenmp",), ())  # the first that the compiler takes


class CompileError(RuntimeError):
    """There is no compiler, or it refused; the message says which and why."""


def load(source: str, name: str) -> ctypes.CDLL:
    """The shared library of a C++ source.

    Args:
        source: one C++ file with ``extern "C"`` functions.
        name: what its file is called, without the digest of source, compiler and processor that is added to it.

    Raises:
        CompileError: no compiler (``$CXX``, ``g++``, ``clang++`` or ``c++``), or one that fails.
        OSError: the library cannot be written or loaded.
    """
    compiler = find_compiler()
    try:
        folder, kept = cache_folder(), True
    except OSError as err:
        warnings.warn(f"{err}; compiling into a private temporary folder, in every process anew", stacklevel=4)
        folder, kept = Path(tempfile.mkdtemp(prefix="bayesopt_chain-")), False
    try:
        library = folder / f"{name}-{_digest(source, compiler)}.so"
        if not is_own_file(library):
            build(source, compiler, library)
        return ctypes.CDLL(str(library))
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)


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
    """
    if not hasattr(os, "getuid"):
        raise PermissionError("this system has no owners of files that could be checked")
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not root.is_absolute():  # unset, or not to be used, says the specification of base directories
        try:
            root = Path.home() / ".cache"
        except RuntimeError:  # no HOME, and no entry in the table of users
            raise PermissionError("this user has no home directory; set XDG_CACHE_HOME") from None
    folder = root.resolve() / "bayesopt_chain"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    mine = folder.lstat()
    if not stat.S_ISDIR(mine.st_mode) or mine.st_uid != os.getuid() or mine.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder of this user's alone (chmod 700, or remove it)")
    for above in folder.parents:
        status = above.stat()
        everybodys = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
        if status.st_uid not in (os.getuid(), 0) or everybodys:
            raise PermissionError(f"{above}, above {folder}, can be changed by other users (or set XDG_CACHE_HOME)")
    return folder


def is_own_file(path: Path) -> bool:
    """Whether a path is a regular file of this user's that nobody else can write to."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def build(source: str, compiler: Sequence[str], library: Path) -> None:
    """Compile ``source`` into ``library``, which is there whole or not at all.

    Raises:
        CompileError: with the first line of what the compiler says.
    """
    with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent) as scratch:
        code, made = Path(scratch) / "source.cpp", Path(scratch) / "library.so"
        code.write_text(source)
        said = ""
        for optional in _OPTIONAL:
            command = [*compiler, *_FLAGS, *optional, "-o", str(made), str(code)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=300)
            except (OSError, subprocess.TimeoutExpired) as err:
                raise CompileError(f"{compiler[0]}: {err}") from err
            if done.returncode == 0:
                made.chmod(0o700)
                os.replace(made, library)
                return
            lines = done.stderr.strip().splitlines()
            said = next((line for line in lines if "error" in line), lines[0] if lines else "it failed without a word")
        raise CompileError(f"{compiler[0]}: {said[:300]}")


def _digest(source: str, compiler: Sequence[str]) -> str:
    """What a library depends on: source, flags, the compiler (path, size, time of change) and the processor it is made for."""
    status = os.stat(compiler[0])
    parts = (source, *_FLAGS, *compiler, str(status.st_size), str(status.st_mtime_ns), *_processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _processor() -> list[str]:
    """The processor's name and what it can do, since a home folder may be shared by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return [platform.machine(), platform.processor()]
    first = {line.split(":")[0].strip(): line for line in reversed(lines) if line}
    return [platform.machine(), *(first[key] for key in ("model name", "flags", "Features") if key in first)]
