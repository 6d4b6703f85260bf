"""What the agent has to know of a foreign engine: how its server is started, administered and given weights."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torchtitan.errors import UserError
from torchtitan.inference.agent.control import EngineControl
from torchtitan.inference.agent.hand_over import HandOver

Route = Literal["direct", "agent", "engine"]


@dataclass(frozen=True)
class EngineOptions:
    """One engine as the command line of the agent asks for it."""

    name: str
    """Of the actor: in files and logs"""
    model: str
    """Checkpoint directory"""
    python: str
    """Interpreter of the engine's environment"""
    route: Route
    port_file: Path
    """Gets the port of the engine's server once it listens"""
    token_env: str
    """Environment variable with the bearer token that all routes of the server ask for"""
    parent_pid: int
    """The server ends when this process is gone"""
    host: str = "127.0.0.1"
    dtype: str = "float32"
    max_sequences: int = 256
    max_length: int = 2048
    tensor_parallel_size: int = 1
    memory_gb: float = 0.0
    """Of the KV cache; 0: the engine's own choice"""
    device_share: float = 0.0
    """Of a GPU's memory that it may count on, beside whom it shares that with; 0: the engine's own choice"""
    sleep_level: int = 0
    """How deep it is going to sleep, and with it whether"""
    threads: int = 1
    """CPU threads of one engine worker"""
    in_flight_kv: Literal["keep", "recompute"] = "keep"
    update_timeout_s: float = 60.0
    """Deadline of each order that an apply gives to the engine"""
    stage_on_device: bool = False
    """Where the engine itself stages versions: on its device, for transports between devices, instead of on the host"""
    disk_path: str = ""
    """Folder for versions on their way into the engine; empty: memory-backed files of this machine"""
    arguments: tuple[str, ...] = ()
    """Passed to the engine's own command line, untouched and last"""

    @property
    def folder(self) -> Path:
        """For the engine's sockets: see engine_folder.py"""
        return self.port_file.parent


class ForeignEngine(Protocol):
    """An engine's entry: `ENGINE` in torchtitan.inference.<name>.engine. Imports neither the engine nor torch."""

    name: str
    routes: tuple[Route, ...]
    """The first is what `auto` takes"""

    def command(self, options: EngineOptions) -> tuple[list[str], dict[str, str]]:
        """The command line that starts the server, and what its environment has beside ours."""

    def control(self, url: str, token: str, options: EngineOptions) -> EngineControl: ...

    def hand_over(self, control: EngineControl, options: EngineOptions) -> HandOver:
        """The way into the engine that options.route names."""


def load_engine(name: str) -> ForeignEngine:
    """The engine of that name. Raises UserError where there is none."""
    try:
        engine: ForeignEngine = importlib.import_module(f"torchtitan.inference.{name}.engine").ENGINE
    except ModuleNotFoundError as error:
        if error.name is None or not f"torchtitan.inference.{name}.engine".startswith(error.name):
            raise
        raise UserError(f"there is no engine {name!r} to start an agent for") from error
    return engine
