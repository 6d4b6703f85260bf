"""The run's side of the gateway: its process, and the calls in both directions."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Awaitable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.inference.actor_client import base_url
from torchtitan.inference.engines.replicas.replica_pool import ReplicaPool
from torchtitan.inference.pool.actor_pool import InferencePool
from torchtitan.inference.types import GenerateRequest, SamplingParameters
from torchtitan.rollout.gateway.peer import MAX_MESSAGE_BYTES, Peer, PeerFailed
from torchtitan.rollout.gateway.record import SessionRecord, read_record
from torchtitan.utils.child_process import ChildProcess, child_environment
from torchtitan.utils.json_lines import EventLog
from torchtitan.utils.typed_json import decode

logger = logging.getLogger(__name__)

TOKEN_ENV = "TORCHTITAN_GATEWAY_TOKEN"
START_TIMEOUT_S = 60.0
# The gateway answers these calls immediately.
ORDER_TIMEOUT_S = 30.0


class GatewayLost(Exception):
    """The gateway has ended and its sessions' records are lost, so their episodes must start again."""


@dataclass
class SessionAccess:
    """A program's access to the policy: `base_url` and `key` for an OpenAI client."""

    session: str
    base_url: str
    key: str
    address: tuple[str, int] | None = None
    """Host and port at which the gateway listens on this machine, for programs that are isolated from the network"""
    stderr: str = ""
    """The end of the program's standard error, once it has ended or missed its deadline"""


class Gateway:
    """Starts the gateway's process, and restarts it after it has ended. All methods belong to one asyncio loop.

    Args:
        pool: samples the gateway's requests.
    """

    def __init__(
        self,
        config: JobConfig,
        pool: InferencePool | ReplicaPool,
        events: EventLog,
        run_dir: Path,
        name: str = "gateway",
    ):
        """name: of its files in logs/."""
        self._pool, self._events = pool, events
        self._settings = {
            "model": config.model.hf_assets_path,
            "chat_template_kwargs": config.rollout.chat_template_kwargs,
            "stop_token_ids": config.rollout.stop_token_ids,
            "tool_parser": config.environment.tool_parser,
            "name": Path(config.model.hf_assets_path).name,
            "seq_len": config.training.seq_len,
            "max_calls": config.environment.max_turns,
            "timeout_s": config.rollout.data_timeout_s,
        }
        self._environment = config.environment
        self._token = secrets.token_urlsafe(24)
        self._process = ChildProcess("the gateway", run_dir / "logs" / f"{name}.log")
        self._port_file = run_dir / "logs" / f"{name}.port"
        self._http: aiohttp.ClientSession | None = None
        self._peer: Peer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self.statistics: Counter[str] = Counter({"starts": 0, "late_calls": 0})
        self.url = ""
        """Where programs reach it"""
        self._address: tuple[str, int] | None = None

    async def open(
        self, session: str, sampling: SamplingParameters, *, min_version: int = 0, shares: str = "", many: bool = False
    ) -> SessionAccess:
        """Open a new session; or, with `many`, a key for several sessions, which calls name in X-Session-ID.

        sampling: for every call, whatever the program asks for; it may only ask for fewer tokens. Each call derives its
        own seed from the session's.

        Raises UserError if the gateway does not start, GatewayLost if it ends meanwhile.
        """
        async with self._starting:
            peer = self._peer or await self._start()
        opening = {"sampling": asdict(sampling), "min_version": min_version, "shares": shares}
        key = await self._order(peer.call("open", session=session, many=many, **opening))
        return SessionAccess(session, f"{self.url}/v1", decode(str, key), self._address)

    async def end(self, session: str) -> SessionRecord:
        """End a session, or all sessions of a key that was opened with `many`; later calls are refused.

        Raises GatewayLost if the gateway has ended or does not know the session.
        """
        if self._peer is None:
            raise GatewayLost("the gateway has ended")
        record = await read_record(await self._order(self._peer.call("end", session=session)))
        if record is None:
            raise GatewayLost(f"the gateway knows no session {session}")
        return record

    async def _order(self, order: Awaitable[bytes]) -> bytes:
        try:
            return await asyncio.wait_for(order, ORDER_TIMEOUT_S)
        except TimeoutError:
            raise GatewayLost(f"the gateway gave no answer within {ORDER_TIMEOUT_S:g} s") from None
        except (ConnectionError, PeerFailed) as error:
            raise GatewayLost(str(error)) from error

    async def _start(self) -> Peer:
        """Start the process and connect to it. Raises UserError."""
        await self.close()
        self._port_file.unlink(missing_ok=True)
        host = self._environment.gateway.host.strip()
        command = [
            sys.executable, "-m", "torchtitan.rollout.gateway.server",
            "--host", host,
            "--port", str(self._environment.gateway.port),
            "--port-file", str(self._port_file),
            "--token-env", TOKEN_ENV,
            "--parent-pid", str(os.getpid()),
        ]  # fmt: skip
        self.statistics["starts"] += 1
        await self._process.launch(command, child_environment(1, **{TOKEN_ENV: self._token}))
        port = await self._process.read_port(self._port_file, time.monotonic() + START_TIMEOUT_S)
        self._address = ({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)
        listening_url = base_url(*self._address)
        self.url = self._environment.gateway.url.rstrip("/").replace("{port}", str(port)) or listening_url
        self._http = aiohttp.ClientSession()
        headers = {"Authorization": f"Bearer {self._token}"}
        try:
            socket = await self._http.ws_connect(
                f"{listening_url}/control", headers=headers, max_msg_size=MAX_MESSAGE_BYTES
            )
            peer = Peer(
                socket,
                {"sample": self._sample, "late_call": self._late_call, "history_rewritten": self._history_rewritten},
            )
            self._serving = asyncio.create_task(self._serve(peer))
            await asyncio.wait_for(peer.call("set_up", **self._settings), START_TIMEOUT_S)
        except (TimeoutError, aiohttp.ClientError, ConnectionError, PeerFailed) as error:
            await self.close()
            raise UserError(f"the gateway does not start: {error!r}; {self._process.log_tail()}") from error
        self._peer = peer
        return peer

    async def _serve(self, peer: Peer) -> None:
        await peer.run()
        self._peer = None
        await self._process.stop()
        self._events.write("gateway_ended", level=logging.WARNING, reason=self._process.describe_end())

    async def close(self) -> None:
        """End the process; `open` starts it again."""
        self._peer = None
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
            self._serving = None
        if self._http is not None:
            await self._http.close()
            self._http = None
        await self._process.stop()

    # Calls from the gateway

    async def _sample(self, request: dict[str, Any], min_version: int, shares: str) -> list[dict[str, Any]]:
        completions = await self._pool.generate(GenerateRequest.from_json(request), min_version, shares=shares)
        return [completion.to_json() for completion in completions]

    async def _late_call(self, session: str, path: str) -> None:
        self.statistics["late_calls"] += 1
        self._events.write("call_after_end", level=logging.WARNING, session=session, path=path)

    async def _history_rewritten(self, session: str, difference: str) -> None:
        self._events.write("history_rewritten", level=logging.WARNING, session=session, difference=difference)
