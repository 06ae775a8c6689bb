"""Checkpoints that were damaged, cut, or written by somebody else: refused by name, with all tensors as they were."""

import io
import itertools
import os
import pickle
import random
import warnings
import zipfile
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

import bayesopt_chain as bc
from bayesopt_chain.distributed.checkpoint import DIGESTS, _covers_once

TREE = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(7.0), "none": torch.zeros(0, 2)}


@pytest.fixture
def folder(tmp_path):
    bc.distributed.save(tmp_path / "step", TREE)
    return tmp_path / "step"


@pytest.fixture
def foreign(folder):
    """The same without digests, as torch itself writes it."""
    (folder / DIGESTS).unlink()
    return folder


def loaded(folder):
    """What a load leaves in tensors that were 9 before, and its error or warnings."""
    tree = {name: torch.full_like(x, 9.0) for name, x in TREE.items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            bc.distributed.load(folder, tree)
        except (ValueError, FileNotFoundError) as error:
            assert all(bool((x == 9).all()) for x in tree.values()), "a refusal leaves the tensors as they were"
            return None, str(error)
    return tree, " ".join(str(x.message) for x in caught)


def is_right(tree):
    return all(torch.equal(tree[name], x) for name, x in TREE.items())


def flipped(raw, seed):
    where = random.Random(seed)
    changed = bytearray(raw)
    changed[where.randrange(len(raw))] ^= 1 << where.randrange(8)
    return bytes(changed)


def change_table(folder, name, change):
    table = pickle.loads((folder / ".metadata").read_bytes())
    about = table.state_dict_metadata[name]
    about.chunks = change(about.chunks)
    (folder / ".metadata").write_bytes(pickle.dumps(table))


def box(offsets, sizes):
    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))


def test_a_checkpoint_of_ours_is_compared_and_one_of_torchs_own_is_not_and_says_so(folder, tmp_path):
    (folder / "__7_0.distcp").write_bytes(b"left from a save on more ranks that was cut off")
    tree, said = loaded(folder)
    assert is_right(tree) and not said
    dcp.save(dict(TREE), checkpoint_id=tmp_path / "torch", no_dist=True)
    tree, said = loaded(tmp_path / "torch")
    assert is_right(tree) and "has no digests, so that damage is not checked for" in said


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", DIGESTS])
def test_a_flipped_bit_of_any_file_is_refused(file, folder):
    raw = (folder / file).read_bytes()
    for seed in range(12):
        (folder / file).write_bytes(flipped(raw, seed))
        tree, said = loaded(folder)
        assert tree is None and "damaged" in said, seed
    (folder / file).write_bytes(raw[:-1])
    assert "damaged" in loaded(folder)[1]
    (folder / file).write_bytes(b"")
    assert "damaged" in loaded(folder)[1]


@pytest.mark.parametrize(
    "name, change, holds",
    [
        ("w", lambda pieces: [], False),
        ("w", lambda pieces: [box((0, 0), (2, 1)), box((0, 1), (1, 2))], False),
        ("w", lambda pieces: [box((1, 0), (2, 3))], False),
        ("w", lambda pieces: [box((0, 0), (2, 3)), box((0, 1), (2, 1))], False),
        ("w", lambda pieces: [box((0,), (2,))], False),
        ("w", lambda pieces: [box((0, 0), (-2, -3))], False),
        ("b", lambda pieces: [], False),
        ("w", lambda pieces: pieces * 2, True),
    ],
)
def test_pieces_that_do_not_cover_a_tensor_once_are_refused(name, change, holds, foreign):
    change_table(foreign, name, change)
    tree, said = loaded(foreign)
    assert is_right(tree) if holds else tree is None and name in said


def test_covering_once_is_what_counting_every_element_says():
    """For every set of up to four boxes in and across the border of a square of four elements."""
    sides, seen = [(0, 1), (0, 2), (1, 1), (1, 2)], set()  # where one begins, and its length
    for chosen in itertools.chain(*(itertools.combinations(itertools.product(sides, sides), k) for k in range(5))):
        count = torch.zeros(3, 3)
        for (a, height), (b, width) in chosen:
            count[a : a + height, b : b + width] += 1
        want = bool((count[:2, :2] == 1).all()) and count.sum() == 4
        chunks = [box((a, b), (height, width)) for (a, height), (b, width) in chosen]
        assert _covers_once(SimpleNamespace(size=torch.Size((2, 2)), chunks=chunks)) == want, chosen
        seen.add(bool(want))
    assert seen == {True, False}


def as_fifo(file):
    file.unlink()
    os.mkfifo(file)


def as_endless(file):
    file.unlink()
    file.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [as_fifo, as_endless, lambda file: file.unlink()])
@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", DIGESTS])
def test_what_is_no_regular_file_is_refused(file, make, folder):
    make(folder / file)
    tree, said = loaded(folder)
    if file == DIGESTS and not os.path.lexists(folder / file):
        assert is_right(tree)  # a checkpoint without digests
    else:
        assert tree is None and str(folder) in said


@pytest.mark.filterwarnings("ignore:load")
def test_a_piece_that_is_compressed_is_refused(foreign):
    """A zip bomb: a gigabyte of zeros takes a megabyte on the disk."""
    raw = io.BytesIO()
    torch.save(torch.zeros(2, 3), raw)
    packed = io.BytesIO()
    with zipfile.ZipFile(raw) as read, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as write:
        for name in read.namelist():
            write.writestr(name, read.read(name))
    table = pickle.loads((foreign / ".metadata").read_bytes())
    for place in table.storage_data.values():
        place.offset, place.length = 0, len(packed.getvalue())
    (foreign / ".metadata").write_bytes(pickle.dumps(table))
    (foreign / "__0_0.distcp").write_bytes(packed.getvalue())
    tree, said = loaded(foreign)
    assert tree is None and "compressed" in said


@pytest.mark.parametrize(
    "raw",
    [
        b"\x80\x04cpathlib\nPosixPath\n(N}\x8c\x04openNst\x86b.",  # sets an attribute of a class
        b"\x80\x04r\xff\xff\xff\x7f.",  # asks for a memo of two thousand million entries
        b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.",  # for bytes beyond all memory
        b"\x80\x04" + b"(" * 100_000 + b"t" * 100_000 + b".",  # for tuples in tuples
        b"\x80\x04cos\nsystem\n(\x8c\x04truetR.",
        b"",
    ],
)
def test_a_crafted_table_is_refused_in_little_memory(raw, foreign):
    (foreign / ".metadata").write_bytes(raw)
    tree, said = loaded(foreign)
    assert tree is None and "damaged, or was made to do harm" in said


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_a_flipped_bit_without_digests_is_read_as_other_numbers_or_refused(file, foreign):
    """Never an error without a name, and never a tensor of which only a part was read."""
    raw = (foreign / file).read_bytes()
    ends = set()
    for seed in range(25):
        (foreign / file).write_bytes(flipped(raw, seed))
        tree, said = loaded(foreign)
        assert tree is not None or said.startswith("load:"), said
        ends.add(tree is None)
    assert True in ends
