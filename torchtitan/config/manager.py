"""TOML file + command line -> JobConfig. Every problem that can be found is reported in one ConfigError."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan.config.engine_args import PREFIX, option_name, value_of_words
from torchtitan.config.fields import (
    Problem,
    convert,
    describe_type,
    key_types,
    nearest,
    nearest_key,
    show,
    table_types,
)
from torchtitan.config.job_config import JobConfig

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


# Everybody takes these values as they are, so `~` is resolved once, here.
PATHS = (
    "job.dump_folder", "model.hf_assets_path", "checkpoint.resume", "rollout.dataset", "rollout.replay", "eval.dataset",
    "inference.engine_python",
)  # fmt: skip


def expand_user(config: JobConfig) -> None:
    """Replace a leading `~` of PATHS by the home folder; `~nobody` stays, and is refused as a missing folder."""
    for name in PATHS:
        table, _, key = name.partition(".")
        section = getattr(config, table)
        setattr(section, key, os.path.expanduser(getattr(section, key)))


@dataclass
class CommandLine:
    """A command line taken apart, its keys checked; the values are still text."""

    overrides: list[tuple[str, list[str]]] = field(default_factory=list)
    """(`table.key`, values) in the order given"""
    dry_run: bool = False
    problems: list[Problem] = field(default_factory=list)

    @property
    def config_file(self) -> str:
        """The last --job.config_file, or an empty string."""
        files = [values[0] for key, values in self.overrides if key == "job.config_file" and len(values) == 1]
        return files[-1] if files else ""


def split_command_line(argv: Sequence[str]) -> CommandLine:
    """Take `--table.key value…`, `--table.key=value`, `--table.flag`, `--table.no-flag` and `--dry-run` apart."""
    command = CommandLine()
    current: list[str] | None = None
    for token in argv:
        if token in ("-h", "--help"):
            _parse_with_tyro(JobConfig(), ["--help"])
        if not token.startswith("--"):
            if current is None:
                command.problems.append(Problem("", f"command line: {token!r} belongs to no --table.key"))
            else:
                current.append(token)
            continue
        name, equals, inline = token[2:].partition("=")
        current = [inline] if equals else []
        if name.replace("-", "_").startswith(PREFIX):
            command.overrides.append((PREFIX + option_name(name[len(PREFIX) :]), current))
            continue
        name = name.replace("-", "_")
        if name == "dry_run" and not equals:
            command.dry_run, current = True, None
            continue
        table, _, key = name.rpartition(".")
        switched_off = f"{table}.{key.removeprefix('no_')}"
        if name not in key_types() and key.startswith("no_") and key_types().get(switched_off) is bool and not equals:
            command.overrides.append((switched_off, ["false"]))
            current = None
        elif name == PREFIX[:-1]:
            text = f"command line: --{name} needs the name of an option, such as --{PREFIX}max-model-len 1024"
            command.problems.append(Problem(name, text))
        elif name not in key_types():
            known = nearest_key(name) if "." in name else nearest(name, ["dry_run", "help", *key_types()])
            command.problems.append(Problem(name, f"command line: --{name} is not a known key{known}"))
        else:
            command.overrides.append((name, current))
    return command


def read_config(command: CommandLine) -> tuple[JobConfig, list[Problem], bool]:
    """The configuration with defaults for what is wrong, the problems, and whether all of the file could be read."""
    config = JobConfig()
    problems = list(command.problems)
    complete = True
    if command.config_file:
        tables, problem = _read_toml(command.config_file)
        if problem is not None:
            problems.insert(0, problem)
            complete = False
        problems += apply_tables(config, tables, command.config_file)
    return _apply_overrides(config, command.overrides, problems), problems, complete


def _read_toml(file: str) -> tuple[dict[str, Any], Problem | None]:
    path = Path(os.path.expanduser(file))
    try:
        with path.open("rb") as stream:
            return tomllib.load(stream), None
    except FileNotFoundError:
        text = f"does not exist (looked in {Path.cwd()})"
        if path.parent.is_dir():
            text += nearest(path.name, [other.name for other in path.parent.glob("*.toml")])
    except OSError as error:
        text = f"cannot be read: {error.strerror}"
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        text = f"is not valid TOML: {error}"
    return {}, Problem("job.config_file", f"job.config_file = {show(file)} {text}")


def apply_tables(config: JobConfig, tables: dict[str, Any], file: str) -> list[Problem]:
    """Write the values of a TOML document into `config`; what does not fit is left out and reported."""
    problems: list[Problem] = []
    for table, content in tables.items():
        if table not in table_types():
            what = "table" if isinstance(content, dict) else "key outside a table,"
            problems.append(Problem(table, f"{file}: unknown {what} [{table}]{nearest(table, table_types())}"))
            continue
        if not isinstance(content, dict):
            problems.append(Problem(table, f"{file}: {table} = {show(content)} must be a table: [{table}]"))
            continue
        for key, value in content.items():
            name = f"{table}.{key}"
            kind = key_types().get(name)
            if kind is None:
                problems.append(Problem(name, f"{file}: unknown key {name} = {show(value)}{nearest_key(name)}"))
                continue
            converted, fits = convert(value, kind)
            if fits:
                setattr(getattr(config, table), key, converted)
            else:
                problems.append(wrong_value(name, show(value), file))
    return problems


def wrong_value(name: str, shown: str, place: str) -> Problem:
    """The problem of a value that its key's type does not allow."""
    kind = key_types()[name]
    text = f"{place}: {name} = {shown} is not allowed: {name} takes {describe_type(kind)}"
    choices = getattr(kind, "__args__", ())
    return Problem(name, text + nearest(shown.strip('"'), [choice for choice in choices if isinstance(choice, str)]))


def _apply_overrides(config: JobConfig, overrides: list[tuple[str, list[str]]], problems: list[Problem]) -> JobConfig:
    """The configuration with the overrides on top; appends to `problems` those that do not fit."""
    # Free tables are not for tyro, which wants to know all keys.
    engine_args = {option_name(key): value for key, value in config.inference.engine_args.items()}
    if len(engine_args) < len(config.inference.engine_args):
        engine_args = dict(config.inference.engine_args)  # one option twice, which validation reports
    engine_args |= {name[len(PREFIX) :]: value_of_words(words) for name, words in overrides if name.startswith(PREFIX)}
    config.inference.engine_args = {}
    config = _apply_typed(config, [one for one in overrides if not one[0].startswith(PREFIX)], problems)
    config.inference.engine_args = engine_args
    return config


def _apply_typed(config: JobConfig, overrides: list[tuple[str, list[str]]], problems: list[Problem]) -> JobConfig:
    arguments = [(name, _tyro_arguments(name, values)) for name, values in overrides]
    try:
        return _parse_with_tyro(config, [word for _, words in arguments for word in words])
    except ValueError:
        # tyro stops at the first mistake: take them one by one to report all.
        for (name, words), (_, values) in zip(arguments, overrides, strict=True):
            try:
                config = _parse_with_tyro(config, words)
            except ValueError:
                problems.append(wrong_value(name, " ".join(values) or "(no value)", "command line"))
        return config


def _tyro_arguments(name: str, values: list[str]) -> list[str]:
    if key_types()[name] is bool:
        values = [value.capitalize() if value in ("true", "false") else value for value in values] or ["True"]
    # One scalar value goes behind "=", where a leading hyphen is not taken for an option.
    return [f"--{name}={values[0]}"] if len(values) == 1 else [f"--{name}", *values]


def _parse_with_tyro(config: JobConfig, arguments: list[str]) -> JobConfig:
    """`config` with the arguments on top. Raises ValueError where tyro refuses them; --help exits."""
    import tyro

    options = (tyro.conf.FlagConversionOff,)
    if arguments == ["--help"]:
        tyro.cli(JobConfig, default=config, args=arguments, prog="run_grpo.sh", use_underscores=True, config=options)
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            return tyro.cli(JobConfig, default=config, args=arguments, config=options)
    except SystemExit as error:
        raise ValueError(output.getvalue()) from error
