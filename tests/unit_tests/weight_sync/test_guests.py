"""The registry's door for actors that join by themselves: who gets in, what the trainer hears, and how they leave."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deterministic.machine import Process
from tests.deterministic.parts import REGISTRY, TOKEN
from tests.unit_tests.weight_sync.clients import GUEST_TOKEN, Client
from tests.unit_tests.weight_sync.test_registry import World
from torchtitan.errors import UserError
from torchtitan.inference.serving import joining as guest
from torchtitan.utils.rate_limiter import RateLimiters
from torchtitan.weight_sync.registry import guests
from torchtitan.weight_sync.registry.registry import ACTOR_SHARE, Registry
from torchtitan.weight_sync.registry.state import RegistrySettings
from torchtitan.weight_sync.wire import runtime as wire
from torchtitan.weight_sync.wire.handshake import GUEST, HANDSHAKE_SECONDS, OWN, Dialer, Identity
from torchtitan.weight_sync.wire.runtime import SILENCE_SECONDS

WANTED = {"engine": "embedded", "model": "abc", "max-length": 64, "exact": 0}
OFFERED = {"engine": "embedded", "model": "abc", "max-length": 128, "exact": 1, "more": "than is asked"}
URL = "http://10.0.0.9:8000"


class GuestWorld(World):
    """A registry that takes guests."""

    def __init__(self, wanted: dict[str, Any] = WANTED, **options: Any):
        super().__init__(guests=wanted, **options)

    def guest(self, name: str = "spot", url: str = URL, offers: dict[str, Any] = OFFERED, **options: Any) -> Client:
        return Client(self.machine, REGISTRY, GUEST, name, url=url, offers=offers, **options)

    def heard(self, trainer: Client) -> dict[str, str]:
        """What the trainer knows of guests by now, as its Watcher puts it together."""
        known: dict[str, str] = {}
        for message in trainer.heard:
            if message["type"] == "status":
                known = {**({} if message["complete"] else known), **message["guests"]}
        return {name: url for name, url in known.items() if url}


def test_trainer_is_told_of_guests_while_they_are_there() -> None:
    world = GuestWorld()
    trainer, first = world.trainer(), world.guest()
    assert world.heard(trainer) == {"spot": URL}
    second = world.guest("other", "http://[fe80::1]:9000")
    assert world.heard(trainer) == {"spot": URL, "other": "http://[fe80::1]:9000"}
    # A trainer that comes back hears of all of them, and one that stays only of what has changed.
    assert world.heard(world.trainer()) == world.heard(trainer)
    again = world.guest(url="http://10.0.0.10:8000")
    trainer = world.trainer()
    assert first.over and not again.over and world.heard(trainer)["spot"] == "http://10.0.0.10:8000"
    assert second.channel is not None
    second.channel.close("killed")
    world.run(0.1)
    assert set(world.heard(trainer)) == {"spot"} and world.events("guest_gone")[-1]["actor"] == "other"
    silent = world.guest("silent", beats=False)
    world.run(SILENCE_SECONDS + 1.0)
    assert silent.over and not again.over and set(world.heard(trainer)) == {"spot"}


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"engine": "vllm"}, "its engine is vllm, and this job needs embedded"),
        ({"model": "abd"}, "its model is abd"),
        ({"model": 3}, "its model is 3"),
        ({"max-length": 63}, "its max-length is 63, and this job needs 64 or more"),
        ({"max-length": "64"}, "its max-length is 64, and"),
        ({"exact": None}, "offers"),
    ],
)
def test_guest_that_does_not_offer_what_the_job_needs_is_refused(changed: dict[str, Any], said: str) -> None:
    world = GuestWorld()
    refused = world.guest(offers={**OFFERED, **changed})
    missing = world.guest("missing", offers={key: offer for key, offer in OFFERED.items() if key not in changed})
    trainer = world.trainer()
    if changed != {"exact": None}:  # of which not even the message is understood
        assert said in refused.over and "is None" in missing.over
    assert refused.over and missing.over and world.heard(trainer) == {}
    exactly = world.guest(offers=WANTED)
    assert not exactly.over


@pytest.mark.parametrize("name", ["actor-0", "actor-17", "", "a/b", "..", "a b", "x" * 65, "é"])
def test_guest_cannot_take_the_name_of_an_actor_of_the_run_or_one_that_is_none(name: str) -> None:
    assert GuestWorld().guest(name).over


@pytest.mark.parametrize("url", ["", "10.0.0.9:80", "https://h:80", "http://u:p@h:80", "http://h:80/x", "http://h"])
def test_guest_needs_a_url(url: str) -> None:
    assert "a URL" in GuestWorld().guest(url=url).over


def _got_in(*_: object) -> None:
    raise AssertionError("it got in")


def test_key_of_guests_opens_nothing_else_and_no_other_key_opens_their_door() -> None:
    world = GuestWorld()
    for key, role in ((TOKEN, GUEST), (GUEST_TOKEN, "actor"), (GUEST_TOKEN, "trainer"), (GUEST_TOKEN, "rank")):
        over: list[str] = []
        runtime = Process(world.machine, f"{key} {role}").runtime
        about = {"epoch": "e1", "url": URL, "offers": OFFERED, "address": "10.0.0.9:1"}
        Dialer(runtime, REGISTRY, Identity.of(key, role, "0"), about, _got_in, over.append)
        world.run(0.1)
        assert over and "wrong key" in over[0]
    closed = World()
    assert "no guest is expected here" in Client(closed.machine, REGISTRY, GUEST, "spot", url=URL, offers=OFFERED).over
    # Settings ask for guests, but nobody has given this registry their token.
    without = World()
    write = lambda *_: None  # noqa: E731
    process = Process(without.machine, "10.0.0.2:1")
    Registry(process.runtime, RegistrySettings(2, guests=WANTED), "e1", 1, TOKEN, write, write).start("10.0.0.2:1")
    assert "no guest" in Client(without.machine, "10.0.0.2:1", GUEST, "spot", url=URL, offers=OFFERED).over


def test_number_of_guests_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guests, "MAX_GUESTS", 2)
    world = GuestWorld()
    first = [world.guest(name) for name in "ab"]
    assert "2 guests are here" in world.guest("c").over and not any(client.over for client in first)
    assert not world.guest("a").over


def test_as_many_guests_as_may_come_do_not_hold_up_each_other() -> None:
    """Each says that it lives by two connections, and three things per version: six messages a second, say."""
    limiters = RateLimiters(wire.MESSAGES_AT_ONCE * ACTOR_SHARE, wire.MESSAGES_PER_SECOND * ACTOR_SHARE, OWN)
    for second in range(30):
        for number in range(guests.MAX_GUESTS):
            limiter = limiters.of(f"spot-{number}")
            assert not limiter.wait_s(float(second))
            limiter.spend(6.0)


def test_actor_that_leaves_is_no_eviction_and_nobody_waits_for_it() -> None:
    world = GuestWorld()
    trainer, ranks = world.trainer(), world.ranks()
    world.publish(ranks, 1, 0)
    guest, actor, killed = world.guest(), world.actor("spot"), world.actor("killed")
    for client in (actor, killed):
        client.say("serving", version=0, digest=world.digest, figures={})
        world.run(0.2)
    guest.say("leave")
    assert guest.over
    assert dict(trainer.last("status")["serving"]) == {0: 2}, "it serves until its own connection ends"
    for client in (actor, killed):
        assert client.channel is not None
        client.channel.close("ended")
    world.run(0.2)
    status = trainer.last("status")
    assert status["evictions"] == 1 and status["states"] == {"evicted": 1} and world.heard(trainer) == {}
    assert any("spot" in message["forgotten"] for message in trainer.heard if message["type"] == "status")
    assert [line["actor"] for line in world.events("evicted")] == ["killed"]
    assert [line["actor"] for line in world.events("left")] == ["spot"]
    # It may come back, and is a usual actor then.
    world.guest()
    back = world.actor("spot", instance="spot-2")
    assert back.channel is not None
    back.channel.close("ended")
    world.run(0.2)
    assert trainer.last("status")["evictions"] == 2


def test_actor_that_leaves_while_it_pulls_retains_no_snapshot() -> None:
    world = GuestWorld()
    ranks = world.ranks()
    world.publish(ranks, 1, 0)
    guest, actor = world.guest(), world.actor("spot")
    actor.say("pulling", serial=1, version=0)
    guest.say("leave")
    assert actor.channel is not None
    actor.channel.close("ended")
    world.run(0.2)
    world.publish(ranks, 2, 1)
    assert not world.registry.snapshots.retained and not world.registry.snapshots.pulls


def test_guest_that_leaves_may_connect_again_before_its_connection_has_ended() -> None:
    world = GuestWorld()
    trainer, ranks = world.trainer(), world.ranks()
    world.publish(ranks, 1, 0)
    guest, actor = world.guest(), world.actor("spot")
    guest.say("leave")
    again = world.actor("spot")
    assert actor.over and not again.over
    again.say("serving", version=0, digest=world.digest, figures={})
    world.run(0.2)
    assert not again.over and dict(trainer.last("status")["serving"]) == {0: 1}


def test_guest_that_says_anything_else_is_cut_off() -> None:
    world = GuestWorld()
    guest = world.guest()
    guest.say("pin", version=3)
    assert guest.over and world.heard(world.trainer()) == {}
    assert "a guest does not send 'pin'" in world.events("guest_gone")[-1]["reason"]


def test_guest_asks_anew_where_the_registry_is_each_time_that_it_dials(monkeypatch: pytest.MonkeyPatch) -> None:
    world = GuestWorld()
    trainer = world.trainer()
    found: list[str | UserError] = [UserError("no such name"), "10.9.9.9:1", REGISTRY]

    def resolve(address: str) -> str:
        assert address == "head:5000"
        if isinstance(where := found.pop(0), UserError):
            raise where
        return where

    monkeypatch.setattr(guest, "numeric", resolve)
    process = Process(world.machine, "spot")
    client = guest.GuestClient(process.runtime, "head:5000", "spot", GUEST_TOKEN, URL, OFFERED, 60.0)
    client.start()
    world.run(3 * guest.RETRY_S + HANDSHAKE_SECONDS)
    assert client.connected and not found and world.heard(trainer) == {"spot": URL}
