"""Who relays versions to whom, by what shard servers see; and who relays no more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.deterministic.parts import BUCKET_BYTES, TOKEN
from tests.unit_tests.weight_sync.clients import Client
from tests.unit_tests.weight_sync.test_registry import World
from torchtitan.weight_sync.memory.manifest import Manifest
from torchtitan.weight_sync.registry.relays import REMEMBERED_SNAPSHOTS, relay_sources
from torchtitan.weight_sync.registry.state import ActorRecord
from torchtitan.weight_sync.wire.handshake import ACTOR, PEER, role_key

VERSION_BYTES = 2 * 2 * BUCKET_BYTES


class Relaying(World):
    """A registry whose actors relay, in one chain in the order of their names if they are equally fast."""

    def __init__(self, names: str = "abcd") -> None:
        super().__init__(relay_fanout=1)
        self.all_ranks = self.ranks()
        self.clients = {name: self.actor(name, address=f"10.0.0.2:{number}") for number, name in enumerate(names, 1)}
        self.serial = 0

    def announce(self) -> dict[str, str]:
        """Publish a version. Actor -> whom it pulls from."""
        self.serial += 1
        self.publish(self.all_ranks, self.serial, self.serial)
        messages = {name: client.last("newest") for name, client in self.clients.items()}
        return {name: message["source"]["name"] for name, message in messages.items() if "source" in message}

    def sends(self, *names: str, count: int = VERSION_BYTES) -> None:
        """A shard server has sent these actors so much of the newest version."""
        self.all_ranks[0].say("moved", moved=[[name, self.serial, count] for name in names])


def test_neither_of_two_actors_that_dispute_a_bucket_relays_any_more() -> None:
    world = Relaying()
    actors = world.clients
    assert world.announce() == {}, "nobody knows how fast they are"
    world.sends(*"abcd")
    assert world.announce() == {"b": "a", "c": "b", "d": "c"}
    # Nobody can say this of an actor that is not its source.
    actors["d"].say("forged", version=2, source="a")
    actors["a"].say("forged", version=2, source="")
    assert world.announce() == {"b": "a", "c": "b", "d": "c"} and not world.events("forged")
    actors["c"].say("forged", version=3, source="b")
    assert world.announce() == {"d": "a"}
    (event,) = world.events("forged")
    assert (event["actor"], event["version"], event["reason"]) == ("c", 3, "by b")
    actors["b"] = world.actor("b", instance="b-2", address="10.0.0.2:9")
    world.sends("b")
    assert world.announce() == {"d": "a"}, "a new process of that name is no better known"


def test_speed_is_what_shard_servers_see_and_not_what_an_actor_says() -> None:
    world = Relaying("ab")
    world.announce()
    world.sends("b")
    world.run(2.0)
    world.clients["a"].say("serving", version=1, digest=world.digest, figures={"transfer_s": 1e-9})
    # Less than a whole version is no measure.
    world.sends("a", count=VERSION_BYTES - 1)
    assert world.announce() == {}
    world.run(2.0)
    world.sends("a")
    assert world.announce() == {"a": "b"}


def test_speed_shows_also_where_versions_are_published_faster_than_bytes_are_told() -> None:
    """Both ranks tell of two snapshots, the older of which is gone by then."""
    world = Relaying("ab")
    for _ in range(2):
        world.announce()
    for rank in world.all_ranks:
        rank.say("moved", moved=[[name, serial, VERSION_BYTES // 2] for serial in (1, 2) for name in "ab"])
    assert world.registry.actors["a"].took_s is not None and world.announce() == {"b": "a"}


def test_host_is_where_the_connection_comes_from() -> None:
    """All say that they are at one address; one of them is."""
    records = {name: _relaying(1.0, f"10.0.0.{number}") for number, name in enumerate(("a", "b", "c"), 1)}
    records["liar"] = _relaying(0.1, "10.9.9.9")
    for record in records.values():
        record.address = "10.0.0.1:7"
    records["d"] = _relaying(1.0, "10.0.0.1", port=8)
    sources = {child: source["name"] for child, source in relay_sources(records, (), 1, TOKEN).items()}
    # The liar is a host of its own: of the host whose address it claims, another one is the fastest.
    assert sources == {"a": "liar", "b": "a", "c": "b", "d": "a"}


def test_source_that_an_actor_has_left_relays_no_more_and_neither_does_that_actor() -> None:
    world = Relaying()
    world.announce()
    world.sends(*"abcd")
    assert world.announce() == {"b": "a", "c": "b", "d": "c"}
    # a sends next to nothing, so nothing comes to c and d either: they come to the shard server as well.
    world.sends("a")
    world.sends(*"bcd", count=10)
    assert world.announce() == {"d": "c"}
    assert [(event["actor"], event["reason"]) for event in world.events("relay_left")] == [("b", "by a")]
    # Bytes of an older version, on which it was before, are no sign of that.
    world.all_ranks[0].say("moved", moved=[["d", world.serial - 1, 10]])
    assert world.announce() == {"d": "c"}
    world.clients["a"] = world.actor("a", instance="a-2", address="10.0.0.2:9")
    world.sends("a")
    assert world.announce() == {"d": "c"}, "a new process of that name is no better known"


@pytest.mark.parametrize("served", ["bc", "c"])
def test_source_that_has_died_was_not_left(served: str) -> None:
    """Nor was the actor after it, which has nothing to pass on: also before a shard server has sent it anything."""
    world = Relaying("abc")
    world.announce()
    world.sends(*"abc")
    assert world.announce() == {"b": "a", "c": "b"}
    channel = world.clients["a"].channel
    assert channel is not None
    channel.close("killed")
    world.run(0.1)
    world.sends(*served)
    assert world.announce() == {"c": "b"} and not world.events("relay_left")


def test_source_that_is_left_while_another_actor_dies_is_blamed_all_the_same() -> None:
    world = Relaying()
    world.announce()
    world.sends(*"abcd")
    assert world.announce() == {"b": "a", "c": "b", "d": "c"}
    channel = world.clients["d"].channel
    assert channel is not None
    channel.close("killed")
    world.run(0.1)
    world.sends("a")
    world.sends("b", count=10)
    world.announce()
    assert [(event["actor"], event["reason"]) for event in world.events("relay_left")] == [("b", "by a")]


def test_bytes_of_actors_and_snapshots_that_are_gone_end_no_connection() -> None:
    """A shard server tells of them a little later."""
    world = Relaying("ab")
    world.announce()
    rows = [["nobody", world.serial, VERSION_BYTES], ["a", world.serial + 7, VERSION_BYTES]]
    world.all_ranks[0].say("moved", moved=[*rows, ["b", world.serial, VERSION_BYTES]])
    assert not world.all_ranks[0].over
    assert {name for name, actor in world.registry.actors.items() if actor.took_s is not None} == {"b"}


def test_actor_that_cannot_begin_at_once_relays_nothing_and_is_not_blamed() -> None:
    """It applies a version, is pinned by an evaluation, or pulls an older version."""
    world = Relaying("abc")
    world.announce()
    world.sends(*"abc")
    a, trainer = world.clients["a"], world.trainer()
    a.say("pulling", serial=1, version=1)
    a.say("ended", version=1, outcome="staged", reason="")
    assert world.announce() == {"c": "b"}, "a applies version 1"
    a.say("serving", version=1, digest=_digest(a, 1), figures={})
    world.sends(*"ab")
    assert world.announce() == {"b": "a", "c": "b"}
    trainer.say("pin", version=1)
    world.sends("b")
    assert world.announce() == {"c": "b"}, "a is pinned"
    trainer.say("pin", version=None)
    a.say("pulling", serial=world.serial, version=world.serial)
    world.sends("a", count=10)
    assert world.announce() == {"c": "b"}, "a goes on with the older version"
    a.say("ended", version=world.serial - 1, outcome="gone", reason="")
    world.sends("a")
    assert world.announce() == {"b": "a", "c": "b"} and not world.events("relay_left")


def test_source_that_has_not_begun_with_a_version_is_not_blamed_for_it() -> None:
    world = Relaying("abc")
    world.announce()
    world.sends(*"abc")
    assert world.announce() == {"b": "a", "c": "b"}
    world.sends("b")
    assert world.announce() == {"c": "b"} and not world.events("relay_left")
    # It relays again when it has taken a version from the trainer.
    world.sends("a", count=VERSION_BYTES - 1)
    assert world.announce() == {"c": "b"}
    world.sends("a")
    assert world.announce() == {"b": "a", "c": "b"}
    # One that had it from another actor had something to pass on, too.
    world.clients["b"].say("pulling", serial=world.serial, version=world.serial)
    world.clients["b"].say("ended", version=world.serial, outcome="staged", reason="")
    world.clients["b"].say("serving", version=world.serial, digest=world.digest, figures={})
    world.sends("a", "c")
    assert world.announce() == {}
    assert [(event["actor"], event["reason"]) for event in world.events("relay_left")] == [("c", "by b")]


def _digest(client: Client, version: int) -> str:
    (newest,) = [message for message in client.heard if message["type"] == "newest" and message["version"] == version]
    return Manifest.from_json(newest).digest


def _relaying(seconds: float | None, host: str, away: bool = False, port: int = 1) -> ActorRecord:
    channel: Any = None if away else SimpleNamespace(peer_host=host)
    return ActorRecord(channel, "i", host and f"{host}:{port}", 0.0, took_s=seconds)


def test_relay_sources_are_the_fastest_reachable_actors() -> None:
    """The fast ones first, in classes of speed; not who is away, is new, has no address or has lost its snapshot."""
    seconds = {"new": None, "late": 90.0, "b": 1.1, "a": 1.0, "at once": 0.0}
    actors = {name: _relaying(took, f"10.0.0.{number}") for number, (name, took) in enumerate(seconds.items())}
    others = {"gone": _relaying(0.1, "10.0.1.1", True), "mute": _relaying(0.1, ""), "slow": _relaying(0.1, "10.0.1.2")}
    sources = relay_sources({**actors, **others}, {"slow"}, 2, TOKEN)
    assert {child: source["name"] for child, source in sources.items()} == {"b": "at once", "late": "at once"}
    key = role_key(role_key(TOKEN, ACTOR, "at once"), PEER, "b")
    assert sources["b"] == {"name": "at once", "address": "10.0.0.4:1", "key": key, "fanout": 2}
    assert relay_sources(actors, (), 0, TOKEN) == {}


@pytest.mark.parametrize("fanout", [1, 2, 3])
def test_a_version_reaches_each_host_once(fanout: int) -> None:
    """Of a host's actors, the fastest alone pulls from elsewhere, and no actor serves too many of either kind."""
    hosts = [f"10.0.0.{number}" for number in range(7)] + ["[fe80::1]", "[fe80::2]"]
    host_of = {f"{number}-of-{host}": host for host in hosts for number in range(4)}
    speeds = {name: 0.1 if name[0] == "2" else 9.0 for name in host_of}
    actors = {name: _relaying(speeds[name], host, port=1 + int(name[0])) for name, host in host_of.items()}
    sources = {child: source["name"] for child, source in relay_sources(actors, (), fanout, TOKEN).items()}
    from_elsewhere = {name for name in actors if name not in sources or host_of[sources[name]] != host_of[name]}
    assert from_elsewhere == {f"2-of-{host}" for host in hosts}
    assert len(actors) - len(sources) == fanout
    for parent in actors:
        children = [host_of[child] == host_of[parent] for child, source in sources.items() if source == parent]
        assert max(children.count(True), children.count(False)) <= fanout
        above = parent
        for _ in actors:
            above = sources.get(above, above)
        assert above not in sources, "every way leads to the trainer"


def test_announcements_of_snapshots_that_are_long_over_are_forgotten() -> None:
    world = Relaying("a")
    for _ in range(3 * REMEMBERED_SNAPSHOTS):
        world.announce()
    assert len(world.registry._relays._announced_at) == REMEMBERED_SNAPSHOTS
