"""[[source]]: the tasks of a run, each with prompts, environment and rewards of its own, and a share of every batch.

A source is a part of a configuration: besides its name and its share it has keys of other tables, written as they are
there (`rollout.dataset = "guess"`), and everything else from the tables. A configuration without such tables has one
source, which is what the tables say. Evaluation sets are made alike (evaluations.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Annotated, Any

from pydantic.dataclasses import dataclass

from torchtitan.config.values import TABLE, Must, Positive

SourceName = Annotated[
    str, Must(re.compile(r"[\w.+-]+").fullmatch, "must be made of letters, digits, `_`, `.`, `+` and `-`")
]
OF_PROMPTS = (
    "rollout.prompt_column", "rollout.chat_template", "rollout.system_prompt", "rollout.max_completion_tokens",
    "rollout.stop_token_ids", "rewards.answer_column", "environment",
)  # fmt: skip
"""Keys, and tables with all of their keys, that sources and evaluation sets may have"""


@dataclass(config=TABLE)
class Task:
    """What a source and an evaluation set both have."""

    name: SourceName
    """Its name in metrics (of a set eval/NAME/pass@1), completions and messages"""

    values: dict[str, Any] = field(default_factory=dict)

    def given(self) -> dict[str, Any]:
        """Return what the table sets: its own keys, and `table.key` of others."""
        fields = {key: value for key, value in vars(self).items() if key != "values" and value not in (None, "")}
        return fields | self.values


@dataclass(config=TABLE)
class Source(Task):
    weight: Positive | None = None
    """Its share of every batch is this in relation to the weights of the other sources; 1 if nothing is given"""

    epochs: Positive | None = None
    """In place of weight, in all sources: its share is this times the number of its training rows, so that sources of
    equal epochs pass through their rows equally fast"""

    required: bool = True
    """Whether the run ends if the source gives no groups any more, because its environment or its rewards have failed
    for good; false: the run goes on, and the share goes to the other sources"""


SOURCE_KEYS = (
    *OF_PROMPTS, "rollout.dataset", "rollout.held_out_fraction", "rewards.functions",
    "rewards.weights", "eval.dataset", "distill.teacher", "distill.server",
    "distill.hint", "distill.hint_template", "grpo.group_filter",
)  # fmt: skip
"""Keys of other tables, and whole tables, that a source may have"""


def is_among(name: str, keys: tuple[str, ...]) -> bool:
    """Return whether `table.key` is one of these keys, or of one of these tables."""
    return any(name == key or name.startswith(f"{key}.") for key in keys)


def flat(content: Mapping[str, Any], tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of a table with tables inside of it, each by its whole name. tables: the names that are tables."""
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and (name in tables):
            yield from flat(value, tables, f"{name}.")
        else:
            yield name, list(value) if isinstance(value, tuple) else value


def fields_of(kind: type) -> dict[str, Any]:
    """Key of a table, as its class has them -> its type, rules and default."""
    fields: dict[str, Any] = getattr(kind, "__pydantic_fields__")  # noqa: B009
    return {key: info for key, info in fields.items() if not (issubclass(kind, Task) and key == "values")}
