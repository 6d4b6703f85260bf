"""TOML: a file read with its mistakes as text, and a configuration written so that it reads back the same."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchtitan.config.job_config import JobConfig
from torchtitan.config.values import is_free
from torchtitan.utils.loading import nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SHIPPED = Path(__file__).resolve().parent.parent / "train_configs"


def read_toml(file: str) -> tuple[dict[str, Any], str]:
    """The tables of a file, or none and what is wrong with the file."""
    path = Path(os.path.expanduser(file))
    try:
        if str(path.parent) in (".", "train_configs") and not path.exists():
            # One of those that come with the package, by its name.
            shipped = SHIPPED / f"{path.name.removesuffix('.toml')}.toml"
            path = shipped if shipped.is_file() else path
        with path.open("rb") as stream:
            return tomllib.load(stream), ""
    except FileNotFoundError:
        text = f"does not exist (looked in {Path.cwd()})"
        if path.parent.is_dir():
            text += nearest(path.name, [other.name for other in path.parent.glob("*.toml")])
    except OSError as error:
        text = f"cannot be read: {error.strerror}"
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        text = f"is not valid TOML: {error}"
    return {}, text


def value_of_words(words: list[str]) -> Any:
    """What the words behind an option of an engine mean: none is true, several are a list; TOML values or else text."""
    if not words:
        return True
    values = [_value(word) for word in words]
    return values[0] if len(values) == 1 else values


def _value(word: str) -> Any:
    try:
        tables = tomllib.loads(f"value = {word}")
    except tomllib.TOMLDecodeError:
        return word
    # More than one key: the word had a line break in it.
    return tables["value"] if len(tables) == 1 and is_free(tables) else word


def show(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{show_key(name)} = {show(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(show, value)) + "]"
    if isinstance(value, float):
        return repr(value)  # 1e-06, 0.5, inf and nan are TOML as they are
    # JSON's strings, numbers and booleans are TOML's, but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007F")


def show_key(name: str) -> str:
    """A key as TOML writes it: quoted where it must be."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else show(name)


def config_to_toml(config: JobConfig) -> str:
    """The whole configuration as TOML that loads to the same configuration."""
    lines: list[str] = []
    for table, values in asdict(config).items():
        lines.append(f"[{table}]")
        # What follows a table's own table would belong to that.
        inner = {name: value for name, value in values.items() if isinstance(value, dict)}
        lines += [f"{name} = {show(value)}" for name, value in values.items() if name not in inner]
        for name, value in inner.items():
            lines += ["", f"[{table}.{name}]"]
            lines += [f"{show_key(key)} = {show(item)}" for key, item in value.items()]
        lines.append("")
    return "\n".join(lines)
