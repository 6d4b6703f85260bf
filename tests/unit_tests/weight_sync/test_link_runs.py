"""Whole runs in which buckets take links of their own (as nccl's do): slots are held as long as a link reads them."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import xxhash

from tests.deterministic.machine import Machine, SimRuntime, Violation
from tests.deterministic.parts import Slots
from tests.unit_tests.weight_sync import runs
from tests.unit_tests.weight_sync.job import Actor, Job, Parts
from torchtitan.weight_sync.actor.puller import Puller
from torchtitan.weight_sync.memory.manifest import Layout
from torchtitan.weight_sync.trainer.shard_server import ShardServer
from torchtitan.weight_sync.transports.bucket_server import Reader
from torchtitan.weight_sync.wire.runtime import Channel, Message

# What was under way when a channel ended is given up within this time.
ABORT_SECONDS = 0.05
# Of fetches, where everything misbehaves, this share finds its link broken.
BREAKS = 0.03
_names = itertools.count()
_links: dict[str, SimLink] = {}


class SimLink:
    """Reads a bucket when the actor fetches it, and what was under way at its end for a while longer."""

    def __init__(self, runtime: SimRuntime, slots: Slots, channel: Channel, _actor: str):
        self._runtime, self._slots = runtime, slots
        self.name, self.closed = f"link-{next(_names)}", False
        self._sent = self._fetched = 0
        self._queue: deque[tuple[memoryview, int, Callable[[], None]]] = deque()
        _links[self.name] = self
        channel.send({"type": "entry", "link": self.name, "key": "", "value": ""})

    def heard(self, message: Message) -> None:
        raise AssertionError("nothing is said")

    def send(self, memory: memoryview, sent: Callable[[], None]) -> Message:
        word = self._slots.words[self._index(memory)]
        self._queue.append((memory, word, sent))
        self._sent += 1
        return {"link": self.name, "number": self._sent}

    def _index(self, memory: memoryview) -> int:
        return next(index for index, slot in enumerate(self._slots.memory) if slot is memory.obj)

    def _read(self) -> tuple[bytes, Callable[[], None]]:
        memory, word, sent = self._queue.popleft()
        if self._slots.words[self._index(memory)] != word:
            raise Violation("a link reads a slot that was given back")
        return bytes(memory), sent

    def fetch(self, number: int) -> bytes:
        self._fetched += 1
        if number != self._fetched:
            raise Violation(f"{self.name} brings bucket {self._fetched} where bucket {number} is expected")
        data, sent = self._read()
        self._runtime.call_later(0.0, sent)
        return data

    def close(self) -> None:
        self.closed = True
        for _ in range(len(self._queue)):
            self._runtime.call_later(ABORT_SECONDS, lambda: self._read()[1]())


class LinkedServer(ShardServer):
    def __init__(self, runtime: SimRuntime, slots: Slots, *arguments: Any, **named: Any):
        named |= {"refer": None, "make_link": partial(SimLink, runtime, slots)}
        super().__init__(runtime, slots, *arguments, **named)

    def read(self, reader: Reader, bucket: int, base: int | None, again: bool) -> tuple[Message, memoryview | None]:
        message, data = super().read(reader, bucket, base, again)
        if data is not None and bucket >= 0:  # checksum checksum tables come before the buckets, over the channel
            raise Violation(f"bucket {bucket} goes over the channel, though it has a link")
        return message, data


class LinkedEngine:
    def __init__(self, actor: Actor):
        self._actor = actor
        self._channels: dict[str, Channel] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor, name)

    def prepare(self, layout: Layout, message: Message) -> Any:
        return self._actor.prepare(layout, {**message, "over_channel": False})

    def linked(self, channel: Channel, message: Message) -> None:
        self._channels[message["link"]] = channel

    def fetch(self, key: tuple[int, int], reference: Message) -> str:
        link, channel = _links[reference["link"]], self._channels[reference["link"]]
        machine = self._actor.job.machine
        if link.closed or channel.closed or (machine.corruption and machine.random.random() < BREAKS):
            machine.at(0.0, self._actor.process, lambda: channel.close("broken"))
            raise ConnectionError("the link is broken")
        data = link.fetch(reference["number"])
        self._actor.memory(key)[:] = data
        return xxhash.xxh3_128_hexdigest(data)


class LinkedPuller(Puller):
    def __init__(self, runtime: Any, registry: str, identity: Any, epoch: str, engine: Any, **named: Any):
        super().__init__(runtime, registry, identity, epoch, LinkedEngine(engine), **named)


LINKED = Parts(server=LinkedServer, puller=LinkedPuller)  # type: ignore[arg-type]


def run_slow_links(seed: int, parts: Parts) -> Job:
    """Actors take their time for every bucket; versions end while they are at it."""
    machine = Machine(seed)
    shape = replace(runs.draw_shape(machine.random, 2), by_reference=True, slots=3, lease_s=20.0)
    machine.corruption = machine.random.choice((0.0, 0.05))
    machine.distance = machine.random.choice((1.0, 10.0, 40.0))
    job = Job(machine, shape, parts)
    for actor in job.actors:
        actor.process.longest_work = 2.0 * shape.interval
    machine.run(runs.JOIN_SECONDS)
    job.train(8)
    machine.run(runs.JOIN_SECONDS + 8 * shape.interval * 1.1)
    if job.skipped and machine.distance < 40.0:
        raise Violation(f"versions {job.skipped} were skipped")
    runs.finish(job, 12.0 * shape.interval * shape.buckets)
    return job


@pytest.mark.slow
@pytest.mark.parametrize("run", [run_slow_links, runs.run_slow_fleet, runs.run_faults])
def test_promises_hold_where_buckets_take_links(run: Callable[..., Job]) -> None:
    logging.disable(logging.CRITICAL)
    try:
        for seed in range(150):
            _links.clear()
            try:
                run(seed, LINKED)
            except Exception as error:
                raise AssertionError(f"seed {seed}: {error!r}") from error
    finally:
        logging.disable(logging.NOTSET)
