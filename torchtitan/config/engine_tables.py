"""The tables of engines: [inference.NAME] holds what only the engine NAME has. It is the class `Table` in the file
table.py of the engine's folder (see engines.py); what several engines have in common is here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from types import MappingProxyType
from typing import Any

from pydantic.dataclasses import dataclass

from torchtitan.config.values import TABLE, Count, EngineOptions, NotNegative, PathText


class EngineTable:
    """What a run asks of the table of any engine. A table has fields for what can be chosen; the rest is as here."""

    args: Mapping[str, Any] = MappingProxyType({})
    python: str = ""
    tensor_parallel_size: int = 1
    memory_gb: float = 0.0
    route: str = "auto"
    exact: bool = False


@dataclass(config=TABLE)
class PassedOptions(EngineTable):
    """The table of an engine that takes options of its own."""

    args: EngineOptions = field(default_factory=dict)
    """Options passed on to the engine: max-model-len = 1024 becomes --max-model-len 1024; true passes the option alone,
    false omits it, a list passes several values, a table is passed as JSON"""

    tensor_parallel_size: Count = 1
    """Devices that share the model of one actor; colocated: neighbouring ranks"""

    memory_gb: NotNegative = 0.0
    """KV cache of one actor, in GiB; 0 derives it from the available memory"""


@dataclass(config=TABLE)
class ServedOptions(PassedOptions):
    """The table of an engine that is a server of its own."""

    python: PathText = ""
    """Python interpreter that runs the engine; empty uses the environment that scripts/install_engine.sh made"""
