"""nccl: buckets go through a communicator of two, in small chunks: NCCL between GPUs, gloo in its place on the CPU.

One communicator per trainer rank and worker of an actor, made when the worker's channel to the shard server is. The
bucket's message names it, and its chunk size. A chunk is launched only when the actor has posted its receive and said
so over the channel (a credit): an actor that is frozen gives none, so nothing that it could hold is on the trainer's
device. What was credited and still does not move is aborted after `chunk_timeout_s`, which is the longest time that an
actor can hold a device-wide call of the trainer. Whatever goes wrong closes the channel, and its successor begins anew.
Nothing here belongs to the default process group, and no collective runs.
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
from torchtitan.weight_sync.device_slots import memory_tensor
from torchtitan.weight_sync.sockets import SocketRuntime
from torchtitan.weight_sync.wire import Channel, Message, ProtocolError

logger = logging.getLogger(__name__)

# NCCL's kernels share the GPU with training or generation: a few blocks saturate a link.
MAXIMUM_CTAS = 4
# Pauses between two looks: so long, and so many times what a look takes.
POLL_SECONDS, POLL_SHARE = 50e-6, 20
# Deadlines are those of who sends and receives. NCCL's own would have torch end the whole process.
_NO_TIMEOUT = timedelta(days=365)
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
# torch's own default. What is set already can be exchanged without growing the environment under other threads.
_USUAL_ERROR_HANDLING = os.environ.setdefault(_ERROR_HANDLING, "3")
_error_handling_switch = threading.Lock()


class Broken(Exception):
    """The communicator is of no use any more: the peer is gone, or a deadline passed."""


class Poller:
    """One thread that looks for all that wait: each look takes the interpreter's lock, and a thread for each of 64
    communicators that looks for itself leaves the others a part of their speed."""

    def __init__(self, begin_thread: Callable[[], None] = lambda: None):
        self._begin_thread = begin_thread
        self._waiting: dict[Future[bool], Callable[[], bool]] = {}
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="nccl-events", daemon=True).start()

    def wait(self, over: Callable[[], bool], seconds: float) -> bool:
        """Block until over() is true, or has raised (which this raises); False where that takes longer."""
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
                except BaseException as error:  # Whatever it is, the thread that waits has to hear of it.
                    found.set_exception(error)
            time.sleep(max(POLL_SECONDS, POLL_SHARE * (time.perf_counter() - begun)))


@functools.cache
def poller(where: torch.device) -> Poller:
    """The one of this process for this device."""
    return Poller(lambda: device.use(where))


class PairStore(dist.Store):  # type: ignore[name-defined]
    """What one side sets, the other can get: `tell` carries entries over, `heard` takes what comes."""

    def __init__(self, tell: Callable[[str, bytes], None], seconds: float):
        super().__init__()
        self._tell, self.seconds = tell, seconds
        self._entries: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False

    def heard(self, key: str, value: bytes) -> None:
        """The other side has set an entry."""
        with self._changed:
            self._entries[key] = value
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing more will come: whoever waits is told."""
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
    """What both ends have to use."""
    return "nccl" if where.type == "cuda" else "gloo"


Pending = Callable[[float], None]
"""Of a tensor that is under way: blocks until it has gone or come, at most so many seconds. Raises Broken, and then
nobody touches its memory any more"""


class Communicator:
    """One of two ends. Used by one thread, apart from give_up()."""

    _group: Any
    _stream: torch.cuda.Stream | None = None

    def __init__(self, rank: int):
        self._peer = 1 - rank

    def send(self, tensor: torch.Tensor) -> Pending:
        """Launch the sending of a one-dimensional uint8 tensor."""
        with _broken_for(), torch.cuda.stream(self._stream):
            return partial(self._wait, self._group.send([tensor], self._peer, 0))

    def receive(self, tensor: torch.Tensor) -> Pending:
        """Post the receiving of one of the same size."""
        with _broken_for(), torch.cuda.stream(self._stream):
            return partial(self._wait, self._group.recv([tensor], self._peer, 0))

    def _wait(self, work: dist.Work, seconds: float) -> None:
        raise NotImplementedError

    def give_up(self) -> None:
        """Whoever waits for something under way need not wait any longer. Never blocks, may be called by any thread."""

    def abort(self) -> None:
        """End everything that is under way, and let go of sockets and threads. May block for a moment; idempotent."""
        if self._group is not None:
            group, self._group = self._group, None
            group.abort()


def connect(store: PairStore, rank: int, where: torch.device) -> Communicator:
    """One end, rank 0 or 1. Blocks until the other end has come; raises Broken when it does not."""
    with _broken_for("no communicator: "):
        return NcclCommunicator(store, rank, where) if where.type == "cuda" else GlooCommunicator(store, rank)


class GlooCommunicator(Communicator):
    """On the CPU. The interface is GLOO_SOCKET_IFNAME's; without one both ends must be on this machine. A wait of
    gloo's cannot be given up: it has its own deadline."""

    def __init__(self, store: PairStore, rank: int):
        super().__init__(rank)
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        create = dist.ProcessGroupGloo.create_device
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # Counts for connecting only, in each of gloo's few attempts: what is sent is waited for with another deadline.
        options._timeout = timedelta(seconds=store.seconds)
        options._devices = [create(interface=interface) if interface else create(hostname="127.0.0.1")]
        options._threads = 1
        self._group = dist.ProcessGroupGloo(store, rank, 2, options)

    def _wait(self, work: dist.Work, seconds: float) -> None:
        with _broken_for():
            # Where it fails gloo has closed the pair: what comes late is not written.
            work.wait(timedelta(seconds=seconds))


class NcclCommunicator(Communicator):
    """Between two GPUs, on a stream of its own; a frozen peer holds nothing but that stream, until abort()."""

    def __init__(self, store: PairStore, rank: int, where: torch.device):
        super().__init__(rank)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _NO_TIMEOUT
        options.config.blocking = 0  # abort() must not wait for a call that waits for the peer
        options.config.min_ctas, options.config.max_ctas = 1, MAXIMUM_CTAS
        with _errors_are_ours():
            self._group = dist.ProcessGroupNCCL(store, rank, 2, options)
        self._group.eager_connect_single_device(where)
        self.where, self._stream = where, torch.cuda.Stream(where, priority=0)
        self._given_up = threading.Event()

    def _wait(self, work: dist.Work, seconds: float) -> None:
        # Not Work.wait(): that holds a stream, not this thread. Errors of the peer show here or at the deadline, and
        # bytes that are not what they should be in the checksum.
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
            # Only when its kernels have left the device nothing touches a tensor any more. This thread may wait for it.
            torch.cuda.synchronize(self.where)


@contextlib.contextmanager
def _broken_for(what: str = "") -> Iterator[None]:
    """What torch raises in this block means that the communicator is of no use any more."""
    try:
        yield
    except RuntimeError as error:
        raise Broken(f"{what}{error}") from error


@contextlib.contextmanager
def _errors_are_ours() -> Iterator[None]:
    """A group made in this block does not end the process when its peer dies. torch reads this once per group."""
    with _error_handling_switch:
        os.environ[_ERROR_HANDLING] = "0"
        try:
            yield
        finally:
            os.environ[_ERROR_HANDLING] = _USUAL_ERROR_HANDLING


# Chunks whose receives an actor posts at a time: enough to hide the way of the credits.
CHUNKS = 4
# The two ends of a communicator have to meet within this time.
MEETING_SECONDS = 10.0
_LONGEST_SECONDS = 3600.0
# An actor that posts no receive for so long has other buckets to fetch first, or its machine is gone without a word.
CREDIT_SECONDS = 120.0


@dataclass(frozen=True)
class Chunks:
    """chunk_bytes and chunk_timeout_s of [weight_sync], and the device of the slots."""

    size: int
    timeout_s: float
    where: torch.device


def _store(link: str, post: Callable[[Callable[[], None]], None], channel: Channel) -> PairStore:
    """Its entries travel over the channel; post() has a function run where the channel is used."""

    def tell(key: str, value: bytes) -> None:
        entry = {"type": "entry", "link": link, "key": key, "value": value.hex()}
        post(lambda: channel.send(entry))

    return PairStore(tell, MEETING_SECONDS)


def _take_entry(store: PairStore, message: Message) -> None:
    try:
        store.heard(message["key"], bytes.fromhex(message["value"]))
    except ValueError as error:
        raise ProtocolError("an entry's value is not hexadecimal") from error


class SendingLink:
    """The trainer's end: the way of buckets to one worker of an actor. Blocking work is done on a thread per actor, one
    after the other."""

    def __init__(self, runtime: SocketRuntime, chunks: Chunks, channel: Channel, actor: str):
        self._chunks, self._channel, self._actor = chunks, channel, actor
        self._name = secrets.token_hex(8)
        self._store = _store(self._name, runtime.post, channel)
        self._changed = threading.Condition()
        self._credits = 0
        self._closed = False
        self._communicator: Communicator | None = None
        # Before any bucket names it the other end has to know that there is such a link.
        channel.send({"type": "entry", "link": self._name, "key": "", "value": ""})
        self._work = partial(runtime.work, f"nccl {actor}")
        self._work(self._meet, partial(self._over, lambda: None))

    def heard(self, message: Message) -> None:
        """An entry or a credit has come. Raises ProtocolError where it makes no sense."""
        if message["link"] != self._name:
            raise ProtocolError("an entry or credit of another link")
        if message["type"] == "entry":
            _take_entry(self._store, message)
            return
        with self._changed:
            self._credits += 1
            self._changed.notify_all()

    def send(self, memory: Any, sent: Callable[[], None]) -> Message:
        """Queue the bytes of a bucket; what tells the actor where they come. Calls `sent` once nothing reads them any
        more, also where they have not arrived: then it has closed the channel."""
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
        """The channel is over: what is under way is given up."""
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
                # A link that waits for credits has nothing under way that could be stuck.
                while under_way and self._credits == 0:
                    under_way.popleft()(self._chunks.timeout_s)
                under_way.append(self._credited().send(chunk))
            for pending in under_way:
                pending(self._chunks.timeout_s)
            unless_sent.pop_all()

    def _credited(self) -> Communicator:
        """Wait for a posted receive. Nothing is held on the device meanwhile, only the actor's later links wait."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._credits > 0 or self._closed, CREDIT_SECONDS):
                raise Broken(f"no receive was posted for {CREDIT_SECONDS:g} s")
            self._credits -= 1
        if self._closed or self._communicator is None:
            raise Broken("the channel is over")
        return self._communicator


class ReceivingLink:
    """An actor's end. It meets the other one on a thread of its own; fetch() blocks the thread that calls it."""

    def __init__(self, name: str, post: Callable[[Callable[[], None]], None], channel: Channel, where: torch.device):
        self._name, self._post, self._channel, self._where = name, post, channel, where
        self._store = _store(name, post, channel)
        self._met, self._ended = threading.Event(), threading.Event()
        self._communicator: Communicator | None = None
        self._using = threading.Lock()
        threading.Thread(target=self._run, name="weight-link", daemon=True).start()

    def heard(self, message: Message) -> None:
        """An entry has come. Raises ProtocolError."""
        _take_entry(self._store, message)

    def fetch(self, reference: Message, target: torch.Tensor) -> None:
        """Fill `target` with the next bucket of this link. Raises ConnectionError, and has the channel closed then."""
        with self._using:
            try:
                self._receive(reference, target)
            except Exception as error:
                reason = f"receiving over a communicator has failed: {error!r}"
                logger.warning("%s", reason)
                self._post(lambda: self._channel.close(reason))
                if self._communicator is not None:
                    self._communicator.abort()  # before this nobody may say that the target is not written any more
                raise ConnectionError(reason) from error

    def close(self) -> None:
        """The channel is over. Does not wait; a fetch that is under way is given up."""
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
        if type(size) is not int or size < 1 or not isinstance(seconds, float) or not 0 < seconds < _LONGEST_SECONDS:
            raise ProtocolError("a communicator's figures make no sense")
        if reference.get("backend") != backend_for(self._where):
            raise ProtocolError(f"the trainer uses {reference.get('backend')}, staging memory is on {self._where}")
        if reference.get("bytes") != len(target):
            raise ProtocolError(f"{reference.get('bytes')} bytes are sent where {len(target)} belong")
        if not self._met.wait(MEETING_SECONDS) or self._communicator is None:
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
