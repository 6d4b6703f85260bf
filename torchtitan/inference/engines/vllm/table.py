"""[inference.vllm]."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from torchtitan.config.engine_tables import ServedOptions
from torchtitan.config.values import TABLE


@dataclass(config=TABLE)
class Table(ServedOptions):
    """What vLLM's servers have."""

    route: Literal["auto", "direct", "agent"] = "auto"
    """How the server gets weights: from our code inside the engine (direct), or from an agent beside it that hands over
    whole verified versions (agent); auto is direct"""
