"""What the agent has to know of a foreign engine: how its server is started, administered and given weights."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from torchtitan.errors import UserError
from torchtitan.inference.agent.control import EngineControl

if TYPE_CHECKING:
    from torchtitan.inference.agent.applier import WeightLoader

Route = Literal["direct", "agent"]
# An agent beside an engine that listens everywhere reaches it here.
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


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
    verify_every: int = 0
    """Where the engine itself stages versions: from one look at its weights in use to the next, 0 for none"""
    disk_path: str = ""
    """Folder for versions on their way into the engine; empty: memory-backed files of this machine"""
    arguments: tuple[str, ...] = ()
    """Passed to the engine's own command line, untouched and last"""

    @property
    def folder(self) -> Path:
        """For the engine's sockets: see engine_folder.py"""
        return self.port_file.parent


class ForeignEngine:
    """An engine's entry: `ENGINE` in torchtitan.inference.<name>.engine. Imports neither the engine nor torch."""

    name: ClassVar[str]
    routes: ClassVar[tuple[Route, ...]]
    """The first is what `auto` takes"""

    def server(self, options: EngineOptions) -> tuple[list[str], dict[str, str]]:
        """The server's own command line, and what its environment has beside ours."""
        raise NotImplementedError

    def control(self, url: str, token: str, options: EngineOptions) -> EngineControl:
        raise NotImplementedError

    def special_loader(self, control: EngineControl, options: EngineOptions) -> WeightLoader:
        """For the routes that only this engine has."""
        raise NotImplementedError

    def command(self, options: EngineOptions) -> tuple[list[str], dict[str, str]]:
        """The command line that starts the server, and what its environment has beside ours."""
        theirs, environment = self.server(options)
        ours = [
            options.python, "-m", f"torchtitan.inference.{self.name}.serve",
            "--host", options.host,
            "--port-file", str(options.port_file),
            "--token-env", options.token_env,
            "--parent-pid", str(options.parent_pid),
        ]  # fmt: skip
        return [*ours, "--", *theirs, *options.arguments], environment

    def loader(self, control: EngineControl, options: EngineOptions) -> WeightLoader:
        """The way into the engine that options.route names."""
        if options.route != "agent":
            return self.special_loader(control, options)
        from torchtitan.inference.agent.applier import FileLoader

        return FileLoader(options, control.read_files)

    def find_route(self, asked: str, said: str) -> Route:
        """The route that is asked for. Raises UserError, with `said` for what was asked, where there is none."""
        for route in self.routes:
            if asked in ("auto", route):
                return route
        raise UserError(f"{said}: {self.name} takes weights by {' or '.join(self.routes)}")


def load_engine(name: str) -> ForeignEngine:
    """The engine of that name. Raises UserError where there is none."""
    try:
        engine: ForeignEngine = importlib.import_module(f"torchtitan.inference.{name}.engine").ENGINE
    except ModuleNotFoundError as error:
        if error.name is None or not f"torchtitan.inference.{name}.engine".startswith(error.name):
            raise
        raise UserError(f"there is no engine {name!r} to start an agent for") from error
    return engine
