"""Strangers at an HTTP server: how many connections they hold, and for how long; real sockets."""

from __future__ import annotations

import asyncio
import logging
import socket
from functools import partial

import aiohttp
import pytest
from aiohttp import web

from tests.patience import PATIENCE_S, asynchronous, eventually
from torchtitan.errors import UserError
from torchtitan.utils import http_site
from torchtitan.utils.http_site import HttpSite

LOOPBACK = "127.0.0.1"
MOST = 32


class Site:
    """A site whose only route trusts whoever says that it is known."""

    def __init__(self) -> None:
        app = web.Application()
        app.add_routes([web.get("/", self._answer)])
        self.site = HttpSite(app, 1.0)

    async def _answer(self, request: web.Request) -> web.Response:
        if request.headers.get("known"):
            self.site.trust(request)
        assert request.transport is not None
        return web.Response(text=str(request.transport.get_extra_info("peername")[1]))


async def connect(port: int, count: int) -> list[socket.socket]:
    """So many connections to the port, begun at the same time."""
    loop, made = asyncio.get_running_loop(), [socket.socket() for _ in range(count)]
    for connection in made:
        connection.setblocking(False)
    await asyncio.gather(*(loop.sock_connect(client, (LOOPBACK, port)) for client in made))
    return made


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed it; what it has sent is read."""
    try:
        return not connection.recv(4096)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


@asynchronous
async def test_idle_strangers_are_few_and_let_go_while_known_clients_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_site, "MAX_STRANGERS", MOST)
    server = Site()
    port = await server.site.start(LOOPBACK, 0)
    timeout = aiohttp.ClientTimeout(PATIENCE_S)
    async with aiohttp.ClientSession(f"http://{LOOPBACK}:{port}", timeout=timeout) as known:

        async def ask(**headers: str) -> str:
            async with known.get("/", headers=headers) as response:
                return await response.text()

        connection = await ask(known="yes")
        monkeypatch.setattr(http_site, "STRANGER_SECONDS", 0.5)
        strangers = await connect(port, 5 * MOST)
        # One says half of a request, and one asks without being known.
        strangers[-1].send(b"GET / HTTP/1.1\r\n")
        strangers[-2].send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        await eventually(lambda: sum(map(is_closed, strangers)) >= 4 * MOST)
        assert await ask(known="yes") == connection, "another connection was needed"
        await eventually(lambda: all(map(is_closed, strangers)))
        assert await ask(known="yes") == connection and not server.site._strangers
        for stranger in strangers:
            stranger.close()
    await server.site.close()


@asynchronous
async def test_a_stranger_may_still_become_known_when_the_house_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_site, "MAX_STRANGERS", MOST)
    server = Site()
    port = await server.site.start(LOOPBACK, 0)
    with pytest.raises(UserError, match="cannot listen"):
        await Site().site.start(LOOPBACK, port)
    strangers = await connect(port, 3 * MOST)
    url, headers = f"http://{LOOPBACK}:{port}/", {"known": "yes"}
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
        assert response.status == 200
    assert len(server.site._strangers) == MOST - 1
    # At the end nobody is waited for.
    await asyncio.wait_for(server.site.close(), PATIENCE_S)
    for stranger in strangers:
        await eventually(partial(is_closed, stranger))
        stranger.close()


@asynchronous
async def test_many_known_clients_may_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_site, "MAX_STRANGERS", MOST)
    server = Site()
    port = await server.site.start(LOOPBACK, 0)
    loop, clients = asyncio.get_running_loop(), list[socket.socket]()

    async def ask(client: socket.socket) -> bytes:
        client.setblocking(False)
        clients.append(client)
        await loop.sock_connect(client, (LOOPBACK, port))
        await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: a\r\nknown: yes\r\n\r\n")
        return await loop.sock_recv(client, 15)

    answers = await asyncio.gather(*(ask(socket.socket()) for _ in range(5 * MOST)))
    assert answers == [b"HTTP/1.1 200 OK"] * 5 * MOST and not server.site._strangers
    for client in clients:
        client.close()
    await server.site.close()


@asynchronous
async def test_requests_that_are_no_http_cost_few_short_lines(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever serves: aiohttp's own logger would write a traceback with the request for each."""
    for limit in logging.getLogger("aiohttp.server").filters:
        limit._begun = 0.0
    plain = web.AppRunner(web.Application())
    await plain.setup()
    await web.TCPSite(plain, LOOPBACK, 0).start()
    server = Site()
    ports = plain.addresses[0][1], await server.site.start(LOOPBACK, 0)
    malformed = (
        b"GET / HTTP/1.1\nFORGED " + b"z" * 7000 + b"\n\n",
        b"GET / HTTP/1.1\r\nA: \0b\r\n\r\n",
        b"\x16\x03\x01\r\n\r\n",
    )
    for _ in range(20):
        for port in ports:
            for request in malformed:
                reader, writer = await asyncio.open_connection(LOOPBACK, port)
                writer.write(request)
                await reader.read()
                writer.close()
    await plain.cleanup()
    await server.site.close()
    text = caplog.text
    assert "a request is refused" in text and "Traceback" not in text and 50 * "z" not in text
    assert len(text) < 10 * 400
