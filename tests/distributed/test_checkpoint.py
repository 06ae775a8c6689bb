"""Checkpoints by ``torch.distributed.checkpoint``: any number of ranks, any layout, and none of its silent losses.

Those that were damaged, cut, or written by somebody else are refused by name, with all tensors as they were. ``bc.save`` and
``bc.load`` write a file for each rank, which as many read.
"""

import io
import itertools
import os
import pickle
import random
import re
import warnings
import zipfile
from types import SimpleNamespace

import optree
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import bayesopt_chain as bc
from bayesopt_chain.distributed.checkpoint import DIGESTS, _covers_once
from tests.distributed.ranks import everywhere, mesh_of, message_of, on, run, world
from tests.distributed.toys import KINDS, LAYOUTS, TX, matrices


def gone_on(folder, before, after, steps, kind="shards", **options):
    """A launch: from a checkpoint or the start, some steps, the next checkpoint; the parameters, where they are no DTensors."""
    step, params, state, batch, numbers = KINDS[kind](**options)
    chains = {"chains": range(numbers[0], numbers[-1] + 1)} if numbers else {}
    if before:
        params = {name: torch.zeros_like(x) for name, x in params.items()}
        bc.distributed.load(folder / before, {"params": params, "state": bc.state_dict(state)}, **chains)
    for _ in range(steps):
        params, state, _ = step(params, state, batch[0] if kind == "shards" else batch)
    if after:
        bc.distributed.save(folder / after, {"params": params, "state": bc.state_dict(state)}, **chains)
    return {name: x for name, x in params.items() if not isinstance(x, DTensor)}


FSDP, COLUMNS, HSDP, BOTH = ({"layout": layout} for layout in LAYOUTS)
ADAM = {"tx": bc.adam(0.01, temperature=0.05)}
ROUTES = {  # the kind of a run, how far it may be off one process, and launches: ranks, steps, and what else is given
    "any layout to any other": ("shards", 1e-12, (2, 3, FSDP), (4, 2, COLUMNS), (4, 2, HSDP), (4, 2, BOTH), (None, 3)),
    "two moments": ("shards", 1e-12, (2, 3, FSDP | ADAM), (4, 2, COLUMNS | ADAM), (4, 2, BOTH | ADAM), (None, 3, ADAM)),
    "chains by shards": ("chains_of_shards", 1e-12, (4, 3, {"shape": (2, 2)}), (3, 3, {"shape": (1, 3)}), (None, 3)),
    "chains on three ranks": ("chains", 0.0, (2, 1), (3, 1)),
    "chains in one process": ("chains", 0.0, (2, 1), (None, 1)),
    "replicas on three ranks": ("one", 1e-12, (2, 4), (3, 1)),
    "replicas in one process": ("one", 1e-12, (2, 4), (None, 1)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
def test_a_chain_goes_on_in_any_layout_on_any_number_of_ranks(route, tmp_path):
    kind, rounding, *launches = ROUTES[route]
    for i, (size, steps, *options) in enumerate(launches):
        ranks = run(gone_on, size, tmp_path, str(i) if i else None, str(i + 1), steps, kind, **dict(*options))
    want = gone_on(
        tmp_path, None, None, sum(steps for _, steps, *_ in launches), kind, **(ADAM if "two" in route else {})
    )
    for found in [{k: torch.cat([part[k] for part in ranks]) for k in want}] if kind == "chains" else ranks:
        torch.testing.assert_close(found, want, rtol=0, atol=rounding)


def test_other_numbers_of_chains_are_refused(tmp_path):
    gone_on(tmp_path, None, "a", 1, "chains", n=6)
    for n, words in (
        (4, r"no rank loads \[4, 5\]: run as many chains as were saved"),
        (7, "chain 6/params/w is missing"),
    ):
        with pytest.raises(ValueError, match=words):
            gone_on(tmp_path, "a", None, 1, "chains", n=n)


@on(2)
def test_replicas_are_written_once_and_the_row_of_a_chain_alone(tmp_path):
    w, rank = torch.zeros(8, 10_000), world()[0]
    bc.distributed.save(tmp_path / "replicas", {"w": w})
    bc.distributed.save(tmp_path / "chains", {"w": w}, chains=range(8 * rank, 8 * rank + 8))
    for folder, times in (("replicas", 1), ("chains", 2)):
        written = sum(p.stat().st_size for p in (tmp_path / folder).glob("*.distcp"))
        assert times * w.nbytes <= written <= 1.2 * times * w.nbytes


@on(2)
def test_what_torch_keeps_of_one_rank_alone_and_files_of_one_rank_are_refused(tmp_path):
    rank = world()[0]
    params = {"w": torch.full((2,), float(rank)), "b": torch.zeros(1)}
    optimizer = bc.optim.SGD([nn.Parameter(params["w"])], 0.1)
    dcp.save({"w": params["w"]}, checkpoint_id=str(tmp_path / "torch"))
    dcp.load(there := {"w": torch.ones(2)}, checkpoint_id=str(tmp_path / "torch"))
    assert there["w"].tolist() == [0.0, 0.0], "of two ranks' tensors of one name torch keeps the first, for both"
    shards = {"w": distribute_tensor(torch.ones(4, 3), mesh_of(2), [Shard(0)])}
    for words, tree, options in (
        (("params/w differ from rank to rank", "chains=chains.numbers"), {"params": params}, {}),
        (("opt/param_groups/0/", " is int; only tensors", "bc.state_dict(state)"), {"opt": optimizer.state_dict()}, {}),
        (("tensor is SGD",), optimizer, {}),
        (("spread as (Shard(dim=0),)",), shards, {"chains": range(4)}),
    ):
        said = message_of(lambda tree=tree, options=options: bc.distributed.save(tmp_path / "ours", tree, **options))
        assert all(word in said for word in words), said
    said = message_of(lambda: bc.save(tmp_path / "w.safetensors", shards))
    assert "leaf w is a DTensor" in said and "bc.distributed.save(folder, tree)" in said
    dist.barrier()
    assert os.listdir(tmp_path) == ["torch"]


@on(4)
def test_replicas_that_differ_on_some_ranks_are_refused_on_all_of_them(tmp_path):
    part = torch.ones(2, 3) + (world()[0] == 2)  # ranks 0 and 2 hold the same half
    w = DTensor.from_local(part, mesh_of(2, 2), [Replicate(), Shard(0)], run_check=False)
    assert "w (elements ((0, " in message_of(lambda: bc.distributed.save(tmp_path / "step", {"w": w}))
    assert not (tmp_path / "step").exists()


def test_a_state_is_a_tree_of_tensors(tmp_path):
    with pytest.raises(TypeError, match="tree is NoneType; only tensors"):
        bc.distributed.save(tmp_path / "step", None)
    states = [TX.init(matrices()), TX.init(matrices())]
    states[0][0].trace[0].fill_(3.0)
    bc.distributed.save(tmp_path / "step", {"state": states[0]})
    bc.distributed.load(tmp_path / "step", {"state": states[1]})
    assert all(map(torch.equal, optree.tree_leaves(states[1]), optree.tree_leaves(states[0])))


@pytest.mark.parametrize(
    "other, says",
    [
        (bc.sgld(0.1, temperature=0.05), r"state/0.Momentum.trace\['b'\] is not expected"),
        (bc.adam(0.1, temperature=0.05), "is missing"),
    ],
)
def test_the_state_of_another_chain_is_refused_and_nothing_is_written(other, says, tmp_path):
    gone_on(tmp_path, None, "a", 2)
    params = {name: torch.zeros_like(x) for name, x in matrices().items()}
    with pytest.raises(ValueError, match=says):
        bc.distributed.load(tmp_path / "a", {"params": params, "state": bc.state_dict(other.init(params))})
    assert not params["w"].any()


def test_other_shapes_and_dtypes_are_refused(tmp_path):
    bc.distributed.save(tmp_path / "step", {"w": torch.ones(3), "v": torch.ones(2, dtype=torch.float64)})
    says = r"v is torch.float64 .*; w is torch.float32 \(3,\), expected torch.float32 \(4,\)"
    with pytest.raises(ValueError, match=says):
        bc.distributed.load(tmp_path / "step", {"w": torch.zeros(4), "v": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"w is of shape \(3,\); with chains= axis 0 .* counts the 2 chains"):
        bc.distributed.save(tmp_path / "cut", {"w": torch.ones(3)}, chains=range(2))


def test_a_checkpoint_is_whole_or_none_and_is_not_written_over(tmp_path):
    gone_on(tmp_path, None, "a", 2)
    with pytest.raises(FileExistsError, match="holds a checkpoint already"):
        gone_on(tmp_path, None, "a", 3)
    (tmp_path / "a" / ".metadata").unlink()
    with pytest.raises(FileNotFoundError, match="not written to its end"):
        gone_on(tmp_path, "a", None, 1)


# what was damaged, cut, or written by somebody else

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


# files of ranks


def reading(path):
    tree = bc.load(path, like={"w": torch.zeros(3), "n": 0})
    return tree["w"].tolist(), tree["n"]


@on(2)
def test_each_rank_reads_what_it_saved_and_as_many_ranks_read(tmp_path):
    path, rank = tmp_path / "run.safetensors", world()[0]
    names = [f"run.rank-0000{r}-of-00002.safetensors" for r in range(2)]
    bc.save(path, {"w": torch.full((3,), 5.0) + rank, "n": rank})
    dist.barrier()
    assert reading(path) == ([5.0 + rank] * 3, rank) and sorted(os.listdir(tmp_path)) == names
    everywhere(0)
    if rank == 1:
        (tmp_path / names[1]).rename(tmp_path / "one.safetensors")
        assert f"{names[1]} is missing: save on every rank" in message_of(reading, path)
    dist.barrier()
    assert reading(tmp_path / "one.safetensors") == ([6.0] * 3, 1), "any rank reads a whole file"


def test_as_many_ranks_read_as_have_saved_and_a_file_of_one_rank_by_its_name(tmp_path):
    path, parts = tmp_path / "run.safetensors", [tmp_path / f"run.rank-0000{r}-of-00002.safetensors" for r in range(2)]
    for n, part in enumerate(parts):
        bc.save(part, {"w": torch.ones(3), "n": n})
    assert re.search(
        r"2 ranks saved .* and 1 load it: .*run.rank-0000\d-of-00002.safetensors", message_of(reading, path)
    )
    assert reading(parts[1]) == ([1.0] * 3, 1)
    bc.save(path, {"w": torch.zeros(3), "n": 0})
    assert "by 1 and by 2 ranks, and which is newer no file says: remove" in message_of(reading, path)
