"""A server that speaks OpenEnv's WebSocket protocol (0.10): python -m tests.openenv_server --port-file F

The game of examples/openenv/server.py, which needs openenv's own package. A connection is a session.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

from aiohttp import web

from torchtitan.inference.serving.middleware import write_port_file

TURNS = 3


async def session(request: web.Request) -> web.WebSocketResponse:
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    turns = 0
    async for message in socket:
        asked = message.json()
        if asked["type"] == "reset":
            turns = 0
            answer: dict[str, Any] = {"observation": {"text": ""}, "reward": None, "done": False}
        elif asked["type"] == "step" and turns < TURNS:
            turns += 1
            text = asked["data"]["text"]
            sevens = text.count("7")
            reward = sevens / max(1, len(text))
            answer = {"observation": {"text": f"({sevens})"}, "reward": reward, "done": turns == TURNS}
        else:
            await socket.send_json({"type": "error", "data": {"message": "not now", "code": "INVALID"}})
            continue
        await socket.send_json({"type": "observation", "data": answer})
    return socket


async def main(port_file: Path) -> None:
    application = web.Application()
    application.router.add_get("/ws", session)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    write_port_file(port_file, runner.addresses[0][1])
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port-file", type=Path, required=True)
    asyncio.run(main(parser.parse_args().port_file))
