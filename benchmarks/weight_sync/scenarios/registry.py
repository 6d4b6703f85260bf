"""What a thousand actors cost the registry, rank 0 and each of them.

The registry is the production one, in its own process. The shard servers of 64 ranks are clients that report checksums
of a version that nobody has computed, once per second; actors are clients that say what a real one says, at random
times within half a second. One real puller among them shows what a version costs an actor before the first byte.

    publish_block_ms      what the registry's only thread takes of its core to announce a version; the longest
    publish_wall_ms       the same by the clock, which on a busy machine is longer
    registry_share        cores that the registry takes
    step_ms               the trainer thread's time per step for metrics and console line; the median
    status_bytes_s        what rank 0 is told
    join_storm_s          from the moment at which all actors connect at once until each has heard of the version
    actor_start_pull_ms   an actor's time (of its core) from a version's announcement to the last request for a bucket
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import resource
import secrets
import statistics
import sys
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from types import SimpleNamespace
from typing import Any

import psutil

from benchmarks import common
from benchmarks.weight_sync import timed_registry
from benchmarks.weight_sync.harness import Option, Run
from benchmarks.weight_sync.job import EPOCH, WAIT_SECONDS
from benchmarks.weight_sync.processes import Child, say
from torchtitan.distributed.boxes import Box
from torchtitan.report.sync_metrics import SyncMetrics
from torchtitan.weight_sync import servers
from torchtitan.weight_sync.actor.puller import Puller
from torchtitan.weight_sync.actor.shard_connection import ShardServerConnection
from torchtitan.weight_sync.facade import Watcher, WeightSync
from torchtitan.weight_sync.memory.layout_tables import ParameterEntry, ParameterTable, ShardTable
from torchtitan.weight_sync.memory.manifest import BucketKey, ChecksumTable, Layout
from torchtitan.weight_sync.memory.transfer import CHECKSUM_TABLE
from torchtitan.weight_sync.registry.state import RegistrySettings
from torchtitan.weight_sync.transports.bucket_server import BucketServer, Reader
from torchtitan.weight_sync.transports.transport import load_transport
from torchtitan.weight_sync.wire import runtime as wire
from torchtitan.weight_sync.wire.clients import RegistryClient
from torchtitan.weight_sync.wire.handshake import ACTOR, RANK, Identity
from torchtitan.weight_sync.wire.runtime import Message
from torchtitan.weight_sync.wire.sockets import SocketRuntime

RANKS = 64
BUCKET_BYTES = 16 << 20
PULLER = "puller"
# An actor tells that it has everything, and that it serves it, at most this long after it has heard of a version.
SPREAD_SECONDS = 0.5
BARS = {
    "publish_block_ms": ("<=", 50.0),
    "registry_share": ("<=", 0.2),
    "step_ms": ("<=", 0.2),
    "status_bytes_s": ("<=", 20_000.0),
    "join_storm_s": ("<=", 5.0),
    "actor_start_pull_ms": ("<=", 100.0),
}
OPTIONS = {
    "actors": Option(1000, quick=20),
    "buckets": Option(120_000, "of a version, over 64 ranks", quick=6400),
    "parameters": Option(2000, quick=100),
    "versions": Option(20, "one per second", quick=3),
}


def allow_open_files() -> None:
    """As many as this process may have: each actor has a connection."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


# The ranks


class Server(BucketServer):
    """A rank's shard server that has the checksums of every version, and no bytes of it."""

    phase = "send"

    def __init__(self, runtime: SocketRuntime, layout: Layout, rank: int, token: str):
        super().__init__(runtime, EPOCH, ACTOR, token)
        self._rank, self._count = rank, layout.bucket_count(0)
        self._checksum_tables: dict[int, ChecksumTable] = {}
        """By serial"""
        listener = servers.listen("127.0.0.1", 0)
        self.start(listener)
        address = wire.format_address("127.0.0.1", listener.getsockname()[1])
        self._about = {"epoch": EPOCH, "address": address}
        self._layout, self._token = layout.to_json(), token
        self.joined = threading.Event()

    def dial(self, registry: str) -> None:
        identity = Identity.of(self._token, RANK, str(self._rank))
        self.registry = RegistryClient(
            self._runtime, registry, identity, self._about, self._joined, lambda _message: None
        )
        self.registry.start()

    def _joined(self) -> None:
        self.registry.tell({"type": "layout", "layout": self._layout})
        self.joined.set()

    def snap(self, version: int) -> None:
        """Report a version whose checksums differ from those of the one before."""
        data = random.Random(version * RANKS + self._rank).randbytes(16 * self._count)
        table = self._checksum_tables[version + 1] = ChecksumTable(data, self._count)
        self._checksum_tables.pop(version - 3, None)
        about = {"serial": version + 1, "version": version}
        self.registry.tell({"type": "snapped", **about, "table": table.digest()})

    def buckets(self, rank: int) -> int | None:
        return self._count if rank == self._rank else None

    def most_buckets(self) -> int:
        return self._count

    def version(self, serial: int) -> int | None:
        return serial - 1 if serial in self._checksum_tables else None

    def has(self, serial: int, rank: int, bucket: int, base: int | None) -> bool:
        return bucket == CHECKSUM_TABLE

    def read(self, reader: Reader, bucket: int, base: int | None, again: bool) -> tuple[Message, memoryview]:
        return {}, memoryview(self._checksum_tables[reader.serial].data)


def layout_of(rank: int, buckets: int, parameters: int) -> Layout:
    """A rank's shards of so many matrices: RANKS rows each, of which it sends one."""
    columns = -(-buckets // RANKS) * BUCKET_BYTES // (2 * parameters)
    names = (f"model.layers.{number // 9}.self_attn.part_{number % 9}.weight" for number in range(parameters))
    table = ParameterTable.of([ParameterEntry(name, "bfloat16", (RANKS, columns)) for name in names])
    box = Box((rank, 0), (1, columns))
    return Layout(BUCKET_BYTES, table, (ShardTable.of(table, [(number, box) for number in range(parameters)]),))


def run_ranks(arguments: dict[str, Any]) -> None:
    """In a child: all shard servers; each line of standard input is a version to report."""
    runtime = SocketRuntime()
    ranks = [
        Server(runtime, layout_of(rank, arguments["buckets"], arguments["parameters"]), rank, arguments["token"])
        for rank in range(RANKS)
    ]
    for server in ranks:
        server.dial(arguments["registry"])
    runtime.start("ranks", lambda: None)
    # What a rank tells before it has joined is lost.
    common.wait_for(lambda: all(server.joined.is_set() for server in ranks), WAIT_SECONDS, "all ranks join")
    say({"ranks": RANKS})
    for line in sys.stdin:
        for server in ranks:
            runtime.post(partial(server.snap, json.loads(line)["version"]))


# The actors


class Crowd:
    """Many actors of one process. They read of a long message only its ends, so that what an actor does with it is not
    counted for all of them."""

    def __init__(self, registry: str, token: str, count: int):
        self.host, self.port = wire.parse_address(registry)
        self.token, self.count = token, count
        self.heard: dict[str, int] = {}
        """Actor -> the newest version that it has heard of"""
        self.tasks: set[asyncio.Task[None]] = set()

    async def join(self) -> None:
        """All of them, at once."""
        for number in range(self.count):
            self.dial(f"actor-{number:04d}")

    def dial(self, name: str) -> None:
        self.tasks.add(asyncio.get_running_loop().create_task(self.connect(name)))

    async def connect(self, name: str) -> None:
        """Connect, and connect again when it is lost."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            await loop.create_connection(lambda: Member(self, name), self.host, self.port)
            return
        await asyncio.sleep(wire.RETRY_SECONDS)
        await self.connect(name)


class Member(asyncio.Protocol):
    """One actor of a crowd."""

    transport: asyncio.Transport

    def __init__(self, crowd: Crowd, name: str):
        self.crowd, self.name = crowd, name
        self.identity = Identity.of(crowd.token, ACTOR, name)
        self.data = bytearray()
        self.told_at = self.heard_at = 0.0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, _error: Exception | None) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(wire.RETRY_SECONDS, self.crowd.dial, self.name)

    def data_received(self, data: bytes) -> None:
        self.data += data
        while len(self.data) >= 4:
            (length,) = wire.LENGTH.unpack_from(self.data)
            if len(self.data) < 4 + length:
                return
            ends = bytes(self.data[4 : min(4 + length, 1028)]), bytes(self.data[max(4, length - 300) : 4 + length])
            del self.data[: 4 + length]
            self.hear(*ends)

    def say(self, kind: str, **fields: Any) -> None:
        if not self.transport.is_closing():
            self.told_at = time.monotonic()
            self.transport.write(wire.encode({"type": kind, **fields}))

    def hear(self, begin: bytes, end: bytes) -> None:
        self.heard_at = time.monotonic()
        if begin.startswith(b'{"type":"challenge"'):
            nonce = secrets.token_hex(16)
            proof = self.identity.proof("client", json.loads(begin)["nonce"], nonce)
            about = {"epoch": EPOCH, "instance": self.name, "address": ""}
            self.say("hello", role=ACTOR, name=self.name, nonce=nonce, proof=proof, fields=about)
        elif begin.startswith(b'{"type":"welcome"'):
            self.beat()
        elif begin.startswith(b'{"type":"newest"'):
            found = re.search(rb'"version":(\d+).*?"digest":"(\w+)"', begin + end)
            if found is not None:
                self.take(int(found[1]), found[2].decode())

    def take(self, version: int, digest: str) -> None:
        """Pretend to pull it and to apply it."""
        first = self.name not in self.crowd.heard
        self.crowd.heard[self.name] = version
        if first:
            return
        loop = asyncio.get_running_loop()
        self.say("pulling", serial=version + 1, version=version)
        staged = random.uniform(0.0, SPREAD_SECONDS)
        figures = {"transfer_s": staged, "bytes_full": 1, "bytes_delta": 0, "bytes_relayed": 0, "source": "trainer"}
        figures |= {"apply_s": 0.01, "pause_s": 0.01}
        loop.call_later(staged, lambda: self.say("ended", version=version, outcome="staged", reason=""))
        loop.call_later(staged + 0.01, lambda: self.say("serving", version=version, digest=digest, figures=figures))

    def beat(self) -> None:
        if not self.transport.is_closing():
            # As RegistryClient does.
            if time.monotonic() - min(self.told_at, self.heard_at) >= 2 * wire.HEARTBEAT_SECONDS:
                self.say("ping")
            asyncio.get_running_loop().call_later(wire.HEARTBEAT_SECONDS, self.beat)


def run_actors(arguments: dict[str, Any]) -> None:
    """In a child: the crowd. A line of standard input has it join; it answers when all have heard of a version."""
    allow_open_files()
    crowd = Crowd(arguments["registry"], arguments["token"], arguments["actors"])
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    say({"actors": crowd.count})
    sys.stdin.readline()
    start = time.perf_counter()
    asyncio.run_coroutine_threadsafe(crowd.join(), loop)
    while len(crowd.heard) < crowd.count:
        time.sleep(0.01)
    say({"join_storm_s": time.perf_counter() - start})
    sys.stdin.read()


class TimedPuller(Puller):
    """Notes how much of a core it takes from a version's announcement to its last request for a bucket."""

    asked: Callable[[], None]
    first = 0.0
    took = 0.0

    def _on_newest(self, message: Message) -> None:
        self.first = time.thread_time()
        self.wanted = set(range(RANKS))
        super()._on_newest(message)

    def requests(self, source: ShardServerConnection) -> list[Message]:
        found = super().requests(source)
        if any(last > 0 for request in found for _first, last in request["buckets"]):
            self.wanted.discard(source.rank)
            if not self.wanted:
                self.took = time.thread_time() - self.first
        return found


class NoEngine:
    """Has no memory, because no bytes come."""

    def __init__(self) -> None:
        self.held: dict[BucketKey, int] = {}
        self.held_live: dict[BucketKey, int] = {}

    def prepare(self, layout: Layout, _message: Message) -> Collection[BucketKey]:
        return layout.bucket_keys()

    def choose_memory(self) -> bool:
        return True


def run_puller(arguments: dict[str, Any]) -> None:
    """In a child: a real puller; it answers each line with what the last version has taken."""
    runtime = SocketRuntime()
    identity = Identity.of(arguments["token"], ACTOR, PULLER)
    puller = TimedPuller(runtime, arguments["registry"], identity, EPOCH, NoEngine())  # type: ignore[arg-type]
    runtime.start("puller", puller.start)
    say({})
    for _line in sys.stdin:
        say({"took": puller.took})


# The benchmark


class CountingWatcher(Watcher):
    """Counts what it is told, in bytes."""

    bytes = 0

    def _on_message(self, message: Message) -> None:
        self.bytes += len(wire.encode(message))
        super()._on_message(message)


def measure(run: Run) -> dict[str, float]:
    allow_open_files()
    options, folder, closing = run.options, run.folder, run.closing
    token, notes = secrets.token_urlsafe(16), folder / "publications"
    sync_folder = folder / "weight_sync"
    sync_folder.mkdir()
    settings = RegistrySettings(RANKS, lease_s=600.0, snapshot_timeout_s=600.0)
    servers.MODULE = timed_registry.__name__
    os.environ[timed_registry.VARIABLE] = str(notes)
    transport = load_transport("tcp")({})
    registry = servers.RegistryServer(EPOCH, token, settings, sync_folder, ("127.0.0.1", 0, 3), transport)
    closing.callback(lambda: registry.close(time.monotonic() + 5.0))
    watcher = CountingWatcher(registry.address, token, EPOCH)
    closing.callback(watcher.close, 5.0)
    about = {name: getattr(options, name) for name in ("buckets", "actors", "parameters")}
    about |= {"registry": registry.address, "token": token}
    ranks, actors, puller = (Child(part, about) for part in (run_ranks, run_actors, run_puller))
    for child in (ranks, actors, puller):
        closing.callback(child.close)
        child.answer()
    metrics = SyncMetrics(folder)
    sync: Any = object.__new__(WeightSync)  # as far as the trainer asks it about actors
    sync.registry, sync.watcher, sync.boundary = registry, watcher, SimpleNamespace(skipped=0)
    sync._stall_s = sync._snapshot_s = 0.0
    sync._taken, sync._published_count, sync._overtaken = {}, 0, []
    closing.callback(metrics.close)

    def publish(version: int) -> None:
        ranks.tell({"version": version})
        common.wait_for(lambda: watcher.status()["newest"] == version, WAIT_SECONDS, f"version {version} is published")

    publish(0)
    common.progress("a version is there; all join")
    actors.tell({})
    figures = {"join_storm_s": actors.answer()["join_storm_s"]}
    time.sleep(1.0)
    steps: list[float] = []
    process = psutil.Process(registry.process.pid)
    notes.write_text("")
    time_before, bytes_before = sum(process.cpu_times()[:2]), watcher.bytes
    pulls: list[float] = []
    start = time.monotonic()
    for version in range(1, options.versions + 1):
        publish(version)
        time.sleep(max(0.0, start + version - time.monotonic()))
        row = {"policy_version": version, "step": version}
        steps.append(common.timed(lambda row=row: (metrics.step_behind(row), sync.statistics(), sync.states())))
        puller.tell({})
        pulls.append(puller.answer()["took"])
        if not pulls[-1]:
            raise SystemExit(f"the puller has not asked for all buckets of version {version}")
    seconds = time.monotonic() - start
    figures["registry_share"] = (sum(process.cpu_times()[:2]) - time_before) / seconds
    figures["status_bytes_s"] = (watcher.bytes - bytes_before) / seconds
    took = [tuple(map(float, line.split())) for line in notes.read_text().splitlines()]
    figures["publish_block_ms"], figures["publish_wall_ms"] = (1e3 * max(column) for column in zip(*took, strict=True))
    figures["step_ms"] = 1e3 * statistics.median(steps)
    figures["actor_start_pull_ms"] = 1e3 * statistics.median(pulls)
    figures["registry_deaths"] = registry.restarts
    figures["seconds_per_version"] = seconds / options.versions
    figures["journal_bytes_per_version"] = (sync_folder / "registry.jsonl").stat().st_size / (options.versions + 1)
    return figures
