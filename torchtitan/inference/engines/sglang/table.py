"""[inference.sglang]."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from torchtitan.config.engine_tables import ServedOptions
from torchtitan.config.values import TABLE


@dataclass(config=TABLE)
class Table(ServedOptions):
    """What SGLang's servers have."""
