"""An actor's server that says what a test has it say."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from aiohttp import web

from torchtitan.inference.actor_client import Facts


class StandInActor:
    """Says that it serves `version` of epoch "e". facts: what it says of itself; None: it has no such answer."""

    def __init__(self, version: int = 0, facts: Facts | None = None):
        self.version, self.facts = version, facts
        self.unverified: list[str] = []
        self.dead = False
        self.connections = 0

    async def health(self, _request: web.Request) -> web.Response:
        if self.dead:
            raise web.HTTPInternalServerError
        return web.json_response({"state": "ready", "serves": True, "epoch": "e", "version": self.version})

    async def offers(self, _request: web.Request) -> web.Response:
        if self.facts is None:
            raise web.HTTPNotFound
        return web.json_response({"offers": self.facts, "unverified": self.unverified})

    async def connect(self, request: web.Request) -> web.Response:
        self.connections += 1
        return await self.health(request)

    async def generate(self, _request: web.Request) -> web.Response:
        raise web.HTTPServiceUnavailable

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Its URL."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/offers", self.offers),
                web.post("/weights/connect", self.connect),
                web.post("/v1/generate", self.generate),
            ]
        )
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()
