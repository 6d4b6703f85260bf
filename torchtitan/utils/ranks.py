"""Which rank this process is, and of how many, as torchrun (run_grpo.sh) set it. No torch here."""

from __future__ import annotations

import os

from torchtitan.errors import ConfigError


def from_torchrun(name: str, default: str = "", least: int = 0) -> int:
    """A number that torchrun sets for every rank; without torchrun `default`. Raises ConfigError."""
    text = os.environ.get(name, default)
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise ConfigError(
            [f"{name}={text!r} in the environment must be a number from {least} on, which torchrun (run_grpo.sh) sets"]
        )
    return int(text)


def world_size() -> int:
    """Ranks of this job: torchrun's WORLD_SIZE, or 1. Raises ConfigError."""
    return from_torchrun("WORLD_SIZE", "1", least=1)


def rank() -> int:
    """This process's rank, as torchrun set it; 0 without torchrun. Raises ConfigError."""
    number = from_torchrun("RANK", "0")
    if number >= world_size():
        raise ConfigError([f"RANK={number} in the environment: there are only WORLD_SIZE = {world_size()} ranks"])
    return number


def local_rank() -> int:
    """This process's rank on its machine; 0 without torchrun."""
    return from_torchrun("LOCAL_RANK", "0")


def local_world_size() -> int:
    """Number of ranks on this machine; 1 without torchrun."""
    return from_torchrun("LOCAL_WORLD_SIZE", "1", least=1)
