"""[inference.colocated]."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from torchtitan.config.engine_tables import PassedOptions
from torchtitan.config.values import TABLE


@dataclass(config=TABLE)
class Table(PassedOptions):
    """What vLLM in the trainer's processes has."""
