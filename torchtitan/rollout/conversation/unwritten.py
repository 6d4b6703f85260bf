"""What a chat template leaves out: parts of a demonstrated answer, which would not be trained, and keys of messages.

A template is a program, so what it writes is found by rendering: an answer whose texts end with marks, or messages that
record which of their keys are asked for.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torchtitan.errors import UserError
from torchtitan.rollout.conversation.messages import ASSISTANT, Messages, plain_message
from torchtitan.rollout.conversation.thoughts import TAGS
from torchtitan.rollout.conversation.tokenizer import ChatRenderer, Tokenizer

logger = logging.getLogger(__name__)

CLOSINGS = re.compile(f"({'|'.join(re.escape(tag.closing) for tag in TAGS)})")
OPENINGS = re.compile("|".join(re.escape(tag.opening) for tag in TAGS))
# Keys that need no word: what every template reads or this project does, and what ties a result to its call.
KNOWN_KEYS = {"role", "content", "reasoning_content", "tool_calls", "weight", "train", "tool_call_id"}
# Conversations that are rendered to find out whether a template ever reads a key.
TRIES = 20


class AnswerCheck:
    """Refuses demonstrated answers that would be trained only in part."""

    def __init__(self, tokenizer: Tokenizer, renderer: ChatRenderer):
        self._tokenizer, self._stops = tokenizer, frozenset(renderer.stop_token_ids)
        texts = [tokenizer.decode([token], skip_special=False) for token in renderer.stop_token_ids]
        self._stop_texts = tuple(text for text in texts if text)
        self._written: set[tuple[object, ...]] = set()
        """Kinds of answers of which the template writes everything"""

    def refuse_unwritten(self, messages: Messages, answer: dict[str, Any], tools: Messages = ()) -> None:
        """Raise UserError if the template leaves out the thought, the text or a call of an answer to `messages`, or
        writes it behind a token that ends the turn. Answers that have the same parts are looked at once."""
        for what, text in (("thought", answer.get("reasoning_content", "")), ("text", answer["content"])):
            if rest := self.cut_off(text, behind_last=False):
                raise UserError(f"the {what} of an answer goes on behind a token that ends a turn: {rest[:60]!r}")
        marked, marks = self._mark(answer)
        kind = (*sorted(marks.values()), messages[-1]["role"], bool(tools))
        if kind in self._written:
            return
        before = self._tokenizer.render_chat(messages, tools=tools)
        text = self._tokenizer.render_chat([*messages, marked], False, tools)
        if not text.startswith(before):
            return  # ChatRenderer.answered finds no answer then
        text = text[len(before) :]
        lost = [what for mark, what in marks.items() if mark not in text]
        end = max((text.rindex(mark) for mark in marks if mark in text), default=0)
        directory = self._tokenizer.directory
        if lost:
            raise UserError(
                f"the chat template of {directory} does not write the {' and the '.join(lost)} of an answer, so "
                "it would not be trained: take a template that does (chat_template.jinja there), or rows without it"
            )
        ends = [token for token in self._tokenizer.encode_shielded(text[:end]) if token in self._stops]
        if ends:
            stop = self._tokenizer.decode(ends[:1], skip_special=False)
            raise UserError(
                f"the chat template of {directory} writes {stop!r}, which ends a turn, before the end of an answer, so "
                "the rest would not be trained: take a template and end tokens (rollout.stop_token_ids, "
                "generation_config.json) that belong together"
            )
        self._written.add(kind)

    def cut_off(self, text: str, behind_last: bool) -> str:
        """Return what of an answer's text stands behind its first (or last) token that ends a turn; empty if nothing
        but more of these and white space does."""
        if not any(stop in text for stop in self._stop_texts):
            return ""
        ids = self._tokenizer.encode(text)
        ends = [place for place, token in enumerate(ids) if token in self._stops]
        if not ends:
            return ""
        end = ends[-1] if behind_last else ends[0]
        rest = [token for token in ids[end + 1 :] if token not in self._stops]
        return self._tokenizer.decode(rest, skip_special=False).strip()

    def _mark(self, answer: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the answer with a mark at the end of all that it says, and what each mark is the end of."""
        marks: dict[str, str] = {}
        name = f"mark{secrets.token_hex(8)}"  # random, so that no message contains it

        def mark(what: str) -> str:
            marks[f"{name}x{len(marks)}x"] = what
            return [*marks][-1]

        marked = dict(answer)
        if thought := self._without_stops(answer.get("reasoning_content", "")):
            marked["reasoning_content"] = thought + mark("thought (reasoning_content, reasoning or thinking)")
        *thoughts, text = CLOSINGS.split(answer["content"])
        # Each thought is followed by what closes it.
        for place in range(0, len(thoughts), 2):
            if OPENINGS.sub("", thoughts[place]).strip():
                thoughts[place] = thoughts[place].rstrip() + mark("thought in the content")
        if text := self._without_stops(text):
            text += mark("content")
        marked["content"] = "".join([*thoughts, text])
        calls: list[dict[str, Any]] = []
        for call in answer.get("tool_calls", ()):
            function = call.get("function", call)
            if isinstance(arguments := function["arguments"], dict):
                argument = mark(f"call number {len(calls) + 1} (tool_calls)")
                function = {**function, "arguments": {**arguments, argument: argument}}
            calls.append({**call, "function": function} if "function" in call else function)
        return (marked | {"tool_calls": calls} if calls else marked), marks

    def _without_stops(self, text: str) -> str:
        text = text.rstrip()
        while text.endswith(self._stop_texts):
            stop = next(filter(text.endswith, self._stop_texts))
            text = text.removesuffix(stop).rstrip()
        return text


class _Recorded(dict[str, Any]):
    """A message that records which of its values are asked for."""

    def __init__(self, message: dict[str, Any]):
        super().__init__(message)
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return super().get(key, default)

    def items(self) -> Any:
        self._read.update(self)
        return super().items()

    def values(self) -> Any:
        self._read.update(self)
        return super().values()


def warn_of_unread_keys(conversations: Iterable[tuple[int, Messages, Messages]], tokenizer: Tokenizer) -> None:
    """Log one warning that names the keys of messages which the chat template never reads, without those that are empty
    everywhere. conversations: (number of the row, messages as rows have them, tools)."""
    tried, read, first = Counter[str](), set[str](), dict[str, int]()
    for number, messages, tools in conversations:
        recorded = [_Recorded(plain_message(message)) for message in messages]
        others = dict.fromkeys(key for message in recorded for key in _other_keys(message))
        asked = [key for key in others if key not in read and tried[key] < TRIES]
        if not asked:
            continue
        for message in recorded:
            # A copy would be rendered in its place; AnswerCheck looks at thoughts.
            message.pop("reasoning_content", None)
        answered = recorded[-1]["role"] == ASSISTANT
        try:
            tokenizer.render_chat(recorded, not answered, tools)
        except UserError:
            continue  # making the prompt says why
        read |= {key for message in recorded for key in message._read}
        tried.update(asked)
        for key in asked:
            first.setdefault(key, number)
    unread = [f"{key!r} (row {number})" for key, number in first.items() if key not in read]
    if unread:
        logger.warning(
            "the chat template of %s does not read these keys of messages, so the policy does not see them: %s",
            tokenizer.directory, ", ".join(unread),
        )  # fmt: skip


def _other_keys(message: dict[str, Any]) -> list[str]:
    empty: tuple[object, ...] = ("", [], {})
    known = KNOWN_KEYS | {"name"} if message["role"] == "tool" else KNOWN_KEYS
    return [key for key, value in dict.items(message) if key not in known and value not in empty]
