"""JSON connections on an event loop: framing, the handshake over the job's token, and no call that blocks."""

from __future__ import annotations

import ipaddress
import logging
import selectors
import socket
from collections import deque
from collections.abc import Callable

from torchtitan.errors import UserError
from torchtitan.weight_sync import wire
from torchtitan.weight_sync.event_loop import EventLoop
from torchtitan.weight_sync.wire import Message, MessageReader, ProtocolError

logger = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 10.0
# No file is left for another connection: the listener rests for so long.
ACCEPT_PAUSE_SECONDS = 1.0
READ_BYTES = 1 << 20
# A peer that reads nothing must not grow our memory: beyond this much unsent control traffic it is cut off.
MAXIMUM_UNSENT_BYTES = 1 << 30


class Connection:
    """Framed JSON messages over one socket. Sending never blocks; closing calls `on_close(reason)` once."""

    def __init__(
        self,
        loop: EventLoop,
        sock: socket.socket,
        on_message: Callable[[Connection, Message], None],
        on_close: Callable[[Connection, str], None],
    ):
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.loop = loop
        self.socket = sock
        self.on_message = on_message
        self.on_close = on_close
        self.reader = MessageReader()
        self.closed = False
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._watches_write = False
        self._when_sent: Callable[[], None] | None = None
        loop.watch(sock, selectors.EVENT_READ, self._ready)

    def trust(self) -> None:
        """The peer has proved that it knows the token: accept long messages from now on."""
        self.reader.limit = wire.MAXIMUM_MESSAGE_BYTES

    def send(self, message: Message) -> None:
        """Queue one message."""
        if self.closed:
            return
        data = wire.encode(message)
        self._unsent.append(memoryview(data))
        self._unsent_bytes += len(data)
        self._flush()
        if self._unsent_bytes > MAXIMUM_UNSENT_BYTES:
            self.close("the peer does not read its messages")

    def close(self, reason: str) -> None:
        """Close now; what is queued is lost."""
        if self.closed:
            return
        self.closed = True
        self.loop.forget(self.socket)
        self.socket.close()
        self._unsent.clear()
        self.on_close(self, reason)

    def when_sent(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when everything that is queued has left; never where the connection ends first."""
        if self._unsent:
            self._when_sent = callback
        else:
            callback()

    def detach(self) -> socket.socket:
        """Give the socket away (to be used for raw frames); this connection is over, without on_close."""
        if self.reader.pending_bytes or self._unsent:
            raise ProtocolError("bytes are pending on a connection that changes its use")
        self.closed = True
        self.loop.forget(self.socket)
        return self.socket

    def _ready(self, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush()
            if events & selectors.EVENT_READ and not self.closed:
                self._read()
        except ProtocolError as error:
            logger.warning("closing a connection: %s", error)
            self.close(f"protocol error: {error}")
        except Exception as error:
            # Something of an unforeseen shape: it ends its sender's connection, not the loop that serves everybody.
            logger.exception("closing a connection: its message could not be handled")
            self.close(f"protocol error: {error!r}")

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = self.socket.send(self._unsent[0])
                self._unsent_bytes -= sent
                if sent == len(self._unsent[0]):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = self._unsent[0][sent:]
        except BlockingIOError:
            pass
        except OSError as error:
            # Not now: whoever is sending does not expect to be told from within send().
            self._unsent.clear()
            self._when_sent = None
            reason = f"connection lost: {error}"
            self.loop.call_from_thread(lambda: self.close(reason))
            return
        if self._watches_write != bool(self._unsent):
            self._watches_write = bool(self._unsent)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._watches_write else 0)
            self.loop.watch(self.socket, events, self._ready)
        if not self._unsent and self._when_sent is not None:
            callback, self._when_sent = self._when_sent, None
            callback()

    def _read(self) -> None:
        try:
            data = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self.close(f"connection lost: {error}")
            return
        if not data:
            self.close("the peer closed the connection")
            return
        self.reader.feed(data)
        while not self.closed and (message := self.reader.next()) is not None:
            self.on_message(self, message)


def _ignore_message(_connection: Connection, _message: Message) -> None:
    raise ProtocolError("a message came before the handshake was over")


class Server:
    """Accepts connections and makes each prove that it knows the token.

    Then this end proves that it knows the token too, with a short welcome, and `admit(role, fields)` returns the fields
    of the admission, which may be long, or raises ProtocolError to refuse; `on_peer(connection, role, fields)` takes
    the connection over (and must set its callbacks).
    """

    def __init__(
        self,
        loop: EventLoop,
        listener: socket.socket,
        token: str,
        admit: Callable[[str, Message], Message],
        on_peer: Callable[[Connection, str, Message], None],
    ):
        listener.setblocking(False)
        self.loop, self.listener, self.token = loop, listener, token
        self.admit, self.on_peer = admit, on_peer
        self._listen()

    def close(self) -> None:
        self.loop.forget(self.listener)
        self.listener.close()

    def _listen(self) -> None:
        if self.listener.fileno() >= 0:
            self.loop.watch(self.listener, selectors.EVENT_READ, self._accept)

    def _accept(self, _events: int) -> None:
        try:
            sock, _ = self.listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            # Who waits in the backlog stays there, and would wake the loop without end.
            logger.warning("cannot accept a connection, trying again in %g s: %s", ACCEPT_PAUSE_SECONDS, error)
            self.loop.forget(self.listener)
            self.loop.call_later(ACCEPT_PAUSE_SECONDS, self._listen)
            return
        nonce = wire.new_nonce()
        try:
            connection = Connection(self.loop, sock, _ignore_message, lambda _connection, _reason: timer.cancel())
        except OSError as error:
            logger.warning("a connection ended while it was accepted: %s", error)
            sock.close()
            return
        timer = self.loop.call_later(HANDSHAKE_SECONDS, lambda: connection.close("no hello in time"))

        def hello(peer: Connection, message: Message) -> None:
            timer.cancel()
            peer.on_message = _ignore_message
            if message["type"] != "hello":
                raise ProtocolError("the first message is not a hello")
            role, client_nonce = message["role"], message["nonce"]
            expected = wire.client_proof(self.token, role, nonce, client_nonce)
            if not wire.check_proof(expected, message["proof"]):
                peer.send({"type": "refuse", "reason": "wrong token"})
                raise ProtocolError("a peer does not know the token")
            peer.trust()
            peer.send({"type": "welcome", "proof": wire.server_proof(self.token, role, nonce, client_nonce)})
            try:
                fields = self.admit(role, message["fields"])
            except ProtocolError as error:
                peer.send({"type": "refuse", "reason": str(error)})
                raise
            peer.send({"type": "admitted", "fields": fields})
            self.on_peer(peer, role, message["fields"])

        connection.on_message = hello
        connection.send({"type": "challenge", "nonce": nonce})


def reachable_host(host: str, peer: str) -> str:
    """What to say to others of a listener on `host`: that, or where it is a wildcard, the address by which `peer`
    (host:port) is reached."""
    try:
        if not ipaddress.ip_address(host).is_unspecified:
            return host
        address = wire.parse_address(peer)
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # nothing is sent
            return str(probe.getsockname()[0])
    except (ValueError, OSError):
        return host


def numeric_host(host: str, family: socket.AddressFamily = socket.AF_INET) -> str:
    """The address of a host name, which others are told: only the host itself looks it up, before its loop runs.

    Raises UserError for a name that nobody knows.
    """
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return str(socket.getaddrinfo(host, None, family, socket.SOCK_STREAM)[0][4][0])
    except (OSError, ValueError) as error:
        raise UserError(f"weight synchronisation: no address of the host {host!r} is known: {error}") from error


def listen(host: str, advertised_host: str) -> tuple[socket.socket, str]:
    """(a listening socket on a free port of `host`, the address to say to others)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    advertised_host = numeric_host(advertised_host, family)
    listener = socket.create_server((host, 0), family=family)
    return listener, wire.format_address(advertised_host, listener.getsockname()[1])


def dial(
    loop: EventLoop,
    address: str,
    token: str,
    role: str,
    fields: Message,
    on_ready: Callable[[Connection, Message], None],
    on_failure: Callable[[str], None],
    timeout: float = HANDSHAKE_SECONDS,
) -> Callable[[], None]:
    """Connect and shake hands without blocking, as long as the address is numeric: a name is looked up. Calls exactly
    one of `on_ready(connection, fields)` (which must set the connection's callbacks) and `on_failure(reason)`, unless
    the returned function cancels the attempt first."""
    try:
        host, port = wire.parse_address(address)
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, ProtocolError) as error:
        no_socket = f"no socket for a connection to {address}: {error}"
        return loop.call_later(0.0, lambda: on_failure(no_socket)).cancel
    sock.setblocking(False)
    connection: Connection | None = None
    over = False

    def finish() -> bool:
        nonlocal over
        first, over = not over, True
        timer.cancel()
        return first

    def fail(reason: str) -> None:
        if finish():
            close(reason)
            on_failure(reason)

    def close(reason: str) -> None:
        if connection is not None:
            connection.close(reason)
        else:
            loop.forget(sock)
            sock.close()

    def cancel() -> None:
        if finish():
            close("cancelled")

    def lost(_connection: Connection, reason: str) -> None:
        fail(reason)

    def connected(_events: int) -> None:
        nonlocal connection
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            fail(f"cannot connect to {address}: {OSError(code, '').errno}")
            return
        loop.forget(sock)
        try:
            connection = Connection(loop, sock, challenged, lost)
        except OSError as error:
            fail(f"the connection to {address} ended at once: {error}")

    client_nonce = wire.new_nonce()

    def challenged(peer: Connection, message: Message) -> None:
        if message["type"] != "challenge":
            raise ProtocolError("the first message is not a challenge")
        server_nonce = message["nonce"]

        def welcomed(same: Connection, reply: Message) -> None:
            if reply["type"] == "refuse":
                fail(f"{address} refused: {reply['reason']}")
                return
            expected = wire.server_proof(token, role, server_nonce, client_nonce)
            if reply["type"] != "welcome" or not wire.check_proof(expected, reply["proof"]):
                raise ProtocolError(f"{address} does not know the token")
            same.trust()
            same.on_message = admitted

        peer.on_message = welcomed
        proof = wire.client_proof(token, role, server_nonce, client_nonce)
        peer.send({"type": "hello", "role": role, "nonce": client_nonce, "proof": proof, "fields": fields})

    def admitted(peer: Connection, reply: Message) -> None:
        if reply["type"] != "admitted":
            fail(f"{address} refused: {reply.get('reason', reply['type'])}")
            return
        finish()
        peer.on_message = _ignore_message
        try:
            on_ready(peer, reply["fields"])
        except Exception as error:
            if peer.on_close is not lost:
                raise  # whoever has taken it over hears of its end
            logger.exception("closing a connection: the answer of %s could not be handled", address)
            peer.close(repr(error))
            on_failure(f"{address} answered what could not be handled: {error!r}")

    timer = loop.call_later(timeout, lambda: fail(f"{address} did not answer within {timeout:g} s"))
    try:
        sock.connect((host, port))
    except BlockingIOError:
        pass
    except (OSError, ValueError, TypeError) as error:  # ValueError, TypeError: a host name that no resolver takes
        reason = f"cannot connect to {address}: {error}"
        loop.call_from_thread(lambda: fail(reason))
        return cancel
    loop.watch(sock, selectors.EVENT_WRITE, connected)
    return cancel
