"""[inference.embedded]."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from torchtitan.config.engine_tables import EngineTable
from torchtitan.config.values import TABLE


@dataclass(config=TABLE)
class Table(EngineTable):
    """What the embedded engine has."""

    exact: bool = False
    """Rescore each completion with the trainer's own forward (slower): no mismatch if a single version sampled it"""
