"""A puller alone, between a registry and shard servers that say what a test has them say."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import pytest
import xxhash

from tests.deterministic.machine import Machine, Process
from tests.deterministic.parts import BUCKET_BYTES, REGISTRY, TOKEN, content, whole_layout
from torchtitan.weight_sync.actor.puller import MAX_CORRUPTIONS, PEER_SECONDS, Puller, Served
from torchtitan.weight_sync.memory.manifest import BucketKey, ChecksumTable, Layout, Manifest, WeightsRefused
from torchtitan.weight_sync.memory.transfer import CHECKSUM_TABLE, RELAY_SECONDS, TransferTarget
from torchtitan.weight_sync.wire.clients import RegistryClient
from torchtitan.weight_sync.wire.handshake import ACTOR, PEER, Acceptor, Identity, role_key
from torchtitan.weight_sync.wire.runtime import Channel, Message, ProtocolError

BUCKETS, SERVER, OTHER = 2, "10.0.0.1:6000", "10.0.1.2:7000"
LAYOUT = whole_layout(1, BUCKETS)


class Server:
    """Listens, lets in those with the right key, and notes what it hears; `channel` is the newest one."""

    def __init__(self, machine: Machine, address: str, role: str, fields: Message):
        self.machine, self.fields = machine, fields
        self.heard: list[Message] = []
        self.bytes: int | None = None
        """What the last ping has said"""
        self.checksum_tables: dict[int, bytes] = {}
        """By serial: it answers a request for one at once, and says nothing of it"""
        self.channels: list[Channel] = []
        self.process = Process(machine, address)
        admit = lambda _identity, _fields: fields  # noqa: E731
        self.acceptor = Acceptor(self.process.runtime, frozenset((role,)), TOKEN, admit, self._enter)
        self.process.runtime.listen(address, self.acceptor.accept)

    def _enter(self, channel: Channel, _identity: Identity, _fields: Message) -> None:
        self.channels.append(channel)
        channel.on_message = self._on_message

    def _on_message(self, channel: Channel, message: Message) -> None:
        if message["type"] == "ping":
            self.bytes = message.get("bytes")
            channel.send({"type": "pong"})
        elif message.get("buckets") == [[CHECKSUM_TABLE, 0]] and (table := self.checksum_tables.get(message["serial"])):
            about = {"type": "bucket", "pull": message["pull"], "rank": 0, "bucket": CHECKSUM_TABLE}
            channel.send(about, memoryview(table))
        else:
            self.heard.append(message)

    def say(self, kind: str, payload: bytes | None = None, **fields: Any) -> None:
        """Over the newest channel; then things happen for 50 ms."""
        self.channels[-1].send({"type": kind, **fields}, None if payload is None else memoryview(payload))
        self.machine.run(self.machine.now + 0.05)

    def last(self, kind: str) -> Message:
        return next(message for message in reversed(self.heard) if message["type"] == kind)

    def count(self, kind: str) -> int:
        return sum(message["type"] == kind for message in self.heard)


class StagingInBytes:
    """What there is to staging memory that is no engine's."""

    def __init__(self) -> None:
        self.held: dict[BucketKey, int] = {}
        self.held_live: dict[BucketKey, int] = {}

    def choose_memory(self) -> bool:
        return True

    def release(self) -> None:
        raise NotImplementedError("no engine gives it back")

    def linked(self, channel: Channel, message: Message) -> None:
        raise NotImplementedError("there are no links")


class World(StagingInBytes):
    """The puller is its own engine: memory, and what it has applied."""

    def __init__(
        self,
        needs: list[BucketKey] | None = None,
        rank: int = 0,
        served: Served | None = None,
        progress_s: float = 5.0,
        engine: TransferTarget | None = None,
    ):
        super().__init__()
        self.machine, self.needs, self.progress_s = Machine(0), needs, progress_s
        self.registry = Server(self.machine, REGISTRY, ACTOR, {"term": 1})
        self.server = Server(self.machine, SERVER, ACTOR, {"rank": rank})
        self.checksum_tables = self.server.checksum_tables
        self.staging = bytearray(BUCKETS * BUCKET_BYTES)
        self.applied: list[int] = []
        self.fetched: list[Any] = []
        self.process = Process(self.machine, "a")
        identity = Identity.of(TOKEN, ACTOR, "a")
        self.puller = Puller(self.process.runtime, REGISTRY, identity, "e1", engine or self, served=served)
        self.puller.start()
        self.run(0.1)
        self.model(SERVER)

    def model(self, server: str) -> None:
        """The registry says what there is, and where."""
        about = {"layout_id": LAYOUT.layout_id(), "layout": LAYOUT.to_json(), "progress_s": self.progress_s}
        about["over_channel"] = True
        self.registry.say("model", **about, servers=[server])

    def live(self, newest: int, **fields: Any) -> None:
        """The registry says what lives."""
        self.registry.say("live", **{"newest": newest, "retained": [], "room": True, "dropped": [], **fields})

    def prepare(self, layout: Layout, _message: Message) -> list[BucketKey]:
        return layout.bucket_keys() if self.needs is None else self.needs

    def pieces(self, key: BucketKey) -> list[memoryview]:
        return [memoryview(self.staging)[key[1] * BUCKET_BYTES : (key[1] + 1) * BUCKET_BYTES]]

    def fetch(self, key: tuple[int, int], reference: Message) -> str:
        found = self.fetched.pop(0)
        if isinstance(found, Exception):
            raise found
        return str(found)

    def patch(self, key: BucketKey, delta: memoryview, in_place: bool) -> str:
        raise NotImplementedError("it is sent whole buckets")

    def apply(self, manifest: Manifest) -> dict[str, float]:
        self.applied.append(manifest.version)
        return {"pause_s": 0.5}

    def run(self, seconds: float) -> None:
        self.machine.run(self.machine.now + seconds)

    def newest(self, serial: int, version: int, **fields: Any) -> Manifest:
        """The registry publishes a version."""
        buckets = [bucket_of(version, bucket) for bucket in range(BUCKETS)]
        digests = [hashlib.sha256(bucket).hexdigest() for bucket in buckets] if fields.pop("digests", True) else []
        # The bytes that have the checksums of the version may be others than those that have its digests.
        sums = [xxhash.xxh3_128_hexdigest(bucket) for bucket in fields.pop("checked", buckets)]
        table = ChecksumTable.of(sums, digests)
        if not fields.pop("keep_table", False):
            self.checksum_tables[serial] = table.data
        manifest = Manifest.of("e1", version, LAYOUT.layout_id(), [table.digest()])
        live = {"newest": serial, "retained": [], "room": True, "dropped": []}
        self.registry.say("newest", **{**manifest.to_json(), **live, **fields})
        return manifest

    def table(self) -> ChecksumTable:
        """The checksums of the newest version."""
        return ChecksumTable(self.checksum_tables[max(self.checksum_tables)], BUCKETS)

    def send(
        self, version: int, bucket: int, server: Server | None = None, data: bytes | None = None, **fields: Any
    ) -> None:
        """A shard server answers the last request with a bucket."""
        server = server or self.server
        pull = server.last("open")["pull"]
        server.say("bucket", data or bucket_of(version, bucket), pull=pull, rank=0, bucket=bucket, **fields)

    def send_all(self, version: int, server: Server | None = None) -> None:
        for bucket in range(BUCKETS):
            self.send(version, bucket, server)
        self.run(0.1)


def pulling() -> World:
    """It pulls a first version."""
    world = World()
    world.newest(1, 0)
    return world


def bucket_of(version: int, bucket: int) -> bytes:
    return content("e1", version, 0, BUCKETS)[bucket * BUCKET_BYTES : (bucket + 1) * BUCKET_BYTES]


def test_version_is_pulled_applied_and_told() -> None:
    world = World()
    assert world.puller.state == "joining"
    manifest = world.newest(5, 3)
    assert world.puller.state == "pulling" and world.registry.last("pulling")["serial"] == 5
    assert world.server.last("open") == {"type": "open", "pull": 1, "serial": 5, "buckets": [[0, 2]]}
    world.send(3, 0)
    world.run(1.0)
    assert world.registry.bytes == BUCKET_BYTES and not world.applied
    world.send(3, 1)
    world.run(0.1)
    assert world.applied == [3] and world.puller.state == "ready"
    assert world.registry.last("ended")["outcome"] == "staged"
    serving = world.registry.last("serving")
    assert (serving["version"], serving["digest"]) == (3, manifest.digest)
    figures = serving["figures"]
    assert (figures["bytes_full"], figures["bytes_relayed"], figures["pause_s"]) == (2 * BUCKET_BYTES, 0, 0.5)
    assert figures["transfer_s"] > 1.0 and figures["apply_s"] < 0.1
    # The same version again, and what is published while it is pinned, is not pulled.
    world.newest(6, 3)
    world.live(6, pinned=3)
    world.newest(7, 4)
    assert world.server.count("open") == 1
    world.live(7)
    assert world.server.count("open") == 1
    # One that knows nothing yet but the pin.
    world.live(-1, pinned=None)
    assert world.server.last("open")["serial"] == 7


def test_worker_that_needs_nothing_applies_at_once() -> None:
    world = World(needs=[])
    world.newest(1, 0)
    world.run(0.1)
    assert world.applied == [0] and world.server.count("open") == 0


@pytest.mark.parametrize(("epoch", "told"), [("e1", 1), ("e0", 0)])
def test_a_version_that_the_engine_holds_is_reported_if_it_is_of_this_launch(epoch: str, told: int) -> None:
    manifest = World().newest(1, 3)
    world = World(served=Served(epoch, 3, manifest.digest))
    assert world.registry.count("serving") == told
    world.newest(1, 3)
    assert world.server.count("open") == 1 - told


def test_poisoned_actor_says_so_to_each_registry() -> None:
    world = World(served=Served("e1", 3, "d3"))
    world.puller.poison_version(2, "another version")
    assert not world.puller.poisoned
    world.puller.poison_version(3, "layer 3 differs")
    world.run(0.1)
    assert world.puller.state == "poisoned" and world.registry.last("poisoned")["version"] == 3
    world.registry.channels[-1].close("killed")
    world.run(1.0)
    assert world.registry.count("poisoned") == 2 and world.registry.count("serving") == 1


def test_server_out_of_reach_is_tried_less_and_less_often() -> None:
    world, dials = World(), list[float]()
    dial = world.puller._runtime.dial

    def noted(*arguments: Any) -> Any:
        dials.append(world.machine.now)
        return dial(*arguments)

    world.puller._runtime.dial = noted  # type: ignore[method-assign]
    away = world.machine.listeners.pop(SERVER)
    world.newest(1, 0)
    world.run(4.5)
    pauses = [after - before for before, after in itertools.pairwise(dials)]
    assert pauses == pytest.approx([0.0, 0.2, 0.6, 1.4, 2.0], abs=0.02)
    # What has brought a bucket is asked again at once.
    world.machine.listeners[SERVER] = away
    world.run(3.0)
    world.send(0, 0)
    tried = len(dials)
    world.server.channels[-1].close("killed")
    world.run(0.1)
    assert len(dials) == tried + 1


def test_superseded_pull_is_given_up_unless_it_is_retained() -> None:
    world = pulling()
    world.newest(2, 1, retained=[1])
    assert world.server.count("open") == 1
    world.live(-1)  # of a registry that has published nothing yet
    assert world.server.count("open") == 1
    world.live(2)
    assert world.registry.last("ended")["outcome"] == "gone" and world.server.last("open")["serial"] == 2
    # Twice in a row is slow: it waits for room.
    world.newest(3, 2, room=False)
    assert world.registry.count("ended") == 2 and world.server.count("open") == 2 and world.puller.state == "joining"
    world.live(3, retained=[2], room=False)
    assert world.server.count("open") == 2
    world.live(3)
    assert world.server.last("open")["serial"] == 3
    # A whole version, and it is as fast as others.
    world.send_all(2)
    world.newest(4, 3)
    world.newest(5, 4, room=False)
    assert world.server.last("open")["serial"] == 5


def test_a_snapshot_that_is_gone_is_requested_again_after_a_pause() -> None:
    world = pulling()
    world.server.say("gone", pull=99)
    assert world.registry.count("ended") == 0
    world.server.say("gone", pull=1)
    assert world.registry.last("ended")["outcome"] == "gone" and world.puller.state == "joining"
    world.run(0.8)
    assert world.server.count("open") == 1
    world.run(0.8)
    assert world.server.last("open")["pull"] == 2
    # Something newer is, and pauses grow.
    world.server.say("gone", pull=2)
    world.newest(2, 1)
    assert world.server.last("open")["serial"] == 2
    world.server.say("gone", pull=3)
    world.run(3.8)
    assert world.server.count("open") == 3
    world.run(0.8)
    assert world.server.count("open") == 4


class Refusing(World):
    """Its engine raises `error` instead of taking a version, if there is one."""

    error: Exception | None = None

    def apply(self, manifest: Manifest) -> dict[str, float]:
        if self.error is not None:
            raise self.error
        return super().apply(manifest)

    def fail(self, version: int, pause_s: float) -> None:
        """The version comes and is not taken; it is pulled again after this pause, and not before."""
        pulls = self.server.count("open")
        self.send_all(version)
        self.run(pause_s - 0.5)
        assert self.server.count("open") == pulls
        self.run(1.2)
        assert self.server.count("open") == pulls + 1


@pytest.mark.parametrize(
    "error", [RuntimeError("half of it is copied"), WeightsRefused("the engine is asleep")], ids=["half", "refused"]
)
def test_version_that_the_engine_does_not_take_is_pulled_less_and_less_often(error: Exception) -> None:
    world = Refusing()
    world.error = error
    world.newest(1, 0)
    for pause_s in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        world.fail(0, pause_s)
    # Something newer is pulled at once, and what is taken at last ends the row of failures.
    pulls = world.server.count("open")
    world.newest(2, 1)
    assert world.server.count("open") == pulls + 1
    world.error = None
    world.send_all(1)
    assert world.applied == [1]
    world.error = error
    world.newest(3, 2)
    world.fail(2, 1.0)


def test_damaged_bucket_is_asked_for_alone_and_three_times_ends_the_pull() -> None:
    world = pulling()
    world.send(0, 1, data=bytes(BUCKET_BYTES))
    assert world.server.last("open")["buckets"] == [[1, 2]] and world.puller.corrupted == 1
    world.send(0, 0)
    world.send(0, 1, data=bytes(BUCKET_BYTES))
    world.send(0, 1, data=bytes(BUCKET_BYTES))
    ended = world.registry.last("ended")
    assert ended["outcome"] == "refused" and "bucket 1 of rank 0 was corrupt 3 times" in ended["reason"]
    assert world.puller.corrupted == 3 and not world.applied
    # That was not for being slow: one version that goes away under a pull after it is the first.
    world.newest(2, 1)
    world.run(3.0)
    world.newest(3, 2, room=False)
    assert world.server.last("open")["serial"] == 3


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"rank": 1, "bucket": 0}, "came from rank 0"),
        ({"rank": 0, "bucket": 7}, "not asked for"),
        ({"rank": 0, "bucket": 0}, "sent twice"),
    ],
)
def test_server_that_sends_what_was_not_asked_for_is_hung_up_on(fields: dict[str, Any], reason: str) -> None:
    world = pulling()
    world.send(0, 0)
    channel = world.server.channels[-1]
    world.server.say("bucket", bucket_of(0, 1), pull=1, **fields)
    assert channel.closed and reason in world.machine.protocol_errors[-1]
    # It goes on over another one, with what is missing.
    world.run(0.1)
    assert world.server.last("open")["buckets"] == [[1, 2]] and len(world.server.channels) == 2


def test_bucket_of_a_pull_that_is_over_is_not_written() -> None:
    world = pulling()
    world.newest(2, 1)
    before = bytes(world.staging)
    world.server.say("bucket", bucket_of(0, 0), pull=1, rank=0, bucket=0)
    assert bytes(world.staging) == before and not world.machine.protocol_errors
    # One more may be on its way where only a reference comes, and what it leads to is left alone: the channel is good.
    world.server.say("bucket", pull=1, rank=0, bucket=1, reference={"slot": 0})
    assert not world.server.channels[-1].closed and world.server.count("open") == 2


def test_pull_that_stands_still_asks_again_over_a_new_channel() -> None:
    world = World(progress_s=2.0)
    world.newest(1, 0)
    world.send(0, 0)
    world.run(1.5)
    assert len(world.server.channels) == 1
    world.run(1.5)
    assert len(world.server.channels) == 2 and world.server.last("open")["buckets"] == [[1, 2]]
    world.run(1.0)
    assert len(world.server.channels) == 2


def test_reference_is_fetched_and_asked_for_again_where_only_the_way_was_broken() -> None:
    world = pulling()
    first, second = world.table()[0], world.table()[1]
    world.fetched = [ConnectionError("timed out"), first, RuntimeError("no file"), second]
    for bucket in (0, 0, 1):
        world.server.say("bucket", pull=1, rank=0, bucket=bucket, reference={})
        world.run(0.1)
        assert world.server.last("open")["buckets"] == ([[1, 2]] if bucket else [[0, 1]])
    assert world.puller.corrupted == 1
    world.server.say("bucket", pull=1, rank=0, bucket=1, reference={})
    world.run(0.2)
    assert world.applied == [0] and not world.fetched


@pytest.mark.parametrize("name", ["fetch", "apply"])
def test_thread_that_the_system_refuses_once_is_asked_for_again(name: str) -> None:
    world = pulling()
    work, refused = world.puller._runtime.work, list[str]()

    def scarce(thread: str, *arguments: Any) -> None:
        if thread == name and not refused:
            refused.append(thread)
            # It ends the channel: over sockets any exception does, on this machine this one.
            raise ProtocolError("can't start new thread")
        work(thread, *arguments)

    world.puller._runtime.work = scarce  # type: ignore[method-assign]
    if name == "fetch":
        world.fetched = [world.table()[0]]
        for _ in range(2):
            world.server.say("bucket", pull=1, rank=0, bucket=0, reference={})
            world.run(0.3)
        world.send(0, 1)
    else:
        world.send_all(0)
    world.run(1.0)
    assert refused == [name] and world.applied == [0]


def test_registry_of_an_earlier_term_is_not_joined() -> None:
    world = World(served=Served("e1", 3, "d3"))
    for term, count in ((2, 2), (1, 2), (3, 3)):
        world.registry.fields["term"] = term
        world.registry.channels[-1].close("killed")
        world.run(1.0)
        assert (world.registry.count("serving"), world.registry.channels[-1].closed) == (count, term == 1)


@pytest.mark.parametrize(("comes_after_s", "gives_up"), [(4.0, False), (20.0, True)])
def test_registry_that_comes_after_a_client_has_given_up_is_not_dialled(comes_after_s: float, gives_up: bool) -> None:
    machine, joined = Machine(0), list[float]()
    identity, join = Identity.of(TOKEN, ACTOR, "a"), lambda: joined.append(machine.now)
    runtime = Process(machine, "a").runtime
    client = RegistryClient(runtime, REGISTRY, identity, {}, join, lambda _message: None, retry_for_s=10.0)
    client.start()
    machine.run(comes_after_s)
    assert bool(client.failure) is gives_up
    Server(machine, REGISTRY, ACTOR, {"term": 1})
    machine.run(60.0)
    assert client.connected is bool(joined) is not gives_up and bool(client.failure) is gives_up


def test_shard_server_of_another_rank_is_not_believed() -> None:
    world = World(rank=3)
    world.newest(1, 0)
    world.run(3.0)
    assert world.server.count("open") == 0 and world.puller.state == "pulling"
    # It is tried again, more and more seldom.
    assert 3 <= len(world.server.channels) <= 6 and all(channel.closed for channel in world.server.channels)
    world.run(10.0)
    assert len(world.server.channels) <= 11


def test_shard_server_that_moves_is_followed() -> None:
    world = pulling()
    moved = Server(world.machine, "10.0.0.9:6000", ACTOR, {"rank": 0})
    moved.checksum_tables = world.checksum_tables
    world.model("10.0.0.9:6000")
    assert moved.last("open")["buckets"] == [[0, 2]] and world.server.channels[-1].closed
    world.send(0, 0, moved)
    world.model("10.0.0.9:6000")
    assert len(moved.channels) == 1 and not moved.channels[0].closed


def beside_a_peer() -> tuple[World, Server, Message]:
    """Another actor, and how the registry offers it."""
    world, key = World(), role_key(TOKEN, PEER, "a")
    peer = Server(world.machine, OTHER, PEER, {"rank": 0})
    peer.checksum_tables = world.checksum_tables
    return world, peer, {"name": "b", "address": OTHER, "key": key, "fanout": 1}


def test_pull_from_another_actor_is_counted_as_such() -> None:
    world, peer, source = beside_a_peer()
    world.newest(1, 0, source=source)
    world.send_all(0, peer)
    figures = world.registry.last("serving")["figures"]
    assert (figures["bytes_full"], figures["bytes_relayed"], figures["source"]) == (0, 2 * BUCKET_BYTES, "b")
    assert world.server.count("open") == 0
    world.newest(2, 1)
    assert world.server.last("open")["serial"] == 2


@pytest.mark.parametrize("how", ["gone", "late", "lost", "corrupt"])
def test_actor_that_is_let_down_by_another_one_goes_on_at_the_trainer(how: str) -> None:
    world, peer, source = beside_a_peer()
    world.newest(1, 0, source=source)
    world.send(0, 0, peer)
    if how == "gone":
        peer.say("gone", pull=1)
    elif how == "lost":
        peer.process.kill()
    elif how == "corrupt":
        world.send(0, 1, peer, data=bytes(BUCKET_BYTES))
    else:
        world.run(PEER_SECONDS - 0.3)
        assert world.server.count("open") == 0
    world.run(0.2 if how != "late" else 1.0)
    assert world.server.last("open")["buckets"] == [[1, 2]] and world.registry.count("ended") == 0
    world.send(0, 1)
    world.run(0.1)
    figures = world.registry.last("serving")["figures"]
    assert world.applied == [0] and figures["bytes_relayed"] >= BUCKET_BYTES
    assert figures["corrupt_buckets"] == (how == "corrupt")


def test_actor_that_relays_much_more_slowly_than_the_trainer_is_left() -> None:
    """A byte comes often enough, but after two seconds there is less than its share of what the trainer sent."""
    world, _peer, source = beside_a_peer()
    world.newest(1, 0)
    world.server.process.rate = world.process.rate = BUCKETS * BUCKET_BYTES / 0.4
    world.send_all(0)
    world.run(1.0)
    assert world.applied == [0] and world.puller._direct_rate > 0
    world.newest(2, 1, source=source)
    pull = world.puller.transfer
    assert pull is not None and pull.source == "b"
    started_at = world.machine.now
    while world.server.count("open") == 1 and world.machine.now < started_at + 10.0:
        pull.count(1, False, world.machine.now)
        world.run(0.5)
    assert RELAY_SECONDS < world.machine.now - started_at < RELAY_SECONDS + 1.5
    assert world.server.last("open")["serial"] == 2 and world.puller.transfer is pull and pull.source == ""


@pytest.mark.parametrize("fanout", [1, 2, 4])
def test_actor_that_relays_to_several_is_not_left_for_sending_each_its_share(fanout: int) -> None:
    world, _peer, source = beside_a_peer()
    world.newest(1, 0, source={**source, "fanout": fanout})
    pull = world.puller.transfer
    assert pull is not None
    # The trainer sent 1,000 bytes per second to this actor alone.
    pull.received["bytes_relayed"] = 10_000 // (4 * fanout)
    assert not pull.lags(1000.0, pull.started + RELAY_SECONDS + 10.0)
    assert pull.lags(1000.0, pull.started + RELAY_SECONDS + 10.1)


def test_connection_to_another_actor_that_is_reset_is_made_again() -> None:
    world, peer, source = beside_a_peer()
    world.newest(1, 0, source=source)
    world.send(0, 0, peer)
    peer.channels[-1].close("reset")
    world.run(0.2)
    assert peer.last("open")["buckets"] == [[1, 2]] and world.server.count("open") == 0
    world.send(0, 1, peer)
    world.run(0.1)
    assert world.applied == [0] and world.registry.last("serving")["figures"]["source"] == "b"


def test_relayed_bytes_with_the_right_checksum_alone_are_refused_and_told() -> None:
    world, peer, source = beside_a_peer()
    forged = bytes(BUCKET_BYTES)
    world.newest(1, 0, source=source, checked=[bucket_of(0, 0), forged])
    world.send(0, 0, peer)
    world.send(0, 1, peer, data=forged)
    world.run(0.1)
    report = world.registry.last("forged")
    assert (report["source"], report["version"]) == ("b", 0) and not world.applied
    assert world.server.last("open")["buckets"] == [[1, 2]]
    # Nothing that another actor relays is believed where it cannot be checked.
    world, peer, source = beside_a_peer()
    world.newest(1, 0, source=source, digests=False)
    world.send(0, 0, peer)
    world.run(0.1)
    assert [message["buckets"] for message in world.server.heard] == [[[0, 1]], [[1, 2]]]


def test_a_damaged_table_is_asked_for_again_and_ends_the_pull_in_the_end() -> None:
    world = pulling()
    good = world.checksum_tables[1]
    world = World()
    world.checksum_tables[1] = bytes(len(good))
    world.newest(1, 0, keep_table=True)
    assert world.puller.corrupted == MAX_CORRUPTIONS and world.registry.last("ended")["outcome"] == "refused"
    assert "bucket -1 of rank 0" in world.registry.last("ended")["reason"] and not world.applied
    # Each time over a new connection: of the old one, buckets that cannot be verified may follow.
    assert len(world.server.channels) == MAX_CORRUPTIONS and world.server.count("open") == MAX_CORRUPTIONS
    assert [channel.closed for channel in world.server.channels] == [True] * (MAX_CORRUPTIONS - 1) + [False]
    world.checksum_tables[1] = good
    world.run(1.5)
    world.send_all(0)
    assert world.applied == [0]


@pytest.mark.parametrize(
    ("message", "payload", "said"),
    [
        ({"bucket": CHECKSUM_TABLE, "reference": {"slot": 0}}, None, "come over the channel"),
        ({"bucket": CHECKSUM_TABLE}, bytes(3 * 16), "48 bytes are not the checksums"),
        ({"bucket": 0}, bytes(BUCKET_BYTES), "came before its checksum"),
        ({"bucket": CHECKSUM_TABLE, "base": 0}, bytes(2 * 16), "a delta of bucket -1"),
    ],
)
def test_checksums_come_first_whole_and_as_bytes(message: Message, payload: bytes | None, said: str) -> None:
    world = World()
    world.newest(1, 0, keep_table=True)
    world.server.say("bucket", payload, pull=1, rank=0, **message)
    assert said in world.machine.protocol_errors[-1] and world.server.channels[0].closed


def test_registry_that_makes_no_sense_is_hung_up_on() -> None:
    for kind, fields, reason in (
        ("look", {}, "does not send"),
        ("newest", {"epoch": "e0"}, "of epoch e0"),
        ("model", {"layout_id": "b", "layout": {}, "servers": [SERVER], "progress_s": 5.0}, "another layout"),
        ("newest", {"table_digests": ["aa"]}, ""),
    ):
        world = World()
        channel = world.registry.channels[-1]
        if kind == "newest":
            world.newest(1, 0, **fields)
        else:
            world.registry.say(kind, **fields)
        assert channel.closed and reason in world.machine.protocol_errors[-1] and world.server.count("open") == 0


def test_actor_that_ends_closes_everything() -> None:
    world = pulling()
    world.puller.close()
    world.run(1.0)
    assert world.registry.channels[-1].closed and world.server.channels[-1].closed
    assert len(world.registry.channels) == len(world.server.channels) == 1
