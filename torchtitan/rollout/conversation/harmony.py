"""Harmony, the form of gpt-oss' turns: messages with a role, a channel, perhaps a recipient, and a content.

    <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>

The prompt ends with `<|start|>assistant`, so the first message of a turn begins behind its role.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan.rollout.conversation.marks import bare

CHANNEL, MESSAGE, START, CONSTRAIN = "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
CHANNEL_MARKS = (CHANNEL, MESSAGE, START, CONSTRAIN, *ENDS)
ROLE = "assistant"

ANY_MARK = bare(*map(re.escape, CHANNEL_MARKS))
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
# Of a prompt: a message of the assistant that has begun and not ended.
OPENED_MESSAGE = bare(rf"{re.escape(START)}{ROLE}(?P<opened>(?:(?!{'|'.join(map(re.escape, (START, *ENDS)))}).)*)\Z")


@dataclass
class Message:
    """A message, as far as it was written."""

    header: str
    """What stands before its channel: the role, which the first message of a turn lacks, and perhaps the recipient"""
    about: str = ""
    """What stands behind `<|channel|>`: the channel, and perhaps recipient and type of content"""
    content: str | None = None
    """None if the message has no `<|message|>`"""
    end: str = ""
    """The mark that ends it; empty if none does"""
    stray: bool = False
    """Whether there is text or a mark in it, or behind its end, where none belongs"""
    place: int = 0
    """Where it ends in the text, with the mark that ends it"""

    @property
    def role(self) -> str:
        return self.header.split(maxsplit=1)[0] if self.header.strip() else ""

    @property
    def channel(self) -> str:
        return self.about.split(maxsplit=1)[0] if self.about.strip() else ""

    @property
    def recipient(self) -> str:
        """The function that it calls; empty if it calls none."""
        found = RECIPIENT.search(f"{self.header} {self.about}") if self.role == ROLE else None
        return found[1] if found else ""

    @property
    def has_structure(self) -> bool:
        """Whether it has a channel or a content, and not only text where its header belongs."""
        return bool(self.about) or self.content is not None


def has_channels(text: str) -> bool:
    """Whether marked text has any of harmony's marks."""
    return "<|" in text and ANY_MARK.search(text) is not None  # most texts have none, and the pattern is slow


def read_messages(text: str) -> list[Message]:
    """Return the messages of a turn in marked text, well-formed or not."""
    places = list(ANY_MARK.finditer(text))
    bounds = [*(place.start() for place in places), len(text)]
    message = Message(f"{ROLE} {text[: bounds[0]]}", place=bounds[0])
    messages = [message]
    for place, end in zip(places, bounds[1:], strict=True):
        mark, following = place[0], text[place.end() : end]
        if mark == START:
            message.stray |= not message.end and place.start() > 0
            message = _next(messages, Message(following), replace=place.start() == 0)
        elif mark == CHANNEL:
            if message.content is not None or message.about:  # it begins a message without saying so
                message = _next(messages, Message(ROLE, stray=True))
            message.about = following or " "
        elif mark == MESSAGE and message.content is None:
            message.content = following
        elif mark in ENDS:
            message.stray |= bool(message.end) or bool(following.strip())
            message.end = message.end or mark
        elif mark == CONSTRAIN and message.content is None:
            message.about += f" {following}"
        else:
            message.stray = True
            message.content = f"{message.content or ''}{following}"
        message.place = place.end() if mark in ENDS else end
    return messages


def _next(messages: list[Message], message: Message, replace: bool = False) -> Message:
    """Add a message, or put it in the place of the first one."""
    messages[-1:] = [message] if replace else [messages[-1], message]
    return message


def is_well_formed(messages: Sequence[Message]) -> bool:
    """Whether the messages are one or more thoughts, perhaps words beside them, and one answer that is not blank."""
    *before, answer = messages
    channels = [message.channel for message in before]
    if channels[:1] != ["analysis"] or not set(channels) <= {"analysis", "commentary"} or answer.channel != "final":
        return False
    for message in messages:
        if message.header.strip() != ROLE or message.content is None or message.stray or message.recipient:
            return False
    closed = all(message.end == "<|end|>" and message.about.strip() == message.channel for message in before)
    return closed and bool((answer.content or "").strip())
