"""How the rest of the house talks to one inference actor, whatever engine it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torchtitan.inference.types import Completion, GenerateRequest, Tag

TOKEN_VARIABLE = "TORCHTITAN_ACTOR_TOKEN"


class ActorError(Exception):
    """An actor failed in `phase` (generate, health, connect, startup, …). The message is the reason."""

    def __init__(self, phase: str, reason: str):
        super().__init__(reason)
        self.phase = phase


class ActorNotReady(ActorError):
    """The actor lives but must not serve now: it has no weights yet, or is paused."""


class RequestRefused(ActorError):
    """The actor found fault with the request itself; no other actor will like it better. Ends the run."""


@dataclass(frozen=True)
class Capabilities:
    """What an actor can do beyond sampling, as its /health says it."""

    engine: str
    """embedded, vllm or sglang"""
    version: str = ""
    """Of the engine's package"""
    spans: bool = True
    """It says which weights version sampled each token"""
    score: bool = False
    """It gives the log-probs of tokens that it is given"""
    seeds: bool = True
    """A request's samples depend on its seed and on nothing that runs beside it"""
    kept_tokens: bool = False
    """With top-p, top-k or min-p it says which tokens were kept"""
    digest: bool = False
    """It recomputes the checksums of a version from the tensors that it computes with"""
    sleep: bool = False
    """Asleep it takes less memory"""
    route: str = ""
    """How weights get into a foreign engine: direct, agent or engine"""

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Capabilities:
        """Unknown keys of a newer actor are passed over. Raises ValueError where a value is of the wrong type."""
        known = {name: value for name, value in data.items() if name in cls.__dataclass_fields__}
        for name, value in known.items():
            wanted = type(getattr(cls, name, ""))
            if type(value) is not wanted:
                raise ValueError(f"capability {name} is {value!r}")
        if "engine" not in known:
            raise ValueError("capabilities name no engine")
        return cls(**known)


@dataclass(frozen=True)
class ScoredTokens:
    """Log-probs at temperature 1 of all tokens but the first, each given those before it, under one version."""

    log_probs: list[float]
    epoch: str
    version: int


@dataclass
class ActorHealth:
    """What an actor says about itself. version is None before it has applied a first one."""

    status: str
    epoch: str | None
    version: int | None
    reason: str | None = None
    """Why it does not serve"""
    weights_state: str | None = None
    """Of its weight receiver (RECEIVING, …); None where it has none"""
    weights_failure: str | None = None
    """Why its weight receiver has given up"""
    engine_age_s: float = 0.0
    """Seconds without progress of an engine that has work"""
    answered_age_s: float = 0.0
    """Seconds since the engine behind it was last seen alive, where that is not the actor itself"""
    asleep: tuple[Tag, ...] = ()
    """Parts of its memory that it has given back; it serves nothing before all are there again"""

    @property
    def serves(self) -> bool:
        return self.status == "ok"


class ActorClient(Protocol):
    """One actor. Every method has a deadline and raises ActorError."""

    async def generate(self, request: GenerateRequest, timeout_s: float) -> list[Completion]: ...

    async def score(self, token_ids: list[int], timeout_s: float) -> ScoredTokens:
        """Log-probs of given tokens under the weights that are served now. Raises ActorError also where the actor
        cannot (capabilities().score)."""

    async def health(self, timeout_s: float) -> ActorHealth: ...

    async def capabilities(self, timeout_s: float) -> Capabilities: ...

    async def connect_weights(self, coordinator: str, actor: str, epoch: str, timeout_s: float) -> None:
        """Have the actor fetch its weights from this coordinator under this name; replaces an earlier connection."""

    async def pause(self, timeout_s: float) -> None: ...

    async def resume(self, timeout_s: float) -> None: ...

    async def sleep(self, level: int, timeout_s: float) -> bool:
        """Give the KV cache back, and the weights: level 1 may keep them elsewhere, 2 drops them.

        What runs gets half of the time to finish. False: it did not, and the actor goes on as before.
        """

    async def wake(self, tags: Sequence[Tag], timeout_s: float) -> None:
        """Take memory again, weights first. Weights that were dropped have to come as a version: before one has been
        applied nothing is sampled."""

    async def close(self) -> None: ...


def base_url(host: str, port: int) -> str:
    """URL of a server; IPv6 addresses stand in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
