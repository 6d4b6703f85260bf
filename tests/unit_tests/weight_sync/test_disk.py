"""The disk transport's files against the safetensors library: what is in them, who may read them, what is left over."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.patience import PATIENCE_S
from torchtitan.errors import UserError
from torchtitan.weight_sync import faults
from torchtitan.weight_sync.event_loop import EventLoop
from torchtitan.weight_sync.manifest import DTYPE_BYTES, Layout, content_digest
from torchtitan.weight_sync.plan import Placed, PlacedParameter, Sharded, plan_rank
from torchtitan.weight_sync.states.slot import SlotKeeper, SlotState, SlotView
from torchtitan.weight_sync.transports import disk_store
from torchtitan.weight_sync.transports.base import Delivery, ReceiveContext, SendContext
from torchtitan.weight_sync.transports.disk import DiskReceiveCarrier, DiskSendCarrier
from torchtitan.weight_sync.transports.disk_owner import FolderOwner
from torchtitan.weight_sync.transports.disk_store import DiskStore, FileState
from torchtitan.weight_sync.weight_files import PackedRank, file_checksum, read_weights

EPOCH = "e1-test"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def layouts(shapes: list[tuple[int, ...]], ranks: int, dtype: str, bucket_bytes: int) -> list[Layout]:
    """Each rank's part: everything that has rows is cut by rows."""

    def placed(index: int, rank: int) -> PlacedParameter:
        if ranks == 1 or not shapes[index]:
            return PlacedParameter(f"p{index}", Placed(shapes[index]))
        return PlacedParameter(f"p{index}", Placed(shapes[index], (ranks,), (rank,), (Sharded(0),)))

    return [plan_rank([placed(i, r) for i in range(len(shapes))], r, dtype, bucket_bytes) for r in range(ranks)]


def full_tensors(layout: Layout, version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {
        entry.name: torch.randn(entry.shape, generator=generator).to(DTYPES[entry.dtype]) for entry in layout.parameters
    }


def fill(slot: memoryview, layout: Layout, tensors: dict[str, torch.Tensor]) -> None:
    """A rank's slot, as the publisher fills it."""
    for shard in layout.ranks[0].shards:
        entry = layout.parameters[shard.parameter]
        box = tuple(slice(low, low + size) for low, size in zip(shard.offset, shard.shape, strict=True))
        data = tensors[entry.name][box].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert len(data) == shard.elements * DTYPE_BYTES[entry.dtype]
        slot[shard.byte_offset : shard.byte_offset + len(data)] = data


def no_note(note: bytes) -> None:
    raise AssertionError("files need no notes")


class World:
    """Stores of all ranks on one running loop; each has slots enough for every version of a test."""

    def __init__(self, folder: Path, parts: list[Layout], slots: int = 8):
        self.folder, self.parts = folder, parts
        self.whole = Layout(parts[0].bucket_bytes, parts[0].parameters, tuple(part.ranks[0] for part in parts))
        self.loop = EventLoop()
        self.thread = threading.Thread(target=self.loop.run, daemon=True)
        self.thread.start()
        self.words = [[0] * slots for _ in parts]
        self.keepers = [SlotKeeper(words) for words in self.words]
        self.memory: list[dict[int, memoryview]] = [{} for _ in parts]
        self.stores = [self.new_store(rank) for rank in range(len(parts))]

    def new_store(self, rank: int) -> DiskStore:
        count = len(self.parts)
        return DiskStore(self.loop, self.keepers[rank], self.folder, EPOCH, rank, count, self.parts[rank])

    def call(self, function: Callable[[], Any]) -> Any:
        results: list[Any] = []
        self.loop.call_from_thread(lambda: results.append(function()))
        self.wait(lambda: bool(results))
        return results[0]

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, "waited for 20 s"
            time.sleep(0.002)

    def snapshot(self, rank: int, version: int) -> None:
        """Version and serial are the same number here."""
        slot = memoryview(bytearray(self.parts[rank].ranks[0].slot_bytes))
        fill(slot, self.parts[rank], full_tensors(self.whole, version))
        self.memory[rank][version] = slot
        self.words[rank][version % len(self.words[rank])] = SlotView(SlotState.READY, version, version).pack()

    def publish(self, version: int, wait: bool = True) -> None:
        digest = self.digest(version)
        for rank, store in enumerate(self.stores):
            self.snapshot(rank, version)
            self.call(partial(self._publish, store, rank, version, digest))
        if wait:
            self.wait(lambda: all(self.state(rank, version) is FileState.WHOLE for rank in range(len(self.stores))))

    def _publish(self, store: DiskStore, rank: int, version: int, digest: str) -> None:
        self.keepers[rank].publish(version)
        store.published(version, version, digest, "layout", self.memory[rank][version])

    def digest(self, version: int) -> str:
        from torchtitan.weight_sync.checksums import bucket_checksum

        checksums = []
        for part in self.parts:
            slot = memoryview(bytearray(part.ranks[0].slot_bytes))
            fill(slot, part, full_tensors(self.whole, version))
            step = part.bucket_bytes
            checksums.append([bucket_checksum(slot[start : start + step]) for start in range(0, len(slot), step)])
        return content_digest("layout", checksums)

    def state(self, rank: int, version: int) -> FileState | None:
        file = self.stores[rank].file(version)
        return None if file is None else file.state

    def versions(self) -> list[int]:
        return sorted(int(path.name.removeprefix("version-")) for path in (self.folder / EPOCH).glob("version-*"))

    def close(self) -> None:
        self.loop.stop()
        self.thread.join(PATIENCE_S)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "weights", layouts([(5, 3), (), (40,), (7, 2, 2)], 1, "float32", 64))
    yield made
    made.close()


class Delivered:
    """One delivery from a store to an actor's memory, with the carriers and without sockets."""

    def __init__(self, world: World, rank: int, version: int):
        self.world, self.version = world, version
        self.failures: list[str] = []
        part = world.parts[rank]
        self.delivery = Delivery(1, version, version, {rank: world.memory[rank][version]}, part.bucket_bytes)
        self.sender = DiskSendCarrier(
            SendContext(
                world.loop,
                EPOCH,
                rank,
                "a",
                0,
                0,
                part,
                {"store": world.stores[rank]},
                self.go_on,
                self.failures.append,
                no_note,
            )
        )
        self.receiver = DiskReceiveCarrier(
            ReceiveContext(world.loop, EPOCH, rank, "a", 0, 0, world.whole, self.sender.hello(), "cpu", no_note)
        )
        self.sender.connected(self.receiver.welcome())
        self.keys = self.delivery.keys()
        self.staging = memoryview(bytearray(len(world.memory[rank][version])))
        self.results: list[str | None] = []
        self.asked = 0
        self.go_on()

    def go_on(self) -> None:
        self.world.loop.call_from_thread(self._go_on)

    def _go_on(self) -> None:
        while self.asked < len(self.keys):
            key = self.keys[self.asked]
            payload = self.sender.payload(self.delivery, key)
            if payload is None:
                return
            assert len(payload.data) <= 4096
            self.asked += 1
            step = self.delivery.bucket_bytes
            target = self.staging[key[1] * step : (key[1] + 1) * step]

            def done(error: str | None, key: tuple[int, int] = key) -> None:
                if error is None:
                    self.world.loop.call_from_thread(lambda: self.sender.acknowledged(self.delivery, key))
                self.results.append(error)

            self.receiver.fetch(bytes(payload.data), target, done)

    def finish(self) -> None:
        self.world.wait(lambda: bool(self.failures) or len(self.results) == len(self.keys))
        self.world.call(lambda: self.sender.end(self.delivery, lambda: None))
        self.receiver.close()


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=5),
    ranks=st.integers(1, 3),
    dtype=st.sampled_from(sorted(DTYPES)),
    bucket_bytes=st.sampled_from([64, 128, 1 << 20]),
)
def test_files_hold_the_slots(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, ...]], ranks: int, dtype: str, bucket_bytes: int
) -> None:
    world = World(tmp_path_factory.mktemp("weights"), layouts(shapes, ranks, dtype, bucket_bytes))
    try:
        world.publish(1)
        expected = full_tensors(world.whole, 1)
        found = read_weights(world.folder / "latest")
        assert (found.epoch, found.version, found.digest) == (EPOCH, 1, world.digest(1))
        assert found.tensors.keys() == expected.keys()
        assert all(torch.equal(found.tensors[name], tensor) for name, tensor in expected.items())
        if ranks == 1:
            plain = load_file(world.folder / "latest" / "model.safetensors")
            assert plain.keys() == expected.keys()
            assert all(torch.equal(plain[name], tensor) for name, tensor in expected.items())
        for rank in range(ranks):
            delivered = Delivered(world, rank, 1)
            delivered.finish()
            assert not delivered.failures and delivered.results == [None] * len(delivered.keys)
            assert delivered.staging == world.memory[rank][1]
    finally:
        world.close()


def test_one_file_however_many_actors(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Any] = []
    write = DiskStore._write_file
    monkeypatch.setattr(DiskStore, "_write_file", lambda self, file: (written.append(file.version), write(self, file)))
    world.publish(1, wait=False)
    actors = [Delivered(world, 0, 1) for _ in range(4)]
    for actor in actors:
        actor.finish()
        assert actor.staging == world.memory[0][1]
    assert written == [1]


def test_old_versions_go_the_newest_and_those_that_are_read_stay(world: World) -> None:
    world.publish(1)
    reader = Delivered(world, 0, 1)
    world.wait(lambda: len(reader.results) == len(reader.keys))
    for version in range(2, 7):
        world.publish(version)
        assert (world.folder / "latest").resolve().name == f"version-{version:08d}"
        assert set(os.listdir(world.folder / "latest")) == {"model.safetensors", "manifest.json", "rank-00000.json"}
    assert world.versions() == [1, 5, 6]
    reader.finish()
    world.publish(7)
    assert world.versions() == [6, 7]


def test_a_new_courier_clears_up_after_the_old_one(world: World) -> None:
    for version in (1, 2):
        world.publish(version)
    leftover = world.folder / EPOCH / "version-00000002" / ".model.safetensors-0.tmp"
    leftover.write_bytes(b"half")
    old_epoch = world.folder / "e0-test" / "version-00000009"
    old_epoch.mkdir(parents=True)
    (old_epoch / "rank-00000.json").write_text("{}")
    (old_epoch / "model.safetensors").write_bytes(b"old")
    (world.folder / "not-ours").mkdir()
    world.words[0][:] = [0] * len(world.words[0])
    world.stores[0] = world.new_store(0)
    for version in (3, 4):
        world.publish(version)
    assert world.versions() == [3, 4] and not leftover.exists() and not old_epoch.parent.exists()
    assert (world.folder / "not-ours").exists()
    assert read_weights(world.folder / "latest").version == 4


@pytest.mark.parametrize(
    "left", [["rank-00003.safetensors"], [".rank-00002.safetensors-2.tmp"], ["rank-00001.json", "manifest.json"],
             [".model.safetensors-0.tmp", "rank-00000.json"], []],
)  # fmt: skip
def test_what_a_crashed_launch_has_left_goes(world: World, left: list[str]) -> None:
    half_written = world.folder / "e0-crashed" / "version-00000007"
    half_written.mkdir(parents=True)
    for name in left:
        (half_written / name).write_bytes(b"half")
    foreign = world.folder / "e0-other" / "version-00000001" / "notes.txt"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("not ours")
    world.publish(1)
    assert not half_written.parent.exists() and foreign.exists()


def test_a_folder_has_one_owner(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    first = FolderOwner(folder, "e1")
    with pytest.raises(UserError, match=rf"still runs \(epoch e1, process {os.getpid()}\)"):
        FolderOwner(folder, "e2")
    first.close()
    first.close()
    second = FolderOwner(folder, "e2")
    with pytest.raises(UserError, match="epoch e2"):
        FolderOwner(folder, "e3")
    second.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be opened"):
        FolderOwner(tmp_path / "file", "e1")


def test_a_killed_job_owns_nothing(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from torchtitan.weight_sync.transports.disk_owner import FolderOwner
owner = FolderOwner(Path({str(tmp_path)!r}), "e1")
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=PATIENCE_S).returncode < 0
    assert "epoch e1" in (tmp_path / "owner").read_text()
    FolderOwner(tmp_path, "e2").close()


def test_any_failure_of_the_writer_is_told_and_tried_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtitan.weight_sync.transports.disk_store.RETRY_SECONDS", 0.05)
    replace, failures = disk_store._replace, [RuntimeError("no such thing"), RuntimeError("again")]

    def fail_at_first(target: Path, content: Callable[[int], None], owner: int) -> None:
        if failures:
            raise failures.pop(0)
        replace(target, content, owner)

    monkeypatch.setattr(disk_store, "_replace", fail_at_first)
    world.publish(1, wait=False)
    first = Delivered(world, 0, 1)
    first.finish()
    assert first.failures and all("RuntimeError" in failure for failure in first.failures)
    world.wait(lambda: world.state(0, 1) is FileState.WHOLE)
    assert read_weights(world.folder / "latest").version == 1


def test_full_disk_breaks_the_attempt_and_leaves_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.publish(1)
    # The first may strike before anybody reads.
    monkeypatch.setenv(faults.VARIABLE, "full_disk:version=2,bucket=1,times=2")
    faults._plans.clear()
    monkeypatch.setattr("torchtitan.weight_sync.transports.disk_store.RETRY_SECONDS", 0.05)
    world.publish(2, wait=False)
    first = Delivered(world, 0, 2)
    first.finish()
    (failure,) = first.failures
    assert failure.startswith(f"disk: {os.strerror(errno.ENOSPC)} (fault injection: full_disk")
    assert read_weights(world.folder / "latest").version == 1
    for _ in range(2):
        again = Delivered(world, 0, 2)
        again.finish()
        if not again.failures:
            break
    assert again.staging == world.memory[0][2]
    assert read_weights(world.folder / "latest").version == 2 and not list(world.folder.glob("**/.*"))


@pytest.mark.parametrize("damage", ["corrupt", "drop", "truncate", "delete"])
def test_a_damaged_file_is_noticed_and_written_again(
    world: World, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    if damage in ("corrupt", "drop"):
        monkeypatch.setenv(faults.VARIABLE, f"{damage}:phase=write,version=1,bucket=2")
        faults._plans.clear()
    world.publish(1)
    path = world.folder / "latest" / "model.safetensors"
    if damage == "truncate":
        os.truncate(path, path.stat().st_size - 70)
    elif damage == "delete":
        path.unlink()
    if damage != "delete":
        with pytest.raises(UserError, match="truncated or corrupt"):
            read_weights(world.folder / "latest")
    first = Delivered(world, 0, 1)
    first.finish()
    assert first.staging != world.memory[0][1]
    if damage == "corrupt":
        # The receiver's checksum finds it; then the delivery ends unfinished.
        assert set(first.results) == {None}
        world.call(lambda: setattr(world.stores[0].file(1), "state", FileState.SUSPECT))
    else:
        assert any(result and ("truncated" in result or "No such file" in result) for result in first.results)
    second = Delivered(world, 0, 1)
    second.finish()
    assert second.staging == world.memory[0][1]
    assert read_weights(world.folder / "latest").version == 1


def test_a_version_of_some_ranks_only_is_no_version(tmp_path: Path) -> None:
    world = World(tmp_path, layouts([(6, 2), (8,)], 2, "float32", 64))
    try:
        world.publish(1)
        world.snapshot(0, 2)
        world.call(lambda: world._publish(world.stores[0], 0, 2, world.digest(2)))
        world.wait(lambda: world.state(0, 2) is FileState.WHOLE)
        assert read_weights(tmp_path / "latest").version == 1
        with pytest.raises(UserError, match="no whole version"):
            read_weights(tmp_path / EPOCH / "version-00000002")
        world.snapshot(1, 2)
        world.call(lambda: world._publish(world.stores[1], 1, 2, world.digest(2)))
        world.wait(lambda: world.state(1, 2) is FileState.WHOLE)
        assert read_weights(tmp_path / "latest").version == 2
        manifest = json.loads((tmp_path / "latest" / "manifest.json").read_text())
        assert [file["file"] for file in manifest["files"]] == ["rank-00000.safetensors", "rank-00001.safetensors"]
    finally:
        world.close()


def test_who_reads_latest_sees_whole_versions_only(world: World) -> None:
    world.publish(1)
    stop = threading.Event()
    seen: list[int] = []
    wrong: list[object] = []

    def read() -> None:
        while not stop.is_set():
            try:
                found = read_weights(world.folder / "latest")
                expected = full_tensors(world.whole, found.version)
                if not all(torch.equal(found.tensors[name], tensor) for name, tensor in expected.items()):
                    wrong.append(found.version)
                seen.append(found.version)
            except Exception as error:
                wrong.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for version in range(2, 40):
        world.publish(version)
        if version % 8 == 0:
            # However slowly it reads, it sees several.
            world.wait(lambda version=version: bool(wrong) or (bool(seen) and seen[-1] >= version - 4))  # type: ignore[misc]
    stop.set()
    reader.join(PATIENCE_S)
    assert not wrong and seen == sorted(seen) and len(set(seen)) > 3


@pytest.mark.parametrize(
    "reference",
    [b"", b"[]", b"{}", b'{"file": "/etc/passwd", "offset": 0, "bucket": [0, 0]}',
     b'{"file": "../x", "offset": 0, "bucket": [0, 0]}', b'{"file": "x", "offset": -1, "bucket": [0, 0]}',
     b'{"file": "x", "offset": 0, "bucket": [7, 0]}', b'{"file": "x", "offset": 0, "bucket": [0]}',
     b'{"file": "x", "offset": 0, "bucket": [-1, 0]}', b'{"file": "x", "offset": 0, "bucket": [0, -1]}',
     b'{"file": "x", "offset": 0, "bucket": [0, 1000]}', b'{"file": "x", "offset": Infinity, "bucket": [0, 0]}',
     b'{"file": "x", "offset": 1e400, "bucket": [0, 0]}', b'{"file": "x", "offset": true, "bucket": [0, 0]}',
     b'{"file": "x", "offset": 100000000000000000000, "bucket": [0, 0]}',
     b'{"file": "a\\u0000b", "offset": 0, "bucket": [0, 0]}', b"\xff"],
)  # fmt: skip
def test_malformed_references_are_refused(world: World, reference: bytes) -> None:
    context = ReceiveContext(
        world.loop, EPOCH, 0, "a", 0, 0, world.whole, {"folder": str(world.folder)}, "cpu", no_note
    )
    receiver, results = DiskReceiveCarrier(context), []
    receiver.fetch(reference, memoryview(bytearray(64)), results.append)
    world.wait(lambda: bool(results))
    receiver.close()
    assert results[0] and "malformed reference" in results[0]


def test_the_reader_outlives_any_failure(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.publish(1)
    read_file, failures = DiskReceiveCarrier._read_file, [TypeError("odd"), OverflowError("large")]

    def fail_at_first(self: DiskReceiveCarrier, path: Path, offset: int, pieces: list[memoryview]) -> str | None:
        if failures:
            raise failures.pop(0)
        return read_file(self, path, offset, pieces)

    monkeypatch.setattr(DiskReceiveCarrier, "_read_file", fail_at_first)
    delivered = Delivered(world, 0, 1)
    delivered.finish()
    first, second, *others = delivered.results
    assert "TypeError" in str(first) and "OverflowError" in str(second) and others and set(others) == {None}


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
    world = World(tmp_path, layouts([(4, 3)], 2, "float32", 64))
    try:
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
        assert torch.equal(read_weights(folder).tensors["p0"], full_tensors(world.whole, 1)["p0"])
        rewrite(folder, 1, offsets=None)
        with pytest.raises(UserError, match="where its tensors belong"):
            read_weights(folder)
        for name in ("../x", "/etc/passwd", "a/b", "", ".."):
            change_manifest(folder, 1, file=name)
            with pytest.raises(UserError, match="not a file of this folder"):
                read_weights(folder)
    finally:
        world.close()


def test_two_shards_of_one_parameter_fit_in_no_file() -> None:
    (part,) = layouts([(4, 4)], 1, "float32", 64)
    rank = part.ranks[0]
    twice = type(rank)(rank.slot_bytes * 2, type(rank.shards).of([*rank.shards, *rank.shards]))
    with pytest.raises(ValueError, match="two shards"):
        PackedRank(Layout(64, part.parameters, (twice,)), 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a file system of a megabyte")
def test_a_really_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    world = World(folder / "weights", layouts([(50_000,)], 1, "float32", 1 << 16))  # 200 KB a version
    monkeypatch.setattr("torchtitan.weight_sync.transports.disk_store.RETRY_SECONDS", 0.05)
    try:
        world.publish(1)
        (folder / "filler").write_bytes(bytes(800 * 1024))
        world.publish(2, wait=False)
        first = Delivered(world, 0, 2)
        first.finish()
        assert first.failures == [f"disk: {os.strerror(errno.ENOSPC)}"]
        assert world.versions() == [1] and read_weights(folder / "weights" / "latest").version == 1
        (folder / "filler").unlink()
        second = Delivered(world, 0, 2)
        second.finish()
        assert not second.failures and second.staging == world.memory[0][2]
    finally:
        world.close()
        subprocess.run(["umount", "-l", str(folder)], check=True)
