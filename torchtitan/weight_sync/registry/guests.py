"""The registry's door for servers that offer to be actors of the job (inference.discover): who may come, and where each
is, for the trainer to hear."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from torchtitan.weight_sync.registry.state import PeerConnection, RegistrySettings
from torchtitan.weight_sync.wire.handshake import OWN
from torchtitan.weight_sync.wire.runtime import BroadcastMessage, Channel, Message, ProtocolError, Runtime

PONG = BroadcastMessage({"type": "pong"})
# Guests have one key for all, so their number is bounded here, by the rate limit that they share.
MAX_GUESTS, NAME = 1024, re.compile(rf"(?!{OWN})[A-Za-z0-9][A-Za-z0-9_.-]{{0,63}}")
URL = re.compile(r"http://([^\s/:@]+|\[[\da-fA-F:]+\]):\d{1,5}")


class Guests:
    """Those that are there. note(event, fields) writes a line of the journal and lets the trainer hear of it;
    leaves(name): one has finished its requests and ends."""

    def __init__(
        self,
        runtime: Runtime,
        settings: RegistrySettings,
        note: Callable[[str, Message], None],
        leaves: Callable[[str], None],
    ):
        self._runtime, self._settings, self._on_change, self._leaves = runtime, settings, note, leaves
        self.there: dict[str, PeerConnection] = {}
        self._changed: dict[str, None] = {}
        """Of these the trainer has not been told the latest"""

    def check(self, name: str, fields: Message) -> None:
        """Raise ProtocolError unless this one may come."""
        if not NAME.fullmatch(name) or not URL.fullmatch(fields.get("url", "")):
            raise ProtocolError(f"a guest needs a name of letters and digits that is not {OWN}…, and a URL")
        if lacks := self._settings.lacks(fields.get("offers", {})):
            raise ProtocolError(lacks)
        if len(self.there) >= MAX_GUESTS and name not in self.there:
            raise ProtocolError(f"{MAX_GUESTS} guests are here")

    def enter(self, channel: Channel, name: str, url: str) -> None:
        """Let one in that has been checked."""
        if name in self.there:
            self.there[name].channel.close("replaced by a newer connection")
        self.there[name] = PeerConnection(channel, url, self._runtime.now())
        channel.on_message, channel.on_close = partial(self._on_message, name), partial(self._on_lost, name)
        self._note("guest", {"actor": name, "url": url})

    def news(self, all_guests: bool) -> dict[str, str]:
        """Return the URL of each guest that has changed since the last call (empty: it is gone), or of all."""
        names, self._changed = list(self.there if all_guests else self._changed), {}
        urls: dict[str, str] = {}
        for name in names:
            guest = self.there.get(name)
            urls[name] = "" if guest is None else guest.address
        return urls

    def _on_message(self, name: str, channel: Channel, message: Message) -> None:
        self.there[name].heard_at = self._runtime.now()
        if message["type"] == "ping":
            channel.send(PONG)
        elif message["type"] == "leave":
            self._leaves(name)
            # This is the answer: its actor's connection may end now.
            channel.close("it leaves")
        else:
            raise ProtocolError(f"a guest does not send {message['type']!r}")

    def _on_lost(self, name: str, _channel: Channel, reason: str) -> None:
        del self.there[name]
        self._note("guest_gone", {"actor": name, "reason": reason})

    def _note(self, event: str, fields: Message) -> None:
        self._changed[fields["actor"]] = None
        self._on_change(event, fields)
