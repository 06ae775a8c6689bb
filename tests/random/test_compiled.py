"""Compiled kernels: nobody else's code is loaded, any path will do, and what fails says so."""

import multiprocessing
import os
import platform
import re
import shutil
import stat
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest

from bayesopt_chain.random import compiled, philox_cpu
from tests.runs import children

SOURCE = 'extern "C" int answer() { return 42; }'
FOREIGN = 'extern "C" int answer() { return 13; }'


def compiler_found() -> bool:
    try:
        return bool(compiled.find_compiler())
    except compiled.CompileError:
        return False


pytestmark = [
    pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have no owners here"),
    pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler"),
]


@pytest.fixture
def private(tmp_path_factory):
    """A folder that passes the checks, wherever pytest keeps its own."""
    folder = tmp_path_factory.mktemp("home")
    folder.chmod(0o700)
    return folder


@pytest.fixture
def source(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("source") / "test.cpp"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def cache(private, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(private))
    return private / "bayesopt_chain"


def the_library(cache: Path) -> Path:
    (library,) = cache.glob("*.so")
    return library


def _load(source: Path, folder: str, pipe) -> None:
    os.environ["XDG_CACHE_HOME"] = folder
    pipe.send(compiled.load(source).answer())


@pytest.mark.slow
def test_processes_that_start_together_load_whole_libraries(cache, private, source):
    pipes = [multiprocessing.Pipe() for _ in range(3)]
    started = [children.started(_load, source, str(private), theirs) for _, theirs in pipes]
    for child in started:
        children.until_it_ends(child)
    assert [ours.recv() for ours, _ in pipes if ours.poll()] == [42] * 3
    assert [path.name for path in cache.iterdir()] == [the_library(cache).name]


DAMAGES = {
    "cut short": lambda raw: raw[:5000],
    "empty": lambda raw: b"",
    "one bit": lambda raw: raw[: len(raw) // 2] + bytes([raw[len(raw) // 2] ^ 1]) + raw[len(raw) // 2 + 1 :],
    "another library": lambda raw: None,
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_library_is_built_again(cache, source, how):
    """Loaded as it is, a library that was cut short kills the process."""
    compiled.load(source)
    library = the_library(cache)
    damaged = DAMAGES[how](library.read_bytes())
    library.unlink()  # this process has mapped the old file, and keeps it
    if damaged is None:
        compiled.build(FOREIGN, compiled.find_compiler(), library)
    else:
        library.write_bytes(damaged)
        library.chmod(0o700)
    before = library.stat().st_ino
    assert compiled.load(source).answer() == 42
    kept = the_library(cache)
    assert kept.stat().st_ino != before and kept.stem.endswith(compiled._content(kept))


@pytest.mark.parametrize("plant", [Path.mkdir, lambda path: path.symlink_to("nowhere")])
def test_what_is_no_file_is_passed_over(cache, source, plant):
    compiled.load(source)
    library = the_library(cache)
    plant(library.with_stem(library.stem[:-1]))
    library.unlink()
    assert compiled.load(source).answer() == 42


@pytest.mark.parametrize("how", ["open to others", "another owner", "a link", "an open folder above"])
def test_a_folder_that_others_can_change_is_not_used(cache, private, how, monkeypatch):
    if how == "open to others":
        cache.mkdir(mode=0o755)
    elif how == "another owner":
        cache.mkdir(mode=0o700)
        real = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: real + 1)
    elif how == "a link":
        (private / "elsewhere").mkdir(mode=0o755)
        cache.symlink_to(private / "elsewhere")
    else:
        private.chmod(0o777)
    with pytest.raises(PermissionError, match=str(private)):
        compiled.cache_folder()


def test_without_a_cache_it_compiles_into_a_private_folder_and_says_so(cache, source, tmp_path, monkeypatch):
    cache.mkdir(mode=0o755)
    monkeypatch.setattr(compiled.tempfile, "tempdir", str(tmp_path))
    at_exit = []
    monkeypatch.setattr(compiled.atexit, "register", lambda f, *a, **k: at_exit.append(lambda: f(*a, **k)))
    compiled.temporary_folder.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"not a folder of this user's alone; remove it.*in every process anew"):
            assert compiled.load(source).answer() == 42
    finally:
        compiled.temporary_folder.cache_clear()
    (folder,) = tmp_path.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and not list(cache.iterdir())
    at_exit.pop()()
    assert not list(tmp_path.iterdir())


def test_the_folder_is_this_users_alone_and_it_is_compiled_once(cache, source, monkeypatch):
    before = os.umask(0)
    try:
        compiled.load(source)
    finally:
        os.umask(before)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert [path.name for path in cache.iterdir()] == [the_library(cache).name]
    monkeypatch.setattr(compiled, "build", lambda *args: pytest.fail("compiled again"))
    assert compiled.load(source).answer() == 42


@pytest.mark.parametrize("name", ["with spaces", "a;touch oops", "$(touch oops)", "quo'te\"s", "-dash"])
def test_any_path_will_do(private, source, name, monkeypatch):
    (private / name).mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(private / name))
    monkeypatch.chdir(private)
    assert compiled.load(source).answer() == 42
    assert sorted(path.name for path in private.iterdir()) == [name]


@pytest.mark.parametrize(
    "compiler, words",
    [("no-such-compiler", "no C\\+\\+ compiler found \\(no-such-compiler\\)"), (None, "error: it is Sunday")],
)
def test_a_compile_that_fails_warns_once_with_the_reason(cache, private, monkeypatch, compiler, words):
    if compiler is None:
        compiler = str(private / "broken")
        Path(compiler).write_text("#!/bin/sh\necho 'x.cpp:1:1: error: it is Sunday' >&2\nexit 1\n")
        Path(compiler).chmod(0o700)
    monkeypatch.setenv("CXX", compiler)
    philox_cpu.normals_kernel.cache_clear()
    try:
        with pytest.warns(UserWarning, match=f"14 times slower.*{words}") as said:
            assert philox_cpu.normals_kernel() is None and philox_cpu.normals_kernel() is None
        assert len(said) == 1
    finally:
        monkeypatch.undo()
        philox_cpu.normals_kernel.cache_clear()


@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which("g++") or platform.machine() != "x86_64", reason="asks GCC, for processors of one kind"
)
@pytest.mark.parametrize("name", ["engine/sweep_cpu.cpp", "engine/optimizer_cpu.cpp"])
def test_every_loop_of_a_step_becomes_vectors(name, tmp_path):
    """GCC names the loops that it left scalar by their first line; of those meant for vectors these are draws in float64."""
    code = tmp_path / "code.cpp"
    code.write_text(compiled.text_of(Path(compiled.__file__).parents[1] / name))
    said = subprocess.check_output(
        [
            "g++",
            *compiled._FLAGS,
            *compiled.LEVELS["avx2"],
            "-fopenmp",
            "-fopt-info-vec-missed",
            "-o",
            tmp_path / "a.so",
            code,
        ],
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = code.read_text().splitlines()
    loops = {str(n): lines[n - 1].strip() for n, line in enumerate(lines, 3) if "pragma omp simd" in line}
    scalar = {loops.get(n, "") for n in re.findall(r"code.cpp:(\d+):\d+: missed: couldn.t vectorize loop", said)}
    assert len(loops) > 2 and all(line.startswith("const Real u = ") for line in scalar if line), scalar


def test_the_compiler_may_bring_arguments(cache, source, monkeypatch):
    monkeypatch.setenv("CXX", f"{shutil.which('g++') or compiled.find_compiler()[0]} -DANSWER=7")
    source.write_text('extern "C" int answer() { return ANSWER; }')
    assert compiled.load(source).answer() == 7


@pytest.mark.slow
@pytest.mark.parametrize("named", ["nothing", "by torch", "by the user", "with a space", "o'clock"])
def test_captured_programs_are_kept_where_nobody_else_can_put_one(cache, private, tmp_path, named, monkeypatch):
    """torch's own folder is known to everybody, in a folder where everybody can make it first."""
    from torch._inductor import codecache

    from bayesopt_chain.loop.capture import replays

    names = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
    shared = tmp_path / "torchinductor_someone"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("LOGNAME", "someone")
    monkeypatch.setattr(compiled.tempfile, "tempdir", str(tmp_path))
    for name, inside in zip(names, ("", "/triton/0")):
        monkeypatch.setenv(name, str(shared if named == "by torch" else private / "mine") + inside)
        if named in ("nothing", "with a space", "o'clock"):
            monkeypatch.delenv(name)
    is_split = named in ("with a space", "o'clock")  # torch's compiler splits its command as a shell does
    if is_split:
        monkeypatch.setenv("XDG_CACHE_HOME", str(private / named))
        monkeypatch.setattr(replays, "temporary_folder", lambda: cache)
        cache.mkdir()
    monkeypatch.setattr(codecache, "_HEADER_LOCK_DIR", None)
    monkeypatch.setattr(codecache, "_HEADER_DIR", None)  # fixed when torch's file is imported
    path = codecache.CacheBase.get_local_cache_path
    path.cache_clear()
    remembered = path() if named == "by torch" else shared
    said = pytest.warns(UserWarning, match="cannot take the path") if is_split else nullcontext()
    with said, replays.keyed_cache(on_cpu=False):
        used = [*(os.environ.get(name, "") for name in names), codecache._HEADER_DIR]
        assert path() != remembered
    path.cache_clear()
    mine = [cache / "inductor" / name for name in ("", "triton", "precompiled_headers")]
    assert used == (
        [*map(str, mine)] if named != "by the user" else [f"{private}/mine", f"{private}/mine/triton/0", None]
    )
    assert not list(shared.rglob("*.*"))
