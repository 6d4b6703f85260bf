"""The gateway's way to the actors: the run says which one, the tokens go straight there and back."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import Any

from torchtitan.inference.actor_client import ActorClient
from torchtitan.inference.client import ActorError
from torchtitan.inference.engines import make_client
from torchtitan.inference.types import Completion, GenerateRequest
from torchtitan.rollout.gateway.peer import Peer, PeerFailed


class NoAnswer(Exception):
    """The system could not answer a call of the policy. The message is why."""


@dataclass
class _Pending:
    request: GenerateRequest
    completions: list[Completion] = field(default_factory=list)


class Engines:
    """Has requests sampled. `peer` is the run, whose pool knows the actors, their versions and their load."""

    def __init__(self, peer: Peer, backend: str, actor_token: str, request_timeout_s: float, timeout_s: float):
        """request_timeout_s: of one actor's answer; timeout_s: of all of it, with the wait for an actor."""
        self._peer, self._backend, self._token = peer, backend, actor_token
        self._request_timeout_s, self._timeout_s = request_timeout_s, timeout_s
        self._numbers = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._clients: dict[str, ActorClient] = {}
        self._unknown: set[str] = set()
        """Actors that have to say (again) where their engine is"""

    async def sample(self, request: GenerateRequest, min_version: int, shares: str) -> Completion:
        """The one completion of a request. Raises NoAnswer."""
        number = next(self._numbers)
        pending = self._pending[number] = _Pending(request)
        try:
            answer = await asyncio.wait_for(
                self._peer.call("sample", number=number, min_version=min_version, shares=shares), self._timeout_s
            )
        except asyncio.TimeoutError:
            raise NoAnswer(f"no actor answered within {self._timeout_s:g} s") from None
        except (PeerFailed, ConnectionError) as error:
            raise NoAnswer(str(error)) from error
        finally:
            del self._pending[number]
        # Engines inside of the trainer's processes have no address: their answers come by the run.
        (completion,) = pending.completions or [Completion.from_json(one) for one in answer]
        return completion

    async def ask_actor(self, number: int, url: str) -> list[dict[str, Any]]:
        """Called by the run: send a request to the actor at `url`. Returns what it says beside the tokens."""
        pending = self._pending[number]
        if url not in self._clients:
            self._clients[url] = make_client(self._backend, url, self._token)
            self._unknown.add(url)
        client = self._clients[url]
        try:
            if url in self._unknown:
                # An agent's client learns from this where the engine is.
                await client.health(self._request_timeout_s)
                self._unknown.discard(url)
            pending.completions = await client.generate(pending.request, self._request_timeout_s)
        except ActorError:
            self._unknown.add(url)
            raise
        nothing: dict[str, Any] = {"token_ids": [], "log_probs": [], "kept_token_ids": None}
        return [one.to_json() | nothing for one in pending.completions]

    async def request(self, number: int) -> dict[str, Any]:
        """Called by the run, where the engines are its own: the request itself."""
        return self._pending[number].request.to_json()

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self._clients.values()))
