"""One simulated actor: the real ReceiverMachine, an engine, links, and the faults that may happen to it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Protocol

from simulator.broken import ProtocolBroken
from simulator.clock import Clock
from simulator.control import Latency
from simulator.courier import HANDSHAKE_WAYS
from simulator.engine import Engine
from simulator.network import Network
from simulator.relay import RelaySender
from simulator.scenario import Scenario
from torchtitan.weight_sync.states.commands import Message
from torchtitan.weight_sync.states.receiver import (
    BeginApply,
    BeginRelay,
    BucketKey,
    Command,
    Discard,
    EndRelay,
    ReceiverMachine,
    ReceiverState,
    Send,
)

EPOCH = "simulated"
# The real ones come twice a second; nothing in the machines looks closer than at whole seconds and at its deadlines.
HEARTBEAT_S = 0.9
HEARTBEAT_SHARE = 0.3
# As often as the real receiver reports.
PROGRESS_S = 0.2


class Surroundings(Protocol):
    """What an actor needs of the world."""

    def join(self, actor: SimulatedActor) -> None:
        """The hello has arrived at the coordinator."""

    def say(self, actor: SimulatedActor, message: Message) -> None:
        """Over the control connection, if there is one."""

    def hang_up(self, actor: SimulatedActor) -> None:
        """The actor's end of the control connection is gone."""

    def reset_data(self, actor: SimulatedActor, attempt: int) -> None:
        """The actor has closed the data connections of an attempt."""

    def served(self, actor: SimulatedActor, version: int, digest: str) -> None:
        """The engine holds a version from now on."""

    def lost_engine(self, actor: SimulatedActor) -> None:
        """Its requests have to be redone elsewhere."""

    def routes_changed(self) -> None:
        """Other requests may be sent to it than before."""


class SimulatedActor:
    """Receives, applies, generates; freezes, dies and comes back."""

    def __init__(
        self,
        clock: Clock,
        network: Network,
        scenario: Scenario,
        latency: Latency,
        random: Random,
        name: str,
        slowness: float,
        engine: Engine,
        world: Surroundings,
        peers: dict[str, SimulatedActor],
        bucket_keys: list[BucketKey],
    ):
        self.name, self.engine, self.slowness = name, engine, slowness
        self.term = 0
        self.joined_session: int | None = None
        self.frozen = False
        self.crashes = self.freezes = 0
        self._clock, self._network, self._scenario, self._latency = clock, network, scenario, latency
        self._random, self._world, self.bucket_keys = random, world, bucket_keys
        self._bytes_per_s = scenario.actor_gigabytes_per_s * 1e9 / slowness
        self.ingress, self.egress = network.add_link(self._bytes_per_s), network.add_link(self._bytes_per_s)
        self.relays = RelaySender(clock, network, scenario, latency, self, peers, self.relay_finished)
        self._inbox: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._life = 0
        self._born()

    def _born(self) -> None:
        self._life += 1
        self.machine = ReceiverMachine(EPOCH, process=f"{self.name}-{self._life}")
        self.staged_version = -1
        """Version of what lies in staging memory, once it is whole"""
        self._checksums: list[list[str]] = []
        self._flows: dict[str, int] = {}
        self._arrived = self._reported = self._begun_at = self._transfer_s = 0.0
        self._flawed: tuple[str, float] | None = None
        self._applying: BeginApply | None = None

    # Life

    def start(self) -> None:
        """The process is up: it dials the coordinator, and its heart beats. Faults are drawn from here on."""
        self.engine.resume("dead")
        self.engine.up = True
        self._later(sum(self._latency.draw() for _ in range(HANDSHAKE_WAYS)), self._dial)
        self._heartbeat_s = min(HEARTBEAT_S, self._scenario.weight_sync.offer_timeout_s * HEARTBEAT_SHARE)
        self._later(self._heartbeat_s, self._heartbeat)
        for rate, fault in (
            (self._scenario.crashes_per_hour, self._crash),
            (self._scenario.freezes_per_hour, self._freeze),
            (self._scenario.disconnects_per_hour, self._disconnect),
        ):
            self._plan(rate, fault)

    def _plan(self, per_hour: float, fault: Callable[[], None]) -> None:
        if per_hour:
            self._clock.call_later(self._random.expovariate(per_hour / 3600), self._if_alive, self._life, fault)

    def _if_alive(self, life: int, function: Callable[..., None], *arguments: Any) -> None:
        if life == self._life:
            function(*arguments)

    def _later(self, seconds: float, function: Callable[..., None], *arguments: Any) -> None:
        """A timer of this process: gone when it dies, late when it is frozen."""
        self._clock.call_later(seconds, self._if_alive, self._life, self._when_awake, function, *arguments)

    def _when_awake(self, function: Callable[..., None], *arguments: Any) -> None:
        if self.frozen:
            self._inbox.append((function, arguments))
        else:
            function(*arguments)

    def _crash(self) -> None:
        self.crashes += 1
        if self.frozen:
            self._thawed()
        attempt = self.machine.attempt
        self._inbox.clear()
        self.relays.die()
        self._born()
        self.engine.halt("dead")
        self.engine.resume("apply")
        self.engine.admit(True)
        self.engine.up = False
        self.engine.set_version(None)
        self._world.hang_up(self)
        if attempt is not None:
            self._world.reset_data(self, attempt)
        self._world.lost_engine(self)
        self._clock.call_later(self._scenario.restart_s, self._if_alive, self._life, self.start)

    def _freeze(self) -> None:
        self.freezes += 1
        self.frozen = True
        self.engine.halt("frozen")
        for link in (self.ingress, self.egress):
            self._network.set_capacity(link, 0.0)
        self._clock.call_later(self._scenario.health_timeout_s, self._if_alive, self._life, self._found_frozen)
        seconds = self._random.expovariate(1 / self._scenario.freeze_s)
        self._clock.call_later(seconds, self._if_alive, self._life, self._thaw)

    def _found_frozen(self) -> None:
        if self.frozen:
            self.engine.up = False
            self._world.lost_engine(self)

    def _thawed(self) -> None:
        self.frozen = False
        self.engine.resume("frozen")
        for link in (self.ingress, self.egress):
            self._network.set_capacity(link, self._bytes_per_s)

    def _thaw(self) -> None:
        self._thawed()
        self.engine.up = True
        # What came in the meantime is read in order; some of it may end this process' connection, not the process.
        waiting, self._inbox = self._inbox, []
        for function, arguments in waiting:
            function(*arguments)
        self._world.routes_changed()
        self._plan(self._scenario.freezes_per_hour, self._freeze)

    def _disconnect(self) -> None:
        self._world.hang_up(self)
        self._when_awake(self._connection_over)
        self._plan(self._scenario.disconnects_per_hour, self._disconnect)

    # Coordinator

    def _dial(self) -> None:
        if self.machine.state is ReceiverState.DISCONNECTED and self.joined_session is None:
            self.machine.connected(self.term)
            self._world.join(self)

    def hello(self) -> Message:
        """Fields of the hello."""
        return {**self.machine.hello_fields(), "actor": self.name, "data": [self.name]}

    def connection_over(self) -> None:
        """The coordinator has closed the control connection."""
        self._when_awake(self._connection_over)

    def _connection_over(self) -> None:
        self._execute(self.machine.disconnected())
        self._redial()

    def _redial(self) -> None:
        # While the engine applies, nobody can say which version it holds: it joins again afterwards.
        if self.machine.state is ReceiverState.DISCONNECTED:
            self._later(self._scenario.rejoin_s, self._dial)

    def _heartbeat(self) -> None:
        self._later(self._heartbeat_s, self._heartbeat)
        self._execute([Send({"type": "ping"})])

    def message(self, message: Message) -> None:
        """From the coordinator."""
        self._when_awake(self._read, message)

    def _read(self, message: Message) -> None:
        machine, kind = self.machine, message["type"]
        attempt = message.get("attempt", 0)
        if kind == "layout":
            self._execute(machine.layout("layout"))
        elif kind == "offer":
            self._on_offer(message)
        elif kind == "abort":
            self._execute(machine.abort(attempt))
        elif kind == "release":
            self._execute(machine.release(attempt))
        elif kind == "relay":
            order = (attempt, message["actor"], message["version"], message["digest"], message["data"])
            self._execute(machine.relay(*order))
        elif kind == "apply":
            self._execute(machine.apply(attempt))
        elif kind != "evict":
            raise ValueError(f"no actor knows {kind!r}")

    def _on_offer(self, message: Message) -> None:
        attempt, base = message["attempt"], message["base"]
        commands = self.machine.offer(
            attempt,
            message["version"],
            message["digest"],
            self.bucket_keys,
            None if base is None else (base[0], base[1]),
            message["source"],
        )
        if self.machine.wants(attempt):
            self._checksums = message["checksums"]
            self.staged_version = -1
            self._flows.clear()
            self._arrived = self._reported = 0.0
            self._begun_at = self._clock.now
            self._later(PROGRESS_S, self._report_progress, attempt)
            # Which connection breaks or corrupts does not matter for what follows: the first sender's.
            self._flawed = None
            for kind, share in (
                ("breaks", self._scenario.transfer_break_probability),
                ("corrupts", self._scenario.corruption_probability),
            ):
                if share and self._random.random() < share:
                    self._flawed = (kind, self._random.random())
        self._execute(commands)

    def _report_progress(self, attempt: int) -> None:
        if self.machine.wants(attempt):
            self._later(PROGRESS_S, self._report_progress, attempt)
            received = self._arrived + sum(map(self._network.moved, self._flows.values()))
            if received > self._reported:
                self._reported = received
                self._execute([Send({"type": "progress", "attempt": attempt, "bytes": int(received)})])

    def _execute(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Send):
                self._world.say(self, command.message)
            elif isinstance(command, BeginApply):
                self._begin_apply(command)
            elif isinstance(command, Discard):
                self._flows.clear()
                self._world.reset_data(self, command.attempt)
            elif isinstance(command, BeginRelay):
                self.relays.begin(command)
            elif isinstance(command, EndRelay):
                self.relays.end(command.attempt)

    # Data

    def breaks_after(self, attempt: int, sender: str) -> float | None:
        """See courier.Target."""
        if self._flawed is None or self.machine.attempt != attempt or self._flows:
            return None
        return self._flawed[1] if self._flawed[0] == "breaks" else None

    def sending(self, attempt: int, sender: str, flow: int) -> None:
        """See courier.Target."""
        if self.machine.wants(attempt):
            self._flows[sender] = flow

    def delivered(self, attempt: int, sender: str, size: float, keys: list[BucketKey], version: int) -> None:
        """See courier.Target."""
        self._when_awake(self._delivered, attempt, sender, size, keys, version)

    def _delivered(self, attempt: int, sender: str, size: float, keys: list[BucketKey], version: int) -> None:
        machine = self.machine
        if not machine.wants(attempt):
            return
        self._flows.pop(sender, None)
        self._arrived += size
        for key in keys:
            intact = str(version) == self._checksums[key[0]][key[1]]
            if not intact:
                raise ProtocolBroken(f"{self.name}: bytes of version {version} came for version {machine.version}")
            if self._flawed is not None and self._flawed[0] == "corrupts":
                intact = False
            self._execute(machine.bucket(attempt, key, intact))
        if machine.wants(attempt) and not machine.missing:
            self.staged_version = machine.version
            self._transfer_s = self._clock.now - self._begun_at
            self._execute(machine.staged(attempt))

    def connection_lost(self, attempt: int, sender: str) -> None:
        """See courier.Target."""
        self._when_awake(self._connection_lost, attempt, sender)

    def _connection_lost(self, attempt: int, sender: str) -> None:
        self._flows.pop(sender, None)
        self._execute(self.machine.refuse(attempt, f"connection of {sender} lost"))

    def relay_finished(self, attempt: int, error: str | None) -> None:
        """A relay is done or has failed."""
        self._when_awake(lambda: self._execute(self.machine.relay_finished(attempt, error)))

    # Engine

    def _begin_apply(self, command: BeginApply) -> None:
        self._applying = command
        if self._scenario.update_mode == "drain":
            self.engine.admit(False)
            self._later(self._scenario.prepare_s, self._drained_in_time)
            self._later(self._scenario.prepare_s + self._scenario.drain_timeout_s, self._pause, command)
        else:
            self._later(self._scenario.prepare_s, self._pause, command)

    def _drained_in_time(self) -> None:
        self.engine_idle()

    def engine_idle(self) -> None:
        """No sequence is under way: who waited for that may apply."""
        if self._applying is not None and self._scenario.update_mode == "drain" and not self.engine.generating:
            self._when_awake(self._pause, self._applying)

    def _pause(self, command: BeginApply) -> None:
        if self._applying is command:
            self._applying = None
            self.engine.halt("apply")
            self._later(self._scenario.pause_s, self._applied, command)

    def _applied(self, command: BeginApply) -> None:
        failed = self._random.random() < self._scenario.apply_failure_probability
        scenario = self._scenario
        figures = {"transfer_s": self._transfer_s, "apply_s": scenario.prepare_s + scenario.pause_s}
        figures |= {"pause_s": scenario.pause_s}
        commands = self.machine.apply_finished(command.attempt, "the engine failed" if failed else None, figures)
        self.engine.set_version(None if failed else command.version)
        self.engine.admit(True)
        self.engine.resume("apply")
        if failed:
            self._world.lost_engine(self)
        else:
            self._world.served(self, command.version, command.digest)
        self._execute(commands)
        self._world.routes_changed()
        self._redial()
