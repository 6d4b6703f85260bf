"""A shard server alone, between a registry and actors that say what a test has them say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash

from tests.deterministic.machine import Machine, Process
from tests.deterministic.parts import BUCKET_BYTES, REGISTRY, TOKEN, Rank, Shape, content
from tests.unit_tests.weight_sync.clients import Client
from torchtitan.weight_sync.memory.manifest import ChecksumTable
from torchtitan.weight_sync.memory.transfer import CHECKSUM_TABLE, Transfer
from torchtitan.weight_sync.trainer.shard_server import MAX_BUCKET_SECONDS
from torchtitan.weight_sync.transports import bucket_server
from torchtitan.weight_sync.transports.bucket_server import IDLE_SECONDS
from torchtitan.weight_sync.wire import runtime as wire
from torchtitan.weight_sync.wire.handshake import ACTOR, RANK, Acceptor, Identity
from torchtitan.weight_sync.wire.runtime import Channel, Message

BUCKETS = 4


class World:
    """One rank with its shard server; `told` is what the registry has heard."""

    def __init__(self, lease_s: float = 60.0, connections: int = 1):
        self.machine = Machine(0)
        self.told: list[Message] = []
        self.channel: Channel | None = None
        self.registry = Process(self.machine, REGISTRY)
        admit = lambda _identity, _fields: {"term": 1}  # noqa: E731
        acceptor = Acceptor(self.registry.runtime, frozenset((RANK,)), TOKEN, admit, self._enter)
        self.registry.runtime.listen(REGISTRY, acceptor.accept)
        shape = Shape(ranks=1, buckets=BUCKETS, slots=4, lease_s=lease_s, connections=connections)
        self.rank = Rank(self.machine, shape, 0)
        self.rank.serve()
        self.run(0.1)

    def _enter(self, channel: Channel, _identity: Identity, _fields: Message) -> None:
        self.channel = channel
        channel.on_message = self._on_message

    def _on_message(self, channel: Channel, message: Message) -> None:
        if message["type"] == "ping":
            channel.send({"type": "pong"})
        else:
            self.told.append(message)

    def run(self, seconds: float) -> None:
        self.machine.run(self.machine.now + seconds)

    def live(self, newest: int, retained: tuple[int, ...] = (), dropped: tuple[int, ...] = ()) -> None:
        """What the registry says."""
        assert self.channel is not None
        fields = {"newest": newest, "retained": list(retained), "room": not retained, "dropped": list(dropped)}
        self.channel.send({"type": "live", **fields})
        self.run(0.05)

    def fill(self, version: int) -> int:
        """The trainer takes a snapshot; its serial."""
        assert self.rank.boundary.reserve()
        self.rank.boundary.commit(version, 0)
        self.run(0.1)
        return self.rank.boundary.serial

    def actor(self, name: str = "a", rate: float = 1e9, **fields: Any) -> Client:
        client = Client(self.machine, self.rank.address, ACTOR, name, beats=False, **{"rank": 0, **fields})
        client.process.rate = rate
        return client

    def told_of(self, kind: str) -> list[Message]:
        return [message for message in self.told if message["type"] == kind]

    def serials(self) -> list[int]:
        return sorted(self.rank.server.live.filled())


def sent_buckets(client: Client, pull: int) -> list[int]:
    return [m["bucket"] for m in client.heard if m["type"] == "bucket" and m["pull"] == pull]


def test_registry_hears_layout_and_checksums_and_again_after_it_was_lost() -> None:
    world = World()
    assert [message["type"] for message in world.told] == ["layout"]
    first, second = world.fill(0), world.fill(1)
    (snapshot, other) = world.told_of("snapped")
    data = content("e1", 0, 0, BUCKETS)
    sums = [xxhash.xxh3_128_hexdigest(data[i : i + BUCKET_BYTES]) for i in range(0, len(data), BUCKET_BYTES)]
    assert (snapshot["serial"], snapshot["version"], snapshot["table"]) == (first, 0, ChecksumTable.of(sums).digest())
    assert (other["serial"], other["version"]) == (second, 1)
    world.told.clear()
    assert world.channel is not None
    world.channel.close("killed")
    world.run(1.0)
    # The newest first: what is published of the others is known to be older then.
    assert [message["type"] for message in world.told] == ["layout", "snapped", "snapped"]
    assert [message["serial"] for message in world.told_of("snapped")] == [second, first]


def test_a_failed_snapshot_is_reported_once_to_each_registry() -> None:
    world = World()
    world.rank.fail(0, 1)
    world.rank.fail(0, 2)
    world.run(1.0)
    assert [message["serial"] for message in world.told_of("failed")] == [1, 2]
    assert world.channel is not None
    world.channel.close("killed")
    world.rank.fail(0, 3)
    world.run(1.0)
    assert [message["serial"] for message in world.told_of("failed")] == [1, 2, 1, 2, 3]


def test_several_snapshots_are_hashed_one_after_the_other_newest_first() -> None:
    world = World()
    for version in (0, 1, 2):
        assert world.rank.boundary.reserve()
        world.rank.boundary.commit(version, 0)
    world.rank.process.longest_work = 0.5
    world.run(0.021)
    world.run(2.0)
    serials = [message["serial"] for message in world.told_of("snapped")]
    assert sorted(serials) == [1, 2, 3] and serials[1] > serials[2]


def test_actor_that_asks_for_checksums_before_they_are_computed_waits_for_them() -> None:
    world = World()
    world.rank.process.longest_on_thread["checksums"] = MAX_BUCKET_SECONDS
    serial = world.fill(0)
    actor = world.actor()
    actor.say("open", pull=1, serial=serial, buckets=[[CHECKSUM_TABLE, 1]])
    assert not actor.over and sent_buckets(actor, 1) == [], "nothing can be checked before they are there"
    world.run(MAX_BUCKET_SECONDS)
    assert not actor.over and sent_buckets(actor, 1) == [CHECKSUM_TABLE, 0]


def test_beat_stops_when_a_checksum_hangs() -> None:
    world = World()
    world.run(1.0)
    assert world.rank.slots.beat_at > world.machine.now - 0.5
    world.rank.process.hung_threads.add("checksums")
    world.fill(0)
    began = world.machine.now
    world.run(MAX_BUCKET_SECONDS - 1.0)
    assert world.rank.slots.beat_at > world.machine.now - 0.5
    world.run(3.0)
    assert world.rank.slots.beat_at < began + MAX_BUCKET_SECONDS + 0.5


def test_a_slot_of_many_buckets_may_take_longer_than_a_bucket_may() -> None:
    world = World()
    server, works = world.rank.server, list[bool]()
    checksum = server._checksum

    def slow(bucket: Any) -> str:
        world.machine.now += 0.8 * MAX_BUCKET_SECONDS
        works.append(server._works())
        return checksum(bucket)

    server._checksum = slow
    world.fill(0)
    assert works == [True] * BUCKETS


def test_slot_is_kept_until_its_link_has_sent_it() -> None:
    world, sent = World(), list[Callable[[], None]]()

    def send(_memory: Any, on_sent: Callable[[], None]) -> Message:
        sent.append(on_sent)
        return {"link": "l"}

    world.rank.server._make_link = lambda *_: SimpleNamespace(send=send, close=lambda: None)
    first, actor = world.fill(0), world.actor()
    actor.say("open", pull=1, serial=first, buckets=[[0, BUCKETS]])
    second = world.fill(1)
    world.live(second)
    assert actor.over and world.serials() == [first, second]
    (over,) = sent
    over()
    assert world.serials() == [second]


def test_actor_gets_the_buckets_that_it_asks_for() -> None:
    world = World()
    serial = world.fill(7)
    actor = world.actor()
    actor.say("open", pull=1, serial=serial, buckets=[[0, BUCKETS]])
    assert [message["type"] for message in actor.heard] == ["bucket"] * BUCKETS
    assert sent_buckets(actor, 1) == [0, 1, 2, 3]
    actor.say("open", pull=1, serial=serial, buckets=[[2, 3]])
    assert sent_buckets(actor, 1) == [0, 1, 2, 3, 2]
    actor.say("open", pull=2, serial=serial, buckets=[[0, 1], [3, 4]])
    assert sent_buckets(actor, 2) == [0, 3]


def test_bucket_that_could_be_named_is_sent_only_where_it_is_asked_for_again() -> None:
    world = World()
    serial, actor = world.fill(0), world.actor()
    world.rank.server._refer = lambda slot, start, _end: {"slot": slot, "start": start}
    for pull, more in ((1, {}), (2, {"again": True})):
        actor.say("open", pull=pull, serial=serial, buckets=[[1, 2]], **more)
    named, sent = (message for message in actor.heard if message["type"] == "bucket")
    assert named["reference"]["start"] == BUCKET_BYTES and "bytes" not in named
    assert sent["bytes"] == BUCKET_BYTES and "reference" not in sent


def test_registry_hears_who_has_got_how_much_of_which_snapshot() -> None:
    """Whole buckets, also those of a connection that has closed, and what a delta stands for."""
    world = World()
    first, second = world.fill(0), world.fill(1)
    half, whole = world.actor("half", rate=2 * BUCKET_BYTES), world.actor("whole")
    half.say("open", pull=1, serial=first, buckets=[[0, BUCKETS]])
    whole.say("open", pull=1, serial=second, buckets=[[0, BUCKETS]])
    world.live(second, (first,))
    world.rank.server.live.base = first
    for base in (first, None):
        more = {} if base is None else {"base": base}
        whole.say("open", pull=2, serial=second, buckets=[[0, BUCKETS]], **more)
        world.run(0.3)
    assert half.channel is not None
    half.channel.close("it leaves")
    world.run(0.5)
    got = _moved(world)
    assert set(got) == {("half", first), ("whole", second)}
    assert 0 < got["half", first] < BUCKETS * BUCKET_BYTES
    assert got["whole", second] == 3 * BUCKETS * BUCKET_BYTES
    count = len(world.told)
    world.run(1.0)
    assert len(world.told) == count, "nothing moves"


@pytest.mark.parametrize("seconds_per_bucket", [1e-9, 0.02])
def test_bytes_count_to_the_snapshot_that_they_are_of_also_if_the_next_pull_begins_at_once(
    seconds_per_bucket: float,
) -> None:
    """One pull is over, or in the middle of a bucket."""
    world = World()
    first, second = world.fill(0), world.fill(1)
    actor = world.actor(rate=BUCKET_BYTES / seconds_per_bucket)
    actor.send({"type": "open", "pull": 1, "serial": first, "buckets": [[0, BUCKETS]]})
    world.run(0.03)
    actor.send({"type": "open", "pull": 2, "serial": second, "buckets": [[0, BUCKETS]]})
    world.run(1.0)
    assert sent_buckets(actor, 2) == [0, 1, 2, 3]
    sent = len(sent_buckets(actor, 1))
    assert _moved(world) == {("a", first): sent * BUCKET_BYTES, ("a", second): BUCKETS * BUCKET_BYTES}
    assert sent == BUCKETS or seconds_per_bucket > 0.01


def test_bytes_that_move_while_the_registry_is_away_are_told_to_the_next_one() -> None:
    world = World()
    serial = world.fill(0)
    actor = world.actor()
    assert world.channel is not None
    registry = world.rank.server.registry
    registry.drop("killed")
    actor.say("open", pull=1, serial=serial, buckets=[[0, BUCKETS]])
    world.run(1.0)
    assert not registry.connected and not world.told_of("moved")
    registry.start()
    world.run(1.0)
    assert _moved(world) == {("a", serial): BUCKETS * BUCKET_BYTES}


def _moved(world: World) -> Counter[tuple[str, int]]:
    """What the registry has been told in total."""
    moved: Counter[tuple[str, int]] = Counter()
    for message in world.told_of("moved"):
        for name, serial, count in message["moved"]:
            moved[name, serial] += count
    return moved


def test_next_pull_ends_what_was_asked_for_before() -> None:
    world = World()
    serial = world.fill(0)
    actor = world.actor(rate=BUCKET_BYTES / 0.2)
    actor.say("open", pull=1, serial=serial, buckets=[[0, BUCKETS]])
    actor.say("open", pull=2, serial=serial, buckets=[[3, 4]])
    world.run(2.0)
    assert sent_buckets(actor, 1) == [0] and sent_buckets(actor, 2) == [3]
    assert not actor.over


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"kind": "open", "pull": 1, "serial": 1, "buckets": [[3, 5]]}, "buckets 3 to 5 of 4"),
        ({"kind": "open", "pull": 1, "serial": 1, "buckets": [[0, 10**12]]}, "to 1000000000000 of 4"),
        ({"kind": "open", "pull": 1, "serial": 1, "buckets": [[2, 3], [1, 2]]}, "out of order"),
        ({"kind": "open", "pull": 1, "serial": 1, "buckets": [[0, 1.0]]}, "no range"),
        ({"kind": "open", "pull": 1, "serial": 1, "buckets": [[2, 2]]}, "none or out of order"),
        ({"kind": "open", "pull": 1, "serial": 1, "buckets": [[-1, -1]] * 6}, "6 ranges of 4 buckets"),
        ({"kind": "open", "pull": 1, "serial": 1, "buckets": [[0, 0]] * 400_000}, "exceeds the limit"),
        ({"kind": "open", "pull": 1, "serial": 1, "buckets": [[0, 1]] * 20_000}, "exceeds the limit"),
        ({"kind": "gone", "pull": 1}, "who pulls does not send 'gone'"),
        ({"kind": "ping"}, "who pulls does not send 'ping'"),
    ],
)
def test_actor_that_asks_for_nonsense_is_hung_up_on(message: dict[str, Any], reason: str) -> None:
    world = World()
    world.fill(0)
    actor = world.actor()
    actor.say(**message)
    assert actor.over and reason in world.machine.protocol_errors[-1]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"epoch": "e0"}, "epoch is e1, not e0"),
        ({"rank": 1}, "rank 1 is not served here"),
        ({"rank": True}, "the peer closed the connection"),
    ],
)
def test_actor_at_the_wrong_door_is_refused(fields: dict[str, Any], reason: str) -> None:
    actor = World().actor(**fields)
    assert actor.channel is None and reason in actor.over


@pytest.mark.parametrize("count", [1, 7, 1000, 100_001])
def test_longest_honest_request_is_within_the_limit(count: int) -> None:
    """Every other bucket, and the checksums, of a pull late in a run."""
    server = World().rank.server
    server.most_buckets = lambda: count  # type: ignore[method-assign]
    missing = Transfer(10**9, 10**9, None, None, {0: {CHECKSUM_TABLE, *range(1, count, 2)}}, 0.0, 0.0)  # type: ignore[arg-type]
    asked: list[int] = []
    for request in missing.requests(0, lambda _key: True, lambda _key, _serial: False, None):
        assert len(wire.encode(request)) < server.longest_message()
        asked += bucket_server._buckets_in(request["buckets"], count)
    assert asked == sorted(missing.missing[0])


def test_buckets_requested_repeatedly_are_queued_and_sent_once() -> None:
    world = World()
    world.live(world.fill(0))
    serial = world.rank.boundary.serial
    actor = world.actor(rate=1.0)
    for _ in range(1000):
        actor.send({"type": "open", "pull": 1, "serial": serial, "buckets": [[0, BUCKETS]]})
    world.run(1.0)
    (reader,) = world.rank.server.channels.values()
    assert reader.sending == serial and len(reader.waiting) <= BUCKETS
    assert not actor.over


@pytest.mark.parametrize("connections", [1, 2])
def test_an_actor_has_a_bounded_number_of_connections(monkeypatch: pytest.MonkeyPatch, connections: int) -> None:
    monkeypatch.setattr(bucket_server, "MAX_CONNECTIONS", 3)
    world = World(connections=connections)
    other = world.actor("other")
    # Each of several workers has as many.
    actors = [world.actor() for _ in range(3 * connections + 2)]
    assert [bool(actor.over) for actor in actors] == [True] * 2 + [False] * 3 * connections and not other.over


def test_an_actor_that_connects_too_often_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MESSAGES_AT_ONCE", 25.0)
    monkeypatch.setattr(wire, "MESSAGES_PER_SECOND", 0.1)
    world = World()
    actors = [world.actor() for _ in range(4)]
    assert [bool(actor.over) for actor in actors] == [False, False, False, True]
    assert "connects too often" in actors[3].over and not world.actor("other").over


def test_snapshot_that_has_gone_is_said_to_be_gone() -> None:
    world = World()
    first, second, third = (world.fill(version) for version in range(3))
    world.live(second)
    assert world.serials() == [second, third]
    actor = world.actor()
    actor.say("open", pull=1, serial=first, buckets=[[0, BUCKETS]])
    assert [message["type"] for message in actor.heard] == ["gone"] and actor.last("gone")["pull"] == 1
    # It may know of the newest before this process does, but not of one that will never be published.
    actor.say("open", pull=2, serial=third, buckets=[[0, BUCKETS]])
    assert len(sent_buckets(actor, 2)) == BUCKETS
    world.live(second, dropped=(third,))
    actor.say("open", pull=3, serial=third, buckets=[[0, BUCKETS]])
    assert world.serials() == [second] and actor.last("gone")["pull"] == 3
    assert not actor.over and world.rank.boundary.reserve()


def test_half_a_bucket_of_what_has_gone_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    first = world.fill(0)
    reading, waiting = world.actor(rate=1.0), world.actor("waiting")
    reading.say("open", pull=1, serial=first, buckets=[[0, BUCKETS]])
    monkeypatch.setattr(world.rank.server, "has", lambda *_: False)
    waiting.say("open", pull=1, serial=first, buckets=[[0, BUCKETS]])
    second = world.fill(1)
    world.live(second)
    assert reading.over and not waiting.over and waiting.last("gone")["pull"] == 1
    assert world.serials() == [second]


def test_retained_snapshot_lives_on_for_its_lease_and_no_longer() -> None:
    world = World(lease_s=2.0)
    first = world.fill(0)
    actor = world.actor(rate=1.0)
    actor.say("open", pull=1, serial=first, buckets=[[0, BUCKETS]])
    second = world.fill(1)
    world.live(second, retained=(first,))
    world.run(1.5)
    world.live(second, retained=(first,))
    assert not actor.over and world.serials() == [first, second]
    world.run(1.0)
    assert actor.over and world.serials() == [second]


def test_idle_actor_is_let_go_and_a_busy_one_is_not() -> None:
    world = World()
    serial = world.fill(0)
    idle, busy = world.actor("idle"), world.actor("busy", rate=BUCKET_BYTES / (2 * IDLE_SECONDS))
    for actor in (idle, busy):
        actor.say("open", pull=1, serial=serial, buckets=[[0, 1]])
    world.run(IDLE_SECONDS - 0.5)
    assert not idle.over
    world.run(1.0)
    assert idle.over and not busy.over
    world.run(1.5 * IDLE_SECONDS)
    # From the last byte on.
    assert not busy.over
    world.run(IDLE_SECONDS + 1.0)
    assert busy.over and sent_buckets(busy, 1) == [0]


def test_server_that_ends_closes_everything() -> None:
    world = World()
    actor = world.actor()
    world.rank.server.close()
    world.run(1.0)
    assert actor.over and not world.rank.process.channels
    assert "refused" in world.actor("late").over
    beat_at = world.rank.slots.beat_at
    world.run(2.0)
    assert world.rank.slots.beat_at == beat_at


def test_link_ends_with_its_channel() -> None:
    world, ended = World(), list[str]()
    world.rank.server._make_link = lambda _channel, actor: SimpleNamespace(close=lambda: ended.append(actor))
    client = Client(world.machine, world.rank.address, ACTOR, "a", beats=False, rank=0)
    assert client.channel is not None and not ended
    client.channel.close("over")
    world.run(0.1)
    assert ended == ["a"]


@pytest.mark.parametrize("linked", [True, False])
def test_only_entries_and_credits_are_for_a_link_and_only_where_there_is_one(linked: bool) -> None:
    world, heard = World(), list[str]()
    link = SimpleNamespace(heard=lambda message: heard.append(message["type"]), close=lambda: None)
    world.rank.server._make_link = (lambda *_: link) if linked else None
    kinds: dict[str, Message] = {"entry": {"link": "l", "key": "", "value": ""}, "credit": {"link": "l"}, "pong": {}}
    for kind, fields in kinds.items():
        actor = world.actor(kind)
        actor.say(kind, **fields)
        if linked and kind != "pong":
            assert not actor.over
        else:
            assert f"who pulls does not send '{kind}'" in world.machine.protocol_errors[-1] and actor.over
    assert heard == (["entry", "credit"] if linked else [])
