"""The gateway's server to clients that speak no OpenAI: raw bytes on its port."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S, asynchronous, eventually
from torchtitan.rollout.gateway.server import serve
from torchtitan.utils import http_site


@contextlib.asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[int]:
    """The port of a gateway that no run has connected to."""
    port_file = folder / "port"
    server = asyncio.create_task(serve("127.0.0.1", port_file, "secret"))
    try:
        yield int(await eventually(lambda: port_file.exists() and port_file.read_text()))
    finally:
        server.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await server


@asynchronous
async def test_half_open_connections_are_closed_and_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_site, "STRANGER_SECONDS", 0.5)
    async with serving(tmp_path) as port, contextlib.AsyncExitStack() as closing:

        async def connect(data: bytes) -> asyncio.StreamReader:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            closing.callback(writer.close)
            writer.write(data)
            writers.append(writer)
            return reader

        writers: list[asyncio.StreamWriter] = []
        request = b"GET /nothing HTTP/1.1\r\nHost: x\r\n"
        spoken = await connect(request + b"\r\n")
        assert b" 404 " in await spoken.readline()
        silent = [await connect(data) for data in (b"", request) for _ in range(100)]
        for reader in silent:
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
        writers[0].write(request + b"\r\n")
        await asyncio.wait_for(spoken.readuntil(b" 404 "), PATIENCE_S)


async def answer_to(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    with contextlib.closing(writer):
        return await asyncio.wait_for(reader.readline(), PATIENCE_S)


@pytest.mark.parametrize("given", [b"", b"Bearer x", b"Bearer \xff\xfe", "Bearer é".encode()])
@asynchronous
async def test_no_other_token_gets_control(tmp_path: Path, given: bytes) -> None:
    async with serving(tmp_path) as port:
        request = b"GET /control HTTP/1.1\r\nHost: x\r\nAuthorization: %b\r\n\r\n" % given
        assert b" 401 " in await answer_to(port, request)
