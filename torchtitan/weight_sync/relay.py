"""A worker that passes its version on: staging memory to the same worker of other actors, as a courier would send it.

Everything happens on the receiver's event loop. Nothing here decides: the coordinator orders each relay, and writes to
staging memory begin only after all have ended.
"""

from __future__ import annotations

from collections.abc import Callable

from torchtitan.weight_sync.bucket_stream import ANY_RANK
from torchtitan.weight_sync.connection import HANDSHAKE_SECONDS
from torchtitan.weight_sync.event_loop import EventLoop
from torchtitan.weight_sync.staging import Staging
from torchtitan.weight_sync.states.receiver import BeginRelay
from torchtitan.weight_sync.transports.base import Delivery
from torchtitan.weight_sync.transports.link import Link, LinkSettings
from torchtitan.weight_sync.wire import ProtocolError


class RelaySender:
    """Connections from this worker to those of other actors.

    on_finished(link, delivery, error): memory is not read any more for it; error None: all is sent, "": ended from
    here.
    """

    def __init__(
        self,
        loop: EventLoop,
        token: str,
        epoch: str,
        actor: str,
        worker: int,
        on_finished: Callable[[Link, Delivery, str | None], None],
    ):
        self._loop, self._token, self._epoch, self._actor, self._worker = loop, token, epoch, actor, worker
        self._on_finished = on_finished
        self._links: dict[str, Link] = {}
        self._staging: Staging | None = None

    def begin(self, order: BeginRelay, version: int, staging: Staging) -> None:
        """Send everything that the child's worker needs, in full. Raises ProtocolError where the child has no such
        worker."""
        if self._worker >= len(order.data):
            raise ProtocolError(f"a relay to {order.actor} has no address for worker {self._worker}")
        child, address = order.actor, order.data[self._worker]
        if staging is not self._staging:
            self.close()
            self._staging = staging
        link = self._links.get(child)
        if link is None or link.address != address:
            if link is not None:
                link.disconnect()
            link = self._links[child] = self._new_link(child, address, staging)
        areas = {rank: area for rank, area in enumerate(staging.memory) if len(area)}
        link.send(Delivery(order.attempt, 0, version, areas, staging.layout.bucket_bytes))

    def _new_link(self, child: str, address: str, staging: Staging) -> Link:
        settings = LinkSettings(
            role="peer",
            epoch=self._epoch,
            rank=ANY_RANK,
            layout=staging.layout,
            transport="tcp",
            options={},
            streams=1,
            connect_timeout_s=HANDSHAKE_SECONDS,
        )

        def on_end(delivery: Delivery, error: str | None) -> None:
            self._on_finished(link, delivery, error)

        link = Link(self._loop, address, self._token, settings, child, self._worker, 0, on_end, source=self._actor)
        return link

    def end(self, attempt: int) -> None:
        """Nobody wants this relay any more: nothing of it is sent from now on."""
        for link in self._links.values():
            if link.delivery is not None and link.delivery.attempt == attempt:
                link.abort()

    def close(self) -> None:
        """Close all connections."""
        for link in self._links.values():
            link.disconnect()
        self._links.clear()
