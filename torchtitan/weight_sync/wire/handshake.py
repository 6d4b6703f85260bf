"""Authentication with keys by role, derived from the job's token: both sides prove their key before anything else.

An actor gets its own key, not the token: it cannot speak as a rank or as another actor. Without the token nobody can
pose as a registry or a shard server to it.
"""

from __future__ import annotations

import hmac
import logging
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torchtitan.utils.rate_limiter import RateLimiters
from torchtitan.weight_sync.wire import runtime as wire
from torchtitan.weight_sync.wire.runtime import Channel, Message, ProtocolError, Runtime, Timer

logger = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 5.0
NONCE_BYTES = 16
# The most handshakes in progress at one port; another one drops the oldest.
MAX_HANDSHAKES = 256

TRAINER, RANK, ACTOR = "trainer", "rank", "actor"
# An actor that pulls from another one, under its own name. Its key is derived from the other's; the registry tells it.
PEER = "peer"
# The run's key to an actor's HTTP server, under the actor's name. It opens no port of the weight synchronisation.
HTTP = "http"
# A server that offers to be an actor of the job, under its own name. Its key is derived from the token of such servers.
GUEST = "guest"
# So begin the names of actors that the run starts or lists, and no guest's.
OWN = "actor-"
# A part of an actor. Its name is its number; its key is derived from the actor's.
WORKER = "worker"


def role_key(token: str, role: str, name: str) -> str:
    """Return the secret by which `name` authenticates in this role."""
    return hmac.digest(token.encode(), wire.as_bytes(f"{role}/{name}"), "sha256").hex()


class Identity(NamedTuple):
    """How this process authenticates to others. key: role_key of `role` and `name`."""

    role: str
    name: str
    key: str

    @classmethod
    def of(cls, token: str, role: str, name: str) -> Identity:
        """Return the identity of a process that holds the token, or the key from which its own is derived."""
        return cls(role, name, role_key(token, role, name))

    def proof(self, side: str, server_nonce: str, nonce: str) -> str:
        """Return the proof by which one side, "client" or "server", shows that it has the key."""
        text = wire.as_bytes("\n".join((side, self.role, server_nonce, nonce)))
        return hmac.digest(self.key.encode(), text, "sha256").hex()

    def is_proof(self, given: str, side: str, server_nonce: str, nonce: str) -> bool:
        """Return whether `given` is this side's proof, in constant time."""
        return hmac.compare_digest(wire.as_bytes(self.proof(side, server_nonce, nonce)), wire.as_bytes(given))


class Acceptor:
    """Admits peers that prove their identity.

    roles: allowed roles; secret: their keys are derived from it (role_key). admit(identity, fields) returns what the
    peer is told, or raises ProtocolError to refuse it. enter(channel, identity, fields) takes over the channel, and
    must set its callbacks. share: of wire.MESSAGES_AT_ONCE and MESSAGES_PER_SECOND that an actor has here, by its name.
    guests: the secret from which the keys of guests are derived. longest() returns how many bytes a message of an actor
    may have at most.
    """

    def __init__(
        self,
        runtime: Runtime,
        roles: frozenset[str],
        secret: str,
        admit: Callable[[Identity, Message], Message],
        enter: Callable[[Channel, Identity, Message], None],
        share: float = 1.0,
        guests: str = "",
        longest: Callable[[], int] = lambda: wire.MAXIMUM_ACTOR_BYTES,
    ):
        self._longest = longest
        self._runtime, self._roles, self._secret, self._guests = runtime, roles, secret, guests
        self._admit, self._enter = admit, enter
        self._waiting: dict[Channel, Timer] = {}
        self._limiters = RateLimiters(wire.MESSAGES_AT_ONCE * share, wire.MESSAGES_PER_SECOND * share, OWN)
        self._stop_listening: Callable[[], None] = lambda: None

    def listen(self, listener: Any) -> None:
        """Begin to accept channels at this listener."""
        self._stop_listening = self._runtime.listen(listener, self.accept)

    def accept(self, channel: Channel) -> None:
        """Challenge a new channel, whose peer is not known yet."""
        if len(self._waiting) >= MAX_HANDSHAKES:
            next(iter(self._waiting)).close("too many handshakes at once")
        nonce = secrets.token_hex(NONCE_BYTES)
        late = self._runtime.call_later(HANDSHAKE_SECONDS, lambda: channel.close("no hello in time"))
        self._waiting[channel] = late
        channel.on_close = lambda channel, _reason: self._settled(channel)
        channel.on_message = lambda channel, message: self._hello(channel, nonce, message)
        channel.send({"type": "challenge", "nonce": nonce})

    def close(self) -> None:
        """Stop accepting channels, and end handshakes in progress."""
        self._stop_listening()
        for channel in list(self._waiting):
            channel.close("closing")

    def _settled(self, channel: Channel) -> None:
        timer = self._waiting.pop(channel, None)
        if timer is not None:
            timer.cancel()

    def _hello(self, channel: Channel, nonce: str, message: Message) -> None:
        self._settled(channel)
        if message["type"] != "hello":
            raise ProtocolError("the first message is not a hello")
        if message["role"] not in self._roles:
            channel.send({"type": "refuse", "reason": f"no {message['role']} is expected here"})
            raise ProtocolError(f"a {message['role']!r} has come to the wrong port")
        secret = self._guests if message["role"] == GUEST else self._secret
        identity = Identity.of(secret, message["role"], message["name"])
        if not identity.is_proof(message["proof"], "client", nonce, message["nonce"]):
            channel.send({"type": "refuse", "reason": "wrong key"})
            raise ProtocolError(f"a {identity.role} called {identity.name!r} does not have its key")
        limited = identity.role in (ACTOR, PEER, GUEST)
        channel.limiter = self._limiters.of(identity.name) if limited else None
        channel.trust(self._longest() if limited else wire.MAXIMUM_MESSAGE_BYTES)
        try:
            if channel.limiter is not None and channel.limiter.wait_s(self._runtime.now()):
                raise ProtocolError(f"{identity.name} sends too many messages, or connects too often")
            channel.spend(wire.MESSAGES_PER_CONNECTION)
            fields = self._admit(identity, message["fields"])
        except ProtocolError as error:
            channel.send({"type": "refuse", "reason": str(error)})
            raise
        channel.send({"type": "welcome", "proof": identity.proof("server", nonce, message["nonce"]), "fields": fields})
        self._enter(channel, identity, message["fields"])


class Dialer:
    """Dials `address`, proves who this end is, and has the other end prove that it belongs to the job.

    Calls either on_ready(channel, fields), which must set the channel's callbacks, or on_failure(reason), unless
    cancel() is called first.
    """

    def __init__(
        self,
        runtime: Runtime,
        address: str,
        identity: Identity,
        fields: Message,
        on_ready: Callable[[Channel, Message], None],
        on_failure: Callable[[str], None],
    ):
        self._address, self._identity, self._fields = address, identity, fields
        self._on_ready, self._on_failure = on_ready, on_failure
        self._nonce = secrets.token_hex(NONCE_BYTES)
        self._channel: Channel | None = None
        self._over = False
        late = partial(self._fail, f"{address} did not answer within {HANDSHAKE_SECONDS:g} s")
        self._late = runtime.call_later(HANDSHAKE_SECONDS, late)
        self._cancel_dial = runtime.dial(address, self._opened, self._fail)

    def cancel(self) -> None:
        """Give up without calling on_failure."""
        self._on_failure = lambda _reason: None
        self._fail("cancelled")

    def _finish(self) -> None:
        self._over = True
        self._late.cancel()

    def _fail(self, reason: str) -> None:
        if not self._over:
            self._finish()
            self._cancel_dial()
            if self._channel is not None:
                self._channel.close(reason)
            self._on_failure(reason)

    def _opened(self, channel: Channel) -> None:
        self._channel = channel
        channel.on_close = lambda _channel, reason: self._fail(reason)
        channel.on_message = self._challenged

    def _challenged(self, channel: Channel, message: Message) -> None:
        if message["type"] != "challenge":
            raise ProtocolError("the first message is not a challenge")
        server_nonce = message["nonce"]
        channel.on_message = lambda channel, reply: self._welcomed(channel, server_nonce, reply)
        proof = self._identity.proof("client", server_nonce, self._nonce)
        names = {"role": self._identity.role, "name": self._identity.name}
        channel.send({"type": "hello", **names, "nonce": self._nonce, "proof": proof, "fields": self._fields})

    def _welcomed(self, channel: Channel, server_nonce: str, reply: Message) -> None:
        if reply["type"] == "refuse":
            self._fail(f"{self._address} refused: {reply['reason']}")
            return
        nonces = server_nonce, self._nonce
        if reply["type"] != "welcome" or not self._identity.is_proof(reply["proof"], "server", *nonces):
            raise ProtocolError(f"{self._address} is not of this job: it does not know the key")
        channel.trust()
        self._finish()
        self._on_ready(channel, reply["fields"])
