"""The part of an engine's server that names the cache in which a request shares its beginning."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.patience import asynchronous
from torchtitan.inference.engine_server import PREFIX_KEYS, PrefixKeyMiddleware

Ask = Callable[..., Awaitable[tuple[int, Any]]]


class Engine:
    """An ASGI application with the routes of an engine; generates nothing and says what it was asked."""

    def __init__(self, label_route: str):
        self.label, self.label_route, self.labels_asked = "e/0", label_route, 0
        self.asked: list[Any] = []
        self.meanwhile: Callable[[], Awaitable[None]] | None = None
        """What happens between its answer of a label and the arrival of that"""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive()).get("body", b"")
        answer: dict[str, Any] = {}
        if scope["path"] == self.label_route:
            assert scope["method"] == "GET"
            self.labels_asked += 1
            answer = {"weight_version": self.label}
            if (meanwhile := self.meanwhile) is not None:
                self.meanwhile = None
                await meanwhile()
        elif "generate" in scope["path"]:
            assert dict(scope["headers"])[b"content-length"] == str(len(body)).encode()
            self.asked.append(json.loads(body) if body[:1] == b"{" else body)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


def asking(application: Any) -> Ask:
    """Calls an ASGI application, with a body in several parts."""

    async def ask(method: str, path: str, body: bytes = b"", query: bytes = b"") -> tuple[int, Any]:
        parts = [body[:5], body[5:]]
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {
            "type": "http", "method": method, "path": path, "query_string": query,
            "headers": [(b"content-length", str(len(body)).encode())],
        }  # fmt: skip
        await application(scope, receive, send)
        return sent[0]["status"], json.loads(sent[1]["body"])

    return ask


@pytest.mark.parametrize(
    ("generate", "label", "pause", "resume"),
    [
        ("/inference/v1/generate", "/weight_info", "/pause", "/resume"),
        ("/generate", "/model_info", "/pause_generation", "/continue_generation"),
    ],
)
@asynchronous
async def test_requests_share_with_those_of_the_weights_that_answer_them(
    generate: str, label: str, pause: str, resume: str
) -> None:
    engine = Engine(label)
    ask = asking(PrefixKeyMiddleware(engine))
    body = json.dumps({"token_ids": list(range(100)), "cache_salt": "mine"}).encode()
    for _ in range(2):
        await ask("POST", generate, body)
    first, again = engine.asked
    assert first == again and first["token_ids"] == list(range(100))
    # vLLM's rule for such names.
    assert first["cache_salt"] != "mine" and first["cache_salt"].isalnum() and len(first["cache_salt"]) <= 128
    assert engine.labels_asked == 1

    await ask("POST", pause, query=b"mode=keep")
    waiting = asyncio.ensure_future(ask("POST", generate, body))
    await asyncio.sleep(0.05)
    assert not waiting.done() and len(engine.asked) == 2
    engine.label = "e/1"
    await ask("POST", resume)
    await waiting
    assert engine.asked[-1]["cache_salt"] not in ("mine", first["cache_salt"])

    second = engine.asked[-1]["cache_salt"]

    async def update() -> None:
        await ask("POST", pause, query=b"mode=keep")
        engine.label = "e/2"
        await ask("POST", resume)

    # The label that is asked for is that of weights which go before it arrives.
    await ask("POST", resume)
    engine.meanwhile = update
    await ask("POST", generate, body)
    third = engine.asked[-1]["cache_salt"]
    await ask("POST", generate, body)
    assert engine.asked[-1]["cache_salt"] == third and len({first["cache_salt"], second, third}) == 3

    # Requests may finish before an update: what comes meanwhile is the engine's to refuse.
    await ask("POST", pause, query=b"mode=wait") if pause == "/pause" else None
    await ask("POST", generate, b"no json")
    assert engine.asked[-1] == b"no json"
    assert (await ask("GET", PREFIX_KEYS))[0] == 200
