"""Which format a checkpoint's chat template writes calls in: it writes one, and the formats try to read it."""

from __future__ import annotations

import itertools
import secrets
from typing import Any, NamedTuple

from torchtitan.errors import UserError
from torchtitan.rollout.conversation.template_checks import CALL_ID
from torchtitan.rollout.conversation.tokenizer import ChatRenderer, Tokenizer
from torchtitan.rollout.conversation.tool_formats.format import ToolCall
from torchtitan.rollout.conversation.tool_formats.registry import AUTO, FORMATS, find_format
from torchtitan.rollout.conversation.turns import TurnReader

NAME, ARGUMENT = "look", "at"
TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Look.",
        "parameters": {"type": "object", "properties": {ARGUMENT: {"type": "string"}}, "required": [ARGUMENT]},
    },
}
MAX_SHOWN = 200


def detect_format(parser: str, tokenizer: Tokenizer) -> str:
    """Return environment.tool_parser, or instead of "auto" the format in which the chat template writes calls.

    A template that writes none, but only tools, tells its format by its marks (find_format); so does one whose calls no
    format reads, which refuse_unread_calls() refuses.
    """
    shown = find_format(parser, tokenizer.template_source)
    if parser != AUTO or (written := _written_call(tokenizer)) is None:
        return shown
    return _reading_format(tokenizer, written, shown) or shown


def refuse_unread_calls(parser: str, tokenizer: Tokenizer) -> None:
    """Raise UserError if parser is "auto" and no format reads the calls that the chat template writes."""
    if parser != AUTO or (written := _written_call(tokenizer)) is None:
        return
    if not _reading_format(tokenizer, written, find_format(parser, tokenizer.template_source)):
        text = tokenizer.decode(written.ids, skip_special=False)
        raise UserError(
            f"the chat template of {tokenizer.directory} writes calls of tools as {text[:MAX_SHOWN]!r}, which none of "
            f"the formats {', '.join(FORMATS)} reads: set environment.tool_parser to a function of your own that does, "
            "or to one of these if the policy writes calls so or no tools are called"
        )


class _Written(NamedTuple):
    """A call as a template writes it."""

    call: ToolCall
    prompt_ids: list[int]
    ids: list[int]


def _written_call(tokenizer: Tokenizer) -> _Written | None:
    """Return a call that the chat template has written; None if it writes none."""
    if not tokenizer.has_chat_template:
        return None
    value = f"mark{secrets.token_hex(8)}"  # random, so that no template contains it
    call = {"type": "function", "id": CALL_ID, "function": {"name": NAME, "arguments": {ARGUMENT: value}}}
    question = {"role": "user", "content": "?"}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        written = ChatRenderer(tokenizer).answered([question], answer, [TOOL])
        prompt_ids, ids = written or ([], _behind_prompt(tokenizer, question, answer))
    except UserError:
        return None  # rendering the prompts says why
    if value not in tokenizer.decode(ids):
        return None
    return _Written(ToolCall(NAME, {ARGUMENT: value}), prompt_ids, ids)


def _behind_prompt(tokenizer: Tokenizer, question: dict[str, Any], answer: dict[str, Any]) -> list[int]:
    """Return the tokens of an answer that does not begin where the prompt ends: some templates end it with `<think>`,
    and write no thought into a turn that has none."""
    prompt = tokenizer.render_chat([question], tools=[TOOL])
    with_answer = tokenizer.render_chat([question, answer], False, [TOOL])
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(prompt, with_answer, strict=False))
    common = "".join(character for character, _ in same)
    # Tags that begin with the same letters are not the same.
    begin = max(common.rfind(end) + 1 for end in (">", "\n", " "))
    return tokenizer.encode_shielded(with_answer[begin:])


def _reading_format(tokenizer: Tokenizer, written: _Written, first: str) -> str:
    """Return the name of the first format that reads a call, tried in the order of FORMATS behind `first`; empty if
    none does."""
    for form in (first, *FORMATS):
        if TurnReader(tokenizer, form).read(written.prompt_ids, written.ids, [TOOL]).calls == [written.call]:
            return form
    return ""
