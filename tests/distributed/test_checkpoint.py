"""Checkpoints by ``torch.distributed.checkpoint``: any number of ranks, any layout, and none of its silent losses.

Those that were damaged, cut, or written by somebody else are refused by name, with all tensors as they were. ``bc.save`` and
``bc.load`` write a file for each rank, which as many read.
"""

import io
import itertools
import os
import pickle
import random
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import bayesopt_chain as bc
from bayesopt_chain.distributed.checkpoint import DIGESTS, _covers_once
from tests.distributed.ranks import mesh_of, message_of, on, refuses, run, world
from tests.distributed.toys import KINDS, LAYOUTS, TX, matrices


def gone_on(folder, before, after, steps, kind="shards", **options):
    """A launch: from a checkpoint or the start, some steps, the next checkpoint; the parameters, where they are no DTensors."""
    step, params, state, batch, numbers = KINDS[kind](**options)
    chains = {"chains": range(numbers[0], numbers[-1] + 1)} if numbers else {}
    told = bc.state_dict if kind == "shards" else tuple  # a state is a tree of tensors
    if before:
        params = {name: torch.zeros_like(x) for name, x in params.items()}
        bc.distributed.load(folder / before, {"params": params, "state": told(state)}, **chains)
    for _ in range(steps):
        params, state, _ = step(params, state, batch[0] if kind == "shards" else batch)
    if after:
        bc.distributed.save(folder / after, {"params": params, "state": told(state)}, **chains)
    return {name: x for name, x in params.items() if not isinstance(x, DTensor)}


FSDP, COLUMNS, HSDP, BOTH, TWICE = ({"layout": layout} for layout in LAYOUTS)
ADAM = {"tx": bc.adam(0.01, temperature=0.05)}
ROUTES = {  # the kind of a run, how far it may be off one process, and launches: ranks, steps, and what else is given
    "any layout to any other": (
        "shards", 1e-12, (2, 3, FSDP), (4, 2, COLUMNS), (4, 2, HSDP), (4, 2, BOTH), (4, 2, TWICE), (None, 3)
    ),
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


@on(2)
def test_replicas_are_written_once_and_the_row_of_a_chain_alone(tmp_path):
    w, rank = torch.zeros(8, 10_000), world()[0]
    bc.distributed.save(tmp_path / "replicas", {"w": w})
    bc.distributed.save(tmp_path / "chains", {"w": w}, chains=range(8 * rank, 8 * rank + 8))
    for folder, times in (("replicas", 1), ("chains", 2)):
        written = sum(p.stat().st_size for p in (tmp_path / folder).glob("*.distcp"))
        assert times * w.nbytes <= written <= 1.2 * times * w.nbytes


@on(4)
def test_what_torch_keeps_of_one_rank_alone_and_files_of_one_rank_are_refused_on_all_of_them(tmp_path):
    """Of ranks' tensors of one name torch keeps the first, for all of them."""
    rank = world()[0]
    params = {"w": torch.full((2,), float(rank)), "b": torch.zeros(1)}
    optimizer = bc.optim.SGD([nn.Parameter(params["w"])], 0.1)
    shards = {"w": distribute_tensor(torch.ones(4, 3), mesh_of(4), [Shard(0)])}
    half = torch.ones(2, 3) + (rank == 2)  # ranks 0 and 2 hold the same half
    replicas = DTensor.from_local(half, mesh_of(2, 2), [Replicate(), Shard(0)], run_check=False)
    save = lambda tree, **options: lambda: bc.distributed.save(tmp_path / "ours", tree, **options)  # noqa: E731
    refuses(
        {
            ("params/w differ from rank to rank", "chains=chains.numbers"): save({"params": params}),
            ("opt/param_groups/0/", " is int; only tensors", "bc.state_dict(state)"): save(
                {"opt": optimizer.state_dict()}
            ),
            ("tensor is SGD",): save(optimizer),
            ("spread as (Shard(dim=0),)",): save(shards, chains=range(4)),
            ("w (elements ((0, ",): save({"w": replicas}),
            ("leaf w is a DTensor", "bc.distributed.save(folder, tree)"): lambda: bc.save(
                tmp_path / "w.safetensors", shards
            ),
        }
    )
    dist.barrier()
    assert not os.listdir(tmp_path)


def loaded(folder, **tensors):
    """What a load leaves in tensors that were 9 before, and its error or warnings."""
    tree = {name: torch.full_like(x, 9) for name, x in tensors.items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        said = message_of(bc.distributed.load, folder, tree)
    if said is None:
        return tree, " ".join(str(x.message) for x in caught)
    assert all(bool((x == 9).all()) for x in tree.values()), "a refusal leaves the tensors as they were"
    return None, said


def misfit(folder, tx=TX, **changed):
    """What a load into the parameters and the state of a chain says."""
    tensors = {f"state/{name}": x for name, x in bc.state_dict(tx.init(matrices())).items()}
    return loaded(folder / "a", **tensors, **{f"params/{name}": x for name, x in (matrices() | changed).items()})[1]


MISFITS = {  # what is said, and what is done with the checkpoint of a chain, or of six chains
    "fewer chains": ("no rank loads [4, 5]: run as many chains", lambda f: message_of(gone_on, f, "c", None, 1, "chains", n=4)),
    "more chains": ("chain 6/params/w is missing", lambda f: message_of(gone_on, f, "c", None, 1, "chains", n=7)),
    "another chain": ("state/0.Momentum.trace['b'] is not expected", lambda f: misfit(f, bc.sgld(0.1, temperature=0.05))),
    "two moments": ("is missing", lambda f: misfit(f, bc.adam(0.1, temperature=0.05))),
    "another shape": ("b is torch.float64 (3,), expected torch.float64 (4,)", lambda f: misfit(f, b=torch.ones(4).double())),
    "another dtype": ("params/b is torch.float64 (3,), expected torch.float32 (3,)", lambda f: misfit(f, b=torch.ones(3))),
    "a folder that is taken": ("holds a checkpoint already", lambda f: message_of(gone_on, f, None, "a", 3)),
    "no table": ("not written to its end", lambda f: message_of(gone_on, f, "b", None, 1)),
    "two of one name": (
        "two leaves are named a/b",
        lambda f: message_of(bc.distributed.save, f / "b", {"a/b": torch.ones(1), "a": {"b": torch.ones(1)}}),
    ),
    "no tree": ("tree is NoneType; only tensors", lambda f: message_of(bc.distributed.save, f / "b", None)),
    "no stack": (
        "w is of shape (3,); with chains= axis 0 of every tensor counts the 2 chains",
        lambda f: message_of(bc.distributed.save, f / "b", {"w": torch.ones(3)}, chains=range(2)),
    ),
}  # fmt: skip


def test_what_does_not_fit_a_checkpoint_is_refused_and_nothing_is_written(tmp_path):
    gone_on(tmp_path, None, "a", 2)
    gone_on(tmp_path, None, "c", 1, "chains", n=6)
    for case, (words, act) in MISFITS.items():
        assert words in act(tmp_path), case


# what was damaged, cut, or written by somebody else

TREE = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(7.0), "none": torch.zeros(0, 2)}
FILES = (".metadata", "__0_0.distcp", DIGESTS)


@pytest.fixture
def folder(tmp_path):
    bc.distributed.save(tmp_path / "step", TREE)
    return tmp_path / "step"


@pytest.mark.parametrize("file, digests", [*itertools.product(FILES, (True,)), *itertools.product(FILES[:2], (False,))])
def test_a_flipped_bit_is_refused_and_without_digests_read_as_other_numbers_or_refused(file, digests, folder):
    """Never an error without a name, and never a tensor of which only a part was read."""
    (folder / DIGESTS).rename(folder / (DIGESTS if digests else "elsewhere"))
    raw, ends = (folder / file).read_bytes(), set()
    for seed in range(25):
        where, changed = random.Random(seed), bytearray(raw)
        changed[where.randrange(len(raw))] ^= 1 << where.randrange(8)
        (folder / file).write_bytes(bytes(changed))
        tree, said = loaded(folder, **TREE)
        assert tree is None and "damaged" in said if digests else tree is not None or "load:" in said, (seed, said)
        ends.add(tree is None)
    assert True in ends


def box(offsets, sizes):
    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))


def table(change):
    """Change the table of contents."""

    def spoil(folder):
        change(about := pickle.loads((folder / ".metadata").read_bytes()))
        (folder / ".metadata").write_bytes(pickle.dumps(about))

    return spoil


def pieces(name, *boxes):
    return table(lambda about: setattr(about.state_dict_metadata[name], "chunks", [box(*x) for x in boxes]))


def places(**changed):
    """Other places of all pieces."""
    return table(lambda about: [vars(x).update(changed) for x in about.storage_data.values()])


def cut(file):
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:-1])


def raw(content, file=".metadata"):
    return lambda folder: (folder / file).write_bytes(content)


def instead(file, make):
    """Something else by the name of a file."""

    def spoil(folder):
        (folder / file).unlink()
        make(folder / file)

    return spoil


def compressed(folder):
    """A zip bomb: a gigabyte of zeros takes a megabyte on the disk."""
    torch.save(torch.zeros(2, 3), whole := io.BytesIO())
    with zipfile.ZipFile(whole) as read, zipfile.ZipFile(packed := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as write:
        for name in read.namelist():
            write.writestr(name, read.read(name))
    places(offset=0, length=len(packed.getvalue()))(folder)
    (folder / "__0_0.distcp").write_bytes(packed.getvalue())


HARM, ALL = "damaged, or was made to do harm", ((0, 0), (2, 3))
FOREIGN = {  # without digests, as torch itself writes it: what is done, and what is said; None where it is read
    "nothing": (lambda folder: None, None),
    "no pieces": (pieces("w"), "w"),
    "no piece of a number": (pieces("b"), "b"),
    "pieces that leave elements out": (pieces("w", ((0, 0), (2, 1)), ((0, 1), (1, 2))), "w"),
    "a piece across the border": (pieces("w", ((1, 0), (2, 3))), "w"),
    "pieces that overlap": (pieces("w", ALL, ((0, 1), (2, 1))), "w"),
    "a piece of another rank": (pieces("w", ((0,), (2,))), "w"),
    "a negative piece": (pieces("w", ((0, 0), (-2, -3))), "w"),
    "a piece twice": (pieces("w", ALL, ALL), None),
    "an attribute of a class": (raw(b"\x80\x04cpathlib\nPosixPath\n(N}\x8c\x04openNst\x86b."), HARM),
    "a memo of two thousand million entries": (raw(b"\x80\x04r\xff\xff\xff\x7f."), HARM),
    "bytes beyond all memory": (raw(b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f."), HARM),
    "tuples in tuples": (raw(b"\x80\x04" + b"(" * 100_000 + b"t" * 100_000 + b"."), HARM),
    "a command": (raw(b"\x80\x04cos\nsystem\n(\x8c\x04truetR."), HARM),
    "no table": (raw(b""), HARM),
    "an unfinished table": (raw(b"\x80\x04"), HARM),
    "a plan that is a command": (table(lambda about: setattr(about, "planner_data", os.system)), "posix.system"),
    "bytes that would be unpickled": (
        table(lambda about: about.state_dict_metadata.update(x=BytesStorageMetadata())),
        "would be unpickled",
    ),
    "a file elsewhere": (places(relative_path="../step/__0_0.distcp"), "which is no file of pieces"),
    "a file of the machine": (places(relative_path="/etc/passwd"), "which is no file of pieces"),
    "a compressed piece": (compressed, "compressed"),
}
OURS = {
    "files of a save on more ranks that was cut off": (raw(b"x", "__7_0.distcp"), None),
    **{f"{file}, cut": (cut(file), "damaged") for file in FILES},
    **{f"{file}, empty": (raw(b"", file), "damaged") for file in FILES},
    **{f"{file}, a pipe": (instead(file, os.mkfifo), "step") for file in FILES},
    **{f"{file}, endless": (instead(file, lambda path: path.symlink_to("/dev/zero")), "step") for file in FILES},
    **{f"{file}, a folder": (instead(file, Path.mkdir), "step") for file in FILES},
    **{f"{file}, gone": (lambda folder, file=file: (folder / file).unlink(), "step") for file in FILES[:2]},
}


@pytest.mark.parametrize("case", [*FOREIGN, *OURS])
def test_a_checkpoint_that_was_damaged_or_crafted_is_refused_and_without_digests_it_is_said(case, folder):
    spoil, words = (FOREIGN | OURS)[case]
    if case in FOREIGN:
        (folder / DIGESTS).unlink()
    spoil(folder)
    tree, said = loaded(folder, **TREE)
    assert all(map(torch.equal, tree.values(), TREE.values())) if words is None else tree is None and words in said
    assert (words is None and case in FOREIGN) == ("has no digests, so that damage is not checked for" in said)


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
