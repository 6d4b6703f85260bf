"""The keys of JobConfig and their types: what is allowed, said in words, and which known name is nearest."""

from __future__ import annotations

import difflib
import json
import re
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal

from torchtitan.config.job_config import JobConfig


@dataclass(frozen=True)
class Problem:
    """One mistake: the key it is about (`table.key`, or empty) and the message."""

    key: str
    text: str

    def follows_from(self, keys: Iterable[str]) -> bool:
        """Whether it is about one of these keys or compares with it: where their values are wrong, it says nothing."""
        return self.key in keys or any(re.search(rf"\b{re.escape(key)}\b", self.text) for key in keys if key)


@cache
def table_types() -> dict[str, type]:
    """TOML table -> its dataclass."""
    return dict(typing.get_type_hints(JobConfig))


@cache
def key_types() -> dict[str, Any]:
    """`table.key` -> its annotated type, in the order of the dataclasses."""
    found: dict[str, Any] = {}
    for table, cls in table_types().items():
        assert is_dataclass(cls)
        hints = typing.get_type_hints(cls)
        found.update({f"{table}.{item.name}": hints[item.name] for item in fields(cls)})
    return found


def nearest(name: str, known: Iterable[str]) -> str:
    """` (nearest: …)` with the known name most like `name`, or an empty string where none is alike."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (nearest: {close[0]})" if close else ""


def nearest_key(name: str) -> str:
    """Like `nearest` for a whole key `table.key`: a like key of its table, else the same key in another table."""
    table, _, key = name.rpartition(".")
    inside = {known.rpartition(".")[2]: known for known in key_types() if known.startswith(f"{table}.")}
    close = difflib.get_close_matches(key, list(inside), n=1, cutoff=0.75)
    if close:
        return f" (nearest: {inside[close[0]]})"
    elsewhere = [known for known in key_types() if known.rpartition(".")[2] == key]
    if elsewhere:
        return nearest(name, elsewhere) or f" (nearest: {elsewhere[0]})"
    return nearest(name, key_types())


def describe_type(kind: Any) -> str:
    """What values a key of this type takes, in words."""
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) is list:
        return f"a list, each element {describe_type(typing.get_args(kind)[0])}"
    if typing.get_origin(kind) is dict:
        return "a table of options, each a string, a number, true, false, a list or a table of these"
    words = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    return words[kind]


def short_type(kind: Any) -> str:
    """The type as a reference table shows it."""
    if typing.get_origin(kind) is Literal:
        return " \\| ".join(f"`{choice}`" for choice in typing.get_args(kind))
    if typing.get_origin(kind) is dict:
        return "table"
    if isinstance(kind, types.GenericAlias):
        return f"list of {short_type(typing.get_args(kind)[0])}"
    return {bool: "boolean", int: "integer", float: "number", str: "string"}[kind]


def convert(value: Any, kind: Any) -> tuple[Any, bool]:
    """A TOML value as the key's type, and whether it fits. Integers pass for numbers; nothing else is converted."""
    if typing.get_origin(kind) is Literal:
        return value, value in typing.get_args(kind)
    if typing.get_origin(kind) is list:
        if not isinstance(value, list):
            return value, False
        converted = [convert(element, typing.get_args(kind)[0]) for element in value]
        return [element for element, _ in converted], all(fits for _, fits in converted)
    if typing.get_origin(kind) is dict:
        return value, isinstance(value, dict) and is_free(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value), True
    # bool is a subclass of int, and `steps = true` is a mistake.
    return value, type(value) is kind


def is_free(value: Any) -> bool:
    """Whether a free table may hold this: strings, numbers, booleans, lists and tables of them (TOML has dates too)."""
    if isinstance(value, dict):
        return all(map(is_free, value.values()))
    if isinstance(value, list):
        return all(map(is_free, value))
    return isinstance(value, (str, int, float))


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
    for table in fields(config):
        section = getattr(config, table.name)
        lines.append(f"[{table.name}]")
        values = {key.name: getattr(section, key.name) for key in fields(section)}
        # What follows a table's own table would belong to that.
        inner = {name: value for name, value in values.items() if isinstance(value, dict)}
        lines += [f"{name} = {show(value)}" for name, value in values.items() if name not in inner]
        for name, value in inner.items():
            lines += ["", f"[{table.name}.{name}]"]
            lines += [f"{show_key(key)} = {show(item)}" for key, item in value.items()]
        lines.append("")
    return "\n".join(lines)
