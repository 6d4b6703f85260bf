"""The shard server as a thread of the trainer, where slots are on a device (ipc, nccl).

Another process could not read them, or would take turns with this one on the GPU. It is the same ShardServer, started
again in the same way when it fails, or when work of it hangs: that work is left behind, since a thread cannot be
killed. Where the thread itself hangs, nothing but the trainer's end helps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from torchtitan.distributed import device
from torchtitan.weight_sync import wire
from torchtitan.weight_sync.device_memory import device_references
from torchtitan.weight_sync.device_slots import DeviceSlots, slots_device
from torchtitan.weight_sync.main import serve
from torchtitan.weight_sync.nccl import Chunks, SendingLink
from torchtitan.weight_sync.publisher import Publisher
from torchtitan.weight_sync.servers import Supervised, Where, listen
from torchtitan.weight_sync.shard_server import ShardServer
from torchtitan.weight_sync.sockets import SocketRuntime
from torchtitan.weight_sync.wire import Message

logger = logging.getLogger(__name__)


class ShardServerThread(Supervised):
    """The shard server of one rank. chunks: for nccl, None for ipc; facts: of ShardServer; where: see servers.py."""

    def __init__(
        self, publisher: Publisher, token: str, chunks: tuple[int, float] | None, where_listens: Where, **facts: Any
    ):
        host, port, max_restarts = where_listens
        super().__init__(f"weight shard server of rank {publisher.rank}", max_restarts, lambda: publisher.slots.pulse)
        self._publisher, self._token, self._facts = publisher, token, facts
        where = slots_device(publisher.slots)
        self._chunks = None if chunks is None else Chunks(*chunks, where)
        self._begin_thread = partial(device.use, where)
        self._refer: Callable[[int, int, int], Message] | None = None
        if chunks is None:
            assert isinstance(publisher.slots, DeviceSlots)
            self._refer = device_references(publisher.slots)
        self._listener = listen(host, port)
        self.address = wire.format_address(host, self._listener.getsockname()[1])
        self._stopped = -1
        self._begin()
        self.supervise()

    def _begin(self) -> None:
        self.runtime = SocketRuntime(self._begin_thread)

    def _live(self) -> str:
        try:
            self._serve()
        except Exception as error:
            logger.exception("the %s failed", self.name)
            return repr(error)
        return "it hung"

    def _end_frozen(self) -> None:
        if self._stopped != self.restarts:
            logger.error("the %s shows no sign of life, starting another one", self.name)
            self._stopped = self.restarts
            self.runtime.stop()
        elif not self.failure:
            self.failure = f"the {self.name} hangs; a thread cannot be killed: the trainer has to be started again"
            logger.error("%s", self.failure)

    def _serve(self) -> None:
        publisher, runtime = self._publisher, self.runtime
        server = ShardServer(
            runtime,
            publisher.slots,
            publisher.layout,
            rank=publisher.rank,
            token=self._token,
            address=self.address,
            refer=self._refer,
            make_link=None if self._chunks is None else partial(SendingLink, runtime, self._chunks),
            **self._facts,
        )
        # Copies: the rank's own ones outlive every life of the server.
        with publisher.server_bell.dup() as bell, self._listener.dup() as listener:
            try:
                serve(runtime, server, bell, listener)
            finally:
                server.close()

    def close(self, deadline: float) -> None:
        """End it; waits until `deadline` (time.monotonic())."""
        self._closing.set()
        self.runtime.stop()
        self._thread.join(max(0.1, deadline - time.monotonic()))
        self._listener.close()
