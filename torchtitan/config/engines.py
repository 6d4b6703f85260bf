"""What is known of each engine (inference.backend) before it runs.

It is in the engine's folder, torchtitan/inference/engines/NAME: the file engine.toml, plain data, and the table
[inference.NAME] in table.py, if it has keys of its own. Configurations are read, checked and planned with these,
without torch. What an engine does is in the descriptor.py beside them. To add an engine, see docs/adding_an_engine.md.
"""

from __future__ import annotations

import importlib
from dataclasses import field
from functools import cache
from pathlib import Path

from pydantic import ValidationError
from pydantic.dataclasses import dataclass

from torchtitan.config.engine_tables import EngineTable
from torchtitan.config.values import TABLE, read_toml

FOLDER = Path(__file__).resolve().parent.parent / "inference" / "engines"
PACKAGE = "torchtitan.inference.engines"
FILE, TABLE_FILE = "engine.toml", "table.py"


@dataclass(config=TABLE, frozen=True)
class EngineSpec:
    """One engine."""

    name: str
    """That of its folder, and the value of inference.backend that chooses it"""
    about: str
    """What it is, for the reference of the configuration"""
    in_ranks: bool = False
    """Whether it runs in the trainer's own processes: then it has no actors"""
    on_gpus: bool = False
    """Whether it computes on GPUs, where there are any"""
    stages_on_device: bool = False
    """Whether it receives versions in the memory of its GPU, where one device has the whole model"""
    digests: bool = False
    """Whether it proves by itself, unless told otherwise, that its weights are those that were sent"""
    eager_options: list[str] = field(default_factory=list)
    """Options of its own ([inference.NAME.args]) with which it captures no graphs on a GPU, for the plan's memory"""
    teaches: bool = False
    """Whether a server of it can be a teacher (distill.server.backend)"""


@cache
def engine_specs() -> dict[str, EngineSpec]:
    """Return all engines by their names. Raises ValueError for a file that says nothing of use."""
    return {path.parent.name: _read(path) for path in sorted(FOLDER.glob(f"*/{FILE}"))}


def _read(path: Path) -> EngineSpec:
    values, mistake = read_toml(str(path))
    if mistake:
        raise ValueError(f"{path} {mistake}")
    try:
        return EngineSpec(**{"name": path.parent.name, **values})
    except ValidationError as error:
        raise ValueError(f"{path} does not describe an engine: {error}") from error


def engine_tables() -> dict[str, type[EngineTable]]:
    """Return the tables of all engines that have keys of their own, by the engines' names."""
    found = [name for name in engine_specs() if (FOLDER / name / TABLE_FILE).is_file()]
    return {name: importlib.import_module(f"{PACKAGE}.{name}.table").Table for name in found}


def engine_names(*, teaching: bool = False) -> tuple[str, ...]:
    """Return the values that inference.backend may have. teaching: those that a teacher's server may have."""
    return tuple(name for name, spec in engine_specs().items() if spec.teaches or not teaching)


def engines_meaning() -> str:
    """Return what inference.backend is, for the reference of the configuration."""
    about = ", ".join(f"{spec.name} ({spec.about})" for spec in engine_specs().values())
    return f"Engine that samples: {about}; see docs/engines.md"
