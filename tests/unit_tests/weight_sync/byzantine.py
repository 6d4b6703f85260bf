"""Runs with actors that have a valid key and mean harm: what they send is arbitrary, replayed, endless, untrue, or
nothing.

In every run the newest version is announced to every honest actor within 3 s, no version is skipped, nothing that the
trainer reads raises there, what registry and shard servers hold is bounded by the number of peers, no actor counts as
serving what was not published, and no snapshot is retained for one that takes nothing of it.
"""

from __future__ import annotations

import gc
import json
import random
import types
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from tests.deterministic.machine import Machine, Process, SimRuntime, Violation
from tests.deterministic.parts import REGISTRY, TOKEN
from tests.hostile import VALUES, message
from tests.unit_tests.weight_sync.job import Job, Parts
from tests.unit_tests.weight_sync.runs import JOIN_SECONDS, draw_shape, finish
from torchtitan.report.deliveries import JournalReader
from torchtitan.report.sync_metrics import Sums
from torchtitan.weight_sync.wire.handshake import ACTOR, Dialer, Identity
from torchtitan.weight_sync.wire.runtime import Channel, Message

ANNOUNCED_SECONDS = 3.0
# Of one peer, in containers of registry and shard servers.
BYTES_PER_PEER = 64 << 10


class Byzantine:
    """An actor that has its own key. how: what it does at every port that it knows."""

    def __init__(self, job: Job, name: str, how: str, rng: random.Random):
        self.job, self.name, self.how, self.rng = job, name, how, rng
        self.process = Process(job.machine, name, rate=rng.choice((1.0, 1e9)))
        self.said: list[Message] = []
        self.connections = self.floods = 0
        self._dial()

    def _dial(self) -> None:
        rng, registry = self.rng, self.rng.random() < 0.6
        where = REGISTRY
        fields: Message = {"epoch": self.job.shape.epoch, "instance": f"i{rng.randint(0, 2)}"}
        if registry and rng.random() < 0.5:
            fields["address"] = "10.9.9.9:1"
        if self.how == "relays":
            fields["address"] = "10.9.9.9:1"
        if not registry:
            fields["rank"] = rng.randrange(self.job.shape.ranks)
            where = self.job.ranks[fields["rank"]].address
        if rng.random() < 0.1:
            fields[rng.choice(("epoch", "instance", "address", "rank"))] = rng.choice(VALUES)
        identity = Identity.of(TOKEN, ACTOR, self.name)
        Dialer(self.process.runtime, where, identity, fields, self._in, lambda _reason: self._later(self._dial))

    def _later(self, what: Callable[[], None]) -> None:
        self.job.machine.at(self.rng.uniform(0.001, 0.3), self.process, what)

    def _in(self, channel: Channel, _fields: Message) -> None:
        self.connections += 1
        channel.on_message = lambda _channel, _message: None
        channel.on_close = lambda _channel, _reason: self._later(self._dial)
        channel.payload_target = lambda _channel, _message: None
        for _ in range(self.rng.randint(1, 5)):
            self._speak(channel)
        if self.how == "reconnects":
            channel.close("done")

    def _speak(self, channel: Channel) -> None:
        rng = self.rng
        newest = self.job.registry.newest
        about = (-1, "") if newest is None else (newest.version, newest.digest)
        replays = self.how == "replays" and self.said
        if self.how in LIES and rng.random() < 0.8:
            channel.send(LIES[self.how](self, *about))
            self._later(lambda: None if channel.closed else self._speak(channel))
            return
        outgoing = rng.choice(self.said) if replays else message(rng, *about, list(self.job.version_of))
        self.said.append(outgoing)
        self.floods += self.how == "floods"
        count = FLOOD if self.how == "floods" and self.floods <= FLOODS else 1
        if count > 1:
            outgoing = {"type": rng.choice(("ping", "pulling")), "serial": 1, "version": 1}
            if channel.peer.process is not self.job.registry_process:  # type: ignore[attr-defined]
                outgoing = {"type": "open", "pull": 1, "serial": 1, "buckets": [[0, 1]]}
        for _ in range(count):
            channel.send(outgoing)
        if self.how != "silent" and not channel.closed:
            self._later(lambda: None if channel.closed else self._speak(channel))

    def claims(self, version: int, digest: str) -> Message:
        """It serves what was not published."""
        claimed = self.rng.choice((version + 1, 2**62, max(version, 0)))
        return {"type": "serving", "version": claimed, "digest": self.rng.choice(("", "ff" * 16)), "figures": {}}

    def holds(self, version: int, digest: str) -> Message:
        """It pulls each version, says that it gets on, and takes nothing; or says that it has it all."""
        serial = self.job.registry.snapshots.newest or 0
        return self.rng.choice(
            (
                {"type": "ping", "bytes": round(1e9 * self.job.machine.now)},
                {"type": "pulling", "serial": serial, "version": version},
                {"type": "ended", "version": version, "outcome": "staged", "reason": ""},
            )
        )

    def relays(self, version: int, digest: str) -> Message:
        """It takes versions as fast as it can, so that others are to get them from it, and sends them nothing."""
        serial = self.job.registry.snapshots.newest or 0
        return self.rng.choice(
            (
                {"type": "open", "pull": serial, "serial": serial, "buckets": [[-1, self.job.shape.buckets]]},
                {"type": "serving", "version": version, "digest": digest, "figures": {"transfer_s": 0.0}},
            )
        )

    def ranges(self, version: int, digest: str) -> Message:
        """It requests nothing, in as many words as possible."""
        return {"type": "open", "pull": 1, "serial": 1, "buckets": [[0, 0]] * RANGES}


FLOOD, FLOODS, RANGES = 20_000, 2, 40_000
LIES: dict[str, Callable[[Byzantine, int, str], Message]] = {
    name: getattr(Byzantine, name) for name in ("claims", "holds", "relays", "ranges")
}
KINDS = ("talks", "replays", "floods", "silent", "reconnects", *LIES)


def held_bytes(job: Job) -> int:
    """What registry and shard servers hold, without the machine that they run on and what is on its way to them."""
    seen: set[int] = set()
    outside = (types.ModuleType, types.FunctionType, types.MethodType, type, Machine, Process, SimRuntime, Job, Channel)
    waiting: list[Any] = [vars(job.registry), *(vars(rank.server) for rank in job.ranks)]
    total = 0
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, (*outside, memoryview, bytearray)):
            continue
        seen.add(id(item))
        total += item.__sizeof__()
        waiting += gc.get_referents(item)
    return total


def check_announced(job: Job, version: int) -> None:
    """Every honest actor has heard of this version, or of a newer one."""
    for actor in job.actors:
        newest = actor.puller._newest
        if newest is None or newest[1].version < version:
            heard = None if newest is None else newest[1].version
            raise Violation(f"{actor.name} has not heard of {version} within {ANNOUNCED_SECONDS} s, only of {heard}")


def check_claims(job: Job) -> None:
    """Now: who serves what, and for whom a snapshot is retained."""
    for name, actor in job.registry.actors.items():
        if actor.version >= 0 and actor.version not in job.shared:
            raise Violation(f"{name} counts as serving version {actor.version}, which was not published")
    snapshots, now = job.registry.snapshots, job.machine.now
    for serial, since in snapshots.retained.items():
        pulls = [
            pull for name, pull in snapshots.pulls.items() if pull.serial == serial and name not in snapshots.resting
        ]
        still = min((now - max(since, pull.moved_at) for pull in pulls), default=0.0)
        if snapshots.settings.sees_bytes and still > job.shape.progress_timeout_s + 1.0:
            raise Violation(f"snapshot {serial} is retained, and nothing of it has moved for {still:.1f} s")


def check_trainer(job: Job) -> None:
    """What the training thread reads: the journal and the status, as it reads them."""
    journal, sums = JournalReader(), Sums()
    lines = [{"time": time, "event": event, **fields} for time, event, fields in job.journal]
    for entry in journal.feed(json.loads(json.dumps(line, allow_nan=False)) for line in lines):
        sums.add(entry)
    json.dumps([sums.figures(), job.registry.status()], allow_nan=False)
    if journal.left_out:
        raise Violation(f"{journal.left_out} lines of the journal make no sense")


def run_byzantine(seed: int, parts: Parts | None = None) -> Job:
    """Honest actors beside one to three hostile ones, on a machine where a message costs up to 0.2 ms."""
    machine = Machine(seed)
    rng = machine.random
    machine.message_seconds, machine.byte_seconds = rng.choice((50e-6, 200e-6)), 20e-9
    shape = replace(draw_shape(rng, rng.randint(0, 1)), relay_fanout=rng.choice((0, 0, 1)), slots=3)
    job = Job(machine, shape, parts or Parts())
    machine.run(JOIN_SECONDS)
    before, servers = held_bytes(job), [job.registry_process, *(rank.process for rank in job.ranks)]
    write = job._write

    def published(event: str, fields: Message) -> None:
        write(event, fields)
        if event == "publish":
            machine.at(ANNOUNCED_SECONDS, None, partial(check_announced, job, fields["version"]))

    job.registry._write = published
    hostile = [
        Byzantine(job, f"evil-{n}", rng.choice(KINDS), random.Random(f"{seed} {n}")) for n in range(rng.randint(1, 3))
    ]
    versions = 6
    for tenth in range(1, 200):
        machine.at(0.1 * tenth, None, partial(check_claims, job))
    job.train(versions)
    machine.run(JOIN_SECONDS + versions * shape.interval * 1.1 + ANNOUNCED_SECONDS + 0.1)
    if job.skipped:
        raise Violation(f"versions {job.skipped} were skipped")
    if servers != [job.registry_process, *(rank.process for rank in job.ranks)]:
        raise Violation("a server was started again")
    check_trainer(job)
    allowed = before + (len(hostile) + len(job.actors)) * BYTES_PER_PEER
    if (held := held_bytes(job)) > allowed:
        raise Violation(f"registry and shard servers hold {held} bytes, {before} before the hostile actors came")
    if not all(attacker.connections for attacker in hostile):
        raise Violation("a hostile actor was never let in")
    job.registry._write = write  # from now on actors leave
    for actor in hostile:
        actor.process.kill()
    machine.run(machine.now + 1.0)
    finish(job, 8.0)
    return job
