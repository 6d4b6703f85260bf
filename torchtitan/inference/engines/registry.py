"""The engines that there are, each a folder beside this file with an engine.toml (see torchtitan/config/engines.py) and
a descriptor.py, whose DESCRIPTOR is the class. An engine is imported when it is first asked for."""

from __future__ import annotations

import importlib
from functools import cache

from torchtitan.config.engines import engine_specs
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.inference.engines.descriptor import EngineDescriptor


@cache
def load_engine(name: str) -> EngineDescriptor:
    """Return the engine in the folder of that name. Raises UserError if there is none."""
    spec = engine_specs().get(name)
    if spec is None:
        raise UserError(f"there is no engine {name!r}: there are {', '.join(engine_specs())}")
    module = importlib.import_module(f"{__package__}.{name}.descriptor")
    descriptor: EngineDescriptor = module.DESCRIPTOR(spec)
    return descriptor


def engine_of(config: JobConfig) -> EngineDescriptor:
    """Return the engine of a configuration."""
    return load_engine(config.inference.backend)


def all_engines() -> list[EngineDescriptor]:
    """Return every engine."""
    return [load_engine(name) for name in engine_specs()]
