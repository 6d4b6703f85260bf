"""A process that reads long answers of other processes, so that parsing them does not hold up this one.

    python -m torchtitan.utils.reader_process DESCRIPTOR

A reading function of ours, named as `package.module:function`, takes facts about the question (JSON) and the bytes of
the answer, and returns bytes. Short answers are given to it here. Long ones go to the reader process in pieces, and
what the function returns comes back as one buffer: neither way holds the interpreter's lock for long. An answer may
break the reader process, never this one.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import resource
import socket
import struct
import sys
from asyncio import get_running_loop
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from torchtitan.utils.socket_child import SocketChild
from torchtitan.utils.typed_json import IN_PLACE_BYTES, WrongForm

Pieces = Sequence[bytes | bytearray]
Read = Callable[[dict[str, Any], bytes | memoryview], bytes]

# Lengths of the function's name, the facts and the answer. Once all of them have arrived: RECEIVED. When the function
# has returned: whether the answer was read, and the length of the result.
REQUEST, RECEIVED, REPLY = struct.Struct("!HIQ"), b"r", struct.Struct("!?Q")
PIECE_BYTES = 1 << 20
# A reader that is silent for so long is replaced. The longest answer (1 GiB) takes some seconds.
SILENCE_S = 60.0
# An answer that ends the reader process is tried once more: something else may have ended it.
ATTEMPTS = 2
# What a reading function may map beyond the process itself: so many bytes, and so many for each byte of the answer.
FREE_BYTES, BYTES_PER_BYTE = 2 << 30, 8
MAX_REASON_CHARACTERS = 500


class ReaderUnavailable(RuntimeError):
    """This machine runs no process that reads answers, whatever is in them. Trying again later may help."""


async def read_answer(function: str, about: dict[str, Any], pieces: Pieces) -> memoryview:
    """Return what a reading function makes of an answer.

    Raises WrongForm: it cannot be read; ReaderUnavailable: there is no process for a long one.
    """
    if sum(map(len, pieces)) <= IN_PLACE_BYTES:
        return memoryview(_call(_find(function), about, b"".join(pieces)))
    return await get_running_loop().run_in_executor(_thread, _reader.read, function, about, pieces)


def _find(function: str) -> Read:
    module, _, name = function.partition(":")
    found: Read = getattr(importlib.import_module(module), name)
    return found


def _call(read: Read, about: dict[str, Any], answer: bytes | memoryview) -> bytes:
    """Call a reading function: whatever it raises is the fault of the answer. Raises WrongForm."""
    try:
        return read(about, answer)
    except WrongForm:
        raise
    except Exception as error:  # libraries raise anything over what another process wrote
        raise WrongForm(f"{type(error).__name__}: {error}") from error


class _Reader:
    """The reader process, started when it is first needed. One thread uses it."""

    def __init__(self) -> None:
        self._child = SocketChild(__spec__.name)
        self._received = False
        """Whether the process has all of the current request, so that nothing but reading it is left to do"""

    def read(self, function: str, about: dict[str, Any], pieces: Pieces) -> memoryview:
        for attempt in range(ATTEMPTS):
            try:
                return self._exchange(function.encode(), msgspec.json.encode(about), pieces)
            except OSError as error:
                self._child.close()
                if attempt + 1 < ATTEMPTS:
                    continue
                if self._received:
                    raise WrongForm(f"the process that reads answers ended over it ({error})") from None
                raise ReaderUnavailable(
                    f"the process that reads long answers could not be started on this machine, or ended before it had "
                    f"one to read ({type(error).__name__}: {error}): look for too few open files (ulimit -n), "
                    "processes (ulimit -u) or too little memory"
                ) from error
        raise AssertionError("the last attempt returns or raises")

    def _exchange(self, function: bytes, about: bytes, pieces: Pieces) -> memoryview:
        self._received = False
        connection = self._child.connection or self._start()
        connection.sendall(REQUEST.pack(len(function), len(about), sum(map(len, pieces))) + function + about)
        for piece in pieces:
            connection.sendall(piece)
        _receive(connection, len(RECEIVED))
        self._received = True
        understood, size = REPLY.unpack(_receive(connection, REPLY.size))
        result = _receive(connection, size)
        if not understood:
            raise WrongForm(bytes(result).decode(errors="replace"))
        return result.toreadonly()

    def _start(self) -> socket.socket:
        connection = self._child.start()
        connection.settimeout(SILENCE_S)
        return connection

    def close(self) -> None:
        """End the process; `read` starts another one."""
        self._child.close()


_reader, _thread = _Reader(), ThreadPoolExecutor(1, "reads-answers")
atexit.register(_reader.close)


def _receive(source: socket.socket, size: int) -> memoryview:
    """Return the next bytes, received in pieces into fresh memory. Raises OSError at the end of the stream."""
    import numpy as np  # here: most processes read no long answers

    # Not a bytearray: that is filled with zeros, under the interpreter's lock.
    data = np.empty(size, np.uint8).data
    filled = 0
    while filled < size:
        count = source.recv_into(data[filled : filled + PIECE_BYTES])
        if not count:
            raise ConnectionError("it has ended")
        filled += count
    return data


def _allow(size: int) -> None:
    """Limit the memory of this process for an answer of so many bytes (Linux)."""
    with contextlib.suppress(FileNotFoundError):
        mapped = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        wanted, (_, hard) = mapped + FREE_BYTES + BYTES_PER_BYTE * size, resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _serve(source: socket.socket) -> None:
    """Read answers until the parent has gone."""
    # Nothing here refers to itself, and looking for that takes longer than reading an answer.
    gc.disable()
    while True:
        lengths = REQUEST.unpack(_receive(source, REQUEST.size))
        _allow(sum(lengths))
        function, about, answer = (_receive(source, size) for size in lengths)
        read, facts = _find(bytes(function).decode()), msgspec.json.decode(about)
        source.sendall(RECEIVED)
        try:
            understood, result = True, _call(read, facts, answer)
        except WrongForm as error:
            understood, result = False, str(error)[:MAX_REASON_CHARACTERS].encode(errors="replace")
        source.sendall(REPLY.pack(understood, len(result)))
        source.sendall(result)
        del answer, result


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        _serve(socket.socket(fileno=int(sys.argv[1])))
