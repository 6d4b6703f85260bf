"""What an inference actor, whatever engine it is, says about itself, and how it fails. No torch and no HTTP here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.inference.types import Tag

TOKEN_VARIABLE = "TORCHTITAN_ACTOR_TOKEN"
# States of an actor's weights with a version on its way; the registry has deadlines for them.
UPDATING = ("PULLING", "APPLYING")


class ActorError(Exception):
    """An actor failed in `phase` (generate, health, connect, startup, …). The message is the reason."""

    def __init__(self, phase: str, reason: str):
        super().__init__(reason)
        self.phase = phase


class ActorNotReady(ActorError):
    """The actor lives but must not serve now: it has no weights yet, or is paused."""


class RequestRefused(ActorError):
    """The actor found fault with the request itself, as every other actor would. Ends the run."""


class TokenRefused(ActorError):
    """The actor does not know our bearer token. At start-up this ends the run."""


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
    """How weights get into a foreign engine: direct or agent"""

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
    """The answer of /health. version is None before it has applied a first one."""

    status: str
    epoch: str | None
    version: int | None
    reason: str | None = None
    """Why it does not serve"""
    weights_state: str | None = None
    """Of its weights (PULLING, …); None where no trainer gives it any"""
    weights_failure: str | None = None
    """Why no weights come any more"""
    engine_age_s: float = 0.0
    """Seconds without progress of an engine that has work"""
    answered_age_s: float = 0.0
    """Seconds since the engine behind it was last seen alive, where that is not the actor itself"""
    asleep: tuple[Tag, ...] = ()
    """Parts of its memory that it has given back; it serves nothing before all are there again"""

    @property
    def serves(self) -> bool:
        return self.status == "ok"


def base_url(host: str, port: int) -> str:
    """URL of a server; IPv6 addresses stand in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
