"""What others wrote: damaged files are named, hostile ones run no code, allocate nothing, and leave the folder alone."""

import json
import os
import pickle

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.runs.files import BLOCK
from bayesopt_chain.runs.table import read_index, sealed

TX = bc.sghmc(0.1, temperature=0.05)


def loss(params, batch):
    return (params["w"] ** 2).sum()


def started():
    torch.manual_seed(0)
    params = {"w": torch.ones(5)}
    return bc.make_step(loss, TX), params, TX.init(params), None


def sampled(path, steps=6, seconds=0.0, **more):
    return bc.sample(*started(), steps=steps, path=path, checkpoint_seconds=seconds, **more)


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
    files = sorted(p for p in (folder / "run").iterdir() if p.suffix in (".json", ".safetensors"))
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
                wrong += read is sampled and not torch.equal(
                    said.params["w"], bc.sample(*started(), steps=6).params["w"]
                )
            except (ValueError, FileNotFoundError) as err:
                unnamed += file.name not in str(err) and folder.name not in str(err)
        for other in (folder / "run").iterdir():  # what a resumed run wrote
            if other not in files and other.name != "lock":
                other.unlink()
        file.write_bytes(before)
    return wrong, unnamed


def test_damaged_files_are_named_and_never_believed(tmp_path):
    assert every_damage_is_seen(tmp_path, 24) == (0, 0)


def test_the_command_that_damages_files_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    from benchmarks import soak  # which imports this module

    monkeypatch.setattr(soak, "RESULTS", tmp_path / "soak.json")
    first = next(soak.damaged(5, seed=3, some=2))
    assert first == {"files": 2, "of": 5, "seed": 3, "wrong": 0, "unnamed": 0}
    soak.record("damages", first, soak.RESULTS)
    assert [x["files"] for x in soak.damaged(5, seed=3, some=2)] == [4, 5]
    assert [x["files"] for x in soak.damaged(2, seed=4, some=2)] == [2]


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


class Exploit:
    """Touches a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


HOSTILE = {
    "a name above the folder": lambda x: x["shards"][0]["parts"][0].update(file="../outside/x.safetensors"),
    "an absolute name": lambda x: x["shards"][0]["parts"][0].update(file="/etc/passwd"),
    "a directory": lambda x: x["shards"][0]["parts"][0].update(file="draws-000000"),
    "a checkpoint among the draws": lambda x: x["shards"][0].update(parts=x["checkpoint"]["parts"]),
    "draws without end": lambda x: x["shards"][-1].update(step=10**12),
    "steps backward": lambda x: x["shards"][1].update(since=5, step=2),
    "a negative step": lambda x: x["shards"][0].update(since=-1),
    "a step that is true": lambda x: x.update(step=True),
    "no shards": lambda x: x.update(shards=None),
    "shards of numbers": lambda x: x.update(shards=[3]),
    "no parts": lambda x: x["shards"][0].update(parts=[]),
    "a huge shape": lambda x: x["columns"].update({"params/w": ["F32", [10**9, 10**9]]}),
    "another dtype": lambda x: x["columns"].update({"params/w": ["F64", [5]]}),
    "a dtype that is none": lambda x: x["columns"].update({"params/w": ["os.system", [5]]}),
    "no columns": lambda x: x.update(columns={}),
    "a leaf that is not there": lambda x: x.update(leaves=["w", "v"]),
    "a leaf of 10,000 levels": lambda x: x.update(leaves=["/".join("a" * 10000)]),
    "leaves of numbers": lambda x: x.update(leaves=[3]),
    "chains that are not there": lambda x: x.update(chains=7),
    "numbers of nothing": lambda x: x.update(numbers=[4, 2]),
    "a rank of nothing": lambda x: x.update(rank=[1]),
    "no thinning": lambda x: x["identity"].update(thinning=0),
    "no identity": lambda x: x.pop("identity"),
    "an identity of text": lambda x: x.update(identity="x"),
    "a box outside": lambda x: x["shards"][0]["parts"][0].update(boxes={"params/w": [[[0, 1]], [[3, 9]]]}),
    "a box of text": lambda x: x["shards"][0]["parts"][0].update(boxes={"params/w": "x"}),
    "boxes of nothing": lambda x: x["shards"][0]["parts"][0].update(boxes={"params/v": None}),
    "keys of text": lambda x: x.update(keys=["x"]),
    "a checkpoint of text": lambda x: x.update(checkpoint="x"),
    "another format": lambda x: x.update(format="bayesopt_chain/run/1"),
}


@pytest.mark.sweep(14)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_index_with_a_right_checksum_ends_in_an_error_that_names_it(name, tmp_path):
    sampled(tmp_path)
    index = read_index(tmp_path)
    HOSTILE[name](index)
    (tmp_path / "index.json").write_text(sealed(index))
    for read in (everything, lambda path: sampled(path).params):
        with pytest.raises((ValueError, FileNotFoundError), match=r"index\.json|draws-\d+|" + tmp_path.name):
            read(tmp_path)


def test_a_directory_in_the_place_of_an_index_and_a_path_without_a_name_are_refused(tmp_path):
    (tmp_path / "index.json").mkdir()
    for read in (everything, sampled):
        with pytest.raises(ValueError, match=r"index\.json is damaged"):
            read(tmp_path)
    with pytest.raises((TypeError, ValueError), match="path must be the path of a directory"):
        sampled("")


def test_what_the_ranks_kept_alone_is_not_believed_either(tmp_path):
    want = sampled(tmp_path).params["w"]
    folder = tmp_path / f"draws-{read_index(tmp_path)['next']:06d}"
    folder.mkdir()
    (folder / "rank-00000.safetensors").write_bytes(b"junk")
    with pytest.warns(UserWarning, match=f"draws that the ranks kept in .*{folder.name}"):
        assert torch.equal(bc.Draws.open(tmp_path).params["w"], want)


def test_a_file_of_another_run_under_the_right_name_is_refused(tmp_path):
    sampled(tmp_path / "one")
    torch.manual_seed(5)
    params = {"w": torch.zeros(5)}
    bc.sample(
        bc.make_step(loss, TX), params, TX.init(params), None, steps=6, path=tmp_path / "two", checkpoint_seconds=0.0
    )
    file = sorted((tmp_path / "one").glob("draws-*"))[0]
    file.write_bytes((tmp_path / "two" / file.name).read_bytes())
    with pytest.raises(ValueError, match=file.name):
        everything(tmp_path / "one")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:load")
def test_a_distributed_checkpoint_runs_no_code(tmp_path):
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    folder, mark = tmp_path / "saved", tmp_path / "executed"
    bc.distributed.save(folder, {"w": torch.ones(2)})
    (folder / ".sha256.json").unlink()  # who wants to do harm leaves no digests
    table = folder / ".metadata"
    honest = pickle.loads(table.read_bytes())
    place = next(iter(honest.storage_data.values()))

    def refused(changed, says):
        table.write_bytes(changed if isinstance(changed, bytes) else pickle.dumps(changed))
        w = torch.zeros(2)
        with pytest.raises(ValueError, match=says):
            bc.distributed.load(folder, {"w": w})
        assert not mark.exists() and torch.equal(w, torch.zeros(2))

    refused(Exploit(mark), "posix.system")
    honest.planner_data = Exploit(mark)
    refused(honest, "posix.system")
    honest.planner_data = None
    honest.state_dict_metadata["x"] = BytesStorageMetadata()
    refused(honest, "would be unpickled")
    del honest.state_dict_metadata["x"]
    for name in ("../saved/__0_0.distcp", "/etc/passwd"):
        place.relative_path = name
        refused(honest, "it names the file")
    refused(b"\x80\x04", "damaged")
    place.relative_path = "__0_0.distcp"
    table.write_bytes(pickle.dumps(honest))
    w = torch.zeros(2)
    bc.distributed.load(folder, {"w": w})
    assert torch.equal(w, torch.ones(2))


def test_a_slice_reads_its_blocks_alone(tmp_path):
    w = torch.randn(64, 3 * BLOCK // 4)  # three blocks a row
    from bayesopt_chain.runs.files import File, write

    write(tmp_path / "x", {"w": w}, {})
    file = File(tmp_path / "x")
    before = read_so_far()
    assert torch.equal(file.read("w", slice(10, 12)), w[10:12])
    assert read_so_far() - before <= 8 * BLOCK
    data = bytearray((tmp_path / "x").read_bytes())
    data[-1] ^= 1
    (tmp_path / "x").write_bytes(data)
    assert torch.equal(file.read("w", slice(0, 63)), w[:63])
    with pytest.raises(ValueError, match=r"w in .* does not match its checksum"):
        file.read("w", slice(63, 64))


def read_so_far():
    """Bytes that this process has read."""
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


def test_blocks_that_change_places_are_noticed(tmp_path):
    from bayesopt_chain.runs.files import File, write

    w = torch.randn(2 * BLOCK // 4)
    write(tmp_path / "x", {"w": w}, {})
    data = (tmp_path / "x").read_bytes()
    (tmp_path / "x").write_bytes(data[: -2 * BLOCK] + data[-BLOCK:] + data[-2 * BLOCK : -BLOCK])
    with pytest.raises(ValueError, match="checksum"):
        File(tmp_path / "x").read("w")


def test_the_names_of_an_index_of_files_stay_in_the_folder(tmp_path):
    (tmp_path / "run.safetensors.index.json").write_text(json.dumps({"files": ["../x"]}))
    with pytest.raises(ValueError, match=r"index\.json is damaged"):
        bc.load(tmp_path / "run.safetensors", like={"w": torch.zeros(2)})
