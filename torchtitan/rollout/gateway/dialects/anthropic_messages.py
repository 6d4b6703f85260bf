"""Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from torchtitan.inference.types import Body
from torchtitan.rollout.gateway.calls import Answer, Call, Choice, WrongCall
from torchtitan.rollout.gateway.conversation_reader import ConversationReader, Piece, Text, Thought, ToolResult, ToolUse
from torchtitan.rollout.gateway.dialects.dialect import Dialect
from torchtitan.rollout.gateway.dialects.request_fields import ToolsBody, read_request, read_tool_choice

ONLY: dict[str, tuple[Any, ...]] = {"container": (None,), "mcp_servers": (None, [])}
ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}


class _Block(Body):
    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: str | list[_Block] | None = None
    is_error: bool | None = None


class _Message(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


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
        conversation = ConversationReader()
        if request.system:
            conversation.add("system", _pieces("system", request.system))
        for message in request.messages:
            conversation.add(message.role, _pieces(message.role, message.content))
        return Call(
            messages=conversation.messages(),
            header=conversation.header,
            tools=tools,
            tools_left_out=left_out,
            max_tokens=request.max_tokens,
            stop=[text for text in request.stop_sequences or () if text],
            must_call=must_call,
            parallel_calls=not chosen.disable_parallel_tool_use,
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


def _pieces(role: str, content: str | list[_Block] | None) -> list[Piece]:
    """Return what a message says. Raises WrongCall for blocks that the policy could not read, such as images."""
    if content is None or isinstance(content, str):
        return [Text(content or "")]
    pieces: list[Piece] = []
    for block in content:
        if block.type == "text":
            pieces.append(Text(block.text))
        elif role == "assistant" and block.type == "thinking":
            pieces.append(Thought(block.thinking))
        elif role == "assistant" and block.type == "tool_use":
            pieces.append(ToolUse(block.id, block.name, block.input))
        elif role == "user" and block.type == "tool_result":
            texts = _pieces("tool", block.content)
            text = "".join(piece.text for piece in texts if isinstance(piece, Text))
            # Environments tell the policy of errors in the same form.
            result = json.dumps({"error": text}, ensure_ascii=False) if block.is_error else text
            pieces.append(ToolResult(block.tool_use_id, result))
        else:
            raise WrongCall(f"text only: content of type {block.type} is not supported here")
    return pieces


def _about(answer: Answer) -> dict[str, Any]:
    usage = {"input_tokens": answer.prompt_tokens, "output_tokens": answer.generated}
    return {"id": f"msg_{answer.name}", "type": "message", "role": "assistant", "model": answer.model, "usage": usage}


def _blocks(choice: Choice) -> list[dict[str, Any]]:
    text = choice.message["content"]
    blocks: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
    for tool_call in choice.calls:
        function = tool_call["function"]
        arguments = json.loads(function["arguments"])
        blocks.append({"type": "tool_use", "id": tool_call["id"], "name": function["name"], "input": arguments})
    return blocks


def _stop(choice: Choice) -> tuple[str, str | None]:
    """Return (stop_reason, stop_sequence)."""
    if choice.stopped_by is not None and not choice.calls:
        return "stop_sequence", choice.stopped_by
    return STOP_REASONS.get(choice.finish, "end_turn"), None
