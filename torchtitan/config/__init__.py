"""Configuration: TOML tables and command-line overrides become one validated JobConfig."""

from torchtitan.config.job_config import JobConfig
from torchtitan.config.manager import load_config

__all__ = ["JobConfig", "load_config"]
