"""What of a turn is the policy's thought and what its answer: one definition for all families of models.

- Families with tags (`<think>…</think>`, Magistral's `[THINK]…[/THINK]`): the thought is what stands between them. A
  thought that is not closed goes on to the end. A closing tag without an opening one closes a thought that began with
  the turn. The answer is the rest.
- gpt-oss writes messages with a channel each (harmony.py): `analysis` is its thought, `final` its answer.

A prompt may have opened the thought; `opened_by` returns that beginning of the turn. All texts are marked (marks.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from torchtitan.rollout.conversation.harmony import (
    CHANNEL_MARKS,
    OPENED_MESSAGE,
    ROLE,
    Message,
    has_channels,
    is_well_formed,
    read_messages,
)
from torchtitan.rollout.conversation.marks import Group, bare, plain


class Tag(NamedTuple):
    """The text that opens a thought, and the text that closes it."""

    opening: str
    closing: str


TAGS = (
    Tag("<think>", "</think>"),
    Tag("[THINK]", "[/THINK]"),  # Magistral
    Tag("<seed:think>", "</seed:think>"),  # Seed-OSS
    Tag("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A Reasoning
    Tag("<|channel>thought", "<channel|>"),  # Gemma 4: a token, and the channel's name as text
)
THOUGHT_MARKS: tuple[Group, ...] = (*TAGS[:-1], ("<|channel>", "<channel|>"), CHANNEL_MARKS)

CLOSINGS = {tag.opening: bare(re.escape(tag.closing)) for tag in TAGS}
TAG_TEXTS = [text for tag in TAGS for text in tag]
TAG_PATTERNS = [re.escape(text) for text in TAG_TEXTS]
OPENED_TAG = bare(*(rf"{re.escape(tag.opening)}\s*(?:{re.escape(tag.closing)}\s*)?\Z" for tag in TAGS))
# How many tokens at the end of a prompt are searched for the beginning of a thought.
OPENED_TOKENS = 32

KIND_OF_CHANNEL: dict[str, Literal["thought", "answer", "other"]] = {
    "analysis": "thought",
    "final": "answer",
    "": "answer",  # it has no channel
}


class Part(NamedTuple):
    """A part of a turn."""

    kind: Literal["thought", "answer", "call", "other"]
    """Other: a message of gpt-oss that is neither, such as words beside a call"""
    text: str
    """Without the marks around it"""
    written: str
    """As the policy has written it: with its tags, and without what the prompt had already"""
    tag: str = ""
    """What opens a thought; empty if nothing does"""
    closed: bool = True
    calls: Sequence[Any] = ()
    """What a format of tool calls reads in it"""
    end: int = 0
    """Where it ends in the marked text of the turn, with what the prompt has of it"""


class CallReader(Protocol):
    """Reads calls of tools, of one format (tool_formats/)."""

    opening: re.Pattern[str]
    """What begins a call"""

    def read_call(self, text: str, found: re.Match[str]) -> tuple[Sequence[Any], int]:
        """Return the calls at `found`, and where the text goes on behind them."""

    def read_message(self, message: Message) -> Sequence[Any]:
        """Return the calls of a message with a recipient."""


@dataclass(frozen=True)
class Turn:
    """A turn of the policy."""

    parts: list[Part]
    well_formed: bool
    """Whether it is one closed thought and then an answer that is not blank (for gpt-oss, harmony.is_well_formed)"""
    channels: bool = False
    """Whether its parts are messages of gpt-oss"""

    @property
    def thought(self) -> str | None:
        """The text of its thoughts; None if it has none."""
        thoughts = [plain(part.text) for part in self.parts if part.kind == "thought"]
        return "\n\n".join(thoughts) if thoughts else None

    @property
    def final_text(self) -> str:
        """Its answer: what is neither a thought nor a call. White space beside those belongs to neither."""
        texts = []
        for place, part in enumerate(self.parts):
            if part.kind == "answer":
                text = plain(part.text)
                text = text.lstrip() if place > 0 else text
                texts.append(text.rstrip() if place < len(self.parts) - 1 else text)
        return "\n\n".join(filter(None, texts))

    @property
    def beside_thoughts(self) -> str:
        """All but its thoughts, for a parser of calls that nobody here knows."""
        if not self.channels:
            return self.final_text
        return "\n".join(plain(part.text) for part in self.parts if part.kind != "thought")

    @property
    def calls(self) -> list[Any]:
        """What a format of tool calls reads in it, outside of its thoughts."""
        return [call for part in self.parts for call in part.calls]

    def shown(self, hidden: Collection[str] = ()) -> str:
        """Return the text that a program sees: all but calls that could be read, and thoughts without visible tags.

        hidden: marks that are special tokens, which the text of a turn does not show.
        """
        seen = [part for part in self.parts if not self._leaves_out(part, hidden)]
        separator = "\n" if self.channels else ""
        text = separator.join(part.written for part in seen if part.written)
        if hidden:
            text = bare(*map(re.escape, sorted(hidden))).sub("", text)
        return plain(text) if self.channels or len(seen) == len(self.parts) else plain(text).strip()

    def _leaves_out(self, part: Part, hidden: Collection[str]) -> bool:
        if part.kind == "thought":
            return self.channels or part.tag.startswith(tuple(hidden))
        return part.kind == "call" and not any(isinstance(call, Exception) for call in part.calls)


def opened_by(prompt: str) -> str:
    """Return the beginning of a turn that the end of its prompt has already: the tag of an open thought, an empty
    thought, or the header of a message; empty if there is none."""
    if message := OPENED_MESSAGE.search(prompt):
        return message["opened"]
    tag = OPENED_TAG.search(prompt)
    return tag[0] if tag else ""


def last_text(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """Return a completion's text; of chat messages, the last one of the policy: a truncated conversation may end with a
    tool's result, which is not an answer."""
    if isinstance(completion, str):
        return completion
    return next((str(message["content"]) for message in reversed(completion) if message["role"] == ROLE), "")


def split_thought(text: str) -> tuple[str, str]:
    """Return (the thoughts, the rest) of a turn's text as programs see it, by its tags and without white space at the
    ends of both."""
    turn = Turn(_split_at_tags(text, 0, None), well_formed=False)
    return (turn.thought or "").strip(), turn.final_text.strip()


def read_turn(text: str, opened: str = "", reader: CallReader | None = None) -> Turn:
    """Return the parts of a turn.

    Args:
        text: the turn in marked text.
        opened: what `opened_by` returns for its prompt.
        reader: reads the calls outside of thoughts; without it, a call is part of the answer.
    """
    turn = opened + text
    if has_channels(turn):
        messages = read_messages(turn)
        if not any(message.has_structure for message in messages):  # bare text, which nothing says to be a thought
            text = messages[0].header.removeprefix(f"{ROLE} ")
            return Turn([Part("answer", text, text, end=len(turn))], False, True)
        return Turn([_part_of(message, reader) for message in messages], is_well_formed(messages), True)
    parts = _split_at_tags(turn, len(opened), reader)
    return Turn(parts, _thinks_then_answers(parts))


def _part_of(message: Message, reader: CallReader | None) -> Part:
    """Return a message of gpt-oss as a part."""
    content = message.content or ""
    if message.role != ROLE:
        return Part("other", content, "", end=message.place)
    kind = KIND_OF_CHANNEL.get(message.channel, "other")
    if not message.recipient:
        written = content if kind != "other" or message.channel == "commentary" else ""
        return Part(kind, content, written, end=message.place)
    calls = reader.read_message(message) if reader is not None else ()
    return Part("thought" if kind == "thought" else "call", content, content, calls=calls, end=message.place)


def _split_at_tags(turn: str, begin: int, reader: CallReader | None) -> list[Part]:
    """Return the parts of a turn whose thoughts stand between tags. begin: where the policy's own text begins."""
    if reader is None and not any(map(turn.__contains__, TAG_TEXTS)):
        return [Part("answer", turn, turn[begin:], end=len(turn))] if turn else []
    pattern = tags = bare(*TAG_PATTERNS)
    if reader is not None:
        pattern = bare(*TAG_PATTERNS, f"(?P<call>{reader.opening.pattern})")
    parts: list[Part] = []
    place, stray, unopened = 0, 0, ""

    def add(end: int, kind: Literal["thought", "answer", "call"], text: str, **more: Any) -> None:
        nonlocal place
        if end > place:
            parts.append(Part(kind, text, turn[max(place, begin) : max(end, begin)], end=end, **more))
            place = end

    while (found := pattern.search(turn, place)) is not None:
        add(found.start(), "answer", turn[place : found.start()])
        if reader is not None and found["call"] is not None:
            calls, end = reader.read_call(turn, found)
            if any(isinstance(call, Exception) for call in calls):  # whose text may end a thought
                inside = tags.search(turn, found.end(), end)
                end = inside.start() if inside else end
            add(end, "call", turn[place:end], calls=calls)
        elif (closing := CLOSINGS.get(found[0])) is not None:
            closed = closing.search(turn, found.end())
            text = turn[found.end() : closed.start() if closed else len(turn)]
            add(closed.end() if closed else len(turn), "thought", text, tag=found[0], closed=closed is not None)
        else:
            add(found.end(), "answer", "")
            stray, unopened = len(parts), found[0]
    add(len(turn), "answer", turn[place:])
    if stray:  # all up to the last closing tag that nothing opens
        first = parts[:stray]
        text = ""
        for part in first:
            text += part.written if part.kind == "thought" else part.text
        tag = next(tag.opening for tag in TAGS if tag.closing == unopened)
        written = "".join(part.written for part in first)
        thought = Part("thought", text, written, tag, closed=False, end=first[-1].end)
        parts = [thought, *parts[stray:]]
    return parts


def _thinks_then_answers(parts: Sequence[Part]) -> bool:
    solid = [part for part in parts if part.kind != "answer" or part.text.strip()]
    if not solid:
        return False
    thought, rest = solid[0], solid[1:]
    if thought.kind != "thought" or not thought.tag or not thought.closed or thought.tag in thought.text:
        return False
    kinds = {part.kind for part in rest}
    return "answer" in kinds and "thought" not in kinds
