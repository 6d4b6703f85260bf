"""A foreign engine with its agent: generation goes straight to the engine, everything else to the agent.

How the engine is asked for tokens and how its answers are read is its dialect's: pure functions; no torch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from pydantic import TypeAdapter

from torchtitan.inference.client import (
    TOKEN_VARIABLE,
    ActorClient,
    ActorError,
    ActorHealth,
    ActorNotReady,
    Capabilities,
    JsonClient,
    ScoredTokens,
    check_completions,
    parse_health,
)
from torchtitan.inference.types import Completion, FinishReason, GenerateRequest, Routes, VersionSpan, parse_label
from torchtitan.utils.machine import is_loopback

# Keys of a newer agent are passed over.
CAPABILITIES = TypeAdapter(Capabilities)
FINISHED: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


@dataclass(frozen=True)
class Call:
    """One POST to the engine."""

    path: str
    body: dict[str, Any]


class Malformed(ValueError):
    """An engine's answer is not what its dialect knows."""


class NoVersion(ValueError):
    """An engine's answer is from weights of no version of ours."""


class Dialect(Protocol):
    """How an engine is asked for tokens, and how it answers. Pure functions; no torch."""

    name: str

    def generate(self, request: GenerateRequest) -> Call:
        """What to ask. Raises RequestRefused where the engine cannot do that."""

    def completions(self, request: GenerateRequest, answer: Any) -> list[Completion]:
        """The answer (JSON) of this call, with spans from the engine's version labels.

        Raises Malformed, NoVersion, or KeyError, TypeError, IndexError, ValueError for an answer that is not
        well-formed.
        """

    def score(self, token_ids: list[int]) -> Call: ...

    def scored(self, token_ids: list[int], answer: Any) -> ScoredTokens:
        """Raises as `completions` does."""

    def refused(self, status: int, reason: str) -> bool:
        """Whether an error answer finds fault with the request itself, so that no other actor will like it better."""


def read_spans(parts: list[dict[str, Any]]) -> list[VersionSpan]:
    """The versions that an engine names by label, each with `start` and `end`. Raises NoVersion."""
    spans = []
    for part in parts:
        held = parse_label(part["version"])
        if held is None:
            raise NoVersion(f"sampled under {part['version']!r}, which is no version of ours")
        if part["end"] > part["start"]:
            spans.append(VersionSpan(*held, int(part["start"]), int(part["end"])))
    return spans


def make_completion(
    token_ids: list[int],
    scored: list[int],
    log_probs: list[float],
    finished: FinishReason,
    spans: list[VersionSpan],
    kept: list[list[int]] | None,
    routes: Routes | None = None,
) -> Completion:
    """A completion whose parts fit together. scored: the tokens that the log-probs are of. Raises Malformed."""
    if scored != token_ids:
        raise Malformed("the log-probs are of other tokens than those of the answer")
    if kept is not None and len(kept) != len(token_ids):
        raise Malformed(f"{len(kept)} sets of kept tokens came for {len(token_ids)} tokens")
    return Completion(token_ids, log_probs, finished, spans, kept, routes)


def aborted() -> Completion:
    """The caller has to ask again: what there is of an answer that was broken off means nothing."""
    return Completion([], [], "abort", [])


def reachable_url(engine: str, agent: str) -> str:
    """The engine's address for a caller that has the agent's: what is this machine to the agent may be another to us.
    Raises ValueError where `engine` is no address."""
    theirs, ours = urlsplit(engine), urlsplit(agent)
    if not is_loopback(theirs.hostname or "") or ours.hostname is None or is_loopback(ours.hostname):
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
        answer = await self._ask("generate", self._dialect.generate(request), timeout_s)
        with _understanding("generate"):
            completions = self._dialect.completions(request, answer)
        return check_completions(completions, request.sampling.n)

    async def score(self, token_ids: list[int], timeout_s: float) -> ScoredTokens:
        answer = await self._ask("score", self._dialect.score(token_ids), timeout_s)
        with _understanding("score"):
            scored = self._dialect.scored(token_ids, answer)
        if len(scored.log_probs) != len(token_ids) - 1:
            raise ActorError("score", f"{len(scored.log_probs)} log-probs came for {len(token_ids)} tokens")
        return scored

    async def close(self) -> None:
        await super().close()
        if self._engine is not None:
            await self._engine.close()

    async def _ask(self, phase: str, call: Call, timeout_s: float) -> Any:
        if self._engine is None:
            raise ActorNotReady(phase, "the agent has not said yet where its engine is")
        # Where it is cancelled, a closed connection has the engine drop the request.
        return await self._engine.call(phase, "POST", call.path, timeout_s, call.body, refused=self._dialect.refused)

    async def _note_engine(self, data: Any) -> None:
        try:
            url = reachable_url(str(data["url"]), self.url)
            capabilities = CAPABILITIES.validate_python(data["capabilities"])
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
