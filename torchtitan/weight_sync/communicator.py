"""Two processes that pass tensors through a communicator of their own: NCCL between GPUs, gloo in its place on the CPU.

Nothing here belongs to the default process group, and no collective runs. What the two sides have to tell each other
to meet goes through PairStore. The device-specific lines of the nccl transport are all in this file.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from torchtitan.distributed import device

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
        self._thread: threading.Thread | None = None

    def wait(self, over: Callable[[], bool], seconds: float) -> bool:
        """Block until over() is true, or has raised (which this raises); False where that takes longer."""
        found: Future[bool] = Future()
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="nccl-events", daemon=True)
                self._thread.start()
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


class Pending(Protocol):
    """A tensor that is under way."""

    def wait(self, seconds: float) -> None:
        """Block until it has gone or come. Raises Broken, and then nobody touches its memory any more."""


class Communicator(Protocol):
    """One of two ends. Used by one thread, apart from give_up()."""

    def send(self, tensor: torch.Tensor) -> Pending:
        """Launch the sending of a one-dimensional uint8 tensor."""

    def receive(self, tensor: torch.Tensor) -> Pending:
        """Post the receiving of one of the same size."""

    def give_up(self) -> None:
        """Whoever waits for something under way need not wait any longer. Never blocks, may be called by any thread."""

    def abort(self) -> None:
        """End everything that is under way, and let go of sockets and threads. May block for a moment; idempotent."""


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


def connect(store: PairStore, rank: int, where: torch.device) -> Communicator:
    """One end, rank 0 or 1. Blocks until the other end has come; raises Broken when it does not."""
    with _broken_for("no communicator: "):
        return NcclCommunicator(store, rank, where) if where.type == "cuda" else GlooCommunicator(store, rank)


class GlooCommunicator:
    """On the CPU. The interface is GLOO_SOCKET_IFNAME's; without one both ends must be on this machine."""

    def __init__(self, store: PairStore, rank: int):
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        create = dist.ProcessGroupGloo.create_device
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # Counts for connecting only, in each of gloo's few attempts: what is sent is waited for with another deadline.
        options._timeout = timedelta(seconds=store.seconds)
        options._devices = [create(interface=interface) if interface else create(hostname="127.0.0.1")]
        options._threads = 1
        self._group: Any = dist.ProcessGroupGloo(store, rank, 2, options)
        self._peer = 1 - rank

    def send(self, tensor: torch.Tensor) -> Pending:
        return _GlooPending(self, lambda: self._group.send([tensor], self._peer, 0))

    def receive(self, tensor: torch.Tensor) -> Pending:
        return _GlooPending(self, lambda: self._group.recv([tensor], self._peer, 0))

    def give_up(self) -> None:
        """A wait of gloo's cannot be ended: it has its own deadline."""

    def abort(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            group.abort()


class _GlooPending:
    def __init__(self, communicator: GlooCommunicator, launch: Callable[[], dist.Work]):
        self._communicator = communicator
        with _broken_for():
            self._work = launch()

    def wait(self, seconds: float) -> None:
        with _broken_for():
            # Where it fails gloo has closed the pair: what comes late is not written.
            self._work.wait(timedelta(seconds=seconds))


class NcclCommunicator:
    """Between two GPUs, on a stream of its own; a frozen peer holds nothing but that stream, until abort()."""

    def __init__(self, store: PairStore, rank: int, where: torch.device):
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _NO_TIMEOUT
        options.config.blocking = 0  # abort() must not wait for a call that waits for the peer
        options.config.min_ctas, options.config.max_ctas = 1, MAXIMUM_CTAS
        with _errors_are_ours():
            self._group: Any = dist.ProcessGroupNCCL(store, rank, 2, options)
        self._group.eager_connect_single_device(where)
        self.where, self._stream = where, torch.cuda.Stream(where, priority=0)
        self._peer = 1 - rank
        self.given_up = threading.Event()

    def send(self, tensor: torch.Tensor) -> Pending:
        with _broken_for(), torch.cuda.stream(self._stream):
            return _NcclPending(self._group.send([tensor], self._peer, 0), self)

    def receive(self, tensor: torch.Tensor) -> Pending:
        with _broken_for(), torch.cuda.stream(self._stream):
            return _NcclPending(self._group.recv([tensor], self._peer, 0), self)

    def give_up(self) -> None:
        self.given_up.set()

    def abort(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            group.abort()
            # Only when its kernels have left the device nothing touches a tensor any more. This thread may wait for it.
            torch.cuda.synchronize(self.where)


class _NcclPending:
    def __init__(self, work: dist.Work, communicator: NcclCommunicator):
        self._work, self._communicator = work, communicator

    def wait(self, seconds: float) -> None:
        # Not Work.wait(): that holds a stream, not this thread. Errors of the peer show here or at the deadline, and
        # bytes that are not what they should be in the checksum.
        given_up = self._communicator.given_up

        def over() -> bool:
            return self._work.is_completed() or given_up.is_set()

        with _broken_for():
            found = poller(self._communicator.where).wait(over, seconds)
        if not found or given_up.is_set():
            self._communicator.abort()
            raise Broken("given up" if found else f"a chunk was under way for {seconds:g} s")


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
