"""What a dialect is: an API, as translations of its JSON to a Call and of an Answer to its JSON.

A dialect does nothing else: what is rendered, sampled and recorded is the same for all of them.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torchtitan.rollout.gateway.calls import Answer, Call


class Dialect(ABC):
    """An API. All methods are pure translations."""

    path: str
    counting_path: str = ""
    """Where the API counts the tokens of a call without an answer; empty if it has no such route"""
    last_frame: bytes = b""
    """What ends a stream, behind its last event"""
    streams_full_context: bool = False
    """Whether a program that asked for a stream expects one that says that its conversation is too long"""

    @abstractmethod
    def read(self, data: Mapping[str, Any], recall: Callable[[str], list[dict[str, Any]]]) -> Call:
        """Read a call. `recall` returns the conversation that ended with an answer of this session, by the answer's
        name. Raises WrongCall."""

    @abstractmethod
    def write(self, call: Call, answer: Answer) -> dict[str, Any]:
        """Return an answer as JSON."""

    def opening(self, call: Call, answer: Answer) -> Iterable[dict[str, Any]]:
        """Yield the events of a stream that can be sent before the answer is sampled; it has no choices yet."""
        return ()

    def waiting(self, call: Call, answer: Answer) -> Iterable[dict[str, Any]]:
        """Yield the events that show that the answer is being sampled."""
        return ()

    @abstractmethod
    def events(self, call: Call, answer: Answer) -> Iterable[dict[str, Any]]:
        """Yield an answer as the events behind `opening`. It was sampled as a whole and is only framed as a stream."""

    def failure(
        self, call: Call, answer: Answer, message: str, status: int, code: str | None
    ) -> Iterable[dict[str, Any]]:
        """Yield the events that end a stream without an answer."""
        yield self.error(message, status, code)

    def frame(self, event: dict[str, Any], number: int) -> bytes:
        """Return an event of a stream as a server-sent event. number: how many were sent before."""
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), compact_json(event))

    def write_count(self, tokens: int) -> dict[str, Any]:
        """Return the JSON for the number of a call's tokens."""
        raise NotImplementedError

    def error(self, message: str, status: int, code: str | None) -> dict[str, Any]:
        """Return an error as JSON, in OpenAI's format."""
        kind = "server_error" if status >= 500 else "invalid_request_error"
        return {"error": {"message": message, "type": kind, "code": code, "param": None}}


def compact_json(data: Any) -> bytes:
    """Raises ValueError for NaN and infinite numbers, which are no JSON."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).encode()
