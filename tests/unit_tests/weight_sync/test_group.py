"""An actor of two workers on the deterministic machine: whatever dies, freezes or fails, all hold what it serves."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
import xxhash

from tests.deterministic.machine import Machine, Process, Violation
from tests.deterministic.parts import BUCKET_BYTES, REGISTRY, TOKEN, content, whole_layout
from tests.unit_tests.weight_sync.job import Job, Shape
from torchtitan.weight_sync.actor.group import NOTHING, Leader, WorkerPuller
from torchtitan.weight_sync.actor.puller import GIVE_UP_SECONDS, Served
from torchtitan.weight_sync.memory.manifest import BucketKey, Layout, Manifest, WeightsRefused
from torchtitan.weight_sync.wire.handshake import ACTOR, WORKER, Identity, role_key
from torchtitan.weight_sync.wire.runtime import SILENCE_SECONDS, Channel, Message

WORKERS = 2
KEY = role_key(TOKEN, ACTOR, "a")
SHAPE = Shape(ranks=2, buckets=4, actor_seconds=(), progress_timeout_s=1.5)


class SimLeader(Leader):
    """Applies without a thread that waits."""

    applied = 0

    def _apply_staged(self) -> None:
        if self._staged is None or self._applying or self._is_pinned() or self._closed:
            return
        (manifest, figures), self._staged, self._applying = self._staged, None, True
        started_at = self._runtime.now()

        def done(order: Future[Mapping[str, float]]) -> None:
            error = order.exception()
            self.applied += error is None
            self._applied(manifest, figures, started_at, None if error else order.result(), error)

        order: Future[Mapping[str, float]] = Future()
        order.add_done_callback(done)
        self._runtime.call_later(0.05, partial(self.order, manifest, order))


class LeadingEngine:
    """Stages nothing."""

    def choose_memory(self) -> bool:
        return True

    def prepare(self, layout: Layout, _message: Message) -> list[tuple[int, int]]:
        return layout.bucket_keys()


class Connection:
    """A worker's engine, as one of its connections reaches it: an older one changes nothing any more."""

    def __init__(self, worker: SimWorker):
        self._worker = worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def apply(self, manifest: Manifest) -> Mapping[str, float]:
        if self._worker.connection is not self:
            raise WeightsRefused("another connection has taken this one's place")
        return self._worker.apply(manifest)


class SimWorker:
    """A worker's process and engine: a share of memory that all workers have."""

    def __init__(self, group: Group, number: int):
        self.group, self.number = group, number
        self.holds: Served | None = None
        self.raises: Exception | None = None
        """What its next apply raises"""
        self.start()

    def start(self) -> None:
        """A new process, which holds nothing."""
        self.held: dict[BucketKey, int] = {}
        self.held_live: dict[BucketKey, int] = {}
        self.holds = None
        self.process = Process(self.group.job.machine, f"worker-{self.number}", rate=2000.0)
        self.connect()

    def connect(self) -> None:
        """To the leader, with what the engine holds."""
        identity = Identity(WORKER, str(self.number), role_key(KEY, WORKER, str(self.number)))
        leader, actor = self.group.address, Identity(ACTOR, "a", KEY)
        options: dict[str, Any] = {"served": self.holds, "puller": actor}
        self.connection = Connection(self)
        self.puller = WorkerPuller(self.process.runtime, leader, identity, SHAPE.epoch, self.connection, **options)
        self.puller._read_layout = lambda _data: whole_layout(SHAPE.ranks, SHAPE.buckets)  # type: ignore[method-assign]
        self.puller.start()

    def prepare(self, layout: Layout, _message: Message) -> list[tuple[int, int]]:
        return [(rank, bucket) for rank, bucket in layout.bucket_keys() if rank == min(self.number, 1)]

    def choose_memory(self) -> bool:
        return True

    def pieces(self, key: BucketKey) -> list[memoryview]:
        rank, bucket = key
        return [memoryview(self.group.staging[rank])[bucket * BUCKET_BYTES : (bucket + 1) * BUCKET_BYTES]]

    def patch(self, key: BucketKey, delta: memoryview, in_place: bool) -> str:
        raise NotImplementedError

    def fetch(self, key: BucketKey, reference: Message) -> str:
        return xxhash.xxh3_128_hexdigest(self.pieces(key)[0])

    def apply(self, manifest: Manifest) -> Mapping[str, float]:
        if self.raises is not None:
            error, self.raises = self.raises, None
            raise error
        random = self.group.job.machine.random
        if random.random() < self.group.failures:
            if random.random() < 0.5:
                raise WeightsRefused("not now")
            self.holds = None
            raise RuntimeError("half of it")
        for rank, staged in enumerate(self.group.staging):
            if bytes(staged) != content(SHAPE.epoch, manifest.version, rank, SHAPE.buckets):
                raise Violation(f"worker {self.number} applies torn bytes as version {manifest.version}")
        self.holds = Served(manifest.epoch, manifest.version, manifest.digest)
        return {}


class Group:
    """The actor: its leader, its workers."""

    def __init__(self, job: Job, failures: float = 0.0):
        self.job, self.failures, self.lives = job, failures, 0
        self.staging = [bytearray(SHAPE.buckets * BUCKET_BYTES) for _ in range(SHAPE.ranks)]
        self.start_leader(None)
        self.workers = [SimWorker(self, number) for number in range(WORKERS)]

    def start_leader(self, served: Served | None) -> None:
        """served: what the engine serves, as the process beside it remembers."""
        self.lives += 1
        self.address = f"10.0.2.1:{8000 + self.lives}"
        self.process = Process(self.job.machine, "leader")
        names = self.process.runtime, REGISTRY, Identity(ACTOR, "a", KEY), SHAPE.epoch, LeadingEngine()
        options: dict[str, Any] = {"served": served}
        self.leader = SimLeader(*names, count=WORKERS, secret=KEY, apply_timeout_s=2.0, **options)
        self.leader._read_layout = lambda _data: whole_layout(SHAPE.ranks, SHAPE.buckets)  # type: ignore[method-assign]
        self.leader.start(self.address)

    def replace_leader(self) -> None:
        """The agent connects anew: workers do, too, and the engine remembers what it serves."""
        self.start_again(self.leader.serving)

    def start_again(self, served: Served | None) -> None:
        """A new leader, whose engine remembers that it serves this, and new connections of the workers."""
        self.leader.close()
        self.process.kill()
        self.start_leader(served)
        for worker in self.workers:
            worker.puller.close()
            worker.connect()

    def check(self) -> None:
        """What the actor says that it serves, every worker that it knows of holds, unless the engine stands still."""
        served = self.leader.serving
        if not self.leader.registry.connected or self.leader._applying:
            return
        for number, known in self.leader._workers.items():
            worker = self.workers[number]
            # Of one that dies behind a connection that was cut the leader hears after SILENCE_SECONDS: no engine runs.
            lives = not known.channel.closed and known.channel.peer.process.alive  # type: ignore[attr-defined]
            if served is not None and known.known and lives and worker.holds != served:
                raise Violation(f"the actor serves {served}, and worker {number} holds {worker.holds}")

    def run(self, seconds: float) -> None:
        machine = self.job.machine
        until = machine.now + seconds
        while machine.now < until:
            machine.run(min(until, machine.now + 0.02))
            self.check()

    def close(self) -> None:
        self.leader.close()


def disturb(group: Group) -> None:
    """One thing that can happen."""
    random = group.job.machine.random
    worker = random.choice(group.workers)
    kind = random.choice(["kill", "freeze", "cut", "leader", "registry", "torn"])
    if kind == "kill":
        worker.process.kill()
        worker.start()
    elif kind == "freeze":
        worker.process.freeze()
    elif kind == "cut":
        worker.process.forget_connections()
    elif kind == "leader":
        group.replace_leader()
    elif kind == "registry":
        group.leader.registry.hang_up("cut")
    elif worker.puller.serving is not None:
        worker.puller.poison_version(worker.puller.serving.version, "flipped")


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 200, 25))
def test_all_workers_hold_what_their_actor_serves(start: int) -> None:
    for seed in range(start, start + 25):
        job = Job(Machine(seed), SHAPE)
        group = Group(job, failures=0.1 if seed % 2 else 0.0)
        group.run(1.0)
        for _ in range(8):
            job.train(1)
            group.run(job.machine.random.random())
            if job.machine.random.random() < 0.6:
                disturb(group)
            group.run(1.5 * job.machine.random.random())
            for worker in group.workers:
                if job.machine.random.random() < 0.5:
                    worker.process.thaw()
        group.failures = 0.0
        for worker in group.workers:
            worker.process.thaw()
        if job.registry.actors["a"].state == "given_up":
            # Its workers were frozen in three retained snapshots in a row: it is started anew.
            group.replace_leader()
        group.run(20.0)
        newest = max(job.committed)
        assert group.leader.serving is not None and group.leader.serving.version == newest, seed
        assert job.registry.actors["a"].version == newest, seed
        group.close()


def serving() -> tuple[Job, Group]:
    """A group whose workers hold the first version."""
    job = Job(Machine(0), SHAPE)
    group = Group(job)
    group.run(1.0)
    job.train(1)
    group.run(2.0)
    return job, group


def test_row_of_a_delivery_has_the_bytes_of_all_workers_and_the_most_of_one() -> None:
    job, group = serving()
    (figures,) = [row["figures"] for _, event, row in job.journal if event == "delivery"]
    version_bytes = SHAPE.ranks * SHAPE.buckets * BUCKET_BYTES
    assert (figures["bytes_full"], figures["worker_bytes"]) == (version_bytes, version_bytes // WORKERS)
    group.close()


def test_a_version_that_one_worker_finds_corrupt_is_served_by_none() -> None:
    job, group = serving()
    applied = group.leader.applied
    group.workers[1].puller.poison_version(0, "flipped")
    group.run(0.02)
    assert group.leader.poisoned and group.leader.serving is None
    assert job.registry.actors["a"].state == "poisoned"
    # It comes anew, for both.
    group.run(5.0)
    assert group.leader.applied == applied + 1 and job.registry.actors["a"].version == 0
    group.close()


def test_actor_waits_for_workers_that_take_longer_than_a_registry_may_be_away() -> None:
    """It makes no call meanwhile, which is no silence of the registry's: that may be away just then."""
    job = Job(Machine(0), SHAPE)
    group = Group(job)
    for worker in group.workers:
        worker.process.kill()
    group.run(2 * GIVE_UP_SECONDS)
    job.registry_process.kill()
    for worker in group.workers:
        worker.start()
    group.run(6.0)
    job.train(1)
    group.run(2.0)
    assert not group.leader.registry.failure and group.leader.applied == 1
    group.close()


def test_worker_that_does_not_come_back_ends_the_connection_with_the_reason() -> None:
    _job, group = serving()
    first, second = group.workers
    second.process.kill()
    group.run(GIVE_UP_SECONDS)
    second.start()
    group.run(5.0)
    assert group.leader.registry.connected and not group.leader.registry.failure
    # It has as much time once more, and as long as it may apply.
    first.process.kill()
    group.run(GIVE_UP_SECONDS + 1.0)
    assert not group.leader.registry.failure
    group.run(2.0)
    assert group.leader.registry.failure == "worker 0 has not come back for 62 s"
    group.close()


def test_what_is_found_of_the_version_before_is_no_answer_to_an_order() -> None:
    """A worker's check of what it served may end when it has been told to apply the next version."""
    job, group = serving()
    applied, send = group.leader.applied, group.leader._send

    def and_then(message: Message) -> None:
        send(message)
        if message["type"] == "apply":
            found = {"type": "poisoned", "version": message["version"] - 1, "reason": "flipped"}
            group.leader._on_worker_message(1, group.leader._workers[1], found)

    group.leader._send = and_then  # type: ignore[method-assign]
    job.train(1)
    group.run(2.0)
    assert group.leader.applied == applied + 1 and job.registry.actors["a"].version == 1
    assert not any(event == "poisoned" for _, event, _ in job.journal)
    group.close()


def test_what_workers_have_verified_counts_once_all_have_told_their_leader() -> None:
    group = Group(Job(Machine(0), SHAPE))
    group.run(2.0)
    first, second = group.workers

    def tell(worker: SimWorker, version: int, matched: int, unfinished: int) -> None:
        found = {"version": version, "matched": matched, "mismatched": 0, "unfinished": unfinished}
        worker.puller.tell_verified(found)
        group.run(1.0)

    tell(first, 1, 1, 0)
    assert group.leader.verified() is None
    tell(second, NOTHING, 0, 1)
    assert group.leader.verified() == {"version": None, "matched": 0, "mismatched": 0, "unfinished": 1}
    # Version 2 only the second has come to, version 3 both.
    tell(second, 2, 1, 1)
    tell(first, 3, 2, 1)
    assert group.leader.verified() == {"version": None, "matched": 0, "mismatched": 0, "unfinished": 1}
    tell(second, 3, 2, 1)
    assert group.leader.verified() == {"version": 3, "matched": 1, "mismatched": 0, "unfinished": 1}
    # Also over a connection that was cut, and it counts no version twice.
    second.process.forget_connections()
    group.run(10.0)
    assert group.leader.verified() == {"version": 3, "matched": 1, "mismatched": 0, "unfinished": 1}
    group.close()


def test_what_a_worker_says_of_an_older_version_ends_no_pull() -> None:
    job, group = serving()
    begin = group.leader._begin

    def and_then(serial: int, manifest: Manifest, peer: Message | None) -> None:
        begin(serial, manifest, peer)
        late = {"type": "ended", "version": manifest.version - 1, "outcome": "gone", "reason": "late"}
        group.leader._on_worker_message(1, group.leader._workers[1], late)

    group.leader._begin = and_then  # type: ignore[method-assign]
    job.train(1)
    group.run(3.0)
    assert group.leader.serving is not None and group.leader.serving.version == 1
    assert not any(event == "delivery" and row["outcome"] == "aborted" for _, event, row in job.journal)
    group.close()


def test_memory_that_a_worker_still_applies_from_is_not_overwritten() -> None:
    """Also where the other worker is lost and back meanwhile: the actor is whole again, but not idle."""
    job, group = serving()
    lost, applying = group.workers
    # Whoever applies checks at the end of that time what it applies from (see SimWorker.apply).
    applying.process.longest_on_thread["apply"] = 1e6
    job.train(1)
    order, end = group.leader._workers[1], job.machine.now + 3.0
    while order.answer is not None and job.machine.now < end:
        group.run(0.05)
    assert order.answer is None
    lost.process.kill()
    lost.start()
    job.train(1)
    group.run(1.0)
    assert group.leader._complete() and order is group.leader._workers[1]
    assert group.leader.transfer is None and bytes(group.staging[0]) == content(SHAPE.epoch, 1, 0, SHAPE.buckets)
    group.close()


def test_registry_that_vanishes_without_a_word_is_called_again() -> None:
    """No connection closes where a machine or a network is lost."""
    job, group = serving()
    job.registry_process.forget_connections()
    job.train(1)
    group.run(2 * SILENCE_SECONDS)
    assert group.leader.serving is not None and group.leader.serving.version == 1
    group.close()


def test_strangers_are_hung_up_on_at_the_end() -> None:
    """Also those who have not said yet who they are: their calls would wait until a deadline."""
    job, group = serving()
    stranger, events = Process(job.machine, "stranger"), list[str]()

    def opened(channel: Channel) -> None:
        channel.on_message = lambda _channel, message: events.append(message["type"])
        channel.on_close = lambda _channel, _reason: events.append("closed")

    stranger.runtime.dial(group.address, opened, events.append)
    group.run(0.5)
    assert events == ["challenge"]
    group.close()
    job.machine.run(job.machine.now + 0.5)
    assert events == ["challenge", "closed"]


def test_versions_of_other_numbers_are_not_applied() -> None:
    """An order for what is not staged here is refused, and nothing is applied by itself."""
    job, group = serving()
    worker = group.workers[0]
    before = worker.holds
    worker.puller._on_message({"type": "apply", "version": 1})
    group.run(1.0)
    assert worker.holds == before == group.leader.serving
    # Nor does that order count once it is staged: the other worker has none.
    orders = list[int]()
    group.leader.order = lambda manifest, _order: orders.append(manifest.version)  # type: ignore[method-assign]
    job.train(1)
    group.run(2.0)
    assert orders == [1] and worker.holds == before
    # Nor one for the version before, which it has no more.
    worker.puller._on_message({"type": "apply", "version": 0})
    group.run(1.0)
    assert worker.holds == before
    group.close()


def test_worker_that_serves_another_version_than_was_ordered_has_not_applied_it() -> None:
    job, group = serving()
    worker = group.workers[0]
    other = Served(SHAPE.epoch, 0, "other bytes")
    tell = worker.puller._tell_serving
    worker.puller._tell_serving = lambda _served, figures: tell(other, figures)  # type: ignore[method-assign]
    job.train(1)
    group.run(2.0)
    assert group.leader.poisoned and group.leader.serving is None
    assert job.registry.actors["a"].state == "poisoned" and "serves" in job.registry.actors["a"].reason
    group.close()


def test_workers_that_are_slow_but_get_on_keep_their_snapshot() -> None:
    """Their leader tells the registry how far they are: a version that came meanwhile takes nothing from them."""
    job = Job(Machine(0), SHAPE)
    group = Group(job)
    group.run(1.0)
    # A bucket in some .75 s: its share of a version takes each of them twice the time in which something has to come.
    for worker in group.workers:
        worker.process.rate = BUCKET_BYTES / 0.75
    job.train(1)
    group.run(1.0)
    job.train(1)
    group.run(3.0)
    assert group.leader.applied == 1 and not job.registry.snapshots.lost
    group.close()


def test_the_deadline_of_one_apply_ends_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    job, group = serving()
    machine, late, lost = job.machine, group.workers[1], list[int]()
    monkeypatch.setattr(group.leader, "_lost", lambda number, _reason: lost.append(number))
    send, ordered = group.leader._send, list[float]()

    def freezing(message: Message) -> None:
        send(message)
        if message["type"] == "apply":
            ordered.append(machine.now)
            if len(ordered) == 2:
                late.process.freeze()

    monkeypatch.setattr(group.leader, "_send", freezing)
    for number in range(2):
        job.train(1)
        until = machine.now + 5.0
        while len(ordered) == number and machine.now < until:
            group.run(0.02)
    # The first deadline passes while the second order is under way, which has some of its own time left.
    assert ordered[1] < ordered[0] + 2.0 < machine.now + 2.0
    group.run(ordered[0] + 2.1 - machine.now)
    assert late.process.frozen and not lost
    late.process.thaw()
    group.run(0.1)
    assert not lost and group.leader.applied == 3
    group.close()


def test_what_not_all_workers_apply_is_applied_again_by_all() -> None:
    job, group = serving()
    first, second = group.workers
    # One fails after the other has applied, or refuses: poisoned, and all get the same version once more.
    for number, (worker, error) in enumerate(((second, MemoryError("half-way")), (first, WeightsRefused("not now")))):
        applied, worker.raises = group.leader.applied, error
        job.train(1)
        group.run(5.0)
        poisoned = [row["reason"] for _, event, row in job.journal if event == "poisoned"]
        assert len(poisoned) == number + 1 and str(error) in poisoned[-1]
        assert group.leader.applied == applied + 1 and group.leader.serving == first.holds == second.holds
    # All refuse: the actor is as it was.
    for worker in group.workers:
        worker.raises = WeightsRefused("not now")
    before, applied = group.leader.serving, group.leader.applied
    job.train(1)
    group.run(5.0)
    assert sum(event == "poisoned" for _, event, _ in job.journal) == 2
    assert group.leader.applied == applied + 1 and group.leader.serving == first.holds == second.holds != before
    group.close()


@pytest.mark.parametrize("held", [(True, True), (True, False), (False, False)])
def test_what_workers_hold_counts_where_all_hold_what_the_engine_serves(held: tuple[bool, bool]) -> None:
    job, group = serving()
    served = group.leader.serving
    for worker, holds in zip(group.workers, held, strict=True):
        worker.holds = served if holds else None
    applied = group.leader.applied = 0
    group.start_again(served)
    group.run(5.0)
    poisoned = [row for _, event, row in job.journal if event == "poisoned"]
    assert (group.leader.applied == applied) is all(held) is not poisoned
    assert group.leader.serving == served == group.workers[0].holds == group.workers[1].holds
    group.close()


@pytest.mark.parametrize("served", [None, Served("e0-another", 0, "other bytes")], ids=["nothing", "another job"])
def test_workers_hold_in_vain_what_the_engine_does_not_serve(served: Served | None) -> None:
    job, group = serving()
    group.start_again(served)
    # Not checked meanwhile: what an engine serves of another job says nothing of its workers.
    job.machine.run(job.machine.now + 5.0)
    group.check()
    assert group.leader.applied == 1 and not any(event == "poisoned" for _, event, _ in job.journal)
    assert group.leader.serving == group.workers[0].holds == group.workers[1].holds
    group.close()


@pytest.mark.parametrize(
    ("number", "key", "epoch", "reason"),
    [(2, KEY, SHAPE.epoch, "no worker"), (0, "another", SHAPE.epoch, "refused"), (0, KEY, "another", "epoch")],
    ids=["number", "key", "epoch"],
)
def test_strangers_are_no_workers(number: int, key: str, epoch: str, reason: str) -> None:
    job, group = serving()
    process, before = Process(job.machine, "stranger"), dict(group.leader._workers)
    identity = Identity(WORKER, str(number), role_key(key, WORKER, str(number)))
    actor = Identity(ACTOR, "a", key)
    stranger = WorkerPuller(process.runtime, group.address, identity, epoch, LeadingEngine(), puller=actor)
    stranger.start()
    group.run(100.0)
    assert reason in stranger.registry.failure
    assert group.leader._workers == before and group.leader.serving is not None
    group.close()
