"""The gateway's server to clients that speak no OpenAI: raw bytes on its port."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S, asynchronous, eventually
from torchtitan.rollout.gateway.server import serve


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
