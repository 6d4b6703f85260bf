"""[[source]]: the tasks of a run, each with prompts, environment and rewards of its own, and a share of every batch.

A configuration without such tables has one source, which is what [rollout], [rewards] and [environment] say; what a
source does not give, it has from there.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic.dataclasses import dataclass

from torchtitan.config.values import TABLE, Column, Count, Must, Options, PathText, Positive, ShareBelowOne, Weights

SourceName = Annotated[
    str, Must(re.compile(r"[\w.+-]+").fullmatch, "must be made of letters, digits, `_`, `.`, `+` and `-`")
]


@dataclass(config=TABLE)
class Task:
    """What a source and an evaluation set both have."""

    name: SourceName
    """Its name in metrics (of a set eval/NAME/pass@1), completions and messages"""

    prompt_column: Column | None = None
    """As rollout.prompt_column"""

    chat_template: bool | None = None
    """As rollout.chat_template"""

    system_prompt: str | None = None
    """As rollout.system_prompt"""

    max_completion_tokens: Count | None = None
    """As rollout.max_completion_tokens"""

    stop_token_ids: list[int] | None = None
    """As rollout.stop_token_ids"""

    answer_column: Column | None = None
    """As rewards.answer_column"""

    environment: Options | None = None
    """Keys of [environment], such as {factory = "package.module:Class", max_turns = 6}"""

    rewards: list[str] | None = None
    """As rewards.functions"""


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

    dataset: PathText | None = None
    """As rollout.dataset"""

    dataset_split: str | None = None
    """As rollout.dataset_split"""

    held_out_fraction: ShareBelowOne | None = None
    """As rollout.held_out_fraction"""

    eval_dataset: PathText | None = None
    """As eval.dataset"""

    eval_dataset_split: str | None = None
    """As eval.dataset_split"""

    reward_weights: Weights | None = None
    """As rewards.weights; where only rewards are given, each counts 1"""

    teacher: PathText | None = None
    """As distill.teacher; sources with the same one share it, and with add_rewards a source may have none (empty)"""

    teacher_url: str | None = None
    """As distill.teacher_url; without one, a source that has a teacher of its own has it in the trainer's ranks"""

    hint_column: str | None = None
    """As distill.hint_column"""

    hint_template: str | None = None
    """As distill.hint_template"""

    group_filter: str | None = None
    """As grpo.group_filter"""

    def given(self) -> dict[str, Any]:
        """What the source sets, as its table in TOML has it."""
        return {name: value for name, value in vars(self).items() if value is not None}


IN_TABLE = {
    "rewards": "rewards.functions",
    "reward_weights": "rewards.weights",
    "answer_column": "rewards.answer_column",
    "teacher": "distill.teacher",
    "teacher_url": "distill.teacher_url",
    "hint_column": "distill.hint_column",
    "hint_template": "distill.hint_template",
    "group_filter": "grpo.group_filter",
    "eval_dataset": "eval.dataset",
    "eval_dataset_split": "eval.dataset_split",
    **{
        key: f"rollout.{key}"
        for key in (
            "dataset", "dataset_split", "prompt_column", "chat_template", "system_prompt", "held_out_fraction",
            "max_completion_tokens", "stop_token_ids",
        )
    },
}  # fmt: skip
"""A key of a source -> the key whose place its value takes"""


def fields_of(kind: type) -> dict[str, Any]:
    """Key of a table, [[source]] or [[eval.set]], as its class has them -> its type, rules and default."""
    fields: dict[str, Any] = getattr(kind, "__pydantic_fields__")  # noqa: B009
    return fields
