"""The coordinator's decisions about where a version comes from: a base, a peer or the trainer."""

from __future__ import annotations

from tests.unit_tests.weight_sync.coordinator_desk import Desk
from torchtitan.weight_sync.states.actor import ActorState
from torchtitan.weight_sync.states.commands import Record

# Delta


def test_delta_goes_against_the_acknowledged_version_and_every_so_often_in_full() -> None:
    desk = Desk(delta=True, full_every=3)
    desk.join("a")
    desk.publish(0)
    desk.apply("a")
    bases = []
    for version in range(1, 8):
        desk.publish(version)
        order = [message["type"] for _, message in desk.sent("retain") + desk.sent("publish")]
        assert order == ["retain", "publish"], "the base is kept before the publication could free it"
        (offer,) = [message for _, message in desk.sent("offer")]
        leases = [message["serial"] for _, message in desk.sent("lease")]
        assert leases == [version + 1, version] if offer["base"] else leases == [version + 1]
        desk.say("a", "accept", base=offer["base"] is not None)
        (send,) = [message for _, message in desk.sent("send")]
        assert send["base_serial"] == (version if offer["base"] else None)
        bases.append(None if offer["base"] is None else offer["base"][0])
        digest = desk.machine.versions.newest.digest  # type: ignore[union-attr]
        desk.say("a", "staged", digest=digest)
        desk.say("a", "applied", version=version, digest=digest, figures={})
    assert bases == [0, 1, None, 3, 4, None, 6]


def test_actor_without_the_base_gets_everything() -> None:
    desk = Desk(delta=True)
    desk.join("a")
    desk.publish(0)
    desk.apply("a")
    desk.publish(1)
    desk.say("a", "accept", base=False)
    assert desk.sent("send")[0][1]["base_serial"] is None
    desk.machine.actor_lost("a", 1, "reset", desk.now)
    desk.join("a", version=0, session=2)
    assert desk.sent("offer")[0][1]["base"] is None, "the first after a rejoin is full"


def test_base_is_what_most_actors_hold_and_nothing_without_actors() -> None:
    desk = Desk(delta=True)
    for name in "abc":
        desk.join(name)
    desk.publish(0)
    for name in "abc":
        desk.apply(name)
    desk.publish(1)
    desk.apply("a")
    for name in "bc":
        desk.say(name, "accept", base=True)
        desk.say(name, "refused", reason="checksum")
        desk.say(name, "decline", reason="busy")
    desk.publish(2)
    assert not desk.sent("retain"), "two hold version 0, one version 1"
    assert [message["base"] and message["base"][0] for _, message in desk.sent("offer")] == [None, 0, 0]
    for name in "abc":
        desk.machine.actor_lost(name, 1, "killed", desk.now)
    desk.publish(3)
    assert [message["serial"] for _, message in desk.sent("retain")] == [None]


# Relay


def relaying(fanout: int = 1, actors: str = "abc") -> Desk:
    """Version 0 is published, and so many actors have been offered it as the trainer sends to."""
    desk = Desk(relay=True, relay_fanout=fanout)
    for name in actors:
        desk.join(name)
    desk.publish(0)
    return desk


def test_the_trainer_sends_a_version_to_a_few_and_they_pass_it_on() -> None:
    desk = relaying(actors="abcd")
    assert desk.offers() == [("a", 0)]
    desk.apply("a")
    assert desk.offers() == [("b", 0)], "from a, which may serve one at a time"
    desk.say("b", "accept")
    assert not desk.sent("send")
    digest = desk.machine.versions.newest.digest  # type: ignore[union-attr]
    ((source, order),) = desk.sent("relay")
    assert source == "a" and (order["actor"], order["data"], order["digest"]) == ("b", ["b:1"], digest)
    desk.say("b", "staged", digest=digest)
    assert desk.sent("release") == [("a", {"type": "release", "attempt": order["attempt"]})]
    assert desk.offers() == [("c", 0)]
    desk.say("b", "applied", version=0, digest=digest, figures={})
    assert desk.offers() == [("d", 0)], "b serves too"
    assert {message["source"] for _, message in desk.sent("offer")} == {"b"}


def test_a_failed_relay_is_followed_by_the_trainer_and_is_not_counted_against_the_actor() -> None:
    desk = relaying()
    desk.apply("a")
    desk.say("b", "accept")
    attempt = desk.machine.actors["b"].attempt
    assert attempt is not None and attempt.source == "a"
    stranger = {"type": "broken", "attempt": attempt.number, "reason": "no"}
    desk.machine.actor_message("c", 1, stranger, desk.now)
    assert desk.machine.actors["b"].attempt is attempt, "only the source can say so"
    desk.take(desk.machine.actor_message("a", 1, {**stranger, "shadow": False}, desk.now))
    assert desk.machine.actors["b"].failures == 0 and not desk.machine.actors["a"].shadow
    offers = {actor: message["source"] for actor, message in desk.sent("offer")}
    assert offers == {"b": None}, "c waits: the trainer has sent this version often enough"


def test_a_lost_source_costs_its_children_one_attempt() -> None:
    desk = relaying()
    desk.apply("a")
    desk.say("b", "accept")
    desk.take(desk.machine.actor_lost("a", 1, "killed", desk.now))
    assert [record["reason"] for record in desk.records("abort")] == ["its source a is gone: killed"]
    assert desk.offers() == [("b", 0)] and desk.sent("offer")[0][1]["source"] is None


def test_a_frozen_source_is_not_blamed_on_the_actor_that_waits() -> None:
    desk = relaying(actors="ab")
    desk.apply("a")
    desk.say("b", "accept")
    desk.wait(5.2, pings=("b",))
    assert "suspect" not in [c.event for c in desk.out if isinstance(c, Record) and c.fields.get("actor") == "b"]
    assert desk.state("a") is ActorState.SUSPECT and desk.machine.actors["b"].missed_deadlines == 0
    assert {actor: message["source"] for actor, message in desk.sent("offer")} == {"b": None}, "a serves nobody now"


def test_a_source_waits_for_a_child_that_moves_and_not_for_one_that_does_not() -> None:
    desk = relaying(actors="ab")
    desk.apply("a")
    desk.say("b", "accept")
    desk.publish(1)
    assert not desk.offers(), "staging memory of a is being read"
    for received in range(10):
        desk.say("b", "progress", bytes=received + 1)
        assert not desk.wait(0.3, pings=("a", "b")), "as long as bytes move"
    desk.wait(0.5, pings=("a", "b"))
    assert [record["reason"] for record in desk.records("abort")] == ["its source takes a newer version"]
    assert desk.offers()[0] == ("a", 1)


def test_a_source_does_not_fall_behind_for_a_slow_child() -> None:
    desk = relaying(actors="ab")
    desk.apply("a")
    desk.say("b", "accept")
    for version in range(1, desk.machine.settings.evict_after_versions):
        desk.say("b", "progress", bytes=version)
        desk.publish(version)
        assert not desk.offers()
    desk.publish(desk.machine.settings.evict_after_versions)
    assert desk.offers()[0] == ("a", desk.machine.settings.evict_after_versions)


def test_workers_are_served_by_workers_with_the_same_buckets() -> None:
    desk = Desk(relay=True, relay_fanout=1)
    for name, parts in (("a", ["x"]), ("b", ["y"]), ("c", ["x"])):
        desk.join(name)
        desk.machine.actors[name].parts = parts
    desk.publish(0)
    desk.apply("a")
    assert [record["source"] for record in desk.records("offer")] == ["a"]
    assert desk.offers() == [("c", 0)]
    assert desk.state("b") is ActorState.OFFERED, "the trainer sends it one more, which a can be no source for"
