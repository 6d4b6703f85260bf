"""What the registry tells rank 0 of the actors: counts at once, the details of many actors a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized

from torchtitan.weight_sync.registry.state import MAX_NAMED
from torchtitan.weight_sync.wire.runtime import Channel, Message, Runtime

# Changes within this time go into one status message …
STATUS_SECONDS = 0.01
# … and of a large fleet, which always changes, within this time. It then has the details of so many actors that only
# pull, apply and serve; it counts all.
LARGE_STATUS_SECONDS = 0.1
STATUS_ACTORS = 5


class TrainerView:
    """The connection to rank 0. status(names): the message with the details of these actors (None: of all). actors: all
    that the registry knows."""

    def __init__(self, runtime: Runtime, status: Callable[[Iterable[str] | None], Message], actors: Sized):
        self._runtime, self._status, self._actors = runtime, status, actors
        self.channel: Channel | None = None
        self._is_due = False
        self._sends_all = True
        """Whether the next status message has the details of all actors"""
        self._urgent: dict[str, None] = {}
        self._routine: dict[str, None] = {}
        """Names of actors of which the trainer has not been told the latest"""

    def enter(self, channel: Channel) -> None:
        """Use this connection from now on, and tell everything over it at once."""
        if self.channel is not None:
            self.channel.close("replaced")
        self.channel, self._sends_all = channel, True
        self._tell()

    def lost(self) -> None:
        """Forget the connection, which has closed."""
        self.channel = None

    def actor_changed(self, name: str, routine: bool) -> None:
        """An actor has changed; routine: as each does with each version."""
        (self._routine if routine else self._urgent)[name] = None

    def all_changed(self) -> None:
        """The next message has the details of all actors."""
        self._sends_all = True

    def soon(self) -> None:
        """Send a status message, together with what changes meanwhile."""
        if self.channel is not None and not self._is_due:
            self._is_due = True
            large = len(self._actors) > MAX_NAMED
            self._runtime.call_later(LARGE_STATUS_SECONDS if large else STATUS_SECONDS, self._tell)

    def _tell(self) -> None:
        self._is_due = False
        if self.channel is None:
            return
        most = STATUS_ACTORS if len(self._actors) > MAX_NAMED else MAX_NAMED
        routine = [name for name in self._routine if name not in self._urgent][:most]
        named = self._routine if self._sends_all else {**self._urgent, **dict.fromkeys(routine)}
        self.channel.send(self._status(None if self._sends_all else named))
        self._routine = {name: None for name in self._routine if name not in named}
        self._urgent, self._sends_all = {}, False
        if self._routine:
            self.soon()
