"""[inference.engine_args]: options of vllm or sglang that pass through, from TOML or the command line to theirs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchtitan.config.fields import Problem, is_free, show

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREFIX = "inference.engine_args."

# Options that a run gives the engine itself, and where to say it instead. Two values of one option would be a riddle.
OURS = {
    "model": "model.hf_assets_path",
    "model-path": "model.hf_assets_path",
    "host": "inference.host",
    "port": "inference.host, a free port is taken",
    "dtype": "inference.dtype",
    "tensor-parallel-size": "inference.tensor_parallel_size",
    "tp-size": "inference.tensor_parallel_size",
    "tp": "inference.tensor_parallel_size",
    "api-key": "nothing, the run makes up a token",
}


def option_name(key: str) -> str:
    """A key as the engine's option is spelled, without its hyphens: max_model_len and max-model-len are the same."""
    head, dot, rest = key.partition(".")
    return head.replace("_", "-") + dot + rest


def value_of_words(words: Sequence[str]) -> Any:
    """What the words behind a command-line option mean: none is true, several are a list; TOML values or else text."""
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


def command_line(engine_args: Mapping[str, Any]) -> list[str]:
    """The words that an engine is started with: true is the option alone, false leaves it out, a table is JSON."""
    words: list[str] = []
    for key, value in engine_args.items():
        if value is False:
            continue
        words.append(f"--{option_name(key)}")
        if value is not True:
            words += [_word(item) for item in (value if isinstance(value, list) else [value])]
    return words


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def check_engine_args(engine_args: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of names: given twice, ours, or none that an option can have."""
    key = "inference.engine_args"
    seen: dict[str, str] = {}
    for name, value in engine_args.items():
        option = option_name(name)
        text = f"{key}: {name} = {show(value)} is not allowed:"
        if not option.strip("-.") or option.startswith("-") or any(map(str.isspace, option)) or "=" in option:
            yield Problem(key, f"{text} an option's name without its hyphens, such as max-model-len")
        elif option in OURS:
            yield Problem(key, f"{text} the run says it by {OURS[option]}")
        elif option in seen:
            yield Problem(key, f"{text} it is the same option as {seen[option]}")
        seen[option] = name
