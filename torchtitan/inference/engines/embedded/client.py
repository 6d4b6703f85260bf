"""The client of the embedded engine's server, which does everything at one address, and the form of its answers. No
torch here."""

from __future__ import annotations

import msgspec

from torchtitan.inference.actor_client import ActorClient
from torchtitan.inference.answers import WrittenCompletion, completion_of, generated_bytes, scored_bytes
from torchtitan.inference.engines.reading import completions_of, scores_of
from torchtitan.inference.types import Capabilities, Completion, GenerateRequest, ScoredTokens
from torchtitan.utils.typed_json import Natural, decode

NAME = "embedded"


class Samples(msgspec.Struct):
    """The answer of /v1/generate."""

    completions: list[WrittenCompletion]


class Scores(msgspec.Struct):
    """The answer of /v1/score."""

    log_probs: list[float]
    epoch: str
    version: Natural
    top: list[tuple[list[Natural], list[float]]] | None = None
    """Ids and log-probs of the likeliest tokens in each place, where they were asked for"""


def read_samples(answer: bytes | memoryview) -> list[Completion]:
    """Return the completions in an answer. Raises ValueError or KeyError."""
    return [completion_of(written) for written in decode(Samples, answer, len(answer)).completions]


def read_scores(answer: bytes | memoryview) -> Scores:
    """Return what an answer says of given tokens. Raises WrongForm."""
    return decode(Scores, answer, len(answer))


class EmbeddedClient(ActorClient):
    """Client of one embedded actor."""

    async def generate(self, request: GenerateRequest, timeout_s: float) -> list[Completion]:
        """Return the completions of one request.

        Raises:
            ActorNotReady: the engine has no weights yet.
            RequestRefused: the request itself is wrong.
            ActorError: no answer, an error, or an answer that is not well-formed.
        """
        body, most = request.to_json(), generated_bytes(request, self.experts)
        answer = await self.client.fetch(
            "generate", "POST", "/v1/generate", timeout_s, body, most_bytes=most, repeatable=True
        )
        return await completions_of(NAME, request, answer, self.vocabulary)

    async def score(self, token_ids: list[int], timeout_s: float) -> ScoredTokens:
        body, most = {"token_ids": token_ids}, scored_bytes(len(token_ids))
        answer = await self.client.fetch(
            "score", "POST", "/v1/score", timeout_s, body, most_bytes=most, repeatable=True
        )
        return await scores_of(NAME, token_ids, answer)

    async def capabilities(self, timeout_s: float) -> Capabilities:
        data = await self.state(timeout_s)
        return Capabilities(NAME, score=True, digest=bool(data.get("verifies", False)), sleep=True)
