"""From the tokens of a turn to its thought, its answer and its calls."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Protocol

from torchtitan.rollout.conversation.marks import any_of, known_marks, only_tokens, shield
from torchtitan.rollout.conversation.thoughts import OPENED_TOKENS, THOUGHT_MARKS, Turn, opened_by, read_turn
from torchtitan.rollout.conversation.tool_formats.format import Schemas
from torchtitan.rollout.conversation.tool_formats.registry import FORMATS


class Vocabulary(Protocol):
    """What is needed of a tokenizer."""

    added_tokens: dict[str, int]
    unseen_texts: frozenset[str]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str: ...


class TurnReader:
    """Reads the turns of a policy with this tokenizer."""

    def __init__(self, tokenizer: Vocabulary, tool_format: str = ""):
        """tool_format: a name of FORMATS; without it, or for a parser of the user's own, calls are not told apart."""
        self._tokenizer, self._form = tokenizer, FORMATS.get(tool_format)
        form = self._form
        thoughts = {mark for group in THOUGHT_MARKS for mark in group}
        known = known_marks((*THOUGHT_MARKS, *(form.marks if form else ())), tokenizer.added_tokens.keys())
        self._spelled = {tokenizer.added_tokens[mark]: mark for mark in known}
        self._shielded = any_of(only_tokens(known | thoughts))
        self.hidden = frozenset(self._spelled.values()) & tokenizer.unseen_texts
        """The marks that the text of a turn does not show"""

    def marked(self, ids: Sequence[int]) -> str:
        """Return tokens as marked text (marks.py). Special tokens that are no marks are left out, as by `decode`."""
        parts: list[str] = []
        for is_mark, tokens in itertools.groupby(ids, lambda token: token in self._spelled):
            if is_mark:
                parts += [self._spelled[token] for token in tokens]
            else:
                parts.append(shield(self._tokenizer.decode(list(tokens)), self._shielded))
        return "".join(parts)

    def opened(self, prompt_ids: Sequence[int]) -> str:
        """Return the beginning of the policy's turn that a prompt has already, such as the `<think>` of some chat
        templates, as marked text; empty if there is none."""
        return opened_by(self.marked(prompt_ids[-OPENED_TOKENS:]))

    def read(self, prompt_ids: Sequence[int], ids: Sequence[int], tools: Schemas | None = None) -> Turn:
        """Return the turn that was sampled behind a prompt. tools: the functions that it may call; without any, a call
        is part of the answer."""
        return self.read_marked(self.opened(prompt_ids), self.marked(ids), tools)

    def read_marked(self, opened: str, text: str, tools: Schemas | None = None) -> Turn:
        """Return the turn with this marked text behind a prompt that has opened it so."""
        if self._form is None or not tools:
            return read_turn(text, opened)
        return self._form.read(text, opened, tools)


@functools.lru_cache(16)
def reader_of(tokenizer: Vocabulary, tool_format: str = "") -> TurnReader:
    """Return the reader of a tokenizer, which is made once."""
    return TurnReader(tokenizer, tool_format)
