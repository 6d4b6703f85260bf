"""Two processes that pass tensors through a communicator of their own: NCCL between GPUs, gloo in its place on the CPU.

Nothing here belongs to the default process group, and no collective runs. What the two sides have to tell each other
to meet goes through PairStore. The device-specific lines of the nccl transport are all in this file.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

# NCCL's kernels share the GPU with training or generation: a few blocks saturate a link.
MAXIMUM_CTAS = 4
POLL_SECONDS = 50e-6
# Deadlines are the carrier's. NCCL's own would have torch end the whole process.
_NO_TIMEOUT = timedelta(days=365)
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
# torch's own default. What is set already can be exchanged without growing the environment under other threads.
_USUAL_ERROR_HANDLING = os.environ.setdefault(_ERROR_HANDLING, "3")
_error_handling_switch = threading.Lock()


class Broken(Exception):
    """The communicator is of no use any more: the peer is gone, or a deadline passed."""


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


def nccl_group(store: dist.Store, rank: int, size: int, where: torch.device) -> Any:  # type: ignore[name-defined]
    """A process group of torch's over NCCL, which begins to connect; its deadlines and errors are the caller's."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _NO_TIMEOUT
    options.config.blocking = 0  # abort() must not wait for a call that waits for the peer
    options.config.min_ctas, options.config.max_ctas = 1, MAXIMUM_CTAS
    with _errors_are_ours():
        group = dist.ProcessGroupNCCL(store, rank, size, options)
    group.eager_connect_single_device(where)
    return group


class NcclCommunicator:
    """Between two GPUs, on a stream of its own; a frozen peer holds nothing but that stream, until abort()."""

    def __init__(self, store: PairStore, rank: int, where: torch.device):
        self._group: Any = nccl_group(store, rank, 2, where)
        self._where, self._stream = where, torch.cuda.Stream(where, priority=0)
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
            torch.cuda.synchronize(self._where)


class _NcclPending:
    def __init__(self, work: dist.Work, communicator: NcclCommunicator):
        self._work, self._communicator = work, communicator

    def wait(self, seconds: float) -> None:
        # Not Work.wait(): that holds a stream, not this thread. Errors of the peer show here or at the deadline, and
        # bytes that are not what they should be in the checksum.
        deadline = time.monotonic() + seconds
        while not self._work.is_completed():
            late = time.monotonic() > deadline
            if late or self._communicator.given_up.is_set():
                self._communicator.abort()
                raise Broken(f"a chunk was under way for {seconds:g} s" if late else "given up")
            time.sleep(POLL_SECONDS)


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
