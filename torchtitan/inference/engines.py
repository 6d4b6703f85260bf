"""The engines that can sample, by the name that inference.backend gives them; each is imported when it is needed."""

from __future__ import annotations

import importlib
from pathlib import Path

from torchtitan.config.job_config import JobConfig
from torchtitan.inference.actor_client import ActorClient


def make_client(backend: str, url: str, token: str) -> ActorClient:
    """A client of the actor at `url`."""
    if backend == "embedded":
        from torchtitan.inference.embedded.client import EmbeddedClient

        return EmbeddedClient(url, token)
    from torchtitan.inference.agent.client import AgentClient

    return AgentClient(importlib.import_module(f"torchtitan.inference.{backend}.dialect").DIALECT, url, token)


def actor_command(config: JobConfig, port_file: Path, number: int = 0) -> list[str]:
    """The command line of started actor `number` (from 0), which reports its port in `port_file` and serves nothing
    before it got its first weights version. Raises UserError where it cannot be started here."""
    backend = config.inference.backend
    if backend == "embedded":
        from torchtitan.inference.embedded.command import embedded_command

        return embedded_command(config, port_file, number)
    from torchtitan.inference.agent.command import agent_command

    return agent_command(backend, config, port_file, number)
