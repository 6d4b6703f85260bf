"""The inside of a process that runs the user's code: its messages, and protection from that code.

A message is a JSON object after its length. The first one sets up the worker, which answers {"ready": true, …} or
{"error": text}. Every later one has an `id`, which its reply repeats, and `most_bytes`, the longest reply that it
allows; replies may come in any order.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ctypes
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

from torchtitan.errors import UserError
from torchtitan.rollout.workers.port_forward import hand_over
from torchtitan.rollout.workers.restrictions import restrict

HEADER = struct.Struct(">I")
PR_SET_PDEATHSIG = 1
# The only key of the object that stands for bytes in a message.
BYTES = "torchtitan.bytes"
# Signals that people, job systems and the kernel short of memory send.
OUTSIDE_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
# The reply to the set-up is no longer. Every later message says how long its own reply may be.
SETUP_BYTES = 1 << 22
# In an error, what follows this is not ours: a program has printed it.
QUOTES = ", its standard error with: "

Loaded = TypeVar("Loaded")


class Episodes(Protocol):
    """The episodes of a worker process."""

    async def answer(self, message: dict[str, Any], /) -> dict[str, Any]:
        """Return the reply to a message."""

    def drop(self, episode: int, /) -> None:
        """Forget an episode."""


def run(load: Callable[[dict[str, Any]], tuple[Episodes, dict[str, Any]]]) -> None:
    """Run a worker process with episodes until its parent closes the input; see set_up for `load`."""
    incoming, outgoing = protect()
    if (episodes := set_up(incoming, outgoing, load)) is not None:
        asyncio.run(serve(incoming, outgoing, episodes.answer, episodes.drop))


def protect() -> tuple[BinaryIO, BinaryIO]:
    """Make this process a worker and return (messages, replies).

    Output of user code goes to standard error, and its standard input is empty. A process that it forks can neither
    read nor answer our messages. The worker ends with its parent, and before it where memory runs out.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        # The kernel kills this process, since a hung function would not notice the parent's end.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        with contextlib.suppress(OSError):  # where there is no /proc
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    incoming = os.fdopen(os.dup(0), "rb")
    outgoing = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def let_go() -> None:
        for file in (incoming, outgoing):
            os.close(file.fileno())

    os.register_at_fork(after_in_child=let_go)
    return incoming, outgoing


def without_stop_iteration(function: Callable[..., Any], /, *values: Any, **arguments: Any) -> Any:
    """Call a user's function. Raises RuntimeError in place of StopIteration, which a future cannot hold: its waiter
    would wait forever."""
    try:
        return function(*values, **arguments)
    except StopIteration as error:
        raise RuntimeError("StopIteration: an iterator has no more items") from error


def read_message(file: BinaryIO) -> Any:
    """Return the next message; None at the end of input."""
    header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    return _decoded(file.read(HEADER.unpack(header)[0]))


def written(message: dict[str, Any]) -> bytes:
    """Return a message for read_message. Bytes arrive as bytes; other values that JSON does not know arrive as text."""
    return json.dumps(message, default=_as_json).encode()


def _as_json(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return {BYTES: base64.b64encode(value).decode()}
    return str(value)


def _decoded(data: bytes) -> Any:
    """Return a message that written() has written."""
    return json.loads(data, object_hook=_restored)


def _restored(value: dict[str, Any]) -> Any:
    return base64.b64decode(value[BYTES]) if value.keys() == {BYTES} else value


def _encoded(message: dict[str, Any]) -> bytes:
    # A user's parser may return arguments of any type; without a reply the episode would hang.
    try:
        text = json.dumps(message, default=str, ensure_ascii=False, allow_nan=False)
    except ValueError:  # NaN, which Python's JSON has and no other
        plain = json.loads(json.dumps(message, default=str), parse_constant=lambda _: None)
        text = json.dumps(plain, ensure_ascii=False)
    return text.encode(errors="replace")  # half of a character is a question mark


def write_message(file: BinaryIO, message: dict[str, Any], most_bytes: int = SETUP_BYTES) -> None:
    data = _encoded(message)
    if len(data) > most_bytes:
        text = f"ValueError: what it returned has {len(data)} bytes, {most_bytes} are allowed"
        data = json.dumps({"error": text, "id": message.get("id")}).encode()
    file.write(HEADER.pack(len(data)) + data)
    file.flush()


def set_up(
    incoming: BinaryIO, outgoing: BinaryIO, load: Callable[[dict[str, Any]], tuple[Loaded, dict[str, Any]]]
) -> Loaded | None:
    """Read the set-up, import the user's code with `load`, and limit the memory. Return None if the worker must end.

    The set-up has `path` (folders to import from), `shared_memory_bytes` where the process gives up keyrings and system
    calls (restrictions.py), `memory_mb` where the memory that it may write is limited, and `forward` where it has
    no network (a descriptor, see port_forward.py). `load` turns it into what is returned here and a dictionary that is
    sent to the parent, which also learns in `unrestricted` why something could not be given up.
    """
    setup = read_message(incoming)
    if setup is None:
        return None
    sys.path.extend(folder for folder in setup["path"] if folder not in sys.path)
    unrestricted = ""
    if "shared_memory_bytes" in setup:
        unrestricted = restrict(setup["shared_memory_bytes"])
    try:
        loaded, about = load(setup)
    except Exception as error:  # raised by user code
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        write_message(outgoing, {"error": text})
        return None
    if "forward" in setup:
        about = {**about, "port": hand_over(setup["forward"])}
    if "memory_mb" in setup:
        limit_memory(setup["memory_mb"])
    write_message(outgoing, {"ready": True, "unrestricted": unrestricted, **about})
    return loaded


async def serve(
    incoming: BinaryIO,
    outgoing: BinaryIO,
    answer: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]],
    drop: Callable[[int], None] = lambda _: None,
) -> None:
    """Answer messages concurrently until there are no more; {"do": "drop", "episode": number} goes to `drop`."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), incoming)
    working: set[asyncio.Task[None]] = set()

    async def work(message: dict[str, Any]) -> None:
        write_message(outgoing, {**await answer(message), "id": message["id"]}, message["most_bytes"])

    with contextlib.suppress(asyncio.IncompleteReadError):  # the parent has closed the input
        while True:
            (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
            message = _decoded(await reader.readexactly(length))
            if message.get("do") == "drop":
                drop(message["episode"])
                continue
            task = asyncio.create_task(work(message))
            working.add(task)
            task.add_done_callback(working.discard)


def limit_memory(megabytes: int) -> None:
    """Limit this process to map at most `megabytes` of memory of its own more than it does now (Linux).

    This fails at once where a function asks for too much. Address space that is reserved and cannot be written does not
    count: programs such as Node reserve far more than they use. What is shared is watched from outside.
    """
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            mapped = int(file.read().split()[5]) * resource.getpagesize()
    except FileNotFoundError:
        print("worker: no /proc here, the memory limit is not enforced", file=sys.stderr, flush=True)
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = mapped + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
