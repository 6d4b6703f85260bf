"""The client of one actor: what all engines have in common over HTTP, and the checks of what they answer."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from torchtitan.inference.client import ActorError, ActorHealth, Capabilities, ScoredTokens
from torchtitan.inference.http_client import JsonClient
from torchtitan.inference.types import TAGS, Completion, GenerateRequest, Tag


class ActorClient(abc.ABC):
    """Talks to the actor at `url`, authorised by `token`. Every method has a deadline and raises ActorError. Belongs to
    one asyncio loop."""

    def __init__(self, url: str, token: str):
        self.client = JsonClient(url, token)

    @property
    def url(self) -> str:
        return self.client.url

    @abc.abstractmethod
    async def generate(self, request: GenerateRequest, timeout_s: float) -> list[Completion]:
        """Also raises ActorNotReady (it must not serve now) and RequestRefused (the request itself is wrong)."""

    @abc.abstractmethod
    async def score(self, token_ids: list[int], timeout_s: float) -> ScoredTokens:
        """Log-probs of given tokens under the weights that are served now, where capabilities().score."""

    @abc.abstractmethod
    async def capabilities(self, timeout_s: float) -> Capabilities: ...

    async def health(self, timeout_s: float) -> ActorHealth:
        return parse_health(await self.state(timeout_s))

    async def state(self, timeout_s: float) -> dict[str, Any]:
        """All that /health says."""
        return await self.client.call_object("health", "GET", "/health", timeout_s)

    async def connect_weights(
        self, registry: str, actor: str, epoch: str, key: str, relay: bool, timeout_s: float
    ) -> None:
        """Have the actor pull its weights from the trainer with this registry (host:port), under this name and with its
        key; replaces an earlier connection. relay: it passes them on to other actors, too."""
        body = {"registry": registry, "actor": actor, "epoch": epoch, "key": key, "relay": relay}
        await self.client.call_object("connect", "POST", "/weights/connect", timeout_s, body)

    async def pause(self, timeout_s: float) -> None:
        await self.client.call_object("pause", "POST", "/pause", timeout_s, {})

    async def resume(self, timeout_s: float) -> None:
        await self.client.call_object("resume", "POST", "/resume", timeout_s, {})

    async def sleep(self, level: int, timeout_s: float) -> bool:
        """Give the KV cache back, and the weights: level 1 may keep them elsewhere, 2 drops them.

        What runs gets half of the time to finish. False: it did not, and the actor goes on as before.
        """
        body = {"level": level, "finish_s": timeout_s / 2}
        data = await self.client.call_object("sleep", "POST", "/sleep", timeout_s, body)
        return set(parse_health(data).asleep) == set(TAGS)

    async def wake(self, tags: Sequence[Tag], timeout_s: float) -> None:
        """Take memory again, weights first. Weights that were dropped have to come as a version: before one has been
        applied nothing is sampled."""
        await self.client.call_object("wake", "POST", "/wake", timeout_s, {"tags": list(tags)})

    async def close(self) -> None:
        await self.client.close()


def parse_health(data: dict[str, Any]) -> ActorHealth:
    """What /health said. Raises ActorError where it is malformed."""
    version = data.get("version")
    if version is not None and not isinstance(version, int):
        raise ActorError("health", f"the answer is malformed: version {version!r}")
    # Engines may say -1 for "no version yet".
    served = None if version is None or version < 0 else version
    age, answered = data.get("engine_age_s", 0.0), data.get("answered_age_s", 0.0)
    weights = data.get("weights") or {}
    if not isinstance(age, int | float) or not isinstance(answered, int | float) or not isinstance(weights, dict):
        ages = f"engine_age_s {age!r}, answered_age_s {answered!r}"
        raise ActorError("health", f"the answer is malformed: {ages}, weights {weights!r}")
    asleep = data.get("asleep", [])
    if not isinstance(asleep, list) or not set(asleep) <= set(TAGS):
        raise ActorError("health", f"the answer is malformed: asleep {asleep!r}")
    return ActorHealth(
        str(data.get("status")),
        data.get("epoch") or None,
        served,
        reason=data.get("reason"),
        weights_state=weights.get("state"),
        weights_failure=weights.get("failure"),
        engine_age_s=float(age),
        answered_age_s=float(answered),
        asleep=tuple(tag for tag in TAGS if tag in asleep),
    )


def check_completions(completions: list[Completion], wanted: int) -> list[Completion]:
    """Number, tokens, log-probs and version spans must fit together; raises ActorError where they do not."""
    if len(completions) != wanted:
        raise ActorError("generate", f"{len(completions)} completions came for {wanted} asked")
    for completion in completions:
        _check(completion)
    return completions


def _check(completion: Completion) -> None:
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
