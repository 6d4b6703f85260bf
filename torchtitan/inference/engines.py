"""The engines that can sample, by the name that inference.backend gives them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.inference.client import ActorClient


@dataclass(frozen=True)
class Engine:
    """make_client(url, token, job token): a client of one actor. command(config, port file, number): the command line
    of an actor that reports its port in the file; raises UserError where it cannot be started here."""

    make_client: Callable[[str, str, str], ActorClient]
    command: Callable[[JobConfig, Path, int], list[str]]


def _embedded_client(url: str, token: str, job_token: str) -> ActorClient:
    from torchtitan.inference.embedded.client import EmbeddedClient

    return EmbeddedClient(url, token, job_token)


def _embedded_command(config: JobConfig, port_file: Path, number: int) -> list[str]:
    from torchtitan.inference.embedded.command import embedded_command

    return embedded_command(config, port_file, number)


def _agent_client(name: str, url: str, token: str, job_token: str) -> ActorClient:
    from torchtitan.inference.agent.client import AgentClient

    dialect = importlib.import_module(f"torchtitan.inference.{name}.dialect").DIALECT
    return AgentClient(dialect, url, token, job_token)


def _agent_command(name: str, config: JobConfig, port_file: Path, number: int) -> list[str]:
    from torchtitan.inference.agent.command import agent_command

    return agent_command(name, config, port_file, number)


def _with_agent(name: str) -> Engine:
    return Engine(partial(_agent_client, name), partial(_agent_command, name))


ENGINES = {
    "embedded": Engine(_embedded_client, _embedded_command),
    "vllm": _with_agent("vllm"),
    "sglang": _with_agent("sglang"),
}


def find_engine(name: str) -> Engine:
    """Raises UserError where there is no such engine."""
    if name not in ENGINES:
        raise UserError(f"inference.backend = {name!r}: there are {', '.join(ENGINES)}")
    return ENGINES[name]
