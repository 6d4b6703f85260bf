"""An agent's parts, put together: the engine's process, its control, the hand-over and the HTTP server."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from torchtitan.errors import UserError
from torchtitan.inference.activity import ActivityLog
from torchtitan.inference.agent.applying import Applier
from torchtitan.inference.agent.control import EngineError
from torchtitan.inference.agent.engine import EngineOptions, ForeignEngine
from torchtitan.inference.agent.hand_over import HandOver
from torchtitan.inference.agent.merging import merging
from torchtitan.inference.agent.process import EngineProcess, wait_until_healthy
from torchtitan.inference.agent.server import AgentServer, EnginePlace

# A server that ends closes its port first, and is gone soon. One whose engine has died may wait for ever for requests
# that nobody answers any more (vLLM 0.32: "Waiting for background tasks to complete").
ENDING_S = 20.0
LOOK_S = 1.0


class RunningAgent:
    """Belongs to one asyncio loop. `token` is the agent's, and that of the engine that it starts."""

    def __init__(self, arguments: argparse.Namespace, engine: ForeignEngine, options: EngineOptions, token: str):
        self._arguments, self._engine, self._options, self._token = arguments, engine, options, token
        self.engine_url = arguments.url or ""
        self._process: EngineProcess | None = None
        self._hand_over: HandOver | None = None
        self._server: AgentServer | None = None

    async def start(self, deadline: float) -> int:
        """Returns the agent's port once engine and agent serve. Raises UserError.

        `deadline` is on time.monotonic().
        """
        arguments, options = self._arguments, self._options
        token, token_env = self._token, None
        if arguments.url:
            # An engine without a token gets none: ours is nobody's business there.
            token_env = arguments.engine_token_env or ""
            token = os.environ[token_env] if token_env else ""
        else:
            command, extra = self._engine.command(options)
            environment = {**extra, options.token_env: self._token}
            self._process = EngineProcess(command, environment, options.threads, options.port_file, arguments.log_file)
            self.engine_url = await self._process.start(options.host, deadline)
        control = self._engine.control(self.engine_url, token, options)
        await self._unless_it_ends(wait_until_healthy(control, deadline))
        try:
            facts = await asyncio.to_thread(control.describe)
        except EngineError as error:
            raise UserError(f"the engine at {self.engine_url}: {error}") from error
        # One that runs already knows its workers. In a weight group for fewer, the others would end SGLang's server.
        options = replace(options, tensor_parallel_size=facts.world_size)
        drain_timeout_s = arguments.drain_timeout if arguments.update_mode == "drain" else 0.0
        if drain_timeout_s and not facts.can_wait:
            raise UserError(
                f"{self._engine.name} cannot let running requests finish while new ones wait: inference.update_mode = "
                f'"drain" is not for it'
            )
        self._hand_over = merging(self._engine.hand_over(control, options), options)
        activity = ActivityLog(arguments.activity_file)
        applier = Applier(control, self._hand_over, options.update_timeout_s, drain_timeout_s, activity)
        capabilities = replace(facts.capabilities, route=options.route)
        place = EnginePlace(self.engine_url, capabilities, token_env)
        self._server = AgentServer(
            place, control, self._hand_over, applier, self._token, options.host, options.update_timeout_s
        )
        return await self._server.start(options.host, arguments.port)

    async def engine_ended(self) -> str:
        """Return when the engine that we started has ended, with how, or does not come to an end; never where it ran
        already."""
        if self._process is None:
            await asyncio.Event().wait()
            raise AssertionError
        ended = asyncio.ensure_future(self._process.wait())
        try:
            while True:
                await asyncio.wait({ended}, timeout=LOOK_S)
                if ended.done():
                    return ended.result()
                if self._server is not None and self._server.engine_closed_s > ENDING_S:
                    return (
                        f"the engine has closed its port and not ended within {ENDING_S:g} s; it is killed; "
                        f"{self._process.log_file} ends with: {self._process.log_tail()}"
                    )
        finally:
            ended.cancel()

    async def close(self, grace_s: float) -> None:
        """Stop everything; an engine that we started gets `grace_s` before it is killed."""
        if self._server is not None:
            await self._server.close()
        if self._hand_over is not None:
            await asyncio.to_thread(self._hand_over.close)
        if self._process is not None:
            await self._process.stop(grace_s)

    async def _unless_it_ends(self, waiting: Coroutine[Any, Any, None]) -> None:
        """Await `waiting`, at most until the engine has ended. Raises UserError then."""
        work = asyncio.ensure_future(waiting)
        ended = asyncio.ensure_future(self.engine_ended())
        try:
            await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise UserError(ended.result())
            await work
        finally:
            work.cancel()
            ended.cancel()
