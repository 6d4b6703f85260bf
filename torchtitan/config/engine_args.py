"""[inference.engine_args]: options of vllm or sglang that pass through, from TOML or the command line to theirs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from torchtitan.config.toml import show

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


def wrong_options(engine_args: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with names: given twice, ours, or none that an option can have."""
    seen: dict[str, str] = {}
    for name, value in engine_args.items():
        option = option_name(name)
        text = f"{name} = {show(value)} is not allowed:"
        if not option.strip("-.") or option.startswith("-") or any(map(str.isspace, option)) or "=" in option:
            yield f"{text} an option's name without its hyphens, such as max-model-len"
        elif option in OURS:
            yield f"{text} the run says it by {OURS[option]}"
        elif option in seen:
            yield f"{text} it is the same option as {seen[option]}"
        seen[option] = name
