"""The disk transport with deltas, over stores that fail, hang and are killed at any point: what actors read is what the
slots held, and a manifest names only what is there."""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.moto_server import moto_server
from tests.patience import PATIENCE_S, until
from torchtitan.distributed.boxes import Box
from torchtitan.errors import Unreachable, UserError
from torchtitan.weight_sync.memory.delta import encode, shortest
from torchtitan.weight_sync.memory.layout_tables import ParameterEntry, ParameterTable, ShardTable
from torchtitan.weight_sync.memory.manifest import ChecksumTable, Layout, Manifest
from torchtitan.weight_sync.memory.weight_files import version_folder
from torchtitan.weight_sync.transports import disk, stores
from torchtitan.weight_sync.transports.disk import Catalogue, SlotFiles, read_parts
from torchtitan.weight_sync.transports.stores import Folder, Objects, store_of
from torchtitan.weight_sync.wire.runtime import ProtocolError

EPOCH = "e1-test"
BUCKET, BUCKETS = 4096, 5
SIZE = BUCKET * (BUCKETS - 1) + 1000
ROOT = Path(__file__).resolve().parents[3]


def one_rank() -> Layout:
    table = ParameterTable.of([ParameterEntry("w", "bfloat16", (SIZE // 2,))])
    return Layout(BUCKET, table, (ShardTable.of(table, [(0, Box((0,), (SIZE // 2,)))]),))


@functools.cache
def slot_of(serial: int) -> memoryview:
    """One number in forty differs from the snapshot before; the second bucket is another one in every seventh."""
    values = np.random.default_rng(0).integers(0, 1 << 16, SIZE // 2, dtype=np.uint16)
    for step in range(1, serial + 1):
        values[step % 40 :: 40] += 3
        if step % 7 == 0:
            values[BUCKET // 2 : BUCKET] = np.random.default_rng(step).integers(0, 1 << 16, BUCKET // 2)
    return memoryview(values.tobytes())


class Inline:
    """A runtime whose work is done at once; what ends a process ends it."""

    def __init__(self) -> None:
        self.failures: list[BaseException] = []

    def work(
        self, _thread: str, function: Callable[[], Any], done: Callable[[Any, BaseException | None], None]
    ) -> None:
        try:
            function()
        except Exception as error:
            self.failures.append(error)
            done(None, error)


class Job:
    """A rank's shard server and the registry, each of which may be a new process at any time."""

    def __init__(self, store: Any, whole_every: int = 3):
        self.store, self.runtime = store, Inline()
        self.files = SlotFiles(store, EPOCH, 0, 1, one_rank(), whole_every)
        self.catalogue = Catalogue(self.runtime, store, EPOCH)  # type: ignore[arg-type]

    def write(self, serial: int) -> dict[str, Any]:
        return self.files.write(serial, serial, serial, slot_of(serial), lambda: None)

    def publish(self, serial: int, live: tuple[int, ...] = ()) -> dict[str, Any]:
        entry = self.write(serial)
        manifest = Manifest.of(EPOCH, serial, "layout", [ChecksumTable(bytes(16), 1).digest()])
        self.catalogue.publish(manifest, [entry], live)
        return entry

    def pulled(self, serial: int, held: int | None = None, store: Any = None) -> int:
        """An actor that holds `held` reads `serial`, and has it to the last bit. How many bytes it has read."""
        staging = bytearray(SIZE) if held is None else bytearray(slot_of(held))
        read = 0
        for start in range(0, SIZE, BUCKET):
            target = memoryview(staging)[start : start + BUCKET]
            reference = json.loads(json.dumps(self.files.refer(serial, start, start + len(target))))
            parts = shortest(reference["parts"], len(target), held)
            read_parts(store or self.store, parts, reference["element"], target)
            read += sum(part[3] for part in parts)
        assert staging == slot_of(serial)
        return read


def by_tcp(new: int, old: int) -> int:
    """How many bytes of deltas that is with tcp."""
    buckets = [slice(start, start + BUCKET) for start in range(0, SIZE, BUCKET)]
    deltas = [encode(slot_of(new)[span], slot_of(old)[span], 2) or slot_of(new)[span] for span in buckets]
    return sum(map(len, deltas))


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    for name in ("s3fs", "moto", "flask_cors"):
        pytest.importorskip(name, reason="needs the extra `remote` and moto[server]")
    with moto_server() as url:
        yield url


@pytest.fixture
def bucket(s3: str, monkeypatch: pytest.MonkeyPatch) -> str:
    from fsspec.config import conf

    for name, value in {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setitem(conf, "s3", {"endpoint_url": s3})
    name = f"bucket-{uuid.uuid4().hex}"
    Objects(f"s3://{name}")._files.mkdir(name)
    return f"s3://{name}/weights"


@pytest.mark.slow  # moto's server takes a while to start
def test_versions_go_through_s3(bucket: str) -> None:
    job = Job(store_of(bucket))
    for serial in range(1, 6):
        job.publish(serial)
    whole_and_deltas = SIZE + by_tcp(5, 4) + by_tcp(4, 3)
    assert job.pulled(5, None, store_of(bucket)) == whole_and_deltas and job.pulled(5, 4) == by_tcp(5, 4)
    check_whole(store_of(bucket))
    assert not job.runtime.failures and not [name for name in job.store.names() if "-00000001/" in name]
    Objects(bucket).claim("run folder 1")
    with pytest.raises(UserError, match="belongs to another job"):
        Objects(bucket).claim("run folder 2")
    with pytest.raises(UserError, match="disk.path: s3://no-such-bucket/weights: .*not exist"):
        Objects("s3://no-such-bucket/weights").claim("run folder 1")


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_every_version_is_read_from_every_other_by_the_shortest_way(kind: str, tmp_path: Path) -> None:
    url = str(tmp_path) if kind == "folder" else f"memory://{uuid.uuid4().hex}/weights"
    job = Job(store_of(url))
    for serial in range(1, 12):
        entry = job.publish(serial)
        assert ("file" in entry) == (serial in (1, 3, 6, 9))
        for held in (None, *range(1, serial + 1)):
            job.pulled(serial, held, store_of(url))
    assert not job.runtime.failures
    # One version behind: what tcp sends, to the byte; further behind: every delta between, until a whole one is less.
    assert job.pulled(11, 10) == by_tcp(11, 10) < SIZE / 8
    assert job.pulled(11, 9) == by_tcp(11, 10) + by_tcp(10, 9)
    assert job.pulled(11) == job.pulled(11, 2) == SIZE + by_tcp(11, 10) + by_tcp(10, 9) and job.pulled(11, 11) == 0
    assert job.store.newest() == version_folder(EPOCH, 9)
    names = {"/".join(name.split("/")[1:3]) for name in job.store.names() if not name.endswith("/")}
    wanted = [f"{number:08d}/rank-00000-{number:08d}.delta" for number in range(7, 12)]
    wanted += [f"{number:08d}/manifest.json" for number in (9, 10, 11)] + ["00000009/model.safetensors"]
    assert names == {f"version-{name}" for name in wanted}


class Stops(BaseException):
    """The process is killed here."""


class Stopping:
    """A store that is killed before its n-th operation, or half-way through it."""

    def __init__(self, store: Any, after: int, kill: Callable[[], None]):
        self._store, self._left, self._kill = store, after, kill
        self.url = store.url

    def _step(self) -> None:
        self._left -= 1
        if self._left < 0:
            self._kill()

    def write(self, name: str, pieces: Any) -> Any:
        def counted() -> Iterator[Any]:
            for piece in pieces:
                self._step()
                yield piece

        return self._store.write(name, counted())

    def remove(self, names: Any) -> None:
        for name in names:
            self._step()
            self._store.remove([name])

    def __getattr__(self, name: str) -> Any:
        self._step()
        return getattr(self._store, name)


def check_whole(store: Any) -> None:
    """`latest` and each manifest lead to versions whose bytes are there."""
    names = list(store.names())
    there = {"/".join(name.split("/")[:3]) for name in names}
    if latest := store.newest():
        assert {f"{latest}/manifest.json", f"{latest}/model.safetensors"} <= there
    newest = max((name for name in there if name.endswith("manifest.json")), default="")
    if newest:
        about = json.loads(content_of(store, newest))
        assert {name for file in about["files"] for name in file["needs"]} <= there


def content_of(store: Any, name: str) -> bytes:
    if isinstance(store, Objects):
        return bytes(store._call("cat_file", name))
    return (Path(store.url) / name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_a_job_that_is_killed_at_any_point_leaves_whole_versions(kind: str, tmp_path: Path) -> None:
    def kill() -> None:
        raise Stops

    for after in itertools.count(step=7 if kind == "folder" else 1):
        path = tmp_path / str(after)
        url = str(path) if kind == "folder" else f"memory://{uuid.uuid4().hex}"
        job = Job(Stopping(store_of(url), after, kill), whole_every=2)
        try:
            for serial in range(1, 6):
                job.publish(serial)
            break
        except Stops:
            pass
        check_whole(store_of(url))
        # What comes after it, in the same epoch: new processes, which know nothing of the old ones.
        again = Job(store_of(url), whole_every=2)
        for number in range(serial, serial + 3):
            again.publish(number)
            again.pulled(number)
        assert again.pulled(number, number - 1) == by_tcp(number, number - 1) and not again.runtime.failures
        check_whole(again.store)
        oldest = min(int(name.split("/")[1].removeprefix("version-")) for name in again.store.names())
        assert oldest >= number - 3, "what was left has been deleted"
    assert after > 60


KILLED = """
import os, signal, sys
from tests.unit_tests.weight_sync.test_stores import Job, Stopping, store_of
job = Job(Stopping(store_of(sys.argv[1]), int(sys.argv[2]), lambda: os.kill(os.getpid(), signal.SIGKILL)), 2)
for serial in range(1, 6):
    job.publish(serial)
"""


@pytest.mark.parametrize("after", [3, 9, 17, 26])
def test_a_process_that_is_killed_leaves_whole_versions(after: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(after)]
    done = subprocess.run(command, timeout=PATIENCE_S, check=False, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    check_whole(store_of(str(tmp_path)))
    again = Job(store_of(str(tmp_path)), 2)
    for serial in range(3, 6):
        again.publish(serial)
        again.pulled(serial)
    check_whole(again.store)
    assert not list(tmp_path.glob("**/.*"))


def test_no_chain_of_deltas_has_more_bytes_than_a_version(tmp_path: Path) -> None:
    job, random, whole = Job(store_of(str(tmp_path)), whole_every=10**6), np.random.default_rng(0), []
    values = random.integers(0, 1 << 16, SIZE // 2, dtype=np.uint16)
    for serial in range(1, 20):
        values = values.copy()
        changed = random.integers(0, len(values), len(values) // 10)
        values[changed] = random.integers(0, 1 << 16, len(changed))
        if "file" in job.files.write(serial, serial, serial, memoryview(values.tobytes()), lambda: None):
            whole.append(serial)
        read = 0
        for start in range(0, SIZE, BUCKET):
            size = min(BUCKET, SIZE - start)
            parts = job.files.refer(serial, start, start + size)["parts"]
            read += sum(part[3] for part in shortest(parts, size, None))
        assert read <= 2 * SIZE, "by who joins"
    assert whole[0] == 1 and 3 < whole[1] < 15


def test_no_delta_is_written_where_most_values_have_changed(tmp_path: Path) -> None:
    job = Job(store_of(str(tmp_path)), whole_every=10**6)
    job.publish(1)
    other = memoryview(np.random.default_rng(1).bytes(SIZE))
    assert "file" in job.files.write(2, 2, 2, other, lambda: None) and not list(tmp_path.glob("**/*.delta"))


def test_no_more_objects_are_in_memory_than_are_uploaded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "OBJECT_BYTES", 1)
    store, taken, answers = Objects(f"memory://{uuid.uuid4().hex}"), list[int](), threading.Event()
    put, count = store.put, 3 * stores.UPLOADS
    monkeypatch.setattr(store, "put", lambda *about: (answers.wait(PATIENCE_S), put(*about)))
    pieces = (taken.append(number) or bytes([number]) for number in range(count))  # type: ignore[func-returns-value]
    writer = threading.Thread(target=store.write, args=("file", pieces))
    writer.start()
    until(lambda: len(taken) > stores.UPLOADS, why=lambda: str(taken))
    writer.join(0.2)
    assert len(taken) == stores.UPLOADS + 1
    answers.set()
    writer.join(PATIENCE_S)
    assert [content_of(store, f"file/{number:05d}") for number in range(count)] == [bytes([n]) for n in range(count)]


@pytest.mark.parametrize("error", [RuntimeError("503 slow down"), ConnectionRefusedError(111, "503 slow down")])
def test_an_object_store_is_tried_a_bounded_number_of_times(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "RETRY_SECONDS", 0.0)
    store = Objects(f"memory://{uuid.uuid4().hex}")
    job, files, fails = Job(store, whole_every=9), store._files, [0]
    pipe, cat = files.pipe_file, files.cat_file

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if fails[0]:
                fails[0] -= 1
                raise error
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(files, "pipe_file", failing(pipe), raising=False)
    monkeypatch.setattr(files, "cat_file", failing(cat), raising=False)
    fails[0] = stores.TRIES - 1
    job.publish(1)
    fails[0] = stores.TRIES - 1
    job.pulled(1)
    fails[0] = stores.TRIES
    with pytest.raises(OSError, match=r"\.delta cannot be written: .*503 slow down"):
        job.write(2)
    fails[0] = stores.TRIES
    with pytest.raises(OSError, match="503 slow down") as raised:
        job.pulled(1)
    assert not isinstance(raised.value, ConnectionError), "it would be tried again for ever"
    # The version that could not be written is no base: the next one goes from the one before.
    job.publish(3)
    assert job.pulled(3, 1) == by_tcp(3, 1)


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_a_disk_that_hangs_holds_one_thread_and_writes_nothing_later(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "READ_SECONDS", 0.1)
    store = store_of(str(tmp_path) if kind == "folder" else f"memory://{uuid.uuid4().hex}")
    job, released = Job(store), threading.Event()
    job.publish(1)
    target: Any = os if kind == "folder" else store._files  # type: ignore[union-attr]
    name = "pread" if kind == "folder" else "cat_file"
    usual = getattr(target, name)

    def hangs(*arguments: Any, **options: Any) -> Any:
        released.wait(PATIENCE_S)
        return usual(*arguments, **options)

    if kind == "folder":
        monkeypatch.setattr(os, "preadv", lambda *_: 0)  # nothing is in memory
    monkeypatch.setattr(target, name, hangs, raising=False)
    file, offset = job.files._written[1][0][0][1:3]
    memory = memoryview(bytearray(64))
    before = threading.active_count()
    with pytest.raises(TimeoutError, match="does not answer"):
        store.read(file, offset, memory)
    started_at = time.monotonic()
    for _ in range(50):
        with pytest.raises(TimeoutError, match="still hangs"):
            store.read(file, offset, memory)
    assert threading.active_count() == before + 1 and time.monotonic() - started_at < PATIENCE_S
    released.set()
    until(lambda: threading.active_count() == before, why=lambda: "the read ends")
    assert bytes(memory) == bytes(64)
    store.read(file, offset, memory)
    assert memory == slot_of(1)[:64]


def test_catalogue_says_that_its_store_hangs_and_goes_on_with_the_next_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stores, "READ_SECONDS", 0.1)
    monkeypatch.setattr(disk, "CATALOGUE_SECONDS", 0.0)
    store, released = Folder(str(tmp_path)), threading.Event()
    job, put, before = Job(store), store.put, threading.active_count()
    monkeypatch.setattr(store, "put", lambda *about: (released.wait(2.0), put(*about)))
    job.publish(1)
    assert "does not answer" in caplog.text and "an earlier call" in caplog.text
    assert threading.active_count() == before + 1
    released.set()
    until(lambda: threading.active_count() == before, why=lambda: "the write ends")
    monkeypatch.setattr(stores, "READ_SECONDS", PATIENCE_S)
    job.publish(2)
    assert {version_folder(EPOCH, version) for version in (1, 2)} == {
        name.rpartition("/")[0] for name in store.names() if name.endswith("manifest.json")
    }


def test_objects_have_one_owner_that_may_come_back() -> None:
    url = f"memory://{uuid.uuid4().hex}"
    Objects(url).claim("run folder 1")
    mine = Objects(url)
    mine.claim("run folder 1")
    with pytest.raises(UserError, match=r"belongs to another job \(run folder 1\).*delete memory://\w+/owner"):
        Objects(url).claim("run folder 2")
    Objects(url).release()  # who has claimed nothing releases nothing
    with pytest.raises(UserError, match="belongs to another job"):
        Objects(url).claim("run folder 2")
    mine.release()
    mine.release()
    Objects(url).claim("run folder 2")


def test_object_store_that_hangs_where_a_job_begins_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that starts ranks again meets the store of a moment ago; a store that refuses is a mistake."""
    monkeypatch.setattr(stores, "READ_SECONDS", 0.1)
    answers, store = threading.Event(), Objects(f"memory://{uuid.uuid4().hex}")
    monkeypatch.setattr(store._files, "cat_file", lambda *_, **__: answers.wait(PATIENCE_S), raising=False)
    with pytest.raises(Unreachable, match=r"weight_sync\.disk\.path: memory://\w+ does not answer") as raised:
        store.claim("run folder 1")
    assert raised.value.exit_code == 75
    answers.set()
    assert store._hung is not None
    store._hung.join(PATIENCE_S)


def test_ranks_write_the_same_versions_whole_whatever_one_has_missed() -> None:
    store = Objects(f"memory://{uuid.uuid4().hex}")
    steady, restarted = Job(store), Job(store)
    wholes: list[list[int]] = [[], []]
    for serial in range(1, 12):
        restarted = Job(store) if serial == 5 else restarted
        for job, found in zip((steady, restarted), wholes, strict=True):
            found += [serial] if "file" in job.write(serial) else []
    assert wholes == [[1, 3, 6, 9], [1, 3, 5, 6, 9]]


def test_no_way_leads_over_a_gap() -> None:
    size = 100
    whole, deltas = [5, "w", 0, size], [[number, "d", 0, 9] for number in (3, 4, 5, 6, 7)]
    parts = [*deltas[:3], whole, *deltas[3:]]
    assert shortest(parts, size, None) == [tuple(whole), *map(tuple, deltas[3:])]
    assert shortest(parts, size, 3) == list(map(tuple, deltas[1:]))
    assert shortest(parts, size, 9) == shortest(parts, size, 2) == shortest(parts, size, None)
    # Version 3 is a part as it is: from version 2, no delta leads to it.
    assert shortest([[1, "w", 0, 100], [2, "d", 0, 9], [3, "r", 0, 100], [4, "d", 0, 9]], size, 2)[0][0] == 3
    with pytest.raises(ProtocolError, match="no parts"):
        shortest("parts", size, None)
