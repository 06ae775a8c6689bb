"""What others wrote: damaged files are named, hostile ones run no code, allocate nothing, and leave the folder alone."""

import json
import multiprocessing
import os
import re
import resource
import zlib
from typing import NamedTuple

import optree
import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.runs.files import BLOCK, File, read_tree, write, write_tree
from tests.runs import children
from tests.runs.toys import TX, sampled, started

TREE = {
    "a": [torch.arange(120).view(40, 3), None, (1, 0.1, float("inf"))],
    7: {"x": torch.ones(()), "b": True, "": "text"},
}
CPU = torch.device("cpu")


def everything(path):
    """All that a run says, as bytes."""
    draws = bc.Draws.open(path)
    draws.verify()
    return [x.numpy().tobytes() for x in (*draws.params.values(), draws.steps, draws.loss)]


def damaged(data, how, at):
    data = bytearray(data)
    at = int(at * (len(data) - 1))
    if how == "flip":
        data[at] ^= 1 << (at % 8)
    elif how == "zero":
        data[at : at + 16] = bytes(len(data[at : at + 16]))
    elif how == "cut":
        del data[at:]
    else:
        data[at:at] = b"\x07"
    return bytes(data)


def every_damage_is_seen(folder, trials, seed=0):
    """Damage one file of a run after another; how often reading it was wrong without a word, and how often an error named
    nothing."""
    sampled(folder / "run")
    want = everything(folder / "run")
    files = sorted(p for p in (folder / "run").iterdir() if p.suffix == ".safetensors")
    g = torch.Generator().manual_seed(seed)
    wrong = unnamed = 0
    for i in range(trials):
        file = files[int(torch.randint(len(files), (), generator=g))]
        before = file.read_bytes()
        file.write_bytes(damaged(before, ("flip", "zero", "cut", "grow")[i % 4], float(torch.rand((), generator=g))))
        for read in (everything, sampled):
            try:
                said = read(folder / "run")
                wrong += read is everything and said != want
                wrong += read is sampled and not torch.equal(said.params["w"], sampled().params["w"])
            except (ValueError, FileNotFoundError) as err:
                unnamed += file.name not in str(err) and folder.name not in str(err)
        for other in (folder / "run").iterdir():  # what a resumed run wrote
            if other not in files and other.name != "lock":
                other.unlink()
        file.write_bytes(before)
    return wrong, unnamed


def every_damage_is_refused(file, read, trials, seed=0):
    """Damage a file anywhere, in four ways: ``read`` raises an error that names it, and takes less than 500 MB."""
    whole, generator = file.read_bytes(), torch.Generator().manual_seed(seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for i in range(trials):
        at = float(torch.rand((), generator=generator))
        file.write_bytes(wrong := damaged(whole, ("flip", "zero", "cut", "grow")[i % 4], at))
        if wrong != whole:
            with pytest.raises(ValueError, match=re.escape(file.name)):
                read()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB


class Pair(NamedTuple):
    left: tuple
    right: torch.Tensor


def tree():
    shared = torch.arange(6.0)
    return {
        "transposed": shared.view(2, 3).t(),
        "one of a column": torch.ones(3, 2)[:1, 1],
        "same storage": shared,
        "pair": Pair((torch.tensor(3), torch.zeros(0)), torch.ones(2, dtype=torch.bfloat16)),
        "flag": torch.tensor(True),
        "number": 3,
        "nothing": None,
        "text": "a",
    }


@pytest.mark.parametrize("trials", [24, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "save, load, saved",
    [
        (bc.save, lambda file: bc.load(file, like=TREE), TREE),
        (bc.save, lambda file: bc.load(file, like=tree()), tree()),
        (write_tree, lambda file: read_tree(file, CPU), TREE),
    ],
    ids=["any keys", "tuples, dtypes and views", "containers"],
)
def test_a_tree_comes_back_as_it_was_and_damaged_ones_are_refused_by_name_in_bounded_memory(
    save, load, saved, trials, tmp_path
):
    """Structure, kinds of containers and numbers are exact."""
    file = tmp_path / "saved"
    save(file, saved)
    assert repr(load(file)) == repr(saved)
    every_damage_is_refused(file, lambda: load(file), trials)


def test_damaged_files_are_named_and_never_believed(tmp_path):
    assert every_damage_is_seen(tmp_path, 24) == (0, 0)


def test_a_damaged_shard_is_left_out_and_the_rest_is_read(tmp_path):
    want = sampled(tmp_path).params["w"]
    file = sorted(tmp_path.glob("draws-*"))[2]
    file.write_bytes(damaged(file.read_bytes(), "flip", 0.999))
    with pytest.raises(ValueError, match=f"{file.name}.*damaged"):
        everything(tmp_path)
    with pytest.warns(UserWarning, match=f"left out: .*{file.name}"):
        draws = bc.Draws.open(tmp_path, damaged="skip")
    assert torch.equal(draws.params["w"], want[[0, 1, 3, 4, 5]]) and draws.steps.tolist() == [1, 2, 4, 5, 6]
    assert not draws.complete and "damaged" in draws.why


def crafted(file, change):
    """Change what a file says, and seal it again, as somebody would who knows the format."""
    raw = file.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8 : 8 + n])
    about = json.loads(entries.pop("__metadata__")["bayesopt_chain"])
    change(entries, about)
    text = json.dumps(about)
    crc = f"{zlib.crc32((json.dumps(entries) + text).encode()):08x}"
    header = json.dumps({"__metadata__": {"bayesopt_chain": text, "crc": crc}, **entries}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + n :])


def says(**more):
    return lambda entries, about: about["metadata"].update(more)


def entry(**more):
    return lambda entries, about: entries["params/w"].update(more)


HEADS = {
    "a step that is true": says(step=True),
    "a negative step": says(step=-1),
    "steps without end": says(step=10**12),
    "no thinning": says(thinning=0),
    "another thinning": says(thinning=2),
    "no identity": says(identity=None),
    "an identity of text": says(identity="x"),
    "a leaf that is not there": says(leaves=["w", "v"]),
    "a leaf of 10,000 levels": says(leaves=["/".join("a" * 10000)]),
    "leaves of numbers": says(leaves=[3]),
    "chains that are not there": says(chains=7),
    "numbers of nothing": says(numbers=[4, 2]),
    "a rank of nothing": says(rank=[1]),
    "keys of text": says(keys=["x"]),
    "cuts of text": says(cuts=["x"]),
    "another run": says(run="x"),
    "no scalars": says(scalars=3),
    "batches of nothing": says(batches={}),
    "a place of text": says(batches={"position": "x", "seen": None, "loader": None, "whole": {"ranks": 1}}),
    "a place among ranks of text": says(batches={"position": 1, "seen": None, "loader": None, "whole": {"ranks": "x"}}),
    "an epoch of text": says(
        batches={"position": 1, "seen": 1, "loader": {"batch_size": 1, "epoch": "x"}, "whole": {"ranks": 1}}
    ),
    "another format": lambda entries, about: about.update(format="bayesopt_chain/2"),
    "metadata of text": lambda entries, about: about.update(metadata="x"),
    "no sums": lambda entries, about: about.pop("sums"),
    "sums of numbers": lambda entries, about: about.update(sums=dict.fromkeys(about["sums"], 3)),
}
DRAWS = {
    "another place": says(since=1),
    "those of another run": says(run="x"),
    "steps backward": says(step=0),
    "more steps than rows": says(step=10),
    "a course to come": says(course=1),
    "not the file before": says(prev="x"),
    "another number of chains": says(chains=5),
    "no steps": lambda entries, about: (entries.pop("_step"), about["sums"].pop("_step")),
    "a huge shape": entry(shape=[10**9, 10**9]),
    "a product beyond 2^63": entry(shape=[2**33, 2**33]),
    "as many axes as a shape has bytes": entry(shape=[1] * 65),
    "a negative length": entry(shape=[-1, -3]),
    "another dtype": entry(dtype="F64"),
    "another kind than that of the first files": entry(dtype="I32"),
    "a dtype that is none": entry(dtype="os.system"),
    "a place outside": entry(data_offsets=[10**9, 10**9 + 12]),
    "two tensors in one place": lambda entries, about: entries["params/w"].update(data_offsets=[8, 20]),
    "an entry of text": lambda entries, about: entries.update({"params/w": "x"}),
}


@pytest.mark.sweep(15)
@pytest.mark.parametrize("name", [*HEADS, *DRAWS])
def test_a_crafted_file_with_right_checksums_ends_in_an_error_that_names_it(name, tmp_path):
    sampled(tmp_path)
    file = tmp_path / ("head.safetensors" if name in HEADS else "draws-0000000000000002.safetensors")
    crafted(file, {**HEADS, **DRAWS}[name])
    for read in (everything, sampled):
        with pytest.raises((ValueError, FileNotFoundError), match=r"head\.safetensors|draws-\d+|" + tmp_path.name):
            read(tmp_path)


def raw(header):
    return len(header).to_bytes(8, "little") + header + b" " * 64


ODD = {
    "a pipe": lambda file: os.mkfifo(file),
    "a device without end": lambda file: file.symlink_to("/dev/zero"),
    "a directory": lambda file: file.mkdir(),
    "a link to itself": lambda file: file.symlink_to(file),
    "nothing": lambda file: file.write_bytes(b""),
    "deep JSON": lambda file: file.write_bytes(raw(b"[" * 10**5)),
    "long JSON": lambda file: file.write_bytes(raw(b"[" + b"1," * (2 << 20) + b"1]")),
    "a header of exabytes": lambda file: file.write_bytes(b"\xff" * 64),
    "a sparse file": lambda file: (file.write_bytes(raw(b"{}")), os.truncate(file, 1 << 40)),
    "no metadata": lambda file: file.write_bytes(raw(b"{}")),
}


def reads_odd_files(folder, connection):
    """Put something odd in the place of each file of a run, and read it, where 500 MB more memory are all there is."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + (500 << 20),) * 2)
    sampled(folder, seconds=1e9)
    head, draws, lock = sorted(folder.iterdir(), key=lambda file: ("head", "draw", "lock").index(file.name[:4]))
    tried = [(file, name, read) for file in (head, draws) for name in ODD for read in (bc.Draws.open, sampled)]
    tried += [(lock, name, sampled) for name in list(ODD)[:4]]
    for file, name, read in tried:
        before = file.read_bytes()
        file.unlink()
        ODD[name](file)
        said = "no error"
        try:
            read(folder)
        except (ValueError, OSError) as err:
            said = f"{type(err).__name__}: {err}"
        if folder.name not in said:
            connection.send((name, file.name, read.__name__, said))
        (file.rmdir if file.is_dir() and not file.is_symlink() else file.unlink)()
        file.write_bytes(before)
    connection.send(None)


@pytest.mark.slow
def test_pipes_devices_and_headers_without_end_are_named_in_bounded_time_and_memory(tmp_path):
    mine, theirs = multiprocessing.Pipe()
    process = children.started(reads_odd_files, tmp_path / "run", theirs)
    children.until_it_ends(process, seconds=30.0)
    assert mine.recv() is None


@pytest.mark.parametrize("path", ["", "~/run"])
def test_a_path_without_a_name_or_of_a_shell_is_refused(path):
    with pytest.raises((TypeError, ValueError), match="path must be the path of a directory"):
        sampled(path)


def test_what_is_not_ours_stays_in_the_folder(tmp_path):
    others = [".notes.tmp", "draws-1.safetensors", "index.json", "draws-000000", ".head.safetensors.tmp"]
    for name in others:
        (tmp_path / name).write_text("mine")
    ours = [".head.safetensors.17.tmp", ".draws-0000000000000003.safetensors.17.tmp"]
    sampled(tmp_path)
    for name in ours:
        (tmp_path / name).write_text("left by a process that was killed")
    sampled(tmp_path, steps=9)
    assert {*others} <= {p.name for p in tmp_path.iterdir()} and not {*ours} & {p.name for p in tmp_path.iterdir()}


def test_any_reader_of_safetensors_opens_the_files(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    want = sampled(tmp_path, seconds=1e9)
    got = safetensors.load_file(tmp_path / "draws-0000000000000000.safetensors")
    assert torch.equal(got["params/w"], want.params["w"]) and got["_step"].tolist() == want.steps.tolist()


def test_what_is_read_lies_as_torch_lays_it_out(tmp_path):
    """Matrix products round by the alignment of what they multiply, and a run that is read is to go on bit for bit."""
    for size in (1, 3, 40, 5000, 70_000):
        write(tmp_path / "x", {"x": torch.arange(2.0 * size).reshape(2, size), "none": torch.ones(0, 2)}, {})
        file = File(tmp_path / "x")
        assert file.read("x").data_ptr() % 64 == 0 and file.read("x", 1).data_ptr() % 64 == 0
        assert torch.equal(file.read("x", 1)[0], torch.arange(2.0 * size)[size:]) and file.read("none").shape == (0, 2)


def test_a_slice_reads_its_blocks_alone_and_those_that_changed_or_changed_places_are_noticed(tmp_path):
    w = torch.randn(64, 3 * BLOCK // 4)  # three blocks a row
    write(tmp_path / "x", {"w": w}, {})
    file = File(tmp_path / "x")
    before = children.read_so_far()
    assert torch.equal(file.read("w", 10, 12), w[10:12])
    assert children.read_so_far() - before <= 8 * BLOCK
    data = (tmp_path / "x").read_bytes()
    swapped = data[: -2 * BLOCK] + data[-BLOCK:] + data[-2 * BLOCK : -BLOCK]
    for changed in (data[:-1] + bytes([data[-1] ^ 1]), swapped):
        (tmp_path / "x").write_bytes(changed)
        assert torch.equal(file.read("w", 0, 63), w[:63])
        with pytest.raises(ValueError, match=r"w in .* does not match its checksum"):
            file.read("w", 63, 64)


def test_a_file_of_another_kind_or_a_crafted_tree_is_no_tree(tmp_path):
    with pytest.raises(TypeError, match="Path cannot be saved"):
        write_tree(tmp_path / "x", {"a": tmp_path})
    for metadata in ({}, {"tree": {"tensor": "1"}}, {"tree": {"set": []}}, {"tree": {}}, {"tree": {"dict": [1]}}):
        write(tmp_path / "x", {"0": torch.ones(2)}, metadata)
        with pytest.raises(ValueError, match="another function"):
            read_tree(tmp_path / "x", CPU)


# Files of trees: what is saved comes back, and what is foreign or damaged is refused by name


def test_a_sampler_resumes_bit_for_bit_in_the_file_and_another_chain_is_refused(tmp_path):
    step, *begun, _ = started()
    params, state, _ = step(*begun, None)
    bc.save(tmp_path / "run", (params, state), tx=TX)
    loaded = bc.load(tmp_path / "run", like=({"w": torch.zeros(3)}, TX.init(params)), tx=TX)
    here, there = step(params, state, None)[:2], step(*loaded, None)[:2]
    assert optree.tree_structure(here) == optree.tree_structure(there)
    assert all(map(torch.equal, optree.tree_leaves(here), optree.tree_leaves(there)))
    with pytest.raises(ValueError, match="another chain"):
        bc.load(tmp_path / "run", like=(params, state), tx=bc.sghmc(0.2, temperature=0.05))


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda t: t | {"flag": torch.tensor(1.0)}, "flag is torch.bool .*expected torch.float32"),
        (lambda t: t | {"transposed": torch.zeros(2, 2)}, r"transposed is torch.float32 \(3, 2\), expected .*\(2, 2\)"),
        (lambda t: t | {"new": torch.ones(1)}, "new is missing"),
        (
            lambda t: t | {"pair": Pair((torch.tensor(3), torch.ones(1)), t["pair"].right)},
            "pair/left/1 is torch.float32",
        ),
        (lambda t: {k: v for k, v in t.items() if k != "number"}, "number is not expected"),
    ],
)
def test_a_tree_of_another_kind_is_refused_by_leaf(tmp_path, change, says):
    bc.save(tmp_path / "tree", tree())
    with pytest.raises(ValueError, match=says):
        bc.load(tmp_path / "tree", like=change(tree()))


def test_a_file_of_another_library_is_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.ones(1)}, tmp_path / "x")
    with pytest.raises(ValueError, match="not written by bayesopt_chain"):
        bc.load(tmp_path / "x", like={"x": torch.ones(1)})
    with pytest.raises(FileNotFoundError, match="no file"):
        bc.load(tmp_path / "none", like=())


UNWRITABLE = {  # what makes a tree, and what is said
    "an object": (lambda: {"a": [torch.ones(1), object()]}, "leaf a/1 is object"),
    "two of one name": (lambda: {"a": [torch.ones(1)] * 2, "a/1": torch.ones(1)}, "two leaves are named a/1"),
    "a name of the format": (lambda: {"__metadata__": torch.ones(1)}, "named __metadata__"),
    "sparse": (lambda: {"b": torch.ones(2).to_sparse()}, "save: leaf b.*cannot be written; make it dense"),
    "meta": (lambda: {"b": torch.ones(2, device="meta")}, "save: leaf b.*cannot be written; make it dense"),
    "nested": (
        lambda: {"b": torch.nested.nested_tensor([torch.ones(1)])},
        "save: leaf b.*cannot be written; make it dense",
    ),
}


@pytest.mark.parametrize("case", UNWRITABLE)
def test_what_cannot_be_saved_is_named(case, tmp_path):
    make, says = UNWRITABLE[case]
    with pytest.raises((TypeError, ValueError), match=says):
        bc.save(tmp_path / "x", make())
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "tree"
    bc.save(file, tree())
    before = file.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device; what stood there is untouched"):
        bc.save(file, {"x": torch.ones(1)})
    assert file.read_bytes() == before and [f.name for f in tmp_path.iterdir()] == ["tree"]
