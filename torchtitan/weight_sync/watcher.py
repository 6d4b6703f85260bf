"""Rank 0's view of the actors: a background thread keeps the registry's latest status, asking never waits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from torchtitan.weight_sync.handshake import TRAINER, Identity
from torchtitan.weight_sync.registry_client import RegistryClient
from torchtitan.weight_sync.sockets import SocketRuntime
from torchtitan.weight_sync.wire import Message

logger = logging.getLogger(__name__)

# A condition may look at more than the status, such as whether the registry was given up.
LOOK_SECONDS = 1.0


class Watcher:
    """Holds the newest status message and passes pins on."""

    def __init__(self, registry: str, token: str, epoch: str):
        self._epoch = epoch
        self._runtime = SocketRuntime()
        identity, fields = Identity.of(token, TRAINER, "0"), {"epoch": epoch}
        # Looked for as long as the job lives: the registry's restarts are bounded where it is started.
        self._registry = RegistryClient(self._runtime, registry, identity, fields, self._send_pin, self._on_message)
        self._changed = threading.Condition()
        self._status: Message = {"newest": None, "actors": {}, "dropped": [], "evictions": 0, "failure": ""}
        self._pin: int | None = None
        self._closed = False
        self.failure = ""
        self._thread = threading.Thread(target=self._run, name="weight-sync-watcher", daemon=True)
        self._thread.start()

    def status(self) -> Message:
        """The latest status; treat it as read-only."""
        return self._status

    def wait_for(self, condition: Callable[[Message], bool], timeout: float) -> bool:
        """Wait until `condition(status)` holds; False when it did not within `timeout` seconds, or after close().

        It is asked whenever a status arrives, and once per LOOK_SECONDS without one.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while not condition(self._status):
                left = deadline - time.monotonic()
                if left <= 0 or self._closed:
                    return False
                self._changed.wait(min(left, LOOK_SECONDS))
        return True

    def pin(self, version: int | None) -> None:
        """Actors that serve `version` keep it (None: no longer)."""
        self._pin = version
        self._runtime.post(self._send_pin)

    def close(self, timeout: float) -> None:
        """Stop the thread, and whatever waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._runtime.stop()
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            self._registry.start()
            self._runtime.run()
        except Exception as error:
            logger.exception("the watcher of the actors has failed")
            with self._changed:
                self.failure = f"the watcher of the actors has failed: {error!r}"
                self._changed.notify_all()

    def _send_pin(self) -> None:
        self._registry.tell({"type": "pin", "version": self._pin})

    def _on_message(self, message: Message) -> None:
        if message["type"] == "status" and message.get("epoch") == self._epoch:
            with self._changed:
                self._status = message
                self._changed.notify_all()
