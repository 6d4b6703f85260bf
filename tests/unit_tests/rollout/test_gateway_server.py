"""The gateway's server to clients that speak no OpenAI: raw bytes on its port."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.chat_models import write_chat_tokenizer
from tests.patience import PATIENCE_S, asynchronous, eventually
from torchtitan.config.job_config import JobConfig
from torchtitan.inference.types import SamplingParameters
from torchtitan.rollout.gateway.gateway_process import Gateway
from torchtitan.rollout.gateway.server import serve
from torchtitan.utils import http_site
from torchtitan.utils.json_lines import EventLog


@contextlib.asynccontextmanager
async def serving(folder: Path, host: str = "127.0.0.1") -> AsyncIterator[int]:
    """The port of a gateway that no run has connected to."""
    port_file = folder / "port"
    server = asyncio.create_task(serve(host, port_file, "secret"))
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


@asynchronous
async def test_strangers_from_other_machines_may_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where other machines reach the gateway, whatever they say: a connection without a key ends soon."""
    monkeypatch.setattr(http_site, "STRANGER_SECONDS", 0.5)
    request = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nX-Api-Key: guessed\r\nContent-Length: 2\r\n\r\n{}"
    async with serving(tmp_path, "0.0.0.0") as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.closing(writer):
            writer.write(request)
            assert b" 401 " in await asyncio.wait_for(reader.readline(), PATIENCE_S)
            with contextlib.suppress(ConnectionError):
                while await asyncio.wait_for(reader.read(1 << 16), PATIENCE_S):
                    pass


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


@asynchronous
async def test_programs_elsewhere_get_the_address_that_reaches_them(tmp_path: Path) -> None:
    """Behind a reverse proxy: its URL is advertised, while the run's own connection is local."""
    config = JobConfig()
    config.model.hf_assets_path = str(write_chat_tokenizer(tmp_path / "chat"))
    config.environment.gateway.host, config.environment.gateway.url = "0.0.0.0", "https://run.example/{port}/"
    (tmp_path / "logs").mkdir()
    gateway = Gateway(config, None, EventLog(tmp_path / "events.jsonl"), tmp_path)  # type: ignore[arg-type]
    try:
        access = await gateway.open("s", SamplingParameters(5))
        found = re.fullmatch(r"https://run.example/(\d+)/v1", access.base_url)
        assert found is not None
        port, key = found[1], access.key.encode()
        request = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\n\r\n"
        assert b" 200 " in await answer_to(int(port), request % key)
        await gateway.end("s")
        assert b" 410 " in await answer_to(int(port), request % key)
    finally:
        await gateway.close()
