"""Text of a dataset that the policy's tokenizer cannot represent: it becomes <unk>, from which nothing is learned; and
tokens of it that the model does not have."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.models.shape.checkpoint_shape import read_shape
from torchtitan.rollout.conversation.tokenizer import Tokenizer
from torchtitan.rollout.data.prompts import PromptMaker
from torchtitan.rollout.rewards import NEEDS_ANSWER

logger = logging.getLogger(__name__)

# Of a dataset's tokens; a rare foreign letter needs no word.
WARN_SHARE = 0.01


def check_unknown_text(rows: Sequence[dict[str, Any]], config: JobConfig, tokenizer: Tokenizer) -> None:
    """Warn of rows that are <unk> in part. Raises UserError for a prompt or an answer that is nothing else."""
    unknown = tokenizer.unknown_id
    if unknown is None or config.environment.uses_gateway:  # an agent writes the prompts itself
        return
    total = lost = 0
    example = ""
    for row in rows:
        for column, text in _texts(row, config):
            ids = tokenizer.encode(text)
            missing = ids.count(unknown)
            if ids and missing == len(ids):
                raise UserError(
                    f"rollout.dataset = {config.rollout.dataset!r}: the tokenizer of {tokenizer.directory} knows no "
                    f"part of {text[:60]!r} (column {column!r}), so the policy would see only unknown tokens: take a "
                    "dataset that suits the checkpoint, or another checkpoint"
                )
            total, lost, example = total + len(ids), lost + missing, example or (text if missing else "")
    if lost > WARN_SHARE * total:
        logger.warning(
            "%.1f %% of the dataset's tokens are unknown to the tokenizer of %s, as in %r: the policy can neither read "
            "nor write that text", 100 * lost / total, tokenizer.directory, example[:60],
        )  # fmt: skip


def _texts(row: dict[str, Any], config: JobConfig) -> Iterator[tuple[str, str]]:
    """Yield the texts that the policy reads or has to write, each with its column."""
    columns = [config.rollout.prompt_column]
    if config.job.stage == "sft":
        columns.append(config.sft.completion_column)
    elif NEEDS_ANSWER & set(config.rewards.functions):
        columns.append(config.rewards.answer_column)
    for column in columns:
        value = row.get(column)
        parts = [value]
        if isinstance(value, list):
            parts = [message.get("content") for message in value]
        yield from ((column, part) for part in parts if isinstance(part, str) and part.strip())


def vocabulary_of(config: JobConfig) -> int | None:
    """Return the number of the model's tokens; None if that cannot be read, for which another check says why."""
    try:
        return read_shape(config).vocab_size
    except UserError:
        return None


def refuse_surplus_tokens(rows: Sequence[dict[str, Any]], maker: PromptMaker, vocabulary: int | None) -> None:
    """Raise UserError for a row with a token that the model does not have, though its tokenizer does.

    vocabulary: the number of the model's tokens. Nothing is tokenised where the model has all of the tokenizer's.
    """
    tokenizer = maker.renderer.tokenizer
    if vocabulary is None or tokenizer.vocab_size <= vocabulary:
        return
    for index, row in enumerate(rows):
        prompt = maker.make(row, index)
        if (token := max(maker.tokens(prompt), default=0)) >= vocabulary:
            raise UserError(
                f"a row of the dataset ({str(prompt.text)[:60]!r}) holds the token "
                f"{tokenizer.decode([token], skip_special=False)!r}, number {token}, or the chat template writes it "
                f"there: the model in {tokenizer.directory} has only "
                f"{vocabulary} tokens. Take the row out, or a checkpoint whose model has all tokens of its tokenizer"
            )
