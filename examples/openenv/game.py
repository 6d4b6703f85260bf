"""An environment of an OpenEnv server, spoken to by its WebSocket protocol: its own package need not be installed here.

    python examples/openenv/server.py --port 8000             with a Python that has openenv 0.10
    OPENENV_URL=http://127.0.0.1:8000 PYTHONPATH=examples/openenv ./run_grpo.sh --environment.factory game:Game \\
        --environment.sandbox.network …

Where openenv is installed beside the trainer, its GenericEnvClient does the same.
"""

from __future__ import annotations

import os
from typing import Any

import aiohttp


class Game:
    """A connection is a session of the server; an instance keeps its own for all its episodes."""

    def __init__(self) -> None:
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def reset(self, **row: Any) -> str:
        if self._socket is None:
            self._http = aiohttp.ClientSession()
            self._socket = await self._http.ws_connect(os.environ["OPENENV_URL"] + "/ws")
        answer = await self._ask("reset", {})
        return str(answer["observation"]["text"])

    async def step(self, action: str) -> tuple[str, float, bool]:
        answer = await self._ask("step", {"text": action})
        return answer["observation"]["text"], answer["reward"] or 0.0, answer["done"]

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        assert self._socket is not None
        await self._socket.send_json({"type": kind, "data": data})
        answer = await self._socket.receive_json()
        if answer["type"] == "error":
            raise RuntimeError(f"the OpenEnv server says: {answer['data']}")
        found: dict[str, Any] = answer["data"]
        return found
