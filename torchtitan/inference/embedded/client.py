"""HTTP client of one embedded engine (torchtitan.inference.embedded)."""

from __future__ import annotations

from torchtitan.inference.actor_client import ActorClient, check_completions
from torchtitan.inference.client import ActorError, Capabilities, ScoredTokens
from torchtitan.inference.types import Completion, GenerateRequest


class EmbeddedClient(ActorClient):
    """Talks to the embedded engine's server, which does everything at one address."""

    async def generate(self, request: GenerateRequest, timeout_s: float) -> list[Completion]:
        """Completions of one request.

        Raises:
            ActorNotReady: the engine has no weights yet.
            RequestRefused: the request itself is wrong.
            ActorError: no answer, an error, or an answer that is not well-formed.
        """
        data = await self.client.call_object("generate", "POST", "/v1/generate", timeout_s, request.to_json())
        try:
            completions = [Completion.from_json(item) for item in data["completions"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ActorError("generate", f"the answer is malformed: {error!r}") from error
        return check_completions(completions, request.sampling.n)

    async def score(self, token_ids: list[int], timeout_s: float) -> ScoredTokens:
        data = await self.client.call_object("score", "POST", "/v1/score", timeout_s, {"token_ids": token_ids})
        try:
            return ScoredTokens([float(value) for value in data["log_probs"]], str(data["epoch"]), int(data["version"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ActorError("score", f"the answer is malformed: {error!r}") from error

    async def capabilities(self, timeout_s: float) -> Capabilities:
        data = await self.state(timeout_s)
        return Capabilities(
            "embedded", score=True, kept_tokens=True, digest=bool(data.get("verifies", False)), sleep=True
        )
