"""How the rest of the house talks to one inference actor, whatever engine it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torchtitan.inference.types import Completion, GenerateRequest


class ActorError(Exception):
    """An actor failed in `phase` (generate, health, connect, startup, …). The message is the reason."""

    def __init__(self, phase: str, reason: str):
        super().__init__(reason)
        self.phase = phase


class ActorNotReady(ActorError):
    """The actor lives but must not serve now: it has no weights yet, or is paused."""


class RequestRefused(ActorError):
    """The actor found fault with the request itself; no other actor will like it better. Ends the run."""


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

    @property
    def serves(self) -> bool:
        return self.status == "ok"


class ActorHandler(Protocol):
    """One actor. Every method has a deadline and raises ActorError."""

    async def generate(self, request: GenerateRequest, timeout_s: float) -> list[Completion]: ...

    async def health(self, timeout_s: float) -> ActorHealth: ...

    async def connect_weights(self, coordinator: str, actor: str, epoch: str, timeout_s: float) -> None:
        """Have the actor fetch its weights from this coordinator under this name; replaces an earlier connection."""

    async def pause(self, timeout_s: float) -> None: ...

    async def resume(self, timeout_s: float) -> None: ...

    async def close(self) -> None: ...
