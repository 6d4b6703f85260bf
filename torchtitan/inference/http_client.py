"""JSON over HTTP to an actor's servers: deadlines, a bearer token, and failures as ActorError."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp

from torchtitan.inference.client import TOKEN_VARIABLE, ActorError, ActorNotReady, RequestRefused, TokenRefused

WRONG_REQUEST = 400
UNAUTHORIZED = 401
NOT_READY = 503
KEEP_ALIVE_S = 60.0
LONGEST_REASON = 500


def wrong_request(status: int, _reason: str) -> bool:
    """Whether an answer of this status finds fault with the request itself, not with this actor."""
    return status == WRONG_REQUEST


class JsonClient:
    """Talks to the server at `url` (http://host:port). Connections are kept and reused; belongs to one asyncio loop.

    token_variable: the environment variable from which people set `token`.
    """

    def __init__(self, url: str, token: str, token_variable: str = TOKEN_VARIABLE):
        self.url = url.rstrip("/")
        self._token, self._token_variable = token, token_variable
        self._session: aiohttp.ClientSession | None = None

    async def call(
        self,
        phase: str,
        method: str,
        path: str,
        timeout_s: float,
        body: dict[str, Any] | None = None,
        refused: Callable[[int, str], bool] = wrong_request,
    ) -> Any:
        """The answer's JSON.

        Raises:
            ActorNotReady: the server said 503.
            TokenRefused: the server said 401.
            RequestRefused: `refused(status, reason)` holds.
            ActorError: no answer in time, another status, or no JSON.
        """
        if self._session is None:
            # Our own pool bounds what is under way; a second bound here would only hold up health probes.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(
                method, self.url + path, json=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                if response.status == 200:
                    return await response.json(content_type=None)
                text = (await response.text())[:LONGEST_REASON]
                reason = f"{path} answered {response.status}: {text}"
                if response.status == NOT_READY:
                    raise ActorNotReady(phase, reason)
                if response.status == UNAUTHORIZED:
                    hint = (
                        f"set {self._token_variable} in this environment to the token that the server was started with"
                    )
                    raise TokenRefused(phase, f"{self.url} refuses our token ({path} answered 401): {hint}")
                # Other codes are about this actor: its limits, what it can do now.
                if refused(response.status, text):
                    raise RequestRefused(phase, reason)
                raise ActorError(phase, reason)
        except asyncio.TimeoutError as error:
            raise ActorError(phase, f"{path} gave no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ActorError(phase, f"{path}: {type(error).__name__}: {error}") from error

    async def call_object(
        self, phase: str, method: str, path: str, timeout_s: float, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """As `call`, where the answer has to be a JSON object."""
        data = await self.call(phase, method, path, timeout_s, body)
        if not isinstance(data, dict):
            raise ActorError(phase, f"{path} did not answer with a JSON object")
        return data

    async def close(self) -> None:
        """Close all connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
