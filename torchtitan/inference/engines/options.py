"""Options of an engine's own ([inference.engine_args]) that pass through: which of them may be given, and the words
that they become."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from torchtitan.config.derived import option_name
from torchtitan.config.values import show

# Options that a run gives the engine itself, and where to say it instead. Two values of one option would be a riddle.
OWN_OPTIONS = {
    "model": "model.hf_assets_path",
    "model-path": "model.hf_assets_path",
    "host": "inference.host",
    "port": "a free port of inference.host",
    "dtype": "inference.dtype",
    "tensor-parallel-size": "inference.tensor_parallel_size",
    "tp-size": "inference.tensor_parallel_size",
    "tp": "inference.tensor_parallel_size",
    "api-key": "a generated token",
}


def engine_words(engine_args: Mapping[str, Any]) -> list[str]:
    """The words that an engine is started with: true is the option alone, false leaves it out, a table is JSON."""
    words: list[str] = []
    for key, value in engine_args.items():
        if value is False:
            continue
        words.append(f"--{option_name(key)}")
        if value is not True:
            items = value if isinstance(value, list) else [value]
            words += [item if isinstance(item, str) else json.dumps(item) for item in items]
    return words


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
