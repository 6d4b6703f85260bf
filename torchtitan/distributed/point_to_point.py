"""A communicator of two ranks, apart from the default process group: NCCL between GPUs, gloo on the CPU.

Its transfers have deadlines and can be aborted, so a peer that freezes or dies blocks nothing else for long. The two
ends find each other through a store that they share over a connection of their own (PairStore).
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
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.distributed import device

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
            polled_at = time.perf_counter()
            for found, over in waiting:
                try:
                    if not found.done() and over():
                        found.set_result(True)
                except BaseException as error:  # Whatever it is, the waiting thread must get it.
                    found.set_exception(error)
            time.sleep(max(POLL_SECONDS, POLL_SHARE * (time.perf_counter() - polled_at)))


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
