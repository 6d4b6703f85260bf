"""What is known of each engine (inference.backend, inference.mode) before anything of it is imported.

It is the file engine.toml in the engine's folder, torchtitan/inference/engines/NAME: plain data, with which
configurations are read, checked and planned, without torch. What an engine does is in the descriptor.py beside it. To
add an engine, see docs/adding_an_engine.md.
"""

from __future__ import annotations

from dataclasses import field
from functools import cache
from pathlib import Path

from pydantic import ValidationError
from pydantic.dataclasses import dataclass

from torchtitan.config.values import TABLE, read_toml

FOLDER = Path(__file__).resolve().parent.parent / "inference" / "engines"
FILE = "engine.toml"


@dataclass(config=TABLE, frozen=True)
class EngineSpec:
    """One engine."""

    name: str
    """That of its folder"""
    backend: str
    """The value of inference.backend that chooses it"""
    about: str
    """What it is, for the reference of the configuration"""
    mode: str = "server"
    """The value of inference.mode that chooses it"""
    in_ranks: bool = False
    """Whether it runs in the trainer's own processes: then it has no actors"""
    on_gpus: bool = False
    """Whether it computes on GPUs, where there are any"""
    stages_on_device: bool = False
    """Whether it receives versions in the memory of its GPU, where one device has the whole model"""
    digests: bool = False
    """Whether it proves by itself, unless told otherwise, that its weights are those that were sent"""
    eager_options: list[str] = field(default_factory=list)
    """Options of its own ([inference.engine_args]) with which it captures no graphs on a GPU, for the plan's memory"""
    teaches: bool = False
    """Whether a server of it can be a teacher (distill.teacher_backend)"""


@cache
def engine_specs() -> dict[str, EngineSpec]:
    """Return all engines by the names of their folders. Raises ValueError for a file that says nothing of use."""
    return {path.parent.name: _read(path) for path in sorted(FOLDER.glob(f"*/{FILE}"))}


def _read(path: Path) -> EngineSpec:
    values, mistake = read_toml(str(path))
    if mistake:
        raise ValueError(f"{path} {mistake}")
    try:
        return EngineSpec(**{"name": path.parent.name, **values})
    except ValidationError as error:
        raise ValueError(f"{path} does not describe an engine: {error}") from error


def backends(*, teaching: bool = False) -> tuple[str, ...]:
    """Return the values that inference.backend may have. teaching: those of distill.teacher_backend."""
    found = [spec.backend for spec in engine_specs().values() if spec.teaches or not teaching]
    return tuple(sorted(set(found)))


def modes() -> tuple[str, ...]:
    """Return the values that inference.mode may have; the first is the default."""
    others = {spec.mode for spec in engine_specs().values()} - {EngineSpec.mode}
    return (EngineSpec.mode, *sorted(others))


def find_spec(backend: str, mode: str = EngineSpec.mode) -> EngineSpec | None:
    """Return the engine of this backend and mode, or None where there is none."""
    for spec in engine_specs().values():
        if (spec.backend, spec.mode) == (backend, mode):
            return spec
    return None


def backends_meaning() -> str:
    """Return what inference.backend is, for the reference of the configuration."""
    return f"Engine that samples: {_about(EngineSpec.mode)}; see docs/engines.md"


def modes_meaning() -> str:
    """Return what inference.mode is, for the reference of the configuration."""
    others = [f"{mode}: {_about(mode)}" for mode in modes()[1:]]
    return "; or ".join(["Actors are separate processes (server)", *others])


def _about(mode: str) -> str:
    found = [spec for spec in engine_specs().values() if spec.mode == mode]
    return ", ".join(f"{spec.backend} ({spec.about})" for spec in sorted(found, key=lambda spec: spec.backend))
