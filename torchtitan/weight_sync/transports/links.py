"""Links: buckets go in small chunks through a communicator of two ranks, NCCL between GPUs, gloo on the CPU.

There is one communicator per trainer rank and actor worker, made with the worker's channel to the shard server. The
bucket's message names it and gives the chunk size. A chunk is launched only after the actor has posted its receive and
said so over the channel (a credit). A frozen actor gives no credits, so it holds nothing on the trainer's device. A
chunk that was credited but does not move is aborted after a second; for at most this long an actor can block a
device-wide call of the trainer. Any failure closes the channel, and the next channel starts afresh. The default process
group is not used, and no collective runs.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from torchtitan.distributed import device
from torchtitan.distributed.checksum import memory_tensor
from torchtitan.distributed.point_to_point import Broken, Communicator, PairStore, Pending, backend_for, connect
from torchtitan.weight_sync.wire.runtime import Channel, Message, ProtocolError
from torchtitan.weight_sync.wire.sockets import SocketRuntime

logger = logging.getLogger(__name__)

# Number of chunks whose receives an actor posts ahead: enough to hide the latency of credits.
CHUNKS = 4
# Both ends of a communicator must connect within this time, counted anew for each step of it. A single call of NCCL has
# device.NCCL_CALL_SECONDS.
CONNECT_SECONDS = 10.0
_MAX_SECONDS = 3600.0
# An actor that posts no receive for this long fetches other buckets first, or its machine has vanished.
CREDIT_SECONDS = 120.0


@dataclass(frozen=True)
class Chunks:
    """The size and deadline of a chunk, and the device of the slots."""

    size: int
    timeout_s: float
    where: torch.device


def _store(link: str, post: Callable[[Callable[[], None]], None], channel: Channel) -> PairStore:
    """Make a store whose entries go over the channel. post(function) runs it on the thread that uses the channel."""

    def tell(key: str, value: bytes) -> None:
        entry = {"type": "entry", "link": link, "key": key, "value": value.hex()}
        post(lambda: channel.send(entry))

    return PairStore(tell, CONNECT_SECONDS)


def _take_entry(store: PairStore, message: Message) -> None:
    try:
        store.heard(message["key"], bytes.fromhex(message["value"]))
    except ValueError as error:
        raise ProtocolError("an entry's value is not hexadecimal") from error


class SendingLink:
    """The trainer's end: sends buckets to one worker of an actor. A thread of its own does the blocking work in order,
    and ends with the link."""

    def __init__(self, runtime: SocketRuntime, chunks: Chunks, channel: Channel, actor: str):
        self._chunks, self._channel, self._actor = chunks, channel, actor
        self._name = secrets.token_hex(8)
        self._store = _store(self._name, runtime.post, channel)
        self._changed = threading.Condition()
        self._credits = 0
        self._closed = False
        self._communicator: Communicator | None = None
        # The other end must know of the link before a bucket names it.
        channel.send({"type": "entry", "link": self._name, "key": "", "value": ""})
        self._thread = f"nccl {actor} {self._name}"
        self._work, self._end_work = partial(runtime.work, self._thread), partial(runtime.end_work, self._thread)
        self._work(self._connect, partial(self._over, lambda: None))

    def heard(self, message: Message) -> None:
        """Handle an entry or a credit. Raises ProtocolError for an invalid one."""
        if message["link"] != self._name:
            raise ProtocolError("an entry or credit of another link")
        if message["type"] == "entry":
            _take_entry(self._store, message)
            return
        with self._changed:
            self._credits += 1
            self._changed.notify_all()

    def send(self, memory: Any, sent: Callable[[], None]) -> Message:
        """Queue the bytes of a bucket. Returns the reference that tells the actor how to receive them. Calls `sent`
        once nothing reads them any more, even if they have not arrived; in that case it closes the channel."""
        tensor = memory_tensor(memory)
        self._work(partial(self._send, tensor), partial(self._over, sent))
        return {
            "link": self._name,
            "backend": backend_for(self._chunks.where),
            "bytes": len(tensor),
            "chunk_bytes": self._chunks.size,
            "chunk_timeout_s": self._chunks.timeout_s,
        }

    def close(self) -> None:
        """End the link after its channel has closed: transfers are aborted."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._store.close()
        if self._communicator is not None:
            self._communicator.give_up()
        self._work(self._abort, lambda _result, _error: None)
        self._end_work()

    def _over(self, sent: Callable[[], None], _result: Any, error: BaseException | None) -> None:
        if error is not None and not self._closed:
            if not isinstance(error, Broken):
                logger.error("sending to %s has failed", self._actor, exc_info=error)
            self._channel.close(f"communicator with {self._actor}: {error}")
        sent()

    # On the thread

    def _connect(self) -> None:
        self._communicator = connect(self._store, 0, self._chunks.where)

    def _abort(self) -> None:
        if self._communicator is not None:
            self._communicator.abort()

    def _send(self, memory: torch.Tensor) -> None:
        under_way: deque[Pending] = deque()
        with contextlib.ExitStack() as unless_sent:
            unless_sent.callback(self._abort)
            for chunk in memory.split(self._chunks.size):
                # A link that waits for credits must have no transfer in progress that could hang.
                while under_way and self._credits == 0:
                    under_way.popleft()(self._chunks.timeout_s)
                under_way.append(self._credited().send(chunk))
            for pending in under_way:
                pending(self._chunks.timeout_s)
            unless_sent.pop_all()

    def _credited(self) -> Communicator:
        """Wait for a posted receive. Meanwhile nothing is held on the device; only the actor's later work waits."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._credits > 0 or self._closed, CREDIT_SECONDS):
                raise Broken(f"no receive was posted for {CREDIT_SECONDS:g} s")
            self._credits -= 1
        if self._closed or self._communicator is None:
            raise Broken("the channel is over")
        return self._communicator


class ReceivingLink:
    """An actor's end. It connects to the other end on its own thread; fetch() blocks the thread that calls it."""

    def __init__(self, name: str, post: Callable[[Callable[[], None]], None], channel: Channel, where: torch.device):
        self._name, self._post, self._channel, self._where = name, post, channel, where
        self._store = _store(name, post, channel)
        self._met, self._ended = threading.Event(), threading.Event()
        self._communicator: Communicator | None = None
        self._using = threading.Lock()
        threading.Thread(target=self._run, name="weight-link", daemon=True).start()

    def heard(self, message: Message) -> None:
        """Handle an entry. Raises ProtocolError for an invalid one."""
        _take_entry(self._store, message)

    def fetch(self, reference: Message, target: torch.Tensor) -> None:
        """Fill `target` with the next bucket of this link. On failure it closes the channel and raises
        ConnectionError."""
        with self._using:
            try:
                self._receive(reference, target)
            except Exception as error:
                reason = f"receiving over a communicator has failed: {error!r}"
                logger.warning("%s", reason)
                self._post(lambda: self._channel.close(reason))
                if self._communicator is not None:
                    self._communicator.abort()  # only after this is it certain that nothing writes the target
                raise ConnectionError(reason) from error

    def close(self) -> None:
        """End the link after its channel has closed. Does not wait; a fetch in progress is aborted."""
        self._store.close()
        self._ended.set()
        if self._communicator is not None:
            self._communicator.give_up()

    def _run(self) -> None:
        device.use(self._where)
        try:
            self._communicator = connect(self._store, 1, self._where)
        except Broken as error:
            logger.info("no communicator: %s", error)
        finally:
            self._met.set()
        self._ended.wait()
        with self._using:
            if self._communicator is not None:
                self._communicator.abort()

    def _receive(self, reference: Message, target: torch.Tensor) -> None:
        size, seconds = reference.get("chunk_bytes"), reference.get("chunk_timeout_s")
        if type(size) is not int or size < 1 or not isinstance(seconds, float) or not 0 < seconds < _MAX_SECONDS:
            raise ProtocolError("a communicator's figures make no sense")
        if reference.get("backend") != backend_for(self._where):
            raise ProtocolError(f"the trainer uses {reference.get('backend')}, staging memory is on {self._where}")
        if reference.get("bytes") != len(target):
            raise ProtocolError(f"{reference.get('bytes')} bytes are sent where {len(target)} belong")
        if not self._met.wait(CONNECT_SECONDS) or self._communicator is None:
            raise Broken("the two ends have not met")
        posted: deque[Pending] = deque()
        for chunk in target.split(size):
            if self._ended.is_set():
                raise Broken("the channel is over")
            if len(posted) == CHUNKS:
                posted.popleft()(seconds)
            posted.append(self._communicator.receive(chunk))
            self._post(lambda: self._channel.send({"type": "credit", "link": self._name}))
        for pending in posted:
            pending(seconds)
