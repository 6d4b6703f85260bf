"""From a command line to the validated configuration of a job. Every problem comes in one ConfigError."""

from __future__ import annotations

from collections.abc import Sequence

from torchtitan.config.command_line import CommandLine, split_command_line
from torchtitan.config.draft import Draft
from torchtitan.config.job_config import JobConfig
from torchtitan.config.servers import expand_servers
from torchtitan.errors import ConfigError
from torchtitan.preflight.validate import validate


def load_config(argv: Sequence[str]) -> JobConfig:
    """The validated configuration of a command line such as ["--job.config_file", "x.toml", "--training.steps", "3"].

    Raises:
        ConfigError: with all problems of the file, the command line and the values together.
    """
    return parse_command_line(argv)[0]


def parse_command_line(argv: Sequence[str]) -> tuple[JobConfig, bool]:
    """Like load_config, with whether --dry-run was given. --help prints every key and exits with code 0.

    A dry run only plans: with model.flavor, or before the debug checkpoint was made, it needs no checkpoint files.
    """
    command = split_command_line(argv)
    return load(command, planning=command.dry_run), command.dry_run


def load(command: CommandLine, planning: bool) -> JobConfig:
    """The validated configuration of a command line. Raises ConfigError with all problems together."""
    is_complete = command.fill()
    return finish(command.draft, planning, is_complete)


def finish(draft: Draft, planning: bool = False, is_complete: bool = True) -> JobConfig:
    """The validated configuration; `is_complete`: no file with values is missing, so that combinations can be judged.

    Raises:
        ConfigError: with all problems together.
    """
    config, problems = draft.build()
    config.inference.servers = expand_servers(config.inference.servers)
    if is_complete:
        # A key that was just reported holds its default now.
        problems += validate(config, planning, frozenset(problem.key for problem in problems))
    if problems:
        raise ConfigError([problem.text for problem in problems])
    return config
