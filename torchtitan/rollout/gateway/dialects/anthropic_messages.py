"""Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from torchtitan.inference.types import Body
from torchtitan.rollout.gateway.calls import Answer, Call, Choice, WrongCall
from torchtitan.rollout.gateway.dialects.dialect import Dialect
from torchtitan.rollout.gateway.dialects.request_fields import (
    ToolsBody,
    plain_messages,
    read_request,
    read_tool_choice,
)

ONLY: dict[str, tuple[Any, ...]] = {"container": (None,), "mcp_servers": (None, [])}
ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}


class _Block(Body):
    type: str
    text: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: str | list[_Block] | None = None


class _Message(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""


class _Format(Body):
    format: None = None


class _Request(ToolsBody):
    messages: list[_Message] = Field(min_length=1)
    system: str | list[_Block] = ""
    max_tokens: int | None = Field(None, ge=1)
    tool_choice: _ToolChoice | None = None
    stop_sequences: list[str] | None = None
    stream: bool = False
    output_config: _Format | None = None


class AnthropicMessages(Dialect):
    """POST /v1/messages, and /v1/messages/count_tokens."""

    path = "/v1/messages"
    counting_path = "/v1/messages/count_tokens"

    def read(self, data: Mapping[str, Any], recall: Callable[[str], list[dict[str, Any]]]) -> Call:
        request, functions, left_out = read_request(data, _Request, ONLY, "input_schema")
        chosen = request.tool_choice or _ToolChoice(type="auto")
        choice = {"any": "required", "tool": {"type": "function", "name": chosen.name}}.get(chosen.type, chosen.type)
        tools, must_call = read_tool_choice(functions, choice)
        system = _text(request.system)
        messages = [{"role": "system", "content": system}] if system else []
        for message in request.messages:
            messages += _read_message(message)
        return Call(
            messages=plain_messages(messages),
            tools=tools,
            tools_left_out=left_out,
            max_tokens=request.max_tokens,
            stop=[one for one in request.stop_sequences or () if one],
            must_call=must_call,
            stream=request.stream,
        )

    def write(self, call: Call, answer: Answer) -> dict[str, Any]:
        (choice,) = answer.choices
        reason, sequence = _stop(choice)
        return {**_about(answer), "content": _blocks(choice), "stop_reason": reason, "stop_sequence": sequence}

    def opening(self, call: Call, answer: Answer) -> Iterator[dict[str, Any]]:
        about = {**_about(answer), "content": [], "stop_reason": None, "stop_sequence": None}
        about["usage"] = {**about["usage"], "output_tokens": 0}
        yield {"type": "message_start", "message": about}

    def waiting(self, call: Call, answer: Answer) -> Iterator[dict[str, Any]]:
        yield {"type": "ping"}

    def events(self, call: Call, answer: Answer) -> Iterator[dict[str, Any]]:
        (choice,) = answer.choices
        for index, block in enumerate(_blocks(choice)):
            if block["type"] == "text":
                empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
            else:
                arguments = json.dumps(block["input"], ensure_ascii=False)
                empty, delta = {**block, "input": {}}, {"type": "input_json_delta", "partial_json": arguments}
            yield {"type": "content_block_start", "index": index, "content_block": empty}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
            yield {"type": "content_block_stop", "index": index}
        reason, sequence = _stop(choice)
        end = {"stop_reason": reason, "stop_sequence": sequence}
        yield {"type": "message_delta", "delta": end, "usage": {"output_tokens": answer.generated}}
        yield {"type": "message_stop"}

    def write_count(self, tokens: int) -> dict[str, Any]:
        return {"input_tokens": tokens}

    def error(self, message: str, status: int, code: str | None) -> dict[str, Any]:
        kind = "api_error" if status >= 500 else ERRORS.get(status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}


def _text(content: str | list[_Block] | None) -> str:
    """Return the text of content blocks. Raises WrongCall for others, such as images."""
    if content is None or isinstance(content, str):
        return content or ""
    if wrong := [block.type for block in content if block.type != "text"]:
        raise WrongCall(f"content of type {wrong[0]} is not supported here: the policy reads text")
    return "".join(block.text for block in content)


def _read_message(message: _Message) -> Iterator[dict[str, Any]]:
    """Yield the messages of a template that one message makes: each result of a tool is one of its own."""
    blocks = [_Block(type="text", text=message.content)] if isinstance(message.content, str) else message.content
    kind = {"assistant": "tool_use", "user": "tool_result"}.get(message.role)
    tools, texts = [one for one in blocks if one.type == kind], [one for one in blocks if one.type != kind]
    if kind == "tool_result":
        for one in tools:
            yield {"role": "tool", "tool_call_id": one.tool_use_id, "content": _text(one.content)}
        if not tools or texts:
            yield {"role": "user", "content": _text(texts)}
        return
    said: dict[str, Any] = {"role": message.role, "content": _text(texts)}
    calls = [
        {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.input}} for one in tools
    ]
    yield {**said, "tool_calls": calls} if calls else said


def _about(answer: Answer) -> dict[str, Any]:
    usage = {"input_tokens": answer.prompt_tokens, "output_tokens": answer.generated}
    return {"id": f"msg_{answer.name}", "type": "message", "role": "assistant", "model": answer.model, "usage": usage}


def _blocks(choice: Choice) -> list[dict[str, Any]]:
    text = choice.message["content"]
    blocks: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
    for one in choice.calls:
        function = one["function"]
        arguments = json.loads(function["arguments"])
        blocks.append({"type": "tool_use", "id": one["id"], "name": function["name"], "input": arguments})
    return blocks


def _stop(choice: Choice) -> tuple[str, str | None]:
    """Return (stop_reason, stop_sequence)."""
    if choice.stopped_by is not None and not choice.calls:
        return "stop_sequence", choice.stopped_by
    return STOP_REASONS.get(choice.finish, "end_turn"), None
