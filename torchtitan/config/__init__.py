"""Configuration: TOML tables and command-line overrides become one validated JobConfig."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan.config.job_config import JobConfig
    from torchtitan.config.manager import load_config

__all__ = ["JobConfig", "load_config"]


def __getattr__(name: str) -> Any:
    # Lazy: whoever only needs the tables (a courier process, say) does not pay for reading files and command lines,
    # and `python -m torchtitan.config.job_config` is not imported before it runs.
    if name == "load_config":
        from torchtitan.config.manager import load_config

        return load_config
    if name == "JobConfig":
        from torchtitan.config.job_config import JobConfig

        return JobConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
