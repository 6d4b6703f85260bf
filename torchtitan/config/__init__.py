"""Configuration: TOML tables and command-line overrides become one validated JobConfig."""

from typing import TYPE_CHECKING, Any

from torchtitan.config.job_config import JobConfig

if TYPE_CHECKING:
    from torchtitan.config.manager import load_config

__all__ = ["JobConfig", "load_config"]


def __getattr__(name: str) -> Any:
    # Lazy: whoever only needs the tables (a courier process, say) does not pay for the command-line parser.
    if name == "load_config":
        from torchtitan.config.manager import load_config

        return load_config
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
