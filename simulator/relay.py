"""The sending side of an actor that passes its version on to others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from simulator.clock import Clock
from simulator.control import Latency
from simulator.courier import HANDSHAKE_WAYS
from simulator.network import Network
from simulator.scenario import Scenario
from torchtitan.weight_sync.states.receiver import BeginRelay

if TYPE_CHECKING:
    from simulator.actors import SimulatedActor


class RelaySender:
    """Sends the whole of a version, out of staging memory, over one connection per child."""

    def __init__(
        self,
        clock: Clock,
        network: Network,
        scenario: Scenario,
        latency: Latency,
        actor: SimulatedActor,
        peers: dict[str, SimulatedActor],
        finished: Callable[[int, str | None], None],
    ):
        self.sent_bytes = 0.0
        self._clock, self._network, self._scenario, self._latency = clock, network, scenario, latency
        self._actor, self._peers, self._finished = actor, peers, finished
        self._sending: dict[int, tuple[str, int | None]] = {}
        """attempt -> (child, flow, None while the connection is being made)"""

    def begin(self, command: BeginRelay) -> None:
        self._sending[command.attempt] = (command.actor, None)
        seconds = sum(self._latency.draw() for _ in range(HANDSHAKE_WAYS))
        self._clock.call_later(seconds, self._begin, command)

    def _begin(self, command: BeginRelay) -> None:
        attempt = command.attempt
        if attempt not in self._sending:
            return
        actor, child = self._actor, self._peers[command.actor]
        size = self._scenario.gigabytes * 1e9
        breaks_after = child.breaks_after(attempt, actor.name)
        moving = size if breaks_after is None else size * breaks_after

        def done() -> None:
            self.sent_bytes += moving
            del self._sending[attempt]
            if breaks_after is None:
                self._finished(attempt, None)
                child.delivered(attempt, actor.name, size, actor.bucket_keys, actor.staged_version)
            else:
                self._finished(attempt, "connection reset")
                child.connection_lost(attempt, actor.name)

        flow = self._network.start(actor.egress, child.ingress, moving, 1, done)
        self._sending[attempt] = (child.name, flow)
        child.sending(attempt, actor.name, flow)

    def end(self, attempt: int) -> None:
        """Nobody wants this relay any more."""
        _, flow = self._sending.pop(attempt, ("", None))
        if flow is not None:
            self.sent_bytes += self._network.moved(flow)
            self._network.cancel(flow)

    def reset(self, child: str, attempt: int) -> None:
        """The child has closed its data connection, or is dead."""
        if self._sending.get(attempt, ("", None))[0] == child:
            self.end(attempt)
            self._finished(attempt, "the peer closed the connection")

    def die(self) -> None:
        """The process is gone; its children see their connections break."""
        for attempt, (child, _) in list(self._sending.items()):
            self.end(attempt)
            self._peers[child].connection_lost(attempt, self._actor.name)
