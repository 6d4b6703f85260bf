"""Asks for the bearer token on every route of vLLM's server; vLLM's own --api-key leaves most routes open.

serve.py names this class to vLLM. TOKEN_ENV_VARIABLE names the environment variable that holds the token.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

TOKEN_ENV_VARIABLE = "TORCHTITAN_ENGINE_TOKEN_ENV"
POLICY_VIOLATION = 1008

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


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
