"""The disk transport's files against the safetensors library: what is in them, who may read them, what is left over."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import Shard

from examples.version_folder import read_weights
from tests import faults
from tests.patience import PATIENCE_S
from torchtitan.errors import Unreachable, UserError
from torchtitan.utils.files import file_checksum, replace_file
from torchtitan.weight_sync.memory.delta import shortest
from torchtitan.weight_sync.memory.manifest import ChecksumTable, Layout, Manifest
from torchtitan.weight_sync.memory.transfer import Transfer
from torchtitan.weight_sync.trainer.plan import Placed, PlacedParameter, plan_rank
from torchtitan.weight_sync.transports import stores
from torchtitan.weight_sync.transports.disk import Catalogue, Disk, SlotFiles, read_parts
from torchtitan.weight_sync.transports.stores import Folder as FolderStore
from torchtitan.weight_sync.transports.stores import store_of
from torchtitan.weight_sync.wire.runtime import ProtocolError

EPOCH = "e1-test"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def layouts(shapes: list[tuple[int, ...]], ranks: int, dtype: str, bucket_bytes: int) -> list[Layout]:
    """Each rank's part: everything that has rows is cut by rows."""

    def placed(index: int, rank: int) -> PlacedParameter:
        if ranks == 1 or not shapes[index]:
            return PlacedParameter(f"p{index}", Placed(shapes[index]))
        return PlacedParameter(f"p{index}", Placed(shapes[index], (ranks,), (rank,), (Shard(0),)))

    return [plan_rank([placed(i, r) for i in range(len(shapes))], r, dtype, bucket_bytes) for r in range(ranks)]


class Inline:
    """A runtime whose work is done at once."""

    def work(
        self, _thread: str, function: Callable[[], Any], done: Callable[[Any, BaseException | None], None]
    ) -> None:
        try:
            result = function()
        except Exception as error:
            done(None, error)
        else:
            done(result, None)


class Folder:
    """What all ranks write, and the registry's catalogue. Version n lies in slot n."""

    def __init__(self, path: Path, parts: list[Layout]):
        self.path, self.parts = path, parts
        self.whole = Layout(parts[0].bucket_bytes, parts[0].parameters, tuple(part.ranks[0] for part in parts))
        ranks = len(parts)
        self.store = store_of(str(path))
        self.files = [SlotFiles(self.store, EPOCH, rank, ranks, part) for rank, part in enumerate(parts)]
        self.catalogue = Catalogue(Inline(), self.store, EPOCH)  # type: ignore[arg-type]
        self.slots: dict[tuple[int, int], memoryview] = {}

    def tensors(self, version: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(version)
        return {
            entry.name: torch.randn(entry.shape, generator=generator).to(DTYPES[entry.dtype])
            for entry in self.whole.parameters
        }

    def write(self, rank: int, version: int) -> dict[str, Any]:
        """As a shard server does."""
        part, tensors = self.parts[rank], self.tensors(version)
        slot = self.slots[rank, version] = memoryview(bytearray(part.ranks[0].slot_bytes))
        for shard in part.ranks[0]:
            box = tuple(slice(low, low + size) for low, size in zip(shard.offset, shard.shape, strict=True))
            data = tensors[part.parameters[shard.parameter].name][box].contiguous().reshape(-1).view(torch.uint8)
            slot[shard.byte_offset : shard.byte_offset + len(data)] = data.numpy().tobytes()
        return self.files[rank].write(version, version, version, slot, lambda: None)

    def publish(self, version: int, live: tuple[int, ...] = ()) -> str:
        """All ranks write it, and the registry publishes it; its digest."""
        files = [self.write(rank, version) for rank in range(len(self.parts))]
        step, checksum_tables = self.whole.bucket_bytes, list[str]()
        for rank in range(len(self.parts)):
            slot = self.slots[rank, version]
            sums = [xxhash.xxh3_128_hexdigest(slot[start : start + step]) for start in range(0, len(slot), step)]
            checksum_tables.append(ChecksumTable.of(sums).digest())
        manifest = Manifest.of(EPOCH, version, "layout", checksum_tables)
        self.catalogue.publish(manifest, files, live)
        return manifest.digest

    def pulled(self, rank: int, version: int) -> bytes:
        """What an actor reads."""
        staging = bytearray(self.parts[rank].ranks[0].slot_bytes)
        for bucket in range(self.parts[rank].bucket_count(0)):
            start, end = self.parts[rank].bucket_range(0, bucket)
            reference = json.loads(json.dumps(self.files[rank].refer(version, start, end)))
            parts = shortest(reference["parts"], end - start, None)
            read_parts(self.store, parts, reference["element"], memoryview(staging)[start:end])
        return bytes(staging)

    def versions(self) -> list[int]:
        return sorted(int(path.name.removeprefix("version-")) for path in (self.path / EPOCH).glob("version-*"))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "weights", layouts([(5, 3), (), (40,), (7, 2, 2)], 1, "float32", 64))


@settings(max_examples=60)
@given(
    shapes=st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=5),
    ranks=st.integers(1, 3),
    dtype=st.sampled_from(sorted(DTYPES)),
    bucket_bytes=st.sampled_from([64, 128, 1 << 20]),
)
def test_files_hold_the_slots(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, ...]], ranks: int, dtype: str, bucket_bytes: int
) -> None:
    folder = Folder(tmp_path_factory.mktemp("weights"), layouts(shapes, ranks, dtype, bucket_bytes))
    digest, expected = folder.publish(1), folder.tensors(1)
    found = read_weights(folder.path / "latest")
    assert (found.epoch, found.version, found.digest) == (EPOCH, 1, digest)
    assert found.tensors.keys() == expected.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in expected.items())
    if ranks == 1:
        plain = load_file(folder.path / "latest" / "model.safetensors")
        assert plain.keys() == expected.keys()
        assert all(torch.equal(plain[name], tensor) for name, tensor in expected.items())
    for rank in range(ranks):
        assert folder.pulled(rank, 1) == folder.slots[rank, 1]
    # The library's own files do so as well: who maps a file has its data aligned.
    for path in (folder.path / "latest").glob("*.safetensors"):
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


def test_old_versions_go_the_newest_and_those_that_are_pulled_stay(folder: Folder) -> None:
    folder.publish(1)
    for version in range(2, 7):
        folder.publish(version, live=(1,))
        assert (folder.path / "latest").resolve().name == f"version-{version:08d}"
        assert set(os.listdir(folder.path / "latest")) == {"model.safetensors", "manifest.json"}
    assert folder.versions() == [1, 5, 6] and folder.pulled(0, 1) == folder.slots[0, 1]
    # One that is being written is newer than all that are published.
    folder.write(0, 8)
    folder.publish(7)
    assert folder.versions() == [6, 7, 8]
    folder.catalogue.make_room(())
    assert folder.versions() == [7, 8]
    assert read_weights(folder.path / "latest").version == 7


@pytest.mark.parametrize(
    "left", [["rank-00003.safetensors"], [".rank-00002.safetensors-2.tmp"], ["rank-00001.json", "manifest.json"],
             [".model.safetensors-0.tmp", "model.safetensors"], []],
)  # fmt: skip
def test_half_written_versions_of_an_earlier_job_are_deleted(
    folder: Folder, left: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    half_written = folder.path / "e0-crashed" / "version-00000007"
    half_written.mkdir(parents=True)
    for name in left:
        (half_written / name).write_bytes(b"half")
    foreign = folder.path / "e0-other" / "version-00000001" / "notes.txt"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("not ours")
    folder.publish(1)
    assert not half_written.parent.exists() and foreign.exists() and not caplog.records


def test_version_of_some_ranks_only_is_no_version(tmp_path: Path) -> None:
    folder = Folder(tmp_path, layouts([(6, 2), (8,)], 2, "float32", 64))
    folder.publish(1)
    folder.write(0, 2)
    assert read_weights(tmp_path / "latest").version == 1
    with pytest.raises(UserError, match="no whole version"):
        read_weights(tmp_path / EPOCH / "version-00000002")
    folder.publish(2)
    assert read_weights(tmp_path / "latest").version == 2


def test_full_disk_leaves_nothing(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.publish(1)
    faults.inject(monkeypatch, "full_disk:version=2,bucket=1")
    faults._plans.clear()
    with pytest.raises(OSError, match=r"model\.safetensors cannot be written: No space left on device"):
        folder.publish(2)
    assert read_weights(folder.path / "latest").version == 1 and not list(folder.path.glob("**/.*"))
    assert not list(folder.path.glob(f"{EPOCH}/version-00000002/*"))
    folder.publish(2)
    assert read_weights(folder.path / "latest").version == 2


def test_file_has_its_name_once_its_bytes_are_on_the_disk(
    tmp_path: Path, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss of power leaves the file before, or the whole new one."""
    target, done = tmp_path / "file", list[Any]()
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append(os.fstat(file).st_ino), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda *names: (done.append("named"), replace(*names)))
    replace_file(target, lambda file: file.write(b"new"))
    assert done == [target.stat().st_ino, "named", tmp_path.stat().st_ino] and target.read_bytes() == b"new"
    # So is what leads to the newest version.
    folder.publish(1)
    after = done[len(done) - done[::-1].index("named") :]
    assert after == [folder.path.stat().st_ino] and read_weights(folder.path / "latest").version == 1


def test_folders_that_are_no_version_of_a_job_are_kept(folder: Folder) -> None:
    kept = [folder.path / name / "model.safetensors" for name in ("llama/version-2", "e1/version-1", f"{EPOCH}/other")]
    gone = folder.path / "e0-test/version-00000007/model.safetensors"
    for path in (*kept, gone):
        path.parent.mkdir(parents=True)
        path.write_text("")
    for version in range(1, 5):
        folder.publish(version)
    assert all(path.exists() for path in kept) and not gone.parent.parent.exists()
    assert sorted(path.name for path in (folder.path / EPOCH).glob("version-*"))[0] == "version-00000003"


@pytest.mark.parametrize("damage", ["corrupt", "drop", "truncate", "delete"])
def test_damaged_file_is_never_taken_for_a_whole_one(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    if damage in ("corrupt", "drop"):
        faults.inject(monkeypatch, f"{damage}:phase=write,version=1,bucket=2")
        faults._plans.clear()
    folder.publish(1)
    path = folder.path / "latest" / "model.safetensors"
    if damage == "truncate":
        os.truncate(path, path.stat().st_size - 70)
    elif damage == "delete":
        path.unlink()
    with pytest.raises(UserError, match="no whole version" if damage == "delete" else "truncated or corrupt"):
        read_weights(folder.path / "latest")
    if damage == "corrupt":
        # It is the bucket's checksum that finds it.
        assert folder.pulled(0, 1) != folder.slots[0, 1]
    else:
        with pytest.raises(OSError, match="No such file" if damage == "delete" else "truncated"):
            folder.pulled(0, 1)


def test_a_reader_of_latest_sees_complete_versions_only(folder: Folder) -> None:
    folder.publish(1)
    stop, seen, wrong = threading.Event(), list[int](), list[object]()
    progress = threading.Semaphore(0)

    def read() -> None:
        while not stop.is_set() and not wrong:
            try:
                found = read_weights(folder.path / "latest")
                expected = folder.tensors(found.version)
                if not all(torch.equal(found.tensors[name], tensor) for name, tensor in expected.items()):
                    wrong.append(found.version)
                seen.append(found.version)
            except Exception as error:
                wrong.append(error)
            progress.release()

    reader = threading.Thread(target=read)
    reader.start()
    for version in range(2, 40):
        folder.publish(version)
        if version % 8 == 0:
            # However slowly it reads, it sees several.
            assert progress.acquire(timeout=PATIENCE_S)
    stop.set()
    reader.join(PATIENCE_S)
    assert not wrong and seen == sorted(seen) and len(set(seen)) > 3


@pytest.mark.parametrize(
    "change",
    [
        {"parts": [[1, "/etc/passwd", 0, 64]]}, {"parts": [[1, "../x", 0, 64]]}, {"parts": [[1, "a\0b", 0, 64]]},
        {"parts": [[1, "x", -1, 64]]}, {"parts": [[1, "x", float("inf"), 64]]}, {"parts": [[1, "x", 10**20, 64]]},
        {"parts": [[1, "x", None, 64]]}, {"parts": [[1, "x", 0, 65]]}, {"parts": [[1, "x", 0, 63]]},
        {"parts": [[1, "x", 0]]}, {"parts": []}, {"parts": None}, {"parts": [3]}, {"folder": None}, {"element": "2"},
        {"folder": "simplecache::memory://x"}, {"thread": "0"},
    ],
)  # fmt: skip
def test_malformed_references_are_refused(folder: Folder, change: dict[str, Any]) -> None:
    folder.publish(1)
    layout = Layout(64, folder.whole.parameters, folder.whole.ranks)
    transfer = Transfer(1, 1, Manifest.of(EPOCH, 1, "layout", []), layout, {}, 0.0, 0.0)
    with pytest.raises(ProtocolError, match="reference needs|parts of|nowhere|to no bucket|no file of|leads through"):
        reference, *_ = transfer.plan((0, 0), {**folder.files[0].refer(1, 0, 64), **change}, None)
        Disk().fetch(reference, memoryview(bytearray(64)))


def test_folder_has_one_owner(tmp_path: Path) -> None:
    first, second, third = (FolderStore(str(tmp_path / "weights")) for _ in range(3))
    first.claim("run folder 1")
    with pytest.raises(UserError, match=rf"still runs \(run folder 1, process {os.getpid()}\)"):
        second.claim("run folder 2")
    first.release()
    first.release()
    second.claim("run folder 2")
    with pytest.raises(UserError, match="run folder 2"):
        third.claim("run folder 3")
    second.release()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/owner: File exists"):
        FolderStore(str(tmp_path / "file")).claim("run folder 1")


def test_only_the_rank_that_has_claimed_the_folder_releases_it(tmp_path: Path) -> None:
    first, second, other_rank = (Disk({"folder": str(tmp_path), "run": run}) for run in ("1", "2", "1"))
    first.claim(EPOCH)
    other_rank.close()
    with pytest.raises(UserError, match="run folder 1"):
        second.claim(EPOCH)
    first.close()
    second.claim(EPOCH)
    second.close()


def test_claim_of_a_folder_whose_disk_hangs_ends_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "READ_SECONDS", 0.1)
    answers = threading.Event()
    monkeypatch.setattr(fcntl, "flock", lambda *_: answers.wait(PATIENCE_S))
    store = FolderStore(str(tmp_path))
    with pytest.raises(Unreachable, match=rf"weight_sync\.disk\.path: .*{tmp_path.name} does not answer"):
        store.claim("run folder 1")
    answers.set()
    assert store._hung is not None
    store._hung.join(PATIENCE_S)


def test_killed_job_owns_nothing(tmp_path: Path) -> None:
    program = f"""
import os, signal
from {FolderStore.__module__} import Folder
Folder({str(tmp_path)!r}).claim("run folder 1")
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=PATIENCE_S).returncode < 0
    assert "run folder 1" in (tmp_path / "owner").read_text()
    FolderStore(str(tmp_path)).claim("run folder 2")


def rewrite(folder: Path, rank: int, **metadata: object) -> None:
    """A rank's file with other metadata (None: without it), and a manifest that fits it."""
    path = folder / f"rank-{rank:05d}.safetensors"
    with safe_open(path, "pt") as content:
        about = {**content.metadata(), **{name: json.dumps(value) for name, value in metadata.items()}}
        tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118 not a dict
    save_file(tensors, path, {name: text for name, text in about.items() if text != "null"} or None)
    change_manifest(folder, rank, bytes=path.stat().st_size, xxh3_128=file_checksum(path))


def change_manifest(folder: Path, rank: int, **values: object) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][rank].update(values)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_read_weights_checks_every_element_and_name(tmp_path: Path) -> None:
    world = Folder(tmp_path, layouts([(4, 3)], 2, "float32", 64))
    world.publish(1)
    folder = (tmp_path / "latest").resolve()
    assert read_weights(folder).tensors["p0"].shape == (4, 3)
    rewrite(folder, 1, offsets={"p0": [1, 0]})  # one row twice, one never: as many elements as there should be
    with pytest.raises(UserError, match="exactly once"):
        read_weights(folder)
    for offset in ([3, 0], [-2, 0], [2]):
        rewrite(folder, 1, offsets={"p0": offset})
        with pytest.raises(UserError, match="exactly once"):
            read_weights(folder)
    rewrite(folder, 1, offsets={"p0": [2, 0]}, shapes={"p0": [4, 4]})
    with pytest.raises(UserError, match="another dtype or shape"):
        read_weights(folder)
    rewrite(folder, 1, shapes={"p0": [4, 3]})
    assert torch.equal(read_weights(folder).tensors["p0"], world.tensors(1)["p0"])
    rewrite(folder, 1, offsets=None)
    with pytest.raises(UserError, match="where its tensors belong"):
        read_weights(folder)
    for name in ("../x", "/etc/passwd", "a/b", "", ".."):
        change_manifest(folder, 1, file=name)
        with pytest.raises(UserError, match="not a file of this folder"):
            read_weights(folder)
