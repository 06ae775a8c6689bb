"""Kernels that come with a wheel: every level gives the bits of the one that is compiled here, and the best one is loaded."""

import shutil
from pathlib import Path

import optree
import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.engine import engine, sweep_cpu
from bayesopt_chain.random import compiled, philox_cpu

CAPABILITY = torch.backends.cpu.get_cpu_capability().lower()
ABLE = [*compiled.LEVELS][: [*compiled.LEVELS].index(CAPABILITY) + 1] if CAPABILITY in compiled.LEVELS else ["default"]
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Copies of the sources with the libraries of all levels that this processor has beside them."""
    folder = tmp_path_factory.mktemp("wheel")
    for source in (philox_cpu._SOURCE, sweep_cpu._SOURCE):
        copy = folder / source.name
        copy.write_text(compiled.text_of(source))
        for level in ABLE:
            compiled.prebuild(copy, level, compiled.library_of(copy, level))
    return folder


def kernels(module, kernel: str, source: Path, monkeypatch):
    """The kernel of a module as it is where the library lies at this place."""
    monkeypatch.setattr(module, "_SOURCE", source)
    return getattr(module, kernel).__wrapped__()


def only(wheel: Path, folder: Path, source: Path, level: str) -> Path:
    """A source with the library of one level and no other beside it."""
    copy = folder / source.name
    copy.write_text(compiled.text_of(source))
    shutil.copy(compiled.library_of(wheel / source.name, level), folder)
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("level", ABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normals_of_every_level_have_the_bits_of_the_compiled_kernel(wheel, level, dtype, tmp_path, monkeypatch):
    here = kernels(philox_cpu, "normals_kernel", philox_cpu._SOURCE, monkeypatch)
    monkeypatch.setenv("CXX", "no-such-compiler")
    there = kernels(philox_cpu, "normals_kernel", only(wheel, tmp_path, philox_cpu._SOURCE, level), monkeypatch)
    runs = (0, 3, 17), (1000, 257, 4099), (5, 6, 2**20)
    made = [torch.empty(2, sum(runs[1]), dtype=dtype) for _ in "ab"]
    for out, fill in zip(made, (here, there)):
        fill(out, torch.tensor([7, -9]), torch.tensor([3, 2**40]), *runs)
    assert torch.equal(*made)


@pytest.mark.slow
@pytest.mark.parametrize("level", ABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sweeps_of_every_level_have_the_bits_of_the_compiled_kernel(
    wheel, level, dtype, momentum, tmp_path, monkeypatch
):
    here = kernels(sweep_cpu, "sweep_kernel", sweep_cpu._SOURCE, monkeypatch)
    philox_cpu.normals_kernel()  # links draw by it at a level without fused products, which the engine leaves to them
    monkeypatch.setenv("CXX", "no-such-compiler")
    there = kernels(sweep_cpu, "sweep_kernel", only(wheel, tmp_path, sweep_cpu._SOURCE, level), monkeypatch)
    tx, params = bc.sgd(0.1, momentum, weight_decay=0.1, temperature=0.3), [torch.randn(1031, dtype=dtype)]
    start, made = tx.init(params), []
    for kernel in (here, there):
        monkeypatch.setattr(engine, "sweep_kernel", lambda kernel=kernel: kernel)
        after, state, _ = bc.make_step(lambda p, batch: p[0].square().sum(), tx)(params, start, None)
        made += [after[0], *optree.tree_leaves(state)]
    assert all(map(torch.equal, made[: len(made) // 2], made[len(made) // 2 :]))
    assert not torch.equal(made[0], params[0])


def test_the_best_level_of_the_processor_is_loaded_and_a_broken_library_is_passed_over(tmp_path, monkeypatch):
    source = tmp_path / "test.cpp"
    source.write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    libraries = [compiled.library_of(source, level) for level in compiled.LEVELS]
    for library in libraries:
        library.write_text("no library")
    able = libraries[: len(ABLE)]
    assert [compiled.library_of(source, level) for level in compiled.levels()] == able[::-1]
    assert compiled.load(source).answer() == 42  # compiled, since none of them can be loaded
    able[0].unlink()
    compiled.build('extern "C" int answer() { return 13; }', compiled.find_compiler(), able[0])
    assert compiled.load(source).answer() == 13


def test_a_checkout_has_no_prebuilt_kernel():
    """A library beside a source that somebody edits would go on giving the old draws."""
    assert not [*Path(compiled.__file__).parents[1].rglob("*.so")]
