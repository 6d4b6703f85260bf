"""Links: buckets go in small chunks through a communicator of two ranks, NCCL between GPUs, gloo on the CPU.

There is one communicator per trainer rank and actor worker, made with the worker's channel to the shard server. The
bucket's message names it and gives the chunk size. A chunk is launched only after the actor has posted its receive and
said so over the channel (a credit). A frozen actor gives no credits, so it holds nothing on the trainer's device. A
chunk that was credited but does not move is aborted after `chunk_timeout_s`; for at most this long an actor can block a
device-wide call of the trainer. Any failure closes the channel, and the next channel starts afresh. The default process
group is not used, and no collective runs.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.distributed import device
from torchtitan.weight_sync.memory.device_slots import memory_tensor
from torchtitan.weight_sync.wire.runtime import Channel, Message, ProtocolError
from torchtitan.weight_sync.wire.sockets import SocketRuntime

logger = logging.getLogger(__name__)

# NCCL's kernels share the GPU with training or generation: a few blocks saturate a link, and their priority is high, or
# they would wait for blocks of products to end.
MAXIMUM_CTAS = 4
# The pause between two polls: at least this long, and at least this multiple of a poll's duration.
POLL_SECONDS, POLL_SHARE = 50e-6, 20
# Senders and receivers have their own deadlines. With NCCL's timeout, torch would end the whole process.
_NO_TIMEOUT = timedelta(days=365)
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
# torch's default. A variable that already exists can be changed without resizing the environment under other threads.
_USUAL_ERROR_HANDLING = os.environ.setdefault(_ERROR_HANDLING, "3")
_error_handling_switch = threading.Lock()


class Broken(Exception):
    """The communicator has become unusable: the peer is gone, or a deadline passed."""


class Poller:
    """One thread that polls for all waiting threads. Each poll takes the interpreter lock, so with 64 communicators a
    polling thread each would slow all other threads."""

    def __init__(self, begin_thread: Callable[[], None] = lambda: None):
        self._begin_thread = begin_thread
        self._waiting: dict[Future[bool], Callable[[], bool]] = {}
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="nccl-events", daemon=True).start()

    def wait(self, over: Callable[[], bool], seconds: float) -> bool:
        """Block until over() is true or raises (then raise the same). Returns False if that takes longer than
        `seconds`."""
        found: Future[bool] = Future()
        with self._changed:
            self._waiting[found] = over
            self._changed.notify()
        concurrent.futures.wait([found], seconds)
        with self._changed:
            self._waiting.pop(found, None)
        return found.done() and found.result()

    def _run(self) -> None:
        self._begin_thread()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                waiting = list(self._waiting.items())
            begun = time.perf_counter()
            for found, over in waiting:
                try:
                    if not found.done() and over():
                        found.set_result(True)
                except BaseException as error:  # Whatever it is, the waiting thread must get it.
                    found.set_exception(error)
            time.sleep(max(POLL_SECONDS, POLL_SHARE * (time.perf_counter() - begun)))


@functools.cache
def poller(where: torch.device) -> Poller:
    """Return this process's poller for this device."""
    return Poller(lambda: device.use(where))


class PairStore(dist.Store):  # type: ignore[name-defined]
    """A store whose entries two sides share: `tell` sends an entry to the other side, `heard` stores one from there."""

    def __init__(self, tell: Callable[[str, bytes], None], seconds: float):
        super().__init__()
        self._tell, self.seconds = tell, seconds
        self._entries: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False

    def heard(self, key: str, value: bytes) -> None:
        """Store an entry that the other side has set."""
        with self._changed:
            self._entries[key] = value
            self._changed.notify_all()

    def close(self) -> None:
        """Wake all waiters: nothing more will come."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.heard(key, data)
        self._tell(key, data)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._entries[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        with self._changed:
            there = self._changed.wait_for(lambda: self._closed or self.check(keys), self.seconds)
        if not there or self._closed:
            raise Broken(f"the other side did not set {keys} within {self.seconds:g} s")

    def check(self, keys: list[str]) -> bool:
        return all(key in self._entries for key in keys)


def backend_for(where: torch.device) -> str:
    """Return the backend that both ends must use."""
    return "nccl" if where.type == "cuda" else "gloo"


Pending = Callable[[float], None]
"""Waits for a tensor in transit: blocks until it is sent or received, at most the given seconds. When it raises Broken,
nothing touches the tensor's memory any more"""


class Communicator:
    """One of two ends. Only one thread may use it, except for give_up()."""

    _group: Any
    _stream: torch.cuda.Stream | None = None

    def __init__(self, rank: int):
        self._peer = 1 - rank

    def send(self, tensor: torch.Tensor) -> Pending:
        """Launch the send of a one-dimensional uint8 tensor."""
        with _broken_for(), torch.cuda.stream(self._stream):
            return partial(self._wait, self._group.send([tensor], self._peer, 0))

    def receive(self, tensor: torch.Tensor) -> Pending:
        """Post the receive of a tensor of the same size."""
        with _broken_for(), torch.cuda.stream(self._stream):
            return partial(self._wait, self._group.recv([tensor], self._peer, 0))

    def _wait(self, work: dist.Work, seconds: float) -> None:
        raise NotImplementedError

    def give_up(self) -> None:
        """Let a thread that waits for a transfer give up. Never blocks; any thread may call it."""

    def abort(self) -> None:
        """End all transfers, and release sockets and threads. May block briefly; idempotent."""
        if self._group is not None:
            group, self._group = self._group, None
            group.abort()


def connect(store: PairStore, rank: int, where: torch.device) -> Communicator:
    """Make one end, rank 0 or 1. Blocks until the other end connects; raises Broken if it does not.

    NCCL connects two ranks at their first transfer, whose call returns only when both have made it. A receive that is
    posted before its credit is given would never return, so one byte goes each way here.
    """
    with _broken_for("no communicator: "):
        end = NcclCommunicator(store, rank, where) if where.type == "cuda" else GlooCommunicator(store, rank)
    byte = torch.zeros(1, dtype=torch.uint8, device=where)
    try:
        for sender in (0, 1):
            (end.send if rank == sender else end.receive)(byte)(store.seconds)
    except Broken:
        end.abort()
        raise
    return end


class GlooCommunicator(Communicator):
    """For the CPU. It uses the interface GLOO_SOCKET_IFNAME; if that is not set, both ends must be on this machine. A
    wait in gloo cannot be interrupted, but has a deadline."""

    def __init__(self, store: PairStore, rank: int):
        super().__init__(rank)
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        create = dist.ProcessGroupGloo.create_device
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # For connecting only, per attempt (gloo makes a few): waits for transfers have another deadline.
        options._timeout = timedelta(seconds=store.seconds)
        options._devices = [create(interface=interface) if interface else create(hostname="127.0.0.1")]
        options._threads = 1
        self._group = dist.ProcessGroupGloo(store, rank, 2, options)

    def _wait(self, work: dist.Work, seconds: float) -> None:
        with _broken_for():
            # If this fails, gloo has closed the pair: late bytes are not written.
            work.wait(timedelta(seconds=seconds))


class NcclCommunicator(Communicator):
    """Between two GPUs, on its own stream. A frozen peer blocks only that stream, until abort()."""

    def __init__(self, store: PairStore, rank: int, where: torch.device):
        super().__init__(rank)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _NO_TIMEOUT
        options.config.blocking = 0  # abort() must not wait for a call that waits for the peer
        options.is_high_priority_stream = True
        options.config.min_ctas, options.config.max_ctas = 1, MAXIMUM_CTAS
        with _no_async_error_handling():
            self._group = dist.ProcessGroupNCCL(store, rank, 2, options)
        self._group.eager_connect_single_device(where)
        self.where, self._stream = where, torch.cuda.Stream(where, priority=-1)
        self._given_up = threading.Event()

    def _wait(self, work: dist.Work, seconds: float) -> None:
        # Work.wait() would block a stream, not this thread. Errors of the peer surface here or at the deadline, and
        # wrong bytes in the checksum.
        with _broken_for():
            found = poller(self.where).wait(lambda: work.is_completed() or self._given_up.is_set(), seconds)
        if not found or self._given_up.is_set():
            self.abort()
            raise Broken("given up" if found else f"a chunk was under way for {seconds:g} s")

    def give_up(self) -> None:
        self._given_up.set()

    def abort(self) -> None:
        if self._group is not None:
            super().abort()
            # Kernels may touch a tensor until they have left the device. This thread may wait for that.
            torch.cuda.synchronize(self.where)


@contextlib.contextmanager
def _broken_for(what: str = "") -> Iterator[None]:
    """Translate what torch raises in this block: the communicator has become unusable."""
    try:
        yield
    except RuntimeError as error:
        raise Broken(f"{what}{error}") from error


@contextlib.contextmanager
def _no_async_error_handling() -> Iterator[None]:
    """A group made in this block does not end the process when its peer dies. torch reads this once per group."""
    with _error_handling_switch:
        os.environ[_ERROR_HANDLING] = "0"
        try:
            yield
        finally:
            os.environ[_ERROR_HANDLING] = _USUAL_ERROR_HANDLING


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
    """chunk_bytes and chunk_timeout_s of [weight_sync], and the device of the slots."""

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
    """The trainer's end: sends buckets to one worker of an actor. One thread per actor does the blocking work of its
    links in order."""

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
        self._work = partial(runtime.work, f"nccl {actor}")
        self._work(self._meet, partial(self._over, lambda: None))

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

    def _over(self, sent: Callable[[], None], _result: Any, error: BaseException | None) -> None:
        if error is not None and not self._closed:
            if not isinstance(error, Broken):
                logger.error("sending to %s has failed", self._actor, exc_info=error)
            self._channel.close(f"communicator with {self._actor}: {error}")
        sent()

    # On the thread

    def _meet(self) -> None:
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
