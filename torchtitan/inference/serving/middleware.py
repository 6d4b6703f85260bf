"""Our part of a foreign engine's own server: our options, a port that is told in a file, a token on every route, a
prefix cache for each weights version, and a folder for its unix sockets.

Runs in the engine's Python: standard library only. vLLM's own --api-key leaves most routes open, SGLang says its
arguments in its log and to its clients; so the token comes by the environment, and neither knows it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import fnmatch
import hashlib
import hmac
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torchtitan.errors import UserError
from torchtitan.utils.child_process import end_with_parent
from torchtitan.utils.json_lines import write_whole

TOKEN_ENV_VARIABLE = "TORCHTITAN_ENGINE_TOKEN_ENV"
"""Names the environment variable that holds the token, to TokenMiddleware"""
POLICY_VIOLATION = 1008
PREFIX_KEYS = "/prefix_keys"
"""Says that PrefixKeyMiddleware is there, of which an agent beside a server that it has not started cannot know"""
# No pause is longer: weights come in, or memory is taken again.
MAX_PAUSE_S = 600.0

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]
# With the host in it: where machines share temporary files, locks on folders need not reach from one to the other.
FOLDER_PREFIX = f"torchtitan-engine-{hashlib.blake2b(socket.gethostname().encode(), digest_size=3).hexdigest()}-"
# The path of a unix socket has at most 107 bytes. vLLM's names are the longest: 36 characters behind a slash.
MAX_FOLDER_BYTES = 107 - 37
RANDOM_PART = "12345678"


def take_over_environment(fixed: Mapping[str, str], cleared: Sequence[str]) -> None:
    """Make the environment of this engine ours where an engine of other settings would not be what the run relies on.

    Args:
        fixed: variables and the values that they get.
        cleared: variables that are removed. A `*` stands for any characters.

    What the shell had set otherwise is named in the engine's log.
    """
    for name, value in list(os.environ.items()):
        if name in fixed and value != fixed[name]:
            print(f"{name}={value} of the environment is replaced: the run needs {fixed[name]}", flush=True)
        elif name not in fixed and any(fnmatch.fnmatchcase(name, pattern) for pattern in cleared):
            del os.environ[name]
            print(f"{name} of the environment is removed: the engine has to do what the run relies on", flush=True)
    os.environ.update(fixed)


def parse_arguments(engine: str, description: str | None, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own command line, and what stands behind `--`, which is the engine's. Exits with code 2 where ours is
    wrong."""
    own_arguments, engine_arguments = argv, []
    if "--" in argv:
        own_arguments, engine_arguments = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    parser = argparse.ArgumentParser(
        prog=f"python -m torchtitan.inference.engines.{engine}.serve", description=description
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to bind to")
    parser.add_argument("--port", type=int, default=0, help="port to bind to; 0 takes a free one")
    parser.add_argument("--port-file", type=Path, help="file that gets the port")
    parser.add_argument("--token-env", required=True, help="environment variable with the token that all routes need")
    parser.add_argument("--parent-pid", type=int, help="end when this process is gone")
    arguments = parser.parse_args(own_arguments)
    if not os.environ.get(arguments.token_env):
        parser.error(f"--token-env {arguments.token_env}: this environment variable is not set")
    return arguments, engine_arguments


def prepare(arguments: argparse.Namespace, whole_group: bool = False) -> socket.socket:
    """End with the parent (see end_with_parent), name the token to TokenMiddleware, and hold a port for the engine.

    It takes up to a minute until an engine listens. A socket that is bound and never listens keeps others from being
    given its port, and lets a server have it that reuses addresses, as both engines' do. Raises UserError.
    """
    if arguments.parent_pid:
        end_with_parent(arguments.parent_pid, whole_group)
    os.environ[TOKEN_ENV_VARIABLE] = arguments.token_env
    try:
        return reserve(arguments.host, arguments.port)
    except OSError as error:
        raise UserError(f"cannot listen on {arguments.host}:{arguments.port}: {error}") from None


def reserve(host: str, port: int) -> socket.socket:
    """A socket that is bound to a port of `host`, 0 for a free one, and does not listen."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    holding = socket.socket(family, socket.SOCK_STREAM)
    holding.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holding.bind(address)
    return holding


def write_port_file(path: Path | None, port: int) -> None:
    """Who waits for the file never reads half of a number."""
    if path is not None:
        write_whole(path, f"{port}\n")


class TokenMiddleware:
    """ASGI middleware. Raises KeyError at start where there is no token: a server without one must not come up."""

    def __init__(self, app: Application):
        self._app = app
        self._expected = f"Bearer {os.environ[os.environ[TOKEN_ENV_VARIABLE]]}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._knows_token(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await _refuse(send, 401, "the bearer token is missing or wrong")
        else:
            await receive()
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})

    def _knows_token(self, scope: Message) -> bool:
        given = [value for name, value in scope.get("headers", ()) if name.lower() == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)


async def _refuse(send: Send, status: int, reason: str) -> None:
    await _answer(send, status, {"error": reason})


async def _answer(send: Send, status: int, data: dict[str, Any]) -> None:
    body = json.dumps(data).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class PrefixKeyMiddleware:
    """ASGI middleware: a request shares what its prompt begins with among those that the same weights serve.

    Engines keep keys and values under the name that a request gives as `cache_salt`. A caller cannot know which
    weights are going to answer, so the name is put in here: one for the weights that the engine holds. From the
    order to stand still until it goes on no request gets in; those wait. What is under way by then goes on under its
    old name, as inference.in_flight_kv says: on keys of older weights, or computed again after everything was dropped.

    An engine has a subclass in its serve.py, which names its routes.
    """

    generate: ClassVar[str]
    """The route where tokens are asked for"""
    weights_label: ClassVar[str]
    """The route where the engine says `weight_version`, the label of what it holds"""
    pause: ClassVar[str]
    resume: ClassVar[str]

    def __init__(self, app: Application):
        self._app = app
        self._open = asyncio.Event()
        self._open.set()
        self._key: str | None = None
        """Of the weights in use; None: their label has to be asked for"""
        self._orders = 0
        """Begun and ended so far: what was learned between two counts that differ may be out of date"""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and path == PREFIX_KEYS:
            await _answer(send, 200, {"key": self._key})
        elif scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
        elif path == self.generate:
            await self._generate(scope, receive, send)
        else:
            # An engine that lets its requests finish first (mode=wait) has new ones wait or sends them away by itself.
            if path == self.pause and b"mode=wait" not in scope.get("query_string", b""):
                self._open.clear()
            # Any other order may change what it holds.
            self._forget()
            await self._app(scope, receive, send)
            self._forget()
            if path == self.resume:
                self._open.set()

    def _forget(self) -> None:
        self._key = None
        self._orders += 1

    async def _key_in_use(self, scope: Message) -> str:
        """Waits until the engine is not to stand still, and no order has come while its label was asked for."""
        while True:
            await self._open.wait()
            if self._key is not None:
                return self._key
            orders = self._orders
            label = await self._ask_label(scope)
            if orders == self._orders:
                # Not every character of a label may stand in a name there.
                self._key = hashlib.blake2b(label.encode(), digest_size=16).hexdigest()

    async def _generate(self, scope: Message, receive: Receive, send: Send) -> None:
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        body = b"".join(message.get("body", b"") for message in messages)
        try:
            key = await asyncio.wait_for(self._key_in_use(scope), MAX_PAUSE_S)
        except TimeoutError:
            await _refuse(send, 503, f"the engine has been paused for {MAX_PAUSE_S:g} s")
            return
        with contextlib.suppress(ValueError, TypeError):  # the engine says what is wrong with it
            body = json.dumps(json.loads(body) | {"cache_salt": key}).encode()
        length = [(b"content-length", str(len(body)).encode())]
        headers = [pair for pair in scope["headers"] if pair[0].lower() != b"content-length"]
        replayed: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return replayed.pop() if replayed else await receive()

        await self._app({**scope, "headers": headers + length}, replay, send)

    async def _ask_label(self, scope: Message) -> str:
        answer = bytearray()

        async def nothing() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def collect(message: Message) -> None:
            answer.extend(message.get("body", b""))

        path = self.weights_label
        asked = {**scope, "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b""}
        await self._app(asked, nothing, collect)
        return str(json.loads(answer)["weight_version"])


@contextlib.contextmanager
def engine_folder() -> Iterator[Path]:
    """A new folder with a short path for the block, for an engine's unix sockets. Those whose owners were killed are
    removed on this occasion.

    vLLM and SGLang make sockets with random names among the temporary files; those of a process that is killed stay
    there for ever.
    """
    parent = _parent()
    _remove_ownerless(parent)
    path, lock = _make(parent)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _parent() -> Path:
    """Where temporary files belong, unless its path is too long for sockets below it."""
    usual, short = Path(tempfile.gettempdir()), Path("/tmp")
    fits = len(os.fsencode(usual / f"{FOLDER_PREFIX}{RANDOM_PART}")) <= MAX_FOLDER_BYTES
    if fits:
        return usual
    return short if os.access(short, os.W_OK) else usual


def _make(parent: Path) -> tuple[Path, int | None]:
    """A folder and the lock on it, which lasts as long as this process, however that ends."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parent))
        # Until it is locked it looks as if its owner had been killed: another process may be removing it.
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            lock = _lock(path)
            if path.is_dir():
                return path, lock
            if lock is not None:
                os.close(lock)


def _remove_ownerless(parent: Path) -> None:
    for path in parent.glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid() and (lock := _lock(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _lock(folder: Path) -> int | None:
    """A descriptor that keeps it locked while it is open; None where the file system has no locks.

    Raises OSError: another process has locked it (BlockingIOError), or there is no such folder.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
