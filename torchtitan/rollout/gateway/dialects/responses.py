"""OpenAI's responses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from torchtitan.inference.types import Body
from torchtitan.rollout.gateway.calls import Answer, Call, Choice
from torchtitan.rollout.gateway.conversation_reader import ConversationReader, Piece, Text, Thought, ToolResult, ToolUse
from torchtitan.rollout.gateway.dialects.dialect import Dialect
from torchtitan.rollout.gateway.dialects.freeform import TEXT, is_freeform, text_of
from torchtitan.rollout.gateway.dialects.request_fields import ToolsBody, read_request, read_tool_choice

ONLY: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "conversation": (None,),
    "prompt": (None,),
    "top_logprobs": (None, 0),
    "truncation": (None, "disabled"),
}


# What an answer repeats of the request.
ECHOED = ("parallel_tool_calls", "tool_choice", "instructions", "previous_response_id", "metadata")


# Items as they begin in a stream.
EMPTY: dict[str, dict[str, Any]] = {
    "message": {"content": []},
    "function_call": {"arguments": ""},
    "custom_tool_call": {"input": ""},
}


class _Part(Body):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    """Others, such as images, are not text that the policy could read"""
    text: str


class _Item(Body):
    type: Literal[
        "message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"
    ] = "message"
    role: Literal["user", "assistant", "system", "developer"] = "user"
    content: str | list[_Part] | None = ""
    summary: list[_Part] = []
    call_id: str = ""
    name: str = ""
    arguments: str = "{}"
    input: str = ""
    output: str | list[_Part] = ""


class _Format(Body):
    type: Literal["text"] = "text"


class _Text(Body):
    format: _Format | None = None


class _Request(ToolsBody):
    input: str | list[_Item] = Field(min_length=1)
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    text: _Text | None = None
    include: list[str] | None = None
    stream: bool | None = None


class OpenAIResponses(Dialect):
    """POST /v1/responses."""

    path = "/v1/responses"
    # Codex compacts its conversation then; it takes a status other than 200 for the end.
    streams_full_context = True

    def read(self, data: Mapping[str, Any], recall: Callable[[str], list[dict[str, Any]]]) -> Call:
        request, functions, left_out = read_request(data, _Request, ONLY, "parameters")
        tools, must_call = read_tool_choice(functions, data.get("tool_choice"))
        # Instructions are those of one call and do not come back with the conversation.
        conversation = ConversationReader()
        if request.instructions:
            conversation.add("system", [Text(request.instructions)])
        if request.previous_response_id:
            for message in recall(request.previous_response_id.removeprefix("resp_")):
                conversation.add_message(message)
        for item in [_Item(content=request.input)] if isinstance(request.input, str) else request.input:
            role = "assistant" if item.type in ("reasoning", "function_call", "custom_tool_call") else item.role
            conversation.add(role, _pieces(item))
        return Call(
            messages=conversation.messages(),
            header=conversation.header,
            tools=tools,
            max_tokens=request.max_output_tokens,
            must_call=must_call,
            parallel_calls=request.parallel_tool_calls is not False,
            freeform=frozenset(tool["name"] for tool in request.tools or () if is_freeform(tool, tool)),
            echo={key: data[key] for key in ECHOED if data.get(key) is not None},
            tools_left_out=left_out,
            log_probs="message.output_text.logprobs" in (request.include or ()),
            stream=bool(request.stream),
            preamble=int(bool(request.instructions)),
        )

    def write(self, call: Call, answer: Answer) -> dict[str, Any]:
        (choice,) = answer.choices
        usage = {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": answer.generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.generated,
        }
        cut = choice.completion.finish_reason == "length"
        return {
            **_about(call, answer),
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": _items(call, answer, choice),
            "usage": usage,
        }

    def opening(self, call: Call, answer: Answer) -> Iterator[dict[str, Any]]:
        yield {"type": "response.created", "response": _unfinished(call, answer)}
        yield from self.waiting(call, answer)

    def waiting(self, call: Call, answer: Answer) -> Iterator[dict[str, Any]]:
        yield {"type": "response.in_progress", "response": _unfinished(call, answer)}

    def failure(
        self, call: Call, answer: Answer, message: str, status: int, code: str | None
    ) -> Iterator[dict[str, Any]]:
        error = {"code": code or "server_error", "message": message}
        yield {"type": "response.failed", "response": {**_unfinished(call, answer), "status": "failed", "error": error}}

    def frame(self, event: dict[str, Any], number: int) -> bytes:
        return super().frame({**event, "sequence_number": number}, number)

    def events(self, call: Call, answer: Answer) -> Iterator[dict[str, Any]]:
        (choice,) = answer.choices
        for index, item in enumerate(_items(call, answer, choice)):
            place = {"item_id": item["id"], "output_index": index}
            started_item = {**item, **EMPTY[item["type"]], "status": "in_progress"}
            yield {"type": "response.output_item.added", "output_index": index, "item": started_item}
            if item["type"] == "message":
                place["content_index"] = 0
                (part,) = item["content"]
                text, scored = {"text": part["text"]}, {"logprobs": part["logprobs"]}
                yield {"type": "response.content_part.added", **place, "part": {**part, "text": "", "logprobs": []}}
                yield {"type": "response.output_text.delta", **place, "delta": part["text"], **scored}
                yield {"type": "response.output_text.done", **place, **text, **scored}
                yield {"type": "response.content_part.done", **place, "part": part}
            elif item["type"] == "custom_tool_call":
                kind = "response.custom_tool_call_input"
                yield {"type": f"{kind}.delta", **place, "delta": item["input"]}
                yield {"type": f"{kind}.done", **place, "input": item["input"]}
            else:
                arguments, kind = item["arguments"], "response.function_call_arguments"
                yield {"type": f"{kind}.delta", **place, "delta": arguments}
                yield {"type": f"{kind}.done", **place, "name": item["name"], "arguments": arguments}
            yield {"type": "response.output_item.done", "output_index": index, "item": item}
        done = self.write(call, answer)
        yield {"type": f"response.{done['status']}", "response": done}


def _pieces(item: _Item) -> list[Piece]:
    if item.type == "function_call":
        return [ToolUse(item.call_id, item.name, item.arguments)]
    if item.type == "custom_tool_call":
        return [ToolUse(item.call_id, item.name, {TEXT: item.input})]
    if item.type in ("function_call_output", "custom_tool_call_output"):
        return [ToolResult(item.call_id, _text(item.output))]
    if item.type == "reasoning":
        return [Thought(_text(item.content) or _text(item.summary))]
    if isinstance(item.content, list):
        return [Text(part.text) for part in item.content]
    return [Text(item.content or "")]


def _text(content: str | list[_Part] | None) -> str:
    if isinstance(content, list):
        return "".join(part.text for part in content)
    return content or ""


def _about(call: Call, answer: Answer) -> dict[str, Any]:
    return {
        "id": f"resp_{answer.name}",
        "object": "response",
        "created_at": answer.created,
        "model": answer.model,
        "error": None,
        "incomplete_details": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [_tool(call, tool["function"]) for tool in call.tools],
        "max_output_tokens": call.max_tokens,
        "text": {"format": {"type": "text"}},
        **call.echo,
    }


def _tool(call: Call, function: dict[str, Any]) -> dict[str, Any]:
    if function["name"] in call.freeform:
        return {"type": "custom", "name": function["name"], "description": function["description"]}
    return {"type": "function", "strict": False, **function}


def _unfinished(call: Call, answer: Answer) -> dict[str, Any]:
    """Return a response that is not there yet."""
    return {**_about(call, answer), "status": "in_progress", "output": [], "usage": None}


def _items(call: Call, answer: Answer, choice: Choice) -> list[dict[str, Any]]:
    """Return the output items of an answer."""
    items: list[dict[str, Any]] = []
    text = choice.message["content"]
    if text is not None:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": choice.log_probs or []}
        items.append({"type": "message", "id": f"msg_{answer.name}", "role": "assistant", "content": [part]})
    for tool_call in choice.calls:
        function = tool_call["function"]
        if function["name"] in call.freeform:
            text = text_of(function["arguments"])
            about = {"call_id": tool_call["id"], "name": function["name"], "input": text}
            items.append({"type": "custom_tool_call", "id": f"ctc_{tool_call['id']}", **about})
        else:
            items.append(
                {"type": "function_call", "id": f"fc_{tool_call['id']}", "call_id": tool_call["id"], **function}
            )
    status = "incomplete" if choice.completion.finish_reason == "length" else "completed"
    return [{**item, "status": status} for item in items]
