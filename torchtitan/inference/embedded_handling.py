"""HTTP client of one embedded engine (torchtitan.inference.embedded)."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from torchtitan.inference.handler import ActorError, ActorHealth, ActorNotReady, RequestRefused
from torchtitan.inference.types import Completion, GenerateRequest

WRONG_REQUEST = 400
NOT_READY = 503
KEEP_ALIVE_S = 60.0
LONGEST_REASON = 500


class EmbeddedHandler:
    """Talks to the server at `url` (http://host:port), authorised by `token`. Connections are kept and reused.

    The server authorises itself at the weight coordinator by `job_token`, where that is not the same one. Belongs to
    one asyncio loop.
    """

    def __init__(self, url: str, token: str, job_token: str | None = None):
        self.url = url.rstrip("/")
        self._token = token
        self._job_token = token if job_token is None else job_token
        self._session: aiohttp.ClientSession | None = None

    async def generate(self, request: GenerateRequest, timeout_s: float) -> list[Completion]:
        """Completions of one request.

        Raises:
            ActorNotReady: the engine has no weights yet.
            RequestRefused: the request itself is wrong.
            ActorError: no answer, an error, or an answer that is not well-formed.
        """
        data = await self._call("generate", "POST", "/v1/generate", timeout_s, request.to_json())
        try:
            completions = [Completion.from_json(item) for item in data["completions"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ActorError("generate", f"the answer is malformed: {error!r}") from error
        if len(completions) != request.sampling.n:
            raise ActorError("generate", f"{len(completions)} completions came for {request.sampling.n} asked")
        for completion in completions:
            _check(completion)
        return completions

    async def health(self, timeout_s: float) -> ActorHealth:
        data = await self._call("health", "GET", "/health", timeout_s)
        version = data.get("version")
        if version is not None and not isinstance(version, int):
            raise ActorError("health", f"the answer is malformed: version {version!r}")
        # Engines may say -1 for "no version yet".
        served = None if version is None or version < 0 else version
        age = data.get("engine_age_s", 0.0)
        weights = data.get("weights") or {}
        if not isinstance(age, int | float) or not isinstance(weights, dict):
            raise ActorError("health", f"the answer is malformed: engine_age_s {age!r}, weights {weights!r}")
        return ActorHealth(
            str(data.get("status")),
            data.get("epoch") or None,
            served,
            reason=data.get("reason"),
            weights_state=weights.get("state"),
            weights_failure=weights.get("failure"),
            engine_age_s=float(age),
        )

    async def connect_weights(self, coordinator: str, actor: str, epoch: str, timeout_s: float) -> None:
        body = {"coordinator": coordinator, "actor": actor, "epoch": epoch, "token": self._job_token}
        await self._call("connect", "POST", "/weights/connect", timeout_s, body)

    async def pause(self, timeout_s: float) -> None:
        await self._call("pause", "POST", "/pause", timeout_s, {})

    async def resume(self, timeout_s: float) -> None:
        await self._call("resume", "POST", "/resume", timeout_s, {})

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _call(
        self, phase: str, method: str, path: str, timeout_s: float, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        if self._session is None:
            # Our own pool bounds what is under way; a second bound here would only hold up health probes.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        headers = {"Authorization": f"Bearer {self._token}"}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(
                method, self.url + path, json=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                if response.status == 200:
                    data = await response.json(content_type=None)
                    if not isinstance(data, dict):
                        raise ActorError(phase, f"{path} did not answer with a JSON object")
                    return data
                reason = f"{path} answered {response.status}: {(await response.text())[:LONGEST_REASON]}"
                if response.status == NOT_READY:
                    raise ActorNotReady(phase, reason)
                # Other codes are about this actor: its token, its limits, what it can do now.
                if response.status == WRONG_REQUEST:
                    raise RequestRefused(phase, reason)
                raise ActorError(phase, reason)
        except asyncio.TimeoutError as error:
            raise ActorError(phase, f"{path} gave no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ActorError(phase, f"{path}: {type(error).__name__}: {error}") from error


def _check(completion: Completion) -> None:
    """Tokens, log-probs and version spans of a completion must fit together."""
    length = len(completion.token_ids)
    if len(completion.log_probs) != length:
        raise ActorError("generate", f"{length} tokens came with {len(completion.log_probs)} log-probs")
    position, version = 0, -1
    for span in completion.spans:
        if span.start != position or span.end <= span.start or span.version < version:
            raise ActorError("generate", f"version spans do not cover the tokens in order: {completion.spans}")
        position, version = span.end, span.version
    if position != length:
        raise ActorError("generate", f"version spans cover {position} of {length} tokens")
