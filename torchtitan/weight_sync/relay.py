"""An actor that passes a version on while it is still arriving: a bucket leaves as soon as it is verified.

The registry says who pulls from whom, and gives the key for it. An actor that is let down by another one goes on at
the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchtitan.weight_sync.arrivals import Transfer
from torchtitan.weight_sync.handshake import PEER, role_key
from torchtitan.weight_sync.manifest import BucketKey, Layout
from torchtitan.weight_sync.readers import Readers
from torchtitan.weight_sync.runtime import Runtime
from torchtitan.weight_sync.wire import Message

TICK_SECONDS = 1.0


def relay_sources(addresses: Mapping[str, str], fanout: int, relay_key: Callable[[str], str]) -> dict[str, Message]:
    """Actor -> the other actor that it pulls from, and by which key; those that pull from the trainer are left out.

    addresses: by actor, in the order in which they are to have it; fanout: how many pull from the trainer, and from
    each actor; relay_key(name): what that actor knows of those who pull from it (see Relay.key).
    """
    names = list(addresses)
    found: dict[str, Message] = {}
    for number, child in enumerate(names[fanout:] if fanout else []):
        parent = names[number // fanout]
        key = role_key(relay_key(parent), PEER, child)
        found[child] = {"name": parent, "address": addresses[parent], "key": key}
    return found


class Relay:
    """memory(key): a bucket of staging memory. What it holds is of one transfer at a time."""

    def __init__(self, runtime: Runtime, epoch: str, memory: Callable[[BucketKey], memoryview]):
        self._runtime, self._memory = runtime, memory
        self._layout: Layout | None = None
        self._transfer: Transfer | None = None
        self._closed = False
        self.key = ""
        """From which the keys of those follow that may pull from here; the registry says it to this actor alone"""
        roles = frozenset((PEER,))
        self.readers = Readers(runtime, epoch, roles, self._key_of, self, "relay")
        self._stop_listening: Callable[[], None] = lambda: None

    def _key_of(self, _role: str, name: str) -> str | None:
        return role_key(self.key, PEER, name) if self.key else None

    def start(self, listener: Any) -> None:
        """Begin to accept other actors."""
        self._stop_listening = self._runtime.listen(listener, self.readers.gate.accept)
        self._tick()

    def _tick(self) -> None:
        if not self._closed:
            self._runtime.call_later(TICK_SECONDS, self._tick)
            self.readers.end_what_is_idle()

    def close(self) -> None:
        """Close every connection."""
        if not self._closed:
            self._closed = True
            self._stop_listening()
            self.readers.close("the actor ends")

    def hold(self, layout: Layout | None, transfer: Transfer | None) -> None:
        """Staging memory is for this transfer from now on (None: for nothing); nothing reads it for an older one."""
        self._layout, self._transfer = layout, transfer
        self.readers.end_what_is_gone()
        self.readers.look()

    # See readers.Store

    def buckets(self, rank: int) -> int | None:
        """Of every rank, as soon as there is a layout."""
        layout = self._layout
        return None if layout is None or not 0 <= rank < len(layout.ranks) else layout.bucket_count(rank)

    def version(self, serial: int) -> int | None:
        """Of what staging memory is for."""
        transfer = self._transfer
        if transfer is None or serial < transfer.serial:
            return None
        # Who asks for something newer has heard of it a moment earlier.
        return transfer.manifest.version if serial == transfer.serial else -1

    def has(self, serial: int, rank: int, bucket: int, base: int | None) -> bool:
        """Only what is verified, and never as a delta."""
        transfer = self._transfer
        return transfer is not None and transfer.serial == serial and (rank, bucket) not in transfer.missing

    def read(self, serial: int, rank: int, bucket: int, base: int | None) -> tuple[Message, memoryview]:
        """From staging memory, which does not change before hold()."""
        return {}, self._memory((rank, bucket))
