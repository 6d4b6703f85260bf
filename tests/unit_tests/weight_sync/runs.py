"""Whole runs that a seed draws: shapes, rates, and what goes wrong when."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from tests.deterministic.machine import Machine, Process, Violation
from tests.deterministic.parts import REGISTRY
from tests.unit_tests.weight_sync.job import Actor, Job, Parts, Shape
from torchtitan.weight_sync.actor_state import ActorState
from torchtitan.weight_sync.facade import all_have
from torchtitan.weight_sync.wire.runtime import Channel, Message

JOIN_SECONDS = 0.1
# A registry or shard server that dies or freezes is noticed and started again, actors and ranks find it, and the last
# snapshot's checksums are computed.
RECOVERY_SECONDS = 13.0


def draw_small_shape(rng: random.Random) -> Shape:
    """As small as something can still go wrong: a healthy actor and one that may be anything."""
    interval = 0.2
    other = interval * rng.choice((0.2, 0.5, 1.2, 2.5, 4.0))
    return Shape(
        ranks=rng.randint(1, 2),
        buckets=rng.randint(1, 2),
        slots=3,
        interval=interval,
        actor_seconds=(interval * rng.uniform(0.05, 0.4), other * rng.uniform(0.9, 1.1)),
        lease_s=rng.choice((0.6, 5.0)),
        progress_timeout_s=1.5,
    )


def draw_shape(rng: random.Random, slow: int) -> Shape:
    """Healthy actors take at most 0.45 of a publishing interval for a transfer, slow ones 1.2 to 12 of them."""
    interval = rng.choice((0.3, 0.6, 1.0))
    healthy = [interval * rng.uniform(0.05, 0.4) for _ in range(rng.randint(1, 2))]
    late = [interval * rng.choice((1.2, 2.0, 4.0, 8.0, 12.0)) * rng.uniform(0.8, 1.25) for _ in range(slow)]
    buckets = rng.randint(1, 3)
    # Here a bucket arrives in two pieces.
    longest_piece = 1.5 * max(healthy + late) / buckets
    return Shape(
        ranks=rng.randint(1, 2),
        buckets=buckets,
        slots=rng.choice((3, 3, 4)),
        interval=interval,
        actor_seconds=tuple(healthy + late),
        lease_s=interval * rng.choice((3.0, 20.0)),
        by_reference=rng.random() < 0.2,
        connections=2 if buckets == 3 else 1,
        delta=rng.random() < 0.3,
        progress_timeout_s=max(rng.choice((0.5, 2.0, 5.0)), longest_piece),
    )


def is_healthy(shape: Shape, actor: Actor) -> bool:
    """By its link; it may have been broken all the same."""
    return actor.seconds <= 0.5 * shape.interval


def break_actor(job: Job, actor: Actor) -> None:
    """Something happens to an actor, and is over some time later."""
    machine, rng = job.machine, job.machine.random
    what = rng.choice(("freeze", "kill", "cut off", "restart", "forget"))
    actor.faults += 1
    process = actor.process
    if what == "freeze":
        process.freeze()
        machine.at(rng.uniform(0.1, 4.0), None, process.thaw)
    elif what == "kill":
        process.kill()
    elif what == "forget":
        process.forget_connections()
    elif what == "restart":
        process.kill()
        job.restarting += 1

        def restart() -> None:
            job.restarting -= 1
            if actor.process is process:
                actor.begin()

        machine.at(rng.uniform(0.0, 1.0), None, restart)
    else:
        process.cut_off = True


def break_server(job: Job, which: Callable[[], Process]) -> None:
    """Something happens to the registry or a shard server; their parent starts them again."""
    process = which()
    machine, rng = job.machine, job.machine.random
    what = rng.choice(("freeze", "kill", "hang"))
    job.server_faults += 1
    if what == "freeze":
        process.freeze()
        machine.at(rng.uniform(0.1, 6.0), None, lambda: process.thaw() if process.alive else None)
    elif what == "kill":
        process.kill()
    else:
        process.hung_threads.add(rng.choice(("checksums", "deltas-0")))


def kill_all_servers(job: Job) -> None:
    """As when a machine runs out of memory."""
    job.server_faults += 1
    for process in (job.registry_process, *(rank.process for rank in job.ranks)):
        process.kill()


def finish(job: Job, seconds: float) -> None:
    """Let what is under way end, in so many seconds and three transfers; then everybody leaves."""
    slowest = max(actor.seconds for actor in job.actors)
    deadline = job.machine.now + seconds + 3 * slowest + 2 * job.shape.progress_timeout_s
    while job.unsettled() and job.machine.now < deadline:
        job.machine.run(job.machine.now + 0.1)
    if job.unsettled():
        raise Violation(job.unsettled())
    job.check_nothing_leaks()


def run_slow_fleet(seed: int, parts: Parts | None = None, small: bool = False) -> Job:
    """Only actors misbehave: no version may be skipped, and healthy actors must not notice."""
    machine = Machine(seed)
    machine.validates = not small
    rng = machine.random
    shape = draw_small_shape(rng) if small else draw_shape(rng, rng.randint(0, 3))
    machine.distance = rng.choice((1.0, 1.0, 10.0))
    job = Job(machine, shape, parts or Parts())
    versions = 3 if small else rng.randint(4, 8)
    machine.run(JOIN_SECONDS)
    job.train(versions)
    end = JOIN_SECONDS + versions * shape.interval * 1.1
    breakable = job.actors[1:]
    for _ in range(rng.randint(0, 1 if small else 3)):
        if breakable:
            actor = rng.choice(breakable)
            machine.at(rng.uniform(0.0, end - JOIN_SECONDS), None, partial(break_actor, job, actor))
    machine.run(end)
    if job.skipped:
        raise Violation(f"versions {job.skipped} were skipped")
    for actor in job.actors:
        if is_healthy(shape, actor) and not actor.faults and machine.distance == 1.0:
            job.check_progress(actor, 0.0, end)
    job.check_bytes()
    for actor in job.actors:
        if actor.process.cut_off or actor.process.frozen:
            actor.process.kill()
    finish(job, 8.0)
    return job


def run_small(seed: int) -> Job:
    """The two kinds of run in turn, in small: many orders of events in little time."""
    return (run_slow_fleet, run_faults)[seed % 2](seed, small=True)


def run_faults(seed: int, parts: Parts | None = None, small: bool = False) -> Job:
    """Everything misbehaves; when it is over, the newest version is everywhere."""
    machine = Machine(seed)
    machine.validates = not small
    rng = machine.random
    shape = draw_small_shape(rng) if small else draw_shape(rng, rng.randint(0, 1))
    job = Job(machine, shape, parts or Parts())
    versions = 2 if small else rng.randint(3, 6)
    machine.run(JOIN_SECONDS)
    job.train(versions)
    end = JOIN_SECONDS + versions * shape.interval * 1.1
    for rank in job.ranks:
        rank.process.longest_on_thread["checksums"] = rng.choice((0.02, 1.5 * shape.interval))
    machine.corruption = rng.choice((0.0, 0.0, 0.05))
    impostor = Impostor(job) if rng.random() < 0.3 else None
    for _ in range(rng.randint(1, 1 if small else 3)):
        break_one(job, rng.uniform(0.0, end - JOIN_SECONDS))
    machine.run(end)
    machine.corruption = 0.0
    if impostor is not None:
        impostor.leave()
    for actor in job.actors:
        actor.process.thaw()
        if actor.process.cut_off:
            actor.process.kill()
    finish(job, 2 * RECOVERY_SECONDS)
    if impostor is None:
        job.check_bytes()
    return job


def run_crowd(seed: int, parts: Parts | None = None, actors: int = 300) -> Job:
    """Many actors join at once, and three things go wrong among them and the servers (of 1,000: 20 s to compute)."""
    machine = Machine(seed)
    machine.validates = False
    machine.message_seconds, machine.byte_seconds = 20e-6, 10e-9
    rng, interval = machine.random, 1.0
    shape = Shape(
        ranks=rng.randint(1, 2),
        buckets=1,
        interval=interval,
        actor_seconds=tuple(interval * rng.uniform(0.05, 0.4) for _ in range(actors)),
        lease_s=5.0,
        progress_timeout_s=2.0,
    )
    job = Job(machine, shape, parts or Parts())
    machine.run(1.0)
    if len(job.registry.actors) < actors:
        raise Violation(f"{len(job.registry.actors)} of {actors} actors have joined within a second")
    job.train(3)
    end = machine.now + 3 * interval * 1.1
    for _ in range(3):
        break_one(job, rng.uniform(0.0, end - machine.now))
    machine.run(end)
    for actor in job.actors:
        actor.process.thaw()
        if actor.process.cut_off:
            actor.process.kill()
    finish(job, 2 * RECOVERY_SECONDS)
    job.check_bytes()
    return job


def break_one(job: Job, seconds: float) -> None:
    """In so many seconds something happens to an actor, a shard server, the registry, or all servers."""
    rng = job.machine.random
    what, rank = rng.random(), rng.choice(job.ranks)
    if what < 0.4:
        victim = partial(break_actor, job, rng.choice(job.actors))
    elif what < 0.7:
        victim = partial(break_server, job, lambda: rank.process)
    elif what < 0.9:
        victim = partial(break_server, job, lambda: job.registry_process)
    else:
        victim = partial(kill_all_servers, job)
    job.machine.at(seconds, None, victim)


def run_relaunch(seed: int, parts: Parts | None = None) -> Job:
    """A launch dies, the next one has the same ports; actors of the first live on for a while."""
    machine = Machine(seed)
    rng = machine.random
    shape = draw_shape(rng, 1)
    first = Job(machine, shape, parts or Parts())
    machine.run(JOIN_SECONDS)
    first.train(3)
    machine.run(JOIN_SECONDS + shape.interval * rng.uniform(1.0, 4.0))
    first.end()
    second = Job(machine, replace(shape, epoch="e2"), parts or Parts())
    second.strangers = first.actors
    second.train(5)
    machine.run(machine.now + 5 * shape.interval + 3.0)
    for actor in first.actors:
        actor.process.kill()
    finish(second, RECOVERY_SECONDS)
    return second


def run_without_registry(seed: int, parts: Parts | None = None) -> Job:
    """The registry dies while a slow actor pulls, and stays away for longer than any lease."""
    machine = Machine(seed)
    rng = machine.random
    shape = replace(draw_shape(rng, 1), lease_s=1.0, by_reference=False, buckets=4)
    shape = replace(shape, actor_seconds=(*shape.actor_seconds[:-1], 16.0), progress_timeout_s=5.0)
    job = Job(machine, shape, parts or Parts())
    job.server_faults = 1
    machine.run(JOIN_SECONDS)
    job.train(3)
    machine.run(JOIN_SECONDS + shape.interval * rng.uniform(1.2, 2.5))
    job.restart_registry = False
    job.registry_process.kill()
    machine.run(machine.now + 12.0)
    job.restart_registry = True
    finish(job, RECOVERY_SECONDS)
    return job


def run_references(seed: int, parts: Parts | None = None) -> Job:
    """Actors copy the buckets themselves, on threads that take their time."""
    machine = Machine(seed)
    shape = replace(draw_shape(machine.random, 2), by_reference=True, slots=3, lease_s=20.0)
    machine.distance = machine.random.choice((1.0, 10.0, 40.0))
    job = Job(machine, shape, parts or Parts())
    for actor in job.actors:
        actor.process.longest_work = 2.0 * shape.interval
    machine.run(JOIN_SECONDS)
    job.train(8)
    machine.run(JOIN_SECONDS + 8 * shape.interval * 1.1)
    if job.skipped and machine.distance < 40.0:
        raise Violation(f"versions {job.skipped} were skipped")
    finish(job, 8.0)
    job.check_bytes()
    return job


def run_hung(seed: int, parts: Parts | None = None) -> Job:
    """One actor's engine hangs for ever, in an apply or in a read: in blocking mode it costs one wait."""
    machine = Machine(seed)
    rng = machine.random
    thread = rng.choice(("apply", "fetch"))
    shape = replace(draw_shape(rng, 0), by_reference=thread == "fetch", lease_s=2.0, apply_timeout_s=1.0)
    slowest = max(shape.actor_seconds)
    shape = replace(shape, actor_seconds=(*shape.actor_seconds, slowest), progress_timeout_s=0.5)
    job = Job(machine, shape, parts or Parts())
    stuck, hangs_at = job.actors[-1], rng.randint(0, 3)
    machine.run(JOIN_SECONDS)
    waits: list[float] = []
    for version in range(hangs_at + 6):
        if version == hangs_at:
            stuck.process.hung_threads.add(thread)
        job.train(1)
        started_at = machine.now
        while not all_have(job.registry.status(), version) and machine.now < started_at + 30.0:
            machine.run(machine.now + 0.05)
        waits.append(machine.now - started_at)
        machine.run(machine.now + shape.interval)
    usual = 2 * slowest * 1.25 + 0.3
    longest = shape.apply_timeout_s + (shape.lease_s if thread == "fetch" else 0.0) + usual
    if waits[hangs_at] > longest or max(waits[:hangs_at] + waits[hangs_at + 1 :]) > usual:
        raise Violation(f"{stuck.name} hangs in {thread} at version {hangs_at}, and the trainer waited {waits}")
    logs = [event for _, event, fields in job.journal if event in ("late", "evicted") and fields["actor"] == stuck.name]
    if job.registry.status()["actors"][stuck.name]["state"] != ActorState.LATE or not logs:
        raise Violation(f"{stuck.name} hangs, and nobody says so: {logs}")
    stuck.process.kill()
    stuck.begin()
    machine.run(machine.now + 1.0 + usual)
    if job.registry.status()["actors"][stuck.name]["state"] != "ready":
        raise Violation(f"{stuck.name} has taken a version, and is still late")
    finish(job, 8.0)
    return job


def run_relay(seed: int, parts: Parts | None = None) -> Job:
    """Actors pass versions on to each other; some of them die or freeze meanwhile."""
    machine = Machine(seed)
    rng = machine.random
    shape = replace(draw_shape(rng, rng.randint(0, 1)), by_reference=False, relay_fanout=rng.randint(1, 2))
    more = tuple(shape.interval * rng.uniform(0.05, 0.3) for _ in range(rng.randint(1, 3)))
    shape = replace(shape, actor_seconds=shape.actor_seconds + more)
    job = Job(machine, shape, parts or Parts())
    versions = rng.randint(3, 6)
    machine.run(JOIN_SECONDS)
    job.train(versions)
    end = JOIN_SECONDS + versions * shape.interval * 1.1
    for _ in range(rng.randint(0, 3)):
        machine.at(rng.uniform(0.0, end - JOIN_SECONDS), None, partial(break_actor, job, rng.choice(job.actors)))
    machine.run(end)
    if job.skipped:
        raise Violation(f"versions {job.skipped} were skipped")
    for actor in job.actors:
        actor.process.thaw()
        if actor.process.cut_off:
            actor.process.kill()
    job.check_bytes()
    finish(job, 8.0)
    return job


class Impostor:
    """Listens at the registry's address whenever nobody else does. It knows the protocol, but no key."""

    def __init__(self, job: Job):
        self.job = job
        self.process = Process(job.machine, "impostor")
        self._left = False
        self._look()

    def leave(self) -> None:
        self._left = True
        self.process.kill()

    def _look(self) -> None:
        if not self._left:
            if REGISTRY not in self.job.machine.listeners:
                self.process.runtime.listen(REGISTRY, self._accept)
            self.job.machine.at(0.05, self.process, self._look)

    def _accept(self, channel: Channel) -> None:
        channel.on_message = self._hello
        channel.send({"type": "challenge", "nonce": "n"})

    def _hello(self, channel: Channel, message: Message) -> None:
        channel.send({"type": "welcome", "proof": "of nothing", "fields": {"term": 99}})
        channel.on_message = lambda _channel, _message: None
