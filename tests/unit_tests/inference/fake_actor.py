"""An actor without a model, with the command line and the routes of the embedded engine, for tests of the pool.

Whatever GET /health, /v1/generate and /weights/connect promise it does at once; FAKE_DELAY_S is how long it generates.
The environment variable FAKE_EXIT makes it end at start; the prompt token 13 is refused, 14 is too much for this actor,
and 17 makes it answer nonsense. Files in the folder that FAKE_ENGINE names change what it does:

    hang        its engine hangs
    deaf        it has no use for connections to a registry
    lost        its weights have given up, until it is connected anew
    poisoned    the process whose number stands there holds half a version, drops what runs and serves nothing
    dead        the engine beside it is dead since then, which it does not say
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.unit_tests.inference.fake_engine import Guarded, flag, listen

DELAY_S = float(os.environ.get("FAKE_DELAY_S", "0.0"))
FOLDER = Path(os.environ["FAKE_ENGINE"])


def age_of_flag(name: str) -> float:
    """Seconds since the flag was raised."""
    return time.time() - (FOLDER / name).stat().st_mtime


def poisoned() -> bool:
    """Whether this process is the one that is to be."""
    return flag("poisoned") and (FOLDER / "poisoned").read_text() == str(os.getpid())


class FakeActor(Guarded):
    def __init__(self, token: str):
        super().__init__(token)
        self.epoch: str | None = None
        self.version: int | None = None
        self.connections: list[dict[str, Any]] = []

    async def health(self, request: web.Request) -> web.Response:
        state = "poisoned" if poisoned() else "joining" if self.version is None else "ready"
        age = 60.0 if flag("hang") else 0.0
        weights = {"state": "ready", "failure": "no registry for 60 s" if flag("lost") else None}
        answer = {"state": state, "serves": state == "ready", "epoch": self.epoch, "version": self.version}
        if flag("dead"):
            answer["answered_age_s"] = age_of_flag("dead")
        return web.json_response({**answer, "reason": "no weights", "engine_age_s": age, "weights": weights})

    async def generate(self, request: web.Request) -> web.Response:
        if self.version is None or poisoned():
            return web.json_response({"error": "no weights"}, status=503)
        if flag("dead"):
            return web.json_response({"error": "the engine is dead"}, status=500)
        body = await request.json()
        if body["prompt_ids"] == [13]:
            return web.json_response({"error": "wrong"}, status=400)
        if body["prompt_ids"] == [14]:
            return web.json_response({"error": "too long"}, status=413)
        if body["prompt_ids"] == [17]:
            return web.json_response({"completions": [{"token_ids": [1]}]})
        epoch, version = self.epoch, self.version
        await asyncio.sleep(DELAY_S)
        if poisoned():
            return web.json_response({"error": "a weight update failed half-way"}, status=503)
        span = {"epoch": epoch, "version": version, "start": 0, "end": 2}
        completion = {
            "token_ids": [os.getpid(), 1], "log_probs": [-0.5, -0.25], "finish_reason": "stop", "spans": [span],
        }  # fmt: skip
        return web.json_response({"completions": [completion] * body["sampling"]["n"]})

    async def connect(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.connections.append(body)
        flag("lost", lower=True)
        if flag("deaf"):
            return web.json_response({})
        self.epoch, self.version = body["epoch"], int(body["registry"].rpartition(":")[2])
        return web.json_response({})


async def serve(port_file: Path, token: str) -> None:
    actor = FakeActor(token)
    app = web.Application(middlewares=[actor.guard])
    app.add_routes(
        [
            web.get("/health", actor.health),
            web.post("/v1/generate", actor.generate),
            web.post("/weights/connect", actor.connect),
        ]
    )
    await listen(app, "127.0.0.1", port_file)
    while os.getppid() == int(sys.argv[sys.argv.index("--parent-pid") + 1]):  # noqa: ASYNC110
        await asyncio.sleep(0.5)


if __name__ == "__main__":
    if os.environ.get("FAKE_EXIT"):
        sys.exit("the fake actor was told to fail")
    parser = argparse.ArgumentParser()
    parser.add_argument("--port-file", type=Path)
    parser.add_argument("--token-env")
    known, _ = parser.parse_known_args()
    asyncio.run(serve(known.port_file, os.environ[known.token_env]))
