"""Client of a foreign engine with its agent: generation goes straight to the engine, everything else to the agent."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from torchtitan.inference.actor_client import ActorClient, check_completions, parse_health
from torchtitan.inference.agent.dialect import Call, Dialect, NoVersion
from torchtitan.inference.client import (
    TOKEN_VARIABLE,
    ActorError,
    ActorHealth,
    ActorNotReady,
    Capabilities,
    ScoredTokens,
)
from torchtitan.inference.http_client import JsonClient
from torchtitan.inference.types import Completion, GenerateRequest

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def reachable_url(engine: str, agent: str) -> str:
    """The engine's address for a caller that has the agent's: what is this machine to the agent may be another to us.
    Raises ValueError where `engine` is no address."""
    theirs, ours = urlsplit(engine), urlsplit(agent)
    if theirs.hostname not in LOOPBACK or ours.hostname in LOOPBACK or ours.hostname is None:
        return engine
    host = f"[{ours.hostname}]" if ":" in ours.hostname else ours.hostname
    return theirs._replace(netloc=host if theirs.port is None else f"{host}:{theirs.port}").geturl()


class AgentClient(ActorClient):
    """Talks to the agent at `url`, and to the engine whose address the agent says in /health."""

    def __init__(self, dialect: Dialect, url: str, token: str):
        super().__init__(url, token)
        self._dialect, self._token = dialect, token
        self._engine: JsonClient | None = None
        self._capabilities: Capabilities | None = None

    async def health(self, timeout_s: float) -> ActorHealth:
        data = await self.state(timeout_s)
        await self._note_engine(data.get("engine"))
        return parse_health(data)

    async def capabilities(self, timeout_s: float) -> Capabilities:
        await self.health(timeout_s)
        assert self._capabilities is not None
        return self._capabilities

    async def generate(self, request: GenerateRequest, timeout_s: float) -> list[Completion]:
        """Completions of one request; raises as embedded.client.EmbeddedClient.generate does."""
        answers = await self._ask("generate", self._dialect.generate(request), timeout_s)
        with _understanding("generate"):
            completions = self._dialect.completions(request, answers)
        return check_completions(completions, request.sampling.n)

    async def score(self, token_ids: list[int], timeout_s: float) -> ScoredTokens:
        (answer,) = await self._ask("score", [self._dialect.score(token_ids)], timeout_s)
        with _understanding("score"):
            scored = self._dialect.scored(token_ids, answer)
        if len(scored.log_probs) != len(token_ids) - 1:
            raise ActorError("score", f"{len(scored.log_probs)} log-probs came for {len(token_ids)} tokens")
        return scored

    async def close(self) -> None:
        await super().close()
        if self._engine is not None:
            await self._engine.close()

    async def _ask(self, phase: str, calls: list[Call], timeout_s: float) -> list[Any]:
        engine = self._engine
        if engine is None:
            raise ActorNotReady(phase, "the agent has not said yet where its engine is")
        tasks = [
            asyncio.ensure_future(
                engine.call(phase, "POST", call.path, timeout_s, call.body, refused=self._dialect.refused)
            )
            for call in calls
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            # One that fails ends the others: a closed connection has the engine drop its request.
            for task in tasks:
                task.cancel()

    async def _note_engine(self, data: Any) -> None:
        try:
            url = reachable_url(str(data["url"]), self.url)
            capabilities = Capabilities.from_json(data["capabilities"])
            variable = data.get("token_env")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ActorError("health", f"the agent says nothing usable of its engine: {error!r}") from error
        if capabilities.engine != self._dialect.name:
            raise ActorError(
                "health", f"this is an agent of {capabilities.engine}, inference.backend is {self._dialect.name}"
            )
        self._capabilities = capabilities
        if self._engine is None or self._engine.url != url.rstrip("/"):
            if self._engine is not None:
                await self._engine.close()
            self._engine = JsonClient(url, self._engine_token(variable), variable or TOKEN_VARIABLE)

    def _engine_token(self, variable: object) -> str:
        """None: the agent started the engine, with its own token. Another engine has none (""), or one that both sides
        find in that environment variable; ours must not reach it. Raises ActorError."""
        if variable is None:
            return self._token
        token = os.environ.get(str(variable)) if variable else ""
        if token is None:
            raise ActorError("health", f"the engine's token is in {variable}, its agent says: it is not set here")
        return token


@contextlib.contextmanager
def _understanding(phase: str) -> Iterator[None]:
    """Around what reads an engine's answer: what it raises becomes ActorError."""
    try:
        yield
    except NoVersion as error:
        raise ActorNotReady(phase, str(error)) from error
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ActorError(phase, f"the answer is malformed: {error!r}") from error
