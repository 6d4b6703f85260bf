"""Connections that a server closes while they are idle, or in the middle of a request: what is sent again, and what is
not."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator

import pytest

from tests.patience import asynchronous
from torchtitan.inference import actor_client
from torchtitan.inference.actor_client import ActorError, JsonClient

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


class Server:
    """Answers so many requests of each connection, then closes it when it has read another one."""

    def __init__(self, answered: list[int]):
        self.answered = answered
        """Requests that each connection answers, in the order of the connections; the last number goes on"""
        self.requests: list[int] = []
        """For each request, the number of its connection"""
        self.connections = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.connections = self.connections, self.connections + 1
        left = self.answered[min(number, len(self.answered) - 1)]
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head, re.I)
                await reader.readexactly(int(length[1]) if length else 0)
                self.requests.append(number)
                if not left:
                    break
                left -= 1
                writer.write(ANSWER)
        writer.transport.abort()


@contextlib.asynccontextmanager
async def connected(*answered: int) -> AsyncIterator[tuple[Server, JsonClient]]:
    server = Server(list(answered))
    listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    client = JsonClient(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", "token")
    try:
        yield server, client
    finally:
        await client.close()
        listening.close()


async def post(client: JsonClient, repeatable: bool = True) -> None:
    await client.fetch("generate", "POST", "/v1/generate", 60, {}, repeatable=repeatable)


@asynchronous
async def test_a_request_that_meets_a_closed_connection_is_sent_again_on_a_new_one() -> None:
    async with connected(1, 9) as (server, client):
        await post(client)
        await post(client)
        assert server.requests == [0, 0, 1]


@asynchronous
async def test_an_order_is_not_sent_twice() -> None:
    async with connected(1, 9) as (server, client):
        await post(client)
        with pytest.raises(ActorError, match="Server disconnected"):
            await post(client, repeatable=False)
        assert server.requests == [0, 0]


@asynchronous
async def test_a_server_that_closes_a_new_connection_is_not_asked_again() -> None:
    async with connected(0) as (server, client):
        with pytest.raises(ActorError):
            await post(client)
        assert server.requests == [0]


@asynchronous
async def test_a_request_is_sent_twice_at_most() -> None:
    async with connected(1, 0) as (server, client):
        await post(client)
        with pytest.raises(ActorError):
            await post(client)
        assert server.requests == [0, 0, 1]


@asynchronous
async def test_an_idle_connection_is_closed_before_the_server_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # uvicorn, which serves vLLM and SGLang, keeps one for 5 s.
    assert actor_client.KEEP_ALIVE_S < 5
    monkeypatch.setattr(actor_client, "KEEP_ALIVE_S", 0.01)
    async with connected(9) as (server, client):
        await post(client)
        await asyncio.sleep(0.05)
        await post(client)
        assert server.requests == [0, 1]
