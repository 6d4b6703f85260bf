"""What an actor does with a version: pinned, refused, half applied, found torn; and how many share what there is."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest
import torch

from tests.deterministic.machine import Machine
from tests.unit_tests.weight_sync.job import Actor, Job, Shape
from torchtitan.weight_sync.actor.puller import GIVE_UP_SECONDS
from torchtitan.weight_sync.memory.manifest import BucketKey, Layout, LayoutError, Manifest, WeightsRefused
from torchtitan.weight_sync.registry.registry import Registry
from torchtitan.weight_sync.trainer import shard_server
from torchtitan.weight_sync.wire.runtime import Message


def job_of(seed: int = 0, *, slots: int = 3, actor_seconds: tuple[float, ...] = (0.1,), lease_s: float = 60.0) -> Job:
    machine = Machine(seed)
    job = Job(machine, Shape(actor_seconds=actor_seconds, slots=slots, lease_s=lease_s))
    machine.run(0.2)
    return job


def publish(job: Job, seconds: float = 1.0) -> int:
    job.train(1)
    job.machine.run(job.machine.now + seconds)
    return job.committed[-1]


def versions(actor: Actor) -> list[int]:
    return [version for _, version in actor.versions]


def pin(job: Job, version: int | None) -> None:
    """As the trainer's connection does."""
    registry: Registry = job.registry
    channel = next(iter(job.registry_process.channels))
    registry._on_trainer_message(channel, {"type": "pin", "version": version})
    job.machine.run(job.machine.now + 0.1)


def test_version_that_was_pulled_before_the_pin_is_applied_after_it() -> None:
    job = job_of(actor_seconds=(0.5,))
    publish(job, 2.0)
    publish(job, 0.2)
    assert job.actors[0].puller.state == "pulling"
    pin(job, 0)
    job.machine.run(job.machine.now + 3.0)
    assert versions(job.actors[0]) == [0]
    pin(job, None)
    job.machine.run(job.machine.now + 1.0)
    assert versions(job.actors[0]) == [0, 1]


class Failing(Actor):
    """Fails to apply version 1 once."""

    error: Exception | None = None

    def apply(self, manifest: Manifest) -> Mapping[str, float]:
        if manifest.version == 1 and self.error is not None:
            error, self.error = self.error, None
            raise error
        return super().apply(manifest)


@pytest.mark.parametrize(
    "error", [RuntimeError("half of it is copied"), WeightsRefused("not now")], ids=["half", "refused"]
)
def test_version_that_fails_is_tried_again_and_half_of_it_is_served_by_none(error: Exception) -> None:
    job, half = job_of(actor_seconds=()), not isinstance(error, WeightsRefused)
    actor = Failing(job, "actor-0", 0.1, job.shape.epoch)
    job.actors.append(actor)
    job.machine.run(0.5)
    publish(job)
    actor.error = error
    publish(job, 0.8)
    known = job.registry.actors["actor-0"]
    assert actor.puller.poisoned is half and known.serves is not half and (known.state == "poisoned") is half
    # It is told once, with its reason, and so is what became of the delivery.
    events = [event for _, event, row in job.journal if str(error) in str(row.get("reason"))]
    assert events == (["poisoned", "delivery"] if half else ["delivery"])
    assert known.version == (-1 if half else 0)
    job.machine.run(job.machine.now + 3.0)
    assert versions(actor) == [0, 1] and known.serves and known.state == "ready" and not actor.puller.poisoned


class Full(Actor):
    """Has no memory for a version until `has_room`."""

    has_room = False

    def prepare(self, layout: Layout, message: Message) -> Collection[BucketKey]:
        if not self.has_room:
            raise LayoutError(f"no staging memory of {layout.total_bytes} bytes")
        return super().prepare(layout, message)


@pytest.mark.parametrize("in_time", [True, False])
def test_actor_that_joins_in_vain_again_and_again_gives_up_and_says_why(in_time: bool) -> None:
    job = job_of(actor_seconds=())
    actor = Full(job, "actor-0", 0.1, job.shape.epoch)
    job.actors.append(actor)
    publish(job)
    job.machine.run(GIVE_UP_SECONDS - 2.0)
    assert actor.puller.registry.failure == ""
    actor.has_room = in_time
    job.machine.run(GIVE_UP_SECONDS + 2.0)
    assert (versions(actor) == [0]) is in_time
    assert ("no staging memory of" in actor.puller.registry.failure) is not in_time
    joins = sum(event == "join" for _, event, _ in job.journal)
    job.machine.run(GIVE_UP_SECONDS + 7.0)
    assert sum(event == "join" for _, event, _ in job.journal) == joins


def test_look_that_is_faster_than_the_end_of_its_apply_is_not_lost() -> None:
    job = job_of()
    job.train(1)
    while job.actors[0].puller.state != "applying":
        job.machine.run(job.machine.now + 0.0005)
    job.actors[0].puller.poison_version(0, "layer 3 differs")
    job.machine.run(job.machine.now + 5.0)
    assert versions(job.actors[0]) == [0, 0], "it was taken for whole"
    assert job.registry.actors["actor-0"].serves


def test_actor_that_never_finishes_is_given_up_with_the_reason() -> None:
    # Twenty seconds for what it has five seconds for. Between two attempts it rests for ten times as long.
    job = job_of(actor_seconds=(0.1, 20.0), lease_s=5.0)
    job.train(180)
    job.machine.run(180.0)
    known = job.registry.actors["actor-1"]
    assert known.state == "given_up" and "within 5 s, 3 times in a row" in known.reason
    assert not job.skipped
    # A new process of its name starts afresh.
    job.actors[1].process.kill()
    job.actors[1].begin()
    job.machine.run(job.machine.now + 0.2)
    assert job.registry.actors["actor-1"].state == "pulling"


def damage(actor: Actor) -> None:
    """Change a bit of what it computes with, which deltas are decoded against."""
    actor.sets.live["w1"].view(torch.int32)[1, -1] ^= 1


def test_deltas_and_a_base_that_is_not_what_the_actor_thinks() -> None:
    machine = Machine(0)
    job = Job(machine, Shape(actor_seconds=(0.1, 0.1), delta=True))
    machine.run(0.2)
    actor, other = job.actors
    for _ in range(3):
        publish(job)
    buckets = job.shape.ranks * job.shape.buckets
    assert actor.patched == other.patched == 2 * buckets and actor.puller.corrupted == 0
    # Everything of version 3 is new, so that its buckets come as they are. Version 4 would be of few changes again.
    publish(job)
    assert actor.patched == 2 * buckets
    job.train(1)
    damage(actor)
    machine.run(machine.now + 1.0)
    assert versions(actor) == versions(other) == [0, 1, 2, 3, 4]
    assert actor.puller.corrupted == 0
    damage(actor)
    publish(job)
    assert versions(actor) == versions(other) == [0, 1, 2, 3, 4, 5]
    assert (actor.puller.corrupted, other.puller.corrupted) == (1, 0)
    assert actor.patched == other.patched == 3 * buckets


def test_encoder_makes_a_delta_once_for_all_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[memoryview] = []
    encode = shard_server.encode  # type: ignore[attr-defined]

    def counted(new: memoryview, base: memoryview, size: int) -> memoryview | None:
        made.append(new)
        return encode(new, base, size)

    monkeypatch.setattr(shard_server, "encode", counted)
    machine = Machine(0)
    job = Job(machine, Shape(actor_seconds=(0.1,) * 4, delta=True))
    machine.run(0.2)
    for _ in range(3):
        publish(job)
    assert len(made) == 2 * job.shape.ranks * job.shape.buckets


@pytest.mark.parametrize("slots", [3, 4])
def test_slow_actors_share_the_retained_snapshots(slots: int) -> None:
    job = job_of(slots=slots, actor_seconds=(0.1, 6.0, 9.0))
    job.train(120)
    job.machine.run(130.0)
    assert not job.skipped
    shares = [len(actor.versions) * actor.seconds / 120 for actor in job.actors[1:]]
    assert min(shares) >= (0.85 if slots == 4 else 0.5)
    job.check_progress(job.actors[0], 0.0, 120.0)


@pytest.mark.parametrize("fanout", [1, 2])
def test_relay_bounds_what_leaves_the_trainer(fanout: int) -> None:
    machine = Machine(0)
    seconds = tuple(0.1 + 0.001 * number for number in range(6))
    job = Job(machine, Shape(actor_seconds=seconds, relay_fanout=fanout, buckets=8))
    machine.run(0.2)
    publish(job)
    sent = job.reads.copy()
    for _ in range(5):
        publish(job)
    size = len(job.ranks[0].slots.memory[0])
    for rank in job.ranks:
        assert job.reads[rank] - sent[rank] == 5 * fanout * size
    # It streams: the last of six in a row is done long before six transfers are.
    for actor in job.actors:
        assert [version for _, version in actor.versions] == list(range(6))
        assert actor.versions[-1][0] - job.published_at[5] < 0.35
