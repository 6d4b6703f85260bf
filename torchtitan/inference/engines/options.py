"""Options of an engine's own ([inference.NAME.args]) that pass through: which of them may be given, and the words
that they become."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan.config.values import option_name, show

# Options that a run gives the engine itself, and where to say it instead. Two values of one option would be a riddle.
OWN_OPTIONS = {
    "model": "model.hf_assets_path",
    "model-path": "model.hf_assets_path",
    "host": "the loopback",
    "port": "a free port",
    "dtype": "inference.dtype",
    "tensor-parallel-size": "tensor_parallel_size of the engine's table",
    "tp-size": "tensor_parallel_size of the engine's table",
    "tp": "tensor_parallel_size of the engine's table",
    "api-key": "a generated token",
}

# A word that is an option, and no negative number.
OPTION = re.compile(r"--?[A-Za-z]")


def engine_words(engine_args: Mapping[str, Any]) -> list[str]:
    """The words that an engine is started with: true is the option alone, false leaves it out, a table is JSON."""
    words: list[str] = []
    for key, value in engine_args.items():
        if value is False:
            continue
        words.append(f"--{option_name(key)}")
        if value is not True:
            items = value if isinstance(value, list) else [value]
            words += [_word(item) for item in items]
    return words


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def wrong_options(engine_args: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with names: given twice, ours, or none that an option can have."""
    seen: dict[str, str] = {}
    for name, value in engine_args.items():
        option = option_name(name)
        text = f"{name} = {show(value)} is not allowed:"
        if not option.strip("-.") or option.startswith("-") or any(map(str.isspace, option)) or "=" in option:
            yield f"{text} it must be an option's name without its hyphens, such as max-model-len"
        elif option in OWN_OPTIONS:
            yield f"{text} the run sets it itself ({OWN_OPTIONS[option]})"
        elif option in seen:
            yield f"{text} it is the same option as {seen[option]}"
        seen[option] = name


@dataclass(frozen=True)
class Option:
    """An option on a command line."""

    name: str
    """Without hyphens in front, and with hyphens for underscores up to a dot; empty for words before any option"""
    value: str | None
    """What stands behind it, or behind its `=`; None for nothing"""
    words: tuple[str, ...]
    """As they are on the command line"""


def read_options(words: Sequence[str]) -> list[Option]:
    """Return the options of a command line, in their order."""
    groups: list[list[str]] = []
    for word in words:
        if OPTION.match(word) or not groups:
            groups.append([])
        groups[-1].append(word)
    return [_read_option(tuple(group)) for group in groups]


def _read_option(words: tuple[str, ...]) -> Option:
    first, *rest = words
    if not OPTION.match(first):
        return Option("", first, words)
    name, equals, behind = first.lstrip("-").partition("=")
    head, dot, tail = name.partition(".")
    value = rest[0] if rest else None
    if equals:
        value = behind
    return Option(f"{head.replace('_', '-')}{dot}{tail}", value, words)


def merge_objects(words: Sequence[str], name: str, ours: Mapping[str, Any]) -> list[str]:
    """Return a user's command line with our keys in the JSON object of the option `name`, of which an engine takes one.
    Of a key that is in both the user's value counts. What is no object stays as it is, for the engine to refuse."""
    options = read_options(words)
    given = [option for option in options if option.name.partition(".")[0] == name]
    overrides = dict(ours)
    for option in given:
        key = option.name.partition(".")[2]
        try:
            value = json.loads(option.value or "")
        except ValueError:
            value = option.value
        if not key and not isinstance(value, dict):
            return [*words]
        _override(overrides, key.split(".") if key else [], value)
    if not given:
        return [*words]
    rest = [word for option in options if option not in given for word in option.words]
    return [*rest, f"--{name}", json.dumps(overrides)]


def _override(overrides: dict[str, Any], path: list[str], value: Any) -> None:
    """Set what lies at a path of keys, of which none means all."""
    if not path:
        overrides.update(value)
        return
    *folders, last = path
    for folder in folders:
        inner = overrides.get(folder)
        overrides[folder] = dict(inner) if isinstance(inner, dict) else {}
        overrides = overrides[folder]
    overrides[last] = value
