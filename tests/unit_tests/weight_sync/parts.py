"""The parts of the world of weight_sync_world.py: ranks with their couriers, and actors, around the real machines.

A bucket's content is a number that says which epoch, version, rank and bucket it is. Couriers read slots, and relaying
actors their staging memory, at the moment of sending, as a socket would, so that memory that changes too early shows
up. A delta holds what the sender's base was: on anything else it gives rubbish.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torchtitan.weight_sync.states.boundary import Boundary
from torchtitan.weight_sync.states.receiver import (
    BeginApply,
    BeginRelay,
    Discard,
    EndRelay,
    ReceiverMachine,
    ReceiverState,
    Send,
)
from torchtitan.weight_sync.states.slot import SlotKeeper, SlotWriter

if TYPE_CHECKING:
    from tests.unit_tests.weight_sync.world import World

Message = dict[str, Any]
Key = tuple[int, int]
RUBBISH = -1


class Violation(AssertionError):
    """What must never happen has happened."""


def require(condition: object, message: str) -> None:
    if not condition:
        raise Violation(message)


class Shape(NamedTuple):
    """What a world consists of."""

    ranks: int = 2
    actors: int = 2
    slots: int = 3
    buckets: int = 2
    workers: int = 1
    delta: bool = False
    full_every: int = 3
    relay: bool = False
    fanout: int = 1


def identity(epoch: int, version: int) -> int:
    return epoch * 1000 + version


def content(snapshot: int, rank: int, bucket: int) -> int:
    return (snapshot * 16 + rank) * 16 + bucket


def digest_of(checksums: list[list[Any]]) -> str:
    return str(checksums)


@dataclass
class Sending:
    """A link's delivery: from a courier or a relaying actor to one worker of an actor."""

    attempt: int
    actor: int
    worker: int
    keys: list[Key]
    slots: tuple[tuple[int, int], ...] = ()
    """A courier's: (index, serial) of what it sends and, for a delta, of the base"""
    position: int = 0


class Rank:
    """A trainer rank and its courier; a port for the real Boundary."""

    def __init__(self, world: World, number: int):
        self.world, self.number = world, number
        slots = world.shape.slots + world.shape.delta
        self.words = [0] * slots
        self.memory = [RUBBISH] * slots
        self.writer = SlotWriter(self.words)
        self.boundary = Boundary(self)
        self.reserved: int | None = None
        self.taken: dict[int, int] = {}
        """serial -> content of every snapshot that was taken"""
        self.failed: list[tuple[int, int]] = []
        self.newest_told = 0
        """Serial of the newest version that a coordinator has called published"""
        self.start_courier()

    # The trainer's side

    def reserve(self) -> bool:
        if self.reserved is None:
            self.reserved = self.writer.reserve()
        if self.reserved is None:
            self.tell({"type": "need_slot"})
        return self.reserved is not None

    def release(self) -> None:
        if self.reserved is not None:
            self.writer.release(self.reserved)
            self.reserved = None

    def snapshot(self, version: int, serial: int) -> None:
        require(self.reserved is not None, "a snapshot without a reserved slot")
        index, self.reserved = self.reserved, None
        assert index is not None
        self.writer.begin(index, version, serial)
        self.memory[index] = self.taken[serial] = identity(self.world.epoch, version)
        self.writer.finish(index)
        self.look()

    def fail(self, version: int, serial: int) -> None:
        self.failed.append((serial, version))
        self.tell({"type": "failed", "serial": serial, "version": version})

    # The courier's side

    def start_courier(self) -> None:
        self.keeper = SlotKeeper(self.words)
        self.inbox: deque[Message] = deque()
        self.outbox: deque[Message] = deque()
        self.connected = self.frozen = False
        self.sending: list[Sending] = []
        self.stopping: list[Sending] = []
        """Given up, but a frame is still on its way out of the slot"""
        self.hashing: deque[tuple[int, int]] = deque()
        self.checksums: dict[int, list[int]] = {}
        self.look()

    def tell(self, message: Message) -> None:
        if self.connected:
            self.outbox.append(message)

    def look(self) -> None:
        """Find new snapshots, as the courier does when its bell rings."""
        filled = self.keeper.filled()
        for serial in [serial for serial in self.checksums if serial not in filled]:
            del self.checksums[serial]
        known = {serial for serial, _ in self.hashing}
        for serial, (index, _) in sorted(filled.items(), reverse=True):
            if serial not in self.checksums and serial not in known:
                self.keeper.hold(serial, "checksum")
                self.hashing.append((serial, index))

    def read_slot(self, index: int, serial: int) -> int:
        require(self.memory[index] == self.taken[serial], f"slot {index} was reused while it was read")
        return self.memory[index]

    def hash(self) -> None:
        serial, index = self.hashing.popleft()
        snapshot = self.read_slot(index, serial)
        self.checksums[serial] = [content(snapshot, self.number, b) for b in range(self.world.shape.buckets)]
        self.report(serial)
        self.keeper.let_go(serial, "checksum")

    def report(self, serial: int) -> None:
        found = self.keeper.filled().get(serial)
        if found is not None:
            sums = self.checksums[serial]
            self.tell({"type": "snapped", "serial": serial, "version": found[1], "checksums": sums})

    def reason(self, sending: Sending) -> str:
        return f"{sending.attempt}/{sending.worker}"

    def obey_send(self, message: Message) -> None:
        attempt, serial, base = message["attempt"], message["serial"], message["base_serial"]
        actor = self.world.index[message["actor"]]
        needed = (serial,) if base is None else (serial, base)
        filled = self.keeper.filled()
        if not all(attempt in self.keeper.leases(one) and one in filled for one in needed):
            self.broken(attempt, "the slot is not leased")
            return
        if message["data"] != self.world.actors[actor].address:
            self.broken(attempt, "connection refused")
            return
        self.stop(lambda sending: sending.actor == actor)
        for worker in range(self.world.shape.workers):
            keys = [key for key in self.world.keys[worker] if key[0] == self.number]
            if keys:
                sending = Sending(attempt, actor, worker, keys, tuple((filled[one][0], one) for one in needed))
                for one in needed:
                    self.keeper.hold(one, self.reason(sending))
                self.sending.append(sending)

    def send(self, sending: Sending) -> None:
        """One bucket leaves the slot's memory, as it is now."""
        key = sending.keys[sending.position]
        found = [content(self.read_slot(*slot), *key) for slot in sending.slots]
        payload = found[0] if len(found) == 1 else (found[1], found[0])
        self.world.deliver(self.number, sending, key, payload)
        sending.position += 1
        if sending.position == len(sending.keys):
            self.sending.remove(sending)
            self.let_go(sending)

    def let_go(self, sending: Sending) -> None:
        """The last frame has left the slots."""
        for slot in sending.slots:
            self.read_slot(*slot)
            self.keeper.let_go(slot[1], self.reason(sending))

    def stop(self, wanted: Callable[[Sending], bool]) -> list[Sending]:
        stopped = [sending for sending in self.sending if wanted(sending)]
        self.sending = [sending for sending in self.sending if sending not in stopped]
        self.stopping += stopped
        return stopped

    def broken(self, attempt: int, reason: str) -> None:
        self.tell({"type": "broken", "attempt": attempt, "reason": reason})

    def read(self) -> None:
        message = self.inbox.popleft()
        kind = message["type"]
        if kind == "publish":
            self.newest_told = max(self.newest_told, message["serial"])
            self.keeper.publish(message["serial"])
        elif kind == "drop":
            self.keeper.drop(message["serial"])
        elif kind == "retain":
            self.keeper.retain(message["serial"])
        elif kind == "lease":
            for attempt, _actor in message["attempts"]:
                if not self.keeper.lease(message["serial"], attempt):
                    self.broken(attempt, "no such snapshot")
        elif kind == "send":
            self.obey_send(message)
        elif kind == "release":
            self.keeper.end_lease(message["attempt"])
        elif kind == "abort":
            self.stop(lambda sending: sending.attempt == message["attempt"])
            self.keeper.end_lease(message["attempt"])
        elif kind == "forget":
            stale = [sending for sending in self.sending if self.world.actors[sending.actor].name == message["actor"]]
            require(not stale, "something is still sent to an actor that is forgotten")
        else:
            raise Violation(f"a courier was sent {kind}")
        self.check()

    def check(self) -> None:
        if self.newest_told:
            require(self.newest_told in self.keeper.filled(), "the newest version's slot was freed")


class ActorProcess:
    """One process of an actor: its receiver, its engine and, with several workers, their memory."""

    def __init__(self, world: World, number: int, life: int):
        self.world, self.number, self.name = world, number, f"actor-{number}"
        self.address = [f"{number}.{life}.{worker}" for worker in range(world.shape.workers)]
        self.process = str(life)
        self.machine = ReceiverMachine(f"e{world.epoch}", process=self.process)
        self.session: int | None = None
        self.frozen = False
        self.inbox: deque[tuple[str, int, Message]] = deque()
        """(epoch, term, message) of the connection of now"""
        self.late: deque[tuple[str, int, Message]] = deque()
        """What coordinators of other terms and epochs had sent: it may arrive at any time"""
        self.outbox: deque[Message] = deque()
        self.links: dict[tuple[int | str, int], deque[tuple[int, Key, int | tuple[int, int]]]] = {}
        """(sender, worker) -> (attempt, which bucket, what of it)"""
        self.relaying: list[Sending] = []
        self.offered: Message = {}
        self.staging: dict[Key, int] = {}
        self.weights: dict[Key, int] = {}
        self.applying: BeginApply | None = None
        self.next_outcome = ""
        """Of the next apply: "" succeeds, "refused" leaves the engine untouched, all else fails half-way"""
        self.applied: tuple[int, int] = (-1, -1)

    def obey(self, commands: list[Any]) -> None:
        for command in commands:
            if isinstance(command, Send):
                if self.session is not None:
                    self.outbox.append(command.message)
            elif isinstance(command, BeginApply):
                self.applying = command
            elif isinstance(command, BeginRelay):
                self.begin_relay(command)
            elif isinstance(command, EndRelay):
                self.relaying = [sending for sending in self.relaying if sending.attempt != command.attempt]
            else:
                assert isinstance(command, Discard)

    def end_connection(self) -> None:
        """Its coordinator is gone; what that has sent is still on its way."""
        self.session = None
        self.outbox.clear()
        self.late += [entry for entry in self.inbox if entry[2]["type"] != "end"]
        self.inbox.clear()

    def read(self, entry: tuple[str, int, Message]) -> None:
        epoch, term, message = entry
        machine, kind = self.machine, message["type"]
        if kind == "end":
            if self.session is None and machine.state is not ReceiverState.DISCONNECTED:
                self.obey(machine.disconnected())
        elif not machine.acceptable(epoch, term):
            pass
        elif kind == "layout":
            self.obey(machine.layout("layout"))
        elif kind == "offer":
            self.read_offer(message)
        elif kind == "abort":
            self.obey(machine.abort(message["attempt"]))
        elif kind == "release":
            self.obey(machine.release(message["attempt"]))
        elif kind == "relay":
            fields = (message[name] for name in ("attempt", "actor", "version", "digest", "data"))
            self.obey(machine.relay(*fields))
        elif kind == "apply":
            self.obey(machine.apply(message["attempt"]))

    def read_offer(self, message: Message) -> None:
        machine, attempt, base = self.machine, message["attempt"], message["base"]
        commands = machine.offer(
            attempt,
            message["version"],
            message["digest"],
            self.world.all_keys,
            None if base is None else (base[0], base[1]),
            message["source"],
        )
        if machine.wants(attempt):
            require(not self.relaying, "staging memory that is being passed on will be written")
            self.offered = message
        self.obey(commands)

    def receive(self, link: tuple[int | str, int]) -> None:
        attempt, key, payload = self.links[link].popleft()
        machine = self.machine
        if not machine.wants(attempt):
            return
        if key not in machine.missing:
            self.obey(machine.refuse(attempt, "sent twice"))
            return
        first = len(machine.missing) == len(self.world.all_keys)
        if isinstance(payload, tuple):
            require(machine.delta, "a delta came although none was agreed on")
            payload = payload[1] if self.staging.get(key) == payload[0] else RUBBISH
        self.staging[key] = payload
        intact = payload == self.offered["checksums"][key[0]][key[1]]
        commands = machine.bucket(attempt, key, intact)
        if intact and first:
            commands.append(Send({"type": "progress", "attempt": attempt, "bytes": 1}))
        self.obey(commands)
        if machine.wants(attempt) and not machine.missing:
            self.obey(machine.staged(attempt))

    def lose_connection(self, link: tuple[int | str, int]) -> None:
        """A data connection breaks: what was on its way is lost, and both ends notice."""
        queue = self.links.pop(link, None)
        if queue:
            self.obey(self.machine.refuse(queue[0][0], "connection lost"))

    def apply(self) -> None:
        """The engine copies. One that fails has overwritten one bucket and not the others; one that refuses nothing."""
        assert self.applying is not None
        command, self.applying = self.applying, None
        outcome, self.next_outcome = self.next_outcome, ""
        if outcome != "refused":
            self.weights.update(list(self.staging.items())[:1] if outcome else self.staging)
        self.obey(self.machine.apply_finished(command.attempt, outcome or None, {}, outcome == "refused"))
        self.check()

    def check(self) -> None:
        """What is served is one published version, whole, and never an older one than before."""
        served = self.machine.serving
        if served is None:
            return
        epoch = int(served.epoch[1:])
        wanted = {key: content(identity(epoch, served.version), *key) for key in self.world.all_keys}
        require(self.weights == wanted, f"torn: {self.name} serves {self.weights} as {served}")
        require(self.world.published.get(served.digest) == (epoch, served.version), "serves what was never published")
        require((epoch, served.version) >= self.applied, f"{self.name} went back from {self.applied} to {served}")
        self.applied = (epoch, served.version)

    def begin_relay(self, command: BeginRelay) -> None:
        child = self.world.index[command.actor]
        if command.data != self.world.actors[child].address:
            self.obey(self.machine.relay_finished(command.attempt, "connection refused"))
            return
        for worker in range(self.world.shape.workers):
            self.relaying.append(Sending(command.attempt, child, worker, self.world.keys[worker]))

    def relay(self, sending: Sending) -> None:
        """One bucket leaves staging memory, as it is now."""
        key = sending.keys[sending.position]
        self.world.deliver(self.name, sending, key, self.staging[key])
        sending.position += 1
        if sending.position == len(sending.keys):
            self.relaying.remove(sending)
            if all(other.attempt != sending.attempt for other in self.relaying):
                self.obey(self.machine.relay_finished(sending.attempt, None))
