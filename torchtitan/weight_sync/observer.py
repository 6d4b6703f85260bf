"""Rank 0's view of the actors: a background thread keeps the coordinator's latest status, asking never waits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from torchtitan.weight_sync.connection import Connection, dial
from torchtitan.weight_sync.event_loop import EventLoop
from torchtitan.weight_sync.wire import Message

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.1
# A condition may look at more than the status, such as whether the coordinator was given up.
LOOK_SECONDS = 1.0


class Observer:
    """Holds the newest status message and passes pins on."""

    def __init__(self, address: str, token: str, epoch: str):
        self._address, self._token, self._epoch = address, token, epoch
        self._loop = EventLoop()
        self._connection: Connection | None = None
        self._changed = threading.Condition()
        self._status: Message = {"newest": None, "actors": {}, "dropped": [], "published": 0, "failure": "", "term": 0}
        self._pin: int | None = None
        self._closed = False
        self.failure = ""
        self._thread = threading.Thread(target=self._run, name="weight-sync-observer", daemon=True)
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
        """Ask the coordinator to leave the actors that serve `version` alone (None: no longer)."""
        self._pin = version
        self._loop.call_from_thread(self._send_pin)

    def close(self, timeout: float) -> None:
        """Stop the thread, and whoever waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._loop.stop()
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            self._dial()
            self._loop.run()
        except Exception as error:
            logger.exception("the weight observer has failed")
            with self._changed:
                self.failure = f"the weight observer has failed: {error!r}"
                self._changed.notify_all()
        finally:
            if self._connection is not None:
                self._connection.socket.close()

    def _dial(self) -> None:
        # Retried for as long as the job lives: the coordinator's restarts are bounded where it is started.
        dial(
            self._loop,
            self._address,
            self._token,
            "trainer",
            {"epoch": self._epoch},
            self._welcomed,
            lambda _reason: self._redial(),
        )

    def _redial(self) -> None:
        self._loop.call_later(RETRY_SECONDS, self._dial)

    def _welcomed(self, connection: Connection, _fields: Message) -> None:
        self._connection = connection
        connection.on_message, connection.on_close = self._on_message, self._on_lost
        self._send_pin()

    def _on_lost(self, _connection: Connection, _reason: str) -> None:
        self._connection = None
        self._redial()

    def _send_pin(self) -> None:
        if self._connection is not None:
            message: Message = {"type": "unpin"} if self._pin is None else {"type": "pin", "version": self._pin}
            self._connection.send(message)

    def _on_message(self, _connection: Connection, message: Message) -> None:
        if message["type"] == "status" and message.get("epoch") == self._epoch:
            known = self._status["actors"]
            for name, actor in message["actors"].items():
                # What has not changed since the last status is not sent again.
                actor.setdefault("figures", known.get(name, {}).get("figures", {}))
            with self._changed:
                self._status = message
                self._changed.notify_all()
