"""Our part of a foreign engine's own server: our options, a port that is told in a file, a token on every route.

Runs in the engine's Python: standard library only. vLLM's own --api-key leaves most routes open, SGLang says its
arguments in its log and to its clients; so the token comes by the environment, and neither knows it.
"""

from __future__ import annotations

import argparse
import hmac
import json
import os
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from torchtitan.errors import UserError
from torchtitan.inference.parent_watch import end_with_parent

TOKEN_ENV_VARIABLE = "TORCHTITAN_ENGINE_TOKEN_ENV"
"""Names the environment variable that holds the token, to TokenMiddleware"""
POLICY_VIOLATION = 1008

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


def parse_arguments(engine: str, description: str | None, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own command line, and what stands behind `--`, which is the engine's. Exits with code 2 where ours is
    wrong."""
    ours, theirs = argv, []
    if "--" in argv:
        ours, theirs = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    parser = argparse.ArgumentParser(prog=f"python -m torchtitan.inference.{engine}.serve", description=description)
    parser.add_argument("--host", default="127.0.0.1", help="address to bind to")
    parser.add_argument("--port", type=int, default=0, help="port to bind to; 0 takes a free one")
    parser.add_argument("--port-file", type=Path, help="file that gets the port")
    parser.add_argument("--token-env", required=True, help="environment variable with the token that all routes need")
    parser.add_argument("--parent-pid", type=int, help="end when this process is gone")
    arguments = parser.parse_args(ours)
    if not os.environ.get(arguments.token_env):
        parser.error(f"--token-env {arguments.token_env}: this environment variable is not set")
    return arguments, theirs


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
        partial = path.with_name(path.name + ".tmp")
        partial.write_text(f"{port}\n", encoding="ascii")
        partial.replace(path)


class TokenMiddleware:
    """ASGI middleware. Raises KeyError at start where there is no token: a server without one must not come up."""

    def __init__(self, app: Application):
        self._app = app
        self._expected = f"Bearer {os.environ[os.environ[TOKEN_ENV_VARIABLE]]}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._knows_token(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await _unauthorized(send)
        else:
            await receive()
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})

    def _knows_token(self, scope: Message) -> bool:
        given = [value for name, value in scope.get("headers", ()) if name.lower() == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)


async def _unauthorized(send: Send) -> None:
    body = json.dumps({"error": "the bearer token is missing or wrong"}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
