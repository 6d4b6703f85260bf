"""An agent's parts, put together: the engine's process, its control, the way into it and the HTTP server."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from torchtitan.errors import UserError
from torchtitan.inference.agent.applier import Applier, WeightLoader
from torchtitan.inference.agent.control import EngineControl, EngineError
from torchtitan.inference.agent.engine import WILDCARDS, EngineOptions, ForeignEngine
from torchtitan.inference.agent.server import AgentServer, EnginePlace
from torchtitan.inference.base_weights import BaseWeights
from torchtitan.inference.client import base_url
from torchtitan.utils.child_process import ChildProcess, child_environment
from torchtitan.utils.timeline_files import ActivityLog

# A server that ends closes its port first, and is gone soon. One whose engine has died may wait for ever for requests
# that get no answer any more (vLLM 0.32: "Waiting for background tasks to complete").
ENDING_S = 20.0
LOOK_S = 1.0
POLL_S = 0.1
PROBE_S = 5.0


class RunningAgent:
    """Belongs to one asyncio loop. `token` is the agent's, and that of the engine that it starts."""

    def __init__(self, arguments: argparse.Namespace, engine: ForeignEngine, options: EngineOptions, token: str):
        self._arguments, self._engine, self._options, self._token = arguments, engine, options, token
        self.engine_url = arguments.url or ""
        self._process: ChildProcess | None = None
        self._loader: WeightLoader | None = None
        self._server: AgentServer | None = None

    async def start(self, deadline: float) -> int:
        """Returns the agent's port once engine and agent serve. Raises UserError.

        `deadline` is on time.monotonic().
        """
        arguments, options = self._arguments, self._options
        token, token_env = self._token, None
        if arguments.url:
            # An engine without a token gets none: ours must not reach it.
            token_env = arguments.engine_token_env or ""
            token = os.environ[token_env] if token_env else ""
        else:
            command, extra = self._engine.command(options)
            print(f"engine: {shlex.join(command)}", flush=True)
            environment = child_environment(options.threads, **extra, **{options.token_env: self._token})
            self._process = ChildProcess("the engine", arguments.log_file)
            await self._process.launch(command, environment)
            port = await self._process.read_port(options.port_file, deadline)
            self.engine_url = base_url(WILDCARDS.get(options.host, options.host), port)
        control = self._engine.control(self.engine_url, token, options)
        await self._unless_it_ends(_until_healthy(control, deadline))
        try:
            facts = await asyncio.to_thread(control.describe)
        except EngineError as error:
            raise UserError(f"the engine at {self.engine_url}: {error}") from error
        # One that runs already knows its workers. In a weight group for fewer, the others would end SGLang's server.
        options = replace(options, tensor_parallel_size=facts.world_size)
        if arguments.drain_timeout_s and not facts.can_wait:
            raise UserError(
                f"{self._engine.name} cannot let running requests finish while new ones wait: inference.update_mode = "
                f'"drain" is not for it'
            )
        self._loader = loader = self._engine.loader(control, options)
        # Workers inside the engine merge adapters for themselves.
        base = None if loader.workers else BaseWeights(options.model)
        activity = ActivityLog(arguments.activity_file)
        applier = Applier(control, loader, options.update_timeout_s, arguments.drain_timeout_s, activity, base)
        capabilities = replace(facts.capabilities, route=options.route)
        place = EnginePlace(self.engine_url, capabilities, token_env)
        self._server = AgentServer(place, control, loader, applier, self._token, options.host, options.update_timeout_s)
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
                    return f"{self._process.describe_end()}; {self._process.log_tail()}"
                if self._server is not None and self._server.engine_closed_s > ENDING_S:
                    closed = f"the engine has closed its port and not ended within {ENDING_S:g} s; it is killed"
                    return f"{closed}; {self._process.log_tail()}"
        finally:
            ended.cancel()

    async def close(self, grace_s: float) -> None:
        """Stop everything; an engine that we started gets `grace_s` before it is killed."""
        if self._server is not None:
            await self._server.close()
        if self._loader is not None:
            await asyncio.to_thread(self._loader.close)
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


async def _until_healthy(control: EngineControl, deadline: float) -> None:
    """Return when the engine answers. Raises UserError where it has not by `deadline` (time.monotonic())."""
    while True:
        try:
            return await asyncio.to_thread(control.check_health, PROBE_S)
        except EngineError as error:
            if time.monotonic() > deadline:
                raise UserError(f"the engine does not answer: {error}") from error
        await asyncio.sleep(POLL_S)
