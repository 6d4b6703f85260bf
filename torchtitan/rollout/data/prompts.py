"""Prompts: what becomes of a row, tokenised, and the first held-out ones."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from torchtitan.config.job_config import JobConfig
from torchtitan.config.source_configs import source_name
from torchtitan.config.teachers import hint_column
from torchtitan.errors import UserError
from torchtitan.rollout.conversation.marks import plain
from torchtitan.rollout.conversation.messages import plain_message, plain_tools
from torchtitan.rollout.conversation.results import settle_results
from torchtitan.rollout.conversation.tokenizer import ChatRenderer, Tokenizer
from torchtitan.rollout.conversation.turns import reader_of
from torchtitan.rollout.types import Prompt


class PromptMaker:
    """Makes Prompts from dataset rows; shared by training and evaluation.

    Reward functions see the prompt as it is in the dataset (text stays text), not as the chat template renders it.
    """

    def __init__(self, config: JobConfig, tokenizer: Tokenizer):
        self._rollout = config.rollout
        self._source = source_name(config)
        self._answer_column = config.rewards.answer_column
        self._hint_column, self._hint_template = hint_column(config), config.distill.hint_template
        self._tokenizer = tokenizer
        self.renderer = ChatRenderer(tokenizer, config.rollout.stop_token_ids)
        self.longest = config.training.seq_len - config.rollout.max_completion_tokens
        """Longest prompt, in tokens, that leaves room for a whole completion within training.seq_len"""
        self.limit = f"training.seq_len - rollout.max_completion_tokens = {self.longest}"
        self.tools: list[dict[str, Any]] = []
        """JSON schemas of the environment's tools, which chat templates write into prompts"""
        self._has_environment = config.environment.is_used
        if self._rollout.chat_template and not tokenizer.has_chat_template:
            raise UserError(
                "rollout.chat_template = true, but the checkpoint's tokenizer files hold no chat template: take an "
                "instruction-tuned checkpoint or set rollout.chat_template = false"
            )

    def make(self, row: dict[str, Any], index: int) -> Prompt:
        """Return the tokenised prompt of a row.

        Raises:
            UserError: the row has chat messages, but the tokenizer has no chat template.
        """
        content = row[self._rollout.prompt_column]
        tools = self._tools_of(row)
        token_ids = self._tokenise(content, tools)
        hint = row.get(self._hint_column) if self._hint_column else None
        hint_ids = None if hint is None else self._tokenise(self._with_hint(content, str(hint)), tools)
        return Prompt(
            index, content, token_ids, self._columns(row), self._prefill(token_ids), hint_ids, source=self._source
        )

    def _with_hint(self, content: str | list[dict[str, Any]], hint: str) -> str | list[dict[str, Any]]:
        last = content if isinstance(content, str) else plain_message(content[-1])
        text = last if isinstance(last, str) else str(last["content"] or "")
        # In one pass, because the texts may have braces of their own.
        parts = {"{prompt}": text, "{hint}": hint}
        text = re.sub(r"{prompt}|{hint}", lambda found: parts[found[0]], self._hint_template)
        return text if isinstance(last, str) else [*content[:-1], {**last, "content": text}]

    def extended(self, prompt: Prompt, text: str) -> list[int]:
        """Return the tokens of a prompt after an environment added `text` to its end, or to its last message."""
        if not text:
            return prompt.token_ids
        if isinstance(prompt.text, str) and not self._rollout.chat_template:
            return prompt.token_ids + self._tokenizer.encode_shielded(self._tokenizer.shield(text))
        messages = self._messages(prompt.text)
        last = messages[-1]
        messages[-1] = {**last, "content": f"{last['content']}{self._tokenizer.shield(text)}"}
        return self._render(messages, self.tools)

    def hinted(self, prompt: Prompt, opening: str, hint: str) -> list[int]:
        """Return the tokens of a prompt as a teacher with this hint reads it. opening: what an environment added to the
        prompt. Neither that nor the hint, which the policy may have written, can spell special tokens."""
        content, opening = prompt.text, self._tokenizer.shield(opening)
        if isinstance(content, str):
            content += opening
        elif opening:
            last = plain_message(content[-1])
            content = [*content[:-1], {**last, "content": f"{last['content'] or ''}{opening}"}]
        with_hint = self._with_hint(content, self._tokenizer.shield(hint))
        return self._tokenise(with_hint, self._tools_of(prompt.columns))

    def fits(self, prompt: Prompt) -> bool:
        return bool(prompt.token_ids) and self.length(prompt) <= self.longest

    def tokens(self, prompt: Prompt) -> set[int]:
        """Return all tokens that the model reads of it."""
        return {*prompt.token_ids, *(prompt.hint_ids or ())}

    def length(self, prompt: Prompt) -> int:
        """Return the number of tokens for which there must be room."""
        return max(len(prompt.token_ids), len(prompt.hint_ids or []))

    def _columns(self, row: dict[str, Any]) -> dict[str, Any]:
        columns = {name: value for name, value in row.items() if name != self._rollout.prompt_column}
        if self._answer_column in columns:
            columns["answer"] = columns[self._answer_column]
        return columns

    def _prefill(self, token_ids: list[int]) -> str:
        return plain(reader_of(self._tokenizer).opened(token_ids))

    def _tools_of(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the environment's tools; without an environment, those in the row's `tools` column, as in TRL."""
        return self.tools if self._has_environment else plain_tools(row.get("tools"))

    def _tokenise(self, content: str | list[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        if isinstance(content, str) and not self._rollout.chat_template:
            return self._tokenizer.encode_prompt(content)
        return self._render(self._messages(content), tools)

    def _render(self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[int]:
        return self._tokenizer.apply_chat_template(self.renderer.readable(messages, tools), tools=tools)

    def _messages(self, content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        messages = settle_results([plain_message(message) for message in messages])
        if self._rollout.system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._rollout.system_prompt})
        return messages


def first_held_out(rows: Sequence[dict[str, Any]], maker: PromptMaker, count: int) -> list[Prompt]:
    """Return the first `count` held-out prompts that fit, in an order that is the same in every run.

    Raises:
        UserError: there are rows, but none fits.
    """
    order = list(range(len(rows)))
    random.Random("held out").shuffle(order)
    prompts: list[Prompt] = []
    for index in order:
        if len(prompts) == count:
            break
        prompt = maker.make(rows[index], index)
        if maker.fits(prompt):
            prompts.append(prompt)
    if order and count and not prompts:
        raise none_fits(f"{len(order)} held-out prompts", maker)
    return prompts


def none_fits(what: str, maker: PromptMaker) -> UserError:
    """Return the error for prompts of which not one has an allowed length."""
    return UserError(
        f"none of the {what} has between 1 and {maker.longest} tokens ({maker.limit}): raise training.seq_len"
    )
