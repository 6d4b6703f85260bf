"""From a command line, or from Python's values, to the validated configuration of a job."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from typing import Any

from torchtitan.config.derived import expand_servers, world_size
from torchtitan.config.job_config import JobConfig, table_types
from torchtitan.config.reading import Draft, read_command_line
from torchtitan.errors import ConfigError, UserError
from torchtitan.models.shape import is_missing_debug_checkpoint, newest_export
from torchtitan.preflight.validate import validate
from torchtitan.utils.child_process import child_environment

Config = str | PathLike[str] | Mapping[str, Any] | JobConfig
"""A TOML file, its tables, or a configuration"""
MAKING_TIMEOUT_S = 600.0


def load_config(argv: Sequence[str]) -> JobConfig:
    """The validated configuration of a command line such as ["--job.config_file", "x.toml", "--training.steps", "3"].

    A dry run only plans: with model.flavor, or before the debug checkpoint was made, it needs no checkpoint files.
    --help prints every key and exits with code 0.

    Raises:
        ConfigError: with all problems of the file, the command line and the values together.
    """
    return validated(*read_command_line(argv))


def draft_of(config: Config, overrides: Mapping[str, Any]) -> Draft:
    """The draft of what Python gives; `overrides` are values by `table.key`."""
    draft = Draft()
    if isinstance(config, JobConfig):
        # Not asdict: an attribute that is no key is a slip of the pen, to be refused like any other.
        sections = {table: getattr(config, table) for table in table_types()}
        draft.add({table: getattr(section, "__dict__", section) for table, section in sections.items()}, "config")
    elif isinstance(config, Mapping):
        draft.add(config, "config")
    else:
        draft.add_file(fspath(config))
    for name, value in overrides.items():
        draft.set(name, value, "overrides")
    return draft


def validated(draft: Draft, planning: bool = False) -> JobConfig:
    """The configuration that the draft makes. `planning`: nothing will be started, and files may be missing.

    Raises:
        ConfigError: with all problems together.
    """
    config, problems = draft.build()
    config.inference.servers = expand_servers(config.inference.servers)
    config.model.hf_assets_path = newest_export(config.model.hf_assets_path)
    config.distill.teacher = newest_export(config.distill.teacher)
    if draft.is_complete:
        # A key that was just reported holds its default now.
        problems += validate(config, planning, frozenset(problem.key for problem in problems))
    if problems:
        raise ConfigError([problem.text for problem in problems])
    return config


def ready(draft: Draft) -> JobConfig:
    """The configuration of a run that starts now; makes the debug checkpoint where that is named and missing.

    Raises:
        UserError: as `validated`, or the debug checkpoint could not be made.
    """
    config, _ = draft.build()
    # Several ranks would make it several times: for those run_grpo.sh does it before they start.
    if is_missing_debug_checkpoint(config) and world_size() == 1:
        validated(draft, planning=True)
        path = config.model.hf_assets_path
        print(f"making the debug checkpoint {path}", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "torchtitan.preflight.debug_checkpoint", "--output", path]
        try:
            subprocess.run(
                command, env=child_environment(1), timeout=MAKING_TIMEOUT_S, check=True, capture_output=True, text=True
            )
        except subprocess.SubprocessError as error:
            said = str(getattr(error, "stderr", "") or error)[-2000:]
            raise UserError(f"the debug checkpoint {path} could not be made: {said}") from error
    return validated(draft)
