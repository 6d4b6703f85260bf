"""The registry alone, among clients that say what a test has them say."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deterministic.machine import Machine, Process
from tests.deterministic.parts import REGISTRY, TOKEN, rank_layout
from tests.unit_tests.weight_sync.clients import GUEST_TOKEN, Client
from torchtitan.config.job_config import WeightSync
from torchtitan.weight_sync.memory import published
from torchtitan.weight_sync.memory.published import PublishedVersions
from torchtitan.weight_sync.registry import deliveries
from torchtitan.weight_sync.registry import registry as registry_module
from torchtitan.weight_sync.registry.registry import MAX_LOST_SNAPSHOTS, Registry
from torchtitan.weight_sync.registry.state import RegistrySettings
from torchtitan.weight_sync.registry.trainer_view import STATUS_ACTORS
from torchtitan.weight_sync.wire.handshake import ACTOR, RANK, TRAINER
from torchtitan.weight_sync.wire.runtime import SILENCE_SECONDS, Message

SHEETS = ["aa", "bb"]
"""What each rank says that its checksums hash to"""


ENDED: Message = {"type": "ended", "version": 0, "outcome": "staged", "reason": ""}


class World:
    """A registry for two ranks."""

    def __init__(self, published: PublishedVersions | None = None, **settings: Any):
        self.machine = Machine(0)
        self.published = published or PublishedVersions()
        self.journal: list[tuple[str, Message]] = []
        self.beats = 0
        process = Process(self.machine, REGISTRY)
        write = lambda event, fields: self.journal.append((event, fields))  # noqa: E731
        facts = RegistrySettings(2, **settings), "e1", 7, TOKEN
        self.registry = Registry(process.runtime, *facts, write, self._beat, None, GUEST_TOKEN, self.published)
        self.registry.start(REGISTRY)

    def _beat(self) -> None:
        self.beats += 1

    def run(self, seconds: float) -> None:
        self.machine.run(self.machine.now + seconds)

    def rank(self, number: int, **options: Any) -> Client:
        return Client(self.machine, REGISTRY, RANK, str(number), address=f"10.0.0.1:600{number}", **options)

    def actor(self, name: str = "a", **options: Any) -> Client:
        return Client(self.machine, REGISTRY, ACTOR, name, instance=options.pop("instance", f"{name}-1"), **options)

    def trainer(self, **options: Any) -> Client:
        return Client(self.machine, REGISTRY, TRAINER, "0", **options)

    def ranks(self) -> list[Client]:
        """Both ranks, with their layouts."""
        found = [self.rank(number) for number in range(2)]
        for number, client in enumerate(found):
            client.say("layout", layout=rank_layout(2, 2, number).to_json())
        return found

    def publish(self, ranks: list[Client], serial: int, version: int) -> None:
        for client, table in zip(ranks, SHEETS, strict=True):
            client.say("snapped", serial=serial, version=version, table=table)

    @property
    def digest(self) -> str:
        """Of the newest version."""
        return "" if self.registry.newest is None else self.registry.newest.digest

    def events(self, name: str) -> list[Message]:
        return [fields for event, fields in self.journal if event == name]


def test_version_is_published_when_all_ranks_have_it_and_the_layout_is_known() -> None:
    world = World()
    actor, ranks = world.actor(), [world.rank(number) for number in range(2)]
    world.publish(ranks, 1, 0)
    assert world.registry.newest is None and actor.count("newest") == 0
    for number, client in enumerate(ranks):
        client.say("layout", layout=rank_layout(2, 2, number).to_json())
    newest = actor.last("newest")
    assert (newest["newest"], newest["version"], newest["table_digests"]) == (1, 0, SHEETS)
    assert [rank.last("live")["newest"] for rank in ranks] == [1, 1]
    assert actor.last("model")["servers"] == ["10.0.0.1:6000", "10.0.0.1:6001"]
    ranks[0].say("snapped", serial=2, version=1, table=SHEETS[0])
    assert actor.count("newest") == 1
    # The newest of all that is whole; what is older is not published any more.
    ranks[0].say("snapped", serial=3, version=2, table=SHEETS[0])
    ranks[1].say("snapped", serial=3, version=2, table=SHEETS[1])
    ranks[1].say("snapped", serial=2, version=1, table=SHEETS[1])
    assert actor.count("newest") == 2 and actor.last("newest")["version"] == 2
    late = world.actor("late")
    assert late.last("newest")["version"] == 2 and late.count("model") == 1 and "pinned" not in late.heard[-1]


def test_newest_of_what_is_whole_when_the_layout_comes_is_published() -> None:
    world = World()
    actor, ranks = world.actor(), [world.rank(number) for number in range(2)]
    for serial in (1, 2):
        world.publish(ranks, serial, serial)
    for number, client in enumerate(ranks):
        client.say("layout", layout=rank_layout(2, 2, number).to_json())
    assert actor.count("newest") == 1 and actor.last("newest")["version"] == 2


def test_another_process_of_a_name_has_lost_no_snapshot() -> None:
    world = World(lease_s=0.5)
    ranks, actor = world.ranks(), world.actor()
    for number in range(1, 2 * MAX_LOST_SNAPSHOTS - 1):
        if number == MAX_LOST_SNAPSHOTS:
            actor = world.actor(instance="a-2")
        world.publish(ranks, 2 * number, number)
        actor.say("pulling", serial=2 * number, version=number)
        world.publish(ranks, 2 * number + 1, number)
        # It rests for ten times as long as it had its snapshot.
        world.run(9.0)
        assert not actor.over
    half = list(range(1, MAX_LOST_SNAPSHOTS))
    assert [lost["times"] for lost in world.events("lost_snapshot")] == half + half


def test_snapshot_that_a_rank_misses_is_dropped_and_the_trainer_told() -> None:
    world = World(snapshot_timeout_s=2.0)
    ranks, trainer, actor = world.ranks(), world.trainer(), world.actor()
    ranks[1].say("failed", serial=1, version=0)
    assert ranks[0].last("live")["dropped"] == [1] and trainer.last("status")["dropped"] == [[1, 0]]
    world.publish(ranks, 1, 0)
    assert world.registry.newest is None
    ranks[0].say("snapped", serial=2, version=0, table=SHEETS[0])
    world.run(1.5)
    assert trainer.last("status")["dropped"] == [[1, 0]]
    world.run(1.0)
    assert trainer.last("status")["dropped"] == [[1, 0], [2, 0]]
    assert "rank [1]" in world.events("drop")[-1]["reason"]
    world.publish(ranks, 3, 0)
    ranks[0].say("failed", serial=3, version=0)
    assert trainer.last("status")["newest"] == 0 and len(trainer.last("status")["dropped"]) == 2
    assert actor.count("newest") == 1


def test_only_the_last_drops_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MAX_DROPPED", 2)
    world = World()
    ranks = world.ranks()
    for serial in (1, 2, 3):
        ranks[0].say("failed", serial=serial, version=serial)
    assert ranks[0].last("live")["dropped"] == [2, 3]


def test_shards_that_do_not_fit_together_are_a_failure_that_the_trainer_hears_of() -> None:
    world = World()
    trainer, ranks = world.trainer(), [world.rank(number) for number in range(2)]
    for client in ranks:
        client.say("layout", layout=rank_layout(2, 2, 0).to_json())
    world.run(0.1)
    assert "do not fit together" in trainer.last("status")["failure"]
    world.publish(ranks, 1, 0)
    assert world.registry.newest is None


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"type": "layout", "layout": {"other": 1}}, "another layout"),
        ({"type": "serving", "version": 0, "digest": "", "figures": {}}, "does not send"),
        ({"type": "snapped", "serial": 5, "version": 9, "table": SHEETS[0]}, "calls snapshot 5 version 9"),
    ],
)
def test_rank_that_contradicts_itself_is_hung_up_on(message: Message, reason: str) -> None:
    world = World()
    ranks = world.ranks()
    ranks[1].say("snapped", serial=5, version=4, table=SHEETS[1])
    ranks[0].say(**{"kind": message["type"], **{name: value for name, value in message.items() if name != "type"}})
    assert ranks[0].over and reason in world.machine.protocol_errors[-1]


@pytest.mark.parametrize(
    ("role", "name", "fields", "reason"),
    [
        (RANK, "2", {"address": "10.0.0.1:1"}, "no rank '2' among 2"),
        (RANK, "-1", {"address": "10.0.0.1:1"}, "no rank '-1'"),
        (RANK, "0", {"address": "somewhere"}, "somewhere"),
        (ACTOR, "a", {"instance": "i", "address": "somewhere"}, "somewhere"),
        (ACTOR, "a", {"instance": "i", "epoch": "e0"}, "epoch is e1, not e0"),
    ],
)
def test_a_client_of_another_job_is_refused(role: str, name: str, fields: dict[str, Any], reason: str) -> None:
    client = Client(World().machine, REGISTRY, role, name, **fields)
    assert client.channel is None and reason in client.over


def test_trainer_hears_what_changes_and_a_new_connection_replaces_the_old() -> None:
    world = World()
    first = world.trainer()
    assert first.last("status")["actors"] == {}
    ranks, actor = world.ranks(), world.actor()
    assert first.last("status")["actors"]["a"]["state"] == "joining"
    world.publish(ranks, 1, 0)
    actor.say("pulling", serial=1, version=0)
    status = first.last("status")
    assert status["actors"]["a"]["state"] == "pulling" and not status["actors"]["a"]["serves"]
    assert status["newest"] == 0
    actor.say("ended", version=0, outcome="staged", reason="")
    assert first.last("status")["actors"]["a"]["state"] == "applying"
    actor.say("serving", version=0, digest=world.digest, figures={"transfer_s": 1.0})
    shown = first.last("status")["actors"]["a"]
    assert (shown["state"], shown["version"], shown["serves"]) == ("ready", 0, True)
    assert shown["figures"] == {"transfer_s": 1.0} and world.events("delivery")[-1]["actor"] == "a"
    # What happens at once is one message.
    count = first.count("status")
    for _ in range(5):
        actor.send({"type": "ended", "version": 0, "outcome": "gone", "reason": ""})
    world.run(0.1)
    assert first.count("status") <= count + 2
    second = world.trainer()
    world.run(0.1)
    assert first.over and not second.over and second.last("status")["actors"]["a"]["serves"]
    actor.say("poisoned", version=0, reason="half of it")
    shown = second.last("status")["actors"]["a"]
    assert (shown["state"], shown["reason"], shown["serves"]) == ("poisoned", "half of it", False)
    second.say("pulling", serial=1, version=0)
    assert second.over and "a trainer does not send" in world.machine.protocol_errors[-1]


def test_actor_that_is_poisoned_stays_so_until_it_has_applied_a_version() -> None:
    world = World()
    trainer, ranks, actor = world.trainer(), world.ranks(), world.actor()
    world.publish(ranks, 1, 0)
    actor.say("poisoned", version=-1, reason="half of it")
    for message in ({"type": "pulling", "serial": 1, "version": 0}, ENDED | {"outcome": "gone"}, ENDED):
        actor.send(message)
        world.run(0.1)
        shown = trainer.last("status")["actors"]["a"]
        assert (shown["state"], shown["serves"]) == ("poisoned", False), message
    actor.say("serving", version=0, digest=world.digest, figures={"apply_s": 1.0})
    assert trainer.last("status")["actors"]["a"]["state"] == "ready"


def test_each_pull_has_one_row_of_what_became_of_it() -> None:
    world = World()
    ranks, actor, other = world.ranks(), world.actor(), world.actor("other")
    applied = {"figures": {"apply_s": 1.0}}
    for version in range(5):
        world.publish(ranks, version + 1, version)
        if version == 2:
            continue  # nobody asks for it
        actor.say("pulling", serial=version + 1, version=version)
        if version == 1:
            actor.say("ended", version=1, outcome="gone", reason="superseded")
        elif version == 3:
            actor.say("ended", version=3, outcome="staged", reason="")
            actor.say("ended", version=3, outcome="refused", reason="not for this model")
        elif version == 4:
            actor.say("ended", version=4, outcome="staged", reason="")
            actor.say("poisoned", version=4, reason="half of it")
        else:
            actor.say("ended", version=version, outcome="staged", reason="")
            actor.say("serving", version=version, digest=world.digest, **applied)
    other.say("pulling", serial=5, version=4)
    assert other.channel is not None
    other.channel.close("its process ends")
    world.run(0.1)
    rows = [(row["actor"], row["version"], row["outcome"], row.get("state", "")) for row in world.events("delivery")]
    assert [row for row in rows if row[0] == "a"] == [
        ("a", 0, "applied", ""), ("a", 1, "aborted", "pulling"), ("a", 2, "superseded", ""),
        ("a", 3, "refused", "applying"), ("a", 4, "poisoned", "applying"),
    ]  # fmt: skip
    never = [("other", version, "superseded", "") for version in range(4)]
    assert [row for row in rows if row[0] == "other"] == [*never, ("other", 4, "evicted", "pulling")]
    assert all(row["offered_at"] <= row["ended_at"] for row in world.events("delivery"))


def test_poisoned_version_that_is_served_does_not_end_the_pull_of_the_next_one() -> None:
    """An engine may find what it serves to be wrong while the next version arrives."""
    world = World()
    ranks, actor = world.ranks(), world.actor()
    for version in range(2):
        world.publish(ranks, version + 1, version)
        actor.say("pulling", serial=version + 1, version=version)
        if version == 1:
            actor.say("poisoned", version=0, reason="its weights are not what was sent")
        actor.say("ended", version=version, outcome="staged", reason="")
        actor.say("serving", version=version, digest=world.digest, figures={"apply_s": 1.0})
    rows = [(row["version"], row["outcome"], row["attempt"]) for row in world.events("delivery")]
    assert rows == [(0, "applied", 1), (1, "applied", 1)]
    assert all(row["begun_at"] <= row["staged_at"] <= row["ended_at"] for row in world.events("delivery"))


def test_pull_that_another_one_follows_is_aborted_and_is_no_attempt_of_the_next() -> None:
    world = World()
    ranks, actor = world.ranks(), world.actor()
    for version in range(2):
        world.publish(ranks, version + 1, version)
        for _ in range(2):  # saying it twice begins no other pull
            actor.say("pulling", serial=version + 1, version=version)
    actor.say("ended", version=1, outcome="staged", reason="")
    actor.say("serving", version=1, digest=world.digest, figures={"apply_s": 1.0})
    rows = [(row["version"], row["outcome"], row["attempt"]) for row in world.events("delivery")]
    assert rows == [(0, "aborted", 1), (1, "applied", 1)]


def test_versions_before_one_that_is_served_unasked_are_superseded_at_once() -> None:
    """Nobody has heard that the actor pulled it. Were it evicted next, nothing would be told of the others."""
    world = World()
    ranks, actor = world.ranks(), world.actor()
    for version in range(3):
        world.publish(ranks, version + 1, version)
    actor.say("serving", version=2, digest=world.digest, figures={})
    rows = [(row["version"], row["outcome"]) for row in world.events("delivery")]
    assert rows == [(2, "applied"), (0, "superseded"), (1, "superseded")]


def test_actor_that_never_pulls_is_remembered_a_bounded_number_of_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliveries, "MAX_OFFERED", 2)
    world = World()
    ranks, _actor = world.ranks(), world.actor()
    superseded: list[list[int]] = []
    for version in range(4):
        world.publish(ranks, version + 1, version)
        superseded.append([row["version"] for row in world.events("delivery")])
    assert superseded == [[], [], [0], [0, 1]]


def test_pin_reaches_all_actors_and_those_that_come_later() -> None:
    world = World()
    trainer, ranks, actor, other = world.trainer(), world.ranks(), world.actor(), world.actor("other")
    world.publish(ranks, 1, 0)
    actor.say("serving", version=0, digest=world.digest, figures={})
    trainer.say("pin", version=0)
    status = trainer.last("status")
    assert actor.last("live")["pinned"] == 0 == world.actor("late").last("newest")["pinned"] == status["pinned"]
    assert status["actors"]["a"]["pinned"] and not status["actors"]["other"]["pinned"]
    other.say("serving", version=0, digest=world.digest, figures={})
    assert trainer.last("status")["actors"]["other"]["pinned"]
    trainer.say("pin", version=None)
    assert actor.last("live")["pinned"] is None and not trainer.last("status")["actors"]["a"]["pinned"]


def test_registry_that_has_not_heard_of_the_pin_leaves_it_to_the_trainer() -> None:
    """After a restart of the registry in the midst of an evaluation actors may come before the trainer does."""
    world = World()
    world.publish(world.ranks(), 1, 0)
    actor = world.actor()
    assert actor.count("newest") == 1 and all("pinned" not in message for message in actor.heard)
    world.trainer().say("pin", version=None)
    assert actor.last("live")["pinned"] is None


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize(
    ("claim", "reason"),
    [
        ({"type": "serving", "version": 4, "digest": "of other bytes"}, "of other bytes than were published"),
        ({"type": "serving", "version": 2, "digest": "of other bytes"}, "of other bytes than were published"),
        ({"type": "serving", "version": 3, "digest": ""}, "version 3, which was not published"),
        ({"type": "serving", "version": 5, "digest": ""}, "version 5, which was not published"),
        ({"type": "serving", "version": 2**62, "digest": ""}, f"version {2**62}, which was not published"),
        ({"type": "serving", "version": -1, "digest": ""}, "version -1, which was not published"),
        ({"type": "pulling", "version": 9, "serial": 4}, "version 9, which was not published"),
        ({"type": "pulling", "version": 9, "serial": 9}, "version 9, which was not published"),
        ({"type": "pulling", "version": 3, "serial": 3}, "version 3, which was not published"),
        ({"type": "ended", "version": 3, "outcome": "gone", "reason": ""}, "version 3, which was not published"),
        ({"type": "poisoned", "version": 2**62, "reason": ""}, f"version {2**62}, which was not published"),
        ({"type": "forged", "version": 3, "source": "b"}, "version 3, which was not published"),
    ],
)
def test_actor_that_claims_what_was_not_published_is_hung_up_on(claim: Message, reason: str, restarted: bool) -> None:
    """Also by a new registry, which no rank has told anything yet. Versions 2 and 4 were published, 3 was not."""
    world = World()
    ranks = world.ranks()
    world.publish(ranks, 2, 2)
    world.publish(ranks, 4, 4)
    if restarted:
        world = World(published=world.published)
    actor, trainer = world.actor(), world.trainer()
    actor.say(claim["type"], **{"figures": {}, **{name: value for name, value in claim.items() if name != "type"}})
    assert actor.over and world.registry.actors["a"].version == -1
    assert reason in world.machine.protocol_errors[-1]
    assert not {event for event, _ in world.journal} & {"delivery", "poisoned", "forged"}
    assert dict(trainer.last("status")["serving"]) == {-1: 1}


def test_snapshot_is_pulled_as_the_version_that_it_is() -> None:
    world = World()
    ranks = world.ranks()
    world.publish(ranks, 2, 2)
    world.publish(ranks, 4, 4)
    actor = world.actor()
    actor.say("pulling", serial=4, version=2)
    assert actor.over and "snapshot 4, which is not version 2" in world.machine.protocol_errors[-1]


def test_a_restarted_registry_knows_published_versions_and_no_forgotten_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(published, "KNOWN_VERSIONS", 2)
    world = World()
    ranks, digests = world.ranks(), []
    for version in range(3):
        world.publish(ranks, version + 1, version)
        digests.append(world.digest)
    world.published.add(1, digests[1])
    assert world.published.newest == 2, "whatever is recorded late"
    world = World(published=world.published)
    trainer = world.trainer()
    old, forgotten = world.actor(), world.actor("forgotten")
    old.say("serving", version=1, digest=digests[1], figures={})
    forgotten.say("serving", version=0, digest=digests[0], figures={})
    shown = trainer.last("status")["actors"]
    assert (shown["a"]["state"], shown["a"]["version"]) == ("ready", 1)
    # It is not refused, so that it can take a version that is known.
    assert not forgotten.over and not shown["forgotten"]["serves"]


def test_actor_that_does_not_apply_in_time_is_hung_up_on_unless_it_is_pinned() -> None:
    world = World(apply_timeout_s=1.0)
    trainer, ranks, actor, pinned = world.trainer(), world.ranks(), world.actor(), world.actor("pinned")
    world.publish(ranks, 1, 0)
    for client in (actor, pinned):
        client.say("serving", version=0, digest=world.digest, figures={})
    world.publish(ranks, 2, 1)
    trainer.say("pin", version=0)
    pinned.say("ended", version=1, outcome="staged", reason="")
    actor.say("serving", version=1, digest=world.digest, figures={})
    actor.say("ended", version=1, outcome="staged", reason="")
    world.run(0.8)
    assert not actor.over
    world.run(0.6)
    assert actor.over and not pinned.over
    shown = trainer.last("status")["actors"]["a"]
    assert shown["state"] == "evicted" and "did not apply a version within 1 s" in shown["reason"]
    # The time that it was pinned does not count.
    world.run(3.0)
    trainer.say("pin", version=None)
    world.run(0.7)
    assert not pinned.over
    world.run(0.7)
    assert pinned.over


def test_deadline_for_a_version_is_over_all_attempts_and_processes() -> None:
    world = World(lease_s=2.0, apply_timeout_s=1.0)
    trainer, ranks, actor, good = world.trainer(), world.ranks(), world.actor(), world.actor("good")
    world.publish(ranks, 1, 0)
    for client in (actor, good):
        client.say("serving", version=0, digest=world.digest, figures={})
    old = world.digest

    def seen(name: str = "a") -> str:
        return str(trainer.last("status")["actors"][name]["state"])

    for version in range(1, 6):
        # Every version begins another attempt, and the clock does not begin again.
        world.publish(ranks, version + 1, version)
        good.say("serving", version=version, digest=world.digest, figures={"transfer_s": 0.1})
        actor.say("pulling", serial=version + 1, version=version)
        world.run(0.6)
        actor.say("ended", version=version, outcome="gone", reason="")
    assert (seen(), seen("good")) == ("late", "ready") and not actor.over
    (late,) = world.events("late")
    assert late["actor"] == "a" and "took no version within 3 s" in late["reason"]
    # What it serves already is nothing new, neither over another connection nor from another process.
    for again in (world.actor(), world.actor(instance="a-2")):
        again.say("serving", version=0, digest=old, figures={})
        again.say("pulling", serial=6, version=5)
        assert seen() == "late"
    # A version that it stages and does not apply: lost, and late once it is back.
    again.say("ended", version=5, outcome="staged", reason="")
    world.run(1.5)
    assert again.over and seen() == "evicted"
    again = world.actor(instance="a-3")
    again.say("serving", version=0, digest=old, figures={})
    assert seen() == "late" and trainer.last("status")["actors"]["a"]["reason"] == "did not apply a version within 1 s"
    again.say("serving", version=5, digest=world.digest, figures={"transfer_s": 1.0})
    assert seen() == "ready" and len(world.events("late")) == 1
    world.run(5.0)
    assert seen() == "ready", "nothing newer is offered"


def test_pinned_actor_is_not_late() -> None:
    world = World(lease_s=1.0, apply_timeout_s=1.0)
    trainer, ranks, actor = world.trainer(), world.ranks(), world.actor()
    world.publish(ranks, 1, 0)
    actor.say("serving", version=0, digest=world.digest, figures={})
    trainer.say("pin", version=0)
    world.publish(ranks, 2, 1)
    world.run(5.0)
    trainer.say("pin", version=None)
    world.run(1.5)
    assert not world.events("late"), "the time that it was pinned counts"
    world.run(1.5)
    assert world.events("late")


def test_silent_clients_are_hung_up_on_and_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "FORGET_SECONDS", 10.0)
    world = World()
    trainer, actor, rank = world.trainer(), world.actor(beats=False), world.rank(0, beats=False)
    lively = world.actor("lively")
    world.run(SILENCE_SECONDS - 0.5)
    assert not actor.over and not rank.over
    world.run(1.0)
    assert actor.over and rank.over and not lively.over
    status = trainer.last("status")
    assert status["actors"]["a"]["state"] == "evicted" and status["evictions"] == 1
    assert "said nothing for 3 s (it was joining)" in status["actors"]["a"]["reason"]
    world.run(5.0)
    assert "a" in world.registry.actors
    world.run(3.0)
    assert list(world.registry.actors) == ["lively"] and world.beats > 40
    world.run(1.0)
    assert any("a" in message["forgotten"] for message in trainer.heard if message["type"] == "status")


def test_same_process_may_come_back_and_another_one_starts_afresh() -> None:
    world = World()
    trainer, ranks, actor = world.trainer(), world.ranks(), world.actor()
    world.publish(ranks, 1, 0)
    actor.say("serving", version=0, digest=world.digest, figures={})
    again = world.actor()
    assert actor.over and not again.over
    shown = trainer.last("status")["actors"]["a"]
    assert (shown["state"], shown["version"], shown["evictions"]) == ("joining", -1, 1)
    assert shown["reason"] == "" and "replaced by a newer connection (it was ready)" in shown["eviction"]
    again.say("serving", version=0, digest=world.digest, figures={})
    assert trainer.last("status")["actors"]["a"]["serves"] and world.events("delivery")[-1]["figures"] == {}
    other = world.actor(instance="a-2")
    shown = trainer.last("status")["actors"]["a"]
    assert again.over and not other.over and shown["evictions"] == 2 and shown["eviction"]


def test_shard_server_that_comes_back_replaces_its_connection_and_hears_what_lives() -> None:
    world = World()
    ranks = world.ranks()
    again = world.rank(0)
    assert ranks[0].over and not again.over and again.last("live")["newest"] == -1
    world.publish([again, ranks[1]], 1, 0)
    assert world.rank(1).last("live")["newest"] == 1


def test_checksums_of_a_lost_shard_server_do_not_count() -> None:
    """The next one computes them anew."""
    world = World()
    ranks = world.ranks()
    ranks[0].say("snapped", serial=1, version=0, table="00")
    assert ranks[0].channel is not None
    ranks[0].channel.close("killed")
    world.run(0.1)
    ranks[1].say("snapped", serial=1, version=0, table=SHEETS[1])
    assert world.registry.newest is None
    world.rank(0).say("snapped", serial=1, version=0, table=SHEETS[0])
    assert world.registry.newest is not None


def test_the_trainer_is_told_counts_of_many_actors_at_once_and_details_little_by_little() -> None:
    world = World()
    ranks, actors = world.ranks(), [world.actor(f"a{number:02d}") for number in range(40)]
    world.publish(ranks, 1, 0)
    trainer = world.trainer(beats=False)
    assert len(trainer.heard[-1]["actors"]) == 40 and trainer.heard[-1]["complete"]
    trainer.heard.clear()
    for actor in actors:
        actor.send({"type": "serving", "version": 0, "digest": world.digest, "figures": {}})
    actors[-1].send({"type": "poisoned", "version": 0, "reason": "half of it"})
    world.run(0.15)
    first = trainer.heard[0]
    assert "a39" in first["actors"] and len(first["actors"]) == STATUS_ACTORS + 1
    assert (dict(first["serving"]), dict(first["awaited"])) == ({0: 39, -1: 1}, {0: 39, -1: 1})
    assert first["states"] == {"ready": 39, "poisoned": 1}
    world.run(1.0)
    assert len(trainer.last("status")["actors"]) == 40
    count = len(trainer.heard)
    world.run(1.0)
    assert len(trainer.heard) == count, "nothing has changed"
    trainer.say("look")
    world.run(0.1)
    assert trainer.heard[-1]["complete"] and len(trainer.heard[-1]["actors"]) == 40


def test_an_actor_that_floods_the_registry_waits_and_the_others_do_not() -> None:
    world = World()
    evil, good = world.actor("evil"), world.actor("good")
    for _ in range(1000):
        evil.send({"type": "poisoned", "version": -1, "reason": "x"})
    good.say("poisoned", version=-1, reason="y")
    actors = [event["actor"] for event in world.events("poisoned")]
    assert actors.count("good") == 1 and actors.count("evil") < 700
    world.run(1.0)
    more = sum(event["actor"] == "evil" for event in world.events("poisoned")) - actors.count("evil")
    assert more < 200


def test_registry_that_ends_closes_everything() -> None:
    world = World()
    clients = [world.trainer(), *world.ranks(), world.actor()]
    world.registry.close()
    world.run(0.1)
    assert all(client.over for client in clients)
    assert "refused" in Client(world.machine, REGISTRY, TRAINER, "0").over


@pytest.mark.parametrize("relay", [False, True])
def test_settings_follow_from_the_configuration(relay: bool) -> None:
    config = WeightSync(num_slots=5)
    config.table.relay = relay
    # Of 2 GB: 60 s and 4 s per GB to retain a snapshot; 10 s, 2 s per GB and the draining for an apply.
    expected = {"lease_s": 68.0, "apply_timeout_s": 15.0, "progress_timeout_s": 5.0}
    # Adapters are merged into all weights.
    assert RegistrySettings.of(config, 4, 10**6, 1.0, None, 2 * 10**9).apply_timeout_s == expected["apply_timeout_s"]
    assert RegistrySettings.of(config, 4, 2 * 10**9, 1.0) == RegistrySettings(
        4, retained=3, relay_fanout=2 * relay, **expected
    )
